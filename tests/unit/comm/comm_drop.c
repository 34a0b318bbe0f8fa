/* comm_drop.c: collectives on storages that are dropped and refilled, in heaps and elsewhere.
 * ctest: cuda-local */
#include "comm_support.h"

enum { PART = 100 };

static double of_rank(const void *context, int64_t i)
{
    return 1000.0 * *(const uint32_t *)context + (double)i;
}

static double stepped(const void *context, int64_t i) { return of_rank(context, i) + 1; }

static double of_all(const void *context, int64_t i)
{
    return 1000.0 * (double)(i / PART) + (double)(i % PART) + *(const double *)context;
}

static ms_status gather(rank *self, ms_tensor *shard, ms_tensor *full)
{
    ms_collective call = {
        .kind = MS_ALL_GATHER, .in = shard, .out = full, .bucket = -1, .restore = true
    };
    return run_one(self, self->world, &call);
}

/* A refused call is not published to the peers, so this rank and its peers can continue. */
static void refused(rank *self, ms_tensor *shard, ms_tensor *full)
{
    CHECK(gather(self, shard, full) == MS_ERROR_STATE);
    CHECK(
        strcmp(ms_engine_error(self->engine)->message,
               "all_gather touches memory (1200 bytes, made at the engine) that unit 0 has dropped "
               "(at the engine): refill it first")
        == 0);
    CHECK(gather(self, full, shard) == MS_ERROR_ARGUMENT);
    ms_collective reduce = { .kind = MS_ALL_REDUCE, .in = full, .bucket = -1 };
    CHECK(ms_group_enqueue(self->world, 1, &reduce, NULL) == MS_ERROR_STATE);
    reduce = (ms_collective){ .kind = MS_ALL_REDUCE, .in = shard, .bucket = -1, .restore = true };
    CHECK(ms_group_enqueue(self->world, 1, &reduce, NULL) == MS_ERROR_ARGUMENT);
}

static void gather_again(rank *self)
{
    for (int heap = 0; heap < 2; heap++) {
        double more = 0;
        int64_t all = PART * (int64_t)self->ranks;
        ms_tensor *shard = NULL, *full = NULL, *filler = NULL;
        ms_stream *stream = NULL;
        OK(ms_group_stream(self->world, 1, &stream));
        OK(make(self, MS_F32, all, heap, &full));
        OK(make(self, MS_F32, PART, heap, &shard));
        OK(fill(shard, of_rank, &self->number));
        OK(gather(self, shard, full));
        CHECK(equals(full, of_all, &more));
        uint64_t version = ms_tensor_version(full);
        OK(ms_storage_drop(ms_tensor_storage(full), "unit 0"));
        refused(self, shard, full);
        if (*self->why) return;
        /* On one rank another storage takes the old place: peers must find each rank's memory at
         * its new place. */
        if (self->number == 1) OK(make(self, MS_F32, all, heap, &filler));
        OK(ms_storage_refill(ms_tensor_storage(full), stream));
        OK(gather(self, shard, full));
        CHECK(ms_tensor_version(full) == version);
        CHECK(equals(full, of_all, &more));
        /* A step of the shard. */
        OK(ms_storage_drop(ms_tensor_storage(full), "unit 0"));
        more = 1;
        OK(fill(shard, stepped, &self->number));
        OK(ms_storage_refill(ms_tensor_storage(full), stream));
        OK(gather(self, shard, full));
        CHECK(ms_tensor_version(full) > version);
        CHECK(equals(full, of_all, &more));
        ms_tensor_release(shard);
        ms_tensor_release(full);
        ms_tensor_release(filler);
        CHECK(ms_engine_memory(self->engine).live == 0);
    }
}

static void gathered_memory_is_dropped_and_gathered_again(void **state)
{
    (void)state;
    run_well(THREADS, 3, gather_again, NULL);
}

static void processes_gather_again(void **state)
{
    (void)state;
    run_well(PROCESSES, 3, gather_again, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gathered_memory_is_dropped_and_gathered_again),
        cmocka_unit_test(processes_gather_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
