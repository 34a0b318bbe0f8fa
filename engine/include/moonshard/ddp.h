/* moonshard/ddp.h: data parallelism: gradients in buckets, reduced over a group while backward goes
 * on.
 *
 * Invariants
 * - A parameter's gradient is a view of its bucket: backward writes it there in one pass, and the
 *   reduced value lies there. Each parameter has a cell of its own (neighbours share one in buckets
 *   of more than 64), so that a reduction never waits for gradients of another bucket.
 * - Buckets are launched in order of their index, whatever the order in which they become ready:
 *   all ranks issue the same sequence. A launch only enqueues, on the group's communication stream,
 *   behind the writers of that bucket.
 * - When the last bucket is launched the current stream waits for all results: what is enqueued
 *   behind backward sees reduced gradients.
 * - The first synchronized iteration has one bucket for each dtype, as the order of registration
 *   need not be that of use. The next one that begins rebuilds them in the order in which rank 0's
 *   gradients arrived.
 * - With find_unused a parameter may get no gradient in a pass: it brings zeros (or what passes
 *   without synchronization have left), and one more all_reduce tells who was used anywhere. Used
 *   elsewhere: the mean is its gradient. By nobody since the last reduction: its gradient stays as
 *   it was, NULL too. Only who has such a parameter waits for the answer, and not for the device:
 *   it comes over the group's channel for numbers, once the hosts of all ranks have got there.
 * - With static_graph the first synchronized iteration counts how often each gradient comes and
 *   reduces at its backward's end; from then on a parameter is ready when its gradient has come so
 *   often, and those that never came are left out as above, with no more traffic. Another graph is
 *   an error. Buckets are rebuilt by the second iteration's order.
 * - Gradients are sums over the passes since they were last consumed; reduced, they are means over
 *   `divisor` ranks (the group's size).
 * - An error inside a reduction ends the job: peers leave their collectives with it. */
#ifndef MOONSHARD_DDP_H
#define MOONSHARD_DDP_H

#include "moonshard/grad.h"
#include "moonshard/hook.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ms_reducer ms_reducer;

typedef struct ms_reducer_parameter {
    ms_tensor *tensor;
    const char *name;
} ms_reducer_parameter;

typedef struct ms_reducer_options {
    ms_group *group;
    /* Size limits of the first bucket, the second, and so on; the last limit holds for all
     * further buckets. NULL: 1 MiB, 25 MiB. */
    const uint64_t *cap_bytes;
    uint32_t cap_count;
    bool find_unused, static_graph;
    bool planned; /* buckets change by ms_reducer_assign only */
    /* The last `delayed` parameters share one bucket per dtype after all others; these buckets
     * pass no hook. */
    uint32_t delayed;
    const ms_dtype *delayed_dtype; /* what their gradients travel in; NULL: their own */
    const ms_link *links;          /* a native chain; link_count 0: reduce with avg */
    uint32_t link_count;
    ms_comm_hook hook; /* instead of links, if it is not NULL */
    void *hook_user;
    void (*hook_free)(void *user); /* may be NULL */
    uint32_t hook_links; /* how many links the hook tells apart by ms_bucket_account; 0: none */
} ms_reducer_options;

/* Installs itself on the parameters: float leaves that require a gradient, in order of
 * registration, none of them of another reducer. Everything is copied or retained; hook_user is
 * taken over when this succeeds. Freed with the engine unless before. */
MS_API ms_status ms_reducer_new(ms_engine *engine, const ms_reducer_options *options,
                                const ms_reducer_parameter *parameters, uint32_t count,
                                ms_reducer **out);
/* Removes everything that was installed; gradients stay, as tensors of their own. NULL is
 * allowed. */
MS_API void ms_reducer_free(ms_reducer *reducer);

/* For hosts with garbage collection: nobody will use it any more, which may be found out at any
 * moment; ms_reducer_sweep frees such ones, at a moment that does not depend on a collector's
 * pace. */
MS_API void ms_reducer_abandon(ms_reducer *reducer);
MS_API void ms_reducer_sweep(ms_engine *engine);

