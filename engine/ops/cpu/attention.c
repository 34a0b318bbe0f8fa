/* attention.c: attention on the CPU, block of scores by block of scores.
 *
 * A block is 64 queries (the lanes of vectors) by up to 64 keys: its scores (16 KiB) stay in the
 * first cache. Where the diagonal of causal attention crosses a block, it is cut into parts of 16
 * keys, which leave out the vectors of queries that see none of them. Operands are packed first, as
 * f32 or as pairs of bf16; scores, softmax and all sums are f32. Where several documents are in a
 * row, or a window is given, blocks of keys before the first keys of all queries of a block are
 * left out, and the others are cut and masked as on the diagonal. Sums over keys go from the first
 * to the last, sums over queries from the first head's first block to the last head's last: who
 * computes which tile never shows in the result.
 *
 * A kernel of another device may block the work in another way. It must take tensors by their
 * strides, write log_sum as [batch, heads, queries], see in causal attention the keys that
 * ms_attention_args says, refuse wrong positions before it follows them, keep its scratch from
 * growing with queries times keys, and add dk and dv in an order that does not depend on
 * timing. */
#include "ops/cpu/attention.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "ops/attention.h"

/* A block of keys that is cut by the diagonal is computed in parts of 16 keys: smaller ones would
 * leave too few sums for a product, larger ones would compute more scores that are hidden. A tile
 * has four blocks of queries, which share the packing of keys and values. */
enum { LANES = MS_QUERY_LANES, KEY_BLOCK = 64, KEY_PART = 16, TILE_BLOCKS = 4 };

/* What the tiles of one task share; constant while they run, but for no_memory. `wide` is a
 * multiple of 16, as the products of units take columns by 16; what is padded is 0 and adds
 * nothing. */
typedef struct job {
    const ms_attention_args *args;
    const ms_attention_kernels *kernels;
    bool pairs;          /* of bf16, else f32 */
    int64_t wide, units; /* the width, and how many units of it, with what is padded */
    int64_t chunks;      /* tiles of a head, forward */
    atomic_bool no_memory;
} job;

/* `padded`: n rounded up to a multiple of `to`. */
static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Elements as units. `elements` is even where operands are pairs. */
static int64_t in_units(const job *j, int64_t elements)
{
    return j->pairs ? elements / 2 : elements;
}

/* The first element of a row of `width` numbers: of query, key or value `time` of one head. Strides
 * are in elements of the dtype. */
static void *address(const job *j, const ms_heads *h, int64_t batch, int64_t head, int64_t time)
{
    return (char *)h->data
           + (size_t)(batch * h->batch + head * h->head + time * h->time)
                 * ms_dtype_bytes((ms_dtype)j->args->dtype);
}

/* -------------------------------------------------------------------- packs */

/* Takes `floats` numbers from the start of the remaining scratch. forward_floats and
 * backward_floats state the sum of what is taken. Everything that a tile needs is one piece of
 * scratch: a single test for want of memory, and no limit of slots. */
static float *take(float **room, int64_t floats)
{
    float *taken = *room;
    *room += floats;
    return taken;
}

/* Packs rows of a head as left operands. Rows from count to `all` are zero, so that products may
 * compute whole tiles. Rows are read from a window of any strides once and are then contiguous,
 * which the products read many times. */
static void pack_rows(const job *j, const ms_heads *h, int64_t batch, int64_t head, int64_t time,
                      int64_t count, int64_t all, float *to)
{
    const ms_attention_args *a = j->args;
    j->kernels->pack_rows(j->pairs, (ms_dtype)a->dtype, address(j, h, batch, head, time), h->time,
                          count, all, a->width, to);
}

/* Packs rows so that two of them form a pair, as an operand whose sum goes over rows. f32 has no
 * pairs; its rows serve both purposes. `all` is even, so that every row has a partner. */
