/* tune.c: which algorithms products use: choices that were made before, and measuring.
 *
 * Timing depends on the machine's state, so one rank times and all ranks get its choices; the bits
 * of a run depend on the choices, and on nothing else that was measured.
 *
 * A choice has the whole key of its plan as text (write_key). lua/moonshard/train/tune.lua decides
 * when products are timed, and keeps the choices in a file, by GPU and version of the library
 * (ms_products_place). A checkpoint has the choices with which it was trained, and a run that
 * continues it uses these. A choice that the library refuses is replaced by its first candidate. */
#include <stdio.h>
#include <string.h>

#include "exec/cuda/task.h"
#include "exec/engine.h"
#include "exec/state.h"
#include "ops/cuda/matmul.h"

bool ms_cuda_describe_gpu(const ms_os *os, uint32_t number, ms_gpu *out, ms_error *error)
{
    enum { MOST = 64 };
    ms_gpu gpus[MOST];
    uint32_t count = 0, driver = 0;
    memset(error, 0, sizeof *error);
    if (ms_gpus(os, gpus, MOST, &count, &driver, error)) return false;
    if (number >= count || number >= MOST) {
        snprintf(error->message, sizeof error->message, "there is no GPU %u", number);
        return false;
    }
    *out = gpus[number];
    return true;
}

bool ms_products_place(const ms_os *os, uint32_t gpu, char *text, size_t bytes)
{
    ms_gpu found;
    ms_error error;
    ms_context context;
    ms_cublaslt lt;
    if (!os) os = ms_os_posix();
    ms_context_init(&context, os);
    if (!ms_cuda_describe_gpu(os, gpu, &found, &error)) return false;
    if (ms_cublaslt_load(&context, &lt)) return false;
    snprintf(text, bytes, "%s, %u multiprocessors, cuBLASLt %zu", found.name, found.multiprocessors,
             lt.version());
    return true;
}

/* --------------------------------------------------------------------- choices */

static void write_key(const ms_product_key *key, char text[MS_PRODUCT_KEY_BYTES])
{
    static const char *const extras[] = { "", " gelu", " sum of a", " sum of b", " gelu gradient" };
    static const char *const codes[] = { "e4m3 e4m3", "e5m2 e4m3", "e4m3 e5m2" };
    const ms_gemm_shape *s = &key->shape;
    const char *in = s->in == MS_U8 ? codes[s->e5m2] : ms_dtype_name((ms_dtype)s->in);
    char limit[40] = "";
    if (key->multiprocessors)
        snprintf(limit, sizeof limit, ", on %u multiprocessors", key->multiprocessors);
    memset(text, 0, MS_PRODUCT_KEY_BYTES);
    snprintf(text, MS_PRODUCT_KEY_BYTES,
             "%lldx%lldx%lld %s to %s, rows %lld%s %lld%s %lld%s%s%s, "
             "batches %lld by %lld %lld %lld, aligned %u %u %u%s%s",
             (long long)s->m, (long long)s->n, (long long)s->k, in, ms_dtype_name((ms_dtype)s->out),
             (long long)s->a_row, s->a_transposed ? "t" : "", (long long)s->b_row,
             s->b_transposed ? "t" : "", (long long)s->c_row, s->bias ? " bias" : "",
             s->accumulate ? " added" : "", extras[s->extra], (long long)key->batches,
             (long long)key->a_batch, (long long)key->b_batch, (long long)key->c_batch,
             key->align_a, key->align_b, key->align_c, limit, key->tf32 ? ", tf32" : "");
}

/* Whether the library takes the algorithm for this product, within our workspace and with sums in a
 * fixed order. */
static bool is_accepted(const ms_products *products, const ms_product_plan *plan,
                        const ms_lt_algorithm *algorithm, size_t *workspace_bytes)
{
    const ms_cublaslt *lt = &products->lt;
    ms_lt_candidate found = { .workspace_bytes = 0 };
    uint32_t reduction = 0;
    size_t written = 0;
    if (ms_product_aim(products, plan, ms_product_no_places())
        || lt->algorithm_get(algorithm, MS_LT_REDUCTION_OF_ALGORITHM, &reduction, sizeof reduction,
                             &written)
        || reduction == MS_LT_REDUCTION_IN_PLACE)
        return false;
    if (lt->check(products->handle, plan->operation, plan->b, plan->a, plan->c, plan->c, algorithm,
                  &found)
        || found.state || found.workspace_bytes > MS_CUDA_WORKSPACE)
        return false;
    *workspace_bytes = found.workspace_bytes;
    return true;
}

static void tell_refused(ms_engine *engine, ms_products *products, const char *key)
{
    if (products->is_quiet) return;
    products->is_quiet = true;
    ms_log(
        ms_engine_context(engine), MS_LOG_WARN,
        "cuBLASLt refuses what was chosen for the product %s, perhaps for others, too: its first "
        "candidate is used",
        key);
}

