/* authentication.h: how two processes of a job show each other, over a new TCP connection, that
 * both know the job's token. For comm/job/ and comm/control/cluster/ only.
 *
 *     caller                             the one whose port it is (the listener)
 *     greeting: who it is, its number  ->
 *                                      <- challenge: another number
 *     answer                           ->
 *                                      <- answer
 *
 * The numbers are random, and of one conversation. An answer is HMAC-SHA-256 under the token, over
 * the kind of the port, the side that answers, who the caller is, and both numbers.
 *
 * Invariants
 * - The token is never sent. Nothing else of the job is sent before the other side's answer is
 *   found right.
 * - An answer is right in one conversation, and from one side: one that was recorded, comes from
 *   another port, or is sent back to its maker, is wrong.
 * - The caller answers first: whoever only reaches a port gets nothing that depends on the token.
 * - What both sides send is the same in all versions that have MS_GREETING_MAGIC: ranks find out
 *   later that theirs differ, and say so (hello.h).
 * - Answers are compared in a time that does not depend on where they differ. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_AUTHENTICATION_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_AUTHENTICATION_H

#include "moonshard/base.h"

#define MS_TOKEN_BYTES 32
#define MS_NONCE_BYTES 32
#define MS_ANSWER_BYTES 32
#define MS_GREETING_MAGIC 0x3147534du /* "MSG1" */

/* Whose port it is, which says what a caller's number means. */
typedef enum ms_port_kind {
    MS_PORT_RANK_0 = 1, /* before there are agents: its callers are ranks */
    MS_PORT_AGENT,      /* the first agent's: the agents of other nodes, by their nodes */
    MS_PORT_STARTER     /* of the process that has started the job: the first agent, 0 */
} ms_port_kind;

typedef enum ms_proof_side { MS_SIDE_CALLER = 1, MS_SIDE_LISTENER } ms_proof_side;

typedef struct ms_greeting {
    uint32_t magic, kind, number;
    uint8_t nonce[MS_NONCE_BYTES];
} ms_greeting;

typedef struct ms_challenge {
    uint32_t magic;
    uint8_t nonce[MS_NONCE_BYTES];
} ms_challenge;

/* What one side sends to prove itself in the conversation of this greeting and this challenge. */
void ms_proof_answer(const uint8_t *token, ms_proof_side side, const ms_greeting *greeting,
                     const ms_challenge *challenge, uint8_t answer[MS_ANSWER_BYTES]);
/* Whether that is what has come. */
bool ms_proof_is(const uint8_t *token, ms_proof_side side, const ms_greeting *greeting,
                 const ms_challenge *challenge, const uint8_t answer[MS_ANSWER_BYTES]);
/* A challenge of this conversation: 0 or -errno. */
int ms_proof_challenge(const ms_os *os, ms_challenge *out);

/* The caller's side, from the greeting to the other's answer, in timeout_ns for all of it. 0 or
 * -errno; -ECONNRESET, -EPIPE: the other has closed; -EPROTO: it answers as no process of this
 * version does; -EACCES: it does not know the token. */
int ms_proof_visit(const ms_os *os, ms_file *socket, ms_port_kind kind, uint32_t number,
                   const uint8_t *token, uint64_t timeout_ns);

/* The token of a job's agents where its ranks have a token already: it takes both that and the
 * salt to know it, and the salt alone is sent. */
void ms_token_derive(const uint8_t *token, const uint8_t salt[MS_TOKEN_BYTES],
                     uint8_t out[MS_TOKEN_BYTES]);

#endif
