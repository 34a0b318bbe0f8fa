/* plan_table.c: see plan_table.h. */
#include "ops/cuda/plan_table.h"

#include <string.h>

static size_t place_of(const ms_plan_table *table, const void *key)
{
    size_t mask = table->capacity - 1;
    size_t at = (size_t)ms_hash(key, table->key_bytes, 0) & mask;
    while (table->plans[at] && memcmp(table->plans[at], key, table->key_bytes) != 0)
        at = (at + 1) & mask;
    return at;
}

/* Twice the room, when it is half full. */
static ms_status make_room(ms_engine *engine, ms_plan_table *table)
{
    if (table->capacity && table->count * 2 < table->capacity) return MS_OK;
    void **before = table->plans, *memory = NULL;
    size_t count = table->capacity, capacity = count ? 2 * count : 64;
    ms_status status =
        ms_allocate(ms_engine_context(engine), capacity * sizeof *before, "plans", &memory);
    if (status) return status;
    table->plans = memory;
    table->capacity = capacity;
    for (size_t i = 0; i < count; i++)
        if (before[i]) table->plans[place_of(table, before[i])] = before[i];
    ms_release(ms_engine_context(engine), before);
    return MS_OK;
}

ms_status ms_plan_table_find(ms_engine *engine, ms_plan_table *table, const void *key, void ***out)
{
    ms_status status = make_room(engine, table);
    if (!status) *out = &table->plans[place_of(table, key)];
    return status;
}
