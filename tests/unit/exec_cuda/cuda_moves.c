/* cuda_moves.c: the pieces in which a pool takes a GPU's memory, and what becomes of them when free
 * memory gets other addresses, over the stand-in for NVIDIA's driver. */
#include "cuda_support.h"

#include <stdio.h>
#include <string.h>

/* CANARY: bytes that builds with canaries add to each block, after its storage. */
enum { MIB = 1 << 20, COUNT = 16, CANARY = MS_CANARY ? MS_CELLS_MAX : 0 };

static ms_engine *limited_to(uint64_t memory_bytes)
{
    ms_engine_options options = { .own_device = &ms_device_cuda,
                                  .threads = 1,
                                  .memory_bytes = memory_bytes };
    ms_engine *engine = NULL;
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

/* Large memory is taken in large pieces. A limit that is small gets small ones. */
static void pieces_go_with_the_limit(void **state)
{
    (void)state;
    static const struct {
        uint64_t limit;
        unsigned pieces;
    } cases[] = { { (uint64_t)64 << 30, 2 }, { (uint64_t)8 << 30, 4 }, { (uint64_t)1 << 30, 32 } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ms_engine *engine = limited_to(cases[i].limit);
        ms_storage *storages[32];
        unsigned before = calls("cuMemCreate");
        for (int k = 0; k < 32; k++)
            storages[k] = storage_of(ms_engine_current(engine), 32 * MIB - CANARY);
        assert_int_equal(calls("cuMemCreate") - before, cases[i].pieces);
        for (int k = 0; k < 32; k++) ms_storage_release(storages[k]);
        ms_engine_free(engine);
        assert_int_equal(left(), 0);
    }
}

/* A GPU that has no large piece left may still have a small one. */
static void a_small_piece_does_where_there_is_no_large_one(void **state)
{
    (void)state;
    ms_engine *engine = limited_to((uint64_t)64 << 30);
    ms_stream *stream = ms_engine_current(engine);
    ms_storage *storage = NULL;
    fails("cuMemCreate", 2);
    storage = storage_of(stream, 3 * MIB);
    float value = 3, found = 0;
    assert_int_equal(ms_stream_copy_in(stream, storage, 3 * MIB - 4, &value, 4, NULL), MS_OK);
    assert_int_equal(ms_storage_read(storage, 3 * MIB - 4, &found, 4), MS_OK);
    assert_true(found == 3);
    ms_storage_release(storage);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* Blocks of 4 MiB in pieces of 32 MiB, of which every second one is free. */
static ms_engine *fragmented(ms_storage *slots[COUNT])
{
    ms_engine *engine = limited_to(COUNT * 4 * MIB);
    ms_stream *stream = ms_engine_current(engine);
    for (int i = 0; i < COUNT; i++) {
        float value = (float)i;
        slots[i] = storage_of(stream, 4 * MIB - CANARY);
        assert_int_equal(ms_stream_copy_in(stream, slots[i], 0, &value, 4, NULL), MS_OK);
        assert_int_equal(ms_stream_copy_in(stream, slots[i], 3 * MIB, &value, 4, NULL), MS_OK);
    }
    for (int i = 0; i < COUNT; i += 2) ms_storage_release(slots[i]);
    return engine;
}

static void assert_values(ms_storage *const slots[COUNT])
{
    for (int i = 1; i < COUNT; i += 2) {
        float found[2] = { -1, -1 };
        assert_int_equal(ms_storage_read(slots[i], 0, &found[0], 4), MS_OK);
        assert_int_equal(ms_storage_read(slots[i], 3 * MIB, &found[1], 4), MS_OK);
        assert_true(found[0] == (float)i && found[1] == (float)i);
    }
}

/* What a call refuses before anything has changed is an error, and nothing is lost. */
static void a_move_that_is_refused_loses_nothing(void **state)
{
    (void)state;
    static const char *const refused[] = { "cuMemCreate", "cuMemAddressReserve", "cuMemMap",
                                           "cuMemSetAccess", "cuMemcpyDtoDAsync_v2" };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        ms_storage *slots[COUNT], *large = NULL;
        ms_engine *engine = fragmented(slots);
        ms_stream *stream = ms_engine_current(engine);
        fails(refused[i], 2);
        assert_int_equal(ms_storage_new(stream, 24 * MIB - CANARY, &large), MS_ERROR_MEMORY);
        assert_non_null(strstr(ms_engine_error(engine)->message, "kept by the pool"));
        assert_int_equal(ms_engine_memory(engine).moved, 0);
        assert_values(slots);
        large = storage_of(stream, 24 * MIB - CANARY);
        assert_int_equal(ms_engine_memory(engine).reserved, COUNT * 4 * MIB);
        assert_values(slots);
        ms_storage_release(large);
        for (int k = 1; k < COUNT; k += 2) ms_storage_release(slots[k]);
        ms_engine_free(engine);
        assert_int_equal(left(), 0);
    }
}

/* Memory that has lost its values is not read: all streams fail. */
static void values_that_are_lost_are_an_error(void **state)
{
    (void)state;
    ms_storage *slots[COUNT], *large = NULL;
    ms_engine *engine = fragmented(slots);
    ms_stream *stream = ms_engine_current(engine);
    char call[32];
    /* The free block begins a piece: one map to copy the rest of that, then one to stay. */
    snprintf(call, sizeof call, "cuMemMap:%u", calls("cuMemMap") + 2);
    setenv("MOONSHARD_STAND_IN_FAIL", call, 1);
    assert_int_equal(ms_storage_new(stream, 24 * MIB - CANARY, &large), MS_ERROR_MEMORY);
    unsetenv("MOONSHARD_STAND_IN_FAIL");
    assert_int_not_equal(ms_stream_sync(stream), MS_OK);
    assert_non_null(strstr(ms_engine_error(engine)->message, "memory that keeps its address"));
    float found = 0;
    for (int k = 1; k < COUNT; k += 2)
        assert_int_not_equal(ms_storage_read(slots[k], 0, &found, 4), MS_OK);
    for (int k = 1; k < COUNT; k += 2) ms_storage_release(slots[k]);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

/* Whole pieces get their new addresses as they are. */
static void a_whole_piece_is_not_copied(void **state)
{
    (void)state;
    ms_engine *engine = limited_to(256 * MIB);
    ms_stream *stream = ms_engine_current(engine);
    ms_storage *slots[8], *large = NULL;
    for (int i = 0; i < 8; i++) slots[i] = storage_of(stream, 32 * MIB - CANARY);
    for (int i = 0; i < 8; i += 2) ms_storage_release(slots[i]);
    unsigned created = calls("cuMemCreate"), copied = calls("cuMemcpyDtoDAsync_v2");
    large = storage_of(stream, 64 * MIB - CANARY);
    assert_int_equal(ms_engine_memory(engine).moved, 64 * MIB);
    assert_int_equal(calls("cuMemCreate"), created);
    assert_int_equal(calls("cuMemcpyDtoDAsync_v2"), copied);
    ms_storage_release(large);
    for (int i = 1; i < 8; i += 2) ms_storage_release(slots[i]);
    ms_engine_free(engine);
    assert_int_equal(left(), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_go_with_the_limit),
        cmocka_unit_test(a_small_piece_does_where_there_is_no_large_one),
        cmocka_unit_test(a_move_that_is_refused_loses_nothing),
        cmocka_unit_test(values_that_are_lost_are_an_error),
        cmocka_unit_test(a_whole_piece_is_not_copied),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
