/* runtime.c: the runtime of one Lua state: its engine, its tensor handles, and the fixed points at
 * which memory comes back. */
#include "bindings/runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moonshard/hook.h"
#include "moonshard/moonshard_lua.h"

/* ----------------------------------------------------------------- entering */

ms_runtime *ms_lua_runtime(lua_State *L)
{
    ms_runtime *runtime = lua_touserdata(L, lua_upvalueindex(1));
    if (!pthread_equal(runtime->owner, pthread_self()))
        luaL_error(L, "moonshard was called from another thread than the one that opened it: one "
                      "Lua state belongs to one thread");
    if (runtime->closed) luaL_error(L, "moonshard was closed with its Lua state");
    return runtime;
}

static bool is_library(const ms_runtime *runtime, const char *source)
{
    return strncmp(source, runtime->library_prefix, runtime->library_prefix_bytes) == 0;
}

/* Frames of the library in a row: modules in modules; Lua allows 200 calls through C. */
#define LIBRARY_DEEPEST 256

/* The first Lua frame outside the library; else the first Lua frame. */
static bool user_frame(lua_State *L, const ms_runtime *runtime, int first, lua_Debug *out)
{
    lua_Debug frame;
    bool found = false;
    for (int level = first; level < LIBRARY_DEEPEST && lua_getstack(L, level, &frame); level++) {
        lua_getinfo(L, "Sl", &frame);
        if (frame.currentline <= 0) continue;
        bool library = runtime->library_prefix_bytes && is_library(runtime, frame.source);
        if (!library) {
            *out = frame;
            return true;
        }
        if (!found) {
            *out = frame;
            found = true;
        }
    }
    return found;
}

void ms_lua_line(lua_State *L, char *text, size_t bytes)
{
    lua_Debug frame;
    text[0] = 0;
    if (user_frame(L, ms_lua_runtime(L), 1, &frame))
        snprintf(text, bytes, "%s:%d", frame.short_src, frame.currentline);
}

/* The rendezvous that the launcher left in the environment of a rank's process. */
static ms_status adopt_rendezvous(ms_runtime *runtime)
{
    const ms_os *os = runtime->context.os;
    const char *text = os->environment(os->user, MS_RENDEZVOUS_VARIABLE),
               *rank = os->environment(os->user, "MOONSHARD_RANK");
    if (runtime->rendezvous || !text || !*text) return MS_OK;
    char *end = NULL;
    long number = rank && *rank ? strtol(rank, &end, 10) : -1;
    if (number < 0 || *end)
        return ms_fail(&runtime->context, MS_ERROR_ARGUMENT,
                       "MOONSHARD_RANK must be the number of this rank, not '%s'",
                       rank ? rank : "");
    ms_status status = ms_rendezvous_adopt(&runtime->context, text, &runtime->rendezvous);
    if (!status) runtime->rank = (uint32_t)number;
    return status;
}

static void start_engine(lua_State *L, ms_runtime *runtime)
{
    if (adopt_rendezvous(runtime))
        luaL_error(L, "moonshard could not start: %s", runtime->context.error.message);
    /* Ranks of one machine share its cores. */
    if (runtime->rendezvous && !runtime->settings.threads)
        runtime->settings.threads = ms_rendezvous_threads(runtime->rendezvous);
    ms_error error;
    ms_engine *engine = NULL;
    if (ms_engine_new(&runtime->settings, &error, &engine))
        luaL_error(L, "moonshard could not start: %s", error.message);
    ms_group *world = NULL;
    ms_status status = MS_OK;
    if (runtime->fake_size) {
        status = ms_comm_open_fake(engine, runtime->rank, runtime->fake_size, &world);
        if (!status) ms_comm_record(engine, ms_engine_is_sim(engine));
    } else if (runtime->rendezvous)
        status = ms_comm_open(engine, runtime->rendezvous, runtime->rank, &world);
    if (status) {
        error = *ms_engine_error(engine);
        ms_engine_free(engine);
        luaL_error(L, "moonshard could not start: %s", error.message);
    }
    runtime->engine = engine;
}

/* A finalizer runs in the middle of whatever allocates, so what it enqueued or released would
 * depend on the collector's pace, and could be what a bound function below it is working on. Lua
 * answers no question about its collector there. */
