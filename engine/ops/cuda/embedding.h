/* embedding.h: what the kernels of embedding.cu get on a GPU.
 *
 * Backward sorts the positions by their ids, so that the gradients of one id are added in order of
 * position: a radix sort, which keeps the order of what is equal, by 4 bits a pass. */
#ifndef MOONSHARD_OPS_CUDA_EMBEDDING_H
#define MOONSHARD_OPS_CUDA_EMBEDDING_H

#include "exec/cuda/fault.h"
#include "ops/cuda/rows.h"
#include "ops/embedding.h"

/* A tile is what one block of a pass sorts: 256 threads with 8 positions each. An id that occurs
 * more often than MS_CUDA_OFTEN times gets blocks of its own, each with 16 warps that share the
 * positions. */
enum { MS_CUDA_SORT_TILE = 2048, MS_CUDA_OFTEN = 32, MS_CUDA_OFTEN_WARPS = 16 };

/* Rows are copied in pieces of this many bytes: 16, or an element. */
typedef struct ms_cuda_embedding_call {
    ms_embedding_args e;
    ms_cuda_fault *fault;
    int64_t pieces; /* of a row */
    uint32_t piece;
} ms_cuda_embedding_call;

/* One pass sorts from one pair of arrays to the other, by digit (key >> shift) % 16. */
typedef struct ms_cuda_sort_call {
    const void *ids;
    const uint32_t *keys, *positions; /* [count] */
    uint32_t *sorted_keys, *sorted_positions;
    uint32_t *digits; /* [16][tiles]: how many of a digit a tile has; then, where they go */
    int64_t count, tiles, rows;
    uint32_t shift;
    uint8_t ids_dtype;
} ms_cuda_sort_call;

/* positions: by id, and those of row r are begin[r] .. end[r] - 1; both are 0 where there is none.
 * often_rows: the *often ids that occur often, in no certain order. */
typedef struct ms_cuda_embedding_sum_call {
    ms_embedding_args e;
    const uint32_t *keys, *positions;
    uint32_t *begin, *end, *often, *often_rows;
    bool aligned;
} ms_cuda_embedding_sum_call;

#endif
