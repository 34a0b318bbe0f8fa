/* comm_world.c: how a job is made, handed to other programs and refused; fake worlds and their
 * accounts; the link; groups that tasks look at; memory that runs out. ctest: cuda-local */
#include "comm_support.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "comm/control_table.h"
#include "comm/state.h"
#include "fault_os.h"

static ms_engine *alone(const char *device)
{
    ms_engine_options options = {
        .device = device, .threads = 1, .strict = true, .memory_bytes = 256 << 20
    };
    ms_engine *engine = NULL;
    assert_int_equal(ms_engine_new(&options, NULL, &engine), MS_OK);
    return engine;
}

/* ------------------------------------------------- handed to other programs */

/* Runs when this program is started as a rank: adds its number and 1 over all ranks. */
static int as_rank(const char *number)
{
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    ms_group *world = NULL;
    ms_tensor *t = NULL;
    ms_point ready;
    int64_t one = 1;
    float value = (float)(atoi(number) + 1), got = 0;
    ms_context_init(&context, NULL);
    if (ms_rendezvous_adopt(&context, getenv(MS_RENDEZVOUS_VARIABLE), &rendezvous)) return 2;
    ms_engine *engine = alone("cpu");
    ms_status joined = ms_comm_open(engine, rendezvous, (uint32_t)atoi(number), &world);
    ms_rendezvous_release(rendezvous);
    if (joined) {
        ms_engine_free(engine);
        return 3;
    }
    if (ms_tensor_new(engine, MS_F32, 1, &one, &t) || ms_tensor_write(t, &value, 4)) return 4;
    ms_collective c = { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 };
    if (ms_group_enqueue(world, 1, &c, &ready) || ms_tensor_read(t, &got, 4)) return 5;
    ms_tensor_release(t);
    ms_engine_free(engine);
    return got == 6 ? 0 : 6;
}

static const char *self_path;

static int start(const char *number, const char *variable)
{
    pid_t child = fork();
    if (child == 0) {
        setenv(MS_RENDEZVOUS_VARIABLE, variable, 1);
        execl(self_path, self_path, "rank", number, (char *)NULL);
        _exit(9);
    }
    return child;
}

static void programs_inherit_a_job(void **state)
{
    (void)state;
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    ms_rendezvous_options options = { .ranks = 3, .threads = 1, .heap_bytes = 8 << 20 };
    char text[128], tiny[12];
    ms_context_init(&context, NULL);
    assert_int_equal(ms_rendezvous_new(&context, &options, &rendezvous), MS_OK);
    assert_int_equal(ms_rendezvous_share(rendezvous, &context, tiny, sizeof tiny),
                     MS_ERROR_ARGUMENT);
    assert_int_equal(ms_rendezvous_share(rendezvous, &context, text, 32 + 12 * 3), MS_OK);
    int children[3];
    const char *numbers[] = { "0", "1", "2" };
    for (int r = 0; r < 3; r++) children[r] = start(numbers[r], text);
    for (int r = 0; r < 3; r++) {
        int status = -1;
        ms_rank_state after;
        ms_flight flight;
        char line[256];
        waitpid(children[r], &status, 0);
        assert_int_equal(status, 0);
        ms_rendezvous_rank(rendezvous, (uint32_t)r, &after);
        assert_int_equal(after.phase, MS_RANK_LEFT);
        assert_int_equal(after.process, children[r]);
        assert_int_equal(after.collectives, 1);
        assert_true(ms_rendezvous_flight(rendezvous, (uint32_t)r, 0, &flight));
        assert_true(flight.left_ns >= flight.entered_ns);
        assert_string_equal(ms_flight_describe(&flight, line, sizeof line),
                            "all_reduce #1 of world [f32 x 1, sum]");
        assert_false(ms_rendezvous_flight(rendezvous, (uint32_t)r, 1, &flight));
    }
    /* No other engine may be rank 0 now. */
    int status = 0;
    waitpid(start("0", text), &status, 0);
    assert_int_equal(WEXITSTATUS(status), 3);
    ms_rendezvous_release(rendezvous);
}

