/* drop.c: storages that are dropped and refilled: memory, hazards, versions, errors, and casts.
 * ctest: late cuda */
#include "grad_support.h"

#include "exec/poison.h"
#include "tensor/op.h"
#include "tensor/state.h"

static ms_stream *stream_of(ms_engine *engine, const char *name)
{
    ms_stream *stream = NULL;
    OK(ms_engine_stream(engine, name, &stream));
    return stream;
}

static ms_engine *make(const char *device, bool strict, uint64_t bytes)
{
    ms_engine_options options = { .device = device,
                                  .own_device = late_device(device),
                                  .threads = 1,
                                  .strict = strict,
                                  .memory_bytes = bytes };
    ms_engine *engine = NULL;
    OK(ms_engine_new(&options, NULL, &engine));
    return engine;
}

static void wait_for(ms_stream *stream, ms_stream *of)
{
    OK(ms_stream_wait(stream, ms_stream_last(of)));
}

static bool says(ms_engine *engine, const char *text)
{
    return strstr(ms_engine_error(engine)->message, text) != NULL;
}

static void release_all(ms_engine *engine, ms_tensor **tensors, int count)
{
    for (int i = 0; i < count; i++) ms_tensor_release(tensors[i]);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

/* -------------------------------------------------------------------- memory */

static void dropped_memory_is_another_storage_s(void **state)
{
    (void)state;
    static const char *const devices[] = { "cpu", "sim" };
    for (int d = 0; d < 2; d++) {
        ms_engine *engine = make(devices[d], true, 0);
        ms_stream *compute = ms_engine_current(engine);
        ms_storage *a = NULL, *b = NULL;
        OK(ms_storage_new(compute, 4096, &a));
        void *place = ms_storage_data(a);
        OK(ms_storage_drop(a, "unit 1"));
        assert_true(ms_storage_is_dropped(a));
        assert_int_equal(ms_engine_memory(engine).live, 0);
        assert_int_equal(ms_storage_bytes(a), 4096);
        OK(ms_storage_new(compute, 4096, &b));
        assert_ptr_equal(ms_storage_data(b), place);
        OK(ms_storage_refill(a, compute));
        assert_false(ms_storage_is_dropped(a));
        assert_ptr_not_equal(ms_storage_data(a), place);
        ms_memory memory = ms_engine_memory(engine);
        assert_int_equal(memory.live, 8192);
        assert_int_equal(memory.peak, 8192);
        ms_storage_release(b);
        OK(ms_storage_drop(a, "unit 1"));
        ms_storage_release(a); /* while it is dropped */
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
    }
}

static void dropping_or_refilling_twice_is_an_error_that_changes_nothing(void **state)
{
    (void)state;
    ms_engine *engine = make(NULL, true, 0);
    ms_stream *compute = ms_engine_current(engine);
    ms_storage *a = NULL;
    OK(ms_storage_new(compute, 64, &a));
    assert_int_equal(ms_storage_refill(a, compute), MS_ERROR_STATE);
    assert_true(says(engine, "64 bytes is refilled that has memory"));
    OK(ms_storage_drop(a, "unit \"layers.3\""));
    assert_int_equal(ms_storage_drop(a, "unit \"layers.4\""), MS_ERROR_STATE);
    assert_true(says(engine, "unit \"layers.4\" drops"));
    assert_true(says(engine, "that unit \"layers.3\" has dropped already"));
    OK(ms_storage_refill(a, compute));
    assert_int_equal(ms_storage_refill(a, compute), MS_ERROR_STATE);
    assert_int_equal(ms_engine_memory(engine).live, 64);
    ms_storage_release(a);
    ms_engine_free(engine);
}

static void a_refill_without_room_leaves_the_storage_dropped(void **state)
{
    (void)state;
    ms_engine *engine = make(NULL, true, 1 << 20);
    ms_stream *compute = ms_engine_current(engine);
    ms_storage *a = NULL, *b = NULL;
    OK(ms_storage_new(compute, 600 << 10, &a));
    OK(ms_storage_drop(a, "unit 1"));
    OK(ms_storage_new(compute, 600 << 10, &b));
    assert_int_equal(ms_storage_refill(a, compute), MS_ERROR_MEMORY);
    assert_true(ms_storage_is_dropped(a));
    assert_int_equal(ms_engine_memory(engine).live, 600 << 10);
    ms_storage_release(b);
    OK(ms_storage_refill(a, compute));
    ms_storage_release(a);
    ms_engine_free(engine);
}

/* A task that waits for a gate, so that later work is enqueued while it runs. */
typedef struct slow_args {
    float *to;
    _Atomic int *open;
    float value;
} slow_args;

static ms_task_result slow_run(ms_run *run, void *arguments)
{
    (void)run;
    const slow_args *args = arguments;
    if (!atomic_load(args->open)) return MS_TASK_PENDING;
    for (int i = 0; i < 2; i++) args->to[i] = args->value;
    return MS_TASK_DONE;
}

static const ms_task slow_task = { .name = "slow",
                                   .function = slow_run,
                                   .args_bytes = sizeof(slow_args) };

static ms_status slowly(ms_stream *stream, ms_tensor *to, float value, _Atomic int *open)
{
    slow_args args = { .to = ms_tensor_data(to), .open = open, .value = value };
    ms_stream *before = ms_engine_set_current(ms_stream_engine(stream), stream);
    ms_status status = ms_tensor_enqueue(ms_stream_engine(stream), &slow_task, &args, NULL, 0, &to,
                                         1, (ms_task_cost){ 0 });
    ms_engine_set_current(ms_stream_engine(stream), before);
    return status;
}

/* The only block goes from a to b, on another stream, while a task of a still waits to write there.
 * A third stream writes b. */
static void a_dropped_block_is_handed_over_in_stream_order(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    for (int refilled = 0; refilled < 2; refilled++) {
        _Atomic int open = 0, at_once = 1;
        int64_t two = 2;
        ms_engine *engine = make(NULL, false, MS_CANARY ? 128 : 64);
        ms_stream *compute = ms_engine_current(engine), *other = stream_of(engine, "other"),
                  *third = stream_of(engine, "third");
        ms_tensor *a = NULL, *b = NULL;
        if (refilled) {
            OK(ms_tensor_new(engine, MS_F32, 1, &two, &b));
            OK(ms_storage_drop(ms_tensor_storage(b), "unit 2"));
        }
        OK(ms_tensor_new(engine, MS_F32, 1, &two, &a));
        OK(slowly(compute, a, 1, &open));
        OK(ms_storage_drop(ms_tensor_storage(a), "unit 1"));
        ms_engine_set_current(engine, other);
        if (refilled) OK(ms_storage_refill(ms_tensor_storage(b), other));
        else OK(ms_tensor_new(engine, MS_F32, 1, &two, &b));
        ms_engine_set_current(engine, compute);
        assert_int_equal(ms_engine_memory(engine).waits, 1);
        OK(slowly(third, b, 2, &at_once));
        atomic_store(&open, 1);
        assert_values(b, 2, 2);
        ms_tensor *all[] = { a, b };
        release_all(engine, all, 2);
    }
}

static void strict_mode_finds_a_missing_wait_for_the_block_s_former_user(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    _Atomic int open = 1;
    int64_t two = 2;
    ms_engine *engine = make(NULL, true, 0);
    ms_stream *compute = ms_engine_current(engine), *other = stream_of(engine, "other");
    ms_tensor *a = NULL;
    OK(ms_tensor_new(engine, MS_F32, 1, &two, &a));
    OK(slowly(compute, a, 1, &open));
    OK(ms_storage_drop(ms_tensor_storage(a), "unit 1"));
    OK(ms_storage_refill(ms_tensor_storage(a), compute)); /* the same block, covered on compute */
    assert_int_equal(slowly(other, a, 2, &open), MS_ERROR_HAZARD);
    wait_for(other, compute);
    OK(slowly(other, a, 2, &open));
    release_all(engine, &a, 1);
}

/* A room keeps its address while others take and give back, is used by one storage at a time, and
 * counts as live memory only while it is used. */
static void a_room_stays_where_it_is(void **state)
{
    (void)state;
    static const char *const devices[] = { "cpu", "sim" };
    for (int d = 0; d < 2; d++) {
        ms_engine *engine = make(devices[d], true, 0);
        ms_stream *compute = ms_engine_current(engine);
        ms_storage *a = NULL, *b = NULL, *other = NULL, *large = NULL;
        ms_static_block *room = NULL;
        OK(ms_storage_new(compute, 4096, &a));
        void *place = ms_storage_data(a);
        OK(ms_static_block_new(a, &room));
        assert_int_equal(ms_static_block_bytes(room), 4096);
        assert_ptr_equal(ms_static_block_storage(room), a);
        OK(ms_storage_new(compute, 2048, &b));
        OK(ms_storage_drop(b, "unit 2"));
        assert_int_equal(ms_storage_refill_in(b, compute, room), MS_ERROR_STATE);
        assert_true(says(engine, "2048 bytes cannot use a room of 4096 bytes: another one does"));
        OK(ms_storage_drop(a, "unit 1"));
        assert_int_equal(ms_engine_memory(engine).live, 0);
        assert_null(ms_static_block_storage(room));
        /* Ordinary memory of the same size is elsewhere. */
        OK(ms_storage_new(compute, 4096, &other));
        assert_ptr_not_equal(ms_storage_data(other), place);
        OK(ms_storage_refill_in(b, compute, room));
        assert_ptr_equal(ms_storage_data(b), place);
        assert_int_equal(ms_engine_memory(engine).live, 4096 + 2048);
        assert_int_equal(ms_storage_refill_in(b, compute, room), MS_ERROR_STATE);
        assert_true(says(engine, "2048 bytes is refilled that has memory"));
        ms_storage_release(b); /* a storage that ends leaves its room, too */
        assert_int_equal(ms_engine_memory(engine).live, 4096);
        OK(ms_storage_new(compute, 8192, &large));
        OK(ms_storage_drop(large, "unit 3"));
        assert_int_equal(ms_storage_refill_in(large, compute, room), MS_ERROR_STATE);
        assert_true(says(engine, "8192 bytes cannot use a room of 4096 bytes"));
        assert_int_equal(ms_engine_memory(engine).peak, 8192 + 4096);
        OK(ms_storage_refill_in(a, compute, room));
        assert_ptr_equal(ms_storage_data(a), place);
        /* Then it is memory as any other. */
        ms_static_block_free(room);
        assert_ptr_equal(ms_storage_data(a), place);
        ms_storage_release(other);
        ms_storage_release(a);
        ms_storage_release(large);
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
    }
}

/* Its memory goes to the pool at once. */
static void a_room_that_nobody_uses_may_be_freed(void **state)
{
    (void)state;
    ms_engine *engine = make(NULL, true, 1 << 20);
    ms_stream *compute = ms_engine_current(engine);
    ms_storage *a = NULL, *b = NULL;
    ms_static_block *room = NULL;
    OK(ms_storage_new(compute, 600 << 10, &a));
    OK(ms_static_block_new(a, &room));
    ms_storage_release(a);
    assert_int_equal(ms_storage_new(compute, 600 << 10, &b), MS_ERROR_MEMORY);
    ms_static_block_free(room);
    OK(ms_storage_new(compute, 600 << 10, &b));
    ms_storage_release(b);
    ms_engine_free(engine);
}

/* The next storage's writer, on any stream, is after the tasks of the last one. */
static void a_room_is_handed_over_in_stream_order(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    for (int strict = 0; strict < 2; strict++) {
        _Atomic int open = 0, at_once = 1;
        int64_t two = 2;
        ms_engine *engine = make(NULL, strict, 0);
        ms_stream *compute = ms_engine_current(engine), *other = stream_of(engine, "other"),
                  *third = stream_of(engine, "third");
        ms_tensor *a = NULL, *b = NULL;
        ms_static_block *room = NULL;
        OK(ms_tensor_new(engine, MS_F32, 1, &two, &a));
        OK(ms_tensor_new(engine, MS_F32, 1, &two, &b));
        OK(ms_storage_drop(ms_tensor_storage(b), "unit 2"));
        OK(ms_static_block_new(ms_tensor_storage(a), &room));
        OK(slowly(compute, a, 1, &open));
        OK(ms_storage_drop(ms_tensor_storage(a), "unit 1"));
        OK(ms_storage_refill_in(ms_tensor_storage(b), other, room));
        OK(slowly(strict ? other : third, b, 2, &at_once));
        atomic_store(&open, 1);
        assert_values(b, 2, 2);
        ms_static_block_free(room);
        ms_tensor *all[] = { a, b };
        release_all(engine, all, 2);
    }
}

/* The former users of the storage used memory that now belongs to the pool, so writers of the new
 * memory need not wait for them. */
static void a_refill_forgets_the_users_of_the_old_memory(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    _Atomic int open = 0, at_once = 1;
    int64_t two = 2;
    ms_engine *engine = make(NULL, true, 0);
    ms_stream *compute = ms_engine_current(engine), *other = stream_of(engine, "other");
    ms_tensor *a = NULL;
    OK(ms_tensor_new(engine, MS_F32, 1, &two, &a));
    OK(slowly(compute, a, 1, &open));
    OK(ms_storage_drop(ms_tensor_storage(a), "unit 1"));
    OK(ms_storage_refill(ms_tensor_storage(a), other)); /* new memory: there is room */
    OK(slowly(other, a, 2, &at_once));
    OK(ms_stream_sync(other)); /* while the first task still waits for its gate */
    atomic_store(&open, 1);
    assert_values(a, 2, 2);
    release_all(engine, &a, 1);
}

/* The pattern of a sharded model: blocks are taken on the stream of gathers, and used and dropped
 * on the model's stream. A gather waits until the block that was used two blocks earlier is
 * dropped. The model's stream makes and frees tensors of other sizes in between. */
static void dropping_and_refilling_on_another_stream_does_not_grow_the_pool(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    enum { UNITS = 6, ROUNDS = 30 };
    _Atomic int at_once = 1;
    int64_t size = 50000, small = 3000;
    ms_engine *engine = make(NULL, true, 0);
    ms_stream *compute = ms_engine_current(engine), *gathers = stream_of(engine, "gathers");
    ms_tensor *units[UNITS], *kept[UNITS] = { NULL };
    ms_point used[2] = { { 0 }, { 0 } };
    uint64_t settled = 0;
    for (int u = 0; u < UNITS; u++) {
        OK(ms_tensor_new(engine, MS_F32, 1, &size, &units[u]));
        OK(ms_storage_drop(ms_tensor_storage(units[u]), "a unit"));
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int u = 0; u < UNITS; u++) {
            OK(ms_stream_wait(gathers, used[0]));
            OK(ms_storage_refill(ms_tensor_storage(units[u]), gathers));
            OK(slowly(gathers, units[u], 1, &at_once));
            wait_for(compute, gathers);
            ms_tensor_release(kept[u]);
            OK(ms_tensor_new(engine, MS_F32, 1, &small, &kept[u]));
            OK(slowly(compute, kept[u], 2, &at_once));
            OK(slowly(compute, units[u], 2, &at_once));
            used[0] = used[1];
            used[1] = ms_stream_last(compute);
            OK(ms_storage_drop(ms_tensor_storage(units[u]), "a unit"));
        }
        if (round == 2) settled = ms_engine_memory(engine).reserved;
    }
    /* Two blocks that are waited for, and the one that is filled. */
    assert_int_equal(ms_engine_memory(engine).reserved, settled);
    assert_true(settled <= 3 * 4 * (uint64_t)size + UNITS * 4 * (uint64_t)(small + 512));
    for (int u = 0; u < UNITS; u++) ms_tensor_release(units[u]);
    release_all(engine, kept, UNITS);
}

