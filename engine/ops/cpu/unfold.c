/* unfold.c: copies between planes, padded planes and columns. */
#include "ops/cpu/unfold.h"

#include <string.h>

ms_unfold ms_unfold_of(const ms_window *window, int64_t channels, size_t item)
{
    int64_t stride = window->stride[1], padded = window->in[1] + 2 * window->padding[1];
    int64_t phase = (padded + stride - 1) / stride;
    return (ms_unfold){
        .window = window, .channels = channels, .phase = phase, .row = phase * stride, .item = item
    };
}

int64_t ms_unfold_rows(const ms_window *w, int64_t output_rows)
{
    return (output_rows - 1) * w->stride[0] + (w->kernel[0] - 1) * w->dilation[0] + 1;
}

int64_t ms_unfold_all_rows(const ms_window *w) { return w->in[0] + 2 * w->padding[0]; }

/* ------------------------------------------------------------------ padding */

/* Which elements of a phase are of the input row, and the input column of the first of them. */
static void range_of(const ms_unfold *u, int64_t phase, int64_t *begin, int64_t *end,
                     int64_t *column)
{
    int64_t stride = u->window->stride[1], left = u->window->padding[1] - phase;
    *begin = left > 0 ? (left + stride - 1) / stride : 0;
    int64_t last = left + u->window->in[1];
    *end = last > 0 ? (last + stride - 1) / stride : 0;
    if (*end > u->phase) *end = u->phase;
    if (*end < *begin) *end = *begin;
    *column = *begin * stride - left;
}

/* One input row into a padded one. */
static void lay(const ms_unfold *u, const void *from, void *to)
{
    int64_t stride = u->window->stride[1];
    for (int64_t phase = 0; phase < stride; phase++) {
        int64_t begin, end, column;
        range_of(u, phase, &begin, &end, &column);
        char *out = (char *)to + (size_t)(phase * u->phase) * u->item;
        memset(out, 0, (size_t)begin * u->item);
        memset(out + (size_t)end * u->item, 0, (size_t)(u->phase - end) * u->item);
        if (stride == 1)
            memcpy(out + (size_t)begin * u->item, (const char *)from + (size_t)column * u->item,
                   (size_t)(end - begin) * u->item);
        else if (u->item == 4)
            for (int64_t i = begin; i < end; i++, column += stride)
                ((uint32_t *)(void *)out)[i] = ((const uint32_t *)from)[column];
        else
            for (int64_t i = begin; i < end; i++, column += stride)
                ((uint16_t *)(void *)out)[i] = ((const uint16_t *)from)[column];
    }
}

void ms_unfold_pad(const ms_unfold *u, const ms_convert_kernels *convert, ms_dtype dtype,
                   const void *planes, int64_t first, int64_t rows, float *line, void *padded)
{
    const ms_window *w = u->window;
    size_t item = ms_dtype_bytes(dtype);
    char *to = padded;
    for (int64_t channel = 0; channel < u->channels; channel++)
        for (int64_t r = 0; r < rows; r++, to += (size_t)u->row * u->item) {
            int64_t y = first + r - w->padding[0];
            if (y < 0 || y >= w->in[0]) {
                memset(to, 0, (size_t)u->row * u->item);
                continue;
            }
            const void *from =
                (const char *)planes + (size_t)((channel * w->in[0] + y) * w->in[1]) * item;
            if (convert != NULL) convert->to_f32[dtype](line, from, (size_t)w->in[1]);
            lay(u, convert != NULL ? line : from, to);
        }
}

void ms_unfold_crop(const ms_unfold *u, const ms_convert_kernels *convert, const float *padded,
                    float *line, ms_dtype dtype, void *planes)
{
    const ms_window *w = u->window;
    int64_t stride = w->stride[1], all = ms_unfold_all_rows(w);
    size_t bytes = (size_t)w->in[1] * ms_dtype_bytes(dtype);
    for (int64_t channel = 0; channel < u->channels; channel++)
        for (int64_t y = 0; y < w->in[0]; y++) {
            const float *from = padded + (channel * all + y + w->padding[0]) * u->row;
            char *to = (char *)planes + (size_t)(channel * w->in[0] + y) * bytes;
            for (int64_t phase = 0; phase < stride && stride > 1; phase++) {
                int64_t begin, end, column;
                range_of(u, phase, &begin, &end, &column);
                for (int64_t i = begin; i < end; i++, column += stride)
                    line[column] = from[phase * u->phase + i];
            }
            convert->from_f32[dtype](to, stride > 1 ? line : from + w->padding[1],
                                     (size_t)w->in[1]);
        }
}

