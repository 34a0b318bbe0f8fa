/* grad_rest.c: a backward in two parts: which gradient comes in which part, equality with one
 * backward to the bit on random graphs, what is refused, and that nothing leaks. ctest: late cuda
 */
#include "grad_support.h"
#include "ranges.h"
#include "tensor/op.h"

static void assert_message(ms_engine *engine, const char *part)
{
    const char *message = ms_engine_error(engine)->message;
    if (!strstr(message, part)) fail_msg("'%s' is not in '%s'", part, message);
}

static void release(ms_tensor **tensors, int count)
{
    for (int i = 0; i < count; i++) {
        ms_tensor_release(tensors[i]);
        tensors[i] = NULL;
    }
}

/* --------------------------------------------------------------- what, when */

/* loss = sum(((x w) + b) w): w is used twice on one path, and b is beside it. */
typedef struct graph {
    ms_tensor *x, *w, *b, *product, *sum, *again, *loss;
} graph;

static ms_status build(ms_engine *engine, graph *g)
{
    ms_status status = apply(engine, &ms_op_mul, g->x, g->w, &g->product);
    if (!status) status = apply(engine, &ms_op_add, g->product, g->b, &g->sum);
    if (!status) status = apply(engine, &ms_op_mul, g->sum, g->w, &g->again);
    return status ? status : total(engine, g->again, &g->loss);
}

static graph make_graph(ms_engine *engine)
{
    graph g = { 0 };
    OK(vector(engine, 3, -2, true, &g.x));
    OK(vector(engine, 5, 7, true, &g.w));
    OK(vector(engine, 1, 2, true, &g.b));
    OK(build(engine, &g));
    return g;
}

static void drop_results(graph *g) { release(&g->product, 4); }
static void drop_graph(graph *g) { release(&g->x, 7); }

static void inputs_come_first_and_all_others_in_the_rest(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    graph g = make_graph(engine);
    assert_false(ms_backward_awaits_rest(engine));
    OK(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1));
    assert_gradient(g.x, 25, 49); /* w^2 */
    assert_null(ms_tensor_grad(g.w));
    assert_null(ms_tensor_grad(g.b));
    assert_true(ms_tensor_awaits_rest(g.w) && ms_tensor_awaits_rest(g.b));
    assert_false(ms_tensor_awaits_rest(g.x));
    assert_int_equal(ms_check_rest(engine, "a step", &g.w, 1), MS_ERROR_STATE);
    assert_message(engine, "a step: rest is missing");
    OK(ms_backward_rest(engine, &g.loss, 1));
    assert_gradient(g.x, 25, 49);
    assert_gradient(g.w, 31, -26); /* 2 x w + b */
    assert_gradient(g.b, 5, 7);
    assert_false(ms_tensor_awaits_rest(g.w) || ms_backward_awaits_rest(engine));
    OK(ms_check_rest(engine, "a step", &g.w, 1));
    drop_graph(&g);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

/* As in a schedule of a pipeline: I of both, then W of both, in either order. */
static void parts_of_several_graphs_take_turns(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    for (int order = 0; order < 2; order++) {
        graph g = make_graph(engine),
              other = { .w = ms_tensor_retain(g.w), .b = ms_tensor_retain(g.b) };
        OK(vector(engine, 10, 20, true, &other.x));
        OK(build(engine, &other));
        OK(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1));
        OK(ms_backward_inputs(engine, &other.loss, NULL, 1, &other.x, 1));
        assert_gradient(other.x, 25, 49);
        graph *first = order ? &other : &g, *second = order ? &g : &other;
        OK(ms_backward_rest(engine, &first->loss, 1));
        assert_true(ms_tensor_awaits_rest(g.w));
        OK(ms_backward_rest(engine, &second->loss, 1));
        assert_false(ms_tensor_awaits_rest(g.w));
        assert_gradient(g.w, 31 + 101, -26 + 282);
        drop_graph(&g);
        drop_graph(&other);
    }
    ms_engine_free(engine);
}

typedef struct trail {
    char text[32];
    ms_engine *engine;
} trail;

static ms_status note_x(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)gradient, (void)replacement;
    strcat(((trail *)user)->text, "x");
    return MS_OK;
}

static ms_status note_middle(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)gradient, (void)replacement;
    strcat(((trail *)user)->text, "m");
    return MS_OK;
}

static ms_status note_end(void *user)
{
    strcat(((trail *)user)->text, "e");
    return MS_OK;
}

