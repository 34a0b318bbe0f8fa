/* local.c: collectives between the ranks of a host: in place where the data lie in heaps that all
 * map, else through staging areas. */
#include "comm/local/control.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "comm/flow.h"

/* The link is busy from when the data are there; it is shared by all that this rank sends. Only the
 * stream waits. */
bool ms_local_pace(ms_local *local, uint64_t bytes)
{
    const ms_control *control = local->control;
    if (!control->link_bytes_per_second && !control->link_latency_ns) return true;
    const ms_os *os = local->rendezvous->os;
    uint64_t rate = control->link_bytes_per_second;
    uint64_t takes = rate ? bytes / rate * 1000000000u + bytes % rate * 1000000000u / rate : 0;
    uint64_t before = atomic_load(&local->link_free), after, now = os->monotonic_ns(os->user);
    do after = (before > now ? before : now) + takes;
    while (!atomic_compare_exchange_weak(&local->link_free, &before, after));
    return ms_local_sleep_until(local, after + control->link_latency_ns);
}

/* ----------------------------------------------------------------- in place */

/* Whether everything that others read lies in heaps: from the ledger, so all ranks answer alike. */
static bool in_reach(const ms_local *local, const ms_comm_args *args)
{
    /* Only the sender knows where a part begins. */
    if (args->kind == MS_ALL_TO_ALL && args->by_counts) return false;
    for (uint32_t m = 0; m < args->group->size; m++)
        if (ms_flow_source(args, m) && !ms_ledger_slot_of(local, args, m)->heap_offset)
            return false;
    return true;
}

typedef struct reach {
    const char *data[MS_LOCAL_RANKS_MAX];
    char *writable[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
} reach;

/* The part of `count` elements that a member reduces for all. Slices begin at whole cache lines of
 * the longest element. */
static uint64_t slice_of(const ms_group *group, uint64_t count, uint32_t member, uint64_t *begin)
{
    uint64_t slice = ((count + group->size - 1) / group->size + 63) & ~(uint64_t)63;
    *begin = slice * member < count ? slice * member : count;
    return count - *begin < slice ? count - *begin : slice;
}

/* Each rank reduces its slice of all tensors and writes it to all of them. */
static void all_reduce_slice(ms_run *run, const ms_comm_args *args, const reach *in)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    char *outputs[MS_LOCAL_RANKS_MAX];
    size_t item = ms_dtype_bytes(args->memory);
    uint64_t begin, length = slice_of(group, args->count, group->rank, &begin);
    for (uint32_t m = 0; m < group->size; m++)
        sources[m] = outputs[m] = in->writable[m] + begin * item;
    ms_flow_reduce(run, args, &(ms_sources){ .data = sources, .factors = in->factors }, outputs,
                   group->size, length);
}

static void take_in_place(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    size_t item = ms_dtype_bytes(args->memory);
    reach in;
    for (uint32_t m = 0; m < group->size; m++) {
        const ms_ledger_slot *slot = ms_ledger_slot_of(local, args, m);
        in.factors[m] = (float)slot->factor;
        in.writable[m] = slot->heap_offset ? local->rendezvous->heaps[group->members[m]].memory
                                                 + slot->heap_offset - 1
                                           : NULL;
        in.data[m] = slot->heap_offset ? in.writable[m] + ms_flow_from(args, m).from * item : NULL;
    }
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

/* From this number of ranks on, reading every rank's whole tensor costs more than one more
 * barrier. */
#define MS_SLICES_RANKS 4
#define MS_SLICES_BYTES ((uint64_t)16 << 10)

/* A pass of the staged path: every contributor lays down `width` elements of each slot, all wait,
 * every receiver takes what is its. */
typedef struct ms_pass {
    uint32_t area;
    uint64_t width, longest, item;
} ms_pass;

static void lay_down(const ms_local *local, const ms_comm_args *args, const ms_pass *pass,
                     uint64_t step, uint64_t half)
{
    const ms_group *group = args->group;
    if (!ms_flow_source(args, group->rank)) return;
    char *stage = ms_stage(local->rendezvous, local->rank, pass->area, half);
    for (uint32_t s = 0; s < ms_flow_slots(args); s++) {
        ms_flow flow = ms_flow_slot(args, s);
        uint64_t done = step * pass->width, rest = flow.length > done ? flow.length - done : 0;
        if (rest)
            memcpy(stage + s * pass->width * pass->item, args->in + (flow.from + done) * pass->item,
                   (rest < pass->width ? rest : pass->width) * pass->item);
    }
}

static void pick_up(ms_run *run, const ms_local *local, const ms_comm_args *args,
                    const ms_pass *pass, uint64_t step, uint64_t half)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
    if (!ms_flow_sink(args)) return;
    uint64_t slot = ms_kind_parts(args->kind) ? group->rank : 0, done = step * pass->width;
    for (uint32_t m = 0; m < group->size; m++) {
        if (!ms_flow_source(args, m)) continue;
        sources[m] = ms_stage(local->rendezvous, group->members[m], pass->area, half)
                     + slot * pass->width * pass->item;
        factors[m] = (float)ms_ledger_slot_of(local, args, m)->factor;
        ms_flow flow = ms_flow_from(args, m);
        uint64_t rest = flow.length > done ? flow.length - done : 0;
        uint64_t length = rest < pass->width ? rest : pass->width;
        if (!ms_kind_reduces(args->kind))
            ms_flow_copy(run, args->out + (flow.to + done) * pass->item, sources[m],
                         length * pass->item);
        else if (m + 1 == group->size) {
            char *out = args->out + done * pass->item;
            ms_flow_reduce(run, args, &(ms_sources){ .data = sources, .factors = factors }, &out, 1,
                           length);
        }
    }
}

