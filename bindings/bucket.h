/* bucket.h: the bucket of a communication hook, for the bindings of what reduces gradients. */
#ifndef MOONSHARD_BINDINGS_BUCKET_H
#define MOONSHARD_BINDINGS_BUCKET_H

#include "moonshard/hook.h"
#include "bindings/state.h"

ms_bucket *ms_lua_bucket(lua_State *L, int index); /* raises unless its hook still runs */
/* Raises "<what> cannot be used inside a link ..." while a chain in Lua runs, with callbacks. */
void ms_lua_refuse_in_link(lua_State *L, const char *what, const char *instead);

/* For bound functions. Pushes what a callback of ms_lua_bucket_hook is made of: the hook f(bucket)
 * -> future at one index, the list of all parameters and the hook's name (or nil) at others. */
void ms_lua_push_bucket_hook(lua_State *L, int hook, int parameters, int name);
/* What makes a reducer or a sharded model call a hook in Lua: all 0 if there is none. */
typedef struct ms_lua_hook_options {
    ms_comm_hook hook;
    void *user;
    void (*free)(void *user);
    uint32_t links; /* that the hook tells apart in stats (core.bucket_account) */
} ms_lua_hook_options;
/* Reads `hook`, `name` and `hook_links` of the table at one index. parameters: index of the list of
 * handles that bucket:parameters() gives out. The hook lives as long as the userdata at `box`. */
ms_lua_hook_options ms_lua_read_hook(lua_State *L, int table, int parameters, int box);
/* The engine's ms_comm_hook; user: an ms_callback of that. */
ms_status ms_lua_bucket_hook(void *user, ms_bucket *bucket, ms_tensor **result, ms_point *ready);

/* core.reduce_bucket, in test_bucket.c. */
int ms_lua_reduce_bucket(lua_State *L);

void ms_open_bucket(lua_State *L, int runtime);

#endif
