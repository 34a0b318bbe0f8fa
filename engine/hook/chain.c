/* chain.c: chains of native links: checked, kept, run. */
#include "hook/chain.h"

#include <stdio.h>
#include <string.h>

/* ------------------------------------------------------------------- checks */

/* place: a kind of bucket, or MS_BUCKET_KINDS for links between the reductions of a hybrid bucket.
 * The reason is the kind's own text, which says what to use there. */
static ms_status check_place(ms_engine *engine, uint32_t place, const ms_link *link)
{
    const ms_link_kind *kind = link->kind;
    bool between = place == MS_BUCKET_KINDS;
    if (kind->places & MS_PLACE(place)) return MS_OK;
    return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "%s does not work %s%s: %s", kind->name,
                          between ? "between the reductions of hybrid buckets"
                                  : "on buckets of the kind ",
                          between ? "" : ms_bucket_kind_name((ms_bucket_kind)place), kind->reason);
}

/* Links before the last do not reduce, and the last one does. clip "global" comes first: it keeps
 * the results of all other links until the last bucket and scales them in place. */
static ms_status check_order(ms_engine *engine, const ms_link *links, uint32_t count)
{
    for (uint32_t i = 0; i + 1 < count; i++)
        if (links[i].kind->reduce)
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "link %u (%s) reduces: the links after it would never run", i + 1,
                                  links[i].kind->name);
    if (!links[count - 1].kind->reduce)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "link %u (%s) is the last and does not reduce", count,
                              links[count - 1].kind->name);
    /* From the second on: the first may be whole. */
    for (uint32_t i = 1; i < count; i++)
        if (ms_link_is_whole(&links[i]))
            return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                                  "link %u (%s) clips by the norm of all: it must be the first, "
                                  "because it scales the results of all others",
                                  i + 1, links[i].kind->name);
    return MS_OK;
}

/* Order, places and options of one chain. The checks run when the chain is given to a model, so
 * that a pass does not fail in the middle. */
static ms_status check_each(ms_engine *engine, uint32_t place, const ms_link *links, uint32_t count)
{
    ms_status status = check_order(engine, links, count);
    for (uint32_t i = 0; i < count && !status; i++) {
        status = check_place(engine, place, &links[i]);
        if (!status && links[i].kind->check)
            status = links[i].kind->check(engine, &links[i].options);
    }
    return status;
}

/* How many of the links run around the reduction, itself included; the others run between its
 * halves. A reduction says how many follow it (options.between), so the array needs no other
 * structure. */
static uint32_t around(const ms_link *links, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (links[i].kind->reduce && links[i].options.between == count - 1 - i) return i + 1;
    return count;
}

/* The outer chain and the one between its reductions are checked by the same rules, each at its
 * place. */
ms_status ms_chain_check(ms_engine *engine, ms_bucket_kind kind, const ms_link *links,
                         uint32_t count)
{
    if (count == 0 || count > MS_CHAIN_LINKS)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT, "a chain has 1 to %d links, not %u",
                              MS_CHAIN_LINKS, count);
    uint32_t outer = around(links, count);
    ms_status status = check_each(engine, kind, links, outer);
    /* Without links between there is nothing that needs a hybrid bucket. */
    if (status || outer == count) return status;
    if (kind != MS_BUCKET_HYBRID)
        return ms_engine_fail(engine, MS_ERROR_ARGUMENT,
                              "reduce: links between its reductions need hybrid buckets; these are "
                              "of the kind %s, which is reduced once",
                              ms_bucket_kind_name(kind));
    return check_each(engine, MS_BUCKET_KINDS, links + outer, count - outer);
}

/* The groups that the options name: the link is a user of them, or no longer. */
static void hold_groups(ms_link *link, bool holds)
{
    for (const ms_link_option *o = link->kind ? link->kind->options : NULL; o && o->name; o++) {
        ms_group **group = (ms_group **)(void *)((char *)&link->options + o->offset);
        if (o->type != MS_OPTION_GROUP || !*group) continue;
        if (holds) ms_group_retain(*group);
        else {
            ms_group_release(*group);
            *group = NULL;
        }
    }
}

/* A link without a state gets one here, so that a chain that the application wrote as data is ready
 * to run. done counts the link that fails too: its state is NULL then, which drop allows. */
