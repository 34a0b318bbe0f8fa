/* cuda_graph.c: what the cuda device records and replays (ms_replay), over the stand-in for
 * NVIDIA's driver: what it asks of the driver, what cannot be recorded, and failures. */
#include "fault_engine.h"

#include <stdio.h>
#include <string.h>

#include "cuda_support.h"

enum { COUNT = 96 };

static void ok(ms_status status) { assert_int_equal(status, MS_OK); }
static ms_storage *filled(ms_stream *on, float value)
{
    ms_storage *made = storage_of(on, COUNT * sizeof(float));
    fill(on, made, value);
    return made;
}
static ms_replay *begin(ms_stream *origin)
{
    ms_replay *replay = NULL;
    ok(ms_replay_begin(origin, &replay));
    return replay;
}
static void assert_error(ms_engine *engine, ms_status status, ms_status expected, const char *words)
{
    const char *message = ms_engine_error(engine)->message;
    if (status != expected || !strstr(message, words)) fail_msg("%d: %s", status, message);
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

/* -------------------------------------------------------------------- driver */

static unsigned questions(void)
{
    return calls("cuEventQuery") + calls("cuEventSynchronize") + calls("cuStreamSynchronize");
}

/* Meanwhile the driver is asked for nothing, although there is more work than a stream holds. */
static void a_replay_is_one_launch(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *x = filled(a, 1), *y = filled(b, 2);
    ms_replay *replay = begin(a);
    unsigned asked = questions(), kernels = calls("cuLaunchKernel");
    enum { EACH = 2 * MS_STREAM_DEPTH };
    for (int i = 0; i < EACH; i++) {
        run(a, &scales, x, x, 1, 1);
        if (i % 100 == 0) run(b, &scales, y, x, 1, 0);
        assert_false(ms_point_reached(engine, ms_stream_last(b)));
    }
    assert_int_equal(questions(), asked);
    ok(ms_replay_end(replay));
    assert_int_equal(calls("cuLaunchKernel"), kernels + EACH + (EACH + 99) / 100);
    assert_true(value_of(x) == 1 + EACH);
    unsigned graphs = calls("cuGraphLaunch");
    kernels = calls("cuLaunchKernel");
    ok(ms_replay_run(replay, NULL));
    assert_int_equal(calls("cuGraphLaunch"), graphs + 1);
    assert_int_equal(calls("cuLaunchKernel"), kernels);
    assert_true(value_of(x) == 1 + 2 * EACH);
    assert_true(value_of(y) == 2 + EACH + (EACH - 1) / 100 * 100);
    ms_replay_free(replay);
    ms_storage_release(x);
    ms_storage_release(y);
    finish(engine);
}

typedef struct counter {
    int calls, fails_at;
} counter;
static ms_status count_call(void *user, char *message, size_t bytes)
{
    counter *it = user;
    if (++it->calls != it->fails_at) return MS_OK;
    snprintf(message, bytes, "call %d failed", it->calls);
    return MS_ERROR_IO;
}

/* More replays than a stream holds; each failure has the number of its own replay. */
static void many_replays_are_under_way(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    counter it = { .fails_at = 2900 };
    ms_host_call call = { .name = "count", .function = count_call, .user = &it, .repeats = true };
    ms_storage *x = filled(a, 0), *before = filled(a, 3), *after = filled(a, 0);
    ms_replay *replay = begin(a);
    run(a, &scales, x, x, 1, 1);
    ok(ms_stream_call(a, &call, NULL, 0, (ms_task_cost){ 0 }, NULL));
    ok(ms_replay_end(replay));
    for (int i = 1; i < 2899; i++) ok(ms_replay_run(replay, NULL));
    run(a, &scales, before, before, 1, 1); /* before the one that fails */
    ok(ms_replay_run(replay, NULL));
    run(a, &scales, after, before, 1, 1);
    ms_status status = MS_OK;
    for (int i = 0; i < 200 && !status; i++) status = ms_replay_run(replay, NULL);
    if (!status) status = ms_stream_sync(a);
    assert_error(engine, status, MS_ERROR_IO, "call 2900 failed");
    assert_int_equal(it.calls, 2900);
    assert_true(value_of(before) == 4);
    float value;
    assert_int_equal(ms_storage_read(after, 0, &value, sizeof value), MS_ERROR_TASK);
    assert_int_equal(ms_storage_read(x, 0, &value, sizeof value), MS_ERROR_TASK);
    fill(a, x, 0);
    ok(ms_replay_run(replay, NULL));
    assert_true(value_of(x) == 1);
    assert_int_equal(it.calls, 2901);
    ms_replay_free(replay);
    ms_storage_release(x);
    ms_storage_release(before);
    ms_storage_release(after);
    finish(engine);
}

/* -------------------------------------------------------------------- memory */

/* to = from * factor + 2 * term, by way of scratch of `bytes`. */
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
static void pass(ms_stream *on, ms_storage *to, ms_storage *from, size_t bytes)
{
    through_args args = { { .to = ms_storage_data(to),
                            .from = ms_storage_data(from),
                            .factor = 1,
                            .term = 1,
                            .count = COUNT },
                          bytes };
    ms_access accesses[2] = { { .storage = to, .cells = 1, .mode = MS_READ | MS_WRITE },
                              { .storage = from, .cells = 1, .mode = MS_READ } };
    ok(ms_stream_enqueue(on, &through.task, &args, accesses, 2, (ms_task_cost){ 0 }, NULL));
}

/* It is in the graph by its address, and tasks want more of it: before the recording, within it,
 * and between replays. */
static void scratch_stays_with_a_recording(void **state)
{
    (void)state;
    enum { MIB = 1 << 20 };
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *x = filled(a, 0), *y = filled(b, 0);
    pass(a, x, x, 100); /* on its way when more is wanted */
    ms_replay *replay = begin(a);
    pass(a, x, x, MIB + 1);
    pass(b, y, x, 1000);
    pass(a, x, x, 3 * MIB);
    ok(ms_replay_end(replay));
    pass(a, x, x, 4 * MIB);
    pass(b, y, y, 4 * MIB);
    double expected_x = 8, expected_y = 8; /* x: 2, 4, 6, 8; y: 4 + 2, + 2 */
    assert_true(value_of(x) == expected_x && value_of(y) == expected_y);
    for (int i = 0; i < 5; i++) {
        ok(ms_replay_run(replay, NULL));
        expected_y = expected_x + 4;
        expected_x += 4;
        pass(a, x, x, (size_t)(5 + i) * MIB);
        expected_x += 2;
        assert_true(value_of(y) == expected_y);
    }
    assert_true(value_of(x) == expected_x);
    ms_replay_free(replay);
    ms_storage_release(x);
    ms_storage_release(y);
    finish(engine);
}

/* One that is over is freed when another one has begun: its memory goes when that may be. */
static void a_recording_is_freed_while_work_is_recorded(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 0);
    ms_replay *first = begin(a);
    pass(a, x, x, 100);
    ok(ms_replay_end(first));
    pass(a, x, x, 2 << 20); /* now only the recording has the first scratch */
    ok(ms_engine_sync(engine));
    ms_replay *replay = begin(a);
    ms_replay_free(first);
    pass(a, x, x, 100);
    ok(ms_replay_end(replay));
    ok(ms_replay_run(replay, NULL));
    assert_true(value_of(x) == 8);
    ms_replay_free(replay);
    ms_storage_release(x);
    finish(engine);
}

