/* cuda_order.c: what the stand-in for NVIDIA's driver finds in programs: each has one fault, and a
 * twin without it. */
#include "device_support.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../cuda/driver/driver.h"
#include "exec/cuda/api.h"
#include "exec/cuda/task.h"
#include "exec/device.h"

/* -------------------------------------------------------------------- kernels */

enum { COUNT = 1024 };
typedef struct pair_args {
    float *to;
    const float *from;
} pair_args;

static stand_in_faults_function *faults_of;
static void (*touch)(const void *, size_t, bool);

static void pass_on(const void *arguments, const unsigned blocks[3], const unsigned threads[3],
                    unsigned shared_bytes)
{
    (void)blocks, (void)threads, (void)shared_bytes;
    const pair_args *args = arguments;
    touch(args->from, COUNT * sizeof(float), false);
    touch(args->to, COUNT * sizeof(float), true);
    for (int i = 0; i < COUNT; i++) args->to[i] = args->from[i] + 1;
}

/* ------------------------------------------------------------------ a program */

/* What the programs of this file use: two streams, two pieces of memory, an event. */
static ms_cuda cuda;
static ms_cuda_stream a, b;
static ms_cuda_address x, y;
static ms_cuda_event event, other;
static ms_cuda_function kernel, others[2];
static float host[COUNT], large[32768];
static bool has_fault;

static void ok(ms_cuda_result result) { assert_int_equal(result, MS_CUDA_SUCCESS); }
static void run(ms_cuda_address to, ms_cuda_address from, ms_cuda_stream on)
{
    pair_args args = { (float *)(uintptr_t)to, (const float *)(uintptr_t)from };
    void *parameters[] = { &args };
    ok(cuda.launch(kernel, 1, 1, 1, 32, 1, 1, 0, on, parameters, NULL));
}
/* b waits for what a has been given so far. */
static void join(ms_cuda_event by)
{
    ok(cuda.event_record(by, a));
    ok(cuda.stream_wait(b, by, 0));
}