/* Registers an end in the first part: it belongs to the rest. */
static ms_status ask_for_end(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)gradient, (void)replacement;
    return ms_backward_at_end(((trail *)user)->engine, note_end, user);
}

static ms_status note_ready(void *user, ms_tensor *leaf)
{
    (void)leaf;
    strcat(((trail *)user)->text, "w");
    return MS_OK;
}

static void hooks_run_once_in_the_part_of_their_gradient(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    trail t = { .engine = engine };
    uint64_t id;
    graph g = make_graph(engine);
    OK(ms_tensor_on_gradient(g.x, note_x, &t, NULL, &id));
    OK(ms_tensor_on_gradient(g.sum, note_middle, &t, NULL, &id));
    OK(ms_tensor_on_gradient(g.again, ask_for_end, &t, NULL, &id));
    OK(ms_tensor_on_accumulated(g.w, note_ready, &t, NULL, &id));
    OK(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1));
    assert_string_equal(t.text, "mx");
    /* The gradient that it would see has gone through. */
    assert_int_equal(ms_tensor_on_gradient(g.sum, note_middle, &t, NULL, &id), MS_ERROR_STATE);
    OK(ms_backward_rest(engine, &g.loss, 1));
    assert_string_equal(t.text, "mxwe");
    drop_graph(&g);
    ms_engine_free(engine);
}

static void marks_of_scaled_gradients_hold_for_the_rest(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    graph g = make_graph(engine);
    OK(ms_tensor_mark_gradients(g.loss));
    OK(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1));
    assert_true(ms_tensor_grad_is_marked(g.x));
    OK(ms_tensor_set_grad(g.w, NULL)); /* a zero_grad between the parts takes the mark */
    OK(ms_backward_rest(engine, &g.loss, 1));
    assert_true(ms_tensor_grad_is_marked(g.w) && ms_tensor_grad_is_marked(g.b));
    drop_graph(&g);
    ms_engine_free(engine);
}

static void homes_get_the_gradients_of_the_rest(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *home = NULL;
    graph g = make_graph(engine);
    OK(vector(engine, 100, 100, false, &home));
    OK(ms_tensor_set_grad_home(g.w, home));
    assert_int_equal(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.w, 1), MS_ERROR_ARGUMENT);
    assert_message(engine, "a parameter of a wrapped model");
    OK(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1));
    assert_values(home, 100, 100);
    OK(ms_backward_rest(engine, &g.loss, 1));
    assert_ptr_equal(ms_tensor_grad(g.w), home);
    assert_values(home, 31, -26);
    OK(ms_tensor_set_grad_home(g.w, NULL));
    ms_tensor_release(home);
    drop_graph(&g);
    ms_engine_free(engine);
}

