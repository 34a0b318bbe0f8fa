/* comm_nccl.c: the transport over NCCL, on a stub whose calls fail, hang, come late or never end:
 * every such job ends with the rank and the operation, and in time.
 * ctest: cuda-ranks waits */
#include <dlfcn.h>
#include <signal.h>
#include <time.h>

#include "comm/group.h"
#include "comm/transport/nccl/state.h"
#include "comm_support.h"
#include "ranges.h"

/* Of calls that never end, beside others that take a hundredth of it. */
#define SHORT_NS 700000000u

/* A function of the stub, which this process has loaded. */
static void (*stub(const char *name))(void)
{
    void *library = dlopen(getenv(MS_NCCL_VARIABLE), RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, name) : NULL;
    void (*function)(void) = NULL;
    assert_non_null(found);
    memcpy(&function, &found, sizeof function);
    return function;
}

static void plan(const char *what) { ((void (*)(const char *))stub("stub_nccl_plan"))(what); }

static ms_status open_nccl(rank *self)
{
    ms_comm_options options = { .transport = "nccl", .min_ctas = 2, .max_ctas = 5 };
    return ms_comm_open_with(self->engine, self->rendezvous, self->number, &options, &self->world);
}

/* ------------------------------------------------------- the library is found */

static bool hides_mark; /* as the real library does, which has none */
static void (*hide_mark(void *user, void *library, const char *name))(void)
{
    if (hides_mark && strcmp(name, MS_NCCL_HOST_MEMORY) == 0) return NULL;
    return ms_os_posix()->library_symbol(user, library, name);
}

static void refused(const char *transport, ms_status status, const char *says)
{
    ms_os os = *ms_os_posix();
    ms_rendezvous_options ranks = { .ranks = 1, .threads = 1, .heap_bytes = 1 << 20 };
    ms_engine_options options = { .os = &os, .threads = 1 };
    ms_comm_options travel = { .transport = transport };
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    ms_engine *engine = NULL;
    ms_group *world = NULL;
    os.library_symbol = hide_mark;
    ms_context_init(&context, &os);
    assert_int_equal(ms_rendezvous_new(&context, &ranks, &rendezvous), MS_OK);
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    assert_int_equal(ms_comm_open_with(engine, rendezvous, 0, &travel, &world), status);
    if (!strstr(ms_engine_error(engine)->message, says))
        fail_msg("%s", ms_engine_error(engine)->message);
    /* The place is free again, and the usual transport still there. */
    assert_int_equal(ms_comm_open(engine, rendezvous, 0, &world), MS_OK);
    ms_engine_free(engine);
    ms_rendezvous_release(rendezvous);
}

static void a_library_that_does_not_fit_is_refused(void **state)
{
    (void)state;
    char path[512];
    snprintf(path, sizeof path, "%s", getenv(MS_NCCL_VARIABLE));
    refused("nope", MS_ERROR_ARGUMENT,
            "\"nope\" is none of those between ranks that meet over host: "
            "local, nccl");
    plan("version:ncclGetVersion:1:22707");
    refused("nccl", MS_ERROR_UNSUPPORTED, "is NCCL 2.27.7, too old: MOONSHARD_NCCL names it");
    plan(NULL);
    hides_mark = true;
    refused("nccl", MS_ERROR_UNSUPPORTED,
            "NCCL moves memory of GPUs, and this engine computes on device cpu");
    hides_mark = false;
    setenv(MS_NCCL_VARIABLE, getenv("MOONSHARD_STUB_MPI"), 1);
    refused("nccl", MS_ERROR_UNSUPPORTED, "it has no ncclGetVersion");
    setenv(MS_NCCL_VARIABLE, "/nowhere/libnccl.so.2", 1);
    refused("nccl", MS_ERROR_NOT_FOUND, "need NCCL: /nowhere/libnccl.so.2");
    setenv(MS_NCCL_VARIABLE, path, 1);
}

/* ----------------------------------------------------- a program of every call */

/* One of every kind, so that each function of NCCL is called at least twice; up to the first
 * error. */
static ms_status call(rank *self, ms_collective_kind kind, ms_reduce_op op, ms_tensor *in,
                      ms_tensor *out, const int64_t *counts)
{
    bool is_rooted = kind == MS_GATHER || kind == MS_SCATTER;
    ms_collective c = { .kind = kind,
                        .op = op,
                        .in = in,
                        .out = is_rooted && kind == MS_GATHER && self->number ? NULL : out,
                        .counts = counts,
                        .receive_counts = kind == MS_ALL_TO_ALL ? counts : NULL,
                        .factor = 2,
                        .bucket = 7,
                        .root = kind == MS_SEND || kind == MS_RECV ? 1 - self->number : 0 };
    if (kind == MS_SCATTER && self->number) c.in = NULL;
    if (kind == MS_BARRIER) c.in = NULL;
    return run_one(self, self->world, &c);
}

