/* split.c: cuts a group into parts.
 *
 * Groups live as long as the job: another rank may be inside of one that this rank has dropped, and
 * numbers of its calls are compared for ever. So a group is not freed but given again, where all
 * ranks have said that they are done with it. */
#include "comm/control.h"

#include <stdio.h>
#include <string.h>

/* Every number is a rank of the group, and none stands twice. *total: how many there are. Ranks
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
 * in the new group, which counts in the order of the list. */
static ms_status make_part(ms_group *group, uint32_t first_id, uint32_t parts,
                           const uint32_t *sizes, const uint32_t *ranks, ms_group **out)
{
    for (uint32_t p = 0; p < parts; ranks += sizes[p++]) {
        uint32_t at = 0;
        while (at < sizes[p] && ranks[at] != group->rank) at++;
        if (at < sizes[p]) return make_group(group, first_id + p, p, sizes[p], ranks, at, out);
    }
    *out = NULL;
    return MS_OK;
}

/* The numbers of all parts, from *first_id on: the group's first member takes them, and all learn
 * them in one exchange of control. list_hash: the ranks must cut the group alike. An id names the
 * group's lines in the control file, so no two groups of a job may share one. */
static ms_status agree_on_ids(ms_group *group, uint64_t list_hash, uint32_t parts,
                              uint32_t *first_id)
{
    uint64_t id = 0;
    if (group->rank == 0 || !ms_group_has_others(group))
        id = group->control->take_ids(group->comm, parts);
    ms_status status = ms_group_share_split(group, list_hash, &id, sizeof id);
    if (status) return status;
    if (id + parts > MS_GROUPS_MAX)
        return ms_engine_fail(group->comm->engine, MS_ERROR_STATE,
                              "split: %u more groups, and a job may have %d: make groups once, "
                              "before training, or close() them on all ranks",
                              parts, MS_GROUPS_MAX);
    *first_id = (uint32_t)id;
    return MS_OK;
}

/* A group that was closed, of a split of this one with the same lists; the first, which is the same
 * on all ranks where all have closed what they had. Ranks without a part would not know. */
static ms_group *find_closed(const ms_group *group, uint64_t lists, uint32_t total)
{
    const ms_comm *comm = group->comm;
    for (uint32_t g = 0; g < atomic_load(&comm->group_count) && total == group->size; g++) {
        ms_group *one = comm->groups[g];
        if (one->parent == group && one->lists == lists && one->closed) return one;
    }
    return NULL;
}

/* The ranks also agree on which of their groups are given again: they are all of one split. */
static ms_status open_again(ms_group *group, ms_group *closed, ms_group **out)
{
    uint64_t unused = 0, hash = ms_hash(&closed->serial, sizeof closed->serial, closed->lists) | 1;
    ms_status status = ms_group_share_split(group, hash, &unused, sizeof unused);
    if (status) return status;
    closed->closed = false;
    *out = closed;
    return MS_OK;
}

/* A group of one or more ranks, with a number, a name and channels of its own. A collective: every
 * member calls it with the same lists, also members that are in no part. The hash of the lists is
 * compared with the call, so ranks that cut differently get an error rather than different groups.
 * Blocks. */
ms_status ms_group_split(ms_group *group, uint32_t parts, const uint32_t *sizes,
                         const uint32_t *ranks, ms_group **out)
{
    uint32_t total = 0, first_id = 0;
    ms_status status = check_parts(group, parts, sizes, ranks, &total);
    if (status) return status;
    /* The group of this rank alone cannot be cut further, and no peer takes part. */
    if (group == group->comm->alone) {
        *out = group;
        return MS_OK;
    }
    /* Refused before peers hear of it: a split waits for them. */
    status = ms_engine_check_sync(group->comm->engine);
    if (status) return status;
    uint64_t hash =
        ms_hash(ranks, total * sizeof *ranks, ms_hash(sizes, parts * sizeof *sizes, parts)) | 1;
    ms_group *closed = find_closed(group, hash, total);
    if (closed) return open_again(group, closed, out);
    status = agree_on_ids(group, hash, parts, &first_id);
    if (status) return status;
    /* Counted on every member, also on those that are in no part, so that names stay equal. */
    group->splits++;
    status = make_part(group, first_id, parts, sizes, ranks, out);
    if (status || !*out) return status;
    (*out)->parent = group;
    (*out)->serial = group->splits;
    (*out)->lists = hash;
    return MS_OK;
}

/* What is enqueued goes on, and so do models and futures that use the group: its memory, its number
 * and its streams stay for the next split. */
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
