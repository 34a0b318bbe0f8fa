/* moonshard/tensor.h: tensors, views, and operators without gradients.
 *
 * Invariants
 * - A tensor is a typed, strided window on a storage. Creating one enqueues nothing and its
 *   contents are undefined.
 * - All work on tensor memory is a task on the engine's current stream. The host reads and writes
 *   tensor memory only through ms_tensor_read and ms_tensor_write.
 * - Dimensions and positions count from 0 in C (from 1 in Lua). Strides are in elements and may be
 *   0 (broadcast); never negative.
 * - Operators are objects: one const ms_op each, with forward and backward. ms_op_apply runs a
 *   forward and records nothing; moonshard/grad.h has the same call with a tape.
 * - How work is cut into tiles depends on shapes only, so results never depend on the number of
 *   threads. */
#ifndef MOONSHARD_TENSOR_H
#define MOONSHARD_TENSOR_H

#include "moonshard/exec.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MS_DIMS_MAX 8

typedef struct ms_tensor ms_tensor;
typedef struct ms_op ms_op;

typedef enum ms_dtype {
    MS_F32,
    MS_F16,
    MS_BF16,
    MS_I64,
    MS_I32,
    MS_U16,
    MS_U8,
    MS_BOOL,
    MS_DTYPES
} ms_dtype;
MS_API size_t ms_dtype_bytes(ms_dtype dtype);
MS_API const char *ms_dtype_name(ms_dtype dtype); /* "f32" ... */
MS_API bool ms_dtype_find(const char *name, ms_dtype *out);
static inline bool ms_dtype_is_float(ms_dtype dtype) { return dtype <= MS_BF16; }

/* ------------------------------------------------------------------ tensors */

/* A contiguous tensor on the current stream; MS_ERROR_ARGUMENT for more than MS_DIMS_MAX
 * dimensions, negative sizes or overflow. */
MS_API ms_status ms_tensor_new(ms_engine *engine, ms_dtype dtype, uint32_t dims,
                               const int64_t *shape, ms_tensor **out);
/* While this is on, new tensors are on "meta": they have a shape and a dtype, and no memory.
 * Results of operators, backward and ms_flatten are on "meta" exactly if their inputs are, whatever
 * this setting is. An operator takes tensors on "meta" together with others only if the others are
 * scalars. Work that writes tensors on "meta" is not enqueued; a call that needs their values is an
 * error (MS_ERROR_STATE). Returns the former setting. */
MS_API bool ms_engine_set_meta(ms_engine *engine, bool on);
/* While this is on, tensors with memory get a record of how their values are made, as those on
 * "meta" do (ms_initializer). Returns the former setting. */
MS_API bool ms_engine_note_initial(ms_engine *engine, bool on);
MS_API bool ms_engine_makes_meta(const ms_engine *engine);
MS_API bool ms_tensor_is_meta(const ms_tensor *tensor);
/* A contiguous tensor at the beginning of a storage, which it retains; MS_ERROR_ARGUMENT if it does
 * not fit. */
MS_API ms_status ms_tensor_on(ms_storage *storage, ms_dtype dtype, uint32_t dims,
                              const int64_t *shape, ms_tensor **out);
/* A window on base's storage: strides in elements; offset in elements from base's first. Everything
 * must be inside the storage. */
MS_API ms_status ms_tensor_window(ms_tensor *base, uint32_t dims, const int64_t *shape,
                                  const int64_t *strides, int64_t offset, ms_tensor **out);
/* The same window with no gradient history. */
MS_API ms_status ms_tensor_alias(ms_tensor *tensor, ms_tensor **out);
MS_API ms_tensor *ms_tensor_retain(ms_tensor *tensor);
MS_API void ms_tensor_release(ms_tensor *tensor); /* NULL is allowed */

