/* grad.c: the tape: order and sums of gradients, hooks, freed and changed graphs, depth,
 * recomputation, and every failed allocation. ctest: late cuda */
#include "grad_support.h"
#include "ranges.h"

/* ----------------------------------------------------------- sums and order */

static void gradients_add_up_over_uses_and_passes(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *square = NULL, *both = NULL, *loss = NULL;
    OK(vector(engine, 3, -2, true, &x));
    for (int pass = 1; pass <= 2; pass++) {
        OK(apply(engine, &ms_op_mul, x, x, &square));
        OK(apply(engine, &ms_op_add, square, x, &both));
        OK(total(engine, both, &loss));
        OK(ms_backward(engine, &loss, NULL, 1, false));
        assert_gradient(x, 7.0f * (float)pass, -3.0f * (float)pass); /* d(x^2 + x) = 2x + 1 */
        ms_tensor_release(square);
        ms_tensor_release(both);
        ms_tensor_release(loss);
    }
    ms_tensor_release(x);
    ms_engine_free(engine);
}

static void a_gradient_lies_in_its_home_and_adds_up_there(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *home = NULL, *short_one = NULL, *square = NULL, *loss = NULL;
    const int64_t one[] = { 1 };
    OK(vector(engine, 3, -2, true, &x));
    OK(vector(engine, 100, 100, false, &home)); /* its old contents do not count */
    OK(ms_tensor_new(engine, MS_F32, 1, one, &short_one));
    assert_int_equal(ms_tensor_set_grad_home(x, short_one), MS_ERROR_ARGUMENT);
    OK(ms_tensor_set_grad_home(x, home));
    assert_null(ms_tensor_grad(x));
    for (int pass = 0; pass < 4; pass++) {
        OK(apply(engine, &ms_op_mul, x, x, &square));
        OK(total(engine, square, &loss));
        OK(ms_backward(engine, &loss, NULL, 1, false));
        assert_ptr_equal(ms_tensor_grad(x), home);
        float times = pass % 2 ? 2.0f : 1.0f;
        assert_gradient(x, 6 * times, -4 * times);
        if (pass % 2) OK(ms_tensor_set_grad(x, NULL)); /* the home stays */
        ms_tensor_release(square);
        ms_tensor_release(loss);
    }
    OK(ms_tensor_set_grad_home(x, NULL));
    ms_tensor_release(home);
    ms_tensor_release(short_one);
    ms_tensor_release(x);
    ms_engine_free(engine);
}

static void a_graph_may_be_deep_and_dies_without_recursion(void **state)
{
    (void)state;
    const int depth = ranges_are_short() ? 50000 : 200000;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *now = NULL, *loss = NULL;
    OK(vector(engine, 1, 2, true, &x));
    for (int round = 0; round < 2; round++) { /* once through backward, once dropped as it is */
        now = ms_tensor_retain(x);
        for (int i = 0; i < depth; i++) {
            ms_tensor *next = NULL;
            OK(apply(engine, &ms_op_neg, now, NULL, &next));
            ms_tensor_release(now);
            now = next;
        }
        OK(total(engine, now, &loss));
        if (round == 0) {
            OK(ms_backward(engine, &loss, NULL, 1, false));
            assert_gradient(x, 1, 1); /* an even number of signs */
        }
        ms_tensor_release(now);
        ms_tensor_release(loss);
    }
    ms_tensor_release(x);
    ms_engine_free(engine);
}

/* -------------------------------------------------------------------- hooks */

typedef struct trail {
    char text[64];
    int frees;
} trail;

static ms_status double_it(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    trail *t = user;
    strcat(t->text, "g");
    ms_attributes attributes = { .scalar = { .value = 2 } };
    return ms_op_apply(ms_tensor_engine(gradient), &ms_op_mul_scalar, &attributes, false, &gradient,
                       1, replacement, 1);
}

static ms_status note(void *user, ms_tensor *leaf)
{
    trail *t = user;
    assert_non_null(ms_tensor_grad(leaf));
    strcat(t->text, "a");
    return MS_OK;
}

static ms_status refuse(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)user;
    (void)replacement;
    return ms_engine_fail(ms_tensor_engine(gradient), MS_ERROR_SCRIPT, "the hook says no");
}

static void count_free(void *user) { ((trail *)user)->frees++; }

