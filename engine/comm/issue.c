/* issue.c: the machine that all collectives go through: a call is described, counted and put on its
 * stream. */
#include "comm/issue.h"

#include <stdio.h>
#include <string.h>

#include "comm/control_table.h"
#include "comm/oob.h"
#include "comm/flow.h"
#include "comm/group.h"
#include "comm/names.h"
#include "comm/topology.h"
#include "comm/transport_table.h"
#include "exec/engine.h"
#include "exec/stream.h"
#include "tensor/op.h"

/* ----------------------------------------------------------------- accounts */

/* The bytes that a rank sends by the usual ring algorithms, whatever the transport does: 2 (s - 1)
 * / s of the whole for all_reduce, (s - 1) / s for what is gathered or cut, the whole for what
 * passes through every rank. The division comes first, so that no product overflows. It is what the
 * counters and the sim device use, so numbers can be compared between transports; what a transport
 * really sends may be more. */
static uint64_t wire_of(const ms_group *group, uint8_t kind, uint64_t whole)
{
    uint64_t size = group->size;
    /* Nothing is sent by a recv, and nothing within a group of one rank. */
    if (size == 1 || kind == MS_RECV) return 0;
    uint64_t others = whole / size * (size - 1) + whole % size * (size - 1) / size;
    switch (kind) {
    case MS_ALL_REDUCE:
        return 2 * (whole / size) * (size - 1) + 2 * (whole % size) * (size - 1) / size;
    case MS_BROADCAST:
    case MS_REDUCE:
    case MS_SEND: return whole;
    default: return others;
    }
}

/* Counts the call for its kind and for all kinds together. Counted when the call is launched and
 * not when it has run, hence equal on the sim device. */
static void account(ms_group *group, const ms_comm_args *args)
{
    ms_traffic *all[] = { &group->traffic[args->kind], &group->traffic[MS_COLLECTIVES] };
    for (int i = 0; i < 2; i++) {
        all[i]->calls++;
        all[i]->payload_bytes += args->payload_bytes;
        all[i]->wire_bytes += args->wire_bytes;
        all[i]->between_nodes_bytes += args->between_nodes_bytes;
    }
}

/* Index MS_COLLECTIVES is the sum. */
ms_traffic ms_group_traffic(const ms_group *group, ms_collective_kind kind)
{
    return group->traffic[kind];
}

ms_traffic ms_comm_traffic(const ms_engine *engine, ms_collective_kind kind)
{
    const ms_comm *comm = ms_comm_of(engine);
    ms_traffic sum = { 0 };
    if (comm) sum = comm->past[kind];
    for (uint32_t g = 0; comm && g < atomic_load(&comm->group_count); g++) {
        if (!comm->groups[g]) continue;
        const ms_traffic *one = &comm->groups[g]->traffic[kind];
        sum.calls += one->calls;
        sum.payload_bytes += one->payload_bytes;
        sum.wire_bytes += one->wire_bytes;
        sum.between_nodes_bytes += one->between_nodes_bytes;
    }
    return sum;
}

/* Tasks count while the host reads. */
uint64_t ms_group_bytes_between_nodes(const ms_group *group)
{
    return atomic_load_explicit(&group->between, memory_order_relaxed);
}

/* Recording starts again each time; `check` lists what is recorded. */
void ms_comm_record(ms_engine *engine, bool on)
{
    ms_comm *comm = ms_comm_of(engine);
    if (!comm) return;
    comm->recording = on;
    if (on) comm->record_count = 0;
}

/* 0 without a membership, so that callers need not ask for one first. */
size_t ms_comm_record_count(const ms_engine *engine)
{
    const ms_comm *comm = ms_comm_of(engine);
    return comm ? comm->record_count : 0;
}

/* Borrowed until the next collective, which may move the list. */
const ms_collective_record *ms_comm_record_get(const ms_engine *engine, size_t index)
{
    const ms_comm *comm = ms_comm_of(engine);
    return comm && index < comm->record_count ? &comm->records[index] : NULL;
}

/* Ranks whose hashes differ have issued different sequences. Labels and script lines are left out,
 * because ranks may differ in them. */