MS_API ms_engine *ms_tensor_engine(const ms_tensor *tensor);
MS_API ms_dtype ms_tensor_dtype(const ms_tensor *tensor);
MS_API uint32_t ms_tensor_dims(const ms_tensor *tensor);
MS_API const int64_t *ms_tensor_shape(const ms_tensor *tensor); /* borrowed, dims numbers */
MS_API const int64_t *ms_tensor_strides(const ms_tensor *tensor);
MS_API int64_t ms_tensor_count(const ms_tensor *tensor); /* elements */
MS_API size_t ms_tensor_bytes(const ms_tensor *tensor);  /* elements times their size */
MS_API bool ms_tensor_is_contiguous(const ms_tensor *tensor);
MS_API ms_storage *ms_tensor_storage(const ms_tensor *tensor); /* borrowed */
/* Elements from the storage's beginning. */
MS_API int64_t ms_tensor_offset(const ms_tensor *tensor);
/* Address of the first element: for tasks only. */
MS_API void *ms_tensor_data(const ms_tensor *tensor);

/* Grows with each write of memory that the tensor may read: see ms_storage_version. */
MS_API uint64_t ms_tensor_version(const ms_tensor *tensor);

/* MS_ERROR_ARGUMENT with the parameter's name if the tensor is a rank's piece of a sharded
 * parameter, or was computed from one element by element. */
MS_API ms_status ms_tensor_check_whole(const ms_tensor *tensor);

/* "[2, 3] f32" into text; returns text. */
MS_API const char *ms_tensor_describe(const ms_tensor *tensor, char *text, size_t bytes);

/* Copies row-major host data in, on the current stream; host may be reused at once. bytes must be
 * ms_tensor_bytes. */
MS_API ms_status ms_tensor_write(ms_tensor *tensor, const void *host, size_t bytes);
/* Copies out row-major; blocks until the tensor's writers are done. On sim: zeros, and host may be
 * NULL. */
MS_API ms_status ms_tensor_read(ms_tensor *tensor, void *host, size_t bytes);
/* hashes[0]: ms_hash (seed 0) of the elements in row-major order, not of dtype and shape. If block
 * is not 0, the hashes of each `block` bytes of them follow (a multiple of 1 MiB; the last may be
 * shorter). If host is not NULL, the elements are copied to it as by ms_tensor_read. The call
 * blocks as a read does. On sim without host: 0, and block must be 0. */
MS_API ms_status ms_tensor_hash(ms_tensor *tensor, void *host, size_t block, uint64_t *hashes);

/* Copies `source` (of the same shape, and on another storage; any dtype) into the tensor on the
 * current stream, as a restore: the tensor's version stays if it holds what this source gave it
 * before. See ms_storage_restore. */
MS_API ms_status ms_tensor_restore(ms_tensor *tensor, ms_tensor *source);

/* A copy of a tensor's first element to the host, which is enqueued now and read later. */
typedef struct ms_readback ms_readback;
MS_API ms_status ms_tensor_readback(ms_tensor *tensor, ms_readback **out);
/* Blocks only until the copy is done. */
MS_API ms_status ms_readback_number(ms_readback *readback, double *out);
/* Never blocks: the memory goes when the copy is done. NULL is allowed. */
MS_API void ms_readback_free(ms_readback *readback);

/* ------------------------------------------------------------------- codecs */

/* How a row of n floats is encoded as bytes. The row is cut into blocks. First come the blocks'
 * scales (f32, in the machine's byte order), then all codes, packed from the lowest bit on. A
 * number is its code's value times the scale of its block.
 *
 *   kind  code                                                            scale
 *   int8  -127 .. 127                                                     max|x| / 127
 *   int4  -7 .. 7, stored + 8                                             max|x| / 7
 *   int2  0 .. 3: -3, -1, 1, 3 (of two that are as near, the outer one)   max|x| / 3
 *   fp8   1 sign, 4 exponent, 3 mantissa bits (bias 7, no infinity)       max|x| / 448
 *   fp4   1 sign, 2 exponent, 1 mantissa bit (bias 1: 0 .5 1 1.5 2 3 4 6) max|x| / 6
 *   sign  1 bit, set for x >= +0: +1 and -1                               mean|x|; bare: none
 *
 * A block with an infinity or a NaN decodes to NaN in all its numbers (except with bare). In a
 * block whose greatest absolute value is below 1e-35, all numbers count as 0. The bytes are the
 * same on every instruction set. */
