/* device.c: functions of devices besides tasks and waits: marks, copies and checks of flags, in
 * stream order, and their results on a device without values.
 * ctest: late cuda */
#include "device_support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/state.h"
#include "fault_engine.h"
#include "late_device.h"
#include "moonshard/comm.h"
#include "moonshard/cpu_task.h"
#include "moonshard/grad.h"
#include "moonshard/ops.h"

static ms_engine *make_engine(const char *device)
{
    ms_engine_options options = { .device = device,
                                  .own_device = late_device(device),
                                  .threads = 1 };
    ms_engine *engine = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

/* A task that is not done before its gate opens. */
static ms_task_result stand(ms_run *run, void *arguments)
{
    (void)run;
    _Atomic int *const *open = arguments;
    return atomic_load(*open) ? MS_TASK_DONE : MS_TASK_PENDING;
}

static void stand_at(ms_stream *stream, _Atomic int *open)
{
    static const ms_task task = { .name = "stand",
                                  .function = stand,
                                  .args_bytes = sizeof(_Atomic int *) };
    assert_int_equal(ms_stream_enqueue(stream, &task, &open, NULL, 0, (ms_task_cost){ 0 }, NULL),
                     MS_OK);
}

/* -------------------------------------------------------------------- marks */

static void a_mark_has_its_time_once_the_stream_has_passed_it(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine);
    ms_marks *marks = marks_of(engine, 3);
    const ms_os *os = ms_engine_context(engine)->os;
    _Atomic int open = 0;
    uint64_t first, second, before = os->monotonic_ns(os->user);
    assert_int_equal(ms_marks_point(marks, 0).seq, 0);
    assert_false(ms_marks_time(marks, 0, &first));
    assert_int_equal(ms_marks_set(marks, 0, a), MS_OK);
    stand_at(a, &open);
    assert_int_equal(ms_marks_set(marks, 1, a), MS_OK);
    assert_int_equal(ms_marks_point(marks, 1).seq, ms_stream_last(a).seq);
    assert_false(ms_marks_time(marks, 1, &second)); /* the gate before it is closed */
    assert_int_equal(second, 0);
    uint64_t opened = os->monotonic_ns(os->user);
    atomic_store(&open, 1);
    assert_int_equal(ms_point_sync(engine, ms_marks_point(marks, 1)), MS_OK);
    assert_true(ms_marks_time(marks, 0, &first) && ms_marks_time(marks, 1, &second));
    assert_true(first >= before && second >= opened && second >= first);
    assert_false(ms_marks_time(marks, 2, &first)); /* never set */
    ms_marks_free(marks);
    ms_engine_free(engine);
}

static void a_mark_may_be_set_again_on_another_stream(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_marks *marks = marks_of(engine, 1);
    uint64_t last = 0, now;
    for (int i = 0; i < 200; i++) {
        assert_int_equal(ms_marks_set(marks, 0, i % 2 ? b : a), MS_OK);
        /* With a wait for the mark's last time on the other stream. */
        assert_int_equal(ms_stream_last(i % 2 ? b : a).seq, i + 1);
    }
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    assert_true(ms_marks_time(marks, 0, &last));
    assert_int_equal(ms_marks_set(marks, 0, b), MS_OK);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    assert_true(ms_marks_time(marks, 0, &now) && now >= last);
    ms_marks_free(marks);
    ms_engine_free(engine);
}

static void a_stream_waits_for_marks_of_another(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_marks *marks = marks_of(engine, 4);
    for (uint32_t i = 1; i < 3; i++) assert_int_equal(ms_marks_set(marks, i, b), MS_OK);
    assert_int_equal(ms_marks_wait(marks, 0, 4, a), MS_OK);
    assert_int_equal(ms_stream_sync(a), MS_OK);
    assert_true(ms_point_reached(engine, ms_marks_point(marks, 2)));
    ms_marks_free(marks);
    ms_engine_free(engine);
}

