/* peers.c: frames from agent to agent. */
#include "comm/control/cluster/peers.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "comm/control/cluster/coordinator.h"
#include "comm/control/cluster/rank_copies.h"
#include "comm/control/shm/job_end.h"

/* ------------------------------------------------------------------- sending */

/* The peer through which a node is reached. */
static ms_peer *peer_of(ms_agent *agent, uint32_t node)
{
    return &agent->peers[agent->node == 0 ? node : 0];
}

/* Head and body go out together, as one thread at a time sends. A connection that fails here is cut
 * off: the thread that receives from it finds the node lost. */
void ms_agent_send_parts(ms_agent *agent, uint32_t node, uint32_t origin, ms_frame_kind kind,
                         const void *first, size_t first_bytes, const void *second,
                         size_t second_bytes)
{
    ms_peer *peer = peer_of(agent, node);
    const ms_os *os = agent->os;
    ms_frame_head head = { .magic = MS_FRAME_MAGIC,
                           .kind = (uint16_t)kind,
                           .node = (uint16_t)origin,
                           .bytes = (uint32_t)(first_bytes + second_bytes) };
    MS_ASSERT(ms_frame_check_head(&head));
    if (!peer->socket || atomic_load(&peer->gone)) return;
    ms_lock_take(&peer->sending);
    int error = os->tcp_send(os->user, peer->socket, &head, sizeof head, agent->lost_ns);
    if (!error && first_bytes)
        error = os->tcp_send(os->user, peer->socket, first, first_bytes, agent->lost_ns);
    if (!error && second_bytes)
        error = os->tcp_send(os->user, peer->socket, second, second_bytes, agent->lost_ns);
    ms_lock_give(&peer->sending);
    if (error) os->socket_end(os->user, peer->socket);
}

void ms_agent_send(ms_agent *agent, uint32_t node, ms_frame_kind kind, const void *body,
                   size_t bytes)
{
    ms_agent_send_parts(agent, node, agent->node, kind, body, bytes, NULL, 0);
}

/* In the order of nodes: none waits for another, since a node that does not read is lost. */
void ms_agent_spread(ms_agent *agent, uint32_t except, ms_frame_kind kind, const void *body,
                     size_t bytes)
{
    MS_ASSERT(agent->node == 0);
    for (uint32_t h = 1; h < agent->nodes; h++)
        if (h != except) ms_agent_send(agent, h, kind, body, bytes);
}

/* ----------------------------------------------------------------- receiving */

/* -ETIMEDOUT: nothing has come. A head that is wrong is not followed: what comes after it cannot be
 * understood. */
int ms_agent_receive(const ms_os *os, ms_file *socket, uint64_t timeout_ns, ms_frame_head *head,
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
static void describe_node(const ms_agent *agent, uint32_t node, char *text, size_t bytes)
{
    size_t used = (size_t)snprintf(text, bytes, "host %s (ranks", agent->control->node_names[node]);
    bool first = true;
    for (uint32_t r = 0; r < agent->ranks && used < bytes; r++) {
        if (agent->control->node_of[r] != node) continue;
        used += (size_t)snprintf(text + used, bytes - used, "%s%" PRIu32, first ? " " : ", ", r);
        first = false;
    }
    if (used < bytes) snprintf(text + used, bytes - used, ")");
}

/* The first rank of a node represents it in reports. */
static int32_t first_rank_of(const ms_agent *agent, uint32_t node)
{
    for (uint32_t r = 0; r < agent->ranks; r++)
        if (agent->control->node_of[r] == node) return (int32_t)r;
    return -1;
}

/* The job cannot go on without that node. The agent of a node that loses the first one ends its
 * own ranks the same way. */
static void lose(ms_agent *agent, ms_peer *peer, int error)
{
    char node[300], text[512];
    if (atomic_exchange(&peer->gone, 1) || atomic_load(&agent->closing)) return;
    if (agent->node) atomic_store(&agent->orphaned, 1);
    describe_node(agent, peer->node, node, sizeof node);
    if (error == -ETIMEDOUT)
        snprintf(text, sizeof text,
                 "%s is lost: host %s has heard nothing of it for %.1f s (--lost)", node,
                 agent->control->node_names[agent->node], (double)agent->lost_ns / 1e9);
    else if (error == -EPROTO)
        snprintf(text, sizeof text, "%s is lost: its keeper sent what is no message", node);
    else
        snprintf(text, sizeof text,
                 "%s is lost: the connection to its keeper has closed (%s); the host, or the "
                 "keeper's process, has ended",
                 node, strerror(-error));
    ms_shm_end_job(agent->files, MS_ABORT_DIED, first_rank_of(agent, peer->node), text);
}

/* What a peer has sent. Of frames that tell something, the first agent passes on those that are
 * for all. false: the frame makes no sense, and the peer is not heard any more. */
static bool handle(ms_peer *peer, const ms_frame_head *head, void *body)
{
    ms_agent *agent = peer->agent;
    /* Only the first agent passes on what others say. */
    if (head->node >= agent->nodes || (agent->node == 0 && head->node != peer->node)) return false;
    switch (head->kind) {
    case MS_FRAME_BEAT: return true;
    case MS_FRAME_WRITE: {
        const ms_write_body *write = body;
        size_t bytes = head->bytes - sizeof *write;
        if (!ms_agent_apply(agent, head->node, write->offset, write + 1, bytes)) return false;
        for (uint32_t h = 1; agent->node == 0 && h < agent->nodes; h++)
            if (h != head->node)
                ms_agent_send_parts(agent, h, head->node, MS_FRAME_WRITE, write, sizeof *write,
                                    write + 1, bytes);
        return true;
    }
    case MS_FRAME_SHOWN: atomic_store(&peer->shown, 1); return true;
    case MS_FRAME_FLIGHTS: atomic_store(&agent->flights, 1); return agent->node != 0;
    /* The first agent answers, so that the other knows that all of its frames were read. */
    case MS_FRAME_BYE:
        if (agent->node == 0) ms_agent_send(agent, head->node, MS_FRAME_BYE, NULL, 0);
        atomic_store(&peer->gone, 1);
        return true;
    default: return ms_agent_agree(agent, head->node, head, body);
    }
}

/* Runs until the peer has gone. A peer gives a sign of life several times in lost_ns, so a wait for
 * the next frame that takes as long means that it is lost. */
void ms_agent_listen(void *argument)
{
    ms_peer *peer = argument;
    ms_agent *agent = peer->agent;
    union {
        uint64_t align;
        char bytes[MS_FRAME_BODY_MOST];
    } body;
    int error = 0;
    while (!error && !atomic_load(&peer->gone)) {
        ms_frame_head head;
        error = ms_agent_receive(agent->os, peer->socket, agent->lost_ns, &head, &body);
        if (!error && !handle(peer, &head, &body)) error = -EPROTO;
    }
    if (error) lose(agent, peer, error);
}
