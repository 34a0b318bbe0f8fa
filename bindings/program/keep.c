/* keep.c: the supervisor of one node of a job over several: its ranks were started by an MPI
 * launcher, so they are not this process' children. */
#include "bindings/program/keep.h"

#include <errno.h>
#include <lauxlib.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/pidfd.h>

#include "bindings/program/launcher.h"
#include "bindings/program/signals.h"
#include "bindings/program/watch.h"

/* What ranks have to leave before the report is written without them. */
#define MS_LEAVE_NS 4000000000u
/* The report is written so long before ranks that stay are killed. A launcher that sees a rank
 * killed cleans up, and some systems end this process then. */
#define MS_EARLIER_NS 2000000000u

/* What Linux says of a process by its pidfd, as linux/pidfd.h of 6.15 has it; the exit status, in
 * the form of waitpid, is there once its parent has read it. */
typedef struct process_info {
    uint64_t mask, control_group;
    uint32_t ids[11];
    int32_t status;
} process_info;
#define PROCESS_INFO_EXIT (UINT64_C(1) << 3)
#define PROCESS_GET_INFO _IOWR(0xFF, 11, process_info)
_Static_assert(sizeof(process_info) == 64, "the first version of this structure");

/* An older Linux does not know the question: false. */
static bool ask_status(int pidfd, int *status)
{
    process_info info = { .mask = PROCESS_INFO_EXIT };
    if (pidfd < 0 || ioctl(pidfd, PROCESS_GET_INFO, &info)) return false;
    if (!(info.mask & PROCESS_INFO_EXIT)) return false;
    *status = info.status;
    return true;
}

/* The exit status of another process' child is the last number of its record in /proc, as long as
 * its parent has not read it; false: it has. */
static bool read_status(const ms_job *job, int64_t process, int *status)
{
    char path[64], text[1024];
    const ms_os *os = job->context.os;
    ms_file *file = NULL;
    int64_t count = 0;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)process);
    if (os->open(os->user, path, MS_FILE_READ, &file) == 0) {
        count = os->read(os->user, file, text, sizeof text - 1, 0);
        os->close(os->user, file);
    }
    text[count > 0 ? count : 0] = '\0';
    const char *end = strrchr(text, ')'), *last = strrchr(text, ' ');
    return end && last && strncmp(end, ") Z ", 4) == 0 && sscanf(last, "%d", status) == 1;
}

/* The launcher, its parent, reads the exit status at some moment. The pidfd tells it after that
 * moment, /proc before: so the pidfd is asked first and last. A rank that has left the job has
 * ended well, also if its launcher kills it then: some do so when the first process has ended with
 * a code. */
static void find_outcome(ms_job *job, uint32_t rank)
{
    ms_outcome *outcome = &job->outcomes[rank];
    ms_rank_state state;
    int status = 0, pidfd = job->ended[rank];
    ms_rendezvous_rank(job->rendezvous, rank, &state);
    outcome->code = -1;
    if (state.finished || state.phase == MS_RANK_LEFT) outcome->code = 0;
    else if (ask_status(pidfd, &status) || read_status(job, outcome->process, &status)
             || ask_status(pidfd, &status)) {
        outcome->signal = status & 0x7f;
        outcome->code = outcome->signal ? 0 : status >> 8 & 0xff;
    }
}

static void kill_rank(ms_job *job, uint32_t rank)
{
    pidfd_send_signal(job->ended[rank], SIGKILL, NULL, 0);
}

static void locate(ms_job *job, uint32_t rank)
{
    pidfd_send_signal(job->ended[rank], MS_LOCATE_PROCESS, NULL, 0);
}

/* A rank that has ended before this is found so at once: its number cannot have another process
 * yet, since it was alive a moment ago when it came to the local socket, and numbers go around
 * slowly. A short script may have come to its end in order. */
static ms_status find_processes(ms_job *job)
{
    for (uint32_t r = 0; r < job->ranks; r++) {
        ms_outcome *outcome = &job->outcomes[r];
        outcome->process = ms_agent_process(job->agent, r);
        outcome->elsewhere = outcome->ended = outcome->process < 0;
        if (outcome->elsewhere) continue;
        job->ended[r] = pidfd_open((pid_t)outcome->process, 0);
        if (job->ended[r] >= 0) {
            ms_status status = ms_job_watch_end(job, r);
            if (status) return status;
            job->running++;
        } else if (errno != ESRCH)
            return ms_fail_os(&job->context, -errno, "a process cannot be supervised (pidfd_open)",
                              NULL);
        else ms_job_rank_ended(job, r);
    }
    return MS_OK;
}

