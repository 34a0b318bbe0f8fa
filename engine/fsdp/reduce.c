/* reduce.c: gradients of a unit: their memory during its backward, and their reduction to shards.
 *
 * The whole gradient is in the flat buffer of the bucket, in the order of the flat parameter, and
 * zeros are where no gradient has come. Its dtype is that of the reduction. Backward writes there
 * if it computes in that dtype. Otherwise each parameter's gradient, once it is whole, is cast and
 * added there. Its memory is taken when the unit's backward begins and
 * given back once the reduction is enqueued. Without a reduction (a pass that is not synchronized)
 * it stays, and the next backward adds to it.
 *
 * Each trainable flat parameter has one bucket. Its kind is the model's: reduce_scatter, or hybrid
 * where several ranks hold the same shard. The chain (ms_chain_run) or the script's hook reduces
 * it, and the result is checked (ms_bucket_check_result), as in ddp/bucket_launch.c. So every link
 * works on sharded models, too. */
#include "fsdp/reduce.h"

#include <math.h>

#include "fsdp/filled.h"
#include "fsdp/flat_param.h"
#include "fsdp/outer.h"
#include "fsdp/partial.h"
#include "fsdp/static_memory.h"
#include "fsdp/unit.h"
#include "grad/node.h"
#include "hook/link_ops.h"
#include "ops/values.h"

/* --------------------------------------------------------- before a backward */

/* A gradient that a script has put in the place of ours is copied there first. So are numbers of
 * an earlier reduction of this pass that may turn out to be a gradient. */
static ms_status hold(ms_member *member)
{
    ms_tensor *gradient = ms_tensor_grad(member->tensor);
    member->scaled |= gradient && ms_tensor_grad_is_marked(member->tensor);
    if (!gradient) gradient = member->unsure;
    member->held = gradient != NULL;
    if (!gradient) return MS_OK;
    ms_status status = ms_flat_param_make_reduced(member->flat);
    if (!status && gradient != member->reduced)
        status = ms_copy_into(member->flat->unit->fsdp->source.engine, gradient, member->reduced);
    if (member->unsure) member->unsure = member->reduced;
    return status ? status : ms_tensor_set_grad(member->tensor, NULL);
}

/* Also of unsharded parameters, whose reduced gradient may be in the bucket: the next reduction
 * would add what every rank has of it. */
ms_status ms_unit_hold_gradients(ms_unit *unit)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count; f++)
        for (uint32_t i = 0; i < unit->flats[f].count && !status; i++)
            if (unit->flats[f].trainable) status = hold(&unit->flats[f].members[i]);
    return status;
}

/* Whether backward computes the gradient in the bucket's dtype. */
static bool is_direct(const ms_member *member)
{
    return ms_tensor_dtype(member->tensor) == ms_tensor_dtype(member->gradient);
}

/* A member that has numbers of an earlier pass begins with them as its gradient. */
static ms_status expect(ms_member *member)
{
    if (!is_direct(member)) return MS_OK;
    ms_status status = ms_tensor_set_grad_home(member->tensor, member->gradient);
    if (!status && member->filled) status = ms_tensor_set_grad(member->tensor, member->gradient);
    return status;
}

/* Memory for the whole gradient, unless gradients of earlier passes are there. */
static ms_status take_memory(ms_flat_param *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    if (!ms_storage_is_dropped(ms_tensor_storage(flat->bucket.flat))) return MS_OK;
    for (uint32_t i = 0; i < flat->count; i++) flat->members[i].filled = false;
    return ms_static_memory_refill(&fsdp->memory.gradients, flat, flat->bucket.flat,
                                   ms_engine_current(fsdp->source.engine), &flat->block);
}

ms_status ms_unit_expect_gradients(ms_unit *unit)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        ms_flat_param *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        status = take_memory(flat);
        for (uint32_t i = 0; i < flat->count && !status; i++) {
            flat->members[i].fired = false;
            status = expect(&flat->members[i]);
        }
    }
    unit->backward.pending = unit->settings.trainable;
    return status;
}

/* ---------------------------------------------------------- after a backward */

