/* moonshard/tokenizer.h: tokenizers: text to token ids and back, from the files that other programs
 * write.
 *
 * Invariants
 * - A tokenizer never changes once it is loaded. Any number of threads may use it; each has an
 *   encoder or a decoder of its own.
 * - Ids count from 0. On valid UTF-8 they equal those of the library that the file is written for.
 * - Text is bytes. Bytes that are no UTF-8 are seen by no pattern and no normalizer: a run of them
 *   is a piece of its own. A tokenizer that has a token for each byte keeps them.
 * - Files are untrusted input: a damaged one is MS_ERROR_CORRUPT, and one with a component that is
 *   not supported MS_ERROR_UNSUPPORTED; the message names the file and the component.
 * - A decoder's text never ends inside a character, unless the tokens themselves do. */
#ifndef MOONSHARD_TOKENIZER_H
#define MOONSHARD_TOKENIZER_H

#include "moonshard/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MS_NO_TOKEN UINT32_MAX
#define MS_TOKENIZER_FILE_MAX (256u << 20) /* bytes of a file that is read */
#define MS_TOKEN_ID_MAX ((1u << 22) - 1)

/* A special token of a file that does not name its own. id MS_NO_TOKEN: the next one after the
 * greatest so far. */
typedef struct ms_special_token {
    const char *text;
    size_t bytes;
    uint32_t id;
} ms_special_token;

/* For files that say less than a tokenizer.json. */
typedef struct ms_tokenizer_options {
    /* Where text is cut before it is encoded, for rank files of tiktoken and for vocab.json:
     * "gpt2", "cl100k", "o200k", "llama3", or a regular expression. NULL: a rank file is refused,
     * and vocab.json is cut as by GPT-2. */
    const char *pattern;
    /* NULL: those that belong to the named pattern. */
    const ms_special_token *special;
    uint32_t special_count;
} ms_tokenizer_options;

typedef struct ms_tokenizer ms_tokenizer;
/* Reads a file, or the tokenizer of a folder: tokenizer.json, tokenizer.model, vocab.json with
 * merges.txt, or encoder.json with vocab.bpe, the first of them that is there. What a file is shows
 * in its content. In a folder, tokenizer_config.json and special_tokens_map.json name the tokens
 * that begin and end a text, and added_tokens_decoder of tokenizer_config.json, or without it
 * added_tokens.json, adds tokens: with the ids of transformers 5, or MS_ERROR_CORRUPT if the files
 * do not agree about an id. options NULL: none. */
MS_API ms_status ms_tokenizer_load(ms_context *context, const char *path,
                                   const ms_tokenizer_options *options, ms_tokenizer **out);
/* From any thread. */
MS_API ms_tokenizer *ms_tokenizer_retain(ms_tokenizer *tokenizer);
MS_API void ms_tokenizer_release(ms_tokenizer *tokenizer); /* NULL is allowed */
/* The greatest id plus 1: the rows that a model's embedding needs. */
MS_API uint32_t ms_tokenizer_size(const ms_tokenizer *tokenizer);
/* Bytes of its tokens and merges, which are most of what it takes. */
MS_API uint64_t ms_tokenizer_memory(const ms_tokenizer *tokenizer);
/* The id of the token that is this text, or MS_NO_TOKEN. */
MS_API uint32_t ms_tokenizer_find(const ms_tokenizer *tokenizer, const char *text, size_t bytes);
/* A token as text: the bytes that it represents, or, in files of SentencePiece's kind, its name, in
 * which U+2581 is a space. NULL: no token has this id. */
MS_API const char *ms_tokenizer_token(const ms_tokenizer *tokenizer, uint32_t id, size_t *bytes);
/* The tokens that begin and end a text, or MS_NO_TOKEN where the files name none. */
MS_API uint32_t ms_tokenizer_bos(const ms_tokenizer *tokenizer);
MS_API uint32_t ms_tokenizer_eos(const ms_tokenizer *tokenizer);
/* Whether the token has no text of its own: the end of a text, the beginning of a turn ... */
MS_API bool ms_tokenizer_is_special(const ms_tokenizer *tokenizer, uint32_t id);

/* What becomes of the name of a special token in a text. */
typedef enum ms_special {
    MS_SPECIAL_TEXT,  /* it is encoded as the characters that it has */
    MS_SPECIAL_PARSE, /* it becomes the token */
    MS_SPECIAL_ERROR  /* MS_ERROR_ARGUMENT, and the message names it */
} ms_special;

