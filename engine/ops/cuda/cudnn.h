/* cudnn.h: what the engine uses of cuDNN: the values that cudnn_graph.h of version 9 gives its
 * enumerations, and the functions of its graph API as a table, filled at run time. A build needs no
 * cuDNN, and the program links none. */
#ifndef MOONSHARD_OPS_CUDA_CUDNN_H
#define MOONSHARD_OPS_CUDA_CUDNN_H

#include "moonshard/base.h"

#define MS_CUDNN_LIBRARY "libcudnn.so.9"
/* See ms_cuda_library. "off": cuDNN is not used. */
#define MS_CUDNN_VARIABLE "MOONSHARD_CUDNN"
#define MS_CUDNN_VERSION_LEAST 91600 /* major * 10000 + minor * 100 + patch */

struct CUstream_st;
typedef struct cudnnContext *ms_cudnn_handle;
typedef void *ms_cudnn_descriptor;
typedef int ms_cudnn_result; /* 0: it went well */

/* Kinds of descriptors. */
enum {
    MS_CUDNN_POINTWISE = 0,
    MS_CUDNN_ENGINE = 2,
    MS_CUDNN_CONFIGURATION = 3,
    MS_CUDNN_HEURISTICS = 4,
    MS_CUDNN_PLAN = 5,
    MS_CUDNN_OPERATION_POINTWISE = 13,
    MS_CUDNN_GRAPH = 15,
    MS_CUDNN_PACK = 16,
    MS_CUDNN_TENSOR = 17,
    MS_CUDNN_MATMUL = 18,
    MS_CUDNN_OPERATION_MATMUL = 19,
    MS_CUDNN_REDUCTION = 21,
    MS_CUDNN_OPERATION_REDUCTION = 22,
    MS_CUDNN_OPERATION_RESHAPE = 31,
    MS_CUDNN_DEVICE = 38
};

/* Types of attributes. */
enum {
    MS_CUDNN_IS_HANDLE = 0,
    MS_CUDNN_IS_DTYPE = 1,
    MS_CUDNN_IS_BOOLEAN = 2,
    MS_CUDNN_IS_INTEGER = 3,
    MS_CUDNN_IS_ADDRESS = 6,
    MS_CUDNN_IS_HEURISTIC = 8,
    MS_CUDNN_IS_NOTE = 11,
    MS_CUDNN_IS_POINTWISE = 14,
    MS_CUDNN_IS_DESCRIPTOR = 15,
    MS_CUDNN_IS_REDUCTION = 18,
    MS_CUDNN_IS_ORDER = 20,
    MS_CUDNN_IS_TEXT = 24
};

/* Attributes, by the kind of the descriptor. */
enum {
    MS_CUDNN_POINTWISE_MODE = 0,
    MS_CUDNN_POINTWISE_DTYPE = 1,
    MS_CUDNN_POINTWISE_AXIS = 9,
    MS_CUDNN_HEURISTICS_MODE = 200,
    MS_CUDNN_HEURISTICS_GRAPH = 201,
    MS_CUDNN_HEURISTICS_RESULTS = 202,
    MS_CUDNN_HEURISTICS_DEVICE = 204,
    MS_CUDNN_CONFIGURATION_ENGINE = 300,
    MS_CUDNN_PLAN_HANDLE = 400,
    MS_CUDNN_PLAN_CONFIGURATION = 401,
    MS_CUDNN_PLAN_WORKSPACE = 402,
    MS_CUDNN_PLAN_TEXT = 405,
    MS_CUDNN_PLAN_DEVICE = 407,
    MS_CUDNN_OPERATION_POINTWISE_MODE = 750,
    MS_CUDNN_OPERATION_POINTWISE_X = 751,
    MS_CUDNN_OPERATION_POINTWISE_B = 752,
    MS_CUDNN_OPERATION_POINTWISE_Y = 753,
    MS_CUDNN_OPERATION_POINTWISE_T = 758,
    MS_CUDNN_GRAPH_HANDLE = 800,
    MS_CUDNN_GRAPH_OPERATIONS = 801,
    MS_CUDNN_TENSOR_ALIGNMENT = 900,
    MS_CUDNN_TENSOR_DTYPE = 901,
    MS_CUDNN_TENSOR_SHAPE = 902,
    MS_CUDNN_TENSOR_STRIDES = 903,
    MS_CUDNN_TENSOR_NUMBER = 906,
    MS_CUDNN_TENSOR_IS_VIRTUAL = 907,
    MS_CUDNN_TENSOR_IS_VALUE = 908,
    MS_CUDNN_TENSOR_ORDER = 909,
    MS_CUDNN_PACK_NUMBERS = 1000,
    MS_CUDNN_PACK_ADDRESSES = 1001,
    MS_CUDNN_PACK_WORKSPACE = 1003,
    MS_CUDNN_ENGINE_NOTES = 1303,
    MS_CUDNN_MATMUL_DTYPE = 1500,
    MS_CUDNN_OPERATION_MATMUL_A = 1520,
    MS_CUDNN_OPERATION_MATMUL_B = 1521,
    MS_CUDNN_OPERATION_MATMUL_C = 1522,
    MS_CUDNN_OPERATION_MATMUL_MATMUL = 1523,
    MS_CUDNN_REDUCTION_MODE = 1600,
    MS_CUDNN_REDUCTION_DTYPE = 1601,
    MS_CUDNN_OPERATION_REDUCTION_X = 1610,
    MS_CUDNN_OPERATION_REDUCTION_Y = 1611,
    MS_CUDNN_OPERATION_REDUCTION_REDUCTION = 1612,
    MS_CUDNN_OPERATION_RESHAPE_X = 2200,
    MS_CUDNN_OPERATION_RESHAPE_Y = 2201,
    MS_CUDNN_DEVICE_TEXT = 2702
};

