/* source.c: gradient sources: the engine's lists of them, and the public calls. */
#include "hook/source.h"

/* ---------------------------------------------------------- the engine's lists */

/* The engine's destructor of a slot: all that the application has not freed. */
static void free_all(ms_engine *engine, void *first)
{
    (void)engine;
    for (ms_gradient_source *source = first, *next; source; source = next) {
        next = source->next;
        source->kind->destroy(source);
    }
}

void ms_gradient_source_enter(ms_gradient_source *source)
{
    int slot = source->kind->slot;
    source->next = ms_engine_get(source->engine, slot);
    ms_engine_set(source->engine, slot, source, free_all);
}

ms_gradient_source *ms_gradient_sources(ms_engine *engine, int slot)
{
    return ms_engine_get(engine, slot);
}

/* A source leaves the list before its parts are freed, so that nothing finds one that is half
 * freed. The slot is emptied with the last one, so that no destroy function is called with NULL. */
void ms_gradient_source_free(ms_gradient_source *source)
{
    if (!source) return;
    ms_engine *engine = source->engine;
    int slot = source->kind->slot;
    ms_gradient_source *first = ms_engine_get(engine, slot), **link = &first;
    while (*link && *link != source) link = &(*link)->next;
    if (*link) *link = source->next;
    source->kind->destroy(source);
    ms_engine_set(engine, slot, first, first ? free_all : NULL);
}

/* A finalizer may call it, so it only sets a flag. */
void ms_gradient_source_abandon(ms_gradient_source *source) { source->abandoned = true; }

/* `next` is read before the source is freed. */
void ms_gradient_sources_sweep(ms_engine *engine)
{
    static const int slots[] = { MS_SLOT_DDP, MS_SLOT_FSDP };
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++)
        for (ms_gradient_source *source = ms_engine_get(engine, slots[i]), *next; source;
             source = next) {
            next = source->next;
            if (source->abandoned) ms_gradient_source_free(source);
        }
}

/* ----------------------------------------------------------- the public calls */

/* The former user is freed before the new one is stored, also where both are the same function. */
void ms_gradient_source_set_on_reduced(ms_gradient_source *source, ms_reduced_function f,
                                       void *user, void (*free_user)(void *user))
{
    if (source->on_reduced_free) source->on_reduced_free(source->on_reduced_user);
    source->on_reduced = f;
    source->on_reduced_user = user;
    source->on_reduced_free = free_user;
}

/* It stays after the job's end, for stats and reports. */
const char *ms_gradient_source_error(const ms_gradient_source *source)
{
    return source->error[0] ? source->error : NULL;
}

uint32_t ms_gradient_source_buckets(const ms_gradient_source *source)
{
    return source->kind->buckets(source);
}

const ms_bucket *ms_gradient_source_bucket(const ms_gradient_source *source, uint32_t index)
{
    return source->kind->bucket(source, index);
}

void ms_gradient_source_ready(const ms_gradient_source *source, uint32_t index, ms_point ready[2])
{
    source->kind->ready(source, index, ready);
}

uint64_t ms_gradient_source_passes(const ms_gradient_source *source)
{
    return source->kind->passes(source);
}

uint64_t ms_gradient_source_layout(const ms_gradient_source *source, uint64_t *passes)
{
    return source->kind->layout(source, passes);
}

bool ms_gradient_source_is_rebuilt(const ms_gradient_source *source)
{
    return source->kind->is_rebuilt(source);
}

bool ms_gradient_source_is_used(const ms_gradient_source *source, uint32_t position, bool *known)
{
    return source->kind->is_used(source, position, known);
}

ms_pass_stats ms_gradient_source_stats(ms_gradient_source *source)
{
    return source->kind->stats(source);
}

uint32_t ms_gradient_source_links(const ms_gradient_source *source)
{
    return source->kind->links(source);
}

ms_link_stats ms_gradient_source_link_stats(const ms_gradient_source *source, uint32_t link)
{
    return source->kind->link_stats(source, link);
}

bool ms_gradient_source_bucket_times(const ms_gradient_source *source, uint32_t index,
                                     ms_bucket_times *out)
{
    return source->kind->bucket_times(source, index, out);
}

ms_status ms_gradient_source_await_times(ms_gradient_source *source)
{
    return source->kind->await_times(source);
}

ms_status ms_gradient_source_step_end(ms_gradient_source *source)
{
    return source->kind->step_end(source);
}
