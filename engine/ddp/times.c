/* times.c: when the parts of a synchronized pass ran: tasks that write down the time on their
 * stream, and what follows from that.
 *
 * Two sets of times are used in turn. A set is read once its last task has run, and is written
 * again only behind the next pass but one, so that the host never waits and no task writes what the
 * host reads. They lie in storages, one for each stream, because tasks may outlive the reducer. */
#include "ddp/reducer.h"

typedef struct clock_args {
    const ms_os *os;
    uint64_t *slot;
} clock_args;

static ms_task_result run_clock(ms_run *run, void *arguments)
{
    (void)run;
    const clock_args *args = arguments;
    *args->slot = args->os->monotonic_ns(args->os->user);
    return MS_TASK_DONE;
}

static const ms_task clock_task = {
    .name = "time", .function = run_clock, .args_bytes = sizeof(clock_args), .kind = MS_KIND_COPY
};

ms_status ms_times_write(ms_reducer *reducer, ms_storage *storage, size_t index, ms_point *out)
{
    clock_args args = { .os = ms_engine_context(reducer->engine)->os,
                        .slot = (uint64_t *)ms_storage_data(storage) + index };
    ms_access access = { .storage = storage, .cells = 1, .mode = MS_READ | MS_WRITE };
    return ms_stream_enqueue(ms_engine_current(reducer->engine), &clock_task, &args, &access, 1,
                             (ms_task_cost){ .bytes = sizeof(uint64_t) }, out);
}

ms_status ms_times_open(ms_reducer *reducer)
{
    ms_stream *communication = NULL;
    ms_status status = ms_storage_new(ms_engine_current(reducer->engine),
                                      2 * MS_MOMENTS * sizeof(uint64_t), &reducer->moments);
    if (!status) status = ms_group_stream(reducer->group, 1, &communication);
    if (!status)
        status = ms_storage_new(communication, (size_t)4 * reducer->count * sizeof(uint64_t),
                                &reducer->reductions);
    if (!status)
        status = ms_storage_new(ms_engine_current(reducer->engine),
                                (size_t)4 * reducer->count * sizeof(uint64_t), &reducer->arrivals);
    if (!status && reducer->planned)
        status = ms_allocate(ms_engine_context(reducer->engine), reducer->count * sizeof(uint64_t),
                             "times", (void **)&reducer->came_ns);
    if (!status)
        status = ms_allocate(ms_engine_context(reducer->engine),
                             reducer->count * sizeof(ms_bucket_times), "times",
                             (void **)&reducer->bucket_times);
    return status;
}

void ms_times_close(ms_reducer *reducer)
{
    ms_storage_release(reducer->moments);
    ms_storage_release(reducer->reductions);
    ms_storage_release(reducer->arrivals);
    ms_release(ms_engine_context(reducer->engine), reducer->bucket_times);
    ms_release(ms_engine_context(reducer->engine), reducer->came_ns);
}

static void harvest_buckets(ms_reducer *reducer, uint32_t set, uint64_t begin)
{
    size_t first = (size_t)set * 2 * reducer->count;
    const uint64_t *spans = (const uint64_t *)ms_storage_data(reducer->reductions) + first,
                   *arrivals = (const uint64_t *)ms_storage_data(reducer->arrivals) + first;
    for (uint32_t i = 0; reducer->times[set].noted && i < reducer->count - reducer->delayed; i++)
        reducer->came_ns[i] = arrivals[reducer->count + i] - begin;
    for (uint32_t b = 0; b < reducer->times[set].buckets; b++)
        reducer->bucket_times[b] =
            (ms_bucket_times){ arrivals[b] - begin, spans[2 * b + 1] - spans[2 * b] };
    reducer->timed_layout = reducer->times[set].layout;
}

/* Takes over what a finished set says. */
static void harvest(ms_reducer *reducer, uint32_t set)
{
    ms_pass_times *times = &reducer->times[set];
    if (!times->end.seq || !ms_point_reached(reducer->engine, times->end)) return;
    const uint64_t *moments =
                       (const uint64_t *)ms_storage_data(reducer->moments) + set * MS_MOMENTS,
                   *spans = (const uint64_t *)ms_storage_data(reducer->reductions)
                            + (size_t)set * 2 * reducer->count;
    ms_reducer_stats *stats = &reducer->stats;
    *stats = (ms_reducer_stats){ .timed = times->iteration + 1 };
    times->end = (ms_point){ 0 };
    if (ms_engine_is_sim(reducer->engine)) return;
    stats->forward_ns =
        times->has[MS_AT_BACKWARD] ? moments[MS_AT_BACKWARD] - moments[MS_AT_FORWARD] : 0;
    stats->backward_ns =
        times->has[MS_AT_BACKWARD] ? moments[MS_AT_WAIT] - moments[MS_AT_BACKWARD] : 0;
    stats->exposed_ns = moments[MS_AT_READY] - moments[MS_AT_WAIT];
    stats->step_ns =
        times->has[MS_AT_STEP_END] ? moments[MS_AT_STEP_END] - moments[MS_AT_READY] : 0;
    for (uint32_t b = 0; b < times->buckets; b++)
        stats->reduce_ns += spans[2 * b + 1] - spans[2 * b];
    ms_accounts_harvest(reducer, set, spans, moments[MS_AT_WAIT], moments[MS_AT_READY]);
    harvest_buckets(reducer, set,
                    moments[times->has[MS_AT_BACKWARD] ? MS_AT_BACKWARD : MS_AT_FORWARD]);
}

