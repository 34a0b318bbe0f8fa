/* elementwise.c: launches the elementwise kernels. */
#include "ops/cuda/elementwise.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(elementwise)

_Static_assert((int)MS_CUDA_BLOCKS_MOST <= MS_ELEMENTWISE_MOST, "each block has a number");

#define FLOATS(kernel) \
    [MS_KERNEL_##kernel] = { .image = ms_cuda_image_elementwise, .name = "elementwise_" #kernel },
static const ms_cuda_kernel floats[MS_ELEMENTWISE_COUNT] = { MS_ELEMENTWISE_KERNELS(FLOATS) };

#define WHOLE(kernel) \
    [MS_KERNEL_##kernel] = { .image = ms_cuda_image_elementwise, .name = "whole_" #kernel },
static const ms_cuda_kernel wholes[MS_ELEMENTWISE_COUNT] = { MS_WHOLE_KERNELS(WHOLE) };

/* Whether a kernel has code for chunks of this dtype. Kernels for floats have none for integers of
 * more than one byte, which only casts give them. */
static bool has_chunks(const ms_elementwise_args *e, uint8_t dtype)
{
    if (e->integers) return !ms_dtype_is_float(dtype);
    return ms_dtype_is_float(dtype) || ms_dtype_bytes(dtype) == 1;
}

/* Chunks are accessed in pieces of 16 bytes, those of elements of one byte in one of 8. */
static bool is_aligned(const ms_loop *loop, uint32_t operand, const void *address, uint8_t dtype)
{
    uint64_t size = ms_dtype_bytes(dtype), all = (uintptr_t)address;
    for (uint32_t d = 0; d + 1 < loop->dims; d++) all |= (uint64_t)loop->strides[operand][d] * size;
    return all % (size == 1 ? 8 : 16) == 0;
}

static bool takes_chunks(ms_cuda_elementwise_call *call)
{
    const ms_elementwise_args *e = &call->e;
    const ms_loop *loop = &e->loop;
    for (uint32_t k = 0; k <= e->operands; k++) {
        uint8_t dtype = k == 0 ? e->out_dtype : e->in_dtype[k - 1];
        int64_t stride = dtype == MS_NUMBER ? 0 : loop->strides[k][loop->dims - 1];
        if (k > 0 && stride == 0) continue;
        if (stride != 1 || !has_chunks(e, dtype)
            || !is_aligned(loop, k, k == 0 ? e->out : e->in[k - 1], dtype))
            return false;
        call->along[k] = 1;
    }
    return true;
}

static void run(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_elementwise_call call = { .e = *(const ms_elementwise_args *)arguments };
    int64_t width = call.e.loop.shape[call.e.loop.dims - 1],
            rows = ms_loop_count(&call.e.loop) / width;
    if (takes_chunks(&call)) call.row_chunks = width / 8;
    call.chunks = rows * call.row_chunks;
    call.units = call.chunks + rows * (width - 8 * call.row_chunks);
    const ms_cuda_kernel *kernel =
        call.e.integers ? &wholes[call.e.kernel] : &floats[call.e.kernel];
    ms_cuda_launch(work, kernel, ms_cuda_grid(call.units, 1), &call, sizeof call);
}

#define TASK(kernel) MS_CUDA_TASK(kernel, #kernel, ms_elementwise_args, MS_KIND_COMPUTE, run)
MS_ELEMENTWISE_KERNELS(TASK)
