/* matmul.c: the task of products: calls of cuBLASLt, one for all batches that lie in one stride. */
#include "tensor/cuda/matmul.h"

#include "tensor/cuda/kernels.h"

MS_CUDA_IMAGE(matmul)
MS_CUDA_KERNEL(matmul, matmul_empty)
MS_CUDA_KERNEL(matmul, matmul_bias)

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
                    .c = (char *)args->c + (size_t)c * out };
    return at;
}

static void compute_nothing(ms_cuda_work *work, const ms_matmul_args *args, const operands *at)
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

/* The library takes a bias of the result's dtype. `room` is scratch memory for a bias that has to
 * be converted. */
static const void *bias_for(ms_cuda_work *work, const ms_matmul_args *args, void *room)
{
    if (args->shape.out == MS_F32) return args->bias;
    ms_cuda_narrow_call call = { .to = room,
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
    float one = 1, add = args->shape.accumulate ? 1 : 0;
    return products->lt.multiply(products->handle, plan->operation, &one, at->b, plan->b, at->a,
                                 plan->a, &add, at->c, plan->c, at->c, plan->c,
                                 &plan->way.algorithm, workspace, plan->way.workspace_bytes,
                                 ms_cuda_work_stream(work));
}

static void run(ms_cuda_work *work, const void *arguments)
{
    const ms_matmul_args *args = arguments;
    const ms_products *products = args->library;
    const ms_product_plan *plan = args->plan;
    int64_t calls =
        args->batches / (args->batch_dims ? args->batch_shape[args->batch_dims - 1] : 1);
    ms_lt_result result = 0;
    char *scratch = NULL;
    if (plan) {
        size_t bias = args->bias ? (size_t)plan->key.shape.n * sizeof(float) : 0;
        if (bias || plan->way.workspace_bytes)
            scratch = ms_cuda_scratch(work, MS_CUDA_WORKSPACE + bias);
        if (!scratch && (bias || plan->way.workspace_bytes)) return;
    }
    if (plan && args->bias) {
        const void *bias = bias_for(work, args, scratch + MS_CUDA_WORKSPACE);
        result =
            products->lt.operation_set(plan->operation, MS_LT_BIAS_POINTER, &bias, sizeof bias);
    }
    for (int64_t i = 0; i < calls && !result; i++) {
        operands at = operands_of(args, i);
        if (plan) result = multiply(work, args, &at, scratch);
        else compute_nothing(work, args, &at);
    }
    if (result)
        ms_cuda_work_fail(work, MS_ERROR_TASK, "matmul: cuBLASLt: %s",
                          products->lt.explain(result));
}

MS_CUDA_TASK_OF_LIBRARY(matmul, "matmul", ms_matmul_args, MS_KIND_COMPUTE, run, NULL)
