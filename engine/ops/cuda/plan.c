/* plan.c: plans of products: made at the first product of a shape, kept as long as the engine.
 *
 * The first candidate of the library's own estimate is taken, unless there is a choice (tune.c).
 * Both depend on the key of the plan only (ms_product_key), so a run repeats its bits.
 *
 * f32 is multiplied as it is, unless the engine's option `tf32` is set; then it is rounded to TF32.
 * This is a part of the key, so a choice for one of the two is not taken for the other.
 *
 * The library is asked to add the bias and to make the extra of a linear layer (ms_gemm_extra,
 * whose conditions are in ops/linear.c). NVIDIA's names of the extras are GELU_AUX, BGRADA, BGRADB
 * and DGELU. Where the library has no candidate for all of this, it is asked for less, and kernels
 * do the rest (matmul.c). The library wants `beside` aligned to 16 bytes; otherwise it is not asked
 * for the extra.
 *
 * Codes (fp8.h) are multiplied with both operands along k in memory, which is the only way that the
 * library has, and with sums in f32 all along: its fast ones, which keep fewer bits, are off unless
 * they are asked for.
 *
 * Collectives of other streams keep multiprocessors from a product (ms_stream_taken). A product
 * that is enqueued after such a call, on a stream that is not after it, is planned for the rest of
 * the GPU. That follows from the order of the host's calls. A plan for another part of the GPU may
 * give other bits. So where measured times decide when gathers are enqueued (the prefetch planner
 * `tuned`), they decide about bits, too. */
#include <string.h>

#include "exec/state.h"
#include "exec/stream.h"
#include "ops/cuda/matmul.h"

static ms_status fail(ms_engine *engine, const ms_products *products, ms_lt_result result,
                      const ms_gemm_shape *s)
{
    return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                          "cuBLASLt has no product [%lld, %lld] x [%lld, %lld] of %s: %s",
                          (long long)s->m, (long long)s->k, (long long)s->k, (long long)s->n,
                          s->in == MS_U8 ? "fp8" : ms_dtype_name((ms_dtype)s->in),
                          result ? products->lt.explain(result) : "no algorithm fits");
}

/* ------------------------------------------------------------------ one plan */

static int type_of(uint8_t dtype)
{
    return dtype == MS_F32 ? MS_LT_F32 : dtype == MS_F16 ? MS_LT_F16 : MS_LT_BF16;
}

/* Of an operand, whose codes are E5M2 if `e5m2` says so. */
static int operand_type(const ms_gemm_shape *s, uint8_t e5m2)
{
    if (s->in != MS_U8) return type_of(s->in);
    return s->e5m2 & e5m2 ? MS_LT_E5M2 : MS_LT_E4M3;
}

/* A matrix of ours as the library sees it: its rows are our columns. */
static ms_lt_result make_layout(const ms_products *products, const ms_product_key *key, int type,
                                int64_t rows, int64_t columns, int64_t row, int64_t batch,
                                ms_lt_layout *out)
{
    const ms_cublaslt *lt = &products->lt;
    int32_t batches = (int32_t)key->batches;
    ms_lt_result result = lt->layout_create(out, type, (uint64_t)columns, (uint64_t)rows, row);
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
        make_layout(products, key, operand_type(s, MS_GEMM_E5M2_A), s->a_transposed ? s->k : s->m,
                    s->a_transposed ? s->m : s->k, s->a_row, key->a_batch, &plan->a);
    if (!result)
        result = make_layout(products, key, operand_type(s, MS_GEMM_E5M2_B),
                             s->b_transposed ? s->n : s->k, s->b_transposed ? s->k : s->n, s->b_row,
                             key->b_batch, &plan->b);
    if (!result)
        result = make_layout(products, key, type_of(s->out), s->m, s->n, s->c_row, key->c_batch,
                             &plan->c);
    return result;
}

