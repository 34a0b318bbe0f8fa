/* grad_homes.c: gradients that are written directly to their homes (destination buffers): the same
 * numbers as without a home, and no copy. ctest: poisoned late cuda */
#include "moonshard/grad.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#include "late_device.h"

#define OK(call) assert_int_equal(call, MS_OK)

enum { WIDTH = 8, NUMBERS = WIDTH * WIDTH };

static ms_engine *make_engine(void)
{
    ms_engine_options options = { .own_device = late_device(NULL),
                                  .threads = 2,
                                  .strict = true,
                                  .memory_bytes = 512 << 20,
                                  .seed = 3 };
    ms_engine *engine = NULL;
    OK(ms_engine_new(&options, NULL, &engine));
    return engine;
}

/* Numbers between -1 and 1 that depend on `seed`. */
static ms_tensor *numbers(ms_engine *engine, uint32_t dims, const int64_t *shape, uint32_t seed)
{
    float values[NUMBERS];
    ms_tensor *made = NULL;
    OK(ms_tensor_new(engine, MS_F32, dims, shape, &made));
    size_t count = (size_t)ms_tensor_count(made);
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        values[i] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    OK(ms_tensor_write(made, values, count * sizeof *values));
    return made;
}

static ms_tensor *square(ms_engine *engine, uint32_t seed)
{
    return numbers(engine, 2, (int64_t[]){ WIDTH, WIDTH }, seed);
}

static ms_tensor *apply(ms_engine *engine, const ms_op *op, ms_tensor *a, ms_tensor *b,
                        ms_tensor *c)
{
    ms_tensor *inputs[] = { a, b, c }, *out = NULL;
    ms_attributes attributes;
    memset(&attributes, 0, sizeof attributes);
    if (op == &ms_op_sum) attributes.reduce.all = true;
    if (op == &ms_op_layer_norm) attributes.norm.eps = 1e-5;
    uint32_t count = b ? 2 : 1;
    OK(ms_apply(engine, op, &attributes, false, inputs, c ? 3 : count, &out, 1));
    return out;
}

/* The tensors of each scene: a weight w, a second parameter v, and former gradients of both (that
 * of v as one row). */
typedef struct scene {
    ms_engine *engine;
    ms_tensor *w, *v, *x, *old, *old_row;
} scene;

/* Sum of a and b, which it releases. */
static ms_tensor *joined(const scene *s, ms_tensor *a, ms_tensor *b)
{
    ms_tensor *sum = apply(s->engine, &ms_op_add, a, b, NULL);
    ms_tensor_release(a);
    ms_tensor_release(b);
    return sum;
}

static ms_tensor *used_once(const scene *s)
{
    return apply(s->engine, &ms_op_linear, s->x, s->w, NULL);
}
static ms_tensor *turned(const scene *s)
{
    return apply(s->engine, &ms_op_linear_t, s->x, s->w, NULL);
}
static ms_tensor *multiplied(const scene *s)
{
    return apply(s->engine, &ms_op_matmul, s->x, s->w, NULL);
}
static ms_tensor *multiplied_with_itself(const scene *s)
{
    return apply(s->engine, &ms_op_matmul, s->w, s->w, NULL);
}

/* The sum of the results of `early` and of `late`; backward runs through `late` first. */
static ms_tensor *both(const scene *s, ms_tensor *(*early)(const scene *s),
                       ms_tensor *(*late)(const scene *s))
{
    ms_tensor *first = early(s);
    return joined(s, first, late(s));
}

static ms_tensor *used_twice(const scene *s) { return both(s, used_once, turned); }
static ms_tensor *with_itself(const scene *s)
{
    return apply(s->engine, &ms_op_linear, s->w, s->w, NULL);
}
static ms_tensor *times_x(const scene *s) { return apply(s->engine, &ms_op_mul, s->w, s->x, NULL); }
static ms_tensor *times_old(const scene *s)
{
    return apply(s->engine, &ms_op_mul, s->w, s->old, NULL);
}
static ms_tensor *by_another_way(const scene *s) { return both(s, times_x, used_once); }
static ms_tensor *of_its_old_gradient(const scene *s)
{
    return apply(s->engine, &ms_op_linear, s->old, s->w, NULL);
}
static ms_tensor *old_gradient_later(const scene *s) { return both(s, times_old, used_once); }
static ms_tensor *old_gradient_twice(const scene *s)
{
    return both(s, of_its_old_gradient, old_gradient_later);
}

