/* agent.c: an agent begins, finds the others, and ends. */
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

#define MS_LOOK_NS ((uint64_t)5 * 1000000) /* how often a wait for other nodes looks */
#define MS_BEAT_MOST_NS ((uint64_t)1000000000)
/* For what the ranks of other nodes have left, before a report is written. */
#define MS_SHOW_NS ((uint64_t)2 * 1000000000)
/* What an agent waits for the others after its own ranks have ended. */
#define MS_GOODBYE_NS ((uint64_t)5 * 1000000000)

/* A sleep of which nothing wakes it. */
static void pause_for(uint64_t ns)
{
    ms_word never = 0;
    ms_futex_wait(&never, 0, ns);
}

/* ---------------------------------------------------- this process' own replication */

/* What the supervisor writes (a rank has gone) is told as what ranks write. */
static void tell(ms_replication *replication, const void *address, size_t bytes)
{
    ms_agent *agent = (ms_agent *)replication;
    ms_agent_tell(agent, (uint64_t)((const char *)address - (char *)agent->control), address,
                  bytes);
}

/* Wakes the looker. Only a store and a system call: signal handlers come here. */
static void stir(ms_replication *replication)
{
    ms_agent *agent = (ms_agent *)replication;
    atomic_fetch_add(&agent->stirred, 1);
    ms_futex_wake(&agent->stirred, 1);
}

/* The agent outlives its files' record. */
static void no_close(ms_replication *replication) { (void)replication; }

/* ------------------------------------------------------------------- opening */

/* A name that no other job has. It is no file, since an agent that is killed could not remove it.
 */
static ms_status open_local_socket(ms_agent *agent)
{
    const ms_os *os = agent->os;
    uint64_t name = 0;
    int error = os->entropy(os->user, &name, sizeof name);
    snprintf(agent->socket_path, sizeof agent->socket_path, "@moonshard-%016" PRIx64, name);
    if (!error) error = os->socket_listen(os->user, agent->socket_path, &agent->local_socket);
    if (!error) return MS_OK;
    return ms_fail_os(agent->context, error, "a keeper cannot open its door at",
                      agent->socket_path);
}

/* Where the other agents come. */
static ms_status open_port(ms_agent *agent, ms_agent_options *options)
{
    ms_acceptor_options port = { .kind = MS_PORT_AGENT,
                                 .awaits = MS_FRAME_HELLO,
                                 .awaited = agent->nodes - 1 };
    ms_status status =
        ms_endpoint_listen(agent->context, options->names[0], &options->endpoint, &port.listener);
    if (status) return status;
    memcpy(port.token, agent->token, MS_TOKEN_BYTES);
    snprintf(port.place, sizeof port.place, "port %u of host %s", options->endpoint.port,
             options->names[0]);
    return ms_acceptor_open(agent->context, &port, &agent->acceptor);
}

/* The record and the files, without connections. */
static ms_status make(ms_context *context, const ms_agent_options *options, ms_agent **out)
{
    void *memory = NULL, *shown = NULL;
    uint32_t ranks = options->rendezvous.ranks;
    ms_rendezvous *files = NULL;
    ms_layout layout = { .nodes = options->nodes,
                         .here = options->node,
                         .node_of = options->node_of,
                         .names = options->names };
    ms_status status = ms_allocate(context, sizeof(ms_agent), "keeper", &memory);
    if (!status) status = ms_allocate(context, ranks * sizeof(ms_shown), "keeper", &shown);
    if (!status) status = ms_shm_files_new_among(context, &options->rendezvous, &layout, &files);
    if (status) {
        ms_release(context, shown);
        ms_release(context, memory);
        return status;
    }
    ms_agent *agent = memory;
    agent->replication = (ms_replication){ .tell = tell, .stir = stir, .close = no_close };
    agent->context = context;
    agent->os = context->os;
    agent->files = ms_shm_files_of(files);
    agent->control = agent->files->control;
    agent->node = options->node;
    agent->nodes = options->nodes;
    agent->ranks = ranks;
    agent->lost_ns = options->lost_ns;
    agent->init_ns = options->init_ns;
    agent->beat_ns =
        options->lost_ns / 5 < MS_BEAT_MOST_NS ? options->lost_ns / 5 : MS_BEAT_MOST_NS;
    agent->shown = shown;
    memcpy(agent->token, options->token, MS_TOKEN_BYTES);
    for (uint32_t h = 0; h < agent->nodes; h++)
        agent->peers[h] = (ms_peer){ .agent = agent, .node = h };
    files->kind = &ms_rendezvous_cluster;
    atomic_store(&files->references, 1);
    agent->files->replication = &agent->replication;
    ms_shm_judge(files);
    *out = agent;
    return MS_OK;
}

