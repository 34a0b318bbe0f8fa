/* stats.c: what can be asked of a sharded model's reductions and gathers. Buckets are its trainable
 * flat parameters. */
#include "fsdp/model.h"

#include <string.h>

void ms_fsdp_set_on_reduced(ms_fsdp *fsdp, ms_reduced_function f, void *user,
                            void (*free_user)(void *user))
{
    if (fsdp->on_reduced_free) fsdp->on_reduced_free(fsdp->on_reduced_user);
    fsdp->on_reduced = f;
    fsdp->on_reduced_user = user;
    fsdp->on_reduced_free = free_user;
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
    return ms_times_step_end(&fsdp->times, fsdp->reduced);
}

ms_status ms_fsdp_await_times(ms_fsdp *fsdp) { return ms_times_await(&fsdp->times); }

ms_pass_stats ms_fsdp_stats(ms_fsdp *fsdp) { return ms_times_stats(&fsdp->times); }

ms_gather_stats ms_fsdp_gather_stats(ms_fsdp *fsdp)
{
    ms_gather_times times = ms_gathers_times(&fsdp->gather_times);
    return (ms_gather_stats){
        .gather_ns = times.ns[MS_SPAN_GATHER],
        .exposed_ns = times.ns[MS_SPAN_WAIT],
        .prefetch = fsdp->times.has_steps ? fsdp->step_prefetched : fsdp->prefetched,
    };
}

uint32_t ms_fsdp_links(const ms_fsdp *fsdp) { return ms_accounts_links(fsdp->times.accounts); }

ms_link_stats ms_fsdp_link_stats(const ms_fsdp *fsdp, uint32_t link)
{
    return ms_times_link(&fsdp->times, link);
}

/* The layout never changes. */
bool ms_fsdp_bucket_times(const ms_fsdp *fsdp, uint32_t index, ms_bucket_times *out)
{
    return ms_times_bucket(&fsdp->times, 1, index, out);
}
