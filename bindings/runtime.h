/* runtime.h: what every binding uses: the runtime of one Lua state, tensor handles, arguments,
 * errors, calls into Lua. Its files call downwards in this order: module, the bindings, runtime,
 * arguments and call, script.
 *
 * Rules of every bound function
 * - Three phases: (1) read and check all arguments (may raise; holds nothing); (2) engine calls,
 *   which never touch Lua; (3) push results. What is owned across a call that may raise is in a
 *   userdata that was made before, empty.
 * - The runtime is upvalue 1 of every bound function. One Lua state belongs to one host thread.
 * - The engine reaches Lua functions through call.c only, protected; a plain lua_call stands only
 *   in functions that already run below it or below Lua itself (a metamethod, the trampoline of a
 *   hook). A callback's error is kept, turned into MS_ERROR_SCRIPT for the engine, and raised again
 *   by the bound function that had called the engine.
 * - __gc never blocks, enqueues or fails: it hands the tensor to the runtime's list of dropped
 *   ones. Those are released at fixed points only (ms_lua_collect, the end of their step), so what
 *   is free when does not depend on the collector's pace.
 * - User text reaches messages only as an argument of %s. */
#ifndef MOONSHARD_BINDINGS_RUNTIME_H
#define MOONSHARD_BINDINGS_RUNTIME_H

#include <lauxlib.h>
#include <lua.h>
#include <pthread.h>
#include <stdatomic.h>

#include "moonshard/control.h"
#include "moonshard/grad.h"

#define MS_HANDLE_MAGIC 0x4d53544eu
#define MS_TENSOR_TYPE "ms.Tensor"

typedef struct ms_runtime ms_runtime;

/* A Lua tensor. tensor is NULL once it was released: by its step's end, or because its owner took
 * it back. */
typedef struct ms_handle {
    uint32_t magic;
    bool kept; /* survives the end of its step */
    /* A future holds it, so it survives as well, and is in no list. spent: its value was taken, and
     * it is in the list of those that the end of this step releases. */
    bool held, spent;
    bool parameter;
    const char *gone; /* static text: why tensor is NULL */
    ms_tensor *tensor;
    ms_runtime *runtime;
    uint64_t step;   /* serial number of the step that made it; 0: outside */
    uint64_t order;  /* counts all handles from 1 */
    uint32_t script; /* line that made it */
    /* Of those that are neither kept nor held, the latest first; or of those that are spent. */
    struct ms_handle *previous, *next;
} ms_handle;

/* A tensor whose handle was finalized or closed. It waits for the next fixed point, so that memory
 * comes back at moments that do not depend on the collector. */
typedef struct ms_dropped {
    ms_tensor *tensor;
    uint64_t step, order;
} ms_dropped;

/* The runtime of one Lua state: a userdata that is upvalue 1 of every bound function. Only its
 * owner thread touches it, apart from waiting_line. */
