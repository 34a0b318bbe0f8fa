/* state.h: the inside of a sharded model. For fsdp/ only.
 *
 * The files call downwards in this order: model (making, asking), shard (shards as one tensor),
 * stats, edges (a unit's forward and backward), agree (which unit comes next, where ranks use
 * different ones), pass (what is of a whole pass), reduce (gradients of a unit), filled (which
 * parameters have one after a pass), outer (gradients of uses outside of units), partial
 * (reductions within the shard group only), unit (gathering, handles), extend (gathers that send
 * something else than shards), near (parts that stay after forward), gathers (their times), flat
 * (memory), rooms (memory that is the same in each step).
 */
#ifndef MOONSHARD_FSDP_STATE_H
#define MOONSHARD_FSDP_STATE_H

#include "base/assert.h"
#include "meter/gather_times.h"
#include "meter/pass_times.h"
#include "moonshard/fsdp.h"

typedef struct ms_flat ms_flat;
typedef struct ms_unit ms_unit;

/* One parameter. Its address is the user pointer of its gradient hook, so the array never moves. */
typedef struct ms_member {
    ms_fsdp *fsdp;
    ms_flat *flat;
    ms_tensor *tensor; /* retained */
    char *name;
    uint64_t hook;
    uint32_t position; /* among the trainable ones of the list that the model was made of */
    uint32_t dims;
    int64_t shape[MS_DIMS_MAX];
    int64_t begin;  /* of its numbers in the flat parameter */
    int64_t packed; /* of its numbers in the flat gradient, where no zeros are between parameters */
    /* By rows: where its rows begin in each shard, and how many numbers each shard has for them. */
    int64_t slot, part;
    /* Its piece: `length` elements from `first` of the parameter on, at `at` in the shard. */
    int64_t first, length, at;
    uint32_t piece_dims;
    int64_t piece[MS_DIMS_MAX];
    struct ms_part *piece_of; /* what a piece is a part of; NULL where it is the whole */
    /* outer.c: the gradient of uses outside of its unit, owned; NULL: none waits. */
    ms_tensor *outer;
    ms_tensor *gradient; /* view of the flat gradient, in its shape; the bucket owns it */
    ms_tensor *reduced;  /* view of its piece of the reduced gradient */
    /* gradients.c, during a summon: the whole gradient, and that of the piece; owned. cleared: a
     * script has removed the whole one. */
    ms_tensor *whole_gradient, *aside;
    bool cleared;
    bool filled; /* this rank's gradient is in `gradient` */
    /* filled.c. brought: it was filled before a reduction of this pass; carried: before one that
     * left replicas out. unsure: where reduced numbers are, of which it is not known yet whether
     * some rank has filled them; else NULL. */
    bool brought, carried;
    ms_tensor *unsure;
    bool stepped; /* on_reduced has stepped it, or others of its bucket, in this backward */
    bool held;    /* `reduced` has the gradient of earlier passes, which stays */
    bool fired;   /* the backward that runs has added to its gradient */
    bool marked;  /* what was detached is multiplied by a loss scale */
} ms_member;

/* When the last two users of memory that copies take in turn are done. */
typedef struct ms_turns {
    ms_point ended[2];
    uint32_t count;
} ms_turns;

/* Whole parameters of one dtype, and what gathers them; what else is of them is in ms_flat. */
typedef struct ms_form {
    ms_tensor *whole; /* [padded]; dropped while the unit is not gathered */
    ms_tensor *wire;  /* [padded]; by rows: what a gather gives, shard by shard; else NULL */
    /* [length], dropped but in a gather: a copy of the shard in the device's memory, in the dtype
     * of the whole; NULL: the shard is that itself, or nothing travels. */
    ms_tensor *cast;
    /* Versions when the last gather was enqueued: of the shard, which tells whether the whole is
     * still right, and of the whole, which tells whether a script wrote there. */
    uint64_t shard_version, whole_version;
    /* The last rooms of whole, wire and cast (ms_rooms_refill). */
    uint32_t whole_room, wire_room, cast_room;
} ms_form;

