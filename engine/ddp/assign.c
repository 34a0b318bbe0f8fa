/* assign.c: which parameters share a bucket. */
#include "moonshard/ddp.h"

#include <string.h>

/* The bucket that is being filled with items of one key (a dtype). A bucket gets its number when
 * its first item opens it, and its place when it is closed. Buckets of different keys are filled
 * side by side, so the two orders differ. */
typedef struct open_bucket {
    uint32_t key, number, limit;
    uint64_t bytes;
    bool open;
} open_bucket;

/* Place of a bucket that has not reached its limit. */
#define UNCLOSED UINT32_MAX

/* The state of this key; a key that is met for the first time gets a new one. Keys are dtypes, so
 * the linear search is short. */
static open_bucket *state_of(open_bucket *states, uint32_t *count, uint32_t key)
{
    uint32_t i = 0;
    while (i < *count && states[i].key != key) i++;
    if (i == *count) states[(*count)++] = (open_bucket){ .key = key };
    return &states[i];
}

/* Sorts the items into buckets. of[item] becomes the number of its bucket, closed_as[number] the
 * place of that bucket. An item that brings its bucket to the limit or above is the last one in it:
 * a bucket may exceed its limit by one item, and an item larger than the limit shares the bucket
 * only with items before it. Returns the number of buckets. */
static uint32_t cut(const uint64_t *bytes, const uint32_t *keys, uint32_t count,
                    const uint64_t *limits, uint32_t limit_count, open_bucket *states, uint32_t *of,
                    uint32_t *closed_as)
{
    uint32_t state_count = 0, opened = 0, closed = 0;
    for (uint32_t i = 0; i < count; i++) {
        open_bucket *state = state_of(states, &state_count, keys[i]);
        if (!state->open) {
            closed_as[opened] = UNCLOSED;
            state->number = opened++;
            state->bytes = 0;
            state->open = true;
        }
        of[i] = state->number;
        state->bytes += bytes[i];
        if (state->bytes < limits[state->limit]) continue;
        closed_as[state->number] = closed++;
        state->open = false;
        /* The last limit holds for all further buckets of this key. */
        if (state->limit + 1 < limit_count) state->limit++;
    }
    /* Buckets that are not full follow, in the order in which they were opened. */
    for (uint32_t number = 0; number < opened; number++)
        if (closed_as[number] == UNCLOSED) closed_as[number] = closed++;
    return opened;
}

/* Writes the items bucket by bucket, in their given order within a bucket. It takes buckets * items
 * steps, and runs only when buckets are rebuilt. */
static void lay_out(const uint32_t *of, const uint32_t *place, uint32_t count, uint32_t buckets,
                    uint32_t *order, uint32_t *sizes)
{
    uint32_t at = 0;
    for (uint32_t b = 0; b < buckets; b++) {
        sizes[b] = 0;
        for (uint32_t i = 0; i < count; i++)
            if (place[of[i]] == b) {
                order[at++] = i;
                sizes[b]++;
            }
    }
}

/* Both public functions. The first buckets are assigned backwards: gradients come roughly in the
 * reverse order of registration, so the parameters that were registered last fill bucket 0, which
 * is launched first. */
static ms_status assign(ms_engine *engine, const uint64_t *bytes, const uint32_t *keys,
                        uint32_t count, const uint64_t *limits, uint32_t limit_count,
                        bool backwards, uint32_t *order, uint32_t *sizes, uint32_t *buckets)
{
    void *memory = NULL;
    if (limit_count == 0 || limits[0] == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "buckets: at least one limit of 1 byte or more is needed");
    ms_status status =
        ms_allocate(ms_engine_context(engine),
                    count * (sizeof(open_bucket) + 2 * sizeof(uint32_t)) + 1, "buckets", &memory);
    if (status) return status;
    open_bucket *states = memory;
    uint32_t *of = (uint32_t *)(states + count), *place = of + count;
    *buckets = cut(bytes, keys, count, limits, limit_count, states, of, place);
    /* Numbers of opening are in order of the smallest position. */
    for (uint32_t number = 0; backwards && number < *buckets; number++)
        place[number] = *buckets - 1 - number;
    lay_out(of, place, count, *buckets, order, sizes);
    ms_release(ms_engine_context(engine), memory);
    return MS_OK;
}

/* For items in the order in which they become ready. */
ms_status ms_ddp_assign(ms_engine *engine, const uint64_t *bytes, const uint32_t *keys,
                        uint32_t count, const uint64_t *limits, uint32_t limit_count,
                        uint32_t *order, uint32_t *sizes, uint32_t *buckets)
{
    return assign(engine, bytes, keys, count, limits, limit_count, false, order, sizes, buckets);
}

/* For items in order of registration, before any gradient has shown the true order. */
ms_status ms_ddp_assign_backwards(ms_engine *engine, const uint64_t *bytes, const uint32_t *keys,
                                  uint32_t count, const uint64_t *limits, uint32_t limit_count,
                                  uint32_t *order, uint32_t *sizes, uint32_t *buckets)
{
    return assign(engine, bytes, keys, count, limits, limit_count, true, order, sizes, buckets);
}
