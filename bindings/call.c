/* call.c: the only place that calls Lua functions, and the way of errors between Lua and the
 * engine. */
#include "bindings/call.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bindings/script.h"

/* registry: a list whose only element is the error object of the last failed call, or false. It is
 * made when the module is opened, so that keeping an error allocates nothing: an error of the
 * allocation would unwind the engine. */
static const char error_key = 0;

/* A userdata that anchors keep, and that keeps the function of a callback as its user value. It
 * ends with the last anchor, and gives the function back to the callback then, if there still is
 * one. */
typedef struct ms_loan {
    ms_callback *callback;
} ms_loan;

#define LOAN_TYPE "ms.Loan"

/* __gc: the place in the registry is there already, so nothing is allocated. */
static int loan_gc(lua_State *L)
{
    ms_loan *loan = lua_touserdata(L, 1);
    ms_callback *callback = loan->callback;
    if (!callback) return 0;
    loan->callback = NULL;
    callback->loan = NULL;
    lua_getiuservalue(L, 1, 1);
    lua_rawseti(L, LUA_REGISTRYINDEX, callback->reference);
    return 0;
}

void ms_lua_open_calls(lua_State *L)
{
    luaL_newmetatable(L, LOAN_TYPE);
    lua_pushcfunction(L, loan_gc);
    lua_setfield(L, -2, "__gc");
    lua_pop(L, 1);
    lua_createtable(L, 1, 0);
    lua_pushboolean(L, false);
    lua_rawseti(L, -2, 1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &error_key);
}

/* Keeps the value on top as the error, and pops it. */
static void keep_error(lua_State *L)
{
    lua_rawgetp(L, LUA_REGISTRYINDEX, &error_key);
    lua_insert(L, -2);
    lua_rawseti(L, -2, 1);
    lua_pop(L, 1);
}

/* registry: { error object, its traceback } of the last failed call */
static const char trace_key = 0;

/* The message handler: error object -> the same object. Errors are not changed, whatever catches
 * them. The traceback is kept beside the error, because the stack is gone when the error is
 * printed. A table of two, because the traceback belongs to one error object only. */
static int keep_traceback(lua_State *L)
{
    lua_settop(L, 1);
    lua_createtable(L, 2, 0);
    lua_pushvalue(L, 1);
    lua_rawseti(L, -2, 1);
    luaL_traceback(L, L, NULL, 1);
    lua_rawseti(L, -2, 2);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &trace_key);
    return 1;
}

/* The pair in the registry may belong to an older error; rawequal tells. Where it answers false it
 * leaves one value on the stack. */
bool ms_lua_traceback(lua_State *L, int index)
{
    index = lua_absindex(L, index);
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &trace_key) != LUA_TTABLE) return false;
    lua_rawgeti(L, -1, 1);
    bool same = lua_rawequal(L, -1, index);
    lua_pop(L, 1);
    if (same) lua_rawgeti(L, -1, 2);
    return same;
}

/* The engine must not be unwound by longjmp, so every error ends here and becomes MS_ERROR_SCRIPT.
 * The error object waits in the registry until the bound function that called the engine raises it
 * again (ms_lua_ok): the script sees its own error, not a text made of it. */
ms_status ms_lua_call(lua_State *L, ms_runtime *runtime, int arguments, int results)
{
    int function = lua_gettop(L) - arguments;
    /* The engine may call at any depth of the script's own stack. */
    if (!lua_checkstack(L, 8)) {
        lua_settop(L, function - 1);
        return ms_engine_fail(runtime->engine, MS_ERROR_MEMORY,
                              "no room on the Lua stack for a callback");
    }
    lua_pushcfunction(L, keep_traceback);
    /* The handler must be below the function. */
    lua_insert(L, function);
    int failed = lua_pcall(L, arguments, results, function);
    if (!failed) {
        lua_remove(L, function);
        return MS_OK;
    }
    ms_context *context = runtime->engine ? ms_engine_context(runtime->engine) : &runtime->context;
    const char *message = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : NULL;
    /* The object itself is kept, and raised again by ms_lua_ok. */
    if (!message) message = "a callback raised an error that is not a string";
    ms_fail(context, MS_ERROR_SCRIPT, "%.*s", (int)strcspn(message, "\n"), message);
    keep_error(L);
    lua_settop(L, function - 1);
    return MS_ERROR_SCRIPT;
}

/* registry: the library's function that runs what futures wait for */
static const char drain_key = 0;

/* Set once, by the library when it is loaded. */
void ms_lua_set_drain(lua_State *L, int index)
{
    lua_pushvalue(L, index);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &drain_key);
}

/* Callbacks of futures are put off until the outermost hook has returned, so that none runs in the
 * middle of a hook. */
