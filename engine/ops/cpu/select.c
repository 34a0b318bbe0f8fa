/* select.c: tasks that gather, scatter and choose. What one position gets is always done by one
 * thread, in order of position.
 *
 * A kernel of another device must keep what the order decides: the last of equal indices wins in
 * scatter, scatter_add adds from first to last, topk orders equal values by position, and `above`
 * gives positions in ascending order. Bad indices fail the task and touch no memory. */
#include "ops/select.h"

#include <math.h>

#include "ops/backend.h"
#include "ops/cpu/convert.h"
#include "ops/cpu/strided.h"

#define BLOCK 1024

/* The number of tiles that ms_tiles gives for the elements, but no more than there are units: a
 * unit is never divided between tiles. At least one tile, so that a task always runs its
 * function. */
static uint32_t unit_tiles(int64_t units, int64_t elements, uint64_t bytes)
{
    uint32_t tiles = ms_tiles(elements, bytes);
    if (tiles == 0) tiles = 1;
    if (units >= tiles) return tiles;
    return (uint32_t)(units > 0 ? units : 1);
}

/* ------------------------------------------------------- gather and scatter */

/* One gather or scatter. `width` is the number of columns of a unit of scatter. Tiles only ever set
 * `outside` to 1, so a relaxed store is enough; the end of the task orders it before the read. */
typedef struct select_work {
    const ms_select_args *args;
    int64_t units, width;
    uint32_t tiles;
    bool add;
    int outside; /* set by any tile that meets an index outside */
} select_work;

/* The operator admits i64, i32 and u16 as indices, so the last line needs no test. A stride of 0
 * repeats an index, where the index was broadcast. */
static int64_t index_at(const ms_select_args *args, int64_t outer, int64_t k, int64_t inner)
{
    int64_t at = outer * args->index_strides[0] + k * args->index_strides[1]
                 + inner * args->index_strides[2];
    if (args->index_dtype == MS_I64) return ((const int64_t *)args->index)[at];
    if (args->index_dtype == MS_I32) return ((const int32_t *)args->index)[at];
    return ((const uint16_t *)args->index)[at];
}

/* An index outside is skipped and remembered: nothing is read or written there, and the task fails
 * afterwards. A tile has no way to fail the task by itself; the task does it after the last
 * tile. */
static bool usable(select_work *work, int64_t index)
{
    if (index >= 0 && index < work->args->rows.n) return true;
    __atomic_store_n(&work->outside, 1, __ATOMIC_RELAXED);
    return false;
}

/* Fails the task with the first index outside. It is searched again in order of position, so that
 * the message does not depend on which thread met one first. The second search is paid only by a
 * task that fails. */
static ms_task_result select_result(ms_run *run, const select_work *work)
{
    const ms_select_args *args = work->args;
    if (!work->outside) return MS_TASK_DONE;
    for (int64_t o = 0; o < args->rows.outer; o++)
        for (int64_t k = 0; k < args->k; k++)
            for (int64_t i = 0; i < args->rows.inner; i++) {
                int64_t index = index_at(args, o, k, i);
                if (index >= 0 && index < args->rows.n) continue;
                ms_run_fail(run, MS_ERROR_ARGUMENT, "%s: index %lld outside 0..%lld", args->name,
                            (long long)index, (long long)args->rows.n - 1);
                return MS_TASK_FAILED;
            }
    return MS_TASK_DONE;
}

/* Elements move as unsigned integers of their size, so that NaN payloads and signed zeros keep
 * their bits. */
static void copy_one(void *to, const void *from, size_t size)
{
    if (size == 4) *(uint32_t *)to = *(const uint32_t *)from;
    else if (size == 2) *(uint16_t *)to = *(const uint16_t *)from;
    else if (size == 8) *(uint64_t *)to = *(const uint64_t *)from;
    else *(uint8_t *)to = *(const uint8_t *)from;
}

