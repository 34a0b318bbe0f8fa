/* tokenizer.c: tokenizers in Lua: text to a tensor of ids and back, and decoding of a stream. */
#include "bindings/tokenizer.h"

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/dataset.h"
#include "bindings/outside.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "moonshard/tokenizer.h"

#define TOKENIZER "ms.Tokenizer"
#define DECODER "ms.TokenDecoder"
#define SHARDING "ms.Sharding"

/* ------------------------------------------------------------------- objects */

/* close(), __gc and __close. The box holds an encoder, which has a reference to its tokenizer;
 * decoders have references of their own. */
static int tokenizer_gc(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, TOKENIZER);
    ms_encoder_free(*box);
    ms_lua_box_empty(L, box);
    return 0;
}

static int decoder_gc(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, DECODER);
    ms_decoder_free(*box);
    ms_lua_box_empty(L, box);
    return 0;
}

/* A tokenizer and its decoders hold the same vocabulary. */
static void share_tokenizer(lua_State *L, void **box, const ms_tokenizer *tokenizer)
{
    ms_lua_box_shares(L, box, tokenizer, ms_tokenizer_memory(tokenizer));
}

static ms_tokenizer *check_tokenizer(lua_State *L)
{
    return ms_encoder_tokenizer(ms_lua_unbox(L, 1, TOKENIZER));
}

/* The list at index: { { text, id or nil }, ... }, as ms.tokenizer.load makes it. Strings are
 * borrowed from the list. */
static const ms_special_token *check_special(lua_State *L, int index, uint32_t *count)
{
    luaL_checktype(L, index, LUA_TTABLE);
    lua_Unsigned n = lua_rawlen(L, index);
    ms_special_token *list = lua_newuserdatauv(L, (size_t)(n + 1) * sizeof *list, 0);
    for (lua_Unsigned i = 0; i < n; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        lua_rawgeti(L, -1, 1);
        lua_rawgeti(L, -2, 2);
        list[i].text = luaL_checklstring(L, -2, &list[i].bytes);
        list[i].id = lua_isnil(L, -1) ? MS_NO_TOKEN
                                      : (uint32_t)ms_lua_integer(L, -1, 0, MS_TOKEN_ID_MAX,
                                                                 "the id of a special token");
        lua_pop(L, 3);
    }
    *count = (uint32_t)n;
    return list;
}

/* core.tokenizer(path, pattern, special) -> a tokenizer, or nil, message, code. pattern and special
 * may be nil. */
static int tokenizer_load(lua_State *L)
{
    const char *path = ms_lua_path(L, 1, "a path");
    ms_tokenizer_options options = { .pattern = NULL };
    if (!lua_isnoneornil(L, 2)) options.pattern = ms_lua_path(L, 2, "pattern");
    if (!lua_isnoneornil(L, 3)) options.special = check_special(L, 3, &options.special_count);
    ms_lua_make_room(L);
    void **box = ms_lua_box(L, TOKENIZER);
    ms_context *context = ms_lua_context(L);
    ms_tokenizer *tokenizer = NULL;
    ms_encoder *encoder = NULL;
    ms_status status = ms_tokenizer_load(context, path, &options, &tokenizer);
    if (!status) status = ms_encoder_new(context, tokenizer, &encoder);
    ms_tokenizer_release(tokenizer);
    if (status) return ms_lua_io_failed(L);
    *box = encoder;
    share_tokenizer(L, box, ms_encoder_tokenizer(encoder));
    ms_lua_box_holds(L, box, MS_ENCODER_BYTES);
    return 1;
}

/* --------------------------------------------------------------------- tokens */

/* tokenizer:vocab_size() -> the greatest id plus 1. */
static int tokenizer_vocab_size(lua_State *L)
{
    lua_pushinteger(L, ms_tokenizer_size(check_tokenizer(L)));
    return 1;
}

