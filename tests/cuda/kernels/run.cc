/* run.cc: runs kernels on the host: block by block, the threads of a block as coroutines that
 * switch at barriers and warp operations. A block whose threads do not all reach the same barrier
 * ends the process with a message. */
#include "ops/cuda/device.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

enum { THREADS_MOST = 1024, SHARED_MOST = 227 << 10 };
static const size_t stack_bytes = 256 << 10;

/* What is hidden here is called without a detour. */
#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN ms_host_place ms_host;

/* ------------------------------------------------------------------ switching */

/* Registers that a function must keep are on the stack of the one that waits. Switches make no
 * system call. */
#if defined(__x86_64__)
extern "C" void ms_host_switch(void **from, void *to);
__asm__(".text\n.type ms_host_switch, @function\nms_host_switch:\n"
        "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
        "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
        "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
        ".size ms_host_switch, . - ms_host_switch\n");
static void *first_frame(char *top, void (*entry)())
{
    /* As after a call: the stack is 8 off a multiple of 16 when `entry` begins. */
    void **at = reinterpret_cast<void **>(top) - 2;
    *at = reinterpret_cast<void *>(entry);
    for (int i = 0; i < 6; i++) *--at = NULL;
    return at;
}
#elif defined(__aarch64__)
extern "C" void ms_host_switch(void **from, void *to);
__asm__(".text\n.type ms_host_switch, @function\nms_host_switch:\n"
        "sub sp, sp, #160\n"
        "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
        "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
        "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\n"
        "stp d14, d15, [sp, #144]\n"
        "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
        "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
        "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
        "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\n"
        "ldp d14, d15, [sp, #144]\n"
        "add sp, sp, #160\nret\n"
        ".size ms_host_switch, . - ms_host_switch\n");
static void *first_frame(char *top, void (*entry)())
{
    char *at = top - 160;
    memset(at, 0, 160);
    memcpy(at + 88, &entry, sizeof entry);
    return at;
}
#else
#error "tests/cuda/kernels/run.cc knows x86-64 and aarch64"
#endif

/* -------------------------------------------------------------------- threads */

/* Why a thread does not run: what it waits at in the low bits, above them the line, and that of the
 * caller. So two threads that wait at the same place have the same number. */
enum { RUNS, AT_BARRIER, AT_WARP_BARRIER, ENDED, KIND_BITS = 2, LINE_BITS = 31 };
struct alignas(64) coroutine { /* no division finds its number */
    void *stack_pointer;
    char *stack;
    void *fake_stack; /* of the address sanitizer */
    unsigned place[3], exchanges;
};
static coroutine threads[THREADS_MOST];
static uint64_t waits[THREADS_MOST];
static coroutine *running, *end_of_warp;
static void *scheduler;
static char *end_of_stack; /* of the thread that runs */
#if defined(__SANITIZE_ADDRESS__)
static void *scheduler_fake_stack;
static const void *scheduler_stack;
static size_t scheduler_stack_bytes;
#endif
static const char *kernel_name;
static ms_host_body *kernel_body;
static const void *kernel_arguments;
static unsigned count;
/* What lanes hand over, in two sets: a lane can be one exchange ahead of the others. */
static uint64_t handed[2][THREADS_MOST];

static void __attribute__((noreturn, format(printf, 1, 2))) wrong(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "kernel %s, block %u %u %u: ", kernel_name, ms_host.block[0], ms_host.block[1],
            ms_host.block[2]);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static unsigned kind_of(uint64_t wait) { return wait & ((1u << KIND_BITS) - 1); }
static int line_of(uint64_t wait) { return (int)(wait >> KIND_BITS & ((1u << LINE_BITS) - 1)); }
static int caller_of(uint64_t wait) { return (int)(wait >> (KIND_BITS + LINE_BITS)); }

static inline void set_running(coroutine *one)
{
    running = one;
    end_of_stack = one->stack + stack_bytes;
    memcpy(ms_host.thread, one->place, sizeof ms_host.thread);
}

/* To the next thread of the warp, if that one can run: threads that wait at the same place leave
 * from, and return to, the same place of the code, which processors foresee. Else to the scheduler.
 * The address sanitizer hears of switches between a thread and the scheduler only. */
