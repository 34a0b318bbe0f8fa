/* moonshard/io.h: files, safetensors, data sets and their loaders, checkpoints.
 *
 * Invariants
 * - A written file appears as a whole or not at all: data go to a temporary file in the same
 *   folder, which is synced and then renamed. After a failed sync nothing is retried: the data may
 *   be lost although a second sync would succeed.
 * - Files are untrusted input: sizes are checked before they are used, nothing is executed, names
 *   in files are never used as paths, and nothing is mapped into memory (a mapped file that shrinks
 *   would kill the process).
 * - Data sets hold their data in memory and never change. The order of samples is a function of
 *   (seed, epoch, position), so these three numbers restore a loader, at any world size.
 * - Functions that touch no tensors take a context instead of an engine, so they can run on threads
 *   of their own.
 * - Messages name the file and, where it applies, the tensor, the byte and the rule. */
#ifndef MOONSHARD_IO_H
#define MOONSHARD_IO_H

#include "moonshard/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* -------------------------------------------------------------------- files */

/* The whole file, followed by a zero byte that `bytes` does not count; release with ms_release.
 * More than `limit` bytes: MS_ERROR_CORRUPT. */
MS_API ms_status ms_file_read_all(ms_context *context, const char *path, uint64_t limit, void **out,
                                  size_t *bytes);
/* Replaces path by these bytes, durably, or leaves it as it was. */
MS_API ms_status ms_file_write_atomic(ms_context *context, const char *path, const void *data,
                                      size_t bytes);

/* flags: MS_FILE_*. Read and write move all bytes or fail; fewer bytes in the file than asked for:
 * MS_ERROR_CORRUPT. */
MS_API ms_status ms_file_open(ms_context *context, const char *path, int flags, ms_file **out);
MS_API ms_status ms_file_read(ms_context *context, ms_file *file, const char *path, void *buffer,
                              size_t bytes, uint64_t offset);
MS_API ms_status ms_file_write(ms_context *context, ms_file *file, const char *path,
                               const void *data, size_t bytes, uint64_t offset);
/* Adds a record to a file opened with MS_FILE_APPEND, as a whole or not at all. One process at a
 * time may append. Not synced. */
MS_API ms_status ms_file_append(ms_context *context, ms_file *file, const char *path,
                                const void *data, size_t bytes);
MS_API void ms_file_close(ms_context *context, ms_file *file); /* NULL is allowed */

/* Text of JSON in which ".0" follows each integer beyond 64 bits, so that a parser reads a real.
 * Other programs write such integers (a tokenizer without a longest text: 10^30). Returns the bytes
 * that the text has then: `bytes` if there is no such integer. They are written to `out`, unless it
 * is NULL. Strings are left alone, and so is what is no JSON. */
MS_API size_t ms_json_big_integers(const char *text, size_t bytes, char *out);

/* Opens the file, creates it if it does not exist, and locks it for as long as it stays open. Its
 * text then names the process that holds the lock. MS_ERROR_DENIED if another process holds it; the
 * message names that process. */
MS_API ms_status ms_file_lock(ms_context *context, const char *path, ms_file **out);
/* Whether another open file has this lock. A file that does not exist has none. To find out, it is
 * locked for an instant: a process that asks for the lock just then waits a little, see
 * ms_file_lock. */
MS_API ms_status ms_file_is_locked(ms_context *context, const char *path, bool *locked);

/* A file that appears as a whole: write in any order, then commit. Freed without a commit, it
 * leaves nothing. */
typedef struct ms_writer ms_writer;
MS_API ms_status ms_writer_new(ms_context *context, const char *path, ms_writer **out);
MS_API ms_status ms_writer_write(ms_writer *writer, const void *data, size_t bytes,
                                 uint64_t offset);
MS_API ms_status ms_writer_commit(ms_writer *writer); /* once */
MS_API void ms_writer_free(ms_writer *writer);        /* NULL is allowed */

