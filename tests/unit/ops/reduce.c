/* reduce.c: sums, means, extremes, norms, positions, cumulative sums, counts: values, strides,
 * empty inputs, gradients, threads. ctest: each-isa poisoned late cuda */
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

/* One result from n values, `step` apart. */
static double reference(const char *name, double p, const double *x, int64_t n, int64_t step)
{
    double sum = 0, most = -INFINITY, least = INFINITY, powers = 0, most_abs = 0;
    int64_t at = 0;
    for (int64_t i = 0; i < n; i++) {
        double v = x[i * step];
        sum += v;
        powers += pow(fabs(v), p);
        if (v > most) {
            most = v;
            at = i;
        }
        least = fmin(least, v);
        most_abs = fmax(most_abs, fabs(v));
    }
    if (strcmp(name, "sum") == 0) return sum;
    if (strcmp(name, "mean") == 0) return sum / (double)n;
    if (strcmp(name, "max") == 0) return most;
    if (strcmp(name, "min") == 0) return least;
    if (strcmp(name, "argmax") == 0) return (double)at;
    return isinf(p) ? most_abs : pow(powers, 1 / p);
}

/* Reduces dim of a tensor (all of it: dim -1) and compares with plain loops. */
static void check_reduction(ms_tensor *x, const char *name, double p, int32_t dim, bool keep)
{
    const int64_t *shape = ms_tensor_shape(x);
    uint32_t dims = ms_tensor_dims(x);
    int64_t outer = 1, n = dim < 0 ? ms_tensor_count(x) : shape[dim], inner = 1;
    for (int32_t d = 0; dim >= 0 && d < (int32_t)dims; d++) {
        if (d < dim) outer *= shape[d];
        else if (d > dim) inner *= shape[d];
    }
    ms_attributes attributes = {
        .reduce = { .dim = dim < 0 ? 0 : dim, .all = dim < 0, .keep = keep, .p = p }
    };
    ms_tensor *y = apply(engine, ms_op_find(name), &attributes, &x, 1);
    uint32_t want_dims = dim < 0 ? 0 : dims - 1;
    assert_int_equal(ms_tensor_dims(y), keep ? dims : want_dims);
    double *from = tensor_get(x), *want = calloc((size_t)(outer * inner) + 1, sizeof *want);
    for (int64_t o = 0; o < outer; o++)
        for (int64_t i = 0; i < inner; i++)
            want[o * inner + i] = reference(name, p, from + o * n * inner + i, n, inner);
    /* f32 sums of up to 3,000 numbers near 1; 16-bit results are rounded once. */
    ms_dtype dtype = ms_tensor_dtype(y);
    static const double tolerances[MS_DTYPES] = {
        [MS_F32] = 2e-6, [MS_F16] = 1e-3, [MS_BF16] = 8e-3
    };
    assert_values(y, want, (size_t)(outer * inner), tolerances[dtype], name);
    free(from);
    free(want);
    ms_tensor_release(y);
}

static void test_every_dimension_stride_and_dtype(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_F16, MS_I64, MS_I32, MS_U8 };
    static const char *const names[] = { "sum", "max", "min", "argmax", "mean", "norm" };
    static const double powers[] = { 1, 2, 3, 0.5, INFINITY };
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        double ramp[3000];
        double step = ms_dtype_is_float(dtypes[t]) ? 0.01 : 1;
        for (int i = 0; i < 3000; i++)
            ramp[i] = dtypes[t] == MS_U8 ? (i * 37) % 251 : ((i * 37) % 251 - 100) * step;
        ms_tensor *base = tensor_of(engine, dtypes[t], DIMS(3000), ramp);
        ms_tensor *all[] = { window_of(base, DIMS(10, 300), SHAPE(300, 1), 0),
                             window_of(base, DIMS(300, 10), SHAPE(1, 300), 0),
                             window_of(base, DIMS(5, 20, 30), SHAPE(600, 30, 1), 0),
                             window_of(base, DIMS(5, 30, 10), SHAPE(600, 1, 60), 3),
                             window_of(base, DIMS(7, 9, 4), SHAPE(300, 30, 3), 1),
                             window_of(base, DIMS(3000), SHAPE(1), 0),
                             window_of(base, DIMS(1000), SHAPE(3), 2),
                             window_of(base, DIMS(4, 600), SHAPE(0, 1), 0),
                             window_of(base, 8, SHAPE(2, 1, 3, 2, 1, 2, 5, 2),
                                       SHAPE(1000, 1, 300, 100, 1, 50, 9, 1), 0) };
        for (size_t w = 0; w < COUNT(all); w++)
            for (int32_t dim = -1; dim < (int32_t)ms_tensor_dims(all[w]); dim++)
                for (size_t k = 0; k < COUNT(names); k++) {
                    if (k >= 4 && !ms_dtype_is_float(dtypes[t])) continue;
                    if (k < 5) check_reduction(all[w], names[k], 0, dim, (w + k) % 2 == 0);
                    for (size_t p = 0; p < COUNT(powers) && k == 5; p++)
                        check_reduction(all[w], names[k], powers[p], dim, p % 2 == 0);
                }
        for (size_t w = 0; w < COUNT(all); w++) ms_tensor_release(all[w]);
        ms_tensor_release(base);
    }
}

