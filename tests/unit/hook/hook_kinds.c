/* hook_kinds.c: every native link on buckets of every kind. A sharded kind gives this rank's shard
 * of the result of the all_reduce kind, whether it is cut anywhere or by rows. If a method adds in
 * another order, the result is compared with a computed one.
 * ctest: poisoned cuda-ranks cuda-local */
#include "fault_rank.h"

#include <math.h>

#include "moonshard/hook.h"
#include "moonshard/ops.h"

/* ------------------------------------------------------------------ buckets */

enum { PARAMETERS = 3, MOST = 128 };
/* 76 numbers: they divide by 1, 2 and 4 ranks; 84 have padding. */
static const int64_t shapes[PARAMETERS][2] = { { 6, 5 }, { 14, 1 }, { 4, 8 } };
static const char *const names[PARAMETERS] = { "a", "b", "c" };
static const uint32_t positions[PARAMETERS] = { 0, 1, 2 };

typedef struct groups {
    ms_group *shards, *replicas; /* pairs of neighbours; ranks with the same place in their pair */
} groups;

typedef struct own_bucket {
    ms_bucket bucket;
    ms_tensor *gradients[PARAMETERS];
} own_bucket;

/* Shards that are cut by rows, of 1, 2 and 4 ranks. */
static const int64_t rows_by_shards[][PARAMETERS] = {
    [1] = { 30, 14, 32 }, [2] = { 15, 7, 16 }, [4] = { 10, 4, 8 }
};
static int64_t length_by_rows(uint32_t shards)
{
    int64_t part = 0;
    for (int p = 0; p < PARAMETERS; p++) part += rows_by_shards[shards][p];
    return part * shards;
}

/* Which number of the buffer is number i of that shard; -1: none, there is a zero. */
static int64_t place_of(bool rows, uint32_t shard, uint32_t shards, int64_t length, int64_t i)
{
    int64_t begin = 0;
    if (!rows) return shard * length + i;
    for (int p = 0; p < PARAMETERS; p++) {
        int64_t part = rows_by_shards[shards][p], count = shapes[p][0] * shapes[p][1];
        if (i < part) return shard * part + i < count ? begin + shard * part + i : -1;
        i -= part;
        begin += count;
    }
    return -1;
}

static ms_status split(rank *self, groups *out)
{
    uint32_t sizes[8], pairs[8], places[8], half = self->ranks / 2;
    for (uint32_t i = 0; i < half; i++) {
        sizes[i] = 2;
        pairs[2 * i] = places[i] = 2 * i;
        pairs[2 * i + 1] = places[half + i] = 2 * i + 1;
    }
    const uint32_t columns[] = { half, half };
    ms_status status = ms_group_split(self->world, half, sizes, pairs, &out->shards);
    return status ? status : ms_group_split(self->world, 2, columns, places, &out->replicas);
}

static double value_of(uint32_t number, int iteration, int64_t i)
{
    return (double)((i * 7 + iteration * 5 + number * 3) % 11) - 5;
}

static void close_bucket(own_bucket *b)
{
    for (uint32_t i = 0; i < PARAMETERS; i++) ms_tensor_release(b->gradients[i]);
    ms_tensor_release(b->bucket.buffer);
    ms_tensor_release(b->bucket.flat);
}

/* Gradients of small whole numbers, and zeros up to `padded`. */
static double unit = 1; /* by which they are multiplied */
static ms_status open_bucket(rank *self, const groups *g, ms_tensor **parameters, int64_t padded,
                             ms_bucket_kind kind, bool rows, int iteration, own_bucket *out)
{
    float values[MOST] = { 0 };
    int64_t at = 0;
    *out = (own_bucket){ .bucket = { .engine = self->engine,
                                     .group = self->world,
                                     .shards = g->shards,
                                     .replicas = g->replicas,
                                     .kind = kind,
                                     .is_last = true,
                                     .divisor = self->ranks,
                                     .count = PARAMETERS,
                                     .positions = positions,
                                     .names = names,
                                     .parameters = parameters,
                                     .label = "a bucket" } };
    uint32_t own;
    if (rows && kind != MS_BUCKET_ALL_REDUCE)
        out->bucket.parts = rows_by_shards[ms_bucket_shards(&out->bucket, &own)];
    ms_status status = make(self, MS_F32, padded, true, &out->bucket.flat);
    out->bucket.gradients = out->gradients;
    for (int p = 0; p < PARAMETERS && !status; p++) {
        const int64_t strides[] = { shapes[p][1], 1 };
        int64_t count = shapes[p][0] * shapes[p][1];
        status = ms_tensor_window(out->bucket.flat, 2, shapes[p], strides, at, &out->gradients[p]);
        for (int64_t i = at; i < at + count; i++)
            values[i] = (float)(value_of(self->number, iteration, i) * unit);
        at += count;
    }
    if (!status)
        status = ms_tensor_write(out->bucket.flat, values, (size_t)padded * sizeof *values);
    out->bucket.buffer = ms_tensor_retain(out->bucket.flat);
    return status;
}

