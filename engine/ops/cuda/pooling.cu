/* pooling.cu: the greatest element or the average of windows of planes. Gradients are gathered: a
 * thread adds what the windows that hold its element give, in row-major order. */
#include "ops/pooling.h"

#include "ops/cuda/device.h"

/* From `begin` up to but without `end`. */
struct range {
    int64_t begin, end;
};

/* The elements of the input that the window of place `at` covers, in dimension d. */
MS_DEVICE range covered(const ms_window &w, int d, int64_t at)
{
    int64_t first = at * w.stride[d] - w.padding[d], last = first + w.kernel[d];
    range r = { first > 0 ? first : 0, last < w.in[d] ? last : w.in[d] };
    return r;
}
/* The places whose windows cover element `at` of the input. */
MS_DEVICE range covering(const ms_window &w, int d, int64_t at)
{
    int64_t last = at + w.padding[d], first = last - w.kernel[d] + 1;
    range r = { first > 0 ? (first + w.stride[d] - 1) / w.stride[d] : 0, last / w.stride[d] + 1 };
    if (r.end > w.out[d]) r.end = w.out[d];
    return r;
}
MS_DEVICE float divisor_of(const ms_pool_args &args, const range &rows, const range &columns)
{
    const ms_window &w = args.window;
    if (!args.skip_padding) return (float)(w.kernel[0] * w.kernel[1]);
    return (float)((rows.end - rows.begin) * (columns.end - columns.begin));
}

/* Element i of planes of this size. */
struct element {
    int64_t plane, row, column;
};
MS_DEVICE element element_at(int64_t i, const int64_t size[2])
{
    element e = { i / (size[0] * size[1]), i / size[1] % size[0], i % size[1] };
    return e;
}

/* NaN wins over everything; the first of equal elements wins. */
MS_KERNEL_FREE(max_pool, ms_pool_args, 256)
{
    const ms_window &w = args.window;
    for (int64_t i = GRID_FIRST; i < args.planes * w.out[0] * w.out[1]; i += GRID_STEP) {
        const element e = element_at(i, w.out);
        const range rows = covered(w, 0, e.row), columns = covered(w, 1, e.column);
        float best = -ms_infinity();
        int64_t at = -1;
        for (int64_t y = rows.begin; y < rows.end; y++)
            for (int64_t x = columns.begin; x < columns.end; x++) {
                int64_t position = y * w.in[1] + x;
                float value =
                    ms_read_float(args.in, e.plane * w.in[0] * w.in[1] + position, args.dtype);
                bool wins = value > best || ms_is_nan(value) || at < 0;
                best = wins ? value : best;
                at = wins ? position : at;
            }
        ms_write_float(args.out, i, args.dtype, best);
        if (args.index != NULL) args.index[i] = (int32_t)at;
    }
}

MS_KERNEL_FREE(max_pool_back, ms_pool_args, 256)
{
    const ms_window &w = args.window;
    for (int64_t i = GRID_FIRST; i < args.planes * w.in[0] * w.in[1]; i += GRID_STEP) {
        const element e = element_at(i, w.in);
        const range rows = covering(w, 0, e.row), columns = covering(w, 1, e.column);
        float sum = 0.0f;
        for (int64_t y = rows.begin; y < rows.end; y++)
            for (int64_t x = columns.begin; x < columns.end; x++) {
                int64_t from = (e.plane * w.out[0] + y) * w.out[1] + x;
                if (args.index[from] == e.row * w.in[1] + e.column)
                    sum += ms_read_float(args.in, from, args.dtype);
            }
        ms_write_float(args.out, i, args.dtype, sum);
    }
}

MS_KERNEL_FREE(avg_pool, ms_pool_args, 256)
{
    const ms_window &w = args.window;
    for (int64_t i = GRID_FIRST; i < args.planes * w.out[0] * w.out[1]; i += GRID_STEP) {
        const element e = element_at(i, w.out);
        const range rows = covered(w, 0, e.row), columns = covered(w, 1, e.column);
        float sum = 0.0f;
        for (int64_t y = rows.begin; y < rows.end; y++)
            for (int64_t x = columns.begin; x < columns.end; x++)
                sum += ms_read_float(args.in, (e.plane * w.in[0] + y) * w.in[1] + x, args.dtype);
        ms_write_float(args.out, i, args.dtype, sum / divisor_of(args, rows, columns));
    }
}

MS_KERNEL_FREE(avg_pool_back, ms_pool_args, 256)
{
    const ms_window &w = args.window;
    for (int64_t i = GRID_FIRST; i < args.planes * w.in[0] * w.in[1]; i += GRID_STEP) {
        const element e = element_at(i, w.in);
        const range rows = covering(w, 0, e.row), columns = covering(w, 1, e.column);
        float sum = 0.0f;
        for (int64_t y = rows.begin; y < rows.end; y++)
            for (int64_t x = columns.begin; x < columns.end; x++) {
                float g =
                    ms_read_float(args.in, (e.plane * w.out[0] + y) * w.out[1] + x, args.dtype);
                sum += g / divisor_of(args, covered(w, 0, y), covered(w, 1, x));
            }
        ms_write_float(args.out, i, args.dtype, sum);
    }
}
