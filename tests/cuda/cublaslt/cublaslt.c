/* cublaslt.c: a stand-in for cuBLASLt, which cannot be opened without a GPU. It computes on the
 * host, as work of the stand-in driver's streams, with plain loops: it shares nothing with the
 * products that the engine has for the CPU. What the library would refuse ends the process with a
 * message, or is an error of the call.
 *
 * A product has CANDIDATES candidates, which differ in the bits of their results. With
 * MOONSHARD_STAND_IN_CUBLASLT_FAST=N all but candidate N take a second of the GPU's time, in which
 * nobody waits. MOONSHARD_STAND_IN_CUBLASLT_REFUSES=N: candidate N is refused when it is checked;
 * MOONSHARD_STAND_IN_CUBLASLT_NO_BIAS: there are no candidates that add a bias; .._NO_EXTRA: none
 * that apply gelu or sum an operand.
 * MOONSHARD_STAND_IN_CUBLASLT_LOG: a file that gets a line for each call: "PID asks WANTED",
 * "PID uses N", and, where a product is planned for less than the whole GPU, "PID limits N", of
 * TF32 "PID computes 77". */
#include <dlfcn.h>
#include <pthread.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The prototypes are those of cublasLt.h, which it does without. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { F32 = 0, F16 = 2, BF16 = 14, E4M3 = 28, E5M2 = 29 };
/* Bits of epilogues: GELU and GELU_GRADIENT come with BESIDE here, what goes into gelu. The
 * gradient, SUM_A and SUM_B come without a bias. */
enum { BIAS = 4, GELU = 32, GELU_GRADIENT = 64, BESIDE = 128, SUM_A = 256, SUM_B = 512 };

/* How products are computed. */
enum { IN_F32 = 68, IN_TF32 = 77 };

typedef struct operation {
    int compute;
    int32_t transposed[2];
    uint32_t epilogue;
    const void *bias; /* or where sums go */
    const void *beside;
    int64_t beside_column;
    const float *scales[2]; /* of operands of 8 bits */
} operation;
typedef struct layout {
    int type;
    uint64_t rows, columns;
    int64_t column;
    int32_t batches;
    int64_t batch;
} layout;
typedef struct preference {
    size_t workspace;
    uint32_t reductions, align[4];
} preference;
typedef struct algorithm {
    uint64_t data[8]; /* a mark; the alignments of a, b, c; its number; how it adds parts of k */
} algorithm;
typedef struct candidate {
    algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} candidate;
#define MARK UINT64_C(0x6d6f6f6e73686172)
enum { WORKSPACE = 4096, CANDIDATES = 4 };

static void __attribute__((noreturn)) wrong(const char *what)
{
    fprintf(stderr, "stand-in for cuBLASLt: %s\n", what);
    abort();
}
static void *make(size_t bytes)
{
    void *made = calloc(1, bytes);
    if (!made) abort();
    return made;
}

