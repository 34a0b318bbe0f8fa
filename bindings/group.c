/* group.c: process groups in Lua: the world, splitting, and collectives. A collective returns its
 * stream: the result is ready once the last task on that stream has finished. */
#include "bindings/group.h"

#include <string.h>

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/fields.h"
#include "bindings/runtime.h"
#include "bindings/script.h"
#include "bindings/stream.h"
#include "moonshard/ddp.h"
#include "moonshard/fsdp.h"

#define MS_GROUP_TYPE "ms.Group"

/* The engine owns the group, and a handle is a user of it until it is finalized. Two handles of one
 * group may differ in their channel. closings: of the group when the handle was made; a handle ends
 * when its group is closed, also if a split gives the group again. */
typedef struct group_box {
    ms_runtime *runtime;
    ms_group *group; /* NULL: it was never filled */
    uint32_t channel;
    uint64_t closings;
} group_box;

/* In the order of ms_collective_kind and ms_reduce_op: an index into a list is the enum's value.
 * barrier and split have functions of their own. */
static const char *const kinds[] = { "all_reduce", "reduce",     "reduce_scatter",
                                     "all_gather", "all_to_all", "broadcast",
                                     "gather",     "scatter",    "send",
                                     "recv",       NULL };
static const char *const ops[] = { "sum", "avg", "min", "max", "prod", "premul_sum", NULL };

/* A handle is made again in each call; __eq makes equal ones equal for scripts, but they are
 * different keys of a table. */
static group_box *new_box(lua_State *L, uint32_t channel)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    group_box *box = lua_newuserdatauv(L, sizeof *box, 0);
    *box = (group_box){ .runtime = runtime, .channel = channel };
    luaL_setmetatable(L, MS_GROUP_TYPE);
    return box;
}

int ms_lua_push_group(lua_State *L, ms_group *group, uint32_t channel)
{
    group_box *box = new_box(L, channel);
    box->group = ms_group_retain(group);
    box->closings = ms_group_closings(group);
    return 1;
}

/* __gc: lowers the group's count of users and sends nothing to other ranks. A closed runtime has no
 * groups any more: its engine has freed them. */
static int group_gc(lua_State *L)
{
    group_box *box = luaL_checkudata(L, 1, MS_GROUP_TYPE);
    if (!box->runtime->closed) ms_group_release(box->group);
    box->group = NULL;
    return 0;
}

/* For functions that need the channel as well. */
static group_box *check_box(lua_State *L, int index)
{
    group_box *box = luaL_checkudata(L, index, MS_GROUP_TYPE);
    if (!box->group) ms_lua_error(L, "this group was finalized");
    if (box->closings != ms_group_closings(box->group))
        ms_lua_error(L, "this group (%s) was closed", ms_group_name(box->group));
    return box;
}
ms_group *ms_lua_group(lua_State *L, int index) { return check_box(L, index)->group; }

/* The world of the engine. An engine that was started without a job gets a fake world of one rank,
 * so that scripts need no case of their own for it. enter_inside: the library asks for the world on
 * behalf of a line that was noted already, and planners ask for rank and size. */
ms_group *ms_lua_world(lua_State *L)
{
    ms_engine *engine = ms_lua_enter_inside(L);
    ms_group *world = ms_comm_world(engine);
    if (!world) ms_lua_ok(L, ms_comm_open_fake(engine, 0, 1, &world));
    return world;
}

/* core.world() -> group of all ranks. Channel 1 is where collectives go unless a script chooses
 * another. */
static int world(lua_State *L) { return ms_lua_push_group(L, ms_lua_world(L), 1); }

/* ---------------------------------------------------------- what a group is */

/* group:rank() -> this rank's number in the group, from 0. Facts of a group start no engine by
 * themselves: the handle exists only because one runs. */
static int group_rank(lua_State *L)
{
    lua_pushinteger(L, ms_group_rank(ms_lua_group(L, 1)));
    return 1;
}

/* group:size() -> how many ranks the group has */
static int group_size(lua_State *L)
{
    lua_pushinteger(L, ms_group_size(ms_lua_group(L, 1)));
    return 1;
}

/* group:_has_others(): whether other ranks take part. False in a fake world, where the library
 * leaves out what only peers could answer. */
static int group_has_others(lua_State *L)
{
    lua_pushboolean(L, ms_group_has_others(ms_lua_group(L, 1)));
    return 1;
}

