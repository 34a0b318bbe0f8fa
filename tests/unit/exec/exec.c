/* exec.c: streams, hazards, the pool, errors, limits and allocation failures of the execution
 * core. ctest: late cuda host-tasks */
#include "fault_engine.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <time.h>

#include "exec/poison.h"
#include "late_device.h"
#include "moonshard/cpu_task.h"

static ms_engine *make_engine(const char *device, bool strict, uint32_t threads)
{
    ms_engine_options options = {
        .device = device, .own_device = late_device(device), .strict = strict, .threads = threads
    };
    ms_engine *engine = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

static ms_stream *stream_of(ms_engine *engine, const char *name)
{
    ms_stream *stream = NULL;
    assert_int_equal(ms_engine_stream(engine, name, &stream), MS_OK);
    return stream;
}

/* -------------------------------------------------------------- small tasks */

typedef struct gate {
    _Atomic int open;
} gate;

typedef struct add_args {
    int64_t *to;
    const int64_t *from;
    int64_t value;
    gate *wait, *opens;
} add_args;

/* *to = *from + value (or *to + value), after the gate opens; PENDING until then, so nothing
 * sleeps. */
static ms_task_result add_run(ms_run *run, void *arguments)
{
    (void)run;
    add_args *args = arguments;
    if (args->wait && !atomic_load(&args->wait->open)) return MS_TASK_PENDING;
    *args->to = (args->from ? *args->from : *args->to) + args->value;
    if (args->opens) atomic_store(&args->opens->open, 1);
    return MS_TASK_DONE;
}

static ms_task_result fail_run(ms_run *run, void *arguments)
{
    (void)arguments;
    ms_run_fail(run, MS_ERROR_ARGUMENT, "index 7 outside 0..3");
    return MS_TASK_FAILED;
}

static const ms_task add_task = { .name = "add",
                                  .function = add_run,
                                  .args_bytes = sizeof(add_args) };
static const ms_task fail_task = { .name = "bad_gather", .function = fail_run };

static ms_access whole(ms_storage *storage, uint8_t mode)
{
    return (ms_access){ .storage = storage, .cells = 1, .mode = mode };
}

static ms_status add(ms_stream *stream, ms_storage *to, ms_storage *from, int64_t value, gate *wait)
{
    add_args args = { .to = ms_storage_data(to),
                      .from = from ? ms_storage_data(from) : NULL,
                      .value = value,
                      .wait = wait };
    ms_access accesses[2] = { whole(to, MS_WRITE) };
    if (from) accesses[1] = whole(from, MS_READ);
    return ms_stream_enqueue(stream, &add_task, &args, accesses, from ? 2 : 1,
                             (ms_task_cost){ .flops = 1, .bytes = 8 }, NULL);
}

static int64_t value_of(ms_engine *engine, ms_storage *storage)
{
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    return *(int64_t *)ms_storage_data(storage);
}

static ms_storage *cell_of(ms_stream *stream, size_t bytes)
{
    ms_storage *storage = NULL;
    assert_int_equal(ms_storage_new(stream, bytes, &storage), MS_OK);
    return storage;
}

/* ------------------------------------------------------------------ streams */

static void enqueue_returns_before_the_task_runs(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *compute = ms_engine_current(engine);
    ms_storage *cell = cell_of(compute, 8);
    gate closed = { 0 };
    add_args set = { .to = ms_storage_data(cell), .value = 5, .wait = &closed };
    *(int64_t *)ms_storage_data(cell) = 0;
    ms_access access = whole(cell, MS_WRITE);
    ms_point point;
    assert_int_equal(
        ms_stream_enqueue(compute, &add_task, &set, &access, 1, (ms_task_cost){ 0 }, &point),
        MS_OK);
    assert_false(ms_point_reached(engine, point)); /* it cannot be done: its gate is closed */
    atomic_store(&closed.open, 1);
    assert_int_equal(ms_point_sync(engine, point), MS_OK);
    assert_int_equal(value_of(engine, cell), 5);
    ms_storage_release(cell);
    ms_engine_free(engine);
}

static void a_stream_keeps_order_past_its_ring(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *compute = ms_engine_current(engine);
    ms_storage *cell = cell_of(compute, 8);
    *(int64_t *)ms_storage_data(cell) = 0;
    for (int i = 0; i < 5000; i++) assert_int_equal(add(compute, cell, NULL, 1, NULL), MS_OK);
    assert_int_equal(value_of(engine, cell), 5000);
    assert_true(ms_engine_flops(engine) == 5000);
    ms_storage_release(cell);
    ms_engine_free(engine);
}

static void streams_run_side_by_side(void **state)
{
    (void)state;
    /* The first stream's task waits for a gate that a later task of the other stream opens: only
     * streams that overlap can finish. */
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side");
    ms_storage *x = cell_of(a, 8), *y = cell_of(b, 8);
    gate *first = calloc(1, sizeof *first);
    *(int64_t *)ms_storage_data(x) = *(int64_t *)ms_storage_data(y) = 0;
    assert_int_equal(add(a, x, NULL, 1, first), MS_OK);
    add_args open = { .to = ms_storage_data(y), .value = 1, .opens = first };
    ms_access access = whole(y, MS_WRITE);
    assert_int_equal(ms_stream_enqueue(b, &add_task, &open, &access, 1, (ms_task_cost){ 0 }, NULL),
                     MS_OK);
    assert_int_equal(value_of(engine, x), 1);
    free(first);
    ms_storage_release(x);
    ms_storage_release(y);
    ms_engine_free(engine);
}

static void hazards_order_streams(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 2);
    ms_stream *streams[3] = { ms_engine_current(engine), stream_of(engine, "one"),
                              stream_of(engine, "two") };
    ms_storage *cells[4];
    int64_t model[4];
    uint64_t draw = 12345;
    for (int i = 0; i < 4; i++) {
        cells[i] = cell_of(streams[0], 8);
        model[i] = i;
        add_args set = { .to = ms_storage_data(cells[i]), .from = &model[i], .value = 0 };
        ms_access access = whole(cells[i], MS_WRITE);
        assert_int_equal(
            ms_stream_enqueue(streams[0], &add_task, &set, &access, 1, (ms_task_cost){ 0 }, NULL),
            MS_OK);
    }
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    /* A random program on random streams gives the same results as the program in order. */
    for (int i = 0; i < 3000; i++) {
        draw = draw * 6364136223846793005u + 1442695040888963407u;
        int to = (int)(draw >> 33) & 3, from = (int)(draw >> 40) & 3, on = (int)((draw >> 50) % 3);
        if (to == from) {
            assert_int_equal(add(streams[on], cells[to], NULL, i, NULL), MS_OK);
            model[to] += i;
        } else {
            assert_int_equal(add(streams[on], cells[to], cells[from], i, NULL), MS_OK);
            model[to] = model[from] + i;
        }
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(value_of(engine, cells[i]), model[i]);
        ms_storage_release(cells[i]);
    }
    ms_engine_free(engine);
}

