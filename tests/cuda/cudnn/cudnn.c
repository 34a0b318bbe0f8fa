/* cudnn.c: a stand-in for cuDNN, which cannot be opened without a GPU. It carries out graphs of
 * operations one by one, as work of the stand-in driver's streams: it knows operations and not
 * attention, so a wrong graph gives wrong values. What cuDNN would refuse is an error of the call;
 * what would be nonsense ends the process with a message.
 *
 * It names three configurations. The first one is noted as nondeterministic, the second one has no
 * workspace for what backward keeps; both end the process when they are executed, unless the graph
 * brings memory for sums of f32: a product adds to what is there. */
#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The prototypes are those of cudnn_graph.h, which it does without. */
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_INITIALIZED = 1001, BAD = 2000, NOT_FINAL = 2004, NOT_SUPPORTED = 3000 };
/* Kinds, types, attributes, dtypes and modes: the numbers of cudnn_graph.h. */
enum {
    ENGINE = 2,
    CONFIGURATION = 3,
    HEURISTICS = 4,
    PLAN = 5,
    POINTWISE = 13,
    GRAPH = 15,
    PACK = 16,
    TENSOR = 17,
    MATMUL = 19,
    REDUCTION = 22,
    RESHAPE = 31,
    DEVICE = 38
};
enum { TYPE_INTEGER = 3, TYPE_DESCRIPTOR = 15 };
enum { F32 = 0, F16 = 2, I32 = 4, BF16 = 9, BOOL = 11 };

static void __attribute__((noreturn)) wrong(const char *what)
{
    fprintf(stderr, "stand-in for cuDNN: %s\n", what);
    abort();
}
static void *make(size_t bytes)
{
    void *made = calloc(1, bytes ? bytes : 1);
    if (!made) abort();
    return made;
}

/* ------------------------------------------------------------------- descriptors */

typedef struct attribute {
    int name, type;
    int64_t count;
    void *data;
} attribute;
typedef struct descriptor {
    int kind;
    bool is_final;
    attribute attributes[12];
    int used;
    /* Of what the library makes itself. */
    const struct descriptor *graph;
    int number; /* of a configuration */
} descriptor;

static size_t size_of(int type)
{
    switch (type) {
    case 0:            /* a handle */
    case 3:            /* an integer */
    case 6:            /* an address */
    case 15: return 8; /* a descriptor */
    case 2:            /* a boolean */
    case 24: return 1; /* text */
    default: return 4;
    }
}
static const attribute *find(const descriptor *d, int name)
{
    for (int i = 0; i < d->used; i++)
        if (d->attributes[i].name == name) return &d->attributes[i];
    return NULL;
}
static const attribute *need(const descriptor *d, int name)
{
    const attribute *found = find(d, name);
    if (!found) wrong("an attribute is not there");
    return found;
}
static int number_of(const descriptor *d, int name) { return *(const int *)need(d, name)->data; }
static const descriptor *one_of(const descriptor *d, int name)
{
    const attribute *found = find(d, name);
    return found ? *(descriptor *const *)found->data : NULL;
}

API int cudnnBackendCreateDescriptor(int kind, void **out)
{
    descriptor *made = make(sizeof *made);
    made->kind = kind;
    *out = made;
    return SUCCESS;
}
API int cudnnBackendDestroyDescriptor(void *gone)
{
    descriptor *d = gone;
    for (int i = 0; i < d->used; i++) free(d->attributes[i].data);
    free(d);
    return SUCCESS;
}
API int cudnnBackendSetAttribute(void *of, int name, int type, int64_t count, const void *value)
{
    descriptor *d = of;
    if (d->is_final || find(d, name) || d->used == 12 || count < 1) return BAD;
    if (type == TYPE_DESCRIPTOR)
        for (int64_t i = 0; i < count; i++)
            if (!((descriptor *const *)value)[i]->is_final && d->kind != CONFIGURATION)
                return NOT_FINAL;
    void *data = make((size_t)count * size_of(type));
    memcpy(data, value, (size_t)count * size_of(type));
    d->attributes[d->used++] = (attribute){ name, type, count, data };
    return SUCCESS;
}

