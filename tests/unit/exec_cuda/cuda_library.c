/* cuda_library.c: where NVIDIA's libraries are sought and which of them are opened, on a system
 * whose files the test names. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "exec/cuda/library.h"

#define VARIABLE "MOONSHARD_SOME"
#define NAME "libsome.so.1"

/* A library that is there. */
typedef struct library {
    int version;       /* in place of 2.28.3; 0: that */
    const char *lacks; /* a function that it does not have */
} library;

/* A system with these files, and these variables, NAME=VALUE. */
typedef struct machine {
    ms_os os;
    const char *files[4], *variables[8];
    library in_files[4], on_path;
    bool is_on_loaders_path;
    int loaded, apart, closed; /* how often each was called; of plain and apart */
} machine;

static const char *variable(void *user, const char *name)
{
    const machine *self = user;
    size_t length = strlen(name);
    for (size_t i = 0; self->variables[i]; i++)
        if (!strncmp(self->variables[i], name, length) && self->variables[i][length] == '=')
            return self->variables[i] + length + 1;
    return NULL;
}

static bool has(const machine *self, const char *path)
{
    for (size_t i = 0; self->files[i]; i++)
        if (!strcmp(self->files[i], path)) return true;
    return false;
}

static int info(void *user, const char *path, ms_file_info *out)
{
    memset(out, 0, sizeof *out);
    return has(user, path) ? 0 : -ENOENT;
}

/* What is in a folder, by the paths of the files. */
static int list(void *user, const char *path, void (*entry)(void *to, const char *name), void *to)
{
    const machine *self = user;
    size_t length = strlen(path);
    int found = -ENOENT;
    for (size_t i = 0; self->files[i]; i++) {
        const char *rest = self->files[i] + length;
        char name[64];
        if (strncmp(self->files[i], path, length) || *rest != '/') continue;
        snprintf(name, sizeof name, "%.*s", (int)strcspn(rest + 1, "/"), rest + 1);
        entry(to, name);
        found = 0;
    }
    return found;
}

static void *load(void *user, const char *path, char *why, size_t bytes)
{
    machine *self = user;
    library *found = !strchr(path, '/') && self->is_on_loaders_path ? &self->on_path : NULL;
    for (size_t i = 0; self->files[i]; i++)
        if (!strcmp(self->files[i], path)) found = &self->in_files[i];
    snprintf(why, bytes, "%s: there is no such file", path);
    self->loaded += found != NULL;
    return found;
}

static void *load_apart(void *user, const char *path, char *why, size_t bytes)
{
    machine *self = user;
    void *found = load(user, path, why, bytes);
    self->apart += found != NULL;
    return found;
}

static void close_library(void *user, void *closed)
{
    machine *self = user;
    assert_non_null(closed);
    self->closed++;
}

/* What the library has: a version, which is 2.28.3, and a function that does nothing. */
typedef struct table {
    int (*version)(void);
    void (*work)(void);
} table;

static int version_2_28_3(void) { return 22803; }
static int version_2_27_5(void) { return 22705; }
static int version_2_29_0(void) { return 22900; }
static void work(void) {}

static void (*symbol(void *user, void *loaded, const char *name))(void)
{
    const library *self = loaded;
    (void)user;
    if (self->lacks && !strcmp(self->lacks, name)) return NULL;
    if (strcmp(name, "version") != 0) return work;
    if (self->version == 22705) return (void (*)(void))version_2_27_5;
    return (void (*)(void))(self->version == 22900 ? version_2_29_0 : version_2_28_3);
}

static bool version_of(const void *filled, int *out)
{
    const table *self = filled;
    if (!self->version) return false;
    *out = self->version();
    return true;
}

static const ms_cuda_row rows[] = { MS_CUDA_ROW(table, version, "version"),
                                    MS_CUDA_ROW(table, work, "work") };
static const ms_cuda_wanted some = {
    .variable = VARIABLE,
    .file = NAME,
    .rows = rows,
    .count = 2,
    .version = version_of,
    .version_least = 20000,
    .name = "some",
    .needed = "some 2",
    .stranger = "not some",
    .begin = "it needs some",
    .end = ", or goes without",
};

static void prepare(machine *m)
{
    m->os = *ms_os_posix();
    m->os.user = m;
    m->os.environment = variable;
    m->os.info = info;
    m->os.list = list;
    m->os.library_load = load;
    m->os.library_load_apart = load_apart;
    m->os.library_symbol = symbol;
    m->os.library_close = close_library;
}

/* `where`: the path with which it is found; NULL: it is not. */
static void assert_found(machine m, const char *where)
{
    ms_context context;
    ms_cuda_found found;
    table filled;
    prepare(&m);
    ms_context_init(&context, &m.os);
    ms_status status = ms_cuda_open_library(&context, &some, &filled, &found);
    if (where) {
        assert_int_equal(status, MS_OK);
        assert_string_equal(found.path, where);
        assert_string_equal(found.passed_over, "");
    } else {
        assert_int_equal(status, MS_ERROR_NOT_FOUND);
        assert_non_null(strstr(context.error.message, NAME ": there is no such file"));
    }
    assert_int_equal(m.loaded, where != NULL);
    assert_int_equal(m.apart + m.closed, 0);
}

