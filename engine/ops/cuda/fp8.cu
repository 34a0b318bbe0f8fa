/* fp8.cu: the greatest size in a matrix, its numbers as codes of 8 bits, and back: the bytes of the
 * CPU (ops/cpu/isa/fp8.c). Compiled without contraction. Threads take sixteen numbers at a time,
 * whose codes are 16 bytes; rows and columns are multiples of that. Spans begin and end anywhere:
 * what of them is not aligned is taken one by one. */
#include "ops/cuda/fp8.h"

#include "ops/cuda/gelu.h"
#include "ops/cuda/rows.h"
#include "ops/cuda/small_float.h"

typedef float_code<3, 121, 448> e4m3_code;
typedef float_code<2, 113, 57344> e5m2_code;

/* Calls body(dtype), one of both that are encoded. */
template <class Body> MS_DEVICE void with_dtype(uint8_t dtype, Body body)
{
    if (dtype == MS_F32) body(ms_known<MS_F32>());
    else body(ms_known<MS_BF16>());
}

/* Sixteen numbers that are aligned. */
template <class Dtype> MS_DEVICE void read16(const void *x, int64_t i, Dtype dtype, float v[16])
{
    ms_read8(x, i, dtype, v);
    ms_read8(x, i + 8, dtype, v + 8);
}

/* Sixteen numbers of a matrix that are encoded. */
template <class Dtype>
MS_DEVICE void get16(const ms_cuda_fp8_encode_call &args, int64_t i, Dtype dtype, float v[16])
{
    if (args.aligned) read16(args.e.x, i, dtype, v);
    else MS_UNROLL for (int k = 0; k < 16; k++) v[k] = ms_get_one(args.e.x, i + k, dtype);
    if (!args.e.gelu) return;
    MS_UNROLL for (int k = 0; k < 16; k++) v[k] = ms_rounded(v[k] * ms_gelu_gate(v[k]), dtype);
}

/* ------------------------------------------------------------------- the maximum */

MS_KERNEL(fp8_most, ms_cuda_fp8_encode_call, 256)
{
    MS_SHARED(uint32_t, shared, 32);
    int64_t count = args.e.rows * args.e.columns;
    uint32_t most = 0;
    with_dtype(args.e.dtype, [&](auto dtype) {
        for (int64_t i = GRID_FIRST * 16; i < count; i += GRID_STEP * 16) {
            float v[16];
            get16(args, i, dtype, v);
            MS_UNROLL for (int k = 0; k < 16; k++) most = ms_greater_size(most, v[k]);
        }
    });
    most = ms_block_join(most, shared, ms_greater());
    if (THREAD_X == 0) args.partial[BLOCK_X] = most;
}

/* ------------------------------------------------------------------------- codes */

/* A NaN has the code that both formats share. */
template <class Code> MS_DEVICE uint32_t encode1(float x, float inverse)
{
    float scaled = x * inverse;
    uint32_t code = Code::encode(scaled, false, 0.0f);
    return ms_is_nan(scaled) ? 0x7fu : code;
}

template <class Code> MS_DEVICE ms_chunk encode16(const float v[16], float inverse)
{
    ms_chunk chunk;
    MS_UNROLL for (int word = 0; word < 4; word++)
    {
        uint32_t bytes = 0;
        MS_UNROLL for (int k = 0; k < 4; k++) bytes |= encode1<Code>(v[4 * word + k], inverse)
                                                       << 8 * k;
        chunk.word[word] = bytes;
    }
    return chunk;
}

/* A tile is 64 x 64 codes. Rows of it are apart by a word, so that a warp that reads a column of
 * bytes touches all banks. */
#define TILE 64
#define ROW (TILE + 4)

/* Of the sixteen codes from here on: the place in the matrix, where it is inside. */
MS_DEVICE bool find_place(int64_t tile, int64_t rows, int64_t columns, int64_t *row,
                          int64_t *column)
{
    int64_t across = (columns + TILE - 1) / TILE;
    *row = tile / across * TILE + THREAD_X / 4;
    *column = tile % across * TILE + THREAD_X % 4 * 16;
    return *row < rows && *column < columns;
}

