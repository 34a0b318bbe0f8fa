/* link_kinds.c: the table of the native links: all that other code knows about each of them. */
#include "hook/links.h"

#include <stddef.h>
#include <string.h>

#define COUNT(list) (sizeof(list) / sizeof *(list))

/* ------------------------------------------------------------------ options */

/* Names of the values of each enum, in the order of the enum: an application that reads an option
 * writes the index of the name. premul_sum is missing from ops, because links choose its factor
 * themselves. */
static const char *const ops[] = { "sum", "avg", "min", "max", "prod", NULL };
static const char *const pers[] = { "tensor", "channel", "block", NULL };
static const char *const forms[] = { "all_gather", "all_to_all", NULL };
static const char *const scopes[] = { "global", "bucket", "lagged", NULL };
static const char *const actions[] = { "skip", "stop", NULL };

/* Applications write a choice through an int pointer at the option's offset. */
_Static_assert(sizeof(ms_reduce_op) == sizeof(int) && sizeof(ms_int8_per) == sizeof(int)
                   && sizeof(ms_int8_form) == sizeof(int) && sizeof(ms_clip_scope) == sizeof(int)
                   && sizeof(ms_nan_action) == sizeof(int),
               "hosts write a choice as an int");

/* Rows of the lists of options: the name in the Lua API, the type, and the field that it is written
 * to. */
#define AT(member) .offset = offsetof(ms_link_options, member)
#define NUMBER(text, member)                               \
    {                                                      \
        .name = text, .type = MS_OPTION_NUMBER, AT(member) \
    }
#define INTEGER(text, member)                               \
    {                                                       \
        .name = text, .type = MS_OPTION_INTEGER, AT(member) \
    }
#define BOOLEAN(text, member)                               \
    {                                                       \
        .name = text, .type = MS_OPTION_BOOLEAN, AT(member) \
    }
#define GROUP(text, member)                               \
    {                                                     \
        .name = text, .type = MS_OPTION_GROUP, AT(member) \
    }
#define CHOICE(text, member, list)                                          \
    {                                                                       \
        .name = text, .type = MS_OPTION_CHOICE, AT(member), .choices = list \
    }
#define END          \
    {                \
        .name = NULL \
    }

/* The options of each kind, in the order in which applications list them. A field that has no row
 * here cannot be set by a script and keeps the value of .defaults. */
static const ms_link_option of_reduce[] = {
    CHOICE("op", op, ops),
    { .name = "between", .type = MS_OPTION_BETWEEN, AT(between) },
    END,
};
/* Only links that reduce over a group of their choice have `group`. A mean is then over that
 * group's size, see ms_link_share. */
static const ms_link_option of_all_reduce[] = { CHOICE("op", op, ops), GROUP("group", group), END };
static const ms_link_option of_noop[] = { GROUP("group", group), END };
/* A cast has no default: f16 and bf16 lose different things, so the script says which. */
static const ms_link_option of_cast[] = {
    { .name = "dtype",
      .type = MS_OPTION_DTYPE,
      AT(dtype),
      .required = "the dtype in which gradients are sent: f16, bf16 or f32" },
    END,
};
static const ms_link_option of_error_feedback[] = { NUMBER("decay", decay), END };
/* The defaults, further down, are those of PyTorch's PowerSGDState, so that what is known about it
 * applies here. */