/* --------------------------------------------------------------------- tensors */

typedef struct tensor {
    const descriptor *of;
    int64_t shape[4], strides[4], number;
    int dtype;
    bool is_virtual, is_value;
} tensor;

static tensor tensor_of(const descriptor *of)
{
    tensor t = { .of = of, .dtype = number_of(of, 901) };
    memcpy(t.shape, need(of, 902)->data, sizeof t.shape);
    memcpy(t.strides, need(of, 903)->data, sizeof t.strides);
    t.number = *(const int64_t *)need(of, 906)->data;
    const attribute *is_virtual = find(of, 907), *is_value = find(of, 908);
    t.is_virtual = is_virtual && *(const bool *)is_virtual->data;
    t.is_value = is_value && *(const bool *)is_value->data;
    return t;
}

/* Only backward sees matrices from the other side. */
static bool is_backward(const descriptor *graph)
{
    const attribute *operations = need(graph, 801);
    for (int64_t i = 0; i < operations->count; i++)
        if (((descriptor *const *)operations->data)[i]->kind == RESHAPE) return true;
    return false;
}
static int64_t elements(const tensor *t)
{
    return t->shape[0] * t->shape[1] * t->shape[2] * t->shape[3];
}
/* Whether a product adds to memory of the caller. */
static bool is_sum(const descriptor *operation)
{
    if (operation->kind != MATMUL) return false;
    tensor c = tensor_of(one_of(operation, 1522));
    const attribute *order = find(c.of, 909);
    if (c.is_virtual || c.dtype != F32) return false;
    if (!order || *(const int *)order->data != 2) wrong("sums are not in tiles");
    if (c.shape[2] % 64 != 0) wrong("sums of this many rows are not certain to fit");
    return true;
}
static bool has_sums(const descriptor *graph)
{
    const attribute *operations = need(graph, 801);
    for (int64_t i = 0; i < operations->count; i++)
        if (is_sum(((descriptor *const *)operations->data)[i])) return true;
    return false;
}
/* What backward keeps in 16 bits: the scores, in tiles of 64 by 64, and what is summed over heads.
 */
static int64_t kept_bytes(const descriptor *graph)
{
    const attribute *operations = need(graph, 801);
    int64_t scores = 0, heads = 0;
    if (!is_backward(graph) || has_sums(graph)) return 0;
    for (int64_t i = 0; i < operations->count; i++) {
        const descriptor *operation = ((descriptor *const *)operations->data)[i];
        if (operation->kind == POINTWISE) {
            tensor y = tensor_of(one_of(operation, 753));
            for (int d = 2; d < 4; d++)
                if (y.shape[d] > 1) y.shape[d] = (y.shape[d] + 63) / 64 * 64;
            if (y.is_virtual && y.dtype != F32 && elements(&y) * 2 > scores)
                scores = elements(&y) * 2;
        } else if (operation->kind == REDUCTION) {
            tensor x = tensor_of(one_of(operation, 1610));
            if (x.dtype != F32) heads += elements(&x) * 2;
        }
    }
    return scores + heads;
}
enum { EXTRA = 512 };

/* As cuDNN, it takes widths that are multiples of 8, up to 256. */
static bool takes(const descriptor *graph)
{
    const attribute *operations = need(graph, 801);
    const char *refuses = getenv("MOONSHARD_STAND_IN_CUDNN");
    if (refuses && strcmp(refuses, "refuses") == 0) return false;
    if (refuses && strcmp(refuses, "is slow") == 0 && has_sums(graph)) return false;
    for (int64_t i = 0; i < operations->count; i++) {
        const descriptor *operation = ((descriptor *const *)operations->data)[i];
        if (operation->kind != MATMUL) continue;
        tensor a = tensor_of(one_of(operation, 1520));
        if (a.is_virtual) continue;
        return a.shape[3] % 8 == 0 && a.shape[3] <= 256;
    }
    return false;
}

