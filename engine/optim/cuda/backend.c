/* backend.c: the table of the GPU's tasks. */
#include "exec/cuda/task.h"
#include "optim/tasks.h"

extern const ms_cuda_task ms_cuda_optimizer, ms_cuda_measure, ms_cuda_combine, ms_cuda_scale;

/* In the order of ms_optim_task. */
static const ms_task *const tasks[MS_OPTIM_TASKS] = {
    [MS_OPTIM_STEP] = &ms_cuda_optimizer.task,
    [MS_OPTIM_MEASURE] = &ms_cuda_measure.task,
    [MS_OPTIM_COMBINE] = &ms_cuda_combine.task,
    [MS_OPTIM_SCALE] = &ms_cuda_scale.task,
};

const ms_kernels ms_cuda_optim = { .family = "cuda", .tasks = tasks };
