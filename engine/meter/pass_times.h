/* pass_times.h: when the parts of a synchronized pass ran, and what its reductions sent: what stats
 * and planners' views are made of. Whoever launches reductions by buckets (ddp, fsdp) fills one.
 *
 * Invariants
 * - Times are marks on the streams that they are of. Two sets are used in turn: pass n sets the
 *   marks of set n % 2. The host reads a set once its last mark is passed, and a set is used again
 *   only by the pass after the next, so the host never waits for times.
 * - The mark of a set that comes last (ready, or the step's end) is after all its others.
 * - What the host counts (calls, bytes) is of the pass that was enqueued last; times are of the
 *   last pass that has ended on the device.
 * - Marks belong to a bucket's place. A pass may leave buckets out, and reduce them in any order;
 * of one that it reduces twice, times are of the second reduction. */
#ifndef MOONSHARD_METER_PASS_TIMES_H
#define MOONSHARD_METER_PASS_TIMES_H

#include "meter/link_costs.h"

/* Moments of a pass on the model's stream, in the order in which that stream passes them. */
typedef enum ms_moment {
    MS_AT_FORWARD,  /* the forward begins */
    MS_AT_BACKWARD, /* the forward has ended */
    MS_AT_WAIT,     /* the model's stream begins to wait for the results */
    MS_AT_READY,    /* the results are there for the model's stream */
    MS_AT_STEP_END,
    MS_MOMENTS
} ms_moment;

/* What the host knows of one set: of the pass that writes it. */
typedef struct ms_times_set {
    ms_point end; /* its last mark; seq 0: not enqueued yet, or already harvested */
    uint64_t pass, layout;
    bool has[MS_MOMENTS];
    bool has_gradients; /* the arrival of each gradient was timed */
} ms_times_set;

/* What the host counts while it enqueues the reductions of a pass. */
typedef struct ms_times_counts {
    uint64_t passes, calls, payload_bytes, wire_bytes, between_nodes_bytes;
} ms_times_counts;

/* The times of one model. Everything here belongs to the host thread; streams only pass the marks.
 */
typedef struct ms_times {
    ms_engine *engine;
    uint64_t passes;    /* number of passes that were reduced */
    uint32_t capacity;  /* the most buckets, and the most gradients */
    uint32_t gradients; /* number of gradients whose arrival may be timed */
    bool has_steps;     /* ms_times_step_end is called */
    /* Two sets. Each has: MS_MOMENTS moments; begin and end of each bucket's reduction; when each
     * bucket was complete; and when each gradient arrived. */
    ms_marks *marks;
    ms_times_set sets[2];
    bool *reduced;  /* by set and bucket: it was reduced in that pass */
    ms_span *spans; /* of the reductions, while a set is harvested */
    /* Harvested: of each gradient in the pass that stats has the times of, and of each bucket in
     * the last pass that reduced it. */
    ms_bucket_times *bucket_times;
    bool *timed;           /* by bucket: it has times, of that layout */
    uint64_t timed_layout; /* the layout of that pass */
    uint64_t *arrived_ns;
    ms_pass_stats stats;
    /* Of the last pass, and of the last pass whose step has ended. */
    ms_times_counts counts, step_counts;
    ms_traffic before; /* traffic when the present reduction began */
    ms_link_costs *costs;
} ms_times;

/* Times for at most `capacity` buckets. gradients: 0 if their arrival is never timed. links: number
 * of links that ms_bucket_account tells apart. Call ms_times_close also after a failure. */
ms_status ms_times_open(ms_times *times, ms_group *group, uint32_t capacity, uint32_t gradients,
                        uint32_t links);
void ms_times_close(ms_times *times);

/* A pass, in this order: begin at its forward; then moments, gradients, buckets and reductions as
 * they come; end. All of these enqueue at most one task on the current stream and never wait.
 * layout: number of the present buckets; times of buckets are given only for the same ones. */
ms_status ms_times_begin_pass(ms_times *times, uint64_t layout);
ms_status ms_times_note(ms_times *times, ms_moment moment);
ms_status ms_times_gradient(ms_times *times, uint32_t position);
ms_status ms_times_bucket_complete(ms_times *times, uint32_t bucket);
/* Around the hook of a bucket, with the communication stream current. */
ms_status ms_times_begin_reduction(ms_times *times, ms_bucket *bucket);
ms_status ms_times_end_reduction(ms_times *times, ms_bucket *bucket);
void ms_times_end_pass(ms_times *times);
/* The pass that has ended goes on: another backward of the same forward reduces once more. */
void ms_times_reopen_pass(ms_times *times);
/* A step ends. reduced: its last forward was of a pass, which has ended. */
ms_status ms_times_step_end(ms_times *times, bool reduced);

/* Never waits. */
ms_pass_stats ms_times_stats(ms_times *times);
/* Waits until the pass before the last has ended on the device, and harvests its times. */
ms_status ms_times_await(ms_times *times);
/* False, and zeros, while no pass of that layout was timed that reduced the bucket. */
bool ms_times_bucket(const ms_times *times, uint64_t layout, uint32_t bucket, ms_bucket_times *out);
ms_link_stats ms_times_link(const ms_times *times, uint32_t link);

#endif
