/* gather_times.c: when the gathers of a pass ran, and the copies before and after them, how long
 * the model's stream waited for them, and how long it computed in each use of a unit. */
#include "meter/gather_times.h"

#include <string.h>

#include "base/assert.h"

/* A span that is not timed. */
#define NO_SPAN UINT32_MAX

static ms_status make_room(ms_gathers *gathers, ms_gather_set *set, uint32_t capacity)
{
    ms_context *context = ms_engine_context(gathers->engine);
    ms_marks *marks = NULL;
    void *owners = NULL;
    ms_status status = ms_allocate(context, MS_GATHER_SPANS * capacity * sizeof *set->owners,
                                   "times of gathers", &owners);
    if (!status) status = ms_marks_new(gathers->engine, 2 * MS_GATHER_SPANS * capacity, &marks);
    if (status) {
        ms_release(context, owners);
        return status;
    }
    ms_marks_free(set->marks);
    ms_release(context, set->owners);
    set->marks = marks;
    set->owners = owners;
    set->capacity = capacity;
    return MS_OK;
}

ms_status ms_gathers_open(ms_gathers *gathers, ms_engine *engine, uint32_t capacity, uint32_t units)
{
    gathers->engine = engine;
    gathers->owner_count = 2 * units;
    ms_status status = ms_allocate(ms_engine_context(engine), 2 * units * sizeof *gathers->owners,
                                   "times of gathers", (void **)&gathers->owners);
    if (!status) status = make_room(gathers, &gathers->sets[0], capacity + 1);
    return status ? status : make_room(gathers, &gathers->sets[1], capacity + 1);
}

void ms_gathers_close(ms_gathers *gathers)
{
    if (!gathers->engine) return;
    ms_context *context = ms_engine_context(gathers->engine);
    for (uint32_t i = 0; i < 2; i++) {
        ms_marks_free(gathers->sets[i].marks);
        ms_release(context, gathers->sets[i].owners);
    }
    ms_release(context, gathers->owners);
    ms_release(context, gathers->open);
}

/* ------------------------------------------------------------------ reading */

/* Adds up the spans of a kind; false if a mark is not passed, or the device has no clock. */
static bool add(const ms_gather_set *set, ms_gather_span kind, uint64_t *ns, ms_owner_times *owners)
{
    for (uint32_t i = 0; i < set->used[kind]; i++) {
        uint32_t span = kind * set->capacity + i;
        uint64_t begin, end;
        if (!ms_marks_time(set->marks, 2 * span, &begin)) return false;
        if (!ms_marks_time(set->marks, 2 * span + 1, &end)) return false;
        *ns += end - begin;
        owners[set->owners[span]].ns[kind] += end - begin;
        owners[set->owners[span]].count[kind]++;
    }
    return true;
}

/* 0 and 0 if it was not passed. */
static void span_times(const ms_gather_set *set, ms_gather_span kind, uint32_t index,
                       uint64_t *begin, uint64_t *end)
{
    uint32_t span = kind * set->capacity + index;
    *begin = *end = 0;
    if (!ms_marks_time(set->marks, 2 * span, begin)
        || !ms_marks_time(set->marks, 2 * span + 1, end))
        *begin = *end = 0;
}

/* How long copies ran while a gather ran. The copies of a gather come before and after it, so it is
 * always another one. Gathers come one after the other. */
static uint64_t overlap(const ms_gather_set *set)
{
    uint64_t sum = 0;
    for (uint32_t c = 0; c < set->used[MS_SPAN_COPY]; c++) {
        uint64_t copy, copied, gather, gathered;
        span_times(set, MS_SPAN_COPY, c, &copy, &copied);
        for (uint32_t g = 0; g < set->used[MS_SPAN_GATHER]; g++) {
            span_times(set, MS_SPAN_GATHER, g, &gather, &gathered);
            uint64_t from = copy > gather ? copy : gather;
            uint64_t to = copied < gathered ? copied : gathered;
            if (to > from) sum += to - from;
        }
    }
    return sum;
}

