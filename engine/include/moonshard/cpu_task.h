/* moonshard/cpu_task.h: what the function of a CPU task (ms_task.function) may ask of the thread
 * that runs it.
 *
 * Invariants
 * - All functions are for task functions and what they call, on the thread that runs the task; a
 *   host thread has no ms_run.
 * - A task function touches only the storages that its task declares, at the addresses in its
 *   arguments, and calls nothing of the engine but this header.
 * - Devices that borrow the CPU's kernels run these functions, too. */
#ifndef MOONSHARD_CPU_TASK_H
#define MOONSHARD_CPU_TASK_H

#include "moonshard/exec.h"

#ifdef __cplusplus
extern "C" {
#endif

MS_API ms_isa ms_run_isa(const ms_run *run);
/* Runs tile(context, i, thread) for i in 0 .. tiles-1, on this thread and on idle helpers; returns
 * when all are done. The number of tiles must depend on shapes only. With fewer than two tiles, or
 * while another stream uses the helpers, all tiles run on this thread. */
typedef struct ms_thread ms_thread;
typedef void (*ms_tile_function)(void *context, uint32_t tile, ms_thread *thread);
MS_API void ms_run_tiles(ms_run *run, uint32_t tiles, ms_tile_function tile, void *context);
MS_API ms_thread *ms_run_thread(ms_run *run);
/* Scratch memory of this thread, at least `bytes` bytes, aligned to 64. Slots 0 to 3 do not
 * overlap. NULL: out of memory; the task must then fail. */
MS_API void *ms_thread_scratch(ms_thread *thread, uint32_t slot, size_t bytes);
MS_API uint32_t ms_thread_index(const ms_thread *thread); /* unique in the engine, from 0 */
/* Leaves the reason for MS_TASK_FAILED. The message becomes the stream's error, with task name and
 * script line. */
MS_API void ms_run_fail(ms_run *run, ms_status status, const char *format, ...) MS_PRINTF(3, 4);
/* The record that ms_run_fail has made, to add rank, collective and bucket. */
MS_API ms_error *ms_run_error(ms_run *run);

#ifdef __cplusplus
}
#endif
#endif
