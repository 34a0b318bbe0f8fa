/* staged.h: collectives of data outside of heaps. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_STAGED_H
#define MOONSHARD_COMM_TRANSPORT_SHM_STAGED_H

#include "comm/transport/shm/state.h"

/* How all ranks of the group cut this collective into steps; they have entered it. */
ms_staging ms_staged_plan(const ms_local *local, const ms_comm_args *args);
/* Pages for this rank's staging area of the channel; 0 or -errno. */
int ms_staged_populate(const ms_local *local, ms_channel *channel, uint32_t area);
void ms_staged_put_counts(const ms_local *local, const ms_comm_args *args, uint32_t area);
/* Whether a member's counts are what this rank expects; false: they differ, and the job has ended.
 * The same of all, once all have put theirs. */
bool ms_local_check_counts(const ms_local *local, const ms_comm_args *args, uint32_t member,
                           const int64_t *theirs);
bool ms_staged_check_counts(const ms_local *local, const ms_comm_args *args, uint32_t area);
/* This rank's part of a step into one half of its area; what the members have laid down there. */
void ms_staged_lay_down(const ms_local *local, const ms_comm_args *args, const ms_staging *pass,
                        uint64_t step, uint64_t half);
void ms_staged_pick_up(ms_run *run, const ms_local *local, const ms_comm_args *args,
                       const ms_staging *pass, uint64_t step, uint64_t half);
/* *phases is set also on a failure; the job has ended then. */
ms_task_result ms_staged_run(ms_run *run, ms_local *local, const ms_comm_args *args,
                             uint64_t *phases);

#endif
