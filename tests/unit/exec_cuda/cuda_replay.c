/* cuda_replay.c: work that comes again and again (ms_engine_set_repeating) on the cuda device, over
 * the stand-in for NVIDIA's driver: when it is launched as a graph, that nothing else is computed
 * than without, and what is told of failures. */
#include "fault_engine.h"

#include <stdio.h>
#include <string.h>

#include "cuda_support.h"
#include "exec/stream.h"

enum { COUNT = 96, LENGTH = 12 };

static void ok(ms_status status) { assert_int_equal(status, MS_OK); }
static ms_storage *filled(ms_stream *on, float value)
{
    ms_storage *made = storage_of(on, COUNT * sizeof(float));
    fill(on, made, value);
    return made;
}
static ms_engine *begin(void)
{
    ms_engine *engine = make_engine();
    assert_true(ms_engine_set_repeating(engine, true));
    return engine;
}
/* The rules of captures and the order of work were kept, and nothing is left. */
static void finish(ms_engine *engine)
{
    const char *text;
    ms_engine_free(engine);
    unsigned faults = ((stand_in_faults_function *)stand_in("stand_in_faults"))(&text);
    if (faults) fail_msg("%u faults: %s", faults, text);
    assert_int_equal(left(), 0);
}
static ms_repeats repeats_of(ms_engine *engine)
{
    ms_repeats repeats;
    ms_engine_repeats(engine, &repeats);
    return repeats;
}
/* What a step ends with. */
static void end_step(ms_engine *engine)
{
    ms_engine_set_repeating(engine, false);
    ms_engine_set_repeating(engine, true);
}

/* x = x + i for i = 1 .. count. What it adds to x. */
static double climb(ms_stream *on, const ms_cuda_task *task, ms_storage *x, int count)
{
    for (int i = 1; i <= count; i++) run(on, task, x, x, 1, (float)i);
    return count * (count + 1) / 2.0;
}

/* ------------------------------------------------------------------- launching */

