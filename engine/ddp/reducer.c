/* reducer.c: making and freeing a reducer, its buckets on request, and what can be asked of it. */
#include "ddp/buckets.h"

#include <string.h>

#include "ddp/layout.h"
#include "ddp/pass.h"
#include "ddp/unused.h"

/* -------------------------------------------------- as a gradient source */

static const ms_reducer *reducer_of(const ms_gradient_source *source)
{
    return (const ms_reducer *)source;
}

static uint32_t buckets_of(const ms_gradient_source *source)
{
    return reducer_of(source)->buckets.count;
}

/* It may change with the next forward, when buckets are rebuilt. */
static const ms_bucket *bucket_of(const ms_gradient_source *source, uint32_t index)
{
    const ms_bucket_list *buckets = &reducer_of(source)->buckets;
    return index < buckets->count ? &buckets->items[index].bucket : NULL;
}

/* Both points are of the last launch; seq 0 means that there is nothing to wait for. */
static void ready(const ms_gradient_source *source, uint32_t index, ms_point points[2])
{
    memcpy(points, reducer_of(source)->buckets.items[index].ready, 2 * sizeof *points);
}

static uint64_t passes_of(const ms_gradient_source *source)
{
    return reducer_of(source)->times.passes;
}

/* Both numbers depend only on passes and rebuilds that all ranks share, so planners on all ranks
 * decide alike by them. */
static uint64_t layout_of(const ms_gradient_source *source, uint64_t *passes)
{
    const ms_reducer *reducer = reducer_of(source);
    *passes = reducer->times.passes - reducer->made_at;
    return reducer->layout;
}

static bool is_rebuilt(const ms_gradient_source *source) { return reducer_of(source)->rebuilt; }

static bool is_used(const ms_gradient_source *source, uint32_t position, bool *known)
{
    return ms_reducer_is_used(reducer_of(source), position, known);
}

static ms_pass_stats stats_of(ms_gradient_source *source)
{
    return ms_times_stats(&((ms_reducer *)source)->times);
}

/* 0 where the chain has one link: all costs are its own. */
static uint32_t links_of(const ms_gradient_source *source)
{
    return ms_link_costs_links(reducer_of(source)->times.costs);
}

static ms_link_stats link_stats(const ms_gradient_source *source, uint32_t link)
{
    return ms_times_link(&reducer_of(source)->times, link);
}

/* Times of another layout are not given: bucket `index` had other parameters then. */
static bool bucket_times(const ms_gradient_source *source, uint32_t index, ms_bucket_times *out)
{
    const ms_reducer *reducer = reducer_of(source);
    if (index < reducer->buckets.count)
        return ms_times_bucket(&reducer->times, reducer->layout, index, out);
    *out = (ms_bucket_times){ 0 };
    return false;
}

/* It waits for this rank's device; on other ranks the same pass has ended when their own call
 * returns. */
static ms_status await_times(ms_gradient_source *source)
{
    return ms_times_await(&((ms_reducer *)source)->times);
}

/* A step that ends without a reduced pass (accumulation in no_sync) has no time of its own. */
static ms_status step_end(ms_gradient_source *source)
{
    ms_reducer *reducer = (ms_reducer *)source;
    return ms_times_step_end(&reducer->times, reducer->phase == MS_REDUCER_REDUCED);
}

static void destroy(ms_gradient_source *source);

static const ms_source_kind kind = {
    .slot = MS_SLOT_DDP,
    .buckets = buckets_of,
    .bucket = bucket_of,
    .ready = ready,
    .passes = passes_of,
    .layout = layout_of,
    .is_rebuilt = is_rebuilt,
    .is_used = is_used,
    .stats = stats_of,
    .links = links_of,
    .link_stats = link_stats,
    .bucket_times = bucket_times,
    .await_times = await_times,
    .step_end = step_end,
    .destroy = destroy,
};

ms_gradient_source *ms_reducer_source(ms_reducer *reducer) { return &reducer->source; }

/* The first bucket is small, so that communication begins early in backward; the others are large
 * enough to use the bandwidth. These are the limits of PyTorch's DDP. The last one holds for all
 * further buckets. */
