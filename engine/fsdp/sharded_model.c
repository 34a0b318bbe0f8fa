/* sharded_model.c: making and freeing a sharded model, and what can be asked of it and set. */
#include "fsdp/flat_param.h"

#include <string.h>

#include "fsdp/gather_codec.h"
#include "fsdp/lockstep.h"
#include "fsdp/module_hooks.h"
#include "fsdp/schedule.h"
#include "fsdp/static_memory.h"
#include "fsdp/unit.h"
#include "fsdp/sharded_model.h"
#include "grad/node.h"
#include "tensor/part.h"
#include "tensor/state.h"

/* ------------------------------------------------------- making and freeing */

/* Frees all but the struct, which visits may still refer to. Fields that were not reached are 0. */
static void free_parts(ms_fsdp *fsdp)
{
    ms_context *context = ms_engine_context(fsdp->source.engine);
    fsdp->closed = true;
    for (uint32_t i = 0; i < fsdp->member_count && fsdp->members; i++) {
        ms_member *member = &fsdp->members[i];
        if (!member->tensor) continue;
        if (member->hook) {
            ms_tensor_remove_hook(member->tensor, member->hook);
            ms_leaf_set_sharded(member->tensor, false); /* it has a meta: nothing can fail */
        }
        ms_tensor_set_grad_home(member->tensor, NULL);
        ms_leaf_set_outer(member->tensor, false);
        ms_tensor_release(member->tensor);
        ms_part_release(member->piece_of);
        ms_release(context, member->name);
    }
    for (uint32_t f = 0; f < fsdp->flat_count && fsdp->flats; f++)
        ms_flat_param_free(&fsdp->flats[f]);
    ms_fsdp_clear_static_memory(fsdp);
    for (uint32_t u = 0; u < fsdp->unit_count && fsdp->units; u++)
        ms_release(context, fsdp->units[u].name);
    ms_inflight_free(fsdp->memory.gathers);
    ms_inflight_free(fsdp->memory.reductions);
    ms_chain_drop(fsdp->hooks.links, fsdp->hooks.link_count);
    ms_group *held[] = { fsdp->group, fsdp->shards, fsdp->replicas, fsdp->near };
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) ms_group_release(held[i]);
    ms_times_close(&fsdp->times);
    ms_gathers_close(&fsdp->gather_times);
    for (int i = 0; i < MS_SCHEDULES; i++) ms_schedule_free(&fsdp->schedules[i], context);
    ms_release(context, fsdp->buckets);
    ms_release(context, fsdp->now.order);
    ms_release(context, fsdp->summon.units);
    ms_release(context, fsdp->same.words);
    ms_release(context, fsdp->same.brought);
    ms_release(context, fsdp->members);
    ms_release(context, fsdp->flats);
    ms_release(context, fsdp->units);
}

static void free_callbacks(ms_fsdp *fsdp)
{
    if (fsdp->hooks.hook_free) fsdp->hooks.hook_free(fsdp->hooks.hook_user);
    ms_gather_codec_free(fsdp);
    ms_gradient_source_set_on_reduced(&fsdp->source, NULL, NULL, NULL);
}

void ms_fsdp_destroy(ms_gradient_source *source)
{
    ms_fsdp *fsdp = (ms_fsdp *)source;
    free_callbacks(fsdp);
    free_parts(fsdp);
    ms_fsdp_let_go(fsdp);
}

void ms_fsdp_free(ms_fsdp *fsdp)
{
    if (fsdp) ms_gradient_source_free(&fsdp->source);
}

ms_status ms_fsdp_reached(ms_engine *engine, ms_tensor *tensor, const char **unit)
{
    *unit = NULL;
    for (const ms_gradient_source *source = ms_gradient_sources(engine, MS_SLOT_FSDP); source;
         source = source->next) {
        const ms_fsdp *fsdp = (const ms_fsdp *)source;
        for (uint32_t i = 0; i < fsdp->member_count && !*unit; i++) {
            const ms_member *member = &fsdp->members[i];
            bool reached = false;
            ms_status status =
                ms_graph_reaches(engine, &tensor, 1, &(ms_tensor *){ member->tensor }, 1, &reached);
            if (status) return status;
            if (reached) *unit = member->flat->unit->name;
        }
    }
    return MS_OK;
}

