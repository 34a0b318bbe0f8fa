/* norm.c: launches the kernels of the norms. */
#include "ops/cuda/norm.h"

MS_CUDA_IMAGE(norm)
MS_CUDA_KERNEL(norm, norm_forward)
MS_CUDA_KERNEL(norm, norm_backward)
MS_CUDA_KERNEL(norm, norm_gradient)
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

static bool rows_are_aligned(const ms_norm_backward_args *n)
{
    return n->width % 8 == 0 && ms_cuda_is_aligned(n->s) && ms_cuda_is_aligned(n->weight)
           && ms_cuda_is_aligned(n->gradient) && ms_cuda_is_aligned(n->sum_gradient)
           && ms_cuda_is_aligned(n->dx) && ms_cuda_is_aligned(n->narrow);
}

static void run_rows(ms_cuda_work *work, const ms_norm_backward_args *n)
{
    ms_cuda_norm_backward_call call = { .n = *n, .aligned = rows_are_aligned(n) };
    ms_cuda_launch(work, &norm_backward, ms_cuda_row_shape(n->rows, n->width), &call, sizeof call);
}

/* The parts' sums become the gradients of weight and bias. */
static void join_parts(ms_cuda_work *work, const ms_norm_backward_args *n, const double *partial,
                       int64_t parts)
{
    ms_cuda_join_call join = { .partial = partial,
                               .out = { n->dweight, n->dbias },
                               .width = n->width,
                               .parts = parts,
                               .vectors = 2,
                               .dtype = n->dtypes.weight };
    ms_cuda_launch(work, &norm_join, ms_cuda_join_shape(&join), &join, sizeof join);
}

/* A thread has eight columns of a row. There are up to 264 blocks: two for each multiprocessor of
 * an H200, as many as it holds at once. Each takes turns of `down` rows, at least eight where there
 * are so many. */
static void run_all(ms_cuda_work *work, const ms_norm_backward_args *n)
{
    uint32_t across = (uint32_t)((n->width + 255) / 256 * 32), down = MS_CUDA_ROW_THREADS / across;
    int64_t most = (n->rows + 8 * down - 1) / (8 * down), parts = most < 264 ? most : 264;
    if (parts < 1) parts = 1;
    ms_cuda_norm_gradient_call call = { .n = *n, .aligned = rows_are_aligned(n) };
    call.each = (n->rows + parts - 1) / parts;
    if (call.each) parts = (n->rows + call.each - 1) / call.each;
    call.partial = ms_cuda_scratch(work, (size_t)(2 * parts * n->width) * sizeof *call.partial);
    if (!call.partial) return;
    ms_cuda_launch(work, &norm_gradient,
                   (ms_cuda_shape){ .blocks = { (uint32_t)parts }, .threads = { across, down } },
                   &call, sizeof call);
    join_parts(work, n, call.partial, parts);
}

/* The gradients of weight and bias by a pass of their own over s and the gradient, by columns. How
 * the rows are divided follows from the shape; whether eight columns are read at once follows from
 * the addresses, too, and does not change the order of additions. */
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
    join_parts(work, n, call.partial, parts.parts);
}

/* A row of more columns has more than a block's threads can keep in their registers. */
#define MOST_COLUMNS (8 * MS_CUDA_ROW_THREADS)

static void run_backward(ms_cuda_work *work, const void *arguments)
{
    const ms_norm_backward_args *n = arguments;
    bool has_rows = n->dx || n->narrow, has_columns = n->dweight || n->dbias;
    if (has_rows && has_columns && n->width <= MOST_COLUMNS) {
        run_all(work, n);
        return;
    }
    if (has_rows) run_rows(work, n);
    if (has_columns) run_columns(work, n);
}

MS_CUDA_TASK(norm_forward, "norm", ms_norm_args, MS_KIND_COMPUTE, run_forward)
MS_CUDA_TASK(norm_backward, "norm gradient", ms_norm_backward_args, MS_KIND_COMPUTE, run_backward)
