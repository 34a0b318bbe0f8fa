/* select.c: gather, index_select, scatter, scatter_add, topk, above: values, strides, order of
 * equal ones, errors on the stream, gradients. ctest: each-isa poisoned late cuda */
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

static ms_attributes along(int32_t dim) { return (ms_attributes){ .index = { .dim = dim } }; }

/* ------------------------------------------------------------------- values */

static void test_gather_along_every_dimension(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_I64, MS_U8 },
                          index_dtypes[] = { MS_I64, MS_I32, MS_U16 };
    double ramp[60];
    for (int i = 0; i < 60; i++) ramp[i] = i;
    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (int32_t dim = 0; dim < 3; dim++) {
            ms_tensor *base = tensor_of(engine, dtypes[t], DIMS(60), ramp);
            ms_tensor *layouts[] = { window_of(base, DIMS(3, 4, 5), SHAPE(20, 5, 1), 0),
                                     window_of(base, DIMS(3, 4, 5), SHAPE(1, 3, 12), 0),
                                     window_of(base, DIMS(3, 4, 5), SHAPE(20, 4, 1), 2) };
            int64_t shape[] = { 3, 4, 5 };
            double index[60];
            shape[dim] = 2;
            for (int i = 0; i < 60; i++) index[i] = (i * 7 + 2) % (dim + 3);
            ms_attributes attributes = along(dim - 3);
            for (size_t l = 0; l < COUNT(layouts); l++) {
                ms_tensor *at = tensor_of(engine, index_dtypes[l], 3, shape, index),
                          *y = apply(engine, &ms_op_gather, &attributes, OPERANDS(layouts[l], at),
                                     2);
                double *x = tensor_get(layouts[l]), *got = tensor_get(y);
                for (int64_t i = 0; i < ms_tensor_count(y); i++) {
                    int64_t place[3] = { i / (shape[1] * shape[2]), i / shape[2] % shape[1],
                                         i % shape[2] };
                    place[dim] = (int64_t)index[i];
                    assert_near(got[i], x[place[0] * 20 + place[1] * 5 + place[2]], 0, "gather",
                                (size_t)i);
                }
                free(x);
                free(got);
                ms_tensor_release(at);
                ms_tensor_release(y);
            }
            release_all(layouts, 3);
            ms_tensor_release(base);
        }
}

static void test_index_select(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 3), (double[]){ 1, 2, 3, 4, 5, 6 }),
              *turned = window_of(x, DIMS(3, 2), SHAPE(1, 3), 0);
    ms_tensor *index = tensor_of(engine, MS_U16, DIMS(4), (double[]){ 2, 0, 2, 1 }),
              *none = tensor_of(engine, MS_I64, DIMS(0), NULL);
    ms_attributes last = along(1), first = along(0);
    ms_tensor *a = apply(engine, &ms_op_index_select, &last, OPERANDS(x, index), 2),
              *b = apply(engine, &ms_op_index_select, &first, OPERANDS(turned, index), 2);
    ms_tensor *c = apply(engine, &ms_op_index_select, &first, OPERANDS(x, none), 2);
    assert_values(a, (double[]){ 3, 1, 3, 2, 6, 4, 6, 5 }, 8, 0, "columns");
    assert_values(b, (double[]){ 3, 6, 1, 4, 3, 6, 2, 5 }, 8, 0, "rows");
    assert_int_equal(ms_tensor_shape(c)[0], 0);
    ms_tensor *all[] = { x, turned, index, none, a, b, c };
    release_all(all, COUNT(all));
}