/* The streams are made while the program runs, so that cells and free blocks are older than some of
 * the streams that use them. Each storage is released and allocated again at random. */
static void a_program_on_all_streams_gives_what_it_gives_in_order(void **state)
{
    (void)state;
    enum { CELLS = 6, STEPS = 4000 };
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *streams[MS_STREAMS_MAX] = { ms_engine_current(engine) };
    ms_storage *cells[CELLS];
    int64_t model[CELLS], zero = 0;
    uint64_t draw = 777;
    uint32_t made = 1;
    for (int i = 0; i < CELLS; i++) cells[i] = NULL;
    for (int i = 0; i < STEPS; i++) {
        draw = draw * 6364136223846793005u + 1442695040888963407u;
        uint32_t to = (uint32_t)(draw >> 33) % CELLS, from = (uint32_t)(draw >> 40) % CELLS;
        if (i >= (int)made * 100 && made < MS_STREAMS_MAX) {
            char name[24];
            snprintf(name, sizeof name, "side %u", made);
            streams[made++] = stream_of(engine, name);
        }
        ms_stream *on = streams[(draw >> 50) % made];
        if (!cells[to] || (draw >> 28) % 8 == 0) {
            ms_storage_release(cells[to]);
            cells[to] = cell_of(on, 8);
            add_args set = { .to = ms_storage_data(cells[to]), .from = &zero, .value = i };
            ms_access access = whole(cells[to], MS_WRITE);
            assert_int_equal(
                ms_stream_enqueue(on, &add_task, &set, &access, 1, (ms_task_cost){ 0 }, NULL),
                MS_OK);
            model[to] = i;
        } else if (cells[from] && from != to) {
            assert_int_equal(add(on, cells[to], cells[from], i, NULL), MS_OK);
            model[to] = model[from] + i;
        }
    }
    assert_int_equal(made, MS_STREAMS_MAX);
    for (int i = 0; i < CELLS; i++) {
        assert_int_equal(value_of(engine, cells[i]), model[i]);
        ms_storage_release(cells[i]);
    }
    ms_engine_free(engine);
}

