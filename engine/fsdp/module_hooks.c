/* module_hooks.c: the moments at which a unit's use begins and ends, in forward and in backward.
 *
 * Backward has no calls of modules, so gradient hooks represent them. The gradient of an output of
 * a unit's forward is complete before any node of that forward runs: the unit's backward begins. It
 * ends when the gradients of all its parameters have been added up, or when those of all inputs of
 * its forwards are complete, or with the backward as a whole, whatever comes first. Accumulators
 * run as soon as they can (backward.c), so all gradients of the unit that will come are there when
 * those of its inputs are. The last use of frozen parameters is told by inputs only.
 *
 * A backward in two parts (grad.h) begins and ends the use of a unit twice. In the first part the
 * unit is whole, and no gradient comes to it: its memory is given back when those of its inputs are
 * complete. In the rest it is used as in one backward, but gathered only if something there reads
 * its values: gradients of weights do not, as a rule. The hooks of outputs and inputs are called in
 * both parts. Ranks that agree on each gather cannot do that.
 *
 * A recomputed forward has a backward of its own, inside of the outer one, in which no gradient of
 * a parameter is added up: the outer one does that when the inner one has ended. So inputs of a
 * recomputed forward tell nothing, and the gradients of its parameters tell all.
 *
 * In forward, lua/moonshard/parallel/fsdp/module_hooks.lua calls ms_fsdp_before_forward and
 * ms_fsdp_after_forward around the calls of a unit's modules. */
#include "fsdp/module_hooks.h"

#include "fsdp/lockstep.h"
#include "fsdp/outer.h"
#include "fsdp/pass.h"
#include "fsdp/reduce.h"
#include "fsdp/schedule.h"
#include "fsdp/secondary_shard.h"
#include "fsdp/unit.h"
#include "grad/backward.h"
#include "grad/node.h"
#include "tensor/state.h"

void ms_fsdp_let_go(ms_fsdp *fsdp)
{
    if (--fsdp->references == 0) ms_release(ms_engine_context(fsdp->source.engine), fsdp);
}

static void visit_free(void *user)
{
    ms_visit *visit = user;
    ms_fsdp *fsdp = visit->fsdp;
    ms_release(ms_engine_context(fsdp->source.engine), visit);
    ms_fsdp_let_go(fsdp);
}

/* Calls f with the whole gradient of the tensor, in every backward through its graph. */
static ms_status watch(ms_unit *unit, ms_tensor *tensor, uint32_t inputs, ms_gradient_function f)
{
    ms_fsdp *fsdp = unit->fsdp;
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(fsdp->source.engine), sizeof(ms_visit), "a unit", &memory);
    if (status) return status;
    ms_visit *visit = memory;
    *visit = (ms_visit){ .fsdp = fsdp,
                         .pass = fsdp->pass,
                         .forward = unit->forwards,
                         .unit = unit->index,
                         .inputs = inputs,
                         .recomputed = fsdp->now.in_backward,
                         .tensor = ms_tensor_origin(tensor) };
    fsdp->references++;
    status = ms_tensor_on_parts(tensor, f, visit, visit_free);
    if (status) visit_free(visit);
    return status;
}

/* Of its time of computing. */
static uint32_t owner(const ms_unit *unit, bool backward) { return 2 * unit->index + backward; }

/* ----------------------------------------------------------------- backward */

static void forget_inputs(ms_unit *unit)
{
    unit->backward.inputs = unit->backward.inputs_done = 0;
    unit->backward.no_grad_inputs = false;
}

/* As in PyTorch: where shards are kept whole after forward, they stay whole while gradients are not
 * reduced. */
static bool reshards_after_backward(const ms_unit *unit)
{
    if (unit->keep != MS_KEEP_AS_USUAL) return unit->keep == MS_KEEP_NOT;
    return unit->settings.reshard_backward && (unit->fsdp->sync || unit->settings.reshard_forward);
}

