/* cublaslt.c: cuBLASLt's functions, from the library that is found at run time. */
#include "tensor/cuda/cublaslt.h"

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

ms_status ms_cublaslt_load(ms_context *context, ms_cublaslt *out, char *path, size_t bytes)
{
    const ms_os *os = context->os;
    char text[1024];
    const char *missing = NULL;
    void *library =
        ms_cuda_library(context, MS_CUBLASLT_VARIABLE, MS_CUBLASLT_LIBRARY, text, sizeof text);
    if (!library)
        return ms_fail(context, MS_ERROR_NOT_FOUND,
                       "products of matrices on a GPU need cuBLASLt of CUDA 13: %s: install it, or "
                       "set " MS_CUDA_FOLDERS " to its folder; elementwise operators, reductions "
                       "and attention work without it",
                       text);
    missing = ms_cuda_find_all(os, library, rows, sizeof rows / sizeof *rows, out);
    if (path) snprintf(path, bytes, "%s", text);
    if (missing)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "'%s' is no cuBLASLt of CUDA 13: it has no %s", text, missing);
    if (out->version() >= VERSION_LEAST) return MS_OK;
    return ms_fail(context, MS_ERROR_UNSUPPORTED,
                   "'%s' is cuBLASLt %zu.%zu: 13.0 or later is needed; set " MS_CUDA_FOLDERS
                   " to the folder of one",
                   text, out->version() / 10000, out->version() / 100 % 100);
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
