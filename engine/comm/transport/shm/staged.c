/* staged.c: collectives of data outside of heaps: each rank copies its data to a staging area,
 * which all ranks map, step by step. */
#include "comm/transport/shm/staged.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "comm/control/shm/files.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/ledger.h"
#include "comm/control/shm/mismatch.h"
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/wait.h"
#include "comm/flow.h"

/* From this number of ranks on, reading every rank's whole tensor costs more than another
 * barrier. */
#define MS_SLICES_RANKS 4
#define MS_SLICES_BYTES ((uint64_t)16 << 10)

/* Copies this rank's part of the step into one half of its staging area. Two tasks of different
 * channels have areas of their own. */
void ms_staged_lay_down(const ms_local *local, const ms_comm_args *args, const ms_staging *pass,
                        uint64_t step, uint64_t half)
{
    const ms_group *group = args->group;
    if (!ms_flow_source(args, group->rank)) return;
    char *stage = ms_stage(local->self->files, local->self->rank, pass->area, half);
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
void ms_staged_pick_up(ms_run *run, const ms_local *local, const ms_comm_args *args,
                       const ms_staging *pass, uint64_t step, uint64_t half)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
    if (!ms_flow_sink(args)) return;
    uint64_t slot = ms_kind_parts(args->kind) ? group->rank : 0, done = step * pass->width;
    for (uint32_t m = 0; m < group->size; m++) {
        if (!ms_flow_source(args, m)) continue;
        sources[m] = ms_stage(local->self->files, group->members[m], pass->area, half)
                     + slot * pass->width * pass->item;
        factors[m] = (float)ms_ledger_entry_of(local->self, args, m)->factor;
        ms_flow flow = ms_flow_from(args, m);
        uint64_t rest = flow.length > done ? flow.length - done : 0;
        uint64_t length = rest < pass->width ? rest : pass->width;
        if (!ms_kind_reduces(args->kind))
            ms_flow_copy(run, args->out + (flow.to + done) * pass->item, sources[m],
                         length * pass->item);
        /* All sources of a reduction are listed now. */
        else if (m + 1 == group->size) {
            char *out = args->out + done * pass->item;
            ms_sources all = ms_flow_members(args, sources, factors);
            ms_flow_reduce(run, args, &all, &out, 1, length);
        }
    }
}

/* Each of many ranks reduces a slice in its own area, where no other rank reads that slice. Then
 * all copy the slices from each other. It is two phases for each step instead of one, hence only
 * for many ranks and larger tensors. */
static bool reduce_by_slices(ms_run *run, ms_local *local, const ms_comm_args *args,
                             const ms_staging *pass, uint64_t step, uint64_t half, uint64_t *phases)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
    uint64_t done = step * pass->width, rest = args->count - done,
             width = rest < pass->width ? rest : pass->width, begin,
             length = ms_slice(width, group->size, group->rank, &begin);
    for (uint32_t m = 0; m < group->size; m++) {
        sources[m] =
            ms_stage(local->self->files, group->members[m], pass->area, half) + begin * pass->item;
        factors[m] = (float)ms_ledger_entry_of(local->self, args, m)->factor;
    }
    char *own =
        ms_stage(local->self->files, local->self->rank, pass->area, half) + begin * pass->item;
    ms_sources all = ms_flow_members(args, sources, factors);
    ms_flow_reduce(run, args, &all, &own, 1, length);
    if (!ms_ledger_phase(local->self, args, ++*phases, NULL)) return false;
    for (uint32_t m = 0; m < group->size; m++) {
        length = ms_slice(width, group->size, m, &begin);
        ms_flow_copy(run, args->out + (done + begin) * pass->item,
                     ms_stage(local->self->files, group->members[m], pass->area, half)
                         + begin * pass->item,
                     length * pass->item);
    }
    return true;
}

/* all_to_all by counts: the ranks first exchange how many elements each sends to each. */
void ms_staged_put_counts(const ms_local *local, const ms_comm_args *args, uint32_t area)
{
    memcpy(ms_stage(local->self->files, local->self->rank, area, 0), args->counts,
           args->group->size * sizeof *args->counts);
}

