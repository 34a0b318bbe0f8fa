/* link_state.c: what a link keeps from one iteration to the next, by parameter. */
#include "hook/link_state.h"

#include <string.h>

#include "hook/tensors.h"

/* The numbers of one name and parameter: a part of `whole`, which has those of a whole bucket.
 * parameter NULL: they belong to none, or were put and no bucket has asked for them yet. The engine
 * works on whole buckets, so the pieces of one bucket are in one tensor, in its order: the usual
 * iteration finds that tensor and copies nothing. Only when buckets change do pieces move. */
typedef struct piece {
    char *text; /* two strings, each with its 0: the name, the parameter's name */
    ms_tensor *parameter, *whole;
    int64_t offset, length;
    bool parallel; /* a bucket has asked for as many numbers as its gradient has */
} piece;

/* A link's memory. Links, reducers and the application each hold a reference; the engine frees what
 * is left. `held` are tensors for the present pass only; they are not saved. Everything belongs to
 * the host thread. `abandoned` counts references that a finalizer has given up and the next sweep
 * releases. */
struct ms_link_state {
    ms_engine *engine;
    ms_link_state *next; /* of the engine's list */
    piece *pieces;
    size_t count, capacity;
    ms_tensor **held;
    size_t held_count, held_capacity;
    int64_t iteration, due; /* due: the iteration of the next line about compression */
    ms_link_compression compression;
    uint32_t references, abandoned;
};

/* The second of the two strings. */
static const char *parameter_name(const piece *p) { return p->text + strlen(p->text) + 1; }

/* Tasks that still use the tensor are safe: its memory is reused in stream order. */
static void drop_piece(ms_link_state *state, piece *p)
{
    ms_release(ms_engine_context(state->engine), p->text);
    ms_tensor_release(p->parameter);
    ms_tensor_release(p->whole);
    *p = (piece){ 0 };
}

/* For loading: values and the count of iterations start over; references and statistics stay. Held
 * tensors go as well: they belong to a pass of the values that are dropped. */
void ms_link_state_clear(ms_link_state *state)
{
    for (size_t i = 0; i < state->count; i++) drop_piece(state, &state->pieces[i]);
    state->count = 0;
    state->iteration = 0;
    ms_link_state_let_go(state);
}

/* On a failure the tensor is not held, and the caller's pass fails with the status. */
ms_status ms_link_state_hold(ms_link_state *state, ms_tensor *tensor)
{
    ms_status status = ms_grow(ms_engine_context(state->engine), (void **)&state->held,
                               &state->held_capacity, state->held_count + 1, sizeof *state->held);
    if (!status) state->held[state->held_count++] = ms_tensor_retain(tensor);
    return status;
}

/* The list is borrowed until the next hold or let_go. */
ms_tensor *const *ms_link_state_held(const ms_link_state *state, uint32_t *count)
{
    *count = (uint32_t)state->held_count;
    return state->held;
}

/* The room is kept for the next pass. */
void ms_link_state_let_go(ms_link_state *state)
{
    for (size_t i = 0; i < state->held_count; i++) ms_tensor_release(state->held[i]);
    state->held_count = 0;
}

/* ----------------------------------------------------------------- lifetime */

/* The list of the engine no longer has it, or is being taken down as a whole. */
static void free_state(ms_link_state *state)
{
    ms_context *context = ms_engine_context(state->engine);
    ms_link_state_clear(state);
    ms_release(context, state->pieces);
    ms_release(context, state->held);
    ms_release(context, state);
}

/* The engine's end: references that applications or reducers did not give back do not matter any
 * more, since their owners cannot use the engine either. */
static void free_all(ms_engine *engine, void *first)
{
    (void)engine;
    for (ms_link_state *state = first, *next; state; state = next) {
        next = state->next;
        free_state(state);
    }
}

/* The engine's list holds no reference; it only finds states for the sweep and for the engine's
 * end. */
