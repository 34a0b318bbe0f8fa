/* ddp_hooks.c: native chains, hooks of the host, and the callback for reduced buckets.
 * ctest: each-isa poisoned cuda-ranks cuda-local */
#include "ddp_support.h"

/* -------------------------------------------------------------------- hooks */

static void native_chains(rank *self)
{
    float got[33];
    ms_link reduce = { .kind = ms_link_find("reduce"), .options = { .op = MS_REDUCE_OP_AVG } };
    ms_link f16[] = { { .kind = ms_link_find("cast"), .options = { .dtype = MS_F16 } }, reduce };
    OK(reduce_constant(self, &(ms_reducer_options){ .links = f16, .link_count = 2 }, 40000, 33,
                       got));
    for (int i = 0; i < 33; i++) CHECK(got[i] == 40000); /* the sum is no f16 number */
    OK(reduce_constant(self, &(ms_reducer_options){ .links = f16, .link_count = 2 },
                       1.0 / 7 * (self->number + 1), 1, got));
    float expected = 0;
    for (uint32_t r = 0; r < self->ranks; r++)
        expected += ms_float_from_f16(ms_f16_from_float((float)(1.0 / 7 * (r + 1))))
                    * (1.0f / (float)self->ranks);
    CHECK(got[0] == ms_float_from_f16(ms_f16_from_float(expected))
          && got[0] != (float)(1.0 / 7 * (self->ranks + 1) / 2));
    ms_link bf16[] = { { .kind = ms_link_find("cast"), .options = { .dtype = MS_BF16 } },
                       f16[0],
                       { .kind = ms_link_find("all_reduce"),
                         .options = { .op = MS_REDUCE_OP_AVG } } };
    OK(reduce_constant(self, &(ms_reducer_options){ .links = bf16, .link_count = 3 },
                       self->number + 1, 33, got));
    CHECK(got[32] == (float)(self->ranks + 1) / 2);
    ms_link sum = { .kind = ms_link_find("all_reduce"), .options = { .op = MS_REDUCE_OP_MAX } };
    OK(reduce_constant(self, &(ms_reducer_options){ .links = &sum, .link_count = 1 }, self->number,
                       4, got));
    CHECK(got[3] == (float)(self->ranks - 1));
    ms_link noop = { .kind = ms_link_find("noop") };
    OK(reduce_constant(self, &(ms_reducer_options){ .links = &noop, .link_count = 1 }, self->number,
                       4, got));
    CHECK(got[3] == (float)self->number);
    ms_link wrong[] = { noop, reduce };
    CHECK(reduce_constant(self, &(ms_reducer_options){ .links = wrong, .link_count = 2 }, 1, 1, got)
          == MS_ERROR_ARGUMENT);
    CHECK(reduce_constant(self, &(ms_reducer_options){ .links = f16, .link_count = 1 }, 1, 1, got)
          == MS_ERROR_ARGUMENT);
}

static void native_links_do_what_they_say(void **state)
{
    (void)state;
    assert_null(ms_link_find("allreduce"));
    for (uint32_t ranks = 2; ranks <= 3; ranks++) run_well(THREADS, ranks, native_chains, NULL);
}

/* A hook that gives a tensor of its own back, ready on a stream of its own. */
static ms_status doubled(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    int *calls = user;
    ms_stream *own = NULL, *before = NULL;
    ms_attributes two = { .scalar = { .value = 2 } };
    ++*calls;
    ms_status status = ms_engine_stream(bucket->engine, "own", &own);
    if (!status) status = ms_stream_wait(own, ms_stream_last(ms_engine_current(bucket->engine)));
    if (status) return status;
    before = ms_engine_set_current(bucket->engine, own);
    status =
        ms_op_apply(bucket->engine, &ms_op_mul_scalar, &two, false, &bucket->buffer, 1, result, 1);
    *ready = ms_stream_last(own);
    ms_engine_set_current(bucket->engine, before);
    return status;
}

static void freed(void *user) { *(int *)user += 100; }

static void own_hooks(rank *self)
{
    float got[33];
    int calls = 0;
    OK(reduce_constant(
        self, &(ms_reducer_options){ .hook = doubled, .hook_user = &calls, .hook_free = freed },
        1.0 + self->number, 33, got));
    CHECK(got[0] == 2.0f * (float)(self->number + 1) && got[32] == got[0]);
    CHECK(calls == 101);
}

static void a_hook_may_return_what_it_made_elsewhere(void **state)
{
    (void)state;
    run_well(THREADS, 2, own_hooks, NULL);
}

/* --------------------------------------------------- as buckets are reduced */

/* Steps on a stream of its own as soon as a bucket is reduced, and consumes the gradients. */
typedef struct stepper {
    ms_reducer *reducer;
    char calls[96];
    ms_status fails;
} stepper;

static ms_status step_parameter(ms_engine *engine, ms_tensor *weight)
{
    ms_tensor *scaled = NULL, *inputs[2] = { weight }, *same = NULL;
    ms_tensor *gradient = ms_tensor_grad(weight);
    ms_attributes rate = { .scalar = { .value = 0.5 } };
    ms_status status =
        ms_op_apply(engine, &ms_op_mul_scalar, &rate, false, &gradient, 1, &scaled, 1);
    inputs[1] = scaled;
    if (!status) status = ms_op_apply(engine, &ms_op_sub, NULL, true, inputs, 2, &same, 1);
    ms_tensor_release(scaled);
    ms_tensor_release(same);
    return status ? status : ms_tensor_set_grad(weight, NULL);
}

