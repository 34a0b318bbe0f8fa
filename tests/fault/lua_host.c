/* lua_host.c: hazards of the bindings that a script cannot bring about: every failed allocation of
 * Lua, a call from another thread, states opened and closed, fork. ctest: lua-host */
#include "moonshard/moonshard_lua.h"

#include <lauxlib.h>
#include <lualib.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <sys/wait.h>
#include <unistd.h>

static bool is_full(void)
{
    const char *full = getenv("MOONSHARD_TEST_FULL");
    return full && strcmp(full, "1") == 0;
}

/* ------------------------------------------------------------ the allocator */

typedef struct heap {
    long calls, fail_at;
    size_t bytes;
} heap;

static void *heap_allocate(void *user, void *pointer, size_t before, size_t bytes)
{
    heap *h = user;
    size_t old = pointer ? before : 0;
    if (bytes == 0) {
        free(pointer);
        h->bytes -= old;
        return NULL;
    }
    /* Shrinking never fails: Lua relies on it. */
    if (bytes > old && ++h->calls >= h->fail_at && h->fail_at > 0) return NULL;
    void *made = realloc(pointer, bytes);
    if (made) h->bytes += bytes - old;
    return made;
}

static int open_library(lua_State *L)
{
    luaL_openlibs(L);
    ms_lua_open(L, getenv("MOONSHARD_LUA"));
    return 0;
}

/* Runs text protected; the message stays on the stack when it fails. */
static int run_text(lua_State *L, const char *text)
{
    int failed = luaL_loadbufferx(L, text, strlen(text), "=test", "t");
    return failed ? failed : lua_pcall(L, 0, 0, 0);
}

static lua_State *open_state(heap *h)
{
    lua_State *L = lua_newstate(heap_allocate, h);
    if (!L) return NULL;
    lua_pushcfunction(L, open_library);
    if (lua_pcall(L, 0, 0, 0) == LUA_OK) return L;
    lua_close(L);
    return NULL;
}

/* ------------------------------------------------------- failed allocations */

/* A bit of everything: making, operators, views of several results, values, hooks, scopes,
 * recomputation, options, errors. */
static const char program[] =
    "local core = require 'moonshard.core'\n"
    "local x = core.tensor({ { 1, 2 }, { 3, 4 } }, 'f32'):requires_grad_()\n"
    "local w = core.full(0.5, { 2, 2, requires_grad = true })\n"
    "local remove = x:on_grad(function(g) return g * 2 end)\n"
    "x:on_grad_ready(function(p) p:grad() end)\n"
    "local y = core.recompute(function(a) return a:matmul(w):tanh() end, x)\n"
    "local custom = function(a) return core.custom(function(b, c) return b * c, { b, { c } } end,\n"
    "  function(d, saved) return d * saved[2][1], d * saved[1] end, a, w) end\n"
    "y = custom(y)\n"
    "local parts = core.cat({ y, x }, 2):split(2, 2)\n"
    "local values, ids = parts[1]:topk(1)\n"
    "local loss = (values:sum() + parts[2]:mean()) * 2\n"
    "loss:backward()\n"
    "core.no_grad(function() x:add_(1):clamp_(0, 3) end)\n"
    "local t = x:grad():to_table()\n"
    "assert(#t == 2 and x:show() and tostring(y) and #x == 2 and ids:to_table())\n"
    "core.clip_norm({ x:grad(), w:grad() }, 1)\n"
    "core.optim_step('adam', w, w:grad(), {}, { lr = 0.1 })\n"
    "remove()\n"
    "core.step_begin(0)\n"
    "core.zeros { 4 }:fill_(2):sum():item()\n"
    "core.step_end()\n"
    "assert(not pcall(function() x:view(7) end))\n"
    "assert(core.json_decode(core.json_encode { 1, { a = 'b' } })[2].a == 'b')\n";

/* Settings and the engine's start come before, so that each failure meets a running engine; live
 * memory is back where it was. */
static const char before[] = "local core = require 'moonshard.core' core.configure { threads = 1, "
                             "memory_bytes = 64 << 20 } core.zeros { 1 } core.collect()\n"
                             "base = core.memory().live";
