/* summon.c: whole parameters outside of passes, for good (unwrap) or for a while (summon), the
 * values of models that were made on "meta", and giving up a pass that failed.
 *
 * A summon with `offload` keeps whole parameters in the second pool. They take the place of
 * form.whole until the summon ends.
 *
 * Values of a model on "meta" are made for one unit at a time, between ms_fsdp_begin_values and
 * ms_fsdp_end_values, so that a rank has one whole unit in memory beside its shards. Values that
 * are in files are read after ms_fsdp_have_values: each rank reads its own pieces.
 * tensor/initial.c records what makes the values, lua/moonshard/nn/delayed.lua makes them, and
 * lua/moonshard/parallel/fsdp/values.lua goes from unit to unit. */
#include "fsdp/flat_param.h"

#include "fsdp/gradients.h"
#include "fsdp/lockstep.h"
#include "fsdp/pass.h"
#include "fsdp/reduce.h"
#include "fsdp/secondary_shard.h"
#include "fsdp/static_memory.h"
#include "fsdp/unit.h"
#include "ops/values.h"

/* Inside of a pass handles belong to the edges. */
static bool in_forward(const ms_fsdp *fsdp)
{
    bool busy = false;
    for (uint32_t u = 0; u < fsdp->unit_count; u++) busy |= fsdp->units[u].depth > 0;
    return busy;
}

ms_status ms_fsdp_check_no_forward(const ms_fsdp *fsdp, const char *what)
{
    if (!in_forward(fsdp)) return MS_OK;
    return ms_engine_fail(fsdp->source.engine, MS_ERROR_STATE,
                          "%s inside of a forward of an fsdp model: call it after backward", what);
}

ms_status ms_fsdp_check_idle(const ms_fsdp *fsdp, const char *what)
{
    bool busy = fsdp->now.in_backward || in_forward(fsdp);
    if (!busy && fsdp->summon.count == 0) return MS_OK;
    return ms_engine_fail(fsdp->source.engine, MS_ERROR_STATE, "fsdp: %s inside of %s: call it %s",
                          what, busy ? "a forward or backward" : "summon",
                          busy ? "between passes" : "after it");
}

/* ------------------------------------------------------------------- summon */

/* An unsharded parameter is written where it is, so what it held is copied, in case that the writes
 * are not kept. */
static ms_status keep_values(ms_unit *unit, bool offload)
{
    ms_engine *engine = unit->fsdp->source.engine;
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        ms_flat_param *flat = &unit->flats[f];
        if (ms_flat_param_is_apart(flat) || flat->summon_copy) continue;
        status = offload ? ms_copy_offloaded(engine, flat->form.whole, &flat->summon_copy)
                         : ms_copy_new(engine, flat->form.whole, &flat->summon_copy);
        flat->form.whole_version = ms_tensor_version(flat->form.whole);
    }
    return status;
}

/* Whole parameters have the shards' dtype here. Where ranks use different units, they may have
 * gathered different ones. */
static ms_status gather(ms_unit *unit)
{
    ms_status status = ms_unit_set_full(unit, true);
    if (status) return status;
    return ms_lockstep_is_on(unit->fsdp) ? ms_unit_gather_again(unit) : ms_unit_gather(unit);
}

/* After a gather: the current stream copies the whole outside, if it was not put in order there. */
static ms_status move_out(ms_flat_param *flat)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    if (!flat->offloaded || flat->resident) return MS_OK;
    ms_status status = ms_stream_wait(ms_engine_current(engine), flat->gathered);
    flat->awaited = true;
    if (status || ms_storage_is_dropped(ms_tensor_storage(flat->form.whole))) return status;
    return ms_copy_into(engine, flat->form.whole, flat->offloaded);
}

/* Gathers a unit, whose whole parameters are outside then: its memory is free for the next unit.
 * Parameters that are not sharded take no part: their handles go to the shards. */
static ms_status gather_outside(ms_unit *unit)
{
    ms_status status = ms_unit_set_full(unit, true);
    /* What was gathered before would be in memory beside the units to come. */
    if (!status) status = ms_unit_reshard(unit);
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        status = ms_flat_param_make_offloaded(&unit->flats[f]);
        if (!ms_flat_param_is_sharded(&unit->flats[f])) ms_flat_param_offload(&unit->flats[f]);
    }
    if (!status) status = gather(unit);
    for (uint32_t f = 0; f < unit->count && !status; f++) status = move_out(&unit->flats[f]);
    if (!status) status = ms_unit_reshard(unit);
    for (uint32_t f = 0; f < unit->count && !status; f++) ms_flat_param_offload(&unit->flats[f]);
    return status;
}

