/* comm_collectives.c: every collective compared with a result that is computed separately: ops,
 * dtypes, odd sizes, in heaps and staged, threads and processes.
 * ctest: each-isa nccl cuda-ranks over-hosts cuda-local */
#include "comm_support.h"

#include <math.h>

#include "ranges.h"

/* After the same with threads. Ranks of several hosts are always threads. */
static void run_processes(uint32_t count, void (*run)(rank *))
{
    if (!over_hosts()) run_well(PROCESSES, count, run, NULL);
}

/* Small whole numbers, which no order of additions rounds; as bool 0 and 1. */
static double start_of(uint32_t number, int64_t i, ms_dtype dtype)
{
    int64_t value = 1 + (number * 7 + i * 3 + i / 5) % 3;
    return dtype == MS_BOOL ? value % 2 : (double)value;
}

typedef struct whole {
    uint32_t ranks, number;
    ms_dtype dtype;
    ms_reduce_op op;
    int64_t from;
} whole;

static double own(const void *context, int64_t i)
{
    const whole *w = context;
    return start_of(w->number, i + w->from, w->dtype);
}

static double reduced(const void *context, int64_t i)
{
    const whole *w = context;
    double result = 0;
    for (uint32_t r = 0; r < w->ranks; r++) {
        double x = start_of(r, i + w->from, w->dtype);
        if (w->op == MS_REDUCE_OP_PREMUL_SUM) x *= 0.5 * (r + 1);
        if (r == 0) result = x;
        else if (w->op == MS_REDUCE_OP_MIN) result = x < result ? x : result;
        else if (w->op == MS_REDUCE_OP_MAX) result = x > result ? x : result;
        else if (w->op == MS_REDUCE_OP_PROD) result *= x;
        else result = w->dtype == MS_BOOL ? (result != 0 || x != 0) : result + x;
    }
    return w->op == MS_REDUCE_OP_AVG ? (double)((float)result / (float)w->ranks) : result;
}

/* Whether a rank tries case `number` in this kind of memory: in short ranges in one of the two, and
 * in the other one with one rank more or less. */
static bool is_tried(const rank *self, uint32_t number, int heap)
{
    return ranges_are_long() || (int)((number + self->ranks) % 2) == heap;
}

/* NCCL has no u16, and refuses to reduce it: see comm_nccl.c. */
static bool allowed(ms_dtype dtype, ms_reduce_op op)
{
    if (over_nccl() && dtype == MS_U16) return false;
    return ms_dtype_is_float(dtype) || (op != MS_REDUCE_OP_AVG && op != MS_REDUCE_OP_PREMUL_SUM);
}

/* --------------------------------------------------------------- reductions */

static void reductions(rank *self)
{
    static const int64_t sizes[] = { 0, 1, 67, 1111 };
    for (ms_dtype dtype = 0; dtype < MS_DTYPES; dtype++)
        for (ms_reduce_op op = 0; op < MS_REDUCE_OPS; op++)
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
                for (int heap = 0; heap < 2; heap++) {
                    if (!allowed(dtype, op)) continue;
                    /* In short ranges each two of dtype, op, size and heap come together. */
                    if (!ranges_are_long() && (int)(dtype + op + s) % 2 != heap) continue;
                    whole w = {
                        .ranks = self->ranks, .number = self->number, .dtype = dtype, .op = op
                    };
                    uint32_t root = (uint32_t)s % self->ranks;
                    ms_tensor *t = NULL, *rooted = NULL, *out = NULL, *part = NULL, *padded = NULL;
                    int64_t n = sizes[s],
                            longer = (n + self->ranks - 1) / self->ranks * self->ranks;
                    OK(make(self, dtype, n, heap, &t));
                    OK(make(self, dtype, n, heap, &rooted));
                    OK(make(self, dtype, n, false, &out));
                    OK(make(self, dtype, longer, heap, &padded));
                    OK(make(self, dtype, longer / self->ranks, false, &part));
                    OK(fill(t, own, &w));
                    OK(fill(rooted, own, &w));
                    OK(fill(padded, own, &w));
                    ms_collective c = { .kind = MS_ALL_REDUCE,
                                        .op = op,
                                        .factor = 0.5 * (self->number + 1),
                                        .in = t,
                                        .out = out,
                                        .bucket = -1,
                                        .root = root };
                    OK(run_one(self, self->world, &c));
                    CHECK(equals(t, own, &w));
                    CHECK(equals(out, reduced, &w));
                    c.out = NULL;
                    OK(run_one(self, self->world, &c));
                    CHECK(equals(t, reduced, &w));
                    c.kind = MS_REDUCE;
                    c.in = rooted;
                    OK(run_one(self, self->world, &c));
                    CHECK(equals(rooted, self->number == root ? reduced : own, &w));
                    c.kind = MS_REDUCE_SCATTER;
                    c.in = padded;
                    c.out = part;
                    OK(run_one(self, self->world, &c));
                    w.from = longer / self->ranks * self->number;
                    CHECK(equals(part, reduced, &w));
                    w.from = 0;
                    CHECK(equals(padded, own, &w));
                    ms_tensor *all[] = { t, rooted, out, part, padded };
                    for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
                }
}