/* Many ranks reduce a slice each in their own areas, where nobody else reads that slice, and then
 * take the slices from each other. */
static bool reduce_by_slices(ms_run *run, ms_local *local, const ms_comm_args *args,
                             const ms_pass *pass, uint64_t step, uint64_t half, uint64_t *phases)
{
    const ms_group *group = args->group;
    const char *sources[MS_LOCAL_RANKS_MAX];
    float factors[MS_LOCAL_RANKS_MAX];
    uint64_t done = step * pass->width, rest = args->count - done,
             width = rest < pass->width ? rest : pass->width, begin,
             length = slice_of(group, width, group->rank, &begin);
    for (uint32_t m = 0; m < group->size; m++) {
        sources[m] =
            ms_stage(local->rendezvous, group->members[m], pass->area, half) + begin * pass->item;
        factors[m] = (float)ms_ledger_slot_of(local, args, m)->factor;
    }
    char *own = ms_stage(local->rendezvous, local->rank, pass->area, half) + begin * pass->item;
    ms_flow_reduce(run, args, &(ms_sources){ .data = sources, .factors = factors }, &own, 1,
                   length);
    if (!ms_ledger_phase(local, args, ++*phases)) return false;
    for (uint32_t m = 0; m < group->size; m++) {
        length = slice_of(group, width, m, &begin);
        ms_flow_copy(run, args->out + (done + begin) * pass->item,
                     ms_stage(local->rendezvous, group->members[m], pass->area, half)
                         + begin * pass->item,
                     length * pass->item);
    }
    return true;
}

/* all_to_all by counts: what each rank sends to each is laid down first, and must be what the
 * receiver expects. */
static bool agree_on_counts(ms_local *local, const ms_comm_args *args, uint32_t area)
{
    const ms_group *group = args->group;
    memcpy(ms_stage(local->rendezvous, local->rank, area, 0), args->counts,
           group->size * sizeof *args->counts);
    if (!ms_ledger_phase(local, args, 1)) return false;
    for (uint32_t m = 0; m < group->size; m++) {
        const int64_t *theirs =
            (const int64_t *)(const void *)ms_stage(local->rendezvous, group->members[m], area, 0);
        if (theirs[group->rank] == args->receive_counts[m]) continue;
        char text[512], what[256];
        snprintf(text, sizeof text,
                 "ranks disagree in %s:\n  rank %u sends %lld elements to rank %u\n  rank %u "
                 "expects %lld",
                 ms_flight_describe(&ms_ledger_slot_of(local, args, group->rank)->call, what,
                                    sizeof what),
                 group->members[m], (long long)theirs[group->rank], local->rank, local->rank,
                 (long long)args->receive_counts[m]);
        ms_rendezvous_abort(local->rendezvous, MS_ABORT_MISMATCH, (int32_t)group->members[m], text);
        return false;
    }
    return true;
}

