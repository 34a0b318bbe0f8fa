/* rendezvous_kinds.c: the kinds of rendezvous that there are: a new one, one to meet at, and one
 * that a launcher has handed over. */
#include "comm/rendezvous.h"

#include <string.h>

/* Prefixes differ, so a text names at most one kind. */
static const ms_rendezvous_kind *const kinds[] = { &ms_rendezvous_shm };

/* The part of the record that all kinds share. References count from 1 for the caller. A failure
 * leaves *made as it was. */
static ms_status finish(const ms_rendezvous_kind *kind, ms_status status, ms_rendezvous **made)
{
    if (status) return status;
    (*made)->kind = kind;
    atomic_store(&(*made)->references, 1);
    return MS_OK;
}

/* Ranks of one node are the only ones that a launcher starts, or that meet at a path. */
ms_status ms_rendezvous_new(ms_context *context, const ms_rendezvous_options *options,
                            ms_rendezvous **out)
{
    return finish(&ms_rendezvous_shm, ms_rendezvous_shm.create(context, options, out), out);
}

/* The path is a socket of this node; a rendezvous over several nodes would be told apart by its
 * path. */
ms_status ms_rendezvous_meet(ms_context *context, const ms_rendezvous_options *options,
                             const char *path, uint32_t rank, ms_rendezvous **out)
{
    return finish(&ms_rendezvous_shm, ms_rendezvous_shm.meet(context, options, path, rank, out),
                  out);
}

/* A kind returns MS_ERROR_CORRUPT without a message; the message is the same for every kind. */
ms_status ms_rendezvous_adopt(ms_context *context, const char *text, ms_rendezvous **out)
{
    ms_status status = MS_ERROR_CORRUPT;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++)
        if (strncmp(text, kinds[k]->prefix, strlen(kinds[k]->prefix)) == 0)
            status = finish(kinds[k], kinds[k]->adopt(context, text, out), out);
    if (status != MS_ERROR_CORRUPT) return status;
    return ms_fail(context, status,
                   "%s=%.60s names no job: it is set by the launcher for the ranks that it starts, "
                   "and only for them",
                   MS_RENDEZVOUS_VARIABLE, text);
}
