/* rotary.h: what the kernel of the rotary position embedding gets. */
#ifndef MOONSHARD_OPS_CUDA_ROTARY_H
#define MOONSHARD_OPS_CUDA_ROTARY_H

#include "ops/attention.h"

/* A block turns this many pairs at most, of one moment, and of this many heads of all batches. */
enum { MS_CUDA_ROTARY_PAIRS = 256, MS_CUDA_ROTARY_HEADS = 256 };

typedef struct ms_cuda_rotary_call {
    ms_rotary_args r;
    int64_t pieces; /* blocks for the pairs of a moment */
} ms_cuda_rotary_call;

#endif
