/* shard.c: a flat parameter's shard as one tensor, and tensors that are laid out as it is: an
 * optimizer's state of one kind is one storage on every rank, whatever pieces a rank has. */
#include "fsdp/flat_param.h"

#include "ops/values.h"
#include "tensor/state.h"

/* NULL if the tensor is no parameter of the model. */
static ms_member *member_of(const ms_fsdp *fsdp, const ms_tensor *parameter)
{
    for (uint32_t i = 0; i < fsdp->member_count; i++)
        if (fsdp->members[i].tensor == parameter) return &fsdp->members[i];
    return NULL;
}

static ms_status find(ms_fsdp *fsdp, const ms_tensor *parameter, ms_member **out)
{
    *out = member_of(fsdp, parameter);
    if (*out) return MS_OK;
    return ms_engine_fail(fsdp->source.engine, MS_ERROR_ARGUMENT,
                          "fsdp: a tensor of the list is no parameter of this model");
}

/* Why two parameters are not in one flat parameter. */
static ms_status refuse(const ms_member *a, const ms_member *b)
{
    const ms_unit *one = a->flat->unit, *other = b->flat->unit;
    if (one == other)
        return ms_engine_fail(
            one->fsdp->source.engine, MS_ERROR_ARGUMENT,
            "flat: '%s' and '%s' lie apart in unit \"%s\", because they differ in "
            "dtype, in whether they are trained, or in the ranks that share "
            "them: pass those that are alike",
            a->name, b->name, ms_unit_called(one));
    return ms_engine_fail(one->fsdp->source.engine, MS_ERROR_ARGUMENT,
                          "flat: '%s' is in unit \"%s\" and '%s' in unit \"%s\": pass the "
                          "parameters of one unit",
                          a->name, ms_unit_called(one), b->name, ms_unit_called(other));
}

/* A parameter that comes twice makes the count wrong, or leaves another one out. */
static ms_status check_all(const ms_flat_param *flat, ms_tensor *const *parameters, uint32_t count)
{
    for (uint32_t i = 0; i < flat->count; i++) {
        uint32_t found = 0;
        for (uint32_t k = 0; k < count; k++) found += parameters[k] == flat->members[i].tensor;
        if (found == 1) continue;
        return ms_engine_fail(flat->unit->fsdp->source.engine, MS_ERROR_ARGUMENT,
                              "flat: '%s' of unit \"%s\" is in the list %u times: pass all "
                              "parameters of the unit, each once",
                              flat->members[i].name, ms_unit_called(flat->unit), found);
    }
    return MS_OK;
}

ms_status ms_fsdp_shard(ms_fsdp *fsdp, ms_tensor *const *parameters, uint32_t count,
                        ms_tensor **out)
{
    ms_member *first = NULL;
    MS_ASSERT(count > 0);
    ms_status status = find(fsdp, parameters[0], &first);
    for (uint32_t i = 1; i < count && !status; i++) {
        ms_member *member = NULL;
        status = find(fsdp, parameters[i], &member);
        if (!status && member->flat != first->flat) status = refuse(first, member);
    }
    if (!status) status = check_all(first->flat, parameters, count);
    if (!status) *out = ms_tensor_retain(first->flat->shard);
    return status;
}

/* The element after the shard, on which empty pieces are, is written: every rank has one. */
ms_status ms_fsdp_note_written(ms_fsdp *fsdp)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < fsdp->flat_count && !status; f++) {
        ms_flat_param *flat = &fsdp->flats[f];
        ms_tensor *last = NULL;
        int64_t one = 1;
        if (!ms_flat_param_is_sharded(flat)) continue;
        status = ms_tensor_window(flat->source, 1, &one, &one, flat->length, &last);
        if (!status) status = ms_fill_into(fsdp->source.engine, last, 0);
        ms_tensor_release(last);
    }
    return status;
}

/* In parts as the shard, so that steps of different pieces do not wait for each other. */
ms_status ms_fsdp_state_new(ms_fsdp *fsdp, ms_tensor *parameter, ms_tensor **out)
{
    ms_member *member = NULL;
    ms_tensor *made = NULL;
    ms_status status = find(fsdp, parameter, &member);
    if (status) return status;
    ms_flat_param *flat = member->flat;
    status = ms_flat_param_new_beside(flat, MS_F32, &made);
    if (!status) status = ms_flat_param_split_state(flat, ms_tensor_storage(made), MS_F32);
    if (!status) status = ms_fill_into(fsdp->source.engine, made, 0);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

ms_status ms_fsdp_state_piece(ms_fsdp *fsdp, ms_tensor *parameter, ms_tensor *state,
                              ms_tensor **out)
{
    ms_member *member = NULL;
    ms_status status = find(fsdp, parameter, &member);
    if (status) return status;
    MS_ASSERT(ms_tensor_count(state) == member->flat->length);
    return ms_flat_param_is_sharded(member->flat) ? ms_member_piece_of(member, state, out)
                                                  : ms_flat_param_view(state, member, out);
}
