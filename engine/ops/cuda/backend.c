/* backend.c: the table of the GPU's kernels. */
#include "ops/backend.h"

#include "exec/cuda/task.h"
#include "ops/cuda/matmul.h"

#define MS_KERNEL_DECLARE(name) extern const ms_cuda_task ms_cuda_##name;
MS_KERNELS(MS_KERNEL_DECLARE)

#define MS_KERNEL_ENTRY(name) [MS_KERNEL_##name] = &ms_cuda_##name.task,
/* Indexed by ms_kernel. The list of kernels generates both the declarations and the entries, so a
 * kernel without a task does not link. */
static const ms_task *const tasks[MS_KERNEL_COUNT] = { MS_KERNELS(MS_KERNEL_ENTRY) };

/* Convolutions need no plans: the kernels of convolution.cu compute them. */
static ms_status plan_convolution(ms_engine *engine, struct ms_convolution_args *args)
{
    (void)engine, (void)args;
    return MS_OK;
}

const ms_backend ms_cuda_backend = { .kernels = { .family = "cuda", .tasks = tasks },
                                     .plan_matmul = ms_cuda_plan_matmul,
                                     .plan_convolution = plan_convolution };
