/* random.c: the numbers that uniform, normal, randint and dropout draw: distribution, bounds, and
 * that they depend on nothing but seed, step, draw and position. ctest: poisoned late cuda */
#include "gradcheck.h"

static ms_engine *engine;

static int setup(void **state)
{
    (void)state;
    engine = engine_with(2, NULL);
    return 0;
}
static int teardown(void **state)
{
    (void)state;
    ms_engine_free(engine);
    return 0;
}

static ms_attributes draw_of(uint64_t seed, uint64_t step, uint64_t draw, double a, double b)
{
    return (ms_attributes){ .random = { .random = { seed, step, draw }, .a = a, .b = b } };
}

static ms_tensor *filled(ms_engine *own, const ms_op *op, const ms_attributes *attributes,
                         ms_dtype dtype, uint32_t dims, const int64_t *shape)
{
    ms_tensor *tensor = NULL, *out = NULL;
    assert_ok(own, ms_tensor_new(own, dtype, dims, shape, &tensor));
    assert_ok(own, ms_op_apply(own, op, attributes, true, &tensor, 1, &out, 1));
    ms_tensor_release(tensor);
    return out;
}

/* Element i is lane i % 4 of block i / 4 of Philox under (seed, step and draw), which any other
 * program can compute. */
static void test_uniform_is_philox(void **state)
{
    (void)state;
    ms_attributes draw = draw_of(0x123456789abcdef0u, 5, 9, 0, 1);
    ms_tensor *x = filled(engine, &ms_op_uniform, &draw, MS_F32, DIMS(1003));
    double *got = tensor_get(x);
    for (uint64_t i = 0; i < 1003; i++) {
        uint32_t words[4];
        ms_philox(0x123456789abcdef0u, 5ull << 32 ^ 9, i / 4, words);
        assert_true(got[i] == (double)(words[i % 4] >> 8) / 16777216);
    }
    free(got);
    ms_tensor_release(x);
}

/* Mean, deviation and tails of a million numbers: each bound is at least 5 standard errors wide. */
static void test_distributions(void **state)
{
    (void)state;
    enum { N = 1000000 };
    ms_attributes draws[] = { draw_of(1, 0, 0, -1, 3), draw_of(1, 0, 1, 2, 0.5),
                              draw_of(1, 0, 2, -10, 10) };
    ms_tensor *x[] = { filled(engine, &ms_op_uniform, &draws[0], MS_F32, DIMS(N)),
                       filled(engine, &ms_op_normal, &draws[1], MS_F32, DIMS(N)),
                       filled(engine, &ms_op_randint, &draws[2], MS_I64, DIMS(N)) };
    const double mean[] = { 1, 2, -0.5 }, deviation[] = { 4 / 3.4641016, 0.5, 5.7662813 };
    for (int k = 0; k < 3; k++) {
        double *got = tensor_get(x[k]), sum = 0, squares = 0, neighbours = 0, tail = 0,
               counts[20] = { 0 };
        for (int i = 0; i < N; i++) {
            double z = (got[i] - mean[k]) / deviation[k];
            sum += z;
            squares += z * z;
            neighbours += i ? z * (got[i - 1] - mean[k]) / deviation[k] : 0;
            tail += fabs(z) > 3;
            if (k == 2) counts[(int)got[i] + 10]++;
        }
        assert_true(fabs(sum / N) < 0.005 && fabs(squares / N - 1) < 0.008
                    && fabs(neighbours / N) < 0.005);
        if (k == 1) assert_true(fabs(tail - 2700) < 260);
        for (int bin = 0; bin < 20 && k == 2; bin++) assert_true(fabs(counts[bin] - 50000) < 1100);
        free(got);
        ms_tensor_release(x[k]);
    }
}

