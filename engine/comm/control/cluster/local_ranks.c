/* local_ranks.c: the local socket, at which the ranks of a node meet their agent. A rank gets the
 * memory files there, and then tells the agent what it has written that other nodes need. */
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

#define MS_LOCAL_SOCKET_MAGIC 0x31524f4f4444534dull /* "MSDDOOR1" */
#define MS_LOCAL_SOCKET_SILENCE_NS ((uint64_t)5 * 1000000000)
#define MS_LOCAL_SOCKET_RETRY_NS ((uint64_t)5 * 1000000)
/* For news of rank 0, where MPI_Finalize hangs. */
#define MS_RANK_0_NS ((uint64_t)2000000000)
/* The most that a rank tells at once. */
#define MS_TELL_MOST 4096

/* What a rank says at the local socket, and what it is answered. */
typedef struct ms_local_rank_body {
    uint64_t magic;
    char version[16];
    uint32_t rank, ranks;
    int64_t process;
    char refusal[160]; /* of the agent; "": welcome */
} ms_local_rank_body;

/* A part of the control file as the rank has written it. A message of one byte tells nothing: the
 * agent is to look. */
typedef struct ms_told {
    uint64_t offset;
    char data[MS_TELL_MOST];
} ms_told;

/* --------------------------------------------------------------- the agent's */

/* Less is unheard from now on, so that more may be shown. */
static void note_heard(ms_rank_connection *connection, ms_unheard unheard)
{
    if (atomic_load(&connection->unheard) <= (uint32_t)unheard) return;
    atomic_store(&connection->unheard, unheard);
    ms_agent_show(connection->agent, true);
}

/* A part of the rank's line is shown with all of it: a copy of the line that is under way must not
 * take it back. A rank tells its calls before it tells that it has finished. */
static void pass_on(ms_rank_connection *connection, const ms_told *told, size_t bytes)
{
    ms_agent *agent = connection->agent;
    uint64_t rank = (uint64_t)(connection - agent->connections),
             finished = offsetof(ms_control_file, lines) + rank * sizeof(ms_rank_line)
                        + offsetof(ms_rank_line, finished);
    if (told->offset == finished) note_heard(connection, MS_CALLS_HEARD);
    if (ms_agent_shows(agent, told->offset, bytes)) {
        ms_agent_show(agent, true);
        return;
    }
    ms_agent_propose(agent);
    ms_agent_tell(agent, told->offset, told->data, bytes);
}

/* What a rank tells, until it has gone. A child of the rank may keep the socket open. So the rank
 * has told all once its process has ended before a wait in which nothing came. */
static void hear(void *argument)
{
    ms_rank_connection *connection = argument;
    ms_agent *agent = connection->agent;
    const ms_os *os = agent->os;
    const ms_rank_line *line = &agent->control->lines[connection - agent->connections];
    ms_told told;
    for (;;) {
        uint32_t files = 0;
        bool gone = atomic_load(&line->gone) != 0;
        int64_t bytes = os->socket_receive(os->user, connection->socket, &told, sizeof told,
                                           MS_AGENT_TURN_NS, NULL, 0, &files);
        if (bytes == -ETIMEDOUT || bytes == -EAGAIN) {
            if (gone) note_heard(connection, MS_ALL_HEARD);
            if (atomic_load(&agent->closing)) return;
            continue;
        }
        if (bytes <= 0) break;
        if (bytes == 1) {
            agent->replication.stir(&agent->replication);
            continue;
        }
        size_t data = (size_t)bytes - sizeof told.offset;
        if (bytes > (int64_t)sizeof told.offset && told.offset < agent->control->control_bytes
            && data <= agent->control->control_bytes - told.offset)
            pass_on(connection, &told, data);
    }
    note_heard(connection, MS_ALL_HEARD);
}

/* Why a process that has connected is not admitted; NULL: it is. */
static const char *refusal_of(const ms_agent *agent, const ms_local_rank_body *hello, int64_t bytes)
{
    if (bytes != (int64_t)sizeof *hello || hello->magic != MS_LOCAL_SOCKET_MAGIC)
        return "it is no rank of Moonshard";
    if (strncmp(hello->version, ms_version(), sizeof hello->version) != 0)
        return "it is of another version of Moonshard";
    if (hello->ranks != agent->ranks || hello->rank >= agent->ranks
        || !ms_shm_is_here(agent->control, hello->rank))
        return "its rank is not one of this host";
    return agent->connections[hello->rank].socket ? "its rank is taken" : NULL;
}

