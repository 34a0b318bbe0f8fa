/* static_block.c: rooms: memory that stays where it is, for storages that use it one after the
 * other.
 *
 * A room keeps its block until the room is freed. So its address does not depend on what else is
 * taken from the pool and given back meanwhile. Its memory counts as live while a storage uses it,
 * and otherwise as kept by the pool. */
#include "exec/static_block.h"

#include <string.h>

#include "exec/pool.h"
#include "exec/stream.h"

ms_status ms_room_new(ms_storage *storage, ms_room **out)
{
    ms_engine *engine = storage->engine;
    void *memory = NULL;
    MS_ASSERT(ms_on_host(engine) && storage->block && !storage->block->room);
    ms_status status = ms_allocate(&engine->context, sizeof(ms_room), "a room", &memory);
    if (status) return status;
    ms_room *room = memory;
    *room = (ms_room){ .pool = storage->pool,
                       .block = storage->block,
                       .data = storage->data,
                       .bytes = storage->bytes,
                       .storage = storage };
    storage->block->room = room;
    *out = room;
    return MS_OK;
}

/* A block that a storage still uses goes back to the pool when that storage is dropped or released.
 */
void ms_room_free(ms_room *room)
{
    if (!room) return;
    ms_engine *engine = room->pool->engine;
    ms_block *block = room->block;
    uint64_t uses[MS_STREAMS_MAX];
    block->room = NULL;
    if (!room->storage) {
        memcpy(uses, block->uses, sizeof uses);
        ms_pool_give(room->pool, block, uses, true);
    }
    ms_release(&engine->context, room);
}

bool ms_room_fits(const ms_room *room, const ms_storage *storage)
{
    return !room->storage && room->pool == storage->pool && storage->bytes <= room->bytes;
}

size_t ms_room_bytes(const ms_room *room) { return room->bytes; }
const ms_storage *ms_room_storage(const ms_room *room) { return room->storage; }

/* Called by ms_pool_give in place of giving the block back. */
void ms_room_leave(ms_room *room, const uint64_t uses[MS_STREAMS_MAX])
{
    MS_ASSERT(room->storage);
    memcpy(room->block->uses, uses, room->pool->engine->stream_count * sizeof *uses);
    room->storage = NULL;
}

ms_status ms_room_enter(ms_room *room, ms_storage *storage, ms_stream *stream,
                        uint64_t uses[MS_STREAMS_MAX])
{
    MS_ASSERT(!storage->block && ms_room_fits(room, storage));
    ms_engine *engine = room->pool->engine;
    size_t bytes = engine->stream_count * sizeof *uses;
    memcpy(uses, room->block->uses, bytes);
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        if (i == stream->index || uses[i] <= stream->clock[i]) continue;
        ms_status status = ms_stream_wait_seq(stream, engine->streams[i], uses[i]);
        if (status) return status;
    }
    memset(room->block->uses, 0, bytes);
    room->storage = storage;
    storage->block = room->block;
    storage->data = room->data;
    ms_pool_count_new(room->pool, storage->bytes);
    return MS_OK;
}
