/* script.c: the line of the user's script that runs, and errors that begin with it. */
#include "bindings/script.h"

#include <stdio.h>
#include <string.h>

/* Every bound function gets its runtime here. The check of the thread costs a comparison, and keeps
 * a second thread from corrupting the state. `closed` is looked at because finalizers may call
 * bound functions while the state closes, when the engine is gone. */
ms_runtime *ms_lua_runtime(lua_State *L)
{
    ms_runtime *runtime = lua_touserdata(L, lua_upvalueindex(1));
    if (!pthread_equal(runtime->owner, pthread_self()))
        luaL_error(L, "moonshard was called from another thread than the one that opened it: one "
                      "Lua state belongs to one thread");
    if (runtime->closed) luaL_error(L, "moonshard was closed with its Lua state");
    return runtime;
}

/* Whether a chunk belongs to the library, by the prefix of its name. The prefix is the folder of
 * the library's Lua files, as Lua writes it into chunk names. */
static bool is_library(const ms_runtime *runtime, const char *source)
{
    return runtime->library_prefix_bytes
           && strncmp(source, runtime->library_prefix, runtime->library_prefix_bytes) == 0;
}

/* The most frames that are searched. Modules in modules are many frames of the library in a row;
 * Lua allows 200 calls through C. */
#define LIBRARY_DEEPEST 256

/* The first Lua frame outside the library; else the innermost one, which is the library's own: its
 * commands call it without a script. */
static bool user_frame(lua_State *L, const ms_runtime *runtime, int first, lua_Debug *out)
{
    lua_Debug frame;
    bool found = false;
    for (int level = first; level < LIBRARY_DEEPEST && lua_getstack(L, level, &frame); level++) {
        /* Source and line alone: to find a function's name would cost a search. */
        lua_getinfo(L, "Sl", &frame);
        /* C functions have no line. */
        if (frame.currentline <= 0) continue;
        if (!is_library(runtime, frame.source)) {
            *out = frame;
            return true;
        }
        if (!found) {
            *out = frame;
            found = true;
        }
    }
    return found;
}

/* Empty if no Lua function outside the library runs: its own lines say nothing to users. The text
 * may be cut to its room; it is for messages only. */
void ms_lua_line_at(lua_State *L, const ms_runtime *runtime, int level, char *text, size_t bytes)
{
    lua_Debug frame;
    text[0] = 0;
    if (user_frame(L, runtime, level, &frame) && !is_library(runtime, frame.source))
        snprintf(text, bytes, "%s:%d", frame.short_src, frame.currentline);
}

/* Level 1, since level 0 is the bound function itself. */
void ms_lua_line(lua_State *L, char *text, size_t bytes)
{
    ms_lua_line_at(L, ms_lua_runtime(L), 1, text, bytes);
}

/* Called for each bound function, so the id of a line is cached by the address of its source and
 * its number. */
uint32_t ms_lua_script(lua_State *L, ms_runtime *runtime)
{
    lua_Debug frame;
    char text[160];
    /* 0 is the number of no line. */
    if (!user_frame(L, runtime, 1, &frame)) return 0;
    ms_strings *strings = ms_engine_strings(runtime->engine);
    /* Lua keeps one string for a chunk's name, so its address represents it. Four low bits are
     * always 0. */
    size_t at = (((uintptr_t)frame.source >> 4) + (size_t)frame.currentline * 7)
                % (sizeof runtime->lines / sizeof *runtime->lines),
           length = strlen(frame.short_src);
    if (runtime->lines[at].source == frame.source && runtime->lines[at].line == frame.currentline) {
        /* Another source may have the address of a collected one. */
        const char *known = ms_strings_get(strings, runtime->lines[at].id);
        if (strncmp(known, frame.short_src, length) == 0 && known[length] == ':')
            return runtime->lines[at].id;
    }
    uint32_t id = 0;
    snprintf(text, sizeof text, "%s:%d", frame.short_src, frame.currentline);
    /* Without memory for it, errors name no line, which is no reason to fail. */
    if (ms_strings_add(strings, text, strlen(text), &id)) return 0;
    runtime->lines[at].source = frame.source;
    runtime->lines[at].line = frame.currentline;
    runtime->lines[at].id = id;
    return id;
}

/* Never returns; the int is for `return ms_lua_error(...)`. */
int ms_lua_error(lua_State *L, const char *format, ...)
{
    char line[160], text[MS_ERROR_MESSAGE_BYTES];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    ms_lua_line(L, line, sizeof line);
    /* Not luaL_error: it would put the calling line before it, which may be one of the library. */
    lua_pushfstring(L, "%s%s%s", line, *line ? ": " : "", text);
    return lua_error(L);
}

/* Hooks run in the middle of backward, on the host thread that feeds all streams: a call that waits
 * there would wait for work that only this thread can enqueue. `instead` tells what to do. */
void ms_lua_refuse_in_hook(lua_State *L, const char *what, const char *instead)
{
    if (ms_lua_runtime(L)->hook_depth > 0)
        ms_lua_error(L, "%s cannot be used inside a hook: %s", what, instead);
}
