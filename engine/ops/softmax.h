/* softmax.h: softmax, log-softmax, cross entropy and squared error: arguments of the kernels. */
#ifndef MOONSHARD_OPS_SOFTMAX_H
#define MOONSHARD_OPS_SOFTMAX_H

#include "ops/backend.h"

/* Over the middle one of [outer, n, inner], contiguous. Forward: y from x. Backward: dx from y and
 * the gradient. y_dtype, of y and its gradient, is `dtype`, that of x and dx, or f32. `inner` above
 * 1 is a softmax over another dimension than the last. */
typedef struct ms_softmax_args {
    const void *x, *gradient; /* backward: x is the result of forward */
    void *y;                  /* backward: dx */
    int64_t outer, n, inner;
    uint8_t dtype, y_dtype;
    bool logarithm;
} ms_softmax_args;

/* Logits [rows, classes], contiguous; a row whose target is ignore_index gives no loss and no
 * gradient. Forward fails for a target that is neither a class nor ignore_index, with the lowest
 * such row in the message. log_sum and share are NULL where no backward will follow. */
typedef struct ms_cross_entropy_args {
    const void *logits, *target;
    const float *gradient; /* backward: of the loss, one number or [rows] */
    /* [rows]: logarithm of the sum of exponentials; forward writes it, backward reads it */
    float *log_sum;
    float *loss;   /* forward: one number or [rows] */
    float *losses; /* [rows]: what cross_entropy_total adds up */
    float *share;  /* [1]: what a row's loss counts in the result: 1, or 1 / rows that count */
    void *dlogits; /* backward; may be the logits themselves */
    int64_t rows, classes, ignore_index;
    uint8_t dtype, target_dtype, reduction;
} ms_cross_entropy_args;

/* Three kernels that take the same struct make loss and gradient of rows whose logits are read once
 * (linear_cross_entropy.c).
 *
 * cross_entropy_share gets the targets of all rows. It fails as cross_entropy does. It writes
 * share[0], by which a row's slope is multiplied, and share[1], by which a gradient made of such
 * slopes is multiplied in the end. Their product is what a row's loss counts in the result. In f16
 * share[1] is a power of two, and 1 otherwise.
 *
 * cross_entropy_in_place gets some rows. `loss` becomes the loss of each, 0 where it is ignored.
 * dlogits is NULL, or the logits, which become share[0] (softmax - one at the target). A target
 * that is no class counts as ignored.
 *
 * cross_entropy_total adds up `losses`, of all rows. */

/* Mean of (a - b)^2. Backward: da = 2 (a - b) gradient / count, db = -da; NULL where not wanted.
 * The loss of no elements is NaN. a, b and their gradients have one dtype, the loss and its
 * gradient another one. */
typedef struct ms_mse_args {
    const void *a, *b, *gradient;
    void *loss, *da, *db;
    int64_t count;
    uint8_t dtype, loss_dtype;
} ms_mse_args;

#endif
