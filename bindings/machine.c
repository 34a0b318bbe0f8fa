/* machine.c: what the machine has, and what the engine uses of it. */
#include "bindings/machine.h"

#include <string.h>

#include "bindings/enter.h"
#include "bindings/fields.h"
#include "bindings/job_join.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/moonshard_lua.h"

/* Adds "eth0 10.0.0.7" to the list on top of the stack. */
static void add_interface(void *to, const char *interface, const char *address)
{
    lua_State *L = to;
    lua_pushfstring(L, "%s %s", interface, address);
    lua_rawseti(L, -2, (lua_Integer)lua_rawlen(L, -2) + 1);
}

/* Sets devices = { "cpu", "cuda" }, gpus = a list of { name, major, minor, multiprocessors,
 * memory_bytes }, gpu_driver, the version of CUDA that the driver is for, or why there is none,
 * and, where there are GPUs, gpu_blas and gpu_dnn, the libraries of products and of attention or
 * why they cannot be used. The driver is asked only where the system shows a GPU, or a driver was
 * named, since a process that has asked must not fork. */
static void push_devices(lua_State *L)
{
    enum { SHOWN = 64 };
    ms_gpu gpus[SHOWN];
    ms_error error;
    uint32_t count = 0, driver = 0;
    const ms_os *os = ms_os_posix();
    bool asks = ms_has_gpu(os) || os->environment(os->user, "MOONSHARD_CUDA_DRIVER");
    ms_status status = asks ? ms_gpus(os, gpus, SHOWN, &count, &driver, &error) : MS_OK;
    lua_createtable(L, 2, 0);
    lua_pushstring(L, "cpu");
    lua_rawseti(L, -2, 1);
    if (count > 0 && !status) {
        lua_pushstring(L, "cuda");
        lua_rawseti(L, -2, 2);
    }
    lua_setfield(L, -2, "devices");
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count && i < SHOWN && !status; i++) {
        lua_createtable(L, 0, 8);
        ms_lua_set_string(L, "name", gpus[i].name);
        ms_lua_set_string(L, "pci", gpus[i].pci);
        if (gpus[i].node >= 0) ms_lua_set_integer(L, "node", gpus[i].node);
        lua_pushboolean(L, gpus[i].is_slice);
        lua_setfield(L, -2, "slice");
        ms_lua_set_integer(L, "major", gpus[i].major);
        ms_lua_set_integer(L, "minor", gpus[i].minor);
        ms_lua_set_integer(L, "multiprocessors", gpus[i].multiprocessors);
        ms_lua_set_integer(L, "memory_bytes", (lua_Integer)gpus[i].memory_bytes);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    lua_setfield(L, -2, "gpus");
    if (status) lua_pushstring(L, error.message);
    else if (asks) lua_pushfstring(L, "CUDA %d.%d", (int)driver / 1000, (int)driver % 1000 / 10);
    else lua_pushstring(L, "this machine shows no GPU of NVIDIA");
    lua_setfield(L, -2, "gpu_driver");
    if (count == 0) return;
    char text[1200];
    (void)ms_gpu_blas(os, text, sizeof text);
    ms_lua_set_string(L, "gpu_blas", text);
    (void)ms_gpu_dnn(os, text, sizeof text);
    ms_lua_set_string(L, "gpu_dnn", text);
}

/* core.has_gpu() -> whether the system shows a GPU of NVIDIA; the driver is not asked. */
static int has_gpu(lua_State *L)
{
    lua_pushboolean(L, ms_has_gpu(NULL));
    return 1;
}

/* core.gpu_nccl() -> the NCCL that ranks on GPUs would use, with its path, or why there is none. It
 * is large, and core.info does not load it to be asked. */
static int gpu_nccl(lua_State *L)
{
    char text[1200];
    (void)ms_gpu_nccl(NULL, text, sizeof text);
    lua_pushstring(L, text);
    return 1;
}

/* graph = { graphs, launches, replayed, alone, why, differs }: see ms_engine_repeats. A text that
 * is
 * "" there is nil. */
static void push_graph(lua_State *L, const ms_engine *engine)
{
    ms_repeats repeats;
    ms_engine_repeats(engine, &repeats);
    const struct {
        const char *name;
        uint64_t count;
    } fields[] = { { "graphs", repeats.graphs },
                   { "launches", repeats.launches },
                   { "replayed", repeats.replayed },
                   { "alone", repeats.alone } };
    const char *const texts[][2] = { { "why", repeats.why }, { "differs", repeats.differs } };
    lua_createtable(L, 0, 6);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        lua_pushinteger(L, (lua_Integer)fields[i].count);
        lua_setfield(L, -2, fields[i].name);
    }
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (!*texts[i][1]) continue;
        lua_pushstring(L, texts[i][1]);
        lua_setfield(L, -2, texts[i][0]);
    }
    lua_setfield(L, -2, "graph");
}