static void hooks_see_whole_gradients_and_may_replace_them(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    trail t = { .text = "" };
    uint64_t on_middle = 0, on_leaf = 0, ready = 0, gone = 0;
    ms_tensor *x = NULL, *middle = NULL, *used = NULL, *loss = NULL;
    OK(vector(engine, 3, -2, true, &x));
    assert_int_equal(ms_tensor_on_gradient(x, double_it, &t, count_free, &on_leaf), MS_OK);
    OK(ms_tensor_on_gradient(x, double_it, &t, count_free, &gone));
    ms_tensor_remove_hook(x, gone);
    assert_int_equal(t.frees, 1);
    OK(ms_tensor_on_accumulated(x, note, &t, count_free, &ready));
    OK(apply(engine, &ms_op_neg, x, NULL, &middle));
    OK(ms_tensor_on_gradient(middle, double_it, &t, count_free, &on_middle));
    OK(apply(engine, &ms_op_mul, middle, middle, &used));
    OK(total(engine, used, &loss));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    /* The middle once, with both its uses summed; the leaf; then its sum is ready. */
    assert_string_equal(t.text, "gga");
    assert_gradient(x, 24, -16);  /* 2x times two for each hook */
    assert_int_equal(t.frees, 2); /* the middle's hook went with its graph */
    ms_tensor_release(middle);
    ms_tensor_release(used);
    ms_tensor_release(loss);
    ms_tensor_release(x);
    assert_int_equal(t.frees, 4);
    ms_engine_free(engine);
}

static void an_error_of_a_hook_ends_backward(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    uint64_t id = 0;
    ms_tensor *x = NULL, *loss = NULL;
    OK(vector(engine, 3, -2, true, &x));
    OK(ms_tensor_on_gradient(x, refuse, NULL, NULL, &id));
    OK(total(engine, x, &loss));
    assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_SCRIPT);
    assert_string_equal(ms_engine_error(engine)->message, "the hook says no");
    assert_null(ms_tensor_grad(x));
    assert_true(ms_engine_is_recording(engine));
    ms_tensor_release(loss);
    ms_tensor_release(x);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------- misuse */

static void misuse_is_named(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *y = NULL, *loss = NULL, *changed = NULL, *view = NULL;
    OK(vector(engine, 3, -2, true, &x));
    OK(apply(engine, &ms_op_exp, x, NULL, &y));
    OK(total(engine, y, &loss));
    OK(ms_backward(engine, &loss, NULL, 1, true));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(engine)->message, "was freed by the backward"));
    ms_tensor_release(loss);
    ms_tensor_release(y);
    OK(apply(engine, &ms_op_exp, x, NULL, &y));
    OK(total(engine, y, &loss));
    bool recording = ms_engine_set_recording(engine, false);
    OK(ms_op_apply(engine, &ms_op_fill, NULL, true, &y, 1, &changed, 1)); /* exp saved its result */
    ms_engine_set_recording(engine, recording);
    assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(engine)->message, "exp"));
    assert_non_null(strstr(ms_engine_error(engine)->message, "written in place"));
    ms_tensor_release(changed);
    /* A leaf, in place. */
    assert_int_equal(ms_apply(engine, &ms_op_neg, NULL, true, &x, 1, &changed, 1),
                     MS_ERROR_ARGUMENT);
    OK(apply(engine, &ms_op_clone, x, NULL, &changed));
    ms_attributes whole = { .shape = { .dims = 1, .sizes = { 2 } } };
    OK(ms_apply(engine, &ms_op_view, &whole, false, &changed, 1, &view, 1));
    ms_tensor *unused = NULL;
    assert_int_equal(ms_apply(engine, &ms_op_neg, NULL, true, &view, 1, &unused, 1),
                     MS_ERROR_ARGUMENT);
    /* Two elements. */
    assert_int_equal(ms_backward(engine, &view, NULL, 1, false), MS_ERROR_ARGUMENT);
    ms_tensor *gradient = ms_tensor_grad(x);
    assert_int_equal(ms_backward(engine, &gradient, NULL, 1, false), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(ms_engine_error(engine)->message, "gradients of gradients"));
    ms_tensor_release(view);
    ms_tensor_release(changed);
    ms_tensor_release(loss);
    ms_tensor_release(y);
    ms_tensor_release(x);
    ms_engine_free(engine);
}

/* --------------------------------------------------- views and later writes */

static ms_status view_of(ms_engine *engine, ms_tensor *a, ms_tensor **out)
{
    ms_attributes whole = { .shape = { .dims = 1, .sizes = { 2 } } };
    return ms_apply(engine, &ms_op_view, &whole, false, &a, 1, out, 1);
}