static const uint64_t default_limits[] = { 1u << 20, 25u << 20 };

/* ------------------------------------------------------- making and freeing */

/* Frees a reducer, also one that make_parts has left half-made: fields that were not reached are 0.
 * Gradients stay with their parameters. They remain views of the bucket's storage, which lives as
 * long as they do. Hooks go first: from then on no gradient calls a reducer that is being freed.
 * The homes go with them, so that backward makes gradients of its own again. */
static void free_parts(ms_reducer *reducer)
{
    ms_context *context = ms_engine_context(reducer->source.engine);
    for (uint32_t i = 0; reducer->parameters && i < reducer->count; i++) {
        ms_ddp_parameter *parameter = &reducer->parameters[i];
        /* Not reached by take_parameters. */
        if (!parameter->tensor) continue;
        if (parameter->hook) {
            ms_tensor_remove_hook(parameter->tensor, parameter->hook);
            ms_tensor_set_grad_home(parameter->tensor, NULL);
        }
        ms_tensor_release(parameter->tensor);
        ms_release(context, parameter->name);
    }
    if (reducer->mark) reducer->mark->reducer = NULL;
    ms_local_mark_drop(reducer->mark);
    ms_unused_close(reducer);
    ms_gradient_source_set_on_reduced(&reducer->source, NULL, NULL, NULL);
    ms_buckets_free(reducer, &reducer->buckets);
    ms_chain_drop(reducer->hooks.links, reducer->hooks.link_count);
    ms_times_close(&reducer->times);
    ms_group_release(reducer->group);
    ms_release(context, reducer->parameters);
    ms_release(context, reducer->limits);
    ms_release(context, reducer->pass.arrival);
    ms_release(context, reducer);
}

/* The application's hook is told before the reducer's parts go, since it may hold tensors of the
 * engine. */
static void destroy(ms_gradient_source *source)
{
    ms_reducer *reducer = (ms_reducer *)source;
    if (reducer->hooks.hook_free) reducer->hooks.hook_free(reducer->hooks.hook_user);
    free_parts(reducer);
}

void ms_reducer_free(ms_reducer *reducer)
{
    if (reducer) ms_gradient_source_free(&reducer->source);
}

/* The reducer that has this parameter already, or NULL. Two reducers on one parameter would both
 * set its gradient's home. A walk over all reducers and parameters: models are wrapped once. */
static const ms_reducer *owner_of(ms_engine *engine, const ms_tensor *tensor)
{
    for (const ms_gradient_source *source = ms_gradient_sources(engine, MS_SLOT_DDP); source;
         source = source->next) {
        const ms_reducer *reducer = (const ms_reducer *)source;
        for (uint32_t i = 0; i < reducer->count; i++)
            if (reducer->parameters[i].tensor == tensor) return reducer;
    }
    return NULL;
}

/* A parameter that is given twice would be counted twice in its bucket, and the bucket would never
 * become complete. */
static ms_status check_parameters(ms_engine *engine, const ms_reducer_parameter *parameters,
                                  uint32_t count)
{
    if (count == 0)
        return ms_engine_fail(
            engine, MS_ERROR_ARGUMENT,
            "ddp: no parameter of the model requires a gradient: there is nothing to reduce");
    for (uint32_t i = 0; i < count; i++) {
        const ms_tensor *tensor = parameters[i].tensor;
        if (ms_tensor_engine(tensor) != engine || !ms_tensor_is_leaf(tensor)
            || !ms_tensor_requires_grad(tensor))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "ddp: '%s' is not a leaf of this engine that requires a gradient",
                                  parameters[i].name);
        if (owner_of(engine, tensor))
            return ms_engine_fail(engine, MS_ERROR_STATE,
                                  "ddp: '%s' belongs to a ddp model already: call unwrap() on that "
                                  "one first, and wrap a model once",
                                  parameters[i].name);
        for (uint32_t j = 0; j < i; j++)
            if (parameters[j].tensor == tensor)
                return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                      "ddp: '%s' and '%s' are one parameter: give it once",
                                      parameters[j].name, parameters[i].name);
    }
    return MS_OK;
}

