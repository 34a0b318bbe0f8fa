/* rendezvous_mpi.c: the exchange (exchange.h) of processes that the launcher of an MPI started, by
 * messages of this MPI. Their job then uses MPI for tensors. */
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

typedef struct ms_mpi_exchange {
    ms_exchange base;
    uint64_t doubt_ns; /* of the clock: when to look whether MPI hangs; 0: that has been done */
    bool is_other;     /* not the first process of its node, as far as its launcher says */
    ms_mpi *mpi;
    ms_word news; /* of messages, until the rank has a line */
    _Atomic(ms_rank_line *) line;
} ms_mpi_exchange;

/* ------------------------------------------------------------------- messages */

/* On the thread of MPI. */
static void hear_news(void *user)
{
    ms_mpi_exchange *exchange = user;
    ms_rank_line *line = atomic_load(&exchange->line);
    atomic_fetch_add(&exchange->news, 1);
    ms_futex_wake(&exchange->news, 1);
    if (line) ms_shm_wake_line(line);
}

/* "rank 1 on host node1" for errors of this process. */
static const char *name_place(const ms_mpi_exchange *exchange, char text[MS_RANK_NAME_BYTES])
{
    const ms_os *os = exchange->base.context->os;
    ms_node_id node;
    snprintf(text, MS_RANK_NAME_BYTES, "rank %u", exchange->base.place->rank);
    if (os->node_id(os->user, &node) == 0)
        snprintf(text, MS_RANK_NAME_BYTES, "rank %u on host %s", exchange->base.place->rank,
                 node.name);
    return text;
}

/* Waits until the message has ended or failed, at most until the limit. */
static ms_mpi_state watch(ms_mpi_exchange *exchange, ms_mpi_message *message, uint64_t limit)
{
    const ms_os *os = exchange->base.context->os;
    for (;;) {
        uint32_t seen = atomic_load(&exchange->news);
        ms_mpi_state state = ms_mpi_look(message);
        uint64_t now = os->monotonic_ns(os->user);
        if (state != MS_MPI_POSTED || now >= limit) return state;
        ms_futex_wait(&exchange->news, seen, limit - now);
    }
}

/* The ranks of a node miss the same rank: the first of them says so. What was told before stays so:
 * a rank that shares a failure may wait in vain for one that its launcher has killed. */
static ms_status fail_late(ms_mpi_exchange *exchange, uint32_t peer)
{
    ms_node_id node = { .name = "?" };
    ms_context *context = exchange->base.context;
    (void)context->os->node_id(context->os->user, &node);
    if (exchange->is_other) exchange->base.place->is_told = true;
    return ms_fail(context, MS_ERROR_TIMEOUT,
                   "host %s: rank %u has heard nothing of rank %u in %g s", node.name,
                   exchange->base.place->rank, peer, (double)exchange->base.options->init_ns / 1e9);
}

/* One message, to its end; NULL: it has come to none, so that it still belongs to MPI. Once, when
 * the time for the exchange is over, the rank looks whether its own MPI hangs. */
static ms_status await(ms_mpi_exchange *exchange, ms_mpi_message **of)
{
    ms_context *context = exchange->base.context;
    ms_mpi_message *message = *of;
    char place[MS_RANK_NAME_BYTES];
    const char *call = NULL;
    uint64_t limit = exchange->base.limit_ns, doubt = exchange->doubt_ns;
    double seconds = (double)exchange->base.options->init_ns / 1e9;
    ms_mpi_state state = watch(exchange, message, doubt && doubt < limit ? doubt : limit);
    if (state == MS_MPI_POSTED && doubt) {
        exchange->doubt_ns = 0;
        call = ms_mpi_hangs(exchange->mpi);
        if (!call) state = watch(exchange, message, limit);
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
                       name_place(exchange, place), call, exchange->base.place->mpi, seconds);
    return fail_late(exchange, message->peer);
}

static ms_status pass(ms_mpi_exchange *exchange, bool sends, uint32_t peer, void *memory,
                      size_t bytes)
{
    void *room = NULL;
    ms_status status =
        ms_allocate(exchange->base.context, sizeof(ms_mpi_message), "meeting", &room);
    if (status) return status;
    ms_mpi_message *message = room;
    *message = (ms_mpi_message){
        .memory = memory, .bytes = bytes, .peer = peer, .tag = MS_TAG_MEETING, .sends = sends
    };
    ms_mpi_post(exchange->mpi, message);
    status = await(exchange, &message);
    ms_release(exchange->base.context, message);
    return status;
}

static ms_status send(ms_exchange *exchange, uint32_t rank, const void *memory, size_t bytes)
{
    return pass((ms_mpi_exchange *)exchange, true, rank, (void *)(uintptr_t)memory, bytes);
}

static ms_status receive(ms_exchange *exchange, uint32_t rank, void *memory, size_t bytes)
{
    return pass((ms_mpi_exchange *)exchange, false, rank, memory, bytes);
}

