/* select.cu: kernels that gather, scatter and choose. What one place gets is always done by one
 * thread, in order of position. */
#include "ops/cuda/select.h"

#include "ops/cuda/order.h"
#include "ops/cuda/scan.h"

/* Elements move as unsigned integers of their size, so that every bit pattern survives. */
MS_DEVICE void copy_one(void *to, int64_t to_at, const void *from, int64_t from_at, int size)
{
    switch (size) {
    case 1: static_cast<uint8_t *>(to)[to_at] = static_cast<const uint8_t *>(from)[from_at]; break;
    case 2:
        static_cast<uint16_t *>(to)[to_at] = static_cast<const uint16_t *>(from)[from_at];
        break;
    case 4:
        static_cast<uint32_t *>(to)[to_at] = static_cast<const uint32_t *>(from)[from_at];
        break;
    case 8:
        static_cast<uint64_t *>(to)[to_at] = static_cast<const uint64_t *>(from)[from_at];
        break;
    default:
        static_cast<ms_chunk *>(to)[to_at] = static_cast<const ms_chunk *>(from)[from_at];
        break;
    }
}
MS_DEVICE int size_of(uint8_t dtype)
{
    switch (dtype) {
    case MS_I64: return 8;
    case MS_F32:
    case MS_I32: return 4;
    case MS_F16:
    case MS_BF16:
    case MS_U16: return 2;
    default: return 1;
    }
}

/* a / by, and what is left over. A division of 32 bits takes a fraction of the time. */
MS_DEVICE int64_t divide(int64_t a, int64_t by, int64_t *rest)
{
    if (((uint64_t)a | (uint64_t)by) >> 32 == 0) {
        uint32_t quotient = (uint32_t)a / (uint32_t)by;
        *rest = (uint32_t)a - quotient * (uint32_t)by;
        return quotient;
    }
    *rest = a % by;
    return a / by;
}

/* ---------------------------------------------------------- gather and scatter */

MS_DEVICE int64_t index_of(const ms_select_args &s, int64_t outer, int64_t k, int64_t inner)
{
    return ms_read_whole(
        s.index, outer * s.index_strides[0] + k * s.index_strides[1] + inner * s.index_strides[2],
        s.index_dtype);
}
MS_DEVICE bool is_inside(const ms_select_args &s, int64_t index)
{
    return index >= 0 && index < s.rows.n;
}
/* `position` counts the indices. */
MS_DEVICE void note_outside(ms_cuda_fault *fault, const ms_select_args &s, int64_t position,
                            int64_t index)
{
    ms_note_fault(fault, position, index, s.rows.n - 1,
                  (int64_t) reinterpret_cast<intptr_t>(s.name));
}

MS_KERNEL_FREE(gather, ms_cuda_gather_call, 256)
{
    const ms_select_args &s = args.s;
    const ms_rows &rows = s.rows;
    for (int64_t i = GRID_FIRST; i < args.count; i += GRID_STEP) {
        int64_t inner, k, outer = divide(divide(i, rows.inner, &inner), s.k, &k),
                          index = index_of(s, outer, k, inner);
        if (!is_inside(s, index)) {
            note_outside(args.fault, s, i, index);
            continue;
        }
        copy_one(s.small,
                 outer * s.small_strides[0] + k * s.small_strides[1] + inner * s.small_strides[2],
                 s.whole,
                 outer * rows.outer_stride + index * rows.stride + inner * rows.inner_stride,
                 args.size);
    }
}

/* Integers wrap. */
MS_DEVICE void add_one(const ms_select_args &s, int64_t to, int64_t from)
{
    if (s.dtype == MS_F32) {
        float *at = static_cast<float *>(s.whole) + to;
        *at = ms_add(*at, static_cast<const float *>(s.small)[from]);
        return;
    }
    uint64_t sum = (uint64_t)ms_read_whole(s.whole, to, s.dtype)
                   + (uint64_t)ms_read_whole(s.small, from, s.dtype);
    ms_write_whole(s.whole, to, s.dtype, (int64_t)sum);
}

/* One column of the small side, share `share` of its indices. The first index that is outside is
 * noted by the thread of share 0. */