static void what_is_no_job_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = { "",
                                       "local1:",
                                       "local1:2:",
                                       "local1:2:3,4",
                                       "local1:2:1,1,1",
                                       "local1:0:5",
                                       "local1:9999:5",
                                       "local1:2:999999,5,6",
                                       "local1:1:abc,1",
                                       "local2:1:5,6",
                                       "local1:1:5,6,7",
                                       "local1:1:-4,-5" };
    ms_context context;
    ms_context_init(&context, NULL);
    /* A file of another kind under the descriptors that are named. */
    char path[] = "/tmp/moonshard-comm-XXXXXX", named[64];
    int other = mkstemp(path), copy = dup(other);
    unlink(path);
    snprintf(named, sizeof named, "local1:1:%d,%d", other, copy);
    for (size_t i = 0; i <= sizeof bad / sizeof *bad; i++) {
        ms_rendezvous *rendezvous = NULL;
        const char *text = i < sizeof bad / sizeof *bad ? bad[i] : named;
        if (ms_rendezvous_adopt(&context, text, &rendezvous) != MS_ERROR_CORRUPT)
            fail_msg("'%s' was taken", text);
        assert_non_null(strstr(context.error.message, MS_RENDEZVOUS_VARIABLE));
        assert_null(rendezvous);
    }
    ms_rendezvous *rendezvous = NULL;
    ms_rendezvous_options options = { .ranks = MS_LOCAL_RANKS_MAX + 1 };
    assert_int_equal(ms_rendezvous_new(&context, &options, &rendezvous), MS_ERROR_ARGUMENT);
    options.ranks = 0;
    assert_int_equal(ms_rendezvous_new(&context, &options, &rendezvous), MS_ERROR_ARGUMENT);
}

static void a_rank_is_taken_once(void **state)
{
    (void)state;
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    ms_rendezvous_options options = { .ranks = 2, .heap_bytes = 8 << 20 };
    ms_context_init(&context, NULL);
    assert_int_equal(ms_rendezvous_new(&context, &options, &rendezvous), MS_OK);
    ms_engine *a = alone("cpu"), *b = alone("cpu"), *sim = alone("sim");
    ms_group *world = NULL, *none = NULL;
    assert_null(ms_comm_world(a));
    assert_int_equal(ms_comm_open(a, rendezvous, 2, &none), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_comm_open(sim, rendezvous, 0, &none), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_comm_open(a, rendezvous, 0, &world), MS_OK);
    assert_ptr_equal(ms_comm_world(a), world);
    assert_int_equal(ms_comm_open(b, rendezvous, 0, &none), MS_ERROR_STATE);
    assert_int_equal(ms_comm_open(a, rendezvous, 1, &none), MS_ERROR_STATE);
    assert_int_equal(ms_comm_open_fake(a, 0, 1, &none), MS_ERROR_STATE);
    assert_int_equal(ms_comm_open_fake(b, 3, 3, &none), MS_ERROR_ARGUMENT);
    assert_null(none);
    ms_engine_free(a);
    ms_engine_free(b);
    ms_engine_free(sim);
    ms_rendezvous_release(rendezvous);
}

/* ---------------------------------------------------------------- arguments */

