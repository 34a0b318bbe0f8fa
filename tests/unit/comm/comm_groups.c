/* comm_groups.c: groups of groups, splits that may not wait, and ranks whose host is far ahead on
 * several streams. ctest: cuda-local */
#include "comm/control/shm/state.h"

#include <sched.h>
#include <stdatomic.h>

#include "comm_support.h"

enum { NESTED = 20 };

/* -------------------------------------------------------------------- names */

static void nest(rank *self)
{
    static const uint32_t both[] = { 0, 1 }, two = 2;
    ms_group *groups[NESTED + 1] = { self->world };
    ms_comm_record(self->engine, true);
    for (int i = 0; i < NESTED; i++) {
        OK(ms_group_split(groups[i], 1, &two, both, &groups[i + 1]));
        for (int k = 0; k <= i; k++)
            CHECK(strcmp(ms_group_name(groups[i + 1]), ms_group_name(groups[k])) != 0);
    }
    CHECK(strlen(ms_group_name(groups[NESTED])) == strlen("world") + NESTED * strlen("/0.0"));
    /* The order hash depends on which of two deep groups a call was made in. */
    uint64_t hashes[2];
    for (int i = 0; i < 2; i++) {
        ms_tensor *t = NULL;
        ms_comm_record(self->engine, false);
        ms_comm_record(self->engine, true);
        OK(make(self, MS_F32, 8, false, &t));
        OK(fill(t, NULL, NULL));
        OK(run_one(self, groups[NESTED - i],
                   &(ms_collective){ .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 }));
        hashes[i] = ms_comm_order_hash(self->engine);
        ms_tensor_release(t);
    }
    CHECK(hashes[0] != hashes[1]);
}

static void nested_groups_have_names_of_their_own(void **state)
{
    (void)state;
    run_well(THREADS, 2, nest, NULL);
    rank self = { .ranks = 2 };
    ms_engine_options options = { .threads = 1, .memory_bytes = 64 << 20 };
    assert_int_equal(ms_engine_new(&options, NULL, &self.engine), MS_OK);
    assert_int_equal(ms_comm_open_fake(self.engine, 0, 2, &self.world), MS_OK);
    nest(&self);
    ms_engine_free(self.engine);
    if (*self.why) fail_msg("%s", self.why);
}

/* ------------------------------------------------------------------ streams */

enum { PARTS = 40, OTHERS = 3 };

/* Groups have streams of their own while there are enough; then they share the world's. Enough
 * streams remain for a rank's other needs: the world's channels, send and recv, and others. */
static void many_groups_leave_streams_for_others(void **state)
{
    (void)state;
    static const uint32_t both[] = { 0, 1 }, two = 2;
    ms_engine_options options = { .device = "sim", .memory_bytes = 64 << 20 };
    ms_engine *engine = NULL;
    ms_group *world = NULL, *part = NULL;
    ms_stream *streams[PARTS], *shared = NULL, *other = NULL;
    uint32_t own = 0;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    assert_int_equal(ms_comm_open_fake(engine, 0, 2, &world), MS_OK);
    for (uint32_t p = 0; p < PARTS; p++) {
        assert_int_equal(ms_group_split(world, 1, &two, both, &part), MS_OK);
        assert_int_equal(ms_group_stream(part, 1, &streams[p]), MS_OK);
        assert_int_equal(ms_stream_priority(streams[p]), MS_PRIORITY_HIGH);
    }
    for (uint32_t channel = 1; channel <= MS_CHANNELS; channel++)
        assert_int_equal(ms_group_stream(world, channel, &shared), MS_OK);
    assert_int_equal(ms_group_stream(world, 1, &shared), MS_OK);
    while (own < PARTS && streams[own] != shared) own++;
    /* Hybrid sharding with offload needs 11 streams at once. */
    assert_true(own >= 11 && own < PARTS);
    for (uint32_t p = 0; p < own; p++)
        for (uint32_t q = 0; q < p; q++) assert_ptr_not_equal(streams[p], streams[q]);
    for (uint32_t p = own; p < PARTS; p++) assert_ptr_equal(streams[p], shared);
    const char *const names[OTHERS] = { "send", "recv", "offload" };
    for (int i = 0; i < OTHERS; i++)
        assert_int_equal(ms_engine_stream(engine, names[i], &other), MS_OK);
    ms_engine_free(engine);
}

