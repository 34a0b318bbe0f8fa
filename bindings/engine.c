/* engine.c: the engine in Lua: starting it, memory, steps' numbers, random state, what the machine
 * has. */
#include "bindings/runtime.h"

#include <stdio.h>
#include <string.h>

#include "moonshard/comm.h"

/* The world of the engine that will start, from options group, rank and world_size at index 1. */
static void configure_world(lua_State *L, ms_runtime *runtime)
{
    static const char *const groups[] = { "local", "fake", "mpi", "nccl", NULL };
    lua_getfield(L, 1, "group");
    bool named = !lua_isnil(L, -1);
    int group = named ? ms_lua_choice(L, -1, groups, "group") : -1;
    lua_pop(L, 1);
    static const char *const fields[] = { "rank", "world_size", "rendezvous" };
    bool more = false;
    for (int i = 0; i < 3; i++) more = lua_getfield(L, 1, fields[i]) != LUA_TNIL || more;
    lua_pop(L, 3);
    if (!named && !more) return;
    if (!named)
        ms_lua_error(
            L, "init: rank, world_size and rendezvous belong to a group: \"local\" or \"fake\"");
    if (group >= 2) ms_lua_error(L, "init: group \"%s\" is not in this build", groups[group]);
    uint32_t most = group == 0 ? MS_LOCAL_RANKS_MAX : MS_FAKE_RANKS_MAX;
    uint32_t size = (uint32_t)ms_lua_field_integer(L, 1, "world_size", 0, 1, most);
    if (size == 0) ms_lua_error(L, "init: a group needs its world_size");
    uint32_t rank = (uint32_t)ms_lua_field_integer(L, 1, "rank", 0, 0, (int64_t)size - 1);
    if (group == 1) {
        runtime->fake_size = size;
        runtime->rank = rank;
        return;
    }
    if (runtime->rendezvous)
        ms_lua_error(L, "init: this is a rank of a job already: the launcher has made its group");
    if (lua_getfield(L, 1, "rendezvous") != LUA_TSTRING)
        ms_lua_error(L, "init: group \"local\" needs rendezvous, the path of a socket that all its "
                        "ranks share");
    ms_rendezvous_options options = {
        .ranks = size,
        .threads = (uint32_t)ms_lua_field_integer(L, 1, "threads", 0, 0, 1024),
        .heap_bytes = (uint64_t)ms_lua_field_integer(L, 1, "memory_bytes", 0, 0, INT64_MAX)
    };
    if (ms_rendezvous_meet(&runtime->context, &options, lua_tostring(L, -1), rank,
                           &runtime->rendezvous))
        luaL_error(L, "%s", runtime->context.error.message);
    lua_pop(L, 1);
    runtime->rank = rank;
}

/* core.configure{ device=, threads=, strict=, seed=, pin=, cpu=, memory_bytes=, group=, rank=,
 * world_size=, rendezvous= }: settings for the engine that starts at first use. */
