/* pool_blocks.c: the blocks of a pool's arena: lists of free ones, rows of them, cutting, joining,
 * and new memory at the top. */
#include "exec/pool_blocks.h"

#include <string.h>

#define MS_POOL_SPLIT 512u /* a smaller rest stays with the block */
#define MS_POOL_CHUNK 256  /* block structs allocated together */

/* The bin of a size. Four bins for each power of two: every block of a higher bin is larger than
 * every block of a lower one, so a search that starts in the bin of a request has to compare sizes
 * in that bin only. The logarithm gives the power of two, the two bits below the highest one the
 * quarter. */
uint32_t ms_pool_bin_of(uint64_t size)
{
    uint32_t log = 63u - (uint32_t)__builtin_clzll(size | MS_POOL_ALIGN);
    uint32_t bin = (log - 6u) * 4u + (uint32_t)((size >> (log - 2u)) & 3u);
    return bin < MS_POOL_BINS ? bin : MS_POOL_BINS - 1u;
}

/* ------------------------------------------------------------ block structs */

/* Makes sure of `count` unused structs. It comes before anything changes, so that taking and
 * splitting a block cannot fail half way. */
ms_status ms_pool_reserve_structs(ms_pool *pool, uint32_t count)
{
    ms_engine *engine = pool->engine;
    ms_block *block = pool->unused;
    while (count > 0 && block) {
        count--;
        block = block->next;
    }
    if (count == 0) return MS_OK;
    ms_status status = ms_grow(&engine->context, (void **)&pool->chunks, &pool->chunk_capacity,
                               pool->chunk_count + 1, sizeof *pool->chunks);
    if (status) return status;
    void *chunk = NULL;
    status = ms_allocate(&engine->context, MS_POOL_CHUNK * sizeof(ms_block), "memory pool", &chunk);
    if (status) return status;
    pool->chunks[pool->chunk_count++] = chunk;
    for (int i = MS_POOL_CHUNK - 1; i >= 0; i--) {
        ms_block *unused = (ms_block *)chunk + i;
        unused->next = pool->unused;
        pool->unused = unused;
    }
    return MS_OK;
}

/* Zeroed: a block that is in use has `freed` 0. */
ms_block *ms_pool_struct_take(ms_pool *pool)
{
    ms_block *block = pool->unused;
    MS_ASSERT(block); /* reserve_structs came first */
    pool->unused = block->next;
    memset(block, 0, sizeof *block);
    return block;
}

/* Structs go back to the pool's own list; chunks are freed with the pool. */
static void struct_give(ms_pool *pool, ms_block *block)
{
    block->next = pool->unused;
    pool->unused = block;
}

/* --------------------------------------------------------------- free lists */

/* Adds at the head of the bin: among the first blocks, which find_covered scans, are those freed
 * last. */
void ms_pool_list_add(ms_pool *pool, ms_block *block)
{
    MS_ASSERT(block->freed && block->offset + block->size <= pool->top);
    ms_block **head = &pool->bins[ms_pool_bin_of(block->size)];
    block->previous = NULL;
    block->next = *head;
    if (*head) (*head)->previous = block;
    *head = block;
}

/* The bin is found from the size, so a block is taken off its list before its size changes. */
void ms_pool_list_remove(ms_pool *pool, ms_block *block)
{
    MS_ASSERT(block->freed);
    if (block->previous) block->previous->next = block->next;
    else pool->bins[ms_pool_bin_of(block->size)] = block->next;
    if (block->next) block->next->previous = block->previous;
}

/* The shortest row of at least `size` bytes that were freed at `before` or earlier; of equal ones
 * the lowest. The choice does not go by the order of frees: so a step that repeats the one before
 * it comes to repeat its places, too, and needs no more memory. All free blocks are looked at, as a
 * miss means growth or an error, and waits follow a hit. */
bool ms_pool_find_row(const ms_pool *pool, uint64_t size, uint64_t before, ms_pool_row *out)
{
    bool found = false;
    ms_pool_row now = { 0 };
    for (ms_block *block = before ? pool->last : NULL; block; block = block->before) {
        if (!block->freed || block->freed > before) {
            now = (ms_pool_row){ 0 };
            continue;
        }
        now.first = block;
        if (!now.last) now.last = block;
        now.bytes += block->size;
        while (now.bytes - now.last->size >= size) {
            now.bytes -= now.last->size;
            now.last = now.last->before;
        }
        if (now.bytes < size || (found && now.bytes > out->bytes)) continue;
        found = true;
        *out = now;
    }
    return found;
}

/* ------------------------------------------------------- joining, cutting, growing */

/* Joins a block with the free neighbour after it. Uses are joined by their maximum: whoever takes
 * the result must be after the users of both. */
