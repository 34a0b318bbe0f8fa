/* pass_times.c: when the parts of a synchronized pass ran, and what its reductions sent. */
#include "meter/pass_times.h"

#include <string.h>

#include "base/assert.h"

/* ------------------------------------------------------- making and freeing */

/* A set is a run of marks: the moments; begin and end of each reduction; when each bucket was
 * complete; when each gradient arrived. Each of these is the index of the first mark of its part,
 * counted from the beginning of a set. */
static uint32_t spans_at(void) { return MS_MOMENTS; }
static uint32_t completes_at(const ms_times *times) { return MS_MOMENTS + 2 * times->capacity; }
static uint32_t arrivals_at(const ms_times *times) { return MS_MOMENTS + 3 * times->capacity; }
static uint32_t set_length(const ms_times *times) { return arrivals_at(times) + times->gradients; }

/* On a failure, pointers that were not reached stay NULL; ms_times_close frees the others. The
 * engine is set first: ms_times_close needs it to free what the rest has made. All memory is taken
 * here, so that no pass can fail for lack of it. */
ms_status ms_times_open(ms_times *times, ms_group *group, uint32_t capacity, uint32_t gradients,
                        uint32_t links)
{
    ms_engine *engine = times->engine = ms_group_engine(group);
    ms_context *context = ms_engine_context(engine);
    times->capacity = capacity;
    times->gradients = gradients;
    MS_ASSERT(gradients <= capacity);
    ms_status status = ms_marks_new(engine, 2 * set_length(times), &times->marks);
    if (!status)
        status = ms_allocate(context, capacity * sizeof(ms_span), "times", (void **)&times->spans);
    if (!status && gradients)
        status = ms_allocate(context, gradients * sizeof(uint64_t), "times",
                             (void **)&times->arrived_ns);
    if (!status)
        status = ms_allocate(context, capacity * sizeof(ms_bucket_times), "times",
                             (void **)&times->bucket_times);
    if (!status)
        status =
            ms_allocate(context, 3 * capacity * sizeof(bool), "times", (void **)&times->reduced);
    if (!status) times->timed = times->reduced + 2 * capacity;
    return status ? status : ms_link_costs_new(group, capacity, links, &times->costs);
}

/* A record that was never opened has no engine, and nothing to free. Marks that are still enqueued
 * keep their memory until the streams have passed them. */
void ms_times_close(ms_times *times)
{
    if (!times->engine) return;
    ms_marks_free(times->marks);
    ms_link_costs_free(times->costs);
    ms_release(ms_engine_context(times->engine), times->spans);
    ms_release(ms_engine_context(times->engine), times->bucket_times);
    ms_release(ms_engine_context(times->engine), times->reduced);
    ms_release(ms_engine_context(times->engine), times->arrived_ns);
}

/* --------------------------------------------------------------- harvesting */

/* The set that the next pass, or the one that runs, uses: passes counts the passes that have ended.
 * So two passes in a row never write the same set. */
static uint32_t set_of(const ms_times *times) { return times->passes % 2; }

/* The time of a mark of that set, which is passed. It is called only after the last mark of the
 * set, which waits for all others. */
static uint64_t time_of(const ms_times *times, uint32_t set, uint32_t mark)
{
    uint64_t ns;
    bool known = ms_marks_time(times->marks, set * set_length(times) + mark, &ns);
    MS_ASSERT(known);
    (void)known;
    return ns;
}

/* The time since `begin` of a mark that this pass may not have set: 0 then. ms_marks_time gives 0
 * for a mark that was never set, and the time of an earlier pass, which is before `begin` as well,
 * for one that this pass has left out. */
static uint64_t time_since(const ms_times *times, uint32_t set, uint32_t mark, uint64_t begin)
{
    uint64_t ns;
    ms_marks_time(times->marks, set * set_length(times) + mark, &ns);
    return ns > begin ? ns - begin : 0;
}

/* Whether a bucket was reduced in the pass of that set, for each bucket. */
static bool *reduced_in(const ms_times *times, uint32_t set)
{
    return times->reduced + (size_t)set * times->capacity;
}

/* Times of buckets and gradients since `begin`, which is forward's end. A bucket that the pass has
 * left out keeps its times, unless buckets were made again since. */
