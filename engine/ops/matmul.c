/* matmul.c: products of matrices: matmul with its gradients, and what linear layers share with it.
 * The products themselves are gemm.h's.
 *
 * A product is one task for all batches, cut into parts that run on the device's threads. Where it
 * is cut depends on shapes only, and never along k: a sum that is cut would depend on how its parts
 * are added. Transposed operands are read as they are: a library takes either order of strides.
 * Other strides are copied first. */
#include "ops/matmul.h"

#include <string.h>

#include "exec/engine.h"
#include "moonshard/ops.h"
#include "ops/autocast.h"
#include "ops/values.h"
#include "tensor/products.h"
#include "tensor/op.h"
#include "ops/sum_to.h"

/* --------------------------------------------------------------- the kernel */

/* Into how many tiles work of this size is cut. Few, large products are best: with two halves a
 * core that is stolen for a moment holds up the other, and more than four cost some percent on two
 * cores; large work is cut further for the sake of larger machines. The steps were measured on two
 * cores; a device that cuts by itself finds the whole size as (parts - 1) * part + last. */
static uint32_t tiles_for(double flops)
{
    static const double steps[] = { 2e6, 2.5e9, 4e10, 4e11 };
    uint32_t tiles = 1;
    for (size_t i = 0; i < sizeof steps / sizeof *steps && !(flops < steps[i]); i++) tiles *= 2;
    return tiles;
}

/* Whether a library can read the matrix: one of its two strides is 1, and rows do not overlap.
 * *transposed: it is the row stride that is 1. *row: elements from one stored row to the next. A
 * single row or column has a stride that does not count. Overlapping rows (an expanded operand) are
 * refused, as libraries assume that each row has memory of its own. */
static bool layout_of(const ms_tensor *t, bool *transposed, int64_t *row)
{
    int64_t rows = t->shape[t->dims - 2], columns = t->shape[t->dims - 1];
    int64_t down = t->strides[t->dims - 2], across = t->strides[t->dims - 1];
    if ((across == 1 || columns == 1) && (down >= columns || rows == 1)) {
        *transposed = false;
        *row = rows == 1 ? columns : down;
        return true;
    }
    *transposed = true;
    *row = columns == 1 ? rows : across;
    return (down == 1 || rows == 1) && (across >= rows || columns == 1);
}

/* The tensor itself (retained) if a library can read it, else a contiguous copy. Caller releases. A
 * copy costs two passes over the operand, little next to a product with more than a few columns. */
static ms_status readable(ms_engine *engine, ms_tensor *tensor, ms_tensor **out)
{
    bool transposed;
    int64_t row;
    if (!layout_of(tensor, &transposed, &row)) return ms_op_as_contiguous(engine, tensor, out);
    *out = ms_tensor_retain(tensor);
    return MS_OK;
}

/* Describes the leading dimensions for the kernel: those of size 1 are dropped, and neighbours are
 * joined where all three operands walk them as one. A stride of 0 repeats an operand that was
 * broadcast. Fewer dimensions mean fewer divisions when the kernel looks for the place of a
 * batch. */
static void describe_batches(ms_matmul_args *args, const ms_tensor *a, const ms_tensor *b,
                             const ms_tensor *c)
{
    args->batches = 1;
    for (uint32_t d = 0; d + 2 < c->dims; d++) {
        int64_t size = c->shape[d];
        args->batches *= size;
        if (size == 1) continue;
        /* A batch dimension of size 1 is read again for every batch of the other operand. */
        int64_t sa = a->shape[d] == 1 ? 0 : a->strides[d];
        int64_t sb = b->shape[d] == 1 ? 0 : b->strides[d];
        int64_t sc = c->strides[d];
        uint32_t last = args->batch_dims - 1;
        bool follows = args->batch_dims > 0 && args->a_batch[last] == sa * size
                       && args->b_batch[last] == sb * size && args->c_batch[last] == sc * size;
        if (!follows) args->batch_shape[last = args->batch_dims++] = 1;
        args->batch_shape[last] *= size;
        args->a_batch[last] = sa;
        args->b_batch[last] = sb;
        args->c_batch[last] = sc;
    }
}

