/* agent.c: a keeper begins, finds the others, and ends. */
#include "comm/control/cluster/coordinator.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/control/cluster/listen.h"
#include "comm/control/cluster/local_ranks.h"
#include "comm/control/cluster/peers.h"
#include "comm/control/cluster/rank_copies.h"
#include "comm/control/cluster/starter_link.h"
#include "comm/control/shm/bell.h"
#include "comm/control/shm/files.h"
#include "comm/control/shm/hang_report.h"
#include "comm/control/shm/liveness.h"

#define MS_LOOK_NS ((uint64_t)5 * 1000000) /* how often a wait for other hosts looks */
#define MS_BEAT_MOST_NS ((uint64_t)1000000000)
/* For what the ranks of other hosts have left, before a report is written. */
#define MS_SHOW_NS ((uint64_t)2 * 1000000000)
/* What a keeper waits for the others after its own ranks have ended. */
#define MS_GOODBYE_NS ((uint64_t)5 * 1000000000)

/* A sleep of which nothing wakes it. */
static void pause_for(uint64_t ns)
{
    ms_word never = 0;
    ms_futex_wait(&never, 0, ns);
}

/* ---------------------------------------------------- this process' own mirror */

/* What the supervisor writes (a rank has gone) is told as what ranks write. */
static void tell(ms_mirror *mirror, const void *address, size_t bytes)
{
    ms_keeper *keeper = (ms_keeper *)mirror;
    ms_keeper_tell(keeper, (uint64_t)((const char *)address - (char *)keeper->control), address,
                   bytes);
}

/* Wakes the looker. Only a store and a system call: signal handlers come here. */
static void stir(ms_mirror *mirror)
{
    ms_keeper *keeper = (ms_keeper *)mirror;
    atomic_fetch_add(&keeper->stirred, 1);
    ms_futex_wake(&keeper->stirred, 1);
}

/* The keeper outlives its files' record. */
static void no_close(ms_mirror *mirror) { (void)mirror; }

/* ------------------------------------------------------------------- opening */

/* A name that no other job has. It is no file, since a keeper that is killed could not remove it.
 */
static ms_status open_door(ms_keeper *keeper)
{
    const ms_os *os = keeper->os;
    uint64_t name = 0;
    int error = os->entropy(os->user, &name, sizeof name);
    snprintf(keeper->door_path, sizeof keeper->door_path, "@moonshard-%016" PRIx64, name);
    if (!error) error = os->socket_listen(os->user, keeper->door_path, &keeper->door);
    if (!error) return MS_OK;
    return ms_fail_os(keeper->context, error, "a keeper cannot open its door at",
                      keeper->door_path);
}

/* Where the other keepers come. */
static ms_status open_port(ms_keeper *keeper, ms_keeper_options *options)
{
    ms_porter_options port = { .kind = MS_PORT_KEEPER,
                               .awaits = MS_FRAME_HELLO,
                               .awaited = keeper->hosts - 1 };
    ms_status status =
        ms_reach_open(keeper->context, options->names[0], &options->reach, &port.listener);
    if (status) return status;
    memcpy(port.token, keeper->token, MS_TOKEN_BYTES);
    snprintf(port.place, sizeof port.place, "port %u of host %s", options->reach.port,
             options->names[0]);
    return ms_porter_open(keeper->context, &port, &keeper->porter);
}

