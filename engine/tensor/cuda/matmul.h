/* matmul.h: products on a GPU, for this folder. */
#ifndef MOONSHARD_TENSOR_CUDA_MATMUL_H
#define MOONSHARD_TENSOR_CUDA_MATMUL_H

#include "tensor/matmul.h"

/* See ms_backend. */
ms_status ms_cuda_plan_matmul(ms_engine *engine, ms_matmul_args *args);

#endif
