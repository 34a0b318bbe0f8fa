/* safetensors.c: safetensors files for the Lua library: an open file whose tensors are loaded one
 * by one, and saving. */
#include "bindings/safetensors.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/outside.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define TYPE "ms.Safetensors"
#define WRITER "ms.SafetensorsWriter"

/* file:close(), __gc, __close. An explicit close matters: a file stays open, with its descriptor
 * and its parsed header, until then or until the collector comes. A second call finds NULL, which
 * the engine accepts. The reader holds no tensor, so a finalizer may close it at any moment. */
static int close_file(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, TYPE);
    ms_safetensors_close(*box);
    ms_lua_box_empty(L, box);
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
    ms_lua_make_room(L);
    void **box = ms_lua_box(L, TYPE);
    ms_safetensors *file = NULL;
    if (ms_safetensors_open(context, path, &file)) return ms_lua_io_failed(L);
    *box = file;
    ms_lua_box_holds(L, box, MS_OUTSIDE_FILE);
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

/* The list of hashes at the index, in a userdata on the stack; NULL, and 0, without a list. */
static const uint64_t *read_hashes(lua_State *L, int index, uint32_t *count)
{
    *count = 0;
    if (lua_isnoneornil(L, index)) return NULL;
    luaL_checktype(L, index, LUA_TTABLE);
    *count = (uint32_t)lua_rawlen(L, index);
    uint64_t *list = lua_newuserdatauv(L, (*count + 1) * sizeof *list, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        list[i] = (uint64_t)ms_lua_integer(L, -1, INT64_MIN, INT64_MAX, "a hash");
        lua_pop(L, 1);
    }
    return list;
}

/* file:part(name, first, count, hashes?, into?) -> true; or nil, message, code. Elements [first,
 * first + count) go to the 1-D tensor `into`; without it they are only compared with the hashes,
 * which are as ms_safetensors_read_part takes them. */
static int part(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_safetensors *file = ms_lua_unbox(L, 1, TYPE);
    const char *name = luaL_checkstring(L, 2);
    const ms_safetensors_entry *entry = ms_safetensors_find(file, name);
    ms_tensor *into = ms_lua_optional_tensor(L, 6);
    if (!entry) {
        (void)ms_fail(ms_engine_context(engine), MS_ERROR_NOT_FOUND,
                      "the file has no tensor '%.200s'", name);
        return ms_lua_io_failed(L);
    }
    int64_t all = 1;
    for (uint32_t d = 0; d < entry->dims; d++) all *= entry->shape[d];
    int64_t first = ms_lua_integer(L, 3, 0, all, "first"),
            count = ms_lua_integer(L, 4, 0, all - first, "count");
    if (into && entry->supported
        && (ms_tensor_count(into) != count || ms_tensor_dtype(into) != entry->dtype))
        return ms_lua_error(L, "part: the tensor has another length or dtype");
    uint32_t hash_count;
    const uint64_t *hashes = read_hashes(L, 5, &hash_count);
    if (ms_safetensors_read_part(engine, file, entry, first, count, hashes, hash_count, into))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* file:sample(name) -> an integer, as ms_safetensors_sample hashes it; or nil, message, code. */
static int sample(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_safetensors *file = ms_lua_unbox(L, 1, TYPE);
    const char *name = luaL_checkstring(L, 2);
    const ms_safetensors_entry *entry = ms_safetensors_find(file, name);
    uint64_t hash = 0;
    ms_status status;
    if (entry) status = ms_safetensors_sample(engine, file, entry, &hash);
    else
        status = ms_fail(ms_engine_context(engine), MS_ERROR_NOT_FOUND,
                         "the file has no tensor '%.200s'", name);
    if (status) return ms_lua_io_failed(L);
    lua_pushinteger(L, (lua_Integer)hash);
    return 1;
}

/* -------------------------------------------------------------------- writing */

/* A file that is written tensor by tensor. The context is its own: a finalizer may free the writer
 * after the engine. */
typedef struct open_writer {
    ms_safetensors_writer *writer;
    ms_context context;
    void *buffer; /* for each tensor in turn; NULL until the first one */
    size_t largest;
} open_writer;

/* Without a commit nothing is left of the file. */
static void end_writer(open_writer *open)
{
    ms_safetensors_free(open->writer);
    open->writer = NULL;
    ms_release(&open->context, open->buffer);
    open->buffer = NULL;
}

/* __gc and close. */
static int close_writer(lua_State *L)
{
    end_writer(luaL_checkudata(L, 1, WRITER));
    return 0;
}

/* Reads the shapes at 4, lists of sizes, into the specs. */
static void read_shapes(lua_State *L, ms_safetensors_spec *specs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        lua_rawgeti(L, 4, (lua_Integer)i + 1);
        luaL_checktype(L, -1, LUA_TTABLE);
        uint32_t dims = (uint32_t)lua_rawlen(L, -1);
        int64_t *shape = lua_newuserdatauv(L, (dims + 1) * sizeof *shape, 0);
        for (uint32_t d = 0; d < dims; d++) {
            lua_rawgeti(L, -2, (lua_Integer)d + 1);
            shape[d] = ms_lua_integer(L, -1, 0, INT64_MAX, "a size");
            lua_pop(L, 1);
        }
        specs[i].dims = dims;
        specs[i].shape = shape;
        /* The list of shapes keeps the userdata alive in place of the table. */
        lua_rawseti(L, 4, (lua_Integer)i + 1);
        lua_pop(L, 1);
    }
}