/* A set is read in two steps, so that one that is not complete leaves the last one as it is. Where
 * there was no room for all of the computing, times of uses would be wrong. */
static void harvest(ms_gathers *gathers, ms_gather_set *set)
{
    ms_gather_times times = { .pass = set->pass + 1 };
    if (!set->ended) return;
    if (set->wanted[MS_SPAN_COMPUTE] > set->used[MS_SPAN_COMPUTE]) {
        set->ended = false;
        return;
    }
    for (uint32_t kind = 0; kind < MS_GATHER_SPANS; kind++)
        for (uint32_t i = 0; i < set->used[kind]; i++) {
            uint64_t end;
            if (!ms_marks_time(set->marks, 2 * (kind * set->capacity + i) + 1, &end)) return;
        }
    set->ended = false;
    if (times.pass <= gathers->last.pass) return;
    memset(gathers->owners, 0, gathers->owner_count * sizeof *gathers->owners);
    for (uint32_t kind = 0; kind < MS_GATHER_SPANS; kind++)
        if (!add(set, (ms_gather_span)kind, &times.ns[kind], gathers->owners)) return;
    times.overlap_ns = overlap(set);
    gathers->last = times;
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
    gathers->open_count = 0;
    gathers->computes = false;
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
    gathers->computes = false;
}

ms_status ms_gathers_begin(ms_gathers *gathers, ms_gather_span kind, uint32_t owner,
                           ms_stream *stream, uint32_t *span)
{
    ms_gather_set *set = gathers->present;
    *span = NO_SPAN;
    if (!set || set->wanted[kind]++ >= set->capacity) return MS_OK;
    *span = kind * set->capacity + set->used[kind]++;
    set->owners[*span] = owner;
    return ms_marks_set(set->marks, 2 * *span, stream);
}

ms_status ms_gathers_end(ms_gathers *gathers, uint32_t span, ms_stream *stream)
{
    if (span == NO_SPAN) return MS_OK;
    MS_ASSERT(gathers->present);
    return ms_marks_set(gathers->present->marks, 2 * span + 1, stream);
}

/* ---------------------------------------------------------------- computing */

ms_status ms_gathers_pause(ms_gathers *gathers)
{
    if (!gathers->computes || !gathers->present) return MS_OK;
    gathers->computes = false;
    return ms_gathers_end(gathers, gathers->compute_span, ms_engine_current(gathers->engine));
}

/* Computing goes on for the use that began last of those that are open. */
static ms_status go_on(ms_gathers *gathers)
{
    if (gathers->open_count == 0) return MS_OK;
    gathers->computes = true;
    return ms_gathers_begin(gathers, MS_SPAN_COMPUTE, gathers->open[gathers->open_count - 1],
                            ms_engine_current(gathers->engine), &gathers->compute_span);
}

ms_status ms_gathers_enter(ms_gathers *gathers, uint32_t owner)
{
    if (!gathers->computing || !gathers->present) return MS_OK;
    ms_status status =
        ms_grow(ms_engine_context(gathers->engine), (void **)&gathers->open,
                &gathers->open_capacity, gathers->open_count + 1, sizeof *gathers->open);
    if (!status) status = ms_gathers_pause(gathers);
    if (status) return status;
    gathers->open[gathers->open_count++] = owner;
    return go_on(gathers);
}

ms_status ms_gathers_leave(ms_gathers *gathers, uint32_t owner)
{
    uint32_t at = gathers->open_count;
    if (!gathers->computing || !gathers->present) return MS_OK;
    while (at > 0 && gathers->open[at - 1] != owner) at--;
    if (at == 0) return MS_OK;
    ms_status status = ms_gathers_pause(gathers);
    memmove(gathers->open + at - 1, gathers->open + at,
            (gathers->open_count - at) * sizeof *gathers->open);
    gathers->open_count--;
    return status ? status : go_on(gathers);
}