static void reductions_of_every_op_and_dtype(void **state)
{
    (void)state;
    static const uint32_t counts[] = { 1, 2, 4 };
    for (int i = 0; i < 3; i++) run_well(THREADS, counts[i], reductions, NULL);
}

static void reductions_between_processes(void **state)
{
    (void)state;
    run_well(PROCESSES, 3, reductions, NULL);
}

/* Numbers that do round: the sum is that of one loop in rank order, bit for bit, in heaps and
 * staged, in f32 and through f32 in 16 bits. */
enum { ROUGH = 150007, ROUGH_RANKS = 5 };
/* In f32 more than the host's staging memory takes at once. */
static int64_t rough_count(void) { return ranges_are_short() ? 70001 : ROUGH; }
static float rough[ROUGH_RANKS][ROUGH], rough_sums[MS_BF16 - MS_F32 + 1][ROUGH];
static void make_rough(void)
{
    for (uint32_t r = 0; r < ROUGH_RANKS; r++)
        for (uint32_t i = 0; i < ROUGH; i++) {
            uint32_t out[4];
            ms_philox(r, 1, i, out);
            rough[r][i] = ((float)out[0] / 4294967296.0f - 0.5f) * (float)(1 << (out[1] % 12));
        }
}
static double rough_own(const void *context, int64_t i)
{
    return (double)rough[((const whole *)context)->number][i];
}
/* Before a job of so many ranks, whose numbers are of each dtype. */
static void add_rough(uint32_t ranks)
{
    for (ms_dtype dtype = MS_F32; dtype <= MS_BF16; dtype++)
        for (uint32_t i = 0; i < ROUGH; i++) {
            float sum = 0;
            for (uint32_t r = 0; r < ranks; r++) {
                float x = rough[r][i];
                if (dtype == MS_BF16) x = ms_float_from_bf16(ms_bf16_from_float(x));
                if (dtype == MS_F16) x = ms_float_from_f16(ms_f16_from_float(x));
                sum = r ? sum + x : x;
            }
            rough_sums[dtype - MS_F32][i] = sum;
        }
}
static double rough_sum(const void *context, int64_t i)
{
    return (double)rough_sums[((const whole *)context)->dtype - MS_F32][i];
}

/* As if cast to 16 bits, added and cast back. */
static double narrow_sum(const void *context, int64_t i)
{
    float sum = (float)rough_sum(context, i);
    return (double)(((const whole *)context)->dtype == MS_BF16
                        ? ms_float_from_bf16(ms_bf16_from_float(sum))
                        : ms_float_from_f16(ms_f16_from_float(sum)));
}