typedef enum ms_codec_kind {
    MS_CODEC_INT8,
    MS_CODEC_INT4,
    MS_CODEC_INT2,
    MS_CODEC_FP8,
    MS_CODEC_FP4,
    MS_CODEC_SIGN,
    MS_CODEC_KINDS
} ms_codec_kind;
typedef struct ms_codec {
    ms_codec_kind kind;
    int64_t block; /* numbers that share a scale: a multiple of 8 */
    /* stochastic: to one of the two neighbours, so that the mean is right; bare: sign only */
    bool stochastic, bare;
} ms_codec;
MS_API int64_t ms_codec_bytes(const ms_codec *codec, int64_t n); /* of a row of n numbers */

/* How rotary positions are stretched beyond the context that a model was trained with; zero-filled:
 * not at all. f is the frequency base^(-2j/width) of pair j, in radians per position.
 *
 *   linear  f / factor
 *   llama3  With turns = original_context * f / (2 pi), the turns of this pair over the original
 *           context: f / factor up to `low` turns, f from `high` turns on, and between them
 *           (1 - s) * f / factor + s * f with s = (turns - low) / (high - low).
 *
 * Both are as in Hugging Face transformers, modeling_rope_utils.py:
 * _compute_linear_scaling_rope_parameters and _compute_llama3_parameters. */
typedef enum ms_rotary_kind { MS_ROTARY_PLAIN, MS_ROTARY_LINEAR, MS_ROTARY_LLAMA3 } ms_rotary_kind;
typedef struct ms_rotary_scaling {
    ms_rotary_kind kind;
    double factor; /* above 0 */
    /* llama3: low_freq_factor < high_freq_factor, both 0 or more; positions, above 0 */
    double low, high, original_context;
} ms_rotary_scaling;

/* ---------------------------------------------------------------- operators */

/* Parameters of an operator that are not tensors. Fill the union with zeros, then set the member of
 * the operator's family. */
typedef union ms_attributes {
    /* scalar forms (value), clamp (value = low), pow, factors, eps; gives_most: written by forward,
     * for backward */
    struct {
        double value, high;
        bool has_low, has_high, gives_most;
    } scalar;
    /* all: over everything; p: norm */
    struct {
        int32_t dim;
        bool all, keep;
        double p;
    } reduce;
    /* transpose a b; narrow and select: a; cat, split, cumsum: a */
    struct {
        int32_t a, b;
        int64_t start, length;
    } dim;
    /* view, reshape, expand; permute: sizes are dimensions */
    struct {
        uint32_t dims;
        int64_t sizes[MS_DIMS_MAX];
    } shape;
    /* forward only; outputs carry the sizes */
    struct {
        const int64_t *sizes;
        uint32_t count;
        int32_t dim;
    } split;
    /* gives_most: written by forward, for backward */
    struct {
        double eps;
        bool gives_most;
    } norm;
    /* reduction: ms_reduction; chunk: rows whose logits exist at a time in linear_cross_entropy, 0:
     * by their shape and dtype */
    struct {
        int64_t ignore_index, chunk;
        int32_t reduction;
    } loss;
    /* scale 0: 1/sqrt(width); window: the last keys that a query sees, 0 for all; offset, if
     * shifted: the place of the first query among the keys; fast: see
     * ms_engine_set_fast_attention */
    struct {
        double scale;
        int64_t window, offset;
        bool causal, fast, shifted;
    } attention;
    struct {
        int64_t first;
        double base;
        ms_rotary_scaling scaling;
    } rotary;
    struct {
        int64_t k;
        int32_t dim;
        bool largest;
    } top;
    /* uniform [a, b); normal mean a, deviation b; dropout: p = a */
    struct {
        ms_random random;
        double a, b;
    } random;
    struct {
        int32_t kind;
        ms_dtype dtype;
    } cast;
    /* activation: ms_activation. A weight of u8 is coded: codec tells how, n how many numbers are
     * in each of its rows. */
    struct {
        int32_t activation;
        ms_codec codec;
        int64_t n;
    } linear;
    struct {
        double low, high;
        int64_t bins;
    } histogram;
    /* random: for stochastic rounding; n: numbers in a row, for decoding */
    struct {
        ms_codec codec;
        ms_random random;
        int64_t n;
    } codec;
    /* rows, then columns. A stride of 0 is 1 for conv2d and the kernel's size for pooling; a
     * dilation of 0, and 0 groups, are 1. */
    struct {
        int32_t kernel[2], stride[2], padding[2], dilation[2], groups;
        bool skip_padding; /* avg_pool2d: an average counts elements of the input only */
    } window;
    /* gather, index_select, scatter, scatter_add */
    struct {
        int32_t dim;
    } index;
} ms_attributes;

