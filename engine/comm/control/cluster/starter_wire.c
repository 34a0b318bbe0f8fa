/* starter_wire.c: frames between the process that has started a job and the first agent. */
#include "comm/control/cluster/starter_wire.h"

#include <errno.h>

#define MS_BEAT_MOST_NS ((uint64_t)1000000000)
/* The one that listens looks this often whether the wire is closing. */
#define MS_TURN_NS ((uint64_t)100000000)

static uint64_t now_of(const ms_wire *wire) { return wire->os->monotonic_ns(wire->os->user); }

int ms_wire_send(ms_wire *wire, ms_frame_kind kind, const void *body, size_t bytes)
{
    const ms_os *os = wire->os;
    ms_frame_head head = { .magic = MS_FRAME_MAGIC,
                           .kind = (uint16_t)kind,
                           .bytes = (uint32_t)bytes };
    ms_lock_take(&wire->sending);
    int error = os->tcp_send(os->user, wire->socket, &head, sizeof head, wire->lost_ns);
    if (!error && bytes) error = os->tcp_send(os->user, wire->socket, body, bytes, wire->lost_ns);
    ms_lock_give(&wire->sending);
    return error;
}

/* -ETIMEDOUT: nothing has come in a turn. A frame that has begun gets more time: its packets may be
 * sent again. */
static int receive(const ms_wire *wire, uint64_t turn_ns, ms_frame_head *head, void *body)
{
    const ms_os *os = wire->os;
    char *bytes = (char *)head;
    int error = os->tcp_receive(os->user, wire->socket, bytes, 1, turn_ns);
    if (error) return error;
    error = os->tcp_receive(os->user, wire->socket, bytes + 1, sizeof *head - 1, wire->lost_ns);
    if (!error && !ms_frame_check_head(head)) error = -EPROTO;
    if (!error && head->bytes)
        error = os->tcp_receive(os->user, wire->socket, body, head->bytes, wire->lost_ns);
    if (error) return error == -ETIMEDOUT ? -EPROTO : error;
    return ms_frame_check_body(head, body) ? 0 : -EPROTO;
}

/* Silence is judged after a look at what has come: a process that was stopped itself finds the
 * other side's signs of life there. */
int ms_wire_listen(ms_wire *wire, bool (*hear)(void *user, const ms_frame_head *, const void *),
                   void *user)
{
    union {
        uint64_t align;
        char bytes[MS_FRAME_BODY_MOST];
    } body;
    uint64_t beat = wire->lost_ns / 5 < MS_BEAT_MOST_NS ? wire->lost_ns / 5 : MS_BEAT_MOST_NS,
             turn = beat < MS_TURN_NS ? beat : MS_TURN_NS, heard = now_of(wire), told = 0;
    while (!atomic_load(&wire->closing)) {
        ms_frame_head head;
        uint64_t now = now_of(wire);
        if (now - told >= beat) {
            (void)ms_wire_send(wire, MS_FRAME_BEAT, NULL, 0);
            told = now;
        }
        int error = receive(wire, turn, &head, &body);
        now = now_of(wire);
        if (error == -ETIMEDOUT && now - heard < wire->lost_ns) continue;
        if (error) return error;
        heard = now;
        if (head.kind != MS_FRAME_BEAT && !hear(user, &head, &body)) return -EPROTO;
    }
    return 0;
}
