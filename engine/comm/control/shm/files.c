/* files.c: the memory files of a job: made, handed to children, taken over. */
#include "comm/control/shm/files.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MS_HEAP_MOST ((uint64_t)64 << 30)
#define MS_HEAP_GRAIN ((uint64_t)2 << 20)
#define MS_TIMEOUT_NS (300 * (uint64_t)1000000000)
#define MS_SHARE_FORMAT MS_SHM_PREFIX "%u:%d"

/* ------------------------------------------------------------------- making */

/* Address space for all groups that a job may have. Pages are made only for those that are used. It
 * grows with the square of the ranks by the pairs; 128 ranks are the most. */
static uint64_t control_size(uint32_t ranks)
{
    return sizeof(ms_control_file) + ranks * sizeof(ms_rank_line)
           + (uint64_t)ranks * ranks * sizeof(ms_pair_line)
           + (uint64_t)MS_GROUPS_MAX * MS_CHANNELS * ranks * sizeof(ms_member_line);
}

/* Rounded to whole pages, which may belong to neighbours; making a page twice is harmless. Each
 * rank makes the pages that it will touch before its first use: a task that met a page without
 * memory would die of SIGBUS. */
int ms_shm_files_populate_control(ms_shm_files *files, void *address, size_t bytes)
{
    const uintptr_t page = 4096, base = (uintptr_t)files->control;
    uintptr_t begin = (uintptr_t)address & ~(page - 1),
              end = ((uintptr_t)address + bytes + page - 1) & ~(page - 1);
    return files->base.os->shared_populate(files->base.os->user, files->control_file,
                                           (char *)files->control + (begin - base), begin - base,
                                           end - begin);
}

/* Offsets of the file follow from the address, since each heap is mapped as a whole. */
int ms_shm_files_populate_heap(ms_shm_files *files, uint32_t rank, void *address, size_t bytes)
{
    return files->base.os->shared_populate(files->base.os->user, files->heaps[rank].file, address,
                                           (uint64_t)((char *)address - files->heaps[rank].memory),
                                           bytes);
}

/* The staging areas of a rank on another node are here, too: what it brings to a collective is
 * put there when it arrives. */
static uint64_t heap_bytes_of(const ms_shm_files *files, uint32_t rank)
{
    return ms_shm_is_here(files->control, rank) ? files->heap_bytes : MS_STAGES_BYTES;
}

/* Also for a record that was filled in part: fields that were not reached are NULL. Mappings go
 * before descriptors; the memory itself goes with the last process that has it. */
void ms_shm_files_close(ms_rendezvous *rendezvous)
{
    ms_shm_files *files = ms_shm_files_of(rendezvous);
    const ms_os *os = rendezvous->os;
    if (files->replication) files->replication->close(files->replication);
    for (uint32_t r = 0; r < rendezvous->ranks; r++) {
        if (files->heaps[r].memory)
            os->unreserve(os->user, files->heaps[r].memory, heap_bytes_of(files, r));
        if (files->heaps[r].file) os->close(os->user, files->heaps[r].file);
    }
    if (files->control) os->unreserve(os->user, files->control, files->control_bytes);
    if (files->control_file) os->close(os->user, files->control_file);
    os->release(os->user, files);
}

/* An empty record, which ms_shm_files_close can close at any point. The record is this process'
 * own; only the files are shared. */
static ms_status new_record(ms_context *context, uint32_t ranks, ms_shm_files **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_shm_files), "rendezvous", &memory);
    if (status) return status;
    ms_shm_files *made = memory;
    made->base.os = context->os;
    made->base.ranks = ranks;
    /* It follows from the number of ranks alone, so a rank that adopts the files can check it. */
    made->control_bytes = control_size(ranks);
    *out = made;
    return MS_OK;
}

/* Each rank maps the heaps of all ranks of its node, so that it can read their tensors in place. It
 * costs address space and page tables, and no memory, until pages are touched. */
