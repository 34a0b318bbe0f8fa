/* rank_copies.h: copies of what the ranks of one host show, in the control files of the others. */
#ifndef MOONSHARD_COMM_CONTROL_CLUSTER_RANK_COPIES_H
#define MOONSHARD_COMM_CONTROL_CLUSTER_RANK_COPIES_H

#include "comm/control/cluster/state.h"

/* Tells the other hosts of bytes of the control file that one of this host has written. */
void ms_keeper_tell(ms_keeper *keeper, uint64_t offset, const void *data, size_t bytes);
/* Puts what another host has told into the control file; false: it may not write there. */
bool ms_keeper_apply(ms_keeper *keeper, uint32_t origin, uint64_t offset, const void *data,
                     size_t bytes);
/* Tells the other hosts how this host's ranks are: what has changed and matters at once, or (all)
 * whatever has changed. */
void ms_keeper_show(ms_keeper *keeper, bool all);
/* At the end: also the flight records. */
void ms_keeper_show_flights(ms_keeper *keeper);
/* Copies words that other processes may be writing. Addresses are multiples of 4. */
void ms_copy_words(void *to, const void *from, size_t bytes);

#endif