static bool in_finalizer(lua_State *L) { return lua_gc(L, LUA_GCCOUNT) < 0; }

/* The user's line "file:12" as a string of the engine; 0: there is none. */
static uint32_t script_of(lua_State *L, ms_runtime *runtime)
{
    lua_Debug frame;
    char text[160];
    if (!user_frame(L, runtime, 1, &frame)) return 0;
    ms_strings *strings = ms_engine_strings(runtime->engine);
    size_t at = (((uintptr_t)frame.source >> 4) + (size_t)frame.currentline * 7)
                % (sizeof runtime->lines / sizeof *runtime->lines),
           length = strlen(frame.short_src);
    if (runtime->lines[at].source == frame.source && runtime->lines[at].line == frame.currentline) {
        /* Another source may lie where a collected one lay. */
        const char *known = ms_strings_get(strings, runtime->lines[at].id);
        if (strncmp(known, frame.short_src, length) == 0 && known[length] == ':')
            return runtime->lines[at].id;
    }
    uint32_t id = 0;
    snprintf(text, sizeof text, "%s:%d", frame.short_src, frame.currentline);
    if (ms_strings_add(strings, text, strlen(text), &id)) return 0;
    runtime->lines[at].source = frame.source;
    runtime->lines[at].line = frame.currentline;
    runtime->lines[at].id = id;
    return id;
}

ms_engine *ms_lua_enter_inside(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    if (in_finalizer(L))
        ms_lua_error(L, "a finalizer (__gc) cannot use tensors: it runs at any moment; use "
                        "<close>, or call a function");
    if (!runtime->engine) start_engine(L, runtime);
    if (atomic_load_explicit(&runtime->waiting_line, memory_order_acquire) == 2) {
        lua_warning(L, runtime->waiting_text, 0);
        atomic_store(&runtime->waiting_line, 0);
    }
    if (ms_engine_under_pressure(runtime->engine)) ms_lua_collect(L, runtime);
    return runtime->engine;
}

ms_engine *ms_lua_enter(lua_State *L)
{
    if (ms_lua_runtime(L)->planning)
        ms_lua_error(L, "a planner uses numbers only, no tensors, streams or groups: plan from the "
                        "view and return a table");
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_engine *engine = ms_lua_enter_inside(L);
    uint32_t script = script_of(L, runtime);
    ms_engine_set_script(engine, script);
    /* The text is written only where the line is another one. */
    ms_activity *activity = ms_engine_context(engine)->activity;
    ms_activity_call(activity, activity && script && script != runtime->shown_script
                                   ? ms_strings_get(ms_engine_strings(engine), script)
                                   : NULL);
    runtime->shown_script = script;
    return engine;
}

/* Those of that step (0: of any) that were made after `begin` and up to `end`. */
static void release_dropped(ms_runtime *runtime, uint64_t step, uint64_t begin, uint64_t end)
{
    size_t kept = 0;
    for (size_t i = 0; i < runtime->dropped_count; i++) {
        ms_dropped dropped = runtime->dropped[i];
        if ((step == 0 || dropped.step == step) && dropped.order > begin && dropped.order <= end)
            ms_tensor_release(dropped.tensor);
        else runtime->dropped[kept++] = dropped;
    }
    runtime->dropped_count = kept;
}

void ms_lua_collect(lua_State *L, ms_runtime *runtime)
{
    /* With a tensor the engine may give up functions (of recompute, of hooks) that were all that
     * still held others. */
    for (uint64_t before = runtime->callbacks_freed;; before = runtime->callbacks_freed) {
        lua_gc(L, LUA_GCCOLLECT);
        release_dropped(runtime, 0, 0, UINT64_MAX);
        ms_link_states_sweep(runtime->engine);
        if (runtime->callbacks_freed == before) break;
    }
    ms_engine_relieved(runtime->engine);
}

ms_random ms_lua_own_draw(lua_State *L)
{
    const ms_runtime *runtime = ms_lua_runtime(L);
    ms_random random = ms_engine_draw(runtime->engine);
    random.seed = ms_seed_of_rank(random.seed, runtime->rank);
    return random;
}

