/* reducer.c: counts gradients as they come, launches buckets in order, and makes backward's end
 * wait for the results. */
#include "ddp/reducer.h"

#include <stdio.h>
#include <string.h>

#include "tensor/copy.h"

static const uint64_t default_limits[] = { 1u << 20, 25u << 20 };

/* ------------------------------------------------------------------- errors */

/* The names of parameters without gradient, the first few. */
static ms_status missing_gradients(ms_reducer *reducer)
{
    char names[400] = "";
    uint32_t missing = 0;
    size_t used = 0;
    for (uint32_t i = 0; i < reducer->count; i++) {
        if (reducer->owners[i].ready || missing++ >= 3) continue;
        used += (size_t)snprintf(names + used, sizeof names - used, "%s'%.100s'", used ? ", " : "",
                                 reducer->owners[i].name);
    }
    if (missing > 3) snprintf(names + used, sizeof names - used, " and %u more", missing - 3);
    if (reducer->static_graph)
        return ms_engine_fail(reducer->engine, MS_ERROR_STATE,
                              "ddp: static_graph: the graph changed: in the last backward fewer "
                              "gradients than in the first iteration came for %s",
                              names);
    return ms_engine_fail(reducer->engine, MS_ERROR_STATE,
                          "ddp: in the last backward no gradient came for %s, so that %s never "
                          "reduced: the loss must depend on every parameter that "
                          "requires a gradient (ddp's option find_unused = true allows others; or "
                          "requires_grad_(false), before ddp, on what is never used)",
                          names, missing > 1 ? "their buckets were" : "its bucket was");
}

static ms_status not_expected(const ms_slot_owner *owner)
{
    ms_engine *engine = owner->reducer->engine;
    if (owner->reducer->phase == MS_REDUCER_IDLE)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "ddp: a gradient of '%s' came, but there was no forward of the ddp "
                              "model: call what ddp returned, not the module inside",
                              owner->name);
    if (owner->absent)
        return ms_engine_fail(engine, MS_ERROR_STATE,
                              "ddp: find_unused: '%s' got a gradient, but the outputs of the "
                              "forward do not depend on it: it was used outside of the ddp model",
                              owner->name);
    return ms_engine_fail(
        engine, MS_ERROR_STATE,
        "ddp: '%s' got its gradient twice behind one forward: backward ran a second time "
        "(retain_graph), or the forward was that of the module inside instead "
        "of the ddp model; passes whose gradients are to add up belong into no_sync or accumulate",
        owner->name);
}

/* New buckets could not be made after the old ones had made room for them. */
static ms_status no_buckets(const ms_reducer *reducer)
{
    return ms_engine_fail(
        reducer->engine, MS_ERROR_STATE,
        "ddp: the model has no gradient buckets, because the last change of its buckets failed: "
        "assign buckets again, or unwrap the model and wrap it anew");
}

/* An error that this rank's reduction met ends the job, with its reason for everyone. */
ms_status ms_reducer_end_job(ms_reducer *reducer, ms_status status)
{
    const ms_error *error = ms_engine_error(reducer->engine);
    reducer->phase = MS_REDUCER_REDUCED;
    snprintf(reducer->error, sizeof reducer->error, "%s", error->message);
    ms_comm_abort(reducer->engine, error);
    return status;
}

/* ---------------------------------------------------------------- launching */

/* The stream goes on behind all that reads or writes this memory. */
static ms_status wait_for_uses(ms_stream *stream, const ms_tensor *tensor)
{
    ms_point points[MS_STREAMS_MAX];
    const ms_storage *storage = ms_tensor_storage(tensor);
    uint32_t count = ms_storage_users(storage, 0, ms_storage_bytes(storage), points);
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) status = ms_stream_wait(stream, points[i]);
    return status;
}

static bool is_same_memory(const ms_tensor *a, const ms_tensor *b)
{
    return ms_tensor_storage(a) == ms_tensor_storage(b)
           && ms_tensor_offset(a) == ms_tensor_offset(b)
           && ms_tensor_count(a) == ms_tensor_count(b);
}

/* Delayed parameters pass no hook, and what they cost is no link's. */
static ms_status reduce_plainly(ms_reducer *reducer, ms_bucket *bucket, ms_tensor **result)
{
    bucket->account = NULL;
    return ms_chain_run(reducer->plain, reducer->plain_count, bucket, result);
}

