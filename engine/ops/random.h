/* random.h: arguments of the kernels that draw numbers. Element i of a draw is lane i % 4 of the
 * Philox block i / 4, whatever the tiles. */
#ifndef MOONSHARD_OPS_RANDOM_H
#define MOONSHARD_OPS_RANDOM_H

#include "moonshard/tensor.h"

/* The distribution of a draw. A uniform number takes one word of its Philox block, two normal ones
 * take two, and an integer takes 64 bits, so the same counter gives unrelated numbers in each. */
typedef enum ms_random_kind {
    MS_RANDOM_UNIFORM,
    MS_RANDOM_NORMAL,
    MS_RANDOM_INTEGER
} ms_random_kind;

/* What fills a contiguous tensor. uniform: a + (b - a) u, kept within least .. greatest, which the
 * dtype holds; normal: a + b z; integer: first .. first + range - 1. range is unsigned, as that of
 * all i64 does not fit into i64. Only contiguous tensors are drawn: the host copies afterwards
 * where strides differ. */
typedef struct ms_random_args {
    ms_random random;
    void *out;
    int64_t count, first;
    uint64_t range;
    float a, b, least, greatest;
    uint8_t kind, dtype;
} ms_random_args;

/* An element is kept, times scale, if the upper 24 bits of its draw are at least `threshold`. A
 * threshold of 2^24 drops every element. `out` may be `in`. */
typedef struct ms_dropout_args {
    ms_random random;
    void *out;
    const void *in;
    int64_t count;
    uint32_t threshold;
    float scale;
    uint8_t dtype;
} ms_dropout_args;

#endif
