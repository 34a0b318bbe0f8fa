/* clip.c: reduced gradients are scaled to a norm of at most max_norm: of each bucket by itself, of
 * all together, or by the norm of all in the step before.
 *
 * The norm of all is known after the last bucket only. So "global" is the first link of its chain,
 * keeps the results of the other links in the buckets' own memory, and scales all of them with the
 * last bucket: results of earlier buckets are not final until then.
 *
 * Of sharded buckets each rank has its shard: sums of squares are added over the shard group, once
 * for each norm that is needed. */
#include "hook/link_ops.h"

#include "hook/links.h"
#include "hook/link_state.h"
#include "moonshard/grad.h"

/* Adds up a sum of squares over the shard group, in place. The ranks of a shard group hold
 * different shards; the ranks outside of it hold the same ones, which must not be counted again. */
static void add_shards(ms_link_ops *w, ms_tensor *squares)
{
    ms_group *shards = NULL;
    ms_collective sum = { .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_SUM };
    if (w->status || w->bucket->kind == MS_BUCKET_ALL_REDUCE) return;
    w->status = ms_bucket_group(w->bucket, MS_LEVEL_SHARD, &shards);
    if (w->status) return;
    ms_tensor *number = ms_link_ops_view(w, squares, 0, 1, 0);
    if (!w->status) w->status = ms_link_wire(shards, number, MS_F32, &sum.in);
    ms_link_ops_own(w, sum.in);
    if (!w->status) w->status = ms_link_collective(w->bucket, shards, sum);
    ms_link_ops_copy(w, sum.in, number);
}

/* t *= min(1, max_norm / (norm + 1e-6)); squares: the sum of squares, one number. The factor stays
 * on the device, so no rank waits. All ranks compute it from the same bits. */
static void scale(ms_link_ops *w, ms_tensor *t, ms_tensor *squares)
{
    ms_tensor *factor = ms_link_ops_apply(w, &ms_op_sqrt, 0, squares, NULL);
    ms_link_ops_change(w, &ms_op_add_scalar, 1e-6, factor, NULL);
    ms_link_ops_change(w, &ms_op_rdiv_scalar, w->link->options.clip.max_norm, factor, NULL);
    ms_link_ops_change(w, &ms_op_minimum_scalar, 1, factor, NULL);
    if (!w->status)
        ms_link_ops_change(w, &ms_op_mul, 0, t, ms_link_ops_cast(w, factor, ms_tensor_dtype(t)));
}

/* The sum of squares of a tensor. */
static ms_tensor *squares_of(ms_link_ops *w, ms_tensor *t)
{
    ms_tensor *wide = ms_link_ops_cast(w, t, MS_F32),
              *norm = ms_link_ops_operator(w, &ms_op_norm,
                                           (ms_attributes){ .reduce = { .all = true, .p = 2 } },
                                           false, &wide, 1, NULL);
    return ms_link_ops_apply(w, &ms_op_square, 0, norm, NULL);
}

/* The state has the sums of squares of the step before and of this one. With the first bucket the
 * finished sum takes the place of the old one, unless it is not finite; then the one before it
 * stays. In the first step the old sum is 0, and nothing is scaled. */
static void by_last_step(ms_link_ops *w, ms_tensor *reduced)
{
    ms_tensor *both = NULL;
    if (!w->status) w->status = ms_link_state_shared(w->link->state, "squares", 2, NULL, &both);
    ms_link_ops_own(w, both);
    ms_tensor *before = ms_link_ops_view(w, both, 0, 1, 0),
              *now = ms_link_ops_view(w, both, 1, 1, 0);
    /* The sum of the pass before is complete now, and this pass begins a new one. */
    if (w->bucket->index == 0) {
        add_shards(w, now);
        /* is_finite ? now : before, on the device. */
        ms_tensor *choices[] = { ms_link_ops_apply(w, &ms_op_is_finite, 0, now, NULL), now,
                                 before };
        ms_link_ops_copy(
            w, ms_link_ops_operator(w, &ms_op_where, (ms_attributes){ 0 }, false, choices, 3, NULL),
            before);
        ms_link_ops_change(w, &ms_op_fill, 0, now, NULL);
    }
    ms_link_ops_change(w, &ms_op_add, 1, now, squares_of(w, reduced));
    scale(w, reduced, before);
}

