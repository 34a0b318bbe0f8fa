/* schedule.c: in which order a pass uses units, and what is gathered ahead at each use.
 *
 * The order is recorded from execution itself, forward and backward, each use as often as it
 * happens; training and evaluation have orders of their own. What is recorded in one pass is a
 * guess of the next. Entries say for each recorded use what is gathered when it begins and when it
 * has ended, and whether the unit stays gathered. A pass follows the entries as long as its uses
 * are the recorded ones. From the first other use on it gathers ahead as without entries: results
 * are right in any case. All ranks make the same uses, so all gather in the same order.
 *
 * Entries come from a mode (ms_schedule_fill) or from a plan (ms_fsdp_set_plan).
 * lua/moonshard/parallel/fsdp/prefetch.lua asks planners for plans, checks them, and compares them
 * over the ranks. Plans are made from the times of uses (meter/gather_times.h); the planner "tuned"
 * compares plans by forecast.c. */
#include "fsdp/schedule.h"

#include <string.h>

#include "fsdp/lockstep.h"
#include "fsdp/pass.h"
#include "fsdp/unit.h"

/* ---------------------------------------------------------------- recording */

/* The schedule of the pass that runs, if it gathers ahead at all: not where ranks agree on each
 * gather, since the order is that of one rank alone. */
static ms_schedule *running(const ms_fsdp *fsdp)
{
    return ms_lockstep_is_on(fsdp) ? NULL : fsdp->now.running;
}

static bool is_same(const ms_fsdp_use *a, const ms_fsdp_use *b)
{
    return a->unit == b->unit && a->backward == b->backward;
}

static ms_status record(ms_schedule *schedule, ms_context *context, ms_fsdp_use use)
{
    ms_status status = ms_grow(context, (void **)&schedule->present, &schedule->present_capacity,
                               schedule->present_count + 1, sizeof *schedule->present);
    if (!status) schedule->present[schedule->present_count++] = use;
    return status;
}

/* Where a pass begins while another runs (an evaluation between a forward and its backward), that
 * one goes on after it. */
void ms_schedule_begin(ms_fsdp *fsdp, ms_schedule_kind kind)
{
    ms_schedule *schedule = &fsdp->schedules[kind];
    if (kind == MS_EVALUATION) fsdp->now.interrupted = fsdp->now.running;
    fsdp->now.running = schedule;
    schedule->present_count = schedule->ended = 0;
    schedule->follows = schedule->entry_count > 0;
}

static void drop_entries(ms_schedule *schedule)
{
    schedule->entry_count = schedule->gather_count = 0;
    schedule->planned = schedule->follows = false;
}

static bool has_changed(const ms_schedule *schedule)
{
    if (schedule->present_count != schedule->use_count) return true;
    for (uint32_t i = 0; i < schedule->use_count; i++)
        if (!is_same(&schedule->uses[i], &schedule->present[i])) return true;
    return false;
}

/* What was recorded is the order from now on. Entries for another order are dropped. */
static ms_status keep_record(ms_fsdp *fsdp, ms_schedule *schedule)
{
    ms_fsdp_use *uses = schedule->uses;
    size_t capacity = schedule->use_capacity;
    bool changed = has_changed(schedule);
    schedule->uses = schedule->present;
    schedule->use_capacity = schedule->present_capacity;
    schedule->use_count = schedule->present_count;
    schedule->present = uses;
    schedule->present_capacity = capacity;
    schedule->present_count = 0;
    schedule->passes++;
    if (changed) {
        schedule->changes++;
        drop_entries(schedule);
    }
    return changed ? ms_schedule_fill(fsdp, schedule) : MS_OK;
}

ms_status ms_schedule_end(ms_fsdp *fsdp, ms_schedule_kind kind)
{
    ms_schedule *schedule = &fsdp->schedules[kind];
    if (fsdp->now.running != schedule) return MS_OK;
    fsdp->now.running = kind == MS_EVALUATION ? fsdp->now.interrupted : NULL;
    return keep_record(fsdp, schedule);
}

