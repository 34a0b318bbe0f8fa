/* shm.c: collectives between the ranks of a node: in place where the data are in heaps, which all
 * ranks map, otherwise through staging areas (staged.c). */
#include "comm/transport/shm/shm.h"

#include "comm/control/shm/ledger.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"
#include "comm/flow.h"
#include "comm/transport/shm/lifetime.h"
#include "comm/transport/shm/p2p.h"
#include "comm/transport/shm/staged.h"
#include "comm/transport/shm/throttle.h"

/* ----------------------------------------------------------------- in place */

/* Whether all data that other ranks read are in heaps. Every rank reads the same slots of the
 * ledger, so all of them choose the same way. Then no byte is copied to a staging area, and a
 * collective costs one pass over the tensors. */
static bool in_reach(const ms_local *local, const ms_comm_args *args)
{
    /* Only the sender knows where a part begins. */
    if (args->kind == MS_ALL_TO_ALL && args->by_counts) return false;
    for (uint32_t m = 0; m < args->group->size; m++)
        if (ms_flow_source(args, m) && !ms_ledger_entry_of(local->self, args, m)->heap_offset)
            return false;
    return true;
}

/* Where each member's tensor is in this process' address space; NULL where it is not in a heap. It
 * is on the stack of the task: 128 ranks are the most. */
typedef struct endpoint {
    const char *data[MS_LOCAL_RANKS_MAX];
    char *writable[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
} endpoint;

/* Each rank reduces its slice of all tensors and writes it to all of them. Every number is read
 * once by one rank and written to all tensors by it, so all ranks have the same bits. */
static void all_reduce_slice(ms_run *run, const ms_comm_args *args, const endpoint *in)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    char *outputs[MS_LOCAL_RANKS_MAX];
    size_t item = ms_dtype_bytes(args->memory);
    uint64_t begin, length = ms_slice(args->count, group->size, group->rank, &begin);
    for (uint32_t m = 0; m < group->size; m++) /* In place: each tensor is a source and a result. */
        sources[m] = outputs[m] = in->writable[m] + begin * item;
    ms_sources all = ms_flow_members(args, sources, in->factors);
    ms_flow_reduce(run, args, &all, outputs, group->size, length);
}

/* All members have entered, so their inputs are complete; they stay unchanged until all have left.
 * Each rank reads peers' memory and writes its own, except in all_reduce in place, where each rank
 * writes its slice of every tensor. The barrier after this (ms_ledger_leave) keeps peers from
 * changing what others still read. */
static void take_in_place(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    size_t item = ms_dtype_bytes(args->memory);
    endpoint in;
    for (uint32_t m = 0; m < group->size; m++) {
        const ms_ledger_entry *slot = ms_ledger_entry_of(local->self, args, m);
        in.factors[m] = (float)slot->factor;
        in.writable[m] = slot->heap_offset ? local->self->files->heaps[group->members[m]].memory
                                                 + slot->heap_offset - 1
                                           : NULL;
        in.data[m] = slot->heap_offset ? in.writable[m] + ms_flow_from(args, m).from * item : NULL;
    }
    /* A rank that is no sink gives data and gets none. */
    if (args->kind == MS_ALL_REDUCE && args->everywhere_in_place) all_reduce_slice(run, args, &in);
    else if (!ms_flow_sink(args)) return;
    else if (ms_kind_reduces(args->kind)) {
        char *out = args->out;
        ms_sources all = ms_flow_members(args, in.data, in.factors);
        ms_flow_reduce(run, args, &all, &out, 1, ms_flow_from(args, group->rank).length);
    } else {
        for (uint32_t m = 0; m < group->size; m++) {
            ms_flow flow = ms_flow_from(args, m);
            if (ms_flow_source(args, m))
                ms_flow_copy(run, args->out + flow.to * item, in.data[m], flow.length * item);
        }
    }
}

/* ----------------------------------------------------------------- the task */

/* Runs on the channel's stream: enter (all have made the same call), move bytes, leave (all are
 * done with each other's memory). Every rank advances the same number of phases, because how the
 * call is cut follows from what all agree on. The simulated link delays the stream between entering
 * and moving, as a network would. */
ms_task_result ms_local_run(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_local *local = args->group->comm->transport_state;
    if (ms_kind_is_pair(args->kind)) return ms_pair_run(run, local, args);
    if (!ms_ledger_enter(local->self, args)) return ms_shm_fail(run, local->self, args);
    uint64_t phases = 0;
    if (!ms_local_pace(local, args->wire_bytes)) return ms_shm_fail(run, local->self, args);
    if (args->kind != MS_BARRIER) {
        /* In place there is one phase, the leaving; staging adds one for each step. */
        if (in_reach(local, args)) take_in_place(run, local, args);
        else if (ms_staged_run(run, local, args, &phases) != MS_TASK_DONE) return MS_TASK_FAILED;
    }
    return ms_ledger_leave(local->self, args, phases + 1, NULL)
               ? MS_TASK_DONE
               : ms_shm_fail(run, local->self, args);
}

static const ms_task tasks[MS_COLLECTIVES] = MS_COMM_TASKS(ms_local_run);

/* Memory of this rank's heap, which all ranks map: collectives work on it in place. A GPU's tasks
 * cannot use it. */
ms_status ms_local_storage(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out)
{
    ms_local *local = comm->transport_state;
    return local->arena ? ms_arena_storage(local->arena, stream, bytes, out)
                        : ms_storage_new(stream, bytes, out);
}

extern const struct ms_kernels ms_cuda_local;

const ms_transport ms_transport_local = { .name = "local",
                                          .kernels = "cpu",
                                          .kinds = MS_ALL_KINDS,
                                          .dtypes = MS_ALL_DTYPES,
                                          .ops = MS_ALL_OPS,
                                          .reduced_dtypes = MS_ALL_DTYPES,
                                          .rounds = true,
                                          .compares_counts = true,
                                          .tasks = tasks,
                                          .other = &ms_cuda_local,
                                          .open = ms_local_open,
                                          .storage = ms_local_storage,
                                          .close = ms_local_close };
