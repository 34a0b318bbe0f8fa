/* secondary_shard.h: units that keep more than their shards after forward. */
#ifndef MOONSHARD_FSDP_SECONDARY_SHARD_H
#define MOONSHARD_FSDP_SECONDARY_SHARD_H

#include "fsdp/state.h"

ms_status ms_secondary_shard_make(ms_flat_param *flat);
/* Whether a gather within the near group gives the values of the shards. */
bool ms_secondary_shard_is_usable(const ms_flat_param *flat);
/* After a forward, while the whole is there: keeps parts of it, until they are dropped. */
ms_status ms_secondary_shard_keep(ms_unit *unit);
ms_status ms_secondary_shard_drop(ms_unit *unit);

#endif
