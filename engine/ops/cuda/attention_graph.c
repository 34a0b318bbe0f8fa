/* attention_graph.c: see attention_graph.h.
 *
 * The graphs are those of ops/attention.c, operation by operation. Scores and what is computed
 * from them are virtual: cuDNN keeps them in registers. The mask compares the index of the query
 * with that of the key.
 *
 * Backward adds up the gradient of the queries over blocks of keys. cuDNN does it with atomic
 * additions if it is given memory of f32 for the sums (`fast`); and without, it keeps the gradients
 * of the scores in its workspace and adds in a fixed order. It marks neither in its notes, so a
 * plan whose workspace could not hold these gradients is not taken. */
#include "ops/cuda/attention_graph.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"

/* Numbers of tensors that are not virtual: 1 + the index of a tensor of 16 bits, and these. Virtual
 * ones have higher numbers. */
enum { LOG_SUM = 20, OFFSET, SUMS, SCALE, HIDDEN, ONE, SHIFT, VIRTUAL = 100 };

typedef struct builder {
    const ms_attention_maker *maker;
    const ms_cudnn *dnn;
    const ms_attention_key *key;
    ms_attention_plan *plan; /* keeps what is made */
    ms_cudnn_result result;  /* of the first call that failed; then nothing more is done */
    int dtype;
    int64_t next; /* number of a virtual tensor */
    ms_cudnn_descriptor scale;
    ms_cudnn_descriptor operations[32];
    int64_t operation_count;
} builder;

/* ------------------------------------------------------------------- descriptors */

static ms_cudnn_descriptor make(builder *b, int kind)
{
    ms_cudnn_descriptor made = NULL;
    if (b->result) return NULL;
    MS_ASSERT(b->plan->made_count < MS_ATTENTION_DESCRIPTORS);
    b->result = b->dnn->make(kind, &made);
    if (!b->result) b->plan->made[b->plan->made_count++] = made;
    return made;
}
static void put(builder *b, ms_cudnn_descriptor to, int attribute, int type, int64_t count,
                const void *value)
{
    if (!b->result) b->result = b->dnn->set(to, attribute, type, count, value);
}
static void put_one(builder *b, ms_cudnn_descriptor to, int attribute, ms_cudnn_descriptor one)
{
    put(b, to, attribute, MS_CUDNN_IS_DESCRIPTOR, 1, &one);
}
static void put_int(builder *b, ms_cudnn_descriptor to, int attribute, int type, int value)
{
    put(b, to, attribute, type, 1, &value);
}
static void put_bool(builder *b, ms_cudnn_descriptor to, int attribute, bool value)
{
    put(b, to, attribute, MS_CUDNN_IS_BOOLEAN, 1, &value);
}
static void put_integer(builder *b, ms_cudnn_descriptor to, int attribute, int64_t value)
{
    put(b, to, attribute, MS_CUDNN_IS_INTEGER, 1, &value);
}
static void finish(builder *b, ms_cudnn_descriptor made)
{
    if (!b->result) b->result = b->dnn->finalize(made);
}

/* ----------------------------------------------------------------------- tensors */