static ms_status map_heaps(ms_context *context, ms_shm_files *made)
{
    const ms_os *os = context->os;
    bool mapped = made->control != NULL;
    for (uint32_t r = 0; mapped && r < made->base.ranks; r++) {
        made->heaps[r].memory =
            os->shared_map(os->user, made->heaps[r].file, heap_bytes_of(made, r));
        mapped = made->heaps[r].memory != NULL;
    }
    if (mapped) return MS_OK;
    return ms_fail(context, MS_ERROR_MEMORY,
                   "no address space for the memory of %u ranks (%llu MiB each): raise the limit "
                   "of ulimit -v, or give each rank less "
                   "memory (--memory BYTES, or memory_bytes of ms.init)",
                   made->base.ranks, (unsigned long long)(made->heap_bytes >> 20));
}

/* The files have no name in any folder: they are gone with the last process that holds them. The
 * control file is first, since the layout in it says how large each heap is. */
static ms_status create_files(ms_context *context, ms_shm_files *made, const ms_layout *layout)
{
    const ms_os *os = context->os;
    int error =
        os->shared_create(os->user, "moonshard control", made->control_bytes, &made->control_file);
    if (error == 0) {
        made->control = os->shared_map(os->user, made->control_file, made->control_bytes);
        if (!made->control) return map_heaps(context, made);
        error = ms_shm_files_populate_control(
            made, made->control, sizeof(ms_control_file) + made->base.ranks * sizeof(ms_rank_line));
        if (error)
            return ms_fail_os(context, error, "no memory for the control file of a job", NULL);
        made->control->nodes = layout->nodes;
        made->control->here = layout->here;
        for (uint32_t r = 0; layout->node_of && r < made->base.ranks; r++)
            made->control->node_of[r] = layout->node_of[r];
        for (uint32_t h = 0; layout->names && h < layout->nodes; h++)
            memcpy(made->control->node_names[h], layout->names[h], MS_NODE_NAME_BYTES - 1);
    }
    for (uint32_t r = 0; error == 0 && r < made->base.ranks; r++)
        error = os->shared_create(os->user, "moonshard heap", heap_bytes_of(made, r),
                                  &made->heaps[r].file);
    if (error == 0) return MS_OK;
    return ms_fail_os(context, error,
                      "cannot make the memory files that ranks share (memfd_create)", NULL);
}

/* The bytes of each rank's heap, with its staging areas. 2 MiB is the size of a huge page. */
static uint64_t heap_size(const ms_rendezvous_options *options, const ms_machine *machine)
{
    uint64_t most = machine->memory_bytes < MS_HEAP_MOST ? machine->memory_bytes : MS_HEAP_MOST;
    /* No heap is larger than the node's memory, even if the option asks for more. */
    uint64_t heap = options->heap_bytes && options->heap_bytes < most ? options->heap_bytes : most;
    return MS_STAGES_BYTES + ((heap + MS_HEAP_GRAIN - 1) & ~(MS_HEAP_GRAIN - 1));
}

/* What all ranks read there and none writes. magic comes last: from then on it is a job's file. No
 * rank has the files yet, so plain stores are enough. `crowded` makes waiting ranks yield their
 * core, and idle streams sleep at once. A rank has two threads that want to
 * run even where its streams have only one: the other runs its script. */
static void fill_control(const ms_shm_files *made, const ms_rendezvous_options *options,
                         const ms_machine *machine)
{
    ms_control_file *control = made->control;
    uint32_t here = 0; /* ranks, which share its cores */
    for (uint32_t r = 0; r < options->ranks; r++) here += ms_shm_is_here(control, r);
    uint32_t threads = options->threads ? options->threads : machine->cores / here;
    control->control_bytes = made->control_bytes;
    control->heap_bytes = made->heap_bytes;
    control->link_bytes_per_second = options->link_bytes_per_second;
    control->link_latency_ns = options->link_latency_ns;
    control->sum_by_ranks = options->sum_by_ranks;
    control->timeout_ns = options->timeout_ns ? options->timeout_ns : MS_TIMEOUT_NS;
    control->ranks = options->ranks;
    control->threads = threads ? threads : 1;
    control->crowded =
        here * control->threads > machine->cores || (here > 1 && 2 * here > machine->cores);
    atomic_store(&control->groups, 1);
    control->magic = MS_CONTROL_MAGIC;
}

