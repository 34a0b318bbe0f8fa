/* host.h: the kernels that copy between host memory and tensor memory. */
#ifndef MOONSHARD_TENSOR_HOST_H
#define MOONSHARD_TENSOR_HOST_H

#include "tensor/backend.h"

#define MS_INLINE_WRITE 384 /* bytes that travel inside the task */

/* host_write: copies `bytes` from `staged`, or from `data` if that is NULL. The buffer `staged`
 * lives until the task is done. */
typedef struct ms_host_write_args {
    void *to;
    const void *staged;
    uint64_t bytes;
    unsigned char data[MS_INLINE_WRITE];
} ms_host_write_args;

/* host_read: copies `bytes` into host memory that lives until the task is done. */
typedef struct ms_host_read_args {
    const void *from;
    void *to;
    uint32_t bytes;
} ms_host_read_args;

#endif
