/* pool.c: stream-ordered memory pools: an arena each, best fit, reuse decided by recorded waits
 * alone.
 *
 * A freed block keeps, for each stream, the last number that used it. It is "covered" for a stream
 * whose clock has passed all of these: then it can be handed out at once. Order of choice for a
 * request:
 * (1) a covered block;
 * (2) a row of free neighbours that were freed before the end of the last step, with waits inserted
 *     on the asking stream: these uses are over, or nearly so;
 * (3) new memory while under the limit;
 * (4) any row of free neighbours, with waits; what is missing to it at the top of the arena is new
 *     memory;
 * (5) what the application's collector frees;
 * (6) free memory of other places, whose addresses it loses (pool_move.c).
 * (4) comes before (3) in a pool that would grow for ever: see takes_any. One that grows late gets
 * a spare block with (3) or (4), once: see add_spare. Nothing here asks whether a use has happened,
 * so offsets and peak are the same in every run, with data or without.
 *
 * A freed block is joined with its free neighbours, and the whole is covered for whoever is after
 * all of their users. For a block that was dropped, to be taken again by another stream than its
 * last user's, that would be too late: its neighbours are freed and used all the time, and the
 * arena would grow with each drop. Such a block stays apart. It is joined with neighbours where a
 * request finds no block, and then only for a stream that all of them are covered for. */
#include "exec/pool.h"

#include <stdio.h>
#include <string.h>

#include "exec/pool_blocks.h"
#include "exec/pool_move.h"
#include "exec/static_block.h"
#include "exec/storage.h"
#include "exec/stream.h"

#define MS_ARENA_GROW (2ull << 20) /* committing there takes the pages at once */
#define MS_POOL_SCAN 64            /* blocks of a bin that are looked at for the best fit */
#define MS_POOL_ADDRESSES 4        /* times the limit */
#define MS_PRESSURE_MIN (8ull << 20)
/* Bounds of what a pool takes by growing where it has free blocks: see takes_any. */
#define MS_POOL_GROWING_STEPS 16
#define MS_POOL_SETTLED_STEPS 96
#define MS_POOL_SPARE_STEPS 8
#define MS_POOL_FREE_GROWTH (64ull << 20)

/* A pool of the engine takes its memory from the device. */
static int commit_own(void *user, void *address, uint64_t bytes)
{
    const ms_pool *pool = user;
    return pool->memory->commit(pool->engine, address, bytes);
}

/* How much is committed at a time. Each piece is some calls of the driver on a GPU, which may wait
 * for its work, so pieces are large there. A small GPU, a slice of one or a small limit has smaller
 * ones: of a piece that is begun up to all may be unused, which is less than 1/32 of the limit. */
static uint64_t piece_for(const ms_device_memory *memory, uint64_t limit)
{
    uint64_t bytes = MS_POOL_GROW;
    while (bytes < memory->piece_most && bytes * 2 <= limit / 32) bytes *= 2;
    return bytes;
}

/* Reserves address space, so that the arena never moves: addresses stay valid for the life of a
 * storage. Where memory can get other addresses, there are more addresses than memory. Otherwise
 * the range is a little larger than the limit, as commits are rounded up to whole pieces. */
static ms_status open_own(ms_pool *pool, ms_engine *engine, const ms_device_memory *memory,
                          uint64_t limit)
{
    pool->engine = engine;
    pool->limit = limit;
    pool->grain = piece_for(memory, limit);
    pool->moves = memory->moves && memory->moves(engine);
    pool->memory = memory;
    pool->commit = commit_own;
    pool->commit_user = pool;
    /* Address space only; where that is rationed, less of it will do. */
    uint64_t once = (limit + (2 * MS_POOL_GROW - 1)) & ~(MS_POOL_GROW - 1);
    for (uint64_t bytes = pool->moves ? MS_POOL_ADDRESSES * once : once; bytes >= MS_POOL_GROW;
         bytes = bytes > once ? once : bytes / 2) {
        pool->base = memory->reserve(engine, bytes);
        if (pool->base) {
            pool->reserved = bytes & ~(MS_POOL_GROW - 1);
            return MS_OK;
        }
    }
    return ms_engine_fail(
        engine, MS_ERROR_MEMORY,
        "no address space for the memory pool (%llu bytes asked): raise the limit of ulimit -v, or "
        "ask for less (--memory BYTES, or memory_bytes of ms.init)",
        (unsigned long long)limit);
}

