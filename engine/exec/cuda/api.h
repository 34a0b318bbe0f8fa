/* api.h: what the engine uses of NVIDIA's driver: its types, with the values and the layout that
 * cuda.h of version 13 gives them, and its functions as a table. For folders named cuda only.
 *
 * Invariants
 * - The driver's library is found at run time. A build needs no CUDA, and the program links none:
 *   it runs on machines with a GPU and without.
 * - All calls of the driver go through this table. Functions that a driver of version 13.0 has are
 *   all there.
 * - The driver is initialized (cuInit) by ms_cuda_load, once in a process that asks for GPUs. A
 *   process that forks must not have asked before: the child could not use the driver. */
#ifndef MOONSHARD_EXEC_CUDA_API_H
#define MOONSHARD_EXEC_CUDA_API_H

#include "moonshard/base.h"

/* Versions of CUDA are major * 1000 + minor * 10. The toolkit of this build; 0: it had none. */
#ifndef MS_CUDA_TOOLKIT
#define MS_CUDA_TOOLKIT 0
#endif
/* Of the driver. Kernels run with any driver of the toolkit's major version:
 * https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html */
#define MS_CUDA_VERSION_LEAST (MS_CUDA_TOOLKIT > 13000 ? MS_CUDA_TOOLKIT / 1000 * 1000 : 13000)
#define MS_CUDA_LIBRARY "libcuda.so.1"
/* The path of the driver's library, where the system's loader does not find it by its name. */
#define MS_CUDA_VARIABLE "MOONSHARD_CUDA_DRIVER"

typedef enum ms_cuda_result {
    MS_CUDA_SUCCESS = 0,
    MS_CUDA_OUT_OF_MEMORY = 2,
    MS_CUDA_NO_DEVICE = 100,
    MS_CUDA_NOT_READY = 600,
    MS_CUDA_RESULT_MOST = 0x7fffffff
} ms_cuda_result;

/* A device is a number below the count, an address one that tasks may use. */
typedef int ms_cuda_gpu;
typedef unsigned long long ms_cuda_address;
typedef struct CUctx_st *ms_cuda_context;
typedef struct CUmod_st *ms_cuda_module;
typedef struct CUfunc_st *ms_cuda_function;
typedef struct CUstream_st *ms_cuda_stream;
typedef struct CUevent_st *ms_cuda_event;
typedef unsigned long long ms_cuda_memory;      /* a piece of a GPU's memory, without an address */
typedef struct CUgraph_st *ms_cuda_graph;       /* work that was captured */
typedef struct CUgraphExec_st *ms_cuda_program; /* the same, made ready to be launched */
typedef struct CUgraphNode_st *ms_cuda_node;    /* one piece of work of a graph */

typedef enum ms_cuda_attribute {
    MS_CUDA_MULTIPROCESSORS = 16,
    MS_CUDA_MAJOR = 75, /* of the compute capability */
    MS_CUDA_MINOR = 76,
    MS_CUDA_HOST_ADDRESSES = 91,  /* whether kernels use registered memory at the host's address */
    MS_CUDA_VIRTUAL_MEMORY = 102, /* whether memory can be given addresses later */
    MS_CUDA_ATTRIBUTE_MOST = 0x7fffffff
} ms_cuda_attribute;

enum { MS_CUDA_EVENT_TIMING = 0, MS_CUDA_EVENT_NO_TIMING = 2 };
enum { MS_CUDA_STREAM_NON_BLOCKING = 1 }; /* it does not wait for the stream NULL */
enum { MS_CUDA_ALLOCATION_PINNED = 1, MS_CUDA_LOCATION_GPU = 1 };
enum { MS_CUDA_READ_WRITE = 3 };
enum {
    MS_CUDA_REGISTER_PORTABLE = 1,
    MS_CUDA_REGISTER_MAPPED = 2
};                                        /* for every context; for kernels */
enum { MS_CUDA_KERNEL_SHARED_BYTES = 8 }; /* the most shared memory that launches ask for */
enum { MS_CUDA_GRANULARITY_RECOMMENDED = 1 };
/* How much threads may call of what a capture does not see, such as allocations: its own thread
 * nothing, or all threads everything. */
enum { MS_CUDA_CAPTURE_THREAD = 1, MS_CUDA_CAPTURE_RELAXED = 2 };

