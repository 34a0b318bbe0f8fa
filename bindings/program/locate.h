/* locate.h: a rank says where its script is, when the supervisor asks with a signal. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_LOCATE_H
#define MOONSHARD_BINDINGS_PROGRAM_LOCATE_H

#include "bindings/program/state.h"

/* locate.c, for a rank. open: from now on its host thread answers a signal with the line at which
 * the script of L is; close ends that. coroutines wraps coroutine.resume and coroutine.wrap of L,
 * so that scripts in coroutines are found. */
void ms_locate_open(lua_State *L, ms_rendezvous *rendezvous, uint32_t rank, bool is_thread);
void ms_locate_close(void);
void ms_locate_coroutines(lua_State *L);

#endif
