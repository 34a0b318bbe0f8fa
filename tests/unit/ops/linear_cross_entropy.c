/* linear_cross_entropy.c: a linear layer and its loss in chunks of rows, against f64 and against
 * the two operators. ctest: each-isa poisoned late cuda */
#include "reference.h"
#include "moonshard/grad.h"
#include "ops/values.h"

static void reference(const check *c)
{
    const operand *x = &c->in[0], *w = &c->in[1];
    size_t in = (size_t)w->shape[1], classes = (size_t)w->shape[0], rows = count_of(&c->in[2]);
    double *logits = malloc(classes * sizeof *logits), sum = 0, counted = 0;
    for (size_t row = 0; row < rows; row++) {
        double most = -1e300, total = 0;
        int64_t target = (int64_t)c->in[2].values[row];
        if (target == c->attributes.loss.ignore_index) continue;
        for (size_t k = 0; k < classes; k++) {
            logits[k] = 0;
            for (size_t i = 0; i < in; i++)
                logits[k] += x->values[row * in + i] * w->values[k * in + i];
            most = fmax(most, logits[k]);
        }
        for (size_t k = 0; k < classes; k++) total += exp(logits[k] - most);
        sum += most + log(total) - logits[target];
        counted++;
    }
    free(logits);
    c->out[0].values[0] = c->attributes.loss.reduction == MS_REDUCE_MEAN ? sum / counted : sum;
}

/* 2 * rows rows. chunk 0: as the operator chooses, which is one for these sizes. */
static check head_of(ms_dtype dtype, int64_t rows, int64_t in, int64_t classes, int64_t chunk)
{
    return (check){ .op = &ms_op_linear_cross_entropy,
                    .attributes.loss = { .ignore_index = -100, .chunk = chunk },
                    .ins = 3,
                    .outs = 1,
                    .reference = reference,
                    .in = { { .dtype = dtype, .dims = 3, .shape = { 2, rows, in } },
                            { .dtype = dtype, .dims = 2, .shape = { classes, in } },
                            { .dtype = MS_I64,
                              .dims = 2,
                              .shape = { 2, rows },
                              .low = 0,
                              .high = (double)classes } },
                    .out = { { .dtype = MS_F32 } } };
}

/* Chunks that divide the rows and ones that do not, of one row, of more rows than there are; parts
 * of products, rows of several threads. */
static void test_chunks(void **state)
{
    (void)state;
    const int64_t chunks[] = { 0, 1, 3, 4, 5, 8, 1000 };
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++)
        for (ms_reduction reduction = MS_REDUCE_MEAN; reduction <= MS_REDUCE_SUM; reduction++) {
            check c = head_of(MS_F32, 4, 10, 7, chunks[i]);
            c.attributes.loss.reduction = reduction;
            c.in[2].dtype = i % 2 ? MS_I32 : MS_U16;
            run_check(&c);
        }
    check wide = head_of(MS_F32, 3, 24, 1504, 4), wider = head_of(MS_F32, 2, 5, 8203, 3),
          tall = head_of(MS_F32, 90, 33, 70, 64);
    run_check(&wide);
    run_check(&wider);
    run_check(&tall);
}

static void test_layouts_and_ignored_rows(void **state)
{
    (void)state;
    for (int layout = PLAIN; layout <= SPREAD; layout++)
        for (int of = 0; of < 3; of++) {
            check c = head_of(MS_F32, 5, 9, 6, 4);
            c.in[of].layout = layout;
            c.attributes.loss.ignore_index = of;
            run_check(&c);
        }
    /* Rows of x that are one row of memory: an expanded tensor. One row, no leading dimension. */
    check one = head_of(MS_F32, 1, 9, 6, 0);
    one.in[0] = (operand){ .dtype = MS_F32, .dims = 1, .shape = { 9 } };
    one.in[2] = (operand){ .dtype = MS_I64, .dims = 0, .low = 0, .high = 6 };
    run_check(&one);
}

/* Logits of 16 bits are rounded to 2^-9 (bf16) or 2^-11 (f16) of themselves and so are slopes, of
 * which gradients are sums. */
