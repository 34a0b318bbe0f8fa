/* moonshard/grad.h: the tape, which records operators, and backward, which computes gradients from
 * it.
 *
 * Invariants
 * - ms_apply is ms_op_apply plus a node for each call whose result needs a gradient. A node is
 *   freed with its last tensor. Neither freeing nor backward recurses, so graphs may be of any
 *   depth.
 * - backward visits nodes in reverse order of their creation. A parameter's hooks run once in a
 *   backward, when its gradient is complete. The order of additions is fixed by the graph, so
 *   gradients repeat bit for bit.
 * - What forward saved must be what backward reads. Saved tensors are checked twice: all of them
 *   before anything runs, and those of a node again right before that node runs, after its hooks. A
 *   tensor that was written since it was saved is an error that names the node and the write.
 * - Code that must write a parameter while a backward runs (an optimizer's early step) registers
 *   the write with ms_backward_when_unread. The write then happens after the last node that saved
 *   the parameter's values has run.
 * - A write in place that is recorded becomes part of the written tensor's history only. Tensors
 *   that share its memory and were made before the write do not have the write in their history:
 *   recording a use of one, or running backward from one, is an error. Views that are taken after
 *   the write are correct.
 * - A recomputed function gives gradients also to tensors that it captures besides its inputs; it
 *   must use the same tensors in every run. Parameters that it reads without needing their
 *   gradients (detached ones) are checked as saved tensors are. The function may write other memory
 *   that it captures (buffers).
 * - A custom function computes its own gradient. Every tensor that requires a gradient and that its
 *   forward uses is an input of it: else the gradient would be lost, and the call is an error.
 * - A hook may run backward through another graph, but not through a node of the running backward.
 * - Without retain_graph backward frees what it has used, node by node; a second backward through
 *   it is an error that names both lines.
 * - Backward records nothing: gradients of gradients are not supported, and asking for one is an
 *   error.
 * - A backward may run in two parts: ms_backward_inputs gives gradients to some leaves, the inputs,
 *   and ms_backward_rest to all others. Gradients have the bits of one backward. Each operator
 *   delivers each result in one part only. Matrix products of the rest run in it, each once; other
 *   operators compute all of their results in the first part, and those of the rest are kept. A
 *   node of which a product is left keeps its incoming gradients and what it saved. All that is
 *   kept is checked for writes when the rest begins. Between the parts the graph serves no other
 *   backward. Dropping it frees all that is kept. Hooks run in the part in which their gradient is
 *   complete: those of parameters, which reduce and step, in the rest. So do calls of
 *   ms_backward_at_end. */
#ifndef MOONSHARD_GRAD_H
#define MOONSHARD_GRAD_H

#include "moonshard/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As ms_op_apply, and recorded if recording is on and a float input requires a gradient. In place:
 * not on a leaf that requires one, and not on a view that has a history. */
MS_API ms_status ms_apply(ms_engine *engine, const ms_op *op, const ms_attributes *attributes,
                          bool in_place, ms_tensor *const *inputs, uint32_t input_count,
                          ms_tensor **outputs, uint32_t output_count);

/* Recording is on at first; returns what it was. */
MS_API bool ms_engine_set_recording(ms_engine *engine, bool on);
MS_API bool ms_engine_is_recording(const ms_engine *engine);

MS_API bool ms_tensor_requires_grad(const ms_tensor *tensor);
MS_API bool ms_tensor_is_leaf(const ms_tensor *tensor); /* made by no recorded operator */
/* The recorded call whose result a tensor is, and which of its results. Calls are numbered from 1,
 * each number is used once; 0 for a leaf. */
typedef struct ms_origin {
    uint64_t call;
    uint32_t result;
} ms_origin;
MS_API ms_origin ms_tensor_origin(const ms_tensor *tensor);
/* Float leaves only. */
MS_API ms_status ms_tensor_set_requires_grad(ms_tensor *tensor, bool yes);
MS_API ms_tensor *ms_tensor_grad(const ms_tensor *tensor); /* borrowed, or NULL */
/* NULL removes it; else it must have the leaf's shape and dtype. Retained. */
MS_API ms_status ms_tensor_set_grad(ms_tensor *tensor, ms_tensor *gradient);
/* Sets the home of the leaf's gradient, its destination buffer: a contiguous tensor of the leaf's
 * shape and dtype. If the leaf has no gradient, backward overwrites the home, which then is the
 * gradient. Linear layers and losses of them, matrix products, embeddings and norms write their
 * gradient into the home directly, at any moment of backward, unless hooks see the gradient first,
 * a recomputed function uses the leaf, or that memory may still be read. Other gradients are copied
 * there. Retained.
 * NULL: the gradient stays where backward made it. Removing the gradient keeps the home. */
