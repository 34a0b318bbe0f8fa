/* pass.c: one pass: its forward, its gradients as they come, and the parameters for which none
 * comes. */
#include "ddp/pass.h"

#include <stdio.h>

#include "ddp/buckets.h"
#include "ddp/bucket_launch.h"
#include "ddp/layout.h"
#include "ddp/unused.h"

/* ------------------------------------------------------------------- errors */

/* A bucket of the last pass still waits for gradients, which will not come. Names the first three
 * parameters that it waits for. Other ranks may wait in a collective that this rank never issued.
 */
static ms_status missing_gradients(ms_reducer *reducer)
{
    char names[400] = "";
    uint32_t missing = 0;
    size_t used = 0;
    for (uint32_t i = 0; i < reducer->count; i++) {
        /* Three names are enough to find the branch of the model; the rest is counted. */
        if (reducer->parameters[i].ready || missing++ >= 3) continue;
        used += (size_t)snprintf(names + used, sizeof names - used, "%s'%.100s'", used ? ", " : "",
                                 reducer->parameters[i].name);
    }
    if (missing > 3) snprintf(names + used, sizeof names - used, " and %u more", missing - 3);
    if (reducer->settings.static_graph)
        return ms_engine_fail(reducer->source.engine, MS_ERROR_STATE,
                              "ddp: static_graph: the graph changed: in the last backward fewer "
                              "gradients than in the first iteration came for %s",
                              names);
    return ms_engine_fail(reducer->source.engine, MS_ERROR_STATE,
                          "ddp: in the last backward no gradient came for %s, so %s never "
                          "reduced: the loss must depend on every parameter that "
                          "requires a gradient (ddp's option find_unused = true allows unused "
                          "parameters; or call requires_grad_(false) on them before ddp)",
                          names, missing > 1 ? "their buckets were" : "its bucket was");
}

/* A gradient came that no forward has announced. Reducing it would need a collective that the other
 * ranks do not issue, so the job ends; the reason depends on the phase. */
static ms_status not_expected(const ms_ddp_parameter *parameter)
{
    ms_engine *engine = parameter->reducer->source.engine;
    if (parameter->reducer->phase == MS_REDUCER_IDLE)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "ddp: a gradient of '%s' came, but there was no forward of the ddp "
                              "model: call what ddp returned, not the module inside",
                              parameter->name);
    if (parameter->absent)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "ddp: find_unused: '%s' got a gradient, but the outputs of the "
                              "forward do not depend on it: it was used outside of the ddp model",
                              parameter->name);
    return ms_engine_fail(
        engine, MS_ERROR_STATE,
        "ddp: '%s' got its gradient twice after one forward: backward ran a second time "
        "(retain_graph), or the forward was that of the module inside instead "
        "of the ddp model; use no_sync or accumulate for passes whose gradients add up",
        parameter->name);
}

/* The old buckets were freed to make room, and then the new ones could not be made. */
static ms_status no_buckets(const ms_reducer *reducer)
{
    return ms_engine_fail(
        reducer->source.engine, MS_ERROR_STATE,
        "ddp: the model has no gradient buckets, because the last change of its buckets failed: "
        "assign buckets again, or unwrap the model and wrap it anew");
}

/* A backward in two parts gives gradients to parameters in its rest. Where gradients are about to
 * be reduced, those of a rest that is still to come would be left out; and a forward that comes
 * before the rest of a pass that reduces would begin another pass, to which its gradients would
 * belong. */
static ms_status check_rests(const ms_reducer *reducer, const char *what)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < reducer->count && !status; i++) {
        ms_tensor *tensor = reducer->parameters[i].tensor;
        status = ms_check_rest(reducer->source.engine, what, &tensor, 1);
    }
    return status;
}

/* ---------------------------------------------------------- the reduction */

/* The parameter gets no gradient in this pass: its bucket must not wait for one. What it
 * contributes is written first, because ms_gradient_ready may launch the bucket. */
static ms_status skip(ms_ddp_parameter *parameter)
{
    ms_status status = ms_unused_contribute(parameter);
    return status ? status : ms_gradient_ready(parameter);
}

/* Parameters that backward has not reached get no gradient any more: the loss does not use every
 * output. */