static void test_half_and_autocast(void **state)
{
    (void)state;
    for (ms_dtype dtype = MS_F16; dtype <= MS_BF16; dtype++)
        for (int64_t chunk = 0; chunk <= 3; chunk += 3) {
            double tolerance = dtype == MS_BF16 ? 2e-2 : 3e-3;
            check half = head_of(dtype, 4, 16, 40, chunk);
            half.tolerance = tolerance;
            run_check(&half);
            check cast = head_of(MS_F32, 4, 16, 40, chunk),
                  mixed = head_of(MS_F32, 4, 24, 33, chunk);
            cast.autocast = mixed.autocast = dtype;
            cast.tolerance = mixed.tolerance = tolerance;
            mixed.in[0].dtype = dtype;
            run_check(&cast);
            run_check(&mixed);
        }
}

/* An input that needs no gradient gets none, and the other one the same. */
static void test_frozen(void **state)
{
    (void)state;
    for (int frozen = 0; frozen < 2; frozen++) {
        check c = head_of(MS_F32, 4, 10, 7, 3);
        c.in[frozen].constant = true;
        run_check(&c);
    }
}

/* In f16 a slope is 1 / (8000 128) of each class that is not the target, in rows of zeros: 16.4 of
 * the least numbers of f16. Rounding it to 16 of them would change dw by 2%. As slopes have a
 * factor until the gradient of a scaled loss arrives, it is not rounded so. */
static void test_f16_keeps_small_slopes(void **state)
{
    (void)state;
    enum { ROWS = 64, IN = 8, CLASSES = 8000 };
    for (int halves = 0; halves < 2; halves++) {
        check c = head_of(halves ? MS_F16 : MS_F32, ROWS, IN, CLASSES, halves ? 0 : 100);
        c.autocast = MS_F16;
        c.in[0].low = 0.5;
        c.in[0].high = 1;
        uint64_t numbers = 0;
        for (int i = 0; i < 3; i++) fill(&c.in[i], &numbers);
        memset(c.in[1].values, 0, (size_t)CLASSES * IN * sizeof(double));
        double scale = 65536, loss = 0, most = 0;
        operand incoming = { .dtype = MS_F32, .values = &scale };
        answer a = { 0 };
        c.out[0].values = &loss;
        ms_engine *engine = engine_with(2, NULL);
        run_once(engine, &c, &incoming, true, &a);
        ms_engine_free(engine);
        bool *is_target = calloc(CLASSES, sizeof *is_target);
        for (int row = 0; row < 2 * ROWS; row++) is_target[(int)c.in[2].values[row]] = true;
        for (int i = 0; i < IN; i++) {
            double dw = 0;
            for (int row = 0; row < 2 * ROWS; row++)
                dw += c.in[0].values[row * IN + i] / CLASSES * scale / (2 * ROWS);
            for (int k = 0; k < CLASSES; k++)
                if (!is_target[k]) most = fmax(most, fabs(a.gradient[1][k * IN + i] / dw - 1));
        }
        /* The slope and dw are each rounded by 2^-11 at most. */
        if (!(most <= 1e-3)) fail_msg("relative error %.3g", most);
        free(is_target);
        answer_free(&a);
        for (int i = 0; i < 3; i++) free(c.in[i].values);
    }
}

/* ------------------------------------------------------ the two operators */

typedef struct run {
    float loss;
    void *dx, *dw;
} run;