static void pack_steps(const job *j, const ms_heads *h, int64_t batch, int64_t head, int64_t time,
                       int64_t count, int64_t all, float *to)
{
    const ms_attention_args *a = j->args;
    if (!j->pairs) pack_rows(j, h, batch, head, time, count, all, to);
    else
        j->kernels->pack_steps((ms_dtype)a->dtype, address(j, h, batch, head, time), h->time, count,
                               all, a->width, to);
}

/* Rounds `count` rows of f32 to a tensor, each times its factor. Rows past count are scratch and
 * not written. */
static void unpack(const job *j, const float *from, int64_t count, const float *factor,
                   const ms_heads *h, int64_t batch, int64_t head, int64_t time)
{
    j->kernels->unpack((ms_dtype)j->args->dtype, from, j->wide, count, j->args->width, factor,
                       address(j, h, batch, head, time), h->time);
}

/* ------------------------------------------------------------------- blocks */

/* Queries first .. first + count - 1 of one head of one batch; count is at most LANES. The first
 * place that a query sees is within earliest .. latest, both 0 without positions and window. */
typedef struct queries {
    int64_t batch, head, first, count, earliest, latest;
} queries;

/* Whether some query does not see the first key. */
static bool is_cut(const ms_attention_args *a) { return a->positions != NULL || a->window > 0; }

/* The first key that a query may see: where its document or its window begins, which is later. The
 * document may begin before the keys, and the window after them. */
static int64_t begin_of(const ms_attention_args *a, int64_t batch, int64_t query)
{
    int64_t place = a->offset + query,
            begin = a->positions != NULL ? place - a->positions[batch * a->queries + query] : 0,
            window = a->window > 0 ? place + 1 - a->window : 0;
    if (begin < 0) begin = 0;
    return window > begin ? window : begin;
}

/* The block of queries that begins at query `first`, which is there. */
static queries queries_at(const ms_attention_args *a, int64_t batch, int64_t head, int64_t first)
{
    queries q = { .batch = batch,
                  .head = head,
                  .first = first,
                  .count = least(LANES, a->queries - first),
                  .earliest = begin_of(a, batch, first) };
    for (int64_t i = 0; is_cut(a) && i < q.count; i++) {
        int64_t begin = begin_of(a, batch, first + i);
        q.earliest = least(q.earliest, begin);
        if (begin > q.latest) q.latest = begin;
    }
    return q;
}

/* How many keys the queries before `end` see, of those from the first on. */
static int64_t keys_for(const ms_attention_args *a, int64_t end)
{
    if (!a->causal) return a->keys;
    int64_t places = a->offset + end;
    return places < 0 ? 0 : least(places, a->keys);
}
/* The last query of the block sees the most keys. */
static int64_t keys_seen(const job *j, const queries *q)
{
    return keys_for(j->args, q->first + q->count);
}

/* Fills first[LANES] for a part that begins at key `key`, where the keys of some queries begin
 * later. Lanes from part->end on see nothing of it then. Lanes that represent no query see all. */
static void begin_keys(const job *j, const queries *q, int64_t key, float *first,
                       ms_score_block *part)
{
    int64_t seeing = 0;
    memset(first, 0, LANES * sizeof *first);
    for (int64_t i = 0; i < q->count; i++) {
        int64_t begin = begin_of(j->args, q->batch, q->first + i) - key;
        if (begin < part->rows) seeing = i + 1;
        if (begin > 0) first[i] = (float)least(begin, part->rows);
    }
    part->first = first;
    part->end = padded(seeing, 16);
}

/* The part of a block that begins `begin` keys after key `key`; false where none is left. A block
 * that all queries see is one part. Lanes below part->begin see nothing of the part; rounding down
 * to 16 keeps whole vectors, whose hidden lanes the mask covers. Where the end comes before the
 * beginning, no lane sees anything (is_empty). Callers ask for parts twice, once to score and once
 * to use the scores; both walks give the same parts, since they follow from the arguments. */
