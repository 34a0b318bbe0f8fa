/* replay.c: work that is recorded once and carried out again (ms_replay), on the devices that can.
 * ctest: late cuda */
#include "device_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "late_device.h"
#include "moonshard/grad.h"
#include "moonshard/ops.h"
#include "moonshard/optim.h"

static ms_engine *make_engine(void)
{
    ms_engine_options options = { .own_device = late_device("cpu"), .threads = 1 };
    ms_engine *engine = NULL;
    ms_error error;
    if (ms_engine_new(&options, &error, &engine)) fail_msg("%s", error.message);
    return engine;
}

static void ok(ms_status status) { assert_int_equal(status, MS_OK); }

/* The error of the engine's last call. */
static void assert_error(ms_engine *engine, ms_status status, ms_status expected, const char *words)
{
    const char *message = ms_engine_error(engine)->message;
    if (status != expected || !strstr(message, words)) fail_msg("%d: %s", status, message);
}

static ms_tensor *tensor_of(ms_engine *engine, ms_dtype dtype, int64_t count, const void *values)
{
    ms_tensor *made = NULL;
    ok(ms_tensor_new(engine, dtype, 1, &count, &made));
    ok(ms_tensor_write(made, values, ms_tensor_bytes(made)));
    return made;
}
static ms_tensor *number(ms_engine *engine, float value)
{
    return tensor_of(engine, MS_F32, 1, &value);
}
static float number_in(ms_tensor *tensor)
{
    float value = 0;
    ok(ms_tensor_read(tensor, &value, sizeof value));
    return value;
}

/* to += from, on this stream. */
static ms_status try_add(ms_stream *stream, ms_tensor *to, ms_tensor *from)
{
    ms_engine *engine = ms_stream_engine(stream);
    ms_tensor *inputs[2] = { to, from }, *out = NULL;
    ms_stream *before = ms_engine_set_current(engine, stream);
    ms_status status = ms_op_apply(engine, &ms_op_add, NULL, true, inputs, 2, &out, 1);
    ms_tensor_release(out);
    (void)ms_engine_set_current(engine, before);
    return status;
}
static void add_to(ms_stream *stream, ms_tensor *to, ms_tensor *from)
{
    ok(try_add(stream, to, from));
}

static ms_replay *begin(ms_stream *origin)
{
    ms_replay *replay = NULL;
    ok(ms_replay_begin(origin, &replay));
    return replay;
}

/* Fibonacci numbers on two streams: the result shows each task's place in the order. */
static void what_was_recorded_runs_again_in_order(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_replay *second = NULL;
    ms_tensor *x = number(engine, 0), *y = number(engine, 1);
    ms_point point = { 0 };
    ms_replay *replay = begin(a);
    assert_int_equal(ms_replay_begin(b, &second), MS_ERROR_STATE);
    add_to(a, x, y); /* 1, 1 */
    add_to(b, y, x); /* 1, 2 */
    assert_error(engine, ms_stream_sync(a), MS_ERROR_STATE, "while work is recorded");
    assert_int_equal(ms_replay_run(replay, &point), MS_ERROR_STATE);
    ok(ms_replay_end(replay));
    assert_int_equal(ms_replay_end(replay), MS_ERROR_STATE);
    assert_true(number_in(x) == 1 && number_in(y) == 2);
    uint64_t version = ms_tensor_version(y);
    for (int i = 0; i < 3; i++) ok(ms_replay_run(replay, &point));
    assert_true(ms_tensor_version(y) > version); /* each replay counts as a write */
    ok(ms_point_sync(engine, point));
    assert_true(number_in(x) == 21 && number_in(y) == 34);
    /* Later work on any of its streams sees its values, and earlier work does not. */
    add_to(b, x, y); /* 55 */
    ok(ms_replay_run(replay, NULL));
    add_to(b, x, y);
    assert_true(number_in(y) == 55 + 34 + 34);
    assert_true(number_in(x) == 55 + 34 + 55 + 34 + 34);
    ms_replay_free(replay);
    ms_tensor_release(x);
    ms_tensor_release(y);
    ms_engine_free(engine);
}

