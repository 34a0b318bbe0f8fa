/* cudnn_plans.c: the graphs of attention, made into plans by cuDNN itself for an H200 that is only
 * described (tests/bench/results/h200): what it accepts, and what it refuses. Nothing is executed:
 * values are those of attention_cudnn.c. ctest: plans
 *
 * The driver of this process is the stand-in, which loads cuDNN's kernels and forgets them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "ranges.h"
#include "ops/cuda/attention_graph.h"

static ms_cudnn dnn;

#define GOES(call)                                                  \
    do {                                                            \
        ms_cudnn_result result = (call);                            \
        if (result) fail_msg("%s: %s", #call, dnn.explain(result)); \
    } while (0)

/* The fixture's GPU with another compute capability. */
static ms_cudnn_descriptor device_of(const char *version)
{
    static char text[8192];
    char path[1024];
    snprintf(path, sizeof path, "%s/tests/bench/results/h200/deviceprop.json",
             getenv("MOONSHARD_SOURCE") ? getenv("MOONSHARD_SOURCE") : ".");
    FILE *file = fopen(path, "r");
    if (!file) fail_msg("%s is not there", path);
    size_t bytes = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[bytes] = '\0';
    char *at = strstr(text, "\"deviceVer\":900");
    assert_non_null(at);
    memcpy(at + strlen("\"deviceVer\":"), version, 3);
    ms_cudnn_descriptor device = NULL;
    GOES(dnn.make(MS_CUDNN_DEVICE, &device));
    GOES(dnn.set(device, MS_CUDNN_DEVICE_TEXT, MS_CUDNN_IS_TEXT, (int64_t)bytes, text));
    GOES(dnn.finalize(device));
    return device;
}

typedef struct shape {
    int64_t batches, heads, groups, queries, keys, width;
    bool causal;
} shape;

/* Heads that are side by side in a row, as the operator makes them; `together`: queries, keys and
 * values are parts of one row. */
static ms_attention_key key_of(shape s, ms_dtype dtype, bool backward, bool together)
{
    ms_attention_key key;
    memset(&key, 0, sizeof key);
    key.batches = s.batches;
    key.heads = s.heads;
    key.groups = s.groups;
    key.queries = s.queries;
    key.keys = s.keys;
    key.width = s.width;
    key.dtype = (uint8_t)dtype;
    key.causal = s.causal;
    key.backward = backward;
    for (int i = 0; i < (backward ? MS_ATTENTION_TENSORS : MS_ATTENTION_DOUT); i++) {
        bool of_keys = i == MS_ATTENTION_K || i == MS_ATTENTION_V || i >= MS_ATTENTION_DK,
             is_out = i == MS_ATTENTION_OUT || i == MS_ATTENTION_DOUT;
        int64_t row = (of_keys ? s.groups : s.heads) * s.width;
        if (together && !is_out) row = (s.heads + 2 * s.groups) * s.width;
        key.strides[i][0] = (of_keys ? s.keys : s.queries) * row;
        key.strides[i][1] = s.width;
        key.strides[i][2] = row;
    }
    return key;
}
static ms_attention_key fast_key_of(shape s, ms_dtype dtype, bool together)
{
    ms_attention_key key = key_of(s, dtype, true, together);
    key.fast = true;
    return key;
}

static ms_attention_plan plan_of(const ms_attention_key *key, const char *version)
{
    ms_attention_plan plan;
    ms_attention_maker maker = { .dnn = &dnn, .device = device_of(version) };
    ms_attention_plan_make(&maker, key, &plan);
    GOES(dnn.release(maker.device));
    return plan;
}

static size_t up(int64_t count, int64_t to) { return (size_t)((count + to - 1) / to * to); }

/* Forward needs next to nothing. Backward keeps the gradients of the scores, in tiles, and with
 * grouped queries those of all heads' keys and values; a smaller workspace would mean sums in no
 * certain order. */
