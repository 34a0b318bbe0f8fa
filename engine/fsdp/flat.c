/* flat.c: the memory of a flat parameter: where each parameter lies, and whose part it is.
 *
 * All parameters lie end to end, and zeros follow the last one, so that N ranks have N equal
 * shards. A parameter may lie in several shards; its piece is what lies in this rank's. The shard
 * has a part for each piece, whose version grows when an optimizer steps the piece. Behind the
 * shard lies one element more, which no collective sees: empty pieces are windows on it, so a step
 * of a parameter of which this rank has nothing is noticed as well. */
#include "fsdp/model.h"

#include <stdio.h>
#include <string.h>

#include "tensor/state.h"
#include "tensor/values.h"

/* ------------------------------------------------------------------- layout */

static int64_t elements_of(const ms_member *member)
{
    int64_t count = 1;
    for (uint32_t d = 0; d < member->dims; d++) count *= member->shape[d];
    return count;
}

/* A shard has at least one element, so that all ranks take part in collectives. */
void ms_flat_lay_out(ms_flat *flat, uint32_t ranks, uint32_t rank)
{
    flat->numbers = 0;
    for (uint32_t i = 0; i < flat->count; i++) {
        flat->members[i].begin = flat->numbers;
        flat->numbers += elements_of(&flat->members[i]);
    }
    flat->length = (flat->numbers + ranks - 1) / ranks;
    if (flat->length == 0) flat->length = 1;
    flat->padded = flat->length * ranks;
    int64_t shard = flat->length * rank;
    for (uint32_t i = 0; i < flat->count; i++) {
        ms_member *member = &flat->members[i];
        int64_t end = member->begin + elements_of(member), begin = member->begin;
        if (end > shard + flat->length) end = shard + flat->length;
        if (begin < shard) begin = shard;
        member->length = end > begin ? end - begin : 0;
        member->first = member->length ? begin - member->begin : 0;
        member->at = member->length ? begin - shard : flat->length;
    }
}

uint64_t ms_flat_bytes(const ms_flat *flat)
{
    return (uint64_t)flat->padded * ms_dtype_bytes(flat->dtype);
}

uint64_t ms_flat_shard_bytes(const ms_flat *flat)
{
    return (uint64_t)flat->length * ms_dtype_bytes(flat->dtype);
}

/* ------------------------------------------------------------------- memory */

/* Cuts a storage into parts that end at these elements; equal and zero ends are left out. */
static ms_status split_at(ms_flat *flat, ms_storage *storage, const int64_t *ends, uint32_t count)
{
    ms_context *context = ms_engine_context(flat->unit->fsdp->engine);
    size_t item = ms_dtype_bytes(flat->dtype);
    void *memory = NULL;
    uint32_t parts = 0;
    ms_status status = ms_allocate(context, (count + 1) * sizeof(size_t), "a shard", &memory);
    if (status) return status;
    size_t *bytes = memory;
    for (uint32_t i = 0; i < count; i++) {
        size_t end = (size_t)ends[i] * item;
        if (end > (parts ? bytes[parts - 1] : 0)) bytes[parts++] = end;
    }
    status = ms_storage_split(storage, bytes, parts);
    ms_release(context, memory);
    return status;
}

/* Of the whole, a part for each parameter and one for the padding; of a shard, a part for each
 * piece, one for the padding and one for empty pieces. */
static ms_status split(ms_flat *flat, ms_storage *storage, bool whole)
{
    ms_context *context = ms_engine_context(flat->unit->fsdp->engine);
    void *memory = NULL;
    ms_status status =
        ms_allocate(context, (flat->count + 2) * sizeof(int64_t), "a flat parameter", &memory);
    if (status) return status;
    int64_t *ends = memory, last = 0;
    for (uint32_t i = 0; i < flat->count; i++) {
        const ms_member *member = &flat->members[i];
        if (whole) last = member->begin + elements_of(member);
        else if (member->length) last = member->at + member->length;
        ends[i] = last;
    }
    ends[flat->count] = whole ? flat->padded : flat->length;
    ends[flat->count + 1] = whole ? flat->padded : flat->length + 1;
    status = split_at(flat, storage, ends, flat->count + 2);
    ms_release(context, memory);
    return status;
}

static ms_status new_whole(ms_flat *flat)
{
    ms_engine *engine = flat->unit->fsdp->engine;
    ms_storage *storage = NULL;
    ms_status status =
        ms_storage_new(ms_engine_current(engine), (size_t)ms_flat_bytes(flat), &storage);
    if (!status) status = split(flat, storage, true);
    if (!status) status = ms_tensor_on(storage, flat->dtype, 1, &flat->padded, &flat->whole);
    ms_storage_release(storage);
    return status;
}

/* In the group's memory, where the ranks that gather it read it without a copy. */
static ms_status new_shard(ms_flat *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    size_t bytes = (size_t)ms_flat_shard_bytes(flat) + ms_dtype_bytes(flat->dtype);
    ms_storage *storage = NULL;
    int64_t all = flat->length + 1;
    if (!ms_flat_is_sharded(flat)) {
        flat->shard = ms_tensor_retain(flat->whole);
        return MS_OK;
    }
    ms_status status =
        ms_group_storage(fsdp->shards, ms_engine_current(fsdp->engine), bytes, &storage);
    if (!status) status = split(flat, storage, false);
    if (!status) status = ms_tensor_on(storage, flat->dtype, 1, &flat->length, &flat->shard);
    if (!status) status = ms_tensor_on(storage, flat->dtype, 1, &all, &flat->source);
    ms_storage_release(storage);
    return status;
}

static void natural_strides(const ms_member *member, int64_t *strides)
{
    int64_t step = 1;
    for (uint32_t d = member->dims; d-- > 0;) {
        strides[d] = step;
        step *= member->shape[d];
    }
}

