/* agent_process.h: what a rank says to the process that it has forked to become its host's keeper,
 * and hears from it. For comm/job/ and comm/control/cluster/ only. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_AGENT_PROCESS_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_AGENT_PROCESS_H

#include "moonshard/hosts.h"

/* The answer to ms_keeper_options: once when the keeper is open, and once more if it then fails. */
typedef struct ms_served {
    uint32_t status; /* ms_status */
    char why[MS_ERROR_MESSAGE_BYTES];
    char door[108];
    ms_keeper_options options; /* with the port and the addresses of the first keeper in reach */
} ms_served;

/* The rank's side: asks, and waits for the answer. */
ms_status ms_served_ask(ms_context *context, ms_file *socket, const ms_keeper_options *options,
                        ms_served *out);
/* After the door has closed: the keeper's own error if it has told one, otherwise that of the
 * context, with the host. */
ms_status ms_served_why(ms_context *context, ms_file *socket, const ms_keeper_options *options,
                        ms_status status);

#endif