/* Both sides' numbers go into the error, so that the user sees which list is wrong. */
bool ms_local_check_counts(const ms_local *local, const ms_comm_args *args, uint32_t member,
                           const int64_t *theirs)
{
    const ms_group *group = args->group;
    char text[512], what[256], names[2][MS_RANK_NAME_BYTES];
    if (theirs[group->rank] == args->receive_counts[member]) return true;
    snprintf(text, sizeof text,
             "ranks disagree in %s:\n  rank %s sends %lld elements to rank %u\n  rank %s "
             "expects %lld",
             ms_flight_describe(&ms_ledger_entry_of(local->self, args, group->rank)->call, what,
                                sizeof what),
             ms_rank_name(local->self, group->members[member], names[0]),
             (long long)theirs[group->rank], local->self->rank,
             ms_rank_name(local->self, local->self->rank, names[1]),
             (long long)args->receive_counts[member]);
    ms_shm_end_job(local->self->files, MS_ABORT_MISMATCH, (int32_t)group->members[member], text);
    return false;
}

bool ms_staged_check_counts(const ms_local *local, const ms_comm_args *args, uint32_t area)
{
    const ms_group *group = args->group;
    for (uint32_t m = 0; m < group->size; m++) {
        const void *theirs = ms_stage(local->self->files, group->members[m], area, 0);
        if (!ms_local_check_counts(local, args, m, theirs)) return false;
    }
    return true;
}

/* How all ranks of the group cut this collective into steps: it follows from what they agree on.
 * The width is a multiple of 16 elements, so each slot begins at a multiple of 16 bytes at least.
 */
ms_staging ms_staged_plan(const ms_local *local, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    ms_staging pass = { .area = group->id * MS_CHANNELS + args->channel,
                        .longest = ms_flow_longest(args),
                        .item = ms_dtype_bytes(args->memory),
                        .by_counts = args->kind == MS_ALL_TO_ALL && args->by_counts };
    for (uint32_t m = 0; pass.by_counts && m < group->size; m++) {
        uint64_t theirs = ms_ledger_entry_of(local->self, args, m)->value;
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
int ms_staged_populate(const ms_local *local, ms_channel *channel, uint32_t area)
{
    ms_shm_rank *self = local->self;
    int error = channel->populated
                    ? 0
                    : ms_shm_files_populate_heap(self->files, self->rank,
                                                 ms_stage(self->files, self->rank, area, 0),
                                                 2 * MS_STAGE_BYTES);
    channel->populated = error == 0;
    return error;
}

/* Double buffering: while some ranks read one half, others fill the other. *phases: how many phases
 * the channel has advanced. False: the job has ended. */
static bool go_by_steps(ms_run *run, ms_local *local, const ms_comm_args *args,
                        const ms_staging *pass, uint64_t *phases)
{
    uint64_t half = *phases = pass->by_counts ? 1 : 0;
    if (pass->by_counts) {
        ms_staged_put_counts(local, args, pass->area);
        if (!ms_ledger_phase(local->self, args, 1, NULL)
            || !ms_staged_check_counts(local, args, pass->area))
            return false;
    }
    for (uint64_t step = 0; step * pass->width < pass->longest; step++, half++) {
        ms_staged_lay_down(local, args, pass, step, half);
        if (!ms_ledger_phase(local->self, args, ++*phases, NULL)) return false;
        if (!pass->by_slices) ms_staged_pick_up(run, local, args, pass, step, half);
        else if (!reduce_by_slices(run, local, args, pass, step, half, phases)) return false;
    }
    return true;
}

/* *phases is set also on a failure; the job has ended then. */
ms_task_result ms_staged_run(ms_run *run, ms_local *local, const ms_comm_args *args,
                             uint64_t *phases)
{
    ms_staging pass = ms_staged_plan(local, args);
    int error = ms_staged_populate(local, &args->group->channels[args->channel], pass.area);
    if (error)
        return ms_shm_raise(run, local->self, args,
                            error == -ENOMEM ? MS_ERROR_MEMORY : MS_ERROR_IO,
                            "no memory for staging a collective");
    return go_by_steps(run, local, args, &pass, phases) ? MS_TASK_DONE
                                                        : ms_shm_fail(run, local->self, args);
}
