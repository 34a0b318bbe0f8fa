/* dataset.c: data sets and loaders in Lua: `next` and `batches` give new tensors; byte tokens to
 * text and back. */
#include "bindings/dataset.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/outside.h"
#include "bindings/enter.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define DATASET "ms.Dataset"
#define LOADER "ms.Loader"

/* close(), __gc and __close. Loaders and parts retain the data, so closing a data set under them is
 * harmless. */
static int dataset_gc(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, DATASET);
    ms_dataset_release(*box);
    ms_lua_box_empty(L, box);
    return 0;
}

/* A data set and its parts hold the same data. */
static void fill_dataset(lua_State *L, void **box, ms_dataset *made)
{
    const void *data;
    uint64_t bytes = ms_dataset_memory(made, &data);
    *box = made;
    ms_lua_box_shares(L, box, data, bytes);
}

/* How files of one kind are read into a data set: bytes as they are, or token shards. */
typedef ms_status (*read_function)(ms_context *context, const char *const *paths, uint32_t count,
                                   ms_dataset **out);

/* Pushes the data set, or returns nil, message, code: files are the environment's. Reading blocks
 * the host for as long as the disk needs and uses no engine; the other ranks read their own copy.
 */
static int dataset_of_files(lua_State *L, read_function read)
{
    uint32_t count = 0;
    const char **paths = ms_lua_string_list(L, 1, &count, "a path");
    ms_lua_make_room(L);
    void **box = ms_lua_box(L, DATASET);
    ms_dataset *made = NULL;
    if (read(ms_lua_context(L), paths, count, &made)) return ms_lua_io_failed(L);
    fill_dataset(L, box, made);
    return 1;
}

/* core.dataset_bytes(paths), core.dataset_tokens(files): both take a list of paths. They differ in
 * how the bytes are read, and in the width of a token. */
static int dataset_bytes(lua_State *L) { return dataset_of_files(L, ms_dataset_bytes); }
/* Shards without a header: also how many files of them there are, their tokens, the largest id. */
static int dataset_tokens(lua_State *L)
{
    int results = dataset_of_files(L, ms_dataset_tokens);
    if (results != 1) return results;
    ms_bare_shards bare = ms_dataset_bare(ms_lua_unbox(L, -1, DATASET));
    lua_pushinteger(L, bare.files);
    lua_pushinteger(L, (lua_Integer)bare.tokens);
    lua_pushinteger(L, bare.largest);
    return 4;
}

/* core.dataset_images(images, labels): the two idx files of MNIST, plain or compressed by gzip. */
static int dataset_images(lua_State *L)
{
    const char *images = ms_lua_path(L, 1, "the path of images"),
               *labels = ms_lua_path(L, 2, "the path of labels");
    ms_lua_make_room(L);
    void **box = ms_lua_box(L, DATASET);
    ms_dataset *made = NULL;
    if (ms_dataset_images(ms_lua_context(L), images, labels, &made)) return ms_lua_io_failed(L);
    fill_dataset(L, box, made);
    return 1;
}

/* dataset:size() -> its length: tokens, or images. A split counts its own part. */
static int dataset_size(lua_State *L)
{
    lua_pushinteger(L, (lua_Integer)ms_dataset_size(ms_lua_unbox(L, 1, DATASET)));
    return 1;
}

/* dataset:split(fraction) -> the first part, the rest. Both share the data without a copy. The two
 * boxes exist before the data sets do: an error in making the second would otherwise leak the
 * first. */
static int dataset_split(lua_State *L)
{
    ms_dataset *dataset = ms_lua_unbox(L, 1, DATASET);
    double fraction = luaL_checknumber(L, 2);
    ms_lua_make_room(L);
    void **boxes[2] = { ms_lua_box(L, DATASET), ms_lua_box(L, DATASET) };
    ms_dataset *first = NULL, *rest = NULL;
    if (ms_dataset_split(ms_lua_context(L), dataset, fraction, &first, &rest))
        return ms_lua_io_failed(L);
    fill_dataset(L, boxes[0], first);
    fill_dataset(L, boxes[1], rest);
    return 2;
}

/* ------------------------------------------------------------------ loaders */