/* After a unit's backward: its gradients are reduced, or kept; its memory is given back. */
static ms_status end_backward(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    size_t first = ms_trace_count(fsdp->source.engine);
    ms_unit_enter(unit, MS_UNIT_DONE);
    forget_inputs(unit);
    ms_status status = ms_unit_detach_gradients(unit);
    if (!status)
        status = fsdp->sync && ms_pass_may_reduce(unit) ? ms_lockstep_on_reduction(unit)
                                                        : ms_unit_restore_gradients(unit);
    if (!status && reshards_after_backward(unit)) status = ms_unit_reshard(unit);
    if (!status) status = ms_secondary_shard_drop(unit);
    if (!status) status = ms_gathers_leave(&fsdp->gather_times, owner(unit, true));
    if (!status) status = ms_schedule_leave(unit, true);
    ms_unit_note(unit, "post_backward", first);
    return status;
}

/* Gradients that earlier passes have left in units that this pass did not use. */
static ms_status reduce_leftovers(ms_fsdp *fsdp)
{
    ms_status status = MS_OK;
    for (uint32_t u = fsdp->unit_count; u-- > 0 && !status;) {
        ms_unit *unit = &fsdp->units[u];
        if (unit == fsdp->now.held || !(unit->backward.deferred || ms_unit_has_leftover(unit)))
            continue;
        status = ms_unit_prepare_reduction(unit, false);
        if (!status) status = ms_lockstep_on_reduction(unit);
    }
    return status;
}

/* At the end of a pass: gathered for nothing, in it or after its own backward. */
static bool is_left_gathered(const ms_unit *unit)
{
    if (unit->phase != MS_UNIT_DONE) return unit->settings.reshard_forward;
    return unit->place == MS_UNIT_GATHERED && unit->prefetched && reshards_after_backward(unit);
}

/* After the outermost backward. Units that missed some gradient end here, in the order in which
 * backward goes through them, the root last. Units that were gathered for nothing are resharded. */
static ms_status end_pass(ms_fsdp *fsdp)
{
    ms_status status = MS_OK;
    size_t first = ms_trace_count(fsdp->source.engine);
    for (uint32_t u = fsdp->unit_count; u-- > 0 && !status;)
        if (fsdp->units[u].phase == MS_UNIT_BACKWARD) status = end_backward(&fsdp->units[u]);
    /* All gradients of all ranks are there when the first of these is reduced. */
    if (!status && fsdp->sync && fsdp->hooks.reduces_once) status = ms_lockstep_on_end(fsdp, true);
    if (!status && fsdp->sync) status = reduce_leftovers(fsdp);
    if (!status) status = ms_lockstep_on_end(fsdp, true);
    for (uint32_t u = 0; u < fsdp->unit_count && !status; u++) {
        ms_unit *unit = &fsdp->units[u];
        /* A recomputed forward whose backward did not come has left its unit in use. */
        status = ms_unit_release(unit);
        if (!status && is_left_gathered(unit)) status = ms_unit_reshard(unit);
        unit->entered = false;
        if (!status) status = ms_secondary_shard_drop(unit);
        ms_unit_enter(unit, MS_UNIT_IDLE);
        forget_inputs(unit);
        unit->modules_left = 0;
        unit->backward.outputs_left = unit->backward.recomputes_left = 0;
    }
    fsdp->now.in_backward = false;
    fsdp->pass++;
    fsdp->now.order_count = fsdp->now.order_left = 0;
    if (!status) status = ms_schedule_end(fsdp, MS_TRAINING);
    status = ms_fsdp_end_job(fsdp, status ? status : ms_pass_end(fsdp));
    ms_unit_note(&fsdp->units[0], "post_backward_final", first);
    return status;
}

/* Of all units, so that ranks reduce alike. */
ms_status ms_fsdp_reduce(ms_fsdp *fsdp)
{
    bool left = false;
    ms_status status = ms_fsdp_check_idle(fsdp, "reduce");
    for (uint32_t i = 0; i < fsdp->member_count && !status; i++)
        status = ms_check_rest(fsdp->source.engine, "fsdp: reduce", &fsdp->members[i].tensor, 1);
    if (status) return status;
    for (uint32_t u = 0; u < fsdp->unit_count; u++) left |= ms_unit_has_leftover(&fsdp->units[u]);
    if (!left)
        return ms_engine_fail(fsdp->source.engine, MS_ERROR_STATE,
                              "fsdp: reduce: no backward inside of no_sync has left gradients "
                              "since they were reduced");
    status = reduce_leftovers(fsdp);
    if (!status) status = ms_lockstep_on_end(fsdp, true);
    return ms_fsdp_end_job(fsdp, status ? status : ms_pass_end(fsdp));
}

