/* group.c: a rank's membership and its groups: made, split, asked. */
#include "comm/comm.h"

#include <stdio.h>
#include <string.h>

/* From this number of streams in an engine on, new groups share the world's stream. */
#define MS_COMM_STREAMS 12

/* --------------------------------------------------------------- membership */

ms_comm *ms_comm_of(const ms_engine *engine) { return ms_engine_get(engine, MS_SLOT_COMM); }

/* In a forked child the membership is the parent's: only memory is given back. */
static void comm_free(ms_engine *engine, void *object)
{
    ms_comm *comm = object;
    ms_context *context = ms_engine_context(engine);
    if (context->os->process_id(context->os->user) == comm->process) comm->backend->close(comm);
    for (uint32_t i = 0; i < atomic_load(&comm->group_count); i++) {
        ms_release(context, comm->groups[i]->name);
        ms_release(context, comm->groups[i]->members);
        ms_release(context, comm->groups[i]);
    }
    for (size_t i = 0; i < comm->held_count; i++) ms_release(context, comm->held[i].memory);
    ms_shared_free(comm);
    ms_release(context, comm->held);
    ms_release(context, comm->records);
    ms_release(context, comm);
}

static bool contains(const ms_group *outer, const ms_group *inner)
{
    for (uint32_t m = 0; m < inner->size; m++) {
        uint32_t at = 0;
        while (at < outer->size && outer->members[at] != inner->members[m]) at++;
        if (at == outer->size) return false;
    }
    return true;
}

ms_status ms_group_new(ms_comm *comm, uint32_t id, const char *name, uint32_t rank, uint32_t size,
                       const uint32_t *members, ms_group **out)
{
    ms_context *context = ms_engine_context(comm->engine);
    void *memory = NULL, *list = NULL, *text = NULL;
    uint32_t count = atomic_load(&comm->group_count);
    if (count == MS_GROUPS_MAX)
        return ms_fail(context, MS_ERROR_STATE,
                       "this rank is in %d groups already, which is the most", MS_GROUPS_MAX);
    ms_status status = ms_allocate(context, sizeof(ms_group), "group", &memory);
    if (!status) status = ms_allocate(context, size * sizeof(uint32_t), "group", &list);
    if (!status) status = ms_allocate(context, strlen(name) + 1, "group", &text);
    if (status) {
        ms_release(context, list);
        ms_release(context, memory);
        return status;
    }
    ms_group *group = memory;
    group->comm = comm;
    group->backend = comm->backend;
    group->id = id;
    group->rank = rank;
    group->size = size;
    group->members = list;
    for (uint32_t m = 0; m < size; m++) group->members[m] = members ? members[m] : m;
    group->name = strcpy(text, name);
    for (uint32_t g = 0; g < count; g++) {
        if (contains(comm->groups[g], group)) group->around[g / 64] |= (uint64_t)1 << g % 64;
        if (contains(group, comm->groups[g]))
            comm->groups[g]->around[count / 64] |= (uint64_t)1 << count % 64;
    }
    group->around[count / 64] |= (uint64_t)1 << count % 64;
    comm->groups[count] = group;
    atomic_store(&comm->group_count, count + 1);
    *out = group;
    return MS_OK;
}

ms_status ms_comm_new(ms_engine *engine, const ms_comm_backend *backend, void *state, uint32_t rank,
                      uint32_t size, ms_group **world)
{
    ms_context *context = ms_engine_context(engine);
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_comm), "rank", &memory);
    if (status) return status;
    ms_comm *comm = memory;
    comm->engine = engine;
    comm->backend = backend;
    comm->state = state;
    comm->process = context->os->process_id(context->os->user);
    comm->fake_ids = 1;
    status = ms_group_new(comm, 0, "world", rank, size, NULL, world);
    if (status) ms_release(context, comm);
    else ms_engine_set(engine, MS_SLOT_COMM, comm, comm_free);
    return status;
}

