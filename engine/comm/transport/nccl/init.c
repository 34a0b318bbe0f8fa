/* init.c: the communicators of a group: their ids, which control carries, and their beginning,
 * which all members make together. */
#include "comm/transport/nccl/init.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/transport/nccl/communicator.h"

/* What a failure of NCCL leaves in the engine. */
static ms_status fail(const ms_nccl *nccl, const char *function, ms_nccl_result result,
                      const ms_group *group)
{
    char where[64];
    ms_context *context = ms_engine_context(nccl->comm->engine);
    snprintf(where, sizeof where, "the beginning of group %.32s", group->name);
    ms_fail(context, MS_ERROR_IO, "%s", function);
    ms_nccl_explain(nccl, function, result, where, &context->error);
    return context->error.status;
}

/* The first member makes the ids. If it cannot, it ends the job, for which the others wait in the
 * same exchange. */
static ms_status share_ids(const ms_nccl *nccl, ms_group *group,
                           ms_nccl_id ids[MS_NCCL_COMMUNICATORS])
{
    memset(ids, 0, sizeof *ids * MS_NCCL_COMMUNICATORS);
    for (int i = 0; group->rank == 0 && i < MS_NCCL_COMMUNICATORS; i++) {
        ms_nccl_result result = nccl->api.get_unique_id(&ids[i]);
        if (result) return fail(nccl, "ncclGetUniqueId", result, group);
    }
    ms_sharing sharing = { .kind = MS_BROADCAST,
                           .dtype = MS_U8,
                           .count = sizeof *ids * MS_NCCL_COMMUNICATORS,
                           .label = "NCCL ids" };
    return ms_group_share(group, &sharing, ids, ids);
}

static ms_nccl_config configure(const ms_comm *comm)
{
    const ms_comm_options *options = &comm->options;
    ms_nccl_config config = { .size = sizeof config,
                              .magic = MS_NCCL_CONFIG_MAGIC,
                              .version = MS_NCCL_VERSION_LEAST,
                              .cga_cluster_size = MS_NCCL_UNSET,
                              .min_ctas = MS_NCCL_UNSET,
                              .max_ctas = MS_NCCL_UNSET,
                              .split_share = MS_NCCL_UNSET,
                              .traffic_class = MS_NCCL_UNSET,
                              .collnet_enable = MS_NCCL_UNSET,
                              .cta_policy = MS_NCCL_UNSET,
                              .shrink_share = MS_NCCL_UNSET,
                              .nvls_ctas = MS_NCCL_UNSET,
                              .channels_per_net_peer = MS_NCCL_UNSET,
                              .nvlink_centric_schedule = MS_NCCL_UNSET };
    if (options->min_ctas) config.min_ctas = (int)options->min_ctas;
    if (options->max_ctas) config.max_ctas = (int)options->max_ctas;
    return config;
}

/* All of a group begin at the same time, since each waits for the same members. */
static ms_status start_all(ms_nccl *nccl, ms_nccl_group *made, const ms_nccl_id *ids)
{
    const ms_group *group = made->group;
    ms_nccl_config config = configure(nccl->comm);
    for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) {
        ms_nccl_result result = nccl->api.comm_init_rank_config(
            &made->communicators[i].handle, (int)group->size, ids[i], (int)group->rank, &config);
        if (result && result != MS_NCCL_IN_PROGRESS)
            return fail(nccl, "ncclCommInitRankConfig", result, group);
    }
    return MS_OK;
}

/* The end of the job as this engine's error; an end by a watchdog comes with its cause as well. */
static ms_status job_has_ended(ms_nccl *nccl)
{
    ms_status status = nccl->comm->control->check(nccl->comm);
    return status ? status
                  : ms_engine_fail(nccl->comm->engine, MS_ERROR_ABORTED, "the job has ended");
}

static ms_status fail_late(ms_nccl *nccl, const ms_group *group)
{
    char text[256];
    const ms_comm *comm = nccl->comm;
    snprintf(text, sizeof text,
             "the communicators of group %.32s have not begun on rank %" PRIu32
             " in %.1f s: a rank has not come, or the ranks do not reach each other by NCCL's "
             "network",
             group->name, comm->groups[0]->rank, (double)nccl->timeout_ns * 1e-9);
    ms_rendezvous_abort(nccl->rendezvous, MS_ABORT_TIMEOUT, (int32_t)comm->groups[0]->rank, text);
    return job_has_ended(nccl);
}

/* The host waits here, once for each group. */
static ms_status await_all(ms_nccl *nccl, ms_nccl_group *made)
{
    uint64_t since = ms_nccl_now(nccl), limit = nccl->timeout_ns;
    for (int i = 0; i < MS_NCCL_COMMUNICATORS;) {
        ms_nccl_result state = MS_NCCL_IN_PROGRESS;
        ms_nccl_result failed =
            nccl->api.comm_get_async_error(made->communicators[i].handle, &state);
        if (failed) state = failed;
        if (state == MS_NCCL_SUCCESS) {
            i++;
            continue;
        }
        if (state != MS_NCCL_IN_PROGRESS)
            return fail(nccl, "ncclCommInitRankConfig", state, made->group);
        if (ms_nccl_job_ended(nccl, NULL)) return job_has_ended(nccl);
        if (limit && ms_nccl_now(nccl) - since >= limit) return fail_late(nccl, made->group);
        ms_nccl_nap(nccl, since);
    }
    return MS_OK;
}

/* Those of ranks on other nodes are not known, and 0. */
static int64_t process_of(const ms_nccl *nccl, uint32_t rank)
{
    ms_rank_state state = { .process = 0 };
    ms_rendezvous_rank(nccl->rendezvous, rank, &state);
    return state.process;
}

/* All members are there, so that all find the same. */
static bool share_a_process(const ms_nccl *nccl, const ms_group *group)
{
    for (uint32_t i = 1; i < group->size; i++) {
        int64_t process = process_of(nccl, group->members[i]);
        for (uint32_t k = 0; process && k < i; k++)
            if (process_of(nccl, group->members[k]) == process) return true;
    }
    return false;
}

/* The watchdog closes what has begun, also after a failure, so the group is in its list from the
 * first call on; it takes no turn before the host gives it. A failure ends the job, as the other
 * members would wait for this one. */
ms_status ms_nccl_prepare(ms_group *group)
{
    ms_comm *comm = group->comm;
    ms_nccl *nccl = comm->transport_state;
    ms_context *context = ms_engine_context(comm->engine);
    ms_nccl_id ids[MS_NCCL_COMMUNICATORS];
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_nccl_group), "communicators", &memory);
    ms_nccl_group *made = memory;
    if (!status) status = share_ids(nccl, group, ids);
    if (!status) {
        made->group = group;
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) made->communicators[i].turn = 1;
        made->next = atomic_load(&nccl->groups);
        atomic_store(&nccl->groups, made);
        group->transport_state = made;
        ms_activity_begin(context->activity);
        status = start_all(nccl, made, ids);
        if (!status) status = await_all(nccl, made);
        made->registers = !status && !share_a_process(nccl, group);
        ms_activity_end(context->activity);
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) ms_nccl_give(&made->communicators[i]);
    } else ms_release(context, made);
    if (status && status != MS_ERROR_STATE) comm->control->abort(comm, &context->error);
    return status;
}
