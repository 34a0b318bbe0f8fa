/* ddp.c: buckets and the reducer: how parameters are cut, order of launches, bits of N ranks against one, hooks, what goes wrong.
 * ctest: each-isa poisoned */
#include <stdatomic.h>

#include "comm_support.h"
#include "fault_os.h"
#include "moonshard/ddp.h"

/* ------------------------------------------------------------------------------------------------------------------------ assignment */

static void assert_buckets(const uint64_t *bytes, const uint32_t *keys, uint32_t count, const uint64_t *limits, uint32_t limit_count, bool backwards, const char *expected)
{
    static const uint32_t zeros[16];
    ms_engine *engine = NULL;
    ms_engine_options options = { .device = "sim" };
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    uint32_t order[16], sizes[16], buckets = 0, at = 0;
    char text[256] = "";
    assert_int_equal((backwards ? ms_ddp_assign_backwards : ms_ddp_assign)(engine, bytes, keys ? keys : zeros, count, limits, limit_count, order, sizes, &buckets), MS_OK);
    for (uint32_t b = 0; b < buckets; b++) {
        for (uint32_t i = 0; i < sizes[b]; i++) sprintf(text + strlen(text), "%u ", order[at++]);
        strcat(text, b + 1 < buckets ? "| " : "");
    }
    assert_int_equal(at, count);
    assert_string_equal(text, expected);
    ms_engine_free(engine);
}

static void parameters_are_cut_into_buckets(void **state)
{
    (void)state;
    const uint64_t v1[] = { 400000, 1200000, 200000, 1600000, 800000 }, mega[] = { 1 << 20, 2 << 20 };
    assert_buckets(v1, NULL, 5, mega, 2, true, "2 3 4 | 0 1 ");                       /* vector V1 */
    assert_buckets(v1, NULL, 5, mega, 2, false, "0 1 | 2 3 4 ");
    assert_buckets(v1, NULL, 5, (uint64_t[]){ UINT64_MAX }, 1, true, "0 1 2 3 4 ");
    assert_buckets(v1, NULL, 5, (uint64_t[]){ 1 }, 1, true, "4 | 3 | 2 | 1 | 0 ");
    assert_buckets((uint64_t[]){ 10, 10, 10, 10 }, NULL, 4, (uint64_t[]){ 10, 20 }, 2, false, "0 | 1 2 | 3 ");   /* as many bytes as the limit closes; the last limit holds on */
    const uint32_t keys[] = { 0, 1, 0, 1, 0 };                                        /* each dtype by itself, with limits of its own */
    assert_buckets((uint64_t[]){ 10, 10, 10, 10, 10 }, keys, 5, (uint64_t[]){ 20 }, 1, false, "0 2 | 1 3 | 4 ");
    assert_buckets((uint64_t[]){ 10, 10, 10, 10, 10 }, keys, 5, (uint64_t[]){ 20 }, 1, true, "4 | 1 3 | 0 2 ");
}

/* ----------------------------------------------------------------------------------------------------------------- a model of few lines */

enum { WEIGHTS = 5, WIDTH = 24, ROWS = 3 };

/* A chain of tanh(x w) with weights of uneven shapes; used last to first, so that gradients come in that order. */
typedef struct model { ms_tensor *weights[WEIGHTS]; const char *names[WEIGHTS]; } model;

static double weight_value(const void *context, int64_t i)
{
    uint32_t w = *(const uint32_t *)context;
    return 0.01 * (double)((i * 37 + w * 11) % 29 - 14);
}

static double input_value(const void *context, int64_t i)
{
    const uint32_t *at = context;                              /* rank and iteration */
    return 0.1 * (double)((i * 13 + at[0] * 7 + at[1] * 5) % 23 - 11);
}

static ms_status build(rank *self, model *m)
{
    static const char *const names[] = { "a", "b", "c", "d", "e" };
    static const int64_t shapes[WEIGHTS + 1] = { WIDTH, 17, 40, 9, 31, 5 };
    ms_status status = MS_OK;
    *m = (model){ .weights = { NULL } };
    for (uint32_t w = 0; w < WEIGHTS && !status; w++) {
        m->names[w] = names[w];
        status = ms_tensor_new(self->engine, MS_F32, 2, &shapes[w], &m->weights[w]);
        if (!status) status = fill(m->weights[w], weight_value, &w);
        if (!status) status = ms_tensor_set_requires_grad(m->weights[w], true);
    }
    return status;
}

static void drop(model *m) { for (int w = 0; w < WEIGHTS; w++) ms_tensor_release(m->weights[w]); }

/* A sum over one rank's input; `used` weights, from the first. */
static ms_status forward(rank *self, model *m, uint32_t number, uint32_t iteration, uint32_t used, ms_tensor **loss)
{
    const int64_t shape[] = { ROWS, WIDTH };
    uint32_t at[] = { number, iteration };
    ms_tensor *x = NULL, *y = NULL, *z = NULL;
    ms_status status = ms_tensor_new(self->engine, MS_F32, 2, shape, &x);
    if (!status) status = fill(x, input_value, at);
    for (uint32_t w = 0; w < used && !status; w++) {
        ms_tensor *inputs[] = { x, m->weights[w] };
        status = ms_apply(self->engine, &ms_op_matmul, NULL, false, inputs, 2, &y, 1);
        if (!status) status = ms_apply(self->engine, &ms_op_tanh, NULL, false, &y, 1, &z, 1);
        ms_tensor_release(x);
        ms_tensor_release(y);
        x = z;
        y = z = NULL;
    }
    ms_attributes all = { .reduce = { .all = true } };
    if (!status) status = ms_apply(self->engine, &ms_op_sum, &all, false, &x, 1, loss, 1);
    ms_tensor_release(x);
    return status;
}

static ms_status pass(rank *self, model *m, uint32_t number, uint32_t iteration, uint32_t used, bool retain)
{
    ms_tensor *loss = NULL;
    ms_status status = forward(self, m, number, iteration, used, &loss);
    if (!status) status = ms_backward(self->engine, &loss, NULL, 1, retain);
    if (!status && retain) status = ms_backward(self->engine, &loss, NULL, 1, false);
    ms_tensor_release(loss);
    return status;
}

