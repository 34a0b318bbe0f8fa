/* throttle.h: the link that a job may simulate. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_THROTTLE_H
#define MOONSHARD_COMM_TRANSPORT_SHM_THROTTLE_H

#include "comm/transport/shm/state.h"

/* Waits as long as the link needs for these bytes; false: the job has ended. In a job over several
 * nodes the link is between them. */
bool ms_local_pace(ms_local *local, uint64_t bytes);

#endif
