/* error_feedback.c: what later links lose of this rank's numbers is added to its numbers of the
 * next iteration.
 *
 * The error is what went in, less what was sent, which each reduction tells (ms_bucket_set_sent):
 * one with a memory of its own would otherwise see every error twice. Between encode and decode the
 * state's tensor holds what went in.
 *
 * A second one in a chain would add every error twice, and is refused. */
#include "hook/links.h"

static ms_status encode(const ms_link *link, ms_bucket *bucket)
{
    ms_tensor *error = NULL, *wide = NULL;
    ms_status status = ms_link_refuse_feedback(link, bucket);
    if (!status) status = ms_link_check_length(link, bucket);
    if (!status) status = ms_link_state_tensor(link->state, bucket, "error", NULL, NULL, &error);
    if (!status && link->options.decay != 1)
        status = ms_link_change(&ms_op_mul_scalar, link->options.decay, error, NULL);
    if (!status) status = ms_link_cast(bucket->buffer, MS_F32, &wide);
    if (!status) status = ms_link_change(&ms_op_add, 1, error, wide);
    if (!status) status = ms_copy_into(bucket->engine, error, bucket->buffer);
    bucket->wants_sent = true;
    ms_bucket_tell(bucket);
    ms_tensor_release(wide);
    ms_tensor_release(error);
    return status;
}

static ms_status decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                        ms_tensor *reduced, ms_tensor **out)
{
    (void)before;
    ms_tensor *error = NULL, *sent = NULL;
    if (!bucket->sent)
        return ms_engine_fail(bucket->engine, MS_ERROR_STATE,
                              "error_feedback: the link that reduced bucket %u has not told what "
                              "this rank sent: it calls bucket:set_sent(t), with the buffer if it "
                              "loses nothing or keeps the rest itself",
                              bucket->index);
    ms_status status = ms_link_state_tensor(link->state, bucket, "error", NULL, NULL, &error);
    if (!status) status = ms_link_cast(bucket->sent, MS_F32, &sent);
    if (!status) status = ms_link_change(&ms_op_sub, 1, error, sent);
    if (!status) status = ms_link_keep_finite(error);
    ms_tensor_release(sent);
    ms_tensor_release(error);
    if (!status) *out = ms_tensor_retain(reduced);
    return status;
}

static ms_status check(ms_engine *engine, const ms_link_options *options)
{
    if (options->decay >= 0 && options->decay <= 1) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                          "error_feedback: decay must be from 0 to 1, not %g", options->decay);
}

const ms_link_kind ms_link_error_feedback = { .name = "error_feedback",
                                              .encode = encode,
                                              .decode = decode,
                                              .check = check,
                                              .defaults = { .decay = 1 },
                                              .has_state = true };