/* Long sums: within 1e-6 of f64, whichever way the numbers are. All positive: the relative error is
 * that of the method. */
static void test_long_sums_are_accurate(void **state)
{
    (void)state;
    const int64_t n = 4000000;
    float *x = malloc((size_t)n * sizeof *x);
    double want = 0, columns[8] = { 0 };
    for (int64_t i = 0; i < n; i++) {
        x[i] = (float)((double)((uint32_t)i * 2654435761u >> 8) / 16777216.0 + 0.1);
        want += x[i];
        columns[i % 8] += x[i];
    }
    ms_tensor *flat = NULL;
    assert_ok(engine, ms_tensor_new(engine, MS_F32, DIMS(n), &flat));
    assert_ok(engine, ms_tensor_write(flat, x, (size_t)n * sizeof *x));
    ms_tensor *tall = window_of(flat, DIMS(n / 8, 8), SHAPE(8, 1), 0),
              *wide = window_of(flat, DIMS(8, n / 8), SHAPE(1, 8), 0);
    ms_attributes all = { .reduce = { .all = true } }, first = { .reduce = { .dim = 0 } },
                  last = { .reduce = { .dim = 1 } };
    ms_tensor *sums[] = { apply(engine, &ms_op_sum, &all, &flat, 1),
                          apply(engine, &ms_op_sum, &first, &tall, 1),
                          apply(engine, &ms_op_sum, &last, &wide, 1) };
    assert_values(sums[0], &want, 1, 1e-6, "all");
    assert_values(sums[1], columns, 8, 1e-6, "down the rows");
    assert_values(sums[2], columns, 8, 1e-6, "strided rows");
    ms_tensor *made[] = { flat, tall, wide, sums[0], sums[1], sums[2] };
    for (size_t i = 0; i < COUNT(made); i++) ms_tensor_release(made[i]);
    free(x);
}

static void test_the_same_bits_on_any_number_of_threads(void **state)
{
    (void)state;
    const struct {
        int64_t shape[3];
    } shapes[] = { { { 1, 700001, 1 } },
                   { { 3, 70001, 1 } },
                   { { 1, 3001, 97 } },
                   { { 2, 300, 1500 } },
                   { { 5000, 40, 1 } } };
    for (size_t s = 0; s < COUNT(shapes); s++) {
        float first[5000], got[5000];
        for (uint32_t threads = 1; threads <= 3; threads++) {
            ms_engine *own = engine_with(threads, NULL);
            ms_tensor *x = NULL, *filled = NULL;
            ms_attributes draw = { .random = { .random = { 5, 0, 0 }, .a = 1, .b = 1 } },
                          how = { .reduce = { .dim = 1, .p = 2 } };
            assert_ok(own, ms_tensor_new(own, MS_F32, 3, shapes[s].shape, &x));
            assert_ok(own, ms_op_apply(own, &ms_op_normal, &draw, true, &x, 1, &filled, 1));
            ms_tensor *y = apply(own, &ms_op_norm, &how, &x, 1);
            assert_ok(own, ms_tensor_read(y, threads == 1 ? first : got, ms_tensor_bytes(y)));
            if (threads > 1) assert_memory_equal(first, got, ms_tensor_bytes(y));
            ms_tensor_release(x);
            ms_tensor_release(filled);
            ms_tensor_release(y);
            ms_engine_free(own);
        }
    }
}

