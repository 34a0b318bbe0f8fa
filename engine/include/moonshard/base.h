/* moonshard/base.h: status codes, the error record, the operating-system table, and the small tools
 * that every layer uses.
 *
 * Invariants
 * - Nothing in the engine touches memory allocation, files, clocks, threads or the machine's
 *   description but through an ms_os table. Replace the table and every such call is yours (tests
 *   fail the n-th one).
 * - An ms_context belongs to one thread at a time: it carries the table, the log and the last error
 *   of that thread's calls.
 * - A function that fails returns a status other than MS_OK, has left a message in its context, and
 *   has changed nothing else.
 * - Messages say what, where and what to do; they are one line unless they show two sides of a
 *   comparison. */
#ifndef MOONSHARD_BASE_H
#define MOONSHARD_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MS_API __attribute__((visibility("default")))
#define MS_PRINTF(string, first) __attribute__((format(printf, string, first)))
#define MS_VERSION "0.1.0"

/* -------------------------------------------------------- status and errors */

typedef enum ms_status {
    MS_OK = 0,
    MS_ERROR_ARGUMENT, /* the caller's mistake: raised in Lua */
    /* A call that this object's state forbids (freed graph, call inside a hook): raised in Lua. */
    MS_ERROR_STATE,
    MS_ERROR_HAZARD,  /* strict mode: a wait is missing */
    MS_ERROR_TASK,    /* a task failed on its stream; found by a later call */
    MS_ERROR_MEMORY,  /* host or device memory ran out */
    MS_ERROR_SCRIPT,  /* a callback into the host language failed */
    MS_ERROR_ABORTED, /* given up because of an earlier error */
    /* From here on: what the environment refuses; `nil, message, code` in Lua. */
    MS_ERROR_NOT_FOUND,
    MS_ERROR_DENIED,
    MS_ERROR_EXISTS,
    MS_ERROR_NO_SPACE,
    MS_ERROR_CORRUPT,
    MS_ERROR_MISMATCH,
    MS_ERROR_TIMEOUT,
    MS_ERROR_UNSUPPORTED,
    MS_ERROR_IO
} ms_status;

/* The code that Lua functions give for errors of the environment ("not_found" ...), else the
 * status' own name
 * ("argument", "memory" ...). Static. */
MS_API const char *ms_status_name(ms_status status);

#define MS_ERROR_MESSAGE_BYTES 1024

/* The last error of a context. Fields that do not apply are -1 or "". */
typedef struct ms_error {
    ms_status status;
    int32_t rank;
    int64_t collective;
    int32_t bucket;
    char operation[64];
    char script[128]; /* "file.lua:12" of the call that caused it */
    char message[MS_ERROR_MESSAGE_BYTES];
} ms_error;

/* ----------------------------------------------- the operating-system table */

typedef struct ms_file ms_file; /* an open file of the table that opened it */
typedef struct ms_os_thread ms_os_thread;

enum {
    MS_FILE_READ = 1,
    MS_FILE_WRITE = 2,
    MS_FILE_CREATE = 4,
    MS_FILE_TRUNCATE = 8,
    MS_FILE_EXCLUSIVE = 16,
    MS_FILE_APPEND = 32,
    MS_FILE_DIRECTORY = 64 /* opens a folder, to sync it */
};

typedef struct ms_file_info {
    uint64_t bytes;
    int64_t modified_ns;
    bool is_directory;
} ms_file_info;

typedef struct ms_machine { /* what this process may use */
    uint32_t cores;         /* by affinity and cgroup quota, rounded up; at least 1 */
    uint64_t memory_bytes;  /* physical, or the cgroup's limit where that is lower */
    char cpu[64];           /* model name */
} ms_machine;

/* Functions answer 0 or a count on success and -errno on failure, or NULL where they return a
 * pointer. All are thread-safe. */