/* What is allocated and released meanwhile: the pool's memory, and the host's. */
static void memory_is_taken_while_work_is_recorded(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    void *early = NULL, *late = NULL;
    ms_storage *x = filled(a, 1);
    ok(ms_host_memory_new(engine, 5000, "values", &early));
    ms_replay *replay = begin(a);
    ms_storage *y = storage_of(a, 9 << 20);
    unsigned freed = calls("cuMemFreeHost");
    ok(ms_host_memory_new(engine, 100, "values", &late));
    memset(late, 0, 100);
    ms_host_memory_free(engine, early);
    ms_host_memory_free(engine, late);
    fill(a, x, 2);
    assert_int_equal(calls("cuMemFreeHost"), freed);
    ok(ms_replay_end(replay));
    assert_int_equal(calls("cuMemFreeHost"), freed + 2);
    fill(a, x, 7);
    ok(ms_replay_run(replay, NULL));
    assert_true(value_of(x) == 2);
    ms_replay_free(replay);
    ms_storage_release(x);
    ms_storage_release(y);
    finish(engine);
}

/* ------------------------------------------------------------ marks, streams, traces */

static void marks_are_passed_at_the_end(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *x = filled(a, 1);
    ms_replay *replay = begin(a);
    ms_marks *marks = marks_of(engine, 3);
    uint64_t times[3];
    run(b, &scales, x, x, 1, 1);
    ok(ms_marks_set(marks, 0, a));
    ok(ms_marks_set(marks, 1, b));
    ok(ms_marks_set(marks, 0, b)); /* once more, after the first time */
    run(a, &scales, x, x, 1, 1);
    ok(ms_replay_end(replay));
    ok(ms_marks_set(marks, 2, a));
    ok(ms_engine_sync(engine));
    for (uint32_t i = 0; i < 3; i++) assert_true(ms_marks_time(marks, i, &times[i]));
    assert_true(times[1] <= times[0] && times[2] > 0);
    ok(ms_replay_run(replay, NULL));
    assert_true(value_of(x) == 5);
    uint64_t again;
    assert_true(ms_marks_time(marks, 0, &again) && again == times[0]);
    ms_marks_free(marks);
    ms_replay_free(replay);
    ms_storage_release(x);
    finish(engine);
}