bool ms_lua_collect_above(lua_State *L, ms_runtime *runtime, uint64_t live)
{
    /* Below 16 MiB of growth the collection costs more than what it can give back is worth. */
    if (ms_engine_memory(runtime->engine).live <= live + (16u << 20)) return false;
    ms_lua_collect(L, runtime);
    return true;
}

void ms_lua_refuse_in_hook(lua_State *L, const char *what, const char *instead)
{
    if (ms_lua_runtime(L)->hook_depth > 0)
        ms_lua_error(L, "%s cannot be used inside a hook: %s", what, instead);
}

/* ------------------------------------------------------------------ handles */

static void unlink_handle(ms_handle *handle)
{
    ms_runtime *runtime = handle->runtime;
    if (handle->previous) handle->previous->next = handle->next;
    else if (runtime->handles == handle) runtime->handles = handle->next;
    if (handle->next) handle->next->previous = handle->previous;
    handle->previous = handle->next = NULL;
}

/* The tensor goes to the list of dropped ones; the handle tells later users why. */
static void drop_later(ms_handle *handle)
{
    ms_runtime *runtime = handle->runtime;
    if (!handle->tensor) return;
    unlink_handle(handle);
    /* There is room for every handle that lives: ms_lua_new_handle made it. */
    runtime->dropped[runtime->dropped_count++] = (ms_dropped){
        .tensor = handle->tensor, .step = handle->kept ? 0 : handle->step, .order = handle->order
    };
    handle->tensor = NULL;
    handle->gone = "was closed";
}

static int handle_close(lua_State *L)
{
    ms_handle *handle = lua_touserdata(L, 1);
    if (handle && handle->magic == MS_HANDLE_MAGIC && !in_finalizer(L)) drop_later(handle);
    return 0;
}

static int handle_gc(lua_State *L)
{
    ms_handle *handle = lua_touserdata(L, 1);
    if (!handle || handle->magic != MS_HANDLE_MAGIC) return 0;
    drop_later(handle);
    handle->magic = 0;
    handle->runtime->handle_count--;
    return 0;
}

ms_handle *ms_lua_new_handle(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    if (ms_grow(&runtime->context, (void **)&runtime->dropped, &runtime->dropped_capacity,
                runtime->dropped_count + runtime->handle_count + 1, sizeof *runtime->dropped))
        luaL_error(L, "%s", runtime->context.error.message);
    ms_handle *handle = lua_newuserdatauv(L, sizeof *handle, 1);
    memset(handle, 0, sizeof *handle);
    handle->magic = MS_HANDLE_MAGIC;
    handle->runtime = runtime;
    handle->gone = "was never filled";
    runtime->handle_count++;
    luaL_setmetatable(L, MS_TENSOR_TYPE);
    return handle;
}

void ms_handle_fill(ms_handle *handle, ms_tensor *owned)
{
    ms_runtime *runtime = handle->runtime;
    handle->tensor = owned;
    handle->gone = NULL;
    handle->step = runtime->step_serial;
    handle->script = ms_engine_script(runtime->engine);
    handle->order = ++runtime->orders;
    handle->next = runtime->handles;
    if (handle->next) handle->next->previous = handle;
    runtime->handles = handle;
}

void ms_handle_keep(ms_handle *handle)
{
    unlink_handle(handle);
    handle->kept = true;
}

void ms_handle_drop(ms_handle *handle, const char *why)
{
    if (!handle->tensor) return;
    unlink_handle(handle);
    ms_tensor *tensor = handle->tensor;
    handle->tensor = NULL;
    handle->gone = why;
    ms_tensor_release(tensor);
}

uint64_t ms_handle_count(const ms_runtime *runtime) { return runtime->orders; }

void ms_handles_drop(ms_runtime *runtime, uint64_t begin, uint64_t end, const char *why)
{
    ms_handle *handle = runtime->handles;
    while (handle && handle->order > begin) {
        ms_handle *next = handle->next;
        if (handle->order <= end) ms_handle_drop(handle, why);
        handle = next;
    }
    release_dropped(runtime, 0, begin, end);
}

