/* embedding.c: launches the kernels of embeddings. */
#include "ops/cuda/embedding.h"

#include <stdio.h>

MS_CUDA_IMAGE(embedding)
MS_CUDA_KERNEL(embedding, embedding_rows)
MS_CUDA_KERNEL(embedding, embedding_keys)
MS_CUDA_KERNEL(embedding, sort_count)
MS_CUDA_KERNEL(embedding, sort_scan)
MS_CUDA_KERNEL(embedding, sort_move)
MS_CUDA_KERNEL(embedding, embedding_bounds)
MS_CUDA_KERNEL(embedding, embedding_sum)
MS_CUDA_KERNEL(embedding, embedding_sum_often)

static void run_forward(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_embedding_call call = { .e = *(const ms_embedding_args *)arguments };
    const ms_embedding_args *e = &call.e;
    int64_t item = (int64_t)ms_dtype_bytes((ms_dtype)e->dtype);
    bool aligned =
        e->width * item % 16 == 0 && ms_cuda_is_aligned(e->table) && ms_cuda_is_aligned(e->values);
    call.piece = aligned ? 16 : (uint32_t)item;
    call.pieces = e->width * item / call.piece;
    call.fault = ms_cuda_fault_of(work);
    if (call.fault)
        ms_cuda_launch(work, &embedding_rows, ms_cuda_row_shape(e->count, call.pieces), &call,
                       sizeof call);
}

static void explain_id(const ms_cuda_fault *fault, char *message, size_t bytes)
{
    snprintf(
        message, bytes,
        "embedding: the id at position %lld is %lld, but the weight has %lld rows, counted from 0",
        (long long)fault->at, (long long)fault->values[0], (long long)fault->values[1]);
}

/* -------------------------------------------------------------------- backward */

/* An id outside of the table has the key `rows`: it is added nowhere. */
static void sort(ms_cuda_work *work, ms_cuda_sort_call *call)
{
    ms_cuda_shape tiles = { .blocks = { (uint32_t)call->tiles }, .threads = { MS_CUDA_THREADS } },
                  one = { .blocks = { 1 }, .threads = { MS_CUDA_ROW_THREADS } };
    ms_cuda_launch(work, &embedding_keys, ms_cuda_grid(call->count, 1), call, sizeof *call);
    for (call->shift = 0; call->rows >> call->shift; call->shift += 4) {
        ms_cuda_launch(work, &sort_count, tiles, call, sizeof *call);
        ms_cuda_launch(work, &sort_scan, one, call, sizeof *call);
        ms_cuda_launch(work, &sort_move, tiles, call, sizeof *call);
        uint32_t *keys = call->sorted_keys, *positions = call->sorted_positions;
        call->sorted_keys = (uint32_t *)(uintptr_t)call->keys;
        call->sorted_positions = (uint32_t *)(uintptr_t)call->positions;
        call->keys = keys;
        call->positions = positions;
    }
}

static void sum(ms_cuda_work *work, const ms_cuda_embedding_sum_call *call)
{
    const ms_embedding_args *e = &call->e;
    int64_t often = e->count / (MS_CUDA_OFTEN + 1), strips = (e->width + 31) / 32;
    /* `begin`, `end` and `often` follow each other in the scratch memory, so one call clears all.
     */
    ms_cuda_clear(work, call->begin, (size_t)(2 * e->rows + 1) * sizeof *call->begin);
    ms_cuda_launch(work, &embedding_bounds, ms_cuda_grid(e->count, 1), call, sizeof *call);
    ms_cuda_launch(work, &embedding_sum, ms_cuda_row_shape(e->rows, e->width), call, sizeof *call);
    ms_cuda_shape shape = { .blocks = { (uint32_t)(often < 264 ? often : 264),
                                        (uint32_t)(strips < 65535 ? strips : 65535) },
                            .threads = { 32, MS_CUDA_OFTEN_WARPS } };
    ms_cuda_launch(work, &embedding_sum_often, shape, call, sizeof *call);
}

static void run_backward(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_embedding_sum_call call = { .e = *(const ms_embedding_args *)arguments };
    const ms_embedding_args *e = &call.e;
    if (e->rows >= UINT32_MAX || e->count >= UINT32_MAX) {
        ms_cuda_work_fail(work, MS_ERROR_UNSUPPORTED,
                          "embedding: a GPU takes fewer than 2^32 - 1 rows and ids, not %lld and "
                          "%lld",
                          (long long)e->rows, (long long)e->count);
        return;
    }
    ms_cuda_sort_call by_id = { .ids = e->ids,
                                .count = e->count,
                                .tiles = (e->count + MS_CUDA_SORT_TILE - 1) / MS_CUDA_SORT_TILE,
                                .rows = e->rows,
                                .ids_dtype = e->ids_dtype };
    int64_t often = e->count / (MS_CUDA_OFTEN + 1);
    size_t numbers = (size_t)(4 * e->count + 16 * by_id.tiles + 2 * e->rows + 1 + often);
    uint32_t *scratch = ms_cuda_scratch(work, numbers * sizeof *scratch);
    if (!scratch) return;
    by_id.keys = scratch;
    by_id.positions = scratch + e->count;
    by_id.sorted_keys = scratch + 2 * e->count;
    by_id.sorted_positions = scratch + 3 * e->count;
    by_id.digits = scratch + 4 * e->count;
    sort(work, &by_id);
    call.keys = by_id.keys;
    call.positions = by_id.positions;
    call.begin = by_id.digits + 16 * by_id.tiles;
    call.end = call.begin + e->rows;
    call.often = call.end + e->rows;
    call.often_rows = call.often + 1;
    call.aligned =
        e->width % 8 == 0 && ms_cuda_is_aligned(e->table) && ms_cuda_is_aligned(e->values);
    sum(work, &call);
}

MS_CUDA_TASK_THAT_FAILS(embedding, "embedding", ms_embedding_args, MS_KIND_COMPUTE, run_forward,
                        explain_id)
MS_CUDA_TASK(embedding_backward, "embedding gradient", ms_embedding_args, MS_KIND_COMPUTE,
             run_backward)
