/* unit.c: a unit's memory and handles: gathering, using, releasing, resharding.
 *
 * A gather is an all_gather from the shard to the whole flat parameter, on channel 2, as a restore
 * (ms_collective.restore): tensors that forward saved stay valid while the shard is unchanged. An
 * ms_inflight limits how many gathers are under way, and their bytes. Copies before a gather
 * (casts, offloaded shards) run on the stream "gather.in". The ordering of rows after it runs on
 * the stream "gather.out". So the next gather runs meanwhile.
 *
 * A gather carries the number of its unit (ms_collective.bucket). So the comparison of collectives
 * finds ranks that gather different units, also where these have one size. */
#include "fsdp/unit.h"

#include "fsdp/flat_param.h"
#include "fsdp/fp8_gather.h"
#include "fsdp/gather_codec.h"
#include "fsdp/secondary_shard.h"
#include "fsdp/static_memory.h"
#include "grad/backward.h"
#include "grad/node.h"
#include "hook/link_ops.h"
#include "tensor/part.h"
#include "tensor/tensor.h"

/* ------------------------------------------------------------------- phases */

/* Whether a unit may go from one phase to another. Any phase may become idle: a pass ends, or is
 * given up. A forward may come at any time: in a recomputation also while the unit's backward runs.
 */
static bool is_legal(ms_unit_phase from, ms_unit_phase to)
{
    switch (to) {
    case MS_UNIT_IDLE: return true;
    case MS_UNIT_FORWARD: return true;
    case MS_UNIT_AWAITING: return from == MS_UNIT_FORWARD || from == MS_UNIT_INPUTS;
    case MS_UNIT_INPUTS: return from != MS_UNIT_BACKWARD;
    case MS_UNIT_BACKWARD: return from != MS_UNIT_BACKWARD;
    case MS_UNIT_DONE: return from == MS_UNIT_BACKWARD;
    }
    return false;
}

void ms_unit_enter(ms_unit *unit, ms_unit_phase phase)
{
    MS_ASSERT(is_legal(unit->phase, phase));
    unit->phase = phase;
}

void ms_unit_note(const ms_unit *unit, const char *edge, size_t first)
{
    ms_engine *engine = unit->fsdp->source.engine;
    ms_trace_add_range(engine, first, "fsdp.%s %s", edge, ms_unit_called(unit));
    ms_log(ms_engine_context(engine), MS_LOG_DEBUG, "fsdp.%s %s", edge, ms_unit_called(unit));
}

/* ------------------------------------------------------------------- writes */

/* The first member that was written while it was whole, or NULL. */
static const ms_member *written(const ms_flat_param *flat)
{
    if (!ms_flat_param_is_apart(flat)
        || ms_tensor_version(flat->form.whole) == flat->form.whole_version)
        return NULL;
    for (uint32_t i = 0; i < flat->count; i++)
        if (ms_tensor_version(flat->members[i].tensor) > flat->form.whole_version)
            return &flat->members[i];
    return NULL;
}

/* What a script writes to a whole parameter never reaches the shards. */
static ms_status check_unwritten(const ms_unit *unit)
{
    for (uint32_t f = 0; f < unit->count; f++) {
        const ms_member *member = written(&unit->flats[f]);
        if (member)
            return ms_engine_fail(unit->fsdp->source.engine, MS_ERROR_STATE,
                                  "fsdp: '%s' was written while its unit \"%s\" was gathered, and "
                                  "its shards do not know of it: write parameters between passes, "
                                  "or inside summon",
                                  member->name, ms_unit_called(unit));
    }
    return MS_OK;
}

/* ---------------------------------------------------------------- gathering */

/* A gather of a flat parameter that is in memory already, and whose shard is as it was then,
 * would write the same values. */
static bool is_fresh(const ms_flat_param *flat)
{
    return !ms_storage_is_dropped(ms_tensor_storage(flat->form.whole))
           && ms_tensor_version(flat->source) == flat->form.shard_version;
}

static ms_status take_memory(ms_flat_param *flat, ms_static_memory *memory, ms_tensor *tensor,
                             ms_stream *stream, uint32_t *block)
{
    if (!ms_storage_is_dropped(ms_tensor_storage(tensor))) return MS_OK;
    return ms_static_memory_refill(memory, flat, tensor, stream, block);
}

/* Copies run on streams of their own, one before gathers and one after them, so that the next
 * gather runs while they copy. A stream exists once something is to be copied there. It has the
 * priority of the gather, which waits for the copy or which the copy makes useful. */
static ms_status copying_stream(const ms_fsdp *fsdp, bool before, ms_stream **out)
{
    return ms_engine_stream_with(fsdp->source.engine, before ? "gather.in" : "gather.out",
                                 MS_PRIORITY_HIGH, out);
}

