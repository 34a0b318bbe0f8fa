/* pooling.c: launches the kernels of pooling: a thread makes one element of the result. */
#include "ops/pooling.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(pooling)
MS_CUDA_KERNEL(pooling, max_pool)
MS_CUDA_KERNEL(pooling, max_pool_back)
MS_CUDA_KERNEL(pooling, avg_pool)
MS_CUDA_KERNEL(pooling, avg_pool_back)

static void run(ms_cuda_work *work, const ms_cuda_kernel *kernel, const ms_pool_args *args,
                const int64_t plane[2])
{
    ms_cuda_launch(work, kernel, ms_cuda_grid(args->planes * plane[0] * plane[1], 1), args,
                   sizeof *args);
}

static void run_max(ms_cuda_work *work, const void *arguments)
{
    const ms_pool_args *args = arguments;
    run(work, &max_pool, args, args->window.out);
}
static void run_max_back(ms_cuda_work *work, const void *arguments)
{
    const ms_pool_args *args = arguments;
    run(work, &max_pool_back, args, args->window.in);
}
static void run_avg(ms_cuda_work *work, const void *arguments)
{
    const ms_pool_args *args = arguments;
    run(work, &avg_pool, args, args->window.out);
}
static void run_avg_back(ms_cuda_work *work, const void *arguments)
{
    const ms_pool_args *args = arguments;
    run(work, &avg_pool_back, args, args->window.in);
}

MS_CUDA_TASK(max_pool2d, "max_pool2d", ms_pool_args, MS_KIND_COMPUTE, run_max)
MS_CUDA_TASK(max_pool2d_backward, "max_pool2d gradient", ms_pool_args, MS_KIND_COMPUTE,
             run_max_back)
MS_CUDA_TASK(avg_pool2d, "avg_pool2d", ms_pool_args, MS_KIND_COMPUTE, run_avg)
MS_CUDA_TASK(avg_pool2d_backward, "avg_pool2d gradient", ms_pool_args, MS_KIND_COMPUTE,
             run_avg_back)