/* A backward that came to uses outside of units only. Unsharded parameters are reduced now, unless
 * the backward of a forward is to come, which does it. */
static ms_status end_outer_pass(ms_fsdp *fsdp)
{
    bool left = false;
    for (uint32_t f = 0; f < fsdp->flat_count; f++) left |= ms_outer_is_left(&fsdp->flats[f]);
    if (!left || !fsdp->sync || fsdp->now.begun) return MS_OK;
    ms_status status = reduce_leftovers(fsdp);
    if (!status) status = ms_lockstep_on_end(fsdp, true);
    return ms_fsdp_end_job(fsdp, status ? status : ms_pass_end(fsdp));
}

static ms_status end_backward_as_a_whole(void *user)
{
    ms_fsdp *fsdp = user;
    if (fsdp->closed) return MS_OK;
    fsdp->now.ends = false;
    ms_status status = fsdp->now.in_backward ? end_pass(fsdp) : end_outer_pass(fsdp);
    return status ? status : ms_outer_end(fsdp);
}

/* The end of the backward that runs will be seen. */
static ms_status await_end(ms_fsdp *fsdp)
{
    if (fsdp->now.ends) return MS_OK;
    ms_status status = ms_backward_at_end(fsdp->source.engine, end_backward_as_a_whole, fsdp);
    fsdp->now.ends = !status;
    return status;
}

/* The unit whose backward comes after this one's, if backward's order is that of forward reversed;
 * NULL if it is in memory already. */
static ms_unit *next_unit(ms_fsdp *fsdp, const ms_unit *unit)
{
    size_t at = fsdp->now.order_left;
    while (at > 0 && fsdp->now.order[at - 1] != unit->index) at--;
    if (at == 0) return NULL;
    fsdp->now.order_left = --at;
    ms_unit *next = at > 0 ? &fsdp->units[fsdp->now.order[at - 1]] : NULL;
    return next && next->place == MS_UNIT_SHARDED ? next : NULL;
}

/* For a use that begins: counts whether it was gathered ahead. */
static ms_status gather(ms_unit *unit)
{
    uint64_t before = unit->gathers;
    ms_status status = ms_lockstep_on_gather(unit);
    if (ms_pass_counts(unit->fsdp)) ms_pass_note_gather(unit, unit->gathers != before);
    return status;
}

/* The order is that of this rank alone, so where ranks agree on each gather there is none ahead. */
static ms_status prefetch_next(const ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    size_t first = ms_trace_count(fsdp->source.engine);
    if (fsdp->mode != MS_PREFETCH_BACKWARD_PRE || ms_lockstep_is_on(fsdp)) return MS_OK;
    ms_unit *next = ms_schedule_is_planned(fsdp) ? NULL : next_unit(fsdp, unit);
    if (!next || !ms_unit_needs_values(next)) return MS_OK;
    uint64_t before = next->gathers;
    ms_status status = ms_unit_set_full(next, next->recorded_full);
    if (!status) status = ms_unit_gather(next);
    ms_pass_note_prefetch(next, next->gathers != before);
    ms_unit_note(next, "pre_backward_prefetch", first);
    return status;
}

/* Before a unit's backward. Also where the unit has nothing to train: its parameters are needed for
 * the gradients of its inputs. */
static ms_status begin_backward(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    ms_status status = MS_OK;
    size_t first = ms_trace_count(fsdp->source.engine);
    status = await_end(fsdp);
    if (!status) status = ms_pass_enter_backward(unit);
    if (status) return status;
    fsdp->now.in_backward = true;
    ms_unit_enter(unit, MS_UNIT_BACKWARD);
    status = ms_unit_release(unit);
    if (!status) status = ms_unit_set_full(unit, unit->recorded_full);
    if (!status) status = ms_unit_hold_gradients(unit);
    bool enters = !unit->entered;
    unit->entered = false;
    if (!status && enters) status = ms_schedule_enter(unit, true);
    if (!status && ms_unit_needs_values(unit)) status = gather(unit);
    if (!status && enters) status = ms_schedule_gather(unit, true);
    if (!status) status = prefetch_next(unit);
    if (!status) status = ms_unit_use(unit);
    if (!status && enters) status = ms_gathers_enter(&fsdp->gather_times, owner(unit, true));
    if (!status) status = ms_unit_expect_gradients(unit);
    ms_unit_note(unit, "pre_backward", first);
    return status;
}

