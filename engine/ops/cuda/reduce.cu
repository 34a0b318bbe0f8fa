/* reduce.cu: kernels that reduce, find positions, sum up as they go, and count.
 *
 * Elements are taken in chunks of 8, which are reduced in f32; chunks are joined in f64. Which
 * thread takes which chunk depends on the shape and never on addresses. */
#include "ops/cuda/reduce.h"

#include "ops/cuda/order.h"
#include "ops/cuda/scan.h"

/* ------------------------------------------------------------------- reading */

/* `count` elements (1 to 8), `step` apart; the rest of x is 0, or the first element again. */
MS_DEVICE void read_strided(const void *from, int64_t at, int64_t step, int count, uint8_t dtype,
                            bool repeat, float x[8])
{
    if (dtype == MS_F32) {
        const float *in = static_cast<const float *>(from) + at;
        for (int j = 0; j < 8; j++) x[j] = j < count ? in[j * step] : repeat ? x[0] : 0.0f;
        return;
    }
    const uint16_t *in = static_cast<const uint16_t *>(from) + at;
    for (int j = 0; j < 8; j++) {
        uint16_t bits = j < count ? in[j * step] : (uint16_t)0;
        float wide = dtype == MS_BF16 ? ms_bf16_wide(bits) : ms_f16_wide(bits);
        x[j] = j < count || !repeat ? wide : x[0];
    }
}
MS_DEVICE bool is_aligned(const void *from, int64_t at, uint8_t dtype)
{
    return (reinterpret_cast<uintptr_t>(from) + (uintptr_t)at * (dtype == MS_F32 ? 4 : 2)) % 16
           == 0;
}
MS_DEVICE void read_chunk(const void *from, int64_t at, int64_t step, int count, uint8_t dtype,
                          bool repeat, float x[8])
{
    if (step == 1 && count == 8 && is_aligned(from, at, dtype)) ms_read8(from, at, dtype, x);
    else read_strided(from, at, step, count, dtype, repeat, x);
}

/* ------------------------------------------------------------------- joining */

/* Joins two totals. NaN wins over every extreme; integers wrap. */
struct joining {
    uint8_t kind;
    MS_DEVICE_MEMBER float operator()(float a, float b) const
    {
        if (kind < MS_REDUCE_GREATEST) return a + b;
        bool first = kind == MS_REDUCE_LEAST ? a < b : a > b;
        return first || a != a ? a : b;
    }
    MS_DEVICE_MEMBER double operator()(double a, double b) const
    {
        if (kind < MS_REDUCE_GREATEST) return a + b;
        bool first = kind == MS_REDUCE_LEAST ? a < b : a > b;
        return first || a != a ? a : b;
    }
    MS_DEVICE_MEMBER int64_t operator()(int64_t a, int64_t b) const
    {
        if (kind == MS_REDUCE_ADD) return (int64_t)((uint64_t)a + (uint64_t)b);
        return (kind == MS_REDUCE_LEAST) == (a < b) ? a : b;
    }
};

/* What changes nothing when it is joined. */
MS_DEVICE void begin(uint8_t kind, double *total)
{
    *total = kind == MS_REDUCE_GREATEST ? -ms_infinity()
             : kind == MS_REDUCE_LEAST  ? ms_infinity()
                                        : 0.0f;
}
MS_DEVICE void begin(uint8_t kind, int64_t *total)
{
    *total = kind == MS_REDUCE_GREATEST ? INT64_MIN : kind == MS_REDUCE_LEAST ? INT64_MAX : 0;
}

MS_DEVICE float join8(const float x[8], joining join)
{
    return join(join(join(x[0], x[1]), join(x[2], x[3])), join(join(x[4], x[5]), join(x[6], x[7])));
}

/* The terms of a chunk, in its place. A term of 0 is 0, so the rest of a chunk adds nothing. */
MS_DEVICE void make_terms(uint8_t kind, float x[8], const float y[8], float power)
{
    switch (kind) {
    case MS_REDUCE_ADD_ABS:
    case MS_REDUCE_GREATEST_ABS:
        for (int j = 0; j < 8; j++) x[j] = fabsf(x[j]);
        break;
    case MS_REDUCE_ADD_SQUARES:
        for (int j = 0; j < 8; j++) x[j] *= x[j];
        break;
    case MS_REDUCE_ADD_POWERS:
        for (int j = 0; j < 8; j++) x[j] = powf(fabsf(x[j]), power);
        break;
    case MS_REDUCE_ADD_PRODUCTS:
        for (int j = 0; j < 8; j++) x[j] *= y[j];
        break;
    default: break;
    }
}