/* close(), __gc and __close. Joins the loader's thread, which ends as soon as the batch in its
 * hands is filled. The wait is at most the time to fill one batch, so a finalizer may do it; it
 * releases no tensor. */
static int loader_gc(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, LOADER);
    ms_loader_free(*box);
    ms_lua_box_empty(L, box);
    return 0;
}

/* The loader's data, with its data set and other loaders. */
static void fill_loader(lua_State *L, void **box, ms_loader *made, const ms_dataset *dataset)
{
    const void *data;
    uint64_t bytes = ms_dataset_memory(dataset, &data);
    *box = made;
    ms_lua_box_shares(L, box, data, bytes);
}

/* Its first batch starts a thread, and takes memory for the batches ahead. */
static void hold_batches(lua_State *L, uint64_t before)
{
    void **box = lua_touserdata(L, 1);
    uint64_t now = ms_loader_memory(*box);
    if (now > before) ms_lua_box_holds(L, box, now - before + MS_OUTSIDE_THREAD);
}

/* core.loader(dataset, options): the options of dataset:loader in meta.lua, with rank and ranks
 * instead of a group. Packed, end_of_text must be there: Lua asks the files beside shards. The
 * default seed is the engine's, so that ms.seed decides about the order of samples, too. It must be
 * equal on all ranks, which cut each batch among themselves: with different seeds they would repeat
 * some samples and never see others. */
static int loader_new(lua_State *L)
{
    static const char *const keys[] = { "batch",       "length", "shuffle", "seed", "packed",
                                        "end_of_text", "rank",   "ranks",   NULL };
    ms_engine *engine = ms_lua_enter(L);
    ms_dataset *dataset = ms_lua_unbox(L, 1, DATASET);
    luaL_checktype(L, 2, LUA_TTABLE);
    ms_lua_known_keys(L, 2, keys, "option of loader");
    ms_loader_options options = {
        .batch = (uint32_t)ms_lua_field_integer(L, 2, "batch", 0, 1, INT32_MAX),
        .length = (uint32_t)ms_lua_field_integer(L, 2, "length", 0, 1, INT32_MAX),
        .shuffle = ms_lua_field_boolean(L, 2, "shuffle", false),
        .packed = ms_lua_field_boolean(L, 2, "packed", false),
        .end_of_text = ms_lua_field_integer(L, 2, "end_of_text", -1, INT64_MIN, INT64_MAX),
        .seed = (uint64_t)ms_lua_field_integer(L, 2, "seed", (int64_t)ms_engine_random(engine).seed,
                                               INT64_MIN, INT64_MAX),
        .rank = (uint32_t)ms_lua_field_integer(L, 2, "rank", 0, 0, INT32_MAX),
        .ranks = (uint32_t)ms_lua_field_integer(L, 2, "ranks", 1, 1, INT32_MAX),
    };
    /* 0 represents "not given" here, since the range of the option begins at 1. */
    if (options.batch == 0)
        return ms_lua_error(L, "loader: give a batch, the samples of one pass over all ranks");
    ms_lua_make_room(L);
    void **box = ms_lua_box(L, LOADER);
    ms_loader *loader = NULL;
    ms_lua_ok(L, ms_loader_new(ms_engine_context(engine), dataset, &options, &loader));
    fill_loader(L, box, loader, dataset);
    return 1;
}

/* loader:is_masked() -> whether some tokens are no targets. */
static int loader_is_masked(lua_State *L)
{
    lua_pushboolean(L, ms_loader_is_masked(ms_lua_unbox(L, 1, LOADER)));
    return 1;
}

/* The tensors of a batch, and their handles: x, y, and positions if the loader is packed. */
typedef struct batch_values {
    int count;
    ms_handle *handles[3];
    ms_tensor *tensors[3];
} batch_values;

/* Puts empty handles on the stack, so that nothing raises between make_tensors and push_values. */
static batch_values new_values(lua_State *L, const ms_loader *loader)
{
    batch_values v = { .count = ms_loader_is_packed(loader) ? 3 : 2 };
    for (int i = 0; i < v.count; i++) v.handles[i] = ms_lua_new_handle(L);
    return v;
}

static void release_tensors(batch_values *v)
{
    for (int i = 0; i < v->count; i++) ms_tensor_release(v->tensors[i]);
}