/* static_memory.c. The rooms of tensors that are taken and dropped in turn. Zeroed: none yet. */
typedef struct ms_room_entry ms_room_entry;
typedef struct ms_rooms {
    ms_room_entry *list;
    uint32_t count, lag;
    size_t capacity;
    uint64_t drops;
} ms_rooms;

static inline void ms_outer_forget(ms_member *member)
{
    ms_tensor_release(member->outer);
    member->outer = NULL;
}

/* A flat parameter: its memory, and the bucket in which its gradient is reduced. */
struct ms_flat {
    ms_unit *unit;
    ms_member *members;
    uint32_t count;
    /* Of the shard; of what forward and backward compute with; of the whole gradient, which is
     * reduced; and of the reduced one. */
    ms_dtype dtype, computes, reduces, gradient_dtype;
    bool trainable;
    bool keeps_dtype;                /* computes in its own dtype whatever its unit's precision */
    bool blank;                      /* all parameters were on "meta", and have no values yet */
    bool own;                        /* of ms_fsdp_parameter.group */
    ms_group *shards;                /* whose ranks have parts of it */
    int64_t numbers, padded, length; /* elements; padded is ranks times length */
    /* The form that gathers give now, in the dtype of computing unless `full`; and the other one,
     * dropped, which has no tensors where the two dtypes are one. */
    ms_form form, other;
    bool full;
    /* [length]; the memory of the whole in the shard's dtype if not sharded */
    ms_tensor *shard;
    ms_tensor *source; /* all of the shard's storage, the part of empty pieces included */
    ms_tensor *
        near; /* secondary_shard.c: a part of the whole, dropped but between forward and backward */
    uint64_t near_version; /* of the shard when the part was gathered */
    ms_tensor *kept;       /* during a summon: what an unsharded parameter held */
    /* During a summon with offload: what takes the place of form.whole, in the second pool; and
     * form.whole as it was, once its place is taken. Both owned. */
    ms_tensor *outside, *inside;
    ms_point gathered;  /* when the last gather is done */
    bool awaited;       /* the model's stream has waited for it */
    ms_bucket bucket;   /* flat: [padded], dropped between backwards; not of frozen parameters */
    uint32_t room;      /* the last one of the bucket's memory */
    ms_tensor *reduced; /* [length]; made at the first reduction */
    ms_tensor *carried; /* partial.c: [length], or NULL */
    ms_point ready[2];  /* when the last reduction is done: see ms_bucket_state in ddp */
};

/* Whether the handles of a unit are whole parameters or pieces, and whether there is memory behind
 * whole ones. GATHERED: there is, but handles are pieces, since nothing uses the unit. */
typedef enum ms_unit_place { MS_UNIT_SHARDED, MS_UNIT_GATHERED, MS_UNIT_IN_USE } ms_unit_place;

/* Where a unit is in a pass. unit.c lists the legal changes. */
typedef enum ms_unit_phase {
    MS_UNIT_IDLE,
    MS_UNIT_FORWARD,  /* its forward runs */
    MS_UNIT_AWAITING, /* its forward was recorded; its backward is to come */
    MS_UNIT_BACKWARD, /* its backward runs */
    MS_UNIT_DONE      /* its backward has ended; that of other units goes on */
} ms_unit_phase;

