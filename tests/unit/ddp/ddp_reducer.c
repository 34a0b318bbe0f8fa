/* ddp_reducer.c: order of launches, and bits of N ranks against one.
 * ctest: each-isa poisoned cuda-ranks cuda-local */
#include "ddp_support.h"

/* ----------------------------------------------------------- bits and order */

static void train_some(rank *self)
{
    model m, reference;
    ms_reducer *reducer = NULL;
    OK(build(self, &m));
    OK(build(self, &reference));
    OK(wrap(self, &m, (ms_reducer_options){ .cap_bytes = small_caps, .cap_count = 2 }, &reducer));
    CHECK(ms_gradient_source_buckets(ms_reducer_source(reducer)) == 1);
    for (uint32_t iteration = 0; iteration < 4; iteration++) {
        ms_comm_record(self->engine, true);
        OK(ms_reducer_forward(reducer, true));
        size_t before = ms_comm_record_count(self->engine);
        CHECK(before == (iteration == 1 ? 2u : 0u)); /* the rebuild's two broadcasts, once */
        OK(ms_reducer_forward_end(reducer));
        OK(pass(self, &m, self->number, iteration, WEIGHTS, false));
        CHECK(ms_gradient_source_buckets(ms_reducer_source(reducer)) == (iteration == 0 ? 1u : 3u));
        /* One collective for each bucket and iteration. */
        CHECK(ms_comm_record_count(self->engine) - before
              == ms_gradient_source_buckets(ms_reducer_source(reducer)));
        for (uint32_t b = 0; b < ms_gradient_source_buckets(ms_reducer_source(reducer)); b++)
            CHECK(ms_comm_record_get(self->engine, before + b)->bucket == (int32_t)b);
        CHECK(reduced(self, &m, &reference, iteration, iteration));
        OK(ms_gradient_source_step_end(ms_reducer_source(reducer)));
        OK(ms_engine_sync(self->engine));
        ms_pass_stats stats = ms_gradient_source_stats(ms_reducer_source(reducer));
        CHECK(stats.iterations == iteration + 1 && stats.timed == iteration + 1
              && stats.calls == ms_gradient_source_buckets(ms_reducer_source(reducer)));
        CHECK(stats.payload_bytes == 7528
              && llabs((long long)stats.wire_bytes
                       - (long long)(2 * 7528u * (self->ranks - 1) / self->ranks))
                     < 8);
        CHECK(stats.backward_ns > 0 && stats.reduce_ns > 0 && stats.backward_ns < 1800000000000u
              && stats.exposed_ns < 1800000000000u && stats.forward_ns < 1800000000000u
              && stats.step_ns > 0 && stats.step_ns < 1800000000000u);
        OK(clear(&m));
    }
    CHECK(ms_gradient_source_is_rebuilt(ms_reducer_source(reducer)));
    /* e (620 bytes) and d (1116) and c (1440): 2000 bytes are reached */
    const ms_bucket *first = ms_gradient_source_bucket(ms_reducer_source(reducer), 0);
    CHECK(first->count == 3 && first->parameters[0] == m.weights[4]
          && first->parameters[2] == m.weights[2] && !first->is_last);
    CHECK(ms_tensor_storage(first->gradients[0]) == ms_tensor_storage(first->flat));
    CHECK(ms_gradient_source_bucket(ms_reducer_source(reducer), 2)->is_last
          && ms_gradient_source_passes(ms_reducer_source(reducer)) == 4);
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
    /* They outlive the buckets. */
    for (int w = 0; w < WEIGHTS; w++) CHECK(ms_tensor_grad(m.weights[w]));
    OK(wrap(self, &m, (ms_reducer_options){ 0 }, &reducer)); /* and may be wrapped again */
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
    OK(ms_reducer_new(self->engine, &(ms_reducer_options){ .group = self->world }, parameters,
                      COUNT, &reducer));
    for (int iteration = 0; iteration < 2; iteration++) {
        ms_tensor *loss = NULL;
        OK(ms_reducer_forward(reducer, true));
        for (int i = 0; i < COUNT; i++) {
            ms_tensor *sum = NULL, *scaled = NULL, *more = NULL;
            ms_attributes whole = { .reduce = { .all = true } },
                          factor = { .scalar = { .value = (i + 1) * (self->number + 1.0) } };
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
            for (int64_t j = 0; j < ms_tensor_count(all[i]); j++)
                CHECK(got[j] == (float)(i + 1) * 1.5f);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_give_the_bits_of_one),
        cmocka_unit_test(passes_without_sync_add_up),
        cmocka_unit_test(a_bucket_holds_any_number_of_parameters),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
