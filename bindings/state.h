/* state.h: what every binding uses: the runtime of one Lua state, tensor handles, arguments,
 * errors, calls into Lua. Its files call downwards in this order: module.c, the bindings, enter.c,
 * runtime.c, handles.c and placement.c, arguments.c, call.c, script.c.
 *
 * Rules of every bound function
 * - Three phases: (1) read and check all arguments (may raise; holds nothing); (2) engine calls,
 *   which never touch Lua; (3) push results. What is owned across a call that may raise is in a
 *   userdata that was made before, empty.
 * - The runtime is upvalue 1 of every bound function. One Lua state belongs to one host thread.
 * - The engine reaches Lua functions through call.c only, protected; a plain lua_call is only
 *   in functions that already run below it or below Lua itself (a metamethod, the trampoline of a
 *   hook). A callback's error is kept, turned into MS_ERROR_SCRIPT for the engine, and raised again
 *   by the bound function that had called the engine.
 * - __gc never blocks, enqueues or fails: it hands the tensor to the runtime's list of dropped
 *   ones. Those are released at fixed points only (ms_lua_collect, the end of their step), so what
 *   is free when does not depend on the collector's pace.
 * - User text reaches messages only as an argument of %s. */
#ifndef MOONSHARD_BINDINGS_STATE_H
#define MOONSHARD_BINDINGS_STATE_H

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

/* The job that this Lua state is a rank of. */
typedef struct ms_lua_membership {
    /* Rendezvous of this node's ranks; NULL: the environment may name one. */
    struct ms_rendezvous *rendezvous;
    /* Before it is released; NULL: nothing. Set where ms.init has joined a job over nodes. */
    void (*leave)(ms_runtime *runtime);
    uint32_t rank;  /* in it, or in a fake world */
    bool is_thread; /* all ranks of the job are threads of this process */
    bool knows_end; /* of the job: it was told, or has left the job itself */
} ms_lua_membership;

/* The fake world that the engine starts in. */
typedef struct ms_lua_fake_world {
    uint32_t size;  /* or 0: there is none */
    bool has_nodes; /* its ranks are on these nodes */
    bool by_ranks;  /* its sums are in the order of ranks */
    uint16_t nodes[MS_LOCAL_RANKS_MAX];
} ms_lua_fake_world;

/* On which GPU, and where, this rank computes: placement.c. */
typedef struct ms_lua_placement {
    bool share_gpu;       /* more ranks than GPUs may compute on them */
    bool near_gpu;        /* host threads run on the NUMA node of the GPU */
    bool has_slice;       /* of a GPU (MIG): the only one that this process sees */
    bool goes_by_host;    /* tensors travel through memory of the host, as ranks have slices */
    uint32_t gpu;         /* its number among those of the node's ranks */
    uint32_t shared_gpus; /* how many GPUs more ranks share; 0: none */
} ms_lua_placement;

/* Steps of the training loop: steps.c. */
typedef struct ms_lua_steps {
    uint64_t serial;    /* of the current step, 0 outside */
    uint64_t count;     /* serials handed out */
    uint64_t announced; /* steps that a loop was about to begin */
    int64_t number;     /* of the current or last step */
} ms_lua_steps;

/* Handles of tensors: handles.c. */
typedef struct ms_lua_handles {
    ms_handle *latest; /* that is neither kept nor held */
    ms_handle *spent;
    uint64_t orders; /* numbers handed out to handles */
    ms_dropped *dropped;
    size_t dropped_count, dropped_capacity, count;
    /* Handles that no step ends, of those made since the last collection; all that were left then.
     */
    size_t lasting, after;
} ms_lua_handles;

/* When to collect. */
typedef struct ms_lua_memory {
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
} ms_lua_memory;

/* How the command line ends, if the error in `message` ends the run. refused_at: the user's line
 * that got nil and this message; empty: the message was raised. */
typedef struct ms_lua_exit {
    int code;
    char message[MS_ERROR_MESSAGE_BYTES];
    char refused_at[160];
} ms_lua_exit;

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
    ms_lua_membership job;
    ms_lua_fake_world fake;
    ms_lua_placement placement;
    uint32_t shown_script; /* the line that others see in this rank's activity */
    pthread_t owner;
    ms_lua_steps steps;
    uint32_t hook_depth; /* inside hooks: no blocking, no backward, no whole optimizer step */
    bool planning;       /* inside a planner: numbers only */
    bool drain;          /* futures' callbacks wait for the hook to return */
    ms_lua_handles alive;
    ms_lua_memory memory;
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
    ms_lua_exit exit;
    bool closed;
};

/* ----------------------------------------------------------------- entering */

/* Whether the job of this rank has ended: one load, in the usual case. */
static inline bool ms_lua_job_has_ended(const ms_runtime *runtime)
{
    ms_abort_record cause;
    return runtime->job.rendezvous && ms_rendezvous_cause(runtime->job.rendezvous, &cause);
}
/* A finalizer runs in the middle of whatever allocates, so what it enqueued or released would
 * depend on the collector's pace, and could be what a bound function below it is working on. Lua
 * answers no question about its collector there: lua_gc answers -1. */
static inline bool ms_lua_in_finalizer(lua_State *L) { return lua_gc(L, LUA_GCCOUNT) < 0; }
/* The seed of one rank, from the seed that all ranks share. */
static inline uint64_t ms_seed_of_rank(uint64_t seed, uint32_t rank)
{
    return seed ^ rank * 0x9e3779b97f4a7c15ull;
}
/* ------------------------------------------------------------------- errors */

/* ---------------------------------------------------------------- arguments */

/* ------------------------------------------------------------------ results */

/* ----------------------------------------------------------- calls into Lua */

/* A Lua function that the engine calls. anchor: stack index of a userdata (with a user value) whose
 * life it shares, so that a function that refers to it is no leak; 0: it lives until freed. */
typedef struct ms_callback {
    lua_State *L;
    ms_runtime *runtime;
    int reference;
    int64_t number;
    struct ms_loan *loan; /* what holds the function instead, or NULL */
} ms_callback;
/* ------------------------------------------------------ parts of the module */

#endif
