/* matmul.h: products on a GPU: plans of cuBLASLt, kept by shape.
 *
 * cuBLASLt counts in columns: a matrix of ours, row by row, is the transpose of one of its own. So
 * c = a b is computed as c^T = b^T a^T: its first operand is our b, and its m is our n. */
#ifndef MOONSHARD_OPS_CUDA_MATMUL_H
#define MOONSHARD_OPS_CUDA_MATMUL_H

#include "ops/cuda/cublaslt.h"
#include "ops/cuda/plan_table.h"
#include "ops/matmul.h"

/* Workspace for one product; the library's advice for sm_90. */
#define MS_CUDA_WORKSPACE ((size_t)32 << 20)

/* What a plan depends on. Compared by bytes: no padding, and 0 where nothing is said. A new field
 * goes into its text as well (tune.c). */
typedef struct ms_product_key {
    ms_gemm_shape shape; /* of the whole product */
    int64_t batches, a_batch, b_batch, c_batch;
    uint32_t align_a, align_b, align_c; /* bytes */
    uint32_t multiprocessors;           /* that it may count on; 0: all */
    uint64_t tf32;                      /* 1: f32 is rounded to TF32 */
} ms_product_key;

/* An algorithm of the library, and the workspace that it needs. It does not change and lives as
 * long as its plan: tasks with equal arguments do the same. */
typedef struct ms_product_way {
    struct ms_product_way *next; /* of the plan */
    ms_lt_algorithm algorithm;
    size_t workspace_bytes;
} ms_product_way;

typedef struct ms_product_plan {
    ms_product_key key;
    ms_lt_operation operation;
    ms_lt_layout a, b, c;      /* of our operands */
    ms_product_way *ways;      /* the first: the library's first candidate */
    const ms_product_way *way; /* the one that is used */
    bool is_settled;           /* there is a choice for it, or it has been timed */
    bool adds_bias;            /* the library adds it; else rows of c hold it before the product */
    bool makes_extra;          /* the library makes key.shape.extra; else a kernel does, after it */
} ms_product_plan;

/* The products of an engine (MS_SLOT_PLANS), made at the first one. */
typedef struct ms_products {
    ms_cublaslt lt;
    ms_lt_handle handle;
    uint32_t multiprocessors; /* of the GPU */
    uint32_t capability;      /* of the GPU: 90 for 9.0 */
    ms_plan_table plans;      /* of ms_product_plan */
    ms_plan_table choices;    /* of ms_product_choice */
    bool is_quiet;            /* no warning is due when the library refuses a choice */
} ms_products;

/* plan.c. The library's candidates for a plan, the best ones by its own estimate first; *count says
 * how many there are, at most `wanted`. */
ms_lt_result ms_product_candidates(const ms_products *products, const ms_product_plan *plan,
                                   int wanted, ms_lt_candidate *out, int *count);
/* Where the next products of the plan find the bias or write sums, where `beside` is, and the
 * scales of codes. Before the library is asked, these are addresses that are aligned to
 * MS_LT_ALIGNMENT and no more, since it takes the alignment from them. */
#define MS_LT_ALIGNMENT 16
typedef struct ms_product_places {
    const void *bias, *beside, *a_scale, *b_scale;
} ms_product_places;
ms_lt_result ms_product_aim(const ms_products *products, const ms_product_plan *plan,
                            ms_product_places places);
/* Such addresses, for the library's answers. */
ms_product_places ms_product_no_places(void);
/* The plan's way with this algorithm, made now if there is none. */
ms_status ms_product_way_of(ms_engine *engine, ms_product_plan *plan,
                            const ms_lt_algorithm *algorithm, size_t workspace_bytes,
                            const ms_product_way **out);
/* The engine's products, made now if there are none yet. */
ms_status ms_products_of(ms_engine *engine, ms_products **out);
/* tune.c. The plan follows its choice, if there is one that the library accepts, or its first
 * candidate. */
ms_status ms_product_follow_choice(ms_engine *engine, ms_products *products, ms_product_plan *plan);

/* See ms_backend: args->library becomes the ms_products, args->plan the plan of all batches that
 * one call computes, args->last_plan its ms_product_way. */
ms_status ms_cuda_plan_matmul(ms_engine *engine, ms_matmul_args *args);
/* tune.c. The GPU of that number; false: there is none, or *error says why it cannot be asked. */
bool ms_cuda_describe_gpu(const ms_os *os, uint32_t number, ms_gpu *out, ms_error *error);
/* The rows or columns of a whole product, whose arguments are cut into parts. */
ms_gemm_shape ms_cuda_whole_product(const ms_matmul_args *args);

/* For the kernels of matmul.cu: rows of c get the bias, or 0. */
typedef struct ms_cuda_bias_call {
    void *c;
    const void *bias; /* of c's dtype, or NULL */
    int64_t rows, width, row, batches, batch;
    uint8_t dtype;
} ms_cuda_bias_call;
typedef struct ms_cuda_copy_bias_call {
    void *to;
    const void *from;
    int64_t count;
    uint8_t dtype;
} ms_cuda_copy_bias_call;

#endif
