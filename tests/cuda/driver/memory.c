/* memory.c: memory of the GPU, which is the host's, and pinned memory. */
#include "work.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void map(const void *address, size_t bytes)
{
    pthread_mutex_lock(&stand_in_lock);
    order_map(address, bytes);
    pthread_mutex_unlock(&stand_in_lock);
}
API int cuMemAlloc_v2(unsigned long long *out, size_t bytes)
{
    int result = begin_relaxed("cuMemAlloc_v2", "memory is allocated");
    /* The size is before the memory. */
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
/* A file without a name, which keeps its values while it is mapped or has its handle. */
typedef struct made_memory {
    int file;
    size_t bytes;
} made_memory;
static made_memory *made_of(unsigned long long memory) { return (made_memory *)(uintptr_t)memory; }
API int cuMemCreate(unsigned long long *out, size_t bytes, const void *properties,
                    unsigned long long flags)
{
    (void)properties, (void)flags;
    int result = begin_relaxed("cuMemCreate", "memory is made");
    if (!result && bytes % GRAIN) result = INVALID_VALUE;
    if (result) return result;
    made_memory *made = malloc(sizeof *made);
    if (!made) return OUT_OF_MEMORY;
    *made = (made_memory){ memfd_create("stand-in", MFD_CLOEXEC), bytes };
    if (made->file < 0 || ftruncate(made->file, (off_t)bytes)) {
        if (made->file >= 0) (void)close(made->file);
        free(made);
        return OUT_OF_MEMORY;
    }
    driver.left++;
    *out = (uintptr_t)made;
    return SUCCESS;
}
API int cuMemRelease(unsigned long long memory)
{
    (void)close(made_of(memory)->file);
    free(made_of(memory));
    driver.left--;
    return begin_in_context("cuMemRelease");
}

/* Which ranges are mapped: a range is unmapped as it was mapped, and addresses have memory once. */
static struct mapping {
    uintptr_t begin, end;
} * mappings;
static size_t mapping_count;
static bool is_taken(uintptr_t begin, uintptr_t end)
{
    for (size_t i = 0; i < mapping_count; i++)
        if (begin < mappings[i].end && end > mappings[i].begin) return true;
    return false;
}
/* Forgets what is mapped there; false: the range would cut a mapping. */
static bool forget_mappings(uintptr_t begin, uintptr_t end)
{
    for (size_t i = 0; i < mapping_count; i++)
        if (begin < mappings[i].end && end > mappings[i].begin
            && (mappings[i].begin < begin || mappings[i].end > end))
            return false;
    for (size_t i = mapping_count; i-- > 0;)
        if (begin < mappings[i].end && end > mappings[i].begin)
            mappings[i] = mappings[--mapping_count];
    return true;
}
API int cuMemMap(unsigned long long address, size_t bytes, size_t offset, unsigned long long memory,
                 unsigned long long flags)
{
    int result = begin_relaxed("cuMemMap", "memory is mapped");
    if (!result && (offset || flags || made_of(memory)->bytes != bytes)) result = INVALID_VALUE;
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    if (is_taken(address, address + bytes)) result = INVALID_VALUE;
    else {
        mappings = realloc(mappings, (mapping_count + 1) * sizeof *mappings);
        if (!mappings) abort();
        mappings[mapping_count++] = (struct mapping){ address, address + bytes };
    }
    pthread_mutex_unlock(&stand_in_lock);
    if (!result
        && mmap((void *)(uintptr_t)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                made_of(memory)->file, 0)
               == MAP_FAILED)
        result = OUT_OF_MEMORY;
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
        /* That of another thread may be another rank's. */
        if (one->first && !driver.stopped && pthread_equal(one->owner, pthread_self()))
            order_fault("memory is taken away while work is under way");
    if (!forget_mappings(address, address + bytes)) {
        order_fault("a part of a piece of memory is taken away");
        result = INVALID_VALUE;
    }
    order_unmap((void *)(uintptr_t)address, bytes);
    pthread_mutex_unlock(&stand_in_lock);
    if (result && !driver.stopped) return result;
    void *empty = mmap((void *)(uintptr_t)address, bytes, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return empty == MAP_FAILED ? INVALID_VALUE : result;
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
static struct pinned unpin(const void *memory)
{
    struct pinned found = { memory, memory };
    for (size_t i = 0; i < pinned_count; i++)
        if (pinned[i].begin == memory) {
            found = pinned[i];
            pinned[i] = pinned[--pinned_count];
        }
    return found;
}
static bool is_in(struct pinned range, const void *at)
{
    return (const char *)at >= range.begin && (const char *)at < range.end;
}
bool is_pinned(const void *memory, size_t bytes)
{
    for (size_t i = 0; i < pinned_count; i++)
        if (is_in(pinned[i], memory)) return (const char *)memory + bytes <= pinned[i].end;
    return false;
}
/* What a capture copies from or to the host is pinned: what became of other memory is not known. */
int check_pinned(const stream *on, const void *memory)
{
    if (!on->capture || is_pinned(memory, 1)) return SUCCESS;
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
    struct pinned range = unpin(memory);
    for (const stream *one = streams; one; one = one->next)
        for (const work *now = one->first; now; now = now->next)
            if (now->kind == COPY
                && (is_in(range, now->to) || (!now->memory && is_in(range, now->from))))
                under_way = now->name;
    if (!under_way && program_uses(memory, (size_t)(range.end - range.begin)))
        under_way = "a graph";
    pthread_mutex_unlock(&stand_in_lock);
    /* It stays, since the work will run: as memory of no one. */
    static void *volatile kept[64]; /* the leak check must find them */
    static size_t count;
    if (!under_way) free(memory);
    else if (!driver.stopped) {
        kept[count++ % (sizeof kept / sizeof *kept)] = memory;
        order_fault("memory of the host is freed while %s is under way", under_way);
    }
    return result;
}

/* ------------------------------------------------ memory that the host has made */

static struct registered {
    uintptr_t begin, end;
} * registered;
static size_t registered_count;

API int cuMemHostRegister_v2(void *memory, size_t bytes, unsigned flags)
{
    int result = begin_relaxed("cuMemHostRegister_v2", "memory of the host is registered");
    uintptr_t begin = (uintptr_t)memory, end = begin + bytes;
    if (!result && (flags != 3 || !bytes || begin % 4096 || bytes % 4096)) result = INVALID_VALUE;
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    for (size_t i = 0; i < registered_count; i++)
        if (begin < registered[i].end && end > registered[i].begin) result = ALREADY_REGISTERED;
    if (!result) {
        registered = realloc(registered, (registered_count + 1) * sizeof *registered);
        if (!registered) abort();
        registered[registered_count++] = (struct registered){ begin, end };
        order_map(memory, bytes);
        driver.left++;
    }
    pthread_mutex_unlock(&stand_in_lock);
    if (!result) pin(memory, bytes);
    return result;
}
API int cuMemHostUnregister(void *memory)
{
    int result = begin_never("cuMemHostUnregister", "memory of the host is given back");
    pthread_mutex_lock(&stand_in_lock);
    for (size_t i = 0; i < registered_count; i++)
        if (registered[i].begin == (uintptr_t)memory) {
            order_unmap(memory, registered[i].end - registered[i].begin);
            registered[i] = registered[--registered_count];
            driver.left--;
            break;
        }
    unpin(memory);
    pthread_mutex_unlock(&stand_in_lock);
    return result;
}
/* Kernels may go from one piece into the next, copies may not. */
bool is_in_one_piece(const void *memory, size_t bytes)
{
    uintptr_t begin = (uintptr_t)memory, end = begin + bytes;
    for (size_t i = 0; i < registered_count; i++)
        if (begin < registered[i].end && end > registered[i].begin)
            return begin >= registered[i].begin && end <= registered[i].end;
    return true;
}
