/* outer.c: gradients of uses outside of units: of a penalty on weights, which sees pieces.
 *
 * Inside of its unit a parameter is whole, and its gradient is reduced. Outside it is this rank's
 * piece, or, unsharded, the parameter itself, and the tape keeps the gradient of such uses apart
 * (ms_leaf_set_outer). The gradient of a piece is of this rank's numbers alone: it is added to the
 * reduced gradient, times what a reduction would have made of equal parts of all ranks. That of an
 * unsharded parameter is one of several ranks' parts, and goes into the bucket. So either is what
 * it is under ddp, if all ranks compute the penalty.
 *
 * It waits in `outer` for the reduction that follows, at most until the end of the backward. Where
 * a policy has stepped the parameter already, it is refused. */
#include "fsdp/outer.h"

#include "fsdp/flat_param.h"
#include "grad/node.h"
#include "hook/link_ops.h"
#include "ops/values.h"

static ms_status refuse(const ms_member *member, const char *why)
{
    return ms_engine_fail(member->fsdp->source.engine, MS_ERROR_STATE,
                          "fsdp: '%s' got a gradient from outside of its unit \"%s\" %s",
                          member->name, ms_unit_called(member->flat->unit), why);
}

ms_status ms_outer_take(ms_member *member, ms_tensor *gradient)
{
    const ms_fsdp *fsdp = member->fsdp;
    ms_status status = MS_OK;
    if (fsdp->same.joining)
        status = refuse(member, "in a join, and ranks without inputs left would lack it: add the "
                                "penalty inside of the unit's forward, or use weight_decay");
    else if (member->stepped)
        status = refuse(member, "after it was stepped in backward: compute what uses it there "
                                "after the forward, or step after backward");
    if (!status && member->outer) status = ms_flat_param_add(member->outer, gradient);
    else if (!status) member->outer = ms_tensor_retain(gradient);
    member->scaled |= ms_tensor_grad_is_marked(member->tensor);
    ms_tensor_release(gradient);
    return status;
}

/* The numbers of `from`, in the dtype of `to`, which has its shape. */
static ms_status add_or_copy(ms_tensor *to, ms_tensor *from, bool add)
{
    if (ms_tensor_count(to) == 0) return MS_OK;
    if (add) return ms_flat_param_add(to, from);
    return ms_copy_into(ms_tensor_engine(to), from, to);
}

ms_status ms_outer_add_before(ms_flat_param *flat)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < flat->count && !status && !ms_flat_param_is_sharded(flat); i++) {
        ms_member *member = &flat->members[i];
        if (!member->outer) continue;
        status = add_or_copy(member->gradient, member->outer, member->filled);
        member->filled = true;
        ms_outer_forget(member);
    }
    return status;
}

/* What the reduction makes of equal parts of all ranks; of a hook it is taken to be a mean. */
static double factor_of(const ms_flat_param *flat)
{
    const ms_fsdp *fsdp = flat->unit->fsdp;
    double ranks = ms_group_size(flat->bucket.group);
    for (uint32_t i = 0; i < fsdp->hooks.link_count && !fsdp->hooks.hook; i++) {
        const ms_link *link = &fsdp->hooks.links[i];
        if (!link->kind->reduce) continue;
        if (link->options.op == MS_REDUCE_OP_SUM) return ranks;
        if (link->options.op == MS_REDUCE_OP_AVG) return ranks / fsdp->divisor;
    }
    return 1;
}

static ms_status scale(ms_member *member)
{
    ms_attributes factor = { .scalar = { .value = factor_of(member->flat) } };
    ms_tensor *scaled = NULL;
    if (factor.scalar.value == 1) return MS_OK;
    ms_status status = ms_op_unary(member->fsdp->source.engine, &ms_op_mul_scalar, &factor,
                                   member->outer, &scaled);
    if (status) return status;
    ms_tensor_release(member->outer);
    member->outer = scaled;
    return MS_OK;
}

/* The piece keeps `outer` until hand_out has seen it. */
ms_status ms_outer_add_after(ms_flat_param *flat)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < flat->count && !status && ms_flat_param_is_sharded(flat); i++) {
        ms_member *member = &flat->members[i];
        if (!member->outer) continue;
        status =
            ms_stream_wait_users(ms_engine_current(member->fsdp->source.engine), member->outer);
        if (!status) status = scale(member);
        if (!status) status = add_or_copy(member->reduced, member->outer, true);
    }
    return status;
}

bool ms_outer_is_left(const ms_flat_param *flat)
{
    for (uint32_t i = 0; i < flat->count && !ms_flat_param_is_sharded(flat); i++)
        if (flat->members[i].outer) return true;
    return false;
}

/* The piece's gradient is there, unless no reduction has come to it. */
static ms_status put(ms_member *member)
{
    ms_tensor *gradient = ms_tensor_grad(member->tensor);
    ms_status status = scale(member);
    if (!status && !gradient) status = ms_flat_param_make_reduced(member->flat);
    ms_tensor *to = gradient ? gradient : member->reduced;
    if (!status) status = add_or_copy(to, member->outer, gradient != NULL);
    if (!status && !gradient) status = ms_leaf_put_grad(member->tensor, to);
    if (!status && member->scaled) ms_tensor_grad_mark(member->tensor);
    member->scaled = false;
    ms_outer_forget(member);
    return status;
}

/* Of unsharded parameters it waits for a pass that reduces, like what the bucket has. */
ms_status ms_outer_end(ms_fsdp *fsdp)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < fsdp->member_count && !status; i++) {
        ms_member *member = &fsdp->members[i];
        member->stepped = false;
        if (member->outer && ms_flat_param_is_sharded(member->flat)) status = put(member);
    }
    return status;
}
