/* copy.h: what the copying kernels of a GPU get. */
#ifndef MOONSHARD_OPS_CUDA_COPY_H
#define MOONSHARD_OPS_CUDA_COPY_H

#include "ops/copy_args.h"

typedef struct ms_cuda_copy_call {
    ms_copy_args c;
    int64_t count;
} ms_cuda_copy_call;

/* `tail` bytes follow `chunks` pieces of 16 bytes; the addresses are aligned to 16. */
typedef struct ms_cuda_flat_copy_call {
    void *to;
    const void *from;
    int64_t chunks, tail;
} ms_cuda_flat_copy_call;

typedef struct ms_cuda_fill_call {
    ms_fill_args f;
    int64_t count;
} ms_cuda_fill_call;

/* The bit pattern of 8 bytes, again and again. */
typedef struct ms_cuda_flat_fill_call {
    void *to;
    uint64_t bits;
    int64_t chunks, tail;
} ms_cuda_flat_fill_call;

#endif
