/* gather_times.h: when the gathers of a pass ran, and the copies before and after them, how long
 * the model's stream waited for them, and how long it computed in each use of a unit. For fsdp/
 * only.
 *
 * Invariants
 * - Times are marks, in two sets that are used in turn, as those of meter/pass_times.h: pass n sets
 * the marks of set n % 2. The host reads a set once all its marks are passed, and never waits.
 * - A set has room for as many gathers and waits as the passes before it have had. Of a pass that
 *   has more, the first ones are timed; the next pass of the set has room for all.
 * - A span has an owner: 2 * unit, and 1 more for what is of the unit's backward.
 * - Computing counts for the use that began last of those that have not ended. It is timed only
 *   where a planner asks for it.
 * - Only what is enqueued between the begin and the end of a pass is timed. */
#ifndef MOONSHARD_METER_GATHER_TIMES_H
#define MOONSHARD_METER_GATHER_TIMES_H

#include "moonshard/exec.h"

/* A gather, on its own stream; a copy before or after one; the model's stream's wait for gathers;
 * and its computing. */
typedef enum ms_gather_span {
    MS_SPAN_GATHER,
    MS_SPAN_COPY,
    MS_SPAN_WAIT,
    MS_SPAN_COMPUTE,
    MS_GATHER_SPANS
} ms_gather_span;

/* One pass. The marks of span i of a kind are 2 * (kind * capacity + i), its begin, and the next.
 */
typedef struct ms_gather_set {
    ms_marks *marks;
    uint32_t *owners;                 /* of each span */
    uint32_t capacity;                /* of each kind */
    uint32_t used[MS_GATHER_SPANS];   /* spans that were begun and have marks */
    uint32_t wanted[MS_GATHER_SPANS]; /* spans that were begun */
    uint64_t pass;
    bool ended; /* all its marks are enqueued, and it was not read yet */
} ms_gather_set;

typedef struct ms_gather_times {
    uint64_t pass; /* from 1; 0: none yet */
    uint64_t ns[MS_GATHER_SPANS];
    uint64_t overlap_ns; /* of copies, while a gather ran */
} ms_gather_times;

/* Of one owner in a pass: how often it began a span of the kind, and their sum. */
typedef struct ms_owner_times {
    uint64_t count[MS_GATHER_SPANS], ns[MS_GATHER_SPANS];
} ms_owner_times;

typedef struct ms_gathers {
    ms_engine *engine;
    uint32_t owner_count;
    ms_owner_times *owners; /* of the last pass that was read */
    bool computing;         /* whether computing is timed */
    uint32_t *open;         /* owners of the uses that have not ended, in the order of beginning */
    uint32_t open_count;
    size_t open_capacity;
    uint32_t compute_span; /* that runs */
    bool computes;
    ms_gather_set sets[2];
    ms_gather_set *present; /* NULL: no pass runs */
    ms_gather_times last;   /* of the last pass that was read */
} ms_gathers;

/* capacity: of gathers in a pass, as far as it is known. */
ms_status ms_gathers_open(ms_gathers *gathers, ms_engine *engine, uint32_t capacity,
                          uint32_t units);
void ms_gathers_close(ms_gathers *gathers); /* also after a failure of open, and of none */

/* pass: counts from 0, and grows by 1 with each pass that ends. */
ms_status ms_gathers_begin_pass(ms_gathers *gathers, uint64_t pass);
void ms_gathers_end_pass(ms_gathers *gathers);
/* Around a gather or a wait, on its stream. *span is for end. */
ms_status ms_gathers_begin(ms_gathers *gathers, ms_gather_span kind, uint32_t owner,
                           ms_stream *stream, uint32_t *span);
ms_status ms_gathers_end(ms_gathers *gathers, uint32_t span, ms_stream *stream);

/* A use of a unit begins, once its parameters are there; and it ends. On the current stream. */
ms_status ms_gathers_enter(ms_gathers *gathers, uint32_t owner);
ms_status ms_gathers_leave(ms_gathers *gathers, uint32_t owner);
/* Before the model's stream waits: until the next of these it does not compute. */
ms_status ms_gathers_pause(ms_gathers *gathers);

/* Of the last pass whose gathers have all run. Never waits. */
ms_gather_times ms_gathers_times(ms_gathers *gathers);

#endif
