/* pool_blocks.h: the blocks of a pool's arena. For pool*.c only.
 *
 * Invariants
 * - Blocks follow one after the other, without gaps, from the start of the arena to pool->top. Each
 *   is in use, free, or without memory (`bare`). Free ones are in a list by size; a search takes
 * one off its list before it changes it.
 * - Addresses up to pool->committed have memory, except those of blocks without memory, which are
 *   whole granules. The pool has handed out top - bare bytes, at most its limit.
 * - Structs are reserved before anything changes. */
#ifndef MOONSHARD_EXEC_POOL_BLOCKS_H
#define MOONSHARD_EXEC_POOL_BLOCKS_H

#include "exec/state.h"

#define MS_POOL_ALIGN 64u
#define MS_POOL_GROW (32ull << 20)   /* commit in pieces of this size, or of a multiple on a GPU */
#define MS_POOL_GRANULE (2ull << 20) /* memory is moved in multiples of this; see pool_move.c */

/* Neighbours without gaps, all of them free, that are large enough together. */
typedef struct ms_pool_row {
    ms_block *first, *last;
    uint64_t bytes; /* of all of them */
} ms_pool_row;

static inline bool ms_pool_is_offload(const ms_pool *pool)
{
    return pool == &pool->engine->offload;
}
uint32_t ms_pool_bin_of(uint64_t size);
ms_status ms_pool_reserve_structs(ms_pool *pool, uint32_t count);
/* One of those that were reserved. */
ms_block *ms_pool_struct_take(ms_pool *pool);
void ms_pool_list_add(ms_pool *pool, ms_block *block);
void ms_pool_list_remove(ms_pool *pool, ms_block *block);
/* A row of at least `size` bytes that were freed at `before` or earlier; false: there is none. */
bool ms_pool_find_row(const ms_pool *pool, uint64_t size, uint64_t before, ms_pool_row *out);
/* Joins free neighbours, if both may be joined for the stream; may NULL: all. */
void ms_pool_join_free(ms_pool *pool, bool (*may)(const ms_stream *, const ms_block *),
                       const ms_stream *stream);
void ms_pool_absorb(ms_pool *pool, ms_block *block, ms_block *other);
void ms_pool_split(ms_pool *pool, ms_block *block, uint64_t size);
/* Takes one struct at most. */
ms_block *ms_pool_join_row(ms_pool *pool, ms_pool_row found, uint64_t size);
/* False: the limit, the addresses or the machine refuse. Then pool->is_full tells the last. */
bool ms_pool_raise_top(ms_pool *pool, uint64_t end);
ms_block *ms_pool_append(ms_pool *pool, uint64_t offset, uint64_t size);

#endif
