/* comm_reduce.h: what the kernels get that do a collective of one rank on a GPU. */
#ifndef MOONSHARD_COMM_CUDA_COMM_REDUCE_H
#define MOONSHARD_COMM_CUDA_COMM_REDUCE_H

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

/* What the host is told: *word becomes 1. It is in the host's memory. */
typedef struct ms_cuda_word {
    volatile uint32_t *word;
} ms_cuda_word;

#endif
