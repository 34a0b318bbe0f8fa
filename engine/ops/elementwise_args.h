/* elementwise_args.h: one function of up to three operands at each position: arguments of the
 * kernels, and how operators call them. */
#ifndef MOONSHARD_OPS_ELEMENTWISE_ARGS_H
#define MOONSHARD_OPS_ELEMENTWISE_ARGS_H

#include "ops/backend.h"
#include "ops/loop.h"

/* In place of an operand's dtype: the operand is the number of the arguments. */
#define MS_NUMBER MS_DTYPES

/* K(NAME): the elementwise kernels that integers have, too. The tables of all devices are made from
 * this list. An operator on integers (WHOLE in elementwise.c) uses one of them. */
/* clang-format off */
#define MS_WHOLE_KERNELS(K) \
    K(cast) K(neg) K(square) K(abs) K(sign) K(relu) K(pow) K(clamp) K(is_finite) K(add) K(sub) \
    K(mul) K(maximum) K(minimum) K(eq) K(ne) K(lt) K(le) K(gt) K(ge) K(addcmul) K(where)
/* clang-format on */

/* So many numbers hold the greatest size of a result, one for each block of a kernel: a multiple of
 * 16. */
#define MS_ELEMENTWISE_MOST 2112

/* Task arguments. Operand 0 of the loop is the result. `out` may be one of the inputs in the same
 * window; other overlaps have been copied away. most: see ms_tensor_hold_most, of the result,
 * MS_ELEMENTWISE_MOST numbers; NULL: not wanted, as always on a CPU and of kernels other than
 * swiglu and swiglu_backward. */
typedef struct ms_elementwise_args {
    ms_loop loop;
    void *out;
    const void *in[3];
    uint32_t *most;
    double number;      /* operands of dtype MS_NUMBER */
    double value, high; /* parameters of the kernel */
    uint8_t kernel, operands, out_dtype, in_dtype[3];
    bool integers; /* compute in i64, not f32 */
} ms_elementwise_args;

/* An operand of a call: a tensor, or, with tensor NULL, the number. A call has at most one number.
 */
typedef struct ms_operand {
    ms_tensor *tensor;
    double number;
} ms_operand;

/* A call: kernel, operands that broadcast to the result, parameters. gives_most: the kernel gives
 * the greatest size of the result, which keeps it. */
typedef struct ms_elementwise {
    ms_kernel kernel;
    ms_operand operands[3];
    uint32_t count;
    double value, high;
    bool gives_most;
} ms_elementwise;

#endif
