/* job.c: what a rank tells its job and hears from it, in Lua: requests, the cause of its end,
 * leaving. */
#include "bindings/job.h"

#include <stdio.h>

#include "bindings/arguments.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/comm.h"

/* core.rank(): this rank's number, which needs no engine. Scripts ask it before ms.init as well, so
 * it starts nothing. */
static int rank(lua_State *L)
{
    const ms_runtime *runtime = ms_lua_runtime(L);
    /* A fake world's rank is known to the engine; before that, the setting is. */
    const ms_group *world = runtime->engine ? ms_comm_world(runtime->engine) : NULL;
    lua_pushinteger(L, world ? ms_group_rank(world) : runtime->job.rank);
    return 1;
}

/* core.comm_step(step) -> the requests to stop, to save (signals' numbers, or nil) and to reload (1
 * or nil) that all ranks meet before the step that is about to begin. The serial number counts the
 * steps of all loops of this rank, so that ranks agree on "before the same step" however the loops
 * are nested or named. */
static int comm_step(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_runtime *runtime = ms_lua_runtime(L);
    uint8_t values[MS_REQUESTS];
    ms_comm_step(engine, ++runtime->steps.announced, luaL_checkinteger(L, 1), values);
    for (int kind = 0; kind < MS_REQUESTS; kind++) {
        if (values[kind]) lua_pushinteger(L, values[kind]);
        else lua_pushnil(L);
    }
    return MS_REQUESTS;
}

/* core.comm_steps(count?) -> how many steps this rank's loops were about to begin. A larger `count`
 * becomes that number: after a part in which ranks had different numbers of steps they agree on the
 * highest, since all ranks meet a request before the step of the same number. */
static int comm_steps(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    lua_Integer count = luaL_optinteger(L, 1, 0);
    if (count > 0 && (uint64_t)count > runtime->steps.announced)
        runtime->steps.announced = (uint64_t)count;
    lua_pushinteger(L, (lua_Integer)runtime->steps.announced);
    return 1;
}

/* core.comm_request(signal): asks all ranks to stop, as the supervisor does; false if this rank is
 * alone. A rank that catches a signal itself (a preemption notice, say) uses it. */
static int comm_request(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    int64_t number = ms_lua_integer(L, 1, 1, 255, "signal");
    if (runtime->job.rendezvous)
        ms_rendezvous_request(runtime->job.rendezvous, MS_REQUEST_STOP, (uint8_t)number);
    lua_pushboolean(L, runtime->job.rendezvous != NULL);
    return 1;
}

/* core.comm_reload(): asks all ranks to read watched files again between two steps; false if this
 * rank is alone. The request is met between two steps, so all ranks run the same version of the
 * script in every step. */
static int comm_reload(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    if (runtime->job.rendezvous)
        ms_rendezvous_request(runtime->job.rendezvous, MS_REQUEST_RELOAD, 1);
    lua_pushboolean(L, runtime->job.rendezvous != NULL);
    return 1;
}

/* core.comm_folder(path): where this job keeps its files. The supervisor writes its report there if
 * the job fails. */
static int comm_folder(lua_State *L)
{
    const char *path = luaL_checkstring(L, 1);
    ms_runtime *runtime = ms_lua_runtime(L);
    if (runtime->engine) ms_comm_set_folder(runtime->engine, path);
    return 0;
}

/* core.comm_cause() -> why the job has ended ("mismatch" ...), the rank at fault (-1: no single
 * rank), the message; nil while the job runs. The list is in the order of ms_abort_reason. */
static int comm_cause(lua_State *L)
{
    static const char *const reasons[] = { "none",   "mismatch", "left",   "timeout",
                                           "raised", "died",     "stopped" };
    const ms_runtime *runtime = ms_lua_runtime(L);
    ms_abort_record cause;
    if (!runtime->job.rendezvous || !ms_rendezvous_cause(runtime->job.rendezvous, &cause)) return 0;
    lua_pushstring(L, reasons[cause.reason]);
    lua_pushinteger(L, cause.error.rank);
    lua_pushstring(L, cause.error.message);
    return 3;
}

/* core.comm_leave(message?): no more collectives of this rank; with a message the job ends because
 * of it. Without an engine the rendezvous is told directly: peers must not wait for a rank whose
 * script failed before its first tensor. A rank that has left is not told of the end. */
static int comm_leave(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    const char *message = luaL_optstring(L, 1, NULL);
    runtime->job.knows_end = true;
    if (runtime->engine && ms_comm_world(runtime->engine)) ms_comm_leave(runtime->engine, message);
    else if (runtime->job.rendezvous) {
        char text[MS_ERROR_MESSAGE_BYTES];
        snprintf(text, sizeof text, "because rank %u: %.900s", runtime->job.rank,
                 message ? message : "");
        if (message)
            ms_rendezvous_abort(runtime->job.rendezvous, MS_ABORT_RAISED,
                                (int32_t)runtime->job.rank, text);
        ms_rendezvous_left(runtime->job.rendezvous, runtime->job.rank);
    }
    return 0;
}

/* What a script sees of its job: lua/moonshard/train/steps.lua asks before each step, the command
 * line when a script ends. */
void ms_open_job(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "rank", rank },
                                          { "comm_step", comm_step },
                                          { "comm_steps", comm_steps },
                                          { "comm_request", comm_request },
                                          { "comm_reload", comm_reload },
                                          { "comm_folder", comm_folder },
                                          { "comm_cause", comm_cause },
                                          { "comm_leave", comm_leave },
                                          { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
}
