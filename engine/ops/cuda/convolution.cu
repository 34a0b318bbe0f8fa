/* convolution.cu: convolutions as products of tiles, whose operands are read where they are: the
 * left one at the sum of an offset of its row and one of the depth, the right one through the
 * window. Tables of 64 entries in shared memory hold these, so that indices are divided once for
 * each row and column of a tile. */
#include "ops/cuda/convolution.h"

#include "ops/cuda/tile.h"

enum { TILE = MS_TILE, ROW = MS_TILE_ROW };
static_assert((int)TILE == (int)MS_CUDA_CONVOLUTION_TILE, "the host cuts the same tiles");

/* A row of an operand, or an element of the depth. `left`: an offset in the left operand; `right`:
 * one in the right operand, of a plane or a channel; y, x: what it adds to the position there.
 * Negative offsets: there is none, and the operand is 0. */
struct entry {
    int64_t left, right;
    int32_t y, x;
};
MS_DEVICE entry entry_of(int64_t left, int64_t right, int64_t y, int64_t x)
{
    entry e = { left, right, (int32_t)y, (int32_t)x };
    return e;
}

MS_DEVICE int64_t places_of(const ms_window &w) { return w.out[0] * w.out[1]; }
MS_DEVICE int64_t inputs_of(const ms_window &w) { return w.in[0] * w.in[1]; }
MS_DEVICE int64_t elements_of(const ms_window &w) { return w.kernel[0] * w.kernel[1]; }

/* Position i of all images, whose images are `image` elements apart, as the corner of its window.
 */
MS_DEVICE entry place_entry(const ms_cuda_convolution_call &args, int64_t left_image,
                            int64_t left_first, int64_t i)
{
    const ms_window &w = args.window;
    int64_t image = i / places_of(w), place = i % places_of(w);
    return entry_of(left_first + image * left_image + place,
                    image * args.groups * args.channels * inputs_of(w),
                    place / w.out[1] * w.stride[0] - w.padding[0],
                    place % w.out[1] * w.stride[1] - w.padding[1]);
}
/* Element k of the window of some input channels. */
MS_DEVICE entry window_entry(const ms_cuda_convolution_call &args, int64_t group, int64_t k)
{
    const ms_window &w = args.window;
    int64_t channel = group * args.channels + k / elements_of(w), at = k % elements_of(w);
    return entry_of(k, channel * inputs_of(w), at / w.kernel[1] * w.dilation[0],
                    at % w.kernel[1] * w.dilation[1]);
}
/* The input's element of two entries, or 0. */
MS_DEVICE float input_of(const ms_cuda_convolution_call &args, const entry &a, const entry &b)
{
    const ms_window &w = args.window;
    int64_t y = a.y + b.y, x = a.x + b.x;
    if (y < 0 || x < 0 || y >= w.in[0] || x >= w.in[1]) return 0.0f;
    return ms_read_float(args.x, a.right + b.right + y * w.in[1] + x, args.in_dtype);
}

/* ---------------------------------------------------------------------- kinds */

struct forward {
    static const bool rows_are_near = true; /* neighbouring rows of the right are side by side */
    MS_DEVICE_MEMBER static const void *left(const ms_cuda_convolution_call &args)
    {
        return args.weight;
    }
    MS_DEVICE_MEMBER static int64_t left_row(const ms_cuda_convolution_call &args, int64_t group,
                                             int64_t row)
    {
        return (group * args.results + row) * args.depth;
    }
    MS_DEVICE_MEMBER static entry right_row(const ms_cuda_convolution_call &args, int64_t,
                                            int64_t column)
    {
        return place_entry(args, 0, 0, column);
    }
    MS_DEVICE_MEMBER static entry inner(const ms_cuda_convolution_call &args, int64_t group,
                                        int64_t k)
    {
        return window_entry(args, group, k);
    }
    MS_DEVICE_MEMBER static float right(const ms_cuda_convolution_call &args, const entry &row,
                                        const entry &inner)
    {
        return input_of(args, row, inner);
    }
};

struct weight {
    static const bool rows_are_near = false;
    MS_DEVICE_MEMBER static const void *left(const ms_cuda_convolution_call &args)
    {
        return args.g;
    }
    MS_DEVICE_MEMBER static int64_t left_row(const ms_cuda_convolution_call &args, int64_t group,
                                             int64_t row)
    {
        return (group * args.results + row) * places_of(args.window);
    }
    MS_DEVICE_MEMBER static entry right_row(const ms_cuda_convolution_call &args, int64_t group,
                                            int64_t column)
    {
        return window_entry(args, group, column);
    }
    MS_DEVICE_MEMBER static entry inner(const ms_cuda_convolution_call &args, int64_t, int64_t i)
    {
        return place_entry(args, args.groups * args.results * places_of(args.window), 0, i);
    }
    MS_DEVICE_MEMBER static float right(const ms_cuda_convolution_call &args, const entry &row,
                                        const entry &inner)
    {
        return input_of(args, row, inner);
    }
};