static void a_deep_graph_needs_no_stack(void **state)
{
    (void)state;
    const int depth = ranges_are_short() ? 50000 : 200000;
    ms_engine *engine = make_engine(NULL);
    for (int dropped = 0; dropped < 2; dropped++) {
        ms_tensor *x = NULL, *w = NULL, *now = NULL, *loss = NULL;
        OK(vector(engine, 1, 2, true, &x));
        OK(vector(engine, 1, 1, true, &w));
        OK(apply(engine, &ms_op_mul, x, w, &now));
        for (int i = 0; i < depth; i++) {
            ms_tensor *next = NULL;
            OK(apply(engine, &ms_op_neg, now, NULL, &next));
            ms_tensor_release(now);
            now = next;
        }
        OK(total(engine, now, &loss));
        ms_tensor_release(now);
        OK(ms_backward_inputs(engine, &loss, NULL, 1, &x, 1));
        assert_gradient(x, 1, 1);
        if (!dropped) OK(ms_backward_rest(engine, &loss, 1));
        ms_tensor_release(loss);
        if (!dropped) assert_gradient(w, 1, 2);
        assert_false(ms_backward_awaits_rest(engine) || ms_tensor_awaits_rest(w));
        ms_tensor_release(x);
        ms_tensor_release(w);
    }
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------ refused */

static void what_is_no_input_is_named(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *plain = NULL, *other = NULL, *leaf = NULL;
    graph g = make_graph(engine);
    OK(vector(engine, 1, 1, false, &plain));
    OK(vector(engine, 1, 1, true, &other));
    struct {
        ms_tensor *input;
        const char *says;
    } cases[] = { { g.product, "inputs[1], a tensor [2] f32, is not a leaf but the result of mul" },
                  { plain, "does not require a gradient" },
                  { other, "the tensor does not depend on inputs[1]" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(ms_backward_inputs(engine, &g.loss, NULL, 1, &cases[i].input, 1),
                         MS_ERROR_ARGUMENT);
        if (i != 0) assert_message(engine, cases[i].says);
        else assert_message(engine, "is not a leaf but the result of mul");
    }
    assert_int_equal(ms_backward_inputs(engine, &g.loss, NULL, 1, NULL, 0), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_backward_inputs(engine, &plain, NULL, 1, &g.x, 1), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_backward_inputs(engine, &g.x, NULL, 1, &g.x, 1), MS_ERROR_ARGUMENT);
    assert_message(engine, "the tensor is a leaf");
    ms_tensor *both[] = { g.x, other };
    assert_int_equal(ms_backward_inputs(engine, &g.loss, NULL, 1, both, 2), MS_ERROR_ARGUMENT);
    assert_message(engine, "inputs[2]");
    /* Nothing has changed: the graph serves a backward. */
    OK(ms_backward(engine, &g.loss, NULL, 1, false));
    assert_gradient(g.w, 31, -26);
    release((ms_tensor *[]){ plain, other, leaf }, 3);
    drop_graph(&g);
    ms_engine_free(engine);
}

static void parts_out_of_order_are_refused(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *more = NULL, *sum = NULL;
    graph g = make_graph(engine);
    assert_int_equal(ms_backward_rest(engine, &g.loss, 1), MS_ERROR_STATE);
    assert_message(engine, "no backward with inputs came before");
    OK(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1));
    assert_int_equal(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1), MS_ERROR_STATE);
    assert_message(engine, "waits for its rest");
    assert_int_equal(ms_backward(engine, &g.loss, NULL, 1, false), MS_ERROR_STATE);
    assert_int_equal(ms_backward(engine, &g.loss, NULL, 1, true), MS_ERROR_STATE);
    assert_message(engine, "waits for its rest");
    /* Another root of the same graph, and one that leads to it. */
    assert_int_equal(ms_backward_rest(engine, &g.product, 1), MS_ERROR_STATE);
    assert_message(engine, "did not begin at this tensor");
    ms_tensor *roots[] = { g.loss, g.product };
    assert_int_equal(ms_backward_rest(engine, roots, 2), MS_ERROR_STATE);
    OK(apply(engine, &ms_op_neg, g.product, NULL, &more));
    OK(total(engine, more, &sum));
    assert_int_equal(ms_backward(engine, &sum, NULL, 1, false), MS_ERROR_STATE);
    OK(ms_backward_rest(engine, &g.loss, 1));
    assert_gradient(g.w, 31, -26);
    assert_int_equal(ms_backward_rest(engine, &g.loss, 1), MS_ERROR_STATE);
    assert_message(engine, "or its rest has run");
    assert_int_equal(ms_backward(engine, &g.loss, NULL, 1, false), MS_ERROR_STATE);
    assert_message(engine, "was freed by the backward");
    release((ms_tensor *[]){ more, sum }, 2);
    drop_graph(&g);
    ms_engine_free(engine);
}

/* A tensor [1, 1]. */
static ms_status one_number(ms_engine *engine, float value, bool requires_grad, ms_tensor **out)
{
    const int64_t shape[] = { 1, 1 };
    ms_status status = ms_tensor_new(engine, MS_F32, 2, shape, out);
    if (!status) status = ms_tensor_write(*out, &value, sizeof value);
    return status ? status : ms_tensor_set_requires_grad(*out, requires_grad);
}

/* A product of matrices, whose second gradient is computed in the rest. */
typedef struct matrices {
    ms_tensor *x, *w, *result, *given;
} matrices;

static matrices make_product(ms_engine *engine)
{
    matrices p = { 0 };
    OK(one_number(engine, 3, true, &p.x));
    OK(one_number(engine, 5, true, &p.w));
    OK(one_number(engine, 2, false, &p.given));
    OK(apply(engine, &ms_op_matmul, p.x, p.w, &p.result));
    return p;
}

static void drop_product(matrices *p) { release(&p->x, 4); }

static ms_status write_anew(ms_engine *engine, ms_tensor *tensor)
{
    bool recording = ms_engine_set_recording(engine, false);
    ms_status status = multiply_in_place(engine, tensor, tensor);
    ms_engine_set_recording(engine, recording);
    return status;
}

/* A write of what forward saved for the rest, and of the gradient that came from outside, also
 * where it is itself the gradient that is kept: that of a term of a sum. */
