/* tensor.h: tensors as windows on storages, and what a tensor keeps of itself: its cast, and its
 * greatest size. */
#ifndef MOONSHARD_TENSOR_TENSOR_H
#define MOONSHARD_TENSOR_TENSOR_H

#include "tensor/state.h"

/* Moves the tensor onto `base`: it becomes the part of base (contiguous, of its dtype, with room)
 * that begins at `offset`, in its own shape. No values are copied, and views that were made of it
 * keep the old memory. Cannot fail, so that many parameters can be moved together. */
void ms_tensor_rebase(ms_tensor *tensor, ms_tensor *base, int64_t offset);

/* The same, and the tensor gets another shape, and the dtype of `base`: for a parameter of which a
 * rank keeps a part. Graphs and views that were made of it keep their shape, dtype and memory. */
void ms_tensor_reshape_onto(ms_tensor *tensor, ms_tensor *base, int64_t offset, uint32_t dims,
                            const int64_t *shape);

/* Makes `cast` the tensor's cast without saying how its values were computed: for a window of a
 * cast. Lets an earlier cast go. */
void ms_tensor_hold_cast(ms_tensor *tensor, ms_tensor *cast);

/* The greatest size of a tensor, which the task that has written or read all of it has found:
 * `most` has u32s (as i32), whose greatest is the greatest of the bits of |x| as f32, those of a
 * NaN too. The tensor keeps it (retained) until it goes, or its memory is written; so does a view
 * of all its elements in the same order, but not what is saved for backward. */
void ms_tensor_hold_most(ms_tensor *tensor, ms_tensor *most);
/* Borrowed. NULL: there is none of what the memory holds now. */
ms_tensor *ms_tensor_most(ms_tensor *tensor);
/* Lets it go, if there is one. */
void ms_tensor_drop_most(ms_tensor *tensor);

/* The layer's state of an engine, made at first use. */
ms_status ms_tensor_state_of(ms_engine *engine, ms_tensor_state **out);
/* Takes the tensor off the list of those that hold a cast, and releases the cast. */
void ms_tensor_drop_cast(ms_tensor *tensor);

#endif