ms_status ms_chain_take(ms_engine *engine, ms_bucket_kind kind, const ms_link *links,
                        uint32_t count, ms_link *taken)
{
    ms_status status = ms_chain_check(engine, kind, links, count);
    uint32_t done = 0;
    for (; done < count && !status; done++) {
        taken[done] = links[done];
        hold_groups(&taken[done], true);
        if (!links[done].kind->has_state) taken[done].state = NULL;
        else if (links[done].state) ms_link_state_retain(links[done].state);
        else status = ms_link_state_new(engine, &taken[done].state);
    }
    if (status) ms_chain_drop(taken, done);
    return status;
}

/* The pointers are cleared, so that dropping twice is harmless. */
void ms_chain_drop(ms_link *taken, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        ms_link_state_release(taken[i].state);
        taken[i].state = NULL;
        hold_groups(&taken[i], false);
    }
}

/* ----------------------------------------------------------------- one link */

/* The bucket is checked before each link, because what a link finds depends on the links before it.
 */
ms_status ms_link_run_encode(const ms_link *link, ms_bucket *bucket)
{
    ms_status status = ms_link_check_bucket(link, bucket);
    return status ? status : link->kind->encode(link, bucket);
}

/* The bucket is not checked again: decode gets the tensors that it works on as arguments. */
ms_status ms_link_run_decode(const ms_link *link, ms_bucket *bucket, ms_tensor *before,
                             ms_tensor *reduced, ms_tensor **out)
{
    return link->kind->decode(link, bucket, before, reduced, out);
}

/* The result may be the buffer, a part of it, or another tensor; in each case it is one owned
 * reference. */
ms_status ms_link_run_reduce(const ms_link *link, ms_bucket *bucket, ms_tensor **out)
{
    ms_status status = ms_link_check_bucket(link, bucket);
    return status ? status : link->kind->reduce(link, bucket, out);
}

/* ------------------------------------------------------------------ running */

/* Links compute in f32 also where backward was called inside of autocast. */
ms_dtype ms_chain_begin(ms_bucket *bucket)
{
    ms_dtype autocast = ms_engine_autocast(bucket->engine);
    ms_engine_set_autocast(bucket->engine, MS_F32);
    bucket->wants_sent = false;
    bucket->travels = MS_F32;
    bucket->link = bucket->links_before = 0;
    return autocast;
}

/* `sent` belongs to one chain and one pass. */
void ms_chain_end(ms_bucket *bucket, ms_dtype autocast)
{
    ms_engine_set_autocast(bucket->engine, autocast);
    ms_tensor_release(bucket->sent);
    bucket->sent = NULL;
}

/* Charges what comes now to link `number`. A reduction has no label of its own in the trace,
 * because its collective has one. */
static ms_status enter(const ms_link *link, uint32_t number, ms_bucket *bucket)
{
    bucket->link = number;
    if (!link->kind->reduce)
        ms_trace_label(bucket->engine, "bucket %u: %s", bucket->index, link->kind->name);
    return ms_bucket_account(bucket, bucket->links_before + number);
}

/* A link without decode passes the result on. Otherwise the decoded tensor takes the place of
 * *reduced, which is released. */
static ms_status decode(const ms_link *link, uint32_t number, ms_bucket *bucket, ms_tensor *before,
                        ms_tensor **reduced)
{
    ms_tensor *decoded = NULL;
    if (!link->kind->decode) return MS_OK;
    ms_status status = enter(link, number, bucket);
    if (!status) status = ms_link_run_decode(link, bucket, before, *reduced, &decoded);
    if (status) return status;
    ms_tensor_release(*reduced);
    *reduced = decoded;
    return MS_OK;
}

/* The error of one link, with its name and the bucket's. Errors of ranks and tasks name those by
 * themselves. */
