/* attention.h: inner loops of attention and of the rotary embedding. */
#ifndef MOONSHARD_TENSOR_CPU_ATTENTION_H
#define MOONSHARD_TENSOR_CPU_ATTENTION_H

#include "moonshard/tensor.h"
#include "tensor/cpu/isa.h"

/* A block of scores [rows, columns], f32, `row` apart: columns rounded up to a multiple of 16, whose contents do not matter. Row i sees
 * columns 0 .. seen + i * step - 1 (clamped to the block); the others become 0. */
typedef struct ms_score_block { float *scores; int64_t rows, columns, row, seen, step; float scale; } ms_score_block;

typedef struct ms_attention_kernels {
    /* scores become exp(scale * score - most): most and total are kept per row over the blocks; rows of out [rows, width] are scaled by
     * how much `most` has grown, unless this is the first block. */
    void (*softmax)(const ms_score_block *block, float *most, float *total, bool first, float *out, int64_t width);
    /* out rows divided by total; log_sum = most + log(total), unless it is NULL. */
    void (*finish)(int64_t rows, int64_t width, const float *most, const float *total, float *out, float *log_sum);
    /* scores become exp(scale * score - log_sum). */
    void (*probabilities)(const ms_score_block *block, const float *log_sum);
    /* change[i] = probability[i] * (change[i] - offset of the row) * scale. */
    void (*score_gradient)(const ms_score_block *block, float *change, const float *offset);
    /* offset[row] = dot product of two rows, which lie a_row and b_row apart. */
    void (*row_dots)(int64_t rows, int64_t width, const float *a, int64_t a_row, const float *b, int64_t b_row, float *offset);
    /* y = the pairs of x turned; cosine, sine: [width / 2] */
    void (*rotate)(ms_dtype dtype, const void *x, void *y, const float *cosine, const float *sine, int64_t width, bool back);
} ms_attention_kernels;

MS_ISA_TABLE(ms_attention_kernels, ms_attention_kernels)

#endif