/* Rows of the table w, one of them twice. */
static ms_tensor *looked_up(const scene *s)
{
    const int64_t ids[] = { 3, 1, 3, 7 }, four[] = { 4 };
    ms_tensor *which = NULL;
    OK(ms_tensor_new(s->engine, MS_I64, 1, four, &which));
    OK(ms_tensor_write(which, ids, sizeof ids));
    ms_tensor *rows = apply(s->engine, &ms_op_embedding, which, s->w, NULL);
    ms_tensor_release(which);
    return rows;
}

/* The table is the head as well, as in many language models. */
static ms_tensor *tied(const scene *s)
{
    ms_tensor *rows = looked_up(s), *out = apply(s->engine, &ms_op_linear, rows, s->w, NULL);
    ms_tensor_release(rows);
    return out;
}

static ms_tensor *normed(const scene *s)
{
    ms_tensor *y = apply(s->engine, &ms_op_layer_norm, s->x, s->v, NULL),
              *out = apply(s->engine, &ms_op_linear, y, s->w, s->v);
    ms_tensor_release(y);
    return out;
}

static ms_tensor *weight_and_bias_in_one(const scene *s)
{
    return apply(s->engine, &ms_op_layer_norm, s->x, s->v, s->v);
}
static ms_tensor *of_its_bias_old_gradient(const scene *s)
{
    return apply(s->engine, &ms_op_linear, s->old_row, s->w, s->v);
}

static ms_status run_inside(void *user, ms_tensor *const *inputs, uint32_t count,
                            ms_tensor **outputs, uint32_t *made)
{
    ms_tensor *pair[] = { inputs[0], user };
    (void)count;
    *made = 1;
    return ms_apply(ms_tensor_engine(inputs[0]), &ms_op_linear, NULL, false, pair, 2, outputs, 1);
}

static ms_tensor *recomputed_with(const scene *s, ms_tensor *x)
{
    ms_tensor *out = NULL;
    uint32_t made = 0;
    OK(ms_recompute(s->engine, run_inside, s->w, NULL, NULL, &x, 1, &out, &made));
    return out;
}

static ms_tensor *recomputed(const scene *s) { return recomputed_with(s, s->x); }
static ms_tensor *recomputed_old(const scene *s) { return recomputed_with(s, s->old); }
static ms_tensor *old_gradient_inside(const scene *s) { return both(s, recomputed_old, used_once); }
static ms_tensor *old_gradient_behind_it(const scene *s) { return both(s, times_old, recomputed); }
static ms_tensor *inside_and_outside(const scene *s) { return both(s, recomputed, by_another_way); }

enum { PASSES = 3 };
typedef struct outcome {
    float w[PASSES][NUMBERS], v[PASSES][WIDTH];
} outcome;

/* Two passes without gradients and one that adds to the gradients. Returns the gradients after
 * each, with or without homes. The homes are parts of one storage. */
