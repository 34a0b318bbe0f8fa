/* links.c: the native links, and chains of them. */
#include <string.h>

#include "moonshard/hook.h"
#include "tensor/copy.h"

/* ------------------------------------------------------------------------------------------------------------------------ reductions */

/* In place. A mean is a sum of numbers that are divided as they are read, so that nothing overflows (behaviours B1, V7). */
static ms_status reduce(const ms_link_options *options, ms_bucket *bucket, ms_tensor **out)
{
    ms_collective call = { .kind = MS_ALL_REDUCE, .op = options->op, .in = bucket->buffer, .bucket = (int32_t)bucket->index, .label = bucket->label,
                           .stream = ms_engine_current(bucket->engine) };
    ms_group *group = options->group ? options->group : bucket->group;
    if (options->op == MS_REDUCE_OP_AVG) {
        call.op = MS_REDUCE_OP_PREMUL_SUM;
        call.factor = 1.0 / (options->group ? ms_group_size(group) : bucket->divisor);
    }
    ms_status status = ms_group_enqueue(group, 1, &call, NULL);
    if (!status) *out = ms_tensor_retain(bucket->buffer);
    return status;
}

static ms_status all_reduce(const ms_link_options *options, ms_bucket *bucket, ms_tensor **out)
{
    if (bucket->kind != MS_BUCKET_ALL_REDUCE)
        return ms_engine_fail(bucket->engine, MS_ERROR_ARGUMENT, "all_reduce: bucket %u is of the kind %s; reduce ends a chain for every kind", bucket->index, ms_bucket_kind_name(bucket->kind));
    return reduce(options, bucket, out);
}

static ms_status noop(const ms_link_options *options, ms_bucket *bucket, ms_tensor **out)
{
    (void)options;
    return ms_bucket_shard(bucket, bucket->buffer, out);
}

/* ----------------------------------------------------------------------------------------------------------------------------- cast */

static ms_status cast_encode(const ms_link_options *options, ms_bucket *bucket)
{
    ms_storage *storage = NULL;
    ms_tensor *made = NULL;
    int64_t count = ms_tensor_count(bucket->buffer);
    ms_status status = ms_group_storage(options->group ? options->group : bucket->group, ms_engine_current(bucket->engine), (size_t)count * ms_dtype_bytes(options->dtype), &storage);
    if (!status) status = ms_tensor_on(storage, options->dtype, 1, &count, &made);
    if (!status) status = ms_copy_into(bucket->engine, bucket->buffer, made);
    if (!status) ms_bucket_set_buffer(bucket, made);
    ms_tensor_release(made);
    ms_storage_release(storage);
    return status;
}

/* Back into the memory that it came from, if it still has the length. */
static ms_status cast_decode(const ms_link_options *options, ms_bucket *bucket, ms_tensor *before, ms_tensor *reduced, ms_tensor **out)
{
    (void)options;
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

/* ---------------------------------------------------------------------------------------------------------------------------- chains */

static const ms_link_kind kinds[] = {
    { .name = "reduce", .reduce = reduce },
    { .name = "all_reduce", .reduce = all_reduce },
    { .name = "noop", .reduce = noop },
    { .name = "cast", .encode = cast_encode, .decode = cast_decode },
};

const ms_link_kind *ms_link_find(const char *name)
{
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (strcmp(kinds[i].name, name) == 0) return &kinds[i];
    return NULL;
}

ms_status ms_chain_check(ms_engine *engine, const ms_link *links, uint32_t count)
{
    if (count == 0 || count > MS_CHAIN_LINKS) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "a chain has 1 to %d links, not %u", MS_CHAIN_LINKS, count);
    for (uint32_t i = 0; i + 1 < count; i++)
        if (links[i].kind->reduce) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "link %u (%s) reduces: the links behind it would never run", i + 1, links[i].kind->name);
    if (!links[count - 1].kind->reduce) return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "link %u (%s) is the last and does not reduce", count, links[count - 1].kind->name);
    for (uint32_t i = 0; i < count; i++)
        if (links[i].kind->encode == cast_encode && !ms_dtype_is_float(links[i].options.dtype))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "link %u (cast): gradients travel in a float dtype, not %s", i + 1, ms_dtype_name(links[i].options.dtype));
    return MS_OK;
}

ms_status ms_chain_run(const ms_link *links, uint32_t count, ms_bucket *bucket, ms_tensor **result)
{
    ms_tensor *before[MS_CHAIN_LINKS] = { NULL }, *reduced = NULL;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i + 1 < count && !status; i++) {
        before[i] = ms_tensor_retain(bucket->buffer);
        status = links[i].kind->encode(&links[i].options, bucket);
    }
    if (!status) status = links[count - 1].kind->reduce(&links[count - 1].options, bucket, &reduced);
    for (uint32_t i = count - 1; i-- > 0 && !status;) {
        if (!links[i].kind->decode) continue;
        ms_tensor *decoded = NULL;
        status = links[i].kind->decode(&links[i].options, bucket, before[i], reduced, &decoded);
        if (status) continue;
        ms_tensor_release(reduced);
        reduced = decoded;
    }
    for (uint32_t i = 0; i + 1 < count; i++) ms_tensor_release(before[i]);
    if (status) ms_tensor_release(reduced);
    else *result = reduced;
    return status;
}
