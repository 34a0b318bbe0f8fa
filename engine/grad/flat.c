/* flat.c: leaves moved into one storage.
 *
 * Flattening makes one long tensor of a model's parameters, so that an optimizer or a collective
 * handles them with one task, and gives each parameter its part of that storage: the handles that
 * scripts hold stay valid. Packing copies instead, is recorded on the tape, and leaves the tensors
 * where they are. */
#include "grad/node.h"

#include "ops/values.h"
#include "tensor/tensor.h"

/* All leaves must be distinct, of one float dtype, and without a home: a wrapped model has laid out
 * its buckets already. *total: elements of all of them. The search for equal leaves compares each
 * with each: models have hundreds of parameters, and this runs once. */
static ms_status check(ms_engine *engine, ms_tensor *const *leaves, uint32_t count, int64_t *total)
{
    if (count == 0) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "flat: the list is empty");
    *total = 0;
    for (uint32_t i = 0; i < count; i++) {
        const ms_meta *meta = leaves[i]->meta;
        if (leaves[i]->dtype != leaves[0]->dtype)
            return ms_engine_fail(
                engine, MS_ERROR_ARGUMENT,
                "flat: tensor 1 is %s and tensor %u is %s; all must have one dtype",
                ms_dtype_name(leaves[0]->dtype), i + 1, ms_dtype_name(leaves[i]->dtype));
        if (!ms_dtype_is_float(leaves[i]->dtype) || !ms_tensor_is_leaf(leaves[i]))
            return ms_engine_fail(
                engine, MS_ERROR_ARGUMENT,
                "flat: tensor %u is %s; parameters are float tensors that nothing has computed",
                i + 1,
                ms_dtype_is_float(leaves[i]->dtype) ? "the result of an operator"
                                                    : ms_dtype_name(leaves[i]->dtype));
        if (meta && meta->home)
            return ms_engine_fail(
                engine, MS_ERROR_ARGUMENT,
                "flat: parameter %u is in a wrapped model already: make it flat before wrapping",
                i + 1);
        for (uint32_t k = 0; k < i; k++)
            if (leaves[k] == leaves[i])
                return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                      "flat: tensors %u and %u are the same", k + 1, i + 1);
        *total += leaves[i]->count;
    }
    return MS_OK;
}

/* Whether the leaves already follow each other in one storage without gaps: then flattening again
 * must not copy, or tensors that refer to the flat storage would lose their parameters. Then the
 * flat tensor is only another window on that storage. */
static bool are_in_place(ms_tensor *const *leaves, uint32_t count)
{
    int64_t at = leaves[0]->offset;
    for (uint32_t i = 0; i < count; i++) {
        if (leaves[i]->storage != leaves[0]->storage || !leaves[i]->contiguous
            || leaves[i]->offset != at)
            return false;
        at += leaves[i]->count;
    }
    return true;
}

/* Splits the new storage into one part for each leaf that has elements. Tasks on different leaves
 * then do not wait for each other, and each leaf has a version of its own: a write of one parameter
 * does not invalidate what backward saved of another. */
static ms_status split_into_leaves(ms_tensor *flat, ms_tensor *const *leaves, uint32_t count)
{
    ms_context *context = ms_engine_context(flat->engine);
    size_t item = ms_dtype_bytes(flat->dtype), end = 0;
    uint32_t parts = 0;
    void *memory = NULL;
    ms_status status = ms_allocate(context, count * sizeof(size_t), "flat", &memory);
    size_t *ends = memory;
    for (uint32_t i = 0; i < count && !status; i++) {
        /* Parts must have different ends. */
        if (leaves[i]->count == 0) continue;
        end += (size_t)leaves[i]->count * item;
        ends[parts++] = end;
    }
    if (!status) status = ms_storage_split(flat->storage, ends, parts);
    ms_release(context, memory);
    return status;
}

/* Copies the values of the leaves into flat, then makes each leaf a window on it. The loops are
 * separate: every call that can fail comes before the first leaf moves, so an error leaves all
 * leaves as they were. */
static ms_status move(ms_engine *engine, ms_tensor *const *leaves, uint32_t count, ms_tensor *flat)
{
    int64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t strides[MS_DIMS_MAX], stride = 1;
        ms_tensor *view = NULL;
        /* Row-major strides, whatever the leaf's own were. */
        for (uint32_t d = leaves[i]->dims; d-- > 0;) {
            strides[d] = stride;
            stride *= leaves[i]->shape[d];
        }
        ms_status status =
            ms_tensor_window(flat, leaves[i]->dims, leaves[i]->shape, strides, at, &view);
        if (!status && leaves[i]->count) status = ms_copy_into(engine, leaves[i], view);
        ms_tensor_release(view);
        if (status) return status;
        at += leaves[i]->count;
    }
    at = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t length = leaves[i]->count;
        /* An empty leaf is at the beginning, as the end of the storage is outside of it. */
        ms_tensor_rebase(leaves[i], flat, length ? at : 0);
        if (ms_tensor_requires_grad(leaves[i])) ms_leaf_mark_parameter(leaves[i]);
        at += length;
    }
    return MS_OK;
}

