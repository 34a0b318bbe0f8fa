/* comm_support.h: runs a function as every rank of a job, ranks being threads or processes, and
 * tensors of small whole numbers for them. */
#ifndef MOONSHARD_TESTS_COMM_SUPPORT_H
#define MOONSHARD_TESTS_COMM_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cluster_job.h"
#include "late_device.h"
#include "moonshard/comm.h"
#include "ranges.h"

/* The layouts under which tests run jobs of so many ranks: one host, or where MOONSHARD_TEST_HOSTS
 * is set (the mark `over-hosts`) several: the digit of each rank's host. The last one is NULL. */
static inline bool over_hosts(void) { return getenv("MOONSHARD_TEST_HOSTS") != NULL; }
static inline const char *const *layouts_of(uint32_t ranks)
{
    static const char *const layouts[][4] = { { "" },
                                              { NULL },
                                              { "01" },
                                              { "012", "011" },
                                              { "0011", "0111", "0012" },
                                              { "00122", "00001" } };
    return layouts[over_hosts() ? ranks : 0];
}

/* How long a rank waits for another one where a test expects no limit of time to strike: what takes
 * so long hangs, however busy the machine is. */
#define HANG_NS 1800000000000u

typedef enum job_kind { THREADS, PROCESSES } job_kind;

typedef struct rank rank;
typedef struct job {
    job_kind kind;
    ms_rendezvous_options options;
    const ms_os *os;
    void (*run)(rank *self);
    ms_status (*open)(rank *self); /* NULL: ms_comm_open */
    const void *argument;
    const char *layout;  /* of several hosts, whose ranks are threads; NULL or "": one host */
    bool loose;          /* not strict: as a script calls */
    ms_log_function log; /* of all ranks; user: the job's argument */
} job;

/* One rank's side. What went wrong is left in `why`, since asserts belong to the main thread. */
struct rank {
    const job *job;
    cluster_job *hosts; /* NULL: one host */
    ms_rendezvous *rendezvous;
    ms_engine *engine;
    ms_group *world;
    uint32_t number, ranks;
    ms_status status; /* for tests that expect an end: how this rank met it */
    ms_error error;
    char why[2048];
};

#define CHECK(condition)                                                                    \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            if (!*self->why)                                                                \
                snprintf(self->why, sizeof self->why, "%s:%d: rank %u: %s; last error: %s", \
                         __FILE__, __LINE__, self->number, #condition,                      \
                         self->engine ? ms_engine_error(self->engine)->message : "none");   \
            return;                                                                         \
        }                                                                                   \
    } while (0)
#define OK(call) CHECK((call) == MS_OK)

/* By the transport that the environment asks for; on the cuda device it is NCCL unless it asks for
 * local. */
static inline bool over_nccl(void)
{
    const char *asked = getenv("MOONSHARD_TRANSPORT");
    return asked ? strcmp(asked, "nccl") == 0 : device_is_cuda();
}
static inline ms_status open_rank(rank *self)
{
    ms_comm_options options = { .transport = getenv("MOONSHARD_TRANSPORT"),
                                .one_gpu = self->job->kind == THREADS };
    if (self->job->open) return self->job->open(self);
    if (self->hosts) return cluster_job_open(self->hosts, self->engine, self->number, &self->world);
    ms_status status =
        ms_comm_open_with(self->engine, self->rendezvous, self->number, &options, &self->world);
    /* On the cuda device NCCL begins with a call, which tests do not count. */
    if (!status && device_is_cuda() && over_nccl()) status = ms_group_barrier(self->world, 0);
    return status;
}

/* Of the engine's memory. NCCL keeps a few numbers for each group. */
static inline bool nothing_is_left(const rank *self)
{
    return ms_engine_memory(self->engine).live <= (device_is_cuda() ? 4096 : 0);
}

/* In a job that ends well, what every group has counted beforehand is what the transport has sent.
 */
static inline void compare_bytes(rank *self)
{
    ms_group *group;
    ms_abort_record cause;
    if (*self->why || !self->hosts || ms_engine_sync(self->engine)
        || ms_rendezvous_cause(self->rendezvous, &cause))
        return;
    for (uint32_t i = 0; (group = ms_comm_group(self->engine, i)) != NULL; i++)
        CHECK(ms_group_traffic(group, MS_COLLECTIVES).between_nodes_bytes
              == ms_group_bytes_between_nodes(group));
}

