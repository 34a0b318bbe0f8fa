/* matmul.c: the task of products: calls of cuBLASLt, one for all batches that are in one stride. */
#include "ops/cuda/matmul.h"

#include "ops/cuda/kernels.h"
#include "ops/cuda/linear.h"

MS_CUDA_IMAGE(matmul)
MS_CUDA_KERNEL(matmul, matmul_empty)
MS_CUDA_KERNEL(matmul, matmul_bias)

/* Whether the library makes the product's extra. */
static bool makes(const ms_matmul_args *args, ms_gemm_extra extra)
{
    const ms_product_plan *plan = args->plan;
    return args->shape.extra == extra && plan && plan->makes_extra;
}

/* Where the product goes. */
static char *target_of(const ms_matmul_args *args)
{
    bool is_before = args->shape.extra == MS_GEMM_GELU && !makes(args, MS_GEMM_GELU);
    return is_before ? args->beside : args->c;
}

/* One call's addresses. */
typedef struct operands {
    const char *a, *b;
    char *c;
} operands;

/* The part of the batches with number `index`: all dimensions but the last, which a call covers. */
static operands operands_of(const ms_matmul_args *args, int64_t index)
{
    size_t in = ms_dtype_bytes((ms_dtype)args->shape.in),
           out = ms_dtype_bytes((ms_dtype)args->shape.out);
    int64_t a = 0, b = 0, c = 0;
    for (uint32_t d = args->batch_dims; d-- > 0;) {
        if (d + 1 == args->batch_dims) continue;
        int64_t at = index % args->batch_shape[d];
        index /= args->batch_shape[d];
        a += at * args->a_batch[d];
        b += at * args->b_batch[d];
        c += at * args->c_batch[d];
    }
    operands at = { .a = (const char *)args->a + (size_t)a * in,
                    .b = (const char *)args->b + (size_t)b * in,
                    .c = target_of(args) + (size_t)c * out };
    return at;
}

/* Rows of c become the bias, or 0. */
static void fill_rows(ms_cuda_work *work, const ms_matmul_args *args, const operands *at)
{
    ms_gemm_shape s = ms_cuda_whole_product(args);
    uint32_t last = args->batch_dims - 1;
    ms_cuda_bias_call call = { .c = at->c,
                               .bias = args->bias,
                               .rows = s.m,
                               .width = s.n,
                               .row = s.c_row,
                               .batches = args->batch_dims ? args->batch_shape[last] : 1,
                               .batch = args->batch_dims ? args->c_batch[last] : 0,
                               .dtype = s.out };
    if (s.accumulate) return;
    ms_cuda_launch(work, &matmul_empty, ms_cuda_grid(s.m * s.n * call.batches, 1), &call,
                   sizeof call);
}

/* The library expects the bias to be aligned. `room` is scratch memory for one that is not. */
static const void *bias_for(ms_cuda_work *work, const ms_matmul_args *args, void *room)
{
    if (ms_cuda_is_aligned(args->bias)) return args->bias;
    ms_cuda_copy_bias_call call = { .to = room,
                                    .from = args->bias,
                                    .count = ms_cuda_whole_product(args).n,
                                    .dtype = args->shape.out };
    ms_cuda_launch(work, &matmul_bias, ms_cuda_grid(call.count, 1), &call, sizeof call);
    return room;
}

static ms_lt_result multiply(ms_cuda_work *work, const ms_matmul_args *args, const operands *at,
                             void *workspace)
{
    const ms_products *products = args->library;
    const ms_product_plan *plan = args->plan;
    const ms_product_way *way = args->last_plan;
    float one = 1, add = args->shape.accumulate || (args->bias && !plan->adds_bias) ? 1 : 0;
    if (args->bias && !plan->adds_bias) fill_rows(work, args, at);
    return products->lt.multiply(products->handle, plan->operation, &one, at->b, plan->b, at->a,
                                 plan->a, &add, at->c, plan->c, at->c, plan->c, &way->algorithm,
                                 workspace, way->workspace_bytes, ms_cuda_work_stream(work));
}

/* What the library does not make with the product: kernels make it from the product or from an
 * operand, or of the product in place. */
static void make_extra(ms_cuda_work *work, const ms_matmul_args *args)
{
    ms_gemm_shape s = ms_cuda_whole_product(args);
    bool of_a = s.extra == MS_GEMM_SUM_A;
    ms_activation_args gelu = {
        .before = args->beside, .y = args->c, .count = s.m * s.n, .dtype = s.out
    };
    /* A matrix [k, width]: a is read as its transpose, and one that is not stored so is a column or
     * a row. */
    int64_t row = of_a ? (s.a_transposed ? s.a_row : 1) : (s.b_transposed ? 1 : s.b_row);
    ms_linear_gradient_args through = { .g = args->c,
                                        .before = args->beside,
                                        .out = args->c,
                                        .rows = s.m,
                                        .width = s.n,
                                        .g_row = s.c_row,
                                        .dtype = s.out };
    ms_linear_gradient_args sums = { .g = of_a ? args->a : args->b,
                                     .bias = args->beside,
                                     .rows = s.k,
                                     .width = of_a ? s.m : s.n,
                                     .g_row = row,
                                     .dtype = s.in,
                                     .bias_dtype = s.out };
    if (s.extra == MS_GEMM_GELU) ms_cuda_run_activation(work, &gelu);
    else if (s.extra == MS_GEMM_GELU_GRADIENT) ms_cuda_run_linear_gradient(work, &through);
    else ms_cuda_run_linear_gradient(work, &sums);
}

/* The library's sums go where they belong, its bias comes from the arguments or from scratch. */
static ms_lt_result aim(ms_cuda_work *work, const ms_matmul_args *args, char *scratch)
{
    const ms_product_plan *plan = args->plan;
    ms_product_places places = { .bias = args->beside,
                                 .beside = args->beside,
                                 .a_scale = args->a_scale,
                                 .b_scale = args->b_scale };
    if (plan->adds_bias) places.bias = bias_for(work, args, scratch + MS_CUDA_WORKSPACE);
    return ms_product_aim(args->library, plan, places);
}

static void run(ms_cuda_work *work, const void *arguments)
{
    const ms_matmul_args *args = arguments;
    const ms_products *products = args->library;
    const ms_product_plan *plan = args->plan;
    const ms_product_way *way = args->last_plan;
    int64_t calls =
        args->batches / (args->batch_dims ? args->batch_shape[args->batch_dims - 1] : 1);
    ms_lt_result result = 0;
    char *scratch = NULL;
    if (plan) {
        size_t bias = plan->adds_bias ? (size_t)plan->key.shape.n * sizeof(float) : 0;
        if (bias || way->workspace_bytes) scratch = ms_cuda_scratch(work, MS_CUDA_WORKSPACE + bias);
        if (!scratch && (bias || way->workspace_bytes)) return;
        result = aim(work, args, scratch);
    }
    for (int64_t i = 0; i < calls && !result; i++) {
        operands at = operands_of(args, i);
        if (plan) result = multiply(work, args, &at, scratch);
        else fill_rows(work, args, &at);
    }
    if (result)
        ms_cuda_work_fail(work, MS_ERROR_TASK, "matmul: cuBLASLt: %s",
                          products->lt.explain(result));
    else if (args->beside && !makes(args, args->shape.extra)) make_extra(work, args);
}

MS_CUDA_TASK_OF_LIBRARY(matmul, "matmul", ms_matmul_args, MS_KIND_COMPUTE, run, NULL)
