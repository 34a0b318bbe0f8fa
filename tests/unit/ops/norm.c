/* norm.c: layer norm and RMS norm, alone and fused with the residual sum.
 * ctest: each-isa poisoned late cuda */
#include "reference.h"

/* Inputs: x, [residual], weight, [bias]; outputs: [x + residual], norm. */
static void norm_reference(const check *c)
{
    bool fused = c->outs == 2,
         centered = c->op == &ms_op_layer_norm || c->op == &ms_op_add_layer_norm;
    uint32_t at = fused ? 2 : 1;
    const operand *x = &c->in[0], *weight = &c->in[at], *bias = &c->in[at + 1];
    size_t width = (size_t)x->shape[x->dims - 1], rows = count_of(x) / width;
    bool has_weight = c->ins > at && !weight->absent, has_bias = c->ins > at + 1 && !bias->absent;
    double *s = malloc(width * sizeof *s);
    for (size_t row = 0; row < rows; row++) {
        double mean = 0, square = 0;
        for (size_t i = 0; i < width; i++) {
            s[i] = x->values[row * width + i] + (fused ? c->in[1].values[row * width + i] : 0);
            if (fused) c->out[0].values[row * width + i] = s[i];
            mean += s[i];
        }
        mean = centered ? mean / (double)width : 0;
        for (size_t i = 0; i < width; i++) square += (s[i] - mean) * (s[i] - mean);
        double deviation = sqrt(square / (double)width + c->attributes.norm.eps);
        for (size_t i = 0; i < width; i++) {
            double scale = has_weight ? weight->values[i] : 1;
            double offset = has_bias ? bias->values[i] : 0;
            c->out[c->outs - 1].values[row * width + i] =
                (s[i] - mean) / deviation * scale + offset;
        }
    }
    free(s);
}

static check norms(const ms_op *op, ms_dtype dtype, int64_t rows, int64_t width, bool weight,
                   bool bias, int layout)
{
    bool fused = op == &ms_op_add_layer_norm || op == &ms_op_add_rms_norm,
         centered = op == &ms_op_layer_norm || op == &ms_op_add_layer_norm;
    operand x = { .dtype = dtype,
                  .dims = 3,
                  .shape = { 2, rows, width },
                  .layout = layout,
                  .low = -2,
                  .high = 3 };
    operand scale = { .dtype = dtype, .dims = 1, .shape = { width }, .absent = !weight },
            shift = { .dtype = dtype, .dims = 1, .shape = { width }, .absent = !bias };
    check c = { .op = op, .attributes.norm.eps = 1e-5, .reference = norm_reference };
    c.in[c.ins++] = x;
    if (fused) c.in[c.ins++] = x;
    c.in[c.ins++] = scale;
    if (centered) c.in[c.ins++] = shift;
    c.outs = fused ? 2 : 1;
    c.out[0] = c.out[1] = x;
    c.out[0].layout = c.out[1].layout = PLAIN;
    return c;
}

static void run_norm(const ms_op *op, ms_dtype dtype, int64_t rows, int64_t width, bool weight,
                     bool bias, int layout)
{
    check c = norms(op, dtype, rows, width, weight, bias, layout);
    run_check(&c);
}

static void test_forms(void **state)
{
    (void)state;
    run_norm(&ms_op_layer_norm, MS_F32, 3, 16, true, true, PLAIN);
    run_norm(&ms_op_layer_norm, MS_F32, 2, 7, true, true, PLAIN);
    run_norm(&ms_op_layer_norm, MS_F32, 2, 21, false, false, PLAIN);
    run_norm(&ms_op_layer_norm, MS_F32, 2, 21, true, false, PLAIN);
    run_norm(&ms_op_layer_norm, MS_F32, 2, 21, false, true, PLAIN);
    run_norm(&ms_op_rms_norm, MS_F32, 3, 33, true, false, PLAIN);
    run_norm(&ms_op_rms_norm, MS_F32, 3, 32, false, false, PLAIN);
    run_norm(&ms_op_add_layer_norm, MS_F32, 3, 19, true, true, PLAIN);
    run_norm(&ms_op_add_rms_norm, MS_F32, 3, 19, true, false, PLAIN);
}

static void test_strided_inputs(void **state)
{
    (void)state;
    run_norm(&ms_op_layer_norm, MS_F32, 3, 16, true, true, SWAPPED);
    run_norm(&ms_op_add_rms_norm, MS_F32, 3, 9, true, false, SPREAD);
}