MS_API ms_status ms_tensor_set_grad_home(ms_tensor *leaf, ms_tensor *home);

/* Moves float leaves into one storage, one after another, and returns the storage as a 1-D tensor.
 * The leaves are then contiguous views of this tensor: writing it changes their values. Nothing
 * moves if they already are in this order. Views and graphs that were made before keep the old
 * memory. MS_ERROR_ARGUMENT, and nothing has changed, for mixed dtypes, no leaves, a leaf that
 * occurs twice, and a leaf whose gradient has a home (a reducer's). *flat is owned. */
MS_API ms_status ms_flatten(ms_engine *engine, ms_tensor *const *leaves, uint32_t count,
                            ms_tensor **flat);

/* Copies the values of these tensors (at least one, all of one dtype), one tensor after another,
 * into a new 1-D tensor *whole; parts[i] is a view of it in the shape of tensors[i]. Recorded if
 * recording is on and one of them requires a gradient: then whole and parts have gradients. The
 * caller owns whole and parts. On failure there is nothing to release. */
MS_API ms_status ms_pack(ms_engine *engine, ms_tensor *const *tensors, uint32_t count,
                         ms_tensor **whole, ms_tensor **parts);

/* Adds gradients of the roots' leaves to their grad, on the current stream. gradients[i] NULL: 1,
 * for a root of one element. */
MS_API ms_status ms_backward(ms_engine *engine, ms_tensor *const *roots,
                             ms_tensor *const *gradients, uint32_t count, bool retain_graph);

/* The first part of a backward: gradients of these inputs only, leaves that require one and that
 * the roots reach. Keeps what the rest needs. MS_ERROR_STATE inside of another backward, and if
 * what is recomputed is between a root and an input: its inner graph serves one backward.
 * MS_ERROR_ARGUMENT also for a root that is a leaf or reaches no input, and for an input whose
 * gradient has a home (a reducer's): these belong to the rest. */
MS_API ms_status ms_backward_inputs(ms_engine *engine, ms_tensor *const *roots,
                                    ms_tensor *const *gradients, uint32_t count,
                                    ms_tensor *const *inputs, uint32_t input_count);
/* The second part: everything else. roots are those of the first part. Frees the graph. */
MS_API ms_status ms_backward_rest(ms_engine *engine, ms_tensor *const *roots, uint32_t count);
/* Fails with MS_ERROR_STATE if a gradient of one of these leaves is still to come from a rest: a
 * step of it would lack that gradient. what: who asks, for the message. */
MS_API ms_status ms_check_rest(ms_engine *engine, const char *what, ms_tensor *const *leaves,
                               uint32_t count);
/* Whether some gradient of this leaf is; and whether the rest of any backward is to come. */
MS_API bool ms_tensor_awaits_rest(const ms_tensor *leaf);
MS_API bool ms_backward_awaits_rest(const ms_engine *engine);

/* Called with the complete gradient of `tensor` in a backward, before backward uses it further; of
 * a leaf, before it is added to the leaf's grad. The function may put an owned replacement of the
 * same shape and dtype into *replacement. It may write the gradient in place unless that is the
 * gradient of other tensors, too (as after an addition), which is an error. */
typedef ms_status (*ms_gradient_function)(void *user, ms_tensor *gradient, ms_tensor **replacement);
/* Called after the gradient of this backward was added to the leaf's grad. */
typedef ms_status (*ms_accumulated_function)(void *user, ms_tensor *leaf);
/* free_user (may be NULL) is called with user when the hook is removed or its graph is freed. ids
 * are unique in an engine, from 1. */
