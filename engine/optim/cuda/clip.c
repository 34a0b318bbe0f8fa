/* clip.c: launches the kernels of clipping. */
#include "optim/cuda/clip.h"

#include <math.h>

MS_CUDA_IMAGE(clip)
MS_CUDA_KERNEL(clip, clip_squares)
MS_CUDA_KERNEL(clip, clip_greatest)
MS_CUDA_KERNEL(clip, clip_powers)
MS_CUDA_KERNEL(clip, clip_join)
MS_CUDA_KERNEL(clip, clip_combine)
MS_CUDA_KERNEL(clip, clip_scale)

static int64_t pieces_of(const ms_clip_tensor *tensors, uint32_t count)
{
    int64_t pieces = 0;
    for (uint32_t i = 0; i < count; i++)
        pieces += (tensors[i].elements + MS_CUDA_CLIP_PIECE - 1) / MS_CUDA_CLIP_PIECE;
    return pieces;
}

static void run_measure(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_measure_call call = { .m = *(const ms_measure_args *)arguments };
    const ms_measure_args *m = &call.m;
    int64_t pieces = pieces_of(m->tensors, m->count);
    call.sums = ms_cuda_scratch(work, (size_t)(pieces + 1) * sizeof *call.sums);
    if (!call.sums) return;
    const ms_cuda_kernel *kernel = isinf(m->p) ? &clip_greatest : &clip_powers;
    if (m->p == 2) kernel = &clip_squares;
    ms_cuda_shape each = { .blocks = { (uint32_t)pieces }, .threads = { MS_CUDA_THREADS } },
                  join = { .blocks = { m->count }, .threads = { MS_CUDA_THREADS } };
    ms_cuda_launch(work, kernel, each, &call, sizeof call);
    ms_cuda_launch(work, &clip_join, join, &call, sizeof call);
}

static void run_combine(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_shape one = { .blocks = { 1 }, .threads = { MS_CUDA_THREADS } };
    ms_cuda_launch(work, &clip_combine, one, arguments, sizeof(ms_combine_args));
}

static void run_scale(ms_cuda_work *work, const void *arguments)
{
    const ms_scale_args *s = arguments;
    ms_cuda_shape each = { .blocks = { (uint32_t)pieces_of(s->tensors, s->count) },
                           .threads = { MS_CUDA_THREADS } };
    ms_cuda_launch(work, &clip_scale, each, s, sizeof *s);
}

MS_CUDA_TASK(measure, "gradient_norm", ms_measure_args, MS_KIND_OPTIMIZER, run_measure)
MS_CUDA_TASK(combine, "clip_factor", ms_combine_args, MS_KIND_OPTIMIZER, run_combine)
MS_CUDA_TASK(scale, "gradient_scale", ms_scale_args, MS_KIND_OPTIMIZER, run_scale)
