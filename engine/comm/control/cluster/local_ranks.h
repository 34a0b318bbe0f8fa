/* local_ranks.h: the local socket, at which the ranks of a node meet their agent. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_LOCAL_RANKS_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_LOCAL_RANKS_H

#include "comm/control/cluster/state.h"

/* Admits this node's ranks, each to its place, until all have come. */
ms_status ms_agent_admit(ms_agent *agent);
void ms_agent_close_local_socket(ms_agent *agent);

#endif
