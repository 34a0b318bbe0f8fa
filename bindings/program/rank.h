/* rank.h: the program in one Lua state. */
#ifndef MOONSHARD_BINDINGS_PROGRAM_RANK_H
#define MOONSHARD_BINDINGS_PROGRAM_RANK_H

#include "bindings/program/state.h"

/* The program in a Lua state of its own: as all of it (rendezvous NULL), or as one rank. Returns
 * the exit code. */
int ms_program(int count, char **arguments, ms_rendezvous *rendezvous, uint32_t rank,
               bool is_thread);
/* The program as the agent of a node, which it supervises. */
int ms_program_of_agent(int count, char **arguments, ms_agent *agent);

#endif
