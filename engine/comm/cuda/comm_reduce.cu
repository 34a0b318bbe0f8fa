/* comm_reduce.cu: reductions of equal tensors, copies, and words for the host.
 *
 * The bits of a reduction are the CPU's: numbers are added one by one, in f32, and no multiply-add
 * is fused (engine/cmake/cuda.cmake). */
#include "comm/cuda/comm_reduce.h"

#include "tensor/cuda/device.h"

/* A float as a cast to dtype and back would leave it. */
MS_DEVICE float rounded_to(uint8_t dtype, float x)
{
    if (dtype == MS_F16) return ms_f16_wide(ms_f16_narrow(x));
    return dtype == MS_BF16 ? ms_bf16_wide(ms_bf16_narrow(x)) : x;
}

/* The least and the greatest of equal numbers is the number. */
MS_DEVICE float reduced(const ms_cuda_alike &args, float x)
{
    float sum = x;
    switch (args.op) {
    case MS_REDUCE_OP_MIN:
    case MS_REDUCE_OP_MAX: return x;
    case MS_REDUCE_OP_PROD:
        for (uint32_t r = 1; r < args.ranks; r++) sum = sum * x;
        return sum;
    default:
        for (uint32_t r = 1; r < args.ranks; r++) sum = sum + x;
        return sum;
    }
}

/* Dividing by a power of two and multiplying by its inverse give the same bits. */
MS_KERNEL_FREE(comm_reduce_floats, ms_cuda_alike, 256)
{
    bool rounds = args.memory != args.dtype;
    for (int64_t i = GRID_FIRST * 8; i < args.length; i += GRID_STEP * 8) {
        float x[8];
        ms_get8(args.in, i, args.length, args.memory, x);
        MS_UNROLL for (int k = 0; k < 8; k++)
        {
            if (rounds) x[k] = rounded_to(args.dtype, x[k]);
            if (args.op == MS_REDUCE_OP_PREMUL_SUM) x[k] = x[k] * args.factor;
            x[k] = reduced(args, x[k]);
            if (args.op == MS_REDUCE_OP_AVG) x[k] = x[k] / (float)args.ranks;
            if (rounds) x[k] = rounded_to(args.dtype, x[k]);
        }
        ms_put8(args.out, i, args.length, args.memory, x);
    }
}

/* In 64 bits, of which the lowest ones are those of sums and products that wrap. Of bool, a sum is
 * `or` and a product `and`, which leave the value as it is. */
MS_KERNEL_FREE(comm_reduce_integers, ms_cuda_alike, 256)
{
    bool stays = args.dtype == MS_BOOL || args.op == MS_REDUCE_OP_MIN
                 || args.op == MS_REDUCE_OP_MAX;
    for (int64_t i = GRID_FIRST; i < args.length; i += GRID_STEP) {
        uint64_t x = (uint64_t)ms_read_whole(args.in, i, args.memory), result = x;
        if (!stays && args.op != MS_REDUCE_OP_PROD) result = x * args.ranks;
        for (uint32_t r = 1; !stays && args.op == MS_REDUCE_OP_PROD && r < args.ranks; r++)
            result *= x;
        ms_write_whole(args.out, i, args.memory, (int64_t)result);
    }
}

/* 16 bytes at a time where both addresses allow it. */
MS_KERNEL_FREE(comm_copy, ms_cuda_piece, 256)
{
    bool aligned = ((uintptr_t)args.from | (uintptr_t)args.to) % sizeof(ms_chunk) == 0;
    int64_t chunks = aligned ? args.bytes / (int64_t)sizeof(ms_chunk) : 0,
            done = chunks * (int64_t)sizeof(ms_chunk);
    const ms_chunk *from = reinterpret_cast<const ms_chunk *>(args.from);
    ms_chunk *to = reinterpret_cast<ms_chunk *>(args.to);
    for (int64_t i = GRID_FIRST; i < chunks; i += GRID_STEP) to[i] = from[i];
    for (int64_t i = done + GRID_FIRST; i < args.bytes; i += GRID_STEP) args.to[i] = args.from[i];
}

/* The end of the kernel makes it visible to the host. */
MS_KERNEL_FREE(comm_tell, ms_cuda_word, 1) { *args.word = 1; }
