/* powersgd.c: each gradient matrix M as a product P Q' of two narrow ones, which are what travels
 * (Vogels et al. 2019; behaviours B5 to B8).
 *
 * M = gradient + error; P = sum over ranks of M Q; P's columns are made orthonormal; Q = mean over
 * ranks of M' P; the result is P Q', the error M - P Q'. Q is the next iteration's start. Work is
 * in f32; P, Q and what is not compressed travel in the buffer's dtype, P then divided by the
 * number of ranks so that f16 holds it. */
#include "hook/links.h"

#include <math.h>

/* small: it travels as P and Q */
typedef struct matrix {
    int64_t n, m, r, offset;
    bool small;
} matrix;

/* What one bucket's call works with. */
typedef struct work {
    const ms_link *link;
    ms_bucket *bucket;
    ms_engine *engine;
    matrix *matrices;
    int64_t *lengths; /* room for one number a parameter */
    bool *fresh;
    uint32_t count;  /* of matrices; the parameters' number unless batched */
    uint32_t smalls; /* how many of them are small */
    ms_tensor *wide, *error, *p, *q;
    ms_tensor *start; /* the initial Q */
} work;

/* [rows, columns] at an offset of t, with these strides. */
static ms_status view(ms_tensor *t, int64_t offset, int64_t rows, int64_t columns,
                      int64_t row_stride, int64_t column_stride, ms_tensor **out)
{
    const int64_t shape[] = { rows, columns }, strides[] = { row_stride, column_stride };
    return ms_tensor_window(t, 2, shape, strides, ms_tensor_offset(t) + offset, out);
}

static ms_status orthonormalize(ms_tensor *t, double eps)
{
    ms_attributes attributes = { .norm = { .eps = eps } };
    ms_tensor *out = NULL;
    ms_status status =
        ms_op_apply(ms_tensor_engine(t), &ms_op_orthonormalize, &attributes, true, &t, 1, &out, 1);
    ms_tensor_release(out);
    return status;
}

/* Sums t over ranks in the buffer's dtype, each rank's numbers times factor. */
static ms_status add_up(const work *w, ms_tensor *t, double factor)
{
    ms_tensor *wire = NULL;
    ms_status status =
        ms_link_wire(w->link, w->bucket, t, ms_tensor_dtype(w->bucket->buffer), &wire);
    if (!status)
        status = ms_link_collective(w->link, w->bucket,
                                    (ms_collective){ .kind = MS_ALL_REDUCE,
                                                     .op = MS_REDUCE_OP_PREMUL_SUM,
                                                     .factor = factor,
                                                     .in = wire });
    if (!status) status = ms_copy_into(w->engine, wire, t);
    ms_tensor_release(wire);
    return status;
}

/* Which matrices are worth it. */
static void choose(work *w)
{
    const ms_link_options *o = &w->link->options;
    int64_t offset = 0, after = 0;
    for (uint32_t i = 0; i < w->count; i++) {
        const ms_tensor *parameter = w->bucket->parameters[i];
        matrix *x = &w->matrices[i];
        int64_t count = ms_tensor_count(parameter),
                n = ms_tensor_dims(parameter) ? ms_tensor_shape(parameter)[0] : 1;
        *x = (matrix){ .n = n, .m = n ? count / n : 0, .offset = offset };
        x->r = x->n < x->m ? x->n : x->m;
        if (x->r > o->powersgd.rank) x->r = o->powersgd.rank;
        x->small = (double)((x->n + x->m) * x->r) * o->powersgd.min_rate < (double)(x->n * x->m);
        w->smalls += x->small;
        offset += count;
        after += x->small ? (x->n + x->m) * x->r : count;
    }
    ms_link_state_compressed(w->link->state, offset, after);
}

