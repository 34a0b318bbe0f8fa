/* hash.c: the 64-bit hash behind tables, order checks and checksums. */
#include "moonshard/base.h"

#include <xxhash.h>

uint64_t ms_hash(const void *data, size_t bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, bytes, seed);
}
