/* coordinator.h: what the hosts of a job decide together, the first keeper for all. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_COORDINATOR_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_COORDINATOR_H

#include "comm/control/cluster/state.h"

/* If this host has a cause of the job's end, the first keeper hears of it before anything that is
 * told from now on: others would take a rank that has failed for one that has left. */
void ms_keeper_propose(ms_keeper *keeper);
/* What has happened on this host that others must know or decide about. */
void ms_keeper_look(ms_keeper *keeper);
/* Frames of another host; false: the frame makes no sense. */
bool ms_keeper_agree(ms_keeper *keeper, uint32_t origin, const ms_frame_head *head,
                     const void *body);

#endif