static int push_id(lua_State *L, uint32_t id)
{
    if (id == MS_NO_TOKEN) lua_pushnil(L);
    else lua_pushinteger(L, id);
    return 1;
}

/* tokenizer:id(text) -> the id of the token that is this text, or nil. */
static int tokenizer_id(lua_State *L)
{
    size_t bytes;
    const ms_tokenizer *tokenizer = check_tokenizer(L);
    const char *text = luaL_checklstring(L, 2, &bytes);
    return push_id(L, ms_tokenizer_find(tokenizer, text, bytes));
}

/* tokenizer:bos(), tokenizer:eos() -> an id, or nil. */
static int tokenizer_bos(lua_State *L) { return push_id(L, ms_tokenizer_bos(check_tokenizer(L))); }
static int tokenizer_eos(lua_State *L) { return push_id(L, ms_tokenizer_eos(check_tokenizer(L))); }

/* tokenizer:token(id) -> its text, and whether it is special; nil if no token has the id. */
static int tokenizer_token(lua_State *L)
{
    const ms_tokenizer *tokenizer = check_tokenizer(L);
    uint32_t id = (uint32_t)ms_lua_integer(L, 2, 0, UINT32_MAX - 1, "id");
    size_t bytes = 0;
    const char *text = ms_tokenizer_token(tokenizer, id, &bytes);
    if (text == NULL) return push_id(L, MS_NO_TOKEN);
    lua_pushlstring(L, text, bytes);
    lua_pushboolean(L, ms_tokenizer_is_special(tokenizer, id));
    return 2;
}

/* --------------------------------------------------------------------- encode */

static ms_edge edge_field(lua_State *L, int table, const char *name)
{
    ms_edge edge = MS_EDGE_FILE;
    lua_getfield(L, table, name);
    if (!lua_isnil(L, -1)) edge = lua_toboolean(L, -1) ? MS_EDGE_YES : MS_EDGE_NO;
    lua_pop(L, 1);
    return edge;
}

/* The options of tokenizer:encode in meta.lua, whose types were checked in Lua. */
static ms_encode_options check_options(lua_State *L, int table)
{
    static const char *const keys[] = { "bos", "eos", "special", NULL };
    static const char *const choices[] = { "text", "parse", "error", NULL };
    ms_encode_options options = { .special = MS_SPECIAL_TEXT };
    if (lua_isnoneornil(L, table)) return options;
    luaL_checktype(L, table, LUA_TTABLE);
    ms_lua_known_keys(L, table, keys, "option of encode");
    options.bos = edge_field(L, table, "bos");
    options.eos = edge_field(L, table, "eos");
    lua_getfield(L, table, "special");
    if (!lua_isnil(L, -1)) options.special = (ms_special)ms_lua_choice(L, -1, choices, "special");
    lua_pop(L, 1);
    return options;
}

/* A new tensor of these ids. The handle is on the stack already. */
static void fill_ids(lua_State *L, ms_engine *engine, ms_handle *handle, const uint32_t *ids,
                     int64_t *values, size_t count)
{
    int64_t length = (int64_t)count;
    ms_tensor *made = NULL;
    for (size_t i = 0; i < count; i++) values[i] = ids[i];
    ms_status status = ms_tensor_new(engine, MS_I64, 1, &length, &made);
    if (!status && count) status = ms_tensor_write(made, values, count * sizeof *values);
    if (status) ms_tensor_release(made);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, made);
}

/* tokenizer:encode(text, options) -> i64 [length]. */
static int tokenizer_encode(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_encoder *encoder = ms_lua_unbox(L, 1, TOKENIZER);
    size_t bytes, count = 0;
    const char *text = luaL_checklstring(L, 2, &bytes);
    ms_encode_options options = check_options(L, 3);
    const uint32_t *ids = NULL;
    ms_lua_ok(L,
              ms_encode(ms_engine_context(engine), encoder, text, bytes, &options, &ids, &count));
    /* The encoder keeps the ids while Lua may raise. */
    int64_t *values = lua_newuserdatauv(L, count * sizeof *values + 1, 0);
    ms_handle *handle = ms_lua_new_handle(L);
    fill_ids(L, engine, handle, ids, values, count);
    return 1;
}