static void assert_stale(ms_engine *engine, ms_tensor *tensor)
{
    ms_tensor *unused = NULL;
    assert_int_equal(total(engine, tensor, &unused), MS_ERROR_STATE);
    assert_null(unused);
    assert_non_null(strstr(ms_engine_error(engine)->message, "sum: "));
    assert_non_null(strstr(ms_engine_error(engine)->message, "[2] f32"));
    assert_non_null(strstr(ms_engine_error(engine)->message, "written in place"));
    ms_attributes two = { .scalar = { .value = 2 } };
    assert_int_equal(ms_apply(engine, &ms_op_mul_scalar, &two, false, &tensor, 1, &unused, 1),
                     MS_ERROR_STATE);
    const int64_t shape[] = { 2 };
    ms_tensor *one = NULL;
    OK(ms_tensor_new(engine, MS_F32, 1, shape, &one));
    if (ms_tensor_requires_grad(tensor))
        assert_int_equal(ms_backward(engine, &tensor, &one, 1, false), MS_ERROR_STATE);
    ms_tensor_release(one);
    bool recording = ms_engine_set_recording(engine, false); /* its values can still be read */
    OK(total(engine, tensor, &unused));
    ms_engine_set_recording(engine, recording);
    ms_tensor_release(unused);
}

/* The history of a view does not know of a write that was recorded elsewhere: gradients through it
 * would be wrong. */
