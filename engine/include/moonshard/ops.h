/* moonshard/ops.h: the operators, one line each: name, inputs -> outputs, attributes (the member of
 * ms_attributes), and the rule.
 *
 * Everywhere: broadcasting goes from the last dimension; operands have one dtype unless said
 * otherwise; f16 and bf16 compute in f32 and round once; integers compute in 64 bits and wrap to
 * their size; "index" is i64, i32 or u16 and counts from 0; an index outside is an error of the
 * stream that names the operator, the index and the limit. Sums add in a fixed order that depends
 * on shapes only. */
#ifndef MOONSHARD_OPS_H
#define MOONSHARD_OPS_H

#include "moonshard/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* clang-format off */
#define MS_OPS(O) \
    /* elementwise.c, one input. In-place twins exist. */ \
    O(neg) O(exp) O(log) O(sqrt) O(rsqrt) O(square) O(abs) O(sign) \
    O(relu)            /* gradient 0 at 0; that of a NaN passes */ \
    O(gelu)            /* the tanh form: 0.5x(1 + tanh(sqrt(2/pi)(x + 0.044715x^3))) */ \
    O(gelu_erf)        /* 0.5x(1 + erf(x/sqrt 2)) */ \
    O(silu) O(tanh) O(sigmoid) \
    O(sin) O(cos)      /* of radians */ \
    /* gradient 0; integers stay what they are; round: halves to the even number */ \
    O(floor) O(ceil) O(round) \
    O(pow)             /* scalar.value: exponent */ \
    /* scalar.value and high, where has_low and has_high; high wins where it is below value; \
     * gradient passes inside and at the bounds */ \
    O(clamp) \
    O(is_finite)       /* bool */ \
    \
    /* elementwise.c, with a number (scalar.value) */ \
    O(add_scalar) O(mul_scalar) O(div_scalar) \
    O(rsub_scalar)     /* value - x */ \
    O(rdiv_scalar)     /* value / x */ \
    O(maximum_scalar) O(minimum_scalar) \
    O(eq_scalar) O(ne_scalar) O(lt_scalar) O(le_scalar) O(gt_scalar) O(ge_scalar) /* bool */ \
    \
    /* elementwise.c, two inputs */ \
    /* a + value * b, a - value * b; scalar.value 0 means 1 (write has_low = true for a true 0) */ \
    O(add) O(sub) \
    /* equal elements of maximum and minimum: half of the gradient to each; a NaN in one of them: \
     * the whole gradient to both */ \
    O(mul) O(div) O(maximum) O(minimum) \
    O(swiglu)          /* silu(b) * a, as `x:swiglu(gate)` */ \
    O(eq) O(ne) O(lt) O(le) O(gt) O(ge)   /* bool */ \
    \
    /* elementwise.c, three inputs */ \
    /* a + c * (b - a); c broadcasts; with two inputs scalar.value is the weight */ \
    O(lerp) \
    O(addcmul) O(addcdiv)   /* a + value * b * c, a + value * b / c; value as in add */ \
    O(where)           /* a bool ? b : c */ \
    O(masked_fill)     /* a, bool mask; scalar.value */ \
    \
    /* copy.c */ \
    O(clone)           /* contiguous copy */ \
    O(contiguous)      /* itself (a view) if it is */ \
    O(cast)            /* cast.dtype; float to integer truncates; to bool: != 0 */ \
    /* in place only: inputs[0] = inputs[1] cast and broadcast; gradient to inputs[1] */ \
    O(copy) \
    /* in place only: inputs[0] = scalar.value, or inputs[1], a one-element tensor */ \
    O(fill) \
    O(cat)             /* dim.a; any number of inputs, equal but for that dimension */ \
    O(stack)           /* dim.a is the new dimension */ \
    \
    /* view.c: no tasks, but reshape where it must copy */ \
    O(view)            /* shape; one size may be -1; refuses where a copy would be needed */ \
    O(reshape) \
    O(narrow)          /* dim a start length */ \
    O(select)          /* dim a start */ \
    O(split)           /* split.sizes along split.dim: one output each */ \
    O(transpose)       /* dim a b */ \
    O(permute)         /* shape.sizes are dimensions */ \
    O(expand)          /* shape; -1 keeps; may add leading dimensions */ \
    O(squeeze) O(unsqueeze) /* dim a */ \
    \
    /* reduce.c: reduce.all, or reduce.dim with reduce.keep */ \
    /* max, min: gradient to the first of equal elements. sum of bool and integers: i64 */ \
    O(sum) O(mean) O(max) O(min) \
    /* reduce.p: 1, 2, other p > 0, or infinity; in f32; gradient 0 where the norm is 0 */ \
    O(norm) \
    O(any) O(every)    /* bool to scalar */ \
    O(argmax)          /* i64; the lowest of equal ones; NaN wins, as in max */ \
    O(cumsum)          /* dim.a */ \
    O(dot)             /* 1-D, 1-D to scalar */ \
    /* histogram; i64 [bins]; values outside [low, high] are not counted, high falls in the \
     * last bin */ \
    O(histogram) \
    /* scalar.value in 0..1; over everything, linear interpolation; no gradient */ \
    O(quantile) \
    \
    /* select.c */ \
    O(topk)            /* top: values and i64 indices, sorted; ties: lower index first */ \
    /* 1-D; inputs a, threshold (one element); dim.length = capacity: values, i64 indices, i64 \
     * count [1] of the slots used; in order of position; no gradient */ \
    O(above) \
    /* index.dim; gather: index has a's sizes but for that dimension; index_select: 1-D */ \
    O(gather) O(index_select) \
    /* a, index, values: out of place copy of a with values at index along index.dim; no equal \
     * indices for a gradient */ \
    O(scatter) \
    O(scatter_add)     /* equal indices add in order of position */ \
    \
    /* matmul.c */ \
    /* [..., m, k] [..., k, n]; batch dimensions broadcast; 1-D operands as in NumPy; \
     * any strides; float, result of the operands' dtype */ \
    O(matmul) \
    /* x [..., in], weight [out, in], bias [out] or absent; linear.activation. A weight may be \
     * coded, u8 [out, bytes]: it is decoded for each product, its numbers are not kept, and it \
     * has no gradient. */ \
    O(linear) \
    O(linear_t)        /* the same with weight [in, out] */ \
    \
    /* mlp.c */ \
    /* x [..., in]; of the second layer weight [out, hidden] and bias [out] or NULL; of the first \
     * weight [hidden, in] and bias [hidden] or absent: linear with gelu, then linear; backward \
     * computes gelu again. In this order gradients are ready. */ \
    O(mlp) \
    O(mlp_t)           /* the same with weights [hidden, out] and [in, hidden] */ \
    \
    /* convolution.c */ \
    /* x [images, in, rows, columns], weight [out, in / groups, kernel rows, kernel columns], bias \
     * [out] or absent; window, whose kernel is the weight's; as PyTorch's conv2d */ \
    O(conv2d) \
    \
    /* pooling.c */ \
    /* x [images, channels, rows, columns]; window; padding at most half of the kernel; the size \
     * of the output is rounded down, as by PyTorch without ceil_mode. The gradient of a maximum \
     * goes to the first of equal numbers. */ \
    O(max_pool2d) O(avg_pool2d) \
    \
    /* orthonormalize.c */ \
    /* in place only: columns of [..., n, r], r <= n, from left to right (Gram-Schmidt); \
     * norm.eps is added to each norm; a column of zeros stays; no gradient */ \
    O(orthonormalize) \
    \
    /* codec.c: codec, codec.h has the format; rows are the last dimension; no gradient */ \
    /* x [..., n]: u8 [..., bytes], and, of two outputs, x minus what that says, in x's dtype */ \
    O(codec_encode) \
    O(codec_decode)    /* u8 [..., bytes]: f32 [..., codec.n] */ \
    O(codec_decode_sum) /* u8 [rows, bytes]: f32 [codec.n], added in order of rows */ \
    \
    /* norm.c */ \
    /* x, weight or absent, bias or absent; norm.eps; over the last dimension, biased variance */ \
    O(layer_norm) \
    O(rms_norm)        /* x, weight or absent; norm.eps */ \
    /* x, residual, weight, bias: outputs s = x + residual and layer_norm(s) in one pass */ \
    O(add_layer_norm) \
    O(add_rms_norm)    /* x, residual, weight: likewise */ \
    \
    /* softmax.c */ \
    O(softmax) O(log_softmax)             /* dim.a */ \
    /* logits [..., classes], target index [...]; loss; natural logarithm; in f32 whatever the \
     * logits' dtype */ \
    O(cross_entropy) \
    O(mse_loss)        /* mean of (a - b)^2 over all elements; gradients to both */ \
    \
    /* linear_cross_entropy.c */ \
    /* x [..., in], weight [classes, in], target index [...]; loss, with reduction mean or sum: \
     * cross_entropy of linear. The logits exist for some rows at a time. Forward computes the \
     * gradients: a write of x or the weight between forward and backward changes nothing. */ \
    O(linear_cross_entropy) \
    \
    /* attention.c */ \
    /* q [b, h, t, d], k and v [b, g, s, d], h a multiple of g, positions i64 [b, t] or absent; \
     * attention [b, h, t, d], and, if two results are asked for, log_sum f32 [b, h, t], the \
     * logarithm of the sum of exponentials of the scores. Causal: query i has place offset + i \
     * among the keys, and sees those up to it; offset is s - t unless the call has its own. With \
     * positions, only if causal, and if s = t or the call has an offset, it sees the places from \
     * its own less positions[i] on: documents that are one after the other in a row do not see \
     * each other. A position outside of 0 .. i, with an offset one below 0, is an error of the \
     * task. With a window, only if causal, it sees the last `window` places. A query that sees \
     * no key has the result 0, log_sum -infinity, and no gradient. */ \
    O(attention) \
    O(rotary)          /* x [b, h, t, d]; rotary; pairs (j, j + d/2), see ms_rotary_scaling */ \
    \
    /* embedding.c */ \
    /* ids index [...], weight [rows, width]: [..., width]; repeated ids add up in the gradient \
     * in order of position */ \
    O(embedding) \
    \
    /* random.c */ \
    O(uniform) O(normal) O(randint)       /* in place only: inputs[0] filled; random */ \
    /* random.a = p, random.random = ms_engine_draw: zero with probability p, else x / (1 - p); \
     * the mask is drawn again in backward */ \
    O(dropout)
/* clang-format on */

#define MS_OP_DECLARE(name) extern MS_API const ms_op ms_op_##name;
MS_OPS(MS_OP_DECLARE)

#ifdef __cplusplus
}
#endif
#endif
