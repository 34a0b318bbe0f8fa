/* rows.c: a tensor as rows: its dimensions joined into three, each with a single stride. */
#include "ops/rows.h"

#include "ops/values.h"

/* Joins dimensions first .. last-1 to one with a single stride, if walking them in order has one.
 * It goes from the innermost outwards: each further dimension must step exactly over all that is
 * inside of it. Without elements there is no walk, and any strides will do. A group of no
 * dimensions has the count 1, and its stride is never used. */
static bool join_dims(const ms_tensor *tensor, uint32_t first, uint32_t last, int64_t *count,
                      int64_t *stride)
{
    *count = 1;
    *stride = 1;
    for (uint32_t d = last; d-- > first;) {
        int64_t size = ms_tensor_shape(tensor)[d], step = ms_tensor_strides(tensor)[d];
        if (size == 1) continue;
        if (*count == 1) *stride = step;
        else if (*count != 0 && size != 0 && step != *stride * *count) return false;
        *count *= size;
    }
    return true;
}

/* Each of the three groups may have its own stride; only inside a group must strides follow from
 * each other. So a transposed matrix has rows, too. */
bool ms_rows_between(const ms_tensor *tensor, uint32_t first, uint32_t last, ms_rows *out)
{
    return join_dims(tensor, 0, first, &out->outer, &out->outer_stride)
           && join_dims(tensor, first, last, &out->n, &out->stride)
           && join_dims(tensor, last, ms_tensor_dims(tensor), &out->inner, &out->inner_stride);
}

bool ms_rows_of(const ms_tensor *tensor, uint32_t dim, ms_rows *out)
{
    return ms_rows_between(tensor, dim, dim + 1, out);
}

/* The copy is contiguous, and a contiguous tensor always has rows, so the second call cannot fail.
 * It is what reductions and selections call first: kernels then have three loops and no
 * dimensions. */
ms_status ms_rows_take(ms_engine *engine, ms_tensor *tensor, uint32_t first, uint32_t last,
                       ms_tensor **out, ms_rows *rows)
{
    if (ms_rows_between(tensor, first, last, rows)) {
        *out = ms_tensor_retain(tensor);
        return MS_OK;
    }
    ms_status status = ms_copy_new(engine, tensor, out);
    if (!status) ms_rows_between(*out, first, last, rows);
    return status;
}