void ms_schedule_give_up(ms_fsdp *fsdp) { fsdp->now.running = fsdp->now.interrupted = NULL; }

/* ------------------------------------------------------------ entries by mode */

static ms_status make_room(ms_context *context, ms_schedule *schedule, uint32_t entries,
                           uint32_t gathers)
{
    ms_status status = ms_grow(context, (void **)&schedule->entries, &schedule->entry_capacity,
                               entries, sizeof *schedule->entries);
    if (status) return status;
    return ms_grow(context, (void **)&schedule->gathers, &schedule->gather_capacity, gathers,
                   sizeof *schedule->gathers);
}

/* The first use after number i that is of the same phase as `of`, or NULL. */
static const ms_fsdp_use *use_after(const ms_schedule *schedule, uint32_t i, const ms_fsdp_use *of)
{
    const ms_fsdp_use *next = &schedule->uses[i + 1];
    return i + 1 < schedule->use_count && next->backward == of->backward ? next : NULL;
}

/* One unit ahead: in forward when a use begins, and in backward when one has ended, the first that
 * has not begun by then. What is gathered when a backward begins needs no record: see prefetch_next
 * in module_hooks.c. */
ms_status ms_schedule_fill(ms_fsdp *fsdp, ms_schedule *schedule)
{
    bool after = fsdp->mode == MS_PREFETCH_BACKWARD_POST;
    if ((!fsdp->forward_ahead && !after) || fsdp->planner || schedule->use_count == 0) return MS_OK;
    ms_status status = make_room(ms_engine_context(fsdp->source.engine), schedule,
                                 schedule->use_count, schedule->use_count);
    if (status) return status;
    drop_entries(schedule);
    for (uint32_t i = 0; i < schedule->use_count; i++) {
        const ms_fsdp_use *use = &schedule->uses[i];
        const ms_fsdp_use *next = use_after(schedule, use->backward ? use->last : i, use);
        ms_schedule_entry entry = { .first = schedule->gather_count };
        if (next && (use->backward ? after : fsdp->forward_ahead)) {
            schedule->gathers[schedule->gather_count++] = next->unit;
            entry.beginning = !use->backward;
            entry.ending = use->backward;
        }
        schedule->entries[schedule->entry_count++] = entry;
    }
    return MS_OK;
}

ms_status ms_fsdp_set_prefetch(ms_fsdp *fsdp, ms_prefetch_mode mode, bool forward, bool planner)
{
    ms_status status = MS_OK;
    fsdp->mode = mode;
    fsdp->forward_ahead = forward;
    fsdp->planner = fsdp->gather_times.computing = planner;
    for (int kind = 0; kind < MS_SCHEDULES && !status; kind++) {
        drop_entries(&fsdp->schedules[kind]);
        status = ms_schedule_fill(fsdp, &fsdp->schedules[kind]);
    }
    return status;
}

ms_status ms_fsdp_set_plan(ms_fsdp *fsdp, ms_schedule_kind kind, const ms_fsdp_entry *entries,
                           uint32_t count)
{
    ms_schedule *schedule = &fsdp->schedules[kind];
    uint32_t gathers = 0;
    MS_ASSERT(count == schedule->use_count);
    for (uint32_t i = 0; i < count; i++)
        gathers += entries[i].gather_count + entries[i].after_count;
    ms_status status =
        make_room(ms_engine_context(fsdp->source.engine), schedule, count + 1, gathers + 1);
    if (status) return status;
    drop_entries(schedule);
    for (uint32_t i = 0; i < count; i++) {
        const ms_fsdp_entry *given = &entries[i];
        uint32_t *to = schedule->gathers + schedule->gather_count;
        memcpy(to, given->gather, given->gather_count * sizeof *to);
        memcpy(to + given->gather_count, given->after, given->after_count * sizeof *to);
        schedule->entries[i] = (ms_schedule_entry){ .first = schedule->gather_count,
                                                    .beginning = given->gather_count,
                                                    .ending = given->after_count,
                                                    .keep = given->keep };
        schedule->gather_count += given->gather_count + given->after_count;
    }
    schedule->entry_count = count;
    schedule->planned = true;
    return MS_OK;
}