/* A list of strings that it owns. */
typedef struct ms_names {
    char **items;
    size_t count, capacity;
} ms_names;
MS_API ms_status ms_names_add(ms_context *context, ms_names *names, const char *name);
MS_API void ms_names_sort(ms_names *names);                      /* by bytes */
MS_API void ms_names_free(ms_context *context, ms_names *names); /* leaves it empty */

/* Makes the folder and its parents. An existing folder is success. */
MS_API ms_status ms_folder_make(ms_context *context, const char *path);
/* Adds the names in the folder, sorted. */
MS_API ms_status ms_folder_list(ms_context *context, const char *path, ms_names *out);
/* Removes the folder and the files in it; it must hold no folders. */
MS_API ms_status ms_folder_remove(ms_context *context, const char *path);
/* Makes the names in the folder durable. */
MS_API ms_status ms_folder_sync(ms_context *context, const char *path);
/* Renames and syncs the folder that both are in. */
MS_API ms_status ms_folder_rename(ms_context *context, const char *from, const char *to);

/* -------------------------------------------------------------- safetensors */

#define MS_SAFETENSORS_HEADER_MAX (32u << 20)
#define MS_SAFETENSORS_COUNT_MAX 1000000u
#define MS_SAFETENSORS_DIMS_MAX 16
#define MS_SAFETENSORS_NAME_MAX 1024

/* A tensor of a file. Strings and shape live as long as the reader. */
typedef struct ms_safetensors_entry {
    const char *name;
    const char *dtype_name; /* "f32"; also of dtypes that the engine does not have ("f64") */
    const int64_t *shape;
    uint32_t dims;
    bool supported; /* the engine has the dtype, and dims <= MS_DIMS_MAX */
    ms_dtype dtype;
    uint64_t offset, bytes; /* in the file */
} ms_safetensors_entry;

typedef struct ms_safetensors ms_safetensors;
/* Reads and checks the header; tensors are read one by one. Anything that breaks a rule of the
 * format, or a limit above: MS_ERROR_CORRUPT. */
MS_API ms_status ms_safetensors_open(ms_context *context, const char *path, ms_safetensors **out);
MS_API void ms_safetensors_close(ms_safetensors *file); /* NULL is allowed */
MS_API uint32_t ms_safetensors_count(const ms_safetensors *file);
/* In order of names. */
MS_API const ms_safetensors_entry *ms_safetensors_at(const ms_safetensors *file, uint32_t index);
/* NULL if there is none */
MS_API const ms_safetensors_entry *ms_safetensors_find(const ms_safetensors *file,
                                                       const char *name);
/* Metadata by index; false past the last. */
MS_API bool ms_safetensors_metadata(const ms_safetensors *file, uint32_t index, const char **key,
                                    const char **value);
/* All entry->bytes of one tensor, as they are in the file. The error goes to `context`, which may
 * be another thread's than open's. */
MS_API ms_status ms_safetensors_read(ms_context *context, ms_safetensors *file,
                                     const ms_safetensors_entry *entry, void *buffer);
/* A new tensor with that content; hash (may be NULL) gets the ms_hash of its bytes with seed 0. */
MS_API ms_status ms_safetensors_load(ms_engine *engine, ms_safetensors *file,
                                     const ms_safetensors_entry *entry, uint64_t *hash,
                                     ms_tensor **out);

/* Hashes of a tensor's content may be of blocks, so that a part can be checked by itself. */
#define MS_SAFETENSORS_BLOCK (1u << 20)
/* Blocks of that many bytes; the last may be shorter. */
static inline uint32_t ms_safetensors_blocks(size_t bytes)
{
    return (uint32_t)((bytes + MS_SAFETENSORS_BLOCK - 1) / MS_SAFETENSORS_BLOCK);
}

/* Elements [first, first + count) of a tensor, which has them, into a tensor of that length and of
 * the entry's dtype. hashes: the ms_hash with seed 0 of each MS_SAFETENSORS_BLOCK bytes of the
 * whole content, or of all of it if hash_count is 1; those of blocks that the part touches are
 * compared. NULL: none are. into NULL: the part is only checked. MS_ERROR_CORRUPT for other bytes,
 * or another number of hashes. */
