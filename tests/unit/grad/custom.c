/* custom.c: functions with a gradient of their own: what backward gets and gives, writes in place,
 * what would lose a gradient, and every failed allocation. ctest: late cuda */
#include "grad_support.h"
#include "fault_engine.h"

/* x * w, or another of the cases below; what its calls saw. */
typedef struct product {
    ms_engine *engine;
    enum {
        PLAIN,
        HELD,       /* uses `held` in place of w */
        IN_PLACE,   /* writes x */
        AS_IT_IS,   /* gives x */
        TWO,        /* gives x * w and an integer tensor */
        NONE,       /* gives nothing */
        WRONG_SHAPE /* of a gradient */
    } how;
    ms_tensor *held;
    int forwards, backwards, frees;
    bool recorded;
    ms_dtype autocast;
    ms_tensor *outputs[2], *saved[2]; /* of the last call; outputs owned */
} product;

static void forget(product *p)
{
    for (int i = 0; i < 2; i++) {
        ms_tensor_release(p->outputs[i]);
        p->outputs[i] = NULL;
    }
}

static ms_status forward(void *user, ms_tensor *const *inputs, uint32_t input_count,
                         ms_custom_results *results)
{
    product *p = user;
    ms_status status = MS_OK;
    p->forwards++;
    p->recorded |= ms_engine_is_recording(p->engine);
    forget(p);
    assert_int_equal(input_count, 2);
    if (p->how == IN_PLACE) status = multiply_in_place(p->engine, inputs[0], inputs[1]);
    if (!status && (p->how == IN_PLACE || p->how == AS_IT_IS))
        p->outputs[0] = ms_tensor_retain(inputs[0]);
    else if (!status)
        status = apply(p->engine, &ms_op_mul, inputs[0], p->how == HELD ? p->held : inputs[1],
                       &p->outputs[0]);
    if (!status && p->how == TWO) {
        const int64_t shape[] = { 1 }, value = 7;
        status = ms_tensor_new(p->engine, MS_I64, 1, shape, &p->outputs[1]);
        if (!status) status = ms_tensor_write(p->outputs[1], &value, sizeof value);
    }
    p->saved[0] = inputs[0];
    p->saved[1] = inputs[1];
    *results = (ms_custom_results){ .outputs = p->outputs,
                                    .output_count = p->how == NONE  ? 0
                                                    : p->how == TWO ? 2
                                                                    : 1,
                                    .saved = p->saved,
                                    .saved_count = 2 };
    return status;
}

/* Returns 3 times the gradient of the product. The factor shows that the engine called this
 * function: the gradient of mul has no such factor. */
static ms_status backward(void *user, ms_tensor *const *gradients, ms_tensor *const *saved,
                          ms_tensor **results, const bool *needs)
{
    product *p = user;
    ms_tensor *three = NULL;
    p->backwards++;
    p->recorded |= ms_engine_is_recording(p->engine);
    p->autocast = ms_engine_autocast(p->engine);
    assert_non_null(gradients[0]);
    if (p->how == TWO) assert_null(gradients[1]);
    /* It may write what it gets. */
    ms_status status = vector(p->engine, 3, 3, false, &three);
    if (!status) status = multiply_in_place(p->engine, gradients[0], three);
    for (int i = 0; i < 2 && !status; i++)
        status = apply(p->engine, &ms_op_mul, gradients[0], saved[1 - i], &results[i]);
    assert_true(needs[0] || needs[1]);
    if (!status && p->how == WRONG_SHAPE) {
        ms_tensor_release(results[1]);
        results[1] = NULL;
        status = total(p->engine, gradients[0], &results[1]);
    }
    ms_tensor_release(three);
    return status;
}

static void count_free(void *user)
{
    product *p = user;
    p->frees++;
}

static const ms_custom_function function = { .forward = forward,
                                             .backward = backward,
                                             .free = count_free };

static ms_status call(product *p, ms_tensor *x, ms_tensor *w, ms_tensor **outputs)
{
    ms_tensor *inputs[] = { x, w };
    uint32_t count = 0;
    ms_status status = ms_custom(p->engine, &function, p, inputs, 2, outputs, &count);
    forget(p);
    if (!status) assert_int_equal(count, p->how == TWO ? 2 : 1);
    return status;
}

typedef struct pair {
    ms_engine *engine;
    ms_tensor *x, *w;
    product p;
} pair;

static pair make_pair(int how)
{
    pair t = { .engine = make_engine(NULL) };
    OK(vector(t.engine, 3, -2, true, &t.x));
    OK(vector(t.engine, 5, 7, true, &t.w));
    t.p = (product){ .engine = t.engine, .how = how };
    return t;
}

