/* nan_check.c: looks for infinities and NaN in each rank's numbers and in the result, over all
 * buckets of a pass. With the last bucket all ranks learn whether any rank has seen one: the
 * state's "bad" is then above 0, which optimizers read (or the check fails with an error). */
#include "hook/work.h"

#include "tensor/op.h"

typedef struct stop_args {
    const float *bad;
} stop_args;

static ms_task_result run_stop(ms_run *run, void *arguments)
{
    const stop_args *args = arguments;
    if (*args->bad == 0) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_TASK, "gradients are inf or nan (hooks.nan_check)");
    return MS_TASK_FAILED;
}

static const ms_task stop_task = { .name = "nan_check",
                                   .function = run_stop,
                                   .args_bytes = sizeof(stop_args),
                                   .kind = MS_KIND_COMPUTE };

static void look(ms_work *w, ms_tensor *t, ms_tensor *bad)
{
    ms_tensor *each = ms_work_apply(w, &ms_op_is_finite, 0, t, NULL),
              *all = ms_work_apply(w, &ms_op_every, 0, each, NULL);
    ms_tensor *other = ms_work_apply(w, &ms_op_rsub_scalar, 1, ms_work_cast(w, all, MS_F32), NULL);
    ms_work_change(w, &ms_op_maximum, 0, bad, other);
}

static ms_tensor *flag(ms_work *w)
{
    ms_tensor *bad = NULL;
    if (!w->status) w->status = ms_link_state_shared(w->link->state, "bad", 1, NULL, &bad);
    return ms_work_own(w, bad);
}

ms_status ms_nan_check_encode(const ms_link *link, ms_bucket *bucket)
{
    ms_work w = { .link = link, .bucket = bucket };
    ms_tensor *bad = flag(&w);
    if (bucket->index == 0) ms_work_change(&w, &ms_op_fill, 0, bad, NULL);
    look(&w, bucket->buffer, bad);
    return ms_work_end(&w);
}

ms_status ms_nan_check_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                              ms_tensor *reduced, ms_tensor **out)
{
    (void)before;
    ms_work w = { .link = link, .bucket = bucket };
    ms_tensor *bad = flag(&w);
    look(&w, reduced, bad);
    if (bucket->is_last && !w.status)
        w.status = ms_link_collective(
            bucket, ms_link_group(link, bucket),
            (ms_collective){ .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_MAX, .in = bad });
    if (bucket->is_last && link->options.nan_check.action == MS_NAN_STOP && !w.status) {
        stop_args args = { .bad = ms_tensor_data(bad) };
        w.status = ms_tensor_enqueue(bucket->engine, &stop_task, &args, &bad, 1, NULL, 0,
                                     (ms_task_cost){ .bytes = sizeof(float) });
    }
    ms_status status = ms_work_end(&w);
    if (!status) *out = ms_tensor_retain(reduced);
    return status;
}