static void read_after_write(void)
{
    run(x, x, a);
    if (!has_fault) join(event);
    run(y, x, b);
}
/* The library of kernels for the host tells what they touch. */
static void run_other(int which, ms_cuda_address to, ms_cuda_address from, ms_cuda_stream on)
{
    pair_args args = { (float *)(uintptr_t)to, (const float *)(uintptr_t)from };
    void *parameters[] = { &args };
    ok(cuda.launch(others[which], 1, 1, 1, which ? 64 : 32, 1, 1, 0, on, parameters, NULL));
}
static void kernels_read_after_write(void)
{
    run_other(0, x, y, a);
    if (!has_fault) join(event);
    run_other(1, y, x, b);
}
static void kernels_write_after_read(void)
{
    run_other(1, y, x, a);
    if (!has_fault) join(event);
    run_other(0, x, x, b);
}
static void write_after_read(void)
{
    run(y, x, a);
    if (!has_fault) join(event);
    ok(cuda.fill(x, 0, sizeof host, b));
}
static void write_after_write(void)
{
    ok(cuda.fill(x, 0, sizeof host, a));
    if (!has_fault) join(event);
    ok(cuda.fill(x, 1, sizeof host, b));
}
static void event_of_an_earlier_moment(void)
{
    if (has_fault) ok(cuda.event_record(event, a));
    run(x, x, a);
    if (!has_fault) ok(cuda.event_record(event, a));
    ok(cuda.stream_wait(b, event, 0));
    run(y, x, b);
}
static void wait_on_the_wrong_stream(void)
{
    run(x, x, a);
    ok(cuda.event_record(event, a));
    ok(cuda.stream_wait(has_fault ? a : b, event, 0));
    run(y, x, b);
}
static void event_recorded_on_the_wrong_stream(void)
{
    run(x, x, a);
    ok(cuda.event_record(event, has_fault ? b : a));
    ok(cuda.stream_wait(b, event, 0));
    run(y, x, b);
}
/* One event for two streams: the second record takes the place of the first. */
static void event_used_again(void)
{
    run(x, x, a);
    ok(cuda.event_record(event, a));
    if (has_fault) ok(cuda.event_record(event, b));
    ok(cuda.stream_wait(b, event, 0));
    run(y, x, b);
}
static void wait_for_an_event_without_a_record(void)
{
    if (!has_fault) ok(cuda.event_record(other, a));
    ok(cuda.stream_wait(b, other, 0));
}
static void query_of_an_event_without_a_record(void)
{
    if (!has_fault) ok(cuda.event_record(other, a));
    (void)cuda.event_query(other);
}
static void synchronization_with_an_event_without_a_record(void)
{
    if (!has_fault) ok(cuda.event_record(other, a));
    ok(cuda.event_synchronize(other));
}
static void copy_out_too_early(void)
{
    run(x, x, a);
    if (!has_fault) join(event);
    ok(cuda.copy_out(host, x, sizeof host, b));
    ok(cuda.stream_synchronize(b));
}
static void copy_in_too_early(void)
{
    run(y, x, a);
    if (!has_fault) join(event);
    ok(cuda.copy_in(x, host, sizeof host, b));
}
/* The host waits for the wrong one of two streams. */
static void host_waits_for_the_wrong_stream(void)
{
    run(x, x, a);
    run(y, y, b);
    ok(cuda.stream_synchronize(has_fault ? b : a));
    run(y, x, b);
}
static void memory_used_after_it_was_freed(void)
{
    ms_cuda_address piece;
    ok(cuda.allocate(&piece, sizeof host));
    ok(cuda.fill(piece, 0, sizeof host, a));
    if (has_fault) ok(cuda.release(piece));
    run(y, piece, a);
    ok(cuda.stream_synchronize(a));
    if (!has_fault) ok(cuda.release(piece));
}
static void memory_taken_away_under_way(void)
{
    ms_cuda_address range;
    ms_cuda_memory memory;
    ms_cuda_allocation how = { .type = MS_CUDA_ALLOCATION_PINNED };
    ms_cuda_access access = { .flags = MS_CUDA_READ_WRITE };
    size_t bytes = 2 << 20;
    ok(cuda.reserve(&range, bytes, 0, 0, 0));
    ok(cuda.memory_create(&memory, bytes, &how, 0));
    ok(cuda.map(range, bytes, 0, memory, 0));
    ok(cuda.set_access(range, bytes, &access, 1));
    run(y, x, a);
    if (!has_fault) ok(cuda.stream_synchronize(a));
    ok(cuda.unmap(range, bytes));
    ok(cuda.memory_release(memory));
    ok(cuda.unreserve(range, bytes));
}
static void host_memory_freed_under_way(void)
{
    void *pinned = NULL;
    ok(cuda.host_allocate(&pinned, sizeof host, 0));
    ok(cuda.copy_out(pinned, x, sizeof host, a));
    if (!has_fault) ok(cuda.stream_synchronize(a));
    ok(cuda.host_release(pinned));
}

/* ------------------------------------------------------------------- captures */

/* What cuda.h calls them. */
enum {
    UNSUPPORTED = 900,
    INVALIDATED = 901,
    UNMATCHED = 903,
    UNJOINED = 904,
    CAPTURED_EVENT = 907
};

static void begin_capture(void) { ok(cuda.capture_begin(a, MS_CUDA_CAPTURE_THREAD)); }
/* b becomes part of the capture of a, and comes back. */
static void fork_off(void) { join(event); }
static void join_again(void)
{
    ok(cuda.event_record(event, b));
    ok(cuda.stream_wait(a, event, 0));
}
/* Ends the capture as it should end, and launches what comes of it. */
static void end_capture(int expected, int launches)
{
    ms_cuda_graph graph = NULL;
    ms_cuda_program program = NULL;
    assert_int_equal(cuda.capture_end(a, &graph), expected);
    if (expected) {
        assert_null(graph);
        return;
    }
    ok(cuda.program_make(&program, graph, 0));
    ok(cuda.graph_destroy(graph));
    for (int i = 0; i < launches; i++) ok(cuda.program_launch(program, a));
    ok(cuda.stream_synchronize(a));
    ok(cuda.program_destroy(program));
}
static void end_after(ms_cuda_result result)
{
    if (has_fault) assert_true((int)result >= UNSUPPORTED);
    else ok(result);
    end_capture(has_fault ? INVALIDATED : 0, 2);
}