/* With the communication stream current: runs the hook and leaves its result in the bucket's
 * memory. */
static ms_status run_hook(ms_reducer *reducer, ms_bucket_state *item)
{
    ms_bucket *bucket = &item->bucket;
    ms_tensor *result = NULL;
    ms_stream *stream = ms_engine_current(reducer->engine);
    item->ready[1] = (ms_point){ 0 };
    bucket->divisor = reducer->divisor;
    ms_status status;
    if (item->plain) status = reduce_plainly(reducer, bucket, &result);
    else if (reducer->hook)
        status = reducer->hook(reducer->hook_user, bucket, &result, &item->ready[1]);
    else status = ms_chain_run(reducer->links, reducer->link_count, bucket, &result);
    ms_bucket_set_buffer(bucket, bucket->flat);
    if (!status) status = ms_bucket_check_result(bucket, NULL, result);
    if (!status && !is_same_memory(result, bucket->flat)) {
        status = ms_stream_wait(stream, item->ready[1]);
        if (!status) status = ms_copy_into(reducer->engine, result, bucket->flat);
    }
    ms_tensor_release(result);
    return status;
}

static ms_status launch(ms_reducer *reducer, ms_bucket_state *item)
{
    ms_stream *stream = NULL;
    ms_status status = ms_group_stream(reducer->group, 1, &stream);
    if (!status) status = wait_for_uses(stream, item->bucket.flat);
    if (status) return status;
    ms_stream *before = ms_engine_set_current(reducer->engine, stream);
    ms_traffic traffic = ms_times_traffic(reducer);
    status = ms_times_reduction(reducer, item->bucket.index, false, traffic);
    if (!status) status = run_hook(reducer, item);
    if (!status) status = ms_times_reduction(reducer, item->bucket.index, true, traffic);
    item->ready[0] = ms_stream_last(stream);
    ms_engine_set_current(reducer->engine, before);
    return !status && reducer->on_reduced && !reducer->shadow
               ? reducer->on_reduced(reducer->on_reduced_user, item->bucket.index)
               : status;
}

/* What comes behind this backward sees reduced gradients. */
static ms_status finish(ms_reducer *reducer)
{
    ms_stream *current = ms_engine_current(reducer->engine);
    ms_status status = ms_times_note(reducer, MS_AT_WAIT);
    for (uint32_t b = 0; b < reducer->buckets.count; b++)
        for (uint32_t i = 0; i < 2 && !status; i++)
            status = ms_stream_wait(current, reducer->buckets.items[b].ready[i]);
    if (!status) status = ms_times_note(reducer, MS_AT_READY);
    if (!status) status = ms_unused_settle(reducer);
    reducer->phase = MS_REDUCER_REDUCED;
    reducer->iterations++;
    return !status && reducer->on_reduced && !reducer->shadow
               ? reducer->on_reduced(reducer->on_reduced_user, MS_REDUCED_ALL)
               : status;
}

/* -------------------------------------------------------- as gradients come */

ms_status ms_reducer_move_home(ms_slot_owner *owner)
{
    ms_tensor *gradient = ms_tensor_grad(owner->tensor);
    if (gradient == owner->view) return MS_OK;
    ms_status status = ms_copy_into(owner->reducer->engine, gradient, owner->view);
    return status ? status : ms_tensor_set_grad(owner->tensor, owner->view);
}

ms_status ms_reducer_arrive(ms_slot_owner *owner)
{
    ms_reducer *reducer = owner->reducer;
    ms_bucket_list *buckets = &reducer->buckets;
    ms_status status = MS_OK;
    owner->ready = true;
    /* The first iteration of a static graph ends before any order is seen. */
    if (reducer->logging && owner->position < reducer->count - reducer->delayed
        && (!reducer->static_graph || reducer->known)) {
        reducer->arrival[reducer->arrived++] = owner->position;
        if (reducer->planned) status = ms_times_came(reducer, owner->position);
    }
    if (--buckets->items[owner->bucket].pending == 0 && !status)
        status = ms_times_ready(reducer, owner->bucket);
    while (!status && reducer->next_bucket < buckets->count
           && buckets->items[reducer->next_bucket].pending == 0)
        status = launch(reducer, &buckets->items[reducer->next_bucket++]);
    if (!status && reducer->next_bucket == buckets->count && reducer->phase == MS_REDUCER_REDUCING)
        status = finish(reducer);
    return status;
}

