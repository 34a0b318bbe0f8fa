/* matmul.h: matrix products: arguments of the kernel, and the call that other families use. */
#ifndef MOONSHARD_OPS_MATMUL_H
#define MOONSHARD_OPS_MATMUL_H

#include "ops/backend.h"

/* Leading dimensions of the largest tensor; collapsing leaves fewer in most calls. */
#define MS_MATMUL_BATCH_DIMS (MS_DIMS_MAX - 2)

/* What a product makes in the same task, on a GPU (ms_engine_is_for_gpu). A GELU: c =
 * gelu(before), in the tanh form, and beside[m, n] = before: what c is without it, bias included,
 * in c's dtype. A SUM: beside = the sums over k of a's rows (beside[m]) or of b's columns
 * (beside[n]), in c's dtype; without a bias. A GELU_GRADIENT: c = (a b) * gelu'(beside), where
 * beside[m, n] is read and has c's dtype; without a bias. */
typedef enum ms_gemm_extra {
    MS_GEMM_PLAIN,
    MS_GEMM_GELU,
    MS_GEMM_SUM_A,
    MS_GEMM_SUM_B,
    MS_GEMM_GELU_GRADIENT
} ms_gemm_extra;

enum { MS_GEMM_E5M2_A = 1, MS_GEMM_E5M2_B = 2 };

/* c[m, n] = a[m, k] b[k, n], plus what c holds if accumulate, plus bias[n] if bias. A
 * transposed operand is stored as [k, m] or [n, k]; its row is then a row of that. */
typedef struct ms_gemm_shape {
    int64_t m, n, k;
    int64_t a_row, b_row, c_row; /* elements from one stored row to the next */
    bool a_transposed, b_transposed;
    bool accumulate, bias;
    uint8_t in, out; /* ms_dtype of a and b, and of c; MS_U8: codes of fp8.h */
    uint8_t extra;   /* ms_gemm_extra */
    uint8_t e5m2;    /* of codes: MS_GEMM_E5M2_A or _B, whose are E5M2; those of the other, E4M3 */
} ms_gemm_shape;

/* Task arguments: c = a b (+ bias) for every batch. The work is cut into groups of batches times
 * parts of rows (or of columns). */
typedef struct ms_matmul_args {
    const void *a, *b;
    const void *bias;               /* f32, or for a GPU of c's dtype; or NULL */
    const float *a_scale, *b_scale; /* of codes: what their numbers count for; else NULL */
    void *c, *beside;               /* see ms_gemm_extra */
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

/* The same for matrices, with `beside` (contiguous): see ms_gemm_extra. For a GELU and its
 * gradient, n is a multiple of MS_GELU_COLUMNS and out is contiguous. For a SUM, k is not 0, and
 * the elements of the operand that is summed follow each other in memory for each k. */
#define MS_GELU_COLUMNS 8
ms_status ms_matmul_extra_into(ms_engine *engine, ms_tensor *a, ms_tensor *b, ms_tensor *bias,
                               ms_gemm_extra extra, ms_tensor *beside, ms_tensor *out);

/* A matrix in codes, on a device for GPUs: u8 [rows, columns], of which those that follow each
 * other in memory are along k; and the payload's ms_fp8_scale. */
typedef struct ms_matmul_codes {
    ms_tensor *codes, *scale;
    bool is_e5m2;
} ms_matmul_codes;
/* The same of what codes represent; at most one of both is E5M2. */
ms_status ms_matmul_codes_into(ms_engine *engine, const ms_matmul_codes *a,
                               const ms_matmul_codes *b, ms_tensor *bias, ms_tensor *out);

/* out += a b for matrices; out is f32. */
ms_status ms_matmul_add_into(ms_engine *engine, ms_tensor *a, ms_tensor *b, ms_tensor *out);

/* [..., rows, columns] as its transpose. */
ms_status ms_matrix_swapped(ms_tensor *tensor, ms_tensor **out);
/* [..., width] as [rows, width]: a view where the leading dimensions follow each other in memory,
 * else a copy. */
ms_status ms_matrix_flattened(ms_engine *engine, ms_tensor *tensor, ms_tensor **out);

#endif
