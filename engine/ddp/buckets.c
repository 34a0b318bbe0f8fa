/* buckets.c: the memory of buckets, and rebuilding them in the order in which gradients come. */
#include "ddp/reducer.h"

#include <stdio.h>
#include <string.h>

#include "tensor/copy.h"

/* ------------------------------------------------------------------- memory */

/* A part for each gradient that has elements. `ends` has room for all of them. */
static ms_status split_into_gradients(ms_storage *storage, const ms_bucket *bucket, size_t *ends)
{
    size_t end = 0, item = ms_dtype_bytes(ms_tensor_dtype(bucket->parameters[0]));
    uint32_t parts = 0;
    for (uint32_t i = 0; i < bucket->count; i++) {
        if (ms_tensor_count(bucket->parameters[i]) == 0) continue;
        end += (size_t)ms_tensor_count(bucket->parameters[i]) * item;
        ends[parts++] = end;
    }
    return parts ? ms_storage_split(storage, ends, parts) : MS_OK;
}

static ms_status make_view(ms_bucket *bucket, uint32_t index, int64_t offset)
{
    const ms_tensor *like = bucket->parameters[index];
    int64_t strides[MS_DIMS_MAX], step = 1;
    for (uint32_t d = ms_tensor_dims(like); d-- > 0;) {
        strides[d] = step;
        step *= ms_tensor_shape(like)[d];
    }
    return ms_tensor_window(bucket->flat, ms_tensor_dims(like), ms_tensor_shape(like), strides,
                            offset, &bucket->gradients[index]);
}

/* One bucket for the parameters at these positions. */
static ms_status make_bucket(ms_reducer *reducer, const uint32_t *positions, uint32_t count,
                             ms_bucket_state *out)
{
    ms_context *context = ms_engine_context(reducer->engine);
    ms_bucket *bucket = &out->bucket;
    void *memory = NULL, *ends = NULL;
    ms_storage *storage = NULL;
    int64_t elements = 0, offset = 0;
    ms_status status =
        ms_allocate(context, count * (3 * sizeof(void *) + sizeof(uint32_t)), "a bucket", &memory);
    if (status) return status;
    bucket->engine = reducer->engine;
    bucket->group = reducer->group;
    bucket->kind = MS_BUCKET_ALL_REDUCE;
    bucket->count = count;
    bucket->gradients = memory;
    bucket->parameters = bucket->gradients + count;
    const char **names = (const char **)(bucket->parameters + count);
    bucket->names = names;
    out->positions = (uint32_t *)(names + count);
    bucket->positions = out->positions;
    memcpy(out->positions, positions, count * sizeof *positions);
    for (uint32_t i = 0; i < count; i++) {
        bucket->parameters[i] = reducer->parameters[positions[i]].tensor;
        names[i] = reducer->parameters[positions[i]].name;
        elements += ms_tensor_count(bucket->parameters[i]);
    }
    ms_dtype dtype = ms_tensor_dtype(bucket->parameters[0]);
    snprintf(bucket->label, sizeof bucket->label, "%.31s", reducer->parameters[positions[0]].name);
    status = ms_allocate(context, count * sizeof(size_t), "a bucket", &ends);
    if (!status)
        status = ms_group_storage(reducer->group, ms_engine_current(reducer->engine),
                                  (size_t)elements * ms_dtype_bytes(dtype), &storage);
    if (!status) status = split_into_gradients(storage, bucket, ends);
    ms_release(context, ends);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &elements, &bucket->flat);
    for (uint32_t i = 0; i < count && !status; i++) {
        status = make_view(bucket, i, offset);
        offset += ms_tensor_count(bucket->parameters[i]);
    }
    if (!status) bucket->buffer = ms_tensor_retain(bucket->flat);
    ms_storage_release(storage);
    return status;
}

