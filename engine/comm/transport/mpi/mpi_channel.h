/* mpi_channel.h: a channel of a group over several hosts. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_MPI_CHANNEL_H
#define MOONSHARD_COMM_TRANSPORT_MPI_MPI_CHANNEL_H

#include "comm/transport/mpi/state.h"

/* The lane of this call; NULL: no memory. */
ms_lane *ms_lane_for(ms_hosts *hosts, const ms_comm_args *args);
void ms_lane_free(const ms_os *os, ms_lane *lane);
/* Pages of the staging areas that this rank writes: its own, and those of members on other hosts
 * from which it receives. 0 or -errno. */
int ms_lane_populate(ms_lane *lane);
/* At least so many bytes of room; false: no memory. */
bool ms_lane_make_room(ms_lane *lane, size_t bytes);
/* A call begins: this rank's slot is written, letters of the others are expected. */
void ms_lane_begin(ms_lane *lane, const ms_comm_args *args);
void ms_lane_write(ms_lane *lane, ms_letter_fill *fill);
/* The next message of this piece. */
void ms_lane_send(ms_lane *lane, uint64_t piece, uint32_t member, const void *memory, size_t bytes);
void ms_lane_receive(ms_lane *lane, uint64_t piece, uint32_t member, void *memory, size_t room);
/* Each false: the job has ended. Waits until all members, or those of this host, have entered the
 * same. */
bool ms_lane_enter(ms_lane *lane);
bool ms_lane_enter_here(ms_lane *lane);
/* Waits for a phase of the members of this host, or of `awaited`. */
bool ms_lane_phase_here(ms_lane *lane, uint64_t phases);
bool ms_lane_phase(ms_lane *lane, uint64_t phases);
/* The call ends when its messages have, and the members of this host are done. */
bool ms_lane_leave(ms_lane *lane, uint64_t phases);

#endif
