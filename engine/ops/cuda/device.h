/* device.h: the words in which kernels are written, so that one source is a kernel of a GPU (nvcc)
 * and a function of the host, for tests (a C++ compiler). Only this file differs between the two.
 *
 * A kernel is
 *
 *     MS_KERNEL(name, arguments_type, threads)
 *     {
 *         ... args.field ...
 *     }
 *
 * with at most `threads` threads a block; MS_KERNEL_FREE is one without barriers and warp
 * operations. On the host it is `name(const void *args, blocks, threads, shared_bytes)`, found by
 * its name; blocks run one after another, and the threads of a block take turns at barriers.
 *
 * Rules
 * - Sizes of blocks are multiples of 32 where warp operations are used, and all threads of a warp
 *   take part in each; all threads of a block reach each barrier, at the same place. The host's
 *   build checks both. A place is a line; of a function that declares MS_CALLED, and hands
 *   MS_CALLER on to what waits in it, it is a line there and the line that calls it.
 * - The order of additions depends on the shape only, and not on addresses: a thread takes the same
 *   elements in the same order, in pieces of 16 bytes or one by one. No atomic operation touches a
 *   float.
 * - Offsets are 64 bits wide. Addresses are aligned to their elements and no more. */
#ifndef MOONSHARD_OPS_CUDA_DEVICE_H
#define MOONSHARD_OPS_CUDA_DEVICE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "exec/cuda/fault.h"
#include "moonshard/tensor.h"

#define MS_WARP 32

#if defined(__CUDACC__)

#define MS_DEVICE __device__ __forceinline__
#define MS_DEVICE_MEMBER __device__ __forceinline__ /* of a struct */
#define MS_DEVICE_SHARED MS_DEVICE
#define MS_CONSTANT __device__ const
#define MS_KERNEL_BOUND(name, type, ...)                                     \
    static_assert(sizeof(type) <= MS_TASK_ARGS_MAX, "too large for a task"); \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__)                \
        name(const __grid_constant__ type args)
#define MS_KERNEL(name, type, threads) MS_KERNEL_BOUND(name, type, threads)
/* One whose registers leave room for two blocks on a multiprocessor. */
#define MS_KERNEL_PAIRED(name, type, threads) MS_KERNEL_BOUND(name, type, threads, 2)
/* One whose registers leave room for so many blocks on a multiprocessor. */
#define MS_KERNEL_IN(name, type, threads, blocks) MS_KERNEL_BOUND(name, type, threads, blocks)
#define MS_KERNEL_FREE(name, type, threads) MS_KERNEL(name, type, threads)
#define MS_KERNEL_FREE_IN(name, type, threads, blocks) MS_KERNEL_BOUND(name, type, threads, blocks)
#define MS_SHARED(type, name, size) __shared__ type name[size]
/* The shared memory of the launch, aligned to 16 bytes. */
#define MS_SHARED_BYTES(type, name)                          \
    extern __shared__ __align__(16) unsigned char dynamic[]; \
    type *name = reinterpret_cast<type *>(dynamic)

#define THREAD_X ((int32_t)threadIdx.x)
#define THREAD_Y ((int32_t)threadIdx.y)
#define THREADS_X ((int32_t)blockDim.x)
#define THREADS_Y ((int32_t)blockDim.y)
#define BLOCK_X ((int64_t)blockIdx.x)
#define BLOCK_Y ((int64_t)blockIdx.y)
#define BLOCK_Z ((int64_t)blockIdx.z)
#define BLOCKS_X ((int64_t)gridDim.x)
#define BLOCKS_Y ((int64_t)gridDim.y)
#define BLOCKS_Z ((int64_t)gridDim.z)

/* Before a loop over an array of registers, whose length the compiler knows. */
#define MS_UNROLL _Pragma("unroll")
/* Before a loop that would take many registers if it were unrolled. */
#define MS_ROLLED _Pragma("unroll 1")

/* Last in a list of parameters, and of arguments: the line that calls, which only the host needs.
 */
#define MS_CALLED
#define MS_CALLER

