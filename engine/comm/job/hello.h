/* hello.h: what each rank tells rank 0 in the exchange (exchange.h). First comes its introduction,
 * then, among ranks of one version, its hello. */
#ifndef MOONSHARD_COMM_JOB_HELLO_H
#define MOONSHARD_COMM_JOB_HELLO_H

#include "moonshard/cluster.h"

#define MS_AGREE_BYTES 4096

/* The same in all versions, since it is how they find that they differ. */
typedef struct ms_introduction {
    char version[16];
    char node[112];
} ms_introduction;
_Static_assert(sizeof(ms_introduction) == 128, "the same in all versions");

/* Rank 0's answer to each, the same in all versions: why there will be no job; "": hellos follow.
 */
typedef struct ms_hello_answer {
    char refusal[512];
} ms_hello_answer;

typedef struct ms_rank_hello {
    uint32_t failed; /* ms_status: an error that the rank has found itself */
    char why[MS_ERROR_MESSAGE_BYTES];
    ms_node_id node;
    uint32_t cores; /* of the node */
    char agree[MS_AGREE_BYTES];
} ms_rank_hello;

/* This rank's. A node that cannot be named is "?". */
void ms_introduction_write(const ms_context *context, ms_introduction *out);
/* A refusal if another rank is of another version than rank 0. Ends the texts of theirs. */
void ms_introduction_compare(const ms_introduction *own, ms_introduction *theirs, uint32_t rank,
                             ms_hello_answer *out);

/* This rank's. found: its own error so far, which the context has. */
void ms_rank_hello_write(ms_context *context, const ms_cluster_options *options, ms_status found,
                         ms_rank_hello *out);
/* A hello that has come by a message: its texts end within their fields after this. */
void ms_rank_hello_check(ms_rank_hello *hello);
/* What is wrong with a rank's hello beside rank 0's; an error, or MS_OK. */
ms_status ms_rank_hello_compare(ms_context *context, const ms_rank_hello *own,
                                const ms_rank_hello *hello, uint32_t rank);

#endif