static ms_status clear(model *m)
{
    ms_status status = MS_OK;
    for (int w = 0; w < WEIGHTS && !status; w++) status = ms_tensor_set_grad(m->weights[w], NULL);
    return status;
}

static ms_status wrap(rank *self, model *m, ms_reducer_options options, ms_reducer **out)
{
    ms_reducer_parameter parameters[WEIGHTS];
    for (int w = 0; w < WEIGHTS; w++) parameters[w] = (ms_reducer_parameter){ .tensor = m->weights[w], .name = m->names[w] };
    options.group = self->world;
    return ms_reducer_new(self->engine, &options, parameters, WEIGHTS, out);
}

/* What one process gives that computes the ranks' gradients apart (summed over passes first .. last) and adds them in rank order. */
static ms_status alone(rank *self, model *m, uint32_t first, uint32_t last, int w, float *sum, size_t count)
{
    float *one = malloc(count * sizeof *one), factor = 1.0f / (float)self->ranks;
    ms_status status = MS_OK;
    memset(sum, 0, count * sizeof *sum);
    for (uint32_t r = 0; r < self->ranks && !status; r++) {
        status = clear(m);
        for (uint32_t i = first; i <= last && !status; i++) status = pass(self, m, r, i, WEIGHTS, false);
        if (!status) status = ms_tensor_read(ms_tensor_grad(m->weights[w]), one, count * sizeof *one);
        for (size_t i = 0; i < count; i++) {
            float share = one[i] * factor;
            sum[i] = r == 0 ? share : sum[i] + share;
        }
    }
    free(one);
    return status;
}

/* Whether the gradients are, bit for bit, those of passes first .. last of all ranks. */
static bool reduced(rank *self, model *m, model *reference, uint32_t first, uint32_t last)
{
    bool equal = true;
    for (int w = 0; w < WEIGHTS && equal; w++) {
        size_t count = (size_t)ms_tensor_count(m->weights[w]);
        float *expected = malloc(count * sizeof *expected), *got = malloc(count * sizeof *got);
        equal = ms_tensor_grad(m->weights[w]) && ms_tensor_read(ms_tensor_grad(m->weights[w]), got, count * sizeof *got) == MS_OK;
        if (equal) equal = alone(self, reference, first, last, w, expected, count) == MS_OK && memcmp(expected, got, count * sizeof *got) == 0;
        free(expected);
        free(got);
    }
    return equal;
}

/* ------------------------------------------------------------------------------------------------------------------ bits and order */

static const uint64_t small_caps[] = { 2000, 2500 };

static void train_some(rank *self)
{
    model m, reference;
    ms_reducer *reducer = NULL;
    OK(build(self, &m));
    OK(build(self, &reference));
    OK(wrap(self, &m, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2 }, &reducer));
    CHECK(ms_reducer_buckets(reducer) == 1);
    for (uint32_t iteration = 0; iteration < 4; iteration++) {
        ms_comm_record(self->engine, true);
        OK(ms_reducer_forward(reducer, true));
        size_t before = ms_comm_record_count(self->engine);
        CHECK(before == (iteration == 1 ? 2u : 0u));                  /* the rebuild's two broadcasts, once */
        OK(ms_reducer_forward_end(reducer));
        OK(pass(self, &m, self->number, iteration, WEIGHTS, false));
        CHECK(ms_reducer_buckets(reducer) == (iteration == 0 ? 1u : 3u));
        CHECK(ms_comm_record_count(self->engine) - before == ms_reducer_buckets(reducer));     /* vector V11 */
        for (uint32_t b = 0; b < ms_reducer_buckets(reducer); b++) CHECK(ms_comm_record_get(self->engine, before + b)->bucket == (int32_t)b);
        CHECK(reduced(self, &m, &reference, iteration, iteration));
        OK(ms_reducer_step_end(reducer));
        OK(ms_engine_sync(self->engine));
        ms_reducer_stats stats = ms_reducer_stats_get(reducer);
        CHECK(stats.iterations == iteration + 1 && stats.timed == iteration + 1 && stats.calls == ms_reducer_buckets(reducer));
        CHECK(stats.payload_bytes == 7528 && llabs((long long)stats.wire_bytes - (long long)(2 * 7528u * (self->ranks - 1) / self->ranks)) < 8);
        CHECK(stats.backward_ns > 0 && stats.reduce_ns > 0 && stats.backward_ns < 60000000000u && stats.exposed_ns < 60000000000u && stats.forward_ns < 60000000000u && stats.step_ns > 0 && stats.step_ns < 60000000000u);
        OK(clear(&m));
    }
    CHECK(ms_reducer_is_rebuilt(reducer));
    const ms_bucket *first = ms_reducer_bucket(reducer, 0);           /* e (620 bytes) and d (1116) and c (1440): 2000 bytes are reached */
    CHECK(first->count == 3 && first->parameters[0] == m.weights[4] && first->parameters[2] == m.weights[2] && !first->is_last);
    CHECK(ms_tensor_storage(first->gradients[0]) == ms_tensor_storage(first->flat));
    CHECK(ms_reducer_bucket(reducer, 2)->is_last && ms_reducer_iterations(reducer) == 4);
    ms_reducer_free(reducer);
    drop(&m);
    drop(&reference);
}

static void ranks_give_the_bits_of_one(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 4; ranks++) {
        run_well(THREADS, ranks, train_some, NULL);
        run_well(PROCESSES, ranks, train_some, NULL);
    }
}

