/* elementwise.c: the elementwise operators: a table of what each computes, saves and passes back,
 * and the two functions that read it.
 *
 * An operator is one rule: which kernel computes it from which operands, what forward saves, and
 * for each input which kernel computes its gradient from the incoming gradient and what was saved.
 * The rules are data, so that a new operator is one line, and broadcasting, dtypes, in-place forms
 * and the sums over repeated dimensions are handled once for all.
 *
 * Saved is what the derivative needs and costs the least to keep. Where the derivative can be
 * written in terms of the result (exp, sqrt, relu, tanh, sigmoid), the result is saved: it exists
 * anyway, and the input's memory can be freed or overwritten in place. */

#include "ops/elementwise_args.h"

#include <math.h>
#include <string.h>

#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/fp8.h"
#include "tensor/op.h"
#include "ops/values.h"
#include "ops/sum_to.h"

/* ---------------------------------------------------------------- the table */

/* Operands of forward and backward kernels. */
enum {
    NONE,
    /* Inputs; an absent third one is the number. */
    IN0,
    IN1,
    IN2,
    /* The incoming gradient. */
    G,
    /* What forward saved, in the order of inputs, then the result; an absent third one is the
     * number. */
    S0,
    S1,
    S2,
    /* The number: scalar.value. */
    N,
    /* The constant 0. minimum(ZERO, ZERO) is a gradient of 0 whatever the incoming gradient is. */
    ZERO
};

/* What forward saves, in this order: inputs 0 to 2, then the result. */
enum { SAVE0 = 1, SAVE1 = 2, SAVE2 = 4, SAVE_RESULT = 8 };

enum {
    WHOLE = 1,        /* works on integers */
    TRUTH = 2,        /* works on bool */
    TO_BOOL = 4,      /* the result is bool */
    FACTOR = 8,       /* scalar.value is a factor: 0 means 1 unless has_low */
    BOUNDS = 16,      /* scalar.value and high, where has_low and has_high */
    USES_NUMBER = 32, /* scalar.value is an operand or an exponent */
    MASK0 = 64,       /* input 0 is a bool mask, not one of the operands that share a dtype */
    MASK1 = 128,      /* the same for input 1 */
    MOST = 256        /* on a GPU the kernels give the greatest size of results: see ops/fp8.h */
};

/* How the gradient of one input is computed: a kernel and its operands. Operands are those of the
 * enumeration above. */
typedef struct gradient_part {
    uint8_t kernel, operands[3];
} gradient_part;

/* All that is known of an operator. operands end with NONE, which is 0, so short lists need no
 * filling up. `save` decides the positions S0 to S2 of backward: the first saved tensor is S0,
 * whichever input it is. */
typedef struct elementwise_rule {
    uint8_t kernel, operands[3];
    uint16_t flags;
    uint8_t save;
    /* Of each input; MS_KERNEL_cast of G passes the gradient on as it is. */
    gradient_part backward[3];
} elementwise_rule;

/* Two forms of a gradient_part: the gradient as it is, and a kernel with operands. */
#define PASS                  \
    {                         \
        MS_KERNEL_cast, { G } \
    }
#define BACK(kernel, ...)                   \
    {                                       \
        MS_KERNEL_##kernel, { __VA_ARGS__ } \
    }

static ms_status run_forward(ms_op_call *call, const elementwise_rule *rule);
static ms_status run_backward(ms_op_gradient *gradient, const elementwise_rule *rule);

/* Defines an operator: its rule, a forward function that hands the rule to run_forward, and the
 * ms_op. Functions are needed since an ms_op has no place for data of its own. */
#define OP(name, least, most, op_flags, backward_function, ...)                                   \
    static const elementwise_rule rule_##name = { __VA_ARGS__ };                                  \
    static ms_status forward_##name(ms_op_call *call) { return run_forward(call, &rule_##name); } \
    const ms_op ms_op_##name = { #name, forward_##name, backward_function, least, most, op_flags };
