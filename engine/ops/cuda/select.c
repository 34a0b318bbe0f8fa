/* select.c: launches the kernels that gather, scatter and choose. */
#include "ops/cuda/select.h"

#include <stdio.h>

#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(select)
MS_CUDA_KERNEL(select, gather)
MS_CUDA_KERNEL(select, scatter)
MS_CUDA_KERNEL(select, search_begin)
MS_CUDA_KERNEL(select, search_count)
MS_CUDA_KERNEL(select, search_choose)
MS_CUDA_KERNEL(select, topk_short)
MS_CUDA_KERNEL(select, topk_collect)
MS_CUDA_KERNEL(select, topk_sort)
MS_CUDA_KERNEL(select, quantile)
MS_CUDA_KERNEL(select, above_count)
MS_CUDA_KERNEL(select, above_write)

/* As many blocks as keep all multiprocessors busy; rows whose search runs together, and elements
 * that are chosen of them. */
enum { BLOCKS = 1056, ROWS = 512, CHOSEN = 1 << 21 };

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t divided(int64_t a, int64_t by) { return (a + by - 1) / by; }

/* ---------------------------------------------------------- gather and scatter */

/* The name is static. */
static void explain(const ms_cuda_fault *fault, char *message, size_t bytes)
{
    snprintf(message, bytes, "%s: index %lld outside 0..%lld",
             (const char *)(intptr_t)fault->values[2], (long long)fault->values[0],
             (long long)fault->values[1]);
}

/* Where one index serves a whole row, and rows are contiguous and aligned, they are copied in
 * pieces of 16 bytes. */
static void widen(ms_cuda_gather_call *call)
{
    ms_select_args *s = &call->s;
    int64_t each = 16 / call->size;
    int64_t *strides[] = { &s->small_strides[0], &s->small_strides[1], &s->rows.outer_stride,
                           &s->rows.stride, &s->rows.inner };
    if (s->index_strides[2] != 0 || s->small_strides[2] != 1 || s->rows.inner_stride != 1
        || ((uintptr_t)s->small | (uintptr_t)s->whole) % 16 != 0)
        return;
    for (int i = 0; i < 5; i++)
        if (*strides[i] % each != 0) return;
    for (int i = 0; i < 5; i++) *strides[i] /= each;
    call->size = 16;
}

static void run_gather(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_gather_call call = { .s = *(const ms_select_args *)arguments };
    call.fault = ms_cuda_fault_of(work);
    call.size = (int32_t)ms_dtype_bytes((ms_dtype)call.s.dtype);
    if (call.fault == NULL) return;
    widen(&call);
    call.count = call.s.rows.outer * call.s.k * call.s.rows.inner;
    ms_cuda_launch(work, &gather, ms_cuda_grid(call.count, 1), &call, sizeof call);
}

/* Few columns are shared by many threads. Every thread reads all indices, so there are no more
 * threads than hide the time of the reads. */
static void run_scatters(ms_cuda_work *work, const void *arguments, bool add)
{
    ms_cuda_scatter_call call = { .s = *(const ms_select_args *)arguments, .add = add };
    const ms_rows *rows = &call.s.rows;
    call.fault = ms_cuda_fault_of(work);
    call.size = (int32_t)ms_dtype_bytes((ms_dtype)call.s.dtype);
    call.columns = rows->outer * rows->inner;
    if (call.fault == NULL) return;
    call.shares = 1;
    while (call.shares * 2 * call.columns <= 32768 && call.shares < rows->n
           && call.shares * 16 < call.s.k)
        call.shares *= 2;
    ms_cuda_launch(work, &scatter, ms_cuda_grid(call.columns * call.shares, 1), &call, sizeof call);
}
static void run_scatter(ms_cuda_work *work, const void *arguments)
{
    run_scatters(work, arguments, false);
}
static void run_scatter_add(ms_cuda_work *work, const void *arguments)
{
    run_scatters(work, arguments, true);
}

/* ------------------------------------------------------------ searching by digits */

/* Blocks in x share a row; y is the row. */
static ms_cuda_shape over_rows(const ms_cuda_search_call *call)
{
    int64_t each = least(divided(call->rows.n, 4096), divided(BLOCKS, call->count));
    /* A block counts fewer than 2^32 elements. */
    each = each < call->rows.n >> 31 ? call->rows.n >> 31 : each;
    return (ms_cuda_shape){ .blocks = { (uint32_t)each, (uint32_t)call->count },
                            .threads = { MS_CUDA_THREADS } };
}

static void search_digit(ms_cuda_work *work, const ms_cuda_search_call *call)
{
    ms_cuda_launch(work, &search_count, over_rows(call), call, sizeof *call);
    ms_cuda_launch(work, &search_choose,
                   (ms_cuda_shape){ .blocks = { (uint32_t)call->count }, .threads = { 256 } }, call,
                   sizeof *call);
}

/* Finds the last of the wanted elements, digit by digit. */
static void search_rows(ms_cuda_work *work, ms_cuda_search_call *call)
{
    int32_t digits = 0;
    ms_cuda_clear(work, call->searches, (size_t)call->count * sizeof *call->searches);
    ms_cuda_launch(work, &search_begin, ms_cuda_grid(call->count, 1), call, sizeof *call);
    call->of_distance = false;
    for (call->shift = call->bits - 8; call->shift >= 0; call->shift -= 8) search_digit(work, call);
    if (call->exact) return;
    while ((call->rows.n - 1) >> (8 * digits) != 0) digits++;
    call->of_distance = true;
    for (call->shift = 8 * digits - 8; call->shift >= 0; call->shift -= 8) search_digit(work, call);
}

