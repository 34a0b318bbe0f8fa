/* pool_move.c: gives a pool's free memory other addresses, where it is in one piece.
 *
 * A window is a range of addresses as long as the request, in which nothing is in use: free blocks,
 * bare ones, and what is above the top. It begins where a block does, or ends there. The one that
 * lacks the fewest bytes is taken, the lowest of equal ones. What it lacks comes from what the
 * limit still allows, and from free blocks outside, the largest first: so few places are changed,
 * and small requests still find small blocks. */
#include "exec/pool_move.h"

#include "exec/pool_blocks.h"
#include "exec/stream.h"

typedef struct range {
    uint64_t begin, end;
} range;

static uint64_t granules_up(uint64_t at)
{
    return (at + MS_POOL_GRANULE - 1) & ~(MS_POOL_GRANULE - 1);
}
static uint64_t granules_down(uint64_t at) { return at & ~(MS_POOL_GRANULE - 1); }

/* ------------------------------------------------------------------- choosing */

/* The part of a bare block that must get memory for the range. */
static range part_in(const ms_block *bare, range window)
{
    range part = { granules_down(window.begin), granules_up(window.end) };
    if (part.begin < bare->offset) part.begin = bare->offset;
    if (part.end > bare->offset + bare->size) part.end = bare->offset + bare->size;
    return part;
}

/* Bytes that the window lacks; UINT64_MAX: something is in use there, or there are no such
 * addresses. at: the block in which it begins, NULL: above all. */
static uint64_t missing_in(const ms_pool *pool, const ms_block *at, range window)
{
    uint64_t missing = window.end > pool->top ? window.end - pool->top : 0;
    if (window.end > pool->reserved) return UINT64_MAX;
    for (; at && at->offset < window.end; at = at->after) {
        if (!at->freed && !at->bare) return UINT64_MAX;
        if (!at->bare) continue;
        range part = part_in(at, window);
        missing += part.end - part.begin;
    }
    return missing;
}

/* The block in which a window that ends with `last` begins; NULL: something in use is before. */
static const ms_block *begin_of(const ms_block *last, uint64_t begin)
{
    const ms_block *at = last;
    while (at && (at->freed || at->bare) && at->offset > begin) at = at->before;
    return at && (at->freed || at->bare) ? at : NULL;
}

/* Returns what the best window lacks; UINT64_MAX: there is none. */
static uint64_t choose_window(const ms_pool *pool, uint64_t size, range *out)
{
    *out = (range){ pool->top, pool->top + size };
    uint64_t best = missing_in(pool, NULL, *out);
    for (const ms_block *block = pool->last; block; block = block->before) {
        if (!block->freed && !block->bare) continue;
        uint64_t end = block->offset + block->size;
        range windows[2] = { { end - size, end }, { block->offset, block->offset + size } };
        for (int i = end < size ? 1 : 0; i < 2; i++) {
            const ms_block *at = i ? block : begin_of(block, windows[i].begin);
            uint64_t missing = at ? missing_in(pool, at, windows[i]) : UINT64_MAX;
            if (missing > best || missing == UINT64_MAX) continue;
            best = missing;
            *out = windows[i];
        }
    }
    return best;
}

/* The whole granules of a block that are outside of the window. */
static range spare_of(const ms_block *block, range window)
{
    range spare = { block->offset, block->offset + block->size };
    if (!block->freed) return (range){ 0, 0 };
    if (spare.begin < window.end && spare.end > window.begin) {
        if (spare.begin < window.begin) spare.end = window.begin;
        else spare.begin = window.end;
    }
    spare = (range){ granules_up(spare.begin), granules_down(spare.end) };
    return spare.begin < spare.end ? spare : (range){ 0, 0 };
}

/* The block with the most granules to spare, the lowest of equal ones; NULL: none has any.
 * *total: those of all. */
static ms_block *most_spare(const ms_pool *pool, range window, range *most, uint64_t *total)
{
    ms_block *found = NULL;
    *most = (range){ 0, 0 };
    *total = 0;
    for (ms_block *block = pool->last; block; block = block->before) {
        range spare = spare_of(block, window);
        *total += spare.end - spare.begin;
        if (spare.begin == spare.end || spare.end - spare.begin < most->end - most->begin) continue;
        *most = spare;
        found = block;
    }
    return found;
}

/* ---------------------------------------------------------------------- moving */

static void count_handed_out(ms_pool *pool, int64_t bytes)
{
    pool->bare -= (uint64_t)bytes;
    if (!ms_pool_is_offload(pool)) pool->engine->memory.reserved += (uint64_t)bytes;
}

