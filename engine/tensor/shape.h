/* shape.h: arithmetic with shapes: lists of sizes, the outermost dimension first. */
#ifndef MOONSHARD_TENSOR_SHAPE_H
#define MOONSHARD_TENSOR_SHAPE_H

#include "moonshard/tensor.h"

/* The shape to which a and b broadcast: counted from the last dimension, sizes are equal or one of
 * them is 1. False if there is none; shape may be a or b. */
bool ms_shape_broadcast(uint32_t a_dims, const int64_t *a, uint32_t b_dims, const int64_t *b,
                        uint32_t *dims, int64_t *shape);
/* dim, which may be negative (from the end), in 0 .. dims-1; false if it is outside. */
bool ms_shape_dim(uint32_t dims, int32_t dim, uint32_t *out);
/* How many elements a tensor of this shape has. */
int64_t ms_shape_count(uint32_t dims, const int64_t *shape);
bool ms_shape_equal(uint32_t a_dims, const int64_t *a, uint32_t b_dims, const int64_t *b);

/* A dimension as messages name it: counted from 1, as scripts do, or from the end. */
static inline int ms_dim_named(int64_t dim) { return (int)(dim < 0 ? dim : dim + 1); }

#endif
