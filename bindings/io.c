/* io.c: files, folders, locks and clocks for the Lua library. */
#include "bindings/io.h"

#include <string.h>

#include "bindings/call.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define FILE_TYPE "ms.File"
#define READ_LIMIT (UINT64_C(1) << 31) /* of a file that becomes a Lua string */

/* ----------------------------------------------------- shared by io's files */

/* Errors then go to the record that ms_lua_io_failed reads. */
ms_context *ms_lua_context(lua_State *L)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    return runtime->engine ? ms_engine_context(runtime->engine) : &runtime->context;
}

/* C functions would see a path with a zero byte as a shorter one, and might write another file than
 * the script names. A number is refused although Lua converts it: it is a mistake here. */
const char *ms_lua_path(lua_State *L, int index, const char *what)
{
    if (lua_type(L, index) != LUA_TSTRING)
        ms_lua_error(L, "%s must be a string, not %s", what, luaL_typename(L, index));
    size_t bytes;
    const char *text = lua_tolstring(L, index, &bytes);
    if (bytes == 0) ms_lua_error(L, "%s is empty", what);
    if (strlen(text) != bytes) ms_lua_error(L, "%s has a zero byte in it", what);
    return text;
}

/* Reads the error record of the context that ms_lua_context gives, so it must follow the failed
 * call directly. */
int ms_lua_io_failed(lua_State *L) { return ms_lua_failed(L, &ms_lua_context(L)->error); }

/* The strings are borrowed: the Lua list keeps them alive while the userdata is used. Each string
 * is checked as a path is, also names and metadata: none of them may have a zero byte. */
const char **ms_lua_string_list(lua_State *L, int index, uint32_t *count, const char *what)
{
    index = lua_absindex(L, index);
    luaL_checktype(L, index, LUA_TTABLE);
    lua_Unsigned n = lua_rawlen(L, index);
    if (n > INT32_MAX) ms_lua_error(L, "%s: %llu are too many", what, (unsigned long long)n);
    const char **list = lua_newuserdatauv(L, (size_t)n * sizeof *list + 1, 0);
    for (lua_Unsigned i = 0; i < n; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        list[i] = ms_lua_path(L, -1, what);
        lua_pop(L, 1);
    }
    *count = (uint32_t)n;
    return list;
}

/* -------------------------------------------------------------- whole files */

/* core.file_read(path): its bytes. A failure is nil, message, code; more than 2 GiB is one as well,
 * since such a file is data and is read by a data set. A file that grows meanwhile is cut to the
 * size that it had; one that shrinks is "corrupt". */
static int file_read(lua_State *L)
{
    ms_context *context = ms_lua_context(L);
    const char *path = ms_lua_path(L, 1, "a path");
    luaL_Buffer buffer;
    ms_file *file = NULL;
    uint64_t bytes = 0;
    /* The size comes first, so that all memory is Lua's and nothing is held while Lua may raise. */
    ms_file_info info;
    int error = context->os->info(context->os->user, path, &info);
    if (error) {
        ms_fail_os(context, error, "cannot open", path);
        return ms_lua_io_failed(L);
    }
    bytes = info.bytes;
    if (info.is_directory || bytes > READ_LIMIT) {
        ms_fail(context, MS_ERROR_IO, "cannot read '%s': it is %s", path,
                info.is_directory ? "a folder" : "larger than 2 GiB");
        return ms_lua_io_failed(L);
    }
    char *data = luaL_buffinitsize(L, &buffer, (size_t)bytes);
    ms_status status = ms_file_open(context, path, MS_FILE_READ, &file);
    if (!status) status = ms_file_read(context, file, path, data, (size_t)bytes, 0);
    ms_file_close(context, file);
    if (status) return ms_lua_io_failed(L);
    luaL_pushresultsize(&buffer, (size_t)bytes);
    return 1;
}

/* core.file_write(path, text): atomic and durable. A reader never sees half of it, and after a
 * crash the old or the new content is there; hence it is right for small files that others watch
 * (manifests, plans), and wrong for logs. */
