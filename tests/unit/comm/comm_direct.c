/* comm_direct.c: ranks that are threads on one GPU, whose tensors stay in its memory: the bits are
 * those of the CPU's code, through which tensors of processes go; no wait is missing; an end in the
 * middle of a call. On the CPU, threads and processes are compared. ctest: cuda-local */
#include "comm_support.h"

#include <math.h>

#include "../cuda/driver/driver.h"
#include "exec/cuda/state.h"
#include "ranges.h"

/* Before main, as in late_device.c. Faults are counted, since one is planted. */
__attribute__((constructor)) static void watch(void)
{
    if (device_is_cuda()) setenv("MOONSHARD_STAND_IN_WATCH", "count", 1);
}

static bool on_stand_in(void) { return device_is_cuda() && getenv("MOONSHARD_STAND_IN"); }

static void *stand_in(const char *name)
{
    const ms_os *os = ms_os_posix();
    char why[256];
    void *library = os->library_load(os->user, getenv("MOONSHARD_STAND_IN"), why, sizeof why);
    return library ? os->library_symbol(os->user, library, name) : NULL;
}
static unsigned calls(const char *name)
{
    return ((stand_in_calls_function *)stand_in("stand_in_calls"))(name);
}
static unsigned faults(const char **text)
{
    return ((stand_in_faults_function *)stand_in("stand_in_faults"))(text);
}

/* ------------------------------------------------------------------ the bits */

enum { OFFSETS = 3, RESULT_BYTES = 24 << 20, COUNTED = 7 };
static const int64_t lengths[] = { 0, 1, 7, 130, 1025 };
static const int64_t counted[] = { 3, 0, 11, 70 };

/* What each rank's tensors held after each call, one after another. */
typedef struct results {
    size_t used[4];
    unsigned char bytes[4][RESULT_BYTES];
} results;

/* Bits of all sorts: fractions, huge, subnormal and infinite numbers, and not numbers. */
static void fill_bits(ms_dtype dtype, int64_t elements, uint64_t seed, unsigned char *bytes)
{
    static const float special[] = { 0.1f,      -3.7f,   1e30f,  -1e-30f,  INFINITY, NAN,
                                     -INFINITY, -1e-41f, 3e-39f, 65519.0f, -0.0f,    6e-8f };
    uint64_t random = seed * 0x9e3779b97f4a7c15u + 7;
    for (int64_t i = 0; i < elements; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        uint64_t word = random >> 16;
        float number = i % 5 ? (float)((int64_t)(word % 20001) - 10000) * 0.37f
                             : special[word % (sizeof special / sizeof *special)];
        if (dtype == MS_BOOL) word &= 1;
        if (dtype == MS_F32) memcpy(&word, &number, sizeof number);
        if (dtype == MS_F16) word = ms_f16_from_float(number);
        if (dtype == MS_BF16) word = ms_bf16_from_float(number);
        memcpy(bytes + (size_t)i * ms_dtype_bytes(dtype), &word, ms_dtype_bytes(dtype));
    }
}

/* n elements, `offset` elements after the beginning of a storage; NULL: n is below 0. */
static ms_status window(rank *self, ms_dtype dtype, int64_t n, int64_t offset, ms_tensor **out)
{
    ms_storage *storage = NULL;
    ms_tensor *whole = NULL;
    int64_t all = n + offset, one = 1;
    size_t bytes = (size_t)all * ms_dtype_bytes(dtype);
    *out = NULL;
    if (n < 0) return MS_OK;
    unsigned char *values = calloc(1, bytes + 8);
    fill_bits(dtype, all, self->number * 31 + (uint64_t)n, values);
    ms_status status = ms_storage_new(ms_engine_current(self->engine), bytes, &storage);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &all, &whole);
    if (!status && all) status = ms_tensor_write(whole, values, bytes);
    if (!status) status = ms_tensor_window(whole, 1, &n, &one, offset, out);
    ms_tensor_release(whole);
    ms_storage_release(storage);
    free(values);
    return status;
}