/* A dropped storage is not copied anywhere, and after a refill it has poison. */
static void a_checked_engine_passes_over_what_is_dropped(void **state)
{
    (void)state;
    if (device_is_cuda()) skip(); /* it has no poison: the host does not see its memory */
    ms_engine *engine = make("cpu", true, 0);
    ms_tensor *a = NULL, *b = NULL, *source = NULL;
    ms_engine_set_poison(engine, true);
    OK(vector(engine, 1, 2, false, &a));
    OK(vector(engine, 3, 4, false, &b));
    OK(vector(engine, 5, 6, false, &source));
    OK(ms_storage_drop(ms_tensor_storage(a), "unit 1"));
    OK(multiply_in_place(engine, b, b));
    assert_values(b, 9, 16);
    OK(ms_storage_refill(ms_tensor_storage(a), ms_engine_current(engine)));
    assert_int_equal(*(uint32_t *)ms_tensor_data(a), 0xffffffff);
    OK(ms_tensor_restore(a, source));
    OK(multiply_in_place(engine, b, a));
    assert_values(b, 45, 96);
    ms_tensor *all[] = { a, b, source };
    release_all(engine, all, 3);
}

/* -------------------------------------------------------------------- errors */

static void what_touches_a_dropped_storage_names_its_owner(void **state)
{
    (void)state;
    static const char *const devices[] = { "cpu", "sim" };
    for (int d = 0; d < 2; d++) {
        ms_engine *engine = make(devices[d], true, 0);
        ms_tensor *a = NULL, *b = NULL, *view = NULL, *sum = NULL;
        ms_readback *readback = NULL;
        float values[2] = { 0 };
        int64_t one = 1, step = 1;
        uint32_t line = 0;
        OK(vector(engine, 1, 2, false, &a));
        OK(vector(engine, 3, 4, false, &b));
        OK(ms_tensor_window(a, 1, &one, &step, 1, &view));
        OK(ms_strings_add(ms_engine_strings(engine), "train.lua:7", 11, &line));
        ms_engine_set_script(engine, line);
        OK(ms_storage_drop(ms_tensor_storage(a), "unit \"layers.3\""));
        ms_engine_set_script(engine, 0);
        assert_int_equal(apply(engine, &ms_op_add, b, a, &sum), MS_ERROR_STATE);
        assert_string_equal(ms_engine_error(engine)->message,
                            "add touches memory (8 bytes, made at the engine) that unit "
                            "\"layers.3\" has dropped (at train.lua:7): refill it first");
        assert_null(sum);
        assert_int_equal(multiply_in_place(engine, a, b), MS_ERROR_STATE);
        assert_true(says(engine, "mul touches"));
        assert_int_equal(apply(engine, &ms_op_exp, view, NULL, &sum), MS_ERROR_STATE);
        assert_true(says(engine, "exp touches"));
        assert_int_equal(ms_tensor_write(a, values, sizeof values), MS_ERROR_STATE);
        assert_true(says(engine, "write touches"));
        assert_int_equal(ms_tensor_read(a, values, sizeof values), MS_ERROR_STATE);
        assert_true(says(engine, "read touches"));
        assert_int_equal(ms_tensor_read(view, values, sizeof *values), MS_ERROR_STATE);
        assert_int_equal(ms_tensor_readback(a, &readback), MS_ERROR_STATE);
        assert_true(says(engine, "read touches"));
        ms_access access = { .storage = ms_tensor_storage(a), .cells = 1, .mode = MS_READ };
        _Atomic int open = 1;
        slow_args args = { .open = &open };
        assert_int_equal(ms_stream_enqueue(ms_engine_current(engine), &slow_task, &args, &access, 1,
                                           (ms_task_cost){ 0 }, NULL),
                         MS_ERROR_STATE);
        assert_true(says(engine, "slow touches"));
        assert_int_equal(ms_tensor_version(a), 1); /* nothing has written it since */
        ms_tensor *all[] = { a, b, view };
        release_all(engine, all, 3);
    }
}

