/* engine.c: the plain settings of an engine, and what layers above keep on it. */
#include "exec/engine.h"

#include <string.h>

#include "exec/poison.h"
#include "exec/state.h"

/* In the order of ms_isa; choose_isa compares the user's word with these. */
const char *ms_isa_name(ms_isa isa)
{
    static const char *const names[] = { "portable", "avx2", "avx512", "avx512bf16" };
    return names[isa];
}

/* Plain reads and writes of the host thread's fields, without a lock; what layers above may know of
 * an engine goes through them, as the struct is private to exec/. */
ms_context *ms_engine_context(ms_engine *engine) { return &engine->context; }
const ms_error *ms_engine_error(const ms_engine *engine) { return &engine->context.error; }
const char *ms_engine_device(const ms_engine *engine) { return engine->device->name; }
bool ms_engine_is_sim(const ms_engine *engine) { return !engine->device->values; }
bool ms_engine_is_strict(const ms_engine *engine) { return engine->options.strict; }
uint32_t ms_engine_threads(const ms_engine *engine) { return engine->options.threads; }
ms_isa ms_engine_isa(const ms_engine *engine) { return engine->isa; }
bool ms_engine_isa_is_capped(const ms_engine *engine) { return engine->isa_is_capped; }
void ms_engine_set_script(ms_engine *engine, uint32_t id) { engine->script = id; }
uint32_t ms_engine_script(const ms_engine *engine) { return engine->script; }
ms_strings *ms_engine_strings(ms_engine *engine) { return engine->strings; }
ms_random ms_engine_random(const ms_engine *engine) { return engine->random; }
void ms_engine_set_random(ms_engine *engine, ms_random random) { engine->random = random; }

/* Each draw gets a number of its own in the step, so two operators never use the same counters. A
 * step that is run again with the same seed and step number draws the same numbers, since `draw`
 * counts calls only. */
ms_random ms_engine_draw(ms_engine *engine)
{
    ms_random now = engine->random;
    engine->random.draw++;
    return now;
}

/* NULL until the layer has set its object. */
void *ms_engine_get(const ms_engine *engine, ms_engine_slot slot)
{
    return engine->slots[slot].object;
}

/* A layer above keeps its state in the slot that it owns. Objects are destroyed from the highest
 * slot to the lowest, while streams still exist: see ms_engine_free. */
void ms_engine_set(ms_engine *engine, ms_engine_slot slot, void *object,
                   void (*destroy)(ms_engine *, void *))
{
    engine->slots[slot].object = object;
    engine->slots[slot].destroy = destroy;
}

/* Stays off on a device that cannot check. It may be switched while tasks are enqueued: the check
 * drains all streams by itself. */
void ms_engine_set_poison(ms_engine *engine, bool on)
{
    engine->poison = on && engine->device->poison;
}

const ms_device *ms_engine_device_of(const ms_engine *engine) { return engine->device; }
uint32_t ms_engine_device_index(const ms_engine *engine) { return engine->options.device_index; }

bool ms_engine_is_for_gpu(const ms_engine *engine) { return engine->is_for_gpu; }

/* Looked up by the family's name once and kept, as every operator asks on every call. A layer
 * without a table for the family is a mistake of the build. */
const ms_kernels *ms_engine_kernels(ms_engine *engine, ms_engine_slot layer,
                                    const ms_kernels *const *tables)
{
    if (!engine->kernels[layer]) {
        while (*tables && strcmp((*tables)->family, engine->device->kernels) != 0) tables++;
        MS_ASSERT(*tables);
        engine->kernels[layer] = *tables;
    }
    return engine->kernels[layer];
}
