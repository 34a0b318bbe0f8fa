/* group.c: a rank's membership and its groups: made, split, asked. */
#include "comm/group.h"

#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "comm/control_table.h"
#include "comm/topology.h"
#include "comm/transport_table.h"

/* From this number of streams in an engine on, new groups share the world's streams. The rest is
 * for the world's own channels, for send and recv, and for two streams of other use. */
#define MS_COMM_STREAMS (MS_STREAMS_MAX - MS_CHANNELS - 4)

/* --------------------------------------------------------------- membership */

/* NULL: the engine has joined no job and no fake world. */
ms_comm *ms_comm_of(const ms_engine *engine) { return ms_engine_get(engine, MS_SLOT_COMM); }

/* The transport's state of the group is freed by the transport's close. */
static void free_group(ms_context *context, ms_group *group)
{
    ms_release(context, group->name);
    ms_release(context, group->members);
    ms_release(context, group->set);
    ms_release(context, group->topology);
    ms_release(context, group);
}

/* In a forked child the membership is the parent's: only memory is given back. The transport closes
 * before control, as it may still use control's files. Its closing may wait for peers, so they hear
 * before it that this rank makes no more calls. The engine calls it before its streams stop, but
 * after they have come to rest. Numbers out of band that were never read go here. */
static void comm_free(ms_engine *engine, void *object)
{
    ms_comm *comm = object;
    ms_context *context = ms_engine_context(engine);
    if (context->os->process_id(context->os->user) == comm->process) {
        comm->control->leave(comm, NULL);
        if (comm->transport->close) comm->transport->close(comm);
        comm->control->close(comm);
    }
    for (uint32_t i = 0; i < atomic_load(&comm->group_count); i++)
        if (comm->groups[i]) free_group(context, comm->groups[i]);
    for (size_t i = 0; i < comm->held_count; i++) ms_release(context, comm->held[i].memory);
    for (ms_shared *next = NULL; comm->shared; comm->shared = next) {
        next = comm->shared->next;
        ms_release(context, comm->shared);
    }
    ms_release(context, comm->held);
    ms_release(context, comm->records);
    ms_release(context, comm);
    ms_engine_set(engine, MS_SLOT_COMM, NULL, NULL);
}

/* Words of the bit set of a group's members. The first group is the world itself, which is not in
 * the list yet while it is made. */
static uint32_t set_words(const ms_group *group)
{
    const ms_group *world = group->comm->groups[0];
    return ((world ? world->size : group->size) + 63) / 64;
}

/* Compares bit sets, in time of the world's size divided by 64. */
static bool contains(const ms_group *outer, const ms_group *inner)
{
    uint32_t words = set_words(inner);
    /* A rank of the inner group that the outer one lacks decides. */
    for (uint32_t w = 0; w < words; w++)
        if (inner->set[w] & ~outer->set[w]) return false;
    return true;
}

/* members: NULL for 0 .. size-1. lowest and highest tell the sim device how far the group's links
 * reach. */
static void fill_members(ms_group *group, const uint32_t *members)
{
    group->lowest = UINT32_MAX;
    for (uint32_t m = 0; m < group->size; m++) {
        uint32_t rank = group->members[m] = members ? members[m] : m;
        /* Order does not matter in the set, but does in the list: it is the numbering of the group.
         */
        group->set[rank / 64] |= (uint64_t)1 << rank % 64;
        if (rank < group->lowest) group->lowest = rank;
        if (rank > group->highest) group->highest = rank;
    }
}

/* A group's memory, with its name and members. group->size is set first, since the first group's
 * set is sized by it. */
static ms_status allocate_group(ms_comm *comm, const char *name, uint32_t size,
                                const uint32_t *members, ms_group **out)
{
    ms_context *context = ms_engine_context(comm->engine);
    void *memory = NULL, *list = NULL, *text = NULL, *set = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_group), "group", &memory);
    if (status) return status;
    ms_group *group = memory;
    group->comm = comm;
    group->size = size;
    status = ms_allocate(context, size * sizeof(uint32_t), "group", &list);
    if (!status) status = ms_allocate(context, strlen(name) + 1, "group", &text);
    if (!status) status = ms_allocate(context, set_words(group) * sizeof(uint64_t), "group", &set);
    group->members = list;
    group->name = text;
    group->set = set;
    if (status) {
        free_group(context, group);
        return status;
    }
    strcpy(group->name, name);
    fill_members(group, members);
    *out = group;
    return MS_OK;
}