/* Copies names and retains tensors first, and installs the gradient hooks last: a hook may only see
 * parameters that are complete. free_parts undoes a failure at any point. The hooks' user is the
 * parameter's address, so the array must have its final place by now. */
static ms_status take_parameters(ms_reducer *reducer, const ms_reducer_parameter *parameters)
{
    ms_context *context = ms_engine_context(reducer->source.engine);
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < reducer->count && !status; i++) {
        ms_ddp_parameter *parameter = &reducer->parameters[i];
        void *name = NULL;
        status = ms_allocate(context, strlen(parameters[i].name) + 1, "a name", &name);
        if (status) continue;
        parameter->name = strcpy(name, parameters[i].name);
        parameter->reducer = reducer;
        parameter->position = i;
        parameter->tensor = ms_tensor_retain(parameters[i].tensor);
    }
    for (uint32_t i = 0; i < reducer->count && !status; i++)
        status =
            ms_tensor_on_accumulated(reducer->parameters[i].tensor, ms_reducer_on_gradient,
                                     &reducer->parameters[i], NULL, &reducer->parameters[i].hook);
    return status;
}

/* Copies the size limits. A limit of 0 bytes is refused as a mistake: it would put every gradient
 * into a bucket of its own. */
static ms_status take_limits(ms_reducer *reducer, const ms_reducer_options *options)
{
    const uint64_t *limits = options->cap_bytes ? options->cap_bytes : default_limits;
    uint32_t count = options->cap_bytes ? options->cap_count : 2;
    if (count == 0 || count > 1024)
        return ms_engine_fail(reducer->source.engine, MS_ERROR_ARGUMENT,
                              "ddp: 1 to 1024 sizes of buckets, not %u", count);
    for (uint32_t i = 0; i < count; i++)
        if (limits[i] == 0)
            return ms_engine_fail(reducer->source.engine, MS_ERROR_ARGUMENT,
                                  "ddp: size %u of the buckets is 0 bytes", i + 1);
    void *memory = NULL;
    ms_status status = ms_allocate(ms_engine_context(reducer->source.engine),
                                   count * sizeof *limits, "limits", &memory);
    if (status) return status;
    reducer->limits = memcpy(memory, limits, count * sizeof *limits);
    reducer->limit_count = count;
    return MS_OK;
}

/* The chain of delayed parameters, and the chain of all other buckets unless a hook takes its
 * place. The delayed chain has no state, so it is checked but not taken (ms_chain_take would retain
 * states). */
static ms_status take_chains(ms_reducer *reducer, const ms_reducer_options *options)
{
    const ms_link_kind *reduce = ms_link_find("reduce");
    /* A mean in place, the chain of a model without hooks. */
    const ms_link plain = { .kind = reduce, .options = reduce->defaults };
    if (options->delayed_dtype)
        reducer->hooks.plain[reducer->hooks.plain_count++] =
            (ms_link){ .kind = ms_link_find("cast"),
                       .options = { .dtype = *options->delayed_dtype } };
    reducer->hooks.plain[reducer->hooks.plain_count++] = plain;
    ms_status status = ms_chain_check(reducer->source.engine, MS_BUCKET_ALL_REDUCE,
                                      reducer->hooks.plain, reducer->hooks.plain_count);
    if (status || options->hook) return status;
    const ms_link *links = options->link_count ? options->links : &plain;
    uint32_t count = options->link_count ? options->link_count : 1;
    status = ms_chain_take(reducer->source.engine, MS_BUCKET_ALL_REDUCE, links, count,
                           reducer->hooks.links);
    if (!status) reducer->hooks.link_count = count;
    return status;
}

/* A reducer without parts. It logs the order of gradients from the start, since its first buckets
 * are to be rebuilt by that order; with delayed parameters only, there is nothing to rebuild. */
static ms_status make_empty(ms_engine *engine, const ms_reducer_options *options, uint32_t count,
                            ms_reducer **out)
{
    ms_context *context = ms_engine_context(engine);
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_reducer), "ddp", &memory);
    if (status) return status;
    ms_reducer *reducer = *out = memory;
    *reducer = (ms_reducer){ .source = { .kind = &kind, .engine = engine },
                             .group = ms_group_retain(options->group),
                             .count = count,
                             .delayed = options->delayed,
                             .divisor = ms_group_size(options->group),
                             .settings = { .find_unused = options->find_unused,
                                           .static_graph = options->static_graph,
                                           .planned = options->planned },
                             .pass = { .logging = options->delayed < count } };
    return MS_OK;
}

