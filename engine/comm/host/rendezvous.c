/* rendezvous.c: the memory files of a job: made, handed to children, taken over, and what a
 * supervisor reads and writes in them. */
#include "comm/host/host.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MS_HEAP_MOST ((uint64_t)64 << 30)
#define MS_HEAP_GRAIN ((uint64_t)2 << 20)
#define MS_TIMEOUT_NS (300 * (uint64_t)1000000000)
#define MS_SHARE_FORMAT "local1:%u:%d"

/* ------------------------------------------------------------------- making */

static uint64_t control_size(uint32_t ranks)
{
    return sizeof(ms_control_file) + ranks * sizeof(ms_rank_line)
           + (uint64_t)ranks * ranks * sizeof(ms_pair_line)
           + (uint64_t)MS_GROUPS_MAX * MS_CHANNELS * ranks * sizeof(ms_member_line);
}

int ms_rendezvous_populate_control(ms_rendezvous *rendezvous, void *address, size_t bytes)
{
    const uintptr_t page = 4096, base = (uintptr_t)rendezvous->control;
    uintptr_t begin = (uintptr_t)address & ~(page - 1),
              end = ((uintptr_t)address + bytes + page - 1) & ~(page - 1);
    return rendezvous->os->shared_populate(rendezvous->os->user, rendezvous->control_file,
                                           (char *)rendezvous->control + (begin - base),
                                           begin - base, end - begin);
}

int ms_rendezvous_populate_heap(ms_rendezvous *rendezvous, uint32_t rank, void *address,
                                size_t bytes)
{
    return rendezvous->os->shared_populate(
        rendezvous->os->user, rendezvous->heaps[rank].file, address,
        (uint64_t)((char *)address - rendezvous->heaps[rank].memory), bytes);
}

static void free_rendezvous(ms_rendezvous *rendezvous)
{
    const ms_os *os = rendezvous->os;
    for (uint32_t r = 0; r < rendezvous->ranks; r++) {
        if (rendezvous->heaps[r].memory)
            os->unreserve(os->user, rendezvous->heaps[r].memory, rendezvous->heap_bytes);
        if (rendezvous->heaps[r].file) os->close(os->user, rendezvous->heaps[r].file);
    }
    if (rendezvous->control)
        os->unreserve(os->user, rendezvous->control, rendezvous->control_bytes);
    if (rendezvous->control_file) os->close(os->user, rendezvous->control_file);
    os->release(os->user, rendezvous);
}

static ms_status new_record(ms_context *context, uint32_t ranks, ms_rendezvous **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_rendezvous), "rendezvous", &memory);
    if (status) return status;
    ms_rendezvous *made = memory;
    made->os = context->os;
    made->ranks = ranks;
    made->control_bytes = control_size(ranks);
    atomic_store(&made->references, 1);
    *out = made;
    return MS_OK;
}

static ms_status map_all(ms_context *context, ms_rendezvous *made, bool control_too)
{
    const ms_os *os = context->os;
    if (control_too && !made->control)
        made->control = os->shared_map(os->user, made->control_file, made->control_bytes);
    bool mapped = made->control != NULL;
    for (uint32_t r = 0; mapped && made->heap_bytes && r < made->ranks; r++) {
        made->heaps[r].memory = os->shared_map(os->user, made->heaps[r].file, made->heap_bytes);
        mapped = made->heaps[r].memory != NULL;
    }
    if (mapped) return MS_OK;
    return ms_fail(context, MS_ERROR_MEMORY,
                   "no address space for the memory of %u ranks (%llu MiB each): raise the limit "
                   "of ulimit -v, or give each rank less "
                   "memory (--memory BYTES, or memory_bytes of ms.init)",
                   made->ranks, (unsigned long long)(made->heap_bytes >> 20));
}

static ms_status create_files(ms_context *context, ms_rendezvous *made)
{
    const ms_os *os = context->os;
    int error =
        os->shared_create(os->user, "moonshard control", made->control_bytes, &made->control_file);
    for (uint32_t r = 0; error == 0 && r < made->ranks; r++)
        error =
            os->shared_create(os->user, "moonshard heap", made->heap_bytes, &made->heaps[r].file);
    if (error == 0) return MS_OK;
    return ms_fail_os(context, error,
                      "cannot make the memory files that ranks share (memfd_create)", NULL);
}

