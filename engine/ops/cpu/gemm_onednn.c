/* gemm_onednn.c: matrix products by oneDNN. The only file that knows it, and the difference between
 * its versions 2 and 3. */
#include "ops/cpu/gemm.h"

#include "exec/engine.h"
#include "tensor/state.h"

#if defined(MS_WITH_ONEDNN)

#include <dlfcn.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <string.h>

/* --------------------------------------------- what differs between 2 and 3 */

/* A description of memory: a struct in version 2, an object in version 3. Zeroed, it can be freed
 * in both, so one exit frees descriptions that were never made. */
typedef struct description {
    dnnl_memory_desc_t value;
} description;

#if DNNL_VERSION_MAJOR >= 3
#define DESCRIPTION(d) ((d)->value)
/* Version 3 allocates a description, and takes NULL here for one that was never made. */
static void description_free(description *d) { dnnl_memory_desc_destroy(d->value); }
static bool description_make(description *d, int dims, const dnnl_dims_t sizes,
                             dnnl_data_type_t type, const dnnl_dims_t strides)
{
    return dnnl_memory_desc_create_with_strides(&d->value, dims, sizes, type, strides)
           == dnnl_success;
}
static dnnl_status_t matmul_make(dnnl_primitive_desc_t *out, dnnl_engine_t engine,
                                 const description *a, const description *b,
                                 const description *bias, const description *c,
                                 const_dnnl_primitive_attr_t attributes)
{
    return dnnl_matmul_primitive_desc_create(
        out, engine, a->value, b->value, bias != NULL ? bias->value : NULL, c->value, attributes);
}
static bool append_sum(dnnl_post_ops_t list)
{
    return dnnl_post_ops_append_sum(list, 1.0f, 0, dnnl_data_type_undef) == dnnl_success;
}
static size_t description_bytes(const_dnnl_memory_desc_t d)
{
    return d != NULL ? dnnl_memory_desc_get_size(d) : 0;
}
#else
#define DESCRIPTION(d) (&(d)->value)
/* A struct of version 2 owns nothing. */
static void description_free(description *d) { (void)d; }
static bool description_make(description *d, int dims, const dnnl_dims_t sizes,
                             dnnl_data_type_t type, const dnnl_dims_t strides)
{
    return dnnl_memory_desc_init_by_strides(&d->value, dims, sizes, type, strides) == dnnl_success;
}
static dnnl_status_t matmul_make(dnnl_primitive_desc_t *out, dnnl_engine_t engine,
                                 const description *a, const description *b,
                                 const description *bias, const description *c,
                                 const_dnnl_primitive_attr_t attributes)
{
    dnnl_matmul_desc_t matmul;
    dnnl_status_t status = dnnl_matmul_desc_init(&matmul, &a->value, &b->value,
                                                 bias != NULL ? &bias->value : NULL, &c->value);
    return status != dnnl_success
               ? status
               : dnnl_primitive_desc_create(out, &matmul, attributes, engine, NULL);
}
static bool append_sum(dnnl_post_ops_t list)
{
    return dnnl_post_ops_append_sum(list, 1.0f) == dnnl_success;
}
static size_t description_bytes(const dnnl_memory_desc_t *d)
{
    return d != NULL ? dnnl_memory_desc_get_size(d) : 0;
}
#endif

/* -------------------------------------------------------------------- state */

/* A primitive of the library, which is compiled code, or NULL for dnnl_sgemm. It holds no data of a
 * run, so any number of threads execute it at once. `gemm` leads a task from its plan to the
 * settings of OpenMP, without the engine. */
struct ms_gemm_plan {
    ms_gemm_shape key;
    const ms_gemm *gemm;
    dnnl_primitive_t primitive; /* NULL: dnnl_sgemm does it */
    size_t scratch_bytes;
};

/* The library's state of one engine. Only the host thread adds plans; tasks get the address of a
 * plan, which never moves, and do not look at the table. */