/* group:name() -> its name in messages and traces. The same on all its ranks. */
static int group_name(lua_State *L)
{
    lua_pushstring(L, ms_group_name(ms_lua_group(L, 1)));
    return 1;
}

/* group:_world_rank(rank) -> that member's rank in the world. Messages name ranks by their number
 * in the world, which is also that of their process. */
static int group_world_rank(lua_State *L)
{
    ms_group *group = ms_lua_group(L, 1);
    lua_pushinteger(
        L, ms_group_world_rank(group, (uint32_t)ms_lua_integer(
                                          L, 2, 0, (int64_t)ms_group_size(group) - 1, "rank")));
    return 1;
}

/* group:_host(rank) -> the number of the node that this member is on */
static int group_node(lua_State *L)
{
    const ms_group *group = ms_lua_group(L, 1);
    lua_Integer most = (lua_Integer)ms_group_size(group) - 1;
    lua_pushinteger(L, ms_group_node(group, (uint32_t)ms_lua_integer(L, 2, 0, most, "rank")));
    return 1;
}

/* group:channel(number) -> the same group; its collectives run on that channel's stream. Two
 * channels are two streams, so a small collective need not wait for a large one. All ranks must
 * choose the same channel for a call. */
static int group_channel(lua_State *L)
{
    return ms_lua_push_group(L, ms_lua_group(L, 1),
                             (uint32_t)ms_lua_integer(L, 2, 1, MS_USER_CHANNELS, "channel"));
}

/* group:_parameters(): the channel on which owners send the parameters that they have stepped. It
 * is not among the channels that a script can name, so nothing that a user enqueues is before a
 * parameter. */
static int group_parameters(lua_State *L)
{
    return ms_lua_push_group(L, ms_lua_group(L, 1), MS_CHANNEL_PARAMETERS);
}

/* __eq: two handles are equal if group and channel are. Lua calls it only for two userdata that are
 * not the same object. */
static int group_equal(lua_State *L)
{
    const group_box *a = luaL_checkudata(L, 1, MS_GROUP_TYPE),
                    *b = luaL_checkudata(L, 2, MS_GROUP_TYPE);
    lua_pushboolean(L,
                    a->group == b->group && a->channel == b->channel && a->closings == b->closings);
    return 1;
}

/* tostring(group) -> its name, this rank's place in it, and the channel where it is not the usual
 * one. For messages: "group world (rank 0 of 4)". */
static int group_string(lua_State *L)
{
    const group_box *box = luaL_checkudata(L, 1, MS_GROUP_TYPE);
    if (!box->group) lua_pushliteral(L, "group (finalized)");
    else
        lua_pushfstring(L, "group %s (rank %d of %d%s%s)", ms_group_name(box->group),
                        (int)ms_group_rank(box->group), (int)ms_group_size(box->group),
                        box->channel > 1 ? ", channel " : "",
                        box->channel > 1 ? ms_channel_name(box->channel) : "");
    return 1;
}

/* group:_stream(): the channel's stream. It makes the stream at its first use, which may fail when
 * the engine has no more. */
static int group_stream(lua_State *L)
{
    group_box *box = check_box(L, 1);
    ms_lua_enter(L);
    ms_stream *stream = NULL;
    ms_lua_ok(L, ms_group_stream(box->group, box->channel, &stream));
    return ms_lua_push_stream(L, stream);
}

/* group:bytes_sent() -> wire bytes by operation. As a bandwidth-optimal algorithm would send them
 * (ms_traffic), so numbers of different transports can be compared. Splits are the library's own
 * calls and are left out. */
static int group_bytes_sent(lua_State *L)
{
    ms_group *group = ms_lua_group(L, 1);
    lua_newtable(L);
    for (int kind = 0; kind < MS_COLLECTIVES; kind++) {
        ms_traffic traffic = ms_group_traffic(group, (ms_collective_kind)kind);
        /* Operations that were never used are absent, so tables are short. */
        if (traffic.calls == 0 || kind == MS_SPLIT) continue;
        lua_pushinteger(L, (lua_Integer)traffic.wire_bytes);
        lua_setfield(L, -2, ms_collective_name((ms_collective_kind)kind));
    }
    return 1;
}

