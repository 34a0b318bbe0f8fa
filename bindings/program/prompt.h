/* prompt.h: lines that a user types, and Ctrl-C, for the interactive session. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_PROMPT_H
#define MOONSHARD_BINDINGS_PROGRAM_PROMPT_H

#include <lauxlib.h>

/* Functions of moonshard.process: line_editor, read_line, keep_line, interrupts. */
extern const luaL_Reg ms_prompt_functions[];

#endif
