/* attention.cu: attention, tile of scores by tile of scores, for every shape, in f32.
 *
 * 256 threads compute a tile of 64 by 64: the thread (x, y) of 16 by 16 has rows 4 y .. 4 y + 3,
 * and of the scores columns x, x + 16, x + 32, x + 48, of a result columns 4 x .. 4 x + 3 of
 * each 64. So a row of scores belongs to 16 neighbouring lanes. Operands come through shared memory
 * in pieces of 64 columns, whatever the width. Sums over keys and over queries go from the first
 * tile to the last, those over the heads of a group from the first head on. */
#include "ops/cuda/attention.h"

#include "ops/cuda/tile.h"

enum { TILE = MS_TILE, ROW = MS_TILE_ROW };
static_assert(MS_CUDA_ATTENTION_SHARED == 3 * TILE * ROW * sizeof(float), "three tiles");

struct alignas(8) four_halves {
    uint32_t low, high;
};

/* ---------------------------------------------------------------------- tiles */

/* Up to 64 rows of a head. */
struct rows {
    const char *first;
    int64_t bytes; /* from one row to the next */
    int64_t count, width;
    uint8_t dtype;
};

MS_DEVICE int64_t item_of(uint8_t dtype) { return dtype == MS_F32 ? 4 : 2; }
MS_DEVICE int64_t offset_in(const ms_heads &h, int64_t batch, int64_t head, int64_t time)
{
    return batch * h.batch + head * h.head + time * h.time;
}
MS_DEVICE rows rows_of(const ms_attention_args &a, const ms_heads &h, int64_t batch, int64_t head,
                       int64_t time, int64_t times)
{
    rows r;
    r.first =
        static_cast<const char *>(h.data) + offset_in(h, batch, head, time) * item_of(a.dtype);
    r.bytes = h.time * item_of(a.dtype);
    r.count = times - time < TILE ? times - time : (int64_t)TILE;
    r.width = a.width;
    r.dtype = a.dtype;
    return r;
}

/* Columns column .. column + 63 of the rows, into a tile of 64 rows; 0 where there are none. */
MS_DEVICE void load(const rows &r, int64_t column, float *tile)
{
    for (int at = THREAD_X; at < TILE * 8; at += THREADS_X) {
        int row = at / 8, part = at % 8 * 8;
        float x[8];
        ms_get8(r.first + row * r.bytes, column + part, row < r.count ? r.width : 0, r.dtype, x);
        ms_four *to = reinterpret_cast<ms_four *>(tile + row * ROW + part);
        to[0] = ms_four{ { x[0], x[1], x[2], x[3] } };
        to[1] = ms_four{ { x[4], x[5], x[6], x[7] } };
    }
}

/* sums[i][m] += row 4 y + i of p times column 4 x + m of b. */
MS_DEVICE_SHARED void multiply_columns(const float *p, const float *b, float sums[4][4])
{
    const float *left = p + THREAD_X / 16 * 4 * ROW, *right = b + THREAD_X % 16 * 4;
    for (int d = 0; d < TILE; d += 4) {
        ms_four l[4];
        MS_UNROLL for (int i = 0; i < 4; i++) l[i] = ms_read_four(left + i * ROW + d);
        MS_UNROLL for (int k = 0; k < 4; k++)
        {
            ms_four r = ms_read_four(right + (d + k) * ROW);
            MS_UNROLL for (int i = 0; i < 4; i++) MS_UNROLL for (int m = 0; m < 4; m++)
                sums[i][m] += l[i].of[k] * r.of[m];
        }
    }
}

/* The shared memory of a block: two operands, and probabilities or their gradients. */
struct room {
    float *a, *b, *p;
};
MS_DEVICE room room_of(float *shared)
{
    room r = { shared, shared + TILE * ROW, shared + 2 * TILE * ROW };
    return r;
}