static void rounding_on_the_way(rank *self)
{
    const int64_t sizes[] = { 5, rough_count() };
    for (ms_dtype dtype = MS_F16; dtype <= MS_BF16; dtype++)
        for (int variant = 0; variant < 4; variant++) {
            whole w = { .ranks = self->ranks, .number = self->number, .dtype = dtype };
            ms_traffic before = ms_group_traffic(self->world, MS_ALL_REDUCE);
            ms_tensor *t = NULL;
            int64_t n = sizes[variant / 2];
            OK(make(self, MS_F32, n, variant % 2 == 0, &t));
            OK(fill(t, rough_own, &w));
            ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .travels = dtype, .bucket = -1 };
            OK(run_one(self, self->world, &c));
            CHECK(equals(t, narrow_sum, &w));
            CHECK(ms_group_traffic(self->world, MS_ALL_REDUCE).payload_bytes - before.payload_bytes
                  == 2 * (uint64_t)n);
            ms_tensor_release(t);
        }
}

static void numbers_are_rounded_on_their_way(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 4; ranks += ranges_are_short() ? 3 : 1) {
        add_rough(ranks);
        run_in_rank_order(THREADS, ranks, rounding_on_the_way, NULL);
    }
    add_rough(2);
    run_processes(2, rounding_on_the_way);
}

static void rounding(rank *self)
{
    for (ms_dtype dtype = MS_F32; dtype <= MS_BF16; dtype++)
        for (int heap = 0; heap < 2; heap++) {
            if (!is_tried(self, dtype, heap)) continue;
            whole w = { .ranks = self->ranks, .number = self->number, .dtype = dtype };
            ms_tensor *t = NULL, *out = NULL;
            OK(make(self, dtype, rough_count(), heap, &t));
            OK(make(self, dtype, rough_count(), false, &out));
            OK(fill(t, rough_own, &w));
            ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .out = out, .bucket = -1 };
            OK(run_one(self, self->world, &c));
            CHECK(equals(out, rough_sum, &w));
            c.out = NULL;
            OK(run_one(self, self->world, &c));
            CHECK(equals(t, rough_sum, &w));
            ms_tensor_release(t);
            ms_tensor_release(out);
        }
}

static void sums_round_in_rank_order(void **state)
{
    (void)state;
    for (uint32_t ranks = 2; ranks <= 5; ranks += ranges_are_short() ? 3 : 1) {
        add_rough(ranks);
        run_in_rank_order(THREADS, ranks, rounding, NULL);
    }
    add_rough(4);
    run_processes(4, rounding);
}

/* A NaN of one rank is everybody's; infinities are ordered. */
static double special(const void *context, int64_t i)
{
    const whole *w = context;
    if (i % 3 == (int64_t)w->number) return (double)NAN;
    return i % 5 == 0 ? (double)-INFINITY : (double)i;
}

static void not_numbers(rank *self)
{
    for (ms_reduce_op op = MS_REDUCE_OP_MIN; op <= MS_REDUCE_OP_MAX; op++) {
        whole w = { .number = self->number };
        float values[100];
        ms_tensor *t = NULL;
        OK(make(self, MS_F32, 100, true, &t));
        OK(fill(t, special, &w));
        ms_collective c = { .kind = MS_ALL_REDUCE, .op = op, .in = t, .bucket = -1 };
        OK(run_one(self, self->world, &c));
        OK(ms_tensor_read(t, values, sizeof values));
        for (int i = 0; i < 100; i++) {
            float want = i % 5 == 0 ? -INFINITY : (float)i;
            CHECK(i % 3 < 2 ? values[i] != values[i] : values[i] == want);
        }
        ms_tensor_release(t);
    }
}

/* Every NaN in bf16, quiet or not, goes through all that is computed with it, and so does one of a
 * factor. */