static void writes_between_the_parts_are_noticed(void **state)
{
    (void)state;
    static const char *const says[] = { "that was written in place since, by mul",
                                        "was written since the backward with inputs, by mul",
                                        "was written since the backward with inputs, by mul" };
    for (int what = 0; what < 3; what++) {
        ms_engine *engine = make_engine(NULL);
        matrices p = make_product(engine);
        graph g = make_graph(engine);
        ms_tensor *given = NULL;
        OK(vector(engine, 1, 1, false, &given));
        if (what < 2) OK(ms_backward_inputs(engine, &p.result, &p.given, 1, &p.x, 1));
        else OK(ms_backward_inputs(engine, &g.sum, &given, 1, &g.x, 1));
        OK(write_anew(engine, what == 0 ? p.x : what == 1 ? p.given : given));
        assert_int_equal(ms_backward_rest(engine, what < 2 ? &p.result : &g.sum, 1),
                         MS_ERROR_STATE);
        assert_message(engine, says[what]);
        assert_null(ms_tensor_grad(p.w));
        assert_null(ms_tensor_grad(g.w));
        ms_tensor_release(given);
        drop_product(&p);
        drop_graph(&g);
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
    }
}

/* Elementwise operators have computed all in the first part, and hold nothing that they saved. */
static void what_the_rest_does_not_read_may_be_written(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    graph g = make_graph(engine);
    ms_tensor *given = NULL;
    OK(vector(engine, 1, 1, false, &given));
    OK(ms_backward_inputs(engine, &g.again, &given, 1, &g.x, 1));
    assert_gradient(g.x, 25, 49);
    OK(write_anew(engine, g.x));
    OK(write_anew(engine, given));
    OK(ms_backward_rest(engine, &g.again, 1));
    assert_gradient(g.w, 31, -26);
    assert_gradient(g.b, 5, 7);
    ms_tensor_release(given);
    drop_graph(&g);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

static ms_status doubled(void *user, ms_tensor *const *inputs, uint32_t input_count,
                         ms_tensor **outputs, uint32_t *count)
{
    (void)input_count;
    *count = 1;
    return apply(user, &ms_op_add, inputs[0], inputs[0], outputs);
}

static void what_is_recomputed_runs_in_the_rest_only(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    ms_tensor *x = NULL, *w = NULL, *twice = NULL, *product = NULL, *loss = NULL;
    uint32_t count = 0;
    OK(vector(engine, 3, -2, true, &x));
    OK(vector(engine, 5, 7, true, &w));
    OK(ms_recompute(engine, doubled, engine, NULL, NULL, &w, 1, &twice, &count));
    OK(apply(engine, &ms_op_mul, x, twice, &product));
    OK(total(engine, product, &loss));
    assert_int_equal(ms_backward_inputs(engine, &loss, NULL, 1, &w, 1), MS_ERROR_STATE);
    assert_message(engine, "recompute (at ");
    assert_null(ms_tensor_grad(w));
    OK(ms_backward_inputs(engine, &loss, NULL, 1, &x, 1));
    assert_gradient(x, 10, 14);
    OK(ms_backward_rest(engine, &loss, 1));
    assert_gradient(w, 6, -4);
    release((ms_tensor *[]){ x, w, twice, product, loss }, 5);
    ms_engine_free(engine);
}

static ms_status refuse(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)user, (void)replacement;
    return ms_engine_fail(ms_tensor_engine(gradient), MS_ERROR_SCRIPT, "the hook says no");
}

static ms_status parts_inside(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)gradient, (void)replacement;
    graph *g = user;
    return ms_backward_inputs(ms_tensor_engine(g->loss), &g->loss, NULL, 1, &g->x, 1);
}

static void a_part_that_fails_loses_the_graph(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    uint64_t id;
    for (int in_rest = 0; in_rest < 2; in_rest++) {
        graph g = make_graph(engine);
        OK(ms_tensor_on_gradient(in_rest ? g.b : g.product, refuse, NULL, NULL, &id));
        assert_int_equal(ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1),
                         in_rest ? MS_OK : MS_ERROR_SCRIPT);
        assert_int_equal(ms_backward_rest(engine, &g.loss, 1),
                         in_rest ? MS_ERROR_SCRIPT : MS_ERROR_STATE);
        assert_false(ms_backward_awaits_rest(engine) || ms_tensor_awaits_rest(g.w));
        assert_int_equal(ms_backward(engine, &g.loss, NULL, 1, false), MS_ERROR_STATE);
        drop_graph(&g);
    }
    assert_int_equal(ms_engine_memory(engine).live, 0);
    graph outer = make_graph(engine), own = make_graph(engine);
    OK(ms_tensor_on_gradient(outer.product, parts_inside, &own, NULL, &id));
    assert_int_equal(ms_backward(engine, &outer.loss, NULL, 1, false), MS_ERROR_STATE);
    assert_message(engine, "not inside of a backward");
    drop_graph(&outer);
    drop_graph(&own);
    ms_engine_free(engine);
}