/* The products of all rows of both, over the whole width. */
MS_DEVICE void multiply(const rows &left, const rows &right, const room &r, float sums[4][4])
{
    MS_UNROLL for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = 0.0f;
    for (int64_t column = 0; column < left.width; column += TILE) {
        int64_t depth = left.width - column < TILE ? left.width - column : (int64_t)TILE;
        load(left, column, r.a);
        load(right, column, r.b);
        ms_barrier();
        ms_multiply_tiles(r.a, r.b, (int)depth, sums);
        ms_barrier();
    }
}

/* sums += p times `columns` columns of `right` from `column` on. What is in p is seen by all
 * threads after the first barrier. */
template <int columns>
MS_DEVICE void add_product(const rows &right, int64_t column, const room &r,
                           float sums[columns / TILE][4][4])
{
    MS_UNROLL for (int c = 0; c < columns / TILE; c++)
    {
        if (column + c * TILE < right.width) {
            load(right, column + c * TILE, r.b);
            ms_barrier();
            multiply_columns(r.p, r.b, sums[c]);
            ms_barrier();
        }
    }
}

MS_DEVICE_SHARED void put_tile(const float x[4][4], float *tile)
{
    float *to = tile + THREAD_X / 16 * 4 * ROW + THREAD_X % 16;
    MS_UNROLL for (int i = 0; i < 16; i++) to[i / 4 * ROW + i % 4 * 16] = x[i / 4][i % 4];
}

/* What this thread has put there. */
MS_DEVICE_SHARED void get_tile(const float *tile, float x[4][4])
{
    const float *from = tile + THREAD_X / 16 * 4 * ROW + THREAD_X % 16;
    MS_UNROLL for (int i = 0; i < 16; i++) x[i / 4][i % 4] = from[i / 4 * ROW + i % 4 * 16];
}

MS_DEVICE four_halves narrow(const float x[4], uint8_t dtype)
{
    if (dtype == MS_BF16) return four_halves{ ms_bf16_pair(x[0], x[1]), ms_bf16_pair(x[2], x[3]) };
    return four_halves{ ms_f16_pair(x[0], x[1]), ms_f16_pair(x[2], x[3]) };
}

/* Elements i .. i + 3 of a row, as far as there are `left` of them. */
MS_DEVICE void write_four(void *row, int64_t i, int64_t left, uint8_t dtype, const float x[4])
{
    char *to = static_cast<char *>(row) + i * item_of(dtype);
    bool whole = left >= 4 && (uintptr_t)to % (4 * item_of(dtype)) == 0;
    if (whole && dtype == MS_F32)
        *reinterpret_cast<ms_four *>(to) = ms_four{ { x[0], x[1], x[2], x[3] } };
    else if (whole) *reinterpret_cast<four_halves *>(to) = narrow(x, dtype);
    else MS_UNROLL for (int k = 0; k < 4; k++)
        {
            if (k >= left) continue;
            ms_write_float(to, k, dtype, x[k]);
        }
}

/* Rounds a block's result, rows from `time` on, to a tensor. */
template <int columns>
MS_DEVICE void write_tile(const ms_attention_args &a, const ms_heads &h, uint8_t dtype,
                          int64_t batch, int64_t head, int64_t time, int64_t times, int64_t column,
                          const float sums[columns / TILE][4][4])
{
    int64_t row = time + THREAD_X / 16 * 4;
    MS_UNROLL for (int i = 0; i < 4; i++)
    {
        if (row + i >= times) continue;
        char *to =
            static_cast<char *>(h.data) + offset_in(h, batch, head, row + i) * item_of(dtype);
        MS_UNROLL for (int c = 0; c < columns / TILE; c++)
        {
            int64_t at = column + c * TILE + THREAD_X % 16 * 4;
            write_four(to, at, a.width - at, dtype, sums[c][i]);
        }
    }
}

/* ---------------------------------------------------------------------- masks */

