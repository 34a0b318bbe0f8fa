/* peers.c: frames from keeper to keeper. */
#include "comm/control/cluster/peers.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/control/cluster/coordinator.h"
#include "comm/control/cluster/rank_copies.h"
#include "comm/control/shm/job_end.h"

/* ------------------------------------------------------------------- sending */

/* The peer through which a host is reached. */
static ms_peer *peer_of(ms_keeper *keeper, uint32_t host)
{
    return &keeper->peers[keeper->host == 0 ? host : 0];
}

/* Head and body go out together, as one thread at a time sends. A connection that fails here is cut
 * off: the thread that receives from it finds the host lost. */
void ms_keeper_send_parts(ms_keeper *keeper, uint32_t host, uint32_t origin, ms_frame_kind kind,
                          const void *first, size_t first_bytes, const void *second,
                          size_t second_bytes)
{
    ms_peer *peer = peer_of(keeper, host);
    const ms_os *os = keeper->os;
    ms_frame_head head = { .magic = MS_FRAME_MAGIC,
                           .kind = (uint16_t)kind,
                           .host = (uint16_t)origin,
                           .bytes = (uint32_t)(first_bytes + second_bytes) };
    MS_ASSERT(ms_frame_check_head(&head));
    if (!peer->socket || atomic_load(&peer->gone)) return;
    ms_lock_take(&peer->sending);
    int error = os->tcp_send(os->user, peer->socket, &head, sizeof head, keeper->lost_ns);
    if (!error && first_bytes)
        error = os->tcp_send(os->user, peer->socket, first, first_bytes, keeper->lost_ns);
    if (!error && second_bytes)
        error = os->tcp_send(os->user, peer->socket, second, second_bytes, keeper->lost_ns);
    ms_lock_give(&peer->sending);
    if (error) os->socket_end(os->user, peer->socket);
}

void ms_keeper_send(ms_keeper *keeper, uint32_t host, ms_frame_kind kind, const void *body,
                    size_t bytes)
{
    ms_keeper_send_parts(keeper, host, keeper->host, kind, body, bytes, NULL, 0);
}

/* In the order of hosts: none waits for another, since a host that does not read is lost. */
void ms_keeper_spread(ms_keeper *keeper, uint32_t except, ms_frame_kind kind, const void *body,
                      size_t bytes)
{
    MS_ASSERT(keeper->host == 0);
    for (uint32_t h = 1; h < keeper->hosts; h++)
        if (h != except) ms_keeper_send(keeper, h, kind, body, bytes);
}

/* ----------------------------------------------------------------- receiving */

/* -ETIMEDOUT: nothing has come. A head that is wrong is not followed: what comes after it cannot be
 * understood. */
int ms_keeper_receive(const ms_os *os, ms_file *socket, uint64_t timeout_ns, ms_frame_head *head,
                      void *body)
{
    int error = os->tcp_receive(os->user, socket, head, sizeof *head, timeout_ns);
    if (error) return error;
    if (!ms_frame_check_head(head)) return -EPROTO;
    if (head->bytes) error = os->tcp_receive(os->user, socket, body, head->bytes, timeout_ns);
    if (error) return error == -ETIMEDOUT ? -EPROTO : error;
    return ms_frame_check_body(head, body) ? 0 : -EPROTO;
}

/* "host b (ranks 2, 3)", for reports. */
static void describe_host(const ms_keeper *keeper, uint32_t host, char *text, size_t bytes)
{
    size_t used =
        (size_t)snprintf(text, bytes, "host %s (ranks", keeper->control->host_names[host]);
    bool first = true;
    for (uint32_t r = 0; r < keeper->ranks && used < bytes; r++) {
        if (keeper->control->host_of[r] != host) continue;
        used += (size_t)snprintf(text + used, bytes - used, "%s%" PRIu32, first ? " " : ", ", r);
        first = false;
    }
    if (used < bytes) snprintf(text + used, bytes - used, ")");
}

/* The first rank of a host stands for it in reports. */
static int32_t first_rank_of(const ms_keeper *keeper, uint32_t host)
{
    for (uint32_t r = 0; r < keeper->ranks; r++)
        if (keeper->control->host_of[r] == host) return (int32_t)r;
    return -1;
}

/* The job cannot go on without that host. The keeper of a host that loses the first one ends its
 * own ranks the same way. */
static void lose(ms_keeper *keeper, ms_peer *peer, int error)
{
    char host[300], text[512];
    if (atomic_exchange(&peer->gone, 1) || atomic_load(&keeper->closing)) return;
    if (keeper->host) atomic_store(&keeper->orphaned, 1);
    describe_host(keeper, peer->host, host, sizeof host);
    if (error == -ETIMEDOUT)
        snprintf(text, sizeof text,
                 "%s is lost: host %s has heard nothing of it for %.1f s (--lost)", host,
                 keeper->control->host_names[keeper->host], (double)keeper->lost_ns / 1e9);
    else if (error == -EPROTO)
        snprintf(text, sizeof text, "%s is lost: its keeper sent what is no message", host);
    else
        snprintf(text, sizeof text,
                 "%s is lost: the connection to its keeper has closed (%s); the host, or the "
                 "keeper's process, has ended",
                 host, strerror(-error));
    ms_host_end_job(keeper->files, MS_ABORT_DIED, first_rank_of(keeper, peer->host), text);
}

/* What a peer has sent. Of frames that tell something, the first keeper passes on those that are
 * for all. false: the frame makes no sense, and the peer is not heard any more. */
static bool handle(ms_peer *peer, const ms_frame_head *head, void *body)
{
    ms_keeper *keeper = peer->keeper;
    /* Only the first keeper passes on what others say. */
    if (head->host >= keeper->hosts || (keeper->host == 0 && head->host != peer->host))
        return false;
    switch (head->kind) {
    case MS_FRAME_BEAT: return true;
    case MS_FRAME_WRITE: {
        const ms_write_body *write = body;
        size_t bytes = head->bytes - sizeof *write;
        if (!ms_keeper_apply(keeper, head->host, write->offset, write + 1, bytes)) return false;
        for (uint32_t h = 1; keeper->host == 0 && h < keeper->hosts; h++)
            if (h != head->host)
                ms_keeper_send_parts(keeper, h, head->host, MS_FRAME_WRITE, write, sizeof *write,
                                     write + 1, bytes);
        return true;
    }
    case MS_FRAME_SHOWN: atomic_store(&peer->shown, 1); return true;
    case MS_FRAME_FLIGHTS: atomic_store(&keeper->flights, 1); return keeper->host != 0;
    /* The first keeper answers, so that the other knows that all of its frames were read. */
    case MS_FRAME_BYE:
        if (keeper->host == 0) ms_keeper_send(keeper, head->host, MS_FRAME_BYE, NULL, 0);
        atomic_store(&peer->gone, 1);
        return true;
    default: return ms_keeper_agree(keeper, head->host, head, body);
    }
}

/* Runs until the peer has gone. A peer gives a sign of life several times in lost_ns, so a wait for
 * the next frame that takes as long means that it is lost. */
void ms_keeper_listen(void *argument)
{
    ms_peer *peer = argument;
    ms_keeper *keeper = peer->keeper;
    union {
        uint64_t align;
        char bytes[MS_FRAME_BODY_MOST];
    } body;
    int error = 0;
    while (!error && !atomic_load(&peer->gone)) {
        ms_frame_head head;
        error = ms_keeper_receive(keeper->os, peer->socket, keeper->lost_ns, &head, &body);
        if (!error && !handle(peer, &head, &body)) error = -EPROTO;
    }
    if (error) lose(keeper, peer, error);
}