static void harvest_buckets(ms_times *times, uint32_t index, uint64_t begin)
{
    const ms_times_set *set = &times->sets[index];
    for (uint32_t i = 0; set->has_gradients && i < times->gradients; i++)
        times->arrived_ns[i] = time_since(times, index, arrivals_at(times) + i, begin);
    for (uint32_t b = 0; b < times->capacity; b++) {
        if (times->timed_layout != set->layout) times->timed[b] = false;
        if (!reduced_in(times, index)[b]) continue;
        times->timed[b] = true;
        times->bucket_times[b] =
            (ms_bucket_times){ .ready_ns = time_since(times, index, completes_at(times) + b, begin),
                               .reduce_ns = times->spans[b].end - times->spans[b].begin };
    }
    times->timed_layout = set->layout;
}

/* The times of the parts of a pass; backward begins where forward's end was noted. Without a mark
 * at forward's end only the exposed time is known: it is between two marks that every pass sets.
 */
static void harvest_moments(ms_pass_stats *stats, const ms_times_set *set, const uint64_t *moments)
{
    if (set->has[MS_AT_BACKWARD]) {
        stats->forward_ns = moments[MS_AT_BACKWARD] - moments[MS_AT_FORWARD];
        stats->backward_ns = moments[MS_AT_WAIT] - moments[MS_AT_BACKWARD];
    }
    stats->exposed_ns = moments[MS_AT_READY] - moments[MS_AT_WAIT];
    if (set->has[MS_AT_STEP_END]) stats->step_ns = moments[MS_AT_STEP_END] - moments[MS_AT_READY];
}

/* Takes over the times of a set whose last mark was passed. That mark waits for all others of the
 * set, so all of them can be read. set->end is cleared first, because a set is harvested once. On a
 * device without a clock the times stay 0. */
static void harvest(ms_times *times, uint32_t index)
{
    ms_times_set *set = &times->sets[index];
    uint64_t moments[MS_MOMENTS] = { 0 };
    if (!set->end.seq || !ms_point_reached(times->engine, set->end)) return;
    set->end = (ms_point){ 0 };
    times->stats = (ms_pass_stats){ .timed = set->pass + 1 };
    uint32_t first = index * set_length(times);
    if (!ms_marks_time(times->marks, first + MS_AT_FORWARD, &moments[MS_AT_FORWARD])) return;
    for (uint32_t i = 0; i < MS_MOMENTS; i++)
        if (set->has[i]) moments[i] = time_of(times, index, i);
    harvest_moments(&times->stats, set, moments);
    for (uint32_t b = 0; b < times->capacity; b++) {
        if (!reduced_in(times, index)[b]) continue;
        times->spans[b] = (ms_span){ .begin = time_of(times, index, spans_at() + 2 * b),
                                     .end = time_of(times, index, spans_at() + 2 * b + 1) };
        times->stats.reduce_ns += times->spans[b].end - times->spans[b].begin;
    }
    ms_link_costs_harvest(times->costs, index, reduced_in(times, index), times->spans,
                          moments[MS_AT_WAIT], moments[MS_AT_READY]);
    harvest_buckets(times, index,
                    moments[set->has[MS_AT_BACKWARD] ? MS_AT_BACKWARD : MS_AT_FORWARD]);
}

/* Blocks the host until the pass before the last has ended on the device. Planners call it on all
 * ranks, so that each has the times of the same pass, however far its device is. */
ms_status ms_times_await(ms_times *times)
{
    ms_point end = times->sets[set_of(times)].end;
    ms_status status = end.seq ? ms_point_sync(times->engine, end) : MS_OK;
    if (!status) harvest(times, set_of(times));
    return status;
}

/* ------------------------------------------------------------------- a pass */

/* The set is about to be written again: its times are taken over now or are lost. */
ms_status ms_times_begin_pass(ms_times *times, uint64_t layout)
{
    harvest(times, set_of(times));
    times->sets[set_of(times)] = (ms_times_set){ .pass = times->passes, .layout = layout };
    memset(reduced_in(times, set_of(times)), 0, times->capacity * sizeof(bool));
    return ms_times_note(times, MS_AT_FORWARD);
}

/* Sets a mark of that set on the current stream. */
static ms_status set_mark(ms_times *times, uint32_t set, uint32_t mark)
{
    return ms_marks_set(times->marks, set * set_length(times) + mark,
                        ms_engine_current(times->engine));
}

/* last: the set may be harvested once this mark is passed, so the current stream first waits for
 * the set's other marks, which are on other streams too. */
static ms_status note_in(ms_times *times, uint32_t set, ms_moment moment, bool last)
{
    uint32_t first = set * set_length(times);
    ms_status status = MS_OK;
    if (last)
        status =
            ms_marks_wait(times->marks, first, set_length(times), ms_engine_current(times->engine));
    if (!status) status = set_mark(times, set, moment);
    if (status) return status;
    times->sets[set].has[moment] = true;
    if (last) times->sets[set].end = ms_marks_point(times->marks, first + moment);
    return MS_OK;
}