/* Cuts the work by its shape alone: whole batches first, then the longer one of rows and columns,
 * because each part reads all of the other operand. Parts are multiples of 16, the last one takes
 * what is left. Afterwards args->shape is that of one part. Multiples of 16 suit the library's
 * tiles, and count as regular for its plans. `parts` times `groups` is the number of tiles. */
static void cut(ms_matmul_args *args, double flops)
{
    int64_t m = args->shape.m, n = args->shape.n, tiles = tiles_for(flops);
    args->groups = (uint32_t)(args->batches < tiles ? args->batches : tiles);
    /* What is left to cut after the batches; part sizes are rounded up, so there may be fewer
     * parts. */
    int64_t wanted = tiles / args->groups;
    args->split_columns = n > m;
    int64_t whole = args->split_columns ? n : m,
            part = ((whole + wanted - 1) / wanted + 15) / 16 * 16;
    if (part > whole) part = whole;
    args->parts = (uint32_t)((whole + part - 1) / part);
    args->last = whole - (int64_t)(args->parts - 1) * part;
    if (args->split_columns) args->shape.n = part;
    else args->shape.m = part;
}

/* A product of readable operands. bias, beside and the scales of codes may be NULL. */
typedef struct request {
    ms_tensor *a, *b, *bias, *beside, *out, *a_scale, *b_scale;
    ms_gemm_extra extra;
    uint8_t e5m2;
    bool adds;
} request;

static void *address_of(const ms_tensor *tensor) { return tensor ? ms_tensor_data(tensor) : NULL; }

static double bytes_of(const request *r)
{
    return (double)ms_tensor_bytes(r->a) + (double)ms_tensor_bytes(r->b)
           + (double)ms_tensor_bytes(r->out) * (r->adds ? 2 : 1)
           + (r->beside ? (double)ms_tensor_bytes(r->beside) : 0);
}

/* Plans of a library are made here, on the host: making one can fail and takes time, which a task
 * should not. Nothing is planned where nothing will run. m or n of 1 have strides that do not
 * count, hence the natural one for c. A device without values (sim) only needs the cost. */
static ms_status enqueue(ms_engine *engine, const request *r)
{
    ms_tensor *a = r->a, *b = r->b, *out = r->out;
    ms_matmul_args args = { .a = ms_tensor_data(a),
                            .b = ms_tensor_data(b),
                            .c = ms_tensor_data(out),
                            .beside = address_of(r->beside),
                            .bias = address_of(r->bias),
                            .a_scale = address_of(r->a_scale),
                            .b_scale = address_of(r->b_scale) };
    ms_gemm_shape *shape = &args.shape;
    shape->m = out->shape[out->dims - 2];
    shape->n = out->shape[out->dims - 1];
    shape->k = a->shape[a->dims - 1];
    /* Both are readable, so the answer is not asked for. */
    layout_of(a, &shape->a_transposed, &shape->a_row);
    layout_of(b, &shape->b_transposed, &shape->b_row);
    shape->c_row = shape->m > 1 ? out->strides[out->dims - 2] : shape->n;
    shape->in = (uint8_t)a->dtype;
    shape->out = (uint8_t)out->dtype;
    shape->bias = r->bias != NULL;
    shape->accumulate = r->adds;
    shape->extra = (uint8_t)r->extra;
    shape->e5m2 = r->e5m2;
    describe_batches(&args, a, b, out);
    double flops = 2.0 * (double)out->count * (double)shape->k;
    cut(&args, flops);
    if (ms_engine_device_of(engine)->values && !ms_tensor_is_meta(out)) {
        ms_status status = ms_engine_backend(engine)->plan_matmul(engine, &args);
        if (status) return status;
    }
    bool is_read = r->extra == MS_GEMM_GELU_GRADIENT;
    ms_tensor *reads[] = { a,
                           b,
                           r->bias,
                           r->adds ? out : NULL,
                           is_read ? r->beside : NULL,
                           r->a_scale,
                           r->b_scale },
              *writes[] = { out, is_read ? NULL : r->beside };
    ms_task_cost cost = { .flops = flops, .bytes = bytes_of(r) };
    return ms_tensor_enqueue(engine, ms_engine_kernel(engine, MS_KERNEL_matmul), &args, reads, 7,
                             writes, 2, cost);
}