/* The task that reads waits until the test opens a gate. A write that is enqueued on the first
 * stream must wait for that read. */
static void the_last_stream_counts_as_a_reader_and_one_more_is_an_error(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *first = ms_engine_current(engine), *last = NULL, *more = NULL;
    for (uint32_t i = 1; i < MS_STREAMS_MAX; i++) {
        char name[24];
        snprintf(name, sizeof name, "side %u", i);
        last = stream_of(engine, name);
    }
    assert_int_equal(ms_stream_index(last), MS_STREAMS_MAX - 1);
    assert_int_equal(ms_engine_stream(engine, "one more", &more), MS_ERROR_STATE);
    const char *text = ms_engine_error(engine)->message;
    assert_non_null(strstr(text, "\"one more\""));
    assert_non_null(strstr(text, "32 streams are in use"));
    ms_storage *read = cell_of(first, 8), *seen = cell_of(last, 8);
    *(int64_t *)ms_storage_data(read) = 5;
    *(int64_t *)ms_storage_data(seen) = 0;
    gate closed = { 0 };
    assert_int_equal(add(last, seen, read, 0, &closed), MS_OK);
    assert_int_equal(add(first, read, NULL, 100, NULL), MS_OK);
    assert_false(ms_point_reached(engine, ms_stream_last(first)));
    atomic_store(&closed.open, 1);
    assert_int_equal(value_of(engine, seen), 5);
    assert_int_equal(value_of(engine, read), 105);
    ms_storage_release(read);
    ms_storage_release(seen);
    ms_engine_free(engine);
}

static void strict_mode_names_a_missing_wait(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", true, 1);
    ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side"),
              *c = stream_of(engine, "third");
    ms_storage *cell = cell_of(a, 8);
    assert_int_equal(add(a, cell, NULL, 1, NULL), MS_OK);
    assert_int_equal(add(b, cell, NULL, 1, NULL), MS_ERROR_HAZARD);
    assert_non_null(strstr(ms_engine_error(engine)->message, "\"side\""));
    assert_non_null(strstr(ms_engine_error(engine)->message, "\"compute\""));
    ms_event *event = NULL;
    assert_int_equal(ms_event_record(a, &event), MS_OK);
    assert_int_equal(ms_event_wait(event, b), MS_OK);
    assert_int_equal(add(b, cell, NULL, 1, NULL), MS_OK);
    ms_event *second = NULL;
    assert_int_equal(ms_event_record(b, &second), MS_OK);
    assert_int_equal(ms_event_wait(second, c), MS_OK); /* c is after a too, through b */
    assert_int_equal(add(c, cell, NULL, 1, NULL), MS_OK);
    ms_engine_set_script(engine, 1); /* a script's call gets its wait */
    assert_int_equal(add(a, cell, NULL, 1, NULL), MS_OK);
    ms_event_free(event);
    ms_event_free(second);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_storage_release(cell);
    ms_engine_free(engine);
}

static void parts_of_one_storage_count_their_own_writes(void **state)
{
    (void)state;
    enum { PARTS = 3 * MS_CELLS_MAX };
    ms_engine *engine = make_engine("cpu", true, 1);
    ms_storage *cell = cell_of(ms_engine_current(engine), PARTS * 8);
    size_t ends[PARTS];
    uint32_t script = 1;
    for (uint32_t i = 0; i < PARTS; i++) ends[i] = (i + 1) * 8;
    assert_int_equal(ms_storage_split(cell, ends, PARTS), MS_OK);
    assert_null(ms_storage_written_by(cell, 0, PARTS * 8, &script));
    ms_storage_touch(cell, 80, 88, "one");
    ms_storage_touch(cell, 84, 90, "two"); /* a bit of parts 10 and 11 */
    ms_storage_record(cell, 88, 96);
    assert_int_equal(ms_storage_version(cell, 0, 80), 0);
    assert_int_equal(ms_storage_version(cell, 96, PARTS * 8), 0);
    assert_int_equal(ms_storage_version(cell, 80, 88), 2);
    assert_int_equal(ms_storage_version(cell, 0, PARTS * 8), 2);
    assert_int_equal(ms_storage_recorded(cell, 80, 88), 0);
    assert_int_equal(ms_storage_recorded(cell, 80, 96), 2);
    assert_string_equal(ms_storage_written_by(cell, 0, PARTS * 8, &script), "two");
    uint16_t first, cells;
    ms_storage_cells(cell, 0, PARTS * 8, &first, &cells);
    assert_true(first == 0 && cells > MS_CELLS_MAX / 2 && cells <= MS_CELLS_MAX);
    ms_storage_release(cell);
    ms_engine_free(engine);
}