static void nans_of_16_bits(rank *self)
{
    for (ms_reduce_op op = MS_REDUCE_OP_SUM; op <= MS_REDUCE_OP_PREMUL_SUM; op++)
        /* A NaN of this rank against numbers; numbers, with a NaN as rank 0's factor. */
        for (int how = 0; how < 2; how++) {
            if (how == 1 && op != MS_REDUCE_OP_PREMUL_SUM) continue;
            uint16_t bits[2 * 254];
            int64_t n = (int64_t)(sizeof bits / sizeof *bits);
            for (int i = 0; i < (int)n; i++) {
                uint16_t nan = (uint16_t)((i % 2 ? 0xff81 : 0x7f81) + i / 2 % 127);
                bits[i] = how == 0 && i / 254 == (int)self->number ? nan : 0x3f80;
            }
            ms_tensor *t = NULL;
            OK(make(self, MS_BF16, n, true, &t));
            OK(ms_tensor_write(t, bits, sizeof bits));
            ms_collective c = { .kind = MS_ALL_REDUCE, .op = op, .in = t, .bucket = -1 };
            c.factor = how == 1 && self->number == 0 ? (double)ms_float_from_bits(0x7fffffff) : 2;
            OK(run_one(self, self->world, &c));
            OK(ms_tensor_read(t, bits, sizeof bits));
            for (int i = 0; i < (int)n; i++) CHECK((bits[i] & 0x7fff) > 0x7f80);
            ms_tensor_release(t);
        }
}

static void a_nan_of_one_rank_is_the_minimum_and_the_maximum(void **state)
{
    (void)state;
    run_well(THREADS, 2, not_numbers, NULL);
}

static void nans_of_16_bits_stay_nans(void **state)
{
    (void)state;
    run_well(THREADS, 2, nans_of_16_bits, NULL);
}

/* ----------------------------------------------------------------- movement */

/* Element i of rank number's tensor. */
static double tagged(uint32_t number, int64_t i) { return (double)(number * 1000003 + i); }
static double tagged_own(const void *context, int64_t i)
{
    return tagged(*(const uint32_t *)context, i);
}

typedef struct joined {
    uint32_t ranks;
    const int64_t *counts;
    int64_t begin;
} joined;

/* The tensors of all ranks, one after another. */
static double joined_value(const void *context, int64_t i)
{
    const joined *j = context;
    uint32_t r = 0;
    for (; i >= j->counts[r]; r++) i -= j->counts[r];
    return tagged(r, i);
}

static double shifted(const void *context, int64_t i)
{
    const joined *j = context;
    return tagged(j->ranks, i + j->begin);
}

static void gathering(rank *self, const int64_t *counts, bool heap, bool by_counts)
{
    uint32_t root = self->ranks - 1;
    int64_t sum = 0, before = 0, mine = counts[self->number];
    for (uint32_t r = 0; r < self->ranks; r++) sum += counts[r];
    for (uint32_t r = 0; r < self->number; r++) before += counts[r];
    joined j = { .ranks = self->ranks, .counts = counts };
    ms_tensor *part = NULL, *whole_tensor = NULL, *on_root = NULL, *window = NULL;
    int64_t one = 1;
    OK(make(self, MS_I64, mine, heap, &part));
    OK(make(self, MS_I64, sum, heap, &whole_tensor));
    OK(make(self, MS_I64, sum, false, &on_root));
    OK(fill(part, tagged_own, &self->number));
    ms_collective c = { .kind = MS_ALL_GATHER,
                        .in = part,
                        .out = whole_tensor,
                        .counts = by_counts ? counts : NULL,
                        .bucket = -1,
                        .root = root };
    OK(run_one(self, self->world, &c));
    CHECK(equals(whole_tensor, joined_value, &j));
    c.kind = MS_GATHER;
    c.out = self->number == root ? on_root : NULL;
    OK(run_one(self, self->world, &c));
    if (self->number == root) CHECK(equals(on_root, joined_value, &j));
    c.kind = MS_SCATTER;
    c.in = self->number == root ? on_root : NULL;
    c.out = part;
    OK(fill(part, tagged_own, &root));
    OK(run_one(self, self->world, &c));
    CHECK(equals(part, tagged_own, &self->number));
    /* in is this rank's part of out */
    OK(ms_tensor_window(whole_tensor, 1, &mine, &one, before, &window));
    OK(fill(whole_tensor, tagged_own, &root));
    OK(fill(window, tagged_own, &self->number));
    c.kind = MS_ALL_GATHER;
    c.in = window;
    c.out = whole_tensor;
    OK(run_one(self, self->world, &c));
    CHECK(equals(whole_tensor, joined_value, &j));
    ms_tensor *all[] = { part, whole_tensor, on_root, window };
    for (int i = 0; i < 4; i++) ms_tensor_release(all[i]);
}

