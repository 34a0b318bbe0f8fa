/* hook.c: the state of links, the group of a single rank, native links in strict mode and with
 * failing allocations. The results of links: dist/hooks.lua.
 * ctest: each-isa poisoned cuda-ranks cuda-local */
#include "comm/control_table.h"

#include "comm/group.h"
#include "comm/transport_table.h"
#include "fault_rank.h"
#include "moonshard/hook.h"
#include "moonshard/ops.h"

/* ---------------------------------------------- buckets of three parameters */

enum { PARAMETERS = 3 };
static const int64_t shapes[PARAMETERS][2] = { { 6, 5 }, { 7, 1 }, { 4, 8 } };
static const char *const names[PARAMETERS] = { "a", "b", "c" };

typedef struct model {
    ms_tensor *parameters[PARAMETERS];
} model;

typedef struct own_bucket {
    ms_bucket bucket;
    ms_tensor *parameters[PARAMETERS], *gradients[PARAMETERS];
    const char *called[PARAMETERS];
    uint32_t positions[PARAMETERS];
} own_bucket;

static ms_status build(rank *self, model *m)
{
    ms_status status = MS_OK;
    *m = (model){ .parameters = { NULL } };
    for (int i = 0; i < PARAMETERS && !status; i++)
        status = ms_tensor_new(self->engine, MS_F32, 2, shapes[i], &m->parameters[i]);
    return status;
}

static void drop(model *m)
{
    for (int i = 0; i < PARAMETERS; i++) ms_tensor_release(m->parameters[i]);
}

static void close_bucket(own_bucket *b)
{
    for (uint32_t i = 0; i < b->bucket.count; i++) ms_tensor_release(b->gradients[i]);
    ms_tensor_release(b->bucket.buffer);
    ms_tensor_release(b->bucket.flat);
    *b = (own_bucket){ .bucket = { .index = 0 } };
}

/* A bucket of the parameters that order names ("ca"), with gradients of small numbers. */
static ms_status open_bucket(rank *self, const model *m, const char *order, uint32_t index,
                             bool is_last, own_bucket *out)
{
    *out = (own_bucket){ .bucket = { .engine = self->engine,
                                     .group = self->world,
                                     .index = index,
                                     .is_last = is_last,
                                     .divisor = self->ranks,
                                     .label = "a bucket" } };
    ms_bucket *bucket = &out->bucket;
    int64_t total = 0, at = 0;
    for (const char *c = order; *c; c++) total += shapes[*c - 'a'][0] * shapes[*c - 'a'][1];
    ms_status status = ms_tensor_new(self->engine, MS_F32, 1, &total, &bucket->flat);
    float *values = malloc((size_t)total * sizeof *values);
    for (int64_t i = 0; i < total; i++)
        values[i] = (float)((i * 7 + index * 5 + self->number * 3) % 11) - 5;
    if (!status) status = ms_tensor_write(bucket->flat, values, (size_t)total * sizeof *values);
    free(values);
    for (const char *c = order; *c && !status; c++) {
        const int64_t *shape = shapes[*c - 'a'], strides[] = { shape[1], 1 };
        uint32_t i = bucket->count++;
        out->parameters[i] = m->parameters[*c - 'a'];
        out->called[i] = names[*c - 'a'];
        status = ms_tensor_window(bucket->flat, 2, shape, strides, at, &out->gradients[i]);
        at += shape[0] * shape[1];
    }
    if (!status) bucket->buffer = ms_tensor_retain(bucket->flat);
    bucket->parameters = out->parameters;
    bucket->gradients = out->gradients;
    bucket->names = out->called;
    bucket->positions = out->positions;
    if (status) close_bucket(out);
    return status;
}

/* -------------------------------------------------------------------- state */

static ms_status fill_with(ms_tensor *t, double value)
{
    ms_attributes attributes = { .scalar = { .value = value } };
    ms_tensor *out = NULL;
    ms_status status =
        ms_op_apply(ms_tensor_engine(t), &ms_op_fill, &attributes, true, &t, 1, &out, 1);
    ms_tensor_release(out);
    return status;
}

