/* pass.c: what is of a pass as a whole: its begin and its end, the order in which its reductions
 * are launched, who hears of them, and what is counted. A pass is a forward and the backward
 * through it.
 *
 * Links that keep something from bucket to bucket ask which bucket is the first and which the last.
 * The first is the one that is launched first. Which unit's backward ends last is not known before
 * the end where units may stay unused. So a unit that may be the last is held back: until the next
 * one is due, or backward has ended. Chains without such links launch at once. All of this depends
 * on the order in which units are reduced, which is the same on all ranks.
 *
 * The times of a pass (meter/pass_times.h, meter/gather_times.h) begin and end here; stats.c gives
 * them out. Once a reduction is enqueued to which backward adds no more, `on_reduced` is called
 * with its bucket. Optimizers that step before backward ends are called in this way. */
#include "fsdp/pass.h"

#include <stdio.h>

#include "fsdp/filled.h"
#include "fsdp/reduce.h"
#include "fsdp/schedule.h"
#include "fsdp/unit.h"

/* -------------------------------------------------------------------- errors */

ms_status ms_fsdp_end_job(ms_fsdp *fsdp, ms_status status)
{
    if (!status) return MS_OK;
    const ms_error *error = ms_engine_error(fsdp->source.engine);
    snprintf(fsdp->source.error, sizeof fsdp->source.error, "%s", error->message);
    ms_comm_abort(fsdp->source.engine, error);
    return status;
}

/* ------------------------------------------------------------------- forward */

/* Recorded, and neither inside of another forward nor of a backward, which recomputes. */
static bool is_outermost(const ms_fsdp *fsdp)
{
    return fsdp->now.depth == 0 && !fsdp->now.in_backward
           && ms_engine_is_recording(fsdp->source.engine);
}

bool ms_fsdp_begins_pass(const ms_fsdp *fsdp, uint32_t unit)
{
    return is_outermost(fsdp) && (unit == 0 || !fsdp->now.begun);
}

static ms_status begin(ms_fsdp *fsdp)
{
    fsdp->now.timed = true;
    fsdp->now.reduced = false;
    ms_status status = ms_gathers_begin_pass(&fsdp->gather_times, fsdp->times.passes);
    return status ? status : ms_times_begin_pass(&fsdp->times, 1);
}

static bool counts_forward(const ms_fsdp *fsdp) { return fsdp->forward_ahead || fsdp->planner; }

bool ms_pass_counts(const ms_fsdp *fsdp)
{
    if (fsdp->now.running != &fsdp->schedules[MS_TRAINING]) return false;
    return fsdp->now.in_backward || counts_forward(fsdp);
}

/* The order of a pass is recorded from its first forward on, also where backward will run that
 * again; that of an evaluation for itself. */
static void begin_schedule(ms_fsdp *fsdp)
{
    bool training =
        ms_engine_is_recording(fsdp->source.engine) || ms_is_recomputed_later(fsdp->source.engine);
    if (fsdp->now.depth > 0 || fsdp->now.in_backward) return;
    if (training && fsdp->now.running) return;
    ms_schedule_begin(fsdp, training ? MS_TRAINING : MS_EVALUATION);
    if (training && counts_forward(fsdp)) fsdp->prefetched = (ms_prefetch_counts){ 0 };
}

ms_status ms_pass_enter_forward(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    bool begins = ms_fsdp_begins_pass(fsdp, unit->index);
    begin_schedule(fsdp);
    ms_status status = begins && fsdp->sync ? begin(fsdp) : MS_OK;
    if (status) return status;
    fsdp->now.begun |= begins;
    fsdp->now.depth++;
    return MS_OK;
}

ms_status ms_pass_leave_forward(ms_fsdp *fsdp)
{
    fsdp->now.depth--;
    bool ends = is_outermost(fsdp) && fsdp->now.timed;
    return ends ? ms_times_note(&fsdp->times, MS_AT_BACKWARD) : MS_OK;
}

/* ------------------------------------------------------------------- gathers */

void ms_pass_note_prefetch(ms_unit *unit, bool any) { unit->prefetched |= any; }

void ms_pass_note_gather(ms_unit *unit, bool any)
{
    ms_fsdp *fsdp = unit->fsdp;
    if (any && unit->prefetched) fsdp->prefetched.wasted_bytes += ms_unit_whole_bytes(unit);
    fsdp->prefetched.misses += any;
    fsdp->prefetched.hits += !any && unit->prefetched;
    unit->prefetched = false;
}

/* ---------------------------------------------------------------- reductions */

/* Whether gradients of earlier passes are kept as shards. Gradients of units whose backward runs
 * are this pass's; what they had before was saved. */
static bool has_earlier_gradients(const ms_fsdp *fsdp)
{
    for (uint32_t i = 0; i < fsdp->member_count; i++) {
        const ms_member *member = &fsdp->members[i];
        if (!member->flat->trainable) continue;
        bool runs = member->flat->unit->phase == MS_UNIT_BACKWARD;
        if (member->held || (!runs && ms_tensor_grad(member->tensor))) return true;
    }
    return false;
}

/* Before the first reduction of a pass. Its forward may have been without synchronization. */
static ms_status begin_reductions(ms_fsdp *fsdp)
{
    if (fsdp->now.reducing) return MS_OK;
    fsdp->now.reducing = true;
    fsdp->now.launched = 0;
    fsdp->now.continues = fsdp->hooks.asks_order && has_earlier_gradients(fsdp);
    return fsdp->now.timed ? MS_OK : begin(fsdp);
}

