/* random.c: operators that draw numbers: uniform, normal, randint, dropout.
 *
 * Numbers come from a counter, not from a state that advances: element i of a draw is a function of
 * the seed, the step, the draw's number and i. So any thread computes any part, backward draws a
 * mask again instead of saving it, and a recomputed function sees the numbers of its first run. */
#include "ops/random.h"

#include <math.h>

#include "moonshard/ops.h"
#include "ops/backend.h"
#include "ops/values.h"
#include "tensor/op.h"

/* Fills inputs[0] in place. Positions count in row-major order, so a tensor with other strides is
 * drawn into a contiguous one and copied: the same numbers whatever the strides. A recomputed
 * function gets the same attributes, and so the same numbers. The flops are a rough cost of Philox
 * for the sim device. */
static ms_status fill_random(ms_op_call *call, ms_random_args *args)
{
    ms_tensor *target = call->inputs[0], *out = NULL, *drawn = NULL;
    ms_dtype dtype = ms_tensor_dtype(target);
    if (!call->in_place) return ms_op_refuse(call, "it works in place only");
    ms_status status =
        ms_op_output(call, 0, dtype, ms_tensor_dims(target), ms_tensor_shape(target), &out);
    if (status || ms_tensor_count(out) == 0) return status;
    if (ms_tensor_is_contiguous(out)) drawn = ms_tensor_retain(out);
    else
        status =
            ms_tensor_new(call->engine, dtype, ms_tensor_dims(out), ms_tensor_shape(out), &drawn);
    if (status) return status;
    args->random = call->attributes.random.random;
    args->out = ms_tensor_data(drawn);
    args->count = ms_tensor_count(drawn);
    args->dtype = (uint8_t)dtype;
    ms_task_cost cost = { .flops = 10.0 * (double)args->count, .bytes = ms_tensor_bytes(drawn) };
    status = ms_tensor_enqueue(call->engine, ms_engine_kernel(call->engine, MS_KERNEL_random), args,
                               NULL, 0, &drawn, 1, cost);
    if (!status && drawn != out) status = ms_copy_into(call->engine, drawn, out);
    ms_tensor_release(drawn);
    return status;
}

/* The number as the float dtype holds it. */
static double rounded(ms_dtype dtype, double value)
{
    if (dtype == MS_F16) return ms_float_from_f16(ms_f16_from_float((float)value));
    if (dtype == MS_BF16) return ms_float_from_bf16(ms_bf16_from_float((float)value));
    return (float)value;
}

/* The next number that the dtype holds, towards +infinity if up. The bits of 16-bit floats of one
 * sign ascend with their size, so the neighbour is one more or one less; from zero it is the
 * smallest number of the sign asked for. Infinity can come out at the end of the range; the caller
 * tests for it. */
static double neighbour(ms_dtype dtype, double value, bool up)
{
    double direction = up ? INFINITY : -INFINITY;
    if (dtype == MS_F32) return nextafterf((float)value, (float)direction);
    uint16_t bits =
        dtype == MS_F16 ? ms_f16_from_float((float)value) : ms_bf16_from_float((float)value);
    /* Both zeros: the neighbour is the least subnormal number. */
    if ((bits & 0x7fffu) == 0) bits = up ? 1 : 0x8001u;
    else bits = (uint16_t)((bits >> 15 == 0) == up ? bits + 1 : bits - 1);
    return dtype == MS_F16 ? ms_float_from_f16(bits) : ms_float_from_bf16(bits);
}

