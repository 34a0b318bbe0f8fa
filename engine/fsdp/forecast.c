/* forecast.c: how long a pass would take with a plan, by a model of three queues: computing,
 * gathers and reductions.
 *
 * The host enqueues a whole pass at once, so a gather begins when those before it have ended, and
 * when the limit of gathers lets it. A use computes once its gather has ended. Half of its own time
 * comes when it begins and half when it ends, after the uses inside of it. Optimizers have written
 * all shards before the pass, so nothing is gathered when it begins. */
#include <string.h>

#include "base/assert.h"
#include "moonshard/fsdp.h"

typedef struct model {
    const ms_forecast *given;
    double *ready;    /* by unit: when its gather has ended; below 0: it is not gathered */
    double *released; /* when the computing that used dropped memory has ended, in order */
    double *reduced;  /* when reductions have ended, in order */
    double computing, gathers, reductions;
    uint32_t release_count, reduction_count;
} model;

static double later(double a, double b) { return a > b ? a : b; }

static void gather(model *m, uint32_t unit)
{
    if (unit >= m->given->units || m->ready[unit] >= 0) return;
    m->gathers += m->given->gather_ms[unit];
    m->ready[unit] = m->gathers;
}

static void gather_all(model *m, const uint32_t *units, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) gather(m, units[i]);
}

static void begin(model *m, uint32_t i)
{
    const ms_forecast_use *use = &m->given->uses[i];
    if (use->needs_values) gather(m, use->unit);
    gather_all(m, m->given->entries[i].gather, m->given->entries[i].gather_count);
    if (use->needs_values) m->computing = later(m->computing, m->ready[use->unit]);
    m->computing += use->compute_ms / 2;
}

/* Gathers after it wait until at most so many units have been dropped and are still used. */
static void drop(model *m, uint32_t unit)
{
    uint32_t limit = m->given->max_gathers;
    if (m->ready[unit] < 0) return;
    m->ready[unit] = -1;
    m->released[m->release_count++] = m->computing;
    if (m->release_count > limit)
        m->gathers = later(m->gathers, m->released[m->release_count - 1 - limit]);
}

static void reduce(model *m, double ms)
{
    uint32_t limit = m->given->max_reductions;
    if (ms <= 0) return;
    if (m->reduction_count >= limit)
        m->computing = later(m->computing, m->reduced[m->reduction_count - limit]);
    m->reductions = later(m->reductions, m->computing) + ms;
    m->reduced[m->reduction_count++] = m->reductions;
}

static void end(model *m, uint32_t i)
{
    const ms_forecast_use *use = &m->given->uses[i];
    const ms_fsdp_entry *entry = &m->given->entries[i];
    bool keep = entry->keep == MS_KEEP_AS_USUAL ? use->stays : entry->keep == MS_KEEP;
    m->computing += use->compute_ms / 2;
    reduce(m, use->reduce_ms);
    if (!keep) drop(m, use->unit);
    gather_all(m, entry->after, entry->after_count);
}

/* Uses that end when number i is the last that has begun, in the order in which they end. */
static void end_all(model *m, uint32_t i)
{
    const ms_forecast *given = m->given;
    for (int64_t last = -1;;) {
        uint32_t next = given->count;
        for (uint32_t k = 0; k <= i; k++) {
            const ms_forecast_use *use = &given->uses[k];
            if (use->last != i || (int64_t)use->ended <= last) continue;
            if (next == given->count || use->ended < given->uses[next].ended) next = k;
        }
        if (next == given->count) return;
        last = given->uses[next].ended;
        end(m, next);
    }
}

ms_status ms_fsdp_forecast(ms_context *context, const ms_forecast *given, double *ms)
{
    void *memory = NULL;
    size_t room = (size_t)given->units + 2 * (size_t)given->count;
    MS_ASSERT(given->max_gathers > 0 && given->max_reductions > 0);
    ms_status status = ms_allocate(context, (room + 1) * sizeof(double), "a forecast", &memory);
    if (status) return status;
    double *numbers = memory;
    model m = { .given = given,
                .ready = numbers,
                .released = numbers + given->units,
                .reduced = numbers + given->units + given->count };
    for (uint32_t u = 0; u < given->units; u++) m.ready[u] = -1;
    for (uint32_t i = 0; i < given->count; i++) {
        begin(&m, i);
        end_all(&m, i);
    }
    *ms = later(m.computing, m.reductions);
    ms_release(context, memory);
    return MS_OK;
}