/* The agent's claim on the control file ends with its process, so its ranks see that it lives. */
ms_status ms_agent_open(ms_context *context, ms_agent_options *options, ms_agent **out)
{
    ms_agent *agent = NULL;
    ms_status status = make(context, options, &agent);
    if (status) return status;
    const ms_os *os = agent->os;
    status = open_local_socket(agent);
    if (!status && agent->node == 0 && agent->nodes > 1) status = open_port(agent, options);
    agent->port = options->endpoint.port;
    if (!status && options->alone
        && os->shared_claim(os->user, agent->files->control_file, agent->ranks) == 0)
        atomic_store(&agent->control->agent_claimed, 1);
    if (status) ms_agent_close(agent);
    else *out = agent;
    return status;
}

const char *ms_agent_socket_path(const ms_agent *agent) { return agent->socket_path; }
ms_rendezvous *ms_agent_rendezvous(const ms_agent *agent) { return &agent->files->base; }
/* Known since the rank connected at the local socket. */
int64_t ms_agent_process(const ms_agent *agent, uint32_t rank)
{
    return ms_shm_is_here(agent->control, rank) ? agent->connections[rank].process : -1;
}

/* ------------------------------------------------------------ the first agent */

/* Why an agent that has connected, and has the token, is not admitted; NULL: it is. */
static const char *refusal_of(const ms_agent *agent, const ms_accepted *accepted)
{
    const ms_hello_body *hello = &accepted->body.hello;
    if (strncmp(hello->version, ms_version(), sizeof hello->version) != 0
        || hello->control_bytes != agent->control->control_bytes)
        return "this host has another version of Moonshard: install the same one on all hosts";
    if (hello->nodes != agent->nodes || hello->ranks != agent->ranks || hello->node == 0
        || hello->node >= agent->nodes || hello->node != accepted->number)
        return "it counts other hosts or ranks than the first host does";
    return agent->peers[hello->node].socket ? "its host is taken" : NULL;
}

/* Names the nodes that have not come. */
static ms_status fail_missing(const ms_agent *agent)
{
    char missing[400] = "";
    size_t used = 0;
    for (uint32_t h = 1; h < agent->nodes && used < sizeof missing; h++)
        if (!agent->peers[h].socket)
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%s",
                                     used ? ", " : "", agent->control->node_names[h]);
    return ms_fail(agent->context, MS_ERROR_TIMEOUT,
                   "these hosts have not reached port %u of host %s in %.0f s: %s; is a firewall "
                   "between them, or is another network the right one (--interface)?",
                   agent->port, agent->control->node_names[0], (double)agent->init_ns / 1e9,
                   missing);
}

/* The port is given back once all have come. */
static ms_status gather_nodes(ms_agent *agent)
{
    uint64_t limit = ms_agent_now(agent) + agent->init_ns;
    for (uint32_t arrived = 1; arrived < agent->nodes;) {
        ms_accepted accepted;
        ms_status status = ms_agent_check_starter(agent);
        if (status) return status;
        if (ms_agent_now(agent) >= limit) return fail_missing(agent);
        int error = ms_acceptor_next(agent->acceptor, MS_AGENT_TURN_NS, &accepted);
        if (error == -ETIMEDOUT) continue;
        if (error) return ms_fail_os(agent->context, error, "cannot accept other hosts", NULL);
        if (!ms_acceptor_answer(agent->acceptor, &accepted, refusal_of(agent, &accepted))) continue;
        agent->peers[accepted.number].socket = accepted.socket;
        arrived++;
    }
    ms_acceptor_close(agent->acceptor);
    agent->acceptor = NULL;
    return MS_OK;
}

