/* moonshard/ddp.h: data parallelism: gradients are in buckets, which are reduced over a group while
 * backward still runs.
 *
 * Words
 * - A pass is a forward and the backward passes through its graph. It is synchronized if its
 *   backward reduces. A position is the index of a parameter in the list that ms_reducer_new was
 *   given.
 *
 * Invariants
 * - A parameter's gradient is a view of its bucket: backward writes the gradient there, and the
 *   reduction overwrites it with the mean. Each parameter has a cell of its own (in buckets of more
 *   than 64, neighbours share one), so a reduction never waits for gradients of another bucket.
 * - Buckets are launched in order of their index, whatever the order in which they become complete:
 *   all ranks issue the same sequence. A launch only enqueues, on the group's communication stream,
 *   after the tasks that write the bucket.
 * - After the last launch the current stream waits for all results: what is enqueued after backward
 *   sees reduced gradients.
 * - The first synchronized pass has one bucket for each dtype, as the order of registration need
 *   not be the order of gradients. The next synchronized forward rebuilds the buckets by the order
 *   in which rank 0's gradients came.
 * - With find_unused a parameter may get no gradient in a pass. It then contributes zeros (or the
 *   gradient that passes without synchronization have left), and a small all_reduce out of
 *   band finds the parameters that any rank used. If another rank used the parameter, the mean
 * becomes its gradient here. If no rank used it since the last reduction, its gradient stays as it
 * was, also NULL. Only ranks with such a parameter wait for the answer, and only for the hosts of
 * the other ranks.
 * - With static_graph the first synchronized pass counts how often each gradient comes, and reduces
 *   at the end of its backward. From then on a parameter is complete when its gradient has come
 *   that often. Parameters without gradients are treated as above, without another exchange. A
 *   graph that changes is an error. Buckets are rebuilt by the order of the second pass.
 * - Where backward runs in two parts (grad.h), the rest reduces, and ends the pass. It comes after
 *   the rests of passes without synchronization, and before the forward of another pass: other
 *   orders are errors.
 * - A gradient is the sum over the passes since it was last consumed; reduced, it is the mean over
 *   `divisor` ranks (the group's size unless set).
 * - An error inside a reduction ends the job: all ranks leave their collectives with that error. */
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
    const ms_dtype *delayed_dtype; /* dtype in which their gradients are sent; NULL: their own */
    const ms_link *links;          /* a native chain; link_count 0: reduce with avg */
    uint32_t link_count;
    ms_comm_hook hook; /* NULL: links are used */
    void *hook_user;
    void (*hook_free)(void *user); /* may be NULL */
    uint32_t hook_links;           /* number of links that the hook names to ms_bucket_account */
} ms_reducer_options;

/* Installs itself on the parameters: float leaves that require a gradient, in order of
 * registration, none of which belongs to another reducer. Copies or retains everything; takes
 * hook_user over if it succeeds. The engine frees the reducer at the latest. */
MS_API ms_status ms_reducer_new(ms_engine *engine, const ms_reducer_options *options,
                                const ms_reducer_parameter *parameters, uint32_t count,
                                ms_reducer **out);
/* Removes everything that was installed; gradients stay, as tensors of their own. NULL is
 * allowed. */
MS_API void ms_reducer_free(ms_reducer *reducer);
/* The reducer as a gradient source (hook.h), with which buckets, statistics and on_reduced are
 * asked for; it ends with the reducer. */
MS_API ms_gradient_source *ms_reducer_source(ms_reducer *reducer);

/* Call before each forward that is followed by a backward. synchronize: that backward reduces;
 * otherwise its gradients stay on this rank and add up. MS_ERROR_STATE if parameters got no
 * gradient in the last backward; the message names them. Rebuilds the buckets if that is due, which
 * blocks once. */
MS_API ms_status ms_reducer_forward(ms_reducer *reducer, bool synchronize);
/* The outputs of that forward. Without synchronization their backward is then known, whatever
 * forwards come between. For find_unused: parameters that they do not depend on contribute
 * zeros as soon as backward begins. If they depend on none, this rank's part of the reduction is
 * enqueued here. Without this call, unused parameters are found at the end of backward. */
MS_API ms_status ms_reducer_outputs(ms_reducer *reducer, ms_tensor *const *outputs, uint32_t count);
/* After ms_reducer_forward, for a rank that has no inputs left while others go on (join): takes
 * part in the reductions of their backward, with zeros, and leaves this rank's gradients as they
 * are. on_reduced is not called. */
MS_API ms_status ms_reducer_shadow(ms_reducer *reducer);
/* Reduces the gradients that passes without synchronization have left, as the end of a synchronized
 * backward does, bucket by bucket. All ranks call it, outside of a backward. MS_ERROR_STATE if no
 * such pass has come since gradients were reduced, or with static_graph; if a parameter has no
 * gradient, unless find_unused is set. */
