/* launcher.c: supervises the ranks of a job: requests to stop, ranks that die or leave, and ranks
 * that stay when the job is over. */
#include "bindings/program/launcher.h"

#include <errno.h>
#include <lauxlib.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "bindings/fields.h"
#include "bindings/program/processes.h"
#include "bindings/program/signals.h"
#include "bindings/program/terminal.h"
#include "bindings/program/threads.h"
#include "bindings/program/watch.h"

#define MS_DONE_TICK_NS 50000000u /* how often `done` of ms_job_supervise is asked at least */

/* Nanoseconds of the monotonic clock, which setting the system's time does not change. All
 * deadlines of the supervisor are on it, and so are the times in flight records. */
static uint64_t now_of(const ms_job *job)
{
    const ms_os *os = job->context.os;
    return os->monotonic_ns(os->user);
}

/* ------------------------------------------------------------- the job ends */

/* One line on stderr; rank 0 may be showing its own line there. ms_fresh_row clears that line on a
 * terminal, so that the two texts do not mix. */
void ms_job_warn(ms_job *job, const char *text)
{
    (void)job;
    fprintf(stderr, "%smoonshard: warning: %s\n", ms_fresh_row(), text);
}

/* "rank 2 (pid 4711) killed by SIGKILL during all_reduce #17 of world [...] at step 57". This is
 * the text that every rank shows as the cause, and often all that is left of the rank: hence the
 * collective that it was in, or had left last, from its flight record in shared memory, which
 * outlives it. */
static void describe_death(const ms_job *job, uint32_t rank, char *text, size_t bytes)
{
    const ms_outcome *outcome = &job->outcomes[rank];
    ms_rank_state state;
    ms_flight flight;
    char call[320] = "", how[64], step[40] = "", node[80] = "";
    ms_rendezvous_rank(job->rendezvous, rank, &state);
    if (outcome->signal)
        snprintf(how, sizeof how, "killed by SIG%s",
                 sigabbrev_np(outcome->signal) ? sigabbrev_np(outcome->signal) : "?");
    else if (outcome->code < 0) snprintf(how, sizeof how, "has ended without leaving");
    else snprintf(how, sizeof how, "ended with exit code %d", outcome->code);
    if (state.collectives
        && ms_rendezvous_flight(job->rendezvous, rank, state.collectives - 1, &flight)) {
        /* left_ns is 0 while the rank is inside the call. */
        int used = snprintf(call, sizeof call, flight.left_ns ? " after " : " during ");
        ms_flight_describe(&flight, call + used, sizeof call - (size_t)used);
    } else if (state.phase == MS_RANK_ABSENT) snprintf(call, sizeof call, " before it had joined");
    if (state.step >= 0) snprintf(step, sizeof step, " at step %lld", (long long)state.step);
    if (job->agent)
        snprintf(node, sizeof node, " on host %s",
                 ms_agent_node_name(job->agent, ms_agent_node_of(job->agent, rank)));
    snprintf(text, bytes, "rank %u (pid %lld)%s %s%s%s", rank, (long long)outcome->process, node,
             how, call, step);
}

/* A rank has ended. If it ended well, it has left: peers that still wait for it find that out by
 * themselves. Otherwise the job ends. 75 is the exit code of a run that has saved a checkpoint and
 * asks to be started again; 128 plus the signal is that of one that has stopped without. Both are
 * no failures after a request to stop, which may have come to one rank alone: then ranks stop
 * after the same step, and leave in order. A rank that this supervisor has killed is not a cause
 * either: the job had one before. Of a rank that has died its launcher may have read how, before
 * this process could: then the code is -1. */
void ms_job_rank_ended(ms_job *job, uint32_t rank)
{
    ms_outcome *outcome = &job->outcomes[rank];
    job->reap(job, rank);
    outcome->ended = true;
    outcome->ended_ns = now_of(job);
    /* No rank is addressed by its descriptor once it was reaped. A process that was forked and has
     * not begun its program yet may still have the descriptor, so closing it is not enough. */
    if (job->ended[rank] >= 0) {
        (void)epoll_ctl(job->ends, EPOLL_CTL_DEL, job->ended[rank], NULL);
        close(job->ended[rank]);
        job->ended[rank] = -1;
        job->running--;
    }
    if (outcome->killed) return;
    ms_rank_state state;
    ms_rendezvous_rank(job->rendezvous, rank, &state);
    bool stopped = outcome->code == 75
                   || (job->stop_signal ? outcome->code == 128 + job->stop_signal
                                        : outcome->code > 128 && outcome->code < 128 + NSIG);
    bool asked = job->stop_signal || state.phase == MS_RANK_LEFT;
    if (!outcome->signal && (outcome->code == 0 || (stopped && asked))) {
        ms_rendezvous_left(job->rendezvous, rank);
        return;
    }
    char text[640];
    describe_death(job, rank, text, sizeof text);
    bool died = outcome->signal || outcome->code < 0;
    ms_end_job(job, died ? MS_ABORT_DIED : MS_ABORT_RAISED, (int32_t)rank, text);
}

