/* error_feedback.c: what later links lose of this rank's numbers is added to its numbers of the
 * next iteration.
 *
 * The residual is what went in, less what was sent, which each reduction reports
 * (ms_bucket_set_sent): from the result alone, a reduction with a residual of its own would have
 * every loss counted twice. Between encode and decode the state's tensor holds what went in.
 *
 * A second one in a chain would add every loss twice, and is refused. */
#include "hook/links.h"

#include "hook/tensors.h"

/* With residual e, decay d and gradient g: e = d e + g in f32, and the buffer becomes e, rounded to
 * its dtype. The state then holds what went in, before that rounding, so the loss of the rounding
 * is part of the next residual too. */
ms_status ms_error_feedback_encode(const ms_link *link, ms_bucket *bucket)
{
    ms_tensor *residual = NULL, *wide = NULL;
    ms_status status = ms_link_state_tensor(link->state, bucket, "error", NULL, NULL, &residual);
    if (!status && link->options.decay != 1)
        status = ms_link_change(&ms_op_mul_scalar, link->options.decay, residual, NULL);
    if (!status) status = ms_link_cast(bucket->buffer, MS_F32, &wide);
    if (!status) status = ms_link_change(&ms_op_add, 1, residual, wide);
    if (!status) status = ms_copy_into(bucket->engine, residual, bucket->buffer);
    bucket->wants_sent = true;
    ms_bucket_mark_lossless(bucket);
    ms_tensor_release(wide);
    ms_tensor_release(residual);
    return status;
}

/* e = e - sent, where sent is what the other ranks received of this rank's numbers. An infinity or
 * NaN would stay in the residual for good and is replaced by 0. */
ms_status ms_error_feedback_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                                   ms_tensor *reduced, ms_tensor **out)
{
    (void)before;
    ms_tensor *residual = NULL;
    if (!bucket->sent)
        return ms_engine_fail(bucket->engine, MS_ERROR_STATE,
                              "error_feedback: the link that reduced bucket %u has not reported "
                              "what this rank sent: it calls bucket:set_sent(t), with the buffer "
                              "if it loses nothing or keeps a residual itself",
                              bucket->index);
    ms_status status = ms_link_state_tensor(link->state, bucket, "error", NULL, NULL, &residual);
    if (!status) status = ms_link_change(&ms_op_sub, 1, residual, bucket->sent);
    if (!status) status = ms_link_keep_finite(residual);
    ms_tensor_release(residual);
    if (!status) *out = ms_tensor_retain(reduced);
    return status;
}

/* A decay above 1 would let the residual grow without bound. */
ms_status ms_error_feedback_check(ms_engine *engine, const ms_link_options *options)
{
    if (options->decay >= 0 && options->decay <= 1) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                          "error_feedback: decay must be from 0 to 1, not %g", options->decay);
}
