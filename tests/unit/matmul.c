/* matmul.c: products of matrices and linear layers: shapes, layouts, dtypes, autocast, activation.
 * ctest: each-isa poisoned */
#include "reference.h"

/* ------------------------------------------------------------------------------------------------------------------------ matmul */

static size_t index_in(const operand *o, uint32_t skip, const int64_t *at, uint32_t dims)
{
    /* Position in a broadcast operand of the batch index `at` of `dims` numbers; skip: its own matrix dimensions. */
    uint32_t own = o->dims > skip ? o->dims - skip : 0;
    size_t index = 0;
    for (uint32_t d = 0; d < own; d++) {
        int64_t i = at[dims - own + d];
        index = index * (size_t)o->shape[d] + (size_t)(o->shape[d] == 1 ? 0 : i);
    }
    return index;
}

static void matmul_reference(const check *c)
{
    const operand *a = &c->in[0], *b = &c->in[1], *out = &c->out[0];
    int64_t m = a->dims > 1 ? a->shape[a->dims - 2] : 1, k = a->shape[a->dims - 1], n = b->dims > 1 ? b->shape[b->dims - 1] : 1;
    uint32_t batch_dims = (a->dims > b->dims ? a->dims : b->dims) > 2 ? (a->dims > b->dims ? a->dims : b->dims) - 2 : 0;
    size_t batches = count_of(out) / (size_t)(m * n);
    for (size_t batch = 0; batch < batches; batch++) {
        int64_t at[MS_DIMS_MAX];
        size_t rest = batch;
        for (uint32_t d = batch_dims; d-- > 0;) {
            at[d] = (int64_t)(rest % (size_t)out->shape[d]);
            rest /= (size_t)out->shape[d];
        }
        const double *x = a->values + index_in(a, 2, at, batch_dims) * (size_t)(m * k), *y = b->values + index_in(b, 2, at, batch_dims) * (size_t)(k * n);
        double *z = out->values + batch * (size_t)(m * n);
        for (int64_t i = 0; i < m; i++)
            for (int64_t j = 0; j < n; j++) {
                double sum = 0;
                for (int64_t l = 0; l < k; l++) sum += x[i * k + l] * y[l * n + j];
                z[i * n + j] = sum;
            }
    }
}

static check matmul_of(ms_dtype dtype, operand a, operand b, operand out)
{
    a.dtype = b.dtype = out.dtype = dtype;
    return (check){ .op = &ms_op_matmul, .in = { a, b }, .ins = 2, .out = { out }, .outs = 1, .reference = matmul_reference };
}

#define SHAPE(...) { .dims = (uint32_t)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), .shape = { __VA_ARGS__ } }
#define MATMUL(dtype, ...) do { operand operands[] = { __VA_ARGS__ }; check c = matmul_of(dtype, operands[0], operands[1], operands[2]); run_check(&c); } while (0)

static void test_matmul_shapes(void **state)
{
    (void)state;
    MATMUL(MS_F32, SHAPE(3, 5), SHAPE(5, 4), SHAPE(3, 4));
    MATMUL(MS_F32, SHAPE(1, 7), SHAPE(7, 1), SHAPE(1, 1));
    MATMUL(MS_F32, SHAPE(7), SHAPE(7, 3), SHAPE(3));
    MATMUL(MS_F32, SHAPE(3, 7), SHAPE(7), SHAPE(3));
    MATMUL(MS_F32, SHAPE(2, 3, 7), SHAPE(7), SHAPE(2, 3));
    MATMUL(MS_F32, SHAPE(7), SHAPE(2, 7, 3), SHAPE(2, 3));
    MATMUL(MS_F32, SHAPE(2, 3, 4, 5), SHAPE(2, 3, 5, 2), SHAPE(2, 3, 4, 2));
    MATMUL(MS_F32, SHAPE(2, 3, 4, 5), SHAPE(5, 2), SHAPE(2, 3, 4, 2));
    MATMUL(MS_F32, SHAPE(4, 5), SHAPE(2, 3, 5, 2), SHAPE(2, 3, 4, 2));
    MATMUL(MS_F32, SHAPE(2, 1, 4, 5), SHAPE(3, 5, 2), SHAPE(2, 3, 4, 2));
    MATMUL(MS_F32, SHAPE(1, 3, 4, 5), SHAPE(2, 1, 5, 2), SHAPE(2, 3, 4, 2));
}

