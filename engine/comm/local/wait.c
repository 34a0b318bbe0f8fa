/* wait.c: how a rank waits for others: it burns its core for a moment, or yields it where it is
 * shared, then sleeps on its bell. */
#include "comm/local/control.h"

#include <stdio.h>
#include <string.h>

#define MS_SPIN_NS 50000 /* about what a wake costs */
#define MS_YIELD_NS 100000
#define MS_LOOK_NS 50000000 /* a sleeper looks around this often, whatever happens */

void ms_local_wake(ms_local *local, uint32_t rank)
{
    ms_rank_line *line = &local->control->lines[rank];
    if (!atomic_load(&line->asleep)) return;
    atomic_fetch_add(&line->bell, 1);
    ms_futex_wake_shared(&line->bell, UINT32_MAX);
}

/* Sleeps unless `wait` has come true since the bell was read. */
static void sleep_on_bell(ms_local *local, ms_wait *wait, uint64_t most_ns)
{
    ms_rank_line *line = &local->control->lines[local->rank];
    uint32_t seen = atomic_load(&line->bell);
    atomic_fetch_add(&line->asleep, 1);
    if (!(wait && wait->reached(wait)) && !atomic_load(&local->control->aborted))
        ms_futex_wait_shared(&line->bell, seen, most_ns);
    atomic_fetch_sub(&line->asleep, 1);
}

void ms_local_nap(ms_local *local, uint64_t most_ns) { sleep_on_bell(local, NULL, most_ns); }

/* The moment before sleeping; true when it is decided. */
static bool spin(ms_wait *wait, bool *result)
{
    ms_local *local = wait->local;
    bool shared = local->pressure == MS_SHARED_CORE;
    uint64_t limit = 0;
    do {
        for (int i = 0; i < 64; i++) {
            if (wait->reached(wait)) return *result = true;
            if (ms_local_aborted(local)) {
                *result = false;
                return true;
            }
            ms_pause();
        }
        if (shared) ms_yield();
        if (!limit) limit = ms_local_now(local) + (shared ? MS_YIELD_NS : MS_SPIN_NS);
    } while (ms_local_now(local) < limit);
    return false;
}

/* Ends the job, or leaves it to the supervisor whether it is to end. */
static void give_up(ms_wait *wait, uint32_t missing, uint64_t progress, uint64_t waited_ns)
{
    char call[256], text[512];
    ms_local *local = wait->local;
    const ms_comm_args *args = wait->args;
    ms_ledger_slot mine;
    ms_ledger_write(local, args, &mine);
    snprintf(text, sizeof text,
             "rank %u has not come to %s in %.1f s, and shows no progress; rank %u waits for it",
             missing, ms_flight_describe(&mine.call, call, sizeof call), (double)waited_ns / 1e9,
             local->rank);
    if (!args->timeout_ns && ms_suspect(local, missing, progress, text)) return;
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_TIMEOUT, (int32_t)missing, text);
}

/* Sleeps and looks around in turns. A missing rank that is slow but moves gets its time again. */
static bool sleep_until_reached(ms_wait *wait)
{
    ms_local *local = wait->local;
    uint64_t limit = wait->args->timeout_ns ? wait->args->timeout_ns : local->control->timeout_ns;
    uint64_t since = ms_local_now(local), progress = UINT64_MAX;
    uint32_t missing = UINT32_MAX;
    for (;;) {
        if (wait->reached(wait)) return true;
        if (ms_local_aborted(local)) return false;
        wait->hopeless(wait);
        ms_standstill_look(local, wait);
        uint32_t now_missing = wait->missing(wait);
        ms_death_look(local, now_missing);
        uint64_t moved = ms_rank_progress(&local->control->lines[now_missing]),
                 now = ms_local_now(local);
        if (now_missing != missing || moved != progress) {
            since = missing == UINT32_MAX ? since : now;
            missing = now_missing;
            progress = moved;
        }
        if (now - since >= limit) {
            if (!wait->reached(wait)) give_up(wait, missing, progress, now - since);
            since = now;
            continue;
        }
        uint64_t rest = limit - (now - since),
                 patience = atomic_load_explicit(&local->patience_ns, memory_order_relaxed);
        if (now - since >= patience && !wait->reached(wait))
            ms_straggler_tell(local, wait->args, missing, progress, now - since, limit);
        sleep_on_bell(local, wait, rest < MS_LOOK_NS ? rest : MS_LOOK_NS);
    }
}

bool ms_local_wait(ms_wait *wait)
{
    bool result = false;
    if (spin(wait, &result)) return result;
    ms_standstill_begin(wait->local, wait);
    result = sleep_until_reached(wait);
    ms_standstill_end(wait->local, wait);
    return result;
}

bool ms_local_sleep_until(ms_local *local, uint64_t until_ns)
{
    while (!ms_local_aborted(local)) {
        uint64_t now = ms_local_now(local);
        if (now >= until_ns) return true;
        sleep_on_bell(local, NULL, until_ns - now);
    }
    return false;
}

/* ------------------------------------------------------------------ failing */

ms_task_result ms_local_fail(ms_run *run, ms_local *local, const ms_comm_args *args)
{
    ms_abort_record cause;
    if (!ms_rendezvous_cause(local->rendezvous, &cause)) return MS_TASK_DONE;
    ms_run_fail(run, cause.error.status, "%s", cause.error.message);
    ms_error *error = ms_run_error(run);
    error->rank = cause.error.rank;
    error->collective = (int64_t)args->number;
    error->bucket = args->bucket;
    return MS_TASK_FAILED;
}

ms_task_result ms_local_raise(ms_run *run, ms_local *local, const ms_comm_args *args,
                              ms_status status, const char *what)
{
    char text[256];
    snprintf(text, sizeof text, "because rank %u: %s", local->rank, what);
    ms_rendezvous_abort(local->rendezvous, MS_ABORT_RAISED, (int32_t)local->rank, text);
    ms_task_result result = ms_local_fail(run, local, args);
    ms_run_error(run)->status = status;
    return result;
}