static ms_cudnn_descriptor tensor(builder *b, int dtype, const int64_t shape[4],
                                  const int64_t strides[4], int64_t number)
{
    ms_cudnn_descriptor made = make(b, MS_CUDNN_TENSOR);
    put_int(b, made, MS_CUDNN_TENSOR_DTYPE, MS_CUDNN_IS_DTYPE, dtype);
    put(b, made, MS_CUDNN_TENSOR_SHAPE, MS_CUDNN_IS_INTEGER, 4, shape);
    put(b, made, MS_CUDNN_TENSOR_STRIDES, MS_CUDNN_IS_INTEGER, 4, strides);
    put_integer(b, made, MS_CUDNN_TENSOR_NUMBER, number);
    put_integer(b, made, MS_CUDNN_TENSOR_ALIGNMENT, 16);
    put_bool(b, made, MS_CUDNN_TENSOR_IS_VIRTUAL, number >= VIRTUAL);
    if (number >= SCALE && number < VIRTUAL) put_bool(b, made, MS_CUDNN_TENSOR_IS_VALUE, true);
    if (number == SUMS)
        put_int(b, made, MS_CUDNN_TENSOR_ORDER, MS_CUDNN_IS_ORDER, MS_CUDNN_ORDER_TILES);
    finish(b, made);
    return made;
}
static ms_cudnn_descriptor packed(builder *b, int dtype, const int64_t s[4], int64_t number)
{
    return tensor(b, dtype, s, (int64_t[]){ s[1] * s[2] * s[3], s[2] * s[3], s[3], 1 }, number);
}
/* One number, which each execution brings along. */
static ms_cudnn_descriptor value(builder *b, int dtype, int64_t number)
{
    return packed(b, dtype, (int64_t[]){ 1, 1, 1, 1 }, number);
}
/* Like the scores: a row for each query, a column for each key. */
static ms_cudnn_descriptor square(builder *b, int dtype)
{
    const ms_attention_key *key = b->key;
    return packed(b, dtype, (int64_t[]){ key->batches, key->heads, key->queries, key->keys },
                  b->next++);
}
/* The same values, seen as [batches, heads, keys, queries]. */
static ms_cudnn_descriptor turned(builder *b)
{
    const ms_attention_key *key = b->key;
    int64_t all = key->queries * key->keys;
    return tensor(b, b->dtype, (int64_t[]){ key->batches, key->heads, key->keys, key->queries },
                  (int64_t[]){ key->heads * all, all, 1, key->keys }, b->next++);
}
/* A number for each query. */
static ms_cudnn_descriptor column(builder *b, int64_t number)
{
    const ms_attention_key *key = b->key;
    return packed(b, MS_CUDNN_F32, (int64_t[]){ key->batches, key->heads, key->queries, 1 },
                  number);
}
static bool is_of_keys(int which)
{
    return which == MS_ATTENTION_K || which == MS_ATTENTION_V || which == MS_ATTENTION_DK
           || which == MS_ATTENTION_DV;
}
/* A tensor of 16 bits. With `turned` time comes last; with `number` it is virtual. */
static ms_cudnn_descriptor heads(builder *b, int which, bool turned, int64_t number)
{
    const ms_attention_key *key = b->key;
    const int64_t *s = key->strides[which];
    bool of_keys = is_of_keys(which);
    int64_t rows = of_keys ? key->groups : key->heads, time = of_keys ? key->keys : key->queries;
    int64_t shape[] = { key->batches, rows, turned ? key->width : time,
                        turned ? time : key->width },
            strides[] = { s[0], s[1], turned ? 1 : s[2], turned ? s[2] : 1 };
    return tensor(b, b->dtype, shape, strides, number ? number : which + 1);
}

/* -------------------------------------------------------------------- operations */

static void add_operation(builder *b, ms_cudnn_descriptor operation)
{
    finish(b, operation);
    MS_ASSERT(b->operation_count < (int64_t)(sizeof b->operations / sizeof *b->operations));
    b->operations[b->operation_count++] = operation;
}

