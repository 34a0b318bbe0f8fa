/* assert.h: MS_ASSERT, for what only a mistake in this code can break.
 *
 * In debug and sanitizer builds a false condition stops the process where it is, so that a
 * debugger or a sanitizer shows the place. Release builds do not evaluate the condition. What a
 * user, a file or a peer can cause is an error with a message, never an assertion. */
#ifndef MOONSHARD_BASE_ASSERT_H
#define MOONSHARD_BASE_ASSERT_H

#include <stdbool.h>

#ifdef NDEBUG
#define MS_ASSERT(condition) ((void)(true || (condition)))
#else
#define MS_ASSERT(condition) ((condition) ? (void)0 : __builtin_trap())
#endif

#endif
