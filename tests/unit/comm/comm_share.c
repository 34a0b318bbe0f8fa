/* comm_share.c: numbers that hosts share. ctest: cuda-ranks cuda-local */
#include "comm/control/shm/state.h"

#include <math.h>
#include <stdatomic.h>

#include "comm/group.h"
#include "comm/transport_table.h"
#include "comm_support.h"

/* Every kind and dtype; each rank brings different numbers. */
static void kinds(rank *self)
{
    uint32_t n = self->ranks, r = self->number;
    int32_t mine[2] = { (int32_t)r, (int32_t)(n - r) }, all[2 * 8] = { 0 };
    ms_sharing sharing = { .kind = MS_ALL_GATHER, .dtype = MS_I32, .count = 2, .label = "mine" };
    OK(ms_group_share(self->world, &sharing, mine, all));
    for (uint32_t m = 0; m < n; m++)
        CHECK(all[2 * m] == (int32_t)m && all[2 * m + 1] == (int32_t)(n - m));
    sharing =
        (ms_sharing){ .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_MAX, .dtype = MS_I32, .count = 2 };
    OK(ms_group_share(self->world, &sharing, mine, mine));
    CHECK(mine[0] == (int32_t)n - 1 && mine[1] == (int32_t)n);
    float times[3] = { 0.5f, 1, (float)r };
    sharing = (ms_sharing){ .kind = MS_ALL_REDUCE, .dtype = MS_F32, .count = 3 };
    OK(ms_group_share(self->world, &sharing, times, times));
    CHECK(times[0] == 0.5f * (float)n && times[1] == (float)n
          && times[2] == (float)(n * (n - 1) / 2));
    int64_t plan = r == n - 1 ? (int64_t)1 << 40 : -1;
    sharing = (ms_sharing){ .kind = MS_BROADCAST, .root = n - 1, .dtype = MS_I64, .count = 1 };
    OK(ms_group_share(self->world, &sharing, &plan, &plan));
    CHECK(plan == (int64_t)1 << 40);
    sharing = (ms_sharing){ .kind = MS_ALL_GATHER, .dtype = MS_U8, .count = 0 };
    OK(ms_group_share(self->world, &sharing, NULL, all));
}

static void every_kind_arrives(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 5; ranks++) run_well(THREADS, ranks, kinds, NULL);
    run_well(PROCESSES, 3, kinds, NULL);
}

/* More than a staging area holds, and results that are read late, in another order, or never. */
static void late(rank *self)
{
    enum { COUNT = 100000 };
    uint64_t tickets[3] = { 0 };
    int64_t *numbers = malloc(COUNT * sizeof *numbers);
    CHECK(numbers != NULL);
    ms_sharing sharing = {
        .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_SUM, .dtype = MS_I64, .count = COUNT
    };
    for (int i = 0; i < 3; i++) {
        for (int64_t k = 0; k < COUNT; k++) numbers[k] = k * (i + 1);
        OK(ms_group_share_begin(self->world, &sharing, numbers, i == 1 ? NULL : &tickets[i]));
    }
    for (int i = 2; i >= 0; i -= 2) {
        OK(ms_group_share_end(self->world, tickets[i], numbers));
        for (int64_t k = 0; k < COUNT; k++) CHECK(numbers[k] == k * (i + 1) * self->ranks);
    }
    free(numbers);
    CHECK(ms_group_share_end(self->world, tickets[0], NULL) == MS_ERROR_STATE);
    CHECK(ms_group_share_end(self->world, 0, NULL) == MS_ERROR_STATE);
}

static void results_are_read_late_or_never(void **state)
{
    (void)state;
    run_well(THREADS, 2, late, NULL);
    run_well(PROCESSES, 4, late, NULL);
}

/* ------------------------------------------------------ by control, not by the transport */

/* Lengths around that of a piece, and a sum whose bits depend on the order of ranks. */
static void pieces(rank *self)
{
    static const uint64_t lengths[] = { 1, MS_SHARED_BYTES - 1, MS_SHARED_BYTES,
                                        MS_SHARED_BYTES + 1, 3 * MS_SHARED_BYTES + 7 };
    enum { MOST = 3 * MS_SHARED_BYTES + 7 };
    uint32_t n = self->ranks, r = self->number;
    uint8_t *mine = malloc(MOST), *all = malloc(8 * (size_t)MOST);
    CHECK(mine && all);
    for (size_t k = 0; k < sizeof lengths / sizeof *lengths; k++) {
        for (uint64_t i = 0; i < lengths[k]; i++) mine[i] = (uint8_t)(i * 7 + r * 50);
        ms_sharing sharing = { .kind = MS_ALL_GATHER, .dtype = MS_U8, .count = lengths[k] };
        OK(ms_group_share(self->world, &sharing, mine, all));
        for (uint32_t m = 0; m < n; m++)
            for (uint64_t i = 0; i < lengths[k]; i++)
                CHECK(all[m * lengths[k] + i] == (uint8_t)(i * 7 + m * 50));
        sharing.kind = MS_ALL_REDUCE; /* wraps */
        OK(ms_group_share(self->world, &sharing, mine, all));
        for (uint64_t i = 0; i < lengths[k]; i++)
            CHECK(all[i] == (uint8_t)(n * (i * 7) + 50 * (n * (n - 1) / 2)));
    }
    free(mine);
    free(all);
    static const float addends[] = { 1e8f, -1e8f, 1 };
    float values[2] = { addends[r < 2 ? r : 2], r == 1 ? NAN : (float)r };
    ms_sharing sharing = { .kind = MS_ALL_REDUCE, .dtype = MS_F32, .count = 1 };
    OK(ms_group_share(self->world, &sharing, &values[0], &values[0]));
    CHECK(n != 3 || values[0] == 1); /* in any other order of the ranks: 0 */
    sharing.op = MS_REDUCE_OP_MAX;
    OK(ms_group_share(self->world, &sharing, &values[1], &values[1]));
    CHECK(n == 1 || isnan(values[1]));
}

