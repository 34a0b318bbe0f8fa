/* moonshard/fsdp.h: sharded models: each rank keeps a part of every parameter, of its gradient and
 * of its optimizer's state, and has whole parameters only while they are used.
 *
 * Words
 * - A unit is a set of modules whose parameters are gathered together. Unit 0 is the root.
 * - A flat parameter is what a unit has of one dtype, trainable or not, shared by the same ranks,
 *   computed with in one dtype, and gathered in one form: its parameters end to end, and zeros so
 *   that the length divides by the number of ranks that shard. A shard is one rank's equal part of
 *   it, a piece the part of one parameter that is in this rank's shard.
 * - The layout says how shards are cut. Flat: anywhere, with the zeros after the last parameter. By
 *   rows: rank r has rows [r n, (r + 1) n) of each parameter, n the number of rows by the number of
 *   ranks, rounded up, with zeros for the rows that are missing to that.
 * - An edge is a moment at which a unit's use begins or ends: before and after its forward, before
 *   its backward (the first gradient of an output of its forward), and after it (all gradients of
 *   its parameters, or of its inputs, are there).
 *
 * Invariants
 * - A parameter's tensor is its piece in the shard: 1-D, or rows in the parameter's trailing shape.
 *   While its unit is used, the same tensor is the whole parameter, in its own shape. Optimizers
 *   see pieces: their states have the pieces' shapes.
 * - Whole parameters are in a storage that is dropped while the unit is not gathered. A gather
 *   restores it: what forward saved is right in backward unless a shard was written in between,
 *   which backward reports. A parameter with an empty piece has it in a part of the shard of its
 *   own, so that a step is noticed on every rank.
 * - Whole parameters may have a lower precision than the shards, which optimizers step. A gather
 *   then casts this rank's shard and travels in the dtype of computing. Each parameter's gradient,
 *   once backward has added up all its uses, is rounded to the dtype of the reduction, in which
 *   gradients of passes without synchronization add up. The reduced shard is cast to the dtype of
 *   the pieces, in which gradients of synchronized passes add up. Until it is reduced, a parameter
 *   shows no gradient where the dtypes of computing and of the reduction differ.
 * - A coded parameter is gathered as 8-bit floats, of which the scale is that of the whole
 *   parameter, also where ranks have pieces of it. Shards, and what optimizers step, stay exact.
 * - Gathers run on channel 2 of the group that shards, reductions on channel 1, so that neither
 *   waits for the other. All ranks enqueue both in the same order; the comparison of collectives
 *   ends a job in which they do not.
 * - A unit's gradients are reduced when its backward has ended. A parameter without gradient
 *   contributes zeros. The result is the mean over `divisor` ranks, as a shard; it is added to the
 *   shards of passes before that nothing has consumed.
 * - Gradients of a pass that is not synchronized stay whole on their rank until a synchronized pass
 *   adds to them and reduces the sum.
 * - Buckets of a sharded model are its trainable flat parameters, in the order in which backward
 *   comes to their units, the root's last: bucket `index` is the one whose `place` it is. Links see
 *   the order of launches as its `index`, and `is_last` is the last reduction of the pass, also
 * where units stay unused: a chain with links that ask for it holds back one unit's reduction.
 * - Where backward runs in two parts (grad.h), a unit is gathered for the first one, and for the
 *   rest only if that reads its values. The rest reduces, and ends the pass. With find_unused and
 *   in a join such a backward is an error.
 * - Optimizers may step on a stream of their own. The next gather of a unit waits for the steps of
 *   its pieces, and nothing else does.
 * - Waits are stream waits. The host never blocks at an edge, but with find_unused and in a join:
 *   there ranks tell each other which unit they need next, and all take part in its gather or
 *   reduction, also those that do not use it. Gathers ahead of their use do not fit this: there are
 *   none. Without the two, all ranks use the same units in the same order. */
#ifndef MOONSHARD_FSDP_H
#define MOONSHARD_FSDP_H

#include "moonshard/grad.h"
#include "moonshard/hook.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ms_fsdp ms_fsdp;