static int file_write(lua_State *L)
{
    const char *path = ms_lua_path(L, 1, "a path");
    size_t bytes;
    const char *text = luaL_checklstring(L, 2, &bytes);
    if (ms_file_write_atomic(ms_lua_context(L), path, text, bytes)) return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* ----------------------------------------------------- files that stay open */

/* path: for messages, may be cut. `file` is NULL before it is open and after close(). os is the
 * table that opened it, kept because the engine may be gone when __gc runs. */
typedef struct open_file {
    ms_file *file;
    const ms_os *os;
    char path[256];
} open_file;

/* Pushes a file that is not open yet. The userdata comes first, so that an open file is never
 * without an owner. */
static open_file *new_file(lua_State *L, const char *path)
{
    open_file *made = lua_newuserdatauv(L, sizeof *made, 0);
    /* The whole struct is set, so the path ends with a zero even where strncpy fills its room. */
    *made = (open_file){ .os = ms_lua_context(L)->os };
    strncpy(made->path, path, sizeof made->path - 1);
    luaL_setmetatable(L, FILE_TYPE);
    return made;
}

/* file:close(), __gc, __close. A second call does nothing. At a close nothing is lost that a write
 * has accepted; there is no buffer here. */
static int file_close(lua_State *L)
{
    open_file *open = luaL_checkudata(L, 1, FILE_TYPE);
    /* Taken out first: a second close finds NULL. */
    ms_file *file = open->file;
    open->file = NULL;
    if (file) open->os->close(open->os->user, file);
    return 0;
}

/* core.file_append(path): a file whose writes go to its end, each as a whole or not at all; made if
 * need be. For metrics, a line for each step: a crash loses at most the last lines, and never
 * leaves half of one in front of another. Only one process may append to a file. */
static int file_append(lua_State *L)
{
    ms_context *context = ms_lua_context(L);
    const char *path = ms_lua_path(L, 1, "a path");
    open_file *made = new_file(L, path);
    if (ms_file_open(context, path, MS_FILE_WRITE | MS_FILE_APPEND | MS_FILE_CREATE, &made->file))
        return ms_lua_io_failed(L);
    return 1;
}

/* core.file_lock(path): a lock that lasts until close() or the end of the process. One run writes a
 * folder at a time. A second one gets "denied" and the number of the process that has the lock. A
 * crash releases it. */
static int file_lock(lua_State *L)
{
    ms_context *context = ms_lua_context(L);
    const char *path = ms_lua_path(L, 1, "a path");
    open_file *made = new_file(L, path);
    if (ms_file_lock(context, path, &made->file)) return ms_lua_io_failed(L);
    return 1;
}

/* core.file_is_locked(path) -> whether a run has the lock, which may be this process; or nil,
 * message, code. */
static int file_is_locked(lua_State *L)
{
    bool locked = false;
    if (ms_file_is_locked(ms_lua_context(L), ms_lua_path(L, 1, "a path"), &locked))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, locked);
    return 1;
}

/* file:write(text) -> file, or nil, message, code. The file is returned, so that calls can be
 * chained. */
static int file_append_text(lua_State *L)
{
    ms_context *context = ms_lua_context(L);
    open_file *open = luaL_checkudata(L, 1, FILE_TYPE);
    size_t bytes;
    const char *text = luaL_checklstring(L, 2, &bytes);
    if (!open->file) return ms_lua_error(L, "write: the file was closed");
    if (ms_file_append(context, open->file, open->path, text, bytes)) return ms_lua_io_failed(L);
    lua_settop(L, 1);
    return 1;
}

/* ------------------------------------------------------------------ folders */

/* core.make_directory(path) -> true, or nil, message, code. It makes the parents, too. A folder
 * that exists already is success, because all ranks may make it at once. */
