/* host_staging.h: calls on a device that has no CPU tasks: the tensors are copied to pinned memory
 * of the host, a function of the host does there what the task does on the CPU, and what this rank
 * gets is copied back. For comm/transport/shm/ only. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_HOST_STAGING_H
#define MOONSHARD_COMM_TRANSPORT_SHM_HOST_STAGING_H

#include "comm/state.h"

typedef struct ms_detour {
    struct ms_detour *next;
    ms_host_carry carry; /* its arguments have the host's memory; the device fills in the place */
    uint64_t in_bytes, out_bytes; /* what is copied there, and back */
    _Atomic bool under_way;
} ms_detour;

/* stream: of the device; its calls use the same memory, one after the other. NULL: there is no
 * memory. */
ms_detour *ms_local_take_detour(const ms_comm_args *args, const void *stream);
/* On any thread: ms_local_detour has returned, or will not be called; user: the detour, which is
 * then free again. */
void ms_local_give_detour(void *user);
/* An ms_host_function; user: the detour. */
ms_status ms_local_detour(void *user, char *message, size_t bytes);
/* The streams have ended. */
void ms_local_free_detours(ms_comm *comm);

#endif
