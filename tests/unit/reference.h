/* reference.h: an operator against a plain computation in f64: values, gradients, and the same bits
 * on one, two and three threads.
 *
 * A test gives the reference as a function from inputs to outputs. Gradients are checked against
 * differences of that function, whose own error is below 1e-8: element by element where there are
 * few, else along random directions, in which a wrong element shows. */
#ifndef MOONSHARD_TESTS_REFERENCE_H
#define MOONSHARD_TESTS_REFERENCE_H

#include "late_device.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "exec/poison.h"
#include "fault_os.h"
#include "moonshard/ops.h"
#include "ranges.h"
#include "tensor/op.h"
#include "tensor/state.h"

enum { TENSORS = 5, PLAIN = 0, SWAPPED = 1, SPREAD = 2 };

/* An input or output: its values in f64, of which a tensor is made in dtype. */
typedef struct operand {
    ms_dtype dtype;
    uint32_t dims;
    int64_t shape[MS_DIMS_MAX];
    /* SWAPPED: the last two dimensions change places in memory; SPREAD: rows are apart */
    int layout;
    int64_t start;         /* elements between the begin of its memory and its first one */
    double low, high;      /* random values; both 0: -1 .. 1 */
    bool absent, constant; /* not given; gets no gradient */
    double *values;
} operand;

typedef struct check {
    const ms_op *op;
    ms_attributes attributes;
    operand in[TENSORS], out[TENSORS];
    uint32_t ins, outs;
    void (*reference)(const struct check *check); /* fills values of `out` from those of `in` */
    double tolerance;  /* max error / max value; 0: by the dtype of the first input */
    ms_dtype autocast; /* MS_F32: off */
    const char *cpu;   /* cap; NULL: MOONSHARD_CPU, or none */
    bool varies;       /* the bits need not be those of the run before, only the values */
} check;

/* The call runs under autocast, where results have its dtype (products, attention). */
static inline void set_autocast(check *c, ms_dtype dtype)
{
    c->autocast = dtype;
    for (uint32_t i = 0; i < c->outs && dtype != MS_F32; i++) c->out[i].dtype = dtype;
}

static inline size_t count_of(const operand *o)
{
    size_t count = 1;
    for (uint32_t d = 0; d < o->dims; d++) count *= (size_t)o->shape[d];
    return count;
}

/* -1 .. 1, the same sequence for every test. */
static inline double draw(uint64_t *state)
{
    uint32_t out[4];
    ms_philox(7, 0, (*state)++, out);
    return (double)out[0] / 2147483648.0 - 1.0;
}

static inline double rounded(ms_dtype dtype, double value)
{
    if (dtype == MS_F32) return (float)value;
    if (dtype == MS_BF16) return ms_float_from_bf16(ms_bf16_from_float((float)value));
    if (dtype == MS_F16) return ms_float_from_f16(ms_f16_from_float((float)value));
    return value;
}

static inline void to_bytes(ms_dtype dtype, const double *values, size_t count, void *bytes)
{
    for (size_t i = 0; i < count; i++) {
        if (dtype == MS_F32) ((float *)bytes)[i] = (float)values[i];
        else if (dtype == MS_BF16) ((uint16_t *)bytes)[i] = ms_bf16_from_float((float)values[i]);
        else if (dtype == MS_F16) ((uint16_t *)bytes)[i] = ms_f16_from_float((float)values[i]);
        else if (dtype == MS_I64) ((int64_t *)bytes)[i] = (int64_t)values[i];
        else if (dtype == MS_I32) ((int32_t *)bytes)[i] = (int32_t)values[i];
        else ((uint16_t *)bytes)[i] = (uint16_t)values[i];
    }
}

static inline void from_bytes(ms_dtype dtype, const void *bytes, size_t count, double *values)
{
    for (size_t i = 0; i < count; i++) {
        if (dtype == MS_F32) values[i] = ((const float *)bytes)[i];
        else if (dtype == MS_BF16) values[i] = ms_float_from_bf16(((const uint16_t *)bytes)[i]);
        else if (dtype == MS_F16) values[i] = ms_float_from_f16(((const uint16_t *)bytes)[i]);
        else values[i] = (double)((const int64_t *)bytes)[i];
    }
}

/* ------------------------------------------------------------------ engines */