/* -------------------------------------------------------------------- lives */

typedef struct chain {
    const char *first, *last;
    ms_dtype around;
    int variant;
    double tolerance; /* of sharded kinds against the all_reduce kind */
    double hybrid;    /* the same of hybrid, whose means are rounded twice */
} chain;

/* Mean of whole numbers over 1, 2 and 4 ranks are exact in 16 bits, in any order. */
static const chain chains[] = {
    { NULL, "reduce", MS_F32, 0, 0, 0 },
    { NULL, "reduce", MS_BF16, 0, 0, 0 },
    { NULL, "noop", MS_F16, 0, 0, 0 },
    { "error_feedback", "reduce", MS_F32, 0, 0, 0 },
    { "error_feedback", "reduce", MS_BF16, 0, 0, 0 },
    { NULL, "powersgd", MS_F32, 0, 0, 0 },
    { NULL, "powersgd", MS_BF16, 1, 0, 0 },
    { "error_feedback", "powersgd", MS_F32, 2, 0, 0 },
    { NULL, "int8", MS_F32, 0, 0, 0 },
    { "error_feedback", "int8", MS_BF16, 1, 0, 0 },
    { NULL, "int8", MS_F32, 2, 0, 0 },
    { NULL, "top_k", MS_F32, 0, 0, 0 },
    { "error_feedback", "top_k", MS_F16, 1, 0, 0 },
    { NULL, "sign_vote", MS_BF16, 0, 0, 0 },
    { NULL, "adasum", MS_F32, 0, 0, 0 },
    { NULL, "adasum", MS_F16, 0, 0, 0 },
    { "clip", "reduce", MS_F32, 0, 1e-6, 1e-6 },
    { "clip", "reduce", MS_F32, 1, 1e-6, 1e-6 },
    { "clip", "reduce", MS_F32, 2, 1e-6, 1e-6 },
    { "nan_check", "reduce", MS_F32, 0, 0, 0 },
};

static uint32_t read_chain(const chain *c, ms_link *links)
{
    uint32_t count = 0;
    const char *const all[] = { c->around == MS_F32 ? NULL : "cast", c->first, c->last };
    for (int i = 0; i < 3; i++) {
        if (!all[i]) continue;
        const ms_link_kind *kind = ms_link_find(all[i]);
        ms_link_options *o = &links[count].options;
        links[count++] = (ms_link){ .kind = kind, .options = kind->defaults };
        o->dtype = c->around;
        o->powersgd.start_step = 1;
        o->powersgd.min_rate = 0.5;
        o->powersgd.batched = c->variant == 1;
        o->powersgd.error_feedback = c->variant != 2;
        o->int8.per = (ms_int8_per)c->variant;
        o->int8.form = c->variant ? MS_INT8_ALL_TO_ALL : MS_INT8_ALL_GATHER;
        o->int8.block = 8;
        o->top_k.fraction = 0.1;
        o->top_k.momentum = c->variant ? 0.5 : 0;
        o->clip.max_norm = 1;
        o->clip.scope = (ms_clip_scope)c->variant;
    }
    return count;
}

static ms_status make_parameters(rank *self, ms_tensor **parameters)
{
    ms_status status = MS_OK;
    for (int i = 0; i < PARAMETERS && !status; i++)
        status = ms_tensor_new(self->engine, MS_F32, 2, shapes[i], &parameters[i]);
    return status;
}

enum { ITERATIONS = 4 };

