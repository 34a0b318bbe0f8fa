/* copy.h: arguments of the copying kernels, and copying for other operators. */
#ifndef MOONSHARD_TENSOR_COPY_H
#define MOONSHARD_TENSOR_COPY_H

#include "moonshard/tensor.h"
#include "tensor/loop.h"

/* Operand 0 of the loop is the target, 1 the source; both have elements of `size` bytes. */
typedef struct ms_copy_args {
    ms_loop loop;
    void *to;
    const void *from;
    uint8_t size;
} ms_copy_args;

typedef struct ms_fill_args {
    ms_loop loop;
    void *to;
    uint64_t bits;
    uint8_t size;
} ms_fill_args;

/* Casts and broadcasts `from` into `to`; they may overlap. */
ms_status ms_copy_into(ms_engine *engine, ms_tensor *from, ms_tensor *to);
/* Whether writing `out` position by position would change what other positions of `in` still have
 * to give: they share memory, and are not the same window. */
bool ms_tensor_overlaps(const ms_tensor *out, const ms_tensor *in);
/* The window of `whole` with `length` positions of dimension dim from start on; without that
 * dimension if `drop` (length 1). */
ms_status ms_tensor_slice(ms_tensor *whole, uint32_t dim, int64_t start, int64_t length, bool drop,
                          ms_tensor **out);

#endif
