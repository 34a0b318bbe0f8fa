/* backends.c: the table of tasks that belongs to the engine's device. */
#include "optim/tasks.h"

#include "exec/engine.h"

/* One table for each kernel family, ended by NULL. A device names its family, and two devices may
 * share one. */
static const ms_kernels *const backends[] = { &ms_cpu_optim, &ms_cuda_optim, NULL };

/* Chosen for each call: engines of one process may be on different devices. */
const ms_task *ms_optim_task_of(ms_engine *engine, ms_optim_task task)
{
    return ms_engine_kernels(engine, MS_SLOT_OPTIM, backends)->tasks[task];
}
