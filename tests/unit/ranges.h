/* ranges.h: how much tests try. */
#ifndef MOONSHARD_TESTS_RANGES_H
#define MOONSHARD_TESTS_RANGES_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Long ranges of seeds, sizes and combinations (`./moonshard test --full`). */
static inline bool ranges_are_long(void)
{
    const char *asked = getenv("MOONSHARD_TEST_FULL");
    return asked && strcmp(asked, "1") == 0;
}

/* A sample of the sizes, unless long ranges are asked for: .ci/run wants it under sanitizers, which
 * see from few sizes what they see from many, and take ten times as long. */
static inline bool ranges_are_short(void)
{
    const char *asked = getenv("MOONSHARD_TEST_SHORT");
    return asked && strcmp(asked, "1") == 0 && !ranges_are_long();
}

#endif
