/* library.c: where libraries of NVIDIA are sought, and what they must have. */
#include "exec/cuda/library.h"

#include <stdio.h>
#include <string.h>

/* All pointers to functions have one representation, so each is copied as it is. */
const char *ms_cuda_find_all(const ms_os *os, void *library, const ms_cuda_row *rows, size_t count,
                             void *table)
{
    const char *missing = NULL;
    for (size_t i = 0; i < count; i++) {
        void (*function)(void) = os->library_symbol(os->user, library, rows[i].name);
        memcpy((char *)table + rows[i].at, &function, sizeof function);
        if (!function && !missing) missing = rows[i].name;
    }
    return missing;
}

/* A library that was tried and cannot be used. */
typedef struct refused {
    ms_cuda_found found;
    bool is_told; /* its version is */
    int version;
    char what[1400]; /* which one it is, and what is wrong with it */
} refused;

typedef struct search {
    const ms_os *os;
    const ms_cuda_wanted *wanted;
    void *table;
    ms_cuda_found *out; /* the first that can be used */
    bool is_found;
    refused best; /* of those that cannot: the newest, else the first */
    uint32_t passed;
    char passed_over[MS_CUDA_PASSED_BYTES];
    char why[512]; /* the loader's answer for the name alone */
} search;

/* ------------------------------------------------------------------ one library */

static void name_version(const ms_cuda_wanted *wanted, int version, char *text, size_t bytes)
{
    char patch[16] = "";
    if (wanted->has_patch) snprintf(patch, sizeof patch, ".%d", version % 100);
    snprintf(text, bytes, "%s %d.%d%s", wanted->name, version / 10000, version / 100 % 100, patch);
}

/* Fills the table from the library. NULL: it can be used; else why not, with `why` as memory. */
static const char *examine(const search *s, refused *one, char *why, size_t bytes)
{
    const ms_cuda_wanted *wanted = s->wanted;
    ms_cuda_found *found = &one->found;
    const char *missing =
        ms_cuda_find_all(s->os, found->library, wanted->rows, wanted->count, s->table);
    one->is_told = (!missing || wanted->old_may_lack) && wanted->version(s->table, &one->version);
    name_version(wanted, one->version, found->name, sizeof found->name);
    if (one->is_told && one->version < wanted->version_least) {
        snprintf(why, bytes, "%s, too old", found->name);
        return why;
    }
    if (!missing) return NULL;
    snprintf(why, bytes, "%s: it has no %s", wanted->stranger, missing);
    return why;
}

/* Remembers a library that cannot be used. */
static void pass_over(search *s, refused *one, const char *why)
{
    size_t used = strlen(s->passed_over);
    snprintf(s->passed_over + used, sizeof s->passed_over - used, "%s'%s' (%s)", used ? ", " : "",
             one->found.path, why);
    snprintf(one->what, sizeof one->what, "'%s' is %s", one->found.path, why);
    bool is_better = one->is_told && (!s->best.is_told || one->version > s->best.version);
    if (!s->passed++ || is_better) s->best = *one;
}

/* Opens one library, and takes it if it can be used. It is closed otherwise, and then nothing of it
 * may stay loaded: the loader would give the next one those of its parts. So a library that loads
 * parts by itself is looked at apart first. */
static void try_library(search *s, const char *path, bool is_alone)
{
    const ms_os *os = s->os;
    bool apart = s->wanted->has_parts && !is_alone;
    for (int look = apart ? 0 : 1; look < 2; look++) {
        refused one = { .version = 0 };
        char why[256];
        void *(*load)(void *, const char *, char *, size_t) =
            look ? os->library_load : os->library_load_apart;
        one.found.library = load(os->user, path, s->why, sizeof s->why);
        if (!one.found.library) return;
        snprintf(one.found.path, sizeof one.found.path, "%s", path);
        const char *refusal = examine(s, &one, why, sizeof why);
        if (!refusal && look) {
            s->is_found = true;
            *s->out = one.found;
            return;
        }
        os->library_close(os->user, one.found.library);
        if (!refusal) continue;
        pass_over(s, &one, refusal);
        return;
    }
}

/* A path is tried only if there is such a file: what a broken library lacks is then told, and not
 * that it is missing. Places overlap, so a path may come twice. */
static void try_path(search *s, const char *path)
{
    ms_file_info info;
    char quoted[1040];
    snprintf(quoted, sizeof quoted, "'%s'", path);
    if (s->is_found || strstr(s->passed_over, quoted)) return;
    if (!s->os->info(s->os->user, path, &info)) try_library(s, path, false);
}

static void try_folder(search *s, const char *folder, size_t length, const char *inside)
{
    char path[1024];
    if (length > 0
        && snprintf(path, sizeof path, "%.*s%s/%s", (int)length, folder, inside, s->wanted->file)
               < (int)sizeof path)
        try_path(s, path);
}

static void try_each(search *s, const char *folders)
{
    while (folders && *folders && !s->is_found) {
        size_t length = strcspn(folders, ":");
        try_folder(s, folders, length, "");
        folders += length + (folders[length] == ':');
    }
}

/* ------------------------------------------------------------ Python's packages */

typedef struct place {
    search *search;
    const char *folder;
} place;

static void try_package(void *to, const char *name)
{
    const place *p = to;
    char path[1024];
    if (snprintf(path, sizeof path, "%s/%s/lib", p->folder, name) < (int)sizeof path)
        try_folder(p->search, path, strlen(path), "");
}