static bool has_owner(ms_engine *engine, const ms_tensor *tensor)
{
    for (const ms_gradient_source *source = ms_gradient_sources(engine, MS_SLOT_FSDP); source;
         source = source->next) {
        const ms_fsdp *fsdp = (const ms_fsdp *)source;
        for (uint32_t i = 0; i < fsdp->member_count; i++)
            if (fsdp->members[i].tensor == tensor) return true;
    }
    return false;
}

/* Whether it computes in what 8-bit floats are made of. */
static bool may_be_coded(const ms_fsdp_options *options, const ms_fsdp_parameter *given)
{
    const ms_fsdp_unit_options *unit = &options->units[given->unit];
    ms_dtype dtype = ms_tensor_dtype(given->tensor);
    if (unit->has_computes && !given->keeps_dtype) dtype = unit->computes;
    return dtype == MS_F32 || dtype == MS_BF16;
}

static ms_status check_parameters(ms_engine *engine, const ms_fsdp_options *options,
                                  const ms_fsdp_parameter *parameters, uint32_t count)
{
    if (count == 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "fsdp: the model has no parameters");
    const ms_fsdp_parameter *own = NULL;
    for (uint32_t i = 0; i < count; i++) {
        const ms_fsdp_parameter *given = &parameters[i];
        MS_ASSERT(given->unit < options->unit_count);
        /* Codes are bytes that nothing computes with before they are gathered. */
        bool codes = ms_tensor_dtype(given->tensor) == MS_U8
                     && !ms_tensor_requires_grad(given->tensor) && given->keeps_dtype;
        if (!codes && !ms_dtype_is_float(ms_tensor_dtype(given->tensor)))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "fsdp: '%s' is of %s: parameters are f32, f16 or bf16",
                                  given->name, ms_dtype_name(ms_tensor_dtype(given->tensor)));
        if (given->coded && !may_be_coded(options, given))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "fsdp: '%s' travels as 8-bit floats, and computes in neither f32 "
                                  "nor bf16",
                                  given->name);
        if (ms_tensor_engine(given->tensor) != engine || !ms_tensor_is_leaf(given->tensor))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "fsdp: '%s' is not a leaf of this engine", given->name);
        if (has_owner(engine, given->tensor))
            return ms_engine_fail(engine, MS_ERROR_STATE,
                                  "fsdp: '%s' is sharded already: wrap a model once, or call "
                                  "unwrap() on the first",
                                  given->name);
        if (given->group && own && given->group != own->group)
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "fsdp: '%s' and '%s' are shared by two groups of ranks: a rank's "
                                  "parameters that not all ranks share have one group",
                                  own->name, given->name);
        if (given->group && !own) own = given;
        for (uint32_t j = 0; j < i; j++)
            if (parameters[j].tensor == given->tensor)
                return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                      "fsdp: '%s' (unit \"%s\") and '%s' (unit \"%s\") are one "
                                      "parameter, and a parameter belongs to one unit: wrap the "
                                      "modules that share it as one unit (wrap = { groups = ... })",
                                      parameters[j].name, options->units[parameters[j].unit].name,
                                      given->name, options->units[given->unit].name);
    }
    return MS_OK;
}

static ms_status copy_name(ms_context *context, const char *name, char **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(context, strlen(name) + 1, "a name", &memory);
    if (!status) *out = strcpy(memory, name);
    return status;
}

/* -------------------------------------------------------- flats of parameters */

/* A unit has one flat parameter for each dtype. Frozen parameters have their own, since they need
 * no memory for gradients; parameters of fewer ranks have their own, those that keep their dtype,
 * and those that travel as codes. The key orders them. */
static uint32_t key_of(const ms_fsdp_parameter *parameter)
{
    uint32_t kind =
        (parameter->coded ? 4 : 0) + (parameter->group ? 2 : 0) + (parameter->keeps_dtype ? 1 : 0);
    return (kind * MS_DTYPES + (uint32_t)ms_tensor_dtype(parameter->tensor)) * 2
           + (ms_tensor_requires_grad(parameter->tensor) ? 0 : 1);
}
enum { KEYS = MS_DTYPES * 16 };

