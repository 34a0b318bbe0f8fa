/* flow.c: how each kind of collective cuts tensors into parts. */
#include "comm/flow.h"

/* Without counts, total divides by parts: arguments.c has checked it. With counts, the parts are
 * one after another, without gaps. */
void ms_flow_part(const int64_t *counts, uint64_t total, uint32_t parts, uint32_t index,
                  uint64_t *begin, uint64_t *length)
{
    if (!counts) {
        *length = total / parts;
        *begin = index * *length;
        return;
    }
    *begin = 0;
    /* Linear in the ranks for each part; lists of counts are short. */
    for (uint32_t i = 0; i < index; i++) *begin += (uint64_t)counts[i];
    *length = (uint64_t)counts[index];
}

/* What `member` gives to this rank; all_reduce, reduce and broadcast take the whole. Everything in
 * elements; the transport multiplies by the size in memory. */
ms_flow ms_flow_from(const ms_comm_args *args, uint32_t member)
{
    const ms_group *group = args->group;
    ms_flow flow = { .length = args->count };
    switch (args->kind) {
    case MS_ALL_GATHER:
    case MS_GATHER: /* count is that of the whole */
        ms_flow_part(args->counts, args->count, group->size, member, &flow.to, &flow.length);
        break;
    case MS_REDUCE_SCATTER:
    case MS_SCATTER:
        ms_flow_part(args->counts, args->count, group->size, group->rank, &flow.from, &flow.length);
        break;
    /* With counts, `from` is right in a fake world only: the counts of other ranks are not known
     * here. */
    case MS_ALL_TO_ALL: {
        uint64_t sent = 0;
        ms_flow_part(args->counts, args->count, group->size, group->rank, &flow.from, &sent);
        ms_flow_part(args->receive_counts, args->count, group->size, member, &flow.to,
                     &flow.length);
        break;
    }
    default: break;
    }
    return flow;
}

/* The staged path lays down one slot for each receiver where parts differ, else one for all. `to`
 * is not used there. */
ms_flow ms_flow_slot(const ms_comm_args *args, uint32_t slot)
{
    const ms_group *group = args->group;
    ms_flow flow = { .length = args->count };
    if (ms_kind_parts(args->kind))
        ms_flow_part(args->counts, args->count, group->size, slot, &flow.from, &flow.length);
    else if (args->kind == MS_ALL_GATHER || args->kind == MS_GATHER) {
        /* A rank's tensor is its part alone, so `from` stays 0; begin is the place in the whole. */
        uint64_t begin = 0;
        ms_flow_part(args->counts, args->count, group->size, group->rank, &begin, &flow.length);
    }
    return flow;
}

/* All ranks must run the same number of steps, so the longest slot of any rank counts. Equal parts
 * are all of one length; with counts the search is linear. */
uint64_t ms_flow_longest(const ms_comm_args *args)
{
    uint64_t longest = 0, begin, length;
    /* The other kinds have one slot, which is the whole. */
    if (!ms_kind_parts(args->kind) && args->kind != MS_ALL_GATHER && args->kind != MS_GATHER)
        return args->count;
    for (uint32_t i = 0; i < args->group->size; i++) {
        ms_flow_part(args->counts, args->count, args->group->size, i, &begin, &length);
        if (length > longest) longest = length;
    }
    return longest;
}
