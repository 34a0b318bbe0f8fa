/* buckets.c: makes buckets and their memory, and moves gradients into them. */
#include "ddp/buckets.h"

#include <stdio.h>

#include "base/assert.h"
#include "ops/values.h"

/* ------------------------------------------------------------------- memory */

/* Gives each gradient that has elements a cell of its own. Without it, the tasks that write two
 * gradients of a bucket from different streams would wait for each other. Each part has a version
 * of its own as well: writing one gradient does not make another one look changed. Empty parameters
 * have no part, since two parts must not end at one byte. */
static ms_status split_into_gradients(ms_storage *storage, const ms_bucket *bucket)
{
    ms_context *context = ms_engine_context(bucket->engine);
    size_t end = 0, item = ms_dtype_bytes(ms_tensor_dtype(bucket->parameters[0]));
    uint32_t parts = 0;
    void *memory = NULL;
    ms_status status = ms_allocate(context, bucket->count * sizeof(size_t), "a bucket", &memory);
    size_t *ends = memory;
    for (uint32_t i = 0; i < bucket->count && !status; i++) {
        if (ms_tensor_count(bucket->parameters[i]) == 0) continue;
        end += (size_t)ms_tensor_count(bucket->parameters[i]) * item;
        ends[parts++] = end;
    }
    if (!status && parts) status = ms_storage_split(storage, ends, parts);
    ms_release(context, memory);
    return status;
}

/* A dense view in the parameter's shape, whatever the strides of the parameter itself. Optimizers
 * and collectives then read the bucket in one run. */
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

/* The bucket's lists, in one allocation that starts with gradients; ms_buckets_free releases that
 * one. Pointers come before positions, which keeps all lists aligned. The tensors are borrowed from
 * the reducer's parameters. */
static ms_status list_parameters(ms_reducer *reducer, const uint32_t *positions, uint32_t count,
                                 ms_bucket_state *out)
{
    ms_bucket *bucket = &out->bucket;
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(reducer->source.engine),
                    count * (3 * sizeof(void *) + sizeof(uint32_t)), "a bucket", &memory);
    if (status) return status;
    bucket->gradients = memory;
    bucket->parameters = bucket->gradients + count;
    /* The lists follow each other: gradients, parameters, names, positions. */
    const char **names = (const char **)(void *)(bucket->parameters + count);
    out->positions = (uint32_t *)(names + count);
    bucket->names = names;
    bucket->positions = out->positions;
    for (uint32_t i = 0; i < count; i++) {
        const ms_ddp_parameter *parameter = &reducer->parameters[positions[i]];
        out->positions[i] = positions[i];
        bucket->parameters[i] = parameter->tensor;
        names[i] = parameter->name;
    }
    return MS_OK;
}

/* The gradient buffer, in the group's memory so that collectives can work on it in place, and the
 * views of it. Gradients follow each other without padding, in the order of the bucket. The storage
 * is kept by the views and by flat, so the reducer needs no reference of its own. */
static ms_status make_buffer(ms_reducer *reducer, ms_bucket *bucket)
{
    ms_storage *storage = NULL;
    ms_dtype dtype = ms_tensor_dtype(bucket->parameters[0]);
    int64_t elements = 0, offset = 0;
    for (uint32_t i = 0; i < bucket->count; i++) elements += ms_tensor_count(bucket->parameters[i]);
    ms_status status = ms_group_storage(reducer->group, ms_engine_current(reducer->source.engine),
                                        (size_t)elements * ms_dtype_bytes(dtype), &storage);
    if (!status) status = split_into_gradients(storage, bucket);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &elements, &bucket->flat);
    for (uint32_t i = 0; i < bucket->count && !status; i++) {
        status = make_view(bucket, i, offset);
        offset += ms_tensor_count(bucket->parameters[i]);
    }
    if (!status) bucket->buffer = ms_tensor_retain(bucket->flat);
    ms_storage_release(storage);
    return status;
}

/* One bucket for the parameters at these positions. On failure, ms_buckets_free releases what was
 * made. The label is the name of the first parameter: it tells a user which layers the bucket has.
 */
static ms_status make_bucket(ms_reducer *reducer, const uint32_t *positions, uint32_t count,
                             ms_bucket_state *out)
{
    ms_bucket *bucket = &out->bucket;
    MS_ASSERT(count > 0);
    bucket->engine = reducer->source.engine;
    bucket->group = reducer->group;
    bucket->kind = MS_BUCKET_ALL_REDUCE;
    out->fixed_address = ms_group_fixed_address(reducer->group);
    bucket->count = count;
    snprintf(bucket->label, sizeof bucket->label, "%.31s", reducer->parameters[positions[0]].name);
    ms_status status = list_parameters(reducer, positions, count, out);
    return status ? status : make_buffer(reducer, bucket);
}