ms_status ms_link_state_new(ms_engine *engine, ms_link_state **out)
{
    void *memory = NULL;
    ms_status status =
        ms_allocate(ms_engine_context(engine), sizeof(ms_link_state), "a link's state", &memory);
    if (status) return status;
    ms_link_state *state = memory;
    *state = (ms_link_state){ .engine = engine,
                              .references = 1,
                              .next = ms_engine_get(engine, MS_SLOT_HOOK) };
    ms_engine_set(engine, MS_SLOT_HOOK, state, free_all);
    *out = state;
    return MS_OK;
}

/* Not atomic: retain and release are calls of the host thread. */
ms_link_state *ms_link_state_retain(ms_link_state *state)
{
    if (state) state->references++;
    return state;
}

/* The list is singly linked, since an engine has few states and they go rarely. With the last one
 * the slot is emptied, so that no destroy function is called with NULL. */
void ms_link_state_release(ms_link_state *state)
{
    if (!state || --state->references > 0) return;
    ms_link_state *first = ms_engine_get(state->engine, MS_SLOT_HOOK), **link = &first;
    while (*link != state) link = &(*link)->next;
    *link = state->next;
    ms_engine_set(state->engine, MS_SLOT_HOOK, first, first ? free_all : NULL);
    free_state(state);
}

/* Called by a finalizer at any moment, so it only counts; the sweep releases at a moment that does
 * not depend on the collector. */
void ms_link_state_abandon(ms_link_state *state) { state->abandoned++; }

/* abandoned is cleared before the references are released, since the last release frees the state.
 * `next` is read first for the same reason. */
void ms_link_states_sweep(ms_engine *engine)
{
    for (ms_link_state *state = ms_engine_get(engine, MS_SLOT_HOOK), *next; state; state = next) {
        next = state->next;
        uint32_t abandoned = state->abandoned;
        state->abandoned = 0;
        while (abandoned-- > 0) ms_link_state_release(state);
    }
}

/* ------------------------------------------------------------------- asking */

/* The piece of that parameter (NULL: of none), or one that was put under its name when a checkpoint
 * was loaded. Pointers decide before names, since two models may have parameters of the same name.
 * hint: the index at which the search begins. */
static piece *find(const ms_link_state *state, const char *name, const ms_tensor *parameter,
                   const char *called, size_t hint)
{
    piece *put = NULL;
    for (size_t n = 0; n < state->count; n++) {
        piece *p = &state->pieces[(hint + n) % state->count];
        if (p->parameter != parameter && p->parameter) continue;
        if (strcmp(p->text, name) != 0) continue;
        if (p->parameter == parameter && parameter) return p;
        if (strcmp(parameter_name(p), called) == 0) put = p;
    }
    return put;
}

/* What a caller asks for: lengths[i] numbers (NULL: as many as gradient i has) for each parameter,
 * and `padding` zeros after them, which belong to no piece. */
typedef struct request {
    const char *name;
    ms_tensor *const *parameters, *const *gradients;
    const char *const *called;
    const int64_t *lengths;
    int64_t padding;
    uint32_t count;
} request;

/* With lengths NULL the state is parallel to the gradients, number by number. */
static int64_t length_of(const request *r, uint32_t i)
{
    return r->lengths ? r->lengths[i] : ms_tensor_count(r->gradients[i]);
}

/* A request without parameters (ms_link_state_shared) has one item, whose name is "". */
static piece *find_item(const ms_link_state *state, const request *r, uint32_t i, size_t hint)
{
    return find(state, r->name, r->parameters ? r->parameters[i] : NULL, r->called[i], hint);
}

/* The tensor that has exactly the requested pieces in the requested order, or NULL. Found in every
 * iteration but the first after the buckets changed, so that nothing is copied. The pieces of a
 * bucket were made one after another, so each search begins where the one before ended, and the
 * whole takes linear time. */
static ms_tensor *find_whole(const ms_link_state *state, const request *r, int64_t total)
{
    ms_tensor *whole = NULL;
    int64_t at = 0;
    size_t hint = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        int64_t length = length_of(r, i);
        if (length == 0) continue;
        const piece *p = find_item(state, r, i, hint);
        if (!p || p->parameter != (r->parameters ? r->parameters[i] : NULL) || p->length != length
            || p->offset != at || (whole && p->whole != whole))
            return NULL;
        whole = p->whole;
        at += length;
        hint = (size_t)(p - state->pieces) + 1;
    }
    return whole && ms_tensor_count(whole) == total ? whole : NULL;
}

