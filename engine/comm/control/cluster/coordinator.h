/* coordinator.h: what the nodes of a job decide together, the first agent for all. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_COORDINATOR_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_COORDINATOR_H

#include "comm/control/cluster/state.h"

/* If this node has a cause of the job's end, the first agent hears of it before anything that is
 * told from now on: others would take a rank that has failed for one that has left. */
void ms_agent_propose(ms_agent *agent);
/* What has happened on this node that others must know or decide about. */
void ms_agent_look(ms_agent *agent);
/* Frames of another node; false: the frame makes no sense. */
bool ms_agent_agree(ms_agent *agent, uint32_t origin, const ms_frame_head *head, const void *body);

#endif
