/* autocast.h: the dtype of products, and casts that are kept for the step. */
#ifndef MOONSHARD_OPS_AUTOCAST_H
#define MOONSHARD_OPS_AUTOCAST_H

#include "tensor/state.h"

/* Computes the contents of a cast's storage again if they were dropped together with the storage of
 * its weight: takes memory, and casts on the current stream. Nothing happens to any other storage.
 * The version of the cast grows unless the weight is as it was, so that backward notices a weight
 * that has been stepped in between. */
ms_status ms_storage_recast(ms_storage *storage);

/* The tensor in dtype: a cached cast if `keep` and there is a valid one (kept until the step ends
 * or the tensor changes). Caller releases. */
ms_status ms_tensor_cast_cached(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, bool keep,
                                ms_tensor **out);

/* Under autocast, for an f32 tensor whose task is yet to be enqueued: makes a second tensor of the
 * autocast dtype, of the same shape and order in memory, which that task writes too. A product that
 * uses the tensor next then needs no pass of its own for the cast. *out stays NULL where there is
 * nothing to cast. Caller releases, and once the task is enqueued ties it to the tensor with
 * ms_tensor_keep_cast (which takes NULL, too). The cast is dropped with the tensor's storage: see
 * ms_storage_recast. */
ms_status ms_tensor_new_cast(ms_engine *engine, const ms_tensor *tensor, ms_tensor **out);
void ms_tensor_keep_cast(ms_tensor *tensor, ms_tensor *cast);

#endif
