/* comm_transport.c: the calls of a membership to its transport and its control: a test transport
 * whose collectives are launched and fail later; and ranks that meet in another way than on one
 * host. */
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>
#include <cmocka.h>

#include "comm/group.h"
#include "comm/rendezvous.h"
#include "comm/transport_table.h"

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
    made.dtypes = 1u << MS_F32 | 1u << MS_F16 | 1u << MS_BOOL;
    made.ops = 1u << MS_REDUCE_OP_SUM;
    made.reduced_dtypes = 1u << MS_F32 | 1u << MS_F16;
    made.rounds = false;
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
    ms_membership membership = { .control = &ms_control_none, .transport = transport, .size = 2 };
    assert_int_equal(ms_comm_new(engine, &membership, world), MS_OK);
    return engine;
}

/* Each error names the operation, the dtype and the transport, and nothing was claimed. */
static void what_a_transport_cannot_do_is_refused(void **state)
{
    (void)state;
    static const struct {
        ms_collective_kind kind;
        ms_dtype dtype, travels;
        ms_reduce_op op;
        const char *says;
    } cases[] = {
        { MS_ALL_REDUCE, MS_I32, MS_F32, MS_REDUCE_OP_SUM,
          "all_reduce of i32: the transport \"stand-in\" does not move i32" },
        { MS_BROADCAST, MS_F32, MS_F32, MS_REDUCE_OP_SUM,
          "broadcast: the transport \"stand-in\" has no such operation" },
        { MS_ALL_REDUCE, MS_F32, MS_F32, MS_REDUCE_OP_PROD,
          "all_reduce of f32 by prod: the transport \"stand-in\" does not reduce f32 by prod" },
        { MS_ALL_REDUCE, MS_BOOL, MS_F32, MS_REDUCE_OP_SUM,
          "all_reduce of bool by sum: the transport \"stand-in\" does not reduce bool by sum" },
        { MS_ALL_REDUCE, MS_F32, MS_F16, MS_REDUCE_OP_SUM,
          "all_reduce of f32 rounded to f16: the transport \"stand-in\" does not round" },
    };
    ms_transport transport = stand_in();
    ms_group *world = NULL;
    ms_engine *engine = open_world(&transport, &world);
    ms_tensor *floats = NULL;
    int64_t four = 4;
    assert_false(ms_group_rounds(world));
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &four, &floats), MS_OK);
    ms_collective call = { .kind = MS_ALL_REDUCE, .in = floats, .bucket = -1 };
    assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ms_tensor *t = NULL;
        assert_int_equal(ms_tensor_new(engine, cases[i].dtype, 1, &four, &t), MS_OK);
        call = (ms_collective){ .kind = cases[i].kind,
                                .op = cases[i].op,
                                .travels = cases[i].travels,
                                .in = t,
                                .bucket = -1 };
        assert_int_equal(ms_group_enqueue(world, 1, &call, NULL), MS_ERROR_UNSUPPORTED);
        assert_non_null(strstr(ms_engine_error(engine)->message, cases[i].says));
        ms_tensor_release(t);
    }
    assert_int_equal(ms_group_traffic(world, MS_COLLECTIVES).calls, 1);
    /* The exchange of numbers between hosts does not use the transport. */
    int64_t mine = 3, all[2] = { 0 };
    ms_sharing sharing = { .kind = MS_ALL_GATHER, .dtype = MS_I64, .count = 1 };
    assert_int_equal(ms_group_share(world, &sharing, &mine, all), MS_OK);
    assert_int_equal(all[1], 3);
    ms_tensor_release(floats);
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

/* The next call returns the error, and so does ms_comm_check; the transport is told once to end its
 * launched work. */
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

/* ---------------------------------------------- another way for ranks to meet */

/* A test implementation of control over several hosts and of its rendezvous, without the memory
 * files of one host. */
static struct meeting {
    ms_rendezvous base;
    ms_status opens; /* what its control answers */
    int opened, joined, closed, released;
    int32_t ended_by;
    char cause[64];
} meeting;

static ms_status open_control(ms_comm *comm, ms_rendezvous *rendezvous)
{
    struct meeting *m = (struct meeting *)rendezvous;
    if (m->opens) return ms_engine_fail(comm->engine, m->opens, "the place is taken");
    m->opened++;
    comm->control_state = m;
    return MS_OK;
}

