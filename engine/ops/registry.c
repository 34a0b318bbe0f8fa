/* registry.c: the table of all operators. No other file of ops/ calls this one. */
#include "moonshard/ops.h"

#include <string.h>

#include "tensor/op.h"

#define MS_OP_ADDRESS(name) &ms_op_##name,
/* Every operator that ops.h lists, for callers that find operators by name. Ends with NULL. */
static const ms_op *const all[] = { MS_OPS(MS_OP_ADDRESS) NULL };

/* NULL at the end and past it, so that a caller can walk the table without knowing its length. */
const ms_op *ms_op_at(uint32_t index)
{
    return index < sizeof all / sizeof *all ? all[index] : NULL;
}
const char *ms_op_name(const ms_op *op) { return op->name; }

/* A search through all names: for tests and tools, not for each call. */
const ms_op *ms_op_find(const char *name)
{
    for (uint32_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i] != NULL && strcmp(all[i]->name, name) == 0) return all[i];
    return NULL;
}
