/* attention_plan.c: attention by cuDNN: which calls it takes, and its plans, kept by shape as long
 * as the engine.
 *
 * cuDNN gets calls of bf16 or f16. There must be two queries at least. The width must be a multiple
 * of 8, up to 256, and rows must be aligned to 16 bytes. Our own kernels take everything else: f32,
 * calls with positions, a window or an offset of the queries, one query, a gradient of log_sum,
 * shapes that cuDNN refuses, and all calls where there is no cuDNN. Each task is counted by its way
 * (ms_attention_counts), and traces name the way.
 *
 * Backward is a graph whose sums have a fixed order. It keeps the gradients of all scores in its
 * workspace, 16 bits each. So a call that needs more than 1 GiB is cut into parts, over batches
 * and, where one batch is too large, over groups of heads; each part has the same shape, so one
 * plan serves all. Small parts are slow: at the end of each, multiprocessors wait for the last
 * tiles, up to a seventh of the time with six tiles for each (256 MiB). A call whose smallest part
 * needs more than 2 GiB goes to our own kernels.
 *
 * With ms.attention("fast", f), and numbers of queries and keys that are multiples of 64, backward
 * is another graph. It keeps no scores, and adds in f32 in an order that may change from run to
 * run. */
#include "ops/cuda/attention_plan.h"

#include <stdio.h>
#include <string.h>

#include "exec/state.h"
#include "ops/cuda/attention.h"
#include "ops/cuda/attention_graph.h"
#include "ops/cuda/kernels.h"
#include "ops/cuda/matmul.h"
#include "ops/cuda/plan_table.h"

/* A part takes no more memory than the first number, if it can be cut; one that cannot be cut and
 * takes more than the second one is not given to cuDNN. */
#define PART_BYTES ((size_t)1 << 30)
#define PART_BYTES_MOST ((size_t)2 << 30)
/* The greatest width that cuDNN takes on every GPU of compute capability 9 in both directions. */
enum { WIDTH_MOST = 256, ALIGNMENT = 16 };

/* The attention of an engine (MS_SLOT_ATTENTION), made at its first task. */
typedef struct attention_state {
    ms_cudnn dnn;
    ms_cudnn_handle handle; /* NULL: cuDNN cannot be used */
    ms_plan_table plans;    /* of ms_attention_plan */
    size_t part_bytes;
    ms_attention_counts counts;
} attention_state;

/* ----------------------------------------------------------------------- library */

static void state_free(ms_engine *engine, void *object)
{
    attention_state *state = object;
    for (size_t i = 0; i < state->plans.capacity; i++) {
        ms_attention_plan *plan = state->plans.plans[i];
        if (!plan) continue;
        ms_attention_plan_free(&state->dnn, plan);
        ms_release(ms_engine_context(engine), plan);
    }
    ms_release(ms_engine_context(engine), state->plans.plans);
    if (state->handle) (void)state->dnn.destroy(state->handle);
    ms_release(ms_engine_context(engine), state);
}

/* A library that the user has named must work; one that was only found need not. */
static ms_status open_library(ms_engine *engine, attention_state *state)
{
    ms_context *context = ms_engine_context(engine);
    char path[1024];
    bool is_asked_for = ms_cudnn_is_asked_for(context->os);
    ms_status status = ms_cudnn_load(context, &state->dnn, path, sizeof path);
    if (status) return is_asked_for ? status : MS_OK;
    ms_cudnn_result result = state->dnn.create(&state->handle);
    if (!result) return MS_OK;
    state->handle = NULL;
    if (!is_asked_for) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_IO, "cuDNN does not start: '%s': %s", path,
                          state->dnn.explain(result));
}

static ms_status state_of(ms_engine *engine, attention_state **out)
{
    void *memory = NULL;
    *out = ms_engine_get(engine, MS_SLOT_ATTENTION);
    if (*out) return MS_OK;
    ms_status status =
        ms_allocate(ms_engine_context(engine), sizeof(attention_state), "attention", &memory);
    if (status) return status;
    *out = memory;
    (*out)->part_bytes = PART_BYTES;
    (*out)->plans.key_bytes = sizeof(ms_attention_key);
    status = open_library(engine, *out);
    if (status) ms_release(ms_engine_context(engine), memory);
    else ms_engine_set(engine, MS_SLOT_ATTENTION, memory, state_free);
    return status;
}