/* y = mode(x, b, t), computed in `dtype`. axis: of MS_CUDNN_INDEX, else -1. */
static void point(builder *b, int mode, int dtype, int64_t axis, ms_cudnn_descriptor x,
                  ms_cudnn_descriptor second, ms_cudnn_descriptor third, ms_cudnn_descriptor y)
{
    ms_cudnn_descriptor how = make(b, MS_CUDNN_POINTWISE);
    put_int(b, how, MS_CUDNN_POINTWISE_MODE, MS_CUDNN_IS_POINTWISE, mode);
    put_int(b, how, MS_CUDNN_POINTWISE_DTYPE, MS_CUDNN_IS_DTYPE, dtype);
    if (axis >= 0) put_integer(b, how, MS_CUDNN_POINTWISE_AXIS, axis);
    finish(b, how);
    ms_cudnn_descriptor made = make(b, MS_CUDNN_OPERATION_POINTWISE);
    put_one(b, made, MS_CUDNN_OPERATION_POINTWISE_MODE, how);
    put_one(b, made, MS_CUDNN_OPERATION_POINTWISE_X, x);
    if (second) put_one(b, made, MS_CUDNN_OPERATION_POINTWISE_B, second);
    if (third) put_one(b, made, MS_CUDNN_OPERATION_POINTWISE_T, third);
    put_one(b, made, MS_CUDNN_OPERATION_POINTWISE_Y, y);
    add_operation(b, made);
}
static void combine(builder *b, int mode, ms_cudnn_descriptor x, ms_cudnn_descriptor second,
                    ms_cudnn_descriptor y)
{
    point(b, mode, MS_CUDNN_F32, -1, x, second, NULL, y);
}
/* Over the dimensions of which y has one element. */
static void reduce(builder *b, int mode, ms_cudnn_descriptor x, ms_cudnn_descriptor y)
{
    ms_cudnn_descriptor how = make(b, MS_CUDNN_REDUCTION);
    put_int(b, how, MS_CUDNN_REDUCTION_MODE, MS_CUDNN_IS_REDUCTION, mode);
    put_int(b, how, MS_CUDNN_REDUCTION_DTYPE, MS_CUDNN_IS_DTYPE, MS_CUDNN_F32);
    finish(b, how);
    ms_cudnn_descriptor made = make(b, MS_CUDNN_OPERATION_REDUCTION);
    put_one(b, made, MS_CUDNN_OPERATION_REDUCTION_REDUCTION, how);
    put_one(b, made, MS_CUDNN_OPERATION_REDUCTION_X, x);
    put_one(b, made, MS_CUDNN_OPERATION_REDUCTION_Y, y);
    add_operation(b, made);
}
static void multiply(builder *b, ms_cudnn_descriptor x, ms_cudnn_descriptor y,
                     ms_cudnn_descriptor product)
{
    ms_cudnn_descriptor how = make(b, MS_CUDNN_MATMUL);
    put_int(b, how, MS_CUDNN_MATMUL_DTYPE, MS_CUDNN_IS_DTYPE, MS_CUDNN_F32);
    finish(b, how);
    ms_cudnn_descriptor made = make(b, MS_CUDNN_OPERATION_MATMUL);
    put_one(b, made, MS_CUDNN_OPERATION_MATMUL_MATMUL, how);
    put_one(b, made, MS_CUDNN_OPERATION_MATMUL_A, x);
    put_one(b, made, MS_CUDNN_OPERATION_MATMUL_B, y);
    put_one(b, made, MS_CUDNN_OPERATION_MATMUL_C, product);
    add_operation(b, made);
}
static void see_as(builder *b, ms_cudnn_descriptor x, ms_cudnn_descriptor y)
{
    ms_cudnn_descriptor made = make(b, MS_CUDNN_OPERATION_RESHAPE);
    put_one(b, made, MS_CUDNN_OPERATION_RESHAPE_X, x);
    put_one(b, made, MS_CUDNN_OPERATION_RESHAPE_Y, y);
    add_operation(b, made);
}

/* ------------------------------------------------------------------------ graphs */

/* scale q k^T */
static ms_cudnn_descriptor make_scores(builder *b, ms_cudnn_descriptor q, ms_cudnn_descriptor k)
{
    ms_cudnn_descriptor products = square(b, MS_CUDNN_F32), scores = square(b, MS_CUDNN_F32);
    b->scale = value(b, MS_CUDNN_F32, SCALE);
    multiply(b, q, k, products);
    combine(b, MS_CUDNN_MUL, products, b->scale, scores);
    return scores;
}

/* Key j is hidden from query i if j > i + keys - queries. */
static ms_cudnn_descriptor hide(builder *b, ms_cudnn_descriptor scores)
{
    if (!b->key->causal) return scores;
    ms_cudnn_descriptor row = square(b, MS_CUDNN_I32), last = row, key = square(b, MS_CUDNN_I32),
                        is_seen = square(b, MS_CUDNN_BOOL), masked = square(b, MS_CUDNN_F32);
    point(b, MS_CUDNN_INDEX, MS_CUDNN_I32, 2, scores, NULL, NULL, row);
    if (b->key->keys != b->key->queries) {
        last = square(b, MS_CUDNN_I32);
        point(b, MS_CUDNN_ADD, MS_CUDNN_I32, -1, row, value(b, MS_CUDNN_I32, SHIFT), NULL, last);
    }
    point(b, MS_CUDNN_INDEX, MS_CUDNN_I32, 3, scores, NULL, NULL, key);
    point(b, MS_CUDNN_GE, MS_CUDNN_BOOL, -1, last, key, NULL, is_seen);
    point(b, MS_CUDNN_WHERE, MS_CUDNN_F32, -1, scores, value(b, MS_CUDNN_F32, HIDDEN), is_seen,
          masked);
    return masked;
}

