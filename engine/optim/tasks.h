/* tasks.h: the tasks of optim/ and their arguments.
 *
 * The arguments are plain data: addresses and numbers, copied into the stream's ring. Whoever
 * enqueues a task has checked all of it, and declares every storage to which an address belongs
 * (ms_tensor_enqueue). */
#ifndef MOONSHARD_OPTIM_TASKS_H
#define MOONSHARD_OPTIM_TASKS_H

#include "exec/device.h"

#include "moonshard/optim.h"

/* Gradients of one task. Models have hundreds of parameters, and a task for each would cost more
 * than the work on the small ones; how many one task takes is limited by MS_TASK_ARGS_MAX. */
#define MS_CLIP_TENSORS 12

/* One step of one parameter: all arrays have `elements` elements and are contiguous. States,
 * master, cast, lr, only_if and counted are NULL where there are none. cast, of an f32 parameter,
 * gets the stepped parameter rounded to the nearest; then there is no only_if. Numbers that change
 * from step to step without the host's knowledge are addresses: count, because a step with only_if
 * false does not count, and lr, only_if and counted, because other tasks compute them. */
typedef struct ms_optimizer_args {
    ms_optimizer_kind kind;
    ms_dtype dtype, gradient_dtype, cast_dtype; /* cast_dtype: of 16 bits */
    ms_hyperparameters hyper;
    void *parameter, *cast;
    const void *gradient;
    float *states[MS_OPTIMIZER_STATES], *master;
    int64_t *count;
    const float *lr;
    const uint8_t *only_if, *counted;
    double lr_if_lost;
    int64_t elements;
    ms_random random;
} ms_optimizer_args;

/* One gradient of a task: contiguous, of a float dtype. */
typedef struct ms_clip_tensor {
    void *data;
    int32_t dtype;
    int64_t elements;
} ms_clip_tensor;

/* Clipping takes three tasks, and the host waits for none of them. The first puts the sum of |g|^p
 * of each gradient (p infinite: the maximum of |g|) into partial, in f64: a sum of millions of
 * squares in f32 would lose the small ones. */
typedef struct ms_measure_args {
    double p;
    uint32_t count;
    double *partial;
    ms_clip_tensor tensors[MS_CLIP_TENSORS];
} ms_measure_args;

/* The second makes of all parts the norm, the factor for the gradients, and the position of the
 * first part that is not finite (-1: none). One task reads all parts, so that their sum has one
 * order. */
typedef struct ms_combine_args {
    double p, max;
    uint32_t count;
    const double *partial;
    float *norm, *factor;
    int64_t *bad;
} ms_combine_args;

/* The third multiplies all gradients by the factor, in place. finite (may be NULL) turns false
 * where a result is not finite; it never turns true again, so several tasks share it. */
typedef struct ms_scale_args {
    const float *factor;
    uint32_t count;
    uint8_t *finite;
    ms_clip_tensor tensors[MS_CLIP_TENSORS];
} ms_scale_args;

/* The lists from which the tables of all devices are made: what one of them lacks does not build.
 * K(number, name): MS_OPTIM_number is the position of the tasks ms_cpu_name and ms_cuda_name in a
 * device's table (ms_kernels). K(kind, name): the kernel of an ms_optimizer_kind. */
/* clang-format off */
#define MS_OPTIM_LIST(K) \
    K(STEP, optimizer) K(MEASURE, measure) K(COMBINE, combine) K(SCALE, scale)
#define MS_OPTIMIZER_LIST(K) \
    K(MS_SGD, sgd) K(MS_ADAM, adam) K(MS_ADAMW, adamw) K(MS_ADAGRAD, adagrad) \
    K(MS_ADADELTA, adadelta) K(MS_RMSPROP, rmsprop) K(MS_RPROP, rprop) K(MS_ADAMAX, adamax)
/* clang-format on */

#define MS_OPTIM_NUMBER(number, name) MS_OPTIM_##number,
typedef enum ms_optim_task { MS_OPTIM_LIST(MS_OPTIM_NUMBER) MS_OPTIM_TASKS } ms_optim_task;

extern const ms_kernels ms_cpu_optim, ms_cuda_optim;

/* The task of the engine's device. */
const ms_task *ms_optim_task_of(ms_engine *engine, ms_optim_task task);

#endif
