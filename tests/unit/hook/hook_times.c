/* hook_times.c: times and accounts of passes, filled by hand as ddp fills them. Other layers that
 * reduce by buckets rely on them. ctest: poisoned cuda-ranks cuda-local */
#include "comm_support.h"

#include "meter/pass_times.h"
#include "moonshard/ops.h"

enum { BUCKETS = 3, LENGTH = 1000, LINKS = 2 };

typedef struct buckets {
    ms_bucket items[BUCKETS];
    ms_times times;
} buckets;

static ms_status open_buckets(rank *self, uint32_t links, buckets *out)
{
    int64_t length = LENGTH;
    ms_status status = MS_OK;
    memset(out, 0, sizeof *out);
    for (uint32_t b = 0; b < BUCKETS && !status; b++) {
        ms_bucket *bucket = &out->items[b];
        bucket->engine = self->engine;
        bucket->group = self->world;
        bucket->index = bucket->place = b;
        status = ms_tensor_new(self->engine, MS_F32, 1, &length, &bucket->flat);
    }
    return status ? status : ms_times_open(&out->times, self->world, BUCKETS, BUCKETS, links);
}

static void close_buckets(buckets *all)
{
    for (uint32_t b = 0; b < BUCKETS; b++) ms_tensor_release(all->items[b].flat);
    ms_times_close(&all->times);
}

/* One bucket: an all_reduce in each of the links, the second one twice as often. */
static ms_status reduce(rank *self, buckets *all, uint32_t b)
{
    ms_bucket *bucket = &all->items[b];
    ms_stream *stream = NULL;
    ms_collective call = {
        .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_SUM, .in = bucket->flat, .bucket = (int32_t)b
    };
    ms_status status = ms_group_stream(self->world, 1, &stream);
    if (status) return status;
    ms_stream *before = ms_engine_set_current(self->engine, stream);
    status = ms_times_begin_reduction(&all->times, bucket);
    for (uint32_t i = 0; i < 3 && !status; i++) {
        status = ms_bucket_account(bucket, i == 0 ? 1 : 2);
        if (!status) status = ms_group_enqueue(self->world, 1, &call, NULL);
    }
    if (!status) status = ms_times_end_reduction(&all->times, bucket);
    ms_engine_set_current(self->engine, before);
    return status;
}

static ms_status run_pass(rank *self, buckets *all, uint64_t layout, bool with_gradients)
{
    ms_times *times = &all->times;
    ms_status status = ms_times_begin_pass(times, layout);
    if (!status) status = ms_times_note(times, MS_AT_BACKWARD);
    for (uint32_t b = 0; b < BUCKETS && !status; b++) {
        if (with_gradients) status = ms_times_gradient(times, BUCKETS - 1 - b);
        if (!status) status = ms_times_bucket_complete(times, b);
        if (!status) status = reduce(self, all, b);
    }
    if (!status) status = ms_times_note(times, MS_AT_WAIT);
    if (!status) status = ms_times_note(times, MS_AT_READY);
    if (!status) ms_times_end_pass(times);
    return status ? status : ms_engine_sync(self->engine);
}

/* ------------------------------------------------------------------- counts */

static void count_passes(rank *self)
{
    buckets all;
    const uint64_t payload = 3 * BUCKETS * LENGTH * sizeof(float);
    OK(open_buckets(self, LINKS, &all));
    CHECK(ms_times_stats(&all.times).iterations == 0 && ms_times_stats(&all.times).timed == 0);
    for (uint32_t pass = 1; pass <= 4; pass++) {
        OK(run_pass(self, &all, 1, false));
        ms_pass_stats stats = ms_times_stats(&all.times);
        CHECK(stats.iterations == pass && stats.timed == pass && stats.calls == BUCKETS);
        CHECK(stats.payload_bytes == payload && stats.step_ns == 0);
        CHECK(stats.wire_bytes == payload * 2 * (self->ranks - 1) / self->ranks);
        CHECK(stats.reduce_ns > 0 && stats.backward_ns > 0);
        for (uint32_t link = 1; link <= LINKS; link++) {
            ms_link_stats one = ms_times_link(&all.times, link);
            CHECK(one.calls == BUCKETS && one.payload_bytes == link * payload / 3 && one.ns > 0);
        }
        CHECK(ms_times_link(&all.times, 1).ns + ms_times_link(&all.times, 2).ns <= stats.reduce_ns);
    }
    close_buckets(&all);
}

static void counts_and_times_are_of_each_pass(void **state)
{
    (void)state;
    run_well(THREADS, 2, count_passes, NULL);
}

