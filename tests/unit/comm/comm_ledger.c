/* comm_ledger.c: no rank hangs: calls that differ in any field, in number or in order, ranks that
 * leave, raise, or are killed. ctest: over-hosts cuda-local */
#include "comm_support.h"

#include <pthread.h>
#include <signal.h>

#include "moonshard/cpu_task.h"

/* The difference of one rank's third call from that of the others. */
typedef enum difference {
    /* mismatches */
    KIND,
    DTYPE,
    COUNT,
    OP,
    ROOT,
    BUCKET,
    COUNTS,
    OUT,
    ROUNDED,
    SPLIT_LIST,
    RECEIVE_COUNTS,
    SWAPPED,
    GROUP,
    CHANNEL,
    PEER_COUNT,
    PEER_DTYPE,
    PEER_LABEL,
    /* ranks that leave */
    DROPPED,
    TWICE,
    EARLY,
    PEER_MISSING,
    NONE
} difference;
static const char *const names[] = { "kind",         "dtype",      "count",          "op",
                                     "root",         "bucket",     "counts",         "out",
                                     "rounded",      "split list", "receive counts", "swapped",
                                     "group",        "channel",    "peer count",     "peer dtype",
                                     "peer label",   "dropped",    "twice",          "early",
                                     "peer missing", "none" };

typedef struct plan {
    difference what;
    uint32_t who;
} plan;

enum { CALLS = 6, THE_CALL = 3 };

typedef struct tensors {
    ms_tensor *t, *out, *longer, *integers, *gathered, *part, *half;
} tensors;

/* The third call: the common one, or the different one of one rank. */
static ms_collective third_call(const rank *self, const tensors *all, difference what, bool differs,
                                int64_t counts[2][4])
{
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = all->t, .bucket = 3, .label = "blocks.4" };
    int64_t *send = counts[0], *receive = counts[1];
    for (uint32_t r = 0; r < 4; r++) send[r] = receive[r] = 2;
    if (what == ROOT) c.kind = MS_BROADCAST;
    if (what == ROUNDED) c.in = all->half;
    if (what == COUNTS || what == RECEIVE_COUNTS) {
        c.kind = what == COUNTS ? MS_ALL_GATHER : MS_ALL_TO_ALL;
        c.in = what == COUNTS ? all->part : all->gathered;
        c.out = all->gathered;
        c.counts = send;
        if (what == RECEIVE_COUNTS) c.receive_counts = receive;
    }
    if (!differs) return c;
    if (what == KIND) c.kind = MS_BROADCAST;
    if (what == DTYPE) c.in = all->integers;
    if (what == COUNT) c.in = all->longer;
    if (what == OP) c.op = MS_REDUCE_OP_MAX;
    if (what == ROOT) c.root = 1;
    if (what == BUCKET) c.bucket = 2;
    if (what == OUT) c.out = all->out;
    if (what == ROUNDED) { /* the same numbers are sent, but memory has them as f32 */
        c.in = all->t;
        c.travels = MS_F16;
    }
    if (what == COUNTS) { /* another cut of as many elements, but for this rank's own part */
        send[(self->number + 1) % 3]--;
        send[(self->number + 2) % 3]++;
    }
    if (what == RECEIVE_COUNTS) {
        receive[(self->number + 1) % 3]--;
        receive[(self->number + 2) % 3]++;
    }
    return c;
}

