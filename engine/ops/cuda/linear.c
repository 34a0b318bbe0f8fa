/* linear.c: launches the kernels around the product of a linear layer. */
#include "ops/cuda/linear.h"

MS_CUDA_IMAGE(linear)
MS_CUDA_KERNEL(linear, activation)
MS_CUDA_KERNEL(linear, linear_gradient)
MS_CUDA_KERNEL(linear, linear_join)

void ms_cuda_run_activation(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_activation_call call = { .a = *(const ms_activation_args *)arguments };
    const ms_activation_args *a = &call.a;
    call.aligned = ms_cuda_is_aligned(a->before) && ms_cuda_is_aligned(a->y);
    ms_cuda_launch(work, &activation, ms_cuda_grid(a->count, 8), &call, sizeof call);
}

/* How the rows are divided follows from the shape; whether eight columns are read at once follows
 * from the addresses, too, and does not change the order of additions. */
void ms_cuda_run_linear_gradient(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_linear_gradient_call call = { .l = *(const ms_linear_gradient_args *)arguments };
    const ms_linear_gradient_args *l = &call.l;
    ms_cuda_parts parts = ms_cuda_row_parts(l->rows, l->width % 8 == 0 ? l->width / 8 : l->width);
    call.each = parts.each;
    call.aligned = l->width % 8 == 0 && l->g_row % 8 == 0 && ms_cuda_is_aligned(l->g)
                   && ms_cuda_is_aligned(l->before) && ms_cuda_is_aligned(l->out);
    if (l->bias) {
        call.partial =
            ms_cuda_scratch(work, (size_t)(parts.parts * l->width) * sizeof *call.partial);
        if (!call.partial) return;
    }
    ms_cuda_launch(work, &linear_gradient,
                   ms_cuda_column_shape(call.aligned ? l->width / 8 : l->width, parts.parts), &call,
                   sizeof call);
    ms_cuda_join_call join = { .partial = call.partial,
                               .out = { l->bias },
                               .width = l->width,
                               .parts = parts.parts,
                               .vectors = 1,
                               .dtype = l->bias_dtype };
    if (l->bias) ms_cuda_launch(work, &linear_join, ms_cuda_join_shape(&join), &join, sizeof join);
}

MS_CUDA_TASK(activation, "gelu", ms_activation_args, MS_KIND_COMPUTE, ms_cuda_run_activation)
MS_CUDA_TASK(linear_backward, "linear gradient", ms_linear_gradient_args, MS_KIND_COMPUTE,
             ms_cuda_run_linear_gradient)