static void choose_dtypes(const ms_fsdp_unit_options *unit, bool low_gradients, ms_flat_param *flat)
{
    bool own = flat->keeps_dtype;
    flat->computes = own || !unit->has_computes ? flat->dtype : unit->computes;
    flat->reduces = own || !unit->has_reduces ? flat->dtype : unit->reduces;
    flat->gradient_dtype = low_gradients ? flat->reduces : flat->dtype;
}

/* Appends the parameters of this unit and key, in their order in the list. */
static ms_status take_members(ms_fsdp *fsdp, const ms_fsdp_parameter *parameters, uint32_t count,
                              uint32_t unit, uint32_t key, ms_flat_param *flat)
{
    ms_status status = MS_OK;
    uint32_t trainable = 0, position;
    flat->members = &fsdp->members[fsdp->member_count];
    for (uint32_t i = 0; i < count && !status; i++) {
        const ms_fsdp_parameter *given = &parameters[i];
        position = trainable;
        trainable += ms_tensor_requires_grad(given->tensor);
        if (given->unit != unit || key_of(given) != key) continue;
        ms_member *member = &fsdp->members[fsdp->member_count];
        status = copy_name(ms_engine_context(fsdp->source.engine), given->name, &member->name);
        if (status) break;
        member->fsdp = fsdp;
        member->position = position;
        member->flat = flat;
        member->tensor = ms_tensor_retain(given->tensor);
        member->dims = ms_tensor_dims(given->tensor);
        memcpy(member->shape, ms_tensor_shape(given->tensor), member->dims * sizeof(int64_t));
        flat->dtype = ms_tensor_dtype(given->tensor);
        flat->keeps_dtype = given->keeps_dtype;
        flat->trainable = ms_tensor_requires_grad(given->tensor);
        flat->own = given->group != NULL;
        flat->coded = given->coded;
        if (!flat->shards)
            flat->shards = ms_group_retain(given->group ? given->group : fsdp->shards);
        flat->count++;
        fsdp->member_count++;
    }
    return status;
}

static ms_status make_unit(ms_fsdp *fsdp, const ms_fsdp_options *options,
                           const ms_fsdp_parameter *parameters, uint32_t count, uint32_t index)
{
    ms_unit *unit = &fsdp->units[index];
    unit->fsdp = fsdp;
    unit->index = index;
    unit->settings.reshard_forward = options->units[index].reshard_after_forward;
    unit->settings.reshard_backward = true;
    unit->settings.modules = options->units[index].modules ? options->units[index].modules : 1;
    unit->flats = &fsdp->flats[fsdp->flat_count];
    ms_status status =
        copy_name(ms_engine_context(fsdp->source.engine), options->units[index].name, &unit->name);
    for (uint32_t key = 0; key < KEYS && !status; key++) {
        ms_flat_param *flat = &fsdp->flats[fsdp->flat_count];
        flat->unit = unit;
        status = take_members(fsdp, parameters, count, index, key, flat);
        if (flat->count == 0) continue;
        choose_dtypes(&options->units[index], options->low_gradients, flat);
        unit->count++;
        fsdp->flat_count++;
        if (flat->trainable) unit->settings.trainable += flat->count;
        else unit->settings.frozen = true;
    }
    return status;
}

/* Buckets are numbered in the order in which backward comes to their units: the root last. */
static void number_buckets(ms_fsdp *fsdp)
{
    for (uint32_t u = fsdp->unit_count; u-- > 0;)
        for (uint32_t f = 0; f < fsdp->units[u].count; f++) {
            ms_flat_param *flat = &fsdp->units[u].flats[f];
            if (!flat->trainable) continue;
            flat->bucket.index = flat->bucket.place = fsdp->bucket_count;
            fsdp->buckets[fsdp->bucket_count++] = flat;
        }
}

/* The list of buckets, and the marks for their times. links: that the chain tells apart. */
static ms_status make_buckets(ms_fsdp *fsdp, uint32_t links)
{
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(fsdp->source.engine),
                    (fsdp->flat_count + 1) * sizeof(ms_flat_param *), "fsdp", &memory);
    if (status) return status;
    fsdp->buckets = memory;
    number_buckets(fsdp);
    status = ms_times_open(&fsdp->times, fsdp->group, fsdp->bucket_count + 1, 0, links);
    /* A forward and a backward; where computing is timed, each in two spans. */
    uint32_t spans =
        fsdp->planner ? 4 * (fsdp->flat_count + fsdp->unit_count) : 2 * fsdp->flat_count;
    return status
               ? status
               : ms_gathers_open(&fsdp->gather_times, fsdp->source.engine, spans, fsdp->unit_count);
}