/* Sends the files to a process that has connected, or refuses it. A failure concerns this process
 * only. The socket of an admitted rank is kept. */
static void receive_one(ms_agent *agent, ms_file *socket, uint32_t *arrived)
{
    const ms_os *os = agent->os;
    ms_local_rank_body hello = { .magic = 0 }, answer = { .magic = MS_LOCAL_SOCKET_MAGIC };
    ms_file *files[MS_LOCAL_RANKS_MAX + 1];
    uint32_t brought = 0;
    int64_t bytes = os->socket_receive(os->user, socket, &hello, sizeof hello,
                                       MS_LOCAL_SOCKET_SILENCE_NS, files, 0, &brought);
    const char *refusal = refusal_of(agent, &hello, bytes);
    snprintf(answer.version, sizeof answer.version, "%s", ms_version());
    if (refusal) {
        ms_log(agent->context, MS_LOG_WARN, "a process at the keeper's door is refused: %s",
               refusal);
        snprintf(answer.refusal, sizeof answer.refusal, "%s", refusal);
    }
    files[0] = agent->files->control_file;
    for (uint32_t r = 0; r < agent->ranks; r++) files[r + 1] = agent->files->heaps[r].file;
    if (!refusal) atomic_store(&agent->connections[hello.rank].unheard, MS_CALLS_UNHEARD);
    int error = os->socket_send(os->user, socket, &answer, sizeof answer, files,
                                refusal ? 0 : agent->ranks + 1);
    if (error && !refusal) atomic_store(&agent->connections[hello.rank].unheard, MS_ALL_HEARD);
    if (refusal || error) {
        os->close(os->user, socket);
        return;
    }
    agent->connections[hello.rank].socket = socket;
    agent->connections[hello.rank].process = hello.process;
    (*arrived)++;
}

/* Names the ranks that have not come. */
static ms_status fail_missing(const ms_agent *agent)
{
    char missing[160] = "";
    size_t used = 0;
    for (uint32_t r = 0; r < agent->ranks && used < sizeof missing - 16; r++)
        if (ms_shm_is_here(agent->control, r) && !agent->connections[r].socket)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%" PRIu32,
                                     used ? ", " : "", r);
    return ms_fail(agent->context, MS_ERROR_TIMEOUT,
                   "these ranks have not come to the keeper of host %s in %.0f s: %s",
                   agent->control->node_names[agent->node], (double)agent->init_ns / 1e9, missing);
}

/* The threads start once all have come, so that nothing of this node is told before all nodes can
 * hear it. The local socket is closed then: no rank comes later. */
ms_status ms_agent_admit(ms_agent *agent)
{
    const ms_os *os = agent->os;
    uint32_t arrived = 0, expected = 0;
    uint64_t limit = ms_agent_now(agent) + agent->init_ns;
    for (uint32_t r = 0; r < agent->ranks; r++) expected += ms_shm_is_here(agent->control, r);
    while (arrived < expected) {
        ms_file *socket = NULL;
        ms_status status = ms_agent_check_starter(agent);
        if (status) return status;
        if (ms_agent_now(agent) >= limit) return fail_missing(agent);
        int error = os->socket_accept(os->user, agent->local_socket, MS_AGENT_TURN_NS, &socket);
        if (error && error != -EACCES && error != -EAGAIN && error != -ETIMEDOUT)
            return ms_fail_os(agent->context, error, "the keeper cannot admit ranks", NULL);
        if (!error) receive_one(agent, socket, &arrived);
    }
    ms_agent_close_local_socket(agent);
    for (uint32_t r = 0; r < agent->ranks; r++) {
        ms_rank_connection *connection = &agent->connections[r];
        connection->agent = agent;
        int error = connection->socket
                        ? os->thread_start(os->user, "door", hear, connection, &connection->thread)
                        : 0;
        if (error) return ms_fail_os(agent->context, error, "no thread for a rank", NULL);
    }
    return MS_OK;
}

void ms_agent_close_local_socket(ms_agent *agent)
{
    const ms_os *os = agent->os;
    if (!agent->local_socket) return;
    os->close(os->user, agent->local_socket);
    agent->local_socket = NULL;
}

/* ------------------------------------------------------------------ the rank's */

