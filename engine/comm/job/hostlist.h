/* hostlist.h: the hosts of a job as `--hosts` names them: a list, or a file that says the same in
 * lines. For comm/ only.
 *
 * Invariants
 * - The order is that of the text, and ranks count in it: the first host has the first ranks.
 * - No host is there twice, and each has at least one rank. No name begins with '-', so no
 *   program takes it for an option.
 * - On an error the output is unchanged. The message names the place and what is expected there. */
#ifndef MOONSHARD_COMM_JOB_HOSTLIST_H
#define MOONSHARD_COMM_JOB_HOSTLIST_H

#include "moonshard/hosts.h"

#define MS_LISTED_HOSTS_MAX 1024
#define MS_LISTED_RANKS_MAX 4096

/* Hosts with commas between them: node1:4,node2:4. A host without a number has one rank. An IPv6
 * address stands in brackets, [fd00::1]:4, and brackets inside a name are Slurm's: node[01-03,07]:2
 * are node01, node02, node03 and node07, with two ranks each. Blanks around a host do not count.
 * Free with ms_host_list_free. */
ms_status ms_host_list_parse(ms_context *context, const char *text, size_t bytes,
                             ms_host_list *out);
/* The text of a file: a host a line, as above, or in Open MPI's form: node1 slots=4 max_slots=8,
 * where max_slots only has to be no less than slots. # begins a comment. `file` is for messages. */
ms_status ms_host_list_parse_file(ms_context *context, const char *file, const char *text,
                                  size_t bytes, ms_host_list *out);

#endif
