/* proof_support.h: both sides of a proof (comm/control/cluster/authentication.h), spoken by hand
 * over descriptors. */
#ifndef MOONSHARD_TESTS_PROOF_SUPPORT_H
#define MOONSHARD_TESTS_PROOF_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "comm/control/cluster/authentication.h"

static inline bool send_whole(int descriptor, const void *bytes, size_t count)
{
    return send(descriptor, bytes, count, MSG_NOSIGNAL) == (ssize_t)count;
}
static inline bool receive_whole(int descriptor, void *bytes, size_t count)
{
    return recv(descriptor, bytes, count, MSG_WAITALL) == (ssize_t)count;
}

/* To a port of this host; -1: no process listens there. */
static inline int connect_here(uint16_t port)
{
    struct sockaddr_in at = { .sin_family = AF_INET,
                              .sin_port = htons(port),
                              .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(descriptor, (struct sockaddr *)&at, sizeof at) == 0) return descriptor;
    close(descriptor);
    return -1;
}

/* Listens at a port that the system chooses. */
static inline int listen_here(uint16_t *port)
{
    struct sockaddr_in at = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t bytes = sizeof at;
    int descriptor = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(descriptor, (struct sockaddr *)&at, bytes) || listen(descriptor, 16)
        || getsockname(descriptor, (struct sockaddr *)&at, &bytes))
        return -1;
    *port = ntohs(at.sin_port);
    return descriptor;
}

static inline ms_greeting greeting_of(ms_port_kind kind, uint32_t number)
{
    ms_greeting greeting = { .magic = MS_GREETING_MAGIC, .kind = kind, .number = number };
    memset(greeting.nonce, 0x5a, sizeof greeting.nonce);
    return greeting;
}

/* As a caller; false: the other side has closed, or does not prove itself. */
static inline bool prove_by_hand(int descriptor, ms_port_kind kind, uint32_t number,
                                 const uint8_t *token)
{
    ms_greeting greeting = greeting_of(kind, number);
    ms_challenge challenge;
    uint8_t answer[MS_ANSWER_BYTES];
    if (!send_whole(descriptor, &greeting, sizeof greeting)
        || !receive_whole(descriptor, &challenge, sizeof challenge))
        return false;
    ms_proof_answer(token, MS_SIDE_CALLER, &greeting, &challenge, answer);
    return send_whole(descriptor, answer, sizeof answer)
           && receive_whole(descriptor, answer, sizeof answer)
           && ms_proof_is(token, MS_SIDE_LISTENER, &greeting, &challenge, answer);
}

/* As the one whose port it is. */
static inline bool host_by_hand(int descriptor, const uint8_t *token)
{
    ms_greeting greeting;
    ms_challenge challenge = { .magic = MS_GREETING_MAGIC };
    uint8_t answer[MS_ANSWER_BYTES];
    memset(challenge.nonce, 0xa5, sizeof challenge.nonce);
    if (!receive_whole(descriptor, &greeting, sizeof greeting)
        || !send_whole(descriptor, &challenge, sizeof challenge)
        || !receive_whole(descriptor, answer, sizeof answer)
        || !ms_proof_is(token, MS_SIDE_CALLER, &greeting, &challenge, answer))
        return false;
    ms_proof_answer(token, MS_SIDE_LISTENER, &greeting, &challenge, answer);
    return send_whole(descriptor, answer, sizeof answer);
}

#endif