struct column {
    int64_t outer, inner, share;
    bool noted;
};
MS_DEVICE void place_one(const ms_cuda_scatter_call &args, column *c, int64_t k, int64_t index)
{
    const ms_select_args &s = args.s;
    if (!is_inside(s, index)) {
        if (c->share == 0 && !c->noted)
            note_outside(args.fault, s, (c->outer * s.k + k) * s.rows.inner + c->inner, index);
        c->noted = true;
        return;
    }
    if ((index & (args.shares - 1)) != c->share) return;
    int64_t to = c->outer * s.rows.outer_stride + index * s.rows.stride
                 + c->inner * s.rows.inner_stride,
            from = c->outer * s.small_strides[0] + k * s.small_strides[1]
                   + c->inner * s.small_strides[2];
    if (args.add) add_one(s, to, from);
    else copy_one(s.whole, to, s.small, from, args.size);
}

/* Columns and shares have a thread each, which walks along all k: so equal indices come in order of
 * position. Four indices are read ahead of their use. */
MS_KERNEL_FREE(scatter, ms_cuda_scatter_call, 256)
{
    const ms_select_args &s = args.s;
    for (int64_t i = GRID_FIRST; i < args.columns * args.shares; i += GRID_STEP) {
        int64_t place;
        column c;
        c.share = divide(i, args.columns, &place);
        c.outer = divide(place, s.rows.inner, &c.inner);
        c.noted = false;
        for (int64_t k = 0; k < s.k; k += 4) {
            int64_t index[4];
            for (int j = 0; j < 4; j++)
                index[j] = k + j < s.k ? index_of(s, c.outer, k + j, c.inner) : 0;
            for (int j = 0; j < 4; j++)
                if (k + j < s.k) place_one(args, &c, k + j, index[j]);
        }
    }
}

/* ------------------------------------------------------------ searching by digits */

/* An unsigned key of search.bits bits: a better element has a greater one. Floats have 32 bits; NaN
 * is the greatest, above infinity. */
MS_DEVICE uint64_t key_of(const ms_cuda_search_call &search, int64_t at)
{
    uint64_t key;
    if (ms_is_float(search.dtype)) {
        int64_t order = ms_order_of(ms_read(search.in, at, search.dtype));
        key = order == INT64_MAX ? UINT64_C(0xffffffff) : (uint64_t)(order + (INT64_C(1) << 31));
    } else {
        int64_t whole = ms_read_whole(search.in, at, search.dtype);
        if (search.dtype == MS_I64) key = (uint64_t)whole ^ UINT64_C(1) << 63;
        else key = (uint64_t)(search.dtype == MS_I32 ? whole + (INT64_C(1) << 31) : whole);
    }
    return search.largest ? key : key ^ (~UINT64_C(0) >> (64 - search.bits));
}

MS_DEVICE int64_t start_of(const ms_rows &rows, int64_t row)
{
    int64_t inner, outer = divide(row, rows.inner, &inner);
    return outer * rows.outer_stride + inner * rows.inner_stride;
}

/* The digit of an element that agrees with all that is known, or -1. */
MS_DEVICE int digit_of(const ms_cuda_search_call &call, const ms_cuda_search &search, uint64_t key,
                       uint64_t distance)
{
    uint64_t value = call.of_distance ? distance : key,
             known = call.of_distance ? search.distance : search.key;
    if (call.of_distance && key != search.key) return -1;
    if (call.shift + 8 < 64 && (value ^ known) >> (call.shift + 8) != 0) return -1;
    return (int)(value >> call.shift & 255);
}

/* All else of a search is 0 when it begins. */
MS_KERNEL_FREE(search_begin, ms_cuda_search_call, 256)
{
    for (int64_t row = GRID_FIRST; row < args.count; row += GRID_STEP)
        args.searches[row].left = args.exact ? args.ranks[row] : args.k;
}

/* Counts the digits of a row; the blocks of one row share it. */
MS_KERNEL(search_count, ms_cuda_search_call, 256)
{
    MS_SHARED(uint32_t, counts, 256);
    ms_cuda_search *search = &args.searches[BLOCK_Y];
    int64_t start = start_of(args.rows, args.first + BLOCK_Y);
    if (search->done) return;
    counts[THREAD_X] = 0;
    ms_barrier();
    for (int64_t i = GRID_FIRST; i < args.rows.n; i += GRID_STEP) {
        uint64_t key = key_of(args, start + i * args.rows.stride);
        int digit = digit_of(args, *search, key, (uint64_t)(args.rows.n - 1 - i));
        if (digit >= 0) ms_atomic_add(&counts[digit], 1u);
    }
    ms_barrier();
    if (counts[THREAD_X] != 0) ms_atomic_add(&search->counts[THREAD_X], (uint64_t)counts[THREAD_X]);
}