bool ms_fsdp_order_get(const ms_fsdp *fsdp, ms_schedule_kind kind, ms_fsdp_order *out)
{
    const ms_schedule *schedule = &fsdp->schedules[kind];
    *out = (ms_fsdp_order){ .uses = schedule->uses,
                            .count = schedule->use_count,
                            .passes = schedule->passes,
                            .changes = schedule->changes };
    return schedule->passes > 0;
}

/* ------------------------------------------------------------------- replay */

/* Gathers ahead of their use. Units that are in memory, or whose backward needs no values, are
 * passed over. */
static ms_status gather_ahead(ms_fsdp *fsdp, const uint32_t *units, uint32_t count, bool backward)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        ms_unit *unit = &fsdp->units[units[i]];
        if (unit->place == MS_UNIT_IN_USE || (backward && !ms_unit_needs_values(unit))) continue;
        size_t first = ms_trace_count(fsdp->source.engine);
        uint64_t before = unit->gathers;
        status = ms_unit_set_full(unit, backward ? unit->recorded_full : fsdp->full);
        if (!status) status = ms_unit_gather(unit);
        ms_pass_note_prefetch(unit, unit->gathers != before);
        if (unit->gathers != before)
            ms_unit_note(unit, backward ? "pre_backward_prefetch" : "pre_forward_prefetch", first);
    }
    return status;
}

bool ms_schedule_is_planned(const ms_fsdp *fsdp)
{
    const ms_schedule *schedule = running(fsdp);
    return schedule && schedule->planned && schedule->follows;
}

/* Position and keeping are the unit's until its use ends. */
ms_status ms_schedule_enter(ms_unit *unit, bool backward)
{
    ms_fsdp *fsdp = unit->fsdp;
    ms_schedule *schedule = running(fsdp);
    unit->keep = MS_KEEP_AS_USUAL;
    unit->use = UINT32_MAX;
    if (!schedule) return MS_OK;
    uint32_t at = schedule->present_count;
    ms_fsdp_use use = { .unit = unit->index, .last = at, .backward = backward };
    schedule->follows &= at < schedule->use_count && is_same(&schedule->uses[at], &use);
    unit->use = at;
    if (schedule->follows) unit->keep = schedule->entries[at].keep;
    return record(schedule, ms_engine_context(fsdp->source.engine), use);
}

/* Later uses of another order have other entries. */
static const ms_schedule_entry *entry_of(const ms_unit *unit)
{
    const ms_schedule *schedule = running(unit->fsdp);
    return schedule && schedule->follows && unit->use < schedule->entry_count
               ? &schedule->entries[unit->use]
               : NULL;
}

ms_status ms_schedule_gather(ms_unit *unit, bool backward)
{
    const ms_schedule_entry *entry = entry_of(unit);
    if (!entry) return MS_OK;
    return gather_ahead(unit->fsdp, unit->fsdp->now.running->gathers + entry->first,
                        entry->beginning, backward);
}

ms_status ms_schedule_leave(ms_unit *unit, bool backward)
{
    ms_schedule *schedule = running(unit->fsdp);
    const ms_schedule_entry *entry = entry_of(unit);
    if (schedule && unit->use < schedule->present_count) {
        schedule->present[unit->use].last = schedule->present_count - 1;
        schedule->present[unit->use].ended = schedule->ended++;
    }
    if (!entry) return MS_OK;
    const uint32_t *units = schedule->gathers + entry->first + entry->beginning;
    return gather_ahead(unit->fsdp, units, entry->ending, backward);
}

void ms_schedule_free(ms_schedule *schedule, ms_context *context)
{
    ms_release(context, schedule->uses);
    ms_release(context, schedule->present);
    ms_release(context, schedule->entries);
    ms_release(context, schedule->gathers);
}