static void accumulate_some(rank *self)
{
    model m, reference;
    ms_reducer *reducer = NULL;
    OK(build(self, &m));
    OK(build(self, &reference));
    OK(wrap(self, &m, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2 }, &reducer));
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 3; i++) {
            ms_reducer_set_no_sync(reducer, i < 2);
            OK(ms_reducer_forward(reducer, i == 2));
            OK(pass(self, &m, self->number, i, WEIGHTS, false));
        }
        CHECK(reduced(self, &m, &reference, 0, 2));
        OK(clear(&m));
    }
    /* Gradients that are there when buckets are rebuilt move along. */
    ms_reducer_rebuild(reducer);
    OK(ms_reducer_forward(reducer, true));
    OK(pass(self, &m, self->number, 0, WEIGHTS, false));
    OK(clear(&m));
    OK(ms_reducer_forward(reducer, false));
    OK(pass(self, &m, self->number, 0, WEIGHTS, false));
    OK(ms_reducer_forward(reducer, true));
    OK(pass(self, &m, self->number, 1, WEIGHTS, false));
    CHECK(reduced(self, &m, &reference, 0, 1));
    ms_reducer_free(reducer);
    for (int w = 0; w < WEIGHTS; w++) CHECK(ms_tensor_grad(m.weights[w]));      /* they outlive the buckets */
    OK(wrap(self, &m, (ms_reducer_options){ 0 }, &reducer));                    /* and may be wrapped anew */
    OK(ms_reducer_forward(reducer, true));
    OK(clear(&m));
    OK(pass(self, &m, self->number, 5, WEIGHTS, false));
    CHECK(reduced(self, &m, &reference, 5, 5));
    drop(&m);
    drop(&reference);
}

static void passes_without_sync_add_up(void **state)
{
    (void)state;
    run_well(THREADS, 2, accumulate_some, NULL);
    run_well(THREADS, 3, accumulate_some, NULL);
}

/* More parameters in a bucket than a storage has cells, and one of no elements. */
static void many_parameters(rank *self)
{
    enum { COUNT = 151 };
    ms_tensor *all[COUNT];
    ms_reducer_parameter parameters[COUNT];
    ms_reducer *reducer = NULL;
    uint32_t zero = 0;
    for (int i = 0; i < COUNT; i++) {
        int64_t n = i == 70 ? 0 : 1 + i % 7;
        OK(ms_tensor_new(self->engine, MS_F32, 1, &n, &all[i]));
        OK(fill(all[i], weight_value, &zero));
        OK(ms_tensor_set_requires_grad(all[i], true));
        parameters[i] = (ms_reducer_parameter){ .tensor = all[i], .name = "p" };
    }
    OK(ms_reducer_new(self->engine, &(ms_reducer_options){ .group = self->world }, parameters, COUNT, &reducer));
    for (int iteration = 0; iteration < 2; iteration++) {
        ms_tensor *loss = NULL;
        OK(ms_reducer_forward(reducer, true));
        for (int i = 0; i < COUNT; i++) {
            ms_tensor *sum = NULL, *scaled = NULL, *more = NULL;
            ms_attributes whole = { .reduce = { .all = true } }, factor = { .scalar = { .value = (i + 1) * (self->number + 1.0) } };
            OK(ms_apply(self->engine, &ms_op_sum, &whole, false, &all[i], 1, &sum, 1));
            OK(ms_apply(self->engine, &ms_op_mul_scalar, &factor, false, &sum, 1, &scaled, 1));
            ms_tensor *pair[] = { loss, scaled };
            if (loss) OK(ms_apply(self->engine, &ms_op_add, NULL, false, pair, 2, &more, 1));
            ms_tensor_release(sum);
            ms_tensor_release(loss);
            if (loss) ms_tensor_release(scaled);
            loss = loss ? more : scaled;
        }
        OK(ms_backward(self->engine, &loss, NULL, 1, false));
        ms_tensor_release(loss);
        for (int i = 0; i < COUNT; i++) {
            float got[8];
            OK(ms_tensor_read(ms_tensor_grad(all[i]), got, ms_tensor_bytes(all[i])));
            for (int64_t j = 0; j < ms_tensor_count(all[i]); j++) CHECK(got[j] == (float)(i + 1) * 1.5f);
            OK(ms_tensor_set_grad(all[i], NULL));
        }
    }
    ms_reducer_free(reducer);
    for (int i = 0; i < COUNT; i++) ms_tensor_release(all[i]);
}

static void a_bucket_holds_any_number_of_parameters(void **state)
{
    (void)state;
    run_well(THREADS, 2, many_parameters, NULL);
}

/* ------------------------------------------------------------------------------------------------------------------------- hooks */

/* One parameter whose gradient is `value` everywhere, reduced by a chain. */
static ms_status reduce_constant(rank *self, const ms_reducer_options *given, double value, int64_t n, float *got)
{
    ms_tensor *p = NULL, *scaled = NULL, *loss = NULL;
    ms_reducer *reducer = NULL;
    uint32_t zero = 0;
    ms_reducer_options options = *given;
    options.group = self->world;
    ms_attributes whole = { .reduce = { .all = true } }, factor = { .scalar = { .value = value } };
    ms_status status = ms_tensor_new(self->engine, MS_F32, 1, &n, &p);
    if (!status) status = fill(p, weight_value, &zero);
    if (!status) status = ms_tensor_set_requires_grad(p, true);
    if (!status) status = ms_reducer_new(self->engine, &options, &(ms_reducer_parameter){ .tensor = p, .name = "p" }, 1, &reducer);
    if (!status) status = ms_reducer_forward(reducer, true);
    if (!status) status = ms_apply(self->engine, &ms_op_mul_scalar, &factor, false, &p, 1, &scaled, 1);
    if (!status) status = ms_apply(self->engine, &ms_op_sum, &whole, false, &scaled, 1, &loss, 1);
    if (!status) status = ms_backward(self->engine, &loss, NULL, 1, false);
    if (!status) status = ms_tensor_read(ms_tensor_grad(p), got, (size_t)n * sizeof *got);
    if (!status) ms_reducer_free(reducer);
    ms_tensor_release(p);
    ms_tensor_release(scaled);
    ms_tensor_release(loss);
    return status;
}

