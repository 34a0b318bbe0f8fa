/* times.c: when the parts of a synchronized pass ran, and what its reductions sent. */
#include "hook/times.h"

#include "base/assert.h"
#include "hook/clock.h"

/* ------------------------------------------------------- making and freeing */

ms_status ms_times_open(ms_times *times, ms_group *group, uint32_t capacity, uint32_t gradients,
                        uint32_t links)
{
    ms_engine *engine = times->engine = ms_group_engine(group);
    ms_context *context = ms_engine_context(engine);
    ms_stream *communication = NULL;
    size_t two_each = (size_t)4 * capacity * sizeof(uint64_t); /* in each of two sets */
    times->capacity = capacity;
    times->gradients = gradients;
    MS_ASSERT(gradients <= capacity);
    ms_status status = ms_storage_new(ms_engine_current(engine), 2 * MS_MOMENTS * sizeof(uint64_t),
                                      &times->moments);
    if (!status) status = ms_group_stream(group, 1, &communication);
    if (!status) status = ms_storage_new(communication, two_each, &times->reductions);
    if (!status) status = ms_storage_new(ms_engine_current(engine), two_each, &times->arrivals);
    if (!status && gradients)
        status = ms_allocate(context, gradients * sizeof(uint64_t), "times",
                             (void **)&times->arrived_ns);
    if (!status)
        status = ms_allocate(context, capacity * sizeof(ms_bucket_times), "times",
                             (void **)&times->bucket_times);
    return status ? status : ms_accounts_new(group, capacity, links, &times->accounts);
}

void ms_times_close(ms_times *times)
{
    if (!times->engine) return;
    ms_storage_release(times->moments);
    ms_storage_release(times->reductions);
    ms_storage_release(times->arrivals);
    ms_accounts_free(times->accounts);
    ms_release(ms_engine_context(times->engine), times->bucket_times);
    ms_release(ms_engine_context(times->engine), times->arrived_ns);
}

/* --------------------------------------------------------------- harvesting */

/* The set that the next pass, or the one that runs, writes. */
static uint32_t set_of(const ms_times *times) { return times->passes % 2; }

static const uint64_t *read_set(const ms_storage *storage, uint32_t set, size_t length)
{
    return (const uint64_t *)ms_storage_data(storage) + set * length;
}

static void harvest_buckets(ms_times *times, const ms_times_set *set, const uint64_t *spans,
                            const uint64_t *arrivals, uint64_t begin)
{
    for (uint32_t i = 0; set->has_gradients && i < times->gradients; i++)
        times->arrived_ns[i] = arrivals[times->capacity + i] - begin;
    for (uint32_t b = 0; b < set->buckets; b++)
        times->bucket_times[b] =
            (ms_bucket_times){ arrivals[b] - begin, spans[2 * b + 1] - spans[2 * b] };
    times->timed_layout = set->layout;
}

/* The times of the parts of a pass; backward begins where forward's end was noted. */
static void harvest_moments(ms_pass_stats *stats, const ms_times_set *set, const uint64_t *moments)
{
    if (set->has[MS_AT_BACKWARD]) {
        stats->forward_ns = moments[MS_AT_BACKWARD] - moments[MS_AT_FORWARD];
        stats->backward_ns = moments[MS_AT_WAIT] - moments[MS_AT_BACKWARD];
    }
    stats->exposed_ns = moments[MS_AT_READY] - moments[MS_AT_WAIT];
    if (set->has[MS_AT_STEP_END]) stats->step_ns = moments[MS_AT_STEP_END] - moments[MS_AT_READY];
}

/* Takes over the times of a set whose last task has run. */
static void harvest(ms_times *times, uint32_t index)
{
    ms_times_set *set = &times->sets[index];
    if (!set->end.seq || !ms_point_reached(times->engine, set->end)) return;
    size_t length = (size_t)2 * times->capacity;
    const uint64_t *moments = read_set(times->moments, index, MS_MOMENTS);
    const uint64_t *spans = read_set(times->reductions, index, length);
    const uint64_t *arrivals = read_set(times->arrivals, index, length);
    set->end = (ms_point){ 0 };
    times->stats = (ms_pass_stats){ .timed = set->pass + 1 };
    if (ms_engine_is_sim(times->engine)) return;
    harvest_moments(&times->stats, set, moments);
    for (uint32_t b = 0; b < set->buckets; b++)
        times->stats.reduce_ns += spans[2 * b + 1] - spans[2 * b];
    ms_accounts_harvest(times->accounts, index, set->buckets, spans, moments[MS_AT_WAIT],
                        moments[MS_AT_READY]);
    harvest_buckets(times, set, spans, arrivals,
                    moments[set->has[MS_AT_BACKWARD] ? MS_AT_BACKWARD : MS_AT_FORWARD]);
}

