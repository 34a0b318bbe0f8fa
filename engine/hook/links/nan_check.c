/* nan_check.c: looks for infinities and NaN in each rank's numbers and in the result, over all
 * buckets of a pass. With the last bucket all ranks learn whether any rank has seen one: the
 * state's "bad" is then above 0, which optimizers read (or the check fails with an error). */
#include "hook/link_ops.h"

#include "hook/links.h"
#include "tensor/op.h"

/* bad = max(bad, 1 if t has an infinity or NaN). The flag stays on the device: reading it here
 * would make the host wait in every bucket. */
static void look(ms_link_ops *w, ms_tensor *t, ms_tensor *bad)
{
    ms_tensor *each = ms_link_ops_apply(w, &ms_op_is_finite, 0, t, NULL),
              *all = ms_link_ops_apply(w, &ms_op_every, 0, each, NULL);
    ms_tensor *other =
        ms_link_ops_apply(w, &ms_op_rsub_scalar, 1, ms_link_ops_cast(w, all, MS_F32), NULL);
    ms_link_ops_change(w, &ms_op_maximum, 0, bad, other);
}

/* One number for the whole pass, kept in the state so that all buckets share it. It is made of
 * zeros at its first use. */
static ms_tensor *flag(ms_link_ops *w)
{
    ms_tensor *bad = NULL;
    if (!w->status) w->status = ms_link_state_shared(w->link->state, "bad", 1, NULL, &bad);
    return ms_link_ops_own(w, bad);
}

/* The first bucket of a pass clears the flag, unless results are added to those of earlier passes.
 * This rank's numbers are looked at before the
 * reduction, because a minimum or a compressing link may hide a NaN. */
ms_status ms_nan_check_encode(const ms_link *link, ms_bucket *bucket)
{
    ms_link_ops w = { .link = link, .bucket = bucket };
    ms_tensor *bad = flag(&w);
    if (bucket->index == 0 && !bucket->continues) ms_link_ops_change(&w, &ms_op_fill, 0, bad, NULL);
    look(&w, bucket->buffer, bad);
    return ms_link_ops_end(&w);
}

/* The ranks compare their flags once for each pass, with the last bucket, so that all of them skip
 * the step or none does. "stop" fails on the device, in stream order, since the host does not know
 * the flag. */
ms_status ms_nan_check_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                              ms_tensor *reduced, ms_tensor **out)
{
    (void)before;
    ms_link_ops w = { .link = link, .bucket = bucket };
    ms_tensor *bad = flag(&w);
    look(&w, reduced, bad);
    if (bucket->is_last && !w.status)
        w.status = ms_link_collective(
            bucket, ms_link_group(link, bucket),
            (ms_collective){ .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_MAX, .in = bad });
    if (bucket->is_last && link->options.nan_check.action == MS_NAN_STOP && !w.status) {
        w.status =
            ms_stream_fail_if(ms_engine_current(bucket->engine), "nan_check",
                              ms_tensor_storage(bad), (size_t)ms_tensor_offset(bad) * sizeof(float),
                              "gradients are inf or nan (hooks.nan_check)");
    }
    ms_status status = ms_link_ops_end(&w);
    if (!status) *out = ms_tensor_retain(reduced);
    return status;
}