/* The chain's result for a bucket of that kind in each iteration: this rank's shard. */
static void live(rank *self, const groups *g, const ms_link *given, uint32_t count, int64_t padded,
                 ms_bucket_kind kind, bool rows, float results[ITERATIONS][MOST])
{
    ms_tensor *parameters[PARAMETERS] = { NULL };
    ms_link links[8];
    OK(ms_chain_take(self->engine, kind, given, count, links));
    OK(make_parameters(self, parameters));
    for (int t = 0; t < ITERATIONS; t++) {
        own_bucket own;
        ms_tensor *result = NULL;
        uint32_t place, shards;
        OK(open_bucket(self, g, parameters, padded, kind, rows, t, &own));
        shards = ms_bucket_shards(&own.bucket, &place);
        OK(ms_chain_run(links, count, &own.bucket, &result));
        OK(ms_bucket_check_result(&own.bucket, NULL, result));
        CHECK(ms_tensor_count(result) == padded / shards);
        OK(ms_tensor_read(result, results[t], (size_t)(padded / shards) * sizeof(float)));
        ms_tensor_release(result);
        close_bucket(&own);
    }
    ms_chain_drop(links, count);
    for (int i = 0; i < PARAMETERS; i++) ms_tensor_release(parameters[i]);
}

/* Every chain on a sharded kind against the all_reduce kind. */
static void compare(rank *self, const groups *g, const chain *c, ms_bucket_kind kind, bool rows,
                    int64_t padded)
{
    static _Thread_local float whole[ITERATIONS][MOST], part[ITERATIONS][MOST];
    ms_link links[3];
    uint32_t count = read_chain(c, links);
    bool hybrid = kind == MS_BUCKET_HYBRID;
    uint32_t shards = hybrid ? 2 : self->ranks;
    uint32_t place = hybrid ? self->number % 2 : self->number;
    double tolerance = hybrid ? c->hybrid : c->tolerance;
    live(self, g, links, count, padded, MS_BUCKET_ALL_REDUCE, rows, whole);
    if (*self->why) return;
    live(self, g, links, count, padded, kind, rows, part);
    if (*self->why) return;
    int64_t length = padded / shards;
    for (int t = 0; t < ITERATIONS; t++)
        for (int64_t i = 0; i < length; i++) {
            int64_t at = place_of(rows, place, shards, length, i);
            double expected = at < 0 ? 0 : (double)whole[t][at];
            if (fabs((double)part[t][i] - expected) <= tolerance) continue;
            snprintf(self->why, sizeof self->why,
                     "rank %u: %s, %s in %s, variant %d, %lld numbers%s, iteration %d: number %lld "
                     "of %s is %g, of all_reduce %g",
                     self->number, c->first ? c->first : "-", c->last, ms_dtype_name(c->around),
                     c->variant, (long long)padded, rows ? " by rows" : "", t, (long long)i,
                     ms_bucket_kind_name(kind), (double)part[t][i], expected);
            return;
        }
}

/* Whether a rank tries case i in this one of two ways: in short ranges jobs of one and of four
 * ranks try one of them, and jobs of two ranks the other one. */
static bool is_tried(const rank *self, size_t i, bool way)
{
    return ranges_are_long() || (i + self->ranks / 2) % 2 == way;
}

static void sharded_kinds(rank *self)
{
    groups g = { NULL, NULL };
    bool pairs = self->ranks % 2 == 0;
    if (pairs) OK(split(self, &g));
    for (size_t i = 0; i < sizeof chains / sizeof *chains && !*self->why; i++) {
        const chain *c = &chains[i];
        for (int64_t padded = 76; padded <= 84 && !*self->why; padded += 8) {
            if (!is_tried(self, i, padded == 84)) continue;
            int64_t length = (padded + self->ranks - 1) / self->ranks * self->ranks;
            compare(self, &g, c, MS_BUCKET_REDUCE_SCATTER, false, length);
            if (!*self->why && pairs) compare(self, &g, c, MS_BUCKET_HYBRID, false, padded);
        }
        if (!*self->why)
            compare(self, &g, c, MS_BUCKET_REDUCE_SCATTER, true, length_by_rows(self->ranks));
        if (!*self->why && pairs) compare(self, &g, c, MS_BUCKET_HYBRID, true, length_by_rows(2));
    }
    if (*self->why) return;
    OK(ms_engine_sync(self->engine));
    CHECK(nothing_is_left(self));
}

