/* watchdog.h: the thread that looks after calls that were launched, and that closes or aborts the
 * communicators at the end. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_WATCHDOG_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_WATCHDOG_H

#include "comm/transport/nccl/state.h"

/* Around a call: from now on the watchdog counts its time. */
void ms_nccl_watch(ms_nccl *nccl, ms_communicator *communicator, const ms_comm_args *args);
void ms_nccl_watch_ended(ms_communicator *communicator);
/* The lock of `watched`. */
void ms_nccl_lock(ms_communicator *communicator);
void ms_nccl_unlock(ms_communicator *communicator);
/* Asks each communicator that no call uses now for an error; true: *out is the first one. */
bool ms_nccl_find_error(ms_nccl *nccl, ms_error *out);
ms_status ms_nccl_watchdog_start(ms_nccl *nccl);
/* Lets the watchdog close all communicators and end; false: it does not come back. */
bool ms_nccl_watchdog_close(ms_nccl *nccl);

#endif