/* The bias as the product adds it: a CPU's in f32. A GPU's library takes it in the result's dtype;
 * that cast is kept for the step, as those of weights. */
static ms_status bias_operand(ms_engine *engine, ms_tensor *bias, const ms_tensor *out,
                              ms_tensor **result)
{
    bool is_gpu = ms_engine_is_for_gpu(engine);
    if (!bias) return MS_OK;
    return ms_tensor_cast_cached(engine, bias, is_gpu ? out->dtype : MS_F32, is_gpu, result);
}

/* out may not overlap an operand: a library reads them while it writes. */
ms_status ms_matmul_extra_into(ms_engine *engine, ms_tensor *a, ms_tensor *b, ms_tensor *bias,
                               ms_gemm_extra extra, ms_tensor *beside, ms_tensor *out)
{
    if (out->count == 0) return MS_OK;
    ms_tensor *left = NULL, *right = NULL, *added = NULL;
    ms_status status = readable(engine, a, &left);
    if (!status) status = readable(engine, b, &right);
    if (!status) status = bias_operand(engine, bias, out, &added);
    request r = {
        .a = left, .b = right, .bias = added, .beside = beside, .out = out, .extra = extra
    };
    if (!status) status = enqueue(engine, &r);
    ms_tensor_release(left);
    ms_tensor_release(right);
    ms_tensor_release(added);
    return status;
}

/* Codes are readable as they are. */
ms_status ms_matmul_codes_into(ms_engine *engine, const ms_matmul_codes *a,
                               const ms_matmul_codes *b, ms_tensor *bias, ms_tensor *out)
{
    ms_tensor *added = NULL;
    if (out->count == 0) return MS_OK;
    ms_status status = bias_operand(engine, bias, out, &added);
    request r = { .a = a->codes,
                  .b = b->codes,
                  .bias = added,
                  .out = out,
                  .a_scale = a->scale,
                  .b_scale = b->scale,
                  .e5m2 = (uint8_t)((a->is_e5m2 ? MS_GEMM_E5M2_A : 0)
                                    | (b->is_e5m2 ? MS_GEMM_E5M2_B : 0)) };
    if (!status) status = enqueue(engine, &r);
    ms_tensor_release(added);
    return status;
}

/* out is f32, as each sum is rounded to its dtype. */
ms_status ms_matmul_add_into(ms_engine *engine, ms_tensor *a, ms_tensor *b, ms_tensor *out)
{
    if (out->count == 0) return MS_OK;
    ms_tensor *left = NULL, *right = NULL;
    ms_status status = readable(engine, a, &left);
    if (!status) status = readable(engine, b, &right);
    request r = { .a = left, .b = right, .out = out, .adds = true };
    if (!status) status = enqueue(engine, &r);
    ms_tensor_release(left);
    ms_tensor_release(right);
    return status;
}

ms_status ms_matmul_into(ms_engine *engine, ms_tensor *a, ms_tensor *b, ms_tensor *bias,
                         ms_tensor *out)
{
    return ms_matmul_extra_into(engine, a, b, bias, MS_GEMM_PLAIN, NULL, out);
}

/* -------------------------------------------------------------------- views */

/* A view: the last two dimensions exchanged, with their strides. Strides may come out in any order;
 * readable decides later whether the product takes them. */
ms_status ms_matrix_swapped(ms_tensor *tensor, ms_tensor **out)
{
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    uint32_t last = tensor->dims - 1;
    memcpy(shape, tensor->shape, sizeof shape);
    memcpy(strides, tensor->strides, sizeof strides);
    shape[last] = tensor->shape[last - 1];
    shape[last - 1] = tensor->shape[last];
    strides[last] = tensor->strides[last - 1];
    strides[last - 1] = tensor->strides[last];
    return ms_tensor_window(tensor, tensor->dims, shape, strides, 0, out);
}