/* low <= x < high in the dtype itself, also where rounding would reach high or fall below low. */
static void test_bounds_hold_in_every_dtype(void **state)
{
    (void)state;
    const struct {
        ms_dtype dtype;
        double low, high;
    } cases[] = { { MS_F32, 1, 1.0000005 }, { MS_F32, 0.1, 1.7 },    { MS_F32, -3e8, 3e8 },
                  { MS_BF16, 0, 1 },        { MS_BF16, 1.001, 1.1 }, { MS_F16, -0.3, 0.3 },
                  { MS_F16, 100.03, 100.4 } };
    for (size_t i = 0; i < COUNT(cases); i++) {
        ms_attributes draw = draw_of(i, 0, 0, cases[i].low, cases[i].high);
        ms_tensor *x = filled(engine, &ms_op_uniform, &draw, cases[i].dtype, DIMS(50000));
        double *got = tensor_get(x);
        for (int k = 0; k < 50000; k++)
            if (!(got[k] >= cases[i].low && got[k] < cases[i].high))
                fail_msg("%.9g is outside [%.9g, %.9g)", got[k], cases[i].low, cases[i].high);
        free(got);
        ms_tensor_release(x);
    }
    const struct {
        ms_dtype dtype;
        double low, high;
    } whole[] = { { MS_U8, 0, 256 },
                  { MS_U16, 65530, 65536 },
                  { MS_I32, -2147483648.0, 2147483648.0 },
                  { MS_I64, 5, 6 } };
    for (size_t i = 0; i < COUNT(whole); i++) {
        ms_attributes draw = draw_of(i, 0, 0, whole[i].low, whole[i].high);
        ms_tensor *x = filled(engine, &ms_op_randint, &draw, whole[i].dtype, DIMS(20000));
        double *got = tensor_get(x), least = INFINITY, most = -INFINITY,
               range = whole[i].high - whole[i].low;
        for (int k = 0; k < 20000; k++) {
            least = fmin(least, got[k]);
            most = fmax(most, got[k]);
        }
        assert_true(least >= whole[i].low && most < whole[i].high
                    && least < whole[i].low + range * 0.01 + 1
                    && most >= whole[i].high - range * 0.01 - 1);
        free(got);
        ms_tensor_release(x);
    }
}

/* Also on every device: a model starts from the same weights on each. */
static void test_the_same_bits_on_every_machine_and_thread_count(void **state)
{
    (void)state;
    static const char *const cpus[] = { "portable", "avx2", "avx512", NULL };
    const ms_op *ops[] = { &ms_op_uniform, &ms_op_normal, &ms_op_randint };
    const ms_dtype dtypes[] = { MS_F32, MS_F32, MS_I32 };
    const ms_attributes draws[] = { draw_of(3, 7, 1, 0.1, 2.3), draw_of(3, 7, 1, 0.1, 2.3),
                                    draw_of(3, 7, 1, -1e9, 2e9) };
    for (size_t k = 0; k < COUNT(ops); k++) {
        float *first = malloc(70001 * sizeof *first), *got = malloc(70001 * sizeof *got);
        for (size_t c = 0; c < COUNT(cpus); c++)
            for (uint32_t threads = 0; threads <= 3; threads++) {
                bool is_first = c == 0 && threads == 0;
                if (threads == 0 && !is_first) continue;
                ms_engine *own = is_first ? engine_of_cpu() : engine_with(threads, cpus[c]);
                ms_tensor *x = filled(own, ops[k], &draws[k], dtypes[k], DIMS(70001));
                assert_ok(own, ms_tensor_read(x, is_first ? first : got, 70001 * sizeof *got));
                if (!is_first) assert_memory_equal(first, got, 70001 * sizeof *got);
                ms_tensor_release(x);
                ms_engine_free(own);
            }
        free(first);
        free(got);
    }
}