/* A rank that looks at nothing takes part in the gathers, and gives the memory back at once. */
static ms_status pass_by(ms_unit *unit)
{
    ms_status status = ms_gradients_put_back(unit, false);
    for (uint32_t f = 0; f < unit->count; f++) ms_flat_param_unload(&unit->flats[f]);
    if (!status) status = ms_unit_reshard(unit);
    return status ? status : ms_unit_set_full(unit, false);
}

ms_status ms_fsdp_summon(ms_fsdp *fsdp, const uint32_t *units, uint32_t count,
                         ms_summon_options options)
{
    bool gradients = options.gradients, offload = options.offload;
    void *memory = NULL;
    ms_status status = ms_fsdp_check_idle(fsdp, "summon");
    if (!status)
        status = ms_allocate(ms_engine_context(fsdp->source.engine), (count + 1) * sizeof *units,
                             "summon", &memory);
    if (status) return status;
    fsdp->summon.is_active = true;
    for (uint32_t i = 0; i < count && !status; i++) {
        ms_unit *unit = &fsdp->units[units[i]];
        status = offload ? gather_outside(unit) : gather(unit);
        if (!status && gradients) status = ms_gradients_gather(unit, offload);
        if (!status && options.absent) status = pass_by(unit);
    }
    fsdp->summon.is_active = false;
    if (options.absent) count = 0;
    for (uint32_t i = 0; i < count && !status; i++) {
        status = ms_unit_use(&fsdp->units[units[i]]);
        if (!status && gradients) status = ms_gradients_show(&fsdp->units[units[i]]);
    }
    for (uint32_t i = 0; i < count && !status; i++)
        status = keep_values(&fsdp->units[units[i]], offload);
    ms_release(ms_engine_context(fsdp->source.engine), fsdp->summon.units);
    fsdp->summon.units = memory;
    for (uint32_t i = 0; i < count; i++) fsdp->summon.units[i] = units[i];
    fsdp->summon.count = count;
    return status;
}

/* This rank's part of what was written goes to its shard. All ranks have written the same, or each
 * keeps its own part of what it wrote. Units that stay whole after forward are resharded as well:
 * their memory may hold what was written and not kept. */
static ms_status end_unit(ms_unit *unit, bool write)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count && !status; f++) {
        ms_flat_param *flat = &unit->flats[f];
        bool changed = ms_tensor_version(flat->form.whole) != flat->form.whole_version;
        if (!ms_flat_param_is_apart(flat)) {
            /* Unchanged values stay unwritten: a backward to come may have saved them. */
            if (!write && changed)
                status =
                    ms_copy_into(unit->fsdp->source.engine, flat->summon_copy, flat->form.whole);
            ms_tensor_release(flat->summon_copy);
            flat->summon_copy = NULL;
            continue;
        }
        if (write && changed) status = ms_flat_param_keep_own(flat);
        flat->form.whole_version = ms_tensor_version(flat->form.whole);
    }
    if (!status) status = ms_gradients_take(unit);
    if (!status) status = ms_unit_release(unit);
    for (uint32_t f = 0; f < unit->count && !status; f++) ms_flat_param_unload(&unit->flats[f]);
    if (!status) status = ms_gradients_put_back(unit, write);
    if (!status) status = ms_unit_reshard(unit);
    return status ? status : ms_unit_set_full(unit, false);
}

ms_status ms_fsdp_summon_end(ms_fsdp *fsdp, bool write)
{
    ms_status status = MS_OK;
    uint32_t count = fsdp->summon.count;
    fsdp->summon.count = 0;
    for (uint32_t i = 0; i < count && !status; i++)
        status = end_unit(&fsdp->units[fsdp->summon.units[i]], write);
    return status;
}

/* ---------------------------------------------------------- values made later */

/* Memory for a flat parameter that has no values, zeros at first; no gather will overwrite it. */
static ms_status take_blank(ms_flat_param *flat)
{
    ms_engine *engine = flat->unit->fsdp->source.engine;
    if (!flat->blank || !ms_flat_param_is_sharded(flat)) return MS_OK;
    ms_status status =
        ms_storage_refill(ms_tensor_storage(flat->form.whole), ms_engine_current(engine));
    if (status) return status;
    flat->blank = false;
    flat->form.shard_version = ms_tensor_version(flat->source);
    flat->form.whole_version = ms_tensor_version(flat->form.whole);
    return ms_fill_into(engine, flat->form.whole, 0);
}