/* Enough rows for all tiles, so that sums over rows are put together from parts. */
static void test_many_rows(void **state)
{
    (void)state;
    run_norm(&ms_op_layer_norm, MS_F32, 400, 130, true, true, PLAIN);
    run_norm(&ms_op_add_rms_norm, MS_F32, 300, 256, true, false, PLAIN);
}

/* A device may give one row to more threads than a narrow one gets. */
static void test_wide_rows(void **state)
{
    (void)state;
    run_norm(&ms_op_add_layer_norm, MS_F32, 2, 1504, true, true, PLAIN);
    run_norm(&ms_op_rms_norm, MS_F32, 1, 1501, true, false, PLAIN);
    run_norm(&ms_op_layer_norm, MS_BF16, 1, 8200, true, true, PLAIN);
}

static void test_half_dtypes(void **state)
{
    (void)state;
    run_norm(&ms_op_layer_norm, MS_BF16, 5, 40, true, true, PLAIN);
    run_norm(&ms_op_layer_norm, MS_F16, 5, 40, true, true, PLAIN);
    run_norm(&ms_op_rms_norm, MS_F16, 5, 23, true, false, PLAIN);
    run_norm(&ms_op_add_rms_norm, MS_BF16, 3, 23, true, false, PLAIN);
}

/* Under autocast: an f32 stream whose normalized rows have 16 bits, with a change of 16 bits or of
 * f32 and weights of either; a stream of 16 bits with f32 weights. */
static void test_autocast(void **state)
{
    (void)state;
    static const struct {
        ms_dtype x, residual, weight, autocast;
    } cases[] = {
        { MS_F32, MS_F32, MS_F32, MS_BF16 },   { MS_BF16, MS_F32, MS_F32, MS_BF16 },
        { MS_F32, MS_BF16, MS_F32, MS_BF16 },  { MS_BF16, MS_BF16, MS_F32, MS_BF16 },
        { MS_BF16, MS_F32, MS_BF16, MS_BF16 }, { MS_F16, MS_F32, MS_F32, MS_F16 },
        { MS_F32, MS_F32, MS_F16, MS_F16 },
    };
    static const ms_op *const ops[] = { &ms_op_layer_norm, &ms_op_rms_norm, &ms_op_add_layer_norm,
                                        &ms_op_add_rms_norm };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int op = 0; op < 4; op++) {
            check c = norms(ops[op], cases[i].x, 5, i % 2 ? 40 : 23, true, op % 2 == 0,
                            i == 2 ? SPREAD : PLAIN);
            bool fused = op >= 2;
            if (fused) c.in[1].dtype = cases[i].residual;
            for (uint32_t k = fused ? 2 : 1; k < c.ins; k++) c.in[k].dtype = cases[i].weight;
            bool wide = cases[i].x == MS_F32 || cases[i].residual == MS_F32;
            c.autocast = cases[i].autocast;
            c.out[0].dtype = wide ? MS_F32 : cases[i].autocast;
            c.out[c.outs - 1].dtype = cases[i].autocast;
            c.tolerance = cases[i].autocast == MS_BF16 ? 8e-3 : 2e-3;
            run_check(&c);
        }
}

static void test_refusals(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *x = TENSOR(engine, MS_F32, 2, 8), *w = TENSOR(engine, MS_F32, 7),
              *i = TENSOR(engine, MS_I64, 2, 8), *y = TENSOR(engine, MS_F32, 2, 9);
    check_refused(engine, &ms_op_layer_norm, NULL, (ms_tensor *[]){ x, w }, 2,
                  "the weight must have shape [8]");
    check_refused(engine, &ms_op_rms_norm, NULL, (ms_tensor *[]){ i }, 1, "floats");
    ms_tensor *out[2] = { NULL };
    assert_int_equal(
        ms_op_apply(engine, &ms_op_add_layer_norm, NULL, false, (ms_tensor *[]){ x, y }, 2, out, 2),
        MS_ERROR_ARGUMENT);
    ms_tensor_release(x);
    ms_tensor_release(w);
    ms_tensor_release(i);
    ms_tensor_release(y);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    operand x = { .dtype = MS_BF16, .dims = 2, .shape = { 6, 40 }, .layout = SWAPPED },
            w = { .dtype = MS_BF16, .dims = 1, .shape = { 40 } };
    check c = {
        .op = &ms_op_add_layer_norm, .in = { x, x, w, w }, .ins = 4, .out = { x, x }, .outs = 2
    };
    check_lack_of_memory(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms),       cmocka_unit_test(test_strided_inputs),
        cmocka_unit_test(test_many_rows),   cmocka_unit_test(test_autocast),
        cmocka_unit_test(test_half_dtypes), cmocka_unit_test(test_wide_rows),
        cmocka_unit_test(test_refusals),    cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