static const char after[] =
    "local core = require 'moonshard.core' pcall(core.step_end) core.synchronize() core.collect()\n"
    "assert(core.memory().live == base, core.memory().live .. ' bytes live, ' .. base .. ' "
    "before')";

static void any_failed_allocation_of_lua_is_an_error(void **state)
{
    (void)state;
    /* In the short form every 13th: all of them are reached over the months, and by --full at
     * once. */
    long stride = is_full() ? 1 : 13;
    for (long n = 1;; n += stride) {
        heap h = { .calls = 0 };
        lua_State *L = open_state(&h);
        assert_non_null(L);
        if (run_text(L, before)) fail_msg("%s", lua_tostring(L, -1));
        h.calls = 0;
        h.fail_at = n;
        int failed = run_text(L, program);
        bool reached = h.calls >= n;
        h.fail_at = 0;
        const char *message = failed ? lua_tostring(L, -1) : "";
        if (failed && !reached) fail_msg("without a failure: %s", message);
        /* Each failure is Lua's own error, or an assertion of the program that met it inside a
         * pcall. */
        if (failed
            && (!message
                || (!strstr(message, "not enough memory") && !strstr(message, "assertion failed"))))
            fail_msg("allocation %ld: %s", n, message ? message : "an error that is not a string");
        lua_settop(L, 0);
        if (run_text(L, after)) fail_msg("allocation %ld: %s", n, lua_tostring(L, -1));
        if (run_text(L, program))
            fail_msg("after a failure of allocation %ld: %s", n, lua_tostring(L, -1));
        lua_close(L);
        assert_int_equal(h.bytes, 0);
        if (!reached) break;
    }
}

/* Fills the registry up to another number of values, so that a value that the library adds may need
 * more memory for it, or not. */
static void fill_registry(lua_State *L, int count)
{
    for (int i = 0; i < count; i++) {
        lua_pushboolean(L, true);
        lua_rawsetp(L, LUA_REGISTRYINDEX, program + i);
    }
}

/* The engine is not unwound, also where there is no memory to keep the error: what the call held is
 * given back. The function fails at one of its many allocations, and so does all that follows. */
static void keeping_the_error_of_a_callback_needs_no_memory(void **state)
{
    (void)state;
    static const char recompute[] =
        "local core = require 'moonshard.core'\n"
        "local x = core.full(1, { 2, requires_grad = true })\n"
        "core.recompute(function(a) for i = 1, 500 do a = { a } end return x end, x)\n";
    for (int count = 0; count < 64; count++) {
        heap h = { .calls = 0 };
        lua_State *L = open_state(&h);
        assert_non_null(L);
        if (run_text(L, before)) fail_msg("%s", lua_tostring(L, -1));
        fill_registry(L, count);
        h.calls = 0;
        h.fail_at = 250;
        assert_true(run_text(L, recompute));
        h.fail_at = 0;
        assert_non_null(strstr(lua_tostring(L, -1), "not enough memory"));
        lua_settop(L, 0);
        if (run_text(L, after)) fail_msg("%d values: %s", count, lua_tostring(L, -1));
        lua_close(L);
        assert_int_equal(h.bytes, 0);
    }
}

static void any_failed_allocation_while_opening_is_an_error(void **state)
{
    (void)state;
    static const char use[] = "assert(require 'moonshard'.zeros { 2 }:sum():item() == 0)";
    long stride = is_full() ? 1 : 29;
    for (long n = 1;; n += stride) {
        heap h = { .fail_at = n };
        lua_State *L = open_state(&h);
        int failed = L ? run_text(L, use) : LUA_ERRMEM;
        bool reached = h.calls >= n;
        h.fail_at = 0;
        if (failed && !reached) fail_msg("%s", L ? lua_tostring(L, -1) : "no state");
        if (L) lua_close(L);
        assert_int_equal(h.bytes, 0);
        if (!reached) break;
    }
}

/* ----------------------------------------------------------- another thread */

typedef struct visit {
    lua_State *L;
    int failed;
    char message[512];
} visit;

