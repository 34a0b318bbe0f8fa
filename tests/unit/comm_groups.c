/* comm_groups.c: groups of groups, splits that may not wait, and ranks whose host is far ahead on
 * several streams. */
#include "comm/local/control.h"

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
    /* The order hash tells in which of two deep groups a call was made. */
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

/* Time passes only where somebody looks at it: enough of it that a report's patience ends long
 * before the moment below. */
static uint64_t fast_clock(void *user)
{
    (void)user;
    return 1000000000u + (uint64_t)atomic_fetch_add(&reads, 1) * 10000000u;
}

/* Rank 1 looks as if its host were MS_CALLS_AHEAD - 1 calls ahead and had just overwritten the hash
 * of call 1 with that of the next one. Rank 0 must not take that for another call 1. */
static void overtake(rank *self)
{
    ms_tensor *t = NULL;
    const ms_local *local = self->world->comm->state;
    ms_member_line *line = ms_member(local->rendezvous, 0, 0, 1);
    ms_abort_record cause;
    OK(make(self, MS_F32, 8, false, &t));
    OK(fill(t, NULL, NULL));
    if (self->number == 1) {
        atomic_store(&line->issuing, 1 + MS_CALLS_AHEAD);
        atomic_store(&line->calls[1], 12345);
        atomic_store(&line->issued, MS_CALLS_AHEAD);
        for (unsigned begin = atomic_load(&reads);
             atomic_load(&reads) - begin < 120 && !ms_rendezvous_cause(self->rendezvous, &cause);)
            sched_yield();
        CHECK(!ms_rendezvous_cause(self->rendezvous, &cause));
    }
    OK(run_one(self, self->world,
               &(ms_collective){ .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 }));
    OK(ms_engine_sync(self->engine));
    ms_tensor_release(t);
}

static void a_hash_that_was_overwritten_is_not_compared(void **state)
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
        cmocka_unit_test(a_split_that_may_not_wait_enqueues_nothing),
        cmocka_unit_test(a_hash_that_was_overwritten_is_not_compared),
        cmocka_unit_test(a_host_may_be_far_ahead_on_several_streams),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