typedef struct ms_fsdp_parameter {
    ms_tensor *tensor;
    const char *name;
    uint32_t unit;
    bool keeps_dtype; /* `computes` and `reduces` of its unit do not apply to it */
    /* NULL, or the ranks that share this parameter alone: others hold other parameters in its
     * place. It is sharded over these ranks, and its gradients are summed over them; a mean is over
     * as many ranks as the model's. All such parameters of a rank have one group. */
    ms_group *group;
    /* Gathers send it as 8-bit floats (E4M3), a byte for each number, with a power of two as scale
     * for the whole parameter, and forward and backward compute with what these represent; gathers
     * for summon, states and forwards in the shards' dtype are exact. It computes in f32 or bf16.
     * All ranks that share it say the same. */
    bool coded;
} ms_fsdp_parameter;

typedef struct ms_fsdp_unit_options {
    const char *name; /* for messages: that of its module; "" for the root */
    bool reshard_after_forward;
    uint32_t modules; /* how many it has, if they run apart; 0: 1 */
    /* Float dtypes; with the flag false, each parameter's own. computes: of whole parameters while
     * the unit is used. reduces: in which whole gradients are added up and reduced. */
    bool has_computes, has_reduces;
    ms_dtype computes, reduces;
} ms_fsdp_unit_options;

/* When the unit that comes next in backward is gathered: never, before a unit's backward, or after
 * it. */
typedef enum ms_prefetch_mode {
    MS_PREFETCH_NONE,
    MS_PREFETCH_BACKWARD_PRE,
    MS_PREFETCH_BACKWARD_POST
} ms_prefetch_mode;

typedef enum ms_fsdp_layout { MS_FSDP_FLAT, MS_FSDP_ROWS } ms_fsdp_layout;

typedef struct ms_fsdp_options {
    ms_fsdp_layout layout;
    ms_group *group; /* all ranks whose gradients are summed */
    /* The ranks that share one copy of the parameters, and those that hold the same shard. NULL:
     * all ranks of the group share one copy. A group of this rank alone in the first place:
     * parameters are not sharded. */
    ms_group *shards, *replicas;
    /* Of the ranks of `shards`, those that keep equal parts of a unit's parameters between its
     * forward and its backward, where units are resharded after forward. NULL: all keep shards. */
    ms_group *near;
    const ms_fsdp_unit_options *units;
    uint32_t unit_count;
    ms_prefetch_mode prefetch;
    bool forward_ahead; /* see ms_fsdp_set_prefetch */
    bool planner;
    bool find_unused; /* ranks may use different units */
    /* Shards, the gradients of pieces and states of optimizers are in the second pool
     * (ms_storage_new_offloaded). A gather copies the shard first; a reduction copies its result.
     */
    bool offload;
    bool low_gradients; /* the gradients of pieces have the dtype of the reduction, not their own */
    /* Gathers wait until at most this many units have been used since, and as many bytes; 0: 2, and
     * no limit. Backward waits until at most so many reductions are under way; 0: 2. */
    uint32_t max_in_flight, max_reductions;
    uint64_t max_in_flight_bytes;
    const ms_link *links; /* a native chain; link_count 0: reduce with avg */
    uint32_t link_count;
    ms_comm_hook hook; /* NULL: links are used */
    void *hook_user;
    void (*hook_free)(void *user); /* may be NULL */
    uint32_t hook_links;
    bool hook_whole; /* some link of the hook holds results until the last bucket of a pass */
    bool hook_once;  /* some link of the hook must see all of a unit's gradients at once (clip) */
} ms_fsdp_options;

/* Shards the parameters: float leaves, each once, none of another wrapped model. Copies or retains
 * all that it gets; takes hook_user over if it succeeds. All ranks have the same values: nothing is
 * communicated here. The engine frees the model at the latest. */
MS_API ms_status ms_fsdp_new(ms_engine *engine, const ms_fsdp_options *options,
                             const ms_fsdp_parameter *parameters, uint32_t count, ms_fsdp **out);
/* For parameters that were on "meta", which are zeros at first: between the two calls those of the
 * unit are whole and are written, each rank's alike, or, with `copy`, as the first rank writes
 * them. All ranks call both for the same units, before the first pass. */
MS_API ms_status ms_fsdp_begin_values(ms_fsdp *fsdp, uint32_t unit);
MS_API ms_status ms_fsdp_end_values(ms_fsdp *fsdp, uint32_t unit, bool copy);
/* In their place, where each rank writes its own pieces afterwards. */
MS_API ms_status ms_fsdp_have_values(ms_fsdp *fsdp, uint32_t unit);
/* Removes all that was installed. Parameters stay pieces. NULL is allowed. */
MS_API void ms_fsdp_free(ms_fsdp *fsdp);
/* The model as a gradient source (hook.h), with which buckets, statistics and on_reduced are asked
 * for; it ends with the model. */