typedef struct ms_cuda_location {
    int type, id;
} ms_cuda_location;
typedef struct ms_cuda_allocation {
    int type, handles;
    ms_cuda_location location;
    void *unused;
    unsigned char flags[8];
} ms_cuda_allocation;
typedef struct ms_cuda_access {
    ms_cuda_location location;
    int flags;
} ms_cuda_access;

/* What a kernel of a graph is launched with: CUDA_KERNEL_NODE_PARAMS_v2. */
typedef struct ms_cuda_kernel_call {
    ms_cuda_function function;
    unsigned grid[3], block[3], shared_bytes;
    void **parameters, **extra;
    void *kernel;
    ms_cuda_context context;
} ms_cuda_kernel_call;

/* Field, name in the library, arguments; all return an ms_cuda_result. */
#define MS_CUDA_FUNCTIONS(X)                                                                      \
    X(init, "cuInit", (unsigned flags))                                                           \
    X(driver_version, "cuDriverGetVersion", (int *version))                                       \
    X(error_name, "cuGetErrorName", (ms_cuda_result, const char **text))                          \
    X(error_text, "cuGetErrorString", (ms_cuda_result, const char **text))                        \
    X(gpu_count, "cuDeviceGetCount", (int *count))                                                \
    X(gpu_get, "cuDeviceGet", (ms_cuda_gpu * gpu, int index))                                     \
    X(gpu_name, "cuDeviceGetName", (char *name, int bytes, ms_cuda_gpu))                          \
    X(gpu_place, "cuDeviceGetPCIBusId", (char *text, int bytes, ms_cuda_gpu))                     \
    X(gpu_memory, "cuDeviceTotalMem_v2", (size_t * bytes, ms_cuda_gpu))                           \
    X(gpu_attribute, "cuDeviceGetAttribute", (int *value, ms_cuda_attribute, ms_cuda_gpu))        \
    X(context_retain, "cuDevicePrimaryCtxRetain", (ms_cuda_context *, ms_cuda_gpu))               \
    X(context_release, "cuDevicePrimaryCtxRelease_v2", (ms_cuda_gpu))                             \
    X(context_set, "cuCtxSetCurrent", (ms_cuda_context))                                          \
    X(priorities, "cuCtxGetStreamPriorityRange", (int *least, int *greatest))                     \
    X(memory_info, "cuMemGetInfo_v2", (size_t * available, size_t * total))                       \
    X(stream_create, "cuStreamCreateWithPriority", (ms_cuda_stream *, unsigned flags, int))       \
    X(stream_destroy, "cuStreamDestroy_v2", (ms_cuda_stream))                                     \
    X(stream_synchronize, "cuStreamSynchronize", (ms_cuda_stream))                                \
    X(stream_wait, "cuStreamWaitEvent", (ms_cuda_stream, ms_cuda_event, unsigned flags))          \
    X(event_create, "cuEventCreate", (ms_cuda_event *, unsigned flags))                           \
    X(event_destroy, "cuEventDestroy_v2", (ms_cuda_event))                                        \
    X(event_record, "cuEventRecord", (ms_cuda_event, ms_cuda_stream))                             \
    X(event_query, "cuEventQuery", (ms_cuda_event))                                               \
    X(event_synchronize, "cuEventSynchronize", (ms_cuda_event))                                   \
    X(event_elapsed, "cuEventElapsedTime_v2", (float *ms, ms_cuda_event from, ms_cuda_event to))  \
    X(allocate, "cuMemAlloc_v2", (ms_cuda_address *, size_t bytes))                               \
    X(release, "cuMemFree_v2", (ms_cuda_address))                                                 \
    X(granularity, "cuMemGetAllocationGranularity",                                               \
      (size_t * bytes, const ms_cuda_allocation *, int))                                          \
    X(reserve, "cuMemAddressReserve",                                                             \
      (ms_cuda_address *, size_t bytes, size_t align, ms_cuda_address, unsigned long long flags)) \
    X(unreserve, "cuMemAddressFree", (ms_cuda_address, size_t bytes))                             \
    X(memory_create, "cuMemCreate",                                                               \
      (ms_cuda_memory *, size_t bytes, const ms_cuda_allocation *, unsigned long long flags))     \
    X(memory_release, "cuMemRelease", (ms_cuda_memory))                                           \
    X(map, "cuMemMap",                                                                            \
      (ms_cuda_address, size_t bytes, size_t offset, ms_cuda_memory, unsigned long long flags))   \
    X(unmap, "cuMemUnmap", (ms_cuda_address, size_t bytes))                                       \
    X(set_access, "cuMemSetAccess",                                                               \
      (ms_cuda_address, size_t bytes, const ms_cuda_access *, size_t count))                      \
    X(host_allocate, "cuMemHostAlloc", (void **, size_t bytes, unsigned flags))                   \
    X(host_release, "cuMemFreeHost", (void *))                                                    \
    X(host_register, "cuMemHostRegister_v2", (void *, size_t bytes, unsigned flags))              \
    X(host_unregister, "cuMemHostUnregister", (void *))                                           \
    X(copy_in, "cuMemcpyHtoDAsync_v2",                                                            \
      (ms_cuda_address, const void *host, size_t bytes, ms_cuda_stream))                          \
    X(copy_out, "cuMemcpyDtoHAsync_v2",                                                           \
      (void *host, ms_cuda_address, size_t bytes, ms_cuda_stream))                                \
    X(copy_inside, "cuMemcpyDtoDAsync_v2",                                                        \
      (ms_cuda_address, ms_cuda_address from, size_t bytes, ms_cuda_stream))                      \
    X(module_load, "cuModuleLoadData", (ms_cuda_module *, const void *image))                     \
    X(module_unload, "cuModuleUnload", (ms_cuda_module))                                          \
    X(module_function, "cuModuleGetFunction",                                                     \
      (ms_cuda_function *, ms_cuda_module, const char *name))                                     \
    X(launch, "cuLaunchKernel",                                                                   \
      (ms_cuda_function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,     \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, ms_cuda_stream, void **,        \
       void **extra))                                                                             \
    X(set_attribute, "cuFuncSetAttribute", (ms_cuda_function, int attribute, int value))          \
    X(fill, "cuMemsetD8Async", (ms_cuda_address, unsigned char, size_t bytes, ms_cuda_stream))    \
    X(launch_host, "cuLaunchHostFunc", (ms_cuda_stream, void (*)(void *), void *argument))        \
    X(capture_begin, "cuStreamBeginCapture_v2", (ms_cuda_stream, int mode))                       \
    X(capture_end, "cuStreamEndCapture", (ms_cuda_stream, ms_cuda_graph *))                       \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))                             \
    X(capture_info, "cuStreamGetCaptureInfo_v3",                                                  \
      (ms_cuda_stream, int *status, unsigned long long *id, ms_cuda_graph *,                      \
       const ms_cuda_node **last, const void **edges, size_t *count))                             \
    X(graph_destroy, "cuGraphDestroy", (ms_cuda_graph))                                           \
    X(program_make, "cuGraphInstantiateWithFlags",                                                \
      (ms_cuda_program *, ms_cuda_graph, unsigned long long flags))                               \
    X(program_launch, "cuGraphLaunch", (ms_cuda_program, ms_cuda_stream))                         \
    X(program_change, "cuGraphExecKernelNodeSetParams_v2",                                        \
      (ms_cuda_program, ms_cuda_node, const ms_cuda_kernel_call *))                               \
    X(program_destroy, "cuGraphExecDestroy", (ms_cuda_program))

typedef struct ms_cuda {
#define MS_CUDA_FIELD(field, name, arguments) ms_cuda_result(*field) arguments;
    MS_CUDA_FUNCTIONS(MS_CUDA_FIELD)
#undef MS_CUDA_FIELD
    int version; /* of the driver, as MS_CUDA_VERSION_LEAST */
    int gpus;    /* how many it has; none is no error here */
} ms_cuda;

/* Finds the driver, fills the table and initializes the driver. MS_ERROR_NOT_FOUND: there is none.
 * MS_ERROR_UNSUPPORTED: it is too old, or no driver. MS_ERROR_IO: it cannot be initialized. */
ms_status ms_cuda_load(ms_context *context, ms_cuda *out);
/* The driver's name and words for a result. */
const char *ms_cuda_explain(const ms_cuda *cuda, ms_cuda_result result, char *text, size_t bytes);

#endif