/* Name and parameter's name in one allocation: text is all that a piece has to free besides
 * tensors. */
static ms_status make_text(ms_engine *engine, const char *name, const char *called, char **out)
{
    size_t first = strlen(name) + 1, second = strlen(called) + 1;
    void *memory = NULL;
    ms_status status = ms_allocate(ms_engine_context(engine), first + second, "a name", &memory);
    if (status) return status;
    *out = memory;
    memcpy(*out, name, first);
    memcpy(*out + first, called, second);
    return MS_OK;
}

/* Adds the pieces that are missing, without numbers. Room and text come before the numbers, so that
 * move_in cannot fail. A piece without numbers is harmless if a later step fails: the next request
 * finds it and fills it. */
static ms_status make_pieces(ms_link_state *state, const request *r)
{
    ms_status status = ms_grow(ms_engine_context(state->engine), (void **)&state->pieces,
                               &state->capacity, state->count + r->count, sizeof(piece));
    for (uint32_t i = 0; i < r->count && !status; i++) {
        if (length_of(r, i) == 0 || find_item(state, r, i, 0)) continue;
        piece made = { .parameter = r->parameters ? ms_tensor_retain(r->parameters[i]) : NULL };
        status = make_text(state->engine, r->name, r->called[i], &made.text);
        if (status) ms_tensor_release(made.parameter);
        else state->pieces[state->count++] = made;
    }
    return status;
}

/* Copies the numbers that the state has into whole; the others are zero. The zeros come first, so
 * that padding and new pieces need no case of their own. A piece of another length (a link's option
 * has changed) starts again. */
static ms_status fill_in(ms_link_state *state, const request *r, ms_tensor *whole, bool *fresh)
{
    int64_t at = 0;
    ms_status status = ms_link_change(&ms_op_fill, 0, whole, NULL);
    for (uint32_t i = 0; i < r->count && !status; i++) {
        int64_t length = length_of(r, i);
        if (length == 0) continue;
        const piece *p = find_item(state, r, i, 0);
        if (p->length == length) {
            ms_tensor *from = NULL, *to = NULL;
            status = ms_link_span(p->whole, p->offset, length, &from);
            if (!status) status = ms_link_span(whole, at, length, &to);
            if (!status) status = ms_copy_into(state->engine, from, to);
            ms_tensor_release(from);
            ms_tensor_release(to);
        } else if (fresh) fresh[i] = true;
        at += length;
    }
    return status;
}

/* From now on the pieces are parts of whole. The former tensor of a piece is released; it lives on
 * while other pieces are parts of it. A piece that was put gets its parameter here. */
static void move_in(ms_link_state *state, const request *r, ms_tensor *whole)
{
    int64_t at = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        int64_t length = length_of(r, i);
        if (length == 0) continue;
        piece *p = find_item(state, r, i, 0);
        ms_tensor *before = p->whole;
        if (!p->parameter && r->parameters) p->parameter = ms_tensor_retain(r->parameters[i]);
        p->whole = ms_tensor_retain(whole);
        p->offset = at;
        p->length = length;
        p->parallel = r->gradients && length == ms_tensor_count(r->gradients[i]);
        ms_tensor_release(before);
        at += length;
    }
}

/* Either the tensor exists as requested, or a new one is filled from pieces that may be in several
 * old tensors: so the state follows its parameters when buckets are rebuilt. The copies are tasks
 * of the current stream, which in a chain is the communication stream; a checkpoint that reads the
 * state on another stream waits for them by the storage's hazards. */