/* The whole bucket as one square matrix with zeros behind it. */
static ms_status choose_square(work *w, ms_tensor *gradients)
{
    int64_t count = ms_tensor_count(gradients), side = (int64_t)ceil(sqrt((double)count)),
            padded = 0;
    ms_tensor *front = NULL;
    const int64_t stride = 1;
    while (side * side < count) side++;
    padded = side * side;
    int64_t rank = w->link->options.powersgd.rank;
    w->matrices[0] =
        (matrix){ .n = side, .m = side, .r = rank < side ? rank : side, .small = true };
    w->count = w->smalls = 1;
    ms_link_state_compressed(w->link->state, count, 2 * side * w->matrices[0].r);
    ms_status status = ms_tensor_new(w->engine, MS_F32, 1, &padded, &w->wide);
    if (!status) status = ms_link_change(&ms_op_fill, 0, w->wide, NULL);
    if (!status)
        status = ms_tensor_window(w->wide, 1, &count, &stride, ms_tensor_offset(w->wide), &front);
    if (!status) status = ms_copy_into(w->engine, gradients, front);
    ms_tensor_release(front);
    return status;
}

/* What is not compressed, in one piece, as its mean. */
static ms_status reduce_rest(work *w)
{
    ms_tensor *rest = NULL, *from = NULL, *to = NULL;
    int64_t total = 0, stride = 1;
    for (uint32_t i = 0; i < w->count; i++)
        total += w->matrices[i].small ? 0 : w->matrices[i].n * w->matrices[i].m;
    if (total == 0) return MS_OK;
    ms_status status = ms_tensor_new(w->engine, MS_F32, 1, &total, &rest);
    for (int back = 0; back < 2 && !status; back++) {
        int64_t at = 0;
        if (back) status = add_up(w, rest, ms_link_share(w->link, w->bucket));
        for (uint32_t i = 0; i < w->count && !status; i++) {
            const matrix *x = &w->matrices[i];
            int64_t count = x->n * x->m;
            if (x->small || count == 0) continue;
            status = ms_tensor_window(w->wide, 1, &count, &stride,
                                      ms_tensor_offset(w->wide) + x->offset, &from);
            if (!status)
                status =
                    ms_tensor_window(rest, 1, &count, &stride, ms_tensor_offset(rest) + at, &to);
            if (!status)
                status =
                    back ? ms_copy_into(w->engine, to, from) : ms_copy_into(w->engine, from, to);
            ms_tensor_release(from);
            ms_tensor_release(to);
            from = to = NULL;
            at += count;
        }
    }
    ms_tensor_release(rest);
    return status;
}

/* State `name` with per(matrix) numbers for each small one. */
static ms_status get_state(work *w, const char *name, int64_t (*per)(const matrix *),
                           ms_tensor **out)
{
    const ms_bucket *bucket = w->bucket;
    bool square = w->link->options.powersgd.batched;
    for (uint32_t i = 0; i < bucket->count; i++)
        w->lengths[i] = !square && w->matrices[i].small ? per(&w->matrices[i]) : 0;
    if (square) {
        /* A square belongs to no parameter: its numbers stand with the bucket's first, or, where
         * each parameter has its own, their tail with the last. */
        int64_t left = per(&w->matrices[0]);
        bool by_parameter = left >= ms_tensor_count(bucket->flat);
        for (uint32_t i = 0; i < bucket->count && by_parameter; i++)
            left -= w->lengths[i] = ms_tensor_count(bucket->parameters[i]);
        w->lengths[by_parameter ? bucket->count - 1 : 0] += left;
    }
    return ms_link_state_tensor(w->link->state, bucket, name, w->lengths, w->fresh, out);
}

static int64_t numbers(const matrix *x) { return x->n * x->m; }
static int64_t q_numbers(const matrix *x) { return x->m * x->r; }

/* M += error; the error keeps M. */
static ms_status add_error(work *w)
{
    int64_t at = 0;
    ms_status status = get_state(w, "error", numbers, &w->error);
    for (uint32_t i = 0; i < w->count && !status; i++) {
        const matrix *x = &w->matrices[i];
        ms_tensor *m = NULL, *e = NULL;
        if (!x->small) continue;
        status = view(w->wide, x->offset, x->n, x->m, x->m, 1, &m);
        if (!status) status = view(w->error, at, x->n, x->m, x->m, 1, &e);
        if (!status) status = ms_link_change(&ms_op_add, 1, e, m);
        if (!status) status = ms_copy_into(w->engine, e, m);
        ms_tensor_release(m);
        ms_tensor_release(e);
        at += numbers(x);
    }
    return status;
}

