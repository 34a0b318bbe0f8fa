/* call.c: the tasks of the transport nccl (comm/transport/nccl/) on a GPU. */
#include "comm/transport/nccl/call.h"

#include "comm/cuda/comm_reduce.h"
#include "comm/cuda/tasks.h"
#include "comm/transport/nccl/graphs.h"
#include "comm/transport/nccl/in_flight.h"
#include "ops/cuda/kernels.h"

MS_CUDA_IMAGE(comm_reduce)
MS_CUDA_KERNEL(comm_reduce, comm_tell)

static void tell(ms_cuda_work *work, volatile uint32_t *word)
{
    ms_cuda_word call = { .word = word };
    ms_cuda_shape one = { .blocks = { 1 }, .threads = { 1 } };
    ms_cuda_launch(work, &comm_tell, one, &call, sizeof call);
}

/* What a barrier adds is in scratch memory: a rank's peak is then what check predicts. */
static float *number_of(ms_cuda_work *work, const ms_comm_args *args)
{
    float *number = args->kind == MS_BARRIER ? ms_cuda_scratch(work, sizeof *number) : NULL;
    if (number) ms_cuda_clear(work, number, sizeof *number);
    return number;
}

/* The call is between two words that tell the watchdog where it is. */
static void put(ms_cuda_work *work, ms_nccl_in_flight *flight, float *number)
{
    ms_error error;
    tell(work, &flight->started);
    if (ms_nccl_put(&flight->args, ms_cuda_work_stream(work), number, &error))
        tell(work, &flight->ended);
    else ms_cuda_work_fail_with(work, &error);
}

static void drop(void *graph) { ms_cuda_captured_work_drop(graph); }
static void let_go(ms_engine *engine, void *graph) { ms_cuda_captured_work_free(engine, graph); }

/* The same as a graph, which is captured when it comes for the first time. */
static void put_graph(ms_cuda_work *work, ms_nccl_in_flight *flight)
{
    ms_nccl_graph *graph = ms_nccl_graph_of(&flight->args);
    if (!graph->graph) {
        if (!ms_cuda_work_capture_begin(work)) return;
        put(work, flight, NULL);
        graph->graph = ms_cuda_work_capture_end(work);
        graph->drop = drop;
        graph->free = let_go;
        if (!graph->graph) return;
    }
    ms_cuda_work_update(work, graph->graph);
    tell(work, &flight->started);
    tell(work, &flight->ended);
    ms_cuda_work_launch(work);
}

static void run(ms_cuda_work *work, const void *arguments)
{
    const ms_comm_args *args = arguments;
    ms_error error;
    float *number = number_of(work, args);
    if (!number && args->kind == MS_BARRIER) return;
    ms_nccl_in_flight *flight = ms_nccl_flight_begin(args);
    if (!flight) {
        ms_cuda_work_fail(work, MS_ERROR_MEMORY, "no memory for a call of NCCL");
        return;
    }
    if (!ms_cuda_after(work, ms_nccl_flight_land, flight)) {
        (void)ms_nccl_flight_land(flight, &error);
        return;
    }
    if (!ms_nccl_begin_call(args, &error)) {
        ms_cuda_work_fail_with(work, &error);
        return;
    }
    if (args->graph) put_graph(work, flight);
    else put(work, flight, number);
    ms_nccl_end_call(args);
}

static const ms_cuda_task tasks[MS_COLLECTIVES] = MS_CUDA_COMM_TASKS(run);
static const ms_task *const table[MS_COLLECTIVES] = MS_CUDA_COMM_TABLE(tasks);

const ms_kernels ms_cuda_nccl = { .family = "cuda", .tasks = table };
