/* links.c: the links that need no state, and chains of links. */
#include "hook/links.h"

#include <stdio.h>
#include <string.h>

/* --------------------------------------------------- what links are made of */

static ms_status apply(const ms_op *op, double value, bool in_place, ms_tensor *a, ms_tensor *b,
                       ms_tensor **out)
{
    ms_tensor *inputs[] = { a, b };
    ms_attributes attributes = { .scalar = { .value = value } };
    return ms_op_apply(ms_tensor_engine(a), op, &attributes, in_place, inputs, b ? 2 : 1, out, 1);
}

ms_status ms_link_apply(const ms_op *op, double value, ms_tensor *a, ms_tensor *b, ms_tensor **out)
{
    return apply(op, value, false, a, b, out);
}

ms_status ms_link_change(const ms_op *op, double value, ms_tensor *a, ms_tensor *b)
{
    ms_tensor *out = NULL;
    ms_status status = apply(op, value, true, a, b, &out);
    ms_tensor_release(out);
    return status;
}

ms_status ms_link_keep_finite(ms_tensor *memory)
{
    ms_tensor *finite = NULL, *bad = NULL;
    ms_status status = ms_link_apply(&ms_op_is_finite, 0, memory, NULL, &finite);
    if (!status) status = ms_link_apply(&ms_op_eq_scalar, 0, finite, NULL, &bad);
    if (!status) status = ms_link_change(&ms_op_masked_fill, 0, memory, bad);
    ms_tensor_release(finite);
    ms_tensor_release(bad);
    return status;
}

ms_status ms_link_cast(ms_tensor *t, ms_dtype dtype, ms_tensor **out)
{
    if (ms_tensor_dtype(t) == dtype) {
        *out = ms_tensor_retain(t);
        return MS_OK;
    }
    ms_attributes attributes = { .cast = { .dtype = dtype } };
    return ms_op_apply(ms_tensor_engine(t), &ms_op_cast, &attributes, false, &t, 1, out, 1);
}

ms_status ms_link_flat_copy(ms_tensor *t, ms_tensor **out)
{
    ms_engine *engine = ms_tensor_engine(t);
    ms_attributes flat = { .shape = { .dims = 1, .sizes = { -1 } } };
    ms_tensor *from = NULL, *made = NULL;
    int64_t count = ms_tensor_count(t);
    ms_status status = ms_op_apply(engine, &ms_op_reshape, &flat, false, &t, 1, &from, 1);
    if (!status) status = ms_tensor_new(engine, MS_F32, 1, &count, &made);
    if (!status) status = ms_copy_into(engine, from, made);
    ms_tensor_release(from);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

ms_group *ms_link_group(const ms_link *link, const ms_bucket *bucket)
{
    return link->options.group ? link->options.group : bucket->group;
}
double ms_link_share(const ms_link *link, const ms_bucket *bucket)
{
    return 1.0 / (link->options.group ? ms_group_size(link->options.group) : bucket->divisor);
}

ms_status ms_link_collective(const ms_link *link, const ms_bucket *bucket, ms_collective call)
{
    call.bucket = (int32_t)bucket->index;
    call.label = bucket->label;
    call.stream = ms_engine_current(bucket->engine);
    return ms_group_enqueue(ms_link_group(link, bucket), 1, &call, NULL);
}

ms_status ms_link_wire(const ms_link *link, const ms_bucket *bucket, ms_tensor *t, ms_dtype dtype,
                       ms_tensor **out)
{
    ms_storage *storage = NULL;
    ms_tensor *made = NULL;
    int64_t count = ms_tensor_count(t);
    ms_status status =
        ms_group_storage(ms_link_group(link, bucket), ms_engine_current(bucket->engine),
                         (size_t)count * ms_dtype_bytes(dtype), &storage);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &count, &made);
    if (!status) status = ms_copy_into(bucket->engine, t, made);
    ms_storage_release(storage);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

ms_status ms_link_check_length(const ms_link *link, const ms_bucket *bucket)
{
    char have[160];
    const ms_tensor *buffer = bucket->buffer;
    if (ms_tensor_count(buffer) == ms_tensor_count(bucket->flat) && ms_tensor_is_contiguous(buffer)
        && ms_dtype_is_float(ms_tensor_dtype(buffer)))
        return MS_OK;
    return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                          "%s: bucket %u has %lld numbers, the links before made them %s: put it "
                          "before links that change their number",
                          link->kind->name, bucket->index, (long long)ms_tensor_count(bucket->flat),
                          ms_tensor_describe(bucket->buffer, have, sizeof have));
}

