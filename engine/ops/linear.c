/* linear.c: linear layers: the product with a weight, bias and activation, and their gradients.
 *
 * y = act(x w^T + bias) for weights [out, in], y = act(x w + bias) for linear_t's [in, out]. All
 * leading dimensions of x are rows. The weight is never transposed in memory: the product reads it
 * through a view with swapped strides.
 *
 * A coded weight (u8, codec.c) is decoded for each product, in the forward and again in the
 * backward, and its numbers are released with the call: between the two the tape holds the codes.
 * It has no gradient. The products get what they would get from a weight with these numbers, so the
 * bits are the same.
 *
 * With h = dy * act'(before), where before = x w^T + bias: dx = h w, dw = h^T x, dbias = the sums
 * of h's columns. One kernel reads dy once and makes h and dbias; two products make dx and dw.
 *
 * On a GPU, with operands of 16 bits, a product makes one thing more in the same task, which takes
 * a pass of its own elsewhere (ms_gemm_extra):
 * - The activation's result, in the forward. The width must be a multiple of MS_GELU_COLUMNS. It is
 *   done with and without a gradient, so that both give the same bits.
 * - h of the layer before, with dx, where both layers are one operator (mlp.c). Two operators hand
 *   dx from one to the other, since scripts may have hooks there.
 * - dbias, with dw, where both have one dtype. The incoming gradient must go into the product as it
 *   arrived, without an activation. The library adds in f32; our kernel adds 64 rows in f32, and
 *   these sums in f64.
 *
 * What is made in this way, and the memory for it, depend on shapes, dtypes and the kind of device
 * (ms_engine_is_for_gpu) alone. Where the library cannot make it, the same task launches our kernel
 * after the product (ops/cuda/matmul.c).
 *
 * A backward in two parts (op.h) keeps between the parts what both products read: the gradient h
 * before the activation, if there is one, and in 8 bits the codes of h that the second product
 * reads. Other results that the pass or a product computes, such as sums for the bias, are computed
 * in the same part as that pass or product.
 *
 * The library computes gelu and its slope of the sums in f32; our kernel computes them of the
 * rounded sums. The library's tanh has errors of some 1e-4, so f32 stays with our kernel. */
#include "ops/linear.h"

#include <string.h>

#include "exec/engine.h"
#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/fp8.h"
#include "ops/matmul.h"
#include "ops/values.h"
#include "tensor/products.h"
#include "tensor/op.h"
#include "tensor/tensor.h"

/* The bias, or NULL: it may be absent or given as NULL. */
static ms_tensor *bias_of(const ms_op_call *call)
{
    return call->input_count > 2 ? call->inputs[2] : NULL;
}

/* Codes with a codec; others are refused with their dtype. */
static bool is_coded(const ms_tensor *weight, const ms_attributes *attributes)
{
    return weight->dtype == MS_U8 && attributes->linear.codec.block > 0;
}

/* x [..., in], weight [out, in] or [in, out], bias [out] or none; *width: out; *dtype: of the
 * products and of the result. A coded weight has none of its own. */
static ms_status linear_check(const ms_op_call *call, int64_t *width, ms_dtype *dtype)
{
    const ms_tensor *x = call->inputs[0], *w = call->inputs[1], *bias = bias_of(call);
    /* linear_t takes weights as [in, out], as some published models store them. */
    bool turned = call->op == &ms_op_linear_t, coded = is_coded(w, &call->attributes);
    ms_tensor *floats[] = { call->inputs[0], coded ? NULL : call->inputs[1], bias_of(call) };
    ms_status status = ms_autocast_product(call, floats, 3, dtype);
    if (status) return status;
    if (x->dims == 0 || w->dims != 2)
        return ms_op_refuse(call, "the weight must have two dimensions, the input at least one");
    int64_t columns = coded ? call->attributes.linear.n : w->shape[1],
            in = turned ? w->shape[0] : columns;
    *width = turned ? columns : w->shape[0];
    if (x->shape[x->dims - 1] != in)
        return ms_op_refuse(call, "the input's last dimension is %lld, the weight (%s) takes %lld",
                            (long long)x->shape[x->dims - 1], turned ? "[in, out]" : "[out, in]",
                            (long long)in);
    if (bias && (bias->dims != 1 || bias->shape[0] != *width))
        return ms_op_refuse(call, "the bias must have shape [%lld]", (long long)*width);
    if (call->attributes.linear.activation != MS_ACTIVATION_NONE
        && call->attributes.linear.activation != MS_ACTIVATION_GELU)
        return ms_op_refuse(call, "there is no activation %d", call->attributes.linear.activation);
    return MS_OK;
}

