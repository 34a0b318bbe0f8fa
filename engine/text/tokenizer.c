/* tokenizer.c: a tokenizer as an object: references, tokens by id and by text. */
#include "text/tokenizer.h"

#include "text/alphabet.h"

ms_status ms_tokenizer_new(ms_context *context, ms_tokenizer **out)
{
    ms_tokenizer *tokenizer = NULL;
    ms_status status = ms_allocate(context, sizeof *tokenizer, "a tokenizer", (void **)&tokenizer);
    if (status) return status;
    /* A context of its own: it may be released by another thread than that which loaded it. */
    ms_context_init(&tokenizer->context, context->os);
    atomic_init(&tokenizer->references, 1);
    tokenizer->bos = tokenizer->eos = tokenizer->model.unknown = MS_NO_TOKEN;
    for (size_t i = 0; i < 256; i++) tokenizer->model.bytes[i] = MS_NO_TOKEN;
    *out = tokenizer;
    return MS_OK;
}

ms_tokenizer *ms_tokenizer_retain(ms_tokenizer *tokenizer)
{
    atomic_fetch_add(&tokenizer->references, 1);
    return tokenizer;
}

void ms_tokenizer_release(ms_tokenizer *tokenizer)
{
    if (tokenizer == NULL || atomic_fetch_sub(&tokenizer->references, 1) != 1) return;
    ms_context context = tokenizer->context;
    ms_added_free(&context, &tokenizer->raw);
    ms_added_free(&context, &tokenizer->normalized);
    ms_normalizers_free(&context, &tokenizer->normalizers);
    ms_splitters_free(&context, &tokenizer->splitters);
    ms_model_free(&context, &tokenizer->model);
    ms_vocabulary_free(&context, &tokenizer->added);
    ms_release(&context, tokenizer->prefix.items);
    ms_release(&context, tokenizer->suffix.items);
    ms_vocabulary_free(&context, &tokenizer->decoding.texts);
    ms_buffer_free(&context, &tokenizer->decoding.strip);
    ms_release(&context, tokenizer);
}

/* -------------------------------------------------------------- added tokens */

static bool is_same(ms_span a, ms_span b)
{
    return ms_span_bytes(a) == ms_span_bytes(b) && memcmp(a.at, b.at, ms_span_bytes(a)) == 0;
}

/* Whether the model has this id for another text. In a model by bytes the text may also be a name
 * in the byte alphabet. */
static ms_status check_other(ms_context *context, const ms_model *model, uint32_t id, ms_span text,
                             bool *other)
{
    ms_buffer bytes = { 0 };
    bool known = false;
    *other = false;
    /* From the size on there are characters, which are none. */
    if ((model->size && id >= model->size) || !ms_vocabulary_has(&model->vocabulary, id))
        return MS_OK;
    ms_span own = ms_vocabulary_text(&model->vocabulary, id);
    ms_status status = MS_OK;
    if (model->by_bytes) status = ms_alphabet_read(context, text, &bytes, &known);
    *other = !is_same(own, text) && !(known && is_same(own, ms_buffer_span(&bytes, false)));
    ms_buffer_free(context, &bytes);
    return status;
}

ms_status ms_tokenizer_add(ms_context *context, ms_tokenizer *tokenizer, ms_span text,
                           ms_added_token token, bool normalized)
{
    ms_vocabulary *added = &tokenizer->added;
    int shown = ms_span_bytes(text) < 100 ? (int)ms_span_bytes(text) : 100;
    const char *name = (const char *)text.at;
    if (text.at == text.end || token.id > MS_TOKEN_ID_MAX)
        return ms_fail(context, MS_ERROR_CORRUPT, "the added token '%.*s' has the id %u", shown,
                       name, token.id);
    uint32_t before = ms_vocabulary_find(added, text.at, ms_span_bytes(text));
    if (before == token.id) return MS_OK;
    if (before != MS_NO_TOKEN || ms_vocabulary_has(added, token.id))
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "the added token '%.*s' has the id %u, and it or its id is there already",
                       shown, name, token.id);
    bool other = false;
    ms_status status = check_other(context, &tokenizer->model, token.id, text, &other);
    if (status) return status;
    if (other)
        return ms_fail(context, MS_ERROR_CORRUPT,
                       "the added token '%.*s' has the id %u, which is another token's in the "
                       "vocabulary",
                       shown, name, token.id);
    status = ms_vocabulary_add(context, added, token.id, text, token.special ? MS_TOKEN_SPECIAL : 0,
                               true);
    return status ? status
                  : ms_added_add(context, normalized ? &tokenizer->normalized : &tokenizer->raw,
                                 text, token);
}

