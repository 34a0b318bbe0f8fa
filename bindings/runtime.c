/* runtime.c: the runtime of one Lua state: its engine, its tensor handles, and the fixed points at
 * which memory comes back. */
#include "bindings/runtime.h"

#include <stdio.h>
#include <string.h>

#include "bindings/adopt.h"
#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/script.h"
#include "moonshard/comm.h"
#include "moonshard/hook.h"
#include "moonshard/cluster.h"

/* ----------------------------------------------------------------- entering */

/* Ranks that share a GPU exchange tensors by the transport local. NCCL takes a second rank on a GPU
 * for a mistake, unless each process says that it is a node of its own. */
static void share_gpu(lua_State *L, ms_runtime *runtime, uint32_t here, uint32_t gpus)
{
    const ms_os *os = runtime->context.os;
    /* The first is for each process; the second is known to NCCL 2.30 and later. */
    const char *own = os->environment(os->user, "NCCL_HOSTID"),
               *several = os->environment(os->user, "NCCL_MULTI_RANK_GPU_ENABLE");
    bool is_ready = (own && *own) || (several && strcmp(several, "1") == 0);
    uint32_t gpu = runtime->gpu;
    if (here < ms_rendezvous_ranks(runtime->rendezvous))
        ms_lua_error(L, "moonshard could not start: --share-gpu: ranks of several hosts exchange "
                        "tensors by NCCL, which needs a GPU for each rank: start as many ranks as "
                        "there are GPUs on each host");
    if (strcmp(runtime->transport_text, "nccl") == 0 && !is_ready)
        ms_lua_error(L, "moonshard could not start: --share-gpu: NCCL takes one rank a GPU: leave "
                        "MOONSHARD_TRANSPORT unset (ranks then exchange tensors through memory of "
                        "the host), start each process with another NCCL_HOSTID, or set "
                        "NCCL_MULTI_RANK_GPU_ENABLE=1 for NCCL 2.30 or later");
    if (!*runtime->transport_text) strcpy(runtime->transport_text, "local");
    runtime->settings.sharers = (here - gpu + gpus - 1) / gpus;
    runtime->shared_gpus = gpus;
}

/* More ranks than GPUs. */
static void refuse_ranks(lua_State *L, uint32_t here, uint32_t gpus, const char *shown)
{
    ms_lua_error(L,
                 "moonshard could not start: %d ranks on this host and %d GPU%s (%s%s): each rank "
                 "needs a GPU of its own: start %d rank%s here, show more GPUs, or let ranks share "
                 "them (--share-gpu)",
                 (int)here, (int)gpus, gpus == 1 ? "" : "s",
                 shown ? "CUDA_VISIBLE_DEVICES=" : "CUDA_VISIBLE_DEVICES is not set",
                 shown ? shown : "", (int)gpus, gpus == 1 ? "" : "s");
}

/* Of several slices (MIG) that are named to a process, it sees the first. */
static void refuse_slices(lua_State *L, uint32_t here, const char *shown)
{
    ms_lua_error(
        L,
        "moonshard could not start: %d ranks on this host, each of which sees the first "
        "slice (MIG) of CUDA_VISIBLE_DEVICES=%s alone: let `moonshard run -n %d` start them "
        "as processes, which get a slice each, or set the variable to another slice for "
        "each rank",
        (int)here, shown, (int)here);
}

static bool are_slices(const ms_gpu *gpus, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (!gpus[i].is_slice) return false;
    return true;
}

#define GPUS_MOST 64
#define LASTING_MOST 4096 /* see has_many_lasting */

/* A rank computes on the GPU of its place on its node. More ranks than GPUs are an error that all
 * of them find, unless they may share them; a driver that cannot be asked is one when the engine
 * opens. A launcher that starts every process itself may show each of them another GPU, as its only
 * one; ours does so with slices (processes.c). Slices do not reach each other's memory, and NCCL
 * takes those of one GPU for that GPU, so ranks of one node use the transport local. */
