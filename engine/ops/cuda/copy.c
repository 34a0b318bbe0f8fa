/* copy.c: launches the copying and filling kernels. */
#include "ops/cuda/copy.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(copy)
MS_CUDA_KERNEL(copy, copy_flat)
MS_CUDA_KERNEL(copy, fill_flat)

#define SIZE(of, bytes) [bytes] = { .image = ms_cuda_image_copy, .name = of "_" #bytes }
#define BY_SIZE(of)                                        \
    {                                                      \
        SIZE(of, 1), SIZE(of, 2), SIZE(of, 4), SIZE(of, 8) \
    }
static const ms_cuda_kernel copies[9] = BY_SIZE("copy"), fills[9] = BY_SIZE("fill");

static bool is_aligned(const void *address) { return (uintptr_t)address % 16 == 0; }

static void run_copy(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_copy_call call = { .c = *(const ms_copy_args *)arguments };
    const ms_loop *loop = &call.c.loop;
    call.count = ms_loop_count(loop);
    if (loop->dims == 1 && loop->strides[0][0] == 1 && loop->strides[1][0] == 1
        && is_aligned(call.c.to) && is_aligned(call.c.from)) {
        int64_t bytes = call.count * call.c.size;
        ms_cuda_flat_copy_call flat = {
            .to = call.c.to, .from = call.c.from, .chunks = bytes / 16, .tail = bytes % 16
        };
        ms_cuda_launch(work, &copy_flat, ms_cuda_grid((bytes + 15) / 16, 2), &flat, sizeof flat);
        return;
    }
    ms_cuda_launch(work, &copies[call.c.size], ms_cuda_grid(call.count, 1), &call, sizeof call);
}

/* The pattern of one element, repeated up to 8 bytes. */
static uint64_t repeated(uint64_t bits, uint32_t size)
{
    if (size < 8) bits &= (UINT64_C(1) << size * 8) - 1;
    for (uint32_t done = size; done < 8; done *= 2) bits |= bits << done * 8;
    return bits;
}

static void run_fill(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_fill_call call = { .f = *(const ms_fill_args *)arguments };
    const ms_loop *loop = &call.f.loop;
    call.count = ms_loop_count(loop);
    if (loop->dims == 1 && loop->strides[0][0] == 1 && is_aligned(call.f.to)) {
        int64_t bytes = call.count * call.f.size;
        ms_cuda_flat_fill_call flat = { .to = call.f.to,
                                        .bits = repeated(call.f.bits, call.f.size),
                                        .chunks = bytes / 16,
                                        .tail = bytes % 16 };
        ms_cuda_launch(work, &fill_flat, ms_cuda_grid((bytes + 15) / 16, 2), &flat, sizeof flat);
        return;
    }
    ms_cuda_launch(work, &fills[call.f.size], ms_cuda_grid(call.count, 1), &call, sizeof call);
}

MS_CUDA_TASK(copy, "copy", ms_copy_args, MS_KIND_COPY, run_copy)
MS_CUDA_TASK(fill, "fill", ms_fill_args, MS_KIND_COMPUTE, run_fill)