static void cells_of_one_storage_do_not_wait_for_each_other(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", true, 1);
    ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side");
    ms_storage *cell = cell_of(a, 300);
    const size_t bad[] = { 100, 200 }, ends[] = { 100, 300 };
    assert_int_equal(ms_storage_split(cell, bad, 2), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_storage_split(cell, ends, 2), MS_OK);
    uint16_t first, count;
    ms_storage_cells(cell, 0, 100, &first, &count);
    assert_int_equal(first, 0);
    assert_int_equal(count, 1);
    ms_storage_cells(cell, 99, 101, &first, &count);
    assert_int_equal(count, 2);
    ms_storage_cells(cell, 100, 300, &first, &count);
    assert_int_equal(first, 1);
    assert_int_equal(count, 1);
    add_args args = { .to = ms_storage_data(cell), .value = 1 };
    ms_access low = { .storage = cell, .first_cell = 0, .cells = 1, .mode = MS_WRITE },
              high = { .storage = cell, .first_cell = 1, .cells = 1, .mode = MS_WRITE };
    assert_int_equal(ms_stream_enqueue(a, &add_task, &args, &low, 1, (ms_task_cost){ 0 }, NULL),
                     MS_OK);
    args.to += 16;
    assert_int_equal(ms_stream_enqueue(b, &add_task, &args, &high, 1, (ms_task_cost){ 0 }, NULL),
                     MS_OK);
    assert_int_equal(ms_stream_enqueue(b, &add_task, &args, &low, 1, (ms_task_cost){ 0 }, NULL),
                     MS_ERROR_HAZARD);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_storage_release(cell);
    ms_engine_free(engine);
}

/* ------------------------------------------------------------------- errors */

static void a_failed_task_is_reported_with_its_reason(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side");
    ms_storage *cell = cell_of(a, 8), *other = cell_of(a, 8);
    ms_access access = whole(cell, MS_WRITE);
    uint32_t script = 0;
    assert_int_equal(ms_strings_add(ms_engine_strings(engine), "train.lua:12", 12, &script), MS_OK);
    assert_int_equal(add(a, other, NULL, 0, NULL), MS_OK);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_engine_set_script(engine, script);
    assert_int_equal(ms_stream_enqueue(a, &fail_task, NULL, &access, 1, (ms_task_cost){ 0 }, NULL),
                     MS_OK);
    ms_engine_set_script(engine, 0);
    /* Refused at once, or skipped because the work that it waits for failed. */
    ms_status later = add(b, other, cell, 1, NULL);
    assert_true(later == MS_OK || later == MS_ERROR_ARGUMENT);
    if (later == MS_OK) assert_int_equal(ms_engine_sync(engine), MS_ERROR_ARGUMENT);
    assert_string_equal(ms_engine_error(engine)->operation, "bad_gather");
    assert_string_equal(ms_engine_error(engine)->message,
                        "index 7 outside 0..3, enqueued at train.lua:12");
    /* Memory that was not written stays unusable; other memory can be used again. */
    assert_int_equal(ms_stream_enqueue(a, &add_task, &(add_args){ .to = ms_storage_data(cell) },
                                       &(ms_access){ .storage = cell, .cells = 1, .mode = MS_READ },
                                       1, (ms_task_cost){ 0 }, NULL),
                     MS_ERROR_TASK);
    ms_storage *fresh = cell_of(a, 8);
    assert_int_equal(add(a, fresh, NULL, 1, NULL), MS_OK);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_storage_release(fresh);
    ms_storage_release(cell);
    ms_storage_release(other);
    ms_engine_free(engine);
}

/* However often tasks fail, memory that they should have written stays unreadable, and memory that
 * was written in between stays valid. */
