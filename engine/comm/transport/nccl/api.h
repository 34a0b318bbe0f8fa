/* api.h: what the engine uses of NCCL: its types, with the values and the layout that NCCL's header
 * of version 2.28 gives them, and its functions as a table. For comm/transport/nccl/ only.
 *
 * Invariants
 * - The library is found when a job asks for it. A build needs no NCCL, and no nccl.h.
 * - Functions that 2.28 has are all there; what a newer version adds may be NULL.
 * - A library that says so (MS_NCCL_HOST_MEMORY) moves host memory and takes NULL for a stream; a
 *   call has then moved its bytes when NCCL reports success. The real one needs memory of GPUs. */
#ifndef MOONSHARD_COMM_TRANSPORT_NCCL_API_H
#define MOONSHARD_COMM_TRANSPORT_NCCL_API_H

#include "moonshard/base.h"

#define MS_NCCL_VERSION_LEAST 22800 /* major * 10000 + minor * 100 + patch */
#define MS_NCCL_LIBRARY "libnccl.so.2"
/* The path of the library, which is then sought nowhere else. */
#define MS_NCCL_VARIABLE "MOONSHARD_NCCL"
/* A symbol of libraries for tests, which carry host memory. */
#define MS_NCCL_HOST_MEMORY "moonshard_nccl_host_memory"

typedef enum ms_nccl_result {
    MS_NCCL_SUCCESS,
    MS_NCCL_CUDA_ERROR,
    MS_NCCL_SYSTEM_ERROR,
    MS_NCCL_INTERNAL_ERROR,
    MS_NCCL_INVALID_ARGUMENT,
    MS_NCCL_INVALID_USAGE,
    MS_NCCL_REMOTE_ERROR,
    MS_NCCL_IN_PROGRESS
} ms_nccl_result;

typedef enum ms_nccl_dtype {
    MS_NCCL_UINT8 = 1,
    MS_NCCL_INT32 = 2,
    MS_NCCL_INT64 = 4,
    MS_NCCL_FLOAT16 = 6,
    MS_NCCL_FLOAT32 = 7,
    MS_NCCL_BFLOAT16 = 9
} ms_nccl_dtype;

/* Operations that a communicator makes itself have larger numbers. */
typedef enum ms_nccl_op {
    MS_NCCL_SUM,
    MS_NCCL_PROD,
    MS_NCCL_MAX,
    MS_NCCL_MIN,
    MS_NCCL_AVG,
    MS_NCCL_OP_MOST = 0x7fffffff
} ms_nccl_op;

typedef enum ms_nccl_residence { MS_NCCL_SCALAR_ON_HOST = 1 } ms_nccl_residence;

#define MS_NCCL_ID_BYTES 128
typedef struct ms_nccl_id {
    char bytes[MS_NCCL_ID_BYTES];
} ms_nccl_id;

/* As 2.28 has it. A newer library takes the rest from its own defaults, as the size says what is
 * there. */
#define MS_NCCL_UNSET INT32_MIN
#define MS_NCCL_CONFIG_MAGIC 0xcafebeefu
typedef struct ms_nccl_config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share, traffic_class;
    const char *name;
    int collnet_enable, cta_policy, shrink_share, nvls_ctas, channels_per_net_peer,
        nvlink_centric_schedule;
} ms_nccl_config;

typedef void *ms_nccl_handle; /* of a communicator */

typedef struct ms_nccl_api {
    ms_nccl_result (*get_version)(int *version);
    ms_nccl_result (*get_unique_id)(ms_nccl_id *id);
    ms_nccl_result (*comm_init_rank_config)(ms_nccl_handle *out, int ranks, ms_nccl_id id, int rank,
                                            ms_nccl_config *config);
    ms_nccl_result (*comm_get_async_error)(ms_nccl_handle comm, ms_nccl_result *error);
    ms_nccl_result (*comm_finalize)(ms_nccl_handle comm);
    ms_nccl_result (*comm_destroy)(ms_nccl_handle comm);
    ms_nccl_result (*comm_abort)(ms_nccl_handle comm);
    ms_nccl_result (*comm_register)(ms_nccl_handle comm, void *memory, size_t bytes, void **out);
    const char *(*get_error_string)(ms_nccl_result result);
    const char *(*get_last_error)(ms_nccl_handle comm);
    ms_nccl_result (*op_create_pre_mul_sum)(ms_nccl_op *out, void *scalar, ms_nccl_dtype dtype,
                                            ms_nccl_residence residence, ms_nccl_handle comm);
    ms_nccl_result (*op_destroy)(ms_nccl_op op, ms_nccl_handle comm);
    ms_nccl_result (*all_reduce)(const void *in, void *out, size_t count, ms_nccl_dtype dtype,
                                 ms_nccl_op op, ms_nccl_handle comm, void *stream);
    ms_nccl_result (*reduce)(const void *in, void *out, size_t count, ms_nccl_dtype dtype,
                             ms_nccl_op op, int root, ms_nccl_handle comm, void *stream);
    ms_nccl_result (*reduce_scatter)(const void *in, void *out, size_t part, ms_nccl_dtype dtype,
                                     ms_nccl_op op, ms_nccl_handle comm, void *stream);
    ms_nccl_result (*all_gather)(const void *in, void *out, size_t part, ms_nccl_dtype dtype,
                                 ms_nccl_handle comm, void *stream);
    ms_nccl_result (*broadcast)(const void *in, void *out, size_t count, ms_nccl_dtype dtype,
                                int root, ms_nccl_handle comm, void *stream);
    ms_nccl_result (*send)(const void *in, size_t count, ms_nccl_dtype dtype, int peer,
                           ms_nccl_handle comm, void *stream);
    ms_nccl_result (*receive)(void *out, size_t count, ms_nccl_dtype dtype, int peer,
                              ms_nccl_handle comm, void *stream);
    ms_nccl_result (*group_start)(void);
    ms_nccl_result (*group_end)(void);
    /* Optional, from here on. */
    void (*host_memory)(void);
} ms_nccl_api;

/* comm/transport/nccl/cuda/load.c: loads the library, from where the other libraries of NVIDIA are,
 * and fills the table. MS_ERROR_NOT_FOUND: there is none; MS_ERROR_UNSUPPORTED: it is older
 * than 2.28, or no NCCL. The library is never unloaded. */
ms_status ms_nccl_load(ms_context *context, ms_nccl_api *out);

#endif