static void wrong_arguments_say_what_would_be_right(void **state)
{
    (void)state;
    ms_engine *engine = alone("cpu"), *other = alone("cpu");
    ms_group *world = NULL, *part = NULL;
    ms_tensor *t = NULL, *out = NULL, *integers = NULL, *foreign = NULL, *turned = NULL,
              *small = NULL;
    int64_t ten = 10, shape[] = { 2, 5 }, one_by_two[] = { 1, 2 }, five = 5,
            negative[] = { -1, 5, 6 }, three[] = { 3, 3, 4 };
    assert_int_equal(ms_comm_open_fake(engine, 1, 3, &world), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &ten, &t), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &ten, &out), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &five, &small), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_I32, 1, &ten, &integers), MS_OK);
    assert_int_equal(ms_tensor_new(other, MS_F32, 1, &ten, &foreign), MS_OK);
    assert_int_equal(ms_tensor_window(t, 2, shape, one_by_two, 0, &turned), MS_OK);
    const struct {
        uint32_t channel;
        ms_collective c;
        const char *says;
    } cases[] = {
        { MS_CHANNEL_NUMBERS, { .kind = MS_ALL_REDUCE, .in = t }, "channel 4" },
        { 1, { .kind = MS_ALL_REDUCE }, "tensor is missing" },
        { 1, { .kind = MS_BARRIER, .in = t }, "brings no tensor" },
        { 1, { .kind = MS_ALL_GATHER, .in = t }, "result is missing" },
        { 1, { .kind = MS_BROADCAST, .in = t, .out = out }, "no separate result" },
        { 1, { .kind = MS_REDUCE, .in = t, .out = out, .root = 0 }, "no separate result" },
        { 1, { .kind = MS_BROADCAST, .in = t, .root = 3 }, "ranks 0 to 2" },
        { 1, { .kind = MS_SEND, .in = t, .root = 1 }, "is this rank" },
        { 1, { .kind = MS_ALL_REDUCE, .in = foreign }, "another engine" },
        { 1, { .kind = MS_ALL_REDUCE, .in = turned }, "not contiguous" },
        { 1, { .kind = MS_ALL_REDUCE, .in = t, .out = integers }, "one dtype" },
        { 1,
          { .kind = MS_ALL_REDUCE, .in = t, .out = small },
          "out has 5 elements, 10 are expected" },
        { 1, { .kind = MS_ALL_REDUCE, .in = integers, .op = MS_REDUCE_OP_AVG }, "avg of i32" },
        { 1,
          { .kind = MS_ALL_REDUCE, .in = integers, .op = MS_REDUCE_OP_PREMUL_SUM },
          "premul_sum of i32" },
        { 1,
          { .kind = MS_ALL_REDUCE, .in = integers, .travels = MS_F16 },
          "only an all_reduce of f32 in place" },
        { 1,
          { .kind = MS_ALL_REDUCE, .in = t, .out = out, .travels = MS_F16 },
          "only an all_reduce of f32 in place" },
        { 1,
          { .kind = MS_ALL_REDUCE, .in = t, .travels = MS_I32 },
          "only an all_reduce of f32 in place" },
        { 1,
          { .kind = MS_BROADCAST, .in = t, .travels = MS_F16 },
          "only an all_reduce of f32 in place" },
        { 1,
          { .kind = MS_REDUCE_SCATTER, .in = t, .out = small },
          "10 elements do not divide by 3 ranks: pad to 12" },
        { 1,
          { .kind = MS_REDUCE_SCATTER, .in = t, .out = small, .counts = three },
          "out has 5 elements, 3 are expected" },
        { 1,
          { .kind = MS_REDUCE_SCATTER, .in = small, .out = small, .counts = three },
          "in has 5 elements, 10 are expected" },
        { 1, { .kind = MS_ALL_GATHER, .in = small, .out = t, .counts = negative }, "negative" },
        { 1, { .kind = MS_ALL_REDUCE, .in = t, .counts = three }, "counts" },
        { 1, { .kind = MS_ALL_TO_ALL, .in = t, .out = out, .counts = three }, "counts" },
        { 1, { .kind = MS_SPLIT }, "no such collective" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(ms_group_enqueue(world, cases[i].channel, &cases[i].c, NULL),
                         MS_ERROR_ARGUMENT);
        if (!strstr(ms_engine_error(engine)->message, cases[i].says))
            fail_msg("'%s' does not say '%s'", ms_engine_error(engine)->message, cases[i].says);
    }
    assert_int_equal(ms_group_traffic(world, MS_COLLECTIVES).calls, 0);
    static const uint32_t twice[] = { 0, 0 }, far[] = { 0, 7 }, sizes[] = { 2 }, empty[] = { 0 };
    assert_int_equal(ms_group_split(world, 1, sizes, twice, &part), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_group_split(world, 1, sizes, far, &part), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_group_split(world, 1, empty, far, &part), MS_ERROR_ARGUMENT);
    assert_int_equal(ms_group_split(world, 0, NULL, NULL, &part), MS_ERROR_ARGUMENT);
    ms_tensor *all[] = { t, out, integers, foreign, turned, small };
    for (int i = 0; i < 6; i++) ms_tensor_release(all[i]);
    ms_engine_free(engine);
    ms_engine_free(other);
}

