/* engine.c: the engine in Lua: starting it, memory, steps' numbers, random state, what the machine
 * has. */
#include "bindings/engine.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/rates.h"
#include "bindings/enter.h"
#include "bindings/fields.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/comm.h"

/* Meets the other ranks of a group that no launcher has started, at the socket `rendezvous`
 * of the options at index 1. Blocks until all have come. That takes place in ms.init and not at the
 * first use of the engine, because it waits for other processes: a script says here that it is
 * ready to. Rank 0 makes the files of the job, so its threads and memory_bytes hold for all ranks.
 */
static void meet_ranks(lua_State *L, ms_runtime *runtime, const char *group, uint32_t rank,
                       uint32_t size)
{
    if (runtime->job.rendezvous)
        ms_lua_error(L, "init: this is a rank of a job already: the launcher has made its group "
                        "(MOONSHARD_TRANSPORT in its environment says how tensors travel)");
    if (lua_getfield(L, 1, "rendezvous") != LUA_TSTRING)
        ms_lua_error(L,
                     "init: group \"%s\" needs rendezvous, the path of a socket that all its "
                     "ranks share",
                     group);
    ms_rendezvous_options options = {
        .ranks = size,
        .threads = (uint32_t)ms_lua_field_integer(L, 1, "threads", 0, 0, 1024),
        .heap_bytes = (uint64_t)ms_lua_field_integer(L, 1, "memory_bytes", 0, 0, INT64_MAX)
    };
    if (ms_rendezvous_meet(&runtime->context, &options, lua_tostring(L, -1), rank,
                           &runtime->job.rendezvous))
        luaL_error(L, "%s", runtime->context.error.message);
    lua_pop(L, 1);
}

/* Whether the table at index 1 has an option that only a group gives a meaning. A script that
 * forgets `group` would otherwise train alone on each rank, without an error. */
static bool has_group_options(lua_State *L)
{
    static const char *const fields[] = { "rank", "world_size", "rendezvous" };
    bool found = false;
    for (int i = 0; i < 3; i++) {
        found = lua_getfield(L, 1, fields[i]) != LUA_TNIL || found;
        lua_pop(L, 1);
    }
    return found;
}

/* Options hosts (how many ranks each node has, in order) and sum_by_ranks of a fake world. */
static void place_fake(lua_State *L, ms_runtime *runtime, uint32_t size)
{
    uint32_t next = 0;
    runtime->fake.by_ranks = ms_lua_field_boolean(L, 1, "sum_by_ranks", false);
    if (lua_getfield(L, 1, "hosts") != LUA_TNIL) {
        luaL_checktype(L, -1, LUA_TTABLE);
        uint32_t nodes = (uint32_t)lua_rawlen(L, -1);
        for (uint32_t h = 0; h < nodes; h++) {
            lua_rawgeti(L, -1, (lua_Integer)h + 1);
            lua_Integer ranks = luaL_checkinteger(L, -1);
            lua_pop(L, 1);
            if (ranks < 1 || ranks > (lua_Integer)(size - next))
                ms_lua_error(L, "init: hosts have %d ranks in all, each at least 1", (int)size);
            for (lua_Integer i = 0; i < ranks; i++, next++)
                if (next < MS_LOCAL_RANKS_MAX) runtime->fake.nodes[next] = (uint16_t)h;
        }
        if (next != size) ms_lua_error(L, "init: hosts have %d ranks of %d", (int)next, (int)size);
        if (size > MS_LOCAL_RANKS_MAX)
            ms_lua_error(L, "init: %d ranks on %d hosts: over several hosts a job has at most %d",
                         (int)size, (int)nodes, MS_LOCAL_RANKS_MAX);
        runtime->fake.has_nodes = true;
    }
    lua_pop(L, 1);
}

/* The world of the engine that will start, from options group, rank and world_size at index 1. A
 * fake world is only noted: the engine opens it when it starts. */
