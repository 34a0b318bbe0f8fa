/* local.c: collectives between the ranks of a host: in place where the data are in heaps, which all
 * ranks map, otherwise through staging areas. */
#include "comm/local/local.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "comm/flow.h"

/* ----------------------------------------------------------------- in place */

/* Whether all data that other ranks read are in heaps. Every rank reads the same slots of the
 * ledger, so all of them choose the same way. Then no byte is copied to a staging area, and a
 * collective costs one pass over the tensors. */
static bool in_reach(const ms_local *local, const ms_comm_args *args)
{
    /* Only the sender knows where a part begins. */
    if (args->kind == MS_ALL_TO_ALL && args->by_counts) return false;
    for (uint32_t m = 0; m < args->group->size; m++)
        if (ms_flow_source(args, m) && !ms_ledger_slot_of(local->host, args, m)->heap_offset)
            return false;
    return true;
}

/* Where each member's tensor is in this process' address space; NULL where it is not in a heap. It
 * is on the stack of the task: 128 ranks are the most. */
typedef struct reach {
    const char *data[MS_LOCAL_RANKS_MAX];
    char *writable[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
} reach;

/* The part of `count` elements that a member reduces for all. Slices begin at whole cache lines of
 * the longest element. The last slices may be shorter, or empty. */
static uint64_t slice_of(const ms_group *group, uint64_t count, uint32_t member, uint64_t *begin)
{
    uint64_t slice = ((count + group->size - 1) / group->size + 63) & ~(uint64_t)63;
    *begin = slice * member < count ? slice * member : count;
    return count - *begin < slice ? count - *begin : slice;
}

/* Each rank reduces its slice of all tensors and writes it to all of them. Every number is read
 * once by one rank and written to all tensors by it, so all ranks have the same bits. */
static void all_reduce_slice(ms_run *run, const ms_comm_args *args, const reach *in)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    char *outputs[MS_LOCAL_RANKS_MAX];
    size_t item = ms_dtype_bytes(args->memory);
    uint64_t begin, length = slice_of(group, args->count, group->rank, &begin);
    for (uint32_t m = 0; m < group->size; m++) /* In place: each tensor is a source and a result. */
        sources[m] = outputs[m] = in->writable[m] + begin * item;
    ms_flow_reduce(run, args, &(ms_sources){ .data = sources, .factors = in->factors }, outputs,
                   group->size, length);
}

/* All members have entered, so their inputs are complete; they stay unchanged until all have left.
 * Each rank reads peers' memory and writes its own, except in all_reduce in place, where each rank
 * writes its slice of every tensor. The barrier after this (ms_ledger_leave) keeps peers from
 * changing what others still read. */
static void take_in_place(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    size_t item = ms_dtype_bytes(args->memory);
    reach in;
    for (uint32_t m = 0; m < group->size; m++) {
        const ms_ledger_slot *slot = ms_ledger_slot_of(local->host, args, m);
        in.factors[m] = (float)slot->factor;
        in.writable[m] = slot->heap_offset ? local->host->files->heaps[group->members[m]].memory
                                                 + slot->heap_offset - 1
                                           : NULL;
        in.data[m] = slot->heap_offset ? in.writable[m] + ms_flow_from(args, m).from * item : NULL;
    }
    /* A rank that is no sink gives data and gets none. */
    if (args->kind == MS_ALL_REDUCE && args->everywhere_in_place) all_reduce_slice(run, args, &in);
    else if (!ms_flow_sink(args)) return;
    else if (ms_kind_reduces(args->kind)) {
        char *out = args->out;
        ms_flow_reduce(run, args, &(ms_sources){ .data = in.data, .factors = in.factors }, &out, 1,
                       ms_flow_from(args, group->rank).length);
    } else {
        for (uint32_t m = 0; m < group->size; m++) {
            ms_flow flow = ms_flow_from(args, m);
            if (ms_flow_source(args, m))
                ms_flow_copy(run, args->out + flow.to * item, in.data[m], flow.length * item);
        }
    }
}

/* ------------------------------------------------------------------- staged */

/* From this number of ranks on, reading every rank's whole tensor costs more than another
 * barrier. */
#define MS_SLICES_RANKS 4
#define MS_SLICES_BYTES ((uint64_t)16 << 10)

/* The staged path: in each step every contributor copies `width` elements of each slot to its
 * staging area, all wait, and every receiver reads its part. width: elements of a slot in one step;
 * longest: those of the longest slot of any rank, so that all ranks do equally many steps. */
typedef struct staging {
    uint32_t area;
    uint64_t width, longest, item;
    bool by_counts; /* all_to_all: the ranks compare their counts first, in a phase of its own */
    bool by_slices; /* see reduce_by_slices */
} staging;

/* Copies this rank's part of the step into one half of its staging area. Two tasks of different
 * channels have areas of their own. */
