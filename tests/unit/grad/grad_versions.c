/* grad_versions.c: a write to a saved tensor, before or during a backward, is an error; and writes
 * that wait until backward has read the tensor. ctest: late cuda */
#include "grad_support.h"

#include "ops/autocast.h"

/* A write of `target`, times `by`, that the tape does not record. */
typedef struct write {
    ms_engine *engine;
    ms_tensor *target, *by;
    int made, freed;
    char *log, name;
} write_of;

static ms_status do_write(void *user)
{
    write_of *w = user;
    bool recording = ms_engine_set_recording(w->engine, false);
    ms_status status = multiply_in_place(w->engine, w->target, w->by);
    ms_engine_set_recording(w->engine, recording);
    w->made++;
    if (w->log) strncat(w->log, &w->name, 1);
    return status;
}

static void write_freed(void *user) { ((write_of *)user)->freed++; }

static ms_status write_on_gradient(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)gradient;
    (void)replacement;
    return do_write(user);
}

static ms_status write_when_ready(void *user, ms_tensor *leaf)
{
    (void)leaf;
    return do_write(user);
}

static ms_status write_when_unread(void *user, ms_tensor *leaf)
{
    write_of *w = user;
    assert_true(ms_tensor_is_awaited(leaf));
    return ms_backward_when_unread(w->engine, &leaf, 1, do_write, w, write_freed);
}

static void assert_written(ms_engine *engine, const char *node)
{
    const char *message = ms_engine_error(engine)->message;
    assert_non_null(strstr(message, node));
    assert_non_null(strstr(message, "[2] f32 that was written in place since, by mul (at "));
}

static ms_status times_detached(void *user, ms_tensor *const *inputs, uint32_t count,
                                ms_tensor **outputs, uint32_t *made)
{
    (void)count;
    ms_tensor *detached = NULL;
    *made = 1;
    ms_status status = ms_tensor_alias(user, &detached);
    if (!status)
        status = apply(ms_tensor_engine(inputs[0]), &ms_op_mul, inputs[0], detached, outputs);
    ms_tensor_release(detached);
    return status;
}

/* (x * detached w) * w: backward runs the second product first, and w's gradient is complete before
 * the first product reads w for x's gradient. */
typedef struct twice {
    ms_engine *engine;
    ms_tensor *x, *w, *hundred, *y, *z, *loss;
} twice;

static twice make_twice(bool recomputed)
{
    twice t = { .engine = make_engine(NULL) };
    ms_tensor *detached = NULL;
    uint32_t made = 0;
    OK(vector(t.engine, 3, -2, true, &t.x));
    OK(vector(t.engine, 10, 20, true, &t.w));
    OK(vector(t.engine, 100, 100, false, &t.hundred));
    OK(ms_tensor_alias(t.w, &detached));
    if (recomputed)
        OK(ms_recompute(t.engine, times_detached, t.w, NULL, NULL, &t.x, 1, &t.y, &made));
    else OK(apply(t.engine, &ms_op_mul, t.x, detached, &t.y));
    OK(apply(t.engine, &ms_op_mul, t.y, t.w, &t.z));
    OK(total(t.engine, t.z, &t.loss));
    ms_tensor_release(detached);
    return t;
}

static void drop_twice(twice *t)
{
    ms_tensor *all[] = { t->x, t->w, t->hundred, t->y, t->z, t->loss };
    for (int i = 0; i < 6; i++) ms_tensor_release(all[i]);
    assert_int_equal(ms_engine_memory(t->engine).live, 0);
    ms_engine_free(t->engine);
}

static void a_write_while_backward_runs_is_noticed_by_the_node_that_reads(void **state)
{
    (void)state;
    for (int recomputed = 0; recomputed < 2; recomputed++) {
        twice t = make_twice(recomputed);
        write_of w = { .engine = t.engine, .target = t.w, .by = t.hundred };
        uint64_t id = 0;
        OK(ms_tensor_on_accumulated(t.w, write_when_ready, &w, NULL, &id));
        assert_int_equal(ms_backward(t.engine, &t.loss, NULL, 1, false), MS_ERROR_STATE);
        assert_written(t.engine, recomputed ? "recompute (at " : "mul (at ");
        assert_null(ms_tensor_grad(t.x));
        assert_false(ms_tensor_is_awaited(t.w));
        drop_twice(&t);
    }
}