/* Whether t has count[i] times value[i], one after another. */
static bool holds(ms_tensor *t, const int *counts, const double *values, int runs)
{
    float got[256];
    int at = 0;
    if (ms_tensor_read(t, got, ms_tensor_bytes(t))) return false;
    for (int r = 0; r < runs; r++)
        for (int i = 0; i < counts[r]; i++, at++)
            if (got[at] != (float)values[r]) return false;
    return at == ms_tensor_count(t);
}

static void state_of_parameters(rank *self)
{
    model m;
    own_bucket first = { .bucket = { .index = 0 } }, second = first;
    ms_link_state *state = NULL;
    ms_tensor *t = NULL, *again = NULL;
    bool fresh[PARAMETERS];
    OK(build(self, &m));
    OK(ms_link_state_new(self->engine, &state));
    OK(open_bucket(self, &m, "abc", 0, true, &first));
    OK(ms_link_state_tensor(state, &first.bucket, "x", NULL, fresh, &t));
    CHECK(fresh[0] && fresh[1] && fresh[2] && holds(t, (int[]){ 69 }, (double[]){ 0 }, 1));
    OK(fill_with(t, 1));
    OK(ms_link_state_tensor(state, &first.bucket, "x", NULL, fresh, &again));
    CHECK(again == t && !fresh[0] && !fresh[2]); /* the same memory while the bucket is the same */
    ms_tensor_release(t);
    ms_tensor_release(again);
    close_bucket(&first);

    OK(open_bucket(self, &m, "c", 0, false, &first)); /* rebuilt: c, then b and a */
    OK(open_bucket(self, &m, "ba", 1, true, &second));
    OK(ms_link_state_tensor(state, &first.bucket, "x", NULL, fresh, &t));
    CHECK(!fresh[0] && holds(t, (int[]){ 32 }, (double[]){ 1 }, 1));
    OK(fill_with(t, 3));
    ms_tensor_release(t);
    OK(ms_link_state_tensor(state, &second.bucket, "x", (int64_t[]){ 7, 29 }, fresh, &t));
    /* With another length the values are reset. */
    CHECK(!fresh[0] && fresh[1] && holds(t, (int[]){ 7, 29 }, (double[]){ 1, 0 }, 2));
    OK(fill_with(t, 2));
    ms_tensor_release(t);
    OK(ms_link_state_tensor(state, &second.bucket, "y", (int64_t[]){ 0, 4 }, fresh, &t));
    CHECK(fresh[1] && ms_tensor_count(t) == 4);
    ms_tensor_release(t);
    close_bucket(&first);
    OK(open_bucket(self, &m, "bc", 0, true, &first));
    OK(ms_link_state_tensor(state, &first.bucket, "x", NULL, fresh, &t));
    CHECK(holds(t, (int[]){ 7, 32 }, (double[]){ 2, 3 }, 2));
    ms_tensor_release(t);
    ms_link_state_set_iteration(state, 9);

    /* Saved and loaded: a value that is put waits for the first parameter of its name. */
    CHECK(ms_link_state_pieces(state) == 4);
    ms_link_piece pieces[4];
    for (uint32_t i = 0; i < 4; i++) OK(ms_link_state_piece(state, i, &pieces[i]));
    CHECK(ms_link_state_piece(state, 4, &pieces[0]) == MS_ERROR_ARGUMENT);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(pieces[i].parallel
              == (strcmp(pieces[i].name, "x") == 0 && strcmp(pieces[i].parameter, "a") != 0));
    ms_link_state *other = NULL;
    OK(ms_link_state_new(self->engine, &other));
    for (uint32_t i = 0; i < 4; i++) {
        OK(ms_link_state_put(other, pieces[i].name, pieces[i].parameter, pieces[i].tensor));
        ms_tensor_release(pieces[i].tensor);
    }
    OK(ms_link_state_shared(other, "x", 2, fresh, &t));
    CHECK(fresh[0] && ms_tensor_count(t) == 2);
    ms_tensor_release(t);
    CHECK(ms_link_state_pieces(other) == 5);
    OK(ms_link_state_tensor(other, &first.bucket, "x", NULL, fresh, &t));
    CHECK(!fresh[0] && !fresh[1] && holds(t, (int[]){ 7, 32 }, (double[]){ 2, 3 }, 2)
          && ms_link_state_pieces(other) == 5);
    ms_tensor_release(t);
    ms_link_state_clear(other);
    CHECK(ms_link_state_pieces(other) == 0 && ms_link_state_iteration(other) == 0
          && ms_link_state_iteration(state) == 9);

    uint64_t live = ms_engine_memory(self->engine).live;
    ms_link_state_retain(state);
    ms_link_state_release(state);
    ms_link_state_abandon(state);
    CHECK(ms_engine_memory(self->engine).live == live);
    ms_link_states_sweep(self->engine);
    CHECK(ms_engine_memory(self->engine).live < live);
    ms_link_state_release(other);
    close_bucket(&first);
    close_bucket(&second);
    drop(&m);
    OK(ms_engine_sync(self->engine));
    CHECK(nothing_is_left(self));
}