static void lay_down(const ms_local *local, const ms_comm_args *args, const staging *pass,
                     uint64_t step, uint64_t half)
{
    const ms_group *group = args->group;
    if (!ms_flow_source(args, group->rank)) return;
    char *stage = ms_stage(local->host->files, local->host->rank, pass->area, half);
    for (uint32_t s = 0; s < ms_flow_slots(args); s++) {
        ms_flow flow = ms_flow_slot(args, s);
        /* Slots that are shorter than the longest are done some steps earlier. */
        uint64_t done = step * pass->width, rest = flow.length > done ? flow.length - done : 0;
        if (rest)
            memcpy(stage + s * pass->width * pass->item, args->in + (flow.from + done) * pass->item,
                   (rest < pass->width ? rest : pass->width) * pass->item);
    }
}

/* Reads the part of the step from the areas of the members. A reduction runs once all sources are
 * listed, in the order of ranks. */
static void pick_up(ms_run *run, const ms_local *local, const ms_comm_args *args,
                    const staging *pass, uint64_t step, uint64_t half)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
    if (!ms_flow_sink(args)) return;
    uint64_t slot = ms_kind_parts(args->kind) ? group->rank : 0, done = step * pass->width;
    for (uint32_t m = 0; m < group->size; m++) {
        if (!ms_flow_source(args, m)) continue;
        sources[m] = ms_stage(local->host->files, group->members[m], pass->area, half)
                     + slot * pass->width * pass->item;
        factors[m] = (float)ms_ledger_slot_of(local->host, args, m)->factor;
        ms_flow flow = ms_flow_from(args, m);
        uint64_t rest = flow.length > done ? flow.length - done : 0;
        uint64_t length = rest < pass->width ? rest : pass->width;
        if (!ms_kind_reduces(args->kind))
            ms_flow_copy(run, args->out + (flow.to + done) * pass->item, sources[m],
                         length * pass->item);
        /* All sources of a reduction are listed now. */
        else if (m + 1 == group->size) {
            char *out = args->out + done * pass->item;
            ms_flow_reduce(run, args, &(ms_sources){ .data = sources, .factors = factors }, &out, 1,
                           length);
        }
    }
}

/* Each of many ranks reduces a slice in its own area, where no other rank reads that slice. Then
 * all copy the slices from each other. It is two phases for each step instead of one, hence only
 * for many ranks and larger tensors. */
static bool reduce_by_slices(ms_run *run, ms_local *local, const ms_comm_args *args,
                             const staging *pass, uint64_t step, uint64_t half, uint64_t *phases)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
    uint64_t done = step * pass->width, rest = args->count - done,
             width = rest < pass->width ? rest : pass->width, begin,
             length = slice_of(group, width, group->rank, &begin);
    for (uint32_t m = 0; m < group->size; m++) {
        sources[m] =
            ms_stage(local->host->files, group->members[m], pass->area, half) + begin * pass->item;
        factors[m] = (float)ms_ledger_slot_of(local->host, args, m)->factor;
    }
    char *own =
        ms_stage(local->host->files, local->host->rank, pass->area, half) + begin * pass->item;
    ms_flow_reduce(run, args, &(ms_sources){ .data = sources, .factors = factors }, &own, 1,
                   length);
    if (!ms_ledger_phase(local->host, args, ++*phases)) return false;
    for (uint32_t m = 0; m < group->size; m++) {
        length = slice_of(group, width, m, &begin);
        ms_flow_copy(run, args->out + (done + begin) * pass->item,
                     ms_stage(local->host->files, group->members[m], pass->area, half)
                         + begin * pass->item,
                     length * pass->item);
    }
    return true;
}

/* all_to_all by counts: the ranks first exchange how many elements each sends to each; these must
 * be the numbers that the receivers expect. Both sides' numbers go into the error, so that the user
 * sees which list is wrong. */
static bool agree_on_counts(ms_local *local, const ms_comm_args *args, uint32_t area)
{
    const ms_group *group = args->group;
    memcpy(ms_stage(local->host->files, local->host->rank, area, 0), args->counts,
           group->size * sizeof *args->counts);
    if (!ms_ledger_phase(local->host, args, 1)) return false;
    for (uint32_t m = 0; m < group->size; m++) {
        const int64_t *theirs =
            (const int64_t *)(const void *)ms_stage(local->host->files, group->members[m], area, 0);
        if (theirs[group->rank] == args->receive_counts[m]) continue;
        char text[512], what[256];
        snprintf(text, sizeof text,
                 "ranks disagree in %s:\n  rank %u sends %lld elements to rank %u\n  rank %u "
                 "expects %lld",
                 ms_flight_describe(&ms_ledger_slot_of(local->host, args, group->rank)->call, what,
                                    sizeof what),
                 group->members[m], (long long)theirs[group->rank], local->host->rank,
                 local->host->rank, (long long)args->receive_counts[m]);
        ms_host_end_job(local->host->files, MS_ABORT_MISMATCH, (int32_t)group->members[m], text);
        return false;
    }
    return true;
}

/* How all ranks of the group cut this collective into steps: it follows from what they agree on.
 * The width is a multiple of 16 elements, so each slot begins at a multiple of 16 bytes at least.
 */