/* The leading dimensions are regular if each steps over all of those inside of it. An expanded one
 * (stride 0) is not, although it could be described: its rows would be one row. A linear layer's
 * input [batch, time, width] thus becomes one matrix, without a copy in the usual case. */
ms_status ms_matrix_flattened(ms_engine *engine, ms_tensor *tensor, ms_tensor **out)
{
    uint32_t last = tensor->dims - 1;
    int64_t width = tensor->shape[last], rows = ms_shape_count(last, tensor->shape), step = 0,
            expected = 0;
    bool regular = true;
    for (uint32_t d = last; d-- > 0;) {
        if (tensor->shape[d] == 1) continue;
        if (step == 0) step = tensor->strides[d];
        else if (tensor->strides[d] != expected) regular = false;
        expected = tensor->strides[d] * tensor->shape[d];
    }
    if (rows > 1 && step == 0) regular = false; /* an expanded dimension */
    ms_tensor *source = NULL;
    ms_status status = MS_OK;
    if (regular) source = ms_tensor_retain(tensor);
    else status = ms_op_as_contiguous(engine, tensor, &source);
    if (status) return status;
    int64_t shape[2] = { rows, width },
            strides[2] = { regular && rows > 1 ? step : width, tensor->strides[last] };
    /* The copy is contiguous. */
    if (!regular) strides[1] = 1;
    status = ms_tensor_window(source, 2, shape, strides, 0, out);
    ms_tensor_release(source);
    return status;
}

/* The operand as a matrix with leading dimensions of size 1 up to `dims` in all. A vector on the
 * left is one row, on the right (column) one column: the product's rule for 1-D operands. The
 * strides of added dimensions are 0 and never used, since their size is 1. */
static ms_status as_matrices(ms_tensor *tensor, uint32_t dims, bool column, ms_tensor **out)
{
    int64_t shape[MS_DIMS_MAX], strides[MS_DIMS_MAX];
    uint32_t have = tensor->dims == 1 ? 2 : tensor->dims;
    for (uint32_t d = 0; d < dims - have; d++) {
        shape[d] = 1;
        strides[d] = 0;
    }
    int64_t *s = shape + (dims - have), *t = strides + (dims - have);
    if (tensor->dims == 1) {
        s[column ? 0 : 1] = tensor->shape[0];
        t[column ? 0 : 1] = tensor->strides[0];
        s[column ? 1 : 0] = 1;
        t[column ? 1 : 0] = 0;
    } else {
        memcpy(s, tensor->shape, have * sizeof *s);
        memcpy(t, tensor->strides, have * sizeof *t);
    }
    return ms_tensor_window(tensor, dims, shape, strides, 0, out);
}

/* The memory of a contiguous tensor under another shape of as many elements; used where vectors
 * become matrices and back. The window is checked against the storage, so a mistake in the shape
 * cannot reach other memory. */
static ms_status reshaped(ms_tensor *tensor, uint32_t dims, const int64_t *shape, ms_tensor **out)
{
    int64_t strides[MS_DIMS_MAX], stride = 1;
    for (uint32_t d = dims; d-- > 0;) {
        strides[d] = stride;
        stride *= shape[d] > 1 ? shape[d] : 1;
    }
    return ms_tensor_window(tensor, dims, shape, strides, 0, out);
}

/* ------------------------------------------------------------------- matmul */

/* What a product of two shapes is: the shape with all operands as matrices of `dims` dimensions,
 * and the shape of the result, from which a vector's dimension of size 1 is dropped. */
typedef struct product {
    uint32_t dims, out_dims;
    int64_t full[MS_DIMS_MAX]; /* [batch ..., m, n] */
    int64_t out[MS_DIMS_MAX];  /* the same without what a vector has not */
} product;

/* False if the shapes do not fit: the inner sizes differ, or the leading dimensions do not
 * broadcast. a and b are shapes and not tensors, because backward asks when the inputs may be
 * gone. */