typedef struct ms_os {
    void *user;
    /* memory: alignment is a power of two >= 16; release takes what allocate or reallocate
     * returned, or NULL */
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    /* Alignment 16; pointer from allocate with alignment 16. */
    void *(*reallocate)(void *user, void *pointer, size_t bytes);
    void (*release)(void *user, void *pointer);
    /* address space: reserve has no pages; commit makes a range usable (zeroed; huge pages if asked
     * and possible) or answers -ENOMEM */
    void *(*reserve)(void *user, size_t bytes);
    int (*commit)(void *user, void *address, size_t bytes, bool huge);
    void (*unreserve)(void *user, void *address, size_t bytes);
    /* files: offsets and counts in bytes; read and write may move less than asked (0 from read: end
     * of file) */
    int (*open)(void *user, const char *path, int flags, ms_file **out);
    int64_t (*read)(void *user, ms_file *file, void *buffer, size_t bytes, uint64_t offset);
    int64_t (*write)(void *user, ms_file *file, const void *buffer, size_t bytes, uint64_t offset);
    int (*sync)(void *user, ms_file *file);
    /* exclusive, not waiting; -EWOULDBLOCK if another has it */
    int (*lock)(void *user, ms_file *file);
    int (*size)(void *user, ms_file *file, uint64_t *bytes);
    /* Cuts the file, or fills it up with zeros. */
    int (*resize)(void *user, ms_file *file, uint64_t bytes);
    void (*close)(void *user, ms_file *file);
    int (*info)(void *user, const char *path, ms_file_info *out);
    int (*rename)(void *user, const char *from, const char *to);
    int (*remove)(void *user, const char *path); /* a file or an empty folder */
    int (*make_directory)(void *user, const char *path);
    /* Without . and .. ; any order. */
    int (*list)(void *user, const char *path, void (*entry)(void *to, const char *name), void *to);
    /* memory that several processes map: files without names, gone with their last user. New ones
     * are zero and have no pages yet; map gives the whole of one; populate gets the pages of a
     * mapped range, or -ENOMEM where touching them would be a signal. share: whether programs that
     * are started from here inherit the descriptor (its number is the answer); adopt: the other end
     * of that. Close with close, unmap with unreserve. */
    int (*shared_create)(void *user, const char *name, uint64_t bytes, ms_file **out);
    int (*shared_share)(void *user, ms_file *file, bool inherit);
    int (*shared_adopt)(void *user, int descriptor, ms_file **out);
    void *(*shared_map)(void *user, ms_file *file, uint64_t bytes);
    int (*shared_populate)(void *user, ms_file *file, void *address, uint64_t offset,
                           uint64_t bytes);
    /* this process holds a place of a shared file until it closes the file or ends, however it
     * ends. is_claimed: 1 if another process holds it, else 0 */
    int (*shared_claim)(void *user, ms_file *file, uint64_t place);
    int (*shared_is_claimed)(void *user, ms_file *file, uint64_t place);
    /* sockets of this machine, by path, only between processes of one user: messages come whole.
     * listen replaces what a crash left at the path (-EADDRINUSE: somebody listens there); accept
     * and receive wait that long (-ETIMEDOUT); accept answers -EACCES for another user's process,
     * which is shut out; connect does not wait (-ENOENT, -ECONNREFUSED: nobody listens). Messages
     * may bring files along; receive gives the message's length, 0 when the other has closed. */
    int (*socket_listen)(void *user, const char *path, ms_file **out);
    int (*socket_accept)(void *user, ms_file *listener, uint64_t timeout_ns, ms_file **out);
    int (*socket_connect)(void *user, const char *path, ms_file **out);
    int (*socket_send)(void *user, ms_file *socket, const void *message, size_t bytes,
                       ms_file *const *files, uint32_t count);
    int64_t (*socket_receive)(void *user, ms_file *socket, void *message, size_t bytes,
                              uint64_t timeout_ns, ms_file **files, uint32_t most, uint32_t *count);
    /* time */
    uint64_t (*monotonic_ns)(void *user);
    uint64_t (*realtime_ns)(void *user); /* since 1970, UTC */
    /* threads and process */
    int (*thread_start)(void *user, const char *name, void (*run)(void *), void *argument,
                        ms_os_thread **out);
    void (*thread_join)(void *user, ms_os_thread *thread); /* waits, then frees */
    /* core: position among those allowed */
    int (*thread_pin)(void *user, ms_os_thread *thread, uint32_t core);
    int (*machine)(void *user, ms_machine *out);
    int (*entropy)(void *user, void *buffer, size_t bytes);
    int64_t (*process_id)(void *user);
    const char *(*environment)(void *user, const char *name); /* NULL if unset */
} ms_os;

/* The table of this system. Const, never freed. */
MS_API const ms_os *ms_os_posix(void);

/* ---------------------------------------------------------- context and log */

typedef enum ms_log_level { MS_LOG_DEBUG, MS_LOG_INFO, MS_LOG_WARN, MS_LOG_OFF } ms_log_level;
typedef void (*ms_log_function)(void *user, ms_log_level level, const char *message);

typedef struct ms_activity ms_activity;

typedef struct ms_context {
    const ms_os *os;
    ms_log_function log; /* NULL: nothing is logged. The engine never prints by itself. */
    void *log_user;
    ms_log_level log_level;
    ms_error error;
    ms_activity *activity; /* borrowed; NULL: progress is not recorded */
} ms_context;

/* os NULL: ms_os_posix(). */
MS_API void ms_context_init(ms_context *context, const ms_os *os);
/* Records an error (one line, formatted as printf) and returns status. The fields beside status and
 * message are cleared. */
MS_API ms_status ms_fail(ms_context *context, ms_status status, const char *format, ...)
    MS_PRINTF(3, 4);