/* The last but one of these users is done before the stream goes on. So two pieces of memory are
 * used in turn: more would be taken for each copy that is enqueued ahead. */
static ms_status take_turn(ms_turns *turns, ms_stream *stream)
{
    return ms_stream_wait(stream, turns->ended[turns->count % 2]);
}
static void end_turn(ms_turns *turns, ms_point point) { turns->ended[turns->count++ % 2] = point; }

/* Runs a copy of `to`'s flat parameter on the stream, after all tasks that still use its old
 * values, and times it. */
static ms_status copy_on(ms_flat_param *flat, ms_stream *stream, const ms_tensor *to,
                         ms_status (*copy)(ms_flat_param *flat))
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    uint32_t span = 0;
    ms_status status = ms_stream_wait_users(stream, to);
    if (!status)
        status = ms_gathers_begin(&fsdp->gather_times, MS_SPAN_COPY, 2 * flat->unit->index, stream,
                                  &span);
    ms_stream *before = ms_engine_set_current(fsdp->source.engine, stream);
    if (!status) status = copy(flat);
    ms_engine_set_current(fsdp->source.engine, before);
    flat->gathered = ms_stream_last(stream);
    return status ? status : ms_gathers_end(&fsdp->gather_times, span, stream);
}

/* Copies the shard to the memory that this gather alone reads, or, of a flat parameter that is not
 * sharded, to the whole. The stream of the gathers waits for it. */
static ms_status copy_in(ms_flat_param *flat, ms_stream *gathers)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_tensor *cast = flat->form.cast;
    ms_stream *stream = NULL;
    ms_status status = copying_stream(fsdp, true, &stream);
    /* The optimizer's stream may still write it. */
    if (!status) status = ms_stream_wait_users(stream, flat->source);
    if (!status && cast) status = take_turn(&fsdp->memory.casts, stream);
    if (!status && cast)
        status = take_memory(flat, &fsdp->memory.cast_blocks, cast, stream, &flat->form.cast_block);
    if (!status) status = copy_on(flat, stream, cast ? cast : flat->form.whole, ms_flat_param_cast);
    return status ? status : ms_stream_wait(gathers, flat->gathered);
}

/* Under layout = "rows": copies the gathered rows from the wire to the whole flat parameter, and
 * drops the wire, which nothing else reads. */
static ms_status copy_out(ms_flat_param *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_stream *stream = NULL;
    ms_status status = copying_stream(fsdp, false, &stream);
    if (!status) status = ms_stream_wait(stream, flat->gathered);
    if (!status)
        status = copy_on(flat, stream, flat->offloaded ? flat->offloaded : flat->form.whole,
                         ms_flat_param_arrange);
    if (!status) end_turn(&fsdp->memory.wires, flat->gathered);
    if (!status)
        status =
            ms_static_memory_drop(&fsdp->memory.wire_blocks, flat->form.wire, flat->unit->name);
    return status;
}

/* A shard's own memory stays where it is. */
static uint32_t fixed_address_of(const ms_flat_param *flat, bool direct)
{
    const ms_fsdp *fsdp = flat->unit->fsdp;
    uint32_t out = direct ? ms_static_memory_number(&fsdp->memory.wholes, flat->form.whole)
                          : ms_static_memory_number(&fsdp->memory.wire_blocks, flat->form.wire);
    if (!flat->form.cast) return out;
    return ms_static_memory_pair(
        ms_static_memory_number(&fsdp->memory.cast_blocks, flat->form.cast), out);
}

/* Of shards, cast or not, to the whole or to the wire; or of parts within the near group, to the
 * whole. */
static ms_collective gather_of(ms_flat_param *flat, bool near)
{
    const ms_unit *unit = flat->unit;
    bool direct = near || !flat->form.wire;
    return (ms_collective){ .kind = MS_ALL_GATHER,
                            .in = near              ? flat->near
                                  : flat->form.cast ? flat->form.cast
                                                    : flat->shard,
                            .out = direct ? flat->form.whole : flat->form.wire,
                            .restore = direct,
                            .source = direct ? flat->source : NULL,
                            .bucket = -2 - (int32_t)unit->index, /* units of one size differ */
                            .label = ms_unit_called(unit) };
}

/* What travels, timed. */
static ms_status transfer(ms_flat_param *flat, bool near, const ms_collective *call)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    uint32_t span = 0;
    ms_status status = ms_gathers_begin(&fsdp->gather_times, MS_SPAN_GATHER, 2 * flat->unit->index,
                                        call->stream, &span);
    if (!status && !near && ms_gather_codec_applies(flat))
        status = ms_gather_codec_gather(flat, call->in, call->stream, call->out);
    else if (!status && !near && ms_fp8_gather_applies(flat))
        status = ms_fp8_gather(flat, call->in, call->stream, call->out);
    else if (!status)
        status = ms_group_enqueue(near ? fsdp->near : flat->shards, 2, call, &flat->gathered);
    return status ? status : ms_gathers_end(&fsdp->gather_times, span, call->stream);
}

