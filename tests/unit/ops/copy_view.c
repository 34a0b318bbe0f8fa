/* copy_view.c: copies between dtypes and layouts, fills, joins, and views with their gradients.
 * ctest: each-isa poisoned late cuda */
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

/* The element of a window at a row-major position, from the values of its base. */
static double at(const ms_tensor *window, int64_t position, const double *base)
{
    int64_t offset = ms_tensor_offset(window);
    for (uint32_t d = ms_tensor_dims(window); d-- > 0; position /= ms_tensor_shape(window)[d])
        offset += position % ms_tensor_shape(window)[d] * ms_tensor_strides(window)[d];
    return base[offset];
}

/* ------------------------------------------------------------------- copies */

/* Clones of all kinds of windows: rows, transposed in two and in four dimensions, large enough for
 * tiles, and every element size. */
static void test_clones_of_every_layout(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_I64, MS_U8 };
    const int64_t count = 400000;
    double *ramp = malloc((size_t)count * sizeof *ramp);
    for (int64_t i = 0; i < count; i++) ramp[i] = (double)(i * 31 % 251);
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        ms_tensor *base = tensor_of(engine, dtypes[t], DIMS(count), ramp);
        ms_tensor *all[] = {
            window_of(base, DIMS(count), SHAPE(1), 0),
            window_of(base, DIMS(600, 500), SHAPE(1, 600), 7),
            window_of(base, DIMS(33, 17), SHAPE(1, 40), 3),
            /* [B, T, H, D] as [B, H, T, D] */
            window_of(base, DIMS(3, 20, 50, 16), SHAPE(16000, 16, 320, 1), 0),
            /* Transposed under two outer dimensions. */
            window_of(base, DIMS(4, 37, 5, 61), SHAPE(15000, 1, 3000, 40), 1),
            window_of(base, DIMS(1000, 100), SHAPE(100, 2), 0),
            window_of(base, DIMS(70, 5000), SHAPE(0, 1), 9),
            window_of(base, DIMS(5000, 70), SHAPE(1, 0), 9),
            window_of(base, DIMS(2, 3, 1), SHAPE(1, 2, 77), 5),
            window_of(base, 0, NULL, NULL, 11),
            window_of(base, DIMS(3, 0, 2), SHAPE(1, 1, 1), 0),
        };
        for (size_t w = 0; w < COUNT(all); w++) {
            ms_tensor *copy = apply(engine, &ms_op_clone, NULL, &all[w], 1);
            double *got = tensor_get(copy);
            assert_true(ms_tensor_is_contiguous(copy));
            assert_true(ms_tensor_storage(copy) != ms_tensor_storage(base));
            for (int64_t i = 0; i < ms_tensor_count(copy); i++)
                if (got[i] != at(all[w], i, ramp))
                    fail_msg("%s, window %zu, element %lld", ms_dtype_name(dtypes[t]), w,
                             (long long)i);
            free(got);
            ms_tensor_release(copy);
        }
        release_all(all, COUNT(all));
        ms_tensor_release(base);
    }
    free(ramp);
}

static void test_casts_between_all_dtypes(void **state)
{
    (void)state;
    const double values[] = { 0, 1, 2, 100, 200, 3, 127, 64 };
    for (ms_dtype from = 0; from < MS_DTYPES; from++)
        for (ms_dtype to = 0; to < MS_DTYPES; to++) {
            ms_tensor *x = tensor_of(engine, from, DIMS(2, 4), values),
                      *turned = window_of(x, DIMS(4, 2), SHAPE(1, 4), 0);
            ms_attributes cast = { .cast = { .dtype = to } };
            ms_tensor *y = apply(engine, &ms_op_cast, &cast, &x, 1),
                      *z = apply(engine, &ms_op_cast, &cast, &turned, 1);
            double want[8], want_turned[8];
            for (int i = 0; i < 8; i++) {
                want[i] = from == MS_BOOL || to == MS_BOOL ? values[i] != 0 : values[i];
                want_turned[(i % 4) * 2 + i / 4] = want[i];
            }
            assert_int_equal(ms_tensor_dtype(y), to);
            assert_values(y, want, 8, 0, ms_dtype_name(to));
            assert_values(z, want_turned, 8, 0, ms_dtype_name(to));
            ms_tensor *all[] = { x, turned, y, z };
            release_all(all, 4);
        }
}

