/* powersgd.c: each gradient matrix M as a product P Q' of two narrow ones, which are what travels
 * (Vogels et al. 2019).
 *
 * M = gradient + residual; P = sum over ranks of M Q; P's columns are made orthonormal; Q = mean
 * over ranks of M' P; the result is P Q', the residual M - P Q'. Q is the next iteration's start.
 * Work is in f32; P, Q and matrices that are not compressed travel in the buffer's dtype, P then
 * divided by the number of ranks so that f16 holds it. */
#include "hook/link_ops.h"

#include <math.h>

#include "hook/links.h"
#include "hook/links/reduce.h"
#include "hook/link_state.h"
#include "hook/tensors.h"

/* A gradient [n, m]. compressed: it travels as P [n, r] and Q [m, r]. The offsets are into the
 * tensors of the same names below; M's also into the bucket. residual_at counts compressed matrices
 * only, as those that travel whole lose nothing. */
typedef struct matrix {
    int64_t n, m, r;
    int64_t offset, p_at, q_at, residual_at;
    bool compressed;
} matrix;

/* One call for one bucket. The arrays are one allocation of reduce_compressed; the tensors belong
 * to the work. lengths and fresh are what ms_link_state_tensor asks for: one entry for each
 * parameter of the bucket. */
typedef struct call {
    ms_link_ops *work;
    const ms_link_options *options;
    matrix *matrices;
    int64_t *lengths; /* room for one number for each parameter */
    bool *fresh;      /* Q has no start yet */
    uint32_t count;   /* of matrices: as many as parameters; one if batched */
    int64_t p_count, q_count, rest_count;
    ms_tensor *wide; /* all matrices */
    ms_tensor *residual, *p, *q;
    ms_tensor *start; /* Q as it was before this iteration */
} call;

/* --------------------------------------------------------- which matrices */

/* Puts a matrix into the list and gives it its offsets. All offsets depend on shapes and options,
 * so they are the same on all ranks and in each iteration. */
static void add_matrix(call *c, uint32_t index, matrix x)
{
    x.p_at = c->p_count;
    x.q_at = c->q_count;
    x.residual_at = 0;
    if (index > 0) {
        const matrix *before = &c->matrices[index - 1];
        x.residual_at = before->residual_at + (before->compressed ? before->n * before->m : 0);
    }
    c->p_count += x.compressed ? x.n * x.r : 0;
    c->q_count += x.compressed ? x.m * x.r : 0;
    c->rest_count += x.compressed ? 0 : x.n * x.m;
    c->matrices[index] = x;
}

/* The gradient as a matrix: its first dimension by all others. It is compressed if that makes it
 * smaller by min_rate: (n + m) r min_rate < n m. The rank r is at most n and m. A convolution's
 * [out, in, h, w] becomes [out, in h w]. */
static matrix matrix_of(const call *c, const ms_tensor *gradient, int64_t offset)
{
    int64_t count = ms_tensor_count(gradient);
    int64_t n = ms_tensor_dims(gradient) ? ms_tensor_shape(gradient)[0] : 1;
    matrix x = { .n = n, .m = n ? count / n : 0, .offset = offset };
    x.r = x.n < x.m ? x.n : x.m;
    /* The option is the most: a matrix with a shorter side has a lower rank. */
    if (x.r > c->options->powersgd.rank) x.r = c->options->powersgd.rank;
    double small = (double)((x.n + x.m) * x.r) * c->options->powersgd.min_rate;
    x.compressed = small < (double)(x.n * x.m);
    return x;
}

/* One matrix for each parameter. `wide` is the buffer itself where that is f32, so that results are
 * written in place. */
static void choose(call *c)
{
    ms_bucket *bucket = c->work->bucket;
    int64_t offset = 0, after = 0;
    for (uint32_t i = 0; i < c->count; i++) {
        matrix x = matrix_of(c, bucket->gradients[i], offset);
        add_matrix(c, i, x);
        offset += x.n * x.m;
        after += x.compressed ? (x.n + x.m) * x.r : x.n * x.m;
    }
    ms_link_state_compressed(c->work->link->state, offset, after);
    c->wide = ms_link_ops_cast(c->work, bucket->buffer, MS_F32);
}

/* The whole bucket as one square matrix, padded with zeros: fewer and larger products, at the price
 * of columns that mix parameters. The side is corrected upwards, since the root of a large count
 * may be rounded down. */
