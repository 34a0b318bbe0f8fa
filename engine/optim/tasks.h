/* tasks.h: the tasks of optim/. */
#ifndef MOONSHARD_OPTIM_TASKS_H
#define MOONSHARD_OPTIM_TASKS_H

#include "optim/kernels.h"

#define MS_CLIP_TENSORS 24       /* gradients of one task */

/* Powers or finiteness of up to MS_CLIP_TENSORS gradients into partial[first ...], one number a tensor. */
typedef struct ms_measure_args { double p; uint32_t count; double *partial; struct { const void *data; int32_t dtype; int64_t elements; } tensors[MS_CLIP_TENSORS / 2]; } ms_measure_args;
typedef struct ms_combine_args { double p, max; uint32_t count; const double *partial; float *norm, *factor; int64_t *bad; } ms_combine_args;
typedef struct ms_scale_args { const float *factor; uint32_t count; uint8_t *finite; struct { void *data; int32_t dtype; int64_t elements; } tensors[MS_CLIP_TENSORS / 2]; } ms_scale_args;

extern const ms_task ms_cpu_optimizer, ms_cpu_measure, ms_cpu_combine, ms_cpu_scale;

#endif