/* Rounding, saturation, truncation and NaN, at more elements than a vector has. */
static void test_casts_round_to_even_and_define_what_does_not_fit(void **state)
{
    (void)state;
    struct {
        ms_dtype to;
        double from, want;
    } cases[] = {
        { MS_BF16, 1.00390625, 1 },
        { MS_BF16, 1.01171875, 1.015625 },
        { MS_BF16, 3.4e38, INFINITY },
        { MS_BF16, NAN, NAN },
        { MS_F16, 2049, 2048 },
        { MS_F16, 2051, 2052 },
        { MS_F16, 65519, 65504 },
        { MS_F16, 65520, INFINITY },
        { MS_F16, 5.9604645e-8, 5.9604645e-8 },
        { MS_F16, NAN, NAN },
        { MS_I64, -2.9, -2 },
        { MS_I64, 1e30, 9223372036854775807.0 },
        { MS_I64, -INFINITY, -9223372036854775808.0 },
        { MS_I64, NAN, 0 },
        { MS_I32, -1.5, -1 },
        { MS_U8, 258, 2 },
        { MS_U16, -1, 65535 },
        { MS_BOOL, 0.25, 1 },
        { MS_BOOL, NAN, 1 },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        double from[37], want[37];
        for (int k = 0; k < 37; k++) {
            from[k] = cases[i].from;
            want[k] = cases[i].want;
        }
        ms_tensor *x = tensor_of(engine, MS_F32, DIMS(37), from);
        ms_attributes cast = { .cast = { .dtype = cases[i].to } };
        ms_tensor *y = apply(engine, &ms_op_cast, &cast, &x, 1);
        assert_values(y, want, 37, 1e-7, ms_dtype_name(cases[i].to));
        ms_tensor_release(x);
        ms_tensor_release(y);
    }
}

static void test_copy_and_fill_in_place(void **state)
{
    (void)state;
    ms_tensor *base = tensor_of(engine, MS_F16, DIMS(4, 4), (double[16]){ 0 }),
              *corner = window_of(base, DIMS(2, 2), SHAPE(1, 4), 1), *out = NULL;
    ms_tensor *row = tensor_of(engine, MS_I32, DIMS(2), (double[]){ 5, 6 }),
              *one = tensor_of(engine, MS_F32, 0, NULL, (double[]){ 7 });
    assert_ok(engine,
              ms_op_apply(engine, &ms_op_copy, NULL, true, OPERANDS(corner, row), 2, &out, 1));
    assert_ptr_equal(out, corner);
    ms_tensor_release(out);
    assert_values(base, (double[]){ 0, 5, 5, 0, 0, 6, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0 }, 16, 0,
                  "copy");
    assert_ok(engine,
              ms_op_apply(engine, &ms_op_fill, NULL, true, OPERANDS(corner, one), 2, &out, 1));
    ms_tensor_release(out);
    assert_values(corner, (double[]){ 7, 7, 7, 7 }, 4, 0, "fill from a tensor");
    for (ms_dtype dtype = 0; dtype < MS_DTYPES; dtype++) {
        ms_attributes value = { .scalar = { .value = 3 } };
        double want[50];
        for (int i = 0; i < 50; i++) want[i] = dtype == MS_BOOL ? 1 : 3;
        ms_tensor *x = tensor_of(engine, dtype, DIMS(50), want);
        value.scalar.value = dtype == MS_BOOL ? 1 : 3;
        assert_ok(engine, ms_op_apply(engine, &ms_op_fill, &value, true, &x, 1, &out, 1));
        assert_values(x, want, 50, 0, "fill");
        ms_tensor_release(out);
        ms_tensor_release(x);
    }
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_copy, NULL, true, OPERANDS(row, base), 2, &out, 1),
                   "does not broadcast");
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_fill, &(ms_attributes){ .scalar = { .value = 0.5 } },
                               true, &row, 1, &out, 1),
                   "0.5 is not a whole number");
    ms_tensor *all[] = { base, corner, row, one };
    release_all(all, COUNT(all));
}

/* x[1:] = x[:-1] moves every element once, though source and target overlap. */
static void test_copy_onto_itself(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(5), (double[]){ 1, 2, 3, 4, 5 }), *out = NULL;
    ms_tensor *tail = window_of(x, DIMS(4), SHAPE(1), 1),
              *head = window_of(x, DIMS(4), SHAPE(1), 0);
    assert_ok(engine,
              ms_op_apply(engine, &ms_op_copy, NULL, true, OPERANDS(tail, head), 2, &out, 1));
    assert_values(x, (double[]){ 1, 1, 2, 3, 4 }, 5, 0, "shifted");
    ms_tensor *all[] = { x, out, tail, head };
    release_all(all, 4);
}

/* -------------------------------------------------------------------- joins */

