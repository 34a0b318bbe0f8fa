/* record.c: running an operator and writing its node.
 *
 * Two things decide what happens to a call: whether recording is on, and whether an input requires
 * a gradient. If both hold, a node is written. If recording is off because a recomputed function
 * runs for the first time, the inputs are noted for that function instead (ms_capture).
 *
 * A write in place changes memory that other tensors may share. The tape gives the written tensor
 * the new history, and cannot give it to the others. The storage therefore remembers the version
 * after the last recorded write in place, and each tensor the version at which it, or its history,
 * was made; a tensor that is older than the last such write is refused wherever its history would
 * be used. */
#include "grad/record.h"

#include <string.h>

#include "grad/node.h"
#include "grad/parts.h"

/* What backward has to know of a tensor that it may not have any more: dtype and shape. NULL: all
 * zero. */
static void describe(ms_tensor_info *info, const ms_tensor *tensor)
{
    *info = (ms_tensor_info){ 0 };
    if (!tensor) return;
    info->dtype = tensor->dtype;
    info->dims = tensor->dims;
    memcpy(info->shape, tensor->shape, sizeof info->shape);
}

/* Gives an output its history. A tensor that was written in place had another node before; the new
 * node has an edge to it. */
static void attach(ms_tensor *tensor, ms_tape_node *node, uint32_t output)
{
    ms_meta *meta = tensor->meta;
    /* The release is last: the node before may be held by this meta and by the new node's edge
     * only. */
    ms_tape_node *before = meta->node;
    node->references++;
    meta->node = node;
    meta->output = output;
    ms_tape_node_release(before);
}

/* Older than the last recorded write in place of its memory: its node knows nothing of that write.
 */
ms_status ms_history_check(ms_engine *engine, const char *what, const ms_tensor *tensor)
{
    char shape[160];
    size_t begin, end;
    if (!tensor) return MS_OK;
    ms_tensor_span(tensor, &begin, &end);
    if (tensor->made_version >= ms_storage_recorded(tensor->storage, begin, end)) return MS_OK;
    return ms_engine_fail(
        engine, MS_ERROR_STATE,
        "%s: the tensor %s shares memory with one that was written in place after this was made, "
        "and its gradient knows nothing of that write: "
        "take the view (or detach) after the write, or use the form without _ there",
        what, ms_tensor_describe(tensor, shape, sizeof shape));
}

/* Only for inputs whose history the call would use; see used in ms_apply. */
static ms_status check_histories(ms_engine *engine, const char *what, ms_tensor *const *tensors,
                                 uint32_t count)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++)
        status = ms_history_check(engine, what, tensors[i]);
    return status;
}

/* Which tensors cannot be written in place while that is recorded. A leaf that requires a gradient
 * would become a result, and its gradient would never be accumulated. A view has a history of its
 * own, and the base, whose memory changes, would keep a history without the write. */
static ms_status check_in_place(ms_engine *engine, const ms_op *op, const ms_tensor *target)
{
    const ms_meta *meta = target->meta;
    if (!meta) return MS_OK;
    if (meta->requires_grad && !meta->node)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s_: this leaf requires a gradient and cannot be written in place "
                              "while that is recorded: use ms.no_grad, or the form without _",
                              op->name);
    const ms_tape_node *node = meta->node;
    bool is_view = node && node->op && (node->op->flags & MS_OP_VIEW);
    if (is_view || (node && node->function && node->function->gives_views))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s_: this is a view of a tensor whose gradient is recorded, and a "
                              "write to it would not reach that record: use the form without _",
                              op->name);
    return MS_OK;
}

/* The node with its edges. It is made before the operator runs: if memory runs out, no task has
 * been enqueued and nothing has changed. */
static ms_status prepare(ms_engine *engine, ms_tensor *const *inputs, uint32_t input_count,
                         ms_captures *captures, uint32_t output_count, ms_tape_node **out)
{
    ms_tape_node *node = NULL;
    /* Captured nodes get edges after those of the inputs, and an empty description, since no result
     * is made for them. */
    uint32_t captured = captures ? (uint32_t)captures->count : 0;
    ms_status status = ms_tape_node_new(engine, input_count + captured, output_count, &node);
    for (uint32_t i = 0; i < captured && !status; i++) {
        describe(&node->inputs[input_count + i], NULL);
        node->edges[input_count + i].node = captures->items[i].node;
        captures->items[i].node = NULL; /* handed over: freed without recursion, as all edges are */
    }
    for (uint32_t i = 0; i < input_count && !status; i++) {
        describe(&node->inputs[i], inputs[i]);
        status = ms_edge_of(inputs[i], &node->edges[i]);
    }
    if (status) ms_tape_node_release(node);
    else *out = node;
    return status;
}

/* Integer tensors never require one, so a call on indices alone records nothing. */
static bool any_requires_grad(ms_tensor *const *inputs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (inputs[i] && ms_tensor_requires_grad(inputs[i])) return true;
    return false;
}