static void what_was_refilled_cannot_be_read_before_it_is_written(void **state)
{
    (void)state;
    ms_engine *engine = make(NULL, true, 0);
    ms_tensor *a = NULL, *view = NULL, *sum = NULL, *source = NULL;
    float values[2];
    int64_t one = 1, step = 1;
    OK(vector(engine, 1, 2, false, &a));
    OK(vector(engine, 5, 6, false, &source));
    OK(ms_tensor_window(a, 1, &one, &step, 1, &view));
    OK(ms_storage_drop(ms_tensor_storage(a), "unit 1"));
    OK(ms_storage_refill(ms_tensor_storage(a), ms_engine_current(engine)));
    assert_int_equal(apply(engine, &ms_op_exp, view, NULL, &sum), MS_ERROR_STATE);
    assert_string_equal(
        ms_engine_error(engine)->message,
        "exp reads memory (8 bytes, made at the engine) that unit 1 has dropped (at "
        "the engine) and that nothing has written since its refill: restore it "
        "first");
    assert_int_equal(ms_tensor_read(a, values, sizeof values), MS_ERROR_STATE);
    OK(ms_tensor_restore(a, source));
    assert_values(a, 5, 6);
    ms_tensor *all[] = { a, source, view };
    release_all(engine, all, 3);
}