static void a_view_is_not_used_behind_a_recorded_write(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *h = NULL, *before = NULL, *after = NULL, *loss = NULL;
    OK(vector(engine, 3, -2, true, &x));
    OK(apply(engine, &ms_op_neg, x, NULL, &h));
    OK(view_of(engine, h, &before));
    OK(multiply_in_place(engine, h, x));
    assert_stale(engine, before);
    OK(view_of(engine, h, &after));
    OK(total(engine, after, &loss));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    assert_gradient(x, -6, 4); /* d(-x^2) = -2x */
    ms_tensor *all[] = { x, h, before, after, loss };
    for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

/* A tensor without history has no record that a view of it got one. A detach or a view after the
 * write is correct. */
static void a_tensor_is_not_used_behind_a_recorded_write_to_its_view(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *buffer = NULL, *view = NULL, *loss = NULL, *apart = NULL;
    OK(vector(engine, 3, -2, true, &x));
    OK(vector(engine, 1, 10, false, &buffer));
    OK(view_of(engine, buffer, &view));
    OK(multiply_in_place(engine, view, x));
    assert_stale(engine, buffer);
    OK(total(engine, view, &loss));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    assert_gradient(x, 1, 10);
    ms_tensor_release(loss);
    OK(ms_tensor_alias(buffer, &apart));
    OK(apply(engine, &ms_op_mul, apart, x, &loss));
    ms_tensor *unused = NULL;
    ms_attributes zero = { .scalar = { .value = 0 } };
    /* A write that is not recorded needs no history. */
    OK(ms_apply(engine, &ms_op_fill, &zero, true, &buffer, 1, &unused, 1));
    ms_tensor *all[] = { x, buffer, view, loss, apart, unused };
    for (int i = 0; i < 6; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

/* A write that is not recorded changes values only: the history of views stays valid, and saved
 * tensors are checked. */
static void views_may_be_used_behind_a_write_that_is_not_recorded(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *h = NULL, *view = NULL, *square = NULL, *loss = NULL;
    OK(vector(engine, 3, -2, true, &x));
    OK(apply(engine, &ms_op_neg, x, NULL, &h));
    OK(view_of(engine, h, &view));
    OK(apply(engine, &ms_op_mul, view, view, &square));
    bool recording = ms_engine_set_recording(engine, false);
    OK(multiply_in_place(engine, h, x));
    ms_engine_set_recording(engine, recording);
    OK(total(engine, view, &loss));
    OK(ms_backward(engine, &loss, NULL, 1, true));
    assert_gradient(x, -1, -1);
    ms_tensor_release(loss);
    OK(total(engine, square, &loss));
    assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(engine)->message, "mul"));
    assert_non_null(strstr(ms_engine_error(engine)->message, "[2] f32"));
    ms_tensor *all[] = { x, h, view, square, loss };
    for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------ recomputation */

/* dropout(x) * w, where w is a leaf that the function holds. */
static ms_status masked(void *user, ms_tensor *const *inputs, uint32_t count, ms_tensor **outputs,
                        uint32_t *made)
{
    ms_tensor *w = user, *dropped = NULL, *x = inputs[0];
    ms_engine *engine = ms_tensor_engine(x);
    ms_attributes attributes = { .random = { .a = 0.5, .random = ms_engine_draw(engine) } };
    if (count != 1) return MS_ERROR_ARGUMENT;
    ms_status status = ms_apply(engine, &ms_op_dropout, &attributes, false, &x, 1, &dropped, 1);
    if (!status) status = apply(engine, &ms_op_mul, dropped, w, outputs);
    ms_tensor_release(dropped);
    if (!status) *made = 1;
    return status;
}

static void recomputing_gives_the_same_gradients(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    float gradients[2][2][2];
    for (int again = 0; again < 2; again++) {
        ms_tensor *x = NULL, *w = NULL, *y = NULL, *loss = NULL;
        uint32_t made = 0;
        ms_engine_set_random(engine, (ms_random){ .seed = 5 });
        OK(vector(engine, 3, -2, true, &x));
        OK(vector(engine, 10, 20, true, &w));
        if (again) OK(ms_recompute(engine, masked, w, NULL, NULL, &x, 1, &y, &made));
        else OK(masked(w, &x, 1, &y, &made));
        assert_int_equal(ms_engine_draw(engine).draw, 1);
        OK(total(engine, y, &loss));
        OK(ms_backward(engine, &loss, NULL, 1, false));
        OK(ms_tensor_read(ms_tensor_grad(x), gradients[again][0], 8));
        OK(ms_tensor_read(ms_tensor_grad(w), gradients[again][1], 8));
        /* The second run of forward took no draws. */
        assert_int_equal(ms_engine_draw(engine).draw, 2);
        ms_tensor_release(x);
        ms_tensor_release(w);
        ms_tensor_release(y);
        ms_tensor_release(loss);
    }
    assert_memory_equal(gradients[0], gradients[1], sizeof gradients[0]);
    ms_engine_free(engine);
}

static ms_status as_it_is(void *user, ms_tensor *const *inputs, uint32_t count, ms_tensor **outputs,
                          uint32_t *made)
{
    (void)count;
    outputs[0] = ms_tensor_retain(inputs[0]);
    outputs[1] = ms_tensor_retain(user);
    *made = 2;
    return MS_OK;
}

static void a_recomputed_function_may_return_what_it_got(void **state)
{
    (void)state;
    fault_os fault;
    fault_os_init(&fault);
    ms_engine *engine = make_engine(&fault.table);
    ms_tensor *x = NULL, *w = NULL, *y[2] = { NULL }, *product = NULL, *loss = NULL;
    uint32_t made = 0;
    OK(vector(engine, 3, -2, true, &x));
    OK(vector(engine, 10, 20, true, &w));
    OK(ms_recompute(engine, as_it_is, w, NULL, NULL, &x, 1, y, &made));
    assert_true(ms_tensor_is_leaf(w));
    OK(apply(engine, &ms_op_mul, y[0], y[1], &product));
    OK(total(engine, product, &loss));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    assert_gradient(x, 10, 20);
    assert_gradient(w, 3, -2);
    ms_tensor *all[] = { x, w, y[0], y[1], product, loss };
    for (int i = 0; i < 6; i++) ms_tensor_release(all[i]);
    /* And a graph without a backward. */
    OK(vector(engine, 3, -2, true, &x));
    OK(ms_recompute(engine, as_it_is, x, NULL, NULL, &x, 1, y, &made));
    ms_tensor_release(y[0]);
    ms_tensor_release(y[1]);
    ms_tensor_release(x);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
    assert_int_equal(atomic_load(&fault.live), 0);
}

/* x * w, where the function captures w. */
static ms_status times_held(void *user, ms_tensor *const *inputs, uint32_t count,
                            ms_tensor **outputs, uint32_t *made)
{
    (void)count;
    *made = 1;
    return apply(ms_tensor_engine(inputs[0]), &ms_op_mul, inputs[0], user, outputs);
}

static ms_status recomputed_times(ms_engine *engine, ms_tensor *x, ms_tensor *w, ms_tensor **out)
{
    uint32_t made = 0;
    return ms_recompute(engine, times_held, w, NULL, NULL, &x, 1, out, &made);
}

/* Two factors of the same leaf, each inside or outside of a recomputed function: one whole
 * gradient, once. */
static void a_leaf_held_by_a_recomputed_function_gets_one_whole_gradient(void **state)
{
    (void)state;
    for (int first_inside = 0; first_inside < 2; first_inside++)
        for (int second_inside = 0; second_inside < 2; second_inside++) {
            ms_engine *engine = make_engine(NULL);
            trail t = { .text = "" };
            uint64_t id = 0;
            ms_tensor *x = NULL, *w = NULL, *y = NULL, *z = NULL, *loss = NULL;
            OK(vector(engine, 3, -2, true, &x));
            OK(vector(engine, 10, 20, true, &w));
            OK(ms_tensor_on_accumulated(w, note, &t, NULL, &id));
            OK(first_inside ? recomputed_times(engine, x, w, &y)
                            : apply(engine, &ms_op_mul, x, w, &y));
            OK(second_inside ? recomputed_times(engine, y, w, &z)
                             : apply(engine, &ms_op_mul, y, w, &z));
            OK(total(engine, z, &loss));
            for (int pass = 1; pass <= 2; pass++) {
                OK(ms_backward(engine, &loss, NULL, 1, pass == 1));
                assert_gradient(x, 100.0f * (float)pass, 400.0f * (float)pass); /* of x w^2 */
                assert_gradient(w, 60.0f * (float)pass, -80.0f * (float)pass);
                assert_string_equal(t.text, pass == 1 ? "a" : "aa");
            }
            ms_tensor *all[] = { x, w, y, z, loss };
            for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
            assert_int_equal(ms_engine_memory(engine).live, 0);
            ms_engine_free(engine);
        }
}

static ms_status nested(void *user, ms_tensor *const *inputs, uint32_t count, ms_tensor **outputs,
                        uint32_t *made)
{
    (void)count;
    *made = 1;
    return recomputed_times(ms_tensor_engine(inputs[0]), inputs[0], user, outputs);
}

/* A tensor that a recomputed function captures may have a history, which the rest of the graph also
 * uses. */
static void a_result_held_by_a_recomputed_function_is_gone_through_once(void **state)
{
    (void)state;
    for (int depth = 1; depth <= 2; depth++) {
        ms_engine *engine = make_engine(NULL);
        trail t = { .text = "" };
        uint64_t id = 0;
        uint32_t made = 0;
        ms_tensor *x = NULL, *w = NULL, *square = NULL, *y = NULL, *sum = NULL, *loss = NULL;
        OK(vector(engine, 3, -2, true, &x));
        OK(vector(engine, 10, 20, true, &w));
        OK(apply(engine, &ms_op_mul, w, w, &square));
        OK(ms_tensor_on_gradient(square, double_it, &t, NULL, &id));
        OK(ms_recompute(engine, depth == 1 ? times_held : nested, square, NULL, NULL, &x, 1, &y,
                        &made));
        OK(apply(engine, &ms_op_add, y, square, &sum));
        OK(total(engine, sum, &loss));
        OK(ms_backward(engine, &loss, NULL, 1, false));
        assert_gradient(x, 100, 400);
        assert_gradient(w, 160, -80); /* 2w (x + 1), doubled by the hook */
        assert_string_equal(t.text, "g");
        ms_tensor *all[] = { x, w, square, y, sum, loss };
        for (int i = 0; i < 6; i++) ms_tensor_release(all[i]);
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
    }
}

static void what_a_recomputed_function_reads_must_not_change(void **state)
{
    (void)state;
    for (int held = 0; held < 2; held++) { /* an input, or what it holds */
        ms_engine *engine = make_engine(NULL);
        ms_tensor *x = NULL, *w = NULL, *h = NULL, *y = NULL, *loss = NULL;
        OK(vector(engine, 3, -2, true, &x));
        OK(vector(engine, 10, 20, true, &w));
        OK(apply(engine, &ms_op_neg, x, NULL, &h));
        OK(held ? recomputed_times(engine, w, h, &y) : recomputed_times(engine, h, w, &y));
        OK(multiply_in_place(engine, h, x));
        OK(total(engine, y, &loss));
        assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_STATE);
        assert_non_null(strstr(ms_engine_error(engine)->message, "recompute"));
        assert_non_null(strstr(ms_engine_error(engine)->message, "[2] f32"));
        assert_non_null(strstr(ms_engine_error(engine)->message, "written in place"));
        assert_null(ms_tensor_grad(w));
        assert_null(ms_tensor_grad(x));
        ms_tensor *all[] = { x, w, h, y, loss };
        for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
    }
}

typedef struct fickle {
    ms_tensor *w, *other;
    int runs;
} fickle;

static ms_status hold_another(void *user, ms_tensor *const *inputs, uint32_t count,
                              ms_tensor **outputs, uint32_t *made)
{
    fickle *f = user;
    return times_held(f->runs++ ? f->other : f->w, inputs, count, outputs, made);
}

/* A leaf that is used in the second run only, and whose gradient was complete before that: it would
 * be lost. */
static void a_recomputed_function_that_changes_its_mind_is_an_error(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    uint32_t made = 0;
    ms_tensor *x = NULL, *w = NULL, *other = NULL, *y = NULL, *z = NULL, *loss = NULL;
    OK(vector(engine, 3, -2, true, &x));
    OK(vector(engine, 10, 20, true, &w));
    OK(vector(engine, 1, 1, true, &other));
    fickle f = { .w = w, .other = other };
    OK(ms_recompute(engine, hold_another, &f, NULL, NULL, &x, 1, &y, &made));
    OK(apply(engine, &ms_op_mul, y, other, &z));
    OK(total(engine, z, &loss));
    assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(engine)->message, "the same each time"));
    ms_tensor *all[] = { x, w, other, y, z, loss };
    for (int i = 0; i < 6; i++) ms_tensor_release(all[i]);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

