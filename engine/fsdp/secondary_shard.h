/* secondary_shard.h: units that keep more than their shards after forward. */
#ifndef MOONSHARD_FSDP_SECONDARY_SHARD_H
#define MOONSHARD_FSDP_SECONDARY_SHARD_H

#include "fsdp/state.h"

ms_status ms_near_make(ms_flat *flat);
/* Whether a gather within the near group gives the values of the shards. */
bool ms_near_is_usable(const ms_flat *flat);
/* After a forward, while the whole is there: keeps parts of it, until they are dropped. */
ms_status ms_near_keep(ms_unit *unit);
ms_status ms_near_drop(ms_unit *unit);

#endif
