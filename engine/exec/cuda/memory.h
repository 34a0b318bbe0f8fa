/* memory.h: memory of the GPU for the pool. */
#ifndef MOONSHARD_EXEC_CUDA_MEMORY_H
#define MOONSHARD_EXEC_CUDA_MEMORY_H

#include "exec/cuda/state.h"

extern const ms_device_memory ms_cuda_inside;
uint64_t ms_cuda_available(const ms_engine *engine, uint64_t *total);

#endif
