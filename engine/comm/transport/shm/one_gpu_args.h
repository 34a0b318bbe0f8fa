/* one_gpu_args.h: what the host tells the kernel of a call between threads on one GPU (one_gpu.h).
 * Also for C++. For comm/transport/shm/ and comm/cuda/ only. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_ONE_GPU_ARGS_H
#define MOONSHARD_COMM_TRANSPORT_SHM_ONE_GPU_ARGS_H

#include "moonshard/control.h"

/* What the kernel takes of one member of the group, and where it puts it. */
typedef struct ms_direct_part {
    const char *from;
    char *to;
    int64_t bytes;
    float factor; /* of premul_sum */
} ms_direct_part;

/* In pinned memory of the host, which writes it before the kernel runs. */
typedef struct ms_direct_parts {
    uint32_t count; /* 0: the kernel does nothing */
    ms_direct_part part[MS_LOCAL_RANKS_MAX];
} ms_direct_parts;

#endif
