/* module.c: opens the module moonshard.core: makes the state's runtime and lets each part add its
 * functions. */
#include "bindings/module.h"

#include <string.h>

#include "bindings/bucket.h"
#include "bindings/call.h"
#include "bindings/checkpoint.h"
#include "bindings/codec.h"
#include "bindings/convolution.h"
#include "bindings/custom.h"
#include "bindings/dataset.h"
#include "bindings/ddp.h"
#include "bindings/engine.h"
#include "bindings/errors.h"
#include "bindings/fsdp.h"
#include "bindings/gemm_choices.h"
#include "bindings/grad.h"
#include "bindings/group.h"
#include "bindings/initial.h"
#include "bindings/io.h"
#include "bindings/job.h"
#include "bindings/job_join.h"
#include "bindings/json.h"
#include "bindings/layers.h"
#include "bindings/link.h"
#include "bindings/link_state.h"
#include "bindings/machine.h"
#include "bindings/make.h"
#include "bindings/operators.h"
#include "bindings/optim.h"
#include "bindings/runtime.h"
#include "bindings/steps.h"
#include "bindings/safetensors.h"
#include "bindings/script.h"
#include "bindings/stream.h"
#include "bindings/tensor.h"
#include "bindings/tokenizer.h"
#include "bindings/views.h"
#include "moonshard/moonshard_lua.h"

/* ----------------------------------------------------------------- settings */

/* The engine's log goes where the Lua state's warnings go, unless an application has set another
 * place (ms_lua_log): a stock interpreter prints them after warn("@on"). A line of another thread
 * waits until the state's own calls the engine again; one can wait at a time. lua_warning must not
 * be called from another thread, and a message in the waiting place is better than none: a second
 * one that comes meanwhile is lost. */
static void log_as_warning(void *user, ms_log_level level, const char *message)
{
    static const char *const names[] = { "debug: ", "info: ", "warning: ", "" };
    ms_runtime *runtime = user;
    if (!pthread_equal(pthread_self(), runtime->owner)) {
        uint32_t none = 0;
        if (!atomic_compare_exchange_strong(&runtime->waiting_line, &none, 1)) return;
        snprintf(runtime->waiting_text, sizeof runtime->waiting_text, "%s%s", names[level],
                 message);
        atomic_store(&runtime->waiting_line, 2);
        return;
    }
    lua_warning(runtime->main, names[level], 1);
    lua_warning(runtime->main, message, 0);
}

/* These variables mean the same for the program, a stock interpreter and an application. An empty
 * variable counts as unset. The options cpu, strict and group of ms.init override the first three.
 */
static void read_environment(ms_runtime *runtime)
{
    const ms_os *os = runtime->context.os;
    const char *cpu = os->environment(os->user, "MOONSHARD_CPU"),
               *strict = os->environment(os->user, "MOONSHARD_STRICT"),
               *transport = os->environment(os->user, "MOONSHARD_TRANSPORT");
    const char *log = os->environment(os->user, "MOONSHARD_LOG");
    if (cpu && *cpu && strlen(cpu) < sizeof runtime->cpu_text) {
        strcpy(runtime->cpu_text, cpu);
        runtime->settings.cpu = runtime->cpu_text;
    }
    /* A name that is too long is none: cut, it stays one of which the error says so. */
    if (transport)
        snprintf(runtime->transport_text, sizeof runtime->transport_text, "%s", transport);
    runtime->settings.strict = strict && strcmp(strict, "1") == 0;
    runtime->settings.log = log_as_warning;
    runtime->settings.log_user = runtime;
    runtime->settings.log_level = MS_LOG_WARN;
    if (log && strcmp(log, "debug") == 0) runtime->settings.log_level = MS_LOG_DEBUG;
    else if (log && strcmp(log, "info") == 0) runtime->settings.log_level = MS_LOG_INFO;
}

/* ------------------------------------------------------------------ opening */

/* core.set_library(prefix): chunks whose names begin with it are parts of the library. A prefix
 * that is too long counts as none: messages then name lines of the library. */
static int set_library(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    size_t bytes;
    const char *prefix = luaL_checklstring(L, 1, &bytes);
    if (bytes >= sizeof runtime->library_prefix) bytes = 0;
    memcpy(runtime->library_prefix, prefix, bytes);
    runtime->library_prefix_bytes = bytes;
    return 0;
}

