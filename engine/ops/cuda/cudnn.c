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

/* what: which library there is, or why there is none. One that was named must work, and to go
 * without it is then the user's choice. */
static ms_status refuse(ms_context *context, ms_status status, const char *what)
{
    char advice[MS_CUDA_ADVICE];
    bool is_named = ms_cudnn_is_asked_for(context->os);
    ms_cuda_advise(context->os, MS_CUDNN_VARIABLE, "cuDNN 9.16 or later", advice);
    return ms_fail(context, status, "attention on a GPU %s cuDNN: %s: %s%s",
                   is_named ? "cannot use" : "is slower without", what, advice,
                   is_named ? ", or to off: attention is then slower" : "");
}

ms_status ms_cudnn_load(ms_context *context, ms_cudnn *out, char *path, size_t bytes)
{
    char text[1024], what[1200];
    if (is_off(context->os))
        return ms_fail(context, MS_ERROR_NOT_FOUND,
                       "cuDNN is off, as " MS_CUDNN_VARIABLE " says: attention is slower");
    void *library =
        ms_cuda_library(context, MS_CUDNN_VARIABLE, MS_CUDNN_LIBRARY, text, sizeof text);
    if (!library) return refuse(context, MS_ERROR_NOT_FOUND, text);
    const char *missing =
        ms_cuda_find_all(context->os, library, rows, sizeof rows / sizeof *rows, out);
    if (path) snprintf(path, bytes, "%s", text);
    if (missing) snprintf(what, sizeof what, "'%s' is no cuDNN 9: it has no %s", text, missing);
    else if (out->version() < MS_CUDNN_VERSION_LEAST)
        snprintf(what, sizeof what, "'%s' is cuDNN %zu.%zu, too old", text, out->version() / 10000,
                 out->version() / 100 % 100);
    else return MS_OK;
    return refuse(context, MS_ERROR_UNSUPPORTED, what);
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
