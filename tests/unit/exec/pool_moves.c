/* pool_moves.c: a pool whose free memory is in small pieces has it for large requests, too: values
 * stay, the limit holds, and a simulated run takes the same places.
 * ctest: late cuda poisoned */
#include "device_support.h"

#include <stdio.h>
#include <string.h>

#include "exec/state.h"
#include "late_device.h"
#include "moonshard/base.h"
#include "ranges.h"

/* CANARY: bytes that builds with canaries add to each block, after its storage. */
enum { MIB = 1 << 20, CANARY = MS_CANARY ? MS_CELLS_MAX : 0, SLOTS = 20, WORDS = 16 };

#define OK(call) assert_int_equal(call, MS_OK)

static ms_engine *engine_of(const char *device, uint64_t memory_bytes)
{
    ms_engine_options options = { .device = device,
                                  .own_device = late_device(device),
                                  .threads = 1,
                                  .for_gpu = device_is_cuda(),
                                  .memory_bytes = memory_bytes };
    ms_engine *engine = NULL;
    OK(ms_engine_new(&options, NULL, &engine));
    return engine;
}

/* A storage whose block has this size. */
static ms_storage *block_of(ms_stream *stream, size_t bytes)
{
    return storage_of(stream, bytes - CANARY);
}

/* Values at the begin, in the middle and at the end of a storage. */
static size_t place_of(const ms_storage *storage, int i)
{
    size_t last = ms_storage_bytes(storage) - WORDS * sizeof(uint32_t);
    return i == 0 ? 0 : i == 1 ? last / 2 / 64 * 64 : last;
}

static void put(ms_stream *stream, ms_storage *storage, uint32_t value)
{
    for (int i = 0; i < 3; i++) {
        uint32_t words[WORDS];
        for (int k = 0; k < WORDS; k++) words[k] = value + (uint32_t)(i * WORDS + k);
        OK(ms_stream_copy_in(stream, storage, place_of(storage, i), words, sizeof words, NULL));
    }
}

static void assert_has(ms_storage *storage, uint32_t value)
{
    for (int i = 0; i < 3; i++) {
        uint32_t words[WORDS];
        OK(ms_storage_read(storage, place_of(storage, i), words, sizeof words));
        for (int k = 0; k < WORDS; k++)
            assert_int_equal(words[k], value + (uint32_t)(i * WORDS + k));
    }
}

static void release(ms_storage **storage)
{
    ms_storage_release(*storage);
    *storage = NULL;
}

/* Every second block is given back, while the work that writes it may be under way. */
static void free_memory_in_small_pieces_serves_a_large_request(void **state)
{
    (void)state;
    static const size_t sizes[] = { 4 * MIB, 5 * MIB + 4096, 7 * MIB - 64 };
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        enum { COUNT = 12 };
        uint64_t limit = COUNT * sizes[s];
        ms_engine *engine = engine_of(NULL, limit);
        ms_stream *stream = ms_engine_current(engine), *side = side_of(engine);
        ms_storage *slots[COUNT], *large = NULL;
        for (uint32_t i = 0; i < COUNT; i++) {
            slots[i] = block_of(stream, sizes[s]);
            put(i % 4 < 2 ? stream : side, slots[i], 1000 * i);
        }
        for (int i = 0; i < COUNT; i += 2) release(&slots[i]);
        assert_int_equal(ms_engine_memory(engine).moved, 0);
        large = block_of(side, 12 * MIB);
        put(side, large, 77);
        ms_memory memory = ms_engine_memory(engine);
        assert_true(memory.moved >= 12 * MIB - sizes[s] && memory.moved <= 12 * MIB);
        assert_true(memory.reserved <= limit && memory.reserved > limit - 2 * MIB);
        for (uint32_t i = 1; i < COUNT; i += 2) assert_has(slots[i], 1000 * i);
        assert_has(large, 77);
        /* Places that have lost memory get it again. */
        release(&large);
        for (int round = 0; round < 20; round++) {
            uint32_t value = 9000 + (uint32_t)round;
            large = block_of(round % 2 ? side : stream, (size_t)(6 + round % 7) * MIB);
            ms_storage *small = block_of(stream, 2 * MIB);
            put(stream, large, value);
            put(side, small, value + 500);
            assert_has(large, value);
            assert_has(small, value + 500);
            release(&small);
            release(&large);
        }
        for (uint32_t i = 1; i < COUNT; i += 2) assert_has(slots[i], 1000 * i);
        assert_true(ms_engine_memory(engine).reserved <= limit);
        for (int i = 1; i < COUNT; i += 2) release(&slots[i]);
        assert_int_equal(ms_engine_memory(engine).live, 0);
        ms_engine_free(engine);
    }
}

