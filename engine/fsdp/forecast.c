/* forecast.c: how long a pass would take with a plan, by a model of three queues: computing,
 * gathers and reductions.
 *
 * The host enqueues a whole pass at once, so a gather begins when those before it have ended, and
 * when the limit of gathers lets it. A use computes once its gather has ended. Half of its own time
 * comes when it begins and half when it ends, after the uses inside of it. Gathers and reductions
 * share one link, which serves them in the order in which they are ready. Optimizers have written
 * all shards before the pass, so nothing is gathered when it begins. */
#include "moonshard/fsdp.h"

#include <stdlib.h>

#include "base/assert.h"

enum { NONE = UINT32_MAX };

/* The uses of a view in the order in which they end. Invariant: those before `next` have ended. */
typedef struct ending {
    uint32_t last, ended, use;
} ending;
typedef struct endings {
    ending *list;
    uint32_t count, next;
} endings;

typedef enum queue { COMPUTING, GATHERS, REDUCTIONS, QUEUES } queue;

/* What a queue does next, once the task `after` and the one before it in its queue have ended: the
 * link for link_ms, and the rest alone. Tasks are in the order in which the host enqueues them, so
 * `after` is an earlier one. */
typedef struct task {
    queue queue;
    uint32_t after;
    bool done;
    double link_ms, rest_ms, end;
} task;

typedef struct model {
    const ms_prefetch_view *view;
    const ms_fsdp_entry *entries;
    task *tasks;
    uint32_t *gathered; /* by unit: its gather, or NONE: it is not gathered */
    uint32_t *released; /* the computing after which memory was dropped, in order */
    uint32_t *reduced;  /* reductions, in order */
    uint32_t count, computing, release_count, reduction_count;
} model;

/* -------------------------------------------------------------------- endings */

static int by_end(const void *a, const void *b)
{
    const ending *one = a, *other = b;
    if (one->last != other->last) return one->last < other->last ? -1 : 1;
    if (one->ended != other->ended) return one->ended < other->ended ? -1 : 1;
    return one->use < other->use ? -1 : one->use > other->use;
}

/* The list is released with ms_release, also after an error. */
static ms_status endings_open(ms_context *context, const ms_prefetch_view *view, endings *out)
{
    *out = (endings){ .count = view->count };
    ms_status status = ms_allocate(context, (view->count + 1) * sizeof *out->list, "a forecast",
                                   (void **)&out->list);
    if (status) return status;
    for (uint32_t i = 0; i < view->count; i++) {
        const ms_prefetch_use *use = &view->uses[i];
        MS_ASSERT(use->last < view->count && use->unit < view->unit_count);
        out->list[i] = (ending){ .last = use->last, .ended = use->ended, .use = i };
    }
    qsort(out->list, out->count, sizeof *out->list, by_end);
    return MS_OK;
}

/* The next use that ends before use `begun` + 1 begins; false: there is none. */
static bool endings_next(endings *ends, uint32_t begun, uint32_t *use)
{
    if (ends->next >= ends->count || ends->list[ends->next].last > begun) return false;
    *use = ends->list[ends->next++].use;
    return true;
}

/* Whether the unit stays gathered after use number i. */
static bool is_kept(const model *m, uint32_t i)
{
    ms_keep keep = m->entries[i].keep;
    return keep == MS_KEEP_AS_USUAL ? m->view->uses[i].stays : keep == MS_KEEP;
}

/* ------------------------------------------------------------------ enqueuing */

static uint32_t enqueue(model *m, queue where, uint32_t after, double ms, double link_ms)
{
    if (link_ms > ms) link_ms = ms;
    m->tasks[m->count] =
        (task){ .queue = where, .after = after, .link_ms = link_ms, .rest_ms = ms - link_ms };
    return m->count++;
}

static void compute(model *m, uint32_t after, double ms)
{
    m->computing = enqueue(m, COMPUTING, after, ms, 0);
}

/* It waits until at most so many units have been dropped and are still used. */
static void gather(model *m, uint32_t unit)
{
    uint32_t limit = m->view->max_gathers, after = NONE;
    if (unit >= m->view->unit_count || m->gathered[unit] != NONE) return;
    if (m->release_count > limit) after = m->released[m->release_count - 1 - limit];
    m->gathered[unit] = enqueue(m, GATHERS, after, m->view->units[unit].gather_ms,
                                m->view->units[unit].gather_link_ms);
}