ms_status ms_times_await(ms_times *times)
{
    ms_point end = times->sets[set_of(times)].end;
    ms_status status = end.seq ? ms_point_sync(times->engine, end) : MS_OK;
    if (!status) harvest(times, set_of(times));
    return status;
}

/* ------------------------------------------------------------------- a pass */

ms_status ms_times_begin_pass(ms_times *times, uint64_t layout)
{
    harvest(times, set_of(times));
    times->sets[set_of(times)] = (ms_times_set){ .pass = times->passes, .layout = layout };
    return ms_times_note(times, MS_AT_FORWARD);
}

/* `index`: of the set that the pass writes. */
static ms_status note_in(ms_times *times, uint32_t index, ms_moment moment, ms_point *out)
{
    times->sets[index].has[moment] = true;
    return ms_clock_write(times->engine, times->moments, index * MS_MOMENTS + moment, out);
}

ms_status ms_times_note(ms_times *times, ms_moment moment)
{
    uint32_t index = set_of(times);
    return note_in(times, index, moment, moment == MS_AT_READY ? &times->sets[index].end : NULL);
}

ms_status ms_times_gradient(ms_times *times, uint32_t position)
{
    MS_ASSERT(position < times->gradients);
    times->sets[set_of(times)].has_gradients = true;
    return ms_clock_write(times->engine, times->arrivals,
                          ((size_t)set_of(times) * 2 + 1) * times->capacity + position, NULL);
}

ms_status ms_times_bucket_complete(ms_times *times, uint32_t bucket)
{
    MS_ASSERT(bucket < times->capacity);
    return ms_clock_write(times->engine, times->arrivals,
                          (size_t)set_of(times) * 2 * times->capacity + bucket, NULL);
}

/* The begin (end: false) or the end of a bucket's reduction. */
static ms_status write_span(ms_times *times, uint32_t bucket, bool end)
{
    MS_ASSERT(bucket < times->capacity);
    return ms_clock_write(times->engine, times->reductions,
                          ((size_t)set_of(times) * times->capacity + bucket) * 2 + end, NULL);
}

ms_status ms_times_begin_reduction(ms_times *times, ms_bucket *bucket)
{
    times->before = ms_accounts_traffic(times->engine);
    if (bucket->index == 0) times->counts = (ms_times_counts){ .passes = times->passes + 1 };
    ms_status status = write_span(times, bucket->index, false);
    if (!status) ms_accounts_begin(times->accounts, bucket, set_of(times));
    return status;
}

ms_status ms_times_end_reduction(ms_times *times, ms_bucket *bucket)
{
    ms_traffic now = ms_accounts_traffic(times->engine);
    times->counts.calls++;
    times->counts.payload_bytes += now.payload_bytes - times->before.payload_bytes;
    times->counts.wire_bytes += now.wire_bytes - times->before.wire_bytes;
    times->sets[set_of(times)].buckets = bucket->index + 1;
    ms_status status = ms_accounts_end(times->accounts, bucket);
    return status ? status : write_span(times, bucket->index, true);
}

void ms_times_end_pass(ms_times *times) { times->passes++; }

void ms_times_reopen_pass(ms_times *times)
{
    MS_ASSERT(times->passes > 0);
    times->passes--;
}

ms_status ms_times_step_end(ms_times *times, bool reduced)
{
    uint32_t last = 1 - set_of(times);
    const ms_times_set *set = &times->sets[last];
    times->has_steps = true;
    times->step_counts = times->counts;
    ms_accounts_step_end(times->accounts);
    if (!reduced || !set->end.seq || set->has[MS_AT_STEP_END]) return MS_OK;
    return note_in(times, last, MS_AT_STEP_END, &times->sets[last].end);
}

/* ------------------------------------------------------------------- asking */

ms_pass_stats ms_times_stats(ms_times *times)
{
    /* The set that the next pass uses: it has the pass before the last, or is being written. */
    uint32_t older = set_of(times);
    harvest(times, older);
    /* In the middle of a step the last pass is not all of it. */
    if (!times->has_steps || times->sets[1 - older].has[MS_AT_STEP_END]) harvest(times, 1 - older);
    ms_pass_stats stats = times->stats;
    const ms_times_counts *counts = times->has_steps ? &times->step_counts : &times->counts;
    stats.iterations = counts->passes;
    stats.calls = counts->calls;
    stats.payload_bytes = counts->payload_bytes;
    stats.wire_bytes = counts->wire_bytes;
    return stats;
}

bool ms_times_bucket(const ms_times *times, uint64_t layout, uint32_t bucket, ms_bucket_times *out)
{
    bool timed = times->timed_layout == layout && bucket < times->capacity;
    *out = timed ? times->bucket_times[bucket] : (ms_bucket_times){ 0 };
    return timed;
}

ms_link_stats ms_times_link(const ms_times *times, uint32_t link)
{
    return ms_accounts_stats(times->accounts, link, times->has_steps);
}
