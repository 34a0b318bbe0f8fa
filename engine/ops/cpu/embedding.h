/* embedding.h: the inner loop of the embedding's gradient. */
#ifndef MOONSHARD_OPS_CPU_EMBEDDING_H
#define MOONSHARD_OPS_CPU_EMBEDDING_H

#include "moonshard/tensor.h"
#include "ops/cpu/isa.h"

/* Rows of any float dtype added to f32 rows of the same length. */
typedef struct ms_embedding_kernels {
    /* to[i] += from[i] */
    void (*add)(float *to, ms_dtype dtype, const void *from, int64_t n);
} ms_embedding_kernels;

MS_ISA_TABLE(ms_embedding_kernels, ms_embedding_kernels)

#endif
