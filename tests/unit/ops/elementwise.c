/* elementwise.c: values, dtypes, strides, broadcasting, in-place twins, gradients and errors of the
 * elementwise operators. ctest: each-isa poisoned late cuda */
#include <float.h>

#include "gradcheck.h"
#include "ranges.h"

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

/* ------------------------------------------------------------------- values */

/* X(name, the value at a, b and c, with the factor v) of each operator. */
#define REFERENCES(X)                                                          \
    X(neg, -a)                                                                 \
    X(exp, exp(a))                                                             \
    X(log, log(a))                                                             \
    X(sqrt, sqrt(a))                                                           \
    X(rsqrt, 1 / sqrt(a))                                                      \
    X(square, a *a)                                                            \
    X(abs, fabs(a))                                                            \
    X(sign, (a > 0) - (a < 0))                                                 \
    X(relu, a > 0 ? a : 0)                                                     \
    X(gelu, 0.5 * a * (1 + tanh(sqrt(2 / M_PI) * (a + 0.044715 * a * a * a)))) \
    X(gelu_erf, 0.5 * a * (1 + erf(a / sqrt(2))))                              \
    X(silu, a / (1 + exp(-a)))                                                 \
    X(tanh, tanh(a))                                                           \
    X(sigmoid, 1 / (1 + exp(-a)))                                              \
    X(sin, sin(a))                                                             \
    X(cos, cos(a))                                                             \
    X(floor, floor(a))                                                         \
    X(ceil, ceil(a))                                                           \
    X(round, rint(a))                                                          \
    X(pow, pow(a, v))                                                          \
    X(is_finite, isfinite(a))                                                  \
    X(add_scalar, a + v)                                                       \
    X(mul_scalar, a *v)                                                        \
    X(div_scalar, a / v)                                                       \
    X(rsub_scalar, v - a)                                                      \
    X(rdiv_scalar, v / a)                                                      \
    X(maximum_scalar, fmax(a, v))                                              \
    X(minimum_scalar, fmin(a, v))                                              \
    X(eq_scalar, a == v)                                                       \
    X(ne_scalar, a != v)                                                       \
    X(lt_scalar, a < v)                                                        \
    X(le_scalar, a <= v)                                                       \
    X(gt_scalar, a > v)                                                        \
    X(ge_scalar, a >= v)                                                       \
    X(add, a + v * b)                                                          \
    X(sub, a - v * b)                                                          \
    X(mul, a *b)                                                               \
    X(div, a / b)                                                              \
    X(maximum, fmax(a, b))                                                     \
    X(minimum, fmin(a, b))                                                     \
    X(swiglu, a *b / (1 + exp(-b)))                                            \
    X(eq, a == b)                                                              \
    X(ne, a != b)                                                              \
    X(lt, a < b)                                                               \
    X(le, a <= b)                                                              \
    X(gt, a > b)                                                               \
    X(ge, a >= b)                                                              \
    X(lerp, a + c * (b - a))                                                   \
    X(addcmul, a + v * b * c)                                                  \
    X(addcdiv, a + v * b / c)                                                  \
    X(where, a != 0 ? b : c)

#define NUMBER_OF(name, value) REFERENCE_##name,
#define NAME_OF(name, value) #name,
#define CASE_OF(name, value) \
    case REFERENCE_##name: return value;
enum { REFERENCES(NUMBER_OF) REFERENCE_COUNT };
static const char *const reference_names[] = { REFERENCES(NAME_OF) };

static int reference_of(const char *name)
{
    for (int i = 0; i < REFERENCE_COUNT; i++)
        if (strcmp(reference_names[i], name) == 0) return i;
    fail_msg("no reference for %s", name);
    return 0;
}

static double value_of(int reference, double a, double b, double c, double v)
{
    switch (reference) {
        REFERENCES(CASE_OF)
    }
    return NAN;
}

static const char *const unary[] = {
    "neg",        "exp",        "square",      "abs",         "sign",           "relu",
    "gelu",       "gelu_erf",   "silu",        "tanh",        "sigmoid",        "sin",
    "cos",        "floor",      "ceil",        "round",       "is_finite",      "add_scalar",
    "mul_scalar", "div_scalar", "rsub_scalar", "rdiv_scalar", "maximum_scalar", "minimum_scalar",
    "eq_scalar",  "ne_scalar",  "lt_scalar",   "le_scalar",   "gt_scalar",      "ge_scalar"
};
static const char *const positive[] = { "log", "sqrt", "rsqrt", "pow" };
static const char *const binary[] = { "add", "sub", "mul", "div", "maximum", "minimum", "swiglu",
                                      "eq",  "ne",  "lt",  "le",  "gt",      "ge" };
static const char *const ternary[] = { "lerp", "addcmul", "addcdiv" };

static const double factor = 1.5;
static const ms_attributes with_factor = { .scalar = { .value = 1.5, .has_low = true } };

/* n elements against the reference. f32 kernels are within 4 units in the last place; 16-bit
 * results are rounded once more. */
