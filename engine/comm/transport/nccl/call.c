/* call.c: the tasks: each collective as calls of NCCL. */
#include "comm/transport/nccl/call.h"

#include <stdio.h>
#include <string.h>

#include "comm/flow.h"
#include "comm/transport/nccl/communicator.h"
#include "comm/transport/nccl/watchdog.h"

/* A call on its way. `function` and `result` are of the first function that did not succeed. */
typedef struct launch {
    ms_nccl *nccl;
    const ms_nccl_api *api;
    ms_communicator *to;
    const ms_comm_args *args;
    void *stream;  /* the device's; NULL where the library carries host memory */
    float *number; /* of a barrier */
    ms_nccl_dtype dtype;
    size_t units; /* of dtype in one element */
    size_t item;  /* bytes of an element */
    const char *function;
    ms_nccl_result result;
} launch;

/* NCCL has no u16 and no bool: they move as bytes. */
static void choose_dtype(launch *l)
{
    static const ms_nccl_dtype dtypes[MS_DTYPES] = {
        [MS_F32] = MS_NCCL_FLOAT32, [MS_F16] = MS_NCCL_FLOAT16, [MS_BF16] = MS_NCCL_BFLOAT16,
        [MS_I64] = MS_NCCL_INT64,   [MS_I32] = MS_NCCL_INT32,   [MS_U16] = MS_NCCL_UINT8,
        [MS_U8] = MS_NCCL_UINT8,    [MS_BOOL] = MS_NCCL_UINT8
    };
    l->dtype = dtypes[l->args->dtype];
    l->item = ms_dtype_bytes((ms_dtype)l->args->dtype);
    l->units = l->args->dtype == MS_U16 ? l->item : 1;
}

/* Of bools, which are 0 or 1, "or" is the larger one and "and" the smaller one. */
static ms_nccl_op op_of(const ms_comm_args *args)
{
    static const ms_nccl_op ops[MS_REDUCE_OPS] = { [MS_REDUCE_OP_SUM] = MS_NCCL_SUM,
                                                   [MS_REDUCE_OP_AVG] = MS_NCCL_AVG,
                                                   [MS_REDUCE_OP_MIN] = MS_NCCL_MIN,
                                                   [MS_REDUCE_OP_MAX] = MS_NCCL_MAX,
                                                   [MS_REDUCE_OP_PROD] = MS_NCCL_PROD };
    if (args->dtype == MS_BOOL && args->op == MS_REDUCE_OP_SUM) return MS_NCCL_MAX;
    if (args->dtype == MS_BOOL && args->op == MS_REDUCE_OP_PROD) return MS_NCCL_MIN;
    return ops[args->op];
}

/* Notes what a function has returned; false: nothing more is called, but for the end of a group. */
static bool note(launch *l, const char *function, ms_nccl_result result)
{
    if (l->result) return false;
    if (result && result != MS_NCCL_IN_PROGRESS) {
        l->function = function;
        l->result = result;
    }
    return !l->result;
}

/* The same for a function that is by itself: waits until it has succeeded. */
static bool finish(launch *l, const char *function, ms_nccl_result result)
{
    if (l->result) return false;
    result = ms_nccl_settle(l->nccl, l->to, result);
    if (!result) return true;
    l->function = function;
    l->result = result;
    return false;
}

/* ------------------------------------------------------------ collectives */

/* A sum of one element, whose result is not used: it ends once all members have come. */
static void run_barrier(launch *l)
{
    finish(l, "ncclAllReduce",
           l->api->all_reduce(l->number, l->number, 1, MS_NCCL_FLOAT32, MS_NCCL_SUM, l->to->handle,
                              l->stream));
}

/* Counts cut the tensor into parts of different lengths, of which NCCL knows nothing: each part is
 * a reduction to its rank, and all of them run as one. */
static void reduce_parts(launch *l, ms_nccl_op op)
{
    const ms_comm_args *args = l->args;
    if (!note(l, "ncclGroupStart", l->api->group_start())) return;
    for (uint32_t m = 0; m < args->group->size; m++) {
        ms_flow part = ms_flow_slot(args, m);
        const char *from = args->in + part.from * l->item;
        void *to = m == args->group->rank ? args->out : (void *)(uintptr_t)from;
        if (part.length
            && !note(l, "ncclReduce",
                     l->api->reduce(from, to, part.length, l->dtype, op, (int)m, l->to->handle,
                                    l->stream)))
            break;
    }
    finish(l, "ncclGroupEnd", l->api->group_end());
}

static void reduce_by(launch *l, ms_nccl_op op)
{
    const ms_comm_args *args = l->args;
    void *to = l->to->handle;
    if (args->kind == MS_ALL_REDUCE)
        finish(l, "ncclAllReduce",
               l->api->all_reduce(args->in, args->out, args->count, l->dtype, op, to, l->stream));
    else if (args->kind == MS_REDUCE)
        finish(l, "ncclReduce",
               l->api->reduce(args->in, args->out, args->count, l->dtype, op, (int)args->root, to,
                              l->stream));
    else if (args->by_counts) reduce_parts(l, op);
    else
        finish(l, "ncclReduceScatter",
               l->api->reduce_scatter(args->in, args->out, args->count / args->group->size,
                                      l->dtype, op, to, l->stream));
}

