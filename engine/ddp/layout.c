/* layout.c: which parameters share a bucket: at first, by the order of gradients, or as planned. */
#include "ddp/layout.h"

#include "base/assert.h"
#include "ddp/buckets.h"

/* Lists for the layout of `count` parameters, in one allocation that starts at numbers. The order
 * of the lists keeps each one aligned: 8-byte numbers first, then 4-byte ones. */
typedef struct layout_room {
    int64_t *numbers; /* what ranks exchange: count + 1 */
    uint64_t *bytes;
    uint32_t *keys, *places, *order, *sizes;
    uint32_t buckets;
} layout_room;

/* The caller releases room.numbers, which is the whole allocation. `numbers` has one more, for the
 * number of buckets. */
static ms_status make_room(ms_context *context, uint32_t count, layout_room *out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(
        context, count * (2 * sizeof(uint64_t) + 4 * sizeof(uint32_t)) + sizeof(int64_t), "buckets",
        &memory);
    if (status) return status;
    out->numbers = memory;
    out->bytes = (uint64_t *)(out->numbers + count + 1);
    out->keys = (uint32_t *)(out->bytes + count);
    out->places = out->keys + count;
    out->order = out->places + count;
    out->sizes = out->order + count;
    return MS_OK;
}

/* Bytes and dtypes of the parameters, in the order of these positions (NULL: of registration). The
 * dtype is the key, because a bucket is one tensor and so has one dtype. */
static void read_items(const ms_reducer *reducer, const uint32_t *positions, layout_room *room)
{
    for (uint32_t i = 0; i < reducer->count - reducer->delayed; i++) {
        const ms_tensor *tensor = reducer->parameters[positions ? positions[i] : i].tensor;
        room->bytes[i] = ms_tensor_bytes(tensor);
        room->keys[i] = ms_tensor_dtype(tensor);
    }
}

/* -------------------------------------------------------- the first buckets */

/* All ranks compute the same layout without exchanging anything, since they registered the same
 * parameters (ms_ddp_compare). One bucket for each dtype is reduced after the whole backward, which
 * costs overlap in the first pass only. */
ms_status ms_reducer_first_buckets(ms_reducer *reducer)
{
    ms_context *context = ms_engine_context(reducer->source.engine);
    uint32_t count = reducer->count - reducer->delayed;
    const uint64_t endless = UINT64_MAX;
    /* Unused parameters are complete as soon as backward begins, so limits are worth their buckets
     * there. */
    bool limited = reducer->settings.find_unused && !reducer->settings.static_graph;
    layout_room room = { .buckets = 0 };
    ms_status status = make_room(context, count, &room);
    if (status) return status;
    read_items(reducer, NULL, &room);
    status = ms_ddp_assign_backwards(
        reducer->source.engine, room.bytes, room.keys, count, limited ? reducer->limits : &endless,
        limited ? reducer->limit_count : 1, room.order, room.sizes, &room.buckets);
    if (!status) status = ms_buckets_install(reducer, room.order, room.sizes, room.buckets);
    ms_release(context, room.numbers);
    return status;
}

/* --------------------------------------------------------------- rebuilding */

/* All ranks get rank 0's numbers. Blocks. Out of band, on a channel of its own: the communication
 * stream may still be busy with the last pass. */
static ms_status take_from_first(ms_reducer *reducer, int64_t *numbers, uint32_t count)
{
    ms_sharing sharing = {
        .kind = MS_BROADCAST, .dtype = MS_I64, .count = count, .label = "buckets"
    };
    return ms_group_share(reducer->group, &sharing, numbers, numbers);
}

/* Replaces this rank's order, sizes and number of buckets by rank 0's. Gradients may come in
 * another order on each rank; buckets that differ would add up gradients of different parameters.
 * Two broadcasts, because the number of sizes is known only after the first one. */
static ms_status agree(ms_reducer *reducer, layout_room *room)
{
    uint32_t count = reducer->count - reducer->delayed;
    int64_t *numbers = room->numbers;
    /* The number of buckets and the order go first, in one message of known length. */
    numbers[0] = room->buckets;
    for (uint32_t i = 0; i < count; i++) numbers[1 + i] = room->order[i];
    ms_status status = take_from_first(reducer, numbers, count + 1);
    if (status) return status;
    room->buckets = (uint32_t)numbers[0];
    for (uint32_t i = 0; i < count; i++) room->order[i] = (uint32_t)numbers[1 + i];
    for (uint32_t b = 0; b < room->buckets; b++) numbers[b] = room->sizes[b];
    status = take_from_first(reducer, numbers, room->buckets);
    for (uint32_t b = 0; b < room->buckets && !status; b++) room->sizes[b] = (uint32_t)numbers[b];
    return status;
}

/* The sizes are cut from the order of this rank's gradients and then replaced by rank 0's. A
 * rebuild happens once, between a backward and a forward, on all ranks at the same pass. */