/* The same numbers on every rank. */
static ms_status draw(const work *w, uint32_t index, ms_tensor *q)
{
    uint64_t seed = (uint64_t)w->link->options.powersgd.seed
                    + ((uint64_t)ms_link_state_iteration(w->link->state) << 32)
                    + ((uint64_t)w->bucket->index << 16) + index;
    ms_attributes attributes = { .random = { .random = { .seed = seed }, .b = 1 } };
    ms_tensor *out = NULL;
    ms_status status = ms_op_apply(w->engine, &ms_op_normal, &attributes, true, &q, 1, &out, 1);
    ms_tensor_release(out);
    return status;
}

static ms_status take_q(work *w)
{
    int64_t total = 0;
    if (w->link->options.powersgd.warm_start) return get_state(w, "q", q_numbers, &w->q);
    for (uint32_t i = 0; i < w->count; i++)
        total += w->matrices[i].small ? q_numbers(&w->matrices[i]) : 0;
    for (uint32_t i = 0; i < w->bucket->count; i++) w->fresh[i] = true;
    return ms_tensor_new(w->engine, MS_F32, 1, &total, &w->q);
}

/* Rounded to dtype on the way. */
static ms_status multiply_into(ms_tensor *a, ms_tensor *b, ms_dtype dtype, ms_tensor *out)
{
    ms_tensor *product = NULL, *rounded = NULL;
    ms_status status = ms_link_apply(&ms_op_matmul, 0, a, b, &product);
    if (!status) status = ms_link_cast(product, dtype, &rounded);
    if (!status) status = ms_copy_into(ms_tensor_engine(a), rounded, out);
    ms_tensor_release(rounded);
    ms_tensor_release(product);
    return status;
}

/* Where all gradients were zero, or not finite, a column of Q is, too, and would be for ever: the
 * next iteration starts from what this one did. */
static ms_status keep_start(const work *w, int64_t at, const matrix *x, ms_tensor *q)
{
    ms_attributes columns = { .reduce = { .dim = 0, .keep = true, .p = 2 } };
    ms_tensor *start = NULL, *norms = NULL, *zero = NULL, *finite = NULL, *good = NULL,
              *kept = NULL;
    ms_status status = view(w->start, at, x->m, x->r, x->r, 1, &start);
    if (!status) status = ms_op_apply(w->engine, &ms_op_norm, &columns, false, &q, 1, &norms, 1);
    if (!status) status = ms_link_apply(&ms_op_eq_scalar, 0, norms, NULL, &zero);
    if (!status) status = ms_link_apply(&ms_op_is_finite, 0, norms, NULL, &finite);
    ms_tensor *inputs[] = { zero, start, q };
    if (!status) status = ms_op_apply(w->engine, &ms_op_where, NULL, false, inputs, 3, &good, 1);
    ms_tensor *others[] = { finite, good, start };
    if (!status) status = ms_op_apply(w->engine, &ms_op_where, NULL, false, others, 3, &kept, 1);
    if (!status) status = ms_copy_into(w->engine, kept, q);
    ms_tensor_release(start);
    ms_tensor_release(norms);
    ms_tensor_release(zero);
    ms_tensor_release(finite);
    ms_tensor_release(good);
    ms_tensor_release(kept);
    return status;
}

typedef enum part { TO_P, TO_Q, TO_M } part;