/* The deadline has passed: ranks that still run are killed; threads, which cannot be killed, are
 * left to the caller. false: there is nothing more to wait for. A second deadline follows the first
 * where a request to stop has passed its grace: the job then ends with that as its cause, and ranks
 * get MS_LEAVE_NS to leave. Killed ranks need no further deadline, since SIGKILL cannot be ignored.
 */
static bool time_is_over(ms_job *job)
{
    if (!job->ending) {
        char text[128];
        snprintf(text, sizeof text, "the ranks did not stop within %.0f s after SIG%s (--grace)",
                 (double)job->grace_ns / 1e9, sigabbrev_np(job->stop_signal));
        ms_end_job(job, MS_ABORT_STOPPED, -1, text);
        return true;
    }
    /* Thread ranks: the process ends with them still in it. */
    if (!job->kill) return false;
    job->deadline_ns = 0;
    for (uint32_t r = 0; r < job->ranks; r++) {
        if (job->outcomes[r].ended) continue;
        job->outcomes[r].killed = true;
        job->kill(job, r);
    }
    return true;
}

/* ------------------------------------------------------------------ signals */

/* The first request: all ranks end after the same step. The second: at once. A request and not a
 * signal to each rank: the ranks agree on the step before which they stop, so that none of them
 * waits in a collective for one that has left already. */
static void stop_requested(ms_job *job, int number)
{
    if (job->stop_signal) {
        char text[96];
        snprintf(text, sizeof text, "stopped at once by a second request, SIG%s",
                 sigabbrev_np(number));
        ms_end_job(job, MS_ABORT_STOPPED, -1, text);
        return;
    }
    /* The first one is kept: it is what the exit code says. */
    job->stop_signal = number;
    if (!job->ending) job->deadline_ns = now_of(job) + job->grace_ns;
    ms_rendezvous_request(job->rendezvous, MS_REQUEST_STOP, (uint8_t)number);
}

/* Calls on_dump, the function at the top of L's stack. */
static void dump(lua_State *L)
{
    if (!lua_isfunction(L, -1)) return;
    lua_pushvalue(L, -1);
    lua_call(L, 0, 0);
}

/* SIGUSR1 asks for a checkpoint, SIGUSR2 for the flight records, the others to stop. The descriptor
 * does not block, so the loop ends when no signal is left. on_dump is called here and not in a
 * handler: it runs Lua. */
static void read_signals(lua_State *L, ms_job *job)
{
    struct signalfd_siginfo info;
    while (read(job->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGUSR1)
            ms_rendezvous_request(job->rendezvous, MS_REQUEST_SAVE, SIGUSR1);
        else if (info.ssi_signo == SIGUSR2) dump(L);
        else stop_requested(job, (int)info.ssi_signo);
    }
}

ms_status ms_job_open_signals(ms_job *job)
{
    int descriptor = ms_open_signals();
    if (descriptor < 0)
        return ms_fail_os(&job->context, descriptor, "signals cannot be supervised", NULL);
    job->signals = descriptor;
    return MS_OK;
}

/* Ranks that have ended, in the order in which they did: an MPI launcher kills the others as soon
 * as one has died, and where this process gets to run after that, all have ended. */
static void read_ends(ms_job *job)
{
    struct epoll_event events[64];
    int count = epoll_wait(job->ends, events, 64, 0);
    for (int i = 0; i < count; i++) ms_job_rank_ended(job, events[i].data.u32);
}

/* The supervisor's loop: it ends when no rank runs, or when threads do not leave in time. Each
 * round looks at the deadline first, so that a rank that sends many events cannot put it off.
 * Signals are read before ended ranks are: where a terminal's Ctrl-C has reached the job, the
 * request is noted before the exit of a rank is judged. */
