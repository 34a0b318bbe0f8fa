/* main.h: the command line. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_MAIN_H
#define MOONSHARD_BINDINGS_PROGRAM_MAIN_H

#include "bindings/program/state.h"

/* The text with which a line on stderr begins: on a terminal it clears the line that rank 0 may be
 * showing there. */
const char *ms_fresh_row(void);

/* The program in a Lua state of its own: as all of it (rendezvous NULL), or as one rank. Returns
 * the exit code. */
int ms_program(int count, char **arguments, ms_rendezvous *rendezvous, uint32_t rank,
               bool is_thread);

#endif
