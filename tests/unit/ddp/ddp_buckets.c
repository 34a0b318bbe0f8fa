/* ddp_buckets.c: how parameters are cut into buckets, and plans that say so.
 * ctest: poisoned cuda-ranks cuda-local */
#include "ddp_support.h"

#include "fault_os.h"

/* --------------------------------------------------------------- assignment */

static void assert_buckets(const uint64_t *bytes, const uint32_t *keys, uint32_t count,
                           const uint64_t *limits, uint32_t limit_count, bool backwards,
                           const char *expected)
{
    static const uint32_t zeros[16];
    ms_engine *engine = NULL;
    ms_engine_options options = { .device = "sim" };
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    uint32_t order[16], sizes[16], buckets = 0, at = 0;
    char text[256] = "";
    if (!keys) keys = zeros;
    ms_status status;
    if (backwards)
        status = ms_ddp_assign_backwards(engine, bytes, keys, count, limits, limit_count, order,
                                         sizes, &buckets);
    else
        status =
            ms_ddp_assign(engine, bytes, keys, count, limits, limit_count, order, sizes, &buckets);
    assert_int_equal(status, MS_OK);
    for (uint32_t b = 0; b < buckets; b++) {
        for (uint32_t i = 0; i < sizes[b]; i++) sprintf(text + strlen(text), "%u ", order[at++]);
        strcat(text, b + 1 < buckets ? "| " : "");
    }
    assert_int_equal(at, count);
    assert_string_equal(text, expected);
    ms_engine_free(engine);
}

static void parameters_are_cut_into_buckets(void **state)
{
    (void)state;
    const uint64_t v1[] = { 400000, 1200000, 200000, 1600000, 800000 },
                   mega[] = { 1 << 20, 2 << 20 };
    assert_buckets(v1, NULL, 5, mega, 2, true, "2 3 4 | 0 1 ");
    assert_buckets(v1, NULL, 5, mega, 2, false, "0 1 | 2 3 4 ");
    assert_buckets(v1, NULL, 5, (uint64_t[]){ UINT64_MAX }, 1, true, "0 1 2 3 4 ");
    assert_buckets(v1, NULL, 5, (uint64_t[]){ 1 }, 1, true, "4 | 3 | 2 | 1 | 0 ");
    /* As many bytes as the limit closes; the last limit holds on. */
    assert_buckets((uint64_t[]){ 10, 10, 10, 10 }, NULL, 4, (uint64_t[]){ 10, 20 }, 2, false,
                   "0 | 1 2 | 3 ");
    const uint32_t keys[] = { 0, 1, 0, 1, 0 }; /* each dtype by itself, with limits of its own */
    assert_buckets((uint64_t[]){ 10, 10, 10, 10, 10 }, keys, 5, (uint64_t[]){ 20 }, 1, false,
                   "0 2 | 1 3 | 4 ");
    assert_buckets((uint64_t[]){ 10, 10, 10, 10, 10 }, keys, 5, (uint64_t[]){ 20 }, 1, true,
                   "4 | 1 3 | 0 2 ");
}

/* -------------------------------------------------------------------- plans */

static bool refuses(rank *self, ms_reducer *reducer, const char *order, const char *sizes,
                    const char *why)
{
    uint32_t positions[8], counts[8];
    for (size_t i = 0; order[i]; i++) positions[i] = (uint32_t)(order[i] - '0');
    for (size_t i = 0; sizes[i]; i++) counts[i] = (uint32_t)(sizes[i] - '0');
    return ms_reducer_assign(reducer, positions, counts, (uint32_t)strlen(sizes))
               == MS_ERROR_ARGUMENT
           && strstr(ms_engine_error(self->engine)->message, why);
}

static void plan_some(rank *self)
{
    static const uint32_t plans[][WEIGHTS] = { { 4, 3, 2, 1, 0 }, { 0, 4, 1, 3, 2 } },
                          sizes[][3] = { { 1, 3, 1 }, { 2, 1, 2 } };
    model m, reference;
    ms_reducer *reducer = NULL;
    uint32_t order[WEIGHTS];
    uint64_t ns[WEIGHTS], before = 0;
    OK(build(self, &m));
    OK(build(self, &reference));
    OK(wrap(self, &m, (ms_reducer_options){ .planned = true }, &reducer));
    for (uint32_t iteration = 0; iteration < 4; iteration++) {
        ms_reducer_record(reducer, iteration < 3);
        OK(ms_reducer_forward(reducer, true));
        OK(pass(self, &m, self->number, iteration, WEIGHTS, false));
        /* Nothing is rebuilt by itself. */
        CHECK(ms_gradient_source_buckets(ms_reducer_source(reducer)) == (iteration == 0 ? 1 : 3));
        CHECK(reduced(self, &m, &reference, iteration, iteration));
        OK(ms_engine_sync(self->engine));
        CHECK(ms_reducer_arrivals(reducer, order, ns) == (iteration < 3 ? WEIGHTS : 0));
        for (uint32_t i = 0; i < WEIGHTS && iteration < 3; i++) {
            const uint64_t now = ns[order[i]];
            CHECK(order[i] == WEIGHTS - 1 - i && now > 0 && now < 1800000000000u
                  && (i == 0 || now >= before));
            before = now;
        }
        if (iteration == 1) OK(clear(&m)); /* gradients that are there move along */
        OK(ms_reducer_assign(reducer, plans[iteration % 2], sizes[iteration % 2], 3));
        CHECK(iteration == 1 || reduced(self, &m, &reference, iteration, iteration));
        OK(clear(&m));
    }
    /* Times of the pass before the last are there, whatever the device has done since. */
    uint64_t passes = 0, layout = ms_gradient_source_layout(ms_reducer_source(reducer), &passes);
    ms_bucket_times times;
    CHECK(layout == 5 && passes == 0);
    for (uint32_t iteration = 0; iteration < 3; iteration++) {
        OK(ms_gradient_source_await_times(ms_reducer_source(reducer)));
        CHECK(ms_gradient_source_layout(ms_reducer_source(reducer), &passes) == layout
              && passes == iteration);
        if (iteration == 2)
            CHECK(ms_gradient_source_stats(ms_reducer_source(reducer)).timed >= 5
                  && ms_gradient_source_bucket_times(ms_reducer_source(reducer), 2, &times)
                  && times.ready_ns > 0);
        OK(ms_reducer_forward(reducer, true));
        OK(pass(self, &m, self->number, iteration, WEIGHTS, false));
        OK(clear(&m));
    }
    CHECK(refuses(self, reducer, "01234", "23", "x") == false); /* that one is fine */
    CHECK(refuses(self, reducer, "0123", "22", "'e' is in no bucket"));
    CHECK(refuses(self, reducer, "01233", "23", "'d' is there twice"));
    CHECK(refuses(self, reducer, "01235", "23", "there is no parameter 5"));
    CHECK(refuses(self, reducer, "01234", "203", "bucket 1 is empty"));
    CHECK(refuses(self, reducer, "012344", "24", "there are 5 parameters"));
    ms_reducer_free(reducer);
    drop(&m);
    drop(&reference);
}

