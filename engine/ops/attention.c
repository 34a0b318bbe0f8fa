/* attention.c: attention with grouped queries, whose scores are never stored, and rotary position
 * embedding.
 *
 * o = softmax(scale q k^T + mask) v for each batch and head. Scores are queries times keys and
 * would be the largest tensors of a model, so kernels compute them block by block and keep only the
 * logarithm of the sum of exponentials of each row (Dao et al. 2022). Backward computes the
 * probabilities again from it: P = exp(scale q k^T - log_sum).
 *
 * With D = sum of do * o over the width: dv = P^T do, dP = do v^T, dS = P * (dP - D), dq = scale dS
 * k, dk = scale dS^T q. log_sum is a result as well, if the call asks for two: as dlog_sum/dS = P,
 * its gradient is subtracted from D. Several query heads may share a head of keys and values
 * (grouped queries, Ainslie et al. 2023): dk and dv are then summed over them.
 *
 * With positions, several documents are in one row, and the mask also hides the keys before the
 * document of a query. A window hides all but the last keys that a query sees. */
#include "ops/attention.h"

#include <math.h>
#include <string.h>

#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/values.h"
#include "tensor/products.h"
#include "tensor/op.h"

/* -------------------------------------------------------------------- heads */

/* A [batch, heads, time, width] tensor as the kernels walk it; the stride of the width is 1. A
 * stride of the width other than 1 has been copied away (with_rows). */
static ms_heads heads_of(const ms_tensor *t)
{
    return (ms_heads){ .data = ms_tensor_data(t),
                       .batch = t->strides[0],
                       .head = t->strides[1],
                       .time = t->strides[2] };
}

/* A new [b, h, t, d] tensor that is stored as [b, t, h, d]: joining the heads again, as the next
 * linear layer takes them, is then a view. The window keeps the memory; the tensor of the other
 * shape is released at once. */
static ms_status make_heads(ms_engine *engine, ms_dtype dtype, const int64_t *shape,
                            ms_tensor **out)
{
    /* The names of the layout: batch, heads, time, width. */
    int64_t b = shape[0], h = shape[1], t = shape[2], d = shape[3];
    ms_tensor *memory = NULL;
    ms_status status = ms_tensor_new(engine, dtype, 4, (int64_t[]){ b, t, h, d }, &memory);
    if (!status)
        status = ms_tensor_window(memory, 4, shape, (int64_t[]){ t * h * d, d, h * d, 1 }, 0, out);
    ms_tensor_release(memory);
    return status;
}

/* The tensor in this dtype: itself (retained) if each of its rows is contiguous and rows do not
 * overlap, else a copy. Batches and heads may be anywhere, so parts of one matrix of queries, keys
 * and values are read in place. */
static ms_status with_rows(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, ms_tensor **out)
{
    /* A cast is contiguous. */
    if (tensor->dtype != dtype) return ms_op_as_dtype(engine, tensor, dtype, out);
    if (tensor->strides[3] != 1 && tensor->shape[3] > 1)
        return ms_op_as_contiguous(engine, tensor, out);
    /* Expanded in time: a library reads no matrix whose rows overlap. */
    if (tensor->strides[2] < tensor->shape[3] && tensor->shape[2] > 1)
        return ms_op_as_contiguous(engine, tensor, out);
    *out = ms_tensor_retain(tensor);
    return MS_OK;
}

/* ---------------------------------------------------------------- attention */

/* The fourth input, or NULL. */
static ms_tensor *positions_of(const ms_op_call *call)
{
    return call->input_count > 3 ? call->inputs[3] : NULL;
}

/* positions i64 [b, t], of causal attention with as many keys as queries: with another number of
 * keys the call says where the queries are among them. Their values are on the device, where the
 * kernel checks them. */
static ms_status positions_check(const ms_op_call *call)
{
    const ms_tensor *q = call->inputs[0], *k = call->inputs[1], *positions = positions_of(call);
    if (!positions) return MS_OK;
    if (!call->attributes.attention.causal)
        return ms_op_refuse(call, "positions are of causal attention: leave them out, or "
                                  "causal = false");
    if (k->shape[2] != q->shape[2] && !call->attributes.attention.shifted)
        return ms_op_refuse(call,
                            "positions need as many keys as queries, or offset, the place of the "
                            "first query among the keys; text that continues from kept keys has "
                            "no positions");
    if (positions->dtype != MS_I64 || positions->dims != 2 || positions->shape[0] != q->shape[0]
        || positions->shape[1] != q->shape[2])
        return ms_op_refuse(call, "positions must be i64 [batch, time], here [%lld, %lld]",
                            (long long)q->shape[0], (long long)q->shape[2]);
    return MS_OK;
}