struct ms_gemm {
    dnnl_engine_t engine;
    /* OpenMP's settings of the calling thread, where oneDNN brings an OpenMP along: it must not
     * start threads of its own. */
    void (*set_threads)(int);
    int (*get_threads)(void);
    bool bf16;
    bool wide; /* the library has AVX-512 */
    ms_gemm_plan **plans;
    size_t count, capacity;
    uint32_t *slots; /* open addressing by shape; index into plans + 1, or 0 */
    size_t slot_count;
};

/* The version of the headers with which this file was compiled. */
const char *ms_gemm_library(void)
{
#define MS_TEXT2(x) #x
#define MS_TEXT(x) MS_TEXT2(x)
    return "oneDNN " MS_TEXT(DNNL_VERSION_MAJOR) "." MS_TEXT(DNNL_VERSION_MINOR) "." MS_TEXT(
        DNNL_VERSION_PATCH);
}

/* Applies the user's cap on instruction sets to oneDNN. Its setting belongs to the whole process
 * and can only be made before first use, so it is left alone without a cap, and an engine made
 * later in the same process may find it decided. */
static void cap_isa(const ms_engine *engine)
{
    static const dnnl_cpu_isa_t caps[] = { dnnl_cpu_isa_sse41, dnnl_cpu_isa_avx2,
                                           dnnl_cpu_isa_avx512_core,
                                           dnnl_cpu_isa_avx512_core_bf16 };
    if (ms_engine_isa_is_capped(engine)) dnnl_set_max_cpu_isa(caps[ms_engine_isa(engine)]);
}

/* Asking makes the library's state, since the answer is known only after the cap was applied. A
 * device with other kernels has the plans of another library there. */
const char *ms_engine_blas_isa(ms_engine *engine)
{
    ms_gemm *gemm;
    if (strcmp(ms_engine_device_of(engine)->kernels, "cpu") != 0 || ms_gemm_get(engine, &gemm))
        return "";
    switch (dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_sse41: return "sse41";
    case dnnl_cpu_isa_avx: return "avx";
    case dnnl_cpu_isa_avx2: return "avx2";
    case dnnl_cpu_isa_avx2_vnni: return "avx2_vnni";
    case dnnl_cpu_isa_avx512_core: return "avx512_core";
    case dnnl_cpu_isa_avx512_core_vnni: return "avx512_core_vnni";
    case dnnl_cpu_isa_avx512_core_bf16: return "avx512_core_bf16";
    case dnnl_cpu_isa_avx512_core_amx: return "avx512_core_amx";
    default: return "";
    }
}

/* Runs when the engine ends, after its streams have finished, so no thread executes a plan. Plans
 * are freed before the library's engine, which their primitives refer to. */
static void gemm_free(ms_engine *engine, void *state)
{
    ms_gemm *gemm = state;
    ms_context *context = ms_engine_context(engine);
    for (size_t i = 0; i < gemm->count; i++) {
        if (gemm->plans[i]->primitive != NULL) dnnl_primitive_destroy(gemm->plans[i]->primitive);
        ms_release(context, gemm->plans[i]);
    }
    ms_release(context, gemm->plans);
    ms_release(context, gemm->slots);
    dnnl_engine_destroy(gemm->engine);
    ms_release(context, gemm);
}

/* get_threads and set_threads are looked up at run time, because oneDNN may be built with OpenMP or
 * without; both are NULL without it. bf16 is offered only where both the library and the engine's
 * own cap allow its dot product. */
