/* isa.h: how one source of inner kernels serves several instruction sets.
 *
 * Each file in isa/ is compiled once for each of MS_ISA = portable, avx2, avx512, avx512bf16. It defines one const table of function
 * pointers named MS_ISA_NAME(table), for example ms_elementwise_kernels_avx2; callers choose with ms_elementwise_kernels_for(ms_run_isa(run)).
 * Use the vector types below (GCC vector extensions): 16 lanes everywhere, so sums add in the same order on every instruction set.
 * Nothing static or inline in a header that isa/ files include may be shared by the linker between variants: mark such functions `static`.
 */
#ifndef MOONSHARD_TENSOR_CPU_ISA_H
#define MOONSHARD_TENSOR_CPU_ISA_H

#include "moonshard/exec.h"

#define MS_ISA_JOIN2(a, b) a##_##b
#define MS_ISA_JOIN(a, b) MS_ISA_JOIN2(a, b)
#define MS_ISA_NAME(name) MS_ISA_JOIN(name, MS_ISA)

#if defined(__x86_64__)
#define MS_ISA_TABLE(type, name) \
    extern const type name##_portable, name##_avx2, name##_avx512, name##_avx512bf16; \
    static inline const type *name##_for(ms_isa isa) \
    { \
        return isa == MS_ISA_AVX512BF16 ? &name##_avx512bf16 : isa == MS_ISA_AVX512 ? &name##_avx512 : isa == MS_ISA_AVX2 ? &name##_avx2 : &name##_portable; \
    }
#else
#define MS_ISA_TABLE(type, name) \
    extern const type name##_portable; \
    static inline const type *name##_for(ms_isa isa) { (void)isa; return &name##_portable; }
#endif

typedef float ms_v16f __attribute__((vector_size(64)));
typedef int32_t ms_v16i __attribute__((vector_size(64)));
typedef uint32_t ms_v16u __attribute__((vector_size(64)));
typedef float ms_v16f_any __attribute__((vector_size(64), aligned(4), may_alias));   /* for unaligned loads and stores */

#endif
