/* attention_cudnn.c: attention by cuDNN: its values and gradients, which calls go to it and which
 * to our own kernels, parts, and what is wrong with the library. On the stand-in for the driver a
 * stand-in carries out cuDNN's graphs; on a GPU it is cuDNN. ctest: cuda */
#include "attention_reference.h"
#include "ops/cuda/attention_plan.h"

#define VARIABLE "MOONSHARD_CUDNN"

static bool is_on_stand_in(void)
{
    const char *device = getenv("MOONSHARD_TEST_DEVICE");
    return device && strncmp(device, "cuda", 4) == 0 && getenv("MOONSHARD_STAND_IN");
}
static void use_stand_in(void)
{
    unsetenv("MOONSHARD_STAND_IN_CUDNN");
    unsetenv("MOONSHARD_STAND_IN_CUDNN_VERSION");
    if (is_on_stand_in()) setenv(VARIABLE, getenv("MOONSHARD_STAND_IN_CUDNN_PATH"), 1);
}
/* Engines of the CPU have no cuDNN, and a machine with a GPU may have none. */
static bool has_cudnn(ms_engine *engine)
{
    char text[1200];
    return strcmp(ms_engine_device(engine), "cuda") == 0 && ms_gpu_dnn(NULL, text, sizeof text);
}

typedef struct run {
    ms_attention_counts counts;
    answer answer;
} run;

/* Forward and backward on an engine of its own, in parts of so many bytes at most (0: as ever). */
static run run_counted(check *c, size_t part_bytes)
{
    run r = { .counts = { 0 } };
    uint64_t state = 0;
    operand incoming[TENSORS] = { 0 };
    ms_engine *engine = engine_with(1, NULL);
    bool has = has_cudnn(engine);
    for (uint32_t i = 0; i < 3; i++) fill(&c->in[i], &state);
    incoming[0] = c->out[0];
    incoming[0].low = -1.0;
    incoming[0].high = 1.0;
    fill(&incoming[0], &state);
    if (part_bytes && has) OK(ms_cuda_attention_set_part_bytes(engine, part_bytes));
    run_once(engine, c, incoming, false, &r.answer);
    r.counts = ms_engine_attention_counts(engine);
    ms_engine_free(engine);
    free(incoming[0].values);
    for (uint32_t i = 0; i < 3; i++) {
        free(c->in[i].values);
        c->in[i].values = NULL;
    }
    return r;
}

static void counts_are(check c, uint64_t cudnn, uint64_t own)
{
    ms_engine *engine = engine_with(1, NULL);
    bool is_cuda = strcmp(ms_engine_device(engine), "cuda") == 0, has = has_cudnn(engine);
    ms_engine_free(engine);
    if (!is_cuda) return;
    run r = run_counted(&c, 0);
    if (!has) {
        own += cudnn;
        cudnn = 0;
    }
    assert_int_equal(r.counts.cudnn, cudnn);
    assert_int_equal(r.counts.own, own);
    answer_free(&r.answer);
}

static check of(ms_dtype dtype, ms_dtype autocast, sizes s, int layout)
{
    check c = attention_of(dtype, s, layout);
    set_autocast(&c, autocast);
    c.tolerance = 1e-2;
    return c;
}

/* The tests below hold without cuDNN, too, and then say nothing about it. */
static void test_is_there(void **state)
{
    (void)state;
    use_stand_in();
    ms_engine *engine = engine_with(1, NULL);
    char text[1200];
    bool is_cuda = strcmp(ms_engine_device(engine), "cuda") == 0,
         has = ms_gpu_dnn(NULL, text, sizeof text);
    ms_engine_free(engine);
    if (!is_cuda) skip();
    print_message("%s\n", text);
    if (is_on_stand_in()) assert_true(has);
    else if (!has) skip();
}

/* ------------------------------------------------------------------------- values */

/* Each runs three times, with the same bits. */
static const sizes taken[] = {
    { 2, 2, 2, 9, 9, 8, true },      { 1, 4, 2, 9, 9, 16, false },
    { 1, 4, 2, 70, 131, 24, true },  { 2, 3, 1, 40, 64, 40, true },
    { 1, 2, 1, 130, 71, 64, false }, { 1, 1, 1, 127, 127, 128, true },
    { 1, 1, 1, 33, 65, 256, true },  { 3, 2, 2, 2, 2, 32, true },
};

static void test_values(void **state)
{
    (void)state;
    use_stand_in();
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        ms_dtype dtype = i % 2 == 0 ? MS_BF16 : MS_F16;
        check c = of(dtype, MS_F32, taken[i], PLAIN);
        run_check(&c);
        counts_are(c, 2, 0);
    }
}