/* --------------------------------------------------------------------- decode */

static uint32_t as_id(lua_State *L, int64_t value)
{
    if (value < 0 || value >= UINT32_MAX)
        ms_lua_error(L, "decode: %lld is no id", (long long)value);
    return (uint32_t)value;
}

/* Ids from a table or an integer. Pushes the memory. */
static const uint32_t *ids_of_list(lua_State *L, int index, size_t *count)
{
    bool one = lua_isinteger(L, index);
    *count = 1;
    if (!one) {
        luaL_checktype(L, index, LUA_TTABLE);
        *count = (size_t)lua_rawlen(L, index);
    }
    uint32_t *ids = lua_newuserdatauv(L, *count * sizeof *ids + 1, 0);
    for (size_t i = 0; i < *count; i++) {
        int whole = 1;
        if (one) lua_pushvalue(L, index);
        else lua_rawgeti(L, index, (lua_Integer)i + 1);
        lua_Integer value = lua_tointegerx(L, -1, &whole);
        if (!whole || lua_type(L, -1) != LUA_TNUMBER)
            ms_lua_error(L, "decode: ids are integers, not %s", luaL_typename(L, -1));
        ids[i] = as_id(L, value);
        lua_pop(L, 1);
    }
    return ids;
}

/* Ids from an integer tensor, which blocks. Pushes the memory. */
static const uint32_t *ids_of_tensor(lua_State *L, int index, size_t *count)
{
    ms_lua_refuse_in_hook(L, "decode", "it waits for the values");
    ms_lua_enter(L);
    ms_tensor *tensor = ms_lua_tensor(L, index);
    ms_dtype dtype = ms_tensor_dtype(tensor);
    if (ms_dtype_is_float(dtype) || dtype == MS_BOOL)
        ms_lua_error(L, "decode: ids are integers, these are %s", ms_dtype_name(dtype));
    *count = (size_t)ms_tensor_count(tensor);
    void *data = lua_newuserdatauv(L, ms_tensor_bytes(tensor) + 1, 0);
    uint32_t *ids = lua_newuserdatauv(L, *count * sizeof *ids + 1, 0);
    if (*count) ms_lua_ok(L, ms_tensor_read(tensor, data, ms_tensor_bytes(tensor)));
    for (size_t i = 0; i < *count; i++) ids[i] = as_id(L, ms_lua_token_at(dtype, data, i));
    return ids;
}

/* decoder:add(ids) -> the text that these ids complete. */
static int decoder_add(lua_State *L)
{
    ms_decoder *decoder = ms_lua_unbox(L, 1, DECODER);
    size_t count = 0, bytes = 0;
    const char *text = NULL;
    const uint32_t *ids =
        ms_lua_is_tensor(L, 2) ? ids_of_tensor(L, 2, &count) : ids_of_list(L, 2, &count);
    ms_context *context = ms_lua_context(L);
    if (ms_decoder_add(context, decoder, ids, count, &text, &bytes))
        return ms_lua_error(L, "decode: %s", context->error.message);
    lua_pushlstring(L, text ? text : "", bytes);
    return 1;
}

/* decoder:finish() -> the bytes that are no whole character; the next text may begin. */
static int decoder_finish(lua_State *L)
{
    const char *text = NULL;
    size_t bytes = 0;
    ms_decoder_finish(ms_lua_unbox(L, 1, DECODER), &text, &bytes);
    lua_pushlstring(L, bytes ? text : "", bytes);
    return 1;
}

