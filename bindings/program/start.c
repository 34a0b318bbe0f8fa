/* start.c: starts an MPI launcher for a job over several nodes, passes on requests, and returns the
 * exit code and the report that the job's first agent tells.
 *
 * The launcher has a session of its own: a terminal's Ctrl-C reaches this process alone. It is not
 * asked about the job's end, since it may not come back from a job that has lost a node. At the end
 * it is killed if need be, with whatever it has started here. */
#include "bindings/program/start.h"

#include <errno.h>
#include <fcntl.h>
#include <lauxlib.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bindings/program/signals.h"

#define MS_ARGUMENTS_MOST 512
#define MS_TICK_MS 50
/* For the launcher to end after the job, and for what it still has to print; for the job to end
 * after an order to, or after its launcher. */
#define MS_LAUNCHER_NS ((uint64_t)4 * 1000000000)
#define MS_CODE_NS ((uint64_t)15 * 1000000000)
/* How often the launcher's children are looked at, and how long one of them may have ended. */
#define MS_SEARCH_NS ((uint64_t)500 * 1000000)
#define MS_BROKEN_NS ((uint64_t)2 * 1000000000)

typedef struct start {
    ms_context context;
    int signals; /* descriptor that gives this process' signals */
    ms_starter *starter;
    const char *launcher, *program, *where; /* for messages */
    uint64_t limit_ns;                      /* until then the ranks must have met */
    uint64_t init_ns, grace_ns;
    pid_t process;
    int ended;  /* descriptor, readable when the launcher has ended */
    int status; /* once `gone` */
    bool gone;
    int stop_signal, stops;
    uint64_t grace_limit_ns, code_limit_ns; /* 0: none */
    uint64_t searched_ns, broken_ns;        /* see look_at_start */
    bool is_over;                           /* the job: it has told a code, or is lost */
    int code;
    char why[512];
} start;

static uint64_t now_of(const start *s)
{
    const ms_os *os = s->context.os;
    return os->monotonic_ns(os->user);
}

/* ------------------------------------------------------------- the launcher */

/* Between fork and exec. The launcher ends with this process, and with it, by its own means, what
 * it has started on other nodes. */
static _Noreturn void become_launcher(pid_t parent, char **arguments)
{
    sigset_t none;
    int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(7);
    setsid();
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGTSTP, SIG_DFL);
    signal(SIGPIPE, SIG_DFL);
    if (nothing >= 0) dup2(nothing, STDIN_FILENO);
    execv(arguments[0], arguments);
    _exit(127);
}

static ms_status run_launcher(start *s, char **arguments)
{
    pid_t self = getpid();
    s->process = fork();
    if (s->process == 0) become_launcher(self, arguments);
    if (s->process < 0)
        return ms_fail_os(&s->context, -errno, "a launcher cannot be started", arguments[0]);
    s->ended = pidfd_open(s->process, 0);
    if (s->ended >= 0) return MS_OK;
    return ms_fail_os(&s->context, -errno, "a process cannot be supervised (pidfd_open)", NULL);
}

/* Looks whether the launcher has ended. */
static bool is_gone(start *s)
{
    while (!s->gone) {
        pid_t found = waitpid(s->process, &s->status, WNOHANG);
        if (found == 0) return false;
        if (found < 0 && errno == EINTR) continue;
        s->gone = true;
    }
    return true;
}

/* The parent of a process and its state as ps shows it; 0: there is no such process. */
static pid_t parent_of(const start *s, const char *process, char *state)
{
    char path[64], text[512];
    const ms_os *os = s->context.os;
    ms_file *file = NULL;
    int64_t count = 0;
    int parent = 0;
    snprintf(path, sizeof path, "/proc/%.20s/stat", process);
    if (os->open(os->user, path, MS_FILE_READ, &file) == 0) {
        count = os->read(os->user, file, text, sizeof text - 1, 0);
        os->close(os->user, file);
    }
    text[count > 0 ? count : 0] = '\0';
    const char *end = strrchr(text, ')');
    return end && sscanf(end, ") %c %d", state, &parent) == 2 ? parent : 0;
}

/* The children of a process that are looked for among all processes: those that have ended, or all,
 * which are killed. */
typedef struct search {
    const start *of;
    pid_t parent;
    bool kills;
    uint32_t found;
} search;

static void look_at_process(void *to, const char *name)
{
    search *all = to;
    char state = 0;
    pid_t process = (pid_t)strtol(name, NULL, 10);
    if (process <= 0 || parent_of(all->of, name, &state) != all->parent) return;
    if (all->kills) kill(process, SIGKILL);
    all->found += all->kills || state == 'Z';
}

static uint32_t search_children(const start *s, pid_t parent, bool kills)
{
    const ms_os *os = s->context.os;
    search all = { .of = s, .parent = parent, .kills = kills };
    (void)os->list(os->user, "/proc", look_at_process, &all);
    return all.found;
}

/* The launcher, and all that it has started on this node: the programs by which it reaches other
 * nodes may be of other sessions. What has lost its parent is a child of this process. */
