/* static_memory.c: blocks for what a model takes and gives back in each step (ms_static_block), so
 * that what repeats finds the same memory in each step and may become graphs: tasks
 * (ms_engine_set_repeating), and collectives (ms_comm_use_graphs). The model's own tasks then come
 * with the same arguments from the first steps on.
 *
 * Which block a tensor gets depends on the model's own takes and drops alone, which are the same on
 * all ranks. It does not depend on what else a rank keeps in memory, nor on what its streams have
 * waited for. So whether two calls have the same memory is the same on all ranks, although the
 * addresses differ. The pool cannot promise that: one rank alone may save a model, which changes
 * where its pool has free memory. It could then not launch a graph of NCCL that the other ranks
 * launch.
 *
 * Blocks are used for whole flat parameters, casts, wires, codes and gradients. There are none in
 * joins, with find_unused, during a summon, and for parameters of a group of their own: there ranks
 * may take and drop memory in different orders. Collectives are launched as graphs only where
 * native links reduce a bucket in place, since a script may replace a buffer on one rank alone.
 * Gathers by an extension (gather_codec.c), gathers within the near group, and reductions by rows,
 * which send a copy, are launched by themselves.
 *
 * Live memory and the predicted peak are the same with blocks as without them. What the pool
 * reserves was between 12% less and 10% more in small models.
 *
 * A tensor goes to the block that it had before, if that is not in use. Otherwise it goes to the
 * smallest one that is large enough and whose user was dropped before the last `lag` drops. These
 * are as many as the runtime lets be under way, so a stream rarely waits for the former user. If
 * there is none, the largest one that is too small goes, and the tensor's memory is a new block. So
 * there are as many blocks as are in use at one time, and `lag` more, each as large as the largest
 * tensors are. */
#include "fsdp/static_memory.h"

/* At most, whatever limits a user has chosen: each one may cost a block. */
enum { MOST_LAG = 4, MOST_NUMBERS = 1 << 16 };

struct ms_static_entry {
    ms_static_block *block;
    uint32_t number; /* of memory that stays (ms_group_fixed_address) */
    uint64_t left;   /* the number of the drop with which it was left */
};

static uint32_t lag_of(uint32_t under_way) { return under_way < MOST_LAG ? under_way : MOST_LAG; }

/* Two wires are used in turn, and two casts, so tasks may still use one that was dropped. */
void ms_fsdp_limit_static_memory(ms_fsdp *fsdp, uint32_t gathers, uint32_t reductions)
{
    fsdp->memory.wholes.lag = lag_of(gathers);
    fsdp->memory.gradients.lag = lag_of(reductions);
    fsdp->memory.wire_blocks.lag = fsdp->memory.cast_blocks.lag = 1;
    /* One stream uses these, one after another. */
    fsdp->memory.code_blocks.lag = fsdp->memory.arrived_blocks.lag = 0;
}

static void clear(ms_static_memory *memory, ms_context *context)
{
    for (uint32_t i = 0; i < memory->count; i++) ms_static_block_free(memory->list[i].block);
    ms_release(context, memory->list);
    *memory = (ms_static_memory){ .lag = memory->lag };
}

void ms_fsdp_clear_static_memory(ms_fsdp *fsdp)
{
    ms_context *context = ms_engine_context(fsdp->source.engine);
    clear(&fsdp->memory.wholes, context);
    clear(&fsdp->memory.wire_blocks, context);
    clear(&fsdp->memory.cast_blocks, context);
    clear(&fsdp->memory.gradients, context);
    clear(&fsdp->memory.code_blocks, context);
    clear(&fsdp->memory.arrived_blocks, context);
}

static ms_static_entry *room_of(const ms_static_memory *memory, const ms_tensor *tensor)
{
    for (uint32_t i = 0; i < memory->count; i++)
        if (ms_static_block_storage(memory->list[i].block) == ms_tensor_storage(tensor))
            return &memory->list[i];
    return NULL;
}

/* Whether at least `lag` drops came after the one with which it was left. */
static bool is_settled(const ms_static_memory *memory, const ms_static_entry *entry)
{
    return !ms_static_block_storage(entry->block) && memory->drops - entry->left > memory->lag;
}

