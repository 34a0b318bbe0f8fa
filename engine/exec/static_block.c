/* static_block.c: memory with a fixed address, which storages use one after the other.
 *
 * A static block keeps its block of the pool until it is freed. So its address does not depend on
 * what else is taken from the pool and given back meanwhile. Its memory counts as live while a
 * storage uses it, and otherwise as kept by the pool.
 *
 * Graphs of a device need this: a task whose arguments have the same addresses in each step can be
 * launched again as it was captured. What one rank does alone, such as saving a model, changes
 * where its pool has room. With fixed addresses it does not change the calls that all ranks launch
 * as graphs together (fsdp/static_memory.c). */
#include "exec/static_block.h"

#include <string.h>

#include "exec/pool.h"
#include "exec/stream.h"

ms_status ms_static_block_new(ms_storage *storage, ms_static_block **out)
{
    ms_engine *engine = storage->engine;
    void *memory = NULL;
    MS_ASSERT(ms_on_host(engine) && storage->block && !storage->block->fixed);
    ms_status status = ms_allocate(&engine->context, sizeof(ms_static_block), "a room", &memory);
    if (status) return status;
    ms_static_block *fixed = memory;
    *fixed = (ms_static_block){ .pool = storage->pool,
                                .block = storage->block,
                                .data = storage->data,
                                .bytes = storage->bytes,
                                .storage = storage };
    storage->block->fixed = fixed;
    *out = fixed;
    return MS_OK;
}

/* A block that a storage still uses goes back to the pool when that storage is dropped or released.
 */
void ms_static_block_free(ms_static_block *fixed)
{
    if (!fixed) return;
    ms_engine *engine = fixed->pool->engine;
    ms_block *block = fixed->block;
    uint64_t uses[MS_STREAMS_MAX];
    block->fixed = NULL;
    if (!fixed->storage) {
        memcpy(uses, block->uses, sizeof uses);
        ms_pool_give(fixed->pool, block, uses, true);
    }
    ms_release(&engine->context, fixed);
}

bool ms_static_block_fits(const ms_static_block *fixed, const ms_storage *storage)
{
    return !fixed->storage && fixed->pool == storage->pool && storage->bytes <= fixed->bytes;
}

size_t ms_static_block_bytes(const ms_static_block *fixed) { return fixed->bytes; }
const ms_storage *ms_static_block_storage(const ms_static_block *fixed) { return fixed->storage; }

/* Called by ms_pool_give in place of giving the block back. */
void ms_static_block_leave(ms_static_block *fixed, const uint64_t uses[MS_STREAMS_MAX])
{
    MS_ASSERT(fixed->storage);
    memcpy(fixed->block->uses, uses, fixed->pool->engine->stream_count * sizeof *uses);
    fixed->storage = NULL;
}

ms_status ms_static_block_enter(ms_static_block *fixed, ms_storage *storage, ms_stream *stream,
                                uint64_t uses[MS_STREAMS_MAX])
{
    MS_ASSERT(!storage->block && ms_static_block_fits(fixed, storage));
    ms_engine *engine = fixed->pool->engine;
    size_t bytes = engine->stream_count * sizeof *uses;
    memcpy(uses, fixed->block->uses, bytes);
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        if (i == stream->index || uses[i] <= stream->clock[i]) continue;
        ms_status status = ms_stream_wait_seq(stream, engine->streams[i], uses[i]);
        if (status) return status;
    }
    memset(fixed->block->uses, 0, bytes);
    fixed->storage = storage;
    storage->block = fixed->block;
    storage->data = fixed->data;
    ms_pool_count_new(fixed->pool, storage->bytes);
    return MS_OK;
}
