/* state.h: the transport between the ranks of a node: memory of the heaps that all of them map, and
 * staging areas in them for data outside of heaps. For comm/transport/ and comm/traffic.c only. */
#ifndef MOONSHARD_COMM_TRANSPORT_SHM_STATE_H
#define MOONSHARD_COMM_TRANSPORT_SHM_STATE_H

#include "base/assert.h"

#include "comm/control/shm/state.h"
#include "comm/transport_table.h"
#include "moonshard/cpu_task.h"

/* ms_comm.transport_state. */
typedef struct ms_local {
    ms_shm_rank *self;
    ms_arena *arena;
    _Atomic uint64_t link_free; /* when the link has sent what was given to it */
    bool pair_populated;        /* tasks of sends: the staging area has pages */
    uint64_t flights[2];        /* tasks of sends and recvs: place in the flight record */
    /* On a device that has no CPU tasks: host_staging.h */
    struct ms_pinned *pinned;
    struct ms_host_staging *stagings;
    /* Of ranks that are threads on one GPU: one_gpu.h */
    bool is_direct;
    struct ms_direct *directs;
} ms_local;

/* The part of `count` elements that one of `parts` reduces for all. Slices begin at whole cache
 * lines of the longest element. The last slices may be shorter, or empty. */
static inline uint64_t ms_slice(uint64_t count, uint32_t parts, uint32_t index, uint64_t *begin)
{
    uint64_t slice = ((count + parts - 1) / parts + 63) & ~(uint64_t)63;
    *begin = slice * index < count ? slice * index : count;
    return count - *begin < slice ? count - *begin : slice;
}

/* In each step every contributor copies `width` elements of each slot to its staging area, all
 * wait, and every receiver reads its part. width: elements of a slot in one step; longest: those of
 * the longest slot of any rank, so that all ranks do equally many steps. */
typedef struct ms_staging {
    uint32_t area;
    uint64_t width, longest, item;
    bool by_counts; /* all_to_all: the ranks compare their counts first, in a phase of its own */
    bool by_slices; /* see reduce_by_slices */
} ms_staging;

#endif
