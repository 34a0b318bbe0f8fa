/* async_calls.h: calls that a transport has launched, and whose tasks do not wait in the order
 * ledger. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_ASYNC_CALLS_H
#define MOONSHARD_COMM_CONTROL_SHM_ASYNC_CALLS_H

#include "comm/control/shm/state.h"

/* Slots of ms_control_host: see ms_control. */
uint64_t ms_host_entered(ms_comm *comm, const ms_comm_args *args);
void ms_host_landed(ms_comm *comm, uint64_t place);
uint64_t ms_host_look(ms_comm *comm, const ms_comm_args *args, ms_awaited *awaited);

#endif