static ms_status do_nothing(void *user)
{
    (void)user;
    return MS_OK;
}

static ms_status wait_to_write(void *user, ms_tensor *leaf)
{
    return ms_backward_when_unread(user, &leaf, 1, do_nothing, NULL, NULL);
}

/* The rest reads x, for the gradient of w. */
static void a_step_that_would_wait_for_the_rest_is_refused(void **state)
{
    (void)state;
    ms_engine *engine = make_engine(NULL);
    uint64_t id;
    matrices p = make_product(engine);
    OK(ms_tensor_on_accumulated(p.x, wait_to_write, engine, NULL, &id));
    assert_int_equal(ms_backward_inputs(engine, &p.result, &p.given, 1, &p.x, 1), MS_ERROR_STATE);
    assert_message(engine, "a step in backward of an input");
    drop_product(&p);
    ms_engine_free(engine);
}

/* -------------------------------------------------------------------- graphs */

#define SIDE 4
enum { INPUTS = 2, MATRICES = 4, VECTORS = 3, LEAVES = INPUTS + MATRICES + VECTORS, NODES = 14 };

typedef struct maker {
    ms_engine *engine;
    uint64_t state;
    ms_tensor *leaves[LEAVES];
    ms_tensor *made[NODES + LEAVES]; /* matrices */
    uint32_t count;
} maker;

static uint32_t draw(maker *m, uint32_t n)
{
    m->state = m->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(m->state >> 33) % n;
}

static ms_tensor *any(maker *m) { return m->made[draw(m, m->count)]; }
static ms_tensor *matrix(maker *m) { return m->leaves[INPUTS + draw(m, MATRICES)]; }
static ms_tensor *row(maker *m) { return m->leaves[INPUTS + MATRICES + draw(m, VECTORS)]; }

/* [4, 4] of two tensors: the first half of the one over the second half of the other. */
static ms_status cut(ms_engine *engine, ms_tensor *a, ms_tensor *b, ms_tensor **out)
{
    ms_tensor *parts[2] = { NULL };
    ms_status status = MS_OK;
    for (int i = 0; i < 2 && !status; i++) {
        ms_attributes attributes = { .dim = { .a = 0, .start = 2 * i, .length = 2 } };
        status = ms_apply(engine, &ms_op_narrow, &attributes, false, i ? &b : &a, 1, &parts[i], 1);
    }
    ms_attributes first = { .dim = { .a = 0 } };
    if (!status) status = ms_apply(engine, &ms_op_cat, &first, false, parts, 2, out, 1);
    release(parts, 2);
    return status;
}

static ms_status attend(ms_engine *engine, ms_tensor **qkv, ms_tensor **out)
{
    ms_attributes heads = { .shape = { .dims = 4, .sizes = { 1, 1, SIDE, SIDE } } },
                  back = { .shape = { .dims = 2, .sizes = { SIDE, SIDE } } }, plain = { 0 };
    ms_tensor *views[3] = { NULL }, *result = NULL;
    ms_status status = MS_OK;
    for (int i = 0; i < 3 && !status; i++)
        status = ms_apply(engine, &ms_op_reshape, &heads, false, &qkv[i], 1, &views[i], 1);
    if (!status) status = ms_apply(engine, &ms_op_attention, &plain, false, views, 3, &result, 1);
    if (!status) status = ms_apply(engine, &ms_op_reshape, &back, false, &result, 1, out, 1);
    release(views, 3);
    ms_tensor_release(result);
    return status;
}