static void choose_gpu(lua_State *L, ms_runtime *runtime)
{
    ms_error error;
    ms_launched launched;
    ms_gpu found[GPUS_MOST];
    uint32_t gpus = 0, driver = 0, here = 0;
    const ms_os *os = runtime->context.os;
    const char *name = runtime->settings.device,
               *shown = os->environment(os->user, "CUDA_VISIBLE_DEVICES"),
               *all = os->environment(os->user, MS_SLICES_VARIABLE);
    if (!name || strcmp(name, "cuda") != 0 || !runtime->rendezvous) return;
    uint32_t place = ms_rendezvous_place(runtime->rendezvous, runtime->rank, &here);
    if (here == 1 || ms_gpus(os, found, GPUS_MOST, &gpus, &driver, &error) || gpus == 0) return;
    bool is_launched = !ms_cluster_launched(&runtime->context, &launched) && *launched.name;
    bool is_slice = are_slices(found, gpus < GPUS_MOST ? gpus : GPUS_MOST);
    runtime->has_slice = gpus == 1 && is_slice && ms_mig_slices(all) > 1;
    if (gpus == 1 && ms_mig_slices(shown) > 1 && !runtime->share_gpu) refuse_slices(L, here, shown);
    if (gpus == 1 && is_launched && !runtime->has_slice && !runtime->share_gpu) return;
    if (runtime->has_slice) {
        gpus = ms_mig_slices(all);
        shown = all;
    } else runtime->settings.device_index = place % gpus;
    runtime->gpu = place % gpus;
    if (here > gpus && runtime->share_gpu) share_gpu(L, runtime, here, gpus);
    else if (here > gpus) refuse_ranks(L, here, gpus, shown);
    else if (is_slice && !*runtime->transport_text
             && here == ms_rendezvous_ranks(runtime->rendezvous)) {
        strcpy(runtime->transport_text, "local");
        runtime->goes_by_host = true;
    }
}

/* Whether all ranks are threads on one GPU. */
static bool shares_one_gpu(const ms_runtime *runtime)
{
    return runtime->is_thread && runtime->shared_gpus == 1;
}

/* The first of the ranks that share a GPU says so. On one node their places are their numbers. */
static void tell_sharers(const ms_runtime *runtime, ms_engine *engine)
{
    char ranks[128] = "";
    uint32_t gpu = runtime->gpu, gpus = runtime->shared_gpus;
    size_t used = 0;
    if (runtime->settings.sharers < 2 || runtime->rank != gpu) return;
    for (uint32_t r = gpu; r < gpu + runtime->settings.sharers * gpus && used < sizeof ranks;
         r += gpus)
        used += (size_t)snprintf(ranks + used, sizeof ranks - used, "%s%u", used ? ", " : "", r);
    ms_log(ms_engine_context(engine), MS_LOG_INFO,
           "ranks %s share GPU %u: rank %u may use %.1f GiB of it; their tensors %s", ranks, gpu,
           runtime->rank, (double)ms_engine_memory(engine).limit / (1 << 30),
           shares_one_gpu(runtime) ? "stay in its memory" : "travel through memory of the host");
}

/* This thread and those that it starts run on the NUMA node of the GPU. Memory that they touch
 * first is then the node's, pinned memory of the driver too. The launcher has left ranks that are
 * processes all cores where there are several nodes (processes.c); where the node of a rank's GPU
 * is not known, it takes the share that it would have got. Answers the node; -1: nothing to tell.
 */
