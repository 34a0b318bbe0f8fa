/* starter_link.c: the first agent's connection to the process that has started the job. */
#include "comm/control/cluster/starter_link.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/control/cluster/listen.h"
#include "comm/control/cluster/peers.h"
#include "comm/control/shm/job_end.h"
#include "comm/control/shm/liveness.h"

#define MS_LOOK_NS ((uint64_t)5 * 1000000)

/* ------------------------------------------------------------------- calling */

static int digit_of(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* "1 PORT TOKEN ADDRESS ADDRESS...", as starter.c writes it; the token in hexadecimal digits. */
static bool parse(const char *text, ms_endpoint *endpoint, uint8_t token[MS_TOKEN_BYTES])
{
    int used = 0;
    unsigned port = 0;
    if (sscanf(text, "1 %5u %n", &port, &used) != 1 || !used || !port || port > 65535) return false;
    endpoint->port = (uint16_t)port;
    text += used;
    for (int i = 0; i < MS_TOKEN_BYTES; i++, text += 2) {
        int high = digit_of(text[0]), low = high < 0 ? -1 : digit_of(text[1]);
        if (low < 0) return false;
        token[i] = (uint8_t)(high << 4 | low);
    }
    while (endpoint->address_count < MS_CLUSTER_ADDRESSES_MAX
           && sscanf(text, " %63s%n", endpoint->addresses[endpoint->address_count], &used) == 1) {
        endpoint->address_count++;
        text += used;
    }
    return endpoint->address_count > 0;
}

/* Proofs, the call, and its answer. */
static ms_status say_call(ms_agent *agent, uint16_t port, const uint8_t token[MS_TOKEN_BYTES])
{
    char body[MS_FRAME_BODY_MOST];
    ms_frame_head head;
    ms_call_body call = { .version = "" };
    ms_wire *wire = &agent->starter;
    snprintf(call.version, sizeof call.version, "%s", ms_version());
    memcpy(call.node, agent->control->node_names[0], sizeof call.node);
    int error = ms_proof_visit(wire->os, wire->socket, MS_PORT_STARTER, 0, token, wire->lost_ns);
    if (error == -EACCES || error == -EPROTO)
        return ms_fail(agent->context, MS_ERROR_ABORTED,
                       "port %u, where the process that has started the job is to be, has not "
                       "proven to host %s that it has this job's token: another program has that "
                       "port",
                       port, call.node);
    if (!error) error = ms_wire_send(wire, MS_FRAME_CALL, &call, sizeof call);
    if (!error) error = ms_agent_receive(wire->os, wire->socket, wire->lost_ns, &head, body);
    if (!error && head.kind == MS_FRAME_WELCOME) return MS_OK;
    if (!error && head.kind == MS_FRAME_REFUSED)
        return ms_fail(agent->context, MS_ERROR_ARGUMENT,
                       "host %s is refused by the process that has started the job: %s", call.node,
                       body);
    return ms_fail(agent->context, MS_ERROR_ABORTED,
                   "no answer of the process that has started the job: %s",
                   error ? strerror(-error) : "it is of another version");
}

/* ------------------------------------------------------------------- hearing */

/* What it wants goes the way of what this node's supervisor wants. */
static bool hear(void *user, const ms_frame_head *head, const void *body)
{
    ms_agent *agent = user;
    const ms_request_body *request = body;
    const ms_abort_record *cause = body;
    switch (head->kind) {
    case MS_FRAME_REQUEST:
        ms_rendezvous_request(&agent->files->base, (ms_request)request->kind,
                              (uint8_t)request->value);
        return true;
    case MS_FRAME_CAUSE:
        ms_shm_end_job(agent->files, MS_ABORT_STOPPED, -1, cause->error.message);
        return true;
    case MS_FRAME_FLIGHTS:
        atomic_store(&agent->flights, 1);
        ms_agent_spread(agent, 0, MS_FRAME_FLIGHTS, NULL, 0);
        return true;
    case MS_FRAME_BYE: atomic_store(&agent->starter_heard, 1); return true;
    default: return false;
    }
}

/* The process that started the job has ended: the job ends, since no other can stop it. */
static void lose(ms_agent *agent, int error)
{
    char text[256];
    const char *node = agent->control->node_names[0];
    if (error == -ETIMEDOUT)
        snprintf(text, sizeof text,
                 "host %s has heard nothing of the process that has started the job (moonshard run "
                 "--hosts) for %.1f s (--lost)",
                 node, (double)agent->lost_ns / 1e9);
    else
        snprintf(text, sizeof text,
                 "the process that has started the job (moonshard run --hosts) has ended: the "
                 "connection of host %s to it has closed (%s)",
                 node, strerror(-error));
    ms_shm_end_job(agent->files, MS_ABORT_DIED, -1, text);
    atomic_store(&agent->starter_gone, 1);
}

static void listen_to(void *argument)
{
    ms_agent *agent = argument;
    int error = ms_wire_listen(&agent->starter, hear, agent);
    if (error && !atomic_load(&agent->starter_heard) && !atomic_load(&agent->closing))
        lose(agent, error);
}

ms_status ms_agent_check_starter(const ms_agent *agent)
{
    ms_abort_record cause;
    if (!atomic_load(&agent->starter_gone) || !ms_shm_own_cause(agent->files, &cause)) return MS_OK;
    return ms_fail(agent->context, MS_ERROR_ABORTED, "%s", cause.error.message);
}

/* --------------------------------------------------------- beginning and end */

/* The rank waits init_ns for the agent, so half of that is left for the connection. */
ms_status ms_agent_call_starter(ms_agent *agent)
{
    const ms_os *os = agent->os;
    const char *text = os->environment(os->user, MS_STARTER_VARIABLE);
    ms_endpoint endpoint = { .port = 0 };
    uint8_t token[MS_TOKEN_BYTES];
    if (agent->node || !text || !*text) return MS_OK;
    if (!parse(text, &endpoint, token))
        return ms_fail(agent->context, MS_ERROR_ARGUMENT,
                       MS_STARTER_VARIABLE " is not as moonshard run --hosts has set it");
    agent->starter = (ms_wire){ .os = os, .lost_ns = agent->lost_ns };
    int error = ms_endpoint_connect(os, &endpoint, agent->init_ns / 2, &agent->starter.socket);
    if (error)
        return ms_fail(agent->context, MS_ERROR_TIMEOUT,
                       "host %s does not reach port %u of the process that has started the job (at "
                       "%s%s): %s; is a firewall between them, or is another network the right one "
                       "(--interface)?",
                       agent->control->node_names[0], endpoint.port, endpoint.addresses[0],
                       endpoint.address_count > 1 ? " and others" : "", strerror(-error));
    ms_status status = say_call(agent, endpoint.port, token);
    if (status) return status;
    error = os->thread_start(os->user, "starter", listen_to, agent, &agent->starter_thread);
    return error ? ms_fail_os(agent->context, error, "no thread for a keeper", NULL) : MS_OK;
}

/* Waits until the code was heard: a connection that closes at once may lose it. */
void ms_agent_tell_code(ms_agent *agent, int code)
{
    ms_code_body body = { .code = (uint32_t)code & 0xff };
    uint64_t limit = ms_agent_now(agent) + agent->lost_ns;
    if (!agent->starter_thread || atomic_load(&agent->starter_gone)) return;
    if (ms_wire_send(&agent->starter, MS_FRAME_CODE, &body, sizeof body)) return;
    while (!atomic_load(&agent->starter_heard) && !atomic_load(&agent->starter_gone)
           && ms_agent_now(agent) < limit) {
        ms_word never = 0;
        ms_futex_wait(&never, 0, MS_LOOK_NS);
    }
}

bool ms_agent_tell_report(ms_agent *agent, const char *text, size_t bytes)
{
    if (!agent->starter_thread || atomic_load(&agent->starter_gone)) return false;
    for (size_t part; bytes > 0; text += part, bytes -= part) {
        part = bytes < MS_FRAME_BODY_MOST ? bytes : MS_FRAME_BODY_MOST;
        if (ms_wire_send(&agent->starter, MS_FRAME_REPORT, text, part)) return false;
    }
    return true;
}

void ms_agent_close_starter(ms_agent *agent)
{
    const ms_os *os = agent->os;
    if (!agent->starter.socket) return;
    atomic_store(&agent->starter.closing, 1);
    os->socket_end(os->user, agent->starter.socket);
    if (agent->starter_thread) os->thread_join(os->user, agent->starter_thread);
    os->close(os->user, agent->starter.socket);
}

bool ms_agent_flights_wanted(ms_agent *agent) { return atomic_exchange(&agent->flights, 0); }

/* ---------------------------------------------------------------- exit codes */

void ms_cluster_set_code(ms_rendezvous *rendezvous, uint32_t rank, int code)
{
    ms_shm_files *files = ms_shm_files_of(rendezvous);
    ms_word *word = &files->control->lines[rank].code;
    atomic_store(word, ((uint32_t)code & 0xff) + 1);
    if (files->replication) files->replication->tell(files->replication, word, sizeof *word);
}

/* A copy is stored without a wake, so the word is read every few ms. */
int ms_cluster_code(ms_rendezvous *rendezvous, uint32_t rank, int code, uint64_t timeout_ns)
{
    const ms_os *os = rendezvous->os;
    const ms_shm_files *files = ms_shm_files_of(rendezvous);
    uint64_t limit = os->monotonic_ns(os->user) + timeout_ns;
    ms_abort_record cause;
    if (!ms_rendezvous_cause(rendezvous, &cause) || cause.reason != MS_ABORT_RAISED) return code;
    if (cause.error.rank < 0 || (uint32_t)cause.error.rank == rank) return code;
    ms_word *word = &files->control->lines[cause.error.rank].code;
    while (!atomic_load(word) && os->monotonic_ns(os->user) < limit && !ms_liveness_of_agent(files))
        ms_futex_wait_shared(word, 0, MS_LOOK_NS);
    uint32_t told = atomic_load(word);
    return told > 1 ? (int)told - 1 : code;
}

int ms_agent_code(const ms_agent *agent, uint32_t rank)
{
    return (int)atomic_load(&agent->control->lines[rank].code) - 1;
}

uint8_t ms_agent_stop(const ms_agent *agent)
{
    return (uint8_t)atomic_load(&agent->control->requests[MS_REQUEST_STOP].raised);
}
