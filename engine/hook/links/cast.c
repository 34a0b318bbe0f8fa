/* cast.c: the later links see the buffer in another float dtype. */
#include "hook/links.h"

#include "hook/tensors.h"

/* A cast loses only rounding. If the loss was known before, the buffer is marked as lossless again:
 * the reduction reports what travels, in the dtype of the cast, and the residual gets the rounding
 * from that report. The new buffer is in memory of the group, where the collective reads it without
 * a copy of its own. */
ms_status ms_cast_encode(const ms_link *link, ms_bucket *bucket)
{
    ms_tensor *made = NULL;
    bool known = ms_bucket_loss_is_known(bucket);
    ms_status status =
        ms_link_wire(ms_link_group(link, bucket), bucket->buffer, link->options.dtype, &made);
    if (status) return status;
    ms_bucket_set_buffer(bucket, made);
    if (known) ms_bucket_mark_lossless(bucket);
    ms_tensor_release(made);
    return MS_OK;
}

/* Where the result goes: the memory of the buffer that was encoded, or of this rank's shard of it;
 * new memory if the lengths do not fit. */
static ms_status place_for(ms_bucket *bucket, ms_tensor *before, int64_t count, ms_tensor **out)
{
    uint32_t own, shards = ms_bucket_shards(bucket, &own);
    if (count == ms_tensor_count(before) && shards == 1) {
        *out = ms_tensor_retain(before);
        return MS_OK;
    }
    if (count * shards == ms_tensor_count(before) && ms_tensor_is_contiguous(before))
        return ms_link_span(before, own * count, count, out);
    return ms_tensor_new(bucket->engine, ms_tensor_dtype(before), 1, &count, out);
}

/* Back to the dtype before the cast, in the memory of the buffer that was encoded, which needs no
 * allocation in the usual case. `before` is free to be overwritten: all that the later links wanted
 * of it they have. */
ms_status ms_cast_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                         ms_tensor *reduced, ms_tensor **out)
{
    (void)link;
    ms_tensor *made = NULL;
    ms_status status = place_for(bucket, before, ms_tensor_count(reduced), &made);
    if (!status) status = ms_copy_into(bucket->engine, reduced, made);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* Sums of integers would wrap around, and a mean has no integer form. */
ms_status ms_cast_check(ms_engine *engine, const ms_link_options *options)
{
    if (ms_dtype_is_float(options->dtype)) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                          "cast: dtype must be a float dtype (f16, bf16, f32), not %s",
                          ms_dtype_name(options->dtype));
}