static int32_t go_near(ms_runtime *runtime, uint32_t threads, ms_cores *cores)
{
    ms_gpu gpus[GPUS_MOST];
    ms_error error;
    ms_launched launched;
    ms_machine machine;
    uint32_t count = 0, driver = 0;
    const ms_os *os = runtime->context.os;
    const char *name = runtime->settings.device,
               *open = os->environment(os->user, MS_CORES_VARIABLE);
    bool is_open = open && *open && runtime->rendezvous;
    ms_gpu_rank rank = { .ranks = 1, .threads = threads };
    if (!runtime->near_gpu || !name || strcmp(name, "cuda") != 0 || !ms_has_numa_nodes(os))
        return -1;
    if (ms_gpus(os, gpus, GPUS_MOST, &count, &driver, &error)) count = 0;
    uint32_t place = 0, here = 1;
    if (runtime->rendezvous) place = ms_rendezvous_place(runtime->rendezvous, runtime->rank, &here);
    /* Where the slices of others are is not known: such a rank gets its node's cores undivided. */
    if (!runtime->has_slice) {
        rank.place = place;
        rank.ranks = here;
    }
    rank.is_placed =
        !is_open && !ms_cluster_launched(&runtime->context, &launched) && *launched.name;
    int32_t node = -1;
    if (count > 0 && count <= GPUS_MOST) node = ms_gpu_cores(os, gpus, count, rank, cores);
    if (node >= 0 && !os->keep_to(os->user, cores)) {
        if (!threads && runtime->settings.threads > ms_cores_count(cores))
            runtime->settings.threads = ms_cores_count(cores);
        return node;
    }
    if (!is_open || os->cores(os->user, cores) || os->machine(os->user, &machine)) return -1;
    if (machine.cores < ms_cores_count(cores)) return -1;
    *cores = ms_cores_share(cores, place, here);
    if (ms_cores_count(cores)) (void)os->keep_to(os->user, cores);
    return -1;
}

static void tell_slices(const ms_runtime *runtime, ms_engine *engine)
{
    if (runtime->goes_by_host && runtime->rank == 0)
        ms_log(ms_engine_context(engine), MS_LOG_INFO,
               "each rank has a slice of a GPU (MIG); tensors travel through memory of the host");
}

static void tell_node(const ms_runtime *runtime, ms_engine *engine, int32_t node,
                      const ms_cores *cores)
{
    char list[160];
    if (node < 0 || runtime->rank != 0) return;
    ms_cores_write(cores, list, sizeof list);
    ms_log(ms_engine_context(engine), MS_LOG_INFO,
           "host threads run on the NUMA node of their GPU: those of rank 0 on node %d, cores %s",
           (int)node, list);
}

/* What is missing (a driver, a library, memory, other ranks) decides the exit code, as it does for
 * errors of an engine that runs. */
static void could_not_start(lua_State *L, ms_runtime *runtime, const ms_error *error)
{
    ms_lua_note_exit(runtime, error);
    ms_lua_error(L, "moonshard could not start: %s", error->message);
}

static bool collect_when_full(void *user);

/* Starts the engine at first use, because its settings may come from ms.init. A rank joins its job
 * here. An error that happens here is copied before the engine is freed, since its text is the
 * engine's. */
static void start_engine(lua_State *L, ms_runtime *runtime)
{
    uint32_t threads = runtime->settings.threads;
    if (!runtime->rendezvous
        && ms_lua_adopt(&runtime->context, &runtime->rendezvous, &runtime->rank))
        could_not_start(L, runtime, &runtime->context.error);
    /* Ranks of one machine share its cores. */
    if (runtime->rendezvous && !runtime->settings.threads)
        runtime->settings.threads = ms_rendezvous_threads(runtime->rendezvous);
    runtime->settings.crowded = runtime->rendezvous && ms_rendezvous_crowded(runtime->rendezvous);
    choose_gpu(L, runtime);
    ms_cores cores;
    int32_t node = go_near(runtime, threads, &cores);
    ms_error error;
    ms_engine *engine = NULL;
    if (ms_engine_new(&runtime->settings, &error, &engine)) could_not_start(L, runtime, &error);
    ms_group *world = NULL;
    ms_status status = MS_OK;
    /* On the sim device, `check` reads the list of collectives. */
    if (runtime->fake_size) {
        ms_fake_world fake = { .rank = runtime->rank,
                               .size = runtime->fake_size,
                               .node_of = runtime->fake_has_nodes ? runtime->fake_nodes : NULL,
                               .sum_by_ranks = runtime->fake_by_ranks };
        status = ms_comm_open_fake_on(engine, &fake, &world);
        if (!status) ms_comm_record(engine, ms_engine_is_sim(engine));
    } else if (runtime->rendezvous) {
        ms_comm_options options = { .transport =
                                        *runtime->transport_text ? runtime->transport_text : NULL,
                                    .one_gpu = shares_one_gpu(runtime) };
        status = ms_comm_open_with(engine, runtime->rendezvous, runtime->rank, &options, &world);
    }
    if (status) {
        error = *ms_engine_error(engine);
        ms_engine_free(engine);
        could_not_start(L, runtime, &error);
    }
    runtime->engine = engine;
    ms_engine_on_full(engine, collect_when_full, runtime);
    tell_sharers(runtime, engine);
    tell_slices(runtime, engine);
    tell_node(runtime, engine, node, &cores);
}