/* 64 sums side by side, whose totals are added 16, 32, 8, 4, 2 and 1 apart: in this order whatever
 * the width of a register, hence no tolerance. */
static float sum_in_order(const float *x, size_t n)
{
    float sum[64] = { 0 };
    for (size_t i = 0; i < n; i++) sum[i % 64] += x[i];
    for (size_t i = 0; i < 16; i++) sum[i] = (sum[i] + sum[i + 16]) + (sum[i + 32] + sum[i + 48]);
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

static void test_the_same_bits_on_every_instruction_set(void **state)
{
    (void)state;
    /* A GPU adds in an order of its own. */
    if (strcmp(ms_engine_device(engine), "cuda") == 0) skip();
    const int64_t lengths[] = { 1, 5, 16, 40, 64, 77, 127, 1000, 2048 };
    for (size_t l = 0; l < COUNT(lengths); l++) {
        float x[2048], got;
        for (int64_t i = 0; i < lengths[l]; i++)
            x[i] = ldexpf((float)(i * 7919 % 1009) - 500.0f, (int)(i * 31 % 17));
        ms_tensor *in = NULL;
        assert_ok(engine, ms_tensor_new(engine, MS_F32, 1, &lengths[l], &in));
        assert_ok(engine, ms_tensor_write(in, x, ms_tensor_bytes(in)));
        ms_tensor *y =
            apply(engine, &ms_op_sum, &(ms_attributes){ .reduce = { .all = true } }, &in, 1);
        assert_ok(engine, ms_tensor_read(y, &got, sizeof got));
        float expected = sum_in_order(x, (size_t)lengths[l]);
        assert_memory_equal(&got, &expected, sizeof got);
        ms_tensor_release(in);
        ms_tensor_release(y);
    }
}

static void test_nothing_ties_and_nan(void **state)
{
    (void)state;
    ms_attributes all = { .reduce = { .all = true, .p = 2 } },
                  last = { .reduce = { .dim = -1, .p = 2 } };
    ms_tensor *none = tensor_of(engine, MS_F32, DIMS(3, 0), NULL), *out = NULL;
    out = apply(engine, &ms_op_sum, &last, &none, 1);
    assert_values(out, (double[]){ 0, 0, 0 }, 3, 0, "sum of nothing");
    ms_tensor_release(out);
    out = apply(engine, &ms_op_mean, &all, &none, 1);
    assert_values(out, (double[]){ NAN }, 1, 0, "mean of nothing");
    ms_tensor_release(out);
    out = apply(engine, &ms_op_norm, &all, &none, 1);
    assert_values(out, (double[]){ 0 }, 1, 0, "norm of nothing");
    ms_tensor_release(out);
    const ms_op *choosing[] = { &ms_op_max, &ms_op_min, &ms_op_argmax };
    for (size_t i = 0; i < COUNT(choosing); i++)
        assert_refused(engine, ms_op_apply(engine, choosing[i], &last, false, &none, 1, &out, 1),
                       "nothing to choose from");
    ms_attributes first = { .reduce = { .dim = 0 } };
    out = apply(engine, &ms_op_max, &first, &none, 1);
    assert_int_equal(ms_tensor_count(out), 0);
    ms_tensor_release(out);
    ms_tensor_release(none);

    ms_tensor *x = tensor_of(
        engine, MS_F32, DIMS(3, 4),
        (double[]){ 1, 5, 5, 2, NAN, 9, NAN, 1, -INFINITY, -INFINITY, -INFINITY, -INFINITY });
    out = apply(engine, &ms_op_argmax, &last, &x, 1);
    assert_values(out, (double[]){ 1, 0, 0 }, 3, 0, "argmax");
    ms_tensor_release(out);
    out = apply(engine, &ms_op_max, &last, &x, 1);
    assert_values(out, (double[]){ 5, NAN, -INFINITY }, 3, 0, "max");
    ms_tensor_release(out);
    out = apply(engine, &ms_op_min, &first, &x, 1);
    assert_values(out, (double[]){ NAN, -INFINITY, NAN, -INFINITY }, 4, 0, "min");
    ms_tensor_release(out);
    ms_tensor_release(x);
}

static void test_truth(void **state)
{
    (void)state;
    const struct {
        double values[4];
        int64_t count;
        double any, every;
    } cases[] = { { { 0, 0, 1, 0 }, 4, 1, 0 },
                  { { 1, 1, 1, 1 }, 4, 1, 1 },
                  { { 0, 0, 0, 0 }, 4, 0, 0 },
                  { { 0 }, 0, 0, 1 } };
    for (size_t i = 0; i < COUNT(cases); i++) {
        ms_tensor *x = tensor_of(engine, MS_BOOL, DIMS(cases[i].count), cases[i].values);
        ms_tensor *any = apply(engine, &ms_op_any, NULL, &x, 1),
                  *every = apply(engine, &ms_op_every, NULL, &x, 1);
        assert_values(any, &cases[i].any, 1, 0, "any");
        assert_values(every, &cases[i].every, 1, 0, "every");
        assert_int_equal(ms_tensor_dtype(any), MS_BOOL);
        ms_tensor_release(x);
        ms_tensor_release(any);
        ms_tensor_release(every);
    }
    ms_tensor *mask = tensor_of(engine, MS_BOOL, DIMS(5), (double[]){ 1, 0, 1, 1, 0 });
    ms_attributes all = { .reduce = { .all = true } };
    ms_tensor *count = apply(engine, &ms_op_sum, &all, &mask, 1);
    assert_int_equal(ms_tensor_dtype(count), MS_I64);
    assert_values(count, (double[]){ 3 }, 1, 0, "sum of bool");
    ms_tensor_release(mask);
    ms_tensor_release(count);
}

static void test_cumsum_dot_histogram_quantile(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 3), (double[]){ 1, 2, 3, 4, 5, 6 }),
              *out = NULL;
    ms_attributes dim = { .dim = { .a = 0 } };
    out = apply(engine, &ms_op_cumsum, &dim, &x, 1);
    assert_values(out, (double[]){ 1, 2, 3, 5, 7, 9 }, 6, 0, "cumsum down");
    ms_tensor_release(out);
    dim.dim.a = -1;
    out = apply(engine, &ms_op_cumsum, &dim, &x, 1);
    assert_values(out, (double[]){ 1, 3, 6, 4, 9, 15 }, 6, 0, "cumsum along");
    ms_tensor_release(out);
    ms_tensor_release(x);

    double ones[5000];
    for (int i = 0; i < 5000; i++) ones[i] = 1;
    x = tensor_of(engine, MS_U8, DIMS(5000), ones);
    dim.dim.a = 0;
    out = apply(engine, &ms_op_cumsum, &dim, &x, 1);
    for (int i = 0; i < 5000; i++) ones[i] = i + 1;
    assert_values(out, ones, 5000, 0, "long cumsum of u8 in i64");
    ms_tensor_release(out);
    ms_tensor_release(x);

    x = tensor_of(engine, MS_F32, DIMS(6), (double[]){ 3, 1, 2, 5, 4, -7 });
    ms_tensor *odd = window_of(x, DIMS(3), SHAPE(2), 1), *even = window_of(x, DIMS(3), SHAPE(2), 0);
    out = apply(engine, &ms_op_dot, NULL, OPERANDS(odd, even), 2);
    assert_values(out, (double[]){ 3 + 10 - 28 }, 1, 1e-6, "dot");
    ms_tensor_release(out);
    const double q[][2] = { { 0, -7 }, { 1, 5 }, { 0.5, 2.5 }, { 0.2, 1 }, { 0.9, 4.5 } };
    for (size_t i = 0; i < COUNT(q); i++) {
        ms_attributes at = { .scalar = { .value = q[i][0] } };
        out = apply(engine, &ms_op_quantile, &at, &x, 1);
        assert_values(out, &q[i][1], 1, 1e-6, "quantile");
        ms_tensor_release(out);
    }
    ms_tensor_release(odd);
    ms_tensor_release(even);
    ms_tensor_release(x);

    x = tensor_of(engine, MS_F32, DIMS(8), (double[]){ -1, 0, 0.5, 0.999, 1, 3.9, 4, NAN });
    ms_attributes bins = { .histogram = { .low = 0, .high = 4, .bins = 4 } };
    out = apply(engine, &ms_op_histogram, &bins, &x, 1);
    assert_values(out, (double[]){ 3, 1, 0, 2 }, 4, 0, "histogram");
    ms_tensor_release(out);
    ms_tensor_release(x);
}

