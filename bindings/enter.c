/* enter.c: how a bound function enters the engine: it starts with the first call, collects where
 * memory is short, and notes the script line. */
#include "bindings/enter.h"

#include "bindings/adopt.h"
#include "bindings/call.h"
#include "bindings/handles.h"
#include "bindings/placement.h"
#include "bindings/script.h"
#include "moonshard/hook.h"

/* ----------------------------------------------------------------- entering */
#define LASTING_MOST 4096 /* see has_many_lasting */

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
    if (!runtime->job.rendezvous
        && ms_lua_adopt(&runtime->context, &runtime->job.rendezvous, &runtime->job.rank))
        could_not_start(L, runtime, &runtime->context.error);
    /* Ranks of one machine share its cores. */
    if (runtime->job.rendezvous && !runtime->settings.threads)
        runtime->settings.threads = ms_rendezvous_threads(runtime->job.rendezvous);
    runtime->settings.crowded =
        runtime->job.rendezvous && ms_rendezvous_crowded(runtime->job.rendezvous);
    ms_lua_choose_gpu(L, runtime);
    ms_cores cores;
    int32_t node = ms_lua_go_near_gpu(runtime, threads, &cores);
    ms_error error;
    ms_engine *engine = NULL;
    if (ms_engine_new(&runtime->settings, &error, &engine)) could_not_start(L, runtime, &error);
    ms_group *world = NULL;
    ms_status status = MS_OK;
    /* On the sim device, `check` reads the list of collectives. */
    if (runtime->fake.size) {
        ms_fake_world fake = { .rank = runtime->job.rank,
                               .size = runtime->fake.size,
                               .node_of = runtime->fake.has_nodes ? runtime->fake.nodes : NULL,
                               .sum_by_ranks = runtime->fake.by_ranks };
        status = ms_comm_open_fake_on(engine, &fake, &world);
        if (!status) ms_comm_record(engine, ms_engine_is_sim(engine));
    } else if (runtime->job.rendezvous) {
        ms_comm_options options = { .transport =
                                        *runtime->transport_text ? runtime->transport_text : NULL,
                                    .one_gpu = ms_lua_shares_one_gpu(runtime) };
        status =
            ms_comm_open_with(engine, runtime->job.rendezvous, runtime->job.rank, &options, &world);
    }
    if (status) {
        error = *ms_engine_error(engine);
        ms_engine_free(engine);
        could_not_start(L, runtime, &error);
    }
    runtime->engine = engine;
    ms_engine_on_full(engine, collect_when_full, runtime);
    ms_lua_tell_placement(runtime, engine, node, &cores);
}

/* Of what scripts keep and drop, tensors wait for a collection, also views, whose memory is
 * another's. The number depends on calls of the script alone, as memory pressure does. */
static bool has_many_lasting(const ms_runtime *runtime)
{
    size_t most = runtime->alive.after;
    return runtime->alive.lasting > (most > LASTING_MOST ? most : LASTING_MOST);
}

/* May raise, so it runs before a bound function owns anything. Collecting under memory pressure
 * happens here, where C holds no tensor that Lua does not see. */
ms_engine *ms_lua_enter_inside(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    if (ms_lua_in_finalizer(L))
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
    runtime->job.knows_end = true;
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
    if (!runtime->job.knows_end) hear_of_end(L, runtime);
    return engine;
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
        ms_handles_release_dropped(runtime, 0, 0, UINT64_MAX);
        ms_link_states_sweep(runtime->engine);
        if (runtime->callbacks_freed == before) break;
    }
    /* The mark of memory pressure moves, whether or not much came back. */
    ms_engine_relieved(runtime->engine, ms_lua_heap(L));
    runtime->alive.lasting = 0;
    runtime->alive.after = runtime->alive.count;
}

/* The pool asks for it when memory is used up, in the middle of a call, which a hook may have made
 * in the middle of another. Tensors that these calls work on stay: the handles are on their stacks,
 * or the engine holds references of its own. user: the runtime. */
static bool collect_when_full(void *user)
{
    ms_runtime *runtime = user;
    if (ms_lua_in_finalizer(runtime->main)) return false;
    ms_lua_collect(runtime->main, runtime);
    return true;
}

/* Every rank takes the draw, so that the draws of all ranks stay in step, and then changes the
 * seed. */
ms_random ms_lua_own_draw(lua_State *L) { return ms_lua_draw_of(L, ms_lua_runtime(L)->job.rank); }

ms_random ms_lua_draw_of(lua_State *L, uint32_t rank)
{
    ms_random random = ms_engine_draw(ms_lua_runtime(L)->engine);
    random.seed = ms_seed_of_rank(random.seed, rank);
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