/* The machine is read here once: heap sizes and threads follow from it, and must be the same for
 * all ranks of this node. */
ms_status ms_shm_files_new_among(ms_context *context, const ms_rendezvous_options *options,
                                 const ms_layout *layout, ms_rendezvous **out)
{
    ms_machine machine;
    ms_shm_files *made = NULL;
    if (options->ranks < 1 || options->ranks > MS_LOCAL_RANKS_MAX)
        return ms_fail(context, MS_ERROR_ARGUMENT, "%u ranks: 1 to %d are allowed%s",
                       options->ranks, MS_LOCAL_RANKS_MAX,
                       layout->nodes > 1 ? "" : " on one machine");
    int error = context->os->machine(context->os->user, &machine);
    if (error) return ms_fail_os(context, error, "cannot read what this machine has", "/proc");
    ms_status status = new_record(context, options->ranks, &made);
    if (status) return status;
    made->heap_bytes = heap_size(options, &machine);
    status = create_files(context, made, layout);
    if (!status) status = map_heaps(context, made);
    if (status) {
        ms_shm_files_close(&made->base);
        return status;
    }
    fill_control(made, options, &machine);
    *out = &made->base;
    return MS_OK;
}

/* Called by the launcher, and by rank 0 of ranks that meet at a socket. */
ms_status ms_shm_files_new(ms_context *context, const ms_rendezvous_options *options,
                           ms_rendezvous **out)
{
    return ms_shm_files_new_among(context, options, &(ms_layout){ .nodes = 1 }, out);
}

/* ----------------------------------------------------------------- children */

/* Descriptors are inherited by the child; the text names their numbers. From here on every program
 * that this process starts inherits them, so a rank takes them out of inheritance again (adopt). */
ms_status ms_shm_files_share(ms_rendezvous *rendezvous, ms_context *context, char *text,
                             size_t bytes)
{
    const ms_shm_files *files = ms_shm_files_of(rendezvous);
    const ms_os *os = rendezvous->os;
    int descriptor = os->shared_share(os->user, files->control_file, true);
    if (descriptor < 0)
        return ms_fail_os(context, descriptor, "cannot hand a memory file to a child", NULL);
    int used = snprintf(text, bytes, MS_SHARE_FORMAT, rendezvous->ranks, descriptor);
    for (uint32_t r = 0; r < rendezvous->ranks && used > 0 && (size_t)used < bytes; r++) {
        descriptor = os->shared_share(os->user, files->heaps[r].file, true);
        if (descriptor < 0)
            return ms_fail_os(context, descriptor, "cannot hand a memory file to a child", NULL);
        used += snprintf(text + used, bytes - (size_t)used, ",%d", descriptor);
    }
    if (used > 0 && (size_t)used < bytes) return MS_OK;
    return ms_fail(context, MS_ERROR_ARGUMENT,
                   "%zu bytes are too few for the names of %u memory files", bytes,
                   rendezvous->ranks + 1);
}

/* The descriptors that text names as files of `made`; false if it does not name them. 0 to 2 are
 * the standard streams and never a memory file. */
static bool adopt_files(ms_context *context, const char *text, ms_shm_files *made)
{
    const ms_os *os = context->os;
    for (uint32_t i = 0; i <= made->base.ranks; i++) {
        char *end = NULL;
        long descriptor = strtol(text, &end, 10);
        ms_file **file = i ? &made->heaps[i - 1].file : &made->control_file;
        /* Bounds keep a hostile number out of the calls that follow. */
        if (end == text || descriptor < 3 || descriptor > 1 << 20
            || *end != (i < made->base.ranks ? ',' : '\0'))
            return false;
        text = end + 1;
        if (os->shared_adopt(os->user, (int)descriptor, file)) return false;
    }
    return true;
}