/* The status for an errno of a call of the table (ENOENT: MS_ERROR_NOT_FOUND ...), with "what
 * 'path': reason". errno_negative: -errno. */
MS_API ms_status ms_fail_os(ms_context *context, int errno_negative, const char *what,
                            const char *path);
MS_API void ms_log(ms_context *context, ms_log_level level, const char *format, ...)
    MS_PRINTF(3, 4);

/* ----------------------------------------------------------------- activity */

/* What a host thread and its workers get done, and where its script is: hints for those who wait
 * for them. The record may lie in memory that other processes see. Nothing here blocks or fails,
 * and NULL is allowed wherever the rank itself writes. */
#define MS_LINE_BYTES 160
typedef enum ms_whereabouts {
    MS_WHERE_UNKNOWN,
    MS_WHERE_SCRIPT,
    MS_WHERE_FINALIZER
} ms_whereabouts;
typedef struct ms_activity_state {
    /* Grows with every call of the host, task run, bytes moved, long call left. */
    uint64_t progress;
    bool busy;                /* the host is inside a call that may take long */
    uint32_t heard, answered; /* the last questions that its thread has heard, and has answered */
    ms_whereabouts place;     /* at the last question heard */
    int32_t thread;           /* of the host, as the system numbers it; 0: not known */
    char line[MS_LINE_BYTES]; /* where its script was seen last: "file.lua:12", or "" */
} ms_activity_state;
/* By the host: its thread; a call into the engine, from this script line (NULL: the same as
 * before). */
MS_API void ms_activity_host(ms_activity *activity, int32_t thread);
MS_API void ms_activity_call(ms_activity *activity, const char *line);
/* From any thread: something got done. */
MS_API void ms_activity_done(ms_activity *activity);
/* By the host, around what may take long: waits for the device, files. */
MS_API void ms_activity_begin(ms_activity *activity);
MS_API void ms_activity_end(ms_activity *activity);
/* Others ask where the script is, and learn the question's number; the thread that is asked has
 * heard it (also from a signal handler); and answers it. false: it is answered already. */
MS_API uint32_t ms_activity_ask(ms_activity *activity);
MS_API void ms_activity_hear(ms_activity *activity, ms_whereabouts place);
MS_API bool ms_activity_answer(ms_activity *activity, const char *line);
MS_API void ms_activity_read(const ms_activity *activity, ms_activity_state *out);

/* ------------------------------------------------------------------- memory */

/* Zeroed, aligned to 128 bytes; MS_ERROR_MEMORY names `what`. Release with ms_release. */
MS_API ms_status ms_allocate(ms_context *context, size_t bytes, const char *what, void **out);
MS_API void ms_release(ms_context *context, void *pointer);
/* Makes room for `need` items of item_bytes in *items (from ms_grow only, or NULL), growing
 * geometrically; new items are zeroed. */
MS_API ms_status ms_grow(ms_context *context, void **items, size_t *capacity, size_t need,
                         size_t item_bytes);
/* a * b in *out, or false on overflow. */
static inline bool ms_multiply(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

/* --------------------------------------------------------- hash and strings */

MS_API uint64_t ms_hash(const void *data, size_t bytes, uint64_t seed); /* XXH3, 64 bits */

/* Strings that live as long as their table, each once; ids count from 1, 0 is "". One thread at a
 * time. */
typedef struct ms_strings ms_strings;
MS_API ms_status ms_strings_new(ms_context *context, ms_strings **out);
MS_API void ms_strings_free(ms_strings *strings);
MS_API ms_status ms_strings_add(ms_strings *strings, const char *text, size_t bytes, uint32_t *id);
MS_API const char *ms_strings_get(const ms_strings *strings, uint32_t id);

/* ----------------------------------------------------------- random numbers */

/* Philox 4x32-10 (Salmon et al. 2011): four 32-bit numbers from a key and a counter; no state, so
 * draws never depend on threads. */
static inline void ms_philox(uint64_t key, uint64_t high, uint64_t low, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = (uint32_t)high,
             c3 = (uint32_t)(high >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* ------------------------------------------------------------------- dtypes */

static inline float ms_float_from_bits(uint32_t bits)
{
    union {
        uint32_t u;
        float f;
    } x = { .u = bits };
    return x.f;
}
static inline uint32_t ms_bits_from_float(float value)
{
    union {
        float f;
        uint32_t u;
    } x = { .f = value };
    return x.u;
}
static inline float ms_float_from_bf16(uint16_t half)
{
    return ms_float_from_bits((uint32_t)half << 16);
}
/* Round to nearest even; NaN stays NaN. */
static inline uint16_t ms_bf16_from_float(float value)
{
    uint32_t bits = ms_bits_from_float(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
MS_API float ms_float_from_f16(uint16_t half);
MS_API uint16_t ms_f16_from_float(float value); /* to nearest even; overflow gives infinity */

#ifdef __cplusplus
}
#endif
#endif
