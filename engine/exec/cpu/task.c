/* task.c: running a CPU task, and what it may ask of the thread that runs it. */
#include "exec/cpu/task.h"

#include <stdio.h>
#include <string.h>

#include "exec/cpu/team.h"

/* A task that fails without a message gets one, and one that calls ms_run_fail has failed whatever
 * it returns. */
ms_task_result ms_cpu_call(ms_thread *thread, ms_team *team, const ms_task *task, void *arguments,
                           ms_error *error)
{
    ms_run run = { .thread = thread, .team = team, .task = task, .error = error };
    ms_task_result result = task->function(&run, arguments);
    if (result == MS_TASK_FAILED && !run.failed)
        ms_run_fail(&run, MS_ERROR_TASK, "%s failed", task->name);
    return run.failed ? MS_TASK_FAILED : result;
}

/* What a task may know of its run; the struct is private to this device. */
ms_isa ms_run_isa(const ms_run *run) { return run->thread->engine->isa; }
ms_thread *ms_run_thread(ms_run *run) { return run->thread; }
ms_error *ms_run_error(ms_run *run) { return run->error; }

/* Keeps the first failure. Room for the script line is left at the end of the message; the host
 * adds it when it reports. */
void ms_run_fail(ms_run *run, ms_status status, const char *format, ...)
{
    if (run->failed) return;
    run->failed = true;
    ms_error *error = run->error;
    memset(error, 0, sizeof *error);
    error->status = status;
    /* -1: the layers above fill these in where they apply (ms_run_error). */
    error->rank = error->bucket = -1;
    error->collective = -1;
    snprintf(error->operation, sizeof error->operation, "%s", run->task->name);
    va_list list;
    va_start(list, format);
    vsnprintf(error->message, sizeof error->message - MS_SCRIPT_BYTES, format, list);
    va_end(list);
}

/* Returns after the last tile. Tiles run in any order and on any threads, so each must write its
 * own part of the result. A device without helpers (team NULL) gives the same results, only
 * later. */
void ms_run_tiles(ms_run *run, uint32_t tiles, ms_tile_function tile, void *context)
{
    if (run->team) {
        ms_team_run(run->team, tiles, tile, context, run->thread);
        return;
    }
    for (uint32_t i = 0; i < tiles; i++) tile(context, i, run->thread);
}

/* ------------------------------------------------------------------ scratch */

/* Grows by whole pages and never shrinks. A larger request allocates before it releases, so a
 * failure leaves the old memory; the contents are not kept. Pointers into a slot end with its next,
 * larger request; so a task asks for a slot once, or takes another slot. */
void *ms_thread_scratch(ms_thread *thread, uint32_t slot, size_t bytes)
{
    if (slot >= MS_SCRATCH_SLOTS) return NULL;
    if (thread->scratch[slot].bytes >= bytes) return thread->scratch[slot].memory;
    const ms_os *os = thread->engine->context.os;
    /* Slightly growing requests then reuse the memory. */
    size_t rounded = (bytes + 4095) & ~(size_t)4095;
    void *memory = os->allocate(os->user, rounded, 64);
    if (!memory) return NULL;
    os->release(os->user, thread->scratch[slot].memory);
    thread->scratch[slot].memory = memory;
    thread->scratch[slot].bytes = rounded;
    return memory;
}

/* For tables with a place for each thread. */
uint32_t ms_thread_index(const ms_thread *thread) { return thread->index; }

/* The thread has ended or never ran: scratch belongs to it until then. */
void ms_thread_close(ms_thread *thread)
{
    const ms_os *os = thread->engine->context.os;
    for (int i = 0; i < MS_SCRATCH_SLOTS; i++) os->release(os->user, thread->scratch[i].memory);
}
