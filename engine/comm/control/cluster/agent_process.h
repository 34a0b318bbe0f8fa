/* agent_process.h: the messages between a rank and the process that it has forked, which becomes
 * its node's agent if it is needed. For comm/job/ and comm/control/cluster/ only. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_AGENT_PROCESS_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_AGENT_PROCESS_H

#include "moonshard/cluster.h"

/* The answer to ms_agent_options: once when the agent is open, and once more if it then fails. */
typedef struct ms_agent_answer {
    uint32_t status; /* ms_status */
    char why[MS_ERROR_MESSAGE_BYTES];
    char local_socket[108];
    ms_agent_options options; /* with the port and the addresses of the first agent in endpoint */
} ms_agent_answer;

/* The rank's side: asks, and waits for the answer. */
ms_status ms_agent_process_ask(ms_context *context, ms_file *socket,
                               const ms_agent_options *options, ms_agent_answer *out);
/* After the local socket has closed: the agent's own error if it has told one, otherwise that of
 * the context, with the node. */
ms_status ms_agent_process_why(ms_context *context, ms_file *socket,
                               const ms_agent_options *options, ms_status status);

#endif