/* A finalizer runs in the middle of whatever allocates, so what it enqueued or released would
 * depend on the collector's pace, and could be what a bound function below it is working on. Lua
 * answers no question about its collector there. lua_gc answers -1 while a finalizer runs. */
static bool in_finalizer(lua_State *L) { return lua_gc(L, LUA_GCCOUNT) < 0; }

/* Of what scripts keep and drop, tensors wait for a collection, also views, whose memory is
 * another's. The number depends on calls of the script alone, as memory pressure does. */
static bool has_many_lasting(const ms_runtime *runtime)
{
    size_t most = runtime->handles_after;
    return runtime->lasting > (most > LASTING_MOST ? most : LASTING_MOST);
}

/* May raise, so it runs before a bound function owns anything. Collecting under memory pressure
 * happens here, where C holds no tensor that Lua does not see. */
ms_engine *ms_lua_enter_inside(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    if (in_finalizer(L))
        ms_lua_error(L, "a finalizer (__gc) cannot use tensors: it runs at any moment; use "
                        "<close>, or call a function");
    if (!runtime->engine) start_engine(L, runtime);
    /* A log line that another thread has left; this is the state's own thread. */
    if (atomic_load_explicit(&runtime->waiting_line, memory_order_acquire) == 2) {
        lua_warning(L, runtime->waiting_text, 0);
        atomic_store(&runtime->waiting_line, 0);
    }
    if (ms_engine_under_pressure(runtime->engine) || has_many_lasting(runtime))
        ms_lua_collect(L, runtime);
    return runtime->engine;
}

/* Where a rank only computes, its calls are the only places where it can hear that its job has
 * ended. It hears that once, by an error; after it a script may use tensors to save what it has. */
static void hear_of_end(lua_State *L, ms_runtime *runtime)
{
    if (!ms_lua_job_has_ended(runtime)) return;
    runtime->knows_end = true;
    ms_lua_ok(L, ms_comm_check(runtime->engine));
}

/* Refused to planners, which all ranks must run with the same numbers and without effects. The
 * script line that is noted here goes into errors, traces and the rank's activity. */
ms_engine *ms_lua_enter(lua_State *L)
{
    if (ms_lua_runtime(L)->planning)
        ms_lua_error(L, "a planner uses numbers only, no tensors, streams or groups: plan from the "
                        "view and return a table");
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_engine *engine = ms_lua_enter_inside(L);
    uint32_t script = ms_lua_script(L, runtime);
    ms_engine_set_script(engine, script);
    /* The text is written only where the line is another one. */
    /* For the supervisor, which names this line if the rank shows no progress. */
    ms_activity *activity = ms_engine_context(engine)->activity;
    ms_activity_call(activity, activity && script && script != runtime->shown_script
                                   ? ms_strings_get(ms_engine_strings(engine), script)
                                   : NULL);
    runtime->shown_script = script;
    if (!runtime->knows_end) hear_of_end(L, runtime);
    return engine;
}

/* Releases the dropped tensors of that step (0: of any) that were made after `begin` and up to
 * `end`. The others stay in their order. The list is compacted in place: a release runs no Lua
 * code, so nothing is added to the list meanwhile. */
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

