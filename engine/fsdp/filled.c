/* filled.c: which parameters have a gradient after a pass.
 *
 * A parameter has none (nil) if backward has computed one on no rank that has a part of it, as in
 * one process, so that optimizers pass over it: zeros would let weight decay and momentum move it.
 * The reduction of its unit gives zeros for it. What this rank has filled has a gradient as soon as
 * it is reduced. Of the rest only the other ranks know. So each rank's host says at the end of a
 * pass what it has brought, and goes on. The answers are read by a rank that is unsure of a member,
 * which it leaves nil until then.
 *
 * Invariants: `unsure` is NULL outside of passes; the tensor of an unsure member has no gradient;
 * the exchange is the same on all ranks of a group, whatever they have filled. */
#include "fsdp/filled.h"

#include "fsdp/flat_param.h"
#include "fsdp/partial.h"
#include "grad/node.h"

/* What is held of earlier passes is a gradient on every rank. */
bool ms_member_has_gradient(ms_member *member)
{
    bool held = member->held && !member->unsure;
    bool has = member->filled || member->carried || held || member->outer;
    member->brought |= has;
    member->carried = false;
    member->unsure = has                                        ? NULL
                     : ms_flat_param_is_in_bucket(member->flat) ? member->gradient
                                                                : member->reduced;
    return has;
}

/* Of parameters that all ranks share, or of those with a group of their own. */
static bool takes_part(const ms_member *member, bool own)
{
    const ms_flat_param *flat = member->flat;
    return flat->trainable && flat->own == own && !ms_flat_param_is_partial(flat);
}

static ms_status settle(ms_member *member, bool has)
{
    ms_status status = MS_OK;
    if (member->unsure && has) {
        status = ms_leaf_put_grad(member->tensor, member->unsure);
        if (!status && member->scaled) ms_tensor_grad_mark(member->tensor);
    }
    member->scaled = member->scaled && !member->unsure;
    member->unsure = NULL;
    member->brought = false;
    return status;
}

static ms_status exchange(ms_fsdp *fsdp, bool own)
{
    ms_sharing sharing = { .kind = MS_ALL_REDUCE,
                           .op = MS_REDUCE_OP_MAX,
                           .dtype = MS_I32,
                           .label = "which parameters have a gradient" };
    ms_group *group = NULL;
    uint64_t ticket = 0;
    bool asks = false;
    for (uint32_t i = 0; i < fsdp->member_count; i++) {
        const ms_member *member = &fsdp->members[i];
        if (!takes_part(member, own)) continue;
        group = own ? member->flat->shards : fsdp->group;
        asks |= member->unsure != NULL;
        fsdp->same.brought[sharing.count++] = member->brought;
    }
    if (!group) return MS_OK;
    ms_status status =
        ms_group_share_begin(group, &sharing, fsdp->same.brought, asks ? &ticket : NULL);
    if (!status && asks) status = ms_group_share_end(group, ticket, fsdp->same.brought);
    for (uint32_t i = 0, at = 0; i < fsdp->member_count && !status; i++)
        if (takes_part(&fsdp->members[i], own))
            status = settle(&fsdp->members[i], fsdp->same.brought[at++]);
    return status;
}

ms_status ms_filled_exchange(ms_fsdp *fsdp)
{
    ms_status status = exchange(fsdp, false);
    return status ? status : exchange(fsdp, true);
}

void ms_filled_forget(ms_fsdp *fsdp)
{
    for (uint32_t i = 0; i < fsdp->member_count; i++) {
        fsdp->members[i].brought = false;
        fsdp->members[i].unsure = NULL;
    }
}