static void joined_control(ms_comm *comm) { ((struct meeting *)comm->control_state)->joined++; }
static void close_control(ms_comm *comm) { ((struct meeting *)comm->control_state)->closed++; }
static void release_meeting(ms_rendezvous *rendezvous)
{
    ((struct meeting *)rendezvous)->released++;
}

static bool end_meeting(ms_rendezvous *rendezvous, ms_abort_reason reason, int32_t rank,
                        const char *message)
{
    struct meeting *m = (struct meeting *)rendezvous;
    (void)reason;
    m->ended_by = rank;
    strncpy(m->cause, message, sizeof m->cause - 1);
    return true;
}

static void rank_of_meeting(const ms_rendezvous *rendezvous, uint32_t rank, ms_rank_state *out)
{
    const struct meeting *m = (const struct meeting *)rendezvous;
    *out = (ms_rank_state){ .phase = m->joined ? MS_RANK_PRESENT : MS_RANK_ABSENT, .step = rank };
}

static ms_status fail_to_open(ms_comm *comm)
{
    return ms_engine_fail(comm->engine, MS_ERROR_IO, "no network card");
}

static ms_engine *engine_alone(void)
{
    ms_engine_options options = { .threads = 1, .strict = true };
    ms_engine *engine = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

/* The functions that a launcher calls reach the kind's table. A membership is complete, or nothing
 * of it is left. */
static void ranks_may_meet_in_another_way(void **state)
{
    (void)state;
    ms_control control = ms_control_none;
    ms_transport transport = stand_in();
    ms_rendezvous_kind kind = { .prefix = "hosts1:",
                                .control = &control,
                                .close = release_meeting,
                                .abort = end_meeting,
                                .rank = rank_of_meeting };
    control.open = open_control;
    control.joined = joined_control;
    control.close = close_control;
    meeting = (struct meeting){ .base = { .kind = &kind, .references = 1, .ranks = 200 } };
    ms_rendezvous *rendezvous = &meeting.base;
    ms_membership membership = { .control = &control,
                                 .transport = &transport,
                                 .rendezvous = rendezvous,
                                 .rank = 150,
                                 .size = 200 };
    ms_engine *engine = engine_alone();
    ms_group *world = NULL;
    ms_rank_state seen_rank;
    /* No transport of this tree goes with that control. */
    assert_int_equal(ms_comm_open(engine, rendezvous, 150, &world), MS_ERROR_UNSUPPORTED);
    assert_non_null(strstr(ms_engine_error(engine)->message, "no transport"));
    meeting.opens = MS_ERROR_STATE;
    assert_int_equal(ms_comm_new(engine, &membership, &world), MS_ERROR_STATE);
    meeting.opens = MS_OK;
    transport.open = fail_to_open;
    assert_int_equal(ms_comm_new(engine, &membership, &world), MS_ERROR_IO);
    assert_true(meeting.opened == 1 && meeting.closed == 1 && meeting.joined == 0);
    assert_null(world);
    assert_null(ms_comm_world(engine));
    transport.open = NULL;
    assert_int_equal(ms_comm_new(engine, &membership, &world), MS_OK);
    assert_int_equal(meeting.joined, 1);
    assert_int_equal(ms_group_rank(world), 150);
    ms_rendezvous_rank(rendezvous, 150, &seen_rank);
    assert_true(seen_rank.phase == MS_RANK_PRESENT && seen_rank.step == 150);
    assert_true(ms_rendezvous_abort(rendezvous, MS_ABORT_DIED, 150, "host 3 is down"));
    assert_int_equal(meeting.ended_by, 150);
    assert_string_equal(meeting.cause, "host 3 is down");
    ms_engine_free(engine);
    assert_int_equal(meeting.closed, 2);
    ms_rendezvous_release(rendezvous);
    assert_int_equal(meeting.released, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_transport_cannot_do_is_refused),
        cmocka_unit_test(storages_are_enrolled),
        cmocka_unit_test(an_error_after_the_launch_ends_the_job),
        cmocka_unit_test(ranks_may_meet_in_another_way),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
