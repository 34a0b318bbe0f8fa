/* rendezvous_tcp.c: the exchange (exchange.h) of processes that no MPI connects, by frames over
 * TCP: those of torchrun, or of srun without an MPI. Rank 0 has a connection to each other rank
 * until all know the local socket of their agent. */
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

typedef struct ms_tcp_exchange {
    ms_exchange base;
    char master[256]; /* the node of rank 0 */
    uint16_t port;
    uint8_t token[MS_TOKEN_BYTES];        /* padded with zeros */
    ms_file *sockets[MS_LOCAL_RANKS_MAX]; /* rank 0's: of each other; another rank's: of rank 0 */
    ms_frame_head head;
    union {
        uint64_t align;
        char bytes[MS_FRAME_BODY_MOST];
    } body;
} ms_tcp_exchange;

static uint64_t now_of(const ms_exchange *exchange)
{
    return exchange->context->os->monotonic_ns(exchange->context->os->user);
}

static ms_file **socket_of(ms_tcp_exchange *exchange, uint32_t rank)
{
    return &exchange->sockets[exchange->base.place->rank == 0 ? rank : 0];
}

/* -------------------------------------------------------------------- messages */

static ms_status fail_with(ms_exchange *exchange, uint32_t rank, int error)
{
    if (error == -ECONNRESET || error == -EPIPE)
        return ms_fail(exchange->context, MS_ERROR_ABORTED,
                       "rank %u has ended before the ranks of all hosts had met", rank);
    if (error == -EPROTO)
        return ms_fail(exchange->context, MS_ERROR_MISMATCH,
                       "rank %u is of another version of Moonshard: install the same one on all "
                       "hosts",
                       rank);
    if (error == -ETIMEDOUT)
        return ms_fail(exchange->context, MS_ERROR_TIMEOUT,
                       "rank %u has said nothing at the meeting of the ranks for %.0f s", rank,
                       (double)exchange->options->init_ns / 1e9);
    return ms_fail(exchange->context, MS_ERROR_IO, "no connection to rank %u: %s", rank,
                   strerror(-error));
}

static int send_frame(const ms_exchange *exchange, ms_file *socket, ms_frame_kind kind,
                      const void *body, size_t bytes)
{
    const ms_os *os = exchange->context->os;
    ms_frame_head head = { .magic = MS_FRAME_MAGIC,
                           .kind = (uint16_t)kind,
                           .bytes = (uint32_t)bytes };
    MS_ASSERT(ms_frame_check_head(&head));
    int error = os->tcp_send(os->user, socket, &head, sizeof head, ms_exchange_rest(exchange));
    if (!error && bytes)
        error = os->tcp_send(os->user, socket, body, bytes, ms_exchange_rest(exchange));
    return error;
}

static ms_status send(ms_exchange *exchange, uint32_t rank, const void *memory, size_t bytes)
{
    ms_tcp_exchange *own = (ms_tcp_exchange *)exchange;
    int error = send_frame(exchange, *socket_of(own, rank), MS_FRAME_EXCHANGE, memory, bytes);
    return error ? fail_with(exchange, rank, error) : MS_OK;
}

static ms_status receive(ms_exchange *exchange, uint32_t rank, void *memory, size_t bytes)
{
    ms_tcp_exchange *own = (ms_tcp_exchange *)exchange;
    int error = ms_agent_receive(exchange->context->os, *socket_of(own, rank),
                                 ms_exchange_rest(exchange), &own->head, own->body.bytes);
    if (!error && (own->head.kind != MS_FRAME_EXCHANGE || own->head.bytes != bytes))
        error = -EPROTO;
    if (error) return fail_with(exchange, rank, error);
    memcpy(memory, own->body.bytes, bytes);
    return MS_OK;
}

static void end(ms_exchange *exchange, ms_shm_files *files)
{
    ms_tcp_exchange *own = (ms_tcp_exchange *)exchange;
    const ms_os *os = exchange->context->os;
    (void)files;
    for (uint32_t r = 0; r < MS_LOCAL_RANKS_MAX; r++)
        if (own->sockets[r]) os->close(os->user, own->sockets[r]);
    ms_release(exchange->context, own);
}

/* ---------------------------------------------------------------------- rank 0 */

