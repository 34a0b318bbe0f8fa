/* adopt.c: the rendezvous that a launcher left in the environment of a rank's process, for the
 * program and for stock interpreters. */
#include "bindings/adopt.h"

#include <stdlib.h>

/* A rank that is wrong is an error, not a run alone: the launcher's other ranks would wait for it.
 * The variables are read from the table's environment, so tests can replace it. A number with text
 * after it counts as wrong. */
ms_status ms_lua_adopt(ms_context *context, ms_rendezvous **out, uint32_t *rank)
{
    const ms_os *os = context->os;
    const char *text = os->environment(os->user, MS_RENDEZVOUS_VARIABLE);
    const char *number = os->environment(os->user, "MOONSHARD_RANK");
    char *end = NULL;
    *out = NULL;
    /* No launcher: this process is a job of its own. */
    if (!text || !*text) return MS_OK;
    long value = number && *number ? strtol(number, &end, 10) : -1;
    ms_rendezvous *rendezvous = NULL;
    ms_status status = ms_rendezvous_adopt(context, text, &rendezvous);
    if (status) return status;
    /* The files were adopted before the check, since only they say how many ranks there are. */
    if (value < 0 || *end || value >= (long)ms_rendezvous_ranks(rendezvous)) {
        ms_rendezvous_release(rendezvous);
        return ms_fail(context, MS_ERROR_ARGUMENT,
                       "MOONSHARD_RANK must be the number of this rank, not '%s'",
                       number ? number : "");
    }
    *rank = (uint32_t)value;
    *out = rendezvous;
    return MS_OK;
}