MS_API ms_gradient_source *ms_fsdp_source(ms_fsdp *fsdp);
/* Gathers all parameters for good, and drops their gradients; then the model is as if it had never
 * been wrapped, and `fsdp` can only be freed. All ranks call it, between passes. */
MS_API ms_status ms_fsdp_unwrap(ms_fsdp *fsdp);
/* The name of the first unit, among the sharded models of this engine, to whose parameters a
 * backward from this tensor comes: borrowed, NULL if there is none. Walks the whole graph. */
MS_API ms_status ms_fsdp_reached(ms_engine *engine, ms_tensor *tensor, const char **unit);

/* Around the forward of a unit's module. The inputs' and outputs' gradients tell when the unit's
 * backward ends and begins. Calls of one unit may be nested. A unit of several modules stays
 * gathered from the forward of the first until all have run, or the root's forward ends. */
MS_API ms_status ms_fsdp_before_forward(ms_fsdp *fsdp, uint32_t unit, ms_tensor *const *inputs,
                                        uint32_t count);
MS_API ms_status ms_fsdp_after_forward(ms_fsdp *fsdp, uint32_t unit, ms_tensor *const *outputs,
                                       uint32_t count);

/* Says which of the unit's modules runs, counted from 0, before ms_fsdp_before_forward. */
MS_API void ms_fsdp_begin_module(ms_fsdp *fsdp, uint32_t unit, uint32_t module);

/* Whether the backwards to come reduce. Returns what it was; true at first. */
MS_API bool ms_fsdp_set_sync(ms_fsdp *fsdp, bool yes);
/* Reduces the gradients that passes without synchronization have left, as the end of a synchronized
 * backward does, unit by unit. All ranks call it, between passes. MS_ERROR_STATE if there are none.
 */
MS_API ms_status ms_fsdp_reduce(ms_fsdp *fsdp);
/* Hybrid shards: whether they also reduce between replicas. Without, the sums over the shard group
 * are kept, and are a part of the next reduction between replicas; until then they are no gradient.
 * Returns what it was; true at first. It has no effect unless ms_fsdp_can_be_partial: the kind is
 * hybrid, and a native chain reduces by sum or avg. */
MS_API bool ms_fsdp_set_replica_sync(ms_fsdp *fsdp, bool yes);
MS_API bool ms_fsdp_can_be_partial(const ms_fsdp *fsdp);
/* Whether the forwards to come, and their backwards, compute in the dtype of the shards. Nothing
 * changes where that is the dtype of computing already. */
MS_API void ms_fsdp_set_full(ms_fsdp *fsdp, bool yes);
/* Whether the unit was last used in the dtype of the shards because of that. */
MS_API bool ms_fsdp_is_full(const ms_fsdp *fsdp, uint32_t unit);
/* What travels in gathers in place of shards: a part of a unit is one of its flat parameters. Both
 * functions are called on the host when a gather is enqueued, with the stream of gathers current
 * and recording off, and enqueue there. The same shard must give the same result each time: what
 * forward has used, backward uses again.
 * before: shard is 1-D, in the dtype of computing; *sent (owned) is what travels, of one length and
 * dtype on all ranks. NULL: the shard.
 * after: gathered is what all ranks sent, one after another; *whole (owned) is the flat parameter
 * as its shards are one after another, in any float dtype. NULL: what was gathered.
 * Gathers for summon, states and forwards in the shards' dtype (ms_fsdp_set_full) go without, and
 * so does a parameter that is not sharded. */
typedef struct ms_gather_extension {
    ms_status (*before)(void *user, uint32_t unit, uint32_t part, ms_tensor *shard,
                        ms_tensor **sent);
    ms_status (*after)(void *user, uint32_t unit, uint32_t part, ms_tensor *gathered,
                       ms_tensor **whole);
    void *user;
    void (*free)(void *user); /* may be NULL */
} ms_gather_extension;
/* Once, before the first gather. Takes user over. */
MS_API void ms_fsdp_extend(ms_fsdp *fsdp, ms_gather_extension extension);
/* Where a parameter is in the shards of a part: elements [at, at + count) of this rank's. By rows
 * they are rows of the parameter, as many on each rank, zeros included. */
