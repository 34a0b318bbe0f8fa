/* alignment.c: operands at any address of their dtype give the bits that they give at the begin of
 * a storage: values, gradients, norms for clipping. ctest: each-isa cuda */
#include "reference.h"
#include "moonshard/optim.h"

enum { STARTS = 5, ROWS = 3 };

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

static const ms_dtype dtypes[] = { MS_F32, MS_BF16, MS_F16 };
static const int64_t widths[] = { 1, 7, 40, 65, 127, 256, 1025 };

static void compare_bits(const char *what, const check *c, const operand *o, uint32_t index,
                         int64_t start, const double *got, const double *plain)
{
    size_t differ = 0, count = count_of(o);
    for (size_t i = 0; i < count; i++) differ += memcmp(&got[i], &plain[i], sizeof *got) != 0;
    if (differ > 0)
        fail_msg("%s, dtype %d, width %lld: %zu of %zu elements of %s %u are others where operands "
                 "start at element %lld of their storage",
                 c->op->name, (int)c->in[0].dtype,
                 (long long)(c->in[0].dims ? c->in[0].shape[c->in[0].dims - 1] : 1), differ, count,
                 what, index, (long long)start);
}

/* Forward and backward with all inputs and incoming gradients at this start. */
static answer run_at(check *c, operand *incoming, int64_t start)
{
    answer a = { 0 };
    for (uint32_t i = 0; i < c->ins; i++) c->in[i].start = start;
    for (uint32_t i = 0; i < c->outs; i++) incoming[i].start = start;
    run_once(engine, c, incoming, start % 2, &a);
    return a;
}

static void check_starts(check c)
{
    uint64_t state = 0;
    operand incoming[TENSORS] = { 0 };
    for (uint32_t i = 0; i < c.ins; i++)
        if (!c.in[i].absent) fill(&c.in[i], &state);
    for (uint32_t i = 0; i < c.outs; i++) {
        incoming[i] = c.out[i];
        fill(&incoming[i], &state);
    }
    answer plain = run_at(&c, incoming, 0);
    for (int64_t start = 1; start < STARTS; start++) {
        answer a = run_at(&c, incoming, start);
        for (uint32_t i = 0; i < c.outs; i++)
            compare_bits("output", &c, &c.out[i], i, start, a.out[i], plain.out[i]);
        for (uint32_t i = 0; i < c.ins; i++)
            if (a.gradient[i])
                compare_bits("gradient", &c, &c.in[i], i, start, a.gradient[i], plain.gradient[i]);
        answer_free(&a);
    }
    answer_free(&plain);
    for (uint32_t i = 0; i < c.ins; i++) free(c.in[i].values);
    for (uint32_t i = 0; i < c.outs; i++) free(incoming[i].values);
}

#define FOR_EACH_DTYPE_AND_WIDTH                                \
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) \
        for (size_t w = 0; w < sizeof widths / sizeof *widths; w++)

static operand matrix(ms_dtype dtype, int64_t rows, int64_t width)
{
    return (operand){ .dtype = dtype, .dims = 2, .shape = { rows, width }, .low = -4, .high = 4 };
}
static operand vector(ms_dtype dtype, int64_t width)
{
    return (operand){ .dtype = dtype, .dims = 1, .shape = { width } };
}

static void test_softmax(void **state)
{
    (void)state;
    const ms_op *ops[] = { &ms_op_softmax, &ms_op_log_softmax };
    FOR_EACH_DTYPE_AND_WIDTH
    for (int i = 0; i < 2; i++) {
        operand x = matrix(dtypes[d], ROWS, widths[w]);
        check_starts((check){
            .op = ops[i], .attributes.dim.a = -1, .ins = 1, .outs = 1, .in = { x }, .out = { x } });
    }
}

static void check_cross_entropy(ms_dtype dtype, int64_t classes)
{
    operand targets = vector(MS_I64, ROWS);
    targets.high = (double)classes;
    check_starts((check){ .op = &ms_op_cross_entropy,
                          .attributes.loss = { .reduction = MS_REDUCE_NONE, .ignore_index = -1 },
                          .ins = 2,
                          .outs = 1,
                          .in = { matrix(dtype, ROWS, classes), targets },
                          .out = { vector(MS_F32, ROWS) } });
}
static void test_cross_entropy(void **state)
{
    (void)state;
    FOR_EACH_DTYPE_AND_WIDTH check_cross_entropy(dtypes[d], widths[w]);
    check_cross_entropy(MS_F32, 8203);
    check_cross_entropy(MS_BF16, 8203);
}