/* Which of two NaNs a sum is, no processor promises. */
static void level_nans(ms_dtype dtype, unsigned char *bytes, size_t count)
{
    uint32_t infinity = dtype == MS_F32   ? 0x7f800000u
                        : dtype == MS_F16 ? 0x7c00u
                                          : 0x7f80u,
             sign = dtype == MS_F32 ? 0x80000000u : 0x8000u;
    for (size_t at = 0, item = ms_dtype_bytes(dtype); at < count; at += item) {
        uint32_t word = 0, nan = infinity + 1;
        memcpy(&word, bytes + at, item);
        if ((word & ~sign) > infinity) memcpy(bytes + at, &nan, item);
    }
}

static void keep(rank *self, results *to, ms_tensor *tensor)
{
    size_t bytes = tensor ? ms_tensor_bytes(tensor) : 0;
    if (!bytes) return;
    CHECK(to->used[self->number] + bytes <= RESULT_BYTES);
    OK(ms_tensor_read(tensor, to->bytes[self->number] + to->used[self->number], bytes));
    if (ms_dtype_is_float(ms_tensor_dtype(tensor)))
        level_nans(ms_tensor_dtype(tensor), to->bytes[self->number] + to->used[self->number],
                   bytes);
    to->used[self->number] += bytes;
}

/* in, out: elements, below 0: there is no such tensor. */
static void call_once(rank *self, ms_collective c, ms_dtype dtype, int64_t in, int64_t out,
                      int64_t offset)
{
    results *to = (results *)(uintptr_t)self->job->argument;
    c.bucket = -1;
    OK(window(self, dtype, in, offset, &c.in));
    OK(window(self, dtype, out, (offset * 2) % OFFSETS, &c.out));
    OK(run_one(self, self->world, &c));
    keep(self, to, c.in);
    keep(self, to, c.out);
    ms_tensor_release(c.in);
    ms_tensor_release(c.out);
}

static void reduce(rank *self, ms_dtype dtype, ms_reduce_op op, int64_t n, int64_t offset)
{
    ms_collective c = { .op = op, .factor = 0.3 + self->number, .travels = MS_F32 };
    uint32_t root = (uint32_t)n % self->ranks;
    int64_t ranks = self->ranks, own = counted[self->number], all = 0;
    c.kind = MS_ALL_REDUCE;
    call_once(self, c, dtype, n, -1, offset);
    call_once(self, c, dtype, n, n, offset);
    c.kind = MS_REDUCE_SCATTER;
    call_once(self, c, dtype, n * ranks, n, offset);
    for (uint32_t r = 0; r < self->ranks; r++) all += counted[r];
    if (n == COUNTED) {
        c.counts = counted;
        call_once(self, c, dtype, all, own, offset);
        c.counts = NULL;
    }
    c.kind = MS_REDUCE;
    c.root = root;
    call_once(self, c, dtype, n, -1, offset);
    call_once(self, c, dtype, n, self->number == root ? n : -1, offset);
}

/* Each rank sends to the next one, and receives from the one before. */
static void exchange(rank *self, ms_dtype dtype, int64_t n, int64_t offset)
{
    results *to = (results *)(uintptr_t)self->job->argument;
    ms_tensor *mine = NULL, *theirs = NULL;
    ms_point sent, received;
    ms_collective send = { .kind = MS_SEND,
                           .root = (self->number + 1) % self->ranks,
                           .bucket = -1 },
                  receive = { .kind = MS_RECV,
                              .root = (self->number + self->ranks - 1) % self->ranks,
                              .bucket = -1 };
    OK(window(self, dtype, n, offset, &mine));
    OK(window(self, dtype, n, (offset * 2) % OFFSETS, &theirs));
    send.in = mine;
    receive.in = theirs;
    OK(ms_group_enqueue(self->world, 1, &send, &sent));
    OK(ms_group_enqueue(self->world, 1, &receive, &received));
    OK(ms_stream_wait(ms_engine_current(self->engine), sent));
    OK(ms_stream_wait(ms_engine_current(self->engine), received));
    keep(self, to, theirs);
    ms_tensor_release(mine);
    ms_tensor_release(theirs);
}

