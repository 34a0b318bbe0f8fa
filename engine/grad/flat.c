/* flat.c: leaves moved into one storage. */
#include "grad/tape.h"
#include "tensor/copy.h"

static ms_status check(ms_engine *engine, ms_tensor *const *leaves, uint32_t count, int64_t *total)
{
    if (count == 0) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "flat: the list is empty");
    *total = 0;
    for (uint32_t i = 0; i < count; i++) {
        const ms_meta *meta = leaves[i]->meta;
        if (leaves[i]->dtype != leaves[0]->dtype)
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "flat: tensor 1 is %s and tensor %u is %s; all must have one dtype", ms_dtype_name(leaves[0]->dtype), i + 1,
                                  ms_dtype_name(leaves[i]->dtype));
        if (!ms_dtype_is_float(leaves[i]->dtype) || !ms_tensor_is_leaf(leaves[i]))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "flat: tensor %u is %s; parameters are float tensors that nothing has computed", i + 1,
                                  ms_dtype_is_float(leaves[i]->dtype) ? "the result of an operator" : ms_dtype_name(leaves[i]->dtype));
        if (meta && meta->home) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "flat: parameter %u is in a wrapped model already: make it flat before wrapping", i + 1);
        for (uint32_t k = 0; k < i; k++)
            if (leaves[k] == leaves[i]) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "flat: tensors %u and %u are the same", k + 1, i + 1);
        *total += leaves[i]->count;
    }
    return MS_OK;
}

static bool are_in_place(ms_tensor *const *leaves, uint32_t count)
{
    int64_t at = leaves[0]->offset;
    for (uint32_t i = 0; i < count; i++) {
        if (leaves[i]->storage != leaves[0]->storage || !leaves[i]->contiguous || leaves[i]->offset != at) return false;
        at += leaves[i]->count;
    }
    return true;
}

/* A cell for each leaf, so that tasks on different ones need not wait for each other; where these are too many, neighbours share one. */
static ms_status split_into_cells(ms_tensor *flat, ms_tensor *const *leaves, uint32_t count)
{
    size_t ends[MS_CELLS_MAX], item = ms_dtype_bytes(flat->dtype), total = ms_tensor_bytes(flat), end = 0, begin = 0, least = count > MS_CELLS_MAX ? total / MS_CELLS_MAX + 1 : 1;
    uint32_t cells = 0;
    for (uint32_t i = 0; i < count; i++) {
        end += (size_t)leaves[i]->count * item;
        if (end - begin >= least) ends[cells++] = begin = end;
    }
    if (begin < total) ends[cells++] = total;
    return cells > 1 ? ms_storage_split(flat->storage, ends, cells) : MS_OK;
}

/* Values first: a leaf moves only once nothing can fail any more. */
static ms_status move(ms_engine *engine, ms_tensor *const *leaves, uint32_t count, ms_tensor *flat)
{
    int64_t at = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t strides[MS_DIMS_MAX], stride = 1;
        ms_tensor *view = NULL;
        for (uint32_t d = leaves[i]->dims; d-- > 0;) {
            strides[d] = stride;
            stride *= leaves[i]->shape[d];
        }
        ms_status status = ms_tensor_window(flat, leaves[i]->dims, leaves[i]->shape, strides, at, &view);
        if (!status && leaves[i]->count) status = ms_copy_into(engine, leaves[i], view);
        ms_tensor_release(view);
        if (status) return status;
        at += leaves[i]->count;
    }
    at = 0;
    for (uint32_t i = 0; i < count; i++) {
        int64_t length = leaves[i]->count;
        ms_tensor_rebase(leaves[i], flat, length ? at : 0);
        at += length;
    }
    return MS_OK;
}

ms_status ms_flatten(ms_engine *engine, ms_tensor *const *leaves, uint32_t count, ms_tensor **flat)
{
    int64_t total = 0, one = 1;
    ms_tensor *made = NULL;
    ms_status status = check(engine, leaves, count, &total);
    if (status) return status;
    if (are_in_place(leaves, count)) return ms_tensor_window(leaves[0], 1, &total, &one, 0, flat);
    status = ms_tensor_new(engine, leaves[0]->dtype, 1, &total, &made);
    if (!status && total) status = split_into_cells(made, leaves, count);
    if (!status) status = move(engine, leaves, count, made);
    if (status) ms_tensor_release(made);
    else *flat = made;
    return status;
}
