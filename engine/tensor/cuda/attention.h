/* attention.h: what the attention kernels of a GPU get. */
#ifndef MOONSHARD_TENSOR_CUDA_ATTENTION_H
#define MOONSHARD_TENSOR_CUDA_ATTENTION_H

#include "exec/cuda/fault.h"
#include "tensor/attention.h"

/* A tile is 64 queries by 64 keys. Kernels hold the tiles of two operands and one of probabilities
 * in shared memory; a row there is 4 numbers longer, so that reads along and across rows meet
 * different banks. */
enum { MS_CUDA_TILE = 64, MS_CUDA_TILE_ROW = MS_CUDA_TILE + 4, MS_CUDA_TILES = 3 };
#define MS_CUDA_ATTENTION_SHARED (MS_CUDA_TILES * MS_CUDA_TILE * MS_CUDA_TILE_ROW * 4)
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