/* Attaches the node to all outputs of float dtypes. Metas are made for all of them before the first
 * is attached, since only that can fail. Integer outputs (the indices of topk) have no gradient,
 * and no history. */
static ms_status attach_all(ms_tape_node *node, ms_tensor *const *outputs, uint32_t count)
{
    ms_meta *meta = NULL;
    for (uint32_t i = 0; i < count; i++) { /* first what can fail */
        ms_status status =
            ms_dtype_is_float(outputs[i]->dtype) ? ms_meta_of(outputs[i], &meta) : MS_OK;
        if (status) return status;
    }
    for (uint32_t i = 0; i < count; i++) {
        describe(&node->outputs[i], outputs[i]);
        if (ms_dtype_is_float(outputs[i]->dtype)) attach(outputs[i], node, i);
    }
    return MS_OK;
}

/* Checks come first, then the node with its edges, then the operator, then what was saved and the
 * outputs. With the versions taken after the operator ran, an operator that saves its own result,
 * as exp does, saves it as it is after the write. */
static ms_status apply(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                       bool in_place, ms_tensor *const *inputs, uint32_t input_count,
                       ms_tensor **outputs, uint32_t output_count)
{
    bool needed = any_requires_grad(inputs, input_count),
         recording = ms_engine_is_recording(engine);
    /* The history of a target that is written without a record is not used, so it is not checked.
     */
    uint32_t used = in_place && !needed && input_count > 0 ? 1 : 0;
    ms_status status = MS_OK;
    if (recording && needed && (op->flags & MS_OP_LOSES_GRAD))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "%s: it has no gradient, and its input requires one, which would be "
                              "lost: detach the input, or call it inside no_grad",
                              op->name);
    if (op->flags & MS_OP_NO_GRAD) recording = false;
    else if (recording)
        status = check_histories(engine, op->name, inputs + used, input_count - used);
    if (!status && !recording)
        status = ms_capture(engine, inputs, input_count, !(op->flags & MS_OP_NO_GRAD));
    if (status) return status;
    if (!recording || !needed)
        return ms_op_apply(engine, op, attributes, in_place, inputs, input_count, outputs,
                           output_count);
    bool needs[MS_NODE_INPUTS];
    for (uint32_t i = 0; i < input_count && i < MS_NODE_INPUTS; i++)
        needs[i] = inputs[i] && ms_tensor_requires_grad(inputs[i]);
    ms_op_call call = { .engine = engine,
                        .op = op,
                        .inputs = inputs,
                        .input_count = input_count,
                        .outputs = outputs,
                        .output_count = output_count,
                        .in_place = in_place,
                        .record = true,
                        /* Operators with more inputs make no gradient in forward. */
                        .needs = input_count <= MS_NODE_INPUTS ? needs : NULL };
    /* A copy: the caller's attributes may be on its stack, and backward needs them. */
    if (attributes) call.attributes = *attributes;
    ms_tape_node *node = NULL;
    ms_meta *meta = NULL;
    ms_tensor *target = in_place && input_count > 0 ? inputs[0] : NULL;
    if (target) status = check_in_place(engine, op, target);
    if (!status && target) status = ms_meta_of(target, &meta);
    if (!status) status = prepare(engine, inputs, input_count, NULL, output_count, &node);
    if (!status) status = ms_op_run(&call);
    if (status) {
        ms_tape_node_release(node);
        return status;
    }
    node->op = op;
    node->attributes = call.attributes;
    /* The operator has retained what it saves; the node owns it from here on. */
    node->saved_count = call.saved_count;
    for (uint32_t i = 0; i < call.saved_count; i++)
        node->saved[i] =
            (ms_saved){ .tensor = call.saved[i], .version = ms_tensor_version(call.saved[i]) };
    if (target) {
        size_t begin, end;
        ms_tensor_span(target, &begin, &end);
        ms_storage_record(target->storage, begin, end);
        target->made_version = ms_tensor_version(target);
    }
    status = attach_all(node, outputs, output_count);
    if (status)
        for (uint32_t i = 0; i < output_count; i++) {
            ms_tensor_release(outputs[i]);
            outputs[i] = NULL;
        }
    ms_tape_node_release(node);
    return status;
}

static bool any_is_part(ms_tensor *const *inputs, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (inputs[i] && inputs[i]->part) return true;
    return false;
}

/* Calls of scripts come through here: pieces of sharded parameters are told apart from whole ones.
 */
ms_status ms_apply(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                   bool in_place, ms_tensor *const *inputs, uint32_t input_count,
                   ms_tensor **outputs, uint32_t output_count)
{
    if (!any_is_part(inputs, input_count))
        return apply(engine, op, attributes, in_place, inputs, input_count, outputs, output_count);
    ms_op_call call = { .engine = engine,
                        .op = op,
                        .inputs = inputs,
                        .input_count = input_count,
                        .outputs = outputs,
                        .output_count = output_count,
                        .in_place = in_place };
    if (attributes) call.attributes = *attributes;
    ms_status status = ms_part_check(&call);
    if (!status)
        status =
            apply(engine, op, attributes, in_place, inputs, input_count, outputs, output_count);
    if (!status) ms_part_pass_on(&call);
    return status;
}