/* Scales all buckets' results by the norm of all. The squares are added bucket by bucket, in order
 * of index, which is the same on all ranks. */
static void scale_held(ms_link_ops *w, ms_tensor *const *all, uint32_t count)
{
    ms_tensor *total = squares_of(w, all[0]);
    for (uint32_t i = 1; i < count && !w->status; i++) {
        ms_link_ops one = ms_link_ops_inner(w);
        ms_link_ops_change(&one, &ms_op_add, 1, total, squares_of(&one, all[i]));
        w->status = ms_link_ops_end(&one);
    }
    add_shards(w, total);
    for (uint32_t i = 0; i < count && !w->status; i++) {
        ms_link_ops one = ms_link_ops_inner(w);
        scale(&one, all[i], total);
        w->status = ms_link_ops_end(&one);
    }
}

/* Keeps this result until the last bucket. It is copied to where the gradients are: a later change
 * of a result in other memory would not reach them. A pass that was
 * broken off leaves tensors in the state; the first bucket drops them. */
static ms_status all_together(ms_link_ops *w, ms_tensor *reduced, ms_tensor **out)
{
    ms_bucket *bucket = w->bucket;
    ms_link_state *state = w->link->state;
    ms_tensor *place = NULL;
    uint32_t held = 0;
    if (bucket->index == 0) ms_link_state_let_go(state);
    if (bucket->result) place = ms_tensor_retain(bucket->result);
    else w->status = ms_link_place(bucket, bucket->flat, &place);
    ms_link_ops_own(w, place);
    if (reduced != place) ms_link_ops_copy(w, reduced, place);
    if (!w->status) w->status = ms_link_state_hold(state, place);
    ms_tensor *const *all = ms_link_state_held(state, &held);
    if (bucket->is_last && !w->status) scale_held(w, all, held);
    if (bucket->is_last) ms_link_state_let_go(state);
    if (!w->status) *out = ms_tensor_retain(place);
    return ms_link_ops_end(w);
}

/* Changes nothing; it only refuses gradients whose norm is not that of the gradients: under a loss
 * scale, and where only this pass's part of them is here. */
ms_status ms_clip_encode(const ms_link *link, ms_bucket *bucket)
{
    (void)link;
    ms_status status = MS_OK;
    if (bucket->continues)
        return ms_engine_fail(bucket->engine, MS_ERROR_STATE,
                              "clip: gradients of earlier passes are kept as shards, and this "
                              "pass's would be clipped without them: accumulate in no_sync or "
                              "with accumulate = \"local\", or clip after backward "
                              "(model:clip_grad_norm)");
    const char *scaled = bucket->scaled;
    for (uint32_t i = 0; i < bucket->count && !scaled; i++)
        if (ms_tensor_grad_is_marked(bucket->parameters[i])) scaled = bucket->names[i];
    if (scaled)
        status = ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                                "clip: the gradient of '%s' is multiplied by a loss scale, and "
                                "only scaler:unscale divides it: clip by hand after it",
                                scaled);
    return status;
}

/* Scales the reduced result, so that all ranks scale by the same factor. */
ms_status ms_clip_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                         ms_tensor *reduced, ms_tensor **out)
{
    (void)before;
    ms_link_ops w = { .link = link, .bucket = bucket };
    if (link->options.clip.scope == MS_CLIP_GLOBAL) return all_together(&w, reduced, out);
    if (link->options.clip.scope == MS_CLIP_LAGGED) by_last_step(&w, reduced);
    else {
        ms_tensor *squares = squares_of(&w, reduced);
        add_shards(&w, squares);
        scale(&w, reduced, squares);
    }
    ms_status status = ms_link_ops_end(&w);
    if (!status) *out = ms_tensor_retain(reduced);
    return status;
}

/* Not above 0 also refuses NaN. */
ms_status ms_clip_check(ms_engine *engine, const ms_link_options *options)
{
    if (options->clip.max_norm > 0) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "clip: max_norm must be above 0, not %g",
                          options->clip.max_norm);
}