/* Their memory is the engine's until the stream has passed them: sanitizers see a late write. */
static void marks_may_be_given_up_while_they_are_enqueued(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine);
    _Atomic int open = 0;
    stand_at(a, &open);
    for (int i = 0; i < 3; i++) {
        ms_marks *marks = marks_of(engine, 2);
        assert_int_equal(ms_marks_set(marks, 1, a), MS_OK);
        ms_marks_free(marks);
    }
    ms_marks_free(NULL);
    atomic_store(&open, 1);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_marks_free(marks_of(engine, 1));
    ms_marks *last = marks_of(engine, 1);
    assert_int_equal(ms_marks_set(last, 0, a), MS_OK);
    ms_marks_free(last);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------- copies */

enum { LARGE = 100000 };

static void copies_keep_the_order_of_their_stream(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *storage = storage_of(a, LARGE);
    static unsigned char large[LARGE], all[LARGE], end[3], read[LARGE];
    unsigned char small[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    _Atomic int open = 0;
    for (size_t i = 0; i < LARGE; i++) large[i] = (unsigned char)(i * 7 + 1);
    stand_at(a, &open);
    assert_int_equal(ms_stream_copy_in(a, storage, 0, large, LARGE, NULL), MS_OK);
    assert_int_equal(ms_stream_copy_in(a, storage, 100, small, sizeof small, NULL), MS_OK);
    memset(small, 0, sizeof small); /* it was read before the call returned */
    /* Another stream waits by itself. */
    ms_point done;
    assert_int_equal(ms_stream_copy_out(b, storage, 0, all, LARGE, NULL), MS_OK);
    assert_int_equal(ms_stream_copy_in(b, storage, LARGE - 3, small, 3, NULL), MS_OK);
    assert_int_equal(ms_stream_copy_out(a, storage, LARGE - 3, end, 3, &done), MS_OK);
    atomic_store(&open, 1);
    assert_int_equal(ms_point_sync(engine, done), MS_OK);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    assert_memory_equal(end, small, 3);
    memcpy(large + 100, (unsigned char[]){ 1, 2, 3, 4, 5, 6, 7, 8 }, 8);
    assert_memory_equal(all, large, LARGE);
    assert_int_equal(ms_storage_read(storage, 0, read, LARGE), MS_OK);
    memset(large + LARGE - 3, 0, 3);
    assert_memory_equal(read, large, LARGE);
    ms_storage_release(storage);
    ms_engine_free(engine);
}

static void reading_waits_for_writers_only(void **state)
{
    (void)state;
    if (device_is_cuda()) skip(); /* its events cover what was enqueued before them, too */
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine);
    ms_storage *storage = storage_of(a, 8);
    _Atomic int open = 0;
    int64_t written = 42, read = 0;
    assert_int_equal(ms_stream_copy_in(a, storage, 0, &written, 8, NULL), MS_OK);
    stand_at(a, &open); /* never passed, if the host waited for it */
    ms_point after = ms_stream_last(a);
    assert_int_equal(ms_storage_read(storage, 0, &read, 8), MS_OK);
    assert_int_equal(read, 42);
    assert_false(ms_point_reached(engine, after));
    ms_engine_forbid_sync(engine, 1);
    assert_int_equal(ms_storage_read(storage, 0, &read, 8), MS_ERROR_STATE);
    ms_engine_forbid_sync(engine, -1);
    atomic_store(&open, 1);
    ms_storage_release(storage);
    ms_engine_free(engine);
}

/* -------------------------------------------------------------------- flags */