/* --------------------------------------------------------------- reductions */

ms_status ms_link_refuse_feedback(const ms_link *link, const ms_bucket *bucket)
{
    if (!bucket->wants_sent) return MS_OK;
    return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT,
                          "%s: error_feedback stands before it, but its result is not the mean of "
                          "what ranks send: errors that are added later make nothing up",
                          link->kind->name);
}

/* In place. A mean is a sum of numbers that are divided as they are read, so that nothing overflows
 * (behaviours B1, V7). */
static ms_status reduce_by(const ms_link *link, ms_bucket *bucket, ms_reduce_op op, ms_tensor **out)
{
    ms_collective call = {
        .kind = MS_ALL_REDUCE, .op = op, .in = bucket->buffer, .travels = bucket->travels
    };
    bool adds = op == MS_REDUCE_OP_AVG || op == MS_REDUCE_OP_SUM;
    bool tells = bucket->wants_sent && !bucket->sent;
    bool is_narrow = ms_dtype_bytes(ms_tensor_dtype(bucket->buffer)) == 2;
    double factor = op == MS_REDUCE_OP_AVG ? ms_link_share(link, bucket) : 1;
    if (op == MS_REDUCE_OP_AVG) {
        call.op = MS_REDUCE_OP_PREMUL_SUM;
        call.factor = factor;
    }
    ms_status status = adds ? MS_OK : ms_link_refuse_feedback(link, bucket);
    if (!status && tells) status = ms_bucket_set_sent(bucket, bucket->buffer);
    if (!status && tells && is_narrow) return ms_link_sum_by_parts(link, bucket, factor, out);
    if (!status) status = ms_link_collective(link, bucket, call);
    if (!status) *out = ms_tensor_retain(bucket->buffer);
    return status;
}

static ms_status reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    return reduce_by(link, bucket, link->options.op, out);
}
ms_status ms_link_mean(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    return reduce_by(link, bucket, MS_REDUCE_OP_AVG, out);
}

static ms_status all_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    if (bucket->kind != MS_BUCKET_ALL_REDUCE)
        return ms_engine_fail(
            bucket->engine, MS_ERROR_ARGUMENT,
            "all_reduce: bucket %u is of the kind %s; reduce ends a chain for every kind",
            bucket->index, ms_bucket_kind_name(bucket->kind));
    return reduce(link, bucket, out);
}

ms_status ms_link_stay_local(ms_bucket *bucket, ms_tensor **out)
{
    bool tells = bucket->wants_sent && !bucket->sent;
    ms_status status = tells ? ms_bucket_set_sent(bucket, bucket->buffer) : MS_OK;
    return status ? status : ms_bucket_shard(bucket, bucket->buffer, out);
}

static ms_status noop(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    (void)link;
    return ms_link_stay_local(bucket, out);
}

/* --------------------------------------------------------------------- cast */

static ms_status cast_encode(const ms_link *link, ms_bucket *bucket)
{
    ms_tensor *made = NULL;
    bool told = ms_bucket_is_told(bucket);
    ms_status status = ms_link_wire(link, bucket, bucket->buffer, link->options.dtype, &made);
    if (!status) ms_bucket_set_buffer(bucket, made);
    if (!status && told) ms_bucket_tell(bucket);
    ms_tensor_release(made);
    return status;
}

