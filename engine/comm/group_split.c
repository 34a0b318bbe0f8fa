/* group_split.c: cuts a group into parts, and frees parts that all ranks have dropped.
 *
 * A group is made by all its ranks together, and dropped by each at a time of its own, mostly by a
 * finalizer, which must not wait for others. So a rank only notes that it is done with a group: the
 * group has no users on this rank (state.h), its calls have ended, and the same is true of all
 * groups that were split from it. Each split tells the other ranks this, in the exchange that it
 * makes anyway. A group of which all members say so is freed by them, at this place between their
 * calls. Its number is then free for the job (control/shm/ids.c), of whose groups at most
 * MS_GROUPS_MAX are alive at a time. A transport that keeps something for the group frees it in
 * `forget`. The members of a group are members of the group that it was split from, so they take
 * part in that exchange.
 *
 * Lines of the control file stay as they are. A later group with the number counts its calls from
 * where no former one has been, so what is left of a former one is a call of long ago.
 *
 * What all ranks have closed is given again with its number, its memory and its streams where a
 * split has the same lists; a group that is closed and has no users is freed like any other. */
#include "comm/control_table.h"

#include <stdio.h>
#include <string.h>

#include "comm/group.h"
#include "comm/oob.h"
#include "comm/transport_table.h"

/* Every number is a rank of the group, and none is twice. *total: how many there are. Ranks
 * that are in no part are allowed: they take part in the call and get no group. */
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
            /* One byte for each rank of the group, zeroed by ms_allocate. */
            char *mark = seen;
            if (ranks[i] >= group->size)
                status = ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                        "split: part %u names rank %u, but %s has ranks 0 to %u",
                                        p + 1, ranks[i], group->name, group->size - 1);
            else if (mark[ranks[i]])
                status = ms_engine_fail(engine, MS_ERROR_ARGUMENT, "split: rank %u occurs twice",
                                        ranks[i]);
            else mark[ranks[i]] = 1;
        }
        *total += sizes[p];
    }
    ms_release(ms_engine_context(engine), seen);
    return status;
}

/* ----------------------------------------------------------- dropped groups */

/* Whether `group` was split from `outer`, or from a part of it. */
static bool is_within(const ms_group *group, const ms_group *outer)
{
    const ms_group *at = group->parent;
    while (at && at != outer) at = at->parent;
    return at != NULL;
}

/* Records of calls show it. */
static bool is_recorded(const ms_group *group)
{
    const ms_comm *comm = group->comm;
    size_t i = 0;
    while (i < comm->record_count && comm->records[i].group != group) i++;
    return i < comm->record_count;
}

/* Whether this rank is done with the group itself. */
static bool is_dropped(const ms_group *group)
{
    const ms_engine *engine = group->comm->engine;
    if (group->users || is_recorded(group)) return false;
    for (uint32_t c = 0; c < MS_CHANNELS; c++)
        if (!ms_point_reached(engine, group->channels[c].last)) return false;
    return ms_point_reached(engine, group->last_message[0])
           && ms_point_reached(engine, group->last_message[1]);
}

/* Whether it is done with all groups that were split from this one, too. */
static bool is_done(const ms_group *group)
{
    const ms_comm *comm = group->comm;
    bool done = is_dropped(group);
    for (uint32_t g = 0; g < atomic_load(&comm->group_count) && done; g++) {
        const ms_group *part = comm->groups[g];
        done = !part || !is_within(part, group) || is_dropped(part);
    }
    return done;
}

/* What this rank knows of the groups within this one. */
static void note_groups(const ms_group *group, ms_split_words *words)
{
    const ms_comm *comm = group->comm;
    words->numbers = comm->numbers;
    words->phases = comm->phases;
    for (uint32_t g = 0; g < atomic_load(&comm->group_count); g++) {
        const ms_group *part = comm->groups[g];
        if (!part || !is_within(part, group)) continue;
        bool done = is_done(part);
        ms_ids *ids = done ? &words->done : &words->held;
        ms_ids_add(ids, part->id);
        for (int w = 0; w < MS_GROUPS_MAX / 64; w++) ids->words[w] |= part->others.words[w];
        for (uint32_t c = 0; c < MS_CHANNELS && done; c++) {
            const ms_channel *channel = &part->channels[c];
            if (channel->number > words->numbers) words->numbers = channel->number;
            if (channel->phase > words->phases) words->phases = channel->phase;
        }
    }
}