/* Double buffering: while some still read one half, others fill the other. *phases: how many the
 * channel has moved on. */
static ms_task_result take_staged(ms_run *run, ms_local *local, const ms_comm_args *args,
                                  uint64_t *phases)
{
    ms_channel *channel = &args->group->channels[args->channel];
    ms_pass pass = { .area = args->group->id * MS_CHANNELS + args->channel,
                     .longest = ms_flow_longest(args),
                     .item = ms_dtype_bytes(args->memory) };
    if (!channel->populated) {
        int error = ms_rendezvous_populate_heap(
            local->rendezvous, local->rank, ms_stage(local->rendezvous, local->rank, pass.area, 0),
            2 * MS_STAGE_BYTES);
        if (error)
            return ms_local_raise(run, local, args,
                                  error == -ENOMEM ? MS_ERROR_MEMORY : MS_ERROR_IO,
                                  "no memory for staging a collective");
        channel->populated = true;
    }
    bool by_counts = args->kind == MS_ALL_TO_ALL && args->by_counts;
    for (uint32_t m = 0; by_counts && m < args->group->size; m++) {
        uint64_t theirs = ms_ledger_slot_of(local, args, m)->value;
        if (theirs > pass.longest) pass.longest = theirs;
    }
    pass.width = (MS_STAGE_BYTES / ms_flow_slots(args) / pass.item) & ~(uint64_t)15;
    uint64_t half = by_counts ? 1 : 0;
    bool slices = args->kind == MS_ALL_REDUCE && args->group->size >= MS_SLICES_RANKS
                  && args->count * pass.item >= MS_SLICES_BYTES;
    *phases = half;
    if (by_counts && !agree_on_counts(local, args, pass.area))
        return ms_local_fail(run, local, args);
    for (uint64_t step = 0; step * pass.width < pass.longest; step++, half++) {
        lay_down(local, args, &pass, step, half);
        if (!ms_ledger_phase(local, args, ++*phases)) return ms_local_fail(run, local, args);
        if (!slices) pick_up(run, local, args, &pass, step, half);
        else if (!reduce_by_slices(run, local, args, &pass, step, half, phases))
            return ms_local_fail(run, local, args);
    }
    return MS_TASK_DONE;
}

/* ----------------------------------------------------------------- the task */

static ms_task_result run_collective(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_local *local = args->group->comm->state;
    if (ms_kind_is_pair(args->kind)) return ms_pair_run(run, local, args);
    if (!ms_ledger_enter(local, args)) return ms_local_fail(run, local, args);
    uint64_t phases = 0;
    if (!ms_local_pace(local, args->wire_bytes)) return ms_local_fail(run, local, args);
    if (args->kind == MS_SPLIT) *args->result = ms_ledger_slot_of(local, args, 0)->value;
    else if (args->kind != MS_BARRIER) {
        if (in_reach(local, args)) take_in_place(run, local, args);
        else if (take_staged(run, local, args, &phases) != MS_TASK_DONE) return MS_TASK_FAILED;
    }
    return ms_ledger_leave(local, args, phases + 1) ? MS_TASK_DONE
                                                    : ms_local_fail(run, local, args);
}

static const ms_task tasks[MS_COLLECTIVES] = MS_COMM_TASKS(run_collective);

/* ----------------------------------------------------------------- the host */

static ms_status check(ms_comm *comm)
{
    ms_local *local = comm->state;
    ms_abort_record cause;
    if (!ms_local_aborted(local) || !ms_rendezvous_cause(local->rendezvous, &cause)) return MS_OK;
    ms_error *error = &ms_engine_context(comm->engine)->error;
    *error = cause.error;
    return error->status;
}

/* The group's first member takes ids for all parts, and all learn them in one collective. */
static ms_status split(ms_group *group, uint64_t list_hash, uint32_t parts, uint32_t *first_id)
{
    ms_comm *comm = group->comm;
    ms_local *local = comm->state;
    ms_comm_args args = { .counts_hash = list_hash, .result = &group->split_id };
    if (group->rank == 0) args.value = atomic_fetch_add(&local->control->groups, parts);
    ms_collective collective = { .kind = MS_SPLIT, .bucket = -1 };
    ms_point ready;
    ms_status status = ms_group_issue(group, &args, &collective, &ready);
    if (!status) status = ms_point_sync(comm->engine, ready);
    if (status) return status;
    uint64_t id = group->split_id;
    if (id + parts > MS_GROUPS_MAX)
        return ms_engine_fail(comm->engine, MS_ERROR_STATE, "%u more groups: a job may have %d",
                              parts, MS_GROUPS_MAX);
    *first_id = (uint32_t)id;
    return MS_OK;
}