static operand laid(operand o, int layout)
{
    o.layout = layout;
    return o;
}

static void test_matmul_layouts(void **state)
{
    (void)state;
    for (int left = PLAIN; left <= SPREAD; left++)
        for (int right = PLAIN; right <= SPREAD; right++) {
            MATMUL(MS_F32, laid((operand)SHAPE(2, 6, 5), left), laid((operand)SHAPE(2, 5, 7), right), SHAPE(2, 6, 7));
            MATMUL(MS_F32, laid((operand)SHAPE(2, 6, 5), left), laid((operand)SHAPE(5, 7), right), SHAPE(2, 6, 7));
        }
}

/* Sizes at which work is cut into parts, with plans for exact sizes (multiples of 16) and without. */
static void test_matmul_parts(void **state)
{
    (void)state;
    MATMUL(MS_F32, SHAPE(128, 128), SHAPE(128, 128), SHAPE(128, 128));
    MATMUL(MS_F32, SHAPE(131, 100), SHAPE(100, 117), SHAPE(131, 117));
    MATMUL(MS_F32, SHAPE(10, 160), SHAPE(160, 800), SHAPE(10, 800));
    MATMUL(MS_F32, SHAPE(8, 64, 48), SHAPE(8, 48, 64), SHAPE(8, 64, 64));
    MATMUL(MS_F32, SHAPE(3, 100, 64), SHAPE(3, 64, 90), SHAPE(3, 100, 90));
}

static void test_matmul_half(void **state)
{
    (void)state;
    for (ms_dtype dtype = MS_F16; dtype <= MS_BF16; dtype++) {
        MATMUL(dtype, SHAPE(3, 5), SHAPE(5, 4), SHAPE(3, 4));
        MATMUL(dtype, laid((operand)SHAPE(32, 48), SWAPPED), SHAPE(48, 16), SHAPE(32, 16));
        MATMUL(dtype, SHAPE(2, 6, 5), laid((operand)SHAPE(2, 5, 7), SWAPPED), SHAPE(2, 6, 7));
        MATMUL(dtype, SHAPE(140, 600), SHAPE(600, 260), SHAPE(140, 260));
    }
}

static void test_matmul_autocast(void **state)
{
    (void)state;
    for (ms_dtype dtype = MS_F16; dtype <= MS_BF16; dtype++) {
        check c = matmul_of(MS_F32, (operand)SHAPE(2, 16, 32), (operand)SHAPE(32, 48), (operand)SHAPE(2, 16, 48));
        c.autocast = dtype;
        c.tolerance = dtype == MS_BF16 ? 1e-2 : 1.5e-3;   /* both operands are rounded before they are multiplied */
        run_check(&c);
    }
}

