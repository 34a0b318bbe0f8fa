/* reduce.h: the reductions that lose nothing but rounding, for each kind of bucket, and noop. */
#ifndef MOONSHARD_HOOK_LINKS_REDUCE_H
#define MOONSHARD_HOOK_LINKS_REDUCE_H

#include "hook/links.h"

/* What the chain of a bucket of this kind returns: the plain reduction, in place. */
ms_status ms_link_reduce_by(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                            ms_tensor **out);
/* This rank's own numbers as the result. */
ms_status ms_link_stay_local(ms_bucket *bucket, ms_tensor **out);
/* Reduces the buffer in place over all ranks of the link's group: the all_reduce kind. */
ms_status ms_link_reduce_whole(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                               ms_tensor **out);
/* Reduces the buffer over the shard group. *part: this rank's shard, a view of the buffer. A mean
 * multiplies by factor. If the reduction has to report, `sent` is set as if nothing were rounded;
 * *exact is then the shard in f32 before it was rounded, or NULL where nothing was. */
ms_status ms_link_scatter(const ms_link *link, ms_bucket *bucket, ms_reduce_op op, double factor,
                          ms_tensor **part, ms_tensor **exact);

#endif
