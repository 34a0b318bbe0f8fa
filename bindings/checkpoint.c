/* checkpoint.c: copies of tensors, and folders of checkpoints that are written while Lua goes
 * on. */
#include "bindings/checkpoint.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/outside.h"
#include "bindings/enter.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

#define SNAPSHOT "ms.Snapshot"
#define PENDING "ms.PendingCheckpoint"

static const char pending_key = 0; /* registry: the userdata that holds the job under way */

/* ---------------------------------------------------------------- snapshots */

/* __gc and __close of a snapshot that was not written. The copies are host memory of the size of
 * the model and its optimizer, so a snapshot that is not written should be closed. */
static int snapshot_gc(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, SNAPSHOT);
    ms_snapshot_free(*box);
    ms_lua_box_empty(L, box);
    return 0;
}

/* Pushes { hash of all bytes, blocks = { hash of each block }? }. blocks is there if there are
 * several. hashes: as ms_snapshot_hashes. */
static void push_hashes(lua_State *L, const uint64_t *hashes, uint32_t blocks)
{
    lua_createtable(L, 1, 1);
    lua_pushinteger(L, (lua_Integer)hashes[0]);
    lua_rawseti(L, -2, 1);
    if (blocks < 2) return;
    lua_createtable(L, (int)blocks, 0);
    for (uint32_t b = 1; b <= blocks; b++) {
        lua_pushinteger(L, (lua_Integer)hashes[b]);
        lua_rawseti(L, -2, (lua_Integer)b);
    }
    lua_setfield(L, -2, "blocks");
}

/* core.snapshot(names, tensors) -> snapshot, hashes in the same order; blocks. The copy is what
 * training waits for; writing goes on beside it. */
static int snapshot(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "checkpoint.save", "it waits for the values");
    ms_engine *engine = ms_lua_enter(L);
    uint32_t count = 0, given = 0;
    const char **names = ms_lua_string_list(L, 1, &count, "a tensor's name");
    ms_tensor **tensors = count ? ms_lua_tensor_list(L, 2, &given) : NULL;
    if (given != count) return ms_lua_error(L, "checkpoint: %u names, %u tensors", count, given);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) bytes += ms_tensor_bytes(tensors[i]);
    ms_lua_make_room(L);
    void **box = ms_lua_box(L, SNAPSHOT);
    ms_snapshot *made = NULL;
    ms_lua_ok(L, ms_snapshot_new(engine, names, tensors, count, &made));
    *box = made;
    ms_lua_box_holds(L, box, bytes);
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        push_hashes(L, ms_snapshot_hashes(made, i),
                    ms_safetensors_blocks(ms_tensor_bytes(tensors[i])));
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 2;
}

/* ------------------------------------------------------------------ writing */

/* The checkpoint that is written in the background; there is at most one. os is kept, because the
 * engine may be gone when the state closes. A second one would need as much memory again, and the
 * order in which they end would be open. */
typedef struct pending {
    ms_checkpoint_job *job;
    const ms_os *os;
} pending;

/* Runs when the state closes: the program ends only after its last checkpoint is on disk. An error
 * cannot be raised here, so it is a warning. */
static int pending_gc(lua_State *L)
{
    pending *self = luaL_checkudata(L, 1, PENDING);
    ms_context context;
    ms_checkpoint_job *job = self->job;
    self->job = NULL;
    if (!job) return 0;
    /* A context of its own: the engine's may be gone. */
    ms_context_init(&context, self->os);
    if (ms_checkpoint_wait(&context, job) == MS_OK) return 0;
    lua_warning(L, "the last checkpoint was not saved: ", true);
    lua_warning(L, context.error.message, false);
    return 0;
}

/* Pushes the only one of this Lua state, made at first use. It is in the registry, so its __gc runs
 * when the state closes and not before. */
static pending *push_pending(lua_State *L)
{
    if (lua_rawgetp(L, LUA_REGISTRYINDEX, &pending_key) == LUA_TUSERDATA)
        return lua_touserdata(L, -1);
    lua_pop(L, 1);
    pending *self = lua_newuserdatauv(L, sizeof *self, 0);
    *self = (pending){ .os = ms_lua_context(L)->os };
    luaL_setmetatable(L, PENDING);
    lua_pushvalue(L, -1);
    lua_rawsetp(L, LUA_REGISTRYINDEX, &pending_key);
    return self;
}

