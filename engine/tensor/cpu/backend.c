/* backend.c: the table of the CPU's kernels. */
#include "tensor/backend.h"

#include "tensor/cpu/gemm.h"

#define MS_KERNEL_DECLARE(name) extern const ms_task ms_cpu_##name;
MS_KERNELS(MS_KERNEL_DECLARE)

#define MS_KERNEL_ENTRY(name) [MS_KERNEL_##name] = &ms_cpu_##name,
const ms_backend ms_cpu_backend = { .family = "cpu",
                                    .plan_matmul = ms_cpu_plan_matmul,
                                    .tasks = { MS_KERNELS(MS_KERNEL_ENTRY) } };