/* Tensors made on "meta" get memory later, and so do their views that exist by then. */
static void a_storage_on_meta_takes_memory_when_it_is_refilled(void **state)
{
    (void)state;
    static const char *const devices[] = { "cpu", "sim" };
    for (int d = 0; d < 2; d++) {
        ms_engine *engine = make(devices[d], true, 0);
        ms_tensor *a = NULL, *view = NULL, *source = NULL, *sum = NULL, *twice = NULL;
        float values[2] = { 0 };
        int64_t two = 2, step = 1;
        OK(vector(engine, 5, 6, false, &source));
        assert_false(ms_engine_set_meta(engine, true));
        OK(vector(engine, 1, 2, false, &a));
        assert_true(ms_engine_set_meta(engine, false));
        OK(ms_tensor_window(a, 1, &two, &step, 0, &view));
        uint64_t live = ms_engine_memory(engine).live,
                 last = ms_stream_last(ms_engine_current(engine)).seq;
        assert_true(ms_tensor_is_meta(view));
        OK(apply(engine, &ms_op_add, a, view, &sum));
        assert_true(ms_tensor_is_meta(sum));
        assert_int_equal(ms_engine_memory(engine).live, live);
        assert_int_equal(ms_stream_last(ms_engine_current(engine)).seq, last);
        assert_int_equal(ms_storage_drop(ms_tensor_storage(a), "unit 1"), MS_ERROR_STATE);
        assert_true(says(engine, "unit 1 drops a storage of 8 bytes on \"meta\""));
        assert_int_equal(ms_tensor_read(a, values, sizeof values), MS_ERROR_STATE);
        assert_true(says(engine, "read needs the values of a tensor on \"meta\""));
        OK(ms_storage_refill(ms_tensor_storage(a), ms_engine_current(engine)));
        assert_false(ms_tensor_is_meta(view));
        assert_int_equal(ms_engine_memory(engine).live, live + 8);
        assert_int_equal(ms_tensor_read(a, values, sizeof values), MS_ERROR_STATE);
        assert_true(says(engine, "on \"meta\") that nothing has written since its first refill"));
        OK(ms_tensor_restore(a, source));
        OK(apply(engine, &ms_op_add, view, view, &twice));
        if (d == 0) assert_values(twice, 10, 12);
        ms_tensor *all[] = { a, view, source, sum, twice };
        release_all(engine, all, 5);
    }
}

