/* backends.c: the table of kernels that belongs to the engine's device. */
#include "ops/backend.h"

#include "exec/engine.h"

/* One table for each kernel family, ended by NULL; a device says which family it runs. The sim
 * device runs none of them, but looks up names and kinds here. */
static const ms_kernels *const backends[] = { &ms_cpu_backend.kernels, &ms_cuda_backend.kernels,
                                              NULL };

/* The cast is right because `kernels` is the first member. */
const ms_backend *ms_engine_backend(ms_engine *engine)
{
    return (const ms_backend *)ms_engine_kernels(engine, MS_SLOT_TENSOR, backends);
}

const ms_task *ms_engine_kernel(ms_engine *engine, ms_kernel kernel)
{
    return ms_engine_kernels(engine, MS_SLOT_TENSOR, backends)->tasks[kernel];
}