static void test_scatter_and_scatter_add(void **state)
{
    (void)state;
    const struct {
        ms_dtype dtype;
        double tolerance;
    } types[] = {
        { MS_F32, 1e-6 }, { MS_BF16, 8e-3 }, { MS_F16, 1e-3 }, { MS_I64, 0 }, { MS_U8, 0 }
    };
    for (size_t t = 0; t < COUNT(types); t++) {
        ms_tensor *x =
                      tensor_of(engine, types[t].dtype, DIMS(2, 3), (double[]){ 1, 2, 3, 4, 5, 6 }),
                  *index = tensor_of(engine, MS_I64, DIMS(2, 2), (double[]){ 2, 0, 1, 1 });
        ms_tensor *values =
                      tensor_of(engine, types[t].dtype, DIMS(2, 2), (double[]){ 10, 20, 30, 40 }),
                  *number = tensor_of(engine, types[t].dtype, 0, NULL, (double[]){ 7 }),
                  *same = NULL;
        ms_attributes last = along(-1);
        ms_tensor *a = apply(engine, &ms_op_scatter, &last, OPERANDS(x, index, values), 3),
                  *b = apply(engine, &ms_op_scatter_add, &last, OPERANDS(x, index, values), 3);
        ms_tensor *c = apply(engine, &ms_op_scatter, &last, OPERANDS(x, index, number), 3);
        assert_values(a, (double[]){ 20, 2, 10, 4, 40, 6 }, 6, 0,
                      "scatter: the last of equal indices stays");
        assert_values(b, (double[]){ 21, 2, 13, 4, 75, 6 }, 6, types[t].tolerance, "scatter_add");
        assert_values(c, (double[]){ 7, 2, 7, 4, 7, 6 }, 6, 0, "scatter of a number");
        assert_values(x, (double[]){ 1, 2, 3, 4, 5, 6 }, 6, 0, "the first tensor stays");
        ms_tensor *turned = window_of(x, DIMS(3, 2), SHAPE(1, 3), 0),
                  *down = tensor_of(engine, MS_I32, DIMS(1, 2), (double[]){ 1, 2 });
        ms_tensor *two = tensor_of(engine, types[t].dtype, DIMS(1, 2), (double[]){ 50, 60 });
        ms_attributes first = along(0);
        assert_ok(engine, ms_op_apply(engine, &ms_op_scatter_add, &first, true,
                                      OPERANDS(turned, down, two), 3, &same, 1));
        assert_ptr_equal(same, turned);
        assert_values(x, (double[]){ 1, 52, 3, 4, 5, 66 }, 6, types[t].tolerance,
                      "in place, through a transposed view");
        ms_tensor *all[] = { x, index, values, number, same, a, b, c, turned, down, two };
        release_all(all, COUNT(all));
    }
}

/* Equal indices add in order of position: in f32 this order is visible, and must be the same on any
 * number of threads. */
static void test_scatter_add_keeps_the_order_of_positions(void **state)
{
    (void)state;
    for (uint32_t threads = 1; threads <= 3; threads++) {
        ms_engine *own = engine_with(threads, NULL);
        const int64_t n = 200000;
        double *values = malloc((size_t)n * 2 * sizeof *values),
               *index = calloc((size_t)n * 2, sizeof *index);
        float sums[2] = { 0, 0 }, got[2];
        for (int64_t i = 0; i < 2 * n; i++) {
            values[i] = (double)(float)(1.0 / (double)(i % 977 + 1));
            sums[i % 2] += (float)values[i];
        }
        ms_tensor *x = tensor_of(own, MS_F32, DIMS(1, 2), (double[]){ 0, 0 }),
                  *v = tensor_of(own, MS_F32, DIMS(n, 2), values),
                  *at = tensor_of(own, MS_I64, DIMS(n, 2), index);
        ms_attributes first = along(0);
        ms_tensor *y = apply(own, &ms_op_scatter_add, &first, OPERANDS(x, at, v), 3);
        assert_ok(own, ms_tensor_read(y, got, sizeof got));
        assert_memory_equal(got, sums, sizeof got);
        ms_tensor *all[] = { x, v, at, y };
        release_all(all, 4);
        ms_engine_free(own);
        free(values);
        free(index);
    }
}

