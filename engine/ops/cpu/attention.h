/* attention.h: inner loops of attention and of the rotary embedding.
 *
 * Queries are lanes: a block of scores is [keys, 64 queries], so that maxima, sums and masks of the
 * softmax work on whole vectors, and never add across lanes. Operands of products are made of
 * 32-bit units: one f32, or (`pairs`) two bf16 that are neighbours along the dimension that is
 * summed over, which one instruction multiplies and adds. Everything else, and every sum, is
 * f32. */
#ifndef MOONSHARD_OPS_CPU_ATTENTION_H
#define MOONSHARD_OPS_CPU_ATTENTION_H

#include "moonshard/tensor.h"
#include "ops/cpu/isa.h"

enum { MS_QUERY_LANES = 64 };

/* c[i, j] (+)= sum over u of a[i, u] b[u, j]: rows a multiple of 4, columns of 16. Distances in
 * units. */
typedef struct ms_unit_product {
    int64_t rows, columns, depth;
    const float *a;
    int64_t a_row, a_step;
    const float *b;
    int64_t b_step;
    float *c;
    int64_t c_row;
    bool accumulate;
} ms_unit_product;

/* Scores of `rows` keys (a multiple of 4), of which the first `keys` are there, lanes begin .. end
 * - 1 (multiples of 16). Lane q sees key i if i < keys, i < seen + q * step and i >= first[q]. A
 * lane may see none of them. */
typedef struct ms_score_block {
    float *scores;      /* [rows, 64] */
    const float *first; /* [64], whole numbers within 0 .. rows; NULL: all 0 */
    int64_t rows, keys, begin, end, seen, step;
    float scale;
} ms_score_block;

/* What becomes of a block's scores and their gradients: as left operands [rows, 64 / 2 or 64 units]
 * and right ones [rows / 2 or rows, 64]. */
typedef struct ms_score_units {
    float *p_rows, *d_rows, *d_steps;
} ms_score_units;

/* Inner loops over one block. None of them allocates; blocks, packed operands and sums are the
 * caller's scratch. */
typedef struct ms_attention_kernels {
    bool has_pairs; /* else `pairs` is false everywhere */
    void (*multiply)(bool pairs, const ms_unit_product *product);

    /* Rows of any float dtype, `row` elements apart, as units [padded, units of width rounded up to
     * 16]: pairs along the width. */
    void (*pack_rows)(bool pairs, ms_dtype dtype, const void *from, int64_t row, int64_t count,
                      int64_t padded, int64_t width, float *to);
    /* The same with pairs along the rows, [padded / 2, width rounded up to 16]; padded is even.
     * Only for pairs. */
    void (*pack_steps)(ms_dtype dtype, const void *from, int64_t row, int64_t count, int64_t padded,
                       int64_t width, float *to);
    /* f32 rows, from_row apart, times factor[i] (NULL: 1), as rows of any float dtype. */
    void (*unpack)(ms_dtype dtype, const float *from, int64_t from_row, int64_t count,
                   int64_t width, const float *factor, void *to, int64_t row);
    /* to[column, row] = from[row, column]; rows and columns are multiples of 4. */
    void (*transpose)(const float *from, int64_t from_row, int64_t rows, int64_t columns, float *to,
                      int64_t to_row);

    /* Hides what a lane does not see (as -infinity), and raises most[64] to scale times the largest
     * score. */
    void (*mask)(const ms_score_block *block, float *most);
    /* out [width, 64] and total[64] shrink by e^(before - now); NaN-free where before is -infinity,
     * or both are: a lane that has seen no key yet. */
    void (*shrink)(const float *before, const float *now, float *total, float *out, int64_t width);
    /* Scores become exp(scale * score - most), as a right operand in `steps` (the scores
     * themselves, unless pairs), and are added to total[64]; 0 where most is -infinity. */
    void (*exponentials)(bool pairs, const ms_score_block *block, const float *most, float *total,
                         float *steps);
    /* log_sum = most + log(total); total becomes its inverse. -infinity and 0 where total is 0. */
    void (*finish)(const float *most, float *total, float *log_sum);
    /* p = exp(scale * score - log_sum), d = p * (change - offset) * scale, per lane, in the forms
     * of `units` (in place unless pairs). */
    void (*gradient)(bool pairs, const ms_score_block *block, float *change, const float *log_sum,
                     const float *offset, const ms_score_units *units);
    /* offset[i] = dot product of two rows; b_dtype: that of a, or f32. */
    void (*row_dots)(ms_dtype dtype, ms_dtype b_dtype, int64_t rows, int64_t width, const void *a,
                     int64_t a_row, const void *b, int64_t b_row, float *offset);

    /* For one query. Its scores become exp(scale * score - most), where most is scale times the
     * greatest; returns their sum. count is a multiple of 16. */
    float (*weigh)(int64_t count, float scale, float *scores, float *most);
    /* to[width] = the sum over rows of weights[i] times a row of any float dtype. */
    void (*sum_rows)(ms_dtype dtype, int64_t rows, int64_t width, const void *from, int64_t row,
                     const float *weights, float *to);

    /* y = the pairs of x turned; cosine, sine: [width / 2] */
    void (*rotate)(ms_dtype dtype, const void *x, void *y, const float *cosine, const float *sine,
                   int64_t width, bool back);
} ms_attention_kernels;

MS_ISA_TABLE_BF16(ms_attention_kernels, ms_attention_kernels)

#endif
