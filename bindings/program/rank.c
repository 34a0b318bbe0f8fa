/* rank.c: the program in one Lua state: as a whole, as one rank of a job, or as a node's agent. */
#include "bindings/program/rank.h"

#include <lauxlib.h>
#include <lualib.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bindings/program/keep.h"
#include "bindings/program/launcher.h"
#include "bindings/program/locate.h"
#include "bindings/program/prompt.h"
#include "bindings/program/requests.h"
#include "bindings/program/start.h"
#include "bindings/program/terminal.h"
#include "moonshard/moonshard_lua.h"

/* The most that a rank waits for the code of the rank that has failed. */
#define MS_CODE_NS ((uint64_t)1000000000)

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
    ms_locate_coroutines(L);
    ms_locate_open(L, args->rendezvous, args->rank, false);
    ms_requests_join(args->rendezvous);
    return 0;
}

/* Each has upvalue 1: whether this state is a rank's thread, as signals are the supervisor's then;
 * 2: the arguments. */
static void add(lua_State *L, arguments *args, const luaL_Reg *functions)
{
    lua_pushboolean(L, args->is_thread);
    lua_pushlightuserdata(L, args);
    luaL_setfuncs(L, functions, 2);
}

/* Fills moonshard.process, which only the program has; an application has no such module. launch is
 * there only where this process is the whole program: a rank cannot start a job. The C arguments
 * are passed as a light userdata, since they outlive the state. */
static void set_process(lua_State *L, arguments *args, const char *program)
{
    static const luaL_Reg functions[] = {
        { "pause", pause_for }, { "quit", quit }, { "joined", joined }, { NULL, NULL }
    };
    luaL_getsubtable(L, LUA_REGISTRYINDEX, LUA_LOADED_TABLE);
    lua_newtable(L);
    add(L, args, functions);
    add(L, args, ms_request_functions);
    add(L, args, ms_terminal_functions);
    add(L, args, ms_prompt_functions);
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
    ms_requests_leave();
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

int ms_program_of_agent(int count, char **values, ms_agent *agent)
{
    arguments args = { .count = count, .values = values, .agent = agent, .code = 1 };
    return run_program(&args);
}