/* From the first step's end on, counts are those of whole steps. */
static void end_steps(rank *self)
{
    buckets all;
    OK(open_buckets(self, LINKS, &all));
    OK(run_pass(self, &all, 1, false));
    OK(ms_times_step_end(&all.times, true));
    OK(ms_engine_sync(self->engine));
    ms_pass_stats stats = ms_times_stats(&all.times);
    CHECK(stats.iterations == 1 && stats.timed == 1 && stats.step_ns > 0);
    OK(run_pass(self, &all, 1, false));
    stats = ms_times_stats(&all.times);
    CHECK(stats.iterations == 1 && stats.timed == 1); /* its step has not ended */
    OK(ms_times_step_end(&all.times, true));
    OK(ms_engine_sync(self->engine));
    stats = ms_times_stats(&all.times);
    CHECK(stats.iterations == 2 && stats.timed == 2 && stats.step_ns > 0);
    /* A step without a pass changes nothing. */
    OK(ms_times_step_end(&all.times, false));
    CHECK(ms_times_stats(&all.times).iterations == 2);
    close_buckets(&all);
}

static void counts_are_of_steps_that_end(void **state)
{
    (void)state;
    run_well(THREADS, 2, end_steps, NULL);
}

/* ------------------------------------------------------------ what was timed */

static void time_buckets(rank *self)
{
    buckets all;
    ms_bucket_times times;
    OK(open_buckets(self, 1, &all));
    CHECK(!ms_times_bucket(&all.times, 7, 0, &times) && times.reduce_ns == 0);
    OK(run_pass(self, &all, 7, true));
    ms_times_stats(&all.times);
    uint64_t last = 0;
    for (uint32_t b = 0; b < BUCKETS; b++) {
        CHECK(ms_times_bucket(&all.times, 7, b, &times));
        CHECK(times.ready_ns >= last && times.reduce_ns > 0);
        /* Gradients came in the opposite order of their positions, each before its bucket. */
        CHECK(all.times.arrived_ns[BUCKETS - 1 - b] <= times.ready_ns);
        CHECK(b == 0 || all.times.arrived_ns[BUCKETS - 1 - b] >= all.times.arrived_ns[BUCKETS - b]);
        last = times.ready_ns;
    }
    CHECK(!ms_times_bucket(&all.times, 8, 0, &times)); /* other buckets */
    /* A single link has no account of its own. */
    CHECK(all.times.costs == NULL && ms_times_link(&all.times, 1).calls == 0);
    close_buckets(&all);
}

static void buckets_are_timed(void **state)
{
    (void)state;
    run_well(THREADS, 2, time_buckets, NULL);
}

/* The pass continues: it counts once. */
static void reopen(rank *self)
{
    buckets all;
    OK(open_buckets(self, 1, &all));
    OK(run_pass(self, &all, 1, false));
    ms_times_reopen_pass(&all.times);
    for (uint32_t b = 0; b < BUCKETS; b++) OK(reduce(self, &all, b));
    OK(ms_times_note(&all.times, MS_AT_WAIT));
    OK(ms_times_note(&all.times, MS_AT_READY));
    ms_times_end_pass(&all.times);
    OK(ms_times_await(&all.times));
    OK(ms_engine_sync(self->engine));
    ms_pass_stats stats = ms_times_stats(&all.times);
    CHECK(stats.iterations == 1 && stats.timed == 1 && stats.calls == BUCKETS);
    close_buckets(&all);
}

static void a_pass_may_go_on(void **state)
{
    (void)state;
    run_well(THREADS, 2, reopen, NULL);
}

/* A pass may leave buckets out, and reduce the others in any order: counts are of what it has
 * reduced, and a bucket that is left out keeps its times. */
static void leave_out(rank *self)
{
    buckets all;
    ms_bucket_times times;
    const uint64_t payload = 3 * LENGTH * sizeof(float);
    OK(open_buckets(self, LINKS, &all));
    for (uint32_t turn = 0; turn < 3; turn++) {
        OK(ms_times_begin_pass(&all.times, 1));
        for (uint32_t i = 0; i < 2; i++) {
            /* 2 then 0, twice; then 2 and 1. */
            uint32_t b = i == 0 ? 2 : turn == 2;
            all.items[b].index = i;
            OK(reduce(self, &all, b));
        }
        OK(ms_times_note(&all.times, MS_AT_WAIT));
        OK(ms_times_note(&all.times, MS_AT_READY));
        ms_times_end_pass(&all.times);
        OK(ms_engine_sync(self->engine));
        ms_pass_stats stats = ms_times_stats(&all.times);
        CHECK(stats.timed == turn + 1 && stats.calls == 2 && stats.payload_bytes == 2 * payload);
        CHECK(ms_times_link(&all.times, 1).calls == 2 && stats.reduce_ns > 0);
        CHECK(ms_times_bucket(&all.times, 1, 2, &times) && times.reduce_ns > 0);
        CHECK(ms_times_bucket(&all.times, 1, 0, &times) && times.reduce_ns > 0);
        CHECK(ms_times_bucket(&all.times, 1, 1, &times) == (turn == 2));
    }
    close_buckets(&all);
}

static void buckets_may_be_left_out(void **state)
{
    (void)state;
    run_well(THREADS, 2, leave_out, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_and_times_are_of_each_pass),
        cmocka_unit_test(counts_are_of_steps_that_end),
        cmocka_unit_test(buckets_are_timed),
        cmocka_unit_test(a_pass_may_go_on),
        cmocka_unit_test(buckets_may_be_left_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
