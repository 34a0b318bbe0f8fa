/* outside.h: boxes of objects of C, and how the collector of Lua learns what they hold. */
#ifndef MOONSHARD_BINDINGS_OUTSIDE_H
#define MOONSHARD_BINDINGS_OUTSIDE_H

#include "bindings/io.h"

/* Objects of C in boxes: userdata whose __gc and close() release them. The collector sees the box
 * alone; what it holds outside of Lua is told here. */
/* An empty box of that type: the address of its pointer. */
void **ms_lua_box(lua_State *L, const char *type);
/* The pointer in that box; raises if the type is another, or it was closed. */
void *ms_lua_unbox(lua_State *L, int index, const char *type);
/* Before an object is made: a collection, if boxes hold much more than after the last one. Raises
 * where memory ran out. */
void ms_lua_make_room(lua_State *L);
/* The box of an object that exists now holds so many bytes more, with no other box. */
void ms_lua_box_holds(lua_State *L, void **box, uint64_t bytes);
/* The same of memory that several boxes may hold, as the key says: at most one key for each box. No
 * more than two such calls may follow a ms_lua_make_room. */
void ms_lua_box_shares(lua_State *L, void **box, const void *key, uint64_t bytes);
/* The object is gone; the box is as one that was closed. */
void ms_lua_box_empty(lua_State *L, void **box);
/* What an open file and a thread of an object count as. There are few of both in a process. */
#define MS_OUTSIDE_FILE ((uint64_t)256 << 10)
#define MS_OUTSIDE_THREAD ((uint64_t)4 << 20)

#endif
