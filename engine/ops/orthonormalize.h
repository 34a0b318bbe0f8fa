/* orthonormalize.h: arguments of the kernel that makes columns orthonormal. */
#ifndef MOONSHARD_OPS_ORTHONORMALIZE_H
#define MOONSHARD_OPS_ORTHONORMALIZE_H

#include "ops/backend.h"

/* [matrices, n, r] in place, contiguous, one float dtype, r <= n. A column of zeros stays zero,
 * also with an eps of 0. */
typedef struct ms_orthonormalize_args {
    void *x;
    int64_t matrices, n, r;
    float eps; /* added to each column's norm */
    uint8_t dtype;
} ms_orthonormalize_args;

#endif