/* Tasks that look at the list have left it, and none comes in before the end. */
static void begin_change(ms_comm *comm)
{
    uint32_t none = 0;
    while (!atomic_compare_exchange_weak(&comm->readers, &none, MS_GROUPS_CHANGE)) {
        none = 0;
        ms_yield();
    }
}
static void end_change(ms_comm *comm) { atomic_store(&comm->readers, 0); }

/* `around` is kept up to date in both directions: which groups contain the new one, and which ones
 * it contains. */
static void put_in_place(ms_comm *comm, ms_group *group, uint32_t place)
{
    uint32_t count = atomic_load(&comm->group_count);
    begin_change(comm);
    comm->groups[place] = group;
    if (place == count) atomic_store(&comm->group_count, count + 1);
    end_change(comm);
    for (uint32_t g = 0; g <= count && g < MS_GROUP_PLACES; g++) {
        ms_group *other = comm->groups[g];
        if (!other) continue;
        if (contains(other, group)) group->around[g / 64] |= (uint64_t)1 << g % 64;
        if (contains(group, other)) other->around[place / 64] |= (uint64_t)1 << place % 64;
    }
}

/* A group that comes after others which are gone counts on from them: see ms_comm.numbers. */
static void begin_counts(ms_group *group)
{
    const ms_comm *comm = group->comm;
    group->numbers = comm->numbers;
    for (uint32_t c = 0; c < MS_CHANNELS; c++) {
        group->channels[c].number = comm->numbers;
        group->channels[c].phase = comm->phases;
        group->channels[c].stream = comm->streams[group->place][c];
    }
}

/* Only the host thread makes groups. Tasks of other streams may look at a group as soon as it has a
 * place, so all that they read is there before. */
ms_status ms_group_new(ms_comm *comm, uint32_t id, const char *name, uint32_t rank, uint32_t size,
                       const uint32_t *members, ms_group **out)
{
    uint32_t count = atomic_load(&comm->group_count), place = 0;
    while (place < count && comm->groups[place]) place++;
    /* Control hands out fewer numbers than there are places. */
    MS_ASSERT(place < MS_GROUP_PLACES);
    ms_group *group = NULL;
    ms_status status = allocate_group(comm, name, size, members, &group);
    if (status) return status;
    group->control = id == MS_GROUP_ALONE ? &ms_control_none : comm->control;
    group->transport = id == MS_GROUP_ALONE ? &ms_transport_fake : comm->transport;
    group->id = id;
    group->rank = rank;
    group->users = 1;
    group->place = place;
    begin_counts(group);
    put_in_place(comm, group, place);
    *out = group;
    return MS_OK;
}

bool ms_group_leave(ms_group *group)
{
    ms_comm *comm = group->comm;
    if (group->transport->forget && !group->transport->forget(group)) return false;
    for (int kind = 0; kind <= MS_COLLECTIVES; kind++) {
        ms_traffic *past = &comm->past[kind], *own = &group->traffic[kind];
        past->calls += own->calls;
        past->payload_bytes += own->payload_bytes;
        past->wire_bytes += own->wire_bytes;
        past->between_nodes_bytes += own->between_nodes_bytes;
    }
    begin_change(comm);
    comm->groups[group->place] = NULL;
    end_change(comm);
    for (uint32_t g = 0; g < atomic_load(&comm->group_count); g++)
        if (comm->groups[g])
            comm->groups[g]->around[group->place / 64] &= ~((uint64_t)1 << group->place % 64);
    free_group(ms_engine_context(comm->engine), group);
    return true;
}

ms_group *ms_group_retain(ms_group *group)
{
    group->users++;
    return group;
}

/* It only counts: a finalizer may call it. The group goes at the next split of its parent. */
void ms_group_release(ms_group *group)
{
    if (group) group->users--;
}

void ms_comm_place(ms_comm *comm, const uint16_t *node_of, uint32_t ranks, bool sum_by_ranks)
{
    comm->has_nodes = true;
    comm->sum_by_ranks = sum_by_ranks;
    memcpy(comm->node_of, node_of, ranks * sizeof *node_of);
}