/* ------------------------------------------------ where waits are forbidden */

static void split_inside_a_hook(rank *self)
{
    static const uint32_t both[] = { 0, 1 }, two = 2;
    ms_group *part = NULL;
    if (self->number == 0) {
        ms_engine_forbid_sync(self->engine, 1);
        CHECK(ms_group_split(self->world, 1, &two, both, &part) == MS_ERROR_STATE);
        CHECK(strstr(ms_engine_error(self->engine)->message, "waits for the device"));
        CHECK(ms_group_barrier(self->world, 0) == MS_ERROR_STATE);
        ms_engine_forbid_sync(self->engine, -1);
    }
    /* Nothing was enqueued: the ranks are still at the same call. */
    OK(ms_group_split(self->world, 1, &two, both, &part));
    OK(ms_group_barrier(part, 0));
}

static void a_split_that_may_not_wait_enqueues_nothing(void **state)
{
    (void)state;
    run_well(THREADS, 2, split_inside_a_hook, NULL);
}

/* ------------------------------------------------ far ahead on many streams */

static atomic_uint reads;

/* The clock advances only when it is read, by so much that the time limit of a report passes long
 * before the moment below. */
static uint64_t fast_clock(void *user)
{
    (void)user;
    return 1000000000u + (uint64_t)atomic_fetch_add(&reads, 1) * 50000000u;
}

/* Rank 1 looks as if its host were MS_CALLS_AHEAD calls ahead and had overwritten the claim of call
 * 1 with a later one. Rank 0 must not take that for another call 1. */
static void overtake(rank *self)
{
    ms_tensor *t = NULL;
    ms_member_line *line = ms_member(ms_shm_files_of(self->rendezvous), 0, 0, 1);
    ms_abort_record cause;
    OK(make(self, MS_F32, 8, false, &t));
    OK(fill(t, NULL, NULL));
    if (self->number == 1) {
        atomic_store(&line->claims[1], 12345 << 16 | 2); /* a hash, and the second lap */
        atomic_store(&line->issued, MS_CALLS_AHEAD);
        for (unsigned begin = atomic_load(&reads);
             atomic_load(&reads) - begin < 30 && !ms_rendezvous_cause(self->rendezvous, &cause);)
            nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
        CHECK(!ms_rendezvous_cause(self->rendezvous, &cause));
    }
    OK(run_one(self, self->world,
               &(ms_collective){ .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 }));
    OK(ms_engine_sync(self->engine));
    ms_tensor_release(t);
}

