/* fsdp_pass.c: passes of sharded models as a whole: who hears of reduced gradients, what waits for
 * steps in backward, which reduction is the first and the last, and what is counted.
 * ctest: cuda */
#include "fsdp_support.h"

#include <math.h>

#include "hook/link_ops.h"
#include "moonshard/cpu_task.h"

static void finish(net *n)
{
    ms_fsdp_free(n->fsdp);
    drop(n);
    ms_engine_free(n->engine);
    chain_length = 0;
    chain_hook = NULL;
}

/* ------------------------------------------------------------ on_reduced */

typedef struct calls {
    net *n;
    uint32_t count, buckets[8];
    bool consume;
    _Atomic int *gate; /* NULL: no step is taken */
    ms_point step;     /* of the last one */
} calls;

/* The task of an optimizer's step. It returns only when the gate is open, so that tasks which wait
 * for the step do not run before. */
static ms_task_result wait_for_gate(ms_run *run, void *arguments)
{
    (void)run;
    return atomic_load(*(_Atomic int **)arguments) ? MS_TASK_DONE : MS_TASK_PENDING;
}

static const ms_task gate_task = { .name = "gate",
                                   .function = wait_for_gate,
                                   .args_bytes = sizeof(_Atomic int *) };

/* The pieces of unit 1 become 0.125, on the optimizer's stream. */
static ms_status step_behind_gate(calls *c)
{
    net *n = c->n;
    ms_stream *stream = NULL;
    ms_status status = ms_engine_stream(n->engine, "optimizer", &stream);
    if (!status)
        status =
            ms_stream_enqueue(stream, &gate_task, &c->gate, NULL, 0, (ms_task_cost){ 0 }, NULL);
    if (!status) status = ms_stream_wait_users(stream, n->parameters[W1]);
    if (status) return status;
    ms_stream *before = ms_engine_set_current(n->engine, stream);
    bool recording = ms_engine_set_recording(n->engine, false);
    ms_attributes value = { .scalar = { .value = 0.125 } };
    for (int i = W1; i <= B1 && !status; i++) {
        ms_tensor *same = NULL;
        status = ms_op_apply(n->engine, &ms_op_fill, &value, true, &n->parameters[i], 1, &same, 1);
        ms_tensor_release(same);
    }
    c->step = ms_stream_last(stream);
    ms_engine_set_recording(n->engine, recording);
    ms_engine_set_current(n->engine, before);
    return status;
}

static ms_status on_reduced(void *user, uint32_t bucket)
{
    calls *c = user;
    c->buckets[c->count++] = bucket;
    if (bucket == MS_REDUCED_ALL) return MS_OK;
    const ms_bucket *of = ms_gradient_source_bucket(ms_fsdp_source(c->n->fsdp), bucket);
    for (uint32_t i = 0; i < of->count; i++) {
        assert_non_null(ms_tensor_grad(of->parameters[i]));
        if (c->consume) OK(ms_tensor_set_grad(of->parameters[i], NULL));
    }
    return c->gate && of->count == 2 ? step_behind_gate(c) : MS_OK;
}

/* Buckets are numbered in the order in which backward is expected to come to their units. Here the
 * root's gradients are complete first. */
static void each_bucket_is_reported_once_its_reduction_is_enqueued(void **state)
{
    (void)state;
    net n;
    OK(build(NULL, 2, true, &n));
    calls c = { .n = &n, .consume = true };
    ms_gradient_source_set_on_reduced(ms_fsdp_source(n.fsdp), on_reduced, &c, NULL);
    assert_int_equal(ms_gradient_source_buckets(ms_fsdp_source(n.fsdp)), 2);
    assert_null(ms_gradient_source_bucket(ms_fsdp_source(n.fsdp), 2));
    assert_int_equal(ms_gradient_source_bucket(ms_fsdp_source(n.fsdp), 1)->parameters[0]
                         == n.parameters[W2],
                     true);
    for (uint32_t i = 0; i < 2; i++) {
        OK(pass(&n));
        assert_int_equal(c.count, 3);
        assert_int_equal(c.buckets[0], 1);
        assert_int_equal(c.buckets[1], 0);
        assert_int_equal(c.buckets[2], MS_REDUCED_ALL);
        assert_null(ms_tensor_grad(n.parameters[W1]));
        c.count = 0;
    }
    ms_fsdp_set_sync(n.fsdp, false);
    OK(pass(&n));
    assert_int_equal(c.count, 0); /* nothing was reduced */
    ms_fsdp_set_sync(n.fsdp, true);
    c.consume = false;
    OK(pass(&n));
    check_gradient(&n, W1, 3); /* of two passes: what was consumed is gone */
    assert_int_equal(ms_gradient_source_passes(ms_fsdp_source(n.fsdp)), 3);
    finish(&n);
}