static void choose_square(call *c)
{
    ms_link_ops *w = c->work;
    int64_t count = ms_bucket_numbers(w->bucket), side = (int64_t)ceil(sqrt((double)count));
    while (side * side < count) side++;
    int64_t rank = c->options->powersgd.rank, r = rank < side ? rank : side;
    c->count = 1;
    add_matrix(c, 0, (matrix){ .n = side, .m = side, .r = r, .compressed = true });
    ms_link_state_compressed(w->link->state, count, 2 * side * r);
    c->wide = ms_link_ops_scratch(w, side * side);
    ms_link_ops_change(w, &ms_op_fill, 0, c->wide, NULL);
    ms_link_ops_copy(w, ms_link_ops_view(w, w->bucket->buffer, 0, count, 0),
                     ms_link_ops_view(w, c->wide, 0, count, 0));
}

/* -------------------------------------------------------------------- state */

/* Lengths of a matrix' residual and of its Q, for get_state. */
static int64_t numbers(const matrix *x) { return x->n * x->m; }
static int64_t q_numbers(const matrix *x) { return x->m * x->r; }

/* State `name` with per(matrix) numbers for each compressed one. A square belongs to no parameter:
 * its numbers are kept with the bucket's first parameter, or, if there are at least as many as
 * gradients, each with its parameter and the rest with the last one. */
static ms_tensor *get_state(call *c, const char *name, int64_t (*per)(const matrix *))
{
    ms_link_ops *w = c->work;
    const ms_bucket *bucket = w->bucket;
    /* In the square form no matrix belongs to a parameter, so the lengths are all set below. */
    bool square = c->options->powersgd.batched;
    ms_tensor *state = NULL;
    for (uint32_t i = 0; i < bucket->count; i++)
        c->lengths[i] = !square && c->matrices[i].compressed ? per(&c->matrices[i]) : 0;
    if (square) {
        int64_t left = per(&c->matrices[0]);
        bool by_parameter = left >= ms_bucket_numbers(bucket);
        for (uint32_t i = 0; i < bucket->count && by_parameter; i++)
            left -= c->lengths[i] = ms_tensor_count(bucket->gradients[i]);
        c->lengths[by_parameter ? bucket->count - 1 : 0] += left;
    }
    if (!w->status)
        w->status =
            ms_link_state_tensor(w->link->state, bucket, name, c->lengths, c->fresh, &state);
    return ms_link_ops_own(w, state);
}

/* With warm_start Q is the state, and this iteration's Q replaces it in place. Otherwise it is
 * drawn again in every iteration. */
static void take_q(call *c)
{
    if (c->options->powersgd.warm_start) {
        c->q = get_state(c, "q", q_numbers);
        return;
    }
    for (uint32_t i = 0; i < c->work->bucket->count; i++) c->fresh[i] = true;
    c->q = ms_link_ops_scratch(c->work, c->q_count);
}

/* ----------------------------------------------------------- what travels */

/* Sums t over ranks in the buffer's dtype, each rank's numbers times factor. t is f32 and is copied
 * to the wire's dtype and back; every rank gets the same bits, which Q needs, because the next
 * iteration starts from it on all ranks. */
static void add_up(ms_link_ops *w, ms_tensor *t, double factor)
{
    ms_tensor *wire = NULL;
    ms_collective sum = { .kind = MS_ALL_REDUCE, .op = MS_REDUCE_OP_PREMUL_SUM, .factor = factor };
    ms_link_ops one = ms_link_ops_inner(w);
    if (!one.status)
        one.status =
            ms_link_wire(ms_link_ops_group(w), t, ms_tensor_dtype(w->bucket->buffer), &wire);
    sum.in = ms_link_ops_own(&one, wire);
    if (!one.status) one.status = ms_link_collective(w->bucket, ms_link_ops_group(w), sum);
    ms_link_ops_copy(&one, wire, t);
    w->status = ms_link_ops_end(&one);
}

/* Copies the matrices that are not compressed into rest, one after another, or back. */
static void copy_rest(call *c, ms_tensor *rest, bool back)
{
    int64_t at = 0;
    for (uint32_t i = 0; i < c->count && !c->work->status; i++) {
        const matrix *x = &c->matrices[i];
        int64_t count = numbers(x);
        if (x->compressed || count == 0) continue;
        ms_link_ops one = ms_link_ops_inner(c->work);
        ms_tensor *own = ms_link_ops_view(&one, c->wide, x->offset, count, 0);
        ms_tensor *packed = ms_link_ops_view(&one, rest, at, count, 0);
        if (back) ms_link_ops_copy(&one, packed, own);
        else ms_link_ops_copy(&one, own, packed);
        c->work->status = ms_link_ops_end(&one);
        at += count;
    }
}

