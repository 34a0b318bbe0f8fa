/* fp8.h: products of linear layers in 8-bit floats: payloads, and the arguments of their kernels.
 *
 * Under autocast to bf16 with ms_engine_set_fp8, linear, linear_t and mlp multiply codes of 8 bits:
 * input and weight as E4M3, the incoming gradient as E5M2. All else is as under autocast to bf16.
 *
 * A payload is a matrix in codes: one tensor of u8, so that it is kept for a step, tied to its
 * weight, computed again after a drop, and saved for backward as any other cast. It has the codes,
 * row by row, and then an ms_fp8_scale. The rows and columns are multiples of 16, so the scale is
 * aligned to 256 bytes.
 *
 * A GPU that multiplies codes takes each operand along the dimension over which it adds. So it also
 * needs codes of transposes. A weight's payload has those of both, one after the other. Of an input
 * and of a gradient each is a payload: forward multiplies an input and saves its transpose. Other
 * devices, and a GPU that emulates, multiply in bf16 what the codes represent; they have no codes
 * of transposes.
 *
 * Weights also travel as codes when a sharded model is gathered (fsdp/fp8_gather.c): E4M3, by parts
 * of a tensor that are called spans, each with a scale of its own.
 *
 * On a GPU some kernels give the greatest size of what they pass over, so that an encode need not
 * read it once more (ms_tensor_hold_most): norms and swiglu that of their result and, for layers
 * without a bias, of the gradients that they pass on; the pass over a linear layer's gradient that
 * of its result. Products of libraries, attention, rotary and other elementwise kernels give none,
 * and no kernel of a CPU does: there an encode reads its operand twice.
 *
 * Invariants
 * - A code represents its number times `scale`, a power of two. So scaling is exact, before the
 *   cast and after the product, and the codes are those of a cast to nearest even of x / scale.
 * - The scale is the least one at which the greatest |x| is at most the format's greatest number:
 *   nothing saturates. The greatest |x| does not depend on the order in which it is found.
 * - A scale is at least 2^-100. So numbers that a device may take for 0 (subnormal ones) have the
 *   codes of 0 on all devices. The scale of zeros is 1.
 * - Where a number is not finite, the scale is NaN and all codes are NaN: the result shows it.
 * - Decoded E4M3 codes have these codes again, or codes at half the scale that represent the same
 *   numbers: the greatest |x| is more than 224 times the scale, unless the scale is the least one,
 *   and rounds to 224 or more. So a product of decoded weights has the terms of one of the weights.
 *   Only numbers that round to 2^128 are infinite where they are decoded.
 * - A greatest size that was given is the one that a second read finds, bit for bit: of the numbers
 *   as they are stored. One of memory that has been written since is not used.
 * - Codes, maxima and scales have the same bits on all devices. Products are sums in f32 of the
 *   numbers that the codes represent, and differ in their order only. */
#ifndef MOONSHARD_OPS_FP8_H
#define MOONSHARD_OPS_FP8_H

#include "ops/backend.h"

typedef enum ms_fp8_format { MS_FP8_E4M3, MS_FP8_E5M2 } ms_fp8_format;

/* Sizes of matrices in codes are multiples of it: products of 8 bits read pieces of 16 bytes. */
#define MS_FP8_MULTIPLE 16

typedef struct ms_fp8_scale {
    float scale;   /* what a code's number counts for */
    uint32_t most; /* the bits of the greatest |x|; those of a NaN are the greatest */
} ms_fp8_scale;

/* codes = x / scale, both contiguous; x is f32 or bf16. gelu: of gelu(x) in its tanh form, rounded
 * to x's dtype, and not of x. turned: the codes of the transpose. Either may be NULL. On a CPU
 * turned always is, and there is no gelu. The scale is made first, and written to both places, of
 * which the second one may be NULL. given: numbers whose greatest is that of the bits of |x|, a
 * multiple of 16 of them; NULL: it is found here, as always on a CPU and for gelu. */
typedef struct ms_fp8_encode_args {
    const void *x;
    const uint32_t *given;
    uint8_t *codes, *turned;
    ms_fp8_scale *scales[2];
    int64_t rows, columns, given_count;
    uint8_t dtype, format;
    bool gelu;
} ms_fp8_encode_args;

/* out = codes * scale, bf16: exact. */
typedef struct ms_fp8_decode_args {
    const uint8_t *codes;
    const ms_fp8_scale *scale;
    uint16_t *out;
    int64_t count;
    uint8_t format;
} ms_fp8_decode_args;

/* Spans that one task takes. */
#define MS_FP8_SPANS 32

