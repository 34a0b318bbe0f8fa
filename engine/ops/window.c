/* window.c: the numbers of sliding windows, checked. */
#include "ops/window.h"

#include "tensor/state.h"

/* Stride, padding and dilation of one dimension. The binding lets only positive numbers through;
 * programs in C may pass any. */
static ms_status check_numbers(const ms_op_call *call, const ms_window *w, int d)
{
    const char *which = d == 0 ? "rows" : "columns";
    if (w->kernel[d] < 1 || w->stride[d] < 1 || w->dilation[d] < 1 || w->padding[d] < 0)
        return ms_op_refuse(call,
                            "for the %s: kernel %lld, stride %lld, dilation %lld must be 1 or "
                            "more, padding %lld 0 or more",
                            which, (long long)w->kernel[d], (long long)w->stride[d],
                            (long long)w->dilation[d], (long long)w->padding[d]);
    return MS_OK;
}

/* The output has as many places as the window, moved by the stride, fits into the padded input:
 * what is left over at the end is not covered, as in PyTorch (floor). */
ms_status ms_window_of(const ms_op_call *call, const int64_t kernel[2], const int64_t stride[2],
                       ms_window *out)
{
    const ms_tensor *x = call->inputs[0];
    const ms_attributes *given = &call->attributes;
    if (x->dims != 4)
        return ms_op_refuse(call, "the input must be [images, channels, rows, columns]");
    if (x->shape[1] < 1 || x->shape[2] < 1 || x->shape[3] < 1)
        return ms_op_refuse(call, "only the number of images may be 0");
    ms_window w = { .in = { 0 } };
    int64_t span[2], padded[2];
    for (int d = 0; d < 2; d++) {
        w.in[d] = x->shape[2 + d];
        w.kernel[d] = kernel[d];
        w.stride[d] = given->window.stride[d] ? given->window.stride[d] : stride[d];
        w.padding[d] = given->window.padding[d];
        w.dilation[d] = given->window.dilation[d] ? given->window.dilation[d] : 1;
        ms_status status = check_numbers(call, &w, d);
        if (status) return status;
        span[d] = (w.kernel[d] - 1) * w.dilation[d] + 1;
        padded[d] = w.in[d] + 2 * w.padding[d];
    }
    if (span[0] > padded[0] || span[1] > padded[1])
        return ms_op_refuse(call,
                            "the window covers %lld x %lld, more than the padded input's %lld x "
                            "%lld",
                            (long long)span[0], (long long)span[1], (long long)padded[0],
                            (long long)padded[1]);
    for (int d = 0; d < 2; d++) w.out[d] = (padded[d] - span[d]) / w.stride[d] + 1;
    *out = w;
    return MS_OK;
}
