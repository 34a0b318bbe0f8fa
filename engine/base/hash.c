/* hash.c: the 64-bit hash of tables, order checks and checksums. */
#include "moonshard/base.h"

#include <xxhash.h>

/* XXH3: fast and well mixed, but not cryptographic. Its values are stored in checkpoints and
 * compared between ranks, so another function would make them differ. */
uint64_t ms_hash(const void *data, size_t bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, bytes, seed);
}