static void native_chains(rank *self)
{
    float got[33];
    ms_link reduce = { .kind = ms_link_find("reduce"), .options = { .op = MS_REDUCE_OP_AVG } };
    ms_link f16[] = { { .kind = ms_link_find("cast"), .options = { .dtype = MS_F16 } }, reduce };
    OK(reduce_constant(self, &(ms_reducer_options){ .links = f16, .link_count = 2 }, 40000, 33, got));
    for (int i = 0; i < 33; i++) CHECK(got[i] == 40000);              /* vector V7: the sum is no f16 number */
    OK(reduce_constant(self, &(ms_reducer_options){ .links = f16, .link_count = 2 }, 1.0 / 7 * (self->number + 1), 1, got));
    float expected = 0;
    for (uint32_t r = 0; r < self->ranks; r++) expected += ms_float_from_f16(ms_f16_from_float((float)(1.0 / 7 * (r + 1)))) * (1.0f / (float)self->ranks);
    CHECK(got[0] == ms_float_from_f16(ms_f16_from_float(expected)) && got[0] != (float)(1.0 / 7 * (self->ranks + 1) / 2));
    ms_link bf16[] = { { .kind = ms_link_find("cast"), .options = { .dtype = MS_BF16 } }, f16[0], { .kind = ms_link_find("all_reduce"), .options = { .op = MS_REDUCE_OP_AVG } } };
    OK(reduce_constant(self, &(ms_reducer_options){ .links = bf16, .link_count = 3 }, self->number + 1, 33, got));
    CHECK(got[32] == (float)(self->ranks + 1) / 2);
    ms_link sum = { .kind = ms_link_find("all_reduce"), .options = { .op = MS_REDUCE_OP_MAX } };
    OK(reduce_constant(self, &(ms_reducer_options){ .links = &sum, .link_count = 1 }, self->number, 4, got));
    CHECK(got[3] == (float)(self->ranks - 1));
    ms_link noop = { .kind = ms_link_find("noop") };
    OK(reduce_constant(self, &(ms_reducer_options){ .links = &noop, .link_count = 1 }, self->number, 4, got));
    CHECK(got[3] == (float)self->number);
    ms_link wrong[] = { noop, reduce };
    CHECK(reduce_constant(self, &(ms_reducer_options){ .links = wrong, .link_count = 2 }, 1, 1, got) == MS_ERROR_ARGUMENT);
    CHECK(reduce_constant(self, &(ms_reducer_options){ .links = f16, .link_count = 1 }, 1, 1, got) == MS_ERROR_ARGUMENT);
}

static void native_links_do_what_they_say(void **state)
{
    (void)state;
    assert_null(ms_link_find("allreduce"));
    for (uint32_t ranks = 2; ranks <= 3; ranks++) run_well(THREADS, ranks, native_chains, NULL);
}

/* A hook that gives a tensor of its own back, ready on a stream of its own. */
static ms_status doubled(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    int *calls = user;
    ms_stream *own = NULL, *before = NULL;
    ms_attributes two = { .scalar = { .value = 2 } };
    ++*calls;
    ms_status status = ms_engine_stream(bucket->engine, "own", &own);
    if (!status) status = ms_stream_wait(own, ms_stream_last(ms_engine_current(bucket->engine)));
    if (status) return status;
    before = ms_engine_set_current(bucket->engine, own);
    status = ms_op_apply(bucket->engine, &ms_op_mul_scalar, &two, false, &bucket->buffer, 1, result, 1);
    *ready = ms_stream_last(own);
    ms_engine_set_current(bucket->engine, before);
    return status;
}

static void freed(void *user) { *(int *)user += 100; }

static ms_status cut_short(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    (void)user, (void)ready;
    int64_t shape = ms_tensor_count(bucket->buffer) - 1, stride = 1;
    return ms_tensor_window(bucket->buffer, 1, &shape, &stride, 0, result);
}

static void own_hooks(rank *self)
{
    float got[33];
    int calls = 0;
    OK(reduce_constant(self, &(ms_reducer_options){ .hook = doubled, .hook_user = &calls, .hook_free = freed }, 1.0 + self->number, 33, got));
    CHECK(got[0] == 2.0f * (float)(self->number + 1) && got[32] == got[0]);
    CHECK(calls == 101);
}

static void a_hook_may_return_what_it_made_elsewhere(void **state)
{
    (void)state;
    run_well(THREADS, 2, own_hooks, NULL);
}

/* ------------------------------------------------------------------------------------------------------------- as buckets are reduced */

/* Steps on a stream of its own as soon as a bucket is reduced, and consumes the gradients. */
typedef struct stepper { ms_reducer *reducer; char calls[96]; ms_status fails; } stepper;

static ms_status step_parameter(ms_engine *engine, ms_tensor *weight)
{
    ms_tensor *scaled = NULL, *inputs[2] = { weight }, *same = NULL;
    ms_tensor *gradient = ms_tensor_grad(weight);
    ms_attributes rate = { .scalar = { .value = 0.5 } };
    ms_status status = ms_op_apply(engine, &ms_op_mul_scalar, &rate, false, &gradient, 1, &scaled, 1);
    inputs[1] = scaled;
    if (!status) status = ms_op_apply(engine, &ms_op_sub, NULL, true, inputs, 2, &same, 1);
    ms_tensor_release(scaled);
    ms_tensor_release(same);
    return status ? status : ms_tensor_set_grad(weight, NULL);
}

static ms_status step_early(void *user, uint32_t index)
{
    stepper *s = user;
    const ms_bucket *bucket = ms_reducer_bucket(s->reducer, index == MS_REDUCED_ALL ? 0 : index);
    ms_engine *engine = bucket->engine;
    ms_stream *own = NULL, *model_stream = ms_engine_current(engine);
    snprintf(s->calls + strlen(s->calls), 16, index == MS_REDUCED_ALL ? "end " : "%u ", index);
    if (s->fails) return ms_engine_fail(engine, s->fails, "an optimizer that says no");
    ms_status status = ms_engine_stream(engine, "optimizer", &own);
    if (index == MS_REDUCED_ALL) return status ? status : ms_stream_wait(model_stream, ms_stream_last(own));
    ms_point ready[2];
    ms_reducer_ready(s->reducer, index, ready);
    for (int i = 0; i < 2 && !status; i++) status = ms_stream_wait(own, ready[i]);
    if (!status) status = ms_stream_wait(own, ms_stream_last(model_stream));          /* backward reads the weights */
    if (status) return status;
    ms_engine_set_current(engine, own);
    for (uint32_t i = 0; i < bucket->count && !status; i++) status = step_parameter(engine, bucket->parameters[i]);
    ms_engine_set_current(engine, model_stream);
    return status;
}