/* q [b, h, t, d], k and v [b, g, s, d], h a multiple of g; causal: s >= t, unless the call says
 * where the queries are among the keys. Otherwise, with more keys than queries, the queries are the
 * last ones, as when a text is continued from cached keys. */
static ms_status attention_check(const ms_op_call *call, ms_dtype *dtype)
{
    const ms_tensor *q = call->inputs[0], *k = call->inputs[1], *v = call->inputs[2];
    ms_status status = ms_autocast_product(call, call->inputs, 3, dtype);
    if (status) return status;
    if (q->dims != 4 || k->dims != 4 || v->dims != 4)
        return ms_op_refuse(call, "all must be [batch, heads, time, width]");
    if (!ms_shape_equal(k->dims, k->shape, v->dims, v->shape))
        return ms_op_refuse(call, "keys and values must have the same shape");
    if (q->shape[0] != k->shape[0] || q->shape[3] != k->shape[3])
        return ms_op_refuse(call, "queries and keys must agree in batch and width");
    if (k->shape[1] == 0 || q->shape[1] % k->shape[1] != 0)
        return ms_op_refuse(call,
                            "the heads of the queries must be a multiple of those of the keys");
    if (q->shape[3] == 0 || k->shape[2] == 0)
        return ms_op_refuse(call, "there must be at least one key, and a width");
    if (call->attributes.attention.scale < 0.0)
        return ms_op_refuse(call, "the scale cannot be negative");
    if (call->attributes.attention.window < 0)
        return ms_op_refuse(call, "the window cannot be negative");
    if (call->attributes.attention.window > 0 && !call->attributes.attention.causal)
        return ms_op_refuse(call, "a window is of causal attention");
    if (call->attributes.attention.shifted && !call->attributes.attention.causal)
        return ms_op_refuse(call, "an offset is of causal attention");
    if (call->attributes.attention.causal && k->shape[2] < q->shape[2]
        && !call->attributes.attention.shifted)
        return ms_op_refuse(call, "causal attention needs at least as many keys as queries, or "
                                  "offset, the place of the first query among the keys: the first "
                                  "queries would see nothing");
    return positions_check(call);
}

/* What forward and backward have in common. A scale of 0 means 1 / sqrt(width). The scale stays f64
 * until the kernel rounds it, for every device in the same way. */
static void fill_args(const ms_attributes *attributes, const ms_tensor *q, const ms_tensor *k,
                      const ms_tensor *v, ms_attention_args *args)
{
    args->q = heads_of(q);
    args->k = heads_of(k);
    args->v = heads_of(v);
    args->batches = q->shape[0];
    args->heads = q->shape[1];
    args->groups = k->shape[1];
    args->queries = q->shape[2];
    args->keys = k->shape[2];
    args->width = q->shape[3];
    args->scale = attributes->attention.scale != 0.0 ? attributes->attention.scale
                                                     : 1.0 / sqrt((double)args->width);
    args->shifted = attributes->attention.shifted;
    args->offset = args->shifted ? attributes->attention.offset : args->keys - args->queries;
    /* A window that hides nothing costs nothing: the last query's begins last. */
    int64_t window = attributes->attention.window;
    args->window = window < args->offset + args->queries ? window : 0;
    args->dtype = (uint8_t)q->dtype;
    args->causal = attributes->attention.causal;
    args->fast = attributes->attention.fast;
}

