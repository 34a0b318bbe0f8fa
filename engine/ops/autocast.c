/* autocast.c: the dtypes of operators under autocast, and casts that are kept for the step.
 *
 * A weight is cast once a step: the cast is kept with the weight and serves until the weight's
 * version changes. Activations have 16 bits as they are made.
 *
 * Whoever steps a weight makes its next cast in the same pass (ms_tensor_next_cast), if the weight
 * has been cast since it was stepped before. Such a cast stays until it is used.
 *
 * A cast's storage is tied to that of its source: when the source is dropped, the cast is dropped
 * with it, also where only the tape holds the cast. It is computed again when it is used next. */
#include "ops/autocast.h"

#include "moonshard/ops.h"
#include "ops/fp8.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/tensor.h"

/* f32 turns autocast off. Without memory for the state it stays off. Casts that exist are not
 * dropped: they are checked against the dtype when they are used. */
void ms_engine_set_autocast(ms_engine *engine, ms_dtype dtype)
{
    ms_tensor_state *state = NULL;
    if (!ms_tensor_state_of(engine, &state)) state->autocast = dtype;
}

/* f32 represents "off", as f32 operands then need no cast. */
ms_dtype ms_engine_autocast(const ms_engine *engine)
{
    const ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    return state ? state->autocast : MS_F32;
}

/* If the state cannot be allocated, attention keeps the deterministic order. */
void ms_engine_set_fast_attention(ms_engine *engine, bool fast)
{
    ms_tensor_state *state = NULL;
    if (!ms_tensor_state_of(engine, &state)) state->fast_attention = fast;
}

bool ms_engine_fast_attention(const ms_engine *engine)
{
    const ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    return state && state->fast_attention;
}

/* Called at the end of a step: weights change then, and their casts would only hold memory. Those
 * that were made with the change stay. */
void ms_engine_drop_casts(ms_engine *engine)
{
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    ms_tensor *next = state ? state->casts : NULL;
    for (ms_tensor *tensor = next; tensor; tensor = next) {
        next = tensor->next_cast;
        if (!tensor->cast_is_new) ms_tensor_drop_cast(tensor);
    }
}

/* ------------------------------------------------------------------- dtypes */

bool ms_autocast_shared(const ms_engine *engine, ms_dtype a, ms_dtype b, ms_dtype *out)
{
    *out = a == b ? a : MS_F32;
    return a == b || (ms_engine_autocast(engine) != MS_F32 && (a == MS_F32 || b == MS_F32));
}

ms_dtype ms_autocast_wide(const ms_engine *engine, ms_dtype dtype)
{
    bool is_wide = ms_engine_autocast(engine) != MS_F32 && ms_dtype_is_float(dtype);
    return is_wide ? MS_F32 : dtype;
}

/* Operands that have 16 bits already are multiplied as they are, unless an f32 operand meets them:
 * that one is cast to the dtype of autocast. */
ms_status ms_autocast_product(const ms_op_call *call, ms_tensor *const *operands, uint32_t count,
                              ms_dtype *out)
{
    ms_dtype autocast = ms_engine_autocast(call->engine);
    bool is_first = true;
    for (uint32_t i = 0; i < count; i++) {
        if (!operands[i]) continue;
        ms_dtype dtype = operands[i]->dtype == MS_F32 ? autocast : operands[i]->dtype;
        if (!ms_dtype_is_float(dtype) || (!is_first && dtype != *out))
            return autocast == MS_F32
                       ? ms_op_refuse(call, "all must have the same float dtype: cast with x:to")
                       : ms_op_refuse(call,
                                      "all must be f32 or of one dtype of 16 bits, under "
                                      "autocast to %s: cast with x:to",
                                      ms_dtype_name(autocast));
        *out = dtype;
        is_first = false;
    }
    return MS_OK;
}

/* ------------------------------------------------- casts of dropped weights */

#define MS_ORIGIN_CHUNK 32

/* Called when the storage of the cast goes. Origins belong to the chunks of the state, so nothing
 * is freed. */
