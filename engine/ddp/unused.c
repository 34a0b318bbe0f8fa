/* unused.c: parameters that get no gradient in a pass: which these are, what they bring to a
 * reduction, and what becomes of their gradients. */
#include "ddp/reducer.h"

#include "tensor/copy.h"
#include "tensor/op.h"

/* ---------------------------------------------------------- what they bring */

static ms_status zero(const ms_reducer *reducer, ms_tensor *view)
{
    ms_tensor *same = NULL;
    ms_attributes nothing = { .scalar = { .value = 0 } };
    ms_status status =
        ms_op_apply(reducer->engine, &ms_op_fill, &nothing, true, &view, 1, &same, 1);
    ms_tensor_release(same);
    return status;
}

/* A rank that only takes part leaves its own gradient as it is, elsewhere. */
static ms_status move_out(ms_slot_owner *owner)
{
    ms_tensor *copy = NULL;
    ms_status status = ms_op_unary(owner->reducer->engine, &ms_op_clone, NULL, owner->view, &copy);
    if (!status) status = ms_tensor_set_grad(owner->tensor, copy);
    ms_tensor_release(copy);
    return status;
}

static ms_status bring(ms_slot_owner *owner)
{
    ms_reducer *reducer = owner->reducer;
    ms_tensor *gradient = ms_tensor_grad(owner->tensor);
    if (reducer->shadow) {
        ms_status status = gradient == owner->view ? move_out(owner) : MS_OK;
        return status ? status : zero(reducer, owner->view);
    }
    /* A gradient from passes without synchronization, or an old one that is restored if no rank
     * used the parameter. */
    if (gradient) {
        ms_status status = ms_reducer_move_home(owner);
        if (status || owner->used) return status;
        return ms_op_unary(reducer->engine, &ms_op_clone, NULL, owner->view, &owner->kept);
    }
    owner->used = false; /* what it got, somebody has cleared */
    ms_status status = zero(reducer, owner->view);
    return !status && reducer->known && owner->elsewhere
               ? ms_tensor_set_grad(owner->tensor, owner->view)
               : status;
}

ms_status ms_unused_skip(ms_slot_owner *owner)
{
    ms_status status = bring(owner);
    return status ? status : ms_reducer_arrive(owner);
}

/* ----------------------------------------------------- what becomes of them */

ms_status ms_unused_open(ms_reducer *reducer)
{
    if (!reducer->find_unused && !reducer->static_graph) return MS_OK;
    return ms_allocate(ms_engine_context(reducer->engine), reducer->count * sizeof(int32_t), "ddp",
                       (void **)&reducer->uses);
}

void ms_unused_close(ms_reducer *reducer)
{
    for (uint32_t i = 0; reducer->owners && i < reducer->count; i++)
        ms_tensor_release(reducer->owners[i].kept);
    ms_release(ms_engine_context(reducer->engine), reducer->uses);
}

/* uses[i]: how often parameter i was used, the most of all ranks. A rank that knows the answer does
 * not read it, and so does not wait. */
static ms_status exchange(ms_reducer *reducer, bool read)
{
    ms_sharing sharing = { .kind = MS_ALL_REDUCE,
                           .op = MS_REDUCE_OP_MAX,
                           .dtype = MS_I32,
                           .count = reducer->count,
                           .label = "used parameters" };
    return read ? ms_group_share(reducer->group, &sharing, reducer->uses, reducer->uses)
                : ms_group_share_begin(reducer->group, &sharing, reducer->uses, NULL);
}

/* Used elsewhere: the reduced gradient is this rank's, too. By nobody: it keeps what it had. */
static ms_status settle_one(ms_slot_owner *owner)
{
    ms_reducer *reducer = owner->reducer;
    ms_tensor *gradient = ms_tensor_grad(owner->tensor);
    if (owner->elsewhere)
        return owner->kept || gradient || reducer->known
                   ? MS_OK
                   : ms_tensor_set_grad(owner->tensor, owner->view);
    return owner->kept && gradient == owner->view
               ? ms_copy_into(reducer->engine, owner->kept, owner->view)
               : MS_OK;
}

ms_status ms_unused_settle(ms_reducer *reducer)
{
    bool ask = reducer->static_graph ? !reducer->known : reducer->find_unused, any = false;
    ms_status status = MS_OK;
    if (!reducer->static_graph && !reducer->find_unused) return MS_OK;
    for (uint32_t i = 0; i < reducer->count; i++) {
        any |= !reducer->owners[i].used;
        reducer->uses[i] =
            reducer->static_graph ? (int32_t)reducer->owners[i].fired : reducer->owners[i].used;
    }
    if (ask) status = exchange(reducer, any);
    for (uint32_t i = 0; i < reducer->count; i++) {
        ms_slot_owner *owner = &reducer->owners[i];
        if (ask) owner->elsewhere = reducer->uses[i] > 0;
        if (ask && reducer->shadow) owner->fired = (uint32_t)reducer->uses[i];
        if (!status && !owner->used && !reducer->shadow) status = settle_one(owner);
        ms_tensor_release(owner->kept);
        owner->kept = NULL;
        owner->used = false;
    }
    return status;
}

bool ms_reducer_is_used(const ms_reducer *reducer, uint32_t position, bool *known)
{
    const ms_slot_owner *owner = &reducer->owners[position];
    *known = true;
    if (position >= reducer->count) return false;
    if (!reducer->find_unused && !reducer->static_graph) return true;
    *known = reducer->phase == MS_REDUCER_REDUCED || (reducer->static_graph && reducer->known);
    return *known ? owner->elsewhere : owner->used;
}

/* ---------------------------------------------------------- which these are */