/* What is copied, travels, and is put in order: as much of it as the flat parameter needs. All
 * gathers of a model are in one order, on the stream that the limit holds back. */
static ms_status move(ms_flat_param *flat, bool near, ms_stream *stream)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_collective call = gather_of(flat, near);
    ms_status status = MS_OK;
    bool casts = !near && (flat->form.cast || !ms_flat_param_is_sharded(flat));
    call.stream = stream;
    if (casts) status = copy_in(flat, stream);
    if (status || !ms_flat_param_is_sharded(flat)) return status;
    if (!call.restore) status = take_turn(&fsdp->memory.wires, stream);
    if (!status && !call.restore)
        status = take_memory(flat, &fsdp->memory.wire_blocks, flat->form.wire, stream,
                             &flat->form.wire_block);
    if (!near) call.fixed_address = fixed_address_of(flat, call.restore);
    if (!status) status = transfer(flat, near, &call);
    if (!status && casts) end_turn(&fsdp->memory.casts, flat->gathered);
    if (!status && casts)
        status =
            ms_static_memory_drop(&fsdp->memory.cast_blocks, flat->form.cast, flat->unit->name);
    return status || call.restore ? status : copy_out(flat);
}

/* The memory is taken on the stream of the gathers, which waits for the last users of that memory;
 * the model's stream goes on. Rows that are put in order outside need none but the wire. */
static ms_status gather_flat(ms_flat_param *flat, bool near)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_stream *stream = NULL;
    bool elsewhere = flat->offloaded && flat->form.wire && !near;
    ms_status status = ms_group_stream(fsdp->shards, 2, &stream);
    if (!status && !elsewhere)
        status = take_memory(flat, &fsdp->memory.wholes, flat->form.whole, stream,
                             &flat->form.whole_block);
    /* The optimizer's stream may still write it. */
    if (!status) status = ms_stream_wait_users(stream, near ? flat->near : flat->source);
    if (!status) status = move(flat, near, stream);
    if (status) return status;
    flat->unit->gathers++;
    flat->awaited = false;
    flat->form.shard_version = ms_tensor_version(flat->source);
    flat->form.whole_version = ms_tensor_version(flat->form.whole);
    return MS_OK;
}

static ms_status gather_flats(ms_unit *unit, bool again)
{
    ms_status status = MS_OK;
    size_t first = ms_trace_count(unit->fsdp->source.engine);
    bool any = false;
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        ms_flat_param *flat = &unit->flats[f];
        if (!ms_flat_param_is_apart(flat) || (!again && is_fresh(flat))) continue;
        status = gather_flat(flat, !again && ms_secondary_shard_is_usable(flat));
        any = true;
    }
    if (!status && unit->place == MS_UNIT_SHARDED) unit->place = MS_UNIT_GATHERED;
    if (any) ms_unit_note(unit, "unshard", first);
    return status;
}

ms_status ms_unit_gather(ms_unit *unit) { return gather_flats(unit, false); }

ms_status ms_unit_gather_again(ms_unit *unit)
{
    /* A gather would hide what a script has written there. */
    ms_status status = unit->place == MS_UNIT_IN_USE ? check_unwritten(unit) : MS_OK;
    return status ? status : gather_flats(unit, true);
}

bool ms_unit_is_fresh(const ms_unit *unit)
{
    for (uint32_t f = 0; f < unit->count; f++)
        if (ms_flat_param_is_apart(&unit->flats[f]) && !is_fresh(&unit->flats[f])) return false;
    return true;
}

/* Nodes that are still to run count what they read. */
bool ms_unit_needs_values(const ms_unit *unit)
{
    if (unit->settings.stay_sharded) return false;
    if (ms_backward_running(unit->fsdp->source.engine) != MS_BACKWARD_REST) return true;
    for (uint32_t f = 0; f < unit->count; f++)
        if (ms_flat_param_is_apart(&unit->flats[f])
            && ms_storage_expects_any(ms_tensor_storage(unit->flats[f].form.whole)))
            return true;
    return false;
}

/* ------------------------------------------------------------------ handles */

