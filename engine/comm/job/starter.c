/* starter.c: the process that starts a job over several nodes: `moonshard run --hosts`, which
 * starts mpirun with the nodes of node_list.h. It listens for the first agent, which finds it by
 * the variable MS_STARTER_VARIABLE of its environment. Requests go to that agent; the report and
 * the exit code come back. All of this goes in frames (comm/control/cluster/frame.h). */
#include "comm/control/cluster/listen.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct ms_starter {
    ms_context *context;
    ms_endpoint endpoint;
    uint8_t token[MS_TOKEN_BYTES];
    ms_acceptor *acceptor; /* until the agent has come */
    ms_wire wire;
    ms_os_thread *thread;
    char node[MS_NODE_NAME_BYTES]; /* the first agent's */
    ms_word phase;                 /* ms_starter_phase; what follows is written before */
    int code;
    char why[256];
    size_t report_bytes;
    char report[MS_FRAME_BODY_MOST + 1]; /* a text; what does not fit is left out */
};

/* ------------------------------------------------------------ the first agent */

/* Until it has come, or the starter is closing. The port is given back then. */
static void await_agent(ms_starter *starter)
{
    while (!starter->wire.socket && !atomic_load(&starter->wire.closing)) {
        ms_accepted accepted;
        const ms_call_body *call = &accepted.body.call;
        int error = ms_acceptor_next(starter->acceptor, MS_AGENT_TURN_NS, &accepted);
        if (error == -ETIMEDOUT) continue;
        if (error) {
            ms_word never = 0;
            ms_futex_wait(&never, 0, MS_AGENT_TURN_NS);
            continue;
        }
        bool same = strncmp(call->version, ms_version(), sizeof call->version) == 0;
        if (!ms_acceptor_answer(
                starter->acceptor, &accepted,
                same ? NULL
                     : "it has another version of Moonshard: install the same one on "
                       "all hosts"))
            continue;
        memcpy(starter->node, call->node, sizeof starter->node);
        starter->wire.socket = accepted.socket;
    }
    ms_acceptor_close(starter->acceptor);
    starter->acceptor = NULL;
}

/* Of the connection's thread alone until the phase is another. */
static void add_report(ms_starter *starter, const void *text, size_t bytes)
{
    size_t room = sizeof starter->report - 1 - starter->report_bytes;
    if (bytes > room) bytes = room;
    memcpy(starter->report + starter->report_bytes, text, bytes);
    starter->report_bytes += bytes;
}

static bool hear(void *user, const ms_frame_head *head, const void *body)
{
    ms_starter *starter = user;
    if (head->kind == MS_FRAME_REPORT) {
        add_report(starter, body, head->bytes);
        return true;
    }
    if (head->kind != MS_FRAME_CODE) return false;
    starter->code = (int)((const ms_code_body *)body)->code;
    atomic_store(&starter->phase, MS_STARTER_TOLD);
    (void)ms_wire_send(&starter->wire, MS_FRAME_BYE, NULL, 0);
    atomic_store(&starter->wire.closing, 1);
    return true;
}

static void listen_to(void *argument)
{
    ms_starter *starter = argument;
    await_agent(starter);
    if (!starter->wire.socket) return;
    atomic_store(&starter->phase, MS_STARTER_CONNECTED);
    int error = ms_wire_listen(&starter->wire, hear, starter);
    if (!error) return;
    if (error == -ETIMEDOUT)
        snprintf(starter->why, sizeof starter->why,
                 "host %s, where rank 0 is, is lost: nothing was heard of its keeper for %.1f s "
                 "(--lost)",
                 starter->node, (double)starter->wire.lost_ns / 1e9);
    else
        snprintf(starter->why, sizeof starter->why,
                 "host %s, where rank 0 is, is lost: the connection to its keeper has closed (%s)",
                 starter->node, strerror(-error));
    atomic_store(&starter->phase, MS_STARTER_LOST);
}

/* --------------------------------------------------------------- its own side */

/* See starter_link.c. */
static void write_value(const ms_starter *starter, char *value)
{
    int used = snprintf(value, MS_STARTER_BYTES, "1 %u ", starter->endpoint.port);
    for (int i = 0; i < MS_TOKEN_BYTES; i++)
        used += snprintf(value + used, MS_STARTER_BYTES - (size_t)used, "%02x", starter->token[i]);
    for (uint32_t i = 0; i < starter->endpoint.address_count; i++)
        used += snprintf(value + used, MS_STARTER_BYTES - (size_t)used, " %s",
                         starter->endpoint.addresses[i]);
}
_Static_assert(MS_STARTER_BYTES
                   > 16 + 2 * MS_TOKEN_BYTES + MS_CLUSTER_ADDRESSES_MAX * MS_CLUSTER_ADDRESS_BYTES,
               "all addresses fit");

