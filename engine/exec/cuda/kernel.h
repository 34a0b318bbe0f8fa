/* kernel.h: what the function of a task may call (task.h). */
#ifndef MOONSHARD_EXEC_CUDA_KERNEL_H
#define MOONSHARD_EXEC_CUDA_KERNEL_H

#include "exec/cuda/state.h"

void ms_cuda_forget_kernels(ms_cuda_device *self, ms_context *context);
void ms_cuda_release_piece(ms_engine *engine, ms_cuda_piece *piece);

#endif
