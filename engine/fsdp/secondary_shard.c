/* secondary_shard.c: units that keep more than their shards after forward: the near group is a few
 * of the ranks that share one copy, and each of its ranks keeps an equal part of the whole until
 * backward, which then gathers within the near group.
 *
 * A part is cut from the gathered memory, whatever the layout of shards is. It is used while the
 * shard is unchanged since the part was taken, and while gathers give the dtype that it has. The
 * decision is the same on all ranks, because it depends on the order of host calls only. Ranks that
 * agree on each gather keep no parts: one of them may not have run the forward. */
#include "fsdp/secondary_shard.h"

#include "fsdp/flat_param.h"
#include "hook/link_ops.h"
#include "ops/values.h"
#include "tensor/state.h"

static int64_t length_of(const ms_flat_param *flat)
{
    return flat->padded / ms_group_size(flat->unit->fsdp->near);
}

/* It begins dropped, in memory that the near ranks read without a copy. */
ms_status ms_secondary_shard_make(ms_flat_param *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_storage *storage = NULL;
    if (!fsdp->near || flat->own || !ms_flat_param_is_sharded(flat)) return MS_OK;
    int64_t length = length_of(flat);
    size_t bytes = (size_t)length * ms_dtype_bytes(flat->computes);
    ms_status status =
        ms_group_storage(fsdp->near, ms_engine_current(fsdp->source.engine), bytes, &storage);
    if (!status) status = ms_tensor_on(storage, flat->computes, 1, &length, &flat->near);
    if (!status) status = ms_storage_drop(storage, flat->unit->name);
    ms_storage_release(storage);
    return status;
}

bool ms_secondary_shard_is_usable(const ms_flat_param *flat)
{
    return flat->near && !flat->unit->full && !ms_storage_is_dropped(ms_tensor_storage(flat->near))
           && flat->secondary_version == ms_tensor_version(flat->source);
}

/* After a forward that backward will come to. */
static ms_status take_part(ms_flat_param *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_stream *current = ms_engine_current(fsdp->source.engine);
    int64_t one = 1, length = length_of(flat), first = length * ms_group_rank(fsdp->near);
    ms_tensor *part = NULL;
    ms_status status = MS_OK;
    if (ms_storage_is_dropped(ms_tensor_storage(flat->near)))
        status = ms_storage_refill(ms_tensor_storage(flat->near), current);
    if (!status) status = ms_stream_wait_users(current, flat->near);
    if (!status) status = ms_tensor_window(flat->form.whole, 1, &length, &one, first, &part);
    if (!status) status = ms_copy_into(fsdp->source.engine, part, flat->near);
    ms_tensor_release(part);
    if (!status) flat->secondary_version = flat->form.shard_version;
    return status;
}

ms_status ms_secondary_shard_keep(ms_unit *unit)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count && !status && !unit->full; f++)
        if (unit->flats[f].near && !ms_secondary_shard_is_usable(&unit->flats[f]))
            status = take_part(&unit->flats[f]);
    return status;
}

ms_status ms_secondary_shard_drop(ms_unit *unit)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        ms_tensor *near = unit->flats[f].near;
        if (near && !ms_storage_is_dropped(ms_tensor_storage(near)))
            status = ms_storage_drop(ms_tensor_storage(near), unit->name);
    }
    return status;
}