typedef enum ms_reduction { MS_REDUCE_MEAN, MS_REDUCE_SUM, MS_REDUCE_NONE } ms_reduction;
/* gelu: the tanh form */
typedef enum ms_activation { MS_ACTIVATION_NONE, MS_ACTIVATION_GELU } ms_activation;

/* Runs forward on the current stream: `inputs` (NULL where optional and absent) to `output_count`
 * new tensors in `outputs`, which the caller owns. in_place: the result is written into inputs[0],
 * and outputs[0] is another reference to it. attributes may be NULL. Errors name the operator and
 * the shapes; nothing is changed then. */
MS_API ms_status ms_op_apply(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                             bool in_place, ms_tensor *const *inputs, uint32_t input_count,
                             ms_tensor **outputs, uint32_t output_count);

/* How the values of a tensor on "meta" would have been made: filled or drawn, and then changed
 * element by element by operators without other tensors, copied or cast. Such steps are recorded
 * for tensors that are all of their storage, where no history is recorded; and for tensors with
 * memory while ms_engine_note_initial is on. */
typedef struct ms_initializer ms_initializer;
/* Borrowed until the tensor's storage is written or freed; NULL where the values were made in some
 * other way. It is plain memory: who keeps it copies that many bytes. */
MS_API const ms_initializer *ms_tensor_initializer(const ms_tensor *tensor);
MS_API size_t ms_initializer_bytes(void);
/* Computes the values in a contiguous tensor with memory, of the same dtype, on the current stream:
 * the bits that the recorded tensor would have had with memory. A tensor of another shape gets what
 * it would have got instead: an element depends on its position among all elements alone. */
MS_API ms_status ms_initialize(const ms_initializer *initializer, ms_tensor *tensor);
/* Whether the values were drawn, and then the number of the first draw. */
MS_API bool ms_initializer_draw(const ms_initializer *initializer, uint64_t *draw);
/* Adds a number to those of all draws: the values become those that they would have been if so many
 * draws more had come before. */
MS_API void ms_initializer_move(ms_initializer *initializer, uint64_t draws);

MS_API const char *ms_op_name(const ms_op *op);
MS_API const ms_op *ms_op_find(const char *name); /* NULL if there is none */
MS_API const ms_op *ms_op_at(uint32_t index);     /* all operators, from 0; NULL past the last */

/* bf16 or f16: operators that are called from now on take operands of f32 and of this dtype
 * together, and their results have the dtypes of PyTorch's table for CUDA (tests/golden/autocast).
 * Results of matrix products, linear, conv2d and attention have this dtype, as have the normalized
 * rows of norms; products cast f32 operands, and accumulate in f32. Exponentials, logarithms,
 * powers, softmax, sums and losses give f32. Every other operator gives f32 where an operand of f32
 * has dimensions. In place a tensor keeps its dtype. Norms, softmax, sums and losses compute in f32
 * always. A gradient has the dtype of its tensor, and that of an f32 weight is never rounded.
 * MS_F32: off. */
MS_API void ms_engine_set_autocast(ms_engine *engine, ms_dtype dtype);
MS_API ms_dtype ms_engine_autocast(const ms_engine *engine);
/* How linear, linear_t and mlp compute under autocast to bf16. ON: in 8-bit floats, input and
 * weight as E4M3 and incoming gradients as E5M2, each tensor with a scale of its own; sums in f32.
 * On a GPU this takes a compute capability of 8.9, or the first product is refused. EMULATED: the
 * same numbers are multiplied in bf16, as other devices do always. Rows, inputs and outputs are
 * multiples of 16. All other operators, and weights in codes, are as under autocast to bf16. */
