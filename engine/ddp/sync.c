/* sync.c: what ranks do before the first step: compare their parameters, and copy rank 0's values
 * to all ranks. The Lua part of fsdp copies parameters and buffers of sharded models with
 * ms_ddp_broadcast, too; it is all that sharded models use of ddp/. */
#include "moonshard/ddp.h"

#include <stdio.h>
#include <string.h>

#include "ops/values.h"

/* ---------------------------------------------------------------- comparing */

/* Length of a parameter's description as it is hashed and exchanged. It is fixed, so that one
 * all_gather moves the lines of all ranks and memcmp compares them; the rest is zeros. */
#define LINE_BYTES 256 /* "'h.0.weight' [2, 3] f32" */

/* Fills the line with zeros first: bytes after the text are hashed and compared too. A name is cut
 * at 100 characters, so two that differ later count as equal; dtype and shape are compared in full.
 */
static void describe(const ms_reducer_parameter *parameter, char line[LINE_BYTES])
{
    char tensor[128];
    memset(line, 0, LINE_BYTES);
    snprintf(line, LINE_BYTES, "'%.100s' %s", parameter->name,
             ms_tensor_describe(parameter->tensor, tensor, sizeof tensor));
}

/* Gathers `bytes` of `mine` from all ranks into all, in rank order. Blocks. Out of band: nothing
 * waits for the streams that compute, and a difference is found before the first collective of
 * tensors could hang on it. */
static ms_status exchange(ms_group *group, const void *mine, size_t bytes, void *all)
{
    ms_sharing sharing = {
        .kind = MS_ALL_GATHER, .dtype = MS_U8, .count = bytes, .label = "parameters"
    };
    return ms_group_share(group, &sharing, mine, all);
}

/* Lists the ranks whose line equals that of rank `like`, as "0, 2". */
static void list_ranks(const char *lines, uint32_t ranks, uint32_t like, char *text, size_t bytes)
{
    size_t used = 0;
    for (uint32_t r = 0; r < ranks && used + 16 < bytes; r++)
        if (memcmp(lines + (size_t)r * LINE_BYTES, lines + (size_t)like * LINE_BYTES, LINE_BYTES)
            == 0)
            used += (size_t)snprintf(text + used, bytes - used, "%s%u", used ? ", " : "", r);
}

/* Compares parameter `index` over the ranks; MS_ERROR_MISMATCH at a difference. A rank with fewer
 * parameters says "none". The text of rank 0 represents all ranks that agree with it. */
static ms_status compare_one(ms_group *group, const ms_reducer_parameter *parameters,
                             uint32_t count, uint32_t index, char *lines)
{
    char mine[LINE_BYTES] = "none", here[96] = "", there[96] = "";
    uint32_t ranks = ms_group_size(group);
    /* A rank with fewer parameters takes part, too: all make the same exchanges. */
    if (index < count) describe(&parameters[index], mine);
    ms_status status = exchange(group, mine, LINE_BYTES, lines);
    for (uint32_t r = 1; r < ranks && !status; r++) {
        const char *other = lines + (size_t)r * LINE_BYTES;
        if (memcmp(lines, other, LINE_BYTES) == 0) continue;
        list_ranks(lines, ranks, 0, here, sizeof here);
        list_ranks(lines, ranks, r, there, sizeof there);
        return ms_engine_fail(ms_group_engine(group), MS_ERROR_MISMATCH,
                              "ddp: ranks have different models: parameter %u is %s on rank %s and "
                              "%s on rank %s: every rank must build the same one",
                              index + 1, lines, here, other, there);
    }
    return status;
}

/* Finds the first parameter that differs by bisection over hashes of prefixes: log2(count) small
 * all_gathers instead of one exchange of all names. hashes[i] is the hash of the first i parameters
 * of this rank. All ranks see the same gathered hashes, so they halve the same range and issue the
 * same collectives. */