/* Back into the memory that it came from, if it still has the length. */
static ms_status cast_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                             ms_tensor *reduced, ms_tensor **out)
{
    (void)link;
    ms_tensor *made = NULL;
    int64_t count = ms_tensor_count(reduced);
    ms_status status = MS_OK;
    if (count == ms_tensor_count(before)) made = ms_tensor_retain(before);
    else status = ms_tensor_new(bucket->engine, ms_tensor_dtype(before), 1, &count, &made);
    if (!status) status = ms_copy_into(bucket->engine, reduced, made);
    if (status) ms_tensor_release(made);
    else *out = made;
    return status;
}

static ms_status cast_check(ms_engine *engine, const ms_link_options *options)
{
    if (ms_dtype_is_float(options->dtype)) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                          "cast: gradients travel in a float dtype, not %s",
                          ms_dtype_name(options->dtype));
}

/* ------------------------------------------------------------------- chains */

static const ms_link_kind ms_link_reduce = { .name = "reduce",
                                             .reduce = reduce,
                                             .defaults = { .op = MS_REDUCE_OP_AVG } };
static const ms_link_kind ms_link_all_reduce = { .name = "all_reduce",
                                                 .reduce = all_reduce,
                                                 .defaults = { .op = MS_REDUCE_OP_AVG } };
static const ms_link_kind ms_link_noop = { .name = "noop", .reduce = noop };
static const ms_link_kind ms_link_cast_kind = {
    .name = "cast", .encode = cast_encode, .decode = cast_decode, .check = cast_check
};

static const ms_link_kind *const kinds[] = {
    &ms_link_reduce,         &ms_link_all_reduce, &ms_link_noop,           &ms_link_cast_kind,
    &ms_link_error_feedback, &ms_link_powersgd,   &ms_link_int8,           &ms_link_top_k,
    &ms_link_sign_vote,      &ms_link_adasum,     &ms_link_post_local_sgd, &ms_link_clip,
    &ms_link_nan_check
};

const ms_link_kind *ms_link_find(const char *name)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(kinds[i]->name, name) == 0) return kinds[i];
    return NULL;
}

bool ms_link_is_whole(const ms_link *link)
{
    return link->kind == &ms_link_clip && link->options.clip.scope == MS_CLIP_GLOBAL;
}

ms_status ms_chain_check(ms_engine *engine, const ms_link *links, uint32_t count)
{
    if (count == 0 || count > MS_CHAIN_LINKS)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "a chain has 1 to %d links, not %u",
                              MS_CHAIN_LINKS, count);
    for (uint32_t i = 0; i + 1 < count; i++)
        if (links[i].kind->reduce)
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "link %u (%s) reduces: the links behind it would never run",
                                  i + 1, links[i].kind->name);
    if (!links[count - 1].kind->reduce)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "link %u (%s) is the last and does not reduce", count,
                              links[count - 1].kind->name);
    for (uint32_t i = 1; i < count; i++)
        if (ms_link_is_whole(&links[i]))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "link %u (%s) clips by the norm of all: it must be the first, as "
                                  "it scales what all others made",
                                  i + 1, links[i].kind->name);
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++)
        if (links[i].kind->check) status = links[i].kind->check(engine, &links[i].options);
    return status;
}

ms_status ms_chain_take(ms_engine *engine, const ms_link *links, uint32_t count, ms_link *taken)
{
    ms_status status = ms_chain_check(engine, links, count);
    uint32_t done = 0;
    for (; done < count && !status; done++) {
        taken[done] = links[done];
        if (!links[done].kind->has_state) taken[done].state = NULL;
        else if (links[done].state) ms_link_state_retain(links[done].state);
        else status = ms_link_state_new(engine, &taken[done].state);
    }
    if (status) ms_chain_drop(taken, done);
    return status;
}

void ms_chain_drop(ms_link *taken, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        ms_link_state_release(taken[i].state);
        taken[i].state = NULL;
    }
}

/* Links compute in f32 also where backward was called inside of autocast. */
ms_dtype ms_chain_begin(ms_bucket *bucket)
{
    ms_dtype autocast = ms_engine_autocast(bucket->engine);
    ms_engine_set_autocast(bucket->engine, MS_F32);
    bucket->wants_sent = false;
    bucket->travels = MS_F32;
    return autocast;
}