/* Rank r sends `base + r + 2 * to` elements to rank `to`, each sender's numbers going on from part
 * to part. */
static int64_t part_of(int64_t base, uint32_t from, uint32_t to, bool even)
{
    return even ? base : base + from + 2 * to;
}

static void exchange(rank *self, int64_t base, bool heap, bool even)
{
    int64_t send[MS_LOCAL_RANKS_MAX], receive[MS_LOCAL_RANKS_MAX], sent = 0, received = 0;
    for (uint32_t r = 0; r < self->ranks; r++) {
        sent += send[r] = part_of(base, self->number, r, even);
        received += receive[r] = part_of(base, r, self->number, even);
    }
    ms_tensor *in = NULL, *out = NULL;
    OK(make(self, MS_I64, sent, heap, &in));
    OK(make(self, MS_I64, received, heap, &out));
    OK(fill(in, tagged_own, &self->number));
    ms_collective c = { .kind = MS_ALL_TO_ALL, .in = in, .out = out, .bucket = -1 };
    if (!even) {
        c.counts = send;
        c.receive_counts = receive;
    }
    OK(run_one(self, self->world, &c));
    for (uint32_t r = 0, at = 0; r < self->ranks; at += (uint32_t)receive[r++]) {
        ms_tensor *window = NULL;
        int64_t one = 1;
        joined j = { .ranks = r };
        for (uint32_t before = 0; before < self->number; before++)
            j.begin += part_of(base, r, before, even);
        OK(ms_tensor_window(out, 1, &receive[r], &one, at, &window));
        CHECK(equals(window, shifted, &j));
        ms_tensor_release(window);
    }
    ms_tensor_release(in);
    ms_tensor_release(out);
}

static void movement(rank *self)
{
    static const int64_t sizes[] = { 0, 1, 13, 50001 };
    for (uint32_t s = 0; s < 4; s++)
        for (int heap = 0; heap < 2; heap++) {
            if (!is_tried(self, s, heap)) continue;
            int64_t even[MS_LOCAL_RANKS_MAX], uneven[MS_LOCAL_RANKS_MAX];
            for (uint32_t r = 0; r < self->ranks; r++) {
                even[r] = sizes[s];
                uneven[r] = r % 2 ? sizes[s] + r : 0;
            }
            gathering(self, even, heap, false);
            if (self->ranks > 1) gathering(self, uneven, heap, true);
            exchange(self, sizes[s], heap, true);
            exchange(self, sizes[s], heap, false);
            for (uint32_t root = 0; root < self->ranks; root++) {
                ms_tensor *t = NULL;
                OK(make(self, MS_I64, sizes[s], heap, &t));
                OK(fill(t, tagged_own, &self->number));
                ms_collective c = { .kind = MS_BROADCAST, .in = t, .root = root, .bucket = -1 };
                OK(run_one(self, self->world, &c));
                CHECK(equals(t, tagged_own, &root));
                ms_tensor_release(t);
            }
        }
}

static void tensors_arrive_where_they_should(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 4; ranks++) run_well(THREADS, ranks, movement, NULL);
}

static void tensors_arrive_between_processes(void **state)
{
    (void)state;
    run_processes(3, movement);
}

/* Some ranks' tensors in heaps, others' not: all take the same path. */
static void mixed(rank *self)
{
    whole w = { .ranks = self->ranks, .number = self->number };
    for (uint32_t mask = 0; mask < 8; mask++) {
        ms_tensor *t = NULL, *unused = NULL;
        /* So that offsets differ between ranks. */
        OK(make(self, MS_F32, 64 * (self->number + 1), true, &unused));
        OK(make(self, MS_F32, 5000, (mask >> self->number) & 1, &t));
        OK(fill(t, own, &w));
        ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 };
        OK(run_one(self, self->world, &c));
        CHECK(equals(t, reduced, &w));
        ms_tensor_release(t);
        ms_tensor_release(unused);
    }
}

