/* local_ranks.c: where the ranks of a host meet their keeper. A rank gets the memory files there,
 * and then tells the keeper what it has written that other hosts need. */
#include "comm/control/cluster/local_ranks.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/control/cluster/coordinator.h"
#include "comm/control/cluster/rank_copies.h"
#include "comm/control/cluster/starter_link.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/files.h"
#include "comm/control/shm/liveness.h"
#include "comm/mpi/progress_thread.h"

#define MS_DOOR_MAGIC 0x31524f4f4444534dull /* "MSDDOOR1" */
#define MS_DOOR_SILENCE_NS ((uint64_t)5 * 1000000000)
#define MS_DOOR_RETRY_NS ((uint64_t)5 * 1000000)
/* For news of rank 0, where MPI_Finalize hangs. */
#define MS_RANK_0_NS ((uint64_t)2000000000)
/* The most that a rank tells at once. */
#define MS_TELL_MOST 4096

/* What a rank says at the door, and what it is answered. */
typedef struct ms_door_body {
    uint64_t magic;
    char version[16];
    uint32_t rank, ranks;
    int64_t process;
    char refusal[160]; /* of the keeper; "": welcome */
} ms_door_body;

/* A part of the control file as the rank has written it. A message of one byte tells nothing: the
 * keeper is to look. */
typedef struct ms_told {
    uint64_t offset;
    char data[MS_TELL_MOST];
} ms_told;

/* --------------------------------------------------------------- the keeper's */

/* What a rank tells, until it has gone. */
static void hear(void *argument)
{
    ms_visitor *visitor = argument;
    ms_keeper *keeper = visitor->keeper;
    const ms_os *os = keeper->os;
    ms_told told;
    for (;;) {
        uint32_t files = 0;
        int64_t bytes = os->socket_receive(os->user, visitor->socket, &told, sizeof told,
                                           MS_KEEPER_TURN_NS, NULL, 0, &files);
        if (bytes == -ETIMEDOUT || bytes == -EAGAIN) {
            if (atomic_load(&keeper->closing)) return;
            continue;
        }
        if (bytes <= 0) return;
        if (bytes == 1) {
            keeper->mirror.stir(&keeper->mirror);
            continue;
        }
        size_t data = (size_t)bytes - sizeof told.offset;
        if (bytes > (int64_t)sizeof told.offset && told.offset < keeper->control->control_bytes
            && data <= keeper->control->control_bytes - told.offset) {
            ms_keeper_propose(keeper);
            ms_keeper_tell(keeper, told.offset, told.data, data);
        }
    }
}

/* Why this visitor is not admitted, or NULL. */
static const char *refusal_of(const ms_keeper *keeper, const ms_door_body *hello, int64_t bytes)
{
    if (bytes != (int64_t)sizeof *hello || hello->magic != MS_DOOR_MAGIC)
        return "it is no rank of Moonshard";
    if (strncmp(hello->version, ms_version(), sizeof hello->version) != 0)
        return "it is of another version of Moonshard";
    if (hello->ranks != keeper->ranks || hello->rank >= keeper->ranks
        || !ms_host_is_here(keeper->control, hello->rank))
        return "its rank is not one of this host";
    return keeper->visitors[hello->rank].socket ? "its rank is taken" : NULL;
}

/* Sends the files to a visitor, or refuses it. A failure concerns this visitor only. The socket of
 * an admitted rank is kept. */
static void receive_one(ms_keeper *keeper, ms_file *socket, uint32_t *arrived)
{
    const ms_os *os = keeper->os;
    ms_door_body hello = { .magic = 0 }, answer = { .magic = MS_DOOR_MAGIC };
    ms_file *files[MS_LOCAL_RANKS_MAX + 1];
    uint32_t brought = 0;
    int64_t bytes = os->socket_receive(os->user, socket, &hello, sizeof hello, MS_DOOR_SILENCE_NS,
                                       files, 0, &brought);
    const char *refusal = refusal_of(keeper, &hello, bytes);
    snprintf(answer.version, sizeof answer.version, "%s", ms_version());
    if (refusal) {
        ms_log(keeper->context, MS_LOG_WARN, "a process at the keeper's door is refused: %s",
               refusal);
        snprintf(answer.refusal, sizeof answer.refusal, "%s", refusal);
    }
    files[0] = keeper->files->control_file;
    for (uint32_t r = 0; r < keeper->ranks; r++) files[r + 1] = keeper->files->heaps[r].file;
    int error = os->socket_send(os->user, socket, &answer, sizeof answer, files,
                                refusal ? 0 : keeper->ranks + 1);
    if (refusal || error) {
        os->close(os->user, socket);
        return;
    }
    keeper->visitors[hello.rank].socket = socket;
    keeper->visitors[hello.rank].process = hello.process;
    (*arrived)++;
}