/* A limit that the options give, where the device has less. It is kept, as others may leave. */
static void warn_of_limit(ms_engine *engine, uint64_t limit, uint32_t sharers)
{
    uint64_t total = 0;
    const ms_device *device = engine->device;
    uint64_t available = device->available ? device->available(engine, &total) : 0;
    if (!total || limit <= available / sharers) return;
    ms_log(&engine->context, MS_LOG_WARN,
           "a limit of %llu bytes of memory (--memory BYTES, or memory_bytes of ms.init), but %llu "
           "of the %llu bytes of %s:%u are free, for %u rank%s: memory may end before the limit",
           (unsigned long long)limit, (unsigned long long)available, (unsigned long long)total,
           device->name, engine->options.device_index, sharers, sharers == 1 ? "" : "s");
}

ms_status ms_pool_open(ms_engine *engine, uint64_t limit, uint32_t sharers)
{
    if (limit) warn_of_limit(engine, limit, sharers);
    else limit = engine->device->memory->capacity(engine) / sharers;
    engine->memory.limit = limit;
    engine->memory_threshold = MS_PRESSURE_MIN;
    return open_own(&engine->pool, engine, engine->device->memory, limit);
}

static ms_status open_offload(ms_engine *engine)
{
    const ms_device_memory *outside = engine->device->outside;
    if (!outside)
        return open_own(&engine->offload, engine, engine->device->memory, engine->pool.limit);
    ms_status status = outside->check ? outside->check(engine) : MS_OK;
    if (status) return status;
    return open_own(&engine->offload, engine, outside, outside->capacity(engine));
}

ms_status ms_storage_new_offloaded(ms_stream *stream, size_t bytes, ms_storage **out)
{
    ms_engine *engine = stream->engine;
    ms_status status = engine->offload.base ? MS_OK : open_offload(engine);
    return status ? status : ms_storage_new_in(&engine->offload, stream, bytes, out);
}

/* Frees the structs of blocks by the chunk; blocks that are still in use need no treatment of their
 * own. */
static void pool_close(ms_pool *pool)
{
    ms_context *context = &pool->engine->context;
    for (size_t i = 0; i < pool->chunk_count; i++) ms_release(context, pool->chunks[i]);
    ms_release(context, pool->chunks);
    memset(pool, 0, sizeof *pool);
}

/* Safe on an engine that failed to open: a pool without an engine was never opened. */
void ms_pool_close(ms_engine *engine)
{
    ms_pool *pools[] = { &engine->pool, &engine->offload };
    for (int i = 0; i < 2; i++) {
        ms_pool *pool = pools[i];
        if (!pool->engine) continue;
        if (pool->base) pool->memory->unreserve(engine, pool->base, pool->reserved);
        pool_close(pool);
    }
}

void ms_pool_count_new(ms_pool *pool, uint64_t bytes)
{
    ms_memory *m = &pool->engine->memory;
    uint64_t *live = ms_pool_is_offload(pool) ? &m->offload_live : &m->live;
    uint64_t *peak = ms_pool_is_offload(pool) ? &m->offload_peak : &m->peak;
    *live += bytes;
    if (*live > *peak) *peak = *live;
    pool->live += bytes;
    if (pool->live <= pool->live_peak) return;
    pool->live_peak = pool->live;
    /* Another kind of step has begun if it is by more than a little. */
    if (pool->live_peak - pool->grown_for <= pool->grown_for / 8) return;
    pool->grown_for = pool->live_peak;
    pool->grown_at = pool->steps;
    pool->growing_steps = 0;
}

void ms_pool_count_gone(ms_pool *pool, uint64_t bytes)
{
    ms_memory *m = &pool->engine->memory;
    pool->live -= bytes;
    if (ms_pool_is_offload(pool)) m->offload_live -= bytes;
    else m->live -= bytes;
}

/* A pool over memory that a layer above has brought, such as a symmetric heap. It shares the
 * counters of live and peak memory with the engine's pool. */
struct ms_arena {
    ms_pool pool;
};

/* The caller keeps the memory and commits it through `commit`; the arena must be freed before the
 * memory is. */
