/* norm.c: launches the kernels of the norms. */
#include "ops/cuda/norm.h"

MS_CUDA_IMAGE(norm)
MS_CUDA_KERNEL(norm, norm_forward)
MS_CUDA_KERNEL(norm, norm_backward)
MS_CUDA_KERNEL(norm, norm_columns)
MS_CUDA_KERNEL(norm, norm_join)

static void run_forward(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_norm_call call = { .n = *(const ms_norm_args *)arguments };
    const ms_norm_args *n = &call.n;
    call.aligned = n->width % 8 == 0 && ms_cuda_is_aligned(n->x) && ms_cuda_is_aligned(n->residual)
                   && ms_cuda_is_aligned(n->weight) && ms_cuda_is_aligned(n->bias)
                   && ms_cuda_is_aligned(n->sum) && ms_cuda_is_aligned(n->y);
    ms_cuda_launch(work, &norm_forward, ms_cuda_row_shape(n->rows, n->width), &call, sizeof call);
}

static void run_rows(ms_cuda_work *work, const ms_norm_backward_args *n)
{
    ms_cuda_norm_backward_call call = { .n = *n };
    call.aligned = n->width % 8 == 0 && ms_cuda_is_aligned(n->s) && ms_cuda_is_aligned(n->weight)
                   && ms_cuda_is_aligned(n->gradient) && ms_cuda_is_aligned(n->sum_gradient)
                   && ms_cuda_is_aligned(n->dx) && ms_cuda_is_aligned(n->narrow);
    ms_cuda_launch(work, &norm_backward, ms_cuda_row_shape(n->rows, n->width), &call, sizeof call);
}

/* The gradients of weight and bias take a second pass over s and the gradient, by columns. How the
 * rows are divided follows from the shape; whether eight columns are read at once follows from the
 * addresses, too, and does not change the order of additions. */
static void run_columns(ms_cuda_work *work, const ms_norm_backward_args *n)
{
    bool eights = n->width % 8 == 0;
    ms_cuda_parts parts = ms_cuda_row_parts(n->rows, eights ? n->width / 8 : n->width);
    ms_cuda_norm_columns_call call = { .n = *n, .each = parts.each };
    call.aligned = eights && ms_cuda_is_aligned(n->s) && ms_cuda_is_aligned(n->gradient);
    call.partial =
        ms_cuda_scratch(work, (size_t)(2 * parts.parts * n->width) * sizeof *call.partial);
    if (!call.partial) return;
    ms_cuda_launch(work, &norm_columns,
                   ms_cuda_column_shape(call.aligned ? n->width / 8 : n->width, parts.parts), &call,
                   sizeof call);
    ms_cuda_join_call join = { .partial = call.partial,
                               .out = { n->dweight, n->dbias },
                               .width = n->width,
                               .parts = parts.parts,
                               .vectors = 2,
                               .dtype = n->dtypes.weight };
    ms_cuda_launch(work, &norm_join, ms_cuda_join_shape(&join), &join, sizeof join);
}

static void run_backward(ms_cuda_work *work, const void *arguments)
{
    const ms_norm_backward_args *n = arguments;
    if (n->dx || n->narrow) run_rows(work, n);
    if (n->dweight || n->dbias) run_columns(work, n);
}

MS_CUDA_TASK(norm_forward, "norm", ms_norm_args, MS_KIND_COMPUTE, run_forward)
MS_CUDA_TASK(norm_backward, "norm gradient", ms_norm_backward_args, MS_KIND_COMPUTE, run_backward)
