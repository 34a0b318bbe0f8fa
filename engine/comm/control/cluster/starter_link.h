/* starter_link.h: the first keeper's connection to the process that has started the job. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_STARTER_LINK_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_STARTER_LINK_H

#include "comm/control/cluster/state.h"

/* Connects the first keeper to the process that has started the job; without one it does nothing.
 */
ms_status ms_keeper_call_starter(ms_keeper *keeper);
/* An error once that process is lost. */
ms_status ms_keeper_check_starter(const ms_keeper *keeper);
void ms_keeper_close_starter(ms_keeper *keeper);

#endif
