/* agent_process.c: a forked process waits until it is needed as the agent of its node. */
#include "comm/control/cluster/agent_process.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "comm/control/cluster/starter_link.h"

#define MS_WHY_NS ((uint64_t)1000000000)
#define MS_CODE_NOT_MET 2 /* the exit code of a job whose ranks have not met */

/* A rank that has ended takes the answer no more, and the agent finds that out at its local socket.
 */
static void answer(ms_context *context, ms_file *socket, ms_status status, const ms_agent *agent,
                   const ms_agent_options *options)
{
    ms_agent_answer served;
    memset(&served, 0, sizeof served);
    served.status = status;
    served.options = *options;
    if (status) snprintf(served.why, sizeof served.why, "%s", context->error.message);
    if (agent)
        snprintf(served.local_socket, sizeof served.local_socket, "%s",
                 ms_agent_socket_path(agent));
    (void)context->os->socket_send(context->os->user, socket, &served, sizeof served, NULL, 0);
}

/* The agent owns the socket and closes it as the last of its own. */
ms_status ms_agent_serve(ms_context *context, int descriptor, ms_agent **out)
{
    const ms_os *os = context->os;
    ms_file *socket = NULL;
    ms_agent_options options;
    uint32_t count = 0;
    *out = NULL;
    int error = os->shared_adopt(os->user, descriptor, &socket);
    if (error) return ms_fail_os(context, error, "a keeper cannot hear its rank", NULL);
    int64_t bytes;
    do
        bytes = os->socket_receive(os->user, socket, &options, sizeof options, UINT64_MAX / 2, NULL,
                                   0, &count);
    while (bytes == -EAGAIN || bytes == -ETIMEDOUT);
    if (bytes != (int64_t)sizeof options) {
        os->close(os->user, socket);
        return MS_OK;
    }
    ms_agent *agent = NULL;
    ms_status status = ms_agent_open(context, &options, &agent);
    if (agent) agent->requester = socket;
    if (!status) status = ms_agent_call_starter(agent);
    answer(context, socket, status, agent, &options);
    if (!status) {
        status = ms_agent_gather(agent, &options);
        if (status) answer(context, socket, status, NULL, &options);
        if (status) ms_agent_tell_code(agent, MS_CODE_NOT_MET);
    }
    if (!status) *out = agent;
    else if (agent) ms_agent_close(agent);
    else os->close(os->user, socket);
    return status;
}

/* --------------------------------------------------------------- the rank's side */

/* The same error, with the node. What an agent tells names its node already. */
static ms_status name_node(ms_context *context, const ms_agent_options *options, ms_status status)
{
    char why[MS_ERROR_MESSAGE_BYTES];
    memcpy(why, context->error.message, sizeof why);
    return ms_fail(context, status, "host %s: %.900s", options->names[options->node], why);
}

ms_status ms_agent_process_ask(ms_context *context, ms_file *socket,
                               const ms_agent_options *options, ms_agent_answer *out)
{
    const ms_os *os = context->os;
    uint32_t count = 0;
    int64_t bytes = os->socket_send(os->user, socket, options, sizeof *options, NULL, 0);
    if (!bytes)
        bytes = os->socket_receive(os->user, socket, out, sizeof *out, options->init_ns, NULL, 0,
                                   &count);
    if (bytes == 0 || bytes == -EPIPE || bytes == -ECONNRESET)
        return name_node(
            context, options,
            ms_fail(context, MS_ERROR_ABORTED, "the process that is to be the keeper has ended"));
    if (bytes != (int64_t)sizeof *out)
        return name_node(context, options,
                         ms_fail_os(context, bytes < 0 ? (int)bytes : -EPROTO,
                                    "no answer of the process that is to be the keeper", NULL));
    out->why[sizeof out->why - 1] = '\0';
    return out->status ? ms_fail(context, (ms_status)out->status, "%s", out->why) : MS_OK;
}

/* An agent that fails tells why before its local socket closes. */
ms_status ms_agent_process_why(ms_context *context, ms_file *socket,
                               const ms_agent_options *options, ms_status status)
{
    const ms_os *os = context->os;
    ms_agent_answer served;
    uint32_t count = 0;
    int64_t bytes =
        os->socket_receive(os->user, socket, &served, sizeof served, MS_WHY_NS, NULL, 0, &count);
    if (bytes != (int64_t)sizeof served || !served.status)
        return name_node(context, options, status);
    served.why[sizeof served.why - 1] = '\0';
    return ms_fail(context, (ms_status)served.status, "%s", served.why);
}