static ms_status end_of_backward(void *user)
{
    ms_reducer *reducer = user;
    ms_status status = MS_OK;
    if (reducer->phase != MS_REDUCER_REDUCING) return MS_OK;
    for (uint32_t i = 0; i < reducer->count && !status; i++)
        if (!reducer->parameters[i].ready) status = skip(&reducer->parameters[i]);
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}

/* The reduction of a pass begins: with its first gradient, or where no gradient will come at all.
 * Absent parameters contribute at once, so that their buckets can be launched in the middle of
 * backward. Where the graph was searched, other parameters may still be missed, since a loss may
 * use only some of the outputs; end_of_backward finds them. If all are absent no backward reaches
 * this reducer, so none is waited for. */
static ms_status begin(ms_reducer *reducer)
{
    bool by_graph = reducer->settings.find_unused && !reducer->settings.static_graph;
    bool all = true;
    for (uint32_t i = 0; i < reducer->count; i++) all &= reducer->parameters[i].absent;
    ms_reducer_enter(reducer, MS_REDUCER_REDUCING);
    ms_status status = by_graph && !all
                           ? ms_backward_at_end(reducer->source.engine, end_of_backward, reducer)
                           : MS_OK;
    for (uint32_t i = 0; i < reducer->count && !status; i++)
        if (reducer->parameters[i].absent) status = skip(&reducer->parameters[i]);
    return status;
}

/* A gradient is complete: it joins its bucket. */
static ms_status reduce_gradient(ms_ddp_parameter *parameter)
{
    ms_status status = ms_gradient_to_bucket(parameter);
    return status ? status : ms_gradient_ready(parameter);
}

/* ------------------------------------------------------------ static graphs */

/* How often each parameter gets a gradient is known now, and all buckets are launched. If another
 * backward of this forward follows, they are launched once more: the gradients are then the mean m
 * of the first backward plus new ones g, and the mean of m + g over the ranks is m plus the mean of
 * g. */
static ms_status end_of_first(void *user)
{
    ms_reducer *reducer = user;
    ms_status status = MS_OK;
    if (reducer->phase != MS_REDUCER_REDUCING) return MS_OK;
    ms_reducer_reset(reducer);
    for (uint32_t i = 0; i < reducer->count && !status; i++) {
        ms_ddp_parameter *parameter = &reducer->parameters[i];
        bool has_gradient = parameter->used && ms_tensor_grad(parameter->tensor);
        status = has_gradient ? reduce_gradient(parameter) : skip(parameter);
    }
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}

/* A static graph promises the same gradients in every pass. One that comes more often would be
 * added to a bucket that may have been launched already. */
static ms_status graph_changed(const ms_ddp_parameter *parameter)
{
    ms_engine *engine = parameter->reducer->source.engine;
    if (parameter->absent)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "ddp: static_graph: the graph changed: '%s' got a gradient; it had "
                              "none in the first iteration",
                              parameter->name);
    return ms_engine_fail(engine, MS_ERROR_STATE,
                          "ddp: static_graph: the graph changed: '%s' got its gradient %u times "
                          "after one forward; in the first iteration it was %u",
                          parameter->name, parameter->fired, parameter->expected);
}

/* A static graph's first pass only counts, and reduces at backward's end. A second backward after
 * the reduction reopens the pass, so that it counts as one pass. */
static ms_status count_gradient(ms_reducer *reducer)
{
    if (reducer->phase == MS_REDUCER_REDUCING) return MS_OK;
    if (reducer->phase == MS_REDUCER_REDUCED) ms_times_reopen_pass(&reducer->times);
    ms_reducer_enter(reducer, MS_REDUCER_REDUCING);
    return ms_backward_at_end(reducer->source.engine, end_of_first, reducer);
}

/* Until the count is complete, further gradients of this parameter are still accumulated into the
 * bucket, so only the last one makes it ready. */
static ms_status take_static_gradient(ms_ddp_parameter *parameter)
{
    ms_reducer *reducer = parameter->reducer;
    parameter->fired++;
    parameter->used = true;
    if (!reducer->pass.counted) return count_gradient(reducer);
    if (parameter->fired > parameter->expected) return graph_changed(parameter);
    ms_status status = reducer->phase == MS_REDUCER_EXPECTING ? begin(reducer) : MS_OK;
    if (status || parameter->fired < parameter->expected) return status;
    return reduce_gradient(parameter);
}