static void check_values(const char *name, uint32_t inputs, bool above_zero, ms_dtype dtype,
                         int64_t n)
{
    ms_tensor *in[3] = { NULL, NULL, NULL };
    double *x[3] = { NULL, NULL, NULL };
    double tolerance = dtype == MS_F16 ? 1e-3 : 8e-3;
    if (dtype == MS_F32) tolerance = 1e-6;
    for (uint32_t k = 0; k < inputs; k++) {
        in[k] = tensor_of(engine, dtype, 1, &n, NULL);
        x[k] = tensor_get(in[k]);
        for (int64_t i = 0; i < n && above_zero; i++) x[k][i] = fabs(x[k][i]);
        if (above_zero) tensor_set(in[k], x[k]);
    }
    ms_tensor *out = apply(engine, ms_op_find(name), &with_factor, in, inputs);
    double *want = calloc((size_t)n + 1, sizeof *want);
    int reference = reference_of(name);
    for (int64_t i = 0; i < n; i++) {
        double b = inputs > 1 ? x[1][i] : 0;
        double c = inputs > 2 ? x[2][i] : 0;
        want[i] = value_of(reference, x[0][i], b, c, factor);
    }
    assert_values(out, want, (size_t)n, tolerance, name);
    free(want);
    ms_tensor_release(out);
    for (uint32_t k = 0; k < inputs; k++) {
        ms_tensor_release(in[k]);
        free(x[k]);
    }
}

static void test_values_in_every_float_dtype_at_every_length(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_F16, MS_BF16 };
    static const int64_t lengths[] = { 0, 1, 15, 16, 17, 513, 3000 };
    for (size_t d = 0; d < COUNT(dtypes); d++)
        for (size_t l = 0; l < COUNT(lengths); l++) {
            for (size_t i = 0; i < COUNT(unary); i++)
                check_values(unary[i], 1, false, dtypes[d], lengths[l]);
            for (size_t i = 0; i < COUNT(positive); i++)
                check_values(positive[i], 1, true, dtypes[d], lengths[l]);
            for (size_t i = 0; i < COUNT(binary); i++)
                check_values(binary[i], 2, false, dtypes[d], lengths[l]);
            for (size_t i = 0; i < COUNT(ternary); i++)
                check_values(ternary[i], 3, false, dtypes[d], lengths[l]);
        }
}

/* Cases that the reference does not cover: infinities, NaN, zeros of both signs, and results that
 * overflow or underflow. */
static void test_special_values(void **state)
{
    (void)state;
    const double in[] = { INFINITY, -INFINITY, NAN, 0.0, -0.0, 89, -104, 1e-30 };
    const struct {
        const char *name;
        double want[8];
    } cases[] = {
        { "exp", { INFINITY, 0, NAN, 1, 1, INFINITY, 0, 1 } },
        { "log", { INFINITY, NAN, NAN, -INFINITY, -INFINITY, 4.48863637, NAN, -69.0775528 } },
        { "tanh", { 1, -1, NAN, 0, 0, 1, -1, 1e-30 } },
        { "sigmoid", { 1, 0, NAN, 0.5, 0.5, 1, 0, 0.5 } },
        { "sin", { NAN, NAN, NAN, 0, -0.0, 0.860069406, 0.321622403, 1e-30 } },
        { "cos", { NAN, NAN, NAN, 1, 1, 0.510177045, -0.946867928, 1 } },
        { "relu", { INFINITY, 0, NAN, 0, 0, 89, 0, 1e-30 } },
        { "gelu", { INFINITY, NAN, NAN, 0, 0, 89, 0, 0 } },
        { "is_finite", { 0, 0, 0, 1, 1, 1, 1, 1 } },
        { "sign", { 1, -1, 0, 0, 0, 1, -1, 1 } },
    };
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(8), in);
    for (size_t i = 0; i < COUNT(cases); i++) {
        ms_tensor *y = apply(engine, ms_op_find(cases[i].name), NULL, &x, 1);
        assert_values(y, cases[i].want, 8, 1e-6, cases[i].name);
        ms_tensor_release(y);
    }
    ms_attributes bounds = { .scalar = {
                                 .value = -1, .high = 2, .has_low = true, .has_high = true } };
    ms_tensor *y = apply(engine, &ms_op_clamp, &bounds, &x, 1);
    assert_values(y, (double[]){ 2, -1, NAN, 0, 0, 2, -1, 1e-30 }, 8, 1e-6, "clamp");
    ms_tensor_release(y);
    ms_tensor_release(x);
}

/* Against the C library, bit by bit, signs of zeros too: halves of both signs, the numbers beside
 * whole ones, and the sizes from which on every number is whole. Integers stay
 * what they are. */