static void test_draws_differ_and_repeat(void **state)
{
    (void)state;
    ms_attributes draws[] = { draw_of(1, 0, 0, 0, 1), draw_of(1, 0, 1, 0, 1),
                              draw_of(1, 1, 0, 0, 1), draw_of(2, 0, 0, 0, 1),
                              draw_of(1, 0, 0, 0, 1) };
    float got[COUNT(draws)][64];
    for (size_t i = 0; i < COUNT(draws); i++) {
        ms_tensor *x = filled(engine, &ms_op_normal, &draws[i], MS_F32, DIMS(8, 8));
        assert_ok(engine, ms_tensor_read(x, got[i], sizeof got[i]));
        ms_tensor_release(x);
        if (i > 0 && i < 4) assert_memory_not_equal(got[i], got[0], sizeof got[0]);
    }
    assert_memory_equal(got[4], got[0], sizeof got[0]);
    /* A transposed target gets the same numbers at the same coordinates. */
    ms_tensor *base = tensor_of(engine, MS_F32, DIMS(8, 8), NULL), *turned = NULL, *out = NULL;
    float through[64];
    assert_ok(engine, ms_tensor_window(base, DIMS(8, 8), SHAPE(1, 8), 0, &turned));
    assert_ok(engine, ms_op_apply(engine, &ms_op_normal, &draws[0], true, &turned, 1, &out, 1));
    assert_ok(engine, ms_tensor_read(turned, through, sizeof through));
    assert_memory_equal(through, got[0], sizeof through);
    ms_tensor_release(base);
    ms_tensor_release(turned);
    ms_tensor_release(out);
}

static void test_dropout(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_F16 };
    static const double scales[] = { (float)(1 / 0.75), 1.3359375, 1.3330078125 };
    enum { N = 200000 };
    double *ones = malloc(N * sizeof *ones);
    for (int i = 0; i < N; i++) ones[i] = 1;
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        ms_attributes half = draw_of(4, 2, 0, 0.25, 0);
        ms_tensor *x = tensor_of(engine, dtypes[t], DIMS(N), ones),
                  *y = apply(engine, &ms_op_dropout, &half, &x, 1), *result = NULL;
        double *got = tensor_get(y), kept = 0, scale = scales[t];
        for (int i = 0; i < N; i++) {
            assert_true(got[i] == 0 || got[i] == scale);
            kept += got[i] != 0;
        }
        assert_true(fabs(kept / N - 0.75) < 0.005);
        /* Backward drops the same elements as forward. */
        gradcheck check = { .op = &ms_op_dropout, .attributes = half, .inputs = 1 };
        gradcheck_backward(engine, &check, &x, &result);
        double *back = tensor_get(result);
        for (int i = 0; i < N; i++) assert_true((back[i] != 0) == (got[i] != 0));
        free(got);
        free(back);
        ms_tensor *all[] = { x, y, result };
        for (size_t i = 0; i < 3; i++) ms_tensor_release(all[i]);
    }
    free(ones);
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(5, 7), NULL), *turned = NULL, *out = NULL;
    assert_ok(engine, ms_tensor_window(x, DIMS(7, 5), SHAPE(1, 7), 0, &turned));
    check_gradients(
        engine,
        (gradcheck){ .op = &ms_op_dropout, .attributes = draw_of(1, 1, 1, 0.5, 0), .inputs = 1 },
        &turned);
    check_gradients(engine,
                    (gradcheck){ .op = &ms_op_dropout,
                                 .attributes = draw_of(1, 1, 1, 0.5, 0),
                                 .inputs = 1,
                                 .in_place = true },
                    &turned);
    ms_tensor *infinite = tensor_of(engine, MS_F32, DIMS(3), (double[]){ INFINITY, NAN, 1 });
    ms_attributes none = draw_of(1, 1, 1, 0, 0), all = draw_of(1, 1, 1, 1, 0),
                  wrong = draw_of(1, 1, 1, 1.5, 0);
    out = apply(engine, &ms_op_dropout, &none, &infinite, 1);
    assert_values(out, (double[]){ INFINITY, NAN, 1 }, 3, 0, "p = 0");
    ms_tensor_release(out);
    out = apply(engine, &ms_op_dropout, &all, &infinite, 1);
    assert_values(out, (double[]){ 0, 0, 0 }, 3, 0, "p = 1");
    ms_tensor_release(out);
    assert_refused(engine, ms_op_apply(engine, &ms_op_dropout, &wrong, false, &x, 1, &out, 1),
                   "p is 1.5");
    ms_tensor_release(x);
    ms_tensor_release(turned);
    ms_tensor_release(infinite);
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    const struct {
        const ms_op *op;
        ms_dtype dtype;
        double a, b;
        const char *text;
    } cases[] = {
        { &ms_op_uniform, MS_F32, 1, 1, "must be below" },
        { &ms_op_uniform, MS_I64, 0, 1, "use randint" },
        { &ms_op_uniform, MS_BF16, 1.0001, 1.0002, "has no number" },
        { &ms_op_normal, MS_F32, 0, -1, "not negative" },
        { &ms_op_randint, MS_F32, 0, 5, "it fills i64" },
        { &ms_op_randint, MS_U8, 0, 257, "does not hold" },
        { &ms_op_randint, MS_I64, 0.5, 3, "both whole" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        ms_tensor *x = tensor_of(engine, cases[i].dtype, DIMS(4), NULL), *out = NULL;
        ms_attributes draw = draw_of(0, 0, 0, cases[i].a, cases[i].b);
        assert_refused(engine, ms_op_apply(engine, cases[i].op, &draw, true, &x, 1, &out, 1),
                       cases[i].text);
        ms_tensor_release(x);
    }
}