static ms_status join_group(ms_comm *comm, uint32_t id)
{
    ms_local *local = comm->state;
    size_t bytes = (size_t)MS_CHANNELS * local->control->ranks * sizeof(ms_member_line);
    int error = ms_rendezvous_populate_control(local->rendezvous,
                                               ms_member(local->rendezvous, id, 0, 0), bytes);
    return error ? ms_fail_os(ms_engine_context(comm->engine), error, "no memory for a new group",
                              NULL)
                 : MS_OK;
}

static ms_status storage(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out)
{
    ms_local *local = comm->state;
    return ms_arena_storage(local->arena, stream, bytes, out);
}

static uint64_t pair_number(ms_comm *comm, const ms_comm_args *args)
{
    ms_local *local = comm->state;
    uint32_t other = args->group->members[args->root];
    return (args->kind == MS_SEND ? local->sends[other] : local->receives[other]) + 1;
}

static ms_status prepare(ms_comm *comm, const ms_comm_args *args)
{
    ms_local *local = comm->state;
    if (!ms_kind_is_pair(args->kind)) return MS_OK;
    uint32_t other = args->group->members[args->root];
    ms_pair_line *line = args->kind == MS_SEND ? ms_pair(local->rendezvous, local->rank, other)
                                               : ms_pair(local->rendezvous, other, local->rank);
    int error = args->number == 1
                    ? ms_rendezvous_populate_control(local->rendezvous, line, sizeof *line)
                    : 0;
    return error ? ms_fail_os(ms_engine_context(comm->engine), error,
                              "no memory for sending between ranks", NULL)
                 : MS_OK;
}

static void issued(ms_comm *comm, const ms_comm_args *args)
{
    ms_local *local = comm->state;
    uint32_t other = ms_kind_is_pair(args->kind) ? args->group->members[args->root] : 0;
    if (args->kind == MS_SEND)
        atomic_store(&ms_pair(local->rendezvous, local->rank, other)->sends,
                     local->sends[other] = args->number);
    else if (args->kind == MS_RECV)
        atomic_store(&ms_pair(local->rendezvous, other, local->rank)->receives,
                     local->receives[other] = args->number);
    else {
        ms_member_line *line =
            ms_member(local->rendezvous, args->group->id, args->channel, args->group->rank);
        atomic_store(&line->issuing, args->number);
        atomic_store(&line->calls[args->number % MS_CALLS_AHEAD], ms_ledger_hash(args));
        atomic_store(&line->issued, args->number);
    }
}

/* Peers that sleep look around by themselves, but soon is better. */
static void leave(ms_comm *comm, const char *message)
{
    ms_local *local = comm->state;
    if (message) {
        char text[MS_ERROR_MESSAGE_BYTES];
        snprintf(text, sizeof text, "because rank %u: %.900s", local->rank, message);
        ms_rendezvous_abort(local->rendezvous, MS_ABORT_RAISED, (int32_t)local->rank, text);
    }
    if (atomic_exchange(&local->control->lines[local->rank].finished, 1)) return;
    for (uint32_t r = 0; r < local->control->ranks; r++)
        if (r != local->rank) ms_local_wake(local, r);
}

static void raise(ms_comm *comm, const ms_error *error)
{
    ms_local *local = comm->state;
    char text[MS_ERROR_MESSAGE_BYTES];
    const char *at = ", at ", *script = error->script;
    if (!*script || strstr(error->message, script)) at = script = "";
    snprintf(text, sizeof text, "because rank %u: %.800s%s%s", local->rank, error->message, at,
             script);
    ms_rendezvous_abort(local->rendezvous,
                        error->status == MS_ERROR_MISMATCH ? MS_ABORT_MISMATCH : MS_ABORT_RAISED,
                        (int32_t)local->rank, text);
}

static void progress(ms_comm *comm)
{
    ms_local *local = comm->state;
    ms_activity_done(&local->control->lines[local->rank].activity);
}

