/* safetensors.c: safetensors files for the Lua library: an open file whose tensors are loaded one
 * by one, and saving. */
#include "bindings/io.h"

#include <string.h>

#define TYPE "ms.Safetensors"

/* file:close(), __gc, __close */
static int close_file(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, TYPE);
    ms_safetensors_close(*box);
    *box = NULL;
    return 0;
}

/* core.safetensors_open(path) */
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

/* file:entries() -> { name = { dtype, shape } } */
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

/* file:metadata() -> { key = value } */
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

/* file:load(name, hash): a new tensor; with a hash (an integer), its bytes must have it */
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
    ms_handle *handle = ms_lua_new_handle(L);
    const ms_safetensors_entry *entry = ms_safetensors_find(file, name);
    ms_tensor *tensor = NULL;
    ms_status status;
    if (entry) status = ms_safetensors_load(engine, file, entry, checked ? &hash : NULL, &tensor);
    else status = ms_fail(context, MS_ERROR_NOT_FOUND, "the file has no tensor '%.200s'", name);
    if (!status && hash != expected && !ms_engine_is_sim(engine)) {
        ms_tensor_release(tensor);
        status = ms_fail(context, MS_ERROR_CORRUPT,
                         "the bytes of tensor '%.200s' are not those that were saved", name);
    }
    if (status) return ms_lua_io_failed(L);
    ms_handle_fill(handle, tensor);
    return 1;
}

/* core.safetensors_save(path, names, tensors, metadata): metadata is a list of keys and values in
 * turn */
static int save(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "safetensors.save", "it waits for the values");
    ms_engine *engine = ms_lua_enter(L);
    const char *path = ms_lua_path(L, 1, "a path");
    uint32_t count = 0, given = 0, strings = 0;
    const char **names = ms_lua_string_list(L, 2, &count, "a tensor's name");
    ms_tensor **tensors = count ? ms_lua_tensor_list(L, 3, &given) : NULL;
    if (given != count) return ms_lua_error(L, "safetensors: %u names, %u tensors", count, given);
    const char **pairs = ms_lua_string_list(L, 4, &strings, "metadata");
    if (ms_safetensors_save(engine, path, names, tensors, count, pairs, strings / 2))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

static const luaL_Reg functions[] = { { "safetensors_open", open_file },
                                      { "safetensors_save", save },
                                      { NULL, NULL } };
static const luaL_Reg methods[] = { { "entries", entries },
                                    { "metadata", metadata },
                                    { "load", load },
                                    { "close", close_file },
                                    { NULL, NULL } };
static const luaL_Reg metamethods[] = { { "__gc", close_file },
                                        { "__close", close_file },
                                        { NULL, NULL } };

void ms_open_safetensors(lua_State *L, int runtime)
{
    ms_lua_type(L, runtime, TYPE, metamethods, methods);
    lua_pop(L, 1);
    ms_lua_register(L, runtime, functions);
}
