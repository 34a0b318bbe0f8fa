/* ddp_errors.c: errors: mistakes of the caller, hooks that fail, models that differ, failing
 * allocations. ctest: poisoned cuda-ranks cuda-local */
#include "ddp_support.h"

#include "fault_rank.h"

/* ----------------------------------------------------------------- mistakes */

static bool says(rank *self, const char *text)
{
    return strstr(ms_engine_error(self->engine)->message, text) != NULL;
}

static ms_status cut_short(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    (void)user, (void)ready;
    int64_t shape = ms_tensor_count(bucket->buffer) - 1, stride = 1;
    return ms_tensor_window(bucket->buffer, 1, &shape, &stride, 0, result);
}

static void mistakes(rank *self)
{
    const int which = *(const int *)self->job->argument;
    model m;
    ms_reducer *reducer = NULL, *again = NULL;
    OK(build(self, &m));
    if (which == 0) {
        float got[4];
        CHECK(reduce_constant(self, &(ms_reducer_options){ .hook = cut_short }, 1, 4, got)
              == MS_ERROR_ARGUMENT);
        CHECK(says(self, "bucket 0") && says(self, "[3] f32") && says(self, "[4] f32"));
        return;
    }
    OK(wrap(self, &m, (ms_reducer_options){ 0 }, &reducer));
    CHECK(wrap(self, &m, (ms_reducer_options){ 0 }, &again) == MS_ERROR_STATE
          && says(self, "unwrap"));
    if (which == 1) {
        CHECK(pass(self, &m, 0, 0, WEIGHTS, false) == MS_ERROR_STATE
              && says(self, "no forward of the ddp model"));
    } else if (which == 2) {
        OK(ms_reducer_forward(reducer, true));
        OK(pass(self, &m, 0, 0, 3, false));
        CHECK(!ms_gradient_source_error(ms_reducer_source(reducer)));
        CHECK(ms_reducer_forward(reducer, true) == MS_ERROR_STATE && says(self, "'d', 'e'"));
        CHECK(ms_gradient_source_error(ms_reducer_source(reducer))
              && strstr(ms_gradient_source_error(ms_reducer_source(reducer)), "'d', 'e'"));
    } else if (which == 3) {
        OK(ms_reducer_forward(reducer, true));
        CHECK(pass(self, &m, 0, 0, WEIGHTS, true) == MS_ERROR_STATE && says(self, "twice"));
    } else if (which == 4) {
        OK(ms_reducer_forward(reducer, true));
        ms_reducer_set_no_sync(reducer, true);
        CHECK(pass(self, &m, 0, 0, WEIGHTS, false) == MS_ERROR_STATE && says(self, "ran outside"));
    }
    drop(&m);
}

static void mistakes_are_named_and_end_the_job(void **state)
{
    (void)state;
    for (int which = 0; which < 5; which++) {
        rank ranks[1];
        job what = {
            .kind = which % 2 ? THREADS : PROCESSES,
            .options = { .ranks = 1, .threads = 1, .heap_bytes = 64 << 20, .timeout_ns = HANG_NS },
            .run = mistakes,
            .argument = &which
        };
        ms_abort_record cause = run_job(&what, ranks);
        if (*ranks[0].why) fail_msg("mistake %d: %s", which, ranks[0].why);
        assert_int_equal(cause.reason, MS_ABORT_RAISED);
    }
}

/* Rank 1's hook fails; rank 0, which waits for its reduction, gets the reason. */
static ms_status fails_on_one(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    (void)user, (void)ready;
    if (ms_group_rank(bucket->group) == 1)
        return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT, "a hook that says no");
    ms_link reduce = { .kind = ms_link_find("reduce"), .options = { .op = MS_REDUCE_OP_AVG } };
    return ms_chain_run(&reduce, 1, bucket, result);
}

static void fail_on_one(rank *self)
{
    float got[4];
    ms_status status =
        reduce_constant(self, &(ms_reducer_options){ .hook = fails_on_one }, 1, 4, got);
    CHECK(status != MS_OK && says(self, "a hook that says no"));
    if (self->number == 0) CHECK(says(self, "because rank 1"));
}

