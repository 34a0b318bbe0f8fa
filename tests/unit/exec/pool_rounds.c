/* pool_rounds.c: what a pool takes does not grow with the number of rounds: programs of takes,
 * drops, refills and releases on several streams, the same in each round, with steps and without;
 * the collector is asked before memory ends; free neighbours are joined at the limit. */
#include "device_support.h"

#include <stdio.h>
#include <stdlib.h>

#include "exec/state.h"
#include "moonshard/base.h"
#include "ranges.h"

/* CANARY: bytes that builds with canaries add to each block, after its storage. */
enum { STREAMS = 4, SLOTS = 24, LENGTH_MAX = 120, CANARY = MS_CANARY ? MS_CELLS_MAX : 0 };

#define OK(call) assert_int_equal(call, MS_OK)

static uint32_t draw(uint64_t seed, uint64_t what, uint32_t below)
{
    uint32_t out[4];
    ms_philox(seed, 91, what, out);
    return out[0] % below;
}

/* One storage is written, and another one may be read; on the sim device nothing runs. */
static const ms_task use_task = { .name = "use" };

static void use(ms_stream *stream, ms_storage *written, ms_storage *read)
{
    ms_access accesses[2] = { { .storage = written, .cells = 1, .mode = MS_WRITE },
                              { .storage = read, .cells = 1, .mode = MS_READ } };
    bool two = read && read != written && !ms_storage_is_dropped(read);
    OK(ms_stream_enqueue(stream, &use_task, NULL, accesses, two ? 2 : 1, (ms_task_cost){ 0 },
                         NULL));
}

typedef struct machine {
    ms_engine *engine;
    ms_stream *streams[STREAMS];
    ms_storage *slots[SLOTS];
} machine;

static machine open_machine(uint64_t memory_bytes)
{
    machine m = { 0 };
    ms_engine_options options = { .device = "sim", .memory_bytes = memory_bytes };
    OK(ms_engine_new(&options, NULL, &m.engine));
    m.streams[0] = ms_engine_current(m.engine);
    for (int i = 1; i < STREAMS; i++) {
        char name[16];
        snprintf(name, sizeof name, "s%d", i);
        OK(ms_engine_stream(m.engine, name, &m.streams[i]));
    }
    return m;
}

/* A storage whose block has this size. */
static ms_storage *block_of(ms_stream *stream, size_t bytes)
{
    return storage_of(stream, bytes - CANARY);
}

static void empty(machine *m)
{
    for (int i = 0; i < SLOTS; i++) ms_storage_release(m->slots[i]);
    for (int i = 0; i < SLOTS; i++) m->slots[i] = NULL;
}

static void close_machine(machine *m)
{
    empty(m);
    assert_int_equal(ms_engine_memory(m->engine).live, 0);
    ms_engine_free(m->engine);
}

/* A round of the program of this seed. What it leaves is there in the next round. */
static void round_of(machine *m, uint64_t seed)
{
    uint64_t at = 100;
    uint32_t length = 20 + draw(seed, 1, LENGTH_MAX - 20), streams = 2 + draw(seed, 2, STREAMS - 1),
             log = 8 + draw(seed, 3, 14);
    for (uint32_t i = 0; i < length; i++, at += 8) {
        uint32_t slot = draw(seed, at, SLOTS);
        ms_storage **storage = &m->slots[slot];
        ms_stream *stream = m->streams[draw(seed, at + 1, streams)];
        uint64_t bytes = ((uint64_t)1 << draw(seed, at + 2, log)) + draw(seed, at + 3, 5000);
        switch (draw(seed, at + 4, 8)) {
        case 0:
        case 1:
        case 2:
            ms_storage_release(*storage);
            *storage = storage_of(stream, bytes);
            use(stream, *storage, NULL);
            break;
        case 3:
            ms_storage_release(*storage);
            *storage = NULL;
            break;
        case 4:
            if (*storage && !ms_storage_is_dropped(*storage)) OK(ms_storage_drop(*storage, "test"));
            break;
        case 5:
            if (*storage && ms_storage_is_dropped(*storage)) {
                OK(ms_storage_refill(*storage, stream));
                use(stream, *storage, NULL);
            }
            break;
        case 6:
            if (*storage && !ms_storage_is_dropped(*storage))
                use(stream, *storage, m->slots[draw(seed, at + 5, SLOTS)]);
            break;
        default:
            if (draw(seed, at + 6, 4) == 0)
                OK(ms_stream_wait(stream, ms_stream_last(m->streams[draw(seed, at + 7, streams)])));
        }
    }
}

static uint64_t reserved_after(machine *m, uint64_t seed, bool with_steps, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        round_of(m, seed);
        if (with_steps) OK(ms_engine_step_end(m->engine, 1));
    }
    return ms_engine_memory(m->engine).reserved;
}

static void fail_program(const machine *m, uint64_t seed, uint64_t before, uint64_t after)
{
    fail_msg("program %llu: reserved %llu, later %llu; peak %llu", (unsigned long long)seed,
             (unsigned long long)before, (unsigned long long)after,
             (unsigned long long)ms_engine_memory(m->engine).peak);
}

/* Gives the number of waits. */
static uint64_t assert_levels(uint64_t seed)
{
    machine m = open_machine((uint64_t)1 << 40);
    uint64_t before = reserved_after(&m, seed, true, 100),
             after = reserved_after(&m, seed, true, 100), waits = ms_engine_memory(m.engine).waits;
    if (after != before) fail_program(&m, seed, before, after);
    close_machine(&m);
    return waits;
}