static bool has_all(const descriptor *d)
{
    static const struct {
        int kind, attributes[4];
    } rows[] = { { HEURISTICS, { 200, 201 } },     { PLAN, { 400, 401 } },
                 { POINTWISE, { 750, 751, 753 } }, { GRAPH, { 800, 801 } },
                 { PACK, { 1000, 1001, 1003 } },   { TENSOR, { 901, 902, 903, 906 } },
                 { MATMUL, { 1520, 1521, 1522 } }, { REDUCTION, { 1610, 1611, 1612 } },
                 { RESHAPE, { 2200, 2201 } } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int j = 0; j < 4 && rows[i].kind == d->kind; j++)
            if (rows[i].attributes[j] && !find(d, rows[i].attributes[j])) return false;
    return d->kind != DEVICE;
}
API int cudnnBackendFinalize(void *of)
{
    descriptor *d = of;
    if (d->is_final || !has_all(d)) return BAD;
    if (d->kind == PLAN) {
        const descriptor *configuration = one_of(d, 401);
        d->graph = configuration->graph;
        d->number = configuration->number;
    }
    d->is_final = true;
    return SUCCESS;
}

static int give_configurations(const descriptor *list, int64_t room, int64_t *count, void **out)
{
    const descriptor *graph = one_of(list, 201);
    *count = 0;
    if (number_of(list, 200) != 3 || !takes(graph)) return SUCCESS;
    for (; *count < 3 && *count < room; ++*count) {
        descriptor *one = out[*count];
        if (one->kind != CONFIGURATION) return BAD;
        one->graph = graph;
        one->number = (int)*count;
        one->is_final = true;
    }
    return SUCCESS;
}
API int cudnnBackendGetAttribute(void *of, int name, int type, int64_t room, int64_t *count,
                                 void *out)
{
    const descriptor *d = of;
    (void)type;
    if (!d->is_final) return NOT_FINAL;
    if (d->kind == HEURISTICS && name == 202) return give_configurations(d, room, count, out);
    *count = 1;
    if (d->kind == CONFIGURATION && name == 300) {
        descriptor *engine = *(descriptor **)out;
        engine->number = d->number;
        engine->is_final = true;
    } else if (d->kind == ENGINE && name == 1303) {
        *(int *)out = d->number == 0 ? 4 : 0;
    } else if (d->kind == PLAN && name == 402) {
        int64_t bytes = EXTRA + (d->number == 2 ? kept_bytes(d->graph) : 0);
        memcpy(out, &bytes, sizeof bytes);
    } else return BAD;
    return SUCCESS;
}

/* ----------------------------------------------------------------------- values */

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static float widen(uint16_t bits, int dtype)
{
    if (dtype == BF16) return from_bits((uint32_t)bits << 16);
    uint32_t exponent = bits >> 10 & 31, fraction = bits & 1023;
    float x = exponent == 0    ? (float)fraction * 0x1p-24f
              : exponent == 31 ? from_bits(0x7f800000u | fraction << 13)
                               : from_bits((exponent + 112) << 23 | fraction << 13);
    return bits >> 15 ? -x : x;
}
/* To the nearest, ties to even. */
static uint16_t narrow(float x, int dtype)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (dtype == BF16) {
        if (x != x) return 0x7fc0;
        return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    float size = fabsf(x);
    if (x != x) return 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 0x1p-14f) return sign | (uint16_t)lrintf(size * 0x1p24f);
    bits &= 0x7fffffffu;
    return sign | (uint16_t)((bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13);
}

/* Where values of a tensor are: memory of the GPU, or, of a virtual one, an array of f32. */
typedef struct value {
    int64_t number;
    char *memory;
    float *array;
    int array_dtype; /* its values are rounded to it */
} value;
typedef struct job {
    const descriptor *graph;
    value values[96];
    int count;
    void *workspace;
    size_t workspace_bytes;
    int given; /* so many values are the caller's, and stay for a replay */
    bool is_captured;
    struct job *next; /* of those that are captured */
} job;
static job *captured;

