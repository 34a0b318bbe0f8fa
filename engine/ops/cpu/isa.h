/* isa.h: how one source of inner kernels serves several instruction sets.
 *
 * Each file in isa/ is compiled once for each of MS_ISA = portable, avx2, avx512, and for
 * avx512bf16 if it uses what that adds (MS_ISA_TABLE_BF16; see engine/cmake/layers.cmake). It
 * defines one const table of function pointers named MS_ISA_NAME(table), for example
 * ms_elementwise_kernels_avx2; callers choose with ms_elementwise_kernels_for(ms_run_isa(run)). Use
 * the vector types below (GCC vector extensions). They have as many lanes as a register: gcc keeps
 * wider ones in memory as soon as a loop carries them, which takes 2 to 10 times as long. So a file
 * whose sums must have the same bits on every instruction set adds in an order that does not depend
 * on MS_LANES (ms_v_sum64), or asks for 16 lanes by defining MS_LANES before its first #include. If
 * its terms are products, it is also compiled without contraction (see ops/CMakeLists.txt).
 * Nothing static or inline in a header that isa/ files include may be shared by the linker between
 * variants: mark such functions `static`. */
#ifndef MOONSHARD_OPS_CPU_ISA_H
#define MOONSHARD_OPS_CPU_ISA_H

#include "moonshard/cpu_task.h"

#define MS_ISA_JOIN2(a, b) a##_##b
#define MS_ISA_JOIN(a, b) MS_ISA_JOIN2(a, b)
#define MS_ISA_NAME(name) MS_ISA_JOIN(name, MS_ISA)

#if defined(MS_WITH_AVX512)
#define MS_ISA_TABLE(type, name)                                     \
    extern const type name##_portable, name##_avx2, name##_avx512;   \
    static inline const type *name##_for(ms_isa isa)                 \
    {                                                                \
        if (isa >= MS_ISA_AVX512) return &name##_avx512;             \
        return isa == MS_ISA_AVX2 ? &name##_avx2 : &name##_portable; \
    }
#define MS_ISA_TABLE_BF16(type, name)                                                 \
    extern const type name##_portable, name##_avx2, name##_avx512, name##_avx512bf16; \
    static inline const type *name##_for(ms_isa isa)                                  \
    {                                                                                 \
        if (isa == MS_ISA_AVX512BF16) return &name##_avx512bf16;                      \
        if (isa == MS_ISA_AVX512) return &name##_avx512;                              \
        return isa == MS_ISA_AVX2 ? &name##_avx2 : &name##_portable;                  \
    }
#elif defined(MS_WITH_AVX2)
#define MS_ISA_TABLE(type, name)                                     \
    extern const type name##_portable, name##_avx2;                  \
    static inline const type *name##_for(ms_isa isa)                 \
    {                                                                \
        return isa >= MS_ISA_AVX2 ? &name##_avx2 : &name##_portable; \
    }
#else
#define MS_ISA_TABLE(type, name)                     \
    extern const type name##_portable;               \
    static inline const type *name##_for(ms_isa isa) \
    {                                                \
        (void)isa;                                   \
        return &name##_portable;                     \
    }
#endif
#if !defined(MS_ISA_TABLE_BF16)
#define MS_ISA_TABLE_BF16 MS_ISA_TABLE
#endif

/* Lanes of one register of the instruction set that this file is compiled for. */
#if defined(__AVX512F__)
#define MS_PART_LANES 16
#elif defined(__AVX2__)
#define MS_PART_LANES 8
#else
#define MS_PART_LANES 4
#endif
#if !defined(MS_LANES)
#define MS_LANES MS_PART_LANES
#endif

typedef float ms_vf __attribute__((vector_size(4 * MS_LANES)));
typedef int32_t ms_vi __attribute__((vector_size(4 * MS_LANES)));
typedef uint32_t ms_vu __attribute__((vector_size(4 * MS_LANES)));
/* For unaligned loads and stores. */
typedef float ms_vf_any __attribute__((vector_size(4 * MS_LANES), aligned(4), may_alias));

#endif