static int64_t between(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* The sum over queries i of places before first + i that have a key. */
static double pairs_before(const ms_attention_args *args, int64_t first)
{
    /* Queries below `none` have no such place, those from `all` on have all keys. */
    int64_t none = between(-first, 0, args->queries),
            all = between(args->keys - first, none, args->queries);
    return (double)(all - none) * ((double)first + 0.5 * (double)(none + all - 1))
           + (double)(args->queries - all) * (double)args->keys;
}

/* FLOPs of `products` products of queries by keys by width, two for each multiply-add. Pairs that
 * are masked are not counted. Kernels leave out most of them; counted, they would make a causal
 * model seem twice as fast as it is. Where documents begin is not known on the host, so positions
 * change nothing here: the number is then an upper bound. */
static double flops_of(const ms_attention_args *args, double products)
{
    double seen = (double)args->queries * (double)args->keys;
    if (args->causal) seen = pairs_before(args, args->offset + 1);
    if (args->window > 0) seen -= pairs_before(args, args->offset + 1 - args->window);
    return 2.0 * products * (double)args->batches * (double)args->heads * seen
           * (double)args->width;
}

/* saved: q, k, v, o, log_sum, which is made if the call is recorded or asks for it as its second
 * result, and positions if given.
 * The gradients of a query's scores add up to zero only as far as o is exact: of 16 bits, up to its
 * rounding. Scores take no memory, so the peak of a step grows with the length of the text and not
 * with its square. */
static ms_status attention_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    ms_tensor *in[4] = { NULL }, *out = NULL, *log_sum = NULL;
    ms_dtype dtype = MS_F32;
    ms_status status = attention_check(call, &dtype);
    if (status) return status;
    const int64_t *shape = call->inputs[0]->shape;
    /* Backward runs outside of the scopes that forward saw. */
    if (ms_engine_fast_attention(engine)) call->attributes.attention.fast = true;
    for (int i = 0; i < 3 && !status; i++)
        status = with_rows(engine, call->inputs[i], dtype, &in[i]);
    if (!status && positions_of(call))
        status = ms_op_as_contiguous(engine, positions_of(call), &in[3]);
    bool keeps = ms_products_are_kept(engine);
    if (!status) status = ms_products_take(engine, dtype, 4, shape, &out);
    bool is_kept = out != NULL;
    if (!status && !is_kept) status = make_heads(engine, dtype, shape, &out);
    if (!status && keeps) status = ms_products_take(engine, MS_F32, 3, shape, &log_sum);
    /* Both are made if one of them was written to. */
    is_kept = is_kept && log_sum;
    if (!status && !log_sum && (call->record || call->output_count > 1 || keeps))
        status = ms_tensor_new(engine, MS_F32, 3, shape, &log_sum);
    if (!status && out->count > 0 && !is_kept) {
        ms_attention_args args = { .out = heads_of(out),
                                   .log_sum = log_sum ? ms_tensor_data(log_sum) : NULL,
                                   .positions = in[3] ? ms_tensor_data(in[3]) : NULL };
        fill_args(&call->attributes, in[0], in[1], in[2], &args);
        ms_tensor *writes[] = { out, log_sum };
        ms_task_cost cost = { .flops = flops_of(&args, 2.0),
                              .bytes = 2 * ms_tensor_bytes(out) + 2 * ms_tensor_bytes(in[1]) };
        status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_attention_forward),
                                   &args, in, 4, writes, 2, cost);
    }
    if (!status) status = ms_products_note(engine, out);
    if (!status && keeps) status = ms_products_note(engine, log_sum);
    /* The order in which backward finds them: in[] and not the inputs, as a copy may have been
     * made. */
    ms_tensor *saved[] = { in[0], in[1], in[2], out, log_sum, in[3] };
    for (int i = 0; i < 6 && !status && call->record; i++)
        if (saved[i]) status = ms_op_save(call, saved[i]);
    for (int i = 0; i < 4; i++) ms_tensor_release(in[i]);
    if (!status && call->output_count > 1) call->outputs[1] = ms_tensor_retain(log_sum);
    ms_tensor_release(log_sum);
    if (status) ms_tensor_release(out);
    else call->outputs[0] = out;
    return status;
}

/* Whether queries, keys and values are parts of each row of one matrix, as one linear layer for all
 * three makes them. The offsets say that the heads of k begin where those of q end, in each row,
 * and those of v after them. */
static bool side_by_side(const ms_tensor *q, const ms_tensor *k, const ms_tensor *v)
{
    int64_t width = q->shape[3];
    return q->storage == k->storage && k->storage == v->storage && q->shape[2] == k->shape[2]
           && q->strides[1] == width && k->offset - q->offset == q->shape[1] * width
           && v->offset - k->offset == k->shape[1] * width
           && memcmp(q->strides, k->strides, sizeof q->strides) == 0
           && memcmp(k->strides, v->strides, sizeof q->strides) == 0;
}