static void many_failures_spoil_their_own_values_only(void **state)
{
    (void)state;
    enum { FAILURES = 20 };
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *a = ms_engine_current(engine);
    ms_storage *good[FAILURES], *bad[FAILURES], *to = cell_of(a, 8);
    for (int i = 0; i < FAILURES; i++) {
        good[i] = cell_of(a, 8);
        bad[i] = cell_of(a, 8);
        ms_access access = whole(bad[i], MS_WRITE);
        assert_int_equal(
            ms_stream_enqueue(a, &fail_task, NULL, &access, 1, (ms_task_cost){ 0 }, NULL), MS_OK);
        assert_int_equal(ms_engine_sync(engine), MS_ERROR_ARGUMENT);
        *(int64_t *)ms_storage_data(good[i]) = i;
        assert_int_equal(add(a, good[i], NULL, 1, NULL), MS_OK);
    }
    for (int i = 0; i < FAILURES; i++) {
        assert_int_equal(add(a, to, bad[i], 0, NULL), MS_ERROR_TASK);
        assert_int_equal(add(a, to, good[i], 0, NULL), MS_OK);
        assert_int_equal(value_of(engine, to), i + 1);
        ms_storage_release(good[i]);
        ms_storage_release(bad[i]);
    }
    ms_storage_release(to);
    ms_engine_free(engine);
}

static void waiting_for_the_future_is_an_error(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *a = ms_engine_current(engine);
    assert_int_equal(ms_stream_wait(a, (ms_point){ .stream = 0, .seq = 1 }), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_point_sync(engine, (ms_point){ .stream = 3, .seq = 1 }), MS_ERROR_ARGUMENT);
    ms_engine_forbid_sync(engine, 1);
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_STATE);
    ms_engine_forbid_sync(engine, -1);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_engine_free(engine);
}

/* --------------------------------------------------------------------- pool */

/* The same program of allocations on two streams; returns a hash of all decisions. */
static uint64_t allocation_program(ms_engine *engine)
{
    ms_stream *streams[2] = { ms_engine_current(engine), stream_of(engine, "side") };
    ms_storage *held[40] = { 0 };
    uint64_t hash = 0, draw = 99;
    char *base = NULL;
    for (int i = 0; i < 4000; i++) {
        draw = draw * 6364136223846793005u + 1442695040888963407u;
        int at = (int)((draw >> 33) % 40), on = (int)(draw >> 60) & 1;
        size_t bytes = (size_t)1 << ((draw >> 40) % 18);
        ms_storage_release(held[at]);
        held[at] = cell_of(streams[on], bytes < 8 ? 8 : bytes);
        if (!base) base = ms_storage_data(held[at]);
        uint64_t facts[2] = { (uint64_t)((char *)ms_storage_data(held[at]) - base),
                              ms_engine_memory(engine).peak };
        hash = ms_hash(facts, sizeof facts, hash);
        assert_int_equal(
            add(streams[on], held[at],
                held[(at + 1) % 40] && held[(at + 1) % 40] != held[at] ? held[(at + 1) % 40] : NULL,
                0, NULL),
            MS_OK);
    }
    for (int i = 0; i < 40; i++) ms_storage_release(held[i]);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    ms_memory memory = ms_engine_memory(engine);
    assert_int_equal(memory.live, 0);
    return ms_hash(&memory, sizeof memory.live * 3, hash);
}

static void addresses_and_peak_are_the_same_in_every_run_and_in_sim(void **state)
{
    (void)state;
    uint64_t hashes[3];
    for (int i = 0; i < 3; i++) {
        ms_engine *engine = make_engine(i == 2 ? "sim" : "cpu", false, 1);
        hashes[i] = allocation_program(engine);
        ms_engine_free(engine);
    }
    assert_int_equal(hashes[0], hashes[1]);
    assert_int_equal(hashes[0], hashes[2]);
}

static void freed_memory_is_reused_in_stream_order(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side");
    ms_storage *first = cell_of(a, 1 << 20);
    void *address = ms_storage_data(first);
    assert_int_equal(add(a, first, NULL, 1, NULL), MS_OK);
    ms_storage_release(first);
    /* Stream b is not after the use on a: new memory while there is room. */
    ms_storage *foreign = cell_of(b, 1 << 20);
    assert_ptr_not_equal(ms_storage_data(foreign), address);
    ms_storage *second = cell_of(a, 1 << 20); /* a is after its own use */
    assert_ptr_equal(ms_storage_data(second), address);
    assert_int_equal(ms_engine_memory(engine).live, 2 << 20);
    ms_storage_release(foreign);
    ms_storage_release(second);
    ms_engine_free(engine);
}

/* New memory may be an old block whose last use the asking stream is after, but another stream is
 * not: its first write waits, also if the block was handed on without any use in between, and in
 * every cell. */