/* Bytes of Lua's own heap. After a full collection they depend on what scripts hold alone. */
uint64_t ms_lua_heap(lua_State *L) { return (uint64_t)lua_gc(L, LUA_GCCOUNT) * 1024u; }

/* Each round may free functions that held other tensors, which only the next collection finds. */
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
    /* The mark of memory pressure moves, whether or not much came back. */
    ms_engine_relieved(runtime->engine, ms_lua_heap(L));
    runtime->lasting = 0;
    runtime->handles_after = runtime->handle_count;
}

/* The pool asks for it when memory is used up, in the middle of a call, which a hook may have made
 * in the middle of another. Tensors that these calls work on stay: the handles are on their stacks,
 * or the engine holds references of its own. user: the runtime. */
static bool collect_when_full(void *user)
{
    ms_runtime *runtime = user;
    if (in_finalizer(runtime->main)) return false;
    ms_lua_collect(runtime->main, runtime);
    return true;
}

/* Every rank takes the draw, so that the draws of all ranks stay in step, and then changes the
 * seed. */
ms_random ms_lua_own_draw(lua_State *L)
{
    const ms_runtime *runtime = ms_lua_runtime(L);
    ms_random random = ms_engine_draw(runtime->engine);
    random.seed = ms_seed_of_rank(random.seed, runtime->rank);
    return random;
}

/* It compares with the live bytes of an earlier moment and not with a fixed limit, so it means the
 * same for small and large models. */
bool ms_lua_collect_above(lua_State *L, ms_runtime *runtime, uint64_t live)
{
    /* Below 16 MiB of growth the collection costs more than what it can give back is worth. */
    if (ms_engine_memory(runtime->engine).live <= live + (16u << 20)) return false;
    ms_lua_collect(L, runtime);
    return true;
}

/* ------------------------------------------------------------------ handles */

/* A handle that is kept, or was never filled, is in no list; both pointers are NULL then. */
static void unlink_handle(ms_handle *handle)
{
    ms_runtime *runtime = handle->runtime;
    ms_handle **first = handle->spent ? &runtime->spent : &runtime->handles;
    if (handle->previous) handle->previous->next = handle->next;
    else if (*first == handle) *first = handle->next;
    if (handle->next) handle->next->previous = handle->previous;
    handle->previous = handle->next = NULL;
    handle->spent = false;
}

/* The tensor goes to the list of dropped ones; the handle tells later users why. A kept tensor gets
 * step 0, so no step's end releases it early. The value of a future that was taken in this step
 * goes with this step, as it would without the collector. */
static void drop_later(ms_handle *handle)
{
    ms_runtime *runtime = handle->runtime;
    if (!handle->tensor) return;
    bool spent = handle->spent;
    unlink_handle(handle);
    /* There is room for every handle that lives: ms_lua_new_handle made it. */
    runtime->dropped[runtime->dropped_count++] =
        (ms_dropped){ .tensor = handle->tensor,
                      .step = spent                          ? runtime->step_serial
                              : handle->kept || handle->held ? 0
                                                             : handle->step,
                      .order = handle->order };
    handle->tensor = NULL;
    handle->gone = "was closed";
}

/* __close: handle at 1. A tensor that is closed goes the way of a finalized one. A finalizer must
 * not close tensors: the moment would depend on the collector. */
static int handle_close(lua_State *L)
{
    ms_handle *handle = lua_touserdata(L, 1);
    if (handle && handle->magic == MS_HANDLE_MAGIC && !in_finalizer(L)) drop_later(handle);
    return 0;
}

/* __gc: neither releases nor allocates. ms_lua_new_handle has made room in the list for every
 * handle that lives. */
static int handle_gc(lua_State *L)
{
    ms_handle *handle = lua_touserdata(L, 1);
    if (!handle || handle->magic != MS_HANDLE_MAGIC) return 0;
    drop_later(handle);
    handle->magic = 0;
    handle->runtime->handle_count--;
    return 0;
}

/* Pushes the handle. It may raise, so it is called before the engine makes the tensor;
 * ms_handle_fill cannot fail. */
