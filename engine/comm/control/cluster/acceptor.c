/* acceptor.c: hears many callers at a port at once; each proves that it has the token, or is
 * disconnected. */
#include "comm/control/cluster/acceptor.h"

#include <errno.h>
#include <string.h>

#include "base/assert.h"

/* A stranger that comes again and again fills no log. */
#define MS_ACCEPTOR_TOLD_MOST 20

/* What is awaited from a caller next. */
typedef enum ms_hearing {
    MS_STAGE_GREETING,
    MS_STAGE_ANSWER,
    MS_STAGE_HEAD,
    MS_STAGE_BODY
} ms_hearing;

typedef struct ms_caller {
    ms_file *socket;
    uint64_t until_ns;
    ms_hearing stage;
    size_t got; /* bytes of this stage */
    ms_greeting greeting;
    ms_challenge challenge;
    uint8_t answer[MS_ANSWER_BYTES];
    ms_frame_head head;
    ms_accepted accepted;
} ms_caller;

struct ms_acceptor {
    ms_context *context;
    ms_acceptor_options options;
    uint32_t most, count, told;
    ms_caller callers[MS_LOCAL_RANKS_MAX + MS_ACCEPTOR_MORE]; /* in the order in which they came */
};
_Static_assert(1 + MS_LOCAL_RANKS_MAX + MS_ACCEPTOR_MORE <= MS_TCP_AWAIT_MOST,
               "all visitors and the port are awaited at once");

static uint64_t now_of(const ms_acceptor *acceptor)
{
    return acceptor->context->os->monotonic_ns(acceptor->context->os->user);
}

/* -------------------------------------------------------------- turning away */

static void tell(ms_acceptor *acceptor, const char *why)
{
    if (acceptor->told < MS_ACCEPTOR_TOLD_MOST)
        ms_log(acceptor->context, MS_LOG_WARN, "a connection to %s is closed: %s%s",
               acceptor->options.place, why,
               acceptor->told + 1 < MS_ACCEPTOR_TOLD_MOST ? "" : "; others are not told any more");
    if (acceptor->told < MS_ACCEPTOR_TOLD_MOST) acceptor->told++;
}

static void forget(ms_acceptor *acceptor, uint32_t index)
{
    acceptor->count--;
    memmove(&acceptor->callers[index], &acceptor->callers[index + 1],
            (acceptor->count - index) * sizeof acceptor->callers[0]);
}

static void turn_away(ms_acceptor *acceptor, uint32_t index, const char *why)
{
    const ms_os *os = acceptor->context->os;
    os->close(os->user, acceptor->callers[index].socket);
    forget(acceptor, index);
    tell(acceptor, why);
}

/* A caller that has the token proves it at once. So the caller that has sent the least is the one
 * that most likely has no token. */
static void make_room(ms_acceptor *acceptor)
{
    uint32_t least = 0;
    for (uint32_t i = 1; i < acceptor->count; i++)
        if (acceptor->callers[i].stage < acceptor->callers[least].stage) least = i;
    turn_away(acceptor, least, "too many have come, and it has said less than others");
}

static void expire(ms_acceptor *acceptor)
{
    uint64_t now = now_of(acceptor);
    for (uint32_t i = acceptor->count; i-- > 0;)
        if (acceptor->callers[i].until_ns <= now)
            turn_away(acceptor, i, "it has not shown in 10 s that it has this job's token");
}

/* -------------------------------------------------------------------- hearing */

/* Where the bytes of this stage go, and how many there are. */
static void *room_of(ms_caller *caller, size_t *bytes)
{
    switch (caller->stage) {
    case MS_STAGE_GREETING: *bytes = sizeof caller->greeting; return &caller->greeting;
    case MS_STAGE_ANSWER: *bytes = sizeof caller->answer; return caller->answer;
    case MS_STAGE_HEAD: *bytes = sizeof caller->head; return &caller->head;
    default: *bytes = caller->head.bytes; return &caller->accepted.body;
    }
}

