/* gathers.c: when the gathers of a pass ran, and how long the model's stream waited for them. */
#include "fsdp/gathers.h"

#include "base/assert.h"

/* A span that is not timed. */
#define NO_SPAN UINT32_MAX

static ms_status make_room(ms_gathers *gathers, ms_gather_set *set, uint32_t capacity)
{
    ms_marks *marks = NULL;
    ms_status status = ms_marks_new(gathers->engine, 2 * MS_GATHER_SPANS * capacity, &marks);
    if (status) return status;
    ms_marks_free(set->marks);
    set->marks = marks;
    set->capacity = capacity;
    return MS_OK;
}

ms_status ms_gathers_open(ms_gathers *gathers, ms_engine *engine, uint32_t capacity)
{
    gathers->engine = engine;
    ms_status status = make_room(gathers, &gathers->sets[0], capacity + 1);
    return status ? status : make_room(gathers, &gathers->sets[1], capacity + 1);
}

void ms_gathers_close(ms_gathers *gathers)
{
    ms_marks_free(gathers->sets[0].marks);
    ms_marks_free(gathers->sets[1].marks);
}

/* ------------------------------------------------------------------ reading */

/* The sum of the spans of a kind; false if a mark is not passed, or the device has no clock. */
static bool sum(const ms_gather_set *set, ms_gather_span kind, uint64_t *ns)
{
    *ns = 0;
    for (uint32_t i = 0; i < set->used[kind]; i++) {
        uint32_t mark = 2 * (kind * set->capacity + i);
        uint64_t begin, end;
        if (!ms_marks_time(set->marks, mark, &begin)) return false;
        if (!ms_marks_time(set->marks, mark + 1, &end)) return false;
        *ns += end - begin;
    }
    return true;
}

static void harvest(ms_gathers *gathers, ms_gather_set *set)
{
    ms_gather_times times = { .pass = set->pass + 1 };
    if (!set->ended) return;
    for (uint32_t kind = 0; kind < MS_GATHER_SPANS; kind++)
        if (!sum(set, (ms_gather_span)kind, &times.ns[kind])) return;
    set->ended = false;
    if (times.pass > gathers->last.pass) gathers->last = times;
}

ms_gather_times ms_gathers_times(ms_gathers *gathers)
{
    for (uint32_t i = 0; i < 2; i++) harvest(gathers, &gathers->sets[i]);
    return gathers->last;
}

/* ------------------------------------------------------------------- a pass */

/* A pass that was begun and given up is begun again, with the same number. */
ms_status ms_gathers_begin_pass(ms_gathers *gathers, uint64_t pass)
{
    ms_gather_set *set = &gathers->sets[pass % 2];
    uint32_t most = 0;
    harvest(gathers, set);
    gathers->present = set;
    set->pass = pass;
    set->ended = false;
    for (uint32_t kind = 0; kind < MS_GATHER_SPANS; kind++) {
        if (set->wanted[kind] > most) most = set->wanted[kind];
        set->used[kind] = set->wanted[kind] = 0;
    }
    return most > set->capacity ? make_room(gathers, set, most) : MS_OK;
}

void ms_gathers_end_pass(ms_gathers *gathers)
{
    if (gathers->present) gathers->present->ended = true;
    gathers->present = NULL;
}

ms_status ms_gathers_begin(ms_gathers *gathers, ms_gather_span kind, ms_stream *stream,
                           uint32_t *span)
{
    ms_gather_set *set = gathers->present;
    *span = NO_SPAN;
    if (!set || set->wanted[kind]++ >= set->capacity) return MS_OK;
    *span = kind * set->capacity + set->used[kind]++;
    return ms_marks_set(set->marks, 2 * *span, stream);
}

ms_status ms_gathers_end(ms_gathers *gathers, uint32_t span, ms_stream *stream)
{
    if (span == NO_SPAN) return MS_OK;
    MS_ASSERT(gathers->present);
    return ms_marks_set(gathers->present->marks, 2 * span + 1, stream);
}
