/* random.c: launches the kernels that draw numbers. */
#include "ops/random.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(random)
MS_CUDA_KERNEL(random, random_uniform)
MS_CUDA_KERNEL(random, random_normal)
MS_CUDA_KERNEL(random, random_integer)
MS_CUDA_KERNEL(random, dropout)

static void run_random(ms_cuda_work *work, const void *arguments)
{
    static const ms_cuda_kernel *const kernels[] = { [MS_RANDOM_UNIFORM] = &random_uniform,
                                                     [MS_RANDOM_NORMAL] = &random_normal,
                                                     [MS_RANDOM_INTEGER] = &random_integer };
    const ms_random_args *args = arguments;
    ms_cuda_launch(work, kernels[args->kind], ms_cuda_grid(args->count, 8), args, sizeof *args);
}

static void run_dropout(ms_cuda_work *work, const void *arguments)
{
    const ms_dropout_args *args = arguments;
    ms_cuda_launch(work, &dropout, ms_cuda_grid(args->count, 8), args, sizeof *args);
}

MS_CUDA_TASK(random, "random", ms_random_args, MS_KIND_COMPUTE, run_random)
MS_CUDA_TASK(dropout, "dropout", ms_dropout_args, MS_KIND_COMPUTE, run_dropout)