struct ms_unit {
    ms_fsdp *fsdp;
    uint32_t index;
    char *name;
    ms_flat *flats;
    uint32_t count;
    uint32_t trainable; /* members that need gradients */
    bool frozen;        /* some member needs none */
    ms_unit_place place;
    ms_unit_phase phase;
    bool reshard_forward, reshard_backward;
    bool stay_sharded;  /* backward does without its values */
    bool full;          /* gathers give the shards' dtype */
    bool recorded_full; /* so did the gather for the forwards to which backward will come */
    uint32_t depth;     /* calls of its forward that have not returned */
    /* Modules that are to run before the unit is resharded, and how many modules it has. A bit for
     * each; those from number 63 on share the last bit. */
    uint64_t parts_left;
    bool warned; /* that not all of them ran */
    uint32_t parts;
    uint32_t pending; /* trainable members whose gradients have not come in this backward */
    /* Inputs of its recorded forwards that need gradients, and how many of those have come. blind:
     * some forward had no such input, so inputs do not tell when its backward has ended. */
    uint32_t inputs, inputs_done;
    ms_origin input; /* the last of them */
    bool blind;
    /* Uses to which this backward may still come: outputs of recorded forwards whose gradients have
     * not come, and forwards that backward has not recomputed. */
    uint32_t outputs_left, recomputes_left;
    bool deferred;   /* its gradients stay whole until the end of backward, and are reduced then */
    bool recomputed; /* the backward that runs is that of recomputed forwards only */
    uint32_t
        turn; /* lockstep.c: its place among the units that were gathered, from 1; 0: none yet */
    uint64_t gathers; /* number of gathers so far */
    bool prefetched;  /* the last gather was for a use that has not come yet */
    bool entered;     /* its backward use has begun with a recomputed forward */
    uint32_t use;     /* schedule.c: number of its present use in the pass */
    ms_keep keep;     /* whether it is resharded after that */
};

/* A forward of a unit, as gradient hooks know it. Freed with the graph. */
typedef struct ms_visit {
    ms_fsdp *fsdp; /* retained */
    uint64_t pass; /* in which the forward was */
    uint32_t unit;
    bool recomputed;  /* the forward ran inside of a backward */
    ms_origin tensor; /* whose gradient it waits for */
} ms_visit;

/* schedule.c. What is done at a recorded use: units at `first` of the list, those at its beginning
 * before those at its end. */
typedef struct ms_schedule_entry {
    uint32_t first, beginning, ending;
    ms_keep keep;
} ms_schedule_entry;

/* The order of uses in passes of one kind, and what is gathered ahead in them. */
typedef struct ms_schedule {
    ms_fsdp_use *uses, *present;              /* of the last whole pass, and of the one that runs */
    uint32_t use_count, present_count, ended; /* ended: of the pass that runs */
    size_t use_capacity, present_capacity;
    uint64_t passes, changes;
    ms_schedule_entry *entries; /* for each of `uses`, or none */
    uint32_t *gathers;          /* units */
    uint32_t entry_count, gather_count;
    size_t entry_capacity, gather_capacity;
    bool planned; /* the entries are a planner's */
    bool follows; /* the pass that runs has had the recorded uses so far, and there are entries */
} ms_schedule;

/* A sharded model. References: the host's, and one for each visit; the parts go with the host's, so
 * hooks of graphs that outlive the model find it closed. Host thread only. */
