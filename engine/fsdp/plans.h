/* plans.h: what files that make plans share. For fsdp/ only. */
#ifndef MOONSHARD_FSDP_PLANS_H
#define MOONSHARD_FSDP_PLANS_H

#include "moonshard/fsdp.h"

/* The uses of a view in the order in which they end. Invariant: those before `next` have ended. */
typedef struct ms_ending {
    uint32_t last, ended, use;
} ms_ending;
typedef struct ms_endings {
    ms_ending *list;
    uint32_t count, next;
} ms_endings;
ms_status ms_endings_open(ms_context *context, const ms_prefetch_view *view, ms_endings *out);
void ms_endings_close(ms_context *context, ms_endings *endings);
/* The next use that ends before use `begun` + 1 begins; false: there is none. */
bool ms_endings_next(ms_endings *endings, uint32_t begun, uint32_t *use);
/* Whether the unit stays gathered after use number `use`. */
bool ms_plan_keeps(const ms_prefetch_view *view, const ms_fsdp_entry *entries, uint32_t use);

#endif