static inline void leave(bool for_good)
{
    coroutine *self = running;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(for_good ? NULL : &self->fake_stack, scheduler_stack,
                                   scheduler_stack_bytes);
    ms_host_switch(&self->stack_pointer, scheduler);
    __sanitizer_finish_switch_fiber(self->fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#else
    (void)for_good;
    coroutine *next = self + 1;
    if (next == end_of_warp || waits[next - threads] != RUNS)
        ms_host_switch(&self->stack_pointer, scheduler);
    else {
        set_running(next);
        ms_host_switch(&self->stack_pointer, next->stack_pointer);
    }
#endif
}

static void entry()
{
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(NULL, &scheduler_stack, &scheduler_stack_bytes);
#endif
    kernel_body(kernel_arguments);
    waits[running - threads] = ENDED;
    leave(true);
    abort();
}

static void enter(unsigned index)
{
    set_running(&threads[index]);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, running->stack, stack_bytes);
#endif
    ms_host_switch(&scheduler, running->stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, NULL, NULL);
#endif
}

static inline void wait_at(unsigned kind, int line, int caller)
{
    if (!running) wrong("it is declared free of barriers, and waits at line %d", line);
    waits[running - threads] =
        kind | (uint64_t)line << KIND_BITS | (uint64_t)caller << (KIND_BITS + LINE_BITS);
    leave(false);
}
HIDDEN void ms_host_barrier(int line, int caller) { wait_at(AT_BARRIER, line, caller); }
HIDDEN void ms_host_warp_barrier(int line) { wait_at(AT_WARP_BARRIER, line, 0); }

HIDDEN uint64_t ms_host_exchange(uint64_t value, unsigned lane, int line)
{
    if (!running) wrong("it is declared free of warp operations, and has one at line %d", line);
    unsigned index = (unsigned)(running - threads), set = running->exchanges++ % 2;
    if (lane >= MS_WARP) wrong("a warp has no lane %u", lane);
    handed[set][index] = value;
    wait_at(AT_WARP_BARRIER, line, 0);
    return handed[set][index / MS_WARP * MS_WARP + lane];
}

/* Two threads wait, and not at the same place. */
static void __attribute__((noreturn)) differ(unsigned a, unsigned b)
{
    int line = line_of(waits[a]), other = line_of(waits[b]);
    if (line == other)
        wrong("threads %u and %u wait at line %d, called from different lines, %d and %d", a, b,
              line, caller_of(waits[a]), caller_of(waits[b]));
    wrong("threads %u and %u wait at different barriers, lines %d and %d", a, b, line, other);
}

/* If all of the threads first .. end - 1 are at the same place of this kind, they can run. */
static bool release(unsigned first, unsigned end, unsigned kind)
{
    uint64_t differences = 0;
    for (unsigned i = first; i < end; i++) differences |= waits[i] ^ waits[first];
    if (kind_of(waits[first]) != kind || kind_of(differences)) return false;
    for (unsigned i = first + 1; differences && i < end; i++)
        if (waits[i] != waits[first]) differ(first, i);
    for (unsigned i = first; i < end; i++) waits[i] = RUNS;
    return true;
}

/* Each thread of the warp runs until it waits or ends, again as long as all wait for each other. */
static void run_warp(unsigned first, unsigned end)
{
    end_of_warp = &threads[end];
    do {
        for (unsigned i = first; i < end; i++)
            if (waits[i] == RUNS) enter(i);
    } while (release(first, end, AT_WARP_BARRIER));
}

/* A thread's first frames lie elsewhere in their page than its neighbours', as the cache has few
 * places for the same address of many pages. */
static void begin_thread(unsigned i)
{
    coroutine *thread = &threads[i];
    if (!thread->stack) {
        void *memory = mmap(NULL, stack_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) wrong("no memory for a stack");
        thread->stack = static_cast<char *>(memory);
    }
    thread->stack_pointer = first_frame(thread->stack + stack_bytes - i % 64 * 448, entry);
    thread->fake_stack = NULL;
    thread->exchanges = 0;
    waits[i] = RUNS;
}

/* The warps run one after the other, each as far as it can, and the block goes on when all of its
 * threads wait. Where they do not, some have missed a barrier. */
static void run_block(void)
{
    for (unsigned i = 0; i < count; i++) begin_thread(i);
    do {
        for (unsigned first = 0; first < count; first += MS_WARP)
            run_warp(first, first + MS_WARP < count ? first + MS_WARP : count);
    } while (release(0, count, AT_BARRIER));
    for (unsigned i = 0; i < count; i++)
        if (waits[i] != ENDED)
            wrong("thread %u waits at line %d for threads that never come there", i,
                  line_of(waits[i]));
}

