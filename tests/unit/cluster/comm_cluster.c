/* comm_cluster.c: collectives over several hosts: the order in which they add, what goes between
 * hosts, messages that fail, and programs that give the bits of one host. */
#include "comm_support.h"

#include "comm/control_table.h"
#include "comm/group.h"
#include "comm/transport_table.h"
#include "ranges.h"

static const char *const layouts[] = { "01", "011", "0011", "0111", "0012", "10011" };
#define LAYOUTS (sizeof layouts / sizeof *layouts)

/* -------------------------------------------------------------------- order */

typedef struct sum {
    const char *layout;
    uint32_t ranks, number;
    ms_dtype dtype, travels; /* travels: the dtype to which numbers are rounded on their way */
    ms_reduce_op op;
    int64_t from;
    const double *results; /* of_hosts of each element, which all ranks share */
} sum;

static float rounded(ms_dtype dtype, float x)
{
    if (dtype == MS_BF16) return ms_float_from_bf16(ms_bf16_from_float(x));
    return dtype == MS_F16 ? ms_float_from_f16(ms_f16_from_float(x)) : x;
}

/* Numbers that do round, of each rank. */
enum { RANKS = 5, MOST = 400000 + RANKS };
static float numbers[RANKS][MOST];
static void make_numbers(void)
{
    for (uint32_t r = 0; r < RANKS; r++)
        for (uint64_t i = 0; i < MOST; i++) {
            uint32_t out[4];
            ms_philox(r, 5, i, out);
            numbers[r][i] = ((float)out[0] / 4294967296.0f - 0.5f) * (float)(1 << (out[1] % 12));
        }
}

static float number_of(const sum *s, uint32_t who, int64_t i)
{
    return rounded(s->travels, rounded(s->dtype, numbers[who][i + s->from]));
}

static double mine(const void *context, int64_t i)
{
    const sum *s = context;
    return (double)numbers[s->number][i + s->from];
}

static float factor_of(uint32_t who) { return 0.75f + 0.3f * (float)who; }

/* The ranks of a host in their order, rounded to what travels; then hosts, in the order of their
 * first ranks. */
static double of_hosts(const void *context, int64_t i)
{
    const sum *s = context;
    float total = 0;
    bool first = true;
    for (uint32_t r = 0; r < s->ranks; r++) {
        if (strchr(s->layout, s->layout[r]) != s->layout + r) continue;
        float host = 0;
        for (uint32_t m = r; m < s->ranks; m++) {
            if (s->layout[m] != s->layout[r]) continue;
            float x = number_of(s, m, i);
            if (s->op == MS_REDUCE_OP_PREMUL_SUM) x *= factor_of(m);
            host = m == r ? x : host + x;
        }
        host = rounded(s->travels, rounded(s->dtype, host));
        total = first ? host : total + host;
        first = false;
    }
    if (s->op == MS_REDUCE_OP_AVG) total /= (float)s->ranks;
    return (double)rounded(s->travels, total);
}

static double result(const void *context, int64_t i)
{
    const sum *s = context;
    return s->results[i + s->from];
}

