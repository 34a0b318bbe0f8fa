/* driver.c: see driver.h. One lock guards everything. */
#include "driver.h"
#include "order.h"
#include "work.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* ---------------------------------------------------------------- what goes wrong */

pthread_mutex_t stand_in_lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
    const char *fails;
    int fails_with, stopped, version, gpus;
    bool initialized, is_shared;
    _Atomic unsigned left;
    struct count {
        const char *call;
        unsigned calls;
    } counts[64];
} driver = { .version = 13000, .gpus = 1 };

API void stand_in_fails(const char *call, int result)
{
    driver.fails = call;
    driver.fails_with = result;
}
/* A thread of the stand-in may be carrying on with work. */
API void stand_in_stops(int result)
{
    pthread_mutex_lock(&stand_in_lock);
    driver.stopped = result;
    pthread_mutex_unlock(&stand_in_lock);
}
API void stand_in_is(int version, int gpus)
{
    driver.version = version;
    driver.gpus = gpus;
}
API unsigned stand_in_left(void) { return driver.left; }
void count_left(int change) { driver.left += (unsigned)change; }

static struct count *count_of(const char *call)
{
    for (size_t i = 0; i < sizeof driver.counts / sizeof *driver.counts; i++) {
        struct count *count = &driver.counts[i];
        if (!count->call) count->call = call;
        if (strcmp(count->call, call) == 0) return count;
    }
    abort();
}

static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

API unsigned stand_in_calls(const char *call)
{
    pthread_mutex_lock(&counting);
    unsigned calls = count_of(call)->calls;
    pthread_mutex_unlock(&counting);
    return calls;
}

static __thread void *current;

/* Every call begins so. 0: it goes on. */
static int begin(const char *call)
{
    pthread_mutex_lock(&counting);
    count_of(call)->calls++;
    pthread_mutex_unlock(&counting);
    if (driver.fails && strcmp(driver.fails, call) == 0) {
        driver.fails = NULL;
        return driver.fails_with;
    }
    return driver.stopped;
}
int begin_in_context(const char *call)
{
    int result = begin(call);
    if (!result && !driver.initialized) result = NOT_INITIALIZED;
    if (!result && !current) result = INVALID_CONTEXT;
    return result;
}

/* What a capture does not see is refused meanwhile: unless the thread's mode is relaxed, or in any
 * mode, as it waits for work. */
static int begin_unseen(const char *call, const char *words, bool in_any_mode)
{
    int result = begin_in_context(call);
    pthread_mutex_lock(&stand_in_lock);
    if (!result) result = capture_forbids(words, in_any_mode);
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
static int begin_relaxed(const char *call, const char *words)
{
    return begin_unseen(call, words, false);
}
static int begin_never(const char *call, const char *words)
{
    return begin_unseen(call, words, true);
}

/* ------------------------------------------------------------------ work */

static event *destroyed; /* work may still record one, or wait for it */
stream *streams;
static order_clock host;
static uint64_t seed = 1;

uint64_t draw(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return seed >> 33;
}

static _Atomic uint64_t passed_ns; /* see stand_in_pass */
API void stand_in_pass(uint64_t ns) { passed_ns += ns; }

static uint64_t clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec + passed_ns;
}

static work *add(stream *on, work_kind kind)
{
    work *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->kind = kind;
    made->host = host;
    if (on->capture) {
        capture_work(on, made);
        return made;
    }
    *on->last = made;
    on->last = &made->next;
    return made;
}
work *add_work(void *on, work_kind kind) { return add(on, kind); }

void free_work(work *gone)
{
    free(gone->memory);
    free(gone->after);
    free(gone);
}

static void take_away(stream *on)
{
    work *gone = on->first;
    on->first = gone->next;
    if (!on->first) on->last = &on->first;
    if (gone->kind == PROGRAM) program_over(gone);
    free_work(gone);
}

static void copy(const work *now)
{
    const void *from = now->memory ? now->memory : now->from;
    order_touch(from, now->bytes, false);
    order_touch(now->to, now->bytes, true);
    memcpy(now->to, from, now->bytes);
}

/* Whether the kernel is the one of MOONSHARD_STAND_IN_FAULT=NAME:N, the Nth that runs of those
 * whose names contain NAME. */