/* Joins a chunk of the input with the total. */
MS_DEVICE void take(const ms_reduce_args &r, int64_t at, int64_t step, int64_t position, int count,
                    double *total)
{
    joining join = { r.kind };
    float x[8], y[8] = { 0 };
    read_chunk(r.in, at, step, count, r.dtype, r.kind >= MS_REDUCE_GREATEST, x);
    if (r.kind == MS_REDUCE_ADD_PRODUCTS)
        read_chunk(r.second, position * r.second_stride, r.second_stride, count, r.dtype, false, y);
    make_terms(r.kind, x, y, (float)r.power);
    *total = join(*total, (double)join8(x, join));
}
template <class T>
MS_DEVICE void take_whole(const ms_reduce_args &r, int64_t at, int64_t step, int count,
                          int64_t *total)
{
    const T *in = static_cast<const T *>(r.in) + at;
    joining join = { r.kind };
    for (; count > 0; count--, in += step)
        *total = join(*total, r.dtype == MS_BOOL ? (int64_t)(*in != 0) : (int64_t)*in);
}
MS_DEVICE void take(const ms_reduce_args &r, int64_t at, int64_t step, int64_t position, int count,
                    int64_t *total)
{
    (void)position;
    switch (r.dtype) {
    case MS_I64: take_whole<int64_t>(r, at, step, count, total); break;
    case MS_I32: take_whole<int32_t>(r, at, step, count, total); break;
    case MS_U16: take_whole<uint16_t>(r, at, step, count, total); break;
    default: take_whole<uint8_t>(r, at, step, count, total); break;
    }
}

/* ------------------------------------------------------------------- results */

/* Divided for means, then the root for norms. sqrt is exact to the last bit, which pow is not. */
MS_DEVICE void put(const ms_reduce_args &r, int64_t result, double value)
{
    value /= r.divisor;
    if (r.root == 2.0) value = sqrt(value);
    else if (r.root != 1.0) value = pow(value, 1.0 / r.root);
    ms_write(r.out, result, r.out_dtype, (float)value);
}
/* Over nothing: any is false, every is true. */
MS_DEVICE void put(const ms_reduce_args &r, int64_t result, int64_t value)
{
    if (r.rows.n == 0) value = r.kind == MS_REDUCE_LEAST;
    ms_write_whole(r.out, result, r.out_dtype, value);
}
template <class T>
MS_DEVICE void put_unit(const ms_cuda_reduce_call &args, int64_t result, int64_t part, T value)
{
    if (args.partial) static_cast<T *>(args.partial)[part * args.results + result] = value;
    else put(args.r, result, value);
}

/* ------------------------------------------------------------------ reduction */

/* The elements first .. last - 1 of a row that lane `lane` of `width` takes. */
template <class T>
MS_DEVICE void walk_row(const ms_cuda_reduce_call &args, int64_t result, int64_t part, int lane,
                        T *total)
{
    const ms_rows &rows = args.r.rows;
    int64_t start =
        result / rows.inner * rows.outer_stride + result % rows.inner * rows.inner_stride;
    int64_t first = part * args.part_rows, last = first + args.part_rows;
    if (last > rows.n) last = rows.n;
    for (int64_t i = first + 8 * lane; i < last; i += 8 * args.width) {
        int count = last - i < 8 ? (int)(last - i) : 8;
        take(args.r, start + i * rows.stride, rows.stride, i, count, total);
    }
}

template <class T> MS_DEVICE void reduce_by_rows(const ms_cuda_reduce_call &args, T *shared)
{
    joining join = { args.r.kind };
    int width = args.width, groups = THREADS_X / width, lane = THREAD_X % width;
    int64_t units = args.results * args.parts;
    for (int64_t base = BLOCK_X * groups; base < units; base += BLOCKS_X * groups) {
        int64_t unit = base + THREAD_X / width, result = unit / args.parts,
                part = unit % args.parts;
        T total;
        begin(args.r.kind, &total);
        if (unit < units) walk_row(args, result, part, lane, &total);
        if (width > MS_WARP) total = ms_block_join(total, shared, join);
        else
            for (int mask = width / 2; mask > 0; mask /= 2)
                total = join(total, ms_warp_xor(total, mask));
        if (lane == 0 && unit < units) put_unit(args, result, part, total);
    }
}
MS_KERNEL(reduce_rows, ms_cuda_reduce_call, 256)
{
    MS_SHARED(double, shared, 32);
    reduce_by_rows(args, shared);
}
MS_KERNEL(reduce_rows_whole, ms_cuda_reduce_call, 256)
{
    MS_SHARED(int64_t, shared, 32);
    reduce_by_rows(args, shared);
}

