/* ids.h: numbers of groups, which a job hands out and takes back. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_IDS_H
#define MOONSHARD_COMM_CONTROL_SHM_IDS_H

#include "comm/control/shm/state.h"

/* Numbers of groups. A set is added to, or taken out of, words that others change, too. */
void ms_ids_put(ms_id_words words, const ms_ids *ids);
void ms_ids_remove(ms_id_words words, const ms_ids *ids);
/* Adds so many numbers that are free, or as many as there are. */
void ms_ids_take(ms_control_file *control, uint32_t parts, ms_ids *ids);
/* A rank of this node becomes a member of the group with this number. */
void ms_ids_note(ms_control_file *control, uint32_t id);
/* Slots of ms_control_shm and ms_control_cluster: see ms_control. */
void ms_shm_ids_take(ms_comm *comm, uint32_t parts, ms_ids *ids);
void ms_shm_ids_give(ms_comm *comm, const ms_ids *ids);
void ms_cluster_ids_take(ms_comm *comm, uint32_t parts, ms_ids *ids);
void ms_cluster_ids_give(ms_comm *comm, const ms_ids *ids);

#endif
