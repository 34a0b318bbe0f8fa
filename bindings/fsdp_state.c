/* fsdp_state.c: whole parameters, values and pieces of sharded models, in Lua. */
#include "bindings/fsdp_state.h"

#include "bindings/arguments.h"
#include "bindings/call.h"
#include "bindings/enter.h"
#include "bindings/extension.h"
#include "bindings/fsdp.h"
#include "bindings/handles.h"
#include "bindings/runtime.h"
#include "bindings/script.h"

/* sharded:summon(units, { gradients =, offload =, absent = }): a list of their numbers */
static int fsdp_summon(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    luaL_checktype(L, 2, LUA_TTABLE);
    uint32_t count = (uint32_t)lua_rawlen(L, 2);
    uint32_t *units = lua_newuserdatauv(L, (count + 1) * sizeof *units, 0);
    for (uint32_t i = 0; i < count; i++) {
        lua_rawgeti(L, 2, (lua_Integer)i + 1);
        units[i] = ms_lua_fsdp_unit(L, -1, fsdp);
        lua_pop(L, 1);
    }
    ms_summon_options options = { .gradients = ms_lua_field_boolean(L, 3, "gradients", false),
                                  .offload = ms_lua_field_boolean(L, 3, "offload", false),
                                  .absent = ms_lua_field_boolean(L, 3, "absent", false) };
    ms_lua_ok(L, ms_fsdp_summon(fsdp, units, count, options));
    return 0;
}

/* sharded:summon_end(write) */
static int fsdp_summon_end(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_fsdp_summon_end(ms_lua_fsdp(L), lua_toboolean(L, 2)));
    return 0;
}

/* sharded:begin_values(unit), sharded:end_values(unit, copy); sharded:have_values(unit) */
static int fsdp_begin_values(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_lua_ok(L, ms_fsdp_begin_values(fsdp, ms_lua_fsdp_unit(L, 2, fsdp)));
    return 0;
}
static int fsdp_end_values(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_lua_ok(L, ms_fsdp_end_values(fsdp, ms_lua_fsdp_unit(L, 2, fsdp), lua_toboolean(L, 3)));
    return 0;
}

static int fsdp_have_values(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_lua_ok(L, ms_fsdp_have_values(fsdp, ms_lua_fsdp_unit(L, 2, fsdp)));
    return 0;
}

/* sharded:flat(parameters) -> this rank's shard of these */
static int fsdp_flat(lua_State *L)
{
    ms_lua_enter(L);
    uint32_t count = 0;
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_tensor **parameters = ms_lua_tensor_list(L, 2, &count), *shard = NULL;
    ms_lua_refuse_in_hook(L, "flat", "make parameters flat before training");
    if (ms_lua_runtime(L)->steps.serial)
        return ms_lua_error(L, "flat: inside a step; make parameters flat before training");
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_fsdp_shard(fsdp, parameters, count, &shard));
    ms_handle_fill(handle, shard);
    ms_handle_keep(handle);
    return 1;
}

/* sharded:state(parameter, storage?) -> memory for a state of all parameters that are with this
 * one; with that memory, the part of this one's piece */
static int fsdp_state(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_tensor *parameter = ms_lua_tensor(L, 2), *state = ms_lua_optional_tensor(L, 3), *made = NULL;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, state ? ms_fsdp_state_piece(fsdp, parameter, state, &made)
                       : ms_fsdp_state_new(fsdp, parameter, &made));
    ms_handle_fill(handle, made);
    ms_handle_keep(handle);
    return 1;
}

/* sharded:note_step(): see ms_fsdp_note_step */
static int fsdp_note_step(lua_State *L)
{
    ms_fsdp_note_step(ms_lua_fsdp(L));
    return 0;
}

/* sharded:show_whole(yes) */
static int fsdp_show_whole(lua_State *L)
{
    ms_fsdp_show_whole(ms_lua_fsdp(L), lua_toboolean(L, 2));
    return 0;
}

