/* unfold.h: windows of planes as columns of a matrix (im2col), and such columns added back to
 * planes.
 *
 * Both go through padded planes: rows of an image with padding on all sides. A padded row is stored
 * as `stride` phases, phase p holding columns p, p + stride, p + 2 stride ...: the elements at one
 * place of consecutive windows then are side by side, whatever stride and dilation are, and are
 * copied as runs. */
#ifndef MOONSHARD_OPS_CPU_UNFOLD_H
#define MOONSHARD_OPS_CPU_UNFOLD_H

#include "ops/cpu/convert.h"
#include "ops/window.h"

/* Runs are copied in pieces of this size: buffers of columns and of padded planes that are gathered
 * from have as many bytes more than they need. */
enum { MS_UNFOLD_MARGIN = 64 };

/* `channels` planes of elements of `item` bytes, 2 or 4. */
typedef struct ms_unfold {
    const ms_window *window;
    int64_t channels;
    int64_t phase, row; /* elements of a phase, and of a padded row */
    size_t item;
} ms_unfold;

ms_unfold ms_unfold_of(const ms_window *window, int64_t channels, size_t item);
/* Padded rows that the windows of these output rows reach, and all rows that there are. */
int64_t ms_unfold_rows(const ms_window *window, int64_t output_rows);
int64_t ms_unfold_all_rows(const ms_window *window);

/* `rows` padded rows of each channel, from padded row `first` on, from planes of `dtype`: as they
 * are, or converted to f32 (`convert` not NULL) by way of `line`, an input row of f32. */
void ms_unfold_pad(const ms_unfold *u, const ms_convert_kernels *convert, ms_dtype dtype,
                   const void *planes, int64_t first, int64_t rows, float *line, void *padded);
/* Columns [channels * kernel, end - begin] of the output's places begin .. end - 1 (row-major),
 * from padded rows that begin with the first row of the first place's window. */
void ms_unfold_gather(const ms_unfold *u, const void *padded, int64_t rows, int64_t begin,
                      int64_t end, void *columns);
/* Adds f32 columns to padded planes with all rows, in the order of channels, kernel rows and kernel
 * columns. */
void ms_unfold_scatter(const ms_unfold *u, const float *columns, int64_t begin, int64_t end,
                       float *padded);
/* The planes without padding, rounded to dtype; `line` as above. */
void ms_unfold_crop(const ms_unfold *u, const ms_convert_kernels *convert, const float *padded,
                    float *line, ms_dtype dtype, void *planes);

#endif