/* Names the ranks that have not come. */
static ms_status fail_missing(const ms_keeper *keeper)
{
    char missing[160] = "";
    size_t used = 0;
    for (uint32_t r = 0; r < keeper->ranks && used < sizeof missing - 16; r++)
        if (ms_host_is_here(keeper->control, r) && !keeper->visitors[r].socket)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%" PRIu32,
                                     used ? ", " : "", r);
    return ms_fail(keeper->context, MS_ERROR_TIMEOUT,
                   "these ranks have not come to the keeper of host %s in %.0f s: %s",
                   keeper->control->host_names[keeper->host], (double)keeper->init_ns / 1e9,
                   missing);
}

/* The threads start once all have come, so that nothing of this host is told before all hosts can
 * hear it. The door is closed then: no rank comes later. */
ms_status ms_keeper_admit(ms_keeper *keeper)
{
    const ms_os *os = keeper->os;
    uint32_t arrived = 0, expected = 0;
    uint64_t limit = ms_keeper_now(keeper) + keeper->init_ns;
    for (uint32_t r = 0; r < keeper->ranks; r++) expected += ms_host_is_here(keeper->control, r);
    while (arrived < expected) {
        ms_file *socket = NULL;
        ms_status status = ms_keeper_check_starter(keeper);
        if (status) return status;
        if (ms_keeper_now(keeper) >= limit) return fail_missing(keeper);
        int error = os->socket_accept(os->user, keeper->door, MS_KEEPER_TURN_NS, &socket);
        if (error && error != -EACCES && error != -EAGAIN && error != -ETIMEDOUT)
            return ms_fail_os(keeper->context, error, "the keeper cannot admit ranks", NULL);
        if (!error) receive_one(keeper, socket, &arrived);
    }
    ms_keeper_close_door(keeper);
    for (uint32_t r = 0; r < keeper->ranks; r++) {
        ms_visitor *visitor = &keeper->visitors[r];
        visitor->keeper = keeper;
        int error = visitor->socket
                        ? os->thread_start(os->user, "door", hear, visitor, &visitor->thread)
                        : 0;
        if (error) return ms_fail_os(keeper->context, error, "no thread for a rank", NULL);
    }
    return MS_OK;
}

void ms_keeper_close_door(ms_keeper *keeper)
{
    const ms_os *os = keeper->os;
    if (!keeper->door) return;
    os->close(os->user, keeper->door);
    keeper->door = NULL;
}

/* ------------------------------------------------------------------ the rank's */

/* A rank's mirror: its connection to the keeper. */
typedef struct ms_rank_mirror {
    ms_mirror mirror;
    ms_host_files *files;
    ms_context context; /* its own: it may outlive that of the rank */
    const ms_os *os;
    ms_file *socket;
    uint32_t rank;
} ms_rank_mirror;

/* A keeper that has gone is noticed elsewhere (liveness.c), so a failure is passed over. Larger
 * parts go in several messages: only words that are stored as one must arrive as one. */
static void tell(ms_mirror *mirror, const void *address, size_t bytes)
{
    ms_rank_mirror *own = (ms_rank_mirror *)mirror;
    const ms_os *os = own->os;
    ms_told told = { .offset = (uint64_t)((const char *)address - (char *)own->files->control) };
    for (size_t done = 0, part; done < bytes; done += part, told.offset += part) {
        part = bytes - done < MS_TELL_MOST ? bytes - done : MS_TELL_MOST;
        ms_copy_words(told.data, (const char *)address + done, part);
        (void)os->socket_send(os->user, own->socket, &told, sizeof told.offset + part, NULL, 0);
    }
}

