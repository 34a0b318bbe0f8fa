/* capture.c: graphs of the driver: capturing them, and the work of one task that is captured once
 * and launched again (ms_cuda_captured_work). replay.c makes graphs of whole runs of tasks.
 *
 * Capturing carries out nothing. Captures are relaxed (MS_CUDA_CAPTURE_RELAXED): all other calls of
 * the driver are allowed meanwhile, on this thread and on others. Libraries allocate memory while
 * their calls are captured, which a thread-local capture refuses. No other thread uses the stream
 * that is captured. */
#include "exec/cuda/capture.h"

#include "exec/cuda/errors.h"
#include "exec/cuda/fatal.h"

/* A kernel of kept work gets new arguments at each launch, so each has its node. */
enum { NODES = 4 };

struct ms_cuda_captured_work {
    ms_cuda_program program;
    ms_cuda_graph graph; /* its nodes name those of the program */
    ms_cuda_node nodes[NODES];
    uint32_t count;
    /* For ms_cuda_captured_work_drop, which does not look at the engine. */
    ms_cuda cuda;
    ms_cuda_context context;
};

/* ----------------------------------------------------------------- capturing */

ms_cuda_result ms_cuda_capture_begin(ms_cuda_device *self)
{
    ms_cuda_result result = MS_CUDA_SUCCESS;
    if (!self->builder)
        result = self->cuda.stream_create(&self->builder, MS_CUDA_STREAM_NON_BLOCKING, self->least);
    return result ? result : self->cuda.capture_begin(self->builder, MS_CUDA_CAPTURE_RELAXED);
}

ms_cuda_result ms_cuda_capture_kernel(const ms_cuda_work *work, const ms_cuda_kernel_call *call,
                                      ms_cuda_node *out)
{
    const ms_cuda *cuda = &ms_cuda_of(work->stream->engine)->cuda;
    const ms_cuda_node *last = NULL;
    size_t count = 0;
    int status;
    *out = NULL;
    ms_cuda_result result = cuda->launch(
        call->function, call->grid[0], call->grid[1], call->grid[2], call->block[0], call->block[1],
        call->block[2], call->shared_bytes, work->on, call->parameters, NULL);
    /* What comes next on the stream comes after the kernel alone. */
    if (!result) result = cuda->capture_info(work->on, &status, NULL, NULL, &last, NULL, &count);
    if (!result && count == 1) *out = last[0];
    return result;
}

/* ------------------------------------------------------------------ kept work */

bool ms_cuda_work_capture_begin(ms_cuda_work *work)
{
    ms_cuda_device *self = ms_cuda_of(work->stream->engine);
    void *memory = NULL;
    MS_ASSERT(!work->replay && !work->captured);
    if (work->has_failed) return false;
    ms_cuda_result result = MS_CUDA_OUT_OF_MEMORY;
    if (!ms_allocate(&work->stream->engine->context, sizeof(ms_cuda_captured_work), "a graph",
                     &memory))
        result = ms_cuda_capture_begin(self);
    work->has_failed = result != MS_CUDA_SUCCESS;
    if (result) {
        ms_release(&work->stream->engine->context, memory);
        ms_cuda_check(work->stream, work->launch, result);
        return false;
    }
    work->captured = memory;
    work->captured->cuda = self->cuda;
    work->captured->context = self->context;
    work->captures = true;
    work->on = self->builder;
    return true;
}

ms_cuda_captured_work *ms_cuda_work_capture_end(ms_cuda_work *work)
{
    ms_engine *engine = work->stream->engine;
    ms_cuda_device *self = ms_cuda_of(engine);
    ms_cuda_captured_work *captured = work->captured;
    ms_cuda_result result = self->cuda.capture_end(self->builder, &captured->graph);
    work->captured = NULL;
    work->captures = false;
    work->on = ms_cuda_queue_of(work->stream)->stream;
    if (!result && !work->has_failed)
        result = self->cuda.program_make(&captured->program, captured->graph, 0);
    /* A failure of what was captured is the cause of one here. */
    if (!work->has_failed) ms_cuda_check(work->stream, work->launch, result);
    work->has_failed |= result != MS_CUDA_SUCCESS;
    if (work->has_failed) {
        ms_cuda_captured_work_drop(captured);
        ms_cuda_captured_work_free(engine, captured);
        return NULL;
    }
    self->repeats.graphs++;
    return captured;
}

ms_cuda_result ms_cuda_captured_kernel(ms_cuda_work *work, const ms_cuda_kernel_call *call)
{
    ms_cuda_captured_work *captured = work->captured;
    const ms_cuda *cuda = &ms_cuda_of(work->stream->engine)->cuda;
    if (!work->captures) {
        MS_ASSERT(work->node < captured->count);
        return cuda->program_change(captured->program, captured->nodes[work->node++], call);
    }
    MS_ASSERT(captured->count < NODES);
    ms_cuda_result result = ms_cuda_capture_kernel(work, call, &captured->nodes[captured->count]);
    if (!result && !captured->nodes[captured->count]) {
        ms_cuda_fail_stream(work->stream, work->launch->seq, work->launch->script,
                            MS_ERROR_UNSUPPORTED,
                            "%s cannot be captured: the driver gives a kernel no node of its own",
                            work->launch->name);
        work->has_failed = true;
    }
    captured->count++;
    return result;
}

void ms_cuda_work_update(ms_cuda_work *work, ms_cuda_captured_work *captured)
{
    MS_ASSERT(!work->replay && !work->captured && captured->program);
    work->captured = captured;
    work->node = 0;
}

void ms_cuda_work_launch(ms_cuda_work *work)
{
    ms_cuda_device *self = ms_cuda_of(work->stream->engine);
    ms_cuda_captured_work *captured = work->captured;
    work->captured = NULL;
    if (work->has_failed) return;
    MS_ASSERT(work->node == captured->count);
    ms_cuda_result result = self->cuda.program_launch(captured->program, work->on);
    ms_cuda_check(work->stream, work->launch, result);
    work->has_failed = result != MS_CUDA_SUCCESS;
    /* Counted as tasks are: not where each goes by itself. */
    if (result || !self->repeating || work->launch->record) return;
    work->is_launched = true;
    self->repeats.launches++;
    self->repeats.replayed++;
}

void ms_cuda_captured_work_drop(ms_cuda_captured_work *captured)
{
    (void)captured->cuda.context_set(captured->context);
    if (captured->program) (void)captured->cuda.program_destroy(captured->program);
    if (captured->graph) (void)captured->cuda.graph_destroy(captured->graph);
    captured->program = NULL;
    captured->graph = NULL;
}

void ms_cuda_captured_work_free(ms_engine *engine, ms_cuda_captured_work *captured)
{
    MS_ASSERT(!captured->program && !captured->graph);
    ms_release(&engine->context, captured);
}