static void ranks_whose_tensors_lie_elsewhere_agree_on_a_way(void **state)
{
    (void)state;
    run_well(THREADS, 3, mixed, NULL);
}

/* ------------------------------------------------------------ send and recv */

/* Everybody sends to the next and receives from the one before: no order of the two may stop the
 * ring. */
static void ring(rank *self)
{
    static const int64_t sizes[] = { 0, 1, 1000, 200000 };
    uint32_t next = (self->number + 1) % self->ranks,
             before = (self->number + self->ranks - 1) % self->ranks;
    OK(ms_group_barrier(self->world, 0)); /* some transports begin so */
    for (uint32_t s = 0; s < 4; s++)
        for (int heap = 0; heap < 2; heap++) {
            if (!is_tried(self, s, heap)) continue;
            ms_tensor *out = NULL, *in = NULL;
            OK(make(self, MS_I32, sizes[s], heap, &out));
            OK(make(self, MS_I32, sizes[s], false, &in));
            OK(fill(out, tagged_own, &self->number));
            ms_collective send = { .kind = MS_SEND, .in = out, .root = next, .bucket = -1 },
                          receive = { .kind = MS_RECV, .in = in, .root = before, .bucket = -1 };
            OK(run_one(self, self->world, self->number % 2 ? &receive : &send));
            OK(run_one(self, self->world, self->number % 2 ? &send : &receive));
            CHECK(equals(in, tagged_own, &before));
            ms_tensor_release(out);
            ms_tensor_release(in);
        }
}

static void a_ring_of_sends_turns(void **state)
{
    (void)state;
    for (uint32_t ranks = 2; ranks <= 4; ranks++) run_well(THREADS, ranks, ring, NULL);
    run_processes(3, ring);
}

/* --------------------------------------------- many calls, channels, groups */

/* The host runs ahead; two channels and sub-groups are under way at once; each result is right. */
static void many(rank *self)
{
    enum { CALLS = 200 };
    ms_tensor *tensors[CALLS];
    whole w = { .ranks = self->ranks, .number = self->number };
    for (int i = 0; i < CALLS; i++) {
        ms_point ready;
        OK(make(self, MS_F32, 16 + 37 * i, i % 3 != 0, &tensors[i]));
        OK(fill(tensors[i], own, &w));
        ms_collective c = { .kind = MS_ALL_REDUCE, .in = tensors[i], .bucket = i, .label = "many" };
        OK(ms_group_enqueue(self->world, 1 + (uint32_t)i % 2, &c, &ready));
        OK(ms_stream_wait(ms_engine_current(self->engine), ready));
    }
    for (int i = 0; i < CALLS; i++) {
        CHECK(equals(tensors[i], reduced, &w));
        ms_tensor_release(tensors[i]);
    }
}

static void two_channels_run_ahead(void **state)
{
    (void)state;
    run_well(THREADS, 2, many, NULL);
    run_well(THREADS, 4, many, NULL);
    run_well(PROCESSES, 3, many, NULL);
}