/* One more matrix of those that there are. */
static ms_status grow(maker *m, ms_tensor **out)
{
    ms_engine *engine = m->engine;
    ms_tensor *a = any(m), *b = any(m), *w = matrix(m), *v = matrix(m), *r = row(m), *s = row(m);
    ms_attributes attributes = { 0 };
    switch (draw(m, 12)) {
    case 0: return apply(engine, &ms_op_add, a, b, out);
    case 1: return apply(engine, &ms_op_mul, a, b, out);
    case 2: return apply(engine, &ms_op_add, a, r, out);
    case 3: return apply(engine, &ms_op_matmul, a, b, out);
    case 4: return apply(engine, &ms_op_matmul, w, a, out);
    case 5:
        return ms_apply(engine, &ms_op_linear, &attributes, false, (ms_tensor *[]){ a, w, r }, 3,
                        out, 1);
    case 6:
        attributes.linear.activation = MS_ACTIVATION_GELU;
        return ms_apply(engine, &ms_op_linear_t, &attributes, false, (ms_tensor *[]){ a, w, r }, 3,
                        out, 1);
    case 7:
        return ms_apply(engine, draw(m, 2) ? &ms_op_mlp : &ms_op_mlp_t, &attributes, false,
                        (ms_tensor *[]){ a, w, r, v, s }, 5, out, 1);
    case 8:
        attributes.norm.eps = 1e-5;
        return ms_apply(engine, &ms_op_layer_norm, &attributes, false, (ms_tensor *[]){ a, r, s },
                        3, out, 1);
    case 9: return cut(engine, a, b, out);
    case 10: return attend(engine, (ms_tensor *[]){ a, b, any(m) }, out);
    default: return apply(engine, &ms_op_relu, a, NULL, out);
    }
}

/* Leaves and a loss that are functions of the seed. */
static ms_tensor *make_random(maker *m, ms_engine *engine, uint32_t seed)
{
    const int64_t square[] = { SIDE, SIDE };
    *m = (maker){ .engine = engine, .state = seed * 2654435761u + 1 };
    for (uint32_t i = 0; i < LEAVES; i++) {
        float numbers[SIDE * SIDE];
        bool is_row = i >= INPUTS + MATRICES;
        for (int k = 0; k < SIDE * SIDE; k++) numbers[k] = (float)draw(m, 2001) / 1000.0f - 1.0f;
        OK(ms_tensor_new(engine, MS_F32, is_row ? 1 : 2, square, &m->leaves[i]));
        OK(ms_tensor_write(m->leaves[i], numbers, (is_row ? SIDE : SIDE * SIDE) * sizeof(float)));
        OK(ms_tensor_set_requires_grad(m->leaves[i], true));
    }
    for (uint32_t i = 0; i < INPUTS; i++) m->made[m->count++] = ms_tensor_retain(m->leaves[i]);
    if (draw(m, 2)) m->made[m->count++] = ms_tensor_retain(matrix(m));
    for (uint32_t n = 4 + draw(m, NODES - 4); n > 0; n--, m->count++)
        OK(grow(m, &m->made[m->count]));
    ms_tensor *loss = NULL;
    OK(total(engine, m->made[m->count - 1], &loss));
    release(m->made, (int)m->count);
    return loss;
}

typedef struct gradients {
    float numbers[LEAVES][SIDE * SIDE];
    bool there[LEAVES];
} gradients;

static void read_gradients(maker *m, gradients *out)
{
    memset(out, 0, sizeof *out);
    for (uint32_t i = 0; i < LEAVES; i++) {
        ms_tensor *gradient = ms_tensor_grad(m->leaves[i]);
        out->there[i] = gradient != NULL;
        if (gradient) OK(ms_tensor_read(gradient, out->numbers[i], ms_tensor_bytes(gradient)));
    }
}

/* The leaves whose gradients come first: mostly inputs, sometimes parameters; of those that the
 * loss depends on. */
static uint32_t choose_inputs(maker *m, const bool *reached, ms_tensor **chosen)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < LEAVES; i++) {
        bool wanted = draw(m, i < INPUTS ? 2 : 8) == 0;
        if (reached[i] && wanted) chosen[count++] = m->leaves[i];
    }
    for (uint32_t i = 0; i < LEAVES && count == 0; i++)
        if (reached[i]) chosen[count++] = m->leaves[i];
    return count;
}

static void random_graphs_have_the_bits_of_one_backward(void **state)
{
    (void)state;
    uint32_t seeds = ranges_are_long() ? 5000 : ranges_are_short() ? 60 : 400;
    ms_engine *engine = make_engine(NULL);
    for (uint32_t seed = 1; seed <= seeds; seed++) {
        gradients whole, first, both;
        maker m;
        ms_tensor *loss = make_random(&m, engine, seed), *inputs[LEAVES];
        OK(ms_backward(engine, &loss, NULL, 1, false));
        read_gradients(&m, &whole);
        ms_tensor_release(loss);
        release(m.leaves, LEAVES);
        loss = make_random(&m, engine, seed);
        uint32_t count = choose_inputs(&m, whole.there, inputs);
        OK(ms_backward_inputs(engine, &loss, NULL, 1, inputs, count));
        read_gradients(&m, &first);
        OK(ms_backward_rest(engine, &loss, 1));
        read_gradients(&m, &both);
        if (memcmp(&both, &whole, sizeof both) != 0) fail_msg("seed %u: other bits", seed);
        for (uint32_t i = 0; i < LEAVES; i++) {
            bool is_input = false;
            for (uint32_t k = 0; k < count; k++) is_input |= inputs[k] == m.leaves[i];
            if (first.there[i] != is_input) fail_msg("seed %u: leaf %u", seed, i);
            if (is_input)
                assert_memory_equal(first.numbers[i], whole.numbers[i], sizeof *whole.numbers);
        }
        ms_tensor_release(loss);
        release(m.leaves, LEAVES);
        assert_int_equal(ms_engine_memory(engine).live, 0);
    }
    ms_engine_free(engine);
}

