/* convolution.h: the plans of convolutions on the CPU. */
#ifndef MOONSHARD_OPS_CPU_CONVOLUTION_H
#define MOONSHARD_OPS_CPU_CONVOLUTION_H

#include "ops/convolution.h"
#include "ops/cpu/gemm.h"

/* ms_backend.plan_convolution of the CPU. */
ms_status ms_cpu_plan_convolution(ms_engine *engine, ms_convolution_args *args);

#endif