/* Many indices, of which most repeat: the same bits as from adding one after another. */
static void test_scatter_at_many_indices(void **state)
{
    (void)state;
    enum { N = 700, K = 3000, COLUMNS = 3 };
    float *values = malloc(sizeof *values * K * COLUMNS), *sums = calloc(N * COLUMNS, sizeof *sums),
          *last = calloc(N * COLUMNS, sizeof *last), *got = malloc(sizeof *got * N * COLUMNS);
    int32_t *index = malloc(sizeof *index * K * COLUMNS);
    for (int i = 0; i < K * COLUMNS; i++) {
        int at = (i * 7919 % 104729) % N;
        index[i] = at;
        values[i] = 1.0f / (float)(i % 977 + 1);
        sums[at * COLUMNS + i % COLUMNS] += values[i];
        last[at * COLUMNS + i % COLUMNS] = values[i];
    }
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(N, COLUMNS), NULL),
              *v = tensor_of(engine, MS_F32, DIMS(K, COLUMNS), NULL),
              *at = tensor_of(engine, MS_I32, DIMS(K, COLUMNS), NULL);
    memset(got, 0, sizeof *got * N * COLUMNS);
    assert_ok(engine, ms_tensor_write(x, got, ms_tensor_bytes(x)));
    assert_ok(engine, ms_tensor_write(v, values, ms_tensor_bytes(v)));
    assert_ok(engine, ms_tensor_write(at, index, ms_tensor_bytes(at)));
    ms_attributes first = along(0);
    ms_tensor *added = apply(engine, &ms_op_scatter_add, &first, OPERANDS(x, at, v), 3),
              *placed = apply(engine, &ms_op_scatter, &first, OPERANDS(x, at, v), 3);
    assert_ok(engine, ms_tensor_read(added, got, ms_tensor_bytes(added)));
    assert_memory_equal(got, sums, sizeof *got * N * COLUMNS);
    assert_ok(engine, ms_tensor_read(placed, got, ms_tensor_bytes(placed)));
    assert_memory_equal(got, last, sizeof *got * N * COLUMNS);
    ms_tensor *all[] = { x, v, at, added, placed };
    release_all(all, COUNT(all));
    free(values);
    free(sums);
    free(last);
    free(got);
    free(index);
}

/* Rows that are whole pieces of 16 bytes, and rows that begin inside of one. */
static void test_index_select_of_wide_rows(void **state)
{
    (void)state;
    double ramp[50 * 72 + 1], want[7 * 64], index[7] = { 3, 49, 0, 3, 20, 48, 7 };
    for (int i = 0; i <= 50 * 72; i++) ramp[i] = i % 251;
    ms_tensor *base = tensor_of(engine, MS_BF16, DIMS(50 * 72 + 1), ramp),
              *at = tensor_of(engine, MS_I64, DIMS(7), index);
    for (int64_t begin = 0; begin < 2; begin++) {
        ms_tensor *x = window_of(base, DIMS(50, 64), SHAPE(72, 1), begin);
        ms_attributes first = along(0);
        ms_tensor *y = apply(engine, &ms_op_index_select, &first, OPERANDS(x, at), 2);
        for (int i = 0; i < 7 * 64; i++)
            want[i] = ramp[begin + (int64_t)index[i / 64] * 72 + i % 64];
        assert_values(y, want, 7 * 64, 0, "wide rows");
        ms_tensor_release(x);
        ms_tensor_release(y);
    }
    ms_tensor_release(base);
    ms_tensor_release(at);
}