/* The bounds are worked out in f64 on the host, once, so that the kernel only has to clamp. */
static ms_status uniform_forward(ms_op_call *call)
{
    double low = call->attributes.random.a, high = call->attributes.random.b;
    ms_dtype dtype = ms_tensor_dtype(call->inputs[0]);
    if (!ms_dtype_is_float(dtype))
        return ms_op_refuse(call, "it fills f32, f16 or bf16: use randint for integers");
    /* The width is used as f32, in which it may overflow. */
    if (!(low < high) || !isfinite((float)(high - low)))
        return ms_op_refuse(call, "low %g must be below high %g, and both finite", low, high);
    /* low <= x < high must hold after rounding to the dtype, too, so draws are kept between the
     * least and the greatest number of the dtype that satisfy it. */
    double least = rounded(dtype, low), greatest = rounded(dtype, high);
    /* Rounding to the dtype may have gone past a bound. */
    if (least < low) least = neighbour(dtype, least, true);
    if (greatest >= high) greatest = neighbour(dtype, greatest, false);
    if (!(least <= greatest) || !isfinite(least) || !isfinite(greatest))
        return ms_op_refuse(call, "%s has no number from %.9g up to but without %.9g",
                            ms_dtype_name(dtype), low, high);
    ms_random_args args = { .kind = MS_RANDOM_UNIFORM,
                            .a = (float)low,
                            .b = (float)high,
                            .least = (float)least,
                            .greatest = (float)greatest };
    return fill_random(call, &args);
}

/* mean + deviation * z. A deviation of 0 is allowed: it gives the mean. A result beyond the range
 * of f16 becomes infinite, as with any rounding to it. */
static ms_status normal_forward(ms_op_call *call)
{
    double mean = call->attributes.random.a, deviation = call->attributes.random.b;
    if (!ms_dtype_is_float(ms_tensor_dtype(call->inputs[0])))
        return ms_op_refuse(call, "it fills f32, f16 or bf16");
    if (!isfinite(mean) || !isfinite(deviation) || deviation < 0)
        return ms_op_refuse(
            call, "mean %g and deviation %g: both must be finite, the deviation not negative", mean,
            deviation);
    ms_random_args args = { .kind = MS_RANDOM_NORMAL, .a = (float)mean, .b = (float)deviation };
    return fill_random(call, &args);
}

/* low <= x < high. Limits arrive as doubles: for i64 the upper one is the greatest double below
 * 2^63, so that the conversion cannot overflow. The range is computed unsigned: from the least to
 * the greatest i64 it does not fit a signed number. It is not 0, as low < high. */
static ms_status randint_forward(ms_op_call *call)
{
    static const double least[MS_DTYPES] = {
        [MS_I64] = -9223372036854775808.0, [MS_I32] = -2147483648.0
    };
    static const double most[MS_DTYPES] = { [MS_I64] = 9223372036854774784.0,
                                            [MS_I32] = 2147483648.0,
                                            [MS_U16] = 65536.0,
                                            [MS_U8] = 256.0 };
    double low = call->attributes.random.a, high = call->attributes.random.b;
    ms_dtype dtype = ms_tensor_dtype(call->inputs[0]);
    if (ms_dtype_is_float(dtype) || dtype == MS_BOOL)
        return ms_op_refuse(call, "it fills i64, i32, u16 or u8");
    if (!(low < high) || low != floor(low) || high != floor(high))
        return ms_op_refuse(call, "low %g must be below high %g, and both whole", low, high);
    if (low < least[dtype] || high > most[dtype])
        return ms_op_refuse(call, "%s does not hold all numbers from %.17g to %.17g",
                            ms_dtype_name(dtype), low, high - 1);
    ms_random_args args = { .kind = MS_RANDOM_INTEGER, .first = (int64_t)low };
    args.range = (uint64_t)(int64_t)high - (uint64_t)args.first;
    return fill_random(call, &args);
}

/* The old values do not enter the result: dx = 0. Zeros and not NULL: the tensor was an input, and
 * its earlier history gets a gradient that says that nothing depends on it. */
static ms_status overwrite_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    return ms_op_full(gradient->engine, info->dtype, info->dims, info->shape, 0,
                      &gradient->results[0]);
}

/* ------------------------------------------------------------------ dropout */

/* out = in * mask / (1 - p), with the mask of the attributes. An element is dropped if the upper 24
 * bits of its draw are below p * 2^24, so p = 0 drops nothing and p = 1 everything; the scale is 0
 * then, which avoids 1 / 0. In place, and without gaps, `from` and `to` are the same tensor. */
