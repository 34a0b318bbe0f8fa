/* main.c: the command line: a Lua state, the library beside this program, and moonshard.cli; as a
 * whole, or as one rank of a job. */
#include "bindings/program/main.h"

#include <lauxlib.h>
#include <lualib.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "bindings/adopt.h"
#include "bindings/program/keep.h"
#include "bindings/program/launcher.h"
#include "bindings/program/locate.h"
#include "bindings/program/start.h"
#include "moonshard/moonshard_lua.h"

/* The most that a rank waits for the code of the rank that has failed. */
#define MS_CODE_NS ((uint64_t)1000000000)

/* Requests to stop. Handlers only count; the loop of training looks at the end of a step. A second
 * request ends the process at once, unless it is a rank: the supervisor, which gets the same
 * signals from a terminal, decides then. They belong to the process: in a thread that is a rank
 * they are not read, because the supervisor of the same process handles the signals. */
static volatile sig_atomic_t stop_signal, save_signal, is_rank;

/* The job of a process that joined it under an MPI launcher: requests of every such process are
 * requests to all. NULL: it is no such process. */
static ms_rendezvous *volatile joined_job;

/* Of a process without a supervisor: the timer that a request starts, how long it runs (--grace),
 * and what is shown when it ends the process. A script may never come to the end of a step. */
#define MS_GRACE_SECONDS 60
static timer_t grace_timer;
static struct itimerspec grace;
static char grace_text[128];
static volatile sig_atomic_t has_timer;

/* A handler: the script has had its time. */
static void end_at_once(int number)
{
    (void)number;
    if (write(STDERR_FILENO, grace_text, strlen(grace_text)) < 0) _exit(128 + stop_signal);
    _exit(128 + stop_signal);
}

/* A handler: it only sets a number, and starts the timer. _exit is safe there. The first signal
 * stays: the exit code 128 + signal says what has stopped the run. */
static void request_stop(int number)
{
    if (stop_signal && !is_rank) _exit(128 + number);
    if (stop_signal) return;
    stop_signal = number;
    if (has_timer) timer_settime(grace_timer, 0, &grace, NULL);
}

/* Without a timer, which the system refuses when it lacks memory, a second signal ends the
 * process. */
static void make_timer(double seconds)
{
    struct sigaction action = { .sa_handler = end_at_once };
    struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM };
    sigemptyset(&action.sa_mask);
    if (has_timer || timer_create(CLOCK_MONOTONIC, &event, &grace_timer)) return;
    if (seconds > 1e9) seconds = 1e9;
    grace.it_value.tv_sec = (time_t)seconds;
    grace.it_value.tv_nsec = (long)((seconds - (double)grace.it_value.tv_sec) * 1e9);
    /* All zeros would stop the timer. */
    if (grace.it_value.tv_sec == 0 && grace.it_value.tv_nsec == 0) grace.it_value.tv_nsec = 1;
    snprintf(grace_text, sizeof grace_text,
             "moonshard: the run did not stop within %.6g s after a request to stop (--grace)\n",
             seconds);
    sigaction(SIGALRM, &action, NULL);
    has_timer = 1;
}

/* The same in a process that has joined a job over several nodes: the agents agree on the step. A
 * second signal of the same process ends the job at once; launchers send one when they clean up
 * after a job that has ended, and then nothing changes. */
static void request_for_all(int number)
{
    ms_abort_record cause;
    ms_rendezvous *job = joined_job;
    if (number == SIGUSR1) ms_rendezvous_request(job, MS_REQUEST_SAVE, SIGUSR1);
    else if (stop_signal) {
        if (!ms_rendezvous_cause(job, &cause))
            ms_rendezvous_abort(job, MS_ABORT_STOPPED, -1, "stopped at once by a second request");
    } else {
        stop_signal = number;
        ms_rendezvous_request(job, MS_REQUEST_STOP, (uint8_t)number);
    }
}

