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
#include "comm/control/shm/call_record.h"
#include "comm/control/shm/straggler.h"
#include "moonshard/cpu_task.h"

#define MS_SPIN_NS 50000 /* about the cost of a wake */
#define MS_YIELD_NS 100000
/* A yield that takes longer has given the core to another program, or to a rank that computes. */
#define MS_LONG_YIELD_NS 3000000
#define MS_YIELDLESS 50     /* so many waits after it do not yield */
#define MS_LOOK_NS 50000000 /* a sleeper looks around at least this often */

/* Where ranks alone share cores, a yield costs half of a sleep and a wake. Beside other programs it
 * lasts until their time slices end, some milliseconds, while a thread that sleeps is woken at
 * once. So after a long yield the next waits do without; fewer of them if it was not in vain, since
 * then the core may have gone to the rank that was waited for. Other threads of this rank may count
 * at the same time, which does no harm. */
static bool may_yield(ms_shm_rank *self)
{
    uint32_t left = atomic_load_explicit(&self->yieldless, memory_order_relaxed);
    if (left > 0) atomic_store_explicit(&self->yieldless, left - 1, memory_order_relaxed);
    return left == 0;
}

static void yield(ms_wait *wait)
{
    ms_shm_rank *self = wait->self;
    uint64_t began = ms_shm_now(self);
    ms_yield();
    if (ms_shm_now(self) - began < MS_LONG_YIELD_NS) return;
    uint32_t waits = wait->kind->reached(wait) ? MS_YIELDLESS / 5 : MS_YIELDLESS;
    atomic_store_explicit(&self->yieldless, waits, memory_order_relaxed);
}

/* The moment before sleeping: a peer usually arrives within the time that a sleep and a wake would
 * cost. The clock is read once in 64 looks, and around a yield. True: *result is decided. A task
 * that waits holds its stream's thread, so it yields where other ranks need the core. */
static bool spin(ms_wait *wait, bool *result)
{
    ms_shm_rank *self = wait->self;
    bool shared = self->pressure == MS_SHARED_CORE || wait->helper;
    uint64_t limit = 0;
    do {
        for (int i = 0; i < 64; i++) {
            if (wait->kind->reached(wait)) return *result = true;
            if (ms_shm_aborted(self)) {
                *result = false;
                return true;
            }
            ms_pause();
        }
        if (!limit && shared && !may_yield(self)) return false;
        if (!limit) limit = ms_shm_now(self) + (shared ? MS_YIELD_NS : MS_SPIN_NS);
        if (shared) yield(wait);
    } while (ms_shm_now(self) < limit);
    return false;
}

/* The time limit has passed. A supervisor decides about a rank that may only be slow (a long
 * compile, a debugger); without one, or where the call has a limit of its own, the job ends. The
 * progress of the missing rank goes along: a report that is older than its last progress does not
 * count. */
void ms_shm_give_up(ms_shm_rank *self, const ms_comm_args *args, uint32_t missing,
                    uint64_t progress, uint64_t waited_ns)
{
    char call[256], text[512];
    ms_ledger_entry mine;
    ms_ledger_write(self, args, &mine);
    snprintf(text, sizeof text,
             "rank %u has not come to %s in %.1f s, and shows no progress; rank %u waits for it",
             missing, ms_flight_describe(&mine.call, call, sizeof call), (double)waited_ns / 1e9,
             self->rank);
    if (!args->timeout_ns && ms_report_hang(self, missing, progress, text)) return;
    ms_shm_end_job(self->files, MS_ABORT_TIMEOUT, (int32_t)missing, text);
}

/* The peer may have come long ago, where this rank cannot hear it: then the fault is here. */
static bool is_own_fault(const ms_wait *wait, uint64_t waited_ns)
{
    char call[256], text[512];
    ms_shm_rank *self = wait->self;
    const char *hangs = wait->helper ? wait->helper->hangs(wait->helper) : NULL;
    if (!hangs) return false;
    ms_ledger_entry mine;
    ms_ledger_write(self, wait->args, &mine);
    snprintf(text, sizeof text, "rank %u: %s has not returned, and so %s did not end in %.1f s",
             self->rank, hangs, ms_flight_describe(&mine.call, call, sizeof call),
             (double)waited_ns / 1e9);
    ms_shm_end_job(self->files, MS_ABORT_TIMEOUT, (int32_t)self->rank, text);
    return true;
}

