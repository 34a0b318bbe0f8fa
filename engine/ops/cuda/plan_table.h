/* plan_table.h: plans of a library, found by their keys.
 *
 * Invariants
 * - A plan begins with its key, key_bytes bytes that are compared as they are: a key has no padding
 *   that differs. The table owns the array, its user the plans.
 * - Plans are only added. */
#ifndef MOONSHARD_OPS_CUDA_PLAN_TABLE_H
#define MOONSHARD_OPS_CUDA_PLAN_TABLE_H

#include "moonshard/exec.h"

typedef struct ms_plan_table {
    void **plans; /* open addressing; NULL: free */
    size_t count, capacity, key_bytes;
} ms_plan_table;

/* The place of the plan with this key, in *out. Where *out points to NULL there is none: the caller
 * may put one there, by ms_plan_table_add, before it asks for another place. */
ms_status ms_plan_table_find(ms_engine *engine, ms_plan_table *table, const void *key, void ***out);
static inline void ms_plan_table_add(ms_plan_table *table, void **place, void *plan)
{
    *place = plan;
    table->count++;
}

#endif