void ms_pool_absorb(ms_pool *pool, ms_block *block, ms_block *other)
{
    block->size += other->size;
    block->after = other->after;
    if (other->after) other->after->before = block;
    else pool->last = block;
    for (uint16_t i = 0; i < pool->engine->stream_count; i++)
        if (other->uses[i] > block->uses[i]) block->uses[i] = other->uses[i];
    struct_give(pool, other);
}

/* Cuts the block to `size` and frees the rest, which inherits the uses and the time of the whole. A
 * rest below MS_POOL_SPLIT stays with the block: such small blocks would only fill the bins. The
 * rest is covered for whoever is after the former users of the whole. */
void ms_pool_split(ms_pool *pool, ms_block *block, uint64_t size)
{
    if (block->size - size < MS_POOL_SPLIT) return;
    ms_block *rest = ms_pool_struct_take(pool);
    rest->offset = block->offset + size;
    rest->size = block->size - size;
    rest->freed = block->freed;
    rest->apart = block->apart;
    memcpy(rest->uses, block->uses, sizeof rest->uses);
    rest->before = block;
    rest->after = block->after;
    if (rest->after) rest->after->before = rest;
    else pool->last = rest;
    block->after = rest;
    block->size = size;
    ms_pool_list_add(pool, rest);
}

/* Makes one block of the row, off the free lists, of `size` bytes. What is left of the last one
 * keeps its own uses. */
ms_block *ms_pool_join_row(ms_pool *pool, ms_pool_row found, uint64_t size)
{
    ms_block *block = found.first;
    ms_pool_list_remove(pool, found.last);
    ms_pool_split(pool, found.last, size - (found.bytes - found.last->size));
    const ms_block *end = found.last->after;
    if (block != found.last) ms_pool_list_remove(pool, block);
    while (block->after != end) {
        ms_block *next = block->after;
        if (next != found.last) ms_pool_list_remove(pool, next);
        if (next->freed > block->freed) block->freed = next->freed;
        block->apart |= next->apart;
        ms_pool_absorb(pool, block, next);
    }
    return block;
}

static uint64_t round_up(uint64_t bytes, uint64_t grain)
{
    return (bytes + grain - 1) & ~(grain - 1);
}

/* Commits memory up to `end` at least, and answers up to where; 0: the machine refuses. It is a
 * whole piece, but the pool never has more than its limit, in whole granules. A machine that has no
 * large piece left may have what is needed. */
static uint64_t commit_upto(ms_pool *pool, uint64_t end)
{
    char *at = pool->base + pool->committed;
    uint64_t least = round_up(end, MS_POOL_GRANULE), upto = round_up(end, pool->grain),
             most = round_up(pool->limit, MS_POOL_GRANULE) + pool->bare;
    if (most > pool->reserved) most = pool->reserved;
    if (upto > most) upto = most;
    if (least > most) least = most;
    if (!pool->commit(pool->commit_user, at, upto - pool->committed)) return upto;
    if (pool->grain <= MS_POOL_GROW || least == upto) return 0;
    return pool->commit(pool->commit_user, at, least - pool->committed) ? 0 : least;
}

/* Moves the top of the arena up to `end`; false where the limit or the machine refuses.
 * memory.reserved counts what was handed out at least once. */
bool ms_pool_raise_top(ms_pool *pool, uint64_t end)
{
    ms_engine *engine = pool->engine;
    if (end - pool->bare > pool->limit || end > pool->reserved) return false;
    if (end > pool->committed) {
        uint64_t upto = commit_upto(pool, end);
        pool->is_full = !upto;
        if (pool->is_full) return false;
        pool->committed = upto;
        ms_log(&engine->context, MS_LOG_DEBUG, "a memory pool grows to %llu MiB (live %llu MiB)",
               (unsigned long long)(upto >> 20), (unsigned long long)(engine->memory.live >> 20));
    }
    if (!ms_pool_is_offload(pool)) engine->memory.reserved += end - pool->top;
    pool->top = end;
    pool->grew = true;
    return true;
}

/* A block at the end of the arena, in no list. */
ms_block *ms_pool_append(ms_pool *pool, uint64_t offset, uint64_t size)
{
    ms_block *block = ms_pool_struct_take(pool);
    block->offset = offset;
    block->size = size;
    block->before = pool->last;
    if (pool->last) pool->last->after = block;
    pool->last = block;
    return block;
}

void ms_pool_join_free(ms_pool *pool, bool (*may)(const ms_stream *, const ms_block *),
                       const ms_stream *stream)
{
    ms_block *block = pool->last;
    if (!block) return;
    for (ms_block *before = block->before; before; before = block->before) {
        if (block->freed && before->freed
            && (!may || (may(stream, block) && may(stream, before)))) {
            ms_pool_list_remove(pool, block);
            ms_pool_list_remove(pool, before);
            if (block->freed > before->freed) before->freed = block->freed;
            before->apart |= block->apart;
            ms_pool_absorb(pool, before, block);
            ms_pool_list_add(pool, before);
        }
        block = before;
    }
}