typedef struct ms_shard_span {
    const char *name;
    const int64_t *shape; /* of the whole parameter */
    uint32_t dims;
    int64_t at, count;
} ms_shard_span;
/* Span `index` of a part; false past the last span and the last part. */
MS_API bool ms_fsdp_span_get(const ms_fsdp *fsdp, uint32_t unit, uint32_t part, uint32_t index,
                             ms_shard_span *out);
/* In these functions: whether the shard has been written since it was gathered so before. */
MS_API bool ms_fsdp_part_is_fresh(const ms_fsdp *fsdp, uint32_t unit, uint32_t part);
/* Elements of each rank's shard of a part, zeros included; 0 past the last part. */
MS_API int64_t ms_fsdp_part_length(const ms_fsdp *fsdp, uint32_t unit, uint32_t part);
/* What gathers make of a coded parameter of which x is all of the numbers: a new tensor, owned, of
 * the numbers that E4M3 codes of x represent, with the least power of two as scale at which the
 * greatest |x| is at most 448. x is f32 or bf16. Not recorded. */
MS_API ms_status ms_fp8_round(ms_engine *engine, ms_tensor *x, ms_tensor **out);
/* After forward, after backward; after backward is true at first. */
MS_API void ms_fsdp_set_reshard(ms_fsdp *fsdp, uint32_t unit, bool after_forward,
                                bool after_backward);
/* Whether a unit is gathered for its backward; true at first. Without, a backward that reads the
 * values of its parameters is an error; that of an embedding reads none. */
MS_API void ms_fsdp_set_unshard_in_backward(ms_fsdp *fsdp, uint32_t unit, bool yes);
/* From the next pass on. forward_ahead: when a unit's forward begins, the unit that was used next
 * in the forward before is gathered. planner: plans will be set; where there is none `mode` holds,
 * and the times of uses are measured. Drops all plans. */
MS_API ms_status ms_fsdp_set_prefetch(ms_fsdp *fsdp, ms_prefetch_mode mode, bool forward_ahead,
                                      bool planner);

/* Passes with a backward, and forwards that are not recorded, have orders of their own. */
typedef enum ms_schedule_kind { MS_TRAINING, MS_EVALUATION, MS_SCHEDULES } ms_schedule_kind;
/* A use of a unit: its forward, or its backward. Uses up to number `last` begin before it ends, and
 * it is the use that ends as number `ended`. Both count from 0. */
typedef struct ms_fsdp_use {
    uint32_t unit, last, ended;
    bool backward;
} ms_fsdp_use;
/* The uses of the last whole pass, in the order in which they began. Borrowed until the next pass.
 * changes: how often the order was another one than before, the first included. False before the
 * first pass. */
typedef struct ms_fsdp_order {
    const ms_fsdp_use *uses;
    uint32_t count;
    uint64_t passes, changes;
} ms_fsdp_order;
MS_API bool ms_fsdp_order_get(const ms_fsdp *fsdp, ms_schedule_kind kind, ms_fsdp_order *out);

/* Whether a unit is resharded when a use has ended. */
typedef enum ms_keep { MS_KEEP_AS_USUAL, MS_KEEP, MS_KEEP_NOT } ms_keep;
/* What is done at a use: units to gather when it begins, and when it has ended, in order. Units
 * that are in memory are passed over. */
typedef struct ms_fsdp_entry {
    const uint32_t *gather, *after;
    uint32_t gather_count, after_count;
    ms_keep keep;
} ms_fsdp_entry;
/* An entry for each use of the order. The plan holds for passes of this kind until the order
 * changes. Copies all. Between passes. */
MS_API ms_status ms_fsdp_set_plan(ms_fsdp *fsdp, ms_schedule_kind kind,
                                  const ms_fsdp_entry *entries, uint32_t count);
/* Gathers a unit now, outside of its edges, and gives its memory back. */
MS_API ms_status ms_fsdp_unshard(ms_fsdp *fsdp, uint32_t unit, ms_point *ready);
MS_API ms_status ms_fsdp_reshard(ms_fsdp *fsdp, uint32_t unit);
/* Between forward and backward, or a pass and the next: whole parameters in these units, in the
 * dtype of the shards, until ms_fsdp_summon_end, which keeps what was written there if `write`.
 * All ranks call both, but end is for those that are present. */
