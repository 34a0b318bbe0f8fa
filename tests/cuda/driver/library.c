/* library.c: what cuDNN asks of the driver when it makes plans: contexts, and libraries of kernels
 * that are loaded and never run. So plans for a GPU can be made without one; a launch of their
 * kernels is an error. */
#include <stddef.h>

#include "driver.h"

/* The prototypes are those of cuda.h, which it does without. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_SUPPORTED = 801 };

static char context, library, kernel;

/* ------------------------------------------------------------------ contexts */

API int cuCtxGetCurrent(void **out)
{
    *out = &context;
    return SUCCESS;
}
API int cuCtxPushCurrent_v2(void *pushed)
{
    (void)pushed;
    return SUCCESS;
}
API int cuCtxPopCurrent_v2(void **out)
{
    *out = &context;
    return SUCCESS;
}
API int cuCtxPushCurrent(void *pushed) { return cuCtxPushCurrent_v2(pushed); }
API int cuCtxPopCurrent(void **out) { return cuCtxPopCurrent_v2(out); }
API int cuCtxGetLimit(size_t *out, int limit)
{
    (void)limit;
    *out = 1024;
    return SUCCESS;
}
API int cuStreamGetCtx(const void *stream, void **out)
{
    (void)stream;
    *out = &context;
    return SUCCESS;
}

/* ------------------------------------------------------- libraries of kernels */

API int cuLibraryLoadData(void **out, const void *code, int *options, void **values, unsigned count,
                          int *library_options, void **library_values, unsigned library_count)
{
    (void)code, (void)options, (void)values, (void)count;
    (void)library_options, (void)library_values, (void)library_count;
    *out = &library;
    return SUCCESS;
}
API int cuLibraryUnload(void *unloaded) { return unloaded == &library ? SUCCESS : NOT_SUPPORTED; }
API int cuLibraryGetKernel(void **out, void *from, const char *name)
{
    (void)name;
    *out = &kernel;
    return from == &library ? SUCCESS : NOT_SUPPORTED;
}
API int cuKernelSetAttribute(int attribute, int value, void *of, int gpu)
{
    (void)attribute, (void)value, (void)of, (void)gpu;
    return SUCCESS;
}
API int cuKernelGetAttribute(int *value, int attribute, void *of, int gpu)
{
    (void)attribute, (void)of, (void)gpu;
    *value = 0;
    return SUCCESS;
}
API int cuOccupancyMaxPotentialClusterSize(int *out, void *function, const void *shape)
{
    (void)function, (void)shape;
    *out = 8;
    return SUCCESS;
}

/* ------------------------------------------------- asked for, and not there */

#define ABSENT(name) \
    API int name(void) { return NOT_SUPPORTED; }
/* clang-format off */
ABSENT(cuCtxGetDevice) ABSENT(cuDevicePrimaryCtxRelease) ABSENT(cuDevicePrimaryCtxReset)
ABSENT(cuFuncGetAttribute) ABSENT(cuGetExportTable) ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernelEx) ABSENT(cuLibraryLoadFromFile) ABSENT(cuLinkAddData)
ABSENT(cuLinkAddData_v2) ABSENT(cuLinkAddFile_v2) ABSENT(cuLinkComplete) ABSENT(cuLinkCreate)
ABSENT(cuLinkCreate_v2) ABSENT(cuLinkDestroy) ABSENT(cuMemcpyDtoH_v2)
ABSENT(cuModuleGetGlobal_v2) ABSENT(cuModuleLoadDataEx) ABSENT(cuModuleLoadFatBinary)
ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor) ABSENT(cuTensorMapEncodeTiled)
