/* elementwise.cu: the elementwise kernels. */
#include "ops/cuda/elementwise.h"

#include "ops/cuda/device.h"
#include "ops/cuda/gelu.h"
#include "ops/cuda/sine.h"

/* --------------------------------------------------------------------- places */

/* A division of 64 bits takes several times as long as one of 32. */
MS_DEVICE int64_t divide(int64_t a, int64_t by)
{
    if ((((uint64_t)a | (uint64_t)by) >> 32) == 0) return (uint32_t)a / (uint32_t)by;
    return a / by;
}

/* The offsets of a unit's first element. Operand 0 is the result. */
MS_DEVICE void find_unit(const ms_cuda_elementwise_call &args, int64_t unit, int operands,
                         int64_t offset[4])
{
    const ms_loop &loop = args.e.loop;
    uint32_t inner = loop.dims - 1;
    bool is_chunk = unit < args.chunks;
    int64_t begin = is_chunk ? 0 : 8 * args.row_chunks,
            each = is_chunk ? args.row_chunks : loop.shape[inner] - begin;
    if (!is_chunk) unit -= args.chunks;
    int64_t row = inner > 0 ? divide(unit, each) : 0,
            column = begin + (unit - row * each) * (is_chunk ? 8 : 1);
    for (int k = 0; k < 4; k++) offset[k] = k <= operands ? column * loop.strides[k][inner] : 0;
    MS_ROLLED for (uint32_t d = inner; d-- > 0;)
    {
        int64_t rest = d > 0 ? divide(row, loop.shape[d]) : 0, at = row - rest * loop.shape[d];
        row = rest;
        for (int k = 0; k <= operands; k++) offset[k] += at * loop.strides[k][d];
    }
}

/* ------------------------------------------------------------------- elements */

MS_DEVICE void read_one(const ms_elementwise_args &e, int k, int64_t at, float *x)
{
    *x = e.in_dtype[k] == MS_NUMBER ? (float)e.number : ms_read(e.in[k], at, e.in_dtype[k]);
}
MS_DEVICE void read_one(const ms_elementwise_args &e, int k, int64_t at, int64_t *x)
{
    *x =
        e.in_dtype[k] == MS_NUMBER ? ms_whole(e.number) : ms_read_whole(e.in[k], at, e.in_dtype[k]);
}
MS_DEVICE void write_one(const ms_elementwise_args &e, int64_t at, float x)
{
    ms_write(e.out, at, e.out_dtype, x);
}
MS_DEVICE void write_one(const ms_elementwise_args &e, int64_t at, int64_t x)
{
    ms_write_whole(e.out, at, e.out_dtype, x);
}

/* --------------------------------------------------------------------- chunks */

/* Eight integers of T are accessed in pieces of 16 bytes, those of one byte in one of 8. */
template <class T> struct alignas(sizeof(T) == 1 ? 8 : 16) piece_of {
    static constexpr int N = sizeof(T) == 1 ? 8 : 16 / sizeof(T);
    T of[N];
};
template <class T> MS_DEVICE void get_integers(const void *from, int64_t i, int64_t x[8])
{
    constexpr int N = piece_of<T>::N;
    const piece_of<T> *pieces =
        reinterpret_cast<const piece_of<T> *>(static_cast<const T *>(from) + i);
    MS_UNROLL for (int p = 0; p < 8 / N; p++)
    {
        piece_of<T> piece = pieces[p];
        MS_UNROLL for (int k = 0; k < N; k++) x[p * N + k] = (int64_t)piece.of[k];
    }
}
template <class T> MS_DEVICE void put_integers(void *to, int64_t i, const int64_t x[8])
{
    constexpr int N = piece_of<T>::N;
    piece_of<T> *pieces = reinterpret_cast<piece_of<T> *>(static_cast<T *>(to) + i);
    MS_UNROLL for (int p = 0; p < 8 / N; p++)
    {
        piece_of<T> piece;
        MS_UNROLL for (int k = 0; k < N; k++) piece.of[k] = (T)x[p * N + k];
        pieces[p] = piece;
    }
}

