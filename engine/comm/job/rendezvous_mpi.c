/* rendezvous_mpi.c: the meeting of ranks that an MPI's launcher started, by messages of MPI. Their
 * job goes on to use MPI for tensors. */
#include <stdio.h>
#include <string.h>

#include "comm/control/shm/bell.h"
#include "comm/control/shm/mismatch.h"
#include "comm/job/exchange.h"
#include "comm/mpi/load.h"
#include "comm/mpi/progress_thread.h"

#define MS_TAG_MEETING 0
/* All ranks come to MPI_Finalize at the same time (local_ranks.c). That of MPICH has been seen to
 * hang over TCP then. A shorter time limit of the job is that of MPI_Finalize, too. */
#define MS_FINALIZE_NS ((uint64_t)10 * 1000000000)

/* After the time limit, a rank whose own MPI hangs says so before rank 0 misses it, and rank 0
 * speaks before the others miss it. */
#define MS_FIRST_NS ((uint64_t)2000000000)
#define MS_OTHERS_NS ((uint64_t)5000000000)

typedef struct ms_mpi_meeting {
    ms_meeting base;
    uint64_t doubt_ns; /* of the clock: when to look whether MPI hangs; 0: that has been done */
    bool is_other;     /* not the first process of its host, as far as its launcher says */
    ms_mpi *mpi;
    ms_word news; /* of messages, until the rank has a line */
    _Atomic(ms_rank_line *) line;
} ms_mpi_meeting;

/* ------------------------------------------------------------------- messages */

/* On the thread of MPI. */
static void hear_news(void *user)
{
    ms_mpi_meeting *meeting = user;
    ms_rank_line *line = atomic_load(&meeting->line);
    atomic_fetch_add(&meeting->news, 1);
    ms_futex_wake(&meeting->news, 1);
    if (line) ms_host_wake_line(line);
}

/* "rank 1 on host node1" for errors of this process. */
static const char *name_place(const ms_mpi_meeting *meeting, char text[MS_RANK_NAME_BYTES])
{
    const ms_os *os = meeting->base.context->os;
    ms_host_id host;
    snprintf(text, MS_RANK_NAME_BYTES, "rank %u", meeting->base.place->rank);
    if (os->host(os->user, &host) == 0)
        snprintf(text, MS_RANK_NAME_BYTES, "rank %u on host %s", meeting->base.place->rank,
                 host.name);
    return text;
}

/* Waits until the message has ended or failed, at most until the limit. */
static ms_mpi_state watch(ms_mpi_meeting *meeting, ms_mpi_message *message, uint64_t limit)
{
    const ms_os *os = meeting->base.context->os;
    for (;;) {
        uint32_t seen = atomic_load(&meeting->news);
        ms_mpi_state state = ms_mpi_look(message);
        uint64_t now = os->monotonic_ns(os->user);
        if (state != MS_MPI_POSTED || now >= limit) return state;
        ms_futex_wait(&meeting->news, seen, limit - now);
    }
}

/* The ranks of a host miss the same rank: the first of them says so. What was told before stays so:
 * a rank that shares a failure may wait in vain for one that its launcher has killed. */
static ms_status fail_late(ms_mpi_meeting *meeting, uint32_t peer)
{
    ms_host_id host = { .name = "?" };
    ms_context *context = meeting->base.context;
    (void)context->os->host(context->os->user, &host);
    if (meeting->is_other) meeting->base.place->is_told = true;
    return ms_fail(context, MS_ERROR_TIMEOUT,
                   "host %s: rank %u has heard nothing of rank %u in %g s", host.name,
                   meeting->base.place->rank, peer, (double)meeting->base.options->init_ns / 1e9);
}

/* One message, to its end; NULL: it has come to none, so that it still belongs to MPI. Once, when
 * the time for the meeting is over, the rank looks whether its own MPI hangs. */
