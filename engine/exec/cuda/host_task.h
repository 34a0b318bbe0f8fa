/* host_task.h: functions of the host that may wait, in the order of a stream, and what the same
 * task does after them. */
#ifndef MOONSHARD_EXEC_CUDA_HOST_TASK_H
#define MOONSHARD_EXEC_CUDA_HOST_TASK_H

#include "exec/cuda/state.h"

/* A host task is the part of one number that begins with a function of the host. The
 * first ms_cuda_host_task_call opens it. While it is open, what the task does goes into it and not
 * onto the stream; ms_cuda_host_task_go, which comes after ms_cuda_cover, hands it to the stream's
 * thread. Until the host task is over, only that thread launches work on the stream or records
 * events there.
 */
ms_cuda_result ms_cuda_host_task_call(ms_stream *stream, const ms_launch *launch,
                                      ms_host_function function, void *user);
bool ms_cuda_host_task_is_open(const ms_cuda_queue *queue);
/* As ms_cuda.launch, copy_in or copy_out, and event_record. The arguments are copied. */
void ms_cuda_host_task_launch(ms_cuda_queue *queue, const ms_cuda_kernel_call *call,
                              const void *arguments, size_t bytes);
void ms_cuda_host_task_copy(ms_cuda_queue *queue, void *to, const void *from, size_t bytes,
                            bool to_gpu);
void ms_cuda_host_task_record(ms_cuda_queue *queue, ms_cuda_event event);
/* Called at the end of the host task, whether or not its functions were called. */
void ms_cuda_host_task_finally(ms_cuda_queue *queue, void (*function)(void *user), void *user);
void ms_cuda_host_task_go(ms_stream *stream);
/* False: the host task is under way, and number seq is not before it. It waits for nothing. */
bool ms_cuda_host_task_is_over(ms_stream *stream, uint64_t seq);
/* Waits until it is over. */
void ms_cuda_join(ms_stream *stream);
void ms_cuda_host_tasks_close(ms_stream *stream, ms_cuda_queue *queue);

#endif