static int configure(lua_State *L)
{
    static const char *const keys[] = { "device", "threads",    "strict",       "seed",
                                        "pin",    "cpu",        "memory_bytes", "group",
                                        "rank",   "world_size", "rendezvous",   NULL };
    ms_runtime *runtime = ms_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    ms_lua_known_keys(L, 1, keys, "option of init");
    if (runtime->engine)
        return ms_lua_error(L, "init: the engine runs already; call ms.init before anything else");
    ms_engine_options settings = runtime->settings;
    settings.threads = (uint32_t)ms_lua_field_integer(L, 1, "threads", settings.threads, 0, 1024);
    settings.strict = ms_lua_field_boolean(L, 1, "strict", settings.strict);
    settings.pin = ms_lua_field_boolean(L, 1, "pin", settings.pin);
    settings.seed =
        (uint64_t)ms_lua_field_integer(L, 1, "seed", (int64_t)settings.seed, INT64_MIN, INT64_MAX);
    settings.memory_bytes = (uint64_t)ms_lua_field_integer(
        L, 1, "memory_bytes", (int64_t)settings.memory_bytes, 0, INT64_MAX);
    struct {
        const char *name;
        char *text;
        size_t bytes;
        const char **setting;
    } texts[] = {
        { "device", runtime->device_text, sizeof runtime->device_text, &settings.device },
        { "cpu", runtime->cpu_text, sizeof runtime->cpu_text, &settings.cpu },
    };
    for (int i = 0; i < 2; i++) {
        if (lua_getfield(L, 1, texts[i].name) != LUA_TNIL) {
            size_t bytes;
            const char *given = luaL_checklstring(L, -1, &bytes);
            if (bytes >= texts[i].bytes)
                return ms_lua_error(L, "%s '%.40s...' is unknown", texts[i].name, given);
            memcpy(texts[i].text, given, bytes + 1);
            *texts[i].setting = texts[i].text;
        }
        lua_pop(L, 1);
    }
    configure_world(L, runtime);
    runtime->settings = settings;
    return 0;
}

static int memory(lua_State *L)
{
    ms_memory m = ms_engine_memory(ms_lua_enter_inside(L));
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, (lua_Integer)m.live);
    lua_setfield(L, -2, "live");
    lua_pushinteger(L, (lua_Integer)m.peak);
    lua_setfield(L, -2, "peak");
    lua_pushinteger(L, (lua_Integer)m.reserved);
    lua_setfield(L, -2, "reserved");
    return 1;
}

static int reset_peak(lua_State *L)
{
    ms_engine_reset_peak(ms_lua_enter(L));
    return 0;
}

/* core.set_peak(bytes): puts an earlier peak back. */
static int set_peak(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_engine_set_peak(engine, (uint64_t)ms_lua_integer(L, 1, 0, INT64_MAX, "peak"));
    return 0;
}

/* core.collect(): a full collection now; a fixed point. */
static int collect(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_collect(L, ms_lua_runtime(L));
    return 0;
}

static int synchronize(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "synchronize", "hooks only enqueue");
    ms_lua_ok(L, ms_engine_sync(ms_lua_enter(L)));
    return 0;
}

/* Begins the numbers of this seed anew: outside of steps as if none had run yet. */
static int seed(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_random random = ms_engine_random(engine);
    random.seed = (uint64_t)ms_lua_integer(L, 1, INT64_MIN, INT64_MAX, "seed");
    random.draw = 0;
    if (!ms_lua_runtime(L)->step_serial) random.step = 0;
    ms_engine_set_random(engine, random);
    return 0;
}

/* core.random_state() -> seed, step, draw;  core.set_random_state(seed, step, draw) */
static int random_state(lua_State *L)
{
    ms_random random = ms_engine_random(ms_lua_enter(L));
    lua_pushinteger(L, (lua_Integer)random.seed);
    lua_pushinteger(L, (lua_Integer)random.step);
    lua_pushinteger(L, (lua_Integer)random.draw);
    return 3;
}

static int set_random_state(lua_State *L)
{
    ms_random random = { .seed = (uint64_t)ms_lua_integer(L, 1, INT64_MIN, INT64_MAX, "seed"),
                         .step = (uint64_t)ms_lua_integer(L, 2, 0, INT64_MAX, "step"),
                         .draw = (uint64_t)ms_lua_integer(L, 3, 0, INT64_MAX, "draw") };
    ms_engine_set_random(ms_lua_enter(L), random);
    return 0;
}

/* core.flops() -> cost of all that was enqueued so far */
static int flops(lua_State *L)
{
    lua_pushnumber(L, ms_engine_flops(ms_lua_enter_inside(L)));
    return 1;
}

