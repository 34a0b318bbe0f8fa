/* unused.c: parameters that get no gradient in a pass: what they contribute to the reduction, and
 * what becomes of their gradients. */
#include "ddp/unused.h"

#include "ddp/buckets.h"
#include "ops/values.h"
#include "tensor/op.h"

/* ------------------------------------------------------------- contribution */

/* Writes zeros into a view of the bucket: what a parameter without gradient adds to the sum. A task
 * of the current stream, which the launch of the bucket waits for. */
static ms_status zero(const ms_reducer *reducer, ms_tensor *view)
{
    ms_tensor *same = NULL;
    ms_attributes nothing = { .scalar = { .value = 0 } };
    ms_status status =
        ms_op_apply(reducer->source.engine, &ms_op_fill, &nothing, true, &view, 1, &same, 1);
    ms_tensor_release(same);
    return status;
}

/* A rank in shadow must not change its own gradient, which may be waiting for its step: it is
 * copied to memory outside of the bucket before the bucket's view is overwritten. */
static ms_status move_out(ms_ddp_parameter *parameter)
{
    ms_tensor *copy = NULL;
    ms_status status =
        ms_op_unary(parameter->reducer->source.engine, &ms_op_clone, NULL, parameter->view, &copy);
    if (!status) status = ms_tensor_set_grad(parameter->tensor, copy);
    ms_tensor_release(copy);
    return status;
}

/* Three cases: a rank in shadow contributes zeros and keeps its gradient elsewhere; a gradient that
 * is there is contributed, with a copy kept if it is from before; no gradient contributes zeros. In
 * a static graph whose counts are known, a parameter that another rank uses gets the view as its
 * gradient at once, since no exchange follows. */
ms_status ms_unused_contribute(ms_ddp_parameter *parameter)
{
    ms_reducer *reducer = parameter->reducer;
    ms_tensor *gradient = ms_tensor_grad(parameter->tensor);
    if (reducer->pass.shadow) {
        ms_status status = gradient == parameter->view ? move_out(parameter) : MS_OK;
        return status ? status : zero(reducer, parameter->view);
    }
    /* The gradient is of passes without synchronization, or it is an old one, which is restored if
     * no rank used the parameter. */
    if (gradient) {
        ms_status status = ms_gradient_to_bucket(parameter);
        if (status || parameter->used) return status;
        return ms_op_unary(reducer->source.engine, &ms_op_clone, NULL, parameter->view,
                           &parameter->old_gradient);
    }
    parameter->used = false; /* the script has cleared the gradient that it got */
    ms_status status = zero(reducer, parameter->view);
    return !status && reducer->pass.counted && parameter->used_anywhere
               ? ms_tensor_set_grad(parameter->tensor, parameter->view)
               : status;
}

/* ----------------------------------------------------- after the reductions */

/* Without the two options every parameter must be used, and nothing is compared. */
ms_status ms_unused_open(ms_reducer *reducer)
{
    if (!reducer->settings.find_unused && !reducer->settings.static_graph) return MS_OK;
    return ms_allocate(ms_engine_context(reducer->source.engine), reducer->count * sizeof(int32_t),
                       "ddp", (void **)&reducer->uses);
}

/* Gradients that were kept from before a pass that never ended go here. */
void ms_unused_close(ms_reducer *reducer)
{
    for (uint32_t i = 0; reducer->parameters && i < reducer->count; i++)
        ms_tensor_release(reducer->parameters[i].old_gradient);
    ms_release(ms_engine_context(reducer->source.engine), reducer->uses);
}

/* uses[i] becomes the maximum over all ranks of how often parameter i was used. Every rank issues
 * this collective, or the sequences of the ranks would differ. A rank that used every parameter
 * itself knows the answer: it does not read it, and so does not wait. It goes out of band, on a
 * stream of its own, and starts while the devices still reduce. */
static ms_status share_uses(ms_reducer *reducer, bool read)
{
    ms_sharing sharing = { .kind = MS_ALL_REDUCE,
                           .op = MS_REDUCE_OP_MAX,
                           .dtype = MS_I32,
                           .count = reducer->count,
                           .label = "used parameters" };
    return read ? ms_group_share(reducer->group, &sharing, reducer->uses, reducer->uses)
                : ms_group_share_begin(reducer->group, &sharing, reducer->uses, NULL);
}

/* A parameter that this rank did not use. If another rank did, the mean is its gradient here, too;
 * if none did, it keeps the gradient that it had. */
static ms_status settle_one(ms_ddp_parameter *parameter)
{
    ms_reducer *reducer = parameter->reducer;
    ms_tensor *gradient = ms_tensor_grad(parameter->tensor);
    if (parameter->used_anywhere)
        return parameter->old_gradient || gradient || reducer->pass.counted
                   ? MS_OK
                   : ms_tensor_set_grad(parameter->tensor, parameter->view);
    return parameter->old_gradient && gradient == parameter->view
               ? ms_copy_into(reducer->source.engine, parameter->old_gradient, parameter->view)
               : MS_OK;
}

/* Fills uses with this rank's numbers; whether it left a parameter unused. Static graphs send
 * counts, which a rank in shadow takes over; otherwise 0 or 1 is enough. */
static bool count_uses(ms_reducer *reducer)
{
    bool any = false;
    for (uint32_t i = 0; i < reducer->count; i++) {
        const ms_ddp_parameter *parameter = &reducer->parameters[i];
        any |= !parameter->used;
        reducer->uses[i] = parameter->used;
        if (reducer->settings.static_graph) reducer->uses[i] = (int32_t)parameter->fired;
    }
    return any;
}

/* Called on every rank after the last launch. Static graphs ask only once, in the pass that counts;
 * a rank in shadow then learns the counts of the others. All flags of the pass are reset here, also
 * after a failure. */
ms_status ms_unused_settle(ms_reducer *reducer)
{
    bool ask =
        reducer->settings.static_graph ? !reducer->pass.counted : reducer->settings.find_unused;
    ms_status status = MS_OK;
    if (!reducer->settings.static_graph && !reducer->settings.find_unused) return MS_OK;
    bool any = count_uses(reducer);
    if (ask) status = share_uses(reducer, any);
    for (uint32_t i = 0; i < reducer->count; i++) {
        ms_ddp_parameter *parameter = &reducer->parameters[i];
        if (ask) parameter->used_anywhere = reducer->uses[i] > 0;
        /* The rank has seen no gradient itself, and takes over the counts of the others. */
        if (ask && reducer->pass.shadow) parameter->fired = (uint32_t)reducer->uses[i];
        if (!status && !parameter->used && !reducer->pass.shadow) status = settle_one(parameter);
        ms_tensor_release(parameter->old_gradient);
        parameter->old_gradient = NULL;
        parameter->used = false;
    }
    return status;
}

/* In the middle of a pass only this rank's own gradients are known; *known says so, because ranks
 * that decided by them would decide differently. */
bool ms_reducer_is_used(const ms_reducer *reducer, uint32_t position, bool *known)
{
    *known = true;
    if (position >= reducer->count) return false;
    if (!reducer->settings.find_unused && !reducer->settings.static_graph) return true;
    const ms_ddp_parameter *parameter = &reducer->parameters[position];
    *known = reducer->phase == MS_REDUCER_REDUCED
             || (reducer->settings.static_graph && reducer->pass.counted);
    return *known ? parameter->used_anywhere : parameter->used;
}
