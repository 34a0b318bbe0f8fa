/* partial.h: hybrid shards, in passes without synchronization between replicas. */
#ifndef MOONSHARD_FSDP_PARTIAL_H
#define MOONSHARD_FSDP_PARTIAL_H

#include "fsdp/state.h"

/* Whether the reduction that comes leaves replicas out. */
bool ms_flat_param_is_partial(const ms_flat_param *flat);
/* On the communication stream, which is current: the chain's result over the shard group; keeping
 * it; and adding what is kept to the gradients that are about to be reduced. */
ms_status ms_flat_param_run_partly(ms_flat_param *flat, ms_tensor **result);
ms_status ms_flat_param_carry(ms_flat_param *flat, ms_tensor *result);
ms_status ms_flat_param_add_carried(ms_flat_param *flat);

#endif