uint64_t ms_comm_order_hash(const ms_engine *engine)
{
    const ms_comm *comm = ms_comm_of(engine);
    uint64_t hash = 0;
    for (size_t i = 0; comm && i < comm->record_count; i++) {
        const ms_collective_record *r = &comm->records[i];
        /* Groups by name, since their addresses differ from rank to rank. */
        uint64_t fields[] = { r->kind,
                              r->op,
                              r->dtype,
                              r->count,
                              r->channel,
                              r->root,
                              (uint64_t)(int64_t)r->bucket,
                              ms_hash(r->group->name, strlen(r->group->name), 0) };
        hash = ms_hash(fields, sizeof fields, hash);
    }
    return hash;
}

/* --------------------------------------------------------------- enqueueing */

/* The stream waits for the tasks that use these elements: for writers where the call reads, for
 * readers too where it writes. The waits are explicit, because strict mode reports a task that has
 * none. */
static ms_status wait_for_uses(ms_stream *stream, const ms_tensor *tensor, bool written)
{
    ms_point points[MS_STREAMS_MAX];
    if (!tensor) return MS_OK;
    size_t begin = (size_t)ms_tensor_offset(tensor) * ms_dtype_bytes(ms_tensor_dtype(tensor)),
           end = begin + ms_tensor_bytes(tensor);
    const ms_storage *storage = ms_tensor_storage(tensor);
    uint32_t count = written ? ms_storage_users(storage, begin, end, points)
                             : ms_storage_writers(storage, begin, end, points);
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) status = ms_stream_wait(stream, points[i]);
    return status;
}

/* By the family of the device's kernels. */
bool ms_comm_runs_on_host(const ms_comm *comm)
{
    return strcmp(ms_engine_device_of(comm->engine)->kernels, "cpu") == 0;
}

/* Memory that is kept until the task is done; what tasks that are done have kept is freed on the
 * way. The list grows before the task is enqueued, because nothing may fail after that. */
static ms_status hold(ms_comm *comm, size_t bytes, const char *what, void **held)
{
    ms_context *context = ms_engine_context(comm->engine);
    size_t kept = 0;
    /* Copies whose task has run are freed now, so the list is as long as calls are under way. */
    for (size_t i = 0; i < comm->held_count; i++)
        if (ms_point_reached(comm->engine, comm->held[i].point))
            ms_release(context, comm->held[i].memory);
        else comm->held[kept++] = comm->held[i];
    comm->held_count = kept;
    ms_status status =
        ms_grow(context, (void **)&comm->held, &comm->held_capacity, kept + 1, sizeof *comm->held);
    return status ? status : ms_allocate(context, bytes, what, held);
}

/* The caller's lists of counts may be gone before the task runs. Counts of tasks cannot be in the
 * arguments, whose size is fixed. A call of control without a task of the device needs its
 * arguments until it has run. */
static ms_status hold_arguments(ms_comm *comm, const ms_collective *c, ms_comm_args *args,
                                void **held)
{
    size_t one = args->group->size * sizeof(int64_t);
    if (args->out_of_band)
        return ms_comm_runs_on_host(comm) || !args->group->control->has_others
                   ? MS_OK
                   : hold(comm, sizeof(ms_oob_call), "numbers of hosts", held);
    if (!c->counts) return MS_OK;
    ms_status status = hold(comm, 2 * one, "counts", held);
    if (status) return status;
    int64_t *copy = memcpy(*held, c->counts, one);
    args->counts = copy;
    if (c->receive_counts)
        args->receive_counts = memcpy(copy + args->group->size, c->receive_counts, one);
    return MS_OK;
}

/* The point that the collective comes after. Collectives of a channel run one after the other, as
 * their phases and staging areas demand; so do all sends of a rank, and all its receives. Sends
 * have one sequence for all peers, as they share one staging area. */
static ms_point *place_of(ms_group *group, const ms_comm_args *args)
{
    if (args->kind == MS_SEND) return &group->comm->last_send;
    if (args->kind == MS_RECV) return &group->comm->last_receive;
    return &group->channels[args->channel].last;
}

/* A caller may give the stream: links run on the stream of their bucket. Sends and receives have a
 * stream each: on one stream, two ranks that each receive before they send would wait for each
 * other. */