/* Branches of a graph that nothing orders. */
static void branches_of_a_graph(void)
{
    begin_capture();
    fork_off();
    run(x, x, a);
    if (!has_fault) join(event);
    run(y, x, b);
    join_again();
    end_capture(0, 2);
}
/* Another stream goes on before the graph is over. */
static void work_beside_a_graph(void)
{
    ms_cuda_graph graph = NULL;
    ms_cuda_program program = NULL;
    begin_capture();
    fork_off();
    run(x, x, b);
    join_again();
    ok(cuda.capture_end(a, &graph));
    ok(cuda.program_make(&program, graph, 0));
    ok(cuda.graph_destroy(graph));
    ok(cuda.program_launch(program, a));
    if (!has_fault) join(event);
    run(y, x, b); /* not the b of the graph */
    ok(cuda.stream_synchronize(a));
    ok(cuda.program_destroy(program));
}
static void stream_that_is_not_joined(void)
{
    begin_capture();
    fork_off();
    run(x, x, b);
    if (!has_fault) join_again();
    end_capture(has_fault ? UNJOINED : 0, 1);
}
static void event_from_outside_of_a_capture(void)
{
    ok(cuda.event_record(other, b));
    begin_capture();
    if (!has_fault) ok(cuda.event_record(other, a));
    end_after(cuda.stream_wait(a, other, 0));
}
static void event_of_an_earlier_capture(void)
{
    begin_capture();
    run(x, x, a);
    ok(cuda.event_record(other, a));
    end_capture(0, 1);
    begin_capture();
    if (!has_fault) ok(cuda.event_record(other, a));
    end_after(cuda.stream_wait(a, other, 0));
}
static void query_in_a_capture(void)
{
    begin_capture();
    ok(cuda.event_record(event, a));
    end_after(has_fault ? cuda.event_query(event) : MS_CUDA_SUCCESS);
}
static void host_waits_in_a_capture(void)
{
    ok(cuda.event_record(event, b));
    begin_capture();
    end_after(has_fault ? cuda.event_synchronize(event) : MS_CUDA_SUCCESS);
}
static void host_waits_for_a_captured_stream(void)
{
    begin_capture();
    end_after(has_fault ? cuda.stream_synchronize(a) : MS_CUDA_SUCCESS);
}
static void allocation_in_a_capture(void)
{
    ms_cuda_address piece = 0;
    int mode = MS_CUDA_CAPTURE_RELAXED;
    begin_capture();
    if (!has_fault) ok(cuda.capture_mode(&mode));
    ms_cuda_result result = cuda.allocate(&piece, 256);
    if (!has_fault) ok(cuda.capture_mode(&mode));
    end_after(result);
    if (!result) ok(cuda.release(piece));
}
static void free_in_a_capture(void)
{
    ms_cuda_address piece = 0;
    ok(cuda.allocate(&piece, 256));
    begin_capture();
    end_after(has_fault ? cuda.release(piece) : MS_CUDA_SUCCESS);
    ok(cuda.release(piece));
}
static void copy_of_pageable_memory(void)
{
    void *pinned = NULL;
    ok(cuda.host_allocate(&pinned, sizeof host, 0));
    memset(pinned, 0, sizeof host);
    begin_capture();
    end_after(cuda.copy_in(x, has_fault ? host : pinned, sizeof host, a));
    ok(cuda.host_release(pinned));
}
static void host_memory_of_a_graph(void)
{
    void *pinned = NULL;
    ms_cuda_graph graph = NULL;
    ok(cuda.host_allocate(&pinned, sizeof host, 0));
    begin_capture();
    ok(cuda.copy_out(pinned, x, sizeof host, a));
    ok(cuda.capture_end(a, &graph));
    if (has_fault) ok(cuda.host_release(pinned));
    ok(cuda.graph_destroy(graph));
    if (!has_fault) ok(cuda.host_release(pinned));
}
static void stream_destroyed_in_a_capture(void)
{
    ms_cuda_stream third = NULL;
    ok(cuda.stream_create(&third, MS_CUDA_STREAM_NON_BLOCKING, 0));
    begin_capture();
    ok(cuda.event_record(event, a));
    ok(cuda.stream_wait(third, event, 0));
    if (has_fault) ok(cuda.stream_destroy(third));
    end_capture(has_fault ? INVALIDATED : 0, 1);
    if (!has_fault) ok(cuda.stream_destroy(third));
}
static void launch_in_a_capture(void)
{
    ms_cuda_graph graph = NULL;
    ms_cuda_program program = NULL;
    begin_capture();
    ok(cuda.capture_end(a, &graph));
    ok(cuda.program_make(&program, graph, 0));
    ok(cuda.graph_destroy(graph));
    begin_capture();
    end_after(has_fault ? cuda.program_launch(program, a) : MS_CUDA_SUCCESS);
    ok(cuda.program_destroy(program));
}
static void capture_that_ends_on_another_stream(void)
{
    ms_cuda_graph graph = NULL;
    begin_capture();
    fork_off();
    if (has_fault) assert_int_equal(cuda.capture_end(b, &graph), UNMATCHED);
    join_again();
    end_capture(has_fault ? INVALIDATED : 0, 1);
}
static void time_of_a_captured_event(void)
{
    float ms = 0;
    ms_cuda_event timed = NULL;
    ok(cuda.event_create(&timed, MS_CUDA_EVENT_TIMING));
    ok(cuda.event_record(timed, a));
    begin_capture();
    if (has_fault) ok(cuda.event_record(timed, a));
    end_capture(0, 1);
    assert_int_equal(cuda.event_elapsed(&ms, timed, timed), has_fault ? CAPTURED_EVENT : 0);
    ok(cuda.event_destroy(timed));
}

