/* attention.h: attention and rotary embedding: arguments of the kernels.
 *
 * Tensors are [batch, heads, time, width] windows of any strides but 1 in the last dimension. What
 * is made here is in memory as [batch, time, heads, width], so that heads join again into [batch,
 * time, heads * width] without a copy. */
#ifndef MOONSHARD_OPS_ATTENTION_H
#define MOONSHARD_OPS_ATTENTION_H

#include "ops/backend.h"

/* A [batch, heads, time, width] tensor as kernels walk it: the first element, and elements from one
 * batch, head and moment to the next. data NULL: not given. */
typedef struct ms_heads {
    void *data;
    int64_t batch, head, time;
} ms_heads;

/* Query head h looks at key and value head h / (heads / groups). Causal: query i is at place offset
 * + i among the keys, and sees those up to this place. With positions it sees keys from offset + i
 * - positions[i] on; the kernels refuse positions outside of 0 .. i, or, if shifted, below 0. With
 * a window, only if causal, a query sees the last `window` places up to its own. Places below 0 and
 * from `keys` on have no key. There is at least one key. log_sum is what backward computes the
 * probabilities from. A query that sees no key has the result 0, log_sum -infinity, and no
 * gradient. */
typedef struct ms_attention_args {
    ms_heads q, k, v, out;
    ms_heads dout, dq, dk, dv; /* backward */
    /* [batch, heads, queries]: logarithm of the sum of exponentials of the scaled scores; or
     * NULL */
    float *log_sum;
    const float *dlog_sum;    /* backward: the gradient of log_sum; NULL: none */
    const int64_t *positions; /* [batch, queries]; NULL: not given. Only if causal. */
    int64_t batches, heads, groups, queries, keys, width;
    int64_t window; /* 0: none */
    int64_t offset; /* keys - queries unless shifted */
    double scale;
    uint8_t dtype; /* of all tensors */
    bool causal, shifted;
    bool fast; /* backward need not repeat its bits */
} ms_attention_args;

/* (x[j], x[j + width/2]) turned by the angle (first + t) * base^(-2j/width), its frequency scaled;
 * backward turns back. */
typedef struct ms_rotary_args {
    ms_heads x, y;
    int64_t batches, heads, times, width, first;
    double base;
    ms_rotary_scaling scaling;
    uint8_t dtype;
    bool back;
} ms_rotary_args;

#endif
