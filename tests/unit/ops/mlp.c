/* mlp.c: two linear layers with gelu between them: shapes, layouts, dtypes, autocast, biases.
 * ctest: each-isa poisoned late cuda */
#include "reference.h"

static double weight_of(const operand *w, bool turned, size_t in, size_t width, size_t i, size_t j)
{
    return w->values[turned ? i * width + j : j * in + i];
}

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

/* Inputs: x, the second layer's weight and bias, the first one's. In f64: the tolerances of 16 bits
 * allow for the rounding of what is between the layers. */
static void mlp_reference(const check *c)
{
    const operand *x = &c->in[0], *first = &c->in[3], *second = &c->in[1], *out = &c->out[0];
    bool turned = c->op == &ms_op_mlp_t;
    size_t in = (size_t)x->shape[x->dims - 1], width = (size_t)out->shape[out->dims - 1],
           hidden = (size_t)first->shape[turned ? 1 : 0], rows = count_of(out) / width;
    double *between = malloc(hidden * sizeof *between);
    for (size_t row = 0; row < rows; row++) {
        for (size_t j = 0; j < hidden; j++) {
            double sum = c->in[4].absent ? 0 : c->in[4].values[j];
            for (size_t i = 0; i < in; i++)
                sum += x->values[row * in + i] * weight_of(first, turned, in, hidden, i, j);
            between[j] = gelu(sum);
        }
        for (size_t j = 0; j < width; j++) {
            double sum = c->in[2].absent ? 0 : c->in[2].values[j];
            for (size_t i = 0; i < hidden; i++)
                sum += between[i] * weight_of(second, turned, hidden, width, i, j);
            out->values[row * width + j] = sum;
        }
    }
    free(between);
}

static check mlp_of(const ms_op *op, ms_dtype dtype, int64_t rows, int64_t in, int64_t hidden,
                    int64_t out)
{
    bool turned = op == &ms_op_mlp_t;
    return (check){
        .op = op,
        .ins = 5,
        .outs = 1,
        .reference = mlp_reference,
        .in = { { .dtype = dtype, .dims = 3, .shape = { 2, rows, in } },
                { .dtype = dtype,
                  .dims = 2,
                  .shape = { turned ? hidden : out, turned ? out : hidden } },
                { .dtype = dtype, .dims = 1, .shape = { out } },
                { .dtype = dtype,
                  .dims = 2,
                  .shape = { turned ? in : hidden, turned ? hidden : in } },
                { .dtype = dtype, .dims = 1, .shape = { hidden } } },
        .out = { { .dtype = dtype, .dims = 3, .shape = { 2, rows, out } } },
    };
}

static void test_layouts_and_biases(void **state)
{
    (void)state;
    const ms_op *ops[] = { &ms_op_mlp, &ms_op_mlp_t };
    for (int i = 0; i < 2; i++)
        for (int absent = 0; absent < 4; absent++) {
            check c = mlp_of(ops[i], MS_F32, 3, 10, 24, 6);
            c.in[0].layout = absent == 1 ? SWAPPED : absent == 2 ? SPREAD : PLAIN;
            c.in[2].absent = absent & 1;
            c.in[4].absent = absent & 2;
            run_check(&c);
        }
    /* Parts of products, tiles of rows, blocks of sums. */
    check tall = mlp_of(&ms_op_mlp, MS_F32, 150, 16, 70, 33);
    run_check(&tall);
}

static void test_half_and_autocast(void **state)
{
    (void)state;
    for (ms_dtype dtype = MS_F16; dtype <= MS_BF16; dtype++) {
        double tolerance = dtype == MS_BF16 ? 2e-2 : 3e-3;
        check half = mlp_of(&ms_op_mlp_t, dtype, 8, 16, 32, 16);
        half.tolerance = tolerance;
        run_check(&half);
        check cast = mlp_of(&ms_op_mlp, MS_F32, 5, 24, 40, 8);
        set_autocast(&cast, dtype);
        cast.tolerance = tolerance;
        run_check(&cast);
        /* A stream of 16 bits, weights of f32. */
        check mixed = mlp_of(&ms_op_mlp_t, MS_F32, 5, 24, 40, 8);
        mixed.in[0].dtype = dtype;
        set_autocast(&mixed, dtype);
        mixed.tolerance = tolerance;
        run_check(&mixed);
    }
}

/* Frozen operands get no gradient, and the others the same one. */
static void test_frozen(void **state)
{
    (void)state;
    for (int frozen = 1; frozen < 31; frozen++) {
        check c = mlp_of(&ms_op_mlp, MS_F32, 2, 5, 9, 3);
        for (int i = 0; i < 5; i++) c.in[i].constant = frozen >> i & 1;
        run_check(&c);
    }
}

static void test_refusals(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *x = TENSOR(engine, MS_F32, 2, 4), *first = TENSOR(engine, MS_F32, 6, 4),
              *second = TENSOR(engine, MS_F32, 3, 5);
    check_refused(engine, &ms_op_mlp, NULL, (ms_tensor *[]){ x, second, NULL, first }, 4,
                  "the input's last dimension is 6, the weight ([out, in]) takes 5");
    check_refused(engine, &ms_op_mlp, NULL, (ms_tensor *[]){ x, first, NULL, second }, 4,
                  "the input's last dimension is 4");
    check_refused(engine, &ms_op_mlp, NULL, (ms_tensor *[]){ x, first }, 2, "weight is missing");
    ms_tensor_release(x);
    ms_tensor_release(first);
    ms_tensor_release(second);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    check c = mlp_of(&ms_op_mlp, MS_F32, 8, 16, 32, 16);
    set_autocast(&c, MS_BF16);
    check_lack_of_memory(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts_and_biases),
        cmocka_unit_test(test_half_and_autocast),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