/* ---------------------------------------------------- accounts, fake worlds */

typedef struct accounts {
    ms_traffic traffic[MS_COLLECTIVES + 1];
    uint64_t hash, peak;
    size_t records;
} accounts;

/* One of each kind, on both channels and in a half of the world, with 24 f32 elements. Fake worlds
 * make no send and recv, which need two. */
static ms_status one_of_each(ms_engine *engine, ms_group *world, accounts *out)
{
    static const uint32_t halves[] = { 0, 1, 2, 3 }, sizes[] = { 2, 2 };
    int64_t whole = 24, part = 6;
    uint32_t own = ms_group_rank(world);
    ms_storage *storage = NULL;
    ms_tensor *t = NULL, *p = NULL;
    ms_group *half = NULL;
    ms_comm_record(engine, true);
    ms_status status = ms_group_storage(world, ms_engine_current(engine), 96, &storage);
    if (!status) status = ms_tensor_on(storage, MS_F32, 1, &whole, &t);
    if (!status) status = ms_tensor_new(engine, MS_F32, 1, &part, &p);
    if (!status) status = ms_group_split(world, 2, sizes, halves, &half);
    ms_tensor *gathered = own == 3 ? t : NULL;
    ms_tensor *scattered = own ? NULL : t;
    const ms_collective calls[] = {
        { .kind = MS_ALL_REDUCE, .in = t, .bucket = 0 },
        { .kind = MS_REDUCE, .in = t, .root = 1 },
        { .kind = MS_REDUCE_SCATTER, .in = t, .out = p },
        { .kind = MS_ALL_GATHER, .in = p, .out = t },
        { .kind = MS_BROADCAST, .in = t, .root = 2 },
        { .kind = MS_GATHER, .in = p, .out = gathered, .root = 3 },
        { .kind = MS_SCATTER, .in = scattered, .out = p, .root = 0 },
        { .kind = MS_BARRIER },
    };
    for (size_t i = 0; i < sizeof calls / sizeof *calls && !status; i++)
        status = ms_group_enqueue(world, 1 + (uint32_t)i % 2, &calls[i], NULL);
    if (!status) status = ms_group_enqueue(half, 1, &calls[0], NULL);
    if (!status) status = ms_engine_sync(engine);
    for (int kind = 0; kind <= MS_COLLECTIVES; kind++)
        out->traffic[kind] = ms_group_traffic(world, (ms_collective_kind)kind);
    out->hash = ms_comm_order_hash(engine);
    out->records = ms_comm_record_count(engine);
    out->peak = ms_engine_memory(engine).peak;
    ms_tensor_release(t);
    ms_tensor_release(p);
    ms_storage_release(storage);
    return status;
}

static void account_as_rank(rank *self)
{
    accounts *all = *(accounts *const *)self->job->argument;
    OK(one_of_each(self->engine, self->world, &all[self->number]));
}