/* Where the last of the wanted elements has its digit: of the elements with greater digits, fewer
 * are there than wanted. A thread for each digit, from the greatest on. */
MS_KERNEL(search_choose, ms_cuda_search_call, 256)
{
    MS_SHARED(uint64_t, shared, 32);
    ms_cuda_search *search = &args.searches[BLOCK_X];
    int digit = 255 - THREAD_X;
    uint64_t here = search->counts[digit], all, left = (uint64_t)search->left;
    bool done = search->done;
    /* From its barriers on one thread may write what all have read. */
    uint64_t before = ms_sum_before(here, shared, &all);
    if (done) return;
    search->counts[digit] = 0;
    if (before >= left || before + here < left) return;
    if (args.of_distance) search->distance |= (uint64_t)digit << args.shift;
    else search->key |= (uint64_t)digit << args.shift;
    search->left = (int64_t)(left - before);
    if (before + here == left && !args.exact) search->done = 1;
}

/* -------------------------------------------------------------------------- topk */

MS_DEVICE bool is_better(ms_cuda_candidate a, ms_cuda_candidate b)
{
    return a.key > b.key || (a.key == b.key && a.position < b.position);
}

/* Sorts by a bitonic network whose steps all put the better element first, so that places from
 * `count` on count as worse than all. The threads of one block share it. */
MS_DEVICE void sort(ms_cuda_candidate *list, int64_t count)
{
    for (int64_t size = 2; size < 2 * count; size *= 2)
        for (int64_t half = size / 2; half > 0; half /= 2) {
            for (int64_t i = THREAD_X; i < count; i += THREADS_X) {
                /* A merge begins by comparing its second half backwards. */
                int64_t other = half == size / 2 ? i ^ (size - 1) : i ^ half;
                if (other <= i || other >= count || !is_better(list[other], list[i])) continue;
                ms_cuda_candidate worse = list[i];
                list[i] = list[other];
                list[other] = worse;
            }
            ms_barrier();
        }
}

/* The first k candidates of a row are its results. */
MS_DEVICE void write_best(const ms_cuda_topk_call &args, int64_t row, const ms_cuda_candidate *list)
{
    const ms_rows &rows = args.search.rows;
    int64_t inner, outer = divide(row, rows.inner, &inner), start = start_of(rows, row);
    for (int64_t i = THREAD_X; i < args.search.k; i += THREADS_X) {
        int64_t to = (outer * args.search.k + i) * rows.inner + inner;
        args.indices[to] = list[i].position;
        copy_one(args.values, to, args.search.in, start + list[i].position * rows.stride,
                 size_of(args.search.dtype));
    }
}

/* A block for each short row, all of whose elements are sorted. */
MS_KERNEL(topk_short, ms_cuda_topk_call, 256)
{
    MS_SHARED_BYTES(ms_cuda_candidate, list);
    const ms_rows &rows = args.search.rows;
    for (int64_t row = BLOCK_X; row < args.search.count; row += BLOCKS_X) {
        int64_t start = start_of(rows, row);
        for (int64_t i = THREAD_X; i < rows.n; i += THREADS_X) {
            list[i].key = key_of(args.search, start + i * rows.stride);
            list[i].position = i;
        }
        ms_barrier();
        sort(list, rows.n);
        write_best(args, row, list);
        ms_barrier();
    }
}

/* Collects the elements that the search has found, in any order. */
MS_KERNEL_FREE(topk_collect, ms_cuda_topk_call, 256)
{
    const ms_rows &rows = args.search.rows;
    ms_cuda_search *search = &args.search.searches[BLOCK_Y];
    ms_cuda_candidate *list = args.candidates + BLOCK_Y * args.search.k;
    int64_t start = start_of(rows, args.search.first + BLOCK_Y);
    for (int64_t i = GRID_FIRST; i < rows.n; i += GRID_STEP) {
        uint64_t key = key_of(args.search, start + i * rows.stride);
        if (key < search->key
            || (key == search->key && (uint64_t)(rows.n - 1 - i) < search->distance))
            continue;
        uint32_t at = ms_atomic_add(&search->collected, 1u);
        list[at].key = key;
        list[at].position = i;
    }
}