/* group:_calls() -> calls by operation since the start. Tests count collectives with it. */
static int group_calls(lua_State *L)
{
    ms_group *group = ms_lua_group(L, 1);
    lua_newtable(L);
    for (int kind = 0; kind < MS_COLLECTIVES; kind++) {
        ms_traffic traffic = ms_group_traffic(group, (ms_collective_kind)kind);
        if (traffic.calls == 0 || kind == MS_SPLIT) continue;
        lua_pushinteger(L, (lua_Integer)traffic.calls);
        lua_setfield(L, -2, ms_collective_name((ms_collective_kind)kind));
    }
    return 1;
}

/* group:_traffic() -> calls, payload bytes, wire bytes, bytes between nodes of all operations since
 * the start. Reports take the difference of two calls. */
static int group_traffic(lua_State *L)
{
    ms_traffic traffic = ms_group_traffic(ms_lua_group(L, 1), MS_COLLECTIVES);
    lua_pushinteger(L, (lua_Integer)traffic.calls);
    lua_pushinteger(L, (lua_Integer)traffic.payload_bytes);
    lua_pushinteger(L, (lua_Integer)traffic.wire_bytes);
    lua_pushinteger(L, (lua_Integer)traffic.between_nodes_bytes);
    return 4;
}

/* ---------------------------------------------------------------- splitting */

/* The lists at index 2 as numbers: how many there are, their lengths, and all ranks, list after
 * list. In a userdata on the stack. The total is bounded by the group's size before memory is
 * taken. Whether a rank is named twice is checked by ms_group_split, for C applications as well. */
static uint32_t read_parts(lua_State *L, uint32_t size, uint32_t **sizes, uint32_t **ranks)
{
    luaL_checktype(L, 2, LUA_TTABLE);
    lua_Integer parts = (lua_Integer)lua_rawlen(L, 2), total = 0;
    /* No more parts than members, so the table below stays small. */
    if (parts < 1 || parts > size)
        ms_lua_error(L, "split: 1 to %d lists of ranks are expected, not %d", (int)size,
                     (int)parts);
    for (lua_Integer p = 1; p <= parts; p++) {
        if (lua_rawgeti(L, 2, p) != LUA_TTABLE)
            ms_lua_error(L, "split: part %d is not a list of ranks", (int)p);
        total += (lua_Integer)lua_rawlen(L, -1);
        lua_pop(L, 1);
    }
    if (total > size)
        ms_lua_error(L, "split: %d ranks are named, the group has %d", (int)total, (int)size);
    *sizes = lua_newuserdatauv(L, (size_t)(parts + total) * sizeof **sizes, 0);
    /* The ranks follow the sizes in the same memory. */
    uint32_t *next = *ranks = *sizes + parts;
    for (lua_Integer p = 1; p <= parts; p++) {
        lua_rawgeti(L, 2, p);
        lua_Integer count = (lua_Integer)lua_rawlen(L, -1);
        if (count == 0) ms_lua_error(L, "split: part %d is empty", (int)p);
        (*sizes)[p - 1] = (uint32_t)count;
        for (lua_Integer i = 1; i <= count; i++) {
            lua_rawgeti(L, -1, i);
            *next++ = (uint32_t)ms_lua_integer(L, -1, 0, (int64_t)size - 1, "rank of a part");
            lua_pop(L, 1);
        }
        lua_pop(L, 1);
    }
    return (uint32_t)parts;
}

/* Where as many groups are alive as a job may have: what scripts have dropped is found first, on
 * all ranks, as all have met the limit. Models that no script reaches are users of their groups. */
static ms_status split_after_collection(lua_State *L, ms_group *group, uint32_t parts,
                                        const uint32_t *sizes, const uint32_t *ranks,
                                        ms_group **out)
{
    ms_runtime *runtime = ms_lua_runtime(L);
    ms_lua_collect(L, runtime);
    ms_gradient_sources_sweep(runtime->engine);
    return ms_group_split(group, parts, sizes, ranks, out);
}

/* group:split{ { 0, 1 }, { 2, 3 } } -> the group of the part that this rank is in, or nil. All
 * ranks of the group call it with equal lists. It blocks, so it is refused in hooks. The new handle
 * has the channel of this one. */