/* At the group's first call: the world is made before control knows of nodes. */
ms_status ms_group_place(ms_group *group)
{
    const ms_comm *comm = group->comm;
    void *memory = NULL;
    if (!comm->has_nodes || !group->transport->by_nodes || group->topology) return MS_OK;
    ms_status status =
        ms_allocate(ms_engine_context(comm->engine), sizeof(ms_topology), "group", &memory);
    if (status) return status;
    group->topology = memory;
    ms_topology_find(group->topology, comm->node_of, group);
    return MS_OK;
}

uint32_t ms_group_node(const ms_group *group, uint32_t rank)
{
    const ms_comm *comm = group->comm;
    return comm->has_nodes ? comm->node_of[group->members[rank]] : 0;
}

/* Control first: a transport may use what it has. */
static ms_status open_both(ms_comm *comm)
{
    ms_status status = comm->control->open ? comm->control->open(comm, comm->rendezvous) : MS_OK;
    if (status || !comm->transport->open) return status;
    status = comm->transport->open(comm);
    /* The place at the rendezvous is given back: `joined` was not called yet. */
    if (status) comm->control->close(comm);
    return status;
}

/* The membership joins last: from then on other ranks may see this one, and nothing can fail any
 * more. */
ms_status ms_comm_new(ms_engine *engine, const ms_membership *membership, ms_group **world)
{
    ms_context *context = ms_engine_context(engine);
    void *memory = NULL;
    ms_group *all = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_comm), "rank", &memory);
    if (status) return status;
    ms_comm *comm = memory;
    comm->engine = engine;
    comm->control = membership->control;
    comm->transport = membership->transport;
    comm->rendezvous = membership->rendezvous;
    comm->options = membership->options;
    comm->process = context->os->process_id(context->os->user);
    ms_ids_add(&comm->own_ids, 0); /* the world's */
    status = ms_group_new(comm, 0, "world", membership->rank, membership->size, NULL, &all);
    if (!status) status = open_both(comm);
    if (status) {
        if (all) free_group(context, all);
        ms_release(context, comm);
        return status;
    }
    ms_engine_set(engine, MS_SLOT_COMM, comm, comm_free);
    if (comm->control->joined) comm->control->joined(comm);
    *world = all;
    return MS_OK;
}

/* Group 0 is the world by construction, so its id is 0 on every rank. */
ms_group *ms_comm_world(const ms_engine *engine) { return ms_comm_group(engine, 0); }

/* The order is that of this rank's places; another rank may have joined other groups. Names are
 * what both have in common. */
ms_group *ms_comm_group(const ms_engine *engine, uint32_t index)
{
    const ms_comm *comm = ms_comm_of(engine);
    for (uint32_t g = 0; comm && g < atomic_load(&comm->group_count); g++)
        if (comm->groups[g] && index-- == 0) return comm->groups[g];
    return NULL;
}

/* Without a membership there is no peer to tell; so it is for the functions below. */
void ms_comm_leave(ms_engine *engine, const char *message)
{
    ms_comm *comm = ms_comm_of(engine);
    if (comm) comm->control->leave(comm, message);
}

/* For errors of the host thread, outside of any task: those of tasks come by ms_engine_on_failure.
 */
void ms_comm_abort(ms_engine *engine, const ms_error *error)
{
    ms_comm *comm = ms_comm_of(engine);
    if (comm) comm->control->abort(comm, error);
}

/* Whether the job still runs. What the transport launched earlier and failed since ends the job
 * like any failed task. The transport's abort is called once, whoever found the end. It runs before
 * each call, so in the usual case it costs one load of control and one question to the transport.
 */
ms_status ms_comm_verify(ms_comm *comm)
{
    ms_status status = comm->control->check(comm);
    if (!status && comm->transport->poll_error) {
        status = comm->transport->poll_error(comm);
        /* Work that failed on the network is this rank's error, so peers learn of it from control.
         */
        if (status) comm->control->abort(comm, &ms_engine_context(comm->engine)->error);
    }
    if (status && comm->transport->abort && !comm->aborted) {
        /* Set first: an abort that comes back here through an error is not repeated. */
        comm->aborted = true;
        comm->transport->abort(comm);
    }
    return status;
}

/* The host asks between steps, so that a rank without collectives in a step learns of the end, too.
 */
ms_status ms_comm_check(ms_engine *engine)
{
    ms_comm *comm = ms_comm_of(engine);
    return comm ? ms_comm_verify(comm) : MS_OK;
}