static ms_status came(ms_slot_owner *owner)
{
    ms_reducer *reducer = owner->reducer;
    if (reducer->no_sync)
        return ms_engine_fail(
            reducer->engine, MS_ERROR_STATE,
            "ddp: no_sync: backward runs inside, but its forward ran outside: both belong inside");
    if (reducer->buckets.count == 0) return no_buckets(reducer);
    if (reducer->phase == MS_REDUCER_IDLE) return not_expected(owner);
    if (reducer->static_graph) return ms_static_came(owner);
    if (reducer->phase == MS_REDUCER_REDUCED || owner->ready || owner->absent)
        return not_expected(owner);
    owner->used = true;
    ms_status status = reducer->phase == MS_REDUCER_EXPECTING ? ms_reducer_begin(reducer) : MS_OK;
    if (!status) status = ms_reducer_move_home(owner);
    return status ? status : ms_reducer_arrive(owner);
}

static ms_status gradient_came(void *user, ms_tensor *leaf)
{
    (void)leaf;
    ms_slot_owner *owner = user;
    if (owner->reducer->phase == MS_REDUCER_LOCAL) {
        owner->used = true;
        return MS_OK;
    }
    ms_status status = came(owner);
    return status ? ms_reducer_end_job(owner->reducer, status) : MS_OK;
}

void ms_reducer_reset(ms_reducer *reducer)
{
    reducer->arrived = reducer->next_bucket = 0;
    for (uint32_t i = 0; i < reducer->count; i++) reducer->owners[i].ready = false;
    for (uint32_t b = 0; b < reducer->buckets.count; b++)
        reducer->buckets.items[b].pending = reducer->buckets.items[b].bucket.count;
}

/* What the first iteration of a static graph has shown holds from now on. */
static void learn(ms_reducer *reducer)
{
    bool first = reducer->static_graph && !reducer->known && reducer->iterations > 0;
    /* A backward may go through several forwards: what each of them has missed. */
    bool several = reducer->told && reducer->phase == MS_REDUCER_EXPECTING;
    for (uint32_t i = 0; i < reducer->count; i++) {
        ms_slot_owner *owner = &reducer->owners[i];
        if (first) owner->expected = owner->fired;
        owner->missed = !several || owner->absent;
        owner->absent = reducer->static_graph && (first || reducer->known) && owner->expected == 0;
        owner->fired = 0;
    }
    reducer->known |= first;
    reducer->told = false;
}

ms_status ms_reducer_rebuild_due(ms_reducer *reducer)
{
    bool due = reducer->logging && !reducer->planned && reducer->phase != MS_REDUCER_REDUCING
               && reducer->arrived == reducer->count - reducer->delayed;
    return due ? ms_reducer_rebuild_now(reducer) : MS_OK;
}

ms_status ms_reducer_forward(ms_reducer *reducer, bool synchronize)
{
    if (reducer->phase == MS_REDUCER_REDUCING)
        return ms_reducer_end_job(reducer, missing_gradients(reducer));
    if (!synchronize) {
        reducer->phase = MS_REDUCER_LOCAL;
        return MS_OK;
    }
    if (reducer->buckets.count == 0) return ms_reducer_end_job(reducer, no_buckets(reducer));
    ms_status status = ms_reducer_rebuild_due(reducer);
    if (status) return status;
    learn(reducer);
    ms_reducer_reset(reducer);
    reducer->phase = MS_REDUCER_EXPECTING;
    return ms_times_note(reducer, MS_AT_FORWARD);
}

/* ------------------------------------------------------- making and freeing */

static void free_parts(ms_reducer *reducer)
{
    ms_context *context = ms_engine_context(reducer->engine);
    for (uint32_t i = 0; reducer->owners && i < reducer->count; i++) {
        ms_slot_owner *owner = &reducer->owners[i];
        if (!owner->tensor) continue;
        if (owner->hook) {
            ms_tensor_remove_hook(owner->tensor, owner->hook);
            ms_tensor_set_grad_home(owner->tensor, NULL);
        }
        ms_tensor_release(owner->tensor);
        ms_release(context, owner->name);
    }
    ms_unused_close(reducer);
    ms_reducer_set_on_reduced(reducer, NULL, NULL, NULL);
    ms_buckets_free(reducer, &reducer->buckets);
    ms_chain_drop(reducer->links, reducer->link_count);
    ms_times_close(reducer);
    ms_accounts_close(reducer);
    ms_release(context, reducer->owners);
    ms_release(context, reducer->limits);
    ms_release(context, reducer->arrival);
    ms_release(context, reducer);
}

