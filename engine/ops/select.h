/* select.h: arguments of the selecting kernels, and scattering for other operators. */
#ifndef MOONSHARD_OPS_SELECT_H
#define MOONSHARD_OPS_SELECT_H

#include "ops/reduce_args.h"

/* gather: small[o, k, i] = whole[o, index[o, k, i], i]; scatter and scatter_add: the other way
 * round. Strides in elements. Where indices repeat, scatter keeps the last value and scatter_add
 * adds in order. An index outside fails the task, with `name` before the message. */
typedef struct ms_select_args {
    ms_rows rows; /* of the whole; rows.n is the limit of indices */
    int64_t k, small_strides[3], index_strides[3];
    void *whole, *small;
    const void *index;
    const char *name; /* static: the operator, for messages */
    uint8_t dtype, index_dtype;
} ms_select_args;

/* Per row the k greatest (or least) in order; results contiguous [outer, k, inner]. Equal keys come
 * in ascending order of position; NaN counts as the greatest number. */
typedef struct ms_topk_args {
    ms_rows rows;
    int64_t k;
    const void *in;
    void *values;
    int64_t *indices;
    uint8_t dtype;
    bool largest;
} ms_topk_args;

/* The elements with |x| above the threshold, in order of position, at most `capacity`; found: how
 * many were kept. in has one stride, the results are contiguous. */
typedef struct ms_above_args {
    const void *in, *threshold;
    void *values;
    int64_t *indices, *found;
    int64_t count, stride, capacity;
    uint8_t dtype, threshold_dtype;
} ms_above_args;

/* The quantile q of `count` elements with one stride, interpolated. `out` has the dtype of `in`;
 * NaN anywhere makes it NaN. */
typedef struct ms_quantile_args {
    const void *in;
    void *out;
    int64_t count, stride;
    double q;
    uint8_t dtype;
} ms_quantile_args;

/* Writes (or adds, in order of position) values at index along dim of target, whose strides must
 * allow rows (contiguous does). index and values have target's shape but for dim. 16-bit floats
 * cannot be added to. name is static. */
ms_status ms_scatter_into(ms_engine *engine, const char *name, ms_tensor *target, uint32_t dim,
                          ms_tensor *index, ms_tensor *values, bool add);

#endif