static void test_whole_numbers_of_floats(void **state)
{
    (void)state;
    static const struct {
        const ms_op *op;
        float (*want)(float);
    } cases[] = { { &ms_op_floor, floorf }, { &ms_op_ceil, ceilf }, { &ms_op_round, rintf } };
    static const float sizes[] = { 0,       0.25f,    0.5f,       0.75f,     1,        1.5f,
                                   2.5f,    3.5f,     1e-30f,     1e-37f,    0.1f,     4194303.5f,
                                   4194304, 8388607,  8388607.5f, 8388608,   8388609,  16777216,
                                   3.4e38f, INFINITY, NAN,        123456.5f, 1023.75f, 255.5f };
    float in[6 * COUNT(sizes)], got[COUNT(in)];
    for (size_t i = 0; i < COUNT(in); i++) {
        float size = sizes[i / 6];
        if (i % 3 == 1) size = nextafterf(size, 0);
        else if (i % 3 == 2) size = nextafterf(size, INFINITY);
        /* Threads of the CPU device take subnormal numbers as 0. */
        if (size < FLT_MIN) size = 0;
        in[i] = i % 6 < 3 ? size : -size;
    }
    ms_tensor *x = NULL;
    assert_ok(engine, ms_tensor_new(engine, MS_F32, DIMS(COUNT(in)), &x));
    assert_ok(engine, ms_tensor_write(x, in, sizeof in));
    for (size_t c = 0; c < COUNT(cases); c++) {
        ms_tensor *y = apply(engine, cases[c].op, NULL, &x, 1);
        assert_ok(engine, ms_tensor_read(y, got, sizeof got));
        for (size_t i = 0; i < COUNT(in); i++) {
            float want = cases[c].want(in[i]);
            if (isnan(want) ? isnan(got[i]) : memcmp(&got[i], &want, sizeof want) == 0) continue;
            fail_msg("%s of %a is %a, not %a", cases[c].op->name, (double)in[i], (double)got[i],
                     (double)want);
        }
        ms_tensor_release(y);
    }
    ms_tensor_release(x);
    const int64_t whole[] = { 9007199254740993, -5, INT64_MAX };
    int64_t same[3];
    assert_ok(engine, ms_tensor_new(engine, MS_I64, DIMS(3), &x));
    assert_ok(engine, ms_tensor_write(x, whole, sizeof whole));
    for (size_t c = 0; c < COUNT(cases); c++) {
        ms_tensor *y = apply(engine, cases[c].op, NULL, &x, 1);
        assert_ok(engine, ms_tensor_read(y, same, sizeof same));
        assert_memory_equal(same, whole, sizeof same);
        ms_tensor_release(y);
    }
    ms_tensor_release(x);
    ms_tensor *truth = tensor_of(engine, MS_BOOL, DIMS(1), (double[]){ 1 }), *out = NULL;
    assert_refused(engine, ms_op_apply(engine, &ms_op_floor, NULL, false, &truth, 1, &out, 1),
                   "does not work on bool");
    ms_tensor_release(truth);
}

static void test_integers_are_exact_and_wrap(void **state)
{
    (void)state;
    const int64_t a[] = { 9007199254740993, -5, INT64_MAX }, b[] = { 3, 7, 1 };
    int64_t got[3];
    ms_tensor *x = NULL, *y = NULL;
    assert_ok(engine, ms_tensor_new(engine, MS_I64, DIMS(3), &x));
    assert_ok(engine, ms_tensor_new(engine, MS_I64, DIMS(3), &y));
    assert_ok(engine, ms_tensor_write(x, a, sizeof a));
    assert_ok(engine, ms_tensor_write(y, b, sizeof b));
    struct {
        const ms_op *op;
        int64_t want[3];
    } cases[] = {
        { &ms_op_add, { 9007199254740996, 2, INT64_MIN } },
        { &ms_op_sub, { 9007199254740990, -12, INT64_MAX - 1 } },
        { &ms_op_mul, { 27021597764222979, -35, INT64_MAX } },
        { &ms_op_maximum, { 9007199254740993, 7, INT64_MAX } },
        { &ms_op_minimum, { 3, -5, 1 } },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        ms_tensor *out = apply(engine, cases[i].op, NULL, OPERANDS(x, y), 2);
        assert_ok(engine, ms_tensor_read(out, got, sizeof got));
        assert_memory_equal(got, cases[i].want, sizeof got);
        ms_tensor_release(out);
    }
    ms_tensor_release(x);
    ms_tensor_release(y);
    const struct {
        ms_dtype dtype;
        double limit;
    } small[] = { { MS_U8, 255 }, { MS_U16, 65535 }, { MS_I32, 2147483647 } };
    for (size_t i = 0; i < COUNT(small); i++) {
        ms_attributes one = { .scalar = { .value = 1 } };
        x = tensor_of(engine, small[i].dtype, DIMS(2), (double[]){ small[i].limit, 4 });
        y = apply(engine, &ms_op_add_scalar, &one, &x, 1);
        assert_values(y, (double[]){ small[i].dtype == MS_I32 ? -2147483648.0 : 0, 5 }, 2, 0,
                      "wrap");
        ms_tensor_release(y);
        one.scalar.value = 3;
        y = apply(engine, &ms_op_pow, &one, &x, 1);
        double *got_power = tensor_get(y);
        assert_true(got_power[1] == 64);
        free(got_power);
        ms_tensor_release(y);
        ms_tensor_release(x);
    }
}

/* ------------------------------------------------- strides and broadcasting */

/* What an operand has at position i of the result. */
static double operand_at(const ms_tensor *t, const double *values, uint32_t dims,
                         const int64_t *shape, int64_t i)
{
    int64_t at = 0, scale = 1;
    uint32_t lead = dims - ms_tensor_dims(t);
    for (uint32_t d = dims; d-- > lead; i /= shape[d]) {
        int64_t size = ms_tensor_shape(t)[d - lead];
        at += size == 1 ? 0 : i % shape[d] * scale;
        scale *= size;
    }
    return values[at];
}

/* An operator on windows of any strides, into a new tensor and in place, against loops over their
 * values. */