MS_API ms_status ms_reducer_reduce(ms_reducer *reducer);
/* Call forward_end after the forward: it marks this moment for statistics. Optional; without it the
 * times of forward and backward are 0. */
MS_API ms_status ms_reducer_forward_end(ms_reducer *reducer);
/* Inside no_sync a backward that would reduce is an error, because its forward ran outside. Returns
 * the former setting. */
MS_API bool ms_reducer_set_no_sync(ms_reducer *reducer, bool inside);
/* Rebuilds the buckets now if the next synchronized forward would. A checkpoint then holds the
 * buckets with which training continues. All ranks call it, between a backward and a forward. */
MS_API ms_status ms_reducer_rebuild_due(ms_reducer *reducer);
/* Whether the last backward has left a bucket waiting for gradients. To be asked between passes. */
MS_API bool ms_reducer_waits(const ms_reducer *reducer);
/* Fails, and ends the job for all ranks, if the last backward has left a bucket waiting for
 * gradients: those of that bucket are this rank's own. To be called between passes, before
 * gradients are read for a step, a norm or a state. */
MS_API ms_status ms_reducer_settled(ms_reducer *reducer);
/* The next synchronized backward logs the order of gradients, and the buckets are rebuilt by it. */
MS_API void ms_reducer_rebuild(ms_reducer *reducer);

/* For planned reducers: whether the next synchronized backward records the order of gradients and
 * when each one came. */
MS_API void ms_reducer_record(ms_reducer *reducer, bool on);
/* The last record: positions in the order of gradients, without delayed parameters, and
 * ns[position], counted from forward's end as in ms_bucket_times; 0 where it is not known (because
 * the device has not reached that point yet). order and ns have room for all parameters. Returns
 * the number of positions; 0: no pass was recorded. */
MS_API uint32_t ms_reducer_arrivals(ms_reducer *reducer, uint32_t *order, uint64_t *ns);
/* Replaces the buckets: bucket b has the next sizes[b] positions of order. Gradients move along.
 * All ranks call it with the same arguments, between a backward and the next forward.
 * MS_ERROR_ARGUMENT if a position is missing, is there twice or is that of a delayed parameter, or
 * if a bucket is empty or has two dtypes. */
MS_API ms_status ms_reducer_assign(ms_reducer *reducer, const uint32_t *order,
                                   const uint32_t *sizes, uint32_t buckets);

MS_API ms_group *ms_reducer_group(const ms_reducer *reducer);
MS_API uint32_t ms_reducer_divisor(const ms_reducer *reducer);
/* Takes effect with the next launch. */
MS_API void ms_reducer_set_divisor(ms_reducer *reducer, uint32_t divisor);

/* --------------------------------------------------------- at the beginning */

/* Compares names, dtypes and shapes over the group. A difference ends the job, with
 * MS_ERROR_MISMATCH on every rank; the message shows the first parameter that differs, on both
 * sides. Takes one small all_gather, and a few more if something differs. Blocks. */
MS_API ms_status ms_ddp_compare(ms_group *group, const ms_reducer_parameter *parameters,
                                uint32_t count);
/* Copies root's values to all ranks. Tensors are sent together in pieces of at most
 * MS_DDP_PIECE_BYTES; a larger tensor is a piece of its own. */
#define MS_DDP_PIECE_BYTES (250u << 20)
MS_API ms_status ms_ddp_broadcast(ms_group *group, ms_tensor *const *tensors, uint32_t count,
                                  uint32_t root);

/* Cuts items into buckets, as PyTorch's DDP does. Items are taken in the order given; only items
 * with equal keys share a bucket. A bucket is closed as soon as its bytes reach its limit, and the
 * next bucket of that key takes the next limit. Buckets that are still open at the end follow in
 * order of their first item. order[]: positions, bucket after bucket; sizes[]: number of positions
 * in each. Both have room for count. */
MS_API ms_status ms_ddp_assign(ms_engine *engine, const uint64_t *bytes, const uint32_t *keys,
                               uint32_t count, const uint64_t *limits, uint32_t limit_count,
                               uint32_t *order, uint32_t *sizes, uint32_t *buckets);
/* The same for items in order of registration. Buckets are sorted by their smallest position and
 * then reversed, so that bucket 0 has the items that were registered last. */
MS_API ms_status ms_ddp_assign_backwards(ms_engine *engine, const uint64_t *bytes,
                                         const uint32_t *keys, uint32_t count,
                                         const uint64_t *limits, uint32_t limit_count,
                                         uint32_t *order, uint32_t *sizes, uint32_t *buckets);

#ifdef __cplusplus
}
#endif
#endif
