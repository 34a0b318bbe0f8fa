/* shape.c: arithmetic with shapes. */
#include "tensor/shape.h"

#include <string.h>

/* Shapes are aligned at the last dimension, missing sizes count as 1, and a size of 1 takes the
 * other's: NumPy's rule. A size of 0 broadcasts like any other: with 1 to 0, with itself to 0. The
 * result is built apart, since shape may be one of the operands. */
bool ms_shape_broadcast(uint32_t a_dims, const int64_t *a, uint32_t b_dims, const int64_t *b,
                        uint32_t *dims, int64_t *shape)
{
    uint32_t most = a_dims > b_dims ? a_dims : b_dims;
    int64_t result[MS_DIMS_MAX];
    for (uint32_t i = 0; i < most; i++) { /* from the last dimension */
        int64_t x = i < a_dims ? a[a_dims - 1 - i] : 1;
        int64_t y = i < b_dims ? b[b_dims - 1 - i] : 1;
        if (x != y && x != 1 && y != 1) return false;
        result[most - 1 - i] = x == 1 ? y : x;
    }
    *dims = most;
    if (most) memcpy(shape, result, most * sizeof *shape);
    return true;
}

/* A tensor without dimensions has no dimension that could be named. -1 is the last one. */
bool ms_shape_dim(uint32_t dims, int32_t dim, uint32_t *out)
{
    if (dim < -(int32_t)dims || dim >= (int32_t)dims) return false;
    *out = (uint32_t)(dim < 0 ? dim + (int32_t)dims : dim);
    return true;
}

/* 1 for no dimensions, 0 where a size is 0. It cannot overflow for the shape of a tensor that
 * exists (shape_bytes in tensor.c). */
int64_t ms_shape_count(uint32_t dims, const int64_t *shape)
{
    int64_t count = 1;
    for (uint32_t d = 0; d < dims; d++) count *= shape[d];
    return count;
}

/* Without dimensions the pointers may be NULL, which memcmp does not allow. */
bool ms_shape_equal(uint32_t a_dims, const int64_t *a, uint32_t b_dims, const int64_t *b)
{
    return a_dims == b_dims && (a_dims == 0 || memcmp(a, b, a_dims * sizeof *a) == 0);
}
