/* cuda_device.c: the cuda device over a stand-in for NVIDIA's driver, which has no GPU and runs
 * work as late as it may, in orders that a seed chooses. */
#include "cuda_support.h"

#include <stdio.h>
#include <string.h>

static void is(int version, int gpus)
{
    ((stand_in_is_function *)stand_in("stand_in_is"))(version, gpus);
}

/* A kernel that its image does not have. */
static const unsigned char other_image[] = "other";
static const ms_cuda_kernel missing_kernel = { .image = other_image, .name = "missing" };
static void run_missing(ms_cuda_work *work, const void *arguments)
{
    ms_cuda_shape shape = { .blocks = { 1 } };
    ms_cuda_launch(work, &missing_kernel, shape, arguments, sizeof(scale_args));
}
static const ms_cuda_task misses = { .task = { .name = "misses", .args_bytes = sizeof(scale_args) },
                                     .function = run_missing };

/* --------------------------------------------------------------------- order */

/* Two streams take turns with three storages; the engine inserts the waits. The numbers tell
 * whether one was missing. */
static void streams_keep_the_order_of_the_host(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *on[2] = { ms_engine_current(engine), side_of(engine) };
    ms_storage *storages[3];
    double expected[3] = { 1, 2, 3 };
    for (int i = 0; i < 3; i++) {
        storages[i] = storage_of(on[0], 96 * sizeof(float));
        fill(on[0], storages[i], (float)expected[i]);
    }
    for (uint32_t i = 0, random = 5; i < 3000; i++) {
        random = random * 1664525u + 1013904223u;
        uint32_t to = random >> 20 & 3, from = random >> 24 & 3;
        if (to == 3 || from == 3) continue;
        run(on[random >> 28 & 1], &scales, storages[to], storages[from], 0.5f, (float)(i % 7));
        expected[to] = expected[from] * 0.5 + i % 7;
    }
    for (int i = 0; i < 3; i++) {
        /* Sums of powers of two times small integers, until they are rounded: below 14, so the
         * error of a step is below 1e-6, and it is halved in each step. */
        float value = value_of(storages[i]);
        assert_true(value - expected[i] < 4e-6 && expected[i] - value < 4e-6);
        ms_storage_release(storages[i]);
    }
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* Work on one stream costs a call of the driver each, and no event. */
static void a_task_is_one_call(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *storage = storage_of(a, 256 * sizeof(float));
    fill(a, storage, 0);
    unsigned launches = calls("cuLaunchKernel"), records = calls("cuEventRecord"),
             waits = calls("cuStreamWaitEvent");
    for (int i = 0; i < 500; i++) run(a, &scales, storage, storage, 1, 1);
    assert_int_equal(calls("cuLaunchKernel") - launches, 500);
    assert_int_equal(calls("cuEventRecord") - records, 0);
    assert_int_equal(calls("cuStreamWaitEvent") - waits, 0);
    assert_true(value_of(storage) == 500);
    /* One event serves all that wait for the same place. */
    records = calls("cuEventRecord");
    ms_point point = ms_stream_last(a);
    run(a, &scales, storage, storage, 1, 1);
    point = ms_stream_last(a);
    assert_int_equal(ms_stream_wait(side_of(engine), point), MS_OK);
    assert_int_equal(ms_point_sync(engine, point), MS_OK);
    assert_int_equal(calls("cuEventRecord") - records, 1);
    ms_storage_release(storage);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* More than a stream's depth: the host waits for the oldest work. */
static void a_stream_has_a_depth(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *storage = storage_of(a, sizeof(float));
    fill(a, storage, 0);
    for (int i = 0; i < 5 * MS_STREAM_DEPTH; i++) run(a, &scales, storage, storage, 1, 1);
    assert_true(value_of(storage) == 5 * MS_STREAM_DEPTH);
    ms_storage_release(storage);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* The driver's streams get their priorities when they are made, or while they are new. */
static void streams_have_priorities(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        int32_t priority, expected;
    } all[] = { { "first", MS_PRIORITY_HIGH, -5 },
                { "second", MS_PRIORITY_LOW, 0 },
                { "third", MS_PRIORITY_NORMAL, 0 } };
    stand_in_priority_function *priority_of =
        (stand_in_priority_function *)stand_in("stand_in_priority");
    ms_engine *engine = make_engine();
    unsigned made = calls("cuStreamCreateWithPriority");
    for (int i = 0; i < 3; i++) {
        ms_stream *stream = NULL;
        void *native = NULL;
        assert_int_equal(ms_engine_stream_with(engine, all[i].name, all[i].priority, &stream),
                         MS_OK);
        assert_int_equal(ms_stream_native(stream, &native), MS_OK);
        assert_int_equal(priority_of(native), all[i].expected);
    }
    assert_int_equal(calls("cuStreamCreateWithPriority") - made, 3);
    for (int32_t priority = 1; priority >= 0; priority--) {
        void *native = NULL;
        assert_int_equal(ms_stream_set_priority(side_of(engine), priority), MS_OK);
        assert_int_equal(ms_stream_native(side_of(engine), &native), MS_OK);
        assert_int_equal(priority_of(native), priority ? -5 : 0);
    }
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

static void marks_have_times(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_marks *marks = marks_of(engine, 2);
    ms_storage *storage = storage_of(a, sizeof(float));
    uint64_t first = 0, second = 0, before = ms_now(engine);
    assert_int_equal(ms_marks_set(marks, 0, a), MS_OK);
    fill(a, storage, 0);
    assert_int_equal(ms_marks_set(marks, 1, a), MS_OK);
    assert_false(ms_marks_time(marks, 1, &second));
    assert_int_equal(ms_stream_sync(a), MS_OK);
    assert_true(ms_marks_time(marks, 0, &first) && ms_marks_time(marks, 1, &second));
    assert_true(first + 100000 > before && second >= first && second < ms_now(engine) + 100000);
    ms_marks_free(marks);
    ms_storage_release(storage);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* A host and a GPU whose clocks jump. */
static _Atomic uint64_t later_ns;
static uint64_t clock_that_jumps(void *user)
{
    return ms_os_posix()->monotonic_ns(user) + later_ns;
}
static ms_status pass(void *user, char *message, size_t bytes)
{
    void (*stand_in_passes)(uint64_t);
    (void)message, (void)bytes;
    *(void **)&stand_in_passes = stand_in("stand_in_pass");
    stand_in_passes(*(const uint64_t *)user);
    return MS_OK;
}
static void let_pass(ms_stream *stream, uint64_t ns)
{
    ms_host_call call = { .name = "pass", .function = pass, .user = &ns };
    assert_int_equal(ms_stream_call(stream, &call, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
    assert_int_equal(ms_stream_sync(stream), MS_OK);
    later_ns += ns;
}

/* The driver tells spans in f32 milliseconds, of which one of 10 hours has steps of 4 ms. */
static void times_stay_exact_for_hours(void **state)
{
    (void)state;
    const uint64_t hours = 36000000000000u, ms = 1000000;
    ms_os os = *ms_os_posix();
    ms_engine_options options = { .os = &os, .own_device = &ms_device_cuda, .threads = 1 };
    ms_engine *engine = NULL;
    uint64_t begin = 0, first = 0, second = 0;
    os.monotonic_ns = clock_that_jumps;
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    uint64_t opened = ms_now(engine);
    ms_stream *a = ms_engine_current(engine);
    ms_marks *marks = marks_of(engine, 3);
    assert_int_equal(ms_marks_set(marks, 0, a), MS_OK);
    assert_int_equal(ms_stream_sync(a), MS_OK);
    assert_true(ms_marks_time(marks, 0, &begin));
    for (int round = 0; round < 3; round++) {
        uint64_t way = (uint64_t)round * 1000000000u;
        let_pass(a, round ? 1000000000u : hours);
        uint64_t since = ms_now(engine);
        assert_int_equal(ms_marks_set(marks, 1, a), MS_OK);
        let_pass(a, 1000);
        assert_int_equal(ms_marks_set(marks, 2, a), MS_OK);
        assert_int_equal(ms_stream_sync(a), MS_OK);
        assert_true(ms_marks_time(marks, 1, &first) && ms_marks_time(marks, 2, &second));
        /* What the stand-in does in between takes its time, too. */
        assert_in_range(second - first, 1000 - 500, ms_now(engine) - since + 500);
        assert_in_range(first - begin, hours + way - 5 * ms, ms_now(engine) - opened + 5 * ms);
    }
    ms_marks_free(marks);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* ------------------------------------------------------------------- on the host */

static ms_status add_one(void *user, char *message, size_t bytes)
{
    (void)message, (void)bytes;
    ++*(int *)user;
    return MS_OK;
}
/* Once the word is set. */
static ms_status refuse(void *user, char *message, size_t bytes)
{
    while (!atomic_load((ms_word *)user)) ms_yield();
    snprintf(message, bytes, "the file is full");
    return MS_ERROR_IO;
}

static void functions_of_the_host_run_in_order(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    int count = 0;
    ms_word goes_on = 0;
    ms_host_call good = { .name = "count", .function = add_one, .user = &count },
                 bad = { .name = "write", .function = refuse, .user = &goes_on };
    assert_int_equal(ms_stream_call(a, &good, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
    assert_int_equal(ms_stream_call(a, &bad, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
    assert_int_equal(ms_stream_call(a, &good, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
    atomic_store(&goes_on, 1);
    assert_int_equal(ms_stream_sync(a), MS_ERROR_IO);
    assert_non_null(strstr(ms_engine_error(engine)->message, "the file is full"));
    assert_int_equal(count, 1);
    assert_int_equal(ms_stream_call(a, &good, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
    assert_int_equal(ms_stream_sync(a), MS_OK);
    assert_int_equal(count, 2);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* Two functions that wait for each other, as those of two ranks would: the driver runs all of them
 * on one thread. */
typedef struct guest {
    _Atomic int is_here;
    struct guest *other;
} guest;

static ms_status meet(void *user, char *message, size_t bytes)
{
    guest *self = user;
    (void)message;
    (void)bytes;
    atomic_store(&self->is_here, 1);
    while (!atomic_load(&self->other->is_here)) ms_yield();
    return MS_OK;
}

static void functions_of_two_streams_may_wait_for_each_other(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *on[2] = { ms_engine_current(engine), side_of(engine) };
    ms_storage *storage = storage_of(on[0], sizeof(float));
    guest guests[2] = { { .other = guests + 1 }, { .other = guests } };
    for (int i = 0; i < 2; i++) {
        ms_host_call call = { .name = "meet", .function = meet, .user = &guests[i] };
        assert_int_equal(ms_stream_call(on[i], &call, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
    }
    /* What follows on a stream comes after its function. */
    fill(on[0], storage, 3);
    assert_true(value_of(storage) == 3);
    assert_int_equal(atomic_load(&guests[1].is_here), 1);
    ms_storage_release(storage);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* Other ranks would get what a task has computed that failed. */
static void no_function_runs_after_what_failed(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++) {
        ms_engine *engine = make_engine();
        ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
        ms_storage *flag = storage_of(a, sizeof(float));
        int count = 0;
        ms_host_call call = { .name = "count", .function = add_one, .user = &count };
        fill(a, flag, 1);
        assert_int_equal(ms_stream_fail_if(a, "check", flag, 0, "it is not finite"), MS_OK);
        assert_int_equal(ms_stream_wait(b, ms_stream_last(a)), MS_OK);
        assert_int_equal(ms_stream_call(b, &call, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
        assert_int_equal(ms_stream_sync(b), MS_ERROR_TASK);
        assert_non_null(strstr(ms_engine_error(engine)->message, "it is not finite"));
        assert_int_equal(count, 0);
        ms_storage_release(flag);
        ms_engine_free(engine);
    }
}

static ms_status wait_for_word(void *user, char *message, size_t bytes)
{
    (void)message, (void)bytes;
    while (!atomic_load((ms_word *)user)) ms_yield();
    return MS_OK;
}

/* A driver may keep calls waiting that take or give memory, or load a kernel, until all work is
 * over. The function may be waiting for another rank, which makes such calls. */
static void the_gpu_waits_for_no_function(void **state)
{
    (void)state;
    ms_word goes_on = 0;
    ms_point before, after;
    void *memory = NULL;
    setenv("MOONSHARD_STAND_IN_WAITS", "1", 1);
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *storage = storage_of(a, sizeof(float)), *other = storage_of(b, sizeof(float)),
               *third = storage_of(b, sizeof(float));
    ms_host_call call = { .name = "wait", .function = wait_for_word, .user = &goes_on };
    fill(a, storage, 3);
    before = ms_stream_last(a);
    assert_int_equal(ms_stream_call(a, &call, NULL, 0, (ms_task_cost){ 0 }, &after), MS_OK);
    assert_int_equal(ms_host_memory_new(engine, 1 << 20, "a test", &memory), MS_OK);
    ms_host_memory_free(engine, memory);
    fill(b, other, 4);
    /* The host can wait for other streams, and for what comes before the function. */
    assert_true(value_of(other) == 4);
    assert_true(value_of(storage) == 3);
    assert_true(ms_point_reached(engine, before));
    /* What comes after it waits for its turn, on other streams, too. */
    fill(a, storage, 5);
    run(b, &scales, third, storage, 2, 0);
    assert_false(ms_point_reached(engine, after));
    assert_false(ms_point_reached(engine, ms_stream_last(b)));
    atomic_store(&goes_on, 1);
    assert_true(value_of(third) == 10);
    assert_true(value_of(storage) == 5);
    assert_true(ms_point_reached(engine, after));
    unsetenv("MOONSHARD_STAND_IN_WAITS");
    ms_storage_release(storage);
    ms_storage_release(other);
    ms_storage_release(third);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

static _Atomic int has_begun, job_has_ended, has_returned;
static void end_job(ms_engine *engine, const ms_error *error)
{
    (void)engine;
    (void)error;
    atomic_store(&job_has_ended, 1);
}
static ms_status wait_for_the_end(void *user, char *message, size_t bytes)
{
    (void)user;
    atomic_store(&has_begun, 1);
    while (!atomic_load(&job_has_ended)) ms_yield();
    for (int i = 0; i < 1000; i++) ms_yield();
    atomic_store(&has_returned, 1);
    snprintf(message, bytes, "the job has ended");
    return MS_ERROR_ABORTED;
}

/* A function that waits for others returns before anybody takes the stream for done: what it uses
 * is freed then. */
static void a_gpu_that_stops_waits_for_functions(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_host_call call = { .name = "wait", .function = wait_for_the_end };
    ms_engine_on_failure(engine, end_job);
    assert_int_equal(ms_stream_call(a, &call, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
    while (!atomic_load(&has_begun)) ms_yield();
    stops(719);
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_TASK);
    assert_non_null(strstr(ms_engine_error(engine)->message, "the GPU has stopped"));
    assert_int_equal(atomic_load(&has_returned), 1);
    ms_engine_free(engine);
    stops(0);
}

/* The stream fails, those that wait for it fail as well, and what they wrote cannot be read. */
static void a_flag_makes_its_stream_fail(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *flag = storage_of(a, sizeof(float)), *after = storage_of(a, sizeof(float)),
               *before = storage_of(a, sizeof(float));
    fill(a, flag, 0);
    fill(a, before, 7);
    assert_int_equal(ms_stream_fail_if(a, "check", flag, 0, "it is not finite"), MS_OK);
    assert_int_equal(ms_stream_sync(a), MS_OK);
    unsigned allocations = calls("cuMemHostAlloc");
    fill(a, flag, 1);
    assert_int_equal(ms_stream_fail_if(a, "check", flag, 0, "it is not finite"), MS_OK);
    fill(a, after, 3);
    run(b, &scales, after, after, 2, 0);
    assert_int_equal(ms_stream_sync(b), MS_ERROR_TASK);
    assert_non_null(strstr(ms_engine_error(engine)->message, "it is not finite"));
    assert_int_equal(calls("cuMemHostAlloc"), allocations); /* the memory of the first check */
    float value = 0;
    assert_int_not_equal(ms_storage_read(after, 0, &value, sizeof value), MS_OK);
    assert_true(value_of(before) == 7);
    ms_storage_release(flag);
    ms_storage_release(after);
    ms_storage_release(before);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* ------------------------------------------------------------------- errors */

static char said[MS_ERROR_MESSAGE_BYTES];

static void errors_name_the_task(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *storage = storage_of(a, sizeof(float));
    fill(a, storage, 1);
    run(a, &misses, storage, storage, 1, 1);
    assert_int_equal(ms_stream_sync(a), MS_ERROR_TASK);
    assert_non_null(strstr(ms_engine_error(engine)->message, "misses: CUDA_ERROR_NOT_FOUND"));
    fails("cuLaunchKernel", 2);
    fill(a, storage, 1);
    run(a, &scales, storage, storage, 1, 1);
    assert_int_equal(ms_stream_sync(a), MS_ERROR_MEMORY);
    assert_non_null(strstr(ms_engine_error(engine)->message, "scale: CUDA_ERROR_OUT_OF_MEMORY"));
    assert_non_null(strstr(ms_engine_error(engine)->message, ", in stream \"compute\""));
    /* The engine goes on. */
    fill(a, storage, 1);
    run(a, &scales, storage, storage, 2, 1);
    assert_true(value_of(storage) == 3);
    ms_storage_release(storage);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

static ms_task_result nothing(ms_run *run, void *arguments)
{
    (void)run, (void)arguments;
    return MS_TASK_DONE;
}

static void a_function_for_the_cpu_is_refused(void **state)
{
    static const ms_task task = { .name = "own", .function = nothing };
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    assert_int_equal(ms_stream_enqueue(a, &task, NULL, NULL, 0, (ms_task_cost){ 0 }, NULL), MS_OK);
    assert_int_equal(ms_stream_sync(a), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "task own is a function for the CPU"));
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

static char warned[MS_ERROR_MESSAGE_BYTES];
static int warnings;
static void keep_warning(void *user, ms_log_level level, const char *text)
{
    (void)user;
    if (level != MS_LOG_WARN) return;
    warnings++;
    snprintf(warned, sizeof warned, "%s", text);
}

static ms_engine *make_limited(uint64_t memory_bytes, uint32_t sharers)
{
    ms_engine_options options = { .own_device = &ms_device_cuda,
                                  .threads = 1,
                                  .memory_bytes = memory_bytes,
                                  .sharers = sharers,
                                  .log = keep_warning,
                                  .log_level = MS_LOG_WARN };
    ms_engine *engine = NULL;
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

/* The GPU has no more, though the engine's limit is not reached: others hold the rest. */
static void a_full_gpu_is_named(void **state)
{
    (void)state;
    static const char full[] =
        "limit 536870912; cuda:0 itself is full: 1073741824 of 4294967296 bytes are free";
    ms_engine *engine = make_limited(512 << 20, 0);
    ms_stream *a = ms_engine_current(engine);
    ms_storage *storage = NULL;
    fails("cuMemCreate", 2);
    assert_int_equal(ms_storage_new(a, 64 << 20, &storage), MS_ERROR_MEMORY);
    assert_non_null(strstr(ms_engine_error(engine)->message, "no memory for 67108864 bytes"));
    assert_non_null(strstr(ms_engine_error(engine)->message, full));
    assert_non_null(strstr(ms_engine_error(engine)->message, "nvidia-smi"));
    /* Others have left. The limit is another matter. */
    storage = storage_of(a, 64 << 20);
    ms_storage *other = NULL;
    assert_int_equal(ms_storage_new(a, 480 << 20, &other), MS_ERROR_MEMORY);
    assert_non_null(strstr(ms_engine_error(engine)->message, "limit 536870912; largest owners"));
    ms_storage_release(storage);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

static void a_limit_above_what_is_free_is_a_warning(void **state)
{
    (void)state;
    static const struct {
        uint64_t bytes;
        uint32_t sharers;
        const char *says;
    } cases[] = {
        { 0, 0, NULL },
        { 1ull << 30, 0, NULL },
        { 2ull << 30, 0,
          "2147483648 bytes of memory (--memory BYTES, or memory_bytes of ms.init), but 1073741824 "
          "of the 4294967296 bytes of cuda:0 are free, for 1 rank:" },
        { 512ull << 20, 2, NULL },
        { 1ull << 30, 2, "of cuda:0 are free, for 2 ranks:" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        warnings = 0;
        ms_engine_free(make_limited(cases[i].bytes, cases[i].sharers));
        assert_int_equal(warnings, cases[i].says ? 1 : 0);
        if (cases[i].says) assert_non_null(strstr(warned, cases[i].says));
    }
    assert_int_equal(left(), 0);
}

/* All calls of the driver fail from then on: every wait of the host ends. */
static void a_gpu_that_stops_ends_all_waits(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *storage = storage_of(a, sizeof(float));
    fill(a, storage, 1);
    run(b, &scales, storage, storage, 1, 1);
    stops(719);
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_TASK);
    assert_non_null(strstr(ms_engine_error(engine)->message, "the GPU has stopped"));
    assert_non_null(strstr(ms_engine_error(engine)->message, "CUDA_ERROR_LAUNCH_FAILED"));
    ms_storage_release(storage);
    ms_engine_free(engine);
    stops(0);
}

static uint32_t companions; /* of the engines that stop_in makes */

/* Tasks of three lines on two streams, of which the one that `which` tells stops the GPU. */
static void stop_in(const char *which, bool stops_later)
{
    ms_engine *engine = make_engine();
    ms_engine_set_companions(engine, companions);
    ms_stream *on[] = { ms_engine_current(engine), side_of(engine) };
    ms_storage *storages[] = { storage_of(on[0], sizeof(float)), storage_of(on[0], sizeof(float)) };
    fill(on[0], storages[0], 1);
    fill(on[0], storages[1], 1);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    if (!stops_later) setenv("MOONSHARD_STAND_IN_FAULT", which, 1);
    for (int i = 0; i < 4; i++) {
        char line[32];
        uint32_t script = 0;
        snprintf(line, sizeof line, "train.lua:%d", i + 1);
        assert_int_equal(ms_strings_add(ms_engine_strings(engine), line, strlen(line), &script),
                         MS_OK);
        ms_engine_set_script(engine, script);
        if (stops_later && i == 3) stops(719);
        run(on[i % 2], &scales, storages[i % 2], storages[i % 2], 1, 1);
    }
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_TASK);
    unsetenv("MOONSHARD_STAND_IN_FAULT");
    snprintf(said, sizeof said, "%s", ms_engine_error(engine)->message);
    for (int i = 0; i < 2; i++) ms_storage_release(storages[i]);
    ms_engine_free(engine);
    stops(0);
}

static void assert_said(const char *words)
{
    if (!strstr(said, words)) fail_msg("no \"%s\" in \"%s\"", words, said);
}

/* An error of a kernel is found by a later call, which is not the cause. */
static void a_gpu_that_stops_tells_which_tasks_were_under_way(void **state)
{
    (void)state;
    stop_in("scale:2", false);
    assert_said("the GPU has stopped: CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_said("one of the 4 tasks");
    assert_said("2 of stream \"compute\", scale (train.lua:1) to scale (train.lua:3)");
    assert_said("2 of stream \"side\", scale (train.lua:2) to scale (train.lua:4)");
    assert_said("CUDA_LAUNCH_BLOCKING=1");
    stop_in("", true);
    assert_said("one of the 3 tasks");
    assert_null(strstr(said, "train.lua:4"));
}

/* The host waits on one stream, and the cause is on another. */
static void one_task_under_way_is_the_cause(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_storage *storage = storage_of(a, sizeof(float));
    fill(a, storage, 1);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    setenv("MOONSHARD_STAND_IN_FAULT", "scale:1", 1);
    run(side_of(engine), &scales, storage, storage, 1, 1);
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_TASK);
    unsetenv("MOONSHARD_STAND_IN_FAULT");
    snprintf(said, sizeof said, "%s", ms_engine_error(engine)->message);
    assert_said("CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_said("in task scale of stream \"side\"");
    assert_string_equal(ms_engine_error(engine)->operation, "scale");
    ms_storage_release(storage);
    ms_engine_free(engine);
    stops(0);
}

static void a_host_that_waits_for_each_task_knows_the_one(void **state)
{
    (void)state;
    setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
    stop_in("scale:4", false);
    unsetenv("CUDA_LAUNCH_BLOCKING");
    assert_said("the GPU has stopped: CUDA_ERROR_ILLEGAL_ADDRESS");
    assert_said("in task scale of stream \"side\", enqueued at train.lua:4");
    assert_null(strstr(said, "under way"));
}

/* Another engine of the process finds the same error, and has not caused it. */
static void a_gpu_of_several_engines_names_none_as_the_cause(void **state)
{
    (void)state;
    companions = 1;
    for (int blocks = 0; blocks < 2; blocks++) {
        if (blocks) setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
        stop_in("scale:4", false);
        assert_said("the GPU has stopped: CUDA_ERROR_ILLEGAL_ADDRESS");
        assert_said("one of the 2 ranks or engines that use it in this process");
        assert_null(strstr(said, "in task scale of"));
    }
    unsetenv("CUDA_LAUNCH_BLOCKING");
    companions = 0;
}

static void assert_refused(ms_status expected, const char *words)
{
    ms_error error;
    ms_engine *engine = NULL;
    unsigned before = left();
    assert_int_equal(try_engine(&error, &engine), expected);
    if (!strstr(error.message, words)) fail_msg("%s", error.message);
    assert_int_equal(left(), before);
}

static void what_is_missing_is_told(void **state)
{
    (void)state;
    unsigned before = left();
    char made[40] = "";
    if (MS_CUDA_TOOLKIT)
        snprintf(made, sizeof made, ", made with CUDA %d.%d,", MS_CUDA_TOOLKIT / 1000,
                 MS_CUDA_TOOLKIT % 1000 / 10);
    char needed[160];
    snprintf(needed, sizeof needed, "is for CUDA 12.8: this build%s needs a driver for CUDA %d.0",
             made, MS_CUDA_TOOLKIT ? MS_CUDA_TOOLKIT / 1000 : 13);
    is(12080, 1);
    assert_refused(MS_ERROR_UNSUPPORTED, needed);
    is(13000, 0);
    assert_refused(MS_ERROR_ARGUMENT, "this machine has a driver and shows no device of that kind: "
                                      "if nvidia-smi -L lists none");
    is(13000, 1);
    fails("cuDevicePrimaryCtxRetain", 2);
    assert_refused(MS_ERROR_MEMORY, "the GPU cannot be used: CUDA_ERROR_OUT_OF_MEMORY");
    fails("cuCtxGetStreamPriorityRange", 999);
    assert_refused(MS_ERROR_IO, "stand-in 0 cannot be used");
    fails("cuInit", 999);
    ms_cuda cuda;
    ms_context context;
    ms_context_init(&context, ms_os_posix());
    assert_int_equal(ms_cuda_load(&context, &cuda), MS_ERROR_IO);
    assert_non_null(strstr(context.error.message, "the NVIDIA driver does not start"));
    setenv("MOONSHARD_CUDA_DRIVER", "/nowhere/libcuda.so.1", 1);
    assert_int_equal(ms_cuda_load(&context, &cuda), MS_ERROR_NOT_FOUND);
    assert_non_null(strstr(context.error.message, "this machine has no NVIDIA driver"));
    setenv("MOONSHARD_CUDA_DRIVER", "libm.so.6", 1);
    assert_int_equal(ms_cuda_load(&context, &cuda), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(context.error.message, "is no NVIDIA driver: it has no cuInit"));
    assert_int_equal(left(), before);
}

/* The memory of a GPU without virtual addresses is taken at once. */
static void memory_grows_or_is_taken_at_once(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        if (i == 1) setenv("MOONSHARD_STAND_IN_WITHOUT", "virtual", 1);
        unsigned created = calls("cuMemCreate"), allocated = calls("cuMemAlloc_v2");
        ms_engine *engine = make_engine();
        ms_stream *a = ms_engine_current(engine);
        ms_storage *small = storage_of(a, 1000), *large = storage_of(a, (size_t)40 << 20);
        assert_true(ms_engine_memory(engine).limit == ((uint64_t)1 << 30) / 10 * 9);
        fill(a, small, 5);
        assert_true(value_of(small) == 5);
        assert_true(i == 1 ? calls("cuMemCreate") == created : calls("cuMemCreate") > created);
        assert_true(i == 0 ? calls("cuMemAlloc_v2") == allocated
                           : calls("cuMemAlloc_v2") > allocated);
        ms_storage_release(small);
        ms_storage_release(large);
        ms_engine_free(engine);
        assert_int_equal(left(), 0);
    }
    unsetenv("MOONSHARD_STAND_IN_WITHOUT");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_keep_the_order_of_the_host),
        cmocka_unit_test(a_task_is_one_call),
        cmocka_unit_test(a_stream_has_a_depth),
        cmocka_unit_test(streams_have_priorities),
        cmocka_unit_test(marks_have_times),
        cmocka_unit_test(times_stay_exact_for_hours),
        cmocka_unit_test(functions_of_the_host_run_in_order),
        cmocka_unit_test(functions_of_two_streams_may_wait_for_each_other),
        cmocka_unit_test(no_function_runs_after_what_failed),
        cmocka_unit_test(the_gpu_waits_for_no_function),
        cmocka_unit_test(a_gpu_that_stops_waits_for_functions),
        cmocka_unit_test(a_flag_makes_its_stream_fail),
        cmocka_unit_test(errors_name_the_task),
        cmocka_unit_test(memory_grows_or_is_taken_at_once),
        cmocka_unit_test(what_is_missing_is_told),
        cmocka_unit_test(a_function_for_the_cpu_is_refused),
        cmocka_unit_test(a_full_gpu_is_named),
        cmocka_unit_test(a_limit_above_what_is_free_is_a_warning),
        cmocka_unit_test(a_gpu_that_stops_ends_all_waits),
        cmocka_unit_test(a_gpu_that_stops_tells_which_tasks_were_under_way),
        cmocka_unit_test(one_task_under_way_is_the_cause),
        cmocka_unit_test(a_host_that_waits_for_each_task_knows_the_one),
        cmocka_unit_test(a_gpu_of_several_engines_names_none_as_the_cause),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