static void a_run_that_comes_again_is_one_launch(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    unsigned kernels = calls("cuLaunchKernel"), graphs = calls("cuGraphLaunch");
    for (int step = 0; step < 10; step++) {
        expected += climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    /* Three times one by one, once for the capture. */
    assert_int_equal(calls("cuLaunchKernel"), kernels + 4 * LENGTH);
    assert_int_equal(calls("cuGraphLaunch"), graphs + 7);
    assert_int_equal(calls("cuGraphInstantiateWithFlags"), 1);
    assert_int_equal(calls("cuGraphExecKernelNodeSetParams_v2"), 0);
    ms_repeats repeats = repeats_of(engine);
    assert_int_equal(repeats.graphs, 1);
    assert_int_equal(repeats.launches, 7);
    assert_int_equal(repeats.replayed, 7 * LENGTH);
    assert_int_equal(repeats.alone, 3 * LENGTH);
    assert_string_equal(repeats.why, "");
    assert_true(value_of(x) == expected);
    ms_storage_release(x);
    finish(engine);
}

/* It costs as much one by one, and is left so; what is longer than a replay is more of them. */
static void short_and_long_runs(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    for (int step = 0; step < 6; step++) {
        expected += climb(a, &scales, x, 3);
        end_step(engine);
    }
    assert_int_equal(repeats_of(engine).graphs, 0);
    for (int step = 0; step < 6; step++) {
        fill(a, x, 0);
        end_step(engine);
        expected = climb(a, &scales, x, 3000);
        end_step(engine);
    }
    ms_repeats repeats = repeats_of(engine);
    assert_int_equal(repeats.replayed, 3 * 3000);
    assert_int_equal(repeats.launches, 3 * repeats.graphs);
    assert_true(value_of(x) == expected);
    ms_storage_release(x);
    finish(engine);
}

/* While earlier launches with other arguments are under way. */
static void arguments_that_change_go_into_the_graph(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    unsigned changes = calls("cuGraphExecKernelNodeSetParams_v2");
    for (int step = 0; step < 60; step++) {
        run(a, &scales, x, x, 1, (float)(step * step));
        expected += step * step + climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    assert_int_equal(repeats_of(engine).launches, 57);
    assert_int_equal(calls("cuGraphExecKernelNodeSetParams_v2"), changes + 57);
    assert_true(value_of(x) == expected);
    ms_storage_release(x);
    finish(engine);
}

/* Where most arguments change, a graph saves nothing. Sizes change the grid. */
static void other_shapes_and_other_addresses(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0), *y = storage_of(a, 300 * sizeof(float));
    double expected_x = 0, expected_y = 0;
    fill(a, y, 0);
    for (int step = 0; step < 12; step++) {
        for (int i = 0; i < LENGTH; i++) run(a, &scales, x, x, 1, (float)(step + i));
        expected_x += LENGTH * step + LENGTH * (LENGTH - 1) / 2.0;
        end_step(engine);
    }
    assert_int_equal(repeats_of(engine).launches, 0);
    for (int step = 0; step < 12; step++) {
        ms_storage *odd = step % 2 ? y : x;
        run(a, &scales, odd, odd, 1, 1);
        *(step % 2 ? &expected_y : &expected_x) += 1;
        expected_x += climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    assert_true(repeats_of(engine).launches >= 6);
    assert_true(value_of(x) == expected_x && value_of(y) == expected_y);
    ms_storage_release(x);
    ms_storage_release(y);
    finish(engine);
}

/* ------------------------------------------------------------ other than expected */

/* What was held goes alone, and what comes is learned; runs that begin alike are told apart. */
static void a_step_that_differs(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    for (int step = 0; step < 5; step++) {
        expected += climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    assert_int_equal(repeats_of(engine).launches, 2);
    expected += climb(a, &scales, x, LENGTH / 2); /* a shorter one */
    end_step(engine);
    expected += climb(a, &scales, x, 2 * LENGTH); /* a longer one: its beginning is known */
    end_step(engine);
    assert_int_equal(repeats_of(engine).launches, 3);
    assert_true(value_of(x) == expected);
    for (int step = 0; step < 16; step++) {
        expected += climb(a, &scales, x, LENGTH - 1);
        run(a, &scales, x, x, 2, (float)(step % 2)); /* the end differs */
        expected = 2 * expected + step % 2;
        run(a, &scales, x, x, 0.5f, 0);
        expected /= 2;
        end_step(engine);
    }
    ms_repeats repeats = repeats_of(engine);
    assert_true(repeats.launches >= 3 + 8);
    assert_true(value_of(x) == expected);
    ms_storage_release(x);
    finish(engine);
}

/* In each step: the copies and marks that come between are in order with the graphs. */
static void copies_marks_and_waits_come_between(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *x = filled(a, 0), *y = filled(b, 0);
    ms_marks *marks = marks_of(engine, 1);
    double expected = 0;
    for (int step = 0; step < 9; step++) {
        float seen[COUNT];
        uint64_t time;
        fill(a, x, (float)step);
        climb(a, &scales, x, LENGTH);
        run(b, &scales, y, x, 1, 1); /* b waits for a task of the run */
        climb(b, &scales, y, LENGTH);
        climb(a, &scales, x, LENGTH); /* after b has read it */
        ok(ms_marks_set(marks, 0, a));
        climb(a, &scales, x, LENGTH);
        ok(ms_stream_copy_out(a, x, 0, seen, sizeof seen, NULL));
        ok(ms_stream_sync(a));
        expected = step + 3 * LENGTH * (LENGTH + 1) / 2.0;
        assert_true(seen[0] == expected && seen[COUNT - 1] == expected);
        assert_true(value_of(y) == step + 1 + LENGTH * (LENGTH + 1));
        assert_true(ms_marks_time(marks, 0, &time) && time > 0);
        end_step(engine);
    }
    assert_true(repeats_of(engine).launches >= 6 * 3);
    ms_marks_free(marks);
    ms_storage_release(x);
    ms_storage_release(y);
    finish(engine);
}

/* The first one is told, with the line of the script. */
static void the_host_waits_meanwhile(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    uint32_t line = 0;
    double expected = 0;
    ok(ms_strings_add(engine->strings, "train.lua:7", 11, &line));
    for (int step = 0; step < 8; step++) {
        expected += climb(a, &scales, x, LENGTH);
        if (step == 5) {
            ms_engine_set_script(engine, line);
            assert_true(value_of(x) == expected);
            ms_engine_set_script(engine, 0);
        }
        if (step == 6) /* what it asks for is on its way then */
            while (!ms_point_reached(engine, ms_stream_last(a))) {}
        expected += climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    assert_string_equal(repeats_of(engine).why, "the host's wait for a task (at train.lua:7)");
    assert_true(value_of(x) == expected);
    ms_storage_release(x);
    finish(engine);
}

/* A native stream has work of others, which the engine does not see; a trace has each task's time.
 */
static void what_looks_at_single_tasks(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    for (int step = 0; step < 5; step++) {
        expected += climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    assert_true(value_of(x) == expected);
    ok(ms_trace_start(engine));
    expected += climb(a, &scales, x, LENGTH);
    ok(ms_trace_stop(engine));
    assert_int_equal(ms_trace_count(engine), LENGTH);
    assert_true(ms_trace_get(engine, LENGTH - 1)->finished_ns > 0);
    uint64_t launches = repeats_of(engine).launches;
    void *native;
    ok(ms_stream_native(a, &native));
    for (int step = 0; step < 5; step++) {
        expected += climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    assert_int_equal(repeats_of(engine).launches, launches);
    assert_true(value_of(x) == expected);
    ms_storage_release(x);
    finish(engine);
}

/* ------------------------------------------------------------------ kinds of tasks */

/* Its scratch grows between graphs, and one graph's is as large as its tasks wanted. */
typedef struct through_args {
    scale_args scale;
    size_t bytes;
} through_args;
static void run_through(ms_cuda_work *work, const void *arguments)
{
    const through_args *args = arguments;
    ms_cuda_shape shape = { .blocks = { 1 }, .threads = { 128 } };
    scale_args first = args->scale, second = args->scale;
    first.to = ms_cuda_scratch(work, args->bytes);
    second.from = first.to;
    second.factor = 1;
    if (!first.to) return;
    ms_cuda_launch(work, &scale_kernel, shape, &first, sizeof first);
    ms_cuda_launch(work, &scale_kernel, shape, &second, sizeof second);
}
static const ms_cuda_task through = {
    .task = { .name = "through", .args_bytes = sizeof(through_args) }, .function = run_through
};
static void pass(ms_stream *on, ms_storage *x, float term, size_t bytes)
{
    through_args args = { { .to = ms_storage_data(x),
                            .from = ms_storage_data(x),
                            .factor = 1,
                            .term = term,
                            .count = COUNT },
                          bytes };
    ms_access access = { .storage = x, .cells = 1, .mode = MS_READ | MS_WRITE };
    ok(ms_stream_enqueue(on, &through.task, &args, &access, 1, (ms_task_cost){ 0 }, NULL));
}
static void scratch_stays_with_a_graph(void **state)
{
    (void)state;
    enum { MIB = 1 << 20 };
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    for (int step = 0; step < 12; step++) {
        pass(a, x, (float)step, MIB + 1); /* other arguments in each step, the same scratch */
        expected += 2 * step + climb(a, &scales, x, LENGTH);
        end_step(engine);
        pass(a, x, 1, (size_t)(step + 1) * MIB);
        expected += 2;
        end_step(engine);
    }
    /* What was captured first is the first run that came three times with room for its scratch. */
    assert_true(repeats_of(engine).launches >= 8);
    for (int step = 0; step < 3; step++) { /* more than the graph has */
        pass(a, x, 0, 40 * MIB);
        expected += climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    assert_true(value_of(x) == expected);
    ms_storage_release(x);
    finish(engine);
}

static int heard;
static ms_status hear(void *user, ms_error *error)
{
    (void)user, (void)error;
    heard++;
    return MS_OK;
}
static void run_telling(ms_cuda_work *work, const void *arguments)
{
    if (ms_cuda_after(work, hear, NULL)) run_scale(work, arguments);
}
static const ms_cuda_task tells = { .task = { .name = "tells", .args_bytes = sizeof(scale_args) },
                                    .function = run_telling };
static void tasks_that_tell_the_host_go_alone(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    heard = 0;
    for (int step = 0; step < 8; step++) {
        expected += climb(a, &scales, x, LENGTH);
        run(a, &tells, x, x, 1, 3);
        expected += 3 + climb(a, &scales, x, LENGTH - 1);
        end_step(engine);
    }
    assert_int_equal(repeats_of(engine).launches, 5 * 2);
    assert_true(value_of(x) == expected);
    assert_int_equal(heard, 8);
    ms_storage_release(x);
    finish(engine);
}

/* What a library puts into a graph is not known, so it has no new arguments. */
static void run_library(ms_cuda_work *work, const void *arguments)
{
    (void)ms_cuda_work_stream(work);
    run_scale(work, arguments);
}
static const ms_cuda_task library = { .task = { .name = "library",
                                                .args_bytes = sizeof(scale_args) },
                                      .function = run_library,
                                      .uses_library = true };
static void work_of_libraries_is_as_it_was_captured(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    unsigned changes = calls("cuGraphExecKernelNodeSetParams_v2");
    for (int step = 0; step < 20; step++) {
        float term = (float)(step < 10 ? 5 : step < 16 ? step % 2 : step);
        expected += climb(a, &scales, x, LENGTH);
        run(a, &library, x, x, 1, term);
        expected += term + climb(a, &scales, x, LENGTH);
        end_step(engine);
    }
    ms_repeats repeats = repeats_of(engine);
    assert_int_equal(repeats.graphs, 3);
    assert_int_equal(repeats.launches, 7);
    assert_int_equal(calls("cuGraphExecKernelNodeSetParams_v2"), changes);
    assert_true(value_of(x) == expected);
    ms_storage_release(x);
    finish(engine);
}

/* Memory that is cleared is that of the capture, and other memory ends the graph. */
static void run_clearing(ms_cuda_work *work, const void *arguments)
{
    const scale_args *args = arguments;
    ms_cuda_clear(work, args->to, (size_t)args->count * sizeof(float));
    run_scale(work, arguments);
}
static const ms_cuda_task clears = { .task = { .name = "clears", .args_bytes = sizeof(scale_args) },
                                     .function = run_clearing };
static void memory_that_is_cleared(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0), *y = filled(a, 100), *z = filled(a, 7);
    for (int step = 0; step < 14; step++) {
        ms_storage *to = step < 8 ? y : z;
        run(a, &clears, to, to, 1, (float)step);
        climb(a, &scales, x, LENGTH);
        end_step(engine);
        if (step == 6) assert_true(value_of(y) == 6);
    }
    assert_true(value_of(y) == 7 && value_of(z) == 13);
    assert_true(value_of(x) == 14 * LENGTH * (LENGTH + 1) / 2.0);
    ms_storage_release(x);
    ms_storage_release(y);
    ms_storage_release(z);
    finish(engine);
}

/* ------------------------------------------------------------------------ failures */

/* A kernel that notes that it got `bad`. */
typedef struct note_args {
    ms_cuda_fault *fault;
    float value, bad;
} note_args;
static void find_bad(const void *arguments, const unsigned blocks[3], const unsigned threads[3],
                     unsigned shared_bytes)
{
    (void)blocks, (void)threads, (void)shared_bytes;
    const note_args *args = arguments;
    if (args->value == args->bad) *args->fault = (ms_cuda_fault){ .at = 3 };
}
static const unsigned char note_image[] = "note";
static const ms_cuda_kernel note_kernel = { .image = note_image, .name = "note" };
static void run_noting(ms_cuda_work *work, const void *arguments)
{
    note_args args = *(const note_args *)arguments;
    ms_cuda_shape shape = { .blocks = { 1 }, .threads = { 1 } };
    args.fault = ms_cuda_fault_of(work);
    if (args.fault) ms_cuda_launch(work, &note_kernel, shape, &args, sizeof args);
}
static void explain(const ms_cuda_fault *fault, char *message, size_t bytes)
{
    snprintf(message, bytes, "value %d is bad", (int)fault->at);
}
static const ms_cuda_task notes = { .task = { .name = "note", .args_bytes = sizeof(note_args) },
                                    .function = run_noting,
                                    .explain = explain };

/* With the line of the task's own step, and what came before it stays. */
static void a_fault_in_a_graph_is_told(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0), *y = filled(a, 0);
    ((stand_in_has_function *)stand_in("stand_in_has"))("note", find_bad, sizeof(note_args));
    ms_status status = MS_OK;
    for (int step = 0; step < 30 && !status; step++) {
        char text[32];
        uint32_t line = 0;
        note_args args = { .value = (float)step, .bad = 20 };
        ms_access access = { .storage = y, .cells = 1, .mode = MS_READ };
        int length = snprintf(text, sizeof text, "train.lua:%d", 100 + step);
        ok(ms_strings_add(engine->strings, text, (size_t)length, &line));
        ms_engine_set_script(engine, line);
        for (int i = 0; i < LENGTH && !status; i++) {
            scale_args scaled = { .to = ms_storage_data(x),
                                  .from = ms_storage_data(x),
                                  .factor = 1,
                                  .term = 1,
                                  .count = COUNT };
            ms_access both = { .storage = x, .cells = 1, .mode = MS_READ | MS_WRITE };
            status =
                ms_stream_enqueue(a, &scales.task, &scaled, &both, 1, (ms_task_cost){ 0 }, NULL);
        }
        if (!status)
            status =
                ms_stream_enqueue(a, &notes.task, &args, &access, 1, (ms_task_cost){ 0 }, NULL);
        end_step(engine);
    }
    if (!status) status = ms_engine_sync(engine);
    assert_int_equal(status, MS_ERROR_ARGUMENT);
    const char *message = ms_engine_error(engine)->message;
    if (!strstr(message, "value 3 is bad") || !strstr(message, "train.lua:120"))
        fail_msg("%s", message);
    assert_true(repeats_of(engine).launches >= 17);
    fill(a, x, 1);
    run(a, &scales, x, x, 2, 0);
    assert_true(value_of(x) == 2);
    ms_storage_release(x);
    ms_storage_release(y);
    finish(engine);
}

/* A driver that refuses a step of capturing: the work is carried out, and once. */
static void what_cannot_be_captured_goes_alone(void **state)
{
    (void)state;
    static const char *const refused[] = { "cuStreamBeginCapture_v2", "cuStreamGetCaptureInfo_v3",
                                           "cuStreamEndCapture", "cuGraphInstantiateWithFlags" };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        ms_engine *engine = begin();
        ms_stream *a = ms_engine_current(engine);
        ms_storage *x = filled(a, 0);
        double expected = 0;
        uint32_t line = 0;
        ok(ms_strings_add(engine->strings, "train.lua:7", 11, &line));
        ms_engine_set_script(engine, line);
        fails(refused[i], 2);
        for (int step = 0; step < 6; step++) {
            expected += climb(a, &scales, x, LENGTH);
            end_step(engine);
        }
        assert_true(value_of(x) == expected);
        ms_repeats repeats = repeats_of(engine);
        assert_int_equal(repeats.launches, 0);
        if (!strstr(repeats.why, "cannot be captured: ") || !strstr(repeats.why, "train.lua:7"))
            fail_msg("%s", repeats.why);
        ms_storage_release(x);
        finish(engine);
    }
}

/* A launch that is refused, and a GPU that stops, end the stream as they do without graphs. */
static void a_graph_that_fails(void **state)
{
    (void)state;
    for (int way = 0; way < 3; way++) {
        ms_engine *engine = begin();
        ms_stream *a = ms_engine_current(engine);
        ms_storage *x = filled(a, 0);
        for (int step = 0; step < 5; step++) {
            climb(a, &scales, x, LENGTH);
            end_step(engine);
        }
        climb(a, &scales, x, LENGTH);
        if (way == 0) fails("cuGraphLaunch", 719);
        if (way == 1) stops(719);
        if (way == 2) {
            /* The stream fails by other means while tasks are held. */
            ms_error error = { .status = MS_ERROR_IO, .message = "the cable is out" };
            ms_stream_fail(a, ms_stream_last(a).seq, &error, 0);
        }
        end_step(engine);
        ms_status status = ms_engine_sync(engine);
        assert_int_equal(status, way == 2 ? MS_ERROR_IO : MS_ERROR_TASK);
        if (way != 1) {
            fill(a, x, 1);
            double expected = 1 + climb(a, &scales, x, LENGTH);
            end_step(engine);
            assert_true(value_of(x) == expected);
        }
        ms_storage_release(x);
        if (way != 1) finish(engine);
        else {
            ms_engine_free(engine);
            stops(0);
        }
    }
}

/* More runs than are kept: the oldest are forgotten. */
static void many_runs(void **state)
{
    (void)state;
    ms_engine *engine = begin();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    double expected = 0;
    for (int step = 0; step < 1200; step++) {
        for (int i = 0; i < 5; i++) run(a, &scales, x, x, 1, (float)(step % 600 + i) * 0.125f);
        expected += 5 * (step % 600) * 0.125 + 1.25;
        end_step(engine);
        if (step % 100 == 99) { /* this one stays */
            expected += climb(a, &scales, x, LENGTH);
            end_step(engine);
        }
        if (step % 50 == 0) ok(ms_engine_sync(engine));
    }
    assert_true(repeats_of(engine).launches >= 6);
    float value = value_of(x);
    assert_true(value > expected * 0.999 && value < expected * 1.001);
    ms_storage_release(x);
    finish(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_run_that_comes_again_is_one_launch),
        cmocka_unit_test(short_and_long_runs),
        cmocka_unit_test(arguments_that_change_go_into_the_graph),
        cmocka_unit_test(other_shapes_and_other_addresses),
        cmocka_unit_test(a_step_that_differs),
        cmocka_unit_test(copies_marks_and_waits_come_between),
        cmocka_unit_test(the_host_waits_meanwhile),
        cmocka_unit_test(what_looks_at_single_tasks),
        cmocka_unit_test(scratch_stays_with_a_graph),
        cmocka_unit_test(tasks_that_tell_the_host_go_alone),
        cmocka_unit_test(work_of_libraries_is_as_it_was_captured),
        cmocka_unit_test(memory_that_is_cleared),
        cmocka_unit_test(a_fault_in_a_graph_is_told),
        cmocka_unit_test(what_cannot_be_captured_goes_alone),
        cmocka_unit_test(a_graph_that_fails),
        cmocka_unit_test(many_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
