/* steps.c: steps of a training loop. */
#include "bindings/steps.h"

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

/* Releases everything that was made in the step and not kept, and the values of futures that were
 * taken in it, also where a script still has a handle. The first handle that belongs to another
 * step ends the loop: the list is in order of making. */
static void release_step(ms_runtime *runtime)
{
    while (runtime->alive.spent)
        ms_handle_drop(runtime->alive.spent,
                       "was the value of a future, and was released at the end of the step that "
                       "took it; call keep() on tensors that must live longer");
    while (runtime->alive.latest && runtime->alive.latest->step == runtime->steps.serial)
        ms_handle_drop(
            runtime->alive.latest,
            "was released when its step ended; call keep() on tensors that must live longer");
    ms_handles_release_dropped(runtime, runtime->steps.serial, 0, UINT64_MAX);
}

/* core.step_begin(step, graph): what is made from now on belongs to this step. Random numbers begin
 * again by the step's number, so a run that is resumed at a step draws what the whole run would
 * have drawn. graph: the step's work is expected to be that of the steps before. */
static int step_begin(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_runtime *runtime = ms_lua_runtime(L);
    int64_t step = ms_lua_integer(L, 1, 0, INT64_MAX, "step");
    ms_lua_refuse_in_hook(L, "ms.steps", "steps are begun by the training loop");
    if (runtime->steps.serial)
        return ms_lua_error(L, "ms.steps: a step is running already; steps cannot be nested");
    runtime->steps.serial = ++runtime->steps.count;
    runtime->steps.number = step;
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
    if (!runtime->steps.serial) return 0;
    release_step(runtime);
    runtime->steps.serial = 0;
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
    lua_pushinteger(L, ms_lua_runtime(L)->steps.number);
    lua_pushboolean(L, ms_lua_runtime(L)->steps.serial != 0);
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