/* ------------------------------------------------------------------ the others */

static ms_status connect_to_first(ms_agent *agent, const ms_agent_options *options)
{
    const ms_endpoint *endpoint = &options->endpoint;
    int error = ms_endpoint_connect(agent->os, endpoint, agent->init_ns, &agent->peers[0].socket);
    if (!error) return MS_OK;
    return ms_fail(agent->context, MS_ERROR_TIMEOUT,
                   "host %s does not reach port %u of host %s (at %s%s): %s; is a firewall between "
                   "them, or is another network the right one (--interface)?",
                   options->names[agent->node], endpoint->port, options->names[0],
                   endpoint->address_count ? endpoint->addresses[0] : "no address",
                   endpoint->address_count > 1 ? " and others" : "", strerror(-error));
}

/* What an error of the connection to the first agent means while nodes meet. */
static ms_status fail_unheard(const ms_agent *agent, int error)
{
    const char *first = agent->control->node_names[0],
               *own = agent->control->node_names[agent->node];
    if (error == -ECONNRESET || error == -EPIPE)
        return ms_fail(agent->context, MS_ERROR_ABORTED,
                       "host %s has closed the connection of host %s: it has given up, or it does "
                       "not know this job's token",
                       first, own);
    return ms_fail(agent->context, MS_ERROR_TIMEOUT, "no answer of the keeper of host %s: %s",
                   first, error ? strerror(-error) : "it is no keeper of this version");
}

/* Receives the frame of this kind, or the first agent's refusal. */
static ms_status expect(ms_agent *agent, ms_frame_kind kind)
{
    char body[MS_FRAME_BODY_MOST];
    ms_frame_head head;
    int error = ms_agent_receive(agent->os, agent->peers[0].socket, agent->init_ns, &head, body);
    if (!error && head.kind == kind) return MS_OK;
    if (!error && head.kind == MS_FRAME_REFUSED)
        return ms_fail(agent->context, MS_ERROR_ARGUMENT, "host %s is refused by host %s: %s",
                       agent->control->node_names[agent->node], agent->control->node_names[0],
                       body);
    return fail_unheard(agent, error);
}

/* Where the other side does not prove itself, nothing of the job is said to it. */
static ms_status prove(ms_agent *agent)
{
    const char *first = agent->control->node_names[0],
               *own = agent->control->node_names[agent->node];
    int error = ms_proof_visit(agent->os, agent->peers[0].socket, MS_PORT_AGENT, agent->node,
                               agent->token, agent->init_ns);
    if (!error) return MS_OK;
    if (error == -EACCES || error == -EPROTO)
        return ms_fail(agent->context, MS_ERROR_ABORTED,
                       "port %u of host %s has not proven to host %s that it has this job's token: "
                       "another program has that port (--port)",
                       agent->port, first, own);
    return fail_unheard(agent, error);
}

/* The hello, and its answer. */
static ms_status say_hello(ms_agent *agent)
{
    const ms_os *os = agent->os;
    struct {
        ms_frame_head head;
        ms_hello_body body;
    } hello;
    memset(&hello, 0, sizeof hello);
    hello.head = (ms_frame_head){ .magic = MS_FRAME_MAGIC,
                                  .kind = MS_FRAME_HELLO,
                                  .node = (uint16_t)agent->node,
                                  .bytes = sizeof hello.body };
    snprintf(hello.body.version, sizeof hello.body.version, "%s", ms_version());
    hello.body.node = agent->node;
    hello.body.nodes = agent->nodes;
    hello.body.ranks = agent->ranks;
    hello.body.control_bytes = agent->control->control_bytes;
    ms_file *socket = agent->peers[0].socket;
    int error = os->tcp_send(os->user, socket, &hello.head, sizeof hello.head, agent->init_ns);
    if (!error)
        error = os->tcp_send(os->user, socket, &hello.body, sizeof hello.body, agent->init_ns);
    if (error) return ms_fail_os(agent->context, error, "cannot speak to the first host", NULL);
    return expect(agent, MS_FRAME_WELCOME);
}