/* Operands in f32, of which copies are made. */
static void test_autocast(void **state)
{
    (void)state;
    use_stand_in();
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) {
        check c = of(MS_F32, i % 2 == 0 ? MS_BF16 : MS_F16, taken[i], PLAIN);
        run_check(&c);
        counts_are(c, 2, 0);
    }
}

static void same_bits(const check *c, const answer *a, const answer *b)
{
    assert_memory_equal(a->out[0], b->out[0], count_of(&c->out[0]) * sizeof(double));
    for (int i = 0; i < 3; i++)
        assert_memory_equal(a->gradient[i], b->gradient[i], count_of(&c->in[i]) * sizeof(double));
}

/* ------------------------------------------------------------------- sums in any order */

/* Queries and keys in multiples of 64. Their counts: forward and backward, of which one is fast. */
static void test_fast(void **state)
{
    (void)state;
    use_stand_in();
    const sizes fast[] = { { 2, 2, 2, 64, 64, 8, true },
                           { 1, 4, 2, 64, 128, 24, true },
                           { 1, 2, 1, 128, 64, 40, false } };
    for (size_t i = 0; i < 2 * sizeof fast / sizeof *fast; i++) {
        check c = i % 2 ? of(MS_F32, MS_BF16, fast[i / 2], PLAIN)
                        : of(MS_BF16, MS_F32, fast[i / 2], PLAIN);
        c.attributes.attention.fast = true;
        c.varies = true;
        run_check(&c);
        counts_are(c, 2, 0);
        /* In parts as well, each of which begins with sums of zero. */
        run whole = run_counted(&c, 0), least = run_counted(&c, 1);
        assert_int_equal(whole.counts.fast, whole.counts.cudnn / 2);
        assert_int_equal(least.counts.fast, whole.counts.fast);
        for (int t = 0; t < 3; t++)
            compare("gradient", (uint32_t)t, least.answer.gradient[t], whole.answer.gradient[t],
                    count_of(&c.in[t]), 1e-2);
        answer_free(&whole.answer);
        answer_free(&least.answer);
    }
}

/* What cuDNN has no fast way for has the bits of a call that did not ask. */
static void test_not_fast(void **state)
{
    (void)state;
    use_stand_in();
    const sizes slow[] = { { 1, 2, 2, 64, 70, 16, true },
                           { 1, 2, 2, 63, 64, 16, true },
                           { 1, 2, 2, 20, 20, 20, true },
                           { 1, 2, 2, 64, 64, 16, true } };
    for (size_t i = 0; i < sizeof slow / sizeof *slow; i++) {
        check c = of(MS_BF16, MS_F32, slow[i], PLAIN);
        /* The last one would be fast. */
        if (i == 3 && !is_on_stand_in()) break;
        if (i == 3) setenv("MOONSHARD_STAND_IN_CUDNN", "is slow", 1);
        run plain = run_counted(&c, 0);
        c.attributes.attention.fast = true;
        run r = run_counted(&c, 0);
        same_bits(&c, &r.answer, &plain.answer);
        assert_int_equal(r.counts.fast, 0);
        assert_int_equal(r.counts.cudnn, plain.counts.cudnn);
        answer_free(&r.answer);
        answer_free(&plain.answer);
    }
    use_stand_in();
}

/* A scale of one's own, and lengths of real texts where there is a GPU. */
static void test_scale_and_lengths(void **state)
{
    (void)state;
    use_stand_in();
    check scaled = of(MS_BF16, MS_F32, (sizes){ 1, 2, 2, 16, 16, 64, true }, PLAIN);
    scaled.attributes.attention.scale = 0.25;
    run_check(&scaled);
    if (is_on_stand_in() || !getenv("MOONSHARD_TEST_DEVICE")) return;
    for (int causal = 0; causal < 2; causal++) {
        check even = of(MS_BF16, MS_F32, (sizes){ 2, 4, 2, 1024, 1024, 64, causal }, PLAIN),
              odd = of(MS_F32, MS_BF16, (sizes){ 1, 2, 2, 1025, 1025, 128, causal }, PLAIN);
        run_check(&even);
        run_check(&odd);
    }
}

/* -------------------------------------------------------------------- which way */