static ms_status get(ms_link_state *state, const request *r, bool *fresh, ms_tensor **out)
{
    int64_t total = r->padding;
    for (uint32_t i = 0; i < r->count; i++) {
        total += length_of(r, i);
        if (fresh) fresh[i] = false;
    }
    ms_tensor *whole = find_whole(state, r, total);
    if (whole) {
        *out = ms_tensor_retain(whole);
        return MS_OK;
    }
    ms_status status = make_pieces(state, r);
    if (!status) status = ms_tensor_new(state->engine, MS_F32, 1, &total, &whole);
    if (!status) status = fill_in(state, r, whole, fresh);
    if (status) {
        ms_tensor_release(whole);
        return status;
    }
    move_in(state, r, whole);
    *out = whole;
    return MS_OK;
}

/* With lengths of its own the state has no padding, since it is not as long as the bucket. */
ms_status ms_link_state_tensor(ms_link_state *state, const ms_bucket *bucket, const char *name,
                               const int64_t *lengths, bool *fresh, ms_tensor **out)
{
    request r = { .name = name,
                  .parameters = bucket->parameters,
                  .gradients = bucket->gradients,
                  .called = bucket->names,
                  .lengths = lengths,
                  .count = bucket->count };
    if (!lengths) r.padding = ms_tensor_count(bucket->flat) - ms_bucket_numbers(bucket);
    return get(state, &r, fresh, out);
}

/* One item of one name: the same code as for parameters, so that saving treats both alike. */
ms_status ms_link_state_shared(ms_link_state *state, const char *name, int64_t length, bool *fresh,
                               ms_tensor **out)
{
    const char *const none = "";
    request r = { .name = name, .called = &none, .lengths = &length, .count = 1 };
    return get(state, &r, fresh, out);
}

int64_t ms_link_state_iteration(const ms_link_state *state) { return state->iteration; }
/* Links count for themselves, with the last bucket of a pass. Loading a checkpoint sets what was
 * saved. */
void ms_link_state_set_iteration(ms_link_state *state, int64_t iteration)
{
    state->iteration = iteration;
}
/* Of this rank, since the state was made; loading a checkpoint does not change it. */
ms_link_compression ms_link_state_compression(const ms_link_state *state)
{
    return state->compression;
}

/* Computed from shapes when the work is enqueued, so the host never waits for a count. */
void ms_link_state_compressed(ms_link_state *state, int64_t before, int64_t after)
{
    state->compression.before += (uint64_t)before;
    state->compression.after += (uint64_t)after;
}

/* Counts from the last line, so that a link that is resumed from a checkpoint logs once at its
 * start. */
bool ms_link_state_is_due(ms_link_state *state, int64_t every)
{
    if (state->iteration < state->due) return false;
    state->due = state->iteration + every;
    return true;
}

/* ------------------------------------------------------- saving and loading */

/* As many as ms_link_state_piece gives: those that have numbers. */
uint32_t ms_link_state_pieces(const ms_link_state *state)
{
    uint32_t count = 0;
    for (size_t i = 0; i < state->count; i++) count += state->pieces[i].whole != NULL;
    return count;
}

/* Pieces that have a name but no numbers yet are skipped, here and in the count. */
ms_status ms_link_state_piece(ms_link_state *state, uint32_t index, ms_link_piece *out)
{
    for (size_t i = 0; i < state->count; i++) {
        const piece *p = &state->pieces[i];
        if (!p->whole || index-- > 0) continue;
        *out = (ms_link_piece){ .name = p->text,
                                .parameter = parameter_name(p),
                                .parallel = p->parallel };
        return ms_link_span(p->whole, p->offset, p->length, &out->tensor);
    }
    return ms_engine_fail(state->engine, MS_ERROR_ARGUMENT,
                          "a link's state: there is no piece of that number");
}

/* The piece has no parameter yet; find gives it to the first one of that name. */
ms_status ms_link_state_put(ms_link_state *state, const char *name, const char *parameter,
                            ms_tensor *tensor)
{
    piece made = { .length = ms_tensor_count(tensor) };
    ms_status status = ms_grow(ms_engine_context(state->engine), (void **)&state->pieces,
                               &state->capacity, state->count + 1, sizeof(piece));
    if (!status) status = make_text(state->engine, name, parameter, &made.text);
    if (!status) status = ms_link_flat_copy(tensor, &made.whole);
    if (status) drop_piece(state, &made);
    else state->pieces[state->count++] = made;
    return status;
}