/* Why a process that has connected, and has the token, is no rank of the job; NULL: it is one. */
static const char *refusal_of(const ms_tcp_exchange *exchange, const ms_accepted *accepted)
{
    const ms_cluster_place *place = exchange->base.place;
    const ms_coming_body *coming = &accepted->body.coming;
    if (coming->ranks != place->ranks || coming->rank == 0 || coming->rank >= place->ranks
        || coming->rank != accepted->number)
        return "its launcher counts other ranks than that of rank 0";
    return exchange->sockets[coming->rank] ? "its rank has come before" : NULL;
}

static ms_status fail_missing(const ms_tcp_exchange *exchange)
{
    char missing[300] = "";
    size_t used = 0;
    const ms_cluster_place *place = exchange->base.place;
    for (uint32_t r = 1; r < place->ranks && used < sizeof missing; r++)
        if (!exchange->sockets[r])
            used += (size_t)snprintf(missing + used, sizeof missing - used, "%s%" PRIu32,
                                     used ? ", " : "", r);
    return ms_fail(exchange->base.context, MS_ERROR_TIMEOUT,
                   "these ranks have not come to port %u of rank 0's host in %.0f s: %s; is a "
                   "firewall between the hosts, or do they have another " MS_TOKEN_VARIABLE "?",
                   exchange->port, (double)exchange->base.options->init_ns / 1e9, missing);
}

/* Not all have come. Those that have are told why there will be no job, after this process has
 * reported it: as rank 0's answer to their introductions (join.c). What they send is read, since a
 * connection that is closed before loses what it was sent. */
static void turn_away(ms_tcp_exchange *exchange)
{
    ms_exchange *base = &exchange->base;
    ms_error error = base->context->error;
    ms_introduction theirs;
    ms_hello_answer reception = { .refusal = "" };
    bool hears[MS_LOCAL_RANKS_MAX] = { false };
    char heard;
    if (base->options->report) base->options->report(base->options->user, error.message);
    if (base->options->report) base->place->is_told = true;
    snprintf(reception.refusal, sizeof reception.refusal, "%.500s", error.message);
    ms_exchange_set_limit(base, MS_HEARD_NS);
    for (uint32_t r = 1; r < base->place->ranks; r++)
        hears[r] = exchange->sockets[r] && !receive(base, r, &theirs, sizeof theirs)
                   && !send(base, r, &reception, sizeof reception);
    for (uint32_t r = 1; r < base->place->ranks; r++)
        if (hears[r] && !receive(base, r, &heard, 1)) (void)send(base, r, &heard, 1);
    base->context->error = error;
}

static ms_status open_port(ms_tcp_exchange *exchange, ms_acceptor **out)
{
    ms_context *context = exchange->base.context;
    const ms_os *os = context->os;
    ms_acceptor_options port = { .kind = MS_PORT_RANK_0,
                                 .awaits = MS_FRAME_COMING,
                                 .awaited = exchange->base.place->ranks - 1 };
    int error = os->tcp_listen(os->user, NULL, &exchange->port, &port.listener);
    if (error)
        return ms_fail(context, MS_ERROR_EXISTS,
                       "port %u of this host, where the ranks are to meet, cannot be used: %s: "
                       "choose another one",
                       exchange->port, strerror(-error));
    memcpy(port.token, exchange->token, MS_TOKEN_BYTES);
    snprintf(port.place, sizeof port.place, "port %u, where the ranks meet,", exchange->port);
    return ms_acceptor_open(context, &port, out);
}

/* All come to the port; then it is closed, so that the first agent may have it. */
static ms_status await_all(ms_tcp_exchange *exchange)
{
    ms_acceptor *acceptor = NULL;
    ms_status status = open_port(exchange, &acceptor);
    if (status) return status;
    uint64_t limit = exchange->base.limit_ns;
    for (uint32_t arrived = 1; arrived < exchange->base.place->ranks && !status;) {
        ms_accepted accepted;
        uint64_t now = now_of(&exchange->base);
        int error = now < limit ? ms_acceptor_next(acceptor, limit - now, &accepted) : -ETIMEDOUT;
        if (error == -ETIMEDOUT) status = fail_missing(exchange);
        else if (error)
            status = ms_fail_os(exchange->base.context, error, "cannot accept other ranks", NULL);
        else if (ms_acceptor_answer(acceptor, &accepted, refusal_of(exchange, &accepted))) {
            exchange->sockets[accepted.number] = accepted.socket;
            arrived++;
        }
    }
    ms_acceptor_close(acceptor);
    if (status) turn_away(exchange);
    return status;
}