/* core.checkpoint_wait() -> true, or nil, message, code if the one that was written in the
 * background failed; blocks. The error of a checkpoint is reported once, by the first wait after
 * it. */
static int wait_pending(lua_State *L)
{
    pending *self = push_pending(L);
    ms_checkpoint_job *job = self->job;
    self->job = NULL;
    if (job && ms_checkpoint_wait(ms_lua_context(L), job)) return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* core.checkpoint_is_done() -> whether checkpoint_wait would return at once. For loops that report
 * a checkpoint when it is written, without waiting for it. */
static int is_done(lua_State *L)
{
    const pending *self = push_pending(L);
    lua_pushboolean(L, !self->job || ms_checkpoint_is_done(self->job));
    return 1;
}

/* core.checkpoint_start(snapshot, folder, name, manifest): takes the snapshot over; the one before
 * must have been waited for. The snapshot's box is emptied only after the job has taken it over:
 * after a failure the script may try again. */
static int start(lua_State *L)
{
    void **box = luaL_checkudata(L, 1, SNAPSHOT);
    const char *folder = ms_lua_path(L, 2, "a folder"), *name = ms_lua_path(L, 3, "a name");
    size_t bytes;
    const char *manifest = luaL_checklstring(L, 4, &bytes);
    pending *self = push_pending(L);
    /* One message each: a snapshot is written once, and one checkpoint at a time. */
    if (!*box || self->job)
        return ms_lua_error(L, "checkpoint: %s",
                            *box ? "another one is being written"
                                 : "this snapshot was used already");
    if (ms_checkpoint_start(ms_lua_context(L), *box, folder, name, manifest, bytes, &self->job))
        return ms_lua_io_failed(L);
    ms_lua_box_empty(L, box);
    lua_pushboolean(L, true);
    return 1;
}

/* core.checkpoint_begin(folder, name), core.checkpoint_commit(folder, name, manifest),
 * core.checkpoint_discard(folder, name) -> true, or nil, message, code: a checkpoint that several
 * processes write. They block. */
static int begin(lua_State *L)
{
    if (ms_checkpoint_begin(ms_lua_context(L), ms_lua_path(L, 1, "a folder"),
                            ms_lua_path(L, 2, "a name")))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* core.checkpoint_part(names, tensors, folder, name, file) -> hashes of the tensors, as
 * core.snapshot gives them; or nil, message, code. It blocks, and needs the host memory of the
 * largest tensor. */
static int write_part(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "checkpoint.save", "it waits for the values");
    (void)ms_lua_enter(L);
    uint32_t count = 0, given = 0;
    const char *folder = ms_lua_path(L, 3, "a folder"), *name = ms_lua_path(L, 4, "a name"),
               *file = ms_lua_path(L, 5, "a file's name");
    const char **names = ms_lua_string_list(L, 1, &count, "a tensor's name");
    ms_tensor **tensors = count ? ms_lua_tensor_list(L, 2, &given) : NULL;
    if (given != count) return ms_lua_error(L, "checkpoint: %u names, %u tensors", count, given);
    size_t numbers = 0;
    for (uint32_t i = 0; i < count; i++)
        numbers += 1 + ms_safetensors_blocks(ms_tensor_bytes(tensors[i]));
    uint64_t *at = lua_newuserdatauv(L, (numbers + 1) * sizeof *at, 0);
    if (ms_checkpoint_write_part(ms_lua_context(L), names, tensors, count, folder, name, file, at))
        return ms_lua_io_failed(L);
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t blocks = ms_safetensors_blocks(ms_tensor_bytes(tensors[i]));
        push_hashes(L, at, blocks);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
        at += 1 + blocks;
    }
    return 1;
}

static int commit(lua_State *L)
{
    const char *folder = ms_lua_path(L, 1, "a folder"), *name = ms_lua_path(L, 2, "a name");
    size_t bytes;
    const char *manifest = luaL_checklstring(L, 3, &bytes);
    if (ms_checkpoint_commit(ms_lua_context(L), folder, name, manifest, bytes))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}
