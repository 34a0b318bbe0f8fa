/* throttle.c: the link that a job may simulate: shared by all that a rank sends. */
#include "comm/transport/shm/throttle.h"

#include "comm/control/shm/bell.h"

/* The link is busy from the moment when the data are ready. All that this rank sends shares it.
 * Only the stream waits. Without a simulated link it returns at once. The division is done in two
 * parts, so that bytes * 10^9 does not overflow. */
bool ms_local_pace(ms_local *local, uint64_t bytes)
{
    const ms_control_file *control = local->self->control;
    if (control->nodes > 1 || (!control->link_bytes_per_second && !control->link_latency_ns))
        return true;
    const ms_os *os = local->self->files->base.os;
    uint64_t rate = control->link_bytes_per_second;
    uint64_t takes = rate ? bytes / rate * 1000000000u + bytes % rate * 1000000000u / rate : 0;
    uint64_t before = atomic_load(&local->link_free), after, now = os->monotonic_ns(os->user);
    do after = (before > now ? before : now) + takes;
    while (!atomic_compare_exchange_weak(&local->link_free, &before, after));
    return ms_shm_sleep_until(local->self, after + control->link_latency_ns);
}
