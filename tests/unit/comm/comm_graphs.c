/* comm_graphs.c: collectives that come again with the same memory (ms_comm_use_graphs): on GPUs
 * NCCL launches them as graphs. Results are those of calls by themselves, ranks that differ are
 * told so, and a job whose graph never ends is over in time. On the CPU nothing changes.
 * ctest: cuda-ranks waits */
#include <dlfcn.h>

#include "comm/transport/nccl/state.h"
#include "comm_support.h"

/* Of calls that never end, beside others that take a hundredth of it. */
#define SHORT_NS 700000000u
enum { N = 1000, ROUNDS = 8, TIMES = 3 }; /* the call after TIMES is captured */

static void plan(const char *what)
{
    void *library = dlopen(getenv(MS_NCCL_VARIABLE), RTLD_NOW | RTLD_LOCAL);
    void (*set)(const char *) = NULL;
    void *found = library ? dlsym(library, "stub_nccl_plan") : NULL;
    assert_non_null(found);
    memcpy(&set, &found, sizeof set);
    set(what);
}

static ms_status open_nccl(rank *self)
{
    ms_comm_options options = { .transport = "nccl" };
    return ms_comm_open_with(self->engine, self->rendezvous, self->number, &options, &self->world);
}

/* A rank whose communicators do not close warns of it, and may only end. */
static void refuse_warnings(void *user, ms_log_level level, const char *message)
{
    (void)user;
    if (level < MS_LOG_WARN || !strstr(message, "does not come back")) return;
    fprintf(stderr, "%s\n", message);
    _exit(1);
}