static void free_all(ms_engine *engine, void *first)
{
    (void)engine;
    for (ms_reducer *reducer = first, *next; reducer; reducer = next) {
        next = reducer->next;
        if (reducer->hook_free) reducer->hook_free(reducer->hook_user);
        free_parts(reducer);
    }
}

void ms_reducer_free(ms_reducer *reducer)
{
    if (!reducer) return;
    ms_engine *engine = reducer->engine;
    ms_reducer *first = ms_engine_get(engine, MS_SLOT_DDP), **link = &first;
    while (*link && *link != reducer) link = &(*link)->next;
    if (*link) *link = reducer->next;
    if (reducer->hook_free) reducer->hook_free(reducer->hook_user);
    free_parts(reducer);
    ms_engine_set(engine, MS_SLOT_DDP, first, first ? free_all : NULL);
}

void ms_reducer_abandon(ms_reducer *reducer) { reducer->abandoned = true; }

void ms_reducer_sweep(ms_engine *engine)
{
    for (ms_reducer *reducer = ms_engine_get(engine, MS_SLOT_DDP), *next; reducer; reducer = next) {
        next = reducer->next;
        if (reducer->abandoned) ms_reducer_free(reducer);
    }
}

/* Whose this parameter is already, or NULL. */
static const ms_reducer *owner_of(ms_engine *engine, const ms_tensor *tensor)
{
    for (const ms_reducer *reducer = ms_engine_get(engine, MS_SLOT_DDP); reducer;
         reducer = reducer->next)
        for (uint32_t i = 0; i < reducer->count; i++)
            if (reducer->owners[i].tensor == tensor) return reducer;
    return NULL;
}

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
                                  "ddp: '%s' is no leaf of this engine that requires a gradient",
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

static ms_status take_parameters(ms_reducer *reducer, const ms_reducer_parameter *parameters)
{
    ms_context *context = ms_engine_context(reducer->engine);
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < reducer->count && !status; i++) {
        ms_slot_owner *owner = &reducer->owners[i];
        void *name = NULL;
        status = ms_allocate(context, strlen(parameters[i].name) + 1, "a name", &name);
        if (status) continue;
        owner->name = strcpy(name, parameters[i].name);
        owner->reducer = reducer;
        owner->position = i;
        owner->tensor = ms_tensor_retain(parameters[i].tensor);
    }
    for (uint32_t i = 0; i < reducer->count && !status; i++)
        status = ms_tensor_on_accumulated(reducer->owners[i].tensor, gradient_came,
                                          &reducer->owners[i], NULL, &reducer->owners[i].hook);
    return status;
}

/* One bucket for each dtype, as nobody knows the order yet. With find_unused those of the caps,
 * since many of these come at once. */
static ms_status first_buckets(ms_reducer *reducer)
{
    uint32_t count = reducer->count - reducer->delayed, buckets = 0;
    const uint64_t endless = UINT64_MAX;
    bool many = reducer->find_unused && !reducer->static_graph;
    const uint64_t *limits = many ? reducer->limits : &endless;
    uint32_t limit_count = many ? reducer->limit_count : 1;
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(reducer->engine),
                    count * (sizeof(uint64_t) + 3 * sizeof(uint32_t)) + 1, "buckets", &memory);
    if (status) return status;
    uint64_t *bytes = memory;
    uint32_t *keys = (uint32_t *)(bytes + count), *order = keys + count, *sizes = order + count;
    for (uint32_t i = 0; i < count; i++) {
        bytes[i] = ms_tensor_bytes(reducer->owners[i].tensor);
        keys[i] = ms_tensor_dtype(reducer->owners[i].tensor);
    }
    status = ms_ddp_assign_backwards(reducer->engine, bytes, keys, count, limits, limit_count,
                                     order, sizes, &buckets);
    if (!status) status = ms_buckets_install(reducer, order, sizes, buckets);
    ms_release(ms_engine_context(reducer->engine), memory);
    return status;
}