/* New tensors for that many rows. y has x's shape for tokens and one class for each row of images;
 * positions are of tokens. */
static ms_status make_tensors(ms_engine *engine, const ms_loader *loader, uint32_t rows,
                              batch_values *v)
{
    ms_dtype dtype;
    int64_t shape[3];
    uint32_t dims = ms_loader_shape(loader, rows, &dtype, shape);
    ms_status status = ms_tensor_new(engine, dtype, dims, shape, &v->tensors[0]);
    for (int i = 1; i < v->count && !status; i++)
        status = ms_tensor_new(engine, MS_I64, dims == 2 ? 2 : 1, shape, &v->tensors[i]);
    if (status) release_tensors(v);
    return status;
}

/* Writes the batch into the tensors and fills the handles; on a failure it releases the tensors and
 * raises. The write copies from host memory that the loader, or the iterator, uses again for the
 * next batch. */
static int push_values(lua_State *L, batch_values *v, const ms_batch *batch, ms_status status)
{
    if (!status) status = ms_tensor_write(v->tensors[0], batch->x, batch->x_bytes);
    if (!status) status = ms_tensor_write(v->tensors[1], batch->y, batch->y_bytes);
    if (!status && v->count > 2)
        status = ms_tensor_write(v->tensors[2], batch->positions, batch->x_bytes);
    if (status) {
        release_tensors(v);
        ms_lua_ok(L, status);
    }
    for (int i = 0; i < v->count; i++) ms_handle_fill(v->handles[i], v->tensors[i]);
    return v->count;
}

/* loader:next() -> x, y, positions?. If taking the batch fails, the tensors are released by
 * push_values, and the loader has not moved. */
static int loader_next(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    ms_loader *loader = ms_lua_unbox(L, 1, LOADER);
    uint64_t before = ms_loader_memory(loader);
    if (before == 0) ms_lua_make_room(L);
    batch_values v = new_values(L, loader);
    ms_batch batch = { 0 };
    /* Memory comes first: a batch that was taken cannot be given back. */
    ms_lua_ok(L, make_tensors(engine, loader, ms_loader_rows(loader), &v));
    ms_status status = ms_loader_next(ms_engine_context(engine), loader, &batch);
    hold_batches(L, before);
    return push_values(L, &v, &batch, status);
}

/* The bytes of a whole batch: tokens with the tokens that follow them, or rows of numbers with a
 * class each. The sizes are those of a full batch; the last one of a pass may need less. */
static void batch_bytes(const ms_loader *loader, size_t *x_bytes, size_t *y_bytes)
{
    ms_dtype dtype;
    int64_t shape[3];
    uint32_t rows = ms_loader_rows(loader);
    /* Two dimensions are tokens, three are images. */
    bool tokens = ms_loader_shape(loader, rows, &dtype, shape) == 2;
    /* Tokens are i64; an image is rows times columns of f32. */
    size_t row = (size_t)shape[1] * (tokens ? sizeof(int64_t) : (size_t)shape[2] * sizeof(float));
    *x_bytes = rows * row;
    *y_bytes = tokens ? *x_bytes : rows * sizeof(int64_t);
}

/* Upvalues: runtime, loader, index of the next batch, how many there may be, memory. The memory is
 * made in the first call and not in loader_batches, since the iterator may never be called. It is a
 * Lua userdata: the collector frees it with the closure, also when a loop is left early. */
static int batches_step(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    const ms_loader *loader = ms_lua_unbox(L, lua_upvalueindex(2), LOADER);
    lua_Integer index = lua_tointeger(L, lua_upvalueindex(3));
    size_t x_bytes, y_bytes;
    batch_bytes(loader, &x_bytes, &y_bytes);
    /* No value ends a generic for. */
    if (index >= lua_tointeger(L, lua_upvalueindex(4))) return 0;
    batch_values v = new_values(L, loader);
    char *memory = lua_touserdata(L, lua_upvalueindex(5));
    if (!memory) {
        memory = lua_newuserdatauv(L, (size_t)(v.count - 1) * x_bytes + y_bytes, 0);
        lua_replace(L, lua_upvalueindex(5));
    }
    ms_batch batch = { .x = memory, .y = memory + x_bytes, .x_bytes = x_bytes, .y_bytes = y_bytes };
    if (v.count > 2) batch.positions = memory + x_bytes + y_bytes;
    ms_lua_ok(L, ms_loader_batch(ms_engine_context(engine), loader, (uint64_t)index, &batch));
    if (batch.rows == 0) return 0;
    /* The last batch of a pass may be shorter, so the tensors are made when its rows are known. */
    ms_lua_ok(L, make_tensors(engine, loader, batch.rows, &v));
    push_values(L, &v, &batch, MS_OK);
    /* Only now: an error leaves the iterator at this batch. */
    lua_pushinteger(L, index + 1);
    lua_replace(L, lua_upvalueindex(3));
    return v.count;
}

