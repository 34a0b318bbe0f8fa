/* attention.c: attention on the CPU, block of scores by block of scores.
 *
 * A block is 64 queries by 256 keys: its products are large enough for the library's kernels to run near their peak, its scores
 * (64 KiB) stay in cache, and of a causal triangle little is computed in vain. All arithmetic is in f32; 16-bit rows are widened into
 * scratch. Sums over keys go from the first block to the last, sums over queries from the first head's first block to the last head's
 * last: who computes which tile never shows in the result.
 */
#include "tensor/attention.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "tensor/cpu/attention.h"
#include "tensor/cpu/convert.h"

enum { QUERY_BLOCK = 64, KEY_BLOCK = 256, TILE_QUERIES = 256 };

typedef struct job {
    const ms_attention_args *args;
    const ms_attention_kernels *kernels;
    const ms_convert_kernels *convert;
    int64_t chunks;                      /* tiles of a head, forward */
    atomic_bool no_memory;
} job;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* --------------------------------------------------------------------------------------------------------------------------- rows */

/* f32 rows of one head, `row` apart. */
typedef struct rows { float *data; int64_t row; } rows;

static char *address(const job *j, const ms_heads *h, int64_t batch, int64_t head, int64_t time)
{
    return (char *)h->data + (size_t)(batch * h->batch + head * h->head + time * h->time) * ms_dtype_bytes((ms_dtype)j->args->dtype);
}

/* Where one row only is, its distance to the next says nothing. */
static rows direct(const job *j, const ms_heads *h, int64_t batch, int64_t head, int64_t time)
{
    int64_t width = j->args->width;
    return (rows){ .data = (float *)(void *)address(j, h, batch, head, time), .row = h->time < width ? width : h->time };
}

/* The rows themselves if they are f32, else widened into room, which moves on behind them. */
static rows widened(const job *j, const ms_heads *h, int64_t batch, int64_t head, int64_t time, int64_t count, float **room)
{
    if (j->args->dtype == MS_F32) return direct(j, h, batch, head, time);
    rows wide = { .data = *room, .row = j->args->width };
    for (int64_t i = 0; i < count; i++)
        j->convert->to_f32[j->args->dtype](wide.data + i * wide.row, address(j, h, batch, head, time + i), (size_t)wide.row);
    *room += count * wide.row;
    return wide;
}

static void narrow(const job *j, const ms_heads *h, int64_t batch, int64_t head, int64_t time, int64_t count, const float *from)
{
    for (int64_t i = 0; i < count; i++)
        j->convert->from_f32[j->args->dtype](address(j, h, batch, head, time + i), from + i * j->args->width, (size_t)j->args->width);
}

/* ----------------------------------------------------------------------------------------------------------------------- products */

/* c[m, n] (+)= a[m, k] b[n, k]^T */
static void times_transposed(const job *j, int64_t m, int64_t n, int64_t k, rows a, rows b, rows c)
{
    ms_gemm_shape s = { .m = m, .n = n, .k = k, .a_row = a.row, .b_row = b.row, .c_row = c.row, .b_transposed = true };
    ms_gemm_f32(j->args->gemm, &s, a.data, b.data, c.data);
}

/* c[m, n] (+)= a[m, k] b[k, n] */
static void times(const job *j, int64_t m, int64_t n, int64_t k, rows a, rows b, rows c, bool accumulate)
{
    ms_gemm_shape s = { .m = m, .n = n, .k = k, .a_row = a.row, .b_row = b.row, .c_row = c.row, .accumulate = accumulate };
    ms_gemm_f32(j->args->gemm, &s, a.data, b.data, c.data);
}

/* c[m, n] += a[k, m]^T b[k, n] */
static void transposed_times(const job *j, int64_t m, int64_t n, int64_t k, rows a, rows b, rows c)
{
    ms_gemm_shape s = { .m = m, .n = n, .k = k, .a_row = a.row, .b_row = b.row, .c_row = c.row, .a_transposed = true, .accumulate = true };
    ms_gemm_f32(j->args->gemm, &s, a.data, b.data, c.data);
}

/* How many keys the queries before `end` see. */
static int64_t keys_for(const ms_attention_args *a, int64_t end) { return a->causal ? a->keys - a->queries + end : a->keys; }

static int64_t padded(int64_t columns) { return (columns + 15) / 16 * 16; }