/* ---------------------------------------------------------------- gradients */

/* A gradient of a pass that is to be reduced. The checks come in the order in which they explain
 * best: no_sync before the phase, since a backward inside of no_sync is also unexpected. */
static ms_status take_gradient(ms_ddp_parameter *parameter)
{
    ms_reducer *reducer = parameter->reducer;
    if (reducer->pass.no_sync)
        return ms_engine_fail(reducer->source.engine, MS_ERROR_STATE,
                              "ddp: no_sync: backward runs inside, but its forward ran outside: "
                              "run both inside");
    if (reducer->buckets.count == 0) return no_buckets(reducer);
    if (reducer->phase == MS_REDUCER_IDLE) return not_expected(parameter);
    if (reducer->phase == MS_REDUCER_EXPECTING) {
        ms_status status = check_rests(reducer, "ddp: a backward that reduces");
        if (status) return status;
    }
    if (reducer->settings.static_graph) return take_static_gradient(parameter);
    if (reducer->phase == MS_REDUCER_REDUCED || parameter->ready || parameter->absent)
        return not_expected(parameter);
    parameter->used = true;
    ms_status status = reducer->phase == MS_REDUCER_EXPECTING ? begin(reducer) : MS_OK;
    return status ? status : reduce_gradient(parameter);
}

static bool is_local(const ms_reducer *reducer) { return reducer->mark && reducer->mark->runs; }

/* Called by backward on the host thread, after the leaf's gradient was accumulated (enqueued). Of a
 * forward in no_sync it only notes that the parameter is used; otherwise its error ends the job for
 * all ranks, which may already wait in a collective. */
ms_status ms_reducer_on_gradient(void *user, ms_tensor *leaf)
{
    (void)leaf;
    ms_ddp_parameter *parameter = user;
    if (parameter->reducer->phase == MS_REDUCER_LOCAL || is_local(parameter->reducer)) {
        parameter->used = parameter->reducer->pass.left = true;
        return MS_OK;
    }
    ms_status status = take_gradient(parameter);
    return status ? ms_reducer_end_job(parameter->reducer, status) : MS_OK;
}

/* ------------------------------------------------------------------ forward */

/* Takes over what the passes before have shown: how often each gradient of a static graph comes,
 * and which parameters the outputs of earlier forwards of the same backward did not reach. `absent`
 * of the earlier forward becomes `missed` before it is set again. */
static void learn(ms_reducer *reducer)
{
    bool first =
        reducer->settings.static_graph && !reducer->pass.counted && reducer->times.passes > 0;
    /* One backward may go through several forwards: a parameter is absent if all of them missed
     * it. */
    bool several = reducer->pass.searched && reducer->phase == MS_REDUCER_EXPECTING;
    reducer->pass.counted |= first;
    for (uint32_t i = 0; i < reducer->count; i++) {
        ms_ddp_parameter *parameter = &reducer->parameters[i];
        if (first) parameter->expected = parameter->fired;
        parameter->missed = !several || parameter->absent;
        parameter->absent = reducer->pass.counted && parameter->expected == 0;
        parameter->fired = 0;
    }
    reducer->pass.searched = false;
}

/* Due on all ranks or on none: each condition depends on passes that all ranks have run. Rebuilding
 * broadcasts, so a rank that came here alone would wait forever. */
ms_status ms_reducer_rebuild_due(ms_reducer *reducer)
{
    bool due = reducer->pass.logging && !reducer->settings.planned
               && reducer->phase != MS_REDUCER_REDUCING
               && reducer->pass.arrived == reducer->count - reducer->delayed;
    return due ? ms_reducer_rebuild_now(reducer) : MS_OK;
}

/* Whether more backwards of this pass will follow is not known at the end of one, so it is asked
 * where the gradients are needed. */
bool ms_reducer_waits(const ms_reducer *reducer) { return reducer->phase == MS_REDUCER_REDUCING; }

ms_status ms_reducer_settled(ms_reducer *reducer)
{
    if (!ms_reducer_waits(reducer)) return MS_OK;
    return ms_reducer_end_job(reducer, missing_gradients(reducer));
}

/* The forward of a pass. A pass that was never completed is noticed here at the latest. Buckets
 * change only here, or by request, while no backward writes them. */
