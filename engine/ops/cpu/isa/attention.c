/* attention.c: products of units, softmax with queries as lanes, and back; rotation of pairs.
 *
 * The order of sums depends on the number of lanes in row_dots only; elsewhere each lane has a sum
 * of its own. Operands are bf16 with `pairs`, and products and sums may be contracted, so results
 * of two instruction sets agree up to rounding. */
#include "ops/cpu/attention.h"

#include "ops/cpu/row.h"

#define LEAST (-__builtin_inff())
#define LEAST_FINITE (-3.40282347e+38f)
/* How many rows ahead of its use a row is prefetched: near enough to stay in the cache, far enough
 * to have arrived. */
#define FETCH_ROWS 16
/* Sums of a tile are [rows, TILE_VECTORS]: as many as there are registers for. */
#if defined(__AVX512F__)
enum { TILE_VECTORS = 4 };
#else
enum { TILE_VECTORS = 2 };
#endif
/* Is before loops whose bounds are constants after inlining, so that gcc unrolls them and the
 * arrays become registers. */
#define UNROLL _Pragma("GCC unroll 16")

/* The width of packed rows: products take columns in multiples of 16. */
MS_VECTOR int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

/* ----------------------------------------------------------------- products */

/* sum + a * b per lane. A pair adds two products of bf16 to one f32 sum in one instruction, which
 * is only reached where the instruction set has it. `a` of a pair is a float only by its type: its
 * 32 bits are two bf16, and it is never computed with as a float. */
MS_VECTOR ms_vf add_product(const bool pairs, ms_vf sum, float a, ms_vf b)
{
#if defined(__AVX512BF16__)
    if (pairs) return (ms_vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)ms_v_splat(a), (__m512bh)b);
#endif
    (void)pairs;
    return sum + a * b;
}

/* One tile of rows x vectors sums, which stay in registers over the whole depth. `pairs`, `rows`
 * and `vectors` are constants after inlining, so the loops over them vanish and the array becomes
 * registers. Each step loads `vectors` vectors of b and `rows` numbers of a for rows * vectors
 * multiply-adds, so larger tiles need fewer loads for the same work. */
MS_VECTOR void tile(const bool pairs, const int rows, const int vectors, const ms_unit_product *p,
                    int64_t row, int64_t column)
{
    const float *a = p->a + row * p->a_row, *b = p->b + column;
    float *c = p->c + row * p->c_row + column;
    const int64_t a_row = p->a_row, a_step = p->a_step, b_step = p->b_step, c_row = p->c_row;
    ms_vf sum[8][TILE_VECTORS];
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vectors; v++) sum[i][v] =
        p->accumulate ? ms_v_load(c + i * c_row + v * MS_LANES) : (ms_vf){ 0 };
    for (int64_t u = 0; u < p->depth; u++, a += a_step, b += b_step) {
        /* The vectors of b serve all rows of the tile. */
        ms_vf right[TILE_VECTORS];
        UNROLL for (int v = 0; v < vectors; v++) right[v] = ms_v_load(b + v * MS_LANES);
        UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vectors; v++) sum[i][v] =
            add_product(pairs, sum[i][v], a[i * a_row], right[v]);
    }
    UNROLL for (int i = 0; i < rows; i++) UNROLL for (int v = 0; v < vectors; v++)
        ms_v_store(c + i * c_row + v * MS_LANES, sum[i][v]);
}

/* All rows of some columns. With few columns more rows are taken at a time: enough independent sums
 * are needed to hide the latency of a multiply-add. p->rows is a multiple of 4, but after tiles of
 * 6 rows two may be left. */
MS_VECTOR void columns_of(const bool pairs, const int rows, const int vectors,
                          const ms_unit_product *p, int64_t column)
{
    int64_t row = 0;
    for (; row + rows <= p->rows; row += rows) tile(pairs, rows, vectors, p, row, column);
    /* Rows that are left after the tall tiles. */
    for (; row + 4 <= p->rows; row += 4) tile(pairs, 4, vectors, p, row, column);
    if (row < p->rows) tile(pairs, 2, vectors, p, row, column);
}