/* ---------------------------------------------------------------------- others */

/* Rank 0 may begin later. */
static ms_status connect_to_rank_0(ms_tcp_exchange *exchange)
{
    ms_context *context = exchange->base.context;
    const ms_os *os = context->os;
    uint64_t limit = exchange->base.limit_ns;
    int error;
    do {
        ms_word never = 0;
        error = os->tcp_connect(os->user, exchange->master, exchange->port, MS_REACH_NS,
                                &exchange->sockets[0]);
        if (!error) return MS_OK;
        ms_futex_wait(&never, 0, MS_REACH_RETRY_NS);
    } while (now_of(&exchange->base) < limit);
    return ms_fail(context, MS_ERROR_TIMEOUT,
                   "rank %u does not reach rank 0 at port %u of host %s: %s; is that the host of "
                   "rank 0, and is a firewall between them?",
                   exchange->base.place->rank, exchange->port, exchange->master, strerror(-error));
}

/* Rank 0 has proven itself, and is told who comes. */
static int introduce(ms_tcp_exchange *exchange)
{
    const ms_cluster_place *place = exchange->base.place;
    ms_coming_body coming = { .rank = place->rank, .ranks = place->ranks };
    int error =
        send_frame(&exchange->base, exchange->sockets[0], MS_FRAME_COMING, &coming, sizeof coming);
    if (error) return error;
    return ms_agent_receive(exchange->base.context->os, exchange->sockets[0],
                            ms_exchange_rest(&exchange->base), &exchange->head,
                            exchange->body.bytes);
}

/* Proves that it has the token, has rank 0 prove it, and says who it is. */
static ms_status come(ms_tcp_exchange *exchange)
{
    ms_context *context = exchange->base.context;
    const ms_cluster_place *place = exchange->base.place;
    ms_status status = connect_to_rank_0(exchange);
    if (status) return status;
    int error = ms_proof_visit(context->os, exchange->sockets[0], MS_PORT_RANK_0, place->rank,
                               exchange->token, ms_exchange_rest(&exchange->base));
    if (error == -EACCES || error == -EPROTO)
        return ms_fail(context, MS_ERROR_ABORTED,
                       "port %u of host %s has not proven to rank %u that it has the "
                       "same " MS_TOKEN_VARIABLE ": another program has that port, or another "
                       "version of Moonshard; it was told nothing of this job",
                       exchange->port, exchange->master, place->rank);
    if (!error) error = introduce(exchange);
    if (!error && exchange->head.kind == MS_FRAME_WELCOME) return MS_OK;
    if (!error && exchange->head.kind == MS_FRAME_REFUSED)
        return ms_fail(context, MS_ERROR_ARGUMENT, "rank %u is refused by rank 0: %s", place->rank,
                       exchange->body.bytes);
    if (error == -ETIMEDOUT)
        return ms_fail(context, MS_ERROR_TIMEOUT,
                       "port %u of host %s has not answered rank %u in %.0f s: another program has "
                       "that port",
                       exchange->port, exchange->master, place->rank,
                       (double)exchange->base.options->init_ns / 1e9);
    return ms_fail(context, MS_ERROR_ABORTED,
                   "port %u of host %s has closed the connection of rank %u: its " MS_TOKEN_VARIABLE
                   " is another one, or another program has that port",
                   exchange->port, exchange->master, place->rank);
}

/* ------------------------------------------------------------------- beginning */

static const char *text_of(const ms_context *context, const char *variable)
{
    const char *text = context->os->environment(context->os->user, variable);
    return text && *text ? text : NULL;
}

