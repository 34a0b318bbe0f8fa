/* task.h: what a kernel is for the cuda device. For exec/cuda/ and folders of kernels named cuda.
 *
 * A kernel takes its arguments as one struct by value: the one that the task of the CPU takes. A
 * task may have several variants (of dtypes, of widths), each a kernel by name in the image. */
#ifndef MOONSHARD_EXEC_CUDA_TASK_H
#define MOONSHARD_EXEC_CUDA_TASK_H

#include "moonshard/exec.h"

/* How a kernel is launched: blocks, threads in each, and bytes of shared memory of each block. A
 * count of 0 launches nothing: there is nothing to compute. */
typedef struct ms_cuda_shape {
    uint32_t blocks[3], threads[3];
    uint32_t shared_bytes;
} ms_cuda_shape;

typedef struct ms_cuda_task {
    ms_task task;               /* first: what the tables of kernels hold; it has no function */
    const void *image;          /* machine code, as cuModuleLoadData takes it */
    const char *const *kernels; /* names by variant */
    /* Chooses the shape and the variant for these arguments; on the host thread, at each launch. */
    uint32_t (*shape)(const void *arguments, ms_cuda_shape *out);
} ms_cuda_task;

#endif