typedef struct ms_summon_options {
    bool gradients; /* with whole gradients */
    /* Gathered values are in the second pool (ms_storage_new_offloaded). They go there one unit
     * after another, so the first one has one unit at the most. */
    bool offload;
    bool absent; /* this rank only takes part in the gathers */
} ms_summon_options;
MS_API ms_status ms_fsdp_summon(ms_fsdp *fsdp, const uint32_t *units, uint32_t count,
                                ms_summon_options options);
MS_API ms_status ms_fsdp_summon_end(ms_fsdp *fsdp, bool write);
/* After a forward or backward that failed alike on all ranks: drops what was under way, and all
 * gradients. */
MS_API void ms_fsdp_reset(ms_fsdp *fsdp);

/* Ranks with different numbers of inputs. All ranks call set_joining before their inputs and after
 * them. live_divisor: means are over the ranks that have inputs left. A
 * rank that has no inputs left calls follow, which takes part in the passes of the others. It
 * returns with *more when they make a call that is theirs alone (ms_fsdp_call, all of them with the
 * same number), and without when no rank has inputs left. Both block. Without other ranks, follow
 * returns at once, and a call is nothing. */
typedef struct ms_fsdp_live {
    uint32_t count;         /* ranks that have inputs left */
    uint32_t first, absent; /* the lowest rank that has some, and that has none (or the size) */
} ms_fsdp_live;
MS_API ms_status ms_fsdp_set_joining(ms_fsdp *fsdp, bool yes, bool live_divisor);
MS_API ms_status ms_fsdp_call(ms_fsdp *fsdp, uint32_t number, ms_fsdp_live *live);
MS_API ms_status ms_fsdp_follow(ms_fsdp *fsdp, bool *more, uint32_t *number, ms_fsdp_live *live);
/* Of the last pass: how often ranks have told each other what they need, and for how long this one
 * has waited for the others. */
typedef struct ms_lockstep_stats {
    uint64_t count, wait_ns;
} ms_lockstep_stats;
MS_API ms_lockstep_stats ms_fsdp_lockstep_stats(const ms_fsdp *fsdp);

/* What a forecast is made from. Times are in ms; those of computing are without that of other
 * uses. */
typedef struct ms_prefetch_use {
    uint32_t unit, last, ended; /* as in ms_fsdp_use; unit below the view's units */
    bool needs_values, stays;   /* needs_values: it is gathered; stays: after it, as usual */
    double compute_ms, reduce_ms, reduce_link_ms;
} ms_prefetch_use;
/* What a gather of a unit takes, and for how much of that it has the link for itself. */
typedef struct ms_prefetch_unit {
    double gather_ms, gather_link_ms;
} ms_prefetch_unit;
/* uses: count, in order of their begin; units: unit_count. The limits are 1 or more. */
typedef struct ms_prefetch_view {
    const ms_prefetch_use *uses;
    const ms_prefetch_unit *units;
    uint32_t count, unit_count, max_gathers, max_reductions;
} ms_prefetch_view;
/* How long a pass takes with a plan, in ms; forecast.c has the model. entries: one for each use. */
MS_API ms_status ms_prefetch_forecast(ms_context *context, const ms_prefetch_view *view,
                                      const ms_fsdp_entry *entries, double *ms);

/* This rank's piece of parameter `index`: elements [first, first + count) of it. */
typedef struct ms_fsdp_piece {
    ms_tensor *tensor; /* borrowed */
    const char *name;
    uint32_t unit, dims;
    const int64_t *shape; /* of the whole parameter */
    int64_t first, count;
} ms_fsdp_piece;
/* False past the last. Pieces are in the order of units, flat parameters and the list of
 * parameters. */
MS_API bool ms_fsdp_piece_get(const ms_fsdp *fsdp, uint32_t index, ms_fsdp_piece *out);
/* The same elements of the rank with that number in the group that shards parameter `index`; count
 * 0 also past its ranks. */
MS_API void ms_fsdp_piece_of_rank(const ms_fsdp *fsdp, uint32_t index, uint32_t rank,
                                  int64_t *first, int64_t *count);
/* The elements of piece `index` as a 1-D tensor, owned: the memory of the shard, also while the
 * parameter's own tensor is whole. */
MS_API ms_status ms_fsdp_piece_tensor(ms_fsdp *fsdp, uint32_t index, ms_tensor **out);
/* After pieces were written by the application's own ways, on all ranks: what was gathered before
 * counts as changed, also on ranks that had nothing to write. */