/* Where the first agent comes. */
static ms_status open_port(ms_starter *starter, const char *node)
{
    ms_acceptor_options port = { .kind = MS_PORT_STARTER, .awaits = MS_FRAME_CALL, .awaited = 1 };
    ms_status status =
        ms_endpoint_listen(starter->context, node, &starter->endpoint, &port.listener);
    if (status) return status;
    memcpy(port.token, starter->token, MS_TOKEN_BYTES);
    snprintf(port.place, sizeof port.place, "port %u", starter->endpoint.port);
    return ms_acceptor_open(starter->context, &port, &starter->acceptor);
}

ms_status ms_starter_open(ms_context *context, const char *interface, uint64_t lost_ns, char *value,
                          ms_starter **out)
{
    const ms_os *os = context->os;
    ms_node_id here;
    void *memory = NULL;
    int error = os->node_id(os->user, &here);
    if (error) return ms_fail_os(context, error, "cannot tell this host from others", NULL);
    ms_status status = ms_allocate(context, sizeof(ms_starter), "starter", &memory);
    if (status) return status;
    ms_starter *starter = memory;
    starter->context = context;
    starter->wire = (ms_wire){ .os = os, .lost_ns = lost_ns };
    if (interface)
        snprintf(starter->endpoint.interface, sizeof starter->endpoint.interface, "%s", interface);
    error = os->entropy(os->user, starter->token, sizeof starter->token);
    if (error) status = ms_fail_os(context, error, "cannot make a job's token", NULL);
    if (!status) status = open_port(starter, here.name);
    if (!status) {
        write_value(starter, value);
        error = os->thread_start(os->user, "starter", listen_to, starter, &starter->thread);
        if (error) status = ms_fail_os(context, error, "cannot wait for the first keeper", NULL);
    }
    if (status) ms_starter_close(starter);
    else *out = starter;
    return status;
}

void ms_starter_look(const ms_starter *starter, ms_starter_state *out)
{
    *out = (ms_starter_state){ .phase = (ms_starter_phase)atomic_load(&starter->phase) };
    if (out->phase == MS_STARTER_TOLD) out->code = starter->code;
    if (out->phase == MS_STARTER_LOST) memcpy(out->why, starter->why, sizeof out->why);
}

const char *ms_starter_report(const ms_starter *starter)
{
    ms_starter_phase phase = (ms_starter_phase)atomic_load(&starter->phase);
    return phase == MS_STARTER_TOLD || phase == MS_STARTER_LOST ? starter->report : "";
}

/* A connection that fails is noticed by the one who listens. */
void ms_starter_request(ms_starter *starter, ms_request kind, uint8_t value)
{
    ms_request_body request = { .kind = kind, .value = value };
    if (atomic_load(&starter->phase) == MS_STARTER_CONNECTED)
        (void)ms_wire_send(&starter->wire, MS_FRAME_REQUEST, &request, sizeof request);
}

void ms_starter_ask_flights(ms_starter *starter)
{
    if (atomic_load(&starter->phase) == MS_STARTER_CONNECTED)
        (void)ms_wire_send(&starter->wire, MS_FRAME_FLIGHTS, NULL, 0);
}

void ms_starter_abort(ms_starter *starter, const char *message)
{
    ms_abort_record cause = { .reason = MS_ABORT_STOPPED, .error = { .rank = -1 } };
    snprintf(cause.error.message, sizeof cause.error.message, "%s", message);
    if (atomic_load(&starter->phase) == MS_STARTER_CONNECTED)
        (void)ms_wire_send(&starter->wire, MS_FRAME_CAUSE, &cause, sizeof cause);
}

/* The thread looks at `closing` in each of its turns. */
void ms_starter_close(ms_starter *starter)
{
    if (!starter) return;
    ms_context *context = starter->context;
    const ms_os *os = context->os;
    atomic_store(&starter->wire.closing, 1);
    if (starter->thread) os->thread_join(os->user, starter->thread);
    ms_acceptor_close(starter->acceptor);
    if (starter->wire.socket) os->close(os->user, starter->wire.socket);
    ms_release(context, starter);
}
