/* names.h: texts of reports. The names of collectives are in moonshard/comm.h. */
#ifndef MOONSHARD_COMM_NAMES_H
#define MOONSHARD_COMM_NAMES_H

#include <stddef.h>

/* The text, or its end where it is too long. */
void ms_copy_tail(char *to, size_t bytes, const char *text);

#endif