/* Rows that one block of a GPU does not take alone. */
static void test_long_rows(void **state)
{
    (void)state;
    enum { N = 10007 };
    double *values = malloc(sizeof *values * N), *want = malloc(sizeof *want * N), sum = 0;
    for (int i = 0; i < N; i++) {
        values[i] = (double)((int64_t)i * 7919 % N) - 5000; /* each whole number once */
        want[i] = sum += values[i];
    }
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(N), values), *out = NULL;
    out = apply(engine, &ms_op_cumsum, &(ms_attributes){ .dim = { .a = 0 } }, &x, 1);
    assert_values(out, want, N, 1e-6, "cumsum");
    ms_tensor_release(out);
    static const double q[] = { 0, 0.25, 0.5, 0.99991, 1 };
    for (size_t i = 0; i < COUNT(q); i++) {
        ms_attributes at = { .scalar = { .value = q[i] } };
        out = apply(engine, &ms_op_quantile, &at, &x, 1);
        assert_values(out, (double[]){ q[i] * (N - 1) - 5000 }, 1, 1e-6, "quantile");
        ms_tensor_release(out);
    }
    ms_attributes all = { .reduce = { .all = true } };
    out = apply(engine, &ms_op_argmax, &all, &x, 1);
    double *place = tensor_get(out);
    assert_true(values[(int64_t)place[0]] == N - 1 - 5000);
    free(place);
    ms_tensor_release(out);
    ms_tensor_release(x);

    gradcheck reversed = { .op = &ms_op_cumsum, .inputs = 1 };
    x = tensor_of(engine, MS_F32, DIMS(N), values);
    gradcheck_backward(engine, &reversed, &x, &out);
    sum = 0;
    for (int i = N; i-- > 0;) want[i] = sum += weight(0, (size_t)i);
    assert_values(out, want, N, 1e-6, "cumsum from the end");
    ms_tensor_release(out);
    ms_tensor_release(x);

    values[1234] = NAN;
    x = tensor_of(engine, MS_F32, DIMS(N), values);
    out = apply(engine, &ms_op_quantile, &(ms_attributes){ .scalar = { .value = 0.1 } }, &x, 1);
    assert_values(out, (double[]){ NAN }, 1, 0, "quantile beside NaN");
    ms_tensor_release(out);
    out = apply(engine, &ms_op_argmax, &all, &x, 1);
    assert_values(out, (double[]){ 1234 }, 1, 0, "NaN is the greatest");
    ms_tensor_release(out);
    ms_tensor_release(x);
    free(values);
    free(want);
}