static void close_local(ms_comm *comm)
{
    ms_local *local = comm->state;
    leave(comm, NULL);
    atomic_store(&local->control->lines[local->rank].phase, MS_RANK_LEFT);
    ms_context *context = ms_engine_context(comm->engine);
    context->activity = NULL; /* the streams have come to their end */
    ms_arena_free(local->arena);
    ms_rendezvous_release(local->rendezvous);
    ms_release(context, local);
}

const ms_comm_backend ms_comm_local = {
    .tasks = tasks,
    .split = split,
    .join = join_group,
    .storage = storage,
    .check = check,
    .number = pair_number,
    .prepare = prepare,
    .issued = issued,
    .leave = leave,
    .abort = raise,
    .progress = progress,
    .step = ms_local_step,
    .set_folder = ms_local_set_folder,
    .close = close_local,
};

/* ------------------------------------------------------------------ joining */

static int populate_heap(void *user, void *address, uint64_t bytes)
{
    const ms_local *local = user;
    return ms_rendezvous_populate_heap(local->rendezvous, local->rank, address, bytes);
}

/* A task that fails would leave peers waiting for the collectives behind it. In a forked child
 * nothing here is this process' business. */
static void tell_peers(ms_engine *engine, const ms_error *error)
{
    ms_comm *comm = ms_comm_of(engine);
    const ms_os *os = ms_engine_context(engine)->os;
    if (comm && os->process_id(os->user) == comm->process) raise(comm, error);
}

static ms_status join(ms_engine *engine, ms_rendezvous *rendezvous, uint32_t rank, ms_local **out)
{
    ms_context *context = ms_engine_context(engine);
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_local), "rank", &memory);
    if (status) return status;
    ms_local *local = memory;
    local->rendezvous = rendezvous;
    local->control = rendezvous->control;
    local->rank = rank;
    ms_straggler_step(local, 0);
    local->pressure = rendezvous->control->crowded ? MS_SHARED_CORE : MS_OWN_CORE;
    char *heap = rendezvous->heaps[rank].memory + MS_STAGES_BYTES;
    int error = ms_rendezvous_populate_control(rendezvous, ms_member(rendezvous, 0, 0, 0),
                                               (size_t)MS_CHANNELS * rendezvous->ranks
                                                   * sizeof(ms_member_line));
    if (error) status = ms_fail_os(context, error, "no memory for the control file of a job", NULL);
    if (!status)
        status = ms_arena_new(engine, heap, rendezvous->heap_bytes - MS_STAGES_BYTES, populate_heap,
                              local, &local->arena);
    if (status) ms_release(context, local);
    else *out = local;
    return status;
}

ms_status ms_comm_open(ms_engine *engine, ms_rendezvous *rendezvous, uint32_t rank,
                       ms_group **world)
{
    if (ms_engine_is_sim(engine))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "the sim executor has no data to exchange: open a fake world");
    if (rank >= rendezvous->ranks)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "rank %u of %u: ranks count from 0", rank,
                              rendezvous->ranks);
    if (ms_comm_of(engine))
        return ms_engine_fail(engine, MS_ERROR_STATE, "this engine belongs to a world already");
    ms_rank_line *line = &rendezvous->control->lines[rank];
    uint32_t absent = MS_RANK_ABSENT;
    if (!atomic_compare_exchange_strong(&line->phase, &absent, MS_RANK_PRESENT))
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "rank %u of this job is taken: every rank joins once", rank);
    ms_local *local = NULL;
    ms_status status = join(engine, rendezvous, rank, &local);
    if (!status)
        status = ms_comm_new(engine, &ms_comm_local, local, rank, rendezvous->ranks, world);
    if (status) {
        if (local) {
            ms_arena_free(local->arena);
            ms_release(ms_engine_context(engine), local);
        }
        atomic_store(&line->phase, MS_RANK_ABSENT);
        return status;
    }
    local->comm = (*world)->comm;
    ms_rendezvous_retain(rendezvous);
    ms_engine_on_failure(engine, tell_peers);
    const ms_os *os = ms_engine_context(engine)->os;
    atomic_store(&line->process, os->process_id(os->user));
    ms_engine_context(engine)->activity = &line->activity;
    ms_death_watch(local);
    return MS_OK;
}