/* Only a system call: signal handlers come here. */
static void stir(ms_mirror *mirror)
{
    ms_rank_mirror *own = (ms_rank_mirror *)mirror;
    (void)own->os->socket_send(own->os->user, own->socket, "", 1, NULL, 0);
}

/* Says how far this rank is, and waits until all others are. MPI_Finalize waits for all ranks and
 * has a time limit, so none comes to it before all have finished their work, however long that
 * takes some. The end of the job, or of the keeper, ends the wait. */
static void await_others(ms_rank_mirror *own, ms_finished how_far)
{
    ms_control_file *control = own->files->control;
    ms_rank_line *mine = &control->lines[own->rank];
    if (atomic_load(&mine->finished) < (uint32_t)how_far) {
        atomic_store(&mine->finished, how_far);
        own->mirror.tell(&own->mirror, &mine->finished, sizeof mine->finished);
    }
    for (uint32_t r = 0; r < control->ranks; r++)
        while (atomic_load(&control->lines[r].finished) < (uint32_t)how_far
               && !atomic_load(&control->lines[r].gone) && !ms_host_ended(control)
               && !ms_death_of_keeper(own->files)) {
            ms_word never = 0;
            ms_futex_wait(&never, 0, MS_DOOR_RETRY_NS);
        }
}

void ms_hosts_await_others(ms_rendezvous *rendezvous)
{
    await_others((ms_rank_mirror *)ms_host_files_of(rendezvous)->mirror, MS_FINISHED);
}

/* Where MPI_Finalize hangs on one rank, it does on all: rank 0 tells the user. Whether it has, or
 * has come to its end. */
static bool rank_0_tells(ms_rank_mirror *own)
{
    ms_control_file *control = own->files->control;
    ms_rank_line *first = &control->lines[0], *mine = &control->lines[own->rank];
    if (own->rank == 0) {
        atomic_store(&mine->hangs, 1);
        own->mirror.tell(&own->mirror, &mine->hangs, sizeof mine->hangs);
        return false;
    }
    uint64_t limit = own->os->monotonic_ns(own->os->user) + MS_RANK_0_NS;
    while (!atomic_load(&first->hangs) && !atomic_load(&first->gone)
           && own->os->monotonic_ns(own->os->user) < limit) {
        ms_word never = 0;
        ms_futex_wait(&never, 0, MS_DOOR_RETRY_NS);
    }
    return atomic_load(&first->hangs);
}

/* The work is done, so this is no error of the job. The time limit makes the end of MPI part of the
 * rank's work for those that watch it. A rank or a host that is lost meanwhile ends the wait. */
static void close_mpi(ms_rank_mirror *own)
{
    ms_control_file *control = own->files->control;
    ms_activity *activity = &control->lines[own->rank].activity;
    ms_activity_begin(activity);
    ms_status status = ms_mpi_close(&own->context, own->files->mpi, &control->aborted);
    if (status && !(status == MS_ERROR_TIMEOUT && rank_0_tells(own)))
        ms_log(&own->context, MS_LOG_WARN, "%s on host %s; all ranks had done their work",
               own->context.error.message, control->host_names[control->host_of[own->rank]]);
    ms_activity_end(activity);
}

/* MPI ends with the files. After the end of the job it is not asked to: it may never come back.
 * Until all have finished, MPI is called for what it may have kept of messages; none is called so
 * when the first comes to MPI_Finalize. */
static void close_mirror(ms_mirror *mirror)
{
    ms_rank_mirror *own = (ms_rank_mirror *)mirror;
    const ms_os *os = own->os;
    ms_mpi *mpi = own->files->mpi;
    if (mpi) await_others(own, MS_FINISHED);
    if (mpi && !ms_host_ended(own->files->control)) {
        ms_mpi_rest(mpi);
        await_others(own, MS_RESTS);
    }
    if (mpi && ms_host_ended(own->files->control)) ms_mpi_give_up(mpi);
    else if (mpi) close_mpi(own);
    os->close(os->user, own->socket);
    os->release(os->user, own);
}

