/* authentication.c: challenges and answers, by Nettle's HMAC-SHA-256. */
#include "comm/control/cluster/authentication.h"

#include <errno.h>
#include <nettle/hmac.h>
#include <nettle/memops.h>
#include <nettle/version.h>
#include <string.h>

/* Fields have fixed sizes, and each use has its own label, so that no two messages have the same
 * bytes. */
typedef struct ms_proof_message {
    char label[16];
    uint32_t kind, side, number, zero;
    /* The nonce of the caller, and that of the listener. */
    uint8_t caller[MS_NONCE_BYTES], listener[MS_NONCE_BYTES];
} ms_proof_message;
_Static_assert(sizeof(ms_proof_message) == 32 + 2 * MS_NONCE_BYTES, "a message has no padding");

typedef struct ms_derivation {
    char label[16];
    uint8_t salt[MS_TOKEN_BYTES];
} ms_derivation;

static void hmac(const uint8_t *key, const void *message, size_t bytes, uint8_t *out)
{
    struct hmac_sha256_ctx state;
    hmac_sha256_set_key(&state, MS_TOKEN_BYTES, key);
    hmac_sha256_update(&state, bytes, message);
#if NETTLE_VERSION_MAJOR >= 4
    hmac_sha256_digest(&state, out);
#else
    hmac_sha256_digest(&state, SHA256_DIGEST_SIZE, out);
#endif
}
_Static_assert(SHA256_DIGEST_SIZE == MS_ANSWER_BYTES && SHA256_DIGEST_SIZE == MS_TOKEN_BYTES,
               "an answer and a derived token are digests");

void ms_proof_answer(const uint8_t *token, ms_proof_side side, const ms_greeting *greeting,
                     const ms_challenge *challenge, uint8_t answer[MS_ANSWER_BYTES])
{
    ms_proof_message claim = {
        .label = "moonshard proof", .kind = greeting->kind, .side = side, .number = greeting->number
    };
    memcpy(claim.caller, greeting->nonce, MS_NONCE_BYTES);
    memcpy(claim.listener, challenge->nonce, MS_NONCE_BYTES);
    hmac(token, &claim, sizeof claim, answer);
}

bool ms_proof_is(const uint8_t *token, ms_proof_side side, const ms_greeting *greeting,
                 const ms_challenge *challenge, const uint8_t answer[MS_ANSWER_BYTES])
{
    uint8_t right[MS_ANSWER_BYTES];
    ms_proof_answer(token, side, greeting, challenge, right);
    return memeql_sec(right, answer, MS_ANSWER_BYTES);
}

int ms_proof_challenge(const ms_os *os, ms_challenge *out)
{
    *out = (ms_challenge){ .magic = MS_GREETING_MAGIC };
    return os->entropy(os->user, out->nonce, sizeof out->nonce);
}

/* What is left until the limit; tcp_send and tcp_receive look at once where nothing is. */
static uint64_t rest_of(const ms_os *os, uint64_t limit)
{
    uint64_t now = os->monotonic_ns(os->user);
    return limit > now ? limit - now : 0;
}

int ms_proof_visit(const ms_os *os, ms_file *socket, ms_port_kind kind, uint32_t number,
                   const uint8_t *token, uint64_t timeout_ns)
{
    ms_greeting greeting = { .magic = MS_GREETING_MAGIC, .kind = kind, .number = number };
    ms_challenge challenge;
    uint8_t answer[MS_ANSWER_BYTES];
    uint64_t limit = os->monotonic_ns(os->user) + timeout_ns;
    int error = os->entropy(os->user, greeting.nonce, sizeof greeting.nonce);
    if (!error) error = os->tcp_send(os->user, socket, &greeting, sizeof greeting, timeout_ns);
    if (!error)
        error = os->tcp_receive(os->user, socket, &challenge, sizeof challenge, rest_of(os, limit));
    if (error) return error;
    if (challenge.magic != MS_GREETING_MAGIC) return -EPROTO;
    ms_proof_answer(token, MS_SIDE_CALLER, &greeting, &challenge, answer);
    error = os->tcp_send(os->user, socket, answer, sizeof answer, rest_of(os, limit));
    if (!error)
        error = os->tcp_receive(os->user, socket, answer, sizeof answer, rest_of(os, limit));
    if (error) return error;
    return ms_proof_is(token, MS_SIDE_LISTENER, &greeting, &challenge, answer) ? 0 : -EACCES;
}

void ms_token_derive(const uint8_t *token, const uint8_t salt[MS_TOKEN_BYTES],
                     uint8_t out[MS_TOKEN_BYTES])
{
    ms_derivation derivation = { .label = "moonshard token" };
    memcpy(derivation.salt, salt, MS_TOKEN_BYTES);
    hmac(token, &derivation, sizeof derivation, out);
}
