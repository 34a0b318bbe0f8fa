/* main.c: the program of a layer's unit tests. Each file in tests/unit/LAYER is a test with a main
 * of its own, which the build renames; the name by which the program is called chooses it. The
 * build makes a link of each test's name to its program.
 *
 * tests.h, which the build writes for each program, has TEST(name) or TEST_WITH_ARGUMENTS(name) for
 * each of its tests, and declares their functions. */
#include <stdio.h>
#include <string.h>

#include "tests.h"

int main(int argc, char **argv)
{
    const char *slash = argc > 0 ? strrchr(argv[0], '/') : NULL;
    const char *name = slash ? slash + 1 : argc > 0 ? argv[0] : "";
#define TEST(test) \
    if (strcmp(name, #test) == 0) return ms_test_##test();
#define TEST_WITH_ARGUMENTS(test) \
    if (strcmp(name, #test) == 0) return ms_test_##test(argc, argv);
    TESTS
    fprintf(stderr, "%s: no test of this program has that name: call it by the link of a test\n",
            name);
    return 2;
}
