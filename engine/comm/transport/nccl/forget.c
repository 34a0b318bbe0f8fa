/* forget.c: the communicators of a group that all its members have dropped: they close together,
 * while the others go on. */
#include "comm/transport/nccl/forget.h"

#include "comm/transport/nccl/communicator.h"
#include "comm/transport/nccl/graphs.h"

/* The turns keep the watchdog away: what it aborts, it takes with the turn. false: the job has
 * ended, and none is taken. */
static bool take_turns(ms_nccl *nccl, ms_nccl_group *own)
{
    uint64_t since = ms_nccl_now(nccl);
    int taken = 0;
    while (taken < MS_NCCL_COMMUNICATORS && !ms_nccl_job_ended(nccl, NULL))
        if (ms_nccl_try_take(&own->communicators[taken])) taken++;
        else ms_nccl_nap(nccl, since);
    if (taken == MS_NCCL_COMMUNICATORS) return true;
    while (taken > 0) ms_nccl_give(&own->communicators[--taken]);
    return false;
}

/* All begin before any is waited for, since they wait for the same members. A communicator that
 * does not close well is left to the watchdog, which sees its error. */
static bool close_communicators(ms_nccl *nccl, ms_nccl_group *own)
{
    for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) {
        ms_communicator *c = &own->communicators[i];
        ms_nccl_graph_drop(nccl, c);
        ms_nccl_graph_free(nccl, c);
        if (c->handle) nccl->api.comm_finalize(c->handle);
    }
    for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) {
        ms_communicator *c = &own->communicators[i];
        if (!c->handle) continue;
        if (ms_nccl_settle(nccl, c, MS_NCCL_IN_PROGRESS)) return false;
        nccl->api.comm_destroy(c->handle);
        c->handle = NULL;
    }
    return true;
}

/* Its flights have landed, since the host has found its calls over. */
bool ms_nccl_forget(ms_group *group)
{
    ms_nccl *nccl = group->comm->transport_state;
    ms_nccl_group *own = group->transport_state;
    if (!own) return true;
    if (!take_turns(nccl, own)) return false;
    bool gone = close_communicators(nccl, own) && ms_nccl_hold_list(nccl);
    if (!gone) {
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) ms_nccl_give(&own->communicators[i]);
        return false;
    }
    ms_nccl_group *before = atomic_load(&nccl->groups);
    if (before == own) atomic_store(&nccl->groups, own->next);
    else {
        while (before->next != own) before = before->next;
        before->next = own->next;
    }
    ms_nccl_let_list(nccl);
    ms_release(ms_engine_context(nccl->comm->engine), own);
    group->transport_state = NULL;
    return true;
}