static void test_which_way(void **state)
{
    (void)state;
    use_stand_in();
    /* No products in 16 bits; one query; widths that cuDNN does not take. */
    counts_are(of(MS_F32, MS_F32, taken[0], PLAIN), 0, 2);
    counts_are(of(MS_BF16, MS_F32, (sizes){ 1, 2, 2, 1, 20, 16, true }, PLAIN), 0, 2);
    counts_are(of(MS_BF16, MS_F32, (sizes){ 1, 2, 2, 20, 20, 65, true }, PLAIN), 0, 2);
    counts_are(of(MS_F16, MS_F32, (sizes){ 1, 2, 2, 20, 20, 264, true }, PLAIN), 0, 2);
    /* Rows that begin anywhere. */
    counts_are(of(MS_BF16, MS_F32, (sizes){ 1, 2, 2, 20, 20, 20, true }, PLAIN), 0, 2);
    /* Documents of one row. */
    double positions[20];
    check packed = of(MS_BF16, MS_F32, (sizes){ 1, 1, 1, 20, 20, 16, true }, PLAIN);
    for (int i = 0; i < 20; i++) positions[i] = i < 10 ? i : i - 10;
    packed.in[3] = (operand){
        .dtype = MS_I64, .dims = 2, .shape = { 1, 20 }, .constant = true, .values = positions
    };
    packed.ins = 4;
    counts_are(packed, 0, 2);
    /* A window, unless it hides nothing. */
    check window = of(MS_BF16, MS_F32, (sizes){ 1, 1, 1, 20, 20, 16, true }, PLAIN);
    window.attributes.attention.window = 7;
    counts_are(window, 0, 2);
    window.attributes.attention.window = 20;
    counts_are(window, 2, 0);
}

/* A call in parts has the bits of one that is whole: parts share nothing. */
static void test_parts(void **state)
{
    (void)state;
    use_stand_in();
    const sizes cases[] = { { 4, 2, 2, 32, 32, 16, true },
                            { 1, 8, 4, 20, 40, 16, true },
                            { 6, 4, 2, 12, 12, 8, false },
                            { 1, 6, 6, 64, 64, 8, true } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int cast = 0; cast < 2; cast++) {
            check c =
                cast ? of(MS_F32, MS_BF16, cases[i], PLAIN) : of(MS_BF16, MS_F32, cases[i], PLAIN);
            run whole = run_counted(&c, 0), some = run_counted(&c, 60000),
                least = run_counted(&c, 1);
            same_bits(&c, &some.answer, &whole.answer);
            same_bits(&c, &least.answer, &whole.answer);
            assert_int_equal(some.counts.cudnn, whole.counts.cudnn);
            assert_int_equal(least.counts.cudnn, whole.counts.cudnn);
            answer_free(&whole.answer);
            answer_free(&some.answer);
            answer_free(&least.answer);
        }
    /* Parts would begin at any place of log_sum: our own kernels take those that must be cut. */
    check odd = of(MS_BF16, MS_F32, (sizes){ 3, 1, 1, 9, 9, 8, true }, PLAIN);
    run r = run_counted(&odd, 1);
    /* Forward copies nothing, so it need not be cut. */
    bool is_cuda = r.counts.cudnn + r.counts.own > 0;
    if (is_cuda) assert_true(r.counts.own >= 1);
    answer_free(&r.answer);
}

/* ----------------------------------------------------------------------- recorded */

enum { REPLAYED = 2 * 16 * 8 };
static void draw_into(ms_engine *engine, ms_tensor *tensor, uint64_t *seed)
{
    double values[REPLAYED];
    char bytes[REPLAYED * 4];
    for (int i = 0; i < REPLAYED; i++) values[i] = rounded(MS_F32, draw(seed));
    to_bytes(MS_F32, values, REPLAYED, bytes);
    OK(ms_tensor_write(tensor, bytes, REPLAYED * 4));
}
static ms_tensor *attend(ms_engine *engine, ms_tensor *q)
{
    ms_tensor *out = NULL;
    OK(ms_op_apply(engine, &ms_op_attention, &(ms_attributes){ .attention.causal = true }, false,
                   (ms_tensor *[]){ q, q, q }, 3, &out, 1));
    return out;
}

/* Work that comes again is launched as a graph, with a plan's kernels in it. The values that it
 * reads are other ones in each step. */