/* Columns are a multiple of 16. With AVX-512 the widest tiles come first and the rest takes one
 * tile of 48, 32 or 16. 16 sums fill half of the 32 registers of AVX-512: 4 x 4, 8 x 2; the rest
 * holds b and broadcast numbers of a. AVX2 has 16 registers: 6 x 2 sums, two vectors of b, and one
 * number of a. */
MS_VECTOR void multiply_as(const bool pairs, const ms_unit_product *p)
{
    int64_t column = 0;
#if defined(__AVX512F__)
    for (; column + 64 <= p->columns; column += 64) columns_of(pairs, 4, 4, p, column);
    if (column + 48 <= p->columns) {
        columns_of(pairs, 4, 3, p, column);
        column += 48;
    }
    if (column + 32 <= p->columns) {
        columns_of(pairs, 8, 2, p, column);
        column += 32;
    }
    if (column + 16 <= p->columns) columns_of(pairs, 8, 1, p, column);
#else
    for (; column < p->columns; column += TILE_VECTORS * MS_LANES)
        columns_of(pairs, 6, TILE_VECTORS, p, column);
#endif
}

/* `pairs` is tested once for a whole product; the loops have it as a constant. */
static void multiply(bool pairs, const ms_unit_product *p)
{
    if (pairs) multiply_as(true, p);
    else multiply_as(false, p);
}

/* ------------------------------------------------------------------ packing */

