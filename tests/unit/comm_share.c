/* comm_share.c: numbers that hosts share. */
#include "comm_support.h"

#include <stdatomic.h>

/* Every kind and dtype; what a rank brings differs from what others bring. */
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

/* Both channels of users stand behind work that does not end before the numbers are there. */
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
    run_well(THREADS, 2, beside, NULL);
}

/* Without others the result is that of ranks that bring the same, on the sim device too. */
static void without_others(void **state)
{
    (void)state;
    for (int sim = 0; sim < 2; sim++) {
        ms_engine_options options = { .device = sim ? "sim" : "cpu", .strict = true };
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
        cmocka_unit_test(numbers_wait_for_no_computation),
        cmocka_unit_test(without_others),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
