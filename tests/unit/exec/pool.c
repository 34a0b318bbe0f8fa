/* pool.c: max_pool2d and avg_pool2d against their definitions: overlapping and distant windows,
 * padding, dtypes, equal elements, infinities and NaN.
 * ctest: each-isa poisoned late cuda */
#include "reference.h"

/* The definition: the elements of each window, in row-major order. */
static void pool_reference(const check *c)
{
    const int64_t *x = c->in[0].shape, *y = c->out[0].shape;
    const int32_t *kernel = c->attributes.window.kernel, *padding = c->attributes.window.padding;
    bool max = c->op == &ms_op_max_pool2d;
    for (int64_t i = 0; i < (int64_t)count_of(&c->out[0]); i++) {
        int64_t plane = i / (y[2] * y[3]), first[2], found = 0;
        const int64_t place[2] = { i / y[3] % y[2], i % y[3] };
        double sum = 0, best = -INFINITY;
        for (int d = 0; d < 2; d++) {
            int32_t stride = c->attributes.window.stride[d];
            first[d] = place[d] * (stride ? stride : kernel[d]) - padding[d];
        }
        for (int64_t row = first[0]; row < first[0] + kernel[0]; row++)
            for (int64_t column = first[1]; column < first[1] + kernel[1]; column++) {
                if (row < 0 || row >= x[2] || column < 0 || column >= x[3]) continue;
                double value = c->in[0].values[(plane * x[2] + row) * x[3] + column];
                found++;
                sum += value;
                if (value > best) best = value;
            }
        int64_t all = c->attributes.window.skip_padding ? found : kernel[0] * kernel[1];
        c->out[0].values[i] = max ? best : sum / (double)all;
    }
}

typedef struct sizes {
    int64_t images, channels, rows, columns;
    int32_t kernel[2], stride[2], padding[2];
} sizes;

static check check_of(const ms_op *op, const sizes *s, ms_dtype dtype, int layout)
{
    int64_t out[2], in[2] = { s->rows, s->columns };
    check c = { .op = op, .ins = 1, .outs = 1, .reference = pool_reference };
    for (int d = 0; d < 2; d++) {
        int64_t stride = s->stride[d] ? s->stride[d] : s->kernel[d];
        out[d] = (in[d] + 2 * s->padding[d] - s->kernel[d]) / stride + 1;
        c.attributes.window.kernel[d] = s->kernel[d];
        c.attributes.window.stride[d] = s->stride[d];
        c.attributes.window.padding[d] = s->padding[d];
    }
    c.in[0] = (operand){ .dtype = dtype,
                         .dims = 4,
                         .shape = { s->images, s->channels, s->rows, s->columns },
                         .layout = layout };
    c.out[0] = (operand){ .dtype = dtype,
                          .dims = 4,
                          .shape = { s->images, s->channels, out[0], out[1] },
                          .layout = layout };
    return c;
}

static void run_op(const ms_op *op, bool skip_padding)
{
    static const sizes cases[] = {
        { 2, 3, 6, 8, { 2, 2 }, .stride = { 0, 0 } },
        { 1, 2, 7, 9, { 3, 2 }, .stride = { 2, 3 }, .padding = { 1, 1 } }, /* the last columns are
                                                                              not covered */
        { 2, 1, 5, 6, { 3, 3 }, .stride = { 1, 1 }, .padding = { 1, 1 } }, /* windows overlap */
        { 1, 2, 5, 4, { 5, 4 }, .stride = { 0, 0 } },                      /* the whole plane */
        { 1, 1, 9, 9, { 1, 2 }, .stride = { 4, 5 }, .padding = { 0, 1 } }, /* windows are apart */
        { 3, 40, 16, 16, { 3, 3 }, .stride = { 2, 2 }, .padding = { 1, 1 } }, /* several tiles */
        { 0, 2, 4, 4, { 2, 2 }, .stride = { 0, 0 } },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int k = 0; k < 3; k++) {
            static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_F16 };
            check c = check_of(op, &cases[i], dtypes[k], (int)(i + (size_t)k) % 3);
            c.attributes.window.skip_padding = skip_padding;
            /* Distinct values further apart than differences reach: which of them wins does not
             * change. 16-bit values may be equal, and then differences say nothing of max. */
            if (op == &ms_op_max_pool2d && dtypes[k] != MS_F32) c.in[0].constant = true;
            run_check(&c);
        }
}