/* Before each forward whose graph a backward will go through. synchronize: that backward reduces;
 * else its gradients stay local and add up. MS_ERROR_STATE, naming them, if parameters got no
 * gradient in the backward before. Rebuilds the buckets where that is due, which blocks once. */
MS_API ms_status ms_reducer_forward(ms_reducer *reducer, bool synchronize);
/* What that forward gave, for find_unused: parameters that no backward from these can reach need
 * not be waited for. If it may reach none at all, this rank's part is done here. Without this call
 * all that got no gradient is found out at backward's end. */
MS_API ms_status ms_reducer_outputs(ms_reducer *reducer, ms_tensor *const *outputs, uint32_t count);
/* Behind ms_reducer_forward, for a rank that has no inputs left while others go on (join): takes
 * part in what their backward does, with zeros, and leaves this rank's gradients alone. Nobody is
 * told of reduced buckets. */
MS_API ms_status ms_reducer_shadow(ms_reducer *reducer);
/* Behind that forward, and behind the optimizer: where these end for ms_reducer_stats. May be left
 * out; then there are no such times. */
MS_API ms_status ms_reducer_forward_end(ms_reducer *reducer);
MS_API ms_status ms_reducer_step_end(ms_reducer *reducer);
/* Inside no_sync a backward that would reduce is an error: its forward ran outside. Returns what it
 * was. */
MS_API bool ms_reducer_set_no_sync(ms_reducer *reducer, bool inside);
/* Rebuilds the buckets now where the next synchronized forward would: for checkpoints, whose
 * buckets are then those that training goes on with. All ranks, between a backward and a
 * forward. */
MS_API ms_status ms_reducer_rebuild_due(ms_reducer *reducer);
/* Log the order of the next synchronized backward and rebuild by it. */
MS_API void ms_reducer_rebuild(ms_reducer *reducer);

/* For optimizers that step before backward ends. In a synchronized backward f(user, index) is
 * called on the host for each bucket, in order of index, as soon as its result is on its way: the
 * bucket's parameters have gradients that are the reduced ones behind ms_reducer_ready's points,
 * which the current stream (the model's) has not waited for. What reads them on another stream gets
 * these waits by itself; C code in strict mode takes them from there. f may consume a parameter's
 * gradient (ms_tensor_set_grad NULL): its memory is written next by the next backward, behind its
 * readers. Once all results are there for the current stream, f(user, MS_REDUCED_ALL) ends the
 * pass. f must not block; its error ends the job. f NULL: nobody is called; free_user (may be NULL)
 * is called with user then, or when the reducer goes. */
#define MS_REDUCED_ALL UINT32_MAX
typedef ms_status (*ms_reduced_function)(void *user, uint32_t bucket);
MS_API void ms_reducer_set_on_reduced(ms_reducer *reducer, ms_reduced_function f, void *user,
                                      void (*free_user)(void *user));
/* Whether a parameter is used in this pass: by any rank where that is known by now (*known: it is
 * so on all ranks), else by this rank. Known it is behind the pass, in static graphs behind their
 * first, and always where all parameters are used. False past the last parameter. */
MS_API bool ms_reducer_is_used(const ms_reducer *reducer, uint32_t position, bool *known);
/* Where the result of a bucket of the last synchronized backward is: on the communication stream,
 * and where else its hook has put work (seq 0: nowhere). */
MS_API void ms_reducer_ready(const ms_reducer *reducer, uint32_t index, ms_point ready[2]);

/* How often buckets were made, and how many passes with the present ones were reduced: the same on
 * all ranks, at the same moment. */
MS_API uint64_t ms_reducer_layout(const ms_reducer *reducer, uint64_t *passes);
/* Before ms_reducer_forward: blocks until the pass before the last has ended on the device, so that
 * its times are there: what is asked behind that does not depend on how far the device has come. */
MS_API ms_status ms_reducer_await_times(ms_reducer *reducer);

/* The order of the next synchronized backward, and when each gradient came, is to be noted (on) or
 * not. For planned reducers. */
MS_API void ms_reducer_record(ms_reducer *reducer, bool on);
/* What was noted last: positions (the delayed ones are not in it), and times since forward's end as
 * of ms_bucket_times; ns[position] 0 where none are known (sim; the device has not got there).
 * order and ns have room for all parameters. Returns how many there are; 0: nothing was noted. */