/* The error says what was asked for, what is live, and what the pool has kept. */
static void what_the_limit_forbids_is_an_error(void **state)
{
    (void)state;
    ms_engine *engine = engine_of(NULL, 32 * MIB);
    ms_stream *stream = ms_engine_current(engine);
    ms_storage *slots[32], *none = NULL;
    for (int i = 0; i < 32; i++) slots[i] = block_of(stream, MIB);
    for (uint32_t i = 1; i < 32; i += 2) put(stream, slots[i], i);
    for (int i = 0; i < 32; i += 2) release(&slots[i]);
    /* No free piece has a whole granule. */
    char kept[64];
    snprintf(kept, sizeof kept, "kept by the pool %llu, limit 33554432",
             16ull * MIB + 16ull * CANARY);
    assert_int_equal(ms_storage_new(stream, 4 * MIB, &none), MS_ERROR_MEMORY);
    const char *message = ms_engine_error(engine)->message;
    assert_non_null(strstr(message, "no memory for 4194304 bytes: live "));
    assert_non_null(strstr(message, kept));
    assert_int_equal(ms_engine_memory(engine).moved, 0);
    for (int i = 1; i < 32; i += 4) release(&slots[i]);
    assert_int_equal(ms_storage_new(stream, 25 * MIB, &none), MS_ERROR_MEMORY);
    assert_int_equal(ms_engine_memory(engine).moved, 0);
    assert_null(none);
    for (uint32_t i = 3; i < 32; i += 4) assert_has(slots[i], i);
    ms_storage *large = block_of(stream, 10 * MIB);
    put(stream, large, 5);
    for (uint32_t i = 3; i < 32; i += 4) assert_has(slots[i], i);
    assert_has(large, 5);
    assert_true(ms_engine_memory(engine).moved > 0);
    release(&large);
    for (int i = 3; i < 32; i += 4) release(&slots[i]);
    ms_engine_free(engine);
}

static uint32_t draw(uint64_t seed, uint64_t what, uint32_t below)
{
    uint32_t out[4];
    ms_philox(seed, 17, what, out);
    return out[0] % below;
}

typedef struct trail {
    uint64_t hash, moved;
    int refused;
} trail;

/* A random program near its limit: what its pool does. A simulated run has no values. */
static trail follow(const char *device, uint64_t seed)
{
    enum { LIMIT = 48 * MIB };
    ms_engine *engine = engine_of(device, LIMIT);
    bool has_values = engine->device->values;
    ms_stream *streams[2] = { ms_engine_current(engine), side_of(engine) };
    ms_storage *slots[SLOTS] = { NULL };
    uint32_t values[SLOTS] = { 0 };
    trail t = { 0 };
    for (uint32_t i = 0; i < 150; i++) {
        uint32_t slot = draw(seed, 8 * i, SLOTS), side = draw(seed, 8 * i + 1, 2);
        release(&slots[slot]);
        size_t bytes = draw(seed, 8 * i + 2, 4) == 0 ? draw(seed, 8 * i + 3, 24 * MIB)
                                                     : draw(seed, 8 * i + 3, 5 * MIB);
        if (draw(seed, 8 * i + 4, 4) == 0) continue;
        ms_status status = ms_storage_new(streams[side], bytes + 4096, &slots[slot]);
        if (status) {
            assert_int_equal(status, MS_ERROR_MEMORY);
            t.refused++;
        } else put(streams[draw(seed, 8 * i + 5, 2)], slots[slot], i * 100);
        values[slot] = i * 100;
        ms_memory memory = ms_engine_memory(engine);
        assert_true(memory.reserved <= LIMIT && memory.live <= memory.reserved);
        uint64_t seen[6] = { (uint64_t)status, memory.live,  memory.peak,
                             memory.reserved,  memory.moved, t.hash };
        t.hash = ms_hash(seen, sizeof seen, 0);
        t.moved = memory.moved;
        if (i % 10 != 9 || !has_values) continue;
        for (int k = 0; k < SLOTS; k++)
            if (slots[k]) assert_has(slots[k], values[k]);
    }
    for (int k = 0; k < SLOTS; k++) release(&slots[k]);
    ms_engine_free(engine);
    return t;
}

static void a_simulated_run_moves_the_same_memory(void **state)
{
    (void)state;
    uint64_t moved = 0, programs = ranges_are_long() ? 200 : 12;
    int refused = 0;
    for (uint64_t seed = 1; seed <= programs; seed++) {
        trail real = follow(NULL, seed), sim = follow("sim", seed);
        if (real.hash != sim.hash) fail_msg("program %llu", (unsigned long long)seed);
        moved += real.moved;
        refused += real.refused;
    }
    assert_true(moved > 0 && refused > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(free_memory_in_small_pieces_serves_a_large_request),
        cmocka_unit_test(what_the_limit_forbids_is_an_error),
        cmocka_unit_test(a_simulated_run_moves_the_same_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
