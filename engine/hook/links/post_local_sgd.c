/* post_local_sgd.c: means over all ranks until start_step, then over a smaller group, or none (Lin
 * et al. 2020). */
#include "hook/links.h"

#include "hook/links/reduce.h"

/* The iteration counts only up to start_step; after it the state does not change, which makes a
 * checkpoint of it valid at any later step. Until then the mean is over the bucket's own group.
 * `within` borrows everything from the link, so it needs no release. */
ms_status ms_post_local_sgd_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    int64_t iteration = ms_link_state_iteration(link->state);
    if (iteration < link->options.post_local_sgd.start_step) {
        ms_status status = ms_link_reduce_by(link, bucket, MS_REDUCE_OP_AVG, out);
        if (!status && bucket->is_last) ms_link_state_set_iteration(link->state, iteration + 1);
        return status;
    }
    if (!link->options.post_local_sgd.reduce_after) return ms_link_stay_local(bucket, out);
    ms_link within = *link;
    within.options.group = link->options.post_local_sgd.subgroup;
    return ms_link_reduce_by(&within, bucket, MS_REDUCE_OP_AVG, out);
}

/* 0 is allowed: means are then local from the first step. */
ms_status ms_post_local_sgd_check(ms_engine *engine, const ms_link_options *options)
{
    if (options->post_local_sgd.start_step >= 0) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                          "post_local_sgd: start_step must be 0 or more, not %lld",
                          (long long)options->post_local_sgd.start_step);
}