/* Units are (outer, k). Where one index serves a whole row (its stride is 0, as in a lookup of
 * rows), the row is copied at once. Gathering is bound by memory: every result is written once, and
 * the rows of the whole are read in the order of the indices, which caches and prefetchers cannot
 * foresee. Units write different places of `small`, so they may run in any order. */
static void gather_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    select_work *work = context;
    const ms_select_args *args = work->args;
    const ms_rows *rows = &args->rows;
    size_t size = ms_dtype_bytes((ms_dtype)args->dtype);
    int64_t bytes = (int64_t)size;
    bool row_index = args->index_strides[2] == 0 || rows->inner == 1;
    for (int64_t unit = work->units * tile / work->tiles;
         unit < work->units * (tile + 1) / work->tiles; unit++) {
        int64_t outer = unit / args->k, k = unit % args->k;
        char *to = (char *)args->small
                   + (outer * args->small_strides[0] + k * args->small_strides[1]) * bytes;
        const char *from = (const char *)args->whole + outer * rows->outer_stride * bytes;
        if (row_index) {
            int64_t index = index_at(args, outer, k, 0);
            if (usable(work, index))
                ms_copy_strided(to, args->small_strides[2], from + index * rows->stride * bytes,
                                rows->inner_stride, rows->inner, size);
            continue;
        }
        for (int64_t i = 0; i < rows->inner; i++) {
            int64_t index = index_at(args, outer, k, i);
            if (usable(work, index))
                copy_one(to + i * args->small_strides[2] * bytes,
                         from + (index * rows->stride + i * rows->inner_stride) * bytes, size);
        }
    }
}

/* Unsigned addition wraps, as integers of the engine do; signed overflow would be undefined. 16-bit
 * floats are refused by the operator. On floats the order of additions decides the bits; it is that
 * of scatter_tile. */
static void add_one(ms_dtype dtype, void *to, const void *from)
{
    switch (dtype) {
    case MS_F32: *(float *)to += *(const float *)from; break;
    case MS_I64: *(uint64_t *)to += *(const uint64_t *)from; break;
    case MS_I32: *(uint32_t *)to += *(const uint32_t *)from; break;
    case MS_U16: *(uint16_t *)to = (uint16_t)(*(uint16_t *)to + *(const uint16_t *)from); break;
    default: *(uint8_t *)to = (uint8_t)(*(uint8_t *)to + *(const uint8_t *)from); break;
    }
}

/* Units are (outer, some columns). All k of a column belong to one unit, so two threads never write
 * to the same place and additions happen in order of position. Where an index occurs several times,
 * scatter leaves the value of the last position and scatter_add adds from the first position to the
 * last. Atomic operations would keep neither promise; a device may give one thread a column, as
 * here, or sort by index first. */
static void scatter_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    select_work *work = context;
    const ms_select_args *args = work->args;
    const ms_rows *rows = &args->rows;
    ms_dtype dtype = (ms_dtype)args->dtype;
    int64_t size = (int64_t)ms_dtype_bytes(dtype),
            strips = (rows->inner + work->width - 1) / work->width;
    for (int64_t unit = work->units * tile / work->tiles;
         unit < work->units * (tile + 1) / work->tiles; unit++) {
        int64_t outer = unit / strips, begin = unit % strips * work->width,
                end = begin + work->width < rows->inner ? begin + work->width : rows->inner;
        for (int64_t k = 0; k < args->k; k++)
            for (int64_t i = begin; i < end; i++) {
                int64_t index = index_at(args, outer, k, i);
                if (!usable(work, index)) continue;
                char *to =
                    (char *)args->whole
                    + (outer * rows->outer_stride + index * rows->stride + i * rows->inner_stride)
                          * size;
                const char *from = (const char *)args->small
                                   + (outer * args->small_strides[0] + k * args->small_strides[1]
                                      + i * args->small_strides[2])
                                         * size;
                if (work->add) add_one(dtype, to, from);
                else copy_one(to, from, (size_t)size);
            }
    }
}

