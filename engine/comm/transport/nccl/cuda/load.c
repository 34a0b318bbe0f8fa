/* load.c: NCCL's functions, from the library that is found at run time. */
#include <stddef.h>

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

static bool version_of(const void *table, int *version)
{
    const ms_nccl_api *api = table;
    return api->get_version && api->get_version(version) == MS_NCCL_SUCCESS;
}

static const ms_cuda_wanted wanted = {
    .variable = MS_NCCL_VARIABLE,
    .file = MS_NCCL_LIBRARY,
    .rows = rows,
    .count = sizeof rows / sizeof *rows,
    .version = version_of,
    .version_least = MS_NCCL_VERSION_LEAST,
    .has_patch = true,
    .old_may_lack = true,
    .name = "NCCL",
    .needed = "NCCL 2.28 or later",
    .stranger = "no NCCL",
    .begin = "several ranks on GPUs need NCCL",
    .end = "; one rank needs none, --share-gpu works without it on one host, and the device cpu on "
           "any",
};

ms_status ms_nccl_load(ms_context *context, ms_nccl_api *out)
{
    ms_cuda_found found;
    ms_status status = ms_cuda_open_library(context, &wanted, out, &found);
    if (!status) (void)ms_cuda_find_all(context->os, found.library, &optional, 1, out);
    return status;
}

bool ms_gpu_nccl(const ms_os *os, char *text, size_t bytes)
{
    ms_nccl_api api;
    return ms_cuda_has_library(os, &wanted, &api, text, bytes);
}
