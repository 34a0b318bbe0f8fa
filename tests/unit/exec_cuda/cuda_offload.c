/* cuda_offload.c: what is offloaded from a GPU's memory, over the stand-in for NVIDIA's driver. */
#include "cuda_support.h"

#include <string.h>

static ms_storage *offloaded(ms_stream *stream, size_t bytes)
{
    ms_storage *storage = NULL;
    assert_int_equal(ms_storage_new_offloaded(stream, bytes, &storage), MS_OK);
    return storage;
}

/* It is pinned memory of the host, which the driver knows in pieces of 32 MiB. Tasks and copies go
 * over the ends of pieces. */
static void what_is_offloaded_is_in_memory_of_the_host(void **state)
{
    (void)state;
    enum { FLOATS = 10 << 20 };
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    float *values = malloc(FLOATS * sizeof *values), *found = malloc(FLOATS * sizeof *found);
    ms_storage *here = storage_of(a, FLOATS * sizeof *values);
    assert_true(values && found);
    unsigned created = calls("cuMemCreate"), allocated = calls("cuMemAlloc_v2");
    ms_storage *first = offloaded(a, FLOATS * sizeof *values),
               *second = offloaded(a, FLOATS * sizeof *values);
    assert_int_equal(calls("cuMemCreate"), created);
    assert_int_equal(calls("cuMemAlloc_v2"), allocated);
    assert_int_equal(calls("cuMemHostRegister_v2"), 3);
    ms_memory memory = ms_engine_memory(engine);
    assert_int_equal(memory.live, FLOATS * sizeof *values);
    assert_int_equal(memory.offload_live, 2 * FLOATS * sizeof *values);
    for (int i = 0; i < FLOATS; i++) values[i] = (float)(i % 1000);
    for (int turn = 0; turn < 3; turn++) {
        assert_int_equal(ms_stream_copy_in(a, first, 0, values, FLOATS * sizeof *values, NULL),
                         MS_OK);
        run(a, &scales, second, first, 2, (float)turn);
        run(a, &scales, here, second, 1, 0);
        run(side_of(engine), &scales, first, here, 1, 0);
        assert_int_equal(ms_storage_read(first, 0, found, FLOATS * sizeof *found), MS_OK);
        for (int i = 0; i < FLOATS; i++)
            if (found[i] != 2 * values[i] + (float)turn) fail_msg("%d: %g", i, found[i]);
    }
    ms_storage_release(first);
    ms_storage_release(second);
    ms_storage_release(here);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
    free(values);
    free(found);
}

/* The GPU's memory is full, and the host's is not. */
static void offloading_has_the_memory_of_the_machine(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *a = ms_engine_current(engine);
    ms_engine_options small = { .own_device = &ms_device_cuda,
                                .threads = 1,
                                .memory_bytes = 1 << 20 };
    ms_engine *limited = NULL;
    assert_int_equal(ms_engine_new(&small, NULL, &limited), MS_OK);
    ms_storage *large = offloaded(ms_engine_current(limited), 8 << 20);
    ms_storage_release(large);
    ms_engine_free(limited);
    /* Where the driver cannot register more. */
    ms_storage *refused = NULL;
    fails("cuMemHostRegister_v2", 2);
    assert_int_equal(ms_storage_new_offloaded(a, 1000, &refused), MS_ERROR_MEMORY);
    assert_non_null(strstr(ms_engine_context(engine)->error.message,
                           "no memory of the host for 1000 bytes that are offloaded: "));
    ms_storage_release(offloaded(a, 1000));
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
    setenv("MOONSHARD_STAND_IN_WITHOUT", "host addresses", 1);
    engine = make_engine();
    assert_int_equal(ms_storage_new_offloaded(ms_engine_current(engine), 1000, &refused),
                     MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_context(engine)->error.message, "leave offload out"));
    unsetenv("MOONSHARD_STAND_IN_WITHOUT");
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_offloaded_is_in_memory_of_the_host),
        cmocka_unit_test(offloading_has_the_memory_of_the_machine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
