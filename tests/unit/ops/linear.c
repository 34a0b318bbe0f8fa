/* linear.c: linear layers: shapes, layouts, dtypes, autocast, activation, sums for the bias.
 * ctest: each-isa poisoned late cuda */
#include "reference.h"

static void linear_reference(const check *c)
{
    const operand *x = &c->in[0], *w = &c->in[1], *bias = &c->in[2], *out = &c->out[0];
    size_t in = (size_t)x->shape[x->dims - 1], width = (size_t)out->shape[out->dims - 1],
           rows = count_of(out) / width;
    bool turned = c->op == &ms_op_linear_t;
    /* By inputs: then the compiler adds to several outputs at once. */
    double *by_inputs = malloc((in * width + 1) * sizeof *by_inputs);
    for (size_t i = 0; i < in; i++)
        for (size_t j = 0; j < width; j++)
            by_inputs[i * width + j] = w->values[turned ? i * width + j : j * in + i];
    for (size_t row = 0; row < rows; row++) {
        double *sums = out->values + row * width;
        for (size_t j = 0; j < width; j++)
            sums[j] = c->ins > 2 && !bias->absent ? bias->values[j] : 0;
        for (size_t i = 0; i < in; i++)
            for (size_t j = 0; j < width; j++)
                sums[j] += x->values[row * in + i] * by_inputs[i * width + j];
        for (size_t j = 0; j < width && c->attributes.linear.activation == MS_ACTIVATION_GELU;
             j++) {
            double sum = sums[j];
            sums[j] =
                0.5 * sum * (1 + tanh(0.7978845608028654 * (sum + 0.044715 * sum * sum * sum)));
        }
    }
    free(by_inputs);
}

static check linear_of(const ms_op *op, ms_dtype dtype, int64_t rows, int64_t in, int64_t out,
                       bool bias)
{
    bool turned = op == &ms_op_linear_t;
    int64_t first = turned ? in : out;
    int64_t second = turned ? out : in;
    return (check){
        .op = op,
        .ins = 3,
        .outs = 1,
        .reference = linear_reference,
        .in = { { .dtype = dtype, .dims = 3, .shape = { 2, rows, in } },
                { .dtype = dtype, .dims = 2, .shape = { first, second } },
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
    /* Rows enough for several tiles and blocks of sums. */
    check tall = linear_of(&ms_op_linear, MS_F32, 777, 3, 37, true);
    tall.attributes.linear.activation = MS_ACTIVATION_GELU;
    run_check(&tall);
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
        set_autocast(&cast, dtype);
        cast.tolerance = dtype == MS_BF16 ? 1e-2 : 1.5e-3;
        run_check(&cast);
        cast = linear_of(&ms_op_linear, MS_F32, 3, 10, 6, true);
        set_autocast(&cast, dtype);
        cast.tolerance = dtype == MS_BF16 ? 1e-2 : 1.5e-3;
        cast.attributes.linear.activation = MS_ACTIVATION_GELU;
        run_check(&cast);
    }
}

/* What a GPU's library makes with the product, and what kernels make where it has no candidate:
 * gelu and the bias's gradient, in each dtype, with and without a bias, over rows that are apart.
 */
static void test_linear_with_product(void **state)
{
    (void)state;
    const ms_op *ops[] = { &ms_op_linear, &ms_op_linear_t };
    const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_F16 };
    for (int lacks = 0; lacks < 2; lacks++) {
        if (lacks) setenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA", "1", 1);
        for (int i = 0; i < 12; i++) {
            check c = linear_of(ops[i % 2], dtypes[i / 4], 5, 24, 16, i / 2 % 2);
            c.in[0].layout = i % 3;
            run_check(&c);
            c.attributes.linear.activation = MS_ACTIVATION_GELU;
            run_check(&c);
        }
        /* One row, one column, one input, none. */
        for (int i = 0; i < 2; i++) {
            check row = linear_of(ops[i], MS_F32, 1, 7, 24, true),
                  column = linear_of(ops[i], MS_F32, 9, 8, 1, true),
                  thin = linear_of(ops[i], MS_F32, 9, 1, 8, true),
                  empty = linear_of(ops[i], MS_F32, 9, 0, 8, true);
            row.in[0].shape[0] = row.out[0].shape[0] = 1;
            thin.attributes.linear.activation = MS_ACTIVATION_GELU;
            run_check(&row);
            run_check(&column);
            run_check(&thin);
            run_check(&empty);
            empty.attributes.linear.activation = MS_ACTIVATION_GELU;
            run_check(&empty);
        }
        unsetenv("MOONSHARD_STAND_IN_CUBLASLT_NO_EXTRA");
    }
}

