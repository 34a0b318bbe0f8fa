/* missing.c: stands for kernels while they are being written. */
#include "tensor/cuda/kernels.h"
#include "tensor/cuda/matmul.h"

static void missing(ms_cuda_work *work, const void *arguments)
{
    (void)arguments;
    ms_cuda_work_fail(work, MS_ERROR_UNSUPPORTED, "this kernel is not written yet");
}
#define MISSING(kernel)                                                                     \
    __attribute__((weak))                                                                   \
    const ms_cuda_task ms_cuda_##kernel = { .task = { .name = #kernel, .args_bytes = 400 }, \
                                            .function = missing };
#undef MS_ELEMENTWISE_KERNELS
#define MS_ELEMENTWISE_KERNELS(K)
MS_KERNELS(MISSING)
