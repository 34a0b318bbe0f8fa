/* share.c: numbers that hosts share: copied into host memory, which the membership owns until the
 * collective is done and the host has read the result. */
#include "comm/transport.h"

#include <string.h>

/* Frees those that nobody reads any more. */
static void sweep(ms_comm *comm)
{
    for (ms_shared **at = &comm->shared; *at;) {
        ms_shared *shared = *at;
        if (shared->ticket || !ms_point_reached(comm->engine, shared->ready)) {
            at = &shared->next;
            continue;
        }
        *at = shared->next;
        ms_release(ms_engine_context(comm->engine), shared);
    }
}

static ms_status check(ms_group *group, const ms_sharing *sharing)
{
    bool reduces = sharing->kind == MS_ALL_REDUCE;
    if (!reduces && sharing->kind != MS_ALL_GATHER && sharing->kind != MS_BROADCAST)
        return ms_engine_fail(group->comm->engine, MS_ERROR_ARGUMENT,
                              "hosts share numbers by all_gather, all_reduce or broadcast");
    if (reduces && sharing->op != MS_REDUCE_OP_SUM && sharing->op != MS_REDUCE_OP_MAX)
        return ms_engine_fail(group->comm->engine, MS_ERROR_ARGUMENT,
                              "numbers that hosts share are reduced by sum or max");
    if (sharing->dtype != MS_U8 && sharing->dtype != MS_I32 && sharing->dtype != MS_I64
        && sharing->dtype != MS_F32)
        return ms_engine_fail(group->comm->engine, MS_ERROR_ARGUMENT,
                              "hosts share numbers of u8, i32, i64 and f32");
    return MS_OK;
}

/* The sum of `size` ranks that all bring the same. */
static void multiply(ms_dtype dtype, void *numbers, uint64_t count, uint32_t size)
{
    for (uint64_t i = 0; i < count; i++) {
        if (dtype == MS_F32) ((float *)numbers)[i] *= (float)size;
        else if (dtype == MS_I64) ((uint64_t *)numbers)[i] *= size;
        else if (dtype == MS_I32) ((uint32_t *)numbers)[i] *= size;
        else ((uint8_t *)numbers)[i] = (uint8_t)(((uint8_t *)numbers)[i] * size);
    }
}

static bool is_made_here(const ms_group *group) { return group->transport == &ms_transport_fake; }

/* Where this rank's numbers lie in the result before the collective. In a fake world the result is
 * made here, and the task has no tensors: the sim device runs none. */
static void lay_out(const ms_group *group, const ms_sharing *sharing, const void *mine,
                    char *result, ms_comm_args *args)
{
    size_t bytes = sharing->count * ms_dtype_bytes(sharing->dtype);
    bool gathers = sharing->kind == MS_ALL_GATHER;
    args->dtype = args->memory = (uint8_t)sharing->dtype;
    args->count = sharing->count * (gathers ? group->size : 1);
    args->payload_bytes = bytes;
    char *own = gathers ? result + group->rank * bytes : result;
    if (bytes) memcpy(own, mine, bytes);
    if (!is_made_here(group)) {
        args->in = own;
        args->out = result;
        return;
    }
    for (uint32_t m = 0; gathers && bytes && m < group->size; m++)
        if (m != group->rank) memcpy(result + m * bytes, own, bytes);
    if (sharing->kind == MS_ALL_REDUCE && sharing->op == MS_REDUCE_OP_SUM)
        multiply(sharing->dtype, result, sharing->count, group->size);
}

ms_status ms_group_share_begin(ms_group *group, const ms_sharing *sharing, const void *mine,
                               uint64_t *ticket)
{
    ms_comm *comm = group->comm;
    void *memory = NULL;
    size_t bytes = sharing->count * ms_dtype_bytes(sharing->dtype)
                   * (sharing->kind == MS_ALL_GATHER ? group->size : 1);
    sweep(comm);
    ms_status status = check(group, sharing);
    if (!status)
        status = ms_allocate(ms_engine_context(comm->engine), sizeof(ms_shared) + bytes,
                             "numbers of hosts", &memory);
    if (status) return status;
    ms_shared *shared = memory;
    shared->bytes = bytes;
    ms_comm_args args = { .channel = MS_CHANNEL_NUMBERS - 1 };
    lay_out(group, sharing, mine, shared->result, &args);
    ms_collective call = { .kind = sharing->kind,
                           .op = sharing->op,
                           .root = sharing->root,
                           .bucket = -1,
                           .label = sharing->label };
    status = ms_group_issue(group, &args, &call, &shared->ready);
    if (status) {
        ms_release(ms_engine_context(comm->engine), shared);
        return status;
    }
    shared->next = comm->shared;
    comm->shared = shared;
    if (ticket) *ticket = shared->ticket = ++comm->tickets;
    return MS_OK;
}

ms_status ms_group_share_end(ms_group *group, uint64_t ticket, void *all)
{
    ms_engine *engine = group->comm->engine;
    ms_shared *shared = group->comm->shared;
    while (shared && shared->ticket != ticket) shared = shared->next;
    if (!shared || !ticket)
        return ms_engine_fail(engine, MS_ERROR_STATE, "these numbers have been read already");
    ms_status status = is_made_here(group) ? MS_OK : ms_point_sync(engine, shared->ready);
    if (!status && shared->bytes) memcpy(all, shared->result, shared->bytes);
    shared->ticket = 0;
    return status;
}

ms_status ms_group_share(ms_group *group, const ms_sharing *sharing, const void *mine, void *all)
{
    uint64_t ticket = 0;
    ms_status status = ms_group_share_begin(group, sharing, mine, &ticket);
    return status ? status : ms_group_share_end(group, ticket, all);
}