static void build_forward(builder *b)
{
    ms_cudnn_descriptor scores = hide(b, make_scores(b, heads(b, MS_ATTENTION_Q, false, 0),
                                                     heads(b, MS_ATTENTION_K, true, 0))),
                        top = column(b, b->next++), sum = column(b, b->next++),
                        log = column(b, b->next++), below = square(b, MS_CUDNN_F32),
                        raised = square(b, MS_CUDNN_F32), p = square(b, b->dtype);
    reduce(b, MS_CUDNN_REDUCE_MAX, scores, top);
    combine(b, MS_CUDNN_SUB, scores, top, below);
    combine(b, MS_CUDNN_EXP, below, NULL, raised);
    reduce(b, MS_CUDNN_REDUCE_SUM, raised, sum);
    combine(b, MS_CUDNN_LOG, sum, NULL, log);
    combine(b, MS_CUDNN_ADD, top, log, column(b, LOG_SUM));
    combine(b, MS_CUDNN_DIV, raised, sum, p);
    multiply(b, p, heads(b, MS_ATTENTION_V, false, 0), heads(b, MS_ATTENTION_OUT, false, 0));
}

/* offset = the dot products of dout and out. The factor of 1 is where dropout would scale: the
 * engines know the graph with it only. */
static ms_cudnn_descriptor make_offset(builder *b, ms_cudnn_descriptor dout)
{
    const ms_attention_key *key = b->key;
    ms_cudnn_descriptor both = packed(
                            b, MS_CUDNN_F32,
                            (int64_t[]){ key->batches, key->heads, key->queries, key->width },
                            b->next++),
                        sum = column(b, b->next++), offset = column(b, OFFSET);
    combine(b, MS_CUDNN_MUL, dout, heads(b, MS_ATTENTION_OUT, false, 0), both);
    reduce(b, MS_CUDNN_REDUCE_SUM, both, sum);
    combine(b, MS_CUDNN_MUL, sum, value(b, MS_CUDNN_F32, ONE), offset);
    return offset;
}

/* The gradient of keys or values: the sum over queries, and over the heads of a group. */
static void add_queries(builder *b, ms_cudnn_descriptor left, ms_cudnn_descriptor right, int which)
{
    const ms_attention_key *key = b->key;
    ms_cudnn_descriptor seen = turned(b), result = heads(b, which, false, 0), each = result;
    see_as(b, left, seen);
    if (key->heads != key->groups)
        each = packed(b, b->dtype, (int64_t[]){ key->batches, key->heads, key->keys, key->width },
                      b->next++);
    multiply(b, seen, right, each);
    if (each != result) reduce(b, MS_CUDNN_REDUCE_SUM, each, result);
}

static void build_backward(builder *b)
{
    ms_cudnn_descriptor q = heads(b, MS_ATTENTION_Q, false, 0),
                        k = heads(b, MS_ATTENTION_K, true, 0),
                        dout = heads(b, MS_ATTENTION_DOUT, false, 0), offset = make_offset(b, dout),
                        scores = make_scores(b, q, k), below = square(b, MS_CUDNN_F32);
    combine(b, MS_CUDNN_SUB, scores, column(b, LOG_SUM), below);
    ms_cudnn_descriptor p = square(b, MS_CUDNN_F32);
    combine(b, MS_CUDNN_EXP, hide(b, below), NULL, p);
    add_queries(b, p, dout, MS_ATTENTION_DV);
    ms_cudnn_descriptor dp = square(b, MS_CUDNN_F32), less = square(b, MS_CUDNN_F32),
                        change = square(b, MS_CUDNN_F32), ds = square(b, b->dtype);
    multiply(b, dout, heads(b, MS_ATTENTION_V, true, 0), dp);
    combine(b, MS_CUDNN_SUB, dp, offset, less);
    combine(b, MS_CUDNN_MUL, less, p, change);
    combine(b, MS_CUDNN_MUL, change, b->scale, ds);
    add_queries(b, ds, q, MS_ATTENTION_DK);
    ms_cudnn_descriptor rows = heads(b, MS_ATTENTION_K, false, b->next++);
    see_as(b, k, rows);
    ms_cudnn_descriptor dq = heads(b, MS_ATTENTION_DQ, false, 0);
    if (!b->key->fast) {
        multiply(b, ds, rows, dq);
        return;
    }
    const ms_attention_key *key = b->key;
    ms_cudnn_descriptor sums = packed(
        b, MS_CUDNN_F32, (int64_t[]){ key->batches, key->heads, key->queries, key->width }, SUMS);
    multiply(b, ds, rows, sums);
    combine(b, MS_CUDNN_IDENTITY, sums, NULL, dq);
}