#define OK(call) assert_true_message((call) == MS_OK, ms_engine_error(engine)->message)
#define assert_true_message(condition, message)                    \
    do {                                                           \
        if (!(condition)) fail_msg("%s: %s", #condition, message); \
    } while (0)

static inline ms_engine *engine_on(const ms_os *os, uint32_t threads, const char *cpu)
{
    ms_engine_options options = { .os = os,
                                  .own_device = late_device(NULL),
                                  .threads = threads,
                                  .strict = true,
                                  .memory_bytes = (uint64_t)1 << 30,
                                  .cpu = cpu ? cpu : getenv("MOONSHARD_CPU") };
    ms_error error;
    ms_engine *engine = NULL;
    if (ms_engine_new(&options, &error, &engine) != MS_OK) fail_msg("%s", error.message);
    ms_engine_set_poison(engine, getenv("MOONSHARD_POISON") != NULL);
    return engine;
}

static inline ms_engine *engine_with(uint32_t threads, const char *cpu)
{
    return engine_on(NULL, threads, cpu);
}

/* A tensor with these values in the operand's layout. */
static inline ms_tensor *tensor_of(ms_engine *engine, const operand *o)
{
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX], stride = 1;
    ms_tensor *memory = NULL, *tensor = NULL;
    memcpy(shape, o->shape, sizeof shape);
    uint32_t last = o->dims - 1;
    if (o->layout == SWAPPED) {
        shape[last] = o->shape[last - 1];
        shape[last - 1] = o->shape[last];
    } else if (o->layout == SPREAD) {
        shape[last] += 5;
    }
    for (uint32_t d = o->dims; d-- > 0;) {
        strides[d] = stride;
        stride *= shape[d];
    }
    if (o->layout == SWAPPED) {
        int64_t swap = strides[last];
        strides[last] = strides[last - 1];
        strides[last - 1] = swap;
    }
    size_t count = count_of(o), bytes = count * ms_dtype_bytes(o->dtype);
    void *host = malloc(bytes + 1);
    to_bytes(o->dtype, o->values, count, host);
    stride += o->start;
    OK(ms_tensor_new(engine, o->dtype, 1, &stride, &memory));
    OK(ms_tensor_window(memory, o->dims, o->shape, strides, o->start, &tensor));
    OK(ms_tensor_write(tensor, host, bytes));
    ms_tensor_release(memory);
    free(host);
    return tensor;
}

static inline void read_values(ms_engine *engine, ms_tensor *tensor, double *values)
{
    size_t bytes = ms_tensor_bytes(tensor);
    void *host = malloc(bytes + 1);
    OK(ms_tensor_read(tensor, host, bytes));
    from_bytes(ms_tensor_dtype(tensor), host, (size_t)ms_tensor_count(tensor), values);
    free(host);
}

static inline void fill(operand *o, uint64_t *state)
{
    size_t count = count_of(o);
    double low = o->low, high = o->high;
    if (low == high) {
        low = -1.0;
        high = 1.0;
    }
    o->values = malloc((count + 1) * sizeof *o->values);
    for (size_t i = 0; i < count; i++) {
        double value = low + (draw(state) + 1.0) / 2.0 * (high - low);
        o->values[i] = ms_dtype_is_float(o->dtype) ? rounded(o->dtype, value) : floor(value);
    }
}

/* ------------------------------------------------------------------ one run */

/* The results of an operator: outputs, then gradients of the inputs (NULL if there is none). */
typedef struct answer {
    double *out[TENSORS], *gradient[TENSORS];
} answer;

static inline void answer_free(answer *a)
{
    for (int i = 0; i < TENSORS; i++) {
        free(a->out[i]);
        free(a->gradient[i]);
    }
}

static inline ms_tensor_info info_from(const ms_tensor *tensor)
{
    ms_tensor_info info = { .dtype = ms_tensor_dtype(tensor), .dims = ms_tensor_dims(tensor) };
    for (uint32_t d = 0; d < info.dims; d++) info.shape[d] = ms_tensor_shape(tensor)[d];
    return info;
}

/* Forward and backward with the gradients that are in `incoming`, as the tape would call them;
 * last: saved tensors may be overwritten. */