static bool product_of(const ms_tensor_info *a, const ms_tensor_info *b, product *p)
{
    /* The last two dimensions of each as a matrix; a vector gets a size of 1 on its outer side. */
    int64_t am[2] = { a->dims > 1 ? a->shape[a->dims - 2] : 1, a->shape[a->dims - 1] };
    int64_t bm[2] = { b->shape[0], 1 };
    if (b->dims > 1) memcpy(bm, b->shape + b->dims - 2, sizeof bm);
    uint32_t a_dims = a->dims > 1 ? a->dims - 2 : 0;
    uint32_t b_dims = b->dims > 1 ? b->dims - 2 : 0;
    uint32_t batch = 0;
    if (am[1] != bm[0]) return false;
    if (!ms_shape_broadcast(a_dims, a->shape, b_dims, b->shape, &batch, p->full)) return false;
    p->full[batch] = am[0];
    p->full[batch + 1] = bm[1];
    p->dims = batch + 2;
    memcpy(p->out, p->full, batch * sizeof *p->out);
    p->out_dims = batch;
    if (a->dims > 1) p->out[p->out_dims++] = am[0];
    if (b->dims > 1) p->out[p->out_dims++] = bm[1];
    return true;
}

/* The tensor's dtype and shape, in the form in which backward gets them. */
static ms_tensor_info info_of(const ms_tensor *tensor)
{
    ms_tensor_info info = { .dtype = tensor->dtype, .dims = tensor->dims };
    memcpy(info.shape, tensor->shape, sizeof info.shape);
    return info;
}

/* a b into the contiguous out of shape [batch ..., m, n]; all have as many dimensions. If the right
 * operand is a single matrix and the left one covers all batches, the product is made as one of two
 * matrices, which a library does best. Otherwise each batch would be a small product of its own,
 * and the shared matrix would be packed for each. */
static ms_status multiply(ms_engine *engine, ms_tensor *a, ms_tensor *b, ms_tensor *out)
{
    /* One matrix on the right for all batches: the batches are more rows of one large product. */
    bool shared = ms_shape_count(b->dims - 2, b->shape) == 1;
    if (!shared || out->dims == 2) return ms_matmul_into(engine, a, b, NULL, out);
    ms_tensor *rows = NULL, *right = NULL, *flat = NULL;
    /* An a that is broadcast would have to be repeated to form the rows. */
    bool whole = ms_shape_equal(a->dims - 2, a->shape, out->dims - 2, out->shape);
    if (!whole) return ms_matmul_into(engine, a, b, NULL, out);
    ms_status status = ms_matrix_flattened(engine, a, &rows);
    if (!status)
        status =
            ms_tensor_window(b, 2, b->shape + b->dims - 2, b->strides + b->dims - 2, 0, &right);
    if (!status) status = ms_matrix_flattened(engine, out, &flat);
    if (!status) status = ms_matmul_into(engine, rows, right, NULL, flat);
    ms_tensor_release(rows);
    ms_tensor_release(right);
    ms_tensor_release(flat);
    return status;
}

/* Two float operands of one dtype, *dtype after autocast's casts; fills in *p. Messages name the
 * sizes that do not fit, since shapes alone are hard to compare. */
static ms_status matmul_check(const ms_op_call *call, product *p, ms_dtype *dtype)
{
    const ms_tensor *a = call->inputs[0], *b = call->inputs[1];
    ms_status status = ms_autocast_product(call, call->inputs, 2, dtype);
    if (status) return status;
    if (a->dims == 0 || b->dims == 0)
        return ms_op_refuse(call, "a number has no rows and columns: use mul");
    ms_tensor_info ai = info_of(a), bi = info_of(b);
    if (product_of(&ai, &bi, p)) return MS_OK;
    /* What does not fit: the inner sizes, or the dimensions before them. */
    int64_t k = a->shape[a->dims - 1], rows = b->shape[b->dims > 1 ? b->dims - 2 : 0];
    if (k != rows)
        return ms_op_refuse(call,
                            "the last dimension of the first (%lld) must equal the second to last "
                            "of the second (%lld)",
                            (long long)k, (long long)rows);
    return ms_op_refuse(call, "the dimensions before the last two do not broadcast");
}

