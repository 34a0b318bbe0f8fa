/* kernels.h: how a task of a GPU is declared, for the host's side of the kernels.
 *
 * A new kernel needs its name in the list of ops/backend.h, its files for the CPU, the kernel in
 * NAME.cu, its host's side with MS_CUDA_TASK in NAME.c, and the mark `ctest: cuda` in its test.
 * After a change of kernels the table of their registers is written again: tests/lint/kernels.lua
 * says how. */
#ifndef MOONSHARD_OPS_CUDA_KERNELS_H
#define MOONSHARD_OPS_CUDA_KERNELS_H

#include "exec/cuda/task.h"
#include "ops/backend.h"

/* The machine code of each file NAME.cu (engine/cmake/cuda.cmake); one byte, 0, in a build without
 * the CUDA toolkit. */
#define MS_CUDA_IMAGE(file) extern const unsigned char ms_cuda_image_##file[];

/* A kernel of a file: a static object, for ms_cuda_launch. */
#define MS_CUDA_KERNEL(file, kernel) \
    static const ms_cuda_kernel kernel = { .image = ms_cuda_image_##file, .name = #kernel };

/* ms_cuda_task.clear_padding */
#if defined __has_builtin
#if __has_builtin(__builtin_clear_padding)
#define MS_CUDA_CLEAR_PADDING(kernel, type)                 \
    static void ms_cuda_##kernel##_padding(void *arguments) \
    {                                                       \
        __builtin_clear_padding((type *)arguments);         \
    }
#define MS_CUDA_PADDING(kernel) ms_cuda_##kernel##_padding
#endif
#endif
#ifndef MS_CUDA_PADDING
#define MS_CUDA_CLEAR_PADDING(kernel, type)
#define MS_CUDA_PADDING(kernel) NULL
#endif

/* The entry of the table for ms_kernel `kernel`, whose function takes this type. */
#define MS_CUDA_TASK(kernel, title, type, task_kind, host_function)               \
    MS_CUDA_CLEAR_PADDING(kernel, type)                                           \
    const ms_cuda_task ms_cuda_##kernel = {                                       \
        .task = { .name = title, .args_bytes = sizeof(type), .kind = task_kind }, \
        .clear_padding = MS_CUDA_PADDING(kernel),                                 \
        .function = host_function                                                 \
    };

/* The same, for kernels that note faults. */
#define MS_CUDA_TASK_THAT_FAILS(kernel, title, type, task_kind, host_function, explains) \
    MS_CUDA_CLEAR_PADDING(kernel, type)                                                  \
    const ms_cuda_task ms_cuda_##kernel = {                                              \
        .task = { .name = title, .args_bytes = sizeof(type), .kind = task_kind },        \
        .clear_padding = MS_CUDA_PADDING(kernel),                                        \
        .function = host_function,                                                       \
        .explain = explains                                                              \
    };

/* The same, for a task that may call a library. */
#define MS_CUDA_TASK_OF_LIBRARY(kernel, title, type, task_kind, host_function, explains) \
    MS_CUDA_CLEAR_PADDING(kernel, type)                                                  \
    const ms_cuda_task ms_cuda_##kernel = {                                              \
        .task = { .name = title, .args_bytes = sizeof(type), .kind = task_kind },        \
        .clear_padding = MS_CUDA_PADDING(kernel),                                        \
        .function = host_function,                                                       \
        .explain = explains,                                                             \
        .uses_library = true                                                             \
    };

/* All kernels that walk in strides of the whole grid take blocks of this size and at most so many;
 * 132 multiprocessors hold some 1000 of them at a time. */
enum { MS_CUDA_THREADS = 256, MS_CUDA_BLOCKS_MOST = 2112 };
static inline ms_cuda_shape ms_cuda_grid(int64_t elements, int64_t each)
{
    ms_cuda_shape shape = { .blocks = { ms_cuda_blocks(elements, MS_CUDA_THREADS, each,
                                                       MS_CUDA_BLOCKS_MOST) },
                            .threads = { MS_CUDA_THREADS } };
    return shape;
}

#endif
