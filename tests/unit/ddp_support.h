/* ddp_support.h: for tests of ddp: a small model, wrapped in a reducer, and the reference of one
 * process that replaces all ranks. */
#ifndef MOONSHARD_TESTS_DDP_SUPPORT_H
#define MOONSHARD_TESTS_DDP_SUPPORT_H

#include "comm_support.h"
#include "moonshard/ddp.h"

static const uint64_t small_caps[] = { 2000, 2500 }; /* several buckets of the model below */

enum { WEIGHTS = 5, WIDTH = 24, ROWS = 3 };

/* A chain of tanh(x w) with weights of uneven shapes; used last to first, so that gradients come in
 * that order. */
typedef struct model {
    ms_tensor *weights[WEIGHTS];
    const char *names[WEIGHTS];
} model;

static inline double weight_value(const void *context, int64_t i)
{
    uint32_t w = *(const uint32_t *)context;
    return 0.01 * (double)((i * 37 + w * 11) % 29 - 14);
}

static inline double input_value(const void *context, int64_t i)
{
    const uint32_t *at = context; /* rank and iteration */
    return 0.1 * (double)((i * 13 + at[0] * 7 + at[1] * 5) % 23 - 11);
}

static inline ms_status build(rank *self, model *m)
{
    static const char *const names[] = { "a", "b", "c", "d", "e" };
    static const int64_t shapes[WEIGHTS + 1] = { WIDTH, 17, 40, 9, 31, 5 };
    ms_status status = MS_OK;
    *m = (model){ .weights = { NULL } };
    for (uint32_t w = 0; w < WEIGHTS && !status; w++) {
        m->names[w] = names[w];
        status = ms_tensor_new(self->engine, MS_F32, 2, &shapes[w], &m->weights[w]);
        if (!status) status = fill(m->weights[w], weight_value, &w);
        if (!status) status = ms_tensor_set_requires_grad(m->weights[w], true);
    }
    return status;
}

static inline void drop(model *m)
{
    for (int w = 0; w < WEIGHTS; w++) ms_tensor_release(m->weights[w]);
}

/* A sum over one rank's input; `used` weights, from the first. */
static inline ms_status forward(rank *self, model *m, uint32_t number, uint32_t iteration,
                                uint32_t used, ms_tensor **loss)
{
    const int64_t shape[] = { ROWS, WIDTH };
    uint32_t at[] = { number, iteration };
    ms_tensor *x = NULL, *y = NULL, *z = NULL;
    ms_status status = ms_tensor_new(self->engine, MS_F32, 2, shape, &x);
    if (!status) status = fill(x, input_value, at);
    for (uint32_t w = 0; w < used && !status; w++) {
        ms_tensor *inputs[] = { x, m->weights[w] };
        status = ms_apply(self->engine, &ms_op_matmul, NULL, false, inputs, 2, &y, 1);
        if (!status) status = ms_apply(self->engine, &ms_op_tanh, NULL, false, &y, 1, &z, 1);
        ms_tensor_release(x);
        ms_tensor_release(y);
        x = z;
        y = z = NULL;
    }
    ms_attributes all = { .reduce = { .all = true } };
    if (!status) status = ms_apply(self->engine, &ms_op_sum, &all, false, &x, 1, loss, 1);
    ms_tensor_release(x);
    return status;
}

static inline ms_status pass(rank *self, model *m, uint32_t number, uint32_t iteration,
                             uint32_t used, bool retain)
{
    ms_tensor *loss = NULL;
    ms_status status = forward(self, m, number, iteration, used, &loss);
    if (!status) status = ms_backward(self->engine, &loss, NULL, 1, retain);
    if (!status && retain) status = ms_backward(self->engine, &loss, NULL, 1, false);
    ms_tensor_release(loss);
    return status;
}

static inline ms_status clear(model *m)
{
    ms_status status = MS_OK;
    for (int w = 0; w < WEIGHTS && !status; w++) status = ms_tensor_set_grad(m->weights[w], NULL);
    return status;
}

