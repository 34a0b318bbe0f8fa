/* local_ranks.h: where the ranks of a host meet their keeper. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_LOCAL_RANKS_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_LOCAL_RANKS_H

#include "comm/control/cluster/state.h"

/* Admits this host's ranks, each to its place, until all have come. */
ms_status ms_keeper_admit(ms_keeper *keeper);
void ms_keeper_close_door(ms_keeper *keeper);

#endif
