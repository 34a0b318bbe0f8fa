/* matmul.cu: what surrounds products of cuBLASLt. */
#include "ops/cuda/matmul.h"

#include "ops/cuda/device.h"

/* A product of no terms, and what the library adds a product to that has a bias which it does not
 * add itself. */
MS_KERNEL_FREE(matmul_empty, ms_cuda_bias_call, 256)
{
    int64_t count = args.batches * args.rows * args.width;
    for (int64_t i = GRID_FIRST; i < count; i += GRID_STEP) {
        int64_t column = i % args.width, row = i / args.width % args.rows,
                batch = i / args.width / args.rows;
        ms_write_float(args.c, batch * args.batch + row * args.row + column, args.dtype,
                       args.bias != NULL ? ms_read_float(args.bias, column, args.dtype) : 0.0f);
    }
}

/* For a bias that is not aligned. */
MS_KERNEL_FREE(matmul_bias, ms_cuda_copy_bias_call, 256)
{
    for (int64_t i = GRID_FIRST; i < args.count; i += GRID_STEP)
        ms_write_float(args.to, i, args.dtype, ms_read_float(args.from, i, args.dtype));
}