void ms_chain_end(ms_bucket *bucket, ms_dtype autocast)
{
    ms_engine_set_autocast(bucket->engine, autocast);
    ms_tensor_release(bucket->sent);
    bucket->sent = NULL;
}

static ms_status decode(const ms_link *link, uint32_t number, ms_bucket *bucket, ms_tensor *before,
                        ms_tensor **reduced)
{
    ms_tensor *decoded = NULL;
    if (!link->kind->decode) return MS_OK;
    ms_status status = ms_bucket_account(bucket, number);
    if (status) return status;
    ms_trace_label(bucket->engine, "bucket %u: %s", bucket->index, link->kind->name);
    status = link->kind->decode(link, bucket, before, *reduced, &decoded);
    if (status) return status;
    ms_tensor_release(*reduced);
    *reduced = decoded;
    return MS_OK;
}

/* Whose error it is, and of which bucket; what ranks or tasks have met says so by itself. */
static ms_status name_link(const ms_link *link, const ms_bucket *bucket, ms_status status)
{
    char message[MS_ERROR_MESSAGE_BYTES];
    const char *name = link->kind->name, *colon = ": ";
    if (status != MS_ERROR_ARGUMENT && status != MS_ERROR_STATE && status != MS_ERROR_MEMORY)
        return status;
    snprintf(message, sizeof message, "%s", ms_engine_error(bucket->engine)->message);
    if (strncmp(message, name, strlen(name)) == 0) name = colon = "";
    return ms_engine_fail(bucket->engine, status, "comm hook, bucket %u \"%s\": %s%s%s",
                          bucket->index, bucket->label, name, colon, message);
}

/* A cast right before a plain reduction of f32 needs no memory of its own: the reduction rounds in
 * registers, to the same bits. */
static bool rounds_on_the_way(const ms_link *cast, const ms_link *reduction,
                              const ms_bucket *bucket)
{
    bool plain = reduction->kind == &ms_link_reduce || reduction->kind == &ms_link_all_reduce;
    return plain && cast->kind == &ms_link_cast_kind && cast->options.dtype != MS_F32
           && ms_tensor_dtype(bucket->buffer) == MS_F32 && !bucket->wants_sent;
}

ms_status ms_chain_run(const ms_link *links, uint32_t count, ms_bucket *bucket, ms_tensor **result)
{
    const ms_link *at = &links[count - 1];
    ms_tensor *before[MS_CHAIN_LINKS] = { NULL }, *reduced = NULL;
    ms_status status = MS_OK;
    ms_dtype autocast = ms_chain_begin(bucket);
    uint32_t label = ms_trace_label(bucket->engine, "bucket %u", bucket->index);
    uint32_t wraps = count - 1;
    for (uint32_t i = 0; i < wraps && !status; i++) {
        at = &links[i];
        if (i + 2 == count && rounds_on_the_way(&links[i], &links[i + 1], bucket)) {
            bucket->travels = links[i].options.dtype;
            wraps--;
            break;
        }
        before[i] = ms_tensor_retain(bucket->buffer);
        ms_trace_label(bucket->engine, "bucket %u: %s", bucket->index, links[i].kind->name);
        status = ms_bucket_account(bucket, i + 1);
        if (!status) status = links[i].kind->encode(&links[i], bucket);
    }
    if (!status) at = &links[count - 1];
    if (!status) status = ms_bucket_account(bucket, count);
    if (!status) status = at->kind->reduce(at, bucket, &reduced);
    for (uint32_t i = wraps; i-- > 0 && !status;)
        status = decode(at = &links[i], i + 1, bucket, before[i], &reduced);
    if (status) status = name_link(at, bucket, status);
    for (uint32_t i = 0; i < wraps; i++) ms_tensor_release(before[i]);
    ms_trace_relabel(bucket->engine, label);
    ms_chain_end(bucket, autocast);
    if (status) ms_tensor_release(reduced);
    else *result = reduced;
    return status;
}
