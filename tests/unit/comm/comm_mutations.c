/* comm_mutations.c: random programs of 50 collectives on 2 to 4 ranks; one change on one rank is
 * always found, no change raises no alarm. ctest: over-hosts cuda-local */
#include "comm_support.h"
#include "late_device.h"
#include "ranges.h"

enum { LENGTH = 50 };

typedef enum mutation {
    NOTHING,
    SWAP,
    DROP,
    DUPLICATE,
    DTYPE,
    SIZE,
    OP,
    ROOT,
    GROUP,
    CHANNEL,
    MUTATIONS
} mutation;
static const char *const names[] = { "nothing", "swap", "drop", "duplicate", "dtype",
                                     "size",    "op",   "root", "group",     "channel" };

/* One call, in numbers that compare by memory. */
typedef struct step {
    uint32_t kind, op, dtype, size, root, twin, channel;
} step;

typedef struct program {
    uint64_t seed;
    mutation mutation;
    uint32_t who, at;
} program;

static uint32_t draw(uint64_t seed, uint64_t what, uint32_t below)
{
    uint32_t out[4];
    ms_philox(seed, 77, what, out);
    return out[0] % below;
}

static step step_of(uint64_t seed, uint32_t i, uint32_t ranks)
{
    static const uint32_t kinds[] = { MS_ALL_REDUCE, MS_ALL_REDUCE, MS_BROADCAST, MS_REDUCE,
                                      MS_BARRIER };
    uint64_t base = 8 * (uint64_t)i;
    step s = { .kind = kinds[draw(seed, base, 5)],
               .size = draw(seed, base + 3, 3),
               .twin = draw(seed, base + 5, 4) == 0,
               .channel = 1 + (draw(seed, base + 6, 4) == 0) };
    if (s.kind == MS_BARRIER) s.size = 0;
    else s.dtype = draw(seed, base + 2, 2);
    if (s.kind == MS_ALL_REDUCE || s.kind == MS_REDUCE) s.op = draw(seed, base + 1, 2);
    if (s.kind == MS_BROADCAST || s.kind == MS_REDUCE) s.root = draw(seed, base + 4, ranks);
    return s;
}

/* The mutated step; the same if this step has no such field. */
static step changed(step s, mutation how, uint32_t ranks)
{
    bool tensor = s.kind != MS_BARRIER;
    if (how == DTYPE && tensor) s.dtype = !s.dtype;
    if (how == SIZE && tensor) s.size = (s.size + 1) % 3;
    if (how == OP && (s.kind == MS_ALL_REDUCE || s.kind == MS_REDUCE)) s.op = !s.op;
    if (how == ROOT && (s.kind == MS_BROADCAST || s.kind == MS_REDUCE))
        s.root = (s.root + 1) % ranks;
    if (how == GROUP) s.twin = !s.twin;
    if (how == CHANNEL) s.channel = 3 - s.channel;
    return s;
}

/* The call of this rank at place i, and how many times it is made. */
static uint32_t planned(const program *p, bool mine, uint32_t i, uint32_t ranks, step *out)
{
    *out = step_of(p->seed, i, ranks);
    if (!mine) return 1;
    if (p->mutation == SWAP && (i == p->at || i == p->at + 1))
        *out = step_of(p->seed, i == p->at ? i + 1 : i - 1, ranks);
    if (i != p->at) return 1;
    *out = changed(*out, p->mutation, ranks);
    if (p->mutation == DROP) return 0;
    return p->mutation == DUPLICATE ? 2 : 1;
}

static void run_program(rank *self)
{
    const program *p = self->job->argument;
    static const uint32_t everybody[] = { 0, 1, 2, 3 };
    static const int64_t sizes[] = { 1, 12, 5000 };
    ms_tensor *tensors[2][3];
    ms_group *twin = NULL;
    for (int d = 0; d < 2; d++)
        for (int s = 0; s < 3; s++) {
            OK(make(self, d ? MS_I32 : MS_F32, sizes[s], s > 0, &tensors[d][s]));
            OK(fill(tensors[d][s], NULL, NULL));
        }
    self->status = ms_group_split(self->world, 1, &self->ranks, everybody, &twin);
    for (uint32_t i = 0; i < LENGTH && !self->status; i++) {
        step s;
        for (uint32_t times = planned(p, self->number == p->who, i, self->ranks, &s);
             times > 0 && !self->status; times--) {
            ms_collective c = { .kind = (ms_collective_kind)s.kind,
                                .op = s.op ? MS_REDUCE_OP_MAX : MS_REDUCE_OP_SUM,
                                .root = s.root,
                                .bucket = -1 };
            if (s.kind != MS_BARRIER) c.in = tensors[s.dtype][s.size];
            self->status = ms_group_enqueue(s.twin ? twin : self->world, s.channel, &c, NULL);
        }
    }
    if (!self->status) {
        ms_comm_leave(self->engine, NULL);
        self->status = ms_engine_sync(self->engine);
    }
    for (int d = 0; d < 2; d++)
        for (int s = 0; s < 3; s++) ms_tensor_release(tensors[d][s]);
}

