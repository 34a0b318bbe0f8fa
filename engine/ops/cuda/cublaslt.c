/* cublaslt.c: cuBLASLt's functions, from the library that is found at run time. */
#include "ops/cuda/cublaslt.h"

#include <stddef.h>

#include "exec/cuda/library.h"
#include "moonshard/tensor.h"

static const ms_cuda_row rows[] = {
#define ROW(field, text, arguments) MS_CUDA_ROW(ms_cublaslt, field, text),
    MS_LT_FUNCTIONS(ROW)
#undef ROW
        MS_CUDA_ROW(ms_cublaslt, version, "cublasLtGetVersion"),
    MS_CUDA_ROW(ms_cublaslt, explain, "cublasLtGetStatusString"),
};

static bool version_of(const void *table, int *version)
{
    const ms_cublaslt *lt = table;
    *version = (int)lt->version();
    return true;
}

static const ms_cuda_wanted wanted = {
    .variable = MS_CUBLASLT_VARIABLE,
    .file = MS_CUBLASLT_LIBRARY,
    .rows = rows,
    .count = sizeof rows / sizeof *rows,
    .version = version_of,
    .version_least = 130000,
    .name = "cuBLASLt",
    .needed = "cuBLASLt 13.0 or later",
    .stranger = "another library",
    .begin = "products of matrices on a GPU need cuBLASLt of CUDA 13",
    .end = "; the device cpu works without it, and on a GPU what has no products",
};

ms_status ms_cublaslt_load(ms_context *context, ms_cublaslt *out)
{
    ms_cuda_found found;
    return ms_cuda_open_library(context, &wanted, out, &found);
}

bool ms_gpu_blas(const ms_os *os, char *text, size_t bytes)
{
    ms_cublaslt lt;
    return ms_cuda_has_library(os, &wanted, &lt, text, bytes);
}