/* ------------------------------------------------------------------ columns */

/* Where the runs of one row of columns begin in a padded plane: window element (i, j) of the place
 * in row 0, column 0. */
static int64_t start_of(const ms_unfold *u, int64_t rows, int64_t channel, int64_t i, int64_t j)
{
    const ms_window *w = u->window;
    int64_t column = j * w->dilation[1];
    return (channel * rows + i * w->dilation[0]) * u->row + column % w->stride[1] * u->phase
           + column / w->stride[1];
}

/* Copies whole pieces, also past the end: what is there is a run that comes later, or the margin.
 * Runs are short (a row of the output), and calls of memcpy would take most of the time. */
static void copy_run(char *to, const char *from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += MS_UNFOLD_MARGIN) memcpy(to + i, from + i, MS_UNFOLD_MARGIN);
}

/* The runs of the places begin .. end - 1 in one row of columns; *to moves on. */
static void gather_row(const ms_unfold *u, const char *from, int64_t begin, int64_t end, char **to)
{
    int64_t width = u->window->out[1], column = begin % width;
    size_t step = (size_t)(u->window->stride[0] * u->row) * u->item;
    for (int64_t at = begin; at < end; from += step) {
        int64_t run = width - column < end - at ? width - column : end - at;
        copy_run(*to, from + (size_t)column * u->item, (size_t)run * u->item);
        *to += (size_t)run * u->item;
        at += run;
        column = 0;
    }
}

void ms_unfold_gather(const ms_unfold *u, const void *padded, int64_t rows, int64_t begin,
                      int64_t end, void *columns)
{
    const ms_window *w = u->window;
    char *to = columns;
    for (int64_t channel = 0; channel < u->channels; channel++)
        for (int64_t i = 0; i < w->kernel[0]; i++)
            for (int64_t j = 0; j < w->kernel[1]; j++) {
                int64_t start = start_of(u, rows, channel, i, j);
                gather_row(u, (const char *)padded + (size_t)start * u->item, begin, end, &to);
            }
}

/* Four floats at any address. Compilers do not do this by themselves at the optimization level of
 * this file, and runs are too short for wider vectors to matter. */
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));

static void add_run(float *to, const float *from, int64_t n)
{
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) *(four *)(to + i) += *(const four *)(from + i);
    for (; i < n; i++) to[i] += from[i];
}

/* The order of additions to an element follows from the shape alone: window elements that meet in
 * it come in the order of the loops, blocks of places in the order of the calls. */
static void scatter_row(const ms_unfold *u, const float **columns, int64_t begin, int64_t end,
                        float *to)
{
    int64_t width = u->window->out[1], column = begin % width;
    const float *from = *columns;
    to += begin / width * u->window->stride[0] * u->row;
    for (int64_t at = begin; at < end; to += u->window->stride[0] * u->row) {
        int64_t run = width - column < end - at ? width - column : end - at;
        add_run(to + column, from, run);
        from += run;
        at += run;
        column = 0;
    }
    *columns = from;
}

void ms_unfold_scatter(const ms_unfold *u, const float *columns, int64_t begin, int64_t end,
                       float *padded)
{
    const ms_window *w = u->window;
    int64_t all = ms_unfold_all_rows(w);
    for (int64_t channel = 0; channel < u->channels; channel++)
        for (int64_t i = 0; i < w->kernel[0]; i++)
            for (int64_t j = 0; j < w->kernel[1]; j++)
                scatter_row(u, &columns, begin, end, padded + start_of(u, all, channel, i, j));
}
