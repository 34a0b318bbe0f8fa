/* vocabulary.c: tokens by id, and ids by text. */
#include "text/vocabulary.h"

/* The slot of the token with this text, or the free one where it would go. The table is never more
 * than half full. */
static size_t slot_of(const ms_vocabulary *vocabulary, const void *text, size_t bytes)
{
    size_t mask = vocabulary->slot_count - 1, slot = (size_t)ms_hash(text, bytes, 0) & mask;
    for (;; slot = (slot + 1) & mask) {
        uint32_t entry = vocabulary->slots[slot];
        if (entry == 0) return slot;
        ms_span other = ms_vocabulary_text(vocabulary, entry - 1);
        if (ms_span_bytes(other) == bytes && memcmp(other.at, text, bytes) == 0) return slot;
    }
}

uint32_t ms_vocabulary_find(const ms_vocabulary *vocabulary, const void *text, size_t bytes)
{
    if (vocabulary->used == 0) return MS_NO_TOKEN;
    uint32_t entry = vocabulary->slots[slot_of(vocabulary, text, bytes)];
    return entry ? entry - 1 : MS_NO_TOKEN;
}

/* Makes room for one more name: doubles the table and enters all names again. */
static ms_status grow_slots(ms_context *context, ms_vocabulary *vocabulary)
{
    if (2 * (vocabulary->used + 1) <= vocabulary->slot_count) return MS_OK;
    uint32_t *old = vocabulary->slots, *slots = NULL;
    size_t old_count = vocabulary->slot_count, count = old_count ? 2 * old_count : 1024;
    ms_status status =
        ms_allocate(context, count * sizeof *slots, "a vocabulary's table", (void **)&slots);
    if (status) return status;
    vocabulary->slots = slots;
    vocabulary->slot_count = count;
    for (size_t i = 0; i < old_count; i++) {
        if (old[i] == 0) continue;
        ms_span text = ms_vocabulary_text(vocabulary, old[i] - 1);
        slots[slot_of(vocabulary, text.at, ms_span_bytes(text))] = old[i];
    }
    ms_release(context, old);
    return MS_OK;
}

ms_status ms_vocabulary_add(ms_context *context, ms_vocabulary *vocabulary, uint32_t id,
                            ms_span text, uint32_t flags, bool named)
{
    size_t bytes = ms_span_bytes(text);
    ms_status status = ms_grow(context, (void **)&vocabulary->tokens, &vocabulary->token_capacity,
                               (size_t)id + 1, sizeof *vocabulary->tokens);
    if (!status && named) status = grow_slots(context, vocabulary);
    size_t offset = vocabulary->text.length;
    if (!status) status = ms_buffer_add(context, &vocabulary->text, text.at, bytes);
    if (status) return status;
    vocabulary->tokens[id] =
        (ms_token){ .offset = offset, .length = (uint32_t)bytes, .flags = flags | MS_TOKEN_HERE };
    if (id >= vocabulary->count) vocabulary->count = (size_t)id + 1;
    if (!named) return MS_OK;
    vocabulary->slots[slot_of(vocabulary, text.at, bytes)] = id + 1;
    vocabulary->used++;
    return MS_OK;
}

void ms_vocabulary_free(ms_context *context, ms_vocabulary *vocabulary)
{
    ms_buffer_free(context, &vocabulary->text);
    ms_release(context, vocabulary->tokens);
    ms_release(context, vocabulary->slots);
    *vocabulary = (ms_vocabulary){ 0 };
}