static ms_status await(ms_mpi_meeting *meeting, ms_mpi_message **of)
{
    ms_context *context = meeting->base.context;
    ms_mpi_message *message = *of;
    char place[MS_RANK_NAME_BYTES];
    const char *call = NULL;
    uint64_t limit = meeting->base.limit_ns, doubt = meeting->doubt_ns;
    double seconds = (double)meeting->base.options->init_ns / 1e9;
    ms_mpi_state state = watch(meeting, message, doubt && doubt < limit ? doubt : limit);
    if (state == MS_MPI_POSTED && doubt) {
        meeting->doubt_ns = 0;
        call = ms_mpi_hangs(meeting->mpi);
        if (!call) state = watch(meeting, message, limit);
    }
    if (state == MS_MPI_FAILED)
        return ms_fail(context, MS_ERROR_IO, "a message of MPI has failed: %s", message->why);
    if (state == MS_MPI_ENDED && (message->sends || message->moved == message->bytes)) return MS_OK;
    if (state == MS_MPI_ENDED)
        return ms_fail(context, MS_ERROR_MISMATCH,
                       "rank %u is of another version of Moonshard: install the same one on all "
                       "hosts",
                       message->peer);
    *of = NULL;
    if (call)
        return ms_fail(context, MS_ERROR_TIMEOUT,
                       "%s: %s of %s did not return, so that the rank has not met the others in "
                       "%g s",
                       name_place(meeting, place), call, meeting->base.place->mpi, seconds);
    return fail_late(meeting, message->peer);
}

static ms_status pass(ms_mpi_meeting *meeting, bool sends, uint32_t peer, void *memory,
                      size_t bytes)
{
    void *room = NULL;
    ms_status status = ms_allocate(meeting->base.context, sizeof(ms_mpi_message), "meeting", &room);
    if (status) return status;
    ms_mpi_message *message = room;
    *message = (ms_mpi_message){
        .memory = memory, .bytes = bytes, .peer = peer, .tag = MS_TAG_MEETING, .sends = sends
    };
    ms_mpi_post(meeting->mpi, message);
    status = await(meeting, &message);
    ms_release(meeting->base.context, message);
    return status;
}

static ms_status send(ms_meeting *meeting, uint32_t rank, const void *memory, size_t bytes)
{
    return pass((ms_mpi_meeting *)meeting, true, rank, (void *)(uintptr_t)memory, bytes);
}

static ms_status receive(ms_meeting *meeting, uint32_t rank, void *memory, size_t bytes)
{
    return pass((ms_mpi_meeting *)meeting, false, rank, memory, bytes);
}

/* News of MPI wakes the rank at its line from now on, so the record stays as long as MPI does. */
static void end(ms_meeting *meeting, ms_host_files *files)
{
    ms_mpi_meeting *own = (ms_mpi_meeting *)meeting;
    files->mpi = own->mpi;
    atomic_store(&own->line, &files->control->lines[meeting->place->rank]);
}

/* ------------------------------------------------------------------- beginning */

/* The module for the MPI that started this process. Slurm's own start does not say which one is
 * meant. */
static const char *module_of(ms_launcher_kind kind, const char *wish)
{
    if (wish && *wish) return wish;
    return kind == MS_LAUNCHER_PMI ? "mpich" : "openmpi";
}

/* Whether each process is alone in MPI: then the module belongs to another MPI. All find that, so
 * rank 0 reports it; where the launcher tells no size, only the others can know. */
static ms_status check_company(const ms_mpi_meeting *meeting, const ms_launcher *launcher)
{
    const ms_mpi_world *world = ms_mpi_found(meeting->mpi);
    bool sized = launcher->size != MS_UNKNOWN;
    uint32_t least = sized ? launcher->size : launcher->rank + 1; /* processes of the job */
    if (world->size > 1 || least == 1) return MS_OK;
    meeting->base.place->is_told = launcher->rank > (sized ? 0 : 1);
    return ms_fail(
        meeting->base.context, MS_ERROR_ARGUMENT,
        "%s counts %s%u processes, but %s finds only this one: it is not the MPI "
        "whose launcher started them; choose another module with "
        "MOONSHARD_MPI=openmpi or mpich%s",
        launcher->name, sized ? "" : "at least ", least, world->library,
        launcher->kind == MS_LAUNCHER_SLURM ? ", or start with srun --mpi=pmix or --mpi=pmi2" : "");
}