/* A handler for SIGUSR1: the training loop asks save_requested at the end of each step. */
static void request_save(int number) { save_signal = number; }

/* save_requested() -> whether SIGUSR1 came since the last call. Asking clears it, so that one
 * signal gives one checkpoint. Upvalue 1: whether this state is a rank's thread. */
static int save_requested(lua_State *L)
{
    bool thread = lua_toboolean(L, lua_upvalueindex(1));
    lua_pushboolean(L, !thread && save_signal != 0);
    if (!thread) save_signal = 0;
    return 1;
}

/* stop_requested() -> number of the signal, or nil. It is not cleared: every loop of the script,
 * also a nested one, sees the request. */
static int stop_requested(lua_State *L)
{
    if (!stop_signal || lua_toboolean(L, lua_upvalueindex(1))) {
        lua_pushnil(L);
        return 1;
    }
    lua_pushinteger(L, stop_signal);
    return 1;
}

/* SA_RESTART: calls that a signal interrupts go on, since the loop looks at the request by itself.
 * A rank leaves SIGUSR1 and SIGUSR2 alone: the supervisor reads the first, and the second asks the
 * rank where its script is. SIGPIPE is ignored everywhere, so that output into a closed pipe is an
 * error of the write and not the end of a run. */
static void catch_signals(void)
{
    struct sigaction action = { .sa_handler = joined_job ? request_for_all : request_stop,
                                .sa_flags = SA_RESTART };
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGHUP, &action, NULL);
    if (joined_job) sigaction(SIGUSR1, &action, NULL);
    if (!is_rank) {
        action.sa_handler = request_save;
        sigaction(SIGUSR1, &action, NULL);
        signal(SIGUSR2, SIG_IGN); /* flight records: there are none without other ranks */
    }
    signal(SIGPIPE, SIG_IGN);
}

/* watch_signals(grace): from now on SIGINT, SIGTERM, SIGHUP and SIGUSR1 are requests; before, and
 * in commands that never look, they end the process. `moonshard run` calls it. In a thread that is
 * a rank it does nothing, as the supervisor has the signals. grace: so many seconds after a request
 * to stop the process is ended, where no supervisor does so. */
static int watch_signals(lua_State *L)
{
    if (lua_toboolean(L, lua_upvalueindex(1))) return 0;
    if (!is_rank && !joined_job) make_timer(luaL_optnumber(L, 1, MS_GRACE_SECONDS));
    catch_signals();
    return 0;
}

/* is_terminal() -> whether stdout and stderr are a terminal. Both are asked, since the line that
 * rank 0 redraws in place and the messages that clear it go to different ones. */
static int is_terminal(lua_State *L)
{
    lua_pushboolean(L, isatty(STDOUT_FILENO) && isatty(STDERR_FILENO));
    return 1;
}

/* columns() -> the present width of the terminal; 80 if it is not known. Asked before each redraw,
 * because the window may change its size. A pipe has no width. */
static int columns(lua_State *L)
{
    struct winsize size = { 0 };
    lua_pushinteger(L, ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col
                                                                                       : 80);
    return 1;
}

/* pause(ms): waits so long, or until a signal is handled. For commands that look at files again. */
static int pause_for(lua_State *L)
{
    poll(NULL, 0, (int)luaL_checkinteger(L, 1));
    return 0;
}

/* quit(code): ends the process at once, also with threads that do not return. It is for the end of
 * a job in which a thread rank does not leave: exit() would run destructors under threads that
 * still work. Buffered output is written first, which _exit would lose. */
static int quit(lua_State *L)
{
    fflush(NULL);
    _exit((int)luaL_checkinteger(L, 1));
}

/* What run and the callbacks of one Lua state need; on the stack of ms_program, which outlives the
 * state. `warning` collects the pieces of one warning, `warned` is how much of it is filled. */
typedef struct arguments {
    int count;
    char **values;
    ms_rendezvous *rendezvous;
    uint32_t rank;
    bool is_thread;
    bool has_joined; /* the rendezvous is a reference of this record */
    ms_agent *agent;
    int code;
    size_t warned;
    char warning[4096];
} arguments;

