/* state.h: the inside of a sharded model. For fsdp/ only.
 *
 * An engine keeps the list of its sharded models in the slot MS_SLOT_FSDP.
 *
 * The files call downwards in this order: sharded_model.c (making, asking), stats.c, summon.c
 * (whole parameters outside of passes), shard.c (shards as one tensor), module_hooks.c (a unit's
 * forward and backward), schedule.c (gathers ahead), lockstep.c (which unit comes next, where ranks
 * use different ones), pass.c (what is of a whole pass), reduce.c (gradients of a unit), outer.c
 * (gradients of uses outside of units), filled.c (which parameters have a gradient after a pass),
 * partial.c (reductions within the shard group only), unit.c (gathering, handles), gather_codec.c
 * (gathers that send something else than shards), fp8_gather.c (gathers of 8-bit floats),
 * secondary_shard.c (parts that stay after forward), gradients.c (whole gradients), flat_param.c
 * (memory), static_memory.c (memory that is the same in each step). There are two exceptions.
 * pass.c tells schedule.c that a pass begins or is given up. flat_param.c makes and frees what
 * fp8_gather.c, secondary_shard.c and gradients.c keep in a flat parameter. forecast.c calls no
 * other file.
 */
#ifndef MOONSHARD_FSDP_STATE_H
#define MOONSHARD_FSDP_STATE_H

#include "base/assert.h"
#include "hook/source.h"
#include "meter/gather_times.h"
#include "meter/pass_times.h"
#include "moonshard/fsdp.h"

typedef struct ms_flat_param ms_flat_param;
typedef struct ms_unit ms_unit;

/* One parameter. Its address is the user pointer of its gradient hook, so the array never moves. */
typedef struct ms_member {
    ms_fsdp *fsdp;
    ms_flat_param *flat;
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
    ms_tensor *whole_gradient, *saved_grad;
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
    bool scaled;  /* what was detached is multiplied by a loss scale */
} ms_member;

/* When the last two users of memory that copies take in turn are done. */
typedef struct ms_turns {
    ms_point ended[2];
    uint32_t count;
} ms_turns;

/* Whole parameters of one dtype, and what gathers them; what else is of them is in ms_flat_param.
 */
typedef struct ms_form {
    ms_tensor *whole; /* [padded]; dropped while the unit is not gathered */
    ms_tensor *wire;  /* [padded]; by rows: what a gather gives, shard by shard; else NULL */
    /* [length], dropped but in a gather: a copy of the shard in the device's memory, in the dtype
     * of the whole; NULL: the shard is that itself, or nothing travels. */
    ms_tensor *cast;
    /* Versions when the last gather was enqueued: of the shard, which tells whether the whole is
     * still right, and of the whole, which tells whether a script wrote there. */
    uint64_t shard_version, whole_version;
    /* The last blocks of whole, wire and cast (ms_static_memory_refill). */
    uint32_t whole_block, wire_block, cast_block;
} ms_form;

/* fp8_gather.c: what gathers of codes need; NULLs where none are. */
typedef struct ms_fp8_form {
    ms_tensor *most;       /* [members], i32: the bits of the greatest size of each, on all ranks */
    ms_tensor *codes;      /* [length], u8, dropped but in a gather: of the shard */
    ms_tensor *arrived;    /* [padded], u8, dropped but in a gather: of all shards */
    uint64_t most_version; /* of the shard that `most` is of */
    uint32_t most_number, codes_block, arrived_block;
    bool known; /* `most` is of some shard */
} ms_fp8_form;

/* The blocks of tensors that are taken and dropped in turn. Zeroed: none yet. */
typedef struct ms_static_entry ms_static_entry;
typedef struct ms_static_memory {
    ms_static_entry *list;
    uint32_t count, lag;
    size_t capacity;
    uint64_t drops;
} ms_static_memory;

static inline void ms_outer_forget(ms_member *member)
{
    ms_tensor_release(member->outer);
    member->outer = NULL;
}