MS_DEVICE void get_chunk(const void *from, int64_t i, uint8_t dtype, int64_t x[8])
{
    switch (dtype) {
    case MS_I64: get_integers<int64_t>(from, i, x); return;
    case MS_I32: get_integers<int32_t>(from, i, x); return;
    case MS_U16: get_integers<uint16_t>(from, i, x); return;
    default: get_integers<uint8_t>(from, i, x);
    }
    MS_UNROLL for (int k = 0; k < 8; k++) x[k] = dtype == MS_BOOL ? x[k] != 0 : x[k];
}
MS_DEVICE void put_chunk(void *to, int64_t i, uint8_t dtype, int64_t x[8])
{
    switch (dtype) {
    case MS_I64: put_integers<int64_t>(to, i, x); return;
    case MS_I32: put_integers<int32_t>(to, i, x); return;
    case MS_U16: put_integers<uint16_t>(to, i, x); return;
    default: break;
    }
    MS_UNROLL for (int k = 0; k < 8; k++) x[k] = dtype == MS_BOOL ? x[k] != 0 : x[k];
    put_integers<uint8_t>(to, i, x);
}
/* Of f32, f16, bf16, u8 and bool. */
MS_DEVICE void get_chunk(const void *from, int64_t i, uint8_t dtype, float x[8])
{
    if (dtype != MS_U8 && dtype != MS_BOOL) {
        ms_read8(from, i, dtype, x);
        return;
    }
    piece_of<uint8_t> piece =
        *reinterpret_cast<const piece_of<uint8_t> *>(static_cast<const uint8_t *>(from) + i);
    MS_UNROLL for (int k = 0; k < 8; k++) x[k] =
        (float)(dtype == MS_U8 ? piece.of[k] : piece.of[k] != 0);
}
MS_DEVICE void put_chunk(void *to, int64_t i, uint8_t dtype, float x[8])
{
    if (dtype != MS_U8 && dtype != MS_BOOL) {
        ms_write8(to, i, dtype, x);
        return;
    }
    piece_of<uint8_t> piece;
    MS_UNROLL for (int k = 0; k < 8; k++) piece.of[k] =
        dtype == MS_U8 ? (uint8_t)ms_whole(x[k]) : (uint8_t)(x[k] != 0.0f);
    *reinterpret_cast<piece_of<uint8_t> *>(static_cast<uint8_t *>(to) + i) = piece;
}

/* Eight elements of an operand. */
template <class T>
MS_DEVICE void read_chunk(const ms_cuda_elementwise_call &args, int k, int64_t at, T x[8])
{
    if (args.along[k + 1]) {
        get_chunk(args.e.in[k], at, args.e.in_dtype[k], x);
        return;
    }
    T one;
    read_one(args.e, k, at, &one);
    MS_UNROLL for (int j = 0; j < 8; j++) x[j] = one;
}

/* ------------------------------------------------------------------------ run */

/* What becomes of results beside being written: nothing; or the greatest size of a thread's, before
 * they are rounded, which keeps the order of numbers. */
struct no_most {
    template <class T> MS_DEVICE_MEMBER void see(T) {}
};
struct thread_most {
    uint32_t most;
    MS_DEVICE_MEMBER void see(float x) { most = ms_greater_size(most, x); }
};

template <int operands, class T, class F, class Seen>
MS_DEVICE void run_chunk(const ms_cuda_elementwise_call &args, const int64_t at[4], F f, T v, T h,
                         Seen &seen)
{
    T a[8], b[8] = { 0 }, c[8] = { 0 };
    read_chunk(args, 0, at[1], a);
    if (operands > 1) read_chunk(args, 1, at[2], b);
    if (operands > 2) read_chunk(args, 2, at[3], c);
    MS_UNROLL for (int j = 0; j < 8; j++) a[j] = f(a[j], b[j], c[j], v, h);
    MS_UNROLL for (int j = 0; j < 8; j++) seen.see(a[j]);
    put_chunk(args.e.out, at[0], args.e.out_dtype, a);
}
template <int operands, class T, class F, class Seen>
MS_DEVICE void run_one(const ms_elementwise_args &e, const int64_t at[4], F f, T v, T h, Seen &seen)
{
    T a, b = 0, c = 0;
    read_one(e, 0, at[1], &a);
    if (operands > 1) read_one(e, 1, at[2], &b);
    if (operands > 2) read_one(e, 2, at[3], &c);
    a = f(a, b, c, v, h);
    seen.see(a);
    write_one(e, at[0], a);
}