/* The record and the files, without connections. */
static ms_status make(ms_context *context, const ms_keeper_options *options, ms_keeper **out)
{
    void *memory = NULL, *shown = NULL;
    uint32_t ranks = options->rendezvous.ranks;
    ms_rendezvous *files = NULL;
    ms_layout layout = { .hosts = options->hosts,
                         .here = options->host,
                         .host_of = options->host_of,
                         .names = options->names };
    ms_status status = ms_allocate(context, sizeof(ms_keeper), "keeper", &memory);
    if (!status) status = ms_allocate(context, ranks * sizeof(ms_shown), "keeper", &shown);
    if (!status) status = ms_host_files_new_among(context, &options->rendezvous, &layout, &files);
    if (status) {
        ms_release(context, shown);
        ms_release(context, memory);
        return status;
    }
    ms_keeper *keeper = memory;
    keeper->mirror = (ms_mirror){ .tell = tell, .stir = stir, .close = no_close };
    keeper->context = context;
    keeper->os = context->os;
    keeper->files = ms_host_files_of(files);
    keeper->control = keeper->files->control;
    keeper->host = options->host;
    keeper->hosts = options->hosts;
    keeper->ranks = ranks;
    keeper->lost_ns = options->lost_ns;
    keeper->init_ns = options->init_ns;
    keeper->beat_ns =
        options->lost_ns / 5 < MS_BEAT_MOST_NS ? options->lost_ns / 5 : MS_BEAT_MOST_NS;
    keeper->shown = shown;
    memcpy(keeper->token, options->token, MS_TOKEN_BYTES);
    for (uint32_t h = 0; h < keeper->hosts; h++)
        keeper->peers[h] = (ms_peer){ .keeper = keeper, .host = h };
    files->kind = &ms_rendezvous_hosts;
    atomic_store(&files->references, 1);
    keeper->files->mirror = &keeper->mirror;
    ms_host_judge(files);
    *out = keeper;
    return MS_OK;
}

/* The keeper's claim on the control file ends with its process, so its ranks see that it lives. */
ms_status ms_keeper_open(ms_context *context, ms_keeper_options *options, ms_keeper **out)
{
    ms_keeper *keeper = NULL;
    ms_status status = make(context, options, &keeper);
    if (status) return status;
    const ms_os *os = keeper->os;
    status = open_door(keeper);
    if (!status && keeper->host == 0 && keeper->hosts > 1) status = open_port(keeper, options);
    keeper->port = options->reach.port;
    if (!status && options->alone
        && os->shared_claim(os->user, keeper->files->control_file, keeper->ranks) == 0)
        atomic_store(&keeper->control->kept, 1);
    if (status) ms_keeper_close(keeper);
    else *out = keeper;
    return status;
}

const char *ms_keeper_door(const ms_keeper *keeper) { return keeper->door_path; }
ms_rendezvous *ms_keeper_rendezvous(const ms_keeper *keeper) { return &keeper->files->base; }
/* Known since the rank came to the door. */
int64_t ms_keeper_process(const ms_keeper *keeper, uint32_t rank)
{
    return ms_host_is_here(keeper->control, rank) ? keeper->visitors[rank].process : -1;
}

/* ------------------------------------------------------------ the first keeper */

/* Why this visitor, which has the token, is not admitted, or NULL. */
static const char *refusal_of(const ms_keeper *keeper, const ms_guest *guest)
{
    const ms_hello_body *hello = &guest->body.hello;
    if (strncmp(hello->version, ms_version(), sizeof hello->version) != 0
        || hello->control_bytes != keeper->control->control_bytes)
        return "this host has another version of Moonshard: install the same one on all hosts";
    if (hello->hosts != keeper->hosts || hello->ranks != keeper->ranks || hello->host == 0
        || hello->host >= keeper->hosts || hello->host != guest->number)
        return "it counts other hosts or ranks than the first host does";
    return keeper->peers[hello->host].socket ? "its host is taken" : NULL;
}

/* Names the hosts that have not come. */
static ms_status fail_missing(const ms_keeper *keeper)
{
    char missing[400] = "";
    size_t used = 0;
    for (uint32_t h = 1; h < keeper->hosts && used < sizeof missing; h++)
        if (!keeper->peers[h].socket)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%s",
                                     used ? ", " : "", keeper->control->host_names[h]);
    return ms_fail(keeper->context, MS_ERROR_TIMEOUT,
                   "these hosts have not reached port %u of host %s in %.0f s: %s; is a firewall "
                   "between them, or is another network the right one (--interface)?",
                   keeper->port, keeper->control->host_names[0], (double)keeper->init_ns / 1e9,
                   missing);
}