MS_API ms_status ms_tensor_on_gradient(ms_tensor *tensor, ms_gradient_function f, void *user,
                                       void (*free_user)(void *), uint64_t *id);
MS_API ms_status ms_tensor_on_accumulated(ms_tensor *leaf, ms_accumulated_function f, void *user,
                                          void (*free_user)(void *), uint64_t *id);
/* As ms_tensor_on_gradient, of a result. In the rest of a backward in two parts f is called once
 * more, with gradient NULL, where the tensor's node has its turn, if the first part has called it:
 * the nodes that were made before it run after that. What f puts into *replacement is ignored
 * then. */
MS_API ms_status ms_tensor_on_parts(ms_tensor *tensor, ms_gradient_function f, void *user,
                                    void (*free_user)(void *));
/* Does nothing if the hook was removed before. */
MS_API void ms_tensor_remove_hook(ms_tensor *tensor, uint64_t id);
/* Whether a leaf has such functions. */
MS_API bool ms_tensor_has_hooks(const ms_tensor *leaf);

/* For gradients that are summed over ranks between backward and a step. A summed gradient is
 * complete: a backward that would add to it is an error. The mark goes with the gradient. */
MS_API void ms_tensor_grad_mark_summed(ms_tensor *leaf);
MS_API bool ms_tensor_grad_is_summed(const ms_tensor *leaf);

/* For hooks: f is called once, on the host, when the outermost backward that runs has finished; in
 * order of registration, and not if that backward fails. Of a first part it is called when its rest
 * has finished, and not if the graph is dropped before: user must live that long. If f returns an
 * error, that backward returns it. MS_ERROR_STATE if no backward runs. */
MS_API ms_status ms_backward_at_end(ms_engine *engine, ms_status (*f)(void *user), void *user);
/* The same, but called at the end of a first part that runs, and not again with its rest. */
MS_API ms_status ms_backward_at_part_end(ms_engine *engine, ms_status (*f)(void *user), void *user);
/* For hooks that write tensors: f is called once, on the host, when no node that a running backward
 * still has to run reads the memory of these tensors: at once if there is no such node, else right
 * after the last of them has run. Calls that wait are made in the order in which they were
 * registered; the current stream is that of backward. The error that f returns ends the backward.
 * If the backward fails, f is not called. free_user (may be NULL) is called after f, or instead of
 * it. Takes over user, also when it fails. Outside of a backward f is called at once. */
MS_API ms_status ms_backward_when_unread(ms_engine *engine, ms_tensor *const *tensors,
                                         uint32_t count, ms_status (*f)(void *user), void *user,
                                         void (*free_user)(void *user));
/* Whether a node that a running backward still has to run reads the memory of this tensor. */
MS_API bool ms_tensor_is_awaited(const ms_tensor *tensor);
/* reached[i]: whether a backward from the roots may come to leaves[i]. Walks the whole graph,
 * without recursion; enqueues nothing. */
MS_API ms_status ms_graph_reaches(ms_engine *engine, ms_tensor *const *roots, uint32_t count,
                                  ms_tensor *const *leaves, uint32_t leaf_count, bool *reached);

/* For loss scalers. From now on, a backward that goes through this result of a recorded operator
 * marks the gradients of all leaves that its graph goes back to: they are multiplied by a number
 * that clipping and optimizers do not know. A mark is gone when the gradient is removed
 * (ms_tensor_set_grad NULL) or unmarked. Nothing happens if the tensor has no history. */
MS_API ms_status ms_tensor_mark_gradients(ms_tensor *tensor);
MS_API bool ms_tensor_grad_is_marked(const ms_tensor *leaf);
MS_API void ms_tensor_grad_unmark(ms_tensor *leaf);
/* For layers that put another tensor in the place of a marked gradient. */
MS_API void ms_tensor_grad_mark(ms_tensor *leaf);

/* A step of the tape that is not an operator: backward fills results[i] (owned; NULL: no gradient)
 * where needs[i]. The first of two parts of a backward calls it, for all results. */
