/* load.c: the driver's functions, from the library that is found at run time. */
#include <stdio.h>

#include "exec/cuda/api.h"
#include "exec/cuda/library.h"

static const ms_cuda_row rows[] = {
#define ROW(field, text, arguments) MS_CUDA_ROW(ms_cuda, field, text),
    MS_CUDA_FUNCTIONS(ROW)
#undef ROW
};

const char *ms_cuda_explain(const ms_cuda *cuda, ms_cuda_result result, char *text, size_t bytes)
{
    const char *name = NULL, *words = NULL;
    if (cuda->error_name(result, &name) || !name) name = "an unknown error";
    if (cuda->error_text(result, &words) || !words) words = "";
    snprintf(text, bytes, "%s (%d)%s%s", name, (int)result, *words ? ": " : "", words);
    return text;
}

/* A library that lacks functions is an old driver, which its version says better. */
static ms_status check(ms_context *context, const char *path, const ms_cuda *cuda,
                       const char *missing)
{
    char made[40] = "";
    if (MS_CUDA_TOOLKIT)
        snprintf(made, sizeof made, ", made with CUDA %d.%d,", MS_CUDA_TOOLKIT / 1000,
                 MS_CUDA_TOOLKIT % 1000 / 10);
    if (cuda->version > 0 && cuda->version < MS_CUDA_VERSION_LEAST)
        return ms_fail(
            context, MS_ERROR_UNSUPPORTED,
            "the NVIDIA driver of this machine is for CUDA %d.%d: this build%s needs a "
            "driver for CUDA %d.%d or later%s: install a newer one; the device cpu works "
            "without it",
            cuda->version / 1000, cuda->version % 1000 / 10, made, MS_CUDA_VERSION_LEAST / 1000,
            MS_CUDA_VERSION_LEAST % 1000 / 10,
            MS_CUDA_VERSION_LEAST == 13000 ? " (release 580)" : "");
    if (!missing) return MS_OK;
    return ms_fail(context, MS_ERROR_UNSUPPORTED, "'%s' is no NVIDIA driver: it has no %s", path,
                   missing);
}

/* A machine with a driver and without a GPU is a machine without GPUs. */
static ms_status initialize(ms_context *context, ms_cuda *cuda)
{
    char text[256];
    ms_cuda_result result = cuda->init(0);
    if (result == MS_CUDA_NO_DEVICE) return MS_OK;
    if (!result) result = cuda->gpu_count(&cuda->gpus);
    if (!result) return MS_OK;
    return ms_fail(context, MS_ERROR_IO, "the NVIDIA driver does not start: %s",
                   ms_cuda_explain(cuda, result, text, sizeof text));
}

ms_status ms_cuda_load(ms_context *context, ms_cuda *out)
{
    const ms_os *os = context->os;
    const char *path = os->environment(os->user, MS_CUDA_VARIABLE);
    char why[512];
    ms_cuda cuda = { .version = 0 };
    if (!path || !*path) path = MS_CUDA_LIBRARY;
    void *library = os->library_load(os->user, path, why, sizeof why);
    if (!library)
        return ms_fail(
            context, MS_ERROR_NOT_FOUND,
            "this machine has no NVIDIA driver: %s: install one, or set " MS_CUDA_VARIABLE
            " to the path of its library",
            why);
    const char *missing = ms_cuda_find_all(os, library, rows, sizeof rows / sizeof *rows, &cuda);
    if (cuda.driver_version && cuda.driver_version(&cuda.version)) cuda.version = 0;
    ms_status status = check(context, path, &cuda, missing);
    if (!status) status = initialize(context, &cuda);
    if (!status) *out = cuda;
    return status;
}