static ms_status run_all(rank *self, ms_tensor *pair, ms_tensor *half, ms_tensor *whole)
{
    static const int64_t counts[] = { 2, 2 };
    const struct {
        ms_collective_kind kind;
        ms_reduce_op op;
        ms_tensor *in, *out;
        const int64_t *counts;
    } calls[] = { { MS_BARRIER, 0, NULL, NULL, NULL },
                  { MS_ALL_REDUCE, MS_REDUCE_OP_SUM, whole, NULL, NULL },
                  { MS_ALL_REDUCE, MS_REDUCE_OP_PREMUL_SUM, whole, NULL, NULL },
                  { MS_REDUCE, MS_REDUCE_OP_SUM, whole, NULL, NULL },
                  { MS_REDUCE_SCATTER, MS_REDUCE_OP_SUM, whole, half, NULL },
                  { MS_REDUCE_SCATTER, MS_REDUCE_OP_AVG, whole, half, counts },
                  { MS_ALL_GATHER, 0, half, whole, NULL },
                  { MS_ALL_GATHER, 0, half, whole, counts },
                  { MS_BROADCAST, 0, whole, NULL, NULL },
                  { MS_GATHER, 0, half, whole, NULL },
                  { MS_SCATTER, 0, whole, half, NULL },
                  { MS_ALL_TO_ALL, 0, whole, pair, counts } };
    ms_status status = MS_OK;
    for (int round = 0; round < 2; round++)
        for (size_t i = 0; i < sizeof calls / sizeof *calls && !status; i++)
            status =
                call(self, calls[i].kind, calls[i].op, calls[i].in, calls[i].out, calls[i].counts);
    for (int round = 0; round < 4 && !status; round++)
        status =
            call(self, (round + (int)self->number) % 2 ? MS_RECV : MS_SEND, 0, whole, NULL, NULL);
    return status;
}