/* Whether the report can be written: the job has ended, and every rank of every node has left it,
 * or has had the time to. Ranks wait for the report before they end: until then their launcher does
 * not clean up. */
static bool can_report(ms_job *job)
{
    ms_abort_record cause;
    ms_rank_state state;
    const ms_os *os = job->context.os;
    if (!ms_rendezvous_cause(job->rendezvous, &cause)) return false;
    if (!job->ending) ms_end_job(job, MS_ABORT_NONE, -1, NULL);
    uint64_t now = os->monotonic_ns(os->user);
    if (!job->deadline_ns || now + MS_EARLIER_NS >= job->deadline_ns) return true;
    for (uint32_t r = 0; r < job->ranks; r++) {
        ms_rendezvous_rank(job->rendezvous, r, &state);
        if (!job->outcomes[r].ended && state.phase != MS_RANK_LEFT && !state.finished) return false;
    }
    return true;
}

/* settle() -> list of the codes with which the ranks have ended; false: not known. The report is
 * written, where there is one. Ranks end; those that do not are killed. Then the agent says
 * goodbye to the others. Upvalue: the job. */
static int settle(lua_State *L)
{
    ms_job *job = lua_touserdata(L, lua_upvalueindex(1));
    ms_abort_record cause;
    if (ms_agent_reports(job->agent)) ms_agent_reported(job->agent);
    else if (ms_rendezvous_cause(job->rendezvous, &cause))
        ms_cluster_await_report(job->rendezvous, MS_LEAVE_NS);
    lua_pushnil(L);
    ms_job_supervise(L, job, NULL);
    ms_agent_finish(job->agent);
    lua_createtable(L, (int)job->ranks, 0);
    for (uint32_t r = 0; r < job->ranks; r++) {
        int code = ms_agent_code(job->agent, r);
        if (code < 0) lua_pushboolean(L, false);
        else lua_pushinteger(L, code);
        lua_rawseti(L, -2, r + 1);
    }
    return 1;
}

/* tell_report(text) -> whether the process that has started the job shows it. Upvalue: the job. */
static int tell_report(lua_State *L)
{
    const ms_job *job = lua_touserdata(L, lua_upvalueindex(1));
    size_t bytes;
    const char *text = luaL_checklstring(L, 1, &bytes);
    lua_pushboolean(L, ms_agent_tell_report(job->agent, text, bytes));
    return 1;
}

int ms_keep(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTABLE);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    lua_settop(L, 2);
    /* The launcher that reads this process' output may end first. */
    signal(SIGPIPE, SIG_IGN);
    ms_job *job = ms_job_new(L);
    job->agent = lua_touserdata(L, lua_upvalueindex(1));
    job->rendezvous = ms_rendezvous_retain(ms_agent_rendezvous(job->agent));
    job->grace_ns = (uint64_t)ms_job_option(L, "grace_ns");
    job->timeout_ns = (uint64_t)ms_job_option(L, "timeout_ns");
    job->stuck_ns = (uint64_t)ms_job_option(L, "stuck_ns");
    job->warn = ms_job_warn;
    job->reap = find_outcome;
    job->kill = kill_rank;
    job->locate = locate;
    if (ms_job_make_room(job, ms_rendezvous_ranks(job->rendezvous))) return ms_job_refused(L, job);
    ms_job_begin(L);
    if (ms_job_open_signals(job) || find_processes(job)) return ms_job_refused(L, job);
    ms_job_supervise(L, job, can_report);
    if (!job->stop_signal) job->stop_signal = ms_agent_stop(job->agent);
    ms_agent_show_end(job->agent);
    ms_job_push_outcome(L, job);
    lua_pushvalue(L, 3);
    lua_pushcclosure(L, settle, 1);
    lua_setfield(L, -2, "settle");
    lua_pushvalue(L, 3);
    lua_pushcclosure(L, tell_report, 1);
    lua_setfield(L, -2, "tell_report");
    return 1;
}