MS_API ms_status ms_safetensors_read_part(ms_engine *engine, ms_safetensors *file,
                                          const ms_safetensors_entry *entry, int64_t first,
                                          int64_t count, const uint64_t *hashes,
                                          uint32_t hash_count, ms_tensor *into);
/* A hash of a tensor's dtype and of some of its bytes (at its beginning, middle and end), which
 * tells trained weights apart though little is read. On the sim device, of the dtype alone. */
MS_API ms_status ms_safetensors_sample(ms_engine *engine, ms_safetensors *file,
                                       const ms_safetensors_entry *entry, uint64_t *hash);

/* What is to be written. */
typedef struct ms_safetensors_spec {
    const char *name;
    ms_dtype dtype;
    uint32_t dims;
    const int64_t *shape;
} ms_safetensors_spec;

typedef struct ms_safetensors_writer ms_safetensors_writer;
/* Fixes the header; the same specs in any order give the same file. Names must differ. metadata:
 * `pairs` times key, value; strings in UTF-8. */
MS_API ms_status ms_safetensors_create(ms_context *context, const char *path,
                                       const ms_safetensors_spec *specs, uint32_t count,
                                       const char *const *metadata, uint32_t pairs,
                                       ms_safetensors_writer **out);
/* All bytes of specs[index], in any order of indices. */
MS_API ms_status ms_safetensors_write(ms_safetensors_writer *writer, uint32_t index,
                                      const void *data, size_t bytes);
/* Every tensor must have been written. */
MS_API ms_status ms_safetensors_commit(ms_safetensors_writer *writer);
/* NULL is allowed; without a commit nothing is left */
MS_API void ms_safetensors_free(ms_safetensors_writer *writer);
/* The file of these tensors; blocks until each has its value. */
MS_API ms_status ms_safetensors_save(ms_engine *engine, const char *path, const char *const *names,
                                     ms_tensor *const *tensors, uint32_t count,
                                     const char *const *metadata, uint32_t pairs);

/* ------------------------------------------------------- data sets, loaders */

/* Tokens in a row, or images with labels. Reference counted; retain and release from any thread. */
typedef struct ms_dataset ms_dataset;
/* The bytes of files, and of all files below folders in order of their paths; names that begin with
 * a dot are passed over. */
MS_API ms_status ms_dataset_bytes(ms_context *context, const char *const *paths, uint32_t count,
                                  ms_dataset **out);
/* Token shards, one after the other: those of llm.c (a header of 1,024 bytes, then u16 or u32) or
 * of nanoGPT (u16 and nothing else). A file NAME.mask beside NAME.bin has a bit a token, from the
 * lowest of each byte on: where it is 0, the token is no target, and -100 in y of a batch. Without
 * such a file all tokens are targets. */
MS_API ms_status ms_dataset_tokens(ms_context *context, const char *const *paths, uint32_t count,
                                   ms_dataset **out);
/* MNIST's idx files, plain or compressed by gzip: images u8 [n, rows, columns], labels u8 [n]. */
MS_API ms_status ms_dataset_images(ms_context *context, const char *images, const char *labels,
                                   ms_dataset **out);
MS_API ms_dataset *ms_dataset_retain(ms_dataset *dataset);
MS_API void ms_dataset_release(ms_dataset *dataset);        /* NULL is allowed */
MS_API uint64_t ms_dataset_size(const ms_dataset *dataset); /* tokens or images */
MS_API bool ms_dataset_has_tokens(const ms_dataset *dataset);
/* Whether it was read with a mask. */
MS_API bool ms_dataset_is_masked(const ms_dataset *dataset);
/* What of the data, of which a split may be a part, comes from shards without a header: nothing in
 * such a file says that it is one. */
