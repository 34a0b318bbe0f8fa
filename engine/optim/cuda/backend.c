/* backend.c: the table of the GPU's tasks. */
#include "exec/cuda/task.h"
#include "optim/tasks.h"

#define DECLARE(number, name) extern const ms_cuda_task ms_cuda_##name;
MS_OPTIM_LIST(DECLARE)

#define ENTRY(number, name) [MS_OPTIM_##number] = &ms_cuda_##name.task,
static const ms_task *const tasks[MS_OPTIM_TASKS] = { MS_OPTIM_LIST(ENTRY) };

const ms_kernels ms_cuda_optim = { .family = "cuda", .tasks = tasks };