/* m, p, q: views of one matrix' numbers. */
static ms_status multiply(const work *w, uint32_t i, part what, ms_tensor *m, ms_tensor *p,
                          ms_tensor *q, int64_t error_at)
{
    const matrix *x = &w->matrices[i];
    double eps = w->link->options.powersgd.eps;
    ms_tensor *t = NULL, *e = NULL;
    ms_status status = MS_OK;
    if (what == TO_P) {
        if (w->fresh[w->link->options.powersgd.batched ? 0 : i]) status = draw(w, i, q);
        if (!status) status = orthonormalize(q, eps);
        if (!status) status = multiply_into(m, q, MS_F32, p);
    } else if (what == TO_Q) {
        status = orthonormalize(p, eps);
        if (!status) status = view(w->wide, x->offset, x->m, x->n, 1, x->m, &t);
        if (!status) status = multiply_into(t, p, MS_F32, q);
    } else {
        status = view(w->q, ms_tensor_offset(q) - ms_tensor_offset(w->q), x->r, x->m, 1, x->r, &t);
        /* As the bucket's dtype will have it, so that the error knows of this rounding too. */
        if (!status) status = multiply_into(p, t, ms_tensor_dtype(w->bucket->buffer), m);
        if (!status && w->error) status = view(w->error, error_at, x->n, x->m, x->m, 1, &e);
        if (!status && w->error) status = ms_link_change(&ms_op_sub, 1, e, m);
        if (!status && w->error) status = ms_link_keep_finite(e);
        if (!status && w->start)
            status = keep_start(w, ms_tensor_offset(q) - ms_tensor_offset(w->q), x, q);
    }
    ms_tensor_release(t);
    ms_tensor_release(e);
    return status;
}

static ms_status multiply_all(const work *w, part what)
{
    int64_t p_at = 0, q_at = 0, error_at = 0;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < w->count && !status; i++) {
        const matrix *x = &w->matrices[i];
        ms_tensor *m = NULL, *p = NULL, *q = NULL;
        if (!x->small) continue;
        status = view(w->wide, x->offset, x->n, x->m, x->m, 1, &m);
        if (!status) status = view(w->p, p_at, x->n, x->r, x->r, 1, &p);
        if (!status) status = view(w->q, q_at, x->m, x->r, x->r, 1, &q);
        if (!status) status = multiply(w, i, what, m, p, q, error_at);
        ms_tensor_release(m);
        ms_tensor_release(p);
        ms_tensor_release(q);
        p_at += x->n * x->r;
        q_at += x->m * x->r;
        error_at += numbers(x);
    }
    return status;
}

/* For error_feedback, where this link keeps no error itself: what the products P Q' lack of the
 * matrices is left. */
static ms_status tell_products(const work *w)
{
    ms_tensor *sent = w->bucket->sent, *wide = w->wide;
    int64_t stride = 1, all = ms_tensor_count(sent);
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < w->count && !status; i++) {
        const matrix *x = &w->matrices[i];
        int64_t count = x->n * x->m < all - x->offset ? x->n * x->m : all - x->offset;
        ms_tensor *from = NULL, *to = NULL;
        if (!x->small) continue;
        int64_t at = ms_tensor_offset(wide) + x->offset;
        int64_t sent_at = ms_tensor_offset(sent) + x->offset;
        status = ms_tensor_window(wide, 1, &count, &stride, at, &from);
        if (!status) status = ms_tensor_window(sent, 1, &count, &stride, sent_at, &to);
        if (!status) status = ms_copy_into(w->engine, from, to);
        ms_tensor_release(from);
        ms_tensor_release(to);
    }
    return status;
}

static ms_status compress(work *w)
{
    int64_t total = 0;
    double share = ms_link_share(w->link, w->bucket);
    for (uint32_t i = 0; i < w->count; i++)
        total += w->matrices[i].small ? w->matrices[i].n * w->matrices[i].r : 0;
    ms_status status = w->link->options.powersgd.error_feedback ? add_error(w) : MS_OK;
    if (!status) status = reduce_rest(w);
    if (w->smalls == 0 || status) return status;
    status = take_q(w);
    if (!status) status = ms_tensor_new(w->engine, MS_F32, 1, &total, &w->p);
    if (!status) status = multiply_all(w, TO_P);
    if (!status && w->link->options.powersgd.warm_start)
        status = ms_link_flat_copy(w->q, &w->start);
    if (!status) status = add_up(w, w->p, ms_tensor_dtype(w->bucket->buffer) == MS_F32 ? 1 : share);
    if (!status) status = multiply_all(w, TO_Q);
    if (!status) status = add_up(w, w->q, share);
    return status ? status : multiply_all(w, TO_M);
}