/* The sequence returns to the line's beginning and erases it. */
const char *ms_fresh_row(void)
{
    return isatty(STDOUT_FILENO) && isatty(STDERR_FILENO) ? "\r\033[K" : "";
}

/* Adds text to the warning that is being collected; what does not fit is left out. Two bytes are
 * kept back for the line's end. */
static void add_text(arguments *args, const char *text)
{
    size_t room = sizeof args->warning - 2 - args->warned, bytes = strlen(text);
    if (bytes > room) bytes = room;
    memcpy(args->warning + args->warned, text, bytes);
    args->warned += bytes;
}

/* Errors in finalizers and what scripts say with warn(): a line with the rank, written in one piece
 * when its last part has come, so that ranks do not write into each other's lines. */
static void warning(void *user, const char *message, int more)
{
    arguments *args = user;
    if (args->warned == 0) {
        char head[48];
        if (!more && *message == '@') return; /* a control message */
        snprintf(head, sizeof head, "%smoonshard: rank %u: ", ms_fresh_row(), args->rank);
        add_text(args, head);
    }
    add_text(args, message);
    if (more) return;
    args->warning[args->warned++] = '\n';
    fwrite(args->warning, 1, args->warned, stderr);
    args->warned = 0;
}

/* The engine's log, in one piece. Any thread of the engine may call it, so it uses no Lua and a
 * buffer of its own, which is longer than any message of the engine with its head. */
static void log_line(void *user, ms_log_level level, const char *message)
{
    static const char *const names[] = { "debug: ", "info: ", "warning: ", "" };
    const arguments *args = user;
    char line[MS_ERROR_MESSAGE_BYTES + 64];
    int bytes = snprintf(line, sizeof line, "%smoonshard: rank %u: %s%s\n", ms_fresh_row(),
                         args->rank, names[level], message);
    fwrite(line, 1, (size_t)bytes, stderr);
}

/* The message handler of the whole program: the error as text with the stack's traceback.
 * luaL_tolstring also serves error objects that are tables with a __tostring. */
static int traceback(lua_State *L)
{
    const char *message = luaL_tolstring(L, 1, NULL);
    luaL_traceback(L, L, message, 1);
    return 1;
}

/* joined(): core.hosts_join has made this process a rank. From now on it is one for signals and
 * messages, too. Upvalue 2: the arguments. */
static int joined(lua_State *L)
{
    arguments *args = lua_touserdata(L, lua_upvalueindex(2));
    args->rendezvous = ms_rendezvous_retain(ms_lua_rendezvous(L, &args->rank));
    args->has_joined = true;
    joined_job = args->rendezvous;
    is_rank = 1;
    ms_locate_coroutines(L);
    ms_locate_open(L, args->rendezvous, args->rank, false);
    catch_signals();
    return 0;
}

/* Fills moonshard.process, which only the program has; a node has no such module. launch is there
 * only where this process is the whole program: a rank cannot start a job. The C arguments are
 * passed as a light userdata, since they outlive the state. */
