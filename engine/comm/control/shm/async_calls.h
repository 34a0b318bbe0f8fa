/* async_calls.h: calls that a transport has launched, and whose tasks do not wait in the order
 * ledger. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_ASYNC_CALLS_H
#define MOONSHARD_COMM_CONTROL_SHM_ASYNC_CALLS_H

#include "comm/control/shm/state.h"

/* Slots of ms_control_shm: see ms_control. */
uint64_t ms_shm_entered(ms_comm *comm, const ms_comm_args *args);
void ms_shm_landed(ms_comm *comm, uint64_t place);
uint64_t ms_shm_look(ms_comm *comm, const ms_comm_args *args, ms_awaited *awaited);

#endif