static ms_status make_call(rank *self, const tensors *all, ms_group *twin, const plan *p,
                           int number)
{
    bool differs = self->number == p->who;
    int64_t counts[2][4];
    ms_collective usual = { .kind = MS_ALL_REDUCE, .in = all->t, .bucket = 3, .label = "blocks.4" };
    char line[32];
    uint32_t script;
    snprintf(line, sizeof line, differs && number == THE_CALL ? "other.lua:7" : "train.lua:%d",
             10 + number);
    if (ms_strings_add(ms_engine_strings(self->engine), line, strlen(line), &script) == MS_OK)
        ms_engine_set_script(self->engine, script);
    if (p->what == SWAPPED && (number == THE_CALL || number == THE_CALL + 1)) {
        ms_collective other = { .kind = MS_BROADCAST, .in = all->t, .bucket = -1 };
        return ms_group_enqueue(self->world, 1, (number == THE_CALL) != differs ? &usual : &other,
                                NULL);
    }
    if (number != THE_CALL) return ms_group_enqueue(self->world, 1, &usual, NULL);
    if (p->what >= PEER_COUNT && p->what <= PEER_LABEL) {
        ms_collective c = { .kind = self->number ? MS_RECV : MS_SEND,
                            .root = !self->number,
                            .in = all->t,
                            .bucket = -1,
                            .label = differs && p->what == PEER_LABEL ? "F4" : "F3" };
        if (differs && p->what == PEER_COUNT) c.in = all->longer;
        if (differs && p->what == PEER_DTYPE) c.in = all->integers;
        return self->number < 2 ? ms_group_enqueue(self->world, 1, &c, NULL) : MS_OK;
    }
    if (p->what == PEER_MISSING) {
        ms_collective c = { .kind = MS_SEND, .root = p->who, .in = all->t, .bucket = -1 };
        return self->number == (p->who + 1) % self->ranks
                   ? ms_group_enqueue(self->world, 1, &c, NULL)
                   : MS_OK;
    }
    if (p->what == SPLIT_LIST) {
        static const uint32_t one[] = { 0, 1, 2 }, another[] = { 1, 0, 2 }, size[] = { 3 };
        ms_group *unused = NULL;
        return ms_group_split(self->world, 1, size, differs ? another : one, &unused);
    }
    ms_collective c = third_call(self, all, p->what, differs, counts);
    if (differs && p->what == DROPPED) return MS_OK;
    ms_group *group = differs && p->what == GROUP ? twin : self->world;
    ms_status status = ms_group_enqueue(group, differs && p->what == CHANNEL ? 2 : 1, &c, NULL);
    if (!status && differs && p->what == TWICE) status = ms_group_enqueue(self->world, 1, &c, NULL);
    return status;
}

static void calls(rank *self)
{
    const plan *what = self->job->argument;
    static const uint32_t everybody[] = { 0, 1, 2 }, size[] = { 3 };
    tensors all = { 0 };
    ms_group *twin = NULL;
    OK(make(self, MS_F32, 100, true, &all.t));
    OK(make(self, MS_F32, 100, true, &all.out));
    OK(make(self, MS_F32, 101, true, &all.longer));
    OK(make(self, MS_I32, 100, true, &all.integers));
    OK(make(self, MS_F32, 6, true, &all.gathered));
    OK(make(self, MS_F32, 2, true, &all.part));
    OK(make(self, MS_F16, ms_tensor_count(all.t), true, &all.half));
    ms_tensor *every[] = { all.t,        all.out,  all.longer, all.integers,
                           all.gathered, all.part, all.half };
    for (size_t i = 0; i < sizeof every / sizeof *every; i++) {
        char zeros[512] = { 0 };
        OK(ms_tensor_write(every[i], zeros, ms_tensor_bytes(every[i])));
    }
    OK(ms_group_split(self->world, 1, size, everybody, &twin));
    ms_status status = MS_OK;
    for (int i = 1; i <= CALLS && !status; i++) {
        if (what->what == EARLY && self->number == what->who && i == THE_CALL) break;
        status = make_call(self, &all, twin, what, i);
    }
    if (!status && !(what->what == EARLY && self->number == what->who)) {
        ms_comm_leave(self->engine, NULL);
        status = ms_engine_sync(self->engine);
    }
    self->status = status;
    self->error = *ms_engine_error(self->engine);
    for (size_t i = 0; i < sizeof every / sizeof *every; i++) ms_tensor_release(every[i]);
}

static ms_abort_record run_plan(job_kind kind, const char *layout, difference what, uint32_t who,
                                rank ranks[3])
{
    plan p = { .what = what, .who = who };
    job work = {
        .kind = kind,
        .options = { .ranks = 3, .threads = 1, .heap_bytes = 16 << 20, .timeout_ns = HANG_NS },
        .layout = layout,
        .run = calls,
        .argument = &p
    };
    ms_abort_record cause = run_job(&work, ranks);
    for (int r = 0; r < 3; r++)
        if (*ranks[r].why) fail_msg("%s by rank %u %s: %s", names[what], who, layout, ranks[r].why);
    return cause;
}

