/* memory.c: memory of the GPU for the pool: a range of addresses, whose parts get memory as the
 * pool grows, and lose it as the pool moves it. */
#include "exec/cuda/memory.h"

#include <errno.h>

#include "exec/cuda/errors.h"

static size_t round_up(size_t bytes, size_t grain) { return (bytes + grain - 1) / grain * grain; }

/* Other processes cannot open it: ranks of a node exchange tensors by NCCL, or through memory of
 * the host, and neither needs a handle; what NCCL would make of one is in
 * comm/transport/nccl/state.h. */
static ms_cuda_allocation of_gpu(const ms_cuda_device *self)
{
    return (ms_cuda_allocation){ .type = MS_CUDA_ALLOCATION_PINNED,
                                 .location = { MS_CUDA_LOCATION_GPU, self->gpu } };
}

/* Where memory cannot be given addresses later, all of it is taken at once. */
static ms_cuda_result take_addresses(const ms_cuda_device *self, ms_cuda_range *range)
{
    if (self->memory.has_virtual) return self->cuda.reserve(&range->base, range->bytes, 0, 0, 0);
    return self->cuda.allocate(&range->base, range->bytes);
}

static void *reserve(ms_engine *engine, uint64_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    void *memory = NULL;
    if (ms_allocate(&engine->context, sizeof(ms_cuda_range), "range of addresses", &memory))
        return NULL;
    ms_cuda_range *range = memory;
    range->bytes = round_up(bytes, self->memory.grain);
    ms_cuda_result result = take_addresses(self, range);
    if (result) {
        ms_release(&engine->context, range);
        return NULL;
    }
    range->next = self->memory.ranges;
    self->memory.ranges = range;
    return (void *)(uintptr_t)range->base;
}

static ms_cuda_range *range_of(const ms_cuda_device *self, ms_cuda_address address)
{
    ms_cuda_range *range = self->memory.ranges;
    while (range && (address < range->base || address - range->base >= range->bytes))
        range = range->next;
    return range;
}

/* ----------------------------------------------------------------- its pieces */

static void release_parked(ms_cuda_device *self)
{
    while (self->memory.parked_count > 0)
        (void)self->cuda.memory_release(self->memory.parked[--self->memory.parked_count].memory);
}

/* New memory without an address. What is parked makes room if need be. */
static ms_cuda_result make(ms_cuda_device *self, size_t bytes, ms_cuda_memory *out)
{
    ms_cuda_allocation properties = of_gpu(self);
    ms_cuda_result result = self->cuda.memory_create(out, bytes, &properties, 0);
    if (!result || !self->memory.parked_count) return result;
    release_parked(self);
    return self->cuda.memory_create(out, bytes, &properties, 0);
}

/* The largest parked piece of at most *bytes, or a new one of just these. */
static ms_cuda_result make_or_take(ms_cuda_device *self, size_t *bytes, ms_cuda_memory *out)
{
    size_t best = self->memory.parked_count;
    for (size_t i = 0; i < self->memory.parked_count; i++)
        if (self->memory.parked[i].bytes <= *bytes
            && (best == self->memory.parked_count
                || self->memory.parked[i].bytes > self->memory.parked[best].bytes))
            best = i;
    if (best == self->memory.parked_count) {
        /* None fits, so none of them will be used. */
        release_parked(self);
        return make(self, *bytes, out);
    }
    *bytes = self->memory.parked[best].bytes;
    *out = self->memory.parked[best].memory;
    self->memory.parked[best] = self->memory.parked[--self->memory.parked_count];
    return MS_CUDA_SUCCESS;
}

/* Room for `count` more pieces in the range, or in the parked ones. */
static bool has_room(ms_engine *engine, ms_cuda_range *range, size_t count)
{
    ms_cuda_device *self = ms_cuda_of(engine);
    if (!range)
        return !ms_grow(&engine->context, (void **)&self->memory.parked,
                        &self->memory.parked_capacity, self->memory.parked_count + count,
                        sizeof *self->memory.parked);
    return !ms_grow(&engine->context, (void **)&range->pieces, &range->capacity,
                    range->count + count, sizeof *range->pieces);
}