/* The bytes that decide the number of tiles include 8 for each index. A strip of 256 columns is one
 * unit of scatter: wide enough to use whole cache lines, and narrow enough that a wide tensor with
 * a single outer position still gives several threads work. */
static ms_task_result select_run(ms_run *run, const ms_select_args *args, bool scatter, bool add)
{
    const ms_rows *rows = &args->rows;
    int64_t elements = rows->outer * args->k * rows->inner;
    select_work work = { .args = args, .add = add, .width = 256 };
    work.units = scatter ? rows->outer * ((rows->inner + work.width - 1) / work.width)
                         : rows->outer * args->k;
    work.tiles = unit_tiles(work.units, elements,
                            (uint64_t)elements * (ms_dtype_bytes((ms_dtype)args->dtype) + 8));
    ms_run_tiles(run, work.tiles, scatter ? scatter_tile : gather_tile, &work);
    return select_result(run, &work);
}

static ms_task_result gather_run(ms_run *run, void *arguments)
{
    return select_run(run, arguments, false, false);
}
static ms_task_result scatter_run(ms_run *run, void *arguments)
{
    return select_run(run, arguments, true, false);
}
static ms_task_result scatter_add_run(ms_run *run, void *arguments)
{
    return select_run(run, arguments, true, true);
}

/* --------------------------------------------------------------------- topk */

/* An element of the heap: its key and its position. For floats the key is order_of the value, for
 * integers the value itself; both are complemented when the least are wanted. One comparison then
 * serves all dtypes. */
typedef struct candidate {
    int64_t key, index;
} candidate;

/* One search for the k best of each row. A unit is a row; rows are never divided, since a heap
 * belongs to one row. Tiles only ever set no_memory to 1. */
typedef struct topk_work {
    const ms_topk_args *args;
    const ms_convert_kernels *convert;
    int64_t rows;
    uint32_t tiles;
    int no_memory;
} topk_work;

/* An integer in the order of the numbers. The bits of positive floats ascend with the value; those
 * of negative ones descend, so the magnitude is negated. Both zeros are equal, and NaN is above
 * all. Any mapping that keeps the order of numbers would do: what other devices must share is that
 * NaN is the greatest and that both zeros are equal, so that their positions decide. */
static int64_t order_of(float x)
{
    if (x != x) return INT64_MAX;
    if (x == 0) return 0;
    int32_t bits = (int32_t)ms_bits_from_float(x);
    return bits < 0 ? -(int64_t)(bits & 0x7fffffff) : bits;
}

/* Whether a comes after b in the result: a lower key, or the same key at a higher position. The
 * order is total, so the result does not depend on the heap's history. A device that sorts must
 * compare both, or equal values come out in an order of its own. */
static bool worse(candidate a, candidate b)
{
    return a.key < b.key || (a.key == b.key && a.index > b.index);
}

/* Restores the heap from `at` downwards. The worst element is at the root, where the next better
 * one replaces it. `moved` is written once at the end instead of being swapped at each level. */
static void sift(candidate *heap, int64_t count, int64_t at)
{
    candidate moved = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && worse(heap[child + 1], heap[child])) child++;
        if (!worse(heap[child], moved)) break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* Keeps the k best seen so far. The first k are only collected; the heap is built once they are
 * complete, in O(k). Most elements of a long row are worse than the root and cost one
 * comparison. */
static void offer(candidate *heap, int64_t k, int64_t *count, candidate one)
{
    if (*count < k) {
        heap[(*count)++] = one;
        if (*count == k)
            for (int64_t i = k / 2; i-- > 0;) sift(heap, k, i);
    } else if (worse(heap[0], one)) {
        heap[0] = one;
        sift(heap, k, 0);
    }
}

/* One pass over the row with O(n log k) comparisons at worst. The values are copied from the input
 * and not converted back, so they keep their bits. The row may be strided, so each block is first
 * copied side by side: conversions need contiguous memory. */