static void test_max(void **state)
{
    (void)state;
    run_op(&ms_op_max_pool2d, false);
}

static void test_avg(void **state)
{
    (void)state;
    run_op(&ms_op_avg_pool2d, false);
    run_op(&ms_op_avg_pool2d, true);
}

/* Values and gradients of a row of windows of two elements, a sum of the results going back. */
static void expect_row(ms_dtype dtype, const double *x, const double *y, const double *dx)
{
    sizes s = { 1, 1, 1, 8, { 1, 2 }, .stride = { 0, 0 } };
    check c = check_of(&ms_op_max_pool2d, &s, dtype, PLAIN);
    operand incoming[TENSORS] = { c.out[0] };
    double ones[4] = { 1, 1, 1, 1 };
    c.in[0].values = malloc(8 * sizeof(double));
    memcpy(c.in[0].values, x, 8 * sizeof(double));
    incoming[0].values = ones;
    ms_engine *engine = engine_with(1, NULL);
    answer a = { 0 };
    run_once(engine, &c, incoming, true, &a);
    for (int i = 0; i < 4; i++)
        assert_true(a.out[0][i] == y[i] || (isnan(a.out[0][i]) && isnan(y[i])));
    for (int i = 0; i < 8; i++) assert_true(a.gradient[0][i] == dx[i]);
    answer_free(&a);
    free(c.in[0].values);
    ms_engine_free(engine);
}

/* As in PyTorch: the first of equal elements gets the gradient, NaN wins, and a window of
 * -infinity has a gradient, too. */
static void test_equal_elements_infinities_and_nan(void **state)
{
    (void)state;
    const double x[8] = { 2, 2, NAN, 5, -INFINITY, -INFINITY, -0.0, 0 };
    const double y[4] = { 2, NAN, -INFINITY, 0 }, dx[8] = { 1, 0, 1, 0, 1, 0, 1, 0 };
    expect_row(MS_F32, x, y, dx);
    expect_row(MS_BF16, x, y, dx);
    expect_row(MS_F16, x, y, dx);
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *x = TENSOR(engine, MS_F32, 2, 3, 4, 5), *flat = TENSOR(engine, MS_F32, 4, 5),
              *ids = TENSOR(engine, MS_I64, 2, 3, 4, 5), *none = TENSOR(engine, MS_F32, 2, 0, 4, 5);
    const ms_op *ops[] = { &ms_op_max_pool2d, &ms_op_avg_pool2d };
    ms_attributes plain = { .window = { .kernel = { 2, 2 } } },
                  large = { .window = { .kernel = { 2, 6 } } },
                  padded = { .window = { .kernel = { 3, 3 }, .padding = { 1, 2 } } },
                  absent = { .window = { .kernel = { 0, 2 } } },
                  spread = { .window = { .kernel = { 2, 2 }, .dilation = { 2, 1 } } };
    for (int i = 0; i < 2; i++) {
        check_refused(engine, ops[i], &plain, &flat, 1, "[images, channels, rows, columns]");
        check_refused(engine, ops[i], &plain, &ids, 1, "must be floats");
        check_refused(engine, ops[i], &plain, &none, 1, "only the number of images");
        check_refused(engine, ops[i], &large, &x, 1, "2 x 6, more than the padded input's 4 x 5");
        check_refused(engine, ops[i], &padded, &x, 1, "padding 2 is more than half of the window");
        check_refused(engine, ops[i], &absent, &x, 1, "kernel 0");
        check_refused(engine, ops[i], &spread, &x, 1, "no dilation");
    }
    ms_tensor_release(x);
    ms_tensor_release(flat);
    ms_tensor_release(ids);
    ms_tensor_release(none);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    sizes s = { 2, 2, 4, 4, { 2, 2 }, .stride = { 0, 0 } };
    check c = check_of(&ms_op_max_pool2d, &s, MS_F16, SWAPPED);
    check_lack_of_memory(&c);
    c = check_of(&ms_op_avg_pool2d, &s, MS_F16, SWAPPED);
    check_lack_of_memory(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_max),
        cmocka_unit_test(test_avg),
        cmocka_unit_test(test_equal_elements_infinities_and_nan),
        cmocka_unit_test(test_mistakes_are_named),
        cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