/* ------------------------------------------------------------------ versions */

static void refill(ms_tensor *tensor)
{
    OK(ms_storage_refill(ms_tensor_storage(tensor), ms_engine_current(ms_tensor_engine(tensor))));
}

static void reshard(ms_tensor *tensor) { OK(ms_storage_drop(ms_tensor_storage(tensor), "unit 1")); }

static void a_restore_keeps_the_version_while_its_source_is_unchanged(void **state)
{
    (void)state;
    ms_engine *engine = make(NULL, true, 0);
    ms_tensor *full = NULL, *shard = NULL, *other = NULL;
    OK(vector(engine, 0, 0, false, &full));
    OK(vector(engine, 1, 2, false, &shard));
    OK(vector(engine, 1, 2, false, &other));
    OK(ms_tensor_restore(full, shard)); /* the first one: a write */
    uint64_t version = ms_tensor_version(full);
    for (int i = 0; i < 3; i++) {
        reshard(full);
        refill(full);
        OK(ms_tensor_restore(full, shard));
        assert_int_equal(ms_tensor_version(full), version);
        assert_values(full, 1, 2);
    }
    OK(ms_tensor_restore(full, shard)); /* over values that are the same */
    assert_int_equal(ms_tensor_version(full), version);
    /* Another source, even with equal values. */
    reshard(full);
    refill(full);
    OK(ms_tensor_restore(full, other));
    assert_true(ms_tensor_version(full) > version);
    /* The source was written: before the drop, or after it. */
    for (int late = 0; late < 2; late++) {
        version = ms_tensor_version(full);
        if (late) reshard(full);
        OK(multiply_in_place(engine, other, shard));
        if (!late) reshard(full);
        refill(full);
        OK(ms_tensor_restore(full, other));
        assert_true(ms_tensor_version(full) > version);
        uint32_t script = 0;
        assert_string_equal(ms_storage_written_by(ms_tensor_storage(full), 0, 8, &script), "mul");
    }
    /* The storage was written after its restore. */
    OK(multiply_in_place(engine, full, shard));
    version = ms_tensor_version(full);
    reshard(full);
    refill(full);
    OK(ms_tensor_restore(full, other));
    assert_true(ms_tensor_version(full) > version);
    /* A plain write of the refilled memory is a write. */
    version = ms_tensor_version(full);
    reshard(full);
    refill(full);
    float values[] = { 7, 8 };
    OK(ms_tensor_write(full, values, sizeof values));
    assert_true(ms_tensor_version(full) > version);
    /* A new source at the address of an old one is another source. */
    version = ms_tensor_version(full);
    OK(ms_tensor_restore(full, other));
    ms_tensor_release(other);
    other = NULL;
    OK(vector(engine, 9, 9, false, &other));
    version = ms_tensor_version(full);
    OK(ms_tensor_restore(full, other));
    assert_true(ms_tensor_version(full) > version);
    ms_tensor *all[] = { full, shard, other };
    release_all(engine, all, 3);
}

enum { LEAVES = 100 }; /* more than a storage has hazard cells */

