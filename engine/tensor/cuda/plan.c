/* plan.c: plans of products: made at the first product of a shape, kept as long as the engine.
 *
 * The first candidate of the library's own estimate is taken, unless there is a choice (tune.c).
 * Both depend on shapes, strides and alignment only, so a run repeats its bits. */
#include <string.h>

#include "exec/engine.h"
#include "tensor/cuda/matmul.h"

static ms_status fail(ms_engine *engine, const ms_products *products, ms_lt_result result,
                      const ms_gemm_shape *s)
{
    return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                          "cuBLASLt has no product [%lld, %lld] x [%lld, %lld] of %s: %s",
                          (long long)s->m, (long long)s->k, (long long)s->k, (long long)s->n,
                          ms_dtype_name((ms_dtype)s->in),
                          result ? products->lt.explain(result) : "no algorithm fits");
}

/* ------------------------------------------------------------------ one plan */

static int type_of(uint8_t dtype)
{
    return dtype == MS_F32 ? MS_LT_F32 : dtype == MS_F16 ? MS_LT_F16 : MS_LT_BF16;
}

/* A matrix of ours as the library sees it: its rows are our columns. */
static ms_lt_result make_layout(const ms_products *products, const ms_product_key *key,
                                uint8_t dtype, int64_t rows, int64_t columns, int64_t row,
                                int64_t batch, ms_lt_layout *out)
{
    const ms_cublaslt *lt = &products->lt;
    int32_t batches = (int32_t)key->batches;
    ms_lt_result result =
        lt->layout_create(out, type_of(dtype), (uint64_t)columns, (uint64_t)rows, row);
    if (result || batches == 1) return result;
    result = lt->layout_set(*out, MS_LT_BATCHES, &batches, sizeof batches);
    if (!result) result = lt->layout_set(*out, MS_LT_BATCH_STRIDE, &batch, sizeof batch);
    return result;
}

static ms_lt_result make_layouts(const ms_products *products, ms_product_plan *plan)
{
    const ms_product_key *key = &plan->key;
    const ms_gemm_shape *s = &key->shape;
    ms_lt_result result =
        make_layout(products, key, s->in, s->a_transposed ? s->k : s->m,
                    s->a_transposed ? s->m : s->k, s->a_row, key->a_batch, &plan->a);
    if (!result)
        result = make_layout(products, key, s->in, s->b_transposed ? s->n : s->k,
                             s->b_transposed ? s->k : s->n, s->b_row, key->b_batch, &plan->b);
    if (!result)
        result = make_layout(products, key, s->out, s->m, s->n, s->c_row, key->c_batch, &plan->c);
    return result;
}

/* The library's first operand is our b. */
static ms_lt_result make_operation(const ms_products *products, ms_product_plan *plan)
{
    const ms_cublaslt *lt = &products->lt;
    const ms_gemm_shape *s = &plan->key.shape;
    int32_t first = s->b_transposed ? MS_LT_TRANSPOSED : MS_LT_NOT_TRANSPOSED,
            second = s->a_transposed ? MS_LT_TRANSPOSED : MS_LT_NOT_TRANSPOSED;
    uint32_t epilogue = s->bias ? MS_LT_EPILOGUE_BIAS : MS_LT_EPILOGUE_NONE;
    ms_lt_result result = lt->operation_create(&plan->operation, MS_LT_COMPUTE_F32, MS_LT_F32);
    if (!result)
        result = lt->operation_set(plan->operation, MS_LT_TRANSPOSE_A, &first, sizeof first);
    if (!result)
        result = lt->operation_set(plan->operation, MS_LT_TRANSPOSE_B, &second, sizeof second);
    if (!result)
        result = lt->operation_set(plan->operation, MS_LT_EPILOGUE, &epilogue, sizeof epilogue);
    return result;
}