/* An unsharded parameter is whole at all times. */
void ms_member_show(ms_member *member, bool whole)
{
    const ms_flat_param *flat = member->flat;
    /* It has a meta since the model was made, so this cannot fail. */
    ms_leaf_set_outer(member->tensor, !whole);
    ms_tensor_set_part(member->tensor, whole ? NULL : member->piece_of);
    if (whole || !ms_flat_param_is_sharded(flat))
        ms_tensor_reshape_onto(member->tensor, whole ? flat->form.whole : flat->shard,
                               member->begin, member->dims, member->shape);
    else
        ms_tensor_reshape_onto(member->tensor, flat->shard, member->at, member->piece_dims,
                               member->piece);
}

static void show_all(ms_unit *unit, bool whole)
{
    for (uint32_t f = 0; f < unit->count; f++)
        for (uint32_t i = 0; i < unit->flats[f].count; i++)
            ms_member_show(&unit->flats[f].members[i], whole);
}

/* The wait is timed where there may be one. */
static ms_status await_gathers(ms_unit *unit)
{
    ms_gathers *times = &unit->fsdp->gather_times;
    ms_stream *current = ms_engine_current(unit->fsdp->source.engine);
    ms_status status = MS_OK;
    bool any = false;
    uint32_t span = 0;
    for (uint32_t f = 0; f < unit->count; f++)
        any |= ms_flat_param_is_sharded(&unit->flats[f]) && !unit->flats[f].awaited;
    if (any) status = ms_gathers_pause(times);
    if (any && !status)
        status = ms_gathers_begin(times, MS_SPAN_WAIT, 2 * unit->index, current, &span);
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        status = ms_stream_wait(current, unit->flats[f].gathered);
        unit->flats[f].awaited = true;
    }
    return any && !status ? ms_gathers_end(times, span, current) : status;
}

ms_status ms_unit_use(ms_unit *unit)
{
    ms_status status = await_gathers(unit);
    if (status) return status;
    show_all(unit, true);
    unit->place = MS_UNIT_IN_USE;
    return MS_OK;
}

ms_status ms_unit_release(ms_unit *unit)
{
    if (unit->place != MS_UNIT_IN_USE) return MS_OK;
    ms_status status = check_unwritten(unit);
    show_all(unit, false);
    unit->place = MS_UNIT_GATHERED;
    return status;
}

uint64_t ms_unit_whole_bytes(const ms_unit *unit)
{
    uint64_t bytes = 0;
    for (uint32_t f = 0; f < unit->count; f++)
        if (ms_flat_param_is_apart(&unit->flats[f]))
            bytes += ms_tensor_bytes(unit->flats[f].form.whole);
    return bytes;
}

/* The last use of the memory goes to the list of the limit, for which later gathers wait. */
ms_status ms_unit_reshard(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    ms_stream *stream = NULL;
    uint64_t bytes = 0;
    size_t first = ms_trace_count(fsdp->source.engine);
    MS_ASSERT(unit->place != MS_UNIT_IN_USE);
    if (unit->prefetched) fsdp->prefetched.wasted_bytes += ms_unit_whole_bytes(unit);
    unit->prefetched = false;
    unit->place = MS_UNIT_SHARDED;
    for (uint32_t f = 0; f < unit->count; f++) {
        ms_flat_param *flat = &unit->flats[f];
        ms_tensor *whole = flat->form.whole;
        if (!ms_flat_param_is_apart(flat) || ms_storage_is_dropped(ms_tensor_storage(whole)))
            continue;
        bytes += ms_tensor_bytes(whole);
        ms_status status = ms_static_memory_drop(&fsdp->memory.wholes, whole, ms_unit_called(unit));
        if (status) return status;
    }
    if (bytes == 0) return MS_OK;
    ms_status status = ms_group_stream(fsdp->shards, 2, &stream);
    size_t limit = ms_trace_count(fsdp->source.engine);
    if (!status) status = ms_inflight_acquire(fsdp->memory.gathers, stream, bytes);
    ms_trace_add_range(fsdp->source.engine, limit, "fsdp.rate_limit %s", ms_unit_called(unit));
    if (!status)
        status = ms_inflight_release(fsdp->memory.gathers,
                                     ms_stream_last(ms_engine_current(fsdp->source.engine)), bytes);
    ms_unit_note(unit, "reshard", first);
    return status;
}

ms_status ms_unit_set_full(ms_unit *unit, bool yes)
{
    if (unit->full == yes) return MS_OK;
    if (unit->place == MS_UNIT_IN_USE)
        return ms_engine_fail(
            unit->fsdp->source.engine, MS_ERROR_STATE,
            "fsdp: unit \"%s\" is in use in %s precision: switch between training "
            "and evaluation mode between passes",
            ms_unit_called(unit), yes ? "low" : "full");
    ms_status status = ms_unit_reshard(unit);
    for (uint32_t f = 0; f < unit->count && !status; f++)
        ms_flat_param_set_full(&unit->flats[f], yes);
    if (!status) unit->full = yes;
    return status;
}
