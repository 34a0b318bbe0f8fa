/* elementwise.c: launches the elementwise kernels. */
#include "tensor/cuda/elementwise.h"

#include "tensor/cuda/kernels.h"

MS_CUDA_IMAGE(elementwise)

#define FLOATS(kernel) \
    [MS_KERNEL_##kernel] = { .image = ms_cuda_image_elementwise, .name = "elementwise_" #kernel },
static const ms_cuda_kernel floats[MS_ELEMENTWISE_COUNT] = { MS_ELEMENTWISE_KERNELS(FLOATS) };

#define WHOLE(kernel) \
    [MS_KERNEL_##kernel] = { .image = ms_cuda_image_elementwise, .name = "whole_" #kernel },
static const ms_cuda_kernel wholes[MS_ELEMENTWISE_COUNT] = { MS_WHOLE_KERNELS(WHOLE) };

static bool is_aligned(const void *address) { return (uintptr_t)address % 16 == 0; }

/* A loop of one dimension without gaps is walked in chunks. */
static void choose_forms(ms_cuda_elementwise_call *call)
{
    const ms_elementwise_args *e = &call->e;
    if (e->loop.dims != 1 || e->loop.strides[0][0] != 1 || !ms_dtype_is_float(e->out_dtype)
        || !is_aligned(e->out))
        return;
    for (uint32_t k = 0; k < e->operands; k++) {
        bool is_number = e->in_dtype[k] == MS_NUMBER;
        int64_t stride = is_number ? 0 : e->loop.strides[k + 1][0];
        if (stride == 0) call->form[k + 1] = MS_CUDA_ONE;
        else if (stride == 1 && ms_dtype_is_float(e->in_dtype[k]) && is_aligned(e->in[k]))
            call->form[k + 1] = MS_CUDA_FLAT;
        else return;
    }
    call->form[0] = MS_CUDA_FLAT;
}

static void run(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_elementwise_call call = { .e = *(const ms_elementwise_args *)arguments };
    call.count = ms_loop_count(&call.e.loop);
    if (!call.e.integers) choose_forms(&call);
    const ms_cuda_kernel *kernel =
        call.e.integers ? &wholes[call.e.kernel] : &floats[call.e.kernel];
    ms_cuda_launch(work, kernel, ms_cuda_grid(call.count, call.form[0] == MS_CUDA_FLAT ? 8 : 1),
                   &call, sizeof call);
}

#define TASK(kernel) MS_CUDA_TASK(kernel, #kernel, ms_elementwise_args, MS_KIND_COMPUTE, run)
MS_ELEMENTWISE_KERNELS(TASK)
