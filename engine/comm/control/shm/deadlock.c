/* deadlock.c: deadlock detection: how ranks find out that all of them wait for each other, in calls
 * of any kind.
 *
 * A rank is still while its host blocks and none of its streams can go on by itself: the stream is
 * empty, waits for another stream, or runs a task that waits for a peer. The tasks that wait look
 * for their peers in rounds; in a round each of them looks once. The state of a rank is read piece
 * by piece, so it may change while it is read. Two rounds with the same count of moves (tasks
 * enqueued, finished, or beginning to wait) show that the rank did nothing in between. A task whose
 * wait ends declares a move before it does anything else.
 *
 * A rank that is still watches the others. It finds all of them still, and then notes in `seen` how
 * many rounds each of them has had. Call T a moment between the two. If every rank then goes
 * through MS_STILL_ROUNDS rounds without a move, no rank did anything at T, and none could: what it
 * waits for was not there at T, because a look after T did not find it, and what is there once
 * stays there. Two rounds would not do: the looks of the first may be before T, and a task looks a
 * little before its look is counted.
 *
 * A rank has no rounds, and so no deadlock is found, while its host thread is busy, its link delays
 * it, its process is stopped, or it has not joined. */
#include "comm/control/shm/deadlock.h"

#include "comm/control/shm/wait.h"

#include <stdio.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/job_end.h"

#define MS_STILL_ROUNDS 3
/* A rank that has been still for this time wakes the others, a few times, so that they look around
 * at once. Shorter waits disturb no rank. */
#define MS_PROMPT_NS 20000000
#define MS_PROMPTS 8

/* The lower half of `still`; the upper half numbers the stall, so two of them are never taken
 * for one. */
static uint32_t rounds_of(uint64_t still) { return (uint32_t)still; }

/* A lock between the waiting tasks of this rank. */
static void lock(ms_deadlock_watch *s)
{
    uint32_t open = 0;
    while (!atomic_compare_exchange_weak(&s->lock, &open, 1)) {
        open = 0;
        ms_yield();
    }
}

/* A plain lock of this process' memory: other ranks see only `still`. */
static void unlock(ms_deadlock_watch *s) { atomic_store(&s->lock, 0); }

/* Its streams have ended, so it waits for nothing. */
static bool has_left(const ms_control_file *control, uint32_t rank)
{
    return atomic_load(&control->lines[rank].phase) == MS_RANK_LEFT;
}

/* ------------------------------------------------------------------ deadlock found */

/* The calls in which a rank is: those of its flight record that it has entered and not left.
 * Returns how long the text is, or would be. */
static size_t describe(const ms_shm_rank *self, uint32_t rank, char *text, size_t bytes)
{
    char call[256];
    ms_flight flight;
    const char *between = "";
    uint64_t flights = atomic_load(&self->control->lines[rank].flights);
    bool left = has_left(self->control, rank);
    size_t used = (size_t)snprintf(text, bytes, "\n  rank %u: %s", rank, left ? "has left" : "");
    for (uint64_t i = flights < MS_FLIGHTS ? 0 : flights - MS_FLIGHTS;
         i < flights && used < bytes && !left; i++) {
        if (!ms_shm_flight(self->files, rank, i, &flight) || flight.left_ns) continue;
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", between,
                                 ms_flight_describe(&flight, call, sizeof call));
        between = "; ";
    }
    return used;
}

/* Every rank may be innocent, so none is blamed (-1); the error lists where each one is. */
static void end_job(const ms_shm_rank *self)
{
    char text[MS_ERROR_MESSAGE_BYTES];
    size_t used = (size_t)snprintf(text, sizeof text,
                                   "the ranks wait for each other, and none can go on; a call that "
                                   "others wait for is missing, or comes after a wait:");
    for (uint32_t r = 0; r < self->control->ranks && used < sizeof text; r++)
        used += describe(self, r, text + used, sizeof text - used);
    ms_shm_end_job(self->files, MS_ABORT_MISMATCH, -1, text);
}

/* A rank that has left does not move either: it has 0 in seen. One that leaves while it is watched
 * has moved. */