static void test_gradients(void **state)
{
    (void)state;
    /* No two sizes nearer than the steps of the differences, or max and min would change places. */
    double apart[24];
    for (int i = 0; i < 24; i++) apart[i] = ((i * 7) % 24 + 1) * (i % 2 ? 0.1 : -0.1);
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(3, 2, 4), apart),
              *a = tensor_of(engine, MS_F32, DIMS(5), NULL),
              *b = tensor_of(engine, MS_F32, DIMS(5), NULL);
    ms_tensor *turned = window_of(x, DIMS(4, 3, 2), SHAPE(1, 8, 4), 0);
    static const char *const names[] = { "sum", "mean", "max", "min" };
    static const double powers[] = { 1, 2, 3, 1.5, INFINITY };
    for (int32_t dim = -1; dim < 3; dim++)
        for (int keep = 0; keep < 2; keep++) {
            ms_attributes how = { .reduce = {
                                      .dim = dim < 0 ? 0 : dim, .all = dim < 0, .keep = keep } };
            for (size_t k = 0; k < COUNT(names); k++)
                check_gradients(
                    engine,
                    (gradcheck){ .op = ms_op_find(names[k]), .attributes = how, .inputs = 1 },
                    k % 2 ? &turned : &x);
            for (size_t p = 0; p < COUNT(powers); p++) {
                how.reduce.p = powers[p];
                check_gradients(
                    engine, (gradcheck){ .op = &ms_op_norm, .attributes = how, .inputs = 1 }, &x);
            }
        }
    for (int32_t dim = 0; dim < 3; dim++)
        check_gradients(
            engine,
            (gradcheck){ .op = &ms_op_cumsum, .attributes = { .dim = { .a = dim } }, .inputs = 1 },
            &turned);
    check_gradients(engine, (gradcheck){ .op = &ms_op_dot, .inputs = 2 }, OPERANDS(a, b));
    ms_tensor *made[] = { x, a, b, turned };
    for (size_t i = 0; i < COUNT(made); i++) ms_tensor_release(made[i]);
}