/* The library's first operand is our b. */
static ms_lt_result make_operation(const ms_products *products, ms_product_plan *plan)
{
    const ms_cublaslt *lt = &products->lt;
    const ms_gemm_shape *s = &plan->key.shape;
    int32_t first = s->b_transposed ? MS_LT_TRANSPOSED : MS_LT_NOT_TRANSPOSED,
            second = s->a_transposed ? MS_LT_TRANSPOSED : MS_LT_NOT_TRANSPOSED;
    int compute = plan->key.tf32 ? MS_LT_COMPUTE_TF32 : MS_LT_COMPUTE_F32;
    ms_lt_result result = lt->operation_create(&plan->operation, compute, MS_LT_F32);
    if (!result)
        result = lt->operation_set(plan->operation, MS_LT_TRANSPOSE_A, &first, sizeof first);
    if (!result)
        result = lt->operation_set(plan->operation, MS_LT_TRANSPOSE_B, &second, sizeof second);
    if (!result && plan->key.multiprocessors)
        result = lt->operation_set(plan->operation, MS_LT_MULTIPROCESSORS,
                                   &plan->key.multiprocessors, sizeof(int32_t));
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

ms_product_places ms_product_no_places(void)
{
    const void *aligned = (const void *)(uintptr_t)MS_LT_ALIGNMENT;
    return (ms_product_places){ aligned, aligned, aligned, aligned };
}

ms_lt_result ms_product_aim(const ms_products *products, const ms_product_plan *plan,
                            ms_product_places places)
{
    const ms_cublaslt *lt = &products->lt;
    uint8_t extra = plan->makes_extra ? plan->key.shape.extra : MS_GEMM_PLAIN;
    bool sums = extra == MS_GEMM_SUM_A || extra == MS_GEMM_SUM_B,
         has_gelu = extra == MS_GEMM_GELU || extra == MS_GEMM_GELU_GRADIENT;
    ms_lt_result result = 0;
    if (plan->adds_bias || sums)
        result = lt->operation_set(plan->operation, MS_LT_BIAS_POINTER, &places.bias,
                                   sizeof places.bias);
    if (!result && has_gelu)
        result = lt->operation_set(plan->operation, MS_LT_BESIDE_POINTER, &places.beside,
                                   sizeof places.beside);
    if (result || plan->key.shape.in != MS_U8) return result;
    result =
        lt->operation_set(plan->operation, MS_LT_SCALE_A, &places.b_scale, sizeof places.b_scale);
    if (!result)
        result = lt->operation_set(plan->operation, MS_LT_SCALE_B, &places.a_scale,
                                   sizeof places.a_scale);
    return result;
}

ms_lt_result ms_product_candidates(const ms_products *products, const ms_product_plan *plan,
                                   int wanted, ms_lt_candidate *out, int *count)
{
    const ms_cublaslt *lt = &products->lt;
    ms_lt_preference preference = NULL;
    *count = 0;
    ms_lt_result result = ms_product_aim(products, plan, ms_product_no_places());
    if (!result) result = lt->preference_create(&preference);
    if (result) return result;
    result = set_preference(products, &plan->key, preference);
    if (!result)
        result = lt->candidates(products->handle, plan->operation, plan->b, plan->a, plan->c,
                                plan->c, preference, wanted, out, count);
    (void)lt->preference_destroy(preference);
    return result;
}

ms_status ms_product_way_of(ms_engine *engine, ms_product_plan *plan,
                            const ms_lt_algorithm *algorithm, size_t workspace_bytes,
                            const ms_product_way **out)
{
    void *memory = NULL;
    ms_product_way **at = &plan->ways;
    while (*at && memcmp(&(*at)->algorithm, algorithm, sizeof *algorithm) != 0) at = &(*at)->next;
    if (!*at) {
        ms_status status = ms_allocate(ms_engine_context(engine), sizeof(ms_product_way),
                                       "way of a product", &memory);
        if (status) return status;
        *at = memory;
        (*at)->algorithm = *algorithm;
        (*at)->workspace_bytes = workspace_bytes;
    }
    *out = *at;
    return MS_OK;
}

static void free_plan(ms_engine *engine, const ms_products *products, ms_product_plan *plan)
{
    const ms_cublaslt *lt = &products->lt;
    if (plan->operation) (void)lt->operation_destroy(plan->operation);
    if (plan->a) (void)lt->layout_destroy(plan->a);
    if (plan->b) (void)lt->layout_destroy(plan->b);
    if (plan->c) (void)lt->layout_destroy(plan->c);
    for (ms_product_way *way = plan->ways, *next; way; way = next) {
        next = way->next;
        ms_release(ms_engine_context(engine), way);
    }
    ms_release(ms_engine_context(engine), plan);
}

/* The library's operands are exchanged: its B is our a. */
static uint32_t epilogue_of(const ms_product_plan *plan)
{
    uint32_t bias = plan->adds_bias ? MS_LT_EPILOGUE_BIAS : 0;
    uint8_t extra = plan->makes_extra ? plan->key.shape.extra : MS_GEMM_PLAIN;
    if (extra == MS_GEMM_GELU) return MS_LT_EPILOGUE_GELU | bias;
    if (extra == MS_GEMM_GELU_GRADIENT) return MS_LT_EPILOGUE_GELU_GRADIENT;
    if (extra == MS_GEMM_SUM_A) return MS_LT_EPILOGUE_SUM_B;
    if (extra == MS_GEMM_SUM_B) return MS_LT_EPILOGUE_SUM_A;
    return bias ? bias : MS_LT_EPILOGUE_NONE;
}

static ms_lt_result set_epilogue(const ms_products *products, ms_product_plan *plan)
{
    const ms_cublaslt *lt = &products->lt;
    uint32_t epilogue = epilogue_of(plan);
    int64_t column = plan->key.shape.n;
    ms_lt_result result =
        lt->operation_set(plan->operation, MS_LT_EPILOGUE, &epilogue, sizeof epilogue);
    if (!result && (epilogue & MS_LT_BESIDE))
        result = lt->operation_set(plan->operation, MS_LT_BESIDE_COLUMN, &column, sizeof column);
    return result;
}

/* What the library has no candidate for is left to kernels, one thing after another. */
static bool asks_for_less(ms_product_plan *plan)
{
    bool *wish = plan->makes_extra ? &plan->makes_extra : &plan->adds_bias;
    bool had = *wish;
    *wish = false;
    return had;
}

/* The library's first candidate becomes the plan's first way. Where the library has none that adds
 * the bias, it gets a product that adds to what c holds. */
static ms_status choose_first(ms_engine *engine, const ms_products *products, ms_product_plan *plan)
{
    ms_lt_candidate found = { .workspace_bytes = 0 };
    int count = 0;
    bool is_found = false;
    plan->adds_bias = plan->key.shape.bias;
    plan->makes_extra = plan->key.shape.extra != MS_GEMM_PLAIN;
    ms_lt_result result = make_layouts(products, plan);
    if (!result) result = make_operation(products, plan);
    while (!result && !is_found) {
        result = set_epilogue(products, plan);
        if (!result) result = ms_product_candidates(products, plan, 1, &found, &count);
        is_found = !result && count > 0 && !found.state;
        if (is_found || !asks_for_less(plan)) break;
        result = 0;
    }
    if (!is_found) return fail(engine, products, result, &plan->key.shape);
    return ms_product_way_of(engine, plan, &found.algorithm, found.workspace_bytes, &plan->way);
}

static ms_status make_plan(ms_engine *engine, ms_products *products, const ms_product_key *key,
                           ms_product_plan **out)
{
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(engine), sizeof(ms_product_plan), "plan", &memory);
    if (status) return status;
    ms_product_plan *plan = memory;
    plan->key = *key;
    status = choose_first(engine, products, plan);
    if (!status) status = ms_product_follow_choice(engine, products, plan);
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

static ms_status ask_gpu(ms_engine *engine, ms_products *products)
{
    ms_gpu gpu;
    ms_error error;
    if (!ms_cuda_describe_gpu(ms_engine_context(engine)->os, engine->options.device_index, &gpu,
                              &error))
        return ms_engine_fail(engine, MS_ERROR_IO, "%s", error.message);
    products->multiprocessors = gpu.multiprocessors;
    products->capability = gpu.major * 10 + gpu.minor;
    return MS_OK;
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
    status = ms_cublaslt_load(ms_engine_context(engine), &products->lt);
    if (!status) status = ask_gpu(engine, products);
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

/* Of an address (NULL: as of any) and of what is added to it: the largest power of two up to 16
 * bytes. */
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

#define CAPABILITY_OF_FP8 89

/* How many multiprocessors a product of this stream may count on beside the collectives of other
 * streams: half of them at least; 0: all. */
static uint32_t multiprocessors_for(const ms_products *products, const ms_stream *stream)
{
    uint32_t all = products->multiprocessors, taken = ms_stream_taken(stream);
    if (taken == 0) return 0;
    return taken < all / 2 ? all - taken : (all + 1) / 2;
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
    uint32_t beside = alignment(args->beside, 0, 0, 0, out);
    if (beside < MS_LT_ALIGNMENT) key->shape.extra = MS_GEMM_PLAIN;
    /* Without the library's gelu the product goes to `beside`. */
    if (args->shape.extra == MS_GEMM_GELU && beside < key->align_c) key->align_c = beside;
}

ms_status ms_cuda_plan_matmul(ms_engine *engine, ms_matmul_args *args)
{
    ms_products *products = NULL;
    ms_product_key key;
    ms_status status = ms_products_of(engine, &products);
    if (status) return status;
    args->library = products;
    if (args->shape.in == MS_U8 && products->capability < CAPABILITY_OF_FP8)
        return ms_engine_fail(
            engine, MS_ERROR_UNSUPPORTED,
            "this GPU has compute capability %u.%u, and products in fp8 need 8.9: "
            "give emulate = true with dtype \"fp8\", or use bf16",
            products->capability / 10, products->capability % 10);
    if (args->shape.k == 0) return MS_OK;
    void **place = NULL;
    describe(args, &key);
    key.multiprocessors = multiprocessors_for(products, ms_engine_current(engine));
    key.tf32 = engine->options.tf32 && key.shape.in == MS_F32;
    status = ms_plan_table_find(engine, &products->plans, &key, &place);
    if (status) return status;
    if (!*place) {
        ms_product_plan *plan = NULL;
        status = make_plan(engine, products, &key, &plan);
        if (status) return status;
        ms_plan_table_add(&products->plans, place, plan);
    }
    const ms_product_plan *plan = *place;
    args->plan = plan;
    args->last_plan = plan->way;
    return MS_OK;
}