/* --------------------------------------------------------------------- threads */

/* Looks at the control file when it is stirred, and now and then by itself; gives signs of life. */
static void look_around(void *argument)
{
    ms_agent *agent = argument;
    while (!atomic_load(&agent->closing)) {
        uint32_t seen = atomic_load(&agent->stirred);
        uint64_t now = ms_agent_now(agent);
        bool beat = now - agent->told_ns >= agent->beat_ns;
        ms_agent_look(agent);
        ms_agent_show(agent, beat);
        if (beat) {
            agent->told_ns = now;
            if (agent->node) ms_agent_send(agent, 0, MS_FRAME_BEAT, NULL, 0);
            else ms_agent_spread(agent, 0, MS_FRAME_BEAT, NULL, 0);
        }
        ms_futex_wait(&agent->stirred, seen,
                      agent->beat_ns < MS_AGENT_TURN_NS ? agent->beat_ns : MS_AGENT_TURN_NS);
    }
}

/* Peers first: from now on frames are heard. */
static ms_status start_threads(ms_agent *agent)
{
    const ms_os *os = agent->os;
    int error = 0;
    for (uint32_t h = 0; h < agent->nodes && !error; h++)
        if (agent->peers[h].socket)
            error = os->thread_start(os->user, "peer", ms_agent_listen, &agent->peers[h],
                                     &agent->peers[h].thread);
    if (!error) error = os->thread_start(os->user, "keeper", look_around, agent, &agent->looker);
    return error ? ms_fail_os(agent->context, error, "no thread for a keeper", NULL) : MS_OK;
}

/* Nodes first, then ranks: a rank that has come in finds all nodes there. */
ms_status ms_agent_gather(ms_agent *agent, const ms_agent_options *options)
{
    ms_status status = MS_OK;
    if (agent->nodes > 1 && agent->node == 0) {
        status = gather_nodes(agent);
        if (!status) ms_agent_spread(agent, 0, MS_FRAME_READY, NULL, 0);
    } else if (agent->nodes > 1) {
        status = connect_to_first(agent, options);
        if (!status) status = prove(agent);
        if (!status) status = say_hello(agent);
        if (!status) status = expect(agent, MS_FRAME_READY);
    }
    if (!status) status = start_threads(agent);
    return status ? status : ms_agent_admit(agent);
}

/* ------------------------------------------------------------------------ ending */

/* Whether all others have said goodbye, or are lost. */
static bool all_gone(const ms_agent *agent)
{
    for (uint32_t h = 0; h < agent->nodes; h++)
        if (agent->peers[h].socket && !atomic_load(&agent->peers[h].gone)) return false;
    return true;
}

/* Whether what the ranks have told is passed on. */
static bool all_heard(const ms_agent *agent)
{
    for (uint32_t r = 0; r < agent->ranks; r++)
        if (atomic_load(&agent->connections[r].unheard) != MS_ALL_HEARD) return false;
    return true;
}

/* Another node may still work when this one's ranks have ended in order, so the first agent waits
 * for it without a limit: its signs of life are the limit. After the end of the job nodes need only
 * a moment. */
void ms_agent_finish(ms_agent *agent)
{
    uint64_t since = 0, limit = ms_agent_now(agent) + MS_GOODBYE_NS;
    if (agent->nodes == 1) return;
    while (!all_heard(agent) && !ms_shm_ended(agent->control) && ms_agent_now(agent) < limit)
        pause_for(MS_LOOK_NS);
    ms_agent_look(agent);
    if (ms_shm_ended(agent->control)) ms_agent_show_flights(agent);
    else ms_agent_show(agent, true);
    if (agent->node) ms_agent_send(agent, 0, MS_FRAME_BYE, NULL, 0);
    while (!all_gone(agent)) {
        uint64_t now = ms_agent_now(agent);
        if (!since && (agent->node || ms_shm_ended(agent->control))) since = now;
        if (since && now - since >= MS_GOODBYE_NS) return;
        pause_for(MS_LOOK_NS);
    }
}