static ms_status gemm_new(ms_engine *engine, ms_gemm **out)
{
    void *made;
    ms_status status =
        ms_allocate(ms_engine_context(engine), sizeof(ms_gemm), "matrix products", &made);
    if (status) return status;
    ms_gemm *gemm = made;
    cap_isa(engine);
    if (dnnl_engine_create(&gemm->engine, dnnl_cpu, 0) != dnnl_success) {
        ms_release(ms_engine_context(engine), gemm);
        return ms_engine_fail(engine, MS_ERROR_MEMORY, "%s cannot make its CPU engine",
                              ms_gemm_library());
    }
    /* POSIX lets a data pointer from dlsym become a function's; C does not, hence the copy. */
    void *symbol = dlsym(RTLD_DEFAULT, "omp_set_num_threads");
    memcpy(&gemm->set_threads, &symbol, sizeof symbol);
    symbol = dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    memcpy(&gemm->get_threads, &symbol, sizeof symbol);
    int capped = (int)dnnl_get_effective_cpu_isa();
    gemm->wide = (capped & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core;
    gemm->bf16 = ms_engine_isa(engine) >= MS_ISA_AVX512BF16
                 && (capped & dnnl_cpu_isa_avx512_core_bf16) == dnnl_cpu_isa_avx512_core_bf16;
    *out = gemm;
    return MS_OK;
}

/* The state is made at the first product: programs without one never initialise the library. Only
 * the host thread calls it, so two threads cannot make the state at once. */
ms_status ms_gemm_get(ms_engine *engine, ms_gemm **out)
{
    ms_gemm *gemm = ms_engine_get(engine, MS_SLOT_PLANS);
    ms_status status = gemm ? MS_OK : gemm_new(engine, &gemm);
    if (status) return status;
    ms_engine_set(engine, MS_SLOT_PLANS, gemm, gemm_free);
    *out = gemm;
    return MS_OK;
}

/* f32 always. bf16 where the processor multiplies it: with AVX-512 alone oneDNN takes 3.5 times as
 * long as convert_part (matmul.c), and without AVX-512 it has no bf16. f16 is not offered and goes
 * through convert_part, too. The library adds products of bf16 in f32. */
bool ms_gemm_supports(const ms_gemm *gemm, ms_dtype in, ms_dtype out)
{
    if (in == MS_F32) return out == MS_F32;
    return gemm->bf16 && in == MS_BF16 && (out == MS_BF16 || out == MS_F32);
}

/* -------------------------------------------------------------------- plans */

/* How a product is computed; decided by the shape alone. PLAN_SGEMM: a call of dnnl_sgemm, which
 * costs least for small f32 products. PLAN_EXACT: a primitive for this shape, which is fastest.
 * PLAN_GENERAL: a primitive whose sizes come at run time, a few percent slower, which saves a plan
 * for each length of a text that grows token by token. Sizes that are multiples of 16 are taken for
 * those that training repeats. */
typedef enum plan_kind { PLAN_SGEMM, PLAN_EXACT, PLAN_GENERAL } plan_kind;

/* A weight's gradient, the sum over tokens of a's row times b's. The library packs blocks of both
 * operands from all their rows, and rows 4 KiB apart, or a multiple of it, share a few sets of the
 * caches (rows of 1104 numbers do not, and lose nothing). Summed up in stretches of k:
 * - With AVX-512, where a's rows are longer than b's, stretches that fit there take 0.7 to 0.87 of
 *   the time with rows of 1024 to 3072 numbers, and as long with others (2 cores of a Xeon). With
 *   many columns of b packing is little of the work, and sums that go back and forth cost more.
 * - Without it packing loses more than half of the speed from rows of 2 KiB on (33 instead of 78 of
 *   91 GFLOP/s at 1024 numbers, a core of an EPYC), and some percent with others. Copied side by
 *   side first, which takes a few percent, rows of any length are as good. */
typedef enum stretches { STRETCHES_NONE, STRETCHES_IN_PLACE, STRETCHES_COPIED } stretches;
/* Rows of a stretch, in place and copied; columns of b up to which the first pays; sizes between
 * which copies pay and stay small. */
enum { STRETCH = 128, COPIED = 256, STRETCH_COLUMNS = 1024, COPIED_LEAST = 64, COPIED_MOST = 4096 };

/* The kind of summation for a weight's gradient, and none for every other product. It depends on
 * shape and library only, since it decides the order of additions. */
static stretches stretches_of(const ms_gemm *gemm, const ms_gemm_shape *s)
{
    if (s->in != MS_F32 || s->bias || !s->a_transposed || s->b_transposed) return STRETCHES_NONE;
    if (gemm->wide)
        return s->a_row > s->b_row && s->n <= STRETCH_COLUMNS && s->k >= 2 * STRETCH
                   ? STRETCHES_IN_PLACE
                   : STRETCHES_NONE;
    int64_t few = s->m < s->n ? s->m : s->n;
    int64_t many = s->m < s->n ? s->n : s->m;
    return few >= COPIED_LEAST && many <= COPIED_MOST && s->k >= COPIED_LEAST ? STRETCHES_COPIED
                                                                              : STRETCHES_NONE;
}

/* A product with a weight's transpose, of few rows, in pieces of columns. The library without
 * AVX-512 packs blocks of the weight, whose numbers few rows then use, and writes each row of c far
 * from the row before. With pieces of 128 columns 256 rows take 0.82 to 0.97 of the time (768
 * inputs, 2304 to 25152 outputs, one and two cores of a Xeon held to AVX2), 16 and fewer rows
 * 0.75 to 0.93. From 512 rows on it is as long. */
enum { PIECE_ROWS = 256, PIECE = 128 };

static bool in_pieces(const ms_gemm *gemm, const ms_gemm_shape *s)
{
    return !gemm->wide && s->in == MS_F32 && !s->bias && !s->a_transposed && s->b_transposed
           && s->m <= PIECE_ROWS && s->n > PIECE;
}

/* 2e6 FLOPs take about 20 microseconds at 100 GFLOP/s: below that the cost of executing a primitive
 * (execute) shows. A bias and bf16 need a primitive whatever the size, as dnnl_sgemm has
 * neither. */
static plan_kind kind_of(const ms_gemm *gemm, const ms_gemm_shape *s)
{
    if (stretches_of(gemm, s) != STRETCHES_NONE || in_pieces(gemm, s)) return PLAN_SGEMM;
    bool regular = s->m % 16 == 0 && s->n % 16 == 0 && s->k % 16 == 0;
    double flops = 2.0 * (double)s->m * (double)s->n * (double)s->k;
    if (s->in == MS_F32 && !s->bias && (flops < 2e6 || !regular)) return PLAN_SGEMM;
    return regular ? PLAN_EXACT : PLAN_GENERAL;
}

/* Only the two dtypes that ms_gemm_supports lets through. */
static dnnl_data_type_t type_of(uint8_t dtype) { return dtype == MS_BF16 ? dnnl_bf16 : dnnl_f32; }

/* Describes a matrix of rows x columns; `row` is the distance between stored rows, which are its
 * columns if it is transposed. A transposed matrix is the same memory with exchanged strides; the
 * library then packs it as it needs. */
static bool describe_matrix(description *d, int64_t rows, int64_t columns, int64_t row,
                            bool transposed, dnnl_data_type_t type)
{
    dnnl_dims_t sizes = { rows, columns }, strides = { row, 1 };
    if (transposed) {
        strides[0] = 1;
        strides[1] = row;
    }
    return description_make(d, 2, sizes, type, strides);
}

/* The operands of one product, zeroed by the caller. */
typedef struct descriptions {
    description a, b, c, bias;
} descriptions;

/* Describes the operands of a shape. The bias is one row, which the library adds to every row of c.
 * False when there is no memory; descriptions_free is right in either case. The bias is described
 * whether there is one or not, which costs nothing. */
static bool describe(descriptions *d, const ms_gemm_shape *s)
{
    return describe_matrix(&d->a, s->m, s->k, s->a_row, s->a_transposed, type_of(s->in))
           && describe_matrix(&d->b, s->k, s->n, s->b_row, s->b_transposed, type_of(s->in))
           && describe_matrix(&d->c, s->m, s->n, s->c_row, false, type_of(s->out))
           && describe_matrix(&d->bias, 1, s->n, s->n, false, dnnl_f32);
}

/* Right also for a struct that is zeroed or was filled in part. */
static void descriptions_free(descriptions *d)
{
    description_free(&d->a);
    description_free(&d->b);
    description_free(&d->c);
    description_free(&d->bias);
}

/* Makes the primitive of a plan. `s` is the plan's key, in which sizes may be left to run time.
 * What the library needs only while it makes a primitive is freed on every path. The library
 * generates machine code here, so it happens on the host thread, once for each key. */
static dnnl_status_t make_primitive(ms_gemm *gemm, const ms_gemm_shape *s, ms_gemm_plan *plan)
{
    descriptions d = { 0 };
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_post_ops_t after = NULL;
    dnnl_primitive_desc_t made = NULL;
    dnnl_status_t status = dnnl_invalid_arguments;
    if (!describe(&d, s)) goto done;
    if ((status = dnnl_primitive_attr_create(&attributes)) != dnnl_success) goto done;
    /* Scratch by thread: with the library's own, one primitive in several threads gives wrong
     * results without a word. */
    if ((status = dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user))
        != dnnl_success)
        goto done;
    if (s->accumulate) {
        if ((status = dnnl_post_ops_create(&after)) != dnnl_success) goto done;
        status = append_sum(after) ? dnnl_primitive_attr_set_post_ops(attributes, after)
                                   : dnnl_invalid_arguments;
        if (status != dnnl_success) goto done;
    }
    if ((status = matmul_make(&made, gemm->engine, &d.a, &d.b, s->bias ? &d.bias : NULL, &d.c,
                              attributes))
        != dnnl_success)
        goto done;
    plan->scratch_bytes =
        description_bytes(dnnl_primitive_desc_query_md(made, dnnl_query_scratchpad_md, 0));
    status = dnnl_primitive_create(&plan->primitive, made);
done:
    if (made != NULL) dnnl_primitive_desc_destroy(made);
    if (after != NULL) dnnl_post_ops_destroy(after);
    if (attributes != NULL) dnnl_primitive_attr_destroy(attributes);
    descriptions_free(&d);
    return status;
}