ms_status ms_product_follow_choice(ms_engine *engine, ms_products *products, ms_product_plan *plan)
{
    char key[MS_PRODUCT_KEY_BYTES];
    void **place = NULL;
    ms_lt_algorithm algorithm;
    size_t bytes = 0;
    write_key(&plan->key, key);
    ms_status status = ms_plan_table_find(engine, &products->choices, key, &place);
    if (status) return status;
    const ms_product_choice *choice = *place;
    plan->way = plan->ways;
    plan->is_settled = choice != NULL;
    if (!choice) return MS_OK;
    memcpy(&algorithm, choice->algorithm, sizeof algorithm);
    if (is_accepted(products, plan, &algorithm, &bytes))
        return ms_product_way_of(engine, plan, &algorithm, bytes, &plan->way);
    tell_refused(engine, products, key);
    return MS_OK;
}

static ms_status add_choice(ms_engine *engine, ms_products *products,
                            const ms_product_choice *choice)
{
    void **place = NULL, *memory = NULL;
    ms_status status = ms_plan_table_find(engine, &products->choices, choice->key, &place);
    if (status) return status;
    if (!*place) {
        status =
            ms_allocate(ms_engine_context(engine), sizeof *choice, "choice of a product", &memory);
        if (status) return status;
        ms_plan_table_add(&products->choices, place, memory);
    }
    memcpy(*place, choice, sizeof *choice);
    return MS_OK;
}

/* Whether the engine's products are those of this folder. */
static bool has_products(const ms_engine *engine)
{
    return strcmp(ms_engine_device_of(engine)->kernels, "cuda") == 0;
}

/* NULL: there are none, and none are to be made. */
static ms_products *products_there_are(ms_engine *engine)
{
    return has_products(engine) ? ms_engine_get(engine, MS_SLOT_PLANS) : NULL;
}

ms_status ms_products_use(ms_engine *engine, const ms_product_choice *choices, size_t count,
                          bool quiet)
{
    ms_products *products = products_there_are(engine);
    if (!has_products(engine) || (!products && !count)) return MS_OK;
    ms_status status = ms_products_of(engine, &products);
    if (status) return status;
    ms_plan_table *table = &products->choices;
    for (size_t i = 0; i < table->capacity; i++) {
        ms_release(ms_engine_context(engine), table->plans[i]);
        table->plans[i] = NULL;
    }
    table->count = 0;
    products->is_quiet = quiet;
    for (size_t i = 0; i < count && !status; i++)
        status = add_choice(engine, products, &choices[i]);
    for (size_t i = 0; i < products->plans.capacity && !status; i++)
        if (products->plans.plans[i])
            status = ms_product_follow_choice(engine, products, products->plans.plans[i]);
    return status;
}

/* ---------------------------------------------------------------------- timing */

enum { CANDIDATES = 8, ROUNDS = 3 };
/* A round of a candidate takes so many microseconds, if that is not more calls than MOST_CALLS. */
#define ROUND_US 1000.0
#define MOST_CALLS 20
/* Every byte of the operands: 0.01 in f32 and bf16, 1.06 in f16. */
#define FILL 0x3c

/* One plan's product on memory of its own. */
typedef struct timing {
    const ms_products *products;
    const ms_product_plan *plan;
    const ms_lt_candidate *candidate;
    size_t workspace_bytes;
    char *a, *b, *c, *beside, *bias, *workspace;
} timing;

/* Bytes that a matrix and those after it in the batch are in, rounded up. */
static size_t bytes_of(const ms_product_key *key, int64_t rows, int64_t columns, int64_t row,
                       int64_t batch, uint8_t dtype)
{
    int64_t elements = (key->batches - 1) * batch + (rows - 1) * row + columns;
    return ((size_t)elements * ms_dtype_bytes((ms_dtype)dtype) + 255) / 256 * 256;
}

/* Returns how many bytes the operands take. If `base` is not NULL, it also sets their addresses,
 * one after the other from `base` on. */
static size_t lay_out(timing *t, char *base)
{
    const ms_product_key *key = &t->plan->key;
    const ms_gemm_shape *s = &key->shape;
    size_t a = bytes_of(key, s->a_transposed ? s->k : s->m, s->a_transposed ? s->m : s->k, s->a_row,
                        key->a_batch, s->in),
           b = bytes_of(key, s->b_transposed ? s->n : s->k, s->b_transposed ? s->k : s->n, s->b_row,
                        key->b_batch, s->in),
           c = bytes_of(key, s->m, s->n, s->c_row, key->c_batch, s->out),
           beside = s->extra == MS_GEMM_GELU || s->extra == MS_GEMM_GELU_GRADIENT ? c : 0,
           bias = ((size_t)(s->m > s->n ? s->m : s->n) * sizeof(float) + 255) / 256 * 256;
    if (base) {
        t->a = base;
        t->b = t->a + a;
        t->c = t->b + b;
        t->beside = t->c + c;
        t->bias = t->beside + beside;
        t->workspace = t->bias + bias;
    }
    return a + b + c + beside + bias + t->workspace_bytes;
}