static void kill_all(start *s)
{
    for (int round = 0; round < 400; round++) {
        bool found = search_children(s, getpid(), true) > 0;
        (void)is_gone(s);
        while (waitpid(-1, NULL, WNOHANG) > 0) {}
        if (!found) return;
        poll(NULL, 0, 5);
    }
}

/* Gives the launcher some time to end and to print what it has. */
static void end_launcher(start *s, uint64_t patience_ns)
{
    uint64_t limit = now_of(s) + patience_ns;
    while (!is_gone(s) && now_of(s) < limit) {
        struct pollfd wait = { .fd = s->ended, .events = POLLIN };
        poll(&wait, 1, MS_TICK_MS);
    }
    kill_all(s);
}

/* "has ended with code 1" */
static void describe_end(const start *s, char *text, size_t bytes)
{
    if (WIFSIGNALED(s->status))
        snprintf(text, bytes, "was killed by SIG%s",
                 sigabbrev_np(WTERMSIG(s->status)) ? sigabbrev_np(WTERMSIG(s->status)) : "?");
    else snprintf(text, bytes, "has ended with code %d", WEXITSTATUS(s->status));
}

/* ------------------------------------------------------------------ requests */

/* No rank is there to stop while the launcher is still starting them. After the first request all
 * ranks stop before the same step, after the second at once, and after a third nothing is waited
 * for. */
static void stop_requested(start *s, int number, ms_starter_phase phase)
{
    char text[96];
    if (!s->stop_signal) s->stop_signal = number;
    s->stops++;
    if (phase != MS_STARTER_CONNECTED) {
        kill(s->process, SIGTERM);
        s->code = 128 + s->stop_signal;
    } else if (s->stops == 1) {
        ms_starter_request(s->starter, MS_REQUEST_STOP, (uint8_t)number);
        s->grace_limit_ns = now_of(s) + s->grace_ns;
    } else if (s->stops == 2) {
        snprintf(text, sizeof text, "stopped at once by a second request, SIG%s",
                 sigabbrev_np(number));
        ms_starter_abort(s->starter, text);
        s->grace_limit_ns = 0;
        s->code_limit_ns = now_of(s) + MS_CODE_NS;
    } else s->code = 128 + s->stop_signal;
}

static void read_signals(start *s, ms_starter_phase phase)
{
    struct signalfd_siginfo info;
    while (read(s->signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGUSR1) ms_starter_request(s->starter, MS_REQUEST_SAVE, SIGUSR1);
        else if (info.ssi_signo == SIGUSR2) ms_starter_ask_flights(s->starter);
        else stop_requested(s, (int)info.ssi_signo, phase);
    }
}

/* The ranks have not stopped in time. */
static void look_at_grace(start *s, uint64_t now)
{
    char text[128];
    if (!s->grace_limit_ns || now < s->grace_limit_ns) return;
    snprintf(text, sizeof text, "the ranks did not stop within %.0f s after SIG%s (--grace)",
             (double)s->grace_ns / 1e9, sigabbrev_np(s->stop_signal));
    ms_starter_abort(s->starter, text);
    s->grace_limit_ns = 0;
    s->code_limit_ns = now + MS_CODE_NS;
}

/* ------------------------------------------------------------------- its end */

/* MPICH's launcher does not come back when one of its children cannot reach a node. Those of a job
 * that begins live as long as it does, and Open MPI's reads their ends at once. */
static bool is_broken(start *s, uint64_t now)
{
    if (now - s->searched_ns < MS_SEARCH_NS) return false;
    s->searched_ns = now;
    if (!search_children(s, s->process, false)) s->broken_ns = 0;
    else if (!s->broken_ns) s->broken_ns = now;
    return s->broken_ns && now - s->broken_ns >= MS_BROKEN_NS;
}

/* While the launcher starts the ranks: whether there will be a job. */
static void look_at_start(start *s, uint64_t now)
{
    char how[96] = "has no way to one of the hosts: its program for that has ended";
    if (is_gone(s)) describe_end(s, how, sizeof how);
    else if (now >= s->limit_ns)
        snprintf(how, sizeof how, "has done nothing for %.0f s (--init-timeout)",
                 (double)s->init_ns / 1e9);
    else if (!is_broken(s, now)) return;
    snprintf(s->why, sizeof s->why, "%s %s, before the ranks met; it was to start %.150s on %.200s",
             s->launcher, how, s->program, s->where);
    s->code = 2;
}

/* While the job runs: the code may come a moment after the launcher's end. */
static void look_at_job(start *s, uint64_t now)
{
    char how[64] = "has not ended";
    look_at_grace(s, now);
    if (is_gone(s) && !s->code_limit_ns) s->code_limit_ns = now + MS_CODE_NS;
    if (!s->code_limit_ns || now < s->code_limit_ns) return;
    if (s->gone) describe_end(s, how, sizeof how);
    snprintf(s->why, sizeof s->why, "%s %s, and the job has not told how it has ended", s->launcher,
             how);
    s->code = s->stop_signal ? 128 + s->stop_signal : 7;
}

