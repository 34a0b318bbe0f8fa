/* backend.c: the table of the CPU's tasks. */
#include "optim/tasks.h"

#define DECLARE(number, name) extern const ms_task ms_cpu_##name;
MS_OPTIM_LIST(DECLARE)

#define ENTRY(number, name) [MS_OPTIM_##number] = &ms_cpu_##name,
/* In the order of ms_optim_task; the sim device takes names and kinds from it and runs none of
 * them. */
static const ms_task *const tasks[MS_OPTIM_TASKS] = { MS_OPTIM_LIST(ENTRY) };

const ms_kernels ms_cpu_optim = { .family = "cpu", .tasks = tasks };