/* Halves and strides of four ranks, and a part of three in another order; one rank is in none. */
static void parts(rank *self)
{
    static const uint32_t halves[] = { 0, 1, 2, 3 }, strides[] = { 0, 2, 1, 3 },
                          turned[] = { 3, 0, 2 }, two[] = { 2, 2 }, three[] = { 3 };
    ms_group *half = NULL, *stride = NULL, *odd = NULL;
    OK(ms_group_split(self->world, 2, two, halves, &half));
    OK(ms_group_split(self->world, 2, two, strides, &stride));
    OK(ms_group_split(self->world, 1, three, turned, &odd));
    CHECK(ms_group_size(half) == 2 && ms_group_rank(half) == self->number % 2);
    CHECK(ms_group_rank(stride) == self->number / 2
          && ms_group_world_rank(stride, 1) == self->number % 2 + 2);
    CHECK((odd == NULL) == (self->number == 1));
    float value = (float)(1 << self->number), got = 0;
    ms_tensor *t = NULL;
    OK(make(self, MS_F32, 1, true, &t));
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 };
    OK(ms_tensor_write(t, &value, 4));
    OK(run_one(self, half, &c));
    OK(ms_tensor_read(t, &got, 4));
    CHECK(got == (self->number < 2 ? 3 : 12));
    OK(run_one(self, stride, &c));
    OK(ms_tensor_read(t, &got, 4));
    CHECK(got == 15);
    if (odd) {
        c.kind = MS_BROADCAST;
        c.root = 0;
        OK(ms_tensor_write(t, &value, 4));
        OK(run_one(self, odd, &c));
        OK(ms_tensor_read(t, &got, 4));
        CHECK(got == 8);
        ms_group *pair = NULL;
        static const uint32_t inner[] = { 2, 0 }, sizes[] = { 2 };
        OK(ms_group_split(odd, 1, sizes, inner, &pair));
        CHECK((pair == NULL) == (self->number == 0));
        if (pair) CHECK(ms_group_world_rank(pair, 0) == 2 && ms_group_world_rank(pair, 1) == 3);
    }
    OK(ms_group_barrier(self->world, 0));
    ms_tensor_release(t);
}

static void groups_are_split(void **state)
{
    (void)state;
    run_well(THREADS, 4, parts, NULL);
    run_processes(4, parts);
}

/* A stream of the caller's. */
static void own_stream(rank *self)
{
    whole w = { .ranks = self->ranks, .number = self->number };
    ms_stream *side = NULL;
    ms_tensor *t = NULL;
    ms_point ready;
    OK(ms_engine_stream(self->engine, "side", &side));
    OK(make(self, MS_F32, 3000, true, &t));
    OK(fill(t, own, &w));
    for (int i = 0; i < 3; i++) {
        ms_collective c = { .kind = MS_ALL_REDUCE,
                            .op = MS_REDUCE_OP_MAX,
                            .in = t,
                            .bucket = -1,
                            .stream = i == 1 ? side : NULL };
        OK(ms_group_enqueue(self->world, 1, &c, &ready));
        CHECK((ready.stream == ms_stream_index(side)) == (i == 1));
    }
    OK(ms_stream_wait(ms_engine_current(self->engine), ready));
    w.op = MS_REDUCE_OP_MAX;
    CHECK(equals(t, reduced, &w));
    ms_tensor_release(t);
}

static void a_collective_runs_on_a_given_stream(void **state)
{
    (void)state;
    run_well(THREADS, 3, own_stream, NULL);
}

/* What every transport promises. */
static const struct CMUnitTest of_all[] = {
    cmocka_unit_test(reductions_of_every_op_and_dtype),
    cmocka_unit_test(reductions_between_processes),
    cmocka_unit_test(sums_round_in_rank_order),
    cmocka_unit_test(tensors_arrive_where_they_should),
    cmocka_unit_test(tensors_arrive_between_processes),
    cmocka_unit_test(ranks_whose_tensors_lie_elsewhere_agree_on_a_way),
    cmocka_unit_test(a_ring_of_sends_turns),
    cmocka_unit_test(two_channels_run_ahead),
    cmocka_unit_test(groups_are_split),
    cmocka_unit_test(a_collective_runs_on_a_given_stream),
};

/* What the engine's own reductions promise. */
static const struct CMUnitTest of_local[] = {
    cmocka_unit_test(numbers_are_rounded_on_their_way),
    cmocka_unit_test(a_nan_of_one_rank_is_the_minimum_and_the_maximum),
    cmocka_unit_test(nans_of_16_bits_stay_nans),
};

int main(void)
{
    make_rough();
    int failed = cmocka_run_group_tests(of_all, NULL, NULL);
    if (!over_nccl()) failed += cmocka_run_group_tests(of_local, NULL, NULL);
    return failed;
}