/* The weight as [in, out], whichever way it is stored. A view costs nothing, since a product reads
 * either order of strides. */
static ms_status weight_matrix(const ms_op *op, ms_tensor *weight, ms_tensor **out)
{
    if (op == &ms_op_linear) return ms_matrix_swapped(weight, out);
    *out = ms_tensor_retain(weight);
    return MS_OK;
}

/* The weight in the dtype of the products, owned. A coded one is decoded; codec_decode refuses
 * codes of another length. The cast of any other is kept for the step. */
static ms_status weight_operand(ms_engine *engine, ms_tensor *weight,
                                const ms_attributes *attributes, ms_dtype compute, ms_tensor **out)
{
    if (!is_coded(weight, attributes))
        return ms_tensor_cast_cached(engine, weight, compute, true, out);
    ms_attributes how = { .codec = { .codec = attributes->linear.codec,
                                     .n = attributes->linear.n } };
    ms_tensor *numbers = NULL;
    ms_status status = ms_op_unary(engine, &ms_op_codec_decode, &how, weight, &numbers);
    if (!status) status = ms_op_as_dtype(engine, numbers, compute, out);
    ms_tensor_release(numbers);
    return status;
}

/* ------------------------------------------------------------------ forward */

/* MS_ACTIVATION_NONE is the only other one: linear_check refuses the rest. */
static bool is_activated(const ms_attributes *attributes)
{
    return attributes->linear.activation == MS_ACTIVATION_GELU;
}

/* y = gelu(before), which may be y. The 20 FLOPs of an element are an estimate of tanh's form of
 * gelu, for the sim device. */
static ms_status gelu_into(ms_engine *engine, ms_tensor *before, ms_tensor *y)
{
    if (y->count == 0) return MS_OK;
    ms_activation_args args = { .before = ms_tensor_data(before),
                                .y = ms_tensor_data(y),
                                .count = y->count,
                                .dtype = (uint8_t)y->dtype };
    ms_task_cost cost = { .flops = 20.0 * (double)y->count,
                          .bytes = ms_tensor_bytes(before) + ms_tensor_bytes(y) };
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_activation), &args, &before,
                             1, &y, 1, cost);
}

ms_status ms_gelu_new(ms_engine *engine, ms_tensor *before, ms_tensor **out)
{
    ms_tensor *y = NULL;
    ms_status status = ms_tensor_new(engine, before->dtype, before->dims, before->shape, &y);
    if (!status) status = gelu_into(engine, before, y);
    if (status) ms_tensor_release(y);
    else *out = y;
    return status;
}

/* Applies the activation to `before` and makes the output, of the same dtype. The gradient needs
 * `before`, so it is saved; without a gradient the activation overwrites it: nothing else holds it,
 * as it was made by this call. */
static ms_status activate(ms_op_call *call, ms_tensor *before)
{
    ms_status status = ms_op_save(call, before);
    if (status) return status;
    if (call->record || ms_products_are_kept(call->engine))
        return ms_gelu_new(call->engine, before, &call->outputs[0]);
    status = gelu_into(call->engine, before, before);
    if (!status) call->outputs[0] = ms_tensor_retain(before);
    return status;
}

/* Whether products of this dtype make more than themselves: on a GPU, in 16 bits. Its library's
 * gelu has an error of some 1e-4 and it adds in f32, which 16 bits hide; in f32 our kernels are
 * more exact. */
static bool products_make_more(const ms_engine *engine, ms_dtype dtype)
{
    return ms_engine_is_for_gpu(engine) && ms_dtype_bytes(dtype) == 2;
}

