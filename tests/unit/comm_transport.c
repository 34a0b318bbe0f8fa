/* comm_transport.c: what a membership asks of its transport: a stand-in whose collectives are
 * launched, and fail later. */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#include "comm/control.h"
#include "comm/transport.h"

static struct stand_in {
    int enrolled, ended, closed;
    ms_status error;
} seen;

static ms_status enroll(ms_comm *comm, ms_storage *storage)
{
    (void)comm, (void)storage;
    seen.enrolled++;
    return seen.error;
}

static ms_status poll_error(ms_comm *comm)
{
    if (!seen.error) return MS_OK;
    return ms_engine_fail(comm->engine, seen.error, "the network is down");
}

static void end_launched(ms_comm *comm)
{
    (void)comm;
    seen.ended++;
}

static void close_stand_in(ms_comm *comm)
{
    (void)comm;
    seen.closed++;
}

static ms_transport stand_in(void)
{
    ms_transport made = ms_transport_fake;
    made.name = "stand-in";
    made.kinds = 1u << MS_ALL_REDUCE;
    made.dtypes = 1u << MS_F32;
    made.enroll = enroll;
    made.poll_error = poll_error;
    made.abort = end_launched;
    made.close = close_stand_in;
    return made;
}

static ms_engine *open_world(const ms_transport *transport, ms_group **world)
{
    ms_engine_options options = { .threads = 1, .strict = true };
    ms_engine *engine = NULL;
    memset(&seen, 0, sizeof seen);
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    assert_int_equal(ms_comm_new(engine, &ms_control_none, transport, 0, 2, world), MS_OK);
    return engine;
}

static void what_a_transport_does_not_move_is_refused(void **state)
{
    (void)state;
    ms_transport transport = stand_in();
    ms_group *world = NULL;
    ms_engine *engine = open_world(&transport, &world);
    ms_tensor *floats = NULL, *integers = NULL;
    int64_t four = 4;
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &four, &floats), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_I32, 1, &four, &integers), MS_OK);
    ms_collective call = { .kind = MS_ALL_REDUCE, .in = floats, .bucket = -1 };
    assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_OK);
    call.in = integers;
    assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "stand-in does not move i32"));
    call = (ms_collective){ .kind = MS_BROADCAST, .in = floats, .bucket = -1 };
    assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "broadcast: stand-in cannot"));
    assert_int_equal(ms_group_traffic(world, MS_COLLECTIVES).calls, 1);
    ms_tensor_release(floats);
    ms_tensor_release(integers);
    ms_engine_free(engine);
    assert_int_equal(seen.closed, 1);
}

static void storages_are_enrolled(void **state)
{
    (void)state;
    ms_transport transport = stand_in();
    ms_group *world = NULL;
    ms_engine *engine = open_world(&transport, &world);
    ms_storage *storage = NULL;
    assert_int_equal(ms_group_storage(world, ms_engine_current(engine), 64, &storage), MS_OK);
    assert_int_equal(seen.enrolled, 1);
    ms_storage_release(storage);
    seen.error = MS_ERROR_MEMORY;
    storage = NULL;
    assert_int_equal(ms_group_storage(world, ms_engine_current(engine), 64, &storage),
                     MS_ERROR_MEMORY);
    assert_null(storage);
    assert_int_equal(ms_engine_memory(engine).live, 0);
    ms_engine_free(engine);
}

/* The next call says so, and so does a mere look; the transport ends what it has launched once. */
static void an_error_after_the_launch_ends_the_job(void **state)
{
    (void)state;
    ms_transport transport = stand_in();
    ms_group *world = NULL;
    ms_engine *engine = open_world(&transport, &world);
    ms_tensor *t = NULL;
    int64_t four = 4;
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &four, &t), MS_OK);
    ms_collective call = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 };
    assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_OK);
    assert_int_equal(ms_comm_check(engine), MS_OK);
    seen.error = MS_ERROR_IO;
    assert_int_equal(ms_comm_check(engine), MS_ERROR_IO);
    assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_ERROR_IO);
    assert_string_equal(ms_engine_error(engine)->message, "the network is down");
    assert_int_equal(seen.ended, 1);
    assert_int_equal(ms_group_traffic(world, MS_COLLECTIVES).calls, 1);
    ms_tensor_release(t);
    ms_engine_free(engine);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_transport_does_not_move_is_refused),
        cmocka_unit_test(storages_are_enrolled),
        cmocka_unit_test(an_error_after_the_launch_ends_the_job),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
