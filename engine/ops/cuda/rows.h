/* rows.h: rows of contiguous elements: how the host divides them among blocks, and how the threads
 * of a kernel walk along one. For the files of kernels and for their host's side.
 *
 * Which elements a thread adds, and in which order, follows from the shape. So bits are the same at
 * any address. */
#ifndef MOONSHARD_OPS_CUDA_ROWS_H
#define MOONSHARD_OPS_CUDA_ROWS_H

#include <stdbool.h>
#include <stdint.h>

/* A block has up to this many threads. */
#define MS_CUDA_ROW_THREADS 512

/* Sums over rows are made in parts of `each` rows, and the parts are then added in their order. */
typedef struct ms_cuda_parts {
    int64_t parts, each;
} ms_cuda_parts;

/* Vectors of sums: `parts` parts, each of `vectors` vectors of `width` numbers, become one part of
 * dtype. A vector that is not wanted is NULL. */
typedef struct ms_cuda_join_call {
    const double *partial; /* [parts][vectors][width] */
    void *out[2];
    int64_t width, parts, vectors;
    uint8_t dtype;
} ms_cuda_join_call;

#ifndef __cplusplus

#include "ops/cuda/kernels.h"

/* All may be read and written in pieces of 16 bytes; NULL is as good as aligned. */
static inline bool ms_cuda_is_aligned(const void *address) { return (uintptr_t)address % 16 == 0; }

/* One warp for a narrow row, eight of them in a block; one block for a wide row. The row of a
 * thread is BLOCK_X * THREADS_Y + THREAD_Y. */
static inline ms_cuda_shape ms_cuda_row_shape(int64_t rows, int64_t width)
{
    uint32_t lanes = width <= 1024 ? 32 : width <= 8192 ? 256 : MS_CUDA_ROW_THREADS;
    uint32_t each = lanes == 32 ? 8 : 1;
    return (ms_cuda_shape){ .blocks = { (uint32_t)((rows + each - 1) / each) },
                            .threads = { lanes, each } };
}

/* Columns are divided among blocks of 32 x 8 threads. Enough parts to fill the GPU, of 64 rows or
 * more, so that they are few. Without rows there is one part, which is empty. */
static inline ms_cuda_parts ms_cuda_row_parts(int64_t rows, int64_t width)
{
    int64_t strips = width > 0 ? (width + 31) / 32 : 1;
    int64_t wanted = 1056 / strips, most = (rows + 63) / 64;
    if (wanted > most) wanted = most;
    if (wanted < 1) wanted = 1;
    int64_t each = (rows + wanted - 1) / wanted;
    return (ms_cuda_parts){ .parts = each ? (rows + each - 1) / each : 1, .each = each };
}
static inline ms_cuda_shape ms_cuda_column_shape(int64_t width, int64_t parts)
{
    return (ms_cuda_shape){ .blocks = { (uint32_t)((width + 31) / 32), (uint32_t)parts },
                            .threads = { 32, 8 } };
}
/* Vectors are joined by blocks of the same shape. */
static inline ms_cuda_shape ms_cuda_join_shape(const ms_cuda_join_call *call)
{
    return ms_cuda_column_shape(call->width, call->vectors);
}

#else

#include "ops/cuda/device.h"

/* How many elements a step of a walk covers. */
template <int n> struct ms_size {
    static constexpr int N = n;
};

/* A dtype that the compiler knows. Then nothing is decided between the loads of a step, and all of
 * them are under way at once. */
template <uint8_t known> struct ms_known {
    static constexpr uint8_t VALUE = known;
    MS_DEVICE_MEMBER constexpr operator uint8_t() const { return known; }
};
/* Calls body(dtype) with the float dtype as an ms_known. The machine code has the body three times,
 * so it holds what is done for each element, and no barrier. */
template <class Body> MS_DEVICE void ms_with_dtype(uint8_t dtype, Body body)
{
    if (dtype == MS_F32) body(ms_known<MS_F32>());
    else if (dtype == MS_BF16) body(ms_known<MS_BF16>());
    else body(ms_known<MS_F16>());
}
/* The same for two arrays, of which the second one has the dtype of the first, or f32. */
template <class Body> MS_DEVICE void ms_with_dtypes(uint8_t dtype, uint8_t second, Body body)
{
    ms_with_dtype(dtype, [&](auto known) {
        if (known.VALUE == MS_F32 || second == MS_F32) body(known, ms_known<MS_F32>());
        else body(known, known);
    });
}

/* Elements i .. i + N - 1 of an array of a float dtype. Eight at once are aligned to 16 bytes. */
MS_DEVICE void ms_get(ms_size<8>, const void *from, int64_t i, uint8_t dtype, float *out)
{
    ms_read8(from, i, dtype, out);
}
MS_DEVICE void ms_get(ms_size<1>, const void *from, int64_t i, uint8_t dtype, float *out)
{
    if (dtype == MS_F32) {
        out[0] = static_cast<const float *>(from)[i];
        return;
    }
    uint16_t bits = static_cast<const uint16_t *>(from)[i];
    out[0] = dtype == MS_BF16 ? ms_bf16_wide(bits) : ms_f16_wide(bits);
}
MS_DEVICE void ms_put(ms_size<8>, void *to, int64_t i, uint8_t dtype, const float *x)
{
    ms_write8(to, i, dtype, x);
}
MS_DEVICE void ms_put(ms_size<1>, void *to, int64_t i, uint8_t dtype, const float *x)
{
    if (dtype == MS_F32) static_cast<float *>(to)[i] = x[0];
    else
        static_cast<uint16_t *>(to)[i] =
            dtype == MS_BF16 ? ms_bf16_narrow(x[0]) : ms_f16_narrow(x[0]);
}
/* The same number for all of them, where there is no array. */
template <class Size>
MS_DEVICE void ms_get_or(Size size, const void *from, int64_t i, uint8_t dtype, float otherwise,
                         float *out)
{
    for (int k = 0; k < Size::N; k++) out[k] = otherwise;
    if (from != NULL) ms_get(size, from, i, dtype, out);
}
/* The same without a branch between loads: where there is no array, `beside` is read, which has as
 * many elements of this dtype. */