/* Each leaf is restored from its own shard: a step of one shard is seen in one leaf. */
static void each_leaf_of_a_flat_storage_is_restored_for_itself(void **state)
{
    (void)state;
    ms_engine *engine = make(NULL, true, 0);
    ms_tensor *leaves[LEAVES] = { NULL }, *shards[LEAVES] = { NULL }, *flat = NULL, *y = NULL;
    uint64_t versions[LEAVES];
    for (int i = 0; i < LEAVES; i++) {
        OK(vector(engine, 0, 0, true, &leaves[i]));
        OK(vector(engine, (float)i, 1, false, &shards[i]));
    }
    OK(ms_flatten(engine, leaves, LEAVES, &flat));
    for (int i = 0; i < LEAVES; i++) {
        OK(ms_tensor_restore(leaves[i], shards[i]));
        versions[i] = ms_tensor_version(leaves[i]);
    }
    reshard(flat);
    OK(multiply_in_place(engine, shards[40], shards[41]));
    refill(flat);
    for (int i = 0; i < LEAVES; i++) {
        /* A neighbour in the same hazard cell is vacant until its own restore. */
        assert_int_equal(apply(engine, &ms_op_exp, leaves[i], NULL, &y), MS_ERROR_STATE);
        OK(ms_tensor_restore(leaves[i], shards[i]));
        assert_values(leaves[i], (float)(i == 40 ? 40 * 41 : i), 1);
        assert_int_equal(ms_tensor_version(leaves[i]) == versions[i], i != 40);
    }
    /* A restore that covers half a leaf is a write of that leaf only. */
    ms_tensor *half = NULL, *half_shard = NULL;
    int64_t three = 3, step = 1;
    OK(ms_tensor_window(flat, 1, &three, &step, 0, &half));
    OK(ms_tensor_new(engine, MS_F32, 1, &three, &half_shard));
    float values[] = { 0, 1, 1 };
    OK(ms_tensor_write(half_shard, values, sizeof values));
    for (int i = 0; i < 2; i++) OK(ms_tensor_restore(half, half_shard));
    versions[0] = ms_tensor_version(leaves[0]);
    versions[1] = ms_tensor_version(leaves[1]);
    OK(ms_tensor_restore(half, half_shard));
    assert_int_equal(ms_tensor_version(leaves[0]), versions[0]);
    assert_true(ms_tensor_version(leaves[1]) > versions[1]);
    ms_tensor_release(half);
    ms_tensor_release(half_shard);
    ms_tensor_release(flat);
    for (int i = 0; i < LEAVES; i++) ms_tensor_release(leaves[i]);
    release_all(engine, shards, LEAVES);
}

/* ---------------------------------------------------------------- backward */

/* full (a leaf) is restored from shard; y = x * full, loss = sum(y). */
typedef struct graph {
    ms_engine *engine;
    ms_tensor *x, *full, *shard, *y, *loss;
} graph;

static graph make_graph(void)
{
    graph g = { .engine = make(NULL, true, 0) };
    OK(vector(g.engine, 3, 4, true, &g.x));
    OK(vector(g.engine, 0, 0, true, &g.full));
    OK(vector(g.engine, 10, 20, false, &g.shard));
    OK(ms_tensor_restore(g.full, g.shard));
    OK(apply(g.engine, &ms_op_mul, g.x, g.full, &g.y));
    OK(total(g.engine, g.y, &g.loss));
    reshard(g.full);
    return g;
}

static void drop_graph(graph *g)
{
    ms_tensor *all[] = { g->x, g->full, g->shard, g->y, g->loss };
    release_all(g->engine, all, 5);
}

static void backward_reads_what_was_restored(void **state)
{
    (void)state;
    graph g = make_graph();
    refill(g.full);
    OK(ms_tensor_restore(g.full, g.shard));
    OK(ms_backward(g.engine, &g.loss, NULL, 1, false));
    assert_gradient(g.x, 10, 20);
    assert_gradient(g.full, 3, 4);
    drop_graph(&g);
}

static void backward_without_a_refill_names_the_owner(void **state)
{
    (void)state;
    graph g = make_graph();
    assert_int_equal(ms_backward(g.engine, &g.loss, NULL, 1, false), MS_ERROR_STATE);
    assert_true(says(g.engine, "mul touches memory (8 bytes"));
    assert_true(says(g.engine, "that unit 1 has dropped"));
    drop_graph(&g);
    g = make_graph(); /* refilled, and not restored */
    refill(g.full);
    assert_int_equal(ms_backward(g.engine, &g.loss, NULL, 1, false), MS_ERROR_STATE);
    assert_true(says(g.engine, "nothing has written since its refill"));
    drop_graph(&g);
}

static void a_step_between_forward_and_backward_is_noticed(void **state)
{
    (void)state;
    graph g = make_graph();
    bool recording = ms_engine_set_recording(g.engine, false);
    OK(multiply_in_place(g.engine, g.shard, g.shard));
    ms_engine_set_recording(g.engine, recording);
    refill(g.full);
    OK(ms_tensor_restore(g.full, g.shard));
    assert_int_equal(ms_backward(g.engine, &g.loss, NULL, 1, false), MS_ERROR_STATE);
    assert_true(says(g.engine, "backward: mul (at the engine) saved a tensor [2] f32 that was "
                               "written in place since, by mul (at the engine)"));
    drop_graph(&g);
}

