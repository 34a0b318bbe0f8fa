/* offload.c: memory of the host that kernels use, for what is offloaded. It is registered with the
 * driver, so it is pinned, and has one address for the host and for kernels, which reach it over
 * the bus. So gathers, reductions, optimizer steps and norms are the same tasks as without
 * offloading, and give the same bits.
 *
 * Memory is registered in pieces of one size, as the pool grows. A kernel does not see the pieces.
 * A call of the driver that copies or fills must not go from one into the next: it is made once for
 * each piece. */
#include "exec/cuda/offload.h"

#include <errno.h>

#include "exec/cuda/errors.h"

#define PIECE ((size_t)32 << 20)

static ms_status check(ms_engine *engine)
{
    const ms_cuda_device *self = ms_cuda_enter(engine);
    int can = 0;
    ms_cuda_result result = self->cuda.gpu_attribute(&can, MS_CUDA_HOST_ADDRESSES, self->gpu);
    if (result) return ms_cuda_fail(engine, result, "the GPU cannot be asked");
    if (can) return MS_OK;
    return ms_engine_fail(
        engine, MS_ERROR_UNSUPPORTED,
        "GPU %u cannot use memory of the host at the host's addresses, so nothing "
        "can be offloaded: leave offload out",
        engine->options.device_index);
}

static uint64_t capacity(const ms_engine *engine) { return ms_device_cpu.memory->capacity(engine); }

static void *reserve(ms_engine *engine, uint64_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    void *base = engine->context.os->reserve(engine->context.os->user, bytes);
    if (base)
        self->outside = (ms_cuda_range){ .base = (ms_cuda_address)(uintptr_t)base, .bytes = bytes };
    return base;
}

/* The range grows at its end only, by whole pieces. What was registered before an error stays so.
 */
static int commit(ms_engine *engine, void *address, uint64_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_range *range = &self->outside;
    const ms_os *os = engine->context.os;
    size_t end = (ms_cuda_address)(uintptr_t)address - range->base + bytes;
    while (range->committed < end) {
        if (range->bytes - range->committed < PIECE) return -ENOMEM;
        void *at = (void *)(uintptr_t)(range->base + range->committed);
        int failed = os->commit(os->user, at, PIECE, true);
        if (failed) return failed;
        if (self->cuda.host_register(at, PIECE,
                                     MS_CUDA_REGISTER_PORTABLE | MS_CUDA_REGISTER_MAPPED))
            return -ENOMEM;
        range->committed += PIECE;
    }
    return 0;
}

static void unreserve(ms_engine *engine, void *address, uint64_t bytes)
{
    ms_cuda_device *self = ms_cuda_enter(engine);
    ms_cuda_range *range = &self->outside;
    while (range->committed) {
        range->committed -= PIECE;
        (void)self->cuda.host_unregister((void *)(uintptr_t)(range->base + range->committed));
    }
    *range = (ms_cuda_range){ 0 };
    engine->context.os->unreserve(engine->context.os->user, address, bytes);
}

const ms_device_memory ms_cuda_outside = { .check = check,
                                           .capacity = capacity,
                                           .reserve = reserve,
                                           .commit = commit,
                                           .unreserve = unreserve };

/* --------------------------------------------------------------- piece by piece */

size_t ms_cuda_span(const ms_cuda_device *self, const void *address, size_t bytes)
{
    ms_cuda_address at = (ms_cuda_address)(uintptr_t)address;
    size_t offset = at - self->outside.base, rest = PIECE - offset % PIECE;
    if (at < self->outside.base || offset >= self->outside.committed) return bytes;
    return bytes < rest ? bytes : rest;
}

ms_cuda_result ms_cuda_copy_to(const ms_cuda_device *self, void *to, const void *host, size_t bytes,
                               ms_cuda_stream on)
{
    ms_cuda_result result = MS_CUDA_SUCCESS;
    for (size_t done = 0, some; !result && done < bytes; done += some) {
        char *at = (char *)to + done;
        some = ms_cuda_span(self, at, bytes - done);
        result =
            self->cuda.copy_in((ms_cuda_address)(uintptr_t)at, (const char *)host + done, some, on);
    }
    return result;
}

ms_cuda_result ms_cuda_copy_from(const ms_cuda_device *self, void *host, const void *from,
                                 size_t bytes, ms_cuda_stream on)
{
    ms_cuda_result result = MS_CUDA_SUCCESS;
    for (size_t done = 0, some; !result && done < bytes; done += some) {
        const char *at = (const char *)from + done;
        some = ms_cuda_span(self, at, bytes - done);
        result = self->cuda.copy_out((char *)host + done, (ms_cuda_address)(uintptr_t)at, some, on);
    }
    return result;
}

ms_cuda_result ms_cuda_zero(const ms_cuda_device *self, void *to, size_t bytes, ms_cuda_stream on)
{
    ms_cuda_result result = MS_CUDA_SUCCESS;
    for (size_t done = 0, some; !result && done < bytes; done += some) {
        char *at = (char *)to + done;
        some = ms_cuda_span(self, at, bytes - done);
        result = self->cuda.fill((ms_cuda_address)(uintptr_t)at, 0, some, on);
    }
    return result;
}
