/* attention.h: what the attention kernels of a GPU get. */
#ifndef MOONSHARD_OPS_CUDA_ATTENTION_H
#define MOONSHARD_OPS_CUDA_ATTENTION_H

#include "exec/cuda/fault.h"
#include "ops/attention.h"

/* A tile is 64 queries by 64 keys. Kernels hold the tiles of two operands and one of probabilities
 * in shared memory (ops/cuda/tile.h). */
enum { MS_CUDA_ATTENTION_TILE = 64, MS_CUDA_ATTENTION_SHARED = 3 * 64 * 68 * 4 };
/* The greatest width of the kernel for one query. */
enum { MS_CUDA_ONE_QUERY_WIDTH = 256 };

typedef struct ms_cuda_attention_call {
    ms_attention_args a;
    float *offset; /* backward: [batch, heads, queries], the dot products of dout and out */
    ms_cuda_fault *fault;
    int64_t tiles; /* of the queries or keys of a head */
    int64_t parts; /* of the columns of a result: each block makes one */
} ms_cuda_attention_call;

#endif
