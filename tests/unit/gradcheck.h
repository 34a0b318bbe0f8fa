/* gradcheck.h: for tests of operators: tensors from and to plain doubles, and gradients against
 * central differences. */
#ifndef GRADCHECK_H
#define GRADCHECK_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "exec/poison.h"
#include "late_device.h"
#include "moonshard/ops.h"
#include "tensor/op.h"

#define SHAPE(...) \
    (int64_t[]) { __VA_ARGS__ }
#define DIMS(...) \
    (uint32_t)(sizeof(int64_t[]){ __VA_ARGS__ } / sizeof(int64_t)), (int64_t[]) { __VA_ARGS__ }
#define OPERANDS(...) \
    (ms_tensor *[]) { __VA_ARGS__ }
#define COUNT(list) (sizeof(list) / sizeof *(list))

static inline ms_engine *engine_with(uint32_t threads, const char *cpu)
{
    ms_engine_options options = {
        .own_device = late_device(NULL), .threads = threads, .cpu = cpu, .seed = 7, .strict = true
    };
    ms_engine *engine = NULL;
    ms_error error;
    if (ms_engine_new(&options, &error, &engine) != MS_OK) fail_msg("%s", error.message);
    ms_engine_set_poison(engine, getenv("MOONSHARD_POISON") != NULL);
    return engine;
}

/* An engine on the CPU, whatever device the others of this run have. */
static inline ms_engine *engine_of_cpu(void)
{
    ms_engine_options options = { .threads = 1, .seed = 7, .strict = true };
    ms_engine *own = NULL;
    ms_error error;
    if (ms_engine_new(&options, &error, &own) != MS_OK) fail_msg("%s", error.message);
    return own;
}