ms_status ms_flat_view(ms_tensor *flat, const ms_member *member, ms_tensor **out)
{
    int64_t strides[MS_DIMS_MAX];
    natural_strides(member, strides);
    return ms_tensor_window(flat, member->dims, member->shape, strides,
                            elements_of(member) ? member->begin : 0, out);
}

static ms_status zero(ms_tensor *flat, int64_t begin, int64_t end)
{
    int64_t count = end - begin, one = 1;
    ms_tensor *view = NULL;
    if (count == 0) return MS_OK;
    ms_status status = ms_tensor_window(flat, 1, &count, &one, begin, &view);
    if (!status) status = ms_fill_into(ms_tensor_engine(flat), view, 0);
    ms_tensor_release(view);
    return status;
}

/* Copies all values to the whole flat parameter. */
static ms_status fill_whole(ms_flat *flat)
{
    ms_status status = zero(flat->whole, flat->numbers, flat->padded);
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        ms_tensor *view = NULL;
        status = ms_flat_view(flat->whole, &flat->members[i], &view);
        if (!status && elements_of(&flat->members[i]))
            status = ms_copy_into(flat->unit->fsdp->engine, flat->members[i].tensor, view);
        ms_tensor_release(view);
    }
    return status;
}

/* Copies this rank's part to the shard. */
static ms_status fill_shard(ms_flat *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    int64_t one = 1;
    ms_tensor *part = NULL, *last = NULL;
    if (!ms_flat_is_sharded(flat)) return MS_OK;
    ms_status status = ms_tensor_window(flat->whole, 1, &flat->length, &one,
                                        flat->length * ms_group_rank(fsdp->shards), &part);
    if (!status) status = ms_copy_into(fsdp->engine, part, flat->shard);
    /* The element for empty pieces gets a value, as all memory that may be read. */
    if (!status) status = ms_tensor_window(flat->shard, 1, &one, &one, flat->length, &last);
    if (!status) status = ms_fill_into(fsdp->engine, last, 0);
    ms_tensor_release(part);
    ms_tensor_release(last);
    return status;
}

/* ----------------------------------------------------------------- gradients */

/* The bucket's lists, in one allocation that starts with `gradients`. */
static ms_status make_lists(ms_flat *flat)
{
    ms_bucket *bucket = &flat->bucket;
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(bucket->engine),
                    flat->count * (3 * sizeof(void *) + sizeof(uint32_t)), "a unit", &memory);
    if (status) return status;
    bucket->gradients = memory;
    bucket->parameters = bucket->gradients + flat->count;
    const char **names = (const char **)(void *)(bucket->parameters + flat->count);
    uint32_t *positions = (uint32_t *)(void *)(names + flat->count);
    for (uint32_t i = 0; i < flat->count; i++) {
        bucket->parameters[i] = flat->members[i].tensor;
        names[i] = flat->members[i].name;
        positions[i] = flat->members[i].position;
    }
    bucket->names = names;
    bucket->positions = positions;
    bucket->count = flat->count;
    return MS_OK;
}

/* The gradient buffer, in the group's memory. It begins dropped: backward takes its memory. */
static ms_status make_bucket(ms_flat *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_bucket *bucket = &flat->bucket;
    ms_storage *storage = NULL;
    *bucket = (ms_bucket){ .engine = fsdp->engine,
                           .group = fsdp->group,
                           .shards = fsdp->shards,
                           .replicas = fsdp->replicas,
                           .kind = fsdp->kind };
    snprintf(bucket->label, sizeof bucket->label, "%.31s", flat->members[0].name);
    ms_status status = make_lists(flat);
    if (!status)
        status = ms_group_storage(fsdp->group, ms_engine_current(fsdp->engine),
                                  (size_t)ms_flat_bytes(flat), &storage);
    if (!status) status = split(flat, storage, true);
    if (!status) status = ms_tensor_on(storage, flat->dtype, 1, &flat->padded, &bucket->flat);
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        status = ms_flat_view(bucket->flat, &flat->members[i], &bucket->gradients[i]);
        flat->members[i].gradient = bucket->gradients[i];
    }
    if (!status) bucket->buffer = ms_tensor_retain(bucket->flat);
    if (!status) status = ms_storage_drop(storage, flat->unit->name);
    ms_storage_release(storage);
    return status;
}

/* --------------------------------------------------------------- life of one */

/* The tensors become pieces last, when nothing can fail any more. Graphs that were recorded before
 * keep the old memory. */
ms_status ms_flat_make(ms_flat *flat)
{
    ms_status status = new_whole(flat);
    if (!status) status = new_shard(flat);
    if (!status) status = fill_whole(flat);
    if (!status) status = fill_shard(flat);
    if (!status && flat->trainable) status = make_bucket(flat);
    if (!status && ms_flat_is_sharded(flat))
        status = ms_storage_drop(ms_tensor_storage(flat->whole), flat->unit->name);
    return status;
}

void ms_flat_free(ms_flat *flat)
{
    ms_bucket *bucket = &flat->bucket;
    for (uint32_t i = 0; i < flat->count; i++) {
        ms_tensor_release(flat->members[i].reduced);
        if (bucket->gradients) ms_tensor_release(bucket->gradients[i]);
    }
    ms_tensor_release(bucket->buffer);
    ms_tensor_release(bucket->flat);
    if (bucket->gradients) ms_release(ms_engine_context(bucket->engine), bucket->gradients);
    ms_tensor_release(flat->reduced);
    ms_tensor_release(flat->carried);
    ms_tensor_release(flat->kept);
    ms_tensor_release(flat->shard);
    ms_tensor_release(flat->source);
    ms_tensor_release(flat->whole);
}