static bool part_at(const job *j, const queries *q, int64_t key, int64_t begin, float *scores,
                    float *first, ms_score_block *part)
{
    const ms_attention_args *a = j->args;
    /* How many the first query sees; each later one sees one more. */
    int64_t rows = least(KEY_BLOCK, keys_seen(j, q) - key),
            seen = (a->causal ? a->offset + q->first + 1 : a->keys) - key;
    if (begin >= rows) return false;
    bool cut = a->causal && (seen < rows || key < q->latest);
    /* Queries before this one see nothing of the part. */
    int64_t hidden = cut && begin >= seen ? begin - seen + 1 : 0;
    int64_t keys = cut ? least(KEY_PART, rows - begin) : rows;
    *part = (ms_score_block){ .scores = scores + begin * LANES,
                              .rows = padded(keys, 4),
                              .keys = keys,
                              .begin = hidden / 16 * 16,
                              .end = padded(q->count, 16),
                              .seen = seen - begin,
                              .step = a->causal,
                              .scale = (float)a->scale };
    if (key + begin < q->latest) begin_keys(j, q, key + begin, first, part);
    return true;
}

static bool is_empty(const ms_score_block *part) { return part->end <= part->begin; }

/* to[keys of the part, queries] = keys (packed rows) times queries (packed columns). The scale is
 * applied later, inside the exponential, which saves a pass. The result is [keys, queries] and not
 * the reverse, so that a softmax over keys works on whole vectors. */
static void score(const job *j, const ms_score_block *part, const float *keys, const float *columns,
                  float *to)
{
    ms_unit_product p = { .rows = part->rows,
                          .columns = part->end - part->begin,
                          .depth = j->units,
                          .a = keys,
                          .a_row = j->units,
                          .a_step = 1,
                          .b = columns + part->begin,
                          .b_step = LANES,
                          .c = to + part->begin,
                          .c_row = LANES };
    j->kernels->multiply(j->pairs, &p);
}

/* to[width, queries] += the transpose of packed steps of keys, times a right operand made of the
 * part's scores: the output of forward, and the gradient of queries. It takes only the columns from
 * part->begin on: the others see nothing of the part. */
static void add_to_columns(const job *j, const ms_score_block *part, const float *steps,
                           const float *right, float *to)
{
    ms_unit_product p = { .rows = j->wide,
                          .columns = part->end - part->begin,
                          .depth = in_units(j, part->rows),
                          .a = steps,
                          .a_row = 1,
                          .a_step = j->wide,
                          .b = right + part->begin,
                          .b_step = LANES,
                          .c = to + part->begin,
                          .c_row = LANES,
                          .accumulate = true };
    j->kernels->multiply(j->pairs, &p);
}

/* to[keys of the part, width] += a left operand made of the part's scores, times packed steps of
 * queries: the gradients of values and keys. The sum is over queries, so those before part->begin
 * are left out of its depth. */
static void add_to_rows(const job *j, const ms_score_block *part, const float *left,
                        const float *steps, float *to)
{
    int64_t first = in_units(j, part->begin);
    ms_unit_product p = { .rows = part->rows,
                          .columns = j->wide,
                          .depth = in_units(j, part->end) - first,
                          .a = left + first,
                          .a_row = in_units(j, LANES),
                          .a_step = 1,
                          .b = steps + first * j->wide,
                          .b_step = j->wide,
                          .c = to,
                          .c_row = j->wide,
                          .accumulate = true };
    j->kernels->multiply(j->pairs, &p);
}

/* ------------------------------------------------------------------ forward */

/* A block of queries between the first and the last block of keys: its packed columns, its
 * unnormalised result [width, queries], and per query the greatest scaled score so far and the sum
 * of exponentials relative to it. The arrays are scratch of the thread, in f32, and live as long as
 * the tile. */
typedef struct progress {
    queries q;
    float *columns, *out, *most, *total;
} progress;

/* Scratch that the blocks of a tile use in turn: the packed keys and values of the current block of
 * keys, its scores, and rows for transposing. */
typedef struct forward_room {
    float *keys, *values, *scores, *steps, *rows;
} forward_room;

