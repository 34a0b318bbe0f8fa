/* comm_straggler.c: a straggler is reported once, early enough, with its position. The clock is the
 * test's. ctest: cuda-local */
#include "comm_support.h"

#include <stdatomic.h>
#include <time.h>

enum { RANKS = 3, STEPS = 5 };

typedef struct watch {
    atomic_ullong now; /* of all ranks */
    atomic_int told;
    char lines[2][MS_ERROR_MESSAGE_BYTES]; /* written before told counts them */
} watch;

static watch *the_watch; /* shared with ranks that have a process of their own */

static uint64_t read_clock(void *user)
{
    (void)user;
    return atomic_load(&the_watch->now);
}

static void keep(void *user, ms_log_level level, const char *message)
{
    watch *w = user;
    int place = atomic_load(&w->told);
    if (level != MS_LOG_WARN) return;
    if (place < 2) snprintf(w->lines[place], sizeof w->lines[place], "%s", message);
    atomic_fetch_add(&w->told, 1);
}

static void pass(watch *w, uint64_t ns)
{
    nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
    atomic_fetch_add(&w->now, ns);
}

/* Ranks 1 and 2 wait in a barrier for rank 0, which lets time pass until it was reported, and then
 * the same time again. */
static void let_wait(rank *self, int told)
{
    watch *w = (watch *)(uintptr_t)self->job->argument;
    if (self->number == 0) {
        uint64_t begin = atomic_load(&w->now);
        while (atomic_load(&w->told) < told) pass(w, 20000000);
        for (uint64_t end = 2 * atomic_load(&w->now) - begin; atomic_load(&w->now) < end;)
            pass(w, 100000000);
    }
    OK(ms_group_barrier(self->world, 0));
}

static void straggle(rank *self)
{
    watch *w = (watch *)(uintptr_t)self->job->argument;
    uint8_t requests[MS_REQUESTS];
    let_wait(self, 1);
    for (int step = 0; step < STEPS; step++) {
        ms_comm_step(self->engine, (uint64_t)step + 1, step, requests);
        OK(ms_group_barrier(self->world, 0));
        if (self->number == 0) pass(w, 2000000000);
        OK(ms_group_barrier(self->world, 0));
    }
    let_wait(self, 2);
}

static double seconds_in(const char *line)
{
    const char *waited = strstr(line, " has waited ");
    return waited ? strtod(waited + 12, NULL) : -1;
}

static void a_rank_that_keeps_others_waiting_is_told_about_once(void **state)
{
    (void)state;
    static rank ranks[RANKS];
    ms_os os = *ms_os_posix();
    os.monotonic_ns = read_clock;
    the_watch = shared_memory(sizeof *the_watch);
    atomic_store(&the_watch->now, 1000000000);
    job work = { .kind = THREADS,
                 .options = { .ranks = RANKS,
                              .threads = 1,
                              .heap_bytes = 16 << 20,
                              .timeout_ns = 300000000000u },
                 .os = &os,
                 .run = straggle,
                 .argument = the_watch,
                 .log = keep };
    ms_abort_record cause = run_job(&work, ranks);
    for (int r = 0; r < RANKS; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
    assert_int_equal(cause.reason, MS_ABORT_NONE);
    if (atomic_load(&the_watch->told) != 2)
        fail_msg("told %d times: %s\n%s", atomic_load(&the_watch->told), the_watch->lines[0],
                 the_watch->lines[1]);
    const char *first = the_watch->lines[0], *second = the_watch->lines[1];
    /* Without steps 5 s are long, and with steps of 2 s, 20 s. */
    if (seconds_in(first) < 5 || seconds_in(first) >= 20 || seconds_in(second) < 20)
        fail_msg("%s\n%s", first, second);
    assert_non_null(strstr(first, " s for rank 0 in barrier #1 of world"));
    assert_non_null(
        strstr(first, "gives up after 300 s; it has begun no step and has not called it"));
    assert_null(strstr(first, "before"));
    assert_non_null(strstr(second, "in barrier #12 of world"));
    assert_non_null(strstr(
        second, "; it is at step 4 and has not called it; before, it was in barrier #11 of world"));
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(
        a_rank_that_keeps_others_waiting_is_told_about_once) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