static void gather_all(model *m, const uint32_t *units, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) gather(m, units[i]);
}

static void begin(model *m, uint32_t i)
{
    const ms_prefetch_use *use = &m->view->uses[i];
    if (use->needs_values) gather(m, use->unit);
    gather_all(m, m->entries[i].gather, m->entries[i].gather_count);
    compute(m, use->needs_values ? m->gathered[use->unit] : NONE, use->compute_ms / 2);
}

static void reduce(model *m, const ms_prefetch_use *use)
{
    uint32_t limit = m->view->max_reductions;
    if (!(use->reduce_ms > 0)) return;
    if (m->reduction_count >= limit) compute(m, m->reduced[m->reduction_count - limit], 0);
    m->reduced[m->reduction_count++] =
        enqueue(m, REDUCTIONS, m->computing, use->reduce_ms, use->reduce_link_ms);
}

static void end(model *m, uint32_t i)
{
    const ms_prefetch_use *use = &m->view->uses[i];
    compute(m, NONE, use->compute_ms / 2);
    reduce(m, use);
    if (m->gathered[use->unit] != NONE && !is_kept(m, i)) {
        m->gathered[use->unit] = NONE;
        m->released[m->release_count++] = m->computing;
    }
    gather_all(m, m->entries[i].after, m->entries[i].after_count);
}

/* ------------------------------------------------------------------ executing */

/* When the first task of a queue could begin; below 0: what it waits for is not done. */
static double ready_at(const model *m, const task *head, double free)
{
    if (head->after == NONE) return free;
    const task *before = &m->tasks[head->after];
    if (!before->done) return -1;
    return before->end > free ? before->end : free;
}

/* Executes the task that is ready first, again and again. The first task that is not done waits for
 * none that is not done, so there is always one that is ready. */
static double execute(model *m)
{
    double free[QUEUES] = { 0 }, link = 0, last = 0;
    uint32_t heads[QUEUES] = { 0 };
    for (uint32_t left = m->count; left > 0; left--) {
        task *first = NULL;
        double at = 0;
        for (uint32_t q = 0; q < QUEUES; q++) {
            while (heads[q] < m->count
                   && (m->tasks[heads[q]].queue != q || m->tasks[heads[q]].done))
                heads[q]++;
            if (heads[q] == m->count) continue;
            double ready = ready_at(m, &m->tasks[heads[q]], free[q]);
            if (ready < 0 || (first && ready >= at)) continue;
            first = &m->tasks[heads[q]];
            at = ready;
        }
        MS_ASSERT(first);
        if (first->link_ms > 0) {
            if (link > at) at = link;
            link = at + first->link_ms;
        }
        first->end = free[first->queue] = at + first->link_ms + first->rest_ms;
        first->done = true;
        if (first->queue != GATHERS && first->end > last) last = first->end;
    }
    return last;
}

/* A use computes in three tasks at the most, and has one reduction. What is gathered again was
 * dropped at the end of a use. */
ms_status ms_prefetch_forecast(ms_context *context, const ms_prefetch_view *view,
                               const ms_fsdp_entry *entries, double *ms)
{
    size_t uses = view->count, units = view->unit_count;
    model m = { .view = view, .entries = entries };
    endings ends;
    MS_ASSERT(view->max_gathers > 0 && view->max_reductions > 0);
    ms_status status = endings_open(context, view, &ends);
    if (!status)
        status = ms_allocate(context, (5 * uses + units + 1) * sizeof(task), "a forecast",
                             (void **)&m.tasks);
    if (!status)
        status = ms_allocate(context, (units + 2 * uses + 1) * sizeof(uint32_t), "a forecast",
                             (void **)&m.gathered);
    if (!status) {
        m.released = m.gathered + units;
        m.reduced = m.released + uses;
        for (size_t u = 0; u < units; u++) m.gathered[u] = NONE;
        for (uint32_t i = 0, ended; i < view->count; i++) {
            begin(&m, i);
            while (endings_next(&ends, i, &ended)) end(&m, ended);
        }
        *ms = execute(&m);
    }
    ms_release(context, m.gathered);
    ms_release(context, m.tasks);
    ms_release(context, ends.list);
    return status;
}
