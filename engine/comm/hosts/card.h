/* card.h: what each rank tells rank 0 when the ranks of several hosts meet. */
#ifndef MOONSHARD_COMM_HOSTS_CARD_H
#define MOONSHARD_COMM_HOSTS_CARD_H

#include "moonshard/hosts.h"

#define MS_AGREE_BYTES 4096

typedef struct ms_card {
    uint32_t failed; /* ms_status: an error that the rank has found itself */
    char why[MS_ERROR_MESSAGE_BYTES];
    ms_host_id host;
    uint32_t cores; /* of the host */
    char version[16];
    char agree[MS_AGREE_BYTES];
} ms_card;

/* This rank's. found: its own error so far, which the context has. */
void ms_card_write(ms_context *context, const ms_hosts_options *options, ms_status found,
                   ms_card *out);
/* A card that has come by a message: its texts end within their fields after this. */
void ms_card_check(ms_card *card);
/* What is wrong with a rank's card beside rank 0's; an error, or MS_OK. */
ms_status ms_card_compare(ms_context *context, const ms_card *own, const ms_card *card,
                          uint32_t rank);

#endif