/* -------------------------------------------------------------------- layers */

enum { ROWS = 32, IN = 48, HIDDEN = 64, OUT = 16 };

/* A layer, or two with gelu between them, whose parts share work, and what takes that. */
typedef struct layer {
    const ms_op *op;
    bool gelu;
    ms_tensor *leaves[5]; /* x, weight, bias; or as mlp takes them */
    uint32_t count;
} layer;

/* Shapes of the leaves of each operator. */
static const int64_t mlp_shapes[5][2] = {
    { ROWS, IN }, { OUT, HIDDEN }, { OUT }, { HIDDEN, IN }, { HIDDEN }
};

static ms_tensor *make_layer(ms_engine *engine, layer *l)
{
    maker m = { .engine = engine, .state = 5 };
    ms_tensor *y = NULL, *weights = NULL, *product = NULL, *loss = NULL;
    ms_attributes attributes = { 0 };
    bool is_mlp = l->op == &ms_op_mlp, turned = l->op == &ms_op_linear_t;
    static float numbers[HIDDEN * HIDDEN];
    l->count = is_mlp ? 5 : 3;
    for (uint32_t i = 0; i < l->count; i++) {
        int64_t shape[2];
        memcpy(shape, mlp_shapes[is_mlp || i == 0 ? i : i + 2], sizeof shape);
        if (turned && i == 1) memcpy(shape, (int64_t[]){ IN, HIDDEN }, sizeof shape);
        uint32_t dims = shape[1] ? 2 : 1;
        for (int k = 0; k < HIDDEN * HIDDEN; k++)
            numbers[k] = (float)draw(&m, 2001) / 1000.0f - 1.0f;
        OK(ms_tensor_new(engine, MS_F32, dims, shape, &l->leaves[i]));
        OK(ms_tensor_write(l->leaves[i], numbers, ms_tensor_bytes(l->leaves[i])));
        OK(ms_tensor_set_requires_grad(l->leaves[i], true));
    }
    if (l->gelu) attributes.linear.activation = MS_ACTIVATION_GELU;
    OK(ms_apply(engine, l->op, &attributes, false, l->leaves, l->count, &y, 1));
    for (int k = 0; k < HIDDEN * HIDDEN; k++) numbers[k] = (float)draw(&m, 2001) / 1000.0f - 1.0f;
    OK(ms_tensor_new(engine, MS_F32, ms_tensor_dims(y), ms_tensor_shape(y), &weights));
    OK(ms_tensor_write(weights, numbers, ms_tensor_bytes(weights)));
    OK(apply(engine, &ms_op_mul, y, weights, &product));
    OK(total(engine, product, &loss));
    release((ms_tensor *[]){ y, weights, product }, 3);
    return loss;
}

static void take_gradients(layer *l, float *out)
{
    memset(out, 0, 5 * sizeof(float) * HIDDEN * HIDDEN);
    for (uint32_t i = 0; i < l->count; i++) {
        ms_tensor *gradient = ms_tensor_grad(l->leaves[i]);
        if (gradient)
            OK(ms_tensor_read(gradient, out + i * HIDDEN * HIDDEN, ms_tensor_bytes(gradient)));
    }
    release(l->leaves, (int)l->count);
}

/* Whatever of a layer's gradients is made first: its input's, or those of its parameters. On a GPU
 * products of 16 bits make more than themselves. */