/* attention = { cudnn, fast, own, refused }: how many tasks of attention a GPU got, and whose
 * kernels they are; fast: those of cuDNN that add up in no certain order; refused: see
 * ms_attention_counts. */
static void push_attention(lua_State *L, const ms_engine *engine)
{
    ms_attention_counts counts = ms_engine_attention_counts(engine);
    if (strcmp(ms_engine_device(engine), "cuda") != 0) return;
    lua_createtable(L, 0, 4);
    ms_lua_set_integer(L, "cudnn", (lua_Integer)counts.cudnn);
    ms_lua_set_integer(L, "fast", (lua_Integer)counts.fast);
    ms_lua_set_integer(L, "own", (lua_Integer)counts.own);
    ms_lua_set_integer(L, "refused", (lua_Integer)counts.refused);
    lua_setfield(L, -2, "attention");
}

/* gpu = the place in `gpus` of the one on which this engine computes. */
static void push_gpu(lua_State *L, const ms_engine *engine)
{
    if (strcmp(ms_engine_device(engine), "cuda") != 0) return;
    ms_lua_set_integer(L, "gpu", (lua_Integer)ms_engine_device_index(engine) + 1);
}

/* core.info() -> what the machine has, and what the engine uses of it. The machine is asked again
 * in each call, through the table of the system. mpi: the modules for MPIs that are there, or
 * false. NCCL is large, so it is not loaded to be asked for its version. */
static int info(lua_State *L)
{
    ms_engine *engine = ms_lua_enter_inside(L);
    const ms_os *os = ms_os_posix();
    ms_machine machine = { .cores = 0 };
    int failed = os->machine(os->user, &machine);
    if (failed) return ms_lua_error(L, "info: the machine's description cannot be read");
    lua_createtable(L, 0, 16);
    ms_lua_set_string(L, "cpu", machine.cpu);
    ms_lua_set_integer(L, "cores", machine.cores);
    ms_lua_set_integer(L, "threads", ms_engine_threads(engine));
    ms_lua_set_integer(L, "memory_bytes", (lua_Integer)machine.memory_bytes);
    ms_lua_set_string(L, "kernels", ms_isa_name(ms_engine_isa(engine)));
    ms_lua_set_string(L, "blas", ms_engine_blas());
    ms_lua_set_string(L, "blas_isa", ms_engine_is_sim(engine) ? "" : ms_engine_blas_isa(engine));
    ms_lua_set_string(L, "device", ms_engine_device(engine));
    push_devices(L);
    push_gpu(L, engine);
    push_attention(L, engine);
    push_graph(L, engine);
    if (ms_engine_memory_beside(engine))
        ms_lua_set_integer(L, "memory_beside", (lua_Integer)ms_engine_memory_beside(engine));
    /* A machine without a network, or that does not say, has none. */
    lua_newtable(L);
    (void)os->addresses(os->user, add_interface, L);
    lua_setfield(L, -2, "interfaces");
    ms_lua_push_modules(L);
    lua_setfield(L, -2, "mpi");
    ms_lua_set_string(L, "nccl", "2.28 or later, loaded when it is asked for");
    ms_lua_set_string(L, "lua", LUA_RELEASE);
    lua_pushboolean(L, ms_lua_runtime(L)->settings.tf32
                           && strcmp(ms_engine_device(engine), "cuda") == 0);
    lua_setfield(L, -2, "tf32");
    ms_lua_set_string(L, "version", MS_VERSION);
    return 1;
}

/* core.default_paths() -> where Lua looks for modules in Lua and in C, unless variables of the
 * environment (LUA_PATH, LUA_CPATH) say otherwise. */
static int default_paths(lua_State *L)
{
    lua_pushliteral(L, LUA_PATH_DEFAULT);
    lua_pushliteral(L, LUA_CPATH_DEFAULT);
    return 2;
}

void ms_open_machine(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = {
        { "info", info },         { "has_gpu", has_gpu },
        { "gpu_nccl", gpu_nccl }, { "default_paths", default_paths },
        { NULL, NULL },
    };
    ms_lua_register(L, runtime, functions);
}
