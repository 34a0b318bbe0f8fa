/* fp8.cu: the greatest size in a matrix, its numbers as codes of 8 bits, and back: the bytes of the
 * CPU (ops/cpu/isa/fp8.c). Compiled without contraction. Threads take sixteen numbers at a time,
 * whose codes are 16 bytes; rows and columns are multiples of that. */
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

/* Sixteen numbers that are encoded. */
template <class Dtype>
MS_DEVICE void get16(const ms_cuda_fp8_encode_call &args, int64_t i, Dtype dtype, float v[16])
{
    if (args.aligned) {
        ms_read8(args.e.x, i, dtype, v);
        ms_read8(args.e.x, i + 8, dtype, v + 8);
    } else MS_UNROLL for (int k = 0; k < 16; k++) v[k] = ms_get_one(args.e.x, i + k, dtype);
    if (!args.e.gelu) return;
    MS_UNROLL for (int k = 0; k < 16; k++) v[k] = ms_rounded(v[k] * ms_gelu_gate(v[k]), dtype);
}

/* ------------------------------------------------------------------- the maximum */

/* As integers the bits of sizes compare as the numbers do, NaN above all. */
MS_KERNEL(fp8_most, ms_cuda_fp8_encode_call, 256)
{
    MS_SHARED(uint32_t, shared, 32);
    int64_t count = args.e.rows * args.e.columns;
    uint32_t most = 0;
    with_dtype(args.e.dtype, [&](auto dtype) {
        for (int64_t i = GRID_FIRST * 16; i < count; i += GRID_STEP * 16) {
            float v[16];
            get16(args, i, dtype, v);
            MS_UNROLL for (int k = 0; k < 16; k++)
            {
                uint32_t size = ms_bits(v[k]) & 0x7fffffffu;
                most = size > most ? size : most;
            }
        }
    });
    most = ms_block_join(most, shared, ms_greater());
    if (THREAD_X == 0) args.partial[BLOCK_X] = most;
}

/* ------------------------------------------------------------------------- codes */

/* A NaN has the code that both formats share. */
template <class Code> MS_DEVICE ms_chunk encode16(const float v[16], float inverse)
{
    ms_chunk chunk;
    MS_UNROLL for (int word = 0; word < 4; word++)
    {
        uint32_t bytes = 0;
        MS_UNROLL for (int k = 0; k < 4; k++)
        {
            float scaled = v[4 * word + k] * inverse;
            uint32_t code = Code::encode(scaled, false, 0.0f);
            bytes |= (ms_is_nan(scaled) ? 0x7fu : code) << 8 * k;
        }
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
        most = args.partial[i] > most ? args.partial[i] : most;
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

template <class Code> MS_DEVICE void decode16(const ms_fp8_decode_args &d, int64_t i, float scale)
{
    ms_chunk chunk = ms_load_chunk(d.codes + i);
    float v[16];
    MS_UNROLL for (int k = 0; k < 16; k++) v[k] =
        Code::decode(chunk.word[k / 4] >> k % 4 * 8 & 0xffu) * scale;
    ms_write8(d.out, i, MS_BF16, v);
    ms_write8(d.out, i + 8, MS_BF16, v + 8);
}

MS_KERNEL_FREE(fp8_decode, ms_cuda_fp8_decode_call, 256)
{
    const ms_fp8_decode_args &d = args.d;
    float scale = d.scale->scale;
    for (int64_t i = GRID_FIRST * 16; i < d.count; i += GRID_STEP * 16) {
        if (d.format == MS_FP8_E4M3) decode16<e4m3_code>(d, i, scale);
        else decode16<e5m2_code>(d, i, scale);
    }
}
