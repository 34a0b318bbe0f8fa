/* clock.h: tasks that write down the time at which a stream reaches them. */
#ifndef MOONSHARD_HOOK_CLOCK_H
#define MOONSHARD_HOOK_CLOCK_H

#include "moonshard/exec.h"

/* Enqueues on the engine's current stream: storage[index], a uint64_t, becomes the monotonic time
 * in nanoseconds. The task keeps the storage, so it may outlive whoever asked for the time. out may
 * be NULL. */
ms_status ms_clock_write(ms_engine *engine, ms_storage *storage, size_t index, ms_point *out);

#endif