/* Everything that was made in the step and not kept goes, whoever still holds a handle. */
static void release_step(ms_runtime *runtime)
{
    while (runtime->handles && runtime->handles->step == runtime->step_serial)
        ms_handle_drop(runtime->handles,
                       "was released when its step ended; call keep() on what is to live longer");
    release_dropped(runtime, runtime->step_serial, 0, UINT64_MAX);
}

/* -------------------------------------------------------------------- steps */

/* core.step_begin(step) */
static int step_begin(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_runtime *runtime = ms_lua_runtime(L);
    int64_t step = ms_lua_integer(L, 1, 0, INT64_MAX, "step");
    ms_lua_refuse_in_hook(L, "ms.steps", "steps are begun by the training loop");
    if (runtime->step_serial)
        return ms_lua_error(L, "ms.steps: a step is running already; steps cannot be nested");
    runtime->step_serial = ++runtime->step_count;
    runtime->step = step;
    ms_trace_step(engine, step);
    ms_random random = ms_engine_random(engine);
    ms_engine_set_random(engine,
                         (ms_random){ .seed = random.seed, .step = (uint64_t)step + 1, .draw = 0 });
    return 0;
}

/* core.step_end(): releases what the step made; the host waits for the step before the last. */
static int step_end(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_runtime *runtime = ms_lua_runtime(L);
    if (!runtime->step_serial) return 0;
    release_step(runtime);
    runtime->step_serial = 0;
    ms_engine_drop_casts(engine);
    ms_trace_step(engine, -1);
    ms_lua_ok(L, ms_engine_step_end(engine, 2));
    return 0;
}

static int step_number(lua_State *L)
{
    lua_pushinteger(L, ms_lua_runtime(L)->step);
    lua_pushboolean(L, ms_lua_runtime(L)->step_serial != 0);
    return 2;
}

/* ------------------------------------------------------ opening and closing */

static int runtime_gc(lua_State *L)
{
    ms_runtime *runtime = lua_touserdata(L, 1);
    if (runtime->closed) return 0;
    runtime->closed = true;
    release_dropped(runtime, 0, 0, UINT64_MAX);
    ms_engine_free(runtime->engine);
    runtime->engine = NULL;
    runtime->context.activity = NULL;
    ms_rendezvous_release(runtime->rendezvous);
    ms_release(&runtime->context, runtime->dropped);
    return 0;
}

void ms_lua_register(lua_State *L, int runtime, const luaL_Reg *functions)
{
    lua_pushvalue(L, runtime);
    luaL_setfuncs(L, functions, 1);
}

/* __index of a table of methods, which stands for an object's: what is not there is a misspelled
 * name. Upvalues: runtime, name of the type. */
static int refuse_field(lua_State *L)
{
    return ms_lua_no_field(L, 2, 1, lua_tostring(L, lua_upvalueindex(2)));
}

void ms_lua_type(lua_State *L, int runtime, const char *name, const luaL_Reg *metamethods,
                 const luaL_Reg *methods)
{
    luaL_newmetatable(L, name);
    if (metamethods) ms_lua_register(L, runtime, metamethods);
    lua_pushliteral(L, "locked");
    lua_setfield(L, -2, "__metatable");
    lua_newtable(L);
    if (methods) ms_lua_register(L, runtime, methods);
    lua_createtable(L, 0, 1);
    lua_pushvalue(L, runtime);
    lua_pushstring(L, name);
    lua_pushcclosure(L, refuse_field, 2);
    lua_setfield(L, -2, "__index");
    lua_setmetatable(L, -2);
    lua_pushvalue(L, -1);
    lua_setfield(L, -3, "__index");
    lua_remove(L, -2);
}

/* core.set_library(prefix): chunk names that begin with it belong to the library. */
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

/* The engine's log goes where the Lua state's warnings go, unless a host has set another place
 * (ms_lua_log): a stock interpreter prints them after warn("@on"). A line of another thread waits
 * until the state's own calls the engine again; one can wait at a time. */
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

/* MOONSHARD_CPU, MOONSHARD_STRICT and MOONSHARD_LOG mean the same for the program, a stock
 * interpreter and a host. */
