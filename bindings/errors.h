/* errors.h: errors of the library and of scripts: raised with the user's line, refused, and
 * what the program exits with. */
#ifndef MOONSHARD_BINDINGS_ERRORS_H
#define MOONSHARD_BINDINGS_ERRORS_H

#include "bindings/state.h"

void ms_open_errors(lua_State *L, int runtime);

#endif
