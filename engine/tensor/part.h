/* part.h: tensors that are this rank's part of a larger one: handles of sharded parameters.
 *
 * Such a tensor looks like any other, and an operator that takes it for the whole gives a wrong
 * result, if the shapes happen to fit. So the tensor says what it is a part of, and calls of
 * scripts refuse it unless what they compute of a part is a part of the same. What the engine
 * itself does (ms_op_apply: optimizers, reductions, backward) is not checked. */
#ifndef MOONSHARD_TENSOR_PART_H
#define MOONSHARD_TENSOR_PART_H

#include "moonshard/tensor.h"

/* Counted: tensors outlive the model that made it. */
typedef struct ms_part ms_part;

/* name: of the parameter; unit: where it is whole; shape: of the whole. All are copied. */
ms_status ms_part_new(ms_context *context, const char *name, const char *unit, uint32_t dims,
                      const int64_t *shape, ms_part **out);
ms_part *ms_part_retain(ms_part *part); /* NULL is allowed, as in release */
void ms_part_release(ms_part *part);

/* The tensor is such a part from now on; NULL: it is none. */
void ms_tensor_set_part(ms_tensor *tensor, ms_part *part);

/* What a message says of it. needs: what a call needs of the parameter. */
void ms_part_explain(const ms_part *part, const char *needs, char *text, size_t room);

#endif
