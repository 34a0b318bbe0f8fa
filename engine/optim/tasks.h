/* tasks.h: the tasks of optim/. */
#ifndef MOONSHARD_OPTIM_TASKS_H
#define MOONSHARD_OPTIM_TASKS_H

#include "optim/kernels.h"

#define MS_CLIP_TENSORS 12 /* gradients of one task */

/* The sum of |g|^p of each gradient (p infinite: the maximum) into partial; then what clipping
 * needs of all; then all times a factor. */
typedef struct ms_measure_args {
    double p;
    uint32_t count;
    double *partial;
    struct {
        const void *data;
        int32_t dtype;
        int64_t elements;
    } tensors[MS_CLIP_TENSORS];
} ms_measure_args;

typedef struct ms_combine_args {
    double p, max;
    uint32_t count;
    const double *partial;
    float *norm, *factor;
    int64_t *bad;
} ms_combine_args;

typedef struct ms_scale_args {
    const float *factor;
    uint32_t count;
    uint8_t *finite;
    struct {
        void *data;
        int32_t dtype;
        int64_t elements;
    } tensors[MS_CLIP_TENSORS];
} ms_scale_args;

extern const ms_task ms_cpu_optimizer, ms_cpu_measure, ms_cpu_combine, ms_cpu_scale;

#endif