ms_status ms_reducer_await_times(ms_reducer *reducer)
{
    uint32_t set = reducer->iterations % 2;
    ms_status status = reducer->times[set].end.seq
                           ? ms_point_sync(reducer->engine, reducer->times[set].end)
                           : MS_OK;
    if (!status) harvest(reducer, set);
    return status;
}

ms_status ms_times_note(ms_reducer *reducer, ms_moment moment)
{
    uint32_t set = reducer->iterations % 2;
    ms_pass_times *times = &reducer->times[set];
    if (moment == MS_AT_FORWARD) {
        harvest(reducer, set);
        *times = (ms_pass_times){ .iteration = reducer->iterations, .layout = reducer->layout };
    }
    times->has[moment] = true;
    return ms_times_write(reducer, reducer->moments, set * MS_MOMENTS + moment,
                          moment == MS_AT_READY ? &times->end : NULL);
}

ms_status ms_reducer_step_end(ms_reducer *reducer)
{
    /* The set of the pass that was reduced last. */
    uint32_t set = (uint32_t)((reducer->iterations + 1) % 2);
    ms_pass_times *times = &reducer->times[set];
    reducer->has_steps = true;
    reducer->step_counts = reducer->counts;
    ms_accounts_step_end(reducer);
    if (reducer->phase != MS_REDUCER_REDUCED || !times->end.seq || times->has[MS_AT_STEP_END])
        return MS_OK;
    times->has[MS_AT_STEP_END] = true;
    return ms_times_write(reducer, reducer->moments, set * MS_MOMENTS + MS_AT_STEP_END,
                          &times->end);
}

ms_traffic ms_times_traffic(const ms_reducer *reducer)
{
    ms_traffic sum = { 0 };
    ms_group *group;
    for (uint32_t i = 0; (group = ms_comm_group(reducer->engine, i)) != NULL; i++) {
        ms_traffic one = ms_group_traffic(group, MS_COLLECTIVES);
        sum.payload_bytes += one.payload_bytes;
        sum.wire_bytes += one.wire_bytes;
    }
    return sum;
}

ms_status ms_times_reduction(ms_reducer *reducer, uint32_t bucket, bool end, ms_traffic before)
{
    ms_pass_counts *counts = &reducer->counts;
    if (!end && bucket == 0) *counts = (ms_pass_counts){ .iterations = reducer->iterations + 1 };
    if (end) {
        ms_traffic now = ms_times_traffic(reducer);
        counts->calls++;
        counts->payload_bytes += now.payload_bytes - before.payload_bytes;
        counts->wire_bytes += now.wire_bytes - before.wire_bytes;
        reducer->times[reducer->iterations % 2].buckets = bucket + 1;
    }
    ms_status status = end ? ms_accounts_end(reducer, bucket) : MS_OK;
    if (!status)
        status = ms_times_write(
            reducer, reducer->reductions,
            (size_t)(reducer->iterations % 2) * 2 * reducer->count + 2 * bucket + end, NULL);
    if (!status && !end) ms_accounts_begin(reducer, bucket);
    return status;
}

ms_status ms_times_ready(ms_reducer *reducer, uint32_t bucket)
{
    return ms_times_write(reducer, reducer->arrivals,
                          (size_t)(reducer->iterations % 2) * 2 * reducer->count + bucket, NULL);
}

ms_status ms_times_came(ms_reducer *reducer, uint32_t position)
{
    reducer->times[reducer->iterations % 2].noted = true;
    return ms_times_write(reducer, reducer->arrivals,
                          ((size_t)(reducer->iterations % 2) * 2 + 1) * reducer->count + position,
                          NULL);
}

uint32_t ms_reducer_arrivals(ms_reducer *reducer, uint32_t *order, uint64_t *ns)
{
    uint32_t count = reducer->count - reducer->delayed;
    ms_reducer_stats_get(reducer);
    if (!reducer->planned || reducer->arrived != count) return 0;
    for (uint32_t i = 0; i < count; i++) {
        order[i] = reducer->arrival[i];
        ns[i] = reducer->came_ns[i];
    }
    return count;
}

bool ms_reducer_bucket_times(const ms_reducer *reducer, uint32_t index, ms_bucket_times *out)
{
    bool there = reducer->timed_layout == reducer->layout && index < reducer->buckets.count;
    *out = there ? reducer->bucket_times[index] : (ms_bucket_times){ 0 };
    return there;
}

uint64_t ms_reducer_layout(const ms_reducer *reducer, uint64_t *passes)
{
    *passes = reducer->iterations - reducer->made_at;
    return reducer->layout;
}

ms_status ms_reducer_forward_end(ms_reducer *reducer)
{
    return reducer->phase == MS_REDUCER_EXPECTING ? ms_times_note(reducer, MS_AT_BACKWARD) : MS_OK;
}

ms_reducer_stats ms_reducer_stats_get(ms_reducer *reducer)
{
    /* The set that the next pass uses: it holds the pass before the last, or is being written. */
    uint32_t older = reducer->iterations % 2;
    harvest(reducer, older);
    /* In the middle of a step the last pass is not all of it. */
    if (!reducer->has_steps || reducer->times[1 - older].has[MS_AT_STEP_END])
        harvest(reducer, 1 - older);
    ms_reducer_stats stats = reducer->stats;
    const ms_pass_counts *counts = reducer->has_steps ? &reducer->step_counts : &reducer->counts;
    stats.iterations = counts->iterations;
    stats.calls = counts->calls;
    stats.payload_bytes = counts->payload_bytes;
    stats.wire_bytes = counts->wire_bytes;
    return stats;
}