static ms_status drop(ms_engine *engine, const ms_attributes *attributes, ms_tensor *in,
                      ms_tensor *out)
{
    ms_tensor *from = NULL, *to = NULL;
    double p = attributes->random.a;
    if (ms_tensor_count(out) == 0) return MS_OK;
    ms_status status = ms_op_as_contiguous(engine, in, &from);
    if (!status && ms_tensor_is_contiguous(out)) to = ms_tensor_retain(out);
    else if (!status)
        status = ms_tensor_new(engine, ms_tensor_dtype(out), ms_tensor_dims(out),
                               ms_tensor_shape(out), &to);
    if (!status) {
        ms_dropout_args args = { .random = attributes->random.random,
                                 .out = ms_tensor_data(to),
                                 .in = ms_tensor_data(from),
                                 .count = ms_tensor_count(out),
                                 /* Rounded up: a p above 0 always can drop something. */
                                 .threshold = (uint32_t)ceil(p * 16777216.0),
                                 .scale = p < 1 ? (float)(1 / (1 - p)) : 0,
                                 .dtype = (uint8_t)ms_tensor_dtype(out) };
        ms_task_cost cost = { .flops = 10.0 * (double)args.count,
                              .bytes = 2 * ms_tensor_bytes(out) };
        status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_dropout), &args,
                                   &from, 1, &to, 1, cost);
    }
    if (!status && to != out) status = ms_copy_into(engine, to, out);
    ms_tensor_release(from);
    ms_tensor_release(to);
    return status;
}

/* y = x * mask / (1 - p) (Srivastava et al. 2014). Scaling by 1 / (1 - p) in training leaves
 * nothing to do in evaluation. */
static ms_status dropout_forward(ms_op_call *call)
{
    ms_tensor *in = call->inputs[0], *out = NULL;
    double p = call->attributes.random.a;
    ms_dtype dtype = ms_tensor_dtype(in);
    if (!ms_dtype_is_float(dtype))
        return ms_op_refuse(call, "it needs f32, f16 or bf16: cast first");
    if (!(p >= 0 && p <= 1)) return ms_op_refuse(call, "p is %g: it must be from 0 to 1", p);
    ms_status status = ms_op_output(call, 0, dtype, ms_tensor_dims(in), ms_tensor_shape(in), &out);
    return status ? status : drop(call->engine, &call->attributes, in, out);
}

/* dx = g * mask / (1 - p). The mask is drawn again from the attributes, so nothing is saved. The
 * numbers are the same because the attributes, which the tape keeps, hold seed, step and draw. */
static ms_status dropout_backward(ms_op_gradient *gradient)
{
    const ms_tensor_info *info = &gradient->inputs[0];
    ms_tensor *out = NULL;
    if (!gradient->needs[0] || !gradient->gradients[0]) return MS_OK;
    ms_status status = ms_tensor_new(gradient->engine, info->dtype, info->dims, info->shape, &out);
    if (!status)
        status = drop(gradient->engine, &gradient->attributes, gradient->gradients[0], out);
    if (!status) gradient->results[0] = out;
    else ms_tensor_release(out);
    return status;
}

const ms_op ms_op_uniform = {
    "uniform", uniform_forward, overwrite_backward, 1, 1, MS_OP_IN_PLACE | MS_OP_OVERWRITES
};
const ms_op ms_op_normal = {
    "normal", normal_forward, overwrite_backward, 1, 1, MS_OP_IN_PLACE | MS_OP_OVERWRITES
};
const ms_op ms_op_randint = { "randint", randint_forward,
                              NULL,      1,
                              1,         MS_OP_IN_PLACE | MS_OP_NO_GRAD | MS_OP_OVERWRITES };
const ms_op ms_op_dropout = { "dropout", dropout_forward, dropout_backward, 1, 1, MS_OP_IN_PLACE };