static void set_process(lua_State *L, arguments *args, const char *program)
{
    /* Each has upvalue 1: whether this state is a rank's thread; 2: the arguments. */
    static const luaL_Reg functions[] = { { "stop_requested", stop_requested },
                                          { "save_requested", save_requested },
                                          { "watch_signals", watch_signals },
                                          { "is_terminal", is_terminal },
                                          { "columns", columns },
                                          { "pause", pause_for },
                                          { "quit", quit },
                                          { "joined", joined },
                                          { NULL, NULL } };
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_newtable(L);
    /* In a thread that is a rank, signals are the supervisor's. */
    lua_pushboolean(L, args->is_thread);
    lua_pushlightuserdata(L, args);
    luaL_setfuncs(L, functions, 2);
    lua_pushstring(L, program);
    lua_setfield(L, -2, "program");
    lua_pushboolean(L, geteuid() == 0);
    lua_setfield(L, -2, "is_root");
    if (args->rendezvous) {
        lua_pushinteger(L, args->rank);
        lua_setfield(L, -2, "rank");
        lua_pushboolean(L, args->is_thread);
        lua_setfield(L, -2, "is_thread");
    } else if (args->agent) {
        lua_pushlightuserdata(L, args->agent);
        lua_pushcclosure(L, ms_keep, 1);
        lua_setfield(L, -2, "launch");
        lua_pushinteger(L, ms_rendezvous_ranks(ms_agent_rendezvous(args->agent)));
        lua_setfield(L, -2, "kept_ranks");
    } else {
        lua_pushinteger(L, args->count);
        lua_pushlightuserdata(L, args->values);
        lua_pushcclosure(L, ms_launch, 2);
        lua_setfield(L, -2, "launch");
        lua_pushcfunction(L, ms_start);
        lua_setfield(L, -2, "start");
    }
    lua_setfield(L, -2, "moonshard.process");
    lua_pop(L, 1);
}

/* Runs protected. The library is found beside this program, whatever the current folder is.
 * Coroutine functions are replaced before any script runs, since a script may keep the originals in
 * locals. The log goes to log_line before the engine can start. A rank joins before its first use
 * of the engine, because the rendezvous decides about threads and memory. */
static int run(lua_State *L)
{
    arguments *args = lua_touserdata(L, 1);
    char program[4096], library[4096 + 256];
    ssize_t bytes = readlink("/proc/self/exe", program, sizeof program - 1);
    if (bytes <= 0) return luaL_error(L, "the path of this program cannot be read from /proc");
    program[bytes] = 0;
    strcpy(library, program);
    /* A path from /proc is absolute, so there is a slash. */
    char *slash = strrchr(library, '/');
    snprintf(slash + 1, 200, "%s", MS_LUA_FROM_BIN);
    luaL_openlibs(L);
    if (args->rendezvous) ms_locate_coroutines(L);
    ms_lua_open(L, library);
    ms_lua_log(L, log_line, args);
    if (args->rendezvous) ms_lua_join(L, args->rendezvous, args->rank);
    if (args->is_thread) ms_lua_is_thread(L);
    set_process(L, args, program);
    lua_getglobal(L, "require");
    lua_pushliteral(L, "moonshard.cli");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "main");
    lua_createtable(L, args->count, 0);
    for (int i = 1; i < args->count; i++) {
        lua_pushstring(L, args->values[i]);
        lua_rawseti(L, -2, i);
    }
    lua_call(L, 1, 1);
    args->code = (int)lua_tointeger(L, -1);
    return 0;
}

/* A rank of a job over several nodes ends. After the job's end it waits until the report is
 * written, since launchers clean up when the first process has ended. All ranks end with one code.
 * Then it ends at once: MPI may never come back, and must not be asked to. Where a process that
 * waits for the job hears its code from the agent, ranks that end in order end with 0: of another
 * code launchers print a page, and some kill the other ranks. */
static _Noreturn void leave_job(ms_rendezvous *job, uint32_t rank, int code)
{
    ms_abort_record cause;
    joined_job = NULL;
    ms_cluster_set_code(job, rank, code);
    signal(SIGTERM, SIG_IGN);
    bool ended = ms_rendezvous_cause(job, &cause);
    if (ended) {
        ms_cluster_await_report(job, MS_REPORT_NS);
        code = ms_cluster_code(job, rank, code, MS_CODE_NS);
    } else ms_rendezvous_release(job);
    fflush(NULL);
    _exit(!ended && getenv(MS_STARTER_VARIABLE) ? 0 : code);
}

/* An error of a rank is written into the job too, so that the other ranks end with it. The rank
 * answers the signal while lua_close runs finalizers, too. 8 is the exit code where memory ran out.
 * Lua's collector runs in generational mode: a step makes many tensor handles that die young. */