static ms_status step_early(void *user, uint32_t index)
{
    stepper *s = user;
    const ms_bucket *bucket = ms_gradient_source_bucket(ms_reducer_source(s->reducer),
                                                        index == MS_REDUCED_ALL ? 0 : index);
    ms_engine *engine = bucket->engine;
    ms_stream *own = NULL, *model_stream = ms_engine_current(engine);
    snprintf(s->calls + strlen(s->calls), 16, index == MS_REDUCED_ALL ? "end " : "%u ", index);
    if (s->fails) return ms_engine_fail(engine, s->fails, "an optimizer that says no");
    ms_status status = ms_engine_stream(engine, "optimizer", &own);
    if (index == MS_REDUCED_ALL)
        return status ? status : ms_stream_wait(model_stream, ms_stream_last(own));
    ms_point ready[2];
    ms_gradient_source_ready(ms_reducer_source(s->reducer), index, ready);
    for (int i = 0; i < 2 && !status; i++) status = ms_stream_wait(own, ready[i]);
    /* Backward reads the weights. */
    if (!status) status = ms_stream_wait(own, ms_stream_last(model_stream));
    if (status) return status;
    ms_engine_set_current(engine, own);
    for (uint32_t i = 0; i < bucket->count && !status; i++)
        status = step_parameter(engine, bucket->parameters[i]);
    ms_engine_set_current(engine, model_stream);
    return status;
}

static void step_some(rank *self)
{
    model m, reference;
    stepper s = { 0 };
    ms_reducer *other = NULL;
    ms_bucket_times times;
    OK(build(self, &m));
    OK(build(self, &reference));
    OK(wrap(self, &m, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2 }, &s.reducer));
    OK(wrap(self, &reference, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2 },
            &other));
    ms_gradient_source_set_on_reduced(ms_reducer_source(s.reducer), step_early, &s, NULL);
    for (uint32_t iteration = 0; iteration < 4; iteration++) {
        OK(ms_reducer_forward(s.reducer, false)); /* without synchronization: no call */
        OK(pass(self, &m, self->number, 9, WEIGHTS, false));
        OK(clear(&m));
        OK(ms_reducer_forward(s.reducer, true));
        OK(pass(self, &m, self->number, iteration, WEIGHTS, false));
        OK(ms_reducer_forward(other, true));
        OK(pass(self, &reference, self->number, iteration, WEIGHTS, false));
        for (int w = 0; w < WEIGHTS; w++) {
            CHECK(!ms_tensor_grad(m.weights[w]));
            OK(step_parameter(self->engine, reference.weights[w]));
        }
        OK(ms_engine_sync(self->engine));
        ms_gradient_source_stats(ms_reducer_source(s.reducer));
        for (uint32_t b = 0; b < ms_gradient_source_buckets(ms_reducer_source(s.reducer)); b++) {
            CHECK(ms_gradient_source_bucket_times(ms_reducer_source(s.reducer), b, &times));
            CHECK(times.ready_ns > 0 && times.ready_ns < 1800000000000u && times.reduce_ns > 0
                  && times.reduce_ns < 1800000000000u);
        }
    }
    CHECK(strcmp(s.calls, "0 end 0 1 2 end 0 1 2 end 0 1 2 end ") == 0);
    for (int w = 0; w < WEIGHTS; w++) {
        float got[1024], expected[1024];
        OK(ms_tensor_read(m.weights[w], got, ms_tensor_bytes(m.weights[w])));
        OK(ms_tensor_read(reference.weights[w], expected, ms_tensor_bytes(m.weights[w])));
        CHECK(memcmp(got, expected, ms_tensor_bytes(m.weights[w])) == 0);
    }
    ms_reducer_free(other);
    ms_reducer_free(s.reducer);
    drop(&m);
    drop(&reference);
}

static void fail_early(rank *self)
{
    model m;
    stepper s = { .fails = MS_ERROR_STATE };
    OK(build(self, &m));
    OK(wrap(self, &m, (ms_reducer_options){ 0 }, &s.reducer));
    ms_gradient_source_set_on_reduced(ms_reducer_source(s.reducer), step_early, &s, NULL);
    OK(ms_reducer_forward(s.reducer, true));
    CHECK(pass(self, &m, 0, 0, WEIGHTS, false) == MS_ERROR_STATE
          && strstr(ms_engine_error(self->engine)->message, "says no"));
    drop(&m);
}

static void whoever_steps_early_is_told_of_each_bucket(void **state)
{
    (void)state;
    run_well(THREADS, 2, step_some, NULL);
    run_well(PROCESSES, 3, step_some, NULL);
    rank ranks[1];
    job what = {
        .kind = THREADS,
        .options = { .ranks = 1, .threads = 1, .heap_bytes = 64 << 20, .timeout_ns = HANG_NS },
        .run = fail_early
    };
    assert_int_equal(run_job(&what, ranks).reason, MS_ABORT_RAISED);
    if (*ranks[0].why) fail_msg("%s", ranks[0].why);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(native_links_do_what_they_say),
        cmocka_unit_test(a_hook_may_return_what_it_made_elsewhere),
        cmocka_unit_test(whoever_steps_early_is_told_of_each_bucket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
