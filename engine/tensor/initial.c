/* initial.c: recording how tensors on "meta" would get their values, and how those of modules with
 * memory got them. initialize.c computes them.
 *
 * A record is a list of steps, each an operator with its attributes, applied in place to all
 * elements. Drawn numbers depend on the counter in the attributes and on the position only, so
 * they are the same later. The record belongs to the storage, and is right while the storage has
 * the version that the last step left: any other write makes the values unknown. */
#include "tensor/initial.h"

#include "tensor/op.h"
#include "tensor/state.h"

static void free_note(void *note)
{
    const ms_initializer *record = note;
    ms_release(record->context, note);
}

/* ---------------------------------------------------------------- recording */

static bool is_all_of_storage(const ms_tensor *tensor)
{
    return tensor->contiguous && tensor->offset == 0
           && ms_tensor_bytes(tensor) == ms_storage_bytes(tensor->storage);
}

/* NULL if there is none, or something else has written since. */
static const ms_initializer *record_of(const ms_tensor *tensor)
{
    const ms_initializer *record = ms_storage_note(tensor->storage);
    if (!record || !is_all_of_storage(tensor) || tensor->dtype != record->dtype) return NULL;
    return record->version == ms_tensor_version(tensor) ? record : NULL;
}

ms_initializer_source ms_initializer_before(const ms_op_call *call)
{
    ms_initializer_source source = { 0 };
    if (call->record || call->output_count != 1) return source;
    bool copies = call->op->flags & MS_OP_COPIES, alone = call->input_count == 1;
    const ms_tensor *to = call->inputs[0], *from = call->inputs[call->input_count - 1];
    source.begins = alone && (call->op->flags & MS_OP_OVERWRITES);
    if (alone && (call->op->flags & (MS_OP_ELEMENTWISE | MS_OP_COPIES)))
        source.record = record_of(from);
    /* What copy repeats has no record of the result's shape. */
    else if (copies && ms_shape_equal(to->dims, to->shape, from->dims, from->shape))
        source.record = record_of(from);
    return source;
}

/* Adds what the call has done. A change of dtype is a step without an operator; other steps keep
 * the dtype. */
static bool extend(ms_initializer *record, const ms_op_call *call, const ms_tensor *target)
{
    bool copies = call->op->flags & MS_OP_COPIES, casts = record->dtype != target->dtype;
    if (copies && !casts) return true;
    if (copies != casts || record->count == MS_INITIALIZER_STEPS) return false;
    record->dtype = target->dtype;
    record->steps[record->count++] = (ms_initializer_step){ .op = copies ? NULL : call->op,
                                                            .dtype = target->dtype,
                                                            .attributes = call->attributes };
    return true;
}

/* In place the storage may have a record, which the new one replaces. */
ms_status ms_initializer_after(const ms_op_call *call, ms_initializer_source source)
{
    const ms_tensor *target = call->outputs[0];
    void *memory = NULL;
    const ms_tensor_state *state = ms_engine_get(call->engine, MS_SLOT_TENSOR);
    if (!source.begins && !source.record) return MS_OK;
    if (!ms_tensor_is_meta(target) && !state->notes_initial) return MS_OK;
    if (!is_all_of_storage(target)) return MS_OK;
    ms_context *context = ms_engine_context(call->engine);
    ms_status status = ms_allocate(context, sizeof(ms_initializer), "an initializer", &memory);
    if (status) return status;
    ms_initializer *record = memory;
    if (source.record) *record = *source.record;
    else record->first = record->dtype = target->dtype;
    record->context = context;
    record->version = ms_tensor_version(target);
    bool known = extend(record, call, target);
    if (known) ms_storage_set_note(target->storage, record, free_note);
    else ms_release(context, record);
    return MS_OK;
}

const ms_initializer *ms_tensor_initializer(const ms_tensor *tensor) { return record_of(tensor); }

size_t ms_initializer_bytes(void) { return sizeof(ms_initializer); }