/* core.token_decoder(tokenizer, special) -> a decoder. */
static int decoder_new(lua_State *L)
{
    ms_tokenizer *tokenizer = check_tokenizer(L);
    bool special = lua_toboolean(L, 2);
    ms_lua_make_room(L);
    void **box = ms_lua_box(L, DECODER);
    ms_decoder *made = NULL;
    ms_lua_ok(L, ms_decoder_new(ms_lua_context(L), tokenizer, special, &made));
    *box = made;
    share_tokenizer(L, box, tokenizer);
    return 1;
}

/* --------------------------------------------------------------------- shards */

/* __gc and __close: the threads end after their present documents. */
static int sharding_gc(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, SHARDING);
    ms_sharding_free(*box);
    ms_lua_box_empty(L, box);
    return 0;
}

/* The parts in the list at index: paths, or { path = path, from = byte, to = byte }. Pushes their
 * memory, which borrows the strings. */
static const ms_shard_part *check_parts(lua_State *L, int index, uint32_t *count)
{
    index = lua_absindex(L, index);
    luaL_checktype(L, index, LUA_TTABLE);
    *count = (uint32_t)lua_rawlen(L, index);
    ms_shard_part *parts = lua_newuserdatauv(L, (*count + (size_t)1) * sizeof *parts, 0);
    for (uint32_t i = 0; i < *count; i++) {
        parts[i] = (ms_shard_part){ 0 };
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        if (lua_istable(L, -1)) {
            parts[i].begin = (uint64_t)ms_lua_field_integer(L, -1, "from", 0, 0, INT64_MAX);
            parts[i].end = (uint64_t)ms_lua_field_integer(L, -1, "to", 0, 0, INT64_MAX);
            lua_getfield(L, -1, "path");
            lua_remove(L, -2);
        }
        parts[i].path = ms_lua_path(L, -1, "a path");
        lua_pop(L, 1);
    }
    return parts;
}

/* The list at index: { { out = path, files = { path, ... } }, ... }. Pushes the jobs, which borrow
 * the strings, and a table that keeps their lists of parts. */
static const ms_shard_job *check_jobs(lua_State *L, int index, uint32_t *count)
{
    luaL_checktype(L, index, LUA_TTABLE);
    *count = (uint32_t)lua_rawlen(L, index);
    ms_shard_job *jobs = lua_newuserdatauv(L, (*count + 1) * sizeof *jobs, 0);
    lua_createtable(L, (int)*count, 0);
    for (uint32_t i = 0; i < *count; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        lua_getfield(L, -1, "out");
        jobs[i].out = ms_lua_path(L, -1, "the path of a shard");
        lua_getfield(L, -2, "files");
        jobs[i].parts = check_parts(L, -1, &jobs[i].count);
        lua_rawseti(L, -5, (lua_Integer)i + 1);
        lua_pop(L, 3);
    }
    return jobs;
}

/* core.sharding(tokenizer, jobs, width, end, threads, parse, field): starts threads that write
 * shards of tokens. end: the token after each document, or nil. parse: names of special tokens in a
 * document become these tokens. field: files are lines of JSON, and a document is the member of
 * this name. Returns nil, message, code where the system refuses. */
static int sharding_new(lua_State *L)
{
    ms_tokenizer *tokenizer = check_tokenizer(L);
    uint32_t count = 0;
    ms_sharding_options options = {
        .width = (uint32_t)ms_lua_integer(L, 3, 2, 4, "width"),
        .end = MS_NO_TOKEN,
        .threads = (uint32_t)ms_lua_integer(L, 5, 1, INT32_MAX, "threads"),
        .special = lua_toboolean(L, 6) ? MS_SPECIAL_PARSE : MS_SPECIAL_TEXT,
        .field = luaL_optstring(L, 7, NULL),
    };
    if (!lua_isnil(L, 4))
        options.end = (uint32_t)ms_lua_integer(L, 4, 0, ms_tokenizer_size(tokenizer) - 1, "end");
    /* The box keeps the jobs, and what they borrow, while threads use them. */
    lua_settop(L, 7);
    lua_createtable(L, 4, 0);
    const ms_shard_job *jobs = check_jobs(L, 2, &count);
    lua_rawseti(L, 8, 1);
    lua_rawseti(L, 8, 2);
    lua_pushvalue(L, 2);
    lua_rawseti(L, 8, 3);
    lua_pushvalue(L, 7);
    lua_rawseti(L, 8, 4);
    void **box = ms_lua_box(L, SHARDING);
    lua_pushvalue(L, 8);
    lua_setiuservalue(L, -2, 1);
    ms_sharding *made = NULL;
    if (ms_sharding_start(ms_lua_context(L), tokenizer, jobs, count, &options, &made))
        return ms_lua_io_failed(L);
    *box = made;
    return 1;
}