MS_DEVICE bool is_wrong(const ms_attention_args &a, int64_t query, int64_t position)
{
    return position < 0 || (!a.shifted && position > query);
}
/* The first key that a query may see. A position that is refused counts as the greatest. */
MS_DEVICE int64_t begin_of(const ms_attention_args &a, int64_t batch, int64_t query)
{
    int64_t begin = 0, place = a.offset + query;
    if (query >= a.queries) return 0;
    if (a.positions != NULL) {
        int64_t position = a.positions[batch * a.queries + query];
        begin = is_wrong(a, query, position) || position > place ? 0 : place - position;
    }
    int64_t window = a.window > 0 ? place + 1 - a.window : 0;
    return window > begin ? window : begin;
}
/* A query sees the keys before this one. */
MS_DEVICE int64_t end_of(const ms_attention_args &a, int64_t query)
{
    int64_t end = a.causal ? a.offset + query + 1 : a.keys;
    if (end < 0) end = 0;
    return end < a.keys ? end : a.keys;
}

struct earlier {
    template <class T> MS_DEVICE_MEMBER T operator()(T a, T b) const { return b < a ? b : a; }
};
/* The first key that any of the 64 queries from `first` on sees. */
MS_DEVICE int64_t earliest_of(const ms_attention_args &a, int64_t batch, int64_t first)
{
    MS_SHARED(int64_t, shared, 32);
    /* The first of the queries has the earliest window. */
    if (a.positions == NULL) return begin_of(a, batch, first);
    int64_t query = first + THREAD_X % TILE;
    return ms_block_join(begin_of(a, batch, query < a.queries ? query : a.queries - 1), shared,
                         earlier());
}

/* Notes positions outside of 0 .. the index of their query, or, where queries are shifted, below
 * 0. */
MS_KERNEL_FREE(attention_positions, ms_cuda_attention_call, 256)
{
    const ms_attention_args &a = args.a;
    for (int64_t i = GRID_FIRST; i < a.batches * a.queries; i += GRID_STEP) {
        int64_t query = i % a.queries, position = a.positions[i];
        if (is_wrong(a, query, position))
            ms_note_fault(args.fault, i, query, i / a.queries, position);
    }
}

/* -------------------------------------------------------------------- forward */

/* A row's value in all of its 16 lanes. */
template <class Join> MS_DEVICE float join_row(float value, Join join)
{
    MS_UNROLL for (int mask = 8; mask > 0; mask /= 2) value = join(value, ms_warp_xor(value, mask));
    return value;
}
struct larger {
    MS_DEVICE_MEMBER float operator()(float a, float b) const { return b > a ? b : a; }
};

/* e^x of the difference of two scores; without a score before, there is nothing to keep. */
MS_DEVICE float shrinkage(float before, float now)
{
    return before == -ms_infinity() ? 0.0f : expf(before - now);
}

/* Extends the softmax by the scores of one tile, whose first key is `key`: finds the new greatest
 * scores, scales what was summed before, and puts the exponentials into p. */
template <int columns>
MS_DEVICE void extend(const ms_attention_args &a, int64_t query, const int64_t begins[4],
                      int64_t key, float scores[4][4], float most[4], float total[4],
                      float out[columns / TILE][4][4])
{
    float scale = (float)a.scale;
    MS_UNROLL for (int i = 0; i < 4; i++)
    {
        int64_t at = key + THREAD_X % 16, end = end_of(a, query + i);
        float before = most[i], sum = 0.0f, *row = scores[i];
        MS_UNROLL for (int j = 0; j < 4; j++)
        {
            bool seen = at + 16 * j >= begins[i] && at + 16 * j < end;
            row[j] = seen ? row[j] * scale : -ms_infinity();
            most[i] = larger()(most[i], row[j]);
        }
        most[i] = join_row(most[i], larger());
        float kept = shrinkage(before, most[i]);
        MS_UNROLL for (int j = 0; j < 4; j++)
        {
            row[j] = row[j] == -ms_infinity() ? 0.0f : expf(row[j] - most[i]);
            sum += row[j];
        }
        total[i] = total[i] * kept + join_row(sum, ms_plus());
        MS_UNROLL for (int c = 0; c < columns / TILE; c++) MS_UNROLL for (int m = 0; m < 4; m++)
            out[c][i][m] *= kept;
    }
}