static ms_status find_difference(ms_group *group, const ms_reducer_parameter *parameters,
                                 uint32_t count, const uint64_t *hashes, uint64_t *all, char *lines)
{
    /* high becomes the largest number of parameters of any rank. */
    uint32_t low = 0, high = 0, ranks = ms_group_size(group);
    uint64_t mine = count;
    ms_status status = exchange(group, &mine, sizeof mine, all);
    for (uint32_t r = 0; r < ranks; r++)
        if (all[r] > high) high = (uint32_t)all[r];
    while (!status && high - low > 1) { /* the first `low` are equal, the first `high` are not */
        uint32_t middle = low + (high - low) / 2;
        bool equal = true;
        mine = middle <= count ? hashes[middle] : 0;
        status = exchange(group, &mine, sizeof mine, all);
        for (uint32_t r = 1; r < ranks; r++) equal &= all[r] == all[0];
        if (equal) low = middle;
        else high = middle;
    }
    return status ? status : compare_one(group, parameters, count, low, lines);
}

/* hashes[i] becomes the hash of the first i parameters, never 0: 0 represents a rank that has fewer
 * parameters. The hash of a prefix is the seed of the next one, so a difference shows in all longer
 * prefixes, which the bisection relies on. */
static void hash_prefixes(const ms_reducer_parameter *parameters, uint32_t count, uint64_t *hashes)
{
    for (uint32_t i = 0; i < count; i++) {
        char line[LINE_BYTES];
        describe(&parameters[i], line);
        hashes[i + 1] = ms_hash(line, LINE_BYTES, hashes[i]) | 1;
    }
}

/* One all_gather of the hash of all parameters decides the usual case. A difference ends the job
 * here, with the same error on every rank. all, lines: room for a number and a line of each rank.
 */
static ms_status compare(ms_group *group, const ms_reducer_parameter *parameters, uint32_t count,
                         const uint64_t *hashes, uint64_t *all, char *lines)
{
    ms_engine *engine = ms_group_engine(group);
    bool equal = true;
    ms_status status = exchange(group, &hashes[count], sizeof *hashes, all);
    if (status) return status;
    for (uint32_t r = 1; r < ms_group_size(group); r++) equal &= all[r] == all[0];
    if (equal) return MS_OK;
    status = find_difference(group, parameters, count, hashes, all, lines);
    if (status) ms_comm_abort(engine, ms_engine_error(engine));
    return status;
}

/* The numbers come first in the allocation, so that they are aligned; the lines follow. */
ms_status ms_ddp_compare(ms_group *group, const ms_reducer_parameter *parameters, uint32_t count)
{
    ms_context *context = ms_engine_context(ms_group_engine(group));
    uint32_t ranks = ms_group_size(group);
    void *memory = NULL, *hashes = NULL;
    ms_status status = ms_allocate(context, (size_t)ranks * (LINE_BYTES + sizeof(uint64_t)),
                                   "comparing parameters", &memory);
    if (!status)
        status = ms_allocate(context, ((size_t)count + 1) * sizeof(uint64_t),
                             "comparing parameters", &hashes);
    if (!status) {
        hash_prefixes(parameters, count, hashes);
        status =
            compare(group, parameters, count, hashes, memory, (char *)((uint64_t *)memory + ranks));
    }
    ms_release(context, memory);
    ms_release(context, hashes);
    return status;
}

/* ------------------------------------------------------------- broadcasting */

/* View of `length` elements of a flat tensor in the shape of `like`. The flat buffer is dense, so
 * the strides follow from the shape. */
static ms_status view_as(ms_tensor *flat, int64_t offset, const ms_tensor *like, ms_tensor **out)
{
    int64_t strides[MS_DIMS_MAX];
    uint32_t dims = ms_tensor_dims(like);
    for (uint32_t d = dims, i = 0; i < dims; i++) {
        d--;
        strides[d] = d + 1 == dims ? 1 : strides[d + 1] * ms_tensor_shape(like)[d + 1];
    }
    return ms_tensor_window(flat, dims, ms_tensor_shape(like), strides, offset, out);
}