/* The place whose window has this element of the input there, if its stride meets it. */
MS_DEVICE bool place_at(const ms_window &w, int d, int32_t at, int64_t *place)
{
    if (at < 0 || at % (int32_t)w.stride[d] != 0) return false;
    *place = at / (int32_t)w.stride[d];
    return *place < w.out[d];
}

struct data {
    static const bool rows_are_near = true;
    MS_DEVICE_MEMBER static const void *left(const ms_cuda_convolution_call &args)
    {
        return args.weight;
    }
    MS_DEVICE_MEMBER static int64_t left_row(const ms_cuda_convolution_call &args, int64_t group,
                                             int64_t row)
    {
        return (group * args.results * args.channels + row) * elements_of(args.window);
    }
    MS_DEVICE_MEMBER static entry right_row(const ms_cuda_convolution_call &args, int64_t group,
                                            int64_t column)
    {
        const ms_window &w = args.window;
        int64_t image = column / inputs_of(w), at = column % inputs_of(w);
        return entry_of(0, (image * args.groups + group) * args.results * places_of(w),
                        at / w.in[1] + w.padding[0], at % w.in[1] + w.padding[1]);
    }
    MS_DEVICE_MEMBER static entry inner(const ms_cuda_convolution_call &args, int64_t, int64_t k)
    {
        const ms_window &w = args.window;
        int64_t result = k / elements_of(w), at = k % elements_of(w);
        return entry_of(result * args.channels * elements_of(w) + at, result * places_of(w),
                        at / w.kernel[1] * w.dilation[0], at % w.kernel[1] * w.dilation[1]);
    }
    MS_DEVICE_MEMBER static float right(const ms_cuda_convolution_call &args, const entry &row,
                                        const entry &inner)
    {
        const ms_window &w = args.window;
        int64_t y, x;
        if (!place_at(w, 0, row.y - inner.y, &y) || !place_at(w, 1, row.x - inner.x, &x))
            return 0.0f;
        return ms_read_float(args.g, row.right + inner.right + y * w.out[1] + x, args.in_dtype);
    }
};

/* ------------------------------------------------------------------- products */

struct room {
    float *left, *right;
    int64_t *left_rows;
    entry *right_rows, *inners;
};

/* What a block works on; rows and columns are the first ones. */
struct place {
    int64_t group, row, column, part;
};
MS_DEVICE place place_of(const ms_cuda_convolution_call &args)
{
    int64_t at = BLOCK_X;
    place p;
    p.part = at % args.parts;
    at /= args.parts;
    p.column = at % args.column_tiles * TILE;
    at /= args.column_tiles;
    p.row = at % args.row_tiles * TILE;
    p.group = at / args.row_tiles;
    return p;
}

template <class K>
MS_DEVICE void fill_rows(const ms_cuda_convolution_call &args, const place &p, const room &r)
{
    const entry none = entry_of(-1, -1, 0, 0);
    int i = THREAD_X;
    if (i >= TILE) return;
    r.left_rows[i] = p.row + i < args.rows ? K::left_row(args, p.group, p.row + i) : -1;
    r.right_rows[i] =
        p.column + i < args.columns ? K::right_row(args, p.group, p.column + i) : none;
}

/* Both tiles of 64 elements of the depth, of which `depth` are there. */
template <class K>
MS_DEVICE void load(const ms_cuda_convolution_call &args, const room &r, int depth)
{
    for (int at = THREAD_X; at < TILE * TILE; at += THREADS_X) {
        int row = at / TILE, k = at % TILE;
        if (k >= (depth + 3) / 4 * 4) continue;
        bool there = k < depth && r.left_rows[row] >= 0;
        r.left[row * ROW + k] =
            there ? ms_read_float(K::left(args), r.left_rows[row] + r.inners[k].left, args.in_dtype)
                  : 0.0f;
    }
    for (int at = THREAD_X; at < TILE * TILE; at += THREADS_X) {
        int row = K::rows_are_near ? at % TILE : at / TILE,
            k = K::rows_are_near ? at / TILE : at % TILE;
        if (k >= (depth + 3) / 4 * 4) continue;
        bool there = k < depth && r.right_rows[row].right >= 0;
        r.right[row * ROW + k] = there ? K::right(args, r.right_rows[row], r.inners[k]) : 0.0f;
    }
}