/* Of a query that has seen no key, the result is 0. */
MS_DEVICE float inverse_of(float total) { return total == 0.0f ? 0.0f : 1.0f / total; }
MS_DEVICE float log_sum_of(float most, float total)
{
    return total == 0.0f ? -ms_infinity() : most + logf(total);
}

/* Divides by the totals. Blocks of the first part write the logarithms. */
template <int columns>
MS_DEVICE void finish(const ms_attention_args &a, int64_t head, int64_t query, int64_t column,
                      const float most[4], const float total[4], float out[columns / TILE][4][4])
{
    MS_UNROLL for (int i = 0; i < 4; i++)
    {
        float inverse = inverse_of(total[i]);
        MS_UNROLL for (int c = 0; c < columns / TILE; c++) MS_UNROLL for (int m = 0; m < 4; m++)
            out[c][i][m] *= inverse;
        if (a.log_sum != NULL && column == 0 && THREAD_X % 16 == 0 && query + i < a.queries)
            a.log_sum[head * a.queries + query + i] = log_sum_of(most[i], total[i]);
    }
}

/* What a block works on. In causal attention the last queries see the most keys, and the first keys
 * are seen by the most queries: the longest blocks come first. */
struct place {
    int64_t batch, head, first, column;
};
MS_DEVICE place place_of(const ms_cuda_attention_call &args, int64_t heads, int64_t columns,
                         bool last_first)
{
    int64_t at = BLOCK_X;
    place p;
    p.first = (last_first ? args.tiles - 1 - at % args.tiles : at % args.tiles) * TILE;
    at /= args.tiles;
    p.column = at % args.parts * columns;
    at /= args.parts;
    p.head = at % heads;
    p.batch = at / heads;
    return p;
}

/* 64 queries of a head, and `columns` columns of their result. */
template <int columns> MS_DEVICE void forward(const ms_cuda_attention_call &args, float *shared)
{
    const ms_attention_args &a = args.a;
    const place p = place_of(args, a.heads, columns, true);
    const room r = room_of(shared);
    const rows q = rows_of(a, a.q, p.batch, p.head, p.first, a.queries);
    int64_t group = p.head / (a.heads / a.groups), query = p.first + THREAD_X / 16 * 4, begins[4];
    float most[4], total[4], out[columns / TILE][4][4];
    MS_UNROLL for (int i = 0; i < 4; i++)
    {
        most[i] = -ms_infinity();
        total[i] = 0.0f;
        begins[i] = begin_of(a, p.batch, query + i);
        MS_UNROLL for (int c = 0; c < columns / TILE; c++) MS_UNROLL for (int m = 0; m < 4; m++)
            out[c][i][m] = 0.0f;
    }
    int64_t end = end_of(a, p.first + q.count - 1);
    for (int64_t key = earliest_of(a, p.batch, p.first) / TILE * TILE; key < end; key += TILE) {
        float scores[4][4];
        multiply(q, rows_of(a, a.k, p.batch, group, key, a.keys), r, scores);
        extend<columns>(a, query, begins, key, scores, most, total, out);
        put_tile(scores, r.p);
        add_product<columns>(rows_of(a, a.v, p.batch, group, key, a.keys), p.column, r, out);
    }
    finish<columns>(a, p.batch * a.heads + p.head, query, p.column, most, total, out);
    write_tile<columns>(a, a.out, a.dtype, p.batch, p.head, p.first, a.queries, p.column, out);
}

