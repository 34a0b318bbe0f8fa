/* lockstep.c: ranks that use different units, or have different numbers of inputs.
 *
 * Collectives need all ranks, so ranks agree on the next one before each of them: every rank's host
 * says what it needs next, and the first of these in a fixed order is done by all. A rank that did
 * not need it takes part: it gives a gathered unit's memory back at once, and contributes zeros to
 * a reduction (or what passes without synchronization have left). A rank goes on when what it
 * needed was done. The end of a forward and the end of a backward are such needs as well, and come
 * last, so all ranks are in the same pass. A rank without inputs left needs nothing and takes part
 * until no rank needs anything.
 *
 * The order: within a pass, forward comes before backward. Forward takes units in the order in
 * which they were first gathered, and new ones in the order of their numbers; backward takes them
 * in the reverse order, and of one unit first its gather, then its reduction. Any order that is the
 * same on all ranks would be right; this one makes most ranks need most units once.
 *
 * A unit whose backward runs on some rank is not reduced yet: that rank's gradients are not
 * complete. Each rank tells in which units its backward is. Where ranks wait for each other in this
 * way, their gradients stay whole, as without synchronization, until the end of the backward.
 *
 * This is done with find_unused and in a join only, by one exchange between hosts (ms_group_share)
 * before each collective. Elsewhere the comparison of collectives finds ranks whose orders differ
 * (unit.c). What ranks without inputs repeat between passes (clipping, steps) is in
 * lua/moonshard/parallel/fsdp/join.lua, which uses ms_fsdp_call and ms_fsdp_follow. */
#include "fsdp/lockstep.h"

#include <string.h>

#include "fsdp/flat_param.h"
#include "fsdp/pass.h"
#include "fsdp/reduce.h"
#include "fsdp/static_memory.h"
#include "fsdp/unit.h"

typedef enum wish_kind {
    WISH_FORWARD,
    WISH_FORWARD_END,
    WISH_BACKWARD, /* a gather, or a reduction */
    WISH_BACKWARD_END,
    WISH_CALL
} wish_kind;

/* What a rank needs. key orders wishes of one kind in a pass. */
typedef struct wish {
    wish_kind kind;
    bool reduce;
    uint32_t key, unit;
} wish;

/* A rank's words: its wish as one number, by which wishes are ordered; the unit, whether the
 * gradients there are multiplied by a loss scale, whether the pass leaves replicas out, and whether
 * the unit is gathered in full precision; and
 * from word 2 on one bit for each unit whose
 * backward runs. */
enum { WORD_WISH, WORD_UNIT, WORD_BUSY, BITS = 62 };
enum { FLAG_MARKED = 1, FLAG_PARTIAL = 2, FLAG_FULL = 4, FLAG_BITS = 3 }; /* with the unit */
#define NOTHING INT64_MAX
/* In place of a rank that was chosen: no rank needs anything; what could be done next is the end of
 * a pass only, and reductions wait for each other. */
#define NO_RANK UINT32_MAX
#define ALL_WAIT (UINT32_MAX - 1)

static uint32_t words_of(const ms_fsdp *fsdp)
{
    return WORD_BUSY + (fsdp->unit_count + BITS - 1) / BITS;
}

ms_status ms_lockstep_open(ms_fsdp *fsdp)
{
    size_t ranks = ms_group_size(fsdp->group);
    return ms_allocate(ms_engine_context(fsdp->source.engine),
                       (ranks + 1) * words_of(fsdp) * sizeof *fsdp->same.words, "fsdp",
                       (void **)&fsdp->same.words);
}

bool ms_lockstep_is_on(const ms_fsdp *fsdp)
{
    return (fsdp->same.find_unused || fsdp->same.joining) && ms_group_has_others(fsdp->group);
}

/* ------------------------------------------------------------------ wishes */

/* The place of a unit in forward; units that were never gathered come last. */
static uint32_t place_of(const ms_unit *unit)
{
    return unit->turn ? unit->turn : unit->fsdp->same.turns + 1 + unit->index;
}

static wish for_unit(const ms_unit *unit, wish_kind kind, bool reduce)
{
    uint32_t last = 2 * unit->fsdp->unit_count + 1, place = place_of(unit);
    return (wish){ .kind = kind,
                   .reduce = reduce,
                   .key = kind == WISH_FORWARD ? place : 2 * (last - place) + reduce,
                   .unit = unit->index };
}

