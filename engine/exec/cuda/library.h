/* library.h: opens the libraries of NVIDIA (cuBLASLt, cuDNN, NCCL) at run time, which no build
 * links. For folders named cuda. */
#ifndef MOONSHARD_EXEC_CUDA_LIBRARY_H
#define MOONSHARD_EXEC_CUDA_LIBRARY_H

#include <stddef.h>

#include "moonshard/base.h"

/* Folders to look in first, with colons between them. */
#define MS_CUDA_FOLDERS "MOONSHARD_CUDA_LIBS"

/* A function of a library, and where in a table of functions its address goes. */
typedef struct ms_cuda_row {
    const char *name;
    size_t at;
} ms_cuda_row;
#define MS_CUDA_ROW(type, field, text)            \
    {                                             \
        .name = text, .at = offsetof(type, field) \
    }
/* Fills a table. Answers the first name that the library lacks; NULL: it has all of them. */
const char *ms_cuda_find_all(const ms_os *os, void *library, const ms_cuda_row *rows, size_t count,
                             void *table);

/* A library that the engine can use. Versions are major * 10000 + minor * 100 + patch. */
typedef struct ms_cuda_wanted {
    const char *variable, *file; /* see ms_cuda_open_library */
    const ms_cuda_row *rows;
    size_t count;
    /* The version, by a function of the filled table. False: it cannot be told. */
    bool (*version)(const void *table, int *version);
    int version_least;
    bool has_patch; /* messages tell the third number of a version, too */
    /* A library that lacks functions may be an old one: its version is then the error. `version`
     * is called for incomplete tables. */
    bool old_may_lack;
    bool has_parts; /* it loads libraries by their names when it is asked for its version */
    /* Texts of messages: the library ("NCCL"); what it must be ("NCCL 2.28 or later"); what a
     * library without its functions is ("no NCCL"). */
    const char *name, *needed, *stranger;
    /* How an error begins and ends; how it does where `variable` names a library, if not NULL; and
     * the error where `variable` is "off", which is a path if it is NULL. */
    const char *begin, *end, *named_begin, *named_end, *off;
} ms_cuda_wanted;

#define MS_CUDA_PASSED_BYTES 1024
typedef struct ms_cuda_found {
    void *library;
    char path[1024], name[64];              /* name: with the version, "NCCL 2.28.3" */
    char passed_over[MS_CUDA_PASSED_BYTES]; /* "'PATH' (NCCL 2.27.7, too old), ..."; or "" */
} ms_cuda_found;

/* Seeks the library and fills the table. The environment's `variable`, if it is set, is the path of
 * the library, and nothing else is tried. Otherwise `file` is sought in the folders of
 * MS_CUDA_FOLDERS, on the loader's path, in the toolkit (CUDA_HOME, /usr/local/cuda) and in the
 * folders "nvidia" of Python's packages: of the environment that is active (VIRTUAL_ENV,
 * CONDA_PREFIX), of what PATH shows, of the user, of the system. The first one that is new enough
 * and has all functions is taken, and is never unloaded. Those before it are passed over, and
 * unloaded. MS_ERROR_NOT_FOUND: there is none, or it is off. MS_ERROR_UNSUPPORTED: each is another
 * library or too old; the message has the newest, and says what the user can do. After an error the
 * table is undefined. */
ms_status ms_cuda_open_library(ms_context *context, const ms_cuda_wanted *wanted, void *table,
                               ms_cuda_found *out);
/* For ms_gpu_blas and its like: whether the library can be opened; which one it is and which were
 * passed over, or why not. */
bool ms_cuda_has_library(const ms_os *os, const ms_cuda_wanted *wanted, void *table, char *text,
                         size_t bytes);

#endif