/* What a stream enqueues right after a recording comes after its part of that, and after what it
 * has waited for. */
static void work_after_a_recording_comes_after_it(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_tensor *x = number(engine, 1), *y = number(engine, 1);
    ms_replay *replay = begin(a);
    add_to(a, x, x); /* 2 */
    add_to(b, y, x); /* 3 */
    ok(ms_replay_end(replay));
    add_to(b, y, y); /* 6 */
    add_to(b, y, x); /* 8 */
    assert_true(number_in(y) == 8 && number_in(x) == 2);
    ms_replay_free(replay);
    ms_tensor_release(x);
    ms_tensor_release(y);
    ms_engine_free(engine);
}

/* Branches on four streams, of which one is made meanwhile, and work in between. */
static void twenty_replays_of_many_branches(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *streams[4] = { ms_engine_current(engine), side_of(engine) };
    ms_tensor *one = number(engine, 1), *sum = number(engine, 0), *parts[4];
    ok(ms_engine_stream(engine, "third", &streams[2]));
    for (int i = 0; i < 4; i++) parts[i] = number(engine, 0);
    add_to(streams[2], parts[2], one); /* on its way when the recording begins */
    ms_replay *replay = begin(streams[1]);
    ok(ms_engine_stream(engine, "fourth", &streams[3]));
    for (int i = 0; i < 4; i++) add_to(streams[i], parts[i], one);
    for (int i = 0; i < 4; i++) add_to(streams[(i + 1) % 4], sum, parts[i]);
    ok(ms_replay_end(replay));
    double expected = 1 + 1 + 2 + 1;
    for (int i = 0; i < 20; i++) {
        if (i % 5 == 2) add_to(streams[i % 4], parts[0], one);
        ok(ms_replay_run(replay, NULL));
        double extra = i < 2 ? 0 : (i - 2) / 5 + 1;
        expected += 4 * (i + 2) + 1 + extra;
        if (i % 7 == 3) assert_true(number_in(sum) == (float)expected);
    }
    assert_true(number_in(sum) == (float)expected);
    ms_replay_free(replay);
    for (int i = 0; i < 4; i++) ms_tensor_release(parts[i]);
    ms_tensor_release(one);
    ms_tensor_release(sum);
    ms_engine_free(engine);
}

static void a_replay_touches_only_the_memory_that_was_recorded(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_tensor *x = number(engine, 1), *y = number(engine, 2);
    ms_storage *kept = ms_storage_retain(ms_tensor_storage(x));
    float value = 0;
    ms_replay *replay = begin(a);
    add_to(a, x, y);
    ok(ms_replay_end(replay));
    /* No other storage gets the memory of a storage that was released meanwhile. */
    ms_tensor_release(x);
    ok(ms_replay_run(replay, NULL));
    ok(ms_storage_read(kept, 0, &value, sizeof value));
    assert_true(value == 5);
    ok(ms_storage_drop(ms_tensor_storage(y), "the test"));
    assert_error(engine, ms_replay_run(replay, NULL), MS_ERROR_STATE, "the test");
    ms_tensor *taken = number(engine, 9); /* the memory of y */
    ok(ms_storage_refill(ms_tensor_storage(y), a));
    assert_error(engine, ms_replay_run(replay, NULL), MS_ERROR_STATE, "refilled elsewhere");
    assert_true(number_in(taken) == 9);
    ms_replay_free(replay);
    ms_storage_release(kept);
    ms_tensor_release(y);
    ms_tensor_release(taken);
    ms_engine_free(engine);
}