struct ms_fsdp {
    ms_engine *engine;
    ms_fsdp *next; /* of the engine's list */
    ms_fsdp_layout layout;
    uint32_t references;
    bool closed, abandoned;
    ms_group *group, *shards, *replicas, *near;
    ms_bucket_kind kind;
    double divisor;
    ms_member *members;
    uint32_t member_count;
    ms_flat *flats; /* in order of units */
    uint32_t flat_count;
    ms_unit *units;
    uint32_t unit_count;
    ms_prefetch_mode mode;
    bool forward_ahead, planner;
    ms_schedule schedules[MS_SCHEDULES];
    ms_schedule *running, *interrupted; /* of the pass that runs; of the one around it */
    bool sync, replica_sync, offload;
    bool full; /* forwards that begin compute in the shards' dtype */
    ms_gather_extension extension;
    bool in_backward;  /* some unit's backward runs */
    bool ends;         /* the end of the backward that runs will be seen */
    uint64_t pass;     /* number of backwards that have ended */
    ms_flat **buckets; /* trainable flat parameters by place */
    uint32_t bucket_count;
    uint32_t depth;  /* calls of units' forwards that have not returned */
    bool begun;      /* a forward has begun a pass, whose backward has not ended */
    bool timed;      /* the times of a pass were begun, and it has not ended */
    bool reducing;   /* a unit of this pass was, or is to be reduced */
    bool reduced;    /* the last pass was reduced, and none was begun since */
    bool asks_order; /* some link may ask for the first or the last bucket of a pass */
    bool continues;  /* pieces had gradients of earlier passes when this one's reductions began */
    bool whole_results; /* some link holds results until the last bucket */
    bool reduces_once;  /* some link must see all of a unit's gradients at once */
    uint32_t launched;  /* reductions of this pass so far */
    ms_unit *held;      /* whose reduction may be the last of the pass, and is held back */
    ms_reduced_function on_reduced;
    bool stepped; /* see ms_fsdp_note_step */
    void *on_reduced_user;
    void (*on_reduced_free)(void *user);
    ms_times times;
    ms_gathers gather_times;
    ms_prefetch_counts prefetched, step_prefetched;
    char error[MS_ERROR_MESSAGE_BYTES]; /* that has ended the job; "": none has */
    ms_inflight *gathers, *reductions;
    ms_turns casts, wires; /* gathers of casts, and copies from wires */
    ms_rooms whole_rooms, wire_rooms, cast_rooms, gradient_rooms;
    ms_link links[MS_CHAIN_LINKS];
    uint32_t link_count;
    ms_comm_hook hook;
    void *hook_user;
    void (*hook_free)(void *user);
    /* Units in the order in which their recorded forwards ended, each as often as that happened;
     * and how many of these visits backward has not come to. */
    uint32_t *order;
    size_t order_count, order_capacity, order_left;
    uint32_t *summoned;
    uint32_t summoned_count;
    bool summoning; /* what is gathered is given back at once on ranks that look at nothing */
    /* lockstep.c. The number of forwards of the root; the units that have a turn; how many ranks
     * had inputs in the last exchange; the words of this rank, then of all ranks. */
    bool find_unused, joining, live_divisor, replica_sync_before;
    uint64_t forwards;
    uint32_t turns, live;
    int64_t *words;
    int32_t *brought;                          /* filled.c: a word for each member */
    ms_agreements agreements, pass_agreements; /* so far; in the last pass that has ended */
};

/* -------------------------------------------------------------- flat_param.c */

/* Sets members' places and the lengths, for `ranks` shards of which this rank has number `rank`. */
void ms_flat_lay_out(ms_flat *flat, ms_fsdp_layout layout, uint32_t ranks, uint32_t rank);
/* The elements of the parameter that the rank with that number has; none past the last rank. */
void ms_flat_cut(const ms_member *member, uint32_t rank, int64_t *first, int64_t *count);
/* Makes the memory, moves the values there, and turns the tensors into pieces. */
ms_status ms_flat_make(ms_flat *flat);
void ms_flat_free(ms_flat *flat);
/* The view of a tensor in the order of the flat gradient in the member's shape, owned. */
ms_status ms_flat_view(ms_tensor *gradient, const ms_member *member, ms_tensor **out);
/* The view of a tensor [length] that is the member's piece, in its shape. */
ms_status ms_member_piece_of(const ms_member *member, ms_tensor *shard, ms_tensor **out);
/* Cuts a storage of `length` elements of that dtype into parts as the shard. */
ms_status ms_flat_split_state(ms_flat *flat, ms_storage *storage, ms_dtype dtype);
/* Copies this rank's part of the whole to the shard. */
ms_status ms_flat_keep_own(ms_flat *flat);
/* After a gather to the wire, on that stream: the numbers go to their places in the whole. */
ms_status ms_flat_arrange(ms_flat *flat);
/* Whether its ranks have different parts of it. */
static inline bool ms_flat_is_sharded(const ms_flat *flat) { return flat->padded != flat->length; }
/* Whether whole parameters have memory of their own: they are sharded, cast or offloaded. */
static inline bool ms_flat_is_apart(const ms_flat *flat)
{
    return ms_tensor_storage(flat->form.whole) != ms_tensor_storage(flat->shard);
}
/* Whether the reduced gradient stays in the bucket: all ranks have all of it, in its dtype. */
bool ms_flat_is_in_bucket(const ms_flat *flat);
/* Gathers to come give the shard's dtype, or that of computing. The whole must be dropped. */
void ms_flat_set_full(ms_flat *flat, bool yes);
/* Copies the shard for a gather, on the current stream. */
ms_status ms_flat_cast(ms_flat *flat);
/* `outside`, for a gather to come, which puts rows in order there. Of a flat parameter that is not
 * sharded it is the shard. MS_OK where the whole has no memory of its own: then there is none. */