static void a_hook_that_fails_ends_the_job_for_all(void **state)
{
    (void)state;
    for (int kind = THREADS; kind <= PROCESSES; kind++) {
        rank ranks[2];
        job what = {
            .kind = (job_kind)kind,
            .options = { .ranks = 2, .threads = 1, .heap_bytes = 64 << 20, .timeout_ns = HANG_NS },
            .run = fail_on_one
        };
        ms_abort_record cause = run_job(&what, ranks);
        for (int r = 0; r < 2; r++)
            if (*ranks[r].why) fail_msg("%s", ranks[r].why);
        assert_int_equal(cause.error.rank, 1);
    }
}

/* ------------------------------------------------------------ the beginning */

static void compare_models(rank *self)
{
    enum { COUNT = 11 };
    /* Position on rank 1; COUNT: it has one less; above: nothing. */
    const int changed = *(const int *)self->job->argument;
    ms_reducer_parameter parameters[COUNT];
    char names[COUNT][16];
    ms_tensor *all[COUNT];
    for (int i = 0; i < COUNT; i++) {
        bool other = self->number == 1 && i == changed;
        const int64_t shape[] = { 2, other && i % 2 ? 7 : i + 1 };
        OK(ms_tensor_new(self->engine, other && i % 3 == 0 ? MS_BF16 : MS_F32, 2, shape, &all[i]));
        snprintf(names[i], sizeof names[i], other && i % 2 == 0 && i % 3 ? "other" : "p%d", i);
        parameters[i] = (ms_reducer_parameter){ .tensor = all[i], .name = names[i] };
    }
    uint32_t count = self->number == 1 && changed == COUNT ? COUNT - 1 : COUNT;
    ms_status status = ms_ddp_compare(self->world, parameters, count);
    if (changed > COUNT) {
        OK(status);
    } else {
        char expected[64];
        snprintf(expected, sizeof expected, "parameter %d is ",
                 changed == COUNT ? COUNT : changed + 1);
        CHECK(status == MS_ERROR_MISMATCH && says(self, expected) && says(self, "on rank 0, 2")
              && says(self, "on rank 1"));
    }
    for (int i = 0; i < COUNT; i++) ms_tensor_release(all[i]);
}

static void the_first_parameter_that_differs_is_named(void **state)
{
    (void)state;
    for (int changed = 0; changed < 13; changed++) run_well(THREADS, 3, compare_models, &changed);
}

static void broadcast_values(rank *self)
{
    static const ms_dtype dtypes[] = { MS_F32, MS_I64, MS_F32, MS_BF16, MS_BOOL };
    ms_tensor *all[5];
    for (int i = 0; i < 5; i++) {
        const int64_t n = i == 2 ? 0 : 3 + i;
        uint32_t own = self->number * 5;
        OK(make(self, dtypes[i], n, false, &all[i]));
        OK(fill(all[i], input_value, (uint32_t[]){ own, (uint32_t)i }));
    }
    OK(ms_ddp_broadcast(self->world, all, 5, 1));
    for (int i = 0; i < 5; i++) {
        CHECK(equals(all[i], input_value, (uint32_t[]){ 5, (uint32_t)i }));
        ms_tensor_release(all[i]);
    }
}

static void values_are_those_of_the_root(void **state)
{
    (void)state;
    run_well(THREADS, 3, broadcast_values, NULL);
}

/* ------------------------------------------------------ failing allocations */