/* Sorts what was collected: in shared memory, or where it is. */
MS_KERNEL(topk_sort, ms_cuda_topk_call, 1024)
{
    MS_SHARED_BYTES(ms_cuda_candidate, few);
    int64_t k = args.search.k;
    ms_cuda_candidate *list = args.candidates + BLOCK_X * k;
    if (k <= MS_CUDA_SORTED_MOST) {
        for (int64_t i = THREAD_X; i < k; i += THREADS_X) few[i] = list[i];
        list = few;
        ms_barrier();
    }
    sort(list, k);
    write_best(args, args.search.first + BLOCK_X, list);
}

/* ---------------------------------------------------------------------- quantile */

/* The number of a key that came from a search for the least. */
MS_DEVICE float number_of(uint64_t key)
{
    uint32_t order = ~(uint32_t)key;
    if (order == 0xffffffffu) return ms_float(0x7fc00000u);
    if (order >> 31) return ms_float(order & 0x7fffffffu);
    return order == 0x80000000u ? 0.0f : ms_float(0x80000000u | (0x80000000u - order));
}

/* Of the three numbers that were searched the last is the greatest of all. The difference of
 * infinities, or of one and a number, says nothing of what is between. */
MS_KERNEL_FREE(quantile, ms_cuda_quantile_call, 1)
{
    double low = number_of(args.searches[0].key), high = number_of(args.searches[1].key),
           share = args.share;
    float greatest = number_of(args.searches[2].key), result;
    if (ms_is_nan(greatest)) result = greatest;
    else if (share == 0) result = (float)low;
    else if (fabs(low) == ms_infinity() || fabs(high) == ms_infinity())
        result = (float)(low * (1 - share) + high * share);
    else result = (float)(low + (high - low) * share);
    ms_write(args.out, 0, args.dtype, result);
}

/* ------------------------------------------------------------------------- above */

/* NaN is never above. */
MS_DEVICE bool is_above(const ms_above_args &a, int64_t i, float threshold)
{
    return fabsf(ms_read(a.in, i * a.stride, a.dtype)) > threshold;
}

MS_KERNEL(above_count, ms_cuda_above_call, 256)
{
    MS_SHARED(int64_t, shared, 32);
    float threshold = ms_read(args.a.threshold, 0, args.a.threshold_dtype);
    int64_t first = BLOCK_X * args.part, last = first + args.part, count = 0;
    if (last > args.a.count) last = args.a.count;
    for (int64_t i = first + THREAD_X; i < last; i += THREADS_X)
        count += is_above(args.a, i, threshold);
    count = ms_block_join(count, shared, ms_plus());
    if (THREAD_X == 0) args.counts[BLOCK_X] = count;
}

/* Writes what is above in one tile, from place `to` on; gives the number of elements. */
MS_DEVICE int64_t write_tile(const ms_above_args &a, int64_t first, int64_t last, int64_t to,
                             float threshold, int64_t *shared)
{
    int64_t begin = first + 8 * THREAD_X, count = 0, all;
    uint32_t are = 0;
    for (int j = 0; j < 8; j++)
        if (begin + j < last && is_above(a, begin + j, threshold)) {
            are |= 1u << j;
            count++;
        }
    to += ms_sum_before(count, shared, &all);
    for (int j = 0; j < 8; j++) {
        if (!(are >> j & 1)) continue;
        if (to < a.capacity) {
            a.indices[to] = begin + j;
            copy_one(a.values, to, a.in, (begin + j) * a.stride, size_of(a.dtype));
        }
        to++;
    }
    return all;
}

/* Each block knows where its results begin from the counts of the parts. What is left of the
 * outputs becomes 0. */
MS_KERNEL(above_write, ms_cuda_above_call, 256)
{
    MS_SHARED(int64_t, shared, 32);
    const ms_above_args &a = args.a;
    float threshold = ms_read(a.threshold, 0, a.threshold_dtype);
    int64_t first = BLOCK_X * args.part, last = first + args.part, before = 0, total = 0;
    if (last > a.count) last = a.count;
    for (int64_t part = THREAD_X; part < args.parts; part += THREADS_X) {
        if (part < BLOCK_X) before += args.counts[part];
        total += args.counts[part];
    }
    before = ms_block_join(before, shared, ms_plus());
    total = ms_block_join(total, shared, ms_plus());
    for (; first < last; first += MS_CUDA_ABOVE_TILE)
        before += write_tile(a, first, last, before, threshold, shared);
    if (total > a.capacity) total = a.capacity;
    for (int64_t i = total + GRID_FIRST; i < a.capacity; i += GRID_STEP) {
        a.indices[i] = 0;
        ms_write(a.values, i, a.dtype, 0.0f);
    }
    if (GRID_FIRST == 0) *a.found = total;
}