void ms_job_supervise(lua_State *L, ms_job *job, bool (*done)(ms_job *job))
{
    struct pollfd waits[] = { { .fd = job->signals, .events = POLLIN },
                              { .fd = job->ends, .events = POLLIN } };
    while (job->running && !(done && done(job))) {
        uint64_t now = now_of(job);
        if (job->deadline_ns && now >= job->deadline_ns) {
            if (!time_is_over(job)) return;
            continue;
        }
        uint64_t rest_ns = ms_watch_tick(job);
        if (done && rest_ns > MS_DONE_TICK_NS) rest_ns = MS_DONE_TICK_NS;
        if (job->deadline_ns && job->deadline_ns - now < rest_ns) rest_ns = job->deadline_ns - now;
        /* One millisecond more than the rest, which is cut to whole milliseconds: without it the
         * last fraction of one would be spent in a busy loop. */
        int changed = poll(waits, 2, (int)(rest_ns / 1000000) + 1);
        /* After the poll, whatever woke it: a rank that sends events all the time does not keep
         * others from being looked at. */
        if (!job->ending) ms_watch(job, now_of(job));
        if (job->agent && ms_agent_flights_wanted(job->agent)) dump(L);
        /* The tick is over, or a signal has interrupted the poll. */
        if (changed <= 0) continue;
        if (waits[0].revents) read_signals(L, job);
        if (waits[1].revents) read_ends(job);
    }
}

/* ------------------------------------------------------------------- in Lua */

/* Pushes one entry of a flight record as a table. Times stay integers of nanoseconds, since the
 * report computes differences between ranks with them. channel counts from 1, as scripts write it.
 */
static void push_flight(lua_State *L, const ms_flight *flight)
{
    char text[320];
    lua_createtable(L, 0, 13);
    ms_lua_set_string(L, "call", ms_flight_describe(flight, text, sizeof text));
    ms_flight_names names = ms_flight_name(flight);
    ms_lua_set_string(L, "op", names.kind);
    ms_lua_set_string(L, "dtype", names.dtype);
    ms_lua_set_string(L, "reduce_op", names.op);
    ms_lua_set_string(L, "group", flight->group_name);
    ms_lua_set_string(L, "label", flight->label);
    ms_lua_set_string(L, "script", flight->script);
    ms_lua_set_integer(L, "number", (int64_t)flight->number);
    ms_lua_set_integer(L, "count", (int64_t)flight->count);
    ms_lua_set_integer(L, "channel", flight->channel + 1);
    ms_lua_set_integer(L, "root", flight->root);
    ms_lua_set_integer(L, "bucket", flight->bucket);
    ms_lua_set_integer(L, "entered_ns", (int64_t)flight->entered_ns);
    ms_lua_set_integer(L, "left_ns", (int64_t)flight->left_ns);
}

/* flights(rank) -> the list of the entries in its flight record that were not overwritten; whether
 * the rank is on this node: others tell their records at the job's end only. The record is a ring:
 * only the last MS_FLIGHTS entries can still be there, and of those some may be overwritten while
 * they are read. */
static int flights(lua_State *L)
{
    const ms_job *job = lua_touserdata(L, lua_upvalueindex(1));
    lua_Integer rank = luaL_checkinteger(L, 1);
    luaL_argcheck(L, rank >= 0 && rank < (lua_Integer)job->ranks, 1, "no such rank");
    ms_rank_state state;
    ms_rendezvous_rank(job->rendezvous, (uint32_t)rank, &state);
    lua_newtable(L);
    ms_flight flight;
    for (uint64_t i = state.collectives > MS_FLIGHTS ? state.collectives - MS_FLIGHTS : 0;
         i < state.collectives; i++) {
        if (!ms_rendezvous_flight(job->rendezvous, (uint32_t)rank, i, &flight)) continue;
        push_flight(L, &flight);
        lua_rawseti(L, -2, luaL_len(L, -2) + 1);
    }
    lua_pushboolean(L, !job->outcomes[rank].elsewhere);
    return 2;
}

/* folder() -> where the job keeps its files, or "" until a rank has named it (core.comm_folder). */
static int folder(lua_State *L)
{
    const ms_job *job = lua_touserdata(L, lua_upvalueindex(1));
    char text[MS_FOLDER_BYTES];
    lua_pushstring(L, ms_rendezvous_folder(job->rendezvous, text, sizeof text));
    return 1;
}

/* Pushes the outcome of one rank: how its process ended and how far its script was. `state` is
 * there only where the supervisor has looked at the rank's process because it showed no progress.
 */
