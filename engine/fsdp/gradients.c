/* gradients.c: whole gradients outside of passes, while whole parameters are summoned.
 *
 * They are gathered one parameter at a time, so that the layout of shards does not matter: in order
 * of ranks, pieces are the parameter from end to end. A parameter without gradient on some ranks
 * has zeros there; without gradient on any rank it has none. The gradient of the piece is saved
 * meanwhile. Unsharded parameters have their whole gradients at all times. */
#include "fsdp/gradients.h"

#include "fsdp/flat_param.h"
#include "grad/node.h"
#include "hook/link_ops.h"
#include "ops/values.h"

/* ------------------------------------------------------------------- showing */

/* This rank's part, contiguous; owned. */
static ms_status own_part(ms_member *member, ms_tensor **out)
{
    ms_engine *engine = member->flat->unit->fsdp->source.engine;
    ms_tensor *gradient = ms_tensor_grad(member->tensor);
    bool has = gradient && member->length;
    ms_status status =
        ms_tensor_new(engine, member->flat->gradient_dtype, has ? ms_tensor_dims(gradient) : 1,
                      has ? ms_tensor_shape(gradient) : &member->length, out);
    if (status || member->length == 0) return status;
    return has ? ms_copy_into(engine, gradient, *out) : ms_fill_into(engine, *out, 0);
}

/* The whole gradient goes to the second pool. */
static ms_status move_out(ms_member *member)
{
    ms_tensor *offloaded = NULL;
    ms_status status =
        ms_copy_offloaded(member->fsdp->source.engine, member->whole_gradient, &offloaded);
    if (status) return status;
    ms_tensor_release(member->whole_gradient);
    member->whole_gradient = offloaded;
    return MS_OK;
}

static ms_status gather(ms_member *member, const int64_t *counts)
{
    const ms_flat_param *flat = member->flat;
    ms_engine *engine = flat->unit->fsdp->source.engine;
    ms_tensor *part = NULL;
    ms_point ready = { 0 };
    ms_status status = own_part(member, &part);
    if (!status)
        status = ms_tensor_new(engine, flat->gradient_dtype, member->dims, member->shape,
                               &member->whole_gradient);
    ms_collective call = { .kind = MS_ALL_GATHER,
                           .in = part,
                           .out = member->whole_gradient,
                           .counts = counts,
                           .bucket = -2 - (int32_t)flat->unit->index,
                           .label = member->name };
    if (!status) status = ms_group_enqueue(flat->shards, 2, &call, &ready);
    if (!status) status = ms_stream_wait(ms_engine_current(engine), ready);
    ms_tensor_release(part);
    return status;
}

/* Pieces are handles here. */
static ms_status save_grad(ms_member *member)
{
    ms_tensor *gradient = ms_tensor_grad(member->tensor);
    if (!gradient) return MS_OK;
    member->scaled |= ms_tensor_grad_is_marked(member->tensor);
    member->saved_grad = ms_tensor_retain(gradient);
    return ms_tensor_set_grad(member->tensor, NULL);
}

/* words: a word for each member, twice, and one for each rank. In a world without the others their
 * words are this rank's, so words do not tell what others have of a member. */
static ms_status gather_flat(ms_flat_param *flat, bool offload, int64_t *words)
{
    uint32_t ranks = ms_group_size(flat->shards), count = flat->count;
    int64_t *any = words + count, *lengths = any + count, first;
    ms_sharing sharing = { .kind = MS_ALL_REDUCE,
                           .op = MS_REDUCE_OP_MAX,
                           .dtype = MS_I64,
                           .count = count,
                           .label = "whole gradients" };
    for (uint32_t i = 0; i < count; i++) words[i] = ms_tensor_grad(flat->members[i].tensor) != NULL;
    ms_status status = ms_group_share(flat->shards, &sharing, words, any);
    for (uint32_t i = 0; i < count && !status; i++) {
        ms_member *member = &flat->members[i];
        for (uint32_t r = 0; r < ranks; r++) ms_flat_param_cut(member, r, &first, &lengths[r]);
        if (any[i]) status = gather(member, lengths);
        if (any[i] && offload && !status) status = move_out(member);
        if (!status) status = save_grad(member);
    }
    return status;
}

