/* job_join.c: a process of an MPI launcher becomes a rank of a job over several nodes.
 *
 * Each rank forks a process before it joins. That of a node's first rank becomes the agent of the
 * node, and the others end. The agent lives longer than the ranks, so it can report how they ended.
 */
#include "bindings/job_join.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bindings/arguments.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/cluster.h"
#include "moonshard/moonshard_lua.h"

#define MS_ARGUMENTS_MOST 256

/* core.hosts_launched() -> { launcher, rank, size, local_rank, mpi } of the launcher that started
 * this process as one of several; nil if none did. size is nil where only MPI knows it. */
static int launched(lua_State *L)
{
    ms_launched found;
    ms_context *context = &ms_lua_runtime(L)->context;
    if (ms_cluster_launched(context, &found)) return ms_lua_error(L, "%s", context->error.message);
    if (!*found.name) return 0;
    lua_createtable(L, 0, 5);
    lua_pushstring(L, found.name);
    lua_setfield(L, -2, "launcher");
    lua_pushinteger(L, found.rank);
    lua_setfield(L, -2, "rank");
    if (found.size) {
        lua_pushinteger(L, found.size);
        lua_setfield(L, -2, "size");
    }
    lua_pushinteger(L, found.local_rank);
    lua_setfield(L, -2, "local_rank");
    lua_pushboolean(L, found.has_mpi);
    lua_setfield(L, -2, "mpi");
    return 1;
}

/* core.hosts_list(text) -> { { name =, ranks = }, ... } of what `--hosts` was given: a list, or the
 * name of a file; or nil, message. */
static int list_nodes(lua_State *L)
{
    ms_node_list list = { .count = 0 };
    ms_context *context = &ms_lua_runtime(L)->context;
    if (ms_node_list_read(context, luaL_checkstring(L, 1), &list)) {
        lua_pushnil(L);
        lua_pushstring(L, context->error.message);
        return 2;
    }
    lua_createtable(L, (int)list.count, 0);
    for (uint32_t i = 0; i < list.count; i++) {
        lua_createtable(L, 0, 2);
        lua_pushstring(L, list.nodes[i].name);
        lua_setfield(L, -2, "name");
        lua_pushinteger(L, list.nodes[i].ranks);
        lua_setfield(L, -2, "ranks");
        lua_rawseti(L, -2, i + 1);
    }
    ms_node_list_free(context, &list);
    return 1;
}

/* core.hosts_modules() -> the MPIs that have a module, as "openmpi, mpich"; false: none has. */
static int modules(lua_State *L)
{
    ms_lua_push_modules(L);
    return 1;
}

/* ------------------------------------------------------------ the agent's process */

/* What the forked process runs once it is needed. */
typedef struct agent_program {
    char path[4096], number[16];
    char *arguments[MS_ARGUMENTS_MOST + 4]; /* moonshard keep NUMBER, the run's, NULL */
} agent_program;

/* The process that may become this node's agent. It is a session of its own: what its launcher
 * sends to its ranks, or a terminal to a group of processes, does not reach it. It waits for its
 * rank to say that it is needed, and ends if the rank has ended first. Only functions that are safe
 * between fork and exec are called. */
static _Noreturn void become_agent(const agent_program *program, int socket)
{
    char first;
    ssize_t bytes;
    int signals[] = { SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 },
        nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
    setsid();
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++) signal(signals[i], SIG_IGN);
    if (nothing >= 0) dup2(nothing, STDIN_FILENO);
    do bytes = recv(socket, &first, 1, MSG_PEEK);
    while (bytes < 0 && errno == EINTR);
    if (bytes > 0) execv(program->path, program->arguments);
    _exit(bytes > 0 ? 7 : 0);
}

/* Forks that process; the descriptor of this rank's end, or -errno. The number is that of the other
 * end, which the program inherits. It is forked by a child that ends at once, so
 * that the rank is not its parent and does not have to wait for it. */
static int fork_agent(agent_program *program)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends)) return -errno;
    snprintf(program->number, sizeof program->number, "%d", ends[1]);
    pid_t process = fork();
    if (process == 0) {
        close(ends[0]);
        pid_t second = fork();
        if (second == 0) become_agent(program, ends[1]);
        _exit(second < 0);
    }
    int error = process < 0 ? -errno : 0, status = 0;
    while (!error && waitpid(process, &status, 0) < 0 && errno == EINTR) {}
    if (!error && status) error = -EAGAIN;
    close(ends[1]);
    if (error) close(ends[0]);
    return error ? error : ends[0];
}

/* The table `arguments` at the options becomes those of the program. They are read by the child, so
 * they stay on Lua's stack until it has been forked. */