static void a_gradient_hook_that_writes_what_its_node_saved_is_an_error(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *y = NULL, *two = NULL, *z = NULL, *loss = NULL;
    uint64_t id = 0;
    OK(vector(engine, 1, 2, true, &x));
    OK(vector(engine, 2, 2, false, &two));
    OK(apply(engine, &ms_op_exp, x, NULL, &y)); /* saves its result */
    OK(apply(engine, &ms_op_mul, y, two, &z));
    OK(total(engine, z, &loss));
    write_of w = { .engine = engine, .target = y, .by = two };
    OK(ms_tensor_on_gradient(y, write_on_gradient, &w, NULL, &id));
    assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    assert_written(engine, "exp (at ");
    ms_tensor *all[] = { x, y, two, z, loss };
    for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

/* A buffer that counts the function's runs. */
static ms_status counts_its_runs(void *user, ms_tensor *const *inputs, uint32_t count,
                                 ms_tensor **outputs, uint32_t *made)
{
    (void)count;
    ms_tensor *const *held = user; /* the buffer, and what it is multiplied with */
    ms_engine *engine = ms_tensor_engine(inputs[0]);
    *made = 1;
    ms_status status = multiply_in_place(engine, held[0], held[1]);
    return status ? status : apply(engine, &ms_op_mul, inputs[0], inputs[0], outputs);
}

static void a_recomputed_function_may_write_its_buffers(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *held[2] = { NULL }, *y = NULL, *loss = NULL;
    uint32_t made = 0;
    OK(vector(engine, 3, -2, true, &x));
    OK(vector(engine, 1, 1, false, &held[0]));
    OK(vector(engine, 2, 2, false, &held[1]));
    OK(ms_recompute(engine, counts_its_runs, held, NULL, NULL, &x, 1, &y, &made));
    OK(total(engine, y, &loss));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    assert_gradient(x, 6, -4);
    assert_values(held[0], 4, 4);
    ms_tensor *all[] = { x, held[0], held[1], y, loss };
    for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

/* ------------------------------------------------ parameters of one storage */

enum { LEAVES = 100 }; /* more than a storage has hazard cells */

static ms_engine *make_flat(ms_tensor **leaves, ms_tensor **flat)
{
    ms_engine *engine = make_engine(NULL);
    for (int i = 0; i < LEAVES; i++) OK(vector(engine, (float)i, 1, true, &leaves[i]));
    OK(ms_flatten(engine, leaves, LEAVES, flat));
    return engine;
}

static void drop_flat(ms_engine *engine, ms_tensor **leaves, ms_tensor *flat)
{
    for (int i = 0; i < LEAVES; i++) ms_tensor_release(leaves[i]);
    ms_tensor_release(flat);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

static void a_write_of_one_parameter_does_not_touch_its_neighbours(void **state)
{
    (void)state;
    ms_tensor *leaves[LEAVES] = { NULL }, *flat = NULL, *cast = NULL, *again = NULL;
    ms_engine *engine = make_flat(leaves, &flat);
    OK(ms_tensor_cast_cached(engine, leaves[41], MS_BF16, true, &cast));
    for (int written = 40; written <= 42; written++) {
        ms_tensor *square = NULL, *loss = NULL;
        OK(apply(engine, &ms_op_mul, leaves[41], leaves[41], &square));
        OK(total(engine, square, &loss));
        write_of w = { .engine = engine, .target = leaves[written], .by = leaves[0] };
        OK(do_write(&w));
        assert_int_equal(ms_backward(engine, &loss, NULL, 1, false),
                         written == 41 ? MS_ERROR_STATE : MS_OK);
        OK(ms_tensor_cast_cached(engine, leaves[41], MS_BF16, true, &again));
        /* The write of 41 made the cast stale: it is cast again. */
        assert_true((again == cast) == (written == 40));
        ms_tensor_release(again);
        ms_tensor_release(square);
        ms_tensor_release(loss);
    }
    ms_tensor_release(cast);
    /* The whole is written with each part of it. */
    ms_tensor *product = NULL, *loss = NULL;
    OK(ms_tensor_set_requires_grad(flat, true));
    OK(apply(engine, &ms_op_mul, flat, flat, &product));
    OK(total(engine, product, &loss));
    write_of w = { .engine = engine, .target = leaves[LEAVES - 1], .by = leaves[0] };
    OK(do_write(&w));
    assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    ms_tensor_release(product);
    ms_tensor_release(loss);
    drop_flat(engine, leaves, flat);
}

/* Recorded writes of one piece leave histories of the others as they are. */
static void a_recorded_write_of_one_piece_leaves_the_others_usable(void **state)
{
    (void)state;
    ms_tensor *leaves[LEAVES] = { NULL }, *flat = NULL, *w = NULL, *before[2], *loss = NULL;
    ms_engine *engine = make_flat(leaves, &flat);
    OK(vector(engine, 3, 4, true, &w));
    for (int i = 0; i < 2; i++) OK(ms_tensor_set_requires_grad(leaves[70 + i], false));
    for (int i = 0; i < 2; i++) OK(ms_tensor_alias(leaves[70 + i], &before[i]));
    OK(multiply_in_place(engine, leaves[70], w));
    assert_int_equal(total(engine, before[0], &loss), MS_ERROR_STATE);
    OK(total(engine, before[1], &loss));
    ms_tensor_release(loss);
    OK(total(engine, leaves[70], &loss));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    assert_gradient(w, 70, 1);
    ms_tensor *all[] = { w, before[0], before[1], loss };
    for (int i = 0; i < 4; i++) ms_tensor_release(all[i]);
    drop_flat(engine, leaves, flat);
}

/* --------------------------------------------------------- writes that wait */

static void a_write_waits_for_the_last_node_that_reads(void **state)
{
    (void)state;
    for (int recomputed = 0; recomputed < 2; recomputed++) {
        twice t = make_twice(recomputed);
        char log[4] = "";
        write_of first = { .engine = t.engine,
                           .target = t.w,
                           .by = t.hundred,
                           .log = log,
                           .name = '1' },
                 second = first;
        uint64_t id = 0;
        second.name = '2';
        OK(ms_tensor_on_accumulated(t.w, write_when_unread, &first, NULL, &id));
        OK(ms_tensor_on_accumulated(t.w, write_when_unread, &second, NULL, &id));
        OK(ms_backward(t.engine, &t.loss, NULL, 1, false));
        assert_gradient(t.x, 100, 400); /* w^2 as it was */
        assert_gradient(t.w, 30, -40);
        assert_values(t.w, 100000, 200000);
        assert_string_equal(log, "12");
        assert_true(first.freed == 1 && second.freed == 1);
        assert_false(ms_tensor_is_awaited(t.w));
        drop_twice(&t);
    }
}

static ms_status refuse_gradient(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)gradient;
    (void)replacement;
    return ms_engine_fail(user, MS_ERROR_STATE, "not this gradient");
}

static void a_write_that_waits_is_dropped_when_backward_fails(void **state)
{
    (void)state;
    twice t = make_twice(false);
    write_of w = { .engine = t.engine, .target = t.w, .by = t.hundred };
    uint64_t id = 0;
    OK(ms_tensor_on_accumulated(t.w, write_when_unread, &w, NULL, &id));
    OK(ms_tensor_on_gradient(t.y, refuse_gradient, t.engine, NULL, &id));
    assert_int_equal(ms_backward(t.engine, &t.loss, NULL, 1, false), MS_ERROR_STATE);
    assert_true(w.made == 0 && w.freed == 1);
    assert_values(t.w, 10, 20);
    assert_false(ms_tensor_is_awaited(t.w));
    drop_twice(&t);
}

static void a_write_that_nothing_waits_for_is_made_at_once(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL;
    OK(vector(engine, 3, -2, true, &x));
    write_of w = { .engine = engine, .target = x, .by = x };
    assert_false(ms_tensor_is_awaited(x));
    OK(ms_backward_when_unread(engine, &x, 1, do_write, &w, write_freed));
    assert_true(w.made == 1 && w.freed == 1);
    assert_values(x, 9, 4);
    ms_tensor_release(x);
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_write_while_backward_runs_is_noticed_by_the_node_that_reads),
        cmocka_unit_test(a_gradient_hook_that_writes_what_its_node_saved_is_an_error),
        cmocka_unit_test(a_recomputed_function_may_write_its_buffers),
        cmocka_unit_test(a_write_of_one_parameter_does_not_touch_its_neighbours),
        cmocka_unit_test(a_recorded_write_of_one_piece_leaves_the_others_usable),
        cmocka_unit_test(a_write_waits_for_the_last_node_that_reads),
        cmocka_unit_test(a_write_that_waits_is_dropped_when_backward_fails),
        cmocka_unit_test(a_write_that_nothing_waits_for_is_made_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