static ms_status check_buckets(const ms_reducer *reducer, const uint32_t *order,
                               const uint32_t *sizes, uint32_t buckets, bool *seen)
{
    uint32_t count = reducer->count - reducer->delayed, at = 0;
    for (uint32_t b = 0; b < buckets; b++) {
        if (sizes[b] == 0)
            return ms_engine_fail(reducer->engine, MS_ERROR_ARGUMENT, "buckets: bucket %u is empty",
                                  b);
        for (uint32_t i = 0; i < sizes[b]; i++, at++) {
            if (at >= count)
                return ms_engine_fail(reducer->engine, MS_ERROR_ARGUMENT,
                                      "buckets: there are %u parameters; buckets 0 to %u have more",
                                      count, b);
            if (order[at] >= count)
                return ms_engine_fail(
                    reducer->engine, MS_ERROR_ARGUMENT,
                    "buckets: bucket %u: there is no parameter %u; they are 0 to %u", b, order[at],
                    count - 1);
            const ms_slot_owner *owner = &reducer->owners[order[at]],
                                *first = &reducer->owners[order[at - i]];
            if (seen[order[at]])
                return ms_engine_fail(reducer->engine, MS_ERROR_ARGUMENT,
                                      "buckets: bucket %u: '%s' is there twice", b, owner->name);
            if (ms_tensor_dtype(owner->tensor) != ms_tensor_dtype(first->tensor))
                return ms_engine_fail(
                    reducer->engine, MS_ERROR_ARGUMENT,
                    "buckets: bucket %u has '%s', which is %s, and '%s', which is %s", b,
                    first->name, ms_dtype_name(ms_tensor_dtype(first->tensor)), owner->name,
                    ms_dtype_name(ms_tensor_dtype(owner->tensor)));
            seen[order[at]] = true;
        }
    }
    for (uint32_t i = 0; i < count; i++)
        if (!seen[i])
            return ms_engine_fail(reducer->engine, MS_ERROR_ARGUMENT, "buckets: '%s' is in none",
                                  reducer->owners[i].name);
    return MS_OK;
}

ms_status ms_reducer_assign(ms_reducer *reducer, const uint32_t *order, const uint32_t *sizes,
                            uint32_t buckets)
{
    void *seen = NULL;
    if (reducer->phase == MS_REDUCER_REDUCING)
        return ms_engine_fail(reducer->engine, MS_ERROR_STATE,
                              "buckets cannot change while a backward fills them");
    ms_status status =
        ms_allocate(ms_engine_context(reducer->engine), reducer->count, "buckets", &seen);
    if (!status) status = check_buckets(reducer, order, sizes, buckets, seen);
    if (!status) status = ms_buckets_install(reducer, order, sizes, buckets);
    if (!status) reducer->rebuilt = true;
    ms_release(ms_engine_context(reducer->engine), seen);
    return status;
}

static ms_status take_options(ms_reducer *reducer, const ms_reducer_options *options)
{
    const uint64_t *limits = options->cap_bytes ? options->cap_bytes : default_limits;
    reducer->limit_count = options->cap_bytes ? options->cap_count : 2;
    if (reducer->limit_count == 0 || reducer->limit_count > 1024)
        return ms_engine_fail(reducer->engine, MS_ERROR_ARGUMENT,
                              "ddp: 1 to 1024 sizes of buckets, not %u", reducer->limit_count);
    for (uint32_t i = 0; i < reducer->limit_count; i++)
        if (limits[i] == 0)
            return ms_engine_fail(reducer->engine, MS_ERROR_ARGUMENT,
                                  "ddp: size %u of the buckets is 0 bytes", i + 1);
    void *memory = NULL;
    ms_status status = ms_allocate(ms_engine_context(reducer->engine),
                                   reducer->limit_count * sizeof *limits, "limits", &memory);
    if (status) return status;
    reducer->limits = memcpy(memory, limits, reducer->limit_count * sizeof *limits);
    const ms_link_kind *reduce = ms_link_find("reduce");
    if (options->delayed_dtype)
        reducer->plain[reducer->plain_count++] =
            (ms_link){ .kind = ms_link_find("cast"),
                       .options = { .dtype = *options->delayed_dtype } };
    reducer->plain[reducer->plain_count++] =
        (ms_link){ .kind = reduce, .options = reduce->defaults };
    status = ms_chain_check(reducer->engine, reducer->plain, reducer->plain_count);
    if (status || options->hook) return status;
    const ms_link plain = { .kind = reduce, .options = reduce->defaults },
                  *links = options->link_count ? options->links : &plain;
    uint32_t count = options->link_count ? options->link_count : 1;
    status = ms_chain_take(reducer->engine, links, count, reducer->links);
    if (!status) reducer->link_count = count;
    return status;
}

