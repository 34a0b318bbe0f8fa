/* rendezvous_tcp.c: the meeting of ranks that no MPI connects, by frames over TCP: torchrun, or
 * srun without an MPI. Rank 0 has a connection to each other rank until all know their keeper's
 * door. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "comm/control/cluster/acceptor.h"
#include "comm/control/cluster/authentication.h"
#include "comm/control/cluster/peers.h"
#include "comm/job/exchange.h"
#include "comm/job/hello.h"

#define MS_MASTER_VARIABLE "MOONSHARD_MASTER"
#define MS_TOKEN_VARIABLE "MOONSHARD_TOKEN"
#define MS_TOKEN_LEAST 8
#define MS_HEARD_NS ((uint64_t)2000000000)
#define MS_REACH_NS ((uint64_t)2 * 1000000000) /* for one attempt */
#define MS_REACH_RETRY_NS ((uint64_t)50 * 1000000)

typedef struct ms_tcp_meeting {
    ms_meeting base;
    char master[256]; /* the host of rank 0 */
    uint16_t port;
    uint8_t token[MS_TOKEN_BYTES];        /* padded with zeros */
    ms_file *sockets[MS_LOCAL_RANKS_MAX]; /* rank 0's: of each other; another rank's: of rank 0 */
    ms_frame_head head;
    union {
        uint64_t align;
        char bytes[MS_FRAME_BODY_MOST];
    } body;
} ms_tcp_meeting;

static uint64_t now_of(const ms_meeting *meeting)
{
    return meeting->context->os->monotonic_ns(meeting->context->os->user);
}

static ms_file **socket_of(ms_tcp_meeting *meeting, uint32_t rank)
{
    return &meeting->sockets[meeting->base.place->rank == 0 ? rank : 0];
}

/* -------------------------------------------------------------------- messages */

static ms_status fail_with(ms_meeting *meeting, uint32_t rank, int error)
{
    if (error == -ECONNRESET || error == -EPIPE)
        return ms_fail(meeting->context, MS_ERROR_ABORTED,
                       "rank %u has ended before the ranks of all hosts had met", rank);
    if (error == -EPROTO)
        return ms_fail(meeting->context, MS_ERROR_MISMATCH,
                       "rank %u is of another version of Moonshard: install the same one on all "
                       "hosts",
                       rank);
    if (error == -ETIMEDOUT)
        return ms_fail(meeting->context, MS_ERROR_TIMEOUT,
                       "rank %u has said nothing at the meeting of the ranks for %.0f s", rank,
                       (double)meeting->options->init_ns / 1e9);
    return ms_fail(meeting->context, MS_ERROR_IO, "no connection to rank %u: %s", rank,
                   strerror(-error));
}

static int send_frame(const ms_meeting *meeting, ms_file *socket, ms_frame_kind kind,
                      const void *body, size_t bytes)
{
    const ms_os *os = meeting->context->os;
    ms_frame_head head = { .magic = MS_FRAME_MAGIC,
                           .kind = (uint16_t)kind,
                           .bytes = (uint32_t)bytes };
    MS_ASSERT(ms_frame_check_head(&head));
    int error = os->tcp_send(os->user, socket, &head, sizeof head, ms_meeting_rest(meeting));
    if (!error && bytes)
        error = os->tcp_send(os->user, socket, body, bytes, ms_meeting_rest(meeting));
    return error;
}

static ms_status send(ms_meeting *meeting, uint32_t rank, const void *memory, size_t bytes)
{
    ms_tcp_meeting *own = (ms_tcp_meeting *)meeting;
    int error = send_frame(meeting, *socket_of(own, rank), MS_FRAME_MEETING, memory, bytes);
    return error ? fail_with(meeting, rank, error) : MS_OK;
}

static ms_status receive(ms_meeting *meeting, uint32_t rank, void *memory, size_t bytes)
{
    ms_tcp_meeting *own = (ms_tcp_meeting *)meeting;
    int error = ms_keeper_receive(meeting->context->os, *socket_of(own, rank),
                                  ms_meeting_rest(meeting), &own->head, own->body.bytes);
    if (!error && (own->head.kind != MS_FRAME_MEETING || own->head.bytes != bytes)) error = -EPROTO;
    if (error) return fail_with(meeting, rank, error);
    memcpy(memory, own->body.bytes, bytes);
    return MS_OK;
}

