/* bell.h: how threads of a rank sleep until a peer has made progress. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_BELL_H
#define MOONSHARD_COMM_CONTROL_SHM_BELL_H

#include "comm/control/shm/state.h"

/* Whether the job has ended, for those who have no rank. */
static inline bool ms_shm_ended(const ms_control_file *control)
{
    return atomic_load_explicit(&control->aborted, memory_order_acquire) != 0;
}
static inline bool ms_shm_aborted(const ms_shm_rank *self) { return ms_shm_ended(self->control); }
/* Rings the rank's bell if a thread of it sleeps. */
void ms_shm_wake_line(ms_rank_line *line);
static inline void ms_shm_wake(ms_shm_rank *self, uint32_t rank)
{
    ms_shm_wake_line(&self->control->lines[rank]);
}
/* Sleeps until a peer has made progress, at most this long. With a wait (may be NULL), it does not
 * sleep if what is waited for came after the bell was read. */
typedef struct ms_wait ms_wait;
void ms_shm_sleep(ms_shm_rank *self, ms_wait *wait, uint64_t most_ns);
void ms_shm_nap(ms_shm_rank *self, uint64_t most_ns);
/* Sleeps until then; false: the job has ended. */
bool ms_shm_sleep_until(ms_shm_rank *self, uint64_t until_ns);

#endif