static bool call_once(void *user, struct CUstream_st *stream)
{
    const timing *t = user;
    const ms_product_plan *plan = t->plan;
    const ms_gemm_shape *s = &plan->key.shape;
    float one = 1, add = s->accumulate || (s->bias && !plan->adds_bias) ? 1 : 0;
    return t->products->lt.multiply(t->products->handle, plan->operation, &one, t->b, plan->b, t->a,
                                    plan->a, &add, t->c, plan->c, t->c, plan->c,
                                    &t->candidate->algorithm, t->workspace,
                                    t->candidate->workspace_bytes, stream)
           == 0;
}

/* The candidates that fit into our workspace, which stay in order; how many they are. */
static int keep_usable(timing *t, ms_lt_candidate *candidates, int count)
{
    int kept = 0;
    for (int i = 0; i < count; i++) {
        const ms_lt_candidate *one = &candidates[i];
        if (one->state || one->workspace_bytes > MS_CUDA_WORKSPACE) continue;
        if (one->workspace_bytes > t->workspace_bytes) t->workspace_bytes = one->workspace_bytes;
        candidates[kept++] = *one;
    }
    return kept;
}

/* The first call is a warm-up, in which the library loads its code; the second tells how many fill
 * a round. calls 0: the candidate cannot be used. */
static ms_status warm_up(ms_cuda_meter *meter, timing *t, uint32_t *calls)
{
    double us = -1;
    *calls = 0;
    ms_status status = ms_cuda_meter_time(meter, call_once, t, 1, &us);
    if (!status && us >= 0) status = ms_cuda_meter_time(meter, call_once, t, 1, &us);
    if (status || us < 0) return status;
    *calls = us * MOST_CALLS < ROUND_US ? MOST_CALLS
             : us < ROUND_US            ? (uint32_t)(ROUND_US / us)
                                        : 1;
    return MS_OK;
}

/* Candidates take turns, so that a change of the GPU's clock meets them all; what counts is the
 * best round of each. best[i] below 0: it cannot be used. */
static ms_status time_candidates(ms_cuda_meter *meter, timing *t, const ms_lt_candidate *candidates,
                                 int count, double *best)
{
    uint32_t calls[CANDIDATES] = { 0 };
    double us = 0;
    ms_status status = MS_OK;
    for (int i = 0; i < count && !status; i++) {
        t->candidate = &candidates[i];
        best[i] = -1;
        status = warm_up(meter, t, &calls[i]);
    }
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < count && !status; i++) {
            t->candidate = &candidates[i];
            if (!calls[i]) continue;
            status = ms_cuda_meter_time(meter, call_once, t, calls[i], &us);
            if (us < 0) calls[i] = 0;
            if (us < 0 || best[i] < 0 || us < best[i]) best[i] = us;
        }
    return status;
}

static void take_best(const ms_lt_candidate *candidates, int count, const double *best,
                      ms_product_time *out)
{
    int fastest = -1;
    for (int i = 0; i < count; i++)
        if (best[i] >= 0 && (fastest < 0 || best[i] < best[fastest])) fastest = i;
    if (fastest < 0) return;
    out->us = best[fastest];
    out->first_us = best[0];
    memcpy(out->choice.algorithm, &candidates[fastest].algorithm, sizeof out->choice.algorithm);
}

static ms_status time_plan(ms_engine *engine, const ms_products *products, ms_product_plan *plan,
                           ms_product_time *out)
{
    timing t = { .products = products, .plan = plan };
    ms_lt_candidate candidates[CANDIDATES];
    double best[CANDIDATES];
    int count = 0;
    ms_cuda_meter *meter = NULL;
    memset(candidates, 0, sizeof candidates);
    write_key(&plan->key, out->choice.key);
    plan->is_settled = true;
    if (ms_product_candidates(products, plan, CANDIDATES, candidates, &count)) return MS_OK;
    count = keep_usable(&t, candidates, count);
    if (!count) return MS_OK;
    ms_status status = ms_cuda_meter_open(engine, lay_out(&t, NULL), FILL, &meter);
    if (status) return status == MS_ERROR_MEMORY ? MS_OK : status;
    (void)lay_out(&t, ms_cuda_meter_memory(meter));
    /* Any numbers will do as scales. */
    ms_product_places places = {
        .bias = t.bias, .beside = t.beside, .a_scale = t.bias, .b_scale = t.bias
    };
    if (ms_product_aim(products, plan, places)) count = 0;
    status = time_candidates(meter, &t, candidates, count, best);
    ms_cuda_meter_close(meter);
    if (!status) take_best(candidates, count, best, out);
    return status;
}

ms_status ms_products_time(ms_engine *engine, ms_product_time *out)
{
    const ms_products *products = products_there_are(engine);
    *out = (ms_product_time){ .us = -1, .first_us = -1 };
    for (size_t i = 0; products && i < products->plans.capacity; i++) {
        ms_product_plan *plan = products->plans.plans[i];
        if (plan && !plan->is_settled) return time_plan(engine, products, plan, out);
    }
    return MS_OK;
}
