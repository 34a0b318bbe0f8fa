/* bucket.c: what a link may ask of its bucket. */
#include "hook/links.h"

#include <stdio.h>

const char *ms_bucket_kind_name(ms_bucket_kind kind)
{
    static const char *const names[] = { "all_reduce", "reduce_scatter", "hybrid" };
    return (unsigned)kind < 3 ? names[kind] : "unknown";
}

/* Whole copies are shards that everyone holds. */
ms_status ms_bucket_group(ms_bucket *bucket, ms_bucket_level level, ms_group **out)
{
    *out = bucket->group;
    bool whole = bucket->kind == MS_BUCKET_ALL_REDUCE;
    return (level == MS_LEVEL_SHARD && whole) || (level == MS_LEVEL_REPLICATE && !whole)
               ? ms_comm_alone(bucket->engine, out)
               : MS_OK;
}

void ms_bucket_set_buffer(ms_bucket *bucket, ms_tensor *tensor)
{
    ms_tensor *before = bucket->buffer;
    bucket->buffer = ms_tensor_retain(tensor);
    ms_tensor_release(before);
}

/* A copy: what reduces may write where it reads. */
ms_status ms_bucket_set_sent(ms_bucket *bucket, ms_tensor *sent)
{
    ms_tensor *copy = NULL;
    int64_t count = ms_tensor_count(sent);
    if (count != ms_tensor_count(bucket->flat))
        return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                              "error_feedback: bucket %u has %lld numbers, but %lld travel: the "
                              "link that encodes them must tell with set_sent what they stand for",
                              bucket->index, (long long)ms_tensor_count(bucket->flat),
                              (long long)count);
    ms_status status = ms_link_flat_copy(sent, &copy);
    if (status) return status;
    ms_tensor_release(bucket->sent);
    bucket->sent = copy;
    return MS_OK;
}

void ms_bucket_tell(ms_bucket *bucket)
{
    bucket->told = ms_tensor_storage(bucket->buffer);
    bucket->told_version = ms_tensor_version(bucket->buffer);
}

bool ms_bucket_is_told(const ms_bucket *bucket)
{
    if (!bucket->wants_sent || bucket->sent
        || ms_tensor_count(bucket->buffer) != ms_tensor_count(bucket->flat))
        return true;
    return ms_tensor_storage(bucket->buffer) == bucket->told
           && ms_tensor_version(bucket->buffer) == bucket->told_version;
}

ms_status ms_bucket_gradient(ms_bucket *bucket, uint32_t index, ms_tensor **out)
{
    const ms_tensor *view = bucket->gradients[index];
    char have[160];
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

/* How long a result is. Sharded kinds will have their part. */
static int64_t shard_count(const ms_bucket *bucket) { return ms_tensor_count(bucket->flat); }

ms_status ms_bucket_shard(ms_bucket *bucket, ms_tensor *full, ms_tensor **out)
{
    char have[160];
    if (ms_tensor_count(full) != ms_tensor_count(bucket->flat))
        return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                              "shard: bucket %u has %lld numbers, the tensor is %s", bucket->index,
                              (long long)ms_tensor_count(bucket->flat),
                              ms_tensor_describe(full, have, sizeof have));
    *out = ms_tensor_retain(full);
    return MS_OK;
}

ms_status ms_bucket_check_result(const ms_bucket *bucket, const char *hook, const ms_tensor *result)
{
    char have[160];
    const char *of = hook ? "; the hook is " : "";
    if (!hook) hook = "";
    if (ms_tensor_engine(result) != bucket->engine)
        return ms_engine_fail(
            bucket->engine, MS_ERROR_ARGUMENT,
            "comm hook, bucket %u \"%s\": it returned a tensor of another device%s%.200s",
            bucket->index, bucket->label, of, hook);
    if (ms_tensor_count(result) == shard_count(bucket)
        && ms_tensor_dtype(result) == ms_tensor_dtype(bucket->flat)
        && ms_tensor_is_contiguous(result))
        return MS_OK;
    return ms_engine_fail(
        bucket->engine, MS_ERROR_ARGUMENT,
        "comm hook, bucket %u \"%s\": it returned %s%s, expected is [%lld] %s%s%.200s",
        bucket->index, bucket->label, ms_tensor_describe(result, have, sizeof have),
        ms_tensor_is_contiguous(result) ? "" : ", not contiguous", (long long)shard_count(bucket),
        ms_dtype_name(ms_tensor_dtype(bucket->flat)), of, hook);
}