/* Ties and zeros: the first of equal elements gets all of max's gradient; a norm of 0 passes
 * nothing back, never NaN. */
static void test_gradients_at_ties_and_zeros(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(4), (double[]){ 2, 3, 3, 1 }),
              *zero = tensor_of(engine, MS_F32, DIMS(3), (double[]){ 0, 0, 0 }), *got = NULL;
    gradcheck all = { .op = &ms_op_max, .attributes = { .reduce = { .all = true } }, .inputs = 1 };
    gradcheck_backward(engine, &all, &x, &got);
    assert_values(got, (double[]){ 0, 0.5, 0, 0 }, 4, 1e-6, "max at a tie");
    ms_tensor_release(got);
    static const double powers[] = { 1, 2, 3, INFINITY };
    for (size_t i = 0; i < COUNT(powers); i++) {
        gradcheck norm = { .op = &ms_op_norm,
                           .attributes = { .reduce = { .all = true, .p = powers[i] } },
                           .inputs = 1 };
        gradcheck_backward(engine, &norm, &zero, &got);
        assert_values(got, (double[]){ 0, 0, 0 }, 3, 0, "norm at 0");
        ms_tensor_release(got);
    }
    gradcheck infinity = { .op = &ms_op_norm,
                           .attributes = { .reduce = { .all = true, .p = INFINITY } },
                           .inputs = 1 };
    gradcheck_backward(engine, &infinity, &x, &got);
    assert_values(got, (double[]){ 0, 0.25, 0.25, 0 }, 4, 1e-6, "infinity norm at a tie");
    ms_tensor_release(got);
    ms_tensor_release(x);
    ms_tensor_release(zero);
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    ms_tensor *i = tensor_of(engine, MS_I64, DIMS(2, 3), NULL),
              *f = tensor_of(engine, MS_F32, DIMS(2, 3), NULL), *out = NULL;
    ms_attributes far = { .reduce = { .dim = 2, .p = 2 } },
                  first = { .reduce = { .dim = 0, .p = -1 } };
    assert_refused(engine, ms_op_apply(engine, &ms_op_sum, &far, false, &f, 1, &out, 1),
                   "sum: [2, 3] f32: there is no dimension 3");
    assert_refused(engine, ms_op_apply(engine, &ms_op_mean, &first, false, &i, 1, &out, 1),
                   "cast first");
    assert_refused(engine, ms_op_apply(engine, &ms_op_norm, &first, false, &f, 1, &out, 1),
                   "p is -1");
    assert_refused(engine, ms_op_apply(engine, &ms_op_any, NULL, false, &f, 1, &out, 1),
                   "needs bool");
    assert_refused(engine, ms_op_apply(engine, &ms_op_dot, NULL, false, OPERANDS(f, f), 2, &out, 1),
                   "1-D");
    ms_attributes q = { .scalar = { .value = 1.5 } },
                  bins = { .histogram = { .low = 1, .high = 1, .bins = 4 } };
    assert_refused(engine, ms_op_apply(engine, &ms_op_quantile, &q, false, &f, 1, &out, 1),
                   "1.5 is not between 0 and 1");
    assert_refused(engine, ms_op_apply(engine, &ms_op_histogram, &bins, false, &f, 1, &out, 1),
                   "must be below");
    ms_tensor_release(i);
    ms_tensor_release(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_dimension_stride_and_dtype),
        cmocka_unit_test(test_long_sums_are_accurate),
        cmocka_unit_test(test_the_same_bits_on_any_number_of_threads),
        cmocka_unit_test(test_the_same_bits_on_every_instruction_set),
        cmocka_unit_test(test_nothing_ties_and_nan),
        cmocka_unit_test(test_truth),
        cmocka_unit_test(test_cumsum_dot_histogram_quantile),
        cmocka_unit_test(test_long_rows),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_gradients_at_ties_and_zeros),
        cmocka_unit_test(test_mistakes_are_named),
    };
    return cmocka_run_group_tests_name("reduce", tests, setup, teardown);
}
