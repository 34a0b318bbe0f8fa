/* op.c: running operators, and what their forwards and backwards have in common.
 *
 * Two rules make errors harmless: forward checks before it makes anything, and whatever a failed
 * call made is released by ms_op_run. ms_tensor_enqueue is the only way from operators to streams:
 * there, addresses get their list of storages, so hazards are found, and written storages get a new
 * version, so backward notices. */
#include "tensor/op.h"

#include <stdio.h>
#include <string.h>

#include "tensor/tensor.h"

/* ------------------------------------------------------------------ running */

/* Four inputs at most are described: a cat may have hundreds. Every check of an operator ends here,
 * so all messages have one form; the script line is added by the error record. */
ms_status ms_op_refuse(const ms_op_call *call, const char *format, ...)
{
    char text[MS_ERROR_MESSAGE_BYTES], shape[160];
    size_t used = (size_t)snprintf(text, sizeof text, "%s: ", call->op->name);
    for (uint32_t i = 0; i < call->input_count && i < 4 && used < sizeof text; i++)
        if (call->inputs[i])
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? " and " : "",
                                     ms_tensor_describe(call->inputs[i], shape, sizeof shape));
    if (used < sizeof text) used += (size_t)snprintf(text + used, sizeof text - used, ": ");
    va_list list;
    va_start(list, format);
    if (used < sizeof text) vsnprintf(text + used, sizeof text - used, format, list);
    va_end(list);
    return ms_engine_fail(call->engine, MS_ERROR_ARGUMENT, "%s", text);
}

/* Under autocast f32 goes with 16 bits, so an f32 operand could hide that others have two dtypes of
 * 16 bits. Numbers have any dtype, and what is only copied has its own. */
static ms_status check_halves(const ms_op_call *call)
{
    const ms_tensor *half = NULL;
    if (call->op->flags & (MS_OP_COPIES | MS_OP_OVERWRITES)) return MS_OK;
    for (uint32_t i = 0; i < call->input_count; i++) {
        const ms_tensor *input = call->inputs[i];
        if (!input || input->dims == 0 || (input->dtype != MS_BF16 && input->dtype != MS_F16))
            continue;
        if (half && half->dtype != input->dtype)
            return ms_op_refuse(call, "bf16 and f16 do not go together: cast one with x:to");
        half = input;
    }
    return MS_OK;
}

/* What holds for every operator, so that forward need not ask: how many inputs there are, and one
 * engine for all. Optional inputs may be NULL in the middle of the list, so the indices of later
 * ones do not move. */
static ms_status check_inputs(ms_op_call *call)
{
    const ms_op *op = call->op;
    if (call->input_count < op->inputs_min
        || (call->input_count > op->inputs_max && !(op->flags & MS_OP_VARIADIC)))
        return ms_op_refuse(call, "%u tensors are given, it takes %u to %u", call->input_count,
                            op->inputs_min, op->inputs_max);
    for (uint32_t i = 0; i < call->input_count; i++) {
        if (!call->inputs[i]) {
            if (i < op->inputs_min || (op->flags & MS_OP_VARIADIC))
                return ms_op_refuse(call, "tensor %u is missing", i + 1);
        } else if (call->inputs[i]->engine != call->engine) {
            return ms_op_refuse(call, "tensor %u belongs to another engine", i + 1);
        }
    }
    if (call->in_place && !(op->flags & MS_OP_IN_PLACE))
        return ms_op_refuse(call, "it has no in-place form");
    return MS_OK;
}

/* Runs forward with new tensors made where the inputs are: on "meta", or with memory. Inputs of
 * both sorts are an error, but for a number (no dimensions) with memory, which may meet tensors on
 * "meta" unless it is what is written: scripts make numbers without asking where the model is.
 * "meta" is an engine's state and not an argument, because operators make tensors in many places;
 * it is put back after a failure as well. */
static ms_status forward_there(ms_op_call *call)
{
    const ms_tensor *meta = NULL, *real = NULL;
    for (uint32_t i = 0; i < call->input_count; i++) {
        const ms_tensor *input = call->inputs[i];
        if (!input) continue;
        /* A number counts only where there is nothing larger. */
        if (ms_tensor_is_meta(input)) meta = input;
        else if (input->dims > 0 || !real) real = input;
    }
    if (meta && real && (real->dims > 0 || (call->in_place && real == call->inputs[0])))
        return ms_op_refuse(call, "some are on \"meta\" and have no values, others have memory");
    /* No input at all: the engine's own setting decides. */
    if (!meta && !real) return call->op->forward(call);
    const ms_tensor_state *state = ms_engine_get(call->engine, MS_SLOT_TENSOR);
    ms_initializer_source source = { 0 };
    if (meta || state->notes_initial) source = ms_initializer_before(call);
    bool before = ms_engine_set_meta(call->engine, meta != NULL);
    ms_status status = call->op->forward(call);
    ms_engine_set_meta(call->engine, before);
    return status ? status : ms_initializer_after(call, source);
}

