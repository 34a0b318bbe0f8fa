/* kernel.c: what the function of a task may call (task.h): kernels, found at their first launch,
 * and memory for the task. */
#include "exec/cuda/kernel.h"

#include <stdarg.h>
#include <stdio.h>

#include "exec/cuda/capture.h"
#include "exec/cuda/completion.h"
#include "exec/cuda/errors.h"
#include "exec/cuda/fatal.h"
#include "exec/cuda/host_task.h"
#include "exec/cuda/offload.h"
#include "exec/cuda/replay.h"

/* ------------------------------------------------------------ finding kernels */

static ms_cuda_result load_image(ms_cuda_device *self, ms_context *context, const void *image,
                                 ms_cuda_module *out)
{
    for (size_t i = 0; i < self->image_count; i++)
        if (self->images[i].image == image) {
            *out = self->images[i].module;
            return MS_CUDA_SUCCESS;
        }
    if (ms_grow(context, (void **)&self->images, &self->image_capacity, self->image_count + 1,
                sizeof *self->images))
        return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_result result = self->cuda.module_load(out, image);
    if (!result)
        self->images[self->image_count++] = (ms_cuda_image){ .image = image, .module = *out };
    return result;
}

static size_t place_of(const ms_cuda_device *self, const ms_cuda_kernel *kernel)
{
    size_t mask = self->known_capacity - 1;
    size_t at = (uintptr_t)kernel / 8 * 31 & mask;
    while (self->known[at].kernel && self->known[at].kernel != kernel) at = (at + 1) & mask;
    return at;
}

/* Twice the room, when it is half full. */
static ms_status make_room(ms_cuda_device *self, ms_context *context)
{
    if (self->known_capacity && self->known_count * 2 < self->known_capacity) return MS_OK;
    ms_cuda_known *before = self->known;
    size_t count = self->known_capacity, capacity = count ? 2 * count : 256;
    void *memory = NULL;
    ms_status status =
        ms_allocate(context, capacity * sizeof *self->known, "table of kernels", &memory);
    if (status) return status;
    self->known = memory;
    self->known_capacity = capacity;
    for (size_t i = 0; i < count; i++)
        if (before[i].kernel) self->known[place_of(self, before[i].kernel)] = before[i];
    ms_release(context, before);
    return MS_OK;
}

static ms_cuda_result find(ms_cuda_device *self, ms_context *context, const ms_cuda_kernel *kernel,
                           ms_cuda_function *out)
{
    ms_cuda_module module = NULL;
    if (make_room(self, context)) return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_known *known = &self->known[place_of(self, kernel)];
    if (known->kernel) {
        *out = known->function;
        return MS_CUDA_SUCCESS;
    }
    ms_cuda_result result = load_image(self, context, kernel->image, &module);
    if (!result) result = self->cuda.module_function(out, module, kernel->name);
    if (!result && kernel->shared_bytes)
        result =
            self->cuda.set_attribute(*out, MS_CUDA_KERNEL_SHARED_BYTES, (int)kernel->shared_bytes);
    if (result) return result;
    *known = (ms_cuda_known){ .kernel = kernel, .function = *out };
    self->known_count++;
    return MS_CUDA_SUCCESS;
}

void ms_cuda_forget_kernels(ms_cuda_device *self, ms_context *context)
{
    for (size_t i = 0; i < self->image_count; i++)
        (void)self->cuda.module_unload(self->images[i].module);
    ms_release(context, self->images);
    ms_release(context, self->known);
}

/* --------------------------------------------------------- what a task calls */

static void check(ms_cuda_work *work, ms_cuda_result result)
{
    if (!work->replay) ms_cuda_check(work->stream, work->launch, result);
    work->has_failed |= result != MS_CUDA_SUCCESS;
}

static uint32_t at_least_one(uint32_t count) { return count ? count : 1; }

static ms_cuda_result put_kernel(ms_cuda_work *work, const ms_cuda_kernel_call *call,
                                 const void *arguments, size_t bytes)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(work->stream);
    if (work->replay) return ms_cuda_replay_launch(work, call);
    if (work->captured) return ms_cuda_captured_kernel(work, call);
    if (ms_cuda_host_task_is_open(queue)) {
        ms_cuda_host_task_launch(queue, call, arguments, bytes);
        return MS_CUDA_SUCCESS;
    }
    return ms_cuda_of(work->stream->engine)
        ->cuda.launch(call->function, call->grid[0], call->grid[1], call->grid[2], call->block[0],
                      call->block[1], call->block[2], call->shared_bytes, work->on,
                      call->parameters, NULL);
}