/* The factor as a number of the tensor's dtype, as NCCL wants it. */
static void *scalar_of(const ms_comm_args *args, void *room)
{
    float factor = (float)args->factor;
    uint16_t half = args->dtype == MS_F16 ? ms_f16_from_float(factor) : ms_bf16_from_float(factor);
    if (args->dtype == MS_F32) memcpy(room, &factor, sizeof factor);
    else memcpy(room, &half, sizeof half);
    return room;
}

/* An operation with a factor is made for the call, and may go as soon as the call has been
 * launched. */
static void run_reduction(launch *l)
{
    char room[sizeof(float)];
    ms_nccl_op op = op_of(l->args);
    bool own = l->args->op == MS_REDUCE_OP_PREMUL_SUM;
    if (own
        && !finish(l, "ncclRedOpCreatePreMulSum",
                   l->api->op_create_pre_mul_sum(&op, scalar_of(l->args, room), l->dtype,
                                                 MS_NCCL_SCALAR_ON_HOST, l->to->handle)))
        return;
    reduce_by(l, op);
    if (own && !l->result) finish(l, "ncclRedOpDestroy", l->api->op_destroy(op, l->to->handle));
}

/* Parts of different lengths are broadcasts from their ranks, all as one. */
static void gather_parts(launch *l)
{
    const ms_comm_args *args = l->args;
    if (!note(l, "ncclGroupStart", l->api->group_start())) return;
    for (uint32_t m = 0; m < args->group->size; m++) {
        ms_flow part = ms_flow_from(args, m);
        char *to = args->out + part.to * l->item;
        const char *from = m == args->group->rank ? args->in : to;
        if (part.length
            && !note(l, "ncclBroadcast",
                     l->api->broadcast(from, to, part.length * l->units, l->dtype, (int)m,
                                       l->to->handle, l->stream)))
            break;
    }
    finish(l, "ncclGroupEnd", l->api->group_end());
}

static void run_all_gather(launch *l)
{
    const ms_comm_args *args = l->args;
    if (args->by_counts) gather_parts(l);
    else
        finish(l, "ncclAllGather",
               l->api->all_gather(args->in, args->out, args->count / args->group->size * l->units,
                                  l->dtype, l->to->handle, l->stream));
}

static void run_broadcast(launch *l)
{
    const ms_comm_args *args = l->args;
    finish(l, "ncclBroadcast",
           l->api->broadcast(args->in, args->in, args->count * l->units, l->dtype, (int)args->root,
                             l->to->handle, l->stream));
}

/* --------------------------------------------------- messages between ranks */

/* Whether this rank brings a part for that member. */
static bool gives(const ms_comm_args *args, uint32_t member)
{
    if (args->kind == MS_GATHER) return member == args->root;
    return args->kind == MS_ALL_TO_ALL || args->group->rank == args->root;
}

/* What goes to and comes from one member; a part that is in its place already does not move. */
static bool exchange_with(launch *l, uint32_t member)
{
    const ms_comm_args *args = l->args;
    ms_flow out = ms_flow_slot(args, args->kind == MS_GATHER ? 0 : member),
            in = ms_flow_from(args, member);
    const char *from = args->in + out.from * l->item;
    char *to = args->out + in.to * l->item;
    bool is_self = member == args->group->rank, sends = gives(args, member),
         gets = ms_flow_sink(args) && ms_flow_source(args, member);
    if (is_self && from == to) return true;
    if (sends && out.length
        && !note(l, "ncclSend",
                 l->api->send(from, out.length * l->units, l->dtype, (int)member, l->to->handle,
                              l->stream)))
        return false;
    return !gets || !in.length
           || note(l, "ncclRecv",
                   l->api->receive(to, in.length * l->units, l->dtype, (int)member, l->to->handle,
                                   l->stream));
}

/* gather, scatter and all_to_all: messages between all who have something for each other, which
 * NCCL carries all at once. */
static void run_exchange(launch *l)
{
    const ms_group *group = l->args->group;
    if (!note(l, "ncclGroupStart", l->api->group_start())) return;
    for (uint32_t m = 0; m < group->size && exchange_with(l, m); m++) {}
    finish(l, "ncclGroupEnd", l->api->group_end());
}

static void run_message(launch *l)
{
    const ms_comm_args *args = l->args;
    size_t units = args->count * l->units;
    int peer = (int)args->root;
    if (args->kind == MS_SEND)
        finish(l, "ncclSend",
               l->api->send(args->in, units, l->dtype, peer, l->to->handle, l->stream));
    else
        finish(l, "ncclRecv",
               l->api->receive(args->in, units, l->dtype, peer, l->to->handle, l->stream));
}