/* The host's memory is read while the work is recorded. */
static void replays_repeat_what_was_written(void **state)
{
    (void)state;
    enum { MANY = 5000 };
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    float few[2] = { 1, 2 }, values[2], *many = malloc(MANY * sizeof *many);
    for (int i = 0; i < MANY; i++) many[i] = (float)i;
    ms_tensor *x = tensor_of(engine, MS_F32, 2, few), *y = tensor_of(engine, MS_F32, MANY, many);
    ms_replay *replay = begin(a);
    ok(ms_tensor_write(x, few, sizeof few));
    add_to(a, x, x);
    ok(ms_tensor_write(y, many, MANY * sizeof *many));
    ok(ms_replay_end(replay));
    few[0] = few[1] = many[MANY - 1] = -1;
    for (int i = 0; i < 3; i++) {
        ok(ms_tensor_write(x, few, sizeof few));
        ok(ms_replay_run(replay, NULL));
        ok(ms_tensor_read(x, values, sizeof values));
        assert_true(values[0] == 2 && values[1] == 4);
    }
    ms_replay_free(replay);
    ms_tensor_release(x);
    ms_tensor_release(y);
    free(many);
    ms_engine_free(engine);
}

/* -------------------------------------------------------------------- training */

enum { ROWS = 6, WIDTH = 16, HIDDEN = 24, CLASSES = 5, STEPS = 23 };

/* A small network, its optimizer, and what differs from step to step: inputs, targets, and the
 * learning rate. */
typedef struct network {
    ms_engine *engine;
    ms_tensor *x, *targets, *lr, *count, *loss;
    ms_tensor *weights[2], *states[2][2];
} network;

static ms_tensor *table(ms_engine *engine, int64_t rows, int64_t columns, float scale)
{
    const int64_t shape[2] = { rows, columns };
    float values[HIDDEN * HIDDEN];
    ms_tensor *made = NULL;
    for (int64_t i = 0; i < rows * columns; i++)
        values[i] = scale * (float)((i * 7919 + 13) % 101 - 50) / 50;
    ok(ms_tensor_new(engine, MS_F32, 2, shape, &made));
    ok(ms_tensor_write(made, values, ms_tensor_bytes(made)));
    return made;
}

static network make_network(void)
{
    const int64_t targets[ROWS] = { 0 }, count = 0;
    ms_engine *engine = make_engine();
    network made = { .engine = engine,
                     .x = table(engine, ROWS, WIDTH, 1),
                     .targets = tensor_of(engine, MS_I64, ROWS, targets),
                     .lr = number(engine, 0),
                     .weights = { table(engine, HIDDEN, WIDTH, 0.5f),
                                  table(engine, CLASSES, HIDDEN, 0.5f) } };
    ok(ms_tensor_new(engine, MS_I64, 0, NULL, &made.count));
    ok(ms_tensor_write(made.count, &count, sizeof count));
    for (int i = 0; i < 2; i++) {
        const int64_t *shape = ms_tensor_shape(made.weights[i]);
        for (int j = 0; j < 2; j++) made.states[i][j] = table(engine, shape[0], shape[1], 0);
        ok(ms_tensor_set_requires_grad(made.weights[i], true));
    }
    return made;
}
static void free_network(network *it)
{
    ms_tensor *all[] = {
        it->x,           it->targets,    it->lr,           it->count,        it->loss,
        it->weights[0],  it->weights[1], it->states[0][0], it->states[0][1], it->states[1][0],
        it->states[1][1]
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) ms_tensor_release(all[i]);
    ms_engine_free(it->engine);
}

static ms_tensor *apply(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                        ms_tensor *first, ms_tensor *second)
{
    ms_tensor *inputs[2] = { first, second }, *out = NULL;
    ok(ms_apply(engine, op, attributes, false, inputs, second ? 2 : 1, &out, 1));
    return out;
}

/* Inputs and targets of step i, written into the same memory each time. */
static void set_batch(network *it, int step)
{
    float x[ROWS * WIDTH], lr = 0.02f / (float)(1 + step);
    int64_t targets[ROWS];
    for (int i = 0; i < ROWS * WIDTH; i++) x[i] = (float)((i * 31 + step * 17) % 23 - 11) / 11;
    for (int i = 0; i < ROWS; i++) targets[i] = (i + step) % CLASSES;
    ok(ms_tensor_write(it->x, x, sizeof x));
    ok(ms_tensor_write(it->targets, targets, sizeof targets));
    ok(ms_tensor_write(it->lr, &lr, sizeof lr));
}