static ms_status name_link(const ms_link *link, const ms_bucket *bucket, ms_status status)
{
    char message[MS_ERROR_MESSAGE_BYTES];
    const char *name = link->kind->name, *colon = ": ";
    if (status != MS_ERROR_ARGUMENT && status != MS_ERROR_STATE && status != MS_ERROR_MEMORY)
        return status;
    snprintf(message, sizeof message, "%s", ms_engine_error(bucket->engine)->message);
    /* An inner chain has named its link already. */
    if (strncmp(message, "comm hook, ", 11) == 0) return status;
    if (strncmp(message, name, strlen(name)) == 0) name = colon = "";
    return ms_engine_fail(bucket->engine, status, "comm hook, bucket %u \"%s\": %s%s%s",
                          bucket->index, bucket->label, name, colon, message);
}

/* A cast right before a plain all-reduce of f32 needs no memory of its own where the transport
 * rounds in registers, to the same bits. With error feedback the cast runs by itself, since the
 * residual needs what it made. */
static bool rounds_on_the_way(const ms_link *cast, const ms_link *reduction,
                              const ms_bucket *bucket)
{
    return reduction->kind->can_round && cast->kind->casts && cast->options.dtype != MS_F32
           && bucket->kind == MS_BUCKET_ALL_REDUCE && ms_tensor_dtype(bucket->buffer) == MS_F32
           && !bucket->wants_sent && ms_group_rounds(ms_link_group(reduction, bucket));
}

/* Links on their way into the reduction. before[i] is retained until decode, because link i may
 * need the buffer that it was given. */
typedef struct run_state {
    const ms_link *links, *at;         /* at: the one that works, for errors */
    uint32_t reducer;                  /* its index */
    uint32_t wraps;                    /* how many links before it decode its result */
    ms_tensor *before[MS_CHAIN_LINKS]; /* the buffer that each of them got, retained */
} run_state;

/* A cast that the collective does by itself is the last link before the reduction; it neither
 * encodes nor decodes, and wraps does not count it. */
static ms_status encode_all(run_state *run, ms_bucket *bucket)
{
    const ms_link *links = run->links;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < run->reducer && !status; i++) {
        run->at = &links[i];
        /* Only right before the reduction: a link in between would see numbers that are not
         * rounded. */
        if (i + 1 == run->reducer && rounds_on_the_way(run->at, &links[i + 1], bucket)) {
            bucket->travels = run->at->options.dtype;
            break;
        }
        run->before[i] = ms_tensor_retain(bucket->buffer);
        run->wraps = i + 1;
        status = enter(run->at, i + 1, bucket);
        if (!status) status = ms_link_run_encode(run->at, bucket);
    }
    return status;
}

/* In reverse order: the last link that encoded undoes its change first. */
static ms_status decode_all(run_state *run, ms_bucket *bucket, ms_tensor **reduced)
{
    ms_status status = MS_OK;
    for (uint32_t i = run->wraps; i-- > 0 && !status;) {
        run->at = &run->links[i];
        status = decode(run->at, i + 1, bucket, run->before[i], reduced);
    }
    return status;
}

/* What was retained on the way in is released on every path. An error gets the name of the link
 * that worked when it happened. */
ms_status ms_chain_run_links(const ms_link *links, uint32_t count, ms_bucket *bucket,
                             ms_tensor **result)
{
    run_state run = { .links = links, .reducer = around(links, count) - 1 };
    ms_tensor *reduced = NULL;
    ms_status status = encode_all(&run, bucket);
    if (!status) {
        run.at = &links[run.reducer];
        status = enter(run.at, run.reducer + 1, bucket);
    }
    if (!status) status = ms_link_run_reduce(run.at, bucket, &reduced);
    if (!status) status = decode_all(&run, bucket, &reduced);
    if (status) status = name_link(run.at, bucket, status);
    for (uint32_t i = 0; i < run.wraps; i++) ms_tensor_release(run.before[i]);
    if (status) ms_tensor_release(reduced);
    else *result = reduced;
    return status;
}

/* The label of the trace is put back, since backward goes on with other work after this. */
ms_status ms_chain_run(const ms_link *links, uint32_t count, ms_bucket *bucket, ms_tensor **result)
{
    ms_dtype autocast = ms_chain_begin(bucket);
    uint32_t label = ms_trace_label(bucket->engine, "bucket %u", bucket->index);
    ms_status status = ms_chain_run_links(links, count, bucket, result);
    ms_trace_relabel(bucket->engine, label);
    ms_chain_end(bucket, autocast);
    return status;
}
