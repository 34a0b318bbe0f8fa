/* tensors.c: operators on tensors as links use them: with one number, without history. */
#include "hook/tensors.h"

#include "ops/values.h"

/* ms_op_apply records nothing on the tape, so links do not lengthen the graph. */
static ms_status apply(const ms_op *op, double value, bool in_place, ms_tensor *a, ms_tensor *b,
                       ms_tensor **out)
{
    ms_tensor *inputs[] = { a, b };
    ms_attributes attributes = { .scalar = { .value = value } };
    return ms_op_apply(ms_tensor_engine(a), op, &attributes, in_place, inputs, b ? 2 : 1, out, 1);
}

/* The result is a new tensor on the current stream, owned by the caller. */
ms_status ms_link_apply(const ms_op *op, double value, ms_tensor *a, ms_tensor *b, ms_tensor **out)
{
    return apply(op, value, false, a, b, out);
}

/* In place, the operator returns a reference to its first input, which is released. */
ms_status ms_link_change(const ms_op *op, double value, ms_tensor *a, ms_tensor *b)
{
    ms_tensor *out = NULL;
    ms_status status = apply(op, value, true, a, b, &out);
    ms_tensor_release(out);
    return status;
}

/* Zeros where memory is infinite or NaN, in place, without a wait of the host. Three passes over
 * the state; a branch on whether it is needed would have to wait for the device. */
ms_status ms_link_keep_finite(ms_tensor *memory)
{
    ms_tensor *finite = NULL, *bad = NULL;
    ms_status status = ms_link_apply(&ms_op_is_finite, 0, memory, NULL, &finite);
    if (!status) status = ms_link_apply(&ms_op_eq_scalar, 0, finite, NULL, &bad);
    if (!status) status = ms_link_change(&ms_op_masked_fill, 0, memory, bad);
    ms_tensor_release(finite);
    ms_tensor_release(bad);
    return status;
}

/* A tensor that has the dtype already is retained, so a caller must not write the result unless it
 * knows that it was made. */
ms_status ms_link_cast(ms_tensor *t, ms_dtype dtype, ms_tensor **out)
{
    if (ms_tensor_dtype(t) == dtype) {
        *out = ms_tensor_retain(t);
        return MS_OK;
    }
    ms_attributes attributes = { .cast = { .dtype = dtype } };
    return ms_op_apply(ms_tensor_engine(t), &ms_op_cast, &attributes, false, &t, 1, out, 1);
}

/* Links and checks of results compare numbers of elements, so other shapes must not get here. */
ms_status ms_bucket_row(ms_tensor *given, ms_tensor **out)
{
    ms_engine *engine = ms_tensor_engine(given);
    ms_attributes flat = { .shape = { .dims = 1, .sizes = { -1 } } };
    ms_tensor *row = NULL;
    if (ms_tensor_dims(given) == 1) {
        *out = ms_tensor_retain(given);
        return MS_OK;
    }
    ms_status status = ms_op_apply(engine, &ms_op_reshape, &flat, false, &given, 1, &row, 1);
    /* A column of a matrix becomes a row with gaps. */
    if (!status) status = ms_op_as_contiguous(engine, row, out);
    ms_tensor_release(row);
    return status;
}

/* A reshape of a tensor that is not contiguous copies; of a contiguous one it is a view. Either way
 * the result is memory of its own. */
ms_status ms_link_flat_copy(ms_tensor *t, ms_tensor **out)
{
    ms_engine *engine = ms_tensor_engine(t);
    /* -1: one dimension with all elements. */
    ms_attributes flat = { .shape = { .dims = 1, .sizes = { -1 } } };
    ms_tensor *from = NULL, *made = NULL;
    int64_t count = ms_tensor_count(t);
    ms_status status = ms_op_apply(engine, &ms_op_reshape, &flat, false, &t, 1, &from, 1);
    if (!status) status = ms_tensor_new(engine, MS_F32, 1, &count, &made);
    if (!status) status = ms_copy_into(engine, from, made);
    ms_tensor_release(from);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

/* A window: `first` counts from t's own first element, so spans of spans work. */
ms_status ms_link_span(ms_tensor *t, int64_t first, int64_t count, ms_tensor **out)
{
    const int64_t stride = 1;
    return ms_tensor_window(t, 1, &count, &stride, first, out);
}
