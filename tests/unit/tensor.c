/* tensor.c: records about tensors: the cells of a split storage, and casts that are kept for a
 * step. ctest: late cuda */
#include "gate.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "late_device.h"
#include "moonshard/tensor.h"
#include "tensor/state.h"

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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_split_storage_knows_the_cells_of_windows_made_before),
        cmocka_unit_test(a_kept_cast_that_was_never_written_is_made_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