bool ms_products_make_gelu(const ms_engine *engine, const ms_tensor *before)
{
    return products_make_more(engine, before->dtype)
           && before->shape[before->dims - 1] % MS_GELU_COLUMNS == 0;
}

/* Whether the product makes the activation's result as well. The same with and without a gradient,
 * so that both give the same bits. A product that is kept (products.h) does not: both runs of the
 * function make the activation from it. */
static bool product_activates(const ms_op_call *call, const ms_tensor *before)
{
    return is_activated(&call->attributes) && ms_products_make_gelu(call->engine, before)
           && !ms_products_are_kept(call->engine);
}

/* The product of rows and matrix goes to `before`, unless the product activates: then it makes y,
 * too, which becomes the result. */
static ms_status multiply(ms_op_call *call, ms_tensor *rows, ms_tensor *matrix, bool activates,
                          ms_tensor *before)
{
    ms_engine *engine = call->engine;
    ms_tensor *y = NULL, *flat = NULL, *flat_y = NULL;
    ms_status status = ms_matrix_flattened(engine, before, &flat);
    if (!status && activates)
        status = ms_tensor_new(engine, before->dtype, before->dims, before->shape, &y);
    if (!status && activates) status = ms_matrix_flattened(engine, y, &flat_y);
    if (!status && activates)
        status =
            ms_matmul_extra_into(engine, rows, matrix, bias_of(call), MS_GEMM_GELU, flat, flat_y);
    else if (!status) status = ms_matmul_into(engine, rows, matrix, bias_of(call), flat);
    ms_tensor_release(flat);
    ms_tensor_release(flat_y);
    if (status) ms_tensor_release(y);
    else call->outputs[0] = y;
    return status;
}

/* The same in 8 bits (fp8.h). Saved are payloads: of x the one that backward multiplies, of the
 * weight, and then `before`. Nothing but the bias is made with the product: on each device the
 * activation is a task of its own, of the rounded sums. of_gelu: the product's input is gelu(x), of
 * which nothing is saved. */
static ms_status forward_in_fp8(ms_op_call *call, int64_t width, ms_dtype compute, bool of_gelu)
{
    ms_engine *engine = call->engine;
    ms_tensor *x = call->inputs[0], *w = call->inputs[1], *codes = NULL, *kept = NULL,
              *weight = NULL, *out = NULL, *flat = NULL;
    int64_t shape[MS_DIMS_MAX], in = x->shape[x->dims - 1],
                                rows = ms_shape_count(x->dims - 1, x->shape);
    bool native = ms_fp8_is_native(engine), turns = native && call->record && !of_gelu;
    memcpy(shape, x->shape, sizeof shape);
    shape[x->dims - 1] = width;
    ms_status status = ms_fp8_check(call, compute, rows, in, width);
    if (!status && of_gelu) status = ms_fp8_encode_gelu(engine, x, &codes, NULL);
    else if (!status) status = ms_fp8_encode(engine, x, MS_FP8_E4M3, &codes, turns ? &kept : NULL);
    if (!status) status = ms_tensor_cast_cached(engine, w, MS_U8, true, &weight);
    if (!status) status = ms_tensor_new(engine, compute, x->dims, shape, &out);
    if (!status) status = ms_matrix_flattened(engine, out, &flat);
    ms_fp8_matrix left = { .payload = codes, .rows = rows, .columns = in },
                  right = { .payload = weight,
                            .rows = w->shape[0],
                            .columns = w->shape[1],
                            .turned = call->op == &ms_op_linear };
    if (!status) status = ms_fp8_product(engine, native, &left, &right, bias_of(call), flat);
    if (!status && !of_gelu) status = ms_op_save(call, kept ? kept : codes);
    if (!status) status = ms_op_save(call, weight);
    if (!status && is_activated(&call->attributes)) status = activate(call, out);
    else if (!status) call->outputs[0] = ms_tensor_retain(out);
    ms_tensor_release(codes);
    ms_tensor_release(kept);
    ms_tensor_release(weight);
    ms_tensor_release(out);
    ms_tensor_release(flat);
    return status;
}