static void push_rank(lua_State *L, const ms_job *job, uint32_t rank)
{
    const ms_outcome *outcome = &job->outcomes[rank];
    ms_rank_state state;
    ms_rendezvous_rank(job->rendezvous, rank, &state);
    lua_createtable(L, 0, 9);
    lua_pushboolean(L, outcome->ended);
    lua_setfield(L, -2, "ended");
    lua_pushboolean(L, outcome->killed);
    lua_setfield(L, -2, "killed");
    ms_lua_set_integer(L, "code", outcome->code);
    ms_lua_set_integer(L, "signal", outcome->signal);
    ms_lua_set_integer(L, "process", outcome->process);
    ms_lua_set_integer(L, "ended_ns", (int64_t)outcome->ended_ns);
    ms_lua_set_integer(L, "step", state.step);
    if (job->agent) {
        uint32_t node = ms_agent_node_of(job->agent, rank);
        ms_lua_set_string(L, "host", ms_agent_node_name(job->agent, node));
    }
    char letter[2] = { outcome->state, '\0' };
    if (outcome->state) ms_lua_set_string(L, "state", letter);
}

/* Pushes the outcome of the job: stop_signal, cause = { reason, rank, message } or nil, folder,
 * ranks = list from rank 0 on. */
void ms_job_push_outcome(lua_State *L, const ms_job *job)
{
    /* In the order of ms_abort_reason. */
    static const char *const reasons[] = { "none",   "mismatch", "left",   "timeout",
                                           "raised", "died",     "stopped" };
    char text[MS_FOLDER_BYTES];
    ms_abort_record cause;
    lua_createtable(L, 0, 4);
    if (job->stop_signal) ms_lua_set_integer(L, "stop_signal", job->stop_signal);
    ms_lua_set_string(L, "folder", ms_rendezvous_folder(job->rendezvous, text, sizeof text));
    if (ms_rendezvous_cause(job->rendezvous, &cause)) {
        lua_createtable(L, 0, 3);
        ms_lua_set_string(L, "reason", reasons[cause.reason]);
        ms_lua_set_string(L, "message", cause.error.message);
        ms_lua_set_integer(L, "rank", cause.error.rank);
        lua_setfield(L, -2, "cause");
    }
    lua_createtable(L, (int)job->ranks, 0);
    for (uint32_t r = 0; r < job->ranks; r++) {
        push_rank(L, job, r);
        lua_rawseti(L, -2, r + 1);
    }
    lua_setfield(L, -2, "ranks");
    /* Of several supervisors the first reports, and one that has lost it. */
    lua_pushboolean(L, !job->agent || ms_agent_reports(job->agent));
    lua_setfield(L, -2, "reports");
    uint32_t node = job->agent ? ms_agent_node(job->agent) : 0;
    if (node) ms_lua_set_string(L, "other_host", ms_agent_node_name(job->agent, node));
}

/* __gc of the job, after ms_launch has returned, or after an error in the middle of it. It closes
 * what the supervisor holds; processes that still run die with this one (PR_SET_PDEATHSIG). */
static int job_gc(lua_State *L)
{
    ms_job *job = lua_touserdata(L, 1);
    if (job->signals >= 0) close(job->signals);
    job->signals = -1;
    if (job->ends >= 0) close(job->ends);
    job->ends = -1;
    ms_rendezvous_release(job->rendezvous);
    job->rendezvous = NULL;
    /* A rank that did not leave may still use it; the process ends then. */
    if (job->running == 0) ms_release(&job->context, job->ranks_data);
    job->ranks_data = NULL;
    ms_release(&job->context, job->outcomes);
    job->outcomes = NULL;
    return 0;
}

/* An empty job in a userdata on the stack. It is a userdata, because Lua functions that may raise
 * (on_start, the dump) are called while it exists. */
ms_job *ms_job_new(lua_State *L)
{
    ms_job *job = lua_newuserdatauv(L, sizeof *job, 0);
    memset(job, 0, sizeof *job);
    job->signals = job->ends = -1;
    ms_context_init(&job->context, NULL);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, job_gc);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    return job;
}

/* Room for what the supervisor keeps of each rank. One allocation for three arrays, so that one
 * release frees them. They are laid out in order of decreasing alignment. */
ms_status ms_job_make_room(ms_job *job, uint32_t ranks)
{
    void *memory = NULL;
    size_t one = sizeof(ms_outcome) + sizeof(ms_watched) + sizeof(int);
    job->ends = epoll_create1(EPOLL_CLOEXEC);
    if (job->ends < 0) return ms_fail_os(&job->context, -errno, "ranks cannot be supervised", NULL);
    ms_status status = ms_allocate(&job->context, ranks * one, "the ranks of a job", &memory);
    if (status) return status;
    job->ranks = ranks;
    job->outcomes = memory;
    job->watched = (ms_watched *)(job->outcomes + ranks);
    job->ended = (int *)(job->watched + ranks);
    for (uint32_t r = 0; r < ranks; r++) job->ended[r] = -1;
    return MS_OK;
}