/* HOST:PORT, where a host may be in brackets. */
static ms_status read_master(ms_tcp_exchange *exchange, const char *text)
{
    char *end = NULL;
    const char *colon = strrchr(text, ':');
    size_t bytes = colon ? (size_t)(colon - text) : 0;
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;
    if (bytes > 2 && text[0] == '[' && text[bytes - 1] == ']') {
        text++;
        bytes -= 2;
    }
    if (!bytes || bytes >= sizeof exchange->master || port == 0 || port > 65535 || *end)
        return ms_fail(exchange->base.context, MS_ERROR_ARGUMENT,
                       MS_MASTER_VARIABLE "=%.80s: HOST:PORT is expected, the host of rank 0 and a "
                                          "free port there",
                       text);
    memcpy(exchange->master, text, bytes);
    exchange->port = (uint16_t)port;
    return MS_OK;
}

static ms_status find_master(ms_tcp_exchange *exchange, const ms_launcher *launcher)
{
    const char *master = text_of(exchange->base.context, MS_MASTER_VARIABLE);
    if (master) return read_master(exchange, master);
    if (!launcher->master)
        return ms_fail(exchange->base.context, MS_ERROR_ARGUMENT,
                       "nothing says where the ranks meet: set " MS_MASTER_VARIABLE "=HOST:PORT, "
                       "the host of rank 0 and a free port there");
    if (!exchange->base.options->port)
        return ms_fail(exchange->base.context, MS_ERROR_ARGUMENT,
                       "under torchrun the ranks of several hosts meet at a port of MASTER_ADDR "
                       "that must be free: --port PORT says which (MASTER_PORT may be torchrun's "
                       "own)");
    snprintf(exchange->master, sizeof exchange->master, "%s", launcher->master);
    exchange->port = exchange->base.options->port;
    return MS_OK;
}

static ms_status find_token(ms_tcp_exchange *exchange)
{
    const char *token = text_of(exchange->base.context, MS_TOKEN_VARIABLE);
    size_t bytes = token ? strlen(token) : 0;
    if (bytes >= MS_TOKEN_LEAST && bytes <= MS_TOKEN_BYTES) {
        memcpy(exchange->token, token, bytes);
        return MS_OK;
    }
    if (!token)
        return ms_fail(exchange->base.context, MS_ERROR_ARGUMENT,
                       MS_TOKEN_VARIABLE " is not set: ranks that meet without MPI need a secret "
                                         "of %d to %d bytes, the same on all hosts (openssl rand "
                                         "-hex 16 makes one)",
                       MS_TOKEN_LEAST, MS_TOKEN_BYTES);
    return ms_fail(exchange->base.context, MS_ERROR_ARGUMENT,
                   MS_TOKEN_VARIABLE " has %zu bytes: %d to %d are expected (openssl rand -hex 16 "
                                     "makes a token)",
                   bytes, MS_TOKEN_LEAST, MS_TOKEN_BYTES);
}

static ms_status begin(ms_tcp_exchange *exchange, const ms_launcher *launcher)
{
    ms_cluster_place *place = exchange->base.place;
    if (launcher->size == MS_UNKNOWN)
        return ms_fail(exchange->base.context, MS_ERROR_ARGUMENT,
                       "%s does not say how many ranks there are: without MPI, start them with "
                       "torchrun or srun",
                       launcher->name);
    if (launcher->size > MS_LOCAL_RANKS_MAX)
        return ms_fail(exchange->base.context, MS_ERROR_ARGUMENT, "%u ranks: 1 to %d are allowed",
                       launcher->size, MS_LOCAL_RANKS_MAX);
    place->rank = launcher->rank;
    place->ranks = launcher->size;
    ms_exchange_begin(&exchange->base);
    snprintf(place->library, sizeof place->library, "NCCL");
    ms_status status = find_master(exchange, launcher);
    if (!status) status = find_token(exchange);
    if (!status) status = place->rank ? come(exchange) : await_all(exchange);
    return status;
}

ms_status ms_exchange_over_tcp(ms_context *context, const ms_cluster_options *options,
                               const ms_launcher *launcher, ms_cluster_place *place,
                               ms_exchange **out)
{
    void *memory = NULL;
    ms_status status = ms_allocate(context, sizeof(ms_tcp_exchange), "meeting", &memory);
    if (status) return status;
    ms_tcp_exchange *exchange = memory;
    exchange->base = (ms_exchange){ .context = context,
                                    .options = options,
                                    .place = place,
                                    .token = exchange->token,
                                    .send = send,
                                    .receive = receive,
                                    .end = end };
    status = begin(exchange, launcher);
    if (!status) *out = &exchange->base;
    return status;
}