/* The port is given back once all have come. */
static ms_status gather_hosts(ms_keeper *keeper)
{
    uint64_t limit = ms_keeper_now(keeper) + keeper->init_ns;
    for (uint32_t arrived = 1; arrived < keeper->hosts;) {
        ms_guest guest;
        ms_status status = ms_keeper_check_starter(keeper);
        if (status) return status;
        if (ms_keeper_now(keeper) >= limit) return fail_missing(keeper);
        int error = ms_porter_next(keeper->porter, MS_KEEPER_TURN_NS, &guest);
        if (error == -ETIMEDOUT) continue;
        if (error) return ms_fail_os(keeper->context, error, "cannot accept other hosts", NULL);
        if (!ms_porter_answer(keeper->porter, &guest, refusal_of(keeper, &guest))) continue;
        keeper->peers[guest.number].socket = guest.socket;
        arrived++;
    }
    ms_porter_close(keeper->porter);
    keeper->porter = NULL;
    return MS_OK;
}

/* ------------------------------------------------------------------ the others */

static ms_status connect_to_first(ms_keeper *keeper, const ms_keeper_options *options)
{
    const ms_reach *reach = &options->reach;
    int error = ms_reach_connect(keeper->os, reach, keeper->init_ns, &keeper->peers[0].socket);
    if (!error) return MS_OK;
    return ms_fail(keeper->context, MS_ERROR_TIMEOUT,
                   "host %s does not reach port %u of host %s (at %s%s): %s; is a firewall between "
                   "them, or is another network the right one (--interface)?",
                   options->names[keeper->host], reach->port, options->names[0],
                   reach->address_count ? reach->addresses[0] : "no address",
                   reach->address_count > 1 ? " and others" : "", strerror(-error));
}

/* What an error of the connection to the first keeper means while hosts meet. */
static ms_status fail_unheard(const ms_keeper *keeper, int error)
{
    const char *first = keeper->control->host_names[0],
               *own = keeper->control->host_names[keeper->host];
    if (error == -ECONNRESET || error == -EPIPE)
        return ms_fail(keeper->context, MS_ERROR_ABORTED,
                       "host %s has closed the connection of host %s: it has given up, or it does "
                       "not know this job's token",
                       first, own);
    return ms_fail(keeper->context, MS_ERROR_TIMEOUT, "no answer of the keeper of host %s: %s",
                   first, error ? strerror(-error) : "it is no keeper of this version");
}

/* Receives the frame of this kind, or the first keeper's refusal. */
static ms_status expect(ms_keeper *keeper, ms_frame_kind kind)
{
    char body[MS_FRAME_BODY_MOST];
    ms_frame_head head;
    int error =
        ms_keeper_receive(keeper->os, keeper->peers[0].socket, keeper->init_ns, &head, body);
    if (!error && head.kind == kind) return MS_OK;
    if (!error && head.kind == MS_FRAME_REFUSED)
        return ms_fail(keeper->context, MS_ERROR_ARGUMENT, "host %s is refused by host %s: %s",
                       keeper->control->host_names[keeper->host], keeper->control->host_names[0],
                       body);
    return fail_unheard(keeper, error);
}

/* Where the other side does not prove itself, nothing of the job is said to it. */
static ms_status prove(ms_keeper *keeper)
{
    const char *first = keeper->control->host_names[0],
               *own = keeper->control->host_names[keeper->host];
    int error = ms_proof_visit(keeper->os, keeper->peers[0].socket, MS_PORT_KEEPER, keeper->host,
                               keeper->token, keeper->init_ns);
    if (!error) return MS_OK;
    if (error == -EACCES || error == -EPROTO)
        return ms_fail(keeper->context, MS_ERROR_ABORTED,
                       "port %u of host %s has not proven to host %s that it has this job's token: "
                       "another program has that port (--port)",
                       keeper->port, first, own);
    return fail_unheard(keeper, error);
}

/* The hello, and its answer. */
static ms_status say_hello(ms_keeper *keeper)
{
    const ms_os *os = keeper->os;
    struct {
        ms_frame_head head;
        ms_hello_body body;
    } hello;
    memset(&hello, 0, sizeof hello);
    hello.head = (ms_frame_head){ .magic = MS_FRAME_MAGIC,
                                  .kind = MS_FRAME_HELLO,
                                  .host = (uint16_t)keeper->host,
                                  .bytes = sizeof hello.body };
    snprintf(hello.body.version, sizeof hello.body.version, "%s", ms_version());
    hello.body.host = keeper->host;
    hello.body.hosts = keeper->hosts;
    hello.body.ranks = keeper->ranks;
    hello.body.control_bytes = keeper->control->control_bytes;
    ms_file *socket = keeper->peers[0].socket;
    int error = os->tcp_send(os->user, socket, &hello.head, sizeof hello.head, keeper->init_ns);
    if (!error)
        error = os->tcp_send(os->user, socket, &hello.body, sizeof hello.body, keeper->init_ns);
    if (error) return ms_fail_os(keeper->context, error, "cannot speak to the first host", NULL);
    return expect(keeper, MS_FRAME_WELCOME);
}