/* The number that a variable of the environment holds; -1: it is not set. */
static int number_in(const char *variable)
{
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : -1;
}
static void note(const char *word, int number)
{
    const char *path = getenv("MOONSHARD_STAND_IN_CUBLASLT_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    fprintf(file, "%d %s %d\n", (int)getpid(), word, number);
    fclose(file);
}

API int cublasLtCreate(void **out)
{
    *out = make(1);
    return SUCCESS;
}
API int cublasLtDestroy(void *handle)
{
    free(handle);
    return SUCCESS;
}
API size_t cublasLtGetVersion(void)
{
    const char *text = getenv("MOONSHARD_STAND_IN_CUBLASLT_VERSION");
    return text ? (size_t)atol(text) : 130101;
}
API const char *cublasLtGetStatusString(int result)
{
    return result == NOT_SUPPORTED ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INVALID_VALUE";
}

API int cublasLtMatmulDescCreate(operation **out, int compute, int scale)
{
    if ((compute != IN_F32 && compute != IN_TF32) || scale != F32) return NOT_SUPPORTED;
    if (compute == IN_TF32) note("computes", compute);
    *out = make(sizeof **out);
    (*out)->compute = compute;
    (*out)->epilogue = 1;
    return SUCCESS;
}
API int cublasLtMatmulDescDestroy(operation *gone)
{
    free(gone);
    return SUCCESS;
}
API int cublasLtMatmulDescSetAttribute(operation *of, int what, const void *value, size_t bytes)
{
    if ((what == 3 || what == 4) && bytes == 4) memcpy(&of->transposed[what - 3], value, bytes);
    else if (what == 7 && bytes == 4) memcpy(&of->epilogue, value, bytes);
    else if (what == 8 && bytes == 8) memcpy(&of->bias, value, bytes);
    else if (what == 11 && bytes == 8) memcpy(&of->beside, value, bytes);
    else if (what == 12 && bytes == 8) memcpy(&of->beside_column, value, bytes);
    else if ((what == 17 || what == 18) && bytes == 8) memcpy(&of->scales[what - 17], value, bytes);
    else if (what == 15 && bytes == 4) note("limits", *(const int32_t *)value);
    else return INVALID_VALUE;
    return SUCCESS;
}
API int cublasLtMatrixLayoutCreate(layout **out, int type, uint64_t rows, uint64_t columns,
                                   int64_t column)
{
    if (column < (int64_t)rows || !rows || !columns) return INVALID_VALUE;
    *out = make(sizeof **out);
    **out = (layout){ type, rows, columns, column, 1, 0 };
    return SUCCESS;
}
API int cublasLtMatrixLayoutDestroy(layout *gone)
{
    free(gone);
    return SUCCESS;
}
API int cublasLtMatrixLayoutSetAttribute(layout *of, int what, const void *value, size_t bytes)
{
    if (what == 5 && bytes == 4) memcpy(&of->batches, value, bytes);
    else if (what == 6 && bytes == 8) memcpy(&of->batch, value, bytes);
    else return INVALID_VALUE;
    return SUCCESS;
}
API int cublasLtMatmulPreferenceCreate(preference **out)
{
    *out = make(sizeof **out);
    **out = (preference){ 0, 7, { 256, 256, 256, 256 } };
    return SUCCESS;
}
API int cublasLtMatmulPreferenceDestroy(preference *gone)
{
    free(gone);
    return SUCCESS;
}
API int cublasLtMatmulPreferenceSetAttribute(preference *of, int what, const void *value,
                                             size_t bytes)
{
    if (what == 1 && bytes == 8) memcpy(&of->workspace, value, bytes);
    else if (what == 3 && bytes == 4) memcpy(&of->reductions, value, bytes);
    else if (what >= 5 && what <= 8 && bytes == 4) memcpy(&of->align[what - 5], value, bytes);
    else return INVALID_VALUE;
    return SUCCESS;
}

static bool is_8_bits(int type) { return type == E4M3 || type == E5M2; }
static size_t size_of(int type) { return type == F32 ? 4 : is_8_bits(type) ? 1 : 2; }

/* What the library answers to operands of 8 bits: only one way of storing them, along k; multiples
 * of 16 everywhere; not two of E5M2; and no scale in the host's memory is known to it. */
static int answer_to_8_bits(const operation *of, const layout *a, const layout *b, const layout *d)
{
    uint64_t sizes = a->rows | a->columns | b->rows | b->columns | d->rows | d->columns;
    if (!is_8_bits(a->type) && !is_8_bits(b->type)) return SUCCESS;
    if (!of->transposed[0] || of->transposed[1] || a->batches > 1) return NOT_SUPPORTED;
    if ((sizes | (uint64_t)a->column | (uint64_t)b->column | (uint64_t)d->column) % 16)
        return NOT_SUPPORTED;
    if (of->epilogue != 1 && of->epilogue != BIAS) return NOT_SUPPORTED;
    if (!of->scales[0] || !of->scales[1]) return INVALID_VALUE;
    return a->type == E5M2 && b->type == E5M2 ? NOT_SUPPORTED : SUCCESS;
}

/* What a product of these layouts would be; false: they do not fit. */
static bool fits(const operation *of, const layout *a, const layout *b, const layout *d)
{
    uint64_t m = of->transposed[0] ? a->columns : a->rows,
             k = of->transposed[0] ? a->rows : a->columns;
    uint64_t n = of->transposed[1] ? b->rows : b->columns,
             l = of->transposed[1] ? b->columns : b->rows;
    if (of->compute == IN_TF32 && a->type != F32) return false;
    bool of_8_bits =
             is_8_bits(a->type) && is_8_bits(b->type) && (d->type == BF16 || d->type == F32),
         of_16_bits = a->type == b->type && (d->type == a->type || d->type == F32);
    return k == l && m == d->rows && n == d->columns && (of_8_bits || of_16_bits)
           && a->batches == b->batches && a->batches == d->batches;
}

static bool is_sum(uint32_t epilogue) { return epilogue == SUM_A || epilogue == SUM_B; }

/* What the library answers to an epilogue. Sums need rows or columns of the operand side by side.
 */
static int answer_to(const operation *of, const layout *d)
{
    uint32_t e = of->epilogue;
    bool has_gelu = (e & ~(uint32_t)BIAS) == (GELU | BESIDE) || e == (GELU_GRADIENT | BESIDE);
    if (e != 1 && e != BIAS && !has_gelu && !is_sum(e)) return NOT_SUPPORTED;
    if (has_gelu && (of->beside_column < (int64_t)d->rows || of->beside_column % 8))
        return INVALID_VALUE;
    if (has_gelu && ((uintptr_t)of->beside % 16)) return NOT_SUPPORTED;
    if ((has_gelu || is_sum(e)) && d->batches > 1) return NOT_SUPPORTED; /* no stride is given */
    if ((e == SUM_A && of->transposed[0]) || (e == SUM_B && !of->transposed[1]))
        return NOT_SUPPORTED;
    if (((e & BIAS) || is_sum(e)) && (uintptr_t)of->bias % 16) return NOT_SUPPORTED;
    if ((e & BIAS) && getenv("MOONSHARD_STAND_IN_CUBLASLT_NO_BIAS")) return NOT_SUPPORTED;
    if ((has_gelu || is_sum(e)) && getenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA"))
        return NOT_SUPPORTED;
    return SUCCESS;
}

API int cublasLtMatmulAlgoGetHeuristic(void *handle, const operation *of, const layout *a,
                                       const layout *b, const layout *c, const layout *d,
                                       const preference *wants, int wanted, candidate *out,
                                       int *found)
{
    (void)handle, (void)c;
    *found = 0;
    if (!fits(of, a, b, d) || wanted < 1) return INVALID_VALUE;
    if (wants->reductions & 1) wrong("sums in place, in no fixed order, were not excluded");
    if (wants->workspace < WORKSPACE) return NOT_SUPPORTED;
    int answer = answer_to(of, d);
    if (!answer) answer = answer_to_8_bits(of, a, b, d);
    for (int i = 0; i < 4 && !answer && is_8_bits(a->type); i++)
        if (wants->align[i] < 16) answer = NOT_SUPPORTED;
    if (answer) return answer;
    note("asks", wanted);
    for (; *found < wanted && *found < CANDIDATES; ++*found)
        out[*found] = (candidate){ .algorithm = { { MARK, wants->align[0], wants->align[1],
                                                    wants->align[3], (uint64_t)*found } },
                                   .workspace = WORKSPACE };
    return SUCCESS;
}

API int cublasLtMatmulAlgoCheck(void *handle, const operation *of, const layout *a, const layout *b,
                                const layout *c, const layout *d, const algorithm *how,
                                candidate *out)
{
    (void)handle, (void)c;
    if (!fits(of, a, b, d) || how->data[0] != MARK || how->data[4] >= CANDIDATES)
        return INVALID_VALUE;
    if (answer_to(of, d)) return answer_to(of, d);
    if (answer_to_8_bits(of, a, b, d)) return answer_to_8_bits(of, a, b, d);
    if ((int)how->data[4] == number_in("MOONSHARD_STAND_IN_CUBLASLT_REFUSES")) return NOT_SUPPORTED;
    *out = (candidate){ .workspace = WORKSPACE };
    return SUCCESS;
}
API int cublasLtMatmulAlgoConfigGetAttribute(const algorithm *of, int what, void *value,
                                             size_t bytes, size_t *written)
{
    if (what != 3 || bytes != 4) return INVALID_VALUE;
    memcpy(value, &of->data[5], bytes);
    *written = bytes;
    return SUCCESS;
}

/* --------------------------------------------------------------------- numbers */

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static float wide_f16(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31,
             fraction = bits & 1023;
    float size = exponent == 31 ? from_bits(0x7f800000u | fraction << 13)
                 : exponent     ? from_bits((exponent + 112) << 23 | fraction << 13)
                                : (float)fraction * 0x1p-24f;
    return sign ? -size : size;
}
/* By the definitions of the formats; 2 or 3 bits of fraction. */
static float wide_8(uint8_t bits, int type)
{
    int fractions = type == E4M3 ? 3 : 2, bias = type == E4M3 ? 7 : 15,
        exponent = (bits & 127) >> fractions, fraction = bits & ((1 << fractions) - 1);
    float size = exponent
                     ? ldexpf((float)((1 << fractions) + fraction), exponent - bias - fractions)
                     : ldexpf((float)fraction, 1 - bias - fractions);
    if (type == E4M3 ? (bits & 127) == 127 : (bits & 127) > 124) size = from_bits(0x7fc00000u);
    if (type == E5M2 && (bits & 127) == 124) size = from_bits(0x7f800000u);
    return bits & 128 ? -size : size;
}
static float load(const void *from, int64_t i, int type)
{
    if (type == F32) return ((const float *)from)[i];
    if (is_8_bits(type)) return wide_8(((const uint8_t *)from)[i], type);
    uint16_t bits = ((const uint16_t *)from)[i];
    return type == BF16 ? from_bits((uint32_t)bits << 16) : wide_f16(bits);
}
/* Rounds to nearest, ties to even. */
static uint16_t narrow_f16(float x)
{
    float size = x < 0 ? -x : x;
    uint16_t sign = x < 0 ? 0x8000 : 0;
    uint32_t bits;
    if (size != size) return 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint16_t)lrintf(size * 0x1p24f);
    memcpy(&bits, &size, sizeof bits);
    return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}
static void store(void *to, int64_t i, int type, float x)
{
    uint32_t bits;
    if (type == F32) {
        ((float *)to)[i] = x;
        return;
    }
    memcpy(&bits, &x, sizeof bits);
    if (type == F16) ((uint16_t *)to)[i] = narrow_f16(x);
    else if (x != x) ((uint16_t *)to)[i] = (uint16_t)(bits >> 16 | 64);
    else ((uint16_t *)to)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* -------------------------------------------------------------------- products */

typedef struct product {
    operation of;
    layout a, b, d;
    const void *from_a, *from_b;
    void *to;
    void *workspace;
    float alpha, beta;
    unsigned number;  /* of the candidate */
    bool is_captured; /* it runs again whenever its graph does */
    struct product *next;
} product;
static product *captured;

/* Of the tanh form: x times a sigmoid, which keeps its digits where it is far below 1. */
static float gelu(float x)
{
    double wide = (double)x;
    return (float)(wide / (1 + exp(-1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))));
}

/* The slope of the tanh form of gelu, by its definition. */
static float gelu_slope(float x)
{
    double wide = (double)x, root = 0.79788456080286536,
           t = tanh(root * (wide + 0.044715 * wide * wide * wide));
    return (float)((1 + t) / 2 + wide / 2 * (1 - t * t) * root * (1 + 3 * 0.044715 * wide * wide));
}

/* The sums over k of an operand. */
static void compute_sums(const product *p)
{
    const bool of_a = p->of.epilogue == SUM_A;
    const layout *at = of_a ? &p->a : &p->b;
    const void *from = of_a ? p->from_a : p->from_b;
    for (int64_t i = 0; i < (int64_t)at->rows; i++) {
        float sum = 0;
        for (int64_t k = 0; k < (int64_t)at->columns; k++) {
            int64_t j = p->number ? (int64_t)at->columns - 1 - k : k;
            sum += load(from, j * at->column + i, at->type);
        }
        store((void *)(uintptr_t)p->of.bias, i, p->d.type, sum);
    }
}

/* An operand's number as a product takes it: TF32 has 10 bits of f32's fraction. */
static float take(const product *p, const void *from, int64_t i, int type)
{
    uint32_t bits;
    float x = load(from, i, type);
    if (p->of.compute != IN_TF32) return x;
    memcpy(&bits, &x, sizeof bits);
    return from_bits(bits & ~UINT32_C(0x1fff));
}

/* The operands of one product: m numbers of `a` for each k, and k numbers of `b` for each of n. A
 * row of `a` has zeros after its end, up to a multiple of WIDE, by which sums are computed. */
enum { WIDE = 16 };
typedef struct operands {
    int64_t m, n, k, row;
    float *a, *b, *sums;
} operands;
static operands make_operands(const product *p)
{
    operands o = { .m = (int64_t)p->d.rows, .n = (int64_t)p->d.columns };
    o.k = (int64_t)(p->of.transposed[0] ? p->a.rows : p->a.columns);
    o.row = (o.m + WIDE - 1) / WIDE * WIDE;
    o.a = make((size_t)(o.k * o.row + 1) * sizeof(float));
    o.b = make((size_t)(o.k * o.n + 1) * sizeof(float));
    o.sums = make((size_t)o.row * sizeof(float));
    return o;
}
static void free_operands(const operands *o)
{
    free(o->a);
    free(o->b);
    free(o->sums);
}
/* In the order of memory. */
static void take_operands(const product *p, int64_t batch, operands *o)
{
    const layout *a = &p->a, *b = &p->b;
    for (int64_t column = 0; column < (int64_t)a->columns; column++)
        for (int64_t i = 0; i < (int64_t)a->rows; i++)
            o->a[p->of.transposed[0] ? i * o->row + column : column * o->row + i] =
                take(p, p->from_a, batch * a->batch + column * a->column + i, a->type);
    for (int64_t column = 0; column < (int64_t)b->columns; column++)
        for (int64_t i = 0; i < (int64_t)b->rows; i++)
            o->b[p->of.transposed[1] ? i * o->k + column : column * o->k + i] =
                take(p, p->from_b, batch * b->batch + column * b->column + i, b->type);
}

static void add_products(float *restrict sums, const float *restrict row, float factor, int64_t m)
{
    for (int64_t i = 0; i < m; i += WIDE)
        for (int w = 0; w < WIDE; w++) sums[i + w] += row[i + w] * factor;
}

/* One column of the result: d[:, column] = sum over k of a[:, k] b[k, column]. All candidates but
 * the first add from the last k on. */
static void compute_column(const product *p, int64_t batch, int64_t column, const operands *o)
{
    const layout *d = &p->d;
    memset(o->sums, 0, (size_t)o->row * sizeof *o->sums);
    for (int64_t term = 0; term < o->k; term++) {
        int64_t j = p->number ? o->k - 1 - term : term;
        add_products(o->sums, o->a + j * o->row, o->b[column * o->k + j], o->row);
    }
    for (int64_t i = 0; i < o->m; i++) {
        int64_t at = batch * d->batch + column * d->column + i;
        float x = p->alpha * o->sums[i];
        if (is_8_bits(p->a.type)) x = x * *p->of.scales[0] * *p->of.scales[1];
        if (p->beta != 0) x += p->beta * load(p->to, at, d->type);
        if (p->of.epilogue & BIAS) x += load(p->of.bias, i, d->type);
        if (p->of.epilogue & GELU) {
            store((void *)(uintptr_t)p->of.beside, column * p->of.beside_column + i, d->type, x);
            x = gelu(x);
        }
        if (p->of.epilogue & GELU_GRADIENT)
            x *= gelu_slope(load(p->of.beside, column * p->of.beside_column + i, d->type));
        store(p->to, at, d->type, x);
    }
}

typedef int launch_host(void *stream, void (*function)(void *), void *argument);
typedef int ask_stream(void *stream, int *answer);
static ask_stream *is_capturing;
typedef void touch_memory(const void *address, size_t bytes, bool writes);
typedef void pass_time(uint64_t ns);
static launch_host *launch;
static touch_memory *touch;
static pass_time *pass;

/* Of the stand-in driver, on whose streams products run. */
static void open_driver(void)
{
    void *driver = dlopen(getenv("MOONSHARD_CUDA_DRIVER"), RTLD_NOW);
    if (!driver) wrong("MOONSHARD_CUDA_DRIVER is not the stand-in driver");
    *(void **)&launch = dlsym(driver, "cuLaunchHostFunc");
    *(void **)&touch = dlsym(driver, "stand_in_touch");
    *(void **)&pass = dlsym(driver, "stand_in_pass");
    *(void **)&is_capturing = dlsym(driver, "cuStreamIsCapturing");
    if (!launch || !touch || !pass || !is_capturing) wrong("the driver is not the stand-in");
}

/* Ranks may be threads. */
static void find_driver(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, open_driver);
}