static ms_status run(work *w)
{
    ms_tensor *buffer = w->bucket->buffer, *front = NULL;
    int64_t count = ms_tensor_count(buffer);
    const int64_t stride = 1;
    bool tells = w->bucket->wants_sent && !w->bucket->sent;
    /* What stays in this link's own error is not lost. */
    ms_status status = tells ? ms_bucket_set_sent(w->bucket, buffer) : MS_OK;
    if (!status && w->link->options.powersgd.batched) status = choose_square(w, buffer);
    else if (!status) {
        choose(w);
        status = ms_link_cast(buffer, MS_F32, &w->wide);
    }
    if (!status) status = compress(w);
    if (!status && tells && !w->link->options.powersgd.error_feedback) status = tell_products(w);
    if (!status && w->wide != buffer) {
        status = ms_tensor_window(w->wide, 1, &count, &stride, ms_tensor_offset(w->wide), &front);
        if (!status) status = ms_copy_into(w->engine, front, buffer);
        ms_tensor_release(front);
    }
    return status;
}

/* Behind an iteration's last bucket, on one rank. */
static void tell(const ms_link *link, const ms_bucket *bucket)
{
    ms_link_compression c = ms_link_state_compression(link->state);
    if (!bucket->is_last || !ms_link_state_is_due(link->state, link->options.powersgd.stats_every)
        || ms_group_rank(bucket->group) != 0)
        return;
    ms_log(ms_engine_context(bucket->engine), MS_LOG_INFO,
           "powersgd: iteration %lld: of %llu numbers so far %llu have travelled, %.1f %%",
           (long long)ms_link_state_iteration(link->state), (unsigned long long)c.before,
           (unsigned long long)c.after,
           c.before ? 100.0 * (double)c.after / (double)c.before : 0.0);
}

static ms_status reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    int64_t iteration = ms_link_state_iteration(link->state);
    void *memory = NULL;
    ms_status status = ms_link_check_length(link, bucket);
    if (status) return status;
    if (iteration < link->options.powersgd.start_step) status = ms_link_mean(link, bucket, out);
    else {
        status = ms_allocate(ms_engine_context(bucket->engine),
                             bucket->count * (sizeof(matrix) + sizeof(int64_t) + sizeof(bool)),
                             "powersgd", &memory);
        if (status) return status;
        work w = { .link = link,
                   .bucket = bucket,
                   .engine = bucket->engine,
                   .matrices = memory,
                   .count = bucket->count };
        w.lengths = (int64_t *)(w.matrices + bucket->count);
        w.fresh = (bool *)(w.lengths + bucket->count);
        status = run(&w);
        ms_tensor_release(w.wide);
        ms_tensor_release(w.error);
        ms_tensor_release(w.p);
        ms_tensor_release(w.q);
        ms_tensor_release(w.start);
        ms_release(ms_engine_context(bucket->engine), memory);
        if (!status) *out = ms_tensor_retain(bucket->buffer);
        if (!status) tell(link, bucket);
    }
    if (!status && bucket->is_last) ms_link_state_set_iteration(link->state, iteration + 1);
    return status;
}

static ms_status check(ms_engine *engine, const ms_link_options *options)
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

const ms_link_kind ms_link_powersgd = {
    .name = "powersgd",
    .reduce = reduce,
    .check = check,
    .has_state = true,
    .defaults = { .powersgd = { .rank = 1,
                                .start_step = 1000,
                                .stats_every = 10000,
                                .min_rate = 2,
                                .error_feedback = true,
                                .warm_start = true } },
};
