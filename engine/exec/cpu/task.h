/* task.h: running a CPU task, and what it may ask of the thread that runs it. */
#ifndef MOONSHARD_EXEC_CPU_TASK_H
#define MOONSHARD_EXEC_CPU_TASK_H

#include "exec/cpu/state.h"

/* Calls a task once, on the calling thread. PENDING: call it again with the same arguments. FAILED:
 * *error says why, without the script line. Needs no thread of the CPU device: a device that
 * borrows the CPU's kernels calls this with team NULL. */
ms_task_result ms_cpu_call(ms_thread *thread, ms_team *team, const ms_task *task, void *arguments,
                           ms_error *error);
/* Frees the thread's scratch memory. */
void ms_thread_close(ms_thread *thread);

#endif