/* Number `name` of the options at 1; 0 if it is absent, which each option of the rendezvous takes
 * as its default. */
double ms_job_option(lua_State *L, const char *name)
{
    lua_getfield(L, 1, name);
    double value = luaL_optnumber(L, -1, 0);
    lua_pop(L, 1);
    return value;
}

/* nil, message: the job could not be started, which is the environment's fault. Lua turns it into
 * the exit code. */
int ms_job_refused(lua_State *L, const ms_job *job)
{
    lua_pushnil(L);
    lua_pushstring(L, job->context.error.message);
    return 2;
}

/* The library has checked the options and given each its value. */
static ms_rendezvous_options read_options(lua_State *L)
{
    return (ms_rendezvous_options){ .ranks = (uint32_t)ms_job_option(L, "ranks"),
                                    .threads = (uint32_t)ms_job_option(L, "threads"),
                                    .heap_bytes = (uint64_t)ms_job_option(L, "memory_bytes"),
                                    .link_bytes_per_second =
                                        (uint64_t)ms_job_option(L, "link_bytes_per_second"),
                                    .link_latency_ns =
                                        (uint64_t)ms_job_option(L, "link_latency_ns"),
                                    .timeout_ns = (uint64_t)ms_job_option(L, "timeout_ns") };
}

/* The job's rendezvous, of which this process is the supervisor. From ms_rendezvous_judge on, ranks
 * that wait too long report that it hangs instead of ending the job: it is called before any rank
 * is started, so that no rank decides by itself. */
static ms_status make_job(lua_State *L, ms_job *job)
{
    ms_rendezvous_options options = read_options(L);
    job->grace_ns = (uint64_t)ms_job_option(L, "grace_ns");
    job->timeout_ns = options.timeout_ns;
    job->stuck_ns = (uint64_t)ms_job_option(L, "stuck_ns");
    lua_getfield(L, 1, "share_gpu");
    job->share_gpu = lua_toboolean(L, -1);
    lua_getfield(L, 1, "near_gpu");
    job->near_gpu = lua_toboolean(L, -1);
    lua_pop(L, 2);
    job->warn = ms_job_warn;
    job->count = (int)lua_tointeger(L, lua_upvalueindex(1));
    job->arguments = lua_touserdata(L, lua_upvalueindex(2));
    ms_status status = ms_rendezvous_new(&job->context, &options, &job->rendezvous);
    if (!status) status = ms_job_make_room(job, options.ranks);
    if (!status) ms_rendezvous_judge(job->rendezvous);
    return status;
}

/* on_start runs before any rank does: what it makes (a dump function, a folder) is there when the
 * first signal comes. */
void ms_job_begin(lua_State *L)
{
    lua_pushvalue(L, 2);
    lua_pushvalue(L, 3);
    lua_pushcclosure(L, flights, 1);
    lua_pushvalue(L, 3);
    lua_pushcclosure(L, folder, 1);
    lua_call(L, 2, 1);
}

/* process.launch({ ranks=, threads=, thread_ranks=, memory_bytes=, link_bytes_per_second=,
 * link_latency_ns=, timeout_ns=, stuck_ns=, grace_ns=, share_gpu=, near_gpu= }, on_start) ->
 * outcome; or nil, message where ranks could not be started. The program's own arguments are
 * upvalues: count, values. on_start(flights, folder) returns what is called for SIGUSR2. Both
 * functions have the job's userdata as their upvalue, so that it lives as long as Lua keeps one of
 * them. */
int ms_launch(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_settop(L, 2);
    ms_job *job = ms_job_new(L);
    lua_getfield(L, 1, "thread_ranks");
    bool threads = lua_toboolean(L, -1);
    if (make_job(L, job)) return ms_job_refused(L, job);
    ms_job_begin(L);
    /* The signals are blocked before the ranks are started: thread ranks inherit the mask, so that
     * the supervisor alone reads them, and process ranks unblock all signals themselves. */
    if (ms_job_open_signals(job)) return ms_job_refused(L, job);
    if (threads ? ms_start_threads(job) : ms_start_processes(job)) return ms_job_refused(L, job);
    ms_job_supervise(L, job, NULL);
    ms_job_push_outcome(L, job);
    return 1;
}