/* The tensors for dq, dk and dv, of the products' dtype. If q, k and v are side by side in one
 * matrix, so are their gradients: split's backward then finds the matrix's gradient complete and
 * copies nothing. Their three windows write every element of the matrix, so it needs no zeros. */
static ms_status make_gradients(ms_op_gradient *gradient, ms_tensor **results)
{
    ms_engine *engine = gradient->engine;
    ms_status status = MS_OK;
    const ms_tensor_info *in = gradient->inputs;
    ms_dtype dtype = gradient->saved[0]->dtype;
    if (!side_by_side(gradient->saved[0], gradient->saved[1], gradient->saved[2])) {
        for (int i = 0; i < 3 && !status; i++)
            status = make_heads(engine, dtype, in[i].shape, &results[i]);
        return status;
    }
    int64_t batches = in[0].shape[0], times = in[0].shape[2], width = in[0].shape[3],
            row = (in[0].shape[1] + 2 * in[1].shape[1]) * width, at = 0;
    ms_tensor *whole = NULL;
    status = ms_tensor_new(engine, dtype, 3, (int64_t[]){ batches, times, row }, &whole);
    for (int i = 0; i < 3 && !status; i++) {
        status = ms_tensor_window(whole, 4, in[i].shape, (int64_t[]){ times * row, width, row, 1 },
                                  at, &results[i]);
        at += in[i].shape[1] * width;
    }
    ms_tensor_release(whole);
    return status;
}

/* The gradient of o, of the products' dtype; zeros where log_sum alone has one. */
static ms_status result_gradient(const ms_op_gradient *gradient, ms_tensor **out)
{
    ms_engine *engine = gradient->engine;
    ms_dtype dtype = gradient->saved[0]->dtype;
    ms_attributes zero = { .scalar = { .value = 0.0 } };
    ms_tensor *made = NULL;
    if (gradient->gradients[0]) return with_rows(engine, gradient->gradients[0], dtype, out);
    ms_status status = ms_tensor_new(engine, dtype, 4, gradient->outputs[0].shape, &made);
    if (!status) status = ms_op_apply(engine, &ms_op_fill, &zero, true, &made, 1, out, 1);
    /* In place, the result is another reference. */
    ms_tensor_release(made);
    return status;
}

/* One task computes all three gradients, as they share the probabilities; those that no part of
 * the backward needs are released. 5 products against 2 of forward: scores again, their gradients,
 * dv, dk and dq. */
static ms_status attention_backward(ms_op_gradient *gradient)
{
    ms_engine *engine = gradient->engine;
    ms_tensor *const *saved = gradient->saved;
    ms_tensor *g = NULL, *of_sum = NULL, *results[3] = { NULL },
              *positions = gradient->saved_count > 5 ? saved[5] : NULL;
    ms_status status = result_gradient(gradient, &g);
    if (!status && gradient->output_count > 1 && gradient->gradients[1])
        status = ms_op_as_contiguous(engine, gradient->gradients[1], &of_sum);
    if (!status) status = make_gradients(gradient, results);
    /* Without queries the task still runs: dk and dv are zeros then, which only the task writes. */
    if (!status && results[1]->count > 0) {
        ms_attention_args args = { .out = heads_of(saved[3]),
                                   .log_sum = ms_tensor_data(saved[4]),
                                   .dlog_sum = of_sum ? ms_tensor_data(of_sum) : NULL,
                                   .positions = positions ? ms_tensor_data(positions) : NULL,
                                   .dout = heads_of(g),
                                   .dq = heads_of(results[0]),
                                   .dk = heads_of(results[1]),
                                   .dv = heads_of(results[2]) };
        fill_args(&gradient->attributes, saved[0], saved[1], saved[2], &args);
        ms_tensor *reads[] = { saved[0], saved[1], saved[2],  saved[3],
                               saved[4], g,        positions, of_sum };
        ms_task_cost cost = { .flops = flops_of(&args, 5.0),
                              .bytes = 4 * ms_tensor_bytes(g) + 4 * ms_tensor_bytes(results[1]) };
        status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_attention_backward),
                                   &args, reads, 8, results, 3, cost);
    }
    ms_tensor_release(g);
    ms_tensor_release(of_sum);
    for (int i = 0; i < 3; i++) {
        /* Inputs that autocast has cast get gradients of their own dtype. */
        if (!status && ms_op_wants(gradient, (uint32_t)i))
            status = ms_op_as_dtype(engine, results[i], gradient->inputs[i].dtype,
                                    &gradient->results[i]);
        ms_tensor_release(results[i]);
    }
    return status;
}

