/* missing.c: stands for kernels while they are being written. */
#include "exec/cuda/task.h"

static void missing(ms_cuda_work *work, const void *arguments)
{
    (void)arguments;
    ms_cuda_work_fail(work, MS_ERROR_UNSUPPORTED, "this kernel is not written yet");
}
#define MISSING(kernel)                                                                     \
    __attribute__((weak))                                                                   \
    const ms_cuda_task ms_cuda_##kernel = { .task = { .name = #kernel, .args_bytes = 400 }, \
                                            .function = missing };
MISSING(optimizer) MISSING(measure) MISSING(combine) MISSING(scale)