ms_group *ms_comm_world(const ms_engine *engine) { return ms_comm_group(engine, 0); }

ms_group *ms_comm_group(const ms_engine *engine, uint32_t index)
{
    const ms_comm *comm = ms_comm_of(engine);
    return comm && index < atomic_load(&comm->group_count) ? comm->groups[index] : NULL;
}

ms_status ms_comm_alone(ms_engine *engine, ms_group **out)
{
    ms_comm *comm = ms_comm_of(engine);
    if (!comm) return ms_engine_fail(engine, MS_ERROR_STATE, "this engine has no world yet");
    if (!comm->alone) {
        const ms_group *world = comm->groups[0];
        ms_status status = ms_group_new(comm, UINT32_MAX, "self", 0, 1,
                                        &world->members[world->rank], &comm->alone);
        if (status) return status;
        comm->alone->backend = &ms_comm_fake;
    }
    *out = comm->alone;
    return MS_OK;
}

void ms_comm_leave(ms_engine *engine, const char *message)
{
    ms_comm *comm = ms_comm_of(engine);
    if (comm) comm->backend->leave(comm, message);
}

void ms_comm_abort(ms_engine *engine, const ms_error *error)
{
    ms_comm *comm = ms_comm_of(engine);
    if (comm) comm->backend->abort(comm, error);
}

ms_status ms_comm_check(ms_engine *engine)
{
    ms_comm *comm = ms_comm_of(engine);
    return comm ? comm->backend->check(comm) : MS_OK;
}

void ms_comm_progress(ms_engine *engine)
{
    ms_comm *comm = ms_comm_of(engine);
    if (comm) comm->backend->progress(comm);
}

void ms_comm_step(ms_engine *engine, uint64_t serial, int64_t step, uint8_t values[MS_REQUESTS])
{
    ms_comm *comm = ms_comm_of(engine);
    memset(values, 0, MS_REQUESTS);
    if (comm && comm->backend->step) comm->backend->step(comm, serial, step, values);
}

void ms_comm_set_folder(ms_engine *engine, const char *folder)
{
    ms_comm *comm = ms_comm_of(engine);
    if (comm && comm->backend->set_folder) comm->backend->set_folder(comm, folder);
}

/* ------------------------------------------------------------------- groups */

uint32_t ms_group_rank(const ms_group *group) { return group->rank; }
uint32_t ms_group_size(const ms_group *group) { return group->size; }
const char *ms_group_name(const ms_group *group) { return group->name; }
uint32_t ms_group_id(const ms_group *group) { return group->id; }
bool ms_group_has_others(const ms_group *group)
{
    return group->size > 1 && group->comm->backend != &ms_comm_fake;
}
ms_engine *ms_group_engine(const ms_group *group) { return group->comm->engine; }
uint32_t ms_group_world_rank(const ms_group *group, uint32_t rank) { return group->members[rank]; }

const char *ms_channel_name(uint32_t channel)
{
    static const char *const names[MS_CHANNELS] = { "1", "2", "parameters", "numbers" };
    return channel >= 1 && channel <= MS_CHANNELS ? names[channel - 1] : "unknown";
}

/* A stream of its own for each group and channel, so that none waits for another, as long as there
 * are streams. */
ms_status ms_group_stream(ms_group *group, uint32_t channel, ms_stream **out)
{
    ms_engine *engine = group->comm->engine;
    if (channel < 1 || channel > MS_CHANNELS)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "channel %u: a group has channels 1 and 2",
                              channel);
    ms_channel *own = &group->channels[channel - 1];
    ms_status status = MS_OK;
    if (!own->stream) {
        uint32_t index = 0;
        while (group->comm->groups[index] != group) index++;
        char name[32];
        const char *kind = channel <= MS_USER_CHANNELS ? "comm" : "";
        if (ms_engine_stream_at(engine, MS_COMM_STREAMS - 1)) index = 0;
        if (index) snprintf(name, sizeof name, "%s%s.%u", kind, ms_channel_name(channel), index);
        else snprintf(name, sizeof name, "%s%s", kind, ms_channel_name(channel));
        status = ms_engine_stream(engine, name, &own->stream);
    }
    if (!status) *out = own->stream;
    return status;
}