static void move(rank *self, ms_dtype dtype, int64_t n, int64_t offset)
{
    ms_collective c = { .travels = MS_F32, .root = (uint32_t)n % self->ranks };
    int64_t ranks = self->ranks, own = counted[self->number], all = 0;
    bool is_root = self->number == c.root;
    c.kind = MS_ALL_GATHER;
    call_once(self, c, dtype, n, n * ranks, offset);
    for (uint32_t r = 0; r < self->ranks; r++) all += counted[r];
    if (n == COUNTED) {
        c.counts = counted;
        call_once(self, c, dtype, own, all, offset);
        c.counts = NULL;
    }
    c.kind = MS_GATHER;
    call_once(self, c, dtype, n, is_root ? n * ranks : -1, offset);
    c.kind = MS_SCATTER;
    call_once(self, c, dtype, is_root ? n * ranks : -1, n, offset);
    c.kind = MS_ALL_TO_ALL;
    call_once(self, c, dtype, n * ranks, n * ranks, offset);
    if (n == COUNTED) {
        /* Rank r sends r + m to rank m. */
        int64_t sent[4], received[4], own_all = 0;
        for (int64_t m = 0; m < ranks; m++) {
            sent[m] = received[m] = (int64_t)self->number + m;
            own_all += sent[m];
        }
        c.counts = sent;
        c.receive_counts = received;
        call_once(self, c, dtype, own_all, own_all, offset);
        c.counts = c.receive_counts = NULL;
    }
    c.kind = MS_BROADCAST;
    call_once(self, c, dtype, n, -1, offset);
    exchange(self, dtype, n, offset);
    c.kind = MS_BARRIER;
    call_once(self, c, dtype, -1, -1, offset);
}

/* Own parts of a whole tensor: an all_gather that writes around its input, a reduce_scatter into
 * its input. */
static void call_inside(rank *self, ms_collective_kind kind, ms_dtype dtype, int64_t n)
{
    results *to = (results *)(uintptr_t)self->job->argument;
    ms_tensor *whole = NULL, *own = NULL;
    int64_t one = 1;
    OK(window(self, dtype, n * (int64_t)self->ranks, 0, &whole));
    OK(ms_tensor_window(whole, 1, &n, &one, n * (int64_t)self->number, &own));
    ms_collective c = { .kind = kind,
                        .in = kind == MS_ALL_GATHER ? own : whole,
                        .out = kind == MS_ALL_GATHER ? whole : own,
                        .travels = MS_F32,
                        .bucket = -1 };
    OK(run_one(self, self->world, &c));
    keep(self, to, whole);
    ms_tensor_release(own);
    ms_tensor_release(whole);
}

static bool is_defined(ms_dtype dtype, ms_reduce_op op)
{
    return ms_dtype_is_float(dtype) || (op != MS_REDUCE_OP_AVG && op != MS_REDUCE_OP_PREMUL_SUM);
}

/* In short ranges each length and each dtype comes with each offset, but not all three together,
 * and each dtype with each reduction at every other length. */
static void call_all(rank *self)
{
    for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
        for (ms_dtype dtype = 0; dtype < MS_DTYPES; dtype++)
            for (int64_t offset = 0; offset < OFFSETS; offset++) {
                if (!ranges_are_long() && (int64_t)(l + dtype) % OFFSETS != offset) continue;
                for (ms_reduce_op op = 0; op < MS_REDUCE_OPS; op++)
                    if (is_defined(dtype, op) && (ranges_are_long() || (l + dtype + op) % 2 == 0))
                        reduce(self, dtype, op, lengths[l], offset);
                move(self, dtype, lengths[l], offset);
                if (*self->why) return;
            }
    for (ms_dtype dtype = 0; dtype < MS_DTYPES; dtype++) {
        call_inside(self, MS_ALL_GATHER, dtype, 129);
        call_inside(self, MS_REDUCE_SCATTER, dtype, 129);
    }
    for (int w = 0; w < 2; w++)
        for (ms_reduce_op op = 0; op < MS_REDUCE_OPS; op++) {
            ms_collective c = { .kind = MS_ALL_REDUCE,
                                .op = op,
                                .factor = 1.7 - self->number,
                                .travels = w ? MS_F16 : MS_BF16 };
            call_once(self, c, MS_F32, 515, -1, w);
        }
}