ms_attention_counts ms_engine_attention_counts(const ms_engine *engine)
{
    const attention_state *state = ms_engine_get(engine, MS_SLOT_ATTENTION);
    return state ? state->counts : (ms_attention_counts){ 0 };
}

ms_gpu_scratch ms_gpu_scratch_of_stream(void)
{
    return (ms_gpu_scratch){ .products = MS_CUDA_WORKSPACE,
                             .attention = PART_BYTES,
                             .attention_most = PART_BYTES_MOST };
}

ms_status ms_cuda_attention_set_part_bytes(ms_engine *engine, size_t bytes)
{
    attention_state *state = NULL;
    ms_status status = state_of(engine, &state);
    if (!status) state->part_bytes = bytes;
    return status;
}

/* ------------------------------------------------------------------------- plans */

/* A refused shape has a plan as well, an empty one, so cuDNN is asked once. */
static ms_status plan_of(ms_engine *engine, attention_state *state, const ms_attention_key *key,
                         const ms_attention_plan **out)
{
    void *memory = NULL, **place = NULL;
    ms_status status = ms_plan_table_find(engine, &state->plans, key, &place);
    if (status) return status;
    if (!*place) {
        ms_attention_maker maker = { .dnn = &state->dnn, .handle = state->handle };
        status = ms_allocate(ms_engine_context(engine), sizeof(ms_attention_plan), "plan", &memory);
        if (status) return status;
        ms_attention_plan_make(&maker, key, memory);
        ms_plan_table_add(&state->plans, place, memory);
    }
    *out = *place;
    return MS_OK;
}

/* -------------------------------------------------------------------------- call */

/* A tensor of the call. */
typedef struct side {
    ms_heads heads;
    int64_t rows, times; /* heads or groups; queries or keys */
} side;

typedef struct call {
    const ms_attention_args *args;
    side sides[MS_ATTENTION_TENSORS];
    int used; /* so many of them */
    ms_attention_key key;
    int64_t parts_of_batches, parts_of_groups;
    size_t part_bytes;
    size_t offset_at, sums_at, log_sum_at, workspace_at, bytes; /* of the scratch memory */
} call;

static bool is_narrow(uint8_t dtype) { return dtype == MS_BF16 || dtype == MS_F16; }

/* Rows do not overlap, and all are aligned. */
static bool is_regular(const side *s, int64_t batches, int64_t width)
{
    int64_t grain = ALIGNMENT / 2; /* elements */
    const struct {
        int64_t count, stride;
    } dims[] = { { batches, s->heads.batch },
                 { s->rows, s->heads.head },
                 { s->times, s->heads.time } };
    if ((uintptr_t)s->heads.data % ALIGNMENT != 0) return false;
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
        if (dims[d].count > 1 && (dims[d].stride < width || dims[d].stride % grain != 0))
            return false;
    return true;
}

/* The sides in the order of attention_graph.h. */
static void list_sides(call *c, bool backward)
{
    const ms_attention_args *a = c->args;
    const ms_heads all[] = { a->q, a->k, a->v, a->out, a->dout, a->dq, a->dk, a->dv };
    c->used = backward ? MS_ATTENTION_TENSORS : MS_ATTENTION_DOUT;
    for (int i = 0; i < c->used; i++) {
        bool of_keys = i == MS_ATTENTION_K || i == MS_ATTENTION_V || i >= MS_ATTENTION_DK;
        c->sides[i] = (side){ .heads = all[i],
                              .rows = of_keys ? a->groups : a->heads,
                              .times = of_keys ? a->keys : a->queries };
    }
}

static bool is_for_cudnn(const call *c)
{
    const ms_attention_args *a = c->args;
    if (a->positions || a->window || a->dlog_sum || !is_narrow(a->dtype)) return false;
    if (a->causal && a->offset != a->keys - a->queries) return false;
    if (a->width % 8 != 0 || a->width > WIDTH_MOST || a->queries < 2 || a->queries > INT32_MAX
        || a->keys > INT32_MAX || a->batches * a->heads > INT32_MAX)
        return false;
    if (a->log_sum && (uintptr_t)a->log_sum % ALIGNMENT != 0) return false;
    for (int i = 0; i < c->used; i++)
        if (!is_regular(&c->sides[i], a->batches, a->width)) return false;
    return true;
}

/* ------------------------------------------------------------------------- parts */

static size_t round_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

/* Of the sums of a fast backward. */
static size_t bytes_of_sums(const call *c, int64_t batches, int64_t heads)
{
    return (size_t)(batches * heads * c->args->queries * ((c->args->width + 63) / 64 * 64))
           * sizeof(float);
}