/* New buckets cannot be allocated after the old ones were freed: the model's next forward returns
 * the error, and the model works again once buckets are assigned. */
static void fail_to_assign(rank *self, long n, bool gradients, bool *reached)
{
    static const uint32_t order[] = { 2, 0, 1, 4, 3 }, sizes[] = { 1, 1, 1, 1, 1 };
    fault_os fault;
    fault_os_init(&fault);
    ms_engine_options options = { .os = &fault.table,
                                  .own_device = late_device(NULL),
                                  .threads = 1,
                                  .strict = true,
                                  .memory_bytes = 64 << 20 };
    assert_int_equal(ms_engine_new(&options, NULL, &self->engine), MS_OK);
    assert_int_equal(ms_comm_open_fake(self->engine, 0, 2, &self->world), MS_OK);
    model m;
    ms_reducer *reducer = NULL;
    assert_int_equal(build(self, &m), MS_OK);
    assert_int_equal(wrap(self, &m, (ms_reducer_options){ .planned = true }, &reducer), MS_OK);
    assert_int_equal(ms_reducer_forward(reducer, true), MS_OK);
    assert_int_equal(pass(self, &m, 0, 0, WEIGHTS, false), MS_OK);
    if (!gradients) assert_int_equal(clear(&m), MS_OK);
    /* Tasks allocate too, but the allocation that fails must be one of the assignment. */
    assert_int_equal(ms_engine_sync(self->engine), MS_OK);
    long limit = atomic_load(&fault.calls) + n;
    atomic_store(&fault.fail_at, limit);
    ms_status status = ms_reducer_assign(reducer, order, sizes, WEIGHTS);
    *reached = atomic_load(&fault.calls) >= limit;
    atomic_store(&fault.fail_at, 0);
    uint32_t buckets = ms_gradient_source_buckets(ms_reducer_source(reducer));
    if (!status) assert_int_equal(buckets, WEIGHTS);
    /* The old ones could not make room: they are as they were. */
    else if (gradients) assert_int_equal(buckets, 1);
    else if (buckets == 0) {
        assert_int_equal(ms_reducer_forward(reducer, true), MS_ERROR_STATE);
        assert_non_null(strstr(ms_engine_error(self->engine)->message, "has no gradient buckets"));
        assert_int_equal(pass(self, &m, 0, 0, WEIGHTS, false), MS_ERROR_STATE);
        assert_non_null(strstr(ms_engine_error(self->engine)->message, "assign buckets again"));
        assert_int_equal(clear(&m), MS_OK);
    }
    assert_int_equal(ms_reducer_assign(reducer, order, sizes, WEIGHTS), MS_OK);
    assert_int_equal(clear(&m), MS_OK);
    assert_int_equal(ms_reducer_forward(reducer, true), MS_OK);
    assert_int_equal(pass(self, &m, 0, 1, WEIGHTS, false), MS_OK);
    ms_reducer_free(reducer);
    drop(&m);
    ms_engine_sync(self->engine);
    assert_int_equal(ms_engine_memory(self->engine).live, 0);
    ms_engine_free(self->engine);
    assert_int_equal(atomic_load(&fault.live), 0);
}

static void a_model_whose_buckets_could_not_be_made_says_so(void **state)
{
    (void)state;
    for (int gradients = 0; gradients < 2; gradients++) {
        bool reached = true;
        for (long n = 1; reached; n++) {
            rank self = { .ranks = 2 };
            assert_true(n < 400);
            fail_to_assign(&self, n, gradients, &reached);
        }
    }
}

static void buckets_may_be_given(void **state)
{
    (void)state;
    run_well(THREADS, 2, plan_some, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_are_cut_into_buckets),
        cmocka_unit_test(buckets_may_be_given),
        cmocka_unit_test(a_model_whose_buckets_could_not_be_made_says_so),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