#if defined(__AVX512BF16__)
/* 16 numbers as 8 units. */
MS_VECTOR void store_pairs(float *to, ms_vf v)
{
    _mm256_storeu_si256((__m256i_u *)(void *)to, (__m256i)_mm512_cvtneps_pbh((__m512)v));
}
/* 16 units: lane i holds (first[i], second[i]). */
MS_VECTOR ms_vf join_pairs(ms_vf first, ms_vf second)
{
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (ms_vf)_mm512_permutexvar_epi16(
        order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
#else
/* Without the instruction these are compiled but never called: has_pairs is false, and so is
 * `pairs` everywhere. */
MS_VECTOR void store_pairs(float *to, ms_vf v) { ms_v_store(to, v); }
MS_VECTOR ms_vf join_pairs(ms_vf first, ms_vf second) { return first + second; }
#endif

/* MS_LANES elements of a row of n, from i on; lanes after the end are 0, so padded width adds
 * nothing to a product. */
MS_VECTOR ms_vf row_part(const ms_dtype D, const void *row, int64_t i, int64_t n)
{
    return i + MS_LANES <= n ? ms_row_get(D, row, (size_t)i)
                             : ms_row_get_part(D, row, (size_t)i, (size_t)n, 0.0f);
}

/* Prefetches a row. The rows of a head are far apart, with the other heads of the moment between
 * them, and hardware prefetchers do not follow such distances. An address after the last row is
 * only prefetched, never read. */
MS_VECTOR void fetch(const char *row, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i);
}

/* FETCH_ROWS ahead of the row that is packed, which gives memory time to answer. Rows from count to
 * `all` become zeros: a key of zeros has the score 0, which the mask hides. */
MS_VECTOR void pack_rows_as(const bool pairs, const ms_dtype D, const char *from, int64_t row,
                            int64_t count, int64_t all, int64_t width, float *to)
{
    const int64_t item = D == MS_F32 ? 4 : 2, bytes = row * item;
    int64_t units = pairs ? padded(width) / 2 : padded(width);
    for (int64_t i = 0; i < count; i++, from += bytes, to += units) {
        fetch(from + FETCH_ROWS * bytes, width * item);
        for (int64_t k = 0; k < padded(width); k += MS_LANES) {
            ms_vf v = row_part(D, from, k, width);
            if (pairs) store_pairs(to + k / 2, v);
            else ms_v_store(to + k, v);
        }
    }
    /* The rest of the last tile, which products compute and nothing uses. */
    if (count < all) __builtin_memset(to, 0, (size_t)((all - count) * units) * sizeof *to);
}

/* The functions in the table choose the dtype, and pairs or not, once per call; the loops above
 * have both as constants. */
static void pack_rows(bool pairs, ms_dtype dtype, const void *from, int64_t row, int64_t count,
                      int64_t all, int64_t width, float *to)
{
    if (pairs) MS_ROW_SWITCH(dtype, pack_rows_as(true, D, from, row, count, all, width, to));
    else MS_ROW_SWITCH(dtype, pack_rows_as(false, D, from, row, count, all, width, to));
}

/* A missing second row of the last pair counts as zeros. */
MS_VECTOR void pack_steps_as(const ms_dtype D, const char *from, int64_t row, int64_t count,
                             int64_t all, int64_t width, float *to)
{
    int64_t bytes = row * (D == MS_F32 ? 4 : 2), wide = padded(width);
    for (int64_t i = 0; i < all; i += 2, from += 2 * bytes, to += wide) {
        fetch(from + FETCH_ROWS * bytes, width * (D == MS_F32 ? 4 : 2));
        fetch(from + (FETCH_ROWS + 1) * bytes, width * (D == MS_F32 ? 4 : 2));
        for (int64_t k = 0; k < wide; k += MS_LANES) {
            /* Two rows of the tensor become one packed row, whose units are pairs of numbers that
             * are under each other. */
            ms_vf first = i < count ? row_part(D, from, k, width) : ms_v_splat(0.0f);
            ms_vf second = i + 1 < count ? row_part(D, from + bytes, k, width) : ms_v_splat(0.0f);
            ms_v_store(to + k, join_pairs(first, second));
        }
    }
}

/* There is no form without pairs: f32 rows serve as steps as they are. */
static void pack_steps(ms_dtype dtype, const void *from, int64_t row, int64_t count, int64_t all,
                       int64_t width, float *to)
{
    MS_ROW_SWITCH(dtype, pack_steps_as(D, from, row, count, all, width, to));
}

/* The prefetch asks for the line to be written, as the store would have to read it first. `factor`
 * divides a row by its sum of exponentials, which saves a pass of its own. */
MS_VECTOR void unpack_as(const ms_dtype D, const float *from, int64_t from_row, int64_t count,
                         int64_t width, const float *factor, char *to, int64_t row)
{
    const int64_t item = D == MS_F32 ? 4 : 2;
    for (int64_t i = 0; i < count; i++, from += from_row, to += row * item) {
        for (int64_t k = 0; k < width; k += 64 / item)
            __builtin_prefetch(to + FETCH_ROWS * row * item + k * item, 1);
        /* A factor belongs to a row, that is, to a query. */
        ms_vf times = ms_v_splat(factor != NULL ? factor[i] : 1.0f);
        int64_t k = 0;
        for (; k + MS_LANES <= width; k += MS_LANES)
            ms_row_put(D, to, (size_t)k, ms_v_load(from + k) * times);
        if (k < width)
            ms_row_put_part(D, to, (size_t)k, (size_t)width,
                            ms_v_load_part(from + k, (size_t)(width - k)) * times);
    }
}

/* Rounds once, from the f32 sum to the dtype of the tensor. */
static void unpack(ms_dtype dtype, const float *from, int64_t from_row, int64_t count,
                   int64_t width, const float *factor, void *to, int64_t row)
{
    MS_ROW_SWITCH(dtype, unpack_as(D, from, from_row, count, width, factor, to, row));
}

/* For unaligned loads and stores of four numbers. */
typedef float v4f_any __attribute__((vector_size(16), aligned(4), may_alias));

/* Lanes of two vectors: the lower or the upper two in turns; the first or the last two of each. */
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define FRONT(a, b) __builtin_shufflevector(a, b, 0, 1, 4, 5)
#define BACK(a, b) __builtin_shufflevector(a, b, 2, 3, 6, 7)

/* Blocks of 4 x 4 by shuffles of 128-bit vectors, which every instruction set has. Rows and columns
 * are multiples of 4, since packed rows are padded, so there is no rest to handle. */
static void transpose(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
                      int64_t to_row)
{
    for (int64_t i = 0; i < rows; i += 4)
        for (int64_t k = 0; k < columns; k += 4) {
            const float *x = from + i * from_row + k;
            float *y = to + k * to_row + i;
            ms_v4f a = *(const v4f_any *)x, b = *(const v4f_any *)(x + from_row),
                   c = *(const v4f_any *)(x + 2 * from_row),
                   d = *(const v4f_any *)(x + 3 * from_row);
            /* First pairs of rows are interleaved, then pairs of pairs. */
            ms_v4f ab_low = LOW(a, b), ab_high = HIGH(a, b);
            ms_v4f cd_low = LOW(c, d), cd_high = HIGH(c, d);
            *(v4f_any *)y = FRONT(ab_low, cd_low);
            *(v4f_any *)(y + to_row) = BACK(ab_low, cd_low);
            *(v4f_any *)(y + 2 * to_row) = FRONT(ab_high, cd_high);
            *(v4f_any *)(y + 3 * to_row) = BACK(ab_high, cd_high);
        }
}

/* ------------------------------------------------------------------ softmax */

/* A row is one key with the scores of 64 queries. */
MS_VECTOR const float *row_at(const ms_score_block *b, int64_t row)
{
    return b->scores + row * MS_QUERY_LANES;
}

/* A mask of the lanes from q on that do not see this key: lane q sees key row if row < seen + q *
 * step, and if its document has begun. No lane sees a row that is padded. The comparisons are in
 * f32, exact for the small numbers of a block. */
MS_VECTOR ms_vi hidden(const ms_score_block *b, int64_t row, int64_t q)
{
    float step = (float)b->step;
    float before = row < b->keys ? (float)(row - b->seen) : INFINITY;
    ms_vi later = ~ms_v_less(ms_v_splat(before), (ms_v_lane_numbers() + (float)q) * step);
    if (b->first == NULL) return later;
    return later | ms_v_less(ms_v_splat((float)row), ms_v_load(b->first + q));
}

/* Rows begin .. end - 1, which all lanes from q on see. The mask is needed only for the others.
 * Lane q sees the fewest keys of the vector at the end, since later queries see more; any lane may
 * see the fewest at the beginning. */
typedef struct clear {
    int64_t begin, end;
} clear;

MS_VECTOR clear clear_rows(const ms_score_block *b, int64_t q)
{
    float first = 0.0f;
    for (int i = 0; b->first != NULL && i < MS_LANES; i++)
        first = b->first[q + i] > first ? b->first[q + i] : first;
    int64_t begin = (int64_t)first, end = b->seen + q * b->step;
    if (end > b->keys) end = b->keys;
    return (clear){ begin, end < begin ? begin : end };
}

/* Hides rows begin .. end - 1 from the lanes from q on that do not see them; returns the greatest
 * of `greatest` and what is left. */
MS_VECTOR ms_vf hide(const ms_score_block *b, int64_t begin, int64_t end, int64_t q, ms_vf greatest)
{
    const ms_vf least = ms_v_splat(LEAST);
    for (int64_t row = begin; row < end; row++) {
        ms_vf x = ms_v_select(hidden(b, row, q), least, ms_v_load(row_at(b, row) + q));
        ms_v_store(b->scores + row * MS_QUERY_LANES + q, x);
        greatest = ms_v_greater(x, greatest);
    }
    return greatest;
}

/* Two maxima alternate over the clear rows, so that one need not wait for the other. NaN scores are
 * passed over here and come out of the exponentials. Clear rows are not written back; they stay as
 * the product has left them. */
static void mask(const ms_score_block *b, float *most)
{
    for (int64_t q = b->begin; q < b->end; q += MS_LANES) {
        clear c = clear_rows(b, q);
        int64_t row = c.begin;
        ms_vf greatest = hide(b, 0, c.begin, q, ms_v_splat(LEAST)), other = ms_v_splat(LEAST);
        for (; row + 2 <= c.end; row += 2) {
            greatest = ms_v_greater(ms_v_load(row_at(b, row) + q), greatest);
            other = ms_v_greater(ms_v_load(row_at(b, row + 1) + q), other);
        }
        greatest = hide(b, row, b->rows, q, greatest);
        /* The scale is not negative, so the greatest score stays the greatest; -infinity stays what
         * it is. */
        greatest = ms_v_greater(greatest, other) * b->scale;
        ms_v_store(most + q, ms_v_greater(greatest, ms_v_load(most + q)));
    }
}

/* Most blocks leave the maximum unchanged, so vectors without a change are skipped. In a first
 * block `before` is -infinity and the factor exp(-infinity) is 0, times sums that are 0. Skipping
 * spares reading and writing the whole block of results [width, 64] for each block of keys. */
static void shrink(const float *before, const float *now, float *total, float *out, int64_t width)
{
    for (int64_t q = 0; q < MS_QUERY_LANES; q += MS_LANES) {
        /* A lane that has seen no key yet stays so: -infinity minus -infinity would be NaN. */
        ms_vf old = ms_v_load(before + q),
              new = ms_v_greater(ms_v_load(now + q), ms_v_splat(LEAST_FINITE));
        /* Compared as numbers: -infinity equals itself, so an empty block changes nothing. */
        int differ = 0;
        for (int i = 0; i < MS_LANES; i++) differ |= before[q + i] != now[q + i];
        if (!differ) continue;
        ms_vf factor = ms_v_exp_normal(old - new);
        ms_v_store(total + q, ms_v_load(total + q) * factor);
        for (int64_t i = 0; i < width; i++)
            ms_v_store(out + i * MS_QUERY_LANES + q,
                       ms_v_load(out + i * MS_QUERY_LANES + q) * factor);
    }
}

/* Two keys at a time: they form a pair, and two sums hide the latency of the addition. A hidden
 * score is -infinity, whose exponential is 0. The scale and the shift are one multiply-add for each
 * score. A padded key is hidden like one that a query does not see, so it adds 0. */
MS_VECTOR void exponentials_as(const bool pairs, const ms_score_block *b, const float *most,
                               float *total, float *steps)
{
    for (int64_t q = b->begin; q < b->end; q += MS_LANES) {
        /* Where a query has seen no key yet, `most` is -infinity like its scores, and their
         * difference would be NaN. A finite shift makes the exponentials 0. */
        ms_vf shift = ms_v_greater(ms_v_load(most + q), ms_v_splat(LEAST_FINITE)),
              sum = ms_v_load(total + q), other = ms_v_splat(0.0f);
        float *x = b->scores + q, *to = steps + q;
        for (int64_t row = 0; row < b->rows; row += 2, x += 2 * MS_QUERY_LANES) {
            ms_vf first = ms_v_exp_normal(ms_v_load(x) * b->scale - shift),
                  second = ms_v_exp_normal(ms_v_load(x + MS_QUERY_LANES) * b->scale - shift);
            sum += first;
            other += second;
            if (pairs) {
                ms_v_store(to, join_pairs(first, second));
                to += MS_QUERY_LANES;
            } else {
                ms_v_store(x, first);
                ms_v_store(x + MS_QUERY_LANES, second);
            }
        }
        ms_v_store(total + q, sum + other);
    }
}

/* The choice of `pairs`, made once for a block. */
static void exponentials(bool pairs, const ms_score_block *b, const float *most, float *total,
                         float *steps)
{
    if (pairs) exponentials_as(true, b, most, total, steps);
    else exponentials_as(false, b, most, total, steps);
}

/* log_sum = most + log(total) stays finite where the sum of exponentials itself would overflow. */
static void finish(const float *most, float *total, float *log_sum)
{
    for (int64_t q = 0; q < MS_QUERY_LANES; q += MS_LANES) {
        ms_vf sum = ms_v_load(total + q), zero = ms_v_splat(0.0f);
        /* A lane that has seen a key has a sum of 1 or more, or NaN. */
        ms_vi none = ms_v_less(sum, ms_v_splat(0.5f));
        ms_vf known = ms_v_select(none, ms_v_splat(1.0f), sum);
        ms_v_store(log_sum + q,
                   ms_v_select(none, ms_v_splat(LEAST), ms_v_load(most + q) + ms_v_log(known)));
        ms_v_store(total + q, ms_v_select(none, zero, 1.0f / known));
    }
}

/* ----------------------------------------------------------------- backward */

/* p is computed from the score and log_sum. Hidden lanes are set to 0, as the scores are not masked
 * in backward. Two keys at a time, because their gradients are a pair of the right operand. The
 * three outputs are the operands of the three products that follow: p for the gradient of values, d
 * for those of keys and queries. */
MS_VECTOR void gradient_as(const bool pairs, const ms_score_block *b, float *change,
                           const float *log_sum, const float *offset, const ms_score_units *units)
{
    const int64_t lanes = pairs ? MS_QUERY_LANES / 2 : MS_QUERY_LANES;
    for (int64_t q = b->begin; q < b->end; q += MS_LANES) {
        /* p = exp(score - log_sum) needs no division: log_sum holds the sum of exponentials
         * already. */
        ms_vf shift = ms_v_load(log_sum + q), less = ms_v_load(offset + q);
        clear c = clear_rows(b, q);
        int64_t lane = pairs ? q / 2 : q;
        for (int64_t row = 0; row < b->rows; row += 2) {
            /* Of two keys: the probabilities, and the gradients of the scores. */
            ms_vf p[2], d[2];
            UNROLL for (int i = 0; i < 2; i++)
            {
                p[i] = ms_v_exp_normal(ms_v_load(row_at(b, row + i) + q) * b->scale - shift);
                if (row + i < c.begin || row + i >= c.end)
                    p[i] = ms_v_select(hidden(b, row + i, q), ms_v_splat(0.0f), p[i]);
                /* The scale belongs to the score, so its gradient is multiplied by it once more;
                 * the products that follow take keys and queries as they are. */
                d[i] =
                    p[i] * (ms_v_load(change + (row + i) * MS_QUERY_LANES + q) - less) * b->scale;
                float *p_row = units->p_rows + (row + i) * lanes + lane,
                      *d_row = units->d_rows + (row + i) * lanes + lane;
                if (pairs) {
                    store_pairs(p_row, p[i]);
                    store_pairs(d_row, d[i]);
                } else {
                    ms_v_store(p_row, p[i]);
                    ms_v_store(d_row, d[i]);
                }
            }
            if (pairs)
                ms_v_store(units->d_steps + row / 2 * MS_QUERY_LANES + q, join_pairs(d[0], d[1]));
        }
    }
}

/* The choice of `pairs`, made once for a block. */
static void gradient(bool pairs, const ms_score_block *b, float *change, const float *log_sum,
                     const float *offset, const ms_score_units *units)
{
    if (pairs) gradient_as(true, b, change, log_sum, offset, units);
    else gradient_as(false, b, change, log_sum, offset, units);
}

/* Rows are in any float dtype; sums are f32. The products are of the incoming gradient and of the
 * saved output, or of keys and a query in f32. */
MS_VECTOR void row_dots_as(const ms_dtype A, const ms_dtype B, int64_t rows, int64_t width,
                           const char *a, int64_t a_row, const char *b, int64_t b_row,
                           float *offset)
{
    const int64_t a_item = A == MS_F32 ? 4 : 2, b_item = B == MS_F32 ? 4 : 2;
    for (int64_t row = 0; row < rows; row++, a += a_row * a_item, b += b_row * b_item) {
        ms_vf total = ms_v_splat(0.0f);
        for (int64_t k = 0; k < width; k += MS_LANES)
            total += row_part(A, a, k, width) * row_part(B, b, k, width);
        offset[row] = ms_v_sum(total);
    }
}

/* The rows of a head are far apart in memory, so a_row and b_row are distances in elements. */
static void row_dots(ms_dtype dtype, ms_dtype b_dtype, int64_t rows, int64_t width, const void *a,
                     int64_t a_row, const void *b, int64_t b_row, float *offset)
{
    if (b_dtype == MS_F32)
        MS_ROW_SWITCH(dtype, row_dots_as(D, MS_F32, rows, width, a, a_row, b, b_row, offset));
    else MS_ROW_SWITCH(dtype, row_dots_as(D, D, rows, width, a, a_row, b, b_row, offset));
}

/* ---------------------------------------------------------------- one query */

/* The scores of one query are a row, and not a lane. */
static float weigh(int64_t count, float scale, float *scores, float *most)
{
    ms_vf greatest = ms_v_splat(LEAST), sum = ms_v_splat(0.0f);
    for (int64_t i = 0; i < count; i += MS_LANES)
        greatest = ms_v_greater(ms_v_load(scores + i), greatest);
    float top = LEAST;
    for (int i = 0; i < MS_LANES; i++) top = greatest[i] > top ? greatest[i] : top;
    *most = top * scale;
    ms_vf shift = ms_v_splat(*most);
    for (int64_t i = 0; i < count; i += MS_LANES) {
        ms_vf x = ms_v_exp_normal(ms_v_load(scores + i) * scale - shift);
        ms_v_store(scores + i, x);
        sum += x;
    }
    return ms_v_sum(sum);
}

/* Columns k .. k + vectors * MS_LANES - 1, whose sums stay in registers over all rows. The last
 * vector may be a part. */
MS_VECTOR void sum_columns(const ms_dtype D, const int vectors, int64_t rows, int64_t width,
                           const char *from, int64_t bytes, const float *weights, int64_t k,
                           float *to)
{
    ms_vf sum[4];
    UNROLL for (int v = 0; v < vectors; v++) sum[v] = ms_v_splat(0.0f);
    for (int64_t i = 0; i < rows; i++, from += bytes) {
        ms_vf weight = ms_v_splat(weights[i]);
        UNROLL for (int v = 0; v < vectors; v++) sum[v] +=
            weight * row_part(D, from, k + v * MS_LANES, width);
    }
    UNROLL for (int v = 0; v < vectors; v++) ms_v_store(to + k + v * MS_LANES, sum[v]);
}

/* `to` has room for the width rounded up to 16. */
MS_VECTOR void sum_rows_as(const ms_dtype D, int64_t rows, int64_t width, const char *from,
                           int64_t row, const float *weights, float *to)
{
    const int64_t bytes = row * (D == MS_F32 ? 4 : 2);
    int64_t k = 0;
    for (; k + 3 * MS_LANES < width; k += 4 * MS_LANES)
        sum_columns(D, 4, rows, width, from, bytes, weights, k, to);
    for (; k < width; k += MS_LANES) sum_columns(D, 1, rows, width, from, bytes, weights, k, to);
}

static void sum_rows(ms_dtype dtype, int64_t rows, int64_t width, const void *from, int64_t row,
                     const float *weights, float *to)
{
    MS_ROW_SWITCH(dtype, sum_rows_as(D, rows, width, from, row, weights, to));
}

/* ------------------------------------------------------------------- rotary */

/* Element j forms a pair with element j + width / 2 (the layout of GPT-NeoX). Backward turns by the
 * negative angle, since the inverse of a rotation is its transpose. Both numbers of a pair are
 * loaded before either is stored. */
MS_VECTOR void rotate_row(const ms_dtype D, const char *x, char *y, const float *cosine,
                          const float *sine, size_t half, bool back)
{
    size_t i = 0, item = D == MS_F32 ? 4 : 2;
    const char *x_high = x + half * item;
    char *y_high = y + half * item;
    for (; i + MS_LANES <= half; i += MS_LANES) {
        ms_vf a = ms_row_get(D, x, i), b = ms_row_get(D, x_high, i), c = ms_v_load(cosine + i),
              s = ms_v_load(sine + i);
        if (back) s = -s;
        ms_row_put(D, y, i, a * c - b * s);
        ms_row_put(D, y_high, i, b * c + a * s);
    }
    if (i < half) {
        ms_vf a = ms_row_get_part(D, x, i, half, 0.0f),
              b = ms_row_get_part(D, x_high, i, half, 0.0f);
        ms_vf c = ms_v_load_part(cosine + i, half - i), s = ms_v_load_part(sine + i, half - i);
        if (back) s = -s;
        ms_row_put_part(D, y, i, half, a * c - b * s);
        ms_row_put_part(D, y_high, i, half, b * c + a * s);
    }
}

/* The angles come in f32 from the caller, one pair of numbers for each pair of elements. */
static void rotate(ms_dtype dtype, const void *x, void *y, const float *cosine, const float *sine,
                   int64_t width, bool back)
{
    MS_ROW_SWITCH(dtype, rotate_row(D, x, y, cosine, sine, (size_t)width / 2, back));
}

const ms_attention_kernels MS_ISA_NAME(ms_attention_kernels) = {
#if defined(__AVX512BF16__)
    .has_pairs = true,
#endif
    .multiply = multiply,
    .pack_rows = pack_rows,
    .pack_steps = pack_steps,
    .unpack = unpack,
    .transpose = transpose,
    .mask = mask,
    .shrink = shrink,
    .exponentials = exponentials,
    .finish = finish,
    .gradient = gradient,
    .row_dots = row_dots,
    .weigh = weigh,
    .sum_rows = sum_rows,
    .rotate = rotate,
};