/* Gradients whose rows overlap, or follow each other at any distance: y = x w^T + bias, and the
 * sums of what arrives. */
static void test_linear_gradient_layouts(void **state)
{
    (void)state;
    enum { ROWS = 6, WIDTH = 8 };
    static const int64_t steps[] = { WIDTH, 3, 0, WIDTH + 5 };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        ms_engine *engine = engine_with(1, NULL);
        int64_t strides[2] = { steps[i], 1 }, shape[2] = { ROWS, WIDTH }, all[1] = { 128 };
        ms_tensor *x = TENSOR(engine, MS_BF16, ROWS, 4), *w = TENSOR(engine, MS_BF16, WIDTH, 4),
                  *bias = TENSOR(engine, MS_BF16, WIDTH), *in[3] = { x, w, bias }, *memory = NULL,
                  *g = NULL, *out[1] = { NULL }, *results[3] = { NULL };
        uint16_t numbers[128];
        double sums[WIDTH];
        for (int k = 0; k < 128; k++) numbers[k] = ms_bf16_from_float((float)(k * k % 31));
        OK(ms_tensor_new(engine, MS_BF16, 1, all, &memory));
        OK(ms_tensor_write(memory, numbers, sizeof numbers));
        OK(ms_tensor_window(memory, 2, shape, strides, 0, &g));
        ms_op_call call = { .engine = engine,
                            .op = &ms_op_linear,
                            .inputs = in,
                            .input_count = 3,
                            .outputs = out,
                            .output_count = 1,
                            .record = true };
        OK(ms_op_run(&call));
        ms_tensor_info infos[3] = { info_from(x), info_from(w), info_from(bias) },
                       made = info_from(out[0]);
        const bool needs[3] = { false, true, true };
        ms_op_gradient gradient = { .engine = engine,
                                    .op = &ms_op_linear,
                                    .saved = call.saved,
                                    .saved_count = call.saved_count,
                                    .inputs = infos,
                                    .input_count = 3,
                                    .outputs = &made,
                                    .gradients = &g,
                                    .output_count = 1,
                                    .results = results,
                                    .needs = needs };
        OK(ms_op_linear.backward(&gradient));
        read_values(engine, results[2], sums);
        for (int column = 0; column < WIDTH; column++) {
            double sum = 0;
            for (int row = 0; row < ROWS; row++)
                sum += ms_float_from_bf16(numbers[row * steps[i] + column]);
            assert_true(sums[column] == sum);
        }
        ms_op_drop_saved(&call);
        ms_tensor *gone[] = { x, w, bias, memory, g, out[0], results[1], results[2] };
        for (size_t k = 0; k < sizeof gone / sizeof *gone; k++) ms_tensor_release(gone[k]);
        ms_engine_free(engine);
    }
}

/* If no gradient is needed, the activation overwrites the product: the same values in one
 * tensor. */
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
    ms_tensor *x = TENSOR(engine, MS_F32, 2, 3), *w = TENSOR(engine, MS_F32, 4, 3),
              *bias = TENSOR(engine, MS_F32, 3), *cube = TENSOR(engine, MS_F32, 1, 4, 3);
    check_refused(engine, &ms_op_linear_t, NULL, (ms_tensor *[]){ x, w }, 2,
                  "the input's last dimension is 3, the weight ([in, out]) takes 4");
    check_refused(engine, &ms_op_linear, NULL, (ms_tensor *[]){ x, w, bias }, 3,
                  "the bias must have shape [4]");
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
    check linear = linear_of(&ms_op_linear, MS_F32, 8, 16, 32, true);
    set_autocast(&linear, MS_F16);
    linear.attributes.linear.activation = MS_ACTIVATION_GELU;
    check_lack_of_memory(&linear);
    set_autocast(&linear, MS_BF16);
    check_lack_of_memory(&linear);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_half_and_autocast),
        cmocka_unit_test(test_linear_with_product),
        cmocka_unit_test(test_linear_gradient_layouts),
        cmocka_unit_test(test_linear_gelu_without_gradient),
        cmocka_unit_test(test_linear_refusals),
        cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
