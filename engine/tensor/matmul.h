/* matmul.h: matrix products: arguments of the kernel, and the call that other families use. */
#ifndef MOONSHARD_TENSOR_MATMUL_H
#define MOONSHARD_TENSOR_MATMUL_H

#include "tensor/backend.h"

/* Leading dimensions of the largest tensor; collapsing leaves fewer in most calls. */
#define MS_MATMUL_BATCH_DIMS (MS_DIMS_MAX - 2)

/* c[m, n] = a[m, k] b[k, n], plus what c holds if accumulate, plus bias[n] in f32 if bias. A
 * transposed operand is stored as [k, m] or [n, k]; its row is then a row of that. */
typedef struct ms_gemm_shape {
    int64_t m, n, k;
    int64_t a_row, b_row, c_row; /* elements from one stored row to the next */
    bool a_transposed, b_transposed;
    bool accumulate, bias;
    uint8_t in, out; /* ms_dtype of a and b, and of c */
    uint8_t zero[2]; /* no padding: plans are found by comparing bytes */
} ms_gemm_shape;

/* Task arguments: c = a b (+ bias) for every batch. The work is cut into groups of batches times
 * parts of rows (or of columns). */
typedef struct ms_matmul_args {
    const void *a, *b;
    const float *bias; /* or NULL */
    void *c;
    /* What the device's plan_matmul fills in: its library, its plans of a part and of the last
     * part. No plan: the kernel converts the operands to f32, block by block. */
    const void *library, *plan, *last_plan;
    ms_gemm_shape shape; /* of a part; m or n is the part's size */
    int64_t last;        /* size of the last part */
    uint32_t groups, parts;
    bool split_columns;
    uint32_t batch_dims;
    int64_t batches, batch_shape[MS_MATMUL_BATCH_DIMS];
    /* In elements. */
    int64_t a_batch[MS_MATMUL_BATCH_DIMS], b_batch[MS_MATMUL_BATCH_DIMS],
        c_batch[MS_MATMUL_BATCH_DIMS];
} ms_matmul_args;

/* out[..., m, n] = a[..., m, k] b[..., k, n] (+ bias [n], f32 or out's dtype, or NULL). All have
 * the same number of dimensions and equal leading ones, up to size 1. a and b have one dtype; out
 * has it too, or is f32. The inner stride of out is 1. Any strides of a and b. */
ms_status ms_matmul_into(ms_engine *engine, ms_tensor *a, ms_tensor *b, ms_tensor *bias,
                         ms_tensor *out);

/* [..., rows, columns] as its transpose. */
ms_status ms_matrix_swapped(ms_tensor *tensor, ms_tensor **out);
/* [..., width] as [rows, width]: a view where the leading dimensions follow each other in memory,
 * else a copy. */
ms_status ms_matrix_flattened(ms_engine *engine, ms_tensor *tensor, ms_tensor **out);
/* The dtype that a product of operands of this dtype computes in: see ms_engine_set_autocast. */
ms_dtype ms_product_dtype(ms_engine *engine, ms_dtype dtype);

#endif