MS_DEVICE void encode_tile(const ms_cuda_fp8_encode_call &args, int64_t tile, float inverse,
                           uint32_t *shared)
{
    const ms_fp8_encode_args &e = args.e;
    int64_t row, column;
    if (!find_place(tile, e.rows, e.columns, &row, &column)) return;
    ms_chunk chunk;
    int64_t at = row * e.columns + column;
    with_dtype(e.dtype, [&](auto dtype) {
        float v[16];
        get16(args, at, dtype, v);
        if (e.format == MS_FP8_E4M3) chunk = encode16<e4m3_code>(v, inverse);
        else chunk = encode16<e5m2_code>(v, inverse);
    });
    if (e.codes != NULL) ms_store_chunk(e.codes + at, chunk);
    if (e.turned == NULL) return;
    int word = THREAD_X / 4 * (ROW / 4) + THREAD_X % 4 * 4;
    MS_UNROLL for (int k = 0; k < 4; k++) shared[word + k] = chunk.word[k];
}

/* Sixteen codes of a column, which are side by side in the transpose. */
MS_DEVICE void turn_tile(const ms_fp8_encode_args &e, int64_t tile, const uint32_t *shared)
{
    /* The tile's place in the matrix, and this thread's in the turned tile. */
    int64_t across = (e.columns + TILE - 1) / TILE;
    int64_t column = tile % across * TILE + THREAD_X / 4,
            row = tile / across * TILE + THREAD_X % 4 * 16;
    if (row >= e.rows || column >= e.columns) return;
    const uint8_t *codes =
        reinterpret_cast<const uint8_t *>(shared) + THREAD_X % 4 * 16 * ROW + THREAD_X / 4;
    ms_chunk chunk;
    MS_UNROLL for (int word = 0; word < 4; word++)
    {
        uint32_t bytes = 0;
        MS_UNROLL for (int k = 0; k < 4; k++) bytes |= (uint32_t)codes[(4 * word + k) * ROW]
                                                       << 8 * k;
        chunk.word[word] = bytes;
    }
    ms_store_chunk(e.turned + column * e.rows + row, chunk);
}

/* Each block finds the greatest size of all, and the first one notes it. */
MS_KERNEL(fp8_encode, ms_cuda_fp8_encode_call, 256)
{
    MS_SHARED(uint32_t, found, 32);
    MS_SHARED(uint32_t, shared, TILE * ROW / 4);
    const ms_fp8_encode_args &e = args.e;
    int64_t tiles = (e.rows + TILE - 1) / TILE * ((e.columns + TILE - 1) / TILE);
    uint32_t most = 0;
    for (int32_t i = THREAD_X; i < args.parts; i += THREADS_X)
        most = args.found[i] > most ? args.found[i] : most;
    most = ms_block_join(most, found, ms_greater());
    uint32_t scale = ms_fp8_scale_bits(most, (ms_fp8_format)e.format);
    ms_fp8_scale *to = THREAD_X == 0 ? e.scales[0] : e.scales[1];
    if (BLOCK_X == 0 && THREAD_X < 2 && to != NULL) {
        to->scale = ms_float(scale);
        to->most = most;
    }
    float inverse = ms_float(ms_fp8_inverse_bits(scale));
    for (int64_t tile = BLOCK_X; tile < tiles; tile += BLOCKS_X) {
        encode_tile(args, tile, inverse, shared);
        ms_barrier();
        if (e.turned != NULL) turn_tile(e, tile, shared);
        ms_barrier();
    }
}

/* ----------------------------------------------------------------------- decode */

template <class Code, class Dtype>
MS_DEVICE void decode16(const uint8_t *codes, void *out, int64_t i, Dtype dtype, float scale)
{
    ms_chunk chunk = ms_load_chunk(codes + i);
    float v[16];
    MS_UNROLL for (int k = 0; k < 16; k++) v[k] =
        Code::decode(chunk.word[k / 4] >> k % 4 * 8 & 0xffu) * scale;
    ms_write8(out, i, dtype, v);
    ms_write8(out, i + 8, dtype, v + 8);
}

MS_KERNEL_FREE(fp8_decode, ms_cuda_fp8_decode_call, 256)
{
    const ms_fp8_decode_args &d = args.d;
    float scale = d.scale->scale;
    for (int64_t i = GRID_FIRST * 16; i < d.count; i += GRID_STEP * 16) {
        if (d.format == MS_FP8_E4M3)
            decode16<e4m3_code>(d.codes, d.out, i, ms_known<MS_BF16>(), scale);
        else decode16<e5m2_code>(d.codes, d.out, i, ms_known<MS_BF16>(), scale);
    }
}