static void test_topk(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 5),
                             (double[]){ 3, -1, 3, 0, 7, NAN, -INFINITY, 2, INFINITY, 2 }),
              *out[2];
    const struct {
        bool largest;
        double values[6], indices[6];
    } cases[] = { { true, { 7, 3, 3, NAN, INFINITY, 2 }, { 4, 0, 2, 0, 3, 2 } },
                  { false, { -1, 0, 3, -INFINITY, 2, 2 }, { 1, 3, 0, 1, 2, 4 } } };
    for (size_t i = 0; i < COUNT(cases); i++) {
        ms_attributes top = { .top = { .k = 3, .dim = -1, .largest = cases[i].largest } };
        assert_ok(engine, ms_op_apply(engine, &ms_op_topk, &top, false, &x, 1, out, 2));
        assert_values(out[0], cases[i].values, 6, 0, "values");
        assert_values(out[1], cases[i].indices, 6, 0, "indices");
        release_all(out, 2);
    }
    ms_tensor_release(x);
    /* Any k, several dtypes, along a strided dimension, against sorting by counting. */
    static const ms_dtype dtypes[] = { MS_F32, MS_F16, MS_I64, MS_U8 };
    for (size_t t = 0; t < COUNT(dtypes); t++)
        for (int64_t k = 0; k <= 257; k += k < 3 ? 1 : 127) {
            double values[257 * 3];
            for (int i = 0; i < 257 * 3; i++) values[i] = (i * 91) % 61;
            x = tensor_of(engine, dtypes[t], DIMS(257, 3), values);
            ms_attributes top = { .top = { .k = k, .dim = 0, .largest = true } };
            assert_ok(engine, ms_op_apply(engine, &ms_op_topk, &top, false, &x, 1, out, 2));
            double *got = tensor_get(out[0]), *indices = tensor_get(out[1]);
            for (int64_t i = 0; i < 257 * 3; i++) {
                int64_t before = 0;
                for (int64_t j = i % 3; j < 257 * 3; j += 3)
                    before += values[j] > values[i] || (values[j] == values[i] && j < i);
                if (before >= k) continue;
                assert_true(got[before * 3 + i % 3] == values[i]);
                assert_true(indices[before * 3 + i % 3] == (double)(i / 3));
            }
            free(got);
            free(indices);
            release_all(out, 2);
            ms_tensor_release(x);
        }
}

/* Long rows, with many equal keys: the results are in order, and just k - 1 elements are better
 * than the last of them. */
static void check_long_topk(ms_dtype dtype, int64_t rows, int64_t n, int64_t k, bool largest)
{
    double *values = malloc(sizeof *values * (size_t)(n * rows));
    for (int64_t i = 0; i < n * rows; i++) values[i] = (double)(i * 91 % 613) - 300;
    if (dtype == MS_F32) values[n + 17] = NAN;
    ms_tensor *x = tensor_of(engine, dtype, DIMS(rows, n), values), *out[2];
    ms_attributes top = { .top = { .k = k, .dim = 1, .largest = largest } };
    assert_ok(engine, ms_op_apply(engine, &ms_op_topk, &top, false, &x, 1, out, 2));
    double *sorted = tensor_get(out[0]), *indices = tensor_get(out[1]), *in = tensor_get(x);
    for (int64_t row = 0; row < rows; row++) {
        double last[2] = { 0, 0 };
        int64_t better = 0;
        for (int64_t i = 0; i < k; i++) {
            double position = indices[row * k + i], value = in[row * n + (int64_t)position];
            double key = isnan(value) ? 1e9 : value;
            if (!largest) key = -key;
            assert_near(sorted[row * k + i], value, 0, "value", (size_t)i);
            assert_true(i == 0 || key < last[0] || (key == last[0] && position > last[1]));
            last[0] = key;
            last[1] = position;
        }
        for (int64_t i = 0; i < n; i++) {
            double key = isnan(in[row * n + i]) ? 1e9 : in[row * n + i];
            if (!largest) key = -key;
            better += key > last[0] || (key == last[0] && (double)i < last[1]);
        }
        assert_int_equal(better, k - 1);
    }
    free(values);
    free(sorted);
    free(indices);
    free(in);
    release_all(out, 2);
    ms_tensor_release(x);
}
static void test_topk_of_long_rows(void **state)
{
    (void)state;
    static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_I64, MS_I32 };
    for (size_t t = 0; t < COUNT(dtypes); t++) {
        check_long_topk(dtypes[t], 2, 5000, 1, true);
        check_long_topk(dtypes[t], 2, 5000, 40, t % 2 == 0);
        check_long_topk(dtypes[t], 2, 5000, 2500, t % 2 != 0);
    }
    check_long_topk(MS_F32, 600, 2100, 3, true);
}