static void sharded_kinds_give_shards_of_what_all_reduce_gives(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 4; ranks *= 2) run_well(THREADS, ranks, sharded_kinds, NULL);
    run_well(PROCESSES, 2, sharded_kinds, NULL);
}

/* ----------------------------------------------------------- error feedback */

/* error_feedback, a cast if there is one, and the reduction; then the links between the two
 * reductions of a hybrid bucket. */
typedef struct lossy {
    ms_bucket_kind kind;
    ms_dtype around;
    const char *last, *between[2];
} lossy;
static const lossy losses[] = {
    { MS_BUCKET_ALL_REDUCE, MS_BF16, "reduce", { NULL } },
    { MS_BUCKET_REDUCE_SCATTER, MS_F32, "reduce", { NULL } },
    { MS_BUCKET_REDUCE_SCATTER, MS_BF16, "reduce", { NULL } },
    { MS_BUCKET_REDUCE_SCATTER, MS_F32, "int8", { NULL } },
    { MS_BUCKET_REDUCE_SCATTER, MS_F32, "powersgd", { NULL } },
    { MS_BUCKET_HYBRID, MS_F32, "reduce", { NULL } },
    { MS_BUCKET_HYBRID, MS_BF16, "reduce", { NULL } },
    { MS_BUCKET_HYBRID, MS_F32, "int8", { NULL } },
    { MS_BUCKET_HYBRID, MS_F32, "reduce", { "cast", "reduce" } },
    { MS_BUCKET_HYBRID, MS_F32, "reduce", { "cast", "all_reduce" } },
    { MS_BUCKET_HYBRID, MS_F32, "reduce", { "int8", NULL } },
    { MS_BUCKET_HYBRID, MS_BF16, "reduce", { "cast", "reduce" } },
    { MS_BUCKET_HYBRID, MS_F32, "reduce", { "powersgd", NULL } },
    { MS_BUCKET_HYBRID, MS_F32, "reduce", { "noop", NULL } },
};

static uint32_t read_lossy(const lossy *l, ms_link *links)
{
    const char *const all[] = { "error_feedback", l->around == MS_F32 ? NULL : "cast", l->last,
                                l->between[0], l->between[1] };
    uint32_t count = 0, reduction = 0;
    for (int i = 0; i < 5; i++) {
        if (!all[i]) continue;
        const ms_link_kind *kind = ms_link_find(all[i]);
        ms_link_options *o = &links[count].options;
        if (i == 2) reduction = count;
        links[count++] = (ms_link){ .kind = kind, .options = kind->defaults };
        o->dtype = i == 1 ? l->around : MS_BF16;
        o->int8.form = MS_INT8_ALL_TO_ALL;
        o->powersgd.start_step = 0;
        o->powersgd.error_feedback = false;
        o->powersgd.batched = i > 2;
    }
    links[reduction].options.between = count - reduction - 1;
    return count;
}

/* Nothing is lost permanently: the results of all iterations plus all residuals equal the means of
 * the ranks' numbers. */
static void conserved(rank *self, const groups *g, const lossy *l, bool rows)
{
    enum { LENGTH = 88 };
    uint32_t ranks = l->kind == MS_BUCKET_HYBRID ? 2 : self->ranks;
    int64_t padded = rows ? length_by_rows(ranks) : 80;
    ms_tensor *parameters[PARAMETERS] = { NULL }, *residual = NULL;
    ms_link given[6], links[6];
    own_bucket own;
    float got[LENGTH], left[LENGTH];
    double sums[LENGTH] = { 0 };
    uint32_t count = read_lossy(l, given), place = 0, shards = 1;
    OK(ms_chain_take(self->engine, l->kind, given, count, links));
    OK(make_parameters(self, parameters));
    for (int t = 0; t <= ITERATIONS; t++) {
        ms_tensor *result = NULL;
        OK(open_bucket(self, g, parameters, padded, l->kind, rows, t, &own));
        if (t == ITERATIONS) break;
        shards = ms_bucket_shards(&own.bucket, &place);
        OK(ms_chain_run(links, count, &own.bucket, &result));
        OK(ms_tensor_read(result, got, (size_t)padded / shards * sizeof *got));
        for (int64_t i = 0; i < padded / shards; i++) sums[i] += (double)got[i];
        ms_tensor_release(result);
        close_bucket(&own);
    }
    OK(ms_link_state_tensor(links[0].state, &own.bucket, "error", NULL, NULL, &residual));
    OK(run_one(self, self->world,
               &(ms_collective){ .kind = MS_ALL_REDUCE, .in = residual, .bucket = -1 }));
    OK(ms_tensor_read(residual, left, (size_t)padded * sizeof *left));
    for (int64_t i = 0; i < padded / shards; i++) {
        int64_t at = place_of(rows && shards > 1, place, shards, padded / shards, i);
        double expected = 0;
        if (at < 0) continue;
        for (int t = 0; t < ITERATIONS && at < 76; t++)
            for (uint32_t r = 0; r < self->ranks; r++)
                expected += value_of(r, t, at) * unit / self->ranks;
        double found = sums[i] + (double)left[at] / self->ranks;
        if (fabs(found - expected) <= 2e-5) continue;
        snprintf(self->why, sizeof self->why,
                 "rank %u: %s around %s, %s: number %lld is %g, and %g with residuals; expected %g",
                 self->number, ms_dtype_name(l->around), l->last, ms_bucket_kind_name(l->kind),
                 (long long)at, sums[i], found, expected);
        break;
    }
    ms_tensor_release(residual);
    close_bucket(&own);
    ms_chain_drop(links, count);
    for (int i = 0; i < PARAMETERS; i++) ms_tensor_release(parameters[i]);
}