void ms_cuda_launch(ms_cuda_work *work, const ms_cuda_kernel *kernel, ms_cuda_shape s,
                    const void *arguments, size_t bytes)
{
    ms_cuda_device *self = ms_cuda_of(work->stream->engine);
    ms_cuda_function function = NULL;
    if (work->has_failed || !s.blocks[0]) return;
    MS_ASSERT(bytes <= MS_TASK_ARGS_MAX);
    ms_cuda_result result = find(self, &work->stream->engine->context, kernel, &function);
    if (result && result != MS_CUDA_OUT_OF_MEMORY && !*kernel->image) {
        ms_cuda_work_fail(work, MS_ERROR_UNSUPPORTED,
                          "%s: this build has no kernels for GPUs: install the CUDA toolkit 13, "
                          "and in a checkout call `./moonshard build --cuda`, `pip wheel .` for a "
                          "wheel, or cmake with -DMOONSHARD_WITH_CUDA=ON and cpack for a .deb",
                          work->launch->name);
        return;
    }
    /* The driver copies the arguments. */
    void *parameters[] = { (void *)(uintptr_t)arguments };
    ms_cuda_kernel_call call = { .function = function,
                                 .shared_bytes = s.shared_bytes,
                                 .parameters = parameters };
    for (int i = 0; i < 3; i++) {
        call.grid[i] = at_least_one(s.blocks[i]);
        call.block[i] = at_least_one(s.threads[i]);
    }
    check(work, result ? result : put_kernel(work, &call, arguments, bytes));
}

void ms_cuda_clear(ms_cuda_work *work, void *address, size_t bytes)
{
    ms_cuda_address at = (ms_cuda_address)(uintptr_t)address;
    if (work->has_failed || !bytes) return;
    MS_ASSERT(!work->captured && !ms_cuda_host_task_is_open(ms_cuda_queue_of(work->stream)));
    if (work->replay && ms_cuda_replay_clear(work, at, bytes)) return;
    check(work, ms_cuda_zero(ms_cuda_of(work->stream->engine), address, bytes, work->on));
}

void ms_cuda_put(ms_cuda_work *work, void *to, const void *host, size_t bytes)
{
    if (work->has_failed || !bytes) return;
    MS_ASSERT(bytes <= MS_CUDA_PUT_MOST && !work->replay);
    check(work, ms_cuda_copy_to(ms_cuda_of(work->stream->engine), to, host, bytes, work->on));
}

void ms_cuda_release_piece(ms_engine *engine, ms_cuda_piece *piece)
{
    if (!piece || --piece->users > 0) return;
    (void)ms_cuda_of(engine)->cuda.release(piece->address);
    ms_release(&engine->context, piece);
}

static ms_cuda_result new_piece(ms_cuda_device *self, ms_context *context, size_t bytes,
                                ms_cuda_piece **out)
{
    void *memory = NULL;
    if (ms_allocate(context, sizeof(ms_cuda_piece), "scratch", &memory))
        return MS_CUDA_OUT_OF_MEMORY;
    ms_cuda_piece *piece = memory;
    piece->bytes = (bytes + ((1 << 20) - 1)) >> 20 << 20;
    piece->users = 1;
    ms_cuda_result result = self->cuda.allocate(&piece->address, piece->bytes);
    if (result) ms_release(context, piece);
    else *out = piece;
    return result;
}