#define EXPECT(condition)                                                                       \
    do {                                                                                        \
        if (!(condition))                                                                       \
            fail_msg("%s by rank %u %s: %s; the cause was %d of rank %d: %s", names[what], who, \
                     layout, #condition, cause.reason, cause.error.rank, cause.error.message);  \
    } while (0)

/* Each field of the fingerprint, order, group and channel: found at once, the one rank is named,
 * and both sides are shown with their lines. */
static void check_difference(const char *layout, difference what, uint32_t who)
{
    static rank ranks[3];
    bool pair = what >= PEER_COUNT && what <= PEER_LABEL;
    /* Of two ranks that find out before their calls are launched, no call of another host tells
     * which one is right. */
    bool in_doubt = strcmp(layout, "011") == 0 && who > 0;
    if (pair && who == 2) return;
    ms_abort_record cause = run_plan(who == 2 ? PROCESSES : THREADS, layout, what, who, ranks);
    EXPECT(cause.reason == MS_ABORT_MISMATCH);
    EXPECT(cause.error.status == MS_ERROR_MISMATCH);
    EXPECT(what == RECEIVE_COUNTS || what == CHANNEL || what == GROUP
           || (strstr(cause.error.message, "train.lua:")
               && strstr(cause.error.message, "other.lua:7")));
    EXPECT(strstr(cause.error.message, "\n  rank"));
    EXPECT(!*layout || strstr(cause.error.message, " on host h"));
    /* The rank that waits first reports its own call and the first call of the other rank that does
     * not match. One of the two is the changed call. */
    EXPECT((what != CHANNEL && what != GROUP) || strstr(cause.error.message, ".lua:"));
    EXPECT(what == GROUP || what == CHANNEL || pair || what == RECEIVE_COUNTS || in_doubt
           || cause.error.rank == (int32_t)who);
    for (int r = 0; r < 3; r++) {
        if (pair && r == 2) continue;
        EXPECT(ranks[r].status == MS_ERROR_MISMATCH);
        EXPECT(strstr(ranks[r].error.message, cause.error.message));
    }
}

/* Whether this rank differs in the layout with this number: in short ranges in every other layout,
 * if there are several. */
static bool is_tried(ptrdiff_t layout, uint32_t who)
{
    return ranges_are_long() || !over_hosts() || (uint32_t)layout % 2 == who % 2;
}

static void a_call_that_differs_is_shown_with_both_sides(void **state)
{
    (void)state;
    for (const char *const *layout = layouts_of(3); *layout; layout++)
        for (difference what = KIND; what < DROPPED; what++)
            for (uint32_t who = 0; who < 3; who++)
                if (is_tried(layout - layouts_of(3), who)) check_difference(*layout, what, who);
}

/* A rank that makes one call fewer, or one more, or stops. A rank that waits gets an error at once:
 * which rank left, after which call, and its own call. */
static void check_absence(const char *layout, difference what, uint32_t who)
{
    static rank ranks[3];
    uint32_t waits = what == TWICE ? who : (who + 1) % 3;
    ms_abort_record cause = run_plan(who == 2 ? PROCESSES : THREADS, layout, what, who, ranks);
    EXPECT(cause.reason == MS_ABORT_LEFT);
    EXPECT(what == TWICE ? cause.error.rank != (int32_t)who : cause.error.rank == (int32_t)who);
    EXPECT(strstr(cause.error.message, " left after ")
           && strstr(cause.error.message, "train.lua:"));
    EXPECT(ranks[waits].status == MS_ERROR_ABORTED);
    EXPECT(strstr(ranks[waits].error.message, cause.error.message));
}

static void a_rank_that_leaves_others_waiting_is_named(void **state)
{
    (void)state;
    for (const char *const *layout = layouts_of(3); *layout; layout++)
        for (difference what = DROPPED; what < NONE; what++)
            for (uint32_t who = 0; who < 3; who++)
                if (is_tried(layout - layouts_of(3), who)) check_absence(*layout, what, who);
}

static void equal_calls_raise_no_alarm(void **state)
{
    (void)state;
    const char *const *layouts = layouts_of(3), *layout = *layouts;
    for (int round = 0; round < (ranges_are_long() ? 20 : 8); round++) {
        static rank ranks[3];
        difference what = NONE;
        uint32_t who = 9;
        ms_abort_record cause = run_plan(round % 2 ? PROCESSES : THREADS, layout, what, who, ranks);
        EXPECT(cause.reason == MS_ABORT_NONE);
        for (int r = 0; r < 3; r++) EXPECT(ranks[r].status == MS_OK);
        if (layouts[1]) layout = *++layouts;
        else layouts = layouts_of(3);
    }
}

/* ------------------------------------------------------ ends from elsewhere */

typedef struct ending {
    void (*end)(rank *self);
    uint32_t who;
} ending;

/* All but one wait for it. It waits until they do, then `end` happens. */
static void wait_for_one(rank *self)
{
    ms_tensor *t = NULL;
    OK(make(self, MS_F32, 1000, true, &t));
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = 5 };
    const ending *how = self->job->argument;
    if (self->number == how->who) {
        ms_rank_state other;
        for (uint32_t r = 0; r < self->ranks; r++) do
                ms_rendezvous_rank(self->rendezvous, r, &other);
            while (r != self->number && other.collectives == 0);
        how->end(self);
    } else self->status = ms_group_enqueue(self->world, 1, &c, NULL);
    if (!self->status) self->status = ms_engine_sync(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

static void *abort_from_a_thread(void *argument)
{
    ms_rendezvous_abort(((rank *)argument)->rendezvous, MS_ABORT_STOPPED, -1,
                        "stopped by a thread");
    return NULL;
}

static void end_by_thread(rank *self)
{
    pthread_t thread;
    pthread_create(&thread, NULL, abort_from_a_thread, self);
    pthread_join(thread, NULL);
    self->status = ms_comm_check(self->engine);
}

static void end_by_error(rank *self)
{
    ms_error error = { .status = MS_ERROR_SCRIPT,
                       .rank = -1,
                       .message = "attempt to index a nil value",
                       .script = "hook.lua:4" };
    ms_comm_abort(self->engine, &error);
    self->status = ms_comm_check(self->engine);
}

static ms_task_result fails(ms_run *run, void *arguments)
{
    (void)arguments;
    ms_run_fail(run, MS_ERROR_ARGUMENT, "index 7 outside 0..3");
    return MS_TASK_FAILED;
}

/* A task fails while the host checks nothing. The collective after it is skipped, and the other
 * ranks still get the error. */
static void end_by_task(rank *self)
{
    static const ms_task task = { .name = "bad_gather", .function = fails };
    ms_rank_state state;
    ms_abort_record cause;
    ms_stream_enqueue(ms_engine_current(self->engine), &task, NULL, NULL, 0, (ms_task_cost){ 0 },
                      NULL);
    while (!ms_rendezvous_cause(self->rendezvous, &cause))
        ms_rendezvous_rank(self->rendezvous, 0, &state);
}

static void end_by_kill(rank *self)
{
    (void)self;
    raise(SIGKILL);
}

static ms_abort_record run_end(job_kind kind, void (*end)(rank *), rank *ranks, uint32_t count)
{
    job work = {
        .kind = kind,
        .options = { .ranks = count, .threads = 1, .heap_bytes = 16 << 20, .timeout_ns = HANG_NS },
        .run = wait_for_one,
        .argument = &(ending){ end, 1 }
    };
    return run_job(&work, ranks);
}

static void an_abort_wakes_all(void **state)
{
    (void)state;
    static rank ranks[4];
    for (uint32_t count = 2; count <= 4; count++) {
        ms_abort_record cause = run_end(THREADS, end_by_thread, ranks, count);
        assert_int_equal(cause.reason, MS_ABORT_STOPPED);
        for (uint32_t r = 0; r < count; r++) {
            assert_int_equal(ranks[r].status, MS_ERROR_ABORTED);
            assert_non_null(strstr(ranks[r].error.message, "stopped by a thread"));
        }
        assert_int_equal(ranks[0].error.bucket, 5);
        assert_int_equal(ranks[0].error.collective, 1);
        assert_string_equal(ranks[0].error.operation, "all_reduce");
    }
}

static void a_rank_that_raises_ends_the_job(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    static rank ranks[3];
    for (int kind = THREADS; kind <= PROCESSES; kind++) {
        ms_abort_record cause = run_end((job_kind)kind, end_by_error, ranks, 3);
        assert_int_equal(cause.reason, MS_ABORT_RAISED);
        assert_int_equal(cause.error.rank, 1);
        for (int r = 0; r < 3; r++)
            assert_non_null(strstr(ranks[r].error.message,
                                   "because rank 1: attempt to index a nil value, at hook.lua:4"));
        cause = run_end((job_kind)kind, end_by_task, ranks, 3);
        assert_int_equal(cause.reason, MS_ABORT_RAISED);
        assert_int_equal(cause.error.rank, 1);
        assert_non_null(strstr(ranks[0].error.message, "because rank 1: index 7 outside 0..3"));
        assert_int_equal(ranks[1].status, MS_ERROR_ARGUMENT);
    }
}

/* The supervisor here is run_job, which waits for rank 0 first. */
static void a_killed_rank_frees_its_peers(void **state)
{
    (void)state;
    static rank ranks[3];
    for (int round = 0; round < 10; round++) {
        job work = {
            .kind = PROCESSES,
            .options = { .ranks = 3, .threads = 1, .heap_bytes = 16 << 20, .timeout_ns = HANG_NS },
            .run = wait_for_one,
            .argument = &(ending){ end_by_kill, 0 }
        };
        ms_abort_record cause = run_job(&work, ranks);
        assert_int_equal(cause.reason, MS_ABORT_DIED);
        assert_int_equal(cause.error.rank, 0);
        for (int r = 1; r < 3; r++) {
            assert_int_equal(ranks[r].status, MS_ERROR_ABORTED);
            assert_non_null(strstr(ranks[r].error.message, "rank 0 ended"));
        }
    }
}

/* After the end every call of every group fails with the first cause, also on ranks that waited for
 * nothing. */
static void calls_after_the_end(rank *self)
{
    ms_tensor *t = NULL;
    OK(make(self, MS_F32, 10, true, &t));
    OK(ms_group_barrier(self->world, 0));
    if (self->number == 0) {
        CHECK(ms_rendezvous_abort(self->rendezvous, MS_ABORT_RAISED, 0, "the first cause"));
        CHECK(!ms_rendezvous_abort(self->rendezvous, MS_ABORT_RAISED, 0, "the second"));
    }
    ms_abort_record cause;
    while (!ms_rendezvous_cause(self->rendezvous, &cause)) {}
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 };
    for (int i = 0; i < 3; i++) {
        CHECK(ms_group_enqueue(self->world, 1 + (uint32_t)i % 2, &c, NULL) == MS_ERROR_ABORTED);
        CHECK(strcmp(ms_engine_error(self->engine)->message, "the first cause") == 0);
        CHECK(ms_group_barrier(self->world, 0) == MS_ERROR_ABORTED);
    }
    OK(ms_engine_sync(self->engine));
    ms_tensor_release(t);
}

static void an_ended_job_stays_ended(void **state)
{
    (void)state;
    run_well(THREADS, 3, calls_after_the_end, NULL);
}

/* A rank that neither makes the call nor leaves: the watchdog names it. The others wait for a rank
 * that is slow but makes progress. Where that rank was itself held up for half of the limit, it
 * notes it: nothing is known then. */
#define LIMIT_NS 200000000u

typedef struct held_up {
    bool was;
} held_up;

static void slow(rank *self)
{
    held_up *held = (held_up *)(uintptr_t)self->job->argument;
    uint64_t begin = ms_os_posix()->monotonic_ns(NULL), before = begin, now = begin;
    if (self->number == 0) {
        ms_abort_record cause;
        while (!ms_rendezvous_cause(self->rendezvous, &cause)
               && now - begin < (held ? 3u * LIMIT_NS : 50u * (uint64_t)LIMIT_NS)) {
            if (held) ms_comm_progress(self->engine);
            before = now;
            now = ms_os_posix()->monotonic_ns(NULL);
            if (held && now - before > LIMIT_NS / 2) held->was = true;
        }
        if (!held) return;
    }
    self->status = ms_group_barrier(self->world, LIMIT_NS);
    if (self->number == 0 && ms_os_posix()->monotonic_ns(NULL) - now > LIMIT_NS / 2)
        held->was = true;
    self->error = *ms_engine_error(self->engine);
}

static void a_missing_rank_is_named_after_the_timeout(void **state)
{
    (void)state;
    static rank ranks[3];
    held_up held;
    job work = { .kind = THREADS,
                 .options = { .ranks = 3, .threads = 1, .heap_bytes = 16 << 20 },
                 .run = slow };
    ms_abort_record cause = run_job(&work, ranks);
    assert_int_equal(cause.reason, MS_ABORT_TIMEOUT);
    assert_int_equal(cause.error.rank, 0);
    assert_int_equal(ranks[1].status, MS_ERROR_TIMEOUT);
    assert_non_null(strstr(ranks[1].error.message, "rank 0 has not come to barrier #1 of world"));
    work.argument = &held;
    for (int trial = 0; trial < 50; trial++) {
        held.was = false;
        cause = run_job(&work, ranks);
        if (!held.was) break;
    }
    assert_false(held.was);
    assert_int_equal(cause.reason, MS_ABORT_NONE);
    for (int r = 0; r < 3; r++) assert_int_equal(ranks[r].status, MS_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_call_that_differs_is_shown_with_both_sides),
        cmocka_unit_test(a_rank_that_leaves_others_waiting_is_named),
        cmocka_unit_test(equal_calls_raise_no_alarm),
        cmocka_unit_test(an_abort_wakes_all),
        cmocka_unit_test(a_rank_that_raises_ends_the_job),
        cmocka_unit_test(a_killed_rank_frees_its_peers),
        cmocka_unit_test(an_ended_job_stays_ended),
        cmocka_unit_test(a_missing_rank_is_named_after_the_timeout),
    };
    /* How ranks of other hosts end is for their control to say. */
    const struct CMUnitTest calls_only[] = { tests[0], tests[1], tests[2] };
    return over_hosts() ? cmocka_run_group_tests(calls_only, NULL, NULL)
                        : cmocka_run_group_tests(tests, NULL, NULL);
}
