/* rotary.c: launches the kernel of the rotary position embedding. */
#include "ops/cuda/rotary.h"

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(rotary)
MS_CUDA_KERNEL(rotary, rotary)

static int64_t quotient(int64_t n, int64_t by) { return (n + by - 1) / by; }

static void run(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_rotary_call call = { .r = *(const ms_rotary_args *)arguments };
    call.pieces = quotient(call.r.width / 2, MS_CUDA_ROTARY_PAIRS);
    int64_t blocks = call.r.times * call.pieces,
            slices = quotient(call.r.batches * call.r.heads, MS_CUDA_ROTARY_HEADS);
    ms_cuda_launch(work, &rotary,
                   (ms_cuda_shape){ .blocks = { (uint32_t)(blocks < INT32_MAX ? blocks : INT32_MAX),
                                                (uint32_t)(slices < 65535 ? slices : 65535) },
                                    .threads = { MS_CUDA_THREADS } },
                   &call, sizeof call);
}

MS_CUDA_TASK(rotary, "rotary", ms_rotary_args, MS_KIND_COMPUTE, run)