static void a_stream_fails_if_its_flag_is_set(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *flags = storage_of(a, 2 * sizeof(float));
    ms_marks *marks = marks_of(engine, 1);
    const float values[2] = { 0, 0.5f };
    _Atomic int open = 0;
    uint64_t ns;
    float read[2] = { 7, 7 };
    assert_int_equal(ms_stream_copy_in(a, flags, 0, values, sizeof values, NULL), MS_OK);
    assert_int_equal(ms_stream_fail_if(b, "guard", flags, 0, "flag 0 is set"), MS_OK);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    stand_at(b, &open); /* it does not fail before all is enqueued */
    assert_int_equal(ms_stream_fail_if(b, "guard", flags, sizeof(float), "flag 1 is set"), MS_OK);
    ms_point point;
    assert_int_equal(ms_stream_copy_out(b, flags, 0, read, sizeof read, &point), MS_OK);
    assert_int_equal(ms_marks_set(marks, 0, b), MS_OK);
    atomic_store(&open, 1);
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_TASK);
    assert_string_equal(ms_engine_error(engine)->message, "flag 1 is set");
    assert_string_equal(ms_engine_error(engine)->operation, "guard");
    /* Skipped, as all that comes after on that stream; but a GPU has it in its queue already. */
    assert_true(device_is_cuda() || read[0] == 7);
    assert_true(ms_marks_time(marks, 0, &ns)); /* passed all the same */
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_marks_free(marks);
    ms_storage_release(flags);
    ms_engine_free(engine);
}

/* ----------------------------------------------------------- host functions */

typedef struct log_entry {
    char *text;
    char letter;
} log_entry;

static ms_status append(void *user, char *message, size_t bytes)
{
    const log_entry *entry = user;
    (void)message;
    (void)bytes;
    strncat(entry->text, &entry->letter, 1);
    return MS_OK;
}

static ms_status refuse(void *user, char *message, size_t bytes)
{
    snprintf(message, bytes, "%s", (const char *)user);
    return MS_ERROR_TIMEOUT;
}

static ms_status call(ms_stream *stream, ms_host_function function, void *user)
{
    ms_host_call what = { .name = "stage", .function = function, .user = user };
    return ms_stream_call(stream, &what, NULL, 0, (ms_task_cost){ .bytes = 1000 }, NULL);
}

static void host_functions_run_in_stream_order(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    char text[64] = "";
    log_entry entries[4] = { { text, 'a' }, { text, 'b' }, { text, 'c' }, { text, 'd' } };
    _Atomic int open = 0;
    stand_at(a, &open);
    assert_int_equal(call(a, append, &entries[0]), MS_OK);
    assert_int_equal(ms_stream_wait(b, ms_stream_last(a)), MS_OK);
    assert_int_equal(call(b, append, &entries[1]), MS_OK);
    assert_int_equal(ms_stream_wait(a, ms_stream_last(b)), MS_OK);
    assert_int_equal(call(a, append, &entries[2]), MS_OK);
    atomic_store(&open, 1);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    assert_string_equal(text, "abc");
    /* A function that fails: later functions are not called. */
    open = 0;
    stand_at(a, &open);
    assert_int_equal(call(a, refuse, "the peer has gone"), MS_OK);
    assert_int_equal(call(a, append, &entries[3]), MS_OK);
    atomic_store(&open, 1);
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_TIMEOUT);
    assert_string_equal(ms_engine_error(engine)->message, "the peer has gone");
    assert_string_equal(ms_engine_error(engine)->operation, "stage");
    assert_string_equal(text, "abc");
    ms_engine_free(engine);
}