static void numbers_go_in_pieces(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 3; ranks++) run_well(THREADS, ranks, pieces, NULL);
    run_well(PROCESSES, 3, pieces, NULL);
}

/* A network of which every member must know the id before it can move a byte, as NCCL has it: a
 * group's first member makes one when the group makes its first call. Its all_reduce leaves the
 * id's first byte in the tensor. */
enum { ID_BYTES = 128 };

static ms_status make_id(ms_group *group)
{
    uint8_t *id = calloc(1, ID_BYTES);
    if (ms_group_rank(group) == 0)
        memset(id, (int)(10 * ms_group_id(group) + ms_group_world_rank(group, 0) + 1), ID_BYTES);
    ms_sharing sharing = {
        .kind = MS_BROADCAST, .dtype = MS_U8, .count = ID_BYTES, .label = "id of a network"
    };
    group->transport_state = id;
    return ms_group_share(group, &sharing, id, id);
}

static ms_task_result show_id(ms_run *run, void *arguments)
{
    const ms_comm_args *args = arguments;
    const uint8_t *id = args->group->transport_state;
    float value = id[0];
    (void)run;
    for (int i = 1; i < ID_BYTES; i++) value = id[i] == id[0] ? value : -1;
    memcpy(args->out, &value, sizeof value);
    return MS_TASK_DONE;
}

static const ms_task tasks_by_id[MS_COLLECTIVES] = MS_COMM_TASKS(show_id);

static void drop_ids(ms_comm *comm)
{
    for (uint32_t g = 0; g < atomic_load(&comm->group_count); g++)
        free(comm->groups[g]->transport_state);
}

static const ms_transport by_id = { .name = "by id",
                                    .kernels = "cpu",
                                    .kinds = 1u << MS_ALL_REDUCE | 1u << MS_SEND,
                                    .dtypes = 1u << MS_F32,
                                    .ops = 1u << MS_REDUCE_OP_SUM,
                                    .reduced_dtypes = 1u << MS_F32,
                                    .tasks = tasks_by_id,
                                    .prepare = make_id,
                                    .close = drop_ids };

static ms_status open_by_id(rank *self)
{
    ms_membership membership = { .control = &ms_control_shm,
                                 .transport = &by_id,
                                 .rendezvous = self->rendezvous,
                                 .rank = self->number,
                                 .size = self->ranks };
    return ms_comm_new(self->engine, &membership, &self->world);
}

static void learn_ids(rank *self)
{
    static const uint32_t sizes[] = { 2, 1 }, ranks[] = { 2, 0, 1 };
    ms_group *part = NULL;
    ms_tensor *t = NULL;
    float got = 0;
    OK(make(self, MS_F32, 1, false, &t));
    OK(fill(t, NULL, NULL));
    OK(ms_group_split(self->world, 2, sizes, ranks, &part));
    ms_group *groups[] = { self->world, part, self->world };
    ms_collective send = {
        .kind = MS_SEND, .in = t, .bucket = -1, .root = (self->number + 1) % self->ranks
    };
    CHECK(ms_group_enqueue(self->world, 1, &send, NULL) == MS_ERROR_STATE);
    CHECK(strstr(ms_engine_error(self->engine)->message, "make a barrier first"));
    for (int g = 0; g < 3; g++) {
        OK(run_one(self, groups[g],
                   &(ms_collective){ .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 }));
        OK(ms_tensor_read(t, &got, sizeof got));
        CHECK(got == (float)(10 * ms_group_id(groups[g]) + ms_group_world_rank(groups[g], 0) + 1));
    }
    ms_tensor_release(t);
}

