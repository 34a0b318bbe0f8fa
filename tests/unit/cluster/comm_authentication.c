/* comm_authentication.c: two sides show each other that they have one token: what an answer depends
 * on, what is sent, and what a false host gets who records, sends back, or makes up answers. */
#include "proof_support.h"

#include <errno.h>
#include <pthread.h>

#define FOREVER_NS ((uint64_t)1800 * 1000000000)

static const uint8_t TOKEN[MS_TOKEN_BYTES] = "s3cret-of-alice-0123";

/* ------------------------------------------------------------------- answers */

static void from_hex(const char *text, uint8_t *out, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        unsigned byte = 0;
        assert_int_equal(sscanf(text + 2 * i, "%2x", &byte), 1);
        out[i] = (uint8_t)byte;
    }
}

/* By Python: hmac.new(token.ljust(32, b"\0"), message, "sha256") with message = struct.pack(
 * "<16sIIII32s32s", b"moonshard proof", kind, side, number, 0, nonce, nonce). */
static void test_answers_are_hmac_sha_256(void **state)
{
    (void)state;
    ms_greeting greeting = greeting_of(MS_PORT_RANK_0, 3);
    ms_challenge challenge = { .magic = MS_GREETING_MAGIC };
    uint8_t answer[MS_ANSWER_BYTES], expected[MS_ANSWER_BYTES];
    memset(challenge.nonce, 0xa5, sizeof challenge.nonce);
    ms_proof_answer(TOKEN, MS_SIDE_CALLER, &greeting, &challenge, answer);
    from_hex("50a677a96fda303270c459b60b8cb5fff82b97fe70c3ce5a4ac7d1ea31a90cc0", expected,
             sizeof expected);
    assert_memory_equal(answer, expected, sizeof answer);
    ms_proof_answer(TOKEN, MS_SIDE_LISTENER, &greeting, &challenge, answer);
    from_hex("8de1aece58a2d9d7693d57708f8bcca146923939293a21be7bfd2ae2e8c94043", expected,
             sizeof expected);
    assert_memory_equal(answer, expected, sizeof answer);
    /* hmac.new(token.ljust(32, b"\0"), b"moonshard token\0" + bytes(range(32)), "sha256") */
    uint8_t salt[MS_TOKEN_BYTES];
    for (uint8_t i = 0; i < sizeof salt; i++) salt[i] = i;
    ms_token_derive(TOKEN, salt, answer);
    from_hex("42b6c8c1787ea8f5905295105a0bb4f6f1d6dffe26dd4f0cd121745ec2e1645f", expected,
             sizeof expected);
    assert_memory_equal(answer, expected, sizeof answer);
}