/* MPI counts what the launcher counts. */
static ms_status check_world(const ms_mpi_meeting *meeting, const ms_launcher *launcher)
{
    const ms_mpi_world *world = ms_mpi_found(meeting->mpi);
    char size[24] = "";
    bool sized = launcher->size != MS_UNKNOWN;
    if (world->rank == launcher->rank && (!sized || world->size == launcher->size)) return MS_OK;
    if (sized) snprintf(size, sizeof size, " of %u", launcher->size);
    return ms_fail(meeting->base.context, MS_ERROR_ARGUMENT,
                   "%s says rank %u%s, and %s says rank %u of %u: they belong to different jobs",
                   launcher->name, launcher->rank, size, meeting->base.place->mpi, world->rank,
                   world->size);
}

/* The same error of this process, with its rank and host in front. */
static ms_status say_where(ms_mpi_meeting *meeting, const ms_launcher *launcher, ms_status status)
{
    char why[MS_ERROR_MESSAGE_BYTES], place[MS_RANK_NAME_BYTES];
    memcpy(why, meeting->base.context->error.message, sizeof why);
    meeting->base.place->rank = launcher->rank;
    return ms_fail(meeting->base.context, status, "%s: %.900s", name_place(meeting, place), why);
}

/* The module may be missing on this host only, for all its processes. */
static ms_status load_module(const ms_mpi_meeting *meeting, const char *path,
                             const ms_mpi_module **out)
{
    ms_context *context = meeting->base.context;
    ms_host_id host;
    char why[MS_ERROR_MESSAGE_BYTES];
    ms_status status = ms_mpi_load(context, path, out);
    if (!status || context->os->host(context->os->user, &host)) return status;
    memcpy(why, context->error.message, sizeof why);
    return ms_fail(context, status, "host %s: %.900s", host.name, why);
}

/* Loads the module and begins MPI. */
static ms_status begin(ms_mpi_meeting *meeting, const ms_launcher *launcher)
{
    char path[4096];
    ms_context *context = meeting->base.context;
    const ms_hosts_options *options = meeting->base.options;
    ms_hosts_place *place = meeting->base.place;
    const ms_mpi_module *module = NULL;
    uint64_t most_ns = options->rendezvous.timeout_ns;
    ms_mpi_options wishes = { .timeout_ns = options->init_ns,
                              .ending_ns = most_ns < MS_FINALIZE_NS ? most_ns : MS_FINALIZE_NS,
                              .crowded = true,
                              .news = hear_news,
                              .user = meeting };
    snprintf(place->mpi, sizeof place->mpi, "%s", module_of(launcher->kind, options->mpi));
    snprintf(path, sizeof path, "%s/libmoonshard_mpi_%s.so", options->modules, place->mpi);
    ms_status status = load_module(meeting, path, &module);
    if (status) return status;
    place->is_told = false;
    status = ms_mpi_open(context, module, &wishes, &meeting->mpi);
    /* An MPI without threads is that for all. */
    if (status == MS_ERROR_UNSUPPORTED) place->is_told = launcher->rank > 0;
    if (status == MS_ERROR_UNSUPPORTED) return status;
    if (status) return say_where(meeting, launcher, status);
    const ms_mpi_world *world = ms_mpi_found(meeting->mpi);
    place->rank = world->rank;
    place->ranks = world->size;
    ms_meeting_begin(&meeting->base);
    meeting->doubt_ns = context->os->monotonic_ns(context->os->user) + options->init_ns;
    meeting->base.limit_ns += place->rank ? MS_OTHERS_NS : MS_FIRST_NS;
    snprintf(place->library, sizeof place->library, "%s", world->library);
    if (world->size > MS_LOCAL_RANKS_MAX)
        return ms_fail(context, MS_ERROR_ARGUMENT, "%u ranks: 1 to %d are allowed", world->size,
                       MS_LOCAL_RANKS_MAX);
    meeting->base.wrong = check_world(meeting, launcher);
    return check_company(meeting, launcher);
}

ms_status ms_meeting_over_mpi(ms_context *context, const ms_hosts_options *options,
                              const ms_launcher *launcher, ms_hosts_place *place, ms_meeting **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_mpi_meeting), "meeting", &memory);
    if (status) return status;
    ms_mpi_meeting *meeting = memory;
    meeting->base = (ms_meeting){ .context = context,
                                  .options = options,
                                  .place = place,
                                  .send = send,
                                  .receive = receive,
                                  .end = end };
    meeting->is_other = launcher->local_rank != MS_UNKNOWN && launcher->local_rank > 0;
    status = begin(meeting, launcher);
    if (!status) *out = &meeting->base;
    return status;
}
