/* clip.c: reduced gradients are scaled to a norm of at most max_norm: of each bucket by itself, of
 * all together, or by the norm of all in the step before.
 *
 * The norm of all is known behind the last bucket only, so "global" is the first link of its chain,
 * holds back what all others made, in the buckets' own memory, and scales it there: results before
 * the last bucket's are no results yet. */
#include "hook/work.h"

#include "moonshard/grad.h"

/* t *= min(1, max_norm / (norm + 1e-6)); squares: the sum of squares, one number. */
static void scale(ms_work *w, ms_tensor *t, ms_tensor *squares)
{
    ms_tensor *factor = ms_work_apply(w, &ms_op_sqrt, 0, squares, NULL);
    ms_work_change(w, &ms_op_add_scalar, 1e-6, factor, NULL);
    ms_work_change(w, &ms_op_rdiv_scalar, w->link->options.clip.max_norm, factor, NULL);
    ms_work_change(w, &ms_op_minimum_scalar, 1, factor, NULL);
    if (!w->status)
        ms_work_change(w, &ms_op_mul, 0, t, ms_work_cast(w, factor, ms_tensor_dtype(t)));
}

static ms_tensor *squares_of(ms_work *w, ms_tensor *t)
{
    ms_tensor *wide = ms_work_cast(w, t, MS_F32),
              *norm = ms_work_operator(w, &ms_op_norm,
                                       (ms_attributes){ .reduce = { .all = true, .p = 2 } }, false,
                                       &wide, 1, NULL);
    return ms_work_apply(w, &ms_op_square, 0, norm, NULL);
}

/* The state has the sums of squares of the step before and of this one. One that is not finite
 * tells nothing: the one before it holds on. */
static void by_last_step(ms_work *w, ms_tensor *reduced)
{
    ms_tensor *both = NULL;
    if (!w->status) w->status = ms_link_state_shared(w->link->state, "squares", 2, NULL, &both);
    ms_work_own(w, both);
    ms_tensor *before = ms_work_view(w, both, 0, 1, 0), *now = ms_work_view(w, both, 1, 1, 0);
    if (w->bucket->index == 0) {
        ms_tensor *choices[] = { ms_work_apply(w, &ms_op_is_finite, 0, now, NULL), now, before };
        ms_work_copy(
            w, ms_work_operator(w, &ms_op_where, (ms_attributes){ 0 }, false, choices, 3, NULL),
            before);
        ms_work_change(w, &ms_op_fill, 0, now, NULL);
    }
    ms_work_change(w, &ms_op_add, 1, now, squares_of(w, reduced));
    scale(w, reduced, before);
}

static ms_status all_together(ms_work *w, ms_tensor *reduced, ms_tensor **out)
{
    ms_bucket *bucket = w->bucket;
    ms_link_state *state = w->link->state;
    uint32_t held = 0;
    if (bucket->index == 0) ms_link_state_let_go(state);
    if (reduced != bucket->flat && !w->status) ms_work_copy(w, reduced, bucket->flat);
    if (!w->status) w->status = ms_link_state_hold(state, bucket->flat);
    ms_tensor *const *all = ms_link_state_held(state, &held);
    if (bucket->is_last && !w->status) {
        ms_tensor *total = squares_of(w, all[0]);
        for (uint32_t i = 1; i < held && !w->status; i++) {
            ms_work one = { .link = w->link, .bucket = bucket };
            ms_work_change(&one, &ms_op_add, 1, total, squares_of(&one, all[i]));
            w->status = ms_work_end(&one);
        }
        for (uint32_t i = 0; i < held && !w->status; i++) {
            ms_work one = { .link = w->link, .bucket = bucket };
            scale(&one, all[i], total);
            w->status = ms_work_end(&one);
        }
    }
    if (bucket->is_last) ms_link_state_let_go(state);
    ms_status status = ms_work_end(w);
    if (!status) *out = ms_tensor_retain(bucket->flat);
    return status;
}

static ms_status encode(const ms_link *link, ms_bucket *bucket)
{
    ms_status status = ms_link_refuse_feedback(link, bucket);
    for (uint32_t i = 0; i < bucket->count && !status; i++)
        if (ms_tensor_grad_is_marked(bucket->parameters[i]))
            status = ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                                    "clip: the gradient of '%s' is multiplied by a loss scale, and "
                                    "only scaler:unscale divides it: clip by hand after it",
                                    bucket->names[i]);
    return status;
}

static ms_status decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                        ms_tensor *reduced, ms_tensor **out)
{
    (void)before;
    ms_work w = { .link = link, .bucket = bucket };
    if (link->options.clip.scope == MS_CLIP_GLOBAL) return all_together(&w, reduced, out);
    if (link->options.clip.scope == MS_CLIP_LAGGED) by_last_step(&w, reduced);
    else scale(&w, reduced, squares_of(&w, reduced));
    ms_status status = ms_work_end(&w);
    if (!status) *out = ms_tensor_retain(reduced);
    return status;
}

static ms_status check(ms_engine *engine, const ms_link_options *options)
{
    if (options->clip.max_norm > 0) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "clip: max_norm must be above 0, not %g",
                          options->clip.max_norm);
}

const ms_link_kind ms_link_clip = {
    .name = "clip", .encode = encode, .decode = decode, .check = check, .has_state = true
};
