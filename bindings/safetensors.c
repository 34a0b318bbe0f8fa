/* safetensors.c: safetensors files for the Lua library: an open file whose tensors are loaded one
 * by one, and saving. */
#include "bindings/io.h"

#include <string.h>

#define TYPE "ms.Safetensors"

/* file:close(), __gc, __close. An explicit close matters: a file stays open, with its descriptor
 * and its parsed header, until then or until the collector comes. A second call finds NULL, which
 * the engine accepts. The reader holds no tensor, so a finalizer may close it at any moment. */
static int close_file(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, TYPE);
    ms_safetensors_close(*box);
    *box = NULL;
    return 0;
}

/* core.safetensors_open(path) -> file; or nil, message, code, since a file that is missing or
 * damaged is the environment's fault and not the programmer's. Needs no engine, so that the
 * contents of a file can be listed without starting one. The box exists before the file does: no
 * error between the two leaves a file open. */
static int open_file(lua_State *L)
{
    const char *path = ms_lua_path(L, 1, "a path");
    ms_context *context = ms_lua_context(L);
    void **box = ms_lua_box(L, TYPE);
    ms_safetensors *file = NULL;
    if (ms_safetensors_open(context, path, &file)) return ms_lua_io_failed(L);
    *box = file;
    return 1;
}

/* file:entries() -> { name = { dtype =, shape = { ... } } }. It lists also tensors that load()
 * refuses (dtype "f64", more dimensions than MS_DIMS_MAX), so that a caller can say which one it
 * cannot use. The strings belong to the reader and are copied into Lua here. */
static int entries(lua_State *L)
{
    const ms_safetensors *file = ms_lua_unbox(L, 1, TYPE);
    uint32_t count = ms_safetensors_count(file);
    lua_createtable(L, 0, (int)count);
    for (uint32_t i = 0; i < count; i++) {
        const ms_safetensors_entry *entry = ms_safetensors_at(file, i);
        lua_createtable(L, 0, 2);
        lua_pushstring(L, entry->dtype_name);
        lua_setfield(L, -2, "dtype");
        lua_createtable(L, (int)entry->dims, 0);
        for (uint32_t d = 0; d < entry->dims; d++) {
            lua_pushinteger(L, entry->shape[d]);
            lua_rawseti(L, -2, (lua_Integer)d + 1);
        }
        lua_setfield(L, -2, "shape");
        lua_setfield(L, -2, entry->name);
    }
    return 1;
}

/* file:metadata() -> { key = value }, strings only: the format allows nothing else there. */
static int metadata(lua_State *L)
{
    const ms_safetensors *file = ms_lua_unbox(L, 1, TYPE);
    const char *key, *value;
    lua_newtable(L);
    for (uint32_t i = 0; ms_safetensors_metadata(file, i, &key, &value); i++) {
        lua_pushstring(L, value);
        lua_setfield(L, -2, key);
    }
    return 1;
}

/* file:load(name, hash?) -> a new tensor; or nil, message, code. hash is the integer that
 * core.snapshot gave for the tensor's bytes: where it is given, other bytes are refused as
 * "corrupt", so that a checkpoint whose disk has lost a bit is noticed when it is loaded and not by
 * its loss curve. Without it the bytes are not hashed. */
static int load(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_context *context = ms_engine_context(engine);
    ms_safetensors *file = ms_lua_unbox(L, 1, TYPE);
    const char *name = luaL_checkstring(L, 2);
    bool checked = !lua_isnoneornil(L, 3);
    uint64_t expected =
                 checked ? (uint64_t)ms_lua_integer(L, 3, INT64_MIN, INT64_MAX, "a hash") : 0,
             hash = 0;
    /* Making a handle may raise, so it comes before there is a tensor. */
    ms_handle *handle = ms_lua_new_handle(L);
    const ms_safetensors_entry *entry = ms_safetensors_find(file, name);
    ms_tensor *tensor = NULL;
    ms_status status;
    if (entry) status = ms_safetensors_load(engine, file, entry, checked ? &hash : NULL, &tensor);
    else status = ms_fail(context, MS_ERROR_NOT_FOUND, "the file has no tensor '%.200s'", name);
    /* On the sim device no bytes are kept, so there is nothing to compare. */
    if (!status && hash != expected && !ms_engine_is_sim(engine)) {
        ms_tensor_release(tensor);
        status = ms_fail(context, MS_ERROR_CORRUPT,
                         "the bytes of tensor '%.200s' are not those that were saved", name);
    }
    if (status) return ms_lua_io_failed(L);
    ms_handle_fill(handle, tensor);
    return 1;
}

/* core.safetensors_save(path, names, tensors, metadata) -> true; or nil, message, code. names and
 * tensors are lists of one length; metadata is a list of keys and values in turn, because a list
 * fixes their order and a table does not. Blocks until each tensor has its value, hence no hook may
 * call it: the value could depend on work that the hook has still to enqueue. */
static int save(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "safetensors.save", "it waits for the values");
    ms_engine *engine = ms_lua_enter(L);
    const char *path = ms_lua_path(L, 1, "a path");
    uint32_t count = 0, given = 0, strings = 0;
    const char **names = ms_lua_string_list(L, 2, &count, "a tensor's name");
    /* ms_lua_tensor_list refuses an empty list, and a file without tensors is allowed. */
    ms_tensor **tensors = count ? ms_lua_tensor_list(L, 3, &given) : NULL;
    if (given != count) return ms_lua_error(L, "safetensors: %u names, %u tensors", count, given);
    const char **pairs = ms_lua_string_list(L, 4, &strings, "metadata");
    /* A key at the end that has no value is left out. */
    if (ms_safetensors_save(engine, path, names, tensors, count, pairs, strings / 2))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

static const luaL_Reg functions[] = { { "safetensors_open", open_file },
                                      { "safetensors_save", save },
                                      { NULL, NULL } };
/* One tensor at a time, so a file larger than memory can be read in parts. */
static const luaL_Reg methods[] = { { "entries", entries },
                                    { "metadata", metadata },
                                    { "load", load },
                                    { "close", close_file },
                                    { NULL, NULL } };
static const luaL_Reg metamethods[] = { { "__gc", close_file },
                                        { "__close", close_file },
                                        { NULL, NULL } };

/* The type's methods are reached through its objects only, so the table that ms_lua_type leaves is
 * popped. */
void ms_open_safetensors(lua_State *L, int runtime)
{
    ms_lua_type(L, runtime, TYPE, metamethods, methods);
    lua_pop(L, 1);
    ms_lua_register(L, runtime, functions);
}