ms_status ms_lua_hook(lua_State *L, ms_runtime *runtime, int arguments, int results)
{
    runtime->hook_depth++;
    ms_status status = ms_lua_call(L, runtime, arguments, results);
    runtime->hook_depth--;
    /* Only the outermost hook drains. */
    if (!runtime->drain || runtime->hook_depth > 0) return status;
    runtime->drain = false;
    if (!lua_checkstack(L, 8))
        return ms_engine_fail(runtime->engine, MS_ERROR_MEMORY,
                              "no room on the Lua stack for a future's callback");
    lua_rawgetp(L, LUA_REGISTRYINDEX, &drain_key);
    if (status) {
        /* Giving up calls nothing that fails; the hook's own error must stay the one that is
         * kept. */
        /* true: give up; false: run. */
        lua_pushboolean(L, true);
        if (lua_pcall(L, 1, 0, 0)) lua_pop(L, 1);
        return status;
    }
    lua_pushboolean(L, false);
    status = ms_lua_call(L, runtime, 1, 0);
    /* The hook's own results go: its caller gets an error instead. */
    if (status) lua_pop(L, results);
    return status;
}

/* Whether a message contains the one that was noted. Each layer that an error passes through puts
 * words before it, and may cut its end off where the whole is too long for an ms_error; so the
 * beginning decides. */
bool ms_lua_is_noted(const ms_runtime *runtime, const char *message)
{
    char beginning[MS_ERROR_MESSAGE_BYTES / 4];
    snprintf(beginning, sizeof beginning, "%.*s", (int)sizeof beginning - 1, runtime->exit.message);
    return *beginning && strstr(message, beginning);
}

/* The command line compares the message with the error that ends the run; an error that the script
 * has handled does not decide. The code of a cause stays where the engine passes it on with words
 * of its own, as it does for an error of a hook. */
void ms_lua_note_exit(ms_runtime *runtime, const ms_error *error)
{
    bool is_cause = error->status >= MS_ERROR_NOT_FOUND || error->status == MS_ERROR_MEMORY;
    if (!is_cause && ms_lua_is_noted(runtime, error->message)) return;
    /* 3 for data and files, 8 for memory, 1 for everything else. */
    runtime->exit.code = error->status >= MS_ERROR_NOT_FOUND ? 3 : 1;
    if (error->status == MS_ERROR_MEMORY) runtime->exit.code = 8;
    snprintf(runtime->exit.message, sizeof runtime->exit.message, "%s", error->message);
    runtime->exit.refused_at[0] = 0;
}

/* Raises; the caller owns nothing at this point. A callback's error is taken out of the registry
 * first, so that it is raised once. */
void ms_lua_ok(lua_State *L, ms_status status)
{
    if (!status) return;
    if (status == MS_ERROR_SCRIPT) {
        lua_rawgetp(L, LUA_REGISTRYINDEX, &error_key);
        lua_rawgeti(L, -1, 1);
        lua_pushboolean(L, false);
        keep_error(L);
        if (lua_toboolean(L, -1)) lua_error(L);
    }
    ms_runtime *runtime = ms_lua_runtime(L);
    const ms_error *error =
        runtime->engine ? ms_engine_error(runtime->engine) : &runtime->context.error;
    ms_lua_note_exit(runtime, error);
    /* After the job's end an error of the engine is, or follows from, its cause. */
    runtime->job.knows_end |= ms_lua_job_has_ended(runtime);
    ms_lua_error(L, "%s", error->message);
}

/* Statuses from MS_ERROR_NOT_FOUND on are failures of the environment; smaller ones are mistakes in
 * the program and raise. */
int ms_lua_failed(lua_State *L, const ms_error *error)
{
    if (error->status < MS_ERROR_NOT_FOUND) return ms_lua_error(L, "%s", error->message);
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_lua_note_exit(runtime, error);
    ms_lua_line(L, runtime->exit.refused_at, sizeof runtime->exit.refused_at);
    lua_pushnil(L);
    lua_pushstring(L, error->message);
    lua_pushstring(L, ms_status_name(error->status));
    return 3;
}

/* ---------------------------------------------------------------- callbacks */

/* Pushes the table at `key` of the registry, made on first use. mode: "k" or "v", what is weak. */
static void push_weak_table(lua_State *L, const void *key, const char *mode)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, key) == LUA_TTABLE) return;
    lua_pop(L, 1);
    lua_newtable(L);
    lua_createtable(L, 0, 1);
    lua_pushstring(L, mode);
    lua_setfield(L, -2, "__mode");
    lua_setmetatable(L, -2);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, key);
}

static const char functions_key = 0; /* registry: number -> function, weak values */

/* Functions by number. The values are weak, so that the table keeps no function alive: the anchor
 * does, or a reference in the registry. A number instead of a reference makes a function that
 * refers to its own anchor collectable. */
static void push_functions(lua_State *L) { push_weak_table(L, &functions_key, "v"); }

/* Keeps the function at `index` alive with the userdata at `anchor`: as a key of the table that is
 * its first user value. The anchor must have a user value. */
static void keep_with(lua_State *L, int anchor, int index)
{
    anchor = lua_absindex(L, anchor);
    index = lua_absindex(L, index);
    if (lua_getiuservalue(L, anchor, 1) != LUA_TTABLE) {
        lua_pop(L, 1);
        lua_newtable(L);
        lua_pushvalue(L, -1);
        lua_setiuservalue(L, anchor, 1);
    }
    lua_pushvalue(L, index);
    lua_pushboolean(L, true);
    lua_rawset(L, -3);
    lua_pop(L, 1);
}