static void the_bits_are_the_cpus(void **state)
{
    (void)state;
    results *all[2];
    for (int k = 0; k < 2; k++) {
        all[k] =
            mmap(NULL, sizeof(results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        assert_true(all[k] != MAP_FAILED);
    }
    for (uint32_t ranks = 2; ranks <= 4; ranks++) {
        for (int k = 0; k < 2; k++) {
            memset(all[k]->used, 0, sizeof all[k]->used);
            run_as(k ? PROCESSES : THREADS, "", true, ranks, call_all, all[k]);
        }
        for (uint32_t r = 0; r < ranks; r++) {
            assert_true(all[0]->used[r] > 100000);
            assert_int_equal(all[0]->used[r], all[1]->used[r]);
            for (size_t i = 0; i < all[0]->used[r]; i++)
                if (all[0]->bytes[r][i] != all[1]->bytes[r][i])
                    fail_msg("%u ranks: byte %zu of rank %u is %02x, not %02x", ranks, i, r,
                             all[0]->bytes[r][i], all[1]->bytes[r][i]);
        }
    }
    for (int k = 0; k < 2; k++) munmap(all[k], sizeof(results));
}

/* -------------------------------------------------------------------- the way */

static double by_rank(const void *context, int64_t i)
{
    return (double)*(const uint32_t *)context + (double)(i % 7);
}

/* `copied`: pieces of tensors that went to the host's
 * memory. */
static void count_copies(rank *self)
{
    ms_tensor *t = NULL, *whole = NULL;
    OK(make(self, MS_F32, 1000, false, &t));
    OK(make(self, MS_F32, 1000 * (int64_t)self->ranks, false, &whole));
    OK(fill(t, by_rank, &self->number));
    OK(fill(whole, by_rank, &self->number));
    OK(ms_engine_sync(self->engine));
    OK(ms_group_barrier(self->world, 0));
    unsigned before = calls("cuMemcpyDtoHAsync_v2");
    OK(ms_group_barrier(self->world, 0));
    for (int i = 0; i < 3; i++) {
        ms_collective all[] = {
            { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 },
            { .kind = MS_ALL_GATHER, .in = t, .out = whole, .bucket = -1 },
            { .kind = MS_REDUCE_SCATTER, .in = whole, .out = t, .bucket = -1 },
            { .kind = MS_BROADCAST, .in = t, .root = 1, .bucket = -1 },
            { .kind = self->number ? MS_RECV : MS_SEND,
              .in = t,
              .root = self->number ? 0 : 1,
              .bucket = -1 },
        };
        for (size_t c = 0; c < sizeof all / sizeof *all; c++)
            if (self->number < 2 || c < 4) OK(run_one(self, self->world, &all[c]));
    }
    OK(ms_group_barrier(self->world, 0));
    unsigned copied = calls("cuMemcpyDtoHAsync_v2") - before;
    OK(ms_group_barrier(self->world, 0));
    /* Of a broadcast only the root's tensor travels, of a send that of rank 0; each process counts
     * its own. */
    if (self->job->kind == THREADS) CHECK(copied == 0);
    else CHECK(copied == 12);
    ms_tensor_release(t);
    ms_tensor_release(whole);
}

static void tensors_of_threads_stay_on_the_gpu(void **state)
{
    (void)state;
    if (!on_stand_in()) skip();
    run_as(THREADS, "", true, 4, count_copies, NULL);
    run_as(PROCESSES, "", true, 2, count_copies, NULL);
}

static ms_status open_otherwise(rank *self)
{
    ms_comm_options options = { .transport = "local", .one_gpu = self->number == 0 };
    return ms_comm_open_with(self->engine, self->rendezvous, self->number, &options, &self->world);
}

static void never(rank *self) { CHECK(self->ranks == 0); }

/* Whoever joins second is refused. */
static void ranks_say_the_same(void **state)
{
    (void)state;
    if (!device_is_cuda()) skip();
    job what = { .kind = THREADS,
                 .options = { .ranks = 2, .threads = 1, .heap_bytes = 1 << 20 },
                 .run = never,
                 .open = open_otherwise };
    rank ranks[2];
    run_job(&what, ranks);
    const char *refused = strstr(ranks[0].why, "open: ") ? ranks[0].why : ranks[1].why;
    assert_non_null(strstr(refused, "all ranks of a job set one_gpu alike"));
}

static ms_status open_alone(rank *self)
{
    ms_comm_options options = { .transport = "local", .one_gpu = true };
    return ms_comm_open_with(self->engine, self->rendezvous, self->number, &options, &self->world);
}

/* A process cannot use the addresses of another one. */
static void processes_are_refused(void **state)
{
    (void)state;
    if (!device_is_cuda()) skip();
    job what = { .kind = PROCESSES,
                 .options = { .ranks = 2, .threads = 1, .heap_bytes = 1 << 20 },
                 .run = never,
                 .open = open_alone };
    rank ranks[2];
    run_job(&what, ranks);
    const char *refused = strstr(ranks[0].why, "open: ") ? ranks[0].why : ranks[1].why;
    assert_non_null(strstr(refused, "leave one_gpu unset"));
}

/* All ranks send before they receive, with all kinds of calls around it. */
static void call_some(rank *self)
{
    for (int64_t offset = 0; offset < 2; offset++) {
        reduce(self, MS_F32, MS_REDUCE_OP_SUM, COUNTED, offset);
        move(self, MS_F32, COUNTED, offset);
    }
}

/* A driver may keep threads in its calls until all work of the GPU has ended, and in launches until
 * this one has. No rank keeps the one from calling that it waits for. */
static void ranks_stand_calls_that_wait(void **state)
{
    (void)state;
    if (!device_is_cuda()) skip(); /* the variables mean nothing to the CPU */
    results *all =
        mmap(NULL, sizeof(results), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    static const char *const variables[] = { "MOONSHARD_STAND_IN_WAITS", "CUDA_LAUNCH_BLOCKING" };
    assert_true(all != MAP_FAILED);
    for (int v = 0; v < 2; v++) {
        setenv(variables[v], "1", 1);
        for (int k = 0; k < 2; k++) {
            memset(all->used, 0, sizeof all->used);
            run_as(k ? PROCESSES : THREADS, "", true, 3, call_some, all);
        }
        unsetenv(variables[v]);
    }
    munmap(all, sizeof(results));
}

/* -------------------------------------------------------------------- the waits */

typedef struct plan {
    bool forgets; /* that each call waits for its kernel */
} plan;

/* The thread of a stream waits before it enters a call, and before it leaves. */
static ms_cuda_result (*true_wait)(ms_cuda_stream);
static ms_cuda_result forgetful(ms_cuda_stream on)
{
    static __thread unsigned waits;
    return ++waits % 2 ? true_wait(on) : MS_CUDA_SUCCESS;
}

/* What is written before a call and after it, on other streams, by each rank into its own. */
static void write_around(rank *self)
{
    const plan *what = self->job->argument;
    ms_cuda_device *device = ms_cuda_of(self->engine);
    ms_tensor *t = NULL, *whole = NULL;
    if (self->number == 0) true_wait = device->cuda.stream_synchronize;
    OK(ms_group_barrier(self->world, 0));
    OK(make(self, MS_F32, 1000, false, &t));
    OK(make(self, MS_F32, 1000 * (int64_t)self->ranks, false, &whole));
    ms_collective all[] = { { .kind = MS_ALL_REDUCE, .in = t, .bucket = -1 },
                            { .kind = MS_ALL_GATHER, .in = t, .out = whole, .bucket = -1 },
                            { .kind = MS_REDUCE_SCATTER, .in = whole, .out = t, .bucket = -1 },
                            { .kind = MS_BROADCAST, .in = t, .root = 1, .bucket = -1 } };
    for (int i = 0; i < (what->forgets ? 1 : 12); i++) {
        OK(fill(t, NULL, NULL));
        OK(run_one(self, self->world, &all[i % 4]));
        if (what->forgets) {
            OK(ms_engine_sync(self->engine));
            device->cuda.stream_synchronize = forgetful;
            OK(run_one(self, self->world, &all[0]));
            OK(fill(t, NULL, NULL));
            OK(ms_engine_sync(self->engine));
            device->cuda.stream_synchronize = true_wait;
        }
        OK(fill(t, NULL, NULL));
    }
    OK(ms_engine_sync(self->engine));
    OK(ms_group_barrier(self->world, 0));
    ms_tensor_release(t);
    ms_tensor_release(whole);
}

/* The accesses of kernels are seen in builds without a sanitizer only. */
static bool sees_kernels(void)
{
    const char *sanitizer = getenv("MOONSHARD_SANITIZE");
    return on_stand_in() && !(sanitizer && *sanitizer);
}

static void no_wait_is_missing(void **state)
{
    (void)state;
    const char *text = "";
    if (!sees_kernels()) skip();
    plan what = { .forgets = false };
    (void)faults(&text);
    run_as(THREADS, "", true, 3, write_around, &what);
    if (faults(&text)) fail_msg("%s", text);
    what.forgets = true;
    run_as(THREADS, "", true, 3, write_around, &what);
    assert_true(faults(&text) > 0);
    assert_non_null(strstr(text, "nothing orders the two"));
}

/* --------------------------------------------------------------------- the end */

/* Rank 1 leaves in the middle of calls, and its memory goes at once. */
static void leave_in_the_middle(rank *self)
{
    ms_tensor *t = NULL;
    ms_collective c = { .kind = MS_ALL_REDUCE, .bucket = -1 };
    OK(make(self, MS_F32, 1 << 16, false, &t));
    c.in = t;
    for (int i = 0; i < 8; i++) {
        self->status = run_one(self, self->world, &c);
        if (self->status) break;
        if (self->number != 1 || i < 5) continue;
        ms_error error = { .status = MS_ERROR_STATE, .message = "enough", .rank = 1 };
        ms_comm_abort(self->engine, &error);
    }
    if (!self->status) self->status = ms_engine_sync(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

static void a_rank_ends_in_the_middle(void **state)
{
    (void)state;
    job what = {
        .kind = THREADS,
        .options = { .ranks = 3, .threads = 1, .heap_bytes = 16 << 20, .timeout_ns = HANG_NS },
        .run = leave_in_the_middle
    };
    rank ranks[3];
    for (int i = 0; i < 20; i++) {
        ms_abort_record cause = run_job(&what, ranks);
        assert_int_equal(cause.reason, MS_ABORT_RAISED);
        for (int r = 0; r < 3; r++) {
            if (*ranks[r].why) fail_msg("%s", ranks[r].why);
            assert_int_not_equal(ranks[r].status, MS_OK);
            assert_non_null(strstr(ranks[r].error.message, "because rank 1: enough"));
        }
    }
}

/* Rank 0 has entered a call, and its kernel is held back until the gate opens. */
static ms_word gate, entered, closing, was_unmapped;
static unsigned unmapped; /* calls of the driver when rank 0 entered */
static ms_cuda_result (*true_launch)(ms_cuda_function, unsigned, unsigned, unsigned, unsigned,
                                     unsigned, unsigned, unsigned, ms_cuda_stream, void **,
                                     void **);

static bool gate_is_open(void *unused)
{
    (void)unused;
    return atomic_load(&gate) != 0;
}
static void pass_gate(void *unused) { (void)unused; }

static ms_cuda_result late_launch(ms_cuda_function kernel, unsigned grid_x, unsigned grid_y,
                                  unsigned grid_z, unsigned block_x, unsigned block_y,
                                  unsigned block_z, unsigned shared_bytes, ms_cuda_stream on,
                                  void **parameters, void **extra)
{
    ((stand_in_work_function *)stand_in("stand_in_work"))(on, gate_is_open, pass_gate, NULL);
    atomic_store(&entered, 1);
    return true_launch(kernel, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, on,
                       parameters, extra);
}

/* Rank 1 closes, and has time to give its memory back; it does not. */
static void *open_gate(void *unused)
{
    (void)unused;
    while (!atomic_load(&closing)) sched_yield();
    for (int i = 0; i < 20000 && calls("cuMemUnmap") == unmapped; i++) sched_yield();
    atomic_store(&was_unmapped, calls("cuMemUnmap") != unmapped);
    atomic_store(&gate, 1);
    return NULL;
}

/* Rank 1 ends the job and closes meanwhile: the kernel still reads and writes its tensor. */
static void leave_before_the_kernel(rank *self)
{
    ms_tensor *t = NULL;
    pthread_t opener;
    ms_collective c = { .kind = MS_ALL_REDUCE, .bucket = -1 };
    ms_cuda *cuda = &ms_cuda_of(self->engine)->cuda;
    OK(make(self, MS_F32, 1 << 16, false, &t));
    c.in = t;
    OK(run_one(self, self->world, &c));
    OK(ms_group_barrier(self->world, 0));
    if (self->number == 0) {
        true_launch = cuda->launch;
        cuda->launch = late_launch;
        unmapped = calls("cuMemUnmap");
        CHECK(pthread_create(&opener, NULL, open_gate, NULL) == 0);
    }
    OK(run_one(self, self->world, &c));
    if (self->number == 1) {
        ms_error error = { .status = MS_ERROR_STATE, .message = "enough", .rank = 1 };
        while (!atomic_load(&entered)) sched_yield();
        ms_comm_abort(self->engine, &error);
    }
    self->status = ms_engine_sync(self->engine);
    if (self->number == 1) atomic_store(&closing, 1);
    else pthread_join(opener, NULL);
    ms_tensor_release(t);
}

static void a_rank_closes_before_the_kernel_of_another(void **state)
{
    (void)state;
    if (!on_stand_in() || threads_need_a_process()) skip();
    job what = {
        .kind = THREADS,
        .options = { .ranks = 2, .threads = 1, .heap_bytes = 16 << 20, .timeout_ns = HANG_NS },
        .run = leave_before_the_kernel
    };
    rank ranks[2];
    ms_abort_record cause = run_job(&what, ranks);
    assert_int_equal(cause.reason, MS_ABORT_RAISED);
    for (int r = 0; r < 2; r++)
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
    assert_int_not_equal(ranks[1].status, MS_OK);
    assert_int_equal(atomic_load(&was_unmapped), 0);
}

static ms_cuda_result no_launch(ms_cuda_function kernel, unsigned grid_x, unsigned grid_y,
                                unsigned grid_z, unsigned block_x, unsigned block_y,
                                unsigned block_z, unsigned shared_bytes, ms_cuda_stream on,
                                void **parameters, void **extra)
{
    (void)kernel, (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y;
    (void)block_z, (void)shared_bytes, (void)on, (void)parameters, (void)extra;
    return MS_CUDA_OUT_OF_MEMORY;
}

/* A rank that has entered a call has no kernel for it. */
static void fail_to_launch(rank *self)
{
    ms_tensor *t = NULL;
    ms_collective c = { .kind = MS_ALL_REDUCE, .bucket = -1 };
    OK(make(self, MS_F32, 1 << 16, false, &t));
    c.in = t;
    OK(run_one(self, self->world, &c));
    OK(ms_engine_sync(self->engine));
    if (self->number == 1) ms_cuda_of(self->engine)->cuda.launch = no_launch;
    self->status = run_one(self, self->world, &c);
    if (!self->status) self->status = ms_engine_sync(self->engine);
    self->error = *ms_engine_error(self->engine);
    ms_tensor_release(t);
}

static void a_kernel_cannot_be_launched(void **state)
{
    (void)state;
    rank ranks[2];
    if (!device_is_cuda()) skip();
    job what = {
        .kind = THREADS,
        .options = { .ranks = 2, .threads = 1, .heap_bytes = 16 << 20, .timeout_ns = HANG_NS },
        .run = fail_to_launch
    };
    ms_abort_record cause = run_job(&what, ranks);
    assert_int_equal(cause.reason, MS_ABORT_RAISED);
    for (int r = 0; r < 2; r++) {
        if (*ranks[r].why) fail_msg("%s", ranks[r].why);
        assert_int_not_equal(ranks[r].status, MS_OK);
    }
    assert_non_null(strstr(ranks[0].error.message, "because rank 1: all_reduce"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_bits_are_the_cpus),
        cmocka_unit_test(tensors_of_threads_stay_on_the_gpu),
        cmocka_unit_test(ranks_say_the_same),
        cmocka_unit_test(processes_are_refused),
        cmocka_unit_test(ranks_stand_calls_that_wait),
        cmocka_unit_test(no_wait_is_missing),
        cmocka_unit_test(a_rank_ends_in_the_middle),
        cmocka_unit_test(a_rank_closes_before_the_kernel_of_another),
        cmocka_unit_test(a_kernel_cannot_be_launched),
    };
    return cmocka_run_group_tests_name("comm_direct", tests, NULL, NULL);
}