static void *call_from_here(void *argument)
{
    visit *v = argument;
    v->failed = run_text(v->L, "x:add(1)");
    if (v->failed) snprintf(v->message, sizeof v->message, "%s", lua_tostring(v->L, -1));
    lua_settop(v->L, 0);
    return NULL;
}

static void a_call_from_another_thread_is_refused(void **state)
{
    (void)state;
    heap h = { .calls = 0 };
    visit v = { .L = open_state(&h) };
    assert_non_null(v.L);
    assert_int_equal(run_text(v.L, "x = require 'moonshard'.zeros { 2 }"), LUA_OK);
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, call_from_here, &v), 0);
    pthread_join(thread, NULL);
    assert_int_equal(v.failed, LUA_ERRRUN);
    assert_non_null(strstr(v.message, "another thread"));
    assert_int_equal(run_text(v.L, "assert(x:add(1):sum():item() == 2)"), LUA_OK);
    lua_close(v.L);
}

/* ------------------------------------------------------ opening and closing */

static long resident_kib(void)
{
    long pages = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld %ld", &pages, &resident), 2);
    fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Callbacks that hold their tensors, kept state in globals, an engine with a stream of its own: all
 * go with the state. */
static void states_come_and_go_without_a_trace(void **state)
{
    (void)state;
    static const char use[] =
        "local core = require 'moonshard.core' core.configure { device = 'sim', threads = 1 }\n"
        "kept = core.ones { 4, 4, requires_grad = true }\n"
        "kept:on_grad(function(g) return g * kept end)\n"
        "kept:on_grad_ready(function(p) also = p:grad() end);\n"
        "(kept * 2):sum():backward()\n"
        "core.stream 'side':run(function() return kept:add(1) end)\n"
        "probe = core.probe(kept:sum())";
    int count = is_full() ? 10000 : 400;
    long settled = 0;
    for (int i = 0; i < count; i++) {
        heap h = { .calls = 0 };
        lua_State *L = open_state(&h);
        assert_non_null(L);
        if (run_text(L, use)) fail_msg("%s", lua_tostring(L, -1));
        lua_close(L);
        assert_int_equal(h.bytes, 0);
        if (i == count / 4) settled = resident_kib();
    }
    /* Sanitizers keep freed memory for a while. */
    const char *sanitizer = getenv("MOONSHARD_SANITIZE");
    long allowed = sanitizer && *sanitizer ? 400000 : 2048;
    long grown = resident_kib() - settled;
    if (grown > allowed) fail_msg("%ld KiB more after %d states", grown, count - count / 4);
}

/* --------------------------------------------------------------------- fork */

/* In the child there are no worker threads: whatever would wait for them is an error, and closing
 * does not hang. */
static void a_forked_child_gets_errors_and_never_hangs(void **state)
{
    (void)state;
    heap h = { .calls = 0 };
    lua_State *L = open_state(&h);
    assert_non_null(L);
    assert_int_equal(run_text(L,
                              "x = require 'moonshard'.ones { 2 } x:sum():item()\n"
                              "loader = assert(require 'moonshard'.data.bytes "
                              "'/proc/self/exe'):loader { batch = 1, length = 1 } loader:next()"),
                     LUA_OK);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        alarm(20);
        int failed = run_text(L, "return x:add(1):sum():item()");
        bool told = failed && lua_tostring(L, -1) && strstr(lua_tostring(L, -1), "fork");
        failed = run_text(L, "loader:next()");
        told = told && failed && lua_tostring(L, -1) && strstr(lua_tostring(L, -1), "fork");
        lua_close(L);
        _exit(told ? 0 : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    assert_int_equal(run_text(L, "assert(x:add(1):sum():item() == 4)"), LUA_OK);
    lua_close(L);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_failed_allocation_of_lua_is_an_error),
        cmocka_unit_test(keeping_the_error_of_a_callback_needs_no_memory),
        cmocka_unit_test(any_failed_allocation_while_opening_is_an_error),
        cmocka_unit_test(a_call_from_another_thread_is_refused),
        cmocka_unit_test(states_come_and_go_without_a_trace),
        cmocka_unit_test(a_forked_child_gets_errors_and_never_hangs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