/* The keeper's socket may not be there yet. */
static ms_status find_door(ms_context *context, const char *door, uint64_t limit, ms_file **out)
{
    const ms_os *os = context->os;
    for (;;) {
        int error = os->socket_connect(os->user, door, out);
        if (error == 0) return MS_OK;
        if (error != -ENOENT && error != -ECONNREFUSED && error != -EAGAIN)
            return ms_fail_os(context, error, "cannot go to the keeper's door", door);
        if (os->monotonic_ns(os->user) >= limit)
            return ms_fail(context, MS_ERROR_TIMEOUT, "no keeper listens at %s", door);
        ms_word never = 0;
        ms_futex_wait(&never, 0, MS_DOOR_RETRY_NS);
    }
}

/* The files that came, as a rendezvous with a mirror to the keeper; it owns the socket from now on,
 * also on failure. */
static ms_status take(ms_context *context, uint32_t rank, uint32_t ranks, ms_file *const *files,
                      ms_file *socket, ms_rendezvous **out)
{
    void *memory = NULL;
    ms_rendezvous *made = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_rank_mirror), "rank", &memory);
    if (status)
        for (uint32_t i = 0; i <= ranks; i++) context->os->close(context->os->user, files[i]);
    else status = ms_host_files_take(context, ranks, files, &made);
    if (status) {
        ms_release(context, memory);
        context->os->close(context->os->user, socket);
        return status;
    }
    ms_rank_mirror *mirror = memory;
    *mirror = (ms_rank_mirror){ .mirror = { .tell = tell, .stir = stir, .close = close_mirror },
                                .files = ms_host_files_of(made),
                                .os = context->os,
                                .socket = socket,
                                .rank = rank };
    ms_context_init(&mirror->context, context->os);
    mirror->context.log = context->log;
    mirror->context.log_user = context->log_user;
    ms_host_files_of(made)->mirror = &mirror->mirror;
    *out = made;
    return MS_OK;
}

/* The answer comes when the hosts have met, which may take as long as the slowest of them needs. */
ms_status ms_hosts_enter(ms_context *context, const char *door, uint32_t rank, uint32_t ranks,
                         uint64_t timeout_ns, ms_rendezvous **out)
{
    const ms_os *os = context->os;
    ms_file *socket = NULL, *files[MS_LOCAL_RANKS_MAX + 1];
    uint32_t count = 0;
    ms_door_body hello = { .magic = MS_DOOR_MAGIC,
                           .rank = rank,
                           .ranks = ranks,
                           .process = os->process_id(os->user) },
                 answer = { .magic = 0 };
    snprintf(hello.version, sizeof hello.version, "%s", ms_version());
    ms_status status = find_door(context, door, os->monotonic_ns(os->user) + timeout_ns, &socket);
    if (status) return status;
    int64_t bytes = os->socket_send(os->user, socket, &hello, sizeof hello, NULL, 0);
    if (!bytes)
        bytes = os->socket_receive(os->user, socket, &answer, sizeof answer, timeout_ns, files,
                                   ranks + 1, &count);
    answer.refusal[sizeof answer.refusal - 1] = '\0';
    if (bytes == 0 || bytes == -ECONNRESET)
        status = ms_fail(context, MS_ERROR_ABORTED, "the keeper has given up");
    else if (bytes < 0)
        status = ms_fail_os(context, (int)bytes, "no answer of the keeper at", door);
    else if (bytes != (int64_t)sizeof answer || answer.magic != MS_DOOR_MAGIC)
        status = ms_fail(context, MS_ERROR_CORRUPT, "%s is not the door of a keeper", door);
    else if (*answer.refusal)
        status = ms_fail(context, MS_ERROR_ARGUMENT, "the keeper refuses this process: %s",
                         answer.refusal);
    else if (count != ranks + 1)
        status = ms_fail(context, MS_ERROR_CORRUPT, "the keeper brought %u memory files, not %u",
                         count, ranks + 1);
    if (!status) status = take(context, rank, ranks, files, socket, out);
    else {
        for (uint32_t i = 0; i < count; i++) os->close(os->user, files[i]);
        os->close(os->user, socket);
    }
    if (!status) (*out)->kind = &ms_rendezvous_hosts;
    if (!status) atomic_store(&(*out)->references, 1);
    return status;
}