/* The model's stream goes on while the step has not run; the unit's next gather waits for it. */
static void only_the_next_gather_waits_for_a_step(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    net n;
    ms_point ready[2];
    _Atomic int open = 0;
    OK(build(NULL, 2, true, &n));
    calls c = { .n = &n, .consume = true, .gate = &open };
    ms_gradient_source_set_on_reduced(ms_fsdp_source(n.fsdp), on_reduced, &c, NULL);
    OK(pass(&n));
    OK(ms_point_sync(n.engine, ms_stream_last(ms_engine_current(n.engine))));
    ms_gradient_source_ready(ms_fsdp_source(n.fsdp), 0, ready);
    assert_true(ms_point_reached(n.engine, ready[0]));
    assert_false(ms_point_reached(n.engine, c.step));
    /* The root was not stepped: its gather does not wait. */
    OK(ms_fsdp_unshard(n.fsdp, 0, ready));
    OK(ms_point_sync(n.engine, ready[0]));
    assert_false(ms_point_reached(n.engine, c.step));
    OK(ms_fsdp_unshard(n.fsdp, 1, ready));
    assert_false(ms_point_reached(n.engine, ready[0]));
    atomic_store(&open, 1);
    OK(ms_point_sync(n.engine, ready[0]));
    assert_true(ms_point_reached(n.engine, c.step));
    c.gate = NULL;
    c.consume = false;
    OK(pass(&n));
    check_gradient(&n, W2, 2 * (4 * 0.125f + 0.125f));
    finish(&n);
}

/* ----------------------------------------------------------- order of launches */

static struct {
    uint32_t count, index[8], place[8];
    bool last[8];
} seen;

static ms_status look(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready)
{
    ms_link reduce = { .kind = ms_link_find("reduce"), .options = { .op = MS_REDUCE_OP_AVG } };
    (void)user;
    *ready = (ms_point){ 0 };
    seen.index[seen.count] = bucket->index;
    seen.place[seen.count] = bucket->place;
    seen.last[seen.count++] = bucket->is_last;
    return ms_chain_run(&reduce, 1, bucket, result);
}

/* sum(x w2): unit 1 stays unused. */
static ms_status pass_of_root(net *n)
{
    ms_tensor *y = NULL, *loss = NULL;
    ms_status status = ms_fsdp_before_forward(n->fsdp, 0, &n->x, 1);
    if (!status) status = apply(n->engine, &ms_op_matmul, n->x, n->parameters[W2], &y);
    if (!status) status = ms_fsdp_after_forward(n->fsdp, 0, &y, 1);
    if (!status) status = total(n->engine, y, &loss);
    if (!status) status = ms_backward(n->engine, &loss, NULL, 1, false);
    ms_tensor_release(y);
    ms_tensor_release(loss);
    return status;
}

static void the_last_reduction_is_known_to_links(void **state)
{
    (void)state;
    net n;
    chain_hook = look;
    seen.count = 0;
    OK(build(NULL, 2, true, &n));
    OK(pass(&n));
    OK(pass_of_root(&n));
    OK(pass(&n));
    static const uint32_t index[] = { 0, 1, 0, 0, 1 }, place[] = { 1, 0, 1, 1, 0 };
    static const bool last[] = { false, true, true, false, true };
    assert_int_equal(seen.count, 5);
    for (uint32_t i = 0; i < 5; i++) {
        assert_int_equal(seen.index[i], index[i]);
        assert_int_equal(seen.place[i], place[i]);
        assert_int_equal(seen.last[i], last[i]);
    }
    finish(&n);
}

static void use_clip(ms_clip_scope scope)
{
    memset(chain, 0, sizeof chain);
    chain[0].kind = ms_link_find("clip");
    chain[0].options.clip.max_norm = 1;
    chain[0].options.clip.scope = scope;
    chain[1].kind = ms_link_find("reduce");
    chain[1].options.op = MS_REDUCE_OP_AVG;
    chain_length = 2;
}

/* The norm of all is known with the last reduction only, when the others' memory is given back. */
static void all_gradients_are_clipped_by_one_norm(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 2; ranks++) {
        net n;
        float value[20];
        ms_tensor *gradient;
        use_clip(MS_CLIP_GLOBAL);
        OK(build(NULL, ranks, true, &n));
        OK(pass(&n));
        /* 20 numbers of 1.5 and 12 of 5, over all ranks: a fake world has equal shards. */
        double norm = sqrt(20 * 1.5 * 1.5 + 12 * 5.0 * 5.0);
        gradient = ms_tensor_grad(n.parameters[W2]);
        OK(ms_tensor_read(gradient, value, ms_tensor_bytes(gradient)));
        assert_float_equal(value[0], 5 / norm, 1e-6);
        assert_float_equal(value[5], 5 / norm, 1e-6);
        gradient = ms_tensor_grad(n.parameters[W1]);
        OK(ms_tensor_read(gradient, value, ms_tensor_bytes(gradient)));
        assert_float_equal(value[0], 1.5 / norm, 1e-6);
        finish(&n);
    }
}