static void a_state_follows_its_parameters(void **state)
{
    (void)state;
    run_well(THREADS, 1, state_of_parameters, NULL);
}

/* ------------------------------------------------------------------- levels */

/* Rank r calls r times in the group of itself; then all call once. */
static void alone_and_together(rank *self)
{
    ms_group *alone = NULL, *again = NULL, *part = NULL;
    ms_tensor *t = NULL;
    const uint32_t zero = 0, one = 1;
    OK(ms_comm_alone(self->engine, &alone));
    OK(ms_comm_alone(self->engine, &again));
    CHECK(alone == again && ms_group_size(alone) == 1 && ms_group_rank(alone) == 0
          && ms_group_world_rank(alone, 0) == self->number && !ms_group_has_others(alone));
    OK(ms_group_split(alone, 1, &one, &zero, &part));
    CHECK(part == alone);
    OK(make(self, MS_F32, 4, true, &t));
    OK(fill_with(t, self->number + 1));
    for (uint32_t i = 0; i < self->number; i++)
        OK(run_one(self, alone, &(ms_collective){ .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 }));
    CHECK(holds(t, (int[]){ 4 }, (double[]){ self->number + 1 }, 1));
    OK(run_one(self, self->world,
               &(ms_collective){ .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 }));
    CHECK(holds(t, (int[]){ 4 }, (double[]){ self->ranks * (self->ranks + 1) / 2 }, 1));
    CHECK(ms_group_traffic(alone, MS_ALL_REDUCE).calls == self->number
          && ms_group_traffic(alone, MS_ALL_REDUCE).wire_bytes == 0);
    ms_tensor_release(t);

    own_bucket b = { .bucket = { .engine = self->engine, .group = self->world } };
    for (int kind = 0; kind < 2; kind++) {
        b.bucket.kind = kind ? MS_BUCKET_REDUCE_SCATTER : MS_BUCKET_ALL_REDUCE;
        OK(ms_bucket_group(&b.bucket, MS_LEVEL_ALL, &part));
        CHECK(part == self->world);
        OK(ms_bucket_group(&b.bucket, kind ? MS_LEVEL_REPLICATE : MS_LEVEL_SHARD, &part));
        CHECK(part == alone);
        OK(ms_bucket_group(&b.bucket, kind ? MS_LEVEL_SHARD : MS_LEVEL_REPLICATE, &part));
        CHECK(part == self->world);
    }
}

static void a_rank_alone_waits_for_nobody(void **state)
{
    (void)state;
    for (int kind = THREADS; kind <= PROCESSES; kind++)
        run_well((job_kind)kind, 3, alone_and_together, NULL);
}

/* -------------------------------------------------------------------- links */

typedef struct chain {
    const char *first, *last;
    ms_dtype around;
    int variant;
} chain;
static const chain chains[] = {
    { "error_feedback", "reduce", MS_F32, 0 },
    { "error_feedback", "all_reduce", MS_BF16, 0 },
    { NULL, "noop", MS_F16, 0 },
    { NULL, "powersgd", MS_F32, 0 },
    { NULL, "powersgd", MS_BF16, 1 },
    { "error_feedback", "powersgd", MS_F32, 2 },
    { "error_feedback", "int8", MS_F32, 0 },
    { NULL, "int8", MS_BF16, 1 },
    { "error_feedback", "int8", MS_F32, 2 },
    { NULL, "top_k", MS_F32, 0 },
    { "error_feedback", "top_k", MS_F16, 1 },
    { NULL, "sign_vote", MS_BF16, 0 },
    { "error_feedback", "powersgd", MS_BF16, 0 },
    { NULL, "adasum", MS_F32, 0 },
    { NULL, "adasum", MS_F16, 0 },
    { NULL, "post_local_sgd", MS_F32, 0 },
    { "clip", "reduce", MS_F32, 0 },
    { "clip", "reduce", MS_F32, 1 },
    { "clip", "noop", MS_BF16, 2 },
    { "nan_check", "reduce", MS_F32, 0 },
    { "nan_check", "sign_vote", MS_F16, 1 },
};