/* A rank's replication: its connection to the agent. */
typedef struct ms_rank_replication {
    ms_replication replication;
    ms_shm_files *files;
    ms_context context; /* its own: it may outlive that of the rank */
    const ms_os *os;
    ms_file *socket;
    uint32_t rank;
} ms_rank_replication;

/* An agent that has gone is noticed elsewhere (liveness.c), so a failure is passed over. Larger
 * parts go in several messages: only words that are stored as one must arrive as one. */
static void tell(ms_replication *replication, const void *address, size_t bytes)
{
    ms_rank_replication *own = (ms_rank_replication *)replication;
    const ms_os *os = own->os;
    ms_told told = { .offset = (uint64_t)((const char *)address - (char *)own->files->control) };
    for (size_t done = 0, part; done < bytes; done += part, told.offset += part) {
        part = bytes - done < MS_TELL_MOST ? bytes - done : MS_TELL_MOST;
        ms_copy_words(told.data, (const char *)address + done, part);
        (void)os->socket_send(os->user, own->socket, &told, sizeof told.offset + part, NULL, 0);
    }
}

/* Only a system call: signal handlers come here. */
static void stir(ms_replication *replication)
{
    ms_rank_replication *own = (ms_rank_replication *)replication;
    (void)own->os->socket_send(own->os->user, own->socket, "", 1, NULL, 0);
}

/* Says how far this rank is, and waits until all others are. MPI_Finalize waits for all ranks and
 * has a time limit, so none comes to it before all have finished their work, however long that
 * takes some. The end of the job, or of the agent, ends the wait. */
static void await_others(ms_rank_replication *own, ms_finished how_far)
{
    ms_control_file *control = own->files->control;
    ms_rank_line *mine = &control->lines[own->rank];
    if (atomic_load(&mine->finished) < (uint32_t)how_far) {
        atomic_store(&mine->finished, how_far);
        own->replication.tell(&own->replication, &mine->finished, sizeof mine->finished);
    }
    for (uint32_t r = 0; r < control->ranks; r++)
        while (atomic_load(&control->lines[r].finished) < (uint32_t)how_far
               && !atomic_load(&control->lines[r].gone) && !ms_shm_ended(control)
               && !ms_liveness_of_agent(own->files)) {
            ms_word never = 0;
            ms_futex_wait(&never, 0, MS_LOCAL_SOCKET_RETRY_NS);
        }
}

void ms_cluster_await_others(ms_rendezvous *rendezvous)
{
    await_others((ms_rank_replication *)ms_shm_files_of(rendezvous)->replication, MS_FINISHED);
}

/* Where MPI_Finalize hangs on one rank, it does on all, or fails once some have left: rank 0 tells
 * the user. Whether it has, or has come to its end. */
static bool rank_0_tells(ms_rank_replication *own)
{
    ms_control_file *control = own->files->control;
    ms_rank_line *first = &control->lines[0], *mine = &control->lines[own->rank];
    if (own->rank == 0) {
        atomic_store(&mine->hangs, 1);
        own->replication.tell(&own->replication, &mine->hangs, sizeof mine->hangs);
        return false;
    }
    uint64_t limit = own->os->monotonic_ns(own->os->user) + MS_RANK_0_NS;
    while (!atomic_load(&first->hangs) && !atomic_load(&first->gone)
           && own->os->monotonic_ns(own->os->user) < limit) {
        ms_word never = 0;
        ms_futex_wait(&never, 0, MS_LOCAL_SOCKET_RETRY_NS);
    }
    return atomic_load(&first->hangs);
}

/* The work is done, so this is no error of the job. The time limit makes the end of MPI part of the
 * rank's work for those that watch it. A rank or a node that is lost meanwhile ends the wait. */
static void close_mpi(ms_rank_replication *own)
{
    ms_control_file *control = own->files->control;
    ms_activity *activity = &control->lines[own->rank].activity;
    ms_activity_begin(activity);
    ms_status status = ms_mpi_close(&own->context, own->files->mpi, &control->aborted);
    if (status && !rank_0_tells(own))
        ms_log(&own->context, MS_LOG_WARN, "%s on host %s; all ranks had done their work",
               own->context.error.message, control->node_names[control->node_of[own->rank]]);
    ms_activity_end(activity);
}

/* MPI ends with the files. After the end of the job it is not asked to: it may never come back.
 * Until all have finished, MPI is called for what it may have kept of messages; none is called so
 * when the first comes to MPI_Finalize. */