/* The mean of the matrices that are not compressed (vectors, small matrices), in one piece: one
 * collective instead of one for each. */
static void reduce_rest(call *c)
{
    if (c->rest_count == 0) return;
    ms_tensor *rest = ms_link_ops_scratch(c->work, c->rest_count);
    copy_rest(c, rest, false);
    add_up(c->work, rest, ms_link_share(c->work->link, c->work->bucket));
    copy_rest(c, rest, true);
}

/* ------------------------------------------------------------ the products */

/* What is done for each compressed matrix, with a work of its own, so that tensors are released
 * after each. */
typedef void step(ms_link_ops *w, call *c, const matrix *x, uint32_t index);

/* The products of one matrix do not depend on another, so the order is free; it is fixed so that
 * runs repeat. */
static void each_matrix(call *c, step *f)
{
    for (uint32_t i = 0; i < c->count && !c->work->status; i++) {
        if (!c->matrices[i].compressed) continue;
        ms_link_ops one = ms_link_ops_inner(c->work);
        f(&one, c, &c->matrices[i], i);
        c->work->status = ms_link_ops_end(&one);
    }
}

/* Views of the tensors that hold all matrices: M [n, m], P [n, r] and Q [m, r]. */
static ms_tensor *m_of(ms_link_ops *w, const call *c, const matrix *x)
{
    return ms_link_ops_view(w, c->wide, x->offset, x->n, x->m);
}
static ms_tensor *p_of(ms_link_ops *w, const call *c, const matrix *x)
{
    return ms_link_ops_view(w, c->p, x->p_at, x->n, x->r);
}
static ms_tensor *q_of(ms_link_ops *w, const call *c, const matrix *x)
{
    return ms_link_ops_view(w, c->q, x->q_at, x->m, x->r);
}

/* The columns of t, in place; eps is added to each column's norm. Every rank does this on the same
 * bits and with a fixed order of sums, so the results agree without another message. */
static void orthonormalize(ms_link_ops *w, const call *c, ms_tensor *t)
{
    const ms_attributes attributes = { .norm = { .eps = c->options->powersgd.eps } };
    ms_link_ops_operator(w, &ms_op_orthonormalize, attributes, true, &t, 1, NULL);
}

/* out = a b, rounded to dtype on the way. */
static void multiply(ms_link_ops *w, ms_tensor *a, ms_tensor *b, ms_dtype dtype, ms_tensor *out)
{
    ms_tensor *product = ms_link_ops_apply(w, &ms_op_matmul, 0, a, b);
    ms_link_ops_copy(w, ms_link_ops_cast(w, product, dtype), out);
}

/* M = gradient + residual. The residual keeps M until make_m subtracts what was sent. It adds only
 * this rank's own: residuals are never exchanged. */
static void add_residual(ms_link_ops *w, call *c, const matrix *x, uint32_t index)
{
    (void)index;
    ms_tensor *m = m_of(w, c, x);
    ms_tensor *residual = ms_link_ops_view(w, c->residual, x->residual_at, x->n, x->m);
    ms_link_ops_change(w, &ms_op_add, 1, residual, m);
    ms_link_ops_copy(w, residual, m);
}

/* Random numbers, the same on every rank: the seed depends on the option, the iteration, the bucket
 * and the matrix, never on the rank. Ranks with different Q would add up products in different
 * bases. */
static void draw(ms_link_ops *w, uint32_t index, ms_tensor *q)
{
    uint64_t seed = (uint64_t)w->link->options.powersgd.seed
                    + ((uint64_t)ms_link_state_iteration(w->link->state) << 32)
                    + ((uint64_t)w->bucket->index << 16) + index;
    const ms_attributes attributes = { .random = { .random = { .seed = seed }, .b = 1 } };
    ms_link_ops_operator(w, &ms_op_normal, attributes, true, &q, 1, NULL);
}

