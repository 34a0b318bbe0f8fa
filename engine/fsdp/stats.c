/* stats.c: what can be asked of a sharded model's reductions and gathers. Buckets are its trainable
 * flat parameters. */
#include "fsdp/flat_param.h"

#include <string.h>

void ms_fsdp_note_step(ms_fsdp *fsdp) { fsdp->now.stepped = true; }

void ms_fsdp_set_on_reduced(ms_fsdp *fsdp, ms_reduced_function f, void *user,
                            void (*free_user)(void *user))
{
    if (fsdp->hooks.on_reduced_free) fsdp->hooks.on_reduced_free(fsdp->hooks.on_reduced_user);
    fsdp->hooks.on_reduced = f;
    fsdp->hooks.on_reduced_user = user;
    fsdp->hooks.on_reduced_free = free_user;
}

uint32_t ms_fsdp_buckets(const ms_fsdp *fsdp) { return fsdp->bucket_count; }

const ms_bucket *ms_fsdp_bucket(const ms_fsdp *fsdp, uint32_t index)
{
    return index < fsdp->bucket_count ? &fsdp->buckets[index]->bucket : NULL;
}

void ms_fsdp_ready(const ms_fsdp *fsdp, uint32_t index, ms_point ready[2])
{
    memcpy(ready, fsdp->buckets[index]->ready, 2 * sizeof *ready);
}

uint64_t ms_fsdp_passes(const ms_fsdp *fsdp) { return fsdp->times.passes; }

const char *ms_fsdp_error(const ms_fsdp *fsdp) { return fsdp->error[0] ? fsdp->error : NULL; }

/* A step that ends without a reduced pass has no time of its own. */
ms_status ms_fsdp_step_end(ms_fsdp *fsdp)
{
    fsdp->step_prefetched = fsdp->prefetched;
    return ms_times_step_end(&fsdp->times, fsdp->now.reduced);
}

ms_status ms_fsdp_await_times(ms_fsdp *fsdp) { return ms_times_await(&fsdp->times); }

ms_pass_stats ms_fsdp_stats(ms_fsdp *fsdp) { return ms_times_stats(&fsdp->times); }

ms_gather_stats ms_fsdp_gather_stats(ms_fsdp *fsdp)
{
    ms_gather_times times = ms_gathers_times(&fsdp->gather_times);
    return (ms_gather_stats){
        .gather_ns = times.ns[MS_SPAN_GATHER],
        .exposed_ns = times.ns[MS_SPAN_WAIT],
        .copy_ns = times.ns[MS_SPAN_COPY],
        .overlap_ns = times.overlap_ns,
        .prefetch = fsdp->times.has_steps ? fsdp->step_prefetched : fsdp->prefetched,
    };
}

static uint64_t mean(const ms_owner_times *times, ms_gather_span kind, uint64_t count)
{
    return count ? times->ns[kind] / count : 0;
}

/* A use may have computed in several spans, and a gather of a unit is one of each of its flat
 * parameters: the counts are those of uses and of flat parameters. */
bool ms_fsdp_unit_times(ms_fsdp *fsdp, uint32_t index, ms_unit_times *out)
{
    const ms_gathers *gathers = &fsdp->gather_times;
    *out = (ms_unit_times){ 0 };
    if (ms_gathers_times(&fsdp->gather_times).pass == 0 || index >= fsdp->unit_count) return false;
    const ms_owner_times *forward = &gathers->owners[2 * index], *backward = forward + 1;
    uint64_t uses[2] = { 0 }, flats = 0;
    const ms_schedule *schedule = &fsdp->schedules[MS_TRAINING];
    for (uint32_t i = 0; i < schedule->use_count; i++)
        if (schedule->uses[i].unit == index) uses[schedule->uses[i].backward]++;
    for (uint32_t f = 0; f < fsdp->units[index].count; f++)
        flats += ms_flat_param_is_sharded(&fsdp->units[index].flats[f]);
    out->forward_ns = mean(forward, MS_SPAN_COMPUTE, uses[false]);
    out->backward_ns = mean(backward, MS_SPAN_COMPUTE, uses[true]);
    out->gather_ns = mean(forward, MS_SPAN_GATHER, forward->count[MS_SPAN_GATHER]) * flats;
    return true;
}

uint32_t ms_fsdp_links(const ms_fsdp *fsdp) { return ms_link_costs_links(fsdp->times.costs); }

ms_link_stats ms_fsdp_link_stats(const ms_fsdp *fsdp, uint32_t link)
{
    return ms_times_link(&fsdp->times, link);
}

/* The layout never changes. */
bool ms_fsdp_bucket_times(const ms_fsdp *fsdp, uint32_t index, ms_bucket_times *out)
{
    return ms_times_bucket(&fsdp->times, 1, index, out);
}
