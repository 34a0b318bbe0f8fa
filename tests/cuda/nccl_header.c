/* nccl_header.c: what comm/transport/nccl/api.h says of NCCL, compared with nccl.h by the compiler.
 */
#include <nccl.h>
#include <stddef.h>

#include "comm/transport/nccl/api.h"

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a " is " #b)
SAME(MS_NCCL_SUCCESS, ncclSuccess);
SAME(MS_NCCL_CUDA_ERROR, ncclUnhandledCudaError);
SAME(MS_NCCL_SYSTEM_ERROR, ncclSystemError);
SAME(MS_NCCL_INTERNAL_ERROR, ncclInternalError);
SAME(MS_NCCL_INVALID_ARGUMENT, ncclInvalidArgument);
SAME(MS_NCCL_INVALID_USAGE, ncclInvalidUsage);
SAME(MS_NCCL_REMOTE_ERROR, ncclRemoteError);
SAME(MS_NCCL_IN_PROGRESS, ncclInProgress);
SAME(MS_NCCL_UINT8, ncclUint8);
SAME(MS_NCCL_INT32, ncclInt32);
SAME(MS_NCCL_INT64, ncclInt64);
SAME(MS_NCCL_FLOAT16, ncclFloat16);
SAME(MS_NCCL_FLOAT32, ncclFloat32);
SAME(MS_NCCL_BFLOAT16, ncclBfloat16);
SAME(MS_NCCL_SUM, ncclSum);
SAME(MS_NCCL_PROD, ncclProd);
SAME(MS_NCCL_MAX, ncclMax);
SAME(MS_NCCL_MIN, ncclMin);
SAME(MS_NCCL_AVG, ncclAvg);
SAME(MS_NCCL_OP_MOST, ncclMaxRedOp);
SAME(MS_NCCL_SCALAR_ON_HOST, ncclScalarHostImmediate);
SAME(MS_NCCL_ID_BYTES, NCCL_UNIQUE_ID_BYTES);
SAME(sizeof(ms_nccl_id), sizeof(ncclUniqueId));

/* Of 2.28: a newer header has more at the end. */
#define SAME_PLACE(a, b)                                          \
    SAME(offsetof(ms_nccl_config, a), offsetof(ncclConfig_t, b)); \
    SAME(sizeof(((ms_nccl_config *)0)->a), sizeof(((ncclConfig_t *)0)->b))
#if NCCL_VERSION_CODE >= MS_NCCL_VERSION_LEAST
SAME(MS_NCCL_UNSET, NCCL_CONFIG_UNDEF_INT);
SAME_PLACE(size, size);
SAME_PLACE(magic, magic);
SAME_PLACE(version, version);
SAME_PLACE(blocking, blocking);
SAME_PLACE(cga_cluster_size, cgaClusterSize);
SAME_PLACE(min_ctas, minCTAs);
SAME_PLACE(max_ctas, maxCTAs);
SAME_PLACE(net_name, netName);
SAME_PLACE(split_share, splitShare);
SAME_PLACE(traffic_class, trafficClass);
SAME_PLACE(name, commName);
SAME_PLACE(collnet_enable, collnetEnable);
SAME_PLACE(cta_policy, CTAPolicy);
SAME_PLACE(shrink_share, shrinkShare);
SAME_PLACE(nvls_ctas, nvlsCTAs);
SAME_PLACE(channels_per_net_peer, nChannelsPerNetPeer);
SAME_PLACE(nvlink_centric_schedule, nvlinkCentricSched);
#endif

/* Calls as the table makes them, never carried out: their arguments fit those of the header. */
#define FITS(call) _Static_assert(sizeof(call), #call)
#define C ((ncclComm_t)0)
#define S ((cudaStream_t)0)
#define IN ((const void *)0)
#define OUT ((void *)0)
#define N ((size_t)0)
FITS(ncclGetVersion((int *)0));
FITS(ncclGetUniqueId((ncclUniqueId *)0));
FITS(ncclCommInitRankConfig((ncclComm_t *)0, 0, (ncclUniqueId){ "" }, 0, (ncclConfig_t *)0));
FITS(ncclCommGetAsyncError(C, (ncclResult_t *)0));
FITS(ncclCommFinalize(C));
FITS(ncclCommDestroy(C));
FITS(ncclCommAbort(C));
FITS(ncclCommRegister(C, OUT, N, (void **)0));
FITS(ncclGetErrorString(ncclSuccess));
FITS(ncclGetLastError(C));
FITS(ncclRedOpCreatePreMulSum((ncclRedOp_t *)0, OUT, ncclFloat, ncclScalarHostImmediate, C));
FITS(ncclRedOpDestroy(ncclSum, C));
FITS(ncclAllReduce(IN, OUT, N, ncclFloat, ncclSum, C, S));
FITS(ncclReduce(IN, OUT, N, ncclFloat, ncclSum, 0, C, S));
FITS(ncclReduceScatter(IN, OUT, N, ncclFloat, ncclSum, C, S));
FITS(ncclAllGather(IN, OUT, N, ncclFloat, C, S));
FITS(ncclBroadcast(IN, OUT, N, ncclFloat, 0, C, S));
FITS(ncclSend(IN, N, ncclFloat, 0, C, S));
FITS(ncclRecv(OUT, N, ncclFloat, 0, C, S));
FITS(ncclGroupStart());
FITS(ncclGroupEnd());