static void program(rank *self)
{
    ms_tensor *pair = NULL, *half = NULL, *whole = NULL;
    OK(make(self, MS_F32, 4, true, &whole));
    OK(make(self, MS_F32, 2, false, &half));
    OK(make(self, MS_F32, 4, false, &pair));
    OK(fill(whole, NULL, NULL));
    self->status = run_all(self, pair, half, whole);
    if (!self->status) self->status = ms_engine_sync(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(whole);
    ms_tensor_release(half);
    ms_tensor_release(pair);
}

static ms_abort_record run_ranks(job_kind kind, void (*run)(rank *), uint64_t timeout_ns,
                                 rank ranks[2])
{
    job work = { .kind = kind,
                 .open = open_nccl,
                 .run = run,
                 .options = {
                     .ranks = 2, .threads = 1, .heap_bytes = 1 << 20, .timeout_ns = timeout_ns } };
    ms_abort_record cause = run_job(&work, ranks);
    for (int r = 0; r < 2; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
    return cause;
}

static void expect(const char *text, const char *part)
{
    if (!strstr(text, part)) fail_msg("no \"%s\" in \"%s\"", part, text);
}

/* A rank asks, since ranks may be threads of a process of their own. */
static void program_that_is_seen(rank *self)
{
    int least = 0, most = 0, registered = 0;
    program(self);
    CHECK(self->status == MS_OK);
    ((void (*)(int *, int *, int *))stub("stub_nccl_seen"))(&least, &most, &registered);
    CHECK(least == 2 && most == 5);
    /* NCCL maps memory of several handles wrongly where ranks are threads of one process. */
    CHECK(registered == 0);
}

static void without_errors_all_calls_succeed(void **state)
{
    (void)state;
    rank ranks[2];
    plan(NULL);
    assert_int_equal(run_ranks(THREADS, program_that_is_seen, HANG_NS, ranks).reason,
                     MS_ABORT_NONE);
    assert_true(ranks[0].status == MS_OK && ranks[1].status == MS_OK);
}

/* One storage of the group's memory, in each communicator that had a call. */
static void program_with_registered_memory(rank *self)
{
    int least = 0, most = 0, registered = 0;
    program(self);
    CHECK(self->status == MS_OK);
    ((void (*)(int *, int *, int *))stub("stub_nccl_seen"))(&least, &most, &registered);
    CHECK(registered >= 1 && registered <= MS_NCCL_COMMUNICATORS);
}

static void memory_is_registered_between_processes(void **state)
{
    (void)state;
    rank ranks[2];
    plan(NULL);
    assert_int_equal(run_ranks(PROCESSES, program_with_registered_memory, HANG_NS, ranks).reason,
                     MS_ABORT_NONE);
}

/* Control's own words travel between the hosts; the stub, which knows nothing of hosts, carries the
 * tensors. */
static ms_status open_over_hosts(rank *self)
{
    ms_membership membership = { .control = self->rendezvous->kind->control,
                                 .transport = &ms_transport_nccl,
                                 .rendezvous = self->rendezvous,
                                 .rank = self->number,
                                 .size = self->ranks };
    return ms_comm_new(self->engine, &membership, &self->world);
}

static void ranks_of_two_hosts_use_it(void **state)
{
    (void)state;
    rank ranks[2];
    job work = { .kind = THREADS,
                 .layout = "01",
                 .open = open_over_hosts,
                 .run = program,
                 .options = { .ranks = 2, .threads = 1, .heap_bytes = 1 << 20 } };
    plan(NULL);
    assert_int_equal(run_job(&work, ranks).reason, MS_ABORT_NONE);
    for (int r = 0; r < 2; r++) {
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
        assert_int_equal(ranks[r].status, MS_OK);
    }
}

/* -------------------------------------------------------------------- errors */

/* Every function that may fail, with each code, at its first or second call on rank 1 (the ids are
 * rank 0's). Nothing waits for a time limit, which is half an hour. In short ranges each function
 * fails with two codes, at both calls. */
static void every_error_names_rank_and_operation(void **state)
{
    (void)state;
    static const struct {
        const char *function, *operation;
        int rank;
        job_kind kind;
    } cases[] = { { "ncclGetUniqueId", "the beginning of group world", 0, THREADS },
                  { "ncclCommInitRankConfig", "the beginning of group world", 1, THREADS },
                  { "ncclCommRegister", "of world", 1, PROCESSES },
                  { "ncclAllReduce", "of world", 1, THREADS },
                  { "ncclRedOpCreatePreMulSum", "all_reduce #", 1, THREADS },
                  { "ncclRedOpDestroy", "all_reduce #", 1, THREADS },
                  { "ncclReduce", "reduce", 1, THREADS },
                  { "ncclReduceScatter", "reduce_scatter #", 1, THREADS },
                  { "ncclAllGather", "all_gather #", 1, THREADS },
                  { "ncclBroadcast", "of world", 1, THREADS },
                  { "ncclSend", "of world", 1, THREADS },
                  { "ncclRecv", "of world", 1, THREADS },
                  { "ncclGroupEnd", "of world", 1, THREADS } };
    static const char *const codes[] = { "",
                                         "unhandled cuda error",
                                         "unhandled system error",
                                         "internal error",
                                         "invalid argument",
                                         "invalid usage",
                                         "remote process exited" };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int code = 1; code <= 6; code++) {
            if (!ranges_are_long() && (code + (int)i) % 3) continue;
            char what[64], rank_text[32];
            rank ranks[2];
            int r = cases[i].rank;
            snprintf(what, sizeof what, "fail:%s:%d:%d@%d", cases[i].function, 1 + code % 2, code,
                     r);
            snprintf(rank_text, sizeof rank_text, "fails on rank %d in", r);
            plan(what);
            ms_abort_record cause = run_ranks(cases[i].kind, program, HANG_NS, ranks);
            assert_int_equal(cause.reason, MS_ABORT_RAISED);
            for (int k = 0; k < 2; k++) {
                const char *text = ranks[k].error.message;
                assert_int_not_equal(ranks[k].status, MS_OK);
                expect(text, cases[i].function);
                expect(text, rank_text);
                expect(text, cases[i].operation);
                expect(text, codes[code]);
                assert_int_equal(ranks[k].error.rank, r);
            }
            /* Its own error, or the job's, whichever it met first. */
            assert_true(ranks[r].status == MS_ERROR_IO || ranks[r].status == MS_ERROR_ABORTED);
        }
}

/* Asking for the state of a call may fail, too; and the end of a group and an id that no
 * communicator has. */
static void errors_of_other_functions_end_the_job(void **state)
{
    (void)state;
    static const char *const plans[] = { "fail:ncclCommGetAsyncError:1:3@1",
                                         "fail:ncclCommGetAsyncError:40:2@0",
                                         "fail:ncclGroupStart:1:5", "fail:ncclGroupStart:4:5" };
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        rank ranks[2];
        plan(plans[i]);
        assert_int_equal(run_ranks(THREADS, program, HANG_NS, ranks).reason, MS_ABORT_RAISED);
        for (int r = 0; r < 2; r++) {
            assert_int_not_equal(ranks[r].status, MS_OK);
            expect(ranks[r].error.message, "fails on rank");
            expect(ranks[r].error.message, "world");
        }
    }
}