/* Threads of neighbouring x take neighbouring columns, THREADS_X of them; threads of neighbouring y
 * take the rows in turn. */
template <class T>
MS_DEVICE void walk_column(const ms_cuda_reduce_call &args, int64_t start, int64_t part, T *total)
{
    const ms_rows &rows = args.r.rows;
    int64_t last = (part + 1) * args.part_rows, step = THREADS_Y;
    if (last > rows.n) last = rows.n;
    for (int64_t i = part * args.part_rows + THREAD_Y; i < last; i += 8 * step) {
        int64_t left = (last - i + step - 1) / step;
        take(args.r, start + i * rows.stride, step * rows.stride, i, left < 8 ? (int)left : 8,
             total);
    }
}

template <class T> MS_DEVICE void reduce_by_columns(const ms_cuda_reduce_call &args, T *shared)
{
    const ms_rows &rows = args.r.rows;
    joining join = { args.r.kind };
    int64_t strips = (rows.inner + THREADS_X - 1) / THREADS_X,
            units = rows.outer * strips * args.parts;
    T *mine = shared + THREAD_Y * THREADS_X + THREAD_X;
    for (int64_t unit = BLOCK_X; unit < units; unit += BLOCKS_X) {
        int64_t part = unit % args.parts, strip = unit / args.parts % strips,
                outer = unit / args.parts / strips, column = strip * THREADS_X + THREAD_X;
        T total;
        begin(args.r.kind, &total);
        if (column < rows.inner)
            walk_column(args, outer * rows.outer_stride + column, part, &total);
        *mine = total;
        ms_barrier();
        for (int half = THREADS_Y / 2; half > 0; half /= 2) {
            if (THREAD_Y < half) *mine = join(*mine, mine[half * THREADS_X]);
            ms_barrier();
        }
        if (THREAD_Y == 0 && column < rows.inner)
            put_unit(args, outer * rows.inner + column, part, *mine);
    }
}
MS_KERNEL(reduce_columns, ms_cuda_reduce_call, 256)
{
    MS_SHARED(double, shared, 256);
    reduce_by_columns(args, shared);
}
MS_KERNEL(reduce_columns_whole, ms_cuda_reduce_call, 256)
{
    MS_SHARED(int64_t, shared, 256);
    reduce_by_columns(args, shared);
}

/* A warp joins the parts of one result. */
template <class T> MS_DEVICE void join_parts(const ms_cuda_reduce_call &args)
{
    joining join = { args.r.kind };
    const T *partial = static_cast<const T *>(args.partial);
    int64_t warps = THREADS_X / MS_WARP;
    for (int64_t result = BLOCK_X * warps + WARP; result < args.results;
         result += BLOCKS_X * warps) {
        T total;
        begin(args.r.kind, &total);
        for (int64_t part = LANE; part < args.parts; part += MS_WARP)
            total = join(total, partial[part * args.results + result]);
        total = ms_warp_join(total, join);
        if (LANE == 0) put(args.r, result, total);
    }
}
MS_KERNEL(reduce_parts, ms_cuda_reduce_call, 256) { join_parts<double>(args); }
MS_KERNEL(reduce_parts_whole, ms_cuda_reduce_call, 256) { join_parts<int64_t>(args); }

/* ------------------------------------------------------ position of the greatest */

/* The greater key, and the lower position among equal keys; a position of -1 is none. */
struct place {
    int64_t key, at;
    MS_DEVICE_MEMBER void join(int64_t other_key, int64_t other_at)
    {
        bool better =
            at < 0 || (other_at >= 0 && (other_key > key || (other_key == key && other_at < at)));
        if (!better) return;
        key = other_key;
        at = other_at;
    }
};

/* NaN comes first in both orders. */
MS_DEVICE int64_t key_of(const ms_reduce_arg_args &r, int64_t at)
{
    int64_t key = ms_read_order(r.in, at, r.dtype);
    if (!r.least || (key == INT64_MAX && ms_is_float(r.dtype))) return key;
    return ~key;
}

MS_DEVICE place find_in_row(const ms_cuda_reduce_arg_call &args, int64_t result, int lane)
{
    const ms_rows &rows = args.r.rows;
    int64_t start =
        result / rows.inner * rows.outer_stride + result % rows.inner * rows.inner_stride;
    place best = { 0, -1 };
    for (int64_t i = lane; i < rows.n; i += args.width)
        best.join(key_of(args.r, start + i * rows.stride), i);
    return best;
}

