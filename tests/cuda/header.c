/* header.c: what exec/cuda/api.h says of the driver, compared with cuda.h by the compiler. */
#include <cuda.h>

#include "exec/cuda/api.h"

#define SAME(a, b) _Static_assert((int)(a) == (int)(b), #a " is " #b)
SAME(MS_CUDA_SUCCESS, CUDA_SUCCESS);
SAME(MS_CUDA_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(MS_CUDA_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME(MS_CUDA_NOT_READY, CUDA_ERROR_NOT_READY);
SAME(MS_CUDA_MULTIPROCESSORS, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
SAME(MS_CUDA_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
SAME(MS_CUDA_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
SAME(MS_CUDA_VIRTUAL_MEMORY, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME(MS_CUDA_EVENT_TIMING, CU_EVENT_DEFAULT);
SAME(MS_CUDA_EVENT_NO_TIMING, CU_EVENT_DISABLE_TIMING);
SAME(MS_CUDA_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(MS_CUDA_ALLOCATION_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME(MS_CUDA_LOCATION_GPU, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(MS_CUDA_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(MS_CUDA_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME(MS_CUDA_CAPTURE_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
SAME(MS_CUDA_CAPTURE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(MS_CUDA_KERNEL_SHARED_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES);

#define SIZE(a, b) SAME(sizeof(a), sizeof(b))
#define PLACE(a, x, b, y) SAME(offsetof(a, x), offsetof(b, y))
SIZE(ms_cuda_gpu, CUdevice);
SIZE(ms_cuda_address, CUdeviceptr);
SIZE(ms_cuda_memory, CUmemGenericAllocationHandle);
SIZE(int, CUstreamCaptureMode);
_Static_assert(__builtin_types_compatible_p(__typeof__(&cuDeviceGetPCIBusId),
                                            CUresult (*)(char *, int, ms_cuda_gpu)),
               "what gpu_place is");
SIZE(ms_cuda_location, CUmemLocation);
SIZE(ms_cuda_allocation, CUmemAllocationProp);
PLACE(ms_cuda_allocation, handles, CUmemAllocationProp, requestedHandleTypes);
PLACE(ms_cuda_allocation, location, CUmemAllocationProp, location);
PLACE(ms_cuda_allocation, unused, CUmemAllocationProp, win32HandleMetaData);
PLACE(ms_cuda_allocation, flags, CUmemAllocationProp, allocFlags);
SIZE(ms_cuda_access, CUmemAccessDesc);
PLACE(ms_cuda_access, flags, CUmemAccessDesc, flags);
SIZE(ms_cuda_kernel_call, CUDA_KERNEL_NODE_PARAMS);
PLACE(ms_cuda_kernel_call, grid, CUDA_KERNEL_NODE_PARAMS, gridDimX);
PLACE(ms_cuda_kernel_call, block, CUDA_KERNEL_NODE_PARAMS, blockDimX);
PLACE(ms_cuda_kernel_call, shared_bytes, CUDA_KERNEL_NODE_PARAMS, sharedMemBytes);
PLACE(ms_cuda_kernel_call, parameters, CUDA_KERNEL_NODE_PARAMS, kernelParams);
PLACE(ms_cuda_kernel_call, kernel, CUDA_KERNEL_NODE_PARAMS, kern);
PLACE(ms_cuda_kernel_call, context, CUDA_KERNEL_NODE_PARAMS, ctx);
SIZE(int, CUstreamCaptureStatus);
_Static_assert(MS_CUDA_VERSION_LEAST / 1000 == CUDA_VERSION / 1000, "of the same major version");