struct ms_runtime {
    ms_context context; /* for what happens before there is an engine */
    lua_State *main;
    /* State of the log line that another thread leaves here: 0 none, 1 being written, 2
     * complete. */
    _Atomic uint32_t waiting_line;
    char waiting_text[MS_ERROR_MESSAGE_BYTES];
    ms_engine *engine;          /* NULL until first use */
    ms_engine_options settings; /* of the launcher or ms.init; strings live in settings_text */
    char device_text[16], cpu_text[16], transport_text[16];
    ms_rates rates; /* if the settings have any */
    /* Rendezvous of this host's ranks; NULL: the environment may name one. */
    struct ms_rendezvous *rendezvous;
    /* Before it is released; NULL: nothing. Set where ms.init has joined a job over hosts. */
    void (*leave)(ms_runtime *runtime);
    bool is_thread;        /* all ranks of its job are threads of this process */
    bool share_gpu;        /* more ranks than GPUs may compute on them */
    bool near_gpu;         /* host threads run on the NUMA node of the GPU */
    bool has_slice;        /* of a GPU (MIG): the only one that this process sees */
    bool goes_by_host;     /* tensors travel through memory of the host, as ranks have slices */
    uint32_t gpu;          /* its number among those of the host's ranks */
    uint32_t shared_gpus;  /* how many GPUs more ranks share; 0: none */
    uint32_t rank;         /* in it, or in a fake world */
    uint32_t shown_script; /* the line that others see in this rank's activity */
    uint32_t fake_size;    /* of the fake world that the engine starts in, or 0 */
    bool fake_has_hosts;   /* its ranks are on these hosts */
    bool fake_by_ranks;    /* its sums are in the order of ranks */
    uint16_t fake_hosts[MS_LOCAL_RANKS_MAX];
    pthread_t owner;
    uint64_t step_serial;  /* of the current step, 0 outside */
    uint64_t step_count;   /* serials handed out */
    uint64_t step_serials; /* steps that a loop was about to begin */
    int64_t step;          /* number of the current or last step */
    uint32_t hook_depth;   /* inside hooks: no blocking, no backward, no whole optimizer step */
    bool planning;         /* inside a planner: numbers only */
    bool drain;            /* futures' callbacks wait for the hook to return */
    bool knows_end;        /* of its job: it was told, or has left the job itself */
    ms_handle *handles;    /* the latest that is neither kept nor held */
    ms_handle *spent;
    uint64_t orders; /* numbers handed out to handles */
    ms_dropped *dropped;
    size_t dropped_count, dropped_capacity, handle_count;
    /* Handles that no step ends, of those made since the last collection; all that were left then.
     */
    size_t lasting, handles_after;
    /* Memory that boxes hold outside of Lua (outside.c), now and after the last collection for its
     * sake; what several boxes share is counted once. */
    uint64_t outside_bytes, outside_after;
    uint64_t heap_after; /* bytes of Lua's own heap then */
    struct ms_shared_memory *shared;
    size_t shared_count, shared_capacity;
    /* Live bytes after the last backward; growth from there belongs to the next forward. */
    uint64_t live_after_backward;
    /* Live bytes when this pass' first bucket reached its links, or at the last collection after
     * that. */
    uint64_t live_before_links;
    int64_t callbacks; /* numbers handed out */
    uint64_t callbacks_freed;
    int64_t backwards;           /* calls of backward that succeeded */
    size_t library_prefix_bytes; /* chunk names of the library begin with library_prefix */
    char library_prefix[512];
    /* Cache of the script's lines that made calls before, indexed by hash. */
    struct {
        const char *source;
        int line;
        uint32_t id;
    } lines[64];
    int exit_code; /* of the command line, if the error in exit_message ends the run */
    char exit_message[MS_ERROR_MESSAGE_BYTES];
    bool closed;
};

/* ----------------------------------------------------------------- entering */

/* The runtime of a bound function; raises from a foreign thread. */
ms_runtime *ms_lua_runtime(lua_State *L);
/* Starts the engine if needed, collects under memory pressure, notes the script line. Raises the
 * cause of the job's end, once. First call of every function that uses the engine. */
ms_engine *ms_lua_enter(lua_State *L);
/* The same, but the script line stays what it is: for the library's calls on behalf of a line that
 * was noted already, and for what only reads facts of the engine, which planners may do as well. */
ms_engine *ms_lua_enter_inside(lua_State *L);
/* Whether the job of this rank has ended: one load, in the usual case. */
static inline bool ms_lua_job_has_ended(const ms_runtime *runtime)
{
    ms_abort_record cause;
    return runtime->rendezvous && ms_rendezvous_cause(runtime->rendezvous, &cause);
}
/* A full collection, and release of all dropped tensors: a fixed point. */
void ms_lua_collect(lua_State *L, ms_runtime *runtime);
/* Bytes of Lua's own heap: what a full collection goes through. */
uint64_t ms_lua_heap(lua_State *L);
/* The same if live memory is well above `live` bytes; whether it was. */
bool ms_lua_collect_above(lua_State *L, ms_runtime *runtime, uint64_t live);
/* The engine's next draw, and one that is this rank's own (rank 0's is the engine's): for what is
 * to differ between ranks. */
ms_random ms_lua_own_draw(lua_State *L);
/* The seed of one rank, from the seed that all ranks share. */
static inline uint64_t ms_seed_of_rank(uint64_t seed, uint32_t rank)
{
    return seed ^ rank * 0x9e3779b97f4a7c15ull;
}
/* Raises "<what> inside a hook ..." while hooks run. */
void ms_lua_refuse_in_hook(lua_State *L, const char *what, const char *instead);

/* ------------------------------------------------------------------- errors */

/* Raises the engine's last error if status is not MS_OK, with the user's line in front; a
 * callback's error as it was. */
void ms_lua_ok(lua_State *L, ms_status status);
/* What the command line exits with if this error ends the run: memory 8, data and files 3. */
void ms_lua_note_exit(ms_runtime *runtime, const ms_error *error);
/* Whether the error message is, or contains, the one that was noted last. */
bool ms_lua_is_noted(const ms_runtime *runtime, const char *message);
/* For what the environment can refuse: pushes nil, message, code and returns 3; programmer's
 * mistakes are raised. */
