/* pinned.h: pinned memory of the host, and reads by way of it. */
#ifndef MOONSHARD_EXEC_CUDA_PINNED_H
#define MOONSHARD_EXEC_CUDA_PINNED_H

#include "exec/cuda/state.h"

void *ms_cuda_host_allocate(ms_engine *engine, size_t bytes);
void ms_cuda_host_release(ms_engine *engine, void *memory);
/* The driver gets what is free. */
void ms_cuda_give_pinned_back(ms_cuda_device *self);
ms_status ms_cuda_read(ms_engine *engine, void *host, const void *from, size_t bytes);

#endif
