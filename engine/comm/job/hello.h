/* hello.h: what each rank tells rank 0 when the ranks of several hosts meet. First comes its
 * introduction, then, among ranks of one version, its card. */
#ifndef MOONSHARD_COMM_JOB_HELLO_H
#define MOONSHARD_COMM_JOB_HELLO_H

#include "moonshard/hosts.h"

#define MS_AGREE_BYTES 4096

/* The same in all versions, since it is how they find that they differ. */
typedef struct ms_introduction {
    char version[16];
    char host[112];
} ms_introduction;
_Static_assert(sizeof(ms_introduction) == 128, "the same in all versions");

/* Rank 0's answer to each, the same in all versions: why there will be no job; "": cards follow. */
typedef struct ms_reception {
    char refusal[512];
} ms_reception;

typedef struct ms_card {
    uint32_t failed; /* ms_status: an error that the rank has found itself */
    char why[MS_ERROR_MESSAGE_BYTES];
    ms_host_id host;
    uint32_t cores; /* of the host */
    char agree[MS_AGREE_BYTES];
} ms_card;

/* This rank's. A host that cannot be named is "?". */
void ms_introduction_write(const ms_context *context, ms_introduction *out);
/* A refusal if another rank is of another version than rank 0. Ends the texts of theirs. */
void ms_introduction_compare(const ms_introduction *own, ms_introduction *theirs, uint32_t rank,
                             ms_reception *out);

/* This rank's. found: its own error so far, which the context has. */
void ms_card_write(ms_context *context, const ms_hosts_options *options, ms_status found,
                   ms_card *out);
/* A card that has come by a message: its texts end within their fields after this. */
void ms_card_check(ms_card *card);
/* What is wrong with a rank's card beside rank 0's; an error, or MS_OK. */
ms_status ms_card_compare(ms_context *context, const ms_card *own, const ms_card *card,
                          uint32_t rank);

#endif
