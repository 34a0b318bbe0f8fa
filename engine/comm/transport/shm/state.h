/* state.h: the transport between the ranks of a host: memory of the heaps that all of them map, and
 * staging areas in them for data outside of heaps. For comm/transport/ only. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_STATE_H
#define MOONSHARD_COMM_TRANSPORT_SHM_STATE_H

#include "base/assert.h"
#include "comm/control/shm/state.h"
#include "comm/transport_table.h"
#include "moonshard/cpu_task.h"

/* ms_comm.transport_state. */
typedef struct ms_local {
    ms_host *host;
    ms_arena *arena;
    _Atomic uint64_t link_free; /* when the link has sent what was given to it */
    bool pair_populated;        /* tasks of sends: the staging area has pages */
    uint64_t flights[2];        /* tasks of sends and recvs: place in the flight record */
    /* On a device that has no CPU tasks: host_staging.h */
    struct ms_pinned *pinned;
    struct ms_detour *detours;
    /* Of ranks that are threads on one GPU: one_gpu.h */
    bool is_direct;
    struct ms_direct *directs;
} ms_local;

/* open.c: slots of ms_transport_local. */
ms_status ms_local_open(ms_comm *comm);
void ms_local_close(ms_comm *comm);
/* The same for a record that is a part of another transport's. */
ms_status ms_local_begin(ms_comm *comm, ms_local *local);
void ms_local_end(ms_local *local);

/* shm.c: the task of any call between ranks of one host, and memory of this rank's heap. */
ms_task_result ms_local_run(ms_run *run, void *arguments);
ms_status ms_local_storage(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out);

/* The part of `count` elements that one of `parts` reduces for all. Slices begin at whole cache
 * lines of the longest element. The last slices may be shorter, or empty. */
static inline uint64_t ms_slice(uint64_t count, uint32_t parts, uint32_t index, uint64_t *begin)
{
    uint64_t slice = ((count + parts - 1) / parts + 63) & ~(uint64_t)63;
    *begin = slice * index < count ? slice * index : count;
    return count - *begin < slice ? count - *begin : slice;
}

/* staged.c: in each step every contributor copies `width` elements of each slot to its staging
 * area, all wait, and every receiver reads its part. width: elements of a slot in one step;
 * longest: those of the longest slot of any rank, so that all ranks do equally many steps. */
typedef struct ms_staging {
    uint32_t area;
    uint64_t width, longest, item;
    bool by_counts; /* all_to_all: the ranks compare their counts first, in a phase of its own */
    bool by_slices; /* see reduce_by_slices */
} ms_staging;
/* How all ranks of the group cut this collective into steps; they have entered it. */
ms_staging ms_staged_plan(const ms_local *local, const ms_comm_args *args);
/* Pages for this rank's staging area of the channel; 0 or -errno. */
int ms_staged_populate(const ms_local *local, ms_channel *channel, uint32_t area);
void ms_staged_put_counts(const ms_local *local, const ms_comm_args *args, uint32_t area);
/* Whether a member's counts are what this rank expects; false: they differ, and the job has
 * ended. The same of all, once all have put theirs. */
bool ms_local_check_counts(const ms_local *local, const ms_comm_args *args, uint32_t member,
                           const int64_t *theirs);
bool ms_staged_check_counts(const ms_local *local, const ms_comm_args *args, uint32_t area);
/* This rank's part of a step into one half of its area; what the members have laid down there. */
void ms_staged_lay_down(const ms_local *local, const ms_comm_args *args, const ms_staging *pass,
                        uint64_t step, uint64_t half);
void ms_staged_pick_up(ms_run *run, const ms_local *local, const ms_comm_args *args,
                       const ms_staging *pass, uint64_t step, uint64_t half);
/* *phases is set also on a failure; the job has ended then. */
ms_task_result ms_staged_run(ms_run *run, ms_local *local, const ms_comm_args *args,
                             uint64_t *phases);

/* throttle.c: waits as long as the link needs for these bytes; false: the job has ended. In a job
 * over several hosts the link is between them. */
bool ms_local_pace(ms_local *local, uint64_t bytes);

/* p2p.c: the task of a send or recv. */
ms_task_result ms_pair_run(ms_run *run, ms_local *local, const ms_comm_args *args);

#endif
