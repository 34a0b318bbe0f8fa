/* backend.h: the kernels of a device, as one const table of tasks. Operators choose by name here
 * and never by device.
 *
 * Each family declares its argument structs in its own header (elementwise.h, reduce.h ...).
 * Arguments are plain data: addresses, sizes, strides, scalars; nothing in them is owned.
 * ops/cpu/backend.c fills the table for the CPU; the sim device uses the same table and never
 * runs a task.
 *
 * What a kernel may rely on: the host has checked shapes, dtypes and attributes. Addresses are
 * aligned to their elements and no more, as a window may begin at any element of a storage; the
 * storage itself is aligned to 64 bytes. Operands overlap the result only where their header says
 * so. Values on the device (ids, indices, targets, flags) are not checked: the kernel does that.
 *
 * What it must not rely on: sizes may be 0 where a result has to be written all the same. These are
 * a reduction, a histogram or `above` over nothing, a product with k = 0, conv2d_weight without
 * images, norm_backward and cross_entropy (with its share and total) without rows,
 * embedding_backward without ids, mse without elements, attention_backward without queries, and a
 * sum of no decoded rows. A device that cannot launch over nothing handles them by itself.
 *
 * Results must not depend on timing, nor on how many threads run: the order of additions follows
 * from shapes. Atomic additions of floats do not fit this. */
#ifndef MOONSHARD_OPS_BACKEND_H
#define MOONSHARD_OPS_BACKEND_H

#include "exec/device.h"

#include "moonshard/tensor.h"

/* Elementwise kernels on operands a, b, c with the numbers value and high; x_backward takes what
 * forward saved and the gradient g, in the order of its operands. They share one argument struct
 * and one driver; apart only so that a trace and an error message name them. */
/* clang-format off */
#define MS_ELEMENTWISE_KERNELS(K) \
    K(cast) K(neg) K(exp) K(log) K(sqrt) K(rsqrt) K(square) K(abs) K(sign) K(relu) K(gelu) \
    K(gelu_erf) K(silu) K(tanh) K(sigmoid) K(sin) K(cos) \
    K(floor) K(ceil) K(round) K(pow) K(clamp) K(is_finite) \
    K(add) K(sub)      /* a + value * b */ \
    /* value * a * b, value * a / b */ \
    K(mul) K(div) K(scaled_mul) K(scaled_div) \
    K(maximum) K(minimum) K(swiglu) K(eq) K(ne) K(lt) K(le) K(gt) K(ge) K(lerp) K(addcmul) \
    K(addcdiv) K(where) \
    /* result, g */ \
    K(sqrt_backward) K(rsqrt_backward) K(relu_backward) K(tanh_backward) K(sigmoid_backward) \
    /* x, g */ \
    K(square_backward) K(abs_backward) K(gelu_backward) K(gelu_erf_backward) K(silu_backward) \
    K(pow_backward) K(clamp_backward) K(sin_backward) K(cos_backward) \
    /* g, a, b: -value * g * a / b^2 */ \
    K(div_backward) \
    /* a, b, g */ \
    K(maximum_backward) K(minimum_backward) K(swiglu_backward) \
    /* g, c: g * (1 - c) */ \
    K(lerp_backward) \
    K(difference_mul)  /* a, b, g: g * (b - a) */ \
    /* x, norm, g; value = p */ \
    K(p_norm_backward)

/* K(NAME) is the enumerator MS_KERNEL_NAME and the tasks ms_cpu_NAME and ms_cuda_NAME. The
 * elementwise kernels come first. */
#define MS_KERNELS(K) \
    /* elementwise.h */ \
    MS_ELEMENTWISE_KERNELS(K) \
    /* copy.h */ \
    K(copy) K(fill) \
    /* random.h */ \
    K(random) K(dropout) \
    /* reduce.h */ \
    K(reduce) K(reduce_arg) K(cumsum) K(histogram) \
    /* select.h */ \
    K(gather) K(scatter) K(scatter_add) K(topk) K(above) K(quantile) \
    /* matmul.h */ \
    K(matmul) \
    /* convolution.h */ \
    K(conv2d) K(conv2d_data) K(conv2d_weight) \
    /* pooling.h */ \
    K(max_pool2d) K(max_pool2d_backward) K(avg_pool2d) K(avg_pool2d_backward) \
    /* orthonormalize.h */ \
    K(orthonormalize) \
    /* codec.h */ \
    K(codec_encode) K(codec_decode) \
    /* fp8.h */ \
    K(fp8_encode) K(fp8_decode) K(fp8_span_most) K(fp8_span_encode) K(fp8_span_decode) \
    /* linear.h */ \
    K(activation) K(linear_backward) \
    /* norm.h */ \
    K(norm_forward) K(norm_backward) \
    /* softmax.h */ \
    K(softmax_forward) K(softmax_backward) K(cross_entropy) K(cross_entropy_backward) K(mse) \
    K(mse_backward) K(cross_entropy_share) K(cross_entropy_in_place) K(cross_entropy_total) \
    /* attention.h */ \
    K(attention_forward) K(attention_backward) K(rotary) \
    /* embedding.h */ \
    K(embedding) K(embedding_backward)
/* clang-format on */

/* The enumerators index the device's table, so the list above is the order of every table. */
#define MS_KERNEL_ENUM(name) MS_KERNEL_##name,
typedef enum ms_kernel { MS_KERNELS(MS_KERNEL_ENUM) MS_KERNEL_COUNT } ms_kernel;
#define MS_ELEMENTWISE_COUNT MS_KERNEL_copy

struct ms_matmul_args;
struct ms_convolution_args;

/* What a device has for this layer. A kernel family's table begins with ms_kernels, so that exec/
 * can hand it out without knowing this struct. */
typedef struct ms_backend {
    ms_kernels kernels; /* MS_KERNEL_COUNT tasks */
    /* Fills in what the kernel `matmul` needs beside shapes and addresses: libraries and plans,
     * which live as long as the engine. Not called on a device without values. */
    ms_status (*plan_matmul)(ms_engine *engine, struct ms_matmul_args *args);
    /* The same for the kernels of convolution.h. */
    ms_status (*plan_convolution)(ms_engine *engine, struct ms_convolution_args *args);
} ms_backend;

extern const ms_backend ms_cpu_backend, ms_cuda_backend;

/* The table of the engine's device, and one task of it. */
const ms_backend *ms_engine_backend(ms_engine *engine);
const ms_task *ms_engine_kernel(ms_engine *engine, ms_kernel kernel);

#endif
