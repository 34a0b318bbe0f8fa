/* comm_deadlock.c: ranks that all wait for each other are found, whatever they wait in; ranks of
 * which one still does something are left alone. */
#include "comm_support.h"

#include <sched.h>
#include <stdatomic.h>

enum { RANKS = 4 };

/* Enqueued on its own stream; the compute stream does not wait for it. */
static ms_status start(rank *self, ms_collective_kind kind, uint32_t other, ms_tensor *tensor)
{
    ms_point ready;
    return ms_group_enqueue(
        self->world, 1, &(ms_collective){ .kind = kind, .root = other, .in = tensor, .bucket = -1 },
        &ready);
}

static ms_status make_two(rank *self, ms_tensor *tensors[2])
{
    for (int i = 0; i < 2; i++) {
        ms_status status = make(self, MS_F32, 8, false, &tensors[i]);
        if (!status) status = fill(tensors[i], NULL, NULL);
        if (status) return status;
    }
    return MS_OK;
}

static void release_two(ms_tensor *tensors[2])
{
    for (int i = 0; i < 2; i++) ms_tensor_release(tensors[i]);
}

static void expect_cause(const rank *ranks, uint32_t count, const ms_abort_record *cause,
                         const char *const *parts)
{
    for (uint32_t r = 0; r < count; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
    assert_int_equal(cause->reason, MS_ABORT_MISMATCH);
    assert_int_equal(cause->error.rank, -1);
    for (; *parts; parts++)
        if (!strstr(cause->error.message, *parts))
            fail_msg("no '%s' in: %s", *parts, cause->error.message);
}

static atomic_uint reads;

static uint64_t read_clock(void *user)
{
    atomic_fetch_add(&reads, 1);
    return ms_os_posix()->monotonic_ns(user);
}

static const job_kind kinds[] = { THREADS, PROCESSES };

/* The timeout is long, so it is not the timeout that ends the job. */
static ms_abort_record run_ranks(job_kind kind, uint32_t count, void (*run)(rank *),
                                 uint64_t latency_ns, rank *ranks)
{
    ms_os os = *ms_os_posix();
    os.monotonic_ns = read_clock;
    job work = { .kind = kind,
                 .loose = true,
                 .os = &os,
                 .run = run,
                 .options = { .ranks = count,
                              .threads = 1,
                              .heap_bytes = 16 << 20,
                              .timeout_ns = 300000000000u,
                              .link_latency_ns = latency_ns } };
    return run_job(&work, ranks);
}

/* ----------------------------------------------------------- standing still */

static void one_reduces_the_other_receives(rank *self)
{
    ms_tensor *t[2] = { NULL };
    OK(make_two(self, t));
    OK(start(self, self->number ? MS_RECV : MS_ALL_REDUCE, 0, t[0]));
    CHECK(ms_engine_sync(self->engine) == MS_ERROR_MISMATCH);
    release_two(t);
}

static void a_collective_and_a_receive(void **state)
{
    (void)state;
    for (size_t k = 0; k < 2; k++) {
        rank ranks[2];
        ms_abort_record cause = run_ranks(kinds[k], 2, one_reduces_the_other_receives, 0, ranks);
        expect_cause(ranks, 2, &cause,
                     (const char *[]){ "wait for each other",
                                       "\n  rank 0: all_reduce #1 of world [f32 x 8, sum]",
                                       "\n  rank 1: recv #1 of world [f32 x 8, peer 0]", NULL });
    }
}

/* Each of three receives from the next before it sends; the fourth has left. */
static void receive_in_a_ring(rank *self)
{
    ms_tensor *t[2] = { NULL };
    if (self->number == 3) return;
    OK(make_two(self, t));
    OK(start(self, MS_RECV, (self->number + 1) % 3, t[0]));
    CHECK(ms_engine_sync(self->engine) == MS_ERROR_MISMATCH);
    CHECK(start(self, MS_SEND, (self->number + 2) % 3, t[1])); /* the job has ended */
    release_two(t);
}

static void three_in_a_ring_beside_one_that_has_left(void **state)
{
    (void)state;
    for (size_t k = 0; k < 2; k++) {
        rank ranks[RANKS];
        ms_abort_record cause = run_ranks(kinds[k], RANKS, receive_in_a_ring, 0, ranks);
        expect_cause(ranks, RANKS, &cause,
                     (const char *[]){ "\n  rank 0: recv #1", "peer 1", "\n  rank 1: recv #1",
                                       "peer 2", "\n  rank 2: recv #1", "peer 0",
                                       "\n  rank 3: has left", NULL });
    }
}

/* Both receive first, and rank 0 reduces besides. */
static void wait_twice(rank *self)
{
    ms_tensor *t[2] = { NULL };
    OK(make_two(self, t));
    OK(start(self, MS_RECV, 1 - self->number, t[0]));
    if (self->number == 0) OK(start(self, MS_ALL_REDUCE, 0, t[1]));
    CHECK(ms_engine_sync(self->engine) == MS_ERROR_MISMATCH);
    release_two(t);
}

static void a_rank_with_two_waits_shows_both(void **state)
{
    (void)state;
    for (size_t k = 0; k < 2; k++) {
        rank ranks[2];
        ms_abort_record cause = run_ranks(kinds[k], 2, wait_twice, 0, ranks);
        expect_cause(ranks, 2, &cause,
                     (const char *[]){ "recv #1 of world [f32 x 8, peer 1]", "; ",
                                       "all_reduce #1 of world [f32 x 8, sum]",
                                       "\n  rank 1: recv #1 of world [f32 x 8, peer 0]", NULL });
    }
}

/* ----------------------------------------------------------------- going on */

/* Ranks read the clock in each round of their deadlock detection, so the number of reads counts the
 * rounds. The waiting time covers many rounds, in which only rank 1 makes progress, unseen by the
 * others. */
enum { MOMENT_READS = 100, LATENCY_NS = 400000000 };

/* Or until the job has ended, which must not happen. */
static void let_a_moment_pass(const ms_rendezvous *rendezvous)
{
    ms_abort_record cause;
    for (unsigned begin = atomic_load(&reads);
         atomic_load(&reads) - begin < MOMENT_READS && !ms_rendezvous_cause(rendezvous, &cause);)
        sched_yield();
}

typedef struct moment_args {
    const ms_rendezvous *rendezvous;
} moment_args;

static ms_task_result moment_run(ms_run *run, void *arguments)
{
    (void)run;
    let_a_moment_pass(((moment_args *)arguments)->rendezvous);
    return MS_TASK_DONE;
}

static const ms_task moment_task = { .name = "moment",
                                     .function = moment_run,
                                     .args_bytes = sizeof(moment_args) };

/* Rank 1 sends when its moment is over, and rank 0 when it has got that. */
static void exchange(rank *self, bool on_stream)
{
    ms_tensor *t[2] = { NULL };
    ms_stream *side = NULL, *send = NULL;
    ms_point over;
    OK(make_two(self, t));
    OK(start(self, MS_RECV, 1 - self->number, t[0]));
    if (self->number == 0) OK(ms_engine_sync(self->engine));
    else if (on_stream) {
        OK(ms_engine_stream(self->engine, "side", &side));
        OK(ms_engine_stream(self->engine, "send", &send));
        OK(ms_stream_enqueue(side, &moment_task, &(moment_args){ self->rendezvous }, NULL, 0,
                             (ms_task_cost){ 0 }, &over));
        OK(ms_stream_wait(send, over));
    } else let_a_moment_pass(self->rendezvous);
    OK(start(self, MS_SEND, 1 - self->number, t[1]));
    OK(ms_engine_sync(self->engine));
    release_two(t);
}

static void host_is_busy(rank *self) { exchange(self, false); }
static void stream_is_busy(rank *self) { exchange(self, true); }

static void send_over_link(rank *self)
{
    ms_tensor *t[2] = { NULL };
    OK(make_two(self, t));
    OK(start(self, self->number ? MS_SEND : MS_RECV, 1 - self->number, t[0]));
    OK(ms_engine_sync(self->engine));
    release_two(t);
}

static void ranks_of_which_one_does_something_go_on(void **state)
{
    (void)state;
    static const struct {
        void (*run)(rank *);
        uint64_t latency_ns;
    } cases[] = { { host_is_busy, 0 }, { stream_is_busy, 0 }, { send_over_link, LATENCY_NS } };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        rank ranks[2];
        ms_abort_record cause = run_ranks(THREADS, 2, cases[c].run, cases[c].latency_ns, ranks);
        for (int r = 0; r < 2; r++)
            if (*ranks[r].why) fail_msg("case %zu: %s", c, ranks[r].why);
        assert_int_equal(cause.reason, MS_ABORT_NONE);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_collective_and_a_receive),
        cmocka_unit_test(three_in_a_ring_beside_one_that_has_left),
        cmocka_unit_test(a_rank_with_two_waits_shows_both),
        cmocka_unit_test(ranks_of_which_one_does_something_go_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