/* P = M Q for this rank's M, with orthonormal Q. */
static void make_p(ms_link_ops *w, call *c, const matrix *x, uint32_t index)
{
    ms_tensor *q = q_of(w, c, x);
    if (c->fresh[index]) draw(w, index, q);
    orthonormalize(w, c, q);
    multiply(w, m_of(w, c, x), q, MS_F32, p_of(w, c, x));
}

/* P is now the sum over the ranks; its columns are made orthonormal on each rank from the same
 * bits, so P need not travel again. Q = M' P. */
static void make_q(ms_link_ops *w, call *c, const matrix *x, uint32_t index)
{
    (void)index;
    ms_tensor *p = p_of(w, c, x);
    orthonormalize(w, c, p);
    multiply(w, ms_link_ops_transposed(w, c->wide, x->offset, x->n, x->m), p, MS_F32,
             q_of(w, c, x));
}

/* A column of Q is zero, or not finite, where all gradients were, and would stay so for ever: the
 * next iteration then starts from what this one started from. */
static void keep_start(ms_link_ops *w, const call *c, const matrix *x)
{
    const ms_attributes columns = { .reduce = { .dim = 0, .keep = true, .p = 2 } };
    ms_tensor *q = q_of(w, c, x), *start = ms_link_ops_view(w, c->start, x->q_at, x->m, x->r);
    ms_tensor *norms = ms_link_ops_operator(w, &ms_op_norm, columns, false, &q, 1, NULL);
    ms_tensor *zero = ms_link_ops_apply(w, &ms_op_eq_scalar, 0, norms, NULL);
    ms_tensor *finite = ms_link_ops_apply(w, &ms_op_is_finite, 0, norms, NULL);
    ms_tensor *inputs[] = { zero, start, q };
    ms_tensor *good =
        ms_link_ops_operator(w, &ms_op_where, (ms_attributes){ 0 }, false, inputs, 3, NULL);
    ms_tensor *others[] = { finite, good, start };
    ms_link_ops_copy(
        w, ms_link_ops_operator(w, &ms_op_where, (ms_attributes){ 0 }, false, others, 3, NULL), q);
}

/* M = P Q', rounded as the bucket's dtype will have it, so that the residual has this loss too;
 * then residual = (gradient + residual) - M. */
static void make_m(ms_link_ops *w, call *c, const matrix *x, uint32_t index)
{
    (void)index;
    ms_tensor *m = m_of(w, c, x);
    multiply(w, p_of(w, c, x), ms_link_ops_transposed(w, c->q, x->q_at, x->m, x->r),
             ms_tensor_dtype(w->bucket->buffer), m);
    if (c->residual) {
        ms_tensor *residual = ms_link_ops_view(w, c->residual, x->residual_at, x->n, x->m);
        ms_link_ops_change(w, &ms_op_sub, 1, residual, m);
        if (!w->status) w->status = ms_link_keep_finite(residual);
    }
    if (c->start) keep_start(w, c, x);
}

/* For error_feedback before this link, where this link keeps no residual: the products are what the
 * others receive. */
static void report_products(ms_link_ops *w, call *c, const matrix *x, uint32_t index)
{
    (void)index;
    int64_t count = numbers(x), left = ms_bucket_numbers(w->bucket) - x->offset;
    if (count > left) count = left;
    ms_link_ops_copy(w, ms_link_ops_view(w, c->wide, x->offset, count, 0),
                     ms_link_ops_view(w, w->bucket->sent, x->offset, count, 0));
}

/* The order of collectives is the same on all ranks, as it depends on shapes and options alone: the
 * rest, P, Q. P is divided by the number of ranks only in 16 bits; orthonormalizing takes the
 * factor out again. `start` is copied after make_p, which makes Q orthonormal or draws it. */
static void compress(call *c)
{
    ms_link_ops *w = c->work;
    double share = ms_link_share(w->link, w->bucket);
    bool wide = ms_tensor_dtype(w->bucket->buffer) == MS_F32;
    if (c->options->powersgd.error_feedback) {
        c->residual = get_state(c, "error", numbers);
        each_matrix(c, add_residual);
    }
    reduce_rest(c);
    if (c->p_count == 0) return;
    take_q(c);
    c->p = ms_link_ops_scratch(w, c->p_count);
    each_matrix(c, make_p);
    if (c->options->powersgd.warm_start) c->start = ms_link_ops_copy_of(w, c->q);
    add_up(w, c->p, wide ? 1 : share);
    each_matrix(c, make_q);
    add_up(w, c->q, share);
    each_matrix(c, make_m);
}