/* The library's own words, and what helps. */
static void hear_what_to_set(const char *words)
{
    rank ranks[2];
    plan("fail:ncclCommInitRankConfig:1:5@1");
    void (*says)(const char *) = (void (*)(const char *))stub("stub_nccl_says");
    says(words);
    ms_abort_reason reason = run_ranks(THREADS, program, HANG_NS, ranks).reason;
    says("");
    assert_int_equal(reason, MS_ABORT_RAISED);
    for (int r = 0; r < 2; r++) {
        expect(ranks[r].error.message, words);
        expect(ranks[r].error.message, "NCCL_HOSTID");
        expect(ranks[r].error.message, "MOONSHARD_TRANSPORT=local");
    }
}
static void two_ranks_of_one_gpu_hear_what_to_set(void **state)
{
    (void)state;
    hear_what_to_set("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000");
    hear_what_to_set("Multiple Ranks are using the same GPU/Partition.");
}

/* Codes that a newer library may have. */
static void an_unknown_code_is_an_error(void **state)
{
    (void)state;
    rank ranks[2];
    plan("fail:ncclAllReduce:2:99@0");
    assert_int_equal(run_ranks(THREADS, program, HANG_NS, ranks).reason, MS_ABORT_RAISED);
    expect(ranks[1].error.message, "ncclAllReduce fails on rank 0");
    expect(ranks[1].error.message, "unknown result code");
}

/* ----------------------------------------------------------- errors afterwards */

static ms_status reduce_once(rank *self, ms_tensor **out)
{
    ms_status status = make(self, MS_F32, 4, false, out);
    if (!status) status = fill(*out, NULL, NULL);
    if (!status) status = call(self, MS_ALL_REDUCE, MS_REDUCE_OP_SUM, *out, NULL, NULL);
    return status ? status : ms_engine_sync(self->engine);
}