/* The record of a part's values makes those of a larger tensor, and those of a later draw. Other
 * writes end it, and so it is while nothing is noted. */
static void test_recorded_draws(void **state)
{
    (void)state;
    ms_attributes draw = draw_of(7, 1, 4, -2, 3), next = draw_of(7, 1, 6, -2, 3),
                  twice = { .scalar = { .value = 2 } };
    ms_tensor *unnoted = filled(engine, &ms_op_normal, &draw, MS_F32, DIMS(2, 5));
    assert_null(ms_tensor_initializer(unnoted));
    assert_false(ms_engine_note_initial(engine, true));
    ms_tensor *part = filled(engine, &ms_op_normal, &draw, MS_F32, DIMS(2, 5)), *out = NULL;
    assert_ok(engine, ms_op_apply(engine, &ms_op_mul_scalar, &twice, true, &part, 1, &out, 1));
    ms_tensor_release(out);
    assert_true(ms_engine_note_initial(engine, false));
    const ms_initializer *found = ms_tensor_initializer(part);
    assert_non_null(found);
    ms_initializer *record = malloc(ms_initializer_bytes());
    memcpy(record, found, ms_initializer_bytes());
    uint64_t number = 0;
    assert_true(ms_initializer_draw(record, &number));
    assert_int_equal(number, 4);
    for (int moved = 0; moved < 2; moved++) {
        ms_tensor *whole = tensor_of(engine, MS_F32, DIMS(4, 5), NULL),
                  *same = filled(engine, &ms_op_normal, moved ? &next : &draw, MS_F32, DIMS(4, 5));
        assert_ok(engine, ms_initialize(record, whole));
        double *got = tensor_get(whole), *expected = tensor_get(same), *own = tensor_get(part);
        for (int i = 0; i < 20; i++) assert_true(got[i] == 2 * expected[i]);
        for (int i = 0; i < 10 && !moved; i++) assert_true(got[i] == own[i]);
        free(got);
        free(expected);
        free(own);
        ms_tensor_release(whole);
        ms_tensor_release(same);
        ms_initializer_move(record, 2);
    }
    assert_ok(engine, ms_op_apply(engine, &ms_op_mul_scalar, &twice, true, &part, 1, &out, 1));
    ms_tensor_release(out);
    assert_null(ms_tensor_initializer(part));
    free(record);
    ms_tensor_release(unnoted);
    ms_tensor_release(part);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_uniform_is_philox),
        cmocka_unit_test(test_distributions),
        cmocka_unit_test(test_bounds_hold_in_every_dtype),
        cmocka_unit_test(test_the_same_bits_on_every_machine_and_thread_count),
        cmocka_unit_test(test_draws_differ_and_repeat),
        cmocka_unit_test(test_dropout),
        cmocka_unit_test(test_recorded_draws),
        cmocka_unit_test(test_mistakes_are_named),
    };
    return cmocka_run_group_tests_name("random", tests, setup, teardown);
}
