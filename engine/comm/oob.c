/* oob.c: numbers exchanged out of band: copied into host memory, which the membership owns until
 * control has carried them and the host has read the result. */
#include "comm/oob.h"

#include <string.h>

#include "comm/issue.h"
#include "comm/control_table.h"

/* Frees the results that were read, or that no host will read, once control has written them. It
 * walks the list of calls under way, of which there are few. */
static void sweep(ms_comm *comm)
{
    for (ms_shared **at = &comm->shared; *at;) {
        ms_shared *shared = *at;
        /* Control may still write into a result that is not reached. */
        if (shared->ticket || !ms_point_reached(comm->engine, shared->ready)) {
            at = &shared->next;
            continue;
        }
        *at = shared->next;
        ms_release(ms_engine_context(comm->engine), shared);
    }
}

/* Control carries few kinds, dtypes and operations; others are refused on every rank alike. Plans
 * and ids need no more. A new dtype or operation needs its case in control/shm/oob.c. */
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

/* The sum of `size` ranks that all bring the same. Integers wrap, as they do in a real sum: the
 * unsigned types make that defined. */
static void multiply(ms_dtype dtype, void *numbers, uint64_t count, uint32_t size)
{
    for (uint64_t i = 0; i < count; i++) {
        if (dtype == MS_F32) ((float *)numbers)[i] *= (float)size;
        else if (dtype == MS_I64) ((uint64_t *)numbers)[i] *= size;
        else if (dtype == MS_I32) ((uint32_t *)numbers)[i] *= size;
        else ((uint8_t *)numbers)[i] = (uint8_t)(((uint8_t *)numbers)[i] * size);
    }
}

/* Puts this rank's numbers in their place of the result. Without others the result is made here,
 * since nothing carries it: the sim device runs no task. mine is copied before the call returns, so
 * the caller may reuse it at once. `out` is the whole result, into which control writes the others'
 * numbers. */
static void lay_out(const ms_group *group, const ms_sharing *sharing, const void *mine,
                    char *result, ms_comm_args *args)
{
    size_t bytes = sharing->count * ms_dtype_bytes(sharing->dtype);
    bool gathers = sharing->kind == MS_ALL_GATHER;
    args->dtype = args->memory = (uint8_t)sharing->dtype;
    args->count = sharing->count * (gathers ? group->size : 1);
    args->payload_bytes = bytes;
    args->out_of_band = true;
    /* In an all_gather each rank has its place; otherwise the numbers are combined where they are.
     */
    char *own = gathers ? result + group->rank * bytes : result;
    if (bytes) memcpy(own, mine, bytes);
    args->in = own;
    args->out = result;
    /* The rest is done by control's task. */
    if (group->control->has_others) return;
    for (uint32_t m = 0; gathers && bytes && m < group->size; m++)
        if (m != group->rank) memcpy(result + m * bytes, own, bytes);
    if (sharing->kind == MS_ALL_REDUCE && sharing->op == MS_REDUCE_OP_SUM)
        multiply(sharing->dtype, result, sharing->count, group->size);
}

/* Results that were read are freed here: a rank that shares numbers in every step does not grow. It
 * is zeroed, so a place that nobody writes reads as 0. */
static ms_status new_result(ms_comm *comm, size_t bytes, ms_shared **out)
{
    void *memory = NULL;
    sweep(comm);
    ms_status status = ms_allocate(ms_engine_context(comm->engine), sizeof(ms_shared) + bytes,
                                   "numbers of hosts", &memory);
    if (status) return status;
    /* The numbers follow the head in the same allocation. */
    *out = memory;
    (*out)->bytes = bytes;
    return MS_OK;
}

/* Takes over `shared`, also when it fails. ms_group_issue gives it a number, a claim and a stream
 * like any collective, so ranks that share different things are found out in the same way. */
static ms_status issue(ms_group *group, ms_comm_args *args, const ms_collective *call,
                       ms_shared *shared)
{
    ms_comm *comm = group->comm;
    ms_status status = ms_group_prepare(group, args, call);
    if (!status) status = ms_group_issue(group, args, call, &shared->ready);
    if (status) {
        ms_release(ms_engine_context(comm->engine), shared);
        return status;
    }
    shared->next = comm->shared;
    comm->shared = shared;
    return MS_OK;
}

/* Without a ticket the host does not read the result; the sweep frees it once control is done. A
 * ticket is given only for a call that is under way, so a failed begin needs no end. */
ms_status ms_group_share_begin(ms_group *group, const ms_sharing *sharing, const void *mine,
                               uint64_t *ticket)
{
    ms_comm *comm = group->comm;
    ms_shared *shared = NULL;
    size_t bytes = sharing->count * ms_dtype_bytes(sharing->dtype)
                   * (sharing->kind == MS_ALL_GATHER ? group->size : 1);
    ms_status status = check(group, sharing);
    if (!status) status = new_result(comm, bytes, &shared);
    if (status) return status;
    ms_comm_args args = { .channel = MS_CHANNEL_NUMBERS - 1 };
    lay_out(group, sharing, mine, shared->result, &args);
    ms_collective call = { .kind = sharing->kind,
                           .op = sharing->op,
                           .root = sharing->root,
                           .bucket = -1,
                           .label = sharing->label };
    status = issue(group, &args, &call, shared);
    if (!status && ticket) *ticket = shared->ticket = ++comm->tickets;
    return status;
}

/* A call of its own kind, so that a rank that splits while another makes a collective on channel 1
 * is found to disagree. channel stays 0, which is channel 1 of users. Without others the words that
 * this rank has brought are the result. */
ms_status ms_group_share_split(ms_group *group, uint64_t hash, ms_split_words *words)
{
    ms_shared *shared = NULL;
    ms_status status = new_result(group->comm, sizeof *words, &shared);
    if (status) return status;
    memcpy(shared->result, words, sizeof *words);
    ms_comm_args args = { .counts_hash = hash,
                          .out_of_band = true,
                          .dtype = MS_U8,
                          .memory = MS_U8,
                          .in = shared->result,
                          .out = shared->result,
                          .payload_bytes = sizeof *words };
    status = issue(group, &args, &(ms_collective){ .kind = MS_SPLIT, .bucket = -1 }, shared);
    if (status || !ms_group_has_others(group)) return status;
    status = ms_point_sync(group->comm->engine, shared->ready);
    if (!status) memcpy(words, shared->result, sizeof *words);
    return status;
}

/* Waits, and copies the result. A fake world has its result at once, since no task computes it on
 * the sim device. */
ms_status ms_group_share_end(ms_group *group, uint64_t ticket, void *all)
{
    ms_engine *engine = group->comm->engine;
    ms_shared *shared = group->comm->shared;
    while (shared && shared->ticket != ticket) shared = shared->next;
    if (!shared || !ticket)
        return ms_engine_fail(engine, MS_ERROR_STATE, "these numbers have been read already");
    ms_status status = group->control->has_others ? ms_point_sync(engine, shared->ready) : MS_OK;
    if (!status && shared->bytes) memcpy(all, shared->result, shared->bytes);
    /* From now on the next sweep may free it; a second end with this ticket is an error. */
    shared->ticket = 0;
    return status;
}

/* It blocks in its second half: a rank whose begin fails has enqueued nothing, and its peers learn
 * of it by the end of the job. */
ms_status ms_group_share(ms_group *group, const ms_sharing *sharing, const void *mine, void *all)
{
    uint64_t ticket = 0;
    ms_status status = ms_group_share_begin(group, sharing, mine, &ticket);
    return status ? status : ms_group_share_end(group, ticket, all);
}
