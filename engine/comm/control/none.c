/* none.c: the control of a rank that has no others: it has nothing to agree on, and waits for no
 * rank. */
#include "comm/control_table.h"

/* No other rank can end the job, and this one knows its own errors. */
static ms_status check(ms_comm *comm)
{
    (void)comm;
    return MS_OK;
}

/* Numbers are this rank's own, the lowest that are free. */
static void take_ids(ms_comm *comm, uint32_t parts, ms_ids *ids)
{
    for (uint32_t id = 1; id < MS_GROUPS_MAX && parts > 0; id++) {
        if (ms_ids_has(&comm->own_ids, id)) continue;
        ms_ids_add(&comm->own_ids, id);
        ms_ids_add(ids, id);
        parts--;
    }
}

static void give_ids(ms_comm *comm, const ms_ids *ids)
{
    for (int w = 0; w < MS_GROUPS_MAX / 64; w++) comm->own_ids.words[w] &= ~ids->words[w];
}

/* There are no lines of a group to make room for. */
static ms_status join_group(ms_comm *comm, uint32_t id)
{
    (void)comm, (void)id;
    return MS_OK;
}

/* Sends and receives are counted by the group's traffic, since there is no peer to number with. */
static uint64_t pair_number(ms_comm *comm, const ms_comm_args *args)
{
    (void)comm;
    return args->group->traffic[args->kind].calls + 1;
}

/* For prepare and claim: nobody compares this call with another. */
static ms_status agree(ms_comm *comm, const ms_comm_args *args)
{
    (void)comm, (void)args;
    return MS_OK;
}

/* No rank listens, so there is nothing to take back, to end or to report. */
static void ignore_call(ms_comm *comm, const ms_comm_args *args) { (void)comm, (void)args; }
static void leave(ms_comm *comm, const char *message) { (void)comm, (void)message; }
static void end(ms_comm *comm, const ms_error *error) { (void)comm, (void)error; }
static void nothing(ms_comm *comm) { (void)comm; }
static void set_folder(ms_comm *comm, const char *folder) { (void)comm, (void)folder; }

/* The caller has cleared the values; nobody requests anything. */
static void step(ms_comm *comm, uint64_t serial, int64_t number, uint8_t values[MS_REQUESTS])
{
    (void)comm, (void)serial, (void)number, (void)values;
}

/* What ranks exchange out of band is made where it is asked for: oob.c. The task is enqueued all
 * the same, so that a sharing takes its place in the stream as it does in a job. */
static ms_task_result carry_nothing(ms_run *run, void *arguments)
{
    (void)run, (void)arguments;
    return MS_TASK_DONE;
}

static const ms_task tasks[MS_COLLECTIVES] = MS_SHM_TASKS(carry_nothing);

const ms_control ms_control_none = { .name = "none",
                                     .check = check,
                                     .take_ids = take_ids,
                                     .give_ids = give_ids,
                                     .join = join_group,
                                     .number = pair_number,
                                     .prepare = agree,
                                     .claim = agree,
                                     .retract = ignore_call,
                                     .launched = ignore_call,
                                     .tasks = tasks,
                                     .leave = leave,
                                     .abort = end,
                                     .progress = nothing,
                                     .step = step,
                                     .set_folder = set_folder,
                                     .close = nothing };
