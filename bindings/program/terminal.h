/* terminal.h: what the program asks its terminal. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_TERMINAL_H
#define MOONSHARD_BINDINGS_PROGRAM_TERMINAL_H

#include <lauxlib.h>

/* Functions of moonshard.process: is_terminal, columns. */
extern const luaL_Reg ms_terminal_functions[];

/* The text with which a line on stderr begins: on a terminal it clears the line that rank 0 may be
 * showing there. */
const char *ms_fresh_row(void);

#endif
