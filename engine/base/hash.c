/* hash.c: the 64-bit hash of tables, order checks and checksums. */
#include "base/hash.h"

#include "base/assert.h"

/* The library's state for pieces is complete only with this. */
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>
/* The plain functions of a library for x86 use SSE2, with which hashing is slower than memory.
 * These take the processor's widest instructions, and give the same values. */
#ifdef MS_XXHASH_DISPATCH
#include <xxh_x86dispatch.h>
#endif

/* XXH3: fast and well mixed, but not cryptographic. Its values are stored in checkpoints and
 * compared between ranks, so another function would make them differ. */
uint64_t ms_hash(const void *data, size_t bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, bytes, seed);
}

/* Each piece is hashed for the whole and for its block while it is in a cache. */
ms_status ms_hash_pieces(ms_next_piece *next, void *user, size_t block, uint64_t *hashes)
{
    XXH3_state_t whole, one;
    size_t hashed = 0, bytes = 0; /* of the block; of the piece */
    uint64_t *of_block = hashes + 1;
    const void *piece = NULL;
    (void)XXH3_64bits_reset(&whole);
    (void)XXH3_64bits_reset(&one);
    for (;;) {
        ms_status status = next(user, &piece, &bytes);
        if (status) return status;
        if (bytes == 0) break;
        (void)XXH3_64bits_update(&whole, piece, bytes);
        if (block == 0) continue;
        (void)XXH3_64bits_update(&one, piece, bytes);
        hashed += bytes;
        MS_ASSERT(hashed <= block);
        if (hashed < block) continue;
        *of_block++ = XXH3_64bits_digest(&one);
        (void)XXH3_64bits_reset(&one);
        hashed = 0;
    }
    if (hashed) *of_block = XXH3_64bits_digest(&one);
    hashes[0] = XXH3_64bits_digest(&whole);
    return MS_OK;
}
