/* load.c: NCCL's functions, from the library that is found at run time. */
#include <string.h>

#include "comm/nccl/api.h"

/* The names as NCCL exports them, and where their addresses go. */
#define ROW(text, field)                                 \
    {                                                    \
        .name = text, .at = offsetof(ms_nccl_api, field) \
    }
#define OPTIONAL(text, field)                                              \
    {                                                                      \
        .name = text, .at = offsetof(ms_nccl_api, field), .optional = true \
    }
static const struct row {
    const char *name;
    size_t at;
    bool optional;
} rows[] = { ROW("ncclGetVersion", get_version),
             ROW("ncclGetUniqueId", get_unique_id),
             ROW("ncclCommInitRankConfig", comm_init_rank_config),
             ROW("ncclCommGetAsyncError", comm_get_async_error),
             ROW("ncclCommFinalize", comm_finalize),
             ROW("ncclCommDestroy", comm_destroy),
             ROW("ncclCommAbort", comm_abort),
             ROW("ncclCommRegister", comm_register),
             ROW("ncclGetErrorString", get_error_string),
             ROW("ncclGetLastError", get_last_error),
             ROW("ncclRedOpCreatePreMulSum", op_create_pre_mul_sum),
             ROW("ncclRedOpDestroy", op_destroy),
             ROW("ncclAllReduce", all_reduce),
             ROW("ncclReduce", reduce),
             ROW("ncclReduceScatter", reduce_scatter),
             ROW("ncclAllGather", all_gather),
             ROW("ncclBroadcast", broadcast),
             ROW("ncclSend", send),
             ROW("ncclRecv", receive),
             ROW("ncclGroupStart", group_start),
             ROW("ncclGroupEnd", group_end),
             OPTIONAL(MS_NCCL_HOST_MEMORY, host_memory) };

/* All pointers to functions have one representation, so each is copied as it is. A library that
 * lacks only newer names is an old one, which its version says better; so the version is asked for
 * as soon as there is a function that tells it. */
static const char *find_all(const ms_os *os, void *library, ms_nccl_api *api)
{
    const char *missing = NULL;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        void (*function)(void) = os->library_symbol(os->user, library, rows[i].name);
        memcpy((char *)api + rows[i].at, &function, sizeof function);
        if (!function && !rows[i].optional && !missing) missing = rows[i].name;
    }
    return missing;
}

ms_status ms_nccl_load(ms_context *context, ms_nccl_api *out)
{
    const ms_os *os = context->os;
    const char *path = os->environment(os->user, MS_NCCL_VARIABLE);
    char why[512];
    int version = 0;
    if (!path || !*path) path = MS_NCCL_LIBRARY;
    void *library = os->library_load(os->user, path, why, sizeof why);
    if (!library)
        return ms_fail(context, MS_ERROR_NOT_FOUND,
                       "cannot load NCCL: %s: install NCCL 2.28 or later, or set " MS_NCCL_VARIABLE
                       " to the path of its library: ranks on GPUs need it, on one host or several",
                       why);
    const char *missing = find_all(os, library, out);
    if (out->get_version && out->get_version(&version) == MS_NCCL_SUCCESS
        && version < MS_NCCL_VERSION_LEAST)
        return ms_fail(context, MS_ERROR_UNSUPPORTED,
                       "'%s' is NCCL %d.%d.%d: install 2.28 or later, or set " MS_NCCL_VARIABLE
                       " to the path of one",
                       path, version / 10000, version / 100 % 100, version % 100);
    if (!missing) return MS_OK;
    return ms_fail(context, MS_ERROR_UNSUPPORTED,
                   "'%s' is no NCCL of version 2.28 or later: it has no %s", path, missing);
}