enum {
    MS_CUDNN_F32 = 0,
    MS_CUDNN_F16 = 2,
    MS_CUDNN_I32 = 4,
    MS_CUDNN_BF16 = 9,
    MS_CUDNN_BOOL = 11
};
/* Functions of one to three operands; where: t != 0 ? x : b; index: the position along an axis. */
enum {
    MS_CUDNN_ADD = 0,
    MS_CUDNN_MUL = 1,
    MS_CUDNN_DIV = 6,
    MS_CUDNN_SUB = 9,
    MS_CUDNN_EXP = 13,
    MS_CUDNN_LOG = 15,
    MS_CUDNN_IDENTITY = 21,
    MS_CUDNN_GE = 303,
    MS_CUDNN_INDEX = 501,
    MS_CUDNN_WHERE = 601
};
enum { MS_CUDNN_REDUCE_SUM = 0, MS_CUDNN_REDUCE_MAX = 3 };
/* Configurations are asked for in the library's own order, or as what nearly always works. */
enum { MS_CUDNN_ORDER_TILES = 2 }; /* 16 by 16 */
enum { MS_CUDNN_FALLBACK = 2, MS_CUDNN_BEST_FIRST = 3 };
enum { MS_CUDNN_NONDETERMINISTIC = 4, MS_CUDNN_NOTES = 10 };

/* field, name, arguments; all return an ms_cudnn_result. */
#define MS_CUDNN_FUNCTIONS(X)                                                               \
    X(create, "cudnnCreate", (ms_cudnn_handle *))                                           \
    X(destroy, "cudnnDestroy", (ms_cudnn_handle))                                           \
    X(set_stream, "cudnnSetStream", (ms_cudnn_handle, struct CUstream_st *))                \
    X(make, "cudnnBackendCreateDescriptor", (int kind, ms_cudnn_descriptor *))              \
    X(release, "cudnnBackendDestroyDescriptor", (ms_cudnn_descriptor))                      \
    X(finalize, "cudnnBackendFinalize", (ms_cudnn_descriptor))                              \
    X(set, "cudnnBackendSetAttribute",                                                      \
      (ms_cudnn_descriptor, int attribute, int type, int64_t count, const void *))          \
    X(get, "cudnnBackendGetAttribute",                                                      \
      (ms_cudnn_descriptor, int attribute, int type, int64_t room, int64_t *count, void *)) \
    X(execute, "cudnnBackendExecute",                                                       \
      (ms_cudnn_handle, ms_cudnn_descriptor plan, ms_cudnn_descriptor pack))

typedef struct ms_cudnn {
#define MS_CUDNN_FIELD(field, name, arguments) ms_cudnn_result(*field) arguments;
    MS_CUDNN_FUNCTIONS(MS_CUDNN_FIELD)
#undef MS_CUDNN_FIELD
    size_t (*version)(void);
    const char *(*explain)(ms_cudnn_result);
    void (*last_error)(char *text, size_t bytes);
} ms_cudnn;

/* MS_ERROR_NOT_FOUND, MS_ERROR_UNSUPPORTED: there is none, it is off, or too old; the message says
 * what to do. Otherwise `path` gets where it was found. */
ms_status ms_cudnn_load(ms_context *context, ms_cudnn *out, char *path, size_t bytes);
/* Whether MS_CUDNN_VARIABLE names a library. Then one that cannot be used is an error of the user,
 * and not a reason to do without. */
bool ms_cudnn_is_asked_for(const ms_os *os);

#endif