static staging plan_steps(const ms_local *local, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    staging pass = { .area = group->id * MS_CHANNELS + args->channel,
                     .longest = ms_flow_longest(args),
                     .item = ms_dtype_bytes(args->memory),
                     .by_counts = args->kind == MS_ALL_TO_ALL && args->by_counts };
    for (uint32_t m = 0; pass.by_counts && m < group->size; m++) {
        uint64_t theirs = ms_ledger_slot_of(local->host, args, m)->value;
        /* The ledger carries each rank's longest part, since the counts differ. */
        if (theirs > pass.longest) pass.longest = theirs;
    }
    pass.width = (MS_STAGE_BYTES / ms_flow_slots(args) / pass.item) & ~(uint64_t)15;
    pass.by_slices = args->kind == MS_ALL_REDUCE && group->size >= MS_SLICES_RANKS
                     && args->count * pass.item >= MS_SLICES_BYTES;
    return pass;
}

/* Pages for this rank's staging area of the channel, before its first use; 0 or -errno. A channel
 * that never stages takes no memory for it. */
static int populate_stage(const ms_local *local, ms_channel *channel, uint32_t area)
{
    ms_host *host = local->host;
    int error = channel->populated
                    ? 0
                    : ms_host_files_populate_heap(host->files, host->rank,
                                                  ms_stage(host->files, host->rank, area, 0),
                                                  2 * MS_STAGE_BYTES);
    channel->populated = error == 0;
    return error;
}

/* Double buffering: while some ranks read one half, others fill the other. *phases: how many phases
 * the channel has advanced. False: the job has ended. */
static bool go_by_steps(ms_run *run, ms_local *local, const ms_comm_args *args, const staging *pass,
                        uint64_t *phases)
{
    uint64_t half = *phases = pass->by_counts ? 1 : 0;
    if (pass->by_counts && !agree_on_counts(local, args, pass->area)) return false;
    for (uint64_t step = 0; step * pass->width < pass->longest; step++, half++) {
        lay_down(local, args, pass, step, half);
        if (!ms_ledger_phase(local->host, args, ++*phases)) return false;
        if (!pass->by_slices) pick_up(run, local, args, pass, step, half);
        else if (!reduce_by_slices(run, local, args, pass, step, half, phases)) return false;
    }
    return true;
}

/* *phases is set also on a failure; the job has ended then. */
static ms_task_result take_staged(ms_run *run, ms_local *local, const ms_comm_args *args,
                                  uint64_t *phases)
{
    staging pass = plan_steps(local, args);
    int error = populate_stage(local, &args->group->channels[args->channel], pass.area);
    if (error)
        return ms_host_raise(run, local->host, args,
                             error == -ENOMEM ? MS_ERROR_MEMORY : MS_ERROR_IO,
                             "no memory for staging a collective");
    return go_by_steps(run, local, args, &pass, phases) ? MS_TASK_DONE
                                                        : ms_host_fail(run, local->host, args);
}

/* ----------------------------------------------------------------- the task */

/* Runs on the channel's stream: enter (all have made the same call), move bytes, leave (all are
 * done with each other's memory). Every rank advances the same number of phases, because how the
 * call is cut follows from what all agree on. The simulated link delays the stream between entering
 * and moving, as a network would. */
static ms_task_result run_collective(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_local *local = args->group->comm->transport_state;
    if (ms_kind_is_pair(args->kind)) return ms_pair_run(run, local, args);
    if (!ms_ledger_enter(local->host, args)) return ms_host_fail(run, local->host, args);
    uint64_t phases = 0;
    if (!ms_local_pace(local, args->wire_bytes)) return ms_host_fail(run, local->host, args);
    if (args->kind != MS_BARRIER) {
        /* In place there is one phase, the leaving; staging adds one for each step. */
        if (in_reach(local, args)) take_in_place(run, local, args);
        else if (take_staged(run, local, args, &phases) != MS_TASK_DONE) return MS_TASK_FAILED;
    }
    return ms_ledger_leave(local->host, args, phases + 1) ? MS_TASK_DONE
                                                          : ms_host_fail(run, local->host, args);
}

static const ms_task tasks[MS_COLLECTIVES] = MS_COMM_TASKS(run_collective);

/* Memory of this rank's heap, which all ranks map: collectives work on it in place. */
static ms_status storage(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out)
{
    ms_local *local = comm->transport_state;
    return ms_arena_storage(local->arena, stream, bytes, out);
}

const ms_transport ms_transport_local = { .name = "local",
                                          .kernels = "cpu",
                                          .kinds = MS_ALL_KINDS,
                                          .dtypes = MS_ALL_DTYPES,
                                          .ops = MS_ALL_OPS,
                                          .reduced_dtypes = MS_ALL_DTYPES,
                                          .rounds = true,
                                          .compares_counts = true,
                                          .tasks = tasks,
                                          .open = ms_local_open,
                                          .storage = storage,
                                          .close = ms_local_close };