static void configure_world(lua_State *L, ms_runtime *runtime)
{
    enum { LOCAL, FAKE, NCCL };
    static const char *const groups[] = { "local", "fake", "nccl", NULL };
    if (lua_getfield(L, 1, "group") == LUA_TNIL) {
        lua_pop(L, 1);
        if (has_group_options(L))
            ms_lua_error(L, "init: rank, world_size and rendezvous belong to a group: \"local\" or "
                            "\"fake\"");
        return;
    }
    /* lua/moonshard/parallel/mpi.lua serves "mpi". */
    int group = ms_lua_choice(L, -1, groups, "group");
    lua_pop(L, 1);
    uint32_t most = group == FAKE ? MS_FAKE_RANKS_MAX : MS_LOCAL_RANKS_MAX;
    uint32_t size = (uint32_t)ms_lua_field_integer(L, 1, "world_size", 0, 1, most);
    if (size == 0) ms_lua_error(L, "init: a group needs its world_size");
    uint32_t rank = (uint32_t)ms_lua_field_integer(L, 1, "rank", 0, 0, (int64_t)size - 1);
    if (group == FAKE) {
        runtime->fake.size = size;
        place_fake(L, runtime, size);
    } else meet_ranks(L, runtime, groups[group], rank, size);
    if (group != FAKE) strcpy(runtime->transport_text, groups[group]);
    runtime->job.rank = rank;
}

/* Option `name` as a text in `text`, which lives as long as the runtime: the setting points to it.
 * Without the option the setting stays as it is. An option longer than the room is no device and no
 * instruction set, so it is refused as unknown instead of being cut. */
static void read_text(lua_State *L, const char *name, char *text, size_t room, const char **setting)
{
    size_t bytes;
    if (lua_getfield(L, 1, name) != LUA_TNIL) {
        const char *given = luaL_checklstring(L, -1, &bytes);
        if (bytes >= room) ms_lua_error(L, "%s '%.40s...' is unknown", name, given);
        memcpy(text, given, bytes + 1);
        *setting = text;
    }
    lua_pop(L, 1);
}

/* lua/moonshard/parallel/mpi.lua takes these for itself. */
static void refuse_mpi_options(lua_State *L)
{
    static const char *const names[] = { "sum_order",    "interface", "port",   "stuck",
                                         "init_timeout", "lost",      "timeout" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (lua_getfield(L, 1, names[i]) != LUA_TNIL)
            ms_lua_error(L, "init: %s belongs to a group \"mpi\"", names[i]);
    lua_pop(L, (int)(sizeof names / sizeof *names));
}

/* The fields of ms_engine_options that are flags: a new one needs its name here. */
#define FLAGS(F) F(strict) F(pin) F(for_gpu) F(tf32)

/* core.configure{ device=, threads=, strict=, seed=, pin=, cpu=, memory_bytes=, group=, rank=,
 * world_size=, rendezvous=, hosts=, sum_by_ranks=, rates=, share_gpu=, for_gpu=, near_gpu=,
 * tf32= }: settings for the engine that starts at first use. runtime->settings is written last, so
 * that an option that is wrong leaves the settings of the environment. */
static int configure(lua_State *L)
{
    /* clang-format off */
#define NAME(flag) #flag,
    static const char *const keys[] = {
        FLAGS(NAME) "device", "threads", "seed", "cpu", "memory_bytes", "group", "rank",
        "world_size", "rendezvous", "rates", "hosts", "sum_by_ranks", "sum_order", "interface",
        "port", "init_timeout", "lost", "timeout", "share_gpu", "near_gpu", "stuck", NULL
    };
#undef NAME
    /* clang-format on */
    ms_runtime *runtime = ms_lua_runtime(L);
    luaL_checktype(L, 1, LUA_TTABLE);
    ms_lua_known_keys(L, 1, keys, "option of init");
    refuse_mpi_options(L);
    /* An engine takes its settings when it starts and keeps them. */
    if (runtime->engine)
        return ms_lua_error(L, "init: the engine runs already; call ms.init before anything else");
    ms_engine_options settings = runtime->settings;
    settings.threads = (uint32_t)ms_lua_field_integer(L, 1, "threads", settings.threads, 0, 1024);
#define READ(flag) settings.flag = ms_lua_field_boolean(L, 1, #flag, settings.flag);
    FLAGS(READ)
#undef READ
    settings.seed =
        (uint64_t)ms_lua_field_integer(L, 1, "seed", (int64_t)settings.seed, INT64_MIN, INT64_MAX);
    settings.memory_bytes = (uint64_t)ms_lua_field_integer(
        L, 1, "memory_bytes", (int64_t)settings.memory_bytes, 0, INT64_MAX);
    read_text(L, "device", runtime->device_text, sizeof runtime->device_text, &settings.device);
    read_text(L, "cpu", runtime->cpu_text, sizeof runtime->cpu_text, &settings.cpu);
    if (lua_getfield(L, 1, "rates") != LUA_TNIL) {
        ms_lua_rates(L, -1, &runtime->rates);
        settings.rates = &runtime->rates;
    }
    lua_pop(L, 1);
    bool share_gpu = ms_lua_field_boolean(L, 1, "share_gpu", runtime->placement.share_gpu);
    bool near_gpu = ms_lua_field_boolean(L, 1, "near_gpu", runtime->placement.near_gpu);
    configure_world(L, runtime);
    runtime->placement.share_gpu = share_gpu;
    runtime->placement.near_gpu = near_gpu;
    runtime->settings = settings;
    return 0;
}

/* core.memory() -> { live =, peak =, reserved =, offload_live =, offload_peak = in bytes, waits =
 * how often a stream waited for memory }. Of this rank's pools. enter_inside, because planners may
 * ask: it reads numbers and enqueues nothing. */
static int memory(lua_State *L)
{
    ms_memory m = ms_engine_memory(ms_lua_enter_inside(L));
    lua_createtable(L, 0, 6);
    ms_lua_set_integer(L, "live", (lua_Integer)m.live);
    ms_lua_set_integer(L, "peak", (lua_Integer)m.peak);
    ms_lua_set_integer(L, "reserved", (lua_Integer)m.reserved);
    ms_lua_set_integer(L, "waits", (lua_Integer)m.waits);
    ms_lua_set_integer(L, "offload_live", (lua_Integer)m.offload_live);
    ms_lua_set_integer(L, "offload_peak", (lua_Integer)m.offload_peak);
    return 1;
}

/* core.reset_peak(): the peak becomes what is live now. A measurement of one phase begins with it.
 */
static int reset_peak(lua_State *L)
{
    ms_engine_reset_peak(ms_lua_enter(L));
    return 0;
}

/* core.set_peak(bytes): puts an earlier peak back. peak_flops.lua measures parts of a step, and
 * puts back what the script would have seen without that. */
static int set_peak(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_engine_set_peak(engine, (uint64_t)ms_lua_integer(L, 1, 0, INT64_MAX, "peak"));
    return 0;
}

/* core.collect(): a full collection now; a fixed point. The library asks for one where it must know
 * whether a script still holds an object; the usual collections come with memory pressure. */
static int collect(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_collect(L, ms_lua_runtime(L));
    return 0;
}

/* core.synchronize(): blocks until all streams have run what was enqueued; raises the error of a
 * task. Refused in hooks: a hook runs in the middle of backward, and a rank that waits there for
 * work that needs a peer's next collective would never return. */
static int synchronize(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "synchronize", "hooks only enqueue");
    ms_lua_ok(L, ms_engine_sync(ms_lua_enter(L)));
    return 0;
}

