/* moonshard/base.h: status codes, the error record, the operating-system table, and the small tools
 * that every layer uses.
 *
 * Invariants
 * - The engine reaches memory allocation, files, clocks, threads and the machine's description only
 *   through an ms_os table. An application that brings its own table receives every such call;
 * tests use one to make the n-th call fail.
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
/* Functions that kernels of a GPU call, too. */
#if defined(__CUDACC__)
#define MS_EVERYWHERE static __host__ __device__ __forceinline__
#else
#define MS_EVERYWHERE static inline
#endif
#define MS_VERSION "0.1.0"
/* That of the library that was loaded, which may not be that of this header. Static. */
MS_API const char *ms_version(void);

/* -------------------------------------------------------- status and errors */

typedef enum ms_status {
    MS_OK = 0,
    MS_ERROR_ARGUMENT, /* the caller's mistake: raised in Lua */
    /* A call that this object's state forbids (freed graph, call inside a hook): raised in Lua. */
    MS_ERROR_STATE,
    MS_ERROR_HAZARD,  /* strict mode: a wait is missing */
    MS_ERROR_TASK,    /* a task failed on its stream; found by a later call */
    MS_ERROR_MEMORY,  /* host or device memory ran out */
    MS_ERROR_SCRIPT,  /* a callback into the application's language failed */
    MS_ERROR_ABORTED, /* not completed because of an earlier error */
    /* From here on: failures of the environment. In Lua the function returns `nil, message,
     * code`. */
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

/* For errors of the environment, the code that Lua functions return ("not_found" ...); for other
 * statuses their name ("argument", "memory" ...). Static. */
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
    bool is_directory; /* or a link to one */
    bool is_link;      /* the path itself is a link; the rest is of what it leads to */
} ms_file_info;

typedef struct ms_machine { /* what this process may use */
    uint32_t cores;         /* by affinity and cgroup quota, rounded up; at least 1 */
    uint32_t node_cores;    /* without affinity: launchers bind processes to some of the cores */
    uint64_t memory_bytes;  /* physical, or the cgroup's limit where that is lower */
    char cpu[64];           /* model name */
} ms_machine;

#define MS_CORES_MOST 1024
typedef struct ms_cores { /* a set of cores, by the system's numbers */
    uint64_t words[MS_CORES_MOST / 64];
} ms_cores;

typedef struct ms_node_id {
    char name[64];
    char identity[256]; /* the same for processes of one node, and for no others */
} ms_node_id;

#define MS_TCP_AWAIT_MOST 256 /* files of one tcp_await */

/* Functions answer 0 or a count on success and -errno on failure, or NULL where they return a
 * pointer. All are thread-safe. */