/* The floats of one tile of forward; every `take` of forward_tile and begin_queries is counted
 * here. It does not depend on the number of keys, so forward needs the same scratch for any length
 * of text. */
static int64_t forward_floats(const job *j)
{
    int64_t block = LANES * j->units + LANES * j->wide + 2 * LANES;
    return TILE_BLOCKS * block + 2 * KEY_BLOCK * j->units + 2 * KEY_BLOCK * LANES + LANES * j->wide;
}

/* A greatest score of -infinity and a total of 0 are the state before the first key that a query
 * sees; `shrink` and `exponentials` make no NaN of it. Queries are packed once and used for all
 * blocks of keys. */
static void begin_queries(const job *j, progress *p, float *rows, float **room)
{
    const queries *q = &p->q;
    p->columns = take(room, LANES * j->units);
    p->out = take(room, LANES * j->wide);
    p->most = take(room, LANES);
    p->total = take(room, LANES);
    pack_rows(j, &j->args->q, q->batch, q->head, q->first, q->count, LANES, rows);
    j->kernels->transpose(rows, j->units, LANES, j->units, p->columns, LANES);
    memset(p->out, 0, (size_t)(LANES * j->wide) * sizeof *p->out);
    for (int64_t i = 0; i < LANES; i++) {
        p->most[i] = -INFINITY;
        p->total[i] = 0.0f;
    }
}

/* Extends the softmax by one block of keys (Milakov and Gimelshein 2018, online softmax): the new
 * greatest score is found first, what was summed so far is scaled to it, then the block is added.
 * All scores are masked before the first exponential, since the maximum must cover every part.
 * Another device may take other blocks: the result is the same up to rounding, since every block
 * scales what was summed before. */
static void forward_block(const job *j, const progress *p, const forward_room *r, int64_t key)
{
    ms_score_block part;
    float before[LANES], first[LANES];
    memcpy(before, p->most, sizeof before);
    for (int64_t at = 0; part_at(j, &p->q, key, at, r->scores, first, &part); at += part.rows) {
        if (is_empty(&part)) continue;
        score(j, &part, r->keys + at * j->units, p->columns, part.scores);
        j->kernels->mask(&part, p->most);
    }
    j->kernels->shrink(before, p->most, p->total, p->out, j->wide);
    for (int64_t at = 0; part_at(j, &p->q, key, at, r->scores, first, &part); at += part.rows) {
        if (is_empty(&part)) continue;
        float *steps = j->pairs ? r->steps + at / 2 * LANES : part.scores;
        j->kernels->exponentials(j->pairs, &part, p->most, p->total, steps);
        add_to_columns(j, &part, r->values + in_units(j, at) * j->wide, steps, p->out);
    }
}

/* Divides by the totals while the result is unpacked. The logarithm of the sum is what backward
 * needs to compute the probabilities again from the scores. log_sum is NULL where the call is not
 * recorded. */
static void finish_queries(const job *j, const progress *p, float *rows)
{
    const ms_attention_args *a = j->args;
    const queries *q = &p->q;
    float log_sum[LANES];
    j->kernels->finish(p->most, p->total, log_sum);
    if (a->log_sum != NULL)
        memcpy(a->log_sum + (q->batch * a->heads + q->head) * a->queries + q->first, log_sum,
               (size_t)q->count * sizeof *log_sum);
    j->kernels->transpose(p->out, LANES, j->wide, LANES, rows, j->wide);
    unpack(j, rows, q->count, p->total, &a->out, q->batch, q->head, q->first);
}

/* Up to 256 queries of a head, so that each block of keys is packed once for all of them. The key
 * limit is the last block's, which sees the most; part_at leaves out what earlier blocks do not
 * see. The walk begins with the earliest key; later blocks of queries may begin later. The
 * work is 4 FLOPs for each score and number of the width, half of which is in each of the two
 * products; the exponentials come next. */