static ms_lt_result set_preference(const ms_products *products, const ms_product_key *key,
                                   ms_lt_preference preference)
{
    const ms_cublaslt *lt = &products->lt;
    size_t workspace = MS_CUDA_WORKSPACE;
    uint32_t reductions = MS_LT_REDUCTIONS_IN_ORDER;
    const struct {
        int what;
        const void *value;
        size_t bytes;
    } settings[] = { { MS_LT_WORKSPACE_BYTES, &workspace, sizeof workspace },
                     { MS_LT_REDUCTIONS, &reductions, sizeof reductions },
                     { MS_LT_ALIGNMENT_A, &key->align_b, sizeof key->align_b },
                     { MS_LT_ALIGNMENT_B, &key->align_a, sizeof key->align_a },
                     { MS_LT_ALIGNMENT_C, &key->align_c, sizeof key->align_c },
                     { MS_LT_ALIGNMENT_D, &key->align_c, sizeof key->align_c } };
    ms_lt_result result = 0;
    for (size_t i = 0; i < sizeof settings / sizeof *settings && !result; i++)
        result =
            lt->preference_set(preference, settings[i].what, settings[i].value, settings[i].bytes);
    return result;
}

ms_lt_result ms_product_candidates(const ms_products *products, const ms_product_plan *plan,
                                   int wanted, ms_lt_candidate *out, int *count)
{
    const ms_cublaslt *lt = &products->lt;
    ms_lt_preference preference = NULL;
    *count = 0;
    ms_lt_result result = lt->preference_create(&preference);
    if (result) return result;
    result = set_preference(products, &plan->key, preference);
    if (!result)
        result = lt->candidates(products->handle, plan->operation, plan->b, plan->a, plan->c,
                                plan->c, preference, wanted, out, count);
    (void)lt->preference_destroy(preference);
    return result;
}

static ms_lt_result choose(const ms_products *products, ms_product_plan *plan, bool *found)
{
    ms_lt_candidate candidate = { .workspace_bytes = 0 };
    int count = 0;
    ms_lt_result result = ms_product_candidates(products, plan, 1, &candidate, &count);
    *found = !result && count > 0 && !candidate.state;
    if (*found)
        plan->first = plan->way =
            (ms_product_way){ candidate.algorithm, candidate.workspace_bytes };
    return result;
}

static void free_plan(ms_engine *engine, const ms_products *products, ms_product_plan *plan)
{
    const ms_cublaslt *lt = &products->lt;
    if (plan->operation) (void)lt->operation_destroy(plan->operation);
    if (plan->a) (void)lt->layout_destroy(plan->a);
    if (plan->b) (void)lt->layout_destroy(plan->b);
    if (plan->c) (void)lt->layout_destroy(plan->c);
    ms_release(ms_engine_context(engine), plan);
}

static ms_status make_plan(ms_engine *engine, ms_products *products, const ms_product_key *key,
                           ms_product_plan **out)
{
    void *memory = NULL;
    bool found = false;
    ms_status status =
        ms_allocate(ms_engine_context(engine), sizeof(ms_product_plan), "plan", &memory);
    if (status) return status;
    ms_product_plan *plan = memory;
    plan->key = *key;
    ms_lt_result result = make_layouts(products, plan);
    if (!result) result = make_operation(products, plan);
    if (!result) result = choose(products, plan, &found);
    if (result || !found) {
        free_plan(engine, products, plan);
        return fail(engine, products, result, &key->shape);
    }
    status = ms_product_follow_choice(engine, products, plan);
    if (status) free_plan(engine, products, plan);
    else *out = plan;
    return status;
}

/* ----------------------------------------------------------------- all plans */

static void products_free(ms_engine *engine, void *state)
{
    ms_products *products = state;
    for (size_t i = 0; i < products->plans.capacity; i++)
        if (products->plans.plans[i]) free_plan(engine, products, products->plans.plans[i]);
    for (size_t i = 0; i < products->choices.capacity; i++)
        ms_release(ms_engine_context(engine), products->choices.plans[i]);
    ms_release(ms_engine_context(engine), products->plans.plans);
    ms_release(ms_engine_context(engine), products->choices.plans);
    (void)products->lt.destroy(products->handle);
    ms_release(ms_engine_context(engine), products);
}