static void a_fake_world_counts_as_a_real_one(void **state)
{
    (void)state;
    accounts *real = shared_memory(4 * sizeof *real), fake;
    run_well(THREADS, 4, account_as_rank, &real);
    for (uint32_t rank_number = 0; rank_number < 4; rank_number++)
        for (int sim = 0; sim < 2; sim++) {
            ms_engine *engine = alone(sim ? "sim" : "cpu");
            ms_group *world = NULL;
            memset(&fake, 0, sizeof fake);
            assert_int_equal(ms_comm_open_fake(engine, rank_number, 4, &world), MS_OK);
            assert_true(!ms_group_has_others(world));
            assert_int_equal(one_of_each(engine, world, &fake), MS_OK);
            assert_memory_equal(&fake, &real[rank_number], sizeof fake);
            assert_int_equal(fake.records, 10);
            assert_int_equal(ms_comm_record_get(engine, 0)->kind, MS_SPLIT);
            assert_string_equal(ms_group_name(ms_comm_record_get(engine, 9)->group),
                                rank_number < 2 ? "world/1.0" : "world/1.1");
            assert_null(ms_comm_record_get(engine, 10));
            ms_engine_free(engine);
        }
    assert_int_equal(real[0].hash, real[1].hash);
    assert_true(real[0].hash != real[2].hash); /* another half */
    /* S = 96 bytes, N = 4. */
    assert_int_equal(real[0].traffic[MS_ALL_REDUCE].wire_bytes, 144);
    assert_int_equal(real[0].traffic[MS_REDUCE].wire_bytes, 96);
    assert_int_equal(real[0].traffic[MS_REDUCE_SCATTER].wire_bytes, 72);
    assert_int_equal(real[0].traffic[MS_ALL_GATHER].wire_bytes, 72);
    assert_int_equal(real[0].traffic[MS_ALL_GATHER].payload_bytes, 24);
    assert_int_equal(real[0].traffic[MS_BROADCAST].wire_bytes, 96);
    assert_int_equal(real[1].traffic[MS_SCATTER].payload_bytes, 0);
    assert_int_equal(real[0].traffic[MS_SCATTER].payload_bytes, 96);
    assert_int_equal(real[0].traffic[MS_COLLECTIVES].calls, 9);
    munmap(real, 4 * sizeof *real);
}

static double counting(const void *context, int64_t i)
{
    return (double)i * (context ? *(const double *)context : 1);
}
static double modulo_six(const void *context, int64_t i)
{
    return (double)(i % 6) + (context ? *(const double *)context : 0);
}

/* As if all other ranks had brought the same. */
static void a_fake_world_repeats_this_rank(void **state)
{
    (void)state;
    ms_engine *engine = alone("cpu");
    ms_group *world = NULL;
    ms_tensor *t = NULL, *whole = NULL;
    int64_t six = 6, many = 6 * 200;
    double factor = 200, from = 0;
    ms_point ready;
    assert_int_equal(ms_comm_open_fake(engine, 7, 200, &world), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &six, &t), MS_OK);
    assert_int_equal(ms_tensor_new(engine, MS_F32, 1, &many, &whole), MS_OK);
    assert_int_equal(fill(t, counting, NULL), MS_OK);
    ms_collective c = { .kind = MS_ALL_GATHER, .in = t, .out = whole };
    assert_int_equal(ms_group_enqueue(world, 1, &c, &ready), MS_OK);
    assert_true(equals(whole, modulo_six, NULL));
    c = (ms_collective){ .kind = MS_ALL_REDUCE, .in = t };
    assert_int_equal(ms_group_enqueue(world, 1, &c, &ready), MS_OK);
    assert_true(equals(t, counting, &factor));
    c = (ms_collective){ .kind = MS_REDUCE_SCATTER, .in = whole, .out = t, .op = MS_REDUCE_OP_AVG };
    assert_int_equal(ms_group_enqueue(world, 1, &c, &ready), MS_OK);
    assert_true(equals(t, modulo_six, &from));
    c = (ms_collective){ .kind = MS_RECV, .in = t, .root = 3 };
    assert_int_equal(ms_group_enqueue(world, 1, &c, &ready), MS_OK);
    assert_true(equals(t, modulo_six, &from));
    ms_tensor_release(t);
    ms_tensor_release(whole);
    ms_engine_free(engine);
}

/* ----------------------------------------------------------------- the link */

/* Twelve collectives of 40,000 wire bytes each on two channels that share 4 MB/s, and 5 ms on the
 * way: at least 120 + 5 ms. No host is held: one rank calls all of them before the other calls the
 * first. */
