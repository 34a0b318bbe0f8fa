/* tensor.c: records about tensors: the cells of a split storage, casts that are kept for a step,
 * and hashes. ctest: late cuda */
#include "gate.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "late_device.h"
#include "moonshard/tensor.h"
#include "ops/autocast.h"

#define OK(call) assert_int_equal(call, MS_OK)

static ms_engine *make_engine(void)
{
    ms_engine_options options = { .own_device = late_device(NULL), .threads = 1 };
    ms_engine *engine = NULL;
    OK(ms_engine_new(&options, NULL, &engine));
    return engine;
}

/* Windows may be made before the storage is split, as for a bucket whose parameters are laid out
 * first. */
static void a_split_storage_knows_the_cells_of_windows_made_before(void **state)
{
    (void)state;
    ms_engine *engine = make_engine();
    ms_stream *side = NULL, *compute = ms_engine_current(engine);
    ms_tensor *whole = NULL, *second = NULL;
    ms_point writers[MS_STREAMS_MAX];
    const float values[] = { 1, 2, 3, 4 };
    OK(ms_engine_stream(engine, "side", &side));
    OK(ms_tensor_new(engine, MS_F32, 1, (int64_t[]){ 8 }, &whole));
    OK(ms_tensor_window(whole, 1, (int64_t[]){ 4 }, (int64_t[]){ 1 }, 4, &second));
    ms_storage *storage = ms_tensor_storage(whole);
    OK(ms_storage_split(storage, (size_t[]){ 16, 32 }, 2));
    ms_engine_set_current(engine, side);
    OK(ms_tensor_write(second, values, sizeof values));
    ms_engine_set_current(engine, compute);
    assert_int_equal(ms_storage_writers(storage, 0, 16, writers), 0);
    assert_int_equal(ms_storage_writers(storage, 16, 32, writers), 1);
    assert_int_equal(writers[0].stream, ms_stream_index(side));
    const float all[] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    OK(ms_tensor_write(whole, all, sizeof all));
    assert_int_equal(ms_storage_writers(storage, 0, 32, writers), 1);
    assert_int_equal(writers[0].stream, ms_stream_index(compute));
    ms_tensor_release(second);
    ms_tensor_release(whole);
    ms_engine_free(engine);
}

/* The weight itself is whole, so it must be usable when the error has been reported. */
static void a_kept_cast_that_was_never_written_is_made_again(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    ms_engine *engine = make_engine();
    ms_tensor *weight = NULL, *cast = NULL;
    _Atomic int open = 0;
    const float values[] = { 1, 2 };
    uint16_t got[2];
    OK(ms_tensor_new(engine, MS_F32, 1, (int64_t[]){ 2 }, &weight));
    OK(ms_tensor_write(weight, values, sizeof values));
    OK(ms_stream_enqueue(ms_engine_current(engine), &bad_task, &(gate_args){ &open }, NULL, 0,
                         (ms_task_cost){ 0 }, NULL));
    OK(ms_tensor_cast_cached(engine, weight, MS_BF16, true, &cast));
    ms_tensor_release(cast);
    atomic_store(&open, 1);
    assert_int_equal(ms_engine_sync(engine), MS_ERROR_ARGUMENT);
    OK(ms_tensor_cast_cached(engine, weight, MS_BF16, true, &cast));
    OK(ms_tensor_read(cast, got, sizeof got));
    assert_true(ms_float_from_bf16(got[0]) == 1 && ms_float_from_bf16(got[1]) == 2);
    ms_tensor_release(cast);
    ms_tensor_release(weight);
    ms_engine_free(engine);
}

/* Hashes, and the bytes that come with them, are those of a read: of whole tensors, of parts, and
 * of transposed ones, which are not in order in memory. */
static void hashes_are_those_of_what_a_read_gives(void **state)
{
    (void)state;
    enum { BLOCK = 1 << 20, LENGTH = 5 << 17, BLOCKS = 3 };
    static const int64_t counts[] = { 0, 1, 16383, 16384, 16385, 1 << 18, LENGTH - 2 };
    ms_engine *engine = make_engine();
    ms_tensor *whole = NULL;
    float *values = malloc(LENGTH * sizeof *values), *expected = malloc(LENGTH * sizeof *values),
          *got = malloc(LENGTH * sizeof *values);
    uint64_t hashes[1 + BLOCKS], alone;
    assert_true(values && expected && got);
    for (int i = 0; i < LENGTH; i++) values[i] = (float)(i * 3 % 100003);
    OK(ms_tensor_new(engine, MS_F32, 1, (int64_t[]){ LENGTH }, &whole));
    for (size_t c = 0; c < 2 * (sizeof counts / sizeof *counts); c++) {
        ms_tensor *part = NULL;
        int64_t count = counts[c / 2], rows = c % 2 ? count / 2 : count, columns = c % 2 ? 2 : 1;
        size_t bytes = (size_t)(rows * columns) * sizeof *values;
        OK(ms_tensor_window(whole, 2, (int64_t[]){ columns, rows }, (int64_t[]){ 1, columns }, 1,
                            &part));
        OK(ms_tensor_write(whole, values, LENGTH * sizeof *values)); /* not awaited */
        memset(hashes, 0, sizeof hashes);
        memset(got, 0, LENGTH * sizeof *values);
        OK(ms_tensor_hash(part, NULL, 0, &alone));
        OK(ms_tensor_hash(part, got, BLOCK, hashes));
        if (bytes) OK(ms_tensor_read(part, expected, bytes));
        assert_memory_equal(got, expected, bytes);
        assert_true(alone == ms_hash(expected, bytes, 0) && hashes[0] == alone);
        size_t blocks = (bytes + BLOCK - 1) / BLOCK;
        for (size_t b = 0; b < blocks; b++) {
            size_t left = bytes - b * BLOCK;
            assert_true(hashes[1 + b]
                        == ms_hash((char *)expected + b * BLOCK, left < BLOCK ? left : BLOCK, 0));
        }
        for (size_t b = blocks; b < BLOCKS; b++) assert_true(hashes[1 + b] == 0);
        OK(ms_tensor_hash(part, NULL, BLOCK, hashes)); /* in place, or through a block */
        assert_true(hashes[0] == alone);
        values[c] += 1;
        ms_tensor_release(part);
    }
    free(values);
    free(expected);
    free(got);
    ms_tensor_release(whole);
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_split_storage_knows_the_cells_of_windows_made_before),
        cmocka_unit_test(a_kept_cast_that_was_never_written_is_made_again),
        cmocka_unit_test(hashes_are_those_of_what_a_read_gives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