static void test_graph(void **state)
{
    (void)state;
    use_stand_in();
    ms_engine *engine = engine_with(1, NULL);
    uint64_t seed = 3;
    double got[REPLAYED], expected[REPLAYED];
    ms_repeats repeats;
    if (strcmp(ms_engine_device(engine), "cuda") != 0) {
        ms_engine_free(engine);
        skip();
    }
    ms_tensor *q = empty_tensor(engine, MS_F32, 4, (int64_t[]){ 1, 2, 16, 8 });
    ms_engine_set_autocast(engine, MS_BF16);
    for (int step = 0; step < 8; step++) {
        ms_tensor *outs[4];
        draw_into(engine, q, &seed);
        ms_engine_set_repeating(engine, true);
        for (int i = 0; i < 4; i++) outs[i] = attend(engine, q);
        ms_engine_set_repeating(engine, false);
        ms_tensor *again = attend(engine, q);
        read_values(engine, again, expected);
        ms_tensor_release(again);
        for (int i = 0; i < 4; i++) {
            read_values(engine, outs[i], got);
            assert_memory_equal(got, expected, sizeof got);
            ms_tensor_release(outs[i]);
        }
    }
    ms_engine_repeats(engine, &repeats);
    assert_true(repeats.launches >= 3);
    ms_tensor_release(q);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------ the library */

/* Attention's task fails, and says so. */
static void task_fails(const char *words)
{
    ms_engine *engine = engine_with(1, NULL);
    ms_tensor *q = NULL, *out = NULL, *empty = NULL;
    OK(ms_tensor_new(engine, MS_BF16, 4, (int64_t[]){ 1, 2, 8, 8 }, &empty));
    OK(ms_op_apply(engine, &ms_op_fill, NULL, true, &empty, 1, &q, 1));
    ms_status status =
        ms_op_apply(engine, &ms_op_attention, NULL, false, (ms_tensor *[]){ q, q, q }, 3, &out, 1);
    if (!status) status = ms_engine_sync(engine);
    assert_int_not_equal(status, MS_OK);
    if (!strstr(ms_engine_error(engine)->message, words))
        fail_msg("\"%s\" does not say \"%s\"", ms_engine_error(engine)->message, words);
    ms_tensor_release(q);
    ms_tensor_release(empty);
    ms_tensor_release(out);
    ms_engine_free(engine);
}

/* A library that was named must work. */
static void test_library(void **state)
{
    (void)state;
    if (!is_on_stand_in()) skip();
    use_stand_in();
    char text[1200];
    assert_true(ms_gpu_dnn(NULL, text, sizeof text));
    assert_non_null(strstr(text, "cuDNN 9.19, "));
    setenv("MOONSHARD_STAND_IN_CUDNN_VERSION", "91500", 1);
    assert_false(ms_gpu_dnn(NULL, text, sizeof text));
    assert_non_null(strstr(text, "is cuDNN 9.15, too old: "));
    task_fails("is cuDNN 9.15");
    use_stand_in();
    setenv("MOONSHARD_STAND_IN_CUDNN", "broken", 1);
    task_fails("cuDNN does not start: '");
    use_stand_in();
    setenv(VARIABLE, "/nowhere/libcudnn.so.9", 1);
    task_fails("/nowhere/libcudnn.so.9");
    setenv(VARIABLE, getenv("MOONSHARD_STAND_IN"), 1);
    task_fails("is no cuDNN 9: it has no cudnn");
    setenv(VARIABLE, "off", 1);
    assert_false(ms_gpu_dnn(NULL, text, sizeof text));
    assert_non_null(strstr(text, "cuDNN is off"));
    check c = of(MS_BF16, MS_F32, taken[0], PLAIN);
    run r = run_counted(&c, 0);
    assert_int_equal(r.counts.own, 2);
    assert_int_equal(r.counts.cudnn, 0);
    answer_free(&r.answer);
    use_stand_in();
}

/* A shape that it refuses is computed all the same. */
static void test_refused(void **state)
{
    (void)state;
    if (!is_on_stand_in()) skip();
    use_stand_in();
    setenv("MOONSHARD_STAND_IN_CUDNN", "refuses", 1);
    check c = of(MS_BF16, MS_F32, taken[0], PLAIN);
    run_check(&c);
    counts_are(c, 0, 2);
    use_stand_in();
}

/* An error of the library is the task's. */
static void test_execution_fails(void **state)
{
    (void)state;
    if (!is_on_stand_in()) skip();
    use_stand_in();
    setenv("MOONSHARD_STAND_IN_CUDNN", "fails", 1);
    task_fails("attention: cuDNN: CUDNN_STATUS_BAD_PARAM: the stand-in says no");
    use_stand_in();
}

static void test_lack(void **state)
{
    (void)state;
    use_stand_in();
    check c = of(MS_F32, MS_BF16, (sizes){ 1, 2, 1, 4, 4, 8, true }, PLAIN);
    check_lack_of_memory(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_is_there),  cmocka_unit_test(test_values),
        cmocka_unit_test(test_autocast),  cmocka_unit_test(test_scale_and_lengths),
        cmocka_unit_test(test_which_way), cmocka_unit_test(test_parts),
        cmocka_unit_test(test_graph),     cmocka_unit_test(test_library),
        cmocka_unit_test(test_refused),   cmocka_unit_test(test_execution_fails),
        cmocka_unit_test(test_fast),      cmocka_unit_test(test_not_fast),
        cmocka_unit_test(test_lack),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
