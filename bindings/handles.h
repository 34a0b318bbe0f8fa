/* handles.h: handles of tensors. */
#ifndef MOONSHARD_BINDINGS_HANDLES_H
#define MOONSHARD_BINDINGS_HANDLES_H

#include "bindings/state.h"

/* Pushes an empty handle; fill it in phase 3 with ms_handle_fill, which takes the reference over
 * and cannot fail. */
ms_handle *ms_lua_new_handle(lua_State *L);
void ms_handle_fill(ms_handle *handle, ms_tensor *owned);
/* Marks it as kept: it outlives its step. */
void ms_handle_keep(ms_handle *handle);
/* hold: a future holds it, until the end of the step in which its value is taken (spend), unless it
 * is kept. */
void ms_handle_hold(ms_handle *handle);
void ms_handle_spend(ms_handle *handle);
void ms_handle_drop(ms_handle *handle, const char *why); /* releases now; why: static text */

/* How many handles have been made, and the end of those that were made from `begin` to `end`, but
 * for kept ones: as at a step's end. Scripts may still have the handles. why: static text. */
uint64_t ms_handle_count(const ms_runtime *runtime);
void ms_handles_drop(ms_runtime *runtime, uint64_t begin, uint64_t end, const char *why);
/* The same for those that were values of futures, which scripts have taken. */
void ms_handles_drop_spent(ms_runtime *runtime, uint64_t begin, uint64_t end, const char *why);

/* Releases the tensors that were dropped: those of one step (0: all), of the handles after number
 * `begin`, up to `end`. */
void ms_handles_release_dropped(ms_runtime *runtime, uint64_t step, uint64_t begin, uint64_t end);
/* Makes the type of handles, once for each Lua state. */
void ms_open_handles(lua_State *L);

#endif
