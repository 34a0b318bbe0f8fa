/* window.h: windows that slide over planes of rows and columns: what convolution and pooling share.
 */
#ifndef MOONSHARD_OPS_WINDOW_H
#define MOONSHARD_OPS_WINDOW_H

#include "tensor/op.h"

/* Plain data, part of task arguments. Rows come first, then columns. Element (i, j) of the window
 * of output (r, c) is the input's element (r * stride - padding + i * dilation, and likewise), or
 * padding where there is none. Every size is 1 or more. */
typedef struct ms_window {
    int64_t in[2], out[2], kernel[2], stride[2], padding[2], dilation[2];
} ms_window;

/* The window of a call whose first input is [images, channels, rows, columns], with the numbers of
 * its attributes; a stride of 0 represents `stride`. Refuses an input of another form, numbers out
 * of range, and a window that is larger than the padded input. */
ms_status ms_window_of(const ms_op_call *call, const int64_t kernel[2], const int64_t stride[2],
                       ms_window *out);

/* Rows times columns of the output, and elements of a window. */
static inline int64_t ms_window_places(const ms_window *w) { return w->out[0] * w->out[1]; }
static inline int64_t ms_window_elements(const ms_window *w) { return w->kernel[0] * w->kernel[1]; }

#endif