static void streams_are_made_while_work_is_recorded(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = NULL, *c = NULL;
    ms_storage *x = filled(a, 1), *y = filled(a, 0);
    ms_replay *replay = begin(a);
    ok(ms_engine_stream(engine, "b", &b));
    ok(ms_stream_set_priority(b, 1));
    ok(ms_engine_stream(engine, "c", &c)); /* never used */
    run(b, &scales, y, x, 2, 0);
    run(a, &scales, x, x, 1, 1);
    ok(ms_replay_end(replay));
    ok(ms_replay_run(replay, NULL));
    run(c, &scales, y, y, 1, 1);
    assert_true(value_of(x) == 3 && value_of(y) == 5);
    ms_replay_free(replay);
    ms_storage_release(x);
    ms_storage_release(y);
    finish(engine);
}

static void a_trace_has_the_times_of_replays(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 1);
    ok(ms_trace_start(engine));
    ms_replay *replay = begin(a);
    run(a, &scales, x, x, 1, 1);
    ok(ms_replay_end(replay));
    ok(ms_replay_run(replay, NULL));
    ok(ms_trace_stop(engine));
    assert_int_equal(ms_trace_count(engine), 2);
    const ms_trace_record *first = ms_trace_get(engine, 0), *second = ms_trace_get(engine, 1);
    assert_true(first->started_ns == 0 && first->finished_ns == 0);
    assert_string_equal(second->name, "replay");
    assert_true(second->started_ns > 0 && second->finished_ns >= second->started_ns);
    assert_true(value_of(x) == 3);
    ms_replay_free(replay);
    ms_storage_release(x);
    finish(engine);
}

/* ---------------------------------------------------------- what cannot be recorded */

static ms_replay *another;
static float outside[COUNT];

static void copy_to_the_host(ms_stream *a, ms_storage *x)
{
    ok(ms_stream_copy_out(a, x, 0, outside, sizeof outside, NULL));
}
static void await_the_device(ms_stream *a, ms_storage *x)
{
    (void)a, (void)x;
    ms_replay_free(another);
    another = NULL;
}
static void replay_another(ms_stream *a, ms_storage *x)
{
    (void)a, (void)x;
    ok(ms_replay_run(another, NULL));
}

static void call_once(ms_stream *a, ms_storage *x)
{
    static counter it;
    ms_host_call call = { .name = "count", .function = count_call, .user = &it };
    (void)x;
    it.calls = 0;
    ok(ms_stream_call(a, &call, NULL, 0, (ms_task_cost){ 0 }, NULL));
}