/* core.set_library, which belongs to no other part. */
static void open_library(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "set_library", set_library }, { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
}

/* Each adds its functions to the module. A new binding adds a line here. */
static void (*const parts[])(lua_State *L, int runtime) = {
    open_library,       ms_open_steps,      ms_open_engine,      ms_open_machine,
    ms_open_errors,     ms_open_tensor,     ms_open_make,        ms_open_operators,
    ms_open_views,      ms_open_layers,     ms_open_convolution, ms_open_custom,
    ms_open_grad,       ms_open_stream,     ms_open_codec,       ms_open_group,
    ms_open_bucket,     ms_open_link_state, ms_open_link,        ms_open_ddp,
    ms_open_fsdp,       ms_open_job,        ms_open_job_join,    ms_open_optim,
    ms_open_io,         ms_open_json,       ms_open_safetensors, ms_open_dataset,
    ms_open_checkpoint, ms_open_initial,    ms_open_tokenizer,   ms_open_products,
};

/* Pushes the module; the runtime is below it. The parts run in order: tensor methods exist before
 * the files that add to them. The runtime stays reachable as the upvalue of all functions. */
static int open_module(lua_State *L)
{
    ms_lua_open_calls(L);
    ms_runtime *runtime = ms_lua_new_runtime(L);
    int at = lua_gettop(L);
    read_environment(runtime);
    lua_newtable(L);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) parts[i](L, at);
    return 1;
}

/* Pushes the module's table. One Lua state has one runtime, so opening the module again gives the
 * same table. */
MS_API int luaopen_moonshard_core(lua_State *L)
{
    /* The address is the module's registry key, so that opening the module twice returns the
     * same table. */
    static const char key = 0;
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &key) == LUA_TTABLE) return 1;
    lua_pop(L, 1);
    open_module(L);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &key);
    return 1;
}

/* The runtime of a state; it and two other values stay on the stack. The runtime is found by an
 * upvalue and not by a global, so a script cannot replace it. */
static ms_runtime *push_runtime(lua_State *L)
{
    lua_getglobal(L, "require");
    lua_pushliteral(L, "moonshard.core");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "step");
    if (!lua_getupvalue(L, -1, 1)) luaL_error(L, "moonshard.core is not the library's");
    return lua_touserdata(L, -1); /* upvalue 1 of every bound function */
}

/* For applications; the engine reads its log function when it starts. */
MS_API void ms_lua_log(lua_State *L, ms_log_function log, void *user)
{
    ms_runtime *runtime = push_runtime(L);
    if (runtime->engine)
        luaL_error(L, "moonshard: where the log goes is set before the engine starts");
    runtime->settings.log = log;
    runtime->settings.log_user = user;
    lua_pop(L, 3);
}

/* Retains the rendezvous. The rank's activity is counted from here on, also before its engine
 * starts. */
MS_API void ms_lua_join(lua_State *L, ms_rendezvous *rendezvous, uint32_t rank)
{
    ms_runtime *runtime = push_runtime(L);
    if (runtime->engine || runtime->job.rendezvous)
        luaL_error(L, "moonshard: a Lua state becomes a rank once, before its engine starts");
    runtime->job.rendezvous = ms_rendezvous_retain(rendezvous);
    runtime->job.rank = rank;
    runtime->context.activity = ms_rendezvous_activity(rendezvous, rank);
    lua_pop(L, 3);
}

/* All ranks of its job are threads of this process. */
MS_API void ms_lua_is_thread(lua_State *L)
{
    push_runtime(L)->job.is_thread = true;
    lua_pop(L, 3);
}

/* Borrowed: the state has a reference. */
MS_API ms_rendezvous *ms_lua_rendezvous(lua_State *L, uint32_t *rank)
{
    ms_runtime *runtime = push_runtime(L);
    ms_rendezvous *rendezvous = runtime->job.rendezvous;
    if (rank) *rank = runtime->job.rank;
    lua_pop(L, 3);
    return rendezvous;
}

/* Level 0, since it is called from a hook of lua_sethook, where the script's own function is at
 * level 0. */
MS_API void ms_lua_where(lua_State *L, char *text, size_t bytes)
{
    ms_lua_line_at(L, push_runtime(L), 0, text, bytes);
    lua_pop(L, 3);
}
