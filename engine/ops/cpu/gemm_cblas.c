/* gemm_cblas.c: matrix products by any CBLAS, in f32; other dtypes are converted by who calls. */
#include "ops/cpu/gemm.h"

#include "tensor/state.h"

#if defined(MS_WITH_CBLAS)

#include <cblas.h>
#include <dlfcn.h>
#include <string.h>

/* A CBLAS has no state that an engine could own and nothing to prepare: the struct only gives the
 * slot of the engine an object, and the plan gives callers an address that is not NULL. */
struct ms_gemm {
    int unused;
};
struct ms_gemm_plan {
    int unused;
};

const char *ms_gemm_library(void) { return "CBLAS"; }

/* Makes OpenBLAS compute on the calling thread; other libraries follow their environment. Tiles run
 * on the engine's own threads already, and a second pool on the same cores would slow both down.
 * The setting belongs to the whole process, as OpenBLAS has no other. */
static void run_alone(void)
{
    void (*set_threads)(int);
    void *symbol = dlsym(RTLD_DEFAULT, "openblas_set_num_threads");
    memcpy(&set_threads, &symbol, sizeof symbol);
    if (set_threads != NULL) set_threads(1);
}

/* There is nothing inside to free; the object was only an address. */
static void gemm_free(ms_engine *engine, void *state)
{
    ms_release(ms_engine_context(engine), state);
}

/* Called on the host thread, at the first product of an engine. Later engines of the process set
 * the number of threads again, which changes nothing. */
ms_status ms_gemm_get(ms_engine *engine, ms_gemm **out)
{
    void *gemm = ms_engine_get(engine, MS_SLOT_PLANS);
    if (!gemm) {
        ms_status status =
            ms_allocate(ms_engine_context(engine), sizeof(ms_gemm), "matrix products", &gemm);
        if (status) return status;
        ms_engine_set(engine, MS_SLOT_PLANS, gemm, gemm_free);
        run_alone();
    }
    *out = gemm;
    return MS_OK;
}

/* The interface of CBLAS has f32 and f64 only. f64 is no dtype of the engine. Products in bf16 and
 * f16 go through convert_part (matmul.c), which calls ms_gemm_f32 for blocks. */
bool ms_gemm_supports(const ms_gemm *gemm, ms_dtype in, ms_dtype out)
{
    (void)gemm;
    return in == MS_F32 && out == MS_F32;
}

/* Refuses sizes that do not fit the int of the CBLAS interface; a cast would compute another
 * product without a word. One plan serves all shapes, as CBLAS takes sizes with each call. It is
 * static and constant, so threads and engines share it. */
ms_status ms_gemm_prepare(ms_engine *engine, ms_gemm *gemm, const ms_gemm_shape *shape,
                          const ms_gemm_plan **out)
{
    static const ms_gemm_plan plan = { 0 }; /* there is nothing to prepare */
    (void)gemm;
    if (shape->m > INT32_MAX || shape->n > INT32_MAX || shape->k > INT32_MAX
        || shape->a_row > INT32_MAX || shape->b_row > INT32_MAX || shape->c_row > INT32_MAX)
        return ms_engine_fail(
            engine, MS_ERROR_UNSUPPORTED,
            "CBLAS counts rows and columns in 32 bits: build with oneDNN for larger ones");
    *out = &plan;
    return MS_OK;
}

/* Rows of matrices are contiguous and `*_row` elements apart, which CBLAS calls the leading
 * dimension. Sizes fit an int: ms_gemm_prepare has refused others, and blocks of convert_part are
 * small. */
void ms_gemm_f32(const ms_gemm *gemm, const ms_gemm_shape *s, const float *a, const float *b,
                 float *c)
{
    (void)gemm;
    int a_order = s->a_transposed ? CblasTrans : CblasNoTrans;
    int b_order = s->b_transposed ? CblasTrans : CblasNoTrans;
    float keep = s->accumulate ? 1.0f : 0.0f;
    cblas_sgemm(CblasRowMajor, a_order, b_order, (int)s->m, (int)s->n, (int)s->k, 1.0f, a,
                (int)s->a_row, b, (int)s->b_row, keep, c, (int)s->c_row);
}

/* The bias is written to c first, and the product is added to it: CBLAS knows no bias. */
bool ms_gemm_run(const ms_gemm_plan *plan, const ms_gemm_shape *shape, ms_thread *thread,
                 const void *a, const void *b, const float *bias, void *c)
{
    (void)plan;
    (void)thread;
    ms_gemm_shape product = *shape;
    if (bias != NULL) {
        /* The bias is what the product adds itself to. */
        for (int64_t i = 0; i < shape->m; i++) {
            float *row = (float *)c + i * shape->c_row;
            for (int64_t j = 0; j < shape->n; j++)
                row[j] = (shape->accumulate ? row[j] : 0.0f) + bias[j];
        }
        product.accumulate = true;
    }
    ms_gemm_f32(NULL, &product, a, b, c);
    return true;
}

/* A CBLAS does not say which instruction set it uses. */
const char *ms_engine_blas(void) { return "CBLAS"; }
const char *ms_engine_blas_isa(ms_engine *engine)
{
    (void)engine;
    return "";
}

#else
typedef int ms_gemm_cblas_is_not_built; /* C has no empty files */
#endif