void ms_buckets_free(ms_reducer *reducer, ms_bucket_list *list)
{
    ms_context *context = ms_engine_context(reducer->engine);
    for (uint32_t b = 0; b < list->count; b++) {
        ms_bucket *bucket = &list->items[b].bucket;
        for (uint32_t i = 0; bucket->gradients && i < bucket->count; i++)
            ms_tensor_release(bucket->gradients[i]);
        ms_tensor_release(bucket->buffer);
        ms_tensor_release(bucket->flat);
        ms_release(context, bucket->gradients);
    }
    ms_release(context, list->items);
    *list = (ms_bucket_list){ 0 };
}

ms_status ms_gradient_to_bucket(ms_ddp_parameter *parameter)
{
    ms_tensor *gradient = ms_tensor_grad(parameter->tensor);
    if (gradient == parameter->view) return MS_OK;
    ms_status status = ms_copy_into(parameter->reducer->engine, gradient, parameter->view);
    return status ? status : ms_tensor_set_grad(parameter->tensor, parameter->view);
}

static bool any_gradient(const ms_reducer *reducer)
{
    for (uint32_t i = 0; i < reducer->count; i++)
        if (ms_tensor_grad(reducer->parameters[i].tensor)) return true;
    return false;
}

/* Gradients that are there, copied into these buckets: all that can fail before parameters move
 * in. */
static ms_status copy_gradients(ms_reducer *reducer, const ms_bucket_list *list)
{
    ms_status status = MS_OK;
    for (uint32_t b = 0; b < list->count; b++) {
        const ms_bucket *bucket = &list->items[b].bucket;
        for (uint32_t i = 0; i < bucket->count && !status; i++) {
            ms_tensor *gradient = ms_tensor_grad(reducer->parameters[bucket->positions[i]].tensor);
            if (gradient) status = ms_copy_into(reducer->engine, gradient, bucket->gradients[i]);
        }
    }
    return status;
}

/* The parameters' homes are in these buckets from now on. */
static ms_status move_in(ms_reducer *reducer, ms_bucket_list *list)
{
    ms_status status = MS_OK;
    for (uint32_t b = 0; b < list->count; b++) {
        ms_bucket *bucket = &list->items[b].bucket;
        bucket->index = b;
        bucket->is_last = b + 1 == list->count - list->plain;
        list->items[b].plain = b >= list->count - list->plain;
        for (uint32_t i = 0; i < bucket->count && !status; i++) {
            ms_ddp_parameter *parameter = &reducer->parameters[bucket->positions[i]];
            parameter->bucket = b;
            parameter->view = bucket->gradients[i];
            status = ms_tensor_set_grad_home(parameter->tensor, parameter->view);
            if (!status && ms_tensor_grad(parameter->tensor))
                status = ms_tensor_set_grad(parameter->tensor, parameter->view);
        }
    }
    return status;
}

/* What is delayed follows all else, a bucket for each dtype. */
static ms_status make_delayed(ms_reducer *reducer, ms_bucket_list *made)
{
    void *memory = NULL;
    if (reducer->delayed == 0) return MS_OK;
    ms_status status = ms_allocate(ms_engine_context(reducer->engine),
                                   reducer->delayed * sizeof(uint32_t), "buckets", &memory);
    uint32_t *positions = memory;
    for (ms_dtype dtype = 0; dtype < MS_DTYPES && !status; dtype++) {
        uint32_t count = 0;
        for (uint32_t i = reducer->count - reducer->delayed; i < reducer->count; i++)
            if (ms_tensor_dtype(reducer->parameters[i].tensor) == dtype) positions[count++] = i;
        if (count == 0) continue;
        made->plain++;
        status = make_bucket(reducer, positions, count, &made->items[made->count++]);
    }
    ms_release(ms_engine_context(reducer->engine), memory);
    return status;
}