static ms_score_block block_at(const ms_attention_args *a, float *scores, int64_t query, int64_t count, int64_t key, int64_t columns)
{
    return (ms_score_block){ .scores = scores, .rows = count, .columns = columns, .row = padded(columns), .seen = a->causal ? keys_for(a, query + 1) - key : columns,
                             .step = a->causal, .scale = (float)a->scale };
}

/* ------------------------------------------------------------------------------------------------------------------------ forward */

static void forward_block(const job *j, float *scratch, int64_t batch, int64_t head, int64_t query)
{
    const ms_attention_args *a = j->args;
    int64_t count = least(QUERY_BLOCK, a->queries - query), limit = keys_for(a, query + count), group = head / (a->heads / a->groups), width = a->width;
    float *most = scratch, *total = most + QUERY_BLOCK, *scores = total + QUERY_BLOCK;
    rows out = { .data = scores + QUERY_BLOCK * KEY_BLOCK, .row = width };
    float *room = out.data + QUERY_BLOCK * width;
    rows q = widened(j, &a->q, batch, head, query, count, &room);
    for (int64_t i = 0; i < count; i++) {
        most[i] = -INFINITY;
        total[i] = 0.0f;
    }
    for (int64_t key = 0; key < limit; key += KEY_BLOCK) {
        int64_t columns = least(KEY_BLOCK, limit - key);
        float *key_room = room;
        rows k = widened(j, &a->k, batch, group, key, columns, &key_room), v = widened(j, &a->v, batch, group, key, columns, &key_room);
        rows p = { .data = scores, .row = padded(columns) };
        times_transposed(j, count, columns, width, q, k, p);
        ms_score_block block = block_at(a, scores, query, count, key, columns);
        j->kernels->softmax(&block, most, total, key == 0, out.data, width);
        times(j, count, width, columns, p, v, out, key > 0);
    }
    float *log_sum = a->log_sum != NULL ? a->log_sum + (batch * a->heads + head) * a->queries + query : NULL;
    j->kernels->finish(count, width, most, total, out.data, log_sum);
    narrow(j, &a->out, batch, head, query, count, out.data);
}

static void forward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    job *j = context;
    const ms_attention_args *a = j->args;
    int64_t chunk = tile % j->chunks, head = tile / j->chunks % a->heads, batch = tile / j->chunks / a->heads;
    size_t floats = 2 * QUERY_BLOCK + QUERY_BLOCK * KEY_BLOCK + (size_t)(2 * QUERY_BLOCK + 2 * KEY_BLOCK) * (size_t)a->width;
    float *scratch = ms_thread_scratch(thread, 0, floats * sizeof *scratch);
    if (scratch == NULL) {
        atomic_store(&j->no_memory, true);
        return;
    }
    int64_t end = least((chunk + 1) * TILE_QUERIES, a->queries);
    for (int64_t query = chunk * TILE_QUERIES; query < end; query += QUERY_BLOCK) forward_block(j, scratch, batch, head, query);
}

/* ----------------------------------------------------------------------------------------------------------------------- backward */

/* One group of a batch: keys, values and their gradients whole, f32. */
typedef struct group_rows { rows k, v, dk, dv; } group_rows;

/* The gradients of one block of queries, and what it adds to those of the keys and values. The scores are computed again. */
static void backward_block(const job *j, const group_rows *g, float *scratch, int64_t batch, int64_t head, int64_t query)
{
    const ms_attention_args *a = j->args;
    int64_t count = least(QUERY_BLOCK, a->queries - query), limit = keys_for(a, query + count), width = a->width;
    float *offset = scratch, *scores = offset + QUERY_BLOCK, *change = scores + QUERY_BLOCK * KEY_BLOCK, *room = change + QUERY_BLOCK * KEY_BLOCK;
    rows q = widened(j, &a->q, batch, head, query, count, &room), dout = widened(j, &a->dout, batch, head, query, count, &room);
    rows out = widened(j, &a->out, batch, head, query, count, &room);
    bool wide = a->dtype == MS_F32;
    rows dq = wide ? direct(j, &a->dq, batch, head, query) : (rows){ .data = room, .row = width };
    const float *log_sum = a->log_sum + (batch * a->heads + head) * a->queries + query;
    j->kernels->row_dots(count, width, dout.data, dout.row, out.data, out.row, offset);
    for (int64_t key = 0; key < limit; key += KEY_BLOCK) {
        int64_t columns = least(KEY_BLOCK, limit - key);
        rows k = { g->k.data + key * g->k.row, g->k.row }, v = { g->v.data + key * g->v.row, g->v.row };
        rows dk = { g->dk.data + key * g->dk.row, g->dk.row }, dv = { g->dv.data + key * g->dv.row, g->dv.row };
        rows p = { .data = scores, .row = padded(columns) }, d = { .data = change, .row = padded(columns) };
        ms_score_block block = block_at(a, scores, query, count, key, columns);
        times_transposed(j, count, columns, width, q, k, p);
        j->kernels->probabilities(&block, log_sum);
        transposed_times(j, columns, width, count, p, dout, dv);
        times_transposed(j, count, columns, width, dout, v, d);
        j->kernels->score_gradient(&block, change, offset);
        times(j, count, width, columns, d, k, dq, key > 0);
        transposed_times(j, columns, width, count, d, q, dk);
    }
    if (!wide) narrow(j, &a->dq, batch, head, query, count, dq.data);
}