/* cast around, then the links by name. */
static uint32_t read_chain(const chain *c, ms_link *links)
{
    uint32_t count = 0;
    const char *const all[] = { c->around == MS_F32 ? NULL : "cast", c->first, c->last };
    for (int i = 0; i < 3; i++) {
        if (!all[i]) continue;
        const ms_link_kind *kind = ms_link_find(all[i]);
        links[count++] = (ms_link){ .kind = kind, .options = kind->defaults };
        links[count - 1].options.dtype = c->around;
        links[count - 1].options.powersgd.start_step = 0;
        links[count - 1].options.powersgd.batched = c->variant == 1;
        links[count - 1].options.powersgd.warm_start = c->variant != 2;
        links[count - 1].options.int8.per = (ms_int8_per)c->variant;
        links[count - 1].options.int8.form = c->variant ? MS_INT8_ALL_TO_ALL : MS_INT8_ALL_GATHER;
        links[count - 1].options.top_k.fraction = 0.1;
        links[count - 1].options.clip.max_norm = 1;
        links[count - 1].options.nan_check.action = c->variant ? MS_NAN_STOP : MS_NAN_SKIP;
        links[count - 1].options.clip.scope =
            c->variant ? (ms_clip_scope)c->variant : MS_CLIP_GLOBAL;
        links[count - 1].options.post_local_sgd.start_step = 1;
        links[count - 1].options.top_k.momentum = c->variant ? 0.5 : 0;
    }
    return count;
}

/* Two iterations of one bucket, then two of the same parameters in two. */
static ms_status any_life(rank *self, const void *which)
{
    const chain *c = which;
    static const char *const layouts[][2] = {
        { "abc", NULL }, { "abc", NULL }, { "ca", "b" }, { "ca", "b" }
    };
    ms_link given[3], links[3];
    model m;
    uint32_t count = read_chain(c, given);
    ms_status status = ms_chain_take(self->engine, MS_BUCKET_ALL_REDUCE, given, count, links);
    if (status) return status;
    status = build(self, &m);
    for (int i = 0; i < 4; i++)
        for (uint32_t b = 0; b < 2 && layouts[i][b] && !status; b++) {
            own_bucket own;
            ms_tensor *result = NULL;
            status = open_bucket(self, &m, layouts[i][b], b, b == 1 || !layouts[i][1], &own);
            if (status) break;
            status = ms_chain_run(links, count, &own.bucket, &result);
            if (!status && ms_bucket_check_result(&own.bucket, NULL, result))
                status = MS_ERROR_STATE;
            ms_tensor_release(result);
            close_bucket(&own);
        }
    ms_chain_drop(links, count);
    drop(&m);
    return status;
}

static void lives(rank *self)
{
    for (size_t i = 0; i < sizeof chains / sizeof *chains; i++) OK(any_life(self, &chains[i]));
    OK(ms_engine_sync(self->engine));
    CHECK(nothing_is_left(self));
}

/* ----------------------------------------------- a transport that cannot round */