/* Whether a text gets the tokens that begin or end it. */
typedef enum ms_edge {
    MS_EDGE_FILE, /* as the file says */
    MS_EDGE_NO,
    MS_EDGE_YES /* MS_ERROR_ARGUMENT if the file names no such token */
} ms_edge;

typedef struct ms_encode_options {
    ms_special special;
    ms_edge bos, eos;
} ms_encode_options;

/* Memory for encoding, and the ids of pieces that came before. One thread uses it. It retains the
 * tokenizer. */
typedef struct ms_encoder ms_encoder;
MS_API ms_status ms_encoder_new(ms_context *context, ms_tokenizer *tokenizer, ms_encoder **out);
MS_API void ms_encoder_free(ms_encoder *encoder);                     /* NULL is allowed */
MS_API ms_tokenizer *ms_encoder_tokenizer(const ms_encoder *encoder); /* borrowed */
/* Bytes that an encoder takes for itself, at most, for texts of usual length. */
#define MS_ENCODER_BYTES ((size_t)3 << 20)
/* The ids belong to the encoder and live until its next call. */
MS_API ms_status ms_encode(ms_context *context, ms_encoder *encoder, const char *text, size_t bytes,
                           const ms_encode_options *options, const uint32_t **ids, size_t *count);

/* Ids to text, as they come. One thread uses it. It retains the tokenizer. */
typedef struct ms_decoder ms_decoder;
/* special: special tokens give their names; otherwise they give nothing. */
MS_API ms_status ms_decoder_new(ms_context *context, ms_tokenizer *tokenizer, bool special,
                                ms_decoder **out);
MS_API void ms_decoder_free(ms_decoder *decoder); /* NULL is allowed */
/* The text that these ids complete; a character whose bytes have not all come waits. It belongs to
 * the decoder and lives until its next call. MS_ERROR_ARGUMENT for an id that is no token's: then
 * nothing was taken. */
MS_API ms_status ms_decoder_add(ms_context *context, ms_decoder *decoder, const uint32_t *ids,
                                size_t count, const char **text, size_t *bytes);
/* The bytes that still wait; after it a new text begins. */
MS_API void ms_decoder_finish(ms_decoder *decoder, const char **text, size_t *bytes);

/* ------------------------------------------------------------------- shards */

#define MS_DOCUMENT_MAX (UINT64_C(1) << 31) /* bytes of a file of text, or of a line */

/* A file of text, which is a document. With a field, the lines of a file that begin from byte
 * `begin` on and before `end`: each is a JSON object, and its member of that name a document.
 * Lines without any character but spaces are passed over. */
typedef struct ms_shard_part {
    const char *path;
    uint64_t begin, end; /* with a field only */
} ms_shard_part;

/* A file of tokens in llm.c's format, and what it is made of, in order. */
typedef struct ms_shard_job {
    const char *out;
    const ms_shard_part *parts;
    uint32_t count;
} ms_shard_job;

typedef struct ms_sharding_options {
    uint32_t width;   /* bytes of a token: 2 or 4 */
    uint32_t end;     /* the token after each document; MS_NO_TOKEN: none */
    uint32_t threads; /* each writes one shard at a time */
    ms_special special;
    const char *field; /* of lines of JSON; NULL: files are text */
} ms_sharding_options;

typedef struct ms_sharding_state {
    uint64_t bytes, tokens; /* of the documents that were encoded */
    uint32_t shards;        /* that are complete */
    bool running;
} ms_sharding_state;

typedef struct ms_sharding ms_sharding;
/* Starts threads that write the shards, each of which appears as a whole. The jobs, the field and
 * what they point to must live until the free. MS_ERROR_ARGUMENT: ids do not fit the width. */
MS_API ms_status ms_sharding_start(ms_context *context, ms_tokenizer *tokenizer,
                                   const ms_shard_job *jobs, uint32_t count,
                                   const ms_sharding_options *options, ms_sharding **out);
/* Returns when some documents or a thread have ended since the last call, or after timeout_ns. */
MS_API void ms_sharding_wait(ms_sharding *sharding, uint64_t timeout_ns, ms_sharding_state *out);
/* Waits for the end. The first error, after which no shard is begun; it names the file. */
MS_API ms_status ms_sharding_finish(ms_context *context, ms_sharding *sharding);
/* Ends the threads after their present documents. NULL is allowed. */
MS_API void ms_sharding_free(ms_sharding *sharding);

#ifdef __cplusplus
}
#endif
#endif