static void a_first_write_on_another_stream_waits_for_what_was_there_before(void **state)
{
    (void)state;
    for (int unused_between = 0; unused_between < 2; unused_between++) {
        gate before = { 0 };
        ms_engine *engine = make_engine("cpu", false, 1);
        ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side");
        ms_storage *first = cell_of(a, 4096);
        void *address = ms_storage_data(first);
        assert_int_equal(add(a, first, NULL, 1, &before), MS_OK);
        ms_storage_release(first);
        if (unused_between) ms_storage_release(cell_of(a, 4096));
        ms_storage *second = cell_of(a, 4096);
        assert_ptr_equal(ms_storage_data(second), address);
        size_t ends[] = { 8, 4096 };
        assert_int_equal(ms_storage_split(second, ends, 2), MS_OK);
        assert_int_equal(add(b, second, NULL, 1, NULL), MS_OK);
        assert_int_equal(ms_stream_last(b).seq, 2); /* a wait and the task */
        atomic_store(&before.open, 1);
        assert_int_equal(ms_engine_sync(engine), MS_OK);
        assert_int_equal(ms_storage_split(second, ends, 2), MS_ERROR_STATE);
        ms_storage_release(second);
        ms_engine_free(engine);
    }
}

static void over_the_limit_a_foreign_block_is_handed_over_with_a_wait(void **state)
{
    (void)state;
    ms_engine_options options = { .own_device = late_device(NULL),
                                  .threads = 1,
                                  .memory_bytes = 64 << 20 };
    ms_engine *engine = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side");
    ms_storage *first = cell_of(a, 48 << 20);
    gate *closed = calloc(1, sizeof *closed);
    assert_int_equal(add(a, first, NULL, 1, closed), MS_OK);
    ms_storage_release(first);
    ms_storage *second = cell_of(b, 48 << 20);
    assert_int_equal(ms_engine_memory(engine).waits, 1);
    assert_int_equal(add(b, second, NULL, 1, NULL), MS_OK);
    /* Stream b waits for the task on a, whose gate is closed. */
    assert_false(ms_point_reached(engine, ms_stream_last(b)));
    ms_storage *third = NULL;
    assert_int_equal(ms_storage_new(a, 48 << 20, &third), MS_ERROR_MEMORY);
    assert_non_null(strstr(ms_engine_error(engine)->message, "live 50331648"));
    assert_null(third);
    atomic_store(&closed->open, 1);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    free(closed);
    ms_storage_release(second);
    ms_engine_free(engine);
}

/* ----------------------------------------------- limits, steps, tiles, idle */

static void in_flight_limits_make_the_stream_wait(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side");
    ms_inflight *limit = NULL;
    assert_int_equal(ms_inflight_new(engine, "gathers", 2, 100, &limit), MS_OK);
    assert_int_equal(ms_inflight_acquire(limit, b, 101), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_inflight_acquire(limit, b, 60), MS_OK);
    /* Nothing was released that it could wait for. */
    assert_int_equal(ms_inflight_acquire(limit, b, 60), MS_ERROR_STATE);
    ms_storage *cell = cell_of(a, 8);
    gate *closed = calloc(1, sizeof *closed);
    assert_int_equal(add(a, cell, NULL, 1, closed), MS_OK);
    assert_int_equal(ms_inflight_release(limit, ms_stream_last(a), 60), MS_OK);
    assert_int_equal(ms_inflight_acquire(limit, b, 40), MS_OK); /* fits beside it */
    assert_int_equal(ms_stream_last(b).seq, 0);
    assert_int_equal(ms_inflight_release(limit, (ms_point){ 0 }, 40), MS_OK);
    assert_int_equal(ms_inflight_acquire(limit, b, 80), MS_OK); /* waits for a */
    assert_false(ms_point_reached(engine, ms_stream_last(b)));
    atomic_store(&closed->open, 1);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    assert_int_equal(ms_inflight_release(limit, (ms_point){ 0 }, 81), MS_ERROR_STATE);
    ms_inflight_free(limit);
    free(closed);
    ms_storage_release(cell);
    ms_engine_free(engine);
}

typedef struct tiles_args {
    _Atomic int *counts;
    uint32_t tiles;
} tiles_args;

static void mark_tile(void *context, uint32_t tile, ms_thread *thread)
{
    (void)thread;
    atomic_fetch_add(&((tiles_args *)context)->counts[tile], 1);
}

static ms_task_result tiles_run(ms_run *run, void *arguments)
{
    tiles_args *args = arguments;
    ms_run_tiles(run, args->tiles, mark_tile, args);
    return MS_TASK_DONE;
}