ms_status ms_arena_new(ms_engine *engine, void *base, uint64_t bytes, ms_commit_function commit,
                       void *user, ms_arena **out)
{
    void *memory = NULL;
    if (!engine->device->adopt)
        return ms_engine_fail(engine, MS_ERROR_UNSUPPORTED,
                              "device \"%s\" cannot use memory of the host", engine->device->name);
    ms_status status = ms_allocate(&engine->context, sizeof(ms_arena), "memory pool", &memory);
    if (!status) status = engine->device->adopt(engine, base, bytes);
    if (status) {
        ms_release(&engine->context, memory);
        return status;
    }
    ms_arena *arena = memory;
    arena->pool = (ms_pool){ .engine = engine,
                             .base = base,
                             .reserved = bytes,
                             .limit = bytes,
                             .grain = MS_ARENA_GROW,
                             .commit = commit,
                             .commit_user = user };
    *out = arena;
    return MS_OK;
}

/* Its storages must be gone, since their blocks are in this pool. */
void ms_arena_free(ms_arena *arena)
{
    if (!arena) return;
    ms_engine *engine = arena->pool.engine;
    engine->memory.reserved -= arena->pool.top;
    engine->device->disown(engine, arena->pool.base, arena->pool.reserved);
    pool_close(&arena->pool);
    ms_release(&engine->context, arena);
}

/* The storage remembers its pool and gives the block back there. */
ms_status ms_arena_storage(ms_arena *arena, ms_stream *stream, size_t bytes, ms_storage **out)
{
    return ms_storage_new_in(&arena->pool, stream, bytes, out);
}

/* Whether the stream is after all former uses of the block. Its own uses are in order by
 * themselves. Only clocks are read and never what has run, so the answer is the same in every
 * run. */
static bool covered(const ms_stream *stream, const ms_block *block)
{
    for (uint32_t i = 0; i < stream->engine->stream_count; i++)
        if (i != stream->index && block->uses[i] > stream->clock[i]) return false;
    return true;
}

/* The smallest covered block of at least `size` among the first MS_POOL_SCAN of its bin, else one
 * of the next bin that has any. Equal sizes are decided by address, which keeps the choice the same
 * in every run and packs the arena from below. */
static ms_block *find_covered(const ms_pool *pool, const ms_stream *stream, uint64_t size)
{
    for (uint32_t bin = ms_pool_bin_of(size); bin < MS_POOL_BINS; bin++) {
        ms_block *best = NULL;
        uint32_t scanned = 0;
        for (ms_block *block = pool->bins[bin]; block && scanned < MS_POOL_SCAN;
             block = block->next, scanned++)
            if (block->size >= size
                && (!best || block->size < best->size
                    || (block->size == best->size && block->offset < best->offset))
                && covered(stream, block))
                best = block;
        if (best) return best;
    }
    return NULL;
}

/* ----------------------------------------------------------- taking, giving */

/* New memory at the top of the arena; NULL where the limit or the machine refuses. A covered free
 * block at the top is extended in place of leaving a hole below the new block. */
static ms_block *grow(ms_pool *pool, ms_stream *stream, uint64_t size)
{
    ms_block *last =
        pool->last && pool->last->freed && covered(stream, pool->last) ? pool->last : NULL;
    if (last && last->size >= size) { /* beyond what find_covered scanned */
        ms_pool_list_remove(pool, last);
        return last;
    }
    uint64_t begin = last ? last->offset : pool->top;
    if (!ms_pool_raise_top(pool, begin + size)) return NULL;
    if (last) {
        ms_pool_list_remove(pool, last);
        last->size = size;
        return last;
    }
    return ms_pool_append(pool, begin, size);
}

/* The free blocks at the top of the arena and as much new memory as is missing to `size`, off the
 * free lists; NULL where the limit or the machine refuses. */
static ms_block *grow_top(ms_pool *pool, uint64_t size)
{
    ms_pool_row top = { .last = pool->last };
    for (ms_block *block = pool->last; block && block->freed; block = block->before) {
        top.first = block;
        top.bytes += block->size;
    }
    if (!top.first || top.bytes >= size || !ms_pool_raise_top(pool, pool->top + size - top.bytes))
        return NULL;
    ms_block *block = ms_pool_join_row(pool, top, top.bytes);
    block->size = size;
    return block;
}

/* Notes where the pool is when the first request or free after a step's end comes. */
static void note_step(ms_pool *pool)
{
    if (pool->steps == pool->engine->steps) return;
    pool->steps = pool->engine->steps;
    pool->frees_before = pool->frees;
    if (pool->grew) pool->growing_steps++;
    pool->grew = false;
}

