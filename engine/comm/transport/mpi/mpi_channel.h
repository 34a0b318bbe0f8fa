/* mpi_channel.h: a channel of a group over several nodes. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_MPI_CHANNEL_H
#define MOONSHARD_COMM_TRANSPORT_MPI_MPI_CHANNEL_H

#include "comm/transport/mpi/state.h"

/* The channel of this call; NULL: no memory. */
ms_mpi_channel *ms_mpi_channel_for(ms_mpi_transport *transport, const ms_comm_args *args);
void ms_mpi_channel_free(const ms_os *os, ms_mpi_channel *channel);
/* Pages of the staging areas that this rank writes: its own, and those of members on other nodes
 * from which it receives. 0 or -errno. */
int ms_mpi_channel_populate(ms_mpi_channel *channel);
/* At least so many bytes of room; false: no memory. */
bool ms_mpi_channel_make_room(ms_mpi_channel *channel, size_t bytes);
/* A call begins: this rank's slot is written, header messages of the others are expected. */
void ms_mpi_channel_begin(ms_mpi_channel *channel, const ms_comm_args *args);
/* Sends a header message to the relay on each other node. */
void ms_mpi_channel_write(ms_mpi_channel *channel, ms_header_fill *fill);
/* The next message of this piece. */
void ms_mpi_channel_send(ms_mpi_channel *channel, uint64_t piece, uint32_t member,
                         const void *memory, size_t bytes);
void ms_mpi_channel_receive(ms_mpi_channel *channel, uint64_t piece, uint32_t member, void *memory,
                            size_t room);
/* Each false: the job has ended. Waits until all members, or those of this node, have entered the
 * same. */
bool ms_mpi_channel_enter(ms_mpi_channel *channel);
bool ms_mpi_channel_enter_here(ms_mpi_channel *channel);
/* Waits for a phase of the members of this node, or of `awaited`. */
bool ms_mpi_channel_phase_here(ms_mpi_channel *channel, uint64_t phases);
bool ms_mpi_channel_phase(ms_mpi_channel *channel, uint64_t phases);
/* The call ends when its messages have, and the members of this node are done. */
bool ms_mpi_channel_leave(ms_mpi_channel *channel, uint64_t phases);

#endif
