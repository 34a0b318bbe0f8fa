/* bucket.c: what a link may ask of its bucket. */
#include "hook/bucket_rows.h"

#include <stdio.h>

#include "hook/tensors.h"

/* The names are those of the Lua API and of messages. */
const char *ms_bucket_kind_name(ms_bucket_kind kind)
{
    static const char *const names[] = { "all_reduce", "reduce_scatter", "hybrid" };
    return (unsigned)kind < MS_BUCKET_KINDS ? names[kind] : "unknown";
}

/* A level that the kind does not have is a group of this rank alone, so that a link may reduce over
 * any level of any bucket: over one rank a collective changes nothing. */
ms_status ms_bucket_group(ms_bucket *bucket, ms_bucket_level level, ms_group **out)
{
    /* all_reduce lacks the shard level: each rank has all numbers. reduce_scatter lacks the
     * replicate level: no other rank has this shard. */
    bool hybrid = bucket->kind == MS_BUCKET_HYBRID;
    ms_bucket_kind lacks =
        level == MS_LEVEL_SHARD ? MS_BUCKET_ALL_REDUCE : MS_BUCKET_REDUCE_SCATTER;
    *out = bucket->group;
    if (level == MS_LEVEL_ALL) return MS_OK;
    if (hybrid) *out = level == MS_LEVEL_SHARD ? bucket->shards : bucket->replicas;
    return bucket->kind == lacks ? ms_comm_alone(bucket->engine, out) : MS_OK;
}

/* Retains before it releases: the new buffer may be the old one, or a view of it. Nothing is
 * checked here: a link may encode into any dtype and length, and the links that cannot work on it
 * say so themselves (ms_link_check_bucket). */
void ms_bucket_set_buffer(ms_bucket *bucket, ms_tensor *tensor)
{
    ms_tensor *before = bucket->buffer;
    bucket->buffer = ms_tensor_retain(tensor);
    ms_tensor_release(before);
}

/* ----------------------------------------------------------- error feedback */

/* Keeps a copy, because a reduction may write its result where it reads. A tensor of another length
 * cannot be subtracted from the residual number by number, so it is refused. */
ms_status ms_bucket_set_sent(ms_bucket *bucket, ms_tensor *sent)
{
    ms_tensor *copy = NULL;
    int64_t count = ms_tensor_count(sent);
    if (count != ms_tensor_count(bucket->flat))
        return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                              "error_feedback: bucket %u has %lld numbers, but %lld travel: the "
                              "link that encodes them must report with set_sent what the other "
                              "ranks decode from them",
                              bucket->index, (long long)ms_tensor_count(bucket->flat),
                              (long long)count);
    ms_status status = ms_link_flat_copy(sent, &copy);
    if (status) return status;
    ms_tensor_release(bucket->sent);
    bucket->sent = copy;
    return MS_OK;
}

/* Storage and version together identify the contents: any later write changes the version. The
 * storage is only compared, never used, so it needs no reference. */
void ms_bucket_mark_lossless(ms_bucket *bucket)
{
    bucket->lossless = ms_tensor_storage(bucket->buffer);
    bucket->lossless_version = ms_tensor_version(bucket->buffer);
}

/* True where no link wants the residual: later losses then do not matter. A buffer of another
 * length makes the reduction ask for a report by itself, see ms_bucket_set_sent. */
bool ms_bucket_loss_is_known(const ms_bucket *bucket)
{
    if (!bucket->wants_sent || bucket->sent
        || ms_tensor_count(bucket->buffer) != ms_tensor_count(bucket->flat))
        return true;
    return ms_tensor_storage(bucket->buffer) == bucket->lossless
           && ms_tensor_version(bucket->buffer) == bucket->lossless_version;
}

/* -------------------------------------------------------- gradients, shards */

/* The bucket's own buffer has its views already. A link's buffer of the same length gets a view at
 * the same offset; one of another length has no parameters' shapes any more. */