static void test_cat_and_stack(void **state)
{
    (void)state;
    ms_tensor *a = tensor_of(engine, MS_F32, DIMS(2, 1), (double[]){ 1, 2 }),
              *b = tensor_of(engine, MS_F32, DIMS(2, 2), (double[]){ 3, 4, 5, 6 });
    ms_tensor *none = tensor_of(engine, MS_F32, DIMS(2, 0), NULL),
              *bt = window_of(b, DIMS(2, 2), SHAPE(1, 2), 0), *out = NULL;
    ms_attributes last = { .dim = { .a = -1 } }, first = { .dim = { .a = 0 } };
    out = apply(engine, &ms_op_cat, &last, OPERANDS(a, none, bt), 3);
    assert_values(out, (double[]){ 1, 3, 5, 2, 4, 6 }, 6, 0, "cat");
    ms_tensor_release(out);
    out = apply(engine, &ms_op_cat, &first, OPERANDS(b, bt), 2);
    assert_values(out, (double[]){ 3, 4, 5, 6, 3, 5, 4, 6 }, 8, 0, "cat down");
    ms_tensor_release(out);
    out = apply(engine, &ms_op_stack, &last, OPERANDS(b, bt), 2);
    assert_int_equal(ms_tensor_dims(out), 3);
    assert_values(out, (double[]){ 3, 3, 4, 5, 5, 4, 6, 6 }, 8, 0, "stack");
    ms_tensor_release(out);
    check_gradients(engine, (gradcheck){ .op = &ms_op_cat, .attributes = last, .inputs = 3 },
                    OPERANDS(a, bt, a));
    for (int32_t dim = 0; dim < 3; dim++)
        check_gradients(
            engine,
            (gradcheck){ .op = &ms_op_stack, .attributes = { .dim = { .a = dim } }, .inputs = 2 },
            OPERANDS(b, bt));
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_cat, &first, false, OPERANDS(a, b), 2, &out, 1),
                   "tensor 2 does not fit the first");
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_stack, &first, false, OPERANDS(a, b), 2, &out, 1),
                   "differs from the first");
    ms_tensor *all[] = { a, b, none, bt };
    release_all(all, 4);
}

/* -------------------------------------------------------------------- views */

static ms_attributes shape_of(uint32_t dims, const int64_t *sizes)
{
    ms_attributes out = { .shape = { .dims = dims } };
    memcpy(out.shape.sizes, sizes, dims * sizeof *sizes);
    return out;
}

/* A view shares memory and has the shape; its values, read through its strides, stay in order. */
static void check_view(const ms_op *op, const ms_attributes *attributes, ms_tensor *x,
                       uint32_t dims, const int64_t *shape, bool shares)
{
    ms_tensor *y = apply(engine, op, attributes, &x, 1);
    assert_true(ms_shape_equal(ms_tensor_dims(y), ms_tensor_shape(y), dims, shape));
    assert_int_equal(ms_tensor_storage(y) == ms_tensor_storage(x), shares);
    double *want = tensor_get(x);
    assert_values(y, want, (size_t)ms_tensor_count(y), 0, op->name);
    free(want);
    ms_tensor_release(y);
}

static void test_view_and_reshape(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(4, 6), NULL),
              *turned = window_of(x, DIMS(6, 4), SHAPE(1, 6), 0),
              *part = window_of(x, DIMS(4, 2, 2), SHAPE(6, 2, 1), 1), *out = NULL;
    const struct {
        uint32_t dims;
        int64_t sizes[4], shape[4];
    } fine[] = { { 1, { -1 }, { 24 } },
                 { 3, { 2, 2, 6 }, { 2, 2, 6 } },
                 { 4, { 1, 8, 1, -1 }, { 1, 8, 1, 3 } },
                 { 2, { 24, 1 }, { 24, 1 } } };
    for (size_t i = 0; i < COUNT(fine); i++) {
        ms_attributes to = shape_of(fine[i].dims, fine[i].sizes);
        check_view(&ms_op_view, &to, x, fine[i].dims, fine[i].shape, true);
        check_view(&ms_op_reshape, &to, x, fine[i].dims, fine[i].shape, true);
        check_view(&ms_op_reshape, &to, turned, fine[i].dims, fine[i].shape, false);
        check_gradients(engine, (gradcheck){ .op = &ms_op_reshape, .attributes = to, .inputs = 1 },
                        &turned);
    }
    ms_attributes joined = shape_of(2, SHAPE(4, 4)), split = shape_of(4, SHAPE(2, 3, 2, 2)),
                  whole = shape_of(1, SHAPE(16)), wrong = shape_of(2, SHAPE(5, 5)),
                  two = shape_of(2, SHAPE(-1, -1));
    /* Inner dimensions are contiguous among themselves. */
    check_view(&ms_op_view, &joined, part, DIMS(4, 4), true);
    check_view(&ms_op_view, &split, turned, DIMS(2, 3, 2, 2), true);
    assert_refused(engine, ms_op_apply(engine, &ms_op_view, &whole, false, &part, 1, &out, 1),
                   "use reshape");
    assert_refused(engine, ms_op_apply(engine, &ms_op_view, &wrong, false, &x, 1, &out, 1),
                   "24 elements");
    assert_refused(engine, ms_op_apply(engine, &ms_op_view, &two, false, &x, 1, &out, 1),
                   "one size may be -1");
    ms_tensor *none = tensor_of(engine, MS_F32, DIMS(0, 3), NULL);
    ms_attributes empty = shape_of(3, SHAPE(3, 0, 7));
    check_view(&ms_op_view, &empty, none, DIMS(3, 0, 7), true);
    ms_tensor *scalar = tensor_of(engine, MS_F32, 0, NULL, (double[]){ 4 });
    ms_attributes ones = shape_of(2, SHAPE(1, 1)), plain = { .shape = { .dims = 0 } };
    check_view(&ms_op_view, &ones, scalar, DIMS(1, 1), true);
    check_view(&ms_op_view, &plain, scalar, 0, NULL, true);
    check_view(&ms_op_contiguous, NULL, x, DIMS(4, 6), true);
    check_view(&ms_op_contiguous, NULL, turned, DIMS(6, 4), false);
    ms_tensor *all[] = { x, turned, part, none, scalar };
    release_all(all, COUNT(all));
}

