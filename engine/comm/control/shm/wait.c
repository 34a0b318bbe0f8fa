/* wait.c: how a task waits for other ranks. It spins for a moment, yielding its core where cores
 * are shared, then sleeps on its rank's bell and looks around in turns. */
#include "comm/control/shm/wait.h"

#include <stdio.h>
#include <string.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/deadlock.h"
#include "comm/control/shm/hang_report.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/liveness.h"
#include "comm/control/shm/record.h"
#include "comm/control/shm/straggler.h"
#include "moonshard/cpu_task.h"

#define MS_SPIN_NS 50000 /* about the cost of a wake */
#define MS_YIELD_NS 100000
#define MS_LOOK_NS 50000000 /* a sleeper looks around at least this often */

/* The moment before sleeping: a peer usually arrives within the time that a sleep and a wake would
 * cost. The clock is read once in 64 looks. True: *result is decided. A task that waits holds its
 * stream's thread, so it yields where other ranks need the core. */
static bool spin(ms_wait *wait, bool *result)
{
    ms_host *host = wait->host;
    bool shared = host->pressure == MS_SHARED_CORE || wait->helper;
    uint64_t limit = 0;
    do {
        for (int i = 0; i < 64; i++) {
            if (wait->kind->reached(wait)) return *result = true;
            if (ms_host_aborted(host)) {
                *result = false;
                return true;
            }
            ms_pause();
        }
        if (shared) ms_yield();
        if (!limit) limit = ms_host_now(host) + (shared ? MS_YIELD_NS : MS_SPIN_NS);
    } while (ms_host_now(host) < limit);
    return false;
}

/* The time limit has passed. A supervisor decides about a rank that may only be slow (a long
 * compile, a debugger); without one, or where the call has a limit of its own, the job ends. The
 * progress of the missing rank goes along: a report that is older than its last progress does not
 * count. */
void ms_host_give_up(ms_host *host, const ms_comm_args *args, uint32_t missing, uint64_t progress,
                     uint64_t waited_ns)
{
    char call[256], text[512];
    ms_ledger_slot mine;
    ms_ledger_write(host, args, &mine);
    snprintf(text, sizeof text,
             "rank %u has not come to %s in %.1f s, and shows no progress; rank %u waits for it",
             missing, ms_flight_describe(&mine.call, call, sizeof call), (double)waited_ns / 1e9,
             host->rank);
    if (!args->timeout_ns && ms_suspect(host, missing, progress, text)) return;
    ms_host_end_job(host->files, MS_ABORT_TIMEOUT, (int32_t)missing, text);
}

/* The peer may have come long ago, where this rank cannot hear it: then the fault is here. */
static bool is_own_fault(const ms_wait *wait, uint64_t waited_ns)
{
    char call[256], text[512];
    ms_host *host = wait->host;
    const char *hangs = wait->helper ? wait->helper->hangs(wait->helper) : NULL;
    if (!hangs) return false;
    ms_ledger_slot mine;
    ms_ledger_write(host, wait->args, &mine);
    snprintf(text, sizeof text, "rank %u: %s has not returned, and so %s did not end in %.1f s",
             host->rank, hangs, ms_flight_describe(&mine.call, call, sizeof call),
             (double)waited_ns / 1e9);
    ms_host_end_job(host->files, MS_ABORT_TIMEOUT, (int32_t)host->rank, text);
    return true;
}

/* Sleeps and looks around in turns. The time limit begins anew when the missing rank makes
 * progress. Each look may end the job (hopeless, standstill, death), which the next turn of the
 * loop then sees. */
static bool sleep_until_reached(ms_wait *wait)
{
    ms_host *host = wait->host;
    uint64_t limit = wait->args->timeout_ns ? wait->args->timeout_ns : host->control->timeout_ns;
    uint64_t since = ms_host_now(host), progress = UINT64_MAX;
    uint32_t missing = UINT32_MAX;
    for (;;) {
        if (wait->kind->reached(wait)) return true;
        if (ms_host_aborted(host)) return false;
        wait->kind->hopeless(wait);
        ms_standstill_look(host, wait);
        uint32_t now_missing = wait->kind->missing(wait);
        ms_death_look(host, now_missing);
        ms_death_look_keeper(host);
        uint64_t moved = ms_rank_progress(&host->control->lines[now_missing]),
                 now = ms_host_now(host);
        if (now_missing != missing || moved != progress) {
            /* The first look only notes whom it waits for; the time runs from the beginning. */
            since = missing == UINT32_MAX ? since : now;
            missing = now_missing;
            progress = moved;
        }
        if (now - since >= limit) {
            if (!wait->kind->reached(wait) && !is_own_fault(wait, now - since))
                ms_host_give_up(host, wait->args, missing, progress, now - since);
            since = now;
            continue;
        }
        uint64_t rest = limit - (now - since),
                 patience = atomic_load_explicit(&host->patience_ns, memory_order_relaxed);
        if (now - since >= patience && !wait->kind->reached(wait))
            ms_straggler_warn(host, wait->args, missing, progress, now - since, limit);
        if (rest > MS_LOOK_NS) rest = MS_LOOK_NS;
        if (wait->helper && wait->helper->due_ns < now + rest)
            rest = wait->helper->due_ns > now ? wait->helper->due_ns - now : 1;
        ms_host_sleep(host, wait, rest);
    }
}

/* Runs on the thread of a stream, in the task of a collective. Most waits end while spinning, and
 * then deadlock detection hears nothing of them. */
bool ms_host_wait(ms_wait *wait)
{
    bool result = false;
    if (spin(wait, &result)) return result;
    ms_standstill_begin(wait->host, wait);
    result = sleep_until_reached(wait);
    ms_standstill_end(wait->host, wait);
    return result;
}

/* ------------------------------------------------------------------ failing */

/* The cause is the job's, not this rank's: every rank raises the same error. Without a cause the
 * task counts as done. */
ms_task_result ms_host_fail(ms_run *run, ms_host *host, const ms_comm_args *args)
{
    ms_abort_record cause;
    if (!ms_host_cause(host->files, &cause)) return MS_TASK_DONE;
    ms_run_fail(run, cause.error.status, "%s", cause.error.message);
    ms_error *error = ms_run_error(run);
    error->rank = cause.error.rank;
    error->collective = (int64_t)args->number;
    error->bucket = args->bucket;
    return MS_TASK_FAILED;
}

/* Peers get the reason as the job's cause; this rank's error keeps the status of its own trouble
 * (memory, files). */
ms_task_result ms_host_raise(ms_run *run, ms_host *host, const ms_comm_args *args, ms_status status,
                             const char *what)
{
    char text[256];
    snprintf(text, sizeof text, "because rank %u: %s", host->rank, what);
    ms_host_end_job(host->files, MS_ABORT_RAISED, (int32_t)host->rank, text);
    ms_task_result result = ms_host_fail(run, host, args);
    ms_run_error(run)->status = status;
    return result;
}
