/* clip.cu: norms and scaling of many gradients. */
#include "optim/cuda/clip.h"

#include "ops/cuda/device.h"

MS_DEVICE int64_t pieces_of(const ms_clip_tensor &tensor)
{
    return (tensor.elements + MS_CUDA_CLIP_PIECE - 1) / MS_CUDA_CLIP_PIECE;
}

/* The piece of this block: the number of its gradient, and where it is there, as a row. */
struct clip_piece {
    uint32_t tensor;
    ms_row row;
};
MS_DEVICE clip_piece find_piece(const ms_clip_tensor *tensors)
{
    clip_piece piece;
    int64_t at = BLOCK_X;
    piece.tensor = 0;
    while (at >= pieces_of(tensors[piece.tensor])) at -= pieces_of(tensors[piece.tensor++]);
    const ms_clip_tensor &tensor = tensors[piece.tensor];
    int64_t begin = at * MS_CUDA_CLIP_PIECE, rest = tensor.elements - begin;
    piece.row.begin = begin;
    piece.row.width = rest < MS_CUDA_CLIP_PIECE ? rest : (int64_t)MS_CUDA_CLIP_PIECE;
    piece.row.skew = 0;
    piece.row.aligned = (uintptr_t)tensor.data % 16 == 0;
    return piece;
}

/* ------------------------------------------------------------------- measuring */

/* A norm is a function of an element and a way to join two results. f64 throughout: a sum of
 * millions of squares in f32 would lose the small ones. */
template <class Part, class Join>
MS_DEVICE void measure(const ms_cuda_measure_call &args, Part part, Join join)
{
    MS_SHARED(double, shared, MS_WARP);
    clip_piece piece = find_piece(args.m.tensors);
    const ms_clip_tensor &tensor = args.m.tensors[piece.tensor];
    double sum = 0;
    ms_walk(piece.row, [&](auto size, int64_t i) {
        float g[size.N];
        ms_get(size, tensor.data, piece.row.begin + i, (uint8_t)tensor.dtype, g);
        MS_UNROLL for (int k = 0; k < size.N; k++) sum = join(sum, part((double)g[k], args.m.p));
    });
    sum = ms_block_join(sum, shared, join);
    if (THREAD_X == 0) args.sums[BLOCK_X] = sum;
}

struct clip_square {
    MS_DEVICE_MEMBER double operator()(double g, double p) const { return g * g; }
};
struct clip_size {
    MS_DEVICE_MEMBER double operator()(double g, double p) const { return fabs(g); }
};
struct clip_power {
    MS_DEVICE_MEMBER double operator()(double g, double p) const
    {
        return p == 1 ? fabs(g) : pow(fabs(g), p);
    }
};
MS_KERNEL(clip_squares, ms_cuda_measure_call, 256) { measure(args, clip_square(), ms_plus()); }
MS_KERNEL(clip_greatest, ms_cuda_measure_call, 256) { measure(args, clip_size(), ms_greater()); }
MS_KERNEL(clip_powers, ms_cuda_measure_call, 256) { measure(args, clip_power(), ms_plus()); }

/* The sum of `count` numbers by one block, or the greatest where p is infinite. */
MS_DEVICE double join_all(const double *numbers, int64_t count, double p, double *shared)
{
    double sum = 0;
    bool greatest = p == (double)ms_infinity();
    for (int64_t i = THREAD_X; i < count; i += THREADS_X)
        sum = greatest ? ms_greater()(sum, numbers[i]) : sum + numbers[i];
    return greatest ? ms_block_join(sum, shared, ms_greater())
                    : ms_block_join(sum, shared, ms_plus());
}

/* A block for each gradient joins the pieces. An empty gradient has none. */
MS_KERNEL(clip_join, ms_cuda_measure_call, 256)
{
    MS_SHARED(double, shared, MS_WARP);
    const ms_measure_args &m = args.m;
    int64_t before = 0;
    for (int64_t i = 0; i < BLOCK_X; i++) before += pieces_of(m.tensors[i]);
    double sum = join_all(args.sums + before, pieces_of(m.tensors[BLOCK_X]), m.p, shared);
    if (THREAD_X == 0) m.partial[BLOCK_X] = sum;
}

struct clip_lower {
    MS_DEVICE_MEMBER int64_t operator()(int64_t a, int64_t b) const { return a < b ? a : b; }
};
/* One block. The 1e-6 keeps a norm of 0 from dividing by 0. A norm of NaN gives a factor of NaN:
 * all gradients become NaN then, and the fault is seen. */
MS_KERNEL(clip_combine, ms_combine_args, 256)
{
    MS_SHARED(double, shared, MS_WARP);
    MS_SHARED(int64_t, positions, MS_WARP);
    int64_t bad = INT64_MAX;
    for (int64_t i = THREAD_X; i < args.count && bad == INT64_MAX; i += THREADS_X)
        if (!(fabs(args.partial[i]) < (double)ms_infinity())) bad = i;
    bad = ms_block_join(bad, positions, clip_lower());
    double norm = join_all(args.partial, args.count, args.p, shared);
    if (THREAD_X != 0) return;
    *args.bad = bad == INT64_MAX ? -1 : bad;
    if (args.p == 2) norm = sqrt(norm);
    else if (args.p != 1 && args.p < (double)ms_infinity()) norm = pow(norm, 1 / args.p);
    /* Without a maximum nothing is scaled; dividing infinity by a norm of infinity would be NaN. */
    double factor = args.max == (double)ms_infinity() ? 1 : args.max / (norm + 1e-6);
    *args.norm = (float)norm;
    *args.factor = factor < 1 || factor != factor ? (float)factor : 1.0f;
}

/* --------------------------------------------------------------------- scaling */

/* A factor of exactly 1 is the usual case of clipping: nothing is read or written then, unless the
 * caller wants to know whether all is finite. The question is asked before rounding to 16 bits. All
 * threads that write the flag write the same. */
MS_KERNEL_FREE(clip_scale, ms_scale_args, 256)
{
    float factor = *args.factor;
    if (factor == 1.0f && args.finite == NULL) return;
    clip_piece piece = find_piece(args.tensors);
    const ms_clip_tensor &tensor = args.tensors[piece.tensor];
    bool finite = true;
    ms_walk(piece.row, [&](auto size, int64_t i) {
        float g[size.N];
        ms_get(size, tensor.data, piece.row.begin + i, (uint8_t)tensor.dtype, g);
        MS_UNROLL for (int k = 0; k < size.N; k++)
        {
            g[k] *= factor;
            finite = finite && fabsf(g[k]) < ms_infinity();
        }
        ms_put(size, tensor.data, piece.row.begin + i, (uint8_t)tensor.dtype, g);
    });
    if (args.finite != NULL && !finite) *args.finite = 0;
}