static void play(ms_tensor *(*play_scene)(const scene *s), bool at_home, outcome *out)
{
    ms_engine *engine = make_engine();
    scene s = { .engine = engine,
                .w = square(engine, 1),
                .v = numbers(engine, 1, (int64_t[]){ WIDTH }, 2),
                .x = square(engine, 3) };
    ms_tensor *bucket = NULL, *homes[2] = { NULL };
    OK(ms_tensor_new(engine, MS_F32, 2, (int64_t[]){ WIDTH + 1, WIDTH }, &bucket));
    OK(ms_tensor_window(bucket, 2, (int64_t[]){ WIDTH, WIDTH }, (int64_t[]){ WIDTH, 1 }, 0,
                        &homes[0]));
    OK(ms_tensor_window(bucket, 1, (int64_t[]){ WIDTH }, (int64_t[]){ 1 }, NUMBERS, &homes[1]));
    ms_tensor *leaves[] = { s.w, s.v },
              *before[] = { square(engine, 4), numbers(engine, 1, (int64_t[]){ WIDTH }, 5) };
    for (int i = 0; i < 2; i++) {
        float values[NUMBERS];
        size_t bytes = (size_t)ms_tensor_bytes(before[i]);
        OK(ms_tensor_read(before[i], values, bytes));
        OK(ms_tensor_write(homes[i], values, bytes));
        OK(ms_tensor_set_requires_grad(leaves[i], true));
        if (at_home) OK(ms_tensor_set_grad_home(leaves[i], homes[i]));
    }
    memset(out, 0, sizeof *out);
    for (int pass = 0; pass < PASSES; pass++) {
        /* From the second pass on the old gradient is the one before: with homes, the very memory
         * that the new one goes to. */
        ms_tensor *old[2];
        for (int i = 0; i < 2; i++) {
            old[i] = ms_tensor_grad(leaves[i]);
            if (!old[i]) old[i] = at_home ? homes[i] : before[i];
        }
        OK(ms_tensor_window(old[0], 2, (int64_t[]){ WIDTH, WIDTH }, (int64_t[]){ WIDTH, 1 }, 0,
                            &s.old));
        OK(ms_tensor_window(old[1], 2, (int64_t[]){ 1, WIDTH }, (int64_t[]){ WIDTH, 1 }, 0,
                            &s.old_row));
        for (int i = 0; i < 2 && pass < 2; i++) OK(ms_tensor_set_grad(leaves[i], NULL));
        ms_tensor *y = play_scene(&s), *curved = apply(engine, &ms_op_mul, y, y, NULL),
                  *loss = apply(engine, &ms_op_sum, curved, NULL, NULL);
        OK(ms_backward(engine, &loss, NULL, 1, false));
        for (int i = 0; i < 2; i++) {
            ms_tensor *grad = ms_tensor_grad(leaves[i]);
            if (!grad) continue;
            if (at_home) assert_ptr_equal(grad, homes[i]);
            OK(ms_tensor_read(grad, i ? out->v[pass] : out->w[pass],
                              (size_t)ms_tensor_bytes(grad)));
        }
        ms_tensor *all[] = { y, curved, loss, s.old, s.old_row };
        for (int i = 0; i < 5; i++) ms_tensor_release(all[i]);
    }
    ms_tensor *all[] = { s.w, s.v, s.x, bucket, homes[0], homes[1], before[0], before[1] };
    for (int i = 0; i < 8; i++) ms_tensor_release(all[i]);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

static void a_home_changes_no_bit(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        ms_tensor *(*play)(const scene *s);
    } scenes[] = {
        { "used once", used_once },
        { "turned", turned },
        { "used twice", used_twice },
        { "with itself", with_itself },
        { "multiplied", multiplied },
        { "multiplied with itself", multiplied_with_itself },
        { "by another way", by_another_way },
        { "of its old gradient", of_its_old_gradient },
        { "old gradient later", old_gradient_later },
        { "old gradient twice", old_gradient_twice },
        { "tied", tied },
        { "looked up", looked_up },
        { "normed", normed },
        { "recomputed", recomputed },
        { "inside and outside", inside_and_outside },
        { "old gradient inside", old_gradient_inside },
        { "old gradient behind what is recomputed", old_gradient_behind_it },
        { "weight and bias in one", weight_and_bias_in_one },
        { "of its bias' old gradient", of_its_bias_old_gradient },
    };
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        outcome anywhere, home;
        play(scenes[i].play, false, &anywhere);
        play(scenes[i].play, true, &home);
        if (memcmp(&anywhere, &home, sizeof home) != 0)
            fail_msg("with a home the gradient is another one: %s", scenes[i].name);
    }
}

/* The first gradient of backward overlaps the homes: its last row is the home of the bias'
 * gradient, which is written before the weight's gradient is computed from it. */