static void test_above(void **state)
{
    (void)state;
    const int64_t n = 300000;
    double *values = malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = i % 1000 == 7 ? -2 - (double)(i % 7) : 1;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(n), values),
              *threshold = tensor_of(engine, MS_F32, DIMS(1), (double[]){ 1 }), *out[3];
    for (int64_t capacity = 250; capacity <= 350; capacity += 100) {
        ms_attributes room = { .dim = { .length = capacity } };
        assert_ok(engine, ms_op_apply(engine, &ms_op_above, &room, false, OPERANDS(x, threshold), 2,
                                      out, 3));
        double *got = tensor_get(out[0]), *indices = tensor_get(out[1]),
               *count = tensor_get(out[2]);
        assert_true(count[0] == (capacity < 300 ? capacity : 300));
        for (int64_t i = 0; i < capacity; i++) {
            assert_true(indices[i] == (i < 300 ? (double)(i * 1000 + 7) : 0));
            assert_true(got[i] == (i < 300 ? values[i * 1000 + 7] : 0));
        }
        free(got);
        free(indices);
        free(count);
        release_all(out, 3);
    }
    ms_tensor_release(x);
    ms_tensor_release(threshold);
    free(values);
}

/* ------------------------------------------------------------------- errors */

/* The host does not know the values of an index tensor, so the stream reports a bad index, with
 * operator, index and limit. */
static void test_an_index_outside_is_the_streams_error(void **state)
{
    (void)state;
    const struct {
        const ms_op *op;
        uint32_t inputs;
        double bad;
        const char *text;
    } cases[] = {
        { &ms_op_gather, 2, 57, "gather: index 57 outside 0..2" },
        { &ms_op_index_select, 2, -1, "index_select: index -1 outside 0..2" },
        { &ms_op_scatter, 3, 3, "scatter: index 3 outside 0..2" },
        { &ms_op_scatter_add, 3, -9, "scatter_add: index -9 outside 0..2" },
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        ms_engine *own = engine_with(2, NULL);
        ms_tensor *x = tensor_of(own, MS_F32, DIMS(3), NULL),
                  *index = tensor_of(own, MS_I64, DIMS(2), (double[]){ 1, cases[i].bad }),
                  *v = tensor_of(own, MS_F32, DIMS(2), NULL);
        ms_attributes first = along(0);
        ms_tensor *y = apply(own, cases[i].op, &first, OPERANDS(x, index, v), cases[i].inputs);
        assert_int_not_equal(ms_engine_sync(own), MS_OK);
        if (strstr(ms_engine_error(own)->message, cases[i].text) == NULL)
            fail_msg("\"%s\" does not say \"%s\"", ms_engine_error(own)->message, cases[i].text);
        ms_tensor *all[] = { x, index, v, y };
        release_all(all, 4);
        ms_engine_free(own);
    }
}

static void test_mistakes_are_named(void **state)
{
    (void)state;
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(2, 3), NULL),
              *f = tensor_of(engine, MS_F32, DIMS(2, 1), NULL),
              *i = tensor_of(engine, MS_I64, DIMS(3, 1), (double[]){ 0, 0, 0 }), *out[3];
    ms_tensor *h = tensor_of(engine, MS_F16, DIMS(2, 1), NULL),
              *ok = tensor_of(engine, MS_I64, DIMS(2, 1), (double[]){ 0, 0 });
    ms_attributes last = along(1), far = along(2), top = { .top = { .k = 4, .dim = 1 } },
                  room = { .dim = { .length = 3 } };
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_gather, &last, false, OPERANDS(x, f), 2, out, 1),
                   "i64, i32 or u16");
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_gather, &last, false, OPERANDS(x, i), 2, out, 1),
                   "in all dimensions but 2");
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_gather, &far, false, OPERANDS(x, i), 2, out, 1),
                   "there is no dimension 3");
    assert_refused(
        engine, ms_op_apply(engine, &ms_op_index_select, &last, false, OPERANDS(x, i), 2, out, 1),
        "must be 1-D");
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_scatter, &last, false, OPERANDS(x, ok, h), 3, out, 1),
                   "another dtype");
    assert_refused(engine,
                   ms_op_apply(engine, &ms_op_scatter, &last, false, OPERANDS(x, ok, x), 3, out, 1),
                   "shape of the index");
    assert_refused(engine, ms_op_apply(engine, &ms_op_topk, &top, false, &x, 1, out, 2), "k is 4");
    assert_refused(
        engine, ms_op_apply(engine, &ms_op_above, &room, false, OPERANDS(x, f), 2, out, 3), "1-D");
    ms_tensor *all[] = { x, f, i, h, ok };
    release_all(all, COUNT(all));
}