static void feedback(rank *self)
{
    groups g = { NULL, NULL };
    OK(split(self, &g));
    for (size_t i = 0; i < sizeof losses / sizeof *losses; i++) {
        if (losses[i].between[0] && strcmp(losses[i].between[0], "noop") == 0) continue;
        for (int rows = 0; rows < 2 && !*self->why; rows++)
            if (is_tried(self, i, rows)) conserved(self, &g, &losses[i], rows);
    }
}

static void nothing_is_lost_for_good_with_error_feedback(void **state)
{
    (void)state;
    unit = 1.0 / 3;
    for (uint32_t ranks = 2; ranks <= 4; ranks += 2) run_well(THREADS, ranks, feedback, NULL);
    unit = 1;
}

/* ----------------------------------------------------------------- refusals */

static void chains_for_other_kinds_are_refused(void **state)
{
    (void)state;
    static const struct {
        ms_bucket_kind kind;
        const char *links[3];
        uint32_t between; /* of the first */
        const char *says;
    } wrong[] = {
        { MS_BUCKET_REDUCE_SCATTER, { "all_reduce" }, 0, "reduce ends a chain for every kind" },
        { MS_BUCKET_HYBRID, { "cast", "all_reduce" }, 0, "of the kind hybrid" },
        { MS_BUCKET_REDUCE_SCATTER, { "post_local_sgd" }, 0, "a copy of the parameters" },
        { MS_BUCKET_HYBRID, { "post_local_sgd" }, 0, "between" },
        { MS_BUCKET_ALL_REDUCE, { "reduce", "reduce" }, 1, "need hybrid buckets" },
        { MS_BUCKET_REDUCE_SCATTER, { "reduce", "reduce" }, 1, "reduce_scatter" },
        { MS_BUCKET_HYBRID, { "reduce", "reduce" }, 0, "would never run" },
        { MS_BUCKET_HYBRID, { "reduce", "clip", "reduce" }, 2, "put it before reduce" },
        { MS_BUCKET_HYBRID, { "reduce", "nan_check", "reduce" }, 2, "between the reductions" },
        { MS_BUCKET_HYBRID, { "reduce", "cast" }, 1, "does not reduce" },
    };
    ms_engine *engine = NULL;
    ms_engine_options options = { .device = "sim" };
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        ms_link links[3];
        uint32_t count = 0;
        for (; count < 3 && wrong[i].links[count]; count++) {
            const ms_link_kind *kind = ms_link_find(wrong[i].links[count]);
            links[count] = (ms_link){ .kind = kind, .options = kind->defaults };
            links[count].options.clip.max_norm = 1;
            links[count].options.clip.scope = MS_CLIP_BUCKET;
        }
        links[0].options.between = wrong[i].between;
        assert_int_equal(ms_chain_check(engine, wrong[i].kind, links, count), MS_ERROR_ARGUMENT);
        if (!strstr(ms_engine_error(engine)->message, wrong[i].says))
            fail_msg("'%s' lacks '%s'", ms_engine_error(engine)->message, wrong[i].says);
    }
    ms_engine_free(engine);
}