/* ------------------------------------------------------------------------- plans */

/* Whether results of the engine repeat their bits, as far as cuDNN says. */
static bool repeats(builder *b, ms_cudnn_descriptor configuration)
{
    int notes[MS_CUDNN_NOTES] = { 0 };
    int64_t count = 0, one = 0;
    ms_cudnn_descriptor engine = make(b, MS_CUDNN_ENGINE);
    if (!b->result)
        b->result = b->dnn->get(configuration, MS_CUDNN_CONFIGURATION_ENGINE,
                                MS_CUDNN_IS_DESCRIPTOR, 1, &one, &engine);
    if (!b->result)
        b->result = b->dnn->get(engine, MS_CUDNN_ENGINE_NOTES, MS_CUDNN_IS_NOTE, MS_CUDNN_NOTES,
                                &count, notes);
    for (int64_t i = 0; i < count && i < MS_CUDNN_NOTES; i++)
        if (notes[i] == MS_CUDNN_NONDETERMINISTIC) return false;
    return !b->result;
}

static void explain(const builder *b, ms_cudnn_result result)
{
    char text[200] = "";
    b->dnn->last_error(text, sizeof text);
    snprintf(b->plan->why, sizeof b->plan->why, "%s%s%s", b->dnn->explain(result),
             *text ? ": " : "", text);
}

/* The gradients of the scores, in 16 bits. cuDNN keeps them in tiles of 64 by 64, or larger ones;
 * and with grouped queries the gradients of keys and values for each head, too. */
static size_t least_workspace(const ms_attention_key *key)
{
    int64_t rows = (key->queries + 63) / 64 * 64, columns = (key->keys + 63) / 64 * 64,
            each = rows * columns;
    if (!key->backward || key->fast) return 0;
    if (key->heads != key->groups) each += 2 * key->keys * key->width;
    return (size_t)(key->batches * key->heads * each) * 2;
}

/* A configuration that cannot be built is no error: the next one is tried. */
static void try_configuration(builder *b, ms_cudnn_descriptor configuration)
{
    int64_t bytes = 0, one = 0;
    if (!b->key->fast && !repeats(b, configuration)) return;
    ms_cudnn_descriptor plan = make(b, MS_CUDNN_PLAN);
    if (b->maker->handle)
        put(b, plan, MS_CUDNN_PLAN_HANDLE, MS_CUDNN_IS_HANDLE, 1, &b->maker->handle);
    else put_one(b, plan, MS_CUDNN_PLAN_DEVICE, b->maker->device);
    put_one(b, plan, MS_CUDNN_PLAN_CONFIGURATION, configuration);
    if (b->result) return;
    ms_cudnn_result result = b->dnn->finalize(plan);
    if (!result)
        result = b->dnn->get(plan, MS_CUDNN_PLAN_WORKSPACE, MS_CUDNN_IS_INTEGER, 1, &one, &bytes);
    if (result) {
        explain(b, result);
        return;
    }
    if ((size_t)bytes < least_workspace(b->key)) {
        snprintf(b->plan->why, sizeof b->plan->why, "its sums are in no certain order");
        return;
    }
    b->plan->plan = plan;
    b->plan->workspace_bytes = (size_t)bytes;
}

/* cuDNN fills descriptors that are there before. How many it has filled counts: asked without room
 * for any, it tells another number. */
static void try_list(builder *b, ms_cudnn_descriptor graph, int mode)
{
    enum { MOST = 16 };
    ms_cudnn_descriptor found[MOST];
    int64_t count = 0;
    ms_cudnn_descriptor list = make(b, MS_CUDNN_HEURISTICS);
    put_one(b, list, MS_CUDNN_HEURISTICS_GRAPH, graph);
    put_int(b, list, MS_CUDNN_HEURISTICS_MODE, MS_CUDNN_IS_HEURISTIC, mode);
    if (!b->maker->handle) put_one(b, list, MS_CUDNN_HEURISTICS_DEVICE, b->maker->device);
    finish(b, list);
    for (int i = 0; i < MOST; i++) found[i] = make(b, MS_CUDNN_CONFIGURATION);
    if (!b->result)
        b->result = b->dnn->get(list, MS_CUDNN_HEURISTICS_RESULTS, MS_CUDNN_IS_DESCRIPTOR, MOST,
                                &count, found);
    if (b->result) return;
    if (count > MOST) count = MOST;
    b->plan->returned += (uint32_t)count;
    for (int64_t i = 0; i < count && !b->plan->plan && !b->result; i++)
        try_configuration(b, found[i]);
}