static ms_status choose_stream(ms_group *group, const ms_comm_args *args, const ms_collective *c,
                               ms_stream **out)
{
    ms_engine *engine = group->comm->engine;
    *out = c->stream;
    if (c->stream) return MS_OK;
    /* A stream with functions of the host costs a GPU's device a thread: one is for all groups,
     * whose calls have the same order on all ranks. */
    if (args->out_of_band && !ms_comm_runs_on_host(group->comm))
        return ms_engine_stream_with(engine, "numbers", MS_PRIORITY_HIGH, out);
    /* The two streams of sends and receives are this rank's, not the group's. */
    if (ms_kind_is_pair(args->kind))
        return ms_engine_stream_with(engine, args->kind == MS_SEND ? "send" : "recv",
                                     MS_PRIORITY_HIGH, out);
    return ms_group_stream(group, args->channel + 1u, out);
}

_Static_assert((int)MS_ALL_REDUCE == MS_COST_ALL_REDUCE, "devices know it by its number");

/* What the device is told about a collective: how much it moves, and between which ranks. There are
 * no FLOPs: the reduction is bound by the bytes. */
static ms_task_cost cost_of(const ms_comm_args *args)
{
    const ms_group *group = args->group;
    ms_task_cost cost = { .bytes = args->payload_bytes,
                          .wire_bytes = args->wire_bytes,
                          .ranks = group->size,
                          .first_rank = group->lowest,
                          .last_rank = group->highest,
                          .collective = args->kind };
    /* Only two ranks take part, whatever the group. */
    if (ms_kind_is_pair(args->kind)) {
        uint32_t own = group->members[group->rank], peer = group->members[args->root];
        cost.ranks = 2;
        cost.first_rank = own < peer ? own : peer;
        cost.last_rank = own < peer ? peer : own;
    }
    return cost;
}

/* Whether the call writes the tensor `in` on this rank; then the task declares a write of it, and
 * later readers wait. Elsewhere `in` is only read, and readers do not wait for each other. */
static bool writes_in(const ms_comm_args *args)
{
    if (args->kind == MS_RECV) return true;
    bool may = args->kind == MS_ALL_REDUCE || args->kind == MS_REDUCE || args->kind == MS_BROADCAST;
    return may && args->in && args->in == args->out && ms_flow_sink(args);
}

/* What a trace calls the task. Without a trace no text is made. */
static uint32_t trace_label(const ms_comm *comm, const ms_comm_args *args)
{
    const char *comma = *args->label ? ", " : "";
    if (args->bucket >= 0)
        return ms_trace_label(comm->engine, "bucket %d%s%s", args->bucket, comma, args->label);
    return ms_trace_label(comm->engine, "%s%s%s", args->group->name, comma, args->label);
}

/* The transport's task for the engine's device. */
static const ms_task *task_of(const ms_comm *comm, const ms_comm_args *args)
{
    const ms_transport *transport = args->group->transport;
    if (transport->other
        && strcmp(transport->other->family, ms_engine_device_of(comm->engine)->kernels) == 0)
        return transport->other->tasks[args->kind];
    return &transport->tasks[args->kind];
}

/* A call of control. It touches no storage, so no wait comes between it and the number before.
 * Without others there is nothing to carry, and the call only takes its place. */
static ms_status enqueue_out_of_band(ms_comm *comm, ms_stream *stream, const ms_comm_args *args,
                                     ms_oob_call *carry)
{
    const ms_task *task = &args->group->control->tasks[args->kind];
    if (ms_comm_runs_on_host(comm))
        return ms_stream_enqueue(stream, task, args, NULL, 0, cost_of(args), NULL);
    if (carry)
        *carry = (ms_oob_call){ .stream = stream,
                                .task = task,
                                .seq = ms_stream_last(stream).seq + 1,
                                .script = ms_engine_script(comm->engine),
                                .args = *args };
    ms_host_call call = {
        .name = task->name, .function = ms_comm_carry, .user = carry, .kind = task->kind
    };
    return ms_stream_call(stream, &call, NULL, 0, cost_of(args), NULL);
}

/* A call of the transport. The write is counted as a restore from its source while that is set. */
static ms_status enqueue_of_tensors(ms_comm *comm, const ms_comm_args *args, const ms_collective *c)
{
    bool in_place = writes_in(args);
    ms_tensor *reads[] = { in_place ? NULL : c->in };
    ms_tensor *writes[] = { in_place ? c->in : c->out };
    if (c->restore) ms_tensor_restoring(comm->engine, c->out, c->source ? c->source : c->in);
    ms_status status = ms_tensor_enqueue(comm->engine, task_of(comm, args), args, reads, 1, writes,
                                         1, cost_of(args));
    if (c->restore) ms_tensor_restoring(comm->engine, NULL, NULL);
    return status;
}