static void the_first_gradient_may_lie_where_others_go(void **state)
{
    (void)state;
    float got[2][NUMBERS];
    for (int over = 0; over < 2; over++) {
        ms_engine *engine = make_engine();
        scene s = { .engine = engine,
                    .w = square(engine, 1),
                    .v = numbers(engine, 1, (int64_t[]){ WIDTH }, 2),
                    .x = square(engine, 3) };
        ms_tensor *gradient = square(engine, 7), *home = NULL, *given = NULL;
        OK(ms_tensor_window(gradient, 1, (int64_t[]){ WIDTH }, (int64_t[]){ 1 }, NUMBERS - WIDTH,
                            &home));
        OK(ms_tensor_window(gradient, 2, (int64_t[]){ WIDTH, WIDTH }, (int64_t[]){ WIDTH, 1 }, 0,
                            &given));
        OK(ms_tensor_set_requires_grad(s.w, true));
        OK(ms_tensor_set_requires_grad(s.v, true));
        if (over) OK(ms_tensor_set_grad_home(s.v, home));
        ms_tensor *y = apply(engine, &ms_op_linear, s.x, s.w, s.v);
        OK(ms_backward(engine, &y, &given, 1, false));
        OK(ms_tensor_read(ms_tensor_grad(s.w), got[over], sizeof got[over]));
        ms_tensor *all[] = { s.w, s.v, s.x, gradient, home, given, y };
        for (int i = 0; i < 7; i++) ms_tensor_release(all[i]);
        ms_engine_free(engine);
    }
    assert_memory_equal(got[0], got[1], sizeof got[0]);
}

/* Backward begins with two tensors. The later one is processed first and has a gradient for w,
 * while the first gradient of the other tensor is still in w's home. */
static void a_first_gradient_is_not_written_over_before_its_turn(void **state)
{
    (void)state;
    float got[2][NUMBERS];
    for (int over = 0; over < 2; over++) {
        ms_engine *engine = make_engine();
        scene s = { .engine = engine, .w = square(engine, 1), .x = square(engine, 3) };
        ms_tensor *home = square(engine, 7), *given[2] = { NULL, square(engine, 8) };
        OK(ms_tensor_window(home, 2, (int64_t[]){ WIDTH, WIDTH }, (int64_t[]){ WIDTH, 1 }, 0,
                            &given[0]));
        OK(ms_tensor_set_requires_grad(s.w, true));
        if (over) OK(ms_tensor_set_grad_home(s.w, home));
        ms_tensor *early = used_once(&s), *late = turned(&s);
        OK(ms_backward(engine, (ms_tensor *[]){ early, late }, given, 2, false));
        OK(ms_tensor_read(ms_tensor_grad(s.w), got[over], sizeof got[over]));
        ms_tensor *all[] = { s.w, s.x, home, given[0], given[1], early, late };
        for (int i = 0; i < 7; i++) ms_tensor_release(all[i]);
        ms_engine_free(engine);
    }
    assert_memory_equal(got[0], got[1], sizeof got[0]);
}

enum { ONCE, MULTIPLIED, TABLE_AND_HEAD, ANOTHER_WAY };

/* The peak of a backward through a weight of 4 MiB with a home, in MiB above the memory before
 * it. */