void ms_attention_plan_make(const ms_attention_maker *maker, const ms_attention_key *key,
                            ms_attention_plan *out)
{
    builder b = { .maker = maker, .dnn = maker->dnn, .key = key, .plan = out, .next = VIRTUAL };
    *out = (ms_attention_plan){ .key = *key, .why = "it names no configuration" };
    b.dtype = key->dtype == MS_F16 ? MS_CUDNN_F16 : MS_CUDNN_BF16;
    if (key->backward) build_backward(&b);
    else build_forward(&b);
    ms_cudnn_descriptor graph = make(&b, MS_CUDNN_GRAPH);
    put(&b, graph, MS_CUDNN_GRAPH_OPERATIONS, MS_CUDNN_IS_DESCRIPTOR, b.operation_count,
        b.operations);
    if (maker->handle) put(&b, graph, MS_CUDNN_GRAPH_HANDLE, MS_CUDNN_IS_HANDLE, 1, &maker->handle);
    finish(&b, graph);
    if (!b.result) try_list(&b, graph, MS_CUDNN_BEST_FIRST);
    if (!b.result && !out->plan) try_list(&b, graph, MS_CUDNN_FALLBACK);
    if (b.result) explain(&b, b.result);
    if (out->plan) out->why[0] = '\0';
    else {
        char why[sizeof out->why];
        memcpy(why, out->why, sizeof why);
        uint32_t returned = out->returned;
        ms_attention_plan_free(maker->dnn, out);
        out->returned = returned;
        memcpy(out->why, why, sizeof why);
    }
}

void ms_attention_plan_free(const ms_cudnn *dnn, ms_attention_plan *plan)
{
    while (plan->made_count > 0) (void)dnn->release(plan->made[--plan->made_count]);
    plan->plan = NULL;
}

/* --------------------------------------------------------------------- execution */

/* The numbers live in *values as long as the call: cuDNN copies them. */
ms_cudnn_result ms_attention_plan_execute(const ms_cudnn *dnn, ms_cudnn_handle handle,
                                          const ms_attention_plan *plan,
                                          const ms_attention_operands *operands)
{
    const ms_attention_key *key = &plan->key;
    int64_t numbers[16], count = 0;
    void *addresses[16];
    float scale = operands->scale, hidden = -INFINITY, one = 1.0f;
    int32_t shift = (int32_t)(key->keys - key->queries);
    const struct {
        int64_t number;
        void *address;
        bool used;
    } others[] = { { LOG_SUM, operands->log_sum, true },
                   { OFFSET, operands->offset, key->backward },
                   { SUMS, operands->sums, key->fast },
                   { SCALE, &scale, true },
                   { HIDDEN, &hidden, key->causal },
                   { ONE, &one, key->backward },
                   { SHIFT, &shift, key->causal && shift != 0 } };
    for (int i = 0; i < (key->backward ? MS_ATTENTION_TENSORS : MS_ATTENTION_DOUT); i++) {
        numbers[count] = i + 1;
        addresses[count++] = operands->tensors[i];
    }
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        if (!others[i].used) continue;
        numbers[count] = others[i].number;
        addresses[count++] = others[i].address;
    }
    ms_cudnn_descriptor pack = NULL;
    ms_cudnn_result result = dnn->make(MS_CUDNN_PACK, &pack);
    if (result) return result;
    result = dnn->set(pack, MS_CUDNN_PACK_NUMBERS, MS_CUDNN_IS_INTEGER, count, numbers);
    if (!result)
        result = dnn->set(pack, MS_CUDNN_PACK_ADDRESSES, MS_CUDNN_IS_ADDRESS, count, addresses);
    if (!result)
        result =
            dnn->set(pack, MS_CUDNN_PACK_WORKSPACE, MS_CUDNN_IS_ADDRESS, 1, &operands->workspace);
    if (!result) result = dnn->finalize(pack);
    if (!result) result = dnn->execute(handle, plan->plan, pack);
    (void)dnn->release(pack);
    return result;
}
