/* gathers.h: when the gathers of a pass ran, and how long the model's stream waited for them. For
 * fsdp/ only.
 *
 * Invariants
 * - Times are marks, in two sets that are used in turn, as those of hook/times.h: pass n sets the
 *   marks of set n % 2. The host reads a set once all its marks are passed, and never waits.
 * - A set has room for as many gathers and waits as the passes before it have had. Of a pass that
 *   has more, the first ones are timed; the next pass of the set has room for all.
 * - Only what is enqueued between the begin and the end of a pass is timed. */
#ifndef MOONSHARD_FSDP_GATHERS_H
#define MOONSHARD_FSDP_GATHERS_H

#include "moonshard/exec.h"

/* A gather, on its own stream; or the model's stream's wait for gathers. */
typedef enum ms_gather_span { MS_SPAN_GATHER, MS_SPAN_WAIT, MS_GATHER_SPANS } ms_gather_span;

/* One pass. The marks of span i of a kind are 2 * (kind * capacity + i), its begin, and the next.
 */
typedef struct ms_gather_set {
    ms_marks *marks;
    uint32_t capacity;                /* of each kind */
    uint32_t used[MS_GATHER_SPANS];   /* spans that were begun and have marks */
    uint32_t wanted[MS_GATHER_SPANS]; /* spans that were begun */
    uint64_t pass;
    bool ended; /* all its marks are enqueued, and it was not read yet */
} ms_gather_set;

typedef struct ms_gather_times {
    uint64_t pass; /* from 1; 0: none yet */
    uint64_t ns[MS_GATHER_SPANS];
} ms_gather_times;

typedef struct ms_gathers {
    ms_engine *engine;
    ms_gather_set sets[2];
    ms_gather_set *present; /* NULL: no pass runs */
    ms_gather_times last;   /* of the last pass that was read */
} ms_gathers;

/* capacity: of gathers in a pass, as far as it is known. */
ms_status ms_gathers_open(ms_gathers *gathers, ms_engine *engine, uint32_t capacity);
void ms_gathers_close(ms_gathers *gathers); /* also after a failure of open, and of none */

/* pass: counts from 0, and grows by 1 with each pass that ends. */
ms_status ms_gathers_begin_pass(ms_gathers *gathers, uint64_t pass);
void ms_gathers_end_pass(ms_gathers *gathers);
/* Around a gather or a wait, on its stream. *span is for end. */
ms_status ms_gathers_begin(ms_gathers *gathers, ms_gather_span kind, ms_stream *stream,
                           uint32_t *span);
ms_status ms_gathers_end(ms_gathers *gathers, uint32_t span, ms_stream *stream);

/* Of the last pass whose gathers have all run. Never waits. */
ms_gather_times ms_gathers_times(ms_gathers *gathers);

#endif