typedef struct second_pass {
    ms_tensor *root;
    ms_status status;
} second_pass;

static ms_status go_back(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)replacement;
    second_pass *pass = user;
    pass->status = ms_backward(ms_tensor_engine(gradient), &pass->root, NULL, 1, false);
    return MS_OK;
}

static void a_hook_may_go_back_through_a_graph_of_its_own_only(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    uint64_t id = 0;
    ms_tensor *x = NULL, *w = NULL, *y = NULL, *loss = NULL, *apart = NULL, *shared = NULL;
    OK(vector(engine, 3, -2, true, &x));
    OK(vector(engine, 10, 20, true, &w));
    OK(total(engine, w, &apart));
    OK(total(engine, x, &shared));
    OK(apply(engine, &ms_op_neg, x, NULL, &y));
    second_pass first = { .root = apart, .status = MS_ERROR_IO },
                second = { .root = shared, .status = MS_ERROR_IO };
    OK(ms_tensor_on_gradient(y, go_back, &first, NULL, &id));
    OK(ms_tensor_on_gradient(y, go_back, &second, NULL, &id));
    OK(total(engine, y, &loss));
    OK(ms_backward(engine, &loss, NULL, 1, false));
    assert_int_equal(first.status, MS_OK);
    assert_gradient(w, 1, 1);
    assert_int_equal(second.status, MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(engine)->message, "hook"));
    assert_gradient(x, -1, -1);
    ms_tensor *all[] = { x, w, y, loss, apart, shared };
    for (int i = 0; i < 6; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

/* --------------------------------------------------------- failing the n-th */

static ms_status nothing(void *user)
{
    (void)user;
    return MS_OK;
}
static ms_status wait_for_reads(void *user, ms_tensor *leaf)
{
    return ms_backward_when_unread(user, &leaf, 1, nothing, NULL, NULL);
}

/* (x * detached w) * w: w's gradient is there while the first product still reads w. */
static ms_status step_in_backward(ms_engine *engine, ms_tensor *x, ms_tensor *w)
{
    ms_tensor *detached = NULL, *y = NULL, *z = NULL, *loss = NULL;
    uint64_t id = 0;
    ms_status status = ms_tensor_on_accumulated(w, wait_for_reads, engine, NULL, &id);
    if (!status) status = ms_tensor_alias(w, &detached);
    if (!status) status = apply(engine, &ms_op_mul, x, detached, &y);
    if (!status) status = apply(engine, &ms_op_mul, y, w, &z);
    if (!status) status = total(engine, z, &loss);
    if (!status) status = ms_backward(engine, &loss, NULL, 1, false);
    ms_tensor_remove_hook(w, id);
    ms_tensor *all[] = { detached, y, z, loss };
    for (int i = 0; i < 4; i++) ms_tensor_release(all[i]);
    return status;
}

/* Every call of grad.h that can fail. */
static ms_status program(ms_engine *engine)
{
    trail t = { .text = "" };
    uint64_t id = 0;
    uint32_t made = 0;
    ms_tensor *x = NULL, *w = NULL, *y = NULL, *z = NULL, *loss = NULL, *given = NULL;
    ms_status status = vector(engine, 3, -2, true, &x);
    if (!status) status = vector(engine, 1, 2, true, &w);
    if (!status) status = ms_tensor_on_gradient(x, double_it, &t, NULL, &id);
    if (!status) status = ms_tensor_on_accumulated(x, note, &t, NULL, &id);
    for (int pass = 0; pass < 2 && !status; pass++) {
        status = ms_recompute(engine, masked, w, NULL, NULL, &x, 1, &y, &made);
        if (!status) status = apply(engine, &ms_op_mul, y, x, &z);
        if (!status) status = total(engine, z, &loss);
        if (!status) status = ms_backward(engine, &loss, NULL, 1, false);
        ms_tensor_release(y);
        ms_tensor_release(z);
        ms_tensor_release(loss);
        y = z = loss = NULL;
    }
    if (!status) status = vector(engine, 1, 1, false, &given);
    if (!status) status = ms_tensor_set_grad(w, given);
    ms_tensor_release(given);
    if (!status) status = step_in_backward(engine, x, w);
    if (!status) {
        ms_tensor *leaves[] = { x, w }, *flat = NULL;
        status = ms_flatten(engine, leaves, 2, &flat);
        /* Both have moved, or none. */
        assert_true((ms_tensor_storage(x) == ms_tensor_storage(w)) == (status == MS_OK));
        ms_tensor_release(flat);
    }
    ms_tensor_release(x);
    ms_tensor_release(w);
    return status;
}

/* ------------------------------------------------------- what hooks may ask */

typedef struct told {
    ms_engine *engine;
    int gradients, ends;
    bool fails;
} told;

static ms_status at_end(void *user)
{
    told *t = user;
    t->ends++;
    return t->fails ? ms_engine_fail(t->engine, MS_ERROR_STATE, "not an end") : MS_OK;
}

static ms_status came(void *user, ms_tensor *leaf)
{
    (void)leaf;
    told *t = user;
    assert_int_equal(t->ends, 0);
    if (t->gradients++ == 0) return ms_backward_at_end(t->engine, at_end, t);
    return MS_OK;
}

static ms_status twice(void *user, ms_tensor *const *inputs, uint32_t input_count,
                       ms_tensor **outputs, uint32_t *count)
{
    (void)input_count;
    *count = 1;
    return apply(user, &ms_op_mul, inputs[0], inputs[0], outputs);
}

static void the_end_of_the_outermost_backward_is_told_once(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *w = NULL, *both = NULL, *square = NULL, *loss = NULL;
    uint32_t count = 0;
    uint64_t id = 0;
    OK(vector(engine, 1, 2, true, &x));
    OK(vector(engine, 3, 4, true, &w));
    for (int fails = 0; fails < 2; fails++) {
        told t = { .engine = engine, .fails = fails };
        uint64_t ids[2];
        OK(ms_tensor_on_accumulated(x, came, &t, NULL, &ids[0]));
        OK(ms_tensor_on_accumulated(w, came, &t, NULL, &ids[1]));
        OK(apply(engine, &ms_op_mul, x, w, &both));
        /* A backward pass inside the backward pass. */
        OK(ms_recompute(engine, twice, engine, NULL, NULL, &both, 1, &square, &count));
        OK(total(engine, square, &loss));
        assert_int_equal(ms_backward(engine, &loss, NULL, 1, false),
                         fails ? MS_ERROR_STATE : MS_OK);
        assert_true(t.gradients == 2 && t.ends == 1);
        for (int i = 0; i < 2; i++) ms_tensor_remove_hook(i ? w : x, ids[i]);
        ms_tensor_release(both);
        ms_tensor_release(square);
        ms_tensor_release(loss);
        both = square = loss = NULL;
    }
    assert_int_equal(ms_backward_at_end(engine, at_end, &id), MS_ERROR_STATE);
    ms_tensor_release(x);
    ms_tensor_release(w);
    ms_engine_free(engine);
}

static void a_graph_tells_which_leaves_it_reaches(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *leaves[4] = { NULL }, *a = NULL, *b = NULL, *roots[2];
    bool reached[4];
    for (int i = 0; i < 4; i++) OK(vector(engine, 1, 2, i < 3, &leaves[i]));
    OK(apply(engine, &ms_op_mul, leaves[0], leaves[3], &a));
    OK(apply(engine, &ms_op_add, leaves[1], a, &b));
    roots[0] = a;
    roots[1] = leaves[2];
    OK(ms_graph_reaches(engine, roots, 1, leaves, 4, reached));
    assert_true(reached[0] && !reached[1] && !reached[2] && !reached[3]);
    OK(ms_graph_reaches(engine, &b, 1, leaves, 4, reached));
    assert_true(reached[0] && reached[1] && !reached[2] && !reached[3]);
    OK(ms_graph_reaches(engine, roots, 0, leaves, 4, reached));
    assert_false(reached[0] || reached[1]);
    OK(ms_backward(engine, &b, &leaves[3], 1, false)); /* asking leaves no trace */
    assert_gradient(leaves[1], 1, 2);
    ms_tensor_release(a);
    ms_tensor_release(b);
    for (int i = 0; i < 4; i++) ms_tensor_release(leaves[i]);
    ms_engine_free(engine);
}

/* Only the gradients that the marking tensor's graph goes back to, once backward goes there, and
 * until they are removed. */
static void a_tensor_marks_the_gradients_that_it_reaches(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *leaves[3] = { NULL }, *marking = NULL, *other = NULL, *root = NULL;
    for (int i = 0; i < 3; i++) OK(vector(engine, 1, 2, i < 2, &leaves[i]));
    OK(ms_tensor_mark_gradients(leaves[0])); /* a leaf marks nothing */
    OK(ms_tensor_mark_gradients(leaves[2]));
    OK(apply(engine, &ms_op_mul, leaves[0], leaves[2], &marking));
    OK(ms_tensor_mark_gradients(marking));
    OK(apply(engine, &ms_op_mul, leaves[1], leaves[2], &other));
    OK(apply(engine, &ms_op_add, marking, other, &root));
    assert_false(ms_tensor_grad_is_marked(leaves[0]));
    OK(ms_backward(engine, &other, &leaves[2], 1, true));
    assert_false(ms_tensor_grad_is_marked(leaves[0]) || ms_tensor_grad_is_marked(leaves[1]));
    OK(ms_backward(engine, &root, &leaves[2], 1, true));
    assert_true(ms_tensor_grad_is_marked(leaves[0]));
    assert_false(ms_tensor_grad_is_marked(leaves[1]) || ms_tensor_grad_is_marked(leaves[2]));
    ms_tensor_grad_unmark(leaves[0]);
    assert_false(ms_tensor_grad_is_marked(leaves[0]));
    OK(ms_backward(engine, &marking, &leaves[2], 1, false));
    assert_true(ms_tensor_grad_is_marked(leaves[0]));
    OK(ms_tensor_set_grad(leaves[0], ms_tensor_grad(leaves[0]))); /* the same gradient */
    assert_true(ms_tensor_grad_is_marked(leaves[0]));
    OK(ms_tensor_set_grad(leaves[0], NULL));
    assert_false(ms_tensor_grad_is_marked(leaves[0]));
    ms_tensor_release(marking);
    ms_tensor_release(other);
    ms_tensor_release(root);
    for (int i = 0; i < 3; i++) ms_tensor_release(leaves[i]);
    ms_engine_free(engine);
}

/* Once a gradient is summed over ranks, a backward must not add to it; the mark ends with it. */
static void a_summed_gradient_is_not_added_to(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *leaf = NULL, *one = NULL, *root = NULL;
    OK(vector(engine, 1, 2, true, &leaf));
    OK(vector(engine, 1, 2, false, &one));
    OK(apply(engine, &ms_op_mul, leaf, one, &root));
    ms_tensor_grad_mark_summed(leaf); /* it has no gradient yet */
    assert_false(ms_tensor_grad_is_summed(leaf));
    OK(ms_backward(engine, &root, &one, 1, true));
    OK(ms_backward(engine, &root, &one, 1, true));
    ms_tensor_grad_mark_summed(leaf);
    assert_true(ms_tensor_grad_is_summed(leaf));
    assert_int_equal(ms_backward(engine, &root, &one, 1, true), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(engine)->message, "call zero_grad() before"));
    OK(ms_tensor_set_grad(leaf, ms_tensor_grad(leaf)));
    assert_true(ms_tensor_grad_is_summed(leaf));
    OK(ms_tensor_set_grad(leaf, NULL));
    assert_false(ms_tensor_grad_is_summed(leaf));
    OK(ms_backward(engine, &root, &one, 1, false));
    assert_gradient(leaf, 1, 4);
    ms_tensor_release(root);
    ms_tensor_release(one);
    ms_tensor_release(leaf);
    ms_engine_free(engine);
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    for (int forever = 0; forever < 2; forever++)
        for (long n = 1;; n++) {
            fault_os fault;
            fault_os_init(&fault);
            ms_engine *engine = make_engine(&fault.table);
            long limit = atomic_load(&fault.calls) + n;
            atomic_store(&fault.forever, forever);
            atomic_store(&fault.fail_at, limit);
            ms_status status = program(engine);
            bool reached = atomic_load(&fault.calls) >= limit;
            atomic_store(&fault.fail_at, 0);
            if (!reached) assert_int_equal(status, MS_OK);
            assert_int_equal(ms_engine_memory(engine).live, 0);
            assert_true(ms_engine_is_recording(engine));
            /* A stream that has found no memory is an error of a later call. */
            if (device_is_cuda()) (void)ms_engine_sync(engine);
            assert_int_equal(program(engine), MS_OK);
            ms_engine_free(engine);
            assert_int_equal(atomic_load(&fault.live), 0);
            if (!reached) break;
            assert_true(n < 500);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_add_up_over_uses_and_passes),
        cmocka_unit_test(a_gradient_lies_in_its_home_and_adds_up_there),
        cmocka_unit_test(a_graph_may_be_deep_and_dies_without_recursion),
        cmocka_unit_test(hooks_see_whole_gradients_and_may_replace_them),
        cmocka_unit_test(an_error_of_a_hook_ends_backward),
        cmocka_unit_test(misuse_is_named),
        cmocka_unit_test(a_view_is_not_used_behind_a_recorded_write),
        cmocka_unit_test(a_tensor_is_not_used_behind_a_recorded_write_to_its_view),
        cmocka_unit_test(views_may_be_used_behind_a_write_that_is_not_recorded),
        cmocka_unit_test(recomputing_gives_the_same_gradients),
        cmocka_unit_test(a_recomputed_function_may_return_what_it_got),
        cmocka_unit_test(a_leaf_held_by_a_recomputed_function_gets_one_whole_gradient),
        cmocka_unit_test(a_result_held_by_a_recomputed_function_is_gone_through_once),
        cmocka_unit_test(what_a_recomputed_function_reads_must_not_change),
        cmocka_unit_test(a_recomputed_function_that_changes_its_mind_is_an_error),
        cmocka_unit_test(a_hook_may_go_back_through_a_graph_of_its_own_only),
        cmocka_unit_test(the_end_of_the_outermost_backward_is_told_once),
        cmocka_unit_test(a_graph_tells_which_leaves_it_reaches),
        cmocka_unit_test(a_tensor_marks_the_gradients_that_it_reaches),
        cmocka_unit_test(a_summed_gradient_is_not_added_to),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
