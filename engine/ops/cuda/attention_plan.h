/* attention_plan.h: the task of attention, by cuDNN where it can. */
#ifndef MOONSHARD_OPS_CUDA_ATTENTION_PLAN_H
#define MOONSHARD_OPS_CUDA_ATTENTION_PLAN_H

#include "exec/cuda/task.h"
#include "ops/attention.h"

/* Puts attention onto the stream as calls of cuDNN. False: this call is one for the kernels of
 * attention.cu, and nothing was done. True: it is on the stream, or the task has failed.
 *
 * cuDNN takes tensors of 16 bits: bf16 and f16. */
bool ms_cuda_attention_forward_by_cudnn(ms_cuda_work *work, const ms_attention_args *args);
bool ms_cuda_attention_backward_by_cudnn(ms_cuda_work *work, const ms_attention_args *args);

/* A part of a call takes no more memory than this, if it can be cut (1 GiB). For tests. */
ms_status ms_cuda_attention_set_part_bytes(ms_engine *engine, size_t bytes);

#endif
