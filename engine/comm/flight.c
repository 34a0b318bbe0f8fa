/* flight.c: entries of flight records as text. */
#include "comm/flight.h"

#include <stdio.h>
#include <string.h>

#include "comm/names.h"

/* Records come from memory that another process writes, so values are not trusted. The names of
 * kinds and operations check their numbers themselves. */
static const char *dtype_of(const ms_flight *flight)
{
    return flight->dtype < MS_DTYPES ? ms_dtype_name((ms_dtype)flight->dtype) : "?";
}

/* The names of a record's numbers; a barrier has no dtype. */
ms_flight_names ms_flight_name(const ms_flight *flight)
{
    return (ms_flight_names){ .kind = ms_collective_name((ms_collective_kind)flight->kind),
                              .dtype = flight->kind == MS_BARRIER ? "" : dtype_of(flight),
                              .op = ms_reduce_op_name((ms_reduce_op)flight->op) };
}

/* The bucket, or the label of a call that belongs to none. The bucket's label is the name of its
 * first parameter, which says more to a user than its number. */
static void describe_label(const ms_flight *flight, char *text, size_t bytes)
{
    const char *label = flight->label;
    if (flight->bucket >= 0 && *label)
        snprintf(text, bytes, ", bucket %d \"%.32s\"", flight->bucket, label);
    else if (flight->bucket >= 0) snprintf(text, bytes, ", bucket %d", flight->bucket);
    else if (*label) snprintf(text, bytes, ", \"%.32s\"", label);
}

/* "all_reduce #12 of world [f32 x 1024, sum, bucket 3, at train.lua:40]". Parts without meaning for
 * the kind are left out. Every text of another process is cut to its field. Channel 0 is the usual
 * one and is not named. The text may be cut to its room. */
const char *ms_flight_describe(const ms_flight *flight, char *text, size_t bytes)
{
    char tensor[64] = "", op[24] = "", root[32] = "", label[80] = "", script[96] = "", inside[320];
    /* A barrier and a split have no tensor to show. */
    bool moves = flight->kind != MS_BARRIER && flight->kind != MS_SPLIT;
    const char *role = ms_kind_is_pair(flight->kind) ? "peer" : "root", *channel = "", *comma = "";
    if (moves)
        snprintf(tensor, sizeof tensor, "%s x %llu", dtype_of(flight),
                 (unsigned long long)flight->count);
    if (ms_kind_reduces(flight->kind))
        snprintf(op, sizeof op, ", %s", ms_reduce_op_name((ms_reduce_op)flight->op));
    if (flight->root >= 0) snprintf(root, sizeof root, ", %s %d", role, flight->root);
    describe_label(flight, label, sizeof label);
    if (*flight->script) snprintf(script, sizeof script, ", at %.64s", flight->script);
    snprintf(inside, sizeof inside, "%s%s%s%s%s", tensor, op, root, label, script);
    /* The first part that is there needs no comma. */
    const char *shown = *inside == ',' ? inside + 2 : inside;
    if (flight->channel) {
        comma = ", channel ";
        channel = ms_channel_name(flight->channel + 1u);
    }
    int used = snprintf(text, bytes, "%s #%llu of %.32s%s%s",
                        ms_collective_name((ms_collective_kind)flight->kind),
                        (unsigned long long)flight->number, flight->group_name, comma, channel);
    if (*shown && (size_t)used < bytes) snprintf(text + used, bytes - (size_t)used, " [%s]", shown);
    return text;
}

/* Texts are cut at their beginning, as their ends say more. */
ms_flight ms_flight_of(const ms_comm_args *args)
{
    ms_flight flight = { .number = args->number,
                         .count = args->count,
                         .group = args->group->id,
                         .size = args->group->size,
                         .root = args->rooted ? (int32_t)args->root : -1,
                         .bucket = args->bucket,
                         .kind = args->kind,
                         .op = args->op,
                         .dtype = args->dtype,
                         .channel = args->channel };
    ms_copy_tail(flight.group_name, sizeof flight.group_name, args->group->name);
    memcpy(flight.label, args->label, sizeof flight.label);
    memcpy(flight.script, args->script, sizeof flight.script);
    return flight;
}