uint32_t ms_agent_node_of(const ms_agent *agent, uint32_t rank)
{
    return agent->control->node_of[rank];
}
const char *ms_agent_node_name(const ms_agent *agent, uint32_t node)
{
    return agent->control->node_names[node];
}
uint32_t ms_agent_nodes(const ms_agent *agent) { return agent->nodes; }
uint32_t ms_agent_node(const ms_agent *agent) { return agent->node; }

bool ms_agent_reports(const ms_agent *agent)
{
    return agent->node == 0 || atomic_load(&agent->orphaned);
}

/* Whether all others have told what their ranks have left, or cannot any more. */
static bool all_shown(ms_agent *agent)
{
    for (uint32_t h = 1; h < agent->nodes; h++)
        if (!atomic_load(&agent->peers[h].shown) && !atomic_load(&agent->peers[h].gone))
            return false;
    return true;
}

/* Without the end of the job there is no report, and other nodes may still work. */
void ms_agent_show_end(ms_agent *agent)
{
    if (agent->nodes == 1) return;
    ms_agent_show_flights(agent);
    if (agent->node) {
        ms_agent_send(agent, 0, MS_FRAME_SHOWN, NULL, 0);
        return;
    }
    uint64_t limit = ms_agent_now(agent) + MS_SHOW_NS;
    while (ms_shm_ended(agent->control) && !all_shown(agent) && ms_agent_now(agent) < limit)
        pause_for(MS_LOOK_NS);
}

/* Ranks of this node see the word, those of others its copy. */
void ms_agent_reported(ms_agent *agent)
{
    ms_word *word = &agent->control->reported;
    atomic_store(word, 1);
    ms_futex_wake_shared(word, UINT32_MAX);
    if (agent->nodes > 1) tell(&agent->replication, word, sizeof *word);
}

/* A copy is stored without a wake of its futex, so the word is read every few ms. Without an agent
 * no report comes. */
void ms_cluster_await_report(ms_rendezvous *rendezvous, uint64_t timeout_ns)
{
    const ms_os *os = rendezvous->os;
    const ms_shm_files *files = ms_shm_files_of(rendezvous);
    ms_word *word = &files->control->reported;
    uint64_t limit = os->monotonic_ns(os->user) + timeout_ns;
    while (!atomic_load(word) && os->monotonic_ns(os->user) < limit && !ms_liveness_of_agent(files))
        ms_futex_wait_shared(word, 0, MS_LOOK_NS);
}

/* A thread that has not been started has no record. */
static void join(const ms_os *os, ms_os_thread **thread)
{
    if (*thread) os->thread_join(os->user, *thread);
    *thread = NULL;
}

/* Also of an agent that was opened in part. Threads that wait for the network come back when its
 * connections are ended. */
void ms_agent_close(ms_agent *agent)
{
    const ms_os *os = agent->os;
    atomic_store(&agent->closing, 1);
    stir(&agent->replication);
    for (uint32_t h = 0; h < agent->nodes; h++)
        if (agent->peers[h].socket) os->socket_end(os->user, agent->peers[h].socket);
    ms_agent_close_starter(agent);
    join(os, &agent->looker);
    for (uint32_t h = 0; h < agent->nodes; h++) join(os, &agent->peers[h].thread);
    for (uint32_t r = 0; r < agent->ranks; r++) join(os, &agent->connections[r].thread);
    for (uint32_t h = 0; h < agent->nodes; h++)
        if (agent->peers[h].socket) os->close(os->user, agent->peers[h].socket);
    for (uint32_t r = 0; r < agent->ranks; r++)
        if (agent->connections[r].socket) os->close(os->user, agent->connections[r].socket);
    ms_acceptor_close(agent->acceptor);
    ms_agent_close_local_socket(agent);
    if (agent->requester) os->close(os->user, agent->requester);
    ms_context *context = agent->context;
    os->release(os->user, agent->still.calls);
    os->release(os->user, agent->still.counts);
    ms_rendezvous_release(&agent->files->base);
    ms_release(context, agent->shown);
    ms_release(context, agent);
}