static void origin_give(void *object)
{
    ms_cast_origin *origin = object;
    origin->next = origin->state->unused_origins;
    origin->state->unused_origins = origin;
}

/* An origin from the free list; a chunk of them is allocated when the list is empty. */
static ms_status origin_take(ms_engine *engine, ms_cast_origin **out)
{
    ms_tensor_state *state = NULL;
    ms_status status = ms_tensor_state_of(engine, &state);
    if (status) return status;
    if (!state->unused_origins) {
        ms_context *context = ms_engine_context(engine);
        void *chunk = NULL;
        status = ms_grow(context, (void **)&state->chunks, &state->chunk_capacity,
                         state->chunk_count + 1, sizeof *state->chunks);
        if (!status)
            status =
                ms_allocate(context, MS_ORIGIN_CHUNK * sizeof(ms_cast_origin), "casts", &chunk);
        if (status) return status;
        state->chunks[state->chunk_count++] = chunk;
        for (int i = MS_ORIGIN_CHUNK - 1; i >= 0; i--) {
            /* Set once: an origin never leaves its engine. */
            ((ms_cast_origin *)chunk + i)->state = state;
            origin_give((ms_cast_origin *)chunk + i);
        }
    }
    *out = state->unused_origins;
    state->unused_origins = (*out)->next;
    return MS_OK;
}

/* A copy of the tensor's window that owns nothing: no meta, no cast, no reference to the storage.
 * It serves as a tensor for a copy on the stream, and is never released. The storages stay alive as
 * long as the tie, so the window stays right. */
static ms_tensor description_of(const ms_tensor *tensor)
{
    ms_tensor copy = *tensor;
    copy.references = 1;
    copy.meta = NULL;
    copy.cast = copy.next_cast = copy.most = NULL;
    return copy;
}

/* Ties a new cast to its weight's storage, so that both are dropped together, whether the cache or
 * the tape holds the cast by then. A weight on "meta" has no memory to drop. The storage of the
 * cast owns the origin from here on. */
static ms_status tie(const ms_tensor *weight, ms_tensor *cast)
{
    ms_cast_origin *origin = NULL;
    if (ms_storage_is_meta(weight->storage)) return MS_OK;
    ms_status status = origin_take(weight->engine, &origin);
    if (status) return status;
    origin->weight = description_of(weight);
    origin->cast = description_of(cast);
    ms_storage_derive(cast->storage, weight->storage, origin, origin_give);
    return MS_OK;
}

/* Counts the cast's values as computed from the weight as it is now: the same cast of an unchanged
 * weight keeps its version, and what the tape saved stays valid. */
static void cast_is_computed(const ms_tensor *weight, const ms_tensor *cast)
{
    size_t begin, end;
    ms_tensor_span(weight, &begin, &end);
    ms_storage_restore(cast->storage, 0, ms_storage_bytes(cast->storage), weight->storage, begin,
                       end, ms_op_cast.name);
}

/* The weight must be readable: one that is dropped, or refilled and not yet written, is an error
 * that names it. The copy runs between two calls of ms_tensor_restoring, so the cast's version
 * stays if the weight's values did. It runs on the host thread, before a task that reads the cast
 * is enqueued, so the cast's copy comes first in the stream. */
ms_status ms_storage_recast(ms_storage *storage)
{
    void *how = NULL;
    ms_storage *source = ms_storage_origin(storage, &how);
    /* Not a cast, or the weight is gone. */
    if (!source || !how) return MS_OK;
    ms_cast_origin *origin = how;
    ms_engine *engine = ms_storage_engine(storage);
    size_t begin, end, bytes = ms_storage_bytes(storage);
    bool dropped = ms_storage_is_dropped(storage);
    /* If an earlier call failed after the refill, the cast has memory and no values. */
    if (!dropped && !ms_storage_is_vacant(storage, 0, bytes)) return MS_OK;
    ms_tensor_span(&origin->weight, &begin, &end);
    ms_status status = ms_storage_check(source, begin, end, true, ms_op_cast.name);
    if (!status && dropped) status = ms_storage_refill(storage, ms_engine_current(engine));
    if (status) return status;
    ms_tensor_restoring(engine, &origin->cast, &origin->weight);
    status = origin->cast.dtype == MS_U8
                 ? ms_fp8_encode_weight_into(engine, &origin->weight, &origin->cast)
                 : ms_copy_into(engine, &origin->weight, &origin->cast);
    ms_tensor_restoring(engine, NULL, NULL);
    return status;
}

