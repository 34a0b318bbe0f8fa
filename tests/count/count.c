/* count.c: counts what tests assert. The loader puts this library into every process of the tests
 * (LD_PRELOAD), and all share a table, the file that MOONSHARD_COUNT names: of each place that
 * asserts something, how often it did. What counts:
 *
 * - cmocka: each assert_* that a C test calls.
 * - busted: each assertion of luassert, and the checks of tests/spec/support.lua (count.lua wraps
 *   them).
 * - programs: each assert() of a script that the command line runs, as those of tests/dist.
 *
 * show.lua prints the table.
 *
 * Entries are only added. A process that is killed has counted what it has asserted, since the
 * table is in the file. An entry belongs to the process that has set its hash; the text follows,
 * and is read only when the tests have ended.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <lua.h>

enum { ENTRIES = 1 << 15, TEXT = 112 };

struct entry {
    _Atomic uint64_t hash;
    _Atomic uint64_t count;
    char text[TEXT];
};

static struct entry *open_table(void)
{
    static _Atomic(struct entry *) known;
    struct entry *table = atomic_load(&known);
    if (table != NULL) return table == MAP_FAILED ? NULL : table;
    const char *path = getenv("MOONSHARD_COUNT");
    table = MAP_FAILED;
    if (path != NULL) {
        int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (file < 0 || ftruncate(file, sizeof(struct entry) * ENTRIES) != 0) {
            perror(path);
            abort();
        }
        table =
            mmap(NULL, sizeof(struct entry) * ENTRIES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    atomic_store(&known, table);
    return table == MAP_FAILED ? NULL : table;
}

/* What a place is called: a file of the tests by its path from tests/ on, and a script that a test
 * has written by its name. NULL: a place of a library or of ours that is no test. */
static const char *name_of(const char *file)
{
    const char *in_tests = strstr(file, "tests/"), *name = strrchr(file, '/');
    if (in_tests == NULL && (strncmp(file, "/tmp/lua_", 9) != 0 || name == NULL)) return NULL;
    file = in_tests != NULL ? in_tests : name + 1;
    size_t length = strlen(file), most = TEXT - 16;
    return file + (length > most ? length - most : 0);
}

static void count(const char *file, int line)
{
    struct entry *table = open_table();
    file = table == NULL ? NULL : name_of(file);
    if (file == NULL) return;
    uint64_t hash = 14695981039346656037u ^ (uint64_t)line;
    for (const char *c = file; *c != '\0'; c++) hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    hash = hash == 0 ? 1 : hash;
    for (size_t i = 0; i < ENTRIES; i++) {
        struct entry *entry = &table[(hash + i) % ENTRIES];
        uint64_t found = atomic_load(&entry->hash);
        if (found == 0 && atomic_compare_exchange_strong(&entry->hash, &found, hash)) {
            snprintf(entry->text, TEXT, "%s:%d", file, line);
            found = hash;
        }
        if (found == hash) {
            atomic_fetch_add(&entry->count, 1);
            return;
        }
    }
    fprintf(stderr, "tests/count: the table is full\n");
    abort();
}

/* The next library's function of this name: cmocka's own, or Lua's. */
static void *next(const char *name)
{
    void *function = dlsym(RTLD_NEXT, name);
    if (function == NULL) function = dlsym(RTLD_DEFAULT, name);
    if (function == NULL) {
        fprintf(stderr, "tests/count: no function %s\n", name);
        abort();
    }
    return function;
}

/* Functions of cmocka 1.1, whose arguments end with a file and a line. */
#define ASSERTION(name, parameters, ...)             \
    void name parameters;                            \
    void name parameters                             \
    {                                                \
        static _Atomic(void *) original;             \
        if (!original) original = next(#name);       \
        count(file, line);                           \
        ((void(*) parameters)original)(__VA_ARGS__); \
    }

typedef unsigned long number; /* cmocka's LargestIntegralType */
#define PLACE const char *file, const int line
ASSERTION(_assert_true, (number result, const char *text, PLACE), result, text, file, line)
ASSERTION(_assert_return_code, (number result, size_t width, number error, const char *text, PLACE),
          result, width, error, text, file, line)
ASSERTION(_assert_float_equal, (float a, float b, float epsilon, PLACE), a, b, epsilon, file, line)
ASSERTION(_assert_float_not_equal, (float a, float b, float epsilon, PLACE), a, b, epsilon, file,
          line)
ASSERTION(_assert_int_equal, (number a, number b, PLACE), a, b, file, line)
ASSERTION(_assert_int_not_equal, (number a, number b, PLACE), a, b, file, line)
ASSERTION(_assert_string_equal, (const char *a, const char *b, PLACE), a, b, file, line)
ASSERTION(_assert_string_not_equal, (const char *a, const char *b, PLACE), a, b, file, line)
ASSERTION(_assert_memory_equal, (const void *a, const void *b, size_t size, PLACE), a, b, size,
          file, line)
ASSERTION(_assert_memory_not_equal, (const void *a, const void *b, size_t size, PLACE), a, b, size,
          file, line)
ASSERTION(_assert_in_range, (number value, number least, number most, PLACE), value, least, most,
          file, line)
ASSERTION(_assert_not_in_range, (number value, number least, number most, PLACE), value, least,
          most, file, line)
ASSERTION(_assert_in_set, (number value, const number *values, size_t n, PLACE), value, values, n,
          file, line)
ASSERTION(_assert_not_in_set, (number value, const number *values, size_t n, PLACE), value, values,
          n, file, line)

/* Lua's functions come from the process: the command line links them, the stock interpreter brings
 * its own. */
#define LUA(type, name, ...) ((type(*)(__VA_ARGS__))next(name))

static void count_caller(lua_State *L, int level)
{
    lua_Debug place;
    if (LUA(int, "lua_getstack", lua_State *, int, lua_Debug *)(L, level, &place) != 0
        && LUA(int, "lua_getinfo", lua_State *, const char *, lua_Debug *)(L, "Sl", &place) != 0)
        count(place.source[0] == '@' ? place.source + 1 : "", place.currentline);
}

static int counted_assert(lua_State *L)
{
    count_caller(L, 1);
    int top = LUA(int, "lua_gettop", lua_State *)(L);
    if (top > 0 && LUA(int, "lua_toboolean", lua_State *, int)(L, 1)) return top;
    LUA(void, "lua_pushvalue", lua_State *, int)(L, lua_upvalueindex(1));
    LUA(void, "lua_rotate", lua_State *, int, int)(L, 1, 1);
    LUA(void, "lua_callk", lua_State *, int, int, lua_KContext, lua_KFunction)
    (L, top, LUA_MULTRET, 0, NULL);
    return LUA(int, "lua_gettop", lua_State *)(L);
}

/* For count.lua, in the stock interpreter: count(level) counts the place of the function at a level
 * of the stack, as debug.getinfo numbers them. */
int ms_count_of_lua(lua_State *L);
int ms_count_of_lua(lua_State *L)
{
    count_caller(L, (int)LUA(lua_Integer, "luaL_checkinteger", lua_State *, int)(L, 1));
    return 0;
}

/* In the command line: what opens Lua's basic functions leaves their table on the stack. */
int luaopen_base(lua_State *L);
int luaopen_base(lua_State *L)
{
    int results = LUA(int, "luaopen_base", lua_State *)(L);
    LUA(int, "lua_getfield", lua_State *, int, const char *)(L, -1, "assert");
    LUA(void, "lua_pushcclosure", lua_State *, lua_CFunction, int)(L, counted_assert, 1);
    LUA(void, "lua_setfield", lua_State *, int, const char *)(L, -2, "assert");
    return results;
}