static const struct program {
    const char *name;
    void (*run)(void);
    const char *message;
} programs[] = {
    { "read after write", read_after_write, "nothing orders the two" },
    { "write after read", write_after_read, "nothing orders the two" },
    { "write after write", write_after_write, "nothing orders the two" },
    { "event of an earlier moment", event_of_an_earlier_moment, "nothing orders the two" },
    { "wait on the wrong stream", wait_on_the_wrong_stream, "nothing orders the two" },
    { "event on the wrong stream", event_recorded_on_the_wrong_stream, "nothing orders the two" },
    { "event used again", event_used_again, "nothing orders the two" },
    { "wait without a record", wait_for_an_event_without_a_record, "never recorded" },
    { "query without a record", query_of_an_event_without_a_record, "never recorded" },
    { "synchronize without a record", synchronization_with_an_event_without_a_record,
      "never recorded" },
    { "copy out too early", copy_out_too_early, "nothing orders the two" },
    { "copy in too early", copy_in_too_early, "nothing orders the two" },
    { "host waits for the wrong stream", host_waits_for_the_wrong_stream,
      "nothing orders the two" },
    { "use after free", memory_used_after_it_was_freed, "which was freed" },
    { "memory taken away under way", memory_taken_away_under_way, "is taken away" },
    { "host memory freed under way", host_memory_freed_under_way, "of the host is freed" },
    { "branches of a graph", branches_of_a_graph, "nothing orders the two" },
    { "work beside a graph", work_beside_a_graph, "nothing orders the two" },
    { "stream that is not joined", stream_that_is_not_joined, "were joined" },
    { "event from outside", event_from_outside_of_a_capture, "an event from outside" },
    { "event of an earlier capture", event_of_an_earlier_capture, "of another capture" },
    { "query in a capture", query_in_a_capture, "asks for an event of a capture" },
    { "host waits in a capture", host_waits_in_a_capture, "asks for an event while" },
    { "host waits for a captured stream", host_waits_for_a_captured_stream, "waits for a stream" },
    { "allocation in a capture", allocation_in_a_capture, "memory is allocated while" },
    { "free in a capture", free_in_a_capture, "memory is freed while" },
    { "copy of pageable memory", copy_of_pageable_memory, "not pinned" },
    { "host memory of a graph", host_memory_of_a_graph, "while a graph" },
    { "stream destroyed in a capture", stream_destroyed_in_a_capture, "a stream is destroyed" },
    { "launch in a capture", launch_in_a_capture, "a graph is launched" },
    { "end on another stream", capture_that_ends_on_another_stream, "on another stream" },
    { "time of a captured event", time_of_a_captured_event, "the time of an event" },
    { "read by a kernel", kernels_read_after_write, "nothing orders the two" },
    { "write by a kernel", kernels_write_after_read, "nothing orders the two" },
};
/* The last two need kernels that are watched, which a build for sanitizers has not. */
enum { OF_KERNELS = 2 };

static void *symbol(const char *name)
{
    const ms_os *os = ms_os_posix();
    char why[256];
    void *library = os->library_load(os->user, getenv("MOONSHARD_STAND_IN"), why, sizeof why);
    if (!library) fail_msg("%s", why);
    return os->library_symbol(os->user, library, name);
}

