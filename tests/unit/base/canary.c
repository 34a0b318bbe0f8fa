/* canary.c: in builds with the thread sanitizer a missing wait between streams is reported even if
 * the tasks touch no memory that the sanitizer can see, as products in a library do. The program
 * starts itself once with the wait and once without it. */
#include "exec/state.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <sys/wait.h>

#if defined(__SANITIZE_THREAD__)
enum { WATCHED = 1 };
#else
enum { WATCHED = 0 };
#endif

static const char *self;

static ms_task_result nothing(ms_run *run, void *arguments)
{
    (void)run;
    (void)arguments;
    return MS_TASK_DONE;
}

/* Two streams write to one storage. Without the wait: the hazard record of the first write is
 * erased, as if the task had not declared it. */
static int two_streams(bool with_wait)
{
    static const ms_task task = { .name = "library_product", .function = nothing };
    ms_engine *engine = NULL;
    ms_stream *side = NULL;
    ms_storage *storage = NULL;
    ms_engine_options options = { .threads = 1 };
    if (ms_engine_new(&options, NULL, &engine) || ms_engine_stream(engine, "side", &side)
        || ms_storage_new(ms_engine_current(engine), 64, &storage))
        return 3;
    ms_access access = { .storage = storage, .cells = 1, .mode = MS_WRITE };
    for (int i = 0; i < 200; i++) {
        ms_stream *stream = i % 2 ? side : ms_engine_current(engine);
        if (!with_wait) memset(storage->cells, 0, sizeof *storage->cells);
        if (ms_stream_enqueue(stream, &task, NULL, &access, 1, (ms_task_cost){ 0 }, NULL)) return 4;
    }
    if (ms_engine_sync(engine)) return 5;
    ms_storage_release(storage);
    ms_engine_free(engine);
    return 0;
}

/* Runs this program again; its exit status, and whether it reported a race. */
static int again(const char *argument, bool *race)
{
    char command[4096], line[512];
    snprintf(command, sizeof command, "'%s' %s 2>&1", self, argument);
    FILE *output = popen(command, "r");
    assert_non_null(output);
    *race = false;
    while (fgets(line, sizeof line, output)) *race |= strstr(line, "data race") != NULL;
    int status = pclose(output);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void a_missing_wait_is_reported(void **state)
{
    (void)state;
    bool race = false;
    int code = again("missing", &race);
    assert_int_equal(race, WATCHED);
    assert_int_equal(code != 0, WATCHED);
}

static void ordered_streams_are_not(void **state)
{
    (void)state;
    bool race = true;
    assert_int_equal(again("ordered", &race), 0);
    assert_false(race);
}

int main(int argc, char **argv)
{
    if (argc == 2) return two_streams(strcmp(argv[1], "ordered") == 0);
    self = argv[0];
    const struct CMUnitTest tests[] = { cmocka_unit_test(a_missing_wait_is_reported),
                                        cmocka_unit_test(ordered_streams_are_not) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
