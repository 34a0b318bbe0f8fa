/* softmax.c: launches the kernels of softmax, cross entropy and squared error. */
#include "ops/cuda/softmax.h"

#include <stdio.h>

MS_CUDA_IMAGE(softmax)
MS_CUDA_KERNEL(softmax, softmax_rows)
MS_CUDA_KERNEL(softmax, softmax_columns)
MS_CUDA_KERNEL(softmax, softmax_backward_rows)
MS_CUDA_KERNEL(softmax, softmax_backward_columns)
MS_CUDA_KERNEL(softmax, cross_entropy_rows)
MS_CUDA_KERNEL(softmax, cross_entropy_loss)
MS_CUDA_KERNEL(softmax, cross_entropy_gradient)
MS_CUDA_KERNEL(softmax, cross_entropy_shares)
MS_CUDA_KERNEL(softmax, cross_entropy_over_logits)
MS_CUDA_KERNEL(softmax, mse_parts)
MS_CUDA_KERNEL(softmax, mse_loss)
MS_CUDA_KERNEL(softmax, mse_gradient)

/* A softmax over the last dimension walks along memory; over another one each thread has a column
 * of its own, and neighbours have neighbouring columns. */
static void run_softmax(ms_cuda_work *work, const void *arguments, const ms_cuda_kernel *rows,
                        const ms_cuda_kernel *columns)
{
    ms_cuda_softmax_call call = { .s = *(const ms_softmax_args *)arguments };
    const ms_softmax_args *s = &call.s;
    call.aligned =
        ms_cuda_is_aligned(s->x) && ms_cuda_is_aligned(s->gradient) && ms_cuda_is_aligned(s->y);
    if (s->inner == 1)
        ms_cuda_launch(work, rows, ms_cuda_row_shape(s->outer, s->n), &call, sizeof call);
    else ms_cuda_launch(work, columns, ms_cuda_grid(s->outer * s->inner, 1), &call, sizeof call);
}
static void run_forward(ms_cuda_work *work, const void *arguments)
{
    run_softmax(work, arguments, &softmax_rows, &softmax_columns);
}
static void run_backward(ms_cuda_work *work, const void *arguments)
{
    run_softmax(work, arguments, &softmax_backward_rows, &softmax_backward_columns);
}

/* -------------------------------------------------------------- cross entropy */

static void run_cross_entropy(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_cross_entropy_call call = { .c = *(const ms_cross_entropy_args *)arguments };
    const ms_cross_entropy_args *c = &call.c;
    bool reduces = c->reduction != MS_REDUCE_NONE;
    call.aligned = ms_cuda_is_aligned(c->logits);
    call.fault = ms_cuda_fault_of(work);
    call.losses =
        reduces ? ms_cuda_scratch(work, (size_t)c->rows * sizeof *call.losses + 1) : c->loss;
    if (!call.fault || (reduces && !call.losses)) return;
    ms_cuda_launch(work, &cross_entropy_rows, ms_cuda_row_shape(c->rows, c->classes), &call,
                   sizeof call);
    ms_cuda_shape one = { .blocks = { 1 }, .threads = { MS_CUDA_ROW_THREADS } };
    if (reduces || c->share) ms_cuda_launch(work, &cross_entropy_loss, one, &call, sizeof call);
}

static void explain_target(const ms_cuda_fault *fault, char *message, size_t bytes)
{
    snprintf(message, bytes,
             "cross_entropy: the target of row %lld is %lld, but there are %lld classes, counted "
             "from 0 (and ignore_index is %lld)",
             (long long)fault->at, (long long)fault->values[0], (long long)fault->values[1],
             (long long)fault->values[2]);
}

static void run_cross_entropy_backward(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_cross_entropy_call call = { .c = *(const ms_cross_entropy_args *)arguments };
    const ms_cross_entropy_args *c = &call.c;
    call.aligned = ms_cuda_is_aligned(c->logits) && ms_cuda_is_aligned(c->dlogits);
    ms_cuda_launch(work, &cross_entropy_gradient, ms_cuda_row_shape(c->rows, c->classes), &call,
                   sizeof call);
}