static void adds_by_nodes(rank *self, sum *s, int64_t n, bool heap)
{
    ms_tensor *t = NULL, *out = NULL, *part = NULL, *rooted = NULL;
    uint32_t root = self->ranks - 1;
    int64_t whole = n * self->ranks;
    OK(make(self, s->dtype, whole, heap, &t));
    OK(make(self, s->dtype, whole, heap, &out));
    OK(make(self, s->dtype, whole, heap, &rooted));
    OK(make(self, s->dtype, n, heap, &part));
    OK(fill(t, mine, s));
    OK(fill(rooted, mine, s));
    ms_collective c = { .kind = MS_REDUCE_SCATTER,
                        .op = s->op,
                        .factor = (double)factor_of(self->number),
                        .in = t,
                        .out = part,
                        .bucket = -1,
                        .root = root };
    if (s->travels == MS_F32) {
        OK(run_one(self, self->world, &c));
        s->from = n * self->number;
        CHECK(equals(part, result, s));
        s->from = 0;
        c.kind = MS_REDUCE;
        c.in = rooted;
        c.out = NULL;
        OK(run_one(self, self->world, &c));
        CHECK(equals(rooted, self->number == root ? result : mine, s));
    }
    c.kind = MS_ALL_REDUCE;
    c.in = t;
    if (s->travels == MS_F32) {
        c.out = out;
        OK(run_one(self, self->world, &c));
        CHECK(equals(out, result, s));
        CHECK(equals(t, mine, s));
    }
    c.out = NULL;
    c.travels = s->travels;
    OK(run_one(self, self->world, &c));
    CHECK(equals(t, result, s));
    ms_tensor *all[] = { t, out, part, rooted };
    for (int i = 0; i < 4; i++) ms_tensor_release(all[i]);
}

static const struct {
    ms_dtype dtype, travels;
    ms_reduce_op op;
    int64_t total;
} cases[] = {
    { MS_F32, MS_F32, MS_REDUCE_OP_SUM, 6 },
    { MS_F32, MS_F32, MS_REDUCE_OP_SUM, 400000 },
    { MS_F16, MS_F32, MS_REDUCE_OP_AVG, 1000 },
    { MS_BF16, MS_F32, MS_REDUCE_OP_AVG, 150000 },
    { MS_F32, MS_F32, MS_REDUCE_OP_AVG, 4000 },
    { MS_F32, MS_F32, MS_REDUCE_OP_PREMUL_SUM, 20000 },
    { MS_F16, MS_F32, MS_REDUCE_OP_SUM, 180000 },
    { MS_BF16, MS_F32, MS_REDUCE_OP_PREMUL_SUM, 200 },
    { MS_F32, MS_BF16, MS_REDUCE_OP_SUM, 300 },
    { MS_F32, MS_F16, MS_REDUCE_OP_SUM, 100000 },
    { MS_F32, MS_BF16, MS_REDUCE_OP_AVG, 60000 },
    { MS_F32, MS_BF16, MS_REDUCE_OP_AVG, 300000 },
};
#define CASES (sizeof cases / sizeof *cases)

static sum sum_of(const char *layout, size_t i)
{
    return (sum){ .layout = layout,
                  .ranks = (uint32_t)strlen(layout),
                  .dtype = cases[i].dtype,
                  .travels = cases[i].travels,
                  .op = cases[i].op };
}
/* How many elements each rank gets of a case. */
static int64_t share_of(const sum *s, size_t i) { return cases[i].total / s->ranks + 1; }

static void sums(rank *self)
{
    double *const *results = self->job->argument;
    for (size_t i = 0; i < CASES; i++)
        for (unsigned heap = 0; heap < 2 && !*self->why; heap++) {
            sum s = sum_of(self->job->layout, i);
            /* Each case in one of the two kinds of memory, in the other one under another layout.
             */
            if (!ranges_are_long() && (i + self->ranks) % 2 != heap) continue;
            s.number = self->number;
            s.results = results[i];
            adds_by_nodes(self, &s, share_of(&s, i), heap);
        }
}

static void hosts_are_added_one_after_the_other(void **state)
{
    (void)state;
    for (size_t k = 0; k < LAYOUTS; k++) {
        double *results[CASES];
        for (size_t i = 0; i < CASES; i++) {
            sum s = sum_of(layouts[k], i);
            int64_t whole = share_of(&s, i) * s.ranks;
            results[i] = malloc((size_t)whole * sizeof *results[i]);
            for (int64_t e = 0; e < whole; e++) results[i][e] = of_hosts(&s, e);
        }
        run_as(THREADS, layouts[k], false, (uint32_t)strlen(layouts[k]), sums, results);
        for (size_t i = 0; i < CASES; i++) free(results[i]);
    }
}

/* ------------------------------------------------------------------ programs */