static ms_status whole_life(rank *self)
{
    static const ms_link_options bf16 = { .dtype = MS_BF16 }, average = { .op = MS_REDUCE_OP_AVG };
    const ms_link links[] = { { .kind = ms_link_find("cast"), .options = bf16 },
                              { .kind = ms_link_find("all_reduce"), .options = average } };
    model m;
    ms_reducer *reducer = NULL;
    ms_reducer_parameter parameter = { .name = "a" };
    ms_status status = build(self, &m);
    parameter.tensor = m.weights[0];
    if (!status) status = ms_ddp_compare(self->world, &parameter, 1);
    if (!status) status = ms_ddp_broadcast(self->world, m.weights, WEIGHTS, 0);
    if (!status)
        status =
            wrap(self, &m,
                 (ms_reducer_options){
                     .cap_bytes = small_caps, .cap_count = 2, .links = links, .link_count = 2 },
                 &reducer);
    for (uint32_t i = 0; i < 3 && !status; i++) {
        status = ms_reducer_forward(reducer, i != 1);
        if (!status) status = ms_reducer_forward_end(reducer);
        if (!status) status = pass(self, &m, 0, i, WEIGHTS, false);
    }
    if (!status) status = ms_gradient_source_step_end(ms_reducer_source(reducer));
    ms_reducer_free(reducer);
    drop(&m);
    return status;
}

/* Unused and delayed parameters, with old gradients too, and a pass without inputs. */
static ms_status life_of_parts(rank *self, bool static_graph)
{
    const ms_dtype half = MS_BF16;
    ms_reducer_options options = { .cap_bytes = small_caps,
                                   .cap_count = 2,
                                   .find_unused = !static_graph,
                                   .static_graph = static_graph,
                                   .delayed = 2,
                                   .delayed_dtype = &half };
    model m;
    ms_reducer *reducer = NULL;
    ms_tensor *loss = NULL;
    ms_status status = build(self, &m);
    if (!status) status = wrap(self, &m, options, &reducer);
    for (uint32_t i = 0; i < 3 && !status; i++) {
        status = ms_reducer_forward(reducer, true);
        if (!status) status = forward(self, &m, 0, i, static_graph || i == 1 ? 3 : 4, &loss);
        if (!status) status = ms_reducer_outputs(reducer, &loss, 1);
        if (!status) status = ms_backward(self->engine, &loss, NULL, 1, false);
        ms_tensor_release(loss);
        loss = NULL;
    }
    if (!status) status = ms_reducer_forward(reducer, true);
    if (!status) status = ms_reducer_shadow(reducer);
    ms_reducer_free(reducer);
    drop(&m);
    return status;
}

static ms_status planned_life(rank *self)
{
    static const uint32_t order[] = { 2, 0, 1, 4, 3 }, sizes[] = { 3, 2 };
    uint32_t seen[WEIGHTS];
    uint64_t ns[WEIGHTS];
    model m;
    ms_reducer *reducer = NULL;
    ms_status status = build(self, &m);
    if (!status) status = wrap(self, &m, (ms_reducer_options){ .planned = true }, &reducer);
    for (uint32_t i = 0; i < 2 && !status; i++) {
        status = ms_reducer_forward(reducer, true);
        if (!status) status = pass(self, &m, 0, i, WEIGHTS, false);
        if (!status) status = ms_gradient_source_await_times(ms_reducer_source(reducer));
        if (!status && ms_reducer_arrivals(reducer, seen, ns) != WEIGHTS)
            status = ms_engine_fail(self->engine, MS_ERROR_STATE, "nothing was noted");
        if (!status) status = ms_reducer_assign(reducer, order, sizes, 2);
    }
    ms_reducer_free(reducer);
    drop(&m);
    return status;
}

static ms_status any_life(rank *self, const void *which)
{
    int kind = *(const int *)which;
    if (kind == 0) return whole_life(self);
    return kind == 3 ? planned_life(self) : life_of_parts(self, kind == 2);
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    static const struct {
        int life;
        bool forever;
    } ways[] = { { 0, false }, { 0, true }, { 1, false }, { 2, true }, { 3, false } };
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++)
        fail_each_allocation(any_life, &ways[way].life, ways[way].forever);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(mistakes_are_named_and_end_the_job),
        cmocka_unit_test(a_hook_that_fails_ends_the_job_for_all),
        cmocka_unit_test(the_first_parameter_that_differs_is_named),
        cmocka_unit_test(values_are_those_of_the_root),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
