/* fault.h: what a kernel notes about bad values. Plain C, for kernels as well as for the host. */
#ifndef MOONSHARD_EXEC_CUDA_FAULT_H
#define MOONSHARD_EXEC_CUDA_FAULT_H

#include <stdint.h>

#define MS_CUDA_NO_FAULT INT64_MAX

/* In memory of the host that kernels can write. The fault with the lowest position is kept; what
 * `values` mean is the kernel's affair. */
typedef struct ms_cuda_fault {
    int64_t at; /* MS_CUDA_NO_FAULT: there is none */
    int64_t values[3];
    uint32_t lock; /* of kernels */
} ms_cuda_fault;

#endif
