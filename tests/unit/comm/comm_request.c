/* comm_request.c: requests of a supervisor: all ranks meet them before the same step, whenever they
 * come and however unevenly the ranks run. ctest: cuda-local */
#include "comm_support.h"

#define STEPS 400

/* Each rank counts on by itself; between steps some do more than others. Met at: where each rank
 * met the stop, and how often it was to save. */
static void stepping(rank *self)
{
    volatile uint64_t *met_at =
        (volatile uint64_t *)(uintptr_t)self->job->argument + (size_t)self->number * 8;
    uint8_t values[MS_REQUESTS];
    for (uint64_t serial = 1; serial <= STEPS; serial++) {
        ms_comm_step(self->engine, serial, (int64_t)serial + 9, values);
        if (values[MS_REQUEST_SAVE])
            met_at[1 + met_at[4]++ % 3] = serial << 8 | values[MS_REQUEST_SAVE];
        if (values[MS_REQUEST_STOP]) {
            met_at[0] = serial << 8 | values[MS_REQUEST_STOP];
            break;
        }
        if (self->number == serial % self->ranks) {
            ms_rank_state state;
            ms_rendezvous_rank(self->rendezvous, self->number, &state);
            CHECK(state.step == (int64_t)serial + 9);
        }
        /* No rank reaches the end before the others have made their requests. */
        if (serial == 302) OK(ms_group_barrier(self->world, 0));
        /* Rank 1 asks, as a signal handler in any of them or a supervisor would. */
        if (self->number == 1 && serial % 50 == 7)
            ms_rendezvous_request(self->rendezvous, MS_REQUEST_SAVE, (uint8_t)(serial % 100 + 1));
        if (self->number == 1 && serial == 301)
            ms_rendezvous_request(self->rendezvous, MS_REQUEST_STOP, 15);
        if (self->number == 2 && serial == 300)
            ms_rendezvous_request(self->rendezvous, MS_REQUEST_STOP, 2);
    }
}

static void all_meet(job_kind kind)
{
    enum { RANKS = 4 };
    uint64_t *met_at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(met_at != MAP_FAILED);
    for (int round = 0; round < 20; round++) {
        memset(met_at, 0, 4096);
        rank ranks[RANKS];
        job what = { .kind = kind,
                     .options = { .ranks = RANKS, .heap_bytes = 1 << 20 },
                     .run = stepping,
                     .argument = met_at };
        ms_abort_record cause = run_job(&what, ranks);
        assert_int_equal(cause.reason, MS_ABORT_NONE);
        for (int r = 0; r < RANKS; r++) assert_string_equal(ranks[r].why, "");
        assert_int_not_equal(met_at[0], 0);
        for (int r = 1; r < RANKS; r++)
            assert_memory_equal(met_at, met_at + (size_t)r * 8, 8 * sizeof *met_at);
    }
    munmap(met_at, 4096);
}

static void threads_meet(void **state)
{
    (void)state;
    all_meet(THREADS);
}

static void processes_meet(void **state)
{
    (void)state;
    all_meet(PROCESSES);
}

static void a_folder_is_told(rank *self)
{
    if (self->number == 1) ms_comm_set_folder(self->engine, "runs/first");
    OK(ms_group_barrier(self->world, 0));
    ms_comm_set_folder(self->engine, "runs/second");
    char text[MS_FOLDER_BYTES];
    CHECK(strcmp(ms_rendezvous_folder(self->rendezvous, text, sizeof text), "runs/first") == 0);
    CHECK(strcmp(ms_rendezvous_folder(self->rendezvous, text, 4), "") == 0);
}

static void folders(void **state)
{
    (void)state;
    rank ranks[3];
    job what = { .kind = THREADS,
                 .options = { .ranks = 3, .heap_bytes = 1 << 20 },
                 .run = a_folder_is_told };
    assert_int_equal(run_job(&what, ranks).reason, MS_ABORT_NONE);
    for (int r = 0; r < 3; r++) assert_string_equal(ranks[r].why, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(threads_meet),
                                        cmocka_unit_test(processes_meet),
                                        cmocka_unit_test(folders) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
