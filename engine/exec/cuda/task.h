/* task.h: what a task is for the cuda device. For exec/cuda/ and folders of kernels named cuda.
 *
 * A task is a function of the host that puts kernels onto the stream, one after another. It looks
 * at sizes and dtypes only: values are on the GPU. Kernels are machine code that is embedded in the
 * program; a kernel takes one struct by value.
 *
 * Invariants
 * - The function runs on the host thread, once for each task, and waits for nothing. What it does
 *   after ms_cuda_on_host is written down, and done on another thread once that function has
 *   returned.
 * - What it launches depends on the arguments only, never on the GPU: so results do not. */
#ifndef MOONSHARD_EXEC_CUDA_TASK_H
#define MOONSHARD_EXEC_CUDA_TASK_H

#include "exec/cuda/fault.h"
#include "moonshard/exec.h"

struct CUstream_st;

/* One kernel: a const object, whose address represents it. */
typedef struct ms_cuda_kernel {
    const unsigned char *image; /* as cuModuleLoadData takes it; empty: see ms_cuda_no_image */
    const char *name;           /* in the image */
    uint32_t shared_bytes;      /* the most that launches ask for, where that is above 48 KiB */
} ms_cuda_kernel;

/* How a kernel is launched. A count of 0 is 1, but for blocks[0]: there 0 launches nothing. */
typedef struct ms_cuda_shape {
    uint32_t blocks[3], threads[3];
    uint32_t shared_bytes; /* of each block */
} ms_cuda_shape;

/* One execution of a task. */
typedef struct ms_cuda_work ms_cuda_work;

/* So many tasks are carried out together at most; so many bytes the host may put (ms_cuda_put). */
enum { MS_CUDA_BATCH = 128, MS_CUDA_PUT_MOST = 65536 };

typedef struct ms_cuda_task {
    ms_task task; /* first: what the tables of kernels hold; it has no function */
    void (*function)(ms_cuda_work *work, const void *arguments);
    /* The message for what a kernel has noted (ms_cuda_fault_of), with the task's name. NULL: its
     * kernels find no faults. */
    void (*explain)(const ms_cuda_fault *fault, char *message, size_t bytes);
    /* It may call a library with its stream (ms_cuda_work_stream). All others may run once more for
     * the same execution, to give kernels of a graph new arguments; so a function does nothing but
     * call what is declared here, and does the same for the same arguments. */
    bool uses_library;
    /* Clears what its arguments have between their fields, so that equal ones have equal bytes.
     * NULL: there is nothing between them, or the compiler cannot do it; tasks that repeat may then
     * seem to differ, which costs time only. */
    void (*clear_padding)(void *arguments);
    /* NULL, or the task can be carried out together with others that have the same function
     * (ms_engine_batch): at most MS_CUDA_BATCH, among whose work there is no order. `joins`:
     * whether that may be so for one more. Their kernels find no faults. */
    void (*batch)(ms_cuda_work *work, const void *const *arguments, uint32_t count);
    bool (*joins)(const void *const *arguments, uint32_t count, const void *next);
} ms_cuda_task;

/* The driver copies `bytes` bytes of arguments, at most MS_TASK_ARGS_MAX. After an error the stream
 * has failed, and the call does nothing. */
void ms_cuda_launch(ms_cuda_work *work, const ms_cuda_kernel *kernel, ms_cuda_shape shape,
                    const void *arguments, size_t bytes);
/* All bytes become 0. */
void ms_cuda_clear(ms_cuda_work *work, void *address, size_t bytes);
/* Copies at most MS_CUDA_PUT_MOST bytes of the host to the GPU. They are read before it returns.
 * For `together` only, which is in no graph. */
void ms_cuda_put(ms_cuda_work *work, void *to, const void *host, size_t bytes);
/* Memory of the GPU for this task alone, aligned to 256 bytes; one piece for each task. It holds
 * anything. It belongs to the stream and grows to the largest piece, so a task asks for as much as
 * it needs and few tasks need much. NULL: there is none, and the stream has failed. */
void *ms_cuda_scratch(ms_cuda_work *work, size_t bytes);
/* Where the kernels of this task note that they found something wrong, for a task with `explain`.
 * The stream then fails. NULL: there is no memory, and the stream has failed. */
ms_cuda_fault *ms_cuda_fault_of(ms_cuda_work *work);
/* Another name for this execution in traces, a constant. */
void ms_cuda_work_trace(ms_cuda_work *work, const char *name);
/* Once the task is reached, the host thread calls `function`, before anybody learns that it is. If
 * the answer is not MS_OK, the stream fails with *error. A task calls this once, before it puts
 * anything onto the stream, and is in no graph then. false: there is no memory, the stream has
 * failed, and the function is not called. */