typedef struct ms_os {
    void *user;
    /* memory: alignment is a power of two >= 16; release takes a pointer that allocate or
     * reallocate returned, or NULL */
    void *(*allocate)(void *user, size_t bytes, size_t alignment);
    /* Alignment 16; pointer from allocate with alignment 16. */
    void *(*reallocate)(void *user, void *pointer, size_t bytes);
    void (*release)(void *user, void *pointer);
    /* address space: reserve returns a range of addresses without pages; commit makes a part of it
     * usable (zeroed; with huge pages if asked and possible) or answers -ENOMEM */
    void *(*reserve)(void *user, size_t bytes);
    int (*commit)(void *user, void *address, size_t bytes, bool huge);
    /* The opposite of commit, for whole pages: it answers 0, or -errno and has changed nothing. */
    int (*decommit)(void *user, void *address, size_t bytes);
    void (*unreserve)(void *user, void *address, size_t bytes);
    /* files: offsets and counts in bytes; read and write may move less than asked (0 from read: end
     * of file) */
    int (*open)(void *user, const char *path, int flags, ms_file **out);
    int64_t (*read)(void *user, ms_file *file, void *buffer, size_t bytes, uint64_t offset);
    int64_t (*write)(void *user, ms_file *file, const void *buffer, size_t bytes, uint64_t offset);
    int (*sync)(void *user, ms_file *file);
    /* exclusive; does not wait: -EWOULDBLOCK if another process holds the lock */
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
    /* memory that several processes map: files without names, which vanish with their last user. A
     * new file is zero and has no pages yet. map maps the whole file. populate allocates the pages
     * of a mapped range; it answers -ENOMEM where touching the pages would raise a signal. share:
     * sets whether programs that this process starts inherit the descriptor, and answers the
     * descriptor's number. adopt: opens an inherited descriptor in such a program. Close with
     * close, unmap with unreserve. */
    int (*shared_create)(void *user, const char *name, uint64_t bytes, ms_file **out);
    int (*shared_share)(void *user, ms_file *file, bool inherit);
    int (*shared_adopt)(void *user, int descriptor, ms_file **out);
    void *(*shared_map)(void *user, ms_file *file, uint64_t bytes);
    int (*shared_populate)(void *user, ms_file *file, void *address, uint64_t offset,
                           uint64_t bytes);
    /* claim: this process holds the numbered place of a shared file until it closes the file or
     * ends, in any way. is_claimed: 1 if another process holds the place, else 0 */
    int (*shared_claim)(void *user, ms_file *file, uint64_t place);
    int (*shared_is_claimed)(void *user, ms_file *file, uint64_t place);
    /* sockets of this machine, by path, between processes of one user. Messages arrive whole. A
     * path that begins with "@" is a name without a file, which goes with its process. listen
     * replaces a socket that a crash left at the path (-EADDRINUSE: a process listens
     * there). accept and receive wait for at most timeout_ns (-ETIMEDOUT). accept, and connect to a
     * name, answer -EACCES for another user's process, whose connection is closed. connect does not
     * wait (-ENOENT, -ECONNREFUSED: no process listens). A message may carry files. receive answers
     * the message's length, or 0 when the peer has closed. */
    int (*socket_listen)(void *user, const char *path, ms_file **out);
    int (*socket_accept)(void *user, ms_file *listener, uint64_t timeout_ns, ms_file **out);
    int (*socket_connect)(void *user, const char *path, ms_file **out);
    int (*socket_send)(void *user, ms_file *socket, const void *message, size_t bytes,
                       ms_file *const *files, uint32_t count);
    int64_t (*socket_receive)(void *user, ms_file *socket, void *message, size_t bytes,
                              uint64_t timeout_ns, ms_file **files, uint32_t most, uint32_t *count);
    /* Threads that wait on the socket come back with an error; it stays open. */
    void (*socket_end)(void *user, ms_file *socket);
    /* connections to other nodes. address NULL: all interfaces; *port 0: the system chooses, and
     * *port receives it. connect takes a name or an address (-EHOSTUNREACH: the name is unknown).
     * accept, connect, send and receive wait for at most timeout_ns (-ETIMEDOUT). send and receive
     * move all bytes or fail; -ECONNRESET: the peer has closed. After -ETIMEDOUT of receive the
     * connection is as it was, and after any other error of the two it is of no use. */
    int (*tcp_listen)(void *user, const char *address, uint16_t *port, ms_file **out);
    int (*tcp_accept)(void *user, ms_file *listener, uint64_t timeout_ns, ms_file **out);
    int (*tcp_connect)(void *user, const char *name, uint16_t port, uint64_t timeout_ns,
                       ms_file **out);
    int (*tcp_send)(void *user, ms_file *socket, const void *message, size_t bytes,
                    uint64_t timeout_ns);
    int (*tcp_receive)(void *user, ms_file *socket, void *message, size_t bytes,
                       uint64_t timeout_ns);
    /* Of many at once, each a listener or a connection: await waits until a visitor, bytes or an
     * end have come to one of them at least, and says to which. take answers how many bytes had
     * come, at most `bytes`, and does not wait: -EAGAIN: none; -ECONNRESET: the peer has closed. */
    int (*tcp_await)(void *user, ms_file *const *files, uint32_t count, uint64_t timeout_ns,
                     bool *ready);
    int64_t (*tcp_take)(void *user, ms_file *socket, void *message, size_t bytes);
    /* Each address at which this node can be reached, the likeliest for other nodes first. */
    int (*addresses)(void *user, void (*one)(void *to, const char *interface, const char *address),
                     void *to);
    int (*node_id)(void *user, ms_node_id *out);
    /* time */
    uint64_t (*monotonic_ns)(void *user);
    uint64_t (*realtime_ns)(void *user); /* since 1970, UTC */
    /* threads and process */
    int (*thread_start)(void *user, const char *name, void (*run)(void *), void *argument,
                        ms_os_thread **out);
    void (*thread_join)(void *user, ms_os_thread *thread); /* waits, then frees */
    /* core: index among the cores that this process may use */
    int (*thread_pin)(void *user, ms_os_thread *thread, uint32_t core);
    /* cores: those that the calling thread may use. keep_to: it, and threads that it starts from
     * then on, use no others. */
    int (*cores)(void *user, ms_cores *out);
    int (*keep_to)(void *user, const ms_cores *cores);
    int (*machine)(void *user, ms_machine *out);
    int (*entropy)(void *user, void *buffer, size_t bytes);
    int64_t (*process_id)(void *user);
    const char *(*environment)(void *user, const char *name); /* NULL if unset */
    /* shared libraries: with local symbols, all bound at once. NULL: it cannot be loaded, and `why`
     * says so. symbol: the address of a function; NULL: it has none of that name. close: functions
     * of the library are not called any more; it is unloaded, unless others use it. What it has
     * loaded itself may stay, and is then found by its name before any file. load_apart: with
     * copies of all that it needs, which no other library finds, for a look at it; where the system
     * cannot do that, and where the process has loaded it already, it is library_load. */
    void *(*library_load)(void *user, const char *path, char *why, size_t bytes);
    void *(*library_load_apart)(void *user, const char *path, char *why, size_t bytes);
    void (*(*library_symbol)(void *user, void *library, const char *name))(void);
    void (*library_close)(void *user, void *library);
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
/* Records an error (one line, formatted as printf) and returns status. All other fields of the
 * record are cleared. */
MS_API ms_status ms_fail(ms_context *context, ms_status status, const char *format, ...)
    MS_PRINTF(3, 4);
/* The status for an errno of a call of the table (ENOENT: MS_ERROR_NOT_FOUND ...), with "what
 * 'path': reason". errno_negative: -errno. */
MS_API ms_status ms_fail_os(ms_context *context, int errno_negative, const char *what,
                            const char *path);
MS_API void ms_log(ms_context *context, ms_log_level level, const char *format, ...)
    MS_PRINTF(3, 4);

/* ----------------------------------------------------------------- activity */

/* The progress of a host thread and its workers, and the position of its script: hints for ranks
 * and supervisors that wait for them. The record may be in memory that other processes map. No
 * function here blocks or fails. NULL is allowed in the functions that the rank itself calls. */
#define MS_LINE_BYTES 160
typedef enum ms_whereabouts {
    MS_WHERE_UNKNOWN,
    MS_WHERE_SCRIPT,
    MS_WHERE_FINALIZER
} ms_whereabouts;
typedef struct ms_activity_state {
    /* Grows when the host makes a call or leaves a long one, when a task runs, and when bytes
     * move. */
    uint64_t progress;
    bool busy;                /* the host is inside a call that may take long */
    uint32_t heard, answered; /* numbers of the last questions that its thread heard and answered */
    ms_whereabouts place;     /* at the last question heard */
    int32_t thread;           /* the system's number of the host thread; 0: not known */
    char line[MS_LINE_BYTES]; /* the script's last known position: "file.lua:12", or "" */
} ms_activity_state;
/* Called by the host. host: records its thread. call: records a call into the engine from this
 * script line (NULL: the same line as before). */
MS_API void ms_activity_host(ms_activity *activity, int32_t thread);
MS_API void ms_activity_call(ms_activity *activity, const char *line);
/* From any thread: records progress. */
MS_API void ms_activity_done(ms_activity *activity);
/* Called by the host around calls that may take long: waits for the device, file access. */
MS_API void ms_activity_begin(ms_activity *activity);
MS_API void ms_activity_end(ms_activity *activity);
/* ask: another thread asks for the script's position and gets the question's number. hear: the
 * asked thread has received the question; a signal handler may call this. answer: the asked thread
 * gives the line; false if the last question has been answered already. */
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

/* A table of strings. Each string is stored once and lives as long as the table. ids count from 1;
 * id 0 is "". One thread at a time. */
typedef struct ms_strings ms_strings;
MS_API ms_status ms_strings_new(ms_context *context, ms_strings **out);
MS_API void ms_strings_free(ms_strings *strings);
MS_API ms_status ms_strings_add(ms_strings *strings, const char *text, size_t bytes, uint32_t *id);
MS_API const char *ms_strings_get(const ms_strings *strings, uint32_t id);

/* -------------------------------------------------------------------- cores */

/* A list as Linux writes it: "0-15,32-47". False: it is none, and *out is unchanged. Cores of
 * higher numbers than the set has are left out. */
MS_API bool ms_cores_read(const char *text, ms_cores *out);
/* The same list, cut off at a comma where it is too long. */
MS_API void ms_cores_write(const ms_cores *cores, char *text, size_t bytes);
MS_API uint32_t ms_cores_count(const ms_cores *cores);
MS_API bool ms_cores_have(const ms_cores *cores, uint32_t core);
MS_API ms_cores ms_cores_both(const ms_cores *a, const ms_cores *b);
/* Part number `position` of `parts` equal ones: a run of neighbours, which usually share caches.
 * Empty if there are fewer cores than parts. */
MS_API ms_cores ms_cores_share(const ms_cores *cores, uint32_t position, uint32_t parts);

/* ----------------------------------------------------------- random numbers */

/* Philox 4x32-10 (Salmon et al. 2011): the multipliers, and the increments of the key, which are
 * the fractions of the golden ratio and of the root of 3. */
#define MS_PHILOX_ROUNDS 10
#define MS_PHILOX_FACTOR0 0xD2511F53u
#define MS_PHILOX_FACTOR1 0xCD9E8D57u
#define MS_PHILOX_KEY0 0x9E3779B9u
#define MS_PHILOX_KEY1 0xBB67AE85u

/* Four 32-bit numbers from a key and a counter; no state, so draws never depend on threads. */
MS_EVERYWHERE void ms_philox(uint64_t key, uint64_t high, uint64_t low, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32), c2 = (uint32_t)high,
             c3 = (uint32_t)(high >> 32);
    for (int round = 0; round < MS_PHILOX_ROUNDS; round++) {
        uint64_t p0 = (uint64_t)MS_PHILOX_FACTOR0 * c0, p1 = (uint64_t)MS_PHILOX_FACTOR1 * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += MS_PHILOX_KEY0;
        k1 += MS_PHILOX_KEY1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* ------------------------------------------------------------------- dtypes */

MS_EVERYWHERE float ms_float_from_bits(uint32_t bits)
{
    union {
        uint32_t u;
        float f;
    } x = { .u = bits };
    return x.f;
}
MS_EVERYWHERE uint32_t ms_bits_from_float(float value)
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
