/* attention_reference.h: attention as a plain computation in f64, and checks of it. */
#ifndef MOONSHARD_TESTS_ATTENTION_REFERENCE_H
#define MOONSHARD_TESTS_ATTENTION_REFERENCE_H

#include "reference.h"

/* positions, if given: the fourth input. With two results the second is the logarithm of the sum of
 * exponentials. */
static inline void attention_reference(const check *c)
{
    const double *positions = c->ins > 3 ? c->in[3].values : NULL;
    const operand *q = &c->in[0], *k = &c->in[1], *v = &c->in[2];
    int64_t batches = q->shape[0], heads = q->shape[1], queries = q->shape[2], width = q->shape[3],
            groups = k->shape[1], keys = k->shape[2];
    double scale = c->attributes.attention.scale != 0 ? c->attributes.attention.scale
                                                      : 1 / sqrt((double)width),
           *p = malloc((size_t)keys * sizeof *p);
    for (int64_t row = 0; row < batches * heads * queries; row++) {
        int64_t i = row % queries, head = row / queries % heads, batch = row / queries / heads,
                offset = c->attributes.attention.shifted ? c->attributes.attention.offset
                                                         : keys - queries,
                seen = c->attributes.attention.causal ? offset + i + 1 : keys,
                begin = positions ? offset + i - (int64_t)positions[batch * queries + i] : 0,
                window = c->attributes.attention.window;
        if (window > 0 && seen - window > begin) begin = seen - window;
        if (begin < 0) begin = 0;
        if (seen > keys) seen = keys;
        const double *x = q->values + row * width,
                     *ks = k->values + (batch * groups + head * groups / heads) * keys * width,
                     *vs = v->values + (batch * groups + head * groups / heads) * keys * width;
        double most = -1e300, total = 0, *out = c->out[0].values + row * width;
        for (int64_t j = begin; j < seen; j++) {
            p[j] = 0;
            for (int64_t d = 0; d < width; d++) p[j] += x[d] * ks[j * width + d] * scale;
            most = fmax(most, p[j]);
        }
        for (int64_t j = begin; j < seen; j++) total += p[j] = exp(p[j] - most);
        memset(out, 0, (size_t)width * sizeof *out);
        for (int64_t j = begin; j < seen; j++)
            for (int64_t d = 0; d < width; d++) out[d] += p[j] / total * vs[j * width + d];
        if (c->outs > 1) c->out[1].values[row] = most + log(total);
    }
    free(p);
}

/* Gives a check the second result. */
static inline void with_log_sum(check *c)
{
    const operand *q = &c->in[0];
    c->outs = 2;
    c->out[1] =
        (operand){ .dtype = MS_F32, .dims = 3, .shape = { q->shape[0], q->shape[1], q->shape[2] } };
}

typedef struct sizes {
    int64_t batches, heads, groups, queries, keys, width;
    bool causal;
} sizes;

static inline check attention_of(ms_dtype dtype, sizes s, int layout)
{
    operand q = { .dtype = dtype,
                  .dims = 4,
                  .shape = { s.batches, s.heads, s.queries, s.width },
                  .layout = layout,
                  .low = -2,
                  .high = 2 },
            out = q;
    operand k = { .dtype = dtype,
                  .dims = 4,
                  .shape = { s.batches, s.groups, s.keys, s.width },
                  .layout = layout,
                  .low = -2,
                  .high = 2 };
    out.layout = PLAIN;
    return (check){ .op = &ms_op_attention,
                    .attributes.attention.causal = s.causal,
                    .in = { q, k, k },
                    .ins = 3,
                    .out = { out },
                    .outs = 1,
                    .reference = attention_reference };
}

#endif