static inline ms_status wrap(rank *self, model *m, ms_reducer_options options, ms_reducer **out)
{
    ms_reducer_parameter parameters[WEIGHTS];
    for (int w = 0; w < WEIGHTS; w++)
        parameters[w] = (ms_reducer_parameter){ .tensor = m->weights[w], .name = m->names[w] };
    options.group = self->world;
    return ms_reducer_new(self->engine, &options, parameters, WEIGHTS, out);
}

/* The reference: one process computes the ranks' gradients separately (summed over passes first ..
 * last) and adds them in rank order. */
static inline ms_status alone(rank *self, model *m, uint32_t first, uint32_t last, int w,
                              float *sum, size_t count)
{
    float *one = malloc(count * sizeof *one), factor = 1.0f / (float)self->ranks;
    ms_status status = MS_OK;
    memset(sum, 0, count * sizeof *sum);
    for (uint32_t r = 0; r < self->ranks && !status; r++) {
        status = clear(m);
        for (uint32_t i = first; i <= last && !status; i++)
            status = pass(self, m, r, i, WEIGHTS, false);
        if (!status)
            status = ms_tensor_read(ms_tensor_grad(m->weights[w]), one, count * sizeof *one);
        for (size_t i = 0; i < count; i++) {
            float share = one[i] * factor;
            sum[i] = r == 0 ? share : sum[i] + share;
        }
    }
    free(one);
    return status;
}

/* Whether the gradients are, bit for bit, those of passes first .. last of all ranks. */
static inline bool reduced(rank *self, model *m, model *reference, uint32_t first, uint32_t last)
{
    bool equal = true;
    for (int w = 0; w < WEIGHTS && equal; w++) {
        size_t count = (size_t)ms_tensor_count(m->weights[w]);
        float *expected = malloc(count * sizeof *expected), *got = malloc(count * sizeof *got);
        equal = ms_tensor_grad(m->weights[w])
                && ms_tensor_read(ms_tensor_grad(m->weights[w]), got, count * sizeof *got) == MS_OK;
        if (equal)
            equal = alone(self, reference, first, last, w, expected, count) == MS_OK
                    && memcmp(expected, got, count * sizeof *got) == 0;
        free(expected);
        free(got);
    }
    return equal;
}

/* One parameter whose gradient is `value` everywhere, reduced by a chain. */
static inline ms_status reduce_constant(rank *self, const ms_reducer_options *given, double value,
                                        int64_t n, float *got)
{
    ms_tensor *p = NULL, *scaled = NULL, *loss = NULL;
    ms_reducer *reducer = NULL;
    uint32_t zero = 0;
    ms_reducer_options options = *given;
    options.group = self->world;
    ms_attributes whole = { .reduce = { .all = true } }, factor = { .scalar = { .value = value } };
    ms_status status = ms_tensor_new(self->engine, MS_F32, 1, &n, &p);
    if (!status) status = fill(p, weight_value, &zero);
    if (!status) status = ms_tensor_set_requires_grad(p, true);
    if (!status)
        status = ms_reducer_new(self->engine, &options,
                                &(ms_reducer_parameter){ .tensor = p, .name = "p" }, 1, &reducer);
    if (!status) status = ms_reducer_forward(reducer, true);
    if (!status)
        status = ms_apply(self->engine, &ms_op_mul_scalar, &factor, false, &p, 1, &scaled, 1);
    if (!status) status = ms_apply(self->engine, &ms_op_sum, &whole, false, &scaled, 1, &loss, 1);
    if (!status) status = ms_backward(self->engine, &loss, NULL, 1, false);
    if (!status) status = ms_tensor_read(ms_tensor_grad(p), got, (size_t)n * sizeof *got);
    if (!status) ms_reducer_free(reducer);
    ms_tensor_release(p);
    ms_tensor_release(scaled);
    ms_tensor_release(loss);
    return status;
}

#endif
