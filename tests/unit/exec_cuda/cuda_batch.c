/* cuda_batch.c: tasks of the cuda device that are carried out together (ms_engine_batch), over the
 * stand-in for NVIDIA's driver: what is put off, what puts it onto the stream, failures. */
#include "fault_engine.h"

#include <string.h>

#include "cuda_support.h"
#include "exec/stream.h"

enum { COUNT = 96 };

static void ok(ms_status status) { assert_int_equal(status, MS_OK); }
static ms_storage *filled(ms_stream *on, float value)
{
    ms_storage *made = storage_of(on, COUNT * sizeof(float));
    fill(on, made, value);
    return made;
}
/* The order of work was kept, and nothing is left. */
static void finish(ms_engine *engine)
{
    const char *text;
    ms_engine_free(engine);
    unsigned faults = ((stand_in_faults_function *)stand_in("stand_in_faults"))(&text);
    if (faults) fail_msg("%u faults: %s", faults, text);
    assert_int_equal(left(), 0);
}

/* How often tasks were carried out together, and how many the last time. */
static uint32_t times, last;

static void run_together(ms_cuda_work *work, const void *const *arguments, uint32_t count)
{
    times++;
    last = count;
    for (uint32_t i = 0; i < count; i++) run_scale(work, arguments[i]);
}
static void run_alone(ms_cuda_work *work, const void *arguments)
{
    run_together(work, &arguments, 1);
}
/* Those of one factor, that write other memory. */
static bool may_join(const void *const *arguments, uint32_t count, const void *next)
{
    const scale_args *args = next;
    for (uint32_t i = 0; i < count; i++) {
        const scale_args *other = arguments[i];
        if (other->to == args->to || other->factor != args->factor) return false;
    }
    return true;
}
static const ms_cuda_task joined = { .task = { .name = "joined", .args_bytes = sizeof(scale_args) },
                                     .function = run_alone,
                                     .batch = run_together,
                                     .joins = may_join };

enum { TASKS = 5 };
typedef struct place {
    ms_engine *engine;
    ms_stream *a, *b;
    ms_storage *x[TASKS], *y;
} place;

static place open_place(void)
{
    place p = { .engine = make_engine() };
    p.a = ms_engine_current(p.engine);
    p.b = side_of(p.engine);
    for (int i = 0; i < TASKS; i++) p.x[i] = filled(p.a, (float)i);
    p.y = filled(p.a, 100);
    times = last = 0;
    return p;
}
static void close_place(place *p)
{
    for (int i = 0; i < TASKS; i++) ms_storage_release(p->x[i]);
    ms_storage_release(p->y);
    finish(p->engine);
}
/* x = 2 x + 1 */
static void enqueue(const place *p)
{
    for (int i = 0; i < TASKS; i++) run(p->a, &joined, p->x[i], p->x[i], 2, 1);
}
static void values_are(const place *p, float factor, float term)
{
    for (int i = 0; i < TASKS; i++) assert_true(value_of(p->x[i]) == factor * (float)i + term);
}

static void without_a_batch_each_is_carried_out(void **state)
{
    (void)state;
    place p = open_place();
    enqueue(&p);
    assert_int_equal(times, TASKS);
    values_are(&p, 2, 1);
    close_place(&p);
}

static void in_a_batch_all_are_carried_out_together(void **state)
{
    (void)state;
    place p = open_place();
    ms_engine_batch(p.engine, 1);
    enqueue(&p);
    ms_engine_batch(p.engine, 1);
    ms_engine_batch(p.engine, -1);
    assert_int_equal(times, 0);
    ms_engine_batch(p.engine, -1);
    assert_int_equal(times, 1);
    assert_int_equal(last, TASKS);
    values_are(&p, 2, 1);
    /* An end without a beginning changes nothing. */
    ms_engine_batch(p.engine, -1);
    ms_engine_batch(p.engine, 1);
    enqueue(&p);
    assert_int_equal(times, 1);
    ms_engine_batch(p.engine, -1);
    assert_int_equal(times, 2);
    values_are(&p, 4, 3);
    close_place(&p);
}

/* What does not fit begins the next group, in order: each group is carried out once. */
static void what_does_not_join_comes_after(void **state)
{
    (void)state;
    place p = open_place();
    ms_engine_batch(p.engine, 1);
    enqueue(&p);
    enqueue(&p);
    assert_int_equal(times, 1);
    run(p.a, &joined, p.y, p.x[0], 3, 0);
    assert_int_equal(times, 2);
    ms_engine_batch(p.engine, -1);
    assert_int_equal(times, 3);
    assert_int_equal(last, 1);
    values_are(&p, 4, 3);
    assert_true(value_of(p.y) == 9);
    close_place(&p);
}

