/* part.c: what a tensor is a part of. */
#include "tensor/part.h"

#include <stdio.h>
#include <string.h>

#include "tensor/state.h"

struct ms_part {
    ms_context *context;
    uint32_t references;
    char whole[160]; /* shape, for messages */
    const char *unit;
    char name[]; /* and the unit's name */
};

static void describe(char *text, size_t room, uint32_t dims, const int64_t *shape)
{
    size_t used = (size_t)snprintf(text, room, "[");
    for (uint32_t d = 0; d < dims && used < room; d++)
        used += (size_t)snprintf(text + used, room - used, "%s%lld", d ? ", " : "",
                                 (long long)shape[d]);
    if (used < room) snprintf(text + used, room - used, "]");
}

ms_status ms_part_new(ms_context *context, const char *name, const char *unit, uint32_t dims,
                      const int64_t *shape, ms_part **out)
{
    void *memory = NULL;
    size_t bytes = strlen(name) + 1, unit_bytes = strlen(unit) + 1;
    ms_status status =
        ms_allocate(context, sizeof(ms_part) + bytes + unit_bytes, "a parameter", &memory);
    if (status) return status;
    ms_part *part = memory;
    part->context = context;
    part->references = 1;
    memcpy(part->name, name, bytes);
    part->unit = memcpy(part->name + bytes, unit, unit_bytes);
    describe(part->whole, sizeof part->whole, dims, shape);
    *out = part;
    return MS_OK;
}

ms_part *ms_part_retain(ms_part *part)
{
    if (part) part->references++;
    return part;
}

void ms_part_release(ms_part *part)
{
    if (part && --part->references == 0) ms_release(part->context, part);
}

void ms_tensor_set_part(ms_tensor *tensor, ms_part *part)
{
    if (tensor->part == part) return;
    ms_part_release(tensor->part);
    tensor->part = ms_part_retain(part);
}

void ms_part_explain(const ms_part *part, const char *needs, char *text, size_t room)
{
    snprintf(text, room,
             "'%s' is sharded here: outside of its unit \"%s\" a rank has a piece of %s only, %s: "
             "use it inside of that unit's forward, or make one unit of all modules that use it "
             "(wrap = { groups = ... })",
             part->name, part->unit, part->whole, needs);
}

ms_status ms_tensor_check_whole(const ms_tensor *tensor)
{
    char text[MS_ERROR_MESSAGE_BYTES];
    if (!tensor->part) return MS_OK;
    ms_part_explain(tensor->part, "and this call needs all of it", text, sizeof text);
    return ms_engine_fail(tensor->engine, MS_ERROR_ARGUMENT, "%s", text);
}
