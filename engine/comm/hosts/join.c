/* join.c: how processes that an MPI launcher started become the ranks of a job: they tell rank 0
 * which host each is on, rank 0 tells all, and each host gets a keeper. All this goes by messages
 * of MPI; what comes later between keepers does not.
 *
 * Every message of the meeting says whether its sender has failed, so that all processes end with
 * one error: rank 0's where rank 0 knows it, otherwise that of the host's first rank. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "comm/hosts/keeper.h"
#include "comm/hosts/launcher.h"
#include "comm/hosts/serve.h"
#include "comm/mpi/load.h"
#include "comm/mpi/poster.h"

#define MS_AGREE_BYTES 4096
#define MS_TAG_MEETING 0
/* All ranks come to MPI_Finalize at the same time (door.c). That of MPICH has been seen to hang
 * over TCP then. */
#define MS_FINALIZE_NS ((uint64_t)10 * 1000000000)

/* What each rank tells rank 0. */
typedef struct ms_card {
    uint32_t failed;
    char why[MS_ERROR_MESSAGE_BYTES];
    ms_host_id host;
    char version[16];
    char agree[MS_AGREE_BYTES];
} ms_card;

/* What rank 0 tells each, and the first rank of a host its others. options.host is filled by the
 * one who reads it. */
typedef struct ms_plan {
    uint32_t failed; /* ms_status */
    char why[MS_ERROR_MESSAGE_BYTES];
    char door[108];
    ms_keeper_options options;
} ms_plan;

/* A rank's meeting. It is not freed after a failure: MPI may still use it. */
typedef struct ms_meeting {
    ms_context *context;
    const ms_hosts_options *options;
    ms_hosts_place *place;
    ms_mpi *mpi;
    ms_file *keeper;
    ms_word news; /* of messages, until the rank has a line */
    _Atomic(ms_rank_line *) line;
    ms_mpi_message message;
    ms_card card;
    ms_plan plan;
    ms_served served;
    ms_host_id hosts[MS_LOCAL_RANKS_MAX]; /* rank 0's: of the hosts found so far */
} ms_meeting;

/* ------------------------------------------------------------------- messages */

/* On the thread of MPI. */
static void hear_news(void *user)
{
    ms_meeting *meeting = user;
    ms_rank_line *line = atomic_load(&meeting->line);
    atomic_fetch_add(&meeting->news, 1);
    ms_futex_wake(&meeting->news, 1);
    if (line) ms_host_wake_line(line);
}

/* One message, to its end. */
static ms_status pass(ms_meeting *meeting, bool sends, uint32_t peer, void *memory, size_t bytes)
{
    const ms_os *os = meeting->context->os;
    ms_mpi_message *message = &meeting->message;
    *message = (ms_mpi_message){
        .memory = memory, .bytes = bytes, .peer = peer, .tag = MS_TAG_MEETING, .sends = sends
    };
    uint64_t limit = os->monotonic_ns(os->user) + meeting->options->init_ns;
    ms_mpi_post(meeting->mpi, message);
    for (;;) {
        uint32_t seen = atomic_load(&meeting->news);
        ms_mpi_state state = ms_mpi_look(message);
        if (state == MS_MPI_FAILED)
            return ms_fail(meeting->context, MS_ERROR_IO, "a message of MPI has failed: %s",
                           message->why);
        if (state == MS_MPI_ENDED && (sends || message->moved == bytes)) return MS_OK;
        if (state == MS_MPI_ENDED)
            return ms_fail(meeting->context, MS_ERROR_MISMATCH,
                           "rank %u is of another version of Moonshard: install the same one on "
                           "all hosts",
                           peer);
        uint64_t now = os->monotonic_ns(os->user);
        if (now >= limit)
            return ms_fail(meeting->context, MS_ERROR_TIMEOUT,
                           "rank %u has not come to the meeting of the ranks in %.0f s", peer,
                           (double)meeting->options->init_ns / 1e9);
        ms_futex_wait(&meeting->news, seen, limit - now);
    }
}

/* ---------------------------------------------------------------------- rank 0 */

/* The first line in which two lists of "name=value" differ; both are cut to that line. */
static bool first_difference(const char *a, const char *b, char *line_a, char *line_b, size_t bytes)
{
    while (*a || *b) {
        size_t in_a = strcspn(a, "\n"), in_b = strcspn(b, "\n");
        if (in_a != in_b || memcmp(a, b, in_a) != 0) {
            snprintf(line_a, bytes, "%.*s", (int)in_a, a);
            snprintf(line_b, bytes, "%.*s", (int)in_b, b);
            return true;
        }
        a += in_a + (a[in_a] != '\0');
        b += in_b + (b[in_b] != '\0');
    }
    return false;
}