/* Afterwards the callback finds no function, unless something else holds it. */
void ms_callback_forget(lua_State *L, int anchor, int index)
{
    index = lua_absindex(L, index);
    if (lua_getiuservalue(L, anchor, 1) == LUA_TTABLE) {
        lua_pushvalue(L, index);
        lua_pushnil(L);
        lua_rawset(L, -3);
    }
    lua_pop(L, 1);
}

/* Everything that Lua may raise comes before ms_allocate, whose memory nothing would release. The
 * main state is stored, since a coroutine may be dead when the engine calls. */
ms_callback *ms_callback_new(lua_State *L, int index, int anchor)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    luaL_checktype(L, index, LUA_TFUNCTION);
    index = lua_absindex(L, index);
    if (anchor) keep_with(L, anchor, index);
    push_functions(L);
    lua_pushvalue(L, index);
    /* Never used again, so a callback that is gone cannot name a newer function. */
    int64_t number = ++runtime->callbacks;
    lua_rawseti(L, -2, number);
    lua_pop(L, 1);
    int reference = LUA_NOREF;
    if (!anchor) {
        lua_pushvalue(L, index);
        reference = luaL_ref(L, LUA_REGISTRYINDEX);
    }
    void *memory = NULL;
    if (ms_allocate(&runtime->context, sizeof(ms_callback), "a callback", &memory)) {
        luaL_unref(L, LUA_REGISTRYINDEX, reference);
        luaL_error(L, "%s", runtime->context.error.message);
    }
    lua_rawgeti(L, LUA_REGISTRYINDEX, LUA_RIDX_MAINTHREAD);
    lua_State *main = lua_tothread(L, -1); /* a coroutine may be gone when the engine calls */
    lua_pop(L, 1);
    ms_callback *callback = memory;
    *callback =
        (ms_callback){ .L = main, .runtime = runtime, .reference = reference, .number = number };
    return callback;
}

/* registry: loan -> true, weak keys. Lua empties tables with weak values before it calls
 * finalizers, and removes weak keys after that: a loan is found here until it was finalized. */
static const char loans_key = 0;

static void push_loans(lua_State *L) { push_weak_table(L, &loans_key, "k"); }

/* The registry's reference is emptied last: what comes before may raise. */
void ms_callback_lend(lua_State *L, ms_callback *callback, int first, int count)
{
    first = lua_absindex(L, first);
    luaL_checkstack(L, 8, "a callback");
    ms_loan *loan = lua_newuserdatauv(L, sizeof *loan, 1);
    loan->callback = NULL;
    luaL_setmetatable(L, LOAN_TYPE);
    lua_rawgeti(L, LUA_REGISTRYINDEX, callback->reference);
    lua_setiuservalue(L, -2, 1);
    push_loans(L);
    lua_pushvalue(L, -2);
    lua_pushboolean(L, true);
    lua_rawset(L, -3);
    lua_pop(L, 1);
    for (int i = 0; i < count; i++) keep_with(L, first + i, -1);
    loan->callback = callback;
    callback->loan = loan;
    lua_pushboolean(L, false);
    lua_rawseti(L, LUA_REGISTRYINDEX, callback->reference);
    lua_pop(L, 1);
}

/* Pushes the lent function of a loan that waits for its finalizer. */
static bool push_lent(const ms_callback *callback)
{
    lua_State *L = callback->L;
    push_loans(L);
    for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1)) {
        if (lua_touserdata(L, -2) != callback->loan) continue;
        lua_getiuservalue(L, -2, 1);
        lua_replace(L, -4);
        lua_pop(L, 2);
        return true;
    }
    lua_pop(L, 1);
    return false;
}

/* Called by the engine, also while the Lua state closes; then the registry is not touched. Counting
 * the frees lets ms_lua_collect see that more has become garbage. */
void ms_callback_free(void *object)
{
    ms_callback *callback = object;
    callback->runtime->callbacks_freed++;
    if (callback->loan) callback->loan->callback = NULL;
    /* While the state closes, the registry goes with it. */
    if (!callback->runtime->closed) luaL_unref(callback->L, LUA_REGISTRYINDEX, callback->reference);
    ms_release(&callback->runtime->context, callback);
}

/* The function is gone if the collector has taken its anchor. A function that came back from a loan
 * is in the registry, and may have left the weak table. */
bool ms_callback_push(const ms_callback *callback)
{
    lua_State *L = callback->L;
    if (callback->reference != LUA_NOREF) {
        if (lua_rawgeti(L, LUA_REGISTRYINDEX, callback->reference) == LUA_TFUNCTION) return true;
        lua_pop(L, 1);
    }
    push_functions(L);
    bool there = lua_rawgeti(L, -1, callback->number) == LUA_TFUNCTION;
    lua_remove(L, -2);
    if (!there) lua_pop(L, 1);
    return there || (callback->loan && push_lent(callback));
}