static void forward_tile(void *context, uint32_t index, ms_thread *thread)
{
    job *j = context;
    const ms_attention_args *a = j->args;
    int64_t chunk = index % j->chunks, head = index / j->chunks % a->heads,
            batch = index / j->chunks / a->heads, group = head / (a->heads / a->groups);
    /* Slot 0 is this tile's alone while it runs, as a thread runs one tile at a time. */
    float *room = ms_thread_scratch(thread, 0, (size_t)forward_floats(j) * sizeof *room);
    if (room == NULL) {
        atomic_store(&j->no_memory, true);
        return;
    }
    forward_room r = { .keys = take(&room, KEY_BLOCK * j->units),
                       .values = take(&room, KEY_BLOCK * j->units),
                       .scores = take(&room, KEY_BLOCK * LANES),
                       .steps = take(&room, KEY_BLOCK * LANES),
                       .rows = take(&room, LANES * j->wide) };
    progress blocks[TILE_BLOCKS];
    int64_t count = 0, limit = 0, earliest = a->keys;
    for (int64_t first = chunk * TILE_BLOCKS * LANES; count < TILE_BLOCKS && first < a->queries;
         first += LANES) {
        progress *p = &blocks[count++];
        p->q = queries_at(a, batch, head, first);
        begin_queries(j, p, r.rows, &room);
        earliest = least(earliest, p->q.earliest);
        limit = keys_seen(j, &p->q);
    }
    for (int64_t key = earliest / KEY_BLOCK * KEY_BLOCK; key < limit; key += KEY_BLOCK) {
        int64_t keys = least(KEY_BLOCK, limit - key), all = padded(keys, 4);
        pack_rows(j, &a->k, batch, group, key, keys, all, r.keys);
        pack_steps(j, &a->v, batch, group, key, keys, all, r.values);
        for (int64_t i = 0; i < count; i++)
            if (key + keys > blocks[i].q.earliest) forward_block(j, &blocks[i], &r, key);
    }
    for (int64_t i = 0; i < count; i++) finish_queries(j, &blocks[i], r.rows);
}

/* One query of one head, as where a text is continued from kept keys. Nothing is packed, as no
 * other query would use it: keys and values are read once, in f32 from whatever they are, and
 * memory sets the pace. The scratch grows with the number of keys that the query sees. */
static void single_tile(void *context, uint32_t index, ms_thread *thread)
{
    job *j = context;
    const ms_attention_args *a = j->args;
    const ms_attention_kernels *kernels = j->kernels;
    const ms_dtype dtype = (ms_dtype)a->dtype;
    int64_t head = index % a->heads, batch = index / a->heads,
            group = head / (a->heads / a->groups), begin = begin_of(a, batch, 0),
            end = keys_for(a, 1), keys = end > begin ? end - begin : 0, all = padded(keys, 16);
    float *room = ms_thread_scratch(thread, 0, (size_t)(all + 2 * j->wide) * sizeof *room);
    if (room == NULL) {
        atomic_store(&j->no_memory, true);
        return;
    }
    float *scores = take(&room, all), *query = take(&room, j->wide), *out = take(&room, j->wide);
    kernels->pack_rows(false, dtype, address(j, &a->q, batch, head, 0), a->q.time, 1, 1, a->width,
                       query);
    kernels->row_dots(dtype, MS_F32, keys, a->width, address(j, &a->k, batch, group, begin),
                      a->k.time, query, 0, scores);
    for (int64_t i = keys; i < all; i++) scores[i] = -INFINITY;
    float most, total = kernels->weigh(all, (float)a->scale, scores, &most);
    kernels->sum_rows(dtype, keys, a->width, address(j, &a->v, batch, group, begin), a->v.time,
                      scores, out);
    if (a->log_sum != NULL)
        a->log_sum[batch * a->heads + head] = keys > 0 ? most + logf(total) : -INFINITY;
    float inverse = keys > 0 ? 1.0f / total : 0.0f;
    unpack(j, out, 1, &inverse, &a->out, batch, head, 0);
}

/* ----------------------------------------------------------------- backward */