/* Ranks that end at once may not have heard of the first request, whose signal the code names. */
static int code_of(const start *s, const ms_starter_state *state)
{
    return s->stops > 1 && state->code > 128 ? 128 + s->stop_signal : state->code;
}

/* Until there is a code. */
static void await_code(start *s)
{
    ms_starter_state state;
    for (s->code = -1; s->code < 0;) {
        struct pollfd waits[] = { { .fd = s->signals, .events = POLLIN },
                                  { .fd = s->gone ? -1 : s->ended, .events = POLLIN } };
        poll(waits, 2, MS_TICK_MS);
        ms_starter_look(s->starter, &state);
        read_signals(s, state.phase);
        uint64_t now = now_of(s);
        s->is_over = state.phase == MS_STARTER_TOLD || state.phase == MS_STARTER_LOST;
        if (state.phase == MS_STARTER_TOLD) s->code = code_of(s, &state);
        else if (state.phase == MS_STARTER_LOST) {
            snprintf(s->why, sizeof s->why, "%s", state.why);
            s->code = 7;
        } else if (s->code >= 0) return;
        else if (state.phase == MS_STARTER_WAITS) look_at_start(s, now);
        else look_at_job(s, now);
    }
}

/* -------------------------------------------------------------------- in Lua */

/* The table `arguments` at the options; they stay on Lua's stack. */
static void read_arguments(lua_State *L, char **arguments)
{
    lua_getfield(L, 1, "arguments");
    luaL_checktype(L, -1, LUA_TTABLE);
    luaL_checkstack(L, MS_ARGUMENTS_MOST, "arguments");
    int table = lua_gettop(L);
    lua_Integer count = luaL_len(L, table);
    luaL_argcheck(L, count > 0 && count < MS_ARGUMENTS_MOST, 1, "too many arguments");
    for (lua_Integer i = 1; i <= count; i++) {
        lua_rawgeti(L, table, i);
        arguments[i - 1] = (char *)(uintptr_t)luaL_checkstring(L, -1);
    }
    arguments[count] = NULL;
}

static const char *text_option(lua_State *L, const char *name)
{
    lua_getfield(L, 1, name);
    return luaL_optstring(L, -1, NULL);
}

static uint64_t number_option(lua_State *L, const char *name)
{
    lua_getfield(L, 1, name);
    return (uint64_t)luaL_checknumber(L, -1);
}

/* What strangers at the port have tried, say. */
static void log_line(void *user, ms_log_level level, const char *message)
{
    (void)user;
    if (level >= MS_LOG_WARN) fprintf(stderr, "moonshard: warning: %s\n", message);
}

/* SIGTSTP is ignored: a process that is stopped gives no sign of life, and the job would end.
 * Processes that lose their parent become children of this one: see kill_all. */
static ms_status begin(lua_State *L, start *s, char **arguments)
{
    char value[MS_STARTER_BYTES];
    s->signals = ms_open_signals();
    if (s->signals < 0)
        return ms_fail_os(&s->context, s->signals, "signals cannot be supervised", NULL);
    signal(SIGTSTP, SIG_IGN);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    ms_status status = ms_starter_open(&s->context, text_option(L, "interface"),
                                       number_option(L, "lost_ns"), value, &s->starter);
    if (status) return status;
    setenv(MS_STARTER_VARIABLE, value, 1);
    s->limit_ns = now_of(s) + s->init_ns;
    return run_launcher(s, arguments);
}

/* process.start{ arguments=, launcher=, program=, where=, interface=, init_ns=, lost_ns=, grace_ns=
 * }
 * -> exit code, message, the job's report; or nil, message. arguments: the launcher's path and its
 * arguments; launcher, program, where: for messages. */
int ms_start(lua_State *L)
{
    start s = { .signals = -1, .ended = -1 };
    char *arguments[MS_ARGUMENTS_MOST + 1];
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    ms_context_init(&s.context, NULL);
    s.context.log = log_line;
    s.launcher = text_option(L, "launcher");
    s.program = text_option(L, "program");
    s.where = text_option(L, "where");
    s.init_ns = number_option(L, "init_ns");
    s.grace_ns = number_option(L, "grace_ns");
    read_arguments(L, arguments);
    ms_status status = begin(L, &s, arguments);
    if (!status) {
        await_code(&s);
        end_launcher(&s, s.is_over || s.stops ? MS_LAUNCHER_NS : 0);
    } else if (s.process > 0) kill_all(&s);
    if (status) lua_pushnil(L);
    else lua_pushinteger(L, s.code);
    lua_pushstring(L, status ? s.context.error.message : *s.why ? s.why : NULL);
    lua_pushstring(L, s.starter ? ms_starter_report(s.starter) : "");
    ms_starter_close(s.starter);
    if (s.ended >= 0) close(s.ended);
    if (s.signals >= 0) close(s.signals);
    return 3;
}