ms_status ms_reducer_forward(ms_reducer *reducer, bool synchronize)
{
    ms_status complete = ms_reducer_settled(reducer);
    if (reducer->mark) reducer->mark->runs = false; /* a backward that failed has left it */
    if (!complete && reducer->phase == MS_REDUCER_EXPECTING)
        complete = check_rests(reducer, "ddp: a forward of another pass");
    if (complete) return complete;
    if (!synchronize) {
        ms_reducer_enter(reducer, MS_REDUCER_LOCAL);
        return MS_OK;
    }
    if (reducer->buckets.count == 0) return ms_reducer_end_job(reducer, no_buckets(reducer));
    ms_status status = ms_reducer_rebuild_due(reducer);
    if (status) return status;
    learn(reducer);
    ms_reducer_reset(reducer);
    ms_reducer_enter(reducer, MS_REDUCER_EXPECTING);
    return ms_times_begin_pass(&reducer->times, reducer->layout);
}

/* In no_sync there is no pass to time. */
ms_status ms_reducer_forward_end(ms_reducer *reducer)
{
    return reducer->phase == MS_REDUCER_EXPECTING ? ms_times_note(&reducer->times, MS_AT_BACKWARD)
                                                  : MS_OK;
}

/* Marks the parameters that none of these outputs reaches as absent, and counts them. A parameter
 * that an earlier forward of the same backward reaches is not absent, even if this one misses it.
 */
static ms_status find_absent(ms_reducer *reducer, ms_tensor *const *outputs, uint32_t count,
                             uint32_t *found)
{
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(reducer->source.engine),
                    reducer->count * (sizeof(ms_tensor *) + sizeof(bool)), "ddp", &memory);
    if (status) return status;
    ms_tensor **leaves = memory;
    bool *reached = (bool *)(leaves + reducer->count);
    for (uint32_t i = 0; i < reducer->count; i++) leaves[i] = reducer->parameters[i].tensor;
    status =
        ms_graph_reaches(reducer->source.engine, outputs, count, leaves, reducer->count, reached);
    for (uint32_t i = 0; i < reducer->count && !status; i++) {
        ms_ddp_parameter *parameter = &reducer->parameters[i];
        parameter->absent = !reached[i] && parameter->missed;
        *found += parameter->absent;
    }
    ms_release(ms_engine_context(reducer->source.engine), memory);
    return status;
}

/* ------------------------------------------------- without synchronization */

void ms_local_mark_drop(void *user)
{
    ms_local_mark *mark = user;
    if (mark && --mark->references == 0) ms_release(mark->context, mark);
}

static ms_status end_of_local(void *user)
{
    ((ms_reducer *)user)->mark->runs = false;
    return MS_OK;
}

/* A gradient of what a forward without synchronization has returned: the backward that runs is its
 * own, whatever forward came last. */
static ms_status begin_local(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)gradient, (void)replacement;
    ms_local_mark *mark = user;
    ms_reducer *reducer = mark->reducer;
    if (!reducer || mark->runs) return MS_OK;
    mark->runs = true;
    return ms_backward_at_part_end(reducer->source.engine, end_of_local, reducer);
}

static ms_status make_mark(ms_reducer *reducer)
{
    ms_context *context = ms_engine_context(reducer->source.engine);
    void *memory = NULL;
    if (reducer->mark) return MS_OK;
    ms_status status = ms_allocate(context, sizeof *reducer->mark, "ddp", &memory);
    if (status) return status;
    reducer->mark = memory;
    *reducer->mark = (ms_local_mark){ context, reducer, 1, false };
    return MS_OK;
}

static ms_status mark_outputs(ms_reducer *reducer, ms_tensor *const *outputs, uint32_t count)
{
    ms_status status = make_mark(reducer);
    for (uint32_t i = 0; i < count && !status; i++) {
        if (!ms_tensor_requires_grad(outputs[i]) || ms_tensor_is_leaf(outputs[i])) continue;
        reducer->mark->references++;
        status = ms_tensor_on_parts(outputs[i], begin_local, reducer->mark, ms_local_mark_drop);
        if (status) ms_local_mark_drop(reducer->mark);
    }
    return status;
}