static int32_t bits_of(uint8_t dtype)
{
    if (ms_dtype_is_float((ms_dtype)dtype)) return 32;
    return 8 * (int32_t)ms_dtype_bytes((ms_dtype)dtype);
}

/* -------------------------------------------------------------------------- topk */

/* As many threads as a step of the sort compares pairs. */
static uint32_t sort_threads(int64_t count, uint32_t most)
{
    uint32_t threads = 32;
    while (threads < most && threads * 2 < count) threads *= 2;
    return threads;
}

static void search_and_sort(ms_cuda_work *work, ms_cuda_topk_call *call, int64_t rows)
{
    int64_t k = call->search.k,
            together = least(rows, k < CHOSEN / ROWS ? ROWS : divided(CHOSEN, k));
    ms_cuda_search *searches =
        ms_cuda_scratch(work, (size_t)together * sizeof *searches
                                  + (size_t)(together * k) * sizeof *call->candidates);
    if (searches == NULL) return;
    call->search.searches = searches;
    call->candidates = (ms_cuda_candidate *)(searches + together);
    for (int64_t first = 0; first < rows; first += together) {
        call->search.first = first;
        call->search.count = least(together, rows - first);
        search_rows(work, &call->search);
        ms_cuda_launch(work, &topk_collect, over_rows(&call->search), call, sizeof *call);
        ms_cuda_shape shape = { .blocks = { (uint32_t)call->search.count },
                                .threads = { sort_threads(k, 1024) } };
        if (k <= MS_CUDA_SORTED_MOST)
            shape.shared_bytes = (uint32_t)((size_t)k * sizeof *call->candidates);
        ms_cuda_launch(work, &topk_sort, shape, call, sizeof *call);
    }
}

static void run_topk(ms_cuda_work *work, const void *arguments)
{
    const ms_topk_args *args = arguments;
    int64_t rows = args->rows.outer * args->rows.inner;
    ms_cuda_topk_call call = { .search = { .rows = args->rows,
                                           .in = args->in,
                                           .count = rows,
                                           .k = args->k,
                                           .bits = bits_of(args->dtype),
                                           .dtype = args->dtype,
                                           .largest = args->largest },
                               .values = args->values,
                               .indices = args->indices };
    if (rows == 0 || args->k == 0) return;
    if (args->rows.n > MS_CUDA_SORTED_MOST) {
        search_and_sort(work, &call, rows);
        return;
    }
    ms_cuda_shape shape = { .blocks = { (uint32_t)least(rows, INT32_MAX) },
                            .threads = { sort_threads(args->rows.n, 256) },
                            .shared_bytes =
                                (uint32_t)args->rows.n * (uint32_t)sizeof(ms_cuda_candidate) };
    ms_cuda_launch(work, &topk_short, shape, &call, sizeof call);
}

/* ---------------------------------------------------------------------- quantile */

/* Three searches of the same elements: for the two neighbours, and for the greatest, which is NaN
 * if anything is. */
static void run_quantile(ms_cuda_work *work, const void *arguments)
{
    const ms_quantile_args *args = arguments;
    double position = args->q * (double)(args->count - 1);
    int64_t k = (int64_t)position;
    ms_cuda_search_call search = {
        .rows = { .outer = 3, .n = args->count, .inner = 1, .stride = args->stride },
        .in = args->in,
        .count = 3,
        .ranks = { k + 1, least(k + 2, args->count), args->count },
        .bits = 32,
        .dtype = args->dtype,
        .exact = true
    };
    search.searches = ms_cuda_scratch(work, 3 * sizeof *search.searches);
    if (search.searches == NULL) return;
    search_rows(work, &search);
    ms_cuda_quantile_call call = { .searches = search.searches,
                                   .out = args->out,
                                   .share = position - (double)k,
                                   .dtype = args->dtype };
    ms_cuda_launch(work, &quantile, (ms_cuda_shape){ .blocks = { 1 }, .threads = { 1 } }, &call,
                   sizeof call);
}

/* ------------------------------------------------------------------------- above */

static void run_above(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_above_call call = { .a = *(const ms_above_args *)arguments };
    int64_t tiles = divided(call.a.count, MS_CUDA_ABOVE_TILE);
    call.part = divided(tiles, BLOCKS) * MS_CUDA_ABOVE_TILE;
    call.parts = tiles == 0 ? 1 : divided(call.a.count, call.part);
    call.counts = ms_cuda_scratch(work, (size_t)call.parts * sizeof *call.counts);
    if (call.counts == NULL) return;
    ms_cuda_shape shape = { .blocks = { (uint32_t)call.parts }, .threads = { 256 } };
    ms_cuda_launch(work, &above_count, shape, &call, sizeof call);
    ms_cuda_launch(work, &above_write, shape, &call, sizeof call);
}

MS_CUDA_TASK_THAT_FAILS(gather, "gather", ms_select_args, MS_KIND_COMPUTE, run_gather, explain)
MS_CUDA_TASK_THAT_FAILS(scatter, "scatter", ms_select_args, MS_KIND_COMPUTE, run_scatter, explain)
MS_CUDA_TASK_THAT_FAILS(scatter_add, "scatter_add", ms_select_args, MS_KIND_COMPUTE,
                        run_scatter_add, explain)
MS_CUDA_TASK(topk, "topk", ms_topk_args, MS_KIND_COMPUTE, run_topk)
MS_CUDA_TASK(above, "above", ms_above_args, MS_KIND_COMPUTE, run_above)
MS_CUDA_TASK(quantile, "quantile", ms_quantile_args, MS_KIND_COMPUTE, run_quantile)