static inline void run_once(ms_engine *engine, const check *c, operand *incoming, bool last,
                            answer *a)
{
    ms_tensor *in[TENSORS] = { NULL }, *out[TENSORS] = { NULL }, *g[TENSORS] = { NULL },
              *results[TENSORS] = { NULL };
    ms_tensor_info in_info[TENSORS] = { 0 }, out_info[TENSORS] = { 0 };
    bool needs[TENSORS] = { false };
    ms_engine_set_autocast(engine, c->autocast);
    for (uint32_t i = 0; i < c->ins; i++) {
        if (c->in[i].absent) continue;
        in[i] = tensor_of(engine, &c->in[i]);
        in_info[i] = info_from(in[i]);
        needs[i] = !c->in[i].constant && ms_dtype_is_float(c->in[i].dtype);
    }
    ms_op_call call = { .engine = engine,
                        .op = c->op,
                        .attributes = c->attributes,
                        .inputs = in,
                        .input_count = c->ins,
                        .outputs = out,
                        .output_count = c->outs,
                        .record = true,
                        .needs = needs };
    OK(ms_op_run(&call));
    for (uint32_t i = 0; i < c->outs; i++) {
        out_info[i] = info_from(out[i]);
        assert_int_equal(out_info[i].dims, c->out[i].dims);
        for (uint32_t d = 0; d < out_info[i].dims; d++)
            assert_int_equal(out_info[i].shape[d], c->out[i].shape[d]);
        assert_int_equal(out_info[i].dtype, c->out[i].dtype);
        a->out[i] = calloc(count_of(&c->out[i]) + 1, sizeof(double));
        read_values(engine, out[i], a->out[i]);
        g[i] = tensor_of(engine, &incoming[i]);
    }
    for (uint32_t i = 0; i < TENSORS; i++) {
        ms_tensor_release(in[i]);
        ms_tensor_release(out[i]);
    }
    ms_op_gradient gradient = { .engine = engine,
                                .op = c->op,
                                .attributes = call.attributes,
                                .saved = call.saved,
                                .saved_count = call.saved_count,
                                .inputs = in_info,
                                .input_count = c->ins,
                                .outputs = out_info,
                                .gradients = g,
                                .output_count = c->outs,
                                .results = results,
                                .needs = needs,
                                .last = last };
    OK(c->op->backward(&gradient));
    for (uint32_t i = 0; i < c->ins; i++) {
        if (!needs[i]) {
            assert_null(results[i]);
            continue;
        }
        assert_non_null(results[i]);
        ms_tensor_info info = info_from(results[i]);
        assert_true(info.dtype == in_info[i].dtype
                    && ms_shape_equal(info.dims, info.shape, in_info[i].dims, in_info[i].shape));
        a->gradient[i] = calloc(count_of(&c->in[i]) + 1, sizeof(double));
        read_values(engine, results[i], a->gradient[i]);
        ms_tensor_release(results[i]);
    }
    ms_op_drop_saved(&call);
    for (uint32_t i = 0; i < c->outs; i++) ms_tensor_release(g[i]);
    ms_engine_drop_casts(engine);
    OK(ms_engine_sync(engine));
    assert_int_equal(ms_engine_memory(engine).live, 0);
}

/* ---------------------------------------------------------------- comparing */

static inline double norm_of(const double *v, size_t n)
{
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += v[i] * v[i];
    return sqrt(sum);
}

static inline void compare(const char *what, uint32_t index, const double *got,
                           const double *expected, size_t count, double tolerance)
{
    double most = 1e-30, worst = 0;
    size_t at = 0;
    for (size_t i = 0; i < count; i++) {
        if (fabs(expected[i]) > most) most = fabs(expected[i]);
        double error = fabs(got[i] - expected[i]);
        if (!(error <= worst)) {
            worst = error;
            at = i;
        }
    }
    if (!(worst <= tolerance * most))
        fail_msg("%s %u: element %zu is %.9g, not %.9g (relative to the largest: %.3g)", what,
                 index, at, got[at], expected[at], worst / most);
}

/* The sum of outputs times incoming gradients: the function whose gradients are checked. */
static inline double objective(const check *c, const operand *incoming)
{
    double sum = 0;
    c->reference(c);
    for (uint32_t i = 0; i < c->outs; i++)
        for (size_t k = 0; k < count_of(&c->out[i]); k++)
            sum += c->out[i].values[k] * incoming[i].values[k];
    return sum;
}