/* Makes a primitive with OpenMP set to one thread, as its code may depend on the setting, and
 * restores the setting afterwards: the application may use OpenMP itself. */
static dnnl_status_t make_primitive_alone(ms_gemm *gemm, const ms_gemm_shape *shape,
                                          ms_gemm_plan *plan)
{
    int threads = gemm->get_threads != NULL ? gemm->get_threads() : 1;
    if (gemm->set_threads != NULL) gemm->set_threads(1);
    dnnl_status_t status = make_primitive(gemm, shape, plan);
    if (gemm->set_threads != NULL) gemm->set_threads(threads);
    return status;
}

/* What distinguishes plans: the sizes only for an exact plan, and nothing for dnnl_sgemm, whose one
 * plan serves all shapes. The key is hashed and compared as bytes, so it is zeroed first to give
 * padding a value. */
static ms_gemm_shape key_of(const ms_gemm_shape *s, plan_kind kind)
{
    ms_gemm_shape key;
    memset(&key, 0, sizeof key);
    if (kind == PLAN_SGEMM) return key;
    bool exact = kind == PLAN_EXACT;
    key.m = exact ? s->m : DNNL_RUNTIME_DIM_VAL;
    key.n = exact ? s->n : DNNL_RUNTIME_DIM_VAL;
    key.k = exact ? s->k : DNNL_RUNTIME_DIM_VAL;
    key.a_row = exact ? s->a_row : DNNL_RUNTIME_DIM_VAL;
    key.b_row = exact ? s->b_row : DNNL_RUNTIME_DIM_VAL;
    key.c_row = exact ? s->c_row : DNNL_RUNTIME_DIM_VAL;
    key.a_transposed = s->a_transposed;
    key.b_transposed = s->b_transposed;
    key.accumulate = s->accumulate;
    key.bias = s->bias;
    key.in = s->in;
    key.out = s->out;
    return key;
}

