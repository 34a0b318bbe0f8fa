/* fsdp_static_memory.c: the blocks in which a sharded model's memory is where steps may become
 * graphs: how they are chosen, how many there are, and that nothing else on a rank has a part in
 * it. */
#include "fsdp_support.h"

#include "comm/group.h"
#include "exec/state.h"
#include "fsdp/static_memory.h"

enum { UNITS = 12, LAG = 2 };

/* A net of which ranks use graphs, as ms_comm_use_graphs decides over NCCL, and as many tensors as
 * a model has units, all dropped. */
typedef struct bench {
    net net;
    ms_static_memory *rooms;
    ms_flat_param *flat;
    ms_stream *stream;
    ms_tensor *tensors[UNITS];
    uint32_t numbers[UNITS];
} bench;

static void set_up(bench *b, const int64_t lengths[UNITS])
{
    *b = (bench){ 0 };
    OK(build(NULL, 2, true, &b->net));
    ms_comm_of(b->net.engine)->has_graphs = true;
    b->rooms = &b->net.fsdp->memory.wholes;
    b->flat = b->net.fsdp->flats;
    b->stream = ms_engine_current(b->net.engine);
    assert_int_equal(b->rooms->lag, LAG);
    for (int i = 0; i < UNITS; i++) {
        OK(ms_tensor_new(b->net.engine, MS_F32, 1, &lengths[i], &b->tensors[i]));
        OK(ms_storage_drop(ms_tensor_storage(b->tensors[i]), "the test"));
    }
}

static void tear_down(bench *b)
{
    for (int i = 0; i < UNITS; i++) ms_tensor_release(b->tensors[i]);
    drop(&b->net);
    ms_fsdp_free(b->net.fsdp);
    ms_engine_free(b->net.engine);
}

static void take(bench *b, int unit)
{
    OK(ms_static_memory_refill(b->rooms, b->flat, b->tensors[unit], b->stream, &b->numbers[unit]));
    assert_int_equal(ms_static_memory_number(b->rooms, b->tensors[unit]), b->numbers[unit]);
}

static void give(bench *b, int unit)
{
    OK(ms_static_memory_drop(b->rooms, b->tensors[unit], "the test"));
}

/* Forward, then backward in reversed order, with the next unit gathered ahead. */
static void run_pass(bench *b, void (*meanwhile)(bench *b, int turn))
{
    for (int turn = 0; turn < 2 * UNITS; turn++) {
        int at = turn < UNITS ? turn : 2 * UNITS - 1 - turn, next = turn < UNITS ? at + 1 : at - 1;
        if (ms_storage_is_dropped(ms_tensor_storage(b->tensors[at]))) take(b, at);
        if (next >= 0 && next < UNITS) take(b, next);
        if (meanwhile) meanwhile(b, turn);
        give(b, at);
    }
}

static void equals(int64_t lengths[UNITS], int64_t length)
{
    for (int i = 0; i < UNITS; i++) lengths[i] = length;
}

/* As many as are in use at a time, and LAG more. From the second pass on each unit has its block.
 */
static void units_of_one_size_take_turns(void **state)
{
    (void)state;
    bench b;
    int64_t lengths[UNITS];
    uint32_t numbers[UNITS];
    void *places[UNITS];
    equals(lengths, 1000);
    set_up(&b, lengths);
    run_pass(&b, NULL);
    assert_int_equal(b.rooms->count, 2 + LAG);
    memcpy(numbers, b.numbers, sizeof numbers);
    for (int i = 0; i < UNITS; i++) {
        take(&b, i);
        places[i] = ms_tensor_data(b.tensors[i]);
        give(&b, i);
    }
    for (int pass = 0; pass < 3; pass++) {
        run_pass(&b, NULL);
        assert_memory_equal(numbers, b.numbers, sizeof numbers);
    }
    for (int i = 0; i < UNITS; i++) {
        take(&b, i);
        assert_ptr_equal(ms_tensor_data(b.tensors[i]), places[i]);
        give(&b, i);
    }
    tear_down(&b);
}

/* A block that was left a moment ago is not taken by another unit while tasks may still use it. */
static void the_last_that_were_dropped_are_left_alone(void **state)
{
    (void)state;
    bench b;
    int64_t lengths[UNITS];
    equals(lengths, 1000);
    set_up(&b, lengths);
    for (int i = 0; i < UNITS; i++) {
        take(&b, i);
        for (int before = i - LAG; before < i; before++)
            if (before >= 0) assert_int_not_equal(b.numbers[before], b.numbers[i]);
        give(&b, i);
    }
    assert_int_equal(b.rooms->count, 1 + LAG);
    tear_down(&b);
}

/* Blocks that are too small go, so that not each size has its own. */
static void growing_sizes_do_not_add_up(void **state)
{
    (void)state;
    bench b;
    int64_t lengths[UNITS];
    for (int i = 0; i < UNITS; i++) lengths[i] = 1000 * (i + 1);
    set_up(&b, lengths);
    for (int pass = 0; pass < 4; pass++) {
        run_pass(&b, NULL);
        assert_in_range(b.rooms->count, 1, 2 + LAG);
    }
    tear_down(&b);
}