static void step_some(rank *self)
{
    model m, reference;
    stepper s = { 0 };
    ms_reducer *other = NULL;
    ms_bucket_times times;
    OK(build(self, &m));
    OK(build(self, &reference));
    OK(wrap(self, &m, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2 }, &s.reducer));
    OK(wrap(self, &reference, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2 }, &other));
    ms_reducer_set_on_reduced(s.reducer, step_early, &s, NULL);
    for (uint32_t iteration = 0; iteration < 4; iteration++) {
        OK(ms_reducer_forward(s.reducer, false));                     /* without synchronization nobody is told */
        OK(pass(self, &m, self->number, 9, WEIGHTS, false));
        OK(clear(&m));
        OK(ms_reducer_forward(s.reducer, true));
        OK(pass(self, &m, self->number, iteration, WEIGHTS, false));
        OK(ms_reducer_forward(other, true));
        OK(pass(self, &reference, self->number, iteration, WEIGHTS, false));
        for (int w = 0; w < WEIGHTS; w++) {
            CHECK(!ms_tensor_grad(m.weights[w]));
            OK(step_parameter(self->engine, reference.weights[w]));
        }
        OK(ms_engine_sync(self->engine));
        ms_reducer_stats_get(s.reducer);
        for (uint32_t b = 0; b < ms_reducer_buckets(s.reducer); b++) {
            CHECK(ms_reducer_bucket_times(s.reducer, b, &times));
            CHECK(times.ready_ns > 0 && times.ready_ns < 60000000000u && times.reduce_ns > 0 && times.reduce_ns < 60000000000u);
        }
    }
    CHECK(strcmp(s.calls, "0 end 0 1 2 end 0 1 2 end 0 1 2 end ") == 0);
    for (int w = 0; w < WEIGHTS; w++) {
        float got[1024], expected[1024];
        OK(ms_tensor_read(m.weights[w], got, ms_tensor_bytes(m.weights[w])));
        OK(ms_tensor_read(reference.weights[w], expected, ms_tensor_bytes(m.weights[w])));
        CHECK(memcmp(got, expected, ms_tensor_bytes(m.weights[w])) == 0);
    }
    ms_reducer_free(other);
    ms_reducer_free(s.reducer);
    drop(&m);
    drop(&reference);
}

static void fail_early(rank *self)
{
    model m;
    stepper s = { .fails = MS_ERROR_STATE };
    OK(build(self, &m));
    OK(wrap(self, &m, (ms_reducer_options){ 0 }, &s.reducer));
    ms_reducer_set_on_reduced(s.reducer, step_early, &s, NULL);
    OK(ms_reducer_forward(s.reducer, true));
    CHECK(pass(self, &m, 0, 0, WEIGHTS, false) == MS_ERROR_STATE && strstr(ms_engine_error(self->engine)->message, "says no"));
    drop(&m);
}

static void whoever_steps_early_is_told_of_each_bucket(void **state)
{
    (void)state;
    run_well(THREADS, 2, step_some, NULL);
    run_well(PROCESSES, 3, step_some, NULL);
    rank ranks[1];
    job what = { .kind = THREADS, .options = { .ranks = 1, .threads = 1, .heap_bytes = 64 << 20, .timeout_ns = 20000000000u }, .run = fail_early };
    assert_int_equal(run_job(&what, ranks).reason, MS_ABORT_RAISED);
    if (*ranks[0].why) fail_msg("%s", ranks[0].why);
}

/* ------------------------------------------------------------------------------------------------------------------------- plans */

static bool refuses(rank *self, ms_reducer *reducer, const char *order, const char *sizes, const char *why)
{
    uint32_t positions[8], counts[8];
    for (size_t i = 0; order[i]; i++) positions[i] = (uint32_t)(order[i] - '0');
    for (size_t i = 0; sizes[i]; i++) counts[i] = (uint32_t)(sizes[i] - '0');
    return ms_reducer_assign(reducer, positions, counts, (uint32_t)strlen(sizes)) == MS_ERROR_ARGUMENT && strstr(ms_engine_error(self->engine)->message, why);
}

static void plan_some(rank *self)
{
    static const uint32_t plans[][WEIGHTS] = { { 4, 3, 2, 1, 0 }, { 0, 4, 1, 3, 2 } }, sizes[][3] = { { 1, 3, 1 }, { 2, 1, 2 } };
    model m, reference;
    ms_reducer *reducer = NULL;
    uint32_t order[WEIGHTS];
    uint64_t ns[WEIGHTS], before = 0;
    OK(build(self, &m));
    OK(build(self, &reference));
    OK(wrap(self, &m, (ms_reducer_options){ .planned = true }, &reducer));
    for (uint32_t iteration = 0; iteration < 4; iteration++) {
        ms_reducer_record(reducer, iteration < 3);
        OK(ms_reducer_forward(reducer, true));
        OK(pass(self, &m, self->number, iteration, WEIGHTS, false));
        CHECK(ms_reducer_buckets(reducer) == (iteration == 0 ? 1 : 3));          /* nothing is rebuilt by itself */
        CHECK(reduced(self, &m, &reference, iteration, iteration));
        OK(ms_engine_sync(self->engine));
        CHECK(ms_reducer_arrivals(reducer, order, ns) == (iteration < 3 ? WEIGHTS : 0));
        for (uint32_t i = 0; i < WEIGHTS && iteration < 3; i++) {
            const uint64_t now = ns[order[i]];
            CHECK(order[i] == WEIGHTS - 1 - i && now > 0 && now < 60000000000u && (i == 0 || now >= before));
            before = now;
        }
        if (iteration == 1) OK(clear(&m));                                        /* gradients that are there move along */
        OK(ms_reducer_assign(reducer, plans[iteration % 2], sizes[iteration % 2], 3));
        CHECK(iteration == 1 || reduced(self, &m, &reference, iteration, iteration));
        OK(clear(&m));
    }
    CHECK(refuses(self, reducer, "01234", "23", "x") == false);                  /* that one is fine */
    CHECK(refuses(self, reducer, "0123", "22", "'e' is in none"));
    CHECK(refuses(self, reducer, "01233", "23", "'d' is there twice"));
    CHECK(refuses(self, reducer, "01235", "23", "there is no parameter 5"));
    CHECK(refuses(self, reducer, "01234", "203", "bucket 1 is empty"));
    CHECK(refuses(self, reducer, "012344", "24", "there are 5 parameters"));
    ms_reducer_free(reducer);
    drop(&m);
    drop(&reference);
}

static void buckets_may_be_given(void **state)
{
    (void)state;
    run_well(THREADS, 2, plan_some, NULL);
}