static ms_status hear(void *user, ms_error *error)
{
    (void)error;
    ++*(int *)user;
    return MS_OK;
}
static void run_telling(ms_cuda_work *work, const void *arguments)
{
    static int heard;
    if (ms_cuda_after(work, hear, &heard)) run_scale(work, arguments);
}
static const ms_cuda_task tells = { .task = { .name = "tells", .args_bytes = sizeof(scale_args) },
                                    .function = run_telling };
static void tell_the_host(ms_stream *a, ms_storage *x) { run(a, &tells, x, x, 1, 0); }

/* The work before and after is carried out, in order, and only once. */
static void what_cannot_be_recorded_is_told(void **state)
{
    (void)state;
    static const struct {
        void (*does)(ms_stream *a, ms_storage *x);
        const char *words;
    } cases[] = { { copy_to_the_host, "copied to the host" },
                  { await_the_device, "the host waits" },
                  { replay_another, "a replay cannot be part" },
                  { call_once, "count is called on the host" },
                  { tell_the_host, "tells tells the host" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ms_engine *engine = make_engine();
        ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
        ms_storage *x = filled(a, 1), *y = filled(a, 1), *z = filled(a, 0);
        another = begin(b);
        run(b, &scales, z, z, 1, 1);
        ok(ms_replay_end(another));
        ms_replay *replay = begin(a);
        run(a, &scales, x, x, 2, 0); /* 2 */
        run(b, &scales, y, x, 1, 3); /* 5 */
        uint32_t line = 0;
        ok(ms_strings_add(engine->strings, "train.lua:7", 11, &line));
        ms_engine_set_script(engine, line);
        cases[i].does(a, x);
        ms_engine_set_script(engine, 0);
        run(a, &scales, x, y, 1, 1); /* 6 */
        run(b, &scales, y, x, 1, 1); /* 7 */
        cases[i].does(a, x);
        assert_error(engine, ms_replay_end(replay), MS_ERROR_UNSUPPORTED, cases[i].words);
        assert_non_null(strstr(ms_engine_error(engine)->message, "(at train.lua:7)"));
        assert_int_equal(ms_replay_run(replay, NULL), MS_ERROR_STATE);
        assert_true(value_of(x) == 6 && value_of(y) == 7);
        /* The engine goes on, and records again. */
        ms_replay_free(replay);
        replay = begin(a);
        run(a, &scales, x, x, 2, 0);
        ok(ms_replay_end(replay));
        ok(ms_replay_run(replay, NULL));
        assert_true(value_of(x) == 24);
        ms_replay_free(replay);
        ms_replay_free(another);
        ms_storage_release(x);
        ms_storage_release(y);
        ms_storage_release(z);
        finish(engine);
    }
}

/* ------------------------------------------------------------------- failures */

/* A call of the driver fails while work is recorded, or when the recording ends. */
static void failures_of_the_driver_are_told(void **state)
{
    (void)state;
    static const struct {
        const char *call;
        bool at_the_end;
        const char *words; /* of the recording's error */
    } cases[] = { { "cuLaunchKernel", false, "scale failed" },
                  { "cuStreamWaitEvent", false, "recording failed" },
                  { "cuMemAlloc_v2", false, "through failed" },
                  { "cuMemHostAlloc", false, "write failed" },
                  { "cuStreamEndCapture", true, "cannot be carried out: CUDA_ERROR_OUT_OF_MEMORY" },
                  { "cuEventRecord", true, "cannot be carried out" },
                  { "cuGraphInstantiateWithFlags", true, "cannot be carried out" },
                  { "cuGraphLaunch", true, "cannot be carried out" } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ms_engine *engine = make_engine();
        ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
        ms_storage *x = filled(a, 1), *y = filled(a, 2);
        ms_replay *replay = begin(a);
        scale_args args = { ms_storage_data(x), ms_storage_data(x), 1, 1, COUNT };
        ms_access access = { .storage = x, .cells = 1, .mode = MS_READ | MS_WRITE };
        if (!cases[i].at_the_end) fails(cases[i].call, 2);
        /* Any of these may fail or be refused after a failure. */
        ms_status status =
            ms_stream_enqueue(b, &scales.task, &args, &access, 1, (ms_task_cost){ 0 }, NULL);
        through_args more = { args, 100 };
        if (!status)
            status =
                ms_stream_enqueue(a, &through.task, &more, &access, 1, (ms_task_cost){ 0 }, NULL);
        if (!status) status = ms_stream_copy_in(a, y, 0, outside, sizeof outside, NULL);
        if (cases[i].at_the_end) {
            ok(status);
            fails(cases[i].call, 2);
        }
        ms_status ended = ms_replay_end(replay);
        fails(NULL, 0);
        assert_true(ended != MS_OK);
        if (!strstr(ms_engine_error(engine)->message, cases[i].words))
            fail_msg("%s: %s", cases[i].call, ms_engine_error(engine)->message);
        if (!status) status = ms_engine_sync(engine);
        assert_int_not_equal(status, MS_OK);
        /* What should have been written is lost, and the engine goes on. */
        ms_replay_free(replay);
        fill(a, x, 1);
        fill(a, y, 2);
        replay = begin(a);
        run(b, &scales, y, x, 3, 0);
        ok(ms_replay_end(replay));
        fill(a, x, 2);
        ok(ms_replay_run(replay, NULL));
        assert_true(value_of(y) == 6);
        ms_replay_free(replay);
        ms_storage_release(x);
        ms_storage_release(y);
        finish(engine);
    }
}

static void a_recording_that_cannot_begin_is_told(void **state)
{
    (void)state;
    static const char *const cases[] = { "cuStreamBeginCapture_v2", "cuEventCreate" };
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 1);
    ms_replay *replay = NULL;
    for (size_t i = 0; i < 2; i++) {
        fails(cases[i], 2);
        assert_error(engine, ms_replay_begin(a, &replay), MS_ERROR_MEMORY,
                     "work cannot be recorded: CUDA_ERROR_OUT_OF_MEMORY");
        assert_null(replay);
        run(a, &scales, x, x, 1, 1);
    }
    assert_true(value_of(x) == 3);
    ms_storage_release(x);
    finish(engine);
}