/* The result of cast and reduce over a transport, in a fake world: 3 times thirds, in f16. */
static void cast_and_reduce(const ms_transport *transport, float got[8])
{
    static const float thirds[8] = { 0.333333f, -1.333333f, 7.1f, 1e-8f, 70000, 2049, 0.1f, -0.2f };
    const chain c = { .around = MS_F16, .last = "reduce" };
    ms_engine_options options = { .own_device = late_device(NULL), .threads = 1, .strict = true };
    ms_engine *engine = NULL;
    ms_link links[3];
    ms_tensor *result = NULL, *parameter = NULL;
    int64_t eight = 8;
    uint32_t count = read_chain(&c, links), position = 0;
    const char *name = "a";
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    ms_group *world = NULL;
    ms_membership membership = { .control = &ms_control_none, .transport = transport, .size = 3 };
    assert_int_equal(ms_comm_new(engine, &membership, &world), MS_OK);
    ms_bucket bucket = { .engine = engine,
                         .group = world,
                         .is_last = true,
                         .divisor = 3,
                         .label = "a bucket",
                         .count = 1,
                         .names = &name,
                         .positions = &position };
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &eight, &bucket.flat), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &eight, &parameter), MS_OK);
    assert_int_equal(ms_tensor_write(bucket.flat, thirds, sizeof thirds), MS_OK);
    bucket.buffer = ms_tensor_retain(bucket.flat);
    bucket.parameters = &parameter;
    bucket.gradients = &bucket.flat;
    assert_int_equal(ms_chain_run(links, count, &bucket, &result), MS_OK);
    assert_int_equal(ms_tensor_read(result, got, sizeof thirds), MS_OK);
    ms_tensor_release(result);
    ms_tensor_release(parameter);
    ms_tensor_release(bucket.buffer);
    ms_tensor_release(bucket.flat);
    ms_engine_free(engine);
}

static void a_cast_runs_where_the_transport_does_not_round(void **state)
{
    (void)state;
    ms_transport plain = ms_transport_fake;
    plain.rounds = false;
    float rounded[8], cast[8];
    cast_and_reduce(&ms_transport_fake, rounded);
    cast_and_reduce(&plain, cast);
    assert_memory_equal(rounded, cast, sizeof cast);
}

static void links_run_in_strict_mode(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 3; ranks++) run_well(THREADS, ranks, lives, NULL);
}

static void options_are_checked(void **state)
{
    (void)state;
    static const struct {
        const char *kind, *says;
        ms_link_options options;
    } wrong[] = {
        { "error_feedback", "decay", { .decay = -1 } },
        { "cast", "i64", { .dtype = MS_I64 } },
        { "powersgd", "rank", { .powersgd = { .rank = 0 } } },
        { "powersgd", "min_rate", { .powersgd = { .rank = 1 } } },
        { "powersgd",
          "start_step",
          { .powersgd = { .rank = 1, .start_step = -1, .min_rate = 1 } } },
        { "powersgd", "eps", { .powersgd = { .rank = 1, .min_rate = 1, .eps = -1 } } },
        { "powersgd", "stats_every", { .powersgd = { .rank = 1, .min_rate = 1 } } },
        { "clip", "max_norm", { .clip = { .max_norm = 0 } } },
        { "post_local_sgd", "start_step", { .post_local_sgd = { .start_step = -1 } } },
        { "int8", "block", { .int8 = { .per = MS_INT8_BLOCK, .block = 12 } } },
        { "int8", "block", { .int8 = { .per = MS_INT8_CHANNEL } } },
        { "top_k", "fraction", { .top_k = { .fraction = 0 } } },
        { "top_k", "momentum", { .top_k = { .fraction = 1, .momentum = 1 } } },
    };
    ms_engine *engine = NULL;
    ms_engine_options options = { .device = "sim" };
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const ms_link_kind *kind = ms_link_find(wrong[i].kind), *last = ms_link_find("reduce");
        ms_link links[] = { { .kind = kind, .options = wrong[i].options }, { .kind = last } };
        assert_int_equal(ms_chain_check(engine, MS_BUCKET_ALL_REDUCE, links, kind->reduce ? 1 : 2),
                         MS_ERROR_ARGUMENT);
        assert_non_null(strstr(ms_engine_error(engine)->message, wrong[i].says));
        assert_non_null(strstr(ms_engine_error(engine)->message, wrong[i].kind));
    }
    ms_engine_free(engine);
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof chains / sizeof *chains; i++)
        fail_each_allocation(any_life, &chains[i], i % 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_state_follows_its_parameters),
        cmocka_unit_test(a_rank_alone_waits_for_nobody),
        cmocka_unit_test(links_run_in_strict_mode),
        cmocka_unit_test(a_cast_runs_where_the_transport_does_not_round),
        cmocka_unit_test(options_are_checked),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