static void check_windows(const char *name, ms_tensor *const *in, uint32_t inputs, double tolerance)
{
    uint32_t dims = 0;
    int64_t shape[MS_DIMS_MAX];
    double *x[3] = { NULL, NULL, NULL };
    for (uint32_t k = 0; k < inputs; k++) {
        assert_true(ms_shape_broadcast(dims, shape, ms_tensor_dims(in[k]), ms_tensor_shape(in[k]),
                                       &dims, shape));
        x[k] = tensor_get(in[k]);
    }
    int64_t count = ms_shape_count(dims, shape);
    double *want = calloc((size_t)count + 1, sizeof *want);
    int reference = reference_of(name);
    for (int64_t i = 0; i < count; i++) {
        double at[3] = { 0, 0, 0 };
        for (uint32_t k = 0; k < inputs; k++) at[k] = operand_at(in[k], x[k], dims, shape, i);
        want[i] = value_of(reference, at[0], at[1], at[2], 1);
    }
    const ms_op *op = ms_op_find(name);
    ms_tensor *out = apply(engine, op, NULL, in, inputs);
    assert_true(ms_shape_equal(ms_tensor_dims(out), ms_tensor_shape(out), dims, shape));
    assert_values(out, want, (size_t)count, tolerance, name);
    ms_tensor_release(out);
    if ((op->flags & MS_OP_IN_PLACE)
        && ms_shape_equal(dims, shape, ms_tensor_dims(in[0]), ms_tensor_shape(in[0]))) {
        ms_tensor *same = NULL;
        assert_ok(engine, ms_op_apply(engine, op, NULL, true, in, inputs, &same, 1));
        assert_ptr_equal(same, in[0]);
        assert_values(in[0], want, (size_t)count, tolerance, "in place");
        ms_tensor_release(same);
        tensor_set(in[0], x[0]);
    }
    for (uint32_t k = 0; k < inputs; k++) free(x[k]);
    free(want);
}
static void check_sum(ms_tensor *a, ms_tensor *b) { check_windows("add", OPERANDS(a, b), 2, 1e-2); }

static void test_strides_and_broadcasting_in_every_dtype(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_F16, MS_I64, MS_I32, MS_U16, MS_U8 };
    for (size_t d = 0; d < COUNT(dtypes); d++) {
        double ramp[1200];
        for (int i = 0; i < 1200; i++) ramp[i] = i % 100;
        ms_tensor *base = tensor_of(engine, dtypes[d], DIMS(1200), ramp),
                  *other = tensor_of(engine, dtypes[d], DIMS(1200), ramp);
        ms_tensor *windows[] = {
            /* plain, transposed */
            window_of(base, DIMS(20, 60), SHAPE(60, 1), 0),
            window_of(base, DIMS(20, 60), SHAPE(1, 20), 0),
            /* Every other one; short rows. */
            window_of(base, DIMS(20, 30), SHAPE(60, 2), 1),
            window_of(base, DIMS(4, 5, 3), SHAPE(60, 7, 2), 11),
            window_of(base, 8, SHAPE(2, 1, 2, 1, 2, 3, 1, 2), SHAPE(600, 1, 300, 1, 24, 8, 1, 3),
                      5),
            window_of(base, 0, NULL, NULL, 7),
        };
        ms_tensor *second[] = {
            window_of(other, DIMS(60), SHAPE(1), 0),
            window_of(other, DIMS(20, 60), SHAPE(60, 1), 0),
            window_of(other, DIMS(20, 1), SHAPE(60, 1), 0),
            window_of(other, DIMS(5, 1), SHAPE(2, 1), 3),
            window_of(other, DIMS(3, 1, 2), SHAPE(1, 1, 9), 0),
            window_of(other, DIMS(2, 3), SHAPE(3, 1), 0),
        };
        for (size_t i = 0; i < COUNT(windows); i++) check_sum(windows[i], second[i]);
        for (size_t i = 0; i < COUNT(windows); i++) check_sum(windows[i], windows[5]);
        for (size_t i = 0; i < COUNT(windows); i++) {
            ms_tensor_release(windows[i]);
            ms_tensor_release(second[i]);
        }
        ms_tensor_release(base);
        ms_tensor_release(other);
    }
}

/* A window of this shape into `base`, from element `start` on; its rows are `gap` elements longer.
 * It repeats along the dimensions in `repeats`: stride 0. */
static ms_tensor *repeating(ms_tensor *base, uint32_t dims, const int64_t *shape, uint32_t repeats,
                            int64_t start, int64_t gap)
{
    int64_t strides[MS_DIMS_MAX], stride = 1;
    for (uint32_t d = dims; d-- > 0;) {
        strides[d] = repeats >> d & 1 ? 0 : stride;
        stride *= shape[d] + (d == dims - 1 ? gap : 0);
    }
    return window_of(base, dims, shape, strides, start);
}

/* Operators of two and three operands, of which one is a mask, and of numbers to bool. */
static void check_operators(ms_tensor *const *x, ms_tensor *mask)
{
    check_windows("add", x, 2, 0);
    check_windows("lt", x, 2, 0);
    check_windows("addcmul", x, 3, 0);
    check_windows("where", OPERANDS(mask, x[0], x[1]), 3, 0);
}

/* Rows of every width and dimensions up to the most; the second and third operand repeat along
 * each dimension, along all and along all but one: columns, rows, numbers, masks of a batch. All
 * rows begin at multiples of 16 bytes, or anywhere. All values are small integers, so every dtype
 * has them. */
