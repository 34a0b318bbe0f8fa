/* watchdog.c: the thread that looks after calls that were launched, and that closes or aborts the
 * communicators at the end. */
#include "comm/transport/nccl/watchdog.h"

#include <stdio.h>

#include "comm/transport/nccl/communicator.h"
#include "comm/transport/nccl/graphs.h"
#include "comm/transport/nccl/in_flight.h"

#define LOOK_NS 100000000u
/* How long an abort may take before it counts as hung: a tenth of the job's timeout, within these.
 */
#define ABORT_LEAST_NS 500000000u
#define ABORT_MOST_NS 10000000000u

/* ---------------------------------------------------------------- watching */

static void lock(ms_nccl_watched *watched)
{
    while (atomic_exchange(&watched->lock, 1)) ms_yield();
}
static void unlock(ms_nccl_watched *watched) { atomic_store(&watched->lock, 0); }
void ms_nccl_lock(ms_communicator *communicator) { lock(&communicator->watched); }
void ms_nccl_unlock(ms_communicator *communicator) { unlock(&communicator->watched); }

/* The bell is rung only for a limit that ends before the watchdog looks the next time. */
void ms_nccl_watch(ms_nccl *nccl, ms_communicator *communicator, const ms_comm_args *args)
{
    ms_nccl_watched *watched = &communicator->watched;
    uint64_t limit = args->timeout_ns ? args->timeout_ns : nccl->timeout_ns,
             now = ms_nccl_now(nccl);
    lock(watched);
    watched->is_under_way = true;
    watched->calls++;
    watched->awaited = (ms_awaited){ .since_ns = now };
    watched->args = *args;
    unlock(watched);
    if (now + limit < atomic_load(&nccl->looks_ns)) ms_bell_ring(&nccl->bell);
}

void ms_nccl_watch_ended(ms_communicator *communicator)
{
    lock(&communicator->watched);
    communicator->watched.is_under_way = false;
    unlock(&communicator->watched);
}

/* Control looks whether the others will come, and at the time; without the lock, since the task
 * must not wait for that. Returns when the next look is due. */
static uint64_t look_at_call(ms_nccl *nccl, ms_communicator *communicator)
{
    ms_nccl_watched *watched = &communicator->watched;
    lock(watched);
    bool is_under_way = watched->is_under_way;
    uint64_t call = watched->calls;
    ms_awaited awaited = watched->awaited;
    ms_comm_args args = watched->args;
    unlock(watched);
    if (!is_under_way) return UINT64_MAX;
    uint64_t next = nccl->comm->control->look(nccl->comm, &args, &awaited);
    lock(watched);
    if (watched->calls == call) watched->awaited = awaited;
    unlock(watched);
    return next;
}

/* A call that has the turn finds its errors itself. The last call is named, which is the one that
 * failed after its launch. */
static bool look_for_error(ms_nccl *nccl, const ms_nccl_group *group, ms_communicator *communicator,
                           ms_error *out)
{
    char where[256];
    if (!ms_nccl_try_take(communicator)) return false;
    ms_nccl_result state = MS_NCCL_SUCCESS, failed = MS_NCCL_SUCCESS;
    if (communicator->handle) failed = nccl->api.comm_get_async_error(communicator->handle, &state);
    if (failed) state = failed;
    bool has_failed = state && state != MS_NCCL_IN_PROGRESS;
    if (has_failed) {
        *out = (ms_error){ .rank = -1, .collective = -1, .bucket = -1 };
        snprintf(where, sizeof where, "group %.32s", group->group->name);
        lock(&communicator->watched);
        if (communicator->watched.calls)
            ms_nccl_name(&communicator->watched.args, where, sizeof where, out);
        unlock(&communicator->watched);
        ms_nccl_explain(nccl, "ncclCommGetAsyncError", state, where, out);
    }
    ms_nccl_give(communicator);
    return has_failed;
}

bool ms_nccl_find_error(ms_nccl *nccl, ms_error *out)
{
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++)
            if (look_for_error(nccl, g, &g->communicators[i], out)) return true;
    return false;
}

/* One look; returns when the next one is due. */
static uint64_t look(ms_nccl *nccl)
{
    ms_error error;
    uint64_t next = ms_nccl_now(nccl) + LOOK_NS;
    if (ms_nccl_find_error(nccl, &error)) nccl->comm->control->abort(nccl->comm, &error);
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) {
            ms_communicator *c = &g->communicators[i];
            uint64_t due = look_at_call(nccl, c), landing = ms_nccl_in_flight_look(nccl, c);
            if (landing < due) due = landing;
            if (due < next) next = due;
        }
    return next;
}