static void check_workspace(const ms_attention_plan *plan)
{
    const ms_attention_key *key = &plan->key;
    size_t all = (size_t)(key->batches * key->heads), extra = (size_t)1 << 20;
    if (!key->backward) {
        assert_in_range(plan->workspace_bytes, 0, extra);
        return;
    }
    size_t least = all * up(key->queries, 64) * up(key->keys, 64) * 2,
           most = all * up(key->queries, 128) * up(key->keys, 128) * 2;
    size_t heads = key->heads != key->groups ? 2 * all * (size_t)(key->keys * key->width) * 2 : 0;
    assert_in_range(plan->workspace_bytes, least + heads, most + heads + extra);
}

static void accepted(shape s, ms_dtype dtype, bool backward, bool together)
{
    ms_attention_key key = key_of(s, dtype, backward, together);
    ms_attention_plan plan = plan_of(&key, "900");
    if (!plan.plan)
        fail_msg("[%lld, %lld, %lld, %lld] %s: %s", (long long)s.batches, (long long)s.heads,
                 (long long)s.queries, (long long)s.width, backward ? "backward" : "forward",
                 plan.why);
    assert_in_range(plan.returned, 1, 32);
    check_workspace(&plan);
    ms_attention_plan_free(&dnn, &plan);
    assert_int_equal(plan.made_count, 0);
}

/* The models of the benches, with queries, keys and values in one row, and one with groups. cuDNN
 * takes most of a second for a plan, so short ranges are of half of the models, in one direction.
 */
static void test_models(void **state)
{
    (void)state;
    const shape models[] = { { 8, 12, 12, 1024, 1024, 64, true },
                             { 4, 16, 16, 1024, 1024, 64, true },
                             { 2, 25, 25, 1024, 1024, 64, true },
                             { 1, 32, 8, 2048, 2048, 128, true } };
    for (size_t i = 0; i < sizeof models / sizeof *models; i++)
        for (int backward = 0; backward < 2; backward++)
            if (ranges_are_long() || (i % 2 == 1 && backward == (i == 3)))
                accepted(models[i], i == 1 ? MS_F16 : MS_BF16, backward, true);
}

/* A backward that may add up in any order keeps no gradients of scores: at most those of all heads'
 * keys and values in 16 bits, and sums for all queries. */
static void test_fast(void **state)
{
    (void)state;
    const shape shapes[] = {
        { 8, 12, 12, 1024, 1024, 64, true }, { 4, 16, 16, 1024, 1024, 64, true },
        { 2, 25, 25, 1024, 1024, 64, true }, { 1, 32, 8, 2048, 2048, 128, true },
        { 1, 4, 2, 320, 128, 40, false },    { 1, 2, 2, 256, 256, 256, true },
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        if (!ranges_are_long() && i != 4) continue;
        shape s = shapes[i];
        ms_attention_key key = fast_key_of(s, i == 1 ? MS_F16 : MS_BF16, i < 4);
        ms_attention_plan plan = plan_of(&key, "900");
        if (!plan.plan) fail_msg("shape %zu: %s", i, plan.why);
        size_t all = (size_t)(s.batches * s.heads);
        size_t most = all * (size_t)(2 * s.keys * s.width) * 2
                      + all * (size_t)s.queries * up(s.width, 64) * 4;
        assert_in_range(plan.workspace_bytes, 0, most + ((size_t)1 << 20));
        ms_attention_plan_free(&dnn, &plan);
    }
    ms_attention_key key = fast_key_of((shape){ 2, 4, 4, 256, 256, 64, true }, MS_BF16, false);
    ms_attention_plan plan = plan_of(&key, "750");
    assert_null(plan.plan);
}

