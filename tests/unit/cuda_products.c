/* cuda_products.c: timing the algorithms of products, and choices among them, over stand-ins for
 * NVIDIA's driver and cuBLASLt. */
#include "cuda_support.h"

#include <string.h>

#include "moonshard/tensor.h"
#include "tensor/cuda/matmul.h"
#include "tensor/values.h"

#define OK(call) assert_int_equal(call, MS_OK)

/* [rows, columns] of bf16 ones. */
static ms_tensor *ones(ms_engine *engine, int64_t rows, int64_t columns)
{
    int64_t shape[2] = { rows, columns };
    ms_tensor *made = NULL;
    OK(ms_op_full(engine, MS_BF16, 2, shape, 1.0, &made));
    return made;
}

/* One product [m, 32] x [32, 16]. */
static void multiply(ms_engine *engine, int64_t m)
{
    ms_tensor *a = ones(engine, m, 32), *b = ones(engine, 32, 16), *c = ones(engine, m, 16);
    OK(ms_matmul_into(engine, a, b, NULL, c));
    ms_tensor_release(a);
    ms_tensor_release(b);
    ms_tensor_release(c);
}

static const ms_product_plan *plan_of(ms_engine *engine, int64_t m)
{
    const ms_products *products = ms_engine_get(engine, MS_SLOT_PLANS);
    for (size_t i = 0; products && i < products->plans.capacity; i++) {
        const ms_product_plan *plan = products->plans.plans[i];
        if (plan && plan->key.shape.m == m) return plan;
    }
    return NULL;
}
/* Which of the stand-in's candidates the product uses. */
static uint64_t candidate_of(ms_engine *engine, int64_t m)
{
    return plan_of(engine, m)->way.algorithm.data[4];
}

static void log_warning(void *user, ms_log_level level, const char *message)
{
    (void)message;
    if (level == MS_LOG_WARN) ++*(int *)user;
}
static ms_engine *engine_with_log(int *warnings)
{
    ms_error error;
    ms_engine *engine = NULL;
    ms_engine_options options = { .own_device = &ms_device_cuda,
                                  .threads = 1,
                                  .log = log_warning,
                                  .log_user = warnings,
                                  .log_level = MS_LOG_WARN };
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    setenv("MOONSHARD_STAND_IN_CUBLASLT_FAST", "3", 1);
    if (ms_engine_new(&options, &error, &engine)) fail_msg("%s", error.message);
    return engine;
}

static void test_times_each_once(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found[3];
    OK(ms_products_time(engine, &found[0]));
    assert_string_equal(found[0].choice.key, "");
    multiply(engine, 8);
    multiply(engine, 24);
    multiply(engine, 8);
    OK(ms_engine_sync(engine)); /* its event is kept */
    unsigned before = left();
    for (int i = 0; i < 3; i++) OK(ms_products_time(engine, &found[i]));
    assert_int_equal(left(), before); /* streams, events and memory are given back */
    assert_string_not_equal(found[0].choice.key, found[1].choice.key);
    assert_string_equal(found[2].choice.key, "");
    for (int i = 0; i < 2; i++) {
        assert_int_equal(found[i].choice.algorithm[4], 3);
        assert_true(found[i].us >= 0 && found[i].us < found[i].first_us);
        assert_true(found[i].first_us > 9e5);
    }
    assert_int_equal(candidate_of(engine, 8), 0); /* nothing is chosen yet */
    multiply(engine, 40);
    OK(ms_products_time(engine, &found[2]));
    assert_string_equal(
        found[2].choice.key,
        "40x16x32 bf16 to bf16, rows 32 16 16, batches 1 by 0 0 0, aligned 16 16 16");
    ms_engine_free(engine);
}

static void test_choices(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found;
    multiply(engine, 8);
    OK(ms_products_time(engine, &found));
    OK(ms_products_use(engine, &found.choice, 1, false));
    assert_int_equal(candidate_of(engine, 8), 3);
    /* In place of earlier ones; none. */
    ms_product_choice other = found.choice;
    other.algorithm[4] = 2;
    OK(ms_products_use(engine, &other, 1, false));
    assert_int_equal(candidate_of(engine, 8), 2);
    OK(ms_products_use(engine, NULL, 0, false));
    assert_int_equal(candidate_of(engine, 8), 0);
    ms_engine_free(engine);
    /* Before its plan is made. */
    engine = engine_with_log(&warnings);
    OK(ms_products_use(engine, &found.choice, 1, false));
    multiply(engine, 8);
    multiply(engine, 24);
    assert_int_equal(candidate_of(engine, 8), 3);
    assert_int_equal(candidate_of(engine, 24), 0);
    assert_int_equal(warnings, 0);
    ms_engine_free(engine);
}

/* Of damaged choices, and of one whose sums have no fixed order. */
static void test_refused(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found;
    multiply(engine, 8);
    OK(ms_products_time(engine, &found));
    ms_product_choice wrong[3] = { found.choice, found.choice, found.choice };
    wrong[0].algorithm[0]++;
    wrong[1].algorithm[4] = 99;
    wrong[2].algorithm[5] = MS_LT_REDUCTION_IN_PLACE;
    for (int i = 0; i < 3; i++) {
        OK(ms_products_use(engine, &wrong[i], 1, false));
        assert_int_equal(candidate_of(engine, 8), 0);
        assert_int_equal(warnings, i + 1);
        OK(ms_products_use(engine, &wrong[i], 1, true));
        assert_int_equal(warnings, i + 1);
    }
    multiply(engine, 8);
    OK(ms_engine_sync(engine));
    ms_engine_free(engine);
}

static void test_no_memory(void **state)
{
    (void)state;
    int warnings = 0;
    ms_engine *engine = engine_with_log(&warnings);
    ms_product_time found;
    multiply(engine, 8);
    OK(ms_engine_sync(engine));
    unsigned before = left();
    fails("cuMemAlloc_v2", MS_CUDA_OUT_OF_MEMORY);
    OK(ms_products_time(engine, &found));
    assert_string_not_equal(found.choice.key, "");
    assert_true(found.us < 0);
    assert_int_equal(left(), before);
    OK(ms_products_time(engine, &found));
    assert_string_equal(found.choice.key, "");
    multiply(engine, 24);
    fails("cuEventCreate", 999);
    assert_int_equal(ms_products_time(engine, &found), MS_ERROR_IO);
    fails(NULL, 0);
    OK(ms_engine_sync(engine));
    assert_int_equal(left(), before);
    ms_engine_free(engine);
}

static void test_other_devices(void **state)
{
    (void)state;
    ms_error error;
    ms_engine *engine = NULL;
    ms_engine_options options = { .device = "cpu", .threads = 1 };
    ms_product_choice choice = { .key = "x" };
    ms_product_time found;
    OK(ms_engine_new(&options, &error, &engine));
    multiply(engine, 8);
    OK(ms_products_use(engine, &choice, 1, false));
    OK(ms_products_time(engine, &found));
    assert_string_equal(found.choice.key, "");
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_times_each_once), cmocka_unit_test(test_choices),
        cmocka_unit_test(test_refused),         cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_other_devices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
