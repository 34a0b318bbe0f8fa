/* autocast.c: the dtype of products, and casts that are kept for the step. */
#include "tensor/state.h"

#include "moonshard/ops.h"
#include "tensor/op.h"

void ms_engine_set_autocast(ms_engine *engine, ms_dtype dtype)
{
    ms_tensor_state *state = NULL;
    if (!ms_tensor_state_of(engine, &state)) state->autocast = dtype;
}

ms_dtype ms_engine_autocast(const ms_engine *engine)
{
    const ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    return state ? state->autocast : MS_F32;
}

void ms_engine_drop_casts(ms_engine *engine)
{
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    while (state && state->casts) ms_tensor_drop_cast(state->casts);
}

ms_status ms_tensor_cast_cached(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, bool keep,
                                ms_tensor **out)
{
    if (tensor->dtype == dtype) {
        *out = ms_tensor_retain(tensor);
        return MS_OK;
    }
    uint64_t version = ms_tensor_version(tensor);
    if (tensor->cast
        && (tensor->cast->dtype != dtype || tensor->cast_version != version
            || ms_storage_spoiled(tensor->cast->storage)))
        ms_tensor_drop_cast(tensor);
    if (tensor->cast) {
        *out = ms_tensor_retain(tensor->cast);
        return MS_OK;
    }
    ms_attributes attributes = { .cast = { .dtype = dtype } };
    ms_tensor *cast = NULL;
    ms_status status = ms_op_unary(engine, &ms_op_cast, &attributes, tensor, &cast);
    if (status) return status;
    if (keep) ms_tensor_keep_cast(tensor, cast);
    *out = cast;
    return MS_OK;
}

ms_status ms_tensor_new_cast(ms_engine *engine, const ms_tensor *tensor, ms_tensor **out)
{
    ms_dtype dtype = ms_engine_autocast(engine);
    if (dtype == MS_F32 || tensor->dtype != MS_F32 || tensor->count == 0) return MS_OK;
    ms_tensor *memory = NULL;
    ms_status status = ms_tensor_new(engine, dtype, 1, &tensor->count, &memory);
    if (!status)
        status = ms_tensor_window(memory, tensor->dims, tensor->shape, tensor->strides, 0, out);
    ms_tensor_release(memory);
    return status;
}