/* --------------------------------------------------------------------- threads */

/* Looks at the control file when it is stirred, and now and then by itself; gives signs of life. */
static void look_around(void *argument)
{
    ms_keeper *keeper = argument;
    while (!atomic_load(&keeper->closing)) {
        uint32_t seen = atomic_load(&keeper->stirred);
        uint64_t now = ms_keeper_now(keeper);
        bool beat = now - keeper->told_ns >= keeper->beat_ns;
        ms_keeper_look(keeper);
        ms_keeper_show(keeper, beat);
        if (beat) {
            keeper->told_ns = now;
            if (keeper->host) ms_keeper_send(keeper, 0, MS_FRAME_BEAT, NULL, 0);
            else ms_keeper_spread(keeper, 0, MS_FRAME_BEAT, NULL, 0);
        }
        ms_futex_wait(&keeper->stirred, seen,
                      keeper->beat_ns < MS_KEEPER_TURN_NS ? keeper->beat_ns : MS_KEEPER_TURN_NS);
    }
}

/* Peers first: from now on frames are heard. */
static ms_status start_threads(ms_keeper *keeper)
{
    const ms_os *os = keeper->os;
    int error = 0;
    for (uint32_t h = 0; h < keeper->hosts && !error; h++)
        if (keeper->peers[h].socket)
            error = os->thread_start(os->user, "peer", ms_keeper_listen, &keeper->peers[h],
                                     &keeper->peers[h].thread);
    if (!error) error = os->thread_start(os->user, "keeper", look_around, keeper, &keeper->looker);
    return error ? ms_fail_os(keeper->context, error, "no thread for a keeper", NULL) : MS_OK;
}

/* Hosts first, then ranks: a rank that has come in finds all hosts there. */
ms_status ms_keeper_gather(ms_keeper *keeper, const ms_keeper_options *options)
{
    ms_status status = MS_OK;
    if (keeper->hosts > 1 && keeper->host == 0) {
        status = gather_hosts(keeper);
        if (!status) ms_keeper_spread(keeper, 0, MS_FRAME_READY, NULL, 0);
    } else if (keeper->hosts > 1) {
        status = connect_to_first(keeper, options);
        if (!status) status = prove(keeper);
        if (!status) status = say_hello(keeper);
        if (!status) status = expect(keeper, MS_FRAME_READY);
    }
    if (!status) status = start_threads(keeper);
    return status ? status : ms_keeper_admit(keeper);
}

/* ------------------------------------------------------------------------ ending */

/* Whether all others have said goodbye, or are lost. */
static bool all_gone(const ms_keeper *keeper)
{
    for (uint32_t h = 0; h < keeper->hosts; h++)
        if (keeper->peers[h].socket && !atomic_load(&keeper->peers[h].gone)) return false;
    return true;
}

/* Another host may still work when this one's ranks have ended in order, so the first keeper waits
 * for it without a limit: its signs of life are the limit. After the end of the job hosts need only
 * a moment. */
void ms_keeper_finish(ms_keeper *keeper)
{
    uint64_t since = 0;
    if (keeper->hosts == 1) return;
    ms_keeper_look(keeper);
    if (ms_host_ended(keeper->control)) ms_keeper_show_flights(keeper);
    else ms_keeper_show(keeper, true);
    if (keeper->host) ms_keeper_send(keeper, 0, MS_FRAME_BYE, NULL, 0);
    while (!all_gone(keeper)) {
        uint64_t now = ms_keeper_now(keeper);
        if (!since && (keeper->host || ms_host_ended(keeper->control))) since = now;
        if (since && now - since >= MS_GOODBYE_NS) return;
        pause_for(MS_LOOK_NS);
    }
}