/* Writes the set again, with texts as the normalizers leave them. A text of which nothing is left
 * is never found. */
static ms_status normalize_added(ms_context *context, ms_tokenizer *tokenizer, ms_normalizing *work)
{
    ms_added changed = { 0 };
    const ms_added *added = &tokenizer->normalized;
    ms_status status = MS_OK;
    for (size_t i = 0; !status && i < added->count; i++) {
        const uint8_t *at = added->text.data + added->tokens[i].offset;
        ms_span text = { .at = at, .end = at + added->tokens[i].length, .first = true };
        status = ms_normalize(context, &tokenizer->normalizers, work, text, &text);
        if (!status && text.at < text.end)
            status = ms_added_add(context, &changed, text, added->tokens[i]);
    }
    ms_added_free(context, status ? &changed : &tokenizer->normalized);
    if (!status) tokenizer->normalized = changed;
    return status;
}

ms_status ms_tokenizer_normalize_added(ms_context *context, ms_tokenizer *tokenizer)
{
    ms_normalizing work = { 0 };
    if (tokenizer->normalizers.count == 0 || tokenizer->normalized.count == 0) return MS_OK;
    ms_status status = ms_matcher_new(context, &work.matcher);
    if (!status) status = normalize_added(context, tokenizer, &work);
    ms_normalizing_free(context, &work);
    ms_matcher_free(work.matcher);
    return status;
}

/* -------------------------------------------------------------------- public */

uint32_t ms_tokenizer_size(const ms_tokenizer *tokenizer)
{
    uint32_t added = (uint32_t)tokenizer->added.count;
    return added > tokenizer->model.size ? added : tokenizer->model.size;
}

static uint64_t vocabulary_memory(const ms_vocabulary *vocabulary)
{
    return vocabulary->text.capacity + vocabulary->token_capacity * sizeof *vocabulary->tokens
           + vocabulary->slot_count * sizeof *vocabulary->slots;
}

uint64_t ms_tokenizer_memory(const ms_tokenizer *tokenizer)
{
    const ms_merges *merges = &tokenizer->model.merges;
    return sizeof *tokenizer + vocabulary_memory(&tokenizer->model.vocabulary)
           + vocabulary_memory(&tokenizer->added) + vocabulary_memory(&tokenizer->decoding.texts)
           + merges->slot_count * sizeof *merges->slots;
}

/* Added tokens come first, as they do in texts. */
uint32_t ms_tokenizer_find(const ms_tokenizer *tokenizer, const char *text, size_t bytes)
{
    uint32_t id = ms_vocabulary_find(&tokenizer->added, text, bytes);
    if (id != MS_NO_TOKEN) return id;
    id = ms_vocabulary_find(&tokenizer->model.vocabulary, text, bytes);
    return id < tokenizer->model.size ? id : MS_NO_TOKEN;
}

const char *ms_tokenizer_token(const ms_tokenizer *tokenizer, uint32_t id, size_t *bytes)
{
    const ms_vocabulary *own = &tokenizer->added;
    if (!ms_vocabulary_has(own, id)) own = &tokenizer->model.vocabulary;
    if (!ms_vocabulary_has(own, id) || id >= ms_tokenizer_size(tokenizer)) return NULL;
    ms_span text = ms_vocabulary_text(own, id);
    *bytes = ms_span_bytes(text);
    return (const char *)text.at;
}

uint32_t ms_tokenizer_bos(const ms_tokenizer *tokenizer) { return tokenizer->bos; }
uint32_t ms_tokenizer_eos(const ms_tokenizer *tokenizer) { return tokenizer->eos; }

bool ms_tokenizer_is_special(const ms_tokenizer *tokenizer, uint32_t id)
{
    const ms_vocabulary *added = &tokenizer->added, *own = &tokenizer->model.vocabulary;
    return (ms_vocabulary_has(added, id) && added->tokens[id].flags & MS_TOKEN_SPECIAL)
           || (ms_vocabulary_has(own, id) && own->tokens[id].flags & MS_TOKEN_SPECIAL);
}