static ms_static_entry *choose(const ms_static_memory *memory, const ms_storage *storage,
                               uint32_t before)
{
    ms_static_entry *best = NULL;
    for (uint32_t i = 0; i < memory->count; i++) {
        ms_static_entry *entry = &memory->list[i];
        if (!ms_static_block_fits(entry->block, storage)) continue;
        if (entry->number == before) return entry;
        if (is_settled(memory, entry)
            && (!best || ms_static_block_bytes(entry->block) < ms_static_block_bytes(best->block)))
            best = entry;
    }
    return best;
}

/* Nothing, if all are in use or too new: then there will be one more. */
static void free_smaller(ms_static_memory *memory)
{
    ms_static_entry *largest = NULL;
    for (uint32_t i = 0; i < memory->count; i++) {
        ms_static_entry *entry = &memory->list[i];
        if (is_settled(memory, entry)
            && (!largest
                || ms_static_block_bytes(entry->block) > ms_static_block_bytes(largest->block)))
            largest = entry;
    }
    if (!largest) return;
    ms_static_block_free(largest->block);
    *largest = memory->list[--memory->count];
}

static ms_status take_new(ms_static_memory *memory, ms_flat_param *flat, ms_storage *storage,
                          ms_stream *stream, uint32_t *number)
{
    ms_context *context = ms_engine_context(flat->unit->fsdp->source.engine);
    ms_status status = ms_grow(context, (void **)&memory->list, &memory->capacity,
                               memory->count + 1, sizeof *memory->list);
    if (status) return status;
    free_smaller(memory);
    ms_static_entry entry = { 0 };
    status = ms_storage_refill(storage, stream);
    if (!status) status = ms_static_block_new(storage, &entry.block);
    if (status) return status;
    entry.number = *number = ms_group_fixed_address(flat->shards);
    memory->list[memory->count++] = entry;
    return MS_OK;
}

/* Where collectives become graphs, in steps and out of them, as an evaluation takes the same
 * blocks. Else in steps of work that repeats: there each rank may decide for itself. */
static bool are_of_use(const ms_fsdp *fsdp)
{
    return ms_group_uses_graphs(fsdp->group) || ms_engine_is_repeating(fsdp->source.engine);
}

/* Parameters of fewer ranks may be of different sizes on other ranks. Where ranks agree on each
 * gather (lockstep.c), and in a summon, they drop at different places. */
static bool may_have_rooms(const ms_flat_param *flat)
{
    const ms_fsdp *fsdp = flat->unit->fsdp;
    bool agrees = fsdp->same.find_unused || fsdp->same.joining;
    return !flat->own && !fsdp->summon.is_active && !agrees && are_of_use(fsdp);
}

ms_status ms_static_memory_refill(ms_static_memory *memory, ms_flat_param *flat, ms_tensor *tensor,
                                  ms_stream *stream, uint32_t *number)
{
    ms_storage *storage = ms_tensor_storage(tensor);
    if (!may_have_rooms(flat)) return ms_storage_refill(storage, stream);
    const ms_static_entry *entry = choose(memory, storage, *number);
    if (!entry) return take_new(memory, flat, storage, stream, number);
    *number = entry->number;
    return ms_storage_refill_in(storage, stream, entry->block);
}

ms_status ms_static_memory_drop(ms_static_memory *memory, ms_tensor *tensor, const char *owner)
{
    ms_static_entry *entry = room_of(memory, tensor);
    if (entry) entry->left = memory->drops++;
    return ms_storage_drop(ms_tensor_storage(tensor), owner);
}

uint32_t ms_static_memory_number(const ms_static_memory *memory, const ms_tensor *tensor)
{
    const ms_static_entry *entry = room_of(memory, tensor);
    return entry ? entry->number : 0;
}

uint32_t ms_static_memory_pair(uint32_t first, uint32_t second)
{
    if (!first || !second || first >= MOST_NUMBERS || second >= MOST_NUMBERS) return 0;
    return first * MOST_NUMBERS + second;
}