ms_status ms_flat_make_outside(ms_flat *flat);
/* `outside` takes the place of form.whole, and gives it back; nothing where it is not there. */
void ms_flat_go_outside(ms_flat *flat);
void ms_flat_come_back(ms_flat *flat);
/* A contiguous copy in the second pool. */
ms_status ms_copy_offloaded(ms_engine *engine, ms_tensor *from, ms_tensor **out);
/* Whether gathers send what an extension makes; and such a gather, from the shard as gathers take
 * it to the whole or to the wire, on this stream. */
bool ms_extend_applies(const ms_flat *flat);
ms_status ms_extend_gather(ms_flat *flat, ms_tensor *shard, ms_stream *stream, ms_tensor *to);
void ms_extend_free(ms_fsdp *fsdp);
/* A new tensor [length] where shards are. */
ms_status ms_flat_new_beside(ms_flat *flat, ms_dtype dtype, ms_tensor **out);
/* Memory for the reduced gradient, and members' views of it, unless it is there. */
ms_status ms_flat_make_reduced(ms_flat *flat);
/* Adds one tensor to another of any float dtype, in place. */
ms_status ms_flat_add(ms_tensor *to, ms_tensor *from);
/* The bytes of the flat parameter as forward uses it, and of a shard. */
uint64_t ms_flat_bytes(const ms_flat *flat);
uint64_t ms_flat_shard_bytes(const ms_flat *flat);

/* ----------------------------------------------------------- static_memory.c */

/* How many whole flat parameters, and how many gradients, tasks may still use after they were
 * dropped. */
void ms_fsdp_limit_rooms(ms_fsdp *fsdp, uint32_t gathers, uint32_t reductions);
/* As ms_storage_refill; in a room, where steps may become graphs. *number: that of the tensor's
 * last room, or 0; becomes that of its new one. */
ms_status ms_rooms_refill(ms_rooms *rooms, ms_flat *flat, ms_tensor *tensor, ms_stream *stream,
                          uint32_t *number);
/* As ms_storage_drop. */
ms_status ms_rooms_drop(ms_rooms *rooms, ms_tensor *tensor, const char *owner);
/* The number of the room that the tensor is in (ms_collective.standing), or 0; and that of two such
 * numbers together. */
uint32_t ms_rooms_number(const ms_rooms *rooms, const ms_tensor *tensor);
uint32_t ms_rooms_pair(uint32_t first, uint32_t second);
/* Frees all rooms. Tensors stay in what becomes ordinary memory. */
void ms_fsdp_clear_rooms(ms_fsdp *fsdp);

/* --------------------------------------------------------- secondary_shard.c */

ms_status ms_near_make(ms_flat *flat);
/* Whether a gather within the near group gives the values of the shards. */
bool ms_near_is_usable(const ms_flat *flat);
/* After a forward, while the whole is there: keeps parts of it, until they are dropped. */
ms_status ms_near_keep(ms_unit *unit);
ms_status ms_near_drop(ms_unit *unit);

/* -------------------------------------------------------------------- unit.c */

void ms_unit_enter(ms_unit *unit, ms_unit_phase phase);
/* "root", or the name of its module. */
static inline const char *ms_unit_called(const ms_unit *unit)
{
    return *unit->name ? unit->name : "root";
}
/* An edge of the unit has done its work: a range of the trace since record `first`, and a line of
 * the log at level debug. edge: "pre_forward" ... */
void ms_unit_note(const ms_unit *unit, const char *edge, size_t first);
/* Whether gathers to come give the shards' dtype; what is gathered in the other one is resharded.
 * MS_ERROR_STATE while that is in use. */
ms_status ms_unit_set_full(ms_unit *unit, bool yes);
/* Enqueues the gather of what is not gathered or has changed since; handles stay as they are. */
ms_status ms_unit_gather(ms_unit *unit);
/* The same for all of it, whatever is gathered already: where ranks may have gathered different
 * units. */