/* As long as an engine has made no tensor on "meta" and notes no initial values, inputs are not
 * looked at for them. After a
 * failure all outputs are NULL, those of an in-place call too, whose target was only retained.
 * Tasks that were enqueued before the failure run all the same; what they write is released in
 * stream order. */
ms_status ms_op_run(ms_op_call *call)
{
    const ms_tensor_state *state = ms_engine_get(call->engine, MS_SLOT_TENSOR);
    for (uint32_t i = 0; i < call->output_count; i++) call->outputs[i] = NULL;
    ms_status status = check_inputs(call);
    if (!status && state && state->autocast != MS_F32) status = check_halves(call);
    if (!status && state && (state->metas || state->meta || state->notes_initial))
        status = forward_there(call);
    else if (!status) status = call->op->forward(call);
    if (!status) return MS_OK;
    for (uint32_t i = 0; i < call->output_count; i++) {
        ms_tensor_release(call->outputs[i]);
        call->outputs[i] = NULL;
    }
    ms_op_drop_saved(call);
    return status;
}

/* The aliases are released, not the tensors that they were made of. */
void ms_op_drop_saved(ms_op_call *call)
{
    for (uint32_t i = 0; i < call->saved_count; i++) ms_tensor_release(call->saved[i]);
    call->saved_count = 0;
}

/* Without the tape: call.record stays false, so nothing is saved. The result has no history:
 * gradients do not flow through it. */
ms_status ms_op_apply(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                      bool in_place, ms_tensor *const *inputs, uint32_t input_count,
                      ms_tensor **outputs, uint32_t output_count)
{
    ms_op_call call = { .engine = engine,
                        .op = op,
                        .inputs = inputs,
                        .input_count = input_count,
                        .outputs = outputs,
                        .output_count = output_count,
                        .in_place = in_place };
    if (attributes) call.attributes = *attributes;
    return ms_op_run(&call);
}

/* ------------------------------------------------------ helpers for forward */

/* Outputs of an in-place call after the first are new tensors. A target with a stride of 0 is
 * refused: one element represents several, and which of the results it would keep is undefined. An
 * in-place result is the target itself with one more reference, so callers release it like a new
 * one. */
ms_status ms_op_output(ms_op_call *call, uint32_t index, ms_dtype dtype, uint32_t dims,
                       const int64_t *shape, ms_tensor **borrowed)
{
    if (!call->in_place || index > 0) {
        ms_status status = ms_tensor_new(call->engine, dtype, dims, shape, &call->outputs[index]);
        if (!status) *borrowed = call->outputs[index];
        return status;
    }
    ms_tensor *target = call->inputs[0];
    if (target->dtype != dtype)
        return ms_op_refuse(call, "the result is %s, which does not fit in place",
                            ms_dtype_name(dtype));
    if (!ms_shape_equal(target->dims, target->shape, dims, shape))
        return ms_op_refuse(call, "the result has another shape than the tensor that receives it");
    for (uint32_t d = 0; d < target->dims; d++)
        if (target->strides[d] == 0 && target->shape[d] > 1 && target->count > 0)
            return ms_op_refuse(call,
                                "an expanded tensor cannot be written in place: clone it first");
    call->outputs[0] = ms_tensor_retain(target);
    *borrowed = target;
    return MS_OK;
}

/* The alias is made now: the caller may release the tensor as soon as forward returns. It shares
 * the memory and copies nothing; the tape notices later writes by the version. */
ms_status ms_op_save(ms_op_call *call, ms_tensor *tensor)
{
    if (!call->record) return MS_OK;
    if (call->saved_count == MS_OP_SAVED_MAX)
        return ms_op_refuse(call, "it saves more than %d tensors", MS_OP_SAVED_MAX);
    ms_status status = ms_tensor_alias(tensor, &call->saved[call->saved_count]);
    if (status) return status;
    /* Until backward it would only hold memory. */
    ms_tensor_drop_most(call->saved[call->saved_count++]);
    return MS_OK;
}

/* Adds the tensor's part of its storage to a task's accesses; the flags say what is special about
 * it. The cells are looked up for each task: the storage may have been split since the window was
 * made. The bytes between first and last element count as touched, also where the tensor has
 * gaps. */
static uint32_t access_to(const ms_tensor *tensor, uint8_t mode, ms_access *out)
{
    size_t begin, end;
    ms_tensor_span(tensor, &begin, &end);
    return ms_storage_access(tensor->storage, begin, end, mode, out);
}

/* The first error of these tensors, if there is one: memory that was dropped, and, to be read,
 * memory that nothing has written since it was refilled. The task's name makes the message say
 * which operator wanted the memory. */
static ms_status check_memory(const ms_task *task, ms_tensor *const *tensors, uint32_t count,
                              bool read)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        size_t begin, end;
        if (!tensors[i]) continue;
        ms_tensor_span(tensors[i], &begin, &end);
        status = ms_storage_check(tensors[i]->storage, begin, end, read, task->name);
    }
    return status;
}

