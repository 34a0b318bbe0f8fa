/* orthonormalize.c: columns of matrices made orthonormal: compared with the same process in
 * doubles, and checked for orthonormality. ctest: each-isa poisoned late cuda */
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

static ms_status run(ms_tensor *x, double eps)
{
    ms_attributes attributes = { .norm = { .eps = eps } };
    ms_tensor *same = NULL;
    ms_status status =
        ms_op_apply(engine, &ms_op_orthonormalize, &attributes, true, &x, 1, &same, 1);
    if (status == MS_OK) assert_ptr_equal(same, x);
    ms_tensor_release(same);
    return status;
}

/* Gram-Schmidt in doubles on [n, r]. */
static void reference(double *x, int64_t n, int64_t r, double eps)
{
    for (int64_t c = 0; c < r; c++) {
        double size = 0;
        for (int64_t i = 0; i < n; i++) size += x[i * r + c] * x[i * r + c];
        size = sqrt(size) + eps;
        for (int64_t i = 0; i < n; i++) x[i * r + c] = size == 0 ? 0 : x[i * r + c] / size;
        for (int64_t other = c + 1; other < r; other++) {
            double share = 0;
            for (int64_t i = 0; i < n; i++) share += x[i * r + c] * x[i * r + other];
            for (int64_t i = 0; i < n; i++) x[i * r + other] -= share * x[i * r + c];
        }
    }
}

/* Tolerances: dot products of up to 5,000 f32 terms err by some 1e-7 of their size; 16-bit results
 * are rounded once. */
static void test_values(void **state)
{
    (void)state;
    static const struct {
        int64_t matrices, n, r;
        double eps;
        ms_dtype dtype;
        double tolerance;
    } cases[] = {
        { 1, 1, 1, 0, MS_F32, 1e-6 },     { 3, 5, 2, 0, MS_F32, 2e-6 },
        { 2, 64, 8, 1e-2, MS_F32, 2e-6 }, { 1, 1000, 4, 0, MS_F32, 2e-6 },
        { 5, 129, 3, 0, MS_BF16, 4e-3 },  { 2, 70, 5, 0, MS_F16, 5e-4 },
        { 4, 3, 3, 0, MS_F32, 2e-5 },     { 1, 5000, 9, 0, MS_F32, 2e-6 },
        { 300, 40, 2, 0, MS_F32, 2e-6 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t n = cases[i].n, r = cases[i].r, size = n * r;
        ms_tensor *x = tensor_of(engine, cases[i].dtype, DIMS(cases[i].matrices, n, r), NULL);
        double *want = tensor_get(x);
        for (int64_t m = 0; m < cases[i].matrices; m++)
            reference(want + m * size, n, r, cases[i].eps);
        assert_ok(engine, run(x, cases[i].eps));
        assert_values(x, want, (size_t)(cases[i].matrices * size), cases[i].tolerance, "columns");
        free(want);
        ms_tensor_release(x);
    }
}

static void test_columns_are_orthonormal(void **state)
{
    (void)state;
    const int64_t n = 777, r = 6;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(n, r), NULL);
    assert_ok(engine, run(x, 0));
    double *q = tensor_get(x);
    for (int64_t a = 0; a < r; a++)
        for (int64_t b = 0; b <= a; b++) {
            double sum = 0;
            for (int64_t i = 0; i < n; i++) sum += q[i * r + a] * q[i * r + b];
            assert_near(sum, a == b, 1e-6, "product of two columns", (size_t)(a * r + b));
        }
    free(q);
    ms_tensor_release(x);
}

static void test_a_zero_column_stays_zero(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 2), (double[]){ 0, 3, 0, 4 });
    assert_ok(engine, run(x, 0));
    assert_values(x, (double[]){ 0, 0.6, 0, 0.8 }, 4, 1e-6, "beside a column of zeros");
    ms_tensor_release(x);
}

static void test_a_transposed_view(void **state)
{
    (void)state;
    ms_tensor *base = tensor_of(engine, MS_F32, DIMS(2, 3), (double[]){ 3, 0, 4, 1, 1, 1 }),
              *x = NULL;
    assert_ok(engine, ms_tensor_window(base, DIMS(3, 2), SHAPE(1, 3), 0, &x));
    double want[] = { 3, 1, 0, 1, 4, 1 };
    reference(want, 3, 2, 0);
    assert_ok(engine, run(x, 0));
    assert_values(x, want, 6, 1e-6, "through a transposed view");
    ms_tensor_release(x);
    ms_tensor_release(base);
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    ms_tensor *wide = tensor_of(engine, MS_F32, DIMS(2, 3), NULL),
              *whole = tensor_of(engine, MS_I64, DIMS(3, 2), (double[]){ 0, 0, 0, 0, 0, 0 }),
              *out = NULL;
    ms_tensor *none = tensor_of(engine, MS_F32, DIMS(3, 0), NULL),
              *x = tensor_of(engine, MS_F32, DIMS(3, 2), NULL);
    assert_refused(engine, run(wide, 0), "3 columns of 2 numbers");
    assert_refused(engine, run(whole, 0), "f32, f16 or bf16");
    assert_refused(engine, run(x, -1), "eps is -1");
    assert_refused(engine, ms_op_apply(engine, &ms_op_orthonormalize, NULL, false, &x, 1, &out, 1),
                   "in place only");
    assert_ok(engine, run(none, 0));
    ms_tensor *all[] = { wide, whole, none, x };
    for (size_t i = 0; i < 4; i++) ms_tensor_release(all[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_columns_are_orthonormal),
        cmocka_unit_test(test_a_zero_column_stays_zero),
        cmocka_unit_test(test_a_transposed_view),
        cmocka_unit_test(test_mistakes_are_named),
    };
    return cmocka_run_group_tests_name("orthonormalize", tests, setup, teardown);
}