static int group_split(lua_State *L)
{
    group_box *box = check_box(L, 1);
    ms_lua_refuse_in_hook(L, "split", "groups are made before training");
    ms_lua_enter(L);
    uint32_t *sizes, *ranks;
    uint32_t parts = read_parts(L, ms_group_size(box->group), &sizes, &ranks);
    group_box *part = new_box(L, box->channel);
    ms_status status = ms_group_split(box->group, parts, sizes, ranks, &part->group);
    if (status && ms_group_lacks_numbers(box->group))
        status = split_after_collection(L, box->group, parts, sizes, ranks, &part->group);
    ms_lua_ok(L, status);
    /* This rank is in none of the parts. */
    if (!part->group) lua_pushnil(L);
    else part->closings = ms_group_closings(part->group);
    return 1;
}

/* group:close(), __close: a second call does nothing. */
static int group_close(lua_State *L)
{
    const group_box *box = luaL_checkudata(L, 1, MS_GROUP_TYPE);
    if (!box->group) return 0;
    if (box->closings == ms_group_closings(box->group)) ms_lua_ok(L, ms_group_close(box->group));
    return 0;
}

/* group:barrier(timeout_ms?): blocks until all ranks of the group have come. Without a timeout the
 * job's holds. It is refused in hooks: a rank would wait there for peers that wait for its
 * gradients. */
static int group_barrier(lua_State *L)
{
    ms_group *group = ms_lua_group(L, 1);
    ms_lua_refuse_in_hook(L, "barrier", "hooks only enqueue");
    ms_lua_enter(L);
    uint64_t timeout =
        lua_isnoneornil(L, 2)
            ? 0
            : (uint64_t)ms_lua_integer(L, 2, 1, INT64_MAX / 1000000, "timeout_ms") * 1000000u;
    ms_lua_ok(L, ms_group_barrier(group, timeout));
    return 0;
}

/* -------------------------------------------------------------- collectives */

/* "sum" ..., or { premul_sum = factor }. The default is "sum". The factor may differ from rank to
 * rank; everything else of a call must be equal. */
static void read_op(lua_State *L, int index, ms_collective *call)
{
    if (lua_isnoneornil(L, index)) return;
    if (!lua_istable(L, index)) {
        call->op = (ms_reduce_op)ms_lua_choice(L, index, ops, "op");
        if (call->op == MS_REDUCE_OP_PREMUL_SUM)
            ms_lua_error(L, "op premul_sum needs its factor: { premul_sum = 0.5 }");
        return;
    }
    static const char *const keys[] = { "premul_sum", NULL };
    ms_lua_known_keys(L, index, keys, "op");
    if (lua_getfield(L, index, "premul_sum") != LUA_TNUMBER)
        ms_lua_error(L, "op: { premul_sum = factor } is expected");
    call->op = MS_REDUCE_OP_PREMUL_SUM;
    call->factor = lua_tonumber(L, -1);
    lua_pop(L, 1);
}

/* A list of as many numbers as the group has ranks, in a userdata on the stack; NULL for nil. The
 * engine copies the list when the call is enqueued, so it lives in Lua's memory until then only. */
static const int64_t *read_counts(lua_State *L, int index, const ms_group *group)
{
    if (lua_isnoneornil(L, index)) return NULL;
    luaL_checktype(L, index, LUA_TTABLE);
    uint32_t size = ms_group_size(group);
    if (lua_rawlen(L, index) != size)
        ms_lua_error(L, "counts: %d numbers are given, the group has %d ranks",
                     (int)lua_rawlen(L, index), (int)size);
    int64_t *counts = lua_newuserdatauv(L, size * sizeof *counts, 0);
    for (uint32_t i = 0; i < size; i++) {
        lua_rawgeti(L, index, (lua_Integer)i + 1);
        counts[i] = ms_lua_integer(L, -1, 0, INT64_MAX, "count");
        lua_pop(L, 1);
    }
    return counts;
}

/* group:_enqueue(kind, in?, out?, op?, root?, counts?, receive_counts?, label?, source?) -> the
 * stream that it runs on; counts are of elements. source: the result depends on it, if it requires
 * a gradient. lua/moonshard/parallel/group.lua has the collectives that users call; it makes the
 * result tensors, and the future from the stream. Which tensors a kind needs is checked by the
 * engine. */
