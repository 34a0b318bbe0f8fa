/* vector_math.c: exp, log, tanh, sigmoid, sin, cos and the error function on vectors, in units in
 * the last place, over all of f32. ctest: each-isa */
#include "gradcheck.h"

#include <float.h>

#define NUMBERS (1 << 20)

static float in[NUMBERS], out[NUMBERS];

/* Distance of got from want in units in the last place of want as f32. Threads flush subnormal
 * numbers to 0: below FLT_MIN either will do. */
static double ulps(float got, double want)
{
    int exponent;
    if (isnan(want)) return isnan(got) ? 0 : INFINITY;
    if (fabs(want) > FLT_MAX) {
        if (isinf(got) && (got > 0) == (want > 0)) return 0;
        return fabs(want) < FLT_MAX * (1 + 1e-7) ? 1 : INFINITY;
    }
    if (fabs(want) < 1.0001 * FLT_MIN) return fabs(got) <= 1.0001 * FLT_MIN ? 0 : INFINITY;
    frexp(want, &exponent);
    return fabs(got - want) / ldexp(1, exponent - 24);
}

static double sigmoid(double x) { return 1 / (1 + exp(-x)); }

static void test_errors_over_all_of_f32(void **state)
{
    (void)state;
    /* The bounds that vector_math.h states; least: where the result would become subnormal. */
    struct {
        const char *name;
        double (*reference)(double), bound, least;
    } cases[] = {
        { "exp", exp, 1.1, -87.3 },          { "log", log, 1.0, -INFINITY },
        { "tanh", tanh, 1.6, -INFINITY },    { "sigmoid", sigmoid, 2.5, -87 },
        { "sqrt", sqrt, 0.5001, -INFINITY }, { "sin", sin, 1.6, -INFINITY },
        { "cos", cos, 1.6, -INFINITY },
    };
    ms_engine *engine = engine_with(2, NULL);
    ms_tensor *x = NULL;
    assert_ok(engine, ms_tensor_new(engine, MS_F32, DIMS(NUMBERS), &x));
    for (uint32_t i = 0; i < NUMBERS; i++) { /* every 4,093rd number of either sign */
        in[i] = ms_float_from_bits(i * 4093u + 1);
        if (fabsf(in[i]) < FLT_MIN) in[i] = 0;
    }
    assert_ok(engine, ms_tensor_write(x, in, sizeof in));
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        ms_tensor *y = apply(engine, ms_op_find(cases[c].name), NULL, &x, 1);
        assert_ok(engine, ms_tensor_read(y, out, sizeof out));
        for (size_t i = 0; i < NUMBERS; i++) {
            if (in[i] < cases[c].least) continue;
            double error = ulps(out[i], cases[c].reference(in[i]));
            if (error > cases[c].bound)
                fail_msg("%s(%.9g) is %.9g: %.2f units off", cases[c].name, in[i], out[i], error);
        }
        ms_tensor_release(y);
    }
    ms_tensor_release(x);
    ms_engine_free(engine);
}

/* x (1 + erf(x / sqrt 2)) / 2: the error of erf, at most 1.5 units of numbers below 1, counts half;
 * then two more roundings. */
static void test_error_function(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(2, NULL);
    ms_tensor *x = NULL;
    assert_ok(engine, ms_tensor_new(engine, MS_F32, DIMS(NUMBERS), &x));
    for (int i = 0; i < NUMBERS; i++) in[i] = (float)(i - NUMBERS / 2) / 65536;
    assert_ok(engine, ms_tensor_write(x, in, sizeof in));
    ms_tensor *y = apply(engine, &ms_op_gelu_erf, NULL, &x, 1);
    assert_ok(engine, ms_tensor_read(y, out, sizeof out));
    for (int i = 0; i < NUMBERS; i++) {
        double want = 0.5 * in[i] * (1 + erf(in[i] / sqrt(2)));
        if (fabs(out[i] - want) > 1.8e-7 * fabs(in[i]))
            fail_msg("at %.9g: %.9g, not %.9g", in[i], out[i], want);
    }
    ms_tensor_release(x);
    ms_tensor_release(y);
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(test_errors_over_all_of_f32),
                                        cmocka_unit_test(test_error_function) };
    return cmocka_run_group_tests_name("vector_math", tests, NULL, NULL);
}
