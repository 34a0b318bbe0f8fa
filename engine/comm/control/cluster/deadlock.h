/* deadlock.h: deadlock detection over nodes. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_DEADLOCK_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_DEADLOCK_H

#include "comm/control/cluster/state.h"

void ms_agent_watch(ms_agent *agent);
void ms_agent_asked(ms_agent *agent, const ms_look_body *question);
bool ms_agent_answered(ms_agent *agent, uint32_t origin, const ms_seen_body *seen);

#endif
