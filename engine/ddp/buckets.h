/* buckets.h: makes buckets and their memory, and moves gradients into them. */
#ifndef MOONSHARD_DDP_BUCKETS_H
#define MOONSHARD_DDP_BUCKETS_H

#include "ddp/state.h"

/* Copies a gradient that a script has put elsewhere to its view in the bucket. */
ms_status ms_gradient_to_bucket(ms_ddp_parameter *parameter);
/* Makes buckets of sizes[b] parameters each, taken from order, followed by those of delayed
 * parameters; moves the gradients that exist into them. */
ms_status ms_buckets_install(ms_reducer *reducer, const uint32_t *order, const uint32_t *sizes,
                             uint32_t buckets);
void ms_buckets_free(ms_reducer *reducer, ms_bucket_list *list);

#endif