/* Loss and gradients by the tape, in one operator or in two. */
static run run_on_tape(const check *c, bool apart, uint32_t threads)
{
    run r = { 0 };
    ms_engine *engine = engine_with(threads, c->cpu);
    ms_tensor *in[3], *logits = NULL, *loss = NULL;
    for (int i = 0; i < 3; i++) in[i] = tensor_of(engine, &c->in[i]);
    for (int i = 0; i < 2; i++) OK(ms_tensor_set_requires_grad(in[i], true));
    ms_engine_set_autocast(engine, c->autocast);
    if (apart) {
        OK(ms_apply(engine, &ms_op_linear, NULL, false, in, 2, &logits, 1));
        ms_tensor *both[] = { logits, in[2] };
        OK(ms_apply(engine, &ms_op_cross_entropy, &c->attributes, false, both, 2, &loss, 1));
        ms_tensor_release(logits);
    } else OK(ms_apply(engine, c->op, &c->attributes, false, in, 3, &loss, 1));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    OK(ms_tensor_read(loss, &r.loss, sizeof r.loss));
    void **gradients[] = { &r.dx, &r.dw };
    for (int i = 0; i < 2; i++) {
        size_t bytes = ms_tensor_bytes(in[i]);
        *gradients[i] = malloc(bytes);
        OK(ms_tensor_read(ms_tensor_grad(in[i]), *gradients[i], bytes));
    }
    for (int i = 0; i < 3; i++) ms_tensor_release(in[i]);
    ms_tensor_release(loss);
    ms_engine_free(engine);
    return r;
}

static void test_one_chunk_has_the_bits_of_two_operators(void **state)
{
    (void)state;
    const struct {
        ms_dtype x, w, autocast;
        int64_t rows, in, classes;
        int layout;
    } cases[] = {
        { MS_F32, MS_F32, MS_F32, 7, 12, 9, PLAIN },
        { MS_F32, MS_F32, MS_F32, 90, 40, 300, SWAPPED },
        { MS_F32, MS_F32, MS_F32, 3, 24, 1504, PLAIN },
        { MS_BF16, MS_BF16, MS_F32, 20, 16, 70, PLAIN },
        { MS_F32, MS_F32, MS_BF16, 20, 16, 70, PLAIN },
        { MS_BF16, MS_F32, MS_BF16, 64, 32, 128, PLAIN },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        check c = head_of(MS_F32, cases[i].rows, cases[i].in, cases[i].classes, 0);
        c.in[0].dtype = cases[i].x;
        c.in[1].dtype = cases[i].w;
        c.in[0].layout = cases[i].layout;
        c.autocast = cases[i].autocast;
        c.attributes.loss.ignore_index = 2;
        uint64_t numbers = 0;
        for (int k = 0; k < 3; k++) fill(&c.in[k], &numbers);
        run apart = run_on_tape(&c, true, 1), one = run_on_tape(&c, false, 2);
        assert_memory_equal(&one.loss, &apart.loss, sizeof one.loss);
        assert_memory_equal(one.dx, apart.dx, count_of(&c.in[0]) * ms_dtype_bytes(cases[i].x));
        assert_memory_equal(one.dw, apart.dw, count_of(&c.in[1]) * ms_dtype_bytes(cases[i].w));
        void *all[] = { apart.dx, apart.dw, one.dx, one.dw };
        for (int k = 0; k < 4; k++) free(all[k]);
        for (int k = 0; k < 3; k++) free(c.in[k].values);
    }
}

/* ------------------------------------------------------------ no rows at all */

static void test_no_row_counts(void **state)
{
    (void)state;
    for (int64_t rows = 0; rows <= 3; rows += 3)
        for (ms_reduction reduction = MS_REDUCE_MEAN; reduction <= MS_REDUCE_SUM; reduction++) {
            ms_engine *engine = engine_with(1, NULL);
            int64_t target[3] = { -100, -100, -100 };
            float ones[12], dx[12], dw[8], loss;
            for (int i = 0; i < 12; i++) ones[i] = 1;
            ms_tensor *in[3] = { TENSOR(engine, MS_F32, rows, 4), TENSOR(engine, MS_F32, 2, 4),
                                 TENSOR(engine, MS_I64, rows) },
                      *out = NULL;
            OK(ms_tensor_write(in[0], ones, (size_t)rows * 4 * sizeof *ones));
            OK(ms_tensor_write(in[1], ones, sizeof dw));
            OK(ms_tensor_write(in[2], target, (size_t)rows * sizeof *target));
            for (int i = 0; i < 2; i++) OK(ms_tensor_set_requires_grad(in[i], true));
            ms_attributes attributes = {
                .loss = { .ignore_index = -100, .chunk = 2, .reduction = (int32_t)reduction }
            };
            OK(ms_apply(engine, &ms_op_linear_cross_entropy, &attributes, false, in, 3, &out, 1));
            OK(ms_backward(engine, &out, NULL, 1, false));
            OK(ms_tensor_read(out, &loss, sizeof loss));
            assert_true(reduction == MS_REDUCE_MEAN ? isnan(loss) : loss == 0.0f);
            OK(ms_tensor_read(ms_tensor_grad(in[0]), dx, (size_t)rows * 4 * sizeof *dx));
            OK(ms_tensor_read(ms_tensor_grad(in[1]), dw, sizeof dw));
            for (int i = 0; i < rows * 4; i++) assert_true(dx[i] == 0.0f);
            for (int i = 0; i < 8; i++) assert_true(dw[i] == 0.0f);
            for (int i = 0; i < 3; i++) ms_tensor_release(in[i]);
            ms_tensor_release(out);
            ms_engine_free(engine);
        }
}