/* Whatever is changed by one bit, the answer is another one, and each bit of an answer counts. */
static void test_an_answer_depends_on_everything(void **state)
{
    (void)state;
    ms_greeting greeting = greeting_of(MS_PORT_AGENT, 1), other = greeting;
    ms_challenge challenge, another;
    uint8_t answer[MS_ANSWER_BYTES], token[MS_TOKEN_BYTES];
    ms_context context;
    ms_context_init(&context, NULL);
    assert_int_equal(ms_proof_challenge(context.os, &challenge), 0);
    assert_int_equal(ms_proof_challenge(context.os, &another), 0);
    assert_memory_not_equal(challenge.nonce, another.nonce, sizeof another.nonce);
    ms_proof_answer(TOKEN, MS_SIDE_CALLER, &greeting, &challenge, answer);
    assert_true(ms_proof_is(TOKEN, MS_SIDE_CALLER, &greeting, &challenge, answer));
    assert_false(ms_proof_is(TOKEN, MS_SIDE_LISTENER, &greeting, &challenge, answer));
    other.kind = MS_PORT_STARTER;
    assert_false(ms_proof_is(TOKEN, MS_SIDE_CALLER, &other, &challenge, answer));
    other = greeting;
    other.number = 2;
    assert_false(ms_proof_is(TOKEN, MS_SIDE_CALLER, &other, &challenge, answer));
    for (uint32_t bit = 0; bit < 8 * MS_NONCE_BYTES; bit++) {
        other = greeting;
        other.nonce[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_false(ms_proof_is(TOKEN, MS_SIDE_CALLER, &other, &challenge, answer));
        another = challenge;
        another.nonce[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_false(ms_proof_is(TOKEN, MS_SIDE_CALLER, &greeting, &another, answer));
        memcpy(token, TOKEN, sizeof token);
        token[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_false(ms_proof_is(token, MS_SIDE_CALLER, &greeting, &challenge, answer));
        answer[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_false(ms_proof_is(TOKEN, MS_SIDE_CALLER, &greeting, &challenge, answer));
        answer[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_true(ms_proof_is(TOKEN, MS_SIDE_CALLER, &greeting, &challenge, answer));
}

/* --------------------------------------------------------------- a caller's side */

/* A host that does not have to know the token, and what a caller has sent to it. */
typedef struct host host;
struct host {
    int listener;
    uint16_t port;
    const uint8_t *token;
    void (*run)(host *self, int visitor);
    uint8_t sent[512];
    size_t count;
    ms_challenge challenge;          /* of a host that records */
    uint8_t answer[MS_ANSWER_BYTES]; /* its own */
};

static void record(host *self, int visitor, size_t bytes)
{
    assert_true(self->count + bytes <= sizeof self->sent);
    if (receive_whole(visitor, self->sent + self->count, bytes)) self->count += bytes;
}

static void *host_thread(void *argument)
{
    host *self = argument;
    int visitor = accept(self->listener, NULL, NULL);
    self->run(self, visitor);
    /* Whatever else the caller says before it ends the connection. */
    shutdown(visitor, SHUT_WR);
    while (self->count < sizeof self->sent) {
        ssize_t more = recv(visitor, self->sent + self->count, sizeof self->sent - self->count, 0);
        if (more <= 0) break;
        self->count += (size_t)more;
    }
    close(visitor);
    return NULL;
}

/* What ms_proof_visit makes of a host. */
static int visit(host *self)
{
    pthread_t thread;
    ms_context context;
    ms_file *socket = NULL;
    ms_context_init(&context, NULL);
    const ms_os *os = context.os;
    self->count = 0;
    self->listener = listen_here(&self->port);
    assert_true(self->listener >= 0);
    assert_int_equal(pthread_create(&thread, NULL, host_thread, self), 0);
    assert_int_equal(os->tcp_connect(os->user, "127.0.0.1", self->port, FOREVER_NS, &socket), 0);
    int error = ms_proof_visit(os, socket, MS_PORT_RANK_0, 5, TOKEN, FOREVER_NS);
    os->close(os->user, socket);
    pthread_join(thread, NULL);
    close(self->listener);
    return error;
}

static void greet_and_challenge(host *self, int visitor)
{
    record(self, visitor, sizeof(ms_greeting));
    if (self->challenge.magic != MS_GREETING_MAGIC) {
        self->challenge.magic = MS_GREETING_MAGIC;
        memset(self->challenge.nonce, 0xc3, sizeof self->challenge.nonce);
    }
    assert_true(send_whole(visitor, &self->challenge, sizeof self->challenge));
    record(self, visitor, MS_ANSWER_BYTES);
}

/* It has the token, and keeps what it has sent. */
static void know(host *self, int visitor)
{
    greet_and_challenge(self, visitor);
    ms_proof_answer(self->token, MS_SIDE_LISTENER, (ms_greeting *)(void *)self->sent,
                    &self->challenge, self->answer);
    assert_true(send_whole(visitor, self->answer, sizeof self->answer));
}
/* It sends what it has sent before. */
static void replay(host *self, int visitor)
{
    greet_and_challenge(self, visitor);
    assert_true(send_whole(visitor, self->answer, sizeof self->answer));
}
/* It sends back what has come, and the caller's number as its own. */
static void reflect(host *self, int visitor)
{
    record(self, visitor, sizeof(ms_greeting));
    self->challenge.magic = MS_GREETING_MAGIC;
    memcpy(self->challenge.nonce, ((ms_greeting *)(void *)self->sent)->nonce, MS_NONCE_BYTES);
    assert_true(send_whole(visitor, &self->challenge, sizeof self->challenge));
    record(self, visitor, MS_ANSWER_BYTES);
    assert_true(send_whole(visitor, self->sent + sizeof(ms_greeting), MS_ANSWER_BYTES));
}
static void say_nonsense(host *self, int visitor)
{
    (void)self;
    char text[128] = "HTTP/1.1 400 Bad Request\r\n\r\n";
    assert_true(send_whole(visitor, text, sizeof text));
}
static void close_at_once(host *self, int visitor) { record(self, visitor, sizeof(ms_greeting)); }

static bool has(const host *self, const void *what, size_t bytes)
{
    for (size_t i = 0; i + bytes <= self->count; i++)
        if (memcmp(self->sent + i, what, bytes) == 0) return true;
    return false;
}

static void test_a_host_proves_itself(void **state)
{
    (void)state;
    host self = { .token = TOKEN, .run = know };
    assert_int_equal(visit(&self), 0);
    /* What was sent is a greeting and an answer, without the token or a part of it. */
    assert_int_equal(self.count, sizeof(ms_greeting) + MS_ANSWER_BYTES);
    assert_false(has(&self, TOKEN, 4));
    const ms_greeting *greeting = (ms_greeting *)(void *)self.sent;
    assert_int_equal(greeting->number, 5);
    assert_true(ms_proof_is(TOKEN, MS_SIDE_CALLER, greeting, &self.challenge,
                            self.sent + sizeof *greeting));
    /* Another visit, another number: what was recorded is of no use, neither to a false host that
     * sends it again nor to a caller. */
    ms_greeting first = *greeting;
    self.run = replay;
    assert_int_equal(visit(&self), -EACCES);
    assert_memory_not_equal(first.nonce, greeting->nonce, MS_NONCE_BYTES);
    assert_int_equal(self.count, sizeof(ms_greeting) + MS_ANSWER_BYTES);
}

/* None of them is told more than a greeting and an answer. */
static void test_false_hosts_are_found(void **state)
{
    (void)state;
    const uint8_t other[MS_TOKEN_BYTES] = "s3cret-of-mallory";
    static const struct {
        void (*run)(host *, int);
        int error;
        size_t sent;
    } hosts[] = {
        { know, -EACCES, sizeof(ms_greeting) + MS_ANSWER_BYTES },
        { reflect, -EACCES, sizeof(ms_greeting) + MS_ANSWER_BYTES },
        { greet_and_challenge, -ECONNRESET, sizeof(ms_greeting) + MS_ANSWER_BYTES },
        { say_nonsense, -EPROTO, sizeof(ms_greeting) },
        { close_at_once, -ECONNRESET, sizeof(ms_greeting) },
    };
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        host self = { .token = other, .run = hosts[i].run };
        assert_int_equal(visit(&self), hosts[i].error);
        assert_int_equal(self.count, hosts[i].sent);
        assert_false(has(&self, TOKEN, 4));
    }
}

static void test_a_silent_host_ends_the_wait(void **state)
{
    (void)state;
    ms_context context;
    ms_file *socket = NULL;
    uint16_t port = 0;
    ms_context_init(&context, NULL);
    const ms_os *os = context.os;
    int listener = listen_here(&port);
    assert_int_equal(os->tcp_connect(os->user, "127.0.0.1", port, FOREVER_NS, &socket), 0);
    assert_int_equal(ms_proof_visit(os, socket, MS_PORT_RANK_0, 5, TOKEN, 10000000), -ETIMEDOUT);
    os->close(os->user, socket);
    close(listener);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_answers_are_hmac_sha_256),
        cmocka_unit_test(test_an_answer_depends_on_everything),
        cmocka_unit_test(test_a_host_proves_itself),
        cmocka_unit_test(test_false_hosts_are_found),
        cmocka_unit_test(test_a_silent_host_ends_the_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
