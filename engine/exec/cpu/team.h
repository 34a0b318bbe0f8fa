/* team.h: helpers that share the tiles of one task at a time. */
#ifndef MOONSHARD_EXEC_CPU_TEAM_H
#define MOONSHARD_EXEC_CPU_TEAM_H

#include "exec/cpu/state.h"

ms_status ms_team_open(ms_engine *engine, ms_cpu *cpu);
void ms_team_close(ms_team *team);
void ms_team_run(ms_team *team, uint32_t tiles, ms_tile_function tile, void *context,
                 ms_thread *thread);

#endif