/* What backward has added up of all uses is rounded here once, and its memory is given back. */
static ms_status collect_cast(ms_member *member)
{
    ms_engine *engine = member->flat->unit->fsdp->source.engine;
    ms_tensor *gradient = ms_tensor_grad(member->tensor);
    ms_status status = member->filled ? ms_flat_param_add(member->gradient, gradient)
                                      : ms_copy_into(engine, gradient, member->gradient);
    member->filled = true;
    member->scaled |= ms_tensor_grad_is_marked(member->tensor);
    return status ? status : ms_tensor_set_grad(member->tensor, NULL);
}

/* Needed where a hook has replaced the gradient, or backward could not write it to its home. */
ms_status ms_member_collect(ms_member *member)
{
    ms_tensor *gradient = ms_tensor_grad(member->tensor);
    if (!is_direct(member)) return collect_cast(member);
    member->filled = true;
    if (gradient == member->gradient) return MS_OK;
    ms_status status =
        ms_copy_into(member->flat->unit->fsdp->source.engine, gradient, member->gradient);
    return status ? status : ms_tensor_set_grad(member->tensor, member->gradient);
}

ms_status ms_unit_detach_gradients(ms_unit *unit)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count; f++) {
        ms_flat_param *flat = &unit->flats[f];
        for (uint32_t i = 0; i < flat->count && !status && flat->trainable; i++) {
            ms_member *member = &flat->members[i];
            member->scaled |= ms_tensor_grad_is_marked(member->tensor);
            status = ms_tensor_set_grad_home(member->tensor, NULL);
            if (!status) status = ms_tensor_set_grad(member->tensor, NULL);
        }
    }
    return status ? status : ms_unit_release(unit);
}

static ms_status restore(ms_flat_param *flat)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        ms_member *member = &flat->members[i];
        if (member->held && !member->unsure)
            status = ms_leaf_put_grad(member->tensor, member->reduced);
        member->held = false;
    }
    return status;
}

ms_status ms_unit_restore_gradients(ms_unit *unit)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count && !status; f++) status = restore(&unit->flats[f]);
    return status;
}

static ms_status zero(ms_tensor *view)
{
    return ms_tensor_count(view) ? ms_fill_into(ms_tensor_engine(view), view, 0) : MS_OK;
}

/* Zeros where no gradient came, and after the last parameter. */
static ms_status fill_gaps(ms_flat_param *flat)
{
    int64_t padding = flat->padded - flat->numbers, one = 1;
    ms_tensor *tail = NULL;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < flat->count && !status; i++)
        if (!flat->members[i].filled) status = zero(flat->members[i].gradient);
    if (status || padding == 0) return status;
    status = ms_tensor_window(flat->bucket.flat, 1, &padding, &one, flat->numbers, &tail);
    if (!status) status = zero(tail);
    ms_tensor_release(tail);
    return status;
}

/* As PyTorch, f16 sums of a number of ranks that is no power of two are divided by a power of two
 * before the sum, and by the rest after it; so their numbers are PyTorch's to the last bit, where
 * both add in one order. Powers of two give the same numbers either way. Only for a plain mean:
 * other links see what they reduce divided by all of `divisor`. */
static double split_divisor(const ms_flat_param *flat, double divisor)
{
    const ms_fsdp *fsdp = flat->unit->fsdp;
    bool plain = !fsdp->hooks.hook && fsdp->hooks.link_count == 1
                 && fsdp->hooks.links[0].kind == ms_link_find("reduce")
                 && fsdp->hooks.links[0].options.op == MS_REDUCE_OP_AVG;
    double before = 1;
    if (!plain || flat->reduces != MS_F16 || flat->bucket.kind == MS_BUCKET_HYBRID) return divisor;
    while (fmod(divisor, before) == 0 && divisor / before > before) before *= 2;
    return before;
}

static ms_status divide(ms_tensor *tensor, double by)
{
    ms_attributes factor = { .scalar = { .value = by } };
    ms_tensor *same = NULL;
    if (by == 1) return MS_OK;
    ms_status status = ms_op_apply(ms_tensor_engine(tensor), &ms_op_div_scalar, &factor, true,
                                   &tensor, 1, &same, 1);
    ms_tensor_release(same);
    return status;
}