/* Span k is the elements bounds[k] .. bounds[k + 1] - 1 of a tensor; it may be empty, and begins
 * anywhere. most[k] has the bits of the greatest |x| of all that is encoded with its scale. Numbers
 * are f32 or bf16, codes E4M3.
 * most: from = numbers; writes most[k], 0 for an empty span. encode: from = numbers, to = codes.
 * decode: from = codes, to = numbers; the spans are there `repeats` times, `period` elements apart.
 * It is exact. NaN is written where most[k] is not finite. */
typedef struct ms_fp8_span_args {
    const void *from;
    void *to;
    uint32_t *most;
    int64_t bounds[MS_FP8_SPANS + 1];
    int64_t period, repeats;
    uint8_t dtype, spans;
} ms_fp8_span_args;

/* The bits of a scale from those of the greatest |x|. 448 and 57344 are 1.75 * 2^8 and 1.75 * 2^15.
 */
MS_EVERYWHERE uint32_t ms_fp8_scale_bits(uint32_t most, ms_fp8_format format)
{
    int32_t greatest = format == MS_FP8_E4M3 ? 8 : 15, least = 127 - 100;
    if (most >= 0x7f800000u) return 0x7fc00000u;
    if (most == 0) return 0x3f800000u;
    int32_t exponent = (int32_t)(most >> 23) - greatest + ((most & 0x7fffffu) > 0x600000u);
    return (uint32_t)(exponent > least ? exponent : least) << 23;
}
/* Of its reciprocal, by which numbers are multiplied: exact. */
MS_EVERYWHERE uint32_t ms_fp8_inverse_bits(uint32_t scale)
{
    return scale >= 0x7f800000u ? scale : (254u << 23) - scale;
}

#ifndef __cplusplus

struct ms_op_call;

/* Whether linear layers compute in 8 bits now. */
bool ms_fp8_is_on(const ms_engine *engine);
/* Whether kernels that write bf16 give its greatest size: on a device for GPUs, if linear layers
 * compute in 8 bits now. A wrong guess costs time and nothing else. */
bool ms_fp8_wants_most(const ms_engine *engine);
/* Memory for `count` numbers of which the greatest counts, rounded up to a multiple of 16. */
ms_status ms_fp8_most_new(ms_engine *engine, int64_t count, ms_tensor **out);
/* Refuses what no product of 8 bits takes, with what to do: other dtypes than f32 and bf16, and
 * sizes that are not multiples of 16. */
ms_status ms_fp8_check(const struct ms_op_call *call, ms_dtype compute, int64_t rows, int64_t in,
                       int64_t out);

/* Whether codes are multiplied: on a device for GPUs, unless it is emulated. Forward asks for the
 * setting, which may have changed for backward: the size of the weight's payload tells. */
bool ms_fp8_is_native(const ms_engine *engine);
bool ms_fp8_weight_is_native(const ms_tensor *payload, int64_t count);

/* The payload of x, f32 or bf16 [..., columns], and that of its transpose, as new tensors of one
 * dimension. NULL: it is not wanted. Caller releases. */
ms_status ms_fp8_encode(ms_engine *engine, ms_tensor *x, ms_fp8_format format, ms_tensor **codes,
                        ms_tensor **turned);
/* Those of gelu(x) as E4M3, where codes are multiplied. */
ms_status ms_fp8_encode_gelu(ms_engine *engine, ms_tensor *x, ms_tensor **codes,
                             ms_tensor **turned);
/* The same for a weight, in one payload; with codes of the transpose where codes are multiplied. */
ms_status ms_fp8_encode_weight(ms_engine *engine, ms_tensor *weight, ms_tensor **out);
/* Into one that there is. */
ms_status ms_fp8_encode_weight_into(ms_engine *engine, ms_tensor *weight, ms_tensor *payload);

/* One of the tasks of spans (MS_KERNEL_fp8_span_...), with all of args; `from` and `to` are the
 * tensors that it reads and writes. Finding the greatest sizes writes `most`, and has no `to`. */
ms_status ms_fp8_run_spans(ms_engine *engine, ms_kernel kernel, const ms_fp8_span_args *args,
                           ms_tensor *from, ms_tensor *most, ms_tensor *to);

/* An operand of a product: the payload of a matrix [rows, columns]. turned: its transpose is
 * multiplied. Where codes are multiplied, the payload is that of a weight, or has the codes of the
 * transpose for a left operand that is turned and a right one that is not, and else the others. */
typedef struct ms_fp8_matrix {
    ms_tensor *payload;
    int64_t rows, columns;
    ms_fp8_format format;
    bool turned;
} ms_fp8_matrix;

/* out[m, n] = a[m, k] b[k, n] (+ bias[n], or NULL), rounded once to out's dtype, bf16 or f32.
 * native: codes are multiplied, at most one of both E5M2; else what they represent. */
ms_status ms_fp8_product(ms_engine *engine, bool native, const ms_fp8_matrix *a,
                         const ms_fp8_matrix *b, ms_tensor *bias, ms_tensor *out);

#endif
#endif