static int group_enqueue(lua_State *L)
{
    group_box *box = check_box(L, 1);
    /* No bucket: the call is a script's own. */
    ms_collective call = { .bucket = -1,
                           .kind = (ms_collective_kind)ms_lua_choice(L, 2, kinds, "collective") };
    /* Missing arguments become nil, so that fixed indices are safe below. */
    lua_settop(L, 10);
    ms_lua_enter(L);
    call.in = ms_lua_optional_tensor(L, 3);
    call.out = ms_lua_optional_tensor(L, 4);
    read_op(L, 5, &call);
    if (!lua_isnil(L, 6))
        call.root =
            (uint32_t)ms_lua_integer(L, 6, 0, (int64_t)ms_group_size(box->group) - 1, "rank");
    call.label = luaL_optstring(L, 9, NULL);
    call.counts = read_counts(L, 7, box->group);
    call.receive_counts = read_counts(L, 8, box->group);
    ms_point ready = { 0 };
    /* With a source, the result depends on it on the tape (ms_group_apply). */
    ms_tensor *source = ms_lua_optional_tensor(L, 10);
    ms_lua_ok(L, source ? ms_group_apply(box->group, box->channel, &call, source, &ready)
                        : ms_group_enqueue(box->group, box->channel, &call, &ready));
    return ms_lua_push_stream(L, ms_engine_stream_at(ms_group_engine(box->group), ready.stream));
}

/* ----------------------------------------------------- numbers out of band */

/* Of what group:_share_begin and group:_share_end are to share; whole: of all ranks together. whole
 * counts numbers, not bytes. */
typedef struct shared_numbers {
    ms_sharing sharing;
    uint64_t whole;
} shared_numbers;

/* (group, kind, dtype, count): kind is "sum" or "all_gather", dtype "i32", "i64" or "f32". Begin
 * and end must be given the same form, dtype and count, since the engine keeps bytes only. */
static shared_numbers read_sharing(lua_State *L, const ms_group *group, uint64_t count)
{
    static const char *const forms[] = { "sum", "all_gather", NULL };
    static const char *const dtypes[] = { "i32", "i64", "f32", NULL };
    static const ms_dtype dtype_of[] = { MS_I32, MS_I64, MS_F32 };
    bool gathers = ms_lua_choice(L, 2, forms, "form") == 1;
    return (shared_numbers){ .sharing = { .kind = gathers ? MS_ALL_GATHER : MS_ALL_REDUCE,
                                          .op = MS_REDUCE_OP_SUM,
                                          .dtype = dtype_of[ms_lua_choice(L, 3, dtypes, "dtype")],
                                          .count = count },
                             .whole = count * (gathers ? ms_group_size(group) : 1) };
}

/* Reads the Lua number on top; raises if it is none. It is called before the engine, with the
 * memory owned by a userdata. All dtypes get 8 bytes of room for each number, which is more than
 * enough; only the first `count` items of the dtype's own size are used. */
static void put_number(lua_State *L, ms_dtype dtype, void *numbers, uint64_t i)
{
    if (dtype == MS_F32) ((float *)numbers)[i] = (float)luaL_checknumber(L, -1);
    else if (dtype == MS_I32) ((int32_t *)numbers)[i] = (int32_t)luaL_checkinteger(L, -1);
    else ((int64_t *)numbers)[i] = luaL_checkinteger(L, -1);
}

/* Pushes number i of the result: an integer stays one, so ids and counts are exact; an f32 becomes
 * a Lua number without loss. */
static void push_number(lua_State *L, ms_dtype dtype, const void *numbers, uint64_t i)
{
    if (dtype == MS_F32) lua_pushnumber(L, (lua_Number)((const float *)numbers)[i]);
    else if (dtype == MS_I32) lua_pushinteger(L, ((const int32_t *)numbers)[i]);
    else lua_pushinteger(L, ((const int64_t *)numbers)[i]);
}

/* Most calls of the library that share numbers are a script's call (a save, a state): its line goes
 * into messages. Views of planners are made of such numbers too, while a planner runs. */
static void enter_sharing(lua_State *L)
{
    if (ms_lua_runtime(L)->planning) ms_lua_enter_inside(L);
    else ms_lua_enter(L);
}

/* group:_share_begin(form, dtype, numbers, label) -> ticket. The host does not wait. The ticket is
 * an integer, so a script may drop it: the result is then kept until the engine ends. */
static int group_share_begin(lua_State *L)
{
    ms_group *group = ms_lua_group(L, 1);
    luaL_checktype(L, 4, LUA_TTABLE);
    shared_numbers what = read_sharing(L, group, lua_rawlen(L, 4));
    what.sharing.label = luaL_checkstring(L, 5);
    void *numbers = lua_newuserdatauv(L, what.sharing.count * sizeof(int64_t), 0);
    for (uint64_t i = 0; i < what.sharing.count; i++) {
        lua_rawgeti(L, 4, (lua_Integer)i + 1);
        put_number(L, what.sharing.dtype, numbers, i);
        lua_pop(L, 1);
    }
    uint64_t ticket = 0;
    enter_sharing(L);
    ms_lua_ok(L, ms_group_share_begin(group, &what.sharing, numbers, &ticket));
    lua_pushinteger(L, (lua_Integer)ticket);
    return 1;
}