ms_status ms_rendezvous_new(ms_context *context, const ms_rendezvous_options *options,
                            ms_rendezvous **out)
{
    if (options->ranks < 1 || options->ranks > MS_LOCAL_RANKS_MAX)
        return ms_fail(context, MS_ERROR_ARGUMENT, "%u ranks: 1 to %d are allowed on one machine",
                       options->ranks, MS_LOCAL_RANKS_MAX);
    ms_machine machine;
    int error = context->os->machine(context->os->user, &machine);
    if (error) return ms_fail_os(context, error, "cannot read what this machine has", "/proc");
    uint64_t most = machine.memory_bytes < MS_HEAP_MOST ? machine.memory_bytes : MS_HEAP_MOST;
    uint64_t heap = options->heap_bytes && options->heap_bytes < most ? options->heap_bytes : most;
    ms_rendezvous *made = NULL;
    ms_status status = new_record(context, options->ranks, &made);
    if (status) return status;
    made->heap_bytes = MS_STAGES_BYTES + ((heap + MS_HEAP_GRAIN - 1) & ~(MS_HEAP_GRAIN - 1));
    status = create_files(context, made);
    if (!status) status = map_all(context, made, true);
    if (!status) {
        error = ms_rendezvous_populate_control(
            made, made->control, sizeof(ms_control_file) + options->ranks * sizeof(ms_rank_line));
        if (error)
            status = ms_fail_os(context, error, "no memory for the control file of a job", NULL);
    }
    if (status) {
        free_rendezvous(made);
        return status;
    }
    uint32_t threads = options->threads ? options->threads : machine.cores / options->ranks;
    ms_control_file *control = made->control;
    control->control_bytes = made->control_bytes;
    control->heap_bytes = made->heap_bytes;
    control->link_bytes_per_second = options->link_bytes_per_second;
    control->link_latency_ns = options->link_latency_ns;
    control->timeout_ns = options->timeout_ns ? options->timeout_ns : MS_TIMEOUT_NS;
    control->ranks = options->ranks;
    control->threads = threads ? threads : 1;
    control->crowded = options->ranks * control->threads > machine.cores;
    atomic_store(&control->groups, 1);
    control->magic = MS_CONTROL_MAGIC;
    *out = made;
    return MS_OK;
}

ms_rendezvous *ms_rendezvous_retain(ms_rendezvous *rendezvous)
{
    atomic_fetch_add(&rendezvous->references, 1);
    return rendezvous;
}

void ms_rendezvous_release(ms_rendezvous *rendezvous)
{
    if (rendezvous && atomic_fetch_sub(&rendezvous->references, 1) == 1)
        free_rendezvous(rendezvous);
}

uint32_t ms_rendezvous_ranks(const ms_rendezvous *rendezvous) { return rendezvous->ranks; }
uint32_t ms_rendezvous_threads(const ms_rendezvous *rendezvous)
{
    return rendezvous->control->threads;
}

/* ----------------------------------------------------------------- children */

ms_status ms_rendezvous_share(ms_rendezvous *rendezvous, ms_context *context, char *text,
                              size_t bytes)
{
    const ms_os *os = rendezvous->os;
    int descriptor = os->shared_share(os->user, rendezvous->control_file, true);
    if (descriptor < 0)
        return ms_fail_os(context, descriptor, "cannot hand a memory file to a child", NULL);
    int used = snprintf(text, bytes, MS_SHARE_FORMAT, rendezvous->ranks, descriptor);
    for (uint32_t r = 0; r < rendezvous->ranks && used > 0 && (size_t)used < bytes; r++) {
        descriptor = os->shared_share(os->user, rendezvous->heaps[r].file, true);
        if (descriptor < 0)
            return ms_fail_os(context, descriptor, "cannot hand a memory file to a child", NULL);
        used += snprintf(text + used, bytes - (size_t)used, ",%d", descriptor);
    }
    if (used > 0 && (size_t)used < bytes) return MS_OK;
    return ms_fail(context, MS_ERROR_ARGUMENT,
                   "%zu bytes are too few for the names of %u memory files", bytes,
                   rendezvous->ranks + 1);
}

static ms_status refuse_text(ms_context *context, const char *text)
{
    return ms_fail(context, MS_ERROR_CORRUPT,
                   "%s=%.60s names no job: it is set by the launcher for the ranks that it starts, "
                   "and only for them",
                   MS_RENDEZVOUS_VARIABLE, text);
}

/* The descriptors that text names as files of `made`; false if it does not name them. */
static bool adopt_files(ms_context *context, const char *text, ms_rendezvous *made)
{
    const ms_os *os = context->os;
    for (uint32_t i = 0; i <= made->ranks; i++) {
        char *end = NULL;
        long descriptor = strtol(text, &end, 10);
        ms_file **file = i ? &made->heaps[i - 1].file : &made->control_file;
        if (end == text || descriptor < 3 || descriptor > 1 << 20
            || *end != (i < made->ranks ? ',' : '\0'))
            return false;
        text = end + 1;
        if (os->shared_adopt(os->user, (int)descriptor, file)) return false;
    }
    return true;
}

/* Whether the files are the memory of a job with this number of ranks; maps the control file. Sizes
 * are checked before anything is read. */
static bool check_files(ms_rendezvous *made)
{
    const ms_os *os = made->os;
    uint64_t bytes = 0;
    if (os->size(os->user, made->control_file, &bytes) || bytes != made->control_bytes)
        return false;
    made->control = os->shared_map(os->user, made->control_file, made->control_bytes);
    if (!made->control || made->control->magic != MS_CONTROL_MAGIC
        || made->control->ranks != made->ranks
        || made->control->control_bytes != made->control_bytes)
        return false;
    for (uint32_t r = 0; r < made->ranks; r++)
        if (os->size(os->user, made->heaps[r].file, &bytes) || bytes != made->control->heap_bytes)
            return false;
    made->heap_bytes = made->control->heap_bytes;
    return true;
}

