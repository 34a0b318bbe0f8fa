/* rotary.cu: rotary position embedding. A block makes the angles of some pairs of one moment once,
 * in f64, and turns these pairs of all heads. */
#include "ops/cuda/rotary.h"

#include "ops/cuda/device.h"

enum { PAIRS = MS_CUDA_ROTARY_PAIRS };

/* The angle by which pair k turns from one position to the next, as in ops/cpu/rotary.c. */
MS_DEVICE double frequency_of(const ms_rotary_args &r, int64_t k)
{
    const double pi = 3.141592653589793;
    const ms_rotary_scaling &scaling = r.scaling;
    double plain = pow(r.base, -2.0 * (double)k / (double)r.width);
    if (scaling.kind == MS_ROTARY_PLAIN) return plain;
    double stretched = plain / scaling.factor;
    if (scaling.kind == MS_ROTARY_LINEAR) return stretched;
    double turns = scaling.original_context * plain / (2.0 * pi);
    double smooth = (turns - scaling.low) / (scaling.high - scaling.low);
    if (smooth <= 0.0) return stretched;
    return smooth >= 1.0 ? plain : (1.0 - smooth) * stretched + smooth * plain;
}

/* Cosine and sine of an angle in turns: the Taylor polynomials within an eighth of a turn, whose
 * error is below 1e-13. Functions of the library would reduce huge angles in memory. */
MS_DEVICE void cos_sin(double turns, float *cosine, float *sine)
{
    double quarter = floor(turns * 4.0 + 0.5), x = (turns - quarter * 0.25) * 6.283185307179586,
           s = x * x;
    double odd = 1.0 / 6227020800.0, even = -1.0 / 87178291200.0;
    odd = odd * s - 1.0 / 39916800.0;
    odd = odd * s + 1.0 / 362880.0;
    odd = odd * s - 1.0 / 5040.0;
    odd = odd * s + 1.0 / 120.0;
    odd = odd * s - 1.0 / 6.0;
    odd = odd * s * x + x;
    even = even * s + 1.0 / 479001600.0;
    even = even * s - 1.0 / 3628800.0;
    even = even * s + 1.0 / 40320.0;
    even = even * s - 1.0 / 720.0;
    even = even * s + 1.0 / 24.0;
    even = even * s - 0.5;
    even = even * s + 1.0;
    int64_t n = (int64_t)quarter;
    double c = n & 1 ? odd : even, d = n & 1 ? even : odd;
    *cosine = (float)((n + 1) & 2 ? -c : c);
    *sine = (float)(n & 2 ? -d : d);
}

/* Eight pairs, or `count` of them, whose first elements are i and i + half of x and y. */
MS_DEVICE void turn(const ms_rotary_args &r, int64_t from, int64_t to, int count,
                    const float *cosine, const float *sine)
{
    int64_t half = r.width / 2, item = r.dtype == MS_F32 ? 4 : 2;
    const char *x = static_cast<const char *>(r.x.data) + from * item;
    char *y = static_cast<char *>(r.y.data) + to * item;
    bool whole =
        count == 8 && half * item % 16 == 0 && (uintptr_t)x % 16 == 0 && (uintptr_t)y % 16 == 0;
    float a[8], b[8];
    if (whole) {
        ms_read8(x, 0, r.dtype, a);
        ms_read8(x, half, r.dtype, b);
    } else {
        MS_UNROLL for (int k = 0; k < 8; k++)
        {
            a[k] = k < count ? ms_read_float(x, k, r.dtype) : 0.0f;
            b[k] = k < count ? ms_read_float(x, half + k, r.dtype) : 0.0f;
        }
    }
    MS_UNROLL for (int k = 0; k < 8; k++)
    {
        float c = k < count ? cosine[k] : 0.0f, s = k < count ? sine[k] : 0.0f, low = a[k];
        a[k] = low * c - b[k] * s;
        b[k] = b[k] * c + low * s;
    }
    if (whole) {
        ms_write8(y, 0, r.dtype, a);
        ms_write8(y, half, r.dtype, b);
        return;
    }
    MS_UNROLL for (int k = 0; k < 8; k++)
    {
        if (k >= count) continue;
        ms_write_float(y, k, r.dtype, a[k]);
        ms_write_float(y, half + k, r.dtype, b[k]);
    }
}

/* Pairs first .. first + count - 1 of moment `time`, of this block's heads. */
MS_DEVICE void turn_heads(const ms_rotary_args &r, int64_t time, int64_t first, int64_t count,
                          const float *cosine, const float *sine)
{
    int64_t parts = (count + 7) / 8, heads = r.batches * r.heads;
    for (int64_t begin = BLOCK_Y * MS_CUDA_ROTARY_HEADS; begin < heads;
         begin += BLOCKS_Y * MS_CUDA_ROTARY_HEADS) {
        int64_t end = begin + MS_CUDA_ROTARY_HEADS;
        if (end > heads) end = heads;
        for (int64_t i = begin * parts + THREAD_X; i < end * parts; i += THREADS_X) {
            int64_t batch = i / parts / r.heads, head = i / parts % r.heads, pair = i % parts * 8;
            int64_t left = count - pair;
            turn(r, batch * r.x.batch + head * r.x.head + time * r.x.time + first + pair,
                 batch * r.y.batch + head * r.y.head + time * r.y.time + first + pair,
                 left < 8 ? (int)left : 8, cosine + pair, sine + pair);
        }
    }
}

MS_KERNEL(rotary, ms_cuda_rotary_call, 256)
{
    MS_SHARED(float, cosine, PAIRS);
    MS_SHARED(float, sine, PAIRS);
    const ms_rotary_args &r = args.r;
    const double two_pi = 6.283185307179586;
    for (int64_t at = BLOCK_X; at < r.times * args.pieces; at += BLOCKS_X) {
        int64_t time = at / args.pieces, first = at % args.pieces * PAIRS,
                left = r.width / 2 - first, count = left < PAIRS ? left : (int64_t)PAIRS;
        if (THREAD_X < count) {
            double turns = (double)(r.first + time) * (frequency_of(r, first + THREAD_X) / two_pi);
            cos_sin(turns - floor(turns), &cosine[THREAD_X], &sine[THREAD_X]);
            if (r.back) sine[THREAD_X] = -sine[THREAD_X];
        }
        ms_barrier();
        turn_heads(r, time, first, count, cosine, sine);
        ms_barrier();
    }
}
