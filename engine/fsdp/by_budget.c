/* by_budget.c: the strategy "by_budget": what comes next is gathered ahead, and units stay
 * gathered, within numbers of elements (as DeepSpeed's coordinator of ZeRO-3 has them) and within
 * the bytes of the budget. lua/moonshard/fsdp/by_budget.lua is the same in Lua; tests compare the
 * two.
 *
 * - prefetch: elements that are gathered ahead of their use at a time.
 * - live: elements that are gathered at a time.
 * - reuse: a unit stays gathered after a use if fewer elements are used until its next use.
 * - keep: a unit of so few elements stays in any case until its next use. */
#include "fsdp/plans.h"

#include <string.h>

enum { NONE = UINT32_MAX };

/* Of a unit, while uses are gone through. */
typedef struct unit_state {
    bool held;
    int64_t ahead; /* elements that count as gathered ahead */
    uint32_t next; /* use of it, while uses are gone through from the last one on */
} unit_state;

typedef struct work {
    const ms_prefetch_view *view;
    ms_prefetch_plan *plan;
    ms_endings ends;
    unit_state *units;
    uint32_t *next;  /* by use: the next one of its unit, or NONE */
    int64_t *before; /* by use: the sum of the elements used before it */
    int64_t elements, bytes, ahead_elements, largest;
} work;

static bool fits(const work *w, const ms_prefetch_use *use)
{
    return w->elements + use->elements <= w->view->budgets.live
           && w->bytes + use->bytes <= w->view->budget_bytes;
}

static void hold(work *w, const ms_prefetch_use *use)
{
    if (w->units[use->unit].held) return;
    w->units[use->unit].held = true;
    w->elements += use->elements;
    w->bytes += use->bytes;
}

static void drop(work *w, const ms_prefetch_use *use)
{
    if (!w->units[use->unit].held) return;
    w->units[use->unit].held = false;
    w->elements -= use->elements;
    w->bytes -= use->bytes;
}

/* Units of the uses after number i, as many as the budgets allow. Room for a unit that is needed
 * before them stays free. */
static void gather_ahead(work *w, uint32_t i)
{
    ms_fsdp_entry *entry = &w->plan->entries[i];
    entry->gather = w->plan->units + w->plan->used;
    for (uint32_t k = i + 1; k < w->view->count; k++) {
        const ms_prefetch_use *use = &w->view->uses[k];
        if (!use->needs_values || w->units[use->unit].held) continue;
        int64_t more = w->ahead_elements + use->elements;
        if (more > w->view->budgets.prefetch || !fits(w, use)) return;
        hold(w, use);
        w->units[use->unit].ahead = use->elements;
        w->ahead_elements = more;
        w->plan->units[w->plan->used++] = use->unit;
        entry->gather_count++;
    }
}

static bool is_wanted(const work *w, uint32_t i)
{
    const ms_prefetch_budgets *budgets = &w->view->budgets;
    if (w->next[i] == NONE) return false;
    if (w->view->uses[i].elements <= budgets->keep) return true;
    return w->before[w->next[i]] - w->before[i + 1] <= budgets->reuse;
}

/* What stays must leave room for the use of any unit. */
static void end(work *w, uint32_t ended, bool wanted)
{
    bool keep = wanted && w->bytes <= w->view->budget_bytes - w->largest
                && w->elements <= w->view->budgets.live;
    w->plan->entries[ended].keep = keep ? MS_KEEP : MS_KEEP_NOT;
    if (!keep) drop(w, &w->view->uses[ended]);
}

static void make(work *w, bool keeps, bool ahead)
{
    w->elements = w->bytes = w->ahead_elements = 0;
    w->plan->used = w->ends.next = 0;
    memset(w->units, 0, w->view->unit_count * sizeof *w->units);
    memset(w->plan->entries, 0, w->view->count * sizeof *w->plan->entries);
    for (uint32_t i = 0, ended; i < w->view->count; i++) {
        const ms_prefetch_use *use = &w->view->uses[i];
        w->ahead_elements -= w->units[use->unit].ahead;
        w->units[use->unit].ahead = 0;
        if (use->needs_values) hold(w, use);
        if (ahead) gather_ahead(w, i);
        while (ms_endings_next(&w->ends, i, &ended)) end(w, ended, keeps && is_wanted(w, ended));
    }
}

static void prepare(work *w)
{
    const ms_prefetch_view *view = w->view;
    for (uint32_t u = 0; u < view->unit_count; u++) w->units[u].next = NONE;
    for (uint32_t i = view->count; i-- > 0;) {
        unit_state *unit = &w->units[view->uses[i].unit];
        w->next[i] = unit->next;
        unit->next = i;
    }
    for (uint32_t i = 0; i < view->count; i++) {
        w->before[i + 1] = w->before[i] + view->uses[i].elements;
        if (view->uses[i].bytes > w->largest) w->largest = view->uses[i].bytes;
    }
}

/* Where units of different sizes do not fit, first none stays, then none is gathered ahead. */
static ms_status find(work *w, ms_context *context)
{
    static const bool ways[][2] = { { true, true }, { false, true }, { false, false } };
    int64_t most;
    for (uint32_t i = 0; i < 3; i++) {
        make(w, ways[i][0], ways[i][1]);
        ms_status status = ms_prefetch_held(context, w->view, w->plan->entries, &most);
        if (status) return status;
        if (most <= w->view->budget_bytes) break;
    }
    return MS_OK;
}

ms_status ms_prefetch_by_budget(ms_context *context, const ms_prefetch_view *view,
                                ms_prefetch_plan *plan)
{
    work w = { .view = view, .plan = plan };
    ms_status status = ms_endings_open(context, view, &w.ends);
    if (!status)
        status = ms_allocate(context, (view->unit_count + 1) * sizeof *w.units, "a plan",
                             (void **)&w.units);
    if (!status)
        status =
            ms_allocate(context, (view->count + 1) * sizeof *w.next, "a plan", (void **)&w.next);
    if (!status)
        status = ms_allocate(context, (view->count + 1) * sizeof *w.before, "a plan",
                             (void **)&w.before);
    if (!status) {
        prepare(&w);
        status = find(&w, context);
    }
    ms_release(context, w.before);
    ms_release(context, w.next);
    ms_release(context, w.units);
    ms_endings_close(context, &w.ends);
    return status;
}
