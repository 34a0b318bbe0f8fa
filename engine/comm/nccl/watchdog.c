/* watchdog.c: the thread that looks after calls that were launched, and that closes or aborts the
 * communicators at the end. */
#include <inttypes.h>
#include <stdio.h>

#include "comm/nccl/nccl.h"

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

/* The bell is rung only for a limit that ends before the watchdog looks the next time. */
void ms_nccl_watch(ms_nccl *nccl, ms_communicator *communicator, const ms_comm_args *args)
{
    ms_nccl_watched *watched = &communicator->watched;
    uint64_t limit = args->timeout_ns ? args->timeout_ns : nccl->comm->timeout_ns;
    lock(watched);
    watched->is_under_way = watched->was_used = true;
    watched->since_ns = ms_nccl_now(nccl);
    watched->limit_ns = limit;
    watched->args = *args;
    bool is_soon = limit && watched->since_ns + limit < atomic_load(&nccl->looks_ns);
    unlock(watched);
    if (is_soon) ms_bell_ring(&nccl->bell);
}

void ms_nccl_watch_ended(ms_communicator *communicator)
{
    lock(&communicator->watched);
    communicator->watched.is_under_way = false;
    unlock(&communicator->watched);
}

/* Ends the job when the call has taken too long. Otherwise *next is made as early as its limit. */
static void look_at_time(ms_nccl *nccl, ms_communicator *communicator, uint64_t now, uint64_t *next)
{
    ms_nccl_watched *watched = &communicator->watched;
    char call[256], text[512];
    lock(watched);
    bool counts = watched->is_under_way && watched->limit_ns;
    uint64_t since = watched->since_ns, end = since + watched->limit_ns;
    if (counts) ms_nccl_name(&watched->args, call, sizeof call, NULL);
    unlock(watched);
    if (!counts) return;
    if (now < end) {
        if (end < *next) *next = end;
        return;
    }
    snprintf(text, sizeof text,
             "%s has not ended on rank %" PRIu32 " in %.1f s: NCCL waits for the other ranks", call,
             nccl->comm->groups[0]->rank, (double)(now - since) * 1e-9);
    ms_rendezvous_abort(nccl->rendezvous, MS_ABORT_TIMEOUT, (int32_t)nccl->comm->groups[0]->rank,
                        text);
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
        if (communicator->watched.was_used)
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
    uint64_t now = ms_nccl_now(nccl), next = now + LOOK_NS;
    if (ms_nccl_find_error(nccl, &error)) nccl->comm->control->abort(nccl->comm, &error);
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++)
            look_at_time(nccl, &g->communicators[i], now, &next);
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
    uint64_t limit = nccl->comm->timeout_ns / 10;
    if (limit < ABORT_LEAST_NS) return ABORT_LEAST_NS;
    return limit < ABORT_MOST_NS ? limit : ABORT_MOST_NS;
}

/* How long peers may take to close their side. */
static uint64_t close_limit(const ms_nccl *nccl)
{
    return nccl->comm->timeout_ns ? nccl->comm->timeout_ns : ABORT_MOST_NS;
}

/* A task inside gives its turn as soon as it sees that the job has ended; one that NCCL holds never
 * does, and then its communicator cannot be aborted either. A handle is gone before it is aborted,
 * so that nobody uses it again. */
static bool abort_all(ms_nccl *nccl)
{
    uint64_t since = ms_nccl_now(nccl), limit = abort_limit(nccl);
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++) {
            ms_communicator *c = &g->communicators[i];
            while (!ms_nccl_try_take(c)) {
                if (atomic_load(&nccl->given_up) || ms_nccl_now(nccl) - since >= limit)
                    return false;
                ms_yield();
            }
            ms_nccl_handle handle = c->handle;
            c->handle = NULL;
            ms_nccl_give(c);
            if (handle) nccl->api.comm_abort(handle);
            if (atomic_load(&nccl->given_up)) return false;
        }
    return true;
}

/* All begin before any is waited for, since peers may come to them in another order. */
static void begin_to_close(ms_nccl *nccl)
{
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++)
            if (g->communicators[i].handle) nccl->api.comm_finalize(g->communicators[i].handle);
}

/* Whether the communicator was closed together with its peers. */
static bool close_one(ms_nccl *nccl, ms_communicator *c, uint64_t until_ns)
{
    ms_nccl_result state = MS_NCCL_IN_PROGRESS;
    uint64_t since = ms_nccl_now(nccl);
    while (c->handle && !atomic_load(&nccl->given_up) && !ms_nccl_job_ended(nccl, NULL)
           && ms_nccl_now(nccl) < until_ns) {
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
    uint64_t until = ms_nccl_now(nccl) + close_limit(nccl);
    begin_to_close(nccl);
    for (ms_nccl_group *g = atomic_load(&nccl->groups); g; g = g->next)
        for (int i = 0; i < MS_NCCL_COMMUNICATORS; i++)
            if (!close_one(nccl, &g->communicators[i], until)) return abort_all(nccl);
    return true;
}

/* -------------------------------------------------------------- the thread */

/* After the end of the job it aborts at once, since that is what lets launched work end. */
static void watch(void *argument)
{
    ms_nccl *nccl = argument;
    bool is_clean;
    for (;;) {
        uint32_t seen = ms_bell_read(&nccl->bell);
        if (ms_nccl_job_ended(nccl, NULL)) {
            atomic_store(&nccl->ended, true);
            is_clean = abort_all(nccl);
            break;
        }
        if (atomic_load(&nccl->closing)) {
            is_clean = close_all(nccl);
            break;
        }
        uint64_t next = look(nccl);
        atomic_store(&nccl->looks_ns, next);
        if (!ms_nccl_job_ended(nccl, NULL)) sleep_until(nccl, seen, next);
    }
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
    while (atomic_load(&nccl->stage) == MS_NCCL_WATCHING) {
        uint64_t now = ms_nccl_now(nccl);
        if (now - since >= limit) {
            atomic_store(&nccl->given_up, true);
            return false;
        }
        ms_futex_wait(&nccl->stage, MS_NCCL_WATCHING, since + limit - now);
    }
    nccl->os->thread_join(nccl->os->user, nccl->watchdog);
    return atomic_load(&nccl->stage) == MS_NCCL_CLOSED;
}