enum { LENGTH = 8 };

typedef struct program {
    uint64_t seed;
    uint64_t *hashes; /* of the results, by rank */
} program;

static uint32_t draw(const program *p, uint64_t what, uint32_t below)
{
    uint32_t out[4];
    ms_philox(p->seed, 91, what, out);
    return out[0] % below;
}

typedef struct filling {
    uint64_t seed;
    uint32_t number, at;
    ms_dtype dtype;
} filling;

static double any_number(const void *context, int64_t i)
{
    const filling *d = context;
    uint32_t out[4];
    ms_philox(d->seed, 1000 * d->number + d->at, (uint64_t)i, out);
    return ms_dtype_is_float(d->dtype) ? ((double)out[0] / 4294967296.0 - 0.5) * (1 << out[1] % 9)
                                       : (double)(out[0] % 100);
}

/* A call that is drawn: of `in` and `out` elements on this rank. */
typedef struct call {
    ms_collective c;
    ms_dtype dtype;
    int64_t in, out;
    uint32_t channel;
    bool heaps[2], has_out;
} call;

static call draw_call(const program *p, uint32_t i, uint32_t size)
{
    static const ms_dtype dtypes[] = { MS_F32, MS_F16, MS_BF16, MS_I64, MS_U8 };
    static const int64_t sizes[] = { 0, 1, 17, 3001, 20001 };
    static const ms_collective_kind kinds[] = { MS_ALL_REDUCE, MS_ALL_REDUCE, MS_REDUCE_SCATTER,
                                                MS_REDUCE,     MS_ALL_GATHER, MS_ALL_TO_ALL,
                                                MS_BROADCAST,  MS_GATHER,     MS_SCATTER,
                                                MS_BARRIER,    MS_SEND };
    uint64_t base = 16 * (uint64_t)i;
    call drawn = { .dtype = dtypes[draw(p, base, 5)], .channel = 1 + draw(p, base + 5, 2) };
    ms_collective_kind kind = kinds[draw(p, base + 1, 11)];
    ms_reduce_op op = draw(p, base + 2, 4) == 0 ? MS_REDUCE_OP_MAX : MS_REDUCE_OP_SUM;
    bool gathers = kind == MS_ALL_GATHER || kind == MS_GATHER, all = kind == MS_ALL_TO_ALL,
         cuts = kind == MS_REDUCE_SCATTER || kind == MS_SCATTER;
    if (ms_dtype_is_float(drawn.dtype) && draw(p, base + 7, 3) == 0 && op == MS_REDUCE_OP_SUM)
        op = MS_REDUCE_OP_AVG;
    drawn.c =
        (ms_collective){ .kind = kind, .op = op, .root = draw(p, base + 3, size), .bucket = -1 };
    drawn.in = drawn.out = sizes[draw(p, base + 4, 5)];
    if (cuts || all) drawn.in *= size;
    if (gathers || all) drawn.out *= size;
    drawn.has_out = gathers || cuts || all || (kind == MS_ALL_REDUCE && draw(p, base + 6, 2) == 1);
    drawn.heaps[0] = draw(p, base + 8, 2) == 1;
    drawn.heaps[1] = draw(p, base + 9, 2) == 1;
    return drawn;
}

/* A send is everybody's to the next member, with the receive that goes with it. */
static ms_status enqueue(ms_group *group, const call *drawn, ms_tensor *in, ms_tensor *out,
                         ms_point *ready)
{
    uint32_t size = ms_group_size(group), number = ms_group_rank(group);
    ms_collective c = drawn->c;
    bool is_root = number == c.root;
    if (c.kind != MS_BARRIER && (c.kind != MS_SCATTER || is_root)) c.in = in;
    if (drawn->has_out && (c.kind != MS_GATHER || is_root)) c.out = out;
    if (c.kind != MS_SEND) return ms_group_enqueue(group, drawn->channel, &c, ready);
    c.root = (number + 1) % size;
    ms_status status = ms_group_enqueue(group, drawn->channel, &c, ready);
    c = (ms_collective){
        .kind = MS_RECV, .in = out, .root = (number + size - 1) % size, .bucket = -1
    };
    return status ? status : ms_group_enqueue(group, drawn->channel, &c, ready);
}

