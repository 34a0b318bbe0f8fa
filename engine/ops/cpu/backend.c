/* backend.c: the table of the CPU's kernels. */
#include "ops/backend.h"

#include "ops/cpu/convolution.h"

#define MS_KERNEL_DECLARE(name) extern const ms_task ms_cpu_##name;
MS_KERNELS(MS_KERNEL_DECLARE)

#define MS_KERNEL_ENTRY(name) [MS_KERNEL_##name] = &ms_cpu_##name,
/* Indexed by ms_kernel. The list of kernels generates both the declarations and the entries, so a
 * kernel without a CPU task does not link. */
static const ms_task *const tasks[MS_KERNEL_COUNT] = { MS_KERNELS(MS_KERNEL_ENTRY) };

const ms_backend ms_cpu_backend = { .kernels = { .family = "cpu", .tasks = tasks },
                                    .plan_matmul = ms_cpu_plan_matmul,
                                    .plan_convolution = ms_cpu_plan_convolution };