#define assert_ok(engine, call)                                                           \
    do {                                                                                  \
        if ((call) != MS_OK) fail_msg("%s: %s", #call, ms_engine_error(engine)->message); \
    } while (0)

static inline ms_tensor *window_of(ms_tensor *base, uint32_t dims, const int64_t *shape,
                                   const int64_t *strides, int64_t offset)
{
    ms_tensor *out = NULL;
    assert_ok(ms_tensor_engine(base), ms_tensor_window(base, dims, shape, strides, offset, &out));
    return out;
}

static inline void release_all(ms_tensor **tensors, size_t count)
{
    for (size_t i = 0; i < count; i++) ms_tensor_release(tensors[i]);
}

/* That it fails as a mistake of the caller, with a message that holds `text`. */
static inline void assert_refused(ms_engine *engine, ms_status status, const char *text)
{
    assert_int_equal(status, MS_ERROR_ARGUMENT);
    if (strstr(ms_engine_error(engine)->message, text) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", ms_engine_error(engine)->message, text);
}

static inline void encode(ms_dtype dtype, double value, void *to)
{
    switch (dtype) {
    case MS_F32: *(float *)to = (float)value; break;
    case MS_F16: *(uint16_t *)to = ms_f16_from_float((float)value); break;
    case MS_BF16: *(uint16_t *)to = ms_bf16_from_float((float)value); break;
    case MS_I64: *(int64_t *)to = (int64_t)value; break;
    case MS_I32: *(int32_t *)to = (int32_t)value; break;
    case MS_U16: *(uint16_t *)to = (uint16_t)value; break;
    case MS_U8: *(uint8_t *)to = (uint8_t)value; break;
    default: *(uint8_t *)to = value != 0; break;
    }
}

static inline double decode(ms_dtype dtype, const void *from)
{
    switch (dtype) {
    case MS_F32: return *(const float *)from;
    case MS_F16: return ms_float_from_f16(*(const uint16_t *)from);
    case MS_BF16: return ms_float_from_bf16(*(const uint16_t *)from);
    case MS_I64: return (double)*(const int64_t *)from;
    case MS_I32: return *(const int32_t *)from;
    case MS_U16: return *(const uint16_t *)from;
    default: return *(const uint8_t *)from;
    }
}

static inline void tensor_set(ms_tensor *tensor, const double *values)
{
    size_t count = (size_t)ms_tensor_count(tensor), size = ms_dtype_bytes(ms_tensor_dtype(tensor));
    char *host = calloc(count + 1, size);
    for (size_t i = 0; i < count; i++) encode(ms_tensor_dtype(tensor), values[i], host + i * size);
    assert_ok(ms_tensor_engine(tensor), ms_tensor_write(tensor, host, count * size));
    free(host);
}

/* values NULL: numbers between -2 and 2 that differ from tensor to tensor and keep away from 0. */
static inline ms_tensor *tensor_of(ms_engine *engine, ms_dtype dtype, uint32_t dims,
                                   const int64_t *shape, const double *values)
{
    static uint32_t seed = 1;
    ms_tensor *tensor = NULL;
    assert_ok(engine, ms_tensor_new(engine, dtype, dims, shape, &tensor));
    size_t count = (size_t)ms_tensor_count(tensor);
    double *own = calloc(count + 1, sizeof *own);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        double x = (double)(seed >> 8) / 16777216.0 * 1.9 + 0.1;
        if (values != NULL) own[i] = values[i];
        else own[i] = (seed & 128) ? x : -x;
    }
    tensor_set(tensor, own);
    free(own);
    return tensor;
}

/* The values in row-major order; the caller frees them. */
static inline double *tensor_get(ms_tensor *tensor)
{
    size_t count = (size_t)ms_tensor_count(tensor), size = ms_dtype_bytes(ms_tensor_dtype(tensor));
    char *host = calloc(count + 1, size);
    double *values = calloc(count + 1, sizeof *values);
    assert_ok(ms_tensor_engine(tensor), ms_tensor_read(tensor, host, count * size));
    for (size_t i = 0; i < count; i++) values[i] = decode(ms_tensor_dtype(tensor), host + i * size);
    free(host);
    return values;
}

static inline ms_tensor *apply(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                               ms_tensor *const *inputs, uint32_t count)
{
    ms_tensor *out = NULL;
    assert_ok(engine, ms_op_apply(engine, op, attributes, false, inputs, count, &out, 1));
    return out;
}

/* |got - want| <= tolerance * max(1, |want|); NaN equals NaN. */
static inline void assert_near(double got, double want, double tolerance, const char *what,
                               size_t index)
{
    if (isnan(want) ? isnan(got)
                    : got == want || fabs(got - want) <= tolerance * fmax(1, fabs(want)))
        return;
    fail_msg("%s, element %zu: got %.9g, want %.9g", what, index, got, want);
}

static inline void assert_values(ms_tensor *tensor, const double *want, size_t count,
                                 double tolerance, const char *what)
{
    assert_int_equal(ms_tensor_count(tensor), count);
    double *got = tensor_get(tensor);
    for (size_t i = 0; i < count; i++) assert_near(got[i], want[i], tolerance, what, i);
    free(got);
}

/* ---------------------------------------------------------------- gradients */

typedef struct gradcheck {
    const ms_op *op;
    ms_attributes attributes;
    bool in_place;
    uint32_t inputs, outputs; /* outputs 0: 1 */
    double tolerance;         /* 0: 2e-3, see below */
    uint32_t skip;            /* bit i: input i has no gradient */
} gradcheck;

static inline double weight(size_t output, size_t i)
{
    return 0.5 + 0.37 * (double)((i * 7 + output * 3) % 5);
}

/* Runs forward; the sum of all float outputs with fixed weights. call keeps outputs and saved
 * tensors. */
static inline double gradcheck_forward(ms_engine *engine, const gradcheck *check, ms_op_call *call,
                                       ms_tensor **inputs, ms_tensor **outputs, bool record)
{
    *call = (ms_op_call){ .engine = engine,
                          .op = check->op,
                          .attributes = check->attributes,
                          .inputs = inputs,
                          .input_count = check->inputs,
                          .outputs = outputs,
                          .output_count = check->outputs ? check->outputs : 1,
                          .in_place = check->in_place,
                          .record = record };
    assert_ok(engine, ms_op_run(call));
    double sum = 0;
    for (uint32_t k = 0; k < call->output_count; k++) {
        if (!ms_dtype_is_float(ms_tensor_dtype(outputs[k]))) continue;
        double *values = tensor_get(outputs[k]);
        for (size_t i = 0; i < (size_t)ms_tensor_count(outputs[k]); i++)
            sum += weight(k, i) * values[i];
        free(values);
    }
    return sum;
}

/* A tensor of the same values and strides: one that an in-place forward may write into. */
static inline ms_tensor *twin_of(ms_engine *engine, ms_tensor *tensor, const double *values)
{
    ms_tensor *room = NULL, *twin = NULL;
    int64_t cells = (int64_t)(ms_storage_bytes(ms_tensor_storage(tensor))
                              / ms_dtype_bytes(ms_tensor_dtype(tensor)));
    assert_ok(engine, ms_tensor_new(engine, ms_tensor_dtype(tensor), 1, &cells, &room));
    assert_ok(engine, ms_tensor_window(room, ms_tensor_dims(tensor), ms_tensor_shape(tensor),
                                       ms_tensor_strides(tensor), ms_tensor_offset(tensor), &twin));
    tensor_set(twin, values);
    ms_tensor_release(room);
    return twin;
}

static inline double gradcheck_at(ms_engine *engine, const gradcheck *check,
                                  ms_tensor *const *inputs, uint32_t which, double *values)
{
    ms_tensor *own[MS_TASK_ACCESS_MAX], *outputs[16];
    ms_op_call call;
    for (uint32_t i = 0; i < check->inputs; i++) {
        double *same = i == which ? NULL : tensor_get(inputs[i]);
        own[i] = twin_of(engine, inputs[i], same ? same : values);
        free(same);
    }
    double sum = gradcheck_forward(engine, check, &call, own, outputs, false);
    for (uint32_t i = 0; i < call.output_count; i++) ms_tensor_release(outputs[i]);
    for (uint32_t i = 0; i < check->inputs; i++) ms_tensor_release(own[i]);
    return sum;
}

/* Backward with gradients of the weights' values; checks shapes and dtypes of the results. */
static inline void gradcheck_backward(ms_engine *engine, const gradcheck *check,
                                      ms_tensor *const *inputs, ms_tensor **results)
{
    ms_tensor *own[MS_TASK_ACCESS_MAX], *outputs[16], *gradients[16] = { NULL };
    ms_tensor_info in[MS_TASK_ACCESS_MAX] = { { 0 } }, out[16] = { { 0 } };
    bool needs[MS_TASK_ACCESS_MAX];
    ms_op_call call;
    for (uint32_t i = 0; i < check->inputs; i++) {
        double *values = tensor_get(inputs[i]);
        own[i] = twin_of(engine, inputs[i], values);
        free(values);
        in[i] = (ms_tensor_info){ ms_tensor_dtype(own[i]), ms_tensor_dims(own[i]), { 0 } };
        memcpy(in[i].shape, ms_tensor_shape(own[i]), in[i].dims * sizeof(int64_t));
        needs[i] = ms_dtype_is_float(in[i].dtype) && !(check->skip >> i & 1);
        results[i] = NULL;
    }
    gradcheck_forward(engine, check, &call, own, outputs, true);
    for (uint32_t k = 0; k < call.output_count; k++) {
        size_t count = (size_t)ms_tensor_count(outputs[k]);
        out[k] = (ms_tensor_info){ ms_tensor_dtype(outputs[k]), ms_tensor_dims(outputs[k]), { 0 } };
        memcpy(out[k].shape, ms_tensor_shape(outputs[k]), out[k].dims * sizeof(int64_t));
        if (!ms_dtype_is_float(out[k].dtype)) continue;
        double *values = calloc(count + 1, sizeof *values);
        for (size_t i = 0; i < count; i++) values[i] = weight(k, i);
        gradients[k] = tensor_of(engine, out[k].dtype, out[k].dims, out[k].shape, values);
        free(values);
    }
    ms_op_gradient gradient = { .engine = engine,
                                .op = check->op,
                                .attributes = call.attributes,
                                .saved = call.saved,
                                .saved_count = call.saved_count,
                                .inputs = in,
                                .input_count = check->inputs,
                                .outputs = out,
                                .gradients = gradients,
                                .output_count = call.output_count,
                                .results = results,
                                .needs = needs };
    assert_ok(engine, check->op->backward(&gradient));
    for (uint32_t i = 0; i < check->inputs; i++) {
        if (!needs[i]) {
            assert_null(results[i]);
            continue;
        }
        assert_non_null(results[i]);
        assert_int_equal(ms_tensor_dtype(results[i]), in[i].dtype);
        assert_true(ms_shape_equal(ms_tensor_dims(results[i]), ms_tensor_shape(results[i]),
                                   in[i].dims, in[i].shape));
    }
    ms_op_drop_saved(&call);
    for (uint32_t k = 0; k < call.output_count; k++) {
        ms_tensor_release(outputs[k]);
        ms_tensor_release(gradients[k]);
    }
    for (uint32_t i = 0; i < check->inputs; i++) ms_tensor_release(own[i]);
}

/* Gradients of a weighted sum of all outputs, to every f32 input, against differences (4 D(h) -
 * D(2h)) / 3 with h = 1/64. The forward runs in f32: its rounding divided by h gives an error near
 * 1e-4 for sums near 10, the fifth derivative one near 1e-6; 2e-3 is far above both, and far below
 * the error of a wrong formula. */
static inline void check_gradients(ms_engine *engine, gradcheck check, ms_tensor *const *inputs)
{
    const double h = 1.0 / 64, tolerance = check.tolerance > 0 ? check.tolerance : 2e-3;
    ms_tensor *results[MS_TASK_ACCESS_MAX];
    gradcheck_backward(engine, &check, inputs, results);
    for (uint32_t i = 0; i < check.inputs; i++) {
        if (results[i] == NULL) continue;
        double *got = tensor_get(results[i]), *at = tensor_get(inputs[i]);
        for (size_t k = 0; k < (size_t)ms_tensor_count(inputs[i]); k++) {
            double x = at[k], difference[2];
            for (int far = 0; far < 2; far++) {
                double step = far ? 2 * h : h;
                at[k] = x + step;
                double up = gradcheck_at(engine, &check, inputs, i, at);
                at[k] = x - step;
                difference[far] = (up - gradcheck_at(engine, &check, inputs, i, at)) / (2 * step);
                at[k] = x;
            }
            char what[64];
            snprintf(what, sizeof what, "gradient of %s%s to input %u", check.op->name,
                     check.in_place ? "_" : "", i);
            assert_near(got[k], (4 * difference[0] - difference[1]) / 3, tolerance, what, k);
        }
        free(got);
        free(at);
        ms_tensor_release(results[i]);
    }
}

#endif