static void check_rows(ms_tensor *const *base, uint32_t dims, const int64_t *shape, bool aligned,
                       int64_t *turn)
{
    uint32_t all = (1u << dims) - 1;
    for (uint32_t d = 0; d <= 2 * dims + 1; d++, ++*turn) {
        uint32_t repeats = d < dims ? 1u << d : d < 2 * dims ? all ^ 1u << (d - dims) : all;
        if (d > 2 * dims) repeats = 0;
        int64_t start = aligned ? 16 : *turn % 9, gap = *turn % 4;
        if (aligned) gap = (8 - shape[dims - 1] % 8) % 8;
        ms_tensor *x[3] = {
            repeating(base[0], dims, shape, 0, start, gap),
            repeating(base[1], dims, shape, repeats, aligned ? 8 : start / 2, gap),
            repeating(base[2], dims, shape, all & ~repeats, aligned ? 0 : start % 4, gap),
        };
        ms_tensor *mask = repeating(base[3], dims, shape, repeats, start, gap);
        check_operators(x, mask);
        release_all(x, 3);
        ms_tensor_release(mask);
    }
}

static void test_rows_of_every_width_and_address(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_F16, MS_I64, MS_I32, MS_U16, MS_U8 };
    static const int64_t widths[] = { 0, 1, 3, 7, 8, 40, 65, 1025 };
    static const int periods[] = { 13, 11, 7, 3 };
    static double values[4][6000];
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 6000; i++) values[k][i] = i % periods[k];
    int64_t turn = 0;
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        ms_tensor *base[4];
        for (int k = 0; k < 4; k++)
            base[k] = tensor_of(engine, k == 3 ? MS_BOOL : dtypes[t], DIMS(6000), values[k]);
        for (size_t w = 0; w < 2 * COUNT(widths); w++) {
            int64_t width = widths[w / 2];
            check_rows(base, DIMS(width), w % 2, &turn);
            check_rows(base, DIMS(5, width), w % 2, &turn);
            if (width > 100) continue;
            check_rows(base, DIMS(2, 3, width), w % 2, &turn);
            /* Most of the time goes here: a third of the pairs of dtype and width. */
            if (ranges_are_long() || (w + t) % 3 == 0)
                check_rows(base, 8, SHAPE(2, 1, 2, 1, 1, 3, 1, width), w % 2, &turn);
        }
        release_all(base, COUNT(base));
    }
}

static void test_in_place_with_an_operand_that_overlaps(void **state)
{
    (void)state;
    const double values[] = { 1, 2, 3, 4, 5, 6, 7, 8, 9 };
    ms_tensor *base = tensor_of(engine, MS_F32, DIMS(3, 3), values), *out = NULL;
    ms_tensor *turned = window_of(base, DIMS(3, 3), SHAPE(1, 3), 0);
    assert_ok(engine,
              ms_op_apply(engine, &ms_op_add, NULL, true, OPERANDS(base, turned), 2, &out, 1));
    assert_values(base, (double[]){ 2, 6, 10, 6, 10, 14, 10, 14, 18 }, 9, 0, "x + x^T in place");
    ms_tensor_release(out);
    tensor_set(base, values);
    ms_tensor *tail = window_of(base, DIMS(8), SHAPE(1), 1),
              *head = window_of(base, DIMS(8), SHAPE(1), 0);
    assert_ok(engine,
              ms_op_apply(engine, &ms_op_add, NULL, true, OPERANDS(tail, head), 2, &out, 1));
    assert_values(base, (double[]){ 1, 3, 5, 7, 9, 11, 13, 15, 17 }, 9, 0, "shifted in place");
    ms_tensor_release(out);
    ms_tensor *wide = window_of(base, DIMS(4, 9), SHAPE(0, 1), 0);
    assert_refused(engine, ms_op_apply(engine, &ms_op_neg, NULL, true, &wide, 1, &out, 1),
                   "expanded");
    ms_tensor *all[] = { base, turned, tail, head, wide };
    for (size_t i = 0; i < COUNT(all); i++) ms_tensor_release(all[i]);
}

static void test_masks(void **state)
{
    (void)state;
    ms_tensor *mask = tensor_of(engine, MS_BOOL, DIMS(2, 1), (double[]){ 1, 0 }),
              *a = tensor_of(engine, MS_F32, DIMS(2), (double[]){ 1, INFINITY });
    ms_tensor *b = tensor_of(engine, MS_F32, DIMS(2, 2), (double[]){ NAN, 5, 6, 7 });
    ms_tensor *out = apply(engine, &ms_op_where, NULL, OPERANDS(mask, a, b), 3);
    assert_values(out, (double[]){ 1, INFINITY, 6, 7 }, 4, 0, "where");
    ms_tensor_release(out);
    ms_attributes number = { .scalar = { .value = -INFINITY } };
    out = apply(engine, &ms_op_masked_fill, &number, OPERANDS(b, mask), 2);
    assert_values(out, (double[]){ -INFINITY, -INFINITY, 6, 7 }, 4, 0, "masked_fill");
    ms_tensor_release(out);
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_where, NULL, false, OPERANDS(a, a, b), 3, &out, 1),
                   "mask must be bool");
    ms_tensor_release(mask);
    ms_tensor_release(a);
    ms_tensor_release(b);
}

/* ---------------------------------------------------------------- gradients */