/* Memory for so many batches and groups, without cuDNN's workspace beyond the gradients. */
static size_t bytes_of(const call *c, bool backward, int64_t batches, int64_t groups)
{
    const ms_attention_args *a = c->args;
    int64_t heads = a->heads / a->groups * groups;
    size_t bytes = 0;
    if (backward && c->key.fast) bytes += bytes_of_sums(c, batches, heads);
    else if (backward)
        bytes += (size_t)(batches * heads * ((a->queries + 63) / 64 * 64)
                          * ((a->keys + 127) / 128 * 128))
                 * 2;
    return bytes;
}

/* The greatest divisor of `whole` whose part is small enough, and begins at a place of log_sum that
 * is aligned; 1 if none is. */
static int64_t divisor(const call *c, bool backward, int64_t whole, bool of_groups)
{
    const ms_attention_args *a = c->args;
    for (int64_t n = whole; n > 1; n--) {
        int64_t rows = of_groups ? n * (a->heads / a->groups) : n * a->heads;
        if (whole % n == 0 && (n == whole || rows * a->queries % (ALIGNMENT / 4) == 0)
            && bytes_of(c, backward, of_groups ? 1 : n, of_groups ? n : a->groups) <= c->part_bytes)
            return n;
    }
    return 1;
}

/* False: parts would be too large, or not aligned. */
static bool cut(call *c, bool backward)
{
    const ms_attention_args *a = c->args;
    int64_t batches = divisor(c, backward, a->batches, false), groups = a->groups;
    if (batches == 1 && bytes_of(c, backward, 1, groups) > c->part_bytes)
        groups = divisor(c, backward, groups, true);
    int64_t rows = batches * (a->heads / a->groups) * groups;
    if (bytes_of(c, backward, batches, groups) > PART_BYTES_MOST) return false;
    if (rows != a->batches * a->heads && rows * a->queries % (ALIGNMENT / 4) != 0) return false;
    c->key.batches = batches;
    c->key.groups = groups;
    c->key.heads = a->heads / a->groups * groups;
    c->parts_of_batches = a->batches / batches;
    c->parts_of_groups = a->groups / groups;
    return true;
}

/* Strides of dimensions of one element do not matter, and are those without gaps. */
static void describe(call *c, bool backward)
{
    const ms_attention_args *a = c->args;
    ms_attention_key *key = &c->key;
    key->queries = a->queries;
    key->keys = a->keys;
    key->width = a->width;
    key->dtype = a->dtype;
    key->causal = a->causal;
    key->backward = backward;
    for (int i = 0; i < c->used; i++) {
        const side *s = &c->sides[i];
        int64_t rows = s->rows == a->groups ? key->groups : key->heads, *to = key->strides[i];
        to[2] = s->times == 1 ? rows * a->width : s->heads.time;
        to[1] = rows == 1 ? a->width : s->heads.head;
        to[0] = key->batches == 1 ? s->times * to[2] : s->heads.batch;
    }
}

static size_t take(call *c, size_t bytes)
{
    size_t at = c->bytes;
    c->bytes += round_up(bytes);
    return at;
}

static void lay_out(call *c, const ms_attention_plan *plan)
{
    const ms_attention_args *a = c->args;
    const ms_attention_key *key = &c->key;
    size_t column = (size_t)(key->batches * key->heads * key->queries) * sizeof(float);
    c->bytes = 0;
    c->workspace_at = take(c, plan->workspace_bytes);
    if (key->backward) c->offset_at = take(c, column);
    if (key->fast) c->sums_at = take(c, bytes_of_sums(c, key->batches, key->heads));
    if (!a->log_sum) c->log_sum_at = take(c, column);
}

/* ----------------------------------------------------------------------- launches */

/* The side's memory of a part, which begins at this batch and group. */
static void *part_of(const call *c, const side *s, int64_t batch, int64_t group)
{
    int64_t row = s->rows == c->args->groups ? group : group * (c->args->heads / c->args->groups);
    return (uint16_t *)s->heads.data + batch * s->heads.batch + row * s->heads.head;
}