/* The slot of this key, or the empty one where it belongs. Linear probing ends because the table is
 * at most half full. Only the host thread reads or writes the table. */
static size_t find_slot(const ms_gemm *gemm, const ms_gemm_shape *key)
{
    size_t mask = gemm->slot_count - 1, at = (size_t)ms_hash(key, sizeof *key, 0) & mask;
    while (gemm->slots[at] != 0
           && memcmp(&gemm->plans[gemm->slots[at] - 1]->key, key, sizeof *key) != 0)
        at = (at + 1) & mask;
    return at;
}

/* Makes room for one more plan with the table at most half full. A failure leaves the old table.
 * Slots are indices, so that the larger table is filled again from the list of plans. */
static ms_status widen(ms_context *context, ms_gemm *gemm)
{
    if (gemm->slot_count != 0 && (gemm->count + 1) * 2 <= gemm->slot_count) return MS_OK;
    size_t slot_count = gemm->slot_count != 0 ? gemm->slot_count * 2 : 128;
    void *made;
    ms_status status =
        ms_allocate(context, slot_count * sizeof *gemm->slots, "matrix products", &made);
    if (status) return status;
    ms_release(context, gemm->slots);
    gemm->slots = made;
    gemm->slot_count = slot_count;
    for (size_t i = 0; i < gemm->count; i++)
        gemm->slots[find_slot(gemm, &gemm->plans[i]->key)] = (uint32_t)i + 1;
    return MS_OK;
}

