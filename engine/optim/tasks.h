/* tasks.h: the tasks of optim/ and their arguments. */
#ifndef MOONSHARD_OPTIM_TASKS_H
#define MOONSHARD_OPTIM_TASKS_H

#include "exec/device.h"
#include "moonshard/optim.h"

#define MS_CLIP_TENSORS 12 /* gradients of one task */

/* One step of one parameter. */
typedef struct ms_optimizer_args {
    ms_optimizer_kind kind;
    ms_dtype dtype, gradient_dtype;
    ms_hyperparameters hyper;
    void *parameter;
    const void *gradient;
    float *states[MS_OPTIMIZER_STATES], *master;
    int64_t *count;
    const float *lr;
    const uint8_t *only_if;
    int64_t elements;
    ms_random random;
} ms_optimizer_args;

/* One gradient of a task: contiguous, of a float dtype. */
typedef struct ms_clip_tensor {
    void *data;
    int32_t dtype;
    int64_t elements;
} ms_clip_tensor;

/* Clipping takes three tasks. The first puts the sum of |g|^p of each gradient (p infinite: the
 * maximum) into partial. */
typedef struct ms_measure_args {
    double p;
    uint32_t count;
    double *partial;
    ms_clip_tensor tensors[MS_CLIP_TENSORS];
} ms_measure_args;

/* The second makes of all parts the norm, the factor for the gradients, and the position of the
 * first part that is not finite (-1: none). */
typedef struct ms_combine_args {
    double p, max;
    uint32_t count;
    const double *partial;
    float *norm, *factor;
    int64_t *bad;
} ms_combine_args;

/* The third multiplies by the factor. finite (may be NULL) turns false where a result is not. */
typedef struct ms_scale_args {
    const float *factor;
    uint32_t count;
    uint8_t *finite;
    ms_clip_tensor tensors[MS_CLIP_TENSORS];
} ms_scale_args;

typedef enum ms_optim_task {
    MS_OPTIM_STEP,
    MS_OPTIM_MEASURE,
    MS_OPTIM_COMBINE,
    MS_OPTIM_SCALE,
    MS_OPTIM_TASKS
} ms_optim_task;

extern const ms_kernels ms_cpu_optim;

/* The task of the engine's device. */
const ms_task *ms_optim_task_of(ms_engine *engine, ms_optim_task task);

#endif
