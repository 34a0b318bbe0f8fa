/* services.h: what the CPU device does beside running kernels. */
#ifndef MOONSHARD_EXEC_CPU_SERVICES_H
#define MOONSHARD_EXEC_CPU_SERVICES_H

#include "exec/cpu/state.h"

/* These slots of the device's table are CPU tasks of the device's own, which they hand to the `run`
 * of the engine's device. So a device that borrows the CPU's kernels can have them. */
void ms_cpu_copy_in(ms_stream *stream, const ms_launch *launch, void *to, const void *host,
                    size_t bytes);
void ms_cpu_copy_out(ms_stream *stream, const ms_launch *launch, void *host, const void *from,
                     size_t bytes);
void ms_cpu_fail_if(ms_stream *stream, const ms_launch *launch, const float *flag,
                    const char *message);

void ms_cpu_call_host(ms_stream *stream, const ms_launch *launch, const ms_host_call *call);

#endif