/* sharded:pieces() -> list of { name, unit, shape, first, count }; first counts from 0 */
static int fsdp_pieces(lua_State *L)
{
    const ms_fsdp *fsdp = ms_lua_fsdp(L);
    ms_fsdp_piece piece;
    lua_newtable(L);
    for (uint32_t i = 0; ms_fsdp_piece_get(fsdp, i, &piece); i++) {
        lua_createtable(L, 0, 5);
        lua_pushstring(L, piece.name);
        lua_setfield(L, -2, "name");
        lua_pushinteger(L, piece.unit);
        lua_setfield(L, -2, "unit");
        lua_createtable(L, (int)piece.dims, 0);
        for (uint32_t d = 0; d < piece.dims; d++) {
            lua_pushinteger(L, piece.shape[d]);
            lua_rawseti(L, -2, (lua_Integer)d + 1);
        }
        lua_setfield(L, -2, "shape");
        lua_pushinteger(L, piece.first);
        lua_setfield(L, -2, "first");
        lua_pushinteger(L, piece.count);
        lua_setfield(L, -2, "count");
        lua_rawseti(L, -2, (lua_Integer)i + 1);
    }
    return 1;
}

/* sharded:spans(unit, part) -> list, length; see ms_lua_push_spans. */
static int fsdp_spans(lua_State *L)
{
    const ms_fsdp *fsdp = ms_lua_fsdp(L);
    uint32_t part = (uint32_t)ms_lua_integer(L, 3, 0, UINT32_MAX, "part");
    return ms_lua_push_spans(L, fsdp, ms_lua_fsdp_unit(L, 2, fsdp), part);
}

/* sharded:is_fresh(unit, part): see ms_fsdp_part_is_fresh */
static int fsdp_is_fresh(lua_State *L)
{
    const ms_fsdp *fsdp = ms_lua_fsdp(L);
    uint32_t part = (uint32_t)ms_lua_integer(L, 3, 0, UINT32_MAX, "part");
    lua_pushboolean(L, ms_fsdp_part_is_fresh(fsdp, ms_lua_fsdp_unit(L, 2, fsdp), part));
    return 1;
}

/* The position at 2, from 1, as an index of pieces. */
static uint32_t check_piece(lua_State *L, const ms_fsdp *fsdp)
{
    ms_fsdp_piece piece;
    uint32_t index = (uint32_t)ms_lua_integer(L, 2, 1, UINT32_MAX, "position") - 1;
    if (!ms_fsdp_piece_get(fsdp, index, &piece))
        ms_lua_error(L, "fsdp: there is no piece %u", index + 1);
    return index;
}

/* sharded:cut(position, rank) -> first, count of that rank of the group that shards it; positions
 * are those of pieces() */
static int fsdp_cut(lua_State *L)
{
    const ms_fsdp *fsdp = ms_lua_fsdp(L);
    uint32_t index = check_piece(L, fsdp);
    int64_t first, count;
    ms_fsdp_piece_of_rank(fsdp, index, (uint32_t)ms_lua_integer(L, 3, 0, UINT32_MAX, "rank"),
                          &first, &count);
    lua_pushinteger(L, first);
    lua_pushinteger(L, count);
    return 2;
}

/* sharded:piece(position) -> the numbers of this rank's piece, 1-D, in the memory of the shard */
static int fsdp_piece(lua_State *L)
{
    ms_lua_enter(L);
    ms_fsdp *fsdp = ms_lua_fsdp(L);
    uint32_t index = check_piece(L, fsdp);
    ms_tensor *made = NULL;
    ms_handle *handle = ms_lua_new_handle(L);
    ms_lua_ok(L, ms_fsdp_piece_tensor(fsdp, index, &made));
    ms_handle_fill(handle, made);
    return 1;
}

/* sharded:note_written(): after pieces were written, on all ranks */
static int fsdp_note_written(lua_State *L)
{
    ms_lua_enter(L);
    ms_lua_ok(L, ms_fsdp_note_written(ms_lua_fsdp(L)));
    return 0;
}

void ms_lua_add_fsdp_state(lua_State *L, int runtime)
{
    static const luaL_Reg methods[] = {
        { "summon", fsdp_summon },
        { "summon_end", fsdp_summon_end },
        { "begin_values", fsdp_begin_values },
        { "end_values", fsdp_end_values },
        { "have_values", fsdp_have_values },
        { "flat", fsdp_flat },
        { "state", fsdp_state },
        { "show_whole", fsdp_show_whole },
        { "note_step", fsdp_note_step },
        { "pieces", fsdp_pieces },
        { "spans", fsdp_spans },
        { "is_fresh", fsdp_is_fresh },
        { "cut", fsdp_cut },
        { "piece", fsdp_piece },
        { "note_written", fsdp_note_written },
        { NULL, NULL },
    };
    ms_lua_register(L, runtime, methods);
}