/* y = a b. Under autocast both operands are cast; neither cast is kept for the step, as either may
 * be an activation. The casts are saved, not the operands: backward multiplies in the same dtype.
 */
static ms_status matmul_forward(ms_op_call *call)
{
    ms_engine *engine = call->engine;
    ms_tensor *cast[2] = { NULL }, *matrix[2] = { NULL }, *out = NULL, *full = NULL;
    product p = { 0 };
    ms_dtype dtype = MS_F32;
    ms_status status = matmul_check(call, &p, &dtype);
    for (int i = 0; i < 2 && !status; i++) {
        status = ms_tensor_cast_cached(engine, call->inputs[i], dtype, false, &cast[i]);
        if (!status) status = as_matrices(cast[i], p.dims, i == 1, &matrix[i]);
    }
    if (!status) status = ms_products_take(engine, dtype, p.out_dims, p.out, &call->outputs[0]);
    if (!status && !call->outputs[0]) {
        status = ms_op_output(call, 0, dtype, p.out_dims, p.out, &out);
        if (!status) status = reshaped(out, p.dims, p.full, &full);
        if (!status) status = multiply(engine, matrix[0], matrix[1], full);
        if (!status) status = ms_products_note(engine, out);
    }
    for (int i = 0; i < 2 && !status; i++) status = ms_op_save(call, cast[i]);
    for (int i = 0; i < 2; i++) {
        ms_tensor_release(matrix[i]);
        ms_tensor_release(cast[i]);
    }
    ms_tensor_release(full);
    return status;
}

/* Sums what broadcasting repeated, and gives the gradient the shape of the input, which may be a
 * vector. Releases `whole`. The gradient of a vector drops the dimension of size 1 that made it a
 * matrix. */
static ms_status finish_gradient(ms_engine *engine, ms_tensor *whole, const ms_tensor_info *input,
                                 const ms_tensor *matrix, ms_tensor **out)
{
    ms_tensor_info as_matrix = info_of(matrix);
    ms_tensor *summed = NULL;
    ms_status status = ms_op_sum_to(engine, whole, &as_matrix, &summed);
    ms_tensor_release(whole);
    if (status) return status;
    status = reshaped(summed, input->dims, input->shape, out);
    ms_tensor_release(summed);
    return status;
}

/* da = g b^T, summed over the batches along which a was broadcast. The product has the batches of
 * the result; where a was one matrix for all of them, they are summed afterwards. */
static ms_status left_gradient(const ms_op_gradient *gradient, const product *p, ms_tensor *g,
                               ms_tensor *a, ms_tensor *b)
{
    ms_tensor *b_swapped = NULL, *whole = NULL;
    int64_t shape[MS_DIMS_MAX];
    memcpy(shape, p->full, sizeof shape);
    shape[p->dims - 1] = a->shape[a->dims - 1];
    ms_status status = ms_matrix_swapped(b, &b_swapped);
    if (!status)
        status = ms_tensor_new(gradient->engine, gradient->inputs[0].dtype, p->dims, shape, &whole);
    if (!status) status = multiply(gradient->engine, g, b_swapped, whole);
    ms_tensor_release(b_swapped);
    if (status) ms_tensor_release(whole);
    else
        status = finish_gradient(gradient->engine, whole, &gradient->inputs[0], a,
                                 &gradient->results[0]);
    return status;
}

/* db = a^T g. If one matrix served all batches, the rows of all batches are one long sum: a single
 * product instead of one for each batch and a sum of the results. A 2-D operand is then written to
 * its home, if it has one. A long sum over all rows also rounds to 16 bits once, where a sum of
 * products would round each. */