ms_status ms_bucket_gradient(ms_bucket *bucket, uint32_t index, ms_tensor **out)
{
    const ms_tensor *view = bucket->gradients[index];
    char have[160];
    /* The usual case, in which a view exists already. */
    if (bucket->buffer == bucket->flat) {
        *out = ms_tensor_retain(bucket->gradients[index]);
        return MS_OK;
    }
    if (ms_tensor_count(bucket->buffer) != ms_tensor_count(bucket->flat)
        || !ms_tensor_is_contiguous(bucket->buffer))
        return ms_engine_fail(bucket->engine, MS_ERROR_STATE,
                              "gradients: the buffer was replaced by %s; it has views in the "
                              "parameters' shapes only while it is one piece of %lld numbers",
                              ms_tensor_describe(bucket->buffer, have, sizeof have),
                              (long long)ms_tensor_count(bucket->flat));
    return ms_tensor_window(bucket->buffer, ms_tensor_dims(view), ms_tensor_shape(view),
                            ms_tensor_strides(view),
                            ms_tensor_offset(view) - ms_tensor_offset(bucket->flat), out);
}

/* In a hybrid bucket the shard group decides: the ranks outside of it hold the same shards. */
uint32_t ms_bucket_shards(const ms_bucket *bucket, uint32_t *own)
{
    const ms_group *group = bucket->kind == MS_BUCKET_HYBRID ? bucket->shards : bucket->group;
    bool whole = bucket->kind == MS_BUCKET_ALL_REDUCE;
    *own = whole ? 0 : ms_group_rank(group);
    return whole ? 1 : ms_group_size(group);
}

/* Padding is at the end, so this is also the position at which it begins. */
int64_t ms_bucket_numbers(const ms_bucket *bucket)
{
    int64_t count = 0;
    for (uint32_t i = 0; i < bucket->count; i++) count += ms_tensor_count(bucket->gradients[i]);
    return count;
}

/* Shards are equal parts in the order of ranks of the shard group; padding makes the length divide.
 * A shard of rows is no one part of the tensor, so it is a copy. */
ms_status ms_bucket_shard(ms_bucket *bucket, ms_tensor *full, ms_tensor **out)
{
    char have[160];
    uint32_t own, shards = ms_bucket_shards(bucket, &own);
    int64_t count = ms_tensor_count(full), part = count / shards;
    if (count != ms_tensor_count(bucket->flat) || (shards > 1 && !ms_tensor_is_contiguous(full)))
        return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                              "shard: bucket %u has %lld numbers, the tensor is %s%s",
                              bucket->index, (long long)ms_tensor_count(bucket->flat),
                              ms_tensor_describe(full, have, sizeof have),
                              ms_tensor_is_contiguous(full) ? "" : ", not contiguous");
    if (bucket->kind == MS_BUCKET_ALL_REDUCE) {
        *out = ms_tensor_retain(full);
        return MS_OK;
    }
    if (!bucket->parts) return ms_link_span(full, own * part, part, out);
    ms_tensor *made = NULL;
    ms_status status = ms_tensor_new(bucket->engine, ms_tensor_dtype(full), 1, &part, &made);
    if (!status) status = ms_link_copy_shard(bucket, full, made);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* Called before a result is copied or kept. A result of the whole length for a sharded bucket is
 * the usual mistake, so the message says how to get the shard. */
ms_status ms_bucket_check_result(const ms_bucket *bucket, const char *hook, const ms_tensor *result)
{
    char have[160];
    const char *of = hook ? "; the hook is " : "", *hint = "";
    uint32_t own, shards = ms_bucket_shards(bucket, &own);
    int64_t count = ms_tensor_count(result), length = ms_tensor_count(bucket->flat) / shards;
    if (!hook) hook = "";
    /* A script with two engines could return a tensor of the other one. */
    if (ms_tensor_engine(result) != bucket->engine)
        return ms_engine_fail(
            bucket->engine, MS_ERROR_ARGUMENT,
            "comm hook, bucket %u \"%s\": it returned a tensor of another device%s%.200s",
            bucket->index, bucket->label, of, hook);
    bool contiguous = ms_tensor_is_contiguous(result);
    if (count == length && contiguous && ms_tensor_dims(result) == 1
        && (ms_tensor_dtype(result) == ms_tensor_dtype(bucket->flat) || result == bucket->result))
        return MS_OK;
    if (shards > 1 && count == length * shards)
        hint = " (this rank's shard, as bucket:shard(t) gives it)";
    return ms_engine_fail(
        bucket->engine, MS_ERROR_ARGUMENT,
        "comm hook, bucket %u \"%s\": it returned %s%s, expected is [%lld] %s%s%s%.200s",
        bucket->index, bucket->label, ms_tensor_describe(result, have, sizeof have),
        contiguous ? "" : ", not contiguous", (long long)length,
        ms_dtype_name(ms_tensor_dtype(bucket->flat)), hint, of, hook);
}
