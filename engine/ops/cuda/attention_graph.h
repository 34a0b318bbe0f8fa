/* attention_graph.h: attention as graphs of cuDNN's operations, and plans to execute them.
 *
 * A plan is made for one shape. cuDNN names configurations of its engines for a graph; the first
 * one that repeats its bits, unless the key says that it need not, and can be built is taken.
 * Without a GPU plans are made for a described one: they cannot be executed, but tell what cuDNN
 * accepts. */
#ifndef MOONSHARD_OPS_CUDA_ATTENTION_GRAPH_H
#define MOONSHARD_OPS_CUDA_ATTENTION_GRAPH_H

#include "moonshard/tensor.h"
#include "ops/cuda/cudnn.h"

/* The tensors of 16 bits: [batches, heads or groups, queries or keys, width]. */
enum {
    MS_ATTENTION_Q,
    MS_ATTENTION_K,
    MS_ATTENTION_V,
    MS_ATTENTION_OUT,
    MS_ATTENTION_DOUT, /* from here on: backward only */
    MS_ATTENTION_DQ,
    MS_ATTENTION_DK,
    MS_ATTENTION_DV,
    MS_ATTENTION_TENSORS
};

/* What a plan depends on. Compared by bytes: no padding, and 0 where nothing is said. Strides are
 * multiples of 8 elements, and so is the width; addresses are aligned to 16 bytes. */
typedef struct ms_attention_key {
    int64_t batches, heads, groups, queries, keys, width;
    int64_t strides[MS_ATTENTION_TENSORS][3]; /* of batches, heads, time; that of the width is 1 */
    uint8_t dtype;                            /* MS_F16, MS_BF16 */
    bool causal, backward;                    /* causal: see ms_attention_args */
    bool
        fast; /* backward, of queries and keys that are multiples of 64: sums in no certain order */
    uint8_t unused[4];
} ms_attention_key;

enum { MS_ATTENTION_DESCRIPTORS = 256 };
typedef struct ms_attention_plan {
    ms_attention_key key;
    ms_cudnn_descriptor plan; /* NULL: cuDNN has none for this shape, and `why` says more */
    size_t workspace_bytes;
    uint32_t returned; /* how many configurations cuDNN named until one was taken */
    uint32_t made_count;
    ms_cudnn_descriptor made[MS_ATTENTION_DESCRIPTORS]; /* all that the plan is made of */
    char why[256];
} ms_attention_plan;

/* Who makes plans: for the GPU of a handle, or, if that is NULL, for a described device. */
typedef struct ms_attention_maker {
    const ms_cudnn *dnn;
    ms_cudnn_handle handle;
    ms_cudnn_descriptor device;
} ms_attention_maker;

/* Fills in *out. out->plan is NULL if the shape is refused. */
void ms_attention_plan_make(const ms_attention_maker *maker, const ms_attention_key *key,
                            ms_attention_plan *out);
void ms_attention_plan_free(const ms_cudnn *dnn, ms_attention_plan *plan);

/* What one execution works on. */
typedef struct ms_attention_operands {
    void *tensors[MS_ATTENTION_TENSORS];
    float *log_sum;  /* [batches, heads, queries]; forward writes it */
    float *offset;   /* backward: memory for [batches, heads, queries] */
    float *sums;     /* fast: zeros, [batches, heads, queries, width rounded up to 64] */
    void *workspace; /* of plan->workspace_bytes, aligned to 256 bytes */
    float scale;
} ms_attention_operands;

/* On the stream of the handle. */
ms_cudnn_result ms_attention_plan_execute(const ms_cudnn *dnn, ms_cudnn_handle handle,
                                          const ms_attention_plan *plan,
                                          const ms_attention_operands *operands);

#endif
