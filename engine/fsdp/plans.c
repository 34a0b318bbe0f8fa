/* plans.c: what plans for gathers hold, and the ready-made ones that need nothing but the order. */
#include "fsdp/plans.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* -------------------------------------------------------------------- order */

static int by_end(const void *a, const void *b)
{
    const ms_ending *one = a, *other = b;
    if (one->last != other->last) return one->last < other->last ? -1 : 1;
    if (one->ended != other->ended) return one->ended < other->ended ? -1 : 1;
    return one->use < other->use ? -1 : one->use > other->use;
}

ms_status ms_endings_open(ms_context *context, const ms_prefetch_view *view, ms_endings *out)
{
    *out = (ms_endings){ .count = view->count };
    ms_status status =
        ms_allocate(context, (view->count + 1) * sizeof *out->list, "a plan", (void **)&out->list);
    if (status) return status;
    for (uint32_t i = 0; i < view->count; i++) {
        const ms_prefetch_use *use = &view->uses[i];
        MS_ASSERT(use->last < view->count && use->unit < view->unit_count);
        out->list[i] = (ms_ending){ .last = use->last, .ended = use->ended, .use = i };
    }
    qsort(out->list, out->count, sizeof *out->list, by_end);
    return MS_OK;
}

void ms_endings_close(ms_context *context, ms_endings *endings)
{
    ms_release(context, endings->list);
}

bool ms_endings_next(ms_endings *endings, uint32_t begun, uint32_t *use)
{
    if (endings->next >= endings->count || endings->list[endings->next].last > begun) return false;
    *use = endings->list[endings->next++].use;
    return true;
}

bool ms_plan_keeps(const ms_prefetch_view *view, const ms_fsdp_entry *entries, uint32_t use)
{
    ms_keep keep = entries[use].keep;
    return keep == MS_KEEP_AS_USUAL ? view->uses[use].stays : keep == MS_KEEP;
}

/* --------------------------------------------------------- what a plan holds */

typedef struct holding {
    int64_t *bytes_of; /* by unit */
    bool *held;
    int64_t bytes, most;
} holding;

static void hold(holding *now, uint32_t unit)
{
    if (!now->held[unit]) now->bytes += now->bytes_of[unit];
    now->held[unit] = true;
}

static void hold_all(holding *now, const uint32_t *units, uint32_t count, uint32_t limit)
{
    for (uint32_t i = 0; i < count; i++)
        if (units[i] < limit) hold(now, units[i]);
    if (now->bytes > now->most) now->most = now->bytes;
}

static void hold_pass(holding *now, const ms_prefetch_view *view, const ms_fsdp_entry *entries,
                      ms_endings *ends)
{
    ends->next = 0;
    for (uint32_t i = 0, ended; i < view->count; i++) {
        if (view->uses[i].needs_values) hold(now, view->uses[i].unit);
        hold_all(now, entries[i].gather, entries[i].gather_count, view->unit_count);
        while (ms_endings_next(ends, i, &ended)) {
            uint32_t unit = view->uses[ended].unit;
            if (now->held[unit] && !ms_plan_keeps(view, entries, ended)) {
                now->bytes -= now->bytes_of[unit];
                now->held[unit] = false;
            }
            hold_all(now, entries[ended].after, entries[ended].after_count, view->unit_count);
        }
    }
}

/* What a pass leaves gathered is there when the next one begins, hence two passes. */
ms_status ms_prefetch_held(ms_context *context, const ms_prefetch_view *view,
                           const ms_fsdp_entry *entries, int64_t *most)
{
    ms_endings ends;
    void *memory = NULL;
    size_t room = view->unit_count * (sizeof(int64_t) + sizeof(bool)) + 1;
    ms_status status = ms_endings_open(context, view, &ends);
    if (!status) status = ms_allocate(context, room, "a plan", &memory);
    if (!status) {
        holding now = { .bytes_of = memory,
                        .held = (bool *)((int64_t *)memory + view->unit_count) };
        for (uint32_t i = 0; i < view->count; i++)
            now.bytes_of[view->uses[i].unit] = view->uses[i].bytes;
        for (uint32_t pass = 0; pass < 2; pass++) hold_pass(&now, view, entries, &ends);
        *most = now.most;
    }
    ms_release(context, memory);
    ms_endings_close(context, &ends);
    return status;
}

/* --------------------------------------------------------------- candidates */

enum { MOST_AHEAD = 4 };

/* A candidate: units ahead in forward and in backward; `after`: one when a backward has ended. */
typedef struct candidate {
    const char *name;
    uint32_t forward, backward;
    bool after, by_budget;
} candidate;

static const candidate candidates[MS_TUNED_CANDIDATES] = {
    { "backward_pre", .backward = 1 },
    { "none", .backward = 0 },
    { "backward_post", .after = true },
    { "forward", .forward = 1 },
    { "both", .forward = 1, .backward = 1 },
    { "both, 2 ahead", .forward = 2, .backward = 2 },
    { "both, 4 ahead", .forward = MOST_AHEAD, .backward = MOST_AHEAD },
    { "by_budget", .by_budget = true },
};

/* A use has at most MOST_AHEAD units ahead and none after it, or one after it. With "by_budget"
 * each unit that is gathered ahead is dropped at the end of a use before it is gathered ahead
 * again. */
uint32_t ms_prefetch_room(const ms_prefetch_view *view)
{
    return MOST_AHEAD * view->count + view->unit_count;
}

const char *ms_prefetch_candidate(uint32_t number)
{
    return number < MS_TUNED_CANDIDATES ? candidates[number].name : NULL;
}

/* The units of the `depth` uses after number i that are of the same kind. */
static void plan_ahead(const ms_prefetch_view *view, uint32_t i, uint32_t depth,
                       ms_prefetch_plan *plan)
{
    ms_fsdp_entry *entry = &plan->entries[i];
    entry->gather = plan->units + plan->used;
    for (uint32_t k = i + 1; k <= i + depth && k < view->count; k++) {
        if (view->uses[k].backward != view->uses[i].backward) continue;
        plan->units[plan->used++] = view->uses[k].unit;
        entry->gather_count++;
    }
}

ms_status ms_prefetch_candidate_plan(ms_context *context, const ms_prefetch_view *view,
                                     uint32_t number, ms_prefetch_plan *plan)
{
    const candidate *how = &candidates[number];
    MS_ASSERT(number < MS_TUNED_CANDIDATES);
    if (how->by_budget) return ms_prefetch_by_budget(context, view, plan);
    plan->used = 0;
    for (uint32_t i = 0; i < view->count; i++) {
        const ms_prefetch_use *use = &view->uses[i];
        plan->entries[i] = (ms_fsdp_entry){ .keep = MS_KEEP_AS_USUAL };
        plan_ahead(view, i, use->backward ? how->backward : how->forward, plan);
        if (!use->backward || !how->after || use->last + 1 >= view->count) continue;
        plan->entries[i].after = plan->units + plan->used;
        plan->entries[i].after_count = 1;
        plan->units[plan->used++] = view->uses[use->last + 1].unit;
    }
    return MS_OK;
}