/* --------------------------------------------------------------------------------------------------------- who gets no gradient */

/* Rank r uses 5 - r weights, so that the last ones are used by some ranks or none; means are of zeros and gradients. */
static void leave_out_some(rank *self)
{
    const bool static_graph = *(const bool *)self->job->argument;
    model m;
    ms_reducer *reducer = NULL;
    float got[1024], local[1024], old[31 * 5];
    OK(build(self, &m));
    OK(wrap(self, &m, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2, .find_unused = !static_graph, .static_graph = static_graph }, &reducer));
    for (uint32_t iteration = 0; iteration < 4; iteration++) {
        ms_tensor *loss = NULL, *before = NULL;
        const uint32_t used = WEIGHTS - 1 - self->number;
        size_t records = 0;
        ms_comm_record(self->engine, true);
        if (iteration == 3) {                                         /* what nobody uses keeps what it has */
            OK(ms_tensor_new(self->engine, MS_F32, 2, ms_tensor_shape(m.weights[4]), &before));
            OK(fill(before, weight_value, &iteration));
            OK(ms_tensor_set_grad(m.weights[4], before));
            OK(ms_tensor_read(before, old, sizeof old));
            ms_tensor_release(before);
        }
        OK(ms_reducer_forward(reducer, true));
        bool known = false;
        ms_reducer_is_used(reducer, 3, &known);
        CHECK(known == (static_graph && iteration > 0));
        if (known) CHECK(ms_reducer_is_used(reducer, 3, &known) && !ms_reducer_is_used(reducer, 4, &known));
        records = ms_comm_record_count(self->engine);
        OK(forward(self, &m, self->number, iteration, used, &loss));
        OK(ms_reducer_outputs(reducer, &loss, 1));
        OK(ms_backward(self->engine, &loss, NULL, 1, false));
        ms_tensor_release(loss);
        CHECK(ms_comm_record_count(self->engine) - records == ms_reducer_buckets(reducer) + (static_graph && iteration > 0 ? 0 : 1));   /* vector V11 */
        OK(ms_tensor_read(ms_tensor_grad(m.weights[3]), got, ms_tensor_bytes(m.weights[3])));
        CHECK(got[0] != 0 && (ms_tensor_grad(m.weights[4]) != NULL) == (iteration == 3));
        CHECK(ms_reducer_is_used(reducer, 3, &known) && known && !ms_reducer_is_used(reducer, 4, &known) && known);
        if (iteration == 3) {
            OK(ms_tensor_read(ms_tensor_grad(m.weights[4]), local, sizeof old));
            CHECK(memcmp(local, old, sizeof old) == 0);
        }
        /* Rank 0 alone uses weight 3. */
        ms_reducer_set_no_sync(reducer, true);
        OK(clear(&m));
        OK(ms_reducer_forward(reducer, false));
        OK(pass(self, &m, 0, iteration, WEIGHTS - 1, false));
        OK(ms_tensor_read(ms_tensor_grad(m.weights[3]), local, ms_tensor_bytes(m.weights[3])));
        for (int64_t i = 0; i < ms_tensor_count(m.weights[3]); i++) CHECK(got[i] == local[i] * (1.0f / (float)self->ranks));
        ms_reducer_set_no_sync(reducer, false);
        OK(clear(&m));                                                /* with its gradient, a use is forgotten */
    }
    ms_reducer_free(reducer);
    drop(&m);
}

/* Opens by itself in the end, so that a host that waits for it fails instead of hanging. */
typedef struct standing_args { _Atomic int *open; const ms_os *os; uint64_t last_ns; } standing_args;

static ms_task_result stand(ms_run *run, void *arguments)
{
    (void)run;
    const standing_args *args = arguments;
    return atomic_load(args->open) || args->os->monotonic_ns(args->os->user) > args->last_ns ? MS_TASK_DONE : MS_TASK_PENDING;
}

static const ms_task standing_task = { .name = "gate", .function = stand, .args_bytes = sizeof(standing_args) };

/* A whole pass while the model's stream stands: who asks whether its unused parameter was used elsewhere hears from the other hosts alone. */
static void ask_ahead_of_the_device(rank *self)
{
    const ms_os *os = ms_engine_context(self->engine)->os;
    model m;
    ms_reducer *reducer = NULL;
    OK(build(self, &m));
    OK(wrap(self, &m, (ms_reducer_options){ .find_unused = true }, &reducer));
    for (int i = 0; i < 3; i++) {
        _Atomic int open = 0;
        ms_point gate = { 0 };
        ms_tensor *loss = NULL;
        standing_args args = { &open, os, os->monotonic_ns(os->user) + 10000000000u };
        OK(ms_reducer_forward(reducer, true));                        /* the second one rebuilds buckets, which waits for the device */
        OK(ms_stream_enqueue(ms_engine_current(self->engine), &standing_task, &args, NULL, 0, (ms_task_cost){ 0 }, &gate));
        ms_status status = forward(self, &m, self->number, 0, WEIGHTS - 1, &loss);
        if (!status) status = ms_reducer_outputs(reducer, &loss, 1);
        if (!status) status = ms_backward(self->engine, &loss, NULL, 1, false);
        ms_tensor_release(loss);
        bool stood = !ms_point_reached(self->engine, gate);
        atomic_store(&open, 1);
        OK(status);
        CHECK(stood && ms_tensor_grad(m.weights[3]) && !ms_tensor_grad(m.weights[4]));
        OK(ms_engine_sync(self->engine));
        OK(clear(&m));
    }
    ms_reducer_free(reducer);
    drop(&m);
}

static void nobody_waits_for_the_device_to_learn_who_is_used(void **state)
{
    (void)state;
    run_well(THREADS, 2, ask_ahead_of_the_device, NULL);
    run_well(PROCESSES, 3, ask_ahead_of_the_device, NULL);
}

static void who_gets_no_gradient_takes_part_with_zeros(void **state)
{
    (void)state;
    for (int static_graph = 0; static_graph < 2; static_graph++) {
        const bool argument = static_graph;
        run_well(THREADS, 2, leave_out_some, &argument);
        run_well(PROCESSES, 3, leave_out_some, &argument);
    }
}

/* ------------------------------------------------------------------------------------------------------------------------- mistakes */

