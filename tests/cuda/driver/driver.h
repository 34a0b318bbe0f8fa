/* driver.h: what tests tell the stand-in for NVIDIA's driver (libcuda.so.1), which has no GPU: its
 * memory is the host's, and its streams are queues.
 *
 * Work runs as late as it may, in an order that the seed chooses among those that streams and
 * events allow. Kernels are functions of the process, found by their names: NAME gets the
 * arguments, the numbers of blocks and threads, and the bytes of shared memory; NAME_bytes says how
 * many bytes of arguments there are. */
#ifndef MOONSHARD_TEST_CUDA_DRIVER_H
#define MOONSHARD_TEST_CUDA_DRIVER_H

#define STAND_IN_GPUS 2

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
/* How often a call of this name was made; how many things it has made are still there. */
typedef unsigned stand_in_calls_function(const char *call);
typedef unsigned stand_in_left_function(void);

#endif