/* What a rank's card says that rank 0's does not; an error, or MS_OK. */
static ms_status compare(ms_meeting *meeting, const ms_card *card, uint32_t rank)
{
    char mine[200], theirs[200];
    const ms_card *own = &meeting->card;
    if (card->failed) return ms_fail(meeting->context, (ms_status)card->failed, "%s", card->why);
    if (strncmp(card->version, own->version, sizeof own->version) != 0)
        return ms_fail(meeting->context, MS_ERROR_MISMATCH,
                       "rank %u on host %s runs Moonshard %.15s, rank 0 on host %s runs %s: "
                       "install the same version on all hosts",
                       rank, card->host.name, card->version, own->host.name, own->version);
    if (!first_difference(own->agree, card->agree, mine, theirs, sizeof mine)) return MS_OK;
    return ms_fail(meeting->context, MS_ERROR_MISMATCH,
                   "the ranks were started differently:\n  rank 0 on host %s: %s\n  rank %u on "
                   "host %s: %s",
                   own->host.name, *mine ? mine : "(nothing)", rank, card->host.name,
                   *theirs ? theirs : "(nothing)");
}

/* Hosts are numbered in the order of their first ranks. */
static ms_status note_host(ms_meeting *meeting, const ms_card *card, uint32_t rank)
{
    ms_keeper_options *options = &meeting->plan.options;
    uint32_t h = 0;
    while (h < options->hosts
           && strncmp(meeting->hosts[h].identity, card->host.identity, sizeof card->host.identity)
                  != 0)
        h++;
    if (h == options->hosts) {
        meeting->hosts[h] = card->host;
        memcpy(options->names[h], card->host.name, sizeof options->names[h] - 1);
        options->hosts++;
    }
    options->host_of[rank] = (uint16_t)h;
    return MS_OK;
}

/* Hears all ranks, also after one that differs: each of them waits for the plan. */
static ms_status hear_all(ms_meeting *meeting)
{
    ms_context *context = meeting->context;
    ms_error first = { .status = MS_OK };
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_card), "meeting", &memory);
    if (status) return status;
    note_host(meeting, &meeting->card, 0);
    for (uint32_t r = 1; r < meeting->place->ranks; r++) {
        ms_card *card = memory;
        /* The memory stays: MPI may still use it. */
        status = pass(meeting, false, r, card, sizeof *card);
        if (status) return status;
        card->why[sizeof card->why - 1] = card->agree[sizeof card->agree - 1] = '\0';
        card->host.name[sizeof card->host.name - 1] = '\0';
        card->version[sizeof card->version - 1] = '\0';
        if (compare(meeting, card, r) && !first.status) first = context->error;
        note_host(meeting, card, r);
    }
    ms_release(context, memory);
    if (first.status) context->error = first;
    return first.status;
}

/* The options of all keepers; the first of them is opened now, so that its port is known. */
static ms_status make_plan(ms_meeting *meeting)
{
    ms_context *context = meeting->context;
    ms_keeper_options *options = &meeting->plan.options;
    const ms_hosts_options *wishes = meeting->options;
    options->rendezvous = wishes->rendezvous;
    options->rendezvous.ranks = meeting->place->ranks;
    options->init_ns = wishes->init_ns;
    options->lost_ns = wishes->lost_ns;
    options->reach.port = wishes->port;
    options->alone = true;
    if (wishes->interface)
        snprintf(options->reach.interface, sizeof options->reach.interface, "%s",
                 wishes->interface);
    ms_status status = hear_all(meeting);
    if (status) return status;
    int error = context->os->entropy(context->os->user, options->token, sizeof options->token);
    if (error) return ms_fail_os(context, error, "cannot make a job's token", NULL);
    status = ms_served_ask(context, meeting->keeper, options, &meeting->served);
    if (status) return status;
    *options = meeting->served.options;
    memcpy(meeting->plan.door, meeting->served.door, sizeof meeting->plan.door);
    return MS_OK;
}

/* ------------------------------------------------------------------- each rank */

/* The own error, for the others. */
static void write_failure(ms_meeting *meeting, ms_status status, uint32_t *failed, char *why)
{
    *failed = status;
    if (status) snprintf(why, MS_ERROR_MESSAGE_BYTES, "%s", meeting->context->error.message);
}

/* A failure that came in a message is reported by its sender. */
static ms_status read_failure(ms_meeting *meeting, ms_plan *plan)
{
    plan->why[sizeof plan->why - 1] = '\0';
    if (!plan->failed) return MS_OK;
    meeting->place->is_told = true;
    return ms_fail(meeting->context, (ms_status)plan->failed, "%s", plan->why);
}