/* The node to which the gradient of a tensor goes; NULL for a leaf that no graph has used yet,
 * whose accumulator is made by ms_edge_of. */
static const ms_tape_node *node_of(const ms_tensor *tensor)
{
    const ms_meta *meta = tensor->meta;
    return meta->node ? meta->node : ms_meta_accumulator(meta);
}

/* Whether the list has this tensor already. Tensors with a node are the same if node and storage
 * are; those without one (parameters that need no gradient here) if they are the same range of a
 * storage. */
static bool is_captured(const ms_captures *captures, const ms_tensor *tensor,
                        const ms_tape_node *node)
{
    for (size_t i = 0; i < captures->count; i++) {
        const ms_tensor *other = captures->items[i].saved.tensor;
        if (other->storage == tensor->storage && captures->items[i].node == node
            && (node || (other->offset == tensor->offset && other->extent == tensor->extent)))
            return true;
    }
    return false;
}

/* Notes one tensor: with its node if a gradient can reach it, without one if only the values of a
 * parameter were read, which the next step of an optimizer would change. Other tensors without a
 * gradient are not noted: a function may write its own buffers. */
static ms_status capture(ms_engine *engine, ms_captures *captures, ms_tensor *tensor,
                         bool differentiable)
{
    size_t begin, end;
    if (!tensor) return MS_OK;
    ms_tensor_span(tensor, &begin, &end);
    bool needed = differentiable && ms_tensor_requires_grad(tensor);
    if (!needed && !ms_storage_is_parameter(tensor->storage, begin, end)) return MS_OK;
    if (is_captured(captures, tensor, needed ? node_of(tensor) : NULL)) return MS_OK;
    ms_edge edge = { 0 };
    ms_saved saved = { .version = ms_tensor_version(tensor) };
    ms_status status = ms_grow(ms_engine_context(engine), (void **)&captures->items,
                               &captures->capacity, captures->count + 1, sizeof *captures->items);
    if (!status) status = ms_tensor_alias(tensor, &saved.tensor);
    if (!status && needed) status = ms_edge_of(tensor, &edge);
    if (status) ms_tensor_release(saved.tensor);
    else
        captures->items[captures->count++] = (ms_capture_item){ .saved = saved, .node = edge.node };
    return status;
}

/* Most calls end at the first test: captures is set only while a recomputed function runs for the
 * first time. */
ms_status ms_capture(ms_engine *engine, ms_tensor *const *tensors, uint32_t count,
                     bool differentiable)
{
    const ms_tape *tape = ms_engine_get(engine, MS_SLOT_GRAD);
    ms_status status = MS_OK;
    for (uint32_t i = 0; tape && tape->captures && i < count && !status; i++)
        status = capture(engine, tape->captures, tensors[i], differentiable);
    return status;
}

/* Whether a captured tensor needs a gradient. */
static bool any_node(const ms_captures *captures)
{
    for (size_t i = 0; captures && i < captures->count; i++)
        if (captures->items[i].node) return true;
    return false;
}

/* If nothing requires a gradient, user is freed at once: on success the tape has taken it over in
 * any case. The node gets function and user last; a node that is released before has neither and
 * does not free them. */
ms_status ms_record_captured(ms_engine *engine, const ms_function *f, void *user,
                             ms_tensor *const *inputs, uint32_t input_count, ms_captures *captures,
                             ms_tensor *const *outputs, uint32_t output_count)
{
    ms_tape_node *node = NULL;
    ms_status status = ms_engine_is_recording(engine)
                           ? check_histories(engine, f->name, inputs, input_count)
                           : ms_capture(engine, inputs, input_count, true);
    if (status) return status;
    if (!ms_engine_is_recording(engine)
        || (!any_node(captures) && !any_requires_grad(inputs, input_count))) {
        /* Taken over in any case, so a caller never asks whether it was recorded. */
        f->free(user);
        return MS_OK;
    }
    status = prepare(engine, inputs, input_count, captures, output_count, &node);
    if (!status) status = attach_all(node, outputs, output_count);
    if (!status) {
        node->function = f;
        node->user = user;
    }
    ms_tape_node_release(node);
    return status;
}

/* For layers above, whose step is not an operator: a collective with a gradient is one. */
ms_status ms_record(ms_engine *engine, const ms_function *f, void *user, ms_tensor *const *inputs,
                    uint32_t input_count, ms_tensor *const *outputs, uint32_t output_count)
{
    return ms_record_captured(engine, f, user, inputs, input_count, NULL, outputs, output_count);
}