template <int operands, class T, class F, class Seen>
MS_DEVICE void run(const ms_cuda_elementwise_call &args, F f, T v, T h, Seen &seen)
{
    MS_ROLLED for (int64_t unit = GRID_FIRST; unit < args.units; unit += GRID_STEP)
    {
        int64_t at[4];
        find_unit(args, unit, operands, at);
        if (unit < args.chunks) run_chunk<operands>(args, at, f, v, h, seen);
        else run_one<operands>(args.e, at, f, v, h, seen);
    }
}
/* Floats are computed in f32, and rounded once to the result's dtype. */
template <int operands, class F>
MS_DEVICE void run_floats(const ms_cuda_elementwise_call &args, F f)
{
    no_most seen;
    run<operands>(args, f, (float)args.e.value, (float)args.e.high, seen);
}
/* The same, and the greatest size of what the block has written, as it is stored; numbers that no
 * block has are 0. */
template <int operands, class F>
MS_DEVICE void run_for_most(const ms_cuda_elementwise_call &args, F f, uint32_t *shared)
{
    const ms_elementwise_args &e = args.e;
    thread_most seen = { 0 };
    run<operands>(args, f, (float)e.value, (float)e.high, seen);
    if (e.most == NULL) return;
    uint32_t most = ms_block_join(seen.most, shared, ms_greater());
    if (THREAD_X == 0) e.most[BLOCK_X] = ms_bits(ms_rounded(ms_float(most), e.out_dtype));
    MS_ROLLED for (int64_t i = BLOCK_X + (THREAD_X + 1) * BLOCKS_X; i < MS_ELEMENTWISE_MOST;
                   i += THREADS_X * BLOCKS_X) e.most[i] = 0;
}
/* Integers are computed in i64, modulo 2^64. */
template <int operands, class F> MS_DEVICE void run_whole(const ms_cuda_elementwise_call &args, F f)
{
    no_most seen;
    run<operands>(args, f, ms_whole(args.e.value), ms_whole(args.e.high), seen);
}

/* ------------------------------------------------------------------ functions */

MS_DEVICE float truth(bool is) { return is ? 1.0f : 0.0f; }
MS_DEVICE float greatest(float a, float b) { return b < a || ms_is_nan(a) ? a : b; }
MS_DEVICE float least(float a, float b) { return a < b || ms_is_nan(a) ? a : b; }
/* 0 for NaN, so that the gradient of |x| does not spread a NaN by itself. */
MS_DEVICE float sign_of(float x) { return truth(0 < x) - truth(x < 0); }

/* The nearest whole number, of two equally near ones the even one; a result of 0 has x's sign. From
 * 2^23 on, numbers are whole; below, the addition rounds. The instructions of sm_90 for it take
 * more registers than blocks have here. */
MS_DEVICE float round_of(float x)
{
    float near = copysignf((fabsf(x) + 8388608.0f) - 8388608.0f, x);
    return fabsf(x) < 8388608.0f ? near : x;
}
MS_DEVICE float floor_of(float x)
{
    float near = round_of(x);
    return near - truth(x < near);
}

/* The normal distribution function. */
MS_DEVICE float gelu_erf_gate(float x) { return 0.5f + 0.5f * erff(x * 0.7071067812f); }
MS_DEVICE float gelu_erf_slope(float x)
{
    x = ms_within_16(x);
    return gelu_erf_gate(x) + x * 0.3989422804f * expf(-0.5f * x * x);
}
MS_DEVICE float silu_slope(float x)
{
    float gate = ms_sigmoid(x);
    return gate * (1.0f + x * (1.0f - gate));
}
/* Gradient of (sum |x|^p)^(1/p) = y; 0 where x or y is 0. The quotient is at most 1 and formed
 * before the power, since |x|^(p-1) alone could overflow. */
