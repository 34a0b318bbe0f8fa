/* codec.c: codecs in Lua: floats as bytes for the wire. */
#include "bindings/codec.h"

#include "bindings/arguments.h"
#include "bindings/operators.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define MS_CODEC_TYPE "ms.Codec"

/* The names in Lua, in the order of ms_codec_kind: an index into this list is the kind. */
static const char *const kinds[] = { "int8", "int4", "int2", "fp8", "fp4", "sign", NULL };

/* The codec at 1. It is plain data, so it needs no __gc. It holds no tensor either, so one codec
 * may serve all links and streams. */
const ms_codec *ms_lua_codec(lua_State *L, int index)
{
    return luaL_checkudata(L, index, MS_CODEC_TYPE);
}
static const ms_codec *check_codec(lua_State *L) { return ms_lua_codec(L, 1); }

/* The options of codec() at index 2, which is a table. `scale = false` gives a bare codec. The
 * combinations that make no sense are refused by the caller, which knows the kind. */
static void read_options(lua_State *L, ms_codec *out)
{
    static const char *const keys[] = { "block", "rounding", "scale", NULL };
    static const char *const roundings[] = { "nearest", "stochastic", NULL };
    luaL_checktype(L, 2, LUA_TTABLE);
    ms_lua_known_keys(L, 2, keys, "option of a codec");
    out->block = ms_lua_field_integer(L, 2, "block", 256, 8, INT64_MAX / 8);
    out->bare = !ms_lua_field_boolean(L, 2, "scale", true);
    if (lua_getfield(L, 2, "rounding") != LUA_TNIL)
        out->stochastic = ms_lua_choice(L, -1, roundings, "rounding") == 1;
    lua_pop(L, 1);
}

/* core.codec(kind, { block = 256, rounding = "nearest" | "stochastic", scale = true }?). The block
 * must be a multiple of 8 because the codes of a block begin at a byte, also where a code is one
 * bit. */
static int codec(lua_State *L)
{
    ms_codec made = { .kind = (ms_codec_kind)ms_lua_choice(L, 1, kinds, "kind of codec"),
                      .block = 256 };
    lua_settop(L, 2);
    if (!lua_isnil(L, 2)) read_options(L, &made);
    if (made.block % 8 != 0)
        return ms_lua_error(L, "codec: block is %d: it must be a multiple of 8", (int)made.block);
    if (made.bare && made.kind != MS_CODEC_SIGN)
        return ms_lua_error(L, "codec: only 'sign' can do without scales, not '%s'",
                            kinds[made.kind]);
    if (made.stochastic && made.kind == MS_CODEC_SIGN)
        return ms_lua_error(L, "codec: 'sign' does not round: leave rounding out");
    /* Everything was checked before: a codec that exists is a valid one. */
    *(ms_codec *)lua_newuserdatauv(L, sizeof made, 0) = made;
    luaL_setmetatable(L, MS_CODEC_TYPE);
    return 1;
}

/* codec:encode(t, { error = false }?) -> payload, with error also what the encoding loses. With
 * stochastic rounding each rank draws its own numbers (ms_lua_own_draw): with the same draws on all
 * ranks their rounding errors would add up in one direction instead of cancelling in the mean. */
static int codec_encode(lua_State *L)
{
    static const char *const keys[] = { "error", NULL };
    ms_lua_enter(L);
    const ms_codec *own = check_codec(L);
    ms_tensor *t = ms_lua_tensor(L, 2);
    lua_settop(L, 3);
    bool error = false;
    if (!lua_isnil(L, 3)) {
        luaL_checktype(L, 3, LUA_TTABLE);
        ms_lua_known_keys(L, 3, keys, "option of encode");
        error = ms_lua_field_boolean(L, 3, "error", false);
    }
    ms_attributes attributes = { .codec = { .codec = *own } };
    if (own->stochastic) attributes.codec.random = ms_lua_own_draw(L);
    return ms_lua_apply_many(L, &ms_op_codec_encode, &attributes, &t, 1, error ? 2 : 1);
}

/* The most numbers that a row of so many bytes has, by halving. ms_codec_bytes grows with n but has
 * no simple inverse, since a block that has begun costs a whole scale. It is used for an error
 * message only. */
static int64_t numbers_in(const ms_codec *codec, int64_t bytes)
{
    /* No code is shorter than one bit. */
    int64_t low = 0, high = 8 * bytes + 1;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (ms_codec_bytes(codec, middle) <= bytes) low = middle;
        else high = middle;
    }
    return low;
}

/* codec:decode(payload, n), codec:decode_sum(payload, n): n numbers in each row. A count that does
 * not fit the payload is an error that says which one does. n must be given, because several counts
 * of numbers can have the same bytes: a last byte may be filled in part. */
static int decode_with(lua_State *L, const ms_op *op)
{
    ms_lua_enter(L);
    const ms_codec *own = check_codec(L);
    ms_tensor *payload = ms_lua_tensor(L, 2);
    uint32_t dims = ms_tensor_dims(payload);
    int64_t n = ms_lua_integer(L, 3, 0, INT64_MAX / 8, "n"), wanted = ms_codec_bytes(own, n);
    int64_t have = dims ? ms_tensor_shape(payload)[dims - 1] : 0;
    if (ms_tensor_dtype(payload) == MS_U8 && dims && have != wanted)
        return ms_lua_error(
            L, "%s: rows of %d numbers have %d bytes, and the payload's have %d: n = %d would fit",
            ms_op_name(op), (int)n, (int)wanted, (int)have, (int)numbers_in(own, have));
    ms_attributes attributes = { .codec = { .codec = *own, .n = n } };
    return ms_lua_apply_many(L, op, &attributes, &payload, 1, 1);
}

/* codec:decode(payload, n) -> tensor; codec:decode_sum(payload, n) -> the sum over the rows.
 * decode_sum needs one pass over the payloads of all ranks and no f32 copy of each, so it is what
 * compressed reductions use. */
static int codec_decode(lua_State *L) { return decode_with(L, &ms_op_codec_decode); }
static int codec_decode_sum(lua_State *L) { return decode_with(L, &ms_op_codec_decode_sum); }

/* codec:bytes(n) -> the bytes of a row of n numbers. A recipe needs it to size the buffer that it
 * sends; it reads no tensor, so planners may call it, too. */
static int codec_bytes(lua_State *L)
{
    const ms_codec *own = check_codec(L);
    lua_pushinteger(L, ms_codec_bytes(own, ms_lua_integer(L, 2, 0, INT64_MAX / 16, "n")));
    return 1;
}

/* tostring(codec) -> its kind with the options that change the wire format, for the labels and
 * messages of links. */
static int codec_string(lua_State *L)
{
    const ms_codec *own = check_codec(L);
    if (own->bare) lua_pushfstring(L, "codec(%s, no scales)", kinds[own->kind]);
    else
        lua_pushfstring(L, "codec(%s, block %d%s)", kinds[own->kind], (int)own->block,
                        own->stochastic ? ", stochastic" : "");
    return 1;
}

/* The functions go to the module; the methods are reached through codecs only. */
void ms_open_codec(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "codec", codec }, { NULL, NULL } };
    static const luaL_Reg methods[] = { { "encode", codec_encode },
                                        { "decode", codec_decode },
                                        { "decode_sum", codec_decode_sum },
                                        { "bytes", codec_bytes },
                                        { NULL, NULL } };
    /* No __gc: see check_codec. */
    static const luaL_Reg events[] = { { "__tostring", codec_string }, { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_CODEC_TYPE, events, methods);
    lua_pop(L, 1);
}