/* -------------------------------------------------------------- cached casts */

/* A new cast of the tensor. It is tied to the tensor's storage: when that is dropped, the storage
 * of the cast is dropped with it. */
static ms_status make_cast(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, ms_tensor **out)
{
    ms_attributes attributes = { .cast = { .dtype = dtype } };
    ms_tensor *cast = NULL;
    ms_status status = dtype == MS_U8
                           ? ms_fp8_encode_weight(engine, tensor, &cast)
                           : ms_op_unary(engine, &ms_op_cast, &attributes, tensor, &cast);
    if (!status) status = tie(tensor, cast);
    if (status) {
        ms_tensor_release(cast);
        return status;
    }
    cast_is_computed(tensor, cast);
    *out = cast;
    return MS_OK;
}

/* A kept cast is dropped if it has another dtype, if the tensor was written since, or if the task
 * that wrote the cast failed. If its storage was dropped, its values are computed again into the
 * same storage. Activations are not kept: they are used once, and a kept cast would hold memory
 * until the step ends. */
ms_status ms_tensor_cast_cached(ms_engine *engine, ms_tensor *tensor, ms_dtype dtype, bool keep,
                                ms_tensor **out)
{
    if (tensor->dtype == dtype) {
        *out = ms_tensor_retain(tensor);
        return MS_OK;
    }
    /* A cast of an older version would be a weight from before the last step. */
    uint64_t version = ms_tensor_version(tensor);
    if (tensor->cast
        && (tensor->cast->dtype != dtype || tensor->cast_version != version
            || (dtype == MS_U8
                && ms_fp8_weight_is_native(tensor->cast, tensor->count) != ms_fp8_is_native(engine))
            || ms_storage_spoiled(tensor->cast->storage)))
        ms_tensor_drop_cast(tensor);
    /* A payload needs the greatest size of the whole weight, which a step does not know. */
    if (keep) tensor->cast_wish = dtype == MS_U8 ? MS_F32 : dtype;
    if (tensor->cast) {
        tensor->cast_is_new = false;
        ms_status recast = ms_storage_recast(tensor->cast->storage);
        if (!recast) *out = ms_tensor_retain(tensor->cast);
        return recast;
    }
    ms_status status = make_cast(engine, tensor, dtype, out);
    if (!status && keep) ms_tensor_hold_cast(tensor, *out);
    return status;
}

/* Where all gradients are live beside it, a cast of each weight could be the job's peak. Both
 * numbers follow from the host's calls, so what is made is the same in each run. */
static bool is_below_peak(ms_engine *engine, const ms_tensor *weight)
{
    ms_memory memory = ms_engine_memory(engine);
    return memory.live + ms_tensor_bytes(weight) <= memory.peak;
}

/* A weight whose last new cast was not used is not computed with under autocast any more. */
ms_status ms_tensor_next_cast(ms_engine *engine, ms_tensor *weight, ms_tensor **out)
{
    *out = NULL;
    if (weight->cast_is_new) weight->cast_wish = MS_F32;
    if (weight->cast) ms_tensor_drop_cast(weight);
    if (weight->cast_wish == MS_F32 || weight->dtype != MS_F32 || !weight->contiguous
        || !is_below_peak(engine, weight))
        return MS_OK;
    return ms_tensor_new(engine, weight->cast_wish, weight->dims, weight->shape, out);
}

ms_status ms_tensor_keep_next_cast(ms_tensor *weight, ms_tensor *cast)
{
    if (!cast) return MS_OK;
    ms_status status = tie(weight, cast);
    if (status) return status;
    cast_is_computed(weight, cast);
    ms_tensor_hold_cast(weight, cast);
    weight->cast_is_new = true;
    return MS_OK;
}