/* What was made before a failure is released by free_parts. The first buckets need the parameters
 * and the limits. */
static ms_status make_parts(ms_reducer *reducer, const ms_reducer_options *options,
                            const ms_reducer_parameter *parameters)
{
    ms_context *context = ms_engine_context(reducer->source.engine);
    uint32_t count = reducer->count;
    ms_status status = ms_allocate(context, count * sizeof(ms_ddp_parameter), "ddp",
                                   (void **)&reducer->parameters);
    if (!status)
        status =
            ms_allocate(context, count * sizeof(uint32_t), "ddp", (void **)&reducer->pass.arrival);
    if (!status) status = take_limits(reducer, options);
    if (!status) status = take_chains(reducer, options);
    if (!status) status = take_parameters(reducer, parameters);
    if (!status) status = ms_reducer_first_buckets(reducer);
    if (!status)
        status = ms_times_open(&reducer->times, reducer->group, count,
                               options->planned ? count - options->delayed : 0,
                               options->hook ? options->hook_links : options->link_count);
    return status ? status : ms_unused_open(reducer);
}

/* The reducer joins the engine's list only when nothing can fail any more. */
ms_status ms_reducer_new(ms_engine *engine, const ms_reducer_options *options,
                         const ms_reducer_parameter *parameters, uint32_t count, ms_reducer **out)
{
    ms_reducer *reducer = NULL;
    ms_status status = check_parameters(engine, parameters, count);
    if (status) return status;
    if (options->delayed > count)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "ddp: %u delayed parameters of %u",
                              options->delayed, count);
    status = make_empty(engine, options, count, &reducer);
    if (status) return status;
    status = make_parts(reducer, options, parameters);
    if (status) {
        free_parts(reducer);
        return status;
    }
    /* Only now: a caller whose call fails keeps hook_user. */
    reducer->hooks.hook = options->hook;
    reducer->hooks.hook_user = options->hook_user;
    reducer->hooks.hook_free = options->hook_free;
    ms_gradient_source_enter(&reducer->source);
    *out = reducer;
    return MS_OK;
}

/* ------------------------------------------------------- asking and setting */

/* It changes no phase: a forward decides whether its backward reduces, and no_sync only makes the
 * other case an error. */
bool ms_reducer_set_no_sync(ms_reducer *reducer, bool inside)
{
    bool before = reducer->pass.no_sync;
    reducer->pass.no_sync = inside;
    return before;
}

/* Logging starts over: gradients that were logged before would mix two orders. */
void ms_reducer_rebuild(ms_reducer *reducer)
{
    reducer->pass.logging = true;
    reducer->pass.arrived = 0;
}

/* Unlike ms_reducer_rebuild it keeps what was logged, so that a planner can ask for the last
 * record. */
void ms_reducer_record(ms_reducer *reducer, bool on) { reducer->pass.logging = on; }

/* What follows reads or sets a field. Everything belongs to the host thread, so there is nothing to
 * lock. */
ms_group *ms_reducer_group(const ms_reducer *reducer) { return reducer->group; }
uint32_t ms_reducer_divisor(const ms_reducer *reducer) { return reducer->divisor; }
void ms_reducer_set_divisor(ms_reducer *reducer, uint32_t divisor) { reducer->divisor = divisor; }
/* A record counts only if every parameter has arrived: a pass that failed, or one in which a static
 * graph was counted, leaves it incomplete. */
uint32_t ms_reducer_arrivals(ms_reducer *reducer, uint32_t *order, uint64_t *ns)
{
    uint32_t count = reducer->count - reducer->delayed;
    ms_times_stats(&reducer->times); /* takes over times that have come in since */
    if (!reducer->settings.planned || reducer->pass.arrived != count) return 0;
    for (uint32_t i = 0; i < count; i++) {
        order[i] = reducer->pass.arrival[i];
        ns[i] = reducer->times.arrived_ns[i];
    }
    return count;
}
