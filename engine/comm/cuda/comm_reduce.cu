/* comm_reduce.cu: reductions of equal tensors, copies, and words for the host.
 *
 * The bits of a reduction are the CPU's, but for those of a NaN: numbers are added one by one, in
 * f32, and no multiply-add is fused (engine/cmake/cuda.cmake). */
#include "comm/cuda/comm_reduce.h"

#include "ops/cuda/device.h"

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
    bool stays =
        args.dtype == MS_BOOL || args.op == MS_REDUCE_OP_MIN || args.op == MS_REDUCE_OP_MAX;
    for (int64_t i = GRID_FIRST; i < args.length; i += GRID_STEP) {
        uint64_t x = (uint64_t)ms_read_whole(args.in, i, args.memory), result = x;
        if (!stays && args.op != MS_REDUCE_OP_PROD) result = x * args.ranks;
        for (uint32_t r = 1; !stays && args.op == MS_REDUCE_OP_PROD && r < args.ranks; r++)
            result *= x;
        ms_write_whole(args.out, i, args.memory, (int64_t)result);
    }
}

/* 16 bytes at a time where both addresses allow it. */
MS_DEVICE void copy_bytes(char *to, const char *from, int64_t bytes)
{
    bool aligned = ((uintptr_t)from | (uintptr_t)to) % sizeof(ms_chunk) == 0;
    int64_t chunks = aligned ? bytes / (int64_t)sizeof(ms_chunk) : 0,
            done = chunks * (int64_t)sizeof(ms_chunk);
    const ms_chunk *chunks_from = reinterpret_cast<const ms_chunk *>(from);
    ms_chunk *chunks_to = reinterpret_cast<ms_chunk *>(to);
    for (int64_t i = GRID_FIRST; i < chunks; i += GRID_STEP) chunks_to[i] = chunks_from[i];
    for (int64_t i = done + GRID_FIRST; i < bytes; i += GRID_STEP) to[i] = from[i];
}
MS_KERNEL_FREE(comm_copy, ms_cuda_piece, 256) { copy_bytes(args.to, args.from, args.bytes); }

/* ---------------------------------------------- tensors of several ranks
 * (comm/transport/shm/one_gpu.c) */

MS_KERNEL_FREE(comm_direct_copy, ms_cuda_direct, 256)
{
    if (BLOCK_Y >= args.table->count) return;
    const ms_direct_part part = args.table->part[BLOCK_Y];
    copy_bytes(part.to, part.from, part.bytes);
}

/* The table is in the host's memory, so each block reads it once. The number of parts, the same for
 * all threads. */
MS_DEVICE uint32_t fetch_parts(const ms_cuda_direct &args, ms_direct_part *parts, uint32_t *count)
{
    if (THREAD_X == 0) *count = args.table->count;
    ms_barrier();
    for (uint32_t r = (uint32_t)THREAD_X; r < *count; r += (uint32_t)THREADS_X)
        parts[r] = args.table->part[r];
    ms_barrier();
    return *count;
}

/* The CPU takes subnormal numbers for 0, which keeps the sign, before and after it computes. */
MS_DEVICE float flushed(float x)
{
    uint32_t bits = ms_bits(x);
    return bits & 0x7f800000u ? x : ms_float(bits & 0x80000000u);
}
/* A NaN of either side is the result of min and max. */
MS_DEVICE float combined(uint8_t op, float a, float b)
{
    float x = flushed(a), y = flushed(b);
    switch (op) {
    case MS_REDUCE_OP_MIN: return y < x || ms_is_nan(y) ? b : a;
    case MS_REDUCE_OP_MAX: return x < y || ms_is_nan(y) ? b : a;
    case MS_REDUCE_OP_PROD: return flushed(x * y);
    default: return flushed(x + y);
    }
}

/* Eight elements of one part, from i on, as they are reduced. */
MS_DEVICE void contributed(const ms_cuda_direct &args, const ms_direct_part &part, int64_t i,
                           float x[8])
{
    bool rounds = args.memory != args.dtype;
    ms_get8(part.from, i, args.length, args.memory, x);
    MS_UNROLL for (int k = 0; k < 8; k++)
    {
        if (rounds) x[k] = rounded_to(args.dtype, x[k]);
        if (args.op == MS_REDUCE_OP_PREMUL_SUM)
            x[k] = flushed(flushed(x[k]) * flushed(part.factor));
    }
}

MS_KERNEL(comm_direct_floats, ms_cuda_direct, 256)
{
    MS_SHARED(ms_direct_part, parts, MS_LOCAL_RANKS_MAX);
    MS_SHARED(uint32_t, shared_count, 1);
    uint32_t count = fetch_parts(args, parts, shared_count);
    bool rounds = args.memory != args.dtype;
    for (int64_t i = GRID_FIRST * 8; count && i < args.length; i += GRID_STEP * 8) {
        float sum[8], x[8];
        contributed(args, parts[0], i, sum);
        for (uint32_t r = 1; r < count; r++) {
            contributed(args, parts[r], i, x);
            MS_UNROLL for (int k = 0; k < 8; k++) sum[k] = combined(args.op, sum[k], x[k]);
        }
        MS_UNROLL for (int k = 0; k < 8; k++)
        {
            if (args.op == MS_REDUCE_OP_AVG) sum[k] = flushed(flushed(sum[k]) / (float)args.ranks);
            if (rounds) sum[k] = rounded_to(args.dtype, sum[k]);
        }
        for (uint32_t w = 0; w < args.outputs; w++)
            ms_put8(parts[w].to, i, args.length, args.memory, sum);
    }
}

/* Of bool, a sum is `or` and a product `and`. */
MS_DEVICE int64_t joined(uint8_t dtype, uint8_t op, int64_t a, int64_t b)
{
    if (op == MS_REDUCE_OP_MIN) return b < a ? b : a;
    if (op == MS_REDUCE_OP_MAX) return b > a ? b : a;
    if (dtype == MS_BOOL) return op == MS_REDUCE_OP_PROD ? a & b : a | b;
    return (int64_t)(op == MS_REDUCE_OP_PROD ? (uint64_t)a * (uint64_t)b
                                             : (uint64_t)a + (uint64_t)b);
}

/* In 64 bits, of which the lowest ones are those of sums and products that wrap; min and max come
 * from numbers that fit. */
MS_KERNEL(comm_direct_integers, ms_cuda_direct, 256)
{
    MS_SHARED(ms_direct_part, parts, MS_LOCAL_RANKS_MAX);
    MS_SHARED(uint32_t, shared_count, 1);
    uint32_t count = fetch_parts(args, parts, shared_count);
    for (int64_t i = GRID_FIRST; count && i < args.length; i += GRID_STEP) {
        int64_t sum = ms_read_whole(parts[0].from, i, args.memory);
        for (uint32_t r = 1; r < count; r++)
            sum = joined(args.dtype, args.op, sum, ms_read_whole(parts[r].from, i, args.memory));
        for (uint32_t w = 0; w < args.outputs; w++)
            ms_write_whole(parts[w].to, i, args.memory, sum);
    }
}

/* The host polls the word while the stream goes on. */
MS_KERNEL_FREE(comm_tell, ms_cuda_word, 1)
{
    *args.word = 1;
    ms_show_host();
}