/* Whether the pool takes any free memory, also what was used a moment ago, before it grows by
 * `size`. Waits for such uses can cost time, and healthy runs grow in a few steps only, to up to
 * twice their peak. So a pool takes any memory if it has grown in many steps since its peak rose,
 * if many steps have passed since then, or if it is beyond what steps explain. */
static bool takes_any(const ms_pool *pool, uint64_t size)
{
    uint64_t peak = pool->used + size > pool->used_peak ? pool->used + size : pool->used_peak,
             bound = (pool->steps ? 3 : 2) * peak;
    if (bound < MS_POOL_FREE_GROWTH) bound = MS_POOL_FREE_GROWTH;
    return pool->growing_steps >= MS_POOL_GROWING_STEPS
           || pool->steps - pool->grown_at >= MS_POOL_SETTLED_STEPS
           || pool->top - pool->bare + size > bound;
}

/* A free block at the top of the arena, as large as the largest request. A pool gets one, if it
 * still grows MS_POOL_SPARE_STEPS steps after live memory last rose, and not because more is in use
 * than ever: there the places of a step differ from those of the step before, and sooner or later
 * some request would find no row that is long enough. */
static void add_spare(ms_pool *pool)
{
    if (pool->has_spare || pool->steps - pool->grown_at < MS_POOL_SPARE_STEPS) return;
    uint64_t offset = pool->top;
    pool->has_spare = true;
    if (!ms_pool_raise_top(pool, offset + pool->largest)) return;
    ms_block *block = ms_pool_append(pool, offset, pool->largest);
    block->freed = 1; /* before any step's end */
    ms_pool_list_add(pool, block);
}

/* A block of at least `size` bytes for which the stream may have to wait, off the free lists; or
 * NULL. */
static ms_block *find_or_grow(ms_pool *pool, ms_stream *stream, uint64_t size)
{
    ms_pool_row found;
    if (ms_pool_find_row(pool, size, pool->frees_before, &found))
        return ms_pool_join_row(pool, found, size);
    bool any = takes_any(pool, size), needs = pool->used + size > pool->used_peak;
    if (any && ms_pool_find_row(pool, size, UINT64_MAX, &found))
        return ms_pool_join_row(pool, found, size);
    uint64_t top = pool->top;
    ms_block *block = grow(pool, stream, size);
    if (!block && !any && ms_pool_find_row(pool, size, UINT64_MAX, &found))
        return ms_pool_join_row(pool, found, size);
    if (!block) block = grow_top(pool, size);
    if (pool->top > top && !needs) add_spare(pool);
    return block;
}

/* Bytes of live storages by the line that made them. script is an id + 1; 0: a free place. */
#define OWNERS 256
typedef struct owner {
    uint32_t script;
    uint64_t bytes;
} owner;

/* Adds up live bytes by script line in one pass, with a fixed table, since this runs when memory is
 * used up. Lines beyond OWNERS are left out. */
static void add_up_owners(const ms_engine *engine, owner owners[OWNERS])
{
    for (const ms_storage *one = engine->storages.live; one; one = one->next) {
        if (!one->block) continue;
        for (uint32_t i = 0; i < OWNERS; i++) {
            owner *place = &owners[(one->script + i) % OWNERS];
            if (place->script && place->script != one->script + 1) continue;
            place->script = one->script + 1;
            place->bytes += one->bytes;
            break;
        }
    }
}

/* Below the limit, the device itself has no more. */
static void describe_full(const ms_pool *pool, char *text, size_t bytes)
{
    uint64_t total = 0;
    const ms_engine *engine = pool->engine;
    const ms_device *device = engine->device;
    *text = '\0';
    if (!pool->is_full || pool->memory != device->memory || !device->available) return;
    uint64_t available = device->available(engine, &total);
    snprintf(text, bytes,
             "; %s:%u itself is full: %llu of %llu bytes are free, and other processes "
             "(nvidia-smi lists them), libraries and the kernels' scratch memory have what is not "
             "the pool's: end other processes, or make a smaller batch",
             device->name, engine->options.device_index, (unsigned long long)available,
             (unsigned long long)total);
}

