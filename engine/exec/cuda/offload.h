/* offload.h: memory of the host that kernels use, for what is offloaded. */
#ifndef MOONSHARD_EXEC_CUDA_OFFLOAD_H
#define MOONSHARD_EXEC_CUDA_OFFLOAD_H

#include "exec/cuda/state.h"

/* Copies between the host and memory that tasks use, and zeros there, as the driver's calls: also
 * where the memory is offloaded, which takes a call for each piece. On the thread of the host. */
extern const ms_device_memory ms_cuda_outside;
/* How many of the bytes from this address on one call takes. */
size_t ms_cuda_span(const ms_cuda_device *self, const void *address, size_t bytes);
ms_cuda_result ms_cuda_copy_to(const ms_cuda_device *self, void *to, const void *host, size_t bytes,
                               ms_cuda_stream on);
ms_cuda_result ms_cuda_copy_from(const ms_cuda_device *self, void *host, const void *from,
                                 size_t bytes, ms_cuda_stream on);
ms_cuda_result ms_cuda_zero(const ms_cuda_device *self, void *to, size_t bytes, ms_cuda_stream on);

#endif