/* ------------------------------------------------------------------- memory */

/* Without a gradient a call takes the logits of a chunk and one number for each row; with gradients
 * these, too. Backward takes nothing where it may write over what forward has saved. */
static void test_memory(void **state)
{
    (void)state;
    enum { ROWS = 256, IN = 16, CLASSES = 1000, CHUNK = 32 };
    size_t logits = CHUNK * CLASSES * sizeof(float), dx = ROWS * IN * sizeof(float),
           dw = CLASSES * IN * sizeof(float), rest = 8192;
    for (int record = 0; record < 2; record++) {
        ms_engine *engine = engine_with(2, NULL);
        check c = head_of(MS_F32, ROWS / 2, IN, CLASSES, CHUNK);
        uint64_t numbers = 0;
        ms_tensor *in[3], *loss = NULL;
        for (int i = 0; i < 3; i++) {
            fill(&c.in[i], &numbers);
            in[i] = tensor_of(engine, &c.in[i]);
            free(c.in[i].values);
        }
        for (int i = 0; i < 2; i++) OK(ms_tensor_set_requires_grad(in[i], record));
        uint64_t before = ms_engine_memory(engine).live;
        ms_engine_reset_peak(engine);
        OK(ms_apply(engine, c.op, &c.attributes, false, in, 3, &loss, 1));
        uint64_t peak = ms_engine_memory(engine).peak - before;
        size_t wanted = logits + (record ? dx + dw : 0);
        if (peak < wanted || peak > wanted + rest)
            fail_msg("%llu bytes, not %zu", (unsigned long long)peak, wanted);
        if (record) {
            uint64_t live = ms_engine_memory(engine).live;
            ms_engine_reset_peak(engine);
            OK(ms_backward(engine, &loss, NULL, 1, false));
            assert_true(ms_engine_memory(engine).peak - live < rest);
        }
        for (int i = 0; i < 3; i++) ms_tensor_release(in[i]);
        ms_tensor_release(loss);
        ms_engine_free(engine);
    }
}