ms_status ms_rendezvous_adopt(ms_context *context, const char *text, ms_rendezvous **out)
{
    unsigned ranks = 0;
    int from = 0;
    if (sscanf(text, "local1:%u:%n", &ranks, &from) != 1 || !from || ranks < 1
        || ranks > MS_LOCAL_RANKS_MAX)
        return refuse_text(context, text);
    ms_rendezvous *made = NULL;
    ms_status status = new_record(context, ranks, &made);
    if (status) return status;
    status = adopt_files(context, text + from, made) && check_files(made)
                 ? map_all(context, made, false)
                 : refuse_text(context, text);
    if (status) free_rendezvous(made);
    else *out = made;
    return status;
}

ms_status ms_rendezvous_take(ms_context *context, uint32_t ranks, ms_file *const *files,
                             ms_rendezvous **out)
{
    ms_rendezvous *made = NULL;
    ms_status status = new_record(context, ranks, &made);
    if (status) {
        for (uint32_t i = 0; i <= ranks; i++) context->os->close(context->os->user, files[i]);
        return status;
    }
    made->control_file = files[0];
    for (uint32_t r = 0; r < ranks; r++) made->heaps[r].file = files[r + 1];
    status = check_files(made) ? map_all(context, made, false)
                               : ms_fail(context, MS_ERROR_CORRUPT,
                                         "the files that rank 0 brought are no memory of a job");
    if (status) free_rendezvous(made);
    else *out = made;
    return status;
}

/* -------------------------------------------------------------- supervision */

/* strncpy that always ends the text. Safe in signal handlers, like everything that
 * ms_rendezvous_abort calls. */
static void copy_text(char *to, const char *from, size_t bytes)
{
    size_t i = 0;
    for (; from && from[i] && i + 1 < bytes; i++) to[i] = from[i];
    to[i] = '\0';
}

static ms_status status_of(ms_abort_reason reason)
{
    if (reason == MS_ABORT_MISMATCH) return MS_ERROR_MISMATCH;
    return reason == MS_ABORT_TIMEOUT ? MS_ERROR_TIMEOUT : MS_ERROR_ABORTED;
}

bool ms_rendezvous_abort(ms_rendezvous *rendezvous, ms_abort_reason reason, int32_t rank,
                         const char *message)
{
    ms_control_file *control = rendezvous->control;
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&control->aborted, &none, 1)) return false;
    ms_error *error = &control->record.error;
    control->record.reason = reason;
    error->status = status_of(reason);
    error->rank = rank;
    error->collective = -1;
    error->bucket = -1;
    copy_text(error->message, message, sizeof error->message);
    atomic_store(&control->aborted, 2);
    for (uint32_t r = 0; r < control->ranks; r++) {
        atomic_fetch_add(&control->lines[r].bell, 1);
        ms_futex_wake_shared(&control->lines[r].bell, UINT32_MAX);
    }
    return true;
}

/* A rank may have died while it wrote the record: then there is a cause, but no text. */
bool ms_rendezvous_cause(const ms_rendezvous *rendezvous, ms_abort_record *out)
{
    const ms_os *os = rendezvous->os;
    ms_control_file *control = rendezvous->control;
    if (!atomic_load(&control->aborted)) return false;
    for (uint64_t limit = os->monotonic_ns(os->user) + 20000000;
         atomic_load(&control->aborted) == 1 && os->monotonic_ns(os->user) < limit;)
        ms_yield();
    if (atomic_load(&control->aborted) == 2) {
        *out = control->record;
        out->error.message[sizeof out->error.message - 1] = '\0';
        return true;
    }
    memset(out, 0, sizeof *out);
    out->reason = MS_ABORT_DIED;
    out->error.status = MS_ERROR_ABORTED;
    out->error.rank = out->error.bucket = -1;
    out->error.collective = -1;
    copy_text(out->error.message, "a rank died while it reported why the job ends",
              sizeof out->error.message);
    return true;
}

void ms_rendezvous_rank(const ms_rendezvous *rendezvous, uint32_t rank, ms_rank_state *out)
{
    ms_rank_line *line = &rendezvous->control->lines[rank];
    *out = (ms_rank_state){ .phase = (ms_rank_phase)atomic_load(&line->phase),
                            .process = atomic_load(&line->process),
                            .progress = ms_rank_progress(line),
                            .collectives = atomic_load(&line->flights),
                            .step = atomic_load(&line->step) - 1,
                            .finished = atomic_load(&line->finished) != 0,
                            .waits = atomic_load(&line->still) != 0 };
    ms_activity_read(&line->activity, &out->activity);
}

bool ms_rendezvous_flight(const ms_rendezvous *rendezvous, uint32_t rank, uint64_t index,
                          ms_flight *out)
{
    ms_rank_line *line = &rendezvous->control->lines[rank];
    uint64_t count = atomic_load(&line->flights);
    if (index >= count || index + MS_FLIGHTS < count) return false;
    *out = line->flight[index % MS_FLIGHTS];
    out->label[sizeof out->label - 1] = out->script[sizeof out->script - 1] = '\0';
    return true;
}