/* Tells all ranks the plan, or why there is none; or hears it. */
static ms_status share_plan(ms_meeting *meeting)
{
    ms_plan *plan = &meeting->plan;
    const ms_hosts_place *place = meeting->place;
    ms_status status = MS_OK;
    if (place->rank) {
        status = pass(meeting, true, 0, &meeting->card, sizeof meeting->card);
        if (!status) status = pass(meeting, false, 0, plan, sizeof *plan);
        return status ? status : read_failure(meeting, plan);
    }
    status = make_plan(meeting);
    write_failure(meeting, status, &plan->failed, plan->why);
    ms_error error = meeting->context->error;
    for (uint32_t r = 1; r < place->ranks; r++) {
        ms_status sent = pass(meeting, true, r, plan, sizeof *plan);
        if (!status) status = sent;
    }
    if (plan->failed) meeting->context->error = error;
    return status;
}

/* The first rank of this host makes its forked process the keeper, unless rank 0 has done so, and
 * tells the host's other ranks where the door is. */
static ms_status share_door(ms_meeting *meeting)
{
    ms_plan *plan = &meeting->plan;
    ms_keeper_options *options = &plan->options;
    const ms_hosts_place *place = meeting->place;
    uint32_t host = options->host_of[place->rank], first = 0;
    while (options->host_of[first] != host) first++;
    options->host = host;
    if (first != place->rank) {
        ms_status status = pass(meeting, false, first, plan, sizeof *plan);
        return status ? status : read_failure(meeting, plan);
    }
    ms_status status = MS_OK;
    if (host > 0) {
        status = ms_served_ask(meeting->context, meeting->keeper, options, &meeting->served);
        memcpy(plan->door, meeting->served.door, sizeof plan->door);
    }
    write_failure(meeting, status, &plan->failed, plan->why);
    ms_error error = meeting->context->error;
    for (uint32_t r = first + 1; r < place->ranks; r++)
        if (options->host_of[r] == host) {
            ms_status sent = pass(meeting, true, r, plan, sizeof *plan);
            if (!status) status = sent;
        }
    if (plan->failed) meeting->context->error = error;
    return status;
}

/* Where the door closes, the rank that forked the keeper knows why, and the others say nothing. */
static ms_status enter(ms_meeting *meeting)
{
    ms_hosts_place *place = meeting->place;
    const ms_keeper_options *options = &meeting->plan.options;
    uint32_t first = 0;
    while (options->host_of[first] != options->host) first++;
    ms_status status = ms_hosts_enter(meeting->context, meeting->plan.door, place->rank,
                                      place->ranks, 2 * options->init_ns, &place->rendezvous);
    if (status && first == place->rank)
        return ms_served_why(meeting->context, meeting->keeper, status);
    if (status) {
        place->is_told = true;
        return status;
    }
    /* A process that is not needed ends now. */
    meeting->context->os->close(meeting->context->os->user, meeting->keeper);
    ms_host_files *files = ms_host_files_of(place->rendezvous);
    files->mpi = meeting->mpi;
    atomic_store(&meeting->line, &files->control->lines[place->rank]);
    place->hosts = options->hosts;
    snprintf(place->host, sizeof place->host, "%s", options->names[options->host]);
    return MS_OK;
}

/* ------------------------------------------------------------------------- MPI */

/* The module for the MPI that started this process. Slurm's own start does not say which one is
 * meant. */
static const char *module_of(ms_launcher_kind kind, const char *wish)
{
    if (wish && *wish) return wish;
    return kind == MS_LAUNCHER_PMI ? "mpich" : "openmpi";
}

/* MPI counts what the launcher counts, or the module belongs to another MPI. */
static ms_status check_world(ms_meeting *meeting, const ms_launcher *launcher)
{
    const ms_mpi_world *world = ms_mpi_found(meeting->mpi);
    const ms_hosts_place *place = meeting->place;
    if (world->size == 1 && launcher->size != MS_UNKNOWN && launcher->size > 1)
        return ms_fail(meeting->context, MS_ERROR_ARGUMENT,
                       "%s counts %u processes, but %s finds only this one: it is not the MPI "
                       "whose launcher started them; choose another module with "
                       "MOONSHARD_MPI=openmpi or mpich%s",
                       launcher->name, launcher->size, world->library,
                       launcher->kind == MS_LAUNCHER_SLURM
                           ? ", or start with srun --mpi=pmix or --mpi=pmi2"
                           : "");
    if (launcher->size != MS_UNKNOWN
        && (world->size != launcher->size || world->rank != launcher->rank))
        return ms_fail(meeting->context, MS_ERROR_ARGUMENT,
                       "%s says rank %u of %u, and %s says rank %u of %u: they belong to "
                       "different jobs",
                       launcher->name, launcher->rank, launcher->size, place->mpi, world->rank,
                       world->size);
    if (world->size <= MS_LOCAL_RANKS_MAX) return MS_OK;
    return ms_fail(meeting->context, MS_ERROR_ARGUMENT, "%u ranks: 1 to %d are allowed",
                   world->size, MS_LOCAL_RANKS_MAX);
}

