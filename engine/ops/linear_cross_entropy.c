/* linear_cross_entropy.c: a classifier's last linear layer and its loss, without whole logits.
 *
 * loss = cross_entropy(x w^T, y). The logits [rows, classes] are the largest tensor of a step. Here
 * they exist for a chunk of rows at a time, and forward computes the gradients as well. The
 * gradient of a chunk's logits overwrites the logits. One product of it gives the chunk's rows of
 * dx, and another one is added to dw. Forward saves dx and dw for a gradient of the loss of 1.
 * Backward multiplies them by the actual gradient of the loss, in place where it may.
 *
 * Forward computes dx or dw only if that input requires a gradient. If the call is not recorded,
 * it computes the loss only.
 *
 * How many rows are a chunk depends on shape and dtype of the logits alone (chunk_of), or the call
 * says it. With one chunk the bits are those of linear and cross_entropy, in f32 and bf16, if the
 * gradient that arrives is a power of two. More chunks add the same products of dw in another
 * order. Then dw is added up in f32, and rounded to the dtype of the weight once, in backward.
 *
 * In f16 the gradient of a logit, divided by the number of rows, could be too small to be
 * represented, and the factor of a loss scaler is known in backward only. So this gradient is
 * multiplied by a power of two (cross_entropy_share), by which backward divides in f32. Until then
 * dw is f32, since it could be too large for f16. */
#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/matmul.h"
#include "ops/softmax.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"

enum { X, WEIGHT, TARGET, INPUTS };

/* The logits of a chunk take at most this, unless those of one row take more. A product of so many
 * rows fills a GPU: 8192 of 50304 classes in 16 bits. */
#define CHUNK_BYTES ((int64_t)1 << 30)

/* Rows of a chunk: a power of two, so that most batches divide by it and chunks of a row's logits
 * begin at the same elements (ops/cuda/rows.h). */
static int64_t chunk_of(const ms_op_call *call, int64_t classes, ms_dtype dtype)
{
    int64_t chunk = 1, most = CHUNK_BYTES / (int64_t)ms_dtype_bytes(dtype) / classes;
    if (call->attributes.loss.chunk > 0) return call->attributes.loss.chunk;
    while (chunk <= most / 2) chunk *= 2;
    return chunk;
}

/* x [..., in], weight [classes, in], target [...]; *dtype: of the products. The targets' values are
 * checked by the task. */
static ms_status check(const ms_op_call *call, ms_dtype *dtype)
{
    const ms_tensor *x = call->inputs[X], *w = call->inputs[WEIGHT], *target = call->inputs[TARGET];
    ms_status status = ms_autocast_product(call, call->inputs, 2, dtype);
    if (status) return status;
    if (target->dtype != MS_I64 && target->dtype != MS_I32 && target->dtype != MS_U16)
        return ms_op_refuse(call, "the targets must be i64, i32 or u16");
    if (x->dims == 0 || w->dims != 2)
        return ms_op_refuse(call, "the weight must have two dimensions, the input at least one");
    if (w->shape[0] == 0) return ms_op_refuse(call, "the weight needs a row for each class");
    if (x->shape[x->dims - 1] != w->shape[1])
        return ms_op_refuse(call,
                            "the input's last dimension is %lld, the weight ([classes, in]) takes "
                            "%lld",
                            (long long)x->shape[x->dims - 1], (long long)w->shape[1]);
    if (!ms_shape_equal(x->dims - 1, x->shape, target->dims, target->shape))
        return ms_op_refuse(
            call, "the targets must have the shape of the input without the last dimension");
    if (call->attributes.loss.reduction != MS_REDUCE_MEAN
        && call->attributes.loss.reduction != MS_REDUCE_SUM)
        return ms_op_refuse(call, "the losses of rows are not kept: the reduction is mean or sum");
    return MS_OK;
}

/* ------------------------------------------------------------------ forward */