/* One call on new tensors, whose contents are added to the rank's hash. */
static void one_call(rank *self, const program *p, uint32_t i, ms_group *group)
{
    call called = draw_call(p, i, ms_group_size(group));
    filling d = { .seed = p->seed, .number = self->number, .at = i, .dtype = called.dtype };
    ms_tensor *both[2] = { NULL, NULL };
    ms_point ready;
    OK(make(self, called.dtype, called.in, called.heaps[0], &both[0]));
    OK(make(self, called.dtype, called.out, called.heaps[1], &both[1]));
    OK(fill(both[0], any_number, &d));
    OK(fill(both[1], NULL, NULL));
    OK(enqueue(group, &called, both[0], both[1], &ready));
    OK(ms_stream_wait(ms_engine_current(self->engine), ready));
    for (int t = 0; t < 2; t++) {
        size_t bytes = ms_tensor_bytes(both[t]);
        void *values = malloc(bytes + 1);
        OK(ms_tensor_read(both[t], values, bytes));
        p->hashes[self->number] = ms_hash(values, bytes, p->hashes[self->number]);
        free(values);
        ms_tensor_release(both[t]);
    }
}

/* Calls of the world, of the halves and of three ranks in another order. */
static void run_program(rank *self)
{
    const program *p = self->job->argument;
    static const uint32_t halves[] = { 0, 1, 2, 3 }, two[] = { 2, 2 }, turned[] = { 3, 0, 2 },
                          across[] = { 0, 3, 1, 2 }, three[] = { 3 };
    ms_group *groups[4] = { self->world };
    OK(ms_group_split(self->world, 2, two, halves, &groups[1]));
    OK(ms_group_split(self->world, 2, two, across, &groups[2]));
    OK(ms_group_split(self->world, 1, three, turned, &groups[3]));
    for (uint32_t i = 0; i < LENGTH && !*self->why; i++) {
        ms_group *group = groups[draw(p, 16 * (uint64_t)i + 10, 4)];
        if (group) one_call(self, p, i, group);
    }
}

/* Sanitizers take ten times as long. */
static void programs_give_the_bits_of_one_host(void **state)
{
    (void)state;
    const char *sanitizer = getenv("MOONSHARD_SANITIZE");
    uint64_t programs = sanitizer && *sanitizer ? 20 : ranges_are_long() ? 200 : 24;
    for (uint64_t seed = 1; seed <= programs; seed++) {
        uint64_t one[4] = { 0 }, several[4] = { 0 };
        program p = { .seed = seed, .hashes = one };
        run_as(THREADS, "", true, 4, run_program, &p);
        p.hashes = several;
        run_as(THREADS, "0011", true, 4, run_program, &p);
        for (int r = 0; r < 4; r++)
            if (one[r] != several[r])
                fail_msg("program %llu: rank %d differs", (unsigned long long)seed, r);
    }
}

/* Without it the bits may be others, but are the same in every run. */
static void programs_give_the_same_bits_again(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= (ranges_are_long() ? 10 : 5); seed++) {
        uint64_t hashes[2][4] = { { 0 } };
        for (int again = 0; again < 2; again++) {
            program p = { .seed = seed, .hashes = hashes[again] };
            run_as(THREADS, "0111", false, 4, run_program, &p);
        }
        for (int r = 0; r < 4; r++) assert_int_equal(hashes[0][r], hashes[1][r]);
    }
}

/* ------------------------------------------------------------------- traffic */

/* Of a tensor of which bytes are counted. */
#define COUNTED ((int64_t)1 << 18)
#define COUNTED_BYTES ((uint64_t)4 * COUNTED)

