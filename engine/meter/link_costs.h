/* link_costs.h: what each link of a chain costs: bytes as they are enqueued, and time from marks on
 * the communication stream where the work of one link ends and that of another begins.
 *
 * Marks are in two sets that are used in turn, as those of pass_times.h: the host reads a set only
 * after its pass has ended on the device. */
#ifndef MOONSHARD_METER_LINK_COSTS_H
#define MOONSHARD_METER_LINK_COSTS_H

#include "moonshard/hook.h"

/* Made for chains of two or more links; pass_times.h owns it. */
typedef struct ms_link_costs ms_link_costs;

/* Two moments, in nanoseconds. */
typedef struct ms_span {
    uint64_t begin, end;
} ms_span;

/* Accounts of that many links for at most that many buckets. *out stays NULL for fewer than two
 * links: everything belongs to the only one. All functions below do nothing with NULL. */
ms_status ms_link_costs_new(ms_group *group, uint32_t buckets, uint32_t links, ms_link_costs **out);
void ms_link_costs_free(ms_link_costs *costs);

/* Around the reduction of a bucket, with the communication stream current. begin installs itself as
 * the bucket's account, end removes it. set: 0 or 1. */
void ms_link_costs_begin(ms_link_costs *costs, ms_bucket *bucket, uint32_t set);
ms_status ms_link_costs_end(ms_link_costs *costs, ms_bucket *bucket);
/* The bytes counted so far are those of a whole step. */
void ms_link_costs_step_end(ms_link_costs *costs);

/* Turns the marks of a set into times. reduced, spans: of each bucket, whether that pass reduced
 * it, and the begin and end of its reduction; wait, ready: between these the model's stream waited
 * for the results. */
void ms_link_costs_harvest(ms_link_costs *costs, uint32_t set, const bool *reduced,
                           const ms_span *spans, uint64_t wait, uint64_t ready);

uint32_t ms_link_costs_links(const ms_link_costs *costs);
/* link counts from 1; of_step: bytes of the last step that has ended, not of the last pass. */
ms_link_stats ms_link_costs_stats(const ms_link_costs *costs, uint32_t link, bool of_step);

/* What all groups of the engine have sent so far. */
ms_traffic ms_link_costs_traffic(const ms_engine *engine);

#endif