MS_DEVICE float p_norm_slope(float x, float y, float p)
{
    if (x == 0.0f || y == 0.0f) return 0.0f;
    return p == 2.0f ? x / y : copysignf(powf(fabsf(x) / y, p - 1.0f), x);
}

MS_DEVICE int64_t whole_power(int64_t base, int64_t exponent)
{
    uint64_t power_of_base = (uint64_t)base, result = 1;
    for (uint64_t e = (uint64_t)exponent; e != 0; e >>= 1, power_of_base *= power_of_base)
        if (e & 1) result *= power_of_base;
    return (int64_t)result;
}
/* The upper bound wins where low > high. */
MS_DEVICE int64_t clamped(int64_t value, int64_t low, int64_t high)
{
    int64_t at_least = value < low ? low : value;
    return at_least > high ? high : at_least;
}

/* A kernel is its formula in a, b, c, v = value and h = high. Each operand takes registers for a
 * chunk, so fewer blocks fit on a multiprocessor. */
#define FUNCTION(name, type, formula)                                                  \
    struct name##_##type {                                                             \
        MS_DEVICE_MEMBER type operator()(type a, type b, type c, type v, type h) const \
        {                                                                              \
            (void)b, (void)c, (void)v, (void)h;                                        \
            return (type)(formula);                                                    \
        }                                                                              \
    };
