/* mismatch.h: what a rank reports when calls do not fit together. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_MISMATCH_H
#define MOONSHARD_COMM_CONTROL_SHM_MISMATCH_H

#include "comm/control/shm/state.h"
#include "comm/control/shm/wait.h"

/* "2", or "2 on host NAME" in a job over several nodes; returns text. */
#define MS_RANK_NAME_BYTES (MS_NODE_NAME_BYTES + 24)
const char *ms_rank_name(const ms_shm_rank *self, uint32_t rank, char text[MS_RANK_NAME_BYTES]);

/* Ends the job because the call of that member differs from this rank's of the same number. One
 * error shows both sides: all who made this rank's call, and all who made the member's. */
void ms_ledger_disagree(ms_shm_rank *self, const ms_comm_args *args, uint32_t member,
                        ms_helper *helper);
/* The same for a send or recv; theirs: what the peer calls, or NULL where it cannot be shown. */
void ms_ledger_disagree_pair(ms_shm_rank *self, const ms_comm_args *args,
                             const ms_ledger_entry *theirs);
/* Ends the job, since the process of `other` has ended before its part of this collective began, or
 * in the middle of it. */
void ms_ledger_ended(ms_shm_rank *self, const ms_comm_args *args, uint32_t other, bool begun);
/* Ends the job, since `other`, a world rank, will never come to what args waits for: it has
 * finished, `calls` calls into this group or pair. */
void ms_ledger_gone(ms_shm_rank *self, const ms_comm_args *args, uint32_t other, uint64_t calls,
                    const ms_ledger_entry *last);
/* Whether `other` (the group's `member`) has called something that this rank has not, before what
 * this rank waits for; then the job ends. */
bool ms_ledger_check_order(ms_shm_rank *self, const ms_comm_args *args, uint32_t other,
                           uint32_t member);

#endif
