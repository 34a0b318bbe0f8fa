/* p2p.h: how the two ranks of a send meet; the same for each way to move the bytes. For
 * comm/transport/ only. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_P2P_H
#define MOONSHARD_COMM_TRANSPORT_SHM_P2P_H

#include "comm/transport/shm/state.h"

#include "comm/control/shm/wait.h"

/* The sender's or the receiver's slot of this call. */
ms_ledger_entry *ms_pair_slot(const ms_shm_rank *self, const ms_comm_args *args, bool sender);
/* Writes this rank's slot, and wakes the other. */
const ms_ledger_entry *ms_pair_post(ms_local *local, const ms_comm_args *args);
/* Waits until the other has entered the same; false: the job has ended. helper: or NULL. */
bool ms_pair_await(ms_local *local, const ms_comm_args *args, ms_helper *helper);

/* The task of a call in two parts, where the receiver's kernel reads the sender's tensor between
 * them (one_gpu.h). *theirs: the other's slot. */
ms_task_result ms_pair_enter(ms_run *run, ms_local *local, const ms_comm_args *args,
                             const ms_ledger_entry **theirs);
ms_task_result ms_pair_leave(ms_run *run, ms_local *local, const ms_comm_args *args);

/* The task of a send or recv. */
ms_task_result ms_pair_run(ms_run *run, ms_local *local, const ms_comm_args *args);

#endif
