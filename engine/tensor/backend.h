/* backend.h: the kernels of a device, as one const table of tasks. Operators choose by name here and never by device.
 *
 * Each family declares its argument structs in its own header (elementwise.h, reduce.h ...). Arguments are plain data: addresses, sizes,
 * strides, scalars; nothing in them is owned. tensor/cpu/backend.c fills the table for the CPU; the sim executor uses the same table
 * and never runs a task.
 */
#ifndef MOONSHARD_TENSOR_BACKEND_H
#define MOONSHARD_TENSOR_BACKEND_H

#include "moonshard/tensor.h"

/* One line per kernel: MS_KERNEL(NAME) is the enumerator MS_KERNEL_NAME and the task ms_cpu_NAME. */
#define MS_KERNELS(K) \
    /* elementwise.h */ K(elementwise) K(copy) K(fill) \
    /* random.h      */ K(random) K(dropout) \
    /* reduce.h      */ K(reduce) K(reduce_arg) K(cumsum) K(histogram) \
    /* select.h      */ K(gather) K(index_select) K(scatter) K(scatter_add) K(topk) K(above) K(sort) \
    /* matmul.h      */ K(matmul) \
    /* norm.h        */ K(norm_forward) K(norm_backward) K(norm_backward_weight) \
    /* softmax.h     */ K(softmax_forward) K(softmax_backward) K(cross_entropy) K(cross_entropy_backward) \
    /* attention.h   */ K(attention_forward) K(attention_backward) K(rotary) \
    /* embedding.h   */ K(embedding) K(embedding_backward) \
    /* tensor.c      */ K(host_write)

#define MS_KERNEL_ENUM(name) MS_KERNEL_##name,
typedef enum ms_kernel { MS_KERNELS(MS_KERNEL_ENUM) MS_KERNEL_COUNT } ms_kernel;

typedef struct ms_backend { const ms_task *tasks[MS_KERNEL_COUNT]; } ms_backend;

extern const ms_backend ms_cpu_backend;

/* The task of the engine's device. */
const ms_task *ms_engine_kernel(const ms_engine *engine, ms_kernel kernel);

#endif