static int make_directory(lua_State *L)
{
    if (ms_folder_make(ms_lua_context(L), ms_lua_path(L, 1, "a path"))) return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* core.remove(path): a file, or a folder with the files in it; true also if there was none. Only
 * one level of a folder: ms_folder_remove refuses folders in it, so that a wrong path does not
 * remove a tree. */
static int remove_path(lua_State *L)
{
    ms_context *context = ms_lua_context(L);
    const char *path = ms_lua_path(L, 1, "a path");
    ms_file_info info;
    ms_status status = MS_OK;
    int error = context->os->info(context->os->user, path, &info);
    if (!error && info.is_directory) status = ms_folder_remove(context, path);
    else if (!error) error = context->os->remove(context->os->user, path);
    /* What is not there needs no removal: two ranks may both try. */
    if (!status && error && ms_fail_os(context, error, "cannot remove", path) != MS_ERROR_NOT_FOUND)
        status = context->error.status;
    if (status) return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* core.exists(path): "file", "folder" or false; then its bytes, and when it was changed, in ns. A
 * path that cannot be looked at counts as absent; whoever opens it gets the reason. */
static int exists(lua_State *L)
{
    ms_context *context = ms_lua_context(L);
    ms_file_info info;
    if (context->os->info(context->os->user, ms_lua_path(L, 1, "a path"), &info) != 0) {
        lua_pushboolean(L, false);
        return 1;
    }
    lua_pushstring(L, info.is_directory ? "folder" : "file");
    lua_pushinteger(L, (lua_Integer)info.bytes);
    lua_pushinteger(L, info.modified_ns);
    return 3;
}

/* The names of a folder while they are copied into a Lua table, with a context of their own:
 * freeing them must not depend on the engine. */
typedef struct names_box {
    ms_names names;
    ms_context context;
} names_box;

/* __gc: frees the names, also where building the table has raised. */
static int names_gc(lua_State *L)
{
    names_box *box = lua_touserdata(L, 1);
    ms_names_free(&box->context, &box->names);
    return 0;
}

/* core.list(path): the names in a folder, sorted by bytes. The order is by bytes and so the same on
 * every file system, locale and rank. */
static int list(lua_State *L)
{
    const char *path = ms_lua_path(L, 1, "a path");
    names_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (names_box){ 0 };
    /* Its errors are its own too, so the message of this call is read from there. */
    ms_context_init(&box->context, ms_lua_context(L)->os);
    luaL_setmetatable(L, "ms.Names");
    if (ms_folder_list(&box->context, path, &box->names))
        return ms_lua_failed(L, &box->context.error);
    lua_createtable(L, (int)box->names.count, 0);
    for (size_t i = 0; i < box->names.count; i++) {
        lua_pushstring(L, box->names.items[i]);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* ------------------------------------------------------------------- clocks */

/* core.clock_ms(): milliseconds of a clock that only goes forward, with a fraction. For differences
 * of times in scripts and reports; it is the clock of flight records as well. */
static int clock_ms(lua_State *L)
{
    const ms_os *os = ms_lua_context(L)->os;
    lua_pushnumber(L, (double)os->monotonic_ns(os->user) * 1e-6);
    return 1;
}

/* core.time(): seconds since 1970, with a fraction. It jumps when the system's time is set, so it
 * is for dates and not for measuring. */
static int real_time(lua_State *L)
{
    const ms_os *os = ms_lua_context(L)->os;
    lua_pushnumber(L, (double)os->realtime_ns(os->user) * 1e-9);
    return 1;
}

/* They return nil, message, code where the system refuses; a wrong argument raises. */
static const luaL_Reg functions[] = {
    { "file_read", file_read },
    { "file_write", file_write },
    { "file_append", file_append },
    { "file_lock", file_lock },
    { "file_is_locked", file_is_locked },
    { "make_directory", make_directory },
    { "remove", remove_path },
    { "exists", exists },
    { "list", list },
    { "clock_ms", clock_ms },
    { "time", real_time },
    { NULL, NULL },
};

static const luaL_Reg file_methods[] = { { "write", file_append_text },
                                         { "close", file_close },
                                         { NULL, NULL } };
static const luaL_Reg file_metamethods[] = { { "__gc", file_close },
                                             { "__close", file_close },
                                             { NULL, NULL } };
static const luaL_Reg names_metamethods[] = { { "__gc", names_gc }, { NULL, NULL } };

/* Nothing here needs an engine, so files can be read before ms.init. */
void ms_open_io(lua_State *L, int runtime)
{
    ms_lua_type(L, runtime, FILE_TYPE, file_metamethods, file_methods);
    lua_pop(L, 1);
    ms_lua_type(L, runtime, "ms.Names", names_metamethods, NULL);
    lua_pop(L, 1);
    ms_lua_register(L, runtime, functions);
}