static void topk_row(const topk_work *work, int64_t row, candidate *heap)
{
    const ms_topk_args *args = work->args;
    const ms_rows *rows = &args->rows;
    ms_dtype dtype = (ms_dtype)args->dtype;
    size_t size = ms_dtype_bytes(dtype);
    bool real = ms_dtype_is_float(dtype);
    int64_t outer = row / rows->inner, inner = row % rows->inner, count = 0;
    const char *from = (const char *)args->in
                       + (outer * rows->outer_stride + inner * rows->inner_stride) * (int64_t)size;
    for (int64_t at = 0; at < rows->n; at += BLOCK) {
        uint64_t raw[BLOCK];
        union {
            float real[BLOCK];
            int64_t whole[BLOCK];
        } block;
        int64_t n = rows->n - at < BLOCK ? rows->n - at : BLOCK;
        ms_copy_strided(raw, 1, from + at * rows->stride * (int64_t)size, rows->stride, n, size);
        if (real) work->convert->to_f32[dtype](block.real, raw, (size_t)n);
        else work->convert->to_i64[dtype](block.whole, raw, (size_t)n);
        for (int64_t i = 0; i < n; i++) {
            int64_t key = real ? order_of(block.real[i]) : block.whole[i];
            /* ~key turns the order round without overflow. */
            offer(heap, args->k, &count, (candidate){ args->largest ? key : ~key, at + i });
        }
    }
    /* Taking the worst away again and again leaves the best in front. */
    for (int64_t left = args->k - 1; left > 0; left--) {
        candidate worst = heap[0];
        heap[0] = heap[left];
        heap[left] = worst;
        sift(heap, left, 0);
    }
    /* The results are contiguous [outer, k, inner] whatever the strides of the input: `inner` is
     * the distance between the results of one row. */
    for (int64_t i = 0; i < args->k; i++) {
        int64_t to = (outer * args->k + i) * rows->inner + inner;
        args->indices[to] = heap[i].index;
        copy_one((char *)args->values + to * (int64_t)size,
                 from + heap[i].index * rows->stride * (int64_t)size, size);
    }
}

/* The heap is in the scratch of the thread that runs the tile, so tiles share nothing. Without
 * memory the tile leaves its rows unwritten, and the task fails. */
static void topk_tile(void *context, uint32_t tile, ms_thread *thread)
{
    topk_work *work = context;
    candidate *heap = ms_thread_scratch(thread, 1, (size_t)work->args->k * sizeof *heap);
    if (heap == NULL) {
        __atomic_store_n(&work->no_memory, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t row = work->rows * tile / work->tiles; row < work->rows * (tile + 1) / work->tiles;
         row++)
        topk_row(work, row, heap);
}

/* An element counts 8 bytes for the number of tiles, whatever its dtype: its cost is the comparison
 * with the heap and not the load. */
static ms_task_result topk_run(ms_run *run, void *arguments)
{
    const ms_topk_args *args = arguments;
    topk_work work = { args, ms_convert_kernels_for(ms_run_isa(run)),
                       args->rows.outer * args->rows.inner, 0, 0 };
    work.tiles =
        unit_tiles(work.rows, work.rows * args->rows.n, (uint64_t)(work.rows * args->rows.n) * 8);
    ms_run_tiles(run, work.tiles, topk_tile, &work);
    if (!work.no_memory) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY, "topk: no memory for %lld candidates", (long long)args->k);
    return MS_TASK_FAILED;
}

/* -------------------------------------------------------------------- above */

/* One search for elements above a threshold. `write` says which of the two passes runs.
 * counts[tile] is first the number of results of a tile, then the number of results in all earlier
 * tiles. */
typedef struct above_work {
    const ms_above_args *args;
    const ms_convert_kernels *convert;
    int64_t *counts;
    float threshold;
    uint32_t tiles;
    bool write;
} above_work;