/* loader:batches(count?) -> iterator over x, y, positions? of one pass. It does not move the
 * loader's own position. The memory of a batch is made once and used for all. Evaluation uses it in
 * the middle of training, without moving where training goes on. ms_loader_check_pass refuses data
 * of which no rank would get a sample: the loop would end at once and a mean over nothing would be
 * NaN. */
static int loader_batches(lua_State *L)
{
    ms_lua_ok(L, ms_loader_check_pass(ms_lua_context(L), ms_lua_unbox(L, 1, LOADER)));
    int64_t count = lua_isnoneornil(L, 2) ? INT64_MAX : ms_lua_integer(L, 2, 0, INT64_MAX, "count");
    /* The iterator is a closure: runtime, loader, index, limit, memory. It keeps the loader alive.
     */
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_pushvalue(L, 1);
    lua_pushinteger(L, 0);
    lua_pushinteger(L, count);
    lua_pushnil(L);
    lua_pushcclosure(L, batches_step, 5);
    return 1;
}

/* loader:state() -> { seed, epoch, position, samples }, for checkpoints. Not the batches that its
 * thread has prepared ahead: a checkpoint continues with the batch that training has not seen. The
 * numbers do not depend on the rank nor on how many there are. */
static int loader_state(lua_State *L)
{
    ms_loader_state state = ms_loader_get_state(ms_lua_unbox(L, 1, LOADER));
    const struct {
        const char *name;
        uint64_t value;
    } fields[] = {
        { "seed", state.seed },
        { "epoch", state.epoch },
        { "position", state.position },
        { "samples", state.samples },
    };
    lua_createtable(L, 0, 4);
    for (int i = 0; i < 4; i++) {
        lua_pushinteger(L, (lua_Integer)fields[i].value);
        lua_setfield(L, -2, fields[i].name);
    }
    return 1;
}

/* loader:load_state(state): goes on from there. A state of other data, or of samples of another
 * length, is an error, since its position would be a place in another order. A field that is
 * missing counts as 0. */
static int loader_load_state(lua_State *L)
{
    ms_loader *loader = ms_lua_unbox(L, 1, LOADER);
    luaL_checktype(L, 2, LUA_TTABLE);
    ms_loader_state state = {
        .seed = (uint64_t)ms_lua_field_integer(L, 2, "seed", 0, INT64_MIN, INT64_MAX),
        .epoch = (uint64_t)ms_lua_field_integer(L, 2, "epoch", 0, 0, INT64_MAX),
        .position = (uint64_t)ms_lua_field_integer(L, 2, "position", 0, 0, INT64_MAX),
        .samples = (uint64_t)ms_lua_field_integer(L, 2, "samples", 0, 0, INT64_MAX),
    };
    ms_lua_ok(L, ms_loader_set_state(ms_lua_context(L), loader, state));
    return 0;
}

/* --------------------------------------------------------------------- text */

/* core.to_tokens(text): its bytes as i64 [length]. For prompts of models that read bytes. A Lua
 * string may have any byte, so there is no error for text. */