/* A new connection has room for the few bytes that are sent here, so nothing is waited for. */
static const char *send_now(const ms_acceptor *acceptor, const ms_caller *caller,
                            const void *message, size_t bytes)
{
    const ms_os *os = acceptor->context->os;
    return os->tcp_send(os->user, caller->socket, message, bytes, 0)
               ? "it has gone before it has shown this job's token"
               : NULL;
}

static const char *challenge(const ms_acceptor *acceptor, ms_caller *caller)
{
    const ms_greeting *greeting = &caller->greeting;
    if (greeting->magic != MS_GREETING_MAGIC || greeting->kind != acceptor->options.kind)
        return "it is of another program, or of another version of Moonshard";
    if (ms_proof_challenge(acceptor->context->os, &caller->challenge))
        return "the system gives no random numbers";
    return send_now(acceptor, caller, &caller->challenge, sizeof caller->challenge);
}

static const char *prove(const ms_acceptor *acceptor, ms_caller *caller)
{
    const uint8_t *token = acceptor->options.token;
    uint8_t own[MS_ANSWER_BYTES];
    if (!ms_proof_is(token, MS_SIDE_CALLER, &caller->greeting, &caller->challenge, caller->answer))
        return "it has not this job's token";
    ms_proof_answer(token, MS_SIDE_LISTENER, &caller->greeting, &caller->challenge, own);
    return send_now(acceptor, caller, own, sizeof own);
}

/* The bytes of a stage are there: what is wrong with them, or NULL. */
static const char *advance(const ms_acceptor *acceptor, ms_caller *caller)
{
    static const char other[] = "it does not speak as this version of Moonshard does";
    const char *wrong = NULL;
    switch (caller->stage) {
    case MS_STAGE_GREETING: wrong = challenge(acceptor, caller); break;
    case MS_STAGE_ANSWER: wrong = prove(acceptor, caller); break;
    case MS_STAGE_HEAD:
        if (caller->head.kind != acceptor->options.awaits || !ms_frame_check_head(&caller->head))
            wrong = other;
        break;
    default:
        if (!ms_frame_check_body(&caller->head, &caller->accepted.body)) wrong = other;
    }
    caller->stage++;
    caller->got = 0;
    return wrong;
}

/* Takes what has come, up to the end of a stage, and no more. Whether the introduction is there. */
static bool hear(ms_acceptor *acceptor, uint32_t index)
{
    const ms_os *os = acceptor->context->os;
    ms_caller *caller = &acceptor->callers[index];
    size_t bytes;
    char *room = room_of(caller, &bytes);
    int64_t taken = os->tcp_take(os->user, caller->socket, room + caller->got, bytes - caller->got);
    if (taken == -EAGAIN) return false;
    if (taken > 0) caller->got += (size_t)taken;
    const char *wrong = taken < 0 ? "it has gone before it has shown this job's token" : NULL;
    if (!wrong && caller->got == bytes) wrong = advance(acceptor, caller);
    if (wrong) turn_away(acceptor, index, wrong);
    return !wrong && caller->stage > MS_STAGE_BODY;
}

/* -------------------------------------------------------------------- the port */

/* Where no more files can be opened, one caller is disconnected, and the new one is accepted next
 * time. */
static int accept_one(ms_acceptor *acceptor)
{
    const ms_os *os = acceptor->context->os;
    ms_file *socket = NULL;
    int error = os->tcp_accept(os->user, acceptor->options.listener, 0, &socket);
    if ((error == -EMFILE || error == -ENFILE) && acceptor->count) {
        make_room(acceptor);
        return 0;
    }
    if (error) return error == -EAGAIN || error == -ETIMEDOUT ? 0 : error;
    if (acceptor->count == acceptor->most) make_room(acceptor);
    acceptor->callers[acceptor->count++] =
        (ms_caller){ .socket = socket, .until_ns = now_of(acceptor) + MS_ACCEPTOR_NS };
    return 0;
}