/* Whether all that a task writes is on "meta". Such a task would compute nothing, so it is not
 * enqueued. A task that writes nothing at all is no such task. */
static bool writes_meta(ms_tensor *const *writes, uint32_t count)
{
    uint32_t found = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (!writes[i]) continue;
        if (!ms_tensor_is_meta(writes[i])) return false;
        found++;
    }
    return found > 0;
}

/* The pair is kept in the state, not passed along: the copy or cast in between is several calls
 * deep. Callers pair the two calls; the state is the host thread's, like all of this layer. */
void ms_tensor_restoring(ms_engine *engine, const ms_tensor *target, const ms_tensor *source)
{
    ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    MS_ASSERT(state && !target == !source);
    state->restored = target;
    state->source = source;
}

/* Counts what a task of this name writes in the tensor: as a new version of the written parts, or,
 * between calls of ms_tensor_restoring, as a restore from the source. The task's name is kept as
 * the writer, for the message of a saved tensor that was overwritten. */
static void count_write(const ms_tensor_state *state, const ms_tensor *tensor, const char *task)
{
    size_t begin, end, from, to;
    ms_tensor_span(tensor, &begin, &end);
    if (!state->restored || state->restored->storage != tensor->storage) {
        ms_storage_touch(tensor->storage, begin, end, task);
        return;
    }
    ms_tensor_span(state->source, &from, &to);
    ms_storage_restore(tensor->storage, begin, end, state->source->storage, from, to, task);
}

/* exec/ does not know ms_dtype. Tasks of u8 with much arithmetic multiply codes (ops/fp8.h). */
static uint8_t cost_dtype_of(const ms_tensor *operand)
{
    if (operand->dtype == MS_U8) return MS_COST_FP8;
    if (operand->dtype == MS_BF16) return MS_COST_BF16;
    return operand->dtype == MS_F16 ? MS_COST_F16 : MS_COST_F32;
}

/* Storages are checked only if an access was flagged, which is rare. The versions change after the
 * enqueue: a task that could not be enqueued has written nothing. NULLs among the tensors are
 * passed over, so that operators with optional tensors need not pack their lists. The cost's dtype
 * is that of the first operand, by which a device chooses between its peak rates. */
ms_status ms_tensor_enqueue(ms_engine *engine, const ms_task *task, const void *arguments,
                            ms_tensor *const *reads, uint32_t read_count, ms_tensor *const *writes,
                            uint32_t write_count, ms_task_cost cost)
{
    ms_access accesses[MS_TASK_ACCESS_MAX];
    uint32_t count = 0, found = 0;
    if (read_count + write_count > MS_TASK_ACCESS_MAX)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s: %u tensors, at most %d", task->name,
                              read_count + write_count, MS_TASK_ACCESS_MAX);
    for (uint32_t i = 0; i < read_count; i++)
        if (reads[i]) found |= access_to(reads[i], MS_READ, &accesses[count++]);
    for (uint32_t i = 0; i < write_count; i++)
        if (writes[i]) found |= access_to(writes[i], MS_WRITE, &accesses[count++]);
    const ms_tensor *operand = read_count && reads[0] ? reads[0] : NULL;
    if (!operand && write_count) operand = writes[0];
    if (operand) cost.dtype = cost_dtype_of(operand);
    ms_status status = MS_OK;
    /* A task without memory to write does nothing on any device. */
    bool idle = (found & MS_ACCESS_META) && writes_meta(writes, write_count);
    if (found && !idle) status = check_memory(task, reads, read_count, true);
    if (found && !idle && !status) status = check_memory(task, writes, write_count, false);
    if (!status && !idle)
        status = ms_stream_enqueue(ms_engine_current(engine), task, arguments, accesses, count,
                                   cost, NULL);
    if (status) return status;
    const ms_tensor_state *state = ms_engine_get(engine, MS_SLOT_TENSOR);
    for (uint32_t i = 0; i < write_count; i++)
        if (writes[i]) count_write(state, writes[i], task->name);
    return MS_OK;
}

/* ----------------------------------------------------- helpers for backward */

/* These bypass the tape, as a backward must. */
ms_status ms_op_unary(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                      ms_tensor *a, ms_tensor **out)
{
    return ms_op_apply(engine, op, attributes, false, &a, 1, out, 1);
}

ms_status ms_op_binary(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                       ms_tensor *a, ms_tensor *b, ms_tensor **out)
{
    ms_tensor *inputs[] = { a, b };
    return ms_op_apply(engine, op, attributes, false, inputs, 2, out, 1);
}

/* A home spares the copy of a gradient into its bucket. Whether a backward uses it is its own
 * choice. */
ms_status ms_op_result(const ms_op_gradient *gradient, uint32_t index, ms_tensor **out)
{
    const ms_tensor_info *info = &gradient->inputs[index];
    ms_tensor *home = gradient->homes ? gradient->homes[index] : NULL;
    if (!home) return ms_tensor_new(gradient->engine, info->dtype, info->dims, info->shape, out);
    *out = ms_tensor_retain(home);
    return MS_OK;
}