static void read_program(lua_State *L, agent_program *program)
{
    static char name[] = "moonshard", keep[] = "keep";
    int count = 0;
    memset(program, 0, sizeof *program);
    lua_getfield(L, 1, "program");
    snprintf(program->path, sizeof program->path, "%s", luaL_checkstring(L, -1));
    program->arguments[count++] = name;
    program->arguments[count++] = keep;
    program->arguments[count++] = program->number;
    lua_getfield(L, 1, "arguments");
    luaL_checktype(L, -1, LUA_TTABLE);
    luaL_checkstack(L, MS_ARGUMENTS_MOST, "arguments");
    int table = lua_gettop(L);
    for (lua_Integer i = 1; i <= luaL_len(L, table) && i < MS_ARGUMENTS_MOST; i++) {
        lua_rawgeti(L, table, i);
        program->arguments[count++] = (char *)(uintptr_t)luaL_checkstring(L, -1);
    }
}

/* -------------------------------------------------------------------------- joining */

/* A text of the options at 1, or NULL; on the stack until the function returns. */
static const char *text_option(lua_State *L, const char *name)
{
    lua_getfield(L, 1, name);
    return luaL_optstring(L, -1, NULL);
}

/* Modules for MPIs are in the folder of the library that this code is in, or beside the engine's.
 */
static void find_modules(char *folder, size_t bytes)
{
    Dl_info info;
    const char *path = dladdr((void *)(uintptr_t)ms_cluster_join, &info) ? info.dli_fname : NULL;
    const char *slash = path ? strrchr(path, '/') : NULL;
    snprintf(folder, bytes, "%.*s", slash ? (int)(slash - path) : 1, slash ? path : ".");
}

/* Whether they can be loaded is seen when one is needed. */
void ms_lua_push_modules(lua_State *L)
{
    static const char *const names[] = { "openmpi", "mpich" };
    const ms_os *os = ms_os_posix();
    char folder[4096], path[4096 + 64], found[64] = "";
    ms_file_info info;
    find_modules(folder, sizeof folder);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        size_t used = strlen(found);
        snprintf(path, sizeof path, "%s/libmoonshard_mpi_%s.so", folder, names[i]);
        if (os->info(os->user, path, &info) == 0)
            snprintf(found + used, sizeof found - used, "%s%s", used ? ", " : "", names[i]);
    }
    if (*found) lua_pushstring(L, found);
    else lua_pushboolean(L, false);
}

static uint64_t number_option(lua_State *L, const char *name)
{
    return (uint64_t)ms_lua_field_integer(L, 1, name, 0, 0, INT64_MAX);
}

/* The options are at 1. An error of their function is not one of the job. */
static void report(void *user, const char *message)
{
    lua_State *L = user;
    lua_getfield(L, 1, "report");
    lua_pushstring(L, message);
    if (lua_pcall(L, 1, 0, 0)) lua_pop(L, 1);
}

static bool has_report(lua_State *L)
{
    bool yes = lua_getfield(L, 1, "report") == LUA_TFUNCTION;
    lua_pop(L, 1);
    return yes;
}

/* What the script's options say. */
static ms_cluster_options read_options(lua_State *L, const char *modules, int agent)
{
    return (ms_cluster_options){
        .rendezvous = { .threads = (uint32_t)number_option(L, "threads"),
                        .heap_bytes = number_option(L, "memory_bytes"),
                        .link_bytes_per_second = number_option(L, "link_bytes_per_second"),
                        .link_latency_ns = number_option(L, "link_latency_ns"),
                        .timeout_ns = number_option(L, "timeout_ns"),
                        .sum_by_ranks = ms_lua_field_boolean(L, 1, "sum_by_ranks", false) },
        .modules = modules,
        .mpi = getenv("MOONSHARD_MPI"),
        .agree = text_option(L, "agree"),
        .refused = text_option(L, "refused"),
        .interface = text_option(L, "interface"),
        .port = (uint16_t)ms_lua_field_integer(L, 1, "port", 0, 0, 65535),
        .init_ns = number_option(L, "init_ns"),
        .lost_ns = number_option(L, "lost_ns"),
        .report = has_report(L) ? report : NULL,
        .user = L,
        .agent = agent
    };
}

/* The node of each rank. */
static void push_names(lua_State *L, const ms_agent_options *plan)
{
    lua_createtable(L, (int)plan->rendezvous.ranks, 0);
    for (uint32_t r = 0; r < plan->rendezvous.ranks; r++) {
        lua_pushstring(L, plan->names[plan->node_of[r]]);
        lua_rawseti(L, -2, (lua_Integer)r + 1);
    }
}

static void push_place(lua_State *L, const ms_cluster_place *place)
{
    const struct {
        const char *name, *text;
    } texts[] = { { "mpi", place->mpi }, { "library", place->library }, { "host", place->node } };
    const struct {
        const char *name;
        uint32_t number;
    } numbers[] = { { "rank", place->rank }, { "ranks", place->ranks }, { "hosts", place->nodes } };
    lua_createtable(L, 0, 8);
    for (int i = 0; i < 3; i++) {
        lua_pushstring(L, texts[i].text);
        lua_setfield(L, -2, texts[i].name);
        lua_pushinteger(L, numbers[i].number);
        lua_setfield(L, -2, numbers[i].name);
    }
    push_names(L, &place->plan);
    lua_setfield(L, -2, "names");
    if (place->nodes == 1) return;
    const ms_endpoint *endpoint = &place->plan.endpoint;
    lua_pushfstring(L, "%s port %d (%s)", endpoint->addresses[0], (int)endpoint->port,
                    endpoint->interface);
    lua_setfield(L, -2, "meeting");
}