/* In the order of numbers, as transports need it. *ids: what all members have dropped. */
static ms_status free_dropped(ms_group *group, const ms_split_words *words, ms_ids *ids)
{
    ms_comm *comm = group->comm;
    comm->numbers = words->numbers;
    comm->phases = words->phases;
    for (uint32_t id = 1; id < MS_GROUPS_MAX; id++) {
        if (!ms_ids_has(&words->done, id) || ms_ids_has(&words->held, id)) continue;
        ms_ids_add(ids, id);
        for (uint32_t g = 0; g < atomic_load(&comm->group_count); g++) {
            ms_group *one = comm->groups[g];
            if (!one || !one->parent || one->id != id || ms_group_leave(one)) continue;
            ms_status status = ms_comm_verify(comm);
            return status ? status
                          : ms_engine_fail(comm->engine, MS_ERROR_STATE,
                                           "split: the transport \"%s\" does not close group %s",
                                           one->transport->name, one->name);
        }
    }
    return MS_OK;
}

/* The last split has found no numbers, and its caller has dropped what it could. All members wait,
 * or none has a call to wait for. */
static ms_status await_dropped(const ms_group *group)
{
    const ms_comm *comm = group->comm;
    ms_status status = MS_OK;
    for (uint32_t g = 0; g < atomic_load(&comm->group_count) && !status; g++) {
        const ms_group *part = comm->groups[g];
        if (!part || !is_within(part, group) || part->users) continue;
        for (uint32_t c = 0; c < MS_CHANNELS && !status; c++)
            if (part->channels[c].last.seq)
                status = ms_point_sync(comm->engine, part->channels[c].last);
    }
    return status;
}

bool ms_group_lacks_numbers(const ms_group *group) { return group->comm->lacks_ids; }

/* ------------------------------------------------------------------ numbers */

/* The numbers of all parts: the first member takes new ones, and all learn them in one exchange of
 * control. list_hash: the ranks must cut the group alike. An id names the group's lines in the
 * control file, so no two groups that live share one. Where there are no new ones, those of groups
 * that are freed here serve; what is left over goes back. */
static ms_status agree_on_ids(ms_group *group, uint64_t list_hash, uint32_t parts, ms_ids *ids)
{
    ms_comm *comm = group->comm;
    ms_split_words words = { 0 };
    ms_ids freed = { { 0 } };
    bool is_first = group->rank == 0 || !ms_group_has_others(group);
    ms_status status = comm->lacks_ids ? await_dropped(group) : MS_OK;
    if (status) return status;
    note_groups(group, &words);
    if (is_first) group->control->take_ids(comm, parts, &words.taken);
    status = ms_group_share_split(group, list_hash, &words);
    if (!status) status = free_dropped(group, &words, &freed);
    if (status) return status;
    *ids = words.taken;
    uint32_t missing = parts - ms_ids_count(ids);
    comm->lacks_ids = missing > ms_ids_count(&freed);
    for (; missing > 0 && !comm->lacks_ids; missing--) ms_ids_add(ids, ms_ids_next(&freed));
    if (is_first) group->control->give_ids(comm, &freed);
    if (!comm->lacks_ids) return MS_OK;
    if (is_first) group->control->give_ids(comm, ids);
    return ms_engine_fail(comm->engine, MS_ERROR_STATE,
                          "split: %u more group%s, and a job may have %d alive: make groups once, "
                          "before training, or drop or close() those that are not needed, on all "
                          "ranks",
                          parts, parts == 1 ? "" : "s", MS_GROUPS_MAX);
}

/* ---------------------------------------------------------------- splitting */

/* The group of part `number`, whose members are these `size` ranks of the group; `at` is this
 * rank's place among them. The name says how the group came about: "world/1.0" is part 0 of the
 * second split of the world. All members have made as many splits of this group, so they give it
 * the same name. */
static ms_status make_group(ms_group *group, uint32_t id, uint32_t number, uint32_t size,
                            const uint32_t *ranks, uint32_t at, ms_group **out)
{
    ms_comm *comm = group->comm;
    ms_context *context = ms_engine_context(comm->engine);
    void *members = NULL, *name = NULL;
    size_t bytes = strlen(group->name) + sizeof "/4294967295.4294967295";
    ms_status status = ms_allocate(context, size * sizeof(uint32_t), "group", &members);
    if (!status) status = ms_allocate(context, bytes, "group", &name);
    if (!status) snprintf(name, bytes, "%s/%u.%u", group->name, group->splits, number);
    for (uint32_t m = 0; m < size && !status; m++)
        ((uint32_t *)members)[m] = group->members[ranks[m]];
    /* Control makes room for the group before anybody can call in it. */
    if (!status) status = comm->control->join(comm, id);
    if (!status) status = ms_group_new(comm, id, name, at, size, members, out);
    ms_release(context, members);
    ms_release(context, name);
    return status;
}