typedef struct ms_bare_shards {
    uint32_t files, largest; /* largest: of the ids */
    uint64_t tokens;
} ms_bare_shards;
MS_API ms_bare_shards ms_dataset_bare(const ms_dataset *dataset);
/* Bytes of its data, which parts of one data set share: *data is the same for them. */
MS_API uint64_t ms_dataset_memory(const ms_dataset *dataset, const void **data);
/* The first floor(fraction * size), and the rest; both share the data. fraction is within 0 and 1.
 * A decimal fraction has its exact decimal value: 0.29 of 100 are 29. */
MS_API ms_status ms_dataset_split(ms_context *context, ms_dataset *dataset, double fraction,
                                  ms_dataset **first, ms_dataset **rest);

typedef struct ms_loader_options {
    uint32_t batch;  /* samples of one pass over all ranks */
    uint32_t length; /* tokens of a sample; 0 for images */
    bool shuffle;
    /* Tokens only: batches have positions, by which attention stays inside of a document. A
     * document ends with the id end_of_text, which is read only if packed. */
    bool packed;
    int64_t end_of_text;
    uint64_t seed;
    uint32_t rank, ranks; /* ranks 0: 1 */
} ms_loader_options;

/* position: how many samples of the epoch all ranks together have been given. samples: the number
 * of samples in an epoch, by which a state of other data is recognised. */
typedef struct ms_loader_state {
    uint64_t seed, epoch, position, samples;
} ms_loader_state;

/* Host memory of one rank's part of a batch. Tokens: x and y i64 [rows, length], y one token later
 * and -100 where it is no target. Images: x f32 [rows, height, width] in 0 .. 1, y i64 [rows].
 * Packed: positions i64 of x's shape and bytes, from 0 at the start of each row and after each end
 * of text in x; else NULL. */
typedef struct ms_batch {
    void *x, *y, *positions;
    size_t x_bytes, y_bytes;
    uint32_t rows;
} ms_batch;

typedef struct ms_loader ms_loader;
/* MS_ERROR_ARGUMENT: batch does not divide by the ranks, length does not fit the data, packed
 * images, an end_of_text that no token of the data can be. One thread at a time uses a loader. */
MS_API ms_status ms_loader_new(ms_context *context, ms_dataset *dataset,
                               const ms_loader_options *options, ms_loader **out);
MS_API void ms_loader_free(ms_loader *loader); /* NULL is allowed */
/* Bytes of the batches that it prepares, without its data; 0 before the first ms_loader_next. */
MS_API uint64_t ms_loader_memory(const ms_loader *loader);
/* Shape and dtype of x (at most 3 dimensions) for that many rows; y is i64 [rows, length] or
 * [rows]. */
MS_API uint32_t ms_loader_shape(const ms_loader *loader, uint32_t rows, ms_dtype *dtype,
                                int64_t shape[3]);
MS_API uint32_t ms_loader_rows(const ms_loader *loader); /* of one rank in a full batch */
MS_API bool ms_loader_is_packed(const ms_loader *loader);
MS_API bool ms_loader_is_masked(const ms_loader *loader);
/* The next batch, without end: after an epoch's last sample comes the next epoch's first. It is
 * valid until the next call on this loader. A thread, started by the first call, prepares
 * batches. */
MS_API ms_status ms_loader_next(ms_context *context, ms_loader *loader, ms_batch *out);
/* MS_ERROR_ARGUMENT if there are fewer samples than ranks: ms_loader_batch would then give no rank
 * a sample. */
MS_API ms_status ms_loader_check_pass(ms_context *context, const ms_loader *loader);
/* Writes batch `index` of epoch 0 into memory of the caller (x_bytes and y_bytes: its size; for
 * positions of a packed loader there are x_bytes, too), independent of ms_loader_next. The last
 * batch may be shorter; past it rows is 0. */
MS_API ms_status ms_loader_batch(ms_context *context, const ms_loader *loader, uint64_t index,
                                 ms_batch *out);
/* The state after the last batch that ms_loader_next returned; batches that were read ahead do not
 * count. */
MS_API ms_loader_state ms_loader_get_state(const ms_loader *loader);
/* The next batch is the one that follows this state. MS_ERROR_MISMATCH, and no change, if it is the
 * state of other data or of another length. */