static inline void rank_main(rank *self)
{
    ms_engine_options options = { .os = self->job->os,
                                  .own_device = late_device(NULL),
                                  .threads = 1,
                                  .strict = !self->job->loose,
                                  .memory_bytes = 512 << 20,
                                  .cpu = getenv("MOONSHARD_CPU"),
                                  .log = self->job->log,
                                  .log_user = (void *)(uintptr_t)self->job->argument };
    ms_error error;
    if (ms_engine_new(&options, &error, &self->engine))
        snprintf(self->why, sizeof self->why, "engine: %s", error.message);
    else if (open_rank(self))
        snprintf(self->why, sizeof self->why, "open: %s", ms_engine_error(self->engine)->message);
    else {
        self->job->run(self);
        compare_bytes(self);
    }
    if (self->engine && *self->why) ms_comm_leave(self->engine, self->why);
    ms_engine_free(self->engine);
}

static inline void *rank_thread(void *argument)
{
    rank_main(argument);
    return NULL;
}

/* The driver of a GPU, once a process has used it, is of no use to a process that is forked. So
 * ranks that are threads get a process for themselves there. The stand-in can do without, but the
 * thread sanitizer cannot: the stand-in has a thread, and leaves it running. */
static inline bool threads_need_a_process(void)
{
    const char *sanitizer = getenv("MOONSHARD_SANITIZE");
    return device_is_cuda()
           && (!getenv("MOONSHARD_STAND_IN") || (sanitizer && strcmp(sanitizer, "thread") == 0));
}

static inline void run_threads(rank *all, uint32_t count)
{
    pthread_t threads[MS_LOCAL_RANKS_MAX];
    int status = 0;
    pid_t child = threads_need_a_process() ? fork() : -1;
    if (child > 0) {
        assert_int_equal(waitpid(child, &status, 0), child);
        if (status)
            snprintf(all->why, sizeof all->why, "the ranks' process ended with %x",
                     (unsigned)status);
        return;
    }
    for (uint32_t r = 0; r < count; r++)
        if (pthread_create(&threads[r], NULL, rank_thread, &all[r])) abort();
    for (uint32_t r = 0; r < count; r++) pthread_join(threads[r], NULL);
    if (child == 0) _exit(0);
}

/* Zeroed memory of ranks and their test: what ranks write there the test sees, also where they have
 * a process of their own. It is freed with munmap, or stays. */
static inline void *shared_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

/* Runs all ranks to their end; `why` of each in reasons. Returns the cause if the job was ended. */
static inline ms_abort_record run_job(const job *what, rank *ranks)
{
    ms_context context;
    ms_rendezvous *rendezvous = NULL;
    ms_abort_record cause = { .reason = MS_ABORT_NONE };
    uint32_t count = what->options.ranks;
    bool several = what->layout && *what->layout, threads_only = several || what->kind == THREADS;
    cluster_job *hosts = several ? cluster_job_new(&what->options, what->layout) : NULL;
    ms_context_init(&context, what->os);
    if (!several) assert_int_equal(ms_rendezvous_new(&context, &what->options, &rendezvous), MS_OK);
    rank *all = shared_memory(count * sizeof *all);
    pid_t children[MS_LOCAL_RANKS_MAX] = { 0 };
    for (uint32_t r = 0; r < count; r++) {
        all[r] = (rank){ .job = what,
                         .hosts = hosts,
                         .rendezvous = hosts ? cluster_job_rendezvous(hosts, r) : rendezvous,
                         .number = r,
                         .ranks = count };
        if (!threads_only && (children[r] = fork()) == 0) {
            rank_main(&all[r]);
            _exit(0);
        }
    }
    if (threads_only) run_threads(all, count);
    for (uint32_t r = 0; r < count && !threads_only; r++) {
        int status = 0;
        waitpid(children[r], &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status)) {
            char text[128];
            snprintf(text, sizeof text, "rank %u ended with status %x", r, (unsigned)status);
            ms_rendezvous_abort(rendezvous, MS_ABORT_DIED, (int32_t)r, text);
            snprintf(all[r].why, sizeof all[r].why, "%s", text);
        }
    }
    ms_rendezvous_cause(all[0].rendezvous, &cause);
    memcpy(ranks, all, count * sizeof *all);
    munmap(all, count * sizeof *all);
    ms_rendezvous_release(rendezvous);
    if (hosts) cluster_job_free(hosts);
    return cause;
}