static void begin(void)
{
    int least, greatest;
    ms_context context;
    ms_cuda_context current;
    ms_cuda_module module;
    ms_context_init(&context, ms_os_posix());
    assert_int_equal(ms_cuda_load(&context, &cuda), MS_OK);
    ok(cuda.context_retain(&current, 0));
    ok(cuda.context_set(current));
    ok(cuda.priorities(&least, &greatest));
    ok(cuda.stream_create(&a, MS_CUDA_STREAM_NON_BLOCKING, least));
    ok(cuda.stream_create(&b, MS_CUDA_STREAM_NON_BLOCKING, least));
    ok(cuda.event_create(&event, MS_CUDA_EVENT_NO_TIMING));
    ok(cuda.event_create(&other, MS_CUDA_EVENT_NO_TIMING));
    ok(cuda.allocate(&x, sizeof host));
    ok(cuda.allocate(&y, sizeof host));
    ok(cuda.module_load(&module, "image"));
    ok(cuda.module_function(&kernel, module, "pass_on"));
    ok(cuda.module_function(&others[0], module, "test_copies"));
    ok(cuda.module_function(&others[1], module, "test_swaps"));
    ok(cuda.copy_in(x, host, sizeof host, a));
    ok(cuda.copy_in(y, host, sizeof host, a));
    ok(cuda.stream_synchronize(a));
}

static void end(void)
{
    ok(cuda.stream_synchronize(a));
    ok(cuda.stream_synchronize(b));
    ok(cuda.stream_destroy(a));
    ok(cuda.stream_destroy(b));
    ok(cuda.event_destroy(event));
    ok(cuda.event_destroy(other));
    ok(cuda.release(x));
    ok(cuda.release(y));
}

static void each_fault_is_found_and_no_other(void **state)
{
    (void)state;
    size_t count = sizeof programs / sizeof *programs;
    if (!getenv("MOONSHARD_STAND_IN_WATCHED_KERNELS")) count -= OF_KERNELS;
    for (size_t i = 0; i < count; i++)
        for (int faulty = 0; faulty < 2; faulty++) {
            const char *text;
            has_fault = faulty;
            (void)faults_of(&text);
            begin();
            programs[i].run();
            end();
            unsigned faults = faults_of(&text);
            if (!faulty && faults) fail_msg("%s: %s", programs[i].name, text);
            if (faulty && (!faults || !strstr(text, programs[i].message)))
                fail_msg("%s: %u faults, %s", programs[i].name, faults, text);
        }
}

/* What the host reads before a copy has run, and what it writes over the source of one. */
static void values_tell_when_the_host_is_too_early(void **state)
{
    (void)state;
    begin();
    ok(cuda.fill(x, 0, sizeof host, a));
    ok(cuda.copy_out(host, x, sizeof host, a));
    assert_true(host[0] != 0);
    ok(cuda.stream_synchronize(a));
    assert_true(host[0] == 0);
    ms_cuda_address piece;
    ok(cuda.allocate(&piece, sizeof large));
    ok(cuda.copy_in(piece, large, sizeof large, a));
    large[0] = 7;
    ok(cuda.copy_out(host, piece, sizeof host, a));
    ok(cuda.stream_synchronize(a));
    assert_true(host[0] == 7);
    large[0] = host[0] = 0;
    ok(cuda.release(piece));
    end();
}

/* ---------------------------------------------------------- an engine with a fault */

static void run_task(ms_cuda_work *work, const void *arguments)
{
    static const ms_cuda_kernel it = { .image = (const unsigned char *)"image", .name = "pass_on" };
    ms_cuda_shape shape = { .blocks = { 1 }, .threads = { 32 } };
    ms_cuda_launch(work, &it, shape, arguments, sizeof(pair_args));
}
static const ms_cuda_task passes = { .task = { .name = "pass on", .args_bytes = sizeof(pair_args) },
                                     .function = run_task };

/* It counts its numbers, as a wait does, and tells the driver nothing. */
static void no_wait(ms_stream *stream, const ms_wait *wait)
{
    ms_launch launch = { .seq = wait->seq, .name = "no wait" };
    ms_device_cuda.copy_out(stream, &launch, NULL, NULL, 0);
}

static void enqueue(ms_stream *on, ms_storage *to, ms_storage *from)
{
    pair_args args = { ms_storage_data(to), ms_storage_data(from) };
    ms_access accesses[2] = { { .storage = to, .cells = 1, .mode = MS_WRITE },
                              { .storage = from, .cells = 1, .mode = MS_READ } };
    assert_int_equal(
        ms_stream_enqueue(on, &passes.task, &args, accesses, 2, (ms_task_cost){ 0 }, NULL), MS_OK);
}

