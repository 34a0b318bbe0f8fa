/* embedding.h: rows of a table by their numbers: arguments of the kernels. */
#ifndef MOONSHARD_OPS_EMBEDDING_H
#define MOONSHARD_OPS_EMBEDDING_H

#include "ops/backend.h"

/* ids [count]; table [rows, width] and values [count, width], contiguous, one float dtype. Forward:
 * values from table; backward: table is the gradient of the table, values that of the result. An id
 * outside of 0 .. rows-1 fails the task. The message names the lowest such position. Backward
 * writes every row of the table, also those that no id names, unless it accumulates. */
typedef struct ms_embedding_args {
    const void *ids;
    void *table, *values;
    int64_t count, rows, width;
    uint8_t ids_dtype, dtype;
    bool accumulate; /* backward: the table holds a gradient already (f32 only) */
} ms_embedding_args;

#endif