/* After the first part of a unit's backward: its memory is given back as after its forward, since
 * the rest comes later. */
static ms_status end_first(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    size_t first = ms_trace_count(fsdp->source.engine);
    ms_unit_enter(unit, MS_UNIT_AWAITING);
    bool reshards =
        unit->keep == MS_KEEP_AS_USUAL ? unit->settings.reshard_forward : unit->keep == MS_KEEP_NOT;
    ms_status status = ms_unit_release(unit);
    if (!status && reshards) status = ms_unit_reshard(unit);
    if (!status) status = ms_gathers_leave(&fsdp->gather_times, owner(unit, true));
    if (!status) status = ms_schedule_leave(unit, true);
    ms_unit_note(unit, "post_backward_inputs", first);
    return status;
}

/* At the end of a first part: units with inputs whose gradients did not come. The rest goes through
 * the units in the same order again. */
static ms_status end_first_part(void *user)
{
    ms_fsdp *fsdp = user;
    ms_status status = MS_OK;
    if (fsdp->closed) return MS_OK;
    for (uint32_t u = fsdp->unit_count; u-- > 0 && !status;)
        if (fsdp->units[u].phase == MS_UNIT_INPUTS) status = end_first(&fsdp->units[u]);
    fsdp->now.in_backward = fsdp->now.ends = false;
    fsdp->now.order_left = fsdp->now.order_count;
    return ms_fsdp_end_job(fsdp, status);
}

static ms_status await_part_end(ms_fsdp *fsdp)
{
    if (fsdp->now.ends) return MS_OK;
    ms_status status = ms_backward_at_part_end(fsdp->source.engine, end_first_part, fsdp);
    fsdp->now.ends = !status;
    return status;
}

/* Before a unit's backward in a first part: it is whole, and expects no gradients. */
static ms_status begin_first(ms_unit *unit, uint64_t forward)
{
    ms_fsdp *fsdp = unit->fsdp;
    size_t first = ms_trace_count(fsdp->source.engine);
    if (ms_lockstep_is_on(fsdp))
        return ms_engine_fail(fsdp->source.engine, MS_ERROR_STATE,
                              "fsdp: backward: inputs: not with find_unused, nor in a join, where "
                              "ranks agree on each gather: call backward without inputs");
    ms_status status = await_part_end(fsdp);
    if (!status) status = ms_pass_enter_backward(unit);
    if (status) return status;
    fsdp->now.in_backward = true;
    ms_unit_enter(unit, MS_UNIT_INPUTS);
    unit->backward.first_forward = forward;
    unit->backward.first_done = 0;
    status = ms_unit_release(unit);
    if (!status) status = ms_unit_set_full(unit, unit->recorded_full);
    if (!status) status = ms_schedule_enter(unit, true);
    if (!status && ms_unit_needs_values(unit)) status = gather(unit);
    if (!status) status = ms_schedule_gather(unit, true);
    if (!status) status = prefetch_next(unit);
    if (!status) status = ms_unit_use(unit);
    if (!status) status = ms_gathers_enter(&fsdp->gather_times, owner(unit, true));
    ms_unit_note(unit, "pre_backward_inputs", first);
    return status;
}

static bool is_first_part(const ms_fsdp *fsdp)
{
    return ms_backward_running(fsdp->source.engine) == MS_BACKWARD_INPUTS;
}

/* NULL if the model was freed while the graph stayed. */
static ms_unit *unit_of(const ms_visit *visit)
{
    return visit->fsdp->closed ? NULL : &visit->fsdp->units[visit->unit];
}

/* The output of a unit is often the input of the next one, whose hook comes later. The backward of
 * that unit ends before this one's begins, so that there is memory for one of them at a time. */
static ms_status end_consumer(const ms_visit *visit)
{
    const ms_fsdp *fsdp = visit->fsdp;
    for (uint32_t u = 0; u < fsdp->unit_count; u++) {
        ms_unit *unit = &fsdp->units[u];
        bool runs = unit->phase == MS_UNIT_BACKWARD || unit->phase == MS_UNIT_INPUTS;
        if (runs && !unit->backward.no_grad_inputs && unit->backward.inputs == 1
            && unit->backward.input.call == visit->tensor.call
            && unit->backward.input.result == visit->tensor.result)
            return unit->phase == MS_UNIT_INPUTS ? end_first(unit) : end_backward(unit);
    }
    return MS_OK;
}

