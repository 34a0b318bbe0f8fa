/* strings.c: strings kept once each, named by small numbers that tasks and trace records can
 * carry. */
#include "moonshard/base.h"

#include <string.h>

/* A hash table from text to id and an array from id to text. Ids are given in order from 1 and are
 * never freed, so a task may carry one for as long as the table lives. The table has no lock. */
struct ms_strings {
    ms_context *context;
    /* Indexed by id - 1. Each text has its own allocation, so that its address never changes. */
    const char **texts;
    uint32_t *slots; /* open addressing, a power of two of them; id or 0 */
    size_t count, capacity, slot_count;
};

/* The first slots are made with the first text. */
ms_status ms_strings_new(ms_context *context, ms_strings **out)
{
    void *made;
    ms_status status = ms_allocate(context, sizeof(ms_strings), "string table", &made);
    if (status) return status;
    *out = made;
    (*out)->context = context;
    return MS_OK;
}

/* The texts are const for everybody else; the union gives the pointer back its type without a cast
 * that drops const. */
void ms_strings_free(ms_strings *strings)
{
    if (!strings) return;
    const ms_os *os = strings->context->os;
    for (size_t i = 0; i < strings->count; i++) {
        union {
            const char *read;
            void *release;
        } text = { .read = strings->texts[i] };
        os->release(os->user, text.release);
    }
    ms_release(strings->context, (void *)strings->texts);
    ms_release(strings->context, strings->slots);
    ms_release(strings->context, strings);
}

/* The slot that holds the text, or the empty one where it belongs. Linear probing ends because at
 * most half of the slots are in use. */
static size_t strings_find(const ms_strings *strings, const char *text, size_t bytes)
{
    size_t mask = strings->slot_count - 1, at = (size_t)ms_hash(text, bytes, 0) & mask;
    for (; strings->slots[at] != 0; at = (at + 1) & mask) {
        const char *other = strings->texts[strings->slots[at] - 1];
        /* The text need not end with a zero, so its length is compared, too. */
        if (strncmp(other, text, bytes) == 0 && other[bytes] == '\0') break;
    }
    return at;
}

/* Makes room for one more text with at most half of the slots in use. After a failure the old slots
 * are still in place. */
static ms_status strings_widen(ms_strings *strings)
{
    /* At most half full keeps the probes short. */
    if (strings->slot_count != 0 && (strings->count + 1) * 2 <= strings->slot_count) return MS_OK;
    size_t old_count = strings->slot_count, new_count = old_count != 0 ? old_count * 2 : 64;
    uint32_t *old_slots = strings->slots;
    void *made;
    ms_status status =
        ms_allocate(strings->context, new_count * sizeof(uint32_t), "string table", &made);
    if (status) return status;
    strings->slots = made;
    strings->slot_count = new_count;
    for (size_t i = 0; i < old_count; i++) {
        if (old_slots[i] == 0) continue;
        const char *text = strings->texts[old_slots[i] - 1];
        strings->slots[strings_find(strings, text, strlen(text))] = old_slots[i];
    }
    ms_release(strings->context, old_slots);
    return MS_OK;
}

/* All that can fail comes before the count is raised and the slot filled, so a failure leaves a
 * valid table: it may be wider, or its array larger, than needed. */
ms_status ms_strings_add(ms_strings *strings, const char *text, size_t bytes, uint32_t *id)
{
    const char *end = memchr(text, '\0', bytes);
    /* Ids name C strings, so a text ends at its first zero byte. */
    if (end) bytes = (size_t)(end - text);
    if (bytes == 0) {
        *id = 0;
        return MS_OK;
    }
    ms_status status = strings_widen(strings);
    if (status) return status;
    size_t at = strings_find(strings, text, bytes);
    if (strings->slots[at] == 0) {
        void *texts = (void *)strings->texts, *copy;
        status = ms_grow(strings->context, &texts, &strings->capacity, strings->count + 1,
                         sizeof *strings->texts);
        strings->texts = texts;
        if (!status) status = ms_allocate(strings->context, bytes + 1, "string", &copy);
        if (status) return status;
        memcpy(copy, text, bytes);
        strings->texts[strings->count++] = copy;
        strings->slots[at] = (uint32_t)strings->count;
    }
    *id = strings->slots[at];
    return MS_OK;
}

/* An unknown id gives "", so that a trace record of an unnamed task needs no special case. */
const char *ms_strings_get(const ms_strings *strings, uint32_t id)
{
    return id != 0 && id <= strings->count ? strings->texts[id - 1] : "";
}