static void end(ms_meeting *meeting, ms_host_files *files)
{
    ms_tcp_meeting *own = (ms_tcp_meeting *)meeting;
    const ms_os *os = meeting->context->os;
    (void)files;
    for (uint32_t r = 0; r < MS_LOCAL_RANKS_MAX; r++)
        if (own->sockets[r]) os->close(os->user, own->sockets[r]);
    ms_release(meeting->context, own);
}

/* ---------------------------------------------------------------------- rank 0 */

/* Why a visitor, which has the token, is no rank of the job, or NULL. */
static const char *refusal_of(const ms_tcp_meeting *meeting, const ms_guest *guest)
{
    const ms_hosts_place *place = meeting->base.place;
    const ms_coming_body *coming = &guest->body.coming;
    if (coming->ranks != place->ranks || coming->rank == 0 || coming->rank >= place->ranks
        || coming->rank != guest->number)
        return "its launcher counts other ranks than that of rank 0";
    return meeting->sockets[coming->rank] ? "its rank has come before" : NULL;
}

static ms_status fail_missing(const ms_tcp_meeting *meeting)
{
    char missing[300] = "";
    size_t used = 0;
    const ms_hosts_place *place = meeting->base.place;
    for (uint32_t r = 1; r < place->ranks && used < sizeof missing; r++)
        if (!meeting->sockets[r])
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%" PRIu32,
                                     used ? ", " : "", r);
    return ms_fail(meeting->base.context, MS_ERROR_TIMEOUT,
                   "these ranks have not come to port %u of rank 0's host in %.0f s: %s; is a "
                   "firewall between the hosts, or do they have another " MS_TOKEN_VARIABLE "?",
                   meeting->port, (double)meeting->base.options->init_ns / 1e9, missing);
}

/* Not all have come. Those that have are told why there will be no job, after this process has
 * reported it: as rank 0's answer to their introductions (join.c). What they send is read, since a
 * connection that is closed before loses what it was sent. */
static void turn_away(ms_tcp_meeting *meeting)
{
    ms_meeting *base = &meeting->base;
    ms_error error = base->context->error;
    ms_introduction theirs;
    ms_reception reception = { .refusal = "" };
    bool hears[MS_LOCAL_RANKS_MAX] = { false };
    char heard;
    if (base->options->report) base->options->report(base->options->user, error.message);
    if (base->options->report) base->place->is_told = true;
    snprintf(reception.refusal, sizeof reception.refusal, "%.500s", error.message);
    ms_meeting_set_limit(base, MS_HEARD_NS);
    for (uint32_t r = 1; r < base->place->ranks; r++)
        hears[r] = meeting->sockets[r] && !receive(base, r, &theirs, sizeof theirs)
                   && !send(base, r, &reception, sizeof reception);
    for (uint32_t r = 1; r < base->place->ranks; r++)
        if (hears[r] && !receive(base, r, &heard, 1)) (void)send(base, r, &heard, 1);
    base->context->error = error;
}

static ms_status open_port(ms_tcp_meeting *meeting, ms_porter **out)
{
    ms_context *context = meeting->base.context;
    const ms_os *os = context->os;
    ms_porter_options port = { .kind = MS_PORT_RANK_0,
                               .awaits = MS_FRAME_COMING,
                               .awaited = meeting->base.place->ranks - 1 };
    int error = os->tcp_listen(os->user, NULL, &meeting->port, &port.listener);
    if (error)
        return ms_fail(context, MS_ERROR_EXISTS,
                       "port %u of this host, where the ranks are to meet, cannot be used: %s: "
                       "choose another one",
                       meeting->port, strerror(-error));
    memcpy(port.token, meeting->token, MS_TOKEN_BYTES);
    snprintf(port.place, sizeof port.place, "port %u, where the ranks meet,", meeting->port);
    return ms_porter_open(context, &port, out);
}

