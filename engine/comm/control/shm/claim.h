/* claim.h: agreement before a call is launched. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_CLAIM_H
#define MOONSHARD_COMM_CONTROL_SHM_CLAIM_H

#include "comm/control/shm/state.h"

/* Slots of ms_control_shm: see ms_control. */
ms_status ms_shm_claim(ms_comm *comm, const ms_comm_args *args);
void ms_shm_retract(ms_comm *comm, const ms_comm_args *args);

#endif