static void check_one(const char *name, uint32_t inputs, bool above_zero, bool in_place,
                      const ms_attributes *attributes)
{
    int64_t shape[3][2] = { { 3, 4 }, { 3, 1 }, { 3, 4 } };
    ms_tensor *in[3] = { NULL };
    for (uint32_t k = 0; k < inputs; k++) {
        in[k] = tensor_of(engine, MS_F32, 2, shape[k], NULL);
        double *x = tensor_get(in[k]);
        for (int64_t i = 0; i < ms_tensor_count(in[k]); i++) {
            /* No two inputs have equal values, where maximum and minimum have a corner. */
            if (inputs > 1) x[i] = floor(x[i] * 8) / 8 + 0.06 + 0.04 * k;
            x[i] = above_zero ? fabs(x[i]) + 0.3 : x[i];
            /* maximum_scalar and minimum_scalar have a corner there, where differences fail. */
            if (inputs == 1 && fabs(x[i] - attributes->scalar.value) < 0.05) x[i] += 0.1;
        }
        tensor_set(in[k], x);
        free(x);
    }
    gradcheck check = {
        .op = ms_op_find(name), .inputs = inputs, .in_place = in_place, .attributes = *attributes
    };
    check_gradients(engine, check, in);
    for (uint32_t k = 0; k < inputs; k++) ms_tensor_release(in[k]);
}

static void test_gradients_out_of_place_and_in_place(void **state)
{
    (void)state;
    static const char *const one[] = {
        "neg",           "exp",        "square",     "abs",        "sign",        "relu",
        "gelu",          "gelu_erf",   "silu",       "tanh",       "sigmoid",     "sin",
        "cos",           "add_scalar", "mul_scalar", "div_scalar", "rsub_scalar", "maximum_scalar",
        "minimum_scalar"
    };
    static const char *const one_positive[] = { "log", "sqrt", "rsqrt", "rdiv_scalar" };
    for (int in_place = 0; in_place < 2; in_place++) {
        for (size_t i = 0; i < COUNT(one); i++) check_one(one[i], 1, false, in_place, &with_factor);
        for (size_t i = 0; i < COUNT(one_positive); i++)
            check_one(one_positive[i], 1, true, in_place, &with_factor);
        for (double p = -1; p <= 3; p += 0.5) {
            ms_attributes exponent = { .scalar = { .value = p } };
            check_one("pow", 1, true, in_place, &exponent);
        }
        static const char *const two[] = { "add", "sub", "mul", "maximum", "minimum", "swiglu" };
        for (size_t i = 0; i < COUNT(two); i++) check_one(two[i], 2, false, in_place, &with_factor);
        check_one("div", 2, true, in_place, &with_factor);
        check_one("lerp", 2, false, in_place, &with_factor);
        for (size_t i = 0; i < COUNT(ternary); i++)
            check_one(ternary[i], 3, true, in_place, &with_factor);
    }
}

static void test_gradients_where_differences_say_nothing(void **state)
{
    (void)state;
    const double x[] = { -2, -1, 0, 1, 2, 3 };
    ms_tensor *in[2] = { tensor_of(engine, MS_F32, DIMS(6), x),
                         tensor_of(engine, MS_F32, DIMS(6), x) },
              *results[2];
    struct {
        const ms_op *op;
        ms_attributes attributes;
        uint32_t inputs;
        double want[6];
    } cases[] = {
        { &ms_op_relu, { .scalar = { .value = 0 } }, 1, { 0, 0, 0, 1, 1, 1 } },
        { &ms_op_clamp,
          { .scalar = { .value = -1, .high = 2, .has_low = true, .has_high = true } },
          1,
          { 0, 1, 1, 1, 1, 0 } },
        { &ms_op_clamp, { .scalar = { .high = 0, .has_high = true } }, 1, { 1, 1, 1, 0, 0, 0 } },
        { &ms_op_maximum, { .scalar = { .value = 0 } }, 2, { 0.5, 0.5, 0.5, 0.5, 0.5, 0.5 } },
        { &ms_op_pow, { .scalar = { .value = 0 } }, 1, { 0, 0, 0, 0, 0, 0 } },
        { &ms_op_pow, { .scalar = { .value = 3 } }, 1, { 12, 3, 0, 3, 12, 27 } },
        { &ms_op_gelu,
          { .scalar = { .value = 0 } },
          1,
          { -0.0860992566, -0.0829640838, 0.5, 1.08296408, 1.08609926, 1.01158417 } },
    };
    for (size_t c = 0; c < COUNT(cases); c++) {
        gradcheck check = { .op = cases[c].op,
                            .attributes = cases[c].attributes,
                            .inputs = cases[c].inputs };
        gradcheck_backward(engine, &check, in, results);
        double *got = tensor_get(results[0]);
        for (size_t i = 0; i < 6; i++)
            assert_near(got[i], cases[c].want[i] * weight(0, i), 1e-5, cases[c].op->name, i);
        free(got);
        for (uint32_t i = 0; i < cases[c].inputs; i++) ms_tensor_release(results[i]);
    }
    ms_tensor_release(in[0]);
    ms_tensor_release(in[1]);
}

/* A NaN in what is compared does not end in a gradient of 0, which would hide it from all that
 * comes before. Eleven elements are vectors and a rest. */
