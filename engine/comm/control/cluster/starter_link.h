/* starter_link.h: the first agent's connection to the process that has started the job. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_STARTER_LINK_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_STARTER_LINK_H

#include "comm/control/cluster/state.h"

/* Connects the first agent to the process that has started the job; without one it does nothing.
 */
ms_status ms_agent_call_starter(ms_agent *agent);
/* An error once that process is lost. */
ms_status ms_agent_check_starter(const ms_agent *agent);
void ms_agent_close_starter(ms_agent *agent);

#endif