static ms_status on_first_output(const ms_visit *visit, ms_unit *unit)
{
    if (unit->phase == MS_UNIT_INPUTS) return MS_OK;
    ms_status status = end_consumer(visit);
    return ms_fsdp_end_job(visit->fsdp, status ? status : begin_first(unit, visit->forward));
}

/* Gradient hook of outputs. */
static ms_status on_output(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    const ms_visit *visit = user;
    ms_unit *unit = unit_of(visit);
    (void)gradient;
    (void)replacement;
    if (!unit) return MS_OK;
    if (is_first_part(visit->fsdp)) return on_first_output(visit, unit);
    if (!visit->recomputed && visit->pass == visit->fsdp->pass && unit->backward.outputs_left)
        unit->backward.outputs_left--;
    bool begins = unit->phase != MS_UNIT_BACKWARD;
    unit->backward.recomputed = visit->recomputed && (begins || unit->backward.recomputed);
    if (!begins) return MS_OK;
    ms_status status = end_consumer(visit);
    return ms_fsdp_end_job(visit->fsdp, status ? status : begin_backward(unit));
}

/* Inputs of other forwards of the unit, which come in other backwards, do not count. */
static ms_status on_first_input(const ms_visit *visit, ms_unit *unit)
{
    if (unit->phase != MS_UNIT_INPUTS || visit->forward != unit->backward.first_forward
        || ++unit->backward.first_done < visit->inputs)
        return MS_OK;
    return ms_fsdp_end_job(visit->fsdp, end_first(unit));
}

/* Gradient hook of inputs. */
static ms_status on_input(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    const ms_visit *visit = user;
    const ms_fsdp *fsdp = visit->fsdp;
    ms_unit *unit = unit_of(visit);
    (void)gradient;
    (void)replacement;
    if (unit && is_first_part(fsdp)) return on_first_input(visit, unit);
    if (!unit || unit->phase != MS_UNIT_BACKWARD) return MS_OK;
    if (visit->pass != fsdp->pass || unit->backward.no_grad_inputs
        || ++unit->backward.inputs_done < unit->backward.inputs)
        return MS_OK;
    return ms_fsdp_end_job(visit->fsdp, end_backward(unit));
}

static ms_status take_outer(ms_member *member, ms_tensor *gradient)
{
    ms_status status = await_end(member->fsdp);
    if (!status) return ms_outer_take(member, gradient);
    ms_tensor_release(gradient);
    return status;
}

ms_status ms_member_on_gradient(void *user, ms_tensor *leaf)
{
    ms_member *member = user;
    ms_unit *unit = member->flat->unit;
    ms_fsdp *fsdp = member->fsdp;
    ms_tensor *outer = ms_leaf_take_outer(leaf);
    if (fsdp->closed) {
        ms_tensor_release(outer);
        return MS_OK;
    }
    if (outer) return ms_fsdp_end_job(fsdp, take_outer(member, outer));
    if (unit->phase != MS_UNIT_BACKWARD)
        return ms_fsdp_end_job(
            fsdp, ms_engine_fail(fsdp->source.engine, MS_ERROR_STATE,
                                 "fsdp: '%s' got a gradient outside of the backward of its "
                                 "unit \"%s\": use its values only in that unit's forward",
                                 member->name, ms_unit_called(unit)));
    ms_status status = ms_member_collect(member);
    if (!status && !member->fired) {
        member->fired = true;
        if (--unit->backward.pending == 0 && (!unit->settings.frozen || unit->backward.recomputed))
            status = end_backward(unit);
    }
    return ms_fsdp_end_job(fsdp, status);
}

/* ------------------------------------------------------------------ forward */

static bool is_result(const ms_tensor *tensor)
{
    return ms_tensor_requires_grad(tensor) && !ms_tensor_is_leaf(tensor);
}