/* The error: what was asked for, what there is, and which script lines hold most of it. */
static ms_status out_of_memory(const ms_pool *pool, uint64_t bytes)
{
    char full[320];
    ms_engine *engine = pool->engine;
    owner all[OWNERS] = { { 0 } };
    char owners[512] = "";
    size_t used = 0;
    add_up_owners(engine, all);
    for (int rank = 0; rank < 5; rank++) {
        owner *most = &all[0];
        for (uint32_t i = 1; i < OWNERS; i++)
            if (all[i].bytes > most->bytes) most = &all[i];
        if (!most->bytes) break;
        const char *name = ms_strings_get(engine->strings, most->script - 1);
        if (!*name) name = "the engine";
        /* In the largest unit of which there is one: a small job has small owners. */
        static const char *const units[] = { "bytes", "KiB", "MiB" };
        int unit = most->bytes >> 20 ? 2 : most->bytes >> 10 ? 1 : 0;
        int wrote =
            snprintf(owners + used, sizeof owners - used, "%s%llu %s made at %s", rank ? ", " : "",
                     (unsigned long long)(most->bytes >> (10 * unit)), units[unit], name);
        if (wrote < 0 || (size_t)wrote >= sizeof owners - used) break;
        used += (size_t)wrote;
        most->bytes = 0;
    }
    ms_memory m = engine->memory;
    if (ms_pool_is_offload(pool))
        return ms_engine_fail(engine, MS_ERROR_MEMORY,
                              "no memory of the host for %llu bytes that are offloaded: offloaded "
                              "live %llu, peak %llu, limit %llu: end other processes, or offload "
                              "less; largest owners of all memory: %s",
                              (unsigned long long)bytes, (unsigned long long)m.offload_live,
                              (unsigned long long)m.offload_peak, (unsigned long long)pool->limit,
                              owners);
    describe_full(pool, full, sizeof full);
    return ms_engine_fail(engine, MS_ERROR_MEMORY,
                          "no memory for %llu bytes: live %llu, peak %llu, kept by the pool %llu, "
                          "limit %llu%s; largest owners: %s",
                          (unsigned long long)bytes, (unsigned long long)m.live,
                          (unsigned long long)m.peak, (unsigned long long)(m.reserved - m.live),
                          (unsigned long long)m.limit, full, owners);
}

/* Makes the stream wait for the former users of a block that it is not after. */
static ms_status wait_for_users(ms_pool *pool, ms_stream *stream, const ms_block *block)
{
    ms_engine *engine = pool->engine;
    for (uint16_t i = 0; i < engine->stream_count; i++) {
        if (i == stream->index || block->uses[i] <= stream->clock[i]) continue;
        ms_status status = ms_stream_wait_seq(stream, engine->streams[i], block->uses[i]);
        if (status) return status;
        engine->memory.waits++;
        ms_log(&engine->context, MS_LOG_DEBUG,
               "memory: stream \"%s\" waits for stream \"%s\" to hand over %llu bytes",
               stream->name, engine->streams[i]->name, (unsigned long long)block->size);
    }
    return MS_OK;
}

/* Takes a block off the free lists, or out of new memory; NULL: there is none. */
static ms_block *choose(ms_pool *pool, ms_stream *stream, uint64_t size)
{
    ms_block *block = find_covered(pool, stream, size);
    if (!block && pool->has_apart) {
        /* Only where the arena would grow otherwise. */
        ms_pool_join_free(pool, covered, stream);
        block = find_covered(pool, stream, size);
    }
    if (!block) return find_or_grow(pool, stream, size);
    ms_pool_list_remove(pool, block);
    return block;
}

/* Follows the order of choice at the top of this file. `live` counts the bytes that were asked for
 * and not the block's, so the peak does not depend on how the arena is cut. Structs come first; a
 * wait that fails puts the block back. The collector gives blocks back while it runs. */