static void a_group_has_a_limit(void **state)
{
    (void)state;
    place p = open_place();
    ms_storage *many[MS_CUDA_BATCH + 3];
    for (int i = 0; i < MS_CUDA_BATCH + 3; i++) many[i] = filled(p.a, (float)i);
    ms_engine_batch(p.engine, 1);
    for (int i = 0; i < MS_CUDA_BATCH + 3; i++) run(p.a, &joined, many[i], many[i], 1, 1);
    assert_int_equal(last, MS_CUDA_BATCH);
    ms_engine_batch(p.engine, -1);
    assert_int_equal(times, 2);
    assert_int_equal(last, 3);
    for (int i = 0; i < MS_CUDA_BATCH + 3; i++) {
        assert_true(value_of(many[i]) == (float)(i + 1));
        ms_storage_release(many[i]);
    }
    close_place(&p);
}

/* --------------------------------------------------- what puts them onto the stream */

static void by_a_task(place *p) { run(p->a, &scales, p->y, p->x[1], 1, 0); }
static void by_a_copy(place *p) { fill(p->a, p->y, 3); }
static void by_a_read(place *p) { assert_true(value_of(p->x[1]) == 3); }
static void by_a_sync(place *p) { ok(ms_engine_sync(p->engine)); }
static void by_a_question(place *p) { (void)ms_point_reached(p->engine, ms_stream_last(p->a)); }
static void by_another_stream(place *p) { run(p->b, &scales, p->y, p->x[1], 1, 0); }
static void by_a_wait(place *p)
{
    ms_storage *other = filled(p->b, 1);
    assert_int_equal(times, 0);
    ok(ms_stream_wait(p->a, ms_stream_last(p->b)));
    ms_storage_release(other);
}
static void by_a_mark(place *p)
{
    ms_marks *marks = marks_of(p->engine, 1);
    ok(ms_marks_set(marks, 0, p->a));
    assert_int_equal(times, 1);
    ok(ms_engine_sync(p->engine));
    ms_marks_free(marks);
}
static void by_a_host_program(place *p)
{
    void *native = NULL;
    ok(ms_stream_native(p->a, &native));
}
static void by_work_that_repeats(place *p) { ms_engine_set_repeating(p->engine, true); }

static void whatever_comes_after_puts_them(void **state)
{
    (void)state;
    static void (*const ways[])(place *) = { by_a_task,           by_a_copy,     by_a_read,
                                             by_a_sync,           by_a_question, by_another_stream,
                                             by_a_wait,           by_a_mark,     by_a_host_program,
                                             by_work_that_repeats };
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        place p = open_place();
        ms_engine_batch(p.engine, 1);
        enqueue(&p);
        assert_int_equal(times, 0);
        ways[i](&p);
        if (times != 1 || last != TASKS) fail_msg("way %zu: %u times, %u tasks", i, times, last);
        ms_engine_batch(p.engine, -1);
        values_are(&p, 2, 1);
        close_place(&p);
    }
}

/* The engine may be freed while a batch is open. */
static void the_end_of_the_engine_puts_them(void **state)
{
    (void)state;
    place p = open_place();
    ms_engine_batch(p.engine, 1);
    enqueue(&p);
    close_place(&p);
    assert_int_equal(times, 1);
}

/* --------------------------------------------------------- work that repeats, traces */

/* Graphs have each task by itself. */
/* Where work repeats, what is before and after them is in graphs, in the order of enqueueing: y is
 * read and written by all. */
static void work_that_repeats_has_them_between_graphs(void **state)
{
    (void)state;
    place p = open_place();
    ms_repeats repeats;
    double y = 100;
    ms_engine_set_repeating(p.engine, true);
    for (int step = 0; step < 6; step++) {
        for (int i = 0; i < 4; i++) run(p.a, &scales, p.y, p.y, 1, 1);
        ms_engine_batch(p.engine, 1);
        run(p.a, &joined, p.y, p.y, 0.5f, 1);
        for (int i = 0; i < TASKS; i++) run(p.a, &joined, p.x[i], p.x[i], 0.5f, 1);
        ms_engine_batch(p.engine, -1);
        assert_int_equal(times, step + 1);
        assert_int_equal(last, TASKS + 1);
        for (int i = 0; i < 4; i++) run(p.a, &scales, p.y, p.y, 2, 0);
        y = ((y + 4) * 0.5 + 1) * 16;
    }
    ms_engine_set_repeating(p.engine, false);
    assert_true(value_of(p.y) == (float)y);
    ms_engine_repeats(p.engine, &repeats);
    /* The end of a step and the beginning of the next are one run of eight. It comes five times,
     * and has a graph from the fourth on. */
    assert_int_equal(repeats.launches, 2);
    assert_int_equal(repeats.replayed, 16);
    close_place(&p);
}