static void each_place_is_looked_at(void **state)
{
    (void)state;
    static const struct {
        const char *variable, *file;
    } places[] = {
        { "MOONSHARD_CUDA_LIBS=/none:/a/b", "/a/b/" NAME },
        { "CUDA_HOME=/opt/cuda", "/opt/cuda/lib64/" NAME },
        { "X=", "/usr/local/cuda/lib64/" NAME },
        { "VIRTUAL_ENV=/env", "/env/lib/python3.12/site-packages/nvidia/some/lib/" NAME },
        { "CONDA_PREFIX=/conda", "/conda/lib/python3.11/site-packages/nvidia/cu13/lib/" NAME },
        { "PATH=/sbin:/opt/py/bin:/bin",
          "/opt/py/lib/python3.13/site-packages/nvidia/x/lib/" NAME },
        { "HOME=/home/me", "/home/me/.local/lib/python3.12/site-packages/nvidia/x/lib/" NAME },
        { "X=", "/usr/local/lib/python3.10/dist-packages/nvidia/x/lib/" NAME },
        { "X=", "/usr/lib/python3/dist-packages/nvidia/x/lib/" NAME },
    };
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        machine m = { .files = { places[i].file }, .variables = { places[i].variable } };
        assert_found(m, places[i].file);
        if (places[i].variable[0] != 'X')
            assert_found((machine){ .files = { places[i].file } }, NULL);
    }
}

static void earlier_places_come_first(void **state)
{
    (void)state;
    machine m = { .files = { "/a/" NAME, "/opt/cuda/lib64/" NAME, "/own/" NAME },
                  .variables = { "MOONSHARD_CUDA_LIBS=/a", "CUDA_HOME=/opt/cuda" },
                  .is_on_loaders_path = true };
    assert_found(m, "/a/" NAME);
    m.variables[0] = "CUDA_HOME=/opt/cuda";
    m.variables[1] = NULL;
    assert_found(m, NAME);
    m.is_on_loaders_path = false;
    assert_found(m, "/opt/cuda/lib64/" NAME);
    m.variables[1] = VARIABLE "=/own/" NAME;
    assert_found(m, "/own/" NAME);
}

/* ------------------------------------------------------------------- opening */

static void assert_told(machine m, const ms_cuda_wanted *wanted, const char *told)
{
    char text[1024] = "";
    table filled;
    prepare(&m);
    bool has = ms_cuda_has_library(&m.os, wanted, &filled, text, sizeof text);
    assert_string_equal(text, told);
    assert_int_equal(has, strncmp(told, "some ", 5) == 0);
}

static void a_library_is_opened_or_refused(void **state)
{
    (void)state;
    machine m = { .is_on_loaders_path = true };
    ms_cuda_wanted wanted = some;
    assert_told(m, &wanted, "some 2.28, " NAME);
    wanted.has_patch = true;
    assert_told(m, &wanted, "some 2.28.3, " NAME);
    wanted.version_least = 22804;
    assert_told(m, &wanted,
                "it needs some: '" NAME
                "' is some 2.28.3, too old: install some 2, or set " MS_CUDA_FOLDERS
                " to the folder of its library, or goes without");
    m.on_path.lacks = "work";
    assert_told(m, &wanted,
                "it needs some: '" NAME
                "' is not some: it has no work: install some 2, or set " MS_CUDA_FOLDERS
                " to the folder of its library, or goes without");
    wanted.old_may_lack = true;
    assert_told(m, &wanted,
                "it needs some: '" NAME
                "' is some 2.28.3, too old: install some 2, or set " MS_CUDA_FOLDERS
                " to the folder of its library, or goes without");
    m.on_path.lacks = "version";
    assert_told(m, &wanted,
                "it needs some: '" NAME
                "' is not some: it has no version: install some 2, or set " MS_CUDA_FOLDERS
                " to the folder of its library, or goes without");
}

static void a_library_that_is_named_has_its_own_texts(void **state)
{
    (void)state;
    machine m = { .variables = { VARIABLE "=/own/" NAME } };
    ms_cuda_wanted wanted = some;
    assert_told(m, &wanted,
                "it needs some: /own/" NAME ": there is no such file: " VARIABLE
                " names it: unset that, or set it to the path of some 2, or goes without");
    wanted.named_begin = "it cannot use some";
    wanted.named_end = ", or to off";
    assert_told(m, &wanted,
                "it cannot use some: /own/" NAME ": there is no such file: " VARIABLE
                " names it: unset that, or set it to the path of some 2, or to off");
    m.variables[0] = VARIABLE "=off";
    wanted.off = "it is off";
    assert_told(m, &wanted, "it is off");
}

