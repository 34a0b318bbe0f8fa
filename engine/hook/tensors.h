/* tensors.h: operators on tensors as links use them. */
#ifndef MOONSHARD_HOOK_TENSORS_H
#define MOONSHARD_HOOK_TENSORS_H

#include "hook/links.h"

/* A new tensor from an operator with a number, on one tensor or two (b NULL: one). */
ms_status ms_link_apply(const ms_op *op, double value, ms_tensor *a, ms_tensor *b, ms_tensor **out);
/* The same, written into a. */
ms_status ms_link_change(const ms_op *op, double value, ms_tensor *a, ms_tensor *b);
/* t in that dtype; t itself, retained, if it has it. */
ms_status ms_link_cast(ms_tensor *t, ms_dtype dtype, ms_tensor **out);
/* A copy of t, 1-D, f32. */
ms_status ms_link_flat_copy(ms_tensor *t, ms_tensor **out);
/* count elements of a contiguous tensor from `first` on, as a 1-D view. */
ms_status ms_link_span(ms_tensor *t, int64_t first, int64_t count, ms_tensor **out);
/* Replaces infinities and NaN in a link's state by 0: one bad step would spoil all later ones. */
ms_status ms_link_keep_finite(ms_tensor *memory);

#endif