/* x is cast for this product only, the weight's cast is kept for the step. Saved are the operands
 * as the product took them (casts, under autocast; codes of a coded weight), then `before` if there
 * is an activation. `out`
 * is what goes into the activation; without one it is the result. The cast of x is released with
 * the call unless it is saved, the weight's is kept by the weight. */
static ms_status linear_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    ms_tensor *x = NULL, *w = NULL, *rows = NULL, *matrix = NULL, *out = NULL;
    int64_t width = 0, shape[MS_DIMS_MAX];
    bool activates = false;
    ms_dtype compute = MS_F32;
    ms_status status = linear_check(call, &width, &compute);
    if (status) return status;
    if (ms_fp8_is_on(engine) && !is_coded(call->inputs[1], &call->attributes))
        return forward_in_fp8(call, width, compute, false);
    uint32_t dims = call->inputs[0]->dims;
    memcpy(shape, call->inputs[0]->shape, sizeof shape);
    shape[dims - 1] = width;
    status = ms_tensor_cast_cached(engine, call->inputs[0], compute, false, &x);
    if (!status) status = weight_operand(engine, call->inputs[1], &call->attributes, compute, &w);
    if (!status) status = ms_matrix_flattened(engine, x, &rows);
    if (!status) status = weight_matrix(call->op, w, &matrix);
    if (!status) status = ms_products_take(engine, compute, dims, shape, &out);
    bool is_kept = out != NULL;
    if (!status && !is_kept) status = ms_tensor_new(engine, compute, dims, shape, &out);
    if (!status) activates = product_activates(call, out);
    if (!status && !is_kept) status = multiply(call, rows, matrix, activates, out);
    if (!status) status = ms_products_note(engine, out);
    if (!status) status = ms_op_save(call, x);
    if (!status)
        status =
            ms_op_save(call, is_coded(call->inputs[1], &call->attributes) ? call->inputs[1] : w);
    if (!status && activates) status = ms_op_save(call, out);
    else if (!status && is_activated(&call->attributes)) status = activate(call, out);
    else if (!status) call->outputs[0] = ms_tensor_retain(out);
    ms_tensor_release(x);
    ms_tensor_release(w);
    ms_tensor_release(rows);
    ms_tensor_release(matrix);
    ms_tensor_release(out);
    return status;
}

ms_status ms_linear_of_gelu(ms_op_call *call)
{
    int64_t width = 0;
    ms_dtype compute = MS_F32;
    ms_status status = linear_check(call, &width, &compute);
    return status ? status : forward_in_fp8(call, width, compute, true);
}

/* ----------------------------------------------------------------- backward */

/* Whether the product that makes dw sums the bias's gradient as well: where g goes into it as it
 * has arrived and nothing else passes over it. Both are then made at once, also in a backward in
 * two parts. */
static bool product_sums(const ms_op_gradient *gradient, const ms_tensor *g)
{
    bool wanted = ms_op_wants(gradient, 1) && ms_op_wants(gradient, 2),
         is_as_it_arrived = !is_activated(&gradient->attributes),
         /* The library sums in the dtype of its result. */
        is_one_dtype = wanted && gradient->inputs[1].dtype == gradient->inputs[2].dtype,
         /* Rows that overlap would be copied for the product. */
        is_matrix = g->shape[0] == 1 || g->strides[0] >= g->shape[1];
    return is_one_dtype && is_as_it_arrived && is_matrix
           && products_make_more(gradient->engine, g->dtype) && g->count > 0
           && ms_shape_count(gradient->inputs[1].dims, gradient->inputs[1].shape) > 0;
}

/* dw, written into the weight's home if it has one. rows and g are matrices [rows, in] and [rows,
 * out] of the products' dtype; the sum over rows is the inner dimension of the product. Written to
 * its home, the gradient is in its bucket already, and no copy is made before the reduction. sums:
 * the bias's gradient is made with it. */