/* Two passes, because a tile must know where its results begin. The first counts the results of
 * each tile; the second writes them from counts[tile] on, where the caller has put the sums of the
 * earlier tiles. Positions come out in ascending order for any number of threads. The second pass
 * reads the input again, which costs less than a buffer for the results of a tile, as their number
 * is unknown. NaN is never above a threshold. */
static void above_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    const above_work *work = context;
    const ms_above_args *args = work->args;
    ms_dtype dtype = (ms_dtype)args->dtype;
    size_t size = ms_dtype_bytes(dtype);
    int64_t end = ms_tile_begin(args->count, work->tiles, tile + 1),
            to = work->write ? work->counts[tile] : 0;
    for (int64_t at = ms_tile_begin(args->count, work->tiles, tile); at < end; at += BLOCK) {
        uint64_t raw[BLOCK];
        float x[BLOCK];
        int64_t n = end - at < BLOCK ? end - at : BLOCK;
        ms_copy_strided(raw, 1, (const char *)args->in + at * args->stride * (int64_t)size,
                        args->stride, n, size);
        work->convert->to_f32[dtype](x, raw, (size_t)n);
        for (int64_t i = 0; i < n; i++) {
            if (!(fabsf(x[i]) > work->threshold)) continue;
            if (work->write && to < args->capacity) {
                args->indices[to] = at + i;
                copy_one((char *)args->values + to * (int64_t)size,
                         (const char *)raw + i * (int64_t)size, size);
            }
            to++;
        }
    }
    if (!work->write) work->counts[tile] = to;
}

/* Results beyond the capacity are dropped, the last positions first; the rest of the outputs is
 * zeroed so that they depend on the input alone. The host never learns the number of results: it
 * stays in `found` on the device, and the shapes of the outputs are those of the capacity. The
 * threshold is read here and not on the host for the same reason: an earlier task may compute
 * it. */
static ms_task_result above_run(ms_run *run, void *arguments)
{
    const ms_above_args *args = arguments;
    above_work work = { .args = args,
                        .convert = ms_convert_kernels_for(ms_run_isa(run)),
                        .tiles = ms_tiles(args->count, (uint64_t)args->count * 4) };
    size_t size = ms_dtype_bytes((ms_dtype)args->dtype);
    int64_t total = 0;
    if (work.tiles == 0) work.tiles = 1;
    work.counts = ms_thread_scratch(ms_run_thread(run), 0, work.tiles * sizeof *work.counts);
    if (work.counts == NULL) {
        ms_run_fail(run, MS_ERROR_MEMORY, "above: no memory for counting");
        return MS_TASK_FAILED;
    }
    work.convert->to_f32[args->threshold_dtype](&work.threshold, args->threshold, 1);
    ms_run_tiles(run, work.tiles, above_tile, &work);
    for (uint32_t tile = 0; tile < work.tiles; tile++) {
        int64_t here = work.counts[tile];
        work.counts[tile] = total;
        total += here;
    }
    work.write = true;
    ms_run_tiles(run, work.tiles, above_tile, &work);
    if (total > args->capacity) total = args->capacity;
    memset((char *)args->values + (size_t)total * size, 0, (size_t)(args->capacity - total) * size);
    memset(args->indices + total, 0, (size_t)(args->capacity - total) * sizeof *args->indices);
    *args->found = total;
    return MS_TASK_DONE;
}

/* ----------------------------------------------------------------- quantile */

/* One of three numbers that is neither the least nor the greatest. x has no NaN here. */
static float median(float a, float b, float c)
{
    float least = a < b ? a : b;
    float most = a < b ? b : a;
    if (most < c) return most;
    return least < c ? c : least;
}

/* The k-th smallest of x, which is reordered so that no element before it is greater (Hoare's
 * quickselect). x has no NaN, with which the inner loops would leave the range. On average it
 * touches about 3 n numbers, where sorting would compare n log n times. Bad pivots can cost n^2;
 * the median of three makes the usual bad cases (ordered and reversed input) good ones. */
