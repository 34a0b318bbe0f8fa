/* loop.h: a nest of strided loops over up to four operands, as few and as long as their strides
 * allow. */
#ifndef MOONSHARD_OPS_LOOP_H
#define MOONSHARD_OPS_LOOP_H

#include "moonshard/tensor.h"

#define MS_LOOP_OPERANDS 4

/* Plain data, part of task arguments. Strides are in elements of each operand; operand 0 is the one
 * that is written. There is at least one dimension, so kernels need no case for numbers. */
typedef struct ms_loop {
    uint32_t dims;
    int64_t shape[MS_DIMS_MAX];
    int64_t strides[MS_LOOP_OPERANDS][MS_DIMS_MAX];
} ms_loop;

/* Starts a nest over shape, with operand 0 strided as given; the other operands are broadcast
 * scalars until set. */
void ms_loop_begin(ms_loop *loop, uint32_t dims, const int64_t *shape, const int64_t *strides);
/* Operand `index` with its own, broadcastable shape: stride 0 where it repeats. */
void ms_loop_set(ms_loop *loop, uint32_t index, uint32_t dims, const int64_t *shape,
                 const int64_t *strides);
/* Drops dimensions of size 1, orders the others so that the written operand moves least in the
 * innermost, and joins neighbours that all operands walk as one. The set of positions stays the
 * same; their order does not matter to whoever calls this. */
void ms_loop_collapse(ms_loop *loop, uint32_t operands);

/* The number of positions. */
int64_t ms_loop_count(const ms_loop *loop);

#endif