static ms_status weight_gradient(const ms_op_gradient *gradient, ms_tensor *rows, ms_tensor *g,
                                 bool sums)
{
    ms_tensor *turned = NULL, *made = NULL, *bias = NULL;
    bool stored = gradient->op == &ms_op_linear_t; /* [in, out] = x^T g, else [out, in] = g^T x */
    ms_gemm_extra extra = !sums ? MS_GEMM_PLAIN : stored ? MS_GEMM_SUM_B : MS_GEMM_SUM_A;
    ms_status status = ms_matrix_swapped(stored ? rows : g, &turned);
    if (!status && sums) status = ms_op_result(gradient, 2, &bias);
    if (!status) status = ms_op_result(gradient, 1, &made);
    if (!status)
        status = ms_matmul_extra_into(gradient->engine, turned, stored ? g : rows, NULL, extra,
                                      bias, made);
    ms_tensor_release(turned);
    if (status) {
        ms_tensor_release(made);
        ms_tensor_release(bias);
        return status;
    }
    gradient->results[1] = made;
    if (bias) gradient->results[2] = bias;
    return MS_OK;
}

/* What the first part has kept for this call, which is of the second one; else NULL. */
static ms_tensor *kept_of(const ms_op_gradient *gradient)
{
    return gradient->kept && !gradient->later ? gradient->kept[0] : NULL;
}

/* Keeps it for the second part's call, if that makes this result. */
static void keep_for(const ms_op_gradient *gradient, uint32_t result, ms_tensor *tensor)
{
    if (gradient->later && gradient->later[result] && !gradient->results[result] && tensor
        && !gradient->kept[0])
        gradient->kept[0] = ms_tensor_retain(tensor);
}

/* The incoming gradient as [rows, out] with an inner stride of 1, which the kernel needs. An
 * expanded gradient (that of a sum) is copied. x may have any number of leading dimensions; the
 * kernel sees rows. */
static ms_status gradient_rows(ms_engine *engine, ms_tensor *g, ms_tensor **out)
{
    ms_tensor *flat = NULL;
    ms_status status = ms_matrix_flattened(engine, g, &flat);
    if (status) return status;
    /* A width of 1 has a stride that does not count. */
    if (flat->strides[1] == 1 || flat->shape[1] <= 1) {
        *out = flat;
        return MS_OK;
    }
    status = ms_op_as_contiguous(engine, flat, out);
    ms_tensor_release(flat);
    return status;
}

/* dx = g w as a new tensor of this dtype and shape; g is [rows, out]. If `before` is not NULL, the
 * product multiplies by gelu'(before). For linear the two exchanges cancel: the product reads the
 * weight as it is stored. */
