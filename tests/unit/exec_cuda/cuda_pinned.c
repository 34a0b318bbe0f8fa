/* cuda_pinned.c: pinned memory of the host on the cuda device, over the stand-in for NVIDIA's
 * driver: what is freed serves the next user, and reads go by way of it. */
#include "cuda_support.h"

#include <string.h>

#include "moonshard/tensor.h"

#define MIB ((size_t)1 << 20)

static void ok(ms_status status) { assert_int_equal(status, MS_OK); }
static void *pinned_of(ms_engine *engine, size_t bytes)
{
    void *memory = NULL;
    ok(ms_host_memory_new(engine, bytes, "a test", &memory));
    assert_int_equal((uintptr_t)memory % 64, 0);
    return memory;
}
/* Calls of the driver that take pinned memory or give it back. */
static unsigned taken(void) { return calls("cuMemHostAlloc"); }
static unsigned given(void) { return calls("cuMemFreeHost"); }
static void finish(ms_engine *engine)
{
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* A loop that writes batches of two sizes in each step, and reads a number of the step before. The
 * stand-in copies as late as it may, so memory that is used again too early gives other numbers. */
static void steps_take_memory_only_at_first(void **state)
{
    (void)state;
    static const int64_t counts[2] = { 5000, 333 };
    ms_engine *engine = make_engine();
    ms_tensor *batches[2];
    ms_readback *before = NULL;
    unsigned calls_before = 0;
    for (int b = 0; b < 2; b++) ok(ms_tensor_new(engine, MS_F32, 1, &counts[b], &batches[b]));
    for (int step = 0; step < 24; step++) {
        ms_readback *now = NULL;
        if (step == 4) calls_before = taken() + given();
        for (int b = 0; b < 2; b++) {
            float values[5000];
            for (int64_t i = 0; i < counts[b]; i++) values[i] = (float)(10 * step + b);
            ok(ms_tensor_write(batches[b], values, (size_t)counts[b] * sizeof *values));
        }
        ok(ms_tensor_readback(batches[step % 2], &now));
        if (before) {
            double number = 0;
            ok(ms_readback_number(before, &number));
            assert_true(number == 10 * (step - 1) + (step - 1) % 2);
        }
        ms_readback_free(before);
        before = now;
        ok(ms_engine_step_end(engine, 1));
    }
    assert_int_equal(taken() + given(), calls_before);
    ms_readback_free(before);
    for (int b = 0; b < 2; b++) ms_tensor_release(batches[b]);
    finish(engine);
}

/* The whole of it is pinned, whoever had it before. */
static void use(ms_engine *engine, ms_storage *storage, size_t bytes)
{
    ms_stream *on = ms_engine_current(engine);
    unsigned pageable = calls("a copy to pageable memory");
    void *memory = pinned_of(engine, bytes);
    ok(ms_stream_copy_out(on, storage, 0, memory, bytes, NULL));
    ok(ms_stream_sync(on));
    assert_int_equal(calls("a copy to pageable memory"), pageable);
    ms_host_memory_free(engine, memory);
}

/* A request gets memory of a size that is little above its own. */
static void sizes_are_kept_apart(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_storage *storage = storage_of(ms_engine_current(engine), 40 * MIB);
    unsigned before = taken(), made = 0;
    size_t count = 0;
    for (int round = 0; round < 2; round++) {
        count = 0;
        for (size_t bytes = 1; bytes < 40 * MIB; bytes += bytes / 10 + 1, count++)
            use(engine, storage, bytes);
        if (round == 0) made = taken() - before;
    }
    assert_int_equal(taken() - before, made);
    assert_true(made > 4 * 15 && made < count);
    ms_storage_release(storage);
    finish(engine);
}

static void little_is_kept(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    unsigned before = given();
    /* More than may be kept goes back at once. */
    ms_host_memory_free(engine, pinned_of(engine, 600 * MIB));
    assert_int_equal(given() - before, 1);
    void *one = pinned_of(engine, 300 * MIB), *other = pinned_of(engine, 301 * MIB),
         *small = pinned_of(engine, 40);
    ms_host_memory_free(engine, small);
    ms_host_memory_free(engine, one);
    assert_int_equal(given() - before, 1);
    /* Both are too much: what was kept goes back. */
    ms_host_memory_free(engine, other);
    assert_int_equal(given() - before, 3);
    assert_ptr_equal(pinned_of(engine, 301 * MIB), other);
    ms_host_memory_free(engine, other);
    finish(engine);
    assert_int_equal(given() - before, 4);
}

/* What is kept goes back before a request fails. */
static void a_machine_without_room_gets_it_back(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    void *memory = NULL;
    unsigned before = given();
    ms_host_memory_free(engine, pinned_of(engine, 1000));
    ms_host_memory_free(engine, pinned_of(engine, 100));
    fails("cuMemHostAlloc", 2);
    ms_host_memory_free(engine, pinned_of(engine, 5000));
    assert_int_equal(given() - before, 2);
    /* With nothing kept it fails. */
    memory = pinned_of(engine, 5000);
    fails("cuMemHostAlloc", 2);
    void *none = NULL;
    assert_int_equal(ms_host_memory_new(engine, 100, "a test", &none), MS_ERROR_MEMORY);
    assert_non_null(strstr(ms_engine_error(engine)->message, "no host memory for 100 bytes"));
    assert_int_equal(ms_host_memory_new(engine, SIZE_MAX, "a test", &none), MS_ERROR_MEMORY);
    assert_null(none);
    ms_host_memory_free(engine, memory);
    finish(engine);
}

/* ---------------------------------------------------------------------- reads */

static void assert_read(ms_engine *engine, size_t count)
{
    ms_stream *on = ms_engine_current(engine);
    size_t bytes = count * sizeof(uint32_t);
    ms_storage *storage = storage_of(on, bytes);
    uint32_t *values = pinned_of(engine, bytes), *found = malloc(bytes + sizeof *found);
    assert_non_null(found);
    for (size_t i = 0; i < count; i++) values[i] = (uint32_t)i * 2654435761u;
    memset(found, 0, bytes);
    found[count] = 12345;
    ok(ms_stream_copy_in(on, storage, 0, values, bytes, NULL));
    ok(ms_storage_read(storage, 0, found, bytes));
    assert_memory_equal(found, values, bytes);
    assert_int_equal(found[count], 12345);
    /* From within. */
    ok(ms_storage_read(storage, bytes - sizeof *found, found, sizeof *found));
    assert_int_equal(found[0], values[count - 1]);
    ms_host_memory_free(engine, values);
    ms_storage_release(storage);
    free(found);
}

/* The driver writes no memory that is not pinned, and reads of one size take memory once. */
static void reads_go_by_way_of_pinned_memory(void **state)
{
    (void)state;
    static const size_t counts[] = { 1, 100, MIB - 1, MIB, MIB + 1, 2 * MIB, 5 * MIB / 2, 3 * MIB };
    ms_engine *engine = make_engine();
    unsigned pageable = calls("a copy to pageable memory");
    for (int round = 0; round < 2; round++) {
        unsigned before = taken();
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) assert_read(engine, counts[i]);
        if (round == 1) assert_int_equal(taken(), before);
    }
    assert_int_equal(calls("a copy to pageable memory"), pageable);
    /* Where there is none, they go on without it. */
    ms_storage *storage = storage_of(ms_engine_current(engine), 40000);
    float none[10000] = { 0 }, value = 1;
    ok(ms_stream_copy_in(ms_engine_current(engine), storage, 0, none, sizeof none, NULL));
    ok(ms_engine_sync(engine));
    fails("cuMemHostAlloc", 1);
    ok(ms_storage_read(storage, 0, none, 35000));
    ok(ms_storage_read(storage, 0, &value, sizeof value));
    assert_true(value == 0);
    assert_int_equal(calls("a copy to pageable memory"), pageable + 1);
    ms_storage_release(storage);
    finish(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_take_memory_only_at_first),
        cmocka_unit_test(sizes_are_kept_apart),
        cmocka_unit_test(little_is_kept),
        cmocka_unit_test(a_machine_without_room_gets_it_back),
        cmocka_unit_test(reads_go_by_way_of_pinned_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