static bool all_still(const ms_shm_rank *self, uint64_t *seen)
{
    for (uint32_t r = 0; r < self->control->ranks; r++) {
        seen[r] = has_left(self->control, r) ? 0 : atomic_load(&self->control->lines[r].still);
        if (!seen[r] && !has_left(self->control, r)) return false;
    }
    return true;
}

/* Whether each rank is in the same stall as in seen; the fewest rounds that one of them has
 * had since. */
static bool stay_still(const ms_shm_rank *self, const uint64_t *seen, uint32_t *rounds)
{
    *rounds = UINT32_MAX;
    for (uint32_t r = 0; r < self->control->ranks; r++) {
        if (!seen[r]) continue;
        uint64_t still = atomic_load(&self->control->lines[r].still);
        if (!still || still >> 32 != seen[r] >> 32 || has_left(self->control, r)) return false;
        if (rounds_of(still) - rounds_of(seen[r]) < *rounds)
            *rounds = rounds_of(still) - rounds_of(seen[r]);
    }
    return true;
}

/* seen is filled when all ranks have been found still. Over several nodes the agents watch, since
 * what a rank sees of other nodes is some time old. */
static void watch(ms_shm_rank *self)
{
    ms_deadlock_watch *s = &self->deadlock;
    uint64_t found[MS_LOCAL_RANKS_MAX];
    uint32_t rounds;
    if (self->control->nodes > 1) return;
    if (s->watching) {
        s->watching = stay_still(self, s->seen, &rounds);
        if (s->watching && rounds >= MS_STILL_ROUNDS) end_job(self);
    } else
        s->watching =
            all_still(self, found) && all_still(self, s->seen) && stay_still(self, found, &rounds);
}

/* ------------------------------------------------------------------- rounds */

/* Sleepers look around only every 50 ms; woken ones look at once. */
static void prompt_others(ms_shm_rank *self)
{
    for (uint32_t r = 0; r < self->control->ranks; r++)
        if (r != self->rank) ms_shm_wake(self, r);
}

/* The rank is no longer still: peers that watch it see another number. */
static void move(ms_shm_rank *self)
{
    atomic_store(&self->control->lines[self->rank].still, 0);
    self->deadlock.watching = false;
}

/* All waiting tasks have looked once. The rank's own count of moves is compared with that of the
 * round before; `still` grows only if nothing has moved. */
static void end_round(ms_shm_rank *self)
{
    ms_deadlock_watch *s = &self->deadlock;
    _Atomic uint64_t *still = &self->control->lines[self->rank].still;
    uint64_t moves = s->begun;
    bool is_still = ms_engine_is_blocked(self->comm->engine, s->waiting, &moves),
         as_before = moves == s->moves;
    s->looked = 0;
    s->round++;
    s->moves = moves;
    if (!is_still) {
        move(self);
        return;
    }
    uint64_t so_far = atomic_load(still);
    if (so_far && as_before) atomic_store(still, so_far + (rounds_of(so_far) < UINT32_MAX));
    else {
        atomic_store(still, ++s->times << 32 | 1);
        s->since_ns = ms_shm_now(self);
        s->prompts = 0;
    }
    if (s->prompts < MS_PROMPTS && ms_shm_now(self) - s->since_ns >= MS_PROMPT_NS) {
        s->prompts++;
        prompt_others(self);
    }
    watch(self);
}

/* The new wait looks in the present round: its round ends only after it has looked. */
void ms_deadlock_begin(ms_shm_rank *self, ms_wait *wait)
{
    ms_deadlock_watch *s = &self->deadlock;
    lock(s);
    s->waiting++;
    s->begun++;
    wait->looked = s->round;
    unlock(s);
}

/* The last of the waiting tasks that looks ends the round. */
void ms_deadlock_look(ms_shm_rank *self, ms_wait *wait)
{
    ms_deadlock_watch *s = &self->deadlock;
    lock(s);
    if (wait->looked == s->round) {
        wait->looked++;
        s->looked++;
    }
    if (s->looked == s->waiting) end_round(self);
    unlock(s);
}

/* The move is declared before the task does anything else, as the proof above requires. */
void ms_deadlock_end(ms_shm_rank *self, ms_wait *wait)
{
    ms_deadlock_watch *s = &self->deadlock;
    lock(s);
    s->waiting--;
    if (wait->looked > s->round) s->looked--;
    move(self);
    unlock(s);
}