static void every_tile_runs_once(void **state)
{
    (void)state;
    static const ms_task task = { .name = "tiles",
                                  .function = tiles_run,
                                  .args_bytes = sizeof(tiles_args) };
    for (uint32_t threads = 1; threads <= 4; threads++) {
        ms_engine *engine = make_engine("cpu", false, threads);
        ms_stream *streams[2] = { ms_engine_current(engine), stream_of(engine, "side") };
        _Atomic int counts[64];
        for (int tile = 0; tile < 64; tile++) atomic_init(&counts[tile], 0);
        for (int i = 0; i < 2000; i++)
            assert_int_equal(ms_stream_enqueue(streams[i & 1], &task,
                                               &(tiles_args){ counts, (uint32_t)i % 64 + 1 }, NULL,
                                               0, (ms_task_cost){ 0 }, NULL),
                             MS_OK);
        assert_int_equal(ms_engine_sync(engine), MS_OK);
        for (int tile = 0; tile < 64; tile++) {
            int expected = 0;
            for (int i = 0; i < 2000; i++) expected += i % 64 >= tile;
            assert_int_equal(counts[tile], expected);
        }
        ms_engine_free(engine);
    }
}

static void an_idle_engine_uses_no_processor(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 2);
    ms_storage *cell = cell_of(ms_engine_current(engine), 8);
    assert_int_equal(add(ms_engine_current(engine), cell, NULL, 1, NULL), MS_OK);
    assert_int_equal(ms_engine_sync(engine), MS_OK);
    /* 200 ms of waiting for nothing: spinning threads would burn at least that much; ours spin 0.05
     * ms at most. */
    const struct timespec pause = { .tv_nsec = 200000000 };
    struct timespec before, after;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    nanosleep(&pause, NULL);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    double used_ms = (double)(after.tv_sec - before.tv_sec) * 1e3
                     + (double)(after.tv_nsec - before.tv_nsec) / 1e6;
    assert_true(used_ms < 20);
    ms_storage_release(cell);
    ms_engine_free(engine);
}

static void traces_hold_times_in_order(void **state)
{
    (void)state;
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *a = ms_engine_current(engine), *b = stream_of(engine, "side");
    ms_storage *cell = cell_of(a, 8);
    assert_int_equal(ms_trace_start(engine), MS_OK);
    assert_int_equal(add(a, cell, NULL, 1, NULL), MS_OK);
    assert_int_equal(add(b, cell, NULL, 1, NULL), MS_OK);
    assert_int_equal(ms_trace_stop(engine), MS_OK);
    assert_int_equal(ms_trace_count(engine), 3); /* add, wait, add */
    const ms_trace_record *first = ms_trace_get(engine, 0), *wait = ms_trace_get(engine, 1),
                          *second = ms_trace_get(engine, 2);
    assert_string_equal(first->name, "add");
    assert_int_equal(wait->kind, MS_KIND_WAIT);
    assert_true(first->enqueued_ns <= first->started_ns && first->started_ns <= first->finished_ns);
    assert_true(second->started_ns >= first->finished_ns);
    assert_int_equal(second->stream, ms_stream_index(b));
    ms_storage_release(cell);
    ms_engine_free(engine);
}

static void poison_finds_what_a_task_does_not_declare(void **state)
{
    (void)state;
    if (device_is_cuda()) skip(); /* it has no poison: the host does not see its memory */
    ms_engine *engine = make_engine("cpu", false, 1);
    ms_stream *a = ms_engine_current(engine);
    ms_engine_set_poison(engine, true);
    ms_storage *to = cell_of(a, 8), *from = cell_of(a, 8), *other = cell_of(a, 8);
    assert_int_equal(*(int64_t *)ms_storage_data(to), -1); /* fresh memory is 0xff throughout */
    *(int64_t *)ms_storage_data(from) = 5;
    *(int64_t *)ms_storage_data(other) = 7;
    assert_int_equal(add(a, to, from, 1, NULL), MS_OK);
    assert_int_equal(*(int64_t *)ms_storage_data(to), 6);
    /* The same task, which declares only its write: it reads -1 instead of 5. */
    add_args args = { .to = ms_storage_data(to), .from = ms_storage_data(from), .value = 1 };
    ms_access access = whole(to, MS_WRITE);
    assert_int_equal(ms_stream_enqueue(a, &add_task, &args, &access, 1, (ms_task_cost){ 0 }, NULL),
                     MS_OK);
    assert_int_equal(*(int64_t *)ms_storage_data(to), 0);
    /* The task declares only its read: its write is detected and undone. */
    access = whole(from, MS_READ);
    assert_int_equal(ms_stream_enqueue(a, &add_task, &args, &access, 1, (ms_task_cost){ 0 }, NULL),
                     MS_ERROR_HAZARD);
    assert_non_null(strstr(ms_engine_error(engine)->message, "add wrote to a storage of 8 bytes"));
    assert_int_equal(*(int64_t *)ms_storage_data(to), 0);
    assert_int_equal(*(int64_t *)ms_storage_data(other), 7);
    ms_storage_release(to);
    ms_storage_release(from);
    ms_storage_release(other);
    ms_engine_free(engine);
}