ms_status ms_unit_gather_anew(ms_unit *unit);
/* Whether ms_unit_gather would enqueue nothing. */
bool ms_unit_is_fresh(const ms_unit *unit);
/* After a gather: the current stream waits for it, and handles become whole parameters. */
ms_status ms_unit_use(ms_unit *unit);
/* Handles become pieces. MS_ERROR_STATE if a whole parameter was written, which would be lost. */
ms_status ms_unit_release(ms_unit *unit);
/* Gives the memory of whole parameters back, if the unit is sharded. Handles must be pieces. */
ms_status ms_unit_reshard(ms_unit *unit);
/* The bytes of its whole flat parameters, as far as they are sharded. */
uint64_t ms_unit_whole_bytes(const ms_unit *unit);
/* The tensor of a member becomes the whole parameter, or its piece, without any task. */
void ms_member_show(ms_member *member, bool whole);

/* --------------------------------------------------------------- schedule.c */

/* Around a pass, or an evaluation; and giving up all of them. */
void ms_schedule_begin(ms_fsdp *fsdp, ms_schedule_kind kind);
ms_status ms_schedule_end(ms_fsdp *fsdp, ms_schedule_kind kind);
void ms_schedule_give_up(ms_fsdp *fsdp);
/* Entries for the modes that follow the recorded order. */
ms_status ms_schedule_fill(ms_fsdp *fsdp, ms_schedule *schedule);
void ms_schedule_free(ms_schedule *schedule, ms_context *context);
/* A use begins; its gathers ahead, once its own gather is enqueued; and it has ended, and the unit
 * is resharded if it is to be. */
ms_status ms_schedule_enter(ms_unit *unit, bool backward);
ms_status ms_schedule_gather(ms_unit *unit, bool backward);
ms_status ms_schedule_leave(ms_unit *unit, bool backward);
/* Whether a planner's entries say what is gathered ahead now. */
bool ms_schedule_is_planned(const ms_fsdp *fsdp);

/* ----------------------------------------------------------------- partial.c */

/* Whether the reduction that comes leaves replicas out. */
bool ms_flat_is_partial(const ms_flat *flat);
/* On the communication stream, which is current: the chain's result over the shard group; keeping
 * it; and adding what is kept to the gradients that are about to be reduced. */
ms_status ms_flat_run_partly(ms_flat *flat, ms_tensor **result);
ms_status ms_flat_carry(ms_flat *flat, ms_tensor *result);
ms_status ms_flat_add_carried(ms_flat *flat);

/* ------------------------------------------------------------------ filled.c */

/* After a reduction: whether the member has a gradient, as far as this rank knows. If it does not
 * know, `unsure` is set. */
bool ms_member_has_gradient(ms_member *member);
/* After the reductions of a pass: gradients that other ranks alone have filled are put, and the
 * others stay nil. A rank that is sure of all its members does not wait. */
ms_status ms_filled_exchange(ms_fsdp *fsdp);
void ms_filled_forget(ms_fsdp *fsdp);

/* ------------------------------------------------------------------- outer.c */

/* Takes over a gradient of the piece, or of an unsharded parameter, from a use outside of its unit.
 */
ms_status ms_outer_take(ms_member *member, ms_tensor *gradient);
/* Before a reduction, and on the communication stream after one: those that wait are added. */
ms_status ms_outer_add_before(ms_flat *flat);
ms_status ms_outer_add_after(ms_flat *flat);
/* Whether another reduction must take some of them. */
bool ms_outer_is_left(const ms_flat *flat);
/* At the end of a backward: the rest becomes, or is added to, the gradients of pieces. */
ms_status ms_outer_end(ms_fsdp *fsdp);

/* ------------------------------------------------------------------ reduce.c */

/* Before a unit's backward, with pieces as handles: puts gradients of earlier passes aside. */
ms_status ms_unit_hold_gradients(ms_unit *unit);
/* With whole parameters as handles: memory for the unit's gradients, which backward then writes. */
ms_status ms_unit_expect_gradients(ms_unit *unit);
/* The gradient of a member was added up: it goes to its place, if it is not there. */
ms_status ms_member_collect(ms_member *member);
/* Backward writes the unit's gradients no more. Handles become pieces. */
ms_status ms_unit_detach_gradients(ms_unit *unit);
/* Instead of a reduction: gradients of earlier passes, which were put aside, are the pieces' again.
 */