/* Cuts a block that is in no list. The block keeps what is below `at`. */
static ms_block *cut(ms_pool *pool, ms_block *block, uint64_t at)
{
    ms_block *rest = ms_pool_struct_take(pool), *after = block->after;
    *rest = *block;
    rest->offset = at;
    rest->size = block->offset + block->size - at;
    rest->before = block;
    if (after) after->before = rest;
    else pool->last = rest;
    block->after = rest;
    block->size = at - block->offset;
    return rest;
}

/* Makes a block of this part of a block, which is in no list, and enters what is free of the rest.
 */
static ms_block *cut_out(ms_pool *pool, ms_block *block, range part)
{
    if (part.end < block->offset + block->size) {
        ms_block *rest = cut(pool, block, part.end);
        if (rest->freed) ms_pool_list_add(pool, rest);
    }
    if (part.begin == block->offset) return block;
    ms_block *middle = cut(pool, block, part.begin);
    if (block->freed) ms_pool_list_add(pool, block);
    return middle;
}

/* Takes the memory of a part of a free block away. */
static bool strip(ms_pool *pool, ms_block *block, range part)
{
    uint64_t bytes = part.end - part.begin;
    if (ms_pool_reserve_structs(pool, 2)
        || pool->memory->decommit(pool->engine, pool->base + part.begin, bytes))
        return false;
    ms_pool_list_remove(pool, block);
    block = cut_out(pool, block, part);
    block->freed = 0;
    block->apart = false;
    block->bare = true;
    count_handed_out(pool, -(int64_t)bytes);
    if (block->after && block->after->bare) ms_pool_absorb(pool, block, block->after);
    if (block->before && block->before->bare) ms_pool_absorb(pool, block->before, block);
    return true;
}

/* Gives memory to a part of a bare block. The part becomes a free block, which every stream may
 * take at once. */
static bool fill(ms_pool *pool, ms_block *block, range part)
{
    uint64_t bytes = part.end - part.begin;
    if (ms_pool_reserve_structs(pool, 2)
        || pool->commit(pool->commit_user, pool->base + part.begin, bytes))
        return false;
    block = cut_out(pool, block, part);
    block->bare = false;
    block->freed = 1; /* before any step's end */
    for (int i = 0; i < MS_STREAMS_MAX; i++) block->uses[i] = 0;
    count_handed_out(pool, (int64_t)bytes);
    ms_pool_list_add(pool, block);
    return true;
}

/* Gives memory to all of the window that has none. */
static bool fill_window(ms_pool *pool, range window)
{
    for (ms_block *block = pool->last, *before; block; block = before) {
        before = block->before;
        if (!block->bare || block->offset >= window.end
            || block->offset + block->size <= window.begin)
            continue;
        if (!fill(pool, block, part_in(block, window))) return false;
    }
    if (window.end <= pool->top) return true;
    uint64_t top = pool->top;
    if (ms_pool_reserve_structs(pool, 1) || !ms_pool_raise_top(pool, window.end)) return false;
    ms_block *block = ms_pool_append(pool, top, window.end - top);
    block->freed = 1;
    ms_pool_list_add(pool, block);
    return true;
}

ms_block *ms_pool_move(ms_pool *pool, uint64_t size)
{
    ms_engine *engine = pool->engine;
    range window, part;
    ms_pool_row found;
    uint64_t spare = 0, held = pool->top - pool->bare, may = pool->limit - held;
    if (!pool->moves || size > pool->limit - pool->used) return NULL;
    /* A machine that has no more memory has what is committed above the top. */
    if (pool->is_full && may > pool->committed - pool->top) may = pool->committed - pool->top;
    ms_pool_join_free(pool, NULL, NULL);
    uint64_t missing = choose_window(pool, size, &window);
    (void)most_spare(pool, window, &part, &spare);
    if (missing == UINT64_MAX || (missing > may && granules_up(missing - may) > spare)) return NULL;
    ms_streams_await(engine);
    for (uint64_t left = missing > may ? granules_up(missing - may) : 0, bytes; left;
         left -= bytes) {
        ms_block *block = most_spare(pool, window, &part, &spare);
        MS_ASSERT(block);
        bytes = part.end - part.begin < left ? part.end - part.begin : left;
        part.end = part.begin + bytes;
        if (!strip(pool, block, part)) return NULL;
        engine->memory.moved += bytes;
    }
    if (!fill_window(pool, window) || ms_pool_reserve_structs(pool, 2)) return NULL;
    ms_log(&engine->context, MS_LOG_DEBUG, "a memory pool moves %llu MiB, for a block of %llu MiB",
           (unsigned long long)(missing >> 20), (unsigned long long)(size >> 20));
    return ms_pool_find_row(pool, size, UINT64_MAX, &found) ? ms_pool_join_row(pool, found, size)
                                                            : NULL;
}
