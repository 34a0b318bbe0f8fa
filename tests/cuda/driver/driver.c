/* driver.c: how each call of the stand-in begins, what tests tell it, and its GPUs. One lock guards
 * everything. */
#include "driver.h"
#include "order.h"
#include "work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---------------------------------------------------------------- what goes wrong */

pthread_mutex_t stand_in_lock = PTHREAD_MUTEX_INITIALIZER;
struct stand_in driver = { .version = 13000, .gpus = 1 };

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

static struct count {
    const char *call;
    unsigned calls;
} counts[80];
static struct count *count_of(const char *call)
{
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        struct count *count = &counts[i];
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

__thread void *current;

/* The end of a process whose tests are in another one. */
__attribute__((destructor)) static void write_counts(void)
{
    const char *path = getenv("MOONSHARD_STAND_IN_CALLS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    for (size_t i = 0; i < sizeof counts / sizeof *counts && counts[i].call; i++)
        fprintf(file, "%s: %u\n", counts[i].call, counts[i].calls);
    (void)fclose(file);
}

void count_call(const char *call)
{
    pthread_mutex_lock(&counting);
    count_of(call)->calls++;
    pthread_mutex_unlock(&counting);
}
/* Whether this call is the one of MOONSHARD_STAND_IN_FAIL=CALL:N, the Nth of that name, or, with
 * N+, a later one. It has been counted. */
static bool is_told_to_fail(const char *call)
{
    const char *told = getenv("MOONSHARD_STAND_IN_FAIL");
    char name[64], more = 0;
    unsigned at;
    if (!told || sscanf(told, "%63[^:]:%u%c", name, &at, &more) < 2 || strcmp(name, call) != 0)
        return false;
    unsigned calls = stand_in_calls(call);
    return more == '+' ? calls >= at : calls == at;
}

/* Every call begins so. 0: it goes on. */
int begin(const char *call)
{
    count_call(call);
    if (is_told_to_fail(call)) return LAUNCH_FAILED;
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
    if (!result) await_all();
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
int begin_relaxed(const char *call, const char *words) { return begin_unseen(call, words, false); }
int begin_never(const char *call, const char *words) { return begin_unseen(call, words, true); }

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
    order_look();
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
    *value = attribute == 75 ? 9 : attribute == 16 ? 2 : attribute == 102 || attribute == 91;
    if (attribute == 102 && without && strcmp(without, "virtual") == 0) *value = 0;
    if (attribute == 91 && without && strcmp(without, "host addresses") == 0) *value = 0;
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