static void layers_have_the_bits_of_one_backward(void **state)
{
    (void)state;
    static float whole[5 * HIDDEN * HIDDEN], parts[5 * HIDDEN * HIDDEN];
    ms_engine *engine = make_engine(NULL);
    const ms_fp8 in_8_bits = device_is_cuda() ? MS_FP8_ON : MS_FP8_EMULATED;
    const layer kinds[] = { { &ms_op_linear, .gelu = false },
                            { &ms_op_linear, .gelu = true },
                            { &ms_op_linear_t, .gelu = true },
                            { &ms_op_mlp, .gelu = false } };
    for (int precision = 0; precision < 3; precision++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            layer l = kinds[k];
            ms_engine_set_autocast(engine, precision ? MS_BF16 : MS_F32);
            ms_engine_set_fp8(engine, precision == 2 ? in_8_bits : MS_FP8_OFF);
            ms_tensor *loss = make_layer(engine, &l);
            OK(ms_backward(engine, &loss, NULL, 1, false));
            ms_tensor_release(loss);
            take_gradients(&l, whole);
            for (uint32_t chosen = 1; chosen + 1 < 1u << l.count; chosen++) {
                ms_tensor *inputs[5];
                uint32_t count = 0;
                loss = make_layer(engine, &l);
                for (uint32_t i = 0; i < l.count; i++)
                    if (chosen >> i & 1) inputs[count++] = l.leaves[i];
                OK(ms_backward_inputs(engine, &loss, NULL, 1, inputs, count));
                for (uint32_t i = 0; i < l.count; i++)
                    assert_int_equal(ms_tensor_grad(l.leaves[i]) != NULL, chosen >> i & 1);
                OK(ms_backward_rest(engine, &loss, 1));
                ms_tensor_release(loss);
                take_gradients(&l, parts);
                if (memcmp(parts, whole, sizeof whole) != 0)
                    fail_msg("%s, precision %d, inputs %x: other bits", kinds[k].op->name,
                             precision, chosen);
            }
        }
    ms_engine_set_autocast(engine, MS_F32);
    ms_engine_set_fp8(engine, MS_FP8_OFF);
    ms_engine_free(engine);
}

/* ----------------------------------------------------------------- failures */

/* Both parts, or only the first one. */
static ms_status program(ms_engine *engine, bool rest)
{
    graph g = { 0 };
    ms_status status = vector(engine, 3, -2, true, &g.x);
    if (!status) status = vector(engine, 5, 7, true, &g.w);
    if (!status) status = vector(engine, 1, 2, true, &g.b);
    if (!status) status = build(engine, &g);
    if (!status) status = ms_backward_inputs(engine, &g.loss, NULL, 1, &g.x, 1);
    if (!status && rest) status = ms_backward_rest(engine, &g.loss, 1);
    drop_results(&g);
    if (!status && rest) assert_gradient(g.w, 31, -26);
    drop_graph(&g);
    return status;
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    for (int rest = 0; rest < 2; rest++)
        for (long n = 1;; n++) {
            fault_os fault;
            fault_os_init(&fault);
            ms_engine *engine = make_engine(&fault.table);
            long limit = atomic_load(&fault.calls) + n;
            atomic_store(&fault.fail_at, limit);
            ms_status status = program(engine, rest);
            bool reached = atomic_load(&fault.calls) >= limit;
            atomic_store(&fault.fail_at, 0);
            if (!reached) assert_int_equal(status, MS_OK);
            assert_int_equal(ms_engine_memory(engine).live, 0);
            assert_false(ms_backward_awaits_rest(engine));
            if (device_is_cuda()) (void)ms_engine_sync(engine);
            assert_int_equal(program(engine, rest), MS_OK);
            ms_engine_free(engine);
            assert_int_equal(atomic_load(&fault.live), 0);
            if (!reached) break;
            assert_true(n < 500);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(inputs_come_first_and_all_others_in_the_rest),
        cmocka_unit_test(parts_of_several_graphs_take_turns),
        cmocka_unit_test(hooks_run_once_in_the_part_of_their_gradient),
        cmocka_unit_test(marks_of_scaled_gradients_hold_for_the_rest),
        cmocka_unit_test(homes_get_the_gradients_of_the_rest),
        cmocka_unit_test(a_deep_graph_needs_no_stack),
        cmocka_unit_test(what_is_no_input_is_named),
        cmocka_unit_test(parts_out_of_order_are_refused),
        cmocka_unit_test(writes_between_the_parts_are_noticed),
        cmocka_unit_test(what_the_rest_does_not_read_may_be_written),
        cmocka_unit_test(what_is_recomputed_runs_in_the_rest_only),
        cmocka_unit_test(a_part_that_fails_loses_the_graph),
        cmocka_unit_test(a_step_that_would_wait_for_the_rest_is_refused),
        cmocka_unit_test(random_graphs_have_the_bits_of_one_backward),
        cmocka_unit_test(layers_have_the_bits_of_one_backward),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
