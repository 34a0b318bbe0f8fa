/* links.c: what links do with their bucket: groups, collectives, checks. */
#include "hook/tensors.h"

#include <stdio.h>

/* The group that the link's options name, else the bucket's. Collectives are issued there, so all
 * ranks of the bucket must name the same one. */
ms_group *ms_link_group(const ms_link *link, const ms_bucket *bucket)
{
    return link->options.group ? link->options.group : bucket->group;
}

/* A mean over a group of the link's own is over its size. A mean over the bucket's group is over
 * the divisor, which a script may set (join counts only ranks that have inputs). */
double ms_link_share(const ms_link *link, const ms_bucket *bucket)
{
    return 1.0 / (link->options.group ? ms_group_size(link->options.group) : bucket->divisor);
}

/* Optimizers that step bucket by bucket ask this, and then wait for the last bucket. */
bool ms_link_is_whole(const ms_link *link)
{
    return link->kind->clips && link->options.clip.scope == MS_CLIP_GLOBAL;
}

/* clip by bucket keeps nothing from one bucket to the next, so several models may share it. */
bool ms_link_is_of_one_model(const ms_link *link)
{
    return link->kind->one_model
           && !(link->kind->clips && link->options.clip.scope == MS_CLIP_BUCKET);
}

/* With "stop" the stream fails, and there is no step to skip. */
bool ms_link_skips_steps(const ms_link *link)
{
    return link->kind->checks && link->options.nan_check.action == MS_NAN_SKIP;
}

/* A chain reports once: the first link that loses some of the numbers does. */
bool ms_link_reports(const ms_bucket *bucket) { return bucket->wants_sent && !bucket->sent; }

/* Every link's collective carries the bucket's index and label, for traces and for the messages of
 * ranks that disagree. It runs on the current stream, which is the communication stream in a chain.
 */
ms_status ms_link_collective(const ms_bucket *bucket, ms_group *group, ms_collective call)
{
    call.bucket = (int32_t)bucket->index;
    call.label = bucket->label;
    call.stream = ms_engine_current(bucket->engine);
    return ms_group_enqueue(group, 1, &call, NULL);
}

/* The group's memory is shared between ranks where the transport needs that. The memory is the
 * link's own until the collective is done with it: the tensor keeps it, and tasks that use it later
 * are in stream order. */
ms_status ms_link_wire(ms_group *group, ms_tensor *t, ms_dtype dtype, ms_tensor **out)
{
    ms_storage *storage = NULL;
    ms_tensor *made = NULL;
    ms_engine *engine = ms_tensor_engine(t);
    int64_t count = ms_tensor_count(t);
    size_t bytes = (size_t)count * ms_dtype_bytes(dtype);
    ms_status status = ms_group_storage(group, ms_engine_current(engine), bytes, &storage);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &count, &made);
    if (!status) status = ms_copy_into(engine, t, made);
    ms_storage_release(storage);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* The part of t that is this rank's where shards are cut anywhere; where they are cut by rows it is
 * only memory. */
ms_status ms_link_place(const ms_bucket *bucket, ms_tensor *t, ms_tensor **out)
{
    uint32_t own, shards = ms_bucket_shards(bucket, &own);
    int64_t count = ms_tensor_count(t), part = count / shards;
    if (bucket->kind == MS_BUCKET_ALL_REDUCE) {
        *out = ms_tensor_retain(t);
        return MS_OK;
    }
    if (part * shards != count)
        return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                              "the buffer of %lld numbers does not divide by the %u ranks of the "
                              "shard group: an encode that changes their number must keep it a "
                              "multiple of that",
                              (long long)count, shards);
    return ms_link_span(t, own * part, part, out);
}

/* ------------------------------------------------------------------- checks */

/* A link that computes on gradients needs the buffer as it came from the bucket but for its dtype.
 */
static ms_status check_floats(const ms_link *link, const ms_bucket *bucket)
{
    char have[160];
    const ms_tensor *buffer = bucket->buffer;
    if (ms_tensor_count(buffer) == ms_tensor_count(bucket->flat) && ms_tensor_is_contiguous(buffer)
        && ms_dtype_is_float(ms_tensor_dtype(buffer)))
        return MS_OK;
    return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                          "%s: bucket %u has %lld numbers, but the links before made them %s: put "
                          "it before links that change their number",
                          link->kind->name, bucket->index, (long long)ms_tensor_count(bucket->flat),
                          ms_tensor_describe(bucket->buffer, have, sizeof have));
}

/* It is checked when the bucket comes by, since only then it is known whether a link before has set
 * wants_sent: links in Lua may. */
ms_status ms_link_refuse_feedback(const ms_link *link, const ms_bucket *bucket)
{
    if (!bucket->wants_sent) return MS_OK;
    return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                          "%s: error_feedback stands before it, but its result is not the mean of "
                          "what ranks send, so residuals that are added later correct nothing",
                          link->kind->name);
}

/* no_feedback comes from the table of kinds: the link's result is not the mean of what ranks send.
 */
ms_status ms_link_check_bucket(const ms_link *link, const ms_bucket *bucket)
{
    if (link->kind->no_feedback && bucket->wants_sent) return ms_link_refuse_feedback(link, bucket);
    return link->kind->needs_floats ? check_floats(link, bucket) : MS_OK;
}
