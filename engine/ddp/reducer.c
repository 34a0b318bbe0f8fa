/* reducer.c: making and freeing a reducer, its buckets on request, and what can be asked of it. */
#include "ddp/buckets.h"

#include <string.h>

#include "ddp/layout.h"
#include "ddp/pass.h"
#include "ddp/unused.h"

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
    ms_context *context = ms_engine_context(reducer->engine);
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
    ms_unused_close(reducer);
    ms_reducer_set_on_reduced(reducer, NULL, NULL, NULL);
    ms_buckets_free(reducer, &reducer->buckets);
    ms_chain_drop(reducer->hooks.links, reducer->hooks.link_count);
    ms_times_close(&reducer->times);
    ms_group_release(reducer->group);
    ms_release(context, reducer->parameters);
    ms_release(context, reducer->limits);
    ms_release(context, reducer->pass.arrival);
    ms_release(context, reducer);
}

/* The engine's destructor of the slot: all reducers that the application has not freed. The
 * application's hook is told before the reducer's parts go, since it may hold tensors of the
 * engine. */
static void free_all(ms_engine *engine, void *first)
{
    (void)engine;
    for (ms_reducer *reducer = first, *next; reducer; reducer = next) {
        next = reducer->next;
        if (reducer->hooks.hook_free) reducer->hooks.hook_free(reducer->hooks.hook_user);
        free_parts(reducer);
    }
}

/* The reducer leaves the engine's list before its parts are freed, so that nothing finds one that
 * is half freed. The slot is emptied with the last reducer, so that no destroy function is called
 * with NULL. */
void ms_reducer_free(ms_reducer *reducer)
{
    if (!reducer) return;
    ms_engine *engine = reducer->engine;
    ms_reducer *first = ms_engine_get(engine, MS_SLOT_DDP), **link = &first;
    while (*link && *link != reducer) link = &(*link)->next;
    if (*link) *link = reducer->next;
    if (reducer->hooks.hook_free) reducer->hooks.hook_free(reducer->hooks.hook_user);
    free_parts(reducer);
    ms_engine_set(engine, MS_SLOT_DDP, first, first ? free_all : NULL);
}

/* A finalizer may call it, so it only sets a flag. */
void ms_reducer_abandon(ms_reducer *reducer) { reducer->abandoned = true; }

/* `next` is read before the reducer is freed. */
void ms_reducer_sweep(ms_engine *engine)
{
    for (ms_reducer *reducer = ms_engine_get(engine, MS_SLOT_DDP), *next; reducer; reducer = next) {
        next = reducer->next;
        if (reducer->abandoned) ms_reducer_free(reducer);
    }
}

/* The reducer that has this parameter already, or NULL. Two reducers on one parameter would both
 * set its gradient's home. A walk over all reducers and parameters: models are wrapped once. */