/* Looks the plan up or makes it; nothing is registered before everything has succeeded. A plan is
 * never freed before the engine, because enqueued tasks hold its address. */
ms_status ms_gemm_prepare(ms_engine *engine, ms_gemm *gemm, const ms_gemm_shape *shape,
                          const ms_gemm_plan **out)
{
    ms_context *context = ms_engine_context(engine);
    plan_kind kind = kind_of(gemm, shape);
    ms_gemm_shape key = key_of(shape, kind);
    void *plans = gemm->plans, *made = NULL;
    ms_status status = widen(context, gemm);
    if (status) return status;
    size_t at = find_slot(gemm, &key);
    if (gemm->slots[at] == 0) {
        status = ms_grow(context, &plans, &gemm->capacity, gemm->count + 1, sizeof *gemm->plans);
        gemm->plans = plans;
        if (!status) status = ms_allocate(context, sizeof(ms_gemm_plan), "matrix product", &made);
        if (status) return status;
        ms_gemm_plan *plan = made;
        plan->key = key;
        plan->gemm = gemm;
        dnnl_status_t result =
            kind == PLAN_SGEMM ? dnnl_success : make_primitive_alone(gemm, &key, plan);
        if (result != dnnl_success) {
            ms_release(context, plan);
            return ms_engine_fail(
                engine, result == dnnl_out_of_memory ? MS_ERROR_MEMORY : MS_ERROR_UNSUPPORTED,
                "%s cannot make a product of %lld x %lld x %lld (its status %d)", ms_gemm_library(),
                (long long)shape->m, (long long)shape->n, (long long)shape->k, (int)result);
        }
        gemm->plans[gemm->count++] = plan;
        gemm->slots[at] = (uint32_t)gemm->count;
    }
    *out = gemm->plans[gemm->slots[at] - 1];
    return MS_OK;
}

/* --------------------------------------------------------------------- runs */

/* One call of the library, over k of the products of a sum. It fails only for sizes that the
 * operators have refused, so its status is dropped. k may be shorter than s->k, in a sum by
 * stretches. */