/* All come to the port; then it is closed, so that the first keeper may have it. */
static ms_status await_all(ms_tcp_meeting *meeting)
{
    ms_porter *porter = NULL;
    ms_status status = open_port(meeting, &porter);
    if (status) return status;
    uint64_t limit = meeting->base.limit_ns;
    for (uint32_t arrived = 1; arrived < meeting->base.place->ranks && !status;) {
        ms_guest guest;
        uint64_t now = now_of(&meeting->base);
        int error = now < limit ? ms_porter_next(porter, limit - now, &guest) : -ETIMEDOUT;
        if (error == -ETIMEDOUT) status = fail_missing(meeting);
        else if (error)
            status = ms_fail_os(meeting->base.context, error, "cannot accept other ranks", NULL);
        else if (ms_porter_answer(porter, &guest, refusal_of(meeting, &guest))) {
            meeting->sockets[guest.number] = guest.socket;
            arrived++;
        }
    }
    ms_porter_close(porter);
    if (status) turn_away(meeting);
    return status;
}

/* ---------------------------------------------------------------------- others */

/* Rank 0 may begin later. */
static ms_status reach(ms_tcp_meeting *meeting)
{
    ms_context *context = meeting->base.context;
    const ms_os *os = context->os;
    uint64_t limit = meeting->base.limit_ns;
    int error;
    do {
        ms_word never = 0;
        error = os->tcp_connect(os->user, meeting->master, meeting->port, MS_REACH_NS,
                                &meeting->sockets[0]);
        if (!error) return MS_OK;
        ms_futex_wait(&never, 0, MS_REACH_RETRY_NS);
    } while (now_of(&meeting->base) < limit);
    return ms_fail(context, MS_ERROR_TIMEOUT,
                   "rank %u does not reach rank 0 at port %u of host %s: %s; is that the host of "
                   "rank 0, and is a firewall between them?",
                   meeting->base.place->rank, meeting->port, meeting->master, strerror(-error));
}

/* Rank 0 has proven itself, and is told who comes. */
static int introduce(ms_tcp_meeting *meeting)
{
    const ms_hosts_place *place = meeting->base.place;
    ms_coming_body coming = { .rank = place->rank, .ranks = place->ranks };
    int error =
        send_frame(&meeting->base, meeting->sockets[0], MS_FRAME_COMING, &coming, sizeof coming);
    if (error) return error;
    return ms_keeper_receive(meeting->base.context->os, meeting->sockets[0],
                             ms_meeting_rest(&meeting->base), &meeting->head, meeting->body.bytes);
}

/* Proves that it has the token, has rank 0 prove it, and says who it is. */
static ms_status come(ms_tcp_meeting *meeting)
{
    ms_context *context = meeting->base.context;
    const ms_hosts_place *place = meeting->base.place;
    ms_status status = reach(meeting);
    if (status) return status;
    int error = ms_proof_visit(context->os, meeting->sockets[0], MS_PORT_RANK_0, place->rank,
                               meeting->token, ms_meeting_rest(&meeting->base));
    if (error == -EACCES || error == -EPROTO)
        return ms_fail(context, MS_ERROR_ABORTED,
                       "port %u of host %s has not proven to rank %u that it has the "
                       "same " MS_TOKEN_VARIABLE ": another program has that port, or another "
                       "version of Moonshard; it was told nothing of this job",
                       meeting->port, meeting->master, place->rank);
    if (!error) error = introduce(meeting);
    if (!error && meeting->head.kind == MS_FRAME_WELCOME) return MS_OK;
    if (!error && meeting->head.kind == MS_FRAME_REFUSED)
        return ms_fail(context, MS_ERROR_ARGUMENT, "rank %u is refused by rank 0: %s", place->rank,
                       meeting->body.bytes);
    if (error == -ETIMEDOUT)
        return ms_fail(context, MS_ERROR_TIMEOUT,
                       "port %u of host %s has not answered rank %u in %.0f s: another program has "
                       "that port",
                       meeting->port, meeting->master, place->rank,
                       (double)meeting->base.options->init_ns / 1e9);
    return ms_fail(context, MS_ERROR_ABORTED,
                   "port %u of host %s has closed the connection of rank %u: its " MS_TOKEN_VARIABLE
                   " is another one, or another program has that port",
                   meeting->port, meeting->master, place->rank);
}

/* ------------------------------------------------------------------- beginning */

static const char *text_of(const ms_context *context, const char *variable)
{
    const char *text = context->os->environment(context->os->user, variable);
    return text && *text ? text : NULL;
}

