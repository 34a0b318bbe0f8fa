/* ledger.h: the order ledger, as tasks run through it. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_LEDGER_H
#define MOONSHARD_COMM_CONTROL_SHM_LEDGER_H

#include "comm/control/shm/state.h"
#include "comm/control/shm/wait.h"

/* helper: where the members that are waited for are not all of the group; NULL otherwise. */
/* Enters, and waits until all members have entered the same; false: the job has ended. */
bool ms_ledger_enter(ms_shm_rank *self, const ms_comm_args *args);
/* The two parts of ms_ledger_enter. */
const ms_ledger_entry *ms_ledger_post(ms_shm_rank *self, const ms_comm_args *args);
bool ms_ledger_await(ms_shm_rank *self, const ms_comm_args *args, ms_helper *helper);
/* Waits until all members are `phases` phases on from where the collective began. */
bool ms_ledger_phase(ms_shm_rank *self, const ms_comm_args *args, uint64_t phases,
                     ms_helper *helper);
/* As ms_ledger_phase, then the collective is over for this channel. */
bool ms_ledger_leave(ms_shm_rank *self, const ms_comm_args *args, uint64_t phases,
                     ms_helper *helper);
/* Wakes those that sleep; the others see a change while they spin. */
void ms_ledger_wake(ms_shm_rank *self, const ms_group *group);

#endif
