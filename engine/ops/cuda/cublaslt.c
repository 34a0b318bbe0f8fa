/* cublaslt.c: cuBLASLt's functions, from the library that is found at run time. */
#include "ops/cuda/cublaslt.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "exec/cuda/library.h"
#include "moonshard/tensor.h"

static const ms_cuda_row rows[] = {
#define ROW(field, text, arguments) MS_CUDA_ROW(ms_cublaslt, field, text),
    MS_LT_FUNCTIONS(ROW)
#undef ROW
        MS_CUDA_ROW(ms_cublaslt, version, "cublasLtGetVersion"),
    MS_CUDA_ROW(ms_cublaslt, explain, "cublasLtGetStatusString"),
};

#define VERSION_LEAST 130000 /* major * 10000 + minor * 100 + patch */

/* what: which library there is, or why there is none. */
static ms_status refuse(ms_context *context, ms_status status, const char *what)
{
    char advice[MS_CUDA_ADVICE];
    ms_cuda_advise(context->os, MS_CUBLASLT_VARIABLE, "cuBLASLt 13.0 or later", advice);
    return ms_fail(context, status,
                   "products of matrices on a GPU need cuBLASLt of CUDA 13: %s: %s; the device cpu "
                   "works without it, and on a GPU what has no products",
                   what, advice);
}

ms_status ms_cublaslt_load(ms_context *context, ms_cublaslt *out, char *path, size_t bytes)
{
    char text[1024], what[1200];
    void *library =
        ms_cuda_library(context, MS_CUBLASLT_VARIABLE, MS_CUBLASLT_LIBRARY, text, sizeof text);
    if (!library) return refuse(context, MS_ERROR_NOT_FOUND, text);
    const char *missing =
        ms_cuda_find_all(context->os, library, rows, sizeof rows / sizeof *rows, out);
    if (path) snprintf(path, bytes, "%s", text);
    if (missing)
        snprintf(what, sizeof what, "'%s' is another library: it has no %s", text, missing);
    else if (out->version() < VERSION_LEAST)
        snprintf(what, sizeof what, "'%s' is cuBLASLt %zu.%zu, too old", text,
                 out->version() / 10000, out->version() / 100 % 100);
    else return MS_OK;
    return refuse(context, MS_ERROR_UNSUPPORTED, what);
}

bool ms_gpu_blas(const ms_os *os, char *text, size_t bytes)
{
    ms_context context;
    ms_cublaslt lt;
    char path[1024];
    ms_context_init(&context, os ? os : ms_os_posix());
    if (ms_cublaslt_load(&context, &lt, path, sizeof path)) {
        snprintf(text, bytes, "%s", context.error.message);
        return false;
    }
    snprintf(text, bytes, "cuBLASLt %zu.%zu, %s", lt.version() / 10000, lt.version() / 100 % 100,
             path);
    return true;
}