static ms_status multiply_back(ms_engine *engine, const ms_op *op, ms_tensor *weight, ms_tensor *g,
                               ms_tensor *before, const ms_tensor_info *x, ms_tensor **out)
{
    ms_tensor *matrix = NULL, *back = NULL, *made = NULL, *flat = NULL;
    ms_status status = weight_matrix(op, weight, &matrix);
    if (!status) status = ms_matrix_swapped(matrix, &back);
    if (!status) status = ms_tensor_new(engine, x->dtype, x->dims, x->shape, &made);
    if (!status) status = ms_matrix_flattened(engine, made, &flat);
    if (!status)
        status = ms_matmul_extra_into(engine, g, back, NULL,
                                      before ? MS_GEMM_GELU_GRADIENT : MS_GEMM_PLAIN, before, flat);
    ms_tensor_release(matrix);
    ms_tensor_release(back);
    ms_tensor_release(flat);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

ms_status ms_linear_back(ms_engine *engine, const ms_op *op, ms_tensor *weight, ms_tensor *g,
                         ms_tensor *before, const ms_tensor_info *x, ms_tensor **out)
{
    ms_tensor *rows = NULL;
    ms_status status = gradient_rows(engine, g, &rows);
    if (!status) status = multiply_back(engine, op, weight, rows, before, x, out);
    ms_tensor_release(rows);
    return status;
}

/* dx = h w; g is h. */
static ms_status input_gradient(const ms_op_gradient *gradient, ms_tensor *saved, ms_tensor *g)
{
    ms_tensor *weight = NULL;
    ms_status status = MS_OK;
    if (is_coded(saved, &gradient->attributes))
        status = weight_operand(gradient->engine, saved, &gradient->attributes,
                                gradient->saved[0]->dtype, &weight);
    else weight = ms_tensor_retain(saved);
    if (!status)
        status = multiply_back(gradient->engine, gradient->op, weight, g, NULL,
                               &gradient->inputs[0], &gradient->results[0]);
    ms_tensor_release(weight);
    return status;
}

/* Where h goes: over `before`, if the graph is freed after this call and no other reference to that
 * storage is left but the saved alias's; h is as large, so no memory is taken. Otherwise a new
 * tensor. */
static ms_status result_place(const ms_op_gradient *gradient, const ms_tensor *rows,
                              ms_tensor **out)
{
    ms_tensor *before = gradient->saved[2];
    if (gradient->last && ms_storage_references(before->storage) == 1)
        return ms_matrix_flattened(gradient->engine, before, out);
    return ms_tensor_new(gradient->engine, rows->dtype, 2, rows->shape, out);
}

/* What a pass over the incoming gradient reads (borrowed) and makes (owned); NULLs for what is
 * absent or not wanted. */
typedef struct pass_parts {
    ms_tensor *rows, *before, *h, *bias, *most;
} pass_parts;

/* The flops count 25 for each element through the activation, an estimate for the sim device. */
static ms_status enqueue_pass(ms_engine *engine, const pass_parts *p)
{
    const ms_tensor *rows = p->rows;
    ms_linear_gradient_args args = { .g = ms_tensor_data(rows),
                                     .rows = rows->shape[0],
                                     .width = rows->shape[1],
                                     .g_row = rows->strides[0],
                                     .dtype = (uint8_t)rows->dtype };
    ms_tensor *reads[] = { p->rows, p->before }, *writes[] = { p->h, p->bias, p->most };
    ms_task_cost cost = { .flops = (double)rows->count, .bytes = ms_tensor_bytes(rows) };
    if (p->before) {
        args.before = ms_tensor_data(p->before);
        cost.flops *= 25.0;
        cost.bytes += ms_tensor_bytes(p->before);
    }
    if (p->h) {
        args.out = ms_tensor_data(p->h);
        cost.bytes += ms_tensor_bytes(p->h);
    }
    if (p->bias) {
        args.bias = ms_tensor_data(p->bias);
        args.bias_dtype = (uint8_t)p->bias->dtype;
    }
    if (p->most) {
        args.most = ms_tensor_data(p->most);
        args.most_count = p->most->count;
    }
    ms_status status =
        ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_linear_backward), &args, reads,
                          2, writes, 3, cost);
    if (!status && p->most) ms_tensor_hold_most(p->h ? p->h : p->rows, p->most);
    return status;
}

/* Whether this call multiplies. What an earlier call has kept is ready for that. */
static bool wants_products(const ms_op_gradient *gradient)
{
    return (gradient->needs[0] || gradient->needs[1]) && !kept_of(gradient);
}

/* In 8 bits h is encoded next. On a GPU the pass gives its greatest size, unless h is what has
 * arrived, and whoever wrote that has given it. */
static ms_status make_most(const ms_op_gradient *gradient, pass_parts *p)
{
    bool is_encoded = gradient->saved[0]->dtype == MS_U8 && wants_products(gradient);
    if (!is_encoded || !ms_engine_is_for_gpu(gradient->engine)) return MS_OK;
    if (!p->h && ms_tensor_most(p->rows)) return MS_OK;
    int64_t count = ms_linear_most_count(p->rows->shape[0], p->rows->shape[1]);
    return ms_fp8_most_new(gradient->engine, count, &p->most);
}

/* One pass over the incoming gradient: through the activation, and sums for the bias. *out is h,
 * [rows, out], owned: a new tensor, or rows itself where nothing changes it. The bias's gradient
 * becomes results[2]; without rows it is zeros, and no task runs. Nothing is enqueued where rows
 * can serve as h and the bias needs no gradient, or a product makes it (sums). */