/* Hazards order it by the storages that it declares, as any task. */
static void host_functions_declare_what_they_touch(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *storage = storage_of(a, 8);
    int64_t value = 7;
    char text[8] = "";
    log_entry entry = { text, 'x' };
    ms_host_call what = { .name = "stage", .function = append, .user = &entry };
    ms_access access = { .storage = storage, .cells = 1, .mode = MS_READ };
    assert_int_equal(ms_stream_copy_in(a, storage, 0, &value, 8, NULL), MS_OK);
    assert_int_equal(ms_stream_call(b, &what, &access, 1, (ms_task_cost){ 0 }, NULL), MS_OK);
    assert_int_equal(ms_stream_last(b).seq, 2); /* a wait, and the call */
    assert_int_equal(
        ms_stream_call(b, &what, &access, MS_TASK_ACCESS_MAX + 1, (ms_task_cost){ 0 }, NULL),
        MS_ERROR_ARGUMENT);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    assert_string_equal(text, "x");
    ms_storage_release(storage);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------ shared memory */

/* Adds the numbers of `from` to those of `to`. */
typedef struct addition {
    int64_t *to;
    const int64_t *from;
} addition;

static ms_task_result add(ms_run *run, void *arguments)
{
    (void)run;
    const addition *a = arguments;
    *a->to += *a->from;
    return MS_TASK_DONE;
}

static int64_t number_in(ms_storage *storage)
{
    int64_t value = 0;
    assert_int_equal(ms_storage_read(storage, 0, &value, sizeof value), MS_OK);
    return value;
}

static ms_storage *number(ms_stream *stream, int64_t value)
{
    ms_storage *storage = storage_of(stream, sizeof value);
    assert_int_equal(ms_stream_copy_in(stream, storage, 0, &value, sizeof value, NULL), MS_OK);
    return storage;
}

static void memory_is_shared_where_the_device_can(void **state)
{
    (void)state;
    if (device_is_cuda()) skip(); /* it does not share */
    ms_engine *engine = make_engine("cpu"), *other = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine), *b = ms_engine_current(other);
    ms_memory_handle handle;
    void *address = NULL;
    ms_storage *x = number(a, 7), *y = number(b, 1), *none = storage_of(a, 0);
    if (!late_device("cpu")) {
        assert_int_equal(ms_storage_export(x, &handle), MS_ERROR_UNSUPPORTED);
        assert_non_null(strstr(ms_engine_error(engine)->message, "device \"cpu\" has no memory"));
        assert_int_equal(ms_memory_import(other, &handle, &address), MS_ERROR_UNSUPPORTED);
    } else {
        assert_int_equal(number_in(x), 7);
        assert_int_equal(ms_storage_export(none, &handle), MS_ERROR_ARGUMENT);
        assert_int_equal(ms_storage_export(x, &handle), MS_OK);
        assert_int_equal(handle.size, sizeof(int64_t));
        assert_int_equal(ms_memory_import(other, &handle, &address), MS_OK);
        static const ms_task task = { .name = "add",
                                      .function = add,
                                      .args_bytes = sizeof(addition) };
        addition arguments = { ms_storage_data(y), address };
        ms_access access = { .storage = y, .cells = 1, .mode = MS_READ | MS_WRITE };
        ms_status status =
            ms_stream_enqueue(b, &task, &arguments, &access, 1, (ms_task_cost){ 0 }, NULL);
        assert_int_equal(status, MS_OK);
        assert_int_equal(number_in(y), 8);
        ms_memory_forget(other, address);
        assert_int_equal(ms_storage_drop(x, "the test"), MS_OK);
        assert_int_equal(ms_storage_export(x, &handle), MS_ERROR_STATE);
    }
    ms_storage_release(x);
    ms_storage_release(y);
    ms_storage_release(none);
    ms_engine_free(engine);
    ms_engine_free(other);
}

/* ------------------------------------------------ what a device may not have */

