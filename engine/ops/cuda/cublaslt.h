/* cublaslt.h: what the engine uses of cuBLASLt: its types, with the values and the layout that
 * cublasLt.h of version 13 gives them, and its functions as a table, filled at run time. A build
 * needs no cuBLASLt, and the program links none. */
#ifndef MOONSHARD_OPS_CUDA_CUBLASLT_H
#define MOONSHARD_OPS_CUDA_CUBLASLT_H

#include "moonshard/base.h"

#define MS_CUBLASLT_LIBRARY "libcublasLt.so.13"
#define MS_CUBLASLT_VARIABLE "MOONSHARD_CUBLASLT" /* see ms_cuda_library */

struct CUstream_st;
typedef struct cublasLtContext *ms_lt_handle;
typedef struct ms_lt_opaque *ms_lt_operation;
typedef struct ms_lt_opaque *ms_lt_layout;
typedef struct ms_lt_opaque *ms_lt_preference;
typedef int ms_lt_result; /* 0: it went well */

enum { MS_LT_F32 = 0, MS_LT_F16 = 2, MS_LT_BF16 = 14, MS_LT_E4M3 = 28, MS_LT_E5M2 = 29 };
/* How products are computed: of the operands as they are, or of f32 rounded to TF32. */
enum { MS_LT_COMPUTE_F32 = 68, MS_LT_COMPUTE_TF32 = 77 };
enum {
    MS_LT_TRANSPOSE_A = 3,
    MS_LT_TRANSPOSE_B = 4,
    MS_LT_EPILOGUE = 7,
    MS_LT_BIAS_POINTER = 8,
    MS_LT_BESIDE_POINTER = 11, /* of the epilogues with gelu */
    MS_LT_BESIDE_COLUMN = 12,
    MS_LT_MULTIPROCESSORS = 15,
    MS_LT_SCALE_A = 17, /* address of an f32, by which the product is multiplied */
    MS_LT_SCALE_B = 18
};
/* GELU: the result's tanh form of gelu, and what goes into it, bias included, at BESIDE_POINTER.
 * GELU_GRADIENT: the result times the slope of gelu at what BESIDE_POINTER has. SUM: the sums over
 * k of operand A or B, which go to BIAS_POINTER; A may not be transposed for it, B has to be. */
enum {
    MS_LT_EPILOGUE_NONE = 1,
    MS_LT_EPILOGUE_BIAS = 4,
    MS_LT_BESIDE = 128, /* of epilogues with a BESIDE_POINTER */
    MS_LT_EPILOGUE_GELU = 32 | MS_LT_BESIDE,
    MS_LT_EPILOGUE_GELU_GRADIENT = 64 | MS_LT_BESIDE,
    MS_LT_EPILOGUE_SUM_A = 256,
    MS_LT_EPILOGUE_SUM_B = 512
};
enum { MS_LT_NOT_TRANSPOSED = 0, MS_LT_TRANSPOSED = 1 };
enum { MS_LT_BATCHES = 5, MS_LT_BATCH_STRIDE = 6 };
enum {
    MS_LT_WORKSPACE_BYTES = 1,
    MS_LT_REDUCTIONS = 3,
    MS_LT_ALIGNMENT_A = 5,
    MS_LT_ALIGNMENT_B = 6,
    MS_LT_ALIGNMENT_C = 7,
    MS_LT_ALIGNMENT_D = 8
};
/* How sums over parts of k may be added: as f32 or as results, in workspace. The one in place is
 * left out: its order depends on timing. */
enum { MS_LT_REDUCTION_IN_PLACE = 1, MS_LT_REDUCTIONS_IN_ORDER = 2 | 4 };
enum { MS_LT_REDUCTION_OF_ALGORITHM = 3 };

typedef struct ms_lt_algorithm {
    uint64_t data[8];
} ms_lt_algorithm;
typedef struct ms_lt_candidate {
    ms_lt_algorithm algorithm;
    size_t workspace_bytes;
    ms_lt_result state;
    float waves;
    int reserved[4];
} ms_lt_candidate;

/* field, name, arguments; all return an ms_lt_result. */
#define MS_LT_FUNCTIONS(X)                                                                       \
    X(create, "cublasLtCreate", (ms_lt_handle *))                                                \
    X(destroy, "cublasLtDestroy", (ms_lt_handle))                                                \
    X(operation_create, "cublasLtMatmulDescCreate", (ms_lt_operation *, int compute, int scale)) \
    X(operation_destroy, "cublasLtMatmulDescDestroy", (ms_lt_operation))                         \
    X(operation_set, "cublasLtMatmulDescSetAttribute",                                           \
      (ms_lt_operation, int what, const void *, size_t bytes))                                   \
    X(layout_create, "cublasLtMatrixLayoutCreate",                                               \
      (ms_lt_layout *, int type, uint64_t rows, uint64_t columns, int64_t column))               \
    X(layout_destroy, "cublasLtMatrixLayoutDestroy", (ms_lt_layout))                             \
    X(layout_set, "cublasLtMatrixLayoutSetAttribute",                                            \
      (ms_lt_layout, int what, const void *, size_t bytes))                                      \
    X(preference_create, "cublasLtMatmulPreferenceCreate", (ms_lt_preference *))                 \
    X(preference_destroy, "cublasLtMatmulPreferenceDestroy", (ms_lt_preference))                 \
    X(preference_set, "cublasLtMatmulPreferenceSetAttribute",                                    \
      (ms_lt_preference, int what, const void *, size_t bytes))                                  \
    X(candidates, "cublasLtMatmulAlgoGetHeuristic",                                              \
      (ms_lt_handle, ms_lt_operation, ms_lt_layout a, ms_lt_layout b, ms_lt_layout c,            \
       ms_lt_layout d, ms_lt_preference, int wanted, ms_lt_candidate *, int *found))             \
    X(check, "cublasLtMatmulAlgoCheck",                                                          \
      (ms_lt_handle, ms_lt_operation, ms_lt_layout a, ms_lt_layout b, ms_lt_layout c,            \
       ms_lt_layout d, const ms_lt_algorithm *, ms_lt_candidate *))                              \
    X(algorithm_get, "cublasLtMatmulAlgoConfigGetAttribute",                                     \
      (const ms_lt_algorithm *, int what, void *, size_t bytes, size_t *written))                \
    X(multiply, "cublasLtMatmul",                                                                \
      (ms_lt_handle, ms_lt_operation, const void *alpha, const void *a, ms_lt_layout,            \
       const void *b, ms_lt_layout, const void *beta, const void *c, ms_lt_layout, void *d,      \
       ms_lt_layout, const ms_lt_algorithm *, void *workspace, size_t bytes,                     \
       struct CUstream_st *))

typedef struct ms_cublaslt {
#define MS_LT_FIELD(field, name, arguments) ms_lt_result(*field) arguments;
    MS_LT_FUNCTIONS(MS_LT_FIELD)
#undef MS_LT_FIELD
    size_t (*version)(void);
    const char *(*explain)(ms_lt_result);
} ms_cublaslt;

/* MS_ERROR_NOT_FOUND, MS_ERROR_UNSUPPORTED: there is none, or an older one; the message says what
 * to do. */
ms_status ms_cublaslt_load(ms_context *context, ms_cublaslt *out);

#endif
