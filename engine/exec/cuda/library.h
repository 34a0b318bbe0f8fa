/* library.h: finds the libraries of NVIDIA (cuBLASLt, cuDNN, NCCL) at run time, which no build
 * links. For folders named cuda. */
#ifndef MOONSHARD_EXEC_CUDA_LIBRARY_H
#define MOONSHARD_EXEC_CUDA_LIBRARY_H

#include <stddef.h>

#include "moonshard/base.h"

/* Folders to look in first, with colons between them. */
#define MS_CUDA_FOLDERS "MOONSHARD_CUDA_LIBS"

/* The environment's `variable`, if it is set, is the path of the library, and nothing else is
 * tried. Otherwise `name` is sought in the folders of MS_CUDA_FOLDERS, on the loader's path, in the
 * toolkit (CUDA_HOME, /usr/local/cuda) and in the folders "nvidia" of Python's packages: of the
 * environment that is active (VIRTUAL_ENV, CONDA_PREFIX), of what PATH shows, of the user, of the
 * system. NULL: it is nowhere, and `text` says why; else `text` is its path. */
void *ms_cuda_library(ms_context *context, const char *variable, const char *name, char *text,
                      size_t bytes);

/* What a user can do where there is no such library, or not `wanted` ("NCCL 2.28 or later"). */
#define MS_CUDA_ADVICE 192
void ms_cuda_advise(const ms_os *os, const char *variable, const char *wanted,
                    char text[MS_CUDA_ADVICE]);

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

#endif