/* ---------------------------------------------------------------- gradients */

static void test_gradients(void **state)
{
    (void)state;
    double apart[24];
    for (int i = 0; i < 24; i++) apart[i] = ((i * 7) % 24 + 1) * (i % 2 ? 0.1 : -0.1);
    ms_tensor *x = tensor_of(engine, MS_F32, DIMS(4, 3, 2), apart),
              *turned = window_of(x, DIMS(2, 4, 3), SHAPE(1, 6, 2), 0);
    /* repeats */
    ms_tensor *index = tensor_of(engine, MS_I64, DIMS(4, 2, 2),
                                 (double[]){ 0, 0, 0, 1, 2, 1, 2, 2, 1, 0, 2, 1, 0, 2, 0, 2 });
    ms_tensor *distinct = tensor_of(engine, MS_I32, DIMS(4, 2, 2),
                                    (double[]){ 0, 0, 1, 1, 2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1, 0 });
    ms_tensor *values = tensor_of(engine, MS_F32, DIMS(4, 2, 2), NULL),
              *number = tensor_of(engine, MS_F32, DIMS(1), NULL),
              *list = tensor_of(engine, MS_U16, DIMS(5), (double[]){ 1, 0, 1, 1, 0 });
    check_gradients(engine, (gradcheck){ .op = &ms_op_gather, .attributes = along(1), .inputs = 2 },
                    OPERANDS(x, index));
    check_gradients(engine,
                    (gradcheck){ .op = &ms_op_index_select, .attributes = along(-1), .inputs = 2 },
                    OPERANDS(x, list));
    check_gradients(engine,
                    (gradcheck){ .op = &ms_op_index_select, .attributes = along(0), .inputs = 2 },
                    OPERANDS(turned, list));
    check_gradients(engine,
                    (gradcheck){ .op = &ms_op_scatter, .attributes = along(1), .inputs = 3 },
                    OPERANDS(x, distinct, values));
    check_gradients(
        engine,
        (gradcheck){ .op = &ms_op_scatter, .attributes = along(1), .inputs = 3, .in_place = true },
        OPERANDS(x, distinct, number));
    check_gradients(engine,
                    (gradcheck){ .op = &ms_op_scatter_add, .attributes = along(1), .inputs = 3 },
                    OPERANDS(x, index, values));
    check_gradients(
        engine,
        (gradcheck){
            .op = &ms_op_scatter_add, .attributes = along(1), .inputs = 3, .in_place = true },
        OPERANDS(x, index, values));
    for (int32_t dim = 0; dim < 3; dim++)
        check_gradients(
            engine,
            (gradcheck){ .op = &ms_op_topk,
                         .attributes = { .top = { .k = 2, .dim = dim, .largest = true } },
                         .inputs = 1,
                         .outputs = 2 },
            &turned);
    ms_tensor *all[] = { x, turned, index, distinct, values, number, list };
    release_all(all, COUNT(all));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather_along_every_dimension),
        cmocka_unit_test(test_index_select),
        cmocka_unit_test(test_scatter_and_scatter_add),
        cmocka_unit_test(test_scatter_add_keeps_the_order_of_positions),
        cmocka_unit_test(test_scatter_at_many_indices),
        cmocka_unit_test(test_index_select_of_wide_rows),
        cmocka_unit_test(test_topk),
        cmocka_unit_test(test_topk_of_long_rows),
        cmocka_unit_test(test_above),
        cmocka_unit_test(test_an_index_outside_is_the_streams_error),
        cmocka_unit_test(test_mistakes_are_named),
        cmocka_unit_test(test_gradients),
    };
    return cmocka_run_group_tests_name("select", tests, setup, teardown);
}