static ms_abort_record run_ranks(job_kind kind, void (*run)(rank *), uint64_t timeout_ns,
                                 rank ranks[2])
{
    job work = { .kind = kind,
                 .open = open_nccl,
                 .run = run,
                 .log = refuse_warnings,
                 .options = {
                     .ranks = 2, .threads = 1, .heap_bytes = 1 << 20, .timeout_ns = timeout_ns } };
    ms_abort_record cause = run_job(&work, ranks);
    for (int r = 0; r < 2; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
    return cause;
}

static void runs_well(job_kind kind, void (*run)(rank *))
{
    rank ranks[2];
    assert_int_equal(run_ranks(kind, run, HANG_NS, ranks).reason, MS_ABORT_NONE);
}

static void expect(const char *text, const char *part)
{
    if (!strstr(text, part)) fail_msg("no \"%s\" in \"%s\"", part, text);
}

static ms_repeats repeats(const rank *self)
{
    ms_repeats found;
    ms_engine_repeats(self->engine, &found);
    return found;
}

/* ------------------------------------------------------------------- results */

typedef struct place {
    double rank, round;
} place;
static double own_number(const void *context, int64_t i)
{
    const place *at = context;
    return (double)(i % 50) + 10 * at->round + 100 * at->rank;
}
static double sum_of_both(const void *context, int64_t i)
{
    place at = *(const place *)context;
    return own_number(&(place){ 0, at.round }, i) + own_number(&(place){ 1, at.round }, i);
}
static double half_sum(const void *context, int64_t i) { return sum_of_both(context, i) / 2; }
static double own_part(const void *context, int64_t i)
{
    const place *at = context;
    return sum_of_both(at, i + (int64_t)at->rank * N / 2);
}
static double both_parts(const void *context, int64_t i)
{
    const place *at = context;
    return own_number(&(place){ i < N / 2 ? 0 : 1, at->round }, i % (N / 2));
}
static double number_of_0(const void *context, int64_t i)
{
    return own_number(&(place){ 0, ((const place *)context)->round }, i);
}

/* Calls whose memory stays, of four kinds, with barriers between the rounds. */
typedef struct call {
    ms_collective_kind kind;
    ms_reduce_op op;
    double factor;
    int64_t in, out; /* elements; out 0: in place */
    number_function result;
    uint32_t fixed_address;
    ms_tensor *from, *to;
} call;

static void repeat_all(rank *self)
{
    call calls[] = {
        { .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_SUM, .in = N, .result = sum_of_both },
        { .kind = MS_ALL_REDUCE,
          .op = MS_REDUCE_OP_PREMUL_SUM,
          .factor = 0.5,
          .in = N,
          .result = half_sum },
        { .kind = MS_REDUCE_SCATTER,
          .op = MS_REDUCE_OP_SUM,
          .in = N,
          .out = N / 2,
          .result = own_part },
        { .kind = MS_ALL_GATHER, .in = N / 2, .out = N, .result = both_parts },
        { .kind = MS_BROADCAST, .in = N, .result = number_of_0 },
    };
    enum { CALLS = sizeof calls / sizeof *calls };
    for (int k = 0; k < CALLS; k++) {
        OK(make(self, MS_F32, calls[k].in, true, &calls[k].from));
        if (calls[k].out) OK(make(self, MS_F32, calls[k].out, true, &calls[k].to));
        calls[k].fixed_address = ms_group_fixed_address(self->world);
        CHECK(calls[k].fixed_address == (uint32_t)k + 1);
    }
    bool can = device_is_cuda();
    CHECK(ms_engine_set_repeating(self->engine, true) == can);
    OK(ms_comm_use_graphs(self->engine));
    for (int round = 0; round < ROUNDS; round++) {
        place at = { self->number, round };
        for (int k = 0; k < CALLS; k++) {
            ms_collective c = { .kind = calls[k].kind,
                                .op = calls[k].op,
                                .factor = calls[k].factor,
                                .in = calls[k].from,
                                .out = calls[k].to,
                                .bucket = k,
                                .fixed_address = calls[k].fixed_address };
            OK(fill(calls[k].from, own_number, &at));
            OK(run_one(self, self->world, &c));
            CHECK(equals(calls[k].to ? calls[k].to : calls[k].from, calls[k].result, &at));
        }
        OK(ms_group_barrier(self->world, 0));
    }
    /* Ranks that are threads of a process have none. */
    uint64_t graphs = can && self->job->kind == PROCESSES ? CALLS : 0;
    CHECK(repeats(self).graphs == graphs);
    CHECK(repeats(self).launches == graphs * (ROUNDS - TIMES));
    for (int k = 0; k < CALLS; k++) {
        ms_tensor_release(calls[k].from);
        ms_tensor_release(calls[k].to);
    }
}

static void results_are_those_of_calls_by_themselves(void **state)
{
    (void)state;
    plan(NULL);
    runs_well(PROCESSES, repeat_all);
    runs_well(THREADS, repeat_all);
}

/* ---------------------------------------------------------- one call, again */

/* How a rank makes its calls. */
static struct {
    int rounds;
    int differs_at;    /* rank 1: in this round memory stays on the other rank only; -1: in none */
    int repeats_until; /* rank 1: before that round; -1: to the end */
    int without;       /* this rank uses no graphs; -1: both do */
    int more;          /* rounds of rank 0 alone */
    bool moves, changes; /* each round has other memory, another factor */
} how;

static void repeat_one(rank *self)
{
    ms_tensor *t = NULL;
    uint32_t fixed_address = ms_group_fixed_address(self->world);
    ms_status status = MS_OK;
    ms_engine_set_repeating(self->engine, true);
    if (how.without != (int)self->number) status = ms_comm_use_graphs(self->engine);
    int rounds = how.rounds + (self->number == 0 ? how.more : 0);
    for (int round = 0; round < rounds && !status; round++) {
        place at = { self->number, round };
        if (self->number == 1 && round == how.repeats_until)
            ms_engine_set_repeating(self->engine, false);
        ms_tensor *before = how.moves ? t : NULL;
        if (!t || how.moves) OK(make(self, MS_F32, N, true, &t));
        ms_tensor_release(before);
        ms_collective c = { .kind = MS_ALL_REDUCE,
                            .op = MS_REDUCE_OP_PREMUL_SUM,
                            .factor = how.changes ? 1.0 / (1 << round % 4) : 1,
                            .in = t,
                            .bucket = 7,
                            .fixed_address =
                                how.moves ? fixed_address + (uint32_t)round : fixed_address };
        if (self->number == 1 && round == how.differs_at) c.fixed_address = 0;
        OK(fill(t, own_number, &at));
        status = run_one(self, self->world, &c);
        if (!status) status = ms_engine_sync(self->engine);
    }
    self->status = status;
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

static void repeat_as(int rounds, const char *what)
{
    memset(&how, 0, sizeof how);
    how.rounds = rounds;
    how.differs_at = how.repeats_until = how.without = -1;
    plan(what);
}

/* The fifth call of NCCL would fail. */
static void nccl_is_called_until_a_call_is_captured(void **state)
{
    (void)state;
    if (!device_is_cuda()) skip();
    rank ranks[2];
    repeat_as(20, "fail:ncclAllReduce:5:3@1");
    assert_int_equal(run_ranks(PROCESSES, repeat_one, HANG_NS, ranks).reason, MS_ABORT_NONE);
    assert_true(ranks[0].status == MS_OK && ranks[1].status == MS_OK);
    repeat_as(20, "fail:ncclAllReduce:5:3@1");
    setenv(MS_COMM_GRAPHS_VARIABLE, "off", 1);
    assert_int_equal(run_ranks(PROCESSES, repeat_one, HANG_NS, ranks).reason, MS_ABORT_RAISED);
    unsetenv(MS_COMM_GRAPHS_VARIABLE);
    expect(ranks[1].error.message, "ncclAllReduce fails on rank 1 in all_reduce #5");
}

static void expect_no_graph(rank *self)
{
    repeat_one(self);
    CHECK(self->status == MS_OK && repeats(self).graphs == 0);
}

static void a_call_that_differs_is_launched_by_itself(void **state)
{
    (void)state;
    repeat_as(12, NULL);
    how.changes = true;
    runs_well(PROCESSES, expect_no_graph);
    repeat_as(12, NULL);
    how.moves = true;
    runs_well(PROCESSES, expect_no_graph);
}

/* A rank whose loop has ended takes part in the steps of others outside of steps. */
static void a_rank_may_leave_its_steps_first(void **state)
{
    (void)state;
    for (int round = 0; round < 8; round += 2) {
        rank ranks[2];
        repeat_as(12, "fail:ncclAllReduce:5:3@1");
        how.repeats_until = round;
        if (!device_is_cuda()) plan(NULL);
        assert_int_equal(run_ranks(PROCESSES, repeat_one, HANG_NS, ranks).reason, MS_ABORT_NONE);
        assert_true(ranks[0].status == MS_OK && ranks[1].status == MS_OK);
    }
}

static void ranks_that_differ_are_told_so(void **state)
{
    (void)state;
    if (!device_is_cuda()) skip();
    rank ranks[2];
    repeat_as(12, NULL);
    how.differs_at = 6;
    assert_int_equal(run_ranks(PROCESSES, repeat_one, HANG_NS, ranks).reason, MS_ABORT_MISMATCH);
    for (int r = 0; r < 2; r++) {
        assert_int_not_equal(ranks[r].status, MS_OK);
        expect(ranks[r].error.message, "ranks disagree in call #7 of world");
        expect(ranks[r].error.message, "rank 0: all_reduce #7");
        expect(ranks[r].error.message, ", as graph 1\n  rank 1: all_reduce #7");
        expect(ranks[r].error.message, ", not as a graph");
        expect(ranks[r].error.message, "MOONSHARD_COMM_GRAPHS=off launches each call by itself");
    }
    repeat_as(12, NULL);
    how.without = 1;
    assert_int_equal(run_ranks(PROCESSES, repeat_one, SHORT_NS, ranks).reason, MS_ABORT_MISMATCH);
    for (int r = 0; r < 2; r++) expect(ranks[r].error.message, "graph = true");
}

static void try_a_wrong_variable(rank *self)
{
    setenv(MS_COMM_GRAPHS_VARIABLE, "maybe", 1);
    self->status = ms_comm_use_graphs(self->engine);
    self->error = *ms_engine_error(self->engine);
    unsetenv(MS_COMM_GRAPHS_VARIABLE);
}

/* One rank that does without is enough. */
static void off_on_one_rank(rank *self)
{
    if (self->number == 1) setenv(MS_COMM_GRAPHS_VARIABLE, "off", 1);
    expect_no_graph(self);
}

static void the_variable_is_on_or_off(void **state)
{
    (void)state;
    rank ranks[2];
    plan(NULL);
    run_ranks(PROCESSES, try_a_wrong_variable, HANG_NS, ranks);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(ranks[r].status, MS_ERROR_ARGUMENT);
        expect(ranks[r].error.message,
               "MOONSHARD_COMM_GRAPHS=maybe: whether collectives that come again "
               "become graphs, \"on\" or \"off\", is expected");
    }
    repeat_as(12, NULL);
    runs_well(PROCESSES, off_on_one_rank);
}

/* ---------------------------------------------------------------------- ends */

/* NCCL refuses what is captured; or the graph's first launch never ends, on one rank or on both; or
 * an error comes while it runs. */
static void every_end_is_in_time(void **state)
{
    (void)state;
    if (!device_is_cuda()) skip();
    static const struct {
        const char *plan, *says;
        ms_abort_reason reason;
        uint64_t timeout_ns;
    } cases[] = {
        { "fail:ncclAllReduce:4:3@1", "ncclAllReduce fails on rank 1 in all_reduce #4",
          MS_ABORT_RAISED, HANG_NS },
        { "fail:ncclRedOpDestroy:4:3@0", "ncclRedOpDestroy fails on rank 0 in all_reduce #4",
          MS_ABORT_RAISED, HANG_NS },
        { "async:ncclAllReduce:4:6@1", "ncclCommGetAsyncError fails on rank 1", MS_ABORT_RAISED,
          HANG_NS },
        { "never:ncclAllReduce:4@1", "all_reduce #4", MS_ABORT_TIMEOUT, SHORT_NS },
        { "never:ncclAllReduce:4", "all_reduce #4", MS_ABORT_TIMEOUT, SHORT_NS },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rank ranks[2];
        repeat_as(12, cases[i].plan);
        ms_abort_record cause = run_ranks(PROCESSES, repeat_one, cases[i].timeout_ns, ranks);
        if (cause.reason != cases[i].reason) fail_msg("%s: %d", cases[i].plan, (int)cause.reason);
        for (int r = 0; r < 2; r++) {
            assert_int_not_equal(ranks[r].status, MS_OK);
            expect(ranks[r].error.message, cases[i].says);
        }
    }
}

/* Rank 1 ends the job after graphs were launched: the communicators are aborted while they exist.
 */
static void leave_with_graphs(rank *self)
{
    ms_error error = { .status = MS_ERROR_STATE, .message = "enough", .rank = 1 };
    repeat_one(self);
    CHECK(self->status == MS_OK && repeats(self).launches > 0);
    if (self->number == 1) ms_comm_abort(self->engine, &error);
    while (!self->status) self->status = ms_comm_check(self->engine);
    self->error = *ms_engine_error(self->engine);
}

static void an_abort_takes_graphs_along(void **state)
{
    (void)state;
    if (!device_is_cuda()) skip();
    rank ranks[2];
    repeat_as(12, NULL);
    assert_int_equal(run_ranks(PROCESSES, leave_with_graphs, HANG_NS, ranks).reason,
                     MS_ABORT_RAISED);
    for (int r = 0; r < 2; r++) expect(ranks[r].error.message, "enough");
}

/* Rank 0 has launched its graph once more, which waits for rank 1, when rank 1 ends the job. */
static void leave_a_graph_waiting(rank *self)
{
    ms_error error = { .status = MS_ERROR_STATE, .message = "enough", .rank = 1 };
    repeat_one(self);
    CHECK(repeats(self).launches > 0);
    CHECK((self->status == MS_OK) == (self->number == 1));
    if (self->number == 1) ms_comm_abort(self->engine, &error);
    while (!self->status) self->status = ms_comm_check(self->engine);
    if (self->number == 1) self->error = *ms_engine_error(self->engine);
}

static void an_abort_ends_a_graph_that_waits(void **state)
{
    (void)state;
    if (!device_is_cuda()) skip();
    rank ranks[2];
    for (int rounds = 4; rounds <= 8; rounds += 4) { /* the one that was captured last, or before */
        repeat_as(rounds, NULL);
        how.more = 1;
        assert_int_equal(run_ranks(PROCESSES, leave_a_graph_waiting, HANG_NS, ranks).reason,
                         MS_ABORT_RAISED);
        for (int r = 0; r < 2; r++) expect(ranks[r].error.message, "enough");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results_are_those_of_calls_by_themselves),
        cmocka_unit_test(nccl_is_called_until_a_call_is_captured),
        cmocka_unit_test(a_call_that_differs_is_launched_by_itself),
        cmocka_unit_test(a_rank_may_leave_its_steps_first),
        cmocka_unit_test(ranks_that_differ_are_told_so),
        cmocka_unit_test(the_variable_is_on_or_off),
        cmocka_unit_test(every_end_is_in_time),
        cmocka_unit_test(an_abort_takes_graphs_along),
        cmocka_unit_test(an_abort_ends_a_graph_that_waits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