/* ------------------------------------- loss and gradient of logits in place */

static const ms_cuda_shape one_block = { .blocks = { 1 }, .threads = { MS_CUDA_ROW_THREADS } };

static void run_share(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_cross_entropy_call call = { .c = *(const ms_cross_entropy_args *)arguments };
    call.fault = ms_cuda_fault_of(work);
    if (call.fault) ms_cuda_launch(work, &cross_entropy_shares, one_block, &call, sizeof call);
}

static void run_in_place(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_cross_entropy_call call = { .c = *(const ms_cross_entropy_args *)arguments };
    const ms_cross_entropy_args *c = &call.c;
    call.aligned = ms_cuda_is_aligned(c->logits);
    ms_cuda_launch(work, &cross_entropy_over_logits, ms_cuda_row_shape(c->rows, c->classes), &call,
                   sizeof call);
}

static void run_total(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_cross_entropy_call call = { .c = *(const ms_cross_entropy_args *)arguments };
    call.losses = call.c.losses;
    ms_cuda_launch(work, &cross_entropy_loss, one_block, &call, sizeof call);
}

/* -------------------------------------------------------------- squared error */

static void run_mse(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_mse_call call = { .m = *(const ms_mse_args *)arguments };
    const ms_mse_args *m = &call.m;
    ms_cuda_shape shape = ms_cuda_grid(m->count, 32), one = { .blocks = { 1 }, .threads = { 32 } };
    call.aligned = ms_cuda_is_aligned(m->a) && ms_cuda_is_aligned(m->b);
    call.parts = shape.blocks[0];
    call.partial = ms_cuda_scratch(work, (size_t)(call.parts + 1) * sizeof *call.partial);
    if (!call.partial) return;
    ms_cuda_launch(work, &mse_parts, shape, &call, sizeof call);
    ms_cuda_launch(work, &mse_loss, one, &call, sizeof call);
}

static void run_mse_backward(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_mse_call call = { .m = *(const ms_mse_args *)arguments };
    const ms_mse_args *m = &call.m;
    call.aligned = ms_cuda_is_aligned(m->a) && ms_cuda_is_aligned(m->b) && ms_cuda_is_aligned(m->da)
                   && ms_cuda_is_aligned(m->db);
    ms_cuda_launch(work, &mse_gradient, ms_cuda_grid(m->count, 8), &call, sizeof call);
}

MS_CUDA_TASK(softmax_forward, "softmax", ms_softmax_args, MS_KIND_COMPUTE, run_forward)
MS_CUDA_TASK(softmax_backward, "softmax gradient", ms_softmax_args, MS_KIND_COMPUTE, run_backward)
MS_CUDA_TASK_THAT_FAILS(cross_entropy, "cross_entropy", ms_cross_entropy_args, MS_KIND_COMPUTE,
                        run_cross_entropy, explain_target)
MS_CUDA_TASK(cross_entropy_backward, "cross_entropy gradient", ms_cross_entropy_args,
             MS_KIND_COMPUTE, run_cross_entropy_backward)
MS_CUDA_TASK_THAT_FAILS(cross_entropy_share, "cross_entropy share", ms_cross_entropy_args,
                        MS_KIND_COMPUTE, run_share, explain_target)
MS_CUDA_TASK(cross_entropy_in_place, "cross_entropy in place", ms_cross_entropy_args,
             MS_KIND_COMPUTE, run_in_place)
MS_CUDA_TASK(cross_entropy_total, "cross_entropy total", ms_cross_entropy_args, MS_KIND_COMPUTE,
             run_total)
MS_CUDA_TASK(mse, "mse_loss", ms_mse_args, MS_KIND_COMPUTE, run_mse)
MS_CUDA_TASK(mse_backward, "mse_loss gradient", ms_mse_args, MS_KIND_COMPUTE, run_mse_backward)