static inline void check_gradient(const check *c, const operand *incoming, uint32_t index,
                                  const double *got, double tolerance)
{
    const double h = 1e-5;
    size_t n = count_of(&c->in[index]);
    double *x = c->in[index].values, *kept = malloc(n * sizeof *kept), *v = malloc(n * sizeof *v);
    memcpy(kept, x, n * sizeof *kept);
    if (n <= 300) {
        for (size_t k = 0; k < n; k++) {
            x[k] = kept[k] + h;
            double up = objective(c, incoming);
            x[k] = kept[k] - h;
            v[k] = (up - objective(c, incoming)) / (2 * h);
            x[k] = kept[k];
        }
        compare("gradient of input", index, got, v, n, tolerance);
    } else {
        uint64_t state = 1000000;
        for (int direction = 0; direction < (ranges_are_long() ? 4 : 2); direction++) {
            double along = 0;
            for (size_t k = 0; k < n; k++) {
                v[k] = draw(&state);
                along += v[k] * got[k];
                x[k] = kept[k] + h * v[k];
            }
            double up = objective(c, incoming);
            for (size_t k = 0; k < n; k++) x[k] = kept[k] - h * v[k];
            double slope = (up - objective(c, incoming)) / (2 * h);
            memcpy(x, kept, n * sizeof *kept);
            /* Errors of elements are independent, so along a direction they add up as the norms
             * do. */
            if (!(fabs(along - slope) <= tolerance * norm_of(got, n)))
                fail_msg("gradient of input %u: along direction %d %.9g, not %.9g", index,
                         direction, along, slope);
        }
    }
    free(kept);
    free(v);
}

/* The whole check. Values that are given (in[i].values not NULL) stay; others are drawn. */
static inline void run_check(check *c)
{
    uint64_t state = 0;
    operand incoming[TENSORS] = { 0 };
    bool drawn[TENSORS] = { false };
    for (uint32_t i = 0; i < c->ins; i++) {
        if (c->in[i].absent || c->in[i].values) continue;
        fill(&c->in[i], &state);
        drawn[i] = true;
    }
    for (uint32_t i = 0; i < c->outs; i++) {
        c->out[i].values = calloc(count_of(&c->out[i]) + 1, sizeof(double));
        incoming[i] = c->out[i];
        incoming[i].low = -1.0;
        incoming[i].high = 1.0;
        fill(&incoming[i], &state);
    }
    /* One rounding of a 16-bit result is 2^-9 of bf16 and 2^-11 of f16; gradients are made of
     * rounded results (two and a little more). */
    double tolerance = c->in[0].dtype == MS_BF16 ? 8e-3 : 2e-3;
    if (c->in[0].dtype == MS_F32 && c->autocast == MS_F32) tolerance = 5e-6;
    if (c->tolerance > 0) tolerance = c->tolerance;
    answer first = { 0 };
    for (uint32_t threads = 1; threads <= 3; threads++) {
        ms_engine *engine = engine_with(threads, c->cpu);
        answer a = { 0 };
        run_once(engine, c, incoming, threads == 2, &a);
        ms_engine_free(engine);
        if (threads == 1) c->reference(c);
        if (threads == 1 || c->varies) {
            for (uint32_t i = 0; i < c->outs; i++)
                compare("output", i, a.out[i], c->out[i].values, count_of(&c->out[i]), tolerance);
            for (uint32_t i = 0; i < c->ins; i++)
                if (a.gradient[i]) check_gradient(c, incoming, i, a.gradient[i], tolerance);
        }
        if (threads == 1) {
            first = a;
            continue;
        }
        if (c->varies) {
            answer_free(&a);
            continue;
        }
        for (uint32_t i = 0; i < c->outs; i++)
            assert_memory_equal(a.out[i], first.out[i], count_of(&c->out[i]) * sizeof(double));
        for (uint32_t i = 0; i < c->ins; i++)
            if (a.gradient[i])
                assert_memory_equal(a.gradient[i], first.gradient[i],
                                    count_of(&c->in[i]) * sizeof(double));
        answer_free(&a);
    }
    answer_free(&first);
    for (uint32_t i = 0; i < c->ins; i++)
        if (drawn[i]) {
            free(c->in[i].values);
            c->in[i].values = NULL;
        }
    for (uint32_t i = 0; i < c->outs; i++) {
        free(c->out[i].values);
        free(incoming[i].values);
        c->out[i].values = NULL;
    }
}

/* Forward and backward while the n-th allocation fails, for every n: an error with a message, no
 * output, no leak. */