/* A gradient with a home is written there. */
static void test_home(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(2, NULL);
    check c = head_of(MS_F32, 4, 6, 5, 3);
    uint64_t numbers = 0;
    ms_tensor *in[3], *loss = NULL, *home = TENSOR(engine, MS_F32, 5, 6);
    for (int i = 0; i < 3; i++) {
        fill(&c.in[i], &numbers);
        in[i] = tensor_of(engine, &c.in[i]);
    }
    OK(ms_tensor_set_requires_grad(in[1], true));
    OK(ms_tensor_set_grad_home(in[1], home));
    OK(ms_apply(engine, c.op, &c.attributes, false, in, 3, &loss, 1));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    float at_home[30], sum = 0;
    OK(ms_tensor_read(home, at_home, sizeof at_home));
    assert_ptr_equal(ms_tensor_storage(ms_tensor_grad(in[1])), ms_tensor_storage(home));
    run alone = run_on_tape(&c, false, 1);
    assert_memory_equal(at_home, alone.dw, sizeof at_home);
    for (int i = 0; i < 30; i++) sum += fabsf(at_home[i]);
    assert_true(sum > 0.01f);
    free(alone.dx);
    free(alone.dw);
    for (int i = 0; i < 3; i++) {
        ms_tensor_release(in[i]);
        free(c.in[i].values);
    }
    ms_tensor_release(loss);
    ms_tensor_release(home);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------- errors */

/* The row is that among all, not in its chunk; also where no gradient is made. */
static void test_names_the_bad_target(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(3, NULL);
    int64_t target[600] = { 0 };
    target[123] = 77;
    target[500] = -1;
    ms_tensor *in[3] = { TENSOR(engine, MS_F32, 600, 4), TENSOR(engine, MS_F32, 70, 4),
                         TENSOR(engine, MS_I64, 600) },
              *out = NULL;
    for (int i = 0; i < 2; i++) OK(ms_fill_into(engine, in[i], 1));
    OK(ms_tensor_write(in[2], target, sizeof target));
    ms_attributes attributes = { .loss = { .ignore_index = -100, .chunk = 100 } };
    /* The task may have failed before the call has enqueued its last one. */
    ms_status status =
        ms_op_apply(engine, &ms_op_linear_cross_entropy, &attributes, false, in, 3, &out, 1);
    assert_int_equal(status ? status : ms_engine_sync(engine), MS_ERROR_ARGUMENT);
    const char *message = ms_engine_error(engine)->message;
    if (!strstr(message, "cross_entropy") || !strstr(message, "row 123 is 77")
        || !strstr(message, "70 classes"))
        fail_msg("%s", message);
    for (int i = 0; i < 3; i++) ms_tensor_release(in[i]);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

static void test_refusals(void **state)
{
    (void)state;
    ms_engine *engine = engine_with(1, NULL);
    const ms_op *op = &ms_op_linear_cross_entropy;
    ms_tensor *x = TENSOR(engine, MS_F32, 2, 4), *w = TENSOR(engine, MS_F32, 5, 4),
              *y = TENSOR(engine, MS_I64, 2), *other = TENSOR(engine, MS_F32, 5, 3),
              *half = TENSOR(engine, MS_BF16, 5, 4), *none = TENSOR(engine, MS_F32, 0, 4),
              *long_y = TENSOR(engine, MS_I64, 3);
    ms_attributes rows = { .loss.reduction = MS_REDUCE_NONE };
    check_refused(engine, op, NULL, (ms_tensor *[]){ x, other, y }, 3,
                  "the input's last dimension is 4, the weight ([classes, in]) takes 3");
    check_refused(engine, op, NULL, (ms_tensor *[]){ x, w, x }, 3, "the targets must be i64");
    check_refused(engine, op, NULL, (ms_tensor *[]){ x, w, long_y }, 3,
                  "the shape of the input without the last dimension");
    check_refused(engine, op, NULL, (ms_tensor *[]){ x, half, y }, 3, "the same float dtype");
    check_refused(engine, op, NULL, (ms_tensor *[]){ x, none, y }, 3, "a row for each class");
    check_refused(engine, op, NULL, (ms_tensor *[]){ x, x, w }, 3, "the targets must be");
    check_refused(engine, op, NULL, (ms_tensor *[]){ x, y, y }, 3, "the same float dtype");
    check_refused(engine, op, &rows, (ms_tensor *[]){ x, w, y }, 3, "mean or sum");
    check_refused(engine, op, NULL, (ms_tensor *[]){ x, w }, 2, "takes 3");
    ms_tensor *all[] = { x, w, y, other, half, none, long_y };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

static void test_lack_of_memory(void **state)
{
    (void)state;
    check c = head_of(MS_F32, 4, 6, 5, 3);
    c.autocast = MS_BF16;
    check_lack_of_memory(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_chunks),
        cmocka_unit_test(test_layouts_and_ignored_rows),
        cmocka_unit_test(test_half_and_autocast),
        cmocka_unit_test(test_frozen),
        cmocka_unit_test(test_f16_keeps_small_slopes),
        cmocka_unit_test(test_one_chunk_has_the_bits_of_two_operators),
        cmocka_unit_test(test_no_row_counts),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_home),
        cmocka_unit_test(test_names_the_bad_target),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_lack_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