#define FLOATS(operands, name, formula)                                                \
    FUNCTION(name, float, formula)                                                     \
    MS_KERNEL_FREE_IN(elementwise_##name, ms_cuda_elementwise_call, 256, 7 - operands) \
    {                                                                                  \
        run_floats<operands>(args, name##_float());                                    \
    }
#define FLOATS_FOR_MOST(operands, name, formula)                                  \
    FUNCTION(name, float, formula)                                                \
    MS_KERNEL_IN(elementwise_##name, ms_cuda_elementwise_call, 256, 7 - operands) \
    {                                                                             \
        MS_SHARED(uint32_t, shared, MS_WARP);                                     \
        run_for_most<operands>(args, name##_float(), shared);                     \
    }
#define WHOLE(operands, name, formula)                                \
    FUNCTION(name, int64_t, formula)                                  \
    MS_KERNEL_FREE_IN(whole_##name, ms_cuda_elementwise_call, 256, 4) \
    {                                                                 \
        run_whole<operands>(args, name##_int64_t());                  \
    }
#define U(x) ((uint64_t)(x))

/* A maximum or minimum of two equal numbers gives half of the gradient to each. NaN passes through
 * relu, clamp, maximum and minimum, and the gradient passes where relu, maximum or minimum compare
 * a NaN. The gradient of relu is 0 at 0; that of clamp is 1 at both bounds and 0 for NaN.
 * div_backward divides twice, because c^2 would overflow above 1.8e19. */
FLOATS(1, cast, a)
FLOATS(1, neg, -a)
FLOATS(1, exp, expf(a))
FLOATS(1, log, logf(a))
FLOATS(1, sqrt, sqrtf(a))
FLOATS(1, rsqrt, 1.0f / sqrtf(a))
FLOATS(1, square, a *a)
FLOATS(1, abs, fabsf(a))
FLOATS(1, sign, sign_of(a))
FLOATS(1, relu, a < 0.0f ? 0.0f : a)
FLOATS(1, gelu, a *ms_gelu_gate(a))
FLOATS(1, gelu_erf, a *gelu_erf_gate(a))
FLOATS(1, silu, a *ms_sigmoid(a))
FLOATS(1, tanh, tanhf(a))
FLOATS(1, sigmoid, ms_sigmoid(a))
FLOATS(1, sin, ms_sine(a, 0))
FLOATS(1, cos, ms_sine(a, 1))
FLOATS(1, floor, floor_of(a))
FLOATS(1, ceil, -floor_of(-a))
FLOATS(1, round, round_of(a))
FLOATS(1, pow, powf(a, v))
FLOATS(1, clamp, least(greatest(a, v), h))
FLOATS(1, is_finite, truth(fabsf(a) < ms_infinity()))
FLOATS(2, add, a + v * b)
FLOATS(2, sub, a - v * b)
FLOATS(2, mul, a *b)
FLOATS(2, div, a / b)
FLOATS(2, scaled_mul, v *(a *b))
FLOATS(2, scaled_div, v *(a / b))
FLOATS(2, maximum, greatest(a, b))
FLOATS(2, minimum, least(a, b))
FLOATS_FOR_MOST(2, swiglu, a *(b *ms_sigmoid(b)))
FLOATS(2, eq, truth(a == b))
FLOATS(2, ne, truth(a != b))
FLOATS(2, lt, truth(a < b))
FLOATS(2, le, truth(a <= b))
FLOATS(2, gt, truth(a > b))
FLOATS(2, ge, truth(a >= b))
FLOATS(3, lerp, a + c * (b - a))
FLOATS(3, addcmul, a + v * (b * c))
FLOATS(3, addcdiv, a + v * (b / c))
FLOATS(3, where, a != 0.0f ? b : c)
FLOATS(2, sqrt_backward, 0.5f * b / a)
FLOATS(2, rsqrt_backward, -0.5f * b * (a * a * a))
FLOATS(2, relu_backward, a <= 0.0f ? 0.0f : b)
FLOATS(2, tanh_backward, b *(1.0f - a * a))
FLOATS(2, sigmoid_backward, b *(a *(1.0f - a)))
FLOATS(2, sin_backward, b *ms_sine(a, 1))
FLOATS(2, cos_backward, -b *ms_sine(a, 0))
FLOATS(2, square_backward, 2.0f * a * b)
FLOATS(2, abs_backward, sign_of(a) * b)
FLOATS(2, gelu_backward, b *ms_gelu_slope(a))
FLOATS(2, gelu_erf_backward, b *gelu_erf_slope(a))
FLOATS(2, silu_backward, b *silu_slope(a))
FLOATS(2, pow_backward, b *(v *powf(a, v - 1.0f)))
FLOATS(2, clamp_backward, v <= a && a <= h ? b : 0.0f)
FLOATS(3, div_backward, -v *a *(b / c) / c)
FLOATS(3, maximum_backward, a < b ? 0.0f : a == b ? 0.5f * c : c)
FLOATS(3, minimum_backward, b < a ? 0.0f : a == b ? 0.5f * c : c)
FLOATS_FOR_MOST(3, swiglu_backward, c *a *silu_slope(b))
FLOATS(2, lerp_backward, a - a * b)
FLOATS(3, difference_mul, c *(b - a))
FLOATS(3, p_norm_backward, c *p_norm_slope(a, b, v))

WHOLE(1, cast, a)
WHOLE(1, neg, -U(a))
WHOLE(1, square, U(a) * U(a))
WHOLE(1, abs, a < 0 ? -U(a) : U(a))
WHOLE(1, sign, (a > 0) - (a < 0))
WHOLE(1, relu, a > 0 ? a : 0)
WHOLE(1, pow, whole_power(a, v))
WHOLE(1, clamp, clamped(a, v, h))
WHOLE(1, is_finite, 1)
WHOLE(2, add, U(a) + U(v) * U(b))
WHOLE(2, sub, U(a) - U(v) * U(b))
WHOLE(2, mul, U(a) * U(b))
WHOLE(2, maximum, a > b ? a : b)
WHOLE(2, minimum, a < b ? a : b)
WHOLE(2, eq, a == b)
WHOLE(2, ne, a != b)
WHOLE(2, lt, a < b)
WHOLE(2, le, a <= b)
WHOLE(2, gt, a > b)
WHOLE(2, ge, a >= b)
WHOLE(3, addcmul, U(a) + U(v) * U(b) * U(c))
WHOLE(3, where, a != 0 ? b : c)

/* A kernel of the lists that is missing here does not build. */
#define HAS(kernel) static_assert(sizeof(&kernel) > 0, "it is there");
#define HAS_FLOATS(name) HAS(elementwise_##name)
#define HAS_WHOLE(name) HAS(whole_##name)
MS_ELEMENTWISE_KERNELS(HAS_FLOATS)
MS_WHOLE_KERNELS(HAS_WHOLE)
