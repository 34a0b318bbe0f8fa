/* communicator.h: whose turn it is in a communicator, waiting for calls in progress, and what an
 * error of NCCL says. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_COMMUNICATOR_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_COMMUNICATOR_H

#include "comm/transport/nccl/state.h"

/* Whether the job has ended; *cause (may be NULL): why. From any thread. */
bool ms_nccl_job_ended(ms_nccl *nccl, ms_abort_record *cause);
/* Waits for a moment, a longer one when much time has passed since `since_ns`. */
void ms_nccl_nap(ms_nccl *nccl, uint64_t since_ns);
/* take: waits for the turn of a call; false: the job has ended. */
bool ms_nccl_take(ms_nccl *nccl, ms_communicator *communicator, const ms_comm_args *args);
bool ms_nccl_try_take(ms_communicator *communicator);
void ms_nccl_give(ms_communicator *communicator);
/* While a thread has the list, no group goes. false: the job has ended, or this rank leaves. */
bool ms_nccl_hold_list(ms_nccl *nccl);
void ms_nccl_let_list(ms_nccl *nccl);
/* With the turn: waits until what a call has returned is no longer MS_NCCL_IN_PROGRESS, or until
 * the job has ended. */
ms_nccl_result ms_nccl_settle(ms_nccl *nccl, const ms_communicator *communicator,
                              ms_nccl_result result);
/* With the turn: registers what was enrolled since this communicator's last call. */
ms_nccl_result ms_nccl_register(ms_nccl *nccl, const ms_nccl_group *group,
                                ms_communicator *communicator);
/* "ncclAllReduce fails on rank 1 in WHERE: why" as an error of this rank. */
void ms_nccl_explain(const ms_nccl *nccl, const char *function, ms_nccl_result result,
                     const char *where, ms_error *out);
/* The call as messages show it, and its fields of an error. */
void ms_nccl_name(const ms_comm_args *args, char *text, size_t bytes, ms_error *error);

#endif