/* The group of the part that this rank is in; none if it is in no part. `at` is this rank's number
 * in the new group, which counts in the order of the list. Parts have the numbers in their order. A
 * rank without others gives those of the other parts back with its own. */
static ms_status make_part(ms_group *group, ms_ids ids, uint32_t parts, const uint32_t *sizes,
                           const uint32_t *ranks, ms_group **out)
{
    ms_status status = MS_OK;
    ms_ids others = { { 0 } };
    *out = NULL;
    for (uint32_t p = 0; p < parts; ranks += sizes[p++]) {
        uint32_t at = 0, id = ms_ids_next(&ids);
        while (at < sizes[p] && ranks[at] != group->rank) at++;
        if (at < sizes[p]) status = make_group(group, id, p, sizes[p], ranks, at, out);
        else ms_ids_add(&others, id);
    }
    if (ms_group_has_others(group)) return status;
    if (*out) (*out)->others = others;
    else group->control->give_ids(group->comm, &others);
    return status;
}

/* A group that was closed, of a split of this one with the same lists; the first, which is the same
 * on all ranks where all have closed what they had. Ranks without a part would not know. */
static ms_group *find_closed(const ms_group *group, uint64_t lists, uint32_t total)
{
    const ms_comm *comm = group->comm;
    ms_group *found = NULL;
    for (uint32_t g = 0; g < atomic_load(&comm->group_count) && total == group->size; g++) {
        ms_group *one = comm->groups[g];
        if (one && one->parent == group && one->lists == lists && one->closed
            && (!found || one->serial < found->serial))
            found = one;
    }
    return found;
}

/* The ranks also agree on which of their groups are given again: they are all of one split. */
static ms_status open_again(ms_group *group, ms_group *closed, ms_group **out)
{
    ms_split_words words = { 0 };
    uint64_t hash = ms_hash(&closed->serial, sizeof closed->serial, closed->lists) | 1;
    ms_status status = ms_group_share_split(group, hash, &words);
    if (status) return status;
    closed->closed = false;
    *out = ms_group_retain(closed);
    return MS_OK;
}

/* A group of one or more ranks, with a number, a name and channels of its own. A collective: every
 * member calls it with the same lists, also members that are in no part. The hash of the lists is
 * compared with the call, so ranks that cut differently get an error rather than different groups.
 * Blocks. */
ms_status ms_group_split(ms_group *group, uint32_t parts, const uint32_t *sizes,
                         const uint32_t *ranks, ms_group **out)
{
    uint32_t total = 0;
    ms_ids ids;
    ms_status status = check_parts(group, parts, sizes, ranks, &total);
    if (status) return status;
    /* The group of this rank alone cannot be cut further, and no peer takes part. */
    if (group == group->comm->alone) {
        *out = ms_group_retain(group);
        return MS_OK;
    }
    /* Refused before peers hear of it: a split waits for them. */
    status = ms_engine_check_sync(group->comm->engine);
    if (status) return status;
    uint64_t hash =
        ms_hash(ranks, total * sizeof *ranks, ms_hash(sizes, parts * sizeof *sizes, parts)) | 1;
    ms_group *closed = find_closed(group, hash, total);
    if (closed) return open_again(group, closed, out);
    status = agree_on_ids(group, hash, parts, &ids);
    if (status) return status;
    /* Counted on every member, also on those that are in no part, so that names stay equal. */
    group->splits++;
    status = make_part(group, ids, parts, sizes, ranks, out);
    if (status || !*out) return status;
    (*out)->parent = group;
    (*out)->serial = group->splits;
    (*out)->lists = hash;
    return MS_OK;
}

/* What is enqueued goes on, and so do models and futures that use the group: its memory, its number
 * and its streams stay for the next split, as long as it has users. */
ms_status ms_group_close(ms_group *group)
{
    if (!group->parent)
        return ms_engine_fail(group->comm->engine, MS_ERROR_STATE,
                              "close: group %s was not made by a split", group->name);
    if (!group->closed) group->closings++;
    group->closed = true;
    return MS_OK;
}

uint64_t ms_group_closings(const ms_group *group) { return group->closings; }