/* ------------------------------------------------------------------------- spans */

/* Calls whole(i) for sixteen elements that are aligned, and one(i) for others. The threads of a row
 * of blocks share the elements begin .. end - 1. */
template <class Whole, class One>
MS_DEVICE void walk16(int64_t begin, int64_t end, bool aligned, Whole whole, One one)
{
    for (int64_t i = begin / 16 * 16 + GRID_FIRST * 16; i < end; i += GRID_STEP * 16) {
        if (aligned && i >= begin && i + 16 <= end) whole(i);
        else MS_ROLLED for (int64_t k = i < begin ? begin : i; k < i + 16 && k < end; k++) one(k);
    }
}

MS_DEVICE uint32_t scale_of_span(const ms_fp8_span_args &s)
{
    return ms_fp8_scale_bits(s.most[BLOCK_Y], MS_FP8_E4M3);
}

/* Of span BLOCK_Y what this block has. */
MS_KERNEL(fp8_span_most, ms_cuda_fp8_span_call, 256)
{
    MS_SHARED(uint32_t, shared, 32);
    const ms_fp8_span_args &s = args.s;
    uint32_t most = 0;
    with_dtype(s.dtype, [&](auto dtype) {
        walk16(
            s.bounds[BLOCK_Y], s.bounds[BLOCK_Y + 1], args.aligned,
            [&](int64_t i) {
                float v[16];
                read16(s.from, i, dtype, v);
                MS_UNROLL for (int k = 0; k < 16; k++) most = ms_greater_size(most, v[k]);
            },
            [&](int64_t i) { most = ms_greater_size(most, ms_get_one(s.from, i, dtype)); });
    });
    most = ms_block_join(most, shared, ms_greater());
    if (THREAD_X == 0) args.partial[BLOCK_Y * BLOCKS_X + BLOCK_X] = most;
}

/* Of span BLOCK_X. */
MS_KERNEL(fp8_span_join, ms_cuda_fp8_span_call, 256)
{
    MS_SHARED(uint32_t, shared, 32);
    const uint32_t *partial = args.partial + BLOCK_X * args.parts;
    uint32_t most = 0;
    for (int32_t i = THREAD_X; i < args.parts; i += THREADS_X)
        most = partial[i] > most ? partial[i] : most;
    most = ms_block_join(most, shared, ms_greater());
    if (THREAD_X == 0) args.s.most[BLOCK_X] = most;
}

MS_KERNEL_FREE(fp8_span_encode, ms_cuda_fp8_span_call, 256)
{
    const ms_fp8_span_args &s = args.s;
    float inverse = ms_float(ms_fp8_inverse_bits(scale_of_span(s)));
    uint8_t *codes = static_cast<uint8_t *>(s.to);
    with_dtype(s.dtype, [&](auto dtype) {
        walk16(
            s.bounds[BLOCK_Y], s.bounds[BLOCK_Y + 1], args.aligned,
            [&](int64_t i) {
                float v[16];
                read16(s.from, i, dtype, v);
                ms_store_chunk(codes + i, encode16<e4m3_code>(v, inverse));
            },
            [&](int64_t i) {
                float x = ms_get_one(s.from, i, dtype);
                codes[i] = (uint8_t)encode1<e4m3_code>(x, inverse);
            });
    });
}

/* The repeats of a span are shared among the layers of blocks. */
MS_KERNEL_FREE(fp8_span_decode, ms_cuda_fp8_span_call, 256)
{
    const ms_fp8_span_args &s = args.s;
    float scale = ms_float(scale_of_span(s));
    const uint8_t *codes = static_cast<const uint8_t *>(s.from);
    with_dtype(s.dtype, [&](auto dtype) {
        for (int64_t repeat = BLOCK_Z; repeat < s.repeats; repeat += BLOCKS_Z) {
            int64_t base = repeat * s.period;
            walk16(
                base + s.bounds[BLOCK_Y], base + s.bounds[BLOCK_Y + 1], args.aligned,
                [&](int64_t i) { decode16<e4m3_code>(codes, s.to, i, dtype, scale); },
                [&](int64_t i) {
                    float x = e4m3_code::decode(codes[i]) * scale;
                    ms_put(ms_size<1>(), s.to, i, dtype, &x);
                });
        }
    });
}
