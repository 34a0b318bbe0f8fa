/* initialize.c: computing the values that initial.c has recorded. */
#include "tensor/initial.h"

#include "moonshard/ops.h"
#include "ops/values.h"
#include "tensor/op.h"
#include "tensor/state.h"

/* How many of the steps come before the next cast. */
static uint32_t steps_before_cast(const ms_initializer *record, uint32_t from)
{
    uint32_t i = from;
    while (i < record->count && record->steps[i].op) i++;
    return i;
}

static ms_status run_steps(const ms_initializer *record, uint32_t from, uint32_t to,
                           ms_tensor *tensor)
{
    ms_status status = MS_OK;
    for (uint32_t i = from; i < to && !status; i++) {
        ms_tensor *same = NULL;
        status = ms_op_apply(tensor->engine, record->steps[i].op, &record->steps[i].attributes,
                             true, &tensor, 1, &same, 1);
        ms_tensor_release(same);
    }
    return status;
}

/* Between casts the values are in a tensor of that dtype; after the last one in the target. */
ms_status ms_initialize(const ms_initializer *record, ms_tensor *tensor)
{
    ms_engine *engine = tensor->engine;
    ms_status status = MS_OK;
    if (tensor->dtype != record->dtype || !tensor->contiguous)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "initialize: the tensor is not as the recorded one was");
    if (tensor->count == 0) return MS_OK;
    ms_dtype dtype = record->first;
    ms_tensor *held = NULL;
    for (uint32_t from = 0; !status;) {
        uint32_t to = steps_before_cast(record, from);
        ms_tensor *next = NULL;
        if (to == record->count) next = ms_tensor_retain(tensor);
        else status = ms_tensor_new(engine, dtype, tensor->dims, tensor->shape, &next);
        if (!status && held) status = ms_copy_into(engine, held, next);
        if (!status) status = run_steps(record, from, to, next);
        ms_tensor_release(held);
        held = next;
        if (to == record->count) break;
        dtype = record->steps[to].dtype;
        from = to + 1;
    }
    ms_tensor_release(held);
    return status;
}

/* ---------------------------------------------------------------- numbers of draws */

static bool is_draw(const ms_op *op)
{
    return op == &ms_op_uniform || op == &ms_op_normal || op == &ms_op_randint
           || op == &ms_op_dropout;
}

bool ms_initializer_draw(const ms_initializer *record, uint64_t *draw)
{
    for (uint32_t i = 0; i < record->count; i++)
        if (is_draw(record->steps[i].op)) {
            *draw = record->steps[i].attributes.random.random.draw;
            return true;
        }
    return false;
}

/* Unsigned, so that a negative number can be added as well. */
void ms_initializer_move(ms_initializer *record, uint64_t draws)
{
    for (uint32_t i = 0; i < record->count; i++)
        if (is_draw(record->steps[i].op)) record->steps[i].attributes.random.random.draw += draws;
}