static void test_odd_shapes(void **state)
{
    (void)state;
    const shape shapes[] = {
        { 2, 4, 4, 127, 127, 64, true }, { 1, 2, 2, 1025, 1025, 64, false },
        { 2, 8, 2, 100, 300, 40, true }, { 1, 4, 2, 300, 100, 128, false },
        { 2, 2, 2, 2, 2, 8, true },      { 1, 2, 2, 256, 256, 256, true },
    };
    /* In short ranges: which of the two directions. */
    enum { NONE = -1 };
    static const int one[] = { true, NONE, false, NONE, NONE, NONE };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int backward = 0; backward < 2; backward++)
            if (ranges_are_long() || backward == one[i])
                accepted(shapes[i], i % 2 ? MS_F16 : MS_BF16, backward, false);
}

static void refused(shape s, bool backward, const char *version)
{
    ms_attention_key key = key_of(s, MS_BF16, backward, false);
    ms_attention_plan plan = plan_of(&key, version);
    assert_null(plan.plan);
    assert_int_equal(plan.returned, 0);
    assert_int_equal(plan.made_count, 0);
    assert_true(plan.why[0]);
}

/* What must stay refused: an acceptance would mean that the answers above say nothing. */
static void test_refused(void **state)
{
    (void)state;
    shape s = { 2, 4, 4, 256, 256, 64, true }, narrow = s, wide = s;
    narrow.width = 65;
    wide.width = 512;
    for (int backward = 0; backward < 2; backward++) {
        refused(narrow, backward, "900");
        refused(s, backward, "750");
    }
    refused(wide, true, "900");
}

/* A plan as text, and a plan from the text. */
static void read_back(bool backward)
{
    ms_attention_key key = key_of((shape){ 2, 4, 4, 256, 256, 64, true }, MS_BF16, backward, false);
    ms_attention_plan plan = plan_of(&key, "900");
    int64_t bytes = 0, one = 0, workspace = 0;
    ms_cudnn_descriptor device = device_of("900"), again = NULL;
    assert_non_null(plan.plan);
    GOES(dnn.get(plan.plan, MS_CUDNN_PLAN_TEXT, MS_CUDNN_IS_TEXT, 0, &bytes, NULL));
    assert_in_range(bytes, 1000, 10 << 20);
    char *text = calloc((size_t)bytes + 1, 1);
    GOES(dnn.get(plan.plan, MS_CUDNN_PLAN_TEXT, MS_CUDNN_IS_TEXT, bytes, &bytes, text));
    assert_int_equal(text[0], '{');
    GOES(dnn.make(MS_CUDNN_PLAN, &again));
    GOES(dnn.set(again, MS_CUDNN_PLAN_DEVICE, MS_CUDNN_IS_DESCRIPTOR, 1, &device));
    GOES(dnn.set(again, MS_CUDNN_PLAN_TEXT, MS_CUDNN_IS_TEXT, bytes, text));
    GOES(dnn.finalize(again));
    GOES(dnn.get(again, MS_CUDNN_PLAN_WORKSPACE, MS_CUDNN_IS_INTEGER, 1, &one, &workspace));
    assert_int_equal(workspace, plan.workspace_bytes);
    free(text);
    GOES(dnn.release(again));
    GOES(dnn.release(device));
    ms_attention_plan_free(&dnn, &plan);
}
static void test_read_back(void **state)
{
    (void)state;
    if (ranges_are_long()) read_back(false);
    read_back(true);
}

enum { SKIPPED = 77 }; /* see tests/CMakeLists.txt */

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_models),     cmocka_unit_test(test_fast),
        cmocka_unit_test(test_odd_shapes), cmocka_unit_test(test_refused),
        cmocka_unit_test(test_read_back),
    };
    ms_context context;
    char path[1024];
    const char *sanitize = getenv("MOONSHARD_SANITIZE");
    if (sanitize && *sanitize) {
        puts("skipped: cuDNN is not made for sanitizers");
        return SKIPPED;
    }
    ms_context_init(&context, ms_os_posix());
    if (ms_cudnn_load(&context, &dnn, path, sizeof path)) {
        printf("skipped: %s\n", context.error.message);
        return SKIPPED;
    }
    printf("cuDNN %zu, %s\n", dnn.version(), path);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
