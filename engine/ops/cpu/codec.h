/* codec.h: inner loops that code one block of a row. */
#ifndef MOONSHARD_OPS_CPU_CODEC_H
#define MOONSHARD_OPS_CPU_CODEC_H

#include "ops/codec.h"
#include "ops/cpu/isa.h"

/* Loops over one block of a row, which has one scale. They are indexed by the codec's kind. */
typedef struct ms_codec_kernels {
    /* n numbers of `dtype` to *scale (not written by bare codecs) and packed codes; u: a number
     * from [0, 1) for each, or NULL: to nearest; error: NULL, or what the codes leave. */
    void (*encode[MS_CODEC_KINDS])(const ms_codec *codec, ms_dtype dtype, const void *x, int64_t n,
                                   const float *u, float *scale, uint8_t *codes, void *error);
    /* out = (add: out +) the codes' values times scale */
    void (*decode[MS_CODEC_KINDS])(const uint8_t *codes, int64_t n, float scale, bool add,
                                   float *out);
} ms_codec_kernels;

MS_ISA_TABLE(ms_codec_kernels, ms_codec_kernels)

#endif