static void train_once(network *it)
{
    ms_engine *engine = it->engine;
    const ms_attributes mean = { .loss = { .ignore_index = -100, .reduction = MS_REDUCE_MEAN } };
    ms_tensor *inner = apply(engine, &ms_op_linear, NULL, it->x, it->weights[0]),
              *hidden = apply(engine, &ms_op_tanh, NULL, inner, NULL),
              *logits = apply(engine, &ms_op_linear, NULL, hidden, it->weights[1]),
              *loss = apply(engine, &ms_op_cross_entropy, &mean, logits, it->targets), *norm = NULL,
              *gradients[2];
    ok(ms_backward(engine, &loss, NULL, 1, false));
    for (int i = 0; i < 2; i++) gradients[i] = ms_tensor_grad(it->weights[i]);
    ok(ms_clip_norm(engine, gradients, 2, 0.5, 2, &norm, NULL));
    bool recorded = ms_engine_set_recording(engine, false);
    for (int i = 0; i < 2; i++) {
        ms_optimizer_step step = { .kind = MS_ADAMW,
                                   .hyper = ms_optimizer_defaults(MS_ADAMW),
                                   .parameter = it->weights[i],
                                   .gradient = gradients[i],
                                   .states = { it->states[i][0], it->states[i][1] },
                                   .count = it->count,
                                   .lr = it->lr };
        ok(ms_optimizer_step_param(engine, &step));
        ok(ms_tensor_set_grad(it->weights[i], NULL));
    }
    (void)ms_engine_set_recording(engine, recorded);
    if (!it->loss) it->loss = ms_tensor_retain(loss);
    ms_tensor *all[] = { inner, hidden, logits, loss, norm };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) ms_tensor_release(all[i]);
}

/* The losses of all steps and the weights at the end. */
static void train(bool replays, float losses[STEPS], float weights[CLASSES * HIDDEN])
{
    network it = make_network();
    ms_replay *replay = NULL;
    for (int step = 0; step < STEPS; step++) {
        set_batch(&it, step);
        if (replays && step == 3) replay = begin(ms_engine_current(it.engine));
        if (replay && step > 3) ok(ms_replay_run(replay, NULL));
        else {
            ms_tensor_release(it.loss);
            it.loss = NULL;
            train_once(&it);
        }
        if (replay && step == 3) ok(ms_replay_end(replay));
        losses[step] = number_in(it.loss);
    }
    ok(ms_tensor_read(it.weights[1], weights, CLASSES * HIDDEN * sizeof *weights));
    ms_replay_free(replay);
    free_network(&it);
}

/* Three steps, one that is recorded, and 19 replays. */
static void replayed_steps_train_as_others_do(void **state)
{
    (void)state;
    float expected[STEPS], losses[STEPS], weights[2][CLASSES * HIDDEN];
    train(false, expected, weights[0]);
    train(true, losses, weights[1]);
    assert_true(expected[STEPS - 1] != expected[0]);
    assert_memory_equal(losses, expected, sizeof losses);
    assert_memory_equal(weights[1], weights[0], sizeof weights[0]);
}

/* ------------------------------------------------------------------- failures */

/* Rows of a table by ids, which later calls change. */
typedef struct lookup {
    ms_engine *engine;
    ms_tensor *ids, *table, *rows;
} lookup;

