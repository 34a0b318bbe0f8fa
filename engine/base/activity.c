/* activity.c: what a rank gets done and where its script is, as hints for those who wait for it.
 * Nothing here blocks. */
#include "base/activity.h"

#include <stdio.h>
#include <string.h>

static void write_line(ms_activity *activity, const char *line)
{
    uint32_t version = atomic_load_explicit(&activity->version, memory_order_relaxed);
    atomic_store(&activity->version, version + 1);
    snprintf(activity->line, sizeof activity->line, "%s", line);
    atomic_store(&activity->version, version + 2);
}

void ms_activity_host(ms_activity *activity, int32_t thread)
{
    if (activity) atomic_store(&activity->thread, thread);
}

void ms_activity_call(ms_activity *activity, const char *line)
{
    if (!activity) return;
    uint64_t calls = atomic_load_explicit(&activity->calls, memory_order_relaxed);
    atomic_store_explicit(&activity->calls, calls + 1, memory_order_relaxed);
    if (line) write_line(activity, line);
}

void ms_activity_done(ms_activity *activity)
{
    if (activity) atomic_fetch_add_explicit(&activity->done, 1, memory_order_relaxed);
}

void ms_activity_begin(ms_activity *activity)
{
    if (activity) atomic_fetch_add(&activity->busy, 1);
}

void ms_activity_end(ms_activity *activity)
{
    if (!activity) return;
    atomic_fetch_add_explicit(&activity->done, 1, memory_order_relaxed);
    atomic_fetch_sub(&activity->busy, 1);
}

uint32_t ms_activity_ask(ms_activity *activity)
{
    return atomic_fetch_add(&activity->asked, 1) + 1;
}

void ms_activity_hear(ms_activity *activity, ms_whereabouts place)
{
    if (!activity) return;
    atomic_store(&activity->place, (uint32_t)place);
    atomic_store(&activity->heard, atomic_load(&activity->asked));
}

bool ms_activity_answer(ms_activity *activity, const char *line)
{
    if (!activity) return false;
    uint32_t asked = atomic_load(&activity->asked);
    if (atomic_load(&activity->answered) == asked) return false;
    write_line(activity, line);
    atomic_store(&activity->place, MS_WHERE_SCRIPT);
    atomic_store(&activity->answered, asked);
    return true;
}

void ms_activity_read(const ms_activity *activity, ms_activity_state *out)
{
    memset(out, 0, sizeof *out);
    out->progress = atomic_load(&activity->calls) + atomic_load(&activity->done);
    out->busy = atomic_load(&activity->busy) != 0;
    out->heard = atomic_load(&activity->heard);
    out->answered = atomic_load(&activity->answered);
    out->place = (ms_whereabouts)atomic_load(&activity->place);
    out->thread = atomic_load(&activity->thread);
    /* A line that is being written is left out: the writer may have been stopped in the middle of
     * it. */
    for (int tries = 0; tries < 100; tries++) {
        uint32_t before = atomic_load(&activity->version);
        if (before & 1) continue;
        memcpy(out->line, activity->line, sizeof out->line);
        out->line[sizeof out->line - 1] = '\0';
        if (atomic_load(&activity->version) == before) return;
    }
    out->line[0] = '\0';
}