ms_status ms_products_of(ms_engine *engine, ms_products **out)
{
    void *memory = NULL;
    *out = ms_engine_get(engine, MS_SLOT_PLANS);
    if (*out) return MS_OK;
    ms_status status =
        ms_allocate(ms_engine_context(engine), sizeof(ms_products), "matrix products", &memory);
    if (status) return status;
    ms_products *products = memory;
    products->plans.key_bytes = sizeof(ms_product_key);
    products->choices.key_bytes = MS_PRODUCT_KEY_BYTES;
    status = ms_cublaslt_load(ms_engine_context(engine), &products->lt, NULL, 0);
    ms_lt_result result = status ? 0 : products->lt.create(&products->handle);
    if (result)
        status = ms_engine_fail(engine, MS_ERROR_IO, "cuBLASLt does not start: %s",
                                products->lt.explain(result));
    if (status) {
        ms_release(ms_engine_context(engine), products);
        return status;
    }
    ms_engine_set(engine, MS_SLOT_PLANS, products, products_free);
    *out = products;
    return MS_OK;
}

/* ---------------------------------------------------------------- a product's */

ms_gemm_shape ms_cuda_whole_product(const ms_matmul_args *args)
{
    ms_gemm_shape s = args->shape;
    int64_t before = args->parts - 1;
    if (args->split_columns) s.n = before * s.n + args->last;
    else s.m = before * s.m + args->last;
    return s;
}

/* Of an address and of what is added to it: the largest power of two up to 16 bytes. */
static uint32_t alignment(const void *address, int64_t row, int64_t batch, int64_t last_stride,
                          size_t size)
{
    uint64_t bits = (uintptr_t)address | (uint64_t)row * size | (uint64_t)batch * size
                    | (uint64_t)last_stride * size | 16;
    return (uint32_t)(bits & (~bits + 1));
}

/* The strides of all batch dimensions count for the alignment, as one plan serves every call. */
static int64_t any_stride(const ms_matmul_args *args, const int64_t *strides)
{
    int64_t bits = 0;
    for (uint32_t d = 0; d < args->batch_dims; d++) bits |= strides[d];
    return bits;
}

static void describe(const ms_matmul_args *args, ms_product_key *key)
{
    memset(key, 0, sizeof *key);
    key->shape = ms_cuda_whole_product(args);
    key->batches = 1;
    if (args->batch_dims > 0) {
        uint32_t last = args->batch_dims - 1;
        key->batches = args->batch_shape[last];
        key->a_batch = args->a_batch[last];
        key->b_batch = args->b_batch[last];
        key->c_batch = args->c_batch[last];
    }
    size_t in = ms_dtype_bytes((ms_dtype)args->shape.in),
           out = ms_dtype_bytes((ms_dtype)args->shape.out);
    key->align_a =
        alignment(args->a, key->shape.a_row, key->a_batch, any_stride(args, args->a_batch), in);
    key->align_b =
        alignment(args->b, key->shape.b_row, key->b_batch, any_stride(args, args->b_batch), in);
    key->align_c =
        alignment(args->c, key->shape.c_row, key->c_batch, any_stride(args, args->c_batch), out);
}

ms_status ms_cuda_plan_matmul(ms_engine *engine, ms_matmul_args *args)
{
    ms_products *products = NULL;
    ms_product_key key;
    ms_status status = ms_products_of(engine, &products);
    if (status) return status;
    args->library = products;
    if (args->shape.k == 0) return MS_OK;
    void **place = NULL;
    describe(args, &key);
    status = ms_plan_table_find(engine, &products->plans, &key, &place);
    if (status) return status;
    if (!*place) {
        ms_product_plan *plan = NULL;
        status = make_plan(engine, products, &key, &plan);
        if (status) return status;
        ms_plan_table_add(&products->plans, place, plan);
    }
    args->plan = *place;
    return MS_OK;
}