ms_handle *ms_lua_new_handle(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    /* Room for every live handle and this one: finalizers must not allocate. */
    if (ms_grow(&runtime->context, (void **)&runtime->dropped, &runtime->dropped_capacity,
                runtime->dropped_count + runtime->handle_count + 1, sizeof *runtime->dropped))
        luaL_error(L, "%s", runtime->context.error.message);
    ms_handle *handle = lua_newuserdatauv(L, sizeof *handle, 1);
    memset(handle, 0, sizeof *handle);
    handle->magic = MS_HANDLE_MAGIC;
    handle->runtime = runtime;
    /* What a script would read if an error left it in a table. */
    handle->gone = "was never filled";
    runtime->handle_count++;
    luaL_setmetatable(L, MS_TENSOR_TYPE);
    return handle;
}

/* The latest handle comes first in the list, so that the end of a step finds its handles in front.
 */
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

/* From now on the handle does not end with a step. */
static void note_lasting(const ms_handle *handle)
{
    if (!handle->kept && (!handle->held || handle->spent)) handle->runtime->lasting++;
}

/* It leaves the list of handles that end with their step; whoever keeps it releases it, or the
 * collector does. */
void ms_handle_keep(ms_handle *handle)
{
    note_lasting(handle);
    unlink_handle(handle);
    handle->kept = true;
}

/* What was made outside of a step lives on by itself. */
void ms_handle_hold(ms_handle *handle)
{
    if (handle->kept || handle->step == 0) return;
    note_lasting(handle);
    unlink_handle(handle);
    handle->held = true;
}

/* Outside of a step nothing ends by itself. */
void ms_handle_spend(ms_handle *handle)
{
    ms_runtime *runtime = handle->runtime;
    if (!handle->tensor || !handle->held || handle->kept || handle->spent || !runtime->step_serial)
        return;
    handle->next = runtime->spent;
    if (handle->next) handle->next->previous = handle;
    runtime->spent = handle;
    handle->spent = true;
    if (runtime->lasting > 0) runtime->lasting--;
}

/* The handle is empty before the tensor is released, because a release may free callbacks. */
void ms_handle_drop(ms_handle *handle, const char *why)
{
    if (!handle->tensor) return;
    unlink_handle(handle);
    ms_tensor *tensor = handle->tensor;
    handle->tensor = NULL;
    handle->gone = why;
    ms_tensor_release(tensor);
}

/* A number to compare with: handles that are made later have higher ones. */
uint64_t ms_handle_count(const ms_runtime *runtime) { return runtime->orders; }

/* Handles are in the order in which they were made, the latest first, so the walk ends at the first
 * one that is older than `begin`. */
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

/* Releases everything that was made in the step and not kept, and the values of futures that were
 * taken in it, also where a script still has a handle. The first handle that belongs to another
 * step ends the loop: the list is in order of making. */
static void release_step(ms_runtime *runtime)
{
    while (runtime->spent)
        ms_handle_drop(runtime->spent,
                       "was the value of a future, and was released at the end of the step that "
                       "took it; call keep() on tensors that must live longer");
    while (runtime->handles && runtime->handles->step == runtime->step_serial)
        ms_handle_drop(
            runtime->handles,
            "was released when its step ended; call keep() on tensors that must live longer");
    release_dropped(runtime, runtime->step_serial, 0, UINT64_MAX);
}

/* -------------------------------------------------------------------- steps */

/* core.step_begin(step, graph): what is made from now on belongs to this step. Random numbers begin
 * again by the step's number, so a run that is resumed at a step draws what the whole run would
 * have drawn. graph: the step's work is expected to be that of the steps before. */
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
    if (lua_toboolean(L, 2)) ms_engine_set_repeating(engine, true);
    return 0;
}

/* core.step_end(): releases what the step made; the host waits for the step before the last. The
 * wait keeps the host from enqueueing without limit: it may be two steps ahead of the device. Casts
 * of weights that were kept for the step go, since the optimizer has changed the weights. A step
 * ends also where the job has ended, which the rank hears at its next call. */