static ms_status right_gradient(const ms_op_gradient *gradient, const product *p, ms_tensor *g,
                                ms_tensor *a, ms_tensor *b)
{
    ms_engine *engine = gradient->engine;
    ms_tensor *a_swapped = NULL, *whole = NULL, *a_rows = NULL, *g_rows = NULL;
    int64_t shape[MS_DIMS_MAX];
    /* One matrix b for all batches, and an a that was not broadcast. */
    bool fold = ms_shape_count(b->dims - 2, b->shape) == 1
                && ms_shape_equal(a->dims - 2, a->shape, p->dims - 2, p->full);
    /* Then the product has the shape of the input and may be written to its home. */
    bool direct = fold && gradient->inputs[1].dims == 2;
    uint32_t dims = fold ? 2 : p->dims;
    memcpy(shape, p->full + (p->dims - dims), dims * sizeof *shape);
    shape[dims - 2] = b->shape[b->dims - 2];
    ms_status status = MS_OK;
    if (fold) {
        status = ms_matrix_flattened(engine, a, &a_rows);
        if (!status) status = ms_matrix_flattened(engine, g, &g_rows);
    } else {
        a_rows = ms_tensor_retain(a);
        g_rows = ms_tensor_retain(g);
    }
    if (!status) status = ms_matrix_swapped(a_rows, &a_swapped);
    if (!status)
        status = direct ? ms_op_result(gradient, 1, &whole)
                        : ms_tensor_new(engine, gradient->inputs[1].dtype, dims, shape, &whole);
    if (!status) status = ms_matmul_into(engine, a_swapped, g_rows, NULL, whole);
    if (status) ms_tensor_release(whole);
    else if (direct) gradient->results[1] = whole;
    else if (fold) {
        status = reshaped(whole, gradient->inputs[1].dims, gradient->inputs[1].shape,
                          &gradient->results[1]);
        ms_tensor_release(whole);
    } else status = finish_gradient(engine, whole, &gradient->inputs[1], b, &gradient->results[1]);
    ms_tensor_release(a_rows);
    ms_tensor_release(g_rows);
    ms_tensor_release(a_swapped);
    return status;
}

/* The incoming gradient, contiguous, in the dtype in which forward multiplied. Caller releases. An
 * expanded gradient, as that of a sum, is copied here once for both products. */
static ms_status incoming(const ms_op_gradient *gradient, ms_dtype dtype, ms_tensor **out)
{
    ms_tensor *cast = NULL;
    ms_status status =
        ms_tensor_cast_cached(gradient->engine, gradient->gradients[0], dtype, false, &cast);
    if (status) return status;
    status = ms_op_as_contiguous(gradient->engine, cast, out);
    ms_tensor_release(cast);
    return status;
}

/* saved: a and b as they were multiplied. Shapes are worked out again from what the inputs were.
 * Results that were made before a failure are the caller's to release. */
static ms_status matmul_backward(ms_op_gradient *gradient)
{
    ms_tensor *g = NULL, *full = NULL, *a = NULL, *b = NULL;
    product p = { 0 };
    product_of(&gradient->inputs[0], &gradient->inputs[1], &p);
    ms_status status = incoming(gradient, gradient->saved[0]->dtype, &g);
    if (!status) status = reshaped(g, p.dims, p.full, &full);
    if (!status) status = as_matrices(gradient->saved[0], p.dims, false, &a);
    if (!status) status = as_matrices(gradient->saved[1], p.dims, true, &b);
    if (!status && gradient->needs[0]) status = left_gradient(gradient, &p, full, a, b);
    if (!status && gradient->needs[1]) status = right_gradient(gradient, &p, full, a, b);
    ms_op_reads_later(gradient, 0, ms_op_is_left(gradient, 1));
    ms_op_reads_later(gradient, 1, ms_op_is_left(gradient, 0));
    ms_tensor_release(g);
    ms_tensor_release(full);
    ms_tensor_release(a);
    ms_tensor_release(b);
    return status;
}

const ms_op ms_op_matmul = { .name = "matmul",
                             .flags = MS_OP_SPLITS,
                             .forward = matmul_forward,
                             .backward = matmul_backward,
                             .inputs_min = 2,
                             .inputs_max = 2 };
