/* backend.c: the table of the CPU's tasks. */
#include "optim/tasks.h"

extern const ms_task ms_cpu_optimizer, ms_cpu_measure, ms_cpu_combine, ms_cpu_scale;

/* In the order of ms_optim_task; the sim device takes names and kinds from it and runs none of
 * them. */
static const ms_task *const tasks[MS_OPTIM_TASKS] = {
    [MS_OPTIM_STEP] = &ms_cpu_optimizer,
    [MS_OPTIM_MEASURE] = &ms_cpu_measure,
    [MS_OPTIM_COMBINE] = &ms_cpu_combine,
    [MS_OPTIM_SCALE] = &ms_cpu_scale,
};

const ms_kernels ms_cpu_optim = { .family = "cpu", .tasks = tasks };