ms_status ms_fsdp_begin_values(ms_fsdp *fsdp, uint32_t index)
{
    ms_unit *unit = &fsdp->units[index];
    ms_status status = ms_fsdp_check_idle(fsdp, "begin_values");
    if (!status) status = ms_unit_set_full(unit, true);
    for (uint32_t f = 0; f < unit->count && !status; f++) status = take_blank(&unit->flats[f]);
    /* Parameters that had memory are in shards already. */
    if (!status) status = gather(unit);
    return status ? status : ms_unit_use(unit);
}

/* All ranks get the values of the first, without a buffer. */
static ms_status copy_from_first(ms_flat_param *flat)
{
    ms_fsdp *fsdp = flat->unit->fsdp;
    ms_group *group = flat->own ? flat->shards : fsdp->group;
    ms_point ready = { 0 };
    if (ms_group_size(group) == 1) return MS_OK;
    ms_collective call = { .kind = MS_BROADCAST,
                           .in = flat->form.whole,
                           .bucket = -2 - (int32_t)flat->unit->index,
                           .label = ms_unit_called(flat->unit) };
    ms_status status = ms_group_enqueue(group, 1, &call, &ready);
    return status ? status : ms_stream_wait(ms_engine_current(fsdp->source.engine), ready);
}

ms_status ms_fsdp_end_values(ms_fsdp *fsdp, uint32_t index, bool copy)
{
    ms_unit *unit = &fsdp->units[index];
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < unit->count && copy && !status; f++)
        status = copy_from_first(&unit->flats[f]);
    return status ? status : end_unit(unit, true);
}

ms_status ms_fsdp_have_values(ms_fsdp *fsdp, uint32_t index)
{
    ms_unit *unit = &fsdp->units[index];
    ms_status status = ms_fsdp_check_idle(fsdp, "have_values");
    for (uint32_t f = 0; f < unit->count && !status; f++) status = take_blank(&unit->flats[f]);
    return status ? status : ms_unit_reshard(unit);
}

/* ------------------------------------------------------------------- unwrap */

/* Handles stay on the memory of the last gather, which is theirs from now on. */
ms_status ms_fsdp_unwrap(ms_fsdp *fsdp)
{
    ms_status status = ms_fsdp_check_idle(fsdp, "unwrap");
    for (uint32_t u = 0; u < fsdp->unit_count && !status; u++)
        status = ms_unit_detach_gradients(&fsdp->units[u]);
    for (uint32_t u = 0; u < fsdp->unit_count && !status; u++) {
        status = gather(&fsdp->units[u]);
        if (!status) status = ms_unit_use(&fsdp->units[u]);
    }
    if (!status) fsdp->closed = true;
    return status;
}

/* -------------------------------------------------------------------- reset */

/* All gradients go, also those of earlier passes: units whose backward had ended have added this
 * pass's to them already. */
static void give_up_gradients(ms_flat_param *flat)
{
    for (uint32_t i = 0; i < flat->count; i++) {
        ms_member *member = &flat->members[i];
        ms_gradients_forget(member);
        ms_outer_forget(member);
        ms_tensor_set_grad_home(member->tensor, NULL);
        ms_tensor_set_grad(member->tensor, NULL);
        member->held = member->filled = member->fired = member->scaled = member->stepped = false;
    }
    ms_tensor_release(flat->carried);
    flat->carried = NULL;
    ms_tensor *whole = flat->bucket.flat;
    if (!ms_flat_param_is_in_bucket(flat) && !ms_storage_is_dropped(ms_tensor_storage(whole)))
        ms_static_memory_drop(&flat->unit->fsdp->memory.gradients, whole,
                              ms_unit_called(flat->unit));
}

/* Nothing here can fail in a way that matters: what is released had been made. */
void ms_fsdp_reset(ms_fsdp *fsdp)
{
    fsdp->now.in_backward = fsdp->now.ends = false;
    fsdp->summon.count = 0;
    fsdp->now.order_count = fsdp->now.order_left = 0;
    fsdp->pass++;
    ms_pass_give_up(fsdp);
    for (uint32_t u = 0; u < fsdp->unit_count; u++) {
        ms_unit *unit = &fsdp->units[u];
        unit->depth = unit->backward.inputs = unit->backward.inputs_done = 0;
        unit->backward.no_grad_inputs = false;
        unit->backward.outputs_left = unit->backward.recomputes_left = 0;
        unit->backward.deferred = unit->entered = false;
        unit->modules_left = 0;
        ms_unit_release(unit);
        for (uint32_t f = 0; f < unit->count; f++) {
            ms_flat_param_unload(&unit->flats[f]);
            if (unit->flats[f].trainable) give_up_gradients(&unit->flats[f]);
        }
        ms_unit_reshard(unit);
        ms_secondary_shard_drop(unit);
        ms_unit_enter(unit, MS_UNIT_IDLE);
    }
}