/* The chain's result, on the communication stream, which is current. */
static ms_status run_chain(ms_flat_param *flat, ms_tensor **result)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_bucket *bucket = &flat->bucket;
    /* `live` is 0 where there is one rank: live ranks are not counted there. */
    double divisor = fsdp->same.live_divisor && fsdp->same.live ? fsdp->same.live : fsdp->divisor;
    flat->ready[1] = (ms_point){ 0 };
    bucket->divisor = split_divisor(flat, divisor);
    /* A script may put another buffer in its place on one rank alone. */
    bucket->fixed_address =
        fsdp->hooks.hook ? 0 : ms_static_memory_number(&fsdp->memory.gradients, bucket->flat);
    ms_status status = ms_flat_param_add_carried(flat);
    if (!status)
        status = fsdp->hooks.hook
                     ? fsdp->hooks.hook(fsdp->hooks.hook_user, bucket, result, &flat->ready[1])
                     : ms_chain_run(fsdp->hooks.links, fsdp->hooks.link_count, bucket, result);
    ms_bucket_set_buffer(bucket, bucket->flat);
    if (!status) status = ms_bucket_check_result(bucket, NULL, *result);
    if (!status) status = divide(*result, divisor / bucket->divisor);
    return status ? status : ms_stream_wait(ms_engine_current(fsdp->source.engine), flat->ready[1]);
}

/* The name of a member whose gradient a loss scaler has multiplied, or NULL. */
static const char *first_marked(const ms_flat_param *flat)
{
    for (uint32_t i = 0; i < flat->count; i++)
        if (flat->members[i].scaled) return flat->members[i].name;
    return NULL;
}

/* Whether some member has a gradient of earlier passes, or of an earlier backward in this one. */
static bool has_held(const ms_flat_param *flat)
{
    for (uint32_t i = 0; i < flat->count; i++)
        if (flat->members[i].held) return true;
    return false;
}

/* Adds a reduced gradient to another, whose numbers count only where they are held. */
static ms_status add(ms_flat_param *flat, ms_tensor *to, ms_tensor *from)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < flat->count && !status; i++)
        if (!flat->members[i].held) status = zero(flat->members[i].reduced);
    return status ? status : ms_flat_param_add(to, from);
}

/* Gradients of unsharded parameters may stay in the bucket, those of pieces are in `reduced`. What
 * is held of earlier passes, always in `reduced`, is added. */
static ms_status keep_result(ms_flat_param *flat, ms_tensor *result)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_tensor *whole = flat->bucket.flat;
    ms_status status = MS_OK;
    bool any = has_held(flat);
    if (ms_flat_param_is_in_bucket(flat)) {
        if (ms_tensor_storage(result) != ms_tensor_storage(whole))
            status = ms_copy_into(engine, result, whole);
        return status || !any ? status : add(flat, whole, flat->reduced);
    }
    status = ms_flat_param_make_reduced(flat);
    if (status || ms_tensor_storage(result) == ms_tensor_storage(flat->reduced)) return status;
    return any ? add(flat, flat->reduced, result) : ms_copy_into(engine, result, flat->reduced);
}

/* The optimizer of the last step may still read what is reduced there. */
static ms_status await_readers(ms_flat_param *flat)
{
    ms_stream *stream = ms_engine_current(flat->bucket.engine);
    return flat->reduced ? ms_stream_wait_users(stream, flat->reduced) : MS_OK;
}

/* Both on the communication stream, which is current. Links that hold results write them to where
 * the gradients of pieces will be. */
static ms_status reduce_wholly(ms_flat_param *flat, ms_tensor **result)
{
    ms_status status = MS_OK;
    if (flat->unit->fsdp->hooks.whole_results && !ms_flat_param_is_in_bucket(flat)) {
        status = ms_flat_param_make_reduced(flat);
        if (!status) status = await_readers(flat);
        if (!flat->bucket.continues) flat->bucket.result = flat->reduced;
    }
    if (!status) status = run_chain(flat, result);
    if (!status) status = await_readers(flat);
    return status ? status : keep_result(flat, *result);
}

static ms_status reduce_partly(ms_flat_param *flat, ms_tensor **result)
{
    ms_status status = ms_flat_param_run_partly(flat, result);
    ms_bucket_set_buffer(&flat->bucket, flat->bucket.flat);
    return status ? status : ms_flat_param_carry(flat, *result);
}