/* Enqueues the task with the stream current for the moment, and puts the current stream and the
 * trace's label back also after a failure. What ranks exchange out of band is carried by control
 * and never by the network. held: see hold_arguments. */
static ms_status put_on_stream(ms_comm *comm, ms_stream *stream, const ms_comm_args *args,
                               const ms_collective *c, void *held)
{
    ms_status status = ms_stream_wait(stream, *place_of(args->group, args));
    if (!status) status = wait_for_uses(stream, c->in, writes_in(args));
    if (!status) status = wait_for_uses(stream, c->out, true);
    if (status) return status;
    ms_stream *before = ms_engine_set_current(comm->engine, stream);
    uint32_t label = trace_label(comm, args);
    status = args->out_of_band ? enqueue_out_of_band(comm, stream, args, held)
                               : enqueue_of_tensors(comm, args, c);
    ms_trace_relabel(comm->engine, label);
    ms_engine_set_current(comm->engine, before);
    return status;
}

/* All that can fail for this rank alone has been done, but for the launch itself. The claim comes
 * first, because peers must be able to compare before anything is launched; a claim whose launch
 * fails is taken back, or peers would wait for a call that never comes. */
static ms_status launch(ms_comm *comm, ms_stream *stream, const ms_comm_args *args,
                        const ms_collective *c, void *held)
{
    const ms_control *control = args->group->control;
    ms_status status = control->claim(comm, args);
    if (status) return status;
    status = put_on_stream(comm, stream, args, c, held);
    if (status) control->retract(comm, args);
    return status;
}

/* Fills the next record; note_call counts it once the call is launched. */
static ms_status add_record(ms_comm *comm, const ms_comm_args *args, const ms_collective *c)
{
    ms_context *context = ms_engine_context(comm->engine);
    uint32_t label = 0;
    if (!comm->recording) return MS_OK;
    ms_status status = ms_grow(context, (void **)&comm->records, &comm->record_capacity,
                               comm->record_count + 1, sizeof *comm->records);
    if (!status && c->label && *c->label)
        status =
            ms_strings_add(ms_engine_strings(comm->engine), c->label, strlen(c->label), &label);
    if (status) return status;
    comm->records[comm->record_count] =
        (ms_collective_record){ .kind = c->kind,
                                .op = args->op,
                                .dtype = args->dtype,
                                .count = args->count,
                                .payload_bytes = args->payload_bytes,
                                .wire_bytes = args->wire_bytes,
                                .between_nodes_bytes = args->between_nodes_bytes,
                                .group = args->group,
                                .channel = args->channel + 1u,
                                .root = args->root,
                                .bucket = args->bucket,
                                .label = label,
                                .script = ms_engine_script(comm->engine) };
    return MS_OK;
}

/* Addresses and dtypes. `travels` makes numbers of f32 memory 16-bit numbers on their way.
 * Addresses are read now and kept in the task: a storage that is dropped and refilled later is
 * elsewhere, but a task that is enqueued keeps its memory. */
static void describe_tensors(const ms_collective *c, ms_comm_args *args)
{
    const ms_tensor *any = c->in ? c->in : c->out;
    if (!any) return;
    args->memory = (uint8_t)ms_tensor_dtype(any);
    args->dtype = c->travels != MS_F32 ? (uint8_t)c->travels : args->memory;
    args->in = c->in ? ms_tensor_data(c->in) : NULL;
    args->out = c->out ? ms_tensor_data(c->out) : args->in;
    /* A recv's tensor is filled and not handed in. */
    if (c->in && c->kind != MS_RECV)
        args->payload_bytes = (uint64_t)ms_tensor_count(c->in) * ms_dtype_bytes(args->dtype);
}

/* What ranks must agree on beside the fields of the call: how it is cut, and where results go. A
 * hash of counts is odd, and so never 0, which represents no counts. all_to_all by counts: the
 * counts differ, and each rank tells the others its longest part. */