static const ms_link_option of_powersgd[] = {
    INTEGER("rank", powersgd.rank),
    INTEGER("start_step", powersgd.start_step),
    NUMBER("min_rate", powersgd.min_rate),
    BOOLEAN("error_feedback", powersgd.error_feedback),
    BOOLEAN("warm_start", powersgd.warm_start),
    NUMBER("eps", powersgd.eps),
    INTEGER("seed", powersgd.seed),
    BOOLEAN("batched", powersgd.batched),
    INTEGER("stats_every", powersgd.stats_every),
    END,
};
static const ms_link_option of_int8[] = {
    CHOICE("per", int8.per, pers),
    INTEGER("block", int8.block),
    CHOICE("form", int8.form, forms),
    END,
};
/* `fraction` has no sensible default: it decides between speed and accuracy. */
static const ms_link_option of_top_k[] = {
    { .name = "fraction",
      .type = MS_OPTION_NUMBER,
      AT(top_k.fraction),
      .required = "the part of the numbers that is sent, such as 0.01" },
    NUMBER("momentum", top_k.momentum),
    END,
};
static const ms_link_option of_post_local_sgd[] = {
    { .name = "start_step",
      .type = MS_OPTION_INTEGER,
      AT(post_local_sgd.start_step),
      .required = "from which step on are means local?" },
    GROUP("subgroup", post_local_sgd.subgroup),
    BOOLEAN("reduce_after", post_local_sgd.reduce_after),
    END,
};
/* scope is required, since the three compute different things and only "global" is what other
 * libraries mean by clipping. */
static const ms_link_option of_clip[] = {
    { .name = "scope",
      .type = MS_OPTION_CHOICE,
      AT(clip.scope),
      .choices = scopes,
      .required = "global, bucket or lagged" },
    { .name = "max_norm",
      .type = MS_OPTION_NUMBER,
      AT(clip.max_norm),
      .required = "the greatest norm that gradients keep" },
    END,
};
static const ms_link_option of_nan_check[] = { CHOICE("action", nan_check.action, actions), END };

/* -------------------------------------------------------------------- kinds */

/* All places but this one. */
#define EXCEPT(place) (MS_PLACE_ALL & ~(place))
#define WHOLE_PASS \
    "it needs the numbers of all shards, and there each rank sees its own: put it before reduce"

/* The table of native links. Nothing else names a link: applications, checks and chains read its
 * facts here. A row without .places would work nowhere; a row with a place left out needs .reason.
 */