static float rounded(float x, int dtype)
{
    return dtype == BF16 || dtype == F16 ? widen(narrow(x, dtype), dtype) : x;
}
static int64_t extent(const tensor *t)
{
    int64_t last = 0;
    for (int d = 0; d < 4; d++) last += (t->shape[d] - 1) * t->strides[d];
    return last + 1;
}
static value *value_of(job *j, const tensor *t)
{
    for (int i = 0; i < j->count; i++)
        if (j->values[i].number == t->number) return &j->values[i];
    if (!t->is_virtual) wrong("a tensor has no address");
    if (j->count == 96) wrong("too many tensors");
    value *made = &j->values[j->count++];
    *made = (value){ .number = t->number, .array_dtype = t->dtype };
    made->array = make((size_t)extent(t) * sizeof(float));
    return made;
}
/* A dimension of one element is that of all; heads of a group share one. */
static int64_t place_in(const tensor *t, int d, int64_t at, const int64_t of[4])
{
    return (t->shape[d] == of[d] ? at : at / (of[d] / t->shape[d])) * t->strides[d];
}
static int64_t place(const tensor *t, const int64_t at[4], const int64_t of[4])
{
    int64_t offset = 0;
    for (int d = 0; d < 4; d++) offset += place_in(t, d, at[d], of);
    return offset;
}
/* Between neighbours in the last dimension, which is all of it or one for all. */
static int64_t step_of(const tensor *t, const int64_t of[4])
{
    if (t->shape[3] != of[3] && t->shape[3] != 1) wrong("the last dimension is shared in parts");
    return t->shape[3] == of[3] ? t->strides[3] : 0;
}
static float read(const value *v, const tensor *t, int64_t at)
{
    if (v->array) return rounded(v->array[at], t->dtype);
    if (t->dtype == F32) return ((const float *)(const void *)v->memory)[at];
    if (t->dtype == I32) return (float)((const int32_t *)(const void *)v->memory)[at];
    return widen(((const uint16_t *)(const void *)v->memory)[at], t->dtype);
}
static void write(const value *v, const tensor *t, int64_t at, float x)
{
    if (v->array) v->array[at] = rounded(x, t->dtype);
    else if (t->dtype == F32) ((float *)(void *)v->memory)[at] = x;
    else ((uint16_t *)(void *)v->memory)[at] = narrow(x, t->dtype);
}
/* Rows are of the last dimension. */
#define EACH_ROW(at, shape)                                  \
    for (int64_t at[4] = { 0 }; at[0] < (shape)[0]; at[0]++) \
        for (at[1] = 0; at[1] < (shape)[1]; at[1]++)         \
            for (at[2] = 0; at[2] < (shape)[2]; at[2]++)
#define EACH(at, shape)                                      \
    for (int64_t at[4] = { 0 }; at[0] < (shape)[0]; at[0]++) \
        for (at[1] = 0; at[1] < (shape)[1]; at[1]++)         \
            for (at[2] = 0; at[2] < (shape)[2]; at[2]++)     \
                for (at[3] = 0; at[3] < (shape)[3]; at[3]++)

/* ------------------------------------------------------------------- operations */