typedef struct bytes {
    ms_dtype travels;
    bool heap;
    uint64_t of_world[8], of_half[8]; /* by rank */
} bytes;

static void count_bytes(rank *self)
{
    static const uint32_t halves[] = { 0, 1, 2, 3 }, two[] = { 2, 2 };
    bytes *counted = (bytes *)(uintptr_t)self->job->argument;
    ms_group *half = NULL;
    ms_tensor *t = NULL;
    OK(ms_group_split(self->world, 2, two, halves, &half));
    OK(make(self, MS_F32, COUNTED, counted->heap, &t));
    OK(fill(t, NULL, NULL));
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1, .travels = counted->travels };
    OK(run_one(self, half, &c));
    OK(run_one(self, self->world, &c));
    OK(ms_engine_sync(self->engine));
    counted->of_world[self->number] = ms_group_bytes_between_nodes(self->world);
    counted->of_half[self->number] = ms_group_bytes_between_nodes(half);
    ms_tensor_release(t);
}

/* On 2 x 2 each rank sends the sum of its slice, half of the tensor. A ring of four ranks in the
 * order of hosts sends three halves of the tensor over each of two links. */
static void only_sums_of_hosts_travel(void **state)
{
    (void)state;
    bytes counted = { .travels = MS_F32, .heap = true };
    run_as(THREADS, "0011", false, 4, count_bytes, &counted);
    uint64_t tensor = COUNTED_BYTES, all = 0;
    for (int r = 0; r < 4; r++) {
        assert_int_equal(counted.of_world[r], tensor / 2);
        assert_int_equal(counted.of_half[r], 0);
        all += counted.of_world[r];
    }
    assert_int_equal(3 * all, 2 * (2 * 3 * tensor / 2));
    run_as(THREADS, "0011", true, 4, count_bytes, &counted);
    for (int r = 0; r < 4; r++) assert_int_equal(counted.of_world[r], tensor);
}

/* Over H hosts all send 2 (H - 1) times the tensor together, not H (H - 1) times. */
static void hosts_share_the_sums_of_long_tensors(void **state)
{
    (void)state;
    bytes counted = { .travels = MS_F32, .heap = true };
    static const char *const four[] = { "0123", "0112" };
    for (uint64_t h = 0; h < 2; h++) {
        uint64_t all = 0, hosts = h == 0 ? 4 : 3;
        run_as(THREADS, four[h], false, 4, count_bytes, &counted);
        for (int r = 0; r < 4; r++) all += counted.of_world[r];
        assert_int_equal(all, 2 * (hosts - 1) * COUNTED_BYTES);
    }
}

/* Numbers of f32 that are rounded to 16 bits take two bytes each on their way. */
static void rounded_sums_travel_in_16_bits(void **state)
{
    (void)state;
    for (int heap = 0; heap < 2; heap++) {
        bytes counted = { .travels = heap ? MS_F16 : MS_BF16, .heap = heap };
        run_as(THREADS, "0011", false, 4, count_bytes, &counted);
        for (int r = 0; r < 4; r++) assert_int_equal(counted.of_world[r], COUNTED_BYTES / 4);
        run_as(THREADS, "0111", false, 4, count_bytes, &counted);
        assert_int_equal(counted.of_world[0], COUNTED_BYTES / 2);
        assert_int_equal(counted.of_world[1], COUNTED_BYTES / 2);
        assert_int_equal(counted.of_world[2] + counted.of_world[3], 0);
    }
}

/* ------------------------------------------------------------------ failures */