/* Gives the piece its address; the range has room for it. */
static ms_cuda_result map(const ms_cuda_device *self, ms_cuda_range *range, ms_cuda_mapped piece)
{
    ms_cuda_result result =
        self->cuda.map(range->base + piece.offset, piece.bytes, 0, piece.memory, 0);
    if (!result) range->pieces[range->count++] = piece;
    return result;
}

static ms_cuda_result allow(const ms_cuda_device *self, ms_cuda_address at, size_t bytes)
{
    ms_cuda_access access = { .location = of_gpu(self).location, .flags = MS_CUDA_READ_WRITE };
    return self->cuda.set_access(at, bytes, &access, 1);
}

/* Takes the address of piece i away. A piece that is kept is parked, which has room. */
static void unmap(ms_cuda_device *self, ms_cuda_range *range, size_t i, bool keeps)
{
    ms_cuda_mapped gone = range->pieces[i];
    (void)self->cuda.unmap(range->base + gone.offset, gone.bytes);
    if (keeps) self->memory.parked[self->memory.parked_count++] = gone;
    else (void)self->cuda.memory_release(gone.memory);
    range->pieces[i] = range->pieces[--range->count];
}

/* The range gets memory in one piece, unless there are parked ones. After an error it has none. */
static int commit(ms_engine *engine, void *address, uint64_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_address at = (ms_cuda_address)(uintptr_t)address;
    ms_cuda_range *range = range_of(self, at);
    if (!range) return -EFAULT;
    size_t offset = at - range->base, done = 0, before = range->count;
    if (offset + bytes > range->bytes) return -ENOMEM;
    if (!self->memory.has_virtual) return 0;
    ms_cuda_result result = MS_CUDA_SUCCESS;
    while (!result && done < bytes) {
        ms_cuda_mapped piece = { .offset = offset + done, .bytes = bytes - done };
        if (!has_room(engine, range, 1)) break;
        result = make_or_take(self, &piece.bytes, &piece.memory);
        if (result) break;
        result = map(self, range, piece);
        if (result) (void)self->cuda.memory_release(piece.memory);
        else done += piece.bytes;
    }
    if (!result && done == bytes) result = allow(self, at, bytes);
    if (!result && done == bytes) return 0;
    while (range->count > before) unmap(self, range, range->count - 1, false);
    return -ENOMEM;
}

/* ---------------------------------------------------------------- taking it away
 *
 * The driver unmaps whole pieces only, and maps them from their start only, while a pool takes any
 * granules away. What of a piece is to stay is first copied to a piece of its own, which then gets
 * its addresses. So pieces can be large, and no choice of the pool depends on them. */

/* Copies `piece.bytes` at its place in the range to the memory of the piece. */
static ms_cuda_result copy_rest(const ms_cuda_device *self, const ms_cuda_range *range,
                                ms_cuda_mapped piece)
{
    ms_cuda_address at = 0;
    ms_cuda_result result = self->cuda.reserve(&at, piece.bytes, 0, 0, 0);
    if (result) return result;
    result = self->cuda.map(at, piece.bytes, 0, piece.memory, 0);
    if (!result) {
        result = allow(self, at, piece.bytes);
        if (!result)
            result =
                self->cuda.copy_inside(at, range->base + piece.offset, piece.bytes, self->reader);
        if (!result) result = self->cuda.stream_synchronize(self->reader);
        (void)self->cuda.unmap(at, piece.bytes);
    }
    (void)self->cuda.unreserve(at, piece.bytes);
    return result;
}