static float function(int mode, float x, float b, float t)
{
    switch (mode) {
    case 0: return x + b;
    case 1: return x * b;
    case 6: return x / b;
    case 9: return x - b;
    case 13: return expf(x);
    case 15: return logf(x);
    case 21: return x;
    case 303: return x >= b;
    case 601: return t != 0 ? x : b;
    default: wrong("a function that it does not know");
    }
}
static void run_pointwise(job *j, const descriptor *operation)
{
    const descriptor *how = one_of(operation, 750), *second = one_of(operation, 752),
                     *third = one_of(operation, 758);
    int mode = number_of(how, 0);
    tensor x = tensor_of(one_of(operation, 751)), y = tensor_of(one_of(operation, 753)),
           b = second ? tensor_of(second) : x, t = third ? tensor_of(third) : x;
    const value *from = value_of(j, &x), *other = value_of(j, &b), *last = value_of(j, &t),
                *to = value_of(j, &y);
    int64_t axis = mode == 501 ? *(const int64_t *)need(how, 9)->data : 0,
            x_step = step_of(&x, y.shape), b_step = step_of(&b, y.shape),
            t_step = step_of(&t, y.shape), y_step = step_of(&y, y.shape);
    EACH_ROW(at, y.shape)
    {
        int64_t x_at = place(&x, at, y.shape), b_at = place(&b, at, y.shape),
                t_at = place(&t, at, y.shape), y_at = place(&y, at, y.shape);
        for (int64_t i = 0; i < y.shape[3]; i++) {
            float result = mode == 501 ? (float)(axis == 3 ? i : at[axis])
                                       : function(mode, read(from, &x, x_at + i * x_step),
                                                  read(other, &b, b_at + i * b_step),
                                                  read(last, &t, t_at + i * t_step));
            write(to, &y, y_at + i * y_step, result);
        }
    }
}
/* The matrix of these two outer positions, row after row. */
static void take_matrix(const value *from, const tensor *t, int64_t offset, double *out)
{
    for (int64_t row = 0; row < t->shape[2]; row++)
        for (int64_t i = 0; i < t->shape[3]; i++)
            *out++ = (double)read(from, t, offset + row * t->strides[2] + i * t->strides[3]);
}
/* Each sum begins with the first k. */
static void multiply(const double *a, const double *b, double *restrict sums, const int64_t of[2],
                     int64_t terms)
{
    memset(sums, 0, (size_t)(of[0] * of[1]) * sizeof *sums);
    for (int64_t row = 0; row < of[0]; row++, sums += of[1])
        for (int64_t k = 0; k < terms; k++) {
            const double factor = a[row * terms + k], *restrict from = b + k * of[1];
            for (int64_t i = 0; i < of[1]; i++) sums[i] += factor * from[i];
        }
}
static void run_matmul(job *j, const descriptor *operation)
{
    tensor a = tensor_of(one_of(operation, 1520)), b = tensor_of(one_of(operation, 1521)),
           c = tensor_of(one_of(operation, 1522));
    const value *left = value_of(j, &a), *right = value_of(j, &b), *to = value_of(j, &c);
    if (a.shape[3] != b.shape[2] || a.shape[2] != c.shape[2] || b.shape[3] != c.shape[3])
        wrong("shapes of a product do not fit");
    if (a.dtype == F32 || b.dtype == F32) wrong("a product takes operands of 16 bits");
    bool adds = is_sum(operation);
    int64_t matrices[4] = { c.shape[0], c.shape[1], 1, 1 }, k = a.shape[3];
    double *rows = make((size_t)(c.shape[2] * k) * sizeof *rows),
           *columns = make((size_t)(k * c.shape[3]) * sizeof *columns),
           *sums = make((size_t)(c.shape[2] * c.shape[3]) * sizeof *sums);
    EACH(at, matrices)
    {
        int64_t of_a = place_in(&a, 0, at[0], c.shape) + place_in(&a, 1, at[1], c.shape),
                of_b = place_in(&b, 0, at[0], c.shape) + place_in(&b, 1, at[1], c.shape),
                of_c = at[0] * c.strides[0] + at[1] * c.strides[1];
        take_matrix(left, &a, of_a, rows);
        take_matrix(right, &b, of_b, columns);
        multiply(rows, columns, sums, &c.shape[2], k);
        for (int64_t row = 0; row < c.shape[2]; row++)
            for (int64_t i = 0; i < c.shape[3]; i++) {
                int64_t offset = of_c + row * c.strides[2] + i * c.strides[3];
                double sum = sums[row * c.shape[3] + i];
                if (adds) sum += (double)read(to, &c, offset);
                write(to, &c, offset, (float)sum);
            }
    }
    free(rows);
    free(columns);
    free(sums);
}
static void run_reduction(job *j, const descriptor *operation)
{
    int mode = number_of(one_of(operation, 1612), 1600);
    tensor x = tensor_of(one_of(operation, 1610)), y = tensor_of(one_of(operation, 1611));
    const value *from = value_of(j, &x), *to = value_of(j, &y);
    int64_t each[4];
    for (int d = 0; d < 4; d++) each[d] = x.shape[d] / y.shape[d];
    EACH(at, y.shape)
    {
        double sum = mode == 3 ? -INFINITY : 0;
        EACH_ROW(in, each)
        {
            int64_t whole[4];
            for (int d = 0; d < 4; d++) whole[d] = at[d] * each[d] + in[d];
            int64_t offset = place(&x, whole, x.shape);
            for (int64_t i = 0; i < each[3]; i++) {
                float one = read(from, &x, offset + i * x.strides[3]);
                sum = mode == 3 ? fmax(sum, one) : sum + (double)one;
            }
        }
        write(to, &y, place(&y, at, y.shape), (float)sum);
    }
}
/* The same memory with other strides. */
static void run_reshape(job *j, const descriptor *operation)
{
    tensor x = tensor_of(one_of(operation, 2200)), y = tensor_of(one_of(operation, 2201));
    const value from = *value_of(j, &x);
    if (extent(&x) != extent(&y)) wrong("a tensor is seen as one of another size");
    const value *to = value_of(j, &y);
    EACH(at, y.shape)
    {
        int64_t offset = place(&y, at, y.shape);
        write(to, &y, offset, read(&from, &x, offset));
    }
}