#define ms_barrier() __syncthreads()
#define ms_barrier_of_caller() __syncthreads()
#define ms_warp_barrier() __syncwarp()
/* The value of the lane whose number differs in the bits of mask; of lane `lane`. */
template <class T> MS_DEVICE T ms_warp_xor(T value, int mask)
{
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T> MS_DEVICE T ms_warp_from(T value, int lane)
{
    return __shfl_sync(0xffffffffu, value, lane);
}

MS_DEVICE float ms_f16_wide(uint16_t bits)
{
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
MS_DEVICE uint16_t ms_f16_narrow(float x)
{
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
/* Every NaN becomes the same one. */
MS_DEVICE uint16_t ms_bf16_narrow(float x)
{
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
/* Two numbers in a word, the first one in the low half: the bits of two conversions. */
MS_DEVICE uint32_t ms_f16_pair(float low, float high)
{
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
MS_DEVICE uint32_t ms_bf16_pair(float low, float high)
{
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    return bits;
}
/* 1 / x within one unit of the last place. A division proper calls a function, which costs
 * registers. */
MS_DEVICE float ms_reciprocal(float x)
{
    float y;
    asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* Rounded once each, never contracted. */
MS_DEVICE float ms_mul(float a, float b) { return __fmul_rn(a, b); }
MS_DEVICE float ms_add(float a, float b) { return __fadd_rn(a, b); }
/* Of integers only. They return what was there. */
MS_DEVICE uint32_t ms_atomic_add(uint32_t *at, uint32_t value) { return atomicAdd(at, value); }
MS_DEVICE uint64_t ms_atomic_add(uint64_t *at, uint64_t value)
{
    return atomicAdd(reinterpret_cast<unsigned long long *>(at), value);
}
MS_DEVICE uint32_t ms_atomic_or(uint32_t *at, uint32_t value) { return atomicOr(at, value); }
MS_DEVICE int ms_leading_zeros(uint32_t x) { return __clz((int)x); }

/* In memory of the host, where each try is a message on the bus: whoever fails naps before the next
 * one. */
MS_DEVICE bool ms_try_lock(uint32_t *lock)
{
    if (atomicCAS(lock, 0u, 1u) != 0u) return false;
    __threadfence_system();
    return true;
}
MS_DEVICE void ms_nap(void) { __nanosleep(200); }
/* The host, and other GPUs, see what this thread has written before what it writes later. */
MS_DEVICE void ms_show_host(void) { __threadfence_system(); }
MS_DEVICE void ms_unlock(uint32_t *lock)
{
    ms_show_host();
    atomicExch(lock, 0u);
}

#else

#include "moonshard/base.h"

/* tests/cuda/kernels/run.cc. Kernels of the process run one at a time (the stand-in driver sees to
 * that), so the state is one for all. */
struct ms_host_place {
    unsigned thread[3], threads[3], block[3], blocks[3];
    void *shared;
};
extern ms_host_place ms_host;
typedef void ms_host_body(const void *arguments);
void ms_host_run(const char *name, ms_host_body *body, const void *arguments,
                 const unsigned blocks[3], const unsigned threads[3], unsigned most_threads,
                 unsigned shared_bytes, bool free_of_barriers);
/* caller: the line that calls the function which waits at this line, or 0. */
void ms_host_barrier(int line, int caller);
void ms_host_warp_barrier(int line);
/* What lane `lane` of this warp has handed in; all lanes call it, at the same line. */
uint64_t ms_host_exchange(uint64_t value, unsigned lane, int line);

#define MS_DEVICE static inline __attribute__((unused))
/* A function that touches shared memory only. Where the stand-in watches accesses, its own are not
 * watched, which would make products of tiles several times slower. */
#if defined(MS_KERNELS_ARE_WATCHED)
#define MS_DEVICE_SHARED static inline __attribute__((unused, no_sanitize_address))
#else
#define MS_DEVICE_SHARED MS_DEVICE
#endif
#define MS_DEVICE_MEMBER inline
#define MS_CONSTANT static const
#define MS_KERNEL_OF_HOST(name, type, threads, is_free)                                          \
    static_assert(sizeof(type) <= MS_TASK_ARGS_MAX, "too large for a task");                     \
    static void name##_body(const type &args);                                                   \
    static void name##_call(const void *arguments)                                               \
    {                                                                                            \
        name##_body(*static_cast<const type *>(arguments));                                      \
    }                                                                                            \
    extern "C" {                                                                                 \
    __attribute__((visibility("default"))) extern const unsigned name##_bytes;                   \
    const unsigned name##_bytes = sizeof(type);                                                  \
    __attribute__((visibility("default"))) void name(const void *arguments,                      \
                                                     const unsigned blocks[3],                   \
                                                     const unsigned block_threads[3],            \
                                                     unsigned shared_bytes)                      \
    {                                                                                            \
        ms_host_run(#name, name##_call, arguments, blocks, block_threads, threads, shared_bytes, \
                    is_free);                                                                    \
    }                                                                                            \
    }                                                                                            \
    static void name##_body(const type &args)
#define MS_KERNEL(name, type, threads) MS_KERNEL_OF_HOST(name, type, threads, false)
#define MS_KERNEL_PAIRED(name, type, threads) MS_KERNEL(name, type, threads)
#define MS_KERNEL_IN(name, type, threads, blocks) MS_KERNEL(name, type, threads)
#define MS_KERNEL_FREE(name, type, threads) MS_KERNEL_OF_HOST(name, type, threads, true)
#define MS_KERNEL_FREE_IN(name, type, threads, blocks) MS_KERNEL_FREE(name, type, threads)
#define MS_SHARED(type, name, size) static type name[size]
#define MS_SHARED_BYTES(type, name) type *name = static_cast<type *>(ms_host.shared)

#define THREAD_X ((int32_t)ms_host.thread[0])
#define THREAD_Y ((int32_t)ms_host.thread[1])
#define THREADS_X ((int32_t)ms_host.threads[0])
#define THREADS_Y ((int32_t)ms_host.threads[1])
#define BLOCK_X ((int64_t)ms_host.block[0])
#define BLOCK_Y ((int64_t)ms_host.block[1])
#define BLOCK_Z ((int64_t)ms_host.block[2])
#define BLOCKS_X ((int64_t)ms_host.blocks[0])
#define BLOCKS_Y ((int64_t)ms_host.blocks[1])
#define BLOCKS_Z ((int64_t)ms_host.blocks[2])

#define MS_UNROLL
#define MS_ROLLED

#define MS_CALLED , int called_at = __builtin_LINE()
#define MS_CALLER , called_at

#define ms_barrier() ms_host_barrier(__LINE__, 0)
#define ms_barrier_of_caller() ms_host_barrier(__LINE__, called_at)
#define ms_warp_barrier() ms_host_warp_barrier(__LINE__)
template <class T> MS_DEVICE T ms_host_take(T value, unsigned lane, int line)
{
    uint64_t bits = 0;
    T taken;
    static_assert(sizeof value <= sizeof bits, "a lane hands over up to 8 bytes");
    memcpy(&bits, &value, sizeof value);
    bits = ms_host_exchange(bits, lane, line);
    memcpy(&taken, &bits, sizeof taken);
    return taken;
}
MS_DEVICE unsigned ms_host_lane(void)
{
    return (ms_host.thread[0]
            + ms_host.threads[0] * (ms_host.thread[1] + ms_host.threads[1] * ms_host.thread[2]))
           % MS_WARP;
}
template <class T> MS_DEVICE T ms_warp_xor(T value, int mask MS_CALLED)
{
    return ms_host_take(value, ms_host_lane() ^ (unsigned)mask MS_CALLER);
}
template <class T> MS_DEVICE T ms_warp_from(T value, int lane MS_CALLED)
{
    return ms_host_take(value, (unsigned)lane MS_CALLER);
}

MS_DEVICE float ms_f16_wide(uint16_t bits) { return ms_float_from_f16(bits); }
MS_DEVICE uint16_t ms_f16_narrow(float x) { return ms_f16_from_float(x); }
/* To nearest even; a NaN becomes a quiet one. */
MS_DEVICE uint16_t ms_bf16_narrow(float x)
{
    uint32_t bits = ms_bits_from_float(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
MS_DEVICE uint32_t ms_f16_pair(float low, float high)
{
    return ms_f16_narrow(low) | (uint32_t)ms_f16_narrow(high) << 16;
}
MS_DEVICE uint32_t ms_bf16_pair(float low, float high)
{
    return ms_bf16_narrow(low) | (uint32_t)ms_bf16_narrow(high) << 16;
}
MS_DEVICE float ms_reciprocal(float x) { return 1.0f / x; }
/* The host's build contracts nothing. */
MS_DEVICE float ms_mul(float a, float b) { return a * b; }
MS_DEVICE float ms_add(float a, float b) { return a + b; }
template <class T> MS_DEVICE T ms_atomic_add(T *at, T value)
{
    T was = *at;
    *at = was + value;
    return was;
}
MS_DEVICE uint32_t ms_atomic_or(uint32_t *at, uint32_t value)
{
    uint32_t was = *at;
    *at |= value;
    return was;
}
MS_DEVICE int ms_leading_zeros(uint32_t x) { return x ? __builtin_clz(x) : 32; }
/* Threads take turns at barriers only. */
MS_DEVICE bool ms_try_lock(uint32_t *lock) { return (void)lock, true; }
MS_DEVICE void ms_nap(void) {}
MS_DEVICE void ms_show_host(void) {}
MS_DEVICE void ms_unlock(uint32_t *lock) { (void)lock; }

#endif

/* ------------------------------------------------------------------ positions */

/* For loops over elements whose threads stride over the whole grid. */
#define GRID_FIRST (BLOCK_X * THREADS_X + THREAD_X)
#define GRID_STEP (BLOCKS_X * THREADS_X)
#define LANE (THREAD_X % MS_WARP)
#define WARP (THREAD_X / MS_WARP)

/* -------------------------------------------------------------------- numbers */

MS_DEVICE uint32_t ms_bits(float x) { return ms_bits_from_float(x); }
MS_DEVICE float ms_float(uint32_t bits) { return ms_float_from_bits(bits); }
MS_DEVICE float ms_bf16_wide(uint16_t bits) { return ms_float((uint32_t)bits << 16); }
MS_DEVICE float ms_infinity(void) { return ms_float(0x7f800000u); }
MS_DEVICE bool ms_is_nan(float x) { return x != x; }

/* Cut off, and kept within i64; NaN becomes 0. */
template <class F> MS_DEVICE int64_t ms_whole(F x)
{
    if (x != x) return 0;
    if (x >= (F)9223372036854775808.0) return INT64_MAX;
    if (x < (F)-9223372036854775808.0) return INT64_MIN;
    return (int64_t)x;
}

/* Element i of an array of this dtype, as f32 or as i64, and back: rounded to nearest even,
 * integers cut off and wrapped. The dtype is the same for all threads, so branches cost little. */
MS_DEVICE float ms_read(const void *from, int64_t i, uint8_t dtype)
{
    switch (dtype) {
    case MS_F32: return static_cast<const float *>(from)[i];
    case MS_F16: return ms_f16_wide(static_cast<const uint16_t *>(from)[i]);
    case MS_BF16: return ms_bf16_wide(static_cast<const uint16_t *>(from)[i]);
    case MS_I64: return (float)static_cast<const int64_t *>(from)[i];
    case MS_I32: return (float)static_cast<const int32_t *>(from)[i];
    case MS_U16: return (float)static_cast<const uint16_t *>(from)[i];
    case MS_U8: return (float)static_cast<const uint8_t *>(from)[i];
    default: return static_cast<const uint8_t *>(from)[i] != 0 ? 1.0f : 0.0f;
    }
}
MS_DEVICE void ms_write(void *to, int64_t i, uint8_t dtype, float x)
{
    switch (dtype) {
    case MS_F32: static_cast<float *>(to)[i] = x; break;
    case MS_F16: static_cast<uint16_t *>(to)[i] = ms_f16_narrow(x); break;
    case MS_BF16: static_cast<uint16_t *>(to)[i] = ms_bf16_narrow(x); break;
    case MS_I64: static_cast<int64_t *>(to)[i] = ms_whole(x); break;
    case MS_I32: static_cast<int32_t *>(to)[i] = (int32_t)ms_whole(x); break;
    case MS_U16: static_cast<uint16_t *>(to)[i] = (uint16_t)ms_whole(x); break;
    case MS_U8: static_cast<uint8_t *>(to)[i] = (uint8_t)ms_whole(x); break;
    default: static_cast<uint8_t *>(to)[i] = x != 0.0f; break;
    }
}
MS_DEVICE int64_t ms_read_whole(const void *from, int64_t i, uint8_t dtype)
{
    switch (dtype) {
    case MS_I64: return static_cast<const int64_t *>(from)[i];
    case MS_I32: return static_cast<const int32_t *>(from)[i];
    case MS_U16: return static_cast<const uint16_t *>(from)[i];
    case MS_U8: return static_cast<const uint8_t *>(from)[i];
    default: return static_cast<const uint8_t *>(from)[i] != 0;
    }
}
MS_DEVICE void ms_write_whole(void *to, int64_t i, uint8_t dtype, int64_t x)
{
    switch (dtype) {
    case MS_I64: static_cast<int64_t *>(to)[i] = x; break;
    case MS_I32: static_cast<int32_t *>(to)[i] = (int32_t)x; break;
    case MS_U16: static_cast<uint16_t *>(to)[i] = (uint16_t)x; break;
    case MS_U8: static_cast<uint8_t *>(to)[i] = (uint8_t)x; break;
    default: static_cast<uint8_t *>(to)[i] = x != 0; break;
    }
}

/* 16 bytes of global memory, at a multiple of 16, in one access. The compiler takes a struct that
 * is stored apart into words, and joins them again only where no branch is near: so the store is an
 * instruction. It joins loads anywhere. tests/lint/accesses.lua looks at both. */
struct alignas(16) ms_chunk {
    uint32_t word[4];
};
#if defined(__CUDACC__)
MS_DEVICE ms_chunk ms_load_chunk(const void *from)
{
    __builtin_assume(__isGlobal(from));
    return *static_cast<const ms_chunk *>(from);
}
MS_DEVICE void ms_store_chunk(void *to, const ms_chunk &chunk)
{
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(chunk.word[0]), "r"(chunk.word[1]),
                   "r"(chunk.word[2]), "r"(chunk.word[3])
                 : "memory");
}
#else
MS_DEVICE ms_chunk ms_load_chunk(const void *from) { return *static_cast<const ms_chunk *>(from); }
MS_DEVICE void ms_store_chunk(void *to, const ms_chunk &chunk)
{
    *static_cast<ms_chunk *>(to) = chunk;
}
#endif

/* Eight float elements from i on, by accesses of 16 bytes: the address of element i is a multiple
 * of 16. For f32, f16 and bf16. */
MS_DEVICE void ms_read8(const void *from, int64_t i, uint8_t dtype, float out[8])
{
    if (dtype == MS_F32) {
        const float *at = static_cast<const float *>(from) + i;
        ms_chunk low = ms_load_chunk(at), high = ms_load_chunk(at + 4);
        MS_UNROLL for (int k = 0; k < 4; k++)
        {
            out[k] = ms_float(low.word[k]);
            out[k + 4] = ms_float(high.word[k]);
        }
        return;
    }
    ms_chunk chunk = ms_load_chunk(static_cast<const uint16_t *>(from) + i);
    MS_UNROLL for (int k = 0; k < 4; k++)
    {
        uint16_t low = (uint16_t)chunk.word[k], high = (uint16_t)(chunk.word[k] >> 16);
        out[2 * k] = dtype == MS_BF16 ? ms_bf16_wide(low) : ms_f16_wide(low);
        out[2 * k + 1] = dtype == MS_BF16 ? ms_bf16_wide(high) : ms_f16_wide(high);
    }
}
MS_DEVICE void ms_write8(void *to, int64_t i, uint8_t dtype, const float x[8])
{
    ms_chunk chunk;
    if (dtype == MS_F32) {
        float *at = static_cast<float *>(to) + i;
        MS_UNROLL for (int k = 0; k < 4; k++) chunk.word[k] = ms_bits(x[k]);
        ms_store_chunk(at, chunk);
        MS_UNROLL for (int k = 0; k < 4; k++) chunk.word[k] = ms_bits(x[k + 4]);
        ms_store_chunk(at + 4, chunk);
        return;
    }
    if (dtype == MS_BF16)
        MS_UNROLL for (int k = 0; k < 4; k++) chunk.word[k] = ms_bf16_pair(x[2 * k], x[2 * k + 1]);
    else MS_UNROLL for (int k = 0; k < 4; k++) chunk.word[k] = ms_f16_pair(x[2 * k], x[2 * k + 1]);
    ms_store_chunk(static_cast<uint16_t *>(to) + i, chunk);
}

/* Element i of an array of floats: f32, f16 or bf16. */
MS_DEVICE float ms_read_float(const void *from, int64_t i, uint8_t dtype)
{
    if (dtype == MS_F32) return static_cast<const float *>(from)[i];
    uint16_t bits = static_cast<const uint16_t *>(from)[i];
    return dtype == MS_BF16 ? ms_bf16_wide(bits) : ms_f16_wide(bits);
}
MS_DEVICE void ms_write_float(void *to, int64_t i, uint8_t dtype, float x)
{
    if (dtype == MS_F32) static_cast<float *>(to)[i] = x;
    else static_cast<uint16_t *>(to)[i] = dtype == MS_BF16 ? ms_bf16_narrow(x) : ms_f16_narrow(x);
}

/* The number that is read again once x is written. */
MS_DEVICE float ms_rounded(float x, uint8_t dtype)
{
    if (dtype == MS_F32) return x;
    return dtype == MS_BF16 ? ms_bf16_wide(ms_bf16_narrow(x)) : ms_f16_wide(ms_f16_narrow(x));
}

/* Elements i .. i + 7 of n floats at any address; 0 where there are none. */
MS_DEVICE bool ms_is_chunk(const void *at, int64_t i, int64_t n, uint8_t dtype)
{
    return i + 8 <= n && ((uintptr_t)at + (uintptr_t)i * (dtype == MS_F32 ? 4 : 2)) % 16 == 0;
}
MS_DEVICE void ms_get8(const void *from, int64_t i, int64_t n, uint8_t dtype, float out[8])
{
    if (ms_is_chunk(from, i, n, dtype)) {
        ms_read8(from, i, dtype, out);
        return;
    }
    MS_UNROLL for (int k = 0; k < 8; k++) out[k] =
        i + k < n ? ms_read_float(from, i + k, dtype) : 0.0f;
}
MS_DEVICE void ms_put8(void *to, int64_t i, int64_t n, uint8_t dtype, const float x[8])
{
    if (ms_is_chunk(to, i, n, dtype)) {
        ms_write8(to, i, dtype, x);
        return;
    }
    MS_UNROLL for (int k = 0; k < 8; k++)
    {
        if (i + k < n) ms_write_float(to, i + k, dtype, x[k]);
    }
}

/* ------------------------------------------------------------------ reductions */

struct ms_plus {
    template <class T> MS_DEVICE_MEMBER T operator()(T a, T b) const { return a + b; }
};
/* NaN is the greatest. */
struct ms_greater {
    template <class T> MS_DEVICE_MEMBER T operator()(T a, T b) const
    {
        return a > b || a != a ? a : b;
    }
};

/* The greater of `most` and the size of x, in bits: as integers these compare as the numbers do,
 * NaN above all. */
MS_DEVICE uint32_t ms_greater_size(uint32_t most, float x)
{
    uint32_t size = ms_bits(x) & 0x7fffffffu;
    return size > most ? size : most;
}

/* The same result in all lanes, in an order that is fixed. */
template <class T, class Join> MS_DEVICE T ms_warp_join(T value, Join join MS_CALLED)
{
    for (int mask = MS_WARP / 2; mask > 0; mask /= 2)
        value = join(value, ms_warp_xor(value, mask MS_CALLER));
    return value;
}
/* The same for a block of THREADS_X threads in one row, a multiple of 32. `shared` has 32 places
 * for it and is free again when the call returns. */
template <class T, class Join> MS_DEVICE T ms_block_join(T value, T *shared, Join join MS_CALLED)
{
    value = ms_warp_join(value, join MS_CALLER);
    if (THREADS_X == MS_WARP) return value;
    if (LANE == 0) shared[WARP] = value;
    ms_barrier_of_caller();
    value = shared[0];
    for (int warp = 1; warp < THREADS_X / MS_WARP; warp++) value = join(value, shared[warp]);
    ms_barrier_of_caller();
    return value;
}

/* ---------------------------------------------------------------------- faults */

/* Notes that something is wrong at this position, unless an earlier one is noted. Positions are
 * mostly many: a thread whose position is not the earliest any more needs no lock. */
MS_DEVICE void ms_note_fault(ms_cuda_fault *fault, int64_t at, int64_t a, int64_t b, int64_t c)
{
    volatile ms_cuda_fault *noted = fault;
    for (bool is_done = false; !is_done && at < noted->at;) {
        if (ms_try_lock(&fault->lock)) {
            if (at < noted->at) {
                noted->at = at;
                noted->values[0] = a;
                noted->values[1] = b;
                noted->values[2] = c;
            }
            ms_unlock(&fault->lock);
            is_done = true;
        } else ms_nap();
    }
}

#endif