/* A rank that works without enqueueing anything (a long loop in its script) can show that it lives.
 */
void ms_comm_progress(ms_engine *engine)
{
    ms_comm *comm = ms_comm_of(engine);
    if (comm) comm->control->progress(comm);
}

/* The values are cleared first, so that a rank without a job meets no request. */
void ms_comm_step(ms_engine *engine, uint64_t serial, int64_t step, uint8_t values[MS_REQUESTS])
{
    ms_comm *comm = ms_comm_of(engine);
    memset(values, 0, MS_REQUESTS);
    if (comm) comm->control->step(comm, serial, step, values);
}

/* The first folder that a rank names is the job's. */
void ms_comm_set_folder(ms_engine *engine, const char *folder)
{
    ms_comm *comm = ms_comm_of(engine);
    if (comm) comm->control->set_folder(comm, folder);
}

/* ------------------------------------------------------------------- groups */

/* Fields that never change: tasks read them without a lock. */
uint32_t ms_group_rank(const ms_group *group) { return group->rank; }
uint32_t ms_group_size(const ms_group *group) { return group->size; }
const char *ms_group_name(const ms_group *group) { return group->name; }
uint32_t ms_group_id(const ms_group *group) { return group->id; }
/* Callers use it to leave out work whose only purpose is to agree with others. */
bool ms_group_has_others(const ms_group *group)
{
    return group->size > 1 && group->control->has_others;
}
/* Hooks ask it before they leave a cast to the collective. */
bool ms_group_rounds(const ms_group *group) { return group->transport->rounds; }
ms_engine *ms_group_engine(const ms_group *group) { return group->comm->engine; }
uint32_t ms_group_world_rank(const ms_group *group, uint32_t rank) { return group->members[rank]; }

/* Channels of users have numbers, internal ones names. */
const char *ms_channel_name(uint32_t channel)
{
    static const char *const names[MS_CHANNELS] = { "1", "2", "parameters", "numbers" };
    return channel >= 1 && channel <= MS_CHANNELS ? names[channel - 1] : "unknown";
}

uint32_t ms_group_fixed_address(ms_group *group) { return ++group->comm->fixed_address; }
bool ms_group_uses_graphs(const ms_group *group) { return group->comm->has_graphs; }

/* A stream of its own for each group and channel, so that none waits for another, as long as there
 * are streams. After that, groups share the streams of the world (index 0): calls are still in
 * order, but may wait for each other. Of high priority, so that a collective's kernels need not
 * wait on a GPU until those of backward, which were enqueued before it, have all begun. */
ms_status ms_group_stream(ms_group *group, uint32_t channel, ms_stream **out)
{
    ms_engine *engine = group->comm->engine;
    if (channel < 1 || channel > MS_CHANNELS)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "channel %u: a group has channels 1 and 2",
                              channel);
    ms_channel *own = &group->channels[channel - 1];
    ms_status status = MS_OK;
    if (!own->stream) {
        /* The place in this rank's list names the stream; other ranks may use another name for it.
         */
        uint32_t index = group->place;
        char name[32];
        const char *kind = channel <= MS_USER_CHANNELS ? "comm" : "";
        if (ms_engine_stream_at(engine, MS_COMM_STREAMS - 1)) index = 0;
        if (index) snprintf(name, sizeof name, "%s%s.%u", kind, ms_channel_name(channel), index);
        else snprintf(name, sizeof name, "%s%s", kind, ms_channel_name(channel));
        status = ms_engine_stream_with(engine, name, MS_PRIORITY_HIGH, &own->stream);
        group->comm->streams[group->place][channel - 1] = own->stream;
    }
    if (!status) *out = own->stream;
    return status;
}

/* A storage that cannot be registered is of no use to collectives, so it is released. */
ms_status ms_group_storage(ms_group *group, ms_stream *stream, size_t bytes, ms_storage **out)
{
    const ms_transport *transport = group->comm->transport;
    ms_status status = transport->storage ? transport->storage(group->comm, stream, bytes, out)
                                          : ms_storage_new(stream, bytes, out);
    if (status || !transport->enroll) return status;
    /* Before its first use, so that no collective meets memory that the network does not know. */
    status = transport->enroll(group->comm, *out);
    if (status) {
        ms_storage_release(*out);
        *out = NULL;
    }
    return status;
}