static bool is_faulty(const char *name)
{
    static unsigned count;
    char part[64];
    unsigned wanted;
    const char *fault = getenv("MOONSHARD_STAND_IN_FAULT");
    if (!fault || sscanf(fault, "%63[^:]:%u", part, &wanted) != 2 || !strstr(name, part)
        || ++count < wanted)
        return false;
    count = 0;
    return true;
}

/* Functions of the host call nothing of the driver and wait for nothing: the lock stays taken, so
 * that all work stands still while one runs. */
void carry_out(const work *now)
{
    if (now->kind == KERNEL && is_faulty(now->name)) driver.stopped = ILLEGAL_ADDRESS;
    else if (now->kind == KERNEL)
        now->kernel(now->memory, now->blocks, now->threads, now->shared_bytes);
    if (now->kind == COPY) copy(now);
    if (now->kind == CALL || now->kind == OTHER) now->call(now->argument);
}

API void stand_in_touch(const void *address, size_t bytes, bool writes)
{
    if (order_is_on()) order_touch(address, bytes, writes);
}

static bool can_begin(const stream *on)
{
    const work *now = on->first;
    if (!now) return false;
    if (now->kind == WAIT) return now->event->passed >= now->record;
    return now->kind != OTHER || now->ready(now->argument);
}

static void tell(const stream *on);
static void listen(const stream *on);
static bool is_set(void *argument);
static bool step(stream *on)
{
    work *now = on->first;
    if (!can_begin(on)) return false;
    if (now->kind == PROGRAM) {
        if (!program_step(on->number, now)) return false;
        if (!now->left) take_away(on);
        return true;
    }
    order_begin(on->number, &now->host, now->name);
    if (now->kind == CALL) tell(on);
    carry_out(now);
    if (now->kind == OTHER && now->ready == is_set) listen(on);
    if (now->kind == WAIT) order_wait(on->number, &now->event->clock);
    /* An event stands for its latest record, in the order of the host's calls. */
    if (now->kind == RECORD && now->record > now->event->passed) {
        now->event->passed = now->record;
        now->event->ns = clock_ns();
        now->event->clock = *order_now(on->number);
    }
    take_away(on);
    return true;
}

/* One piece of work of a stream that is chosen at random; false: there is none that can run. */
static bool step_any(void)
{
    unsigned count = 0;
    if (driver.stopped) return false;
    for (stream *one = streams; one; one = one->next) count++;
    for (unsigned tries = 0, at = count ? (unsigned)(draw() % count) : 0; tries < count;
         tries++, at = (at + 1) % count) {
        stream *one = streams;
        for (unsigned i = 0; i < at; i++) one = one->next;
        if (step(one)) return true;
    }
    return false;
}

/* Whether something is under way that other threads or processes carry on. */
static bool is_waiting(void)
{
    for (const stream *one = streams; one; one = one->next)
        for (const work *now = one->first; now; now = now->next)
            if (now->kind == OTHER) return true;
    return false;
}

static void let_others(unsigned us)
{
    pthread_mutex_unlock(&stand_in_lock);
    usleep(us);
    pthread_mutex_lock(&stand_in_lock);
}

static bool any_has_work(void)
{
    for (const stream *one = streams; one; one = one->next)
        if (one->first) return true;
    return false;
}

/* What a function of the host knows, it may tell threads that use other streams, for which theirs
 * wait by a word. Which thread told which is not seen: a stream that has waited for a word knows
 * what all functions knew that have run by then on streams of other threads. */
typedef struct speaker {
    struct speaker *next;
    pthread_t thread;
    order_clock told;
} speaker;
static speaker *speakers;

static speaker *speaker_of(pthread_t thread)
{
    speaker *one = speakers;
    while (one && !pthread_equal(one->thread, thread)) one = one->next;
    if (one) return one;
    one = calloc(1, sizeof *one);
    if (!one) abort();
    one->thread = thread;
    one->next = speakers;
    return speakers = one;
}

static void tell(const stream *on)
{
    order_join(&speaker_of(on->owner)->told, order_now(on->number));
}
static void listen(const stream *on)
{
    for (const speaker *one = speakers; one; one = one->next)
        if (!pthread_equal(one->thread, on->owner)) order_wait(on->number, &one->told);
}

/* For a thread that waits: false: nothing will ever happen again. */
static bool go_on(void)
{
    if (step_any()) return true;
    if (driver.stopped || !is_waiting()) return false;
    let_others(20);
    return true;
}

