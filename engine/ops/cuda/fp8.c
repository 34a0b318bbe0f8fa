/* fp8.c: launches the kernels of matrices in 8-bit floats. */
#include "ops/cuda/fp8.h"

#include "ops/cuda/kernels.h"
#include "ops/cuda/rows.h"

MS_CUDA_IMAGE(fp8)
MS_CUDA_KERNEL(fp8, fp8_most)
MS_CUDA_KERNEL(fp8, fp8_encode)
MS_CUDA_KERNEL(fp8, fp8_decode)

/* Each block of the second kernel reads all that the blocks of the first have found, so these are
 * few: four for each multiprocessor. */
enum { MOST_BLOCKS = 528 };

static void run_encode(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_fp8_encode_call call = { .e = *(const ms_fp8_encode_args *)arguments };
    const ms_fp8_encode_args *e = &call.e;
    int64_t tiles = (e->rows + 63) / 64 * ((e->columns + 63) / 64);
    ms_cuda_shape shape = ms_cuda_grid(e->rows * e->columns, 16);
    if (shape.blocks[0] > MOST_BLOCKS) shape.blocks[0] = MOST_BLOCKS;
    call.parts = (int32_t)shape.blocks[0];
    call.aligned = ms_cuda_is_aligned(e->x);
    call.partial = ms_cuda_scratch(work, (size_t)call.parts * sizeof *call.partial);
    if (!call.partial) return;
    ms_cuda_launch(work, &fp8_most, shape, &call, sizeof call);
    shape.blocks[0] = tiles < MS_CUDA_BLOCKS_MOST ? (uint32_t)tiles : (uint32_t)MS_CUDA_BLOCKS_MOST;
    ms_cuda_launch(work, &fp8_encode, shape, &call, sizeof call);
}

static void run_decode(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_fp8_decode_call call = { .d = *(const ms_fp8_decode_args *)arguments };
    ms_cuda_launch(work, &fp8_decode, ms_cuda_grid(call.d.count, 16), &call, sizeof call);
}

MS_CUDA_TASK(fp8_encode, "fp8 encode", ms_fp8_encode_args, MS_KIND_COMPUTE, run_encode)
MS_CUDA_TASK(fp8_decode, "fp8 decode", ms_fp8_decode_args, MS_KIND_COMPUTE, run_decode)