ms_status ms_reducer_new(ms_engine *engine, const ms_reducer_options *options,
                         const ms_reducer_parameter *parameters, uint32_t count, ms_reducer **out)
{
    ms_context *context = ms_engine_context(engine);
    void *memory = NULL, *owners = NULL, *arrival = NULL;
    ms_status status = check_parameters(engine, parameters, count);
    if (!status && options->delayed > count)
        status = ms_engine_fail(engine, MS_ERROR_ARGUMENT, "ddp: %u delayed parameters of %u",
                                options->delayed, count);
    if (!status) status = ms_allocate(context, sizeof(ms_reducer), "ddp", &memory);
    if (status) return status;
    ms_reducer *reducer = memory;
    *reducer = (ms_reducer){ .engine = engine,
                             .group = options->group,
                             .count = count,
                             .delayed = options->delayed,
                             .divisor = ms_group_size(options->group),
                             .logging = options->delayed < count,
                             .planned = options->planned,
                             .find_unused = options->find_unused,
                             .static_graph = options->static_graph };
    status = ms_allocate(context, count * sizeof(ms_slot_owner), "ddp", &owners);
    reducer->owners = owners;
    if (!status) status = ms_allocate(context, count * sizeof(uint32_t), "ddp", &arrival);
    reducer->arrival = arrival;
    if (!status) status = take_options(reducer, options);
    if (!status) status = take_parameters(reducer, parameters);
    if (!status) status = first_buckets(reducer);
    if (!status) status = ms_times_open(reducer);
    if (!status)
        status =
            ms_accounts_open(reducer, options->hook ? options->hook_links : options->link_count);
    if (!status) status = ms_unused_open(reducer);
    if (status) {
        free_parts(reducer);
        return status;
    }
    reducer->hook = options->hook;
    reducer->hook_user = options->hook_user;
    reducer->hook_free = options->hook_free;
    reducer->next = ms_engine_get(engine, MS_SLOT_DDP);
    ms_engine_set(engine, MS_SLOT_DDP, reducer, free_all);
    *out = reducer;
    return MS_OK;
}

/* ------------------------------------------------------- asking and setting */

bool ms_reducer_set_no_sync(ms_reducer *reducer, bool inside)
{
    bool before = reducer->no_sync;
    reducer->no_sync = inside;
    return before;
}

void ms_reducer_rebuild(ms_reducer *reducer)
{
    reducer->logging = true;
    reducer->arrived = 0;
}

void ms_reducer_set_on_reduced(ms_reducer *reducer, ms_reduced_function f, void *user,
                               void (*free_user)(void *user))
{
    if (reducer->on_reduced_free) reducer->on_reduced_free(reducer->on_reduced_user);
    reducer->on_reduced = f;
    reducer->on_reduced_user = user;
    reducer->on_reduced_free = free_user;
}

void ms_reducer_ready(const ms_reducer *reducer, uint32_t index, ms_point ready[2])
{
    memcpy(ready, reducer->buckets.items[index].ready, 2 * sizeof *ready);
}

void ms_reducer_record(ms_reducer *reducer, bool on) { reducer->logging = on; }

ms_group *ms_reducer_group(const ms_reducer *reducer) { return reducer->group; }
uint32_t ms_reducer_divisor(const ms_reducer *reducer) { return reducer->divisor; }
void ms_reducer_set_divisor(ms_reducer *reducer, uint32_t divisor) { reducer->divisor = divisor; }
uint32_t ms_reducer_buckets(const ms_reducer *reducer) { return reducer->buckets.count; }
const ms_bucket *ms_reducer_bucket(const ms_reducer *reducer, uint32_t index)
{
    return index < reducer->buckets.count ? &reducer->buckets.items[index].bucket : NULL;
}
uint64_t ms_reducer_iterations(const ms_reducer *reducer) { return reducer->iterations; }
bool ms_reducer_is_rebuilt(const ms_reducer *reducer) { return reducer->rebuilt; }
const char *ms_reducer_error(const ms_reducer *reducer)
{
    return reducer->error[0] ? reducer->error : NULL;
}