/* What stays of the pieces at the ends of [from, to): copies, which have no addresses yet. */
static ms_cuda_result keep_ends(ms_cuda_device *self, const ms_cuda_range *range, size_t from,
                                size_t to, ms_cuda_mapped kept[2], size_t *count)
{
    for (size_t i = 0; i < range->count; i++) {
        ms_cuda_mapped piece = range->pieces[i];
        size_t end = piece.offset + piece.bytes;
        if (piece.offset >= to || end <= from) continue;
        for (int side = 0; side < 2; side++) {
            ms_cuda_mapped rest = { .offset = side ? to : piece.offset };
            size_t rest_end = side ? end : from;
            if (rest_end <= rest.offset) continue;
            rest.bytes = rest_end - rest.offset;
            ms_cuda_result result = make(self, rest.bytes, &rest.memory);
            if (result) return result;
            kept[(*count)++] = rest;
            result = copy_rest(self, range, rest);
            if (result) return result;
        }
    }
    return MS_CUDA_SUCCESS;
}

/* Values are lost: nothing that any stream has written counts any more. */
static void fail_all(ms_engine *engine, ms_cuda_result result)
{
    for (uint16_t i = 0; i < engine->stream_count; i++)
        if (engine->streams[i]->enqueued)
            ms_cuda_fail_result(engine->streams[i], 1, 0, "memory that keeps its address", result);
}

/* Gives what stays its addresses again. */
static ms_cuda_result put_back(ms_cuda_device *self, ms_cuda_range *range,
                               const ms_cuda_mapped *kept, size_t count)
{
    ms_cuda_result first = MS_CUDA_SUCCESS;
    for (size_t i = 0; i < count; i++) {
        ms_cuda_result result = map(self, range, kept[i]);
        if (result) (void)self->cuda.memory_release(kept[i].memory);
        else result = allow(self, range->base + kept[i].offset, kept[i].bytes);
        if (!first) first = result;
    }
    return first;
}

static bool moves(const ms_engine *engine) { return ms_cuda_of(engine)->memory.has_virtual; }

static int decommit(ms_engine *engine, void *address, uint64_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_range *range = range_of(self, (ms_cuda_address)(uintptr_t)address);
    ms_cuda_mapped kept[2];
    size_t count = 0;
    if (!range || !has_room(engine, range, 2) || !has_room(engine, NULL, range->count))
        return -ENOMEM;
    size_t from = (ms_cuda_address)(uintptr_t)address - range->base, to = from + bytes;
    ms_cuda_result result = keep_ends(self, range, from, to, kept, &count);
    if (result) {
        while (count > 0) (void)self->cuda.memory_release(kept[--count].memory);
        return -ENOMEM;
    }
    for (size_t i = range->count; i-- > 0;) {
        size_t begin = range->pieces[i].offset, end = begin + range->pieces[i].bytes;
        if (begin < to && end > from) unmap(self, range, i, begin >= from && end <= to);
    }
    result = put_back(self, range, kept, count);
    if (result) fail_all(engine, result);
    return result ? -EIO : 0;
}

static void unreserve(ms_engine *engine, void *address, uint64_t bytes)
{
    (void)bytes;
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_range **at = &self->memory.ranges;
    while (*at && (*at)->base != (ms_cuda_address)(uintptr_t)address) at = &(*at)->next;
    ms_cuda_range *range = *at;
    if (!range) return;
    *at = range->next;
    while (range->count > 0) unmap(self, range, range->count - 1, false);
    if (self->memory.has_virtual) (void)self->cuda.unreserve(range->base, range->bytes);
    else (void)self->cuda.release(range->base);
    release_parked(self);
    ms_release(&engine->context, range->pieces);
    ms_release(&engine->context, range);
}

uint64_t ms_cuda_available(const ms_engine *engine, uint64_t *total)
{
    size_t available = 0, all = 0;
    *total = 0;
    if (ms_cuda_enter(engine)->cuda.memory_info(&available, &all)) return 0;
    *total = all;
    return available;
}

/* Nine tenths of what is free: libraries and the driver need some. */
static uint64_t capacity(const ms_engine *engine)
{
    uint64_t total;
    return ms_cuda_available(engine, &total) / 10 * 9;
}

const ms_device_memory ms_cuda_inside = { .piece_most = 512ull << 20,
                                          .capacity = capacity,
                                          .reserve = reserve,
                                          .commit = commit,
                                          .moves = moves,
                                          .decommit = decommit,
                                          .unreserve = unreserve };