/* The new storage is on "meta" if the first leaf is. */
ms_status ms_flatten(ms_engine *engine, ms_tensor *const *leaves, uint32_t count, ms_tensor **flat)
{
    int64_t total = 0, one = 1;
    ms_tensor *made = NULL;
    ms_status status = check(engine, leaves, count, &total);
    if (status) return status;
    /* A window on the storage that they are in already; nothing is copied. */
    if (are_in_place(leaves, count)) return ms_tensor_window(leaves[0], 1, &total, &one, 0, flat);
    /* Put back below, whatever comes of it. */
    bool meta = ms_engine_set_meta(engine, ms_tensor_is_meta(leaves[0]));
    status = ms_tensor_new(engine, leaves[0]->dtype, 1, &total, &made);
    ms_engine_set_meta(engine, meta);
    /* A storage without bytes has no parts. */
    if (!status && total) status = split_into_leaves(made, leaves, count);
    if (!status) status = move(engine, leaves, count, made);
    if (status) ms_tensor_release(made);
    else *flat = made;
    return status;
}

/* ------------------------------------------------------------------ packing */

/* Unlike for flattening, tensors may repeat and have any history; only the dtype must be the same.
 */
static ms_status check_pack(ms_engine *engine, ms_tensor *const *tensors, uint32_t count,
                            int64_t *total)
{
    *total = 0;
    if (count == 0) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "pack: the list is empty");
    for (uint32_t i = 0; i < count; i++) {
        if (tensors[i]->dtype != tensors[0]->dtype)
            return ms_engine_fail(
                engine, MS_ERROR_ARGUMENT,
                "pack: tensor 1 is %s and tensor %u is %s; all must have one dtype",
                ms_dtype_name(tensors[0]->dtype), i + 1, ms_dtype_name(tensors[i]->dtype));
        if (tensors[i]->count > INT64_MAX - *total)
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "pack: the tensors have more elements than 63 bits can count");
        *total += tensors[i]->count;
    }
    return MS_OK;
}

/* The tensor in one dimension, recorded: a view, or a copy where strides allow none. */
static ms_status in_line(ms_engine *engine, ms_tensor *tensor, ms_tensor **out)
{
    ms_attributes line = { .shape = { .dims = 1, .sizes = { tensor->count } } };
    return ms_apply(engine, &ms_op_reshape, &line, false, &tensor, 1, out, 1);
}

/* The tensors one after the other in a new 1-D tensor. Made of recorded operators, so that the
 * gradient of the whole flows back to each tensor. */
static ms_status join(ms_engine *engine, ms_tensor *const *tensors, uint32_t count,
                      ms_tensor **whole)
{
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(engine), count * sizeof *tensors, "pack", &memory);
    if (status) return status;
    ms_tensor **lines = memory;
    ms_attributes first = { 0 };
    for (uint32_t i = 0; i < count && !status; i++) status = in_line(engine, tensors[i], &lines[i]);
    if (!status) status = ms_apply(engine, &ms_op_cat, &first, false, lines, count, whole, 1);
    for (uint32_t i = 0; i < count; i++) ms_tensor_release(lines[i]);
    ms_release(ms_engine_context(engine), memory);
    return status;
}

/* The elements of `whole` from `at` on, in the shape of `like`. */
static ms_status part_of(ms_engine *engine, ms_tensor *whole, int64_t at, const ms_tensor *like,
                         ms_tensor **out)
{
    ms_attributes piece = { .dim = { .start = at, .length = like->count } },
                  shape = { .shape = { .dims = like->dims } };
    ms_tensor *line = NULL;
    for (uint32_t d = 0; d < like->dims; d++) shape.shape.sizes[d] = like->shape[d];
    ms_status status = ms_apply(engine, &ms_op_narrow, &piece, false, &whole, 1, &line, 1);
    if (!status) status = ms_apply(engine, &ms_op_view, &shape, false, &line, 1, out, 1);
    ms_tensor_release(line);
    return status;
}

/* After an error no output is set: parts that were made are released, as is the whole. */
ms_status ms_pack(ms_engine *engine, ms_tensor *const *tensors, uint32_t count, ms_tensor **whole,
                  ms_tensor **parts)
{
    int64_t total = 0, at = 0;
    ms_tensor *made = NULL;
    ms_status status = check_pack(engine, tensors, count, &total);
    if (!status) status = join(engine, tensors, count, &made);
    for (uint32_t i = 0; i < count; i++) parts[i] = NULL;
    for (uint32_t i = 0; i < count && !status; i++) {
        status = part_of(engine, made, at, tensors[i], &parts[i]);
        at += tensors[i]->count;
    }
    if (!status) {
        *whole = made;
        return MS_OK;
    }
    for (uint32_t i = 0; i < count; i++) {
        ms_tensor_release(parts[i]);
        parts[i] = NULL;
    }
    ms_tensor_release(made);
    return status;
}