/* Gradients that are views of these buckets keep their storage alive. A bucket that was made in
 * part has NULL where it was not reached. */
void ms_buckets_free(ms_reducer *reducer, ms_bucket_list *list)
{
    ms_context *context = ms_engine_context(reducer->source.engine);
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

/* Needed where a script has set the gradient itself, or backward could not write to the home. The
 * copy is a task of the current stream, after what wrote the gradient there. */
ms_status ms_gradient_to_bucket(ms_ddp_parameter *parameter)
{
    ms_tensor *gradient = ms_tensor_grad(parameter->tensor);
    /* The usual case: backward has written it to its home. */
    if (gradient == parameter->view) return MS_OK;
    ms_status status = ms_copy_into(parameter->reducer->source.engine, gradient, parameter->view);
    return status ? status : ms_tensor_set_grad(parameter->tensor, parameter->view);
}

/* Whether old buckets still hold numbers that have to be moved. */
static bool any_gradient(const ms_reducer *reducer)
{
    for (uint32_t i = 0; i < reducer->count; i++)
        if (ms_tensor_grad(reducer->parameters[i].tensor)) return true;
    return false;
}

/* Copies the gradients that exist into these buckets, before any parameter refers to them. If a
 * copy fails, the old buckets are still in place. This is the case of a change in the middle of
 * accumulated passes. */
static ms_status copy_gradients(ms_reducer *reducer, const ms_bucket_list *list)
{
    ms_status status = MS_OK;
    for (uint32_t b = 0; b < list->count; b++) {
        const ms_bucket *bucket = &list->items[b].bucket;
        for (uint32_t i = 0; i < bucket->count && !status; i++) {
            ms_tensor *gradient = ms_tensor_grad(reducer->parameters[bucket->positions[i]].tensor);
            if (gradient)
                status = ms_copy_into(reducer->source.engine, gradient, bucket->gradients[i]);
        }
    }
    return status;
}

/* From now on backward writes the parameters' gradients into these buckets. is_last marks the last
 * bucket that passes the links, which do there what they do once in an iteration; plain buckets
 * come after it. Every parameter has its meta by now and the views fit, so none of these calls has
 * a reason to fail half way. */
static ms_status move_in(ms_reducer *reducer, ms_bucket_list *list)
{
    ms_status status = MS_OK;
    for (uint32_t b = 0; b < list->count; b++) {
        ms_bucket *bucket = &list->items[b].bucket;
        bucket->index = bucket->place = b;
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

/* Delayed parameters follow all others, in one bucket for each dtype. */
static ms_status make_delayed(ms_reducer *reducer, ms_bucket_list *made)
{
    void *memory = NULL;
    if (reducer->delayed == 0) return MS_OK;
    ms_status status = ms_allocate(ms_engine_context(reducer->source.engine),
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
    ms_release(ms_engine_context(reducer->source.engine), memory);
    return status;
}

/* Makes all buckets; those that were made before a failure are in the list, too. */
static ms_status make_buckets(ms_reducer *reducer, const uint32_t *order, const uint32_t *sizes,
                              uint32_t buckets, ms_bucket_list *made)
{
    ms_status status = MS_OK;
    for (uint32_t b = 0; b < buckets && !status; order += sizes[b++]) {
        made->count++;
        status = make_bucket(reducer, order, sizes[b], &made->items[b]);
    }
    return status ? status : make_delayed(reducer, made);
}

/* Between steps there are no gradients: the old buckets are freed before the new ones are made, so
 * that the peak does not grow. If the new ones cannot be made then, the reducer has none, and its
 * next forward says so. Clearing the homes first keeps backward from writing to memory that goes.
 */
static void make_room(ms_reducer *reducer)
{
    if (any_gradient(reducer)) return;
    for (uint32_t i = 0; i < reducer->count; i++)
        ms_tensor_set_grad_home(reducer->parameters[i].tensor, NULL);
    ms_buckets_free(reducer, &reducer->buckets);
}

/* Old and new buckets exist side by side while there are gradients to copy; otherwise make_room
 * frees the old ones first. The layout's number changes with every success, so that times of old
 * buckets are not taken for times of new ones. */
ms_status ms_buckets_install(ms_reducer *reducer, const uint32_t *order, const uint32_t *sizes,
                             uint32_t buckets)
{
    void *memory = NULL;
    /* Delayed parameters have at most one bucket for each dtype. */
    uint32_t most = buckets + (reducer->delayed ? MS_DTYPES : 0);
    ms_status status = ms_allocate(ms_engine_context(reducer->source.engine),
                                   most * sizeof(ms_bucket_state), "buckets", &memory);
    if (status) return status;
    ms_bucket_list made = { .items = memory };
    make_room(reducer);
    status = make_buckets(reducer, order, sizes, buckets, &made);
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
