/* hybrid.h: reductions of hybrid buckets: over the shard group, then over the copies of a shard. */
#ifndef MOONSHARD_HOOK_LINKS_HYBRID_H
#define MOONSHARD_HOOK_LINKS_HYBRID_H

#include "hook/links.h"

/* All of a hybrid bucket's reduction, with link->options.between links between its halves. */
ms_status ms_hybrid_reduce(const ms_link *link, ms_bucket *bucket, ms_reduce_op op,
                           ms_tensor **out);

#endif