static void paced(rank *self)
{
    static atomic_bool called;
    ms_tensor *t[12];
    uint64_t begin = 0;
    const ms_os *os = ms_os_posix();
    for (int i = 0; i < 12; i++) OK(make(self, MS_F32, 10000, true, &t[i]));
    OK(ms_group_barrier(self->world, 0));
    while (self->number == 1 && !atomic_load(&called)) sched_yield();
    begin = os->monotonic_ns(NULL);
    for (int i = 0; i < 12; i++) {
        ms_collective c = { .kind = MS_ALL_REDUCE, .in = t[i], .bucket = -1 };
        OK(ms_group_enqueue(self->world, 1 + (uint32_t)i % 2, &c, NULL));
    }
    atomic_store(&called, true);
    OK(ms_engine_sync(self->engine));
    CHECK(os->monotonic_ns(NULL) - begin >= 125000000);
    for (int i = 0; i < 12; i++) ms_tensor_release(t[i]);
}

static void a_link_is_shared_by_channels(void **state)
{
    (void)state;
    static rank ranks[2];
    job work = { .kind = THREADS,
                 .options = { .ranks = 2,
                              .threads = 1,
                              .heap_bytes = 16 << 20,
                              .link_bytes_per_second = 4000000,
                              .link_latency_ns = 5000000 },
                 .run = paced };
    run_job(&work, ranks);
    for (int r = 0; r < 2; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
}

/* ------------------------------------------------------- groups that are read */

typedef struct reader {
    ms_comm *comm;
    atomic_bool ends;
    atomic_uint rounds;
    uint64_t numbers;
    bool wrong;
} reader;

/* What tasks that wait for peers read of all groups. */
static void *read_groups(void *argument)
{
    reader *self = argument;
    while (!atomic_load(&self->ends)) {
        ms_groups_read(self->comm);
        for (uint32_t g = 0; g < atomic_load(&self->comm->group_count); g++) {
            const ms_group *group = self->comm->groups[g];
            if (!group) continue;
            /* The fake world's control and that of one rank are the same. */
            self->wrong |= group->control != &ms_control_none || !group->transport;
            self->numbers += group->numbers;
        }
        ms_groups_read_end(self->comm);
        atomic_fetch_add(&self->rounds, 1);
    }
    return NULL;
}

/* Under the thread sanitizer: nothing that they read is written after it can be seen. */
static void a_group_is_whole_when_tasks_see_it(void **state)
{
    (void)state;
    ms_engine *engine = alone("cpu");
    ms_group *world = NULL, *self = NULL, *part = NULL;
    const uint32_t size = 2, ranks[] = { 1, 0 };
    assert_int_equal(ms_comm_open_fake(engine, 0, 2, &world), MS_OK);
    reader reading = { .comm = world->comm };
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, read_groups, &reading), 0);
    for (int i = 0; i < 100; i++) {
        unsigned seen = atomic_load(&reading.rounds);
        while (atomic_load(&reading.rounds) == seen) sched_yield();
        assert_int_equal(ms_group_split(world, 1, &size, ranks, &part), MS_OK);
        if (i == 50) assert_int_equal(ms_comm_alone(engine, &self), MS_OK);
        ms_group_release(part);
    }
    atomic_store(&reading.ends, true);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_false(reading.wrong);
    ms_engine_free(engine);
}

/* ---------------------------------------------------------- memory runs out */

static void full_heap(rank *self)
{
    ms_storage *storage = NULL, *again = NULL;
    ms_stream *stream = ms_engine_current(self->engine);
    CHECK(ms_group_storage(self->world, stream, 9 << 20, &storage) == MS_ERROR_MEMORY);
    OK(ms_group_storage(self->world, stream, 7 << 20, &storage));
    uint64_t live = ms_engine_memory(self->engine).live;
    CHECK(live == 7 << 20);
    CHECK(ms_group_storage(self->world, stream, 2 << 20, &again) == MS_ERROR_MEMORY);
    CHECK(ms_engine_memory(self->engine).live == live);
    void *place = ms_storage_data(storage);
    ms_storage_release(storage);
    OK(ms_group_storage(self->world, stream, 6 << 20, &again));
    CHECK(ms_storage_data(again) == place);
    ms_storage_release(again);
}

