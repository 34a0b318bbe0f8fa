/* fp8.c: launches the kernels of 8-bit floats: of matrices, and of spans of tensors. */
#include "ops/cuda/fp8.h"

#include "ops/cuda/kernels.h"
#include "ops/cuda/rows.h"

MS_CUDA_IMAGE(fp8)
MS_CUDA_KERNEL(fp8, fp8_most)
MS_CUDA_KERNEL(fp8, fp8_encode)
MS_CUDA_KERNEL(fp8, fp8_decode)
MS_CUDA_KERNEL(fp8, fp8_span_most)
MS_CUDA_KERNEL(fp8, fp8_span_join)
MS_CUDA_KERNEL(fp8, fp8_span_encode)
MS_CUDA_KERNEL(fp8, fp8_span_decode)

/* Each block of the second kernel reads all that the blocks of the first have found, or what was
 * given, so these are few: four for each multiprocessor. */
enum { MOST_FOUND = 528, REPEATS_MOST = 64 };

/* The greatest size of x, or of the numbers that were given, which are sizes: as floats these have
 * the same order. False: no memory. */
static bool find_most(ms_cuda_work *work, ms_cuda_fp8_encode_call *call)
{
    ms_cuda_fp8_encode_call first = *call;
    if (first.e.given) {
        first.e.x = first.e.given;
        first.e.rows = first.e.given_count;
        first.e.columns = 1;
        first.e.dtype = MS_F32;
    }
    ms_cuda_shape shape = ms_cuda_grid(first.e.rows * first.e.columns, 16);
    if (shape.blocks[0] > MOST_FOUND) shape.blocks[0] = MOST_FOUND;
    first.aligned = ms_cuda_is_aligned(first.e.x);
    first.partial = ms_cuda_scratch(work, shape.blocks[0] * sizeof *first.partial);
    if (!first.partial) return false;
    ms_cuda_launch(work, &fp8_most, shape, &first, sizeof first);
    call->found = first.partial;
    call->parts = (int32_t)shape.blocks[0];
    return true;
}

static void run_encode(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_fp8_encode_call call = { .e = *(const ms_fp8_encode_args *)arguments };
    const ms_fp8_encode_args *e = &call.e;
    int64_t tiles = (e->rows + 63) / 64 * ((e->columns + 63) / 64);
    ms_cuda_shape shape = { .threads = { MS_CUDA_THREADS } };
    call.aligned = ms_cuda_is_aligned(e->x);
    call.found = e->given;
    call.parts = (int32_t)e->given_count;
    if ((!e->given || e->given_count > MOST_FOUND) && !find_most(work, &call)) return;
    shape.blocks[0] = tiles < MS_CUDA_BLOCKS_MOST ? (uint32_t)tiles : (uint32_t)MS_CUDA_BLOCKS_MOST;
    ms_cuda_launch(work, &fp8_encode, shape, &call, sizeof call);
}

static void run_decode(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_fp8_decode_call call = { .d = *(const ms_fp8_decode_args *)arguments };
    ms_cuda_launch(work, &fp8_decode, ms_cuda_grid(call.d.count, 16), &call, sizeof call);
}

/* A row of blocks for each span; all of them are as long as the longest needs. */
static ms_cuda_shape shape_of(const ms_fp8_span_args *s)
{
    int64_t longest = 1;
    for (uint32_t k = 0; k < s->spans; k++)
        if (s->bounds[k + 1] - s->bounds[k] > longest) longest = s->bounds[k + 1] - s->bounds[k];
    ms_cuda_shape shape = ms_cuda_grid(longest + 15, 16);
    shape.blocks[1] = s->spans;
    return shape;
}

static ms_cuda_fp8_span_call call_of(const void *arguments)
{
    ms_cuda_fp8_span_call call = { .s = *(const ms_fp8_span_args *)arguments };
    call.aligned = ms_cuda_is_aligned(call.s.from) && ms_cuda_is_aligned(call.s.to);
    return call;
}

static void run_span_most(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_fp8_span_call call = call_of(arguments);
    ms_cuda_shape shape = shape_of(&call.s);
    if (call.s.spans == 0) return;
    if (shape.blocks[0] > MOST_FOUND) shape.blocks[0] = MOST_FOUND;
    call.parts = (int32_t)shape.blocks[0];
    call.partial = ms_cuda_scratch(work, (size_t)call.parts * call.s.spans * sizeof *call.partial);
    if (!call.partial) return;
    ms_cuda_launch(work, &fp8_span_most, shape, &call, sizeof call);
    shape.blocks[0] = call.s.spans;
    shape.blocks[1] = 1;
    ms_cuda_launch(work, &fp8_span_join, shape, &call, sizeof call);
}

static void run_span_encode(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_fp8_span_call call = call_of(arguments);
    if (call.s.spans > 0)
        ms_cuda_launch(work, &fp8_span_encode, shape_of(&call.s), &call, sizeof call);
}

static void run_span_decode(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_fp8_span_call call = call_of(arguments);
    ms_cuda_shape shape = shape_of(&call.s);
    if (call.s.spans == 0 || call.s.repeats == 0) return;
    shape.blocks[2] = call.s.repeats < REPEATS_MOST ? (uint32_t)call.s.repeats : REPEATS_MOST;
    ms_cuda_launch(work, &fp8_span_decode, shape, &call, sizeof call);
}

MS_CUDA_TASK(fp8_encode, "fp8 encode", ms_fp8_encode_args, MS_KIND_COMPUTE, run_encode)
MS_CUDA_TASK(fp8_decode, "fp8 decode", ms_fp8_decode_args, MS_KIND_COMPUTE, run_decode)
MS_CUDA_TASK(fp8_span_most, "fp8 span most", ms_fp8_span_args, MS_KIND_COMPUTE, run_span_most)
MS_CUDA_TASK(fp8_span_encode, "fp8 span encode", ms_fp8_span_args, MS_KIND_COMPUTE, run_span_encode)
MS_CUDA_TASK(fp8_span_decode, "fp8 span decode", ms_fp8_span_args, MS_KIND_COMPUTE, run_span_decode)
