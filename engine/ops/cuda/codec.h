/* codec.h: what the kernels of codecs get. */
#ifndef MOONSHARD_OPS_CUDA_CODEC_H
#define MOONSHARD_OPS_CUDA_CODEC_H

#include "ops/codec.h"

typedef struct ms_cuda_codec_call {
    ms_codec_args c;
    int64_t blocks; /* of a row */
    int64_t drawn;  /* random numbers that each block has for itself: whole groups of 64 */
} ms_cuda_codec_call;

#endif