/* News of MPI wakes the rank at its line from now on, so the exchange stays as long as MPI does. */
static void end(ms_exchange *exchange, ms_shm_files *files)
{
    ms_mpi_exchange *own = (ms_mpi_exchange *)exchange;
    files->mpi = own->mpi;
    atomic_store(&own->line, &files->control->lines[exchange->place->rank]);
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
static ms_status check_company(const ms_mpi_exchange *exchange, const ms_launcher *launcher)
{
    const ms_mpi_world *world = ms_mpi_found(exchange->mpi);
    bool sized = launcher->size != MS_UNKNOWN;
    uint32_t least = sized ? launcher->size : launcher->rank + 1; /* processes of the job */
    if (world->size > 1 || least == 1) return MS_OK;
    exchange->base.place->is_told = launcher->rank > (sized ? 0 : 1);
    return ms_fail(
        exchange->base.context, MS_ERROR_ARGUMENT,
        "%s counts %s%u processes, but %s finds only this one: it is not the MPI "
        "whose launcher started them; choose another module with "
        "MOONSHARD_MPI=openmpi or mpich%s",
        launcher->name, sized ? "" : "at least ", least, world->library,
        launcher->kind == MS_LAUNCHER_SLURM ? ", or start with srun --mpi=pmix or --mpi=pmi2" : "");
}

/* MPI counts what the launcher counts. */
static ms_status check_world(const ms_mpi_exchange *exchange, const ms_launcher *launcher)
{
    const ms_mpi_world *world = ms_mpi_found(exchange->mpi);
    char size[24] = "";
    bool sized = launcher->size != MS_UNKNOWN;
    if (world->rank == launcher->rank && (!sized || world->size == launcher->size)) return MS_OK;
    if (sized) snprintf(size, sizeof size, " of %u", launcher->size);
    return ms_fail(exchange->base.context, MS_ERROR_ARGUMENT,
                   "%s says rank %u%s, and %s says rank %u of %u: they belong to different jobs",
                   launcher->name, launcher->rank, size, exchange->base.place->mpi, world->rank,
                   world->size);
}

/* The same error of this process, with its rank and node in front. */
static ms_status say_where(ms_mpi_exchange *exchange, const ms_launcher *launcher, ms_status status)
{
    char why[MS_ERROR_MESSAGE_BYTES], place[MS_RANK_NAME_BYTES];
    memcpy(why, exchange->base.context->error.message, sizeof why);
    exchange->base.place->rank = launcher->rank;
    return ms_fail(exchange->base.context, status, "%s: %.900s", name_place(exchange, place), why);
}

/* The module may be missing on this node only, for all its processes. */
static ms_status load_module(const ms_mpi_exchange *exchange, const char *path,
                             const ms_mpi_module **out)
{
    ms_context *context = exchange->base.context;
    ms_node_id node;
    char why[MS_ERROR_MESSAGE_BYTES];
    ms_status status = ms_mpi_load(context, path, out);
    if (!status || context->os->node_id(context->os->user, &node)) return status;
    memcpy(why, context->error.message, sizeof why);
    return ms_fail(context, status, "host %s: %.900s", node.name, why);
}

/* Loads the module and begins MPI. */
static ms_status begin(ms_mpi_exchange *exchange, const ms_launcher *launcher)
{
    char path[4096];
    ms_context *context = exchange->base.context;
    const ms_cluster_options *options = exchange->base.options;
    ms_cluster_place *place = exchange->base.place;
    const ms_mpi_module *module = NULL;
    uint64_t most_ns = options->rendezvous.timeout_ns;
    ms_mpi_options wishes = { .timeout_ns = options->init_ns,
                              .ending_ns = most_ns < MS_FINALIZE_NS ? most_ns : MS_FINALIZE_NS,
                              .crowded = true,
                              .news = hear_news,
                              .user = exchange,
                              .owns_user = true };
    snprintf(place->mpi, sizeof place->mpi, "%s", module_of(launcher->kind, options->mpi));
    snprintf(path, sizeof path, "%s/libmoonshard_mpi_%s.so", options->modules, place->mpi);
    ms_status status = load_module(exchange, path, &module);
    if (status) return status;
    place->is_told = false;
    status = ms_mpi_open(context, module, &wishes, &exchange->mpi);
    /* An MPI without threads is that for all. */
    if (status == MS_ERROR_UNSUPPORTED) place->is_told = launcher->rank > 0;
    if (status == MS_ERROR_UNSUPPORTED) return status;
    if (status) return say_where(exchange, launcher, status);
    const ms_mpi_world *world = ms_mpi_found(exchange->mpi);
    place->rank = world->rank;
    place->ranks = world->size;
    ms_exchange_begin(&exchange->base);
    exchange->doubt_ns = context->os->monotonic_ns(context->os->user) + options->init_ns;
    exchange->base.limit_ns += place->rank ? MS_OTHERS_NS : MS_FIRST_NS;
    snprintf(place->library, sizeof place->library, "%s", world->library);
    if (world->size > MS_LOCAL_RANKS_MAX)
        return ms_fail(context, MS_ERROR_ARGUMENT, "%u ranks: 1 to %d are allowed", world->size,
                       MS_LOCAL_RANKS_MAX);
    exchange->base.wrong = check_world(exchange, launcher);
    return check_company(exchange, launcher);
}

ms_status ms_exchange_over_mpi(ms_context *context, const ms_cluster_options *options,
                               const ms_launcher *launcher, ms_cluster_place *place,
                               ms_exchange **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_mpi_exchange), "meeting", &memory);
    if (status) return status;
    ms_mpi_exchange *exchange = memory;
    exchange->base = (ms_exchange){ .context = context,
                                    .options = options,
                                    .place = place,
                                    .send = send,
                                    .receive = receive,
                                    .end = end };
    exchange->is_other = launcher->local_rank != MS_UNKNOWN && launcher->local_rank > 0;
    status = begin(exchange, launcher);
    if (!status) *out = &exchange->base;
    return status;
}
