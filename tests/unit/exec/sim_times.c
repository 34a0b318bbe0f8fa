/* sim_times.c: the times that the sim device estimates from the cost of work and the rates. */
#include "device_support.h"

#include <stdlib.h>
#include <string.h>

#include "moonshard/optim.h"
#include "moonshard/tensor.h"

static const ms_rates round_rates = {
    .flops_per_s = { [MS_COST_F32] = 1e9, [MS_COST_F16] = 2e9, [MS_COST_BF16] = 4e9 },
    .bytes_per_s = 1e9,
    .level_count = 2,
    .levels = { { .ranks = 4, .latency_ns = 100, .bytes_per_s = 1e9 },
                { .latency_ns = 1000, .bytes_per_s = 1e8 } },
};

static ms_engine *make_sim(const ms_rates *rates)
{
    ms_engine_options options = { .device = "sim", .rates = rates };
    ms_engine *engine = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

static void work(ms_stream *stream, ms_task_cost cost)
{
    static const ms_task task = { .name = "work" };
    assert_int_equal(ms_stream_enqueue(stream, &task, NULL, NULL, 0, cost, NULL), MS_OK);
}

/* The time of a new mark on the stream. */
static uint64_t now_on(ms_stream *stream)
{
    uint64_t ns = 0;
    ms_marks *marks = marks_of(ms_stream_engine(stream), 1);
    assert_int_equal(ms_marks_set(marks, 0, stream), MS_OK);
    assert_true(ms_marks_time(marks, 0, &ns));
    ms_marks_free(marks);
    return ns;
}

static void estimates_follow_from_cost_and_rates(void **state)
{
    (void)state;
    const struct {
        ms_task_cost cost;
        uint64_t ns;
    } cases[] = {
        { { .flops = 5000, .bytes = 300 }, 5000 },
        { { .flops = 300, .bytes = 5000 }, 5000 }, /* bound by memory */
        { { .flops = 8000, .dtype = MS_COST_F16 }, 4000 },
        { { .flops = 8000, .dtype = MS_COST_BF16 }, 2000 },
        { { .flops = 8000, .dtype = MS_COST_FP8 }, 1000 }, /* twice bf16 unless given */
        { { .flops = 8000, .dtype = 7 }, 8000 },           /* as f32 */
        /* Four ranks of one block: two rounds there, two back. */
        { { .wire_bytes = 5000, .ranks = 4, .first_rank = 4, .last_rank = 7 }, 5400 },
        { { .wire_bytes = 5000, .ranks = 3, .first_rank = 4, .last_rank = 7, .collective = 3 },
          5200 },
        /* Two ranks, of two blocks. */
        { { .wire_bytes = 500, .ranks = 2, .first_rank = 3, .last_rank = 4, .collective = 3 },
          6000 },
        /* A group of one rank sends nothing. */
        { { .bytes = 500, .ranks = 1, .first_rank = 3, .last_rank = 3 }, 500 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ms_engine *engine = make_sim(&round_rates);
        ms_stream *a = ms_engine_current(engine);
        uint64_t before = now_on(a);
        work(a, cases[i].cost);
        assert_int_equal(now_on(a) - before, cases[i].ns);
        ms_engine_free(engine);
    }
}

/* Names that are not listed reach all of the rates. */
static void tasks_reach_the_shares_of_their_names(void **state)
{
    (void)state;
    ms_rates rates = round_rates;
    rates.task_ns = 10;
    rates.share_count = 2;
    rates.shares[0] = (ms_kernel_share){ .name = "works", .flops = 0.125, .bytes = 0.125 };
    rates.shares[1] = (ms_kernel_share){ .name = "work", .flops = 0.5, .bytes = 0.25 };
    ms_engine *engine = make_sim(&rates);
    ms_stream *a = ms_engine_current(engine);
    assert_true(ms_engine_simulated_ns(engine) == 0);
    work(a, (ms_task_cost){ .flops = 1000 });
    assert_int_equal(now_on(a), 2010);
    work(a, (ms_task_cost){ .bytes = 1000 });
    assert_int_equal(now_on(a), 6020);
    /* A collective is no kernel of this rank. */
    work(a, (ms_task_cost){ .wire_bytes = 5000, .ranks = 4, .first_rank = 4, .last_rank = 7 });
    assert_int_equal(now_on(a), 11420);
    /* Until the work of all streams has ended. */
    ms_stream *b = side_of(engine);
    work(b, (ms_task_cost){ .flops = 500 });
    assert_true(ms_engine_simulated_ns(engine) == 11420);
    work(b, (ms_task_cost){ .flops = 10000 });
    assert_true(ms_engine_simulated_ns(engine) == 21020);
    ms_engine_free(engine);
}

static void streams_of_sim_run_side_by_side_and_wait(void **state)
{
    (void)state;
    ms_engine *engine = make_sim(&round_rates);
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    work(a, (ms_task_cost){ .flops = 1000 });
    ms_point early = ms_stream_last(a);
    work(a, (ms_task_cost){ .flops = 9000 });
    work(b, (ms_task_cost){ .flops = 400 });
    assert_int_equal(now_on(b), 400);
    assert_int_equal(ms_stream_wait(b, early), MS_OK);
    assert_int_equal(now_on(b), 1000); /* not 10000: what it waits for has ended by then */
    assert_int_equal(now_on(a), 10000);
    /* The work that is waited for has ended long ago. */
    work(b, (ms_task_cost){ .flops = 19000 });
    assert_int_equal(ms_stream_wait(b, ms_stream_last(a)), MS_OK);
    assert_int_equal(now_on(b), 20000);
    ms_engine_free(engine);
}

static void the_host_of_sim_has_a_clock(void **state)
{
    (void)state;
    ms_rates rates = round_rates;
    ms_engine *engine = make_sim(&rates);
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    /* Without waiting, the host is at 0; after a sync, where the stream was. */
    work(a, (ms_task_cost){ .flops = 3000 });
    assert_int_equal(now_on(b), 0);
    assert_int_equal(ms_stream_sync(a), MS_OK);
    assert_int_equal(now_on(b), 3000);
    /* The end of a step awaits the step before. */
    work(a, (ms_task_cost){ .flops = 2000 });
    assert_int_equal(ms_engine_step_end(engine, 1), MS_OK);
    work(a, (ms_task_cost){ .flops = 4000 });
    assert_int_equal(ms_engine_step_end(engine, 1), MS_OK);
    assert_int_equal(now_on(b), 5000);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    /* A stream that is full makes it wait: the first of these has ended when one more is there. */
    for (int i = 0; i < MS_STREAM_DEPTH; i++) work(a, (ms_task_cost){ .flops = 10 });
    assert_int_equal(now_on(b), 9000);
    work(a, (ms_task_cost){ .flops = 10 });
    assert_int_equal(now_on(b), 9010);
    ms_engine_free(engine);
    /* Enqueueing takes time on the host, if the rates say so. */
    rates.enqueue_ns = 7;
    engine = make_sim(&rates);
    a = ms_engine_current(engine);
    for (int i = 0; i < 10; i++) work(a, (ms_task_cost){ .flops = 1 });
    assert_int_equal(now_on(a), 77); /* with the mark */
    ms_engine_free(engine);
}

/* The decisions of a program: addresses, waits, numbers, the peak. Its streams have different
 * amounts of work, and the rates determine whether they keep up with the host. */
static void decide(const ms_rates *rates, uint64_t decisions[4], uint64_t *ns)
{
    ms_engine *engine = make_sim(rates);
    ms_stream *streams[2] = { ms_engine_current(engine), side_of(engine) };
    ms_storage *storages[8] = { NULL };
    uint64_t draw = 99, hash = 0;
    for (int i = 0; i < 5000; i++) {
        draw = draw * 6364136223846793005u + 1442695040888963407u;
        ms_stream *stream = streams[draw >> 40 & 1];
        ms_storage **at = &storages[draw >> 50 & 7];
        ms_storage_release(*at);
        *at = storage_of(stream, (draw >> 33 & 1023) * 64 + 64);
        uint64_t fact = (uint64_t)(uintptr_t)ms_storage_data(*at);
        hash = ms_hash(&fact, sizeof fact, hash);
        assert_int_equal(ms_stream_copy_in(stream, *at, 0, NULL, 64, NULL), MS_OK);
        work(streams[draw >> 45 & 1], (ms_task_cost){ .flops = (double)(draw >> 33 & 65535) });
        if (i % 100 == 0) assert_int_equal(ms_engine_step_end(engine, 1), MS_OK);
    }
    decisions[0] = hash;
    decisions[1] = ms_engine_memory(engine).peak;
    decisions[2] = ms_engine_memory(engine).waits;
    decisions[3] = ms_stream_last(streams[0]).seq + ms_stream_last(streams[1]).seq;
    *ns = now_on(streams[0]);
    for (int i = 0; i < 8; i++) ms_storage_release(storages[i]);
    ms_engine_free(engine);
}

static ms_tensor *tensor(ms_engine *engine, ms_dtype dtype, uint32_t ndim, int64_t count)
{
    ms_tensor *made = NULL;
    assert_int_equal(ms_tensor_new(engine, dtype, ndim, &count, &made), MS_OK);
    return made;
}

/* AdamW of 1000 numbers in bf16: the gradient is read, both states are read and written; without
 * an f32 copy (a master) the parameter too, with one the copy, and the parameter is written. */
static void a_step_of_an_optimizer_moves_its_bytes(void **state)
{
    (void)state;
    for (int has_master = 0; has_master < 2; has_master++) {
        ms_engine *engine = make_sim(&round_rates);
        ms_stream *stream = ms_engine_current(engine);
        ms_optimizer_step step = { .kind = MS_ADAMW,
                                   .hyper = ms_optimizer_defaults(MS_ADAMW),
                                   .parameter = tensor(engine, MS_BF16, 1, 1000),
                                   .gradient = tensor(engine, MS_BF16, 1, 1000),
                                   .states = { tensor(engine, MS_F32, 1, 1000),
                                               tensor(engine, MS_F32, 1, 1000) },
                                   .count = tensor(engine, MS_I64, 0, 1) };
        if (has_master) step.master = tensor(engine, MS_F32, 1, 1000);
        uint64_t before = now_on(stream);
        assert_int_equal(ms_optimizer_step_param(engine, &step), MS_OK);
        assert_int_equal(now_on(stream) - before,
                         2000 + 2 * 8000 + (has_master ? 2000 + 8000 : 4000));
        ms_tensor *all[] = { step.parameter, step.gradient, step.states[0],
                             step.states[1], step.count,    step.master };
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) ms_tensor_release(all[i]);
        ms_engine_free(engine);
    }
}

static void nothing_but_times_depends_on_rates(void **state)
{
    (void)state;
    ms_rates slow = round_rates;
    slow.flops_per_s[MS_COST_F32] = 1;
    slow.bytes_per_s = 1e-3;
    slow.enqueue_ns = 1e6;
    uint64_t usual[4], again[4], ns[3];
    decide(&round_rates, usual, &ns[0]);
    decide(&round_rates, again, &ns[1]);
    assert_memory_equal(usual, again, sizeof usual);
    assert_true(ns[0] > 0 && ns[0] == ns[1]); /* and times are the same in every run */
    decide(&slow, again, &ns[2]);
    assert_memory_equal(usual, again, sizeof usual);
    assert_true(ns[2] > 1000 * ns[0]);
}

static void rates_that_cannot_be_are_refused(void **state)
{
    (void)state;
    assert_null(ms_rates_problem(ms_rates_default()));
    assert_null(ms_rates_problem(&round_rates));
    for (int i = 0; i < 15; i++) {
        ms_rates rates = round_rates;
        const char *word = i < 2 ? "flops_per_s" : "links";
        if (i == 0) rates.flops_per_s[MS_COST_BF16] = 0;
        if (i == 1) rates.flops_per_s[MS_COST_F32] = 1.0 / 0.0;
        if (i == 2) rates.bytes_per_s = -1, word = "bytes_per_s must";
        if (i == 3) rates.level_count = 0;
        if (i == 4) rates.level_count = MS_LEVELS_MAX + 1;
        if (i == 5) rates.levels[1].latency_ns = -1;
        if (i == 6) rates.levels[0].bytes_per_s = 0;
        if (i == 7) rates.levels[1].ranks = 8;
        if (i == 8) rates.levels[0].ranks = 0;
        if (i == 9) rates.level_count = 3, rates.levels[1].ranks = 4;
        if (i == 10) rates.enqueue_ns = -1, word = "enqueue_ns";
        if (i == 11) rates.task_ns = -1, word = "task_ns";
        if (i > 11) word = "shares", rates.share_count = 1;
        rates.shares[0] = (ms_kernel_share){ .name = "work", .flops = 1, .bytes = 1 };
        if (i == 12) rates.share_count = MS_KERNEL_SHARES_MAX + 1;
        if (i == 13) rates.shares[0].flops = 1.01;
        if (i == 14) rates.shares[0].bytes = 0;
        ms_engine_options options = { .device = "sim", .rates = &rates };
        ms_engine *engine = NULL;
        ms_error error;
        assert_int_equal(ms_engine_new(&options, &error, &engine), MS_ERROR_ARGUMENT);
        assert_null(engine);
        assert_non_null(strstr(error.message, word));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(estimates_follow_from_cost_and_rates),
        cmocka_unit_test(streams_of_sim_run_side_by_side_and_wait),
        cmocka_unit_test(the_host_of_sim_has_a_clock),
        cmocka_unit_test(tasks_reach_the_shares_of_their_names),
        cmocka_unit_test(a_step_of_an_optimizer_moves_its_bytes),
        cmocka_unit_test(nothing_but_times_depends_on_rates),
        cmocka_unit_test(rates_that_cannot_be_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