/* Units change places when they are gathered for the first time. */
static wish renewed(const ms_fsdp *fsdp, wish w)
{
    bool of_unit = w.kind == WISH_FORWARD || w.kind == WISH_BACKWARD;
    return of_unit ? for_unit(&fsdp->units[w.unit], w.kind, w.reduce) : w;
}

/* Ordered by pass, kind and key. */
static int64_t number_of(const ms_fsdp *fsdp, const wish *w)
{
    return (int64_t)((fsdp->same.forwards & INT32_MAX) << 32 | (uint64_t)w->kind << 28 | w->key);
}

static bool is_marked(const ms_unit *unit)
{
    for (uint32_t f = 0; f < unit->count; f++)
        for (uint32_t i = 0; i < unit->flats[f].count; i++)
            if (unit->flats[f].members[i].scaled) return true;
    return false;
}

static void write_words(const ms_fsdp *fsdp, const wish *w, int64_t *words)
{
    memset(words, 0, words_of(fsdp) * sizeof *words);
    words[WORD_WISH] = w ? number_of(fsdp, w) : NOTHING;
    if (!w) return;
    words[WORD_UNIT] = (int64_t)w->unit << FLAG_BITS;
    if (w->reduce && is_marked(&fsdp->units[w->unit])) words[WORD_UNIT] |= FLAG_MARKED;
    if (!fsdp->replica_sync) words[WORD_UNIT] |= FLAG_PARTIAL;
    if (fsdp->units[w->unit].full) words[WORD_UNIT] |= FLAG_FULL;
    for (uint32_t u = 0; u < fsdp->unit_count; u++)
        if (fsdp->units[u].phase == MS_UNIT_BACKWARD)
            words[WORD_BUSY + u / BITS] |= (int64_t)1 << u % BITS;
}

/* ----------------------------------------------------------------- exchange */

/* The words of rank r after an exchange. */
static const int64_t *words_from(const ms_fsdp *fsdp, uint32_t r)
{
    return fsdp->same.words + (r + 1) * (size_t)words_of(fsdp);
}

static wish_kind kind_of(int64_t number) { return (wish_kind)(number >> 28 & 15); }

static bool is_reduction(const int64_t *words)
{
    return kind_of(words[WORD_WISH]) == WISH_BACKWARD && (words[WORD_WISH] & 1);
}

static uint32_t unit_of(const int64_t *words) { return (uint32_t)(words[WORD_UNIT] >> FLAG_BITS); }

/* Whether some rank's gradients of the unit are not complete. */
static bool is_busy(const ms_fsdp *fsdp, uint32_t unit)
{
    for (uint32_t r = 0; r < ms_group_size(fsdp->group); r++)
        if (words_from(fsdp, r)[WORD_BUSY + unit / BITS] >> unit % BITS & 1) return true;
    return false;
}

static long long forward_of(const ms_fsdp *fsdp, uint32_t rank)
{
    return words_from(fsdp, rank)[WORD_WISH] >> 32;
}

/* Ranks whose loss does not depend on the model run no backward, and would step without the
 * gradients of the others. */
static ms_status check_passes(ms_fsdp *fsdp)
{
    uint32_t behind = NO_RANK, ahead = NO_RANK;
    for (uint32_t r = 0; r < ms_group_size(fsdp->group); r++) {
        if (words_from(fsdp, r)[WORD_WISH] == NOTHING) continue;
        if (behind == NO_RANK || forward_of(fsdp, r) < forward_of(fsdp, behind)) behind = r;
        if (ahead == NO_RANK || forward_of(fsdp, r) > forward_of(fsdp, ahead)) ahead = r;
    }
    if (behind == NO_RANK || forward_of(fsdp, behind) == forward_of(fsdp, ahead)) return MS_OK;
    return ms_engine_fail(fsdp->source.engine, MS_ERROR_MISMATCH,
                          "fsdp: rank %u has begun forward %lld while rank %u is in the forward or "
                          "backward of number %lld: run the same forwards and backwards on all "
                          "ranks (a loss of 0 * output:sum() runs one without inputs)",
                          ahead, forward_of(fsdp, ahead), behind, forward_of(fsdp, behind));
}