/* Searches the graph once for each forward; that is the price of find_unused. A rank whose outputs
 * reach no parameter has no backward that would begin the reduction, so it begins here: the other
 * ranks wait for it. */
ms_status ms_reducer_outputs(ms_reducer *reducer, ms_tensor *const *outputs, uint32_t count)
{
    uint32_t absent = 0;
    if (reducer->phase == MS_REDUCER_LOCAL) return mark_outputs(reducer, outputs, count);
    if (reducer->phase != MS_REDUCER_EXPECTING || !reducer->settings.find_unused
        || reducer->settings.static_graph)
        return MS_OK;
    ms_status status = find_absent(reducer, outputs, count, &absent);
    if (status) return status;
    if (!absent && !reducer->pass.searched_before)
        ms_log(ms_engine_context(reducer->source.engine), MS_LOG_WARN,
               "ddp: find_unused: the outputs of this forward depend on every parameter; where "
               "they always do, training is faster without find_unused");
    reducer->pass.searched_before = true;
    reducer->pass.searched = true;
    /* No backward of this rank reaches a parameter: its part in the reductions is due now. */
    status = absent == reducer->count ? begin(reducer) : MS_OK;
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}

/* --------------------------------------------------------------------- join */

/* The buckets are launched in the same order as on the ranks that have inputs, because parameters
 * are skipped bucket by bucket. Each contributes zeros. */
ms_status ms_reducer_shadow(ms_reducer *reducer)
{
    ms_status status = MS_OK;
    if (reducer->phase != MS_REDUCER_EXPECTING)
        return ms_engine_fail(reducer->source.engine, MS_ERROR_STATE,
                              "ddp: a rank without inputs takes part after a synchronized forward");
    ms_bucket_list *buckets = &reducer->buckets;
    reducer->pass.shadow = true;
    ms_reducer_enter(reducer, MS_REDUCER_REDUCING);
    for (uint32_t b = 0; b < buckets->count && !status; b++)
        for (uint32_t i = 0; i < buckets->items[b].bucket.count && !status; i++)
            status = skip(&reducer->parameters[buckets->items[b].positions[i]]);
    reducer->pass.shadow = false;
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}

/* --------------------------------------------------- without a backward */

static ms_status refuse_reduce(ms_reducer *reducer)
{
    if (reducer->settings.static_graph)
        return ms_engine_fail(reducer->source.engine, MS_ERROR_STATE,
                              "ddp: reduce: not with static_graph, which counts the gradients of "
                              "a backward that reduces");
    return ms_engine_fail(reducer->source.engine, MS_ERROR_STATE,
                          "ddp: reduce: no backward inside of no_sync has left gradients since "
                          "they were reduced");
}

/* Without find_unused every parameter has a gradient, or ranks would reduce zeros by mistake. */
static ms_status check_gradients(ms_reducer *reducer)
{
    uint32_t missing = 0;
    if (reducer->settings.find_unused) return MS_OK;
    for (uint32_t i = 0; i < reducer->count; i++) {
        bool has = ms_tensor_grad(reducer->parameters[i].tensor) != NULL;
        reducer->parameters[i].ready = has;
        missing += !has;
    }
    return missing ? missing_gradients(reducer) : MS_OK;
}

/* As a pass whose forward and backward are over: its times are those of the reduction. */
ms_status ms_reducer_reduce(ms_reducer *reducer)
{
    if (reducer->settings.static_graph || !reducer->pass.left
        || reducer->phase == MS_REDUCER_REDUCING)
        return refuse_reduce(reducer);
    ms_status status = check_rests(reducer, "ddp: reduce");
    if (!status) status = check_gradients(reducer);
    if (!status) status = ms_reducer_forward(reducer, true);
    if (status) return ms_reducer_end_job(reducer, status);
    ms_bucket_list *buckets = &reducer->buckets;
    reducer->pass.apart = true;
    status = ms_reducer_forward_end(reducer);
    ms_reducer_enter(reducer, MS_REDUCER_REDUCING);
    for (uint32_t b = 0; b < buckets->count && !status; b++)
        for (uint32_t i = 0; i < buckets->items[b].bucket.count && !status; i++)
            status = skip(&reducer->parameters[buckets->items[b].positions[i]]);
    reducer->pass.apart = false;
    return status ? ms_reducer_end_job(reducer, status) : MS_OK;
}