ms_status ms_pool_take(ms_pool *pool, ms_stream *stream, size_t bytes, ms_block **out, char **data,
                       uint64_t uses[MS_STREAMS_MAX])
{
    ms_engine *engine = pool->engine;
    uint64_t canaries = MS_CANARY ? MS_CELLS_MAX : 0;
    /* Also keeps the sum below from overflowing. */
    pool->is_full = pool->reserved < pool->limit;
    if (bytes > pool->reserved || bytes > pool->limit) return out_of_memory(pool, bytes);
    uint64_t size = (bytes + canaries + MS_POOL_ALIGN - 1) & ~(uint64_t)(MS_POOL_ALIGN - 1);
    if (size == 0) size = MS_POOL_ALIGN;
    note_step(pool);
    if (size > pool->largest) pool->largest = size;
    ms_block *block = NULL;
    for (int attempt = 0; !block; attempt++) {
        /* One for a new block, one for the rest of a split or a spare block. */
        ms_status status = ms_pool_reserve_structs(pool, 2);
        if (status) return status;
        block = choose(pool, stream, size);
        if (block) break;
        if (attempt == 0 && engine->collect && engine->collect(engine->collect_user)) continue;
        block = ms_pool_move(pool, size);
        if (!block) return out_of_memory(pool, bytes);
    }
    ms_status status = wait_for_users(pool, stream, block);
    if (status) {
        ms_pool_list_add(pool, block);
        return status;
    }
    ms_pool_split(pool, block, size);
    block->freed = 0;
    block->apart = false;
    memcpy(uses, block->uses, engine->stream_count * sizeof *uses);
    memset(block->uses, 0, engine->stream_count * sizeof *uses);
    ms_pool_count_new(pool, bytes);
    pool->used += block->size;
    if (pool->used > pool->used_peak) pool->used_peak = pool->used;
    *out = block;
    *data = pool->base + block->offset;
    return MS_OK;
}

/* Gives a block back without waiting: it keeps the last use of each stream, and the next taker is
 * put after them. Free neighbours are joined at once, unless one of the two is to stay apart. The
 * block of a static block stays its own. */
void ms_pool_give(ms_pool *pool, ms_block *block, const uint64_t uses[MS_STREAMS_MAX], bool apart)
{
    MS_ASSERT(!block->freed && ms_on_host(pool->engine));
    if (block->fixed) {
        ms_static_block_leave(block->fixed, uses);
        return;
    }
    note_step(pool);
    pool->used -= block->size;
    memcpy(block->uses, uses, pool->engine->stream_count * sizeof *uses);
    block->apart = apart;
    pool->has_apart |= apart;
    if (!apart && block->after && block->after->freed && !block->after->apart) {
        ms_pool_list_remove(pool, block->after);
        ms_pool_absorb(pool, block, block->after);
    }
    if (!apart && block->before && block->before->freed && !block->before->apart) {
        ms_block *before = block->before;
        ms_pool_list_remove(pool, before);
        ms_pool_absorb(pool, before, block);
        block = before;
    }
    block->freed = ++pool->frees;
    ms_pool_list_add(pool, block);
}

/* Of all pools of the engine together. */
ms_memory ms_engine_memory(const ms_engine *engine) { return engine->memory; }

uint64_t ms_engine_memory_beside(const ms_engine *engine)
{
    uint64_t total = 0,
             available = engine->device->available ? engine->device->available(engine, &total) : 0,
             used = total - available;
    /* With the rest of the last piece, which memory.reserved does not count. */
    uint64_t own = engine->pool.committed - engine->pool.bare;
    return used > own ? used - own : 0;
}

/* What is live counts towards the next peak. */
void ms_engine_reset_peak(ms_engine *engine)
{
    engine->memory.peak = engine->memory.live;
    engine->memory.offload_peak = engine->memory.offload_live;
}

/* Never below what is live now, as a peak cannot be. */
void ms_engine_set_peak(ms_engine *engine, uint64_t bytes)
{
    ms_memory *stats = &engine->memory;
    stats->peak = bytes > stats->live ? bytes : stats->live;
}

/* Asked once for a request, before it fails. */
void ms_engine_on_full(ms_engine *engine, bool (*collect)(void *user), void *user)
{
    engine->collect = collect;
    engine->collect_user = user;
}

/* A garbage collector frees tensors only when it runs, and it sees small objects: this tells it to
 * run. */
bool ms_engine_under_pressure(const ms_engine *engine)
{
    return engine->memory.live > engine->memory_threshold;
}

/* The collector runs in proportion to the growth of memory, also of small memory, as loops over
 * small objects take no more than twice what they begin with; but not where its own work, which
 * goes with the application's heap, is more than what it could give back is worth. */
void ms_engine_relieved(ms_engine *engine, uint64_t host_bytes)
{
    uint64_t live = engine->memory.live, growth = live / 2;
    if (growth < MS_PRESSURE_MIN) growth = MS_PRESSURE_MIN;
    if (growth < host_bytes) growth = host_bytes;
    engine->memory_threshold = live + growth;
}
