/* hash.c: the 64-bit hash of tables, order checks and checksums. */
#include "base/hash.h"

/* The library's state for blocks is complete only with this. */
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

ms_status ms_hash_blocks(ms_next_block *next, void *user, uint64_t *out)
{
    XXH3_state_t state;
    const void *block = NULL;
    size_t bytes = 0;
    (void)XXH3_64bits_reset(&state);
    for (;;) {
        ms_status status = next(user, &block, &bytes);
        if (status) return status;
        if (bytes == 0) break;
        (void)XXH3_64bits_update(&state, block, bytes);
    }
    *out = XXH3_64bits_digest(&state);
    return MS_OK;
}