/* What the chunks of a call share. NULL: a gradient that is not made. */
typedef struct head {
    ms_tensor *x;       /* [rows, in] as it is multiplied */
    ms_tensor *w;       /* [classes, in] likewise */
    ms_tensor *columns; /* w as [in, classes] */
    ms_tensor *target;  /* contiguous */
    ms_tensor *logits;  /* [chunk, classes], contiguous */
    ms_tensor *losses;  /* f32 [rows] */
    ms_tensor *share;   /* f32 [2]: see softmax.h */
    ms_tensor *dx;      /* of the input's shape and dtype */
    ms_tensor *dx_rows; /* the same as [rows, in] */
    ms_tensor *dw;      /* [classes, in], f32 or of the weight's dtype */
} head;

static void release_head(head *h)
{
    ms_tensor *all[] = { h->x,      h->w,     h->columns, h->target,  h->logits,
                         h->losses, h->share, h->dx,      h->dx_rows, h->dw };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) ms_tensor_release(all[i]);
}

static bool is_wanted(const ms_op_call *call, uint32_t input)
{
    return call->record && (!call->needs || call->needs[input]);
}

/* The operands as they are multiplied, and the tensors that the chunks write. */
static ms_status make_head(const ms_op_call *call, ms_dtype dtype, int64_t chunk, head *h)
{
    ms_engine *engine = call->engine;
    ms_tensor *x = call->inputs[X], *w = call->inputs[WEIGHT], *cast = NULL;
    int64_t rows = call->inputs[TARGET]->count, shape[2] = { chunk, w->shape[0] }, two = 2;
    bool is_wide = rows > chunk || dtype == MS_F16;
    ms_status status = ms_tensor_cast_cached(engine, x, dtype, false, &cast);
    if (!status) status = ms_matrix_flattened(engine, cast, &h->x);
    ms_tensor_release(cast);
    if (!status) status = ms_tensor_cast_cached(engine, w, dtype, true, &h->w);
    if (!status) status = ms_matrix_swapped(h->w, &h->columns);
    if (!status) status = ms_op_as_contiguous(engine, call->inputs[TARGET], &h->target);
    if (!status) status = ms_tensor_new(engine, MS_F32, 1, &rows, &h->losses);
    if (!status) status = ms_tensor_new(engine, MS_F32, 1, &two, &h->share);
    if (!status && is_wanted(call, X))
        status = ms_tensor_new(engine, x->dtype, x->dims, x->shape, &h->dx);
    if (!status && h->dx) status = ms_matrix_flattened(engine, h->dx, &h->dx_rows);
    if (!status && is_wanted(call, WEIGHT))
        status = ms_tensor_new(engine, is_wide ? MS_F32 : w->dtype, 2, w->shape, &h->dw);
    if (!status) status = ms_tensor_new(engine, dtype, 2, shape, &h->logits);
    return status;
}

static void fill_args(const ms_op_call *call, const head *h, ms_cross_entropy_args *args)
{
    args->target = ms_tensor_data(h->target);
    args->share = ms_tensor_data(h->share);
    args->losses = ms_tensor_data(h->losses);
    args->rows = h->target->count;
    args->classes = h->w->shape[0];
    args->ignore_index = call->attributes.loss.ignore_index;
    args->reduction = (uint8_t)call->attributes.loss.reduction;
    args->dtype = (uint8_t)h->logits->dtype;
    args->target_dtype = (uint8_t)h->target->dtype;
}

/* Checks and counts the targets. The number of rows that count must be known before the first slope
 * is. It runs also where no slope is made, so that a bad target is named by its row among all. */
static ms_status make_share(const ms_op_call *call, const head *h)
{
    ms_cross_entropy_args args = { 0 };
    fill_args(call, h, &args);
    ms_tensor *reads[] = { h->target }, *writes[] = { h->share };
    ms_task_cost cost = { .flops = (double)h->target->count, .bytes = ms_tensor_bytes(h->target) };
    return ms_tensor_enqueue(call->engine,
                             ms_engine_kernel(call->engine, MS_KERNEL_cross_entropy_share), &args,
                             reads, 1, writes, 1, cost);
}

