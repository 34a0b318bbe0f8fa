/* copy.cu: kernels that copy and fill strided memory. Elements are moved as unsigned integers, so
 * every bit pattern survives. */
#include "ops/cuda/copy.h"

#include "ops/cuda/device.h"

MS_DEVICE int64_t offset_of(const ms_loop &loop, int64_t position, int operand)
{
    int64_t offset = 0;
    for (uint32_t d = loop.dims; d-- > 0;) {
        int64_t at = position;
        if (d > 0) {
            at = position % loop.shape[d];
            position /= loop.shape[d];
        }
        offset += at * loop.strides[operand][d];
    }
    return offset;
}

template <class T> MS_DEVICE void copy_strided(const ms_cuda_copy_call &args)
{
    T *to = static_cast<T *>(args.c.to);
    const T *from = static_cast<const T *>(args.c.from);
    for (int64_t i = GRID_FIRST; i < args.count; i += GRID_STEP)
        to[offset_of(args.c.loop, i, 0)] = from[offset_of(args.c.loop, i, 1)];
}
MS_KERNEL_FREE(copy_1, ms_cuda_copy_call, 256) { copy_strided<uint8_t>(args); }
MS_KERNEL_FREE(copy_2, ms_cuda_copy_call, 256) { copy_strided<uint16_t>(args); }
MS_KERNEL_FREE(copy_4, ms_cuda_copy_call, 256) { copy_strided<uint32_t>(args); }
MS_KERNEL_FREE(copy_8, ms_cuda_copy_call, 256) { copy_strided<uint64_t>(args); }

MS_KERNEL_FREE(copy_flat, ms_cuda_flat_copy_call, 256)
{
    ms_chunk *to = static_cast<ms_chunk *>(args.to);
    const ms_chunk *from = static_cast<const ms_chunk *>(args.from);
    for (int64_t i = GRID_FIRST; i < args.chunks; i += GRID_STEP) to[i] = from[i];
    if (GRID_FIRST < args.tail)
        reinterpret_cast<uint8_t *>(to + args.chunks)[GRID_FIRST] =
            reinterpret_cast<const uint8_t *>(from + args.chunks)[GRID_FIRST];
}

template <class T> MS_DEVICE void fill_strided(const ms_cuda_fill_call &args)
{
    T *to = static_cast<T *>(args.f.to);
    for (int64_t i = GRID_FIRST; i < args.count; i += GRID_STEP)
        to[offset_of(args.f.loop, i, 0)] = (T)args.f.bits;
}
MS_KERNEL_FREE(fill_1, ms_cuda_fill_call, 256) { fill_strided<uint8_t>(args); }
MS_KERNEL_FREE(fill_2, ms_cuda_fill_call, 256) { fill_strided<uint16_t>(args); }
MS_KERNEL_FREE(fill_4, ms_cuda_fill_call, 256) { fill_strided<uint32_t>(args); }
MS_KERNEL_FREE(fill_8, ms_cuda_fill_call, 256) { fill_strided<uint64_t>(args); }

MS_KERNEL_FREE(fill_flat, ms_cuda_flat_fill_call, 256)
{
    ms_chunk *to = static_cast<ms_chunk *>(args.to), chunk;
    chunk.word[0] = chunk.word[2] = (uint32_t)args.bits;
    chunk.word[1] = chunk.word[3] = (uint32_t)(args.bits >> 32);
    for (int64_t i = GRID_FIRST; i < args.chunks; i += GRID_STEP) to[i] = chunk;
    if (GRID_FIRST < args.tail)
        reinterpret_cast<uint8_t *>(to + args.chunks)[GRID_FIRST] =
            (uint8_t)(args.bits >> (GRID_FIRST % 8 * 8));
}
