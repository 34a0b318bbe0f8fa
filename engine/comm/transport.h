/* transport.h: what moves and adds the bytes of collectives. For comm/ only.
 *
 * Invariants
 * - A call comes to a transport after all checks of its arguments and after its claim (control.h),
 *   as a task on a stream. Tasks of one channel run one after the other.
 * - A transport decides nothing that ranks must agree on: numbers, groups, causes are control's.
 * - It states which kinds and dtypes it moves; other calls are refused before they are claimed.
 * - What it allocates for a rank ends with `close`, which comes after the streams have ended. */
#ifndef MOONSHARD_COMM_TRANSPORT_H
#define MOONSHARD_COMM_TRANSPORT_H

#include "comm/comm.h"

#define MS_ALL_KINDS ((1u << MS_SPLIT) - 1) /* a split is control's */
#define MS_ALL_DTYPES ((1u << MS_DTYPES) - 1)

struct ms_transport {
    const char *name;
    const char *kernels;    /* whose memory it moves: devices of this family (exec/device.h) */
    uint32_t kinds, dtypes; /* that it moves: bits 1 << kind and 1 << dtype */
    const ms_task *tasks;   /* one for each kind */
    /* Makes transport_state, after control has opened; NULL: it has none. Does not wait. */
    ms_status (*open)(ms_comm *comm);
    /* Memory that peers reach without a copy; NULL: ordinary memory is as good. */
    ms_status (*storage)(ms_comm *comm, ms_stream *stream, size_t bytes, ms_storage **out);
    /* NULL where there is nothing to register: makes a storage known to the network before its
     * first use, until it is freed. */
    ms_status (*enroll)(ms_comm *comm, ms_storage *storage);
    /* NULL where errors come from tasks only: an error of work that was launched earlier, as the
     * engine's error. Never blocks. */
    ms_status (*poll_error)(ms_comm *comm);
    /* NULL where tasks look for the end of the job themselves: what is launched ends at once. Once,
     * on the host thread, after control knows the cause. */
    void (*abort)(ms_comm *comm);
    /* After the streams have ended; NULL: there is nothing to close. */
    void (*close)(ms_comm *comm);
};

extern const ms_transport ms_transport_local, ms_transport_fake;

#endif