/* Earlier tasks of the stream use the old piece, so the host waits for them. */
static ms_cuda_result grow_scratch(ms_stream *stream, size_t bytes)
{
    ms_engine *engine = stream->engine;
    ms_cuda_device *self = ms_cuda_of(engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(stream);
    ms_cuda_result result = MS_CUDA_SUCCESS;
    if (queue->scratch) result = self->cuda.stream_synchronize(queue->stream);
    if (result) return result;
    ms_cuda_release_piece(engine, queue->scratch);
    queue->scratch = NULL;
    return new_piece(self, &engine->context, bytes, &queue->scratch);
}

void *ms_cuda_scratch(ms_cuda_work *work, size_t bytes)
{
    const ms_cuda_queue *queue = ms_cuda_queue_of(work->stream);
    ms_cuda_result result = MS_CUDA_SUCCESS;
    if (work->has_failed) return NULL;
    if (work->replay) {
        const ms_cuda_piece *piece = ms_cuda_replay_piece(work);
        work->has_failed = !piece || bytes > piece->bytes;
        return work->has_failed ? NULL : (void *)(uintptr_t)piece->address;
    }
    if (!queue->scratch || bytes > queue->scratch->bytes)
        result = grow_scratch(work->stream, bytes);
    check(work, result);
    return result ? NULL : (void *)(uintptr_t)queue->scratch->address;
}

ms_cuda_fault *ms_cuda_fault_of(ms_cuda_work *work)
{
    if (work->has_failed) return NULL;
    if (!work->note) work->note = ms_cuda_take_note(ms_cuda_of(work->stream->engine));
    if (!work->note) {
        check(work, MS_CUDA_OUT_OF_MEMORY);
        return NULL;
    }
    work->note->fault = (ms_cuda_fault){ .at = MS_CUDA_NO_FAULT };
    return &work->note->fault;
}

void ms_cuda_work_trace(ms_cuda_work *work, const char *name)
{
    if (work->launch->record) work->launch->record->name = name;
}

bool ms_cuda_after(ms_cuda_work *work, ms_cuda_after_function function, void *user)
{
    work->is_alone = true;
    work->has_failed |= work->replay != NULL;
    ms_cuda_completion *completion =
        work->has_failed
            ? NULL
            : ms_cuda_add_completion(work->stream, work->launch->seq, work->launch->script);
    work->has_failed = completion == NULL;
    if (!completion) return false;
    completion->after = function;
    completion->user = user;
    return true;
}

/* The host's part is in no graph. */
static bool may_use_host(ms_cuda_work *work)
{
    work->is_alone = true;
    work->has_failed |= work->replay != NULL;
    return !work->has_failed;
}

void ms_cuda_to_host(ms_cuda_work *work, void *host, const void *from, size_t bytes)
{
    const ms_cuda_device *self = ms_cuda_of(work->stream->engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(work->stream);
    if (!bytes || !may_use_host(work)) return;
    if (!ms_cuda_host_task_is_open(queue)) {
        check(work, ms_cuda_copy_from(self, host, from, bytes, work->on));
        return;
    }
    for (size_t done = 0, some; done < bytes; done += some) {
        const char *at = (const char *)from + done;
        some = ms_cuda_span(self, at, bytes - done);
        ms_cuda_host_task_copy(queue, (char *)host + done, at, some, false);
    }
}

void ms_cuda_from_host(ms_cuda_work *work, void *to, const void *host, size_t bytes)
{
    const ms_cuda_device *self = ms_cuda_of(work->stream->engine);
    ms_cuda_queue *queue = ms_cuda_queue_of(work->stream);
    if (!bytes || !may_use_host(work)) return;
    if (!ms_cuda_host_task_is_open(queue)) {
        check(work, ms_cuda_copy_to(self, to, host, bytes, work->on));
        return;
    }
    for (size_t done = 0, some; done < bytes; done += some) {
        char *at = (char *)to + done;
        some = ms_cuda_span(self, at, bytes - done);
        ms_cuda_host_task_copy(queue, at, (const char *)host + done, some, true);
    }
}

void ms_cuda_on_host(ms_cuda_work *work, ms_host_function function, void *user)
{
    if (may_use_host(work))
        check(work, ms_cuda_host_task_call(work->stream, work->launch, function, user));
}

void ms_cuda_finally(ms_cuda_work *work, void (*function)(void *user), void *user)
{
    ms_cuda_queue *queue = ms_cuda_queue_of(work->stream);
    if (ms_cuda_host_task_is_open(queue)) ms_cuda_host_task_finally(queue, function, user);
    else function(user);
}

ms_stream *ms_cuda_work_place(const ms_cuda_work *work, uint64_t *seq, uint32_t *script)
{
    *seq = work->launch->seq;
    *script = work->launch->script;
    return work->stream;
}

ms_engine *ms_cuda_work_engine(const ms_cuda_work *work) { return work->stream->engine; }
struct CUstream_st *ms_cuda_work_stream(ms_cuda_work *work)
{
    MS_ASSERT(!work->replay
              || ((const ms_cuda_task *)(const void *)work->launch->task)->uses_library);
    return work->on;
}

void ms_cuda_work_fail(ms_cuda_work *work, ms_status status, const char *format, ...)
{
    char text[sizeof((ms_error *)0)->message];
    va_list arguments;
    work->has_failed = true;
    if (work->replay) return;
    /* A library that finds a GPU which has stopped is not the cause. */
    ms_cuda_result stopped = ms_cuda_has_stopped(ms_cuda_of(work->stream->engine));
    if (stopped) {
        ms_cuda_stop(work->stream, work->launch, stopped);
        return;
    }
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    ms_cuda_fail_stream(work->stream, work->launch->seq, work->launch->script, status, "%s", text);
}

void ms_cuda_work_fail_with(ms_cuda_work *work, const ms_error *error)
{
    work->has_failed = true;
    if (work->replay) return;
    ms_cuda_fail_with(work->stream, work->launch->seq, work->launch->script, error);
}