static float select_kth(float *x, int64_t n, int64_t k)
{
    int64_t low = 0, high = n - 1;
    while (low < high) {
        /* The median of three as pivot: ordered input is common. */
        float pivot = median(x[low], x[low + (high - low) / 2], x[high]);
        int64_t i = low, j = high;
        while (i <= j) {
            /* Strict comparisons stop at elements that equal the pivot, so that a row of equal
             * numbers is cut in halves and not one by one. */
            while (x[i] < pivot) i++;
            while (x[j] > pivot) j--;
            if (i > j) break;
            float swap = x[i];
            x[i++] = x[j];
            x[j--] = swap;
        }
        if (k <= j) high = j;
        else if (k >= i) low = i;
        else break;
    }
    return x[k];
}

/* Linear interpolation between the two neighbours of position q (n - 1). Any NaN makes the result
 * NaN. The element after the k-th is the least of those that the selection has left after it. It
 * runs on one thread: the selection is serial, and the scratch is a copy of the input in f32, which
 * the selection may reorder. */
static ms_task_result quantile_run(ms_run *run, void *arguments)
{
    const ms_quantile_args *args = arguments;
    const ms_convert_kernels *convert = ms_convert_kernels_for(ms_run_isa(run));
    ms_dtype dtype = (ms_dtype)args->dtype;
    size_t size = ms_dtype_bytes(dtype);
    float *x = ms_thread_scratch(ms_run_thread(run), 0, (size_t)args->count * sizeof *x),
          result = NAN;
    bool nan = false;
    if (x == NULL) {
        ms_run_fail(run, MS_ERROR_MEMORY, "quantile: no memory for %lld numbers",
                    (long long)args->count);
        return MS_TASK_FAILED;
    }
    for (int64_t at = 0; at < args->count; at += BLOCK) {
        uint64_t raw[BLOCK];
        int64_t n = args->count - at < BLOCK ? args->count - at : BLOCK;
        ms_copy_strided(raw, 1, (const char *)args->in + at * args->stride * (int64_t)size,
                        args->stride, n, size);
        convert->to_f32[dtype](x + at, raw, (size_t)n);
        for (int64_t i = at; i < at + n; i++) nan = nan || x[i] != x[i];
    }
    if (!nan) {
        double position = args->q * (double)(args->count - 1);
        int64_t k = (int64_t)position;
        double low = select_kth(x, args->count, k), high = low;
        if (k + 1 < args->count) {
            high = x[k + 1]; /* the least of those after it */
            for (int64_t i = k + 2; i < args->count; i++) high = x[i] < high ? x[i] : high;
        }
        double share = position - (double)k;
        /* The difference of infinities, or of one and a number, says nothing of what is between. */
        if (share == 0) result = (float)low;
        else if (isinf(low) || isinf(high)) result = (float)(low * (1 - share) + high * share);
        else result = (float)(low + (high - low) * share);
    }
    convert->from_f32[dtype](args->out, &result, 1);
    return MS_TASK_DONE;
}

const ms_task ms_cpu_gather = { "gather", gather_run, sizeof(ms_select_args), MS_KIND_COMPUTE };
const ms_task ms_cpu_scatter = { "scatter", scatter_run, sizeof(ms_select_args), MS_KIND_COMPUTE };
const ms_task ms_cpu_scatter_add = { "scatter_add", scatter_add_run, sizeof(ms_select_args),
                                     MS_KIND_COMPUTE };
const ms_task ms_cpu_topk = { "topk", topk_run, sizeof(ms_topk_args), MS_KIND_COMPUTE };
const ms_task ms_cpu_above = { "above", above_run, sizeof(ms_above_args), MS_KIND_COMPUTE };
const ms_task ms_cpu_quantile = { "quantile", quantile_run, sizeof(ms_quantile_args),
                                  MS_KIND_COMPUTE };