static uint64_t mib_on_the_way(int use)
{
    enum { SIDE = 1024 };
    ms_engine *engine = make_engine();
    const int64_t shape[] = { SIDE, SIDE }, few[] = { 2, SIDE }, two[] = { 2 }, ids[] = { 5, 9 };
    ms_tensor *w = NULL, *home = NULL, *x = NULL, *which = NULL, *rows = NULL;
    OK(ms_tensor_new(engine, MS_F32, 2, shape, &w));
    OK(ms_tensor_new(engine, MS_F32, 2, shape, &home));
    OK(ms_tensor_new(engine, MS_F32, 2, few, &x));
    OK(ms_tensor_new(engine, MS_I64, 1, two, &which));
    OK(ms_tensor_write(which, ids, sizeof ids));
    ms_attributes zero = { .scalar = { .value = 0.0 } };
    ms_tensor *made[] = { w, x }, *filled = NULL;
    for (int i = 0; i < 2; i++) {
        OK(ms_op_apply(engine, &ms_op_fill, &zero, true, &made[i], 1, &filled, 1));
        ms_tensor_release(filled);
    }
    OK(ms_tensor_set_requires_grad(w, true));
    OK(ms_tensor_set_grad_home(w, home));
    if (use == TABLE_AND_HEAD) rows = apply(engine, &ms_op_embedding, which, w, NULL);
    ms_tensor *other = use == ANOTHER_WAY ? apply(engine, &ms_op_sum, w, NULL, NULL) : NULL;
    const ms_op *product = use == MULTIPLIED ? &ms_op_matmul : &ms_op_linear;
    ms_tensor *y = apply(engine, product, rows ? rows : x, w, NULL),
              *loss = apply(engine, &ms_op_sum, y, NULL, NULL);
    if (other) {
        ms_tensor *both = apply(engine, &ms_op_add, loss, other, NULL);
        ms_tensor_release(loss);
        ms_tensor_release(other);
        loss = both;
    }
    OK(ms_engine_sync(engine));
    uint64_t before = ms_engine_memory(engine).live;
    ms_engine_reset_peak(engine);
    OK(ms_backward(engine, &loss, NULL, 1, false));
    uint64_t most = (ms_engine_memory(engine).peak - before) >> 20;
    assert_ptr_equal(ms_tensor_grad(w), home);
    ms_tensor *all[] = { w, home, x, which, rows, y, loss };
    for (int i = 0; i < 7; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
    return most;
}

/* The same for a table that is also the head: its few rows are added in the home, and so are
 * gradients from other operators. */
static void a_gradient_at_home_takes_no_memory_on_its_way(void **state)
{
    (void)state;
    assert_int_equal(mib_on_the_way(ONCE), 0);
    assert_int_equal(mib_on_the_way(MULTIPLIED), 0);
    assert_int_equal(mib_on_the_way(TABLE_AND_HEAD), 0);
    assert_int_equal(mib_on_the_way(ANOTHER_WAY), 0);
}

static ms_status keep(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    (void)replacement;
    *(ms_tensor **)user = ms_tensor_retain(gradient);
    return MS_OK;
}

/* A gradient that a hook has seen does not change when the gradient in the home changes. */
static void a_hook_sees_a_gradient_of_its_own(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    scene s = { .engine = engine, .w = square(engine, 1), .x = square(engine, 3) };
    ms_tensor *home = square(engine, 4), *seen = NULL;
    uint64_t id = 0;
    float shown[NUMBERS], later[NUMBERS];
    OK(ms_tensor_set_requires_grad(s.w, true));
    OK(ms_tensor_set_grad_home(s.w, home));
    OK(ms_tensor_on_gradient(s.w, keep, &seen, NULL, &id));
    ms_tensor *y = used_once(&s), *loss = apply(engine, &ms_op_sum, y, NULL, NULL);
    OK(ms_backward(engine, &loss, NULL, 1, false));
    OK(ms_tensor_read(seen, shown, sizeof shown));
    OK(ms_tensor_read(home, later, sizeof later));
    assert_memory_equal(shown, later, sizeof later);
    memset(later, 0, sizeof later);
    OK(ms_tensor_write(home, later, sizeof later));
    OK(ms_tensor_read(seen, later, sizeof later));
    assert_memory_equal(shown, later, sizeof later);
    ms_tensor *all[] = { s.w, s.x, home, seen, y, loss };
    for (int i = 0; i < 6; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_home_changes_no_bit),
        cmocka_unit_test(the_first_gradient_may_lie_where_others_go),
        cmocka_unit_test(a_first_gradient_is_not_written_over_before_its_turn),
        cmocka_unit_test(a_gradient_at_home_takes_no_memory_on_its_way),
        cmocka_unit_test(a_hook_sees_a_gradient_of_its_own),
    };
    return cmocka_run_group_tests_name("grad_homes", tests, NULL, NULL);
}