/* Nothing is watched where nothing is recorded: no backward will come. */
static ms_status watch_inputs(ms_unit *unit, ms_tensor *const *inputs, uint32_t count)
{
    ms_status status = MS_OK;
    uint32_t watched = 0;
    if (!ms_engine_is_recording(unit->fsdp->source.engine)) return MS_OK;
    unit->forwards++;
    if (unit->fsdp->now.in_backward) count = 0;
    for (uint32_t i = 0; i < count; i++) watched += is_result(inputs[i]);
    for (uint32_t i = 0; i < count && !status; i++) {
        if (!is_result(inputs[i])) continue;
        status = watch(unit, inputs[i], watched, on_input);
        unit->backward.input = ms_tensor_origin(inputs[i]);
        if (!status) unit->backward.inputs++;
    }
    if (watched == 0) unit->backward.no_grad_inputs = true;
    return status;
}

/* The precision of a forward that begins. What is recomputed computes as in the first run. */
static ms_status choose_precision(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    bool full = fsdp->now.in_backward ? unit->recorded_full : fsdp->full;
    bool awaits = unit->phase == MS_UNIT_AWAITING && ms_engine_is_recording(fsdp->source.engine);
    if (awaits && full != unit->recorded_full)
        return ms_engine_fail(
            fsdp->source.engine, MS_ERROR_STATE,
            "fsdp: a recorded forward of unit \"%s\" in %s mode comes before the "
            "backward of one in %s mode, and full_precision_eval gives them other "
            "dtypes: run that backward first, or evaluate in ms.no_grad",
            ms_unit_called(unit), full ? "evaluation" : "training",
            full ? "training" : "evaluation");
    return ms_unit_set_full(unit, full);
}

/* A recomputed forward begins the unit's use in backward. */
static ms_status enter(ms_unit *unit)
{
    bool backward = unit->fsdp->now.in_backward, enters = unit->phase != MS_UNIT_BACKWARD;
    ms_status status = MS_OK;
    if (enters) {
        status = ms_schedule_enter(unit, backward);
        unit->entered = backward;
    }
    bool gathers = unit->place != MS_UNIT_IN_USE;
    if (!status && gathers) status = choose_precision(unit);
    if (!status && gathers) status = gather(unit);
    if (!status && enters) status = ms_schedule_gather(unit, backward);
    if (!status && gathers) status = ms_unit_use(unit);
    if (!status && enters)
        status = ms_gathers_enter(&unit->fsdp->gather_times, owner(unit, backward));
    return status;
}

ms_status ms_fsdp_before_forward(ms_fsdp *fsdp, uint32_t index, ms_tensor *const *inputs,
                                 uint32_t count)
{
    ms_unit *unit = &fsdp->units[index];
    size_t first = ms_trace_count(fsdp->source.engine);
    ms_status status = watch_inputs(unit, inputs, count);
    if (!status) status = ms_pass_enter_forward(unit);
    if (status || unit->depth++ > 0) return status;
    if (index == 0 && !fsdp->now.in_backward) fsdp->same.forwards++;
    status = enter(unit);
    if (status) {
        unit->depth--;
        fsdp->now.depth--;
        return ms_fsdp_end_job(fsdp, status);
    }
    if (unit->phase != MS_UNIT_BACKWARD) ms_unit_enter(unit, MS_UNIT_FORWARD);
    ms_unit_note(unit, index ? "pre_forward" : "root_pre_forward", first);
    return MS_OK;
}

/* Remembers that a forward of the unit has ended to which backward will come, for its order. */
static ms_status note_order(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    ms_status status =
        ms_grow(ms_engine_context(fsdp->source.engine), (void **)&fsdp->now.order,
                &fsdp->now.order_capacity, fsdp->now.order_count + 1, sizeof *fsdp->now.order);
    if (status) return status;
    fsdp->now.order[fsdp->now.order_count++] = unit->index;
    fsdp->now.order_left = fsdp->now.order_count;
    return MS_OK;
}

/* Recomputed modules do not count: the unit is in use until its backward has ended. */
void ms_fsdp_begin_module(ms_fsdp *fsdp, uint32_t index, uint32_t module)
{
    ms_unit *unit = &fsdp->units[index];
    uint64_t all =
        unit->settings.modules >= 64 ? UINT64_MAX : ((uint64_t)1 << unit->settings.modules) - 1;
    if (fsdp->now.in_backward) return;
    if (unit->modules_left == 0) unit->modules_left = all;
    unit->modules_left &= ~((uint64_t)1 << (module < 63 ? module : 63));
}

/* What is not recorded has no backward, unless it is recomputed there, and nothing is kept for it.
 */
