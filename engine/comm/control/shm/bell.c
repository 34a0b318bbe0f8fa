/* bell.c: how threads of a rank sleep until a peer has made progress. */
#include "comm/control/shm/bell.h"

#include "comm/control/shm/wait.h"

/* The caller has stored its progress before. With both accesses sequentially consistent, either
 * this load sees the sleeper, or the sleeper's last look sees the progress. The futex call is saved
 * where no thread sleeps. All threads of the rank are woken, since they may wait for different
 * things. */
void ms_shm_wake_line(ms_rank_line *line)
{
    if (!atomic_load(&line->asleep)) return;
    atomic_fetch_add(&line->bell, 1);
    ms_futex_wake_shared(&line->bell, UINT32_MAX);
}

/* The bell is read before the last look: a wake after that changes the bell, and the futex returns
 * at once. */
void ms_shm_sleep(ms_shm_rank *self, ms_wait *wait, uint64_t most_ns)
{
    ms_rank_line *line = &self->control->lines[self->rank];
    uint32_t seen = atomic_load(&line->bell);
    atomic_fetch_add(&line->asleep, 1);
    if (!(wait && wait->kind->reached(wait)) && !atomic_load(&self->control->aborted))
        ms_futex_wait_shared(&line->bell, seen, most_ns);
    atomic_fetch_sub(&line->asleep, 1);
}

/* For reports, which look again and again for a moment. */
void ms_shm_nap(ms_shm_rank *self, uint64_t most_ns) { ms_shm_sleep(self, NULL, most_ns); }

/* Wakes of peers end the sleep early, hence the loop. */
bool ms_shm_sleep_until(ms_shm_rank *self, uint64_t until_ns)
{
    while (!ms_shm_aborted(self)) {
        uint64_t now = ms_shm_now(self);
        if (now >= until_ns) return true;
        ms_shm_sleep(self, NULL, until_ns - now);
    }
    return false;
}