/* core.seed(seed): begins the numbers of this seed again. Outside of steps, it is as if no step had
 * run yet. All 64 bits are a seed, so negative numbers are allowed. */
static int seed(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_random random = ms_engine_random(engine);
    random.seed = (uint64_t)ms_lua_integer(L, 1, INT64_MIN, INT64_MAX, "seed");
    /* The next draw is the first of this seed. */
    random.draw = 0;
    /* Inside a step its number stays, as step_begin has set it. */
    if (!ms_lua_runtime(L)->steps.serial) random.step = 0;
    ms_engine_set_random(engine, random);
    return 0;
}

/* core.random_state() -> seed, step, draw; core.set_random_state(seed, step, draw). For
 * checkpoints: with the three numbers, what is drawn after loading is what would have been drawn
 * without the interruption. */
static int random_state(lua_State *L)
{
    ms_random random = ms_engine_random(ms_lua_enter(L));
    lua_pushinteger(L, (lua_Integer)random.seed);
    lua_pushinteger(L, (lua_Integer)random.step);
    lua_pushinteger(L, (lua_Integer)random.draw);
    return 3;
}

/* The next draw gets the number `draw` of that step. Loading a checkpoint calls it with what
 * random_state gave. */
static int set_random_state(lua_State *L)
{
    ms_random random = { .seed = (uint64_t)ms_lua_integer(L, 1, INT64_MIN, INT64_MAX, "seed"),
                         .step = (uint64_t)ms_lua_integer(L, 2, 0, INT64_MAX, "step"),
                         .draw = (uint64_t)ms_lua_integer(L, 3, 0, INT64_MAX, "draw") };
    ms_engine_set_random(ms_lua_enter(L), random);
    return 0;
}

/* core.flops() -> cost of all that was enqueued so far. A difference of two calls is the cost of
 * what is between them. Nothing waits: costs are known when a task is enqueued. */
static int flops(lua_State *L)
{
    lua_pushnumber(L, ms_engine_flops(ms_lua_enter_inside(L)));
    return 1;
}

