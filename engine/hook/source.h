/* source.h: gradient sources: what reducers of ddp and sharded models of fsdp are for hooks,
 * optimizer overlap and reports.
 *
 * Invariants
 * - A source is the first member of its reducer or model, so that a pointer to one is a pointer to
 *   the other.
 * - The engine keeps those of each layer in a list in that layer's slot, and frees with itself what
 *   the application has not freed. */
#ifndef MOONSHARD_HOOK_SOURCE_H
#define MOONSHARD_HOOK_SOURCE_H

#include "moonshard/hook.h"

/* Each does what the function of its name in moonshard/hook.h says; none is NULL. */
typedef struct ms_source_kind {
    int slot; /* of the engine: MS_SLOT_DDP or MS_SLOT_FSDP */
    uint32_t (*buckets)(const ms_gradient_source *source);
    const ms_bucket *(*bucket)(const ms_gradient_source *source, uint32_t index);
    void (*ready)(const ms_gradient_source *source, uint32_t index, ms_point ready[2]);
    uint64_t (*passes)(const ms_gradient_source *source);
    uint64_t (*layout)(const ms_gradient_source *source, uint64_t *passes);
    bool (*is_rebuilt)(const ms_gradient_source *source);
    bool (*is_used)(const ms_gradient_source *source, uint32_t position, bool *known);
    ms_pass_stats (*stats)(ms_gradient_source *source);
    uint32_t (*links)(const ms_gradient_source *source);
    ms_link_stats (*link_stats)(const ms_gradient_source *source, uint32_t link);
    bool (*bucket_times)(const ms_gradient_source *source, uint32_t index, ms_bucket_times *out);
    ms_status (*await_times)(ms_gradient_source *source);
    ms_status (*step_end)(ms_gradient_source *source);
    /* Frees the reducer or model, which has left the engine's list. */
    void (*destroy)(ms_gradient_source *source);
} ms_source_kind;

struct ms_gradient_source {
    const ms_source_kind *kind;
    ms_engine *engine;
    ms_gradient_source *next; /* of the engine's list */
    bool abandoned;
    ms_reduced_function on_reduced;
    void *on_reduced_user;
    void (*on_reduced_free)(void *user);
    char error[MS_ERROR_MESSAGE_BYTES]; /* of the last reduction that failed; "": none has */
};

/* Enters the engine's list. kind and engine are filled in. */
void ms_gradient_source_enter(ms_gradient_source *source);
/* The first of a layer; NULL: there is none. */
ms_gradient_source *ms_gradient_sources(ms_engine *engine, int slot);
/* Leaves the engine's list, and is destroyed. NULL is allowed. */
void ms_gradient_source_free(ms_gradient_source *source);
/* For reductions: calls on_reduced, if there is one. */
static inline ms_status ms_gradient_source_reduced(const ms_gradient_source *source,
                                                   uint32_t bucket)
{
    return source->on_reduced ? source->on_reduced(source->on_reduced_user, bucket) : MS_OK;
}

#endif
