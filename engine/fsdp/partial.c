/* partial.c: hybrid shards, in passes without synchronization between replicas: gradients are
 * reduced over the shard group only. The sums of such passes stay with the shards (`carried`) until
 * a pass between replicas, before whose reduction each rank adds what it carries to its own part of
 * its gradients: the sum over the ranks of the shard group then contains it once. */
#include "fsdp/partial.h"

#include "fsdp/flat_param.h"
#include "hook/link_ops.h"
#include "ops/values.h"
#include "tensor/op.h"

/* The link of the chain that reduces, or NULL: a script does. */
static const ms_link *reduction_of(const ms_fsdp *fsdp)
{
    if (fsdp->hooks.hook) return NULL;
    for (uint32_t i = 0; i < fsdp->hooks.link_count; i++)
        if (fsdp->hooks.links[i].kind->reduce) return &fsdp->hooks.links[i];
    return NULL;
}

/* A part can wait for the rest only where the reduction is a sum. What a script computes is not
 * known. */
bool ms_fsdp_can_be_partial(const ms_fsdp *fsdp)
{
    const ms_link *link = reduction_of(fsdp);
    return fsdp->kind == MS_BUCKET_HYBRID && link && link->kind == ms_link_find("reduce")
           && (link->options.op == MS_REDUCE_OP_AVG || link->options.op == MS_REDUCE_OP_SUM);
}

bool ms_flat_param_is_partial(const ms_flat_param *flat)
{
    const ms_fsdp *fsdp = flat->unit->fsdp;
    return !fsdp->replica_sync && flat->bucket.kind == MS_BUCKET_HYBRID
           && ms_fsdp_can_be_partial(fsdp);
}

/* A mean is over the ranks of the shard group, so that 16-bit numbers stay in their range. */
ms_status ms_flat_param_run_partly(ms_flat_param *flat, ms_tensor **result)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_bucket *bucket = &flat->bucket;
    ms_bucket before = *bucket;
    bucket->kind = MS_BUCKET_REDUCE_SCATTER;
    bucket->group = before.shards;
    bucket->shards = bucket->replicas = NULL;
    bucket->divisor = ms_group_size(before.shards);
    ms_status status = ms_chain_run(fsdp->hooks.links, fsdp->hooks.link_count, bucket, result);
    bucket->kind = before.kind;
    bucket->group = before.group;
    bucket->shards = before.shards;
    bucket->replicas = before.replicas;
    return status;
}

ms_status ms_flat_param_carry(ms_flat_param *flat, ms_tensor *result)
{
    if (flat->carried) return ms_flat_param_add(flat->carried, result);
    return ms_copy_new(flat->unit->fsdp->source.engine, result, &flat->carried);
}

/* What `shard` has is added to this rank's part of the gradient: piece by piece where shards are
 * cut by rows. */
static ms_status add_own(ms_flat_param *flat, ms_tensor *shard)
{
    ms_bucket *bucket = &flat->bucket;
    int64_t one = 1, first = flat->length * ms_group_rank(bucket->shards);
    uint32_t count = bucket->parts ? flat->count : 1;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        const ms_member *m = &flat->members[i];
        int64_t length = bucket->parts ? m->length : flat->length;
        ms_tensor *to = NULL, *from = NULL;
        if (length == 0) continue;
        status = ms_tensor_window(bucket->flat, 1, &length, &one,
                                  bucket->parts ? m->packed + m->first : first, &to);
        if (!status)
            status = ms_tensor_window(shard, 1, &length, &one, bucket->parts ? m->at : 0, &from);
        if (!status) status = ms_flat_param_add(to, from);
        ms_tensor_release(to);
        ms_tensor_release(from);
    }
    return status;
}

/* The mean over the shard group becomes the sum that the reduction divides again. */
ms_status ms_flat_param_add_carried(ms_flat_param *flat)
{
    ms_bucket *bucket = &flat->bucket;
    ms_tensor *scaled = NULL;
    if (!flat->carried) return MS_OK;
    bool is_mean = reduction_of(flat->unit->fsdp)->options.op == MS_REDUCE_OP_AVG;
    ms_attributes factor = { .scalar = { .value = is_mean ? ms_group_size(bucket->shards) : 1 } };
    ms_status status =
        ms_op_unary(bucket->engine, &ms_op_mul_scalar, &factor, flat->carried, &scaled);
    if (!status) status = add_own(flat, scaled);
    ms_tensor_release(scaled);
    ms_tensor_release(flat->carried);
    flat->carried = NULL;
    return status;
}
