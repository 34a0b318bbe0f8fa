/* rows.h: a tensor as [outer, n, inner], the form in which kernels walk along one dimension. */
#ifndef MOONSHARD_OPS_ROWS_H
#define MOONSHARD_OPS_ROWS_H

#include "moonshard/tensor.h"

/* Sizes, and strides in elements. A reduction over n gives a contiguous [outer, inner]; cumsum a
 * contiguous [outer, n, inner]. Strides may be 0 (repeated) and in any order. */
typedef struct ms_rows {
    int64_t outer, n, inner, outer_stride, stride, inner_stride;
} ms_rows;

/* Dimensions first .. last-1 become n, those before it outer, those after it inner. False if the
 * strides do not allow it; a contiguous tensor always does. Positions count in row-major order. */
bool ms_rows_between(const ms_tensor *tensor, uint32_t first, uint32_t last, ms_rows *out);
/* The same with n along one dimension. */
bool ms_rows_of(const ms_tensor *tensor, uint32_t dim, ms_rows *out);
/* The rows of a tensor, and the tensor in which they are: itself (retained), or a contiguous copy
 * where its strides allow no rows. The caller releases it. */
ms_status ms_rows_take(ms_engine *engine, ms_tensor *tensor, uint32_t first, uint32_t last,
                       ms_tensor **out, ms_rows *rows);

#endif