/* All ranks must end well. */
static inline void run_as(job_kind kind, const char *layout, bool sum_by_ranks, uint32_t count,
                          void (*run)(rank *), const void *argument)
{
    job what = { .kind = kind,
                 .options = { .ranks = count,
                              .threads = 1,
                              .heap_bytes = 64 << 20,
                              .timeout_ns = HANG_NS,
                              .sum_by_ranks = sum_by_ranks },
                 .layout = layout,
                 .run = run,
                 .argument = argument };
    rank *ranks = calloc(count, sizeof *ranks);
    run_job(&what, ranks);
    for (uint32_t r = 0; r < count; r++)
        if (*ranks[r].why) fail_msg("%u ranks %s: %s", count, layout, ranks[r].why);
    free(ranks);
}

/* The same bits under all layouts. */
static inline void run_in_rank_order(job_kind kind, uint32_t count, void (*run)(rank *),
                                     const void *argument)
{
    for (const char *const *layout = layouts_of(count); *layout; layout++)
        run_as(kind, *layout, true, count, run, argument);
}

/* Also where hosts are added one after the other. In short ranges each layout is tried in one of
 * the two ways, and that of two ranks in both. */
static inline void run_well(job_kind kind, uint32_t count, void (*run)(rank *),
                            const void *argument)
{
    const char *const *layouts = layouts_of(count);
    for (int i = 0; layouts[i]; i++)
        for (int by_ranks = over_hosts() ? 0 : 1; by_ranks < 2; by_ranks++)
            if (!over_hosts() || ranges_are_long() || count <= 2 || i % 2 == by_ranks)
                run_as(kind, layouts[i], by_ranks, count, run, argument);
}

/* ------------------------------------------------------------------ tensors */

/* n elements of dtype, in this rank's heap or in ordinary memory. */
static inline ms_status make(rank *self, ms_dtype dtype, int64_t n, bool heap, ms_tensor **out)
{
    ms_storage *storage = NULL;
    if (!heap) return ms_tensor_new(self->engine, dtype, 1, &n, out);
    ms_status status = ms_group_storage(self->world, ms_engine_current(self->engine),
                                        (size_t)n * ms_dtype_bytes(dtype), &storage);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &n, out);
    ms_storage_release(storage);
    return status;
}

static inline void put_number(void *values, ms_dtype dtype, int64_t i, double value)
{
    switch (dtype) {
    case MS_F32: ((float *)values)[i] = (float)value; break;
    case MS_F16: ((uint16_t *)values)[i] = ms_f16_from_float((float)value); break;
    case MS_BF16: ((uint16_t *)values)[i] = ms_bf16_from_float((float)value); break;
    case MS_I64: ((int64_t *)values)[i] = (int64_t)value; break;
    case MS_I32: ((int32_t *)values)[i] = (int32_t)value; break;
    case MS_U16: ((uint16_t *)values)[i] = (uint16_t)value; break;
    default: ((uint8_t *)values)[i] = (uint8_t)value; break;
    }
}

/* Fills with value(context, i), or zeros (value NULL), and compares; false at the first
 * difference. */
typedef double (*number_function)(const void *context, int64_t i);

static inline ms_status fill(ms_tensor *tensor, number_function value, const void *context)
{
    int64_t n = ms_tensor_count(tensor);
    void *values = malloc(ms_tensor_bytes(tensor) + 1);
    for (int64_t i = 0; i < n; i++)
        put_number(values, ms_tensor_dtype(tensor), i, value ? value(context, i) : 0);
    ms_status status = ms_tensor_write(tensor, values, ms_tensor_bytes(tensor));
    free(values);
    return status;
}

static inline bool equals(ms_tensor *tensor, number_function value, const void *context)
{
    int64_t n = ms_tensor_count(tensor);
    size_t bytes = ms_tensor_bytes(tensor);
    void *expected = malloc(bytes + 1), *got = malloc(bytes + 1);
    for (int64_t i = 0; i < n; i++)
        put_number(expected, ms_tensor_dtype(tensor), i, value(context, i));
    bool equal = ms_tensor_read(tensor, got, bytes) == MS_OK && memcmp(expected, got, bytes) == 0;
    free(expected);
    free(got);
    return equal;
}

/* Runs one collective on channel 1 and lets the current stream wait for it. */
static inline ms_status run_one(rank *self, ms_group *group, const ms_collective *collective)
{
    ms_point ready;
    ms_status status = ms_group_enqueue(group, 1, collective, &ready);
    return status ? status : ms_stream_wait(ms_engine_current(self->engine), ready);
}

#endif