static void a_transport_learns_ids_from_control(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    rank ranks[3];
    job work = { .kind = THREADS,
                 .open = open_by_id,
                 .run = learn_ids,
                 .options = { .ranks = 3, .threads = 1, .heap_bytes = 16 << 20 } };
    ms_abort_record cause = run_job(&work, ranks);
    for (int r = 0; r < 3; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
    assert_int_equal(cause.reason, MS_ABORT_NONE);
}

/* A rank that ends while others wait for its numbers ends the job for them; so does one that calls
 * something else. */
static void fail_to_share(rank *self)
{
    int64_t mine = 1, all[2];
    ms_sharing sharing = { .kind = MS_ALL_GATHER, .dtype = MS_I64, .count = 1, .label = "plan" };
    const bool *differs = self->job->argument;
    if (self->number == 1 && !*differs) return;
    if (self->number == 1) sharing.dtype = MS_U8;
    self->status = ms_group_share(self->world, &sharing, &mine, all);
    self->error = *ms_engine_error(self->engine);
}

static void numbers_that_cannot_come_end_the_job(void **state)
{
    (void)state;
    for (int differs = 0; differs < 2; differs++) {
        rank ranks[2];
        bool argument = differs != 0;
        job work = { .kind = THREADS,
                     .run = fail_to_share,
                     .argument = &argument,
                     .options = { .ranks = 2, .threads = 1, .heap_bytes = 16 << 20 } };
        assert_int_equal(run_job(&work, ranks).reason, differs ? MS_ABORT_MISMATCH : MS_ABORT_LEFT);
        assert_int_not_equal(ranks[0].status, MS_OK);
        /* NCCL's ids come before it. */
        assert_non_null(strstr(ranks[0].error.message,
                               over_nccl() ? "all_gather #2 of world" : "all_gather #1 of world"));
        assert_non_null(strstr(ranks[0].error.message, "channel numbers"));
    }
}

typedef struct gate_args {
    _Atomic int *open;
} gate_args;

static ms_task_result pass_gate(ms_run *run, void *arguments)
{
    (void)run;
    const gate_args *args = arguments;
    return atomic_load(args->open) ? MS_TASK_DONE : MS_TASK_PENDING;
}

static const ms_task gate_task = { .name = "gate",
                                   .function = pass_gate,
                                   .args_bytes = sizeof(gate_args) };

/* Both user channels wait for work that does not end before the numbers have arrived. */
static void beside(rank *self)
{
    _Atomic int open = 0;
    ms_point gate;
    ms_tensor *t = NULL;
    int64_t four = 4, mine = self->number, all[2];
    OK(ms_tensor_new(self->engine, MS_F32, 1, &four, &t));
    OK(ms_stream_enqueue(ms_engine_current(self->engine), &gate_task, &(gate_args){ &open }, NULL,
                         0, (ms_task_cost){ 0 }, &gate));
    for (uint32_t channel = 1; channel <= MS_USER_CHANNELS; channel++) {
        ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 };
        ms_stream *stream = NULL;
        OK(ms_group_stream(self->world, channel, &stream));
        OK(ms_stream_wait(stream, gate));
        OK(ms_group_enqueue(self->world, channel, &c, NULL));
    }
    ms_sharing sharing = { .kind = MS_ALL_GATHER, .dtype = MS_I64, .count = 1 };
    OK(ms_group_share(self->world, &sharing, &mine, all));
    CHECK(all[0] == 0 && all[1] == 1);
    atomic_store(&open, 1);
    OK(ms_engine_sync(self->engine));
    ms_tensor_release(t);
}

static void numbers_wait_for_no_computation(void **state)
{
    (void)state;
    if (!device_runs_own_tasks()) skip();
    run_well(THREADS, 2, beside, NULL);
}

/* Without others the result is that of ranks that bring the same, on the sim device too. */
static void without_others(void **state)
{
    (void)state;
    for (int sim = 0; sim < 2; sim++) {
        ms_engine_options options = { .device = sim ? "sim" : "cpu",
                                      .own_device = late_device(sim ? "sim" : NULL),
                                      .strict = true };
        ms_engine *engine = NULL;
        ms_group *world = NULL;
        int64_t mine[2] = { 7, -2 }, all[6];
        assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
        assert_int_equal(ms_comm_open_fake(engine, 1, 3, &world), MS_OK);
        ms_sharing sharing = { .kind = MS_ALL_GATHER, .dtype = MS_I64, .count = 2 };
        assert_int_equal(ms_group_share(world, &sharing, mine, all), MS_OK);
        for (int i = 0; i < 6; i++) assert_int_equal(all[i], mine[i % 2]);
        sharing.kind = MS_ALL_REDUCE;
        assert_int_equal(ms_group_share(world, &sharing, mine, mine), MS_OK);
        assert_true(mine[0] == 21 && mine[1] == -6);
        ms_traffic traffic = ms_group_traffic(world, MS_ALL_GATHER);
        assert_true(traffic.calls == 1 && traffic.payload_bytes == 16 && traffic.wire_bytes == 32);
        sharing.op = MS_REDUCE_OP_AVG;
        assert_int_equal(ms_group_share(world, &sharing, mine, mine), MS_ERROR_ARGUMENT);
        sharing.kind = MS_SCATTER;
        assert_int_equal(ms_group_share(world, &sharing, mine, mine), MS_ERROR_ARGUMENT);
        ms_engine_free(engine);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_kind_arrives),
        cmocka_unit_test(results_are_read_late_or_never),
        cmocka_unit_test(numbers_go_in_pieces),
        cmocka_unit_test(a_transport_learns_ids_from_control),
        cmocka_unit_test(numbers_that_cannot_come_end_the_job),
        cmocka_unit_test(numbers_wait_for_no_computation),
        cmocka_unit_test(without_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