static void until_it_fails(rank *self)
{
    ms_tensor *t = NULL;
    OK(make(self, MS_F32, 100000, true, &t));
    OK(fill(t, NULL, NULL));
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = 7 };
    for (int i = 0; i < 1000 && !self->status; i++) self->status = run_one(self, self->world, &c);
    if (!self->status) self->status = ms_engine_sync(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

static void a_message_that_fails_ends_the_job(void **state)
{
    (void)state;
    static rank ranks[4];
    for (unsigned failing = 1; failing <= 10; failing += ranges_are_long() ? 1 : 4) {
        job work = {
            .options = { .ranks = 4, .threads = 1, .heap_bytes = 16 << 20, .timeout_ns = HANG_NS },
            .layout = "0011",
            .run = until_it_fails
        };
        cluster_job_network(4096, failing);
        ms_abort_record cause = run_job(&work, ranks);
        cluster_job_network(4096, 0);
        assert_int_equal(cause.reason, MS_ABORT_RAISED);
        for (int r = 0; r < 4; r++) {
            assert_string_equal(ranks[r].why, "");
            assert_int_equal(ranks[r].status, MS_ERROR_ABORTED);
            assert_non_null(strstr(ranks[r].error.message, ": MPI did not receive from rank "));
            assert_non_null(
                strstr(ranks[r].error.message, "of world [f32 x 100000, sum, bucket 7"));
            assert_non_null(strstr(ranks[r].error.message, ": the cable is cut"));
        }
    }
}

/* Between hosts there must be an MPI. */
static void a_job_without_mpi_is_refused(void **state)
{
    (void)state;
    ms_rendezvous_options options = { .ranks = 2, .threads = 1, .heap_bytes = 4 << 20 };
    ms_engine_options of_engine = { .threads = 1, .strict = true };
    cluster_job *hosts = cluster_job_new(&options, "01");
    ms_engine *engine = NULL;
    ms_group *world = NULL;
    assert_int_equal(ms_engine_new(&of_engine, NULL, &engine), MS_OK);
    ms_membership membership = { .control = &ms_control_cluster,
                                 .transport = &ms_transport_mpi,
                                 .rendezvous = cluster_job_rendezvous(hosts, 0),
                                 .size = 2 };
    assert_int_equal(ms_comm_new(engine, &membership, &world), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "no MPI connects the hosts"));
    assert_null(world);
    ms_engine_free(engine);
    cluster_job_free(hosts);
}

/* ---------------------------------------------------------------------- link */

static void over_a_slow_link(rank *self)
{
    const ms_os *os = ms_os_posix();
    sum s = { .layout = self->job->layout, .ranks = self->ranks, .number = self->number };
    ms_tensor *t = NULL;
    OK(make(self, MS_F32, 100000, false, &t));
    OK(fill(t, mine, &s));
    OK(ms_group_barrier(self->world, 0));
    uint64_t begun = os->monotonic_ns(os->user);
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 };
    OK(run_one(self, self->world, &c));
    CHECK(equals(t, of_hosts, &s));
    CHECK(os->monotonic_ns(os->user) - begun >= 60000000);
    ms_tensor_release(t);
}

/* 400 KB at 10 MB/s, and 20 ms. */
static void a_simulated_link_delays_what_goes_between_hosts(void **state)
{
    (void)state;
    static rank ranks[2];
    job work = { .options = { .ranks = 2,
                              .threads = 1,
                              .heap_bytes = 16 << 20,
                              .link_bytes_per_second = 10000000,
                              .link_latency_ns = 20000000,
                              .timeout_ns = HANG_NS },
                 .layout = "01",
                 .run = over_a_slow_link };
    run_job(&work, ranks);
    for (int r = 0; r < 2; r++) assert_string_equal(ranks[r].why, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hosts_are_added_one_after_the_other),
        cmocka_unit_test(programs_give_the_bits_of_one_host),
        cmocka_unit_test(programs_give_the_same_bits_again),
        cmocka_unit_test(only_sums_of_hosts_travel),
        cmocka_unit_test(hosts_share_the_sums_of_long_tensors),
        cmocka_unit_test(rounded_sums_travel_in_16_bits),
        cmocka_unit_test(a_message_that_fails_ends_the_job),
        cmocka_unit_test(a_job_without_mpi_is_refused),
        cmocka_unit_test(a_simulated_link_delays_what_goes_between_hosts),
    };
    make_numbers();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
