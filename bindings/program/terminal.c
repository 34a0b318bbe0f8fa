/* terminal.c: what the program asks its terminal. */
#include "bindings/program/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

/* is_terminal() -> whether stdout and stderr are a terminal. Both are asked, since the line that
 * rank 0 redraws in place and the messages that clear it go to different ones. */
static int is_terminal(lua_State *L)
{
    lua_pushboolean(L, isatty(STDOUT_FILENO) && isatty(STDERR_FILENO));
    return 1;
}

/* columns() -> the present width of the terminal; 80 if it is not known. Asked before each redraw,
 * because the window may change its size. A pipe has no width. */
static int columns(lua_State *L)
{
    struct winsize size = { 0 };
    lua_pushinteger(L, ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col
                                                                                       : 80);
    return 1;
}

/* The sequence returns to the line's beginning and erases it. */
const char *ms_fresh_row(void)
{
    return isatty(STDOUT_FILENO) && isatty(STDERR_FILENO) ? "\r\033[K" : "";
}

const luaL_Reg ms_terminal_functions[] = { { "is_terminal", is_terminal },
                                           { "columns", columns },
                                           { NULL, NULL } };