/* sharding:wait(ms) -> whether it runs, bytes and tokens of finished documents, complete shards. */
static int sharding_wait(lua_State *L)
{
    ms_sharding_state state;
    ms_sharding *sharding = ms_lua_unbox(L, 1, SHARDING);
    uint64_t ms = (uint64_t)ms_lua_integer(L, 2, 0, INT32_MAX, "ms");
    ms_sharding_wait(sharding, ms * 1000000u, &state);
    lua_pushboolean(L, state.running);
    lua_pushinteger(L, (lua_Integer)state.bytes);
    lua_pushinteger(L, (lua_Integer)state.tokens);
    lua_pushinteger(L, state.shards);
    return 4;
}

/* sharding:finish() -> true once all shards are written, or nil, message, code. */
static int sharding_finish(lua_State *L)
{
    ms_sharding *sharding = ms_lua_unbox(L, 1, SHARDING);
    if (ms_sharding_finish(ms_lua_context(L), sharding)) return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* -------------------------------------------------------------------- opening */

static const luaL_Reg functions[] = {
    { "tokenizer", tokenizer_load },
    { "token_decoder", decoder_new },
    { "sharding", sharding_new },
    { NULL, NULL },
};

static const luaL_Reg tokenizer_methods[] = {
    { "vocab_size", tokenizer_vocab_size },
    { "id", tokenizer_id },
    { "token", tokenizer_token },
    { "bos", tokenizer_bos },
    { "eos", tokenizer_eos },
    { "encode", tokenizer_encode },
    { "close", tokenizer_gc },
    { NULL, NULL },
};

static const luaL_Reg decoder_methods[] = {
    { "add", decoder_add },
    { "finish", decoder_finish },
    { "close", decoder_gc },
    { NULL, NULL },
};

static const luaL_Reg tokenizer_metamethods[] = { { "__gc", tokenizer_gc },
                                                  { "__close", tokenizer_gc },
                                                  { NULL, NULL } };
static const luaL_Reg decoder_metamethods[] = { { "__gc", decoder_gc },
                                                { "__close", decoder_gc },
                                                { NULL, NULL } };

static const luaL_Reg sharding_methods[] = {
    { "wait", sharding_wait },
    { "finish", sharding_finish },
    { NULL, NULL },
};
static const luaL_Reg sharding_metamethods[] = { { "__gc", sharding_gc },
                                                 { "__close", sharding_gc },
                                                 { NULL, NULL } };

/* core.Tokenizer and core.TokenDecoder are the tables of methods: the library adds to them. */
void ms_open_tokenizer(lua_State *L, int runtime)
{
    ms_lua_type(L, runtime, TOKENIZER, tokenizer_metamethods, tokenizer_methods);
    lua_setfield(L, -2, "Tokenizer");
    ms_lua_type(L, runtime, DECODER, decoder_metamethods, decoder_methods);
    lua_setfield(L, -2, "TokenDecoder");
    ms_lua_type(L, runtime, SHARDING, sharding_metamethods, sharding_methods);
    lua_pop(L, 1);
    ms_lua_register(L, runtime, functions);
}
