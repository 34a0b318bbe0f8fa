/* prompt.c: lines that a user types, edited by libedit where this machine has it, and Ctrl-C. */
#include "bindings/program/prompt.h"

#include <errno.h>
#include <locale.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "moonshard/base.h"

/* Lines that the history keeps. */
#define MS_HISTORY_LINES 1000

/* What is used of libedit, by the names that it shares with GNU readline. It is loaded at run time:
 * the program works without it. Readline itself is not used, since its licence would hold for the
 * whole program. */
typedef char *(*ms_generator)(const char *text, int state);
typedef char **(*ms_completer)(const char *text, int start, int end);
typedef struct editor {
    void (*install)(const char *prompt, void (*take)(char *text));
    void (*read_char)(void);
    void (*remove)(void);
    char **(*matches)(const char *text, ms_generator next);
    int (*add_history)(const char *line);
    int (*read_history)(const char *path);
    int (*write_history)(const char *path);
    void (*stifle_history)(int lines);
    /* Variables of the library. */
    ms_completer *completer;
    const char **breaks;
    int *appended, *is_over, *catches;
} editor;

/* A process has one terminal, and callbacks of libedit have no argument of ours. */
static editor edit;
static bool can_edit;
static char history[4096];
static char *typed;     /* the line that came last; NULL: the input has ended */
static bool has_line;   /* `typed` is set */
static lua_State *here; /* in read_line, whose argument 2 completes words */

/* Ctrl-C: at a prompt it is noted, and while a line runs it ends the line by an error. */
static volatile sig_atomic_t interrupted;
static lua_State *volatile running;

/* --------------------------------------------------------------- interrupts */

static void end_line(lua_State *L, lua_Debug *record)
{
    (void)record;
    lua_sethook(L, NULL, 0, 0);
    luaL_error(L, "interrupted");
}

/* A handler; lua_sethook may be called there. A second Ctrl-C ends the process, since a call into
 * the engine may never return. */
static void interrupt(int number)
{
    interrupted = 1;
    if (!running) return;
    signal(number, SIG_DFL);
    lua_sethook(running, end_line, LUA_MASKCALL | LUA_MASKRET | LUA_MASKLINE | LUA_MASKCOUNT, 1);
}

/* A handler for SIGCONT, only so that a wait for a key ends. */
static void resume(int number) { (void)number; }

static void handle(int number, void (*handler)(int), int flags)
{
    struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
    sigemptyset(&action.sa_mask);
    sigaction(number, &action, NULL);
}

/* interrupts(how) -> whether Ctrl-C came since the last call. how: "line": a read of stdin comes
 * back; "run": this Lua state raises "interrupted"; "end": the process ends, as at first. */
static int interrupts(lua_State *L)
{
    static const char *const names[] = { "end", "line", "run", NULL };
    int how = luaL_checkoption(L, 1, NULL, names);
    running = NULL;
    lua_sethook(L, NULL, 0, 0);
    lua_pushboolean(L, interrupted != 0);
    interrupted = 0;
    if (how == 2) running = L;
    /* Tasks and files go on where a line runs. */
    handle(SIGINT, how == 0 ? SIG_DFL : interrupt, how == 2 ? SA_RESTART : 0);
    return 1;
}

/* -------------------------------------------------------------------- lines */

static void take_line(char *text)
{
    typed = text;
    has_line = true;
}

/* The next string of the list at the top of the stack of `here`; libedit frees it. */
static char *next_match(const char *text, int state)
{
    (void)text;
    static lua_Integer place;
    place = state ? place + 1 : 1;
    lua_rawgeti(here, -1, place);
    const char *match = lua_tostring(here, -1);
    char *copy = match ? strdup(match) : NULL;
    lua_pop(here, 1);
    return copy;
}

/* libedit calls this for the word before the cursor. No error may unwind through libedit: then
 * there are no completions. Names of files are none. */
static char **complete(const char *text, int start, int end)
{
    (void)start;
    (void)end;
    char **list = NULL;
    *edit.is_over = 1;
    lua_pushvalue(here, 2);
    lua_pushstring(here, text);
    if (lua_pcall(here, 1, 1, 0) == LUA_OK && lua_istable(here, -1))
        list = edit.matches(text, next_match);
    lua_pop(here, 1);
    return list;
}

static bool find(const ms_os *os, void *library, const char *name, void *to)
{
    void (*found)(void) = os->library_symbol(os->user, library, name);
    memcpy(to, &found, sizeof found);
    return found != NULL;
}