static lookup make_lookup(ms_engine *engine)
{
    const int64_t ids[2] = { 0, 1 }, shape[2] = { 2, 1 };
    const float table[2] = { 5, 6 };
    lookup made = { .engine = engine, .ids = tensor_of(engine, MS_I64, 2, ids) };
    ok(ms_tensor_new(engine, MS_F32, 2, shape, &made.table));
    ok(ms_tensor_write(made.table, table, sizeof table));
    return made;
}
static void look_up(lookup *it)
{
    ms_tensor *inputs[2] = { it->ids, it->table };
    ok(ms_op_apply(it->engine, &ms_op_embedding, NULL, false, inputs, 2, &it->rows, 1));
}
static void set_ids(lookup *it, int64_t first, int64_t second)
{
    const int64_t ids[2] = { first, second };
    ok(ms_tensor_write(it->ids, ids, sizeof ids));
}
static void assert_rows(lookup *it, float first, float second)
{
    float rows[2];
    ok(ms_tensor_read(it->rows, rows, sizeof rows));
    assert_true(rows[0] == first && rows[1] == second);
}
static void free_lookup(lookup *it)
{
    ms_tensor_release(it->ids);
    ms_tensor_release(it->table);
    ms_tensor_release(it->rows);
    ms_engine_free(it->engine);
}

static void a_replay_that_finds_bad_values_fails(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    lookup it = make_lookup(engine);
    ms_stream *a = ms_engine_current(engine);
    ms_point point = { 0 };
    ms_replay *replay = begin(a);
    look_up(&it);
    ok(ms_replay_end(replay));
    for (int64_t i = 0; i < 6; i++) {
        int64_t bad = i % 3 == 1 ? 2 + i : 1;
        set_ids(&it, 1, bad);
        ok(ms_replay_run(replay, &point));
        if (bad == 1) {
            assert_rows(&it, 6, 6);
            continue;
        }
        char words[64];
        snprintf(words, sizeof words, "position 1 is %d", (int)bad);
        assert_error(engine, ms_point_sync(engine, point), MS_ERROR_ARGUMENT, words);
        /* Its values are lost, and nothing else is. */
        float rows[2];
        assert_int_not_equal(ms_tensor_read(it.rows, rows, sizeof rows), MS_OK);
    }
    ms_replay_free(replay);
    free_lookup(&it);
}

/* The first of several replays that are under way fails. */
static void replays_after_one_that_failed_begin_without_faults(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    lookup it = make_lookup(engine);
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_tensor *sum = number(engine, 0), *one = number(engine, 1);
    const float zero = 0;
    ms_replay *replay = begin(a);
    look_up(&it);
    add_to(b, sum, one);
    ok(ms_replay_end(replay));
    assert_rows(&it, 5, 6);
    set_ids(&it, 7, 0);
    ok(ms_replay_run(replay, NULL));
    set_ids(&it, 1, 0);
    ms_status status = ms_replay_run(replay, NULL);
    if (!status) status = ms_engine_sync(engine);
    assert_error(engine, status, MS_ERROR_ARGUMENT, "position 0 is 7");
    /* All that the replay should have written is lost. */
    assert_error(engine, ms_replay_run(replay, NULL), MS_ERROR_TASK, "never written");
    ok(ms_tensor_write(sum, &zero, sizeof zero));
    set_ids(&it, 1, 0);
    ok(ms_replay_run(replay, NULL));
    assert_rows(&it, 6, 5);
    assert_true(number_in(sum) == 1);
    ms_replay_free(replay);
    ms_tensor_release(sum);
    ms_tensor_release(one);
    free_lookup(&it);
}

/* The recording is good, although its own run fails. */
static void a_recording_whose_run_fails_can_be_replayed(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    lookup it = make_lookup(engine);
    ms_stream *a = ms_engine_current(engine);
    set_ids(&it, 3, 0);
    ms_replay *replay = begin(a);
    look_up(&it);
    ok(ms_replay_end(replay));
    assert_error(engine, ms_stream_sync(a), MS_ERROR_ARGUMENT, "position 0 is 3");
    set_ids(&it, 1, 0);
    ok(ms_replay_run(replay, NULL));
    assert_rows(&it, 6, 5);
    ms_replay_free(replay);
    free_lookup(&it);
}