static void test_gradients_where_a_nan_is_compared(void **state)
{
    (void)state;
    const double x[] = { NAN, 1, NAN, INFINITY, INFINITY, -INFINITY, 0, 2, -2, NAN, NAN },
                 y[] = { 1, NAN, NAN, INFINITY, -INFINITY, INFINITY, 0, 1, 1, NAN, 3 };
    ms_tensor *in[2] = { tensor_of(engine, MS_F32, DIMS(11), x),
                         tensor_of(engine, MS_F32, DIMS(11), y) },
              *results[2];
    const struct {
        const ms_op *op;
        uint32_t inputs;
        double want[2][11];
    } cases[] = {
        { &ms_op_relu, 1, { { 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1 } } },
        { &ms_op_maximum,
          2,
          { { 1, 1, 1, 0.5, 1, 0, 0.5, 1, 0, 1, 1 }, { 1, 1, 1, 0.5, 0, 1, 0.5, 0, 1, 1, 1 } } },
        { &ms_op_minimum,
          2,
          { { 1, 1, 1, 0.5, 0, 1, 0.5, 0, 1, 1, 1 }, { 1, 1, 1, 0.5, 1, 0, 0.5, 1, 0, 1, 1 } } },
        /* maximum(x, 0) and minimum(x, 0) of a number. */
        { &ms_op_maximum_scalar, 1, { { 1, 1, 1, 1, 1, 0, 0.5, 1, 0, 1, 1 } } },
        { &ms_op_minimum_scalar, 1, { { 1, 0, 1, 0, 0, 1, 0.5, 0, 1, 1, 1 } } },
    };
    for (size_t c = 0; c < COUNT(cases); c++) {
        gradcheck check = { .op = cases[c].op, .inputs = cases[c].inputs };
        gradcheck_backward(engine, &check, in, results);
        for (uint32_t k = 0; k < cases[c].inputs; k++) {
            double *got = tensor_get(results[k]);
            for (size_t i = 0; i < 11; i++)
                assert_near(got[i], cases[c].want[k][i] * weight(0, i), 1e-5, cases[c].op->name, i);
            free(got);
            ms_tensor_release(results[k]);
        }
    }
    ms_tensor_release(in[0]);
    ms_tensor_release(in[1]);
}

/* A result that does not move passes nothing back: not even an infinite gradient times 0, which
 * would be NaN. */
static void test_flat_results_pass_nothing_back(void **state)
{
    (void)state;
    const double incoming[] = { INFINITY, -INFINITY };
    const ms_op *const flat[] = { &ms_op_sign, &ms_op_floor, &ms_op_ceil, &ms_op_round,
                                  &ms_op_pow }; /* x^0 */
    for (size_t i = 0; i < COUNT(flat); i++) {
        ms_tensor *g = tensor_of(engine, MS_F32, DIMS(2), incoming), *result = NULL;
        ms_tensor_info info = { .dtype = MS_F32, .dims = 1, .shape = { 2 } };
        ms_op_gradient gradient = { .engine = engine,
                                    .op = flat[i],
                                    .inputs = &info,
                                    .input_count = 1,
                                    .outputs = &info,
                                    .gradients = &g,
                                    .output_count = 1,
                                    .results = &result,
                                    .needs = (bool[]){ true } };
        assert_int_equal(flat[i]->backward(&gradient), MS_OK);
        double *got = tensor_get(result);
        assert_true(got[0] == 0 && got[1] == 0);
        free(got);
        ms_tensor_release(result);
        ms_tensor_release(g);
    }
}

static void test_gradients_of_masks(void **state)
{
    (void)state;
    ms_tensor *mask = tensor_of(engine, MS_BOOL, DIMS(2, 1), (double[]){ 1, 0 }),
              *a = tensor_of(engine, MS_F32, DIMS(3), NULL),
              *b = tensor_of(engine, MS_F32, DIMS(2, 3), NULL);
    check_gradients(engine, (gradcheck){ .op = &ms_op_where, .inputs = 3 }, OPERANDS(mask, a, b));
    check_gradients(engine,
                    (gradcheck){ .op = &ms_op_masked_fill,
                                 .inputs = 2,
                                 .attributes = { .scalar = { .value = 4 } } },
                    OPERANDS(b, mask));
    check_gradients(engine,
                    (gradcheck){ .op = &ms_op_masked_fill,
                                 .inputs = 2,
                                 .in_place = true,
                                 .attributes = { .scalar = { .value = 4 } } },
                    OPERANDS(b, mask));
    ms_tensor_release(mask);
    ms_tensor_release(a);
    ms_tensor_release(b);
}

/* A one-element f32 tensor represents a number beside bf16, and gets an f32 gradient. */
static void test_one_element_of_another_float_dtype(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_BF16, DIMS(4), (double[]){ 1, 2, 3, 4 }),
              *s = tensor_of(engine, MS_F32, 0, NULL, (double[]){ 0.5 }), *results[2];
    ms_tensor *y = apply(engine, &ms_op_mul, NULL, OPERANDS(s, x), 2);
    assert_int_equal(ms_tensor_dtype(y), MS_BF16);
    assert_values(y, (double[]){ 0.5, 1, 1.5, 2 }, 4, 0, "scaled");
    gradcheck check = { .op = &ms_op_mul, .inputs = 2 };
    gradcheck_backward(engine, &check, OPERANDS(x, s), results);
    assert_values(results[1], (double[]){ 0.5 + 2 * 1.24 + 3 * 1.98 + 4 * 0.87 }, 1, 1e-2,
                  "gradient of the number");
    for (int i = 0; i < 2; i++) ms_tensor_release(results[i]);
    ms_tensor_release(x);
    ms_tensor_release(s);
    ms_tensor_release(y);
}

