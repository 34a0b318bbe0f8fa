/* deadlock.h: deadlock detection over hosts. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_DEADLOCK_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_DEADLOCK_H

#include "comm/control/cluster/state.h"

void ms_keeper_watch(ms_keeper *keeper);
void ms_keeper_asked(ms_keeper *keeper, const ms_look_body *question);
bool ms_keeper_answered(ms_keeper *keeper, uint32_t origin, const ms_seen_body *seen);

#endif
