/* parts.c: what calls of scripts may do with parts of tensors (tensor/part.h). */
#include "grad/parts.h"

#include "moonshard/ops.h"
#include "tensor/part.h"
#include "tensor/state.h"

/* An in-place call on another tensor may have a part of equal shape among its inputs. */
static const ms_tensor *first_part(const ms_op_call *call)
{
    for (uint32_t i = 0; i < call->input_count; i++)
        if (call->inputs[i] && call->inputs[i]->part) return call->inputs[i];
    return NULL;
}

static bool is_elementwise(const ms_op *op)
{
    return op->flags & (MS_OP_ELEMENTWISE | MS_OP_COPIES | MS_OP_OVERWRITES | MS_OP_PARTS);
}

/* Of the reductions that take parts, these may be along one dimension. */
static bool is_over_all(const ms_op_call *call)
{
    bool along = call->op == &ms_op_sum || call->op == &ms_op_max || call->op == &ms_op_min;
    return (call->op->flags & MS_OP_OVER_PARTS) && (!along || call->attributes.reduce.all);
}

/* A number, or a tensor of the part's own shape. A part of one element is no number. */
static bool fits(const ms_tensor *part, const ms_tensor *other)
{
    if (ms_shape_equal(part->dims, part->shape, other->dims, other->shape)) return true;
    return other->count == 1 && other->dims <= part->dims && !other->part;
}

static ms_status refuse(const ms_op_call *call, const ms_tensor *part, const char *needs)
{
    char text[MS_ERROR_MESSAGE_BYTES];
    ms_part_explain(part->part, needs, text, sizeof text);
    return ms_op_refuse(call, "%s", text);
}

ms_status ms_part_check(const ms_op_call *call)
{
    const ms_tensor *part = first_part(call);
    if (!part) return MS_OK;
    if (!is_elementwise(call->op) && !is_over_all(call))
        return refuse(call, part, "and this call needs all of it");
    for (uint32_t i = 0; i < call->input_count; i++)
        if (call->inputs[i] && !fits(part, call->inputs[i]))
            return refuse(call, part, "which meets numbers and tensors of its own shape");
    return MS_OK;
}

/* Masks are none: what is asked of them is the answer of this rank. */
void ms_part_pass_on(const ms_op_call *call)
{
    const ms_tensor *part = first_part(call);
    if (!part) return;
    for (uint32_t i = 0; i < call->output_count; i++) {
        ms_tensor *output = call->outputs[i];
        bool same = ms_shape_equal(part->dims, part->shape, output->dims, output->shape);
        if (same && output->dtype != MS_BOOL && is_elementwise(call->op) && !call->in_place)
            ms_tensor_set_part(output, part->part);
    }
}