typedef int launch_host(void *stream, void (*function)(void *), void *argument);
typedef void touch_memory(const void *address, size_t bytes, bool writes);
typedef int ask_stream(void *stream, int *answer);
static launch_host *launch;
static touch_memory *touch;
static ask_stream *is_capturing;

/* Of the stand-in driver, on whose streams graphs run. */
static void find_driver(void)
{
    const char *path = getenv("MOONSHARD_CUDA_DRIVER");
    void *driver = path ? dlopen(path, RTLD_NOW) : NULL;
    if (launch) return;
    if (!driver) wrong("MOONSHARD_CUDA_DRIVER is not the stand-in driver");
    *(void **)&launch = dlsym(driver, "cuLaunchHostFunc");
    *(void **)&touch = dlsym(driver, "stand_in_touch");
    *(void **)&is_capturing = dlsym(driver, "cuStreamIsCapturing");
    if (!launch || !touch || !is_capturing) wrong("the driver is not the stand-in");
}

static void touch_tensor(job *j, const descriptor *of, bool writes)
{
    if (!of) return;
    tensor t = tensor_of(of);
    if (t.is_virtual || t.is_value) return;
    const value *v = value_of(j, &t);
    size_t size = t.dtype == F32 ? 4 : 2;
    bool is_dense = t.strides[3] == 1;
    EACH_ROW(at, t.shape)
    {
        const char *row = v->memory + place(&t, at, t.shape) * (int64_t)size;
        if (is_dense) touch(row, (size_t)t.shape[3] * size, writes);
        for (int64_t i = 0; i < t.shape[3] && !is_dense; i++)
            touch(row + i * t.strides[3] * (int64_t)size, size, writes);
    }
}
static void touch_all(job *j, const descriptor *operation)
{
    static const int reads[] = { 751, 752, 758, 1520, 1521, 1610, 2200 },
                     writes[] = { 753, 1522, 1611 };
    for (size_t i = 0; i < sizeof reads / sizeof *reads; i++)
        touch_tensor(j, one_of(operation, reads[i]), false);
    for (size_t i = 0; i < sizeof writes / sizeof *writes; i++)
        touch_tensor(j, one_of(operation, writes[i]), true);
}

static void compute(void *argument)
{
    job *j = argument;
    const attribute *operations = need(j->graph, 801);
    touch(j->workspace, j->workspace_bytes, true);
    memset(j->workspace, 0x5a, j->workspace_bytes);
    for (int64_t i = 0; i < operations->count; i++) {
        const descriptor *operation = ((descriptor *const *)operations->data)[i];
        touch_all(j, operation);
        if (operation->kind == POINTWISE) run_pointwise(j, operation);
        else if (operation->kind == MATMUL) run_matmul(j, operation);
        else if (operation->kind == REDUCTION) run_reduction(j, operation);
        else if (operation->kind == RESHAPE) run_reshape(j, operation);
        else wrong("an operation that it does not know");
    }
    for (int i = j->given; i < j->count; i++) free(j->values[i].array);
    j->count = j->given;
    if (j->is_captured) return;
    for (int i = 0; i < j->count; i++) free(j->values[i].array);
    free(j);
}