/* A hook on y's gradient, which is complete before the product that saved the weight runs. */
static ms_status gather_on_gradient(void *user, ms_tensor *gradient, ms_tensor **replacement)
{
    const graph *g = user;
    (void)gradient;
    (void)replacement;
    ms_status status = ms_storage_refill(ms_tensor_storage(g->full), ms_engine_current(g->engine));
    return status ? status : ms_tensor_restore(g->full, g->shard);
}

static void a_hook_may_refill_while_backward_runs(void **state)
{
    (void)state;
    for (int stepped = 0; stepped < 2; stepped++) {
        graph g = make_graph();
        uint64_t id = 0;
        OK(ms_tensor_on_gradient(g.y, gather_on_gradient, &g, NULL, &id));
        bool recording = ms_engine_set_recording(g.engine, false);
        if (stepped) OK(multiply_in_place(g.engine, g.shard, g.shard));
        ms_engine_set_recording(g.engine, recording);
        assert_int_equal(ms_backward(g.engine, &g.loss, NULL, 1, false),
                         stepped ? MS_ERROR_STATE : MS_OK);
        if (stepped) assert_true(says(g.engine, "written in place since, by mul"));
        else assert_gradient(g.x, 10, 20);
        drop_graph(&g);
    }
}

/* z = y * x, written in place with a record, then dropped: its history does not come back with the
 * values of a source. */
static void a_recorded_write_in_place_is_not_undone_by_a_restore(void **state)
{
    (void)state;
    ms_engine *engine = make(NULL, true, 0);
    ms_tensor *x = NULL, *y = NULL, *square = NULL, *source = NULL, *loss = NULL, *twin = NULL;
    OK(vector(engine, 3, 4, true, &x));
    OK(vector(engine, 7, 8, false, &source));
    OK(apply(engine, &ms_op_mul, x, x, &y));
    OK(ms_tensor_alias(y, &twin));
    OK(ms_tensor_restore(twin, source));
    OK(multiply_in_place(engine, y, x)); /* y = source * x, recorded */
    OK(apply(engine, &ms_op_mul, y, y, &square));
    OK(total(engine, square, &loss));
    reshard(y);
    refill(y);
    OK(ms_tensor_restore(twin, source));
    assert_int_equal(ms_backward(engine, &loss, NULL, 1, false), MS_ERROR_STATE);
    assert_true(says(engine, "written in place since, by copy"));
    ms_tensor *other = NULL;
    assert_int_equal(apply(engine, &ms_op_mul, twin, x, &other), MS_ERROR_STATE);
    assert_true(says(engine, "its gradient knows nothing of that write"));
    ms_tensor *all[] = { x, y, square, source, loss, twin };
    release_all(engine, all, 6);
}

/* --------------------------------------------------------------------- casts */

/* full [4, 4] (a leaf), restored from shard; y = linear(x, full) under autocast to bf16. */
typedef struct layer {
    ms_engine *engine;
    ms_tensor *x, *full, *shard, *y, *loss;
} layer;

static ms_status square_of(ms_engine *engine, float start, bool leaf, ms_tensor **out)
{
    static const int64_t shape[] = { 4, 4 };
    float values[16];
    for (int i = 0; i < 16; i++) values[i] = start + 0.125f * (float)i;
    ms_status status = ms_tensor_new(engine, MS_F32, 2, shape, out);
    if (!status) status = ms_tensor_write(*out, values, sizeof values);
    if (!status && leaf) status = ms_tensor_set_requires_grad(*out, true);
    return status;
}

static layer make_layer(void)
{
    layer l = { .engine = make(NULL, true, 0) };
    ms_engine_set_autocast(l.engine, MS_BF16);
    OK(square_of(l.engine, 1, true, &l.x));
    OK(square_of(l.engine, 0, true, &l.full));
    OK(square_of(l.engine, -1, false, &l.shard));
    OK(ms_tensor_restore(l.full, l.shard));
    OK(apply(l.engine, &ms_op_linear, l.x, l.full, &l.y));
    OK(total(l.engine, l.y, &l.loss));
    return l;
}

static void drop_layer(layer *l)
{
    ms_tensor *all[] = { l->x, l->full, l->shard, l->y, l->loss };
    release_all(l->engine, all, 5);
}

static void expected_gradient(float *out)
{
    layer l = make_layer();
    OK(ms_backward(l.engine, &l.loss, NULL, 1, false));
    OK(ms_tensor_read(ms_tensor_grad(l.x), out, 16 * sizeof *out));
    drop_layer(&l);
}

static void casts_are_dropped_with_their_weight_and_made_again(void **state)
{
    (void)state;
    float want[16], got[16];
    expected_gradient(want);
    /* The cast is held by the cache and the tape, or by the tape alone. */
    for (int cached = 0; cached < 2; cached++) {
        layer l = make_layer();
        ms_storage *cast = l.full->cast->storage;
        if (!cached) ms_engine_drop_casts(l.engine);
        uint64_t live = ms_engine_memory(l.engine).live;
        reshard(l.full);
        assert_true(ms_storage_is_dropped(cast));
        assert_int_equal(ms_engine_memory(l.engine).live, live - 16 * 4 - 16 * 2);
        assert_int_equal(ms_backward(l.engine, &l.loss, NULL, 1, true), MS_ERROR_STATE);
        assert_true(says(l.engine, "cast touches memory"));
        refill(l.full);
        OK(ms_tensor_restore(l.full, l.shard));
        assert_true(ms_storage_is_dropped(cast)); /* until it is needed */
        OK(ms_backward(l.engine, &l.loss, NULL, 1, true));
        assert_false(ms_storage_is_dropped(cast));
        OK(ms_tensor_read(ms_tensor_grad(l.x), got, sizeof got));
        assert_memory_equal(got, want, sizeof want);
        drop_layer(&l);
    }
}