/* A GPU works while no thread of the host waits for it. */
static void *carry_on(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&stand_in_lock);
    for (;;) {
        for (int i = 0; i < 16 && is_waiting() && !driver.stopped && step_any(); i++) {}
        let_others(300);
    }
    return NULL;
}

API void stand_in_share(void)
{
    static pid_t carried_on_by;
    pthread_t thread;
    pthread_mutex_lock(&stand_in_lock);
    driver.is_shared = true;
    if (carried_on_by != getpid()
        && (pthread_create(&thread, NULL, carry_on, NULL) || pthread_detach(thread)))
        abort();
    carried_on_by = getpid();
    pthread_mutex_unlock(&stand_in_lock);
}

API void stand_in_work(void *on, bool (*ready)(void *), void (*run)(void *), void *argument)
{
    pthread_mutex_lock(&stand_in_lock);
    capture *broken = ((stream *)on)->capture;
    if (broken) (void)capture_broken(broken, "a library waits for others");
    work *made = add(on, OTHER);
    made->name = "work of a library";
    made->ready = ready;
    made->call = run;
    made->argument = argument;
    pthread_mutex_unlock(&stand_in_lock);
}

/* ------------------------------------------------------------- device and context */

/* The slice of MIG that this process sees, or -1. With MOONSHARD_STAND_IN_MIG there are slices of
 * the names MIG-0, MIG-1 ..., as many as it says, two of each GPU; the process sees the one that
 * CUDA_VISIBLE_DEVICES names first. */
static int slice = -1;
static int count_gpus(int gpus)
{
    const char *slices = getenv("MOONSHARD_STAND_IN_MIG"),
               *visible = getenv("CUDA_VISIBLE_DEVICES");
    int number = 0;
    if (!slices) return gpus;
    if (visible && sscanf(visible, "MIG-%d", &number) != 1) return 0;
    if (number < 0 || number >= atoi(slices)) return 0;
    if (slice != number) slice = number;
    return 1;
}

API int cuInit(unsigned flags)
{
    int result = begin("cuInit");
    const char *chosen = getenv("MOONSHARD_STAND_IN_SEED"),
               *count = getenv("MOONSHARD_STAND_IN_GPUS");
    int gpus = count ? atoi(count) : driver.gpus;
    if (gpus > STAND_IN_GPUS) abort();
    pthread_mutex_lock(&stand_in_lock);
    gpus = count_gpus(gpus);
    pthread_mutex_unlock(&stand_in_lock);
    if (!result && flags) result = INVALID_VALUE;
    if (!result && !gpus) result = NO_DEVICE;
    /* Other threads may use the driver already: what stays the same is not written. */
    pthread_mutex_lock(&stand_in_lock);
    if (chosen) seed = strtoull(chosen, NULL, 10) * 2 + 1;
    if (driver.gpus != gpus) driver.gpus = gpus;
    if (!result && !driver.initialized) driver.initialized = true;
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuDriverGetVersion(int *version)
{
    *version = driver.version;
    return SUCCESS;
}
API int cuGetErrorName(int result, const char **text)
{
    *text = result == OUT_OF_MEMORY         ? "CUDA_ERROR_OUT_OF_MEMORY"
            : result == ILLEGAL_ADDRESS     ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : result == LAUNCH_FAILED       ? "CUDA_ERROR_LAUNCH_FAILED"
            : result == NOT_FOUND           ? "CUDA_ERROR_NOT_FOUND"
            : result == 801                 ? "CUDA_ERROR_NOT_SUPPORTED"
            : result == CAPTURE_UNSUPPORTED ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
            : result == CAPTURE_INVALIDATED ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
                                            : "CUDA_ERROR_UNKNOWN";
    return SUCCESS;
}
API int cuGetErrorString(int result, const char **text)
{
    *text = result == OUT_OF_MEMORY ? "out of memory" : "the stand-in was told so";
    return SUCCESS;
}
API int cuDeviceGetCount(int *count)
{
    *count = driver.gpus;
    return begin("cuDeviceGetCount");
}
API int cuDeviceGet(int *gpu, int index)
{
    int result = begin("cuDeviceGet");
    *gpu = index;
    return result ? result : index < driver.gpus ? SUCCESS : INVALID_DEVICE;
}
API int cuDeviceGetName(char *name, int bytes, int gpu)
{
    const char *other = getenv("MOONSHARD_STAND_IN_GPU_NAME");
    if (slice >= 0) snprintf(name, (size_t)bytes, "stand-in %d MIG 1g.4gb", slice / 2);
    else if (other) snprintf(name, (size_t)bytes, "%s", other);
    else snprintf(name, (size_t)bytes, "stand-in %d", gpu);
    return begin("cuDeviceGetName");
}
/* Two slices of MIG are of one GPU. */
API int cuDeviceGetPCIBusId(char *text, int bytes, int gpu)
{
    int bus = slice >= 0 ? slice / 2 : gpu;
    snprintf(text, (size_t)bytes, "0000:%02X:00.0", 0x1A + bus);
    return begin("cuDeviceGetPCIBusId");
}
API int cuDeviceTotalMem_v2(size_t *bytes, int gpu)
{
    (void)gpu;
    *bytes = (size_t)4 << 30;
    return begin("cuDeviceTotalMem_v2");
}
API int cuDeviceGetAttribute(int *value, int attribute, int gpu)
{
    (void)gpu;
    const char *without = getenv("MOONSHARD_STAND_IN_WITHOUT"),
               *major = getenv("MOONSHARD_STAND_IN_MAJOR");
    *value = attribute == 75 ? 9 : attribute == 16 ? 2 : attribute == 102;
    if (attribute == 102 && without && strcmp(without, "virtual") == 0) *value = 0;
    if (attribute == 75 && major) *value = atoi(major);
    if (attribute == 76) *value = 0;
    return begin("cuDeviceGetAttribute");
}
static char contexts[STAND_IN_GPUS];
API int cuDevicePrimaryCtxRetain(void **context, int gpu)
{
    int result = begin("cuDevicePrimaryCtxRetain");
    *context = &contexts[gpu];
    if (!result) driver.left++;
    return result;
}
API int cuDevicePrimaryCtxRelease_v2(int gpu)
{
    (void)gpu;
    driver.left--;
    return begin("cuDevicePrimaryCtxRelease_v2");
}
API int cuCtxSetCurrent(void *context)
{
    current = context;
    return SUCCESS;
}
API int cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return begin_in_context("cuCtxGetStreamPriorityRange");
}
API int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    *available = (size_t)1 << 30;
    *total = (size_t)4 << 30;
    return begin_in_context("cuMemGetInfo_v2");
}