/* With a gradient, and an in-place twin. */
#define SMOOTH(name, least, most, ...) TWIN(name, least, most, 0, __VA_ARGS__)
#define WIDE(name, least, most, ...) TWIN(name, least, most, MS_OP_WIDE, __VA_ARGS__)
#define TWIN(name, least, most, more, ...)                                              \
    static ms_status backward_##name(ms_op_gradient *gradient);                         \
    OP(name, least, most, MS_OP_IN_PLACE | MS_OP_ELEMENTWISE | (more), backward_##name, \
       __VA_ARGS__)                                                                     \
    static ms_status backward_##name(ms_op_gradient *gradient)                          \
    {                                                                                   \
        return run_backward(gradient, &rule_##name);                                    \
    }
/* To bool, of two tensors and of a tensor and a number. */
#define COMPARE(name, more)                                                                  \
    OP(name, 2, 2, MS_OP_NO_GRAD | MS_OP_PARTS, NULL, MS_KERNEL_##name, { IN0, IN1 },        \
       WHOLE | TO_BOOL | (more), 0, { { 0 } })                                               \
    OP(name##_scalar, 1, 1, MS_OP_NO_GRAD | MS_OP_PARTS, NULL, MS_KERNEL_##name, { IN0, N }, \
       WHOLE | TO_BOOL | USES_NUMBER | (more), 0, { { 0 } })

/* One input x, result y, incoming gradient g. exp: dx = g y. log: dx = g / x. sqrt: dx = g / (2 y).
 * rsqrt: dx = -g y^3 / 2. relu: dx = g where y > 0. tanh: dx = g (1 - y^2). sigmoid: dx = g y (1 -
 * y). sin: dx = g cos x. cos: dx = -g sin x. sign: dx = 0. */
SMOOTH(neg, 1, 1, MS_KERNEL_neg, { IN0 }, WHOLE, 0, { BACK(neg, G) })
WIDE(exp, 1, 1, MS_KERNEL_exp, { IN0 }, 0, SAVE_RESULT, { BACK(mul, G, S0) })
WIDE(log, 1, 1, MS_KERNEL_log, { IN0 }, 0, SAVE0, { BACK(div, G, S0) })
SMOOTH(sqrt, 1, 1, MS_KERNEL_sqrt, { IN0 }, 0, SAVE_RESULT, { BACK(sqrt_backward, S0, G) })
WIDE(rsqrt, 1, 1, MS_KERNEL_rsqrt, { IN0 }, 0, SAVE_RESULT, { BACK(rsqrt_backward, S0, G) })
WIDE(square, 1, 1, MS_KERNEL_square, { IN0 }, WHOLE, SAVE0, { BACK(square_backward, S0, G) })
SMOOTH(abs, 1, 1, MS_KERNEL_abs, { IN0 }, WHOLE, SAVE0, { BACK(abs_backward, S0, G) })
SMOOTH(sign, 1, 1, MS_KERNEL_sign, { IN0 }, WHOLE, 0, { BACK(minimum, ZERO, ZERO) })
SMOOTH(relu, 1, 1, MS_KERNEL_relu, { IN0 }, WHOLE, SAVE_RESULT, { BACK(relu_backward, S0, G) })
SMOOTH(gelu, 1, 1, MS_KERNEL_gelu, { IN0 }, 0, SAVE0, { BACK(gelu_backward, S0, G) })
SMOOTH(gelu_erf, 1, 1, MS_KERNEL_gelu_erf, { IN0 }, 0, SAVE0, { BACK(gelu_erf_backward, S0, G) })
SMOOTH(silu, 1, 1, MS_KERNEL_silu, { IN0 }, 0, SAVE0, { BACK(silu_backward, S0, G) })
SMOOTH(tanh, 1, 1, MS_KERNEL_tanh, { IN0 }, 0, SAVE_RESULT, { BACK(tanh_backward, S0, G) })
SMOOTH(sigmoid, 1, 1, MS_KERNEL_sigmoid, { IN0 }, 0, SAVE_RESULT, { BACK(sigmoid_backward, S0, G) })
SMOOTH(sin, 1, 1, MS_KERNEL_sin, { IN0 }, 0, SAVE0, { BACK(sin_backward, S0, G) })
SMOOTH(cos, 1, 1, MS_KERNEL_cos, { IN0 }, 0, SAVE0, { BACK(cos_backward, S0, G) })
SMOOTH(clamp, 1, 1, MS_KERNEL_clamp, { IN0 }, WHOLE | BOUNDS, SAVE0,
       { BACK(clamp_backward, S0, G) })
OP(is_finite, 1, 1, MS_OP_NO_GRAD | MS_OP_PARTS, NULL, MS_KERNEL_is_finite, { IN0 },
   WHOLE | TO_BOOL, 0, { { 0 } })

/* A tensor x and a number v: x + v, v x, x / v, v - x, v / x. The gradient of v / x is -g v / x^2.
 */
SMOOTH(add_scalar, 1, 1, MS_KERNEL_add, { IN0, N }, WHOLE | USES_NUMBER, 0, { PASS })
SMOOTH(mul_scalar, 1, 1, MS_KERNEL_mul, { IN0, N }, WHOLE | USES_NUMBER, 0, { BACK(mul, G, N) })
SMOOTH(div_scalar, 1, 1, MS_KERNEL_div, { IN0, N }, USES_NUMBER, 0, { BACK(div, G, N) })
SMOOTH(rsub_scalar, 1, 1, MS_KERNEL_sub, { N, IN0 }, WHOLE | USES_NUMBER, 0, { BACK(neg, G) })
WIDE(rdiv_scalar, 1, 1, MS_KERNEL_div, { N, IN0 }, USES_NUMBER, SAVE0,
     { BACK(div_backward, G, N, S0) })
SMOOTH(maximum_scalar, 1, 1, MS_KERNEL_maximum, { IN0, N }, WHOLE | USES_NUMBER, SAVE0,
       { BACK(maximum_backward, S0, N, G) })
SMOOTH(minimum_scalar, 1, 1, MS_KERNEL_minimum, { IN0, N }, WHOLE | USES_NUMBER, SAVE0,
       { BACK(minimum_backward, S0, N, G) })

/* Two inputs a and b. add and sub take b times a factor, and so does b's gradient. mul: da = g b,
 * db = g a. div: da = g / b, db = -g a / b^2. swiglu is a silu(b), so da = g silu(b), which is
 * swiglu of g and b. */
SMOOTH(add, 2, 2, MS_KERNEL_add, { IN0, IN1 }, WHOLE | FACTOR, 0, { PASS, BACK(add, ZERO, G) })
SMOOTH(sub, 2, 2, MS_KERNEL_sub, { IN0, IN1 }, WHOLE | FACTOR, 0, { PASS, BACK(sub, ZERO, G) })
SMOOTH(mul, 2, 2, MS_KERNEL_mul, { IN0, IN1 }, WHOLE, SAVE0 | SAVE1,
       { BACK(mul, G, S1), BACK(mul, G, S0) })
SMOOTH(div, 2, 2, MS_KERNEL_div, { IN0, IN1 }, 0, SAVE0 | SAVE1,
       { BACK(div, G, S1), BACK(div_backward, G, S0, S1) })
SMOOTH(maximum, 2, 2, MS_KERNEL_maximum, { IN0, IN1 }, WHOLE, SAVE0 | SAVE1,
       { BACK(maximum_backward, S0, S1, G), BACK(maximum_backward, S1, S0, G) })
SMOOTH(minimum, 2, 2, MS_KERNEL_minimum, { IN0, IN1 }, WHOLE, SAVE0 | SAVE1,
       { BACK(minimum_backward, S0, S1, G), BACK(minimum_backward, S1, S0, G) })
SMOOTH(swiglu, 2, 2, MS_KERNEL_swiglu, { IN0, IN1 }, MOST, SAVE0 | SAVE1,
       { BACK(swiglu, G, S1), BACK(swiglu_backward, S0, S1, G) })
COMPARE(eq, TRUTH)
COMPARE(ne, TRUTH)
COMPARE(lt, 0)
COMPARE(le, 0)
COMPARE(gt, 0)
COMPARE(ge, 0)

/* a + c (b - a): da = g (1 - c), db = g c, dc = g (b - a). addcmul, a + v b c: da = g, db = v g c,
 * dc = v g b. addcdiv, a + v b / c: da = g, db = v g / c, dc = -v g b / c^2. */
SMOOTH(lerp, 2, 3, MS_KERNEL_lerp, { IN0, IN1, IN2 }, USES_NUMBER, SAVE0 | SAVE1 | SAVE2,
       { BACK(lerp_backward, G, S2), BACK(mul, G, S2), BACK(difference_mul, S0, S1, G) })
SMOOTH(addcmul, 3, 3, MS_KERNEL_addcmul, { IN0, IN1, IN2 }, WHOLE | FACTOR, SAVE1 | SAVE2,
       { PASS, BACK(scaled_mul, G, S1), BACK(scaled_mul, G, S0) })
SMOOTH(addcdiv, 3, 3, MS_KERNEL_addcdiv, { IN0, IN1, IN2 }, FACTOR, SAVE1 | SAVE2,
       { PASS, BACK(scaled_div, G, S1), BACK(div_backward, G, S0, S1) })
/* The in-place form of where would write into the mask, so there is none. The gradient goes to b
 * where the mask was true and to c where it was false; the other one gets 0 there. The mask's own
 * entry is never used, as bool needs no gradient. */
static ms_status backward_where(ms_op_gradient *gradient);
OP(where, 3, 3, MS_OP_PARTS, backward_where, MS_KERNEL_where, { IN0, IN1, IN2 },
   WHOLE | TRUTH | MASK0, SAVE0, { PASS, BACK(where, S0, G, ZERO), BACK(where, S0, ZERO, G) })
static ms_status backward_where(ms_op_gradient *gradient)
{
    return run_backward(gradient, &rule_where);
}

/* The value where the mask is true; the gradient is 0 there. */
SMOOTH(masked_fill, 2, 2, MS_KERNEL_where, { IN1, N, IN0 }, WHOLE | TRUTH | MASK1 | USES_NUMBER,
       SAVE1, { BACK(where, S0, ZERO, G) })

/* dx = 0. Integers have no parts to cut off, so their kernel is the copy. */
static const elementwise_rule rule_whole_already = {
    MS_KERNEL_cast, { IN0 }, WHOLE, 0, { BACK(minimum, ZERO, ZERO) }
};
#define TO_WHOLE(name)                                                                   \
    static const elementwise_rule rule_##name = {                                        \
        MS_KERNEL_##name, { IN0 }, 0, 0, { BACK(minimum, ZERO, ZERO) }                   \
    };                                                                                   \
    static ms_status forward_##name(ms_op_call *call)                                    \
    {                                                                                    \
        bool is_float = ms_dtype_is_float(ms_tensor_dtype(call->inputs[0]));             \
        return run_forward(call, is_float ? &rule_##name : &rule_whole_already);         \
    }                                                                                    \
    static ms_status backward_##name(ms_op_gradient *gradient)                           \
    {                                                                                    \
        return run_backward(gradient, &rule_##name);                                     \
    }                                                                                    \
    const ms_op ms_op_##name = {                                                         \
        #name, forward_##name, backward_##name, 1, 1, MS_OP_IN_PLACE | MS_OP_ELEMENTWISE \
    };
TO_WHOLE(floor)
TO_WHOLE(ceil)
TO_WHOLE(round)

/* x^2 and x^1 have kernels of their own; the derivative of x^0 is 0 even at 0. */
static const elementwise_rule rule_power = {
    MS_KERNEL_pow, { IN0 }, WHOLE | USES_NUMBER, SAVE0, { BACK(pow_backward, S0, G) }
};
static const elementwise_rule rule_power_two = {
    MS_KERNEL_square, { IN0 }, WHOLE | USES_NUMBER, SAVE0, { BACK(square_backward, S0, G) }
};
static const elementwise_rule rule_power_one = {
    MS_KERNEL_cast, { IN0 }, WHOLE | USES_NUMBER, 0, { PASS }
};
static const elementwise_rule rule_power_zero = {
    MS_KERNEL_pow, { IN0 }, WHOLE | USES_NUMBER, 0, { BACK(minimum, ZERO, ZERO) }
};

/* Forward and backward choose by the same exponent, so they use the same rule. The comparison with
 * whole numbers is exact in f64. */
static const elementwise_rule *power_rule(double exponent)
{
    if (exponent == 2) return &rule_power_two;
    if (exponent == 1) return &rule_power_one;
    return exponent == 0 ? &rule_power_zero : &rule_power;
}
static ms_status forward_pow(ms_op_call *call)
{
    return run_forward(call, power_rule(call->attributes.scalar.value));
}
static ms_status backward_pow(ms_op_gradient *gradient)
{
    return run_backward(gradient, power_rule(gradient->attributes.scalar.value));
}
const ms_op ms_op_pow = { "pow", forward_pow, backward_pow,
                          1,     1,           MS_OP_IN_PLACE | MS_OP_ELEMENTWISE | MS_OP_WIDE };

/* ------------------------------------------------------------------ forward */

/* Whether a tensor represents a number, so that its dtype does not change that of the result: one
 * element; under autocast, as in PyTorch, one without dimensions. */
static bool is_number(bool autocast, const ms_tensor *tensor)
{
    return autocast ? ms_tensor_dims(tensor) == 0 : ms_tensor_count(tensor) == 1;
}

/* The dtype that the operands share; masks are left out. A number may be of another float dtype.
 * Mixed dtypes are refused outside of autocast, and not promoted: which of them should win is for
 * the script to say. */
static ms_status common_dtype(const ms_op_call *call, const elementwise_rule *rule, ms_dtype *out)
{
    const ms_tensor *main_input = call->inputs[rule->flags & MASK0 ? 1 : 0];
    bool autocast = ms_engine_autocast(call->engine) != MS_F32;
    for (uint32_t i = 0; i < call->input_count; i++) {
        const ms_tensor *input = call->inputs[i];
        if (!input) continue;
        ms_dtype dtype = ms_tensor_dtype(input);
        if ((i == 0 && (rule->flags & MASK0)) || (i == 1 && (rule->flags & MASK1))) {
            if (dtype != MS_BOOL)
                return ms_op_refuse(call,
                                    "the mask must be bool: compare first (for example with ne)");
            continue;
        }
        if (ms_tensor_dtype(main_input) == dtype) continue;
        bool floats = ms_dtype_is_float(dtype) && ms_dtype_is_float(ms_tensor_dtype(main_input)),
             is_tensor = !is_number(autocast, input),
             both = is_tensor != is_number(autocast, main_input) && (is_tensor || autocast);
        ms_dtype shared = dtype;
        if (!floats
            || (both
                && !ms_autocast_shared(call->engine, dtype, ms_tensor_dtype(main_input), &shared)))
            return ms_op_refuse(call, "the dtypes differ: cast one of them with x:to");
        /* In place, the target keeps its dtype. */
        if (call->in_place) continue;
        if (both ? dtype == shared : is_tensor) main_input = input;
    }
    *out = ms_tensor_dtype(main_input);
    if ((call->op->flags & MS_OP_WIDE) && !call->in_place)
        *out = ms_autocast_wide(call->engine, *out);
    return MS_OK;
}

/* What integers and bool refuse. A number for an integer tensor must be whole: computing in float
 * and cutting would give other results than the script says. bool takes numbers as true or false,
 * so they need not be whole. */
static ms_status check_numbers(const ms_op_call *call, const elementwise_rule *rule, ms_dtype dtype)
{
    if (dtype == MS_BOOL && !(rule->flags & TRUTH))
        return ms_op_refuse(call, "it does not work on bool: cast to a number first");
    if (ms_dtype_is_float(dtype) || dtype == MS_BOOL) return MS_OK;
    if (!(rule->flags & WHOLE)) return ms_op_refuse(call, "it needs f32, f16 or bf16: cast first");
    double value = call->attributes.scalar.value, high = call->attributes.scalar.high;
    bool whole = true;
    if (rule->flags & (USES_NUMBER | FACTOR)) whole = value == floor(value) && isfinite(value);
    if (rule->flags & BOUNDS)
        whole = (!call->attributes.scalar.has_low || value == floor(value))
                && (!call->attributes.scalar.has_high || high == floor(high));
    if (!whole)
        return ms_op_refuse(call, "%g is not a whole number: cast the tensor to f32 first",
                            value == floor(value) && isfinite(value) ? high : value);
    if (rule->kernel == MS_KERNEL_pow && value < 0)
        return ms_op_refuse(
            call, "the exponent of an integer cannot be %g: cast the tensor to f32 first", value);
    return MS_OK;
}

/* The shape to which all inputs broadcast, the mask included. The result of an in-place call must
 * have the target's shape; ms_op_output checks that. */
static ms_status common_shape(const ms_op_call *call, uint32_t *dims, int64_t *shape)
{
    *dims = 0;
    for (uint32_t i = 0; i < call->input_count; i++) {
        const ms_tensor *input = call->inputs[i];
        if (input
            && !ms_shape_broadcast(*dims, shape, ms_tensor_dims(input), ms_tensor_shape(input),
                                   dims, shape))
            return ms_op_refuse(call, "these shapes do not broadcast: counted from the last "
                                      "dimension, sizes must be equal or 1");
    }
    return MS_OK;
}

/* Saves input i. If the call writes in place and input i shares that memory, a copy is saved
 * instead, as backward needs the values before the write; *copy is the caller's to release. The
 * copy is the price of an in-place operator whose gradient needs its input; those that need the
 * result only have none. */
static ms_status save_input(ms_op_call *call, uint32_t i, ms_tensor **copy)
{
    ms_tensor *input = call->inputs[i];
    if (call->in_place && ms_tensor_storage(input) == ms_tensor_storage(call->inputs[0])) {
        ms_status status = ms_copy_new(call->engine, input, copy);
        if (status) return status;
        input = *copy;
    }
    return ms_op_save(call, input);
}

/* In the order of the inputs, which the rules' S0 to S2 count on. An absent input is not saved: its
 * place is taken by the number. */
static ms_status save_inputs(ms_op_call *call, const elementwise_rule *rule)
{
    if (!call->record) return MS_OK;
    for (uint32_t i = 0; i < call->input_count; i++) {
        if (!(rule->save & (1u << i)) || !call->inputs[i]) continue;
        ms_tensor *copy = NULL;
        ms_status status = save_input(call, i, &copy);
        ms_tensor_release(copy);
        if (status) return status;
    }
    return MS_OK;
}

/* Writes defaults into the attributes, which the tape keeps: backward then reads the same numbers.
 * A missing bound is infinite, so the kernel compares always. It changes nothing when it is run
 * again on its own result. */
static void normalize(ms_attributes *attributes, const elementwise_rule *rule)
{
    if ((rule->flags & FACTOR) && attributes->scalar.value == 0 && !attributes->scalar.has_low)
        attributes->scalar.value = 1;
    if ((rule->flags & BOUNDS) && !attributes->scalar.has_low) attributes->scalar.value = -INFINITY;
    if ((rule->flags & BOUNDS) && !attributes->scalar.has_high) attributes->scalar.high = INFINITY;
}

/* Forward of every elementwise operator. Inputs are saved before the task is enqueued: in place,
 * they must be copied before they are overwritten. The order of operands is the rule's, and may
 * differ from that of the inputs (masked_fill). */
static ms_status run_forward(ms_op_call *call, const elementwise_rule *rule)
{
    ms_dtype dtype = MS_F32;
    uint32_t dims = 0;
    int64_t shape[MS_DIMS_MAX];
    ms_tensor *out = NULL;
    normalize(&call->attributes, rule);
    ms_status status = common_dtype(call, rule, &dtype);
    if (!status) status = check_numbers(call, rule, dtype);
    if (!status) status = common_shape(call, &dims, shape);
    if (!status)
        status = ms_op_output(call, 0, rule->flags & TO_BOOL ? MS_BOOL : dtype, dims, shape, &out);
    if (!status) status = save_inputs(call, rule);
    if (status) return status;

    double number = call->attributes.scalar.value;
    /* add and sub are kernels with a factor: with a number in place of an operand, it is 1. */
    bool is_operand = (rule->flags & USES_NUMBER) && rule->kernel != MS_KERNEL_pow;
    ms_elementwise run = { .kernel = (ms_kernel)rule->kernel,
                           .value = is_operand ? 1 : number,
                           .high = call->attributes.scalar.high };
    if ((rule->flags & MOST) && dtype == MS_BF16)
        run.gives_most = call->attributes.scalar.gives_most = ms_fp8_wants_most(call->engine);
    for (; run.count < 3 && rule->operands[run.count] != NONE; run.count++) {
        uint32_t which = rule->operands[run.count];
        bool tensor = which != N && which - IN0 < call->input_count;
        run.operands[run.count] =
            (ms_operand){ .tensor = tensor ? call->inputs[which - IN0] : NULL, .number = number };
    }
    status = ms_elementwise_into(call->engine, &run, out);
    if (!status && (rule->save & SAVE_RESULT)) status = ms_op_save(call, out);
    return status;
}

/* ----------------------------------------------------------------- backward */

/* The gradient of one input in the shape and dtype of the result, before what was broadcast is
 * summed. A factor, bounds and an exponent are parameters of the gradient's kernel as well; a
 * number that was an operand is one here too (N). Where the gradient is the incoming one, that
 * tensor is returned, without a task. A part without a tensor, as minimum(ZERO, ZERO), fills a
 * tensor with its number. */
static ms_status backward_part(const ms_op_gradient *gradient, const elementwise_rule *rule,
                               const gradient_part *part, ms_tensor **out)
{
    double number = gradient->attributes.scalar.value;
    bool scaled = rule->flags & (FACTOR | BOUNDS) || part->kernel == MS_KERNEL_pow_backward;
    ms_elementwise run = { .kernel = (ms_kernel)part->kernel,
                           .value = scaled ? number : 1,
                           .high = gradient->attributes.scalar.high,
                           .gives_most = gradient->attributes.scalar.gives_most };
    bool pass = run.kernel == MS_KERNEL_cast || (run.kernel == MS_KERNEL_add && number == 1);
    if (pass) {
        *out = ms_tensor_retain(gradient->gradients[0]);
        return MS_OK;
    }
    for (; run.count < 3 && part->operands[run.count] != NONE; run.count++) {
        uint32_t which = part->operands[run.count];
        ms_operand *operand = &run.operands[run.count];
        operand->number = which == ZERO ? 0 : number;
        if (which == G) operand->tensor = gradient->gradients[0];
        else if (which >= S0 && which <= S2 && which - S0 < gradient->saved_count)
            operand->tensor = gradient->saved[which - S0];
    }
    return ms_elementwise_new(gradient->engine, &run, gradient->outputs[0].dtype,
                              gradient->outputs[0].dims, gradient->outputs[0].shape, out);
}

/* Backward of every elementwise operator. Each needed gradient is computed in the result's shape,
 * summed over the dimensions along which the input was broadcast, and cast to the input's dtype.
 * After an error no result is left. A needed input always has a part in its rule; a bool mask never
 * needs one. */
static ms_status run_backward(ms_op_gradient *gradient, const elementwise_rule *rule)
{
    if (!gradient->gradients[0]) return MS_OK;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < gradient->input_count && !status; i++) {
        if (!gradient->needs[i]) continue;
        ms_tensor *full = NULL, *summed = NULL;
        status = backward_part(gradient, rule, &rule->backward[i], &full);
        if (!status) status = ms_op_sum_to(gradient->engine, full, &gradient->inputs[i], &summed);
        if (!status)
            status = ms_op_as_dtype(gradient->engine, summed, gradient->inputs[i].dtype,
                                    &gradient->results[i]);
        ms_tensor_release(summed);
        ms_tensor_release(full);
    }
    for (uint32_t i = 0; i < gradient->input_count && status; i++) {
        ms_tensor_release(gradient->results[i]);
        gradient->results[i] = NULL;
    }
    return status;
}