static void test_slices_and_turns(void **state)
{
    (void)state;
    double ramp[24];
    for (int i = 0; i < 24; i++) ramp[i] = i;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 3, 4), ramp);
    const struct {
        const ms_op *op;
        ms_attributes attributes;
        uint32_t dims;
        int64_t shape[5];
        double first, last;
    } cases[] = {
        { &ms_op_narrow, { .dim = { .a = -1, .start = 1, .length = 2 } }, 3, { 2, 3, 2 }, 1, 22 },
        { &ms_op_narrow, { .dim = { .a = 0, .start = 1, .length = 1 } }, 3, { 1, 3, 4 }, 12, 23 },
        { &ms_op_select, { .dim = { .a = 1, .start = 2 } }, 2, { 2, 4 }, 8, 23 },
        { &ms_op_transpose, { .dim = { .a = 0, .b = -1 } }, 3, { 4, 3, 2 }, 0, 23 },
        { &ms_op_permute, { .shape = { .dims = 3, .sizes = { 2, 0, 1 } } }, 3, { 4, 2, 3 }, 0, 23 },
        { &ms_op_unsqueeze, { .dim = { .a = -1 } }, 4, { 2, 3, 4, 1 }, 0, 23 },
        { &ms_op_expand,
          { .shape = { .dims = 4, .sizes = { 5, 2, -1, 4 } } },
          4,
          { 5, 2, 3, 4 },
          0,
          23 },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        ms_tensor *y = apply(engine, cases[i].op, &cases[i].attributes, &x, 1);
        assert_true(
            ms_shape_equal(ms_tensor_dims(y), ms_tensor_shape(y), cases[i].dims, cases[i].shape));
        assert_ptr_equal(ms_tensor_storage(y), ms_tensor_storage(x));
        double *got = tensor_get(y);
        for (int64_t k = 0; k < ms_tensor_count(y); k++)
            assert_near(got[k], at(y, k, ramp), 0, cases[i].op->name, (size_t)k);
        assert_true(got[0] == cases[i].first && got[ms_tensor_count(y) - 1] == cases[i].last);
        free(got);
        ms_tensor_release(y);
        check_gradients(
            engine,
            (gradcheck){ .op = cases[i].op, .attributes = cases[i].attributes, .inputs = 1 }, &x);
    }
    ms_tensor *row = tensor_of(engine, MS_F32, DIMS(3, 1), NULL);
    check_gradients(
        engine,
        (gradcheck){ .op = &ms_op_expand, .attributes = shape_of(3, SHAPE(2, 3, 4)), .inputs = 1 },
        &row);
    check_gradients(
        engine,
        (gradcheck){ .op = &ms_op_squeeze, .attributes = { .dim = { .a = 1 } }, .inputs = 1 },
        &row);
    ms_tensor *out = NULL;
    ms_attributes far = { .dim = { .a = 1, .start = 2, .length = 2 } }, no = { .dim = { .a = 3 } },
                  twice = shape_of(3, SHAPE(0, 0, 1)), wide = shape_of(3, SHAPE(2, 3, 5));
    assert_refused(engine, ms_op_apply(engine, &ms_op_narrow, &far, false, &x, 1, &out, 1),
                   "2 elements from number 3 on do not lie in dimension 2 of size 3");
    assert_refused(engine, ms_op_apply(engine, &ms_op_select, &no, false, &x, 1, &out, 1),
                   "there is no dimension 4");
    assert_refused(engine, ms_op_apply(engine, &ms_op_permute, &twice, false, &x, 1, &out, 1),
                   "each of its dimensions once");
    assert_refused(engine, ms_op_apply(engine, &ms_op_expand, &wide, false, &x, 1, &out, 1),
                   "cannot become 5");
    far.dim.a = 0;
    assert_refused(engine, ms_op_apply(engine, &ms_op_squeeze, &far, false, &x, 1, &out, 1),
                   "only a size of 1");
    ms_tensor_release(x);
    ms_tensor_release(row);
}