/* The first has the time of all; the others begin and end when it ends. */
static void a_trace_has_each_task(void **state)
{
    (void)state;
    place p = open_place();
    ok(ms_trace_start(p.engine));
    ms_engine_batch(p.engine, 1);
    enqueue(&p);
    ms_engine_batch(p.engine, -1);
    run(p.a, &scales, p.y, p.y, 1, 0);
    ok(ms_trace_stop(p.engine));
    assert_int_equal(ms_trace_count(p.engine), TASKS + 1);
    const ms_trace_record *first = ms_trace_get(p.engine, 0);
    assert_true(first->started_ns > 0 && first->finished_ns >= first->started_ns);
    for (size_t i = 1; i < TASKS; i++) {
        const ms_trace_record *record = ms_trace_get(p.engine, i);
        assert_string_equal(record->name, "joined");
        assert_int_equal(record->started_ns, first->finished_ns);
        assert_int_equal(record->finished_ns, first->finished_ns);
    }
    assert_true(ms_trace_get(p.engine, TASKS)->started_ns >= first->finished_ns);
    close_place(&p);
}

/* ------------------------------------------------------------------- failures */

/* The stream fails with the first task's name; what is enqueued later is skipped, not kept for
 * better times. */
static void a_launch_that_fails_is_an_error(void **state)
{
    (void)state;
    place p = open_place();
    ms_engine_batch(p.engine, 1);
    enqueue(&p);
    fails("cuLaunchKernel", 700);
    ms_engine_batch(p.engine, -1);
    assert_int_equal(ms_engine_sync(p.engine), MS_ERROR_TASK);
    assert_non_null(strstr(ms_engine_error(p.engine)->message, "joined"));
    fails(NULL, 0);
    assert_int_equal(times, 1);
    close_place(&p);
}

static void what_was_kept_before_a_failure_is_skipped(void **state)
{
    (void)state;
    place p = open_place();
    ms_error error = { .status = MS_ERROR_TASK, .message = "planted" };
    ms_engine_batch(p.engine, 1);
    enqueue(&p);
    ms_stream_fail(p.a, ms_stream_last(p.a).seq, &error, 0);
    ms_engine_batch(p.engine, -1);
    assert_int_equal(times, 0);
    assert_int_equal(ms_engine_sync(p.engine), MS_ERROR_TASK);
    for (int i = 0; i < TASKS; i++) fill(p.a, p.x[i], 1);
    ms_engine_batch(p.engine, 1);
    run(p.a, &joined, p.x[0], p.x[0], 2, 1);
    ms_engine_batch(p.engine, -1);
    assert_int_equal(times, 1);
    assert_true(value_of(p.x[0]) == 3);
    close_place(&p);
}

static ms_status program(const ms_os *os, ms_engine **engine)
{
    ms_engine_options options = { .own_device = &ms_device_cuda, .threads = 1, .os = os };
    ms_storage *x[2] = { NULL };
    float values[COUNT] = { 0 };
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    ms_status status = ms_engine_new(&options, NULL, engine);
    if (status) return status;
    ms_stream *on = ms_engine_current(*engine);
    for (int i = 0; i < 2 && !status; i++) status = ms_storage_new(on, sizeof values, &x[i]);
    for (int i = 0; i < 2 && !status; i++)
        status = ms_stream_copy_in(on, x[i], 0, values, sizeof values, NULL);
    ms_engine_batch(*engine, 1);
    for (int i = 0; i < 2 && !status; i++) {
        scale_args args = {
            .to = ms_storage_data(x[i]), .from = ms_storage_data(x[i]), .term = 1, .count = COUNT
        };
        ms_access access = { .storage = x[i], .cells = 1, .mode = MS_READ | MS_WRITE };
        status = ms_stream_enqueue(on, &joined.task, &args, &access, 1, (ms_task_cost){ 0 }, NULL);
    }
    ms_engine_batch(*engine, -1);
    for (int i = 0; i < 2 && !status; i++) status = ms_storage_read(x[i], 0, values, sizeof values);
    for (int i = 0; i < 2 && !status; i++) assert_true(values[0] == 1);
    for (int i = 0; i < 2; i++) ms_storage_release(x[i]);
    return status;
}

static void any_failed_call_is_an_error_or_changes_nothing(void **state)
{
    (void)state;
    ((stand_in_has_function *)stand_in("stand_in_has"))("scale", scale, sizeof(scale_args));
    fail_each_call(program, false);
    fail_each_call(program, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_a_batch_each_is_carried_out),
        cmocka_unit_test(in_a_batch_all_are_carried_out_together),
        cmocka_unit_test(what_does_not_join_comes_after),
        cmocka_unit_test(a_group_has_a_limit),
        cmocka_unit_test(whatever_comes_after_puts_them),
        cmocka_unit_test(the_end_of_the_engine_puts_them),
        cmocka_unit_test(work_that_repeats_has_them_between_graphs),
        cmocka_unit_test(a_trace_has_each_task),
        cmocka_unit_test(a_launch_that_fails_is_an_error),
        cmocka_unit_test(what_was_kept_before_a_failure_is_skipped),
        cmocka_unit_test(any_failed_call_is_an_error_or_changes_nothing),
    };
    setenv("MOONSHARD_STAND_IN_WATCH", "count", 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
