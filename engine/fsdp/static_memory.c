/* static_memory.c: rooms for what a model takes and gives back in each step (ms_room), so that what
 * repeats finds the same memory in each step and may become graphs: tasks
 * (ms_engine_set_repeating), and collectives (ms_comm_use_graphs).
 *
 * Which room a tensor gets depends on the model's own takes and drops alone, which are the same on
 * all ranks. It does not depend on what else a rank keeps in memory, nor on what its streams have
 * waited for. So whether two calls have the same memory is the same on all ranks, although the
 * addresses differ.
 *
 * A tensor goes to the room that it had before, if that is not in use. Otherwise it goes to the
 * smallest one that is large enough and whose user was dropped before the last `lag` drops. These
 * are as many as the runtime lets be under way, so a stream rarely waits for the former user. If
 * there is none, the largest one that is too small goes, and the tensor's memory is a new room. So
 * there are as many rooms as are in use at one time, and `lag` more, each as large as the largest
 * tensors are. */
#include "fsdp/static_memory.h"

/* At most, whatever limits a user has chosen: each one may cost a room. */
enum { MOST_LAG = 4, MOST_NUMBERS = 1 << 16 };

struct ms_room_entry {
    ms_room *room;
    uint32_t number; /* of memory that stays (ms_group_standing) */
    uint64_t left;   /* the number of the drop with which it was left */
};

static uint32_t lag_of(uint32_t under_way) { return under_way < MOST_LAG ? under_way : MOST_LAG; }

/* Two wires are used in turn, and two casts, so tasks may still use one that was dropped. */
void ms_fsdp_limit_rooms(ms_fsdp *fsdp, uint32_t gathers, uint32_t reductions)
{
    fsdp->whole_rooms.lag = lag_of(gathers);
    fsdp->gradient_rooms.lag = lag_of(reductions);
    fsdp->wire_rooms.lag = fsdp->cast_rooms.lag = 1;
}

static void clear(ms_rooms *rooms, ms_context *context)
{
    for (uint32_t i = 0; i < rooms->count; i++) ms_room_free(rooms->list[i].room);
    ms_release(context, rooms->list);
    *rooms = (ms_rooms){ .lag = rooms->lag };
}

void ms_fsdp_clear_rooms(ms_fsdp *fsdp)
{
    ms_context *context = ms_engine_context(fsdp->engine);
    clear(&fsdp->whole_rooms, context);
    clear(&fsdp->wire_rooms, context);
    clear(&fsdp->cast_rooms, context);
    clear(&fsdp->gradient_rooms, context);
}

static ms_room_entry *room_of(const ms_rooms *rooms, const ms_tensor *tensor)
{
    for (uint32_t i = 0; i < rooms->count; i++)
        if (ms_room_storage(rooms->list[i].room) == ms_tensor_storage(tensor))
            return &rooms->list[i];
    return NULL;
}

/* Whether at least `lag` drops came after the one with which it was left. */
static bool is_settled(const ms_rooms *rooms, const ms_room_entry *entry)
{
    return !ms_room_storage(entry->room) && rooms->drops - entry->left > rooms->lag;
}

static ms_room_entry *choose(const ms_rooms *rooms, const ms_storage *storage, uint32_t before)
{
    ms_room_entry *best = NULL;
    for (uint32_t i = 0; i < rooms->count; i++) {
        ms_room_entry *entry = &rooms->list[i];
        if (!ms_room_fits(entry->room, storage)) continue;
        if (entry->number == before) return entry;
        if (is_settled(rooms, entry)
            && (!best || ms_room_bytes(entry->room) < ms_room_bytes(best->room)))
            best = entry;
    }
    return best;
}

/* Nothing, if all are in use or too new: then there will be one more. */
static void free_smaller(ms_rooms *rooms)
{
    ms_room_entry *largest = NULL;
    for (uint32_t i = 0; i < rooms->count; i++) {
        ms_room_entry *entry = &rooms->list[i];
        if (is_settled(rooms, entry)
            && (!largest || ms_room_bytes(entry->room) > ms_room_bytes(largest->room)))
            largest = entry;
    }
    if (!largest) return;
    ms_room_free(largest->room);
    *largest = rooms->list[--rooms->count];
}

static ms_status take_new(ms_rooms *rooms, ms_flat *flat, ms_storage *storage, ms_stream *stream,
                          uint32_t *number)
{
    ms_context *context = ms_engine_context(flat->unit->fsdp->engine);
    ms_status status = ms_grow(context, (void **)&rooms->list, &rooms->capacity, rooms->count + 1,
                               sizeof *rooms->list);
    if (status) return status;
    free_smaller(rooms);
    ms_room_entry entry = { 0 };
    status = ms_storage_refill(storage, stream);
    if (!status) status = ms_room_new(storage, &entry.room);
    if (status) return status;
    entry.number = *number = ms_group_standing(flat->shards);
    rooms->list[rooms->count++] = entry;
    return MS_OK;
}

/* Where collectives become graphs, in steps and out of them, as an evaluation takes the same rooms.
 * Else in steps of work that repeats: there each rank may decide for itself. */
static bool are_of_use(const ms_fsdp *fsdp)
{
    return ms_group_uses_graphs(fsdp->group) || ms_engine_is_repeating(fsdp->engine);
}

/* Parameters of fewer ranks may be of different sizes on other ranks. Where ranks agree on each
 * gather (lockstep.c), and in a summon, they drop at different places. */
static bool may_have_rooms(const ms_flat *flat)
{
    const ms_fsdp *fsdp = flat->unit->fsdp;
    bool agrees = fsdp->find_unused || fsdp->joining;
    return !flat->own && !fsdp->summoning && !agrees && are_of_use(fsdp);
}

ms_status ms_rooms_refill(ms_rooms *rooms, ms_flat *flat, ms_tensor *tensor, ms_stream *stream,
                          uint32_t *number)
{
    ms_storage *storage = ms_tensor_storage(tensor);
    if (!may_have_rooms(flat)) return ms_storage_refill(storage, stream);
    const ms_room_entry *entry = choose(rooms, storage, *number);
    if (!entry) return take_new(rooms, flat, storage, stream, number);
    *number = entry->number;
    return ms_storage_refill_in(storage, stream, entry->room);
}

ms_status ms_rooms_drop(ms_rooms *rooms, ms_tensor *tensor, const char *owner)
{
    ms_room_entry *entry = room_of(rooms, tensor);
    if (entry) entry->left = rooms->drops++;
    return ms_storage_drop(ms_tensor_storage(tensor), owner);
}

uint32_t ms_rooms_number(const ms_rooms *rooms, const ms_tensor *tensor)
{
    const ms_room_entry *entry = room_of(rooms, tensor);
    return entry ? entry->number : 0;
}

uint32_t ms_rooms_pair(uint32_t first, uint32_t second)
{
    if (!first || !second || first >= MOST_NUMBERS || second >= MOST_NUMBERS) return 0;
    return first * MOST_NUMBERS + second;
}