typedef struct ms_function {
    const char *name;
    ms_status (*backward)(void *user, ms_tensor *const *gradients, ms_tensor **results,
                          const bool *needs);
    void (*free)(void *user);
    /* May be NULL. The index-th tensor that backward reads (borrowed), and its version when it was
     * kept; false past the last. The tape checks these versions. */
    bool (*reads)(void *user, uint32_t index, ms_tensor **tensor, uint64_t *version);
    bool gives_views; /* outputs share memory with inputs: writing one in place is refused */
} ms_function;
/* Makes `outputs` (tensors without history) depend on `inputs` through f; takes over user when it
 * succeeds. Records nothing (and frees user) if recording is off or no input requires a
 * gradient. */
MS_API ms_status ms_record(ms_engine *engine, const ms_function *f, void *user,
                           ms_tensor *const *inputs, uint32_t input_count,
                           ms_tensor *const *outputs, uint32_t output_count);

/* What a function with a gradient of its own has computed; borrowed, until ms_custom returns.
 * saved: what its backward reads. */
typedef struct ms_custom_results {
    ms_tensor *const *outputs, *const *saved;
    uint32_t output_count, saved_count;
} ms_custom_results;
/* A function with a gradient of its own. Its operators are not recorded, those of backward neither;
 * both may enqueue collectives. */
typedef struct ms_custom_function {
    ms_status (*forward)(void *user, ms_tensor *const *inputs, uint32_t input_count,
                         ms_custom_results *results);
    /* gradients: one for each output, of its dtype and shape: contiguous, and backward's own, which
     * it may write in place; zeros for an output that no gradient reached; NULL for an output of
     * integers. saved: as forward gave them. It fills results[i] (owned; NULL: no gradient) with
     * the gradient of input i, in the input's dtype and shape; where needs[i] is false it is not
     * used. Autocast is off. */
    ms_status (*backward)(void *user, ms_tensor *const *gradients, ms_tensor *const *saved,
                          ms_tensor **results, const bool *needs);
    void (*free)(void *user);
} ms_custom_function;
#define MS_CUSTOM_OUTPUTS 8
/* Runs forward, and records the call if recording is on and an input requires a gradient. outputs
 * gets *output_count new tensors (owned; up to MS_CUSTOM_OUTPUTS), which share the memory of what
 * forward gave: that may be an input or a view of one. Takes over user when it succeeds, and frees
 * it at once if nothing is recorded; f must live as long as the graph. MS_ERROR_ARGUMENT where a
 * gradient would get lost: forward has used a tensor that requires one and is no input, or has
 * written a parameter. An input that it writes in place has a new history then, as after an
 * operator in place. */
MS_API ms_status ms_custom(ms_engine *engine, const ms_custom_function *f, void *user,
                           ms_tensor *const *inputs, uint32_t input_count, ms_tensor **outputs,
                           uint32_t *output_count);

/* Runs f(user, inputs) -> outputs (owned, *count of them, at most MS_RECOMPUTE_OUTPUTS) now without
 * a tape, and again in backward, with the same random numbers; intermediate results are not kept.
 * done (may be NULL) is called when the intermediate results of a run are no longer needed: after
 * the first run, and after backward through the record of a later run. free_user is called with
 * user when the graph is freed. */
#define MS_RECOMPUTE_OUTPUTS 8
typedef ms_status (*ms_recompute_function)(void *user, ms_tensor *const *inputs,
                                           uint32_t input_count, ms_tensor **outputs,
                                           uint32_t *count);
MS_API ms_status ms_recompute(ms_engine *engine, ms_recompute_function f, void *user,
                              void (*done)(void *user), void (*free_user)(void *),
                              ms_tensor *const *inputs, uint32_t input_count, ms_tensor **outputs,
                              uint32_t *output_count);
/* The same, but results of products (matmul, linear, conv2d, attention) are kept: what is between
 * them is computed again. Layers in 8 bits keep nothing. */
MS_API ms_status ms_recompute_rest(ms_engine *engine, ms_recompute_function f, void *user,
                                   void (*done)(void *user), void (*free_user)(void *),
                                   ms_tensor *const *inputs, uint32_t input_count,
                                   ms_tensor **outputs, uint32_t *output_count);
/* Whether what runs now belongs to the first run of a function that backward runs again. */
MS_API bool ms_is_recomputed_later(const ms_engine *engine);

#ifdef __cplusplus
}
#endif
#endif