static void test_matmul_empty(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *a = TENSOR(engine, MS_F32, 3, 0), *b = TENSOR(engine, MS_F32, 0, 4), *out = NULL;
    float values[12];
    OK(ms_op_binary(engine, &ms_op_matmul, NULL, a, b, &out));
    OK(ms_tensor_read(out, values, sizeof values));
    for (int i = 0; i < 12; i++) assert_true(values[i] == 0.0f);
    ms_tensor_release(a);
    ms_tensor_release(b);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

static void test_matmul_refusals(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *a = TENSOR(engine, MS_F32, 2, 3), *b = TENSOR(engine, MS_F32, 4, 5), *h = TENSOR(engine, MS_F16, 3, 5), *batch = TENSOR(engine, MS_F32, 2, 1, 3), *three = TENSOR(engine, MS_F32, 3, 3, 2);
    check_refused(engine, &ms_op_matmul, NULL, (ms_tensor *[]){ a, b }, 2, "[2, 3] f32 and [4, 5] f32");
    check_refused(engine, &ms_op_matmul, NULL, (ms_tensor *[]){ a, b }, 2, "the last dimension of the first (3)");
    check_refused(engine, &ms_op_matmul, NULL, (ms_tensor *[]){ a, h }, 2, "the same float dtype");
    check_refused(engine, &ms_op_matmul, NULL, (ms_tensor *[]){ batch, three }, 2, "broadcast");
    ms_tensor_release(a);
    ms_tensor_release(b);
    ms_tensor_release(h);
    ms_tensor_release(batch);
    ms_tensor_release(three);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------------------------------------------------------------ linear */

static void linear_reference(const check *c)
{
    const operand *x = &c->in[0], *w = &c->in[1], *bias = &c->in[2], *out = &c->out[0];
    size_t in = (size_t)x->shape[x->dims - 1], width = (size_t)out->shape[out->dims - 1], rows = count_of(out) / width;
    bool turned = c->op == &ms_op_linear_t;
    for (size_t row = 0; row < rows; row++)
        for (size_t j = 0; j < width; j++) {
            double sum = c->ins > 2 && !bias->absent ? bias->values[j] : 0;
            for (size_t i = 0; i < in; i++) sum += x->values[row * in + i] * w->values[turned ? i * width + j : j * in + i];
            if (c->attributes.linear.activation == MS_ACTIVATION_GELU) sum = 0.5 * sum * (1 + tanh(0.7978845608028654 * (sum + 0.044715 * sum * sum * sum)));
            out->values[row * width + j] = sum;
        }
}

static check linear_of(const ms_op *op, ms_dtype dtype, int64_t rows, int64_t in, int64_t out, bool bias)
{
    bool turned = op == &ms_op_linear_t;
    return (check){
        .op = op, .ins = 3, .outs = 1, .reference = linear_reference,
        .in = { { .dtype = dtype, .dims = 3, .shape = { 2, rows, in } },
                { .dtype = dtype, .dims = 2, .shape = { turned ? in : out, turned ? out : in } },
                { .dtype = dtype, .dims = 1, .shape = { out }, .absent = !bias } },
        .out = { { .dtype = dtype, .dims = 3, .shape = { 2, rows, out } } },
    };
}

static void test_linear(void **state)
{
    (void)state;
    const ms_op *ops[] = { &ms_op_linear, &ms_op_linear_t };
    for (int i = 0; i < 2; i++)
        for (int bias = 0; bias < 2; bias++)
            for (int layout = PLAIN; layout <= SPREAD; layout++) {
                check c = linear_of(ops[i], MS_F32, 3, 10, 6, bias);
                c.in[0].layout = layout;
                run_check(&c);
                c.attributes.linear.activation = MS_ACTIVATION_GELU;
                run_check(&c);
            }
    check one = linear_of(&ms_op_linear, MS_F32, 1, 16, 32, true);
    run_check(&one);
    check parts = linear_of(&ms_op_linear, MS_F32, 64, 96, 128, true);
    run_check(&parts);
    check odd = linear_of(&ms_op_linear_t, MS_F32, 61, 99, 131, true);
    run_check(&odd);
}

static void test_linear_half_and_autocast(void **state)
{
    (void)state;
    for (ms_dtype dtype = MS_F16; dtype <= MS_BF16; dtype++) {
        check c = linear_of(&ms_op_linear, dtype, 8, 16, 16, true);
        run_check(&c);
        check t = linear_of(&ms_op_linear_t, dtype, 3, 10, 6, true);
        run_check(&t);
        check cast = linear_of(&ms_op_linear_t, MS_F32, 16, 32, 48, true);
        cast.autocast = dtype;
        cast.tolerance = dtype == MS_BF16 ? 1e-2 : 1.5e-3;
        run_check(&cast);
        cast = linear_of(&ms_op_linear, MS_F32, 3, 10, 6, true);
        cast.autocast = dtype;
        cast.tolerance = dtype == MS_BF16 ? 1e-2 : 1.5e-3;
        cast.attributes.linear.activation = MS_ACTIVATION_GELU;
        run_check(&cast);
    }
}

/* Without a gradient to come the activation overwrites what the product gave: same values, one tensor. */
static void test_linear_gelu_without_gradient(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    uint64_t random = 0;
    check c = linear_of(&ms_op_linear, MS_F32, 4, 16, 32, true);
    ms_tensor *in[3], *before = NULL, *fused = NULL, *apart = NULL;
    for (int i = 0; i < 3; i++) {
        fill(&c.in[i], &random);
        in[i] = tensor_of(engine, &c.in[i]);
        free(c.in[i].values);
    }
    OK(ms_engine_sync(engine));
    uint64_t live = ms_engine_memory(engine).live;
    ms_engine_reset_peak(engine);
    ms_attributes attributes = { .linear.activation = MS_ACTIVATION_GELU };
    OK(ms_op_apply(engine, &ms_op_linear, &attributes, false, in, 3, &fused, 1));
    assert_true(ms_engine_memory(engine).peak <= live + 8 * 32 * sizeof(float));
    OK(ms_op_apply(engine, &ms_op_linear, NULL, false, in, 3, &before, 1));
    OK(ms_op_unary(engine, &ms_op_gelu, NULL, before, &apart));
    double x[8 * 32], y[8 * 32];
    read_values(engine, fused, x);
    read_values(engine, apart, y);
    assert_memory_equal(x, y, sizeof x);
    for (int i = 0; i < 3; i++) ms_tensor_release(in[i]);
    ms_tensor_release(before);
    ms_tensor_release(fused);
    ms_tensor_release(apart);
    ms_engine_free(engine);
}

static void test_linear_refusals(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *x = TENSOR(engine, MS_F32, 2, 3), *w = TENSOR(engine, MS_F32, 4, 3), *bias = TENSOR(engine, MS_F32, 3), *cube = TENSOR(engine, MS_F32, 1, 4, 3);
    check_refused(engine, &ms_op_linear_t, NULL, (ms_tensor *[]){ x, w }, 2, "the input's last dimension is 3, the weight ([in, out]) takes 4");
    check_refused(engine, &ms_op_linear, NULL, (ms_tensor *[]){ x, w, bias }, 3, "the bias must have shape [4]");
    check_refused(engine, &ms_op_linear, NULL, (ms_tensor *[]){ x, cube }, 2, "two dimensions");
    ms_tensor_release(x);
    ms_tensor_release(w);
    ms_tensor_release(bias);
    ms_tensor_release(cube);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    check product = matmul_of(MS_BF16, (operand)SHAPE(2, 1, 16, 32), (operand)SHAPE(3, 32, 16), (operand)SHAPE(2, 3, 16, 16));
    check_lack_of_memory(&product);
    check linear = linear_of(&ms_op_linear, MS_F32, 8, 16, 32, true);
    linear.autocast = MS_F16;
    linear.attributes.linear.activation = MS_ACTIVATION_GELU;
    check_lack_of_memory(&linear);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_matmul_shapes), cmocka_unit_test(test_matmul_layouts), cmocka_unit_test(test_matmul_parts),
        cmocka_unit_test(test_matmul_half), cmocka_unit_test(test_matmul_autocast), cmocka_unit_test(test_matmul_empty),
        cmocka_unit_test(test_matmul_refusals), cmocka_unit_test(test_linear), cmocka_unit_test(test_linear_half_and_autocast),
        cmocka_unit_test(test_linear_gelu_without_gradient), cmocka_unit_test(test_linear_refusals),
        cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
