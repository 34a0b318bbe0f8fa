/* gemm_choices.c: in Lua, which algorithms of their library a GPU's products use.
 * lua/moonshard/train/tune.lua calls this. */
#include "bindings/gemm_choices.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

enum { WORDS = 8, WORD = 16, HEX = WORDS * WORD };

/* core.products_place(gpu) -> what choices are for on the GPU of that number, from 0; nil if that
 * GPU or the library cannot be used. Without a number: on this rank's GPU. */
static int place(lua_State *L)
{
    char text[256];
    const ms_runtime *runtime = ms_lua_runtime(L);
    uint32_t gpu = lua_isnoneornil(L, 1) ? runtime->settings.device_index
                                         : (uint32_t)ms_lua_integer(L, 1, 0, UINT32_MAX, "gpu");
    if (!ms_products_place(NULL, gpu, text, sizeof text)) return 0;
    lua_pushstring(L, text);
    return 1;
}

/* The algorithm as text: 16 digits for each word. */
static void write_algorithm(const uint64_t words[WORDS], char text[HEX + 1])
{
    for (int i = 0; i < WORDS; i++) snprintf(text + i * WORD, WORD + 1, "%016" PRIx64, words[i]);
}

static bool read_algorithm(const char *text, uint64_t words[WORDS])
{
    if (strlen(text) != HEX || strspn(text, "0123456789abcdef") != HEX) return false;
    for (int i = 0; i < WORDS; i++) (void)sscanf(text + i * WORD, "%16" SCNx64, &words[i]);
    return true;
}

/* Fills in the choice from the key and the text at the top of the stack. */
static void read_choice(lua_State *L, ms_product_choice *out)
{
    size_t bytes = 0;
    const char *key = lua_type(L, -2) == LUA_TSTRING ? lua_tolstring(L, -2, &bytes) : NULL,
               *text = lua_type(L, -1) == LUA_TSTRING ? lua_tostring(L, -1) : "";
    if (!key || bytes == 0 || bytes >= sizeof out->key || strlen(key) != bytes)
        ms_lua_error(L, "products_use: a key is no key of a product");
    if (!read_algorithm(text, out->algorithm))
        ms_lua_error(L, "products_use: '%s' is no algorithm", text);
    memcpy(out->key, key, bytes);
}

/* core.products_use(choices, quiet): algorithms by the keys of products, as products_time gives
 * them, in place of all earlier choices. quiet: no warning if the library refuses one. */
static int use(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    size_t count = 0, i = 0;
    luaL_checktype(L, 1, LUA_TTABLE);
    bool quiet = lua_toboolean(L, 2);
    for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) count++;
    ms_product_choice *choices = lua_newuserdatauv(L, (count + 1) * sizeof *choices, 0);
    memset(choices, 0, (count + 1) * sizeof *choices);
    for (lua_pushnil(L); lua_next(L, 1); lua_pop(L, 1)) read_choice(L, &choices[i++]);
    ms_lua_ok(L, ms_products_use(engine, choices, count, quiet));
    return 0;
}

/* core.products_time() -> key, algorithm, us, first_us: the fastest algorithm for one kind of
 * product that this engine has computed, and the times of it and of the library's first candidate;
 * the times are -1 if there was no memory for it. nil: there is none left to be timed. Waits for
 * all streams. */
static int time_one(lua_State *L)
{
    ms_product_time found;
    char text[HEX + 1];
    ms_lua_refuse_in_hook(L, "products_time", "hooks only enqueue");
    ms_lua_ok(L, ms_products_time(ms_lua_enter(L), &found));
    if (!*found.choice.key) return 0;
    write_algorithm(found.choice.algorithm, text);
    lua_pushstring(L, found.choice.key);
    lua_pushstring(L, text);
    lua_pushnumber(L, found.us);
    lua_pushnumber(L, found.first_us);
    return 4;
}

/* core.gpu_scratch() -> { products, attention, attention_most }: see ms_gpu_scratch. */
static int gpu_scratch(lua_State *L)
{
    ms_gpu_scratch scratch = ms_gpu_scratch_of_stream();
    lua_createtable(L, 0, 3);
    lua_pushinteger(L, (lua_Integer)scratch.products);
    lua_setfield(L, -2, "products");
    lua_pushinteger(L, (lua_Integer)scratch.attention);
    lua_setfield(L, -2, "attention");
    lua_pushinteger(L, (lua_Integer)scratch.attention_most);
    lua_setfield(L, -2, "attention_most");
    return 1;
}

void ms_open_products(lua_State *L, int runtime)
{
    static const luaL_Reg functions[] = { { "products_place", place },
                                          { "products_use", use },
                                          { "products_time", time_one },
                                          { "gpu_scratch", gpu_scratch },
                                          { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
}
