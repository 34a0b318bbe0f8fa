/* attention.c: the tasks of attention: calls of cuDNN, and our own kernels for what it does not
 * take.
 */
#include "ops/cuda/attention.h"

#include <stdio.h>

#include "ops/cuda/attention_plan.h"
#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(attention)
MS_CUDA_KERNEL(attention, attention_positions)
MS_CUDA_KERNEL(attention, attention_one)
MS_CUDA_KERNEL(attention, attention_offsets)

#define TILED(kernel)                                                        \
    static const ms_cuda_kernel kernel = { .image = ms_cuda_image_attention, \
                                           .name = #kernel,                  \
                                           .shared_bytes = MS_CUDA_ATTENTION_SHARED };
TILED(attention_forward_64)
TILED(attention_forward_128)
TILED(attention_forward_256)
TILED(attention_queries_64)
TILED(attention_queries_128)
TILED(attention_keys_64)
TILED(attention_keys_128)

static int64_t quotient(int64_t n, int64_t by) { return (n + by - 1) / by; }

/* Positions are checked in backward, too, as they may have been written since forward. Kernels that
 * follow take a wrong one for the nearest right one. */
static void check_positions(ms_cuda_work *work, ms_cuda_attention_call *call)
{
    if (call->a.positions == NULL) return;
    call->fault = ms_cuda_fault_of(work);
    if (call->fault == NULL) return;
    ms_cuda_launch(work, &attention_positions, ms_cuda_grid(call->a.batches * call->a.queries, 4),
                   call, sizeof *call);
}

static void explain(const ms_cuda_fault *fault, char *message, size_t bytes)
{
    char limit[32] = "";
    bool is_below = fault->values[2] < 0;
    if (!is_below) snprintf(limit, sizeof limit, "%lld", (long long)fault->values[0]);
    snprintf(message, bytes,
             "attention: the position of query %lld of row %lld is %lld; it counts the queries "
             "before it in its document, so it %s%s",
             (long long)fault->values[0], (long long)fault->values[1], (long long)fault->values[2],
             is_below ? "cannot be below 0" : "must be within 0 .. ", limit);
}

/* One block for each tile of 64 `rows` of each of `heads` heads, and for each part of the columns.
 * Where a result has several parts, each of their blocks computes the scores again. */
static void launch_tiles(ms_cuda_work *work, ms_cuda_attention_call *call,
                         const ms_cuda_kernel *kernel, int64_t columns, int64_t rows, int64_t heads)
{
    call->tiles = quotient(rows, MS_CUDA_ATTENTION_TILE);
    call->parts = quotient(call->a.width, columns);
    int64_t blocks = call->a.batches * heads * call->tiles * call->parts;
    if (blocks > INT32_MAX) {
        ms_cuda_work_fail(work, MS_ERROR_UNSUPPORTED, "attention: %lld tiles are too many",
                          (long long)blocks);
        return;
    }
    ms_cuda_launch(work, kernel,
                   (ms_cuda_shape){ .blocks = { (uint32_t)blocks },
                                    .threads = { MS_CUDA_THREADS },
                                    .shared_bytes = MS_CUDA_ATTENTION_SHARED },
                   call, sizeof *call);
}

/* Text that continues from kept keys has one query: then memory sets the pace, and tiles would
 * compute 63 rows for nothing. */
static void run_forward(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_attention_call call = { .a = *(const ms_attention_args *)arguments };
    const ms_attention_args *a = &call.a;
    if (ms_cuda_attention_forward_by_cudnn(work, a)) return;
    check_positions(work, &call);
    int64_t rows = a->batches * a->heads;
    if (a->queries == 1 && a->width <= MS_CUDA_ONE_QUERY_WIDTH && rows <= INT32_MAX)
        ms_cuda_launch(
            work, &attention_one,
            (ms_cuda_shape){ .blocks = { (uint32_t)rows }, .threads = { MS_CUDA_THREADS } }, &call,
            sizeof call);
    else if (a->width <= 64)
        launch_tiles(work, &call, &attention_forward_64, 64, a->queries, a->heads);
    else if (a->width <= 128)
        launch_tiles(work, &call, &attention_forward_128, 128, a->queries, a->heads);
    else launch_tiles(work, &call, &attention_forward_256, 256, a->queries, a->heads);
}

/* The keys' kernel runs without queries, too: it writes zeros then. */
static void run_backward(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_attention_call call = { .a = *(const ms_attention_args *)arguments };
    const ms_attention_args *a = &call.a;
    int64_t rows = a->batches * a->heads * a->queries;
    if (ms_cuda_attention_backward_by_cudnn(work, a)) return;
    check_positions(work, &call);
    if (rows > 0) {
        call.offset = ms_cuda_scratch(work, (size_t)rows * sizeof(float));
        if (call.offset == NULL) return;
        ms_cuda_launch(work, &attention_offsets, ms_cuda_grid(rows * 32, 1), &call, sizeof call);
        if (a->width <= 64)
            launch_tiles(work, &call, &attention_queries_64, 64, a->queries, a->heads);
        else launch_tiles(work, &call, &attention_queries_128, 128, a->queries, a->heads);
    }
    if (a->width <= 64) launch_tiles(work, &call, &attention_keys_64, 64, a->keys, a->groups);
    else launch_tiles(work, &call, &attention_keys_128, 128, a->keys, a->groups);
}

MS_CUDA_TASK_OF_LIBRARY(attention_forward, "attention", ms_attention_args, MS_KIND_COMPUTE,
                        run_forward, explain)
MS_CUDA_TASK_OF_LIBRARY(attention_backward, "attention gradient", ms_attention_args,
                        MS_KIND_COMPUTE, run_backward, explain)