static check check_of_norm(const ms_op *op, ms_dtype dtype, int64_t width)
{
    bool fused = op == &ms_op_add_layer_norm || op == &ms_op_add_rms_norm,
         centered = op == &ms_op_layer_norm || op == &ms_op_add_layer_norm;
    check c = { .op = op, .attributes.norm.eps = 1e-5, .outs = fused ? 2 : 1 };
    c.out[0] = c.out[1] = c.in[c.ins++] = matrix(dtype, ROWS, width);
    if (fused) c.in[c.ins++] = matrix(dtype, ROWS, width);
    c.in[c.ins++] = vector(dtype, width);
    if (centered) c.in[c.ins++] = vector(dtype, width);
    return c;
}
static void test_norms(void **state)
{
    (void)state;
    const ms_op *ops[] = { &ms_op_layer_norm, &ms_op_rms_norm, &ms_op_add_layer_norm,
                           &ms_op_add_rms_norm };
    FOR_EACH_DTYPE_AND_WIDTH
    for (int i = 0; i < 4; i++) {
        check c = check_of_norm(ops[i], dtypes[d], widths[w]);
        check_starts(c);
        if (dtypes[d] == MS_F32) continue;
        /* A stream of f32, whose change and normalized rows have 16 bits. */
        check mixed = check_of_norm(ops[i], MS_F32, widths[w]);
        mixed.autocast = mixed.out[mixed.outs - 1].dtype = dtypes[d];
        if (mixed.outs == 2) mixed.in[0].dtype = dtypes[d];
        check_starts(mixed);
    }
}

static void test_reductions(void **state)
{
    (void)state;
    const ms_op *ops[] = { &ms_op_sum, &ms_op_mean, &ms_op_norm };
    FOR_EACH_DTYPE_AND_WIDTH
    for (int i = 0; i < 3; i++)
        for (int all = 0; all < 2; all++) {
            check c = { .op = ops[i],
                        .attributes.reduce = { .dim = 1, .p = 2 },
                        .ins = 1,
                        .outs = 1,
                        .in = { matrix(dtypes[d], ROWS, widths[w]) },
                        .out = { vector(i == 2 ? MS_F32 : dtypes[d], ROWS) } };
            if (all) c.attributes.reduce.all = true, c.out[0].dims = 0;
            check_starts(c);
        }
}

/* Several counts, since one more rounding of f32 hides most differences of the sums. */
static void test_mse_loss(void **state)
{
    (void)state;
    FOR_EACH_DTYPE_AND_WIDTH
    for (int64_t rows = 1; rows <= 8; rows++) {
        operand x = matrix(dtypes[d], rows, widths[w]);
        check_starts((check){ .op = &ms_op_mse_loss,
                              .ins = 2,
                              .outs = 1,
                              .in = { x, x },
                              .out = { { .dtype = dtypes[d] } } });
    }
}

static void test_embedding(void **state)
{
    (void)state;
    FOR_EACH_DTYPE_AND_WIDTH
    {
        operand ids = vector(MS_I64, 70);
        ids.high = ROWS;
        check_starts((check){ .op = &ms_op_embedding,
                              .ins = 2,
                              .outs = 1,
                              .in = { ids, matrix(dtypes[d], ROWS, widths[w]) },
                              .out = { matrix(dtypes[d], 70, widths[w]) } });
    }
}

/* The bias's gradient is a sum over rows. A product may be computed by a library whose order of
 * additions depends on addresses; with depth 1 there is nothing to add. */
static void test_linear(void **state)
{
    (void)state;
    FOR_EACH_DTYPE_AND_WIDTH
    {
        operand x = matrix(dtypes[d], 70, 1), weight = matrix(dtypes[d], widths[w], 1);
        x.constant = weight.constant = true;
        check_starts((check){ .op = &ms_op_linear,
                              .attributes.linear.activation = MS_ACTIVATION_GELU,
                              .ins = 3,
                              .outs = 1,
                              .in = { x, weight, vector(dtypes[d], widths[w]) },
                              .out = { matrix(dtypes[d], 70, widths[w]) } });
    }
}

/* The sum of the sizes is just above the middle of two numbers of f32, so the norm shows whether
 * small numbers were added to each other before they met a large one. */
static void test_clipping(void **state)
{
    (void)state;
    float plain = 0;
    for (int64_t start = 0; start < STARTS; start++) {
        double values[40] = { 16777216, 1 };
        for (int i = 2; i < 8; i++) values[i] = 1.3969838619232178e-09; /* 1.5 * 2^-30 */
        operand o = vector(MS_F32, 40);
        o.values = values;
        o.start = start;
        ms_tensor *gradient = tensor_of(engine, &o), *norm = NULL;
        float got;
        OK(ms_clip_norm(engine, &gradient, 1, INFINITY, 1, &norm, NULL));
        OK(ms_tensor_read(norm, &got, sizeof got));
        if (start == 0) plain = got;
        if (got != plain)
            fail_msg("at element %lld: %.9g, not %.9g", (long long)start, (double)got,
                     (double)plain);
        ms_tensor_release(norm);
        ms_tensor_release(gradient);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_softmax),  cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_norms),    cmocka_unit_test(test_reductions),
        cmocka_unit_test(test_mse_loss), cmocka_unit_test(test_embedding),
        cmocka_unit_test(test_linear),   cmocka_unit_test(test_clipping),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
