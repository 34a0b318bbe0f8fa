/* one_gpu.h: calls between ranks that are threads of one process and use the same GPU: a kernel of
 * each rank reads and writes the tensors of all, between two functions of the host in which the
 * ranks wait for each other. For comm/transport/shm/ only.
 *
 * Invariants
 * - All ranks of a job go this way, or none: they say so when they join (ms_local_choose_way).
 * - The first function enters the call and then fills the table of this call, in pinned memory of
 *   the host. The kernel is launched only after that has succeeded, and has ended when the second
 *   function is called.
 * - An element of a tensor is written by one rank only, and by none that does not also read the
 *   same element of all tensors before: so nothing is saved first. In an all_reduce each rank has a
 *   slice of all tensors.
 * - The bits of results are the CPU's, subnormal numbers included. Only which NaN a result is may
 *   differ.
 * - No rank leaves before the kernels of all have ended. If the job ends before that, a rank that
 *   closes waits for the calls of all before its memory goes (ms_local_settle). */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_ONE_GPU_H
#define MOONSHARD_COMM_TRANSPORT_SHM_ONE_GPU_H

#include "comm/state.h"

#include "comm/transport/shm/one_gpu_args.h"

struct ms_local; /* state.h */

typedef struct ms_direct {
    struct ms_direct *next;
    ms_oob_call carry;      /* the device fills in the place */
    ms_direct_parts *parts; /* pinned */
    _Atomic bool under_way;
} ms_direct;

/* Whether tensors stay in the GPU's memory: the first rank decides. MS_ERROR_ARGUMENT: this one
 * says something else. */
ms_status ms_local_choose_way(ms_comm *comm, struct ms_local *local);
bool ms_local_is_direct(const ms_comm *comm);
/* NULL: there is no memory. */
ms_direct *ms_local_begin_direct(const ms_comm_args *args);
/* On any thread, once for each call that has begun: its functions have returned, or will not be
 * called, and its kernel is over. user: the call, which is then free again. */
void ms_local_end_direct(void *user);
/* How many parts the kernel of this rank has, and elements (of a reduction) or bytes (of a copy) of
 * the longest; no parts: there is no kernel. */
uint32_t ms_local_direct_parts(const ms_comm_args *args, uint64_t *longest);
/* Host functions around the kernel; user: the call. */
ms_status ms_local_enter_direct(void *user, char *message, size_t bytes);
ms_status ms_local_leave_direct(void *user, char *message, size_t bytes);
/* Call it after this rank's streams have ended. It waits until no kernel of another rank uses this
 * rank's memory. */
void ms_local_settle(const struct ms_local *local);
void ms_local_free_directs(ms_comm *comm);

#endif