/* Bytes of the largest tensor. The shapes may be no tensor's; then the file is refused, or no
 * tensor fits. */
static size_t largest_of(const ms_safetensors_spec *specs, uint32_t count)
{
    size_t largest = 0;
    for (uint32_t i = 0; i < count; i++) {
        size_t bytes = ms_dtype_bytes(specs[i].dtype);
        for (uint32_t d = 0; d < specs[i].dims; d++) bytes *= (size_t)specs[i].shape[d];
        if (bytes > largest) largest = bytes;
    }
    return largest;
}

/* core.safetensors_create(path, names, dtypes, shapes, metadata) -> a writer; or nil, message,
 * code. Lists of one length; `shapes` is used up. metadata as for safetensors_save. */
static int create(lua_State *L)
{
    const char *path = ms_lua_path(L, 1, "a path");
    uint32_t count = 0, given = 0, strings = 0;
    lua_settop(L, 5);
    luaL_checktype(L, 4, LUA_TTABLE);
    const char **names = ms_lua_string_list(L, 2, &count, "a tensor's name");
    luaL_checktype(L, 3, LUA_TTABLE);
    given = (uint32_t)lua_rawlen(L, 3);
    if (given != count || lua_rawlen(L, 4) != count)
        return ms_lua_error(L, "safetensors: %u names, %u dtypes", count, given);
    const char **pairs = ms_lua_string_list(L, 5, &strings, "metadata");
    ms_safetensors_spec *specs = lua_newuserdatauv(L, (count + 1) * sizeof *specs, 0);
    for (uint32_t i = 0; i < count; i++) {
        lua_rawgeti(L, 3, (lua_Integer)i + 1);
        specs[i] =
            (ms_safetensors_spec){ .name = names[i], .dtype = ms_lua_dtype(L, lua_gettop(L)) };
        lua_pop(L, 1);
    }
    read_shapes(L, specs, count);
    open_writer *open = lua_newuserdatauv(L, sizeof *open, 0);
    *open = (open_writer){ .largest = largest_of(specs, count) };
    ms_context_init(&open->context, ms_lua_context(L)->os);
    luaL_setmetatable(L, WRITER);
    if (ms_safetensors_create(&open->context, path, specs, count, pairs, strings / 2,
                              &open->writer))
        return ms_lua_failed(L, &open->context.error);
    return 1;
}

/* The writer at 1; raises after commit or close. */
static open_writer *check_writer(lua_State *L)
{
    open_writer *open = luaL_checkudata(L, 1, WRITER);
    if (!open->writer) ms_lua_error(L, "safetensors: this writer was closed");
    return open;
}

/* writer:write(index, tensor) -> true; or nil, message, code. index counts from 1. Blocks until the
 * tensor has its value. */
static int write_tensor(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "save", "it waits for the values");
    ms_engine *engine = ms_lua_enter(L);
    open_writer *open = check_writer(L);
    uint32_t index = (uint32_t)ms_lua_integer(L, 2, 1, UINT32_MAX, "index") - 1;
    ms_tensor *tensor = ms_lua_tensor(L, 3);
    size_t bytes = ms_tensor_bytes(tensor);
    if (bytes > open->largest)
        return ms_lua_error(L, "safetensors: no tensor of this file has %zu bytes", bytes);
    /* One buffer for all: buffers of many sizes leave holes in the heap, which Lua's objects keep
     * from being used again. */
    if (!open->buffer)
        ms_lua_ok(L, ms_allocate(ms_engine_context(engine), open->largest, "a buffer for tensors",
                                 &open->buffer));
    if (bytes) ms_lua_ok(L, ms_tensor_read(tensor, open->buffer, bytes));
    if (ms_safetensors_write(open->writer, index, open->buffer, bytes))
        return ms_lua_failed(L, &open->context.error);
    lua_pushboolean(L, true);
    return 1;
}

/* writer:commit() -> true; or nil, message, code: the file has its name, durably. */
static int commit_writer(lua_State *L)
{
    open_writer *open = check_writer(L);
    ms_status status = ms_safetensors_commit(open->writer);
    end_writer(open);
    if (status) return ms_lua_failed(L, &open->context.error);
    lua_pushboolean(L, true);
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
                                      { "safetensors_create", create },
                                      { "safetensors_save", save },
                                      { NULL, NULL } };
/* One tensor at a time, so a file larger than memory can be read in parts. */
static const luaL_Reg methods[] = { { "entries", entries }, { "metadata", metadata },
                                    { "load", load },       { "part", part },
                                    { "sample", sample },   { "close", close_file },
                                    { NULL, NULL } };
static const luaL_Reg metamethods[] = { { "__gc", close_file },
                                        { "__close", close_file },
                                        { NULL, NULL } };

static const luaL_Reg writer_methods[] = { { "write", write_tensor },
                                           { "commit", commit_writer },
                                           { "close", close_writer },
                                           { NULL, NULL } };
static const luaL_Reg writer_metamethods[] = { { "__gc", close_writer },
                                               { "__close", close_writer },
                                               { NULL, NULL } };

/* The type's methods are reached through its objects only, so the table that ms_lua_type leaves is
 * popped. */
void ms_open_safetensors(lua_State *L, int runtime)
{
    ms_lua_type(L, runtime, TYPE, metamethods, methods);
    lua_pop(L, 1);
    ms_lua_type(L, runtime, WRITER, writer_metamethods, writer_methods);
    lua_pop(L, 1);
    ms_lua_register(L, runtime, functions);
}
