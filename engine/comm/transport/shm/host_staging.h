/* host_staging.h: calls on a device that has no CPU tasks: the tensors are copied to pinned memory
 * of the host, a function of the host does there what the task does on the CPU, and what this rank
 * gets is copied back. So the bits of results are the CPU's. Ranks whose GPUs NCCL does not connect
 * use it: ranks that share a GPU, and ranks that have slices of GPUs (MIG), which do not reach each
 * other's memory. For comm/transport/shm/ only. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_HOST_STAGING_H
#define MOONSHARD_COMM_TRANSPORT_SHM_HOST_STAGING_H

#include "comm/state.h"

typedef struct ms_host_staging {
    struct ms_host_staging *next;
    ms_oob_call carry; /* its arguments have the host's memory; the device fills in the place */
    uint64_t in_bytes, out_bytes; /* what is copied there, and back */
    _Atomic bool under_way;
} ms_host_staging;

/* stream: of the device; its calls use the same memory, one after the other. NULL: there is no
 * memory. */
ms_host_staging *ms_local_take_host_staging(const ms_comm_args *args, const void *stream);
/* On any thread: ms_local_run_host_staging has returned, or will not be called; user: the staging,
 * which is then free again. */
void ms_local_give_host_staging(void *user);
/* An ms_host_function; user: the staging. */
ms_status ms_local_run_host_staging(void *user, char *message, size_t bytes);
/* The streams have ended. */
void ms_local_free_host_stagings(ms_comm *comm);

#endif