static void a_cached_cast_serves_the_next_forward_after_a_refill(void **state)
{
    (void)state;
    layer l = make_layer();
    ms_tensor *cast = l.full->cast, *again = NULL;
    uint16_t want[16], got[16]; /* bf16 */
    OK(ms_tensor_read(l.y, want, sizeof want));
    reshard(l.full);
    assert_int_equal(apply(l.engine, &ms_op_linear, l.x, l.full, &again), MS_ERROR_STATE);
    assert_true(says(l.engine, "that unit 1 has dropped"));
    refill(l.full);
    OK(ms_tensor_restore(l.full, l.shard));
    OK(apply(l.engine, &ms_op_linear, l.x, l.full, &again));
    assert_ptr_equal(l.full->cast, cast);
    OK(ms_tensor_read(again, got, sizeof got));
    assert_memory_equal(got, want, sizeof want);
    ms_tensor_release(again);
    /* After a step there is a new cast, and the old one is the tape's alone. */
    again = NULL;
    reshard(l.full);
    OK(multiply_in_place(l.engine, l.shard, l.shard));
    refill(l.full);
    OK(ms_tensor_restore(l.full, l.shard));
    OK(apply(l.engine, &ms_op_linear, l.x, l.full, &again));
    OK(ms_tensor_read(again, got, sizeof got));
    assert_memory_not_equal(got, want, sizeof want);
    assert_int_equal(ms_backward(l.engine, &l.loss, NULL, 1, false), MS_ERROR_STATE);
    assert_true(says(l.engine, "saved a tensor [4, 4] bf16 that was written in place since, by "
                               "mul"));
    ms_tensor_release(again);
    drop_layer(&l);
}

static void a_cast_outlives_its_weight(void **state)
{
    (void)state;
    float want[16], got[16];
    expected_gradient(want);
    layer l = make_layer();
    ms_tensor *x_grad = NULL;
    ms_storage *weight = ms_tensor_storage(l.full);
    /* The tape's leaf goes, too, when nothing needs its gradient. */
    ms_tensor_release(l.y);
    ms_tensor_release(l.loss);
    ms_tensor *frozen = NULL;
    OK(ms_tensor_alias(l.full, &frozen));
    OK(apply(l.engine, &ms_op_linear, l.x, frozen, &l.y));
    OK(total(l.engine, l.y, &l.loss));
    ms_tensor_release(frozen);
    assert_ptr_equal(ms_tensor_storage(l.full), weight);
    ms_tensor_release(l.full);
    l.full = NULL;
    OK(ms_backward(l.engine, &l.loss, NULL, 1, false));
    x_grad = ms_tensor_grad(l.x);
    OK(ms_tensor_read(x_grad, got, sizeof got));
    assert_memory_equal(got, want, sizeof want);
    drop_layer(&l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dropped_memory_is_another_storage_s),
        cmocka_unit_test(dropping_or_refilling_twice_is_an_error_that_changes_nothing),
        cmocka_unit_test(a_refill_without_room_leaves_the_storage_dropped),
        cmocka_unit_test(a_dropped_block_is_handed_over_in_stream_order),
        cmocka_unit_test(strict_mode_finds_a_missing_wait_for_the_block_s_former_user),
        cmocka_unit_test(a_refill_forgets_the_users_of_the_old_memory),
        cmocka_unit_test(a_room_stays_where_it_is),
        cmocka_unit_test(a_room_that_nobody_uses_may_be_freed),
        cmocka_unit_test(a_room_is_handed_over_in_stream_order),
        cmocka_unit_test(dropping_and_refilling_on_another_stream_does_not_grow_the_pool),
        cmocka_unit_test(a_checked_engine_passes_over_what_is_dropped),
        cmocka_unit_test(what_touches_a_dropped_storage_names_its_owner),
        cmocka_unit_test(what_was_refilled_cannot_be_read_before_it_is_written),
        cmocka_unit_test(a_storage_on_meta_takes_memory_when_it_is_refilled),
        cmocka_unit_test(a_restore_keeps_the_version_while_its_source_is_unchanged),
        cmocka_unit_test(each_leaf_of_a_flat_storage_is_restored_for_itself),
        cmocka_unit_test(backward_reads_what_was_restored),
        cmocka_unit_test(backward_without_a_refill_names_the_owner),
        cmocka_unit_test(a_step_between_forward_and_backward_is_noticed),
        cmocka_unit_test(a_hook_may_refill_while_backward_runs),
        cmocka_unit_test(a_recorded_write_in_place_is_not_undone_by_a_restore),
        cmocka_unit_test(casts_are_dropped_with_their_weight_and_made_again),
        cmocka_unit_test(a_cached_cast_serves_the_next_forward_after_a_refill),
        cmocka_unit_test(a_cast_outlives_its_weight),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