static void sleep_until(ms_nccl *nccl, uint32_t seen, uint64_t until_ns)
{
    uint64_t now = ms_nccl_now(nccl);
    if (until_ns <= now) return;
    atomic_fetch_add(&nccl->bell.sleepers, 1);
    if (ms_bell_read(&nccl->bell) == seen) ms_futex_wait(&nccl->bell.rings, seen, until_ns - now);
    atomic_fetch_sub(&nccl->bell.sleepers, 1);
}

/* ------------------------------------------------------------------ ending */

static uint64_t abort_limit(const ms_nccl *nccl)
{
    uint64_t limit = nccl->timeout_ns / 10;
    if (limit < ABORT_LEAST_NS) return ABORT_LEAST_NS;
    return limit < ABORT_MOST_NS ? limit : ABORT_MOST_NS;
}

/* How long peers may take to close their side. */
static uint64_t close_limit(const ms_nccl *nccl)
{
    return nccl->timeout_ns ? nccl->timeout_ns : ABORT_MOST_NS;
}

/* A task inside gives its turn as soon as it sees that the job has ended; one that NCCL holds never
 * does, and then its communicator cannot be aborted. The handle leaves the communicator
 * before it is aborted, so that no later call can use it. Answers false if a task kept its turn
 * until the time limit. */
static bool take_handles(ms_nccl *nccl)
{
    uint64_t since = ms_nccl_now(nccl), limit = abort_limit(nccl);
    bool has_all = true;
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) {
            ms_communicator *c = &g->communicators[i];
            bool has_turn;
            while (!(has_turn = ms_nccl_try_take(c)) && !atomic_load(&nccl->given_up)
                   && ms_nccl_now(nccl) - since < limit)
                ms_yield();
            has_all = has_all && has_turn;
            if (!has_turn) continue;
            c->aborted = c->handle;
            c->handle = NULL;
            ms_nccl_give(c);
        }
    return has_all;
}

/* Of communicators that no task uses any more. */
static void drop_graphs(ms_nccl *nccl)
{
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++)
            if (!g->communicators[i].handle) ms_nccl_graph_drop(nccl, &g->communicators[i]);
}

/* In one group, since an abort frees memory of the GPU, which waits for all that runs there: calls
 * of a communicator that was not told to stop never end. NCCL tells each at once, and frees at the
 * end of the group. That may say that it goes on (MS_NCCL_IN_PROGRESS): a handle is not asked
 * again, as it may be gone. */
static bool abort_all(ms_nccl *nccl)
{
    bool has_all = take_handles(nccl);
    if (atomic_load(&nccl->given_up)) return false;
    bool is_grouped = nccl->api.group_start() == MS_NCCL_SUCCESS;
    if (!is_grouped) drop_graphs(nccl);
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++)
            if (g->communicators[i].aborted) nccl->api.comm_abort(g->communicators[i].aborted);
    drop_graphs(nccl);
    if (is_grouped) nccl->api.group_end();
    return has_all && !atomic_load(&nccl->given_up);
}

/* All begin before any is waited for, since peers may come to them in another order. */
static void begin_to_close(ms_nccl *nccl)
{
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) {
            ms_nccl_graph_drop(nccl, &g->communicators[i]);
            if (g->communicators[i].handle) nccl->api.comm_finalize(g->communicators[i].handle);
        }
}

/* Whether no rank of the job makes calls any more. */
static bool all_have_finished(const ms_nccl *nccl)
{
    ms_rank_state state = { .finished = true };
    for (uint32_t r = 0; r < ms_rendezvous_ranks(nccl->rendezvous) && state.finished; r++)
        ms_rendezvous_rank(nccl->rendezvous, r, &state);
    return state.finished;
}

/* Until when this rank waits for its peers to close. A rank that still works may take long; once
 * all have finished, one that does not close has ended without it. */
typedef struct closing {
    uint64_t until_ns;
    bool all_have_finished;
} closing;