static int discard(lua_State *L)
{
    if (ms_checkpoint_discard(ms_lua_context(L), ms_lua_path(L, 1, "a folder"),
                              ms_lua_path(L, 2, "a name")))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* core.checkpoint_sweep(folder) -> true, or nil, message, code: removes what a crash has left
 * there. No checkpoint of the folder may be written meanwhile. */
static int sweep(lua_State *L)
{
    if (ms_checkpoint_sweep(ms_lua_context(L), ms_lua_path(L, 1, "a folder")))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* core.checkpoint_remove(folder, name) -> true, or nil, message, code. Its name goes first, so a
 * crash in the middle leaves no checkpoint that lacks files. */
static int remove_one(lua_State *L)
{
    if (ms_checkpoint_remove(ms_lua_context(L), ms_lua_path(L, 1, "a folder"),
                             ms_lua_path(L, 2, "a name")))
        return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* core.checkpoint_rename(folder, name, to) -> true, or nil, message, code. `to` must not exist, or
 * be an empty folder. The new name is durable when it returns. */
static int rename_one(lua_State *L)
{
    const char *folder = ms_lua_path(L, 1, "a folder"), *name = ms_lua_path(L, 2, "a name"),
               *to = ms_lua_path(L, 3, "a name");
    if (ms_checkpoint_rename(ms_lua_context(L), folder, name, to)) return ms_lua_io_failed(L);
    lua_pushboolean(L, true);
    return 1;
}

/* core.hash(text) -> an integer. Not for secrets: it is fast, and the same on all machines.
 * Integers of Lua are signed, so half of the hashes are negative. */
static int hash(lua_State *L)
{
    size_t bytes;
    const char *text = luaL_checklstring(L, 1, &bytes);
    lua_pushinteger(L, (lua_Integer)ms_hash(text, bytes, 0));
    return 1;
}

/* core.hashes(tensors) -> a list of integers: the hash of each tensor's elements, as
 * ms_tensor_hash; blocks. On "sim" all are 0. */
static int hashes(lua_State *L)
{
    ms_lua_refuse_in_hook(L, "check_replicas", "it waits for the values");
    (void)ms_lua_enter(L);
    uint32_t count = 0;
    ms_tensor **tensors = ms_lua_tensor_list(L, 1, &count);
    lua_createtable(L, (int)count, 0);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t hash = 0;
        ms_lua_ok(L, ms_tensor_hash(tensors[i], NULL, 0, &hash));
        lua_pushinteger(L, (lua_Integer)hash);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* The layout of a checkpoint (its manifest, which tensors it has) is lua/moonshard/checkpoint's. */
static const luaL_Reg functions[] = {
    { "snapshot", snapshot },
    { "checkpoint_start", start },
    { "checkpoint_wait", wait_pending },
    { "checkpoint_begin", begin },
    { "checkpoint_part", write_part },
    { "checkpoint_commit", commit },
    { "checkpoint_discard", discard },
    { "checkpoint_sweep", sweep },
    { "checkpoint_remove", remove_one },
    { "checkpoint_rename", rename_one },
    { "checkpoint_is_done", is_done },
    { "hash", hash },
    { "hashes", hashes },
    { NULL, NULL },
};
static const luaL_Reg snapshot_metamethods[] = { { "__gc", snapshot_gc },
                                                 { "__close", snapshot_gc },
                                                 { NULL, NULL } };
static const luaL_Reg pending_metamethods[] = { { "__gc", pending_gc }, { NULL, NULL } };

/* A snapshot has no methods: the library passes it on to checkpoint_start. The type of the job
 * under way exists so that its __gc runs. */
void ms_open_checkpoint(lua_State *L, int runtime)
{
    ms_lua_type(L, runtime, SNAPSHOT, snapshot_metamethods, NULL);
    lua_pop(L, 1);
    ms_lua_type(L, runtime, PENDING, pending_metamethods, NULL);
    lua_pop(L, 1);
    ms_lua_register(L, runtime, functions);
}