static int step_end(lua_State *L)
{
    ms_engine *engine = ms_lua_enter_inside(L);
    ms_runtime *runtime = ms_lua_runtime(L);
    /* Ending twice is harmless: the library ends a step also after an error. */
    if (!runtime->step_serial) return 0;
    release_step(runtime);
    runtime->step_serial = 0;
    ms_engine_drop_casts(engine);
    ms_trace_step(engine, -1);
    ms_status status = ms_engine_step_end(engine, 2);
    ms_engine_set_repeating(engine, false); /* last: what the host puts onto streams late repeats */
    ms_lua_ok(L, status);
    return 0;
}

/* core.step() -> number of the current or last step, whether a step runs */
static int step_number(lua_State *L)
{
    lua_pushinteger(L, ms_lua_runtime(L)->step);
    lua_pushboolean(L, ms_lua_runtime(L)->step_serial != 0);
    return 2;
}

/* The library's ms.steps calls them around the body of the loop. */
void ms_open_steps(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "step_begin", step_begin },
                                          { "step_end", step_end },
                                          { "step", step_number },
                                          { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
}

/* -------------------------------------------------------- making and closing */

/* Runs when the Lua state closes. Finalizers that Lua calls later see `closed` and leave the engine
 * alone; it has freed what was theirs. Finalizers that ran before it (handles, reducers) have left
 * their tensors in the list of dropped ones. */
static int runtime_gc(lua_State *L)
{
    ms_runtime *runtime = lua_touserdata(L, 1);
    if (runtime->closed) return 0;
    runtime->closed = true;
    release_dropped(runtime, 0, 0, UINT64_MAX);
    ms_engine_free(runtime->engine);
    runtime->engine = NULL;
    runtime->context.activity = NULL;
    if (runtime->leave) runtime->leave(runtime);
    ms_rendezvous_release(runtime->rendezvous);
    ms_release(&runtime->context, runtime->dropped);
    ms_release(&runtime->context, runtime->shared);
    return 0;
}

/* The runtime's own __gc frees the engine. Lua calls finalizers in the reverse order of their
 * marking, so that of the runtime, marked first, comes last when the state closes. */
ms_runtime *ms_lua_new_runtime(lua_State *L)
{
    ms_runtime *runtime = lua_newuserdatauv(L, sizeof *runtime, 0);
    memset(runtime, 0, sizeof *runtime);
    runtime->owner = pthread_self();
    /* Warnings go through the main thread's state, which lives as long as the runtime. */
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    runtime->main = lua_tothread(L, -1);
    lua_pop(L, 1);
    ms_context_init(&runtime->context, NULL);
    lua_createtable(L, 0, 1);
    lua_pushcfunction(L, runtime_gc);
    lua_setfield(L, -2, "__gc");
    lua_setmetatable(L, -2);
    /* Handles' __gc needs no upvalue; it must work while the state closes. */
    luaL_newmetatable(L, MS_TENSOR_TYPE);
    lua_pushcfunction(L, handle_gc);
    lua_setfield(L, -2, "__gc");
    lua_pushcfunction(L, handle_close);
    lua_setfield(L, -2, "__close");
    lua_pop(L, 1);
    return runtime;
}

/* -------------------------------------------------------------------- types */

/* The functions go into the table on top, each with the runtime as upvalue 1. */
void ms_lua_register(lua_State *L, int runtime, const luaL_Reg *functions)
{
    lua_pushvalue(L, runtime);
    luaL_setfuncs(L, functions, 1);
}

/* __index of a table of methods, which represents an object's: what is not there is a misspelled
 * name. Upvalues: runtime, name of the type. */
static int refuse_field(lua_State *L)
{
    return ms_lua_no_field(L, 2, 1, lua_tostring(L, lua_upvalueindex(2)));
}

/* Stack: the module's table stays below; the methods table is on top at the end. The metatable is
 * locked, because a script that replaced __gc would leak what the object holds. */
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
