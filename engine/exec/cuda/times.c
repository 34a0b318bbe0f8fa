/* times.c: when the GPU passed an event, by the host's clock.
 *
 * The driver tells spans in f32 milliseconds, which hold one of 4 s to a quarter of a microsecond.
 * So times are counted from an anchor, an event that the GPU has passed a short time before or
 * after, and an anchor's own time from the anchor before it. */
#include "exec/cuda/times.h"

#define ANCHOR_NS 2000000000u

bool ms_cuda_find_span(const ms_cuda_device *self, ms_cuda_event from, ms_cuda_event to,
                       int64_t *ns)
{
    float ms = 0;
    if (self->cuda.event_elapsed(&ms, from, to)) return false;
    *ns = (int64_t)((double)ms * 1e6 + (ms < 0 ? -0.5 : 0.5));
    return true;
}

/* Once the GPU has passed it, the next anchor is the anchor. */
static void move_anchor(ms_cuda_device *self)
{
    int64_t ns = 0;
    if (!self->has_next_anchor || !ms_cuda_find_span(self, self->anchor, self->next_anchor, &ns))
        return;
    ms_cuda_event passed = self->anchor;
    self->anchor = self->next_anchor;
    self->next_anchor = passed;
    self->anchor_ns += (uint64_t)ns;
    self->has_next_anchor = false;
}

void ms_cuda_drop_anchor(ms_engine *engine)
{
    ms_cuda_device *self = ms_cuda_of(engine);
    uint64_t now = ms_now(engine);
    if (now - self->anchored_ns < ANCHOR_NS) return;
    move_anchor(self);
    if (self->has_next_anchor || self->cuda.event_record(self->next_anchor, self->reader)) return;
    self->has_next_anchor = true;
    self->anchored_ns = now;
}

/* The next anchor was put on a stream of its own before the event, so it is passed by now, or is in
 * a moment. */
uint64_t ms_cuda_time_of(ms_cuda_device *self, ms_cuda_event event)
{
    int64_t ns = 0;
    if (self->has_next_anchor && self->cuda.event_synchronize(self->next_anchor)) return 0;
    move_anchor(self);
    return event && ms_cuda_find_span(self, self->anchor, event, &ns)
               ? self->anchor_ns + (uint64_t)ns
               : 0;
}