/* Until something has come, the first caller's time is over, or the limit is there. */
static int await(const ms_acceptor *acceptor, uint64_t limit, bool *ready)
{
    const ms_os *os = acceptor->context->os;
    ms_file *files[MS_TCP_AWAIT_MOST] = { acceptor->options.listener };
    uint64_t now = now_of(acceptor), until = limit;
    for (uint32_t i = 0; i < acceptor->count; i++) files[1 + i] = acceptor->callers[i].socket;
    if (acceptor->count && acceptor->callers[0].until_ns < until)
        until = acceptor->callers[0].until_ns;
    int error =
        os->tcp_await(os->user, files, 1 + acceptor->count, until > now ? until - now : 0, ready);
    return error == -ETIMEDOUT ? 0 : error;
}

/* Callers are heard before a new one is accepted: one that has said something just now is not
 * dropped for it. From the last to the first, since those that go move those after them. */
int ms_acceptor_next(ms_acceptor *acceptor, uint64_t timeout_ns, ms_accepted *out)
{
    uint64_t now = now_of(acceptor),
             limit = timeout_ns > UINT64_MAX - now ? UINT64_MAX : now + timeout_ns;
    for (;;) {
        bool ready[MS_TCP_AWAIT_MOST];
        int error = await(acceptor, limit, ready);
        if (error) return error;
        for (uint32_t i = acceptor->count; i-- > 0;) {
            if (!ready[1 + i] || !hear(acceptor, i)) continue;
            *out = acceptor->callers[i].accepted;
            out->socket = acceptor->callers[i].socket;
            out->number = acceptor->callers[i].greeting.number;
            forget(acceptor, i);
            return 0;
        }
        if (ready[0]) error = accept_one(acceptor);
        if (error) return error;
        expire(acceptor);
        if (now_of(acceptor) >= limit) return -ETIMEDOUT;
    }
}

bool ms_acceptor_answer(ms_acceptor *acceptor, ms_accepted *accepted, const char *refusal)
{
    const ms_os *os = acceptor->context->os;
    ms_frame_head head = { .magic = MS_FRAME_MAGIC, .kind = MS_FRAME_WELCOME };
    if (refusal) {
        head.kind = MS_FRAME_REFUSED;
        head.bytes = (uint32_t)strlen(refusal) + 1;
    }
    int error = os->tcp_send(os->user, accepted->socket, &head, sizeof head, 0);
    if (refusal) {
        tell(acceptor, refusal);
        if (!error) (void)os->tcp_send(os->user, accepted->socket, refusal, head.bytes, 0);
    }
    if (!refusal && !error) return true;
    os->close(os->user, accepted->socket);
    accepted->socket = NULL;
    return false;
}

/* -------------------------------------------------------------- beginning and end */

ms_status ms_acceptor_open(ms_context *context, const ms_acceptor_options *options,
                           ms_acceptor **out)
{
    void *memory = NULL;
    MS_ASSERT(options->awaited <= MS_LOCAL_RANKS_MAX);
    ms_status status = ms_allocate(context, sizeof(ms_acceptor), "porter", &memory);
    if (status) {
        context->os->close(context->os->user, options->listener);
        return status;
    }
    ms_acceptor *acceptor = memory;
    acceptor->context = context;
    acceptor->options = *options;
    acceptor->most = options->awaited + MS_ACCEPTOR_MORE;
    *out = acceptor;
    return MS_OK;
}

void ms_acceptor_close(ms_acceptor *acceptor)
{
    if (!acceptor) return;
    const ms_os *os = acceptor->context->os;
    for (uint32_t i = 0; i < acceptor->count; i++) os->close(os->user, acceptor->callers[i].socket);
    os->close(os->user, acceptor->options.listener);
    ms_release(acceptor->context, acceptor);
}