static void priorities_are_the_devices(void **state)
{
    (void)state;
    if (device_is_cuda()) skip(); /* the driver's, which the stand-in does not have */
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine), *c = NULL, *same = NULL;
    /* On any device a stream has the priority with which it was made. */
    assert_int_equal(ms_engine_stream_with(engine, "first", MS_PRIORITY_HIGH, &c), MS_OK);
    assert_int_equal(ms_engine_stream_with(engine, "first", MS_PRIORITY_LOW, &same), MS_OK);
    assert_ptr_equal(same, c);
    assert_int_equal(ms_stream_priority(c), MS_PRIORITY_HIGH);
    assert_int_equal(ms_stream_priority(b), MS_PRIORITY_NORMAL);
    if (!late_device("cpu")) {
        assert_int_equal(ms_stream_set_priority(b, 1), MS_ERROR_UNSUPPORTED);
        assert_non_null(strstr(ms_engine_error(engine)->message,
                               "stream \"side\": device \"cpu\" has no priorities"));
        ms_engine_free(engine);
        return;
    }
    /* The late device runs nothing before the host waits: then the first stream's work is last. */
    char text[64] = "";
    log_entry entries[2] = { { text, 'a' }, { text, 'b' } };
    assert_int_equal(ms_stream_set_priority(b, 1), MS_OK);
    assert_int_equal(ms_stream_priority(b), 1);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(call(a, append, &entries[0]), MS_OK);
        assert_int_equal(call(i % 2 ? b : c, append, &entries[1]), MS_OK);
    }
    assert_int_equal(ms_stream_set_priority(b, 0), MS_ERROR_STATE);
    assert_int_equal(ms_stream_sync(a), MS_OK);
    assert_string_equal(text, "bbbbbbbbbbbbbbbbbbbbaaaaaaaaaaaaaaaaaaaa");
    ms_engine_free(engine);
}

static void what_a_device_does_not_have_is_an_error_that_names_it(void **state)
{
    (void)state;
    ms_device bare = ms_device_sim;
    bare.name = "bare";
    bare.adopt = NULL;
    bare.disown = NULL;
    ms_engine_options options = { .own_device = &bare };
    ms_engine *engine = NULL;
    ms_arena *arena = NULL;
    void *native = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    ms_stream *a = ms_engine_current(engine);
    assert_int_equal(ms_stream_native(a, &native), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "device \"bare\" has no object"));
    assert_int_equal(ms_stream_set_priority(a, 1), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "device \"bare\" has no priorities"));
    assert_int_equal(ms_arena_new(engine, &bare, 4096, NULL, NULL, &arena), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "device \"bare\" cannot use memory"));
    assert_true(native == NULL && arena == NULL);
    ms_engine_free(engine);
}

static uint32_t three(const ms_engine *engine)
{
    (void)engine;
    return 3;
}

static uint32_t opened_index;

static ms_status open_indexed(ms_engine *engine, void **state)
{
    opened_index = engine->options.device_index;
    return ms_device_sim.open(engine, state);
}

static void an_engine_runs_on_one_of_several_devices(void **state)
{
    (void)state;
    ms_device many = ms_device_sim;
    many.count = three;
    many.open = open_indexed;
    ms_engine_options options = { .own_device = &many, .device_index = 2 };
    ms_engine *engine = NULL;
    ms_error error;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    assert_int_equal(opened_index, 2);
    ms_engine_free(engine);
    engine = NULL;
    options.device_index = 3;
    assert_int_equal(ms_engine_new(&options, &error, &engine), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "this machine has 3"));
    options = (ms_engine_options){ .device = "cpu", .device_index = 1 };
    assert_int_equal(ms_engine_new(&options, &error, &engine), MS_ERROR_ARGUMENT);
    assert_non_null(strstr(error.message, "device \"cpu\" this machine has 1"));
    assert_null(engine);
}

/* ------------------------------------------------------------ memory of hosts */

static uint64_t adopted, disowned;

static ms_status adopt(ms_engine *engine, void *base, uint64_t bytes)
{
    (void)base;
    if (bytes > 4096) return ms_engine_fail(engine, MS_ERROR_MEMORY, "too much");
    adopted += bytes;
    return MS_OK;
}

static void disown(ms_engine *engine, void *base, uint64_t bytes)
{
    (void)engine;
    (void)base;
    disowned += bytes;
}