static bool load_editor(const ms_os *os)
{
    static const char *const names[] = { "libedit.so.2", "libedit.so.0", "libedit.so" };
    char why[256];
    void *library = NULL;
    for (size_t i = 0; !library && i < sizeof names / sizeof *names; i++)
        library = os->library_load(os->user, names[i], why, sizeof why);
    return library && find(os, library, "rl_callback_handler_install", &edit.install)
           && find(os, library, "rl_callback_read_char", &edit.read_char)
           && find(os, library, "rl_callback_handler_remove", &edit.remove)
           && find(os, library, "rl_completion_matches", &edit.matches)
           && find(os, library, "add_history", &edit.add_history)
           && find(os, library, "read_history", &edit.read_history)
           && find(os, library, "write_history", &edit.write_history)
           && find(os, library, "stifle_history", &edit.stifle_history)
           && find(os, library, "rl_attempted_completion_function", &edit.completer)
           && find(os, library, "rl_basic_word_break_characters", &edit.breaks)
           && find(os, library, "rl_completion_append_character", &edit.appended)
           && find(os, library, "rl_attempted_completion_over", &edit.is_over)
           && find(os, library, "rl_catch_signals", &edit.catches);
}

/* line_editor(path) -> whether read_line can be called: this machine has libedit, and stdin and
 * stdout are a terminal that it can use; whether stdin is a terminal at all. path: a file that
 * keeps the history. */
static int line_editor(lua_State *L)
{
    const ms_os *os = ms_os_posix();
    const char *path = luaL_checkstring(L, 1), *terminal = os->environment(os->user, "TERM");
    bool is_typed = isatty(STDIN_FILENO);
    bool can =
        is_typed && isatty(STDOUT_FILENO) && terminal && *terminal && strcmp(terminal, "dumb") != 0;
    if (can && !can_edit && load_editor(os)) {
        can_edit = true;
        setlocale(LC_CTYPE, ""); /* letters of several bytes */
        *edit.completer = complete;
        *edit.breaks = " \t\n\"'`><=;,|&{}()[]+-*/%^#~!";
        *edit.appended = '\0';
        *edit.catches = 0;
        edit.stifle_history(MS_HISTORY_LINES);
        snprintf(history, sizeof history, "%s", path);
        edit.read_history(history); /* at first there is none */
    }
    lua_pushboolean(L, can && can_edit);
    lua_pushboolean(L, is_typed);
    return 2;
}

/* Signals come only while it waits for a key, so that none is lost before. */
static void wait_for_line(const char *prompt)
{
    sigset_t blocked, before, open;
    struct pollfd key = { .fd = STDIN_FILENO, .events = POLLIN };
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGINT);
    sigaddset(&blocked, SIGCONT);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    open = before;
    sigdelset(&open, SIGINT);
    sigdelset(&open, SIGCONT);
    edit.install(prompt, take_line);
    while (!has_line && !interrupted) {
        if (ppoll(&key, 1, NULL, &open) > 0) {
            if (key.revents & POLLIN) edit.read_char();
            else take_line(NULL);
        } else if (errno != EINTR) take_line(NULL);
        else if (!interrupted) { /* continued, or another size: the terminal is set again */
            edit.remove();
            edit.install(prompt, take_line);
        }
    }
    edit.remove();
    sigprocmask(SIG_SETMASK, &before, NULL);
}

/* read_line(prompt, complete) -> text, or nil at the end of the input, or nil, true after Ctrl-C.
 * complete(word) -> list of what it may become. */
static int read_line(lua_State *L)
{
    const char *prompt = luaL_checkstring(L, 1);
    luaL_checktype(L, 2, LUA_TFUNCTION);
    luaL_argcheck(L, can_edit, 1, "line_editor comes first");
    lua_settop(L, 2);
    fflush(stdout);
    here = L;
    has_line = false;
    interrupted = 0;
    handle(SIGINT, interrupt, 0);
    handle(SIGCONT, resume, 0);
    wait_for_line(prompt);
    handle(SIGCONT, SIG_DFL, 0);
    handle(SIGINT, SIG_DFL, 0);
    if (!has_line) {
        lua_pushnil(L);
        lua_pushboolean(L, true);
        return 2;
    }
    lua_pushstring(L, typed); /* nil for NULL */
    free(typed);
    typed = NULL;
    return 1;
}

/* keep_line(text): puts it into the history and its file. A file that cannot be written is no
 * reason to end a session. */
static int keep_line(lua_State *L)
{
    const char *text = luaL_checkstring(L, 1);
    if (!can_edit) return 0;
    edit.add_history(text);
    edit.write_history(history);
    return 0;
}

const luaL_Reg ms_prompt_functions[] = { { "line_editor", line_editor },
                                         { "read_line", read_line },
                                         { "keep_line", keep_line },
                                         { "interrupts", interrupts },
                                         { NULL, NULL } };
