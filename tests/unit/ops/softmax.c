/* softmax.c: softmax over every dimension, cross entropy with ignored rows and its gradient in
 * place, squared error. ctest: each-isa poisoned late cuda */
#include "reference.h"
#include "ops/values.h"

/* ------------------------------------------------------------------ softmax */

static void softmax_reference(const check *c)
{
    const operand *x = &c->in[0];
    int64_t dim =
        c->attributes.dim.a < 0 ? c->attributes.dim.a + (int64_t)x->dims : c->attributes.dim.a;
    size_t inner = 1, n = (size_t)x->shape[dim];
    for (uint32_t d = (uint32_t)dim + 1; d < x->dims; d++) inner *= (size_t)x->shape[d];
    for (size_t line = 0; line < count_of(x) / n; line++) {
        size_t first = line / inner * n * inner + line % inner;
        double most = -1e300, sum = 0;
        for (size_t k = 0; k < n; k++) most = fmax(most, x->values[first + k * inner]);
        for (size_t k = 0; k < n; k++) sum += exp(x->values[first + k * inner] - most);
        double logarithm_of_sum = log(sum);
        for (size_t k = 0; k < n; k++) {
            double logarithm = x->values[first + k * inner] - most - logarithm_of_sum;
            c->out[0].values[first + k * inner] =
                c->op == &ms_op_log_softmax ? logarithm : exp(logarithm);
        }
    }
}

static void run_softmax_under(ms_dtype autocast, const ms_op *op, ms_dtype dtype, operand x,
                              int32_t dim, int layout)
{
    check c = {
        .op = op, .attributes.dim.a = dim, .ins = 1, .outs = 1, .reference = softmax_reference
    };
    x.dtype = dtype;
    x.low = -4;
    x.high = 4;
    c.out[0] = x;
    x.layout = layout;
    c.in[0] = x;
    c.autocast = autocast;
    if (autocast != MS_F32) c.out[0].dtype = MS_F32;
    run_check(&c);
}
static void run_softmax(const ms_op *op, ms_dtype dtype, operand x, int32_t dim, int layout)
{
    run_softmax_under(MS_F32, op, dtype, x, dim, layout);
}

#define SHAPE(...)                                                                           \
    (operand)                                                                                \
    {                                                                                        \
        .dims = (uint32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), .shape = { \
            __VA_ARGS__                                                                      \
        }                                                                                    \
    }

static void test_softmax(void **state)
{
    (void)state;
    const ms_op *ops[] = { &ms_op_softmax, &ms_op_log_softmax };
    for (int i = 0; i < 2; i++) {
        for (int32_t dim = -3; dim < 3; dim++)
            run_softmax(ops[i], MS_F32, SHAPE(3, 5, 19), dim, PLAIN);
        run_softmax(ops[i], MS_F32, SHAPE(4, 70), 1, SWAPPED);
        run_softmax(ops[i], MS_F32, SHAPE(7), 0, PLAIN);
        run_softmax(ops[i], MS_F32, SHAPE(4, 1), -1, PLAIN);
        run_softmax(ops[i], MS_F32, SHAPE(300, 130), -1, PLAIN);
        run_softmax(ops[i], MS_F32, SHAPE(40, 9, 130), 1, PLAIN);
        run_softmax(ops[i], MS_BF16, SHAPE(3, 37), -1, PLAIN);
        run_softmax(ops[i], MS_F16, SHAPE(3, 37), 0, PLAIN);
        /* A device may give one row to more threads than a narrow one gets. */
        run_softmax(ops[i], MS_F32, SHAPE(1, 1031), -1, PLAIN);
        run_softmax(ops[i], MS_BF16, SHAPE(2, 1029), -1, PLAIN);
        /* f32 of 16 bits, and gradients of 16 bits. */
        run_softmax_under(MS_BF16, ops[i], MS_BF16, SHAPE(3, 5, 19), -1, PLAIN);
        run_softmax_under(MS_BF16, ops[i], MS_BF16, SHAPE(3, 5, 19), 1, SWAPPED);
        run_softmax_under(MS_F16, ops[i], MS_F16, SHAPE(9, 40), -1, PLAIN);
        run_softmax_under(MS_BF16, ops[i], MS_BF16, SHAPE(2, 1029), -1, PLAIN);
    }
}

/* Scores that overflow if their exponentials are taken as they are, and ones that are masked
 * out. */
