/* post_local_sgd.c: means over all ranks until start_step, then over a smaller group, or none (Lin
 * et al. 2020; behaviours B9). */
#include "hook/links.h"

static ms_status reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    int64_t iteration = ms_link_state_iteration(link->state);
    if (iteration < link->options.post_local_sgd.start_step) {
        ms_status status = ms_link_mean(link, bucket, out);
        if (!status && bucket->is_last) ms_link_state_set_iteration(link->state, iteration + 1);
        return status;
    }
    if (!link->options.post_local_sgd.reduce_after) return ms_link_stay_local(bucket, out);
    ms_link within = *link;
    within.options.group = link->options.post_local_sgd.subgroup;
    return ms_link_mean(&within, bucket, out);
}

static ms_status check(ms_engine *engine, const ms_link_options *options)
{
    if (options->post_local_sgd.start_step >= 0) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                          "post_local_sgd: start_step must be 0 or more, not %lld",
                          (long long)options->post_local_sgd.start_step);
}

const ms_link_kind ms_link_post_local_sgd = {
    .name = "post_local_sgd",
    .reduce = reduce,
    .check = check,
    .has_state = true,
    .defaults = { .post_local_sgd = { .reduce_after = true } },
};