static int to_tokens(lua_State *L)
{
    ms_engine *engine = ms_lua_enter(L);
    size_t bytes;
    const char *text = luaL_checklstring(L, 1, &bytes);
    /* One byte more than needed, so that an empty text has memory, too. */
    int64_t *values = lua_newuserdatauv(L, bytes * sizeof *values + 1, 0), count = (int64_t)bytes;
    for (size_t i = 0; i < bytes; i++) values[i] = (unsigned char)text[i];
    ms_handle *handle = ms_lua_new_handle(L);
    ms_tensor *made = NULL;
    ms_status status = ms_tensor_new(engine, MS_I64, 1, &count, &made);
    if (!status && bytes) status = ms_tensor_write(made, values, bytes * sizeof *values);
    if (status) ms_tensor_release(made);
    ms_lua_ok(L, status);
    ms_handle_fill(handle, made);
    return 1;
}

/* Element i of an integer dtype. The dtype is an integer one other than bool; the caller has
 * checked it. Unlike a cast on the device, this needs no second tensor for the text of a few
 * tokens. */
int64_t ms_lua_token_at(ms_dtype dtype, const void *data, size_t i)
{
    switch (dtype) {
    case MS_I64: return ((const int64_t *)data)[i];
    case MS_I32: return ((const int32_t *)data)[i];
    case MS_U16: return ((const uint16_t *)data)[i];
    default: return ((const uint8_t *)data)[i];
    }
}

/* core.to_text(tokens): the text of byte tokens; blocks. Tokens above 255 are of a vocabulary that
 * this function does not know, so they raise instead of turning into wrong text. */
static int to_text(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "to_text", "it waits for the values");
    ms_lua_enter(L);
    ms_tensor *tokens = ms_lua_tensor(L, 1);
    ms_dtype dtype = ms_tensor_dtype(tokens);
    if (ms_dtype_is_float(dtype) || dtype == MS_BOOL)
        return ms_lua_error(L, "to_text: tokens are integers, these are %s", ms_dtype_name(dtype));
    size_t count = (size_t)ms_tensor_count(tokens);
    void *data = lua_newuserdatauv(L, ms_tensor_bytes(tokens) + 1, 0);
    if (count) ms_lua_ok(L, ms_tensor_read(tokens, data, ms_tensor_bytes(tokens)));
    luaL_Buffer buffer;
    char *text = luaL_buffinitsize(L, &buffer, count);
    for (size_t i = 0; i < count; i++) {
        int64_t token = ms_lua_token_at(dtype, data, i);
        /* The buffer is on the stack, so an error leaks nothing. */
        if (token < 0 || token > 255)
            return ms_lua_error(L, "to_text: token %lld is not a byte", (long long)token);
        text[i] = (char)token;
    }
    luaL_pushresultsize(&buffer, count);
    return 1;
}

/* Data sets are made by functions of the module, which reads no group: lua/moonshard/data/init.lua
 * fills in ranks and defaults. */
static const luaL_Reg functions[] = {
    { "dataset_bytes", dataset_bytes },
    { "dataset_tokens", dataset_tokens },
    { "dataset_images", dataset_images },
    { "loader", loader_new },
    { "to_tokens", to_tokens },
    { "to_text", to_text },
    { NULL, NULL },
};
static const luaL_Reg dataset_methods[] = {
    { "size", dataset_size }, { "split", dataset_split }, { "close", dataset_gc }, { NULL, NULL }
};
/* What a loader has is its position; the options that made it are the script's. */
static const luaL_Reg loader_methods[] = {
    { "next", loader_next },
    { "batches", loader_batches },
    { "state", loader_state },
    { "load_state", loader_load_state },
    { "close", loader_gc },
    { "is_masked", loader_is_masked },
    { NULL, NULL },
};
static const luaL_Reg dataset_metamethods[] = { { "__gc", dataset_gc },
                                                { "__close", dataset_gc },
                                                { NULL, NULL } };
static const luaL_Reg loader_metamethods[] = { { "__gc", loader_gc },
                                               { "__close", loader_gc },
                                               { NULL, NULL } };

/* core.Dataset is the table of a data set's methods: the library adds to it. Loaders need nothing
 * from Lua. */
void ms_open_dataset(lua_State *L, int runtime)
{
    /* Lua adds `loader`, which reads a group. */
    ms_lua_type(L, runtime, DATASET, dataset_metamethods, dataset_methods);
    lua_setfield(L, -2, "Dataset");
    ms_lua_type(L, runtime, LOADER, loader_metamethods, loader_methods);
    lua_pop(L, 1);
    ms_lua_register(L, runtime, functions);
}