/* The variable of a library names the one; no other is taken for it. */
static void a_path_that_is_named_is_the_only_one(void **state)
{
    (void)state;
    machine m = { .variables = { VARIABLE "=/own/" NAME }, .is_on_loaders_path = true };
    assert_told(m, &some,
                "it needs some: /own/" NAME ": there is no such file: " VARIABLE
                " names it: unset that, or set it to the path of some 2, or goes without");
    m.files[0] = "/own/" NAME;
    m.in_files[0].lacks = "work";
    assert_told(m, &some,
                "it needs some: '/own/" NAME "' is not some: it has no work: " VARIABLE
                " names it: unset that, or set it to the path of some 2, or goes without");
}

/* The first one that can be used is taken, and not the newest. */
static void one_that_cannot_be_used_is_passed_over(void **state)
{
    (void)state;
    machine m = { .files = { "/a/" NAME, "/b/" NAME, "/opt/cuda/lib64/" NAME },
                  .in_files = { { .version = 22705 }, { .lacks = "work" }, { .version = 22900 } },
                  .variables = { "MOONSHARD_CUDA_LIBS=/a:/b:/a", "CUDA_HOME=/opt/cuda" },
                  .is_on_loaders_path = true };
    ms_cuda_wanted wanted = some;
    wanted.version_least = 22800;
    assert_told(m, &wanted,
                "some 2.28, " NAME "; passed over: '/a/" NAME "' (some 2.27, too old), '/b/" NAME
                "' (not some: it has no work)");
    m.on_path.version = 22705;
    assert_told(m, &wanted,
                "some 2.29, /opt/cuda/lib64/" NAME "; passed over: '/a/" NAME
                "' (some 2.27, too old), '/b/" NAME "' (not some: it has no work), '" NAME
                "' (some 2.27, too old)");
    m.in_files[1] = (library){ 0 };
    assert_told(m, &wanted,
                "some 2.28, /b/" NAME "; passed over: '/a/" NAME "' (some 2.27, too old)");
}

static void the_best_of_those_that_cannot_be_used_is_told(void **state)
{
    (void)state;
    machine m = { .files = { "/a/" NAME, "/b/" NAME, "/opt/cuda/lib64/" NAME },
                  .in_files = { { .lacks = "work" }, { .version = 22705 }, { .version = 22803 } },
                  .variables = { "MOONSHARD_CUDA_LIBS=/a:/b", "CUDA_HOME=/opt/cuda" } };
    ms_cuda_wanted wanted = some;
    wanted.version_least = 23000;
    assert_told(m, &wanted,
                "it needs some: '/opt/cuda/lib64/" NAME
                "' is some 2.28, too old, and 2 others were passed over: install some 2, or "
                "set " MS_CUDA_FOLDERS " to the folder of its library, or goes without");
    m.files[2] = NULL;
    assert_told(m, &wanted,
                "it needs some: '/b/" NAME
                "' is some 2.27, too old, and 1 other was passed over: install some 2, or "
                "set " MS_CUDA_FOLDERS " to the folder of its library, or goes without");
}

/* All that is not taken is closed. One that loads others is looked at apart before it is loaded,
 * so that the loader has nothing of one that was passed over. */
static void what_is_passed_over_is_unloaded(void **state)
{
    (void)state;
    for (int has_parts = 0; has_parts < 2; has_parts++) {
        machine m = { .files = { "/a/" NAME, "/b/" NAME },
                      .in_files = { { .version = 22705 } },
                      .variables = { "MOONSHARD_CUDA_LIBS=/a:/b" } };
        ms_cuda_wanted wanted = some;
        ms_context context;
        ms_cuda_found found;
        table filled;
        wanted.version_least = 22800;
        wanted.has_parts = has_parts;
        prepare(&m);
        ms_context_init(&context, &m.os);
        assert_int_equal(ms_cuda_open_library(&context, &wanted, &filled, &found), MS_OK);
        assert_string_equal(found.path, "/b/" NAME);
        assert_ptr_equal(found.library, &m.in_files[1]);
        assert_int_equal(filled.version(), 22803);
        assert_int_equal(m.apart, has_parts ? 2 : 0);
        assert_int_equal(m.loaded - m.closed, 1);
        assert_int_equal(m.loaded - m.apart, has_parts ? 1 : 2);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_place_is_looked_at),
        cmocka_unit_test(earlier_places_come_first),
        cmocka_unit_test(a_library_is_opened_or_refused),
        cmocka_unit_test(a_library_that_is_named_has_its_own_texts),
        cmocka_unit_test(a_path_that_is_named_is_the_only_one),
        cmocka_unit_test(one_that_cannot_be_used_is_passed_over),
        cmocka_unit_test(the_best_of_those_that_cannot_be_used_is_told),
        cmocka_unit_test(what_is_passed_over_is_unloaded),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