static void programs_with_steps_take_no_more_after_200_rounds_than_after_100(void **state)
{
    (void)state;
    /* They did where rows were taken by age, and nothing was spare. */
    static const uint64_t late[] = { 304, 1448, 2510, 2537 };
    uint64_t programs = ranges_are_long() ? 3000 : 200, waits = 0;
    for (uint64_t seed = 1; seed <= programs; seed++) waits += assert_levels(seed);
    for (size_t i = 0; i < sizeof late / sizeof *late; i++) waits += assert_levels(late[i]);
    assert_true(waits > 0);
}

/* Beyond twice the peak and 64 MiB, only a block for which there is no place is new memory. */
static void programs_without_steps_are_bounded_by_their_peak(void **state)
{
    (void)state;
    uint64_t programs = ranges_are_long() ? 3000 : 200, beyond = 0;
    for (uint64_t seed = 1; seed <= programs; seed++) {
        machine m = open_machine((uint64_t)1 << 40);
        uint64_t reserved = reserved_after(&m, seed, false, 1000),
                 peak = ms_engine_memory(m.engine).peak,
                 bound = 2 * peak > 64 << 20 ? 2 * peak : 64 << 20;
        if (reserved > bound + peak) fail_program(&m, seed, bound, reserved);
        beyond += reserved * 2 > bound;
        close_machine(&m);
    }
    assert_true(beyond > 0);
}

/* Two streams that take memory one after the other and never wait for each other: each round's
 * memory is that of the round before. */
static void two_streams_take_the_memory_of_the_step_before(void **state)
{
    (void)state;
    machine m = open_machine((uint64_t)1 << 40);
    for (int i = 0; i < 300; i++) {
        for (int s = 0; s < 2; s++) {
            m.slots[s] = block_of(m.streams[s], 4 << 20);
            use(m.streams[s], m.slots[s], NULL);
        }
        empty(&m);
        OK(ms_engine_step_end(m.engine, 1));
        assert_int_equal(ms_engine_memory(m.engine).reserved, 8 << 20);
    }
    close_machine(&m);
}

/* In a run that does not grow, nothing waits for memory. */
static void a_pipeline_of_two_streams_has_no_waits(void **state)
{
    (void)state;
    machine m = open_machine((uint64_t)1 << 40);
    ms_stream *a = m.streams[0], *b = m.streams[1];
    for (int i = 0; i < 100; i++) {
        for (int k = 0; k < 8; k++) {
            ms_storage *made = storage_of(a, 1 << 20), *copy = NULL;
            use(a, made, NULL);
            OK(ms_stream_wait(b, ms_stream_last(a)));
            copy = storage_of(b, 1 << 19);
            use(b, copy, made);
            ms_storage_release(made);
            OK(ms_stream_wait(a, ms_stream_last(b)));
            ms_storage_release(copy);
        }
        OK(ms_engine_step_end(m.engine, 1));
    }
    assert_int_equal(ms_engine_memory(m.engine).waits, 0);
    assert_true(ms_engine_memory(m.engine).reserved <= 3 << 20);
    close_machine(&m);
}

/* Neighbours that were dropped apart on different streams are one block for a third, and what is
 * missing to them is new memory. */
static void at_the_limit_neighbours_are_joined_and_extended(void **state)
{
    (void)state;
    machine m = open_machine(4 << 20);
    for (int i = 0; i < 3; i++) {
        m.slots[i] = block_of(m.streams[i], 1 << 20);
        use(m.streams[i], m.slots[i], NULL);
    }
    for (int i = 1; i < 3; i++) OK(ms_storage_drop(m.slots[i], "test"));
    ms_storage *large = block_of(m.streams[3], 3 << 20);
    use(m.streams[3], large, NULL);
    assert_int_equal(ms_engine_memory(m.engine).reserved, 4 << 20);
    assert_int_equal(ms_engine_memory(m.engine).waits, 2);
    ms_storage_release(large);
    ms_storage *middle = block_of(m.streams[0], 2 << 20);
    ms_storage *none = NULL;
    assert_int_equal(ms_storage_new(m.streams[0], 2 << 20, &none), MS_ERROR_MEMORY);
    ms_storage_release(middle);
    close_machine(&m);
}

typedef struct hoard {
    machine *m;
    int asked;
    bool gives;
} hoard;

static bool give(void *user)
{
    hoard *h = user;
    h->asked++;
    if (h->gives) empty(h->m);
    return h->gives;
}

static void the_collector_is_asked_once_before_memory_ends(void **state)
{
    (void)state;
    machine m = open_machine(4 << 20);
    hoard h = { .m = &m, .gives = true };
    ms_engine_on_full(m.engine, give, &h);
    for (int i = 0; i < 4; i++) m.slots[i] = block_of(m.streams[0], 1 << 20);
    assert_int_equal(h.asked, 0);
    ms_storage *large = block_of(m.streams[0], 3 << 20), *none = NULL;
    assert_int_equal(h.asked, 1);
    h.gives = false;
    assert_int_equal(ms_storage_new(m.streams[0], 3 << 20, &none), MS_ERROR_MEMORY);
    assert_int_equal(h.asked, 2);
    h.gives = true;
    assert_int_equal(ms_storage_new(m.streams[0], 3 << 20, &none), MS_ERROR_MEMORY);
    assert_int_equal(h.asked, 3);
    assert_null(none);
    ms_storage_release(large);
    close_machine(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(programs_with_steps_take_no_more_after_200_rounds_than_after_100),
        cmocka_unit_test(programs_without_steps_are_bounded_by_their_peak),
        cmocka_unit_test(two_streams_take_the_memory_of_the_step_before),
        cmocka_unit_test(a_pipeline_of_two_streams_has_no_waits),
        cmocka_unit_test(at_the_limit_neighbours_are_joined_and_extended),
        cmocka_unit_test(the_collector_is_asked_once_before_memory_ends),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
