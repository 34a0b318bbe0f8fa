/* initial.h: the record of how a tensor gets its initial values. For initial.c, which keeps
 * it, and initialize.c, which uses it. */
#ifndef MOONSHARD_TENSOR_INITIAL_H
#define MOONSHARD_TENSOR_INITIAL_H

#include "moonshard/tensor.h"

/* With more steps the values count as unknown. */
#define MS_INITIALIZER_STEPS 8

typedef struct ms_initializer_step {
    const ms_op *op; /* NULL: a cast to dtype */
    ms_dtype dtype;  /* of the result */
    ms_attributes attributes;
} ms_initializer_step;

struct ms_initializer {
    ms_context *context;
    uint64_t version;      /* of the storage after the last step */
    ms_dtype first, dtype; /* before the casts among the steps, and after them */
    uint32_t count;
    ms_initializer_step steps[MS_INITIALIZER_STEPS];
};

#endif