/* Losses of a chunk, and slopes over its logits if a gradient is made of them. */
static ms_status lose(const ms_op_call *call, const head *h, ms_tensor *logits, ms_tensor *target,
                      ms_tensor *losses)
{
    bool has_slopes = h->dx || h->dw;
    ms_cross_entropy_args args = { 0 };
    fill_args(call, h, &args);
    args.logits = ms_tensor_data(logits);
    args.target = ms_tensor_data(target);
    args.loss = ms_tensor_data(losses);
    args.rows = target->count;
    if (has_slopes) args.dlogits = ms_tensor_data(logits);
    ms_tensor *reads[] = { logits, target, h->share },
              *writes[] = { losses, has_slopes ? logits : NULL };
    ms_task_cost cost = { .flops = (has_slopes ? 12.0 : 6.0) * (double)logits->count,
                          .bytes = (has_slopes ? 2 : 1) * ms_tensor_bytes(logits) };
    return ms_tensor_enqueue(call->engine,
                             ms_engine_kernel(call->engine, MS_KERNEL_cross_entropy_in_place),
                             &args, reads, 3, writes, 2, cost);
}

/* The chunk's part of dx, and of dw, which it writes or adds to. */
static ms_status make_gradients(ms_engine *engine, const head *h, ms_tensor *slopes, ms_tensor *x,
                                ms_tensor *dx, bool is_first)
{
    ms_tensor *turned = NULL;
    ms_status status = MS_OK;
    if (dx) status = ms_matmul_into(engine, slopes, h->w, NULL, dx);
    if (status || !h->dw) return status;
    status = ms_matrix_swapped(slopes, &turned);
    if (!status && is_first) status = ms_matmul_into(engine, turned, x, NULL, h->dw);
    else if (!status) status = ms_matmul_add_into(engine, turned, x, h->dw);
    ms_tensor_release(turned);
    return status;
}

static ms_status run_chunk(const ms_op_call *call, const head *h, int64_t first, int64_t rows)
{
    ms_tensor *x = NULL, *target = NULL, *losses = NULL, *logits = NULL, *dx = NULL, *flat = NULL;
    ms_status status = ms_tensor_slice(h->x, 0, first, rows, false, &x);
    int64_t count = h->target->count, step = 1;
    if (!status) status = ms_tensor_window(h->target, 1, &count, &step, 0, &flat);
    if (!status) status = ms_tensor_slice(flat, 0, first, rows, false, &target);
    if (!status) status = ms_tensor_slice(h->losses, 0, first, rows, false, &losses);
    if (!status) status = ms_tensor_slice(h->logits, 0, 0, rows, false, &logits);
    if (!status && h->dx) status = ms_tensor_slice(h->dx_rows, 0, first, rows, false, &dx);
    if (!status) status = ms_matmul_into(call->engine, x, h->columns, NULL, logits);
    if (!status) status = lose(call, h, logits, target, losses);
    if (!status) status = make_gradients(call->engine, h, logits, x, dx, first == 0);
    ms_tensor *made[] = { x, target, losses, logits, dx, flat };
    for (size_t i = 0; i < sizeof made / sizeof *made; i++) ms_tensor_release(made[i]);
    return status;
}

/* The loss of the rows' losses, in the order in which cross_entropy adds them. */
static ms_status add_losses(ms_op_call *call, const head *h)
{
    ms_tensor *loss = NULL;
    ms_status status = ms_op_output(call, 0, MS_F32, 0, NULL, &loss);
    if (status) return status;
    ms_cross_entropy_args args = { .loss = ms_tensor_data(loss) };
    fill_args(call, h, &args);
    args.share = NULL;
    ms_tensor *reads[] = { h->losses, h->target };
    ms_task_cost cost = { .flops = (double)h->target->count, .bytes = ms_tensor_bytes(h->losses) };
    return ms_tensor_enqueue(call->engine,
                             ms_engine_kernel(call->engine, MS_KERNEL_cross_entropy_total), &args,
                             reads, 2, &loss, 1, cost);
}