/* A replay that the driver refuses, and a GPU that stops: the host waits for nothing that will
 * never be. */
static void a_replay_may_fail(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *x = filled(a, 1), *y = filled(a, 1);
    counter it = { 0 };
    ms_host_call call = { .name = "count", .function = count_call, .user = &it, .repeats = true };
    ms_replay *replay = begin(a);
    run(b, &scales, x, x, 1, 1);
    ok(ms_stream_call(b, &call, NULL, 0, (ms_task_cost){ 0 }, NULL));
    ok(ms_replay_end(replay));
    ok(ms_engine_sync(engine));
    fails("cuGraphLaunch", 2);
    (void)ms_replay_run(replay, NULL);
    assert_error(engine, ms_engine_sync(engine), MS_ERROR_MEMORY, "replay: CUDA_ERROR_OUT_OF");
    fill(a, x, 5);
    fill(a, y, 6);
    it.fails_at = 2; /* the refused one was none */
    ok(ms_replay_run(replay, NULL));
    assert_error(engine, ms_engine_sync(engine), MS_ERROR_IO, "call 2 failed");
    assert_true(value_of(y) == 6); /* it was written before */
    fill(a, x, 5);
    ok(ms_replay_run(replay, NULL));
    stops(719);
    assert_error(engine, ms_engine_sync(engine), MS_ERROR_TASK, "the GPU has stopped");
    ms_replay_free(replay);
    ms_storage_release(x);
    ms_storage_release(y);
    ms_engine_free(engine);
    stops(0);
}

static void a_gpu_may_stop_while_work_is_recorded(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *x = filled(a, 1);
    ms_replay *replay = begin(a);
    run(a, &scales, x, x, 1, 1);
    stops(719);
    assert_int_equal(ms_replay_end(replay), MS_ERROR_TASK);
    assert_error(engine, ms_engine_sync(engine), MS_ERROR_TASK, "CUDA_ERROR_LAUNCH_FAILED");
    ms_replay_free(replay);
    ms_storage_release(x);
    ms_engine_free(engine);
    stops(0);
}

/* ----------------------------------------------------------- failing the n-th */

