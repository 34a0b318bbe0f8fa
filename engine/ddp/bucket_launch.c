/* bucket_launch.c: counts the gradients of each bucket, launches buckets in order of their index,
 * and makes the end of backward wait for the results.
 *
 * The memory of a bucket stays until buckets are made again, so its reduction may be launched as a
 * graph (ms_bucket.fixed_address). Two cases are excluded, since the call could differ from pass to
 * pass or from rank to rank: a reduction in which a script takes part, and a mean that is not over
 * the whole group. */
#include "ddp/bucket_launch.h"

#include <stdio.h>

#include "base/assert.h"
#include "ddp/unused.h"
#include "hook/link_ops.h"
#include "ops/values.h"

/* ------------------------------------------------------------------- phases */

/* Whether a pass may go from one phase to another. Any phase may end in REDUCED: an error ends the
 * job there. */
static bool is_legal(const ms_reducer *reducer, ms_reducer_phase to)
{
    ms_reducer_phase from = reducer->phase;
    switch (to) {
    case MS_REDUCER_LOCAL:
    case MS_REDUCER_EXPECTING: return from != MS_REDUCER_REDUCING;
    case MS_REDUCER_REDUCING:
        /* A static graph's first pass reduces once more after each further backward. */
        return from == MS_REDUCER_EXPECTING
               || (from == MS_REDUCER_REDUCED && reducer->settings.static_graph
                   && !reducer->pass.counted);
    case MS_REDUCER_REDUCED: return true;
    default: return false;
    }
}

/* All changes of the phase go through here, so that the assertion meets each of them. */
void ms_reducer_enter(ms_reducer *reducer, ms_reducer_phase phase)
{
    MS_ASSERT(is_legal(reducer, phase));
    reducer->phase = phase;
}

/* The message is copied, since the engine's error record is used again. Peers may wait in a
 * collective for this rank; the abort is what frees them. */
ms_status ms_reducer_end_job(ms_reducer *reducer, ms_status status)
{
    const ms_error *error = ms_engine_error(reducer->source.engine);
    ms_reducer_enter(reducer, MS_REDUCER_REDUCED);
    snprintf(reducer->source.error, sizeof reducer->source.error, "%s", error->message);
    ms_comm_abort(reducer->source.engine, error);
    return status;
}

/* ---------------------------------------------------------------- launching */

/* Whether a chain has left its result in place, so that no copy is needed. */
static bool is_same_memory(const ms_tensor *a, const ms_tensor *b)
{
    return ms_tensor_storage(a) == ms_tensor_storage(b)
           && ms_tensor_offset(a) == ms_tensor_offset(b)
           && ms_tensor_count(a) == ms_tensor_count(b);
}

/* Buckets of delayed parameters pass no hook. account NULL keeps their bytes and times from being
 * charged to any link. */
static ms_status reduce_plainly(ms_reducer *reducer, ms_bucket *bucket, ms_tensor **result)
{
    bucket->account = NULL;
    return ms_chain_run(reducer->hooks.plain, reducer->hooks.plain_count, bucket, result);
}

/* Runs the hook with the communication stream current, and leaves its result in the bucket's
 * memory. Whatever a link has put in the buffer's place is released here, also after a failure. A
 * result in other memory is copied: parameters' gradients are views of the bucket and stay so. */
static ms_status run_hook(ms_reducer *reducer, ms_bucket_state *item)
{
    ms_bucket *bucket = &item->bucket;
    ms_tensor *result = NULL;
    ms_stream *stream = ms_engine_current(reducer->source.engine);
    item->ready[1] = (ms_point){ 0 };
    bucket->divisor = reducer->divisor;
    /* A script may put another buffer in its place on one rank alone, and in a join the factor
     * changes. */
    bool stays = item->plain || !reducer->hooks.hook;
    bucket->fixed_address =
        stays && reducer->divisor == ms_group_size(reducer->group) ? item->fixed_address : 0;
    ms_status status;
    if (item->plain) status = reduce_plainly(reducer, bucket, &result);
    else if (reducer->hooks.hook)
        status = reducer->hooks.hook(reducer->hooks.hook_user, bucket, &result, &item->ready[1]);
    else status = ms_chain_run(reducer->hooks.links, reducer->hooks.link_count, bucket, &result);
    ms_bucket_set_buffer(bucket, bucket->flat);
    if (!status) status = ms_bucket_check_result(bucket, NULL, result);
    if (!status && !is_same_memory(result, bucket->flat)) {
        status = ms_stream_wait(stream, item->ready[1]);
        if (!status) status = ms_copy_into(reducer->source.engine, result, bucket->flat);
    }
    ms_tensor_release(result);
    return status;
}

/* Tells the optimizer overlap that a bucket's result is on its way; or MS_REDUCED_ALL. A rank in
 * shadow has no step to take for this pass. */