/* core.simulated_ns(): when all that is enqueued would end on the simulated machine; 0 on others.
 */
static int simulated_ns(lua_State *L)
{
    lua_pushnumber(L, ms_engine_simulated_ns(ms_lua_enter_inside(L)));
    return 1;
}

/* core.device() -> the name of the engine's device, or "meta" where new tensors are made there.
 * Planners and libraries ask it as well, hence enter_inside. */
static int device(lua_State *L)
{
    ms_engine *engine = ms_lua_enter_inside(L);
    lua_pushstring(L, ms_engine_makes_meta(engine) ? "meta" : ms_engine_device(engine));
    return 1;
}

/* core.is_sim() -> whether the engine's tensors have no values. Library code that would read values
 * must ask this first: on such a device a read gives zeros. */
static int is_sim(lua_State *L)
{
    lua_pushboolean(L, ms_engine_is_sim(ms_lua_enter_inside(L)));
    return 1;
}

/* core.in_hook() -> whether a hook runs, in which nothing may block. Futures ask it to decide
 * whether a callback may run now or must wait for the hook's end. */
static int in_hook(lua_State *L)
{
    lua_pushboolean(L, ms_lua_runtime(L)->hook_depth > 0);
    return 1;
}

enum { BENCH_PIECE = 500 }; /* tasks; a stream's ring holds more */

/* A task that does nothing, with the arguments and accesses of a usual one. It is what remains of
 * an operator if the kernel costs nothing. */
static ms_task_result nothing(ms_run *run, void *arguments)
{
    (void)run;
    (void)arguments;
    return MS_TASK_DONE;
}

/* Enqueues `count` tasks, in pieces that fit into the ring, so that enqueueing is measured and not
 * waiting for room. *spent: nanoseconds of the host. The time of ms_stream_sync is left out for the
 * same reason. */
static ms_status enqueue_many(ms_stream *stream, const ms_access *accesses, uint32_t access_count,
                              int64_t count, uint64_t *spent)
{
    static const ms_task task = { .name = "nothing", .function = nothing, .args_bytes = 64 };
    const ms_os *os = ms_os_posix();
    char arguments[64] = { 0 };
    ms_status status = MS_OK;
    for (int64_t done = 0; done < count && !status; done += BENCH_PIECE) {
        uint64_t start = os->monotonic_ns(os->user);
        for (int i = 0; i < BENCH_PIECE && !status; i++)
            status = ms_stream_enqueue(stream, &task, arguments, accesses, access_count,
                                       (ms_task_cost){ 0 }, NULL);
        *spent += os->monotonic_ns(os->user) - start;
        if (!status) status = ms_stream_sync(stream);
    }
    return status;
}

/* core.bench_enqueue(count) -> nanoseconds that enqueueing one task with three storages takes the
 * host. Three storages are what a binary operator has: two that are read and one that is written.
 * The first is the written one. count is rounded up to whole pieces. `moonshard bench enqueue`
 * prints it. */
static int bench_enqueue(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    int64_t count = ms_lua_integer(L, 1, 1, 100000000, "count");
    count = (count + BENCH_PIECE - 1) / BENCH_PIECE * BENCH_PIECE;
    ms_stream *stream = ms_engine_current(engine);
    ms_storage *storages[3] = { NULL };
    ms_access accesses[3];
    ms_status status = MS_OK;
    uint64_t spent = 0;
    for (int i = 0; i < 3 && !status; i++) status = ms_storage_new(stream, 64, &storages[i]);
    for (int i = 0; i < 3; i++)
        accesses[i] =
            (ms_access){ .storage = storages[i], .cells = 1, .mode = i ? MS_READ : MS_WRITE };
    if (!status) status = enqueue_many(stream, accesses, 3, count, &spent);
    /* After an error as well: those that were not made are NULL. */
    for (int i = 0; i < 3; i++) ms_storage_release(storages[i]);
    ms_lua_ok(L, status);
    lua_pushnumber(L, (double)spent / (double)count);
    return 1;
}

/* core.version is a text, so a script can compare it without a call. */
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
        { "simulated_ns", simulated_ns },
        { "device", device },
        { "is_sim", is_sim },
        { "in_hook", in_hook },
        { "bench_enqueue", bench_enqueue },
        { NULL, NULL },
    };
    ms_lua_register(L, runtime, functions);
    lua_pushstring(L, MS_VERSION);
    lua_setfield(L, -2, "version");
}