static void describe_counts(const ms_group *group, const ms_collective *c, ms_comm_args *args)
{
    args->by_counts = c->counts != NULL;
    args->everywhere_in_place = c->kind == MS_ALL_REDUCE && !c->out;
    if (c->counts && c->kind != MS_ALL_TO_ALL)
        args->counts_hash = ms_hash(c->counts, group->size * sizeof *c->counts, 0) | 1;
    else if (c->counts) args->counts_hash = 1;
    else if (c->kind == MS_ALL_REDUCE && c->out) args->counts_hash = 2;
    else if (args->dtype != args->memory) args->counts_hash = 3;
    else if (ms_kind_is_pair(args->kind) && c->label && *c->label)
        args->counts_hash = ms_hash(c->label, strlen(c->label), 0) | 1;
    for (uint32_t m = 0; c->kind == MS_ALL_TO_ALL && c->counts && m < group->size; m++)
        if ((uint64_t)c->counts[m] > args->value) args->value = (uint64_t)c->counts[m];
}

/* Fills the arguments that do not depend on lengths. */
static void describe(ms_group *group, const ms_collective *c, ms_comm_args *args)
{
    ms_engine *engine = group->comm->engine;
    args->group = group;
    args->kind = (uint8_t)c->kind;
    args->op = ms_kind_reduces(args->kind) ? (uint8_t)c->op : 0;
    describe_tensors(c, args);
    args->rooted = ms_kind_has_root(args->kind) || ms_kind_is_pair(args->kind);
    args->root = args->rooted ? c->root : 0;
    args->bucket = c->bucket;
    args->fixed_address = c->fixed_address;
    args->timeout_ns = c->timeout_ns;
    args->factor = c->factor;
    describe_counts(group, c, args);
    snprintf(args->label, sizeof args->label, "%s", c->label ? c->label : "");
    ms_copy_tail(args->script, sizeof args->script,
                 ms_strings_get(ms_engine_strings(engine), ms_engine_script(engine)));
}

/* How many calls this rank has made in all groups that contain this one. All members have made the
 * same calls there, so ranks that call in a different order have different numbers. A group made
 * later on one rank than on another would be a difference too, but splits are collectives
 * themselves. */
static uint64_t calls_around(const ms_group *group)
{
    const ms_comm *comm = group->comm;
    uint64_t calls = 0;
    for (uint32_t word = 0; word < MS_GROUP_WORDS; word++) /* Clears the lowest bit in each turn. */
        for (uint64_t bits = group->around[word]; bits; bits &= bits - 1) {
            const ms_group *outer = comm->groups[word * 64 + (uint32_t)__builtin_ctzll(bits)];
            for (uint32_t c = 0; c < MS_CHANNELS; c++) calls += outer->channels[c].number;
        }
    return calls;
}

/* Refuses what the group's transport cannot do, on every rank alike and before the call is
 * claimed. */
static ms_status check_transport(const ms_group *group, const ms_comm_args *args)
{
    ms_engine *engine = group->comm->engine;
    const ms_transport *transport = group->transport;
    const char *kind = ms_collective_name((ms_collective_kind)args->kind), *name = transport->name,
               *dtype = ms_dtype_name((ms_dtype)args->dtype),
               *op = ms_reduce_op_name((ms_reduce_op)args->op);
    /* In the order in which the message helps most: operation, dtype, reduction, rounding. */
    if (!(transport->kinds & 1u << args->kind))
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "%s: the transport \"%s\" has no such operation", kind, name);
    if (!(transport->dtypes & 1u << args->dtype))
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "%s of %s: the transport \"%s\" does not move %s: cast first", kind,
                              dtype, name, dtype);
    if (!ms_kind_reduces(args->kind)) return MS_OK;
    if (!(transport->ops & 1u << args->op) || !(transport->reduced_dtypes & 1u << args->dtype))
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "%s of %s by %s: the transport \"%s\" does not reduce %s by %s: use "
                              "another dtype or operation, or gather and reduce",
                              kind, dtype, op, name, dtype, op);
    if (args->dtype != args->memory && !transport->rounds)
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "%s of f32 rounded to %s: the transport \"%s\" does not round: cast "
                              "first",
                              kind, dtype, name);
    return MS_OK;
}

/* All that the transport may refuse, or needs to do, before the call gets a number: a refused call
 * must not count, since peers refuse it alike. `prepared` is per group: a transport makes a
 * communicator once. */