static void multiply(const ms_gemm_shape *s, int64_t k, const float *a, const float *b, bool add,
                     float *c)
{
    char a_order = s->a_transposed ? 'T' : 'N';
    char b_order = s->b_transposed ? 'T' : 'N';
    float keep = add ? 1.0f : 0.0f;
    (void)dnnl_sgemm(a_order, b_order, s->m, s->n, k, 1.0f, a, s->a_row, b, s->b_row, keep, c,
                     s->c_row);
}

static void multiply_pieces(const ms_gemm_shape *s, const float *a, const float *b, float *c)
{
    ms_gemm_shape piece = *s;
    for (int64_t column = 0; column < s->n; column += PIECE) {
        piece.n = s->n - column < PIECE ? s->n - column : PIECE;
        multiply(&piece, s->k, a, b + column * s->b_row, s->accumulate, c + column);
    }
}

/* The OpenMP setting is made on every call because it belongs to the calling thread, which may run
 * tiles for the first time. With k = 0 it would leave c as it is, so such products do not come
 * here. */
void ms_gemm_f32(const ms_gemm *gemm, const ms_gemm_shape *s, const float *a, const float *b,
                 float *c)
{
    if (gemm->set_threads != NULL) gemm->set_threads(1);
    if (in_pieces(gemm, s)) {
        multiply_pieces(s, a, b, c);
        return;
    }
    int64_t stretch = stretches_of(gemm, s) == STRETCHES_IN_PLACE ? STRETCH : s->k;
    int64_t a_step = s->a_transposed ? s->a_row : 1;
    int64_t b_step = s->b_transposed ? 1 : s->b_row;
    for (int64_t k = 0; k < s->k; k += stretch)
        multiply(s, s->k - k < stretch ? s->k - k : stretch, a + k * a_step, b + k * b_step,
                 s->accumulate || k > 0, c);
}

/* A distance between copied rows that is an odd multiple of 16 floats, one cache line: neighbouring
 * rows then start in different sets of the caches. For n = 1024 it is 1040. */
static int64_t copied_row(int64_t n) { return (n + 31) / 32 * 32 + 16; }

/* Packs rows at the distance copied_row(columns). The floats between the copied rows are never
 * read. */
static void copy_rows(const float *from, int64_t row, int64_t rows, int64_t columns, float *to)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * copied_row(columns), from + i * row, (size_t)columns * sizeof *to);
}

/* Sums in stretches of k whose operands are copied first; why is said at `stretches`. False when
 * there is no memory for the copies. Rows are copied 256 at a time, so that copies of usual sizes
 * are still in a cache when they are multiplied. The first stretch overwrites c unless the shape
 * accumulates. */
static bool multiply_copied(const ms_gemm *gemm, const ms_gemm_shape *s, ms_thread *thread,
                            const float *a, const float *b, float *c)
{
    ms_gemm_shape inner = *s;
    inner.a_row = copied_row(s->m);
    inner.b_row = copied_row(s->n);
    float *a_copy = ms_thread_scratch(
        thread, MS_GEMM_SCRATCH, (size_t)((inner.a_row + inner.b_row) * COPIED) * sizeof(float));
    if (a_copy == NULL) return false;
    float *b_copy = a_copy + inner.a_row * COPIED;
    if (gemm->set_threads != NULL) gemm->set_threads(1);
    for (int64_t k = 0; k < s->k; k += COPIED) {
        int64_t rows = s->k - k < COPIED ? s->k - k : COPIED;
        copy_rows(a + k * s->a_row, s->a_row, rows, s->m, a_copy);
        copy_rows(b + k * s->b_row, s->b_row, rows, s->n, b_copy);
        multiply(&inner, rows, a_copy, b_copy, s->accumulate || k > 0, c);
    }
    return true;
}

/* Makes a memory object for one argument and counts it in *made, so that the exit destroys exactly
 * those that exist. The library takes inputs by a pointer that is not const, but only reads
 * them. */
