/* codec.h: arguments of the kernels that code floats as bytes; tensor.h has the format. */
#ifndef MOONSHARD_OPS_CODEC_H
#define MOONSHARD_OPS_CODEC_H

#include "ops/backend.h"

/* encode: x [rows, n] of any float dtype to payload [rows, bytes]; error, if not NULL, gets x minus
 * what the payload decodes to, in x's dtype. decode: payload to x in f32; sum: x is [n], the sum of
 * the decoded rows. All contiguous. `bytes` is the distance between payloads, which need not be a
 * multiple of 4: scales are not aligned. */
typedef struct ms_codec_args {
    ms_codec codec;
    ms_random random;
    void *x, *error, *payload; /* error: NULL, or as x */
    int64_t rows, n, bytes;
    uint8_t dtype;
    bool sum;
} ms_codec_args;

/* Blocks of a row of n numbers, the last one perhaps short; and bits of one code. */
static inline int64_t ms_codec_blocks(const ms_codec *codec, int64_t n)
{
    return (n + codec->block - 1) / codec->block;
}
static inline int64_t ms_codec_bits(ms_codec_kind kind)
{
    if (kind == MS_CODEC_SIGN) return 1;
    if (kind == MS_CODEC_INT2) return 2;
    return kind == MS_CODEC_INT4 || kind == MS_CODEC_FP4 ? 4 : 8;
}

#endif