/* Keys and values of one group of one batch, packed whole because every block of queries needs all
 * of them, and the f32 sums of their gradients. They grow with the number of keys: five arrays of
 * keys times width. */
typedef struct group_room {
    float *k_rows, *v_rows, *k_steps, *dk, *dv;
} group_room;

/* One block of queries: queries and incoming gradients as columns and as steps, the logarithm of
 * the sum and the offset of each query, and one block of scores with its gradient. `rows` is for
 * transposing and unpacking. */
typedef struct query_room {
    float *q_columns, *g_columns, *q_steps, *g_steps, *dq, *rows, *log_sum, *offset, *scores,
        *change;
    ms_score_units units;
} query_room;

/* The floats of one tile of backward; every `take` of divide_room is counted here, also those that
 * f32 does not need. */
static int64_t backward_floats(const job *j)
{
    int64_t keys = padded(j->args->keys, 4);
    return keys * (3 * j->units + 2 * j->wide) + 4 * LANES * j->units + 2 * LANES * j->wide
           + 2 * LANES + 2 * KEY_BLOCK * LANES + 3 * KEY_BLOCK * LANES / 2;
}

/* Cuts the scratch of a tile. In f32 several names are of one array: rows serve as steps, and
 * scores become their own gradients. */
static void divide_room(const job *j, float *room, group_room *g, query_room *r)
{
    int64_t keys = padded(j->args->keys, 4), half = KEY_BLOCK * LANES / 2;
    *g = (group_room){ .k_rows = take(&room, keys * j->units),
                       .v_rows = take(&room, keys * j->units),
                       .dk = take(&room, keys * j->wide),
                       .dv = take(&room, keys * j->wide) };
    g->k_steps = j->pairs ? take(&room, keys * j->units) : g->k_rows;
    *r = (query_room){ .q_columns = take(&room, LANES * j->units),
                       .g_columns = take(&room, LANES * j->units),
                       .q_steps = take(&room, LANES * j->units),
                       .g_steps = take(&room, LANES * j->units),
                       .dq = take(&room, LANES * j->wide),
                       .rows = take(&room, LANES * j->wide),
                       .log_sum = take(&room, LANES),
                       .offset = take(&room, LANES),
                       .scores = take(&room, KEY_BLOCK * LANES),
                       .change = take(&room, KEY_BLOCK * LANES) };
    /* Without pairs the scores and their gradients are operands as they are. */
    if (j->pairs)
        r->units = (ms_score_units){ take(&room, half), take(&room, half), take(&room, half) };
    else r->units = (ms_score_units){ r->scores, r->change, r->change };
}

/* Packs 64 rows both as columns and as steps. In f32 the rows are the steps, so they are packed
 * there directly. It serves queries and incoming gradients, which are operands of the same
 * shapes. */
static void pack_queries(const job *j, const queries *q, const ms_heads *h, float *rows,
                         float *columns, float *steps)
{
    if (!j->pairs) rows = steps;
    else pack_steps(j, h, q->batch, q->head, q->first, q->count, LANES, steps);
    pack_rows(j, h, q->batch, q->head, q->first, q->count, LANES, rows);
    j->kernels->transpose(rows, j->units, LANES, j->units, columns, LANES);
}

/* Computes the scores of one part again, which costs less than to store them all, and adds to the
 * gradients of queries, keys and values. `at` counts from key `key`. Five products for each part,
 * where forward has two: scores, their gradients, and one for each of dv, dk and dq. */
static void backward_part(const job *j, const ms_score_block *part, const group_room *g,
                          const query_room *r, int64_t key, int64_t at)
{
    int64_t begin = key + at, lanes = in_units(j, LANES);
    float *change = r->change + at * LANES;
    ms_score_units units = { r->units.p_rows + at * lanes, r->units.d_rows + at * lanes,
                             r->units.d_steps + in_units(j, at) * LANES };
    score(j, part, g->k_rows + begin * j->units, r->q_columns, part->scores);
    score(j, part, g->v_rows + begin * j->units, r->g_columns, change);
    j->kernels->gradient(j->pairs, part, change, r->log_sum, r->offset, &units);
    add_to_rows(j, part, units.p_rows, r->g_steps, g->dv + begin * j->wide);
    add_to_rows(j, part, units.d_rows, r->q_steps, g->dk + begin * j->wide);
    add_to_columns(j, part, g->k_steps + in_units(j, begin) * j->wide, units.d_steps, r->dq);
}

