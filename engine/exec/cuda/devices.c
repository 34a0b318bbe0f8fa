/* devices.c: which GPUs this machine has, for callers without an engine. */
#include <string.h>

#include "exec/cuda/api.h"
#include "exec/cuda/numa.h"
#include "moonshard/exec.h"

/* The driver's name of a slice is that of its GPU, "MIG" and the slice's profile. */
static ms_cuda_result describe(const ms_os *os, const ms_cuda *cuda, int index, ms_gpu *out)
{
    ms_cuda_gpu gpu = 0;
    int major = 0, minor = 0, multiprocessors = 0;
    size_t bytes = 0;
    *out = (ms_gpu){ .node = -1 };
    ms_cuda_result result = cuda->gpu_get(&gpu, index);
    if (!result) result = cuda->gpu_name(out->name, sizeof out->name, gpu);
    if (!result) result = cuda->gpu_place(out->pci, sizeof out->pci, gpu);
    if (!result) result = cuda->gpu_attribute(&major, MS_CUDA_MAJOR, gpu);
    if (!result) result = cuda->gpu_attribute(&minor, MS_CUDA_MINOR, gpu);
    if (!result) result = cuda->gpu_attribute(&multiprocessors, MS_CUDA_MULTIPROCESSORS, gpu);
    if (!result) result = cuda->gpu_memory(&bytes, gpu);
    out->node = ms_cuda_node_of(os, out->pci);
    out->is_slice = strstr(out->name, " MIG ") != NULL;
    out->major = (uint32_t)major;
    out->minor = (uint32_t)minor;
    out->multiprocessors = (uint32_t)multiprocessors;
    out->memory_bytes = bytes;
    return result;
}

ms_status ms_gpus(const ms_os *os, ms_gpu *out, uint32_t capacity, uint32_t *count,
                  uint32_t *driver, ms_error *error)
{
    ms_context context;
    ms_cuda cuda;
    char text[256];
    ms_context_init(&context, os ? os : ms_os_posix());
    ms_status status = ms_cuda_load(&context, &cuda);
    *count = status ? 0 : (uint32_t)cuda.gpus;
    *driver = status ? 0 : (uint32_t)cuda.version;
    for (uint32_t i = 0; i < *count && i < capacity && !status; i++) {
        ms_cuda_result result = describe(context.os, &cuda, (int)i, &out[i]);
        if (result)
            status = ms_fail(&context, MS_ERROR_IO, "GPU %u cannot be described: %s", i,
                             ms_cuda_explain(&cuda, result, text, sizeof text));
    }
    if (status && error) *error = context.error;
    return status;
}

bool ms_has_gpu(const ms_os *os)
{
    /* The driver's own file, and that of Windows' subsystem for Linux. */
    static const char *const files[] = { "/dev/nvidiactl", "/dev/dxg" };
    ms_file_info info;
    if (!os) os = ms_os_posix();
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (os->info(os->user, files[i], &info) == 0) return true;
    return false;
}
