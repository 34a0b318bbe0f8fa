/* cudnn.c: cuDNN's functions, from the library that is found at run time. */
#include "tensor/cuda/cudnn.h"

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

static bool is_off(const ms_os *os)
{
    const char *asked = os->environment(os->user, MS_CUDNN_VARIABLE);
    return asked && strcmp(asked, "off") == 0;
}

bool ms_cudnn_is_asked_for(const ms_os *os)
{
    const char *asked = os->environment(os->user, MS_CUDNN_VARIABLE);
    return asked && *asked && !is_off(os);
}

ms_status ms_cudnn_load(ms_context *context, ms_cudnn *out, char *path, size_t bytes)
{
    const ms_os *os = context->os;
    char text[1024];
    const char *missing = NULL;
    if (is_off(os))
        return ms_fail(context, MS_ERROR_NOT_FOUND,
                       "cuDNN is off, as " MS_CUDNN_VARIABLE " says: attention is slower");
    void *library =
        ms_cuda_library(context, MS_CUDNN_VARIABLE, MS_CUDNN_LIBRARY, text, sizeof text);
    if (!library)
        return ms_fail(context, MS_ERROR_NOT_FOUND,
                       "attention on a GPU is slower without cuDNN 9: %s: install it, or set "
                       "" MS_CUDA_FOLDERS " to its folder",
                       text);
    missing = ms_cuda_find_all(os, library, rows, sizeof rows / sizeof *rows, out);
    if (path) snprintf(path, bytes, "%s", text);
    if (missing)
        return ms_fail(context, MS_ERROR_UNSUPPORTED, "'%s' is no cuDNN 9: it has no %s", text,
                       missing);
    if (out->version() >= MS_CUDNN_VERSION_LEAST) return MS_OK;
    return ms_fail(context, MS_ERROR_UNSUPPORTED,
                   "'%s' is cuDNN %zu.%zu, and attention needs %d.%d or later: set "
                   "" MS_CUDA_FOLDERS " to the folder of one, or " MS_CUDNN_VARIABLE " to off",
                   text, out->version() / 10000, out->version() / 100 % 100,
                   MS_CUDNN_VERSION_LEAST / 10000, MS_CUDNN_VERSION_LEAST / 100 % 100);
}

bool ms_gpu_dnn(const ms_os *os, char *text, size_t bytes)
{
    ms_context context;
    ms_cudnn dnn;
    char path[1024];
    ms_context_init(&context, os ? os : ms_os_posix());
    if (ms_cudnn_load(&context, &dnn, path, sizeof path)) {
        snprintf(text, bytes, "%s", context.error.message);
        return false;
    }
    snprintf(text, bytes, "cuDNN %zu.%zu, %s", dnn.version() / 10000, dnn.version() / 100 % 100,
             path);
    return true;
}