static void close_replication(ms_replication *replication)
{
    ms_rank_replication *own = (ms_rank_replication *)replication;
    const ms_os *os = own->os;
    ms_mpi *mpi = own->files->mpi;
    if (mpi) await_others(own, MS_FINISHED);
    if (mpi && !ms_shm_ended(own->files->control)) {
        ms_mpi_rest(mpi);
        await_others(own, MS_RESTS);
    }
    if (mpi && ms_shm_ended(own->files->control)) ms_mpi_give_up(mpi);
    else if (mpi) close_mpi(own);
    os->close(os->user, own->socket);
    os->release(os->user, own);
}

/* The agent's socket may not be there yet. */
static ms_status find_local_socket(ms_context *context, const char *local_socket, uint64_t limit,
                                   ms_file **out)
{
    const ms_os *os = context->os;
    for (;;) {
        int error = os->socket_connect(os->user, local_socket, out);
        if (error == 0) return MS_OK;
        if (error != -ENOENT && error != -ECONNREFUSED && error != -EAGAIN)
            return ms_fail_os(context, error, "cannot go to the keeper's door", local_socket);
        if (os->monotonic_ns(os->user) >= limit)
            return ms_fail(context, MS_ERROR_TIMEOUT, "no keeper listens at %s", local_socket);
        ms_word never = 0;
        ms_futex_wait(&never, 0, MS_LOCAL_SOCKET_RETRY_NS);
    }
}

/* The files that came, as a rendezvous with a replication to the agent; it owns the socket from now
 * on, also on failure. */
static ms_status take(ms_context *context, uint32_t rank, uint32_t ranks, ms_file *const *files,
                      ms_file *socket, ms_rendezvous **out)
{
    void *memory = NULL;
    ms_rendezvous *made = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_rank_replication), "rank", &memory);
    if (status)
        for (uint32_t i = 0; i <= ranks; i++) context->os->close(context->os->user, files[i]);
    else status = ms_shm_files_take(context, ranks, files, &made);
    if (status) {
        ms_release(context, memory);
        context->os->close(context->os->user, socket);
        return status;
    }
    ms_rank_replication *replication = memory;
    *replication = (ms_rank_replication){
        .replication = { .tell = tell, .stir = stir, .close = close_replication },
        .files = ms_shm_files_of(made),
        .os = context->os,
        .socket = socket,
        .rank = rank
    };
    ms_context_init(&replication->context, context->os);
    replication->context.log = context->log;
    replication->context.log_user = context->log_user;
    ms_shm_files_of(made)->replication = &replication->replication;
    *out = made;
    return MS_OK;
}

/* The answer comes when the nodes have met, which may take as long as the slowest of them needs. */
ms_status ms_cluster_enter(ms_context *context, const char *local_socket, uint32_t rank,
                           uint32_t ranks, uint64_t timeout_ns, ms_rendezvous **out)
{
    const ms_os *os = context->os;
    ms_file *socket = NULL, *files[MS_LOCAL_RANKS_MAX + 1];
    uint32_t count = 0;
    ms_local_rank_body hello = { .magic = MS_LOCAL_SOCKET_MAGIC,
                                 .rank = rank,
                                 .ranks = ranks,
                                 .process = os->process_id(os->user) },
                       answer = { .magic = 0 };
    snprintf(hello.version, sizeof hello.version, "%s", ms_version());
    ms_status status =
        find_local_socket(context, local_socket, os->monotonic_ns(os->user) + timeout_ns, &socket);
    if (status) return status;
    int64_t bytes = os->socket_send(os->user, socket, &hello, sizeof hello, NULL, 0);
    if (!bytes)
        bytes = os->socket_receive(os->user, socket, &answer, sizeof answer, timeout_ns, files,
                                   ranks + 1, &count);
    answer.refusal[sizeof answer.refusal - 1] = '\0';
    if (bytes == 0 || bytes == -ECONNRESET)
        status = ms_fail(context, MS_ERROR_ABORTED, "the keeper has given up");
    else if (bytes < 0)
        status = ms_fail_os(context, (int)bytes, "no answer of the keeper at", local_socket);
    else if (bytes != (int64_t)sizeof answer || answer.magic != MS_LOCAL_SOCKET_MAGIC)
        status = ms_fail(context, MS_ERROR_CORRUPT, "%s is not the door of a keeper", local_socket);
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
    if (!status) (*out)->kind = &ms_rendezvous_cluster;
    if (!status) atomic_store(&(*out)->references, 1);
    return status;
}
