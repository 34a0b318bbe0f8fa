/* driver.h: what tests tell the stand-in for NVIDIA's driver (libcuda.so.1), which has no GPU: its
 * memory is the host's, and its streams are queues.
 *
 * Work runs as late as it may, in an order that the seed (MOONSHARD_STAND_IN_SEED) chooses among
 * those that streams and events allow. There is one GPU, or MOONSHARD_STAND_IN_GPUS; their names
 * are "stand-in 0" and so on, or all MOONSHARD_STAND_IN_GPU_NAME. With MOONSHARD_STAND_IN_MIG=N
 * there are N slices (MIG-0, MIG-1 ... in CUDA_VISIBLE_DEVICES), of which a process sees one.
 * MOONSHARD_STAND_IN_FAULT=NAME:N:
 * the Nth kernel whose name contains NAME stops the GPU. With MOONSHARD_STAND_IN_WATCH it
 * also finds work that touches the same memory in no certain order (order.h). With
 * MOONSHARD_STAND_IN_WAITS=1, calls that take or give memory or load kernels wait for all work, of
 * all threads, as those of a driver may. MOONSHARD_STAND_IN_CALLS=FILE: at its end the process
 * writes there how often each call was made (stand_in_calls). Kernels are functions of the process,
 * found by their names: NAME gets the arguments, the numbers of blocks and threads, and the bytes
 * of shared memory; NAME_bytes says how many bytes of arguments there are. */
#ifndef MOONSHARD_TEST_CUDA_DRIVER_H
#define MOONSHARD_TEST_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define STAND_IN_GPUS 8 /* at most */

typedef void stand_in_kernel(const void *arguments, const unsigned blocks[3],
                             const unsigned threads[3], unsigned shared_bytes);

/* There is a kernel of this name, which takes so many bytes of arguments. */
typedef void stand_in_has_function(const char *name, stand_in_kernel *kernel, unsigned bytes);
/* The call of this name ("cuLaunchKernel") fails with this result the next time; NULL: none does.
 */
typedef void stand_in_fails_function(const char *call, int result);
/* From now on every call fails with this result, as after an error of a kernel; 0: none does. */
typedef void stand_in_stops_function(int result);
/* The driver's version from now on, and how many GPUs it has. */
typedef void stand_in_is_function(int version, int gpus);
/* How often a call of this name was made ("a copy to pageable memory": of cuMemcpyDtoHAsync, to
 * memory of the host that is not pinned; "a stream of high priority", "... of normal priority": of
 * cuStreamCreateWithPriority); how many things it has made are still there. */
typedef unsigned stand_in_calls_function(const char *call);
typedef unsigned stand_in_left_function(void);
/* The priority of a stream, 0 to -5, the greatest. */
typedef int stand_in_priority_function(void *stream);
/* How many faults were found since the last call, with MOONSHARD_STAND_IN_WATCH=count (order.h),
 * and the last one's message. */
typedef unsigned stand_in_faults_function(const char **text);
unsigned stand_in_faults(const char **text);
/* Work for a library of the tests: it is over when `ready`, which is asked again and again, says so
 * and `run` has run then. Both may call nothing of the driver, and must not wait. */
typedef void stand_in_work_function(void *stream, bool (*ready)(void *), void (*run)(void *),
                                    void *argument);
/* The same where the stream is captured, for each launch of the graph; false: it is not. `launched`
 * gives the argument of a launch; `gone`: the graph and its programs are gone. */
typedef struct stand_in_library_work {
    bool (*ready)(void *);
    void (*run)(void *);
    void *(*launched)(void *);
    void (*gone)(void *);
} stand_in_library_work;
typedef bool stand_in_captured_work_function(void *stream, const stand_in_library_work *what,
                                             void *argument);
/* From now on work goes on while no thread waits for it, since other threads or processes may wait
 * for what it does. */
typedef void stand_in_share_function(void);
void stand_in_share(void);
/* The work of a library that runs on a stream touches memory. */
void stand_in_touch(const void *address, size_t bytes, bool writes);
/* Moves the clock of the stand-in's GPU forward by `ns`: the times of events that are passed later
 * include it. A function of the host calls this to seem slow; nothing really waits. */
void stand_in_pass(uint64_t ns);

#endif