static void test_softmax_extremes(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    float x[3][4] = { { 1000.0f, 999.0f, -INFINITY, -1000.0f },
                      { -1e30f, -1e30f, -1e30f, -1e30f },
                      { 1.0f, NAN, 2.0f, 3.0f } },
          y[3][4];
    ms_tensor *in = TENSOR(engine, MS_F32, 3, 4), *out = NULL;
    ms_attributes attributes = { .dim.a = -1 };
    OK(ms_tensor_write(in, x, sizeof x));
    OK(ms_op_unary(engine, &ms_op_softmax, &attributes, in, &out));
    OK(ms_tensor_read(out, y, sizeof y));
    assert_true(fabsf(y[0][0] - 0.7310586f) < 1e-6f && fabsf(y[0][1] - 0.2689414f) < 1e-6f
                && y[0][2] == 0.0f && y[0][3] == 0.0f);
    for (int i = 0; i < 4; i++) assert_true(y[1][i] == 0.25f && isnan(y[2][i]));
    check_refused(engine, &ms_op_softmax, &(ms_attributes){ .dim.a = 2 }, &in, 1, "no dimension 3");
    ms_tensor_release(in);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------ cross entropy */

static void cross_entropy_reference(const check *c)
{
    const operand *x = &c->in[0];
    size_t classes = (size_t)x->shape[x->dims - 1], rows = count_of(x) / classes;
    double sum = 0, counted = 0;
    for (size_t row = 0; row < rows; row++) {
        double most = -1e300, total = 0, loss = 0;
        int64_t target = (int64_t)c->in[1].values[row];
        for (size_t k = 0; k < classes; k++) most = fmax(most, x->values[row * classes + k]);
        for (size_t k = 0; k < classes; k++) total += exp(x->values[row * classes + k] - most);
        if (target != c->attributes.loss.ignore_index) {
            loss = most + log(total) - x->values[row * classes + (size_t)target];
            counted++;
        }
        sum += loss;
        if (c->attributes.loss.reduction == MS_REDUCE_NONE) c->out[0].values[row] = loss;
    }
    if (c->attributes.loss.reduction == MS_REDUCE_MEAN) c->out[0].values[0] = sum / counted;
    if (c->attributes.loss.reduction == MS_REDUCE_SUM) c->out[0].values[0] = sum;
}

static void run_cross_entropy(ms_dtype dtype, ms_dtype index, int64_t rows, int64_t classes,
                              ms_reduction reduction, int64_t ignore, int layout)
{
    check c = { .op = &ms_op_cross_entropy,
                .attributes.loss = { .reduction = reduction, .ignore_index = ignore },
                .ins = 2,
                .outs = 1,
                .reference = cross_entropy_reference,
                .in = { { .dtype = dtype,
                          .dims = 3,
                          .shape = { 2, rows, classes },
                          .low = -3,
                          .high = 3,
                          .layout = layout },
                        { .dtype = index,
                          .dims = 2,
                          .shape = { 2, rows },
                          .low = 0,
                          .high = (double)classes } },
                .out = { { .dtype = MS_F32,
                           .dims = reduction == MS_REDUCE_NONE ? 2 : 0,
                           .shape = { 2, rows } } } };
    /* The loss is f32 for every dtype, but gradients are of the logits' dtype. */
    run_check(&c);
}

static void test_cross_entropy(void **state)
{
    (void)state;
    for (ms_reduction reduction = MS_REDUCE_MEAN; reduction <= MS_REDUCE_NONE; reduction++) {
        run_cross_entropy(MS_F32, MS_I64, 4, 11, reduction, -100, PLAIN);
        run_cross_entropy(MS_F32, MS_I32, 4, 11, reduction, 3, PLAIN);
        run_cross_entropy(MS_F32, MS_U16, 60, 300, reduction, 65535, PLAIN);
    }
    run_cross_entropy(MS_F32, MS_I64, 4, 6, MS_REDUCE_MEAN, 2, SWAPPED);
    run_cross_entropy(MS_BF16, MS_I64, 3, 40, MS_REDUCE_MEAN, -100, PLAIN);
    run_cross_entropy(MS_F16, MS_I64, 3, 40, MS_REDUCE_SUM, -100, PLAIN);
    run_cross_entropy(MS_F32, MS_I64, 2, 1504, MS_REDUCE_MEAN, -100, PLAIN);
    run_cross_entropy(MS_BF16, MS_I64, 1, 8203, MS_REDUCE_SUM, -100, PLAIN);
}

static void test_cross_entropy_all_ignored(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    int64_t target[2] = { -100, -100 };
    float x[2][3] = { { 1, 2, 3 }, { 4, 5, 6 } }, loss;
    ms_tensor *in[2] = { TENSOR(engine, MS_F32, 2, 3), TENSOR(engine, MS_I64, 2) }, *out = NULL;
    OK(ms_tensor_write(in[0], x, sizeof x));
    OK(ms_tensor_write(in[1], target, sizeof target));
    ms_attributes attributes = { .loss.ignore_index = -100 };
    OK(ms_op_apply(engine, &ms_op_cross_entropy, &attributes, false, in, 2, &out, 1));
    OK(ms_tensor_read(out, &loss, sizeof loss));
    assert_true(isnan(loss));
    ms_tensor_release(out);
    attributes.loss.reduction = MS_REDUCE_SUM;
    OK(ms_op_apply(engine, &ms_op_cross_entropy, &attributes, false, in, 2, &out, 1));
    OK(ms_tensor_read(out, &loss, sizeof loss));
    assert_true(loss == 0.0f);
    ms_tensor_release(out);
    ms_tensor_release(in[0]);
    ms_tensor_release(in[1]);
    ms_engine_free(engine);
}

static void test_cross_entropy_names_the_bad_target(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(3, NULL);
    int64_t target[600] = { 0 };
    target[123] = 77;
    target[500] = -1;
    ms_tensor *in[2] = { TENSOR(engine, MS_F32, 600, 70), TENSOR(engine, MS_I64, 600) },
              *out = NULL, *filled = NULL;
    OK(ms_op_apply(engine, &ms_op_fill, NULL, true, &in[0], 1, &filled, 1));
    ms_tensor_release(filled);
    OK(ms_tensor_write(in[1], target, sizeof target));
    ms_attributes attributes = { .loss.ignore_index = -100 };
    OK(ms_op_apply(engine, &ms_op_cross_entropy, &attributes, false, in, 2, &out, 1));
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_ARGUMENT);
    const char *message = ms_engine_error(engine)->message;
    if (!strstr(message, "cross_entropy") || !strstr(message, "row 123 is 77")
        || !strstr(message, "70 classes"))
        fail_msg("%s", message);
    check_refused(engine, &ms_op_cross_entropy, NULL, (ms_tensor *[]){ in[0], in[0] }, 2,
                  "the targets must be i64");
    ms_tensor_release(in[0]);
    ms_tensor_release(in[1]);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

/* The memory for the largest tensor of a training step: the logits once, if no other reference to
 * them exists. */
static void test_cross_entropy_gradient_takes_the_logits_place(void **state)
{
    (void)state;
    enum { ROWS = 64, CLASSES = 1000 };
    for (int held = 0; held < 2; held++) {
        ms_engine *engine = engine_with(2, NULL);
        ms_tensor *in[2] = { TENSOR(engine, MS_F32, ROWS, CLASSES), TENSOR(engine, MS_I64, ROWS) },
                  *out[1] = { NULL }, *filled = NULL;
        int64_t target[ROWS] = { 0 };
        OK(ms_op_apply(engine, &ms_op_fill, &(ms_attributes){ .scalar.value = 2.0 }, true, &in[0],
                       1, &filled, 1));
        ms_tensor_release(filled);
        OK(ms_tensor_write(in[1], target, sizeof target));
        ms_op_call call = { .engine = engine,
                            .op = &ms_op_cross_entropy,
                            .attributes.loss.ignore_index = -100,
                            .inputs = in,
                            .input_count = 2,
                            .outputs = out,
                            .output_count = 1,
                            .record = true };
        OK(ms_op_run(&call));
        ms_tensor_info in_info[2] = { info_from(in[0]), info_from(in[1]) },
                       out_info = info_from(out[0]);
        if (!held) ms_tensor_release(in[0]);
        ms_tensor *g = NULL, *results[2] = { NULL };
        OK(ms_op_full(engine, MS_F32, 0, NULL, 1.0, &g));
        ms_engine_reset_peak(engine);
        ms_op_gradient gradient = { .engine = engine,
                                    .op = &ms_op_cross_entropy,
                                    .attributes = call.attributes,
                                    .saved = call.saved,
                                    .saved_count = call.saved_count,
                                    .inputs = in_info,
                                    .input_count = 2,
                                    .outputs = &out_info,
                                    .gradients = &g,
                                    .output_count = 1,
                                    .results = results,
                                    .needs = (bool[]){ true, false },
                                    .last = true };
        OK(ms_op_cross_entropy.backward(&gradient));
        size_t logits = ROWS * CLASSES * sizeof(float);
        uint64_t peak = ms_engine_memory(engine).peak;
        assert_true(held ? peak >= 2 * logits : peak < logits + logits / 10);
        double *values = malloc(ROWS * CLASSES * sizeof *values);
        read_values(engine, results[0], values);
        for (int i = 0; i < ROWS * CLASSES; i++)
            assert_true(fabs(values[i] - ((i % CLASSES == 0 ? -1.0 : 0.0) + 1.0 / CLASSES) / ROWS)
                        < 1e-8);
        if (held) {
            read_values(engine, in[0], values);
            for (int i = 0; i < ROWS * CLASSES; i++) assert_true(values[i] == 2.0);
            ms_tensor_release(in[0]);
        }
        free(values);
        ms_op_drop_saved(&call);
        ms_tensor_release(results[0]);
        ms_tensor_release(g);
        ms_tensor_release(in[1]);
        ms_tensor_release(out[0]);
        ms_engine_free(engine);
    }
}

/* ------------------------------------------------------------ squared error */

static void mse_reference(const check *c)
{
    double sum = 0;
    size_t n = count_of(&c->in[0]);
    for (size_t i = 0; i < n; i++)
        sum +=
            (c->in[0].values[i] - c->in[1].values[i]) * (c->in[0].values[i] - c->in[1].values[i]);
    c->out[0].values[0] = sum / (double)n;
}

static void test_mse_loss(void **state)
{
    (void)state;
    const struct {
        ms_dtype dtype;
        int64_t rows;
        int layout;
        ms_dtype second, autocast;
    } cases[] = {
        { MS_F32, 3, PLAIN, MS_F32, MS_F32 },     { MS_F32, 3, SWAPPED, MS_F32, MS_F32 },
        { MS_F32, 900, PLAIN, MS_F32, MS_F32 },   { MS_BF16, 3, PLAIN, MS_BF16, MS_F32 },
        { MS_F16, 5, SPREAD, MS_F16, MS_F32 },    { MS_BF16, 5, PLAIN, MS_BF16, MS_BF16 },
        { MS_BF16, 5, SWAPPED, MS_F32, MS_BF16 }, { MS_F32, 8, PLAIN, MS_F16, MS_F16 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        operand x = { .dtype = cases[i].dtype,
                      .dims = 2,
                      .shape = { cases[i].rows, 13 },
                      .layout = cases[i].layout };
        check c = { .op = &ms_op_mse_loss,
                    .in = { x, x },
                    .ins = 2,
                    .out = { { .dtype = cases[i].dtype } },
                    .outs = 1,
                    .reference = mse_reference,
                    .autocast = cases[i].autocast };
        c.in[1].dtype = cases[i].second;
        if (c.autocast != MS_F32) c.out[0].dtype = MS_F32;
        run_check(&c);
    }
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *a = TENSOR(engine, MS_F32, 2, 3), *b = TENSOR(engine, MS_F32, 3);
    check_refused(engine, &ms_op_mse_loss, NULL, (ms_tensor *[]){ a, b }, 2, "the same shape");
    ms_tensor_release(a);
    ms_tensor_release(b);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    operand x = { .dtype = MS_F32, .dims = 2, .shape = { 4, 9 }, .layout = SWAPPED },
            target = { .dtype = MS_I64, .dims = 1, .shape = { 4 }, .low = 0, .high = 9 };
    check softmax = { .op = &ms_op_softmax, .in = { x }, .ins = 1, .outs = 1 },
          mse = { .op = &ms_op_mse_loss, .in = { x, x }, .ins = 2, .outs = 1 };
    check cross_entropy = { .op = &ms_op_cross_entropy,
                            .attributes.loss.ignore_index = -100,
                            .in = { x, target },
                            .ins = 2,
                            .outs = 1 };
    check_lack_of_memory(&softmax);
    check_lack_of_memory(&mse);
    check_lack_of_memory(&cross_entropy);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_softmax),
        cmocka_unit_test(test_softmax_extremes),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_cross_entropy_all_ignored),
        cmocka_unit_test(test_cross_entropy_names_the_bad_target),
        cmocka_unit_test(test_cross_entropy_gradient_takes_the_logits_place),
        cmocka_unit_test(test_mse_loss),
        cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