/* What the softmax's gradient subtracts, in r->offset: dot(dout, out) per query, the sum over keys
 * of p * dp, less the gradient of log_sum. Queries that see no key have no gradient, and unused
 * lanes neither: they get zeros. */
static void subtract_offsets(const job *j, const queries *q, const query_room *r)
{
    const ms_attention_args *a = j->args;
    int64_t row = (q->batch * a->heads + q->head) * a->queries + q->first;
    memset(r->log_sum, 0, LANES * sizeof(float));
    memset(r->offset, 0, LANES * sizeof(float));
    j->kernels->row_dots((ms_dtype)a->dtype, (ms_dtype)a->dtype, q->count, a->width,
                         address(j, &a->dout, q->batch, q->head, q->first), a->dout.time,
                         address(j, &a->out, q->batch, q->head, q->first), a->out.time, r->offset);
    for (int64_t i = 0; i < q->count; i++) {
        float log_sum = a->log_sum[row + i];
        if (log_sum == -INFINITY) {
            r->offset[i] = 0.0f;
            continue;
        }
        r->log_sum[i] = log_sum;
        if (a->dlog_sum != NULL) r->offset[i] -= a->dlog_sum[row + i];
    }
}

/* Packed queries and gradients of unused lanes are zeros, so they add nothing. dq of the block is
 * complete after its last key, since no other tile adds to it. */
static void backward_block(const job *j, const queries *q, const group_room *g, const query_room *r)
{
    const ms_attention_args *a = j->args;
    ms_score_block part;
    float begins[LANES];
    subtract_offsets(j, q, r);
    pack_queries(j, q, &a->q, r->rows, r->q_columns, r->q_steps);
    pack_queries(j, q, &a->dout, r->rows, r->g_columns, r->g_steps);
    memset(r->dq, 0, (size_t)(LANES * j->wide) * sizeof *r->dq);
    for (int64_t key = q->earliest / KEY_BLOCK * KEY_BLOCK; key < keys_seen(j, q); key += KEY_BLOCK)
        for (int64_t at = 0; part_at(j, q, key, at, r->scores, begins, &part); at += part.rows)
            if (!is_empty(&part)) backward_part(j, &part, g, r, key, at);
    j->kernels->transpose(r->dq, LANES, j->wide, LANES, r->rows, j->wide);
    unpack(j, r->rows, q->count, NULL, &a->dq, q->batch, q->head, q->first);
}

/* One group of one batch: all query heads that share its keys and values. No other tile adds to
 * their gradients, so no lock is needed and the order of additions is fixed. The price is that
 * there are only batches * groups tiles: a single sequence with one group runs on one thread. A
 * device that divides the queries must add up dk and dv of its parts in a fixed order. */
static void backward_tile(void *context, uint32_t index, ms_thread *thread)
{
    job *j = context;
    const ms_attention_args *a = j->args;
    int64_t group = index % a->groups, batch = index / a->groups, shared = a->heads / a->groups,
            all = padded(a->keys, 4);
    float *room = ms_thread_scratch(thread, 0, (size_t)backward_floats(j) * sizeof *room);
    if (room == NULL) {
        atomic_store(&j->no_memory, true);
        return;
    }
    group_room g;
    query_room r;
    divide_room(j, room, &g, &r);
    pack_rows(j, &a->k, batch, group, 0, a->keys, all, g.k_rows);
    pack_rows(j, &a->v, batch, group, 0, a->keys, all, g.v_rows);
    if (j->pairs) pack_steps(j, &a->k, batch, group, 0, a->keys, all, g.k_steps);
    memset(g.dk, 0, (size_t)(all * j->wide) * sizeof *g.dk);
    memset(g.dv, 0, (size_t)(all * j->wide) * sizeof *g.dv);
    for (int64_t head = group * shared; head < (group + 1) * shared; head++)
        for (int64_t first = 0; first < a->queries; first += LANES) {
            queries q = queries_at(a, batch, head, first);
            backward_block(j, &q, &g, &r);
        }
    unpack(j, g.dk, a->keys, NULL, &a->dk, batch, group, 0);
    unpack(j, g.dv, a->keys, NULL, &a->dv, batch, group, 0);
}

