/* comm_reduce.h: what the kernels of collectives get on a GPU. */
#ifndef MOONSHARD_COMM_CUDA_COMM_REDUCE_H
#define MOONSHARD_COMM_CUDA_COMM_REDUCE_H

#include "comm/transport/shm/one_gpu_args.h"
#include "moonshard/comm.h"

/* The reduction of `ranks` tensors that all are `in`, as comm/cpu/isa/reduce.c reduces them. in and
 * out: of dtype `memory`, and may be the same. dtype: what numbers are rounded to on their way. */
typedef struct ms_cuda_alike {
    const void *in;
    void *out;
    int64_t length;
    uint32_t ranks;
    float factor; /* of premul_sum */
    uint8_t dtype, memory, op;
} ms_cuda_alike;

/* `bytes` bytes are copied. They do not overlap. */
typedef struct ms_cuda_piece {
    const char *from;
    char *to;
    int64_t bytes;
} ms_cuda_piece;

/* A copy of each part; or the reduction of all parts, in their order and as comm/cpu/isa/reduce.c
 * reduces them, to the first `outputs` of them. ranks: of the group. */
typedef struct ms_cuda_direct {
    const ms_direct_parts *table;
    int64_t length; /* elements */
    uint32_t outputs, ranks;
    uint8_t dtype, memory, op; /* as in ms_cuda_alike */
} ms_cuda_direct;

/* What the host is told: *word becomes 1. It is in the host's memory. */
typedef struct ms_cuda_word {
    volatile uint32_t *word;
} ms_cuda_word;

#endif
