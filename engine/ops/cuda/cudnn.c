/* cudnn.c: cuDNN's functions, from the library that is found at run time. */
#include "ops/cuda/cudnn.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "exec/cuda/library.h"
#include "moonshard/tensor.h"

static const ms_cuda_row rows[] = {
#define ROW(field, text, arguments) MS_CUDA_ROW(ms_cudnn, field, text),
    MS_CUDNN_FUNCTIONS(ROW)
#undef ROW
        MS_CUDA_ROW(ms_cudnn, version, "cudnnGetVersion"),
    MS_CUDA_ROW(ms_cudnn, explain, "cudnnGetErrorString"),
    MS_CUDA_ROW(ms_cudnn, last_error, "cudnnGetLastErrorString"),
};

static bool version_of(const void *table, int *version)
{
    const ms_cudnn *dnn = table;
    *version = (int)dnn->version();
    return true;
}

/* A library that was named must work, and to go without it is then the user's choice. */
static const ms_cuda_wanted wanted = {
    .variable = MS_CUDNN_VARIABLE,
    .file = MS_CUDNN_LIBRARY,
    .rows = rows,
    .count = sizeof rows / sizeof *rows,
    .version = version_of,
    .version_least = MS_CUDNN_VERSION_LEAST,
    .has_parts = true,
    .name = "cuDNN",
    .needed = "cuDNN 9.16 or later",
    .stranger = "no cuDNN 9",
    .begin = "attention on a GPU is slower without cuDNN",
    .end = "",
    .named_begin = "attention on a GPU cannot use cuDNN",
    .named_end = ", or to off: attention is then slower",
    .off = "cuDNN is off, as " MS_CUDNN_VARIABLE " says: attention is slower",
};

bool ms_cudnn_is_asked_for(const ms_os *os)
{
    const char *asked = os->environment(os->user, MS_CUDNN_VARIABLE);
    return asked && *asked && strcmp(asked, "off") != 0;
}

ms_status ms_cudnn_load(ms_context *context, ms_cudnn *out, char *path, size_t bytes)
{
    ms_cuda_found found;
    ms_status status = ms_cuda_open_library(context, &wanted, out, &found);
    if (!status) snprintf(path, bytes, "%s", found.path);
    return status;
}

bool ms_gpu_dnn(const ms_os *os, char *text, size_t bytes)
{
    ms_cudnn dnn;
    return ms_cuda_has_library(os, &wanted, &dnn, text, bytes);
}