/* Copies the chosen tensors into flat (pack), or from flat back into them. */
static ms_status move(ms_engine *engine, ms_tensor *flat, ms_tensor *const *tensors,
                      const uint32_t *chosen, uint32_t count, bool pack)
{
    int64_t offset = 0;
    ms_status status = MS_OK;
    for (uint32_t i = 0; i < count && !status; i++) {
        ms_tensor *tensor = tensors[chosen[i]], *view = NULL;
        status = view_as(flat, offset, tensor, &view);
        if (!status)
            status = pack ? ms_copy_into(engine, tensor, view) : ms_copy_into(engine, view, tensor);
        offset += ms_tensor_count(tensor);
        ms_tensor_release(view);
    }
    return status;
}

/* Packs tensors of one dtype into a flat buffer, broadcasts it, and unpacks it on all ranks but the
 * root. One large collective costs less than many small ones; the root packs and does not unpack.
 * The other ranks pack too, which only defines the buffer's contents. */
static ms_status broadcast_piece(ms_group *group, ms_tensor *const *tensors, const uint32_t *chosen,
                                 uint32_t count, int64_t elements, uint32_t root)
{
    ms_engine *engine = ms_group_engine(group);
    ms_dtype dtype = ms_tensor_dtype(tensors[chosen[0]]);
    ms_storage *storage = NULL;
    ms_tensor *flat = NULL;
    ms_point ready = { 0 };
    ms_status status = ms_group_storage(group, ms_engine_current(engine),
                                        (size_t)elements * ms_dtype_bytes(dtype), &storage);
    if (!status) status = ms_tensor_on(storage, dtype, 1, &elements, &flat);
    if (!status) status = move(engine, flat, tensors, chosen, count, true);
    ms_collective call = {
        .kind = MS_BROADCAST, .root = root, .in = flat, .bucket = -1, .label = "values"
    };
    if (!status) status = ms_group_enqueue(group, 1, &call, &ready);
    if (!status) status = ms_stream_wait(ms_engine_current(engine), ready);
    if (!status && ms_group_rank(group) != root)
        status = move(engine, flat, tensors, chosen, count, false);
    ms_tensor_release(flat);
    ms_storage_release(storage);
    return status;
}

/* Pieces are cut by sizes and dtypes alone, which all ranks share, so all issue the same
 * broadcasts. Only this rank's current stream waits for the values; the host does not. */
ms_status ms_ddp_broadcast(ms_group *group, ms_tensor *const *tensors, uint32_t count,
                           uint32_t root)
{
    ms_context *context = ms_engine_context(ms_group_engine(group));
    void *memory = NULL;
    ms_status status = ms_allocate(context, count * sizeof(uint32_t) + 1, "broadcast", &memory);
    uint32_t *chosen = memory;
    for (ms_dtype dtype = 0; dtype < MS_DTYPES && !status; dtype++) {
        uint32_t taken = 0;
        int64_t elements = 0;
        for (uint32_t i = 0; i < count && !status; i++) {
            if (ms_tensor_dtype(tensors[i]) != dtype || ms_tensor_count(tensors[i]) == 0) continue;
            int64_t more = elements + ms_tensor_count(tensors[i]);
            /* The piece so far is sent; this tensor begins the next one. */
            if (taken && (uint64_t)more * ms_dtype_bytes(dtype) > MS_DDP_PIECE_BYTES) {
                status = broadcast_piece(group, tensors, chosen, taken, elements, root);
                taken = 0;
                more = ms_tensor_count(tensors[i]);
            }
            chosen[taken++] = i;
            elements = more;
        }
        if (!status && taken)
            status = broadcast_piece(group, tensors, chosen, taken, elements, root);
    }
    ms_release(context, memory);
    return status;
}