/* Whether the files are the memory of a job with this number of ranks; maps the control file. Sizes
 * are checked before anything is read. The magic names the layout, so a rank of another build
 * refuses the files instead of reading wrong fields. */
static bool check_files(ms_shm_files *made)
{
    const ms_os *os = made->base.os;
    uint64_t bytes = 0;
    if (os->size(os->user, made->control_file, &bytes) || bytes != made->control_bytes)
        return false;
    made->control = os->shared_map(os->user, made->control_file, made->control_bytes);
    if (!made->control || made->control->magic != MS_CONTROL_MAGIC
        || made->control->ranks != made->base.ranks
        || made->control->control_bytes != made->control_bytes)
        return false;
    made->heap_bytes = made->control->heap_bytes;
    for (uint32_t r = 0; r < made->base.ranks; r++)
        if (os->size(os->user, made->heaps[r].file, &bytes) || bytes != heap_bytes_of(made, r))
            return false;
    return true;
}

/* The text comes from the environment, and the files from another process: numbers, sizes and magic
 * are checked before anything in them is used. The message is the caller's: rendezvous_kinds.c has
 * one for all kinds. */
ms_status ms_shm_files_adopt(ms_context *context, const char *text, ms_rendezvous **out)
{
    unsigned ranks = 0;
    int from = 0;
    if (sscanf(text, MS_SHM_PREFIX "%u:%n", &ranks, &from) != 1 || !from || ranks < 1
        || ranks > MS_LOCAL_RANKS_MAX)
        return MS_ERROR_CORRUPT;
    ms_shm_files *made = NULL;
    ms_status status = new_record(context, ranks, &made);
    if (status) return status;
    status = adopt_files(context, text + from, made) && check_files(made) ? map_heaps(context, made)
                                                                          : MS_ERROR_CORRUPT;
    if (status) ms_shm_files_close(&made->base);
    else *out = &made->base;
    return status;
}

/* As adopt, with files that came over a socket. Here the other end of the socket is a process of
 * the same user, but it may be of another build. */
ms_status ms_shm_files_take(ms_context *context, uint32_t ranks, ms_file *const *files,
                            ms_rendezvous **out)
{
    ms_shm_files *made = NULL;
    ms_status status = new_record(context, ranks, &made);
    /* The files are owned also where not even a record could be made. */
    if (status) {
        for (uint32_t i = 0; i <= ranks; i++) context->os->close(context->os->user, files[i]);
        return status;
    }
    made->control_file = files[0];
    for (uint32_t r = 0; r < ranks; r++) made->heaps[r].file = files[r + 1];
    status = check_files(made)
                 ? map_heaps(context, made)
                 : ms_fail(context, MS_ERROR_CORRUPT,
                           "the files that rank 0 sent are not the memory files of a job");
    if (status) ms_shm_files_close(&made->base);
    else *out = &made->base;
    return status;
}

/* Each word is read and written as one, so a number never arrives as two halves. A text may be of
 * two moments; readers of texts know that. */
void ms_copy_words(void *to, const void *from, size_t bytes)
{
    size_t i = 0;
    for (; ((uintptr_t)to | (uintptr_t)from) % 8 == 0 && i + 8 <= bytes; i += 8)
        atomic_store((_Atomic uint64_t *)(void *)((char *)to + i),
                     atomic_load((_Atomic uint64_t *)(uintptr_t)((const char *)from + i)));
    for (; ((uintptr_t)to | (uintptr_t)from) % 4 == 0 && i + 4 <= bytes; i += 4)
        atomic_store((_Atomic uint32_t *)(void *)((char *)to + i),
                     atomic_load((_Atomic uint32_t *)(uintptr_t)((const char *)from + i)));
    memcpy((char *)to + i, (const char *)from + i, bytes - i);
}