static void run_block_free_of_barriers(void)
{
    end_of_stack = static_cast<char *>(__builtin_frame_address(0));
    for (unsigned i = 0; i < count; i++) {
        memcpy(ms_host.thread, threads[i].place, sizeof ms_host.thread);
        kernel_body(kernel_arguments);
    }
}

static void place_threads(void)
{
    const unsigned *of = ms_host.threads;
    for (unsigned z = 0, i = 0; z < of[2]; z++)
        for (unsigned y = 0; y < of[1]; y++)
            for (unsigned x = 0; x < of[0]; x++, i++) {
                threads[i].place[0] = x;
                threads[i].place[1] = y;
                threads[i].place[2] = z;
            }
}

static char shared[SHARED_MOST] __attribute__((aligned(128)));

HIDDEN void ms_host_run(const char *name, ms_host_body *body, const void *arguments,
                        const unsigned blocks[3], const unsigned block_threads[3],
                        unsigned most_threads, unsigned shared_bytes, bool free_of_barriers)
{
    kernel_name = name;
    kernel_body = body;
    kernel_arguments = arguments;
    running = NULL;
    count = block_threads[0] * block_threads[1] * block_threads[2];
    memcpy(ms_host.blocks, blocks, sizeof ms_host.blocks);
    memcpy(ms_host.threads, block_threads, sizeof ms_host.threads);
    ms_host.shared = shared + SHARED_MOST - (shared_bytes + 127) / 128 * 128;
    if (count > most_threads) wrong("%u threads a block: it is made for %u", count, most_threads);
    if (shared_bytes > SHARED_MOST) wrong("%u bytes of shared memory", shared_bytes);
    if (!free_of_barriers && count % MS_WARP)
        wrong("%u threads a block are no multiple of %d", count, MS_WARP);
    place_threads();
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(shared, sizeof shared);
    ASAN_UNPOISON_MEMORY_REGION(ms_host.shared, shared_bytes);
#endif
    for (unsigned z = 0; z < blocks[2]; z++)
        for (unsigned y = 0; y < blocks[1]; y++)
            for (unsigned x = 0; x < blocks[0]; x++) {
                ms_host.block[0] = x;
                ms_host.block[1] = y;
                ms_host.block[2] = z;
                /* What an earlier block left there is no value. */
                if (shared_bytes) memset(ms_host.shared, 0xff, shared_bytes);
                if (free_of_barriers) run_block_free_of_barriers();
                else run_block();
            }
}

/* ------------------------------------------------------------------- watching */

/* The driver sets it to see each access of a kernel to memory that may be the GPU's. The compiler
 * calls these functions where a build asks it to (-fsanitize=kernel-address); run.cc itself is
 * compiled without. */
extern "C" {
__attribute__((visibility("default"))) extern void (*ms_host_watcher)(const void *, size_t, bool);
void (*ms_host_watcher)(const void *, size_t, bool);
#if !defined(__SANITIZE_ADDRESS__)
/* Most accesses are those of a thread to its stack, which lies between this frame and its end, or
 * to shared memory. */
static inline void watch(const void *address, size_t bytes, bool writes)
{
    uintptr_t at = (uintptr_t)address, frame = (uintptr_t)__builtin_frame_address(0);
    if (at - frame < (uintptr_t)end_of_stack - frame) return;
    if (at - (uintptr_t)shared < SHARED_MOST || !ms_host_watcher) return;
    ms_host_watcher(address, bytes, writes);
}
#define WATCH(kind, writes, bytes)                                   \
    HIDDEN void __asan_##kind##bytes##_noabort(const void *address); \
    void __asan_##kind##bytes##_noabort(const void *address) { watch(address, bytes, writes); }
WATCH(load, false, 1)
WATCH(load, false, 2)
WATCH(load, false, 4)
WATCH(load, false, 8)
WATCH(load, false, 16)
WATCH(store, true, 1)
WATCH(store, true, 2)
WATCH(store, true, 4)
WATCH(store, true, 8)
WATCH(store, true, 16)
HIDDEN void __asan_loadN_noabort(const void *address, size_t bytes);
void __asan_loadN_noabort(const void *address, size_t bytes) { watch(address, bytes, false); }
HIDDEN void __asan_storeN_noabort(void *address, size_t bytes);
void __asan_storeN_noabort(void *address, size_t bytes) { watch(address, bytes, true); }
HIDDEN void __asan_handle_no_return(void);
void __asan_handle_no_return(void) {}
#endif
}