template <class Size, class Dtype>
MS_DEVICE void ms_get_beside(Size size, const void *from, const void *beside, int64_t i,
                             Dtype dtype, float otherwise, float *out)
{
    ms_get(size, from != NULL ? from : beside, i, dtype, out);
    for (int k = 0; k < Size::N; k++) out[k] = from != NULL ? out[k] : otherwise;
}
MS_DEVICE float ms_get_one(const void *from, int64_t i, uint8_t dtype)
{
    float x;
    ms_get(ms_size<1>(), from, i, dtype, &x);
    return x;
}

/* A row is cut into chunks of eight, the first of which begins `skew` elements before it. Which
 * elements are a chunk follows from the shape alone. */
struct ms_row {
    int64_t begin, width, skew;
    bool aligned; /* whole chunks are aligned to 16 bytes, in all arrays that are walked */
};
/* `aligned`: chunks from the begin of each row are aligned in each array that is walked, so the
 * width is a multiple of eight. */
MS_DEVICE ms_row ms_row_of(int64_t row, int64_t width, bool aligned)
{
    ms_row r;
    r.begin = row * width;
    r.width = width;
    r.skew = 0;
    r.aligned = aligned;
    return r;
}
/* `aligned`: of the arrays that are walked each has an aligned address and the dtype. Rows of any
 * width have aligned chunks then. */
MS_DEVICE ms_row ms_skewed_row_of(int64_t row, int64_t width, uint8_t dtype, bool aligned)
{
    ms_row r = ms_row_of(row, width, aligned);
    r.skew = r.begin % (dtype == MS_F32 ? 4 : 8);
    return r;
}
/* Calls whole(i) for chunks of eight that are aligned, and part(first, end) for others, of which
 * the elements from `first` to before `end` are there. They are counted from the begin of the row.
 * THREADS_X threads share the row; a thread gets the same chunks at any address. */
template <class Whole, class Part>
MS_DEVICE void ms_walk_chunks(const ms_row &row, Whole whole, Part part)
{
    const int64_t step = THREADS_X * 8;
    for (int64_t i = THREAD_X * 8 - row.skew; i < row.width; i += step) {
        /* Nearly all chunks are whole: they have a loop of their own. */
        if (row.aligned && i >= 0)
            for (; i + 8 <= row.width; i += step) whole(i);
        if (i < row.width) part(i < 0 ? 0 : i, i + 8 < row.width ? i + 8 : row.width);
    }
}
/* Calls body(size, i) so that each element of the row is covered once: size.N elements from i on. A
 * body that adds elements one after another gives the same bits for both sizes. */
template <class Body> MS_DEVICE void ms_walk(const ms_row &row, Body body)
{
    ms_walk_chunks(
        row, [&](int64_t i) { body(ms_size<8>(), i); },
        [&](int64_t first, int64_t end) {
            MS_ROLLED for (int64_t i = first; i < end; i++) body(ms_size<1>(), i);
        });
}

/* The same for all elements of arrays; the threads of the grid share them. */
template <class Body> MS_DEVICE void ms_walk_all(int64_t count, bool aligned, Body body)
{
    for (int64_t first = GRID_FIRST * 8; first < count; first += GRID_STEP * 8) {
        int64_t end = first + 8 < count ? first + 8 : count;
        if (aligned && end == first + 8) body(ms_size<8>(), first);
        else MS_ROLLED for (int64_t i = first; i < end; i++) body(ms_size<1>(), i);
    }
}

/* Adds what the eight rows of threads hold for a column, in their order. The result is for THREAD_Y
 * 0. `shared` has 256 places and is free again when the call returns. */
MS_DEVICE double ms_join_rows(double value, double *shared)
{
    shared[THREAD_Y * MS_WARP + THREAD_X] = value;
    ms_barrier();
    value = 0;
    for (int y = 0; y < 8; y++) value += shared[y * MS_WARP + THREAD_X];
    ms_barrier();
    return value;
}
/* Of vector BLOCK_Y. Each row of threads adds an eighth of the parts, one after another. */
MS_DEVICE void ms_join_parts(const ms_cuda_join_call &args, double *shared)
{
    int64_t column = BLOCK_X * MS_WARP + THREAD_X, each = (args.parts + 7) / 8,
            first = THREAD_Y * each, end = first + each < args.parts ? first + each : args.parts;
    void *out = BLOCK_Y == 0 ? args.out[0] : args.out[1];
    const double *partial = args.partial + BLOCK_Y * args.width + column;
    double sum = 0;
    if (out == NULL) return;
    for (int64_t part = first; part < end && column < args.width; part++)
        sum += partial[part * args.vectors * args.width];
    float x = (float)ms_join_rows(sum, shared);
    if (THREAD_Y == 0 && column < args.width) ms_put(ms_size<1>(), out, column, args.dtype, &x);
}

#endif
#endif