static void note_nothing(const ms_cuda_fault *fault, char *message, size_t bytes)
{
    (void)fault;
    snprintf(message, bytes, "a fault");
}
static void run_noting(ms_cuda_work *work, const void *arguments)
{
    if (ms_cuda_fault_of(work)) run_scale(work, arguments);
}
static const ms_cuda_task notes = { .task = { .name = "notes", .args_bytes = sizeof(scale_args) },
                                    .function = run_noting,
                                    .explain = note_nothing };

static ms_status record_all(ms_stream *a, ms_stream *b, ms_storage *x)
{
    static counter it;
    ms_engine *engine = ms_stream_engine(a);
    ms_host_call call = { .name = "count", .function = count_call, .user = &it, .repeats = true };
    scale_args args = { ms_storage_data(x), ms_storage_data(x), 1, 0, COUNT };
    through_args more = { args, 100 };
    ms_access access = { .storage = x, .cells = 1, .mode = MS_READ | MS_WRITE };
    ms_replay *replay = NULL;
    ms_marks *marks = NULL;
    ms_task_cost cost = { 0 };
    ms_status status = ms_marks_new(engine, 1, &marks);
    if (!status) status = ms_replay_begin(a, &replay);
    if (!status) status = ms_stream_copy_in(a, x, 0, outside, sizeof outside, NULL);
    if (!status) status = ms_stream_enqueue(b, &notes.task, &args, &access, 1, cost, NULL);
    if (!status) status = ms_stream_enqueue(a, &through.task, &more, &access, 1, cost, NULL);
    if (!status) status = ms_stream_call(b, &call, &access, 1, cost, NULL);
    if (!status) status = ms_marks_set(marks, 0, b);
    if (!status) status = ms_stream_fail_if(a, "check", x, 0, "it is not 0");
    if (replay) {
        ms_status ended = ms_replay_end(replay);
        if (!status) status = ended;
    }
    if (!status) status = ms_replay_run(replay, NULL);
    ms_replay_free(replay);
    ms_marks_free(marks);
    return status;
}

static ms_status program(const ms_os *os, ms_engine **engine)
{
    ms_engine_options options = { .os = os, .own_device = &ms_device_cuda, .threads = 1 };
    ms_stream *b = NULL;
    ms_storage *x = NULL;
    ms_status status = ms_engine_new(&options, NULL, engine);
    if (status) return status;
    ms_stream *a = ms_engine_current(*engine);
    status = ms_engine_stream(*engine, "side", &b);
    if (!status) status = ms_storage_new(a, COUNT * sizeof(float), &x);
    if (!status) status = record_all(a, b, x);
    if (!status) status = ms_engine_sync(*engine);
    ms_storage_release(x);
    return status;
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    const char *text;
    (void)state;
    ms_engine_free(make_engine()); /* the kernel is known */
    memset(outside, 0, sizeof outside);
    fail_each_call(program, false);
    assert_int_equal(left(), 0);
    unsigned faults = ((stand_in_faults_function *)stand_in("stand_in_faults"))(&text);
    if (faults) fail_msg("%u faults: %s", faults, text);
}

static int set_up(void **state)
{
    (void)state;
    setenv("MOONSHARD_STAND_IN_WATCH", "count", 1);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_replay_is_one_launch),
        cmocka_unit_test(many_replays_are_under_way),
        cmocka_unit_test(scratch_stays_with_a_recording),
        cmocka_unit_test(a_recording_is_freed_while_work_is_recorded),
        cmocka_unit_test(memory_is_taken_while_work_is_recorded),
        cmocka_unit_test(marks_are_passed_at_the_end),
        cmocka_unit_test(streams_are_made_while_work_is_recorded),
        cmocka_unit_test(a_trace_has_the_times_of_replays),
        cmocka_unit_test(what_cannot_be_recorded_is_told),
        cmocka_unit_test(failures_of_the_driver_are_told),
        cmocka_unit_test(a_recording_that_cannot_begin_is_told),
        cmocka_unit_test(a_replay_may_fail),
        cmocka_unit_test(a_gpu_may_stop_while_work_is_recorded),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
