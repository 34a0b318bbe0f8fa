/* load.c: NCCL's functions, from the library that is found at run time. */
#include <stddef.h>
#include <stdio.h>

#include "comm/transport/nccl/api.h"
#include "exec/cuda/library.h"
#include "moonshard/comm.h"

static const ms_cuda_row rows[] = {
#define ROW(field, text) MS_CUDA_ROW(ms_nccl_api, field, text)
    ROW(get_version, "ncclGetVersion"),
    ROW(get_unique_id, "ncclGetUniqueId"),
    ROW(comm_init_rank_config, "ncclCommInitRankConfig"),
    ROW(comm_get_async_error, "ncclCommGetAsyncError"),
    ROW(comm_finalize, "ncclCommFinalize"),
    ROW(comm_destroy, "ncclCommDestroy"),
    ROW(comm_abort, "ncclCommAbort"),
    ROW(comm_register, "ncclCommRegister"),
    ROW(get_error_string, "ncclGetErrorString"),
    ROW(get_last_error, "ncclGetLastError"),
    ROW(op_create_pre_mul_sum, "ncclRedOpCreatePreMulSum"),
    ROW(op_destroy, "ncclRedOpDestroy"),
    ROW(all_reduce, "ncclAllReduce"),
    ROW(reduce, "ncclReduce"),
    ROW(reduce_scatter, "ncclReduceScatter"),
    ROW(all_gather, "ncclAllGather"),
    ROW(broadcast, "ncclBroadcast"),
    ROW(send, "ncclSend"),
    ROW(receive, "ncclRecv"),
    ROW(group_start, "ncclGroupStart"),
    ROW(group_end, "ncclGroupEnd"),
};
/* What a library may lack. */
static const ms_cuda_row optional = ROW(host_memory, MS_NCCL_HOST_MEMORY);
#undef ROW

/* what: which library there is, or why there is none. */
static ms_status refuse(ms_context *context, ms_status status, const char *what)
{
    char advice[MS_CUDA_ADVICE];
    ms_cuda_advise(context->os, MS_NCCL_VARIABLE, "NCCL 2.28 or later", advice);
    return ms_fail(context, status,
                   "several ranks on GPUs need NCCL: %s: %s; one rank needs none, --share-gpu "
                   "works without it on one host, and the device cpu on any",
                   what, advice);
}

/* A library that lacks only newer names is an old one, which its version says better; so the
 * version is asked for as soon as there is a function that tells it. */
static ms_status load(ms_context *context, ms_nccl_api *out, int *version, char *path, size_t bytes)
{
    char what[1200];
    const ms_os *os = context->os;
    *version = 0;
    void *library = ms_cuda_library(context, MS_NCCL_VARIABLE, MS_NCCL_LIBRARY, path, bytes);
    if (!library) return refuse(context, MS_ERROR_NOT_FOUND, path);
    const char *missing = ms_cuda_find_all(os, library, rows, sizeof rows / sizeof *rows, out);
    (void)ms_cuda_find_all(os, library, &optional, 1, out);
    if (out->get_version && out->get_version(version) == MS_NCCL_SUCCESS
        && *version < MS_NCCL_VERSION_LEAST)
        snprintf(what, sizeof what, "'%s' is NCCL %d.%d.%d, too old", path, *version / 10000,
                 *version / 100 % 100, *version % 100);
    else if (missing) snprintf(what, sizeof what, "'%s' is no NCCL: it has no %s", path, missing);
    else return MS_OK;
    return refuse(context, MS_ERROR_UNSUPPORTED, what);
}

ms_status ms_nccl_load(ms_context *context, ms_nccl_api *out)
{
    char path[1024];
    int version;
    return load(context, out, &version, path, sizeof path);
}

bool ms_gpu_nccl(const ms_os *os, char *text, size_t bytes)
{
    ms_context context;
    ms_nccl_api api;
    char path[1024];
    int version;
    ms_context_init(&context, os ? os : ms_os_posix());
    if (load(&context, &api, &version, path, sizeof path)) {
        snprintf(text, bytes, "%s", context.error.message);
        return false;
    }
    snprintf(text, bytes, "NCCL %d.%d.%d, %s", version / 10000, version / 100 % 100, version % 100,
             path);
    return true;
}