/* The best of a block, in its first thread. */
MS_DEVICE void join_warps(place *best, int64_t *keys, int64_t *places)
{
    if (LANE == 0) {
        keys[WARP] = best->key;
        places[WARP] = best->at;
    }
    ms_barrier();
    if (THREAD_X == 0)
        for (int warp = 1; warp < THREADS_X / MS_WARP; warp++) best->join(keys[warp], places[warp]);
    ms_barrier();
}

MS_KERNEL(reduce_arg, ms_cuda_reduce_arg_call, 1024)
{
    MS_SHARED(int64_t, keys, 32);
    MS_SHARED(int64_t, places, 32);
    int width = args.width, groups = THREADS_X / width, lane = THREAD_X % width;
    for (int64_t base = BLOCK_X * groups; base < args.results; base += BLOCKS_X * groups) {
        int64_t result = base + THREAD_X / width;
        place best = { 0, -1 };
        if (result < args.results) best = find_in_row(args, result, lane);
        for (int mask = (width < MS_WARP ? width : MS_WARP) / 2; mask > 0; mask /= 2) {
            int64_t key = ms_warp_xor(best.key, mask), at = ms_warp_xor(best.at, mask);
            best.join(key, at);
        }
        if (width > MS_WARP) join_warps(&best, keys, places);
        if (lane == 0 && result < args.results) args.r.out[result] = best.at;
    }
}

/* ------------------------------------------------------------- cumulative sums */

/* Element k in the order of the sum, from the end where it is reversed. */
MS_DEVICE int64_t place_of(const ms_cumsum_args &c, int64_t k)
{
    return c.reverse ? c.rows.n - 1 - k : k;
}
MS_DEVICE void read_term(const ms_cumsum_args &c, int64_t at, double *x)
{
    *x = (double)ms_read(c.in, at, c.dtype);
}
MS_DEVICE void read_term(const ms_cumsum_args &c, int64_t at, uint64_t *x)
{
    *x = (uint64_t)ms_read_whole(c.in, at, c.dtype);
}
MS_DEVICE void write_sum(const ms_cumsum_args &c, int64_t at, double sum)
{
    ms_write(c.out, at, c.out_dtype, (float)sum);
}
MS_DEVICE void write_sum(const ms_cumsum_args &c, int64_t at, uint64_t sum)
{
    ms_write_whole(c.out, at, c.out_dtype, (int64_t)sum);
}
MS_DEVICE int64_t row_start(const ms_rows &rows, int64_t row)
{
    return row / rows.inner * rows.outer_stride + row % rows.inner * rows.inner_stride;
}
MS_DEVICE int64_t result_start(const ms_rows &rows, int64_t row)
{
    return row / rows.inner * rows.n * rows.inner + row % rows.inner;
}

/* One thread a row, for rows that are side by side, and for short ones. */
template <class T> MS_DEVICE void sum_serially(const ms_cuda_cumsum_call &args)
{
    const ms_rows &rows = args.c.rows;
    for (int64_t row = GRID_FIRST; row < args.results; row += GRID_STEP) {
        int64_t from = row_start(rows, row), to = result_start(rows, row);
        T sum = 0, x;
        for (int64_t k = 0; k < rows.n; k++) {
            int64_t i = place_of(args.c, k);
            read_term(args.c, from + i * rows.stride, &x);
            sum += x;
            write_sum(args.c, to + i * rows.inner, sum);
        }
    }
}
MS_KERNEL_FREE(cumsum_serial, ms_cuda_cumsum_call, 256) { sum_serially<double>(args); }
MS_KERNEL_FREE(cumsum_serial_whole, ms_cuda_cumsum_call, 256) { sum_serially<uint64_t>(args); }

/* The sum of each part of a row. */
template <class T> MS_DEVICE void sum_parts(const ms_cuda_cumsum_call &args, T *shared)
{
    const ms_rows &rows = args.c.rows;
    for (int64_t unit = BLOCK_X; unit < args.results * args.parts; unit += BLOCKS_X) {
        int64_t from = row_start(rows, unit / args.parts),
                first = unit % args.parts * args.part_rows, last = first + args.part_rows;
        T sum = 0, x;
        if (last > rows.n) last = rows.n;
        for (int64_t k = first + THREAD_X; k < last; k += THREADS_X) {
            read_term(args.c, from + place_of(args.c, k) * rows.stride, &x);
            sum += x;
        }
        sum = ms_block_join(sum, shared, ms_plus());
        if (THREAD_X == 0) static_cast<T *>(args.sums)[unit] = sum;
    }
}
MS_KERNEL(cumsum_parts, ms_cuda_cumsum_call, 256)
{
    MS_SHARED(double, shared, 32);
    sum_parts(args, shared);
}
MS_KERNEL(cumsum_parts_whole, ms_cuda_cumsum_call, 256)
{
    MS_SHARED(uint64_t, shared, 32);
    sum_parts(args, shared);
}