ms_status ms_reducer_rebuild_now(ms_reducer *reducer)
{
    ms_context *context = ms_engine_context(reducer->source.engine);
    uint32_t count = reducer->count - reducer->delayed;
    layout_room room = { .buckets = 0 };
    ms_status status = make_room(context, count, &room);
    if (status) return status;
    /* Callers come here only when every parameter has been logged. */
    MS_ASSERT(reducer->pass.arrived == count);
    read_items(reducer, reducer->pass.arrival, &room);
    status = ms_ddp_assign(reducer->source.engine, room.bytes, room.keys, count, reducer->limits,
                           reducer->limit_count, room.places, room.sizes, &room.buckets);
    for (uint32_t i = 0; i < count && !status; i++)
        room.order[i] = reducer->pass.arrival[room.places[i]];
    if (!status) status = agree(reducer, &room);
    if (!status) status = ms_buckets_install(reducer, room.order, room.sizes, room.buckets);
    if (!status) {
        reducer->pass.logging = false;
        reducer->rebuilt = true;
    }
    ms_release(context, room.numbers);
    return status;
}

/* ------------------------------------------------------------------ planned */

/* Checks one position in bucket b, whose first parameter has position `first`. seen[] has the
 * positions of all buckets before this place. */
static ms_status check_place(const ms_reducer *reducer, uint32_t b, uint32_t first,
                             uint32_t position, const bool *seen)
{
    uint32_t count = reducer->count - reducer->delayed;
    if (position >= count)
        return ms_engine_fail(reducer->source.engine, MS_ERROR_ARGUMENT,
                              "buckets: bucket %u: there is no parameter %u; they are 0 to %u", b,
                              position, count - 1);
    /* The first parameter decides the bucket's dtype. */
    const ms_ddp_parameter *a = &reducer->parameters[first];
    const ms_ddp_parameter *parameter = &reducer->parameters[position];
    if (seen[position])
        return ms_engine_fail(reducer->source.engine, MS_ERROR_ARGUMENT,
                              "buckets: bucket %u: '%s' is there twice", b, parameter->name);
    if (ms_tensor_dtype(parameter->tensor) != ms_tensor_dtype(a->tensor))
        return ms_engine_fail(reducer->source.engine, MS_ERROR_ARGUMENT,
                              "buckets: bucket %u has '%s', which is %s, and '%s', which is %s", b,
                              a->name, ms_dtype_name(ms_tensor_dtype(a->tensor)), parameter->name,
                              ms_dtype_name(ms_tensor_dtype(parameter->tensor)));
    return MS_OK;
}

/* Whether the plan has each parameter exactly once. seen: for each parameter, false. */
static ms_status check_buckets(const ms_reducer *reducer, const uint32_t *order,
                               const uint32_t *sizes, uint32_t buckets, bool *seen)
{
    uint32_t count = reducer->count - reducer->delayed, at = 0;
    for (uint32_t b = 0; b < buckets; b++) {
        if (sizes[b] == 0)
            return ms_engine_fail(reducer->source.engine, MS_ERROR_ARGUMENT,
                                  "buckets: bucket %u is empty", b);
        for (uint32_t i = 0; i < sizes[b]; i++, at++) {
            /* Found before order[] is read beyond what a right plan has. */
            if (at >= count)
                return ms_engine_fail(reducer->source.engine, MS_ERROR_ARGUMENT,
                                      "buckets: there are %u parameters; buckets 0 to %u have more",
                                      count, b);
            ms_status status = check_place(reducer, b, order[at - i], order[at], seen);
            if (status) return status;
            seen[order[at]] = true;
        }
    }
    /* A plan that is too short has nothing twice, yet lacks some. */
    for (uint32_t i = 0; i < count; i++)
        if (!seen[i])
            return ms_engine_fail(reducer->source.engine, MS_ERROR_ARGUMENT,
                                  "buckets: '%s' is in no bucket", reducer->parameters[i].name);
    return MS_OK;
}

/* Everything is checked before a bucket is made, so a wrong plan leaves the old buckets in place.
 */
ms_status ms_reducer_assign(ms_reducer *reducer, const uint32_t *order, const uint32_t *sizes,
                            uint32_t buckets)
{
    void *seen = NULL;
    if (reducer->phase == MS_REDUCER_REDUCING)
        return ms_engine_fail(reducer->source.engine, MS_ERROR_STATE,
                              "buckets cannot change while a backward fills them");
    ms_status status =
        ms_allocate(ms_engine_context(reducer->source.engine), reducer->count, "buckets", &seen);
    if (!status) status = check_buckets(reducer, order, sizes, buckets, seen);
    if (!status) status = ms_buckets_install(reducer, order, sizes, buckets);
    if (!status) reducer->rebuilt = true;
    ms_release(ms_engine_context(reducer->source.engine), seen);
    return status;
}
