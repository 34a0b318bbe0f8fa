/* node_list.h: the nodes of a job as `--hosts` names them: a list, or a file that says the same in
 * lines. For comm/ only.
 *
 * Invariants
 * - The order is that of the text, and ranks count in it: the first node has the first ranks.
 * - No node is there twice, and each has at least one rank. No name begins with '-', so no
 *   program takes it for an option.
 * - On an error the output is unchanged. The message names the place and what is expected there. */
#ifndef MOONSHARD_COMM_JOB_NODE_LIST_H
#define MOONSHARD_COMM_JOB_NODE_LIST_H

#include "moonshard/cluster.h"

#define MS_LISTED_NODES_MAX 1024
#define MS_LISTED_RANKS_MAX 4096

/* Nodes with commas between them: node1:4,node2:4. A node without a number has one rank. An IPv6
 * address is in brackets, [fd00::1]:4, and brackets inside a name are Slurm's: node[01-03,07]:2
 * are node01, node02, node03 and node07, with two ranks each. Blanks around a node do not count.
 * Free with ms_node_list_free. */
ms_status ms_node_list_parse(ms_context *context, const char *text, size_t bytes,
                             ms_node_list *out);
/* The text of a file: a node a line, as above, or in Open MPI's form: node1 slots=4 max_slots=8,
 * where max_slots only has to be no less than slots. # begins a comment. `file` is for messages. */
ms_status ms_node_list_parse_file(ms_context *context, const char *file, const char *text,
                                  size_t bytes, ms_node_list *out);

#endif