/* saved: share, then dx and dw, each if it was made. Without rows dw is zeros. */
static ms_status linear_cross_entropy_forward(ms_op_call *call)
{
    ms_dtype dtype = MS_F32;
    ms_status status = check(call, &dtype);
    if (status) return status;
    int64_t rows = call->inputs[TARGET]->count,
            chunk = chunk_of(call, call->inputs[WEIGHT]->shape[0], dtype);
    if (chunk > rows) chunk = rows;
    head h = { 0 };
    status = make_head(call, dtype, chunk, &h);
    if (!status) status = make_share(call, &h);
    for (int64_t first = 0; first < rows && !status; first += chunk)
        status = run_chunk(call, &h, first, rows - first < chunk ? rows - first : chunk);
    if (!status && rows == 0 && h.dw) status = ms_fill_into(call->engine, h.dw, 0);
    if (!status) status = add_losses(call, &h);
    ms_tensor *saved[] = { h.share, h.dx, h.dw };
    for (size_t i = 0; i < 3 && !status; i++)
        if (saved[i]) status = ms_op_save(call, saved[i]);
    release_head(&h);
    return status;
}

/* ----------------------------------------------------------------- backward */

/* Where the gradient of an input goes: to its home; or over the saved one, if the graph is freed
 * after this call and nothing else refers to that memory; or to a new tensor. */
static ms_status place_of(const ms_op_gradient *gradient, uint32_t input, ms_tensor *saved,
                          ms_tensor **out)
{
    bool has_home = gradient->homes && gradient->homes[input],
         is_free = gradient->last && ms_storage_references(saved->storage) == 1;
    if (!has_home && is_free && saved->dtype == gradient->inputs[input].dtype)
        return ms_tensor_alias(saved, out);
    return ms_op_result(gradient, input, out);
}

/* The saved gradient times the factor, in f32 before it is rounded. */
static ms_status scale(const ms_op_gradient *gradient, uint32_t input, ms_tensor *saved,
                       ms_tensor *factor)
{
    ms_tensor *out = NULL;
    ms_elementwise product = { .kernel = MS_KERNEL_mul,
                               .operands = { { .tensor = saved }, { .tensor = factor } },
                               .count = 2 };
    ms_status status = place_of(gradient, input, saved, &out);
    if (!status) status = ms_elementwise_into(gradient->engine, &product, out);
    if (status) ms_tensor_release(out);
    else gradient->results[input] = out;
    return status;
}

/* The gradient that arrives times share[1], which is not 1 in f16 only. */
static ms_status factor_of(const ms_op_gradient *gradient, ms_tensor **out)
{
    ms_tensor *given = gradient->gradients[0], *back = NULL;
    ms_status status = ms_tensor_slice(gradient->saved[0], 0, 1, 1, true, &back);
    ms_elementwise product = { .kernel = MS_KERNEL_mul,
                               .operands = { { .tensor = given }, { .tensor = back } },
                               .count = 2 };
    if (!status) status = ms_elementwise_new(gradient->engine, &product, MS_F32, 0, NULL, out);
    ms_tensor_release(back);
    return status;
}

static ms_status linear_cross_entropy_backward(ms_op_gradient *gradient)
{
    ms_tensor *const *saved = gradient->saved;
    ms_tensor *factor = NULL;
    ms_status status = factor_of(gradient, &factor);
    if (!status && gradient->needs[X]) status = scale(gradient, X, saved[1], factor);
    if (!status && gradient->needs[WEIGHT])
        status = scale(gradient, WEIGHT, saved[gradient->saved_count - 1], factor);
    ms_tensor_release(factor);
    return status;
}

const ms_op ms_op_linear_cross_entropy = { .name = "linear_cross_entropy",
                                           .flags = MS_OP_SPLITS,
                                           .forward = linear_cross_entropy_forward,
                                           .backward = linear_cross_entropy_backward,
                                           .inputs_min = INPUTS,
                                           .inputs_max = INPUTS };