int ms_lua_failed(lua_State *L, const ms_error *error);
/* Raises with the user's line in front, the first one outside the library; without one if there is
 * none. */
int ms_lua_error(lua_State *L, const char *format, ...) MS_PRINTF(2, 3);
/* The user's line "file:12" into text; "" if there is none. */
void ms_lua_line(lua_State *L, char *text, size_t bytes);
/* The same, searched from that level of the call stack on. */
void ms_lua_line_at(lua_State *L, const ms_runtime *runtime, int level, char *text, size_t bytes);
/* The user's line as a string of the engine; 0: there is none. */
uint32_t ms_lua_script(lua_State *L, ms_runtime *runtime);

/* ---------------------------------------------------------------- arguments */

ms_handle *ms_lua_handle(lua_State *L, int index); /* raises unless it is a live tensor */
ms_tensor *ms_lua_tensor(lua_State *L, int index);
ms_tensor *ms_lua_optional_tensor(lua_State *L, int index); /* NULL for nil or none */
bool ms_lua_is_tensor(lua_State *L, int index);
/* An integer in low .. high; `what` names it in the error. */
int64_t ms_lua_integer(lua_State *L, int index, int64_t low, int64_t high, const char *what);
/* A dimension from 1 or from the end, as 0-based; dims of the tensor. */
int32_t ms_lua_dim(lua_State *L, int index, uint32_t dims);
/* To be called before an error about the shape of argument 1. If that argument is a rank's piece of
 * a sharded parameter, this raises the error that says so: a piece's shape follows from the
 * sharding, so an error about the shape would not name the cause. */
void ms_lua_need_whole(lua_State *L);
ms_dtype ms_lua_dtype(lua_State *L, int index);
/* One of a NULL-ended list; raises and names the nearest. */
int ms_lua_choice(lua_State *L, int index, const char *const choices[], const char *what);
/* Raises if the table has a string key outside the NULL-ended list, and names the nearest. */
void ms_lua_known_keys(lua_State *L, int index, const char *const names[], const char *what);
/* Field of an options table (nil or none: fallback). */
double ms_lua_field_number(lua_State *L, int table, const char *name, double fallback);
int64_t ms_lua_field_integer(lua_State *L, int table, const char *name, int64_t fallback,
                             int64_t low, int64_t high);
bool ms_lua_field_boolean(lua_State *L, int table, const char *name, bool fallback);
/* The speeds of the simulated machine, from a table; raises and names the field that is wrong. */
void ms_lua_rates(lua_State *L, int index, ms_rates *out);
/* A list of integers on the stack at index (a table, or the arguments from index to the top) into
 * sizes; returns the count. */
uint32_t ms_lua_sizes(lua_State *L, int index, int64_t *sizes, const char *what);
/* The name of `names` nearest to `given`, or NULL if none is near. */
const char *ms_lua_nearest(const char *given, const char *const names[]);
/* What reading a field that the table of methods at `methods` lacks (a positive index or an
 * upvalue's) gives: the method, if a module of the library adds it and was not loaded yet; no value
 * (0) for keys that are no names, or begin with __, which tools probe. Else it raises, and names
 * the nearest method. */
int ms_lua_no_field(lua_State *L, int key, int methods, const char *what);
/* A list of tensors: pushes a userdata that holds borrowed pointers (the table keeps them
 * alive). */
ms_tensor **ms_lua_tensor_list(lua_State *L, int index, uint32_t *count);

/* ------------------------------------------------------------------ results */

/* Write a field of the table on top of the stack. string NULL: nil. set_ms: nanoseconds as
 * milliseconds. */
void ms_lua_set_string(lua_State *L, const char *name, const char *value);
void ms_lua_set_integer(lua_State *L, const char *name, int64_t value);
void ms_lua_set_number(lua_State *L, const char *name, double value);
void ms_lua_set_boolean(lua_State *L, const char *name, bool value);
void ms_lua_set_ms(lua_State *L, const char *name, uint64_t ns);
/* Pushes a stream, which the engine owns. */
int ms_lua_push_stream(lua_State *L, ms_stream *stream);
/* Pushes an empty handle; fill it in phase 3 with ms_handle_fill, which takes the reference over
 * and cannot fail. */
ms_handle *ms_lua_new_handle(lua_State *L);
void ms_handle_fill(ms_handle *handle, ms_tensor *owned);
/* Marks it as kept: it outlives its step. */
void ms_handle_keep(ms_handle *handle);
/* hold: a future holds it, until the end of the step in which its value is taken (spend), unless it
 * is kept. */