MS_API uint32_t ms_reducer_arrivals(ms_reducer *reducer, uint32_t *order, uint64_t *ns);
/* From now on these buckets: sizes[b] positions each, taken from order; gradients that are there
 * move along. The same on all ranks, between a backward and the next forward. MS_ERROR_ARGUMENT if
 * a position is missing, twice or that of a delayed parameter, or a bucket is empty or has two
 * dtypes. */
MS_API ms_status ms_reducer_assign(ms_reducer *reducer, const uint32_t *order,
                                   const uint32_t *sizes, uint32_t buckets);

MS_API ms_group *ms_reducer_group(const ms_reducer *reducer);
MS_API uint32_t ms_reducer_divisor(const ms_reducer *reducer);
/* For the next launches. */
MS_API void ms_reducer_set_divisor(ms_reducer *reducer, uint32_t divisor);
MS_API uint32_t ms_reducer_buckets(const ms_reducer *reducer);
/* NULL past the last */
MS_API const ms_bucket *ms_reducer_bucket(const ms_reducer *reducer, uint32_t index);
/* Synchronized backward passes that were reduced. */
MS_API uint64_t ms_reducer_iterations(const ms_reducer *reducer);
MS_API bool ms_reducer_is_rebuilt(const ms_reducer *reducer);
/* What the last reduction that failed on this rank failed of; NULL if none has. Later ones that
 * succeed leave it. */
MS_API const char *ms_reducer_error(const ms_reducer *reducer);

/* Never waits. Counts are of the last synchronized pass, or, where ms_reducer_step_end is called,
 * of the last pass whose step has ended. */
MS_API ms_pass_stats ms_reducer_stats(ms_reducer *reducer);
/* What each link of a chain of several costs, counted from 1, in the same passes. ms_reducer_links:
 * their number; 0: the chain has one link, or its hook does not call ms_bucket_account. */
MS_API uint32_t ms_reducer_links(const ms_reducer *reducer);
MS_API ms_link_stats ms_reducer_link_stats(const ms_reducer *reducer, uint32_t link);
/* Of the pass that has the times of the last ms_reducer_stats. False, and zeros, while no pass with
 * the present buckets was timed. */
MS_API bool ms_reducer_bucket_times(const ms_reducer *reducer, uint32_t index,
                                    ms_bucket_times *out);

/* --------------------------------------------------------- at the beginning */

/* Compares names, dtypes and shapes over the group: MS_ERROR_MISMATCH on every rank, with the first
 * parameter that differs and both sides, and the job ends with it. One small all_gather, and a few
 * more only when something differs. Blocks. */
MS_API ms_status ms_ddp_compare(ms_group *group, const ms_reducer_parameter *parameters,
                                uint32_t count);
/* Copies root's values to all ranks, in coalesced pieces of at most MS_DDP_PIECE_BYTES (or one
 * tensor). */
#define MS_DDP_PIECE_BYTES (250u << 20)
MS_API ms_status ms_ddp_broadcast(ms_group *group, ms_tensor *const *tensors, uint32_t count,
                                  uint32_t root);

/* Cuts items (bytes[i], and key[i]: only equal ones share a bucket), taken in the order given, into
 * buckets: one is closed as soon as it has as many bytes as its limit, and each key then moves on
 * to the next limit (behaviours A3). What is left follows in order of first appearance. order[]:
 * positions, bucket after bucket; sizes[]: how many are in each. Both have room for count. */
MS_API ms_status ms_ddp_assign(ms_engine *engine, const uint64_t *bytes, const uint32_t *keys,
                               uint32_t count, const uint64_t *limits, uint32_t limit_count,
                               uint32_t *order, uint32_t *sizes, uint32_t *buckets);
/* The same for registration order: by smallest position, then backwards, so that bucket 0 has what
 * was registered last. */
MS_API ms_status ms_ddp_assign_backwards(ms_engine *engine, const uint64_t *bytes,
                                         const uint32_t *keys, uint32_t count,
                                         const uint64_t *limits, uint32_t limit_count,
                                         uint32_t *order, uint32_t *sizes, uint32_t *buckets);

#ifdef __cplusplus
}
#endif
#endif