/* Sums begin at zero: in place for f32, else in scratch. */
static rows sum_place(const job *j, const ms_heads *h, int64_t batch, int64_t group, float **room)
{
    const ms_attention_args *a = j->args;
    rows sums = { .data = *room, .row = a->width };
    if (a->dtype == MS_F32) sums = direct(j, h, batch, group, 0);
    else *room += a->keys * a->width;
    for (int64_t i = 0; i < a->keys; i++) memset(sums.data + i * sums.row, 0, (size_t)a->width * sizeof(float));
    return sums;
}

/* One group of one batch: all query heads that share its keys and values, so that nobody else adds to their gradients. */
static void backward_tile(void *context, uint32_t tile, ms_thread *thread)
{
    job *j = context;
    const ms_attention_args *a = j->args;
    int64_t group = tile % a->groups, batch = tile / a->groups, shared = a->heads / a->groups;
    bool wide = a->dtype == MS_F32;
    size_t floats = QUERY_BLOCK + 2 * QUERY_BLOCK * KEY_BLOCK + (wide ? 0 : (size_t)(4 * QUERY_BLOCK + 4 * a->keys) * (size_t)a->width);
    float *scratch = ms_thread_scratch(thread, 0, floats * sizeof *scratch);
    if (scratch == NULL) {
        atomic_store(&j->no_memory, true);
        return;
    }
    float *room = scratch + floats - (wide ? 0 : 4 * a->keys * a->width);
    group_rows g;
    g.k = widened(j, &a->k, batch, group, 0, a->keys, &room);
    g.v = widened(j, &a->v, batch, group, 0, a->keys, &room);
    g.dk = sum_place(j, &a->dk, batch, group, &room);
    g.dv = sum_place(j, &a->dv, batch, group, &room);
    for (int64_t head = group * shared; head < (group + 1) * shared; head++)
        for (int64_t query = 0; query < a->queries; query += QUERY_BLOCK) backward_block(j, &g, scratch, batch, head, query);
    if (wide) return;
    narrow(j, &a->dk, batch, group, 0, a->keys, g.dk.data);
    narrow(j, &a->dv, batch, group, 0, a->keys, g.dv.data);
}

/* -------------------------------------------------------------------------------------------------------------------------- tasks */

static ms_task_result attention_run(ms_run *run, const ms_attention_args *args, bool backward)
{
    ms_isa isa = ms_run_isa(run);
    job j = { .args = args, .kernels = ms_attention_kernels_for(isa), .convert = ms_convert_kernels_for(isa),
              .chunks = (args->queries + TILE_QUERIES - 1) / TILE_QUERIES };
    if (backward) ms_run_tiles(run, (uint32_t)(args->batches * args->groups), backward_tile, &j);
    else ms_run_tiles(run, (uint32_t)(args->batches * args->heads * j.chunks), forward_tile, &j);
    if (!atomic_load(&j.no_memory)) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY, "attention: no memory for the scratch space of %lld keys of width %lld", (long long)args->keys, (long long)args->width);
    return MS_TASK_FAILED;
}

static ms_task_result forward_run(ms_run *run, void *arguments) { return attention_run(run, arguments, false); }
static ms_task_result backward_run(ms_run *run, void *arguments) { return attention_run(run, arguments, true); }

const ms_task ms_cpu_attention_forward = { .name = "attention", .function = forward_run, .args_bytes = sizeof(ms_attention_args), .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_attention_backward = { .name = "attention gradient", .function = backward_run, .args_bytes = sizeof(ms_attention_args), .kind = MS_KIND_COMPUTE };