static const ms_link_kind kinds[] = {
    { .name = "reduce",
      .reduce = ms_reduce_reduce,
      .options = of_reduce,
      .defaults = { .op = MS_REDUCE_OP_AVG },
      .places = MS_PLACE_ALL,
      .can_round = true },
    /* The reduction of one kind of bucket, for scripts that say what they mean; in other places it
     * would return more numbers than the bucket's kind allows. */
    { .name = "all_reduce",
      .reduce = ms_reduce_reduce,
      .options = of_all_reduce,
      .defaults = { .op = MS_REDUCE_OP_AVG },
      .places = MS_PLACE(MS_BUCKET_ALL_REDUCE) | MS_PLACE_BETWEEN,
      .reason = "it leaves every rank all numbers; reduce ends a chain for every kind",
      .can_round = true },
    /* Nothing travels, and each rank trains by itself: for measuring what communication costs. */
    { .name = "noop",
      .reduce = ms_noop_reduce,
      .options = of_noop,
      .places = MS_PLACE_ALL,
      .is_local = true },
    { .name = "cast",
      .encode = ms_cast_encode,
      .decode = ms_cast_decode,
      .check = ms_cast_check,
      .options = of_cast,
      .places = MS_PLACE_ALL,
      .keeps_result = true,
      .casts = true },
    /* It adds the residual before the later links encode, and keeps what they lost. Integers or an
     * encoded buffer have no residual, hence needs_floats. */
    { .name = "error_feedback",
      .encode = ms_error_feedback_encode,
      .decode = ms_error_feedback_decode,
      .check = ms_error_feedback_check,
      .options = of_error_feedback,
      .defaults = { .decay = 1 },
      .places = MS_PLACE_ALL,
      .no_feedback = "one is enough: two would add every error twice",
      .has_state = true,
      .needs_floats = true,
      .keeps_result = true },
    /* one_model: start_step counts passes of the model whose last bucket ends a pass. Two models
     * would count together. */
    { .name = "powersgd",
      .reduce = ms_powersgd_reduce,
      .check = ms_powersgd_check,
      .options = of_powersgd,
      .defaults = { .powersgd = { .rank = 1,
                                  .start_step = 1000,
                                  .stats_every = 10000,
                                  .min_rate = 2,
                                  .error_feedback = true,
                                  .warm_start = true } },
      .places = MS_PLACE_ALL,
      .has_state = true,
      .one_model = true,
      .needs_floats = true,
      .compresses = true },
    /* It keeps no residual of its own; error_feedback before it does. */
    { .name = "int8",
      .reduce = ms_int8_reduce,
      .check = ms_int8_check,
      .options = of_int8,
      .defaults = { .int8 = { .block = 512 } },
      .places = MS_PLACE_ALL,
      .needs_floats = true },
    /* It keeps its own residual and reports all numbers as sent, so error_feedback before it is
     * allowed and has nothing to do. */
    { .name = "top_k",
      .reduce = ms_top_k_reduce,
      .check = ms_top_k_check,
      .options = of_top_k,
      .places = MS_PLACE_ALL,
      .has_state = true,
      .needs_floats = true },
    /* A vote is no mean of what was sent: no residual can make up for what it loses. */
    { .name = "sign_vote",
      .reduce = ms_sign_vote_reduce,
      .places = MS_PLACE_ALL,
      .no_feedback = "leave error_feedback out; recipes/hooks/onebit_adam.lua sends signs with "
                     "feedback",
      .needs_floats = true },
    /* The factors depend on all ranks' numbers, so a rank does not know what its own became. */
    { .name = "adasum",
      .reduce = ms_adasum_reduce,
      .places = MS_PLACE_ALL,
      .no_feedback = "leave error_feedback out",
      .needs_floats = true },
    /* It needs no floats: until start_step it is a reduction, and then each subgroup's. */
    { .name = "post_local_sgd",
      .reduce = ms_post_local_sgd_reduce,
      .check = ms_post_local_sgd_check,
      .options = of_post_local_sgd,
      .defaults = { .post_local_sgd = { .reduce_after = true } },
      .places = MS_PLACE(MS_BUCKET_ALL_REDUCE) | MS_PLACE_BETWEEN,
      .reason = "from start_step on each rank needs a copy of the parameters of its own, and the "
                "ranks of a shard group share one (of hybrid buckets, put it into hooks.reduce { "
                "between = ... })",
      .has_state = true,
      .one_model = true,
      .is_local = true },
    /* The link's decode writes the reduced gradients, so keeps_result is false. It is one_model
     * because of its "global" and "lagged" scopes; ms_link_is_of_one_model excepts "bucket". */
    { .name = "clip",
      .encode = ms_clip_encode,
      .decode = ms_clip_decode,
      .check = ms_clip_check,
      .options = of_clip,
      .places = EXCEPT(MS_PLACE_BETWEEN),
      .reason = WHOLE_PASS,
      .no_feedback = "put clip before error_feedback, so that it scales the finished mean",
      .has_state = true,
      .one_model = true,
      .clips = true },
    /* Its state is the flag "bad" of the pass. It keeps the result: what is wrong is left for the
     * optimizer to skip. */
    { .name = "nan_check",
      .encode = ms_nan_check_encode,
      .decode = ms_nan_check_decode,
      .options = of_nan_check,
      .places = EXCEPT(MS_PLACE_BETWEEN),
      .reason = WHOLE_PASS,
      .has_state = true,
      .one_model = true,
      .keeps_result = true,
      .checks = true },
};

/* Applications build their own tables from these rows at their start, in this order. */
const ms_link_kind *ms_link_kind_get(uint32_t index)
{
    return index < COUNT(kinds) ? &kinds[index] : NULL;
}

/* A linear search: it is used when a link is made, not when it runs. */
const ms_link_kind *ms_link_find(const char *name)
{
    for (size_t i = 0; i < COUNT(kinds); i++)
        if (strcmp(kinds[i].name, name) == 0) return &kinds[i];
    return NULL;
}