/* Sleeps and looks around in turns. The time limit begins again when the missing rank makes
 * progress. Each look may end the job (hopeless, stall, death), which the next turn of the
 * loop then sees. */
static bool sleep_until_reached(ms_wait *wait)
{
    ms_shm_rank *self = wait->self;
    uint64_t limit = wait->args->timeout_ns ? wait->args->timeout_ns : self->control->timeout_ns;
    uint64_t since = ms_shm_now(self), progress = UINT64_MAX;
    uint32_t missing = UINT32_MAX;
    for (;;) {
        if (wait->kind->reached(wait)) return true;
        if (ms_shm_aborted(self)) return false;
        wait->kind->hopeless(wait);
        ms_deadlock_look(self, wait);
        uint32_t now_missing = wait->kind->missing(wait);
        ms_liveness_look(self, now_missing);
        ms_liveness_look_agent(self);
        uint64_t moved = ms_rank_progress(&self->control->lines[now_missing]),
                 now = ms_shm_now(self);
        if (now_missing != missing || moved != progress) {
            /* The first look only notes whom it waits for; the time runs from the beginning. */
            since = missing == UINT32_MAX ? since : now;
            missing = now_missing;
            progress = moved;
        }
        if (now - since >= limit) {
            if (!wait->kind->reached(wait) && !is_own_fault(wait, now - since))
                ms_shm_give_up(self, wait->args, missing, progress, now - since);
            since = now;
            continue;
        }
        uint64_t rest = limit - (now - since),
                 patience = atomic_load_explicit(&self->patience_ns, memory_order_relaxed);
        if (now - since >= patience && !wait->kind->reached(wait))
            ms_straggler_warn(self, wait->args, missing, progress, now - since, limit);
        if (rest > MS_LOOK_NS) rest = MS_LOOK_NS;
        if (wait->helper && wait->helper->due_ns < now + rest)
            rest = wait->helper->due_ns > now ? wait->helper->due_ns - now : 1;
        ms_shm_sleep(self, wait, rest);
    }
}

/* Runs on the thread of a stream, in the task of a collective. Most waits end while spinning, and
 * then deadlock detection hears nothing of them. */
bool ms_shm_wait(ms_wait *wait)
{
    bool result = false;
    if (spin(wait, &result)) return result;
    ms_deadlock_begin(wait->self, wait);
    result = sleep_until_reached(wait);
    ms_deadlock_end(wait->self, wait);
    return result;
}

/* ------------------------------------------------------------------ failing */

/* The cause is the job's, not this rank's: every rank raises the same error. Without a cause the
 * task counts as done. */
ms_task_result ms_shm_fail(ms_run *run, ms_shm_rank *self, const ms_comm_args *args)
{
    ms_abort_record cause;
    if (!ms_shm_cause(self->files, &cause)) return MS_TASK_DONE;
    ms_run_fail(run, cause.error.status, "%s", cause.error.message);
    ms_error *error = ms_run_error(run);
    error->rank = cause.error.rank;
    error->collective = (int64_t)args->number;
    error->bucket = args->bucket;
    return MS_TASK_FAILED;
}

/* Peers get the reason as the job's cause; this rank's error keeps the status of its own trouble
 * (memory, files). */
ms_task_result ms_shm_raise(ms_run *run, ms_shm_rank *self, const ms_comm_args *args,
                            ms_status status, const char *what)
{
    char text[256];
    snprintf(text, sizeof text, "because rank %u: %s", self->rank, what);
    ms_shm_end_job(self->files, MS_ABORT_RAISED, (int32_t)self->rank, text);
    ms_task_result result = ms_shm_fail(run, self, args);
    ms_run_error(run)->status = status;
    return result;
}