/* Before the meeting each rank is alone with its error; the first process of each host reports. */
static ms_status begin_mpi(ms_meeting *meeting, const ms_launcher *launcher)
{
    char path[4096];
    const ms_hosts_options *options = meeting->options;
    ms_hosts_place *place = meeting->place;
    const ms_mpi_module *module = NULL;
    ms_mpi_options wishes = { .timeout_ns = options->init_ns,
                              .ending_ns = MS_FINALIZE_NS,
                              .crowded = true,
                              .news = hear_news,
                              .user = meeting };
    const char *name = module_of(launcher->kind, options->mpi);
    place->is_told =
        launcher->local_rank != MS_UNKNOWN ? launcher->local_rank > 0 : launcher->rank > 0;
    snprintf(place->mpi, sizeof place->mpi, "%s", name);
    snprintf(path, sizeof path, "%s/libmoonshard_mpi_%s.so", options->modules, name);
    ms_status status = ms_mpi_load(meeting->context, path, &module);
    if (!status) status = ms_mpi_open(meeting->context, module, &wishes, &meeting->mpi);
    if (status) return status;
    const ms_mpi_world *world = ms_mpi_found(meeting->mpi);
    place->rank = world->rank;
    place->ranks = world->size;
    snprintf(place->library, sizeof place->library, "%s", world->library);
    return check_world(meeting, launcher);
}

/* This rank's card. What it finds wrong itself goes to rank 0 with it. */
static void write_card(ms_meeting *meeting)
{
    ms_context *context = meeting->context;
    ms_card *card = &meeting->card;
    const char *agree = meeting->options->agree ? meeting->options->agree : "";
    int error = context->os->host(context->os->user, &card->host);
    ms_status status = MS_OK;
    if (error) status = ms_fail_os(context, error, "cannot tell this host from others", NULL);
    else if (strlen(agree) >= MS_AGREE_BYTES)
        status = ms_fail(context, MS_ERROR_ARGUMENT,
                         "the options of this run have more than %d bytes", MS_AGREE_BYTES - 1);
    snprintf(card->version, sizeof card->version, "%s", MS_VERSION);
    snprintf(card->agree, sizeof card->agree, "%s", agree);
    write_failure(meeting, status, &card->failed, card->why);
}

ms_status ms_hosts_launched(ms_context *context, ms_launched *out)
{
    ms_launcher launcher;
    memset(out, 0, sizeof *out);
    ms_status status = ms_launcher_find(context, &launcher);
    if (status || launcher.kind == MS_LAUNCHER_NONE || launcher.size == 1) return status;
    snprintf(out->name, sizeof out->name, "%s", launcher.name);
    out->rank = launcher.rank;
    out->size = launcher.size == MS_UNKNOWN ? 0 : launcher.size;
    out->local_rank = launcher.local_rank == MS_UNKNOWN ? out->size : launcher.local_rank;
    out->has_mpi = launcher.kind != MS_LAUNCHER_TORCHRUN;
    return MS_OK;
}

ms_status ms_hosts_join(ms_context *context, const ms_hosts_options *options, ms_hosts_place *out)
{
    ms_launcher launcher;
    void *memory = NULL;
    memset(out, 0, sizeof *out);
    ms_status status = ms_launcher_find(context, &launcher);
    if (!status) status = ms_allocate(context, sizeof(ms_meeting), "meeting", &memory);
    if (status) return status;
    ms_meeting *meeting = memory;
    meeting->context = context;
    meeting->options = options;
    meeting->place = out;
    int error = context->os->shared_adopt(context->os->user, options->keeper, &meeting->keeper);
    if (error) return ms_fail_os(context, error, "cannot speak to the keeper to be", NULL);
    status = begin_mpi(meeting, &launcher);
    if (status) return status;
    out->is_told = false;
    write_card(meeting);
    status = share_plan(meeting);
    if (!status) status = share_door(meeting);
    return status ? status : enter(meeting);
}