/* Without the replicas there are no reduced gradients yet. */
static ms_status call_on_reduced(ms_fsdp *fsdp, uint32_t bucket)
{
    bool is_partial = !fsdp->replica_sync && ms_fsdp_can_be_partial(fsdp);
    if (!fsdp->source.on_reduced || is_partial) return MS_OK;
    return fsdp->source.on_reduced(fsdp->source.on_reduced_user, bucket);
}

static ms_status tell(ms_flat_param *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    fsdp->now.stepped = false;
    ms_status status = call_on_reduced(fsdp, flat->bucket.place);
    for (uint32_t i = 0; i < flat->count; i++) flat->members[i].stepped = fsdp->now.stepped;
    return status;
}

/* Where ranks use different units, the backward of another rank may come to the unit again. */
static bool is_final(const ms_unit *unit)
{
    const ms_fsdp *fsdp = unit->fsdp;
    return !fsdp->same.find_unused && !fsdp->same.joining && unit->backward.outputs_left == 0
           && unit->backward.recomputes_left == 0;
}

/* Launches the reductions of a unit's flat parameters. Where backward may come to the unit again,
 * its gradients are not final, and its parameters are still needed. */
static ms_status launch(ms_unit *unit, bool is_last)
{
    ms_fsdp *fsdp = unit->fsdp;
    ms_status status = MS_OK;
    bool final = is_final(unit);
    uint32_t left = 0;
    for (uint32_t f = 0; f < unit->count; f++) left += unit->flats[f].trainable;
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        ms_flat_param *flat = &unit->flats[f];
        if (!flat->trainable) continue;
        status = ms_flat_param_reduce(flat, fsdp->now.launched++, is_last && --left == 0);
        if (!status && final) status = tell(flat);
    }
    return status;
}

static ms_status launch_held(ms_fsdp *fsdp, bool is_last)
{
    ms_unit *unit = fsdp->now.held;
    fsdp->now.held = NULL;
    return unit ? launch(unit, is_last) : MS_OK;
}

/* Units whose backward runs are reduced at the end of backward at the latest. Ranks that use
 * different units do not know that of each other. */
static bool may_be_last(const ms_unit *unit)
{
    const ms_fsdp *fsdp = unit->fsdp;
    if (fsdp->same.find_unused || fsdp->same.joining) return true;
    for (uint32_t u = 0; u < fsdp->unit_count; u++) {
        const ms_unit *other = &fsdp->units[u];
        if (other != unit && other->settings.trainable && other->phase == MS_UNIT_BACKWARD)
            return false;
    }
    return true;
}

bool ms_pass_may_reduce(ms_unit *unit)
{
    unit->backward.deferred =
        unit->settings.trainable && unit->fsdp->hooks.reduces_once && !is_final(unit);
    return !unit->backward.deferred;
}

ms_status ms_pass_reduce(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    if (unit->settings.trainable == 0) return MS_OK;
    unit->backward.deferred = false;
    ms_status status = begin_reductions(fsdp);
    for (uint32_t f = 0; f < unit->count && !status; f++)
        if (unit->flats[f].trainable)
            status = ms_times_bucket_complete(&fsdp->times, unit->flats[f].bucket.place);
    if (!status) status = launch_held(fsdp, false);
    if (status) return status;
    if (!fsdp->hooks.asks_order || !may_be_last(unit)) return launch(unit, false);
    fsdp->now.held = unit;
    return MS_OK;
}

ms_status ms_pass_enter_backward(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    if (!fsdp->now.in_backward && !counts_forward(fsdp))
        fsdp->prefetched = (ms_prefetch_counts){ 0 };
    return ms_pass_let_go(unit);
}

ms_status ms_pass_let_go(ms_unit *unit)
{
    return unit->fsdp->now.held == unit ? launch_held(unit->fsdp, false) : MS_OK;
}

/* ----------------------------------------------------------------------- end */

/* The model's stream waits for all reductions: what comes after backward sees their results. */
static ms_status await_reductions(ms_fsdp *fsdp)
{
    ms_stream *current = ms_engine_current(fsdp->source.engine);
    ms_status status = ms_times_note(&fsdp->times, MS_AT_WAIT);
    for (uint32_t f = 0; f < fsdp->flat_count && !status; f++)
        for (int i = 0; i < 2 && !status; i++)
            status = ms_stream_wait(current, fsdp->flats[f].ready[i]);
    return status ? status : ms_times_note(&fsdp->times, MS_AT_READY);
}

ms_status ms_pass_end(ms_fsdp *fsdp)
{
    fsdp->now.begun = false;
    if (!fsdp->now.reducing) return MS_OK;
    ms_status status = launch_held(fsdp, true);
    if (!status) status = ms_filled_exchange(fsdp);
    if (!status) status = await_reductions(fsdp);
    fsdp->now.reducing = fsdp->now.timed = false;
    fsdp->now.reduced = true;
    ms_times_end_pass(&fsdp->times);
    ms_gathers_end_pass(&fsdp->gather_times);
    return status ? status : call_on_reduced(fsdp, MS_REDUCED_ALL);
}

/* The times that were begun are begun again by the next pass. */
void ms_pass_give_up(ms_fsdp *fsdp)
{
    fsdp->now.held = NULL;
    fsdp->now.depth = 0;
    fsdp->now.begun = fsdp->now.reducing = fsdp->now.timed = false;
    ms_filled_forget(fsdp);
    ms_schedule_give_up(fsdp);
}