/* group:_share_end(form, dtype, count, ticket) -> the result as a list: every rank's `count`
 * numbers, rank by rank, or their sums. Blocks. It uses enter_inside, since planners' views are
 * made of such numbers. */
static int group_share_end(lua_State *L)
{
    ms_group *group = ms_lua_group(L, 1);
    shared_numbers what = read_sharing(L, group, (uint64_t)luaL_checkinteger(L, 4));
    void *all = lua_newuserdatauv(L, what.whole * sizeof(int64_t), 0);
    ms_lua_enter_inside(L);
    ms_lua_ok(L, ms_group_share_end(group, (uint64_t)luaL_checkinteger(L, 5), all));
    lua_createtable(L, (int)what.whole, 0);
    for (uint64_t i = 0; i < what.whole; i++) {
        push_number(L, what.sharing.dtype, all, i);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* group:_share_bytes(form, bytes, label, from?) -> bytes: those of rank `from` ("broadcast"), or
 * every rank's, rank by rank ("all_gather"). All ranks bring equally many. Blocks. The library pads
 * texts to one length before (group.lua). */
static int group_share_bytes(lua_State *L)
{
    static const char *const forms[] = { "broadcast", "all_gather", NULL };
    size_t count = 0;
    ms_group *group = ms_lua_group(L, 1);
    bool gathers = ms_lua_choice(L, 2, forms, "form") == 1;
    const char *mine = luaL_checklstring(L, 3, &count);
    ms_sharing sharing = { .kind = gathers ? MS_ALL_GATHER : MS_BROADCAST,
                           .dtype = MS_U8,
                           .count = count,
                           .label = luaL_checkstring(L, 4) };
    if (!gathers)
        sharing.root = (uint32_t)ms_lua_integer(L, 5, 0, (int64_t)ms_group_size(group) - 1, "from");
    size_t whole = count * (gathers ? ms_group_size(group) : 1);
    char *all = lua_newuserdatauv(L, whole, 0);
    enter_sharing(L);
    ms_lua_ok(L, ms_group_share(group, &sharing, mine, all));
    lua_pushlstring(L, all, whole);
    return 1;
}

/* -------------------------------------------------------------- for `check` */

/* core.comm_use_graphs(): collectives of memory that stays may be launched as graphs. All ranks
 * call it at the same place. */
static int comm_use_graphs(lua_State *L)
{
    ms_lua_ok(L, ms_comm_use_graphs(ms_group_engine(ms_lua_world(L))));
    return 0;
}

/* core.comm_record(on): whether collectives are recorded from now on, for comm_records. Turning it
 * on drops what was recorded before. A fake world on the sim device records from its start. */
static int comm_record(lua_State *L)
{
    ms_comm_record(ms_group_engine(ms_lua_world(L)), lua_toboolean(L, 1));
    return 0;
}

/* core.comm_records() -> list of { op, dtype, count, group, channel, label, payload_bytes,
 * wire_bytes, between_hosts_bytes }, hash of their order. `moonshard check` prints the list; ranks
 * that make the same calls in the same order have equal hashes. */
static int comm_records(lua_State *L)
{
    ms_engine *engine = ms_group_engine(ms_lua_world(L));
    size_t count = ms_comm_record_count(engine);
    lua_createtable(L, (int)count, 0);
    for (size_t i = 0; i < count; i++) {
        const ms_collective_record *record = ms_comm_record_get(engine, i);
        lua_createtable(L, 0, 9);
        lua_pushstring(L, ms_collective_name(record->kind));
        lua_setfield(L, -2, "op");
        /* A barrier has no numbers, hence no dtype. */
        lua_pushstring(L, record->kind == MS_BARRIER ? "" : ms_dtype_name(record->dtype));
        lua_setfield(L, -2, "dtype");
        ms_lua_set_integer(L, "count", (int64_t)record->count);
        lua_pushstring(L, ms_group_name(record->group));
        lua_setfield(L, -2, "group");
        /* Channels of the library have names instead of numbers. */
        if (record->channel <= MS_USER_CHANNELS) lua_pushinteger(L, record->channel);
        else lua_pushstring(L, ms_channel_name(record->channel));
        lua_setfield(L, -2, "channel");
        lua_pushstring(L, ms_strings_get(ms_engine_strings(engine), record->label));
        lua_setfield(L, -2, "label");
        ms_lua_set_integer(L, "payload_bytes", (int64_t)record->payload_bytes);
        ms_lua_set_integer(L, "wire_bytes", (int64_t)record->wire_bytes);
        ms_lua_set_integer(L, "between_hosts_bytes", (int64_t)record->between_nodes_bytes);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    lua_pushinteger(L, (lua_Integer)ms_comm_order_hash(engine));
    return 2;
}

/* core.comm_groups() -> all groups of this engine, the world first. In the order in which this rank
 * joined them. */
static int comm_groups(lua_State *L)
{
    ms_engine *engine = ms_group_engine(ms_lua_world(L));
    lua_newtable(L);
    ms_group *group;
    for (uint32_t i = 0; (group = ms_comm_group(engine, i)) != NULL; i++) {
        ms_lua_push_group(L, group, 1);
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* core.comm_calls() -> calls by operation since the start, in all groups, also in those that are
 * gone; wire bytes of all. */
static int comm_calls(lua_State *L)
{
    const ms_engine *engine = ms_group_engine(ms_lua_world(L));
    lua_newtable(L);
    for (int kind = 0; kind < MS_COLLECTIVES; kind++) {
        ms_traffic traffic = ms_comm_traffic(engine, (ms_collective_kind)kind);
        if (traffic.calls == 0 || kind == MS_SPLIT) continue;
        lua_pushinteger(L, (lua_Integer)traffic.calls);
        lua_setfield(L, -2, ms_collective_name((ms_collective_kind)kind));
    }
    lua_pushinteger(L, (lua_Integer)ms_comm_traffic(engine, MS_COLLECTIVES).wire_bytes);
    return 2;
}

/* core.alone() -> the group of this rank alone, in which collectives change nothing */
static int alone(lua_State *L)
{
    ms_group *group = NULL;
    ms_lua_ok(L, ms_comm_alone(ms_group_engine(ms_lua_world(L)), &group));
    return ms_lua_push_group(L, group, 1);
}

/* core.is_group(value) -> boolean, for values of any type: for checks of options. */
static int is_group(lua_State *L)
{
    lua_pushboolean(L, luaL_testudata(L, 1, MS_GROUP_TYPE) != NULL);
    return 1;
}

/* core.group_methods is the table of a group's methods: the library adds the collectives that users
 * call, which make futures of streams. */
void ms_open_group(lua_State *L, int runtime)
{
    /* What needs no group: the world itself starts the engine. */
    static const luaL_Reg functions[] = { { "world", world },
                                          { "is_group", is_group },
                                          { "alone", alone },
                                          { "comm_use_graphs", comm_use_graphs },
                                          { "comm_record", comm_record },
                                          { "comm_records", comm_records },
                                          { "comm_groups", comm_groups },
                                          { "comm_calls", comm_calls },
                                          { NULL, NULL } };
    static const luaL_Reg methods[] = {
        { "rank", group_rank },
        { "size", group_size },
        { "name", group_name },
        { "_has_others", group_has_others },
        { "_world_rank", group_world_rank },
        { "_host", group_node },
        { "channel", group_channel },
        { "_parameters", group_parameters },
        { "_share_begin", group_share_begin },
        { "_share_end", group_share_end },
        { "_share_bytes", group_share_bytes },
        { "split", group_split },
        { "close", group_close },
        { "barrier", group_barrier },
        { "bytes_sent", group_bytes_sent },
        { "_traffic", group_traffic },
        { "_calls", group_calls },
        { "_stream", group_stream },
        { "_enqueue", group_enqueue },
        { NULL, NULL },
    };
    static const luaL_Reg events[] = { { "__eq", group_equal },
                                       { "__close", group_close },
                                       { "__gc", group_gc },
                                       { "__tostring", group_string },
                                       { NULL, NULL } };
    ms_lua_register(L, runtime, functions);
    ms_lua_type(L, runtime, MS_GROUP_TYPE, events, methods);
    lua_setfield(L, -2, "group_methods"); /* the library adds the collectives */
}