/* What earlier passes have left as shards is not in the bucket, and its norm is not known. */
static void gradients_of_one_pass_of_several_are_not_clipped(void **state)
{
    (void)state;
    for (uint32_t scope = MS_CLIP_GLOBAL; scope <= MS_CLIP_LAGGED; scope++) {
        net n;
        use_clip((ms_clip_scope)scope);
        OK(build(NULL, 2, true, &n));
        OK(pass(&n));
        assert_int_equal(pass(&n), MS_ERROR_STATE);
        assert_non_null(strstr(ms_engine_error(n.engine)->message, "gradients of earlier passes"));
        assert_non_null(strstr(ms_gradient_source_error(ms_fsdp_source(n.fsdp)),
                               "gradients of earlier passes"));
        finish(&n);
    }
}

/* ---------------------------------------------------------------- statistics */

static void statistics_are_of_each_pass(void **state)
{
    (void)state;
    net n;
    ms_bucket_times times;
    OK(build(NULL, 2, true, &n));
    assert_int_equal(ms_gradient_source_stats(ms_fsdp_source(n.fsdp)).iterations, 0);
    assert_false(ms_gradient_source_bucket_times(ms_fsdp_source(n.fsdp), 0, &times));
    for (uint32_t i = 1; i <= 3; i++) {
        OK(pass(&n));
        OK(step(&n));
        OK(ms_gradient_source_step_end(ms_fsdp_source(n.fsdp)));
        OK(ms_engine_sync(n.engine));
        ms_pass_stats stats = ms_gradient_source_stats(ms_fsdp_source(n.fsdp));
        ms_gather_stats gathers = ms_fsdp_gather_stats(n.fsdp);
        assert_true(stats.iterations == i && stats.timed == i && stats.calls == 2);
        /* 12 and 20 numbers. */
        assert_int_equal(stats.payload_bytes, 32 * sizeof(float));
        assert_true(stats.forward_ns > 0 && stats.backward_ns > 0 && stats.reduce_ns > 0);
        assert_true(stats.step_ns > 0);
        assert_true(gathers.gather_ns > 0);
        assert_true(gathers.prefetch.hits == 1 && gathers.prefetch.misses == 0);
        assert_int_equal(gathers.prefetch.wasted_bytes, 0);
        assert_true(ms_gradient_source_bucket_times(ms_fsdp_source(n.fsdp), 0, &times)
                    && times.reduce_ns > 0);
    }
    /* A bucket that a pass leaves out keeps its times; calls are those of the pass. */
    OK(pass_of_root(&n));
    OK(ms_gradient_source_step_end(ms_fsdp_source(n.fsdp)));
    OK(ms_engine_sync(n.engine));
    assert_int_equal(ms_gradient_source_stats(ms_fsdp_source(n.fsdp)).calls, 1);
    assert_true(ms_gradient_source_bucket_times(ms_fsdp_source(n.fsdp), 0, &times)
                && times.reduce_ns > 0);
    finish(&n);
}

/* A pass with more gathers than the passes before is not timed in full; later ones are. */
static void room_for_gathers_grows(void **state)
{
    (void)state;
    net n;
    OK(build(NULL, 2, true, &n));
    uint32_t before = n.fsdp->gather_times.sets[0].capacity;
    for (int i = 0; i < 4; i++) {
        bool recording = ms_engine_set_recording(n.engine, true);
        OK(ms_fsdp_before_forward(n.fsdp, 0, &n.x, 1));
        for (int k = 0; k < 10; k++) {
            OK(ms_fsdp_before_forward(n.fsdp, 1, &n.x, 1));
            OK(ms_fsdp_after_forward(n.fsdp, 1, NULL, 0));
        }
        OK(ms_fsdp_after_forward(n.fsdp, 0, NULL, 0));
        ms_engine_set_recording(n.engine, recording);
        OK(step(&n));
        OK(ms_engine_sync(n.engine));
        ms_fsdp_reset(n.fsdp);
    }
    assert_true(n.fsdp->gather_times.sets[0].capacity > before);
    OK(pass(&n));
    OK(ms_engine_sync(n.engine));
    assert_true(ms_fsdp_gather_stats(n.fsdp).gather_ns > 0);
    finish(&n);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_bucket_is_reported_once_its_reduction_is_enqueued),
        cmocka_unit_test(only_the_next_gather_waits_for_a_step),
        cmocka_unit_test(the_last_reduction_is_known_to_links),
        cmocka_unit_test(all_gradients_are_clipped_by_one_norm),
        cmocka_unit_test(gradients_of_one_pass_of_several_are_not_clipped),
        cmocka_unit_test(statistics_are_of_each_pass),
        cmocka_unit_test(room_for_gathers_grows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