/* -------------------------------------------------------------------- tasks */

/* Whether all positions are within 0 .. the index of their query, or, where queries are shifted, 0
 * or more; if not, the task has its error. In backward, too, as the positions may have been written
 * since forward. The walks over keys trust them. */
static bool check_positions(ms_run *run, const ms_attention_args *a)
{
    for (int64_t i = 0; a->positions != NULL && i < a->batches * a->queries; i++) {
        int64_t position = a->positions[i], query = i % a->queries;
        if (position >= 0 && (a->shifted || position <= query)) continue;
        if (position < 0)
            ms_run_fail(run, MS_ERROR_ARGUMENT,
                        "attention: the position of query %lld of row %lld is %lld; it counts the "
                        "queries before it in its document, so it cannot be below 0",
                        (long long)query, (long long)(i / a->queries), (long long)position);
        else
            ms_run_fail(run, MS_ERROR_ARGUMENT,
                        "attention: the position of query %lld of row %lld is %lld; it counts the "
                        "queries before it in its document, so it must be within 0 .. %lld",
                        (long long)query, (long long)(i / a->queries), (long long)position,
                        (long long)query);
        return false;
    }
    return true;
}

/* Pairs need the instruction and a compute type of bf16; otherwise operands are f32. The tiles
 * follow from the shape alone. Both directions use the same packing, so the gradient is that of the
 * function that forward computed, with operands rounded in the same way. */
static ms_task_result attention_run(ms_run *run, const ms_attention_args *args, bool backward)
{
    const ms_attention_kernels *kernels = ms_attention_kernels_for(ms_run_isa(run));
    if (!check_positions(run, args)) return MS_TASK_FAILED;
    bool pairs = kernels->has_pairs && args->dtype == MS_BF16;
    int64_t wide = padded(args->width, 16), tile = TILE_BLOCKS * LANES;
    job j = { .args = args,
              .kernels = kernels,
              .pairs = pairs,
              .wide = wide,
              .units = pairs ? wide / 2 : wide,
              .chunks = (args->queries + tile - 1) / tile };
    if (backward) ms_run_tiles(run, (uint32_t)(args->batches * args->groups), backward_tile, &j);
    else if (args->queries == 1)
        ms_run_tiles(run, (uint32_t)(args->batches * args->heads), single_tile, &j);
    else ms_run_tiles(run, (uint32_t)(args->batches * args->heads * j.chunks), forward_tile, &j);
    if (!atomic_load(&j.no_memory)) return MS_TASK_DONE;
    ms_run_fail(run, MS_ERROR_MEMORY,
                "attention: no memory for the scratch space of %lld keys of width %lld",
                (long long)args->keys, (long long)args->width);
    return MS_TASK_FAILED;
}

static ms_task_result forward_run(ms_run *run, void *arguments)
{
    return attention_run(run, arguments, false);
}
static ms_task_result backward_run(ms_run *run, void *arguments)
{
    return attention_run(run, arguments, true);
}

const ms_task ms_cpu_attention_forward = { .name = "attention",
                                           .function = forward_run,
                                           .args_bytes = sizeof(ms_attention_args),
                                           .kind = MS_KIND_COMPUTE };
const ms_task ms_cpu_attention_backward = { .name = "attention gradient",
                                            .function = backward_run,
                                            .args_bytes = sizeof(ms_attention_args),
                                            .kind = MS_KIND_COMPUTE };
