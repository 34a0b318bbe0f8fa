/* starter_wire.h: the connection between the process that has started a job and the first agent.
 * For comm/job/ and comm/control/cluster/ only.
 *
 * Invariants
 * - Both sides listen and give signs of life, several in `lost_ns`. A side that hears nothing for
 *   that time, or finds the connection closed, takes the other for lost.
 * - A frame is sent as a whole, from any thread. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_STARTER_WIRE_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_STARTER_WIRE_H

#include "base/thread.h"
#include "comm/control/cluster/frame.h"

typedef struct ms_wire {
    const ms_os *os;
    ms_file *socket; /* NULL: not connected; owned by the one who has connected it */
    uint64_t lost_ns;
    ms_lock sending;
    ms_word closing;
} ms_wire;

/* 0 or -errno. */
int ms_wire_send(ms_wire *wire, ms_frame_kind kind, const void *body, size_t bytes);
/* Gives each frame but signs of life to `hear`; false: the frame makes no sense. Returns 0 once the
 * wire is closing, or -errno: -ETIMEDOUT: the other side is silent; -EPROTO: it has sent what is no
 * message. */
int ms_wire_listen(ms_wire *wire, bool (*hear)(void *user, const ms_frame_head *, const void *),
                   void *user);

#endif