static int info(lua_State *L)
{
    ms_engine *engine = ms_lua_enter_inside(L);
    const ms_os *os = ms_os_posix();
    ms_machine machine = { .cores = 0 };
    int failed = os->machine(os->user, &machine);
    if (failed) return ms_lua_error(L, "info: the machine's description cannot be read");
    lua_createtable(L, 0, 13);
    lua_pushstring(L, machine.cpu);
    lua_setfield(L, -2, "cpu");
    lua_pushinteger(L, machine.cores);
    lua_setfield(L, -2, "cores");
    lua_pushinteger(L, ms_engine_threads(engine));
    lua_setfield(L, -2, "threads");
    lua_pushinteger(L, (lua_Integer)machine.memory_bytes);
    lua_setfield(L, -2, "memory_bytes");
    lua_pushstring(L, ms_isa_name(ms_engine_isa(engine)));
    lua_setfield(L, -2, "kernels");
    lua_pushstring(L, ms_engine_blas());
    lua_setfield(L, -2, "blas");
    lua_pushstring(L, ms_engine_is_sim(engine) ? "" : ms_engine_blas_isa(engine));
    lua_setfield(L, -2, "blas_isa");
    lua_pushstring(L, ms_engine_device(engine));
    lua_setfield(L, -2, "device");
    lua_createtable(L, 1, 0);
    lua_pushstring(L, "cpu");
    lua_rawseti(L, -2, 1);
    lua_setfield(L, -2, "devices");
    lua_pushboolean(L, false);
    lua_setfield(L, -2, "mpi");
    lua_pushboolean(L, false);
    lua_setfield(L, -2, "nccl");
    lua_pushstring(L, LUA_RELEASE);
    lua_setfield(L, -2, "lua");
    lua_pushstring(L, MS_VERSION);
    lua_setfield(L, -2, "version");
    return 1;
}

/* core.device() -> the name of the engine's device */
static int device(lua_State *L)
{
    lua_pushstring(L, ms_engine_device(ms_lua_enter_inside(L)));
    return 1;
}

static int is_sim(lua_State *L)
{
    lua_pushboolean(L, ms_engine_is_sim(ms_lua_enter_inside(L)));
    return 1;
}

/* core.exit_code(message) -> what the command line exits with for this error */
static int exit_code(lua_State *L)
{
    const ms_runtime *runtime = ms_lua_runtime(L);
    const char *message = luaL_checkstring(L, 1);
    int code =
        runtime->exit_message[0] && strstr(message, runtime->exit_message) ? runtime->exit_code : 1;
    lua_pushinteger(L, strstr(message, "not enough memory") ? 8 : code);
    return 1;
}

/* core.in_hook() */
static int in_hook(lua_State *L)
{
    lua_pushboolean(L, ms_lua_runtime(L)->hook_depth > 0);
    return 1;
}

/* core.is_library(source) -> whether a function's source (of debug.getinfo) is the library's */
static int is_library(lua_State *L)
{
    const ms_runtime *runtime = ms_lua_runtime(L);
    size_t bytes = runtime->library_prefix_bytes;
    const char *source = luaL_checkstring(L, 1);
    lua_pushboolean(L, bytes > 0 && strncmp(source, runtime->library_prefix, bytes) == 0);
    return 1;
}

/* core.line(): the user's line, for messages of the library. */
static int line(lua_State *L)
{
    char text[160];
    ms_lua_line(L, text, sizeof text);
    lua_pushstring(L, text);
    return 1;
}

/* core.traceback(error) -> where an error that came out of a callback was raised, or nil */
static int traceback(lua_State *L)
{
    luaL_checkany(L, 1);
    if (!ms_lua_traceback(L, 1)) lua_pushnil(L);
    return 1;
}

/* core.raise(message): raises with the user's line in front. */
static int raise(lua_State *L) { return ms_lua_error(L, "%s", luaL_checkstring(L, 1)); }

/* core.refuse(message, code) -> nil, message, code: what the environment's failure means for a run
 * that ends with it is noted. */