static void a_claim_that_was_overwritten_is_not_compared(void **state)
{
    (void)state;
    rank ranks[2];
    ms_os os = *ms_os_posix();
    os.monotonic_ns = fast_clock;
    job work = { .kind = THREADS,
                 .loose = true,
                 .os = &os,
                 .run = overtake,
                 .options = { .ranks = 2,
                              .threads = 1,
                              .heap_bytes = 16 << 20,
                              .timeout_ns = 3000000000000u } };
    ms_abort_record cause = run_job(&work, ranks);
    for (int r = 0; r < 2; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
    assert_int_equal(cause.reason, MS_ABORT_NONE);
}

enum { FAR = 3 * MS_CALLS_AHEAD, STREAMS = 6 };

typedef struct gap {
    _Atomic int far;
} gap;

/* Rank 1's task waits at a gate, so rank 1 has entered nothing when rank 0 makes another call. Rank
 * 0 detects the difference before its launch, and shows both sides. */
typedef struct gate_args {
    _Atomic int *open;
} gate_args;

static ms_task_result pass_gate(ms_run *run, void *arguments)
{
    (void)run;
    const gate_args *args = arguments;
    return atomic_load(args->open) ? MS_TASK_DONE : MS_TASK_PENDING;
}

static const ms_task gate_task = { .name = "gate",
                                   .function = pass_gate,
                                   .args_bytes = sizeof(gate_args) };

typedef struct differing {
    bool pair; /* rank 1 sends to rank 0 */
    _Atomic int called, ended;
} differing;

static void call_something_else(rank *self)
{
    differing *shared = (differing *)(uintptr_t)self->job->argument;
    _Atomic int open = 0;
    ms_stream *stream = NULL;
    ms_tensor *t = NULL;
    ms_point gate;
    OK(make(self, MS_F32, 8 + self->number, false, &t));
    ms_collective call = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1, .label = "late" };
    const char *mine = "rank 0: all_reduce #1", *theirs = "rank 1: all_reduce #1";
    OK(ms_group_stream(self->world, 1, &stream));
    if (shared->pair) {
        call.kind = self->number ? MS_SEND : MS_RECV;
        call.root = 1 - self->number;
        call.stream = stream;
        mine = "rank 0: recv #1";
        theirs = "rank 1: send #1";
    }
    if (self->number == 1) {
        OK(ms_stream_enqueue(ms_engine_current(self->engine), &gate_task, &(gate_args){ &open },
                             NULL, 0, (ms_task_cost){ 0 }, &gate));
        OK(ms_stream_wait(stream, gate));
        OK(ms_group_enqueue(self->world, 1, &call, NULL));
        atomic_store(&shared->called, 1);
        while (!atomic_load(&shared->ended)) sched_yield();
        atomic_store(&open, 1);
        CHECK(ms_engine_sync(self->engine) == MS_ERROR_MISMATCH);
    } else {
        while (!atomic_load(&shared->called)) sched_yield();
        ms_point before = ms_stream_last(stream);
        ms_status status = ms_group_enqueue(self->world, 1, &call, NULL);
        atomic_store(&shared->ended, 1);
        CHECK(status == MS_ERROR_MISMATCH);
        const char *text = ms_engine_error(self->engine)->message;
        CHECK(strstr(text, "ranks disagree") && strstr(text, mine) && strstr(text, "f32 x 8")
              && strstr(text, theirs) && strstr(text, "f32 x 9"));
        CHECK(ms_group_traffic(self->world, MS_COLLECTIVES).calls == 0);
        CHECK(ms_stream_last(stream).seq == before.seq);
    }
    ms_tensor_release(t);
}

static void the_later_of_two_that_disagree_finds_it_before_its_launch(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    for (int pair = 0; pair < 2; pair++) {
        rank ranks[2];
        differing shared = { .pair = pair };
        job work = { .kind = THREADS,
                     .run = call_something_else,
                     .argument = &shared,
                     .options = { .ranks = 2, .threads = 1, .heap_bytes = 16 << 20 } };
        ms_abort_record cause = run_job(&work, ranks);
        for (int r = 0; r < 2; r++)
            if (*ranks[r].why) fail_msg("%s", ranks[r].why);
        assert_int_equal(cause.reason, MS_ABORT_MISMATCH);
    }
}

/* Calls of one channel on several streams: rank 1's host has enqueued all of them before rank 0's
 * first. */
static void call_on_many_streams(rank *self)
{
    gap *shared = (gap *)(uintptr_t)self->job->argument;
    ms_stream *streams[STREAMS];
    for (int s = 0; s < STREAMS; s++) {
        char name[24];
        snprintf(name, sizeof name, "side %d", s);
        OK(ms_engine_stream(self->engine, name, &streams[s]));
    }
    while (self->number == 0 && !atomic_load(&shared->far)) sched_yield();
    for (int i = 0; i < FAR; i++) {
        ms_collective barrier = { .kind = MS_BARRIER,
                                  .bucket = -1,
                                  .stream = streams[i * STREAMS / FAR] };
        OK(ms_group_enqueue(self->world, 1, &barrier, NULL));
    }
    if (self->number == 1) atomic_store(&shared->far, 1);
    OK(ms_engine_sync(self->engine));
}

static void a_host_may_be_far_ahead_on_several_streams(void **state)
{
    (void)state;
    gap shared = { 0 };
    run_well(THREADS, 2, call_on_many_streams, &shared);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nested_groups_have_names_of_their_own),
        cmocka_unit_test(many_groups_leave_streams_for_others),
        cmocka_unit_test(a_split_that_may_not_wait_enqueues_nothing),
        cmocka_unit_test(a_claim_that_was_overwritten_is_not_compared),
        cmocka_unit_test(the_later_of_two_that_disagree_finds_it_before_its_launch),
        cmocka_unit_test(a_host_may_be_far_ahead_on_several_streams),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