/* The host makes no call after the one that failed later: the watchdog finds it. */
static void wait_for_the_end(rank *self)
{
    ms_tensor *t = NULL;
    ms_abort_record cause;
    self->status = reduce_once(self, &t);
    while (!ms_rendezvous_cause(self->rendezvous, &cause)) sched_yield();
    if (!self->status) self->status = ms_comm_check(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

/* The host asks in its next call. */
static void ask_for_the_end(rank *self)
{
    ms_tensor *t = NULL;
    self->status = reduce_once(self, &t);
    while (!self->status) self->status = ms_comm_check(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

static void errors_after_the_end_of_a_call_are_found(void **state)
{
    (void)state;
    void (*const ways[])(rank *) = { wait_for_the_end, ask_for_the_end };
    for (int way = 0; way < 2; way++)
        for (int code = 1; code <= 6; code++) {
            if (!ranges_are_long() && (code + way) % 3) continue;
            char what[64];
            rank ranks[2];
            snprintf(what, sizeof what, "async:ncclAllReduce:1:%d@1", code);
            plan(what);
            ms_abort_record cause = run_ranks(THREADS, ways[way], HANG_NS, ranks);
            assert_int_equal(cause.reason, MS_ABORT_RAISED);
            for (int r = 0; r < 2; r++) {
                assert_int_not_equal(ranks[r].status, MS_OK);
                expect(ranks[r].error.message, "ncclCommGetAsyncError fails on rank 1");
                expect(ranks[r].error.message, "all_reduce #1 of world [f32 x 4, sum, bucket 7");
            }
        }
}

/* --------------------------------------------------------------- time limits */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void message(rank *self)
{
    ms_tensor *t = NULL;
    OK(make(self, MS_F32, 4, false, &t));
    OK(fill(t, NULL, NULL));
    OK(ms_group_barrier(self->world, 0));
    self->status = call(self, self->number ? MS_RECV : MS_SEND, 0, t, NULL, NULL);
    if (!self->status) self->status = ms_engine_sync(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

/* What never ends in one rank's NCCL ends both within the time limit, and names the operation. The
 * limit counts for each call, so earlier calls do not matter. */
static void what_never_ends_is_a_timeout(void **state)
{
    (void)state;
    static const struct {
        const char *plan, *says;
        void (*run)(rank *);
    } cases[] = { { "never:ncclCommInitRankConfig:1@1", " world", program },
                  { "never:ncclAllReduce:2@0", "all_reduce #", program },
                  { "never:ncclReduceScatter:1@1", "reduce_scatter #", program },
                  { "never:ncclGroupEnd:1@1", "reduce_scatter #", program },
                  { "never:ncclBroadcast:3@0", "broadcast #", program },
                  { "never:ncclSend:1@0", "#1 of world [f32 x 4, peer", message } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rank ranks[2];
        plan(cases[i].plan);
        ms_abort_record cause = run_ranks(THREADS, cases[i].run, SHORT_NS, ranks);
        if (cause.reason != MS_ABORT_TIMEOUT) fail_msg("%s: no timeout", cases[i].plan);
        for (int r = 0; r < 2; r++) {
            assert_int_equal(ranks[r].status, MS_ERROR_TIMEOUT);
            expect(ranks[r].error.message, cases[i].says);
            expect(ranks[r].error.message, "rank ");
        }
    }
}

/* status: MS_ERROR_STATE where it took another time than the limit and a tenth of it. The other
 * rank may have begun a little earlier. */
static void reduce_in_time(rank *self)
{
    ms_tensor *t = NULL;
    OK(ms_group_barrier(self->world, 0));
    uint64_t began = now_ns();
    self->status = reduce_once(self, &t);
    uint64_t took = now_ns() - began;
    self->error = *ms_engine_error(self->engine);
    CHECK(self->status == MS_ERROR_TIMEOUT && took >= 1500000000u);
    if (took > 2200000000u) self->status = MS_ERROR_STATE;
    ms_tensor_release(t);
}

/* A busy machine may delay many tries, but not all of them. */
static void a_timeout_comes_in_time(void **state)
{
    (void)state;
    rank ranks[2];
    bool in_time = false;
    for (int tries = 0; tries < 100 && !in_time; tries++) {
        plan("never:ncclAllReduce:3"); /* after the barrier of each rank */
        assert_int_equal(run_ranks(THREADS, reduce_in_time, 2000000000u, ranks).reason,
                         MS_ABORT_TIMEOUT);
        expect(ranks[0].error.message, "all_reduce #2 of world");
        in_time = ranks[0].status == MS_ERROR_TIMEOUT && ranks[1].status == MS_ERROR_TIMEOUT;
        if (in_time) expect(ranks[0].error.message, "in 2.");
    }
    assert_true(in_time);
}

/* A call's own limit holds, where the job's is half an hour. */
static void barrier_in_time(rank *self)
{
    OK(ms_group_barrier(self->world, 0));
    self->status = ms_group_barrier(self->world, SHORT_NS);
    self->error = *ms_engine_error(self->engine);
}

static void a_call_has_a_limit_of_its_own(void **state)
{
    (void)state;
    rank ranks[2];
    plan("never:ncclAllReduce:2@1");
    assert_int_equal(run_ranks(THREADS, barrier_in_time, HANG_NS, ranks).reason, MS_ABORT_TIMEOUT);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(ranks[r].status, MS_ERROR_TIMEOUT);
        expect(ranks[r].error.message, "barrier #2 of world");
    }
}

static void what_comes_late_is_no_error(void **state)
{
    (void)state;
    static const char *const plans[] = { "late:ncclCommInitRankConfig:2:50@0",
                                         "late:ncclAllReduce:2:50@1 late:ncclGroupEnd:3:30@0",
                                         "late:ncclCommFinalize:1:50@0" };
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        rank ranks[2];
        plan(plans[i]);
        assert_int_equal(run_ranks(THREADS, program, HANG_NS, ranks).reason, MS_ABORT_NONE);
        assert_true(ranks[0].status == MS_OK && ranks[1].status == MS_OK);
    }
}

/* ---------------------------------------------------------- ends of the job */

/* Rank 1 does not come to the call, and ends the job instead. */
static void wait_for_the_other(rank *self)
{
    ms_tensor *t = NULL;
    OK(ms_group_barrier(self->world, 0));
    if (self->number == 1) {
        ms_comm_leave(self->engine, "the disk is full");
        return;
    }
    self->status = reduce_once(self, &t);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

static void the_end_of_the_job_ends_calls(void **state)
{
    (void)state;
    rank ranks[2];
    plan(NULL);
    assert_int_equal(run_ranks(THREADS, wait_for_the_other, HANG_NS, ranks).reason,
                     MS_ABORT_RAISED);
    assert_int_equal(ranks[0].status, MS_ERROR_ABORTED);
    expect(ranks[0].error.message, "because rank 1: the disk is full");
}

/* Rank 0 has calls under way in two groups when rank 1 ends the job. An abort waits for all work of
 * the GPU, so neither communicator could be aborted before the other. */
static void wait_in_two_groups(rank *self)
{
    static const uint32_t both[] = { 0, 1 }, two[] = { 2 };
    int (*under_way)(void) = (int (*)(void))stub("stub_nccl_under_way");
    ms_tensor *t[2] = { NULL };
    ms_group *groups[2] = { self->world, NULL };
    OK(ms_group_split(self->world, 1, two, both, &groups[1]));
    for (int i = 0; i < 2; i++) {
        OK(make(self, MS_F32, 4, false, &t[i]));
        OK(fill(t[i], NULL, NULL));
        OK(ms_group_barrier(groups[i], 0));
    }
    OK(ms_group_barrier(self->world, 0));
    while (self->number == 0 && under_way()) sched_yield();
    for (int i = 0; i < 2 && self->number == 0; i++) {
        ms_collective c = { .kind = MS_ALL_REDUCE, .in = t[i], .bucket = -1 };
        OK(ms_group_enqueue(groups[i], 1, &c, NULL));
    }
    if (self->number == 1) {
        while (under_way() < 2) sched_yield();
        ms_comm_leave(self->engine, "the disk is full");
    } else self->status = ms_engine_sync(self->engine);
    ms_tensor_release(t[0]);
    ms_tensor_release(t[1]);
}

typedef struct shared_count {
    _Atomic int value;
} shared_count;

static void count_warning(void *user, ms_log_level level, const char *text)
{
    (void)text;
    if (level == MS_LOG_WARN) atomic_fetch_add(&((shared_count *)user)->value, 1);
}

static void all_communicators_are_aborted_together(void **state)
{
    (void)state;
    rank ranks[2];
    shared_count *warnings =
        mmap(NULL, sizeof *warnings, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(warnings != MAP_FAILED);
    job work = { .kind = THREADS,
                 .open = open_nccl,
                 .run = wait_in_two_groups,
                 .argument = warnings,
                 .log = count_warning,
                 .options = {
                     .ranks = 2, .threads = 1, .heap_bytes = 1 << 20, .timeout_ns = HANG_NS } };
    plan(NULL);
    assert_int_equal(run_job(&work, ranks).reason, MS_ABORT_RAISED);
    for (int r = 0; r < 2; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
    assert_int_equal(ranks[0].status, MS_ERROR_ABORTED);
    /* Else "NCCL does not come back from closing the communicators". */
    assert_int_equal(warnings->value, 0);
    munmap(warnings, sizeof *warnings);
}

/* What rank 1 does instead of coming to the call. */
typedef enum otherwise { IT_FINISHES, IT_CALLS_ANOTHER, IT_DOES_NOTHING } otherwise;

static void wait_in_vain(rank *self)
{
    static const uint32_t both[] = { 0, 1 }, two[] = { 2 };
    const otherwise *what = self->job->argument;
    ms_tensor *t = NULL;
    ms_group *part = NULL;
    ms_abort_record cause;
    OK(ms_group_split(self->world, 1, two, both, &part));
    OK(ms_group_barrier(part, 0));
    OK(ms_group_barrier(self->world, 0));
    if (self->number == 0) self->status = reduce_once(self, &t);
    else if (*what == IT_FINISHES) return;
    else if (*what == IT_CALLS_ANOTHER) self->status = ms_group_barrier(part, 0);
    while (!ms_rendezvous_cause(self->rendezvous, &cause)) sched_yield();
    if (!self->status) self->status = ms_comm_check(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

/* At once where it can be known, and else within the limit. */
static void a_rank_that_does_not_come_is_named(void **state)
{
    (void)state;
    static const struct {
        otherwise what;
        ms_abort_reason reason;
        uint64_t timeout_ns;
        const char *says, *says_too;
    } cases[] = { { IT_FINISHES, MS_ABORT_LEFT, HANG_NS, "rank 1 left after barrier #",
                    "while rank 0 waits for it at all_reduce #3 of world" },
                  { IT_CALLS_ANOTHER, MS_ABORT_MISMATCH, HANG_NS, "all_reduce #3 of world",
                    "barrier #2 of world/" },
                  { IT_DOES_NOTHING, MS_ABORT_TIMEOUT, SHORT_NS,
                    "rank 1 has not come to all_reduce #3 of world", "rank 0 waits for it" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rank ranks[2];
        job work = { .kind = THREADS,
                     .open = open_nccl,
                     .run = wait_in_vain,
                     .argument = &cases[i].what,
                     .options = { .ranks = 2,
                                  .threads = 1,
                                  .heap_bytes = 1 << 20,
                                  .timeout_ns = cases[i].timeout_ns } };
        plan(NULL);
        assert_int_equal(run_job(&work, ranks).reason, cases[i].reason);
        for (int r = 0; r < 2; r++)
            if (*ranks[r].why) fail_msg("%s", ranks[r].why);
        expect(ranks[0].error.message, cases[i].says);
        expect(ranks[0].error.message, cases[i].says_too);
    }
}

/* Reports read what ranks were in, and what they had done. */
static void record(rank *self)
{
    ms_flight first, second;
    ms_tensor *t = NULL;
    self->status = reduce_once(self, &t);
    ms_tensor_release(t);
    OK(ms_group_barrier(self->world, 0));
    /* Before them come the ids of the communicators. */
    CHECK(ms_rendezvous_flight(self->rendezvous, self->number, 1, &first));
    CHECK(ms_rendezvous_flight(self->rendezvous, self->number, 2, &second));
    CHECK(first.kind == MS_ALL_REDUCE && first.bucket == 7 && first.count == 4 && first.left_ns);
    CHECK(second.kind == MS_BARRIER && second.number == 2 && second.left_ns >= second.entered_ns);
}

static void calls_are_in_the_flight_record(void **state)
{
    (void)state;
    rank ranks[2];
    plan(NULL);
    assert_int_equal(run_ranks(THREADS, record, HANG_NS, ranks).reason, MS_ABORT_NONE);
}

/* The abort of one rank hangs: its engine is freed all the same, and its process ends. */
static void an_abort_that_hangs_does_not_hold_the_process(void **state)
{
    (void)state;
    /* There the host waits for the GPU, and the supervisor kills the process. */
    if (device_is_cuda()) skip();
    static const char *const plans[] = {
        "fail:ncclAllReduce:2:2@1 hang:ncclCommAbort:1@0",
        "fail:ncclAllReduce:2:2@1 hang:ncclCommAbort:3@1",
        "never:ncclAllGather:1@1 hang:ncclCommAbort:1",
        "hang:ncclCommFinalize:1@1",
    };
    for (size_t i = 0; i < sizeof plans / sizeof *plans; i++) {
        rank ranks[2];
        job work = {
            .kind = PROCESSES,
            .open = open_nccl,
            .run = program,
            .options = { .ranks = 2, .threads = 1, .heap_bytes = 1 << 20, .timeout_ns = SHORT_NS }
        };
        plan(plans[i]);
        run_job(&work, ranks);
        for (int r = 0; r < 2; r++)
            if (*ranks[r].why) fail_msg("%s", ranks[r].why);
        assert_int_equal(ranks[0].status != MS_OK, i < 3);
    }
}

/* A rank that has ended without closing its communicators: the other does not wait for it until the
 * time limit. */
static void closing_does_not_wait_for_what_cannot_come(void **state)
{
    (void)state;
    rank ranks[2];
    uint64_t began = now_ns(), limit = 20000000000u; /* it waits for a tenth of it */
    plan("fail:ncclCommFinalize:1:3@1");
    assert_int_equal(run_ranks(THREADS, program, limit, ranks).reason, MS_ABORT_NONE);
    assert_true(ranks[0].status == MS_OK && ranks[1].status == MS_OK);
    assert_true(now_ns() - began < limit);
}

/* ------------------------------------------------------------------- refusals */

static void refusals(rank *self)
{
    static const int64_t sent[2][2] = { { 1, 3 }, { 2, 2 } },
                         expected[2][2] = { { 1, 2 }, { 1, 3 } };
    ms_tensor *words = NULL, *in = NULL, *out = NULL;
    OK(make(self, MS_U16, 4, false, &words));
    OK(fill(words, NULL, NULL));
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = words, .bucket = -1 };
    CHECK(run_one(self, self->world, &c) == MS_ERROR_UNSUPPORTED);
    c.kind = MS_BROADCAST;
    OK(run_one(self, self->world, &c));
    OK(make(self, MS_F32, 4, false, &in));
    OK(fill(in, NULL, NULL));
    c = (ms_collective){ .kind = MS_ALL_REDUCE, .in = in, .travels = MS_BF16, .bucket = -1 };
    CHECK(run_one(self, self->world, &c) == MS_ERROR_UNSUPPORTED);
    /* Both refuse: rank 1 gets 3 elements of rank 0 and expects 1. */
    int64_t n = expected[self->number][0] + expected[self->number][1];
    OK(make(self, MS_F32, n, false, &out));
    c = (ms_collective){ .kind = MS_ALL_TO_ALL,
                         .in = in,
                         .out = out,
                         .counts = sent[self->number],
                         .receive_counts = expected[self->number],
                         .bucket = -1 };
    self->status = run_one(self, self->world, &c);
    if (!self->status) self->status = ms_engine_sync(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(words);
    ms_tensor_release(in);
    ms_tensor_release(out);
}

static void what_would_be_wrong_is_refused(void **state)
{
    (void)state;
    rank ranks[2];
    plan(NULL);
    assert_int_equal(run_ranks(THREADS, refusals, HANG_NS, ranks).reason, MS_ABORT_MISMATCH);
    for (int r = 0; r < 2; r++) {
        assert_int_equal(ranks[r].status, MS_ERROR_MISMATCH);
        expect(ranks[r].error.message, "ranks disagree in all_to_all #2 of world");
        expect(ranks[r].error.message, "rank 0 sends 3 elements to rank 1\n  rank 1 expects 1");
    }
}

static double number_of(const void *context, int64_t i)
{
    (void)i;
    return *(const uint32_t *)context;
}

/* Sends and receives of a direction run in the order of calls, whatever the threads do: rank 1's
 * send would wait for rank 2, which waits for rank 0, which waits for rank 1's receive. */
static void in_turn(rank *self)
{
    static const struct {
        uint32_t rank;
        ms_collective_kind kind;
        uint32_t peer;
    } calls[] = { { 0, MS_SEND, 1 }, { 0, MS_SEND, 2 }, { 1, MS_RECV, 0 },
                  { 1, MS_SEND, 2 }, { 2, MS_RECV, 0 }, { 2, MS_RECV, 1 } };
    ms_tensor *t[6] = { NULL };
    /* More than the stub keeps on the way. */
    for (int i = 0; i < 6; i++) {
        if (calls[i].rank != self->number) continue;
        OK(make(self, MS_F32, 20000, false, &t[i]));
        OK(fill(t[i], number_of, &self->number));
    }
    OK(ms_group_barrier(self->world, 0));
    for (int round = 0; round < 50; round++)
        for (int i = 0; i < 6; i++) {
            ms_collective c = {
                .kind = calls[i].kind, .in = t[i], .root = calls[i].peer, .bucket = -1
            };
            if (t[i]) OK(ms_group_enqueue(self->world, 1, &c, NULL));
        }
    OK(ms_engine_sync(self->engine));
    for (int i = 0; i < 6; i++) {
        if (t[i] && calls[i].kind == MS_RECV) CHECK(equals(t[i], number_of, &calls[i].peer));
        ms_tensor_release(t[i]);
    }
}

static void messages_of_a_direction_keep_their_order(void **state)
{
    (void)state;
    rank ranks[3];
    job work = { .kind = THREADS,
                 .open = open_nccl,
                 .run = in_turn,
                 .options = {
                     .ranks = 3, .threads = 1, .heap_bytes = 1 << 20, .timeout_ns = HANG_NS } };
    plan(NULL);
    run_job(&work, ranks);
    for (int r = 0; r < 3; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
}

/* ---------------------------------------------------------------- the stub */

/* It ends a process that breaks NCCL's rule, so that the tests above mean what they say. */
static void the_stub_enforces_the_rule(void **state)
{
    (void)state;
    ms_nccl_api api;
    ms_context context;
    plan(NULL);
    ms_context_init(&context, NULL);
    assert_int_equal(ms_nccl_load(&context, &api), MS_OK);
    for (int asks = 0; asks < 2; asks++) {
        int status = 0;
        pid_t child = fork();
        if (child == 0) {
            ms_nccl_id id;
            ms_nccl_handle comm = NULL;
            ms_nccl_result result = MS_NCCL_IN_PROGRESS;
            ms_nccl_config config = { .size = sizeof config,
                                      .magic = MS_NCCL_CONFIG_MAGIC,
                                      .version = MS_NCCL_VERSION_LEAST };
            float number = 1;
            fclose(stderr);
            plan("late:ncclAllReduce:1:20");
            api.get_unique_id(&id);
            api.comm_init_rank_config(&comm, 1, id, 0, &config);
            if (api.all_reduce(&number, &number, 1, MS_NCCL_FLOAT32, MS_NCCL_SUM, comm, NULL)
                != MS_NCCL_IN_PROGRESS)
                _exit(2);
            while (asks && result == MS_NCCL_IN_PROGRESS) api.comm_get_async_error(comm, &result);
            api.all_reduce(&number, &number, 1, MS_NCCL_FLOAT32, MS_NCCL_SUM, comm, NULL);
            _exit(0);
        }
        waitpid(child, &status, 0);
        if (asks) assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        else assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_library_that_does_not_fit_is_refused),
        cmocka_unit_test(without_errors_all_calls_succeed),
        cmocka_unit_test(memory_is_registered_between_processes),
        cmocka_unit_test(ranks_of_two_hosts_use_it),
        cmocka_unit_test(every_error_names_rank_and_operation),
        cmocka_unit_test(errors_of_other_functions_end_the_job),
        cmocka_unit_test(two_ranks_of_one_gpu_hear_what_to_set),
        cmocka_unit_test(an_unknown_code_is_an_error),
        cmocka_unit_test(errors_after_the_end_of_a_call_are_found),
        cmocka_unit_test(what_never_ends_is_a_timeout),
        cmocka_unit_test(a_timeout_comes_in_time),
        cmocka_unit_test(a_call_has_a_limit_of_its_own),
        cmocka_unit_test(what_comes_late_is_no_error),
        cmocka_unit_test(the_end_of_the_job_ends_calls),
        cmocka_unit_test(all_communicators_are_aborted_together),
        cmocka_unit_test(a_rank_that_does_not_come_is_named),
        cmocka_unit_test(calls_are_in_the_flight_record),
        cmocka_unit_test(an_abort_that_hangs_does_not_hold_the_process),
        cmocka_unit_test(closing_does_not_wait_for_what_cannot_come),
        cmocka_unit_test(what_would_be_wrong_is_refused),
        cmocka_unit_test(messages_of_a_direction_keep_their_order),
        cmocka_unit_test(the_stub_enforces_the_rule),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