static void read_environment(ms_runtime *runtime)
{
    const ms_os *os = runtime->context.os;
    const char *cpu = os->environment(os->user, "MOONSHARD_CPU"),
               *strict = os->environment(os->user, "MOONSHARD_STRICT");
    const char *log = os->environment(os->user, "MOONSHARD_LOG");
    if (cpu && *cpu && strlen(cpu) < sizeof runtime->cpu_text) {
        strcpy(runtime->cpu_text, cpu);
        runtime->settings.cpu = runtime->cpu_text;
    }
    runtime->settings.strict = strict && strcmp(strict, "1") == 0;
    runtime->settings.log = log_as_warning;
    runtime->settings.log_user = runtime;
    runtime->settings.log_level = MS_LOG_WARN;
    if (log && strcmp(log, "debug") == 0) runtime->settings.log_level = MS_LOG_DEBUG;
    else if (log && strcmp(log, "info") == 0) runtime->settings.log_level = MS_LOG_INFO;
}

static const luaL_Reg functions[] = {
    { "step_begin", step_begin },   { "step_end", step_end }, { "step", step_number },
    { "set_library", set_library }, { NULL, NULL },
};

static int open_module(lua_State *L)
{
    ms_runtime *runtime = lua_newuserdatauv(L, sizeof *runtime, 0);
    memset(runtime, 0, sizeof *runtime);
    runtime->owner = pthread_self();
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    runtime->main = lua_tothread(L, -1);
    lua_pop(L, 1);
    ms_context_init(&runtime->context, NULL);
    read_environment(runtime);
    int at = lua_gettop(L);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, runtime_gc);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, at);
    /* Handles' __gc needs no upvalue; it must work while the state closes. */
    luaL_newmetatable(L, MS_TENSOR_TYPE);
    lua_pushcfunction(L, handle_gc);
    lua_setfield(L, -2, "__gc");
    lua_pushcfunction(L, handle_close);
    lua_setfield(L, -2, "__close");
    lua_pop(L, 1);
    lua_newtable(L);
    ms_lua_register(L, at, functions);
    ms_open_engine(L, at);
    ms_open_tensor(L, at);
    ms_open_make(L, at);
    ms_open_operators(L, at);
    ms_open_grad(L, at);
    ms_open_stream(L, at);
    ms_open_codec(L, at);
    ms_open_group(L, at);
    ms_open_bucket(L, at);
    ms_open_link(L, at);
    ms_open_ddp(L, at);
    ms_open_job(L, at);
    ms_open_optim(L, at);
    ms_open_io(L, at);
    return 1;
}

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

/* That of a state, which stays on its stack above two other values. */
static ms_runtime *push_runtime(lua_State *L)
{
    lua_getglobal(L, "require");
    lua_pushliteral(L, "moonshard.core");
    lua_call(L, 1, 1);
    lua_getfield(L, -1, "step");
    if (!lua_getupvalue(L, -1, 1)) luaL_error(L, "moonshard.core is not the library's");
    return lua_touserdata(L, -1); /* upvalue 1 of every bound function */
}

MS_API void ms_lua_log(lua_State *L, ms_log_function log, void *user)
{
    ms_runtime *runtime = push_runtime(L);
    if (runtime->engine)
        luaL_error(L, "moonshard: where the log goes is set before the engine starts");
    runtime->settings.log = log;
    runtime->settings.log_user = user;
    lua_pop(L, 3);
}

MS_API void ms_lua_join(lua_State *L, ms_rendezvous *rendezvous, uint32_t rank)
{
    ms_runtime *runtime = push_runtime(L);
    if (runtime->engine || runtime->rendezvous)
        luaL_error(L, "moonshard: a Lua state becomes a rank once, before its engine starts");
    runtime->rendezvous = ms_rendezvous_retain(rendezvous);
    runtime->rank = rank;
    runtime->context.activity = ms_rendezvous_activity(rendezvous, rank);
    lua_pop(L, 3);
}

MS_API void ms_lua_where(lua_State *L, char *text, size_t bytes)
{
    lua_Debug frame;
    text[0] = 0;
    bool found = user_frame(L, push_runtime(L), 0, &frame);
    lua_pop(L, 3);
    if (found) snprintf(text, bytes, "%s:%d", frame.short_src, frame.currentline);
}