typedef enum ms_fp8 { MS_FP8_OFF, MS_FP8_ON, MS_FP8_EMULATED } ms_fp8;
MS_API void ms_engine_set_fp8(ms_engine *engine, ms_fp8 mode);
MS_API ms_fp8 ms_engine_fp8(const ms_engine *engine);
/* Gradients of attention whose forward comes from now on may be summed in the order that is
 * fastest: their bits then differ from run to run. It has an effect on GPUs, for calls of cuDNN
 * with a multiple of 64 queries and of keys. False at first. */
MS_API void ms_engine_set_fast_attention(ms_engine *engine, bool fast);
MS_API bool ms_engine_fast_attention(const ms_engine *engine);
/* The library that computes matrix products: "oneDNN 2.6.3", "OpenBLAS" ... Static. */
MS_API const char *ms_engine_blas(void);
/* The best instruction set that this library may use here, under the library's own name:
 * "avx512_core_amx"; "" if the library does not report it. Static. */
MS_API const char *ms_engine_blas_isa(ms_engine *engine);

/* The library that computes products on GPUs, "cuBLASLt 13.1, PATH", loaded for this. False: it
 * cannot be used, and text says why. os NULL: ms_os_posix(). */
MS_API bool ms_gpu_blas(const ms_os *os, char *text, size_t bytes);
/* The same for the library of attention, "cuDNN 9.19, PATH". Without it attention is slower. */
MS_API bool ms_gpu_dnn(const ms_os *os, char *text, size_t bytes);
/* What the algorithms are for that a GPU's products may use: "NVIDIA H200, 132 multiprocessors,
 * cuBLASLt 130101". Algorithms of one place mean nothing in another. False: that GPU or the library
 * cannot be used. os NULL: ms_os_posix(). */
MS_API bool ms_products_place(const ms_os *os, uint32_t gpu, char *text, size_t bytes);
/* Which algorithm of its library a kind of product uses. */
#define MS_PRODUCT_KEY_BYTES 320
typedef struct ms_product_choice {
    char key[MS_PRODUCT_KEY_BYTES]; /* shape, strides, dtypes ... as text, zeros after it */
    uint64_t algorithm[8];          /* the library's own */
} ms_product_choice;
/* From now on products use these, which are copied, and no earlier choices. Products without a
 * choice, or whose choice the library refuses, use the library's first candidate. The first refusal
 * is a warning in the log, unless quiet. On other devices nothing happens. */
MS_API ms_status ms_products_use(ms_engine *engine, const ms_product_choice *choices, size_t count,
                                 bool quiet);
typedef struct ms_product_time {
    ms_product_choice
        choice;          /* the fastest candidate; an empty key: every product has been timed */
    double us, first_us; /* of it, and of the first candidate; -1: there was no memory */
} ms_product_time;
/* Waits for all streams. Then times the library's candidates for one kind of product that the
 * engine has computed, that has no choice and was not timed before. Nothing is chosen by that. */
MS_API ms_status ms_products_time(ms_engine *engine, ms_product_time *out);

/* Scratch memory of a GPU that a stream keeps for tasks of libraries; no pool counts it. */
typedef struct ms_gpu_scratch {
    size_t products;       /* the workspace of cuBLASLt */
    size_t attention;      /* cuDNN's parts of a call and their copies, at most */
    size_t attention_most; /* where a part cannot be cut so small */
} ms_gpu_scratch;
MS_API ms_gpu_scratch ms_gpu_scratch_of_stream(void);

/* How many tasks of attention, forward and backward, the engine has put onto a GPU: calls of cuDNN,
 * of which some add up in no certain order, and kernels of our own, which take every shape and are
 * slower. refused: of the latter, those with several queries that came while cuDNN was there.
 * Traces name each task by its way: "attention, cuDNN", "attention, own kernels". */
typedef struct ms_attention_counts {
    uint64_t cudnn, fast, own, refused;
} ms_attention_counts;
MS_API ms_attention_counts ms_engine_attention_counts(const ms_engine *engine);

/* Drops casts of weights that were kept for this step. A cast that an optimizer's step has made
 * stays until a product has used it. */
MS_API void ms_engine_drop_casts(ms_engine *engine);

#ifdef __cplusplus
}
#endif
#endif