ms_status ms_unit_restore_gradients(ms_unit *unit);
/* Enqueues the reduction of what was detached. The pieces' gradients are then the reduced ones.
 * index, is_last: its place among the reductions of the pass. */
ms_status ms_flat_reduce(ms_flat *flat, uint32_t index, bool is_last);

/* Before ms_pass_reduce, of a unit that had no backward: its gradients are zeros, or what passes
 * without synchronization have left. marked: those of other ranks are multiplied by a loss scale.
 */
ms_status ms_unit_prepare_reduction(ms_unit *unit, bool marked);
/* Whether earlier passes have left gradients that no reduction between all ranks has taken. */
bool ms_unit_has_leftover(const ms_unit *unit);

/* -------------------------------------------------------------------- pass.c */

/* An error inside of a pass ends the job: the other ranks would wait for this one's collectives.
 * Returns status. */
ms_status ms_fsdp_end_job(ms_fsdp *fsdp, ms_status status);
/* Around each forward of a unit. */
ms_status ms_pass_enter_forward(ms_unit *unit);
ms_status ms_pass_leave_forward(ms_fsdp *fsdp);
/* Whether uses count as hits or misses now: those in backward, and, where something is gathered
 * ahead in forward, all of a pass. */
bool ms_pass_counts(const ms_fsdp *fsdp);
/* Before a unit's backward; before fsdp->in_backward becomes true. */
ms_status ms_pass_enter_backward(ms_unit *unit);
/* What was enqueued for a unit's backward that begins, or for one to come: whether there was
 * anything to gather. */
void ms_pass_note_gather(ms_unit *unit, bool any);
void ms_pass_note_prefetch(ms_unit *unit, bool any);
/* A unit that is held back is launched now: its gradients are about to be put aside again. */
ms_status ms_pass_let_go(ms_unit *unit);
/* After a unit's backward: whether its gradients may be reduced now. Otherwise they stay whole, as
 * without synchronization, until backward ends. */
bool ms_pass_may_reduce(ms_unit *unit);
/* Its reductions are launched, now or later in this pass. */
ms_status ms_pass_reduce(ms_unit *unit);
/* After backward: the current stream waits for the results of this pass, if it reduces. */
ms_status ms_pass_end(ms_fsdp *fsdp);
void ms_pass_give_up(ms_fsdp *fsdp);

/* ---------------------------------------------------------------- lockstep.c */

ms_status ms_agree_open(ms_fsdp *fsdp);
/* Whether ranks agree on what comes next before each collective. */
bool ms_agree_is_on(const ms_fsdp *fsdp);
/* These gather and reduce a unit, if need be once all ranks do; and end a forward or backward. */
ms_status ms_agree_on_gather(ms_unit *unit);
ms_status ms_agree_on_reduction(ms_unit *unit);
ms_status ms_agree_on_end(ms_fsdp *fsdp, bool of_backward);

/* --------------------------------------------------------------- gradients.c */

/* With pieces as handles: gathers the gradients of the unit, and puts those of pieces aside. */
ms_status ms_gradients_gather(ms_unit *unit, bool offload);
/* With whole parameters as handles: the whole gradients are theirs; and the end of that. */
ms_status ms_gradients_show(ms_unit *unit);
ms_status ms_gradients_take(ms_unit *unit);
/* With pieces as handles: they get their gradients again; with what was written, if `write`. */
ms_status ms_gradients_put_back(ms_unit *unit, bool write);
void ms_gradients_forget(ms_member *member);

/* ------------------------------------------------------------ module_hooks.c */

/* Gradient hook of each trainable member; user is its ms_member. */
ms_status ms_member_on_gradient(void *user, ms_tensor *leaf);
void ms_fsdp_let_go(ms_fsdp *fsdp); /* one reference */

#endif