/* The sum of the parts before `part`. */
template <class T>
MS_DEVICE T sum_of_parts(const ms_cuda_cumsum_call &args, int64_t row, int64_t part, T *shared)
{
    T sum = 0;
    if (args.parts == 1) return sum;
    const T *sums = static_cast<const T *>(args.sums) + row * args.parts;
    for (int64_t k = THREAD_X; k < part; k += THREADS_X) sum += sums[k];
    return ms_block_join(sum, shared, ms_plus());
}

/* A tile of a row, eight elements a thread, on top of the sum of all before it. */
template <class T>
MS_DEVICE T sum_tile(const ms_cuda_cumsum_call &args, int64_t row, int64_t first, int64_t last,
                     T carry, T *shared)
{
    const ms_rows &rows = args.c.rows;
    int64_t from = row_start(rows, row), to = result_start(rows, row), begin = first + 8 * THREAD_X;
    T x[8], all;
    for (int j = 0; j < 8; j++) {
        x[j] = 0;
        if (begin + j < last)
            read_term(args.c, from + place_of(args.c, begin + j) * rows.stride, &x[j]);
    }
    for (int j = 1; j < 8; j++) x[j] += x[j - 1];
    T before = carry + ms_sum_before(x[7], shared, &all);
    for (int j = 0; j < 8; j++)
        if (begin + j < last)
            write_sum(args.c, to + place_of(args.c, begin + j) * rows.inner, before + x[j]);
    return carry + all;
}

template <class T> MS_DEVICE void sum_rows(const ms_cuda_cumsum_call &args, T *shared)
{
    for (int64_t unit = BLOCK_X; unit < args.results * args.parts; unit += BLOCKS_X) {
        int64_t row = unit / args.parts, part = unit % args.parts, first = part * args.part_rows,
                last = first + args.part_rows;
        T carry = sum_of_parts(args, row, part, shared);
        if (last > args.c.rows.n) last = args.c.rows.n;
        for (; first < last; first += MS_CUDA_CUMSUM_TILE)
            carry = sum_tile(args, row, first, last, carry, shared);
    }
}
MS_KERNEL(cumsum_rows, ms_cuda_cumsum_call, 256)
{
    MS_SHARED(double, shared, 32);
    sum_rows(args, shared);
}
MS_KERNEL(cumsum_rows_whole, ms_cuda_cumsum_call, 256)
{
    MS_SHARED(uint64_t, shared, 32);
    sum_rows(args, shared);
}

/* ------------------------------------------------------------------- histogram */

/* The bin of a number, or -1. The product may round up to `bins` next to `high`. */
MS_DEVICE int64_t bin_of(const ms_histogram_args &h, float x)
{
    double scale = (double)h.bins / (h.high - h.low);
    if (!(x >= h.low && x <= h.high)) return -1;
    int64_t bin = (int64_t)((x - h.low) * scale);
    return bin < h.bins ? bin : h.bins - 1;
}

MS_KERNEL(histogram, ms_cuda_histogram_call, 256)
{
    MS_SHARED_BYTES(uint32_t, mine);
    const ms_histogram_args &h = args.h;
    uint64_t *out = reinterpret_cast<uint64_t *>(h.out);
    for (int64_t bin = THREAD_X; args.shared && bin < h.bins; bin += THREADS_X) mine[bin] = 0;
    ms_barrier();
    for (int64_t i = GRID_FIRST; i < h.count; i += GRID_STEP) {
        int64_t bin = bin_of(h, ms_read(h.in, i * h.stride, h.dtype));
        if (bin < 0) continue;
        if (args.shared) ms_atomic_add(&mine[bin], 1u);
        else ms_atomic_add(&out[bin], (uint64_t)1);
    }
    ms_barrier();
    for (int64_t bin = THREAD_X; args.shared && bin < h.bins; bin += THREADS_X)
        if (mine[bin] != 0) ms_atomic_add(&out[bin], (uint64_t)mine[bin]);
}