static ms_status give_back(ms_unit *unit)
{
    bool returns =
        unit->phase == MS_UNIT_AWAITING || ms_is_recomputed_later(unit->fsdp->source.engine);
    ms_status status = MS_OK;
    bool reshards =
        unit->keep == MS_KEEP_AS_USUAL ? unit->settings.reshard_forward : unit->keep == MS_KEEP_NOT;
    if (!reshards) return MS_OK;
    if (returns && !ms_lockstep_is_on(unit->fsdp)) status = ms_secondary_shard_keep(unit);
    return status ? status : ms_unit_reshard(unit);
}

/* Once, by one rank: that a module stays unused may be what the model wants. */
static void warn_of_modules(ms_unit *unit)
{
    const ms_fsdp *fsdp = unit->fsdp;
    if (!unit->warned && ms_group_rank(fsdp->group) == 0)
        ms_log(ms_engine_context(fsdp->source.engine), MS_LOG_WARN,
               "fsdp: some modules of unit \"%s\" did not run in a forward, so the unit stayed "
               "gathered until its end: modules that often run alone are better units of their own",
               ms_unit_called(unit));
    unit->warned = true;
}

/* A unit of which modules are still to run stays gathered. After the root's forward none will. */
static ms_status reshard_after_forward(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    ms_status status = MS_OK;
    if (unit->modules_left == 0) status = give_back(unit);
    if (unit->index != 0) return status;
    for (uint32_t u = 1; u < fsdp->unit_count && !status; u++) {
        ms_unit *other = &fsdp->units[u];
        if (other->modules_left == 0 || other->place == MS_UNIT_IN_USE) continue;
        other->modules_left = 0;
        warn_of_modules(other);
        status = give_back(other);
    }
    return status;
}

/* What an evaluation has gathered ahead and not used is given back. */
static ms_status end_evaluation(ms_fsdp *fsdp)
{
    ms_status status = MS_OK;
    if (fsdp->now.running != &fsdp->schedules[MS_EVALUATION]) return MS_OK;
    for (uint32_t u = 0; u < fsdp->unit_count && !status; u++)
        if (fsdp->units[u].prefetched) status = ms_unit_reshard(&fsdp->units[u]);
    return status ? status : ms_schedule_end(fsdp, MS_EVALUATION);
}

/* A forward inside of a backward is a recomputation, whose backward comes at once: the unit stays
 * in use. */
ms_status ms_fsdp_after_forward(ms_fsdp *fsdp, uint32_t index, ms_tensor *const *outputs,
                                uint32_t count)
{
    ms_unit *unit = &fsdp->units[index];
    bool recorded = false;
    ms_status status = MS_OK;
    size_t first = ms_trace_count(fsdp->source.engine);
    MS_ASSERT(unit->depth > 0);
    for (uint32_t i = 0; i < count && !status; i++) {
        if (!ms_tensor_requires_grad(outputs[i]) || ms_tensor_is_leaf(outputs[i])) continue;
        recorded = true;
        status = watch(unit, outputs[i], 0, on_output);
        unit->backward.outputs_left += !fsdp->now.in_backward;
    }
    if (!status) status = ms_pass_leave_forward(fsdp);
    if (--unit->depth > 0 || status) return status;
    if (recorded && fsdp->now.in_backward && unit->backward.recomputes_left)
        unit->backward.recomputes_left--;
    if (unit->phase == MS_UNIT_BACKWARD) return MS_OK;
    ms_unit_enter(unit, recorded ? MS_UNIT_AWAITING : MS_UNIT_IDLE);
    if (recorded && fsdp->now.in_backward) return MS_OK;
    if (!fsdp->now.in_backward && (recorded || ms_is_recomputed_later(fsdp->source.engine))) {
        unit->backward.recomputes_left += !recorded;
        unit->recorded_full = unit->full;
        status = note_order(unit);
    }
    if (!status) status = ms_unit_release(unit);
    if (!status) status = reshard_after_forward(unit);
    if (!status) status = ms_gathers_leave(&fsdp->gather_times, owner(unit, false));
    if (!status) status = ms_schedule_leave(unit, false);
    if (!status && fsdp->now.depth == 0) status = end_evaluation(fsdp);
    if (!status && index == 0) status = ms_lockstep_on_end(fsdp, false);
    ms_unit_note(unit, "post_forward", first);
    return ms_fsdp_end_job(fsdp, status);
}
