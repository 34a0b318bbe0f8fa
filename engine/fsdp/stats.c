/* stats.c: what can be asked of a sharded model's reductions and gathers. Buckets are its trainable
 * flat parameters. */
#include "fsdp/flat_param.h"
#include "fsdp/sharded_model.h"

#include <string.h>

void ms_fsdp_note_step(ms_fsdp *fsdp) { fsdp->now.stepped = true; }

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

/* -------------------------------------------------- as a gradient source */

static const ms_fsdp *fsdp_of(const ms_gradient_source *source) { return (const ms_fsdp *)source; }

static uint32_t buckets_of(const ms_gradient_source *source)
{
    return fsdp_of(source)->bucket_count;
}

static const ms_bucket *bucket_of(const ms_gradient_source *source, uint32_t index)
{
    const ms_fsdp *fsdp = fsdp_of(source);
    return index < fsdp->bucket_count ? &fsdp->buckets[index]->bucket : NULL;
}

static void ready(const ms_gradient_source *source, uint32_t index, ms_point points[2])
{
    memcpy(points, fsdp_of(source)->buckets[index]->ready, 2 * sizeof *points);
}

static uint64_t passes_of(const ms_gradient_source *source)
{
    return fsdp_of(source)->times.passes;
}

/* Buckets are made once. */
static uint64_t layout_of(const ms_gradient_source *source, uint64_t *passes)
{
    *passes = fsdp_of(source)->times.passes;
    return 1;
}

static bool is_rebuilt(const ms_gradient_source *source)
{
    (void)source;
    return false;
}

/* All parameters of a bucket that is reduced have a gradient, on all ranks. */
static bool is_used(const ms_gradient_source *source, uint32_t position, bool *known)
{
    (void)source;
    (void)position;
    *known = true;
    return true;
}

static ms_pass_stats stats_of(ms_gradient_source *source)
{
    return ms_times_stats(&((ms_fsdp *)source)->times);
}

static uint32_t links_of(const ms_gradient_source *source)
{
    return ms_link_costs_links(fsdp_of(source)->times.costs);
}

static ms_link_stats link_stats(const ms_gradient_source *source, uint32_t link)
{
    return ms_times_link(&fsdp_of(source)->times, link);
}

static bool bucket_times(const ms_gradient_source *source, uint32_t index, ms_bucket_times *out)
{
    return ms_times_bucket(&fsdp_of(source)->times, 1, index, out);
}

static ms_status await_times(ms_gradient_source *source)
{
    return ms_times_await(&((ms_fsdp *)source)->times);
}

/* A step that ends without a reduced pass has no time of its own. */
static ms_status step_end(ms_gradient_source *source)
{
    ms_fsdp *fsdp = (ms_fsdp *)source;
    fsdp->step_prefetched = fsdp->prefetched;
    return ms_times_step_end(&fsdp->times, fsdp->now.reduced);
}

const ms_source_kind ms_fsdp_source_kind = {
    .slot = MS_SLOT_FSDP,
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
    .destroy = ms_fsdp_destroy,
};

ms_gradient_source *ms_fsdp_source(ms_fsdp *fsdp) { return &fsdp->source; }