static bool says(rank *self, const char *text) { return strstr(ms_engine_error(self->engine)->message, text) != NULL; }

static void mistakes(rank *self)
{
    const int which = *(const int *)self->job->argument;
    model m;
    ms_reducer *reducer = NULL, *again = NULL;
    OK(build(self, &m));
    if (which == 0) {
        float got[4];
        CHECK(reduce_constant(self, &(ms_reducer_options){ .hook = cut_short }, 1, 4, got) == MS_ERROR_ARGUMENT);
        CHECK(says(self, "bucket 0") && says(self, "[3] f32") && says(self, "[4] f32"));
        return;
    }
    OK(wrap(self, &m, (ms_reducer_options){ 0 }, &reducer));
    CHECK(wrap(self, &m, (ms_reducer_options){ 0 }, &again) == MS_ERROR_STATE && says(self, "unwrap"));
    if (which == 1) {
        CHECK(pass(self, &m, 0, 0, WEIGHTS, false) == MS_ERROR_STATE && says(self, "no forward of the ddp model"));
    } else if (which == 2) {
        OK(ms_reducer_forward(reducer, true));
        OK(pass(self, &m, 0, 0, 3, false));
        CHECK(ms_reducer_forward(reducer, true) == MS_ERROR_STATE && says(self, "'d', 'e'"));
    } else if (which == 3) {
        OK(ms_reducer_forward(reducer, true));
        CHECK(pass(self, &m, 0, 0, WEIGHTS, true) == MS_ERROR_STATE && says(self, "twice"));
    } else if (which == 4) {
        OK(ms_reducer_forward(reducer, true));
        ms_reducer_set_no_sync(reducer, true);
        CHECK(pass(self, &m, 0, 0, WEIGHTS, false) == MS_ERROR_STATE && says(self, "ran outside"));
    }
    drop(&m);
}

static void mistakes_are_named_and_end_the_job(void **state)
{
    (void)state;
    for (int which = 0; which < 5; which++) {
        rank ranks[1];
        job what = { .kind = which % 2 ? THREADS : PROCESSES, .options = { .ranks = 1, .threads = 1, .heap_bytes = 64 << 20, .timeout_ns = 20000000000u }, .run = mistakes, .argument = &which };
        ms_abort_record cause = run_job(&what, ranks);
        if (*ranks[0].why) fail_msg("mistake %d: %s", which, ranks[0].why);
        assert_int_equal(cause.reason, MS_ABORT_RAISED);
    }
}

/* Rank 1's hook fails; rank 0, which waits for its reduction, hears why. */
static ms_status fails_on_one(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    (void)user, (void)ready;
    if (ms_group_rank(bucket->group) == 1) return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT, "a hook that says no");
    ms_link reduce = { .kind = ms_link_find("reduce"), .options = { .op = MS_REDUCE_OP_AVG } };
    return ms_chain_run(&reduce, 1, bucket, result);
}

static void fail_on_one(rank *self)
{
    float got[4];
    ms_status status = reduce_constant(self, &(ms_reducer_options){ .hook = fails_on_one }, 1, 4, got);
    CHECK(status != MS_OK && says(self, "a hook that says no"));
    if (self->number == 0) CHECK(says(self, "because rank 1"));
}

static void a_hook_that_fails_ends_the_job_for_all(void **state)
{
    (void)state;
    for (int kind = THREADS; kind <= PROCESSES; kind++) {
        rank ranks[2];
        job what = { .kind = (job_kind)kind, .options = { .ranks = 2, .threads = 1, .heap_bytes = 64 << 20, .timeout_ns = 20000000000u }, .run = fail_on_one };
        ms_abort_record cause = run_job(&what, ranks);
        for (int r = 0; r < 2; r++)
            if (*ranks[r].why) fail_msg("%s", ranks[r].why);
        assert_int_equal(cause.error.rank, 1);
    }
}

/* ------------------------------------------------------------------------------------------------------------------- the beginning */

static void compare_models(rank *self)
{
    enum { COUNT = 11 };
    const int changed = *(const int *)self->job->argument;               /* position on rank 1; COUNT: it has one less; above: nothing */
    ms_reducer_parameter parameters[COUNT];
    char names[COUNT][16];
    ms_tensor *all[COUNT];
    for (int i = 0; i < COUNT; i++) {
        bool other = self->number == 1 && i == changed;
        const int64_t shape[] = { 2, other && i % 2 ? 7 : i + 1 };
        OK(ms_tensor_new(self->engine, other && i % 3 == 0 ? MS_BF16 : MS_F32, 2, shape, &all[i]));
        snprintf(names[i], sizeof names[i], other && i % 2 == 0 && i % 3 ? "other" : "p%d", i);
        parameters[i] = (ms_reducer_parameter){ .tensor = all[i], .name = names[i] };
    }
    uint32_t count = self->number == 1 && changed == COUNT ? COUNT - 1 : COUNT;
    ms_status status = ms_ddp_compare(self->world, parameters, count);
    if (changed > COUNT) {
        OK(status);
    } else {
        char expected[64];
        snprintf(expected, sizeof expected, "parameter %d is ", changed == COUNT ? COUNT : changed + 1);
        CHECK(status == MS_ERROR_MISMATCH && says(self, expected) && says(self, "on rank 0, 2") && says(self, "on rank 1"));
    }
    for (int i = 0; i < COUNT; i++) ms_tensor_release(all[i]);
}

static void the_first_parameter_that_differs_is_named(void **state)
{
    (void)state;
    for (int changed = 0; changed < 13; changed++) run_well(THREADS, 3, compare_models, &changed);
}

static void broadcast_values(rank *self)
{
    static const ms_dtype dtypes[] = { MS_F32, MS_I64, MS_F32, MS_BF16, MS_BOOL };
    ms_tensor *all[5];
    for (int i = 0; i < 5; i++) {
        const int64_t n = i == 2 ? 0 : 3 + i;
        uint32_t own = self->number * 5;
        OK(make(self, dtypes[i], n, false, &all[i]));
        OK(fill(all[i], input_value, (uint32_t[]){ own, (uint32_t)i }));
    }
    OK(ms_ddp_broadcast(self->world, all, 5, 1));
    for (int i = 0; i < 5; i++) {
        CHECK(equals(all[i], input_value, (uint32_t[]){ 5, (uint32_t)i }));
        ms_tensor_release(all[i]);
    }
}