MS_API ms_status ms_fsdp_note_written(ms_fsdp *fsdp);
/* MS_ERROR_STATE inside of a forward, a backward or a summon, where states are neither saved nor
 * loaded; `what` names the call. */
MS_API ms_status ms_fsdp_check_idle(const ms_fsdp *fsdp, const char *what);
/* The same inside of a forward only. */
MS_API ms_status ms_fsdp_check_no_forward(const ms_fsdp *fsdp, const char *what);
/* This rank's shard, 1-D, retained, of the flat parameter that has exactly these parameters: those
 * of one unit that are alike in dtype, in whether they are trained, and in the ranks that share
 * them. MS_ERROR_ARGUMENT names the first that is of another one, or is missing. */
MS_API ms_status ms_fsdp_shard(ms_fsdp *fsdp, ms_tensor *const *parameters, uint32_t count,
                               ms_tensor **out);
/* For an optimizer's state of all parameters that are with this one: f32 zeros, as long as the
 * shard, so of one size on all ranks; and the window on it for one parameter, in its piece's shape.
 * Both are owned. */
MS_API ms_status ms_fsdp_state_new(ms_fsdp *fsdp, ms_tensor *parameter, ms_tensor **out);
MS_API ms_status ms_fsdp_state_piece(ms_fsdp *fsdp, ms_tensor *parameter, ms_tensor *state,
                                     ms_tensor **out);
/* Gives the tensor of a parameter the whole parameter's shape, without values, or its piece again:
 * for code that asks for shapes only. Nothing happens while the unit is used. */
MS_API void ms_fsdp_show_whole(ms_fsdp *fsdp, bool yes);

typedef struct ms_fsdp_unit_info {
    const char *name;
    uint64_t bytes; /* of whole parameters in the dtype of computing */
    uint64_t shard_bytes;
    uint64_t gathered_bytes; /* that a gather takes: of what is sharded */
    bool gathered;
} ms_fsdp_unit_info;
MS_API bool ms_fsdp_unit_get(const ms_fsdp *fsdp, uint32_t unit, ms_fsdp_unit_info *out);

/* Whether a forward of the unit that begins now begins a pass: it is recorded, in no other forward,
 * and no backward runs. Each such forward of the root begins one; that of another unit, which is
 * called by itself, if none was begun since the last backward. */
MS_API bool ms_fsdp_begins_pass(const ms_fsdp *fsdp, uint32_t unit);

/* For on_reduced: it has stepped parameters of this bucket, or enqueued that. A gradient that comes
 * to them later in this backward, from outside of their unit, is an error then. */
MS_API void ms_fsdp_note_step(ms_fsdp *fsdp);

/* Of the backward that began last, or, where something is gathered ahead in forward, of the pass;
 * of the last one before ms_fsdp_step_end, where that is called. */
typedef struct ms_prefetch_counts {
    uint64_t hits;         /* uses of units that were gathered before the use began */
    uint64_t misses;       /* uses that had to gather their unit */
    uint64_t wasted_bytes; /* of units that were gathered ahead, and not used */
} ms_prefetch_counts;
/* Means over the uses and gathers of a unit in a pass, in nanoseconds: of the last pass that was
 * timed. 0 where there was none. */
typedef struct ms_unit_times {
    uint64_t forward_ns, backward_ns, gather_ns;
} ms_unit_times;
/* False if nothing was timed yet. Never waits. */
MS_API bool ms_fsdp_unit_times(ms_fsdp *fsdp, uint32_t unit, ms_unit_times *out);
/* Times are of the last pass that was reduced and whose gathers have run. Never waits. */
typedef struct ms_gather_stats {
    uint64_t gather_ns;  /* sum over the gathers of the pass */
    uint64_t exposed_ns; /* how long the model's stream waited for them */
    uint64_t copy_ns;    /* sum over the copies before and after gathers, of casts and rows */
    uint64_t overlap_ns; /* of these, while another gather ran */
    ms_prefetch_counts prefetch;
} ms_gather_stats;
MS_API ms_gather_stats ms_fsdp_gather_stats(ms_fsdp *fsdp);

/* Sums are divided by it: the number of ranks unless set; above 0. */
MS_API double ms_fsdp_divisor(const ms_fsdp *fsdp);
MS_API void ms_fsdp_set_divisor(ms_fsdp *fsdp, double divisor);

#ifdef __cplusplus
}
#endif
#endif