/* The function was freed as often as it was taken over. */
static void drop_pair(pair *t, int frees)
{
    assert_int_equal(t->p.frees, frees);
    assert_false(t->p.recorded);
    ms_tensor_release(t->x);
    ms_tensor_release(t->w);
    ms_engine_free(t->engine);
}

static void refuses(pair *t, ms_tensor *x, ms_tensor *w, const char *text)
{
    ms_tensor *outputs[2] = { NULL };
    assert_int_equal(call(&t->p, x, w, outputs), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(ms_engine_error(t->engine)->message, text));
    assert_null(outputs[0]);
    assert_int_equal(t->p.frees, 0);
}

static void the_gradient_is_what_backward_gives(void **state)
{
    (void)state;
    for (int how = PLAIN; how <= TWO; how = how == PLAIN ? TWO : how + 1) {
        pair t = make_pair(how);
        ms_tensor *y[2] = { NULL }, *sum = NULL, *loss = NULL;
        OK(call(&t.p, t.x, t.w, y));
        assert_true(ms_tensor_requires_grad(y[0]));
        if (how == TWO) assert_false(ms_tensor_requires_grad(y[1]));
        /* An addition gives both terms one gradient, which only one of them may write. */
        OK(apply(t.engine, &ms_op_add, y[0], t.x, &sum));
        OK(apply(t.engine, &ms_op_mul, sum, t.w, &loss));
        ms_tensor_release(sum);
        OK(total(t.engine, loss, &sum));
        OK(ms_backward(t.engine, &sum, NULL, 1, true));
        assert_gradient(t.x, 3 * 5 * 5 + 5, 3 * 7 * 7 + 7);
        OK(ms_tensor_set_grad(t.x, NULL));
        OK(ms_backward(t.engine, &sum, NULL, 1, false));
        assert_gradient(t.x, 3 * 5 * 5 + 5, 3 * 7 * 7 + 7);
        assert_true(t.p.forwards == 1 && t.p.backwards == 2);
        ms_tensor *all[] = { y[0], y[1], sum, loss };
        for (int i = 0; i < 4; i++) ms_tensor_release(all[i]);
        drop_pair(&t, 1);
    }
}

static void without_a_gradient_it_just_runs(void **state)
{
    (void)state;
    pair t = make_pair(PLAIN);
    ms_tensor *y = NULL;
    bool was = ms_engine_set_recording(t.engine, false);
    OK(call(&t.p, t.x, t.w, &y));
    ms_engine_set_recording(t.engine, was);
    assert_false(ms_tensor_requires_grad(y));
    assert_int_equal(t.p.frees, 1);
    ms_tensor_release(y);
    OK(ms_tensor_set_requires_grad(t.x, false));
    OK(ms_tensor_set_requires_grad(t.w, false));
    OK(call(&t.p, t.x, t.w, &y));
    assert_false(ms_tensor_requires_grad(y));
    ms_tensor_release(y);
    drop_pair(&t, 2);
}

static void backward_runs_outside_of_autocast(void **state)
{
    (void)state;
    pair t = make_pair(PLAIN);
    ms_tensor *y = NULL, *loss = NULL;
    OK(call(&t.p, t.x, t.w, &y));
    OK(total(t.engine, y, &loss));
    ms_engine_set_autocast(t.engine, MS_BF16);
    t.p.autocast = MS_BF16;
    OK(ms_backward(t.engine, &loss, NULL, 1, false));
    assert_int_equal(t.p.autocast, MS_F32);
    assert_int_equal(ms_engine_autocast(t.engine), MS_BF16);
    ms_tensor_release(y);
    ms_tensor_release(loss);
    drop_pair(&t, 1);
}