uint32_t ms_keeper_host_of(const ms_keeper *keeper, uint32_t rank)
{
    return keeper->control->host_of[rank];
}
const char *ms_keeper_host_name(const ms_keeper *keeper, uint32_t host)
{
    return keeper->control->host_names[host];
}
uint32_t ms_keeper_hosts(const ms_keeper *keeper) { return keeper->hosts; }
uint32_t ms_keeper_host(const ms_keeper *keeper) { return keeper->host; }

bool ms_keeper_reports(const ms_keeper *keeper)
{
    return keeper->host == 0 || atomic_load(&keeper->orphaned);
}

/* Whether all others have told what their ranks have left, or cannot any more. */
static bool all_shown(ms_keeper *keeper)
{
    for (uint32_t h = 1; h < keeper->hosts; h++)
        if (!atomic_load(&keeper->peers[h].shown) && !atomic_load(&keeper->peers[h].gone))
            return false;
    return true;
}

/* Without the end of the job there is no report, and other hosts may still work. */
void ms_keeper_show_end(ms_keeper *keeper)
{
    if (keeper->hosts == 1) return;
    ms_keeper_show_flights(keeper);
    if (keeper->host) {
        ms_keeper_send(keeper, 0, MS_FRAME_SHOWN, NULL, 0);
        return;
    }
    uint64_t limit = ms_keeper_now(keeper) + MS_SHOW_NS;
    while (ms_host_ended(keeper->control) && !all_shown(keeper) && ms_keeper_now(keeper) < limit)
        pause_for(MS_LOOK_NS);
}

/* Ranks of this host see the word, those of others its copy. */
void ms_keeper_reported(ms_keeper *keeper)
{
    ms_word *word = &keeper->control->reported;
    atomic_store(word, 1);
    ms_futex_wake_shared(word, UINT32_MAX);
    if (keeper->hosts > 1) tell(&keeper->mirror, word, sizeof *word);
}

/* A copy is stored without a wake of its futex, so the word is read every few ms. Without a keeper
 * no report comes. */
void ms_hosts_await_report(ms_rendezvous *rendezvous, uint64_t timeout_ns)
{
    const ms_os *os = rendezvous->os;
    const ms_host_files *files = ms_host_files_of(rendezvous);
    ms_word *word = &files->control->reported;
    uint64_t limit = os->monotonic_ns(os->user) + timeout_ns;
    while (!atomic_load(word) && os->monotonic_ns(os->user) < limit && !ms_death_of_keeper(files))
        ms_futex_wait_shared(word, 0, MS_LOOK_NS);
}

/* A thread that has not been started has no record. */
static void join(const ms_os *os, ms_os_thread **thread)
{
    if (*thread) os->thread_join(os->user, *thread);
    *thread = NULL;
}

/* Also of a keeper that was opened in part. Threads that wait for the network come back when its
 * connections are ended. */
void ms_keeper_close(ms_keeper *keeper)
{
    const ms_os *os = keeper->os;
    atomic_store(&keeper->closing, 1);
    stir(&keeper->mirror);
    for (uint32_t h = 0; h < keeper->hosts; h++)
        if (keeper->peers[h].socket) os->socket_end(os->user, keeper->peers[h].socket);
    ms_keeper_close_starter(keeper);
    join(os, &keeper->looker);
    for (uint32_t h = 0; h < keeper->hosts; h++) join(os, &keeper->peers[h].thread);
    for (uint32_t r = 0; r < keeper->ranks; r++) join(os, &keeper->visitors[r].thread);
    for (uint32_t h = 0; h < keeper->hosts; h++)
        if (keeper->peers[h].socket) os->close(os->user, keeper->peers[h].socket);
    for (uint32_t r = 0; r < keeper->ranks; r++)
        if (keeper->visitors[r].socket) os->close(os->user, keeper->visitors[r].socket);
    ms_porter_close(keeper->porter);
    ms_keeper_close_door(keeper);
    ms_context *context = keeper->context;
    os->release(os->user, keeper->still.stands);
    os->release(os->user, keeper->still.marks);
    ms_rendezvous_release(&keeper->files->base);
    ms_release(context, keeper->shown);
    ms_release(context, keeper);
}