ms_status ms_group_storage(ms_group *group, ms_stream *stream, size_t bytes, ms_storage **out)
{
    return group->comm->backend->storage(group->comm, stream, bytes, out);
}

/* ---------------------------------------------------------------- splitting */

/* Every number is a rank of the group, and none stands twice. *total: how many there are. */
static ms_status check_parts(ms_group *group, uint32_t parts, const uint32_t *sizes,
                             const uint32_t *ranks, uint32_t *total)
{
    ms_engine *engine = group->comm->engine;
    void *seen = NULL;
    *total = 0;
    if (parts == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "split: the list of parts is empty");
    ms_status status = ms_allocate(ms_engine_context(engine), group->size, "split", &seen);
    for (uint32_t p = 0, i = 0; p < parts && !status; p++) {
        if (sizes[p] == 0)
            status = ms_engine_fail(engine, MS_ERROR_ARGUMENT, "split: part %u is empty", p + 1);
        for (uint32_t end = i + sizes[p]; i < end && !status; i++) {
            char *mark = seen;
            if (ranks[i] >= group->size)
                status = ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                        "split: part %u names rank %u, but %s has ranks 0 to %u",
                                        p + 1, ranks[i], group->name, group->size - 1);
            else if (mark[ranks[i]])
                status = ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                        "split: rank %u stands in two places", ranks[i]);
            else mark[ranks[i]] = 1;
        }
        *total += sizes[p];
    }
    ms_release(ms_engine_context(engine), seen);
    return status;
}

/* The group of the part that this rank is in; none if it is in no part. */
static ms_status make_part(ms_group *group, uint32_t first_id, uint32_t parts,
                           const uint32_t *sizes, const uint32_t *ranks, ms_group **out)
{
    ms_comm *comm = group->comm;
    ms_context *context = ms_engine_context(comm->engine);
    for (uint32_t p = 0; p < parts; ranks += sizes[p++]) {
        uint32_t at = 0;
        while (at < sizes[p] && ranks[at] != group->rank) at++;
        if (at == sizes[p]) continue;
        void *members = NULL, *name = NULL;
        size_t bytes = strlen(group->name) + sizeof "/4294967295.4294967295";
        ms_status status = ms_allocate(context, sizes[p] * sizeof(uint32_t), "group", &members);
        if (!status) status = ms_allocate(context, bytes, "group", &name);
        if (!status) snprintf(name, bytes, "%s/%u.%u", group->name, group->splits, p);
        for (uint32_t m = 0; m < sizes[p] && !status; m++)
            ((uint32_t *)members)[m] = group->members[ranks[m]];
        if (!status) status = comm->backend->join(comm, first_id + p);
        if (!status) status = ms_group_new(comm, first_id + p, name, at, sizes[p], members, out);
        ms_release(context, members);
        ms_release(context, name);
        return status;
    }
    *out = NULL;
    return MS_OK;
}

ms_status ms_group_split(ms_group *group, uint32_t parts, const uint32_t *sizes,
                         const uint32_t *ranks, ms_group **out)
{
    uint32_t total = 0, first_id = 0;
    ms_status status = check_parts(group, parts, sizes, ranks, &total);
    if (status) return status;
    if (group == group->comm->alone) {
        *out = group;
        return MS_OK;
    }
    status = ms_engine_check_sync(group->comm->engine);
    if (status) return status;
    uint64_t hash =
        ms_hash(ranks, total * sizeof *ranks, ms_hash(sizes, parts * sizeof *sizes, parts)) | 1;
    status = group->comm->backend->split(group, hash, parts, &first_id);
    if (status) return status;
    group->splits++;
    return make_part(group, first_id, parts, sizes, ranks, out);
}
