/* convert.h: inner loops that turn contiguous elements of any dtype into f32 or i64 and back. */
#ifndef MOONSHARD_OPS_CPU_CONVERT_H
#define MOONSHARD_OPS_CPU_CONVERT_H

#include "moonshard/tensor.h"
#include "ops/cpu/isa.h"

/* to_f32 and from_f32 exist for every dtype, to_i64 and from_i64 for integers and bool. Rounding is
 * to nearest even. From f32, integers are truncated and kept within i64 (NaN: 0), then wrap to
 * their size; from i64 they wrap. bool is != 0 in both directions. */
typedef struct ms_convert_kernels {
    void (*to_f32[MS_DTYPES])(float *out, const void *in, size_t n);
    void (*from_f32[MS_DTYPES])(void *out, const float *in, size_t n);
    void (*to_i64[MS_DTYPES])(int64_t *out, const void *in, size_t n);
    void (*from_i64[MS_DTYPES])(void *out, const int64_t *in, size_t n);
} ms_convert_kernels;

MS_ISA_TABLE(ms_convert_kernels, ms_convert_kernels)

#endif