/* --------------------------------------------------------- failing the n-th */

/* A program over every call of exec.h that can fail; the first failure is passed on. */
static ms_status program(const ms_os *os, ms_engine **engine)
{
    ms_engine_options options = { .os = os, .threads = 2 };
    ms_error error;
    ms_status status = ms_engine_new(&options, &error, engine);
    if (status) {
        assert_int_not_equal(error.message[0], 0);
        return status;
    }
    ms_stream *a = ms_engine_current(*engine), *b = NULL;
    ms_storage *one = NULL, *two = NULL;
    ms_event *event = NULL;
    ms_future *future = NULL;
    ms_inflight *limit = NULL;
    const size_t ends[] = { 4, 64 };
    uint64_t before = ms_engine_memory(*engine).live;
    status = ms_engine_stream(*engine, "side", &b);
    if (!status) status = ms_storage_new(a, 64, &one);
    if (!status) status = ms_storage_new(b, 64 << 20, &two);
    if (!status) status = ms_storage_split(one, ends, 2);
    if (!status) status = ms_trace_start(*engine);
    if (!status) status = add(a, two, NULL, 1, NULL);
    if (!status) status = add(b, two, NULL, 1, NULL);
    if (!status) status = ms_trace_stop(*engine);
    if (!status) status = ms_event_record(a, &event);
    if (!status) status = ms_future_new(*engine, (ms_value){ 0 }, ms_stream_last(a), &future);
    if (!status) status = ms_inflight_new(*engine, "limit", 2, 64, &limit);
    if (!status) status = ms_inflight_acquire(limit, a, 1);
    if (!status) status = ms_inflight_release(limit, ms_stream_last(a), 1);
    if (!status) status = ms_engine_sync(*engine);
    ms_inflight_free(limit);
    ms_future_release(future);
    ms_event_free(event);
    ms_storage_release(one);
    ms_storage_release(two);
    assert_int_equal(ms_engine_memory(*engine).live, before);
    return status;
}

static void any_failed_allocation_is_an_error_and_no_leak(void **state)
{
    (void)state;
    fail_each_call(program, false);
    fail_each_call(program, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(enqueue_returns_before_the_task_runs),
        cmocka_unit_test(a_stream_keeps_order_past_its_ring),
        cmocka_unit_test(streams_run_side_by_side),
        cmocka_unit_test(hazards_order_streams),
        cmocka_unit_test(a_program_on_all_streams_gives_what_it_gives_in_order),
        cmocka_unit_test(the_last_stream_counts_as_a_reader_and_one_more_is_an_error),
        cmocka_unit_test(strict_mode_names_a_missing_wait),
        cmocka_unit_test(parts_of_one_storage_count_their_own_writes),
        cmocka_unit_test(cells_of_one_storage_do_not_wait_for_each_other),
        cmocka_unit_test(a_failed_task_is_reported_with_its_reason),
        cmocka_unit_test(many_failures_spoil_their_own_values_only),
        cmocka_unit_test(waiting_for_the_future_is_an_error),
        cmocka_unit_test(addresses_and_peak_are_the_same_in_every_run_and_in_sim),
        cmocka_unit_test(freed_memory_is_reused_in_stream_order),
        cmocka_unit_test(a_first_write_on_another_stream_waits_for_what_was_there_before),
        cmocka_unit_test(over_the_limit_a_foreign_block_is_handed_over_with_a_wait),
        cmocka_unit_test(in_flight_limits_make_the_stream_wait),
        cmocka_unit_test(every_tile_runs_once),
        cmocka_unit_test(an_idle_engine_uses_no_processor),
        cmocka_unit_test(traces_hold_times_in_order),
        cmocka_unit_test(poison_finds_what_a_task_does_not_declare),
        cmocka_unit_test(any_failed_allocation_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