/* -------------------------------------------------------------------------- leaving */

/* The exit code of a job that has ended for this reason: see recipes/launch/README.md. */
static int code_of(ms_abort_reason reason)
{
    switch (reason) {
    case MS_ABORT_MISMATCH:
    case MS_ABORT_LEFT: return 5;
    case MS_ABORT_TIMEOUT: return 6;
    case MS_ABORT_DIED: return 7;
    case MS_ABORT_STOPPED: return 128 + SIGTERM;
    default: return 1;
    }
}

/* The state of a rank in an application closes, and its engine is gone: waits for the others.
 * Where the job has ended with an error: once the report is written, so does the process, at once
 * and with the job's code. MPI may never come back, and must not be asked to. */
static void leave_job(ms_runtime *runtime)
{
    ms_abort_record cause;
    ms_cluster_await_others(runtime->job.rendezvous);
    if (!ms_rendezvous_cause(runtime->job.rendezvous, &cause)) return;
    int code = code_of(cause.reason);
    /* Launchers send these when the first process has ended. */
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    ms_cluster_set_code(runtime->job.rendezvous, runtime->job.rank, code);
    ms_cluster_await_report(runtime->job.rendezvous, MS_REPORT_NS);
    fflush(NULL);
    _exit(code);
}

/* Agents ask ranks by SIGUSR2 where their script is. The program has a handler; in an application
 * without one the signal would end the process. */
static void ignore_question(void)
{
    struct sigaction now;
    if (sigaction(SIGUSR2, NULL, &now) == 0 && now.sa_handler == SIG_DFL) signal(SIGUSR2, SIG_IGN);
}

/* core.hosts_join{ program=, arguments=, agree=, refused=, interface=, port=, init_ns=, lost_ns=,
 * report=, threads=, memory_bytes=, link_bytes_per_second=, link_latency_ns=, timeout_ns=,
 * sum_by_ranks= } -> { rank, ranks, hosts, host, mpi, library, names, meeting }; or nil, message,
 * is_told where it failed (is_told: it was reported, or another process does it; report(message)
 * shows it). names: of the nodes, by rank; meeting: where their agents meet, if there are several.
 * Blocks until the processes of all nodes have met. program: the path of the `moonshard` program,
 * which is the agent of this node with the command "keep" and the arguments. This process becomes
 * a rank, before its engine starts. The context lives as long as the state.
 * leaves=true: the process is not the program's, see leave_job. */
static int join(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_cluster_place place;
    agent_program program;
    char modules[4096];
    luaL_checktype(L, 1, LUA_TTABLE);
    lua_settop(L, 1);
    read_program(L, &program);
    find_modules(modules, sizeof modules);
    ms_cluster_options options = read_options(L, modules, -1);
    runtime->context.log = runtime->settings.log;
    runtime->context.log_user = runtime->settings.log_user;
    options.agent = fork_agent(&program);
    ms_status status = options.agent < 0
                           ? ms_fail_os(&runtime->context, options.agent,
                                        "a process for the keeper cannot be started", NULL)
                           : ms_cluster_join(&runtime->context, &options, &place);
    if (status) {
        lua_pushnil(L);
        lua_pushstring(L, runtime->context.error.message);
        lua_pushboolean(L, options.agent >= 0 && place.is_told);
        return 3;
    }
    ms_lua_join(L, place.rendezvous, place.rank);
    ms_rendezvous_release(place.rendezvous);
    if (ms_lua_field_boolean(L, 1, "leaves", false)) {
        runtime->job.leave = leave_job;
        ignore_question();
    }
    push_place(L, &place);
    return 1;
}

/* core.hosts_quit(code): the end of a process that could not join: MPI may still use its memory. */
static int quit(lua_State *L)
{
    int code = (int)luaL_checkinteger(L, 1);
    fflush(NULL);
    _exit(code);
}

/* core.hosts_program() -> path of the program `moonshard`: MOONSHARD_PROGRAM, or where it is
 * installed with this library; and whether there is such a file. */
static int push_program(lua_State *L)
{
    const ms_os *os = ms_os_posix();
    const char *wish = getenv("MOONSHARD_PROGRAM");
    char folder[4096], path[4096 + 256];
    ms_file_info info;
    find_modules(folder, sizeof folder);
    if (wish && *wish) snprintf(path, sizeof path, "%s", wish);
    else snprintf(path, sizeof path, "%s/%s/moonshard", folder, MS_BIN_FROM_LIBRARY);
    lua_pushstring(L, path);
    lua_pushboolean(L, os->info(os->user, path, &info) == 0 && !info.is_directory);
    return 2;
}

/* What lua/moonshard/parallel/mpi.lua and lua/moonshard/cli/{hosts,start}.lua use. */
void ms_open_job_join(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "hosts_launched", launched },
                                          { "hosts_join", join },
                                          { "hosts_list", list_nodes },
                                          { "hosts_modules", modules },
                                          { "hosts_program", push_program },
                                          { "hosts_quit", quit },
                                          { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
}