/* The rank whose wish is done next, or NO_RANK, or ALL_WAIT. */
static ms_status choose(ms_fsdp *fsdp, uint32_t *chosen)
{
    int64_t least = NOTHING;
    bool any_waits = false;
    *chosen = NO_RANK;
    fsdp->same.live = 0;
    ms_status status = check_passes(fsdp);
    for (uint32_t r = 0; r < ms_group_size(fsdp->group) && !status; r++) {
        const int64_t *words = words_from(fsdp, r);
        if (words[WORD_WISH] == NOTHING) continue;
        fsdp->same.live++;
        if (*chosen == NO_RANK) *chosen = ALL_WAIT;
        bool waits = is_reduction(words) && is_busy(fsdp, unit_of(words));
        any_waits |= waits;
        if (waits || words[WORD_WISH] >= least) continue;
        least = words[WORD_WISH];
        *chosen = r;
    }
    /* The end of a pass is agreed on only when no reduction of that pass is left to wait for. */
    if (any_waits && kind_of(least) != WISH_FORWARD && kind_of(least) != WISH_BACKWARD)
        *chosen = ALL_WAIT;
    return status;
}

static uint64_t now(const ms_fsdp *fsdp)
{
    const ms_os *os = ms_engine_context(fsdp->source.engine)->os;
    return os->monotonic_ns(os->user);
}

static ms_status exchange(ms_fsdp *fsdp, const wish *w, uint32_t *chosen)
{
    ms_sharing sharing = { .kind = MS_ALL_GATHER,
                           .dtype = MS_I64,
                           .count = words_of(fsdp),
                           .label = "what fsdp needs next" };
    uint64_t before = now(fsdp);
    write_words(fsdp, w, fsdp->same.words);
    ms_status status =
        ms_group_share(fsdp->group, &sharing, fsdp->same.words, fsdp->same.words + words_of(fsdp));
    fsdp->same.stats.count++;
    fsdp->same.stats.wait_ns += now(fsdp) - before;
    return status ? status : choose(fsdp, chosen);
}

/* ------------------------------------------------------------------ serving */

/* A rank that does not use the unit gives the memory back at once. All gather in the precision of
 * the rank that uses it. */
static ms_status gather(ms_unit *unit, bool own, bool full)
{
    ms_status status = own ? MS_OK : ms_unit_set_full(unit, full);
    bool keep = own || unit->place != MS_UNIT_SHARDED;
    if (!status) status = ms_unit_gather_again(unit);
    return status || keep ? status : ms_unit_reshard(unit);
}

static ms_status serve(ms_fsdp *fsdp, const int64_t *words, bool own)
{
    ms_unit *unit = &fsdp->units[unit_of(words)];
    ms_status status = MS_OK;
    bool full = words[WORD_UNIT] & FLAG_FULL;
    switch (kind_of(words[WORD_WISH])) {
    case WISH_FORWARD:
        if (!unit->turn) unit->turn = ++fsdp->same.turns;
        return gather(unit, own, full);
    case WISH_BACKWARD:
        if (!is_reduction(words)) return gather(unit, own, full);
        if (!own) status = ms_pass_let_go(unit);
        if (!own && !status)
            status = ms_unit_prepare_reduction(unit, words[WORD_UNIT] & FLAG_MARKED);
        return status ? status : ms_pass_reduce(unit);
    case WISH_BACKWARD_END:
        fsdp->same.pass_stats = fsdp->same.stats;
        fsdp->same.stats = (ms_lockstep_stats){ 0 };
        break;
    case WISH_FORWARD_END:
    case WISH_CALL: break;
    }
    return MS_OK;
}

/* Blocks until all ranks have done what this one needs. */
static ms_status agree(ms_fsdp *fsdp, wish w)
{
    for (;;) {
        uint32_t chosen;
        w = renewed(fsdp, w);
        int64_t number = number_of(fsdp, &w);
        ms_status status = exchange(fsdp, &w, &chosen);
        if (status) return status;
        if (chosen == ALL_WAIT && !w.reduce) continue;
        if (chosen == ALL_WAIT) return ms_unit_restore_gradients(&fsdp->units[w.unit]);
        const int64_t *words = words_from(fsdp, chosen);
        bool own = words[WORD_WISH] == number;
        status = serve(fsdp, words, own);
        if (status || own) return status;
    }
}

/* -------------------------------------------------------------------- edges */

static bool is_sharded(const ms_unit *unit)
{
    for (uint32_t f = 0; f < unit->count; f++)
        if (ms_flat_param_is_sharded(&unit->flats[f])) return true;
    return false;
}