static ms_status prepare_transport(ms_group *group, const ms_comm_args *args)
{
    if (args->out_of_band) return MS_OK;
    ms_status status = check_transport(group, args);
    if (status || group->prepared || !group->transport->prepare) return status;
    if (ms_kind_is_pair(args->kind))
        return ms_engine_fail(group->comm->engine, MS_ERROR_STATE,
                              "%s: the transport \"%s\" begins in a group with a call of all its "
                              "members, and %s has made none: make a barrier first",
                              ms_collective_name((ms_collective_kind)args->kind),
                              group->transport->name, group->name);
    /* It may share numbers with the members, which uses channel "numbers" and so does not come back
     * here. */
    status = group->transport->prepare(group);
    group->prepared = status == MS_OK;
    return status;
}

/* The call's number, and its place among the calls of all groups around this one. The number is not
 * counted yet: it is this call's only once it is launched. */
void ms_group_number_call(ms_group *group, ms_comm_args *args)
{
    bool is_pair = ms_kind_is_pair(args->kind);
    args->number = is_pair ? group->control->number(group->comm, args)
                           : group->channels[args->channel].number + 1;
    args->turn = is_pair ? group->messages[ms_pair_is_upward(args) ? 0 : 1] + 1 : 0;
    args->order = calls_around(group);
    args->wire_bytes = wire_of(group, args->kind, args->count * ms_dtype_bytes(args->dtype));
}

/* Sends and receives are calls of two members, of which the others know nothing. */
static bool may_be_graph(const ms_comm_args *args)
{
    return args->fixed_address && args->group->comm->has_graphs && args->group->transport->choose
           && !args->out_of_band && !args->by_counts && args->count > 0
           && !ms_kind_is_pair(args->kind);
}

/* Once args has the counts. */
static void count_between(const ms_group *group, ms_comm_args *args)
{
    if (group->topology)
        args->between_nodes_bytes =
            ms_bytes_between(group->topology, args, group->comm->sum_by_ranks);
}

/* After the launch: nothing can fail any more. held: copies of counts, or NULL. */
static void note_call(ms_group *group, const ms_comm_args *args, void *held, ms_point point)
{
    ms_comm *comm = group->comm;
    if (held) comm->held[comm->held_count++] = (ms_held){ .point = point, .memory = held };
    if (!ms_kind_is_pair(args->kind)) group->channels[args->channel].number++;
    else {
        group->messages[ms_pair_is_upward(args) ? 0 : 1]++;
        group->last_message[args->kind == MS_SEND ? 0 : 1] = point;
    }
    if (comm->recording) comm->record_count++;
    /* The next call of the channel comes after this one, on whatever stream. */
    *place_of(group, args) = point;
    group->control->launched(comm, args);
    if (may_be_graph(args)) group->transport->chosen(args);
    account(group, args);
}

/* Peers refuse a call that fails here as this rank does, so it gets no number. */
ms_status ms_group_prepare(ms_group *group, ms_comm_args *args, const ms_collective *c)
{
    describe(group, c, args);
    /* A job that has ended takes no further call. */
    ms_status status = ms_comm_verify(group->comm);
    if (!status) status = ms_group_place(group);
    return status ? status : prepare_transport(group, args);
}

/* The order matters: everything that can fail on this rank alone comes before the claim (memory,
 * stream, record, copies), and everything after the launch cannot fail. So a rank's numbers always
 * fit what its peers have seen. */
ms_status ms_group_issue(ms_group *group, ms_comm_args *args, const ms_collective *c,
                         ms_point *ready)
{
    ms_comm *comm = group->comm;
    ms_stream *stream = NULL;
    void *held = NULL;
    ms_group_number_call(group, args);
    if (may_be_graph(args)) group->transport->choose(args);
    ms_status status = group->control->prepare(comm, args);
    if (!status) status = choose_stream(group, args, c, &stream);
    if (!status) status = hold_arguments(comm, c, args, &held);
    if (!status) count_between(group, args);
    if (!status) status = add_record(comm, args, c);
    if (!status) status = launch(comm, stream, args, c, held);
    if (status) {
        ms_release(ms_engine_context(comm->engine), held);
        return status;
    }
    /* Taken at once: the host enqueues nothing in between. */
    ms_point point = ms_stream_last(stream);
    /* A barrier moves next to nothing. */
    if (group->size > 1 && !args->out_of_band && args->kind != MS_BARRIER && comm->multiprocessors)
        ms_stream_take(stream, comm->multiprocessors);
    note_call(group, args, held, point);
    if (ready) *ready = point;
    return MS_OK;
}