static inline void check_lack_of_memory(check *c)
{
    bool reached = true;
    for (long n = 1; reached; n++) {
        fault_os fault;
        fault_os_init(&fault);
        ms_engine *engine = engine_on(&fault.table, 2, c->cpu);
        ms_tensor *in[TENSORS] = { NULL }, *out[TENSORS] = { NULL }, *g[TENSORS] = { NULL },
                  *results[TENSORS] = { NULL };
        ms_tensor_info in_info[TENSORS] = { 0 }, out_info[TENSORS] = { 0 };
        bool needs[TENSORS] = { false };
        uint64_t state = 0;
        ms_engine_set_autocast(engine, c->autocast);
        for (uint32_t i = 0; i < c->ins; i++) {
            if (c->in[i].absent) continue;
            fill(&c->in[i], &state);
            in[i] = tensor_of(engine, &c->in[i]);
            free(c->in[i].values);
            c->in[i].values = NULL;
            in_info[i] = info_from(in[i]);
            needs[i] = ms_dtype_is_float(c->in[i].dtype);
        }
        OK(ms_engine_sync(engine));
        long at = atomic_load(&fault.calls) + n;
        atomic_store(&fault.fail_at, at);
        ms_op_call call = { .engine = engine,
                            .op = c->op,
                            .attributes = c->attributes,
                            .inputs = in,
                            .input_count = c->ins,
                            .outputs = out,
                            .output_count = c->outs,
                            .record = true };
        ms_status status = ms_op_run(&call);
        if (status) {
            assert_int_equal(status, MS_ERROR_MEMORY);
            for (uint32_t i = 0; i < c->outs; i++) assert_null(out[i]);
            assert_int_equal(call.saved_count, 0);
        }
        for (uint32_t i = 0; i < c->outs && !status; i++) {
            out_info[i] = info_from(out[i]);
            status = ms_op_unary(engine, &ms_op_clone, NULL, out[i], &g[i]);
        }
        ms_op_gradient gradient = { .engine = engine,
                                    .op = c->op,
                                    .attributes = call.attributes,
                                    .saved = call.saved,
                                    .saved_count = call.saved_count,
                                    .inputs = in_info,
                                    .input_count = c->ins,
                                    .outputs = out_info,
                                    .gradients = g,
                                    .output_count = c->outs,
                                    .results = results,
                                    .needs = needs };
        if (!status) status = c->op->backward(&gradient);
        ms_status later = ms_engine_sync(engine);
        reached = atomic_load(&fault.calls) >= at;
        /* Memory for the scratch of a running task is missed on the stream, and reported by the
         * call that looks. */
        ms_status expected = reached ? MS_ERROR_MEMORY : MS_OK;
        assert_int_equal(status ? status : later, expected);
        ms_op_drop_saved(&call);
        for (uint32_t i = 0; i < TENSORS; i++) {
            ms_tensor_release(in[i]);
            ms_tensor_release(out[i]);
            ms_tensor_release(g[i]);
            ms_tensor_release(results[i]);
        }
        ms_engine_drop_casts(engine);
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
        assert_int_equal(atomic_load(&fault.live), 0);
        assert_true(n < 1000);
    }
}

/* An operator refuses these inputs, with an error that holds `words`. */
static inline void check_refused(ms_engine *engine, const ms_op *op,
                                 const ms_attributes *attributes, ms_tensor *const *in,
                                 uint32_t count, const char *words)
{
    ms_tensor *out[TENSORS] = { NULL };
    assert_int_equal(ms_op_apply(engine, op, attributes, false, in, count, out, 1),
                     MS_ERROR_ARGUMENT);
    assert_null(out[0]);
    if (!strstr(ms_engine_error(engine)->message, words))
        fail_msg("\"%s\" does not say \"%s\"", ms_engine_error(engine)->message, words);
}

static inline ms_tensor *empty_tensor(ms_engine *engine, ms_dtype dtype, uint32_t dims,
                                      const int64_t *shape)
{
    ms_tensor *tensor = NULL;
    OK(ms_tensor_new(engine, dtype, dims, shape, &tensor));
    return tensor;
}
#define TENSOR(engine, dtype, ...)                                                                \
    empty_tensor(engine, dtype, (uint32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), \
                 (int64_t[]){ __VA_ARGS__ })

#endif
