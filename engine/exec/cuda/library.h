/* library.h: finds the libraries of NVIDIA (cuBLASLt, cuDNN) at run time, which no build links. For
 * folders named cuda. */
#ifndef MOONSHARD_EXEC_CUDA_LIBRARY_H
#define MOONSHARD_EXEC_CUDA_LIBRARY_H

#include "moonshard/base.h"

/* Folders to look in first, with colons between them. */
#define MS_CUDA_FOLDERS "MOONSHARD_CUDA_LIBS"

/* The environment's `variable`, if it is set, is the path of the library, and nothing else is
 * tried. Otherwise `name` is sought in the folders of MS_CUDA_FOLDERS, on the loader's path, in the
 * toolkit (CUDA_HOME, /usr/local/cuda) and in the folders "nvidia" of Python's packages. NULL: it
 * is nowhere, and `text` says why; else `text` is its path. */
void *ms_cuda_library(ms_context *context, const char *variable, const char *name, char *text,
                      size_t bytes);

#endif