static ms_status pass(const ms_op_gradient *gradient, ms_tensor *rows, bool sums, ms_tensor **out)
{
    ms_engine *engine = gradient->engine;
    pass_parts p = { .rows = rows };
    if (is_activated(&gradient->attributes)) p.before = gradient->saved[2];
    /* h is read by the two products only. */
    bool wants_h = p.before && wants_products(gradient);
    /* A pass that runs anyway makes it in the first part, too. */
    bool wants_bias =
        !sums
        && (wants_h ? ms_op_wants(gradient, 2) : gradient->input_count > 2 && gradient->needs[2]);
    ms_status status = MS_OK;
    if (wants_h) status = result_place(gradient, rows, &p.h);
    if (!status && wants_bias) status = ms_op_result(gradient, 2, &p.bias);
    if (!status && (p.h || p.bias) && rows->count > 0) {
        status = make_most(gradient, &p);
        if (!status) status = enqueue_pass(engine, &p);
        ms_tensor_release(p.most);
    } else if (!status && p.bias) {
        ms_tensor_release(p.bias);
        p.bias = NULL;
        status = ms_op_full(engine, gradient->inputs[2].dtype, 1, &rows->shape[1], 0.0, &p.bias);
    }
    if (status) {
        ms_tensor_release(p.h);
        ms_tensor_release(p.bias);
        return status;
    }
    if (p.bias) gradient->results[2] = p.bias;
    *out = p.h ? p.h : ms_tensor_retain(rows);
    return MS_OK;
}

/* dw = g^T x, or x^T g where the weight is stored as [in, out]. */
static ms_status weight_gradient_in_fp8(const ms_op_gradient *gradient, bool native,
                                        ms_fp8_matrix x, ms_fp8_matrix g)
{
    bool stored = gradient->op == &ms_op_linear_t;
    ms_fp8_matrix *left = stored ? &x : &g, *right = stored ? &g : &x;
    left->turned = true;
    ms_status status = ms_op_result(gradient, 1, &gradient->results[1]);
    if (status) return status;
    return ms_fp8_product(gradient->engine, native, left, right, NULL, gradient->results[1]);
}

/* dx = g w. */
static ms_status input_gradient_in_fp8(const ms_op_gradient *gradient, bool native, ms_fp8_matrix g)
{
    const ms_tensor_info *x = &gradient->inputs[0], *w = &gradient->inputs[1];
    ms_tensor *flat = NULL;
    ms_fp8_matrix weight = { .payload = gradient->saved[1],
                             .rows = w->shape[0],
                             .columns = w->shape[1],
                             .turned = gradient->op == &ms_op_linear_t };
    ms_status status =
        ms_tensor_new(gradient->engine, x->dtype, x->dims, x->shape, &gradient->results[0]);
    if (!status) status = ms_matrix_flattened(gradient->engine, gradient->results[0], &flat);
    if (!status) status = ms_fp8_product(gradient->engine, native, &g, &weight, NULL, flat);
    ms_tensor_release(flat);
    return status;
}

/* The two products of codes, as far as this call is to make them. codes: those of h; turned: those
 * of its transpose, which the weight's product takes where codes are multiplied. */
static ms_status multiply_in_fp8(const ms_op_gradient *gradient, bool native, ms_tensor *codes,
                                 ms_tensor *turned)
{
    const ms_tensor_info *w = &gradient->inputs[1], *y = &gradient->outputs[0];
    const bool *needs = gradient->needs;
    int64_t width = y->shape[y->dims - 1], rows = ms_shape_count(y->dims - 1, y->shape);
    ms_fp8_matrix x = { .payload = gradient->saved[0],
                        .rows = rows,
                        .columns = w->shape[gradient->op == &ms_op_linear_t ? 0 : 1] },
                  g = { .payload = native ? turned : codes,
                        .rows = rows,
                        .columns = width,
                        .format = MS_FP8_E5M2 };
    ms_status status = needs[1] ? weight_gradient_in_fp8(gradient, native, x, g) : MS_OK;
    g.payload = codes;
    if (!status && needs[0]) status = input_gradient_in_fp8(gradient, native, g);
    return status;
}

/* The same in 8 bits: h is encoded once for both products, also where they are in two parts. h may
 * be NULL where codes were kept. */