static bool bind(dnnl_exec_arg_t *argument, int name, const description *d, dnnl_engine_t engine,
                 const void *data, int *made)
{
    union {
        const void *read;
        void *data;
    } address = { .read = data };
    if (dnnl_memory_create(&argument->memory, DESCRIPTION(d), engine, address.data) != dnnl_success)
        return false;
    argument->arg = name;
    (*made)++;
    return true;
}

/* Runs a primitive. Memory objects and the stream are made at each call, about 150 ns each, because
 * threads cannot share them. The stream is waited for: the task must not end before its result
 * exists. False also where the library fails; matmul_run reports both as want of memory. */
static bool execute(const ms_gemm_plan *plan, const ms_gemm_shape *shape, ms_thread *thread,
                    const void *a, const void *b, const float *bias, void *c)
{
    dnnl_engine_t engine = plan->gemm->engine;
    descriptions d = { 0 };
    description flat = { 0 };
    dnnl_exec_arg_t arguments[5];
    dnnl_stream_t stream = NULL;
    dnnl_dims_t bytes = { (dnnl_dim_t)plan->scratch_bytes }, one = { 1 };
    int made = 0;
    bool done = false;
    void *scratch = plan->scratch_bytes != 0
                        ? ms_thread_scratch(thread, MS_GEMM_SCRATCH, plan->scratch_bytes)
                        : NULL;
    if ((plan->scratch_bytes != 0 && scratch == NULL) || !describe(&d, shape)) goto done;
    if (!bind(&arguments[made], DNNL_ARG_SRC, &d.a, engine, a, &made)) goto done;
    if (!bind(&arguments[made], DNNL_ARG_WEIGHTS, &d.b, engine, b, &made)) goto done;
    if (!bind(&arguments[made], DNNL_ARG_DST, &d.c, engine, c, &made)) goto done;
    if (bias != NULL && !bind(&arguments[made], DNNL_ARG_BIAS, &d.bias, engine, bias, &made))
        goto done;
    if (scratch != NULL) {
        if (!description_make(&flat, 1, bytes, dnnl_u8, one)) goto done;
        if (!bind(&arguments[made], DNNL_ARG_SCRATCHPAD, &flat, engine, scratch, &made)) goto done;
    }
    if (dnnl_stream_create(&stream, engine, dnnl_stream_default_flags) != dnnl_success) goto done;
    done = dnnl_primitive_execute(plan->primitive, stream, made, arguments) == dnnl_success
           && dnnl_stream_wait(stream) == dnnl_success;
done:
    if (stream != NULL) dnnl_stream_destroy(stream);
    for (int i = 0; i < made; i++) dnnl_memory_destroy(arguments[i].memory);
    description_free(&flat);
    descriptions_free(&d);
    return done;
}

/* The kind of summation is asked for again, as plans of dnnl_sgemm do not record it; it gives the
 * same answer as at the time of the plan. */
bool ms_gemm_run(const ms_gemm_plan *plan, const ms_gemm_shape *shape, ms_thread *thread,
                 const void *a, const void *b, const float *bias, void *c)
{
    if (plan->primitive == NULL) {
        if (stretches_of(plan->gemm, shape) == STRETCHES_COPIED)
            return multiply_copied(plan->gemm, shape, thread, a, b, c);
        ms_gemm_f32(plan->gemm, shape, a, b, c);
        return true;
    }
    if (plan->gemm->set_threads != NULL) plan->gemm->set_threads(1);
    return execute(plan, shape, thread, a, b, bias, c);
}

#define MS_TEXT2(x) #x
#define MS_TEXT(x) MS_TEXT2(x)

const char *ms_engine_blas(void)
{
    return "oneDNN " MS_TEXT(DNNL_VERSION_MAJOR) "." MS_TEXT(DNNL_VERSION_MINOR) "." MS_TEXT(
        DNNL_VERSION_PATCH);
}

#else
typedef int ms_gemm_onednn_is_not_built; /* C has no empty files */
#endif
