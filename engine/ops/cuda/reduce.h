/* reduce.h: what the reducing kernels of a GPU get. */
#ifndef MOONSHARD_OPS_CUDA_REDUCE_H
#define MOONSHARD_OPS_CUDA_REDUCE_H

#include "ops/reduce_args.h"

/* A unit is a part of a row, `part_rows` elements long. Units of rows are reduced by `width`
 * threads: a power of two up to 32, or a whole block. With several parts `partial` holds what the
 * units are, [part][result], in f64 or i64. */
typedef struct ms_cuda_reduce_call {
    ms_reduce_args r;
    void *partial; /* NULL: a unit is a result */
    int64_t results, parts, part_rows;
    int32_t width;
} ms_cuda_reduce_call;

typedef struct ms_cuda_reduce_arg_call {
    ms_reduce_arg_args r;
    int64_t results;
    int32_t width;
} ms_cuda_reduce_arg_call;

/* `sums` is [row][part], the sum of each part, in f64 or u64. With one part it is not there. */
typedef struct ms_cuda_cumsum_call {
    ms_cumsum_args c;
    void *sums;
    int64_t results, parts, part_rows;
} ms_cuda_cumsum_call;

typedef struct ms_cuda_histogram_call {
    ms_histogram_args h;
    bool shared; /* blocks count in bins of their own first */
} ms_cuda_histogram_call;

enum { MS_CUDA_REDUCE_THREADS = 256, MS_CUDA_CUMSUM_TILE = 8 * MS_CUDA_REDUCE_THREADS };

#endif