ms_status ms_reducer_outputs(ms_reducer *reducer, ms_tensor *const *outputs, uint32_t count)
{
    void *memory = NULL;
    uint32_t absent = 0;
    if (reducer->phase != MS_REDUCER_EXPECTING || !reducer->find_unused || reducer->static_graph)
        return MS_OK;
    ms_status status =
        ms_allocate(ms_engine_context(reducer->engine),
                    reducer->count * (sizeof(ms_tensor *) + sizeof(bool)), "ddp", &memory);
    if (status) return status;
    ms_tensor **leaves = memory;
    bool *reached = (bool *)(leaves + reducer->count);
    for (uint32_t i = 0; i < reducer->count; i++) leaves[i] = reducer->owners[i].tensor;
    status = ms_graph_reaches(reducer->engine, outputs, count, leaves, reducer->count, reached);
    for (uint32_t i = 0; i < reducer->count && !status; i++)
        absent += reducer->owners[i].absent = !reached[i] && reducer->owners[i].missed;
    ms_release(ms_engine_context(reducer->engine), memory);
    if (status) return status;
    if (!absent && !reducer->looked)
        ms_log(ms_engine_context(reducer->engine), MS_LOG_WARN,
               "ddp: find_unused: the outputs of this forward depend on every parameter; where "
               "they always do, training is faster without find_unused");
    reducer->looked = reducer->told = true;
    /* No backward of this rank will come by: its part in the others' reductions is due now. */
    status = absent == reducer->count ? ms_reducer_begin(reducer) : MS_OK;
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}

/* Those that backward has not come to get no gradient any more: an output that the loss does not
 * use. */
static ms_status end_of_backward(void *user)
{
    ms_reducer *reducer = user;
    ms_status status = MS_OK;
    if (reducer->phase != MS_REDUCER_REDUCING) return MS_OK;
    for (uint32_t i = 0; i < reducer->count && !status; i++)
        if (!reducer->owners[i].ready) status = ms_unused_skip(&reducer->owners[i]);
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}

ms_status ms_reducer_begin(ms_reducer *reducer)
{
    bool by_graph = reducer->find_unused && !reducer->static_graph;
    bool all = true;
    for (uint32_t i = 0; i < reducer->count; i++) all &= reducer->owners[i].absent;
    reducer->phase = MS_REDUCER_REDUCING;
    ms_status status =
        by_graph && !all ? ms_backward_at_end(reducer->engine, end_of_backward, reducer) : MS_OK;
    for (uint32_t i = 0; i < reducer->count && !status; i++)
        if (reducer->owners[i].absent) status = ms_unused_skip(&reducer->owners[i]);
    return status;
}

/* ------------------------------------------------------------ static graphs */

/* How often each parameter gets a gradient is known now: all buckets go. Once more, where another
 * backward of this forward follows: a mean of means and new gradients is the mean of all. */
static ms_status end_of_first(void *user)
{
    ms_reducer *reducer = user;
    ms_status status = MS_OK;
    if (reducer->phase != MS_REDUCER_REDUCING) return MS_OK;
    ms_reducer_reset(reducer);
    for (uint32_t i = 0; i < reducer->count && !status; i++) {
        ms_slot_owner *owner = &reducer->owners[i];
        bool here = owner->used && ms_tensor_grad(owner->tensor);
        if (here) status = ms_reducer_move_home(owner);
        if (!status) status = here ? ms_reducer_arrive(owner) : ms_unused_skip(owner);
    }
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}

static ms_status changed(const ms_slot_owner *owner)
{
    ms_engine *engine = owner->reducer->engine;
    if (owner->absent)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "ddp: static_graph: the graph changed: '%s' got a gradient; it had "
                              "none in the first iteration",
                              owner->name);
    return ms_engine_fail(engine, MS_ERROR_STATE,
                          "ddp: static_graph: the graph changed: '%s' got its gradient %u times "
                          "behind one forward; in the first iteration it was %u",
                          owner->name, owner->fired, owner->expected);
}

ms_status ms_static_came(ms_slot_owner *owner)
{
    ms_reducer *reducer = owner->reducer;
    owner->fired++;
    owner->used = true;
    if (!reducer->known) {
        if (reducer->phase == MS_REDUCER_REDUCING) return MS_OK;
        if (reducer->phase == MS_REDUCER_REDUCED) reducer->iterations--; /* the same one goes on */
        reducer->phase = MS_REDUCER_REDUCING;
        return ms_backward_at_end(reducer->engine, end_of_first, reducer);
    }
    if (owner->fired > owner->expected) return changed(owner);
    ms_status status = reducer->phase == MS_REDUCER_EXPECTING ? ms_reducer_begin(reducer) : MS_OK;
    if (status || owner->fired < owner->expected) return status;
    status = ms_reducer_move_home(owner);
    return status ? status : ms_reducer_arrive(owner);
}

/* --------------------------------------------------------------------- join */

ms_status ms_reducer_shadow(ms_reducer *reducer)
{
    ms_status status = MS_OK;
    if (reducer->phase != MS_REDUCER_EXPECTING)
        return ms_engine_fail(
            reducer->engine, MS_ERROR_STATE,
            "ddp: a rank without inputs takes part behind a synchronized forward");
    reducer->shadow = true;
    reducer->phase = MS_REDUCER_REDUCING;
    ms_bucket_list *buckets = &reducer->buckets;
    for (uint32_t b = 0; b < buckets->count && !status; b++)
        for (uint32_t i = 0; i < buckets->items[b].bucket.count && !status; i++)
            status = ms_unused_skip(&reducer->owners[buckets->items[b].positions[i]]);
    reducer->shadow = false;
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}