/* Two streams of the engine hand a storage over; the device waits, or does not. */
static void a_device_that_does_not_wait_is_found(void **state)
{
    (void)state;
    for (int faulty = 0; faulty < 2; faulty++) {
        ms_device table = ms_device_cuda;
        ms_engine_options options = { .own_device = &table, .threads = 1 };
        ms_engine *engine = NULL;
        ms_error error;
        const char *text;
        if (faulty) table.wait = no_wait;
        (void)faults_of(&text);
        if (ms_engine_new(&options, &error, &engine)) fail_msg("%s", error.message);
        ms_stream *first = ms_engine_current(engine), *second = side_of(engine);
        ms_storage *from = storage_of(first, COUNT * sizeof(float)),
                   *to = storage_of(first, COUNT * sizeof(float));
        assert_int_equal(ms_stream_copy_in(first, from, 0, host, sizeof host, NULL), MS_OK);
        enqueue(first, to, from);
        enqueue(second, from, to);
        assert_int_equal(ms_engine_sync(engine), MS_OK);
        ms_storage_release(from);
        ms_storage_release(to);
        ms_engine_free(engine);
        unsigned faults = faults_of(&text);
        if (faulty ? faults == 0 : faults > 0) fail_msg("%u faults: %s", faults, text);
    }
}

/* ------------------------------------------------------------ faults in a kernel */

/* A kernel of the library for the host whose blocks are too large, or whose threads are no whole
 * warps, ends the process with a message. */
static void assert_ends(const char *name, unsigned threads, unsigned shared, const char *message)
{
    int pipes[2];
    char text[512] = "";
    assert_int_equal(pipe(pipes), 0);
    pid_t child = fork();
    if (child == 0) {
        unsigned blocks[3] = { 1, 1, 1 }, sizes[3] = { threads, 1, 1 };
        unsigned char arguments[512] = { 0 };
        const ms_os *os = ms_os_posix();
        char why[256];
        void *library =
            os->library_load(os->user, getenv("MOONSHARD_STAND_IN_KERNELS"), why, sizeof why);
        void (*found)(void) = library ? os->library_symbol(os->user, library, name) : NULL;
        (void)dup2(pipes[1], STDERR_FILENO);
        if (found) ((stand_in_kernel *)found)(arguments, blocks, sizes, shared);
        _exit(0);
    }
    close(pipes[1]);
    for (size_t have = 0; have + 1 < sizeof text;) {
        ssize_t got = read(pipes[0], text + have, sizeof text - 1 - have);
        if (got <= 0) break;
        have += (size_t)got;
    }
    close(pipes[0]);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGABRT || !strstr(text, message))
        fail_msg("%s: status %d: %s", name, status, text);
}

static void kernels_that_break_the_rules_are_found(void **state)
{
    (void)state;
    assert_ends("test_misses_barrier", 64, 0, "wait at different barriers");
    assert_ends("test_leaves_before_barrier", 64, 0, "for threads that never come there");
    assert_ends("test_misses_exchange", 64, 0, "for threads that never come there");
    assert_ends("test_joins_apart", 64, 0, "called from different lines");
    assert_ends("test_exchanges_apart", 64, 0, "wait at different barriers");
    assert_ends("test_is_not_free", 64, 0, "it is declared free of barriers");
    assert_ends("test_sums", 40, 0, "no multiple of 32");
    assert_ends("test_sums", 128, 0, "it is made for 64");
    assert_ends("test_sums", 64, 1 << 20, "bytes of shared memory");
}

static int set_up(void **state)
{
    (void)state;
    setenv("MOONSHARD_STAND_IN_WATCH", "count", 1);
    setenv("MOONSHARD_CUDA_DRIVER", getenv("MOONSHARD_STAND_IN"), 1);
    faults_of = (stand_in_faults_function *)symbol("stand_in_faults");
    touch = (void (*)(const void *, size_t, bool))symbol("stand_in_touch");
    ((stand_in_has_function *)symbol("stand_in_has"))("pass_on", pass_on, sizeof(pair_args));
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_fault_is_found_and_no_other),
        cmocka_unit_test(values_tell_when_the_host_is_too_early),
        cmocka_unit_test(a_device_that_does_not_wait_is_found),
        cmocka_unit_test(kernels_that_break_the_rules_are_found),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