const ms_op ms_op_attention = { .name = "attention",
                                .forward = attention_forward,
                                .backward = attention_backward,
                                .inputs_min = 3,
                                .inputs_max = 4 };

/* ------------------------------------------------------------------- rotary */

/* Turns pairs of numbers by angles that grow with the position (rotary embedding, Su et al. 2021);
 * back turns by the negative angles. The result has the layout of make_heads, whatever that of
 * x. */
static ms_status turn(ms_engine *engine, const ms_attributes *attributes, ms_tensor *x, bool back,
                      ms_tensor **out)
{
    ms_tensor *rows = NULL, *made = NULL;
    ms_status status = with_rows(engine, x, x->dtype, &rows);
    if (!status) status = make_heads(engine, x->dtype, x->shape, &made);
    if (!status && x->count > 0) {
        ms_rotary_args args = { .x = heads_of(rows),
                                .y = heads_of(made),
                                .batches = x->shape[0],
                                .heads = x->shape[1],
                                .times = x->shape[2],
                                .width = x->shape[3],
                                .first = attributes->rotary.first,
                                .base = attributes->rotary.base,
                                .scaling = attributes->rotary.scaling,
                                .dtype = (uint8_t)x->dtype,
                                .back = back };
        ms_task_cost cost = { .flops = 3.0 * (double)x->count, .bytes = 2 * ms_tensor_bytes(x) };
        status = ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_rotary), &args, &rows,
                                   1, &made, 1, cost);
    }
    ms_tensor_release(rows);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* What is wrong with a scaling, or NULL. Written so that NaN is refused, too. The text is a
 * constant: the caller puts the operator and the shapes before it. */
static const char *scaling_fault(const ms_rotary_scaling *scaling)
{
    if (scaling->kind == MS_ROTARY_PLAIN) return NULL;
    if (!(scaling->factor > 0.0 && isfinite(scaling->factor)))
        return "the factor of its scaling must be a finite number above 0";
    if (scaling->kind == MS_ROTARY_LINEAR) return NULL;
    if (!(scaling->low >= 0.0 && scaling->high > scaling->low && isfinite(scaling->high)))
        return "low_freq_factor must be 0 or more and below high_freq_factor";
    if (!(scaling->original_context > 0.0 && isfinite(scaling->original_context)))
        return "the original context of its scaling must be above 0";
    return NULL;
}

/* x [b, h, t, d] with even d. Nothing is saved: the angles follow from the attributes. Positions
 * begin at `first`, for a text that is continued. */
static ms_status rotary_forward(ms_op_call *call)
{
    const char *fault = scaling_fault(&call->attributes.rotary.scaling);
    const ms_tensor *x = call->inputs[0];
    if (!ms_dtype_is_float(x->dtype) || x->dims != 4)
        return ms_op_refuse(call, "it takes floats of shape [batch, heads, time, width]");
    if (x->shape[3] % 2 != 0)
        return ms_op_refuse(call, "the width must be even: pairs of numbers are turned");
    if (!(call->attributes.rotary.base > 0.0))
        return ms_op_refuse(call, "the base must be above 0");
    if (fault) return ms_op_refuse(call, "%s", fault);
    return turn(call->engine, &call->attributes, call->inputs[0], false, &call->outputs[0]);
}

/* A rotation's transpose is its inverse: dx is dy turned back. Forward and backward are thus one
 * kernel with the sign of the sine changed. */
static ms_status rotary_backward(ms_op_gradient *gradient)
{
    return turn(gradient->engine, &gradient->attributes, gradient->gradients[0], true,
                &gradient->results[0]);
}

const ms_op ms_op_rotary = { .name = "rotary",
                             .forward = rotary_forward,
                             .backward = rotary_backward,
                             .inputs_min = 1,
                             .inputs_max = 1 };
