/* layout.h: which parameters share a bucket. */
#ifndef MOONSHARD_DDP_LAYOUT_H
#define MOONSHARD_DDP_LAYOUT_H

#include "ddp/state.h"

/* One bucket for each dtype, as the order of gradients is not known yet. With find_unused, buckets
 * by the size limits: many parameters are then complete at once, at the beginning of backward. */
ms_status ms_reducer_first_buckets(ms_reducer *reducer);
/* Rebuilds the buckets by the order of the last synchronized backward. */
ms_status ms_reducer_rebuild_now(ms_reducer *reducer);

#endif