#define FORWARD(kernel, columns)                                     \
    kernel(attention_forward_##columns, ms_cuda_attention_call, 256) \
    {                                                                \
        MS_SHARED_BYTES(float, shared);                              \
        forward<columns>(args, shared);                              \
    }
FORWARD(MS_KERNEL_PAIRED, 64)
FORWARD(MS_KERNEL_PAIRED, 128)
FORWARD(MS_KERNEL, 256)

/* ------------------------------------------------------------------ one query */

/* A lane has 8 columns; as many lanes as the width needs, a power of two, share a key. */
MS_DEVICE int lanes_of(int64_t width)
{
    int lanes = 1;
    while (lanes * 8 < width) lanes *= 2;
    return lanes;
}

/* Each group of lanes walks the keys in strides of the groups: its greatest score, its sum of
 * exponentials, and its part of the result. */
MS_DEVICE void walk_keys(const ms_attention_args &a, int64_t batch, int64_t head, int lanes,
                         float *most, float *total, float out[8])
{
    int64_t group = head / (a.heads / a.groups), item = item_of(a.dtype);
    int64_t column = THREAD_X % lanes * 8, groups = THREADS_X / lanes;
    const char *q = static_cast<const char *>(a.q.data) + offset_in(a.q, batch, head, 0) * item,
               *k = static_cast<const char *>(a.k.data) + offset_in(a.k, batch, group, 0) * item,
               *v = static_cast<const char *>(a.v.data) + offset_in(a.v, batch, group, 0) * item;
    float query[8], x[8];
    ms_get8(q, column, a.width, a.dtype, query);
    MS_UNROLL for (int i = 0; i < 8; i++) out[i] = 0.0f;
    *most = -ms_infinity();
    *total = 0.0f;
    int64_t end = end_of(a, 0);
    for (int64_t first = begin_of(a, batch, 0); first < end; first += groups) {
        int64_t key = first + THREAD_X / lanes;
        bool there = key < end;
        float score = 0.0f;
        ms_get8(k + key * a.k.time * item, column, there ? a.width : 0, a.dtype, x);
        MS_UNROLL for (int i = 0; i < 8; i++) score += query[i] * x[i];
        for (int mask = lanes / 2; mask > 0; mask /= 2) score += ms_warp_xor(score, mask);
        score = there ? score * (float)a.scale : -ms_infinity();
        float now = larger()(*most, score), kept = shrinkage(*most, now),
              p = there ? expf(score - now) : 0.0f;
        ms_get8(v + key * a.v.time * item, column, there ? a.width : 0, a.dtype, x);
        MS_UNROLL for (int i = 0; i < 8; i++) out[i] = out[i] * kept + p * x[i];
        *total = *total * kept + p;
        *most = now;
    }
}

/* The one query of a head, with kept keys: the groups' parts are joined in their order. */
MS_KERNEL_PAIRED(attention_one, ms_cuda_attention_call, 256)
{
    MS_SHARED(float, parts, 256 * 8);
    MS_SHARED(float, factors, 256);
    MS_SHARED(float, sums, 256);
    MS_SHARED(float, joined, 32);
    const ms_attention_args &a = args.a;
    int64_t head = BLOCK_X % a.heads, batch = BLOCK_X / a.heads;
    int lanes = lanes_of(a.width), group = THREAD_X / lanes;
    float most, total, out[8];
    walk_keys(a, batch, head, lanes, &most, &total, out);
    float top = ms_block_join(most, joined, larger());
    if (THREAD_X % lanes == 0) {
        factors[group] = shrinkage(most, top);
        sums[group] = total;
    }
    MS_UNROLL for (int i = 0; i < 8; i++) parts[THREAD_X * 8 + i] = out[i];
    ms_barrier();
    float sum = 0.0f, result = 0.0f;
    for (int g = 0; g < THREADS_X / lanes; g++) {
        sum += factors[g] * sums[g];
        if (THREAD_X < a.width) result += factors[g] * parts[g * lanes * 8 + THREAD_X];
    }
    if (THREAD_X < a.width) {
        result *= inverse_of(sum);
        ms_write_float(a.out.data, offset_in(a.out, batch, head, 0) + THREAD_X, a.dtype, result);
    }
    if (THREAD_X == 0 && a.log_sum != NULL) a.log_sum[BLOCK_X] = log_sum_of(top, sum);
}

/* ------------------------------------------------------------------- backward */

/* offset = the dot product of dout and out for each query, less the gradient of log_sum: a warp has
 * one. A query that sees no key has none. */
MS_KERNEL(attention_offsets, ms_cuda_attention_call, 256)
{
    const ms_attention_args &a = args.a;
    int64_t all = a.batches * a.heads * a.queries;
    for (int64_t row = GRID_FIRST / MS_WARP; row < all; row += GRID_STEP / MS_WARP) {
        int64_t query = row % a.queries, head = row / a.queries % a.heads,
                batch = row / a.queries / a.heads;
        const char *g = static_cast<const char *>(a.dout.data)
                        + offset_in(a.dout, batch, head, query) * item_of(a.dtype);
        const char *out = static_cast<const char *>(a.out.data)
                          + offset_in(a.out, batch, head, query) * item_of(a.dtype);
        float sum = 0.0f;
        for (int64_t i = LANE; i < a.width; i += MS_WARP)
            sum += ms_read_float(g, i, a.dtype) * ms_read_float(out, i, a.dtype);
        sum = ms_warp_join(sum, ms_plus());
        if (LANE != 0) continue;
        if (a.dlog_sum != NULL) sum -= a.dlog_sum[row];
        args.offset[row] = a.log_sum[row] == -ms_infinity() ? 0.0f : sum;
    }
}

/* The scores, which wait in p while registers are needed for the changes of their probabilities. */
MS_DEVICE void multiply_both(const rows &left, const rows &right, const rows &left_change,
                             const rows &right_change, const room &r, float scores[4][4],
                             float changes[4][4])
{
    multiply(left, right, r, scores);
    put_tile(scores, r.p);
    multiply(left_change, right_change, r, changes);
    get_tile(r.p, scores);
}

/* A score becomes its probability, the change of the probability the gradient of the score. */
MS_DEVICE void turn_into_gradient(const ms_cuda_attention_call &args, int64_t row, bool seen,
                                  float *score, float *change)
{
    float scale = (float)args.a.scale;
    float p = seen ? expf(*score * scale - args.a.log_sum[row]) : 0.0f;
    *change = seen ? p * (*change - args.offset[row]) * scale : 0.0f;
    *score = p;
}

/* A key's place in the tile that is counted from 0, or the nearest end of the tile. */
MS_DEVICE int place_in_tile(int64_t key) { return key < 0 ? 0 : key < TILE ? (int)key : TILE; }

/* 64 queries of a head, and `columns` columns of their gradient. */
template <int columns>
MS_DEVICE void queries_back(const ms_cuda_attention_call &args, float *shared)
{
    const ms_attention_args &a = args.a;
    const place p = place_of(args, a.heads, columns, true);
    const room r = room_of(shared);
    const rows q = rows_of(a, a.q, p.batch, p.head, p.first, a.queries),
               g = rows_of(a, a.dout, p.batch, p.head, p.first, a.queries);
    int64_t group = p.head / (a.heads / a.groups), query = p.first + THREAD_X / 16 * 4;
    float sums[columns / TILE][4][4];
    MS_UNROLL for (int i = 0; i < columns / 4; i++) sums[i / 16][i / 4 % 4][i % 4] = 0.0f;
    int64_t end = end_of(a, p.first + q.count - 1);
    for (int64_t key = earliest_of(a, p.batch, p.first) / TILE * TILE; key < end; key += TILE) {
        const rows k = rows_of(a, a.k, p.batch, group, key, a.keys);
        float scores[4][4], changes[4][4];
        multiply_both(q, k, g, rows_of(a, a.v, p.batch, group, key, a.keys), r, scores, changes);
        MS_UNROLL for (int i = 0; i < 4; i++)
        {
            int64_t row = (p.batch * a.heads + p.head) * a.queries + query + i;
            int begin = place_in_tile(begin_of(a, p.batch, query + i) - key),
                finish = query + i < a.queries ? place_in_tile(end_of(a, query + i) - key) : 0;
            MS_UNROLL for (int j = 0; j < 4; j++)
            {
                int at = THREAD_X % 16 + 16 * j;
                bool seen = at >= begin && at < finish;
                turn_into_gradient(args, row, seen, &scores[i][j], &changes[i][j]);
            }
        }
        put_tile(changes, r.p);
        add_product<columns>(k, p.column, r, sums);
    }
    write_tile<columns>(a, a.dq, a.dtype, p.batch, p.head, p.first, a.queries, p.column, sums);
}

/* Adds what 64 queries of one head give to the gradients of 64 keys and values. Rows of the tiles
 * are keys, columns are queries. */
template <int columns>
MS_DEVICE void add_queries(const ms_cuda_attention_call &args, const place &p, const room &r,
                           int64_t head, int64_t query, float dk[columns / TILE][4][4],
                           float dv[columns / TILE][4][4])
{
    const ms_attention_args &a = args.a;
    const rows q = rows_of(a, a.q, p.batch, head, query, a.queries),
               g = rows_of(a, a.dout, p.batch, head, query, a.queries);
    float scores[4][4], changes[4][4];
    multiply_both(rows_of(a, a.k, p.batch, p.head, p.first, a.keys), q,
                  rows_of(a, a.v, p.batch, p.head, p.first, a.keys), g, r, scores, changes);
    MS_UNROLL for (int j = 0; j < 4; j++)
    {
        int64_t at = query + THREAD_X % 16 + 16 * j, begin = begin_of(a, p.batch, at),
                finish = end_of(a, at), row = (p.batch * a.heads + head) * a.queries + at;
        MS_UNROLL for (int i = 0; i < 4; i++)
        {
            int64_t key = p.first + THREAD_X / 16 * 4 + i;
            bool seen = at < a.queries && key >= begin && key < finish;
            turn_into_gradient(args, row, seen, &scores[i][j], &changes[i][j]);
        }
    }
    put_tile(scores, r.p);
    add_product<columns>(g, p.column, r, dv);
    put_tile(changes, r.p);
    add_product<columns>(q, p.column, r, dk);
}

/* 64 keys and values of a group of heads, and `columns` columns of their gradients. */
template <int columns> MS_DEVICE void keys_back(const ms_cuda_attention_call &args, float *shared)
{
    const ms_attention_args &a = args.a;
    const place p = place_of(args, a.groups, columns, false);
    const room r = room_of(shared);
    int64_t each = a.heads / a.groups, before = a.causal ? p.first - a.offset : 0;
    float dk[columns / TILE][4][4], dv[columns / TILE][4][4];
    MS_UNROLL for (int i = 0; i < columns / 4; i++)
    {
        dk[i / 16][i / 4 % 4][i % 4] = 0.0f;
        dv[i / 16][i / 4 % 4][i % 4] = 0.0f;
    }
    /* Earlier queries see none of these keys, and later ones than `end` neither. */
    int64_t first = before > 0 ? before / TILE * TILE : 0, end = a.queries;
    if (a.window > 0 && before + TILE - 1 + a.window < end) end = before + TILE - 1 + a.window;
    for (int64_t head = p.head * each; head < (p.head + 1) * each; head++)
        for (int64_t query = first; query < end; query += TILE)
            if (earliest_of(a, p.batch, query) < p.first + TILE)
                add_queries<columns>(args, p, r, head, query, dk, dv);
    write_tile<columns>(a, a.dk, a.dtype, p.batch, p.head, p.first, a.keys, p.column, dk);
    write_tile<columns>(a, a.dv, a.dtype, p.batch, p.head, p.first, a.keys, p.column, dv);
}

#define BACKWARD(kernel, of, columns)                               \
    kernel(attention_##of##_##columns, ms_cuda_attention_call, 256) \
    {                                                               \
        MS_SHARED_BYTES(float, shared);                             \
        of##_back<columns>(args, shared);                           \
    }
BACKWARD(MS_KERNEL_PAIRED, queries, 64)
BACKWARD(MS_KERNEL_PAIRED, queries, 128)
BACKWARD(MS_KERNEL_PAIRED, keys, 64)
BACKWARD(MS_KERNEL, keys, 128)