/* A flat parameter: its memory, and the bucket in which its gradient is reduced. */
struct ms_flat_param {
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
    bool coded;                      /* gathers send 8-bit floats */
    ms_group *shards;                /* whose ranks have parts of it */
    int64_t numbers, padded, length; /* elements; padded is ranks times length */
    /* The form that gathers give now, in the dtype of computing unless `full`; and the other one,
     * dropped, which has no tensors where the two dtypes are one. */
    ms_form form, other;
    bool full;
    ms_fp8_form fp8;
    /* [length]; the memory of the whole in the shard's dtype if not sharded */
    ms_tensor *shard;
    /* Gathers by an extension: the shard's version in the last one; and whether the one that runs
     * is the first of its version. */
    struct {
        uint64_t version;
        bool any, is_fresh;
    } extended;
    ms_tensor *source; /* all of the shard's storage, the part of empty pieces included */
    ms_tensor *
        near; /* secondary_shard.c: a part of the whole, dropped but between forward and backward */
    uint64_t secondary_version; /* of the shard when the part was gathered */
    ms_tensor *summon_copy;     /* during a summon: what an unsharded parameter held */
    /* During a summon with offload: what takes the place of form.whole, in the second pool; and
     * form.whole as it was, once its place is taken. Both owned. */
    ms_tensor *offloaded, *resident;
    ms_point gathered;  /* when the last gather is done */
    bool awaited;       /* the model's stream has waited for it */
    ms_bucket bucket;   /* flat: [padded], dropped between backwards; not of frozen parameters */
    uint32_t block;     /* the last one of the bucket's memory */
    ms_tensor *reduced; /* [length]; made at the first reduction */
    ms_tensor *carried; /* partial.c: [length], or NULL */
    ms_point ready[2];  /* when the last reduction is done: see ms_bucket_state in ddp */
};

/* IN_USE: the handles of a unit are whole parameters, and have memory. GATHERED: the whole
 * parameters have memory, but handles are pieces, since nothing uses the unit. SHARDED: handles are
 * pieces, and whole parameters have no memory. */
typedef enum ms_unit_place { MS_UNIT_SHARDED, MS_UNIT_GATHERED, MS_UNIT_IN_USE } ms_unit_place;

/* Where a unit is in a pass. unit.c lists the legal changes. */
typedef enum ms_unit_phase {
    MS_UNIT_IDLE,
    MS_UNIT_FORWARD,  /* its forward runs */
    MS_UNIT_AWAITING, /* its forward was recorded; its backward is to come */
    MS_UNIT_INPUTS,   /* the first part of its backward runs, which gives no gradients to it */
    MS_UNIT_BACKWARD, /* its backward runs */
    MS_UNIT_DONE      /* its backward has ended; that of other units goes on */
} ms_unit_phase;

/* What a unit is, and when it is resharded. */
typedef struct ms_unit_settings {
    uint32_t trainable; /* members that need gradients */
    uint32_t modules;   /* how many it has */
    bool frozen;        /* some member needs none */
    bool reshard_forward, reshard_backward;
    bool stay_sharded; /* backward does without its values */
} ms_unit_settings;

/* What a unit's backward waits for. */
typedef struct ms_unit_backward {
    uint32_t pending; /* trainable members whose gradients have not come in this backward */
    /* Inputs of its recorded forwards that need gradients, and how many of those have come.
     * no_grad_inputs: some forward had no such input, so inputs do not tell when its backward has
     * ended. */
    uint32_t inputs, inputs_done;
    ms_origin input; /* the last of them */
    bool no_grad_inputs;
    /* Of a first part of backward: number of the forward that it goes through, and how many inputs
     * of that have got their gradients. */
    uint64_t first_forward;
    uint32_t first_done;
    /* Uses to which this backward may still come: outputs of recorded forwards whose gradients have
     * not come, and forwards that backward has not recomputed. */
    uint32_t outputs_left, recomputes_left;
    bool deferred;   /* its gradients stay whole until the end of backward, and are reduced then */
    bool recomputed; /* the backward that runs is that of recomputed forwards only */
} ms_unit_backward;

struct ms_unit {
    ms_fsdp *fsdp;
    uint32_t index;
    char *name;
    ms_flat_param *flats;
    uint32_t count;
    ms_unit_settings settings;
    ms_unit_place place;
    ms_unit_phase phase;
    bool full;          /* gathers give the shards' dtype */
    bool recorded_full; /* so did the gather for the forwards to which backward will come */
    uint32_t depth;     /* calls of its forward that have not returned */
    /* Modules that are to run before the unit is resharded. A bit for each; those from number 63 on
     * share the last bit. */
    uint64_t modules_left;
    bool warned; /* that not all of them ran */
    ms_unit_backward backward;
    uint32_t
        turn; /* lockstep.c: its place among the units that were gathered, from 1; 0: none yet */
    uint64_t gathers;  /* number of gathers so far */
    uint64_t forwards; /* number of recorded forwards so far */
    bool prefetched;   /* the last gather was for a use that has not come yet */
    bool entered;      /* its backward use has begun with a recomputed forward */
    uint32_t use;      /* schedule.c: number of its present use in the pass */
    ms_keep keep;      /* whether it is resharded after that */
};