/* All on the communication stream, so that the model's stream does not wait. */
static ms_status launch(ms_flat_param *flat, ms_stream *stream)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_engine *engine = fsdp->source.engine;
    ms_tensor *result = NULL;
    ms_status status = ms_stream_wait_users(stream, flat->bucket.flat);
    if (status) return status;
    ms_stream *before = ms_engine_set_current(engine, stream);
    status = ms_times_begin_reduction(&fsdp->times, &flat->bucket);
    if (!status)
        status = ms_flat_param_is_partial(flat) ? reduce_partly(flat, &result)
                                                : reduce_wholly(flat, &result);
    if (!status) status = ms_times_end_reduction(&fsdp->times, &flat->bucket);
    if (!status && !ms_flat_param_is_partial(flat)) status = ms_outer_add_after(flat);
    flat->ready[0] = ms_stream_last(stream);
    ms_engine_set_current(engine, before);
    ms_tensor_release(result);
    return status;
}

/* Marks stay until there is a gradient. */
static ms_status keep_partly(ms_flat_param *flat)
{
    for (uint32_t i = 0; i < flat->count; i++) {
        flat->members[i].carried |= flat->members[i].filled;
        flat->members[i].filled = false;
    }
    return restore(flat);
}

/* The reduced gradient becomes the gradient of the pieces, where some rank has filled it. What was
 * reduced within the shard group only is no gradient yet. */
static ms_status hand_out(ms_flat_param *flat)
{
    ms_status status = MS_OK;
    if (ms_flat_param_is_partial(flat)) return keep_partly(flat);
    for (uint32_t i = 0; i < flat->count && !status; i++) {
        ms_member *member = &flat->members[i];
        bool has = ms_member_has_gradient(member);
        ms_outer_forget(member); /* it is in the reduced gradient */
        member->held = member->filled = false;
        if (!has) continue;
        status = ms_leaf_put_grad(
            member->tensor, ms_flat_param_is_in_bucket(flat) ? member->gradient : member->reduced);
        if (!status && member->scaled) ms_tensor_grad_mark(member->tensor);
        member->scaled = false;
    }
    return status;
}

/* The model's stream waits here if too many reductions are under way: each holds a whole gradient.
 * The memory is given back in stream order, once it is read. */
ms_status ms_flat_param_reduce(ms_flat_param *flat, uint32_t index, bool is_last)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_stream *stream = NULL;
    size_t first = ms_trace_count(fsdp->source.engine);
    ms_status status = ms_outer_add_before(flat);
    if (!status) status = fill_gaps(flat);
    flat->bucket.index = index;
    flat->bucket.is_last = is_last;
    flat->bucket.result = NULL;
    flat->bucket.continues = fsdp->now.continues || has_held(flat);
    flat->bucket.scaled = first_marked(flat);
    if (!status) status = ms_group_stream(fsdp->group, 1, &stream);
    if (!status)
        status =
            ms_inflight_acquire(fsdp->memory.reductions, ms_engine_current(fsdp->source.engine), 1);
    if (!status) status = launch(flat, stream);
    if (!status) status = ms_inflight_release(fsdp->memory.reductions, flat->ready[0], 1);
    if (!status && !ms_flat_param_is_in_bucket(flat))
        status = ms_static_memory_drop(&fsdp->memory.gradients, flat->bucket.flat,
                                       ms_unit_called(flat->unit));
    if (!status) status = hand_out(flat);
    ms_unit_note(flat->unit, "reduce_grad", first);
    return status;
}

/* ------------------------------------------------------ without a backward */

ms_status ms_unit_prepare_reduction(ms_unit *unit, bool scaled)
{
    ms_status status = ms_unit_hold_gradients(unit);
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        ms_flat_param *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        status = take_memory(flat);
        for (uint32_t i = 0; i < flat->count; i++) flat->members[i].scaled |= scaled;
    }
    return status;
}

static bool has_leftover(const ms_flat_param *flat)
{
    if (!flat->trainable) return false;
    if (ms_outer_is_left(flat)) return true;
    if (flat->carried) return !ms_flat_param_is_partial(flat);
    if (ms_storage_is_dropped(ms_tensor_storage(flat->bucket.flat))) return false;
    for (uint32_t i = 0; i < flat->count; i++)
        if (flat->members[i].filled) return true;
    return false;
}

bool ms_unit_has_leftover(const ms_unit *unit)
{
    for (uint32_t f = 0; f < unit->count; f++)
        if (has_leftover(&unit->flats[f])) return true;
    return false;
}