static const ms_reducer *owner_of(ms_engine *engine, const ms_tensor *tensor)
{
    for (const ms_reducer *reducer = ms_engine_get(engine, MS_SLOT_DDP); reducer;
         reducer = reducer->next)
        for (uint32_t i = 0; i < reducer->count; i++)
            if (reducer->parameters[i].tensor == tensor) return reducer;
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
    ms_context *context = ms_engine_context(reducer->engine);
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
        return ms_engine_fail(reducer->engine, MS_ERROR_ARGUMENT,
                              "ddp: 1 to 1024 sizes of buckets, not %u", count);
    for (uint32_t i = 0; i < count; i++)
        if (limits[i] == 0)
            return ms_engine_fail(reducer->engine, MS_ERROR_ARGUMENT,
                                  "ddp: size %u of the buckets is 0 bytes", i + 1);
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(reducer->engine), count * sizeof *limits, "limits", &memory);
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
    ms_status status = ms_chain_check(reducer->engine, MS_BUCKET_ALL_REDUCE, reducer->hooks.plain,
                                      reducer->hooks.plain_count);
    if (status || options->hook) return status;
    const ms_link *links = options->link_count ? options->links : &plain;
    uint32_t count = options->link_count ? options->link_count : 1;
    status =
        ms_chain_take(reducer->engine, MS_BUCKET_ALL_REDUCE, links, count, reducer->hooks.links);
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
    *reducer = (ms_reducer){ .engine = engine,
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
    ms_context *context = ms_engine_context(reducer->engine);
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
    reducer->next = ms_engine_get(engine, MS_SLOT_DDP);
    ms_engine_set(engine, MS_SLOT_DDP, reducer, free_all);
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

/* The former user is freed before the new one is stored, also where both are the same function. */
void ms_reducer_set_on_reduced(ms_reducer *reducer, ms_reduced_function f, void *user,
                               void (*free_user)(void *user))
{
    if (reducer->hooks.on_reduced_free)
        reducer->hooks.on_reduced_free(reducer->hooks.on_reduced_user);
    reducer->hooks.on_reduced = f;
    reducer->hooks.on_reduced_user = user;
    reducer->hooks.on_reduced_free = free_user;
}

/* Both points are of the last launch; seq 0 means that there is nothing to wait for. */
void ms_reducer_ready(const ms_reducer *reducer, uint32_t index, ms_point ready[2])
{
    memcpy(ready, reducer->buckets.items[index].ready, 2 * sizeof *ready);
}

/* Unlike ms_reducer_rebuild it keeps what was logged, so that a planner can ask for the last
 * record. */
void ms_reducer_record(ms_reducer *reducer, bool on) { reducer->pass.logging = on; }

/* What follows reads or sets a field. Everything belongs to the host thread, so there is nothing to
 * lock. */
ms_group *ms_reducer_group(const ms_reducer *reducer) { return reducer->group; }
uint32_t ms_reducer_divisor(const ms_reducer *reducer) { return reducer->divisor; }
void ms_reducer_set_divisor(ms_reducer *reducer, uint32_t divisor) { reducer->divisor = divisor; }
uint32_t ms_reducer_buckets(const ms_reducer *reducer) { return reducer->buckets.count; }
/* It may change with the next forward, when buckets are rebuilt. */
const ms_bucket *ms_reducer_bucket(const ms_reducer *reducer, uint32_t index)
{
    return index < reducer->buckets.count ? &reducer->buckets.items[index].bucket : NULL;
}
uint64_t ms_reducer_iterations(const ms_reducer *reducer) { return reducer->times.passes; }
bool ms_reducer_is_rebuilt(const ms_reducer *reducer) { return reducer->rebuilt; }
/* It stays after the job's end, for stats and reports. */
const char *ms_reducer_error(const ms_reducer *reducer)
{
    return reducer->error[0] ? reducer->error : NULL;
}

/* Both numbers depend only on passes and rebuilds that all ranks share, so planners on all ranks
 * decide alike by them. */
uint64_t ms_reducer_layout(const ms_reducer *reducer, uint64_t *passes)
{
    *passes = reducer->times.passes - reducer->made_at;
    return reducer->layout;
}

/* -------------------------------------------------------------------- times */

/* A step that ends without a reduced pass (accumulation in no_sync) has no time of its own. */
ms_status ms_reducer_step_end(ms_reducer *reducer)
{
    return ms_times_step_end(&reducer->times, reducer->phase == MS_REDUCER_REDUCED);
}

/* It waits for this rank's device; on other ranks the same pass has ended when their own call
 * returns. */
ms_status ms_reducer_await_times(ms_reducer *reducer) { return ms_times_await(&reducer->times); }

ms_pass_stats ms_reducer_stats(ms_reducer *reducer) { return ms_times_stats(&reducer->times); }

/* 0 where the chain has one link: all costs are its own. */
uint32_t ms_reducer_links(const ms_reducer *reducer)
{
    return ms_link_costs_links(reducer->times.costs);
}

ms_link_stats ms_reducer_link_stats(const ms_reducer *reducer, uint32_t link)
{
    return ms_times_link(&reducer->times, link);
}

/* Times of another layout are not given: bucket `index` had other parameters then. */
bool ms_reducer_bucket_times(const ms_reducer *reducer, uint32_t index, ms_bucket_times *out)
{
    if (index < reducer->buckets.count)
        return ms_times_bucket(&reducer->times, reducer->layout, index, out);
    *out = (ms_bucket_times){ 0 };
    return false;
}

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