/* A forward of a unit, as gradient hooks know it. Freed with the graph. */
typedef struct ms_visit {
    ms_fsdp *fsdp;    /* retained */
    uint64_t pass;    /* in which the forward was */
    uint64_t forward; /* its number among the unit's */
    uint32_t unit;
    uint32_t inputs;  /* of an input: how many inputs of that forward are watched */
    bool recomputed;  /* the forward ran inside of a backward */
    ms_origin tensor; /* whose gradient it waits for */
} ms_visit;

/* What is done at a recorded use: units at `first` of the list, those at its beginning before those
 * at its end. */
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

/* How gradients are reduced. */
typedef struct ms_fsdp_hooks {
    ms_link links[MS_CHAIN_LINKS];
    uint32_t link_count;
    ms_comm_hook hook;
    void *hook_user;
    void (*hook_free)(void *user);
    bool asks_order;    /* some link may ask for the first or the last bucket of a pass */
    bool whole_results; /* some link holds results until the last bucket */
    bool reduces_once;  /* some link must see all of a unit's gradients at once */
} ms_fsdp_hooks;

/* The pass that runs. */
typedef struct ms_fsdp_pass {
    ms_schedule *running, *interrupted; /* of the pass that runs; of the one around it */
    bool in_backward;                   /* some unit's backward runs */
    bool ends;         /* the end of the backward that runs, or of its first part, will be seen */
    uint32_t depth;    /* calls of units' forwards that have not returned */
    bool begun;        /* a forward has begun a pass, whose backward has not ended */
    bool timed;        /* the times of a pass were begun, and it has not ended */
    bool reducing;     /* a unit of this pass was, or is to be reduced */
    bool reduced;      /* the last pass was reduced, and none was begun since */
    bool continues;    /* pieces had gradients of earlier passes when this one's reductions began */
    bool stepped;      /* see ms_fsdp_note_step */
    uint32_t launched; /* reductions of this pass so far */
    ms_unit *held;     /* whose reduction may be the last of the pass, and is held back */
    /* Units in the order in which their recorded forwards ended, each as often as that happened;
     * and how many of these visits backward has not come to. */
    uint32_t *order;
    size_t order_count, order_capacity, order_left;
} ms_fsdp_pass;

/* What limits memory, and what keeps its address. */
typedef struct ms_fsdp_memory {
    ms_inflight *gathers, *reductions;
    ms_turns casts, wires; /* gathers of casts, and copies from wires */
    ms_static_memory wholes, wire_blocks, cast_blocks, gradients, code_blocks, arrived_blocks;
} ms_fsdp_memory;

/* Whole parameters outside of passes: summon.c. */
typedef struct ms_fsdp_summons {
    uint32_t *units;
    uint32_t count;
    bool is_active; /* what is gathered is given back at once on ranks that look at nothing */
} ms_fsdp_summons;

/* Ranks that differ: lockstep.c. The number of forwards of the root; the units that have a turn;
 * how many ranks had inputs in the last exchange; the words of this rank, then of all ranks. */
typedef struct ms_fsdp_lockstep {
    bool find_unused, joining, live_divisor, replica_sync_before;
    uint64_t forwards;
    uint32_t turns, live;
    int64_t *words;
    int32_t *brought;                    /* filled.c: a word for each member */
    ms_lockstep_stats stats, pass_stats; /* so far; in the last pass that has ended */
} ms_fsdp_lockstep;

/* A sharded model. References: the host's, and one for each visit; the parts go with the host's, so
 * hooks of graphs that outlive the model find it closed. Host thread only. */
struct ms_fsdp {
    ms_gradient_source source; /* first */
    ms_fsdp_layout layout;
    uint32_t references;
    bool closed;
    ms_group *group, *shards, *replicas, *near;
    ms_bucket_kind kind;
    double divisor;
    ms_member *members;
    uint32_t member_count;
    ms_flat_param *flats; /* in order of units */
    uint32_t flat_count;
    ms_unit *units;
    uint32_t unit_count;
    ms_flat_param **buckets; /* trainable flat parameters by place */
    uint32_t bucket_count;
    ms_prefetch_mode mode;
    bool forward_ahead, planner;
    ms_schedule schedules[MS_SCHEDULES];
    bool sync, replica_sync, offload;
    bool full; /* forwards that begin compute in the shards' dtype */
    ms_gather_extension extension;
    ms_fsdp_hooks hooks;
    uint64_t pass; /* number of backwards that have ended */
    ms_fsdp_pass now;
    ms_fsdp_memory memory;
    ms_fsdp_summons summon;
    ms_fsdp_lockstep same;
    ms_times times;
    ms_gathers gather_times;
    ms_prefetch_counts prefetched, step_prefetched;
};

/* "root", or the name of its module. */
static inline const char *ms_unit_called(const ms_unit *unit)
{
    return *unit->name ? unit->name : "root";
}

#endif