static ms_tensor *kept[2 * UNITS];

/* What a rank may do that others do not: it keeps memory, and makes streams wait. */
static void do_alone(bench *b, int turn)
{
    ms_stream *other = NULL;
    int64_t length = 100 + 300 * (turn % 5);
    OK(ms_engine_stream(b->net.engine, "other", &other));
    OK(ms_stream_wait(other, ms_stream_last(b->stream)));
    OK(ms_stream_wait(b->stream, ms_stream_last(other)));
    ms_tensor_release(kept[turn]);
    kept[turn] = NULL;
    if (turn % 3) OK(ms_tensor_new(b->net.engine, MS_F32, 1, &length, &kept[turn]));
}

/* Numbers start where ddp's and earlier models' end; only their pattern counts. */
static void what_a_rank_does_alone_changes_no_choice(void **state)
{
    (void)state;
    bench one, other;
    int64_t lengths[UNITS];
    for (int i = 0; i < UNITS; i++) lengths[i] = 500 + 700 * (i * 5 % 7);
    set_up(&one, lengths);
    set_up(&other, lengths);
    uint32_t ahead = ms_group_fixed_address(other.net.world);
    for (int pass = 0; pass < 4; pass++) {
        run_pass(&one, NULL);
        run_pass(&other, do_alone);
        for (int i = 0; i < UNITS; i++) assert_int_equal(other.numbers[i], one.numbers[i] + ahead);
    }
    for (int i = 0; i < 2 * UNITS; i++) {
        ms_tensor_release(kept[i]);
        kept[i] = NULL;
    }
    tear_down(&one);
    tear_down(&other);
}

/* As where a transport makes no graphs; and parameters of fewer ranks, and models in which ranks
 * agree on each gather. */
static void others_have_no_rooms(void **state)
{
    (void)state;
    bench b;
    int64_t lengths[UNITS];
    equals(lengths, 10);
    set_up(&b, lengths);
    ms_comm_of(b.net.engine)->has_graphs = false;
    run_pass(&b, NULL);
    ms_comm_of(b.net.engine)->has_graphs = true;
    b.flat->own = true;
    run_pass(&b, NULL);
    b.flat->own = false;
    assert_int_equal(b.rooms->count, 0);
    take(&b, 0);
    assert_int_equal(b.rooms->count, 1);
    /* In a join, ranks drop at different places. What is in use stays. */
    void *place = ms_tensor_data(b.tensors[0]);
    OK(ms_fsdp_set_joining(b.net.fsdp, true, false));
    assert_int_equal(b.rooms->count, 0);
    assert_ptr_equal(ms_tensor_data(b.tensors[0]), place);
    give(&b, 0);
    tear_down(&b);
}

/* On one rank, or where ranks use no graphs of collectives. */
static void work_that_repeats_has_rooms(void **state)
{
    (void)state;
    bench b;
    int64_t lengths[UNITS];
    equals(lengths, 10);
    set_up(&b, lengths);
    ms_comm_of(b.net.engine)->has_graphs = false;
    b.net.engine->repeating = true; /* in a step, on a device that learns runs of tasks */
    run_pass(&b, NULL);
    assert_int_equal(b.rooms->count, 2 + LAG);
    take(&b, 0);
    void *place = ms_tensor_data(b.tensors[0]);
    give(&b, 0);
    /* An evaluation between two steps leaves the blocks alone. */
    b.net.engine->repeating = false;
    OK(ms_static_memory_refill(b.rooms, b.flat, b.tensors[0], b.stream, &b.numbers[0]));
    assert_int_equal(ms_static_memory_number(b.rooms, b.tensors[0]), 0);
    assert_ptr_not_equal(ms_tensor_data(b.tensors[0]), place);
    give(&b, 0);
    b.net.engine->repeating = true;
    take(&b, 0);
    assert_ptr_equal(ms_tensor_data(b.tensors[0]), place);
    give(&b, 0);
    assert_int_equal(b.rooms->count, 2 + LAG);
    tear_down(&b);
}

static void two_numbers_are_one(void **state)
{
    (void)state;
    assert_int_not_equal(ms_static_memory_pair(1, 2), ms_static_memory_pair(2, 1));
    assert_true(ms_static_memory_pair(1, 2) > 65535); /* no other memory's */
    assert_int_equal(ms_static_memory_pair(0, 2), 0);
    assert_int_equal(ms_static_memory_pair(2, 0), 0);
    assert_int_equal(ms_static_memory_pair(65536, 2), 0);
    assert_int_equal(ms_static_memory_pair(2, 65536), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(units_of_one_size_take_turns),
        cmocka_unit_test(the_last_that_were_dropped_are_left_alone),
        cmocka_unit_test(growing_sizes_do_not_add_up),
        cmocka_unit_test(what_a_rank_does_alone_changes_no_choice),
        cmocka_unit_test(others_have_no_rooms),
        cmocka_unit_test(work_that_repeats_has_rooms),
        cmocka_unit_test(two_numbers_are_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