static void a_full_heap_is_an_error(void **state)
{
    (void)state;
    if (device_is_cuda()) skip(); /* its memory is not in heaps */
    static rank ranks[2];
    job work = { .kind = THREADS,
                 .options = { .ranks = 2, .threads = 1, .heap_bytes = 8 << 20 },
                 .run = full_heap };
    run_job(&work, ranks);
    for (int r = 0; r < 2; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
}

/* Two ranks in one thread's hands would wait for each other, so the sweep is over jobs of one rank,
 * which use everything but peers; fault counts each rank's own calls. */
static ms_status small_job(fault_os *fault)
{
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    ms_engine *engine = NULL;
    ms_group *world = NULL, *part = NULL;
    ms_tensor *t = NULL, *out = NULL, *heap_tensor = NULL;
    ms_storage *storage = NULL;
    static const uint32_t own[] = { 0 }, sizes[] = { 1 };
    int64_t n = 100, counts[] = { 100 };
    ms_rendezvous_options options = { .ranks = 1, .threads = 1, .heap_bytes = 8 << 20 };
    ms_engine_options engine_options = { .os = &fault->table,
                                         .threads = 1,
                                         .memory_bytes = 64 << 20 };
    ms_context_init(&context, &fault->table);
    ms_status status = ms_rendezvous_new(&context, &options, &rendezvous);
    if (!status) status = ms_engine_new(&engine_options, NULL, &engine);
    if (!status) status = ms_comm_open(engine, rendezvous, 0, &world);
    if (!status) ms_comm_record(engine, true);
    if (!status) status = ms_group_split(world, 1, sizes, own, &part);
    if (!status) status = ms_group_storage(world, ms_engine_current(engine), 400, &storage);
    if (!status) status = ms_tensor_on(storage, MS_F32, 1, &n, &heap_tensor);
    if (!status) status = ms_tensor_new(engine, MS_F32, 1, &n, &t);
    if (!status) status = ms_tensor_new(engine, MS_F32, 1, &n, &out);
    ms_collective gather = { .kind = MS_ALL_GATHER,
                             .in = t,
                             .out = out,
                             .counts = counts,
                             .label = "part" },
                  reduce = { .kind = MS_ALL_REDUCE, .in = heap_tensor };
    if (!status) status = ms_group_enqueue(world, 1, &gather, NULL);
    if (!status) status = ms_group_enqueue(part, 2, &reduce, NULL);
    if (!status) status = ms_engine_sync(engine);
    if (status && engine) assert_true(*ms_engine_error(engine)->message || *context.error.message);
    ms_tensor_release(t);
    ms_tensor_release(out);
    ms_tensor_release(heap_tensor);
    ms_storage_release(storage);
    ms_engine_free(engine);
    ms_rendezvous_release(rendezvous);
    return status;
}

static void any_failed_call_of_the_system_is_an_error_and_no_leak(void **state)
{
    (void)state;
    fault_os fault;
    fault_os_init(&fault);
    assert_int_equal(small_job(&fault), MS_OK);
    long calls = atomic_load(&fault.calls);
    assert_true(calls > 20);
    for (int forever = 0; forever < 2; forever++)
        for (long n = 1; n <= calls; n++) {
            fault_os_init(&fault);
            atomic_store(&fault.forever, forever != 0);
            atomic_store(&fault.fail_at, n);
            ms_status status = small_job(&fault);
            assert_true(status != MS_OK || atomic_load(&fault.calls) < n || !forever);
            assert_int_equal(atomic_load(&fault.live), 0);
        }
}

int main(int argc, char **argv)
{
    if (argc == 3) return as_rank(argv[2]);
    self_path = argv[0];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(programs_inherit_a_job),
        cmocka_unit_test(what_is_no_job_is_refused),
        cmocka_unit_test(a_rank_is_taken_once),
        cmocka_unit_test(wrong_arguments_say_what_would_be_right),
        cmocka_unit_test(a_fake_world_counts_as_a_real_one),
        cmocka_unit_test(a_fake_world_repeats_this_rank),
        cmocka_unit_test(a_link_is_shared_by_channels),
        cmocka_unit_test(a_full_heap_is_an_error),
        cmocka_unit_test(a_group_is_whole_when_tasks_see_it),
        cmocka_unit_test(any_failed_call_of_the_system_is_an_error_and_no_leak),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