ms_status ms_gradients_gather(ms_unit *unit, bool offload)
{
    ms_context *context = ms_engine_context(unit->fsdp->source.engine);
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        ms_flat_param *flat = &unit->flats[f];
        size_t ranks = ms_group_size(flat->shards);
        void *words = NULL;
        if (!flat->trainable || !ms_flat_param_is_sharded(flat)) continue;
        status =
            ms_allocate(context, (2 * flat->count + ranks) * sizeof(int64_t), "summon", &words);
        if (!status) status = gather_flat(flat, offload, words);
        ms_release(context, words);
    }
    return status;
}

ms_status ms_gradients_show(ms_unit *unit)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count; f++)
        for (uint32_t i = 0; i < unit->flats[f].count && !status; i++) {
            ms_member *member = &unit->flats[f].members[i];
            if (member->whole_gradient)
                status = ms_leaf_put_grad(member->tensor, member->whole_gradient);
        }
    return status;
}

/* -------------------------------------------------------------------- hiding */

static ms_status as_dense(ms_engine *engine, ms_tensor *gradient, ms_tensor **out)
{
    if (!ms_tensor_is_contiguous(gradient)) return ms_copy_new(engine, gradient, out);
    *out = ms_tensor_retain(gradient);
    return MS_OK;
}

/* What a script has left as the gradient takes the place of the whole one. */
ms_status ms_gradients_take(ms_unit *unit)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count; f++)
        for (uint32_t i = 0; i < unit->flats[f].count && !status; i++) {
            ms_member *member = &unit->flats[f].members[i];
            if (!member->whole_gradient) continue;
            ms_tensor *left = ms_tensor_grad(member->tensor), *dense = NULL;
            if (left) status = as_dense(unit->fsdp->source.engine, left, &dense);
            ms_tensor_release(member->whole_gradient);
            member->whole_gradient = dense;
            member->cleared = left == NULL;
            if (!status) status = ms_tensor_set_grad(member->tensor, NULL);
        }
    return status;
}

/* This rank's part of the whole gradient goes to the piece's. */
static ms_status write_part(ms_member *member)
{
    ms_engine *engine = member->flat->unit->fsdp->source.engine;
    int64_t one = 1;
    ms_tensor *from = NULL, *to = NULL;
    ms_status status = MS_OK;
    if (!member->saved_grad)
        status = ms_tensor_new(engine, member->flat->gradient_dtype, ms_tensor_dims(member->tensor),
                               ms_tensor_shape(member->tensor), &member->saved_grad);
    if (status || member->length == 0) return status;
    status =
        ms_tensor_window(member->whole_gradient, 1, &member->length, &one, member->first, &from);
    if (!status) status = ms_tensor_window(member->saved_grad, 1, &member->length, &one, 0, &to);
    if (!status) status = ms_copy_into(engine, from, to);
    ms_tensor_release(from);
    ms_tensor_release(to);
    return status;
}

static ms_status put_back(ms_member *member, bool write)
{
    ms_status status = MS_OK;
    bool was_shown = member->whole_gradient || member->cleared;
    if (write && member->whole_gradient) status = write_part(member);
    if (!status && member->saved_grad && !(write && member->cleared)) {
        status = ms_leaf_put_grad(member->tensor, member->saved_grad);
        if (!status && member->scaled) ms_tensor_grad_mark(member->tensor);
    }
    if (was_shown) member->scaled = false;
    ms_tensor_release(member->whole_gradient);
    ms_tensor_release(member->saved_grad);
    member->whole_gradient = member->saved_grad = NULL;
    member->cleared = false;
    return status;
}

ms_status ms_gradients_put_back(ms_unit *unit, bool write)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count; f++)
        for (uint32_t i = 0; i < unit->flats[f].count && !status; i++)
            status = put_back(&unit->flats[f].members[i], write);
    return status;
}

void ms_gradients_forget(ms_member *member)
{
    ms_tensor_release(member->whole_gradient);
    ms_tensor_release(member->saved_grad);
    member->whole_gradient = member->saved_grad = NULL;
    member->cleared = false;
}
