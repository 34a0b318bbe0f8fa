/* library.c: where libraries of NVIDIA are sought, and what they must have. */
#include "exec/cuda/library.h"

#include <stdio.h>
#include <string.h>

typedef struct search {
    const ms_os *os;
    const char *name;
    char *text;
    size_t bytes;
    void *found;
    char why[512]; /* the loader's answer for the name alone */
} search;

/* A path is tried only if there is such a file: what a broken library lacks is then told, and not
 * that it is missing. */
static void try_path(search *s, const char *path)
{
    ms_file_info info;
    if (s->found || s->os->info(s->os->user, path, &info)) return;
    s->found = s->os->library_load(s->os->user, path, s->why, sizeof s->why);
    if (s->found) snprintf(s->text, s->bytes, "%s", path);
}

static void try_folder(search *s, const char *folder, size_t length, const char *inside)
{
    char path[1024];
    if (length > 0
        && snprintf(path, sizeof path, "%.*s%s/%s", (int)length, folder, inside, s->name)
               < (int)sizeof path)
        try_path(s, path);
}

static void try_each(search *s, const char *folders)
{
    while (folders && *folders && !s->found) {
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
    if (!root || !*root || s->found) return;
    if (snprintf(path, sizeof path, "%s%s", root, inside) < (int)sizeof path)
        (void)s->os->list(s->os->user, path, try_python, &lib);
}

/* Those whose programs are in folders of PATH: python3 is in "bin" of what has "lib", too. */
static void try_pythons_of_path(search *s, const char *folders)
{
    static const char bin[] = "/bin";
    while (folders && *folders && !s->found) {
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
    if (s->found) return;
    s->found = s->os->library_load(s->os->user, s->name, s->why, sizeof s->why);
    if (s->found) {
        snprintf(s->text, s->bytes, "%s", s->name);
        return;
    }
    if (home) try_folder(s, home, strlen(home), "/lib64");
    try_folder(s, "/usr/local/cuda", strlen("/usr/local/cuda"), "/lib64");
    try_pythons(s, variable_of(s, "VIRTUAL_ENV"), "/lib");
    try_pythons(s, variable_of(s, "CONDA_PREFIX"), "/lib");
    try_pythons_of_path(s, variable_of(s, "PATH"));
    try_pythons(s, variable_of(s, "HOME"), "/.local/lib");
    try_pythons(s, "/usr/local", "/lib");
    try_pythons(s, "/usr", "/lib");
}

void *ms_cuda_library(ms_context *context, const char *variable, const char *name, char *text,
                      size_t bytes)
{
    search s = { .os = context->os, .name = name, .text = text, .bytes = bytes };
    const char *path = variable_of(&s, variable);
    if (path && *path) {
        s.found = s.os->library_load(s.os->user, path, s.why, sizeof s.why);
        snprintf(text, bytes, "%s", path);
    } else seek(&s);
    if (!s.found) snprintf(text, bytes, "%s", s.why);
    return s.found;
}

/* ------------------------------------------------------------------ functions */

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

static void name_version(const ms_cuda_wanted *wanted, int version, char *text, size_t bytes)
{
    char patch[16] = "";
    if (wanted->has_patch) snprintf(patch, sizeof patch, ".%d", version % 100);
    snprintf(text, bytes, "%s %d.%d%s", wanted->name, version / 10000, version / 100 % 100, patch);
}

ms_status ms_cuda_open_library(ms_context *context, const ms_cuda_wanted *wanted, void *table,
                               ms_cuda_found *out)
{
    const ms_os *os = context->os;
    const char *asked = os->environment(os->user, wanted->variable);
    char what[1200];
    int version = 0;
    if (wanted->off && asked && strcmp(asked, "off") == 0)
        return ms_fail(context, MS_ERROR_NOT_FOUND, "%s", wanted->off);
    out->library =
        ms_cuda_library(context, wanted->variable, wanted->file, out->path, sizeof out->path);
    if (!out->library) return refuse(context, wanted, MS_ERROR_NOT_FOUND, out->path);
    const char *missing = ms_cuda_find_all(os, out->library, wanted->rows, wanted->count, table);
    bool is_told = (!missing || wanted->old_may_lack) && wanted->version(table, &version);
    name_version(wanted, version, out->name, sizeof out->name);
    if (is_told && version < wanted->version_least)
        snprintf(what, sizeof what, "'%s' is %s, too old", out->path, out->name);
    else if (missing)
        snprintf(what, sizeof what, "'%s' is %s: it has no %s", out->path, wanted->stranger,
                 missing);
    else return MS_OK;
    return refuse(context, wanted, MS_ERROR_UNSUPPORTED, what);
}

bool ms_cuda_has_library(const ms_os *os, const ms_cuda_wanted *wanted, void *table, char *text,
                         size_t bytes)
{
    ms_context context;
    ms_cuda_found found;
    ms_context_init(&context, os ? os : ms_os_posix());
    bool has = !ms_cuda_open_library(&context, wanted, table, &found);
    if (has) snprintf(text, bytes, "%s, %s", found.name, found.path);
    else snprintf(text, bytes, "%s", context.error.message);
    return has;
}
