/* fake.c: a world with one rank in it: every other rank brings what this one brings, so nothing
 * moves and nobody waits. */
#include "comm/flow.h"

#include <string.h>

static ms_task_result reduce_alike(ms_run *run, const ms_comm_args *args)
{
    const ms_group *group = args->group;
    char *memory = ms_thread_scratch(ms_run_thread(run), 3,
                                     group->size * (sizeof(char *) + sizeof(float))),
         *out = args->out;
    if (!memory) {
        ms_run_fail(run, MS_ERROR_MEMORY, "no memory for a fake group of %u ranks", group->size);
        return MS_TASK_FAILED;
    }
    const char **data = (const char **)(void *)memory;
    float *factors = (float *)(void *)(memory + group->size * sizeof *data);
    ms_flow flow = ms_flow_from(args, group->rank);
    for (uint32_t m = 0; m < group->size; m++) {
        data[m] = args->in + flow.from * ms_dtype_bytes(args->memory);
        factors[m] = (float)args->factor;
    }
    ms_flow_reduce(run, args, &(ms_sources){ .data = data, .factors = factors }, &out, 1,
                   flow.length);
    return MS_TASK_DONE;
}

/* All data are this rank's own; where its part for a member is shorter than what that member is
 * expected to send, the rest is zero. */
static ms_task_result run_alone(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    const ms_group *group = args->group;
    size_t item = ms_dtype_bytes(args->memory);
    if (args->kind >= MS_SEND || args->kind == MS_BROADCAST || !ms_flow_sink(args) || !args->in)
        return MS_TASK_DONE;
    if (ms_kind_reduces(args->kind)) return reduce_alike(run, args);
    for (uint32_t m = 0; m < group->size; m++) {
        if (!ms_flow_source(args, m)) continue;
        ms_flow flow = ms_flow_from(args, m),
                own = ms_flow_slot(args, ms_kind_parts(args->kind) ? group->rank : 0);
        uint64_t length = flow.length < own.length ? flow.length : own.length;
        ms_flow_copy(run, args->out + flow.to * item, args->in + flow.from * item, length * item);
        if (flow.length > length)
            memset(args->out + (flow.to + length) * item, 0, (flow.length - length) * item);
    }
    return MS_TASK_DONE;
}

static const ms_task tasks[MS_COLLECTIVES] = MS_COMM_TASKS(run_alone);

static ms_status split(ms_group *group, uint64_t list_hash, uint32_t parts, uint32_t *first_id)
{
    ms_comm *comm = group->comm;
    ms_comm_args args = { .counts_hash = list_hash };
    ms_collective collective = { .kind = MS_SPLIT, .bucket = -1 };
    if ((uint64_t)comm->fake_ids + parts > MS_GROUPS_MAX)
        return ms_engine_fail(comm->engine, MS_ERROR_STATE, "%u more groups: a job may have %d",
                              parts, MS_GROUPS_MAX);
    ms_status status = ms_group_issue(group, &args, &collective, NULL);
    if (status) return status;
    *first_id = comm->fake_ids;
    comm->fake_ids += parts;
    return MS_OK;
}

static ms_status join_group(ms_comm *comm, uint32_t id)
{
    (void)comm, (void)id;
    return MS_OK;
}
static ms_status storage(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out)
{
    (void)comm;
    return ms_storage_new(stream, bytes, out);
}
static ms_status check(ms_comm *comm)
{
    (void)comm;
    return MS_OK;
}
static uint64_t pair_number(ms_comm *comm, const ms_comm_args *args)
{
    (void)comm;
    return args->group->traffic[args->kind].calls + 1;
}
static ms_status prepare(ms_comm *comm, const ms_comm_args *args)
{
    (void)comm, (void)args;
    return MS_OK;
}
static void issued(ms_comm *comm, const ms_comm_args *args) { (void)comm, (void)args; }
static void leave(ms_comm *comm, const char *message) { (void)comm, (void)message; }
static void end(ms_comm *comm, const ms_error *error) { (void)comm, (void)error; }
static void nothing(ms_comm *comm) { (void)comm; }

const ms_comm_backend ms_comm_fake = {
    .tasks = tasks,
    .split = split,
    .join = join_group,
    .storage = storage,
    .check = check,
    .number = pair_number,
    .prepare = prepare,
    .issued = issued,
    .leave = leave,
    .abort = end,
    .progress = nothing,
    .close = nothing,
};

ms_status ms_comm_open_fake(ms_engine *engine, uint32_t rank, uint32_t size, ms_group **world)
{
    if (size < 1 || size > MS_FAKE_RANKS_MAX || rank >= size)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "rank %u of %u: a fake world has 1 to %d ranks, counted from 0", rank,
                              size, MS_FAKE_RANKS_MAX);
    if (ms_comm_of(engine))
        return ms_engine_fail(engine, MS_ERROR_STATE, "this engine belongs to a world already");
    return ms_comm_new(engine, &ms_comm_fake, NULL, rank, size, world);
}