/* The length and the dtype of a result, and of a shard. */
static void results(rank *self)
{
    groups g = { NULL, NULL };
    ms_tensor *parameters[PARAMETERS] = { NULL }, *t = NULL;
    own_bucket own;
    OK(split(self, &g));
    OK(make_parameters(self, parameters));
    for (int kind = MS_BUCKET_ALL_REDUCE; kind <= MS_BUCKET_HYBRID; kind++) {
        OK(open_bucket(self, &g, parameters, 80, (ms_bucket_kind)kind, false, 0, &own));
        static const int64_t lengths[] = {
            [MS_BUCKET_ALL_REDUCE] = 80, [MS_BUCKET_REDUCE_SCATTER] = 20, [MS_BUCKET_HYBRID] = 40
        };
        int64_t length = lengths[kind];
        CHECK(ms_bucket_numbers(&own.bucket) == 76);
        OK(ms_bucket_shard(&own.bucket, own.bucket.flat, &t));
        CHECK(ms_tensor_count(t) == length && (kind > 0 || t == own.bucket.flat));
        OK(ms_bucket_check_result(&own.bucket, NULL, t));
        CHECK(ms_bucket_shard(&own.bucket, own.gradients[0], &t) == MS_ERROR_ARGUMENT);
        ms_tensor_release(t);
        if (kind != MS_BUCKET_ALL_REDUCE) {
            CHECK(ms_bucket_check_result(&own.bucket, NULL, own.bucket.flat) == MS_ERROR_ARGUMENT);
            CHECK(strstr(ms_engine_error(self->engine)->message, "bucket:shard(t)") != NULL);
        }
        OK(make(self, MS_BF16, length, false, &t));
        CHECK(ms_bucket_check_result(&own.bucket, NULL, t) == MS_ERROR_ARGUMENT);
        ms_tensor_release(t);
        close_bucket(&own);
    }
    /* Rows of a buffer whose numbers a link has changed are not known. */
    ms_link reduce = { .kind = ms_link_find("reduce") };
    OK(open_bucket(self, &g, parameters, 88, MS_BUCKET_REDUCE_SCATTER, true, 0, &own));
    OK(make(self, MS_F32, 44, true, &t));
    ms_bucket_set_buffer(&own.bucket, t);
    ms_tensor_release(t);
    t = NULL;
    CHECK(ms_chain_run(&reduce, 1, &own.bucket, &t) == MS_ERROR_ARGUMENT);
    CHECK(strstr(ms_engine_error(self->engine)->message, "44 numbers instead of 88") != NULL);
    close_bucket(&own);
    for (int i = 0; i < PARAMETERS; i++) ms_tensor_release(parameters[i]);
}

static void results_are_shards(void **state)
{
    (void)state;
    run_well(THREADS, 4, results, NULL);
}

/* -------------------------------------------------------- failing allocations */

/* Two iterations on a rank of a fake pair. */
static ms_status any_life(rank *self, const void *which)
{
    const lossy *l = which;
    ms_tensor *parameters[PARAMETERS] = { NULL };
    ms_link given[6], links[6];
    groups g = { self->world, self->world };
    uint32_t count = read_lossy(l, given);
    bool rows = (l - losses) % 2 == 0;
    ms_status status = ms_chain_take(self->engine, l->kind, given, count, links);
    if (status) return status;
    status = make_parameters(self, parameters);
    for (int t = 0; t < 2 && !status; t++) {
        own_bucket own;
        ms_tensor *result = NULL;
        status = open_bucket(self, &g, parameters, rows ? 76 : 80, l->kind, rows, t, &own);
        if (!status) status = ms_chain_run(links, count, &own.bucket, &result);
        ms_tensor_release(result);
        close_bucket(&own);
    }
    ms_chain_drop(links, count);
    for (int i = 0; i < PARAMETERS; i++) ms_tensor_release(parameters[i]);
    return status;
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    for (size_t i = 1; i < sizeof losses / sizeof *losses; i++)
        fail_each_allocation(any_life, &losses[i], i % 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sharded_kinds_give_shards_of_what_all_reduce_gives),
        cmocka_unit_test(nothing_is_lost_for_good_with_error_feedback),
        cmocka_unit_test(chains_for_other_kinds_are_refused),
        cmocka_unit_test(results_are_shards),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