static void touch_matrix(const void *data, const layout *of, bool writes)
{
    size_t size = size_of(of->type);
    for (int64_t batch = 0; batch < of->batches; batch++)
        for (int64_t column = 0; column < (int64_t)of->columns; column++)
            touch((const char *)data + (size_t)(batch * of->batch + column * of->column) * size,
                  of->rows * size, writes);
}

static void touch_epilogue(const product *p)
{
    uint32_t e = p->of.epilogue;
    size_t size = p->d.type == F32 ? 4 : 2;
    const layout beside = { p->d.type, p->d.rows, p->d.columns, p->of.beside_column, 1, 0 };
    if (e & BIAS) touch(p->of.bias, p->d.rows * size, false);
    if (e & BESIDE) touch_matrix(p->of.beside, &beside, !(e & GELU_GRADIENT));
    if (is_sum(e)) touch(p->of.bias, (e == SUM_A ? p->d.rows : p->d.columns) * size, true);
}

static void compute(void *argument)
{
    product *p = argument;
    touch_matrix(p->from_a, &p->a, false);
    touch_matrix(p->from_b, &p->b, false);
    touch_matrix(p->to, &p->d, true);
    touch(p->workspace, WORKSPACE, true);
    touch_epilogue(p);
    for (int i = 0; i < 2 && is_8_bits(p->a.type); i++)
        touch(p->of.scales[i], sizeof *p->of.scales[i], false);
    operands o = make_operands(p);
    memset(p->workspace, 0x5a, WORKSPACE);
    for (int64_t batch = 0; batch < p->d.batches; batch++) {
        take_operands(p, batch, &o);
        for (int64_t column = 0; column < o.n; column++) compute_column(p, batch, column, &o);
    }
    if (is_sum(p->of.epilogue)) compute_sums(p);
    free_operands(&o);
    int fast = number_in("MOONSHARD_STAND_IN_CUBLASLT_FAST");
    if (fast >= 0 && (int)p->number != fast) pass(UINT64_C(1000000000));
    if (!p->is_captured) free(p);
}

