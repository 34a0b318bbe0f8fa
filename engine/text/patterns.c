/* patterns.c: the cuts of well-known tokenizers, by name, and their special tokens. */
#include "text/build.h"

#include <stdio.h>

#define SPECIAL(name, number)                                \
    {                                                        \
        .text = name, .bytes = sizeof name - 1, .id = number \
    }

/* Radford et al. 2019 (openai/gpt-2, encoder.py). */
#define GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
/* The cuts of openai/tiktoken 0.7, tiktoken_ext/openai_public.py. */
#define CL100K                                                           \
    "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}++|\\p{N}{1,3}+" \
    "| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*+|\\s++$|\\s*[\\r\\n]|\\s+(?!\\S)|\\s"
#define O200K_ENDS "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define O200K                                                                                    \
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"   \
    "+" O200K_ENDS "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}" \
    "\\p{Lo}\\p{M}]*" O200K_ENDS                                                                 \
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
/* Dubey et al. 2024 (meta-llama/llama-models, llama3/tokenizer.py). */
#define LLAMA3                                                               \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}" \
    "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const ms_special_token gpt2_special[] = { SPECIAL("<|endoftext|>", 50256) };
static const ms_special_token cl100k_special[] = {
    SPECIAL("<|endoftext|>", 100257),   SPECIAL("<|fim_prefix|>", 100258),
    SPECIAL("<|fim_middle|>", 100259),  SPECIAL("<|fim_suffix|>", 100260),
    SPECIAL("<|endofprompt|>", 100276),
};
static const ms_special_token o200k_special[] = {
    SPECIAL("<|endoftext|>", 199999),
    SPECIAL("<|endofprompt|>", 200018),
};
/* From the first id after the ranks on; reserved ones follow, up to 256 in all. */
static const ms_special_token llama3_special[] = {
    SPECIAL("<|begin_of_text|>", MS_NO_TOKEN),
    SPECIAL("<|end_of_text|>", MS_NO_TOKEN),
    SPECIAL("<|reserved_special_token_0|>", MS_NO_TOKEN),
    SPECIAL("<|reserved_special_token_1|>", MS_NO_TOKEN),
    SPECIAL("<|finetune_right_pad_id|>", MS_NO_TOKEN),
    SPECIAL("<|step_id|>", MS_NO_TOKEN),
    SPECIAL("<|start_header_id|>", MS_NO_TOKEN),
    SPECIAL("<|end_header_id|>", MS_NO_TOKEN),
    SPECIAL("<|eom_id|>", MS_NO_TOKEN),
    SPECIAL("<|eot_id|>", MS_NO_TOKEN),
    SPECIAL("<|python_tag|>", MS_NO_TOKEN),
    SPECIAL("<|image|>", MS_NO_TOKEN),
};

#define COUNTED(list) .special = list, .count = sizeof list / sizeof *list
static const ms_named_pattern patterns[] = {
    { "gpt2", GPT2, COUNTED(gpt2_special), .bos = "<|endoftext|>", .eos = "<|endoftext|>" },
    { "cl100k", CL100K, COUNTED(cl100k_special), .eos = "<|endoftext|>" },
    { "o200k", O200K, COUNTED(o200k_special), .eos = "<|endoftext|>" },
    { "llama3", LLAMA3, COUNTED(llama3_special), .reserved = 244, .bos = "<|begin_of_text|>",
      .eos = "<|end_of_text|>" },
};

const ms_named_pattern *ms_build_pattern(const char *name)
{
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (strcmp(name, patterns[i].name) == 0) return &patterns[i];
    return NULL;
}

static ms_status set_cuts(ms_context *context, ms_tokenizer *tokenizer, const char *pattern)
{
    ms_splitter *splitter = &tokenizer->splitters.items[tokenizer->splitters.count++];
    *splitter = (ms_splitter){ .kind = MS_SPLIT_PATTERN, .behavior = MS_BEHAVIOR_ISOLATED };
    return ms_pattern_new(context, pattern, strlen(pattern), MS_DIALECT_RUST, &splitter->pattern);
}

static ms_status add_special(ms_context *context, ms_tokenizer *tokenizer,
                             const ms_special_token *special)
{
    const uint8_t *at = (const uint8_t *)special->text;
    ms_span text = { .at = at, .end = at + special->bytes };
    uint32_t id = special->id;
    if (id == MS_NO_TOKEN) id = ms_tokenizer_find(tokenizer, special->text, special->bytes);
    if (id == MS_NO_TOKEN) id = ms_tokenizer_size(tokenizer);
    return ms_tokenizer_add(context, tokenizer, text, (ms_added_token){ .id = id, .special = true },
                            false);
}

/* Special tokens that belong to the pattern's name. */
static ms_status add_named(ms_context *context, ms_tokenizer *tokenizer,
                           const ms_named_pattern *named)
{
    ms_status status = MS_OK;
    for (uint32_t i = 0; !status && i < named->count; i++)
        status = add_special(context, tokenizer, &named->special[i]);
    for (uint32_t i = 0; !status && i < named->reserved; i++) {
        char name[48];
        int bytes = snprintf(name, sizeof name, "<|reserved_special_token_%u|>", i + 2);
        status = add_special(
            context, tokenizer,
            &(ms_special_token){ .text = name, .bytes = (size_t)bytes, .id = MS_NO_TOKEN });
    }
    return status;
}

static uint32_t find(const ms_tokenizer *tokenizer, const char *name)
{
    return name ? ms_tokenizer_find(tokenizer, name, strlen(name)) : MS_NO_TOKEN;
}

ms_status ms_build_options(ms_context *context, ms_tokenizer *tokenizer,
                           const ms_tokenizer_options *options, const char *otherwise)
{
    const char *given = options->pattern ? options->pattern : otherwise;
    const ms_named_pattern *named = ms_build_pattern(given);
    ms_status status = set_cuts(context, tokenizer, named ? named->pattern : given);
    for (uint32_t i = 0; !status && i < options->special_count; i++)
        status = add_special(context, tokenizer, &options->special[i]);
    if (!status && options->special == NULL && named) status = add_named(context, tokenizer, named);
    /* What is wrong here is the caller's mistake. */
    if (status == MS_ERROR_CORRUPT) status = context->error.status = MS_ERROR_ARGUMENT;
    if (status || named == NULL) return status;
    tokenizer->bos = find(tokenizer, named->bos);
    tokenizer->eos = find(tokenizer, named->eos);
    return MS_OK;
}