ms_status ms_buckets_install(ms_reducer *reducer, const uint32_t *order, const uint32_t *sizes,
                             uint32_t buckets)
{
    ms_bucket_list made = { 0 };
    void *memory = NULL;
    /* Between steps there are no gradients: the old buckets make room for the new ones, so that the
     * peak does not grow. If the new ones cannot be made, the reducer has none, and its next
     * forward says so. */
    bool keep = any_gradient(reducer);
    ms_status status =
        ms_allocate(ms_engine_context(reducer->engine),
                    (buckets + (reducer->delayed ? MS_DTYPES : 0)) * sizeof(ms_bucket_state),
                    "buckets", &memory);
    if (status) return status;
    made.items = memory;
    if (!keep) {
        for (uint32_t i = 0; i < reducer->count; i++)
            ms_tensor_set_grad_home(reducer->parameters[i].tensor, NULL);
        ms_buckets_free(reducer, &reducer->buckets);
    }
    for (uint32_t b = 0; b < buckets && !status; order += sizes[b++]) {
        made.count++;
        status = make_bucket(reducer, order, sizes[b], &made.items[b]);
    }
    if (!status) status = make_delayed(reducer, &made);
    if (!status) status = copy_gradients(reducer, &made);
    if (!status) status = move_in(reducer, &made);
    if (status) {
        ms_buckets_free(reducer, &made);
        return status;
    }
    ms_buckets_free(reducer, &reducer->buckets);
    reducer->buckets = made;
    reducer->layout++;
    reducer->made_at = reducer->times.passes;
    return MS_OK;
}

/* --------------------------------------------------------------- rebuilding */

/* Rank 0's numbers for everyone. Blocks. */
static ms_status take_from_first(ms_reducer *reducer, int64_t *numbers, uint32_t count)
{
    ms_sharing sharing = {
        .kind = MS_BROADCAST, .dtype = MS_I64, .count = count, .label = "buckets"
    };
    return ms_group_share(reducer->group, &sharing, numbers, numbers);
}

/* numbers: how many buckets, then the order; all of it as rank 0 decided. Then their sizes, into
 * the same memory. */
static ms_status agree(ms_reducer *reducer, int64_t *numbers, uint32_t *order, uint32_t *sizes,
                       uint32_t *buckets)
{
    uint32_t count = reducer->count - reducer->delayed;
    numbers[0] = *buckets;
    for (uint32_t i = 0; i < count; i++) numbers[1 + i] = order[i];
    ms_status status = take_from_first(reducer, numbers, count + 1);
    if (status) return status;
    *buckets = (uint32_t)numbers[0];
    for (uint32_t i = 0; i < count; i++) order[i] = (uint32_t)numbers[1 + i];
    for (uint32_t b = 0; b < *buckets; b++) numbers[b] = sizes[b];
    status = take_from_first(reducer, numbers, *buckets);
    for (uint32_t b = 0; b < *buckets && !status; b++) sizes[b] = (uint32_t)numbers[b];
    return status;
}

ms_status ms_reducer_rebuild_now(ms_reducer *reducer)
{
    uint32_t count = reducer->count - reducer->delayed, buckets = 0;
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(reducer->engine),
                    count * (2 * sizeof(uint64_t) + 4 * sizeof(uint32_t)) + sizeof(int64_t),
                    "rebuilding buckets", &memory);
    if (status) return status;
    int64_t *numbers = memory;
    uint64_t *bytes = (uint64_t *)(numbers + count + 1);
    uint32_t *keys = (uint32_t *)(bytes + count), *order = keys + count, *sizes = order + count,
             *places = sizes + count;
    for (uint32_t i = 0; i < count; i++) {
        const ms_tensor *tensor = reducer->parameters[reducer->arrival[i]].tensor;
        bytes[i] = ms_tensor_bytes(tensor);
        keys[i] = ms_tensor_dtype(tensor);
    }
    status = ms_ddp_assign(reducer->engine, bytes, keys, count, reducer->limits,
                           reducer->limit_count, places, sizes, &buckets);
    for (uint32_t i = 0; i < count && !status; i++) order[i] = reducer->arrival[places[i]];
    if (!status) status = agree(reducer, numbers, order, sizes, &buckets);
    if (!status) status = ms_buckets_install(reducer, order, sizes, buckets);
    if (!status) {
        reducer->logging = false;
        reducer->rebuilt = true;
    }
    ms_release(ms_engine_context(reducer->engine), memory);
    return status;
}