/* Parts of a split, and their gradients, also where one part gets none. */
static void test_split(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 6), NULL), *parts[3], *result = NULL;
    int64_t sizes[] = { 1, 3, 2 }, wrong[] = { 1, 3, 3 };
    ms_attributes split = { .split = { .sizes = sizes, .count = 3, .dim = -1 } },
                  bad = { .split = { .sizes = wrong, .count = 3, .dim = 1 } };
    check_gradients(
        engine, (gradcheck){ .op = &ms_op_split, .attributes = split, .inputs = 1, .outputs = 3 },
        &x);
    assert_refused(engine, ms_op_apply(engine, &ms_op_split, &bad, false, &x, 1, parts, 3),
                   "add up to 7");
    ms_tensor *g = tensor_of(engine, MS_F32, DIMS(2, 3), (double[]){ 1, 2, 3, 4, 5, 6 });
    ms_tensor_info in = { MS_F32, 2, { 2, 6 } }, out[3] = { { MS_F32, 2, { 2, 1 } },
                                                            { MS_F32, 2, { 2, 3 } },
                                                            { MS_F32, 2, { 2, 2 } } };
    bool needs = true;
    ms_op_gradient gradient = { .engine = engine,
                                .op = &ms_op_split,
                                .attributes = split,
                                .inputs = &in,
                                .input_count = 1,
                                .outputs = out,
                                .output_count = 3,
                                .gradients = OPERANDS(NULL, g, NULL),
                                .results = &result,
                                .needs = &needs };
    assert_ok(engine, ms_op_split.backward(&gradient));
    assert_values(result, (double[]){ 0, 1, 2, 3, 0, 0, 0, 4, 5, 6, 0, 0 }, 12, 0,
                  "split backward");
    ms_tensor *all[] = { x, g, result };
    release_all(all, 3);
}

static void test_gradients_of_copies(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 3), NULL),
              *row = tensor_of(engine, MS_F32, DIMS(3), NULL),
              *one = tensor_of(engine, MS_F32, 0, NULL, NULL);
    ms_tensor *turned = window_of(x, DIMS(3, 2), SHAPE(1, 3), 0), *result = NULL;
    check_gradients(engine, (gradcheck){ .op = &ms_op_clone, .inputs = 1 }, &turned);
    check_gradients(engine, (gradcheck){ .op = &ms_op_contiguous, .inputs = 1 }, &turned);
    check_gradients(engine, (gradcheck){ .op = &ms_op_copy, .inputs = 2, .in_place = true },
                    OPERANDS(x, row));
    check_gradients(engine, (gradcheck){ .op = &ms_op_fill, .inputs = 2, .in_place = true },
                    OPERANDS(x, one));
    gradcheck cast = { .op = &ms_op_cast,
                       .attributes = { .cast = { .dtype = MS_BF16 } },
                       .inputs = 1 };
    gradcheck_backward(engine, &cast, &x, &result);
    assert_values(result, (double[]){ 0.5, 1.24, 1.98, 0.87, 1.61, 0.5 }, 6, 4e-3, "cast");
    ms_tensor *all[] = { x, row, one, turned, result };
    release_all(all, COUNT(all));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clones_of_every_layout),
        cmocka_unit_test(test_casts_between_all_dtypes),
        cmocka_unit_test(test_casts_round_to_even_and_define_what_does_not_fit),
        cmocka_unit_test(test_copy_and_fill_in_place),
        cmocka_unit_test(test_copy_onto_itself),
        cmocka_unit_test(test_cat_and_stack),
        cmocka_unit_test(test_view_and_reshape),
        cmocka_unit_test(test_slices_and_turns),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_gradients_of_copies),
    };
    return cmocka_run_group_tests_name("copy_view", tests, setup, teardown);
}
