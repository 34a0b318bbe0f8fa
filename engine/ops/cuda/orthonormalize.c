/* orthonormalize.c: launches the kernel that makes columns orthonormal. */
#include "ops/cuda/orthonormalize.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(orthonormalize)
MS_CUDA_KERNEL(orthonormalize, orthonormalize)

/* Matrices that are worked on at a time: two for each multiprocessor. */
enum { MATRICES = 264 };

static void run(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_orthonormalize_call call = { .o = *(const ms_orthonormalize_args *)arguments };
    const ms_orthonormalize_args *o = &call.o;
    uint32_t blocks = (uint32_t)(o->matrices < MATRICES ? o->matrices : MATRICES), threads = 32;
    while (threads < 1024 && threads * 4 < o->n) threads *= 2;
    call.columns = ms_cuda_scratch(work, (size_t)(blocks * o->n * o->r) * sizeof *call.columns);
    if (call.columns == NULL) return;
    ms_cuda_launch(work, &orthonormalize,
                   (ms_cuda_shape){ .blocks = { blocks }, .threads = { threads } }, &call,
                   sizeof call);
}

MS_CUDA_TASK(orthonormalize, "orthonormalize", ms_orthonormalize_args, MS_KIND_COMPUTE, run)