static void memory_of_the_host_is_made_known_to_the_device(void **state)
{
    (void)state;
    ms_device device = ms_device_sim;
    device.adopt = adopt;
    device.disown = disown;
    ms_engine_options options = { .own_device = &device };
    ms_engine *engine = NULL;
    ms_arena *arena = NULL;
    static char memory[8192];
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    assert_int_equal(ms_arena_new(engine, memory, 8192, NULL, NULL, &arena), MS_ERROR_MEMORY);
    assert_null(arena);
    assert_int_equal(ms_arena_new(engine, memory, 4096, NULL, NULL, &arena), MS_OK);
    assert_true(adopted == 4096 && disowned == 0);
    ms_arena_free(arena);
    assert_int_equal(disowned, 4096);
    ms_engine_free(engine);
}

static void host_memory_serves_copies(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu");
    ms_stream *a = ms_engine_current(engine);
    ms_storage *storage = storage_of(a, LARGE);
    void *in = NULL, *out = NULL;
    ms_point done;
    assert_int_equal(ms_host_memory_new(engine, LARGE, "values", &in), MS_OK);
    assert_int_equal(ms_host_memory_new(engine, LARGE, "values", &out), MS_OK);
    assert_true((uintptr_t)in % 64 == 0 && (uintptr_t)out % 64 == 0);
    memset(in, 0x5a, LARGE);
    memset(out, 0, LARGE);
    assert_int_equal(ms_stream_copy_in(a, storage, 0, in, LARGE, NULL), MS_OK);
    assert_int_equal(ms_stream_copy_out(a, storage, 0, out, LARGE, &done), MS_OK);
    assert_int_equal(ms_point_sync(engine, done), MS_OK);
    assert_memory_equal(in, out, LARGE);
    ms_host_memory_free(engine, in);
    ms_host_memory_free(engine, out);
    ms_host_memory_free(engine, NULL);
    ms_storage_release(storage);
    ms_engine_free(engine);
}

/* ----------------------------------------------------------- without values */

static void without_values_only_order_counts(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("sim");
    ms_stream *a = ms_engine_current(engine), *b = side_of(engine);
    ms_storage *storage = storage_of(a, LARGE);
    int64_t here = 9, read = 9;
    uint64_t waits = ms_engine_memory(engine).waits;
    assert_int_equal(ms_stream_copy_in(a, storage, 0, NULL, LARGE, NULL), MS_OK);
    assert_int_equal(ms_stream_copy_out(b, storage, 0, &here, 8, NULL), MS_OK);
    assert_int_equal(ms_stream_last(b).seq, 2); /* a wait, and the copy */
    assert_int_equal(here, 9);
    assert_int_equal(ms_stream_fail_if(b, "guard", storage, 0, "set"), MS_OK);
    assert_int_equal(ms_storage_read(storage, 0, &read, 8), MS_OK);
    assert_int_equal(read, 0);
    assert_int_equal(ms_storage_read(storage, 0, NULL, LARGE), MS_OK);
    assert_int_equal(ms_engine_memory(engine).waits, waits);
    assert_string_equal(ms_engine_device(engine), "sim");
    assert_int_equal(call(a, refuse, NULL), MS_OK); /* not called */
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_storage_release(storage);
    ms_engine_free(engine);
}

static void an_engine_names_its_device(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu");
    assert_string_equal(ms_engine_device(engine),
                        late_device("cpu") ? late_device("cpu")->name : "cpu");
    ms_engine_free(engine);
}

/* --------------------------------------------------- what reaches the device */

static ms_task_cost last_cost;

static void keep_cost(ms_stream *stream, const ms_launch *launch)
{
    last_cost = launch->cost;
    ms_device_sim.run(stream, launch);
}