static int refuse(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    const char *message = luaL_checkstring(L, 1);
    luaL_checkstring(L, 2);
    lua_settop(L, 2);
    runtime->exit_code = 3;
    snprintf(runtime->exit_message, sizeof runtime->exit_message, "%s", message);
    lua_pushnil(L);
    lua_insert(L, 1);
    return 3;
}

/* core.nearest(given, names) -> the most similar name, or nil */
static int nearest(lua_State *L)
{
    const char *given = luaL_checkstring(L, 1);
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_Integer count = (lua_Integer)lua_rawlen(L, 2);
    const char **names = lua_newuserdatauv(L, (size_t)(count + 1) * sizeof *names, 0);
    luaL_checkstack(L, (int)count + 2, "names");
    for (lua_Integer i = 0; i < count; i++) {
        lua_rawgeti(L, 2, i + 1); /* the table keeps the strings alive */
        names[i] = luaL_checkstring(L, -1);
        lua_pop(L, 1);
    }
    names[count] = NULL;
    lua_pushstring(L, ms_lua_nearest(given, names));
    return 1;
}

/* A task that does nothing, with the arguments and accesses of a usual one. */
static ms_task_result nothing(ms_run *run, void *arguments)
{
    (void)run;
    (void)arguments;
    return MS_TASK_DONE;
}

/* core.bench_enqueue(count) -> nanoseconds that enqueueing one task with three storages takes the
 * host */
static int bench_enqueue(lua_State *L)
{
    static const ms_task task = { .name = "nothing", .function = nothing, .args_bytes = 64 };
    ms_engine *engine = ms_lua_enter(L);
    int64_t count = ms_lua_integer(L, 1, 1, 100000000, "count");
    const ms_os *os = ms_os_posix();
    ms_stream *stream = ms_engine_current(engine);
    ms_storage *storages[3] = { NULL };
    ms_status status = MS_OK;
    for (int i = 0; i < 3 && !status; i++) status = ms_storage_new(stream, 64, &storages[i]);
    ms_access accesses[3];
    for (int i = 0; i < 3; i++)
        accesses[i] =
            (ms_access){ .storage = storages[i], .cells = 1, .mode = i ? MS_READ : MS_WRITE };
    uint64_t spent = 0;
    char arguments[64] = { 0 };
    /* In pieces that fit into the ring, so that it is enqueueing that is measured and not waiting
     * for room. */
    for (int64_t done = 0; done < count && !status; done += 500) {
        uint64_t start = os->monotonic_ns(os->user);
        for (int i = 0; i < 500 && !status; i++)
            status =
                ms_stream_enqueue(stream, &task, arguments, accesses, 3, (ms_task_cost){ 0 }, NULL);
        spent += os->monotonic_ns(os->user) - start;
        if (!status) status = ms_stream_sync(stream);
    }
    for (int i = 0; i < 3; i++) ms_storage_release(storages[i]);
    ms_lua_ok(L, status);
    lua_pushnumber(L, (double)spent / (double)((count + 499) / 500 * 500));
    return 1;
}

void ms_open_engine(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = {
        { "configure", configure },
        { "memory", memory },
        { "reset_peak", reset_peak },
        { "collect", collect },
        { "set_peak", set_peak },
        { "synchronize", synchronize },
        { "seed", seed },
        { "random_state", random_state },
        { "set_random_state", set_random_state },
        { "flops", flops },
        { "info", info },
        { "device", device },
        { "is_sim", is_sim },
        { "in_hook", in_hook },
        { "exit_code", exit_code },
        { "line", line },
        { "is_library", is_library },
        { "raise", raise },
        { "refuse", refuse },
        { "traceback", traceback },
        { "nearest", nearest },
        { "bench_enqueue", bench_enqueue },
        { NULL, NULL },
    };
    ms_lua_register(L, runtime, functions);
    lua_pushstring(L, MS_VERSION);
    lua_setfield(L, -2, "version");
}
