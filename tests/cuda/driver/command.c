/* command.c: what is put onto streams: copies, kernels and how they are found, functions of the
 * host. */
#include "work.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------ copies */

/* As the driver does, it has read host memory of 64 KiB and less when the call returns, unless it
 * is pinned. */
API int cuMemcpyHtoDAsync_v2(unsigned long long to, const void *from, size_t bytes, void *on)
{
    int result = begin_in_context("cuMemcpyHtoDAsync_v2");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    result = check_pinned(on, from);
    if (!is_in_one_piece((void *)(uintptr_t)to, bytes)) result = INVALID_VALUE;
    if (result) {
        pthread_mutex_unlock(&stand_in_lock);
        return result;
    }
    work *made = add_work(on, COPY);
    made->name = "a copy from the host";
    made->to = (void *)(uintptr_t)to;
    made->from = from;
    made->bytes = bytes;
    if (bytes <= 65536 && !((stream *)on)->capture && !is_pinned(from, 1)) {
        made->memory = malloc(bytes + 1);
        if (!made->memory) abort();
        memcpy(made->memory, from, bytes);
    }
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
API int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void *on)
{
    int result = begin_in_context("cuMemcpyDtoDAsync_v2");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    work *made = add_work(on, COPY);
    made->name = "a copy inside the GPU";
    made->to = (void *)(uintptr_t)to;
    made->from = (const void *)(uintptr_t)from;
    made->bytes = bytes;
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
    if (!is_in_one_piece((void *)(uintptr_t)from, bytes)) result = INVALID_VALUE;
    if (result) {
        pthread_mutex_unlock(&stand_in_lock);
        return result;
    }
    if (!is_pinned(to, bytes)) count_call("a copy to pageable memory");
    bool is_used = is_in_use(on, to, bytes);
    work *made = add_work(on, COPY);
    made->name = "a copy to the host";
    if (!is_used) memset(to, 0xa5, bytes);
    made->to = to;
    made->from = (const void *)(uintptr_t)from;
    made->bytes = bytes;
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}

/* ------------------------------------------------------------------ kernels */

typedef struct function {
    const char *name;
    stand_in_kernel *kernel;
    unsigned bytes;
    bool loaded; /* it was launched */
} function;
enum { FUNCTIONS = 1024 };
static function functions[FUNCTIONS];

API void stand_in_has(const char *name, stand_in_kernel *kernel, unsigned bytes)
{
    function *at = functions;
    while (at->name && strcmp(at->name, name) != 0) at++;
    if (at == functions + FUNCTIONS - 1) abort();
    *at = (function){ .name = name, .kernel = kernel, .bytes = bytes };
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
/* A function of the library of kernels for the host. Where this one watches, it is the library
 * whose kernels tell of each access to memory, if the build has one. */
static function *look_up(const char *name)
{
    static void *library;
    char bytes_name[256];
    if (!library) {
        const char *path = order_is_on() ? getenv("MOONSHARD_STAND_IN_WATCHED_KERNELS") : NULL;
        if (!path) path = getenv("MOONSHARD_STAND_IN_KERNELS");
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
    *at = (function){ .name = strdup(name), .kernel = (stand_in_kernel *)kernel, .bytes = *bytes };
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
    if (!is_in_one_piece((void *)(uintptr_t)to, bytes)) {
        pthread_mutex_unlock(&stand_in_lock);
        return INVALID_VALUE;
    }
    work *made = add_work(on, COPY);
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
    if (!((function *)which)->loaded) await_all();
    ((function *)which)->loaded = true;
    set_kernel(add_work(on, KERNEL), which, (unsigned[]){ x, y, z }, (unsigned[]){ tx, ty, tz },
               shared_bytes, arguments[0]);
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
API int cuLaunchHostFunc(void *on, void (*call)(void *), void *argument)
{
    int result = begin_in_context("cuLaunchHostFunc");
    if (result) return result;
    pthread_mutex_lock(&stand_in_lock);
    work *made = add_work(on, CALL);
    made->name = "a function of the host";
    made->call = call;
    made->argument = argument;
    pthread_mutex_unlock(&stand_in_lock);
    return SUCCESS;
}
