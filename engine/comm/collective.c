/* collective.c: the public call of a collective. */
#include <stdio.h>

#include "comm/arguments.h"
#include "comm/issue.h"
#include "comm/flight.h"
#include "comm/group.h"
#include "comm/transport_table.h"

/* Ends the job because a member sends something else than this rank expects of it; both numbers are
 * shown, so that the user sees which list is wrong. */
static ms_status end_for_counts(ms_group *group, ms_comm_args *args, uint32_t member, int64_t sent,
                                int64_t expected)
{
    char call[256], text[512];
    ms_comm *comm = group->comm;
    uint32_t own = group->members[group->rank], other = group->members[member];
    ms_group_number_call(group, args);
    ms_flight flight = ms_flight_of(args);
    snprintf(text, sizeof text,
             "ranks disagree in %s:\n  rank %u sends %lld elements to rank %u\n  rank %u expects "
             "%lld",
             ms_flight_describe(&flight, call, sizeof call), other, (long long)sent, own, own,
             (long long)expected);
    ms_rendezvous_abort(comm->rendezvous, MS_ABORT_MISMATCH, (int32_t)other, text);
    return ms_comm_verify(comm);
}

/* all_to_all by counts, over a transport that would wait for ever or write past a tensor where the
 * counts differ: the hosts compare them first. It costs an exchange between ranks, but waits for no
 * computation. */
static ms_status compare_counts(ms_group *group, ms_comm_args *args, const ms_collective *c)
{
    ms_comm *comm = group->comm;
    uint32_t size = group->size;
    void *memory = NULL;
    if (c->kind != MS_ALL_TO_ALL || !c->counts || group->transport->compares_counts
        || !ms_group_has_others(group))
        return MS_OK;
    ms_sharing sharing = {
        .kind = MS_ALL_GATHER, .dtype = MS_I64, .count = size, .label = "counts"
    };
    ms_status status = ms_engine_check_sync(comm->engine);
    if (!status)
        status = ms_allocate(ms_engine_context(comm->engine), (size_t)size * size * sizeof(int64_t),
                             "counts", &memory);
    if (status) return status;
    const int64_t *all = memory;
    status = ms_group_share(group, &sharing, c->counts, memory);
    for (uint32_t m = 0; m < size && !status; m++)
        if (all[m * size + group->rank] != c->receive_counts[m])
            status =
                end_for_counts(group, args, m, all[m * size + group->rank], c->receive_counts[m]);
    ms_release(ms_engine_context(comm->engine), memory);
    return status;
}

/* The last kind, MS_SPLIT, is the library's own: a user cannot call it by its number. channel is
 * checked before it is used. */
ms_status ms_group_enqueue(ms_group *group, uint32_t channel, const ms_collective *collective,
                           ms_point *ready)
{
    if ((unsigned)collective->kind >= MS_SPLIT)
        return ms_engine_fail(group->comm->engine, MS_ERROR_ARGUMENT,
                              "there is no such collective");
    ms_comm_args args = { .channel = (uint8_t)(channel - 1) };
    ms_status status = ms_collective_check(group, channel, collective, &args.count);
    if (!status) status = ms_group_prepare(group, &args, collective);
    if (!status) status = compare_counts(group, &args, collective);
    return status ? status : ms_group_issue(group, &args, collective, ready);
}

/* Blocks the host. It is refused first where the host must not block, before peers are told of it.
 */
ms_status ms_group_barrier(ms_group *group, uint64_t timeout_ns)
{
    ms_collective barrier = { .kind = MS_BARRIER, .bucket = -1, .timeout_ns = timeout_ns };
    ms_point ready;
    ms_status status = ms_engine_check_sync(group->comm->engine);
    if (!status) status = ms_group_enqueue(group, 1, &barrier, &ready);
    return status ? status : ms_point_sync(group->comm->engine, ready);
}