ms_status ms_lockstep_on_gather(ms_unit *unit)
{
    ms_fsdp *fsdp = unit->fsdp;
    if (!ms_lockstep_is_on(fsdp) || !is_sharded(unit) || ms_unit_is_fresh(unit))
        return ms_unit_gather(unit);
    return agree(fsdp, for_unit(unit, fsdp->now.in_backward ? WISH_BACKWARD : WISH_FORWARD, false));
}

ms_status ms_lockstep_on_reduction(ms_unit *unit)
{
    if (!ms_lockstep_is_on(unit->fsdp) || unit->settings.trainable == 0)
        return ms_pass_reduce(unit);
    return agree(unit->fsdp, for_unit(unit, WISH_BACKWARD, true));
}

ms_status ms_lockstep_on_end(ms_fsdp *fsdp, bool of_backward)
{
    if (!ms_lockstep_is_on(fsdp)) return MS_OK;
    return agree(fsdp, (wish){ .kind = of_backward ? WISH_BACKWARD_END : WISH_FORWARD_END });
}

/* ------------------------------------------------------------ uneven inputs */

/* Ranks have gathered different units in a join, and after it all must gather the same ones. */
ms_status ms_fsdp_set_joining(ms_fsdp *fsdp, bool yes, bool live_divisor)
{
    ms_status status = MS_OK;
    fsdp->same.joining = yes;
    ms_fsdp_clear_static_memory(fsdp); /* ranks drop at different places now, or have done so */
    fsdp->same.live_divisor = yes && live_divisor;
    /* A rank that follows has taken over the others' setting. */
    if (yes) fsdp->same.replica_sync_before = fsdp->replica_sync;
    else fsdp->replica_sync = fsdp->same.replica_sync_before;
    for (uint32_t u = 0; u < fsdp->unit_count && !status && !yes; u++)
        if (fsdp->units[u].place == MS_UNIT_GATHERED) status = ms_unit_reshard(&fsdp->units[u]);
    return status;
}

static ms_fsdp_live live_ranks(const ms_fsdp *fsdp)
{
    uint32_t ranks = ms_group_size(fsdp->group);
    ms_fsdp_live live = { .first = ranks, .absent = ranks };
    for (uint32_t r = ranks; r-- > 0;)
        if (words_from(fsdp, r)[WORD_WISH] == NOTHING) live.absent = r;
        else {
            live.count++;
            live.first = r;
        }
    return live;
}

ms_status ms_fsdp_call(ms_fsdp *fsdp, uint32_t number, ms_fsdp_live *live)
{
    uint32_t ranks = ms_group_size(fsdp->group);
    *live = (ms_fsdp_live){ .count = ranks, .absent = ranks };
    if (!ms_lockstep_is_on(fsdp)) return MS_OK;
    ms_status status = agree(fsdp, (wish){ .kind = WISH_CALL, .key = number });
    if (!status) *live = live_ranks(fsdp);
    return status;
}

/* After a pass of the others: what comes next sees its gradients, as after a backward. */
static ms_status follow_end(ms_fsdp *fsdp, wish_kind kind)
{
    return kind == WISH_BACKWARD_END ? ms_pass_end(fsdp) : MS_OK;
}

ms_status ms_fsdp_follow(ms_fsdp *fsdp, bool *more, uint32_t *number, ms_fsdp_live *live)
{
    *more = false;
    *number = 0;
    while (ms_lockstep_is_on(fsdp)) {
        uint32_t chosen;
        ms_status status = exchange(fsdp, NULL, &chosen);
        if (status || chosen == NO_RANK) return status;
        if (chosen == ALL_WAIT) continue;
        const int64_t *words = words_from(fsdp, chosen);
        wish_kind kind = kind_of(words[WORD_WISH]);
        /* This rank is in the pass of the others. */
        fsdp->same.forwards = (uint64_t)(words[WORD_WISH] >> 32);
        fsdp->replica_sync = !(words[WORD_UNIT] & FLAG_PARTIAL);
        *live = live_ranks(fsdp);
        *number = (uint32_t)(words[WORD_WISH] & 0xfffffff);
        *more = kind == WISH_CALL;
        if (*more) return MS_OK;
        status = serve(fsdp, words, false);
        if (!status) status = follow_end(fsdp, kind);
        if (status) return status;
    }
    return MS_OK;
}

ms_lockstep_stats ms_fsdp_lockstep_stats(const ms_fsdp *fsdp) { return fsdp->same.pass_stats; }