/* ------------------------------------------------------------------ tasks */

ms_communicator *ms_nccl_communicator_of(const ms_comm_args *args)
{
    ms_nccl_group *own = args->group->transport_state;
    if (!ms_kind_is_pair(args->kind)) return &own->communicators[args->channel];
    return &own->communicators[ms_pair_is_upward(args) ? MS_NCCL_UPWARD : MS_NCCL_DOWNWARD];
}

/* All ranks agree in count, so all leave out a call that moves nothing. By counts, the longer side
 * of an all_to_all is counted, and a rank whose parts are empty may be alone. */
static void carry_out(launch *l)
{
    const ms_comm_args *args = l->args;
    bool is_empty = args->count == 0 && args->kind != MS_BARRIER && args->kind != MS_ALL_TO_ALL;
    ms_nccl_result result = ms_nccl_register(l->nccl, args->group->transport_state, l->to);
    if (!finish(l, "ncclCommRegister", result) || is_empty) return;
    choose_dtype(l);
    switch (args->kind) {
    case MS_BARRIER: run_barrier(l); break;
    case MS_ALL_REDUCE:
    case MS_REDUCE:
    case MS_REDUCE_SCATTER: run_reduction(l); break;
    case MS_ALL_GATHER: run_all_gather(l); break;
    case MS_BROADCAST: run_broadcast(l); break;
    case MS_SEND:
    case MS_RECV: run_message(l); break;
    default: run_exchange(l); break;
    }
}

void ms_nccl_end_of(const ms_comm_args *args, ms_error *out)
{
    char where[256];
    ms_abort_record cause = { .reason = MS_ABORT_NONE };
    *out = (ms_error){ .status = MS_ERROR_ABORTED, .rank = -1, .message = "the job has ended" };
    (void)ms_nccl_job_ended(args->group->comm->transport_state, &cause);
    if (cause.reason != MS_ABORT_NONE) *out = cause.error;
    int32_t rank = out->rank;
    ms_nccl_name(args, where, sizeof where, out);
    out->rank = rank;
}

/* The cause of the job's end is this call's error; before there is one, what NCCL has said is. */
static void explain(const launch *l, ms_error *out)
{
    char where[256];
    ms_nccl_end_of(l->args, out);
    if (ms_nccl_job_ended(l->nccl, NULL)) return;
    ms_nccl_name(l->args, where, sizeof where, NULL);
    ms_nccl_explain(l->nccl, l->function, l->result, where, out);
}

/* The watchdog counts the time of the call that has the turn, until it is over or on the stream. */
bool ms_nccl_begin_call(const ms_comm_args *args, ms_error *error)
{
    ms_nccl *nccl = args->group->comm->transport_state;
    ms_communicator *to = ms_nccl_communicator_of(args);
    if (ms_nccl_take(nccl, to, args)) {
        ms_nccl_watch(nccl, to, args);
        return true;
    }
    ms_nccl_end_of(args, error);
    return false;
}

void ms_nccl_end_call(const ms_comm_args *args)
{
    ms_communicator *to = ms_nccl_communicator_of(args);
    ms_nccl_watch_ended(to);
    if (args->turn) atomic_store(&to->served, args->turn);
    ms_nccl_give(to);
}

bool ms_nccl_put(const ms_comm_args *args, void *stream, float *number, ms_error *error)
{
    ms_nccl *nccl = args->group->comm->transport_state;
    launch l = { .nccl = nccl,
                 .api = &nccl->api,
                 .to = ms_nccl_communicator_of(args),
                 .args = args,
                 .stream = stream,
                 .number = number };
    carry_out(&l);
    if (l.result) explain(&l, error);
    return l.result == MS_NCCL_SUCCESS;
}

/* On the thread of its stream, as a library for tests has it: the call is over when NCCL reports
 * success. */
static ms_task_result run(ms_run *run, void *arguments)
{
    ms_error error;
    const ms_comm_args *args = arguments;
    ms_comm *comm = args->group->comm;
    const ms_control *control = args->group->control;
    ms_nccl_group *group = args->group->transport_state;
    float *number = args->kind == MS_BARRIER ? &group->barriers[args->channel] : NULL;
    bool is_over = ms_nccl_begin_call(args, &error);
    if (is_over) {
        uint64_t place = control->entered(comm, args);
        is_over = ms_nccl_put(args, NULL, number, &error);
        if (is_over) control->landed(comm, place);
        ms_nccl_end_call(args);
    }
    if (is_over) return MS_TASK_DONE;
    ms_run_fail(run, error.status, "%s", error.message);
    ms_error *own = ms_run_error(run);
    memcpy(own->operation, error.operation, sizeof own->operation);
    own->collective = error.collective;
    own->bucket = error.bucket;
    own->rank = error.rank;
    return MS_TASK_FAILED;
}

const ms_task ms_nccl_tasks[MS_COLLECTIVES] = MS_COMM_TASKS(run);