MS_API ms_status ms_loader_set_state(ms_context *context, ms_loader *loader, ms_loader_state state);

/* -------------------------------------------------------------- checkpoints */

/* Values of tensors at one moment, in host memory, so that they can be written while training
 * continues. */
typedef struct ms_snapshot ms_snapshot;
/* Blocks until each tensor has its value. */
MS_API ms_status ms_snapshot_new(ms_engine *engine, const char *const *names,
                                 ms_tensor *const *tensors, uint32_t count, ms_snapshot **out);
/* ms_hash of the tensor's bytes, seed 0, then that of each of its ms_safetensors_blocks. The
 * snapshot owns them. */
MS_API const uint64_t *ms_snapshot_hashes(const ms_snapshot *snapshot, uint32_t index);
MS_API void ms_snapshot_free(ms_snapshot *snapshot); /* NULL is allowed */

#define MS_CHECKPOINT_TENSORS "tensors.safetensors"
#define MS_CHECKPOINT_MANIFEST "manifest.json"

/* Writes folder/name with the two files above. All is synced under a temporary name, then the
 * folder is renamed: a crash leaves the whole checkpoint or nothing. An older one of the same name
 * is replaced. Temporary folders that crashed saves have left are removed first. */
MS_API ms_status ms_checkpoint_write(ms_context *context, const ms_snapshot *snapshot,
                                     const char *folder, const char *name, const void *manifest,
                                     size_t bytes);
/* The same where several processes write files of one checkpoint. One begins: it sweeps the folder
 * and makes the temporary one. Then each writes its files, synced. Once all have, the first
 * commits: it adds the manifest and renames the folder; or it discards what there is. A crash
 * before the rename leaves an older checkpoint as it was. */
MS_API ms_status ms_checkpoint_begin(ms_context *context, const char *folder, const char *name);
/* The tensors go to the file one after the other, so host memory is that of the largest. Blocks
 * until each has its value. hashes: for each tensor the ms_hash of its bytes, then that of each of
 * its ms_safetensors_blocks; with room for all of them. */
MS_API ms_status ms_checkpoint_write_part(ms_context *context, const char *const *names,
                                          ms_tensor *const *tensors, uint32_t count,
                                          const char *folder, const char *name, const char *file,
                                          uint64_t *hashes);
MS_API ms_status ms_checkpoint_commit(ms_context *context, const char *folder, const char *name,
                                      const void *manifest, size_t bytes);
MS_API ms_status ms_checkpoint_discard(ms_context *context, const char *folder, const char *name);
/* Restores a checkpoint that a crash during its replacement has left under its temporary name, and
 * removes temporary folders. */
MS_API ms_status ms_checkpoint_sweep(ms_context *context, const char *folder);

/* Removes folder/name. A crash leaves the whole checkpoint, or nothing that looks like one. */
MS_API ms_status ms_checkpoint_remove(ms_context *context, const char *folder, const char *name);
/* Renames folder/name to folder/to, durably. folder/to must not exist, or be an empty folder. */
MS_API ms_status ms_checkpoint_rename(ms_context *context, const char *folder, const char *name,
                                      const char *to);

/* ms_checkpoint_write on a thread of its own; the application may remove others from the folder
 * meanwhile. Takes the snapshot over if it succeeds. */
typedef struct ms_checkpoint_job ms_checkpoint_job;
MS_API ms_status ms_checkpoint_start(ms_context *context, ms_snapshot *snapshot, const char *folder,
                                     const char *name, const void *manifest, size_t bytes,
                                     ms_checkpoint_job **out);
/* Whether the thread has ended its work, so that ms_checkpoint_wait does not block for long. */
MS_API bool ms_checkpoint_is_done(const ms_checkpoint_job *job);
/* Blocks until the checkpoint is written, frees the job, and returns the status of the write. */
MS_API ms_status ms_checkpoint_wait(ms_context *context, ms_checkpoint_job *job);

#ifdef __cplusplus
}
#endif
#endif