/* Draws a program and a change that makes a difference. */
static program draw_program(uint64_t seed, uint32_t ranks)
{
    program p = { .seed = seed,
                  .who = draw(seed, 1000000, ranks),
                  .mutation = (mutation)draw(seed, 1000001, MUTATIONS) };
    for (uint64_t t = 0;; t++) {
        p.at = draw(seed, 1000002 + t, LENGTH - 1);
        step here = step_of(seed, p.at, ranks), other = p.mutation == SWAP
                                                            ? step_of(seed, p.at + 1, ranks)
                                                            : changed(here, p.mutation, ranks);
        if (p.mutation == NOTHING || p.mutation == DROP || p.mutation == DUPLICATE
            || memcmp(&here, &other, sizeof here) != 0)
            return p;
    }
}

/* Over hosts a change may be found by the limit only. On a busy machine a short one strikes before
 * the program begins: then it is run again with twice the limit. */
static ms_abort_record run_with_limits(job *work, rank *ranks, bool is_short)
{
    uint64_t limit = is_short ? 1000000000u : HANG_NS;
    for (;; limit *= 2) {
        work->options.timeout_ns = limit;
        ms_abort_record cause = run_job(work, ranks);
        if (cause.reason != MS_ABORT_TIMEOUT || !strstr(cause.error.message, "split #1")
            || limit >= HANG_NS)
            return cause;
    }
}

static void check_program(uint64_t seed, uint32_t count, const char *layout)
{
    static rank ranks[4];
    program p = draw_program(seed, count);
    job work = { .kind = THREADS,
                 .options = { .ranks = count, .threads = 1, .heap_bytes = 4 << 20 },
                 .layout = layout,
                 .run = run_program,
                 .argument = &p };
    ms_abort_record cause = run_with_limits(&work, ranks, *layout && p.mutation);
    /* That the ranks of several hosts wait for each other is for their control to find. */
    bool found = cause.reason == MS_ABORT_MISMATCH || cause.reason == MS_ABORT_LEFT
                 || (*layout && cause.reason == MS_ABORT_TIMEOUT);
    for (uint32_t r = 0; r < count; r++)
        if (*ranks[r].why) fail_msg("program %llu: %s", (unsigned long long)seed, ranks[r].why);
    if (found != (p.mutation != NOTHING) || (!found && cause.reason != MS_ABORT_NONE))
        fail_msg("program %llu, %s at %u by rank %u of %u %s: the cause was %d: %s",
                 (unsigned long long)seed, names[p.mutation], p.at, p.who, count, layout,
                 cause.reason, cause.error.message);
}

static void every_change_is_found_and_nothing_else(void **state)
{
    (void)state;
    /* A program takes 13 ms on one host's CPU, and 70 ms and more over the stand-in for a GPU's
     * driver or over hosts. */
    uint64_t many = device_is_cuda() || over_hosts() ? 1000 : 5000,
             programs = ranges_are_long() ? many : 100;
    unsigned tried[MUTATIONS] = { 0 };
    for (uint64_t seed = 1; seed <= programs; seed++) {
        uint32_t count = 2 + (uint32_t)(seed % 3), layouts = 0;
        mutation drawn = draw_program(seed, count).mutation;
        /* Short ranges have four programs with each change. */
        if (!ranges_are_long() && tried[drawn] == 4) continue;
        while (layouts_of(count)[layouts]) layouts++;
        check_program(seed, count, layouts_of(count)[seed / 3 % layouts]);
        tried[drawn]++;
    }
    for (int i = 0; i < MUTATIONS; i++)
        if (tried[i] < 3) fail_msg("%s: %u programs", names[i], tried[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_change_is_found_and_nothing_else) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
