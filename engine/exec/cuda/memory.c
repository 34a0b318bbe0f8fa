/* memory.c: memory of the GPU for the pool: a range of addresses, whose parts get memory as the
 * pool grows. */
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
    if (self->has_virtual) return self->cuda.reserve(&range->base, range->bytes, 0, 0, 0);
    range->committed = range->bytes;
    return self->cuda.allocate(&range->base, range->bytes);
}

static void *reserve(ms_engine *engine, uint64_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    void *memory = NULL;
    if (ms_allocate(&engine->context, sizeof(ms_cuda_range), "range of addresses", &memory))
        return NULL;
    ms_cuda_range *range = memory;
    range->bytes = round_up(bytes, self->grain);
    ms_cuda_result result = take_addresses(self, range);
    if (result) {
        ms_release(&engine->context, range);
        return NULL;
    }
    range->next = self->ranges;
    self->ranges = range;
    return (void *)(uintptr_t)range->base;
}

static ms_cuda_range *range_of(const ms_cuda_device *self, ms_cuda_address address)
{
    ms_cuda_range *range = self->ranges;
    while (range && (address < range->base || address - range->base >= range->bytes))
        range = range->next;
    return range;
}

/* Memory for the next `bytes` of the range. The mapping keeps it. */
static ms_cuda_result extend(const ms_cuda_device *self, ms_cuda_range *range, size_t bytes)
{
    ms_cuda_allocation properties = of_gpu(self);
    ms_cuda_access access = { .location = properties.location, .flags = MS_CUDA_READ_WRITE };
    ms_cuda_address at = range->base + range->committed;
    ms_cuda_memory memory = 0;
    ms_cuda_result result = self->cuda.memory_create(&memory, bytes, &properties, 0);
    if (result) return result;
    result = self->cuda.map(at, bytes, 0, memory, 0);
    (void)self->cuda.memory_release(memory);
    if (result) return result;
    result = self->cuda.set_access(at, bytes, &access, 1);
    if (result) (void)self->cuda.unmap(at, bytes);
    else range->committed += bytes;
    return result;
}

/* The pool's arenas grow at their top only, in pieces that need not be whole grains. */
static int commit(ms_engine *engine, void *address, uint64_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_address at = (ms_cuda_address)(uintptr_t)address;
    ms_cuda_range *range = range_of(self, at);
    if (!range) return -EFAULT;
    size_t end = round_up(at - range->base + bytes, self->grain);
    if (end > range->bytes) return -ENOMEM;
    if (end <= range->committed) return 0;
    ms_cuda_result result = extend(self, range, end - range->committed);
    return result ? -ENOMEM : 0;
}

static void unreserve(ms_engine *engine, void *address, uint64_t bytes)
{
    (void)bytes;
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_range **at = &self->ranges;
    while (*at && (*at)->base != (ms_cuda_address)(uintptr_t)address) at = &(*at)->next;
    ms_cuda_range *range = *at;
    if (!range) return;
    *at = range->next;
    if (!self->has_virtual) (void)self->cuda.release(range->base);
    else {
        if (range->committed) (void)self->cuda.unmap(range->base, range->committed);
        (void)self->cuda.unreserve(range->base, range->bytes);
    }
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

const ms_device_memory ms_cuda_inside = {
    .capacity = capacity, .reserve = reserve, .commit = commit, .unreserve = unreserve
};