/* ---------------------------------------------------------- threads, errors */

/* The same bits from 1, 2 and 3 threads, at a size that is cut into tiles, contiguous and not. */
static void test_bits_do_not_depend_on_threads(void **state)
{
    (void)state;
    int64_t shape[] = { 300, 701 };
    float *first = NULL, *got = calloc(300 * 701, sizeof *got);
    for (uint32_t threads = 1; threads <= 3; threads++) {
        ms_engine *own = engine_with(threads, NULL);
        ms_tensor *x = NULL, *filled = NULL, *turned = NULL;
        ms_attributes draw = { .random = { .random = { 3, 1, 4 }, .b = 1 } };
        assert_ok(own, ms_tensor_new(own, MS_F32, 2, shape, &x));
        assert_ok(own, ms_op_apply(own, &ms_op_normal, &draw, true, &x, 1, &filled, 1));
        assert_ok(own, ms_tensor_window(x, DIMS(300, 701), SHAPE(1, 300), 0, &turned));
        ms_tensor *sum = apply(own, &ms_op_add, NULL, OPERANDS(x, turned), 2),
                  *y = apply(own, &ms_op_gelu, NULL, &sum, 1);
        assert_ok(own, ms_tensor_read(y, got, sizeof(float) * 300 * 701));
        if (first == NULL) {
            first = malloc(sizeof(float) * 300 * 701);
            memcpy(first, got, sizeof(float) * 300 * 701);
        }
        assert_memory_equal(first, got, sizeof(float) * 300 * 701);
        ms_tensor *all[] = { x, filled, turned, sum, y };
        for (size_t i = 0; i < COUNT(all); i++) ms_tensor_release(all[i]);
        ms_engine_free(own);
    }
    free(first);
    free(got);
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    ms_tensor *f = tensor_of(engine, MS_F32, DIMS(2, 3), NULL),
              *h = tensor_of(engine, MS_F16, DIMS(2, 3), NULL),
              *i = tensor_of(engine, MS_I64, DIMS(2, 3), NULL);
    ms_tensor *b = tensor_of(engine, MS_BOOL, DIMS(2, 3), NULL),
              *v = tensor_of(engine, MS_F32, DIMS(4), NULL), *out = NULL;
    ms_attributes half = { .scalar = { .value = 0.5 } };
    assert_refused(engine, ms_op_apply(engine, &ms_op_add, NULL, false, OPERANDS(f, v), 2, &out, 1),
                   "add: [2, 3] f32 and [4] f32: these shapes do not broadcast");
    assert_refused(engine, ms_op_apply(engine, &ms_op_add, NULL, false, OPERANDS(f, h), 2, &out, 1),
                   "the dtypes differ");
    assert_refused(engine, ms_op_apply(engine, &ms_op_mul, NULL, false, OPERANDS(b, b), 2, &out, 1),
                   "does not work on bool");
    assert_refused(engine, ms_op_apply(engine, &ms_op_exp, NULL, false, &i, 1, &out, 1),
                   "needs f32, f16 or bf16");
    assert_refused(engine, ms_op_apply(engine, &ms_op_mul_scalar, &half, false, &i, 1, &out, 1),
                   "0.5 is not a whole number");
    assert_refused(engine, ms_op_apply(engine, &ms_op_add, NULL, true, OPERANDS(v, f), 2, &out, 1),
                   "do not broadcast");
    ms_tensor *row = tensor_of(engine, MS_F32, DIMS(3), NULL);
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_add, NULL, true, OPERANDS(row, f), 2, &out, 1),
                   "another shape");
    assert_null(out);
    ms_tensor *all[] = { f, h, i, b, v, row };
    for (size_t k = 0; k < COUNT(all); k++) ms_tensor_release(all[k]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values_in_every_float_dtype_at_every_length),
        cmocka_unit_test(test_special_values),
        cmocka_unit_test(test_whole_numbers_of_floats),
        cmocka_unit_test(test_integers_are_exact_and_wrap),
        cmocka_unit_test(test_strides_and_broadcasting_in_every_dtype),
        cmocka_unit_test(test_in_place_with_an_operand_that_overlaps),
        cmocka_unit_test(test_masks),
        cmocka_unit_test(test_gradients_out_of_place_and_in_place),
        cmocka_unit_test(test_gradients_where_differences_say_nothing),
        cmocka_unit_test(test_gradients_where_a_nan_is_compared),
        cmocka_unit_test(test_flat_results_pass_nothing_back),
        cmocka_unit_test(test_gradients_of_masks),
        cmocka_unit_test(test_one_element_of_another_float_dtype),
        cmocka_unit_test(test_bits_do_not_depend_on_threads),
        cmocka_unit_test(test_mistakes_are_named),
        /* Last: the numbers that others draw have no corner of maximum in them. */
        cmocka_unit_test(test_rows_of_every_width_and_address),
    };
    return cmocka_run_group_tests_name("elementwise", tests, setup, teardown);
}