static void a_replay_looks_at_flags(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_tensor *flag = number(engine, 0), *change = number(engine, 0);
    const float values[2] = { 0, 1 };
    ms_replay *replay = begin(a);
    add_to(a, flag, change);
    ok(ms_stream_fail_if(b, "check", ms_tensor_storage(flag), 0, "it is not finite"));
    ok(ms_replay_end(replay));
    for (int i = 0; i < 5; i++) {
        bool fails = i % 2 == 1;
        ok(ms_tensor_write(flag, &values[0], sizeof *values));
        ok(ms_tensor_write(change, &values[fails], sizeof *values));
        ok(ms_replay_run(replay, NULL));
        if (fails) assert_error(engine, ms_engine_sync(engine), MS_ERROR_TASK, "it is not finite");
        else ok(ms_engine_sync(engine));
    }
    ms_replay_free(replay);
    ms_tensor_release(flag);
    ms_tensor_release(change);
    ms_engine_free(engine);
}

/* ----------------------------------------------------------- functions of the host */

typedef struct counter {
    int calls, fails_at;
} counter;
static ms_status count_call(void *user, char *message, size_t bytes)
{
    counter *it = user;
    if (++it->calls != it->fails_at) return MS_OK;
    snprintf(message, bytes, "the file is full");
    return MS_ERROR_IO;
}

static void functions_of_the_host_are_called_in_each_replay(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    counter first = { 0 }, second = { 0 };
    const float zero = 0;
    ms_tensor *x = number(engine, 1);
    ms_access access = { .storage = ms_tensor_storage(x), .cells = 1, .mode = MS_READ | MS_WRITE };
    ms_host_call one = { .name = "one", .function = count_call, .user = &first, .repeats = true },
                 two = { .name = "two", .function = count_call, .user = &second, .repeats = true };
    ms_replay *replay = begin(a);
    ok(ms_stream_call(a, &one, &access, 1, (ms_task_cost){ 0 }, NULL));
    ok(ms_stream_call(b, &two, &access, 1, (ms_task_cost){ 0 }, NULL));
    ok(ms_replay_end(replay));
    for (int i = 0; i < 4; i++) ok(ms_replay_run(replay, NULL));
    ok(ms_engine_sync(engine));
    assert_true(first.calls == 5 && second.calls == 5);
    first.fails_at = 6;
    ok(ms_replay_run(replay, NULL));
    assert_error(engine, ms_engine_sync(engine), MS_ERROR_IO, "the file is full");
    /* It comes after one that has failed. */
    assert_true(first.calls == 6 && second.calls == 5);
    ok(ms_tensor_write(x, &zero, sizeof zero));
    ok(ms_replay_run(replay, NULL));
    ok(ms_engine_sync(engine));
    assert_true(first.calls == 7 && second.calls == 6);
    ms_replay_free(replay);
    ms_tensor_release(x);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------- without */

static void a_device_that_cannot_record_says_so(void **state)
{
    (void)state;
    ms_engine_options options = { .device = "cpu", .threads = 1 };
    ms_engine *engine = NULL;
    ms_replay *replay = NULL;
    ok(ms_engine_new(&options, NULL, &engine));
    assert_error(engine, ms_replay_begin(ms_engine_current(engine), &replay), MS_ERROR_UNSUPPORTED,
                 "device \"cpu\" cannot record work");
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_device_that_cannot_record_says_so),
        cmocka_unit_test(what_was_recorded_runs_again_in_order),
        cmocka_unit_test(work_after_a_recording_comes_after_it),
        cmocka_unit_test(twenty_replays_of_many_branches),
        cmocka_unit_test(a_replay_touches_only_the_memory_that_was_recorded),
        cmocka_unit_test(replays_repeat_what_was_written),
        cmocka_unit_test(replayed_steps_train_as_others_do),
        cmocka_unit_test(a_replay_that_finds_bad_values_fails),
        cmocka_unit_test(replays_after_one_that_failed_begin_without_faults),
        cmocka_unit_test(a_recording_whose_run_fails_can_be_replayed),
        cmocka_unit_test(a_replay_looks_at_flags),
        cmocka_unit_test(functions_of_the_host_are_called_in_each_replay),
    };
    /* Without a device of the tests there is only the CPU. */
    size_t count = late_device("cpu") ? sizeof tests / sizeof *tests : 1;
    return _cmocka_run_group_tests("replay", tests, count, NULL, NULL);
}
