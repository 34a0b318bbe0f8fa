/* bell.h: how threads of a rank sleep until a peer has made progress. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_BELL_H
#define MOONSHARD_COMM_CONTROL_SHM_BELL_H

#include "comm/control/shm/state.h"

/* Whether the job has ended, for those who have no rank. */
static inline bool ms_host_ended(const ms_control_file *control)
{
    return atomic_load_explicit(&control->aborted, memory_order_acquire) != 0;
}
static inline bool ms_host_aborted(const ms_host *host) { return ms_host_ended(host->control); }
/* Rings the rank's bell if a thread of it sleeps. */
void ms_host_wake_line(ms_rank_line *line);
static inline void ms_host_wake(ms_host *host, uint32_t rank)
{
    ms_host_wake_line(&host->control->lines[rank]);
}
/* Sleeps until a peer has made progress, at most this long. With a wait (may be NULL), it does not
 * sleep if what is waited for came after the bell was read. */
typedef struct ms_wait ms_wait;
void ms_host_sleep(ms_host *host, ms_wait *wait, uint64_t most_ns);
void ms_host_nap(ms_host *host, uint64_t most_ns);
/* Sleeps until then; false: the job has ended. */
bool ms_host_sleep_until(ms_host *host, uint64_t until_ns);

#endif
