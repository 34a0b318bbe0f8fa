/* capture.h: capturing graphs of the driver, and the work of one task that is captured once. */
#ifndef MOONSHARD_EXEC_CUDA_CAPTURE_H
#define MOONSHARD_EXEC_CUDA_CAPTURE_H

#include "exec/cuda/state.h"

/* What is captured goes to self->builder. *out: NULL without an error: the kernel has no node of
 * its own. */
ms_cuda_result ms_cuda_capture_begin(ms_cuda_device *self);
ms_cuda_result ms_cuda_capture_kernel(const ms_cuda_work *work, const ms_cuda_kernel_call *call,
                                      ms_cuda_node *out);
/* A kernel of a task whose work is kept. */
ms_cuda_result ms_cuda_captured_kernel(ms_cuda_work *work, const ms_cuda_kernel_call *call);

#endif