static ms_status make_part(ms_fsdp *fsdp, uint32_t index)
{
    ms_member *member = &fsdp->members[index];
    if (!ms_flat_param_is_sharded(member->flat)) return MS_OK;
    return ms_part_new(ms_engine_context(fsdp->source.engine), member->name,
                       ms_unit_called(member->flat->unit), member->dims, member->shape,
                       &member->piece_of);
}

/* Memory last, so that an error before it leaves all parameters as they are; handles become pieces
 * when all of it is there. */
static ms_status make_flats(ms_fsdp *fsdp, uint32_t links)
{
    ms_status status = MS_OK;
    for (uint32_t f = 0; f < fsdp->flat_count && !status; f++) {
        ms_flat_param *flat = &fsdp->flats[f];
        ms_flat_param_lay_out(flat, fsdp->layout, ms_group_size(flat->shards),
                              ms_group_rank(flat->shards));
        status = ms_flat_param_make(flat);
        if (!status && flat->own && flat->trainable && fsdp->hooks.link_count > 0)
            status = ms_chain_check(fsdp->source.engine, flat->bucket.kind, fsdp->hooks.links,
                                    fsdp->hooks.link_count);
    }
    for (uint32_t i = 0; i < fsdp->member_count && !status; i++) status = make_part(fsdp, i);
    for (uint32_t i = 0; i < fsdp->member_count && !status; i++) {
        ms_member *member = &fsdp->members[i];
        if (!member->flat->trainable) continue;
        status = ms_tensor_on_accumulated(member->tensor, ms_member_on_gradient, member, NULL,
                                          &member->hook);
        if (!status) status = ms_leaf_set_sharded(member->tensor, true);
    }
    if (!status) status = make_buckets(fsdp, links);
    if (status) return status;
    for (uint32_t i = 0; i < fsdp->member_count; i++) {
        ms_member *member = &fsdp->members[i];
        ms_storage_mark_parameter(ms_tensor_storage(member->flat->shard), 0,
                                  ms_storage_bytes(ms_tensor_storage(member->flat->shard)));
        ms_tensor_set_grad(member->tensor, NULL);
        ms_member_show(member, false);
    }
    return MS_OK;
}

/* -------------------------------------------------------------------- making */

static ms_bucket_kind kind_of(const ms_fsdp *fsdp)
{
    if (ms_group_size(fsdp->shards) == 1) return MS_BUCKET_ALL_REDUCE;
    return ms_group_size(fsdp->replicas) == 1 ? MS_BUCKET_REDUCE_SCATTER : MS_BUCKET_HYBRID;
}