static void values_are_those_of_the_root(void **state)
{
    (void)state;
    run_well(THREADS, 3, broadcast_values, NULL);
}

/* -------------------------------------------------------------------------------------------------------------- failing allocations */

static ms_status whole_life(rank *self)
{
    static const ms_link_options bf16 = { .dtype = MS_BF16 }, average = { .op = MS_REDUCE_OP_AVG };
    const ms_link links[] = { { .kind = ms_link_find("cast"), .options = bf16 }, { .kind = ms_link_find("all_reduce"), .options = average } };
    model m;
    ms_reducer *reducer = NULL;
    ms_reducer_parameter parameter = { .name = "a" };
    ms_status status = build(self, &m);
    parameter.tensor = m.weights[0];
    if (!status) status = ms_ddp_compare(self->world, &parameter, 1);
    if (!status) status = ms_ddp_broadcast(self->world, m.weights, WEIGHTS, 0);
    if (!status) status = wrap(self, &m, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2, .links = links, .link_count = 2 }, &reducer);
    for (uint32_t i = 0; i < 3 && !status; i++) {
        status = ms_reducer_forward(reducer, i != 1);
        if (!status) status = ms_reducer_forward_end(reducer);
        if (!status) status = pass(self, &m, 0, i, WEIGHTS, false);
    }
    if (!status) status = ms_reducer_step_end(reducer);
    ms_reducer_free(reducer);
    drop(&m);
    return status;
}

/* Unused and delayed parameters, with old gradients too, and a pass without inputs. */
static ms_status life_of_parts(rank *self, bool static_graph)
{
    model m;
    ms_reducer *reducer = NULL;
    ms_tensor *loss = NULL;
    ms_status status = build(self, &m);
    if (!status) status = wrap(self, &m, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2, .find_unused = !static_graph, .static_graph = static_graph, .delayed = 2 }, &reducer);
    for (uint32_t i = 0; i < 3 && !status; i++) {
        status = ms_reducer_forward(reducer, true);
        if (!status) status = forward(self, &m, 0, i, static_graph || i == 1 ? 3 : 4, &loss);
        if (!status) status = ms_reducer_outputs(reducer, &loss, 1);
        if (!status) status = ms_backward(self->engine, &loss, NULL, 1, false);
        ms_tensor_release(loss);
        loss = NULL;
    }
    if (!status) status = ms_reducer_forward(reducer, true);
    if (!status) status = ms_reducer_shadow(reducer);
    ms_reducer_free(reducer);
    drop(&m);
    return status;
}

static ms_status planned_life(rank *self)
{
    static const uint32_t order[] = { 2, 0, 1, 4, 3 }, sizes[] = { 3, 2 };
    uint32_t seen[WEIGHTS];
    uint64_t ns[WEIGHTS];
    model m;
    ms_reducer *reducer = NULL;
    ms_status status = build(self, &m);
    if (!status) status = wrap(self, &m, (ms_reducer_options){ .planned = true }, &reducer);
    for (uint32_t i = 0; i < 2 && !status; i++) {
        status = ms_reducer_forward(reducer, true);
        if (!status) status = pass(self, &m, 0, i, WEIGHTS, false);
        if (!status && ms_reducer_arrivals(reducer, seen, ns) != WEIGHTS) status = ms_engine_fail(self->engine, MS_ERROR_STATE, "nothing was noted");
        if (!status) status = ms_reducer_assign(reducer, order, sizes, 2);
    }
    ms_reducer_free(reducer);
    drop(&m);
    return status;
}

static ms_status any_life(rank *self, int kind) { return kind == 0 ? whole_life(self) : kind == 3 ? planned_life(self) : life_of_parts(self, kind == 2); }

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    static const struct { int life; bool forever; } ways[] = { { 0, false }, { 0, true }, { 1, false }, { 2, true }, { 3, false } };
    for (size_t way = 0; way < sizeof ways / sizeof *ways; way++)
        for (long n = 1;; n++) {
            fault_os fault;
            fault_os_init(&fault);
            rank self = { .ranks = 2 };
            ms_engine_options options = { .os = &fault.table, .threads = 1, .strict = true, .memory_bytes = 64 << 20 };
            assert_int_equal(ms_engine_new(&options, NULL, &self.engine), MS_OK);
            assert_int_equal(ms_comm_open_fake(self.engine, 0, 2, &self.world), MS_OK);
            long limit = atomic_load(&fault.calls) + n;
            atomic_store(&fault.forever, ways[way].forever);
            atomic_store(&fault.fail_at, limit);
            ms_status status = any_life(&self, ways[way].life);
            bool reached = atomic_load(&fault.calls) >= limit;
            atomic_store(&fault.fail_at, 0);
            if (!reached) assert_int_equal(status, MS_OK);
            ms_engine_sync(self.engine);
            assert_int_equal(ms_engine_memory(self.engine).live, 0);
            assert_int_equal(any_life(&self, ways[way].life), MS_OK);
            ms_engine_free(self.engine);
            assert_int_equal(atomic_load(&fault.live), 0);
            if (!reached) break;
            assert_true(n < 1000);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parameters_are_cut_into_buckets),
        cmocka_unit_test(ranks_give_the_bits_of_one),
        cmocka_unit_test(passes_without_sync_add_up),
        cmocka_unit_test(a_bucket_holds_any_number_of_parameters),
        cmocka_unit_test(native_links_do_what_they_say),
        cmocka_unit_test(a_hook_may_return_what_it_made_elsewhere),
        cmocka_unit_test(whoever_steps_early_is_told_of_each_bucket),
        cmocka_unit_test(buckets_may_be_given),
        cmocka_unit_test(who_gets_no_gradient_takes_part_with_zeros),
        cmocka_unit_test(nobody_waits_for_the_device_to_learn_who_is_used),
        cmocka_unit_test(mistakes_are_named_and_end_the_job),
        cmocka_unit_test(a_hook_that_fails_ends_the_job_for_all),
        cmocka_unit_test(the_first_parameter_that_differs_is_named),
        cmocka_unit_test(values_are_those_of_the_root),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
