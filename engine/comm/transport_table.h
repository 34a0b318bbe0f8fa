/* transport_table.h: what moves and adds the bytes of collectives. For comm/ only.
 *
 * Invariants
 * - A call comes to a transport after all checks of its arguments and after its claim
 *   (control_table.h), as a task on a stream. Tasks of one channel run one after the other.
 * - A transport decides nothing that ranks must agree on: numbers, groups, causes are control's.
 * - It states which kinds it carries out, which dtypes it moves, and what it reduces. Other calls
 *   are refused before they are claimed.
 * - What it allocates for a rank ends with `close`, which comes after the streams have ended. */
#ifndef MOONSHARD_COMM_TRANSPORT_TABLE_H
#define MOONSHARD_COMM_TRANSPORT_TABLE_H

#include "comm/state.h"

#define MS_ALL_KINDS ((1u << MS_SPLIT) - 1) /* a split is control's */
#define MS_ALL_DTYPES ((1u << MS_DTYPES) - 1)
#define MS_ALL_OPS ((1u << MS_REDUCE_OPS) - 1)

struct ms_transport {
    const char *name;
    const char *kernels; /* whose memory it moves: devices of this family (exec/device.h) */
    /* Whether it may be asked for by its name on devices of other families, too: `open` refuses
     * those whose memory its library does not move. */
    bool any_device;
    /* What it does: bits 1 << kind of the collectives, 1 << dtype of what it moves, 1 << op and
     * 1 << dtype of what it reduces. A call that is not among them is refused before it is claimed,
     * with an error that names the transport, the operation and the dtype. */
    uint32_t kinds, dtypes, ops, reduced_dtypes;
    /* Whether an all_reduce of f32 in place may round to 16 bits on its way. Hooks that would use
     * it cast instead where it cannot. */
    bool rounds;
    /* Whether its tasks find out that ranks disagree about the counts of an all_to_all. Otherwise
     * the hosts compare them before the call. */
    bool compares_counts;
    /* Whether ranks of one node send to others what topology.h says; that is counted then. */
    bool by_nodes;
    const ms_task *tasks; /* one for each kind */
    /* The same for devices of another family, whose memory it moves, too; NULL: there is none. */
    const struct ms_kernels *other; /* exec/device.h */
    /* Makes transport_state, after control has opened; NULL: it has none. Does not wait. */
    ms_status (*open)(ms_comm *comm);
    /* On the host, before this rank's first call in a group that the transport carries: makes
     * group->transport_state. All members come to it at the same call, so it may share with them
     * (ms_group_share), and then waits for them. That call is no send or recv, which two members
     * make alone: one that comes first is an error. NULL: groups need nothing. */
    ms_status (*prepare)(ms_group *group);
    /* On the host, when a group that was prepared, or has made calls, goes on all its ranks, in the
     * same order of groups on each: frees what it has of it, and may wait for the members. Whether
     * it has; false: the job has ended, and what there is stays until `close`. NULL: it has
     * nothing of a group but transport_state, and that is NULL. */
    bool (*forget)(ms_group *group);
    /* Memory that peers reach without a copy; NULL: ordinary memory is as good. */
    ms_status (*storage)(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out);
    /* Registers a storage with the network before its first use; NULL: there is nothing to
     * register. Its memory stays registered after the storage is freed, since the pool hands it out
     * again, until `close`. */
    ms_status (*enroll)(ms_comm *comm, ms_storage *storage);
    /* On the host, where ranks use graphs (ms_comm_use_graphs): before a call is claimed, and once
     * it is launched. The first sets args->graph, from what all members know. Both NULL: it makes
     * no graphs. */
    void (*choose)(ms_comm_args *args);
    void (*chosen)(const ms_comm_args *args);
    /* An error of work that was launched earlier, as the engine's error. Called before each call
     * and each step; never blocks. NULL: errors come from tasks only, as local's do. */
    ms_status (*poll_error)(ms_comm *comm);
    /* The job has ended: what is launched must end at once, so that no stream waits for a peer for
     * ever. Called once, on the host thread, after control knows the cause. NULL: tasks look for
     * the end of the job themselves, as local's do. */
    void (*abort)(ms_comm *comm);
    /* After the streams have ended; NULL: there is nothing to close. */
    void (*close)(ms_comm *comm);
};

/* ms_transport_local: between the ranks of one node; ms_transport_mpi: of several, over MPI;
 * ms_transport_fake: in a world without the others; ms_transport_nccl: by NCCL. */
extern const ms_transport ms_transport_local, ms_transport_mpi, ms_transport_fake,
    ms_transport_nccl;

#endif