void ms_handle_hold(ms_handle *handle);
void ms_handle_spend(ms_handle *handle);
void ms_handle_drop(ms_handle *handle, const char *why); /* releases now; why: static text */

/* How many handles have been made, and the end of those that were made from `begin` to `end`, but
 * for kept ones: as at a step's end. Scripts may still have the handles. why: static text. */
uint64_t ms_handle_count(const ms_runtime *runtime);
void ms_handles_drop(ms_runtime *runtime, uint64_t begin, uint64_t end, const char *why);

/* ----------------------------------------------------------- calls into Lua */

/* Once for each Lua state, before the first call. */
void ms_lua_open_calls(lua_State *L);
/* Calls the function below its `arguments` on the stack, protected. On MS_ERROR_SCRIPT the stack is
 * as before the function was pushed, the error is kept for ms_lua_ok, and the engine's error has
 * its first line. */
ms_status ms_lua_call(lua_State *L, ms_runtime *runtime, int arguments, int results);
/* The same for a hook: blocking calls are refused in it, and when the outermost has returned the
 * callbacks of futures run. results >= 0. */
ms_status ms_lua_hook(lua_State *L, ms_runtime *runtime, int arguments, int results);
void ms_lua_set_drain(lua_State *L, int index);
/* Pushes the traceback of the last error that ms_lua_call met if the value at index is that error;
 * else false. */
bool ms_lua_traceback(lua_State *L, int index);

/* A Lua function that the engine calls. anchor: stack index of a userdata (with a user value) whose
 * life it shares, so that a function that refers to it is no leak; 0: it lives until freed. */
typedef struct ms_callback {
    lua_State *L;
    ms_runtime *runtime;
    int reference;
    int64_t number;
} ms_callback;
ms_callback *ms_callback_new(lua_State *L, int index, int anchor); /* raises on out of memory */
void ms_callback_free(void *callback);
/* The anchor need not keep the function any longer. */
void ms_callback_forget(lua_State *L, int anchor, int index);
bool ms_callback_push(const ms_callback *callback); /* false, nothing pushed: its anchor is gone */

/* ------------------------------------------------------ parts of the module */

/* Pushes a new runtime without an engine. module.c makes one for each Lua state. */
ms_runtime *ms_lua_new_runtime(lua_State *L);
/* Each adds its functions to the module table on top of the stack; the runtime is at index
 * `runtime`. module.c lists them all. */
void ms_open_steps(lua_State *L, int runtime);
void ms_open_tensor(lua_State *L, int runtime);
void ms_open_make(lua_State *L, int runtime);
void ms_open_initial(lua_State *L, int runtime);
void ms_open_operators(lua_State *L, int runtime);
void ms_open_grad(lua_State *L, int runtime);
void ms_open_engine(lua_State *L, int runtime);
void ms_open_products(lua_State *L, int runtime);
void ms_open_stream(lua_State *L, int runtime);
void ms_open_codec(lua_State *L, int runtime);
void ms_open_group(lua_State *L, int runtime);
void ms_open_bucket(lua_State *L, int runtime);
void ms_open_link(lua_State *L, int runtime);
void ms_open_ddp(lua_State *L, int runtime);
void ms_open_fsdp(lua_State *L, int runtime);
void ms_open_job(lua_State *L, int runtime);
void ms_open_hosts(lua_State *L, int runtime);
/* Pushes the names of the modules for MPIs beside the engine, as text, or false. */
void ms_lua_push_modules(lua_State *L);
void ms_open_optim(lua_State *L, int runtime);
void ms_open_io(lua_State *L, int runtime);
void ms_open_json(lua_State *L, int runtime);
void ms_open_safetensors(lua_State *L, int runtime);
void ms_open_dataset(lua_State *L, int runtime);
void ms_open_tokenizer(lua_State *L, int runtime);
void ms_open_checkpoint(lua_State *L, int runtime);
/* Registers functions with the runtime as their upvalue in the table on top. */
void ms_lua_register(lua_State *L, int runtime, const luaL_Reg *functions);
/* Makes a metatable with locked __metatable, methods under __index, and the runtime as upvalue;
 * leaves the methods table on the stack. */
void ms_lua_type(lua_State *L, int runtime, const char *name, const luaL_Reg *metamethods,
                 const luaL_Reg *methods);

/* The module's open function, for package.preload and require "moonshard.core". */
int luaopen_moonshard_core(lua_State *L);

#endif