static void check_aligned(const void *address, uint64_t bytes, const char *what)
{
    if ((uintptr_t)address % bytes) wrong(what);
}

API int cublasLtMatmul(void *handle, const operation *of, const float *alpha, const void *from_a,
                       const layout *a, const void *from_b, const layout *b, const float *beta,
                       const void *from_c, const layout *c, void *to, const layout *d,
                       const algorithm *how, void *workspace, size_t bytes, void *stream)
{
    (void)handle;
    if (!fits(of, a, b, d)) return INVALID_VALUE;
    if (from_c != to || c != d) return NOT_SUPPORTED;
    if (how->data[0] != MARK) wrong("the algorithm was not chosen by the library");
    if (bytes < WORKSPACE) wrong("the workspace is smaller than the algorithm's");
    check_aligned(workspace, 256, "the workspace is not aligned");
    check_aligned(from_a, how->data[1], "operand a is not aligned as it was said");
    check_aligned(from_b, how->data[2], "operand b is not aligned as it was said");
    check_aligned(to, how->data[3], "the result is not aligned as it was said");
    int refused = answer_to(of, d);
    if (!refused) refused = answer_to_8_bits(of, a, b, d);
    if (refused) return refused;
    if (is_8_bits(a->type)) {
        check_aligned(from_a, 16, "operand a of 8 bits is not aligned");
        check_aligned(from_b, 16, "operand b of 8 bits is not aligned");
        check_aligned(to, 16, "the result of 8 bits is not aligned");
        if ((uintptr_t)of->scales[0] <= 16 || (uintptr_t)of->scales[1] <= 16)
            wrong("the operands of 8 bits have no scales");
    }
    if (of->epilogue & BIAS || is_sum(of->epilogue))
        check_aligned(of->bias, 16, "the bias is not aligned");
    if (((of->epilogue & BIAS || is_sum(of->epilogue)) && (uintptr_t)of->bias <= 16)
        || (of->epilogue & BESIDE && (uintptr_t)of->beside <= 16))
        wrong("the epilogue has no memory");
    product *p = make(sizeof *p);
    int answer = 0;
    find_driver();
    note("uses", (int)how->data[4]);
    (void)is_capturing(stream, &answer);
    *p = (product){ .of = *of,
                    .a = *a,
                    .b = *b,
                    .d = *d,
                    .from_a = from_a,
                    .from_b = from_b,
                    .to = to,
                    .workspace = workspace,
                    .alpha = *alpha,
                    .beta = *beta,
                    .number = (unsigned)how->data[4],
                    .is_captured = answer != 0 };
    if (answer) {
        p->next = captured;
        captured = p;
    }
    return launch(stream, compute, p);
}
