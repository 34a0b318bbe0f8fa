/* exchange.h: the exchange: the messages between rank 0 and each other process of a launcher,
 * before the nodes have agents. For comm/job/ only.
 *
 * Invariants
 * - A message passes between rank 0 and another rank, whole and in order. Both sides know how long
 *   it is: another length means another version of Moonshard.
 * - Every call ends at limit_ns, which is that of the whole exchange: init_ns of the options after
 *   its beginning, and on ranks above 0 a little later, so that they hear rank 0's error. After a
 *   failure the exchange and the memory of messages are not freed: MPI may still use them, and the
 *   process can only end. */
#ifndef MOONSHARD_COMM_JOB_EXCHANGE_H
#define MOONSHARD_COMM_JOB_EXCHANGE_H

#include "comm/control/shm/state.h"

#include "comm/job/launcher_env.h"
#include "moonshard/cluster.h"

typedef struct ms_exchange ms_exchange;
struct ms_exchange {
    ms_context *context;
    const ms_cluster_options *options;
    ms_cluster_place *place;
    const uint8_t *token; /* what all ranks have, MS_TOKEN_BYTES; NULL: MPI keeps strangers out */
    uint64_t limit_ns;    /* of the clock: until when messages are waited for */
    ms_status wrong;      /* the context's error is to be told to rank 0 */
    ms_status (*send)(ms_exchange *exchange, uint32_t rank, const void *memory, size_t bytes);
    ms_status (*receive)(ms_exchange *exchange, uint32_t rank, void *memory, size_t bytes);
    /* This rank has entered by the local socket of its agent. What the job goes on to use belongs
     * to the files from now on; the rest is freed. */
    void (*end)(ms_exchange *exchange, ms_shm_files *files);
};

/* From now on messages are waited for so long. */
static inline void ms_exchange_set_limit(ms_exchange *exchange, uint64_t ns)
{
    const ms_os *os = exchange->context->os;
    exchange->limit_ns = os->monotonic_ns(os->user) + ns;
}
static inline void ms_exchange_begin(ms_exchange *exchange)
{
    uint64_t ns = exchange->options->init_ns;
    ms_exchange_set_limit(exchange, exchange->place->rank ? ns + ns / 20 : ns);
}
/* What is left of it, at least 1. */
static inline uint64_t ms_exchange_rest(const ms_exchange *exchange)
{
    const ms_os *os = exchange->context->os;
    uint64_t now = os->monotonic_ns(os->user);
    return exchange->limit_ns > now ? exchange->limit_ns - now : 1;
}

/* Each fills rank and ranks of *place. is_told says whether another process of this node reports an
 * error of the beginning, since each is alone with it there. */

/* By messages of MPI: its module is loaded, and the launcher started this process. Fills mpi and
 * library of *place as well. */
ms_status ms_exchange_over_mpi(ms_context *context, const ms_cluster_options *options,
                               const ms_launcher *launcher, ms_cluster_place *place,
                               ms_exchange **out);
/* By TCP: rank 0 listens at the port of MOONSHARD_MASTER=HOST:PORT, or under torchrun at `port` of
 * the options, where MASTER_ADDR says on which node that is. MOONSHARD_TOKEN keeps strangers out:
 * rank 0 and each other rank prove to each other that they have it (authentication.h).
 * The port is free again when the function returns. */
ms_status ms_exchange_over_tcp(ms_context *context, const ms_cluster_options *options,
                               const ms_launcher *launcher, ms_cluster_place *place,
                               ms_exchange **out);

#endif
