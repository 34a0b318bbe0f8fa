/* call.h: each collective as calls of NCCL. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_CALL_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_CALL_H

#include "comm/transport/nccl/state.h"

extern const ms_task ms_nccl_tasks[MS_COLLECTIVES];
ms_communicator *ms_nccl_communicator_of(const ms_comm_args *args);
/* Around all that is done for a task: begin waits for the turn of its call. false: the job has
 * ended, and *error is its cause. */
bool ms_nccl_begin_call(const ms_comm_args *args, ms_error *error);
void ms_nccl_end_call(const ms_comm_args *args);
/* In between: makes NCCL's calls for the task, on a CUDA stream, and waits until NCCL has put them
 * there; then the GPU carries them out. NULL: a library for tests carries host memory, and they are
 * over. `number` is memory of the GPU in which a barrier adds; not used without a stream. false:
 * *error says why it has failed. */
bool ms_nccl_put(const ms_comm_args *args, void *stream, float *number, ms_error *error);
/* The cause of the job's end, as the error of this call. */
void ms_nccl_end_of(const ms_comm_args *args, ms_error *out);

#endif