static bool may_wait(const ms_nccl *nccl, closing *limit)
{
    uint64_t now = ms_nccl_now(nccl);
    if (!limit->all_have_finished && all_have_finished(nccl)) {
        limit->all_have_finished = true;
        if (limit->until_ns > now + abort_limit(nccl)) limit->until_ns = now + abort_limit(nccl);
    }
    return now < limit->until_ns && !atomic_load(&nccl->given_up);
}

/* Whether the communicator was closed together with its peers. */
static bool close_one(ms_nccl *nccl, ms_communicator *c, closing *limit)
{
    ms_nccl_result state = MS_NCCL_IN_PROGRESS;
    uint64_t since = ms_nccl_now(nccl);
    while (c->handle && !ms_nccl_job_ended(nccl, NULL) && may_wait(nccl, limit)) {
        if (nccl->api.comm_get_async_error(c->handle, &state)) return false;
        if (state != MS_NCCL_IN_PROGRESS) break;
        ms_nccl_nap(nccl, since);
    }
    if (!c->handle) return true;
    if (state) return false;
    nccl->api.comm_destroy(c->handle);
    c->handle = NULL;
    return true;
}

/* Peers may still be at work with what this rank has sent, so communicators close together. What
 * does not come to its end is aborted. The streams have ended: no task has a turn. */
static bool close_all(ms_nccl *nccl)
{
    closing limit = { .until_ns = ms_nccl_now(nccl) + close_limit(nccl) };
    begin_to_close(nccl);
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++)
            if (!close_one(nccl, &g->communicators[i], &limit)) return abort_all(nccl);
    return true;
}

/* -------------------------------------------------------------- the thread */

/* From now on no group goes. */
static void end_changes(ms_nccl *nccl)
{
    uint32_t free = 0;
    while (!atomic_compare_exchange_weak(&nccl->looking, &free, 1)) {
        free = 0;
        ms_yield();
    }
    atomic_store(&nccl->stage, MS_NCCL_ENDING);
    ms_nccl_let_list(nccl);
}

/* After the end of the job it aborts at once, since that is what lets launched work end. */
static void watch(void *argument)
{
    ms_nccl *nccl = argument;
    while (!ms_nccl_job_ended(nccl, NULL) && !atomic_load(&nccl->closing)) {
        uint32_t seen = ms_bell_read(&nccl->bell);
        if (!ms_nccl_hold_list(nccl)) break;
        uint64_t next = look(nccl);
        ms_nccl_let_list(nccl);
        atomic_store(&nccl->looks_ns, next);
        if (!ms_nccl_job_ended(nccl, NULL) && !atomic_load(&nccl->closing))
            sleep_until(nccl, seen, next);
    }
    end_changes(nccl);
    if (ms_nccl_job_ended(nccl, NULL)) atomic_store(&nccl->ended, true);
    if (atomic_load(&nccl->ended)) ms_nccl_flights_abort(nccl);
    bool is_clean = atomic_load(&nccl->ended) ? abort_all(nccl) : close_all(nccl);
    atomic_store(&nccl->stage, is_clean ? MS_NCCL_CLOSED : MS_NCCL_STUCK);
    ms_futex_wake(&nccl->stage, 1);
}

ms_status ms_nccl_watchdog_start(ms_nccl *nccl)
{
    int error = nccl->os->thread_start(nccl->os->user, "ms-nccl", watch, nccl, &nccl->watchdog);
    return error ? ms_fail_os(ms_engine_context(nccl->comm->engine), error,
                              "cannot start the watchdog of NCCL", NULL)
                 : MS_OK;
}

/* Closing may take as long as the slowest peer, and then an abort its own time. */
bool ms_nccl_watchdog_close(ms_nccl *nccl)
{
    uint64_t since = ms_nccl_now(nccl), limit = 2 * abort_limit(nccl);
    if (!ms_nccl_job_ended(nccl, NULL)) limit += close_limit(nccl);
    atomic_store(&nccl->closing, true);
    ms_bell_ring(&nccl->bell);
    for (uint32_t stage; (stage = atomic_load(&nccl->stage)) < MS_NCCL_CLOSED;) {
        uint64_t now = ms_nccl_now(nccl);
        if (now - since >= limit) {
            atomic_store(&nccl->given_up, true);
            return false;
        }
        ms_futex_wait(&nccl->stage, stage, since + limit - now);
    }
    nccl->os->thread_join(nccl->os->user, nccl->watchdog);
    return atomic_load(&nccl->stage) == MS_NCCL_CLOSED;
}
