/* exchange.h: how processes that are to be ranks of several hosts speak before any keeper is there:
 * rank 0 with each of the others. For comm/job/ and comm/control/cluster/ only.
 *
 * Invariants
 * - A message passes between rank 0 and another rank, whole and in order. Both sides know how long
 *   it is: another length means another version of Moonshard.
 * - Every call ends at limit_ns, which is that of the whole meeting: init_ns of the options after
 * its beginning, and on ranks above 0 a little later, so that they hear rank 0's error. After a
 * failure the meeting and the memory of messages are not freed: MPI may still use them, and the
 * process can only end. */
#ifndef MOONSHARD_COMM_JOB_EXCHANGE_H
#define MOONSHARD_COMM_JOB_EXCHANGE_H

#include "comm/control/shm/state.h"

#include "comm/job/launcher_env.h"
#include "moonshard/hosts.h"

typedef struct ms_meeting ms_meeting;
struct ms_meeting {
    ms_context *context;
    const ms_hosts_options *options;
    ms_hosts_place *place;
    const uint8_t *token; /* what all ranks have, MS_TOKEN_BYTES; NULL: MPI keeps strangers out */
    uint64_t limit_ns;    /* of the clock: until when messages are waited for */
    ms_status wrong;      /* the context's error is to be told to rank 0 */
    ms_status (*send)(ms_meeting *meeting, uint32_t rank, const void *memory, size_t bytes);
    ms_status (*receive)(ms_meeting *meeting, uint32_t rank, void *memory, size_t bytes);
    /* This rank has entered by the door of its keeper. What the job goes on to use belongs to the
     * files from now on; the rest is freed. */
    void (*end)(ms_meeting *meeting, ms_host_files *files);
};

/* From now on messages are waited for so long. */
static inline void ms_meeting_set_limit(ms_meeting *meeting, uint64_t ns)
{
    const ms_os *os = meeting->context->os;
    meeting->limit_ns = os->monotonic_ns(os->user) + ns;
}
static inline void ms_meeting_begin(ms_meeting *meeting)
{
    uint64_t ns = meeting->options->init_ns;
    ms_meeting_set_limit(meeting, meeting->place->rank ? ns + ns / 20 : ns);
}
/* What is left of it, at least 1. */
static inline uint64_t ms_meeting_rest(const ms_meeting *meeting)
{
    const ms_os *os = meeting->context->os;
    uint64_t now = os->monotonic_ns(os->user);
    return meeting->limit_ns > now ? meeting->limit_ns - now : 1;
}

/* Each fills rank and ranks of *place. is_told says whether another process of this host reports an
 * error of the beginning, since each is alone with it there. */

/* By messages of MPI: its module is loaded, and the launcher started this process. Fills mpi and
 * library of *place as well. */
ms_status ms_meeting_over_mpi(ms_context *context, const ms_hosts_options *options,
                              const ms_launcher *launcher, ms_hosts_place *place, ms_meeting **out);
/* By TCP: rank 0 listens at the port of MOONSHARD_MASTER=HOST:PORT, or under torchrun at `port` of
 * the options, where MASTER_ADDR says on which host that is. MOONSHARD_TOKEN keeps strangers out:
 * rank 0 and each other rank prove to each other that they have it (authentication.h).
 * The port is free again when the function returns. */
ms_status ms_meeting_over_tcp(ms_context *context, const ms_hosts_options *options,
                              const ms_launcher *launcher, ms_hosts_place *place, ms_meeting **out);

#endif
