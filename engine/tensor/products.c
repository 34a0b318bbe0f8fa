/* products.c: results of products that a recomputed function keeps from its first run to the
 * second. */
#include "tensor/products.h"

#include <string.h>

#include "tensor/shape.h"
#include "tensor/state.h"
#include "tensor/tensor.h"

static ms_tensor_state *state_of(const ms_engine *engine)
{
    return ms_engine_get(engine, MS_SLOT_TENSOR);
}

ms_kept_products *ms_products_set(ms_engine *engine, ms_kept_products *kept)
{
    ms_tensor_state *state = state_of(engine);
    if (!state) return NULL; /* no tensor was made yet */
    ms_kept_products *before = state->kept;
    state->kept = kept;
    return before;
}

bool ms_products_are_kept(const ms_engine *engine)
{
    const ms_tensor_state *state = state_of(engine);
    return state && state->kept;
}

ms_status ms_products_take(ms_engine *engine, ms_dtype dtype, uint32_t dims, const int64_t *shape,
                           ms_tensor **out)
{
    ms_tensor_state *state = state_of(engine);
    ms_kept_products *kept = state ? state->kept : NULL;
    *out = NULL;
    if (!kept || !kept->again) return MS_OK;
    const struct ms_kept_product *item =
        kept->next < kept->count ? &kept->items[kept->next++] : NULL;
    if (!item || item->tensor->dtype != dtype
        || !ms_shape_equal(dims, shape, item->tensor->dims, item->tensor->shape))
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "recompute: the function makes another product now than at first: it "
                              "must do the same each time");
    if (ms_tensor_version(item->tensor) != item->version) return MS_OK;
    return ms_tensor_alias(item->tensor, out);
}

/* Room for one more, doubled each time. */
static ms_status reserve(ms_context *context, ms_kept_products *kept)
{
    if (kept->count < kept->capacity) return MS_OK;
    size_t capacity = kept->capacity ? 2 * kept->capacity : 16;
    void *memory = NULL;
    ms_status status = ms_allocate(context, capacity * sizeof *kept->items, "kept", &memory);
    if (status) return status;
    if (kept->count) memcpy(memory, kept->items, kept->count * sizeof *kept->items);
    ms_release(context, kept->items);
    kept->items = memory;
    kept->capacity = capacity;
    return MS_OK;
}

ms_status ms_products_note(ms_engine *engine, ms_tensor *made)
{
    ms_tensor_state *state = state_of(engine);
    ms_kept_products *kept = state ? state->kept : NULL;
    if (!kept || kept->again) return MS_OK;
    ms_status status = reserve(ms_engine_context(engine), kept);
    ms_tensor *alias = NULL;
    if (!status) status = ms_tensor_alias(made, &alias);
    if (status) return status;
    kept->items[kept->count++] =
        (struct ms_kept_product){ .tensor = alias, .version = ms_tensor_version(made) };
    return MS_OK;
}

void ms_products_free(ms_context *context, ms_kept_products *kept)
{
    for (size_t i = 0; i < kept->count; i++) ms_tensor_release(kept->items[i].tensor);
    ms_release(context, kept->items);
    *kept = (ms_kept_products){ 0 };
}
