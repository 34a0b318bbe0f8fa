/* nccl.h of the stub: what the engine uses of NCCL 2.28, for ranks of one machine and memory of the
 * host. A rank is a process or a thread. Sums are in rank order, of 16-bit floats in f32.
 *
 * It enforces NCCL's rules: the process aborts, with a message, if a communicator is used while a
 * call is in progress, by two threads at once, or after its end; and if an operation that was
 * created is left when it is destroyed.
 * A process is taken to have one GPU. The end of an abort, or of the group that it is in, waits
 * while calls of another communicator of the process are under way, unless it is aborted, too.
 *
 * MOONSHARD_STUB_NCCL, or stub_nccl_plan in the process, says what goes wrong, as words with spaces
 * between them: HOW:FUNCTION:K[:VALUE][@RANK], of the K-th call of the function, counted over all
 * ranks or over those of RANK (in the communicator):
 *   fail:ncclAllReduce:3:2    the call returns code 2
 *   async:ncclAllReduce:3:6   it is carried out; ncclCommGetAsyncError says 6 after its end
 *   never:ncclAllReduce:1     it is in progress for ever
 *   late:ncclAllReduce:1:50   it is in progress for 50 ms at least
 *   hang:ncclCommAbort:1      it does not return
 *   version:ncclGetVersion:1:22707  what it answers
 * Of the calls in a group, only ncclGroupEnd can be late, never end or fail later. */
#ifndef MOONSHARD_STUB_NCCL_H
#define MOONSHARD_STUB_NCCL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum ncclResult_t {
    ncclSuccess,
    ncclUnhandledCudaError,
    ncclSystemError,
    ncclInternalError,
    ncclInvalidArgument,
    ncclInvalidUsage,
    ncclRemoteError,
    ncclInProgress
} ncclResult_t;
typedef enum ncclRedOp_t { ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg, ncclNumOps } ncclRedOp_t;
typedef enum ncclDataType_t {
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt64 = 4,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclBfloat16 = 9
} ncclDataType_t;
typedef struct ncclUniqueId {
    char internal[128];
} ncclUniqueId;
typedef struct ncclComm *ncclComm_t;
/* The beginning of ncclConfig_t of 2.28. */
typedef struct ncclConfig_t {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
} ncclConfig_t;

#define STUB_EXPORT __attribute__((visibility("default")))

/* ------------------------------------------------------------------ wrong.c */

/* Sets which calls fail or hang, and counts calls from 0 again. NULL: none fails. */
STUB_EXPORT void stub_nccl_plan(const char *plan);
/* What ncclGetLastError answers from now on; it is not copied. */
STUB_EXPORT void stub_nccl_says(const char *text);
/* What this call does; rank -1: that of no communicator. */
typedef enum stub_how {
    STUB_WELL,
    STUB_FAIL,
    STUB_ASYNC,
    STUB_NEVER,
    STUB_LATE,
    STUB_VERSION
} stub_how;
typedef struct stub_due {
    stub_how how;
    int value;
} stub_due;
stub_due stub_ask(const char *function, int rank);
/* A rule of NCCL is broken. */
_Noreturn void stub_broken(const char *function, const char *rule);

/* ------------------------------------------------------------------- nccl.c */

/* The limits of the last communicator, and how often memory was registered. */
STUB_EXPORT void stub_nccl_seen(int *min_ctas, int *max_ctas, int *registered);
/* The communicators of the process that have calls under way and are not aborted. */
STUB_EXPORT int stub_nccl_under_way(void);
/* The engine looks for it: this library carries host memory. */
STUB_EXPORT void moonshard_nccl_host_memory(void);
STUB_EXPORT ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                                       ncclRedOp_t op, ncclComm_t comm, void *stream);
STUB_EXPORT ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type,
                                    ncclRedOp_t op, int root, ncclComm_t comm, void *stream);
STUB_EXPORT ncclResult_t ncclReduceScatter(const void *in, void *out, size_t part,
                                           ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                           void *stream);
STUB_EXPORT ncclResult_t ncclAllGather(const void *in, void *out, size_t part, ncclDataType_t type,
                                       ncclComm_t comm, void *stream);
STUB_EXPORT ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type,
                                       int root, ncclComm_t comm, void *stream);
STUB_EXPORT ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t comm, void *stream);
STUB_EXPORT ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer,
                                  ncclComm_t comm, void *stream);
STUB_EXPORT ncclResult_t ncclGroupStart(void);
STUB_EXPORT ncclResult_t ncclGroupEnd(void);
STUB_EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar,
                                                  ncclDataType_t type, int residence,
                                                  ncclComm_t comm);
STUB_EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
STUB_EXPORT ncclResult_t ncclGetVersion(int *version);
STUB_EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
STUB_EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id,
                                                int rank, ncclConfig_t *config);
STUB_EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error);
STUB_EXPORT ncclResult_t ncclCommFinalize(ncclComm_t comm);
STUB_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm);
STUB_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm);
STUB_EXPORT ncclResult_t ncclCommRegister(ncclComm_t comm, void *memory, size_t bytes,
                                          void **handle);
STUB_EXPORT const char *ncclGetErrorString(ncclResult_t result);
STUB_EXPORT const char *ncclGetLastError(ncclComm_t comm);

/* ------------------------------------------------------------------- wire.c */

#define STUB_RANKS_MAX 16

/* Memory that the ranks of a communicator share: bytes from each rank to each. */
typedef struct stub_wire stub_wire;
bool stub_wire_name(ncclUniqueId *id);
stub_wire *stub_wire_open(const ncclUniqueId *id, int rank, int ranks);
void stub_wire_close(stub_wire *wire);
bool stub_wire_is_complete(const stub_wire *wire); /* all ranks have come */
void stub_wire_leave(stub_wire *wire);
bool stub_wire_is_left(const stub_wire *wire); /* by all */
/* Moves as much as there is room, or as is there; answers how much. */
size_t stub_wire_send(stub_wire *wire, int to, const void *bytes, size_t count);
size_t stub_wire_receive(stub_wire *wire, int from, void *bytes, size_t count);

/* ----------------------------------------------------------------- reduce.c */

size_t stub_bytes(ncclDataType_t type);
float stub_float(const void *from, size_t i, ncclDataType_t type);
/* inputs[r] and factors[r] of each rank, in their order; factors NULL: no operation with factors.
 * out may be one of the inputs. */
void stub_reduce(void *out, const void *const *inputs, const float *factors, int ranks,
                 size_t count, ncclDataType_t type, ncclRedOp_t op);

#endif