static ms_status backward_in_fp8(const ms_op_gradient *gradient, ms_tensor *h)
{
    const ms_tensor_info *w = &gradient->inputs[1];
    const bool *needs = gradient->needs;
    bool native = ms_fp8_weight_is_native(gradient->saved[1], ms_shape_count(w->dims, w->shape));
    ms_tensor *codes = NULL, *turned = NULL, *kept = kept_of(gradient);
    if (!needs[0] && !needs[1]) return MS_OK;
    if (kept) return multiply_in_fp8(gradient, native, kept, kept);
    bool straight = !native || ms_op_wants(gradient, 0), turns = native && ms_op_wants(gradient, 1);
    ms_status status = ms_fp8_encode(gradient->engine, h, MS_FP8_E5M2, straight ? &codes : NULL,
                                     turns ? &turned : NULL);
    if (!status) status = multiply_in_fp8(gradient, native, codes, turned);
    if (!status) keep_for(gradient, 0, codes);
    if (!status) keep_for(gradient, 1, native ? turned : codes);
    ms_tensor_release(codes);
    ms_tensor_release(turned);
    return status;
}

/* dw, and dbias with it if it sums; and dx. g is h. */
static ms_status multiply_gradients(const ms_op_gradient *gradient, ms_tensor *g, bool sums)
{
    ms_tensor *rows = NULL;
    const bool *needs = gradient->needs;
    bool wants_weight = needs[1] || (sums && needs[2]);
    ms_status status = ms_matrix_flattened(gradient->engine, gradient->saved[0], &rows);
    if (!status && wants_weight) status = weight_gradient(gradient, rows, g, sums);
    if (!status && needs[0]) status = input_gradient(gradient, gradient->saved[1], g);
    ms_tensor_release(rows);
    return status;
}

/* What the second part's call reads: an operand of each product that is left, and what went into
 * the activation unless h was kept, and the bias's gradient made with it. */
static void note_reads(const ms_op_gradient *gradient)
{
    bool passes = ms_op_is_left(gradient, 2)
                  || ((ms_op_is_left(gradient, 0) || ms_op_is_left(gradient, 1)) && gradient->kept
                      && !gradient->kept[0]);
    ms_op_reads_later(gradient, 0, ms_op_is_left(gradient, 1));
    ms_op_reads_later(gradient, 1, ms_op_is_left(gradient, 0));
    if (is_activated(&gradient->attributes)) ms_op_reads_later(gradient, 2, passes);
}

/* Gradients as stated at the top of this file. saved: x, weight, and `before` with an activation.
 * Results that were made before a failure are the caller's to release. */
static ms_status linear_backward(ms_op_gradient *gradient)
{
    ms_tensor *arrived = NULL, *g = NULL, *kept = kept_of(gradient);
    bool sums = false, is_fp8 = gradient->saved[0]->dtype == MS_U8,
         passes = !kept || (gradient->input_count > 2 && gradient->needs[2]);
    ms_status status = MS_OK;
    if (passes) status = gradient_rows(gradient->engine, gradient->gradients[0], &arrived);
    if (passes && !status && !is_fp8) sums = product_sums(gradient, arrived);
    if (passes && !status) status = pass(gradient, arrived, sums, &g);
    if (!status && is_fp8) status = backward_in_fp8(gradient, g);
    else if (!status) status = multiply_gradients(gradient, kept ? kept : g, sums);
    bool is_new = !status && is_activated(&gradient->attributes) && !is_fp8 && g != arrived;
    if (is_new) keep_for(gradient, 0, g);
    if (is_new) keep_for(gradient, 1, g);
    note_reads(gradient);
    ms_tensor_release(arrived);
    ms_tensor_release(g);
    return status;
}

const ms_op ms_op_linear = { .name = "linear",
                             .flags = MS_OP_SPLITS,
                             .forward = linear_forward,
                             .backward = linear_backward,
                             .inputs_min = 2,
                             .inputs_max = 3 };
const ms_op ms_op_linear_t = { .name = "linear_t",
                               .flags = MS_OP_SPLITS,
                               .forward = linear_forward,
                               .backward = linear_backward,
                               .inputs_min = 2,
                               .inputs_max = 3 };
