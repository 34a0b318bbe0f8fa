/* message.h: messages to ranks on other nodes. */
#ifndef MOONSHARD_COMM_TRANSPORT_MPI_MESSAGE_H
#define MOONSHARD_COMM_TRANSPORT_MPI_MESSAGE_H

#include "comm/transport/mpi/state.h"

/* Starts a message to, or from, the world rank of this member. */
void ms_post_send(ms_post *post, ms_tracked_message *tracked, uint32_t member, const void *memory,
                  size_t bytes);
void ms_post_receive(ms_post *post, ms_tracked_message *tracked, uint32_t member, void *memory,
                     size_t room);
/* Lets those messages go whose time has come. */
void ms_post_delayed(ms_post *post);
/* Whether it has ended; one that failed ends the job. */
bool ms_tracked_message_ended(ms_post *post, ms_tracked_message *tracked);
/* Waits until all messages of the batch have ended, and empties it; false: the job has ended. */
bool ms_post_await(ms_post *post, ms_batch *batch);
/* A helper's `hangs`, of a post. */
const char *ms_post_hangs(ms_helper *helper);
/* The next message of a batch, which has room. */
ms_tracked_message *ms_batch_next(ms_batch *batch);

#endif