typedef ms_status (*ms_cuda_after_function)(void *user, ms_error *error);
bool ms_cuda_after(ms_cuda_work *work, ms_cuda_after_function function, void *user);
/* Copies between the GPU and pinned memory of the host (ms_host_memory_new), in the order of the
 * task's work. */
void ms_cuda_to_host(ms_cuda_work *work, void *host, const void *from, size_t bytes);
void ms_cuda_from_host(ms_cuda_work *work, void *to, const void *host, size_t bytes);
/* A function of the host, in the order of the task's work, as of ms_stream_call: it may wait for
 * other ranks. Not called if the stream has failed. A task with one of these three is in no graph.
 * After it the task may call itself again, launch kernels and copy between GPU and host, in 8 steps
 * at most. */
void ms_cuda_on_host(ms_cuda_work *work, ms_host_function function, void *user);
/* Called when all functions of the host of this task have returned, or will not be called, on any
 * thread. After ms_cuda_on_host, once for each task. */
void ms_cuda_finally(ms_cuda_work *work, void (*function)(void *user), void *user);
/* Work of a task that is captured once, and launched again as a graph of its own. Between
 * ms_cuda_work_capture_begin and _end what the task puts onto its stream is captured and not
 * carried out: 4 kernels at most, and what a library puts there. Later executions launch the same
 * kernels in the same order between ms_cuda_work_update and _launch, which gives them new
 * arguments; what is a library's stays as it was. ms_cuda_work_launch carries it out. false, NULL:
 * the stream has failed. */
typedef struct ms_cuda_captured_work ms_cuda_captured_work;
bool ms_cuda_work_capture_begin(ms_cuda_work *work);
ms_cuda_captured_work *ms_cuda_work_capture_end(ms_cuda_work *work);
void ms_cuda_work_update(ms_cuda_work *work, ms_cuda_captured_work *captured);
void ms_cuda_work_launch(ms_cuda_work *work);
/* Gives back what the driver has, on any thread, also while or after the engine is freed; launches
 * that are under way end all the same. Afterwards it cannot be launched. */
void ms_cuda_captured_work_drop(ms_cuda_captured_work *captured);
/* On the host thread, after it was dropped. */
void ms_cuda_captured_work_free(ms_engine *engine, ms_cuda_captured_work *captured);
/* The number that this execution has in its stream, and the script line that enqueued it. */
ms_stream *ms_cuda_work_place(const ms_cuda_work *work, uint64_t *seq, uint32_t *script);
/* For calls of libraries, in a task that uses_library. */
ms_engine *ms_cuda_work_engine(const ms_cuda_work *work);
struct CUstream_st *ms_cuda_work_stream(ms_cuda_work *work);
/* The task fails, at the latest when it is reached. */
void ms_cuda_work_fail(ms_cuda_work *work, ms_status status, const char *format, ...)
    MS_PRINTF(3, 4);
void ms_cuda_work_fail_with(ms_cuda_work *work, const ms_error *error);

/* Times of calls that put work onto a stream. A meter has a stream of its own and memory of the GPU
 * that no pool counts. ms_cuda_meter_open waits for all streams of the engine, and every byte of
 * the memory becomes `fill`. MS_ERROR_MEMORY: the GPU has no room. */
typedef struct ms_cuda_meter ms_cuda_meter;
ms_status ms_cuda_meter_open(ms_engine *engine, size_t bytes, unsigned char fill,
                             ms_cuda_meter **out);
void ms_cuda_meter_close(ms_cuda_meter *meter);
char *ms_cuda_meter_memory(const ms_cuda_meter *meter); /* aligned to 256 bytes */
/* Calls `call` so many times, waits, and answers in *us how many microseconds of the GPU one of
 * them took; below 0: one has answered false, and the rest was not called. */
typedef bool ms_cuda_metered(void *user, struct CUstream_st *stream);
ms_status ms_cuda_meter_time(ms_cuda_meter *meter, ms_cuda_metered *call, void *user,
                             uint32_t count, double *us);

/* 1 .. `most` blocks of `threads` threads for so many elements, each thread taking `each` or more;
 * 0 for none. For kernels that walk in strides of the whole grid. */
static inline uint32_t ms_cuda_blocks(int64_t elements, int64_t threads, int64_t each, int64_t most)
{
    int64_t blocks = (elements + threads * each - 1) / (threads * each);
    return (uint32_t)(blocks < most ? blocks : most);
}

#endif