static ms_status take_options(ms_fsdp *fsdp, const ms_fsdp_options *options)
{
    ms_engine *engine = fsdp->source.engine;
    static const ms_link plain = { .options = { .op = MS_REDUCE_OP_AVG } };
    ms_status status = MS_OK;
    fsdp->layout = options->layout;
    fsdp->group = options->group;
    fsdp->divisor = ms_group_size(options->group);
    fsdp->shards = options->shards ? options->shards : options->group;
    fsdp->replicas = options->replicas;
    fsdp->near = options->near;
    if (!fsdp->replicas) status = ms_comm_alone(engine, &fsdp->replicas);
    if (status) fsdp->group = fsdp->shards = fsdp->near = NULL;
    if (status) return status;
    ms_group *held[] = { fsdp->group, fsdp->shards, fsdp->replicas, fsdp->near };
    for (size_t i = 0; i < sizeof held / sizeof *held; i++)
        if (held[i]) ms_group_retain(held[i]);
    fsdp->kind = kind_of(fsdp);
    fsdp->mode = options->prefetch;
    fsdp->forward_ahead = options->forward_ahead;
    fsdp->planner = fsdp->gather_times.computing = options->planner;
    fsdp->offload = options->offload;
    fsdp->same.find_unused = options->find_unused;
    fsdp->sync = fsdp->replica_sync = true;
    uint64_t bytes = options->max_in_flight_bytes ? options->max_in_flight_bytes : UINT64_MAX;
    uint32_t gathers = options->max_in_flight ? options->max_in_flight : 2,
             reductions = options->max_reductions ? options->max_reductions : 2;
    status = ms_inflight_new(engine, "gathers", gathers, bytes, &fsdp->memory.gathers);
    if (!status)
        status =
            ms_inflight_new(engine, "reductions", reductions, UINT64_MAX, &fsdp->memory.reductions);
    ms_fsdp_limit_static_memory(fsdp, gathers, reductions);
    fsdp->hooks.asks_order = options->hook != NULL;
    fsdp->hooks.whole_results = options->hook && options->hook_whole;
    fsdp->hooks.reduces_once = options->hook && options->hook_once;
    if (status || options->hook) return status;
    ms_link reduce = plain;
    reduce.kind = ms_link_find("reduce");
    uint32_t count = options->link_count ? options->link_count : 1;
    status = ms_chain_take(engine, fsdp->kind, options->link_count ? options->links : &reduce,
                           count, fsdp->hooks.links);
    if (!status) fsdp->hooks.link_count = count;
    for (uint32_t i = 0; i < fsdp->hooks.link_count; i++) {
        fsdp->hooks.asks_order |= ms_link_asks_order(&fsdp->hooks.links[i]);
        fsdp->hooks.whole_results |= ms_link_is_whole(&fsdp->hooks.links[i]);
        fsdp->hooks.reduces_once |= fsdp->hooks.links[i].kind->clips;
    }
    return status;
}

static ms_status make_parts(ms_fsdp *fsdp, const ms_fsdp_options *options,
                            const ms_fsdp_parameter *parameters, uint32_t count)
{
    ms_context *context = ms_engine_context(fsdp->source.engine);
    uint32_t units = options->unit_count;
    ms_status status = take_options(fsdp, options);
    if (!status)
        status = ms_allocate(context, count * sizeof(ms_member), "fsdp", (void **)&fsdp->members);
    if (!status)
        status =
            ms_allocate(context, count * sizeof(int32_t), "fsdp", (void **)&fsdp->same.brought);
    /* One more: the place of a flat parameter is taken before it is known to have members. */
    if (!status)
        status = ms_allocate(context, (count + 1) * sizeof(ms_flat_param), "fsdp",
                             (void **)&fsdp->flats);
    if (!status)
        status = ms_allocate(context, units * sizeof(ms_unit), "fsdp", (void **)&fsdp->units);
    for (uint32_t u = 0; u < units && !status; u++) {
        fsdp->unit_count++;
        status = make_unit(fsdp, options, parameters, count, u);
    }
    if (!status) status = ms_lockstep_open(fsdp);
    uint32_t links = options->hook ? options->hook_links : fsdp->hooks.link_count;
    return status ? status : make_flats(fsdp, links);
}

/* The model joins the engine's list only when nothing can fail any more. */
ms_status ms_fsdp_new(ms_engine *engine, const ms_fsdp_options *options,
                      const ms_fsdp_parameter *parameters, uint32_t count, ms_fsdp **out)
{
    void *memory = NULL;
    ms_status status = check_parameters(engine, options, parameters, count);
    if (!status) status = ms_allocate(ms_engine_context(engine), sizeof(ms_fsdp), "fsdp", &memory);
    if (status) return status;
    ms_fsdp *fsdp = memory;
    fsdp->source.kind = &ms_fsdp_source_kind;
    fsdp->source.engine = engine;
    fsdp->references = 1;
    status = make_parts(fsdp, options, parameters, count);
    if (status) {
        free_parts(fsdp);
        ms_fsdp_let_go(fsdp);
        return status;
    }
    fsdp->hooks.hook = options->hook;
    fsdp->hooks.hook_user = options->hook_user;
    fsdp->hooks.hook_free = options->hook_free;
    ms_gradient_source_enter(&fsdp->source);
    *out = fsdp;
    return MS_OK;
}

/* -------------------------------------------------------- setting and asking */

bool ms_fsdp_set_sync(ms_fsdp *fsdp, bool yes)
{
    bool before = fsdp->sync;
    fsdp->sync = yes;
    return before;
}

