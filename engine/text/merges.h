/* merges.h: byte pair encoding: which pairs of tokens are merged, in which order, and how the
 * tokens of a piece are merged (Sennrich, Haddow, Birch: Neural Machine Translation of Rare Words
 * with Subword Units, 2016).
 *
 * The pair of the lowest rank is merged first, and of equal ranks the leftmost. A piece of n tokens
 * takes O(n log n) steps: candidates wait in a heap, and tokens are a linked list. */
#ifndef MOONSHARD_TEXT_MERGES_H
#define MOONSHARD_TEXT_MERGES_H

#include "moonshard/tokenizer.h"

/* left, right: the ids of a pair; made: the id that it becomes. */
typedef struct ms_merge {
    uint32_t left, right, rank, made;
} ms_merge;

/* The pairs, in a hash table. slot_count is a power of two, or 0. */
typedef struct ms_merges {
    ms_merge *slots; /* made is MS_NO_TOKEN in free ones */
    size_t slot_count, used;
} ms_merges;

/* Adds a pair. One that is there already gets the new rank and token. */
ms_status ms_merges_add(ms_context *context, ms_merges *merges, ms_merge merge);
/* The pair, or NULL. */
const ms_merge *ms_merges_find(const ms_merges *merges, uint32_t left, uint32_t right);
void ms_merges_free(ms_context *context, ms_merges *merges);

/* A token of the piece. Positions count from 0; -1: none. */
typedef struct ms_symbol {
    uint32_t id; /* MS_NO_TOKEN: it became part of the one before */
    int32_t previous, next;
} ms_symbol;

typedef struct ms_candidate {
    uint64_t order; /* the rank, then the position */
    uint32_t left, right, made;
} ms_candidate;

/* The memory of one thread. */
typedef struct ms_merging {
    ms_symbol *symbols;
    size_t count, symbol_capacity;
    ms_candidate *heap;
    size_t heap_count, heap_capacity;
} ms_merging;

/* Begins a piece. */
static inline void ms_merging_begin(ms_merging *merging) { merging->count = 0; }
/* Appends a token to the piece. A piece has at most INT32_MAX. */
ms_status ms_merging_add(ms_context *context, ms_merging *merging, uint32_t id);
/* Merges. What is left are the symbols from 0 on, by `next`. */
ms_status ms_merging_run(ms_context *context, ms_merging *merging, const ms_merges *merges);
void ms_merging_free(ms_context *context, ms_merging *merging);

#endif