/* A folder "python3.11" or "python3" in a folder lib. */
static void try_python(void *to, const char *name)
{
    const place *p = to;
    const ms_os *os = p->search->os;
    static const char *const packages[] = { "site-packages", "dist-packages" };
    if (strncmp(name, "python3", 7) != 0) return;
    for (size_t i = 0; i < sizeof packages / sizeof *packages; i++) {
        char path[1024];
        place inside = { p->search, path };
        int length = snprintf(path, sizeof path, "%s/%s/%s/nvidia", p->folder, name, packages[i]);
        if (length < (int)sizeof path) (void)os->list(os->user, path, try_package, &inside);
    }
}

static void try_pythons(search *s, const char *root, const char *inside)
{
    char path[1024];
    place lib = { s, path };
    if (!root || !*root || s->is_found) return;
    if (snprintf(path, sizeof path, "%s%s", root, inside) < (int)sizeof path)
        (void)s->os->list(s->os->user, path, try_python, &lib);
}

/* Those whose programs are in folders of PATH: python3 is in "bin" of what has "lib", too. */
static void try_pythons_of_path(search *s, const char *folders)
{
    static const char bin[] = "/bin";
    while (folders && *folders && !s->is_found) {
        char root[1024];
        size_t length = strcspn(folders, ":"), end = sizeof bin - 1;
        if (length > end && length < sizeof root && !strncmp(folders + length - end, bin, end)) {
            snprintf(root, sizeof root, "%.*s", (int)(length - end), folders);
            try_pythons(s, root, "/lib");
        }
        folders += length + (folders[length] == ':');
    }
}

/* -------------------------------------------------------------------- in order */

static const char *variable_of(const search *s, const char *name)
{
    return s->os->environment(s->os->user, name);
}

static void seek(search *s)
{
    const char *home = variable_of(s, "CUDA_HOME");
    try_each(s, variable_of(s, MS_CUDA_FOLDERS));
    if (!s->is_found) try_library(s, s->wanted->file, false);
    if (s->is_found) return;
    if (home) try_folder(s, home, strlen(home), "/lib64");
    try_folder(s, "/usr/local/cuda", strlen("/usr/local/cuda"), "/lib64");
    try_pythons(s, variable_of(s, "VIRTUAL_ENV"), "/lib");
    try_pythons(s, variable_of(s, "CONDA_PREFIX"), "/lib");
    try_pythons_of_path(s, variable_of(s, "PATH"));
    try_pythons(s, variable_of(s, "HOME"), "/.local/lib");
    try_pythons(s, "/usr/local", "/lib");
    try_pythons(s, "/usr", "/lib");
}

/* -------------------------------------------------------------------- opening */

/* what: which library there is, or why there is none. */
static ms_status refuse(ms_context *context, const ms_cuda_wanted *wanted, ms_status status,
                        const char *what)
{
    const char *path = context->os->environment(context->os->user, wanted->variable);
    bool is_named = path && *path, has_own = is_named && wanted->named_begin;
    const char *begin = has_own ? wanted->named_begin : wanted->begin,
               *end = has_own ? wanted->named_end : wanted->end;
    if (is_named)
        return ms_fail(context, status,
                       "%s: %s: %s names it: unset that, or set it to the path of %s%s", begin,
                       what, wanted->variable, wanted->needed, end);
    return ms_fail(context, status,
                   "%s: %s: install %s, or set " MS_CUDA_FOLDERS " to the folder of its library%s",
                   begin, what, wanted->needed, end);
}

/* Why none can be used: the best of those that there are, or what the loader says. */
static ms_status refuse_all(ms_context *context, const search *s)
{
    char what[1500];
    if (!s->passed) return refuse(context, s->wanted, MS_ERROR_NOT_FOUND, s->why);
    snprintf(what, sizeof what, "%s", s->best.what);
    if (s->passed > 1) {
        size_t used = strlen(what);
        snprintf(what + used, sizeof what - used, ", and %u other%s passed over", s->passed - 1,
                 s->passed == 2 ? " was" : "s were");
    }
    return refuse(context, s->wanted, MS_ERROR_UNSUPPORTED, what);
}

ms_status ms_cuda_open_library(ms_context *context, const ms_cuda_wanted *wanted, void *table,
                               ms_cuda_found *out)
{
    search s = { .os = context->os, .wanted = wanted, .table = table, .out = out };
    const char *named = variable_of(&s, wanted->variable);
    if (wanted->off && named && strcmp(named, "off") == 0)
        return ms_fail(context, MS_ERROR_NOT_FOUND, "%s", wanted->off);
    if (named && *named) try_library(&s, named, true);
    else seek(&s);
    if (!s.is_found) return refuse_all(context, &s);
    snprintf(out->passed_over, sizeof out->passed_over, "%s", s.passed_over);
    return MS_OK;
}

bool ms_cuda_has_library(const ms_os *os, const ms_cuda_wanted *wanted, void *table, char *text,
                         size_t bytes)
{
    ms_context context;
    ms_cuda_found found;
    ms_context_init(&context, os ? os : ms_os_posix());
    bool has = !ms_cuda_open_library(&context, wanted, table, &found);
    if (has)
        snprintf(text, bytes, "%s, %s%s%s", found.name, found.path,
                 *found.passed_over ? "; passed over: " : "", found.passed_over);
    else snprintf(text, bytes, "%s", context.error.message);
    return has;
}