void ms_fsdp_set_full(ms_fsdp *fsdp, bool yes) { fsdp->full = yes; }
bool ms_fsdp_is_full(const ms_fsdp *fsdp, uint32_t unit) { return fsdp->units[unit].full; }

bool ms_fsdp_set_replica_sync(ms_fsdp *fsdp, bool yes)
{
    bool before = fsdp->replica_sync;
    fsdp->replica_sync = yes;
    return before;
}

void ms_fsdp_set_reshard(ms_fsdp *fsdp, uint32_t unit, bool after_forward, bool after_backward)
{
    fsdp->units[unit].settings.reshard_forward = after_forward;
    fsdp->units[unit].settings.reshard_backward = after_backward;
}

double ms_fsdp_divisor(const ms_fsdp *fsdp) { return fsdp->divisor; }
void ms_fsdp_set_divisor(ms_fsdp *fsdp, double divisor) { fsdp->divisor = divisor; }

void ms_fsdp_set_unshard_in_backward(ms_fsdp *fsdp, uint32_t unit, bool yes)
{
    fsdp->units[unit].settings.stay_sharded = !yes;
}

ms_status ms_fsdp_unshard(ms_fsdp *fsdp, uint32_t index, ms_point *ready)
{
    ms_unit *unit = &fsdp->units[index];
    /* Where ranks use different units, they may have gathered different ones. */
    ms_status status = ms_lockstep_is_on(fsdp) ? ms_unit_gather_again(unit) : ms_unit_gather(unit);
    *ready = (ms_point){ 0 };
    /* Gathers of one unit are on one stream: the last flat parameter's is the last. */
    for (uint32_t f = 0; f < unit->count; f++)
        if (unit->flats[f].gathered.seq > ready->seq) *ready = unit->flats[f].gathered;
    return status;
}

ms_status ms_fsdp_reshard(ms_fsdp *fsdp, uint32_t index)
{
    ms_unit *unit = &fsdp->units[index];
    if (unit->place == MS_UNIT_IN_USE)
        return ms_engine_fail(fsdp->source.engine, MS_ERROR_STATE,
                              "fsdp: unit \"%s\" is in use: reshard it between its forward and its "
                              "backward, or between passes",
                              ms_unit_called(unit));
    return ms_unit_reshard(unit);
}

bool ms_fsdp_piece_get(const ms_fsdp *fsdp, uint32_t index, ms_fsdp_piece *out)
{
    if (index >= fsdp->member_count) return false;
    const ms_member *member = &fsdp->members[index];
    *out = (ms_fsdp_piece){ .tensor = member->tensor,
                            .name = member->name,
                            .unit = member->flat->unit->index,
                            .dims = member->dims,
                            .shape = member->shape,
                            .first = member->first,
                            .count = member->length };
    return true;
}

void ms_fsdp_piece_of_rank(const ms_fsdp *fsdp, uint32_t index, uint32_t rank, int64_t *first,
                           int64_t *count)
{
    ms_flat_param_cut(&fsdp->members[index], rank, first, count);
}

ms_status ms_fsdp_piece_tensor(ms_fsdp *fsdp, uint32_t index, ms_tensor **out)
{
    const ms_member *member = &fsdp->members[index];
    int64_t stride = 1;
    return ms_tensor_window(member->flat->shard, 1, &member->length, &stride,
                            member->length ? member->at : 0, out);
}

void ms_fsdp_show_whole(ms_fsdp *fsdp, bool yes)
{
    for (uint32_t i = 0; i < fsdp->member_count; i++)
        if (fsdp->members[i].flat->unit->place != MS_UNIT_IN_USE)
            ms_member_show(&fsdp->members[i], yes);
}

bool ms_fsdp_unit_get(const ms_fsdp *fsdp, uint32_t index, ms_fsdp_unit_info *out)
{
    if (index >= fsdp->unit_count) return false;
    const ms_unit *unit = &fsdp->units[index];
    *out = (ms_fsdp_unit_info){ .name = unit->name,
                                .gathered_bytes = ms_unit_whole_bytes(unit),
                                .gathered = unit->place != MS_UNIT_SHARDED };
    for (uint32_t f = 0; f < unit->count; f++) {
        out->bytes += ms_flat_param_bytes(&unit->flats[f]);
        out->shard_bytes += ms_flat_param_shard_bytes(&unit->flats[f]);
    }
    return true;
}