/* MS_AT_READY is the last mark of a pass without a step; ms_times_step_end may put a later one. */
ms_status ms_times_note(ms_times *times, ms_moment moment)
{
    return note_in(times, set_of(times), moment, moment == MS_AT_READY);
}

/* On the current stream, which is backward's, after the task that wrote the gradient. One mark for
 * each gradient costs a slot of the stream, hence only in passes that record. */
ms_status ms_times_gradient(ms_times *times, uint32_t position)
{
    MS_ASSERT(position < times->gradients);
    times->sets[set_of(times)].has_gradients = true;
    return set_mark(times, set_of(times), arrivals_at(times) + position);
}

/* Set when the last gradient of the bucket has come, which may be long before its launch: buckets
 * are launched in order. */
ms_status ms_times_bucket_complete(ms_times *times, uint32_t bucket)
{
    MS_ASSERT(bucket < times->capacity);
    return set_mark(times, set_of(times), completes_at(times) + bucket);
}

/* The begin (end: false) or the end of a bucket's reduction. */
static ms_status mark_span(ms_times *times, uint32_t bucket, bool end)
{
    MS_ASSERT(bucket < times->capacity);
    return set_mark(times, set_of(times), spans_at() + 2 * bucket + end);
}

/* The first bucket of a pass starts the counts over. The mark comes before the account, so that the
 * account's first span begins after it. */
ms_status ms_times_begin_reduction(ms_times *times, ms_bucket *bucket)
{
    times->before = ms_link_costs_traffic(times->engine);
    if (bucket->index == 0) times->counts = (ms_times_counts){ .passes = times->passes + 1 };
    ms_status status = mark_span(times, bucket->place, false);
    if (!status) ms_link_costs_begin(times->costs, bucket, set_of(times));
    return status;
}

/* The account ends before the mark: its last bytes and times belong to this reduction. */
ms_status ms_times_end_reduction(ms_times *times, ms_bucket *bucket)
{
    ms_traffic now = ms_link_costs_traffic(times->engine);
    times->counts.calls++;
    times->counts.payload_bytes += now.payload_bytes - times->before.payload_bytes;
    times->counts.wire_bytes += now.wire_bytes - times->before.wire_bytes;
    times->counts.between_nodes_bytes +=
        now.between_nodes_bytes - times->before.between_nodes_bytes;
    reduced_in(times, set_of(times))[bucket->place] = true;
    ms_status status = ms_link_costs_end(times->costs, bucket);
    return status ? status : mark_span(times, bucket->place, true);
}

/* From here on set_of names the other set, which the next pass writes. */
void ms_times_end_pass(ms_times *times) { times->passes++; }

/* Its set is the present one again, and its marks are set again by the second backward. */
void ms_times_reopen_pass(ms_times *times)
{
    MS_ASSERT(times->passes > 0);
    times->passes--;
}

/* The pass of this step has ended, so its set is the other one. Its end moves to the step's mark,
 * unless the set was harvested before. */
ms_status ms_times_step_end(ms_times *times, bool reduced)
{
    uint32_t last = 1 - set_of(times);
    const ms_times_set *set = &times->sets[last];
    times->has_steps = true;
    times->step_counts = times->counts;
    ms_link_costs_step_end(times->costs);
    if (!reduced || !set->end.seq || set->has[MS_AT_STEP_END]) return MS_OK;
    return note_in(times, last, MS_AT_STEP_END, true);
}

/* ------------------------------------------------------------------- asking */

/* Harvests both sets, the older one first, so that the newer times win. Never waits: a set whose
 * last mark is not passed is left alone. */
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
    stats.between_nodes_bytes = counts->between_nodes_bytes;
    return stats;
}

/* The layout is compared because planners ask for the buckets that they see: times of former
 * buckets would be those of other parameters. */
bool ms_times_bucket(const ms_times *times, uint64_t layout, uint32_t bucket, ms_bucket_times *out)
{
    bool timed = times->timed_layout == layout && bucket < times->capacity && times->timed[bucket];
    *out = timed ? times->bucket_times[bucket] : (ms_bucket_times){ 0 };
    return timed;
}

/* Bytes of the last step where steps are noted, else of the last pass. */
ms_link_stats ms_times_link(const ms_times *times, uint32_t link)
{
    return ms_link_costs_stats(times->costs, link, times->has_steps);
}