static void what_it_saves_must_not_change(void **state)
{
    (void)state;
    pair t = make_pair(PLAIN);
    ms_tensor *y = NULL, *loss = NULL;
    OK(call(&t.p, t.x, t.w, &y));
    OK(total(t.engine, y, &loss));
    bool was = ms_engine_set_recording(t.engine, false);
    OK(multiply_in_place(t.engine, t.w, t.w));
    ms_engine_set_recording(t.engine, was);
    assert_int_equal(ms_backward(t.engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    assert_non_null(strstr(ms_engine_error(t.engine)->message, "custom"));
    assert_int_equal(t.p.backwards, 0);
    ms_tensor_release(y);
    ms_tensor_release(loss);
    drop_pair(&t, 1);
}

static void a_gradient_of_another_shape_is_an_error(void **state)
{
    (void)state;
    pair t = make_pair(WRONG_SHAPE);
    ms_tensor *y = NULL, *loss = NULL;
    OK(call(&t.p, t.x, t.w, &y));
    OK(total(t.engine, y, &loss));
    assert_int_equal(ms_backward(t.engine, &loss, NULL, 1, false), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(ms_engine_error(t.engine)->message, "input 2, which is [2] f32"));
    assert_null(ms_tensor_grad(t.x));
    ms_tensor_release(y);
    ms_tensor_release(loss);
    drop_pair(&t, 1);
}

static void a_gradient_that_would_get_lost_is_an_error(void **state)
{
    (void)state;
    pair t = make_pair(HELD);
    ms_tensor *held = NULL, *detached = NULL, *y = NULL;
    OK(vector(t.engine, 1, 2, true, &held));
    t.p.held = held;
    refuses(&t, t.x, t.w, "is no argument");
    OK(ms_tensor_alias(held, &detached));
    t.p.held = detached;
    OK(call(&t.p, t.x, t.w, &y));
    ms_tensor_release(y);
    t.p.frees = 0;
    t.p.held = t.w;
    OK(call(&t.p, t.x, t.w, &y));
    ms_tensor_release(y);
    ms_tensor_release(held);
    ms_tensor_release(detached);
    drop_pair(&t, 1);
}

static void an_input_that_it_writes_has_a_new_history(void **state)
{
    (void)state;
    pair t = make_pair(IN_PLACE);
    ms_tensor *h = NULL, *y = NULL, *z = NULL;
    refuses(&t, t.x, t.w, "has written input 1 in place");
    OK(apply(t.engine, &ms_op_neg, t.w, NULL, &h));
    OK(call(&t.p, h, t.w, &y));
    /* What was made before the write does not know of it. */
    assert_int_equal(apply(t.engine, &ms_op_neg, h, NULL, &z), MS_ERROR_STATE);
    OK(apply(t.engine, &ms_op_neg, y, NULL, &z));
    OK(multiply_in_place(t.engine, y, t.w));
    ms_tensor *all[] = { h, y, z };
    for (int i = 0; i < 3; i++) ms_tensor_release(all[i]);
    drop_pair(&t, 1);
}

static void a_view_that_it_gives_is_not_written(void **state)
{
    (void)state;
    pair t = make_pair(AS_IT_IS);
    ms_tensor *y = NULL, *loss = NULL;
    OK(call(&t.p, t.x, t.w, &y));
    assert_ptr_not_equal(y, t.x);
    assert_ptr_equal(ms_tensor_storage(y), ms_tensor_storage(t.x));
    assert_int_equal(multiply_in_place(t.engine, y, t.w), MS_ERROR_ARGUMENT);
    OK(total(t.engine, y, &loss));
    OK(ms_backward(t.engine, &loss, NULL, 1, false));
    assert_gradient(t.x, 15, 21);
    ms_tensor_release(y);
    ms_tensor_release(loss);
    drop_pair(&t, 1);
}

static void it_must_give_a_tensor(void **state)
{
    (void)state;
    pair t = make_pair(NONE);
    refuses(&t, t.x, t.w, "gave 0 tensors");
    drop_pair(&t, 0);
}

static ms_status program(const ms_os *os, ms_engine **engine)
{
    const ms_engine_options options = { .os = os, .threads = 1, .memory_bytes = 1 << 20 };
    ms_tensor *x = NULL, *w = NULL, *y[2] = { NULL }, *loss = NULL;
    ms_status status = ms_engine_new(&options, NULL, engine);
    if (status) return status;
    if (!status) status = vector(*engine, 3, -2, true, &x);
    if (!status) status = vector(*engine, 5, 7, true, &w);
    product p = { .engine = *engine, .how = TWO };
    if (!status) {
        status = call(&p, x, w, y);
        /* A call that failed has left the function to its caller. */
        assert_int_equal(p.frees, 0);
    }
    if (!status) status = total(*engine, y[0], &loss);
    if (!status) status = ms_backward(*engine, &loss, NULL, 1, false);
    if (!status) assert_gradient(x, 15, 21);
    ms_tensor *all[] = { y[0], y[1], loss, x, w };
    for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
    return status;
}

static void every_failure_leaves_nothing_behind(void **state)
{
    (void)state;
    fail_each_call(program, false);
    fail_each_call(program, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_gradient_is_what_backward_gives),
        cmocka_unit_test(without_a_gradient_it_just_runs),
        cmocka_unit_test(backward_runs_outside_of_autocast),
        cmocka_unit_test(what_it_saves_must_not_change),
        cmocka_unit_test(a_gradient_of_another_shape_is_an_error),
        cmocka_unit_test(a_gradient_that_would_get_lost_is_an_error),
        cmocka_unit_test(an_input_that_it_writes_has_a_new_history),
        cmocka_unit_test(a_view_that_it_gives_is_not_written),
        cmocka_unit_test(it_must_give_a_tensor),
        cmocka_unit_test(every_failure_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