static ms_status call_on_reduced(ms_reducer *reducer, uint32_t bucket)
{
    if (!reducer->source.on_reduced || reducer->pass.shadow) return MS_OK;
    return reducer->source.on_reduced(reducer->source.on_reduced_user, bucket);
}

/* Enqueues the reduction of one bucket on the group's communication stream and returns; nothing
 * here blocks. The model's stream is current again at the end, whether or not the hook failed: the
 * caller goes on enqueuing backward on it. ready[0] is taken after the end of the times' mark, so a
 * wait for it also covers the mark. */
static ms_status launch(ms_reducer *reducer, ms_bucket_state *item)
{
    ms_stream *stream = NULL;
    ms_status status = ms_group_stream(reducer->group, 1, &stream);
    if (!status) status = ms_stream_wait_users(stream, item->bucket.flat);
    if (status) return status;
    ms_stream *before = ms_engine_set_current(reducer->source.engine, stream);
    status = ms_times_begin_reduction(&reducer->times, &item->bucket);
    if (!status) status = run_hook(reducer, item);
    if (!status) status = ms_times_end_reduction(&reducer->times, &item->bucket);
    item->ready[0] = ms_stream_last(stream);
    ms_engine_set_current(reducer->source.engine, before);
    return status ? status : call_on_reduced(reducer, item->bucket.index);
}

/* The end of a pass: the current stream waits for all results, so that what is enqueued after this
 * backward sees reduced gradients. The wait is between the marks AT_WAIT and AT_READY; their
 * difference is the exposed communication. Unused parameters are settled after that wait, because
 * old gradients are copied back over results. */
static ms_status finish(ms_reducer *reducer)
{
    ms_stream *current = ms_engine_current(reducer->source.engine);
    ms_status status = ms_times_note(&reducer->times, MS_AT_WAIT);
    for (uint32_t b = 0; b < reducer->buckets.count; b++)
        for (uint32_t i = 0; i < 2 && !status; i++)
            status = ms_stream_wait(current, reducer->buckets.items[b].ready[i]);
    if (!status) status = ms_times_note(&reducer->times, MS_AT_READY);
    if (!status) status = ms_unused_settle(reducer);
    ms_reducer_enter(reducer, MS_REDUCER_REDUCED);
    reducer->pass.left = false;
    ms_times_end_pass(&reducer->times);
    return status ? status : call_on_reduced(reducer, MS_REDUCED_ALL);
}

/* ----------------------------------------------------------------- counting */

/* Logs the order of gradients, from which buckets are rebuilt. Delayed parameters keep their
 * buckets and are left out. A static graph's first pass reduces everything at the end of backward,
 * in the order of positions, which says nothing about later passes. */
static ms_status log_arrival(ms_ddp_parameter *parameter)
{
    ms_reducer *reducer = parameter->reducer;
    bool is_ordered =
        !reducer->pass.apart && (!reducer->settings.static_graph || reducer->pass.counted);
    if (!reducer->pass.logging || parameter->position >= reducer->count - reducer->delayed
        || !is_ordered)
        return MS_OK;
    reducer->pass.arrival[reducer->pass.arrived++] = parameter->position;
    return reducer->settings.planned ? ms_times_gradient(&reducer->times, parameter->position)
                                     : MS_OK;
}

/* Buckets become complete in an order that may differ from rank to rank, but are launched in the
 * order of their index: a communicator matches the collectives of all ranks by their sequence. A
 * complete bucket therefore waits until those of lower index are complete, and one gradient may
 * launch several buckets. */
ms_status ms_gradient_ready(ms_ddp_parameter *parameter)
{
    ms_reducer *reducer = parameter->reducer;
    ms_bucket_list *buckets = &reducer->buckets;
    ms_bucket_state *bucket = &buckets->items[parameter->bucket];
    MS_ASSERT(!parameter->ready && bucket->pending > 0);
    parameter->ready = true;
    ms_status status = log_arrival(parameter);
    if (--bucket->pending == 0 && !status)
        status = ms_times_bucket_complete(&reducer->times, parameter->bucket);
    while (!status && reducer->pass.next_bucket < buckets->count
           && buckets->items[reducer->pass.next_bucket].pending == 0)
        status = launch(reducer, &buckets->items[reducer->pass.next_bucket++]);
    if (!status && reducer->pass.next_bucket == buckets->count
        && reducer->phase == MS_REDUCER_REDUCING)
        status = finish(reducer);
    return status;
}

/* `used` is left alone: a parameter that got a gradient in a pass without synchronization was used.
 */
void ms_reducer_reset(ms_reducer *reducer)
{
    reducer->pass.arrived = reducer->pass.next_bucket = 0;
    for (uint32_t i = 0; i < reducer->count; i++) reducer->parameters[i].ready = false;
    for (uint32_t b = 0; b < reducer->buckets.count; b++)
        reducer->buckets.items[b].pending = reducer->buckets.items[b].bucket.count;
}