static ms_cudnn_result run_part(ms_cuda_work *work, const attention_state *state, const call *c,
                                const ms_attention_plan *plan, char *scratch, int64_t batch,
                                int64_t group)
{
    const ms_attention_args *a = c->args;
    int64_t row = (batch * a->heads + group * (a->heads / a->groups)) * a->queries;
    ms_attention_operands operands = { .log_sum = a->log_sum
                                                      ? a->log_sum + row
                                                      : (float *)(void *)(scratch + c->log_sum_at),
                                       .offset = (float *)(void *)(scratch + c->offset_at),
                                       .sums = (float *)(void *)(scratch + c->sums_at),
                                       .workspace = scratch + c->workspace_at,
                                       .scale = (float)a->scale };
    for (int i = 0; i < c->used; i++) operands.tensors[i] = part_of(c, &c->sides[i], batch, group);
    if (c->key.fast)
        ms_cuda_clear(work, operands.sums, bytes_of_sums(c, c->key.batches, c->key.heads));
    return ms_attention_plan_execute(&state->dnn, state->handle, plan, &operands);
}

static void run(ms_cuda_work *work, const attention_state *state, call *c,
                const ms_attention_plan *plan)
{
    lay_out(c, plan);
    char *scratch = ms_cuda_scratch(work, c->bytes ? c->bytes : 1);
    if (!scratch) return;
    ms_cudnn_result result = state->dnn.set_stream(state->handle, ms_cuda_work_stream(work));
    for (int64_t i = 0; i < c->parts_of_batches && !result; i++)
        for (int64_t j = 0; j < c->parts_of_groups && !result; j++)
            result = run_part(work, state, c, plan, scratch, i * c->key.batches, j * c->key.groups);
    if (!result) return;
    char text[256] = "";
    state->dnn.last_error(text, sizeof text);
    ms_cuda_work_fail(work, MS_ERROR_TASK, "attention: cuDNN: %s%s%s", state->dnn.explain(result),
                      *text ? ": " : "", text);
}

/* The plan for a call in one of the ways of backward. */
static ms_status plan_for(ms_engine *engine, attention_state *state, call *c, bool backward,
                          bool fast, const ms_attention_plan **plan)
{
    c->key.fast = fast;
    if (!cut(c, backward)) return MS_OK;
    describe(c, backward);
    ms_status status = plan_of(engine, state, &c->key, plan);
    if (!status && !(*plan)->plan) *plan = NULL;
    return status;
}

/* The plan for a call; NULL: our own kernels take it. Where there is no fast way, it is the one of
 * every call. */
static ms_status find_plan(ms_engine *engine, attention_state **state, call *c, bool backward,
                           const ms_attention_plan **plan)
{
    ms_status status = state_of(engine, state);
    if (status || !(*state)->handle) return status;
    c->part_bytes = (*state)->part_bytes;
    if (!is_for_cudnn(c)) return MS_OK;
    const ms_attention_args *a = c->args;
    if (backward && a->fast && a->queries % 64 == 0 && a->keys % 64 == 0)
        status = plan_for(engine, *state, c, backward, true, plan);
    if (!status && !*plan) status = plan_for(engine, *state, c, backward, false, plan);
    return status;
}

/* A call of our own kernels that cuDNN, which is there, might have made faster; with one query it
 * would not be. */
static void count_own(attention_state *state, const ms_attention_args *args)
{
    state->counts.own++;
    if (state->handle && args->queries > 1) state->counts.refused++;
}

static bool attend(ms_cuda_work *work, const ms_attention_args *args, bool backward)
{
    ms_engine *engine = ms_cuda_work_engine(work);
    attention_state *state = NULL;
    const ms_attention_plan *plan = NULL;
    call c;
    memset(&c, 0, sizeof c);
    c.args = args;
    list_sides(&c, backward);
    ms_status status = find_plan(engine, &state, &c, backward, &plan);
    if (status) {
        ms_cuda_work_fail(work, status, "%s", ms_engine_context(engine)->error.message);
        return true;
    }
    if (!plan) {
        count_own(state, args);
        ms_cuda_work_trace(work,
                           backward ? "attention gradient, own kernels" : "attention, own kernels");
        return false;
    }
    state->counts.cudnn++;
    if (plan->key.fast) state->counts.fast++;
    ms_cuda_work_trace(work, plan->key.fast ? "attention gradient, cuDNN, fast"
                             : backward     ? "attention gradient, cuDNN"
                                            : "attention, cuDNN");
    run(work, state, &c, plan);
    return true;
}

bool ms_cuda_attention_forward_by_cudnn(ms_cuda_work *work, const ms_attention_args *args)
{
    return attend(work, args, false);
}
bool ms_cuda_attention_backward_by_cudnn(ms_cuda_work *work, const ms_attention_args *args)
{
    return attend(work, args, true);
}