template <class K>
MS_DEVICE void multiply(const ms_cuda_convolution_call &args, const place &p, float sums[4][4])
{
    MS_SHARED(ms_four, left, TILE * ROW / 4);
    MS_SHARED(ms_four, right, TILE * ROW / 4);
    MS_SHARED(int64_t, left_rows, TILE);
    MS_SHARED(entry, right_rows, TILE);
    MS_SHARED(entry, inners, TILE);
    const room r = { left->of, right->of, left_rows, right_rows, inners };
    int64_t begin = p.part * args.part, end = begin + args.part;
    if (end > args.depth) end = args.depth;
    MS_UNROLL for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0.0f;
    fill_rows<K>(args, p, r);
    for (int64_t k = begin; k < end; k += TILE) {
        int depth = end - k < TILE ? (int)(end - k) : (int)TILE;
        if (THREAD_X < depth) inners[THREAD_X] = K::inner(args, p.group, k + THREAD_X);
        ms_barrier();
        load<K>(args, r, depth);
        ms_barrier();
        ms_multiply_tiles(r.left, r.right, depth, sums);
    }
}

/* -------------------------------------------------------------------- kernels */

/* Columns are positions of planes of `size` elements of all images; rows are channels, of which an
 * image has groups * rows. */
MS_DEVICE void write_planes(const ms_cuda_convolution_call &args, const place &p, int64_t size,
                            const float sums[4][4], const float *bias)
{
    MS_UNROLL for (int j = 0; j < 4; j++)
    {
        int64_t column = p.column + THREAD_X % 16 + 16 * j;
        if (column >= args.columns) continue;
        int64_t image = column / size, at = column % size;
        MS_UNROLL for (int i = 0; i < 4; i++)
        {
            int64_t row = p.row + THREAD_X / 16 * 4 + i, channel = p.group * args.rows + row;
            if (row >= args.rows) continue;
            float sum = bias != NULL ? sums[i][j] + bias[channel] : sums[i][j];
            ms_write_float(args.out, (image * args.groups * args.rows + channel) * size + at,
                           args.out_dtype, sum);
        }
    }
}

MS_KERNEL_PAIRED(convolution_forward, ms_cuda_convolution_call, 256)
{
    const place p = place_of(args);
    float sums[4][4];
    multiply<forward>(args, p, sums);
    write_planes(args, p, places_of(args.window), sums, args.bias);
}

MS_KERNEL_PAIRED(convolution_data, ms_cuda_convolution_call, 256)
{
    const place p = place_of(args);
    float sums[4][4];
    multiply<data>(args, p, sums);
    write_planes(args, p, inputs_of(args.window), sums, NULL);
}

MS_KERNEL_PAIRED(convolution_weight, ms_cuda_convolution_call, 256)
{
    const place p = place_of(args);
    float sums[4][4];
    multiply<weight>(args, p, sums);
    MS_UNROLL for (int k = 0; k < 16; k++)
    {
        int64_t row = p.row + THREAD_X / 16 * 4 + k / 4,
                column = p.column + THREAD_X % 16 + k % 4 * 16;
        if (row >= args.rows || column >= args.columns) continue;
        int64_t at = (p.group * args.rows + row) * args.columns + column;
        if (args.partial == NULL) ms_write_float(args.out, at, args.out_dtype, sums[k / 4][k % 4]);
        else
            args.partial[p.part * args.groups * args.rows * args.columns + at] = sums[k / 4][k % 4];
    }
}

/* Adds the parts in their order. */
MS_KERNEL_FREE(convolution_join, ms_cuda_convolution_call, 256)
{
    int64_t size = args.groups * args.rows * args.columns;
    for (int64_t i = GRID_FIRST; i < size; i += GRID_STEP) {
        float sum = 0.0f;
        for (int64_t part = 0; part < args.parts; part++) sum += args.partial[part * size + i];
        ms_write_float(args.out, i, args.out_dtype, sum);
    }
}

/* The gradient of the bias of one output channel, in f64. */
MS_KERNEL(convolution_bias, ms_cuda_convolution_call, 256)
{
    MS_SHARED(double, shared, 32);
    int64_t places = places_of(args.window), channels = args.groups * args.results;
    double sum = 0;
    for (int64_t image = 0; image < args.images; image++) {
        int64_t plane = (image * channels + BLOCK_X) * places;
        for (int64_t i = THREAD_X; i < places; i += THREADS_X)
            sum += (double)ms_read_float(args.g, plane + i, args.in_dtype);
    }
    sum = ms_block_join(sum, shared, ms_plus());
    if (THREAD_X == 0) ms_write_float(args.dbias, BLOCK_X, args.dbias_dtype, (float)sum);
}