/* HOST:PORT, where a host may stand in brackets. */
static ms_status read_master(ms_tcp_meeting *meeting, const char *text)
{
    char *end = NULL;
    const char *colon = strrchr(text, ':');
    size_t bytes = colon ? (size_t)(colon - text) : 0;
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;
    if (bytes > 2 && text[0] == '[' && text[bytes - 1] == ']') {
        text++;
        bytes -= 2;
    }
    if (!bytes || bytes >= sizeof meeting->master || port == 0 || port > 65535 || *end)
        return ms_fail(meeting->base.context, MS_ERROR_ARGUMENT,
                       MS_MASTER_VARIABLE "=%.80s: HOST:PORT is expected, the host of rank 0 and a "
                                          "free port there",
                       text);
    memcpy(meeting->master, text, bytes);
    meeting->port = (uint16_t)port;
    return MS_OK;
}

static ms_status find_master(ms_tcp_meeting *meeting, const ms_launcher *launcher)
{
    const char *master = text_of(meeting->base.context, MS_MASTER_VARIABLE);
    if (master) return read_master(meeting, master);
    if (!launcher->master)
        return ms_fail(meeting->base.context, MS_ERROR_ARGUMENT,
                       "nothing says where the ranks meet: set " MS_MASTER_VARIABLE "=HOST:PORT, "
                       "the host of rank 0 and a free port there");
    if (!meeting->base.options->port)
        return ms_fail(meeting->base.context, MS_ERROR_ARGUMENT,
                       "under torchrun the ranks of several hosts meet at a port of MASTER_ADDR "
                       "that must be free: --port PORT says which (MASTER_PORT may be torchrun's "
                       "own)");
    snprintf(meeting->master, sizeof meeting->master, "%s", launcher->master);
    meeting->port = meeting->base.options->port;
    return MS_OK;
}

static ms_status find_token(ms_tcp_meeting *meeting)
{
    const char *token = text_of(meeting->base.context, MS_TOKEN_VARIABLE);
    size_t bytes = token ? strlen(token) : 0;
    if (bytes >= MS_TOKEN_LEAST && bytes <= MS_TOKEN_BYTES) {
        memcpy(meeting->token, token, bytes);
        return MS_OK;
    }
    if (!token)
        return ms_fail(meeting->base.context, MS_ERROR_ARGUMENT,
                       MS_TOKEN_VARIABLE " is not set: ranks that meet without MPI need a secret "
                                         "of %d to %d bytes, the same on all hosts (openssl rand "
                                         "-hex 16 makes one)",
                       MS_TOKEN_LEAST, MS_TOKEN_BYTES);
    return ms_fail(meeting->base.context, MS_ERROR_ARGUMENT,
                   MS_TOKEN_VARIABLE " has %zu bytes: %d to %d are expected (openssl rand -hex 16 "
                                     "makes a token)",
                   bytes, MS_TOKEN_LEAST, MS_TOKEN_BYTES);
}

static ms_status begin(ms_tcp_meeting *meeting, const ms_launcher *launcher)
{
    ms_hosts_place *place = meeting->base.place;
    if (launcher->size == MS_UNKNOWN)
        return ms_fail(meeting->base.context, MS_ERROR_ARGUMENT,
                       "%s does not say how many ranks there are: without MPI, start them with "
                       "torchrun or srun",
                       launcher->name);
    if (launcher->size > MS_LOCAL_RANKS_MAX)
        return ms_fail(meeting->base.context, MS_ERROR_ARGUMENT, "%u ranks: 1 to %d are allowed",
                       launcher->size, MS_LOCAL_RANKS_MAX);
    place->rank = launcher->rank;
    place->ranks = launcher->size;
    ms_meeting_begin(&meeting->base);
    snprintf(place->library, sizeof place->library, "NCCL");
    ms_status status = find_master(meeting, launcher);
    if (!status) status = find_token(meeting);
    if (!status) status = place->rank ? come(meeting) : await_all(meeting);
    return status;
}

ms_status ms_meeting_over_tcp(ms_context *context, const ms_hosts_options *options,
                              const ms_launcher *launcher, ms_hosts_place *place, ms_meeting **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_tcp_meeting), "meeting", &memory);
    if (status) return status;
    ms_tcp_meeting *meeting = memory;
    meeting->base = (ms_meeting){ .context = context,
                                  .options = options,
                                  .place = place,
                                  .token = meeting->token,
                                  .send = send,
                                  .receive = receive,
                                  .end = end };
    status = begin(meeting, launcher);
    if (!status) *out = &meeting->base;
    return status;
}