/* -------------------------------------------------------------------- execution */

static void *stream_of_handle;

API int cudnnCreate(void **out)
{
    const char *refuses = getenv("MOONSHARD_STAND_IN_CUDNN");
    *out = NULL;
    if (refuses && strcmp(refuses, "broken") == 0) return NOT_INITIALIZED;
    *out = make(1);
    return SUCCESS;
}
API int cudnnDestroy(void *handle)
{
    free(handle);
    return SUCCESS;
}
API int cudnnSetStream(void *handle, void *stream)
{
    (void)handle;
    stream_of_handle = stream;
    return SUCCESS;
}
API size_t cudnnGetVersion(void)
{
    const char *version = getenv("MOONSHARD_STAND_IN_CUDNN_VERSION");
    return version ? strtoull(version, NULL, 10) : 91900;
}
API const char *cudnnGetErrorString(int result)
{
    return result == NOT_INITIALIZED ? "CUDNN_STATUS_NOT_INITIALIZED" : "CUDNN_STATUS_BAD_PARAM";
}
API void cudnnGetLastErrorString(char *text, size_t bytes)
{
    snprintf(text, bytes, "the stand-in says no");
}

/* Values that are passed by the host are read now. */
static void take_value(job *j, const tensor *t)
{
    for (int i = 0; i < j->count; i++) {
        value *v = &j->values[i];
        if (v->number != t->number) continue;
        if (t->is_value && v->memory) {
            float *copy = make(sizeof *copy);
            *copy = read(v, t, 0);
            v->array = copy;
            v->memory = NULL;
        } else if (v->memory && (uintptr_t)v->memory % 16 != 0)
            wrong("an address is not aligned to 16 bytes");
        return;
    }
}
API int cudnnBackendExecute(void *handle, const void *of_plan, const void *of_pack)
{
    (void)handle;
    const descriptor *plan = of_plan, *pack = of_pack;
    const char *fails = getenv("MOONSHARD_STAND_IN_CUDNN");
    if (fails && strcmp(fails, "fails") == 0) return BAD;
    if (!plan->is_final || !pack->is_final) return NOT_FINAL;
    if (!has_sums(plan->graph)
        && (plan->number == 0 || (plan->number == 1 && is_backward(plan->graph))))
        wrong("a configuration that does not repeat its bits is executed");
    const attribute *numbers = need(pack, 1000), *addresses = need(pack, 1001),
                    *operations = need(plan->graph, 801);
    if (numbers->count != addresses->count) return BAD;
    job *j = make(sizeof *j);
    j->graph = plan->graph;
    memcpy(&j->workspace, need(pack, 1003)->data, sizeof j->workspace);
    j->workspace_bytes = (size_t)(EXTRA + kept_bytes(plan->graph));
    if ((uintptr_t)j->workspace % 256 != 0) wrong("the workspace is not aligned");
    for (int64_t i = 0; i < numbers->count; i++)
        j->values[j->count++] = (value){ .number = ((const int64_t *)numbers->data)[i],
                                         .memory = ((char *const *)addresses->data)[i] };
    for (int64_t i = 0; i < operations->count; i++) {
        const descriptor *operation = ((descriptor *const *)operations->data)[i];
        for (int k = 0; k < operation->used; k++) {
            const descriptor *one = operation->attributes[k].type == TYPE_DESCRIPTOR
                                        ? *(descriptor *const *)operation->attributes[k].data
                                        : NULL;
            if (!one || one->kind != TENSOR) continue;
            tensor t = tensor_of(one);
            take_value(j, &t);
        }
    }
    find_driver();
    j->given = j->count;
    int is_captured = 0;
    (void)is_capturing(stream_of_handle, &is_captured);
    j->is_captured = is_captured;
    if (is_captured) {
        j->next = captured;
        captured = j;
    }
    return launch(stream_of_handle, compute, j);
}