/* ----------------------------------------------------------------- the link */

/* `wide` is another tensor than the buffer in 16 bits and in the square form; the result is copied
 * back then. */
static ms_status run(ms_link_ops *w, call *c)
{
    ms_bucket *bucket = w->bucket;
    int64_t count = ms_bucket_numbers(bucket);
    bool reports = ms_link_reports(bucket);
    /* What this link's own residual keeps is not lost. */
    if (reports) w->status = ms_bucket_set_sent(bucket, bucket->buffer);
    if (c->options->powersgd.batched) choose_square(c);
    else choose(c);
    if (!w->status) compress(c);
    if (reports && !c->options->powersgd.error_feedback) each_matrix(c, report_products);
    if (c->wide != bucket->buffer)
        ms_link_ops_copy(w, ms_link_ops_view(w, c->wide, 0, count, 0),
                         ms_link_ops_view(w, bucket->buffer, 0, count, 0));
    return ms_link_ops_end(w);
}

/* Logs how much was sent, after an iteration's last bucket, on one rank. The counts are of this
 * rank; they are computed from shapes, so one rank speaks for all. */
static void log_compression(const ms_link *link, const ms_bucket *bucket)
{
    ms_link_compression c = ms_link_state_compression(link->state);
    if (!bucket->is_last || !ms_link_state_is_due(link->state, link->options.powersgd.stats_every)
        || ms_group_rank(bucket->group) != 0)
        return;
    ms_log(ms_engine_context(bucket->engine), MS_LOG_INFO,
           "powersgd: iteration %lld: of %llu numbers so far %llu were sent, %.1f %%",
           (long long)ms_link_state_iteration(link->state), (unsigned long long)c.before,
           (unsigned long long)c.after,
           c.before ? 100.0 * (double)c.after / (double)c.before : 0.0);
}

/* All numbers of the bucket are computed on every rank; a sharded bucket takes its shard at the
 * end. */
static ms_status reduce_compressed(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_context *context = ms_engine_context(bucket->engine);
    ms_link_ops w = { .link = link, .bucket = bucket };
    call c = { .work = &w, .options = &link->options, .count = bucket->count };
    void *memory = NULL;
    size_t bytes = bucket->count * (sizeof(matrix) + sizeof(int64_t) + sizeof(bool));
    ms_status status = ms_allocate(context, bytes, "powersgd", &memory);
    if (status) return status;
    c.matrices = memory;
    c.lengths = (int64_t *)(c.matrices + bucket->count);
    c.fresh = (bool *)(c.lengths + bucket->count);
    status = run(&w, &c);
    ms_release(context, memory);
    if (!status) status = ms_bucket_shard(bucket, bucket->buffer, out);
    if (!status) log_compression(link, bucket);
    return status;
}

/* A plain mean until start_step, the warm-up. The iteration counts with the last bucket, so that
 * all buckets of a pass decide alike. */
ms_status ms_powersgd_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    int64_t iteration = ms_link_state_iteration(link->state);
    ms_status status;
    if (bucket->count == 0) status = ms_link_stay_local(bucket, out);
    else if (iteration < link->options.powersgd.start_step)
        status = ms_link_reduce_by(link, bucket, MS_REDUCE_OP_AVG, out);
    else status = reduce_compressed(link, bucket, out);
    if (!status && bucket->is_last) ms_link_state_set_iteration(link->state, iteration + 1);
    return status;
}

/* Comparisons are written so that NaN is refused. */
ms_status ms_powersgd_check(ms_engine *engine, const ms_link_options *options)
{
    if (options->powersgd.rank < 1)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "powersgd: rank must be 1 or more, not %lld",
                              (long long)options->powersgd.rank);
    if (options->powersgd.start_step < 0)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "powersgd: start_step must be 0 or more, not %lld",
                              (long long)options->powersgd.start_step);
    if (!(options->powersgd.min_rate > 0))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "powersgd: min_rate must be above 0, not %g",
                              options->powersgd.min_rate);
    if (!(options->powersgd.eps >= 0 && options->powersgd.eps < INFINITY))
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "powersgd: eps must be 0 or more, not %g",
                              options->powersgd.eps);
    if (options->powersgd.stats_every < 1)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "powersgd: stats_every must be 1 or more, not %lld",
                              (long long)options->powersgd.stats_every);
    return MS_OK;
}
