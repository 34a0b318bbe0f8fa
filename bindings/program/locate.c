/* locate.c: a rank says where its script is, when the supervisor asks with a signal.
 *
 * The signal's handler runs on the host thread of the rank, wherever that is. It sets a hook on
 * each Lua state of the thread, which a handler may do; the hook runs at the next instruction of
 * the script, notes the line, and removes itself. If the job has ended it raises an error there.
 * Lua runs no hooks in finalizers, and none before a C function returns: then only the handler is
 * heard, and the supervisor draws its conclusions from that. */
#include "bindings/program/locate.h"

#include <lauxlib.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "moonshard/moonshard_lua.h"

/* The coroutines that this thread is inside of, from the main state on. What is nested deeper is
 * not looked into. */
#define MS_STATES 32

/* What the signal handler reads. It belongs to one thread, and the handler runs on that thread, so
 * volatile is enough. */
typedef struct located {
    ms_rendezvous *rendezvous;
    ms_activity *activity;
    lua_State *volatile states[MS_STATES];
    volatile sig_atomic_t depth; /* may be above MS_STATES */
} located;

/* Thread-local, so that ranks that are threads of one process have one each, and a handler needs no
 * lookup that could lock. */
static _Thread_local located here;

/* ------------------------------------------------------------------- asking */

/* The hook. It runs inside of the script, where Lua functions may be called. It removes itself
 * first, so that each question is answered once. */
static void tell(lua_State *L, lua_Debug *unused)
{
    (void)unused;
    char line[MS_LINE_BYTES];
    ms_abort_record cause;
    lua_sethook(L, NULL, 0, 0);
    ms_lua_where(L, line, sizeof line);
    ms_activity_answer(here.activity, line);
    if (!here.rendezvous || !ms_rendezvous_cause(here.rendezvous, &cause)) return;
    lua_pushfstring(L, "%s: the job has ended, and this rank was here", line);
    lua_error(L);
}

/* The signal handler: only calls that are allowed there. lua_sethook and lua_gc with LUA_GCCOUNT
 * allocate nothing. */
static void locate(int number)
{
    (void)number;
    int depth = here.depth < MS_STATES ? here.depth : MS_STATES;
    if (depth == 0) return;
    /* Lua answers no question about its collector while a finalizer runs. */
    ms_activity_hear(here.activity, lua_gc(here.states[0], LUA_GCCOUNT) < 0 ? MS_WHERE_FINALIZER
                                                                            : MS_WHERE_UNKNOWN);
    for (int i = 0; i < depth; i++)
        lua_sethook(here.states[i], tell, LUA_MASKCALL | LUA_MASKRET | LUA_MASKLINE | LUA_MASKCOUNT,
                    1);
}

/* The states are filled in before the handler is installed. */
void ms_locate_open(lua_State *L, ms_rendezvous *rendezvous, uint32_t rank, bool is_thread)
{
    here.rendezvous = rendezvous;
    here.activity = ms_rendezvous_activity(rendezvous, rank);
    here.states[0] = L;
    here.depth = 1;
    ms_activity_host(here.activity, (int32_t)syscall(SYS_gettid));
    struct sigaction action = { .sa_handler = locate, .sa_flags = SA_RESTART };
    sigemptyset(&action.sa_mask);
    sigaction(is_thread ? MS_LOCATE_THREAD : MS_LOCATE_PROCESS, &action, NULL);
}

/* With depth 0 the handler touches no Lua state. */
void ms_locate_close(void) { here.depth = 0; }

/* --------------------------------------------------------------- coroutines */

/* Stored before the depth is raised: the handler may run between the two. */
static void enter(lua_State *coroutine)
{
    int depth = here.depth;
    if (depth < MS_STATES) here.states[depth] = coroutine;
    here.depth = depth + 1;
}

/* Calls the original coroutine.resume (upvalue 1) with the values on the stack, of which the first
 * is a coroutine. It raises nothing then. */
static int resume_entered(lua_State *L)
{
    enter(lua_tothread(L, 1));
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, lua_gettop(L) - 1, LUA_MULTRET);
    here.depth--;
    return lua_gettop(L);
}

/* coroutine.resume(co, ...) -> as the original. The type is checked here, because `enter` stores
 * the coroutine before the original function could refuse it. */
static int resume(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TTHREAD);
    return resume_entered(L);
}

/* A function of coroutine.wrap: upvalue 1 is coroutine.resume, 2 the coroutine, 3 coroutine.close.
 * Errors go on as from the original: the coroutine is closed, and a message gets the caller's
 * position. */
static int wrapped(lua_State *L)
{
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_insert(L, 1);
    int count = resume_entered(L);
    if (lua_toboolean(L, 1)) return count - 1;
    int status = lua_status(lua_tothread(L, lua_upvalueindex(2)));
    if (status != LUA_OK && status != LUA_YIELD) {
        lua_pushvalue(L, lua_upvalueindex(3));
        lua_pushvalue(L, lua_upvalueindex(2));
        lua_call(L, 1, 2);
        lua_replace(L, 2);
        lua_settop(L, 2);
    }
    if (lua_type(L, 2) == LUA_TSTRING) {
        luaL_where(L, 1);
        lua_insert(L, 2);
        lua_concat(L, 2);
    }
    return lua_error(L);
}

/* coroutine.wrap: upvalue 1 is coroutine.resume, 2 coroutine.create, 3 coroutine.close. It is
 * written again and not wrapped around the original, whose coroutine is out of reach: the handler
 * needs the lua_State of it. */
static int wrap(lua_State *L)
{
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, lua_upvalueindex(2));
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
    lua_pushvalue(L, lua_upvalueindex(3));
    lua_pushcclosure(L, wrapped, 3);
    return 1;
}

/* Replaces coroutine.resume and coroutine.wrap of this state; the original functions are upvalues.
 */
void ms_locate_coroutines(lua_State *L)
{
    lua_getglobal(L, "coroutine");
    lua_getfield(L, -1, "resume");
    lua_getfield(L, -2, "create");
    lua_getfield(L, -3, "close");
    lua_pushvalue(L, -3);
    lua_pushcclosure(L, resume, 1);
    lua_setfield(L, -5, "resume");
    lua_pushcclosure(L, wrap, 3);
    lua_setfield(L, -2, "wrap");
    lua_pop(L, 1);
}