static int run_program(arguments *args)
{
    ms_rendezvous *rendezvous = args->rendezvous;
    lua_State *L = luaL_newstate();
    if (!L) {
        fprintf(stderr, "moonshard: no memory for a Lua state\n");
        if (rendezvous)
            ms_rendezvous_abort(rendezvous, MS_ABORT_RAISED, (int32_t)args->rank,
                                "no memory for a Lua state");
        return 8;
    }
    /* Before anything else, so that warnings of the libraries' own opening are lines, too. */
    lua_setwarnf(L, warning, args);
    lua_gc(L, LUA_GCGEN, 0, 0);
    lua_pushcfunction(L, traceback);
    lua_pushcfunction(L, run);
    lua_pushlightuserdata(L, args);
    if (rendezvous) ms_locate_open(L, rendezvous, args->rank, args->is_thread);
    if (lua_pcall(L, 1, 0, 1)) {
        fprintf(stderr, "moonshard: %s\n", lua_tostring(L, -1));
        if (args->rendezvous)
            ms_rendezvous_abort(args->rendezvous, MS_ABORT_RAISED, (int32_t)args->rank,
                                lua_tostring(L, -1));
    }
    lua_close(L);
    ms_locate_close();
    return args->code;
}

int ms_program(int count, char **values, ms_rendezvous *rendezvous, uint32_t rank, bool is_thread)
{
    arguments args = { .count = count,
                       .values = values,
                       .rendezvous = rendezvous,
                       .rank = rank,
                       .is_thread = is_thread,
                       .code = 1 };
    int code = run_program(&args);
    if (args.has_joined) leave_job(args.rendezvous, args.rank, code);
    return code;
}

/* What an agent logs, in one piece, from any of its threads: who was turned away at its port. */
static void agent_line(void *user, ms_log_level level, const char *message)
{
    char line[MS_ERROR_MESSAGE_BYTES + 64];
    (void)user;
    (void)level;
    int bytes = snprintf(line, sizeof line, "moonshard: %s\n", message);
    fwrite(line, 1, (size_t)bytes, stderr);
}

/* moonshard keep NUMBER ARGUMENTS: the process that a rank has forked, once it is needed. Its ranks
 * hear of an error from their launcher's first process, so it says nothing itself. */
static int keep(int count, char **values)
{
    ms_context context;
    ms_agent *agent = NULL;
    ms_context_init(&context, NULL);
    context.log = agent_line;
    char *end = NULL;
    long descriptor = strtol(values[2], &end, 10);
    if (*end || descriptor < 3 || descriptor > 1 << 20) return 2;
    if (ms_agent_serve(&context, (int)descriptor, &agent)) return 1;
    if (!agent) return 0;
    values[2] = values[0];
    arguments args = { .count = count - 2, .values = values + 2, .agent = agent, .code = 1 };
    int code = run_program(&args);
    ms_agent_tell_code(agent, code);
    ms_agent_close(agent);
    return code;
}

/* A process whose environment names a job is a rank of it. The program, stock interpreters and
 * nodes read the same two variables (ms_lua_adopt). A rank removes them from its environment only
 * after it has adopted the files. */
int main(int argc, char **argv)
{
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    uint32_t rank = 0;
    ms_context_init(&context, NULL);
    if (ms_lua_adopt(&context, &rendezvous, &rank)) {
        fprintf(stderr, "moonshard: %s\n", context.error.message);
        return 1;
    }
    if (rendezvous) {
        /* A process that this one starts is not a rank. */
        unsetenv(MS_RENDEZVOUS_VARIABLE);
        unsetenv("MOONSHARD_RANK");
        is_rank = 1;
    }
    if (argc > 3 && strcmp(argv[1], "keep") == 0) return keep(argc, argv);
    int code = ms_program(argc, argv, rendezvous, rank, false);
    ms_rendezvous_release(rendezvous);
    return code;
}