static void cost_reaches_the_device(void **state)
{
    (void)state;
    ms_device spy = ms_device_sim;
    spy.run = keep_cost;
    ms_engine_options options = { .own_device = &spy };
    ms_engine *engine = NULL;
    ms_group *world = NULL;
    ms_tensor *a = NULL, *b = NULL, *c = NULL;
    const int64_t shape[2] = { 64, 64 };
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    assert_int_equal(ms_comm_open_fake(engine, 2, 8, &world), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_BF16, 2, shape, &a), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_BF16, 2, shape, &b), MS_OK);
    ms_tensor *inputs[] = { a, b };
    assert_int_equal(ms_apply(engine, &ms_op_matmul, NULL, false, inputs, 2, &c, 1), MS_OK);
    assert_true(last_cost.flops == 2.0 * 64 * 64 * 64 && last_cost.bytes >= 3 * 64 * 64 * 2);
    assert_int_equal(last_cost.dtype, MS_BF16);
    assert_int_equal(last_cost.ranks, 0);
    ms_collective call = { .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_SUM, .in = c, .bucket = -1 };
    assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_OK);
    assert_int_equal(last_cost.collective, MS_ALL_REDUCE);
    assert_int_equal(last_cost.bytes, 64 * 64 * 2);
    assert_int_equal(last_cost.wire_bytes, 2 * 64 * 64 * 2 / 8 * 7);
    assert_true(last_cost.ranks == 8 && last_cost.first_rank == 0 && last_cost.last_rank == 7);
    call = (ms_collective){ .kind = MS_SEND, .in = c, .root = 5, .bucket = -1 };
    assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_OK);
    assert_int_equal(last_cost.collective, MS_SEND);
    assert_true(last_cost.ranks == 2 && last_cost.first_rank == 2 && last_cost.last_rank == 5);
    ms_tensor_release(a);
    ms_tensor_release(b);
    ms_tensor_release(c);
    ms_engine_free(engine);
}

/* --------------------------------------------------------- failing the n-th */

static ms_status program(const ms_os *os, ms_engine **engine)
{
    ms_engine_options options = { .os = os, .own_device = late_device("cpu"), .threads = 1 };
    ms_status status = ms_engine_new(&options, NULL, engine);
    if (status) return status;
    ms_stream *a = ms_engine_current(*engine);
    ms_marks *one = NULL, *two = NULL;
    status = ms_marks_new(*engine, 3, &one);
    if (!status) status = ms_marks_set(one, 2, a);
    if (!status) status = ms_marks_new(*engine, 2, &two);
    if (!status) status = ms_marks_set(two, 0, a);
    ms_marks_free(one);
    void *memory = NULL;
    if (!status) status = ms_host_memory_new(*engine, 100, "values", &memory);
    ms_host_memory_free(*engine, memory);
    if (!status) status = ms_engine_sync(*engine);
    ms_marks_free(two);
    return status;
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    fail_each_call(program, false);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_mark_has_its_time_once_the_stream_has_passed_it),
        cmocka_unit_test(a_mark_may_be_set_again_on_another_stream),
        cmocka_unit_test(a_stream_waits_for_marks_of_another),
        cmocka_unit_test(marks_may_be_given_up_while_they_are_enqueued),
        cmocka_unit_test(copies_keep_the_order_of_their_stream),
        cmocka_unit_test(reading_waits_for_writers_only),
        cmocka_unit_test(a_stream_fails_if_its_flag_is_set),
        cmocka_unit_test(host_functions_run_in_stream_order),
        cmocka_unit_test(host_functions_declare_what_they_touch),
        cmocka_unit_test(memory_is_shared_where_the_device_can),
        cmocka_unit_test(priorities_are_the_devices),
        cmocka_unit_test(what_a_device_does_not_have_is_an_error_that_names_it),
        cmocka_unit_test(an_engine_runs_on_one_of_several_devices),
        cmocka_unit_test(memory_of_the_host_is_made_known_to_the_device),
        cmocka_unit_test(host_memory_serves_copies),
        cmocka_unit_test(without_values_only_order_counts),
        cmocka_unit_test(an_engine_names_its_device),
        cmocka_unit_test(cost_reaches_the_device),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
