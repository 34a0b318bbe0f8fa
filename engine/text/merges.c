/* merges.c: byte pair encoding: the table of pairs, and merging the tokens of a piece. */
#include "text/merges.h"

#include <string.h>

/* -------------------------------------------------------------------- pairs */

/* The slot of the pair, or the free one where it would go: by Fibonacci hashing (Knuth, The Art of
 * Computer Programming 3, 6.4). The table is never more than half full. */
static size_t slot_of(const ms_merges *merges, uint32_t left, uint32_t right)
{
    uint64_t key = ((uint64_t)left << 32 | right) * UINT64_C(0x9e3779b97f4a7c15);
    size_t mask = merges->slot_count - 1, slot = (size_t)(key >> 32) & mask;
    for (;; slot = (slot + 1) & mask) {
        const ms_merge *entry = &merges->slots[slot];
        if (entry->made == MS_NO_TOKEN || (entry->left == left && entry->right == right))
            return slot;
    }
}

const ms_merge *ms_merges_find(const ms_merges *merges, uint32_t left, uint32_t right)
{
    if (merges->used == 0) return NULL;
    const ms_merge *entry = &merges->slots[slot_of(merges, left, right)];
    return entry->made == MS_NO_TOKEN ? NULL : entry;
}

/* Makes room for one more pair: doubles the table and enters all pairs again. */
static ms_status grow_slots(ms_context *context, ms_merges *merges)
{
    if (2 * (merges->used + 1) <= merges->slot_count) return MS_OK;
    ms_merges old = *merges;
    ms_merge *slots = NULL;
    size_t count = old.slot_count ? 2 * old.slot_count : 1024;
    ms_status status =
        ms_allocate(context, count * sizeof *slots, "a table of merges", (void **)&slots);
    if (status) return status;
    for (size_t i = 0; i < count; i++) slots[i].made = MS_NO_TOKEN;
    merges->slots = slots;
    merges->slot_count = count;
    for (size_t i = 0; i < old.slot_count; i++)
        if (old.slots[i].made != MS_NO_TOKEN)
            slots[slot_of(merges, old.slots[i].left, old.slots[i].right)] = old.slots[i];
    ms_release(context, old.slots);
    return MS_OK;
}

ms_status ms_merges_add(ms_context *context, ms_merges *merges, ms_merge merge)
{
    ms_status status = grow_slots(context, merges);
    if (status) return status;
    ms_merge *entry = &merges->slots[slot_of(merges, merge.left, merge.right)];
    if (entry->made == MS_NO_TOKEN) merges->used++;
    *entry = merge;
    return MS_OK;
}

void ms_merges_free(ms_context *context, ms_merges *merges)
{
    ms_release(context, merges->slots);
    *merges = (ms_merges){ 0 };
}

/* --------------------------------------------------------------------- heap */

/* The room is there: ms_merging_run has reserved it. */
static void push(ms_merging *merging, ms_candidate candidate)
{
    ms_candidate *heap = merging->heap;
    size_t at = merging->heap_count++;
    while (at > 0 && candidate.order < heap[(at - 1) / 2].order) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = candidate;
}

/* Takes the candidate that comes first. The heap is not empty. */
static ms_candidate pop(ms_merging *merging)
{
    ms_candidate *heap = merging->heap;
    ms_candidate first = heap[0], last = heap[--merging->heap_count];
    size_t at = 0, count = merging->heap_count;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child >= count) break;
        if (child + 1 < count && heap[child + 1].order < heap[child].order) child++;
        if (last.order <= heap[child].order) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
    return first;
}

/* ------------------------------------------------------------------ merging */

ms_status ms_merging_add(ms_context *context, ms_merging *merging, uint32_t id)
{
    size_t at = merging->count;
    if (at >= merging->symbol_capacity) {
        ms_status status = ms_grow(context, (void **)&merging->symbols, &merging->symbol_capacity,
                                   at + 1, sizeof *merging->symbols);
        if (status) return status;
    }
    merging->symbols[at] = (ms_symbol){ .id = id, .previous = (int32_t)at - 1, .next = -1 };
    if (at > 0) merging->symbols[at - 1].next = (int32_t)at;
    merging->count = at + 1;
    return MS_OK;
}

/* Puts the pair that begins at `left` among the candidates if it can be merged. */
static void consider(ms_merging *merging, const ms_merges *merges, int32_t left)
{
    if (left < 0) return;
    const ms_symbol *symbol = &merging->symbols[left];
    if (symbol->next < 0) return;
    uint32_t right = merging->symbols[symbol->next].id;
    const ms_merge *merge = ms_merges_find(merges, symbol->id, right);
    if (merge == NULL) return;
    push(merging, (ms_candidate){ .order = (uint64_t)merge->rank << 32 | (uint32_t)left,
                                  .left = symbol->id,
                                  .right = right,
                                  .made = merge->made });
}

/* Merges the pair, unless one of the two has become part of another token since. */
static void merge_candidate(ms_merging *merging, const ms_merges *merges, ms_candidate candidate)
{
    int32_t at = (int32_t)(uint32_t)candidate.order;
    ms_symbol *left = &merging->symbols[at];
    if (left->id != candidate.left || left->next < 0) return;
    ms_symbol *right = &merging->symbols[left->next];
    if (right->id != candidate.right) return;
    left->id = candidate.made;
    left->next = right->next;
    right->id = MS_NO_TOKEN;
    if (left->next >= 0) merging->symbols[left->next].previous = at;
    consider(merging, merges, left->previous);
    consider(merging, merges, at);
}

ms_status ms_merging_run(ms_context *context, ms_merging *merging, const ms_merges *merges)
{
    if (merging->count < 2) return MS_OK;
    /* Each pair at the start gives at most one candidate, and each of at most count - 1 merges
     * takes one and gives at most two. */
    ms_status status = ms_grow(context, (void **)&merging->heap, &merging->heap_capacity,
                               2 * merging->count, sizeof *merging->heap);
    if (status) return status;
    merging->heap_count = 0;
    for (size_t i = 0; i + 1 < merging->count; i++) consider(merging, merges, (int32_t)i);
    while (merging->heap_count) merge_candidate(merging, merges, pop(merging));
    return MS_OK;
}

void ms_merging_free(ms_context *context, ms_merging *merging)
{
    ms_release(context, merging->symbols);
    ms_release(context, merging->heap);
    *merging = (ms_merging){ 0 };
}
