/* activity.c: what a rank gets done and where its script is, as hints for those who wait for it.
 * Nothing here blocks. */
#include "base/activity.h"

#include <stdio.h>
#include <string.h>

/* Writes the line as a sequence lock: the version is odd while the text changes. There is one
 * writer, the host thread, so the version needs no atomic addition. */
static void write_line(ms_activity *activity, const char *line)
{
    uint32_t version = atomic_load_explicit(&activity->version, memory_order_relaxed);
    atomic_store(&activity->version, version + 1);
    snprintf(activity->line, sizeof activity->line, "%s", line);
    atomic_store(&activity->version, version + 2);
}

/* Where ranks are threads of one process, the supervisor finds the state of the right thread in
 * /proc by this number. */
void ms_activity_host(ms_activity *activity, int32_t thread)
{
    if (activity) atomic_store(&activity->thread, thread);
}

/* Runs at every call of the host, so the count avoids a locked instruction: only the host writes
 * `calls`, and a plain load and store suffice. Readers only compare it with earlier values. */
void ms_activity_call(ms_activity *activity, const char *line)
{
    if (!activity) return;
    uint64_t calls = atomic_load_explicit(&activity->calls, memory_order_relaxed);
    atomic_store_explicit(&activity->calls, calls + 1, memory_order_relaxed);
    if (line) write_line(activity, line);
}

/* Several threads count here, which takes an atomic addition. No data depends on the order. */
void ms_activity_done(ms_activity *activity)
{
    if (activity) atomic_fetch_add_explicit(&activity->done, 1, memory_order_relaxed);
}

/* A count and not a flag, since a long call may contain another one. */
void ms_activity_begin(ms_activity *activity)
{
    if (activity) atomic_fetch_add(&activity->busy, 1);
}

/* `done` rises before `busy` falls, so a long call that has ended has always counted as
 * progress. */
void ms_activity_end(ms_activity *activity)
{
    if (!activity) return;
    atomic_fetch_add_explicit(&activity->done, 1, memory_order_relaxed);
    atomic_fetch_sub(&activity->busy, 1);
}

/* Numbers the question, so that an answer to an older one is not taken for an answer to this
 * one. */
uint32_t ms_activity_ask(ms_activity *activity)
{
    return atomic_fetch_add(&activity->asked, 1) + 1;
}

/* May run in a signal handler, so it uses lock-free atomics only. `place` is written first: a
 * reader that sees the question heard also sees the place. */
void ms_activity_hear(ms_activity *activity, ms_whereabouts place)
{
    if (!activity) return;
    atomic_store(&activity->place, (uint32_t)place);
    atomic_store(&activity->heard, atomic_load(&activity->asked));
}

/* Writes `answered` last: a reader that sees the number then reads this line or a later one. False:
 * the last question has been answered already. */
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

/* Runs in any process that maps the record. The values are read one after the other and are not of
 * one moment; they are hints. */
void ms_activity_read(const ms_activity *activity, ms_activity_state *out)
{
    memset(out, 0, sizeof *out);
    out->progress = atomic_load(&activity->calls) + atomic_load(&activity->done);
    out->busy = atomic_load(&activity->busy) != 0;
    out->heard = atomic_load(&activity->heard);
    out->answered = atomic_load(&activity->answered);
    out->place = (ms_whereabouts)atomic_load(&activity->place);
    out->thread = atomic_load(&activity->thread);
    /* The number of tries is limited because the writer may have been stopped in the middle of the
     * line. The line is left empty then. */
    for (int tries = 0; tries < 100; tries++) {
        uint32_t before = atomic_load(&activity->version);
        if (before & 1) continue;
        memcpy(out->line, activity->line, sizeof out->line);
        out->line[sizeof out->line - 1] = '\0';
        if (atomic_load(&activity->version) == before) return;
    }
    out->line[0] = '\0';
}