/* ---------------------------------------------------------- streams and events */

API int cuStreamCreateWithPriority(void **out, unsigned flags, int priority)
{
    int result = begin_in_context("cuStreamCreateWithPriority");
    if (!result && (flags > 1 || priority > 0 || priority < -5)) result = INVALID_VALUE;
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    stream *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->last = &made->first;
    made->number = order_open();
    made->owner = pthread_self();
    made->next = streams;
    streams = made;
    driver.left++;
    pthread_mutex_unlock(&stand_in_lock);
    *out = made;
    return SUCCESS;
}
API int cuStreamDestroy_v2(void *gone)
{
    int result = begin_in_context("cuStreamDestroy_v2");
    pthread_mutex_lock(&stand_in_lock);
    stream **at = &streams;
    while (*at && *at != gone) at = &(*at)->next;
    if (*at) {
        stream *found = *at;
        if (found->capture) capture_broken(found->capture, "a stream is destroyed");
        while (found->first && !driver.stopped && go_on()) {}
        while (found->first) take_away(found);
        *at = found->next;
        order_close(found->number);
        free(found);
        driver.left--;
    } else result = INVALID_HANDLE;
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuStreamSynchronize(void *on)
{
    int result = begin_in_context("cuStreamSynchronize");
    pthread_mutex_lock(&stand_in_lock);
    if (!result) result = capture_forbids("the host waits for a stream", ((stream *)on)->capture);
    while (!result && ((stream *)on)->first && go_on()) {}
    if (!result) result = driver.stopped;
    if (!result) order_join(&host, order_now(((stream *)on)->number));
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuCtxSynchronize(void)
{
    int result = begin_never("cuCtxSynchronize", "the host waits for all streams");
    pthread_mutex_lock(&stand_in_lock);
    while (!result && any_has_work() && go_on()) {}
    for (stream *one = streams; one && !result; one = one->next)
        if (!one->first) order_join(&host, order_now(one->number));
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuStreamWaitEvent(void *on, void *for_event, unsigned flags)
{
    int result = begin_in_context("cuStreamWaitEvent");
    if (result || flags) return result ? result : INVALID_VALUE;
    pthread_mutex_lock(&stand_in_lock);
    result = capture_wait(on, for_event);
    if (result == NOT_CAPTURED) {
        work *made = add(on, WAIT);
        made->name = "a wait";
        made->event = for_event;
        made->record = made->event->records;
        if (!made->record) order_fault("a stream waits for an event that was never recorded");
        result = SUCCESS;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
/* Another thread or process sets the word, so work goes on meanwhile. */
static bool is_set(void *argument)
{
    const work *now = argument;
    uint32_t word = __atomic_load_n((const uint32_t *)now->from, __ATOMIC_ACQUIRE);
    return (int32_t)(word - now->blocks[0]) >= 0;
}
static void pass_word(void *argument) { (void)argument; }
API int cuStreamWaitValue32_v2(void *on, unsigned long long address, unsigned value, unsigned flags)
{
    int result = begin_in_context("cuStreamWaitValue32_v2");
    if (!result && (flags || address % 4)) result = INVALID_VALUE;
    if (result) return result;
    stand_in_share();
    pthread_mutex_lock(&stand_in_lock);
    work *made = add(on, OTHER);
    made->name = "a wait for a word";
    made->from = (const void *)(uintptr_t)address;
    made->blocks[0] = value;
    made->ready = is_set;
    made->call = pass_word;
    made->argument = made;
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
API int cuEventCreate(void **out, unsigned flags)
{
    int result = begin_in_context("cuEventCreate");
    if (result || flags > 3) return result ? result : INVALID_VALUE;
    *out = calloc(1, sizeof(event));
    driver.left++;
    return *out ? SUCCESS : OUT_OF_MEMORY;
}
API int cuEventDestroy_v2(void *gone)
{
    int result = begin_in_context("cuEventDestroy_v2");
    driver.left--;
    event *one = gone;
    pthread_mutex_lock(&stand_in_lock);
    free(one->front.last);
    one->front = (front){ .last = NULL };
    one->next = destroyed;
    destroyed = one;
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuEventRecord(void *recorded, void *on)
{
    int result = begin_in_context("cuEventRecord");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    if (!capture_record(on, recorded)) {
        work *made = add(on, RECORD);
        made->name = "an event";
        made->event = recorded;
        made->record = ++made->event->records;
    }
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
/* Looking does not make work run, but time passes. */
API int cuEventQuery(void *asked)
{
    int result = begin_in_context("cuEventQuery");
    event *found = asked;
    pthread_mutex_lock(&stand_in_lock);
    if (!result) result = capture_asks(found);
    if (!result && draw() % 2) (void)step_any();
    if (!result && !found->records)
        order_fault("the host asks for an event that was never recorded");
    if (!result && found->passed < found->records) result = NOT_READY;
    if (!result) order_join(&host, &found->clock);
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuEventSynchronize(void *asked)
{
    int result = begin_in_context("cuEventSynchronize");
    event *found = asked;
    pthread_mutex_lock(&stand_in_lock);
    if (!result) result = capture_asks(found);
    if (!result && !found->records)
        order_fault("the host waits for an event that was never recorded");
    while (!result && found->passed < found->records && go_on()) {}
    if (!result) result = driver.stopped;
    if (!result) order_join(&host, &found->clock);
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
API int cuEventElapsedTime_v2(float *ms, void *from, void *to)
{
    int result = begin_in_context("cuEventElapsedTime_v2");
    const event *first = from, *second = to;
    pthread_mutex_lock(&stand_in_lock);
    if (!result && (first->front.capture || second->front.capture)) {
        order_fault("the host asks for the time of an event of a capture");
        result = CAPTURED_EVENT;
    }
    pthread_mutex_unlock(&stand_in_lock);
    if (!result && (!first->passed || second->passed < second->records)) result = NOT_READY;
    if (!result) *ms = (float)((double)(int64_t)(second->ns - first->ns) * 1e-6);
    return result;
}

/* ------------------------------------------------------------------ memory */

static void map(const void *address, size_t bytes)
{
    pthread_mutex_lock(&stand_in_lock);
    order_map(address, bytes);
    pthread_mutex_unlock(&stand_in_lock);
}
API int cuMemAlloc_v2(unsigned long long *out, size_t bytes)
{
    int result = begin_relaxed("cuMemAlloc_v2", "memory is allocated");
    /* The size stands before the memory. */
    char *memory = result ? NULL : aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
    if (!result && !memory) result = OUT_OF_MEMORY;
    if (!result) driver.left++;
    if (!result) {
        memcpy(memory, &bytes, sizeof bytes);
        memory += 256;
        map(memory, bytes);
    }
    *out = (uintptr_t)memory;
    return result;
}
/* The driver waits for work under way before it frees. */
API int cuMemFree_v2(unsigned long long address)
{
    int result = begin_never("cuMemFree_v2", "memory is freed");
    if (result && !driver.stopped) return result;
    driver.left--;
    pthread_mutex_lock(&stand_in_lock);
    while (step_any()) {}
    char *memory = (char *)(uintptr_t)address - 256;
    size_t bytes = 0;
    memcpy(&bytes, memory, sizeof bytes);
    order_unmap(memory + 256, bytes);
    if (order_is_on()) order_free(memory + 256, bytes);
    else free(memory);
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
#define GRAIN ((size_t)2 << 20)
API int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int which)
{
    (void)properties, (void)which;
    *bytes = GRAIN;
    return begin_in_context("cuMemGetAllocationGranularity");
}
API int cuMemAddressReserve(unsigned long long *out, size_t bytes, size_t align,
                            unsigned long long at, unsigned long long flags)
{
    int result = begin_relaxed("cuMemAddressReserve", "addresses are reserved");
    if (!result && (align || at || flags || bytes % GRAIN)) result = INVALID_VALUE;
    if (result) return result;
    char *memory = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return OUT_OF_MEMORY;
    driver.left++;
    *out = (uintptr_t)memory;
    return SUCCESS;
}
API int cuMemAddressFree(unsigned long long address, size_t bytes)
{
    int result = begin_in_context("cuMemAddressFree");
    driver.left--;
    return munmap((void *)(uintptr_t)address, bytes) ? INVALID_VALUE : result;
}
API int cuMemCreate(unsigned long long *out, size_t bytes, const void *properties,
                    unsigned long long flags)
{
    (void)properties, (void)flags;
    int result = begin_relaxed("cuMemCreate", "memory is made");
    if (!result && bytes % GRAIN) result = INVALID_VALUE;
    if (!result) driver.left++;
    *out = bytes;
    return result;
}
API int cuMemRelease(unsigned long long memory)
{
    (void)memory;
    driver.left--;
    return begin_in_context("cuMemRelease");
}
API int cuMemMap(unsigned long long address, size_t bytes, size_t offset, unsigned long long memory,
                 unsigned long long flags)
{
    (void)address;
    int result = begin_relaxed("cuMemMap", "memory is mapped");
    if (!result && (offset || flags || memory != bytes)) result = INVALID_VALUE;
    return result;
}
API int cuMemSetAccess(unsigned long long address, size_t bytes, const void *access, size_t count)
{
    (void)access;
    int result = begin_relaxed("cuMemSetAccess", "memory is mapped");
    if (result || count != 1) return result ? result : INVALID_VALUE;
    if (mprotect((void *)(uintptr_t)address, bytes, PROT_READ | PROT_WRITE)) return INVALID_VALUE;
    map((void *)(uintptr_t)address, bytes);
    return SUCCESS;
}
API int cuMemUnmap(unsigned long long address, size_t bytes)
{
    int result = begin_never("cuMemUnmap", "memory is taken away");
    pthread_mutex_lock(&stand_in_lock);
    for (const stream *one = streams; one; one = one->next)
        /* Of a shared driver it may be another rank's. */
        if (one->first && !driver.stopped && !driver.is_shared)
            order_fault("memory is taken away while work is under way");
    order_unmap((void *)(uintptr_t)address, bytes);
    pthread_mutex_unlock(&stand_in_lock);
    (void)madvise((void *)(uintptr_t)address, bytes, MADV_DONTNEED);
    return mprotect((void *)(uintptr_t)address, bytes, PROT_NONE) ? INVALID_VALUE : result;
}
static struct pinned {
    const char *begin, *end;
} * pinned;
static size_t pinned_count;
static void pin(const void *memory, size_t bytes)
{
    pthread_mutex_lock(&stand_in_lock);
    pinned = realloc(pinned, (pinned_count + 1) * sizeof *pinned);
    if (!pinned) abort();
    pinned[pinned_count++] = (struct pinned){ memory, (const char *)memory + bytes };
    pthread_mutex_unlock(&stand_in_lock);
}
static void unpin(const void *memory)
{
    for (size_t i = 0; i < pinned_count; i++)
        if (pinned[i].begin == memory) {
            pinned[i] = pinned[--pinned_count];
            return;
        }
}
static bool is_pinned(const void *memory)
{
    for (size_t i = 0; i < pinned_count; i++)
        if ((const char *)memory >= pinned[i].begin && (const char *)memory < pinned[i].end)
            return true;
    return false;
}
/* What a capture copies from or to the host is pinned: what became of other memory is not known. */
static int check_pinned(const stream *on, const void *memory)
{
    if (!on->capture || is_pinned(memory)) return SUCCESS;
    return capture_broken(on->capture, "memory of the host that is not pinned is copied");
}
API int cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    (void)flags;
    int result = begin_relaxed("cuMemHostAlloc", "memory of the host is allocated");
    *out = result ? NULL : aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!result && !*out) result = OUT_OF_MEMORY;
    if (!result) driver.left++;
    if (!result) pin(*out, bytes);
    return result;
}
API int cuMemFreeHost(void *memory)
{
    int result = begin_never("cuMemFreeHost", "memory of the host is freed");
    const char *under_way = NULL;
    if (result && !driver.stopped) return result;
    driver.left--;
    pthread_mutex_lock(&stand_in_lock);
    for (const stream *one = streams; one; one = one->next)
        for (const work *now = one->first; now; now = now->next)
            if (now->kind == COPY && (now->to == memory || (!now->memory && now->from == memory)))
                under_way = now->name;
    unpin(memory);
    if (!under_way && program_uses(memory)) under_way = "a graph";
    pthread_mutex_unlock(&stand_in_lock);
    /* It stays, since the work will run: as memory of no one. */
    static void *kept[64];
    static size_t count;
    if (!under_way) free(memory);
    else if (!driver.stopped) {
        kept[count++ % (sizeof kept / sizeof *kept)] = memory;
        order_fault("memory of the host is freed while %s is under way", under_way);
    }
    return result;
}

/* ------------------------------------------------------------------ commands */

/* As the driver does, it has read host memory of 64 KiB and less when the call returns, unless it
 * is pinned. */
API int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *on)
{
    int result = begin_in_context("cuMemcpyHtoDAsync_v2");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    result = check_pinned(on, from);
    if (result) {
        pthread_mutex_unlock(&stand_in_lock);
        return result;
    }
    work *made = add(on, COPY);
    made->name = "a copy from the host";
    made->to = (void *)(uintptr_t)to;
    made->from = from;
    made->bytes = bytes;
    if (bytes <= 65536 && !((stream *)on)->capture && !is_pinned(from)) {
        made->memory = malloc(bytes + 1);
        if (!made->memory) abort();
        memcpy(made->memory, from, bytes);
    }
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
/* Whether earlier work of the stream may use this memory of the host, before a copy there. */
static bool is_in_use(const stream *on, const void *memory, size_t bytes)
{
    for (const work *now = on->first; now; now = now->next) {
        const char *at = now->kind == COPY ? now->to : NULL, *from = now->from;
        if (now->kind == OTHER) return true;
        if (now->kind != COPY || now->memory) continue;
        if (at < (const char *)memory + bytes && at + now->bytes > (const char *)memory)
            return true;
        if (from < (const char *)memory + bytes && from + now->bytes > (const char *)memory)
            return true;
    }
    return false;
}
/* Until the copy has run the host reads nonsense. */
API int cuMemcpyDtoHAsync_v2(void *to, unsigned long long from, size_t bytes, void *on)
{
    int result = begin_in_context("cuMemcpyDtoHAsync_v2");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    result = check_pinned(on, to);
    if (result) {
        pthread_mutex_unlock(&stand_in_lock);
        return result;
    }
    bool is_used = is_in_use(on, to, bytes);
    work *made = add(on, COPY);
    made->name = "a copy to the host";
    if (!is_used) memset(to, 0xa5, bytes);
    made->to = to;
    made->from = (const void *)(uintptr_t)from;
    made->bytes = bytes;
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}

typedef struct function {
    const char *name;
    stand_in_kernel *kernel;
    unsigned bytes;
} function;
enum { FUNCTIONS = 1024 };
static function functions[FUNCTIONS];

API void stand_in_has(const char *name, stand_in_kernel *kernel, unsigned bytes)
{
    function *at = functions;
    while (at->name && strcmp(at->name, name) != 0) at++;
    if (at == functions + FUNCTIONS - 1) abort();
    *at = (function){ name, kernel, bytes };
}

API int cuModuleLoadData(void **out, const void *image)
{
    int result = begin_relaxed("cuModuleLoadData", "a module is loaded");
    *out = (void *)(uintptr_t)image;
    if (!result) driver.left++;
    return result;
}
API int cuModuleUnload(void *module)
{
    (void)module;
    int result = begin_in_context("cuModuleUnload");
    driver.left--;
    return result;
}
/* A function of the library of kernels for the host, which stands beside this one. */
static function *look_up(const char *name)
{
    static void *library;
    char bytes_name[256];
    if (!library) {
        const char *path = getenv("MOONSHARD_STAND_IN_KERNELS");
        library = dlopen(path ? path : "libmoonshard_kernels_host.so", RTLD_NOW | RTLD_LOCAL);
        if (!library) fprintf(stderr, "stand-in: %s\n", dlerror());
    }
    if (!library) return NULL;
    void (**watcher)(const void *, size_t, bool) = dlsym(library, "ms_host_watcher");
    if (watcher && order_is_on()) *watcher = order_touch;
    snprintf(bytes_name, sizeof bytes_name, "%s_bytes", name);
    void *kernel = dlsym(library, name);
    const unsigned *bytes = dlsym(library, bytes_name);
    if (!kernel || !bytes) return NULL;
    function *at = functions;
    while (at->name) at++;
    if (at == functions + FUNCTIONS - 1) abort();
    *at = (function){ strdup(name), (stand_in_kernel *)kernel, *bytes };
    return at;
}

API int cuModuleGetFunction(void **out, void *module, const char *name)
{
    (void)module;
    int result = begin_in_context("cuModuleGetFunction");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    function *at = functions;
    while (at->name && strcmp(at->name, name) != 0) at++;
    if (!at->name) at = look_up(name);
    pthread_mutex_unlock(&stand_in_lock);
    *out = at;
    return at ? SUCCESS : NOT_FOUND;
}
API int cuFuncSetAttribute(void *which, int attribute, int value)
{
    (void)which;
    int result = begin_in_context("cuFuncSetAttribute");
    if (!result && (attribute != 8 || value < 0 || value > 227 << 10)) result = INVALID_VALUE;
    return result;
}
API int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void *on)
{
    int result = begin_in_context("cuMemsetD8Async");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    work *made = add(on, COPY);
    made->name = "a fill";
    made->to = (void *)(uintptr_t)to;
    made->bytes = bytes;
    made->memory = malloc(bytes + 1);
    if (!made->memory) abort();
    memset(made->memory, value, bytes);
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
void set_kernel(work *made, const void *which, const unsigned blocks[3], const unsigned threads[3],
                unsigned shared_bytes, const void *arguments)
{
    const function *found = which;
    made->kernel = found->kernel;
    made->name = found->name;
    memcpy(made->blocks, blocks, sizeof made->blocks);
    memcpy(made->threads, threads, sizeof made->threads);
    made->shared_bytes = shared_bytes;
    made->memory = malloc(found->bytes + 1);
    if (!made->memory) abort();
    memcpy(made->memory, arguments, found->bytes);
}
API int cuLaunchKernel(void *which, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty,
                       unsigned tz, unsigned shared_bytes, void *on, void **arguments, void **extra)
{
    (void)extra;
    int result = begin_in_context("cuLaunchKernel");
    if (!result && (!x || !y || !z || !tx || !ty || !tz || tx * ty * tz > 1024))
        result = INVALID_VALUE;
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    set_kernel(add(on, KERNEL), which, (unsigned[]){ x, y, z }, (unsigned[]){ tx, ty, tz },
               shared_bytes, arguments[0]);
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
API int cuLaunchHostFunc(void *on, void (*call)(void *), void *argument)
{
    int result = begin_in_context("cuLaunchHostFunc");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    work *made = add(on, CALL);
    made->name = "a function of the host";
    made->call = call;
    made->argument = argument;
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
