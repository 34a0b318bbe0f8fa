/* files.h: the memory files of a job. */
#ifndef MOONSHARD_COMM_CONTROL_SHM_FILES_H
#define MOONSHARD_COMM_CONTROL_SHM_FILES_H

#include "comm/control/shm/state.h"

ms_status ms_shm_files_new(ms_context *context, const ms_rendezvous_options *options,
                           ms_rendezvous **out);
/* The files of one node of a job over several. The layout is copied. */
ms_status ms_shm_files_new_among(ms_context *context, const ms_rendezvous_options *options,
                                 const ms_layout *layout, ms_rendezvous **out);
/* The rendezvous of these files, control first, then a heap for each rank; owns them, also on
 * failure. MS_ERROR_CORRUPT if they are something else. */
ms_status ms_shm_files_take(ms_context *context, uint32_t ranks, ms_file *const *files,
                            ms_rendezvous **out);
ms_status ms_shm_files_share(ms_rendezvous *rendezvous, ms_context *context, char *text,
                             size_t bytes);
ms_status ms_shm_files_adopt(ms_context *context, const char *text, ms_rendezvous **out);
void ms_shm_files_close(ms_rendezvous *rendezvous);
/* Pages for a part of the control file or of a heap, before it is touched; 0 or -errno. */
int ms_shm_files_populate_control(ms_shm_files *files, void *address, size_t bytes);
int ms_shm_files_populate_heap(ms_shm_files *files, uint32_t rank, void *address, size_t bytes);
/* Copies words of the control file that other threads or processes may be writing. Addresses are
 * multiples of 4. */
void ms_copy_words(void *to, const void *from, size_t bytes);

#endif
